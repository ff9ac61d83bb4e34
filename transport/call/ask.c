#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/fault.h"
#include "transport/call/call_priv.h"
#include "transport/wire/frame.h"

static const uint64_t ms = 1000000;

/* ---- credits: lanes and slots */

static struct call_out_lane **lane_at(struct call_peer *p, uint32_t lane)
{
    struct call_out_lane **at = &p->out[lane % CALL_BUCKETS];

    while (*at && (*at)->lane != lane)
        at = &(*at)->next;
    return at;
}

static void lane_release(struct call_peer *p, uint32_t lane, uint64_t cost_bytes)
{
    struct call_out_lane **at = lane_at(p, lane), *x = *at;

    assert(x && x->n && x->used_bytes >= cost_bytes);
    x->used_bytes -= cost_bytes;
    if (--x->n == 0) {
        *at = x->next;
        free(x);
        p->n_out--;
    }
    if (p->starved) {
        p->pump_ready = true;
        call_pump_later(p);
    }
}

static enum fl_status lane_take(struct call_peer *p, uint32_t lane, uint64_t cost_bytes,
                                struct fl_err *err)
{
    struct call_out_lane **at = lane_at(p, lane), *x = *at;

    if (x && x->used_bytes + cost_bytes > CALL_LANE_BYTES)
        return fl_fail(
            err, FL_AGAIN, "%s: lane %u has %llu bytes in %u calls on their way, %d are let",
            stream_name(p->s), lane, (unsigned long long)x->used_bytes, x->n, CALL_LANE_BYTES);
    if (!x) {
        if (p->n_out == CALL_LANES)
            return fl_fail(err, FL_AGAIN, "%s: calls in %d lanes are on their way",
                           stream_name(p->s), CALL_LANES);
        x = FL_FAULT("call.lane") ? NULL : calloc(1, sizeof(*x));
        if (!x)
            return fl_fail(err, FL_EXHAUSTED, "no memory for a lane");
        x->lane = lane;
        *at = x;
        p->n_out++;
    }
    x->n++;
    x->used_bytes += cost_bytes;
    return FL_OK;
}

static enum fl_status slots_grow(struct call_peer *p, struct fl_err *err)
{
    uint32_t n = p->n_slots ? p->n_slots * 2 : CALL_SLOTS_FIRST;
    struct call_slot *x;

    if (p->n_slots == CALL_IN_FLIGHT)
        return fl_fail(err, FL_AGAIN, "%s: %d calls are on their way", stream_name(p->s),
                       CALL_IN_FLIGHT);
    x = FL_FAULT("call.slots") ? NULL : realloc(p->slots, n * sizeof(*x));
    if (!x)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u calls", n);
    p->slots = x;
    for (uint32_t i = n; i-- > p->n_slots;) {
        x[i] = (struct call_slot){ .next_free = p->free_slot };
        p->free_slot = i;
    }
    p->n_slots = n;
    return FL_OK;
}

static enum fl_status slot_take(struct call_peer *p, struct call_slot **out, struct fl_err *err)
{
    if (p->free_slot == UINT32_MAX)
        FL_TRY(slots_grow(p, err));
    *out = &p->slots[p->free_slot];
    (*out)->id = ++p->turn << 16 | p->free_slot;
    p->free_slot = (*out)->next_free;
    p->n_in_flight++;
    return FL_OK;
}

static void slot_free(struct call_peer *p, struct call_slot *x)
{
    *x = (struct call_slot){ .next_free = p->free_slot };
    p->free_slot = (uint32_t)(x - p->slots);
    p->n_in_flight--;
}

static struct call_slot *slot_of(struct call_peer *p, uint64_t id)
{
    uint32_t at = (uint32_t)(id & 0xffff);

    return id && at < p->n_slots && p->slots[at].id == id ? &p->slots[at] : NULL;
}

static void slot_settle(struct call_peer *p, struct call_slot *x)
{
    uint32_t lane = x->lane;
    uint64_t cost_bytes = x->cost_bytes;

    slot_free(p, x);
    lane_release(p, lane, cost_bytes);
}

/* ---- calls */

static void op_unlink(struct call_peer *p, struct call_op *op)
{
    *(op->prev ? &op->prev->next : &p->first) = op->next;
    *(op->next ? &op->next->prev : &p->last) = op->prev;
    op->prev = op->next = NULL;
    op->peer = NULL;
    fl_timer_cancel(&op->late);
}

/* The op comes back and the answer is not wanted any more: its slot counts until the peer is done.
 */
static void give_up(struct call_op *op, enum fl_status st, const struct fl_err *why)
{
    struct call_peer *p = op->peer;
    struct call_slot *x = slot_of(p, op->id);
    struct call_room *room = call_room_of_reply(p, op->id);

    if (room) {
        stream_forget_room(p->s, room->at);
        *room = (struct call_room){ 0 };
    }
    op_unlink(p, op);
    if (p->s && x) {
        x->op = NULL;
        /* no memory for it: the slot counts until the stream ends, as it would for a slow peer */
        (void)stream_send(
            p->s,
            &(struct wire_msg){ .head = { .kind = WIRE_CANCEL, .lane = x->lane, .id = x->id } },
            NULL);
    }
    op->done(op, st, NULL, why);
}

static void late(struct fl_timer *t, uint64_t now_ns)
{
    struct call_op *op = container_of(t, struct call_op, late);
    struct fl_err why;

    (void)now_ns;
    fl_fail(&why, FL_TIMEOUT, "call %u to %s: no answer in time", op->method,
            stream_name(op->peer->s));
    give_up(op, FL_TIMEOUT, &why);
}

void call_cancel(struct call_op *op)
{
    struct fl_err why;

    if (!op->peer)
        return;
    fl_fail(&why, FL_CANCELLED, "call %u was cancelled", op->method);
    give_up(op, FL_CANCELLED, &why);
}

static enum fl_status budget(struct call_peer *p, const struct call_args *a, uint32_t *out,
                             struct fl_err *err)
{
    uint64_t now = fl_loop_now_ns(p->loop), left;

    *out = 0;
    if (!a->due_ns)
        return FL_OK;
    if (a->due_ns <= now)
        return fl_fail(err, FL_TIMEOUT, "call %u to %s: its time was over before it was sent",
                       a->method, stream_name(p->s));
    left = (a->due_ns - now + ms - 1) / ms;
    *out = left > UINT32_MAX ? UINT32_MAX : (uint32_t)left;
    return FL_OK;
}

static enum fl_status gone_already(struct call_peer *p, struct fl_err *err)
{
    if (p->s)
        return FL_OK;
    return fl_fail(err, FL_UNREACHABLE, "the connection for this call is closed");
}

enum fl_status call_start(struct call_peer *p, const struct call_args *a, struct call_op *op,
                          struct fl_err *err)
{
    struct wire_msg m = {
        .head = { .kind = WIRE_REQUEST,
                  .method = a->method,
                  .lane = a->lane,
                  .body_bytes = (uint32_t)a->body.len,
                  .blob_bytes = a->blob.len,
                  .n_fds = (uint8_t)a->n_fds },
        .body = a->body.data,
        .blob = a->blob.data,
        .hold = a->hold,
        .fds = (int *)(uintptr_t)a->fds,
    };
    struct call_slot *x;
    enum fl_status st;

    FL_TRY(gone_already(p, err));
    if (a->body.len > WIRE_MAX_BODY || a->n_fds > WIRE_MAX_FDS)
        return fl_fail(err, FL_INVALID,
                       "call %u with a body of %zu bytes and %u descriptors, at most %d "
                       "and %d go",
                       a->method, a->body.len, a->n_fds, WIRE_MAX_BODY, WIRE_MAX_FDS);
    FL_TRY(budget(p, a, &m.head.budget_ms, err));
    st = lane_take(p, a->lane, call_cost(&m.head), err);
    if (st == FL_OK && (st = slot_take(p, &x, err)) != FL_OK)
        lane_release(p, a->lane, call_cost(&m.head));
    if (st == FL_OK) {
        m.head.id = x->id;
        x->op = op;
        x->lane = a->lane;
        x->cost_bytes = call_cost(&m.head);
        st = stream_send(p->s, &m, err);
        if (st != FL_OK)
            slot_settle(p, x);
    }
    if (st != FL_OK) {
        p->starved |= st == FL_AGAIN;
        return st;
    }
    op->peer = p;
    op->id = m.head.id;
    op->method = a->method;
    op->prev = p->last;
    op->next = NULL;
    *(p->last ? &p->last->next : &p->first) = op;
    p->last = op;
    op->late = (struct fl_timer){ .fire = late };
    if (a->due_ns)
        fl_timer_arm(p->loop, &op->late, a->due_ns);
    return FL_OK;
}

enum fl_status call_event(struct call_peer *p, uint16_t method, uint32_t lane, struct fl_bytes body,
                          struct fl_err *err)
{
    enum fl_status st;

    FL_TRY(gone_already(p, err));
    if (body.len > WIRE_MAX_BODY)
        return fl_fail(err, FL_INVALID, "event %u with a body of %zu bytes, at most %d go", method,
                       body.len, WIRE_MAX_BODY);
    st = stream_send(p->s,
                     &(struct wire_msg){ .head = { .kind = WIRE_EVENT,
                                                   .method = method,
                                                   .lane = lane,
                                                   .body_bytes = (uint32_t)body.len },
                                         .body = body.data },
                     err);
    p->starved |= st == FL_AGAIN;
    return st;
}

/* ---- answers */

void *call_reply_room(struct call_peer *p, const struct wire_head *h)
{
    struct call_slot *x = slot_of(p, h->id);
    struct call_room *room = call_room_free(p);
    void *at = x && x->op && x->op->room && room ? x->op->room(x->op, h->blob_bytes) : NULL;

    if (at)
        *room = (struct call_room){ .at = at, .id = h->id, .reply = true };
    return at;
}

enum fl_status call_on_reply(struct call_peer *p, const struct wire_msg *m, struct fl_err *err)
{
    struct call_slot *x = slot_of(p, m->head.id);
    struct call_room *room = call_room_of_reply(p, m->head.id);
    struct call_op *op;
    struct fl_err said = { 0 };
    bool good = m->head.kind == WIRE_REPLY;

    if (room && room->at != m->blob)
        return fl_fail(err, FL_CORRUPT, "a second answer to call %llu inside the first",
                       (unsigned long long)m->head.id);
    if (room)
        *room = (struct call_room){ 0 };
    if (!x)
        return fl_fail(err, FL_CORRUPT, "an answer to call %llu, which was not asked",
                       (unsigned long long)m->head.id);
    if (!good)
        FL_TRY(wire_reason_read(m->body, m->head.body_bytes, &said, err));
    if (!good && said.status == FL_OK)
        return fl_fail(err, FL_CORRUPT, "an error without one, to call %llu",
                       (unsigned long long)m->head.id);
    op = x->op;
    slot_settle(p, x);
    if (!op)
        return FL_OK; /* crossed the cancel */
    op_unlink(p, op);
    op->done(op, good ? FL_OK : said.status, good ? m : NULL, good ? NULL : &said);
    return FL_OK;
}

enum fl_status call_on_credit(struct call_peer *p, const struct wire_head *h, struct fl_err *err)
{
    struct call_slot *x = slot_of(p, h->id);

    if (!x || x->op)
        return fl_fail(err, FL_CORRUPT, "credit for call %llu, which %s", (unsigned long long)h->id,
                       x ? "is wanted" : "was not asked");
    slot_settle(p, x);
    return FL_OK;
}

/* ---- ends */

void call_end_all(struct call_peer *p, enum fl_status st, const struct fl_err *why)
{
    struct call_op *op;

    while ((op = p->first)) {
        struct call_slot *x = slot_of(p, op->id);
        struct fl_err each = *why;

        op_unlink(p, op);
        slot_settle(p, x);
        fl_wrap(&each, st, "call %u", op->method);
        op->done(op, st, NULL, &each);
    }
    for (uint32_t i = 0; i < p->n_slots; i++)
        if (p->slots[i].id && !p->slots[i].op)
            slot_settle(p, &p->slots[i]);
}

void call_ask_fini(struct call_peer *p)
{
    free(p->slots);
    for (unsigned i = 0; i < CALL_BUCKETS; i++)
        assert(!p->out[i]);
}
