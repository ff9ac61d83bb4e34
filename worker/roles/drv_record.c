/* What is written down: run.json, steps.jsonl, the table on standard output, the advice at
 * the end. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/base/file.h"
#include "common/base/log.h"
#include "common/conf/json.h"
#include "worker/roles/driver.h"

enum { LINE_MAX_BYTES = 1 << 16, STEPS_MAX_BYTES = 1 << 30 };

static const char *const phase_names[DRV_PHASES] = {
    [DRV_ROLLOUT] = "rollout",
    [DRV_RELEASE] = "engine_release",
    [DRV_WAKE] = "wake_up",
    [DRV_TRAIN] = "train",
    [DRV_SAVE] = "save_model",
    [DRV_SLEEP] = "sleep",
    [DRV_UPDATE] = "update_weights",
    [DRV_RESUME] = "finalize_and_resume_engines",
    [DRV_EVAL] = "eval",
};

void drv_say(struct driver *d, const char *fmt, ...)
{
    char line[1024];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(line, sizeof(line), fmt, ap);
    va_end(ap);
    if (d->out_fd >= 0)
        (void)dprintf(d->out_fd, "%s\n", line); /* a reader that left is no reason to stop a run */
    if (d->log_fd >= 0)
        (void)dprintf(d->log_fd, "%s\n", line); /* the same lines, for later */
}

void drv_step_begin(struct driver *d, uint64_t step)
{
    d->now = (struct drv_step){ .step = step, .began_s = d->ops->now_s(d) };
    snprintf(d->now.unclean[DRV_TRAIN], sizeof(d->now.unclean[0]), "%s", d->again);
    d->again[0] = '\0';
}

void drv_unclean(struct driver *d, enum drv_phase phase, const char *fmt, ...)
{
    va_list ap;

    if (d->now.unclean[phase][0]) /* the first reason is the cause of the others */
        return;
    va_start(ap, fmt);
    vsnprintf(d->now.unclean[phase], sizeof(d->now.unclean[phase]), fmt, ap);
    va_end(ap);
}

/* ---- one step as JSON ------------------------------------------------------------------------ */
static void set(json_t *o, const char *key, double v)
{
    json_object_set_new(o, key, isfinite(v) ? json_real(v) : json_null());
}

static void set_time(json_t *o, const char *what, double v)
{
    char key[64];

    snprintf(key, sizeof(key), "perf/%s_time", what);
    set(o, key, v);
}

static void perf_json(json_t *o, const struct drv_step *s, double step_s)
{
    double update = s->took_s[DRV_UPDATE];

    set(o, "perf/step_time", step_s);
    for (int p = 0; p < DRV_PHASES; p++)
        set_time(o, phase_names[p], s->took_s[p]);
    set_time(o, "train_wait", s->overlapped ? s->wait_s : step_s - s->took_s[DRV_TRAIN]);
    set_time(o, "sleep_setup", s->sleep_setup_s);
    set_time(o, "sleep_copy", s->sleep_copy_s);
    set_time(o, "wake_up_setup", s->wake_setup_s);
    set_time(o, "wake_up_copy", s->wake_copy_s);
    set_time(o, "log_probs", s->log_probs_s);
    set_time(o, "actor_train", s->train_s);
    set_time(o, "engine_idle", s->engine_idle_s);
    set(o, "perf/update_weights_share", step_s > 0 ? update / step_s : 0);
    set(o, "perf/actor_train_tok_per_s", s->train_s > 0 ? (double)s->tokens / s->train_s : 0);
    set(o, "perf/update_weights_move_time", (double)s->report.move_ns * 1e-9);
    set(o, "perf/update_weights_pause_time", (double)s->report.pause_ns * 1e-9);
    set(o, "perf/update_weights_predicted_time", /* of the move; NAN: no update, or nothing known */
        s->report.predicted_ns ? (double)s->report.predicted_ns * 1e-9 : NAN);
    json_object_set_new(o, "perf/update_weights_bytes", json_integer((json_int_t)s->report.bytes));
}

static void clean_json(json_t *o, const struct drv_step *s)
{
    json_t *clean = json_object(), *why = json_object();
    bool all = true;

    for (int p = 0; p < DRV_PHASES; p++) {
        bool ok = !s->unclean[p][0];

        json_object_set_new(clean, phase_names[p], json_boolean(ok));
        if (!ok)
            json_object_set_new(why, phase_names[p], json_string(s->unclean[p]));
        all = all && ok;
    }
    json_object_set_new(o, "clean", json_boolean(all));
    json_object_set_new(o, "clean_phases", clean);
    json_object_set_new(o, "unclean_why", why);
}

json_t *drv_step_json(const struct driver *d)
{
    const struct drv_step *s = &d->now;
    json_t *o = json_object();
    char digest[40];

    snprintf(digest, sizeof(digest), "%016" PRIx64 "%016" PRIx64, d->served_digest[0],
             d->served_digest[1]);
    json_object_set_new(o, "step", json_integer((json_int_t)s->step));
    set(o, "reward_mean", s->reward_mean);
    json_object_set_new(o, "eval_reward_mean",
                        s->has_eval ? json_real(s->eval_reward_mean) : json_null());
    set(o, "response_len_mean", s->response_len_mean);
    json_object_set_new(o, "weights_version", json_integer((json_int_t)d->served));
    json_object_set_new(o, "weights_digest", json_string(digest));
    set(o, "train_rollout_logprob_abs_diff", s->logprob_abs_diff);
    set(o, "staleness_mean", s->staleness_mean);
    set(o, "loss", s->loss);
    set(o, "grad_norm", s->grad_norm);
    set(o, "entropy", s->entropy);
    set(o, "clip_fraction", s->clip_fraction);
    json_object_set_new(o, "tokens", json_integer((json_int_t)s->tokens));
    json_object_set_new(o, "dropped_bytes", json_integer((json_int_t)s->dropped_bytes));
    json_object_set_new(o, "kept_bytes", json_integer((json_int_t)s->kept_bytes));
    json_object_set_new(o, "written_bytes", json_integer((json_int_t)s->written_bytes));
    json_object_set_new(o, "engines_updated", json_integer(s->report.committed));
    json_object_set_new(o, "engines_left_behind", json_integer(s->report.left_behind));
    json_object_set_new(o, "transfer_mode", json_string(s->report.mode));
    json_object_set_new(o, "driver_attempt", json_integer(d->attempt));
    perf_json(o, s, d->ops->now_s((struct driver *)(uintptr_t)d) - s->began_s);
    clean_json(o, s);
    return o;
}

/* ---- files ----------------------------------------------------------------------------------- */
static void path_in(const struct driver *d, char out[1100], const char *name)
{
    snprintf(out, 1100, "%s/%s", d->run_dir, name);
}

static enum fl_status line_write(struct driver *d, const char *text, struct fl_err *err)
{
    size_t len = strlen(text), at = 0;

    while (at < len) {
        ssize_t n = write(d->steps_fd, text + at, len - at);

        if (n < 0 && errno != EINTR)
            return fl_fail_errno(err, "write steps.jsonl in %s", d->run_dir);
        at += n > 0 ? (size_t)n : 0;
    }
    return FL_OK;
}

static void table_line(struct driver *d, const json_t *o)
{
    const struct drv_step *s = &d->now;
    char eval[16] = "-", digest[9];

    if (d->means.n % 20 == 0)
        drv_say(d, "%6s %7s %7s %5s %8s %9s %8s %8s %8s %8s", "step", "reward", "eval", "len",
                "version", "digest", "step s", "rollout", "train", "update");
    if (s->has_eval)
        snprintf(eval, sizeof(eval), "%.3f", s->eval_reward_mean);
    snprintf(digest, sizeof(digest), "%08" PRIx64, d->served_digest[0] >> 32);
    drv_say(d, "%6ju %7.3f %7s %5.1f %8ju %9s %8.3f %8.3f %8.3f %8.3f%s", (uintmax_t)s->step,
            s->reward_mean, eval, s->response_len_mean, (uintmax_t)d->served, digest,
            json_number_value(json_object_get(o, "perf/step_time")), s->took_s[DRV_ROLLOUT],
            s->took_s[DRV_TRAIN], s->took_s[DRV_UPDATE],
            json_is_true(json_object_get(o, "clean")) ? "" : "  unclean");
}

static void means_add(struct driver *d, double step_s)
{
    const struct drv_step *s = &d->now;
    struct drv_means *m = &d->means;

    m->n++;
    m->total += step_s;
    m->rollout += s->took_s[DRV_ROLLOUT];
    m->train += s->took_s[DRV_TRAIN];
    m->update += s->took_s[DRV_UPDATE];
    m->move +=
        s->took_s[DRV_RELEASE] + s->took_s[DRV_WAKE] + s->took_s[DRV_SLEEP] + s->took_s[DRV_RESUME];
    m->engine_idle += s->engine_idle_s;
}

enum fl_status drv_step_end(struct driver *d, struct fl_err *err)
{
    json_t *o = drv_step_json(d);
    char *text = o ? json_dumps(o, JSON_COMPACT | JSON_REAL_PRECISION(12)) : NULL, *line = NULL;
    enum fl_status st = FL_OK;

    if (!text || asprintf(&line, "%s\n", text) < 0) {
        line = NULL;
        st = fl_fail(err, FL_EXHAUSTED, "no memory for a step record");
    }
    if (st == FL_OK)
        st = line_write(d, line, err);
    if (st == FL_OK) {
        d->ops->record(d, text);
        table_line(d, o);
        means_add(d, json_number_value(json_object_get(o, "perf/step_time")));
    }
    free(line);
    free(text);
    json_decref(o);
    return st;
}

/* Records of consecutive steps below `most` that the text begins with; *bytes: their length. The
 * step after the last of them, 0 if there is none. */
static uint64_t whole_records(const char *text, size_t len, uint64_t most, size_t *bytes)
{
    json_int_t next = -1;
    size_t at = 0;

    while (at < len) {
        const char *end = memchr(text + at, '\n', len - at);
        json_t *o = end ? json_loadb(text + at, (size_t)(end - text) - at, 0, NULL) : NULL;
        const json_t *step = json_object_get(o, "step");
        json_int_t n = json_is_integer(step) ? json_integer_value(step) : -1;

        json_decref(o);
        if (n < 0 || (uint64_t)n >= most || (next >= 0 && n != next))
            break;
        at = (size_t)(end - text) + 1;
        next = n + 1;
    }
    *bytes = at;
    return next < 0 ? 0 : (uint64_t)next;
}

static enum fl_status steps_keep(struct driver *d, uint64_t most, uint64_t *whole,
                                 struct fl_err *err)
{
    char path[1100], *text = NULL;
    size_t len = 0, bytes = 0;

    path_in(d, path, "steps.jsonl");
    if (fl_file_read(path, STEPS_MAX_BYTES, &text, &len, NULL) == FL_OK)
        *whole = whole_records(text, len, most, &bytes);
    free(text);
    if (d->steps_fd < 0)
        d->steps_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (d->steps_fd < 0)
        return fl_fail_errno(err, "open %s", path);
    if (ftruncate(d->steps_fd, (off_t)bytes))
        return fl_fail_errno(err, "cut %s to %ju steps", path, (uintmax_t)*whole);
    return FL_OK;
}

/* A later attempt finds the whole records of those before it; a first one begins anew, unless it
 * loads a checkpoint of this very run. */
enum fl_status drv_steps_open(struct driver *d, uint64_t *whole, struct fl_err *err)
{
    *whole = 0;
    return steps_keep(d, UINT64_MAX, whole, err);
}

/* A run that goes on from step n keeps the records before it: those after are of weights that are
 * gone. *whole: the first step without a record. */
enum fl_status drv_steps_cut(struct driver *d, uint64_t steps, uint64_t *whole, struct fl_err *err)
{
    *whole = 0;
    return steps_keep(d, steps, whole, err);
}

/* A step that is trained and not yet written down: a driver that comes back finishes it. */
enum fl_status drv_pending_write(struct driver *d, struct fl_err *err)
{
    const struct drv_step *s = &d->now;
    char path[1100];
    json_t *o = json_pack(
        "{s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:I}", "step",
        (json_int_t)s->step, "reward_mean", s->reward_mean, "response_len_mean",
        s->response_len_mean, "staleness_mean", s->staleness_mean, "logprob_abs_diff",
        s->logprob_abs_diff, "loss", s->loss, "grad_norm", s->grad_norm, "entropy", s->entropy,
        "clip_fraction", s->clip_fraction, "rollout", s->took_s[DRV_ROLLOUT], "train",
        s->took_s[DRV_TRAIN], "engine_idle", s->engine_idle_s, "tokens", (json_int_t)s->tokens);
    char *text = o ? json_dumps(o, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL;
    enum fl_status st = FL_OK;

    path_in(d, path, "step.pending");
    json_decref(o);
    if (!text)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a step record");
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    ssize_t len = (ssize_t)strlen(text);
    /* no fsync: it is for a driver that ends, not for a machine that does */
    if (fd < 0 || write(fd, text, (size_t)len) != len)
        st = fl_fail_errno(err, "write %s", path);
    if (fd >= 0)
        (void)close(fd);
    free(text);
    return st;
}

void drv_pending_drop(const struct driver *d)
{
    char path[1100];

    path_in(d, path, "step.pending");
    (void)unlink(path); /* of a run without a step there is none */
}

bool drv_pending_read(struct driver *d, uint64_t step)
{
    char path[1100];
    json_t *o = NULL;
    struct drv_step *s = &d->now;

    path_in(d, path, "step.pending");
    if (fl_json_load(path, LINE_MAX_BYTES, &o, NULL) != FL_OK ||
        json_integer_value(json_object_get(o, "step")) != (json_int_t)step) {
        json_decref(o);
        return false;
    }
    drv_step_begin(d, step);
    const struct {
        const char *key;
        double *to;
    } reals[] = {
        { "reward_mean", &s->reward_mean },
        { "response_len_mean", &s->response_len_mean },
        { "staleness_mean", &s->staleness_mean },
        { "logprob_abs_diff", &s->logprob_abs_diff },
        { "loss", &s->loss },
        { "grad_norm", &s->grad_norm },
        { "entropy", &s->entropy },
        { "clip_fraction", &s->clip_fraction },
        { "rollout", &s->took_s[DRV_ROLLOUT] },
        { "train", &s->took_s[DRV_TRAIN] },
        { "engine_idle", &s->engine_idle_s },
    };
    for (size_t i = 0; i < sizeof(reals) / sizeof(*reals); i++)
        *reals[i].to = json_number_value(json_object_get(o, reals[i].key));
    s->tokens = (uint64_t)json_integer_value(json_object_get(o, "tokens"));
    json_decref(o);
    return true;
}

/* Every node of the placement once: [{"node","address"}]. */
static json_t *nodes_of(const json_t *placement)
{
    json_t *nodes = json_array(), *seen = json_object(), *ranks, *rank;
    const char *role;
    size_t i;

    json_object_foreach (json_object_get(placement, "roles"), role, ranks)
        json_array_foreach (ranks, i, rank) {
            const char *name = json_string_value(json_object_get(rank, "node"));
            json_t *address = json_object_get(rank, "address");

            if (!name || !address || json_object_get(seen, name))
                continue;
            json_object_set_new(seen, name, json_true());
            json_array_append_new(nodes, json_pack("{s:s, s:O}", "node", name, "address", address));
        }
    json_decref(seen);
    return nodes;
}

enum fl_status drv_run_json(struct driver *d, const char *placement, struct fl_err *err)
{
    json_t *place = placement ? json_loads(placement, 0, NULL) : NULL;
    json_t *flags = json_object(), *notes = json_array(), *o;
    char path[1100], stamp[32];
    time_t now = time(NULL);
    struct tm tm;

    for (size_t t = 0; t < TRAIN_FLAG_TABLES; t++) {
        json_t *some = fl_opts_json(&d->opts, t);

        if (some)
            json_object_update(flags, some);
        json_decref(some);
    }
    for (unsigned i = 0; i < d->flags.n_notes; i++)
        json_array_append_new(notes, json_string(d->flags.notes[i]));
    strftime(stamp, sizeof(stamp), "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &tm));
    o = json_pack("{s:s, s:s, s:s, s:I, s:I, s:s, s:I, s:o, s:o, s:o, s:o}", "job", d->job_name,
                  "furlong", FURLONG_VERSION, "started", stamp, "attempt", (json_int_t)d->attempt,
                  "steps", (json_int_t)d->n_steps, "prompt_data", d->prompt_path, "prompts",
                  (json_int_t)d->prompts->n, "flags", flags, "notes", notes, "placement",
                  place ? place : json_null(), "nodes", nodes_of(place));
    char *text = o ? json_dumps(o, JSON_INDENT(1)) : NULL;

    json_decref(o);
    if (!text)
        return fl_fail(err, FL_EXHAUSTED, "no memory for run.json");
    path_in(d, path, "run.json");
    enum fl_status st = fl_file_write(path, 0644, text, strlen(text), err);
    free(text);
    return st;
}

/* ---- advice ---------------------------------------------------------------------------------- */
void drv_advise(const struct drv_means *m, bool colocate, bool is_async, uint32_t trainers,
                uint32_t engines, char out[256])
{
    double total = m->total > 0 ? m->total : 1;
    double rollout = m->rollout / total, train = m->train / total;
    uint32_t all = trainers + engines;

    if (!m->n) {
        snprintf(out, 256, "no step was run: nothing to advise");
    } else if (!is_async && !colocate && rollout > 0.6) {
        /* work moves between the sides as devices do; each side keeps one */
        double share = m->rollout / (m->rollout + m->train);
        uint32_t fit = (uint32_t)(share * all + 0.5);

        fit = fit < 1 ? 1 : fit >= all ? all - 1 : fit;
        if (fit != engines && all > 2)
            snprintf(out, 256,
                     "rollout takes %.0f%% of a step: --rollout-num-gpus %u of these %u devices "
                     "would fit",
                     rollout * 100, fit, all);
        else
            snprintf(out, 256,
                     "rollout takes %.0f%% of a step: more devices for it (--rollout-num-gpus %u), "
                     "or --async",
                     rollout * 100, engines * 2);
    } else if (colocate && rollout > 0.6) {
        snprintf(out, 256,
                 "rollout takes %.0f%% of a step: more devices shorten it (--actor-num-nodes, "
                 "--actor-num-gpus-per-node)",
                 rollout * 100);
    } else if (!is_async && !colocate && rollout > 0.15 && train > 0.15) {
        double both = m->rollout < m->train ? rollout : train;

        snprintf(out, 256,
                 "one side idles while the other works: --async would hide up to %.0f%% of a step",
                 both * 100);
    } else {
        snprintf(out, 256,
                 "rollout %.0f%%, train %.0f%%, update %.1f%% of a step: keep the defaults",
                 rollout * 100, train * 100, m->update / total * 100);
    }
}

void drv_advice(struct driver *d)
{
    char line[256];
    int64_t each =
        d->flags.rollout_num_gpus_per_engine > 0 ? d->flags.rollout_num_gpus_per_engine : 1;

    drv_advise(&d->means, d->flags.colocate, d->flags.is_async, d->n_of[DRV_TRAINERS],
               d->n_of[DRV_ENGINES] * (uint32_t)each, line);
    if (d->means.n)
        drv_say(d,
                "%ju steps, %.3f s each: rollout %.3f, train %.3f, update %.4f, memory %.3f; "
                "reward %.3f",
                (uintmax_t)d->means.n, d->means.total / (double)d->means.n,
                d->means.rollout / (double)d->means.n, d->means.train / (double)d->means.n,
                d->means.update / (double)d->means.n, d->means.move / (double)d->means.n,
                d->now.reward_mean);
    if (d->now.has_eval)
        drv_say(d, "held-out prompts: reward %.3f over %u", d->now.eval_reward_mean, d->evals->n);
    drv_say(d, "advice: %s", line);
}
