/* Bodies of submissions: what is taken, and in which words the rest is refused. */
#include <stdlib.h>

#include "head/packages.h"
#include "head/rest/form.h"
#include "tests/t.h"

static enum fl_status read_text(const char *text, struct form *f, json_t **o, struct fl_err *err)
{
    *o = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    t_true(*o != NULL, "%s", text);
    return form_read(f, *o, err);
}

static void refusals_have_rays_words(void **unused)
{
    static const struct {
        const char *body, *says;
        bool type; /* a TypeError */
    } rows[] = {
        { "{}", "JobSubmitRequest.__init__() missing 1 required positional argument: 'entrypoint'", true },
        { "{\"entrypoint\": null}", "missing 1 required positional argument", true },
        { "{\"entrypoint\": 1}", "entrypoint must be a string, got <class 'int'>", true },
        { "{\"entrypoint\": true}", "got <class 'bool'>", true },
        { "{\"entrypoint\": 1.5}", "got <class 'float'>", true },
        { "{\"entrypoint\": {}}", "got <class 'dict'>", true },
        { "{\"entrypoint\": \"\", \"x\": 1}", "unexpected keyword argument 'x'", true },
        { "{\"entrypoint\": \"\", \"metadata\": {\"a\": null}}",
          "metadata values must be strings, got <class 'NoneType'>", true },
        { "{\"entrypoint\": \"\", \"entrypoint_memory\": 1.5}",
          "entrypoint_memory must be an integer, got <class 'float'>", true },
        { "{\"entrypoint\": \"\", \"entrypoint_num_cpus\": -1}", "from 0 to 1e15", false },
        { "{\"entrypoint\": \"\", \"entrypoint_resources\": {\"GPU\": 1}}", "num_gpus", false },
        { "{\"entrypoint\": \"\", \"entrypoint_label_selector\": {\"a\": \"!b\"}}", "only one plain value", false },
        { "{\"entrypoint\": \"\", \"runtime_env\": {\"pip\": []}}", "pip is not supported", false },
        { "{\"entrypoint\": \"\", \"runtime_env\": {\"env_vars\": {\"A=B\": \"\"}}}", "A=B", false },
        { "{\"entrypoint\": \"\", \"runtime_env\": {\"env_vars\": {\"\": \"x\"}}}", "name with a string", false },
        { "{\"entrypoint\": \"\", \"runtime_env\": {\"working_dir\": \"s3://x.zip\"}}", "only packages", false },
        { "{\"entrypoint\": \"\", \"runtime_env\": {\"working_dir\": \"gcs://../x.zip\"}}", "package name", false },
        { "{\"entrypoint\": \"\", \"runtime_env\": {\"working_dir\": \"gcs://x.tgz\"}}", "end in .zip or .whl", false },
        { "{\"entrypoint\": \"\", \"runtime_env\": {\"py_modules\": \"gcs://x.zip\"}}", "must be a list", false },
        { "{\"entrypoint\": \"\", \"runtime_env\": {\"py_modules\": [1]}}", "must be strings", true },
        { "{\"entrypoint\": \"a\\u0000b\"}", "zero byte", false },
        { "{\"entrypoint\": \"\", \"furlong\": {\"colour\": 1}}", "unknown member colour", false },
    };

    (void)unused;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct form f = { 0 };
        struct fl_err err = { 0 };
        json_t *o;
        bool kept = strstr(rows[i].body, "\\u0000") != NULL;

        o = json_loads(rows[i].body, JSON_REJECT_DUPLICATES | (kept ? JSON_ALLOW_NUL : 0), NULL);
        t_true(o != NULL, "%s", rows[i].body);
        enum fl_status st = form_read(&f, o, &err);
        t_true(st == FL_INVALID || st == FL_UNSUPPORTED, "%s", rows[i].body);
        t_true(strstr(err.text, rows[i].says) != NULL, "%s: %s", rows[i].body, err.text);
        t_int_eq(f.bad_type, rows[i].type, "%s", rows[i].body);
        form_fini(&f);
        json_decref(o);
    }
}

static void all_members_are_understood(void **unused)
{
    struct form f = { 0 };
    struct fl_err err = { 0 };
    json_t *o;

    (void)unused;
    t_ok(read_text("{\"entrypoint\": \"run\", \"job_id\": \"old\", \"metadata\": {\"a\": \"b\"},"
                   " \"entrypoint_num_cpus\": 0.5, \"entrypoint_num_gpus\": 0, \"entrypoint_memory\": 1024,"
                   " \"entrypoint_resources\": {\"own\": 2}, \"entrypoint_label_selector\": {\"k\": \"v\"},"
                   " \"runtime_env\": {\"env_vars\": {\"A\": \"1\"}, \"working_dir\": \"gcs://w.zip\","
                   " \"py_modules\": [\"gcs://m.zip\", \"gcs://n.whl\"], \"excludes\": [\"x\"], \"pip\": null}}",
                   &f, &o, &err),
         &err);
    t_str_eq(f.ask.submission_id, "old", "job_id stands for submission_id");
    t_int_eq(f.ask.n_wants, 3, "0 is no wish");
    t_int_eq(f.ask.wants[0]->e4, 5000);
    t_int_eq(f.ask.n_labels, 1);
    t_str_eq(f.ask.working_dir, "w.zip");
    t_int_eq(f.ask.n_py_modules, 2);
    t_str_eq(f.ask.py_modules[1], "n.whl");
    t_true(strstr(f.ask.runtime_env, "\"excludes\"") != NULL, "it comes back as it was given");
    form_fini(&f);
    json_decref(o);
}

static void names_of_packages(void **unused)
{
    static const struct {
        const char *name;
        bool good;
    } rows[] = {
        { "_ray_pkg_0123456789abcdef.zip", true }, { "a-1.0+x.whl", true }, { ".zip", false },
        { "x.tar.gz", false },                     { "a/b.zip", false },    { "..zip", false },
        { ".hidden.zip", false },                  { "a b.zip", false },    { "", false },
    };

    (void)unused;
    for (size_t i = 0; i < FL_LEN(rows); i++)
        t_int_eq(package_name_check(rows[i].name, NULL) == FL_OK, rows[i].good, "%s", rows[i].name);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(refusals_have_rays_words),
        cmocka_unit_test(all_members_are_understood),
        cmocka_unit_test(names_of_packages),
    };

    return t_run("form", tests);
}
