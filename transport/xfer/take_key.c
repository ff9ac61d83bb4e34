/* transport/xfer/take_key.c - the way to the giver, and the key of each of its memories */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/id.h"
#include "common/proto/methods.h"
#include "transport/xfer/take_priv.h"

enum { KEY_MS = 10000 }; /* a giver that holds still answers at once */
enum { KEY_PARTS = 64 }; /* 4,096 chunks: 1 TiB */

static struct reach_mem *mapped(const struct take_edge *te, uint64_t id)
{
    for (struct reach_mem *m = te->reach->mems; m; m = m->next)
        if (m->id == id && fl_seat_ref_same(&m->who, &te->team->members[0].who))
            return m;
    return NULL;
}

const struct reach_mem *take_mapping(const struct take_edge *te, uint32_t mem)
{
    return mapped(te, te->slot_id + mem);
}

const struct link_mem *take_mapped(const struct take_edge *te, uint32_t mem)
{
    const struct reach_mem *m = take_mapping(te, mem);

    return m ? &m->mem : NULL;
}

/* The first memory of the giver, from that one on, of which the edge reads; NO_MEM: none. */
#define NO_MEM SIZE_MAX
static size_t needed_mem(const struct take_edge *te, size_t from)
{
    const struct xfer_bucket *b = &te->take->o.part->buckets[te->e->first_bucket];
    size_t best = NO_MEM;

    for (uint32_t i = 0; i < te->e->n_buckets; i++)
        if (b[i].from_mem >= from && b[i].from_mem < best)
            best = b[i].from_mem;
    return best;
}

void take_begin_call(struct take *t, Fl__XferEpoch *epoch, struct call_args *a)
{
    msg_epoch(&t->o.epoch, epoch);
    *a = (struct call_args){ .lane = XFER_LANE,
                             .due_ns = fl_loop_now_ns(t->o.port->loop) + KEY_MS * 1000000ull };
}

enum fl_status take_call(struct call_peer *peer, const ProtobufCMessage *m, struct call_args *a,
                         struct call_op *op, bool *calling, struct fl_err *err)
{
    enum fl_status st = msg_pack(m, &a->body, err);

    if (st != FL_OK)
        return st;
    *calling = true; /* first: it may come back at once */
    st = call_start(peer, a, op, err);
    free((void *)(uintptr_t)a->body.data);
    if (st != FL_OK)
        *calling = false;
    return st;
}

void take_half_drop(struct take_edge *te)
{
    struct reach_mem *half = FL_TAKE(te->half);

    if (half)
        te->reach->line->ops->unmap(te->reach->line->k, &half->mem);
    free(half);
}

/* The part that is asked for. What is mapped in part is the edge's alone: another edge over the
 * same line, or a later epoch, would take it for the whole. */
static enum fl_status part_map(struct take_edge *te, uint64_t id, const struct link_key *key,
                               struct fl_err *err)
{
    if (te->part == 0) {
        take_half_drop(te);
        te->half = calloc(1, sizeof(*te->half));
        if (!te->half)
            return fl_fail(err, FL_EXHAUSTED, "no memory to map a slot");
        te->half->id = id;
    }
    if (!te->half || te->half->id != id)
        return fl_fail(err, FL_CORRUPT, "part %u of memory %" PRIu64 ", which was not begun",
                       te->part, id);
    if (te->reach->line->ops->map(te->reach->line->k, key, false, &te->half->mem, err) != FL_OK) {
        take_half_drop(te);
        return err->status;
    }
    return FL_OK;
}

/* All parts are mapped: for every edge of that line, and for later epochs. */
static void map_whole(struct take_edge *te, const Fl__XferKeyIs *k)
{
    struct reach_mem *rm = FL_TAKE(te->half);

    for (struct reach_mem *old = te->reach->mems; old;
         old = old->next) /* the same memory by an older key */
        if ((uint32_t)old->id == (uint32_t)k->id &&
            fl_seat_ref_same(&old->who, &te->team->members[0].who))
            old->passing = true;
    rm->who = te->team->members[0].who;
    rm->passing = k->passing;
    rm->staged = k->staged;
    rm->next = te->reach->mems;
    te->reach->mems = rm;
}

static enum fl_status key_take(struct take_edge *te, const Fl__XferKeyIs *k,
                               const struct wire_msg *m, struct fl_err *err)
{
    struct take *t = te->take;
    struct xfer_version v = msg_read_version(k->version);
    struct link_key key = { 0 };

    if (!xfer_version_same(&v, &t->o.target))
        return fl_fail(err, FL_STALE, "the source has version %" PRIu64 " there, not %" PRIu64,
                       v.number, t->o.target.number);
    if (k->staged && t->o.part->mode == XFER_SHARE)
        return fl_fail(err, FL_INVALID, "the source's pages are copies, which nothing serves from");
    te->giver_slot = k->slot;
    te->slot_id = k->id - te->next_parcel;
    te->parts = k->has_blob && k->has_parts ? k->parts : 1;
    if (k->has_blob && (te->parts > KEY_PARTS || te->part >= te->parts))
        return fl_fail(err, FL_CORRUPT, "part %u of a key of %u", te->part, te->parts);
    if (!k->has_blob)
        return take_mapped(te, (uint32_t)te->next_parcel)
                   ? FL_OK
                   : fl_fail(err, FL_CORRUPT, "the source takes memory %" PRIu64 " for mapped here",
                             k->id);
    if (k->blob.len != sizeof(key.blob) || m->head.n_fds > WIRE_MAX_FDS)
        return fl_fail(err, FL_CORRUPT, "a key of %zu bytes and %u descriptors", k->blob.len,
                       m->head.n_fds);
    key.part = te->part;
    key.parts = te->parts;
    memcpy(key.blob, k->blob.data, sizeof(key.blob));
    key.n_fds = m->head.n_fds;
    for (unsigned i = 0; i < key.n_fds; i++)
        key.fds[i] = m->fds[i]; /* map() duplicates or maps: they are closed after the callback */
    FL_TRY(part_map(te, k->id, &key, err));
    if (te->part + 1 == te->parts)
        map_whole(te, k);
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
        st = k ? key_take(te, k, reply, &err)
               : fl_fail(&err, FL_CORRUPT, "a key that does not decode");
    } else {
        err = *why;
    }
    if (k)
        fl__xfer_key_is__free_unpacked(k, NULL);
    if (take_wait_again(te, st)) /* the giver's end of the link is not open yet */
        return;
    if (st == FL_UNSUPPORTED && take_pulls(te) && take_not_shown(te, &err))
        return;
    if (st != FL_OK) {
        fl_wrap(&err, st, "asking for the key");
        take_fail(t, te, te->e->first_bucket, st, &err);
        return;
    }
    if (++te->part >= te->parts) {
        te->part = 0;
        te->next_parcel++; /* here: the next memory to ask for */
    }
    take_next_key(te);
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

    port_awake(t->o.port->loop, &te->team->places[te->team->self]);
    take_begin_call(t, &epoch, &a);
    a.method = FL_XFER_KEY;
    k.set = (char *)(uintptr_t)t->o.set;
    k.epoch = &epoch;
    k.plan = msg_hash(t->o.plan);
    k.edge = te->team->giver_edge;
    k.mem = mem;
    k.have = have;
    k.link = te->rescued ? (char *)(uintptr_t)te->ops->name : NULL;
    k.has_part = true;
    k.part = te->part;
    for (struct reach_mem *m = te->part ? NULL : te->reach->mems; m && k.n_have < XFER_KEYS_KEPT;
         m = m->next)
        if (fl_seat_ref_same(&m->who, &te->team->members[0].who))
            have[k.n_have++] =
                m->id; /* the giver says whether the one that it gives is among them */
    te->call.done = edge_on_key;
    st = take_call(peer, &k.base, &a, &te->call, &te->calling, &err);
    if (st != FL_OK && !take_wait_again(te, st))
        take_fail(t, te, te->e->first_bucket, st, &err);
}

static void edge_on_dialed(struct xfer_dial *d, enum fl_status st, struct call_peer *peer,
                           const struct fl_err *err)
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
        take_bucket_in(te, te->e->first_bucket + i);
}

/* The begin said what it is called, and it is mapped since an earlier epoch: nothing to ask. */
static bool known_key(struct take_edge *te)
{
    struct reach_mem *m = te->team->has_key && !te->rescued && !te->part
                              ? mapped(te, te->team->key + te->next_parcel)
                              : NULL;

    if (!m || m->passing)
        return false;
    te->slot_id = te->team->key;
    te->giver_slot = te->team->key_slot;
    return true;
}

void take_next_key(struct take_edge *te)
{
    struct take *t = te->take;

    te->next_parcel = needed_mem(te, te->next_parcel);
    while (te->next_parcel != NO_MEM && known_key(te))
        te->next_parcel = needed_mem(te, te->next_parcel + 1);
    if (te->next_parcel == NO_MEM) { /* all are mapped */
        te->started = true;
        if (t->o.part->mode == XFER_SHARE)
            share_done(te);
        else
            take_pull(te);
        return;
    }
    te->dial.done = edge_on_dialed;
    te->dialing = true;
    t->o.port->dialer.dial(t->o.port->dialer.arg, &te->team->members[0], &te->dial);
}
