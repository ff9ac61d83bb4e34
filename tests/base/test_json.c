#include <stdlib.h>

#include "common/base/file.h"
#include "common/base/str.h"
#include "common/conf/json.h"
#include "tests/t.h"

static enum fl_status parse(const char *text, json_t **out, struct fl_err *err)
{
    return fl_json_parse(text, strlen(text), "x.json", 4096, out, err);
}

static void hostile_text_is_refused(void **state)
{
    static const struct row {
        const char *name, *text, *says;
    } rows[] = {
        { "nothing", "", "x.json: not JSON at column" },
        { "cut", "{\"a\": [1, 2", "x.json: not JSON at column" },
        { "behind", "{} x", "x.json: not JSON at column" },
        { "twice the same key", "{\"a\": 1, \"a\": 2}", "duplicate object key" },
        { "second line", "{\n  \"a\": oops\n}", "x.json: not JSON at line 2 column" },
        { "no UTF-8", "\"\xff\"", "x.json: not JSON at column" },
        { "NUL in a key", "{\"a\\u0000b\": 1}", "x.json: not JSON at column" },
        { "too big a number", "[123456789012345678901234567890]", "x.json: not JSON at column" },
    };
    char deep[400];

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct fl_err err = { 0 };
        json_t *v = NULL;

        t_refused(parse(rows[i].text, &v, &err), FL_INVALID, &err);
        t_true(!v, "%s", rows[i].name);
        t_has(err.text, rows[i].says);
    }
    memset(deep, '[', sizeof(deep));
    struct fl_err err = { 0 };
    json_t *v = NULL;
    t_refused(fl_json_parse(deep, sizeof(deep), "x", 4096, &v, &err), FL_INVALID, &err);
    t_has(err.text, "x: nested deeper than 64");
    t_refused(fl_json_parse(deep, sizeof(deep), "x", 399, &v, &err), FL_INVALID, &err);
    t_has(err.text, "x: 400 bytes, 399 at most");
    t_ok(parse("\"[[[[[[ \\\" [[[[\"", &v, &err), &err);
    json_decref(v);
}

static void what_is_missing_is_named_with_its_way(void **state)
{
    static const char text[] =
        "{\"start\": 3, \"name\": \"gpu-a\", \"up\": true, \"load\": 1, \"none\": null,"
        " \"devices\": [{\"memory\": 5}, {\"memory\": \"much\"}], \"sizes\": [1, 2.5]}";
    struct fl_json_at root, devices, sizes, item;
    struct fl_err err = { 0 };
    const char *name = NULL;
    json_t *v = NULL;
    int64_t i = -7;
    double d;
    size_t n;
    bool b;

    (void)state;
    t_ok(parse(text, &v, &err), &err);
    root = fl_json_root(v, "node.json");
    t_ok(fl_json_int(&root, "start", 0, 10, &i, &err), &err);
    t_int_eq(i, 3);
    t_ok(fl_json_text(&root, "name", &name, &err), &err);
    t_str_eq(name, "gpu-a");
    t_ok(fl_json_bool(&root, "up", &b, &err), &err);
    t_ok(fl_json_real(&root, "load", &d, &err), &err);
    t_true(b && d == 1.0);
    t_true(fl_json_has(&root, "name") && !fl_json_has(&root, "none") && !fl_json_has(&root, "x"));
    t_ok(fl_json_array(&root, "devices", &devices, &n, &err), &err);
    t_int_eq(n, 2);

    i = -7;
    t_refused(fl_json_int(&root, "strat", 0, 9, &i, &err), FL_INVALID, &err);
    t_str_eq(err.text, "node.json: strat: is missing");
    t_refused(fl_json_int(&root, "start", 5, 9, &i, &err), FL_INVALID, &err);
    t_str_eq(err.text, "node.json: start: 3 is not between 5 and 9");
    item = fl_json_item(&devices, 1);
    t_refused(fl_json_int(&item, "memory", 0, 9, &i, &err), FL_INVALID, &err);
    t_str_eq(err.text, "node.json: devices[1].memory: is a string, not a whole number");
    t_ok(fl_json_array(&root, "sizes", &sizes, &n, &err), &err);
    item = fl_json_item(&sizes, 1);
    t_refused(fl_json_int(&item, NULL, 0, 9, &i, &err), FL_INVALID, &err);
    t_str_eq(err.text, "node.json: sizes[1]: is a number, not a whole number");
    t_refused(fl_json_object(&root, "devices", &item, &err), FL_INVALID, &err);
    t_str_eq(err.text, "node.json: devices: is an array, not an object");
    t_refused(fl_json_text(&root, "none", &name, &err), FL_INVALID, &err);
    t_refused(fl_json_bool(&root, "start", &b, &err), FL_INVALID, &err);
    t_refused(fl_json_array(&root, NULL, &item, &n, &err), FL_INVALID, &err);
    t_str_eq(err.text, "node.json: is an object, not an array");
    t_int_eq(i, -7, "untouched");
    json_decref(v);
}

static void lines_are_numbered(void **state)
{
    static const char text[] = "{\"a\": 1}\n\n  \r\n{\"a\": 2}\n[1]\nnot json\n{\"b\": "
                               "\"long enough to be refused, since a line has a bound\"}\n{}";
    const char *path = t_path("lines.jsonl");
    struct fl_json_lines *r = NULL;
    struct fl_err err = { 0 };
    json_t *v = NULL;
    char wanted[320];

    (void)state;
    t_ok(fl_file_write(path, 0600, text, strlen(text), &err), &err);
    t_ok(fl_json_lines_open(path, 32, &r, &err), &err);
    t_ok(fl_json_lines_next(r, &v, &err), &err);
    json_decref(v);
    t_ok(fl_json_lines_next(r, &v, &err), &err);
    snprintf(wanted, sizeof(wanted), "%s line 4", path);
    t_str_eq(fl_json_lines_where(r), wanted);
    json_decref(v);
    t_refused(fl_json_lines_next(r, &v, &err), FL_INVALID, &err);
    t_has(err.text, "lines.jsonl line 5: is an array, not an object");
    t_refused(fl_json_lines_next(r, &v, &err), FL_INVALID, &err);
    t_has(err.text, "lines.jsonl line 6: not JSON at column");
    t_refused(fl_json_lines_next(r, &v, &err), FL_INVALID, &err);
    t_has(err.text, "lines.jsonl line 7: longer than 32 bytes");
    fl_json_lines_close(r);
    t_refused(fl_json_lines_open(t_path("absent.jsonl"), 32, &r, &err), FL_NOT_FOUND, &err);
    t_has(err.text, "absent.jsonl");

    t_ok(fl_file_write(path, 0600, "{}\n\n", 4, &err), &err);
    t_ok(fl_json_lines_open(path, 32, &r, &err), &err);
    t_ok(fl_json_lines_next(r, &v, &err), &err);
    json_decref(v);
    t_int_eq(fl_json_lines_next(r, &v, &err), FL_NOT_FOUND);
    fl_json_lines_close(r);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(hostile_text_is_refused),
        cmocka_unit_test(what_is_missing_is_named_with_its_way),
        cmocka_unit_test(lines_are_numbered),
    };

    return t_run("json", tests);
}
