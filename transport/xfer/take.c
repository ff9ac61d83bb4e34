#include "transport/xfer/take_priv.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "common/base/id.h"
#include "common/base/str.h"
#include "common/proto/methods.h"
#include "transport/xfer/delta.h"

enum { KEY_MS = 10000 }; /* a giver that holds still answers at once */

static void edge_go(struct take_edge *te);
static void edge_next_key(struct take_edge *te);

/* Else both sides act: the giver sends. */
static bool pulls(const struct take_edge *te)
{
    return (te->team->ops->caps & LINK_PULL) || te->take->o.part->mode == XFER_SHARE;
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
    for (size_t i = 0; i < t->o.part->n_edges; i++)
        t->edges[i].reach = NULL;
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
        /* a half that waits for its peer, or bytes under way: both end by abort alone */
        if (te->reach && te->reach->by == t &&
            (te->in_flight || te->reach->line->state == LINE_OPENING || !pulls(te)))
            line_abort(te->reach->line);
    }
    take_settle(t);
}

static void all_run(struct fl_task *task)
{
    take_compare(container_of(task, struct take, all_back));
}

static void bucket_in(struct take_edge *te, uint32_t bucket)
{
    struct take *t = te->take;
    const struct xfer_bucket *b = &t->o.part->buckets[bucket];

    if (FL_FAULT("xfer.bucket")) { /* as if other bytes had arrived than were sent */
        const struct link_seg *s = &t->o.part->segs[b->first_seg];

        if (t->o.slot.addr) {
            unsigned char *at = (unsigned char *)t->o.slot.addr + s->to_off;
            uint64_t first = s->first_byte;

            memset(t->digests[b->first_seg], 0, sizeof(t->digests[0]));
            at[0] ^= 0x40;
            for (uint32_t r = 0; r < s->rows; r++)
                kernel_digest_add(t->digests[b->first_seg], at + r * s->to_step, s->run_bytes,
                                  first + r * s->byte_step);
        }
    }
    t->in[bucket] = true;
    t->n_in++;
    te->n_in++;
    t->moved_bytes += t->o.part->mode == XFER_SHARE ? 0 : b->bytes;
    te->in = te->n_in == te->e->n_buckets;
    t->o.user->moved(t->o.arg);
    if (t->n_in == t->o.part->n_buckets && !t->over)
        fl_post(t->o.port->loop, &t->all_back);
}

/* ---- pull ---- */

const struct link_mem *take_mapped(const struct take_edge *te, uint32_t mem)
{
    for (struct reach_mem *m = te->reach->mems; m; m = m->next)
        if (m->id == te->slot_id + mem && fl_seat_ref_same(&m->who, &te->team->members[0].who))
            return &m->mem;
    return NULL;
}

static void edge_on_pulled(struct link_op *op)
{
    struct take_op *o = container_of(op, struct take_op, op);
    struct take_edge *te = o->edge;
    struct take *t = te->take;

    o->busy = false;
    te->in_flight--;
    if (t->aborting) {
        take_settle(t);
    } else if (op->err.status != FL_OK) {
        take_fail(t, te, o->bucket, op->err.status, &op->err);
    } else {
        bucket_in(te, o->bucket);
        edge_go(te);
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

static bool wait_again(struct take_edge *te, enum fl_status st)
{
    if (st != FL_AGAIN)
        return false;
    if (!te->in_flight)
        fl_timer_arm_in(te->take->o.port->loop, &te->again, 1);
    return true;
}

static void edge_pull(struct take_edge *te)
{
    struct take *t = te->take;

    while (te->bucket < te->e->n_buckets) {
        uint32_t at = te->e->first_bucket + te->bucket;
        const struct xfer_bucket *b = &t->o.part->buckets[at];
        struct take_op *o = free_op(te);
        struct fl_err err = { 0 };
        enum fl_status st;

        if (t->in[at]) {
            te->bucket++;
            continue;
        }
        if (!o)
            return;
        memset(t->digests[b->first_seg], 0, b->n_segs * sizeof(t->digests[0]));
        o->op = (struct link_op){ .done = edge_on_pulled };
        o->bucket = at;
        st = FL_FAULT("xfer.pull") ? fl_fail(&err, FL_UNREACHABLE, "fault xfer.pull")
                                   : te->reach->line->ops->pull(te->reach->line->k, take_mapped(te, b->from_mem),
                                                                &t->o.slot, &t->o.part->segs[b->first_seg],
                                                                b->n_segs, &t->digests[b->first_seg], &o->op,
                                                                &err);
        if (wait_again(te, st))
            return;
        if (st != FL_OK) {
            take_fail(t, te, at, st, &err);
            return;
        }
        o->busy = true;
        te->in_flight++;
        te->bucket++;
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
            bucket_in(te, o->bucket);
        }
        land_next(te);
        edge_go(te);
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
        edge_go(te);
    }
}

static enum fl_status edge_recv(struct take_edge *te, struct take_op *o, struct fl_err *err)
{
    const struct parcel *p = &te->parcels.p[te->next_parcel];
    const struct link_ops *ops = te->reach->line->ops;
    struct link_span span = { .mem = &te->take->o.slot, .off = p->to_off, .bytes = p->bytes };

    if (p->packed) {
        if (!o->room.addr)
            o->room = (struct link_mem){ .addr = malloc(PARCEL_PACKED_MAX), .bytes = PARCEL_PACKED_MAX };
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

static void edge_receive(struct take_edge *te)
{
    struct fl_err err = { 0 };

    while (edge_cut(te, &err)) {
        struct take_op *o = free_op(te);
        enum fl_status st;

        if (!o)
            return;
        st = edge_recv(te, o, &err);
        if (wait_again(te, st))
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
    const struct xfer_bucket *first = &t->o.part->buckets[te->e->first_bucket], *last = first + te->e->n_buckets - 1;
    size_t n = last->first_seg + last->n_segs - first->first_seg; /* an edge's segments lie together */

    memset(t->digests[first->first_seg], 0, n * sizeof(t->digests[0]));
    (void)delta_take(t->delta_dir, t->o.local_dir, t->o.target.number, t->o.part,
                     &t->o.part->segs[first->first_seg], n, t->o.slot.addr, &t->digests[first->first_seg],
                     &te->disk_err);
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
        bucket_in(te, te->e->first_bucket + i);
}

static void edge_disk(struct take_edge *te)
{
    struct fl_err err = { 0 };

    if (!te->take->delta_dir[0] || !te->take->o.local_dir) {
        fl_fail(&err, FL_UNSUPPORTED, "disk-delta needs a shared folder and one for this host's copy");
        take_fail(te->take, te, te->e->first_bucket, FL_UNSUPPORTED, &err);
        return;
    }
    te->disk = (struct fl_work){ .work = disk_work, .done = disk_done };
    te->take->in_work++;
    fl_work_start(te->take->o.port->loop, &te->disk);
}

/* ---- keys ---- */

static bool edge_needs_mem(const struct take_edge *te, uint32_t mem)
{
    for (uint32_t i = 0; i < te->e->n_buckets; i++)
        if (te->take->o.part->buckets[te->e->first_bucket + i].from_mem == mem)
            return true;
    return false;
}

void take_begin_call(struct take *t, Fl__XferEpoch *epoch, struct call_args *a)
{
    msg_epoch(&t->o.epoch, epoch);
    *a = (struct call_args){ .lane = XFER_LANE, .due_ns = fl_loop_now_ns(t->o.port->loop) + KEY_MS * 1000000ull };
}

static enum fl_status key_take(struct take_edge *te, const Fl__XferKeyIs *k, const struct wire_msg *m,
                               struct fl_err *err)
{
    struct take *t = te->take;
    struct xfer_version v = msg_read_version(k->version);
    struct link_key key = { 0 };
    struct reach_mem *rm;

    if (!xfer_version_same(&v, &t->o.target))
        return fl_fail(err, FL_STALE, "the source has version %" PRIu64 " there, not %" PRIu64, v.number,
                       t->o.target.number);
    te->giver_slot = k->slot;
    te->slot_id = k->id - te->next_parcel;
    if (!k->has_blob)
        return take_mapped(te, (uint32_t)te->next_parcel)
                   ? FL_OK
                   : fl_fail(err, FL_CORRUPT, "the source takes memory %" PRIu64 " for mapped here", k->id);
    if (k->blob.len != sizeof(key.blob) || m->head.n_fds > WIRE_MAX_FDS)
        return fl_fail(err, FL_CORRUPT, "a key of %zu bytes and %u descriptors", k->blob.len, m->head.n_fds);
    rm = calloc(1, sizeof(*rm));
    if (!rm)
        return fl_fail(err, FL_EXHAUSTED, "no memory to map a slot");
    memcpy(key.blob, k->blob.data, sizeof(key.blob));
    key.n_fds = m->head.n_fds;
    for (unsigned i = 0; i < key.n_fds; i++)
        key.fds[i] = m->fds[i]; /* map() duplicates or maps: they are closed after the callback */
    if (te->reach->line->ops->map(te->reach->line->k, &key, false, &rm->mem, err) != FL_OK) {
        free(rm);
        return err->status;
    }
    for (struct reach_mem *old = te->reach->mems; old; old = old->next) /* the same memory by an older key */
        if ((uint32_t)old->id == (uint32_t)k->id && fl_seat_ref_same(&old->who, &te->team->members[0].who))
            old->passing = true;
    rm->id = k->id;
    rm->who = te->team->members[0].who;
    rm->passing = k->passing;
    rm->next = te->reach->mems;
    te->reach->mems = rm;
    return FL_OK;
}

static void edge_on_key(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                        const struct fl_err *why)
{
    struct take_edge *te = container_of(op, struct take_edge, call);
    struct take *t = te->take;
    Fl__XferKeyIs *k = NULL;
    struct fl_err err = { 0 };

    te->calling = false;
    if (t->aborting) {
        take_settle(t);
        return;
    }
    if (st == FL_OK) {
        k = fl__xfer_key_is__unpack(NULL, reply->head.body_bytes, reply->body);
        st = k ? key_take(te, k, reply, &err) : fl_fail(&err, FL_CORRUPT, "a key that does not decode");
    } else {
        err = *why;
    }
    if (k)
        fl__xfer_key_is__free_unpacked(k, NULL);
    if (st != FL_OK) {
        fl_wrap(&err, st, "asking for the key");
        take_fail(t, te, te->e->first_bucket, st, &err);
        return;
    }
    te->next_parcel++; /* here: the next memory to ask for */
    edge_next_key(te);
}

static void key_ask(struct take_edge *te, struct call_peer *peer)
{
    struct take *t = te->take;
    uint32_t mem = (uint32_t)te->next_parcel;
    Fl__XferKey k = FL__XFER_KEY__INIT;
    uint64_t have[XFER_KEYS_KEPT];
    Fl__XferEpoch epoch;
    struct call_args a;
    struct fl_err err = { 0 };
    enum fl_status st;

    take_begin_call(t, &epoch, &a);
    a.method = FL_XFER_KEY;
    k.set = (char *)(uintptr_t)t->o.set;
    k.epoch = &epoch;
    k.plan = msg_hash(t->o.plan);
    k.edge = te->team->giver_edge;
    k.mem = mem;
    k.have = have;
    for (struct reach_mem *m = te->reach->mems; m && k.n_have < XFER_KEYS_KEPT; m = m->next)
        if (fl_seat_ref_same(&m->who, &te->team->members[0].who))
            have[k.n_have++] = m->id; /* the giver says whether the one that it gives is among them */
    st = msg_pack(&k.base, &a.body, &err);
    if (st == FL_OK) {
        te->call.done = edge_on_key;
        te->calling = true;
        st = call_start(peer, &a, &te->call, &err);
        free((void *)(uintptr_t)a.body.data);
    }
    if (st != FL_OK) {
        te->calling = false;
        if (!wait_again(te, st))
            take_fail(t, te, te->e->first_bucket, st, &err);
    }
}

static void edge_on_dialed(struct xfer_dial *d, enum fl_status st, struct call_peer *peer, const struct fl_err *err)
{
    struct take_edge *te = container_of(d, struct take_edge, dial);

    te->dialing = false;
    if (te->take->aborting)
        take_settle(te->take);
    else if (st != FL_OK)
        take_fail(te->take, te, te->e->first_bucket, st, err);
    else
        key_ask(te, peer);
}

static void share_done(struct take_edge *te)
{
    for (uint32_t i = 0; i < te->e->n_buckets; i++)
        bucket_in(te, te->e->first_bucket + i);
}

static void edge_next_key(struct take_edge *te)
{
    struct take *t = te->take;

    while (te->next_parcel <= UINT16_MAX && !edge_needs_mem(te, (uint32_t)te->next_parcel))
        te->next_parcel++;
    if (te->next_parcel > UINT16_MAX) { /* all are mapped */
        te->started = true;
        if (t->o.part->mode == XFER_SHARE)
            share_done(te);
        else
            edge_pull(te);
        return;
    }
    te->dial.done = edge_on_dialed;
    te->dialing = true;
    t->o.port->dialer.dial(t->o.port->dialer.arg, &te->team->members[0], &te->dial);
}

/* ---- an edge from its beginning ---- */

static void edge_go(struct take_edge *te)
{
    struct take *t = te->take;

    if (t->aborting || t->over || te->in)
        return;
    if (!pulls(te))
        edge_receive(te);
    else if (te->started)
        edge_pull(te);
    else if (!te->calling && !te->dialing)
        edge_next_key(te);
}

static void edge_on_again(struct fl_timer *timer, uint64_t now_ns)
{
    (void)now_ns;
    edge_go(container_of(timer, struct take_edge, again));
}

static void line_on_ready(void *arg, struct line *ln, enum fl_status st, const struct fl_err *err)
{
    struct take *t = arg;

    for (size_t i = 0; i < t->o.part->n_edges; i++) {
        struct take_edge *te = &t->edges[i];

        if (!te->reach || te->reach->line != ln)
            continue;
        if (st == FL_OK)
            edge_go(te);
        else
            take_fail(t, te, te->e->first_bucket, st, err);
    }
}

static void line_on_quiet(void *arg, struct line *ln)
{
    (void)ln;
    take_settle(arg);
}

static const struct line_user take_lines = { line_on_ready, line_on_quiet };

/* One that is open: pulls need no partner, so one does for all; else the very same partners and ticket. */
static struct reach *reach_kept(struct take_edge *te, const uint64_t key[2])
{
    struct reaches *all = te->take->o.reaches;

    for (struct reach *r = all->first, *next; r; r = next) {
        next = r->next;
        if ((r->by && r->by != te->take) || r->line->key[0] != key[0] || r->line->key[1] != key[1])
            continue;
        if (r->by || (r->line->state == LINE_READY &&
                      (pulls(te) || memcmp(r->line->ticket, te->team->ticket, sizeof(te->team->ticket)) == 0)))
            return r;
        reach_drop(all, r); /* another ticket: the giver began anew */
    }
    return NULL;
}

static enum fl_status reach_open(struct take_edge *te, const uint64_t key[2], struct reach **out,
                                 struct fl_err *err)
{
    struct take *t = te->take;
    const struct take_team *team = te->team;
    struct reach *r = calloc(1, sizeof(*r));

    if (!r)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a link");
    if (line_open(t->o.port->loop, team->ops, team->places, team->n, team->self, team->ticket, key, &take_lines, t,
                  &r->line, err) != FL_OK) {
        free(r);
        return err->status;
    }
    r->next = t->o.reaches->first;
    t->o.reaches->first = r;
    *out = r;
    return FL_OK;
}

static enum fl_status edge_open(struct take_edge *te, struct fl_err *err)
{
    uint64_t key[2];

    line_key(key, te->team->ops, te->team->members, pulls(te) ? 0 : te->team->n);
    te->reach = reach_kept(te, key);
    if (!te->reach)
        FL_TRY(reach_open(te, key, &te->reach, err));
    if (!te->reach->by)
        line_use(te->reach->line, &take_lines, te->take);
    te->reach->by = te->take;
    reach_sweep(te->reach, &te->team->members[0].who);
    if (te->reach->line->state == LINE_READY)
        edge_go(te);
    return FL_OK;
}

void take_start(struct take *t)
{
    if (t->aborting)
        return; /* before it began */
    t->started = true;
    if (t->n_in == t->o.part->n_buckets)
        fl_post(t->o.port->loop, &t->all_back); /* nothing to do, or the ledger has it all */
    for (size_t i = 0; i < t->o.part->n_edges && !t->over; i++) {
        struct take_edge *te = &t->edges[i];
        struct fl_err err = { 0 };

        if (te->in || te->e->n_buckets == 0)
            continue;
        if (take_disk(te))
            edge_disk(te);
        else if (edge_open(te, &err) != FL_OK)
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
    return t->edges && t->in && t->suspect && t->digests && t->sum && t->once && t->sum_bytes && t->once_bytes &&
           t->wrong;
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
        t->edges[i] = (struct take_edge){ .take = t, .e = &o->part->edges[i], .team = &o->teams[i] };
        t->edges[i].again.fire = edge_on_again;
    }
    *out = t;
    return FL_OK;
}

bool take_same(const struct take *t, const uint64_t plan[2], const struct xfer_version *target)
{
    return t->o.plan[0] == plan[0] && t->o.plan[1] == plan[1] && xfer_version_same(&t->o.target, target);
}

bool take_inherit(struct take *t, const struct take *ledger)
{
    if (take_shares(t) || !take_same(ledger, t->o.plan, &t->o.target) || ledger->o.part->n_buckets != t->o.part->n_buckets ||
        ledger->o.part->n_segs != t->o.part->n_segs || ledger->o.slot.addr != t->o.slot.addr)
        return false;
    for (size_t i = 0; i < t->o.part->n_edges; i++) {
        struct take_edge *te = &t->edges[i];

        if (!te->team->ops || !(te->team->ops->caps & LINK_PULL))
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
        for (unsigned w = 0; w < TAKE_WINDOW; w++)
            free(te->window[w].room.addr);
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
