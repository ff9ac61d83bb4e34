#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static PyTypeObject *weights_type, *memory_type;

struct shape_row {
    enum fl_dtype dtype;
    uint8_t ndim;
    uint64_t len[FL_DIMS];
};
struct py_weights {
    PyObject_HEAD struct py_run *run;
    struct py_child child;
    struct furlong_weights *w; /* NULL: dropped */
    struct shape_row *rows;
    /* turns: begin(), publish() and commit() that are inside the library */
    Py_ssize_t n, views, turns;
    PyObject *index; /* name: number */
    PyObject *lent;  /* the tensors that are given where they lie */
    bool offered;
    int device; /* -1: host memory */
};

/* ---- making one: the first copy and the talk about it are the library's ---- */
struct make_op {
    struct py_op op;
    struct furlong *f;
    char set[128];
    struct tensor_list list;
    struct furlong_weights_opts o;
    char *local_dir;
    bool offer;
    struct furlong_weights *w;
};

static void make_work(struct py_op *op)
{
    struct make_op *m = (struct make_op *)op;

    op->st = (m->offer ? furlong_weights_offer : furlong_weights_accept)(
        m->f, m->set, m->list.t, (size_t)m->list.n, &m->o, &m->w, &op->err);
}

static void make_fini(struct py_op *op)
{
    struct make_op *m = (struct make_op *)op;

    furlong_weights_drop(m->w); /* NULL when somebody took it */
    tensors_fini(&m->list);
    free(m->local_dir);
}

static void weights_empty(struct py_child *child)
{
    struct py_weights *s = CORE_OF(struct py_weights, child);

    s->w = NULL; /* leaving drops it */
}

static bool rows_fill(struct py_weights *s, const struct tensor_list *l)
{
    s->n = l->n;
    s->rows = PyMem_Calloc((size_t)l->n + 1, sizeof(*s->rows));
    s->index = PyDict_New();
    if (!s->rows || !s->index)
        return false;
    for (Py_ssize_t i = 0; i < l->n; i++) {
        const struct furlong_tensor *t = &l->t[i];
        PyObject *number = PyLong_FromSsize_t(i);
        int rc = number ? PyDict_SetItemString(s->index, t->name, number) : -1;

        Py_XDECREF(number);
        if (rc < 0)
            return false;
        s->rows[i].dtype = t->dtype;
        s->rows[i].ndim = t->ndim;
        memcpy(s->rows[i].len, t->len[0] ? t->len : t->shape, sizeof(t->len));
    }
    return true;
}

/* The device and the stream of m->o; -1: an exception is set. */
static int where_lies(struct make_op *m, int device, PyObject *stream)
{
    const struct furlong_seat *seat = furlong_seat(m->f);

    if (device >= 0 && (uint32_t)device >= seat->n_devices) {
        core_fail(FL_INVALID, "%s: device %d, this seat has %u", m->set, device, seat->n_devices);
        return -1;
    }
    if (device >= 0)
        m->o.device = seat->device_uuids[device];
    if (stream != Py_None)
        m->o.stream = PyLong_AsVoidPtr(stream);
    return PyErr_Occurred() ? -1 : 0;
}

/* The set that m has made, as an object; NULL: an exception is set. */
static struct py_weights *weights_of(struct py_run *r, struct make_op *m, int device)
{
    struct py_weights *s = (struct py_weights *)core_new(weights_type);

    if (!s)
        return NULL;
    if (device < 0 && m->offer && m->list.on_device)
        device = m->list.device; /* the library finds it by their addresses */
    Py_INCREF((PyObject *)r);
    s->run = r;
    s->offered = m->offer;
    s->device = device < 0 ? -1 : view_device_shown(device);
    s->lent = m->o.in_place ? m->list.keep : NULL;
    Py_XINCREF(s->lent);
    s->w = m->w;
    m->w = NULL;
    run_adopt(r, &s->child, weights_empty);
    if (!rows_fill(s, &m->list))
        Py_CLEAR(s);
    return s;
}

PyObject *run_weights(PyObject *self, PyObject *args)
{
    struct py_run *r = (struct py_run *)self;
    struct py_weights *s = NULL;
    struct make_op *m;
    PyObject *entries, *stream;
    const char *set, *local_dir;
    int offer, fixed, check, device, in_place;
    unsigned slots;

    if (!PyArg_ParseTuple(args, "psO!IpOpzip", &offer, &set, &PyList_Type, &entries, &slots, &fixed,
                          &stream, &check, &local_dir, &device, &in_place) ||
        !run_enter(r))
        return NULL;
    m = OP_NEW(struct make_op, make_work, make_fini);
    if (!m || !tensors_read(entries, &m->list))
        goto out;
    Py_INCREF(entries);
    m->op.keep = entries; /* names point into it */
    m->f = r->f;
    m->offer = offer;
    snprintf(m->set, sizeof(m->set), "%s", set);
    m->local_dir = local_dir ? strdup(local_dir) : NULL;
    m->o = (struct furlong_weights_opts){
        .slots = slots,
        .fixed_addresses = fixed,
        .check_equal = check,
        .local_dir = m->local_dir,
        .in_place = in_place,
    };
    if (where_lies(m, device, stream) < 0)
        goto out;
    if (op_run(r, &m->op)) {
        m = NULL;
        goto out;
    }
    if (m->op.st == FL_OK)
        s = weights_of(r, m, device);
    else
        core_raise(&m->op.err);
out:
    if (m)
        op_free(&m->op);
    run_exit(r);
    return (PyObject *)s;
}

/* ---- looking at it ---- */
static bool held(const struct py_weights *s)
{
    if (s->w)
        return true;
    core_fail(FL_CANCELLED, "these weights have been dropped");
    return false;
}

static PyObject *look(PyObject *self, PyObject *key, bool last)
{
    struct py_weights *s = (struct py_weights *)self;
    PyObject *number = PyLong_Check(key) ? key : PyDict_GetItemWithError(s->index, key);
    Py_ssize_t i;
    void *at;

    if (!number) {
        if (!PyErr_Occurred())
            PyErr_SetObject(PyExc_KeyError, key);
        return NULL;
    }
    i = PyLong_AsSsize_t(number);
    if (i == -1 && PyErr_Occurred())
        return NULL;
    if (i < 0 || i >= s->n) {
        PyErr_Format(PyExc_IndexError, "tensor %zd of %zd", i, s->n);
        return NULL;
    }
    if (!held(s))
        return NULL;
    at = last ? (void *)(uintptr_t)furlong_weights_last(s->w, (size_t)i)
              : furlong_weights_data(s->w, (size_t)i);
    if (!at)
        Py_RETURN_NONE;
    return view_make(s->run, self, at, s->rows[i].dtype, s->rows[i].ndim, s->rows[i].len,
                     last || !s->offered, s->device, &s->views);
}

static PyObject *weights_data(PyObject *self, PyObject *key)
{
    return look(self, key, false);
}

static PyObject *weights_last(PyObject *self, PyObject *key)
{
    return look(self, key, true);
}

static PyObject *weights_version(PyObject *self, PyObject *none)
{
    struct py_weights *s = (struct py_weights *)self;
    uint64_t digest[2] = { 0, 0 }, v;

    (void)none;
    if (!held(s))
        return NULL;
    v = furlong_weights_version(s->w, digest);
    if (v == FURLONG_NO_VERSION)
        Py_RETURN_NONE;
    return Py_BuildValue("(KKK)", (unsigned long long)v, (unsigned long long)digest[0],
                         (unsigned long long)digest[1]);
}

/* ---- the trainer's calls, and the engine's ---- */
struct turn_op {
    struct py_op op;
    struct py_weights *of;
    struct furlong_weights *w;
    uint64_t version;
    uint32_t budget_ms;
    enum turn { TURN_BEGIN, TURN_PUBLISH, TURN_ABANDON } what;
};

static void turn_work(struct py_op *op)
{
    struct turn_op *t = (struct turn_op *)op;

    if (t->what == TURN_BEGIN)
        op->st = furlong_weights_begin(t->w, t->version, t->budget_ms, &op->err);
    else if (t->what == TURN_PUBLISH)
        op->st = furlong_weights_publish(t->w, t->version, &op->err);
    else
        op->st = furlong_weights_abandon(t->w, &op->err);
}

static void turn_fini(struct py_op *op)
{
    ((struct turn_op *)op)->of->turns--;
}

static PyObject *turn(struct py_weights *s, uint64_t version, uint32_t budget_ms, enum turn what)
{
    struct turn_op *t;
    int rc;

    if (!held(s) || !run_enter(s->run))
        return NULL;
    t = OP_NEW(struct turn_op, turn_work, turn_fini);
    if (t) {
        Py_INCREF((PyObject *)s);
        t->op.keep = (PyObject *)s;
        t->of = s;
        s->turns++;
        t->w = s->w;
        t->version = version;
        t->budget_ms = budget_ms;
        t->what = what;
        rc = op_run(s->run, &t->op);
        if (rc == 0 && t->op.st != FL_OK)
            core_raise(&t->op.err);
        if (rc == 0)
            op_free(&t->op);
    }
    run_exit(s->run);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *weights_begin(PyObject *self, PyObject *args)
{
    PyObject *number, *budget;
    uint64_t version;
    uint32_t ms;

    if (!PyArg_ParseTuple(args, "OO", &number, &budget) ||
        !core_count(number, "version", &version) || !core_budget(budget, &ms))
        return NULL;
    return turn((struct py_weights *)self, version, ms, TURN_BEGIN);
}

static PyObject *weights_publish(PyObject *self, PyObject *args)
{
    PyObject *number;
    uint64_t version;

    if (!PyArg_ParseTuple(args, "O", &number) || !core_count(number, "version", &version))
        return NULL;
    return turn((struct py_weights *)self, version, 0, TURN_PUBLISH);
}

static PyObject *weights_abandon(PyObject *self, PyObject *none)
{
    (void)none;
    return turn((struct py_weights *)self, 0, 0, TURN_ABANDON);
}

static PyObject *weights_commit(PyObject *self, PyObject *event)
{
    struct py_weights *s = (struct py_weights *)self;
    struct furlong_call *c;
    struct fl_err err = { 0 };
    struct py_run *r;
    enum fl_status st;

    if (!PyObject_TypeCheck(event, event_type)) {
        PyErr_SetString(PyExc_TypeError, "commit: an event is wanted");
        return NULL;
    }
    if (!held(s))
        return NULL;
    c = event_take(event, &r);
    if (!c)
        return NULL;
    s->turns++;
    Py_BEGIN_ALLOW_THREADS st = furlong_weights_commit(s->w, c, &err);
    Py_END_ALLOW_THREADS s->turns--;
    run_exit(r);
    if (st == FL_OK)
        Py_RETURN_NONE;
    event_put_back(event, c); /* it is another's: still to be answered */
    return core_raise(&err);
}

static PyObject *weights_drop(PyObject *self, PyObject *none)
{
    struct py_weights *s = (struct py_weights *)self;
    struct furlong_weights *w = s->w;

    (void)none;
    if (!w)
        Py_RETURN_NONE;
    op_sweep(&s->run->adrift); /* what Ctrl-C gave up may be over by now */
    if (s->turns)              /* it would go under that thread, or under one that Ctrl-C gave up */
        return core_fail(FL_AGAIN,
                         "drop: begin(), publish() or commit() of these weights is under way");
    if (s->views)
        return core_fail(FL_INVALID, "drop: %zd views of these weights are still held", s->views);
    if (!run_enter(s->run))
        return NULL;
    s->w = NULL;
    run_orphan(&s->child);
    Py_BEGIN_ALLOW_THREADS furlong_weights_drop(w);
    Py_END_ALLOW_THREADS run_exit(s->run);
    Py_CLEAR(s->lent);
    Py_RETURN_NONE;
}

static void weights_dealloc(PyObject *self)
{
    struct py_weights *s = (struct py_weights *)self;

    run_orphan(&s->child);
    if (s->w && s->run->f && !s->run->leaving) {
        struct furlong_weights *w = s->w;

        s->run->busy++;
        Py_BEGIN_ALLOW_THREADS furlong_weights_drop(w);
        Py_END_ALLOW_THREADS s->run->busy--;
    }
    PyMem_Free(s->rows);
    Py_XDECREF(s->lent);
    Py_XDECREF(s->index);
    Py_XDECREF((PyObject *)s->run);
    core_free(self);
}

static PyObject *get_names(PyObject *self, void *closure)
{
    (void)closure;
    return PyDict_Keys(((struct py_weights *)self)->index);
}

/* ---- memory that can go and come back ---- */
struct py_memory {
    PyObject_HEAD struct py_run *run;
    struct py_child child;
    void *at;
};

static void memory_empty(struct py_child *child)
{
    CORE_OF(struct py_memory, child)->at = NULL; /* leaving frees it */
}

/* A view of new memory; it goes when the last view of it does. */
PyObject *run_alloc(PyObject *self, PyObject *args)
{
    struct py_run *r = (struct py_run *)self;
    struct py_memory *m = NULL;
    struct fl_err err = { 0 };
    struct tensor_list l;
    PyObject *entries, *view = NULL;
    unsigned tag;
    int device;
    size_t bytes;

    if (!PyArg_ParseTuple(args, "IiO!", &tag, &device, &PyList_Type, &entries) ||
        !tensors_read(entries, &l))
        return NULL;
    bytes = dtype_rows[l.t->dtype].bytes;
    for (unsigned i = 0; i < l.t->ndim; i++)
        if (__builtin_mul_overflow(bytes, l.t->shape[i], &bytes))
            bytes = SIZE_MAX;
    if (run_enter(r)) {
        m = (struct py_memory *)core_new(memory_type);
        if (m) {
            Py_INCREF(self);
            m->run = r;
            if (furlong_arena_alloc(r->f, (enum furlong_tag)tag, device, bytes ? bytes : 1, &m->at,
                                    &err) == FL_OK) {
                run_adopt(r, &m->child, memory_empty);
                view = view_make(r, (PyObject *)m, m->at, l.t->dtype, l.t->ndim, l.t->shape, false,
                                 device < 0 ? -1 : view_device_shown(device), NULL);
            } else {
                core_raise(&err);
            }
            Py_DECREF((PyObject *)m);
        }
        run_exit(r);
    }
    tensors_fini(&l);
    return view;
}

static void memory_dealloc(PyObject *self)
{
    struct py_memory *m = (struct py_memory *)self;

    run_orphan(&m->child);
    if (m->at && m->run->f && !m->run->leaving) {
        m->run->busy++;
        Py_BEGIN_ALLOW_THREADS furlong_arena_free(m->run->f, m->at); /* waits for the device */
        Py_END_ALLOW_THREADS m->run->busy--;
    }
    Py_XDECREF((PyObject *)m->run);
    core_free(self);
}

PyObject *run_keep(PyObject *self, PyObject *args)
{
    struct py_run *r = (struct py_run *)self;
    struct fl_err err = { 0 };
    unsigned tags;
    int how;
    const char *folder;
    enum fl_status st;

    if (!PyArg_ParseTuple(args, "Iiz", &tags, &how, &folder) || !run_enter(r))
        return NULL;
    st = furlong_arena_keep(r->f, tags, (enum furlong_keep)how, folder, &err);
    run_exit(r);
    if (st != FL_OK)
        return core_raise(&err);
    Py_RETURN_NONE;
}

PyObject *run_move(PyObject *self, PyObject *args)
{
    struct py_run *r = (struct py_run *)self;
    struct furlong_moved m = { 0 };
    struct fl_err err = { 0 };
    enum fl_status st;
    unsigned tags;
    int out;

    if (!PyArg_ParseTuple(args, "Ip", &tags, &out) || !run_enter(r))
        return NULL;
    Py_BEGIN_ALLOW_THREADS st =
        (out ? furlong_arena_offload : furlong_arena_onload)(r->f, tags, &m, &err);
    Py_END_ALLOW_THREADS run_exit(r);
    if (st != FL_OK)
        return core_raise(&err);
    return Py_BuildValue("{s:d,s:d,s:K,s:K,s:K,s:K}", "setup_s", m.setup_s, "copy_s", m.copy_s,
                         "dropped_bytes", (unsigned long long)m.dropped_bytes, "kept_bytes",
                         (unsigned long long)m.kept_bytes, "written_bytes",
                         (unsigned long long)m.written_bytes, "backed_bytes",
                         (unsigned long long)m.backed_bytes);
}

int weights_init(PyObject *module)
{
    static PyMethodDef methods[] = {
        { "data", weights_data, METH_O, NULL },
        { "last", weights_last, METH_O, NULL },
        { "_version", weights_version, METH_NOARGS, NULL },
        { "_begin", weights_begin, METH_VARARGS, NULL },
        { "_publish", weights_publish, METH_VARARGS, NULL },
        { "abandon", weights_abandon, METH_NOARGS, NULL },
        { "commit", weights_commit, METH_O, NULL },
        { "drop", weights_drop, METH_NOARGS, NULL },
        { 0 },
    };
    static PyGetSetDef getset[] = { { "names", get_names, NULL, NULL, NULL }, { 0 } };
    static PyType_Slot slots[] = { { Py_tp_dealloc, weights_dealloc },
                                   { Py_tp_methods, methods },
                                   { Py_tp_getset, getset },
                                   { 0, NULL } };
    static PyType_Spec spec = { "furlong._core.Weights", sizeof(struct py_weights), 0,
                                Py_TPFLAGS_DEFAULT, slots };
    static PyType_Slot memory_slots[] = { { Py_tp_dealloc, memory_dealloc }, { 0, NULL } };
    static PyType_Spec memory = { "furlong._core.Memory", sizeof(struct py_memory), 0,
                                  Py_TPFLAGS_DEFAULT, memory_slots };

    if (core_add_type(module, &memory, &memory_type) < 0)
        return -1;
    return core_add_type(module, &spec, &weights_type);
}
