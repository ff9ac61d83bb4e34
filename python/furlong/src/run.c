#include "core.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

PyTypeObject *run_type;

bool run_enter(struct py_run *r)
{
    if (!r->f || r->leaving) {
        core_fail(FL_CANCELLED, "the run has been left");
        return false;
    }
    if (r->pid != getpid()) { /* the library's calls that return nothing would do nothing */
        core_fail(FL_UNSUPPORTED,
                  "process %d is a forked child of the one that joined: exec instead",
                  (int)getpid());
        return false;
    }
    r->busy++;
    return true;
}

void run_exit(struct py_run *r)
{
    r->busy--;
}

int run_look(struct py_run *r)
{
    if (PyErr_CheckSignals())
        return -1;
    if (!r->leaving)
        return 0;
    core_fail(FL_CANCELLED, "the run is being left");
    return -1;
}

void run_adopt(struct py_run *r, struct py_child *c, void (*empty)(struct py_child *c))
{
    c->empty = empty;
    c->next = r->children;
    c->at = &r->children;
    if (c->next)
        c->next->at = &c->next;
    r->children = c;
}

void run_orphan(struct py_child *c)
{
    if (!c->at)
        return;
    *c->at = c->next;
    if (c->next)
        c->next->at = c->at;
    c->at = NULL;
}

/* ---- in and out ------------------------------------------------------------------------------ */
struct join_op {
    struct py_op op;
    struct furlong *f;
};

static void join_work(struct py_op *op)
{
    struct join_op *j = (struct join_op *)op;

    op->st = furlong_join(FURLONG_ABI, &j->f, &op->err);
}

static void join_fini(struct py_op *op)
{
    furlong_leave(((struct join_op *)op)->f); /* NULL when somebody took it */
}

static PyObject *core_join(PyObject *module, PyObject *cls)
{
    struct join_op *j = OP_NEW(struct join_op, join_work, join_fini);
    struct py_run *r;

    (void)module;
    if (!j || op_run(NULL, &j->op))
        return NULL;
    if (j->op.st != FL_OK) {
        core_raise(&j->op.err);
        op_free(&j->op);
        return NULL;
    }
    r = (struct py_run *)core_new((PyTypeObject *)cls);
    if (r) {
        r->pid = getpid();
        r->f = j->f;
        j->f = NULL;
    }
    op_free(&j->op);
    return (PyObject *)r;
}

static void nap(void)
{
    nanosleep(&(struct timespec){ .tv_nsec = 5000000 }, NULL);
}

/* Threads come out of the library within a slice; what Ctrl-C gave up may take longer. */
static bool quiet(struct py_run *r)
{
    unsigned ms = 0;

    while (r->busy || (r->adrift && ms < LEAVE_MS)) {
        Py_BEGIN_ALLOW_THREADS nap();
        Py_END_ALLOW_THREADS ms += 5;
        op_sweep(&r->adrift);
    }
    return !r->adrift;
}

static void leave(struct py_run *r)
{
    struct furlong *f;

    r->leaving = true;
    if (r->pid != getpid()) { /* a forked child: nothing here is its own */
        r->f = NULL;
        return;
    }
    if (!quiet(r)) { /* the process ends with it: the daemon sees that too */
        r->f = NULL;
        return;
    }
    while (r->children) {
        struct py_child *c = r->children;

        run_orphan(c);
        c->empty(c);
    }
    furlong_asks_destroy(r->spare);
    f = r->f;
    r->spare = NULL;
    r->f = NULL;
    Py_BEGIN_ALLOW_THREADS furlong_leave(f);
    Py_END_ALLOW_THREADS
}

static PyObject *run_leave(PyObject *self, PyObject *args)
{
    struct py_run *r = (struct py_run *)self;
    int force = 0;

    if (!PyArg_ParseTuple(args, "|p", &force))
        return NULL;
    if (!r->f || r->leaving)
        Py_RETURN_NONE;
    if (r->views && !force)
        return core_fail(
            FL_INVALID,
            "leave: %zd views of weights or arena memory are still held; drop them first",
            r->views);
    leave(r);
    Py_RETURN_NONE;
}

static void run_dealloc(PyObject *self)
{
    struct py_run *r = (struct py_run *)self;

    if (r->f && !r->leaving)
        leave(r);
    core_free(self);
}

/* ---- the seat -------------------------------------------------------------------------------- */
static PyObject *texts(const char *const *t, uint32_t n)
{
    PyObject *out = PyTuple_New(n);

    for (uint32_t i = 0; out && i < n; i++) {
        PyObject *s = PyUnicode_FromString(t[i]);

        if (!s || PyTuple_SetItem(out, i, s) < 0)
            Py_CLEAR(out);
    }
    return out;
}

/* One dict: the Python class keeps it and shows its members as attributes. */
static PyObject *run_seat(PyObject *self, PyObject *none)
{
    struct py_run *r = (struct py_run *)self;
    const struct furlong_seat *s = r->f ? furlong_seat(r->f) : NULL;
    PyObject *devices;

    (void)none;
    if (!s)
        return core_fail(FL_CANCELLED, "the run has been left");
    devices = texts(s->device_uuids, s->n_devices);
    if (!devices)
        return NULL;
    return Py_BuildValue(
        "{s:s,s:s,s:s,s:s,s:s,s:I,s:I,s:I,s:I,s:I,s:N,s:s,s:I}", "job", s->job, "role", s->role,
        "node", s->node, "address", s->address, "run_dir", s->run_dir, "rank", s->rank, "world",
        s->world, "local_rank", s->local_rank, "local_world", s->local_world, "attempt", s->attempt,
        "devices", devices, "master_addr", s->master_addr, "master_port", (unsigned)s->master_port);
}

/* ---- events ---------------------------------------------------------------------------------- */
static PyObject *run_next(PyObject *self, PyObject *args)
{
    struct py_run *r = (struct py_run *)self;
    struct furlong_event ev;
    struct fl_err err = { 0 };
    enum fl_status st;
    PyObject *cls, *wait;
    unsigned lane;
    uint32_t left, slice;

    if (!PyArg_ParseTuple(args, "OIO", &cls, &lane, &wait) ||
        !core_ms(wait, FURLONG_FOREVER, &left) || !run_enter(r))
        return NULL;
    do {
        slice = left < SLICE_MS ? left : SLICE_MS;
        if (slice == 0) { /* a look does not wait: giving the GIL back would cost more */
            st = furlong_next(r->f, lane, 0, &ev, &err);
        } else {
            Py_BEGIN_ALLOW_THREADS st = furlong_next(r->f, lane, slice, &ev, &err);
            Py_END_ALLOW_THREADS
        }
        if (left != FURLONG_FOREVER)
            left -= slice;
    } while (st == FL_AGAIN && run_look(r) == 0 && left);
    run_exit(r);
    if (st == FL_OK)
        return event_make(cls, r, &ev);
    if (PyErr_Occurred())
        return NULL;
    if (st == FL_AGAIN)
        Py_RETURN_NONE;
    return core_raise(&err);
}

/* ---- what is watched ------------------------------------------------------------------------- */
static PyObject *run_metric(PyObject *self, PyObject *args)
{
    struct py_run *r = (struct py_run *)self;
    const char *name;
    double value;

    if (!PyArg_ParseTuple(args, "sd", &name, &value) || !run_enter(r))
        return NULL;
    furlong_metric(r->f, name, value);
    run_exit(r);
    Py_RETURN_NONE;
}

static PyObject *run_progress(PyObject *self, PyObject *args)
{
    struct py_run *r = (struct py_run *)self;
    PyObject *of[2];
    uint64_t done, total;

    if (!PyArg_ParseTuple(args, "OO", &of[0], &of[1]) || !core_count(of[0], "done", &done) ||
        !core_count(of[1], "total", &total) || !run_enter(r))
        return NULL;
    furlong_progress(r->f, done, total);
    run_exit(r);
    Py_RETURN_NONE;
}

static PyObject *run_record(PyObject *self, PyObject *args)
{
    struct py_run *r = (struct py_run *)self;
    const char *json;

    if (!PyArg_ParseTuple(args, "s", &json) || !run_enter(r))
        return NULL;
    furlong_step_record(r->f, json);
    run_exit(r);
    Py_RETURN_NONE;
}

static PyObject *run_left(PyObject *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(!((struct py_run *)self)->f);
}

static PyGetSetDef getset[] = {
    { "left", run_left, NULL, "True once the run has been left.", NULL }, { 0 }
};
static PyMethodDef methods[] = {
    { "_seat", run_seat, METH_NOARGS, NULL },
    { "_leave", run_leave, METH_VARARGS, NULL },
    { "_next", run_next, METH_VARARGS, NULL },
    { "_ask", run_ask, METH_VARARGS, NULL },
    { "_asks", run_asks, METH_VARARGS, NULL },
    { "_weights", run_weights, METH_VARARGS, NULL },
    { "_alloc", run_alloc, METH_VARARGS, NULL },
    { "_keep", run_keep, METH_VARARGS, NULL },
    { "_move", run_move, METH_VARARGS, NULL },
    { "_place", run_place, METH_VARARGS, NULL },
    { "_update", run_update, METH_VARARGS, NULL },
    { "_step_record", run_record, METH_VARARGS, NULL },
    { "metric", run_metric, METH_VARARGS, "metric(name, value)" },
    { "progress", run_progress, METH_VARARGS, "progress(done, total)" },
    { 0 },
};
static PyMethodDef functions[] = { { "join", core_join, METH_O, NULL }, { 0 } };

int run_init(PyObject *module)
{
    static PyType_Slot slots[] = { { Py_tp_dealloc, run_dealloc },
                                   { Py_tp_methods, methods },
                                   { Py_tp_getset, getset },
                                   { 0, NULL } };
    static PyType_Spec spec = { "furlong._core.Run", sizeof(struct py_run), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots };

    if (PyModule_AddFunctions(module, functions) < 0)
        return -1;
    return core_add_type(module, &spec, &run_type);
}
