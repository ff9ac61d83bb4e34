#include "worker/client/watch.h"
#include <stdlib.h>
#include <string.h>
#include "common/base/log.h"
#include "common/base/str.h"
#include "worker.pb-c.h"
#include "worker/client/sync.h"
#include "worker/client/uplink.h"

enum { LATER_MS = 100 }; /* the stream to the daemon was full */
struct watch_metric {
    char name[CLIENT_METRIC_NAME];
    double value;
    bool fresh;
};
struct watch_step {
    struct watch_step *next;
    char json[];
};
struct client_watch {
    struct furlong *f;
    pthread_mutex_t mu;
    pthread_cond_t drained;
    struct watch_metric metrics[CLIENT_METRICS];
    unsigned n_metrics, n_steps;
    uint64_t done, total;
    bool progress_fresh;
    struct watch_step *steps, **steps_end;
    struct fl_task flush;
    /* loop thread */
    struct fl_timer later;
    struct client_relay step;
    bool step_out, stopped;
};

static bool send_metric(struct client_watch *w, const char *name, double value)
{
    Fl__Metric m = FL__METRIC__INIT;
    uint8_t body[CLIENT_METRIC_NAME + 32];

    m.name = (char *)(uintptr_t)name;
    m.value = value;
    return client_uplink_event(w->f, FL_METRIC,
                               (struct fl_bytes){ body, fl__metric__pack(&m, body) }) == FL_OK;
}

static bool send_progress(struct client_watch *w, uint64_t done, uint64_t total)
{
    Fl__Progress m = FL__PROGRESS__INIT;
    uint8_t body[32];

    m.done = done;
    m.total = total;
    return client_uplink_event(w->f, FL_PROGRESS,
                               (struct fl_bytes){ body, fl__progress__pack(&m, body) }) == FL_OK;
}

/* What is fresh leaves; a value that is set again meanwhile is fresh again. */
static bool flush_values(struct client_watch *w)
{
    bool ok = true;
    unsigned n;

    pthread_mutex_lock(&w->mu);
    n = w->n_metrics;
    for (unsigned i = 0; i < n && ok; i++) {
        struct watch_metric m = w->metrics[i];

        if (!m.fresh)
            continue;
        w->metrics[i].fresh = false;
        pthread_mutex_unlock(&w->mu);
        ok = send_metric(w, m.name, m.value);
        pthread_mutex_lock(&w->mu);
        w->metrics[i].fresh |= !ok;
    }
    if (ok && w->progress_fresh) {
        uint64_t done = w->done, total = w->total;

        w->progress_fresh = false;
        pthread_mutex_unlock(&w->mu);
        ok = send_progress(w, done, total);
        pthread_mutex_lock(&w->mu);
        w->progress_fresh |= !ok;
    }
    pthread_mutex_unlock(&w->mu);
    return ok;
}

static void step_next(struct client_watch *w);

static void step_done(struct client_relay *r, enum fl_status st, const struct wire_msg *reply,
                      const struct fl_err *err)
{
    struct client_watch *w = container_of(r, struct client_watch, step);
    struct watch_step *s;

    (void)reply;
    w->step_out = false;
    if (st == FL_CANCELLED || st == FL_UNREACHABLE)
        return; /* on the way out */
    if (st != FL_OK)
        fl_warn("step record refused why=%s", err->text);
    pthread_mutex_lock(&w->mu);
    s = w->steps;
    w->steps = s->next;
    if (!w->steps)
        w->steps_end = &w->steps;
    if (--w->n_steps == 0)
        pthread_cond_broadcast(&w->drained);
    pthread_mutex_unlock(&w->mu);
    free(s);
    step_next(w);
}

static void step_next(struct client_watch *w)
{
    Fl__StepRecord m = FL__STEP_RECORD__INIT;

    if (w->step_out || w->stopped)
        return;
    pthread_mutex_lock(&w->mu);
    m.json = w->steps ? w->steps->json : NULL; /* the first one goes only in step_done() */
    pthread_mutex_unlock(&w->mu);
    if (!m.json)
        return;
    w->step = (struct client_relay){ .again = true, .done = step_done };
    w->step_out = client_relay_start(&w->step, w->f, FL_STEP_RECORD, &m.base, NULL) == FL_OK;
    if (!w->step_out)
        fl_timer_arm_in(w->f->loop, &w->later, LATER_MS);
}

static void flush_now(struct client_watch *w)
{
    if (w->stopped)
        return;
    if (!flush_values(w) && client_uplink_is_open(w->f))
        fl_timer_arm_in(w->f->loop, &w->later, LATER_MS);
    step_next(w);
}

static void flush_posted(struct fl_task *t)
{
    flush_now(container_of(t, struct client_watch, flush));
}

static void flush_later(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    flush_now(container_of(t, struct client_watch, later));
}

void client_watch_up(struct furlong *f)
{
    flush_now(f->watch);
}

/* ---- the program's side --------------------------------------------------------------------- */
void furlong_metric(struct furlong *f, const char *name, double value)
{
    struct client_watch *w;
    unsigned i;

    if (client_here(f, NULL) != FL_OK || !name || strlen(name) >= CLIENT_METRIC_NAME)
        return;
    w = f->watch;
    pthread_mutex_lock(&w->mu);
    for (i = 0; i < w->n_metrics && strcmp(w->metrics[i].name, name) != 0; i++)
        ;
    if (i < CLIENT_METRICS) {
        if (i == w->n_metrics) {
            w->n_metrics++;
            (void)FL_COPY(w->metrics[i].name, name);
        }
        w->metrics[i].value = value;
        w->metrics[i].fresh = true;
    }
    pthread_mutex_unlock(&w->mu);
    fl_post(f->loop, &w->flush);
}

void furlong_progress(struct furlong *f, uint64_t done, uint64_t total)
{
    struct client_watch *w;

    if (client_here(f, NULL) != FL_OK)
        return;
    w = f->watch;
    pthread_mutex_lock(&w->mu);
    w->done = done;
    w->total = total;
    w->progress_fresh = true;
    pthread_mutex_unlock(&w->mu);
    fl_post(f->loop, &w->flush);
}

void furlong_step_record(struct furlong *f, const char *json)
{
    size_t len = json ? strlen(json) : 0;
    struct client_watch *w;
    struct watch_step *s;
    bool full;

    if (client_here(f, NULL) != FL_OK || len == 0)
        return;
    w = f->watch;
    s = len > CLIENT_STEP_MAX ? NULL : malloc(sizeof(*s) + len + 1);
    if (!s) {
        fl_warn("step record left out bytes=%zu limit=%d", len, CLIENT_STEP_MAX);
        return;
    }
    s->next = NULL;
    memcpy(s->json, json, len + 1);
    pthread_mutex_lock(&w->mu);
    full = w->n_steps >= CLIENT_STEPS;
    if (!full) {
        *w->steps_end = s;
        w->steps_end = &s->next;
        w->n_steps++;
    }
    pthread_mutex_unlock(&w->mu);
    if (full) {
        free(s);
        fl_warn("step record left out waiting=%d", CLIENT_STEPS);
        return;
    }
    fl_post(f->loop, &w->flush);
}

/* ---- life ----------------------------------------------------------------------------------- */
enum fl_status client_watch_open(struct furlong *f, struct fl_err *err)
{
    struct client_watch *w = calloc(1, sizeof(*w));

    if (!w)
        return fl_fail(err, FL_EXHAUSTED, "no memory for metrics");
    w->f = f;
    w->steps_end = &w->steps;
    w->flush.run = flush_posted;
    w->later.fire = flush_later;
    pthread_mutex_init(&w->mu, NULL);
    client_cond_init(&w->drained);
    f->watch = w;
    return FL_OK;
}

void client_watch_drain(struct furlong *f, uint32_t wait_ms)
{
    struct timespec until = client_until(wait_ms);
    struct client_watch *w = f->watch;
    bool late = false;

    pthread_mutex_lock(&w->mu);
    while (w->n_steps && !late)
        late = !client_cond_wait(&w->drained, &w->mu, wait_ms, &until);
    if (w->n_steps)
        fl_warn("step records left behind n=%u waited_ms=%u", w->n_steps, wait_ms);
    pthread_mutex_unlock(&w->mu);
}

void client_watch_stop(struct furlong *f)
{
    f->watch->stopped = true;
    fl_timer_cancel(&f->watch->later);
    client_relay_cancel(&f->watch->step);
}

void client_watch_free(struct furlong *f)
{
    struct client_watch *w = f->watch;
    struct watch_step *next;

    if (!w)
        return;
    for (struct watch_step *s = w->steps; s; s = next) {
        next = s->next;
        free(s);
    }
    pthread_cond_destroy(&w->drained);
    pthread_mutex_destroy(&w->mu);
    free(w);
    f->watch = NULL;
}
