#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

PyTypeObject *event_type;
static PyTypeObject *blob_type;

/* ---- a received blob: lives as long as anybody looks at it ---- */
struct py_blob {
    PyObject_HEAD void *data; /* of an event: taken from it */
    size_t bytes;
    struct furlong_answer answer; /* else the answer that holds it */
    bool of_answer;
};

static PyObject *blob_new(void *data, size_t bytes)
{
    struct py_blob *b = (struct py_blob *)core_new(blob_type);

    if (b) {
        b->data = data;
        b->bytes = bytes;
    }
    return (PyObject *)b;
}

static PyObject *seen(PyObject *blob_take)
{
    PyObject *view = blob_take ? PyMemoryView_FromObject(blob_take) : NULL;

    Py_XDECREF(blob_take);
    return view;
}

PyObject *blob_of_event(struct furlong_call *c, size_t bytes)
{
    void *data = furlong_take_blob(c);
    PyObject *b = blob_new(data, data ? bytes : 0);

    if (!b)
        furlong_blob_free(data);
    return seen(b);
}

PyObject *blob_of_answer(struct furlong_answer *a)
{
    struct py_blob *b = (struct py_blob *)blob_new((void *)(uintptr_t)a->blob, a->blob_bytes);

    if (b) {
        b->answer = *a;
        b->of_answer = true;
    } else {
        furlong_answer_free(a);
    }
    return seen((PyObject *)b);
}

static void blob_dealloc(PyObject *self)
{
    struct py_blob *b = (struct py_blob *)self;

    if (b->of_answer)
        furlong_answer_free(&b->answer);
    else
        furlong_blob_free(b->data);
    core_free(self);
}

static int blob_buffer(PyObject *self, Py_buffer *view, int flags)
{
    static char none[1];
    struct py_blob *b = (struct py_blob *)self;

    return PyBuffer_FillInfo(view, self, b->data ? b->data : none, (Py_ssize_t)b->bytes, 0, flags);
}

/* ---- the event ---- */
struct py_event {
    PyObject_HEAD struct py_run *run;
    struct furlong_call *call; /* NULL: answered */
    enum furlong_what what;
    uint32_t tags, budget_ms;
    uint64_t version, bytes;
    PyObject *method, *sender, *body, *blob;
};

PyObject *event_make(PyObject *cls, struct py_run *r, const struct furlong_event *ev)
{
    struct py_event *e = (struct py_event *)core_new((PyTypeObject *)cls);

    if (!e) {
        furlong_refuse(ev->call, &(struct fl_err){ .status = FL_EXHAUSTED,
                                                   .text = "no memory for the event" });
        return NULL;
    }
    Py_INCREF((PyObject *)r);
    e->run = r;
    e->call = ev->call;
    e->what = ev->what;
    e->tags = ev->tags;
    e->budget_ms = ev->budget_ms;
    e->version = ev->version;
    e->bytes = ev->bytes;
    e->method = PyUnicode_DecodeUTF8(ev->method, (Py_ssize_t)strlen(ev->method), "replace");
    e->sender = PyUnicode_DecodeUTF8(ev->from, (Py_ssize_t)strlen(ev->from), "replace");
    e->body = PyBytes_FromStringAndSize(ev->body, (Py_ssize_t)ev->body_bytes);
    e->blob = blob_of_event(ev->call, ev->blob_bytes);
    if (e->method && e->sender && e->body && e->blob)
        return (PyObject *)e;
    Py_DECREF((PyObject *)e); /* refuses it */
    return NULL;
}

/* Exactly once also between threads: the call is taken under the GIL, then answered without it. */
struct furlong_call *event_take(PyObject *self, struct py_run **run)
{
    struct py_event *e = (struct py_event *)self;
    struct furlong_call *c = e->call;

    if (!c) {
        core_fail(FL_INVALID, "%s has been answered already",
                  e->what == FURLONG_CALL ? "the call" : "the event");
        return NULL;
    }
    if (!run_enter(e->run))
        return NULL;
    e->call = NULL;
    *run = e->run;
    return c;
}

void event_put_back(PyObject *self, struct furlong_call *c)
{
    ((struct py_event *)self)->call = c;
}

static void event_dealloc(PyObject *self)
{
    struct py_event *e = (struct py_event *)self;

    if (e->call && e->run->f && !e->run->leaving) /* else leaving has refused it */
        furlong_refuse(e->call,
                       &(struct fl_err){ .status = FL_INTERNAL,
                                         .text = "the event was dropped without an answer" });
    Py_XDECREF(e->method);
    Py_XDECREF(e->sender);
    Py_XDECREF(e->body);
    Py_XDECREF(e->blob);
    Py_XDECREF((PyObject *)e->run);
    core_free(self);
}

static PyObject *event_reply(PyObject *self, PyObject *args)
{
    PyObject *body, *blob;
    Py_buffer b, l;
    struct furlong_call *c = NULL;
    struct py_run *r;

    if (!PyArg_ParseTuple(args, "OO", &body, &blob) || !core_bytes(body, "body", &b))
        return NULL;
    if (b.len > FURLONG_BODY_MAX)
        core_fail(FL_INVALID, "a body of %zd bytes, at most %u: put bulk in the blob", b.len,
                  FURLONG_BODY_MAX);
    else if (core_bytes(blob, "blob", &l)) {
        c = event_take(self, &r);
        if (c) {
            struct furlong_data d = { b.buf, (size_t)b.len, l.buf, (size_t)l.len };

            Py_BEGIN_ALLOW_THREADS furlong_reply_data(c, &d);
            Py_END_ALLOW_THREADS run_exit(r);
        }
        core_bytes_fini(&l);
    }
    core_bytes_fini(&b);
    if (!c)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *event_refuse(PyObject *self, PyObject *args)
{
    struct fl_err why = { 0 };
    struct furlong_call *c;
    struct py_run *r;
    const char *text;
    int status;

    if (!PyArg_ParseTuple(args, "is", &status, &text))
        return NULL;
    if (status <= FL_OK || status >= FL_STATUS_COUNT)
        return core_fail(FL_INVALID, "refuse: %d is no status of a failure", status);
    why.status = (enum fl_status)status;
    snprintf(why.text, sizeof(why.text), "%s", text);
    c = event_take(self, &r);
    if (!c)
        return NULL;
    Py_BEGIN_ALLOW_THREADS furlong_refuse(c, &why);
    Py_END_ALLOW_THREADS run_exit(r);
    Py_RETURN_NONE;
}

static PyObject *get_what(PyObject *self, void *closure)
{
    static const char *const names[] = {
        [FURLONG_CALL] = "call",       [FURLONG_PAUSE] = "pause",     [FURLONG_COMMIT] = "commit",
        [FURLONG_RESUME] = "resume",   [FURLONG_OFFLOAD] = "offload", [FURLONG_ONLOAD] = "onload",
        [FURLONG_SQUEEZE] = "squeeze", [FURLONG_STOP] = "stop",
    };

    (void)closure;
    return PyUnicode_FromString(names[((struct py_event *)self)->what]);
}

static PyObject *get_object(PyObject *self, void *closure)
{
    PyObject *o = *(PyObject **)(void *)((char *)self + (size_t)(uintptr_t)closure);

    Py_INCREF(o);
    return o;
}

static PyObject *get_tags(PyObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLong(((struct py_event *)self)->tags);
}

static PyObject *get_budget(PyObject *self, void *closure)
{
    uint32_t ms = ((struct py_event *)self)->budget_ms;

    (void)closure;
    if (!ms)
        Py_RETURN_NONE;
    return PyFloat_FromDouble(ms / 1000.0);
}

static PyObject *get_version(PyObject *self, void *closure)
{
    uint64_t v = ((struct py_event *)self)->version;

    (void)closure;
    if (v == FURLONG_NO_VERSION)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(v);
}

static PyObject *get_bytes(PyObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(((struct py_event *)self)->bytes);
}

static PyObject *get_answered(PyObject *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(!((struct py_event *)self)->call);
}

static PyObject *get_unwanted(PyObject *self, void *closure)
{
    struct py_event *e = (struct py_event *)self;

    (void)closure;
    return PyBool_FromLong(!e->call || !e->run->f || e->run->leaving || furlong_unwanted(e->call));
}

static PyObject *event_run(PyObject *self, void *closure)
{
    PyObject *r = (PyObject *)((struct py_event *)self)->run;

    (void)closure;
    Py_INCREF(r);
    return r;
}

#define OBJECT(member) (void *)offsetof(struct py_event, member)
static PyGetSetDef getset[] = {
    { "what", get_what, NULL, NULL, NULL },
    { "method", get_object, NULL, NULL, OBJECT(method) },
    { "sender", get_object, NULL, NULL, OBJECT(sender) },
    { "body", get_object, NULL, NULL, OBJECT(body) },
    { "blob", get_object, NULL, NULL, OBJECT(blob) },
    { "tags", get_tags, NULL, NULL, NULL },
    { "budget", get_budget, NULL, NULL, NULL },
    { "version", get_version, NULL, NULL, NULL },
    { "bytes", get_bytes, NULL, NULL, NULL },
    { "answered", get_answered, NULL, NULL, NULL },
    { "unwanted", get_unwanted, NULL, NULL, NULL },
    { "run", event_run, NULL, NULL, NULL },
    { 0 },
};
static PyMethodDef methods[] = { { "_reply", event_reply, METH_VARARGS, NULL },
                                 { "_refuse", event_refuse, METH_VARARGS, NULL },
                                 { 0 } };

int event_init(PyObject *module)
{
    static PyType_Slot blob_slots[] = { { Py_tp_dealloc, blob_dealloc },
                                        { Py_bf_getbuffer, blob_buffer },
                                        { 0, NULL } };
    static PyType_Spec blob = { "furlong._core.Blob", sizeof(struct py_blob), 0, Py_TPFLAGS_DEFAULT,
                                blob_slots };
    static PyType_Slot slots[] = { { Py_tp_dealloc, event_dealloc },
                                   { Py_tp_methods, methods },
                                   { Py_tp_getset, getset },
                                   { 0, NULL } };
    static PyType_Spec spec = { "furlong._core.Event", sizeof(struct py_event), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots };

    if (core_add_type(module, &blob, &blob_type) < 0)
        return -1;
    return core_add_type(module, &spec, &event_type);
}
