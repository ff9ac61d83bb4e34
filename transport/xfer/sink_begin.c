/* BEGIN at an engine: all of it is read and checked, and room is made, before anything is given up
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "common/proto/methods.h"
#include "transport/xfer/sink_priv.h"

static enum fl_status read_team(struct xfer_sink *s, const Fl__XferTeam *t, struct take_team *out,
                                struct fl_err *err)
{
    size_t n = t->n_members;
    bool good = n >= 2 && n <= 4096 && t->n_places == n && t->self > 0 && t->self < n &&
                t->has_ticket && t->ticket.len == sizeof(out->ticket);

    if (!good)
        return fl_fail(err, FL_CORRUPT, "a team of %zu members does not decode", n);
    *out = (struct take_team){ .ops = port_link(s->port, t->link),
                               .n = (unsigned)n,
                               .self = t->self,
                               .giver_edge = t->giver_edge,
                               .later = t->later,
                               .has_key = t->has_key && t->has_key_slot,
                               .key = t->key,
                               .key_slot = t->key_slot,
                               .places = calloc(n, sizeof(*out->places)),
                               .members = calloc(n, sizeof(*out->members)) };
    if (!out->places || !out->members)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a team of %zu", n);
    if (!out->ops)
        return fl_fail(err, FL_UNSUPPORTED, "%s has no link \"%s\"", s->me.name, t->link);
    memcpy(out->ticket, t->ticket.data, sizeof(out->ticket));
    for (size_t i = 0; good && i < n; i++)
        good = msg_read_place(t->places[i], &out->places[i]) &&
               msg_read_member(t->members[i], &out->members[i]);
    return good ? FL_OK : fl_fail(err, FL_CORRUPT, "a member of a team does not decode");
}

static enum fl_status read_teams(struct xfer_sink *s, const Fl__XferBegin *b, struct take_opts *o,
                                 struct fl_err *err)
{
    o->teams = calloc(o->part->n_edges + 1, sizeof(*o->teams));
    if (!o->teams)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu edges", o->part->n_edges);
    for (size_t i = 0; i < b->n_teams; i++) {
        const Fl__XferTeam *t = b->teams[i];

        if (t->edge >= o->part->n_edges || o->teams[t->edge].members)
            return fl_fail(err, FL_CORRUPT, "a team names edge %u of %zu", t->edge,
                           o->part->n_edges);
        FL_TRY(read_team(s, t, &o->teams[t->edge], err));
    }
    for (size_t i = 0; i < o->part->n_edges; i++)
        if (o->part->edges[i].link != XFER_LINK_DISK && !o->teams[i].members)
            return fl_fail(err, FL_CORRUPT, "edge %zu of %zu has no team", i, o->part->n_edges);
    return FL_OK;
}

/* What was decoded and checked once is good as long as its hash is the same. */
static enum fl_status read_part(struct xfer_sink *s, const Fl__XferBegin *b,
                                const struct wire_msg *m, struct take_opts *o, struct fl_err *err)
{
    uint64_t hash[2];

    if (!msg_read_hash(b->part, hash) || b->part_bytes > m->head.blob_bytes)
        return fl_fail(err, FL_CORRUPT, "a begin without a part of the plan");
    if (b->part_kept) {
        if (FL_FAULT("xfer.part") || !s->part || s->part_hash[0] != hash[0] ||
            s->part_hash[1] != hash[1])
            return fl_fail(err, FL_NOT_FOUND, "%s does not have that part of the plan", s->me.name);
        o->part = xfer_plan_keep(s->part);
        return FL_OK;
    }
    FL_TRY(xfer_part_decode(m->blob, b->part_bytes, hash, &o->part, err));
    FL_TRY(xfer_part_check(o->part, b->member, s->want, err));
    xfer_plan_destroy(s->part);
    s->part = xfer_plan_keep(o->part);
    memcpy(s->part_hash, hash, sizeof(hash));
    return FL_OK;
}

/* Everything that a peer could have got wrong, before anything has changed here. */
static enum fl_status begin_read(struct xfer_sink *s, const Fl__XferBegin *b,
                                 const struct wire_msg *m, struct take_opts *o, struct fl_err *err)
{
    size_t digest_bytes;

    if (!msg_read_hash(b->plan, o->plan) || !b->target)
        return fl_fail(err, FL_CORRUPT, "a begin without target or hashes");
    o->target = msg_read_version(b->target);
    FL_TRY(read_part(s, b, m, o, err));
    if (o->part->mode == XFER_SHARE && (o->part->n_edges != 1 || o->part->n_buckets == 0))
        return fl_fail(err, FL_INVALID, "pages of %zu sources cannot be served from as one",
                       o->part->n_edges);
    digest_bytes = o->part->n_tensors * sizeof(*o->expect);
    if (m->head.blob_bytes - b->part_bytes != digest_bytes)
        return fl_fail(err, FL_CORRUPT, "%zu tensors in the plan, %" PRIu64 " bytes of digests",
                       o->part->n_tensors, m->head.blob_bytes - b->part_bytes);
    o->expect = malloc(digest_bytes + 1);
    if (!o->expect)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu digests", o->part->n_tensors);
    memcpy(o->expect, (const char *)m->blob + b->part_bytes, digest_bytes);
    return read_teams(s, b, o, err);
}

static enum fl_status take_room(struct xfer_sink *s, int slot, struct fl_err *err)
{
    uint64_t bytes = s->want->mem_bytes[0];

    if (s->have_slot[slot])
        return FL_OK;
    if (FL_FAULT("xfer.room"))
        return fl_fail(err, FL_EXHAUSTED, "fault xfer.room");
    FL_TRY(s->ops->room(s->arg, bytes, &s->slot[slot], err));
    s->have_slot[slot] = true;
    s->slot_gen[slot] = ++s->gens;
    return FL_OK;
}

static int stage_slot(const struct xfer_sink *s, bool one_slot)
{
    if (one_slot)
        return s->view.slot >= 0 ? s->view.slot : s->rx.state == RX_DIRTY ? s->stage_slot : 0;
    return s->view.slot == 0 ? 1 : 0;
}

static void begin_opts(struct xfer_sink *s, const Fl__XferBegin *b, struct take_opts *o)
{
    *o = (struct take_opts){ .port = s->port,
                             .reaches = &s->reaches,
                             .set = s->set.set,
                             .name = s->me.name,
                             .want = s->want,
                             .epoch = msg_read_epoch(b->epoch),
                             .check_equal = s->check_equal,
                             .delta_dir = b->delta_dir,
                             .local_dir = s->local_dir,
                             .user = &sink_takes,
                             .arg = s };
}

static void begin_drop(struct take_opts *o)
{
    if (o->part)
        take_teams_free(o->teams, o->part->n_edges);
    else
        free(o->teams);
    free(o->expect);
    xfer_plan_destroy(o->part);
}

/* The new take, ready to start. On failure nothing has changed, but that room may have been taken
 * and given back. */
static enum fl_status begin_prepare(struct xfer_sink *s, const Fl__XferBegin *b,
                                    const struct wire_msg *m, struct take **out, int *slot,
                                    struct fl_err *err)
{
    struct take_opts o;
    bool had;

    begin_opts(s, b, &o);
    *slot = stage_slot(s, b->slots == XFER_ONE_SLOT);
    if (begin_read(s, b, m, &o, err) != FL_OK) {
        begin_drop(&o);
        return err->status;
    }
    had = s->have_slot[*slot];
    if (o.part->mode != XFER_SHARE && take_room(s, *slot, err) != FL_OK) {
        begin_drop(&o);
        return err->status;
    }
    if (o.part->mode != XFER_SHARE)
        o.slot = s->slot[*slot];
    if (take_create(&o, out, err) != FL_OK) {
        if (!had)
            sink_slot_give_back(s, *slot);
        return err->status;
    }
    return FL_OK;
}

static void begin_now(struct xfer_sink *s, const Fl__XferBegin *b, enum rx_act act,
                      struct take *take, int slot)
{
    bool serves = act == RX_DO_DIRTY && s->view.mem.addr;
    int left = s->stage_slot;

    s->open = !take;
    s->dirty_number = b->number;
    s->hold = b->hold;
    s->at_once = b->commit && !b->hold;
    s->lease_ms = b->lease_ms;
    s->bad = (struct take_bad){ 0 };
    s->bytes = s->other_bytes = s->link_ns = s->verify_ns = s->pause_ns = 0;
    s->buckets_in = s->buckets_all = 0;
    if (take && act == RX_DO_AGAIN_DIRTY && s->take)
        (void)take_inherit(take, s->take);
    if (take) {
        sink_forget_ledger(s);
        if (act == RX_DO_STAGE && left != slot && left != s->view.slot)
            sink_slot_give_back(s, left); /* what was dirty */
        s->take = take;
        s->stage_slot = slot;
        s->staged = msg_read_version(b->target);
        take_counts(take, &s->buckets_in, &s->buckets_all, &s->bytes);
    }
    if (serves) {
        s->serving = (struct xfer_version){ 0 };
        s->pausing = s->begin_after_pause = true;
        s->pause_from_ns = fl_clock_boot_ns();
        s->ops->pause(s->arg, &s->paused_back);
    } else if (take && !s->pausing) {
        take_start(take);
    }
}

/* Something older has to end first. */
static bool gives_way(struct xfer_sink *s, const struct xfer_epoch *e)
{
    bool newer = xfer_epoch_cmp(e, &s->rx.seen) > 0;

    if (give_busy(&s->give)) {
        if (xfer_epoch_cmp(e, &s->give.epoch) > 0)
            give_stop(&s->give, "a newer epoch has begun");
        return true;
    }
    if (s->rx.state != RX_DIRTY || !newer || (!sink_busy(s) && !s->pausing))
        return false;
    if (s->take && !s->pausing)
        take_abort(s->take);
    return true;
}

void sink_begin(struct xfer_sink *s, struct call_req *req, const Fl__XferBegin *b,
                const struct wire_msg *m)
{
    struct xfer_epoch e = msg_read_epoch(b->epoch);
    enum rx_event on = b->slots == XFER_ONE_SLOT ? RX_BEGIN_ONE_SLOT : RX_BEGIN;
    struct rx trial = s->rx;
    struct take *take = NULL;
    struct fl_err err = { 0 };
    enum rx_act act = RX_DO_NOTHING;
    int slot = s->stage_slot;

    if (b->open && !sink_may_read(s) && !s->pausing &&
        !(s->view.n_reaches && s->view.maps_slot == b->open_slot)) {
        sink_reply_state(s, req); /* nothing to give up */
        return;
    }
    if (s->offloaded && !b->open && xfer_epoch_cmp(&e, &s->rx.seen) > 0)
        fl_fail(&err, FL_AGAIN, "the weights of %s are offloaded", s->me.name);
    else if (gives_way(s, &e))
        fl_fail(&err, FL_AGAIN, "%s ends an older epoch first", s->me.name);
    else if (on == RX_BEGIN && s->slots == XFER_ONE_SLOT && b->mode != XFER_SHARE)
        fl_fail(&err, FL_INVALID, "%s has room for one slot only", s->me.name);
    else if (rx_event(&trial, on, &e, &act, &err) == FL_AGAIN)
        (void)sink_event(s, on, &e, NULL); /* gives way, if anything of ours has to */
    else if (err.status == FL_OK && act != RX_DO_NOTHING && !b->open)
        (void)begin_prepare(s, b, m, &take, &slot, &err);
    if (err.status != FL_OK) {
        call_fail(req, &err);
        return;
    }
    if (act != RX_DO_NOTHING) {
        (void)sink_event(s, on, &e, NULL);
        begin_now(s, b, act, take, slot);
        sink_lease(s);
    }
    sink_answer_when_due(s, req, FL_XFER_BEGIN, b->wait_ms, UINT32_MAX);
}
