/* Asks of many processes at once, over libfurlong: generations and training steps. Whoever ends in
 * the middle is noticed by the end of its asks, or by its state at the head, within POLL_MS. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "common/conf/json.h"
#include "worker/roles/drv_made.h"
#include "worker/roles/drv_seat.h"

enum { POLL_MS = 200, IN_FLIGHT = 2, BACK_OFF_MS = 100, FILL_MS = 2000, FAILED_MAX = 2 };

struct engine_state {
    uint32_t in_flight, attempt;
    bool down;         /* not asked until it is LIVE again */
    bool late;         /* ... until the weight plane, which waited for it in vain, hears of it */
    double not_before; /* busy with an update, or not filled yet */
    double heard_s;    /* answered last, or had nothing to answer until then */
};
struct spread { /* one generation */
    struct driver *d;
    struct furlong_group *g;
    struct furlong_asks *asks;
    const struct drv_job *job;
    struct drv_parts parts;
    struct engine_state *engines;
    uint32_t n_engines, in_flight;
    char digest[40];
    double got_s; /* a part was taken, or something was done about it */
    struct drv_made *out;
};

static void put_back(struct spread *s, uint32_t part, uint32_t engine, const struct fl_err *why)
{
    s->parts.parts[part].asked = false;
    if (!s->out->asked_again++)
        snprintf(s->out->why, sizeof(s->out->why), "rollout %u: %.150s", engine, why->text);
    fl_warn("asked again part=%u engine=%u why=%s", part, engine, why->text);
}

static enum fl_status ask_part(struct spread *s, uint32_t part, uint32_t engine, struct fl_err *err)
{
    struct drv_part *p = &s->parts.parts[part];
    char *body = drv_part_body(s->job, p, part);
    struct furlong_data what = { .body = body, .body_bytes = body ? strlen(body) : 0 };

    if (!body)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a request");
    enum fl_status st =
        furlong_asks_start(s->asks, furlong_group_peer(s->g, engine), FURLONG_MAIN, "generate",
                           &what, 0, (uint64_t)part << 32 | engine, err);
    free(body);
    FL_TRY(st);
    p->asked = true;
    p->engine = engine;
    if (!s->engines[engine].in_flight++)
        s->engines[engine].heard_s = s->d->ops->now_s(s->d);
    s->in_flight++;
    return FL_OK;
}

static uint32_t next_part(const struct spread *s)
{
    for (uint32_t i = 0; i < s->parts.n; i++)
        if (!s->parts.parts[i].asked)
            return i;
    return UINT32_MAX;
}

/* Fewest in flight first, so that parts spread evenly. */
static enum fl_status hand_out(struct spread *s, struct fl_err *err)
{
    double now = s->d->ops->now_s(s->d);

    for (uint32_t depth = 0; depth < IN_FLIGHT; depth++)
        for (uint32_t e = 0; e < s->n_engines; e++) {
            uint32_t part = next_part(s);

            if (part == UINT32_MAX)
                return FL_OK;
            if (s->engines[e].down || s->engines[e].late || s->engines[e].in_flight > depth ||
                now < s->engines[e].not_before)
                continue;
            FL_TRY(ask_part(s, part, e, err));
        }
    return FL_OK;
}

/* Engines that ended: up again when the head has started them; given up when it will not. */
static enum fl_status look_at_members(struct spread *s, struct fl_err *err)
{
    uint32_t gone = 0, down = 0;
    struct furlong_member m;

    for (uint32_t e = 0; e < s->n_engines; e++)
        down += s->engines[e].down;
    if (down)
        (void)drv_seat_tell(s->d, DRV_ENGINES, 0);
    for (uint32_t e = 0; e < s->n_engines; e++) {
        struct engine_state *x = &s->engines[e];

        x->late = furlong_group_late(s->g, e, &m) != FURLONG_IN_TIME;
        if (!x->down)
            continue;
        furlong_group_member(s->g, e, &m);
        if (m.state == FURLONG_LIVE && m.attempt != x->attempt) {
            x->down = false;
            x->attempt = m.attempt;
            /* the library fills it; until then it answers FL_STALE, and is asked a little later */
            (void)furlong_group_wait(s->g, FILL_MS, NULL);
        }
        gone += m.state == FURLONG_ENDED;
    }
    if (gone == s->n_engines)
        return fl_fail(err, FL_UNREACHABLE, "all %u engines have ended; rollout %u on %s: %.120s",
                       gone, m.rank, m.node, m.why);
    return FL_OK;
}

static enum fl_status on_answer(struct spread *s, struct furlong_done *a, struct fl_err *err)
{
    uint32_t part = (uint32_t)(a->tag >> 32), engine = (uint32_t)a->tag;
    struct engine_state *x = &s->engines[engine];
    enum fl_status st = a->status;

    x->in_flight--;
    s->in_flight--;
    x->heard_s = s->d->ops->now_s(s->d);
    switch (a->status) {
    case FL_OK:
        st = drv_part_take(s->job, &s->parts.parts[part], &a->answer, s->digest, err);
        furlong_answer_free(&a->answer);
        if (st != FL_OK)
            return fl_wrap(err, st, "rollout %u", engine);
        s->parts.parts[part].asked = true;
        s->parts.parts[part].engine = engine;
        s->parts.left--;
        s->got_s = x->heard_s;
        return FL_OK;
    case FL_UNREACHABLE:
    case FL_CANCELLED:
        x->down = true;
        put_back(s, part, engine, &a->err);
        return FL_OK;
    case FL_STALE:
    case FL_AGAIN:
    case FL_TIMEOUT:
        x->not_before = x->heard_s + BACK_OFF_MS / 1000.0;
        put_back(s, part, engine, &a->err);
        return FL_OK;
    case FL_INTERNAL:  /* an exception in a program, */
    case FL_EXHAUSTED: /* or memory: another engine, or a little later, may do */
        if (s->parts.parts[part].failed++ < FAILED_MAX) {
            x->not_before = x->heard_s + BACK_OFF_MS / 1000.0;
            put_back(s, part, engine, &a->err);
            return FL_OK;
        }
        return fl_fail(err, st, "rollout %u: %s (asked %d times)", engine, a->err.text,
                       FAILED_MAX + 1);
    default:
        return fl_fail(err, st, "rollout %u: %s", engine, a->err.text);
    }
}

/* Its asks come back as those of any engine that ended, and are given to others. */
static void end_silent(struct spread *s)
{
    double now = s->d->ops->now_s(s->d), most = s->d->flags.silence_timeout_s;
    struct furlong_member m;
    char why[200];

    for (uint32_t e = 0; e < s->n_engines; e++) {
        struct engine_state *x = &s->engines[e];

        if (!x->in_flight || x->down || now - x->heard_s <= most)
            continue;
        furlong_group_member(s->g, e, &m);
        snprintf(why, sizeof(why),
                 "rollout %u on %s: generate: no answer in %.0f s (--silence-timeout)", e, m.node,
                 now - x->heard_s);
        x->heard_s = s->got_s = now;
        drv_seat_end(s->d, DRV_ENGINES, e, x->attempt, why);
    }
}

static enum fl_status spread_run(struct spread *s, struct fl_err *err)
{
    double silence = s->d->flags.silence_timeout_s;

    while (s->parts.left) {
        struct furlong_done a = { 0 };

        FL_TRY(hand_out(s, err));
        enum fl_status st = furlong_asks_next(s->asks, s->in_flight ? POLL_MS : 0, &a, err);
        if (st == FL_OK) {
            FL_TRY(on_answer(s, &a, err));
            continue;
        }
        if (st != FL_AGAIN && st != FL_NOT_FOUND)
            return st;
        FL_TRY(look_at_members(s, err));
        end_silent(s);
        if (s->in_flight)
            continue;
        drv_nap(BACK_OFF_MS);
        if (s->d->ops->now_s(s->d) - s->got_s > silence)
            return fl_fail(
                err, FL_TIMEOUT,
                "%u of %u parts of a generation found no engine that serves version %ju in "
                "%.0f s (--silence-timeout)",
                s->parts.left, s->parts.n, (uintmax_t)s->job->version, silence);
    }
    return FL_OK;
}

enum fl_status drv_seat_generate(struct driver *d, const struct drv_job *job, struct drv_made *out,
                                 struct fl_err *err)
{
    struct drv_seat *seat = d->seat;
    struct spread s = { .d = d, .g = seat->groups[DRV_ENGINES], .job = job, .out = out };
    enum fl_status st;

    *out = (struct drv_made){ 0 };
    s.n_engines = furlong_group_size(s.g);
    s.got_s = d->ops->now_s(d);
    if (d->has_served && (d->served_digest[0] || d->served_digest[1]))
        snprintf(s.digest, sizeof(s.digest), "%016" PRIx64 "%016" PRIx64, d->served_digest[0],
                 d->served_digest[1]);
    s.engines = calloc(s.n_engines, sizeof(*s.engines));
    st = s.engines ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory for %u engines", s.n_engines);
    for (uint32_t e = 0; st == FL_OK && e < s.n_engines; e++) {
        struct furlong_member m;

        furlong_group_member(s.g, e, &m);
        s.engines[e].attempt = m.attempt;
        s.engines[e].down = m.state != FURLONG_LIVE;
        s.engines[e].late = furlong_group_late(s.g, e, &m) != FURLONG_IN_TIME;
    }
    if (st == FL_OK)
        st = drv_parts_cut(&s.parts, job->n_prompts, s.n_engines, err);
    if (st == FL_OK)
        st = furlong_asks_create(seat->f, s.n_engines * IN_FLIGHT + 1, &s.asks, err);
    if (st == FL_OK)
        st = spread_run(&s, err);
    furlong_asks_destroy(s.asks);
    if (st == FL_OK)
        st = drv_parts_join(&s.parts, s.n_engines, out, err);
    drv_parts_fini(&s.parts);
    free(s.engines);
    return st;
}

/* ---- train ----------------------------------------------------------------------------------- */
/* A rank that ended leaves the others waiting for its gradients: the call is over then. */
static enum fl_status all_live(struct furlong_group *g, const uint32_t *attempts,
                               struct fl_err *err)
{
    for (uint32_t i = 0; i < furlong_group_size(g); i++) {
        struct furlong_member m;

        furlong_group_member(g, i, &m);
        if (m.state != FURLONG_LIVE || m.attempt != attempts[i])
            return m.why[0] ? fl_fail(err, FL_UNREACHABLE, "%s", m.why)
                            : fl_fail(err, FL_UNREACHABLE, "trainer %u on %s ended", i, m.node);
    }
    return FL_OK;
}

/* One that hangs keeps the others waiting for its gradients, so all that have not answered go. */
static enum fl_status end_silent_trainers(struct driver *d, struct furlong_group *g, uint32_t left,
                                          const uint32_t *attempts, const bool *answered,
                                          struct fl_err *err)
{
    double most = d->flags.silence_timeout_s;
    char why[200];

    for (uint32_t i = 0; i < furlong_group_size(g); i++) {
        struct furlong_member m;

        if (answered[i])
            continue;
        furlong_group_member(g, i, &m);
        snprintf(why, sizeof(why),
                 "trainer %u on %s: train: no answer in %.0f s (--silence-timeout)", i, m.node,
                 most);
        drv_seat_end(d, DRV_TRAINERS, i, attempts[i], why);
    }
    return fl_fail(err, FL_TIMEOUT, "%u trainer ranks did not answer in %.0f s (--silence-timeout)",
                   left, most);
}

static enum fl_status train_wait(struct driver *d, struct furlong_group *g,
                                 struct furlong_asks *asks, const uint32_t *attempts,
                                 bool *answered, json_t **answer, struct fl_err *err)
{
    uint32_t left = furlong_group_size(g);
    double due = d->ops->now_s(d) + d->flags.silence_timeout_s;

    while (left) {
        struct furlong_done a = { 0 };
        enum fl_status st = furlong_asks_next(asks, POLL_MS, &a, err);

        if (st == FL_AGAIN) {
            FL_TRY(all_live(g, attempts, err));
            if (d->ops->now_s(d) > due)
                return end_silent_trainers(d, g, left, attempts, answered, err);
            continue;
        }
        FL_TRY(st);
        left--;
        answered[a.tag] = true;
        if (a.status != FL_OK) {
            struct fl_err ended;

            /* the first to fail may be one that waited for the one that ended */
            if (a.status == FL_UNREACHABLE || a.status == FL_TIMEOUT)
                (void)drv_seat_tell(d, DRV_TRAINERS, DRV_CAUSE_MS);
            if (all_live(g, attempts, &ended) != FL_OK)
                return fl_fail(err, FL_UNREACHABLE, "%s", ended.text);
            return fl_fail(err, a.status, "trainer %u: %s", (uint32_t)a.tag, a.err.text);
        }
        if (a.tag == 0 && a.answer.body_bytes)
            st = fl_json_parse(a.answer.body, a.answer.body_bytes, "train's answer", FL_JSON_MAX,
                               answer, err);
        furlong_answer_free(&a.answer);
        FL_TRY(st);
    }
    return FL_OK;
}

enum fl_status drv_seat_train(struct driver *d, const char *body, const void *blob, size_t bytes,
                              json_t **answer, struct fl_err *err)
{
    struct drv_seat *seat = d->seat;
    struct furlong_group *g = seat->groups[DRV_TRAINERS];
    uint32_t n = furlong_group_size(g), *attempts = calloc(n, sizeof(*attempts));
    bool *answered = calloc(n, sizeof(*answered));
    struct furlong_data what = { body, strlen(body), blob, bytes };
    struct furlong_asks *asks = NULL;
    enum fl_status st = attempts && answered
                            ? furlong_asks_create(seat->f, n, &asks, err)
                            : fl_fail(err, FL_EXHAUSTED, "no memory for %u trainers", n);

    for (uint32_t i = 0; st == FL_OK && i < n; i++) {
        struct furlong_member m;

        furlong_group_member(g, i, &m);
        attempts[i] = m.attempt;
        st = furlong_asks_start(asks, furlong_group_peer(g, i), FURLONG_MAIN, "train", &what, 0, i,
                                err);
    }
    if (st == FL_OK)
        st = train_wait(d, g, asks, attempts, answered, answer, err);
    furlong_asks_destroy(asks);
    free(answered);
    free(attempts);
    return st;
}
