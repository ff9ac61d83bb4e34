/* What only a driver may do. Members, layouts and reports are plain dicts and tuples. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

static PyTypeObject *layout_type, *group_type;

struct py_layout {
    PyObject_HEAD struct py_run *run;
    struct py_child child;
    struct furlong_layout *y; /* NULL: given back */
};
struct py_group {
    PyObject_HEAD struct py_run *run;
    struct py_child child;
    struct furlong_group *g; /* NULL: ended */
};

static bool open_(const void *what, const char *name)
{
    if (what)
        return true;
    core_fail(FL_CANCELLED, "%s", name);
    return false;
}

/* Runs op, raises what it failed with, and keeps it for the caller: NULL with an exception
 * otherwise. The seat is entered by the caller. */
static bool op_done(struct py_run *r, struct py_op *op)
{
    if (op_run(r, op))
        return false;
    if (op->st == FL_OK)
        return true;
    core_raise(&op->err);
    op_free(op);
    return false;
}

/* ---- place ---- */
struct place_op {
    struct py_op op;
    struct furlong *f;
    struct furlong_flag *flags;
    Py_ssize_t n;
    struct furlong_layout *y;
};

static void place_work(struct py_op *op)
{
    struct place_op *p = (struct place_op *)op;

    op->st = furlong_place(p->f, p->flags, (size_t)p->n, &p->y, &op->err);
}

static void place_fini(struct py_op *op)
{
    struct place_op *p = (struct place_op *)op;

    furlong_layout_free(p->y);
    free(p->flags);
}

static void layout_empty(struct py_child *child)
{
    struct py_layout *l = CORE_OF(struct py_layout, child);

    furlong_layout_free(l->y);
    l->y = NULL;
}

PyObject *run_place(PyObject *self, PyObject *args)
{
    struct py_run *r = (struct py_run *)self;
    struct py_layout *l = NULL;
    struct place_op *p;
    PyObject *flags;

    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &flags) || !run_enter(r))
        return NULL;
    p = OP_NEW(struct place_op, place_work, place_fini);
    if (p) {
        p->f = r->f;
        p->n = PyList_Size(flags);
        p->flags = calloc((size_t)p->n + 1, sizeof(*p->flags));
        Py_INCREF(flags);
        p->op.keep = flags;
        for (Py_ssize_t i = 0; p->flags && i < p->n && !PyErr_Occurred(); i++)
            (void)PyArg_ParseTuple(PyList_GetItem(flags, i), "sz", &p->flags[i].name,
                                   &p->flags[i].value);
        if (!p->flags || PyErr_Occurred()) {
            op_free(&p->op);
        } else if (op_done(r, &p->op)) {
            l = (struct py_layout *)core_new(layout_type);
            if (l) {
                Py_INCREF(self);
                l->run = r;
                l->y = p->y;
                p->y = NULL;
                run_adopt(r, &l->child, layout_empty);
            }
            op_free(&p->op);
        }
    }
    run_exit(r);
    return (PyObject *)l;
}

static void layout_dealloc(PyObject *self)
{
    struct py_layout *l = (struct py_layout *)self;

    run_orphan(&l->child);
    if (l->run && l->run->f && !l->run->leaving)
        furlong_layout_free(l->y);
    Py_XDECREF((PyObject *)l->run);
    core_free(self);
}

static PyObject *layout_count(PyObject *self, PyObject *args)
{
    struct py_layout *l = (struct py_layout *)self;
    const char *role;

    if (!PyArg_ParseTuple(args, "s", &role) || !open_(l->y, "this layout has been given back"))
        return NULL;
    return PyLong_FromUnsignedLong(furlong_layout_count(l->y, role));
}

static PyObject *layout_json(PyObject *self, PyObject *none)
{
    struct py_layout *l = (struct py_layout *)self;
    PyObject *out;
    char *json = NULL;

    (void)none;
    if (!open_(l->y, "this layout has been given back"))
        return NULL;
    furlong_layout_json(l->y, &json);
    if (!json)
        return PyErr_NoMemory();
    out = PyUnicode_FromString(json);
    free(json);
    return out;
}

static PyObject *layout_print(PyObject *self, PyObject *args)
{
    struct py_layout *l = (struct py_layout *)self;
    int fd = 1;

    if (!PyArg_ParseTuple(args, "|i", &fd) || !open_(l->y, "this layout has been given back"))
        return NULL;
    furlong_layout_print(l->y, fd);
    Py_RETURN_NONE;
}

/* ---- launch ---- */
struct launch_op {
    struct py_op op;
    struct furlong *f;
    struct furlong_layout *y;
    const char *role;
    char **argv, **env; /* point into keep */
    struct furlong_launch_opts o;
    bool waits;
    struct furlong_group *g;
};

static void launch_work(struct py_op *op)
{
    struct launch_op *l = (struct launch_op *)op;

    op->st = (l->waits ? furlong_launch : furlong_launch_start)(l->f, l->y, l->role, l->argv,
                                                                l->env, &l->o, &l->g, &op->err);
}

static void launch_fini(struct py_op *op)
{
    struct launch_op *l = (struct launch_op *)op;

    free(l->argv); /* a group that nobody took runs on until the job ends */
    free(l->env);
}

static char **words_of(PyObject *list) /* NULL: an exception is set */
{
    Py_ssize_t n = PyList_Size(list);
    char **out = n < 0 ? NULL : calloc((size_t)n + 1, sizeof(*out));

    if (!out && n >= 0)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; out && i < n; i++) {
        out[i] = (char *)(uintptr_t)PyBytes_AsString(PyList_GetItem(list, i));
        if (!out[i]) {
            free(out);
            out = NULL;
        }
    }
    return out;
}

static void group_empty(struct py_child *child)
{
    CORE_OF(struct py_group, child)->g = NULL; /* leaving frees it; its members run on */
}

static PyObject *layout_launch(PyObject *self, PyObject *args)
{
    struct py_layout *y = (struct py_layout *)self;
    struct py_group *g = NULL;
    struct launch_op *l;
    PyObject *argv, *env, *start, *backoff, *backoff_max;
    struct furlong_launch_opts o = { 0 };
    const char *role, *cwd;
    int waits;

    if (!PyArg_ParseTuple(args, "sO!O!IOOOzp", &role, &PyList_Type, &argv, &PyList_Type, &env,
                          &o.restart_max, &backoff, &backoff_max, &start, &cwd, &waits) ||
        !core_ms(backoff, 0, &o.backoff_ms) || !core_ms(backoff_max, 0, &o.backoff_max_ms) ||
        !core_ms(start, 0, &o.start_ms) || !open_(y->y, "this layout has been given back") ||
        !run_enter(y->run))
        return NULL;
    o.cwd = cwd;
    l = OP_NEW(struct launch_op, launch_work, launch_fini);
    if (l) {
        l->op.keep = Py_BuildValue("(OO)", self, args); /* all texts live in these */
        l->f = y->run->f;
        l->y = y->y;
        l->role = role;
        l->o = o;
        l->waits = waits;
        l->argv = l->op.keep ? words_of(argv) : NULL;
        l->env = l->argv ? words_of(env) : NULL;
        if (!l->env) {
            op_free(&l->op);
        } else if (op_done(y->run, &l->op)) {
            g = (struct py_group *)core_new(group_type);
            if (g) {
                Py_INCREF((PyObject *)y->run);
                g->run = y->run;
                g->g = l->g;
                run_adopt(y->run, &g->child, group_empty);
            }
            op_free(&l->op);
        }
    }
    run_exit(y->run);
    return (PyObject *)g;
}

/* ---- a group ---- */
enum group_turn { TURN_WAIT, TURN_RESTART, TURN_END };
struct group_op {
    struct py_op op;
    struct furlong_group *g;
    enum group_turn turn;
    uint32_t budget_ms;
};

static void group_work(struct py_op *op)
{
    struct group_op *g = (struct group_op *)op;

    if (g->turn == TURN_WAIT)
        op->st = furlong_group_wait(g->g, g->budget_ms, &op->err);
    else if (g->turn == TURN_RESTART)
        op->st = furlong_group_restart(g->g, g->budget_ms, &op->err);
    else
        furlong_group_end(g->g);
}

static PyObject *group_turn(struct py_group *s, enum group_turn turn, PyObject *budget)
{
    struct group_op *g;
    uint32_t ms;

    if (!core_budget(budget, &ms) || !open_(s->g, "this group has been ended") ||
        !run_enter(s->run))
        return NULL;
    g = OP_NEW(struct group_op, group_work, NULL);
    if (g) {
        Py_INCREF((PyObject *)s);
        g->op.keep = (PyObject *)s;
        g->g = s->g;
        g->turn = turn;
        g->budget_ms = ms;
        if (turn == TURN_END) {
            s->g = NULL;
            run_orphan(&s->child);
        }
        if (op_done(s->run, &g->op))
            op_free(&g->op);
    }
    run_exit(s->run);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *group_wait(PyObject *self, PyObject *budget)
{
    return group_turn((struct py_group *)self, TURN_WAIT, budget);
}

static PyObject *group_restart(PyObject *self, PyObject *budget)
{
    return group_turn((struct py_group *)self, TURN_RESTART, budget);
}

static PyObject *group_end(PyObject *self, PyObject *none)
{
    (void)none;
    if (!((struct py_group *)self)->g)
        Py_RETURN_NONE;
    return group_turn((struct py_group *)self, TURN_END, Py_None);
}

static PyObject *member_of(PyObject *self, PyObject *args)
{
    static const char *const states[] = { "starting", "live", "ended" };
    struct py_group *s = (struct py_group *)self;
    struct furlong_member m;
    unsigned i;

    if (!PyArg_ParseTuple(args, "I", &i) || !open_(s->g, "this group has been ended"))
        return NULL;
    if (i >= furlong_group_size(s->g)) {
        PyErr_Format(PyExc_IndexError, "member %u of %u", i, furlong_group_size(s->g));
        return NULL;
    }
    furlong_group_member(s->g, i, &m);
    return Py_BuildValue("{s:I,s:I,s:s,s:s,s:s}", "rank", m.rank, "attempt", m.attempt, "state",
                         states[m.state], "node", m.node, "why", m.why);
}

static Py_ssize_t group_length(PyObject *self)
{
    struct py_group *s = (struct py_group *)self;

    return s->g ? (Py_ssize_t)furlong_group_size(s->g) : 0;
}

static void group_dealloc(PyObject *self)
{
    struct py_group *s = (struct py_group *)self;

    run_orphan(&s->child); /* freed when the run is left */
    Py_XDECREF((PyObject *)s->run);
    core_free(self);
}

/* ---- the same call to every member ---- */
struct all_op {
    struct py_op op;
    struct furlong_group *g;
    const char *method;
    struct furlong_data d;
    uint32_t budget_ms, n;
    struct furlong_answer *each;
};

static void all_work(struct py_op *op)
{
    struct all_op *a = (struct all_op *)op;

    op->st = furlong_ask_all(a->g, a->method, &a->d, a->budget_ms, a->each, &op->err);
}

static void all_fini(struct py_op *op)
{
    struct all_op *a = (struct all_op *)op;

    for (uint32_t i = 0; a->each && i < a->n; i++)
        furlong_answer_free(&a->each[i]);
    free(a->each);
}

static PyObject *all_list(struct all_op *a)
{
    PyObject *list = PyList_New(a->n);

    for (uint32_t i = 0; list && i < a->n; i++) {
        struct furlong_answer one = a->each[i];
        PyObject *o;

        a->each[i] = (struct furlong_answer){ 0 };
        o = answer_tuple(&one);
        if (!o || PyList_SetItem(list, i, o) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *group_ask_all(PyObject *self, PyObject *args)
{
    struct py_group *s = (struct py_group *)self;
    PyObject *body, *blob, *budget, *list = NULL;
    const char *method;
    struct all_op *a;
    uint32_t ms;

    if (!PyArg_ParseTuple(args, "sOOO", &method, &body, &blob, &budget) ||
        !core_budget(budget, &ms) || !open_(s->g, "this group has been ended") ||
        !run_enter(s->run))
        return NULL;
    a = OP_NEW(struct all_op, all_work, all_fini);
    if (a && core_bytes(body, "body", &a->op.held[0]) && core_bytes(blob, "blob", &a->op.held[1])) {
        a->op.keep = Py_BuildValue("(OO)", self, args);
        a->g = s->g;
        a->method = method;
        a->d = (struct furlong_data){ a->op.held[0].buf, (size_t)a->op.held[0].len,
                                      a->op.held[1].buf, (size_t)a->op.held[1].len };
        a->budget_ms = ms;
        a->n = furlong_group_size(s->g);
        a->each = calloc(a->n ? a->n : 1, sizeof(*a->each));
        if (!a->each || !a->op.keep) {
            PyErr_NoMemory();
        } else if (!op_done(s->run, &a->op)) {
            a = NULL;
        } else {
            list = all_list(a);
        }
    }
    if (a)
        op_free(&a->op);
    run_exit(s->run);
    return list;
}

/* ---- an update ---- */
struct update_op {
    struct py_op op;
    struct furlong_group *from, *to;
    struct furlong_update how;
    struct furlong_report out;
};

static void update_work(struct py_op *op)
{
    struct update_op *u = (struct update_op *)op;

    op->st = furlong_update(u->from, u->to, &u->how, &u->out, &op->err);
}

static PyObject *report(const struct furlong_report *p)
{
    return Py_BuildValue("{s:K,s:(KK),s:K,s:d,s:d,s:d,s:I,s:I,s:s,s:s}", "version",
                         (unsigned long long)p->version, "digest", (unsigned long long)p->digest[0],
                         (unsigned long long)p->digest[1], "bytes", (unsigned long long)p->bytes,
                         "move_s", (double)p->move_ns / 1e9, "pause_s", (double)p->pause_ns / 1e9,
                         "predicted_s", (double)p->predicted_ns / 1e9, "committed", p->committed,
                         "left_behind", p->left_behind, "mode", p->mode, "first_behind",
                         p->first_behind.status != FL_OK ? p->first_behind.text : "");
}

PyObject *run_update(PyObject *self, PyObject *args)
{
    struct py_run *r = (struct py_run *)self;
    struct furlong_update how = { 0 };
    struct py_group *from, *to;
    struct update_op *u;
    PyObject *budget, *out = NULL;
    unsigned long long version, bucket;

    if (!PyArg_ParseTuple(args, "O!O!KszIOIKz", group_type, &from, group_type, &to, &version,
                          &how.set, &how.mode, &how.least_engines, &budget, &how.slots, &bucket,
                          &how.dir) ||
        !core_budget(budget, &how.budget_ms) ||
        !open_(from->g, "this group has been ended") ||
        !open_(to->g, "this group has been ended") || !run_enter(r))
        return NULL;
    how.version = version;
    how.bucket_bytes = bucket;
    u = OP_NEW(struct update_op, update_work, NULL);
    if (u) {
        Py_INCREF(args);
        u->op.keep = args;
        u->from = from->g;
        u->to = to->g;
        u->how = how;
        if (op_done(r, &u->op)) {
            out = report(&u->out);
            op_free(&u->op);
        }
    }
    run_exit(r);
    return out;
}

int driver_init(PyObject *module)
{
    static PyMethodDef layout_methods[] = { { "count", layout_count, METH_VARARGS, NULL },
                                            { "_json", layout_json, METH_NOARGS, NULL },
                                            { "print", layout_print, METH_VARARGS, NULL },
                                            { "_launch", layout_launch, METH_VARARGS, NULL },
                                            { 0 } };
    static PyType_Slot layout_slots[] = { { Py_tp_dealloc, layout_dealloc },
                                          { Py_tp_methods, layout_methods },
                                          { 0, NULL } };
    static PyType_Spec layout = { "furlong._core.Layout", sizeof(struct py_layout), 0,
                                  Py_TPFLAGS_DEFAULT, layout_slots };
    static PyMethodDef group_methods[] = { { "member", member_of, METH_VARARGS, NULL },
                                           { "_wait", group_wait, METH_O, NULL },
                                           { "_restart", group_restart, METH_O, NULL },
                                           { "_ask_all", group_ask_all, METH_VARARGS, NULL },
                                           { "end", group_end, METH_NOARGS, NULL },
                                           { 0 } };
    static PyType_Slot group_slots[] = { { Py_tp_dealloc, group_dealloc },
                                         { Py_tp_methods, group_methods },
                                         { Py_sq_length, group_length },
                                         { 0, NULL } };
    static PyType_Spec group = { "furlong._core.Group", sizeof(struct py_group), 0,
                                 Py_TPFLAGS_DEFAULT, group_slots };

    if (core_add_type(module, &layout, &layout_type) < 0)
        return -1;
    return core_add_type(module, &group, &group_type);
}
