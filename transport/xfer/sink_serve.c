#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "common/proto/methods.h"
#include "transport/xfer/sink_priv.h"

/* ---- reports, and requests that wait ---- */

/* Pages of a source that are not read yet and may be without another word of the coordinator, or
 * are about to be: a flip cannot be stopped, and a dirty engine flips when it has verified. */
static bool may_come_to_read(const struct xfer_sink *s)
{
    return s->take && take_shares(s->take) &&
           (s->rx.state == RX_STAGING || s->rx.state == RX_VERIFIED ||
            s->rx.state == RX_COMMITTING || (s->rx.state == RX_DIRTY && sink_busy(s)));
}

void sink_state(const struct xfer_sink *s, struct xfer_state *out)
{
    bool soon = may_come_to_read(s);

    *out = (struct xfer_state){ .who = s->me.who,
                                .party = s->me.party,
                                .seen = s->rx.seen,
                                .has_manifest = true,
                                .manifest = { s->want->hash[0], s->want->hash[1] },
                                .has_place = true,
                                .place = s->place,
                                .state = s->rx.state,
                                .has_serving = s->rx.has_version,
                                .serving = s->serving,
                                .staged = s->staged,
                                .buckets_in = s->buckets_in,
                                .buckets_all = s->buckets_all,
                                .offloaded = s->offloaded,
                                .one_slot = s->slots == XFER_ONE_SLOT,
                                .held = s->held,
                                .maps = soon || s->view.n_reaches > 0,
                                .maps_who = soon ? take_giver(s->take, 0)->who : s->view.maps_who,
                                .maps_slot = soon ? XFER_ANY_SLOT : s->view.maps_slot,
                                .why = s->bad.why,
                                .source_at_fault = s->bad.source_at_fault,
                                .n_bad_buckets = s->bad.n_buckets,
                                .n_bad_tensors = s->bad.n_tensors,
                                .all_in = s->all_in,
                                .bytes = s->bytes,
                                .other_bytes = s->other_bytes,
                                .link_ns = s->link_ns,
                                .verify_ns = s->verify_ns,
                                .pause_ns = s->pause_ns };
    memcpy(out->bad_buckets, s->bad.buckets, sizeof(out->bad_buckets));
    memcpy(out->bad_tensors, s->bad.tensors, sizeof(out->bad_tensors));
}

static void reply_state(struct xfer_sink *s, struct call_req *req)
{
    struct xfer_state st;
    struct fl_bytes parts = { 0 };

    sink_state(s, &st);
    if (st.all_in && take_parts(s->take, &parts, NULL) == FL_OK)
        st.digest_bytes = parts.len;
    msg_reply_state(req, &st, parts);
    free((void *)(uintptr_t)parts.data);
}

static bool has_moved(const struct xfer_sink *s, const struct sink_pend *p)
{
    return s->buckets_in > p->have_in && fl_loop_now_ns(s->loop) >= p->tell_ns;
}

static bool still_waits(const struct xfer_sink *s, const struct sink_pend *p)
{
    if (s->stopping)
        return false;
    if (p->method == FL_XFER_BEGIN && s->pausing && !s->flipping)
        return true; /* not before it is dirty */
    switch (p->method) {
    case FL_XFER_BEGIN:
        if (!p->waits)
            return false;
        __attribute__((fallthrough));
    case FL_XFER_WAIT:
        return !p->timed_out && !s->all_in && !has_moved(s, p) &&
               (s->rx.state == RX_COMMITTING || s->rx.state == RX_ABORTING || s->pausing ||
                sink_busy(s));
    case FL_XFER_COMMIT:
        return s->rx.state == RX_COMMITTING;
    case FL_XFER_ABORT:
        return sink_busy(s);
    default:
        return false;
    }
}

void sink_answer(struct xfer_sink *s)
{
    for (unsigned i = 0; i < SINK_PENDING; i++) {
        struct sink_pend *p = &s->pend[i];
        struct call_req *req = p->req;

        if (!req || still_waits(s, p))
            continue;
        p->req = NULL;
        fl_timer_cancel(&p->over);
        reply_state(s, req);
    }
}

static void on_wait_over(struct fl_timer *t, uint64_t now_ns)
{
    struct sink_pend *p = container_of(t, struct sink_pend, over);

    (void)now_ns;
    p->timed_out = true;
    sink_answer(p->sink);
}

static void on_unwanted(void *arg, struct call_req *req)
{
    struct sink_pend *p = arg;

    if (p->req != req)
        return;
    p->req = NULL;
    fl_timer_cancel(&p->over);
    reply_state(p->sink, req);
}

/* have_in: UINT32_MAX: however many are in. */
static void answer_when_due(struct xfer_sink *s, struct call_req *req, uint16_t method,
                            uint32_t wait_ms, uint32_t have_in)
{
    struct fl_err err = { 0 };

    for (unsigned i = 0; i < SINK_PENDING; i++) {
        struct sink_pend *p = &s->pend[i];

        if (p->req)
            continue;
        *p = (struct sink_pend){ .sink = s,
                                 .req = req,
                                 .method = method,
                                 .waits = wait_ms != 0,
                                 .have_in = have_in,
                                 .tell_ns = fl_loop_now_ns(s->loop) + SINK_TELL_MS * 1000000ull };
        p->over.fire = on_wait_over;
        if (wait_ms)
            fl_timer_arm_in(s->loop, &p->over, wait_ms);
        call_on_unwanted(req, on_unwanted, p);
        sink_answer(s);
        return;
    }
    fl_fail(&err, FL_EXHAUSTED, "%s: %d requests wait here already", s->me.name, SINK_PENDING);
    call_fail(req, &err);
}

/* ---- RECONCILE ---- */

static void serve_reconcile(struct xfer_sink *s, struct call_req *req, const Fl__XferReconcile *m)
{
    bool tells = s->rx.has_version && !m->brief;
    struct xfer_state st;

    sink_state(s, &st);
    st.all_in = false; /* of an epoch that whoever asks did not begin */
    msg_reply_report(
        req, m, &st, (struct fl_bytes){ s->image, s->image_bytes },
        (struct fl_bytes){ s->digests, tells ? s->want->n_tensors * sizeof(*s->digests) : 0 });
    if (s->place.gpu_uuid[0])
        fl_defer(s->loop, &s->stir); /* an epoch is near; behind the answer */
}

/* ---- BEGIN ---- */

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

static void serve_begin(struct xfer_sink *s, struct call_req *req, const Fl__XferBegin *b,
                        const struct wire_msg *m)
{
    struct xfer_epoch e = msg_read_epoch(b->epoch);
    enum rx_event on = b->slots == XFER_ONE_SLOT ? RX_BEGIN_ONE_SLOT : RX_BEGIN;
    struct rx trial = s->rx;
    struct take *take = NULL;
    struct fl_err err = { 0 };
    enum rx_act act = RX_DO_NOTHING;
    int slot = s->stage_slot;

    if (b->open && !may_come_to_read(s) && !s->pausing &&
        !(s->view.n_reaches && s->view.maps_slot == b->open_slot)) {
        reply_state(s, req); /* nothing to give up */
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
    answer_when_due(s, req, FL_XFER_BEGIN, b->wait_ms, UINT32_MAX);
}

/* ---- the rest ---- */

static void serve_verify(struct xfer_sink *s, struct call_req *req, const Fl__XferVerify *v)
{
    struct xfer_epoch e = msg_read_epoch(v->epoch);

    if (s->all_in && s->take && xfer_epoch_cmp(&e, &s->rx.seen) == 0) {
        s->all_in = false;
        take_verdict(s->take, v->bad_tensors, v->good ? 0 : v->n_bad_tensors);
    }
    answer_when_due(s, req, FL_XFER_BEGIN, 0, UINT32_MAX);
}

static void serve_commit(struct xfer_sink *s, struct call_req *req, const Fl__XferCommit *c)
{
    struct xfer_epoch e = msg_read_epoch(c->epoch);
    struct fl_err err = { 0 };

    if (s->rx.state == RX_VERIFIED && xfer_epoch_cmp(&e, &s->rx.seen) == 0)
        s->hold = c->hold;
    if (sink_event(s, RX_COMMIT, &e, &err) != FL_OK) {
        call_fail(req, &err);
        return;
    }
    sink_lease(s);
    answer_when_due(s, req, FL_XFER_COMMIT, 0, UINT32_MAX);
}

static void serve_abort(struct xfer_sink *s, struct call_req *req, const Fl__XferAbort *a)
{
    struct xfer_epoch e = msg_read_epoch(a->epoch);
    struct fl_err err = { 0 };

    if (sink_event(s, RX_ABORT, &e, &err) != FL_OK) {
        call_fail(req, &err);
        return;
    }
    if (a->why && xfer_epoch_cmp(&e, &s->rx.seen) == 0 &&
        (s->bad.why.status == FL_OK ||
         s->bad.why.status == FL_UNREACHABLE)) /* the driver hears why somebody is gone */
        msg_read_error(a->why, &s->bad.why);
    answer_when_due(s, req, FL_XFER_ABORT, 0, UINT32_MAX);
}

/* Of an epoch that was begun elsewhere alone: this rank had its version already. Of an older one:
 * the other ranks may not have flipped to what this one holds for. */
static void serve_resume(struct xfer_sink *s, struct call_req *req, const Fl__XferResume *r)
{
    struct xfer_epoch e = msg_read_epoch(r->epoch);
    struct fl_err err = { 0 };

    if (xfer_epoch_cmp(&e, &s->rx.seen) < 0) {
        fl_fail(&err, FL_STALE, "epoch %u.%u is over: %u.%u has begun at %s since", e.attempt,
                e.seq, s->rx.seen.attempt, s->rx.seen.seq, s->me.name);
        call_fail(req, &err);
        return;
    }
    if (s->held && s->rx.state == RX_SERVING) {
        s->held = s->paused = false;
        s->ops->resume(s->arg);
    }
    reply_state(s, req);
}

/* Whose message, for the fence; epochs carry the driver's attempt. */
static uint32_t attempt_of(const struct xfer_sink *s, uint16_t method, const void *msg)
{
    switch (method) {
    case FL_XFER_RECONCILE:
        return ((const Fl__XferReconcile *)msg)->attempt;
    case FL_XFER_BEGIN:
        return ((const Fl__XferBegin *)msg)->epoch->attempt;
    case FL_XFER_WAIT:
        return ((const Fl__XferWait *)msg)->epoch->attempt;
    case FL_XFER_VERIFY:
        return ((const Fl__XferVerify *)msg)->epoch->attempt;
    case FL_XFER_COMMIT:
        return ((const Fl__XferCommit *)msg)->epoch->attempt;
    case FL_XFER_ABORT:
        return ((const Fl__XferAbort *)msg)->epoch->attempt;
    case FL_XFER_RESUME:
        return ((const Fl__XferResume *)msg)->epoch->attempt;
    default:
        return s->attempt_seen; /* of peers: the epoch is compared where it counts */
    }
}

static void serve_now(struct xfer_sink *s, uint16_t method, struct call_req *req, const void *p,
                      const struct wire_msg *m)
{
    struct xfer_state st;
    struct fl_err err = { 0 };

    switch (method) {
    case FL_XFER_RECONCILE:
        serve_reconcile(s, req, p);
        break;
    case FL_XFER_BEGIN:
        if (((const Fl__XferBegin *)p)->give)
            give_begin(&s->give, req, p, m);
        else
            serve_begin(s, req, p, m);
        break;
    case FL_XFER_WAIT:
        sink_lease(s);
        answer_when_due(s, req, method, ((const Fl__XferWait *)p)->wait_ms,
                        ((const Fl__XferWait *)p)->has_have_in ? ((const Fl__XferWait *)p)->have_in
                                                               : UINT32_MAX);
        break;
    case FL_XFER_VERIFY:
        sink_lease(s);
        serve_verify(s, req, p);
        break;
    case FL_XFER_COMMIT:
        serve_commit(s, req, p);
        break;
    case FL_XFER_ABORT:
        serve_abort(s, req, p);
        break;
    case FL_XFER_RESUME:
        serve_resume(s, req, p);
        break;
    case FL_XFER_END:
        sink_state(s, &st);
        give_end(&s->give, req, p, &st);
        break;
    case FL_XFER_KEY:
        give_key(&s->give, req, p);
        break;
    case FL_XFER_CHECK:
        give_check(&s->give, req, p, m);
        break;
    default:
        fl_fail(&err, FL_UNSUPPORTED, "%s takes weights and publishes none", s->me.name);
        call_fail(req, &err);
    }
}

void sink_serve(struct port_set *set, uint16_t method, struct call_req *req,
                const ProtobufCMessage *msg, const struct wire_msg *m)
{
    struct xfer_sink *s = container_of(set, struct xfer_sink, set);
    uint32_t attempt = attempt_of(s, method, msg);
    struct fl_err err = { 0 };

    port_awake(s->loop, &s->place);
    if (s->stopping) {
        fl_fail(&err, FL_CANCELLED, "weights \"%s\" are being dropped at %s", s->set.set,
                s->me.name);
        call_fail(req, &err);
        return;
    }
    if (attempt < s->attempt_seen) {
        fl_fail(&err, FL_STALE, "attempt %u of the driver is over: %s has heard attempt %u",
                attempt, s->me.name, s->attempt_seen);
        call_fail(req, &err);
        return;
    }
    s->attempt_seen = attempt;
    serve_now(s, method, req, msg, m);
}
