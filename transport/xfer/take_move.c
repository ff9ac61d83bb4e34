/* transport/xfer/take_move.c - the bytes: pulled, received and landed, or read from files */
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "transport/xfer/delta.h"
#include "transport/xfer/take_priv.h"

/* ---- pull ---- */

/* Inside one device a launch of 4 GiB takes 2 ms, and begins and ends cost 20 us each: buckets go
 * together. Between devices and hosts each goes alone, so that one that fails costs little; so do
 * they into the slot that served, for the ledger. */
enum { TOGETHER_MIB = 4096 };

static bool one_device(const struct take_edge *te)
{
    const struct link_place *p = te->rescued ? te->pair : te->team->places;
    const struct link_place *mine = &p[te->rescued ? 1 : te->team->self];

    return p[0].gpu_uuid[0] && strcmp(p[0].gpu_uuid, mine->gpu_uuid) == 0;
}

/* How many buckets from that one on, all of them lacking: their segments lie one after the
 * other. */
static uint32_t together(const struct take_edge *te, uint32_t first)
{
    const struct take *t = te->take;
    const struct xfer_bucket *b = t->o.part->buckets;
    uint32_t end = te->e->first_bucket + te->e->n_buckets, n = 1;
    uint64_t bytes = b[first].bytes;

    while (t->o.part->slots == XFER_TWO_SLOTS && one_device(te) && first + n < end &&
           !t->in[first + n] && b[first + n].from_mem == b[first].from_mem &&
           (bytes += b[first + n].bytes) <= (uint64_t)TOGETHER_MIB << 20)
        n++;
    return n;
}

static void edge_on_pulled(struct link_op *op)
{
    struct take_op *o = container_of(op, struct take_op, op);
    struct take_edge *te = o->edge;
    struct take *t = te->take;

    if (o->staged && !t->aborting && !te->falling && op->err.status == FL_OK) {
        take_stage_pulled(o);
        return;
    }
    free(FL_TAKE(o->segs));
    te->staging -= o->staged;
    o->busy = o->staged = false;
    te->in_flight--;
    if (t->aborting) {
        take_settle(t);
    } else if (te->falling) {
        take_rescue_go(te);
    } else if (op->err.status != FL_OK) {
        if (!take_rescue(te, &op->err))
            take_fail(t, te, o->bucket, op->err.status, &op->err);
    } else {
        t->link_ns += op->took_ns;
        for (uint32_t i = 0; i < o->n_buckets; i++)
            take_bucket_in(te, o->bucket + i);
        take_go(te);
    }
}

static struct take_op *free_op(struct take_edge *te)
{
    for (unsigned i = 0; i < TAKE_WINDOW; i++)
        if (!te->window[i].busy) {
            te->window[i].edge = te;
            return &te->window[i];
        }
    return NULL;
}

bool take_wait_again(struct take_edge *te, enum fl_status st)
{
    if (st != FL_AGAIN)
        return false;
    if (!te->in_flight)
        fl_timer_arm_in(te->take->o.port->loop, &te->again, 1);
    return true;
}

void take_pull(struct take_edge *te)
{
    struct take *t = te->take;

    while (te->bucket < te->e->n_buckets) {
        uint32_t at = te->e->first_bucket + te->bucket;
        const struct xfer_bucket *b = &t->o.part->buckets[at];
        struct take_op *o = free_op(te);
        struct fl_err err = { 0 };
        enum fl_status st;
        size_t n_segs = 0;

        if (t->in[at]) {
            te->bucket++;
            continue;
        }
        if (!o)
            return;
        o->op = (struct link_op){ .done = edge_on_pulled };
        o->bucket = at;
        o->n_buckets = 1;
        if (take_staged(te, b->from_mem)) {
            te->bucket++; /* first: it may come back at once */
            if (take_stage(te, o, at) && !t->over && !t->aborting)
                continue;
            if (o->busy || t->over || t->aborting)
                return;
            te->bucket--;
            return;
        }
        o->n_buckets = together(te, at);
        for (uint32_t i = 0; i < o->n_buckets; i++)
            n_segs += b[i].n_segs;
        memset(t->digests[b->first_seg], 0, n_segs * sizeof(t->digests[0]));
        st = FL_FAULT("xfer.pull")
                 ? fl_fail(&err, FL_UNREACHABLE, "fault xfer.pull")
                 : te->reach->line->ops->pull(te->reach->line->k, take_mapped(te, b->from_mem),
                                              &t->o.slot, &t->o.part->segs[b->first_seg], n_segs,
                                              &t->digests[b->first_seg], &o->op, &err);
        if (take_wait_again(te, st))
            return;
        if (st != FL_OK) {
            take_fail(t, te, at, st, &err);
            return;
        }
        o->busy = true;
        te->in_flight++;
        te->bucket += o->n_buckets;
    }
}

/* ---- receive ---- */

static bool edge_cut(struct take_edge *te, struct fl_err *err)
{
    struct take *t = te->take;

    while (te->bucket < te->e->n_buckets) {
        const struct xfer_bucket *b = &t->o.part->buckets[te->e->first_bucket + te->bucket];

        if (!te->cut) {
            parcels_fini(&te->parcels);
            if (parcels_cut(&t->o.part->segs[b->first_seg], b->n_segs, &te->parcels, err) != FL_OK)
                return false;
            memset(t->digests[b->first_seg], 0, b->n_segs * sizeof(t->digests[0]));
            te->cut = true;
            te->next_parcel = te->landed = 0;
        }
        return te->next_parcel < te->parcels.n; /* the next bucket when this one has landed */
    }
    return false;
}

static void land_work(struct fl_work *w)
{
    struct take_op *o = container_of(w, struct take_op, land);
    struct take *t = o->edge->take;
    const struct parcels *ps = &o->edge->parcels;

    parcel_land(ps, o->parcel, ps->p[o->parcel].packed ? o->room.addr : NULL, t->o.slot.addr,
                &t->digests[t->o.part->buckets[o->bucket].first_seg]);
}

/* One parcel of an edge lands at a time: two of them may add to the digest of one segment. */
static void land_next(struct take_edge *te)
{
    for (unsigned i = 0; i < TAKE_WINDOW; i++) {
        struct take_op *o = &te->window[i];

        if (o->busy && o->parcel == te->landed && o->op.bytes == UINT64_MAX) {
            o->op.bytes = 0;
            te->take->in_work++;
            fl_work_start(te->take->o.port->loop, &o->land);
            return;
        }
    }
}

static void land_done(struct fl_work *w, enum fl_status st)
{
    struct take_op *o = container_of(w, struct take_op, land);
    struct take_edge *te = o->edge;
    struct take *t = te->take;
    struct fl_err err = { 0 };

    t->in_work--;
    o->busy = false;
    te->landed++;
    if (t->aborting) {
        take_settle(t);
    } else if (st != FL_OK) {
        fl_fail(&err, st, "what was received was not unpacked");
        take_fail(t, te, o->bucket, st, &err);
    } else {
        if (te->landed == te->parcels.n) {
            te->cut = false;
            te->bucket++;
            take_bucket_in(te, o->bucket);
        }
        land_next(te);
        take_go(te);
    }
}

static void edge_on_received(struct link_op *op)
{
    struct take_op *o = container_of(op, struct take_op, op);
    struct take_edge *te = o->edge;
    struct take *t = te->take;

    te->in_flight--;
    if (t->aborting) {
        o->busy = false;
        take_settle(t);
    } else if (op->err.status != FL_OK) {
        o->busy = false;
        take_fail(t, te, o->bucket, op->err.status, &op->err);
    } else {
        op->bytes = UINT64_MAX; /* here, and waits for its turn to land */
        if (o->parcel == te->landed)
            land_next(te);
        take_go(te);
    }
}

static enum fl_status edge_recv(struct take_edge *te, struct take_op *o, struct fl_err *err)
{
    const struct parcel *p = &te->parcels.p[te->next_parcel];
    const struct link_ops *ops = te->reach->line->ops;
    struct link_span span = { .mem = &te->take->o.slot, .off = p->to_off, .bytes = p->bytes };

    if (p->packed) {
        if (!o->room.addr)
            o->room =
                (struct link_mem){ .addr = malloc(PARCEL_PACKED_MAX), .bytes = PARCEL_PACKED_MAX };
        if (!o->room.addr)
            return fl_fail(err, FL_EXHAUSTED, "no memory to receive a parcel");
        span = (struct link_span){ .mem = &o->room, .off = 0, .bytes = p->bytes };
    }
    o->op = (struct link_op){ .done = edge_on_received };
    o->land = (struct fl_work){ .work = land_work, .done = land_done };
    o->bucket = te->e->first_bucket + te->bucket;
    o->parcel = te->next_parcel;
    if (te->e->n_to > 1)
        return ops->cast(te->reach->line->k, 0, span, &o->op, err);
    return ops->recv(te->reach->line->k, 0, span, &o->op, err);
}

/* The link spreads out: a bucket at a time, as many under way as are pulled. */
static void edge_casts(struct take_edge *te)
{
    struct take *t = te->take;

    while (te->bucket < te->e->n_buckets) {
        uint32_t at = te->e->first_bucket + te->bucket;
        const struct xfer_bucket *b = &t->o.part->buckets[at];
        struct take_op *o = free_op(te);
        struct fl_err err = { 0 };
        enum fl_status st;

        if (!o)
            return;
        memset(t->digests[b->first_seg], 0, b->n_segs * sizeof(t->digests[0]));
        o->op = (struct link_op){ .done = edge_on_pulled };
        o->bucket = at;
        o->n_buckets = 1;
        st = te->reach->line->ops->cast_segs(te->reach->line->k, 0, &t->o.slot,
                                             &t->o.part->segs[b->first_seg], b->n_segs,
                                             &t->digests[b->first_seg], &o->op, &err);
        if (take_wait_again(te, st))
            return;
        if (st != FL_OK) {
            if (!take_rescue(te, &err))
                take_fail(t, te, at, st, &err);
            return;
        }
        o->busy = true;
        te->in_flight++;
        te->bucket++;
    }
}

void take_receive(struct take_edge *te)
{
    struct fl_err err = { 0 };

    if (te->reach->line->ops->caps & LINK_SEGS) {
        edge_casts(te);
        return;
    }

    while (edge_cut(te, &err)) {
        struct take_op *o = free_op(te);
        enum fl_status st;

        if (!o)
            return;
        st = edge_recv(te, o, &err);
        if (take_wait_again(te, st))
            return;
        if (st != FL_OK)
            break;
        o->busy = true;
        te->in_flight++;
        te->next_parcel++;
    }
    if (err.status != FL_OK)
        take_fail(te->take, te, te->e->first_bucket + te->bucket, err.status, &err);
}

/* ---- disk ---- */

static void disk_work(struct fl_work *w)
{
    struct take_edge *te = container_of(w, struct take_edge, disk);
    struct take *t = te->take;
    const struct xfer_bucket *first = &t->o.part->buckets[te->e->first_bucket],
                             *last = first + te->e->n_buckets - 1;
    /* an edge's segments lie together */
    size_t n = last->first_seg + last->n_segs - first->first_seg;

    memset(t->digests[first->first_seg], 0, n * sizeof(t->digests[0]));
    (void)delta_take(t->delta_dir, t->o.local_dir, t->o.target.number, t->o.part,
                     &t->o.part->segs[first->first_seg], n, &t->o.slot,
                     &t->digests[first->first_seg], &te->disk_err);
}

static void disk_done(struct fl_work *w, enum fl_status st)
{
    struct take_edge *te = container_of(w, struct take_edge, disk);
    struct take *t = te->take;
    struct fl_err *err = &te->disk_err;

    t->in_work--;
    if (st != FL_OK)
        fl_fail(err, st, "the files were not read");
    if (t->aborting) {
        take_settle(t);
        return;
    }
    if (err->status != FL_OK) {
        take_fail(t, te, te->e->first_bucket, err->status, err);
        return;
    }
    for (uint32_t i = 0; i < te->e->n_buckets; i++)
        take_bucket_in(te, te->e->first_bucket + i);
}

void take_files(struct take_edge *te)
{
    struct fl_err err = { 0 };

    if (!te->take->delta_dir[0] || !te->take->o.local_dir) {
        fl_fail(&err, FL_UNSUPPORTED,
                "disk-delta needs a shared folder and one for this host's copy");
        take_fail(te->take, te, te->e->first_bucket, FL_UNSUPPORTED, &err);
        return;
    }
    te->disk = (struct fl_work){ .work = disk_work, .done = disk_done };
    te->take->in_work++;
    fl_work_start(te->take->o.port->loop, &te->disk);
}
