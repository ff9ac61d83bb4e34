/* The loop, and how it goes on after a failure. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/conf/json.h"
#include "worker/roles/ckpt.h"
#include "worker/roles/driver.h"

/* ---- where the trainers stand ---------------------------------------------------------------- */
static enum fl_status number_of(const json_t *o, const char *key, uint64_t *out, struct fl_err *err)
{
    struct fl_json_at at = fl_json_root(o, "the trainer's answer");
    int64_t v;

    FL_TRY(fl_json_int(&at, key, 0, INT64_MAX, &v, err));
    *out = (uint64_t)v;
    return FL_OK;
}

static enum fl_status load(struct driver *d, const char *dir, struct fl_err *err)
{
    json_t *o = json_pack("{s:s}", "dir", dir), *said = NULL;
    char *body = o ? json_dumps(o, JSON_COMPACT) : NULL;
    enum fl_status st;

    json_decref(o);
    if (!body)
        return fl_fail(err, FL_EXHAUSTED, "no memory to load");
    st = d->ops->ask(d, DRV_TRAINERS, "load", body, DRV_LOAD_MS, &said, err);
    free(body);
    if (st == FL_OK)
        st = number_of(said, "step", &d->step, err);
    if (st == FL_OK)
        st = number_of(said, "version", &d->version, err);
    json_decref(said);
    return st == FL_OK ? st : fl_wrap(err, st, "load %s", *dir ? dir : "the first weights");
}

/* The step that was trained and saved and has no record yet: what is left of it is the update and,
 * where it is due, the evaluation. */
static enum fl_status finish_step(struct driver *d, const char *why, struct fl_err *err)
{
    drv_unclean(d, DRV_UPDATE, "%s", why);
    FL_TRY(drv_settle(d, err));
    FL_TRY(drv_eval(d, err));
    return drv_step_end(d, err);
}

/* From the newest checkpoint of this run, else from where the run began. */
static enum fl_status load_newest(struct driver *d, const char *why, struct fl_err *err)
{
    char dir[1024];
    uint64_t whole;

    if (ckpt_newest(d->save_dir, dir, NULL) != FL_OK)
        snprintf(dir, sizeof(dir), "%s", d->load_dir);
    FL_TRY(load(d, dir, err));
    FL_TRY(drv_steps_cut(d, d->step, &whole, err));
    drv_say(d, "trainers go on at step %ju, from %s", (uintmax_t)d->step,
            *dir ? dir : "the first weights");
    if (whole + 1 == d->step && drv_pending_read(d, whole))
        return finish_step(d, why, err);
    snprintf(d->again, sizeof(d->again), "%s", why);
    return drv_settle(d, err);
}

/* A later attempt: the trainers have gone on living, or are new. whole: steps on record. */
static enum fl_status find_place(struct driver *d, uint64_t whole, struct fl_err *err)
{
    static const char why[] = "the driver started again in this step";
    json_t *said = NULL;
    uint64_t step = 0, version = 0;
    enum fl_status st = d->ops->ask(d, DRV_TRAINERS, "state", NULL, DRV_PAUSE_MS, &said, err);

    if (st == FL_OK)
        st = number_of(said, "step", &step, err);
    if (st == FL_OK)
        st = number_of(said, "version", &version, err);
    json_decref(said);
    if (st != FL_OK && st != FL_UNSUPPORTED && st != FL_INVALID)
        return st;
    drv_say(d, "driver, attempt %u: %ju steps are on record, the trainers stand at %ju", d->attempt,
            (uintmax_t)whole, (uintmax_t)step);
    d->step = step;
    d->version = version;
    if (st == FL_OK && step == whole) {
        snprintf(d->again, sizeof(d->again), "%s", why);
        return drv_settle(d, err);
    }
    if (st == FL_OK && step == whole + 1 && drv_pending_read(d, whole))
        return finish_step(d, why, err);
    FL_TRY(d->ops->restart(d, DRV_TRAINERS, err));
    return load_newest(d, why, err);
}

static enum fl_status first_place(struct driver *d, struct fl_err *err)
{
    uint64_t whole;

    if (*d->load_dir)
        FL_TRY(load(d, d->load_dir, err));
    FL_TRY(drv_steps_cut(d, d->step, &whole, err));
    return drv_settle(d, err);
}

/* ---- failures -------------------------------------------------------------------------------- */
/* Trainers that ended start again from the last checkpoint; anything else ends the run. */
static enum fl_status recover(struct driver *d, enum fl_status why, struct fl_err *err)
{
    char text[160];

    if ((why != FL_UNREACHABLE && why != FL_TIMEOUT) ||
        d->restarts >= (uint32_t)d->flags.max_restarts)
        return why;
    d->restarts++;
    snprintf(text, sizeof(text), "%s", err->text);
    fl_warn("step failed step=%ju restarts=%u why=%s", (uintmax_t)d->now.step, d->restarts, text);
    drv_say(d, "step %ju: %s", (uintmax_t)d->now.step, text);
    (void)d->ops->end_late(d, DRV_TRAINERS, FURLONG_SLOW);
    if (d->ops->end_late(d, DRV_ENGINES,
                         FURLONG_SLOW)) /* a begin waits for every engine that lives */
        FL_TRY(d->ops->wait_engines(d, err));
    FL_TRY(d->ops->restart(d, DRV_TRAINERS, err));
    return load_newest(d, text, err);
}

/* ---- one after the other --------------------------------------------------------------------- */
static enum fl_status after_training(struct driver *d, struct fl_err *err)
{
    FL_TRY(drv_pending_write(d, err));
    FL_TRY(drv_save(d, err));
    FL_TRY(drv_change_over(d, err));
    if (FL_FAULT("driver.step"))
        return fl_fail_errno(err, "step %ju", (uintmax_t)d->now.step);
    return drv_eval(d, err);
}

static enum fl_status one_step(struct driver *d, struct fl_err *err)
{
    struct drv_made m = { 0 };
    enum fl_status st;

    drv_step_begin(d, d->step);
    st = drv_generate(d, &m, err);
    if (st == FL_OK)
        st = drv_after_rollout(d, err);
    if (st == FL_OK)
        st = drv_learn(d, &m, err);
    drv_made_fini(&m);
    if (st == FL_OK)
        st = after_training(d, err);
    FL_TRY(st);
    d->step++;
    return drv_step_end(d, err);
}

static enum fl_status in_turn(struct driver *d, struct fl_err *err)
{
    while (d->step < d->n_steps) {
        enum fl_status st = one_step(d, err);

        if (st != FL_OK)
            FL_TRY(recover(d, st, err));
    }
    return FL_OK;
}

/* ---- side by side (--async) ------------------------------------------------------------------ */
struct ahead { /* a generation that runs while the loop trains */
    struct driver *d;
    uint32_t *rows;
    struct drv_job job;
    struct drv_made made;
    pthread_t thread;
    bool runs, there; /* there: made is good */
    enum fl_status st;
    struct fl_err err;
    double took_s;
};

static void *ahead_main(void *arg)
{
    struct ahead *a = arg;
    double from = a->d->ops->now_s(a->d);

    a->st = a->d->ops->generate(a->d, &a->job, &a->made, &a->err);
    a->took_s = a->d->ops->now_s(a->d) - from;
    return NULL;
}

static enum fl_status ahead_start(struct ahead *a, uint64_t step, struct fl_err *err)
{
    drv_made_fini(&a->made);
    a->there = false;
    a->job = drv_job_of(a->d, step, a->rows);
    if (pthread_create(&a->thread, NULL, ahead_main, a))
        return fl_fail(err, FL_EXHAUSTED, "no thread for a generation");
    a->runs = true;
    return FL_OK;
}

/* Nothing else may touch the engines before this has returned. */
static enum fl_status ahead_wait(struct ahead *a, struct fl_err *err)
{
    if (a->runs) {
        (void)pthread_join(a->thread, NULL); /* ours, joined once */
        a->runs = false;
        a->there = a->st == FL_OK;
    }
    if (a->there)
        return FL_OK;
    return fl_fail(err, a->st != FL_OK ? a->st : FL_INTERNAL, "generate: %s", a->err.text);
}

static enum fl_status async_step(struct ahead *a, struct fl_err *err)
{
    struct driver *d = a->d;
    bool last = d->step + 1 == d->n_steps;
    struct drv_made m;

    drv_step_begin(d, d->step);
    double from = d->ops->now_s(d);
    FL_TRY(ahead_wait(a, err));
    d->now.wait_s = d->ops->now_s(d) - from;
    d->now.overlapped = true;
    d->now.took_s[DRV_ROLLOUT] = a->took_s;
    m = a->made;
    a->made = (struct drv_made){ 0 };
    a->there = false;
    enum fl_status st = last ? FL_OK : ahead_start(a, d->step + 1, err);
    if (st == FL_OK)
        st = drv_learn(d, &m, err);
    drv_made_fini(&m);
    FL_TRY(st);
    FL_TRY(drv_pending_write(d, err));
    FL_TRY(drv_save(d, err));
    if ((d->step + 1) % (uint64_t)d->flags.update_weights_interval == 0 || last) {
        if (!last)
            FL_TRY(ahead_wait(a, err)); /* kept for the next step */
        FL_TRY(drv_change_over(d, err));
        FL_TRY(drv_eval(d, err));
    }
    d->step++;
    return drv_step_end(d, err);
}

static enum fl_status side_by_side(struct driver *d, struct fl_err *err)
{
    struct ahead a = { .d = d,
                       .rows = malloc((size_t)d->flags.rollout_batch_size * sizeof(uint32_t)) };
    enum fl_status st = a.rows ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory for a generation");

    if (st == FL_OK && d->step < d->n_steps)
        st = ahead_start(&a, d->step, err);
    while (st == FL_OK && d->step < d->n_steps) {
        st = async_step(&a, err);
        if (st == FL_OK)
            continue;
        (void)ahead_wait(&a, NULL); /* what failed is in err already */
        st = recover(d, st, err);
        if (st == FL_OK && d->step < d->n_steps)
            st = ahead_start(&a, d->step, err);
    }
    if (a.runs)
        (void)ahead_wait(&a, NULL); /* what failed is in err already */
    drv_made_fini(&a.made);
    free(a.rows);
    return st;
}

/* ---- a run ----------------------------------------------------------------------------------- */
enum fl_status drv_run(struct driver *d, struct fl_err *err)
{
    uint64_t whole = 0;

    FL_TRY(d->ops->place(d, err));
    FL_TRY(drv_steps_open(d, &whole, err));
    enum fl_status st = drv_bring_up(d, err);
    if (st != FL_OK)
        return d->ops->not_up(d, st, err);
    FL_TRY(d->attempt > 1 ? find_place(d, whole, err) : first_place(d, err));
    FL_TRY(d->flags.is_async ? side_by_side(d, err) : in_turn(d, err));
    drv_pending_drop(d);
    drv_advice(d);
    return FL_OK;
}
