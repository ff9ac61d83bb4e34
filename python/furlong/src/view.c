/* Memory of the library, shown: as a buffer where struct has a letter for the type, and by
 * DLPack. */
#include "core.h"

#include "dlpack.h"

#include <stdlib.h>
#include <string.h>

/* clang-format off */
const struct dtype_row dtype_rows[FL_U8 + 1] = {
    [FL_F32]    = { "F32",     "f",  4, DL_FLOAT     },
    [FL_F16]    = { "F16",     "e",  2, DL_FLOAT     },
    [FL_BF16]   = { "BF16",    NULL, 2, DL_BFLOAT    },
    [FL_F8_E4M3]= { "F8_E4M3", NULL, 1, DL_F8_E4M3FN },
    [FL_F8_E5M2]= { "F8_E5M2", NULL, 1, DL_F8_E5M2   },
    [FL_I64]    = { "I64",     "q",  8, DL_INT       },
    [FL_I32]    = { "I32",     "i",  4, DL_INT       },
    [FL_U8]     = { "U8",      "B",  1, DL_UINT      },
};
/* clang-format on */
static PyTypeObject *view_type;
struct py_view {
    PyObject_HEAD struct py_run *run; /* counted there */
    PyObject *owner;                  /* of the memory */
    Py_ssize_t *counted;
    void *at;
    enum fl_dtype dtype;
    int ndim, device; /* device: -1 host, else the process' number of it */
    bool readonly;
    Py_ssize_t shape[FL_DIMS], strides[FL_DIMS], bytes;
};

int view_device_shown(int device)
{
    const char *word = getenv("FURLONG_GPU");

    return word && strncmp(word, "fake", 4) == 0 ? -1 : device;
}

PyObject *view_make(struct py_run *r, PyObject *owner, void *at, enum fl_dtype dtype, unsigned ndim,
                    const uint64_t *shape, bool readonly, int device, Py_ssize_t *counted)
{
    struct py_view *v = (struct py_view *)core_new(view_type);

    if (!v)
        return NULL;
    Py_INCREF((PyObject *)r);
    Py_INCREF(owner);
    v->run = r;
    v->owner = owner;
    v->at = at;
    v->dtype = dtype;
    v->ndim = (int)ndim;
    v->readonly = readonly;
    v->device = device;
    v->bytes = dtype_rows[dtype].bytes;
    for (int i = v->ndim - 1; i >= 0; i--) {
        v->shape[i] = (Py_ssize_t)shape[i];
        v->strides[i] = v->bytes;
        v->bytes *= v->shape[i];
    }
    v->counted = counted;
    r->views++;
    if (counted)
        ++*counted;
    return (PyObject *)v;
}

static void view_dealloc(PyObject *self)
{
    struct py_view *v = (struct py_view *)self;

    v->run->views--;
    if (v->counted)
        --*v->counted;
    Py_DECREF(v->owner);
    Py_DECREF((PyObject *)v->run);
    core_free(self);
}

/* bf16 and fp8 have no letter: they are shown as unsigned numbers of their size. */
static int view_buffer(PyObject *self, Py_buffer *out, int flags)
{
    struct py_view *v = (struct py_view *)self;
    const struct dtype_row *d = &dtype_rows[v->dtype];

    if (v->device >= 0) {
        PyErr_SetString(PyExc_BufferError, "this memory is a device's: take it by DLPack");
        return -1;
    }
    if (v->readonly && (flags & PyBUF_WRITABLE)) {
        PyErr_SetString(PyExc_BufferError, "these weights are served: they are read alone");
        return -1;
    }
    Py_INCREF(self);
    *out = (Py_buffer){ .buf = v->at,
                        .obj = self,
                        .len = v->bytes,
                        .itemsize = d->bytes,
                        .readonly = v->readonly,
                        .ndim = v->ndim };
    if (flags & PyBUF_FORMAT)
        out->format = (char *)(uintptr_t)(d->format ? d->format : d->bytes == 2 ? "H" : "B");
    if (flags & PyBUF_ND)
        out->shape = v->shape;
    if ((flags & PyBUF_STRIDES) == PyBUF_STRIDES)
        out->strides = v->strides;
    return 0;
}

/* ---- DLPack ---- */
struct shown {
    struct dl_managed m;
    int64_t shape[FL_DIMS];
};

/* Called by whoever took the tensor, from any thread, also while the interpreter ends. */
static void shown_delete(struct dl_managed *m)
{
    if (Py_IsInitialized()) {
        PyGILState_STATE s = PyGILState_Ensure();

        Py_DECREF((PyObject *)m->ctx);
        PyGILState_Release(s);
    }
    free(m);
}

static void capsule_delete(PyObject *capsule)
{
    struct dl_managed *m = PyCapsule_IsValid(capsule, "dltensor") /* else somebody took it */
                               ? PyCapsule_GetPointer(capsule, "dltensor")
                               : NULL;

    if (m)
        m->deleter(m);
}

static PyObject *view_dlpack(PyObject *self, PyObject *args, PyObject *kw)
{
    struct py_view *v = (struct py_view *)self;
    const struct dtype_row *d = &dtype_rows[v->dtype];
    struct shown *s = calloc(1, sizeof(*s));
    PyObject *capsule;

    (void)args; /* a stream, a version, a device: frozen or idle memory needs none of them */
    (void)kw;
    if (!s)
        return PyErr_NoMemory();
    for (int i = 0; i < v->ndim; i++)
        s->shape[i] = v->shape[i];
    s->m = (struct dl_managed){
        .t = { .data = v->at,
               .device = { v->device < 0 ? DL_CPU : DL_CUDA, v->device < 0 ? 0 : v->device },
               .ndim = v->ndim,
               .dtype = { d->dl_code, (uint8_t)(8 * d->bytes), 1 },
               .shape = s->shape },
        .ctx = self,
        .deleter = shown_delete,
    };
    capsule = PyCapsule_New(&s->m, "dltensor", capsule_delete);
    if (capsule)
        Py_INCREF(self);
    else
        free(s);
    return capsule;
}

static PyObject *view_device(PyObject *self, PyObject *none)
{
    struct py_view *v = (struct py_view *)self;

    (void)none;
    return v->device < 0 ? Py_BuildValue("(ii)", DL_CPU, 0)
                         : Py_BuildValue("(ii)", DL_CUDA, v->device);
}

/* The same memory as bytes one after the other: a type that a library has no DLPack name for (fp8)
 * can be taken so. */
static PyObject *view_raw(PyObject *self, PyObject *none)
{
    struct py_view *v = (struct py_view *)self;
    uint64_t bytes = (uint64_t)v->bytes;

    (void)none;
    return view_make(v->run, v->owner, v->at, FL_U8, 1, &bytes, v->readonly, v->device, v->counted);
}

static PyObject *get_dtype(PyObject *self, void *closure)
{
    (void)closure;
    return PyUnicode_FromString(dtype_rows[((struct py_view *)self)->dtype].name);
}

static PyObject *get_shape(PyObject *self, void *closure)
{
    struct py_view *v = (struct py_view *)self;
    PyObject *out = PyTuple_New(v->ndim);

    (void)closure;
    for (int i = 0; out && i < v->ndim; i++) {
        PyObject *n = PyLong_FromSsize_t(v->shape[i]);

        if (!n || PyTuple_SetItem(out, i, n) < 0)
            Py_CLEAR(out);
    }
    return out;
}

static PyObject *get_pointer(PyObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromVoidPtr(((struct py_view *)self)->at);
}

static PyObject *get_bytes(PyObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromSsize_t(((struct py_view *)self)->bytes);
}

static PyObject *get_readonly(PyObject *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(((struct py_view *)self)->readonly);
}

int view_init(PyObject *module)
{
    static PyMethodDef methods[] = {
        { "__dlpack__", (PyCFunction)(void (*)(void))view_dlpack, METH_VARARGS | METH_KEYWORDS,
          NULL },
        { "__dlpack_device__", view_device, METH_NOARGS, NULL },
        { "raw", view_raw, METH_NOARGS, NULL },
        { 0 },
    };
    static PyGetSetDef getset[] = {
        { "dtype", get_dtype, NULL, NULL, NULL },       { "shape", get_shape, NULL, NULL, NULL },
        { "pointer", get_pointer, NULL, NULL, NULL },   { "nbytes", get_bytes, NULL, NULL, NULL },
        { "readonly", get_readonly, NULL, NULL, NULL }, { 0 }
    };
    static PyType_Slot slots[] = { { Py_tp_dealloc, view_dealloc },
                                   { Py_tp_methods, methods },
                                   { Py_tp_getset, getset },
                                   { Py_bf_getbuffer, view_buffer },
                                   { 0, NULL } };
    static PyType_Spec spec = { "furlong._core.View", sizeof(struct py_view), 0, Py_TPFLAGS_DEFAULT,
                                slots };

    return core_add_type(module, &spec, &view_type);
}
