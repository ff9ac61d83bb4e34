#include "common/base/metrics.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>

/* Few families and few series each, looked up once by whoever counts: lists in the order they came
 * in, so the page reads the same each time. */
struct fl_metric {
    struct fl_metric *next;
    struct family *family;
    char *labels; /* a="b",c="d" */
    double value; /* histogram: the sum */
    uint64_t count;
    uint64_t buckets[]; /* of a histogram, not cumulative, one more than bounds */
};

struct family {
    struct family *next;
    const struct fl_metric_name *name;
    struct fl_metric *series, **end;
    size_t n_series;
};

struct fl_metrics {
    struct family *families, **end;
};

enum { LABELS_MAX = 1024 };

enum fl_status fl_metrics_create(struct fl_metrics **out, struct fl_err *err)
{
    struct fl_metrics *m = calloc(1, sizeof(*m));

    if (!m)
        return fl_fail(err, FL_EXHAUSTED, "no memory for metrics");
    m->end = &m->families;
    *out = m;
    return FL_OK;
}

static void series_free(struct fl_metric *x)
{
    free(x->labels);
    free(x);
}

void fl_metrics_destroy(struct fl_metrics *m)
{
    if (!m)
        return;
    for (struct family *f = m->families, *f_next; f; f = f_next) {
        f_next = f->next;
        for (struct fl_metric *x = f->series, *next; x; x = next) {
            next = x->next;
            series_free(x);
        }
        free(f);
    }
    free(m);
}

static bool name_good(const char *name, bool label)
{
    if (!*name || isdigit((unsigned char)*name))
        return false;
    for (; *name; name++)
        if (!isalnum((unsigned char)*name) && *name != '_' && (label || *name != ':'))
            return false;
    return true;
}

static enum fl_status family_get(struct fl_metrics *m, const struct fl_metric_name *name,
                                 struct family **out, struct fl_err *err)
{
    for (struct family *f = m->families; f; f = f->next) {
        if (strcmp(f->name->name, name->name) != 0)
            continue;
        if (f->name->kind != name->kind || f->name->n_bounds != name->n_bounds)
            return fl_fail(err, FL_INVALID, "metric %s exists as another kind", name->name);
        *out = f;
        return FL_OK;
    }
    if (!name_good(name->name, false))
        return fl_fail(err, FL_INVALID, "\"%s\" is no name of a metric", name->name);
    for (size_t i = 1; i < name->n_bounds; i++)
        if (!(name->bounds[i - 1] < name->bounds[i]))
            return fl_fail(err, FL_INVALID, "metric %s: bounds must rise", name->name);
    struct family *f = calloc(1, sizeof(*f));

    if (!f)
        return fl_fail(err, FL_EXHAUSTED, "no memory for metric %s", name->name);
    f->name = name;
    f->end = &f->series;
    *m->end = f;
    m->end = &f->next;
    *out = f;
    return FL_OK;
}

static void add_escaped(struct fl_str *s, const char *text, bool quotes)
{
    for (; *text; text++) {
        if (*text == '\n')
            fl_str_add_bytes(s, "\\n", 2);
        else if (*text == '\\' || (quotes && *text == '"'))
            fl_str_add(s, "\\%c", *text);
        else
            fl_str_add_bytes(s, text, 1);
    }
}

enum fl_status fl_metric(struct fl_metrics *m, const struct fl_metric_name *name,
                         const struct fl_metric_label *labels, size_t n, struct fl_metric **out,
                         struct fl_err *err)
{
    char text[LABELS_MAX];
    struct fl_str key = FL_STR_ON(text);
    struct family *f = NULL;

    text[0] = '\0';
    for (size_t i = 0; i < n; i++) {
        if (!name_good(labels[i].key, true))
            return fl_fail(err, FL_INVALID, "metric %s: \"%s\" is no name of a label", name->name,
                           labels[i].key);
        fl_str_add(&key, "%s%s=\"", i ? "," : "", labels[i].key);
        add_escaped(&key, labels[i].value, true);
        fl_str_add(&key, "\"");
    }
    if (key.cut)
        return fl_fail(err, FL_INVALID, "metric %s: labels longer than %d bytes", name->name,
                       LABELS_MAX - 1);
    FL_TRY(family_get(m, name, &f, err));
    for (struct fl_metric *x = f->series; x; x = x->next)
        if (strcmp(x->labels, text) == 0) {
            *out = x;
            return FL_OK;
        }
    if (f->n_series == FL_METRIC_SERIES_MAX)
        return fl_fail(err, FL_EXHAUSTED, "metric %s has %d series already", name->name,
                       FL_METRIC_SERIES_MAX);
    struct fl_metric *x = calloc(1, sizeof(*x) + (name->n_bounds + 1) * sizeof(x->buckets[0]));

    if (!x || !(x->labels = strdup(text))) {
        free(x);
        return fl_fail(err, FL_EXHAUSTED, "no memory for metric %s", name->name);
    }
    x->family = f;
    *f->end = x;
    f->end = &x->next;
    f->n_series++;
    *out = x;
    return FL_OK;
}

void fl_metric_drop(struct fl_metric *x)
{
    if (!x)
        return;
    struct family *f = x->family;
    struct fl_metric **at = &f->series;

    while (*at != x)
        at = &(*at)->next;
    *at = x->next;
    if (f->end == &x->next)
        f->end = at;
    f->n_series--;
    series_free(x);
}

void fl_metric_add(struct fl_metric *x, double by)
{
    if (x && (by >= 0 || x->family->name->kind == FL_GAUGE))
        x->value += by;
}

void fl_metric_set(struct fl_metric *x, double to)
{
    if (x)
        x->value = to;
}

void fl_metric_observe(struct fl_metric *x, double v)
{
    size_t i = 0;

    if (!x)
        return;
    while (i < x->family->name->n_bounds && !(v <= x->family->name->bounds[i]))
        i++;
    x->buckets[i]++;
    x->count++;
    x->value += v;
}

double fl_metric_value(const struct fl_metric *x)
{
    return x->family->name->kind == FL_HISTOGRAM ? (double)x->count : x->value;
}

static void add_number(struct fl_str *out, double v)
{
    if (isnan(v))
        fl_str_add(out, "NaN");
    else if (isinf(v))
        fl_str_add(out, v > 0 ? "+Inf" : "-Inf");
    else if (v == floor(v) && fabs(v) < 1e15)
        fl_str_add(out, "%.0f", v);
    else
        fl_str_add(out, "%.17g", v);
}

static void add_plain(struct fl_str *out, const struct fl_metric *x, const char *suffix, double v)
{
    fl_str_add(out, x->labels[0] ? "%s%s{%s} " : "%s%s%s ", x->family->name->name, suffix,
               x->labels);
    add_number(out, v);
    fl_str_add(out, "\n");
}

static void add_histogram(struct fl_str *out, const struct fl_metric *x)
{
    const struct fl_metric_name *n = x->family->name;
    uint64_t below = 0;

    for (size_t i = 0; i <= n->n_bounds; i++) {
        below += x->buckets[i];
        fl_str_add(out, "%s_bucket{%s%sle=\"", n->name, x->labels, x->labels[0] ? "," : "");
        if (i < n->n_bounds)
            fl_str_add(out, "%g", n->bounds[i]);
        else
            fl_str_add(out, "+Inf");
        fl_str_add(out, "\"} %llu\n", (unsigned long long)below);
    }
    add_plain(out, x, "_sum", x->value);
    add_plain(out, x, "_count", (double)x->count);
}

void fl_metrics_text(const struct fl_metrics *m, struct fl_str *out)
{
    static const char *const kinds[] = { "counter", "gauge", "histogram" };

    for (const struct family *f = m->families; f; f = f->next) {
        fl_str_add(out, "# HELP %s ", f->name->name);
        add_escaped(out, f->name->help, false);
        fl_str_add(out, "\n# TYPE %s %s\n", f->name->name, kinds[f->name->kind]);
        for (const struct fl_metric *x = f->series; x; x = x->next) {
            if (f->name->kind == FL_HISTOGRAM)
                add_histogram(out, x);
            else
                add_plain(out, x, "", x->value);
        }
    }
}
