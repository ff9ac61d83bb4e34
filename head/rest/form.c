#include "head/rest/form.h"

#include <math.h>
#include <stdlib.h>
#include <strings.h>

#include "common/base/str.h"

#include "head/packages.h"

enum { ENTRYPOINT_MAX = 64 << 10, ENV_MAX = 1024, LABELS_MAX = 64, RESTARTS_MAX = 1000 };

#define EACH(object) (json_t *)(uintptr_t)(object)

/* ---- the words ---- */

static const char *python_type(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "dict";
    case JSON_ARRAY:
        return "list";
    case JSON_STRING:
        return "str";
    case JSON_INTEGER:
        return "int";
    case JSON_REAL:
        return "float";
    case JSON_TRUE:
    case JSON_FALSE:
        return "bool";
    default:
        return "NoneType";
    }
}

static enum fl_status bad_type(struct form *f, const char *what, const json_t *got,
                               struct fl_err *err)
{
    f->bad_type = true;
    return fl_fail(err, FL_INVALID, "%s, got <class '%s'>", what, python_type(got));
}

static bool given(const json_t *v)
{
    return v && !json_is_null(v); /* clients send what is not given as null */
}

/* ---- its parts ---- */

static enum fl_status text(struct form *f, const json_t *v, const char *must, const char **out,
                           struct fl_err *err)
{
    if (!given(v))
        return FL_OK;
    if (!json_is_string(v))
        return bad_type(f, must, v, err);
    if (strlen(json_string_value(v)) != json_string_length(v))
        return fl_fail(err, FL_INVALID, "%s, and without a zero byte", must);
    *out = json_string_value(v);
    return FL_OK;
}

static enum fl_status texts(struct form *f, const json_t *o, const char *name, struct fl_err *err)
{
    char must[80];
    const char *key;
    json_t *v;

    snprintf(must, sizeof(must), "%s must be a dict", name);
    if (!json_is_object(o))
        return bad_type(f, must, o, err);
    snprintf(must, sizeof(must), "%s values must be strings", name);
    json_object_foreach (EACH(o), key, v)
        if (!json_is_string(v))
            return bad_type(f, must, v, err);
    return FL_OK;
}

static enum fl_status want(struct form *f, const char *resource, const char *field, double n,
                           struct fl_err *err)
{
    if (!isfinite(n) || n < 0 || n > 1e15)
        return fl_fail(err, FL_INVALID, "%s must be from 0 to 1e15, got %g", field, n);
    if (n == 0)
        return FL_OK;
    if (f->ask.n_wants == FORM_WANTS_MAX)
        return fl_fail(err, FL_INVALID, "entrypoint_resources names more than %d resources",
                       FORM_WANTS_MAX);
    Fl__Amount *a = &f->amounts[f->ask.n_wants];
    *a = (Fl__Amount)FL__AMOUNT__INIT;
    a->name = (char *)(uintptr_t)resource;
    a->e4 = (int64_t)llround(n * PLACEMENT_ONE);
    f->amount_list[f->ask.n_wants++] = a;
    return FL_OK;
}

static double number(const json_t *v)
{
    return json_is_boolean(v) ? json_is_true(v) : json_number_value(v);
}

static enum fl_status wants(struct form *f, const json_t *o, struct fl_err *err)
{
    static const struct {
        const char *field, *resource, *must;
        bool whole;
    } own[] = {
        { "entrypoint_num_cpus", "CPU", "entrypoint_num_cpus must be a number", false },
        { "entrypoint_num_gpus", "GPU", "entrypoint_num_gpus must be a number", false },
        { "entrypoint_memory", "memory", "entrypoint_memory must be an integer", true },
    };
    const json_t *more = json_object_get(o, "entrypoint_resources");
    const char *name;
    json_t *v;

    f->ask.wants = (const Fl__Amount *const *)f->amount_list;
    for (size_t i = 0; i < FL_LEN(own); i++) {
        v = json_object_get(o, own[i].field);
        if (!given(v))
            continue;
        if (!json_is_boolean(v) && !(own[i].whole ? json_is_integer(v) : json_is_number(v)))
            return bad_type(f, own[i].must, v, err);
        FL_TRY(want(f, own[i].resource, own[i].field, number(v), err));
    }
    if (!given(more))
        return FL_OK;
    if (!json_is_object(more))
        return bad_type(f, "entrypoint_resources must be a dict", more, err);
    json_object_foreach (EACH(more), name, v) {
        if (!json_is_number(v) && !json_is_boolean(v))
            return bad_type(f, "entrypoint_resources values must be numbers", v, err);
        if (strcmp(name, "CPU") == 0 || strcmp(name, "GPU") == 0 || strcmp(name, "memory") == 0)
            return fl_fail(err, FL_INVALID,
                           "Use the 'num_cpus', 'num_gpus' and 'memory' arguments instead of "
                           "'%s' in resources keyword",
                           name);
        FL_TRY(want(f, name, name, number(v), err));
    }
    return FL_OK;
}

static enum fl_status selector(struct form *f, const json_t *o, struct fl_err *err)
{
    const char *key;
    json_t *v;

    if (!given(o))
        return FL_OK;
    FL_TRY(texts(f, o, "entrypoint_label_selector", err));
    if (json_object_size(o) > LABELS_MAX)
        return fl_fail(err, FL_INVALID, "entrypoint_label_selector has %zu labels, at most %d",
                       json_object_size(o), LABELS_MAX);
    f->labels = must(calloc(json_object_size(o) + 1, sizeof(*f->labels)));
    f->label_list = must(calloc(json_object_size(o) + 1, sizeof(*f->label_list)));
    f->ask.labels = (const Fl__Label *const *)f->label_list;
    json_object_foreach (EACH(o), key, v) {
        const char *value = json_string_value(v);

        if (value[0] == '!' || strncmp(value, "in(", 3) == 0)
            return fl_fail(err, FL_UNSUPPORTED,
                           "entrypoint_label_selector: %.60s=%.60s: only one plain value a label "
                           "is supported, no !, in() or !in()",
                           key, value);
        Fl__Label *l = &f->labels[f->ask.n_labels];
        *l = (Fl__Label)FL__LABEL__INIT;
        l->key = (char *)(uintptr_t)key;
        l->value = (char *)(uintptr_t)value;
        f->label_list[f->ask.n_labels++] = l;
    }
    return FL_OK;
}

/* ---- runtime_env ---- */

static enum fl_status env_vars(struct form *f, const json_t *vars, struct fl_err *err)
{
    const char *name;
    json_t *v;

    if (!given(vars))
        return FL_OK;
    if (!json_is_object(vars) || json_object_size(vars) > ENV_MAX)
        return fl_fail(err, FL_INVALID,
                       "runtime_env: env_vars must be an object of at most %d strings", ENV_MAX);
    f->env = must(calloc(json_object_size(vars) + 1, sizeof(*f->env)));
    f->env_list = must(calloc(json_object_size(vars) + 1, sizeof(*f->env_list)));
    f->ask.env = (const Fl__EnvVar *const *)f->env_list;
    json_object_foreach (EACH(vars), name, v) {
        if (!json_is_string(v) || strlen(json_string_value(v)) != json_string_length(v) ||
            !name[0] || strchr(name, '='))
            return fl_fail(err, FL_INVALID,
                           "runtime_env: env_vars must be of type Dict[str, str]; %.60s is not a "
                           "name with a string",
                           name);
        Fl__EnvVar *e = &f->env[f->ask.n_env];
        *e = (Fl__EnvVar)FL__ENV_VAR__INIT;
        e->name = (char *)(uintptr_t)name;
        e->value = (char *)(uintptr_t)json_string_value(v);
        f->env_list[f->ask.n_env++] = e;
    }
    return FL_OK;
}

/* A package of this head, by its address: "gcs://NAME". */
static enum fl_status package(const char *field, const char *uri, const char **name,
                              struct fl_err *err)
{
    if (strncmp(uri, "gcs://", 6) != 0)
        return fl_fail(err, FL_UNSUPPORTED,
                       "runtime_env: %s %.160s: only packages that were uploaded to this head "
                       "(gcs://NAME.zip) are supported; Ray's client uploads a local folder itself",
                       field, uri);
    *name = uri + 6;
    return package_name_check(*name, err) == FL_OK ? FL_OK : fl_wrap(err, FL_INVALID, "%s", field);
}

static enum fl_status working_dir(struct form *f, const json_t *v, struct fl_err *err)
{
    const char *dir = NULL;

    FL_TRY(text(f, v, "runtime_env: working_dir must be a string", &dir, err));
    if (!dir || !*dir)
        return FL_OK;
    if (dir[0] == '/')
        f->ask.cwd = dir; /* ours: a folder that is there on the nodes */
    else
        FL_TRY(package("working_dir", dir, &f->ask.working_dir, err));
    return FL_OK;
}

static enum fl_status py_modules(struct form *f, const json_t *list, struct fl_err *err)
{
    size_t i;
    json_t *v;

    if (!given(list))
        return FL_OK;
    if (!json_is_array(list) || json_array_size(list) > FORM_MODULES_MAX)
        return fl_fail(err, FL_INVALID,
                       "runtime_env: py_modules must be a list of at most %d packages",
                       FORM_MODULES_MAX);
    f->ask.py_modules = f->modules;
    json_array_foreach (EACH(list), i, v) {
        const char *uri = NULL;

        FL_TRY(text(f, v, "runtime_env: py_modules must be strings", &uri, err));
        FL_TRY(package("py_modules", uri ? uri : "null", &f->modules[f->ask.n_py_modules], err));
        f->ask.n_py_modules++;
    }
    return FL_OK;
}

/* What the client leaves in it that has been dealt with by the upload, or asks for nothing here. */
static bool harmless(const char *field)
{
    static const char *const names[] = { "excludes", "config", "_ray_commit",
                                         "_inject_current_ray" };

    for (size_t i = 0; i < FL_LEN(names); i++)
        if (strcmp(field, names[i]) == 0)
            return true;
    return false;
}

static enum fl_status runtime_env(struct form *f, const json_t *r, struct fl_err *err)
{
    const char *name;
    json_t *v;

    if (!given(r))
        return FL_OK;
    if (!json_is_object(r))
        return bad_type(f, "runtime_env must be a dict", r, err);
    json_object_foreach (EACH(r), name, v)
        if (given(v) && strcmp(name, "env_vars") != 0 && strcmp(name, "working_dir") != 0 &&
            strcmp(name, "py_modules") != 0 && !harmless(name))
            return fl_fail(err, FL_UNSUPPORTED,
                           "runtime_env: %.60s is not supported; env_vars, working_dir and "
                           "py_modules are",
                           name);
    FL_TRY(env_vars(f, json_object_get(r, "env_vars"), err));
    FL_TRY(working_dir(f, json_object_get(r, "working_dir"), err));
    FL_TRY(py_modules(f, json_object_get(r, "py_modules"), err));
    f->runtime_env = json_dumps(r, JSON_COMPACT);
    f->ask.runtime_env = f->runtime_env;
    return FL_OK;
}

/* ---- the rest ---- */

/* Names become variables of the environment: letters, digits and '_'. */
static enum fl_status ports(struct form *f, const json_t *list, struct fl_err *err)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
    size_t i;
    json_t *v;

    if (!given(list))
        return FL_OK;
    if (!json_is_array(list) || json_array_size(list) > FORM_PORTS_MAX)
        return fl_fail(err, FL_INVALID, "furlong.ports must be a list of at most %d names", FORM_PORTS_MAX);
    f->ask.ports = f->ports;
    json_array_foreach (EACH(list), i, v) {
        const char *name = json_string_value(v), *number = name ? strchr(name, '=') : NULL;
        size_t n = !name ? 0 : number ? (size_t)(number - name) : strlen(name);
        int64_t port;

        if (n == 0 || n > 40 || strspn(name, letters) < n ||
            (number && fl_parse_i64(number + 1, 1, 65535, &port, NULL) != FL_OK))
            return fl_fail(err, FL_INVALID,
                           "furlong.ports: '%.60s' is neither NAME nor NAME=PORT; a name has letters, digits and '_', a port is 1 to 65535",
                           name ? name : "null");
        for (size_t k = 0; k < f->ask.n_ports; k++)
            if (strncasecmp(f->ports[k], name, n) == 0 && (!f->ports[k][n] || f->ports[k][n] == '='))
                return fl_fail(err, FL_INVALID, "furlong.ports: '%.40s' is there twice", name);
        f->ports[f->ask.n_ports++] = name;
    }
    return FL_OK;
}

static enum fl_status furlong_part(struct form *f, const json_t *o, struct fl_err *err)
{
    const json_t *n = json_object_get(o, "driver_restarts"), *off = json_object_get(o, "off_head");
    const char *name;
    json_t *v;

    if (!given(o))
        return FL_OK;
    if (!json_is_object(o))
        return fl_fail(err, FL_INVALID, "furlong must be an object");
    json_object_foreach (EACH(o), name, v)
        if (strcmp(name, "driver_restarts") != 0 && strcmp(name, "run_dir") != 0 &&
            strcmp(name, "cwd") != 0 && strcmp(name, "off_head") != 0 && strcmp(name, "ports") != 0)
            return fl_fail(err, FL_INVALID, "furlong: unknown member %.60s", name);
    if (n &&
        (!json_is_integer(n) || json_integer_value(n) < 0 || json_integer_value(n) > RESTARTS_MAX))
        return fl_fail(err, FL_INVALID, "furlong.driver_restarts must be a number from 0 to %d",
                       RESTARTS_MAX);
    f->ask.driver_restarts = (uint32_t)json_integer_value(n);
    if (off && !json_is_boolean(off))
        return fl_fail(err, FL_INVALID, "furlong.off_head must be true or false");
    f->ask.off_head = json_is_true(off);
    FL_TRY(ports(f, json_object_get(o, "ports"), err));
    FL_TRY(text(f, json_object_get(o, "run_dir"), "furlong.run_dir must be a string",
                &f->ask.run_dir, err));
    return text(f, json_object_get(o, "cwd"), "furlong.cwd must be a string", &f->ask.cwd, err);
}

static enum fl_status metadata(struct form *f, const json_t *m, struct fl_err *err)
{
    if (!given(m))
        return FL_OK;
    FL_TRY(texts(f, m, "metadata", err));
    f->metadata = json_dumps(m, JSON_COMPACT);
    f->ask.metadata = f->metadata;
    return FL_OK;
}

static enum fl_status known_names(struct form *f, const json_t *o, struct fl_err *err)
{
    static const char *const known[] = { "entrypoint",
                                         "submission_id",
                                         "job_id",
                                         "metadata",
                                         "runtime_env",
                                         "entrypoint_num_cpus",
                                         "entrypoint_num_gpus",
                                         "entrypoint_memory",
                                         "entrypoint_resources",
                                         "furlong",
                                         "entrypoint_label_selector" };
    const char *name;
    json_t *v;

    json_object_foreach (EACH(o), name, v) {
        bool found = !given(v);

        for (size_t i = 0; i < FL_LEN(known); i++)
            found |= strcmp(name, known[i]) == 0;
        f->bad_type = !found;
        if (!found)
            return fl_fail(err, FL_INVALID,
                           "JobSubmitRequest.__init__() got an unexpected keyword argument '%.60s'",
                           name);
    }
    f->bad_type = !given(json_object_get(o, "entrypoint"));
    return f->bad_type ? fl_fail(err, FL_INVALID,
                                 "JobSubmitRequest.__init__() missing 1 required positional "
                                 "argument: 'entrypoint'")
                       : FL_OK;
}

enum fl_status form_read(struct form *f, const json_t *o, struct fl_err *err)
{
    const char *job_id = NULL;

    FL_TRY(known_names(f, o, err));
    FL_TRY(text(f, json_object_get(o, "entrypoint"), "entrypoint must be a string",
                &f->ask.entrypoint, err));
    if (strlen(f->ask.entrypoint) > ENTRYPOINT_MAX)
        return fl_fail(err, FL_INVALID, "entrypoint has %zu bytes, at most %d are taken",
                       strlen(f->ask.entrypoint), ENTRYPOINT_MAX);
    FL_TRY(text(f, json_object_get(o, "submission_id"),
                "submission_id must be a string if provided", &f->ask.submission_id, err));
    FL_TRY(
        text(f, json_object_get(o, "job_id"), "job_id must be a string if provided", &job_id, err));
    if (!f->ask.submission_id || !*f->ask.submission_id)
        f->ask.submission_id = job_id && *job_id ? job_id : NULL;
    FL_TRY(runtime_env(f, json_object_get(o, "runtime_env"), err));
    FL_TRY(metadata(f, json_object_get(o, "metadata"), err));
    FL_TRY(wants(f, o, err));
    FL_TRY(selector(f, json_object_get(o, "entrypoint_label_selector"), err));
    return furlong_part(f, json_object_get(o, "furlong"), err);
}

void form_fini(struct form *f)
{
    free(f->env);
    free(f->env_list);
    free(f->labels);
    free(f->label_list);
    free(f->runtime_env);
    free(f->metadata);
}
