#include "common/conf/json.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/file.h"
#include "common/base/str.h"

/* jansson recurses down to 2048 levels; this looks before it does. */
static bool too_deep(const char *text, size_t len)
{
    unsigned depth = 0;
    bool quoted = false;

    for (size_t i = 0; i < len; i++) {
        char c = text[i];

        if (quoted && c == '\\')
            i++;
        else if (c == '"')
            quoted = !quoted;
        else if (!quoted && (c == '{' || c == '[') && ++depth > FL_JSON_DEPTH)
            return true;
        else if (!quoted && (c == '}' || c == ']') && depth)
            depth--;
    }
    return false;
}

enum fl_status fl_json_parse(const char *text, size_t len, const char *what, size_t max_bytes,
                             json_t **out, struct fl_err *err)
{
    json_error_t e;

    if (len > max_bytes)
        return fl_fail(err, FL_INVALID, "%s: %zu bytes, %zu at most", what, len, max_bytes);
    if (too_deep(text, len))
        return fl_fail(err, FL_INVALID, "%s: nested deeper than %d", what, FL_JSON_DEPTH);
    json_t *root = json_loadb(text, len, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &e);
    if (!root && e.line > 1)
        return fl_fail(err, FL_INVALID, "%s: not JSON at line %d column %d: %s", what, e.line, e.column,
                       e.text);
    if (!root)
        return fl_fail(err, FL_INVALID, "%s: not JSON at column %d: %s", what, e.column, e.text);
    *out = root;
    return FL_OK;
}

enum fl_status fl_json_load(const char *path, size_t max_bytes, json_t **out, struct fl_err *err)
{
    char *text;
    size_t len = 0;

    FL_TRY(fl_file_read(path, max_bytes, &text, &len, err));
    enum fl_status st = fl_json_parse(text, len, path, max_bytes, out, err);
    free(text);
    return st;
}

struct fl_json_at fl_json_root(const json_t *json, const char *what)
{
    return (struct fl_json_at){ json, NULL, what, 0 };
}

static void way_add(struct fl_str *s, const struct fl_json_at *at)
{
    if (!at->up) {
        fl_str_add(s, "%s: ", at->key);
        return;
    }
    way_add(s, at->up);
    if (!at->key)
        fl_str_add(s, "[%zu]", at->index);
    else
        fl_str_add(s, at->up->up ? ".%s" : "%s", at->key);
}

enum fl_status fl_json_bad(const struct fl_json_at *at, const char *key, struct fl_err *err,
                           const char *fmt, ...)
{
    struct fl_json_at member = { NULL, at, key, 0 };
    char way[160], text[160];
    struct fl_str s = FL_STR_ON(way);
    va_list ap;

    way[0] = '\0';
    way_add(&s, key ? &member : at);
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    /* the root's own way ends in ": " already */
    return fl_fail(err, FL_INVALID, key || at->up ? "%s: %s" : "%s%s", way, text);
}

static const char *type_name(const json_t *v)
{
    static const char *const names[] = {
        [JSON_OBJECT] = "an object", [JSON_ARRAY] = "an array",
        [JSON_STRING] = "a string",  [JSON_INTEGER] = "a whole number",
        [JSON_REAL] = "a number",    [JSON_TRUE] = "true",
        [JSON_FALSE] = "false",      [JSON_NULL] = "null",
    };

    return names[json_typeof(v)];
}

static enum fl_status value_get(const struct fl_json_at *at, const char *key, const json_t **out,
                                struct fl_err *err)
{
    if (!key) {
        *out = at->json;
        return FL_OK;
    }
    if (!json_is_object(at->json))
        return fl_json_bad(at, NULL, err, "is %s, not an object", type_name(at->json));
    *out = json_object_get(at->json, key);
    if (!*out)
        return fl_json_bad(at, key, err, "is missing");
    return FL_OK;
}

bool fl_json_has(const struct fl_json_at *at, const char *key)
{
    const json_t *v = json_object_get(at->json, key);

    return v && !json_is_null(v);
}

enum fl_status fl_json_int(const struct fl_json_at *at, const char *key, int64_t min, int64_t max,
                           int64_t *out, struct fl_err *err)
{
    const json_t *v = NULL;

    FL_TRY(value_get(at, key, &v, err));
    if (!json_is_integer(v))
        return fl_json_bad(at, key, err, "is %s, not a whole number", type_name(v));
    if (json_integer_value(v) < min || json_integer_value(v) > max)
        return fl_json_bad(at, key, err, "%lld is not between %lld and %lld",
                           (long long)json_integer_value(v), (long long)min, (long long)max);
    *out = json_integer_value(v);
    return FL_OK;
}

enum fl_status fl_json_real(const struct fl_json_at *at, const char *key, double *out,
                            struct fl_err *err)
{
    const json_t *v = NULL;

    FL_TRY(value_get(at, key, &v, err));
    if (!json_is_number(v))
        return fl_json_bad(at, key, err, "is %s, not a number", type_name(v));
    *out = json_number_value(v);
    return FL_OK;
}

enum fl_status fl_json_bool(const struct fl_json_at *at, const char *key, bool *out,
                            struct fl_err *err)
{
    const json_t *v = NULL;

    FL_TRY(value_get(at, key, &v, err));
    if (!json_is_boolean(v))
        return fl_json_bad(at, key, err, "is %s, not true or false", type_name(v));
    *out = json_is_true(v);
    return FL_OK;
}

enum fl_status fl_json_text(const struct fl_json_at *at, const char *key, const char **out,
                            struct fl_err *err)
{
    const json_t *v = NULL;

    FL_TRY(value_get(at, key, &v, err));
    if (!json_is_string(v))
        return fl_json_bad(at, key, err, "is %s, not a string", type_name(v));
    *out = json_string_value(v);
    return FL_OK;
}

enum fl_status fl_json_object(const struct fl_json_at *at, const char *key, struct fl_json_at *out,
                              struct fl_err *err)
{
    const json_t *v = NULL;

    FL_TRY(value_get(at, key, &v, err));
    if (!json_is_object(v))
        return fl_json_bad(at, key, err, "is %s, not an object", type_name(v));
    *out = key ? (struct fl_json_at){ v, at, key, 0 } : *at;
    return FL_OK;
}

enum fl_status fl_json_array(const struct fl_json_at *at, const char *key, struct fl_json_at *out,
                             size_t *n, struct fl_err *err)
{
    const json_t *v = NULL;

    FL_TRY(value_get(at, key, &v, err));
    if (!json_is_array(v))
        return fl_json_bad(at, key, err, "is %s, not an array", type_name(v));
    *out = key ? (struct fl_json_at){ v, at, key, 0 } : *at;
    *n = json_array_size(v);
    return FL_OK;
}

struct fl_json_at fl_json_item(const struct fl_json_at *array, size_t i)
{
    return (struct fl_json_at){ json_array_get(array->json, i), array, NULL, i };
}

/* ---- lines ---- */

struct fl_json_lines {
    FILE *file;
    size_t max_bytes, cap, number;
    char *line, *where;
    char path[];
};

enum fl_status fl_json_lines_open(const char *path, size_t max_line_bytes,
                                  struct fl_json_lines **out, struct fl_err *err)
{
    enum { WHERE_TAIL = 32 }; /* " line 18446744073709551615" */
    size_t len = strlen(path) + 1;
    struct fl_json_lines *r = calloc(1, sizeof(*r) + 2 * len + WHERE_TAIL);

    if (!r)
        return fl_fail(err, FL_EXHAUSTED, "no memory to read %s", path);
    memcpy(r->path, path, len);
    r->where = r->path + len;
    memcpy(r->where, path, len);
    r->max_bytes = max_line_bytes;
    r->file = fopen(path, "re");
    if (!r->file) {
        enum fl_status st = fl_fail_errno(err, "open %s", path);

        free(r);
        return st;
    }
    *out = r;
    return FL_OK;
}

/* The next line into r->line without its end; a longer one than allowed is not read to its end. */
static enum fl_status line_read(struct fl_json_lines *r, size_t *len, struct fl_err *err)
{
    size_t n = 0;
    int c;

    sprintf(r->where, "%s line %zu", r->path, ++r->number);
    while ((c = getc_unlocked(r->file)) != EOF && c != '\n') {
        if (n == r->max_bytes)
            return fl_fail(err, FL_INVALID, "%s: longer than %zu bytes", r->where, r->max_bytes);
        if (n == r->cap) {
            size_t cap = r->cap ? 2 * r->cap : 512;
            char *grown = realloc(r->line, cap);

            if (!grown)
                return fl_fail(err, FL_EXHAUSTED, "%s: no memory", r->where);
            r->line = grown;
            r->cap = cap;
        }
        r->line[n++] = (char)c;
    }
    if (ferror(r->file))
        return fl_fail_errno(err, "read %s", r->where);
    *len = n;
    return c == EOF && n == 0 ? FL_NOT_FOUND : FL_OK;
}

enum fl_status fl_json_lines_next(struct fl_json_lines *r, json_t **out, struct fl_err *err)
{
    size_t len = 0;

    for (;;) {
        enum fl_status st = line_read(r, &len, err);

        if (st == FL_NOT_FOUND)
            return fl_fail(err, st, "%s: no more lines", r->path);
        FL_TRY(st);
        size_t blank = 0;
        while (blank < len && strchr(" \t\r", r->line[blank]))
            blank++;
        if (blank < len)
            break;
    }
    json_t *v = NULL;
    FL_TRY(fl_json_parse(r->line, len, r->where, r->max_bytes, &v, err));
    if (!json_is_object(v)) {
        enum fl_status st =
            fl_fail(err, FL_INVALID, "%s: is %s, not an object", r->where, type_name(v));

        json_decref(v);
        return st;
    }
    *out = v;
    return FL_OK;
}

const char *fl_json_lines_where(const struct fl_json_lines *r)
{
    return r->where;
}

void fl_json_lines_close(struct fl_json_lines *r)
{
    if (!r)
        return;
    fclose(r->file);
    free(r->line);
    free(r);
}
