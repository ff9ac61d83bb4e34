#include "core.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static PyObject *errors; /* furlong.errors.BY_STATUS: a class for each status */

PyObject *core_raise(const struct fl_err *err)
{
    PyObject *cls =
        PySequence_GetItem(errors, err->status < FL_STATUS_COUNT ? err->status : FL_INTERNAL);

    if (cls) {
        PyObject *text = PyUnicode_DecodeUTF8(err->text, (Py_ssize_t)strlen(err->text), "replace");

        if (text)
            PyErr_SetObject(cls, text);
        Py_XDECREF(text);
        Py_DECREF(cls);
    }
    return NULL;
}

PyObject *core_fail(enum fl_status st, const char *fmt, ...)
{
    struct fl_err err = { .status = st };
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(err.text, sizeof(err.text), fmt, ap);
    va_end(ap);
    return core_raise(&err);
}

bool core_ms(PyObject *seconds, uint32_t none, uint32_t *out)
{
    double s;

    if (!seconds || seconds == Py_None) {
        *out = none;
        return true;
    }
    s = PyFloat_AsDouble(seconds);
    if (s == -1 && PyErr_Occurred())
        return false;
    if (!(s >= 0)) {
        PyErr_SetString(PyExc_ValueError, "seconds: 0 or more, or None for no limit");
        return false;
    }
    s = ceil(s * 1000);
    *out = s >= FURLONG_FOREVER ? FURLONG_FOREVER - 1 : (uint32_t)s;
    return true;
}

bool core_budget(PyObject *seconds, uint32_t *out)
{
    if (!core_ms(seconds, FURLONG_FOREVER, out))
        return false;
    *out += *out == 0;
    return true;
}

bool core_count(PyObject *o, const char *what, uint64_t *out)
{
    PyObject *n = PyNumber_Index(o);
    unsigned long long v = n ? PyLong_AsUnsignedLongLong(n) : 0;
    bool range = PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_OverflowError);

    Py_XDECREF(n);
    if (!PyErr_Occurred()) {
        *out = v;
        return true;
    }
    PyErr_Clear();
    PyErr_Format(range ? PyExc_ValueError : PyExc_TypeError,
                 "%s: a whole number from 0 to 2^64 - 1 is wanted, not %R", what, o);
    return false;
}

PyObject *core_new(PyTypeObject *type)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);

    return alloc(type, 0);
}

void core_free(void *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    freefunc free_ = (freefunc)PyType_GetSlot(type, Py_tp_free);

    free_(self);
    Py_DECREF(type);
}

bool core_bytes(PyObject *o, const char *what, Py_buffer *out)
{
    memset(out, 0, sizeof(*out));
    if (!o || o == Py_None)
        return true;
    if (PyObject_GetBuffer(o, out, PyBUF_C_CONTIGUOUS) == 0)
        return true;
    if (PyErr_ExceptionMatches(PyExc_TypeError))
        PyErr_Format(PyExc_TypeError, "%s: bytes or another contiguous buffer is wanted, not %R",
                     what, (PyObject *)Py_TYPE(o));
    return false;
}

void core_bytes_fini(Py_buffer *b)
{
    if (b->obj)
        PyBuffer_Release(b);
}

int core_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **out)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);

    if (!type)
        return -1;
    *out = (PyTypeObject *)type; /* one reference stays ours */
    return PyModule_AddObjectRef(module, strrchr(spec->name, '.') + 1, type);
}

static int numbers_add(PyObject *module)
{
    static const struct {
        const char *name;
        long value;
    } numbers[] = {
        { "ABI", FURLONG_ABI },
        { "LANES", FURLONG_LANES },
        { "BODY_MAX", FURLONG_BODY_MAX },
        { "TAG_WEIGHTS", FURLONG_TAG_WEIGHTS },
        { "TAG_KV", FURLONG_TAG_KV },
        { "TAG_GRAPH", FURLONG_TAG_GRAPH },
        { "TAG_OPTIMIZER", FURLONG_TAG_OPTIMIZER },
        { "TAG_DEFAULT", FURLONG_TAG_DEFAULT },
        { "KEEP_NOT", FURLONG_KEEP_NOT },
        { "KEEP_IN", FURLONG_KEEP_IN },
        { "KEEP_DISK", FURLONG_KEEP_DISK },
        { "KEEP_HOST", FURLONG_KEEP_HOST },
        { "STATUS_COUNT", FL_STATUS_COUNT },
    };

    for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++)
        if (PyModule_AddIntConstant(module, numbers[i].name, numbers[i].value) < 0)
            return -1;
    return PyModule_AddStringConstant(module, "__version__", FURLONG_VERSION);
}

/* Types and classes are the process' own, and an interpreter that goes would leave its objects in
 * them. Newer ones refuse by themselves. */
static bool is_main(void)
{
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) == 0)
        return true;
    PyErr_SetString(PyExc_ImportError,
                    "furlong: the seat belongs to the main interpreter, this is another one");
    return false;
}

static PyObject *core_check(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    if (!is_main())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef module_functions[] = { { "_check", core_check, METH_NOARGS, NULL }, { 0 } };

static struct PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT, .m_name = "furlong._core",
    .m_doc = "libfurlong as Python objects; see the package furlong.",
    .m_size = -1, /* the seat belongs to the process, so one interpreter has it */
};

PyMODINIT_FUNC PyInit__core(void);
PyMODINIT_FUNC PyInit__core(void)
{
    static int (*const parts[])(PyObject *) = { run_init,     event_init,  ask_init,   view_init,
                                                weights_init, driver_init, numbers_add };
    PyObject *from = is_main() ? PyImport_ImportModule("furlong.errors") : NULL, *module;

    errors = from ? PyObject_GetAttrString(from, "BY_STATUS") : NULL;
    Py_XDECREF(from);
    if (!errors)
        return NULL;
    module = PyModule_Create(&core_module);
    if (module && PyModule_AddFunctions(module, module_functions) < 0)
        Py_CLEAR(module);
    for (size_t i = 0; module && i < sizeof(parts) / sizeof(*parts); i++)
        if (parts[i](module) < 0)
            Py_CLEAR(module);
    return module;
}
