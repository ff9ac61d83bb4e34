/* Tensors of others, read where they lie: by DLPack, by the buffer protocol, or by pointer. */
#include "core.h"

#include "dlpack.h"

#include <string.h>

static bool dtype_find(const char *name, enum fl_dtype *out)
{
    for (int i = 0; i <= FL_U8; i++) {
        if (strcmp(dtype_rows[i].name, name) != 0)
            continue;
        *out = (enum fl_dtype)i;
        return true;
    }
    return false;
}

static bool dtype_of_dl(struct dl_type t, enum fl_dtype *out)
{
    for (int i = 0; i <= FL_U8; i++) {
        if (t.lanes != 1 || t.bits != 8 * dtype_rows[i].bytes || t.code != dtype_rows[i].dl_code)
            continue;
        *out = (enum fl_dtype)i;
        return true;
    }
    *out = FL_U8;
    return t.code == DL_BOOL && t.bits == 8;
}

static const char *dl_word(uint8_t code)
{
    static const char *const words[] = { [DL_INT] = "a whole number",
                                         [DL_UINT] = "a whole number without sign",
                                         [DL_FLOAT] = "a floating-point number",
                                         [DL_COMPLEX] = "a complex number" };

    return code < sizeof(words) / sizeof(*words) && words[code] ? words[code] : "a type";
}

static bool dtype_of_format(const char *f, Py_ssize_t size, enum fl_dtype *out)
{
    f += *f == '@' || *f == '=' || *f == '<';
    if (f[0] && !f[1])
        switch (*f) {
        case 'f':
            *out = FL_F32;
            return size == 4;
        case 'e':
            *out = FL_F16;
            return size == 2;
        case 'q':
        case 'l':
        case 'i':
            *out = size == 8 ? FL_I64 : FL_I32;
            return size == 8 || size == 4;
        case 'B':
        case '?':
        case 'c':
            *out = FL_U8;
            return size == 1;
        default:
            break;
        }
    return false;
}

static bool sizes_read(PyObject *o, uint64_t out[FL_DIMS], unsigned *n, const char *name)
{
    Py_ssize_t len = PySequence_Size(o);

    if (len < 0)
        return false;
    if (len > FL_DIMS) {
        core_fail(FL_INVALID, "%s: %zd dimensions, at most %d", name, len, FL_DIMS);
        return false;
    }
    for (Py_ssize_t i = 0; i < len; i++) {
        PyObject *x = PySequence_GetItem(o, i);

        out[i] = x ? PyLong_AsUnsignedLongLong(x) : 0;
        Py_XDECREF(x);
        if (PyErr_Occurred())
            return false;
    }
    *n = (unsigned)len;
    return true;
}

struct found { /* one tensor as it lies in memory */
    void *data;
    enum fl_dtype dtype;
    unsigned ndim;
    uint64_t shape[FL_DIMS];
};

static bool by_dlpack(PyObject *capsule, const char *name, struct tensor_list *l, struct found *f)
{
    struct dl_managed *m = PyCapsule_GetPointer(capsule, "dltensor");
    int64_t row = 1;
    bool empty = false;

    if (!m)
        return false;
    if (!dtype_of_dl(m->t.dtype, &f->dtype)) {
        core_fail(FL_INVALID,
                  "%s: %s of %u bits does not travel, only F32 F16 BF16 F8_E4M3 F8_E5M2 I64 I32 U8 "
                  "do: give it as one of them",
                  name, dl_word(m->t.dtype.code), m->t.dtype.bits);
        return false;
    }
    if (m->t.ndim > FL_DIMS) {
        core_fail(FL_INVALID, "%s: %d dimensions, at most %d", name, m->t.ndim, FL_DIMS);
        return false;
    }
    for (int i = 0; i < m->t.ndim; i++)
        empty |= m->t.shape[i] == 0;
    for (int i = m->t.ndim - 1; i >= 0; i--) {
        if (!empty && m->t.strides && m->t.shape[i] > 1 && m->t.strides[i] != row) {
            core_fail(FL_INVALID, "%s is not contiguous: give it as tensor.contiguous()", name);
            return false;
        }
        f->shape[i] = (uint64_t)m->t.shape[i];
        row *= m->t.shape[i];
    }
    if (m->t.device.type != DL_CPU && m->t.device.type != DL_CUDA_HOST)
        l->on_device = true;
    if (l->on_device)
        l->device = m->t.device.id;
    f->ndim = (unsigned)m->t.ndim;
    f->data = (char *)m->t.data + m->t.byte_offset;
    return true;
}

/* The exception that is set, as one of ours that says which tensor it was about; not Ctrl-C. */
static void named(const char *name)
{
    PyObject *type, *e, *at, *text;
    const char *said;

    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return;
    PyErr_Fetch(&type, &e, &at);
    text = e ? PyObject_Str(e) : NULL;
    said = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    PyErr_Clear(); /* a text that cannot be read is left out */
    core_fail(FL_INVALID, "%s: it cannot be read where it lies: %s", name,
              said ? said : "no reason given");
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(e);
    Py_XDECREF(at);
}

static bool by_buffer(PyObject *o, const char *name, struct tensor_list *l, struct found *f)
{
    Py_buffer *b = &l->held[l->n_held];

    if (PyObject_GetBuffer(o, b, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
        named(name);
        return false;
    }
    l->n_held++;
    if (b->ndim > FL_DIMS ||
        !dtype_of_format(b->format ? b->format : "B", b->itemsize, &f->dtype)) {
        core_fail(FL_INVALID, "%s: a buffer of format '%s' in %d dimensions does not travel", name,
                  b->format ? b->format : "B", b->ndim);
        return false;
    }
    f->ndim = (unsigned)b->ndim;
    f->data = b->buf;
    for (int i = 0; i < b->ndim; i++)
        f->shape[i] = (uint64_t)b->shape[i];
    return true;
}

static bool find(PyObject *o, const char *name, struct tensor_list *l, struct found *f)
{
    PyObject *capsule;
    bool ok;

    if (PyLong_Check(o)) { /* a pointer; type and shape are said beside it */
        f->data = PyLong_AsVoidPtr(o);
        return !PyErr_Occurred();
    }
    if (!PyObject_HasAttrString(o, "__dlpack__"))
        return by_buffer(o, name, l, f);
    capsule = PyObject_CallMethod(o, "__dlpack__", NULL);
    if (!capsule) {
        if (!PyObject_CheckBuffer(o) || !PyErr_ExceptionMatches(PyExc_Exception)) {
            named(name);
            return false;
        }
        PyErr_Clear(); /* numpy's that are read only have a buffer, and no DLPack */
        return by_buffer(o, name, l, f);
    }
    ok = by_dlpack(capsule, name, l, f) && PyList_Append(l->keep, capsule) == 0;
    Py_DECREF(capsule);
    return ok;
}

static uint64_t bytes_of(unsigned ndim, const uint64_t *shape, enum fl_dtype dtype)
{
    uint64_t n = dtype_rows[dtype].bytes;

    for (unsigned i = 0; i < ndim; i++)
        n *= shape[i];
    return n;
}

/* (name, data or None, dtype or None, shape or None, at or None, len or None): shape is the whole
 * tensor's; at and len are the box of it that is here. */
static bool entry_read(PyObject *entry, struct tensor_list *l, struct furlong_tensor *t)
{
    PyObject *data, *shape, *at, *len;
    const char *dtype;
    struct found f = { 0 };
    unsigned n;

    if (!PyArg_ParseTuple(entry, "sOzOOO", &t->name, &data, &dtype, &shape, &at, &len))
        return false;
    if (data != Py_None && !find(data, t->name, l, &f))
        return false;
    t->data = f.data;
    t->dtype = f.dtype;
    if (dtype && !dtype_find(dtype, &t->dtype)) {
        core_fail(FL_INVALID, "%s: no type '%s'", t->name, dtype);
        return false;
    }
    n = f.ndim;
    memcpy(t->shape, f.shape, sizeof(t->shape));
    if (shape != Py_None && !sizes_read(shape, t->shape, &n, t->name))
        return false;
    t->ndim = (uint8_t)n;
    if (at != Py_None) {
        unsigned a, b;

        if (!sizes_read(at, t->at, &a, t->name) || !sizes_read(len, t->len, &b, t->name))
            return false;
        if (a != n || b != n) {
            core_fail(FL_INVALID, "%s: a box of %u and %u numbers in a tensor of %u dimensions",
                      t->name, a, b, n);
            return false;
        }
    }
    if (data == Py_None || PyLong_Check(data) ||
        bytes_of(f.ndim, f.shape, f.dtype) ==
            bytes_of(n, at != Py_None ? t->len : t->shape, t->dtype))
        return true;
    core_fail(FL_INVALID, "%s: the data has %llu bytes, its type and shape make %llu", t->name,
              (unsigned long long)bytes_of(f.ndim, f.shape, f.dtype),
              (unsigned long long)bytes_of(n, at != Py_None ? t->len : t->shape, t->dtype));
    return false;
}

bool tensors_read(PyObject *entries, struct tensor_list *out)
{
    struct tensor_list l = { .n = PyList_Size(entries) };

    *out = (struct tensor_list){ 0 };
    if (l.n < 0)
        return false;
    l.t = PyMem_Calloc((size_t)l.n + 1, sizeof(*l.t));
    l.held = PyMem_Calloc((size_t)l.n + 1, sizeof(*l.held));
    l.keep = PyList_New(0);
    if (!l.t || !l.held || !l.keep) {
        PyErr_NoMemory();
        tensors_fini(&l);
        return false;
    }
    for (Py_ssize_t i = 0; i < l.n; i++) {
        if (entry_read(PyList_GetItem(entries, i), &l, &l.t[i]))
            continue;
        tensors_fini(&l);
        return false;
    }
    *out = l;
    return true;
}

void tensors_fini(struct tensor_list *l)
{
    for (Py_ssize_t i = 0; i < l->n_held; i++)
        PyBuffer_Release(&l->held[i]);
    Py_XDECREF(l->keep);
    PyMem_Free(l->held);
    PyMem_Free(l->t);
    *l = (struct tensor_list){ 0 };
}
