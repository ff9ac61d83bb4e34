/* common/conf/opt_file.c - options from a file */
#include <stdio.h>

#include "common/base/str.h"
#include "common/conf/json.h"
#include "common/conf/opt_priv.h"

enum { FILE_MAX_BYTES = 1 << 20 };

/* The text of a number stands in the file's place from here on: an option may keep it. */
static enum fl_status take(struct fl_opts *o, const struct fl_json_at *root, json_t *file, const char *name,
                           const json_t *v, struct fl_err *err)
{
    char number[32], origin[160];
    const char *text = number;

    snprintf(origin, sizeof(origin), "%s: ", root->key);
    switch (json_typeof(v)) {
    case JSON_STRING:
        text = json_string_value(v);
        break;
    case JSON_TRUE:
        text = "true";
        break;
    case JSON_FALSE:
        text = "false";
        break;
    case JSON_INTEGER:
        snprintf(number, sizeof(number), "%lld", (long long)json_integer_value(v));
        break;
    case JSON_REAL:
        snprintf(number, sizeof(number), "%.17g", json_real_value(v));
        break;
    case JSON_NULL:
        return FL_OK;
    case JSON_OBJECT:
    case JSON_ARRAY:
        return fl_json_bad(root, name, err, "give a string, a number, true or false");
    }
    if (text == number) {
        if (json_object_set_new(file, name, json_string(number)) < 0)
            return fl_fail(err, FL_EXHAUSTED, "no memory for %s", root->key);
        text = json_string_value(json_object_get(file, name));
    }
    return fl_opts_named(o, FL_OPT_FILE, origin, name, text, err);
}

enum fl_status fl_opts_file(struct fl_opts *o, const char *path, json_t **keep, struct fl_err *err)
{
    json_t *json = NULL, *v;
    const char *name;
    void *next;

    FL_TRY(fl_json_load(path, FILE_MAX_BYTES, &json, err));
    struct fl_json_at root = fl_json_root(json, path);
    enum fl_status st =
        json_is_object(json) ? FL_OK : fl_json_bad(&root, NULL, err, "is not an object of options");

    json_object_foreach_safe(json, next, name, v)
    {
        st = st == FL_OK ? take(o, &root, json, name, v, err) : st;
    }
    if (st != FL_OK)
        json_decref(json);
    else
        *keep = json;
    return st;
}
