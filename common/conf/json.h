/* common/conf/json.h - JSON from outside: bounded, strict, and errors that name the place
 *
 *     struct fl_json_at node, devices;
 *     FL_TRY(fl_json_load(path, FL_JSON_MAX, &root, err));
 *     node = fl_json_root(root, path);
 *     FL_TRY(fl_json_int(&node, "start", 0, INT64_MAX, &start, err));
 *     FL_TRY(fl_json_array(&node, "devices", &devices, &n, err));
 *     // "node.json: devices[3].memory: is a string, not a whole number" */
#pragma once
#include <jansson.h>

#include "common/base/base.h"

enum { FL_JSON_MAX = 16 << 20, FL_JSON_DEPTH = 64 };

/* Duplicate keys, more than max_bytes, deeper than FL_JSON_DEPTH and anything behind the value are
 * refused; FL_INVALID with what, line and column. *out: json_decref. */
enum fl_status fl_json_parse(const char *text, size_t len, const char *what, size_t max_bytes,
                             json_t **out, struct fl_err *err);
enum fl_status fl_json_load(const char *path, size_t max_bytes, json_t **out, struct fl_err *err);

/* A value and the way to it, kept on the stack: the text of the way is made when something is wrong
 * and not before. Everything is borrowed. */
struct fl_json_at {
    const json_t *json;
    const struct fl_json_at *up; /* NULL: the root */
    const char *key;             /* root: what it is, "node.json" */
    size_t index;                /* without key: item of an array */
};
struct fl_json_at fl_json_root(const json_t *json, const char *what);
enum fl_status fl_json_bad(const struct fl_json_at *at, const char *key, struct fl_err *err,
                           const char *fmt, ...)
    __attribute__((format(printf, 4, 5))); /* FL_INVALID: "WAY.key: ..." */

/* Of an object. FL_INVALID: missing, of another type, out of range. */
bool fl_json_has(const struct fl_json_at *at, const char *key); /* there, and not null */
enum fl_status fl_json_int(const struct fl_json_at *at, const char *key, int64_t min, int64_t max,
                           int64_t *out, struct fl_err *err);
enum fl_status fl_json_real(const struct fl_json_at *at, const char *key, double *out,
                            struct fl_err *err); /* whole numbers too */
enum fl_status fl_json_bool(const struct fl_json_at *at, const char *key, bool *out,
                            struct fl_err *err);
enum fl_status fl_json_text(const struct fl_json_at *at, const char *key, const char **out,
                            struct fl_err *err);
enum fl_status fl_json_object(const struct fl_json_at *at, const char *key,
                              struct fl_json_at *out, struct fl_err *err);
enum fl_status fl_json_array(const struct fl_json_at *at, const char *key, struct fl_json_at *out,
                             size_t *n, struct fl_err *err);
struct fl_json_at fl_json_item(const struct fl_json_at *array, size_t i);
/* The value itself (an item of an array) instead of a member: key NULL in all of the above. */

/* One JSON object a line. Blank lines are passed over. */
struct fl_json_lines;
enum fl_status fl_json_lines_open(const char *path, size_t max_line_bytes,
                                  struct fl_json_lines **out, struct fl_err *err);
/* FL_NOT_FOUND: no more. FL_INVALID: "prompts.jsonl line 17: ...". *out: json_decref. */
enum fl_status fl_json_lines_next(struct fl_json_lines *r, json_t **out, struct fl_err *err);
const char *fl_json_lines_where(const struct fl_json_lines *r); /* "prompts.jsonl line 17" */
void fl_json_lines_close(struct fl_json_lines *r);              /* NULL is fine */
