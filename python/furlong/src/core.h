/* python/furlong/src/core.h - libfurlong as Python objects
 *
 * A thin face: each object here holds one of the library's and gives the GIL back whenever it
 * waits. What is pleasant (JSON, names, dicts) is in the Python files beside it. One source for the
 * limited API (3.11 and newer) and, compiled without it, for 3.10.
 *
 * Who may go when: objects that hang on a seat are in its list of children and are emptied before
 * the seat is left. While a thread is inside the library `busy` counts it, and leaving waits. All
 * of these fields are read and written under the GIL. */
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <furlong/driver.h>
#include <pthread.h>

enum {
    SLICE_MS = 100,  /* how long a wait goes on before it looks for Ctrl-C, or for leave() */
    LEAVE_MS = 5000, /* how long leave() waits for calls that were given up by Ctrl-C      */
    ASKS_SPARE = 16  /* bound of the asks that ask() keeps for the next one                */
};

struct py_child { /* embed it */
    struct py_child *next, **at;
    void (*empty)(struct py_child *c); /* the seat is being left */
};
struct py_run {
    PyObject_HEAD struct furlong *f; /* NULL: left */
    struct py_child *children;
    struct py_op *adrift;       /* given up by Ctrl-C, still running */
    struct furlong_asks *spare; /* of ask(); NULL: in use, or none yet */
    Py_ssize_t busy, views;     /* views: of memory that leaving would take away */
    pid_t pid;
    bool leaving;
};

#define CORE_OF(type, child) ((type *)(void *)((char *)(child)-offsetof(type, child)))

/* ---- module.c --------------------------------------------------------------------------------*/
PyObject *core_raise(const struct fl_err *err); /* NULL, with the status' exception set */
PyObject *core_fail(enum fl_status st, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
bool core_ms(PyObject *seconds, uint32_t none, uint32_t *out); /* false: an exception is set */
/* For the library, to which 0 is no limit: none left is a millisecond, None is FURLONG_FOREVER. */
bool core_budget(PyObject *seconds, uint32_t *out);
/* Anything with __index__; what: stands in the exception. */
bool core_count(PyObject *o, const char *what, uint64_t *out);
PyObject *core_new(PyTypeObject *type);                        /* zeroed */
void core_free(void *self);
/* A contiguous buffer, or none for None. Released with core_bytes_fini(). */
bool core_bytes(PyObject *o, const char *what, Py_buffer *out);
void core_bytes_fini(Py_buffer *b);
int core_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **out);

/* ---- run.c -----------------------------------------------------------------------------------*/
bool run_enter(struct py_run *r); /* false: left; an exception is set */
void run_exit(struct py_run *r);
/* After a slice: goes on only if it is zero. Else an exception is set. */
int run_look(struct py_run *r);
void run_adopt(struct py_run *r, struct py_child *c, void (*empty)(struct py_child *c));
void run_orphan(struct py_child *c); /* not in a list: fine */
extern PyTypeObject *run_type;
int run_init(PyObject *module);

/* ---- op.c: a call that the library does not cut into slices, on a thread of its own ---- */
struct py_op {
    struct py_op *next;
    void (*work)(struct py_op *op); /* without the GIL: fills st, err and what it makes         */
    /* with the GIL: frees all, also what work made and nobody took */
    void (*fini)(struct py_op *op);
    enum fl_status st;
    struct fl_err err;
    pthread_mutex_t mu;
    pthread_cond_t ended;
    bool over;
    PyObject *keep; /* what must live as long as work runs */
    Py_buffer held[2];
};
#define OP_NEW(type, w, f) ((type *)(void *)op_new(sizeof(type), (w), (f)))
struct py_op *op_new(size_t size, void (*work)(struct py_op *), void (*fini)(struct py_op *));
/* 0: over, st says how. -1: an exception is set and op is no longer the caller's. r may be NULL. */
int op_run(struct py_run *r, struct py_op *op);
void op_free(struct py_op *op);
void op_sweep(struct py_op **adrift); /* frees those that are over */

/* ---- event.c ---------------------------------------------------------------------------------*/
PyObject *blob_of_event(struct furlong_call *c, size_t bytes);
PyObject *blob_of_answer(struct furlong_answer *a_take);
int event_init(PyObject *module);
/* NULL: an exception is set */
struct furlong_call *event_take(PyObject *event, struct py_run **run);
void event_put_back(PyObject *event, struct furlong_call *c);
PyObject *event_make(PyObject *cls, struct py_run *r, const struct furlong_event *ev);
extern PyTypeObject *event_type;

/* ---- ask.c -----------------------------------------------------------------------------------*/
PyObject *run_ask(PyObject *self, PyObject *args);
PyObject *run_asks(PyObject *self, PyObject *args);
PyObject *answer_tuple(struct furlong_answer *a_take); /* (body, blob) */
int ask_init(PyObject *module);

/* ---- view.c, tensor.c, weights.c ---- */
PyObject *view_make(struct py_run *r, PyObject *owner, void *at, enum fl_dtype dtype, unsigned ndim,
                    const uint64_t *shape, bool readonly, int device,
                    Py_ssize_t *counted); /* NULL, or the owner's count of views */
/* The number that others know a device by; -1 also for devices made of host memory
 * (FURLONG_GPU=fake): they are shown as what they are. */
int view_device_shown(int device);
int view_init(PyObject *module);
extern const struct dtype_row {
    const char *name, *format; /* of safetensors; of struct, NULL: as bytes of that size */
    uint8_t bytes, dl_code;
} dtype_rows[FL_U8 + 1];
struct tensor_list { /* what a caller named */
    struct furlong_tensor *t;
    Py_ssize_t n;
    PyObject *keep; /* capsules, names */
    Py_buffer *held;
    Py_ssize_t n_held;
    bool on_device;
    int device; /* as DLPack numbers it, when on_device */
};
bool tensors_read(PyObject *entries, struct tensor_list *out); /* false: an exception is set */
void tensors_fini(struct tensor_list *l);
PyObject *run_weights(PyObject *self, PyObject *args);
PyObject *run_alloc(PyObject *self, PyObject *args);
PyObject *run_keep(PyObject *self, PyObject *args);
PyObject *run_move(PyObject *self, PyObject *args);
int weights_init(PyObject *module);

/* ---- driver.c --------------------------------------------------------------------------------*/
PyObject *run_place(PyObject *self, PyObject *args);
PyObject *run_update(PyObject *self, PyObject *args);
int driver_init(PyObject *module);
