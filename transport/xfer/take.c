#include "transport/xfer/take_priv.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "common/base/id.h"
#include "common/base/str.h"

/* Else both sides act: the giver sends. */
bool take_pulls(const struct take_edge *te)
{
    return (te->ops->caps & LINK_PULL) || te->take->o.part->mode == XFER_SHARE;
}

/* ---- the end, good or bad ---- */

void take_fail(struct take *t, const struct take_edge *te, uint32_t bucket, enum fl_status st,
               const struct fl_err *why)
{
    struct take_bad bad = { 0 };

    if (t->over || t->aborting)
        return;
    t->over = t->done = true;
    fl_fail(&bad.why, st, "%s, bucket %u of %zu of epoch %u.%u from %s: %s", t->o.name, bucket + 1,
            t->o.part->n_buckets, t->o.epoch.attempt, t->o.epoch.seq,
            te && te->team->members ? te->team->members[0].name : "disk", why->text);
    t->o.user->bad(t->o.arg, &bad);
}

static bool edge_idle(const struct take_edge *te)
{
    return !te->in_flight && !te->calling && !te->dialing &&
           (!te->reach || te->reach->line->state == LINE_READY ||
            te->reach->line->state == LINE_QUIET);
}

bool take_idle(const struct take *t)
{
    if (t->started && !t->done && !t->aborting)
        return false;
    if (t->in_work || t->check_dials || t->check_calls)
        return false;
    for (size_t i = 0; t->started && i < t->o.part->n_edges; i++)
        if (!edge_idle(&t->edges[i]))
            return false;
    return true;
}

static void release(struct take *t)
{
    for (size_t i = 0; i < t->o.part->n_edges; i++) {
        take_half_drop(&t->edges[i]);
        t->edges[i].reach = NULL;
    }
    for (struct reach *r = t->o.reaches->first, *next; r; r = next) {
        next = r->next;
        if (r->by != t)
            continue;
        r->by = NULL;
        reach_sweep(r, NULL);
        if (r->line->state != LINE_READY)
            reach_drop(t->o.reaches, r);
    }
}

static void quiet_run(struct fl_task *task)
{
    struct take *t = container_of(task, struct take, quiet_back);

    release(t);
    t->o.user->quiet(t->o.arg);
}

void take_settle(struct take *t)
{
    if (t->aborting && take_idle(t))
        fl_post(t->o.port->loop, &t->quiet_back);
}

void take_abort(struct take *t)
{
    if (t->aborting)
        return;
    t->aborting = t->over = true;
    fl_task_cancel(t->o.port->loop, &t->all_back);
    take_check_cancel(t);
    for (size_t i = 0; t->started && i < t->o.part->n_edges; i++) {
        struct take_edge *te = &t->edges[i];

        fl_timer_cancel(&te->again);
        if (te->dialing)
            t->o.port->dialer.undial(t->o.port->dialer.arg, &te->dial);
        te->dialing = false;
        if (te->calling)
            call_cancel(&te->call);
        for (unsigned k = 0; k < TAKE_WINDOW; k++)
            take_stage_cancel(&te->window[k]);
        /* a half that waits for its peer, or bytes under way: both end by abort alone */
        if (te->reach && te->reach->by == t &&
            (te->in_flight || te->reach->line->state == LINE_OPENING || !take_pulls(te)))
            line_abort(te->reach->line);
    }
    take_settle(t);
}

static void all_run(struct fl_task *task)
{
    take_compare(container_of(task, struct take, all_back));
}

/* For tests: as if other bytes had arrived than were sent. */
static void bucket_bend(struct take *t, const struct xfer_bucket *b)
{
    const struct link_seg *s = &t->o.part->segs[b->first_seg];
    unsigned char byte = 0;

    (void)link_mem_read(&t->o.slot, s->to_off, &byte, 1, NULL);
    byte ^= 0x40;
    (void)link_mem_write(&t->o.slot, s->to_off, &byte, 1, NULL);
    memset(t->digests[b->first_seg], 0, sizeof(t->digests[0]));
    (void)link_mem_digest(&t->o.slot, s, 1, false, &t->digests[b->first_seg], NULL);
}

void take_bucket_in(struct take_edge *te, uint32_t bucket)
{
    struct take *t = te->take;
    const struct xfer_bucket *b = &t->o.part->buckets[bucket];

    if (FL_FAULT("xfer.bucket") && t->o.slot.addr)
        bucket_bend(t, b);
    t->in[bucket] = true;
    t->n_in++;
    te->n_in++;
    t->moved_bytes += t->o.part->mode == XFER_SHARE ? 0 : b->bytes;
    t->other_bytes += te->rescued ? b->bytes : 0;
    te->in = te->n_in == te->e->n_buckets;
    t->o.user->moved(t->o.arg);
    if (t->n_in == t->o.part->n_buckets && !t->over)
        fl_post(t->o.port->loop, &t->all_back);
}

/* ---- an edge from its beginning ---- */

void take_go(struct take_edge *te)
{
    struct take *t = te->take;

    if (t->aborting || t->over || te->in || te->falling)
        return;
    if (!take_pulls(te))
        take_receive(te);
    else if (te->started)
        take_pull(te);
    else if (!te->calling && !te->dialing)
        take_next_key(te);
}

static void edge_on_again(struct fl_timer *timer, uint64_t now_ns)
{
    (void)now_ns;
    take_go(container_of(timer, struct take_edge, again));
}

static void line_on_ready(void *arg, struct line *ln, enum fl_status st, const struct fl_err *err)
{
    struct take *t = arg;

    for (size_t i = 0; i < t->o.part->n_edges; i++) {
        struct take_edge *te = &t->edges[i];

        if (!te->reach || te->reach->line != ln)
            continue;
        if (st == FL_OK)
            take_go(te);
        else if (!take_rescue(te, err))
            take_fail(t, te, te->e->first_bucket, st, err);
    }
}

static void line_on_quiet(void *arg, struct line *ln)
{
    struct take *t = arg;

    for (size_t i = 0; !t->aborting && i < t->o.part->n_edges; i++)
        if (t->edges[i].falling && t->edges[i].reach->line == ln)
            take_rescue_go(&t->edges[i]);
    take_settle(t);
}

static const struct line_user take_lines = { line_on_ready, line_on_quiet };

/* One that is open: take_pulls need no partner, so one does for all; else the very same partners
 * and ticket. */
static struct reach *reach_kept(struct take_edge *te, const uint64_t key[2])
{
    struct reaches *all = te->take->o.reaches;

    for (struct reach *r = all->first, *next; r; r = next) {
        const struct line *ln = r->line;

        next = r->next;
        if ((r->by && r->by != te->take) || ln->key[0] != key[0] || ln->key[1] != key[1])
            continue;
        bool mine = memcmp(ln->ticket, te->team->ticket, sizeof(te->team->ticket)) == 0;

        if (r->by || (ln->state == LINE_READY && (take_pulls(te) || mine)) ||
            (ln->state == LINE_OPENING && !take_pulls(te) && mine))
            return r;
        reach_end(all, r); /* another ticket: the giver began anew */
    }
    return NULL;
}

static enum fl_status reach_open(struct take_edge *te, const uint64_t key[2], struct reach **out,
                                 struct fl_err *err)
{
    struct take *t = te->take;
    const struct take_team *team = te->team;
    const struct link_place *places = te->rescued ? te->pair : team->places;
    struct reach *r = calloc(1, sizeof(*r));

    if (!r)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a link");
    if (line_open(t->o.port->loop, te->ops, places, te->rescued ? 2 : team->n,
                  te->rescued ? 1 : team->self, team->ticket, key, &take_lines, t, &r->line,
                  err) != FL_OK) {
        free(r);
        return err->status;
    }
    if (!take_pulls(te))
        line_note_team(r->line, team->members);
    r->all = t->o.reaches;
    r->next = r->all->first;
    r->all->first = r;
    *out = r;
    return FL_OK;
}

enum fl_status take_open(struct take_edge *te, struct fl_err *err)
{
    uint64_t key[2];

    line_key(key, te->ops, te->team->members, take_pulls(te) ? 0 : te->team->n);
    te->reach = reach_kept(te, key);
    if (!te->reach)
        FL_TRY(reach_open(te, key, &te->reach, err));
    if (!te->reach->by)
        line_use(te->reach->line, &take_lines, te->take);
    te->reach->by = te->take;
    reach_sweep(te->reach, &te->team->members[0].who);
    if (te->reach->line->state == LINE_READY)
        take_go(te);
    return FL_OK;
}

void take_start(struct take *t)
{
    if (t->aborting)
        return; /* before it began */
    t->started = true;
    for (size_t i = 0; i < t->o.part->n_edges; i++)
        if (t->o.teams[i].later)
            reach_ahead(t->o.reaches, t->o.port->loop, &t->o.teams[i]);
    if (t->n_in == t->o.part->n_buckets)
        fl_post(t->o.port->loop, &t->all_back); /* nothing to do, or the ledger has it all */
    for (size_t i = 0; i < t->o.part->n_edges && !t->over; i++) {
        struct take_edge *te = &t->edges[i];
        struct fl_err err = { 0 };

        if (te->in || te->e->n_buckets == 0)
            continue;
        if (take_disk(te))
            take_files(te);
        else if (take_open(te, &err) != FL_OK)
            take_fail(t, te, te->e->first_bucket, err.status, &err);
    }
}

/* ---- life ---- */

void take_teams_free(struct take_team *teams, size_t n)
{
    for (size_t i = 0; teams && i < n; i++) {
        free(teams[i].places);
        free(teams[i].members);
    }
    free(teams);
}

static bool take_arrays(struct take *t)
{
    const struct xfer_plan *p = t->o.part;

    t->edges = calloc(p->n_edges + 1, sizeof(*t->edges));
    t->in = calloc(p->n_buckets + 1, sizeof(*t->in));
    t->suspect = calloc(p->n_buckets + 1, sizeof(*t->suspect));
    t->digests = calloc(p->n_segs + 1, sizeof(*t->digests));
    t->sum = calloc(p->n_tensors + 1, sizeof(*t->sum));
    t->once = calloc(p->n_tensors + 1, sizeof(*t->once));
    t->sum_bytes = calloc(p->n_tensors + 1, sizeof(*t->sum_bytes));
    t->once_bytes = calloc(p->n_tensors + 1, sizeof(*t->once_bytes));
    t->wrong = calloc(p->n_tensors + 1, sizeof(*t->wrong));
    return t->edges && t->in && t->suspect && t->digests && t->sum && t->once && t->sum_bytes &&
           t->once_bytes && t->wrong;
}

enum fl_status take_create(const struct take_opts *o, struct take **out, struct fl_err *err)
{
    struct take *t = calloc(1, sizeof(*t));

    if (!t) {
        take_teams_free(o->teams, o->part->n_edges);
        xfer_plan_destroy(o->part);
        free(o->expect);
        return fl_fail(err, FL_EXHAUSTED, "no memory to take weights");
    }
    t->o = *o;
    if (o->delta_dir && !FL_COPY(t->delta_dir, o->delta_dir)) {
        take_destroy(t);
        return fl_fail(err, FL_INVALID, "the path %s is too long", o->delta_dir);
    }
    t->quiet_back.run = quiet_run;
    t->all_back.run = all_run;
    if (!take_arrays(t)) {
        take_destroy(t);
        return fl_fail(err, FL_EXHAUSTED, "no memory to take %zu buckets", o->part->n_buckets);
    }
    for (size_t i = 0; i < o->part->n_edges; i++) {
        t->edges[i] = (struct take_edge){
            .take = t, .e = &o->part->edges[i], .team = &o->teams[i], .ops = o->teams[i].ops
        };
        t->edges[i].again.fire = edge_on_again;
        if (o->teams[i].later && take_go_other_way(&t->edges[i], err) != FL_OK) {
            take_destroy(t);
            return err->status;
        }
    }
    *out = t;
    return FL_OK;
}

bool take_same(const struct take *t, const uint64_t plan[2], const struct xfer_version *target)
{
    return t->o.plan[0] == plan[0] && t->o.plan[1] == plan[1] &&
           xfer_version_same(&t->o.target, target);
}

bool take_inherit(struct take *t, const struct take *ledger)
{
    if (take_shares(t) || !take_same(ledger, t->o.plan, &t->o.target) ||
        ledger->o.part->n_buckets != t->o.part->n_buckets ||
        ledger->o.part->n_segs != t->o.part->n_segs || ledger->o.slot.addr != t->o.slot.addr)
        return false;
    for (size_t i = 0; i < t->o.part->n_edges; i++) {
        struct take_edge *te = &t->edges[i];

        if (!te->ops || !(te->ops->caps & LINK_PULL))
            continue; /* who sends sends all of it, in order */
        for (uint32_t k = 0; k < te->e->n_buckets; k++) {
            uint32_t b = te->e->first_bucket + k;
            const struct xfer_bucket *bucket = &t->o.part->buckets[b];

            if (!ledger->in[b])
                continue;
            t->in[b] = true;
            t->n_in++;
            te->n_in++;
            memcpy(t->digests[bucket->first_seg], ledger->digests[bucket->first_seg],
                   bucket->n_segs * sizeof(t->digests[0]));
        }
        te->in = te->n_in == te->e->n_buckets;
    }
    return true;
}

void take_strike(struct take *t, const struct take_bad *b)
{
    for (uint32_t i = 0; i < b->n_buckets; i++)
        t->in[b->buckets[i]] = false;
}

void take_counts(const struct take *t, uint32_t *in, uint32_t *all, uint64_t *bytes)
{
    *in = t->n_in;
    *all = (uint32_t)t->o.part->n_buckets;
    *bytes = t->moved_bytes;
}

uint64_t take_link_ns(const struct take *t)
{
    return t->link_ns;
}

uint64_t take_other_bytes(const struct take *t)
{
    return t->other_bytes;
}

bool take_shares(const struct take *t)
{
    return t->o.part->mode == XFER_SHARE;
}

const struct link_mem *take_shared(const struct take *t)
{
    return take_mapped(&t->edges[0], t->o.part->buckets[0].from_mem);
}

struct reach *take_reach(const struct take *t, size_t edge)
{
    return t->edges[edge].reach;
}

size_t take_n_edges(const struct take *t)
{
    return t->o.part->n_edges;
}

const struct xfer_member *take_giver(const struct take *t, size_t edge)
{
    return t->o.teams[edge].members;
}

uint32_t take_giver_slot(const struct take *t)
{
    return t->o.part->n_edges ? t->edges[0].giver_slot : 0;
}

const struct xfer_plan *take_part(const struct take *t)
{
    return t->o.part;
}

const uint64_t (*take_expect(const struct take *t))[2]
{
    return (const uint64_t(*)[2])t->o.expect;
}

void take_destroy(struct take *t)
{
    if (!t)
        return;
    fl_task_cancel(t->o.port->loop, &t->all_back);
    fl_task_cancel(t->o.port->loop, &t->quiet_back);
    for (size_t i = 0; t->edges && i < t->o.part->n_edges; i++) {
        struct take_edge *te = &t->edges[i];

        fl_timer_cancel(&te->again);
        parcels_fini(&te->parcels);
        for (unsigned w = 0; w < TAKE_WINDOW; w++) {
            fl_timer_cancel(&te->window[w].later);
            free(te->window[w].room.addr);
        }
    }
    if (t->edges)
        release(t);
    free(t->edges);
    free(t->in);
    free(t->suspect);
    free(t->digests);
    free(t->sum);
    free(t->once);
    free(t->sum_bytes);
    free(t->once_bytes);
    free(t->wrong);
    take_teams_free(t->o.teams, t->o.part->n_edges);
    xfer_plan_destroy(t->o.part);
    free(t->o.expect);
    free(t);
}
