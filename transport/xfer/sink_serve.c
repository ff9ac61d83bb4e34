#include <stdlib.h>
#include <string.h>
#include "common/proto/methods.h"
#include "transport/xfer/sink_priv.h"

/* ---- reports, and requests that wait ---- */

bool sink_may_read(const struct xfer_sink *s)
{
    return s->take && take_shares(s->take) &&
           (s->rx.state == RX_STAGING || s->rx.state == RX_VERIFIED ||
            s->rx.state == RX_COMMITTING || (s->rx.state == RX_DIRTY && sink_busy(s)));
}

void sink_state(const struct xfer_sink *s, struct xfer_state *out)
{
    bool soon = sink_may_read(s);

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

void sink_reply_state(struct xfer_sink *s, struct call_req *req)
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
        sink_reply_state(s, req);
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
    sink_reply_state(p->sink, req);
}

void sink_answer_when_due(struct xfer_sink *s, struct call_req *req, uint16_t method,
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

/* ---- messages ---- */

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

static void serve_verify(struct xfer_sink *s, struct call_req *req, const Fl__XferVerify *v)
{
    struct xfer_epoch e = msg_read_epoch(v->epoch);

    if (s->all_in && s->take && xfer_epoch_cmp(&e, &s->rx.seen) == 0) {
        s->all_in = false;
        take_verdict(s->take, v->bad_tensors, v->good ? 0 : v->n_bad_tensors);
    }
    sink_answer_when_due(s, req, FL_XFER_BEGIN, 0, UINT32_MAX);
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
    sink_answer_when_due(s, req, FL_XFER_COMMIT, 0, UINT32_MAX);
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
    sink_answer_when_due(s, req, FL_XFER_ABORT, 0, UINT32_MAX);
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
    sink_reply_state(s, req);
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
            sink_begin(s, req, p, m);
        break;
    case FL_XFER_WAIT:
        sink_lease(s);
        sink_answer_when_due(s, req, method, ((const Fl__XferWait *)p)->wait_ms,
                             ((const Fl__XferWait *)p)->has_have_in
                                 ? ((const Fl__XferWait *)p)->have_in
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
