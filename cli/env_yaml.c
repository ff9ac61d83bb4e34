#include "cli/env.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "common/base/str.h"

/* An alias stands for its node each time: the bound is on what comes out, not on what is written. */
enum { VALUES_MAX = 100000, DEPTH_MAX = 64 };

struct reader {
    yaml_document_t doc;
    const char *what;
    unsigned values;
    struct fl_err *err;
};

static json_t *wrong(const struct reader *r, const yaml_mark_t *at, const char *why)
{
    (void)fl_fail(r->err, FL_INVALID, "%.120s: line %zu, column %zu: %s", r->what, at->line + 1, at->column + 1, why);
    return NULL;
}

static bool is_one_of(const char *text, const char *const *words)
{
    for (; *words; words++)
        if (strcmp(text, *words) == 0)
            return true;
    return false;
}

/* Plain scalars as Python's reader takes them, since that is who read these files so far. */
static json_t *plain(const char *text)
{
    static const char *const yes[] = { "true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON", NULL };
    static const char *const no[] = { "false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF", NULL };
    static const char *const nothing[] = { "", "~", "null", "Null", "NULL", NULL };
    size_t digits = strspn(text + (*text == '-' || *text == '+'), "0123456789.eE+-");
    bool number = strpbrk(text, "0123456789") && text[digits + (*text == '-' || *text == '+')] == 0;
    double real;
    int64_t whole;

    if (is_one_of(text, nothing))
        return json_null();
    if (is_one_of(text, yes) || is_one_of(text, no))
        return json_boolean(is_one_of(text, yes));
    if (number && fl_parse_i64(text, INT64_MIN, INT64_MAX, &whole, NULL) == FL_OK)
        return json_integer(whole);
    if (number && strchr(text, '.') && fl_parse_f64(text, -HUGE_VAL, HUGE_VAL, &real, NULL) == FL_OK && isfinite(real))
        return json_real(real);
    return json_string(text);
}

static json_t *value(struct reader *r, int id, unsigned depth);

static json_t *mapping(struct reader *r, const yaml_node_t *n, unsigned depth)
{
    json_t *o = json_object();

    for (yaml_node_pair_t *p = n->data.mapping.pairs.start; o && p < n->data.mapping.pairs.top; p++) {
        const yaml_node_t *key = yaml_document_get_node(&r->doc, p->key);
        const char *name = key->type == YAML_SCALAR_NODE ? (const char *)key->data.scalar.value : NULL;
        json_t *v = NULL;

        if (!name || strlen(name) != key->data.scalar.length || json_object_get(o, name))
            (void)wrong(r, &key->start_mark, name ? "this name is there twice" : "a name is wanted in front of ':'");
        else
            v = value(r, p->value, depth + 1);
        if (!v || json_object_set_new(o, name, v) != 0) {
            json_decref(o);
            return v ? wrong(r, &key->start_mark, "a name must be UTF-8") : NULL;
        }
    }
    return o;
}

static json_t *sequence(struct reader *r, const yaml_node_t *n, unsigned depth)
{
    json_t *a = json_array();

    for (yaml_node_item_t *i = n->data.sequence.items.start; a && i < n->data.sequence.items.top; i++) {
        json_t *v = value(r, *i, depth + 1);

        if (!v) {
            json_decref(a);
            return NULL;
        }
        json_array_append_new(a, v);
    }
    return a;
}

static json_t *value(struct reader *r, int id, unsigned depth)
{
    const yaml_node_t *n = yaml_document_get_node(&r->doc, id);
    json_t *v;

    if (depth == DEPTH_MAX || ++r->values > VALUES_MAX)
        return wrong(r, &n->start_mark, "more or deeper values than any environment has");
    if (n->type == YAML_MAPPING_NODE)
        return mapping(r, n, depth);
    if (n->type == YAML_SEQUENCE_NODE)
        return sequence(r, n, depth);
    const char *text = (const char *)n->data.scalar.value;

    if (strlen(text) != n->data.scalar.length)
        return wrong(r, &n->start_mark, "a text holds a zero byte");
    v = n->data.scalar.style == YAML_PLAIN_SCALAR_STYLE ? plain(text) : json_string(text);
    return v ? v : wrong(r, &n->start_mark, "a text must be UTF-8");
}

enum fl_status cli_yaml_parse(const char *text, size_t len, const char *what, json_t **out, struct fl_err *err)
{
    struct reader r = { .what = what, .err = err };
    yaml_parser_t p;
    yaml_node_t *root;
    json_t *v = NULL;

    if (!yaml_parser_initialize(&p))
        return fl_fail(err, FL_EXHAUSTED, "no memory to read %.120s", what);
    yaml_parser_set_input_string(&p, (const unsigned char *)text, len);
    if (!yaml_parser_load(&p, &r.doc)) {
        (void)wrong(&r, &p.problem_mark, p.problem ? p.problem : "no YAML");
    } else {
        root = yaml_document_get_root_node(&r.doc);
        v = root ? value(&r, 1, 0) : json_null();
        yaml_document_delete(&r.doc);
    }
    yaml_parser_delete(&p);
    if (!v)
        return FL_INVALID;
    *out = v;
    return FL_OK;
}
