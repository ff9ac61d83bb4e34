#include "core.h"

#include <string.h>

struct words { /* of one ask, as a caller gave them */
    const char *role, *method;
    unsigned rank, lane;
    PyObject *body, *blob, *budget;
    uint32_t budget_ms;
    Py_buffer held[2];
    struct furlong_data d;
    struct furlong_peer *peer;
};

static void words_fini(struct words *w)
{
    core_bytes_fini(&w->held[0]);
    core_bytes_fini(&w->held[1]);
}

/* On failure nothing is held. The seat is entered already. */
static bool words_bind(struct words *w, struct py_run *r)
{
    struct fl_err err = { 0 };

    memset(w->held, 0, sizeof(w->held));
    if (!core_budget(w->budget, &w->budget_ms) ||
        !core_bytes(w->body, "body", &w->held[0]))
        return false;
    if (!core_bytes(w->blob, "blob", &w->held[1])) {
        core_bytes_fini(&w->held[0]);
        return false;
    }
    w->d = (struct furlong_data){ w->held[0].buf, (size_t)w->held[0].len, w->held[1].buf,
                                  (size_t)w->held[1].len };
    if (furlong_peer(r->f, w->role, w->rank, &w->peer, &err) == FL_OK)
        return true;
    words_fini(w);
    core_raise(&err);
    return false;
}

PyObject *answer_tuple(struct furlong_answer *a)
{
    PyObject *body = PyBytes_FromStringAndSize(a->body, (Py_ssize_t)a->body_bytes);
    PyObject *blob = blob_of_answer(a); /* takes it */

    if (body && blob)
        return Py_BuildValue("(NN)", body, blob);
    Py_XDECREF(body);
    Py_XDECREF(blob);
    return NULL;
}

/* ---- one, and wait: asks of one, so that Ctrl-C ends the wait and cancels the call ---- */
static enum fl_status ask_wait(struct py_run *r, struct furlong_asks *a, const struct words *w,
                               struct furlong_done *done, struct fl_err *err)
{
    enum fl_status st =
        furlong_asks_start(a, w->peer, w->lane, w->method, &w->d, w->budget_ms, 0, err);

    if (st != FL_OK)
        return st;
    do {
        Py_BEGIN_ALLOW_THREADS st = furlong_asks_next(a, SLICE_MS, done, err);
        Py_END_ALLOW_THREADS
    } while (st == FL_AGAIN && run_look(r) == 0);
    return st;
}

PyObject *run_ask(PyObject *self, PyObject *args)
{
    struct py_run *r = (struct py_run *)self;
    struct words w;
    struct furlong_asks *a;
    struct furlong_done done = { 0 };
    struct fl_err err = { 0 };
    enum fl_status st = FL_OK;

    if (!PyArg_ParseTuple(args, "sIsOOOI", &w.role, &w.rank, &w.method, &w.body, &w.blob, &w.budget,
                          &w.lane) ||
        !run_enter(r))
        return NULL;
    if (!words_bind(&w, r)) {
        run_exit(r);
        return NULL;
    }
    a = r->spare;
    r->spare = NULL;
    if (!a)
        st = furlong_asks_create(r->f, ASKS_SPARE, &a, &err);
    if (st == FL_OK)
        st = ask_wait(r, a, &w, &done, &err);
    if (st == FL_AGAIN || r->spare) { /* given up: destroying cancels; or another thread left one */
        Py_BEGIN_ALLOW_THREADS furlong_asks_destroy(a);
        Py_END_ALLOW_THREADS
    } else {
        r->spare = a;
    }
    words_fini(&w);
    run_exit(r);
    if (PyErr_Occurred())
        return NULL;
    if (st != FL_OK)
        return core_raise(&err);
    if (done.status != FL_OK)
        return core_raise(&done.err);
    return answer_tuple(&done.answer);
}

/* ---- several in flight ---- */
static PyTypeObject *asks_type;
struct flying { /* what an ask in flight borrows */
    struct flying *next;
    uint64_t number;
    Py_buffer blob;
    PyObject *tag;
};
struct py_asks {
    PyObject_HEAD struct py_run *run;
    struct py_child child;
    struct furlong_asks *a; /* NULL: closed */
    struct flying *flying;
    uint64_t number;
    Py_ssize_t n;
    unsigned inside; /* threads in _next */
};

static void flying_free(struct flying *k)
{
    core_bytes_fini(&k->blob);
    Py_XDECREF(k->tag);
    PyMem_Free(k);
}

static void asks_empty(struct py_child *child)
{
    struct py_asks *s = CORE_OF(struct py_asks, child);
    struct furlong_asks *a = s->a;
    struct flying *k;

    s->a = NULL;
    if (a) {
        Py_BEGIN_ALLOW_THREADS furlong_asks_destroy(a);
        Py_END_ALLOW_THREADS
    }
    while ((k = s->flying)) {
        s->flying = k->next;
        flying_free(k);
    }
    s->n = 0;
}

PyObject *run_asks(PyObject *self, PyObject *args)
{
    struct py_run *r = (struct py_run *)self;
    struct fl_err err = { 0 };
    struct py_asks *s;
    unsigned bound;

    if (!PyArg_ParseTuple(args, "I", &bound) || !run_enter(r))
        return NULL;
    s = (struct py_asks *)core_new(asks_type);
    if (s) {
        Py_INCREF(self);
        s->run = r;
        if (furlong_asks_create(r->f, bound, &s->a, &err) == FL_OK) {
            run_adopt(r, &s->child, asks_empty);
        } else {
            Py_DECREF((PyObject *)s);
            s = NULL;
            core_raise(&err);
        }
    }
    run_exit(r);
    return (PyObject *)s;
}

static bool asks_open(const struct py_asks *s)
{
    if (s->a)
        return true;
    core_fail(FL_CANCELLED, "these asks have been closed");
    return false;
}

static PyObject *asks_start(PyObject *self, PyObject *args)
{
    struct py_asks *s = (struct py_asks *)self;
    struct fl_err err = { 0 };
    struct flying *k;
    struct words w;
    PyObject *tag;
    enum fl_status st = FL_INTERNAL;

    if (!PyArg_ParseTuple(args, "sIsOOOIO", &w.role, &w.rank, &w.method, &w.body, &w.blob,
                          &w.budget, &w.lane, &tag) ||
        !asks_open(s) || !run_enter(s->run))
        return NULL;
    if (words_bind(&w, s->run)) {
        k = PyMem_Calloc(1, sizeof(*k));
        if (k) {
            k->number = ++s->number;
            st = furlong_asks_start(s->a, w.peer, w.lane, w.method, &w.d, w.budget_ms, k->number,
                                    &err);
        } else {
            PyErr_NoMemory();
        }
        if (st == FL_OK) {
            k->blob = w.held[1]; /* holds still until it comes back */
            w.held[1].obj = NULL;
            Py_INCREF(tag);
            k->tag = tag;
            k->next = s->flying;
            s->flying = k;
            s->n++;
        } else if (k) {
            PyMem_Free(k);
            core_raise(&err);
        }
        words_fini(&w);
    }
    run_exit(s->run);
    if (st != FL_OK)
        return NULL;
    Py_RETURN_NONE;
}

/* (tag, status, text, answer's body and blob); None: nothing came in time. */
static PyObject *asks_done(struct py_asks *s, struct furlong_done *done)
{
    struct flying **at = &s->flying, *k;
    PyObject *out, *answer;

    while ((k = *at) && k->number != done->tag)
        at = &k->next;
    if (!k) { /* closed by another thread meanwhile */
        furlong_answer_free(&done->answer);
        return core_fail(FL_CANCELLED, "these asks have been closed");
    }
    *at = k->next;
    s->n--;
    if (done->status == FL_OK) {
        answer = answer_tuple(&done->answer);
    } else {
        Py_INCREF(Py_None);
        answer = Py_None;
    }
    out =
        answer ? Py_BuildValue("(OisN)", k->tag, (int)done->status, done->err.text, answer) : NULL;
    flying_free(k);
    return out;
}

static PyObject *asks_next(PyObject *self, PyObject *args)
{
    struct py_asks *s = (struct py_asks *)self;
    struct furlong_done done;
    struct fl_err err = { 0 };
    PyObject *wait;
    uint32_t left, slice;
    enum fl_status st;

    if (!PyArg_ParseTuple(args, "O", &wait) || !core_ms(wait, FURLONG_FOREVER, &left) ||
        !asks_open(s) || !run_enter(s->run))
        return NULL;
    s->inside++;
    do {
        slice = left < SLICE_MS ? left : SLICE_MS;
        Py_BEGIN_ALLOW_THREADS st = furlong_asks_next(s->a, slice, &done, &err);
        Py_END_ALLOW_THREADS if (left != FURLONG_FOREVER) left -= slice;
    } while (st == FL_AGAIN && run_look(s->run) == 0 && left);
    s->inside--;
    run_exit(s->run);
    if (st == FL_OK)
        return asks_done(s, &done);
    if (PyErr_Occurred())
        return NULL;
    if (st == FL_AGAIN)
        Py_RETURN_NONE;
    return core_raise(&err);
}

static PyObject *asks_close(PyObject *self, PyObject *none)
{
    struct py_asks *s = (struct py_asks *)self;

    (void)none;
    if (s->inside)
        return core_fail(FL_INVALID, "close: another thread waits for these asks");
    run_orphan(&s->child);
    asks_empty(&s->child);
    Py_RETURN_NONE;
}

static void asks_dealloc(PyObject *self)
{
    struct py_asks *s = (struct py_asks *)self;

    run_orphan(&s->child);
    asks_empty(&s->child);
    Py_XDECREF((PyObject *)s->run);
    core_free(self);
}

static Py_ssize_t asks_length(PyObject *self)
{
    return ((struct py_asks *)self)->n;
}

int ask_init(PyObject *module)
{
    static PyMethodDef methods[] = { { "_start", asks_start, METH_VARARGS, NULL },
                                     { "_next", asks_next, METH_VARARGS, NULL },
                                     { "close", asks_close, METH_NOARGS, NULL },
                                     { 0 } };
    static PyType_Slot slots[] = { { Py_tp_dealloc, asks_dealloc },
                                   { Py_tp_methods, methods },
                                   { Py_sq_length, asks_length },
                                   { 0, NULL } };
    static PyType_Spec spec = { "furlong._core.Asks", sizeof(struct py_asks), 0, Py_TPFLAGS_DEFAULT,
                                slots };

    return core_add_type(module, &spec, &asks_type);
}
