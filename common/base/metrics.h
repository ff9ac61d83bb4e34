/* common/base/metrics.h - counters, gauges, histograms; Prometheus text
 *
 * One registry a process, used by its loop thread. A metric is looked up once, by the code that
 * counts, and lives as long as the registry. */
#pragma once
#include "common/base/base.h"
#include "common/base/str.h"

enum { FL_METRIC_SERIES_MAX = 4096 }; /* of one name: labels with unbounded values are a defect */
enum fl_metric_kind { FL_COUNTER, FL_GAUGE, FL_HISTOGRAM };
struct fl_metric_label { const char *key, *value; };
struct fl_metric_name { /* static: kept by pointer */
    enum fl_metric_kind kind;
    const char *name, *help; /* name as Prometheus wants it: furlong_node_beats_total */
    const double *bounds;    /* histogram: upper bounds, rising; +Inf is added */
    size_t n_bounds;
};
struct fl_metrics;
struct fl_metric;
enum fl_status fl_metrics_create(struct fl_metrics **out, struct fl_err *err);
void fl_metrics_destroy(struct fl_metrics *m);
/* The same name and labels give the same metric. FL_INVALID: bad name, or another kind of that
 * name; FL_EXHAUSTED: too many series. */
enum fl_status fl_metric(struct fl_metrics *m, const struct fl_metric_name *name,
                         const struct fl_metric_label *labels, size_t n, struct fl_metric **out,
                         struct fl_err *err);
void fl_metric_drop(struct fl_metric *x);             /* its labels' owner is gone */
void fl_metric_add(struct fl_metric *x, double by);  /* counter, gauge; NULL is fine */
void fl_metric_set(struct fl_metric *x, double to);  /* gauge */
void fl_metric_observe(struct fl_metric *x, double v); /* histogram */
double fl_metric_value(const struct fl_metric *x);   /* histogram: the count */
void fl_metrics_text(const struct fl_metrics *m, struct fl_str *out); /* text exposition 0.0.4 */
