/* transport/xfer/take_stage.c - buckets of memory that the giver has to copy first
 *
 * STAGE asks for one and says which halves have been read; the answer says where it lies. With the
 * last one the halves are given back before it counts as in: others wait for them. */
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "common/proto/methods.h"
#include "transport/xfer/take_priv.h"

enum { AGAIN_MS = 5 };

static void on_dialed(struct xfer_dial *d, enum fl_status st, struct call_peer *peer,
                      const struct fl_err *err);

bool take_staged(const struct take_edge *te, uint32_t mem)
{
    const struct reach_mem *m = take_mapping(te, mem);

    return m && m->staged;
}

static void ends(struct take_op *o)
{
    free(FL_TAKE(o->segs));
    o->staged = o->busy = o->last = o->granted = false;
    o->edge->in_flight--;
    o->edge->staging--;
}

static void fails(struct take_op *o, enum fl_status st, const struct fl_err *why)
{
    struct take_edge *te = o->edge;
    uint32_t bucket = o->bucket;
    bool last = o->last;

    ends(o);
    if (te->take->aborting)
        take_settle(te->take);
    else if (last) /* the bytes are here already: what was said about halves may be lost */
        take_bucket_in(te, bucket);
    else
        take_fail(te->take, te, bucket, st, why);
}

static void go(struct take_op *o)
{
    struct xfer_port *port = o->edge->take->o.port;

    o->dial.done = on_dialed;
    o->dialing = true;
    port->dialer.dial(port->dialer.arg, &o->edge->team->members[0], &o->dial);
}

static void pull(struct take_op *o);

static void on_later(struct fl_timer *t, uint64_t now_ns)
{
    struct take_op *o = container_of(t, struct take_op, later);

    (void)now_ns;
    if (o->granted)
        pull(o);
    else
        go(o);
}

/* As many as may wait there do, or the lane or the link is full; the epoch's deadline ends this. */
static bool later(struct take_op *o, enum fl_status st)
{
    if (st != FL_AGAIN || o->last)
        return false;
    o->later.fire = on_later;
    fl_timer_arm_in(o->edge->take->o.port->loop, &o->later, AGAIN_MS);
    return true;
}

static enum fl_status pull_start(struct take_op *o, struct fl_err *err)
{
    struct take_edge *te = o->edge;
    struct take *t = te->take;
    const struct xfer_bucket *b = &t->o.part->buckets[o->bucket];
    const struct link_seg *segs = &t->o.part->segs[b->first_seg];
    const struct link_mem *area = take_mapped(te, b->from_mem);

    if (o->off > area->bytes || stage_bytes(segs, b->n_segs) > area->bytes - o->off)
        return fl_fail(err, FL_CORRUPT, "a staged bucket at %llu of %llu bytes",
                       (unsigned long long)o->off, (unsigned long long)area->bytes);
    free(o->segs);
    o->segs = malloc((b->n_segs + 1) * sizeof(*o->segs));
    if (!o->segs)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u segments", b->n_segs);
    stage_reads(segs, b->n_segs, o->off, o->segs);
    memset(t->digests[b->first_seg], 0, b->n_segs * sizeof(t->digests[0]));
    return te->reach->line->ops->pull(te->reach->line->k, area, &t->o.slot, o->segs, b->n_segs,
                                      &t->digests[b->first_seg], &o->op, err);
}

static void pull(struct take_op *o)
{
    struct fl_err err = { 0 };
    enum fl_status st = pull_start(o, &err);

    if (st == FL_OK || later(o, st))
        return;
    fl_wrap(&err, st, "a staged bucket");
    fails(o, st, &err);
}

static void on_staged(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                      const struct fl_err *why)
{
    struct take_op *o = container_of(op, struct take_op, call);
    const struct take_edge *te = o->edge;
    Fl__XferStaged *r = NULL;
    struct fl_err err = { 0 };

    o->calling = false;
    if (te->take->aborting || o->last) {
        fails(o, FL_CANCELLED, &err);
        return;
    }
    if (later(o, st))
        return;
    if (st == FL_OK)
        r = fl__xfer_staged__unpack(NULL, reply->head.body_bytes, reply->body);
    if (FL_FAULT("xfer.staged"))
        st = fl_fail(&err, FL_UNREACHABLE, "fault xfer.staged");
    else if (st != FL_OK)
        err = *why;
    else if (!r || !r->has_half || !r->has_off || r->half >= STAGE_HALVES)
        st = fl_fail(&err, FL_CORRUPT, "an answer about a staged bucket that does not decode");
    if (st == FL_OK) {
        o->half = r->half;
        o->off = r->off;
        o->granted = true;
    }
    if (r)
        fl__xfer_staged__free_unpacked(r, NULL);
    if (st == FL_OK) {
        pull(o);
        return;
    }
    fl_wrap(&err, st, "a staged bucket");
    fails(o, st, &err);
}

static void ask(struct take_op *o, struct call_peer *peer)
{
    struct take_edge *te = o->edge;
    struct take *t = te->take;
    Fl__XferStage m = FL__XFER_STAGE__INIT;
    Fl__XferEpoch epoch;
    struct call_args a;
    struct fl_err err = { 0 };
    enum fl_status st;

    port_awake(t->o.port->loop, &te->team->places[te->team->self]);
    take_begin_call(t, &epoch, &a);
    a.method = FL_XFER_STAGE;
    m.set = (char *)(uintptr_t)t->o.set;
    m.epoch = &epoch;
    m.plan = msg_hash(t->o.plan);
    m.edge = te->team->giver_edge;
    m.has_bucket = !o->last;
    m.bucket = o->bucket - te->e->first_bucket;
    m.done = te->done;
    m.n_done = te->n_done;
    te->n_done = 0; /* first: it may come back at once */
    o->call.done = on_staged;
    st = take_call(peer, &m.base, &a, &o->call, &o->calling, &err);
    if (st == FL_OK)
        return;
    te->n_done = (uint32_t)m.n_done;
    if (!later(o, st))
        fails(o, st, &err);
}

static void on_dialed(struct xfer_dial *d, enum fl_status st, struct call_peer *peer,
                      const struct fl_err *err)
{
    struct take_op *o = container_of(d, struct take_op, dial);

    o->dialing = false;
    if (st != FL_OK || o->edge->take->aborting)
        fails(o, st, err);
    else
        ask(o, peer);
}

bool take_stage(struct take_edge *te, struct take_op *o, uint32_t bucket)
{
    if (te->staging == STAGE_HALVES)
        return false;
    o->bucket = bucket;
    o->busy = o->staged = true;
    o->last = false;
    te->staging++;
    te->in_flight++;
    go(o);
    return true;
}

void take_stage_pulled(struct take_op *o)
{
    struct take_edge *te = o->edge;
    uint32_t bucket = o->bucket;

    te->take->link_ns += o->op.took_ns;
    te->done[te->n_done++] = o->half;
    if (te->bucket == te->e->n_buckets && te->staging == 1) {
        o->last = true;
        go(o);
        return;
    }
    ends(o);
    take_bucket_in(te, bucket);
    take_go(te);
}

void take_stage_cancel(struct take_op *o)
{
    struct xfer_port *port;

    if (!o->staged)
        return;
    port = o->edge->take->o.port;
    if (o->dialing) {
        port->dialer.undial(port->dialer.arg, &o->dial);
        o->dialing = false;
        ends(o);
    } else if (o->calling) {
        call_cancel(&o->call);
    } else if (o->later.loop) {
        fl_timer_cancel(&o->later);
        ends(o);
    }
}
