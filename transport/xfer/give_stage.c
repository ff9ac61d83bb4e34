/* transport/xfer/give_stage.c - what nobody else can map is copied where they can, a bucket at a
 * time
 *
 * Two halves: one is filled while the other is read. Whoever takes the same bytes reads the same
 * half. A taker that died with a half in hand gives it up after HELD_MS; one that was only slow
 * finds out by its digests. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "common/proto/methods.h"
#include "transport/link/dev.h"
#include "transport/xfer/give_priv.h"

enum { HELD_MS = 2000 }; /* a bucket is read in a few milliseconds */

bool give_stages(const struct give *g, uint32_t mem, const struct link_ops *ops)
{
    const struct link_pages *p = link_pages_of(&g->slot.mems[mem]);

    return p && p->staged && (ops->caps & LINK_DEVICE) && (ops->caps & LINK_MAP);
}

static const struct link_seg *segs_of(const struct give *g, uint32_t bucket, size_t *n)
{
    const struct xfer_bucket *b = &g->part->buckets[bucket];

    *n = b->n_segs;
    return &g->part->segs[b->first_seg];
}

enum fl_status give_stage_area(struct give *g, const struct link_mem **out, struct fl_err *err)
{
    struct give_stage *s = &g->stage;
    uint64_t most = 0;
    size_t n;

    if (!s->area.bytes) {
        for (uint32_t b = 0; b < g->part->n_buckets; b++) {
            const struct link_seg *segs = segs_of(g, b, &n);
            const struct link_pages *p = link_pages_of(&g->slot.mems[g->part->buckets[b].from_mem]);
            uint64_t bytes = p && p->staged ? stage_bytes(segs, n) : 0;

            most = bytes > most ? bytes : most;
        }
        if (!g->user->room || FL_FAULT("xfer.stage_room"))
            return fl_fail(err, FL_UNSUPPORTED, "%s has no room to stage in", g->name);
        enum fl_status st = g->user->room(g->arg, most * STAGE_HALVES, &s->area, err);
        if (st != FL_OK) {
            s->area = (struct link_mem){ 0 };
            return fl_wrap(err, st, "%s: a staging buffer of two buckets (%" PRIu64 " bytes)",
                           g->name, most * STAGE_HALVES);
        }
        s->half_bytes = most;
    }
    *out = &s->area;
    return FL_OK;
}

/* ---- who waits ---- */

static bool same_bytes(const struct give *g, uint32_t a, uint32_t b)
{
    size_t n, m;
    const struct link_seg *x = segs_of(g, a, &n), *y = segs_of(g, b, &m);
    bool same = n == m && g->part->buckets[a].from_mem == g->part->buckets[b].from_mem;

    for (size_t i = 0; a != b && i < n && same; i++)
        same = x[i].from_off == y[i].from_off && x[i].run_bytes == y[i].run_bytes &&
               x[i].rows == y[i].rows && x[i].from_step == y[i].from_step;
    return same;
}

static void answer(struct give *g, struct give_ask *a, uint32_t half)
{
    Fl__XferStaged r = FL__XFER_STAGED__INIT;

    r.has_half = r.has_off = true;
    r.half = half;
    r.off = half * g->stage.half_bytes;
    g->stage.halves[half].readers++;
    g->stage.halves[half].since_ns = fl_loop_now_ns(g->port->loop);
    msg_reply(a->req, &r.base, (struct fl_bytes){ 0 });
}

static void ask_drop(struct give_stage *s, unsigned i)
{
    memmove(&s->asks[i], &s->asks[i + 1], (s->n_asks - i - 1) * sizeof(s->asks[0]));
    s->n_asks--;
}

static void refuse_all(struct give *g, const struct fl_err *err)
{
    while (g->stage.n_asks) {
        call_fail(g->stage.asks[0].req, err);
        ask_drop(&g->stage, 0);
    }
}

static void pump(struct give *g);

static void fill_work(struct fl_work *w)
{
    struct give *g = container_of(w, struct give, stage.fill);
    struct give_stage *s = &g->stage;

    s->err = (struct fl_err){ 0 };
    s->err.status =
        link_mem_move(&g->slot.mems[s->from_mem], &s->area, s->segs, s->n_segs, &s->err);
}

static void fill_done(struct fl_work *w, enum fl_status st)
{
    struct give *g = container_of(w, struct give, stage.fill);
    struct give_stage *s = &g->stage;
    struct fl_err err = s->err;

    s->busy = false;
    free(FL_TAKE(s->segs));
    if (st != FL_OK)
        fl_fail(&err, st, "a bucket was not staged");
    s->halves[s->filling].state = err.status == FL_OK ? HALF_FULL : HALF_FREE;
    if (err.status != FL_OK) {
        fl_wrap(&err, err.status, "%s stages a bucket", g->name);
        refuse_all(g, &err);
    }
    if (!g->ending)
        pump(g);
    give_settle(g);
}

static bool fill(struct give *g, uint32_t bucket, uint32_t half)
{
    struct give_stage *s = &g->stage;
    const struct link_seg *segs = segs_of(g, bucket, &s->n_segs);
    struct fl_err err = { 0 };

    s->segs = malloc((s->n_segs + 1) * sizeof(*s->segs));
    if (!s->segs) {
        fl_fail(&err, FL_EXHAUSTED, "%s: no memory to stage %zu segments", g->name, s->n_segs);
        refuse_all(g, &err);
        return false;
    }
    stage_fills(segs, s->n_segs, half * s->half_bytes, s->segs);
    s->halves[half] = (struct give_half){ .state = HALF_FILLS, .bucket = bucket };
    s->filling = half;
    s->from_mem = g->part->buckets[bucket].from_mem;
    s->busy = true;
    s->fill = (struct fl_work){ .work = fill_work, .done = fill_done };
    fl_work_start(g->port->loop, &s->fill);
    return true;
}

/* A half that nobody reads: an empty one, or the one that was read by everybody longest ago. */
static int free_half(struct give_stage *s, uint64_t now)
{
    int best = -1;

    for (int i = 0; i < STAGE_HALVES; i++) {
        struct give_half *h = &s->halves[i];

        if (h->state == HALF_FULL && h->readers && now - h->since_ns > HELD_MS * 1000000ull)
            h->readers = 0;
        if (h->state == HALF_FILLS || h->readers)
            continue;
        if (best < 0 || h->state == HALF_FREE ||
            (s->halves[best].state == HALF_FULL && h->since_ns < s->halves[best].since_ns))
            best = i;
    }
    return best;
}

static bool is_coming(const struct give *g, uint32_t bucket)
{
    const struct give_stage *s = &g->stage;

    return s->busy && same_bytes(g, s->halves[s->filling].bucket, bucket);
}

static void on_late(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    pump(container_of(t, struct give, stage.late));
}

static void pump(struct give *g)
{
    struct give_stage *s = &g->stage;

    for (unsigned i = 0; i < s->n_asks;) {
        uint32_t half = 0;

        while (half < STAGE_HALVES && !(s->halves[half].state == HALF_FULL &&
                                        same_bytes(g, s->halves[half].bucket, s->asks[i].bucket)))
            half++;
        if (half < STAGE_HALVES) {
            answer(g, &s->asks[i], half);
            ask_drop(s, i);
        } else {
            i++;
        }
    }
    for (unsigned i = 0; i < s->n_asks && !s->busy; i++) {
        int half =
            is_coming(g, s->asks[i].bucket) ? -1 : free_half(s, fl_loop_now_ns(g->port->loop));

        if (half >= 0 && !fill(g, s->asks[i].bucket, (uint32_t)half))
            return;
    }
    s->late.fire = on_late;
    if (s->n_asks && !s->busy)
        fl_timer_arm_in(g->port->loop, &s->late, HELD_MS / 4);
    else
        fl_timer_cancel(&s->late);
}

/* ---- the message ---- */

static enum fl_status ask_read(struct give *g, const Fl__XferStage *m, uint32_t *bucket,
                               struct fl_err *err)
{
    const struct xfer_edge *e;

    FL_TRY(give_asked_now(g, m->epoch, m->plan, 0, err));
    if (m->edge >= g->n_edges || !g->stage.area.bytes)
        return fl_fail(err, FL_INVALID, "%s stages nothing for edge %u", g->name, m->edge);
    e = g->edges[m->edge].e;
    for (size_t i = 0; i < m->n_done; i++)
        if (m->done[i] >= STAGE_HALVES)
            return fl_fail(err, FL_CORRUPT, "half %u of %d is done", m->done[i], STAGE_HALVES);
    if (!m->has_bucket)
        return FL_OK;
    if (m->bucket >= e->n_buckets ||
        !give_stages(g, g->part->buckets[e->first_bucket + m->bucket].from_mem, &link_cuda_ipc))
        return fl_fail(err, FL_INVALID, "bucket %u of %u of edge %u is not staged", m->bucket,
                       e->n_buckets, m->edge);
    *bucket = e->first_bucket + m->bucket;
    return FL_OK;
}

static void on_unwanted(void *arg, struct call_req *req)
{
    struct give *g = arg;
    struct fl_err err = { 0 };

    for (unsigned i = 0; i < g->stage.n_asks; i++)
        if (g->stage.asks[i].req == req) {
            fl_fail(&err, FL_CANCELLED, "nobody waits for it any more");
            ask_drop(&g->stage, i);
            call_fail(req, &err);
            return;
        }
}

void give_stage_ask(struct give *g, struct call_req *req, const Fl__XferStage *m)
{
    Fl__XferStaged nothing = FL__XFER_STAGED__INIT;
    struct fl_err err = { 0 };
    uint32_t bucket = 0;

    if (ask_read(g, m, &bucket, &err) != FL_OK) {
        call_fail(req, &err);
        return;
    }
    for (size_t i = 0; i < m->n_done; i++) {
        struct give_half *h = &g->stage.halves[m->done[i]];

        h->readers -= h->readers > 0;
    }
    if (m->has_bucket && (g->stage.n_asks == GIVE_ASKS || FL_FAULT("xfer.asks"))) {
        fl_fail(&err, FL_AGAIN, "%s: %d buckets are waited for", g->name, GIVE_ASKS);
        call_fail(req, &err); /* what was done counts all the same: it is not said again */
    } else if (m->has_bucket) {
        g->stage.asks[g->stage.n_asks++] = (struct give_ask){ req, bucket };
        call_on_unwanted(req, on_unwanted, g);
    } else {
        msg_reply(req, &nothing.base, (struct fl_bytes){ 0 });
    }
    pump(g);
}

/* ---- the end ---- */

bool give_stage_quiet(const struct give *g)
{
    return !g->stage.busy;
}

void give_stage_stop(struct give *g)
{
    struct fl_err err = { 0 };

    fl_fail(&err, FL_STALE, "epoch %u.%u ends at %s", g->epoch.attempt, g->epoch.seq, g->name);
    refuse_all(g, &err);
    fl_timer_cancel(&g->stage.late);
}

void give_stage_end(struct give *g)
{
    fl_timer_cancel(&g->stage.late);
    if (g->stage.area.bytes)
        g->user->done_with(g->arg, &g->stage.area);
    memset(&g->stage, 0, sizeof(g->stage));
}
