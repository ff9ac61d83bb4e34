#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "transport/call/call_priv.h"
#include "transport/wire/frame.h"

enum { OURS_BYTES = 64 << 10 };

static const struct call_method *find(const struct call_peer *p, uint16_t method)
{
    for (size_t i = 0; i < p->n_methods; i++)
        if (p->methods[i].method == method)
            return &p->methods[i];
    return NULL;
}

static const char *name_of(const struct call_req *req)
{
    return req->method ? req->method->name : "call";
}

/* ---- lanes */

static struct call_in_lane **lane_at(struct call_peer *p, uint32_t lane)
{
    struct call_in_lane **at = &p->in[lane % CALL_BUCKETS];

    while (*at && (*at)->lane != lane)
        at = &(*at)->next;
    return at;
}

static void lane_wait(struct call_peer *p, struct call_in_lane *x)
{
    if (x->waiting || !x->first || x->held_by)
        return;
    x->waiting = true;
    x->wait_next = NULL;
    *(p->wait_last ? &p->wait_last->wait_next : &p->wait_first) = x;
    p->wait_last = x;
}

static void lane_drop(struct call_peer *p, struct call_in_lane *x)
{
    struct call_in_lane *before = NULL;

    for (struct call_in_lane *w = p->wait_first; w; before = w, w = w->wait_next) {
        if (w != x)
            continue;
        *(before ? &before->wait_next : &p->wait_first) = w->wait_next;
        if (p->wait_last == w)
            p->wait_last = before;
        break;
    }
    *lane_at(p, x->lane) = x->next;
    free(x);
    p->n_in--;
}

static enum fl_status lane_take(struct call_peer *p, const struct wire_head *h,
                                struct call_in_lane **out, struct fl_err *err)
{
    struct call_in_lane **at = lane_at(p, h->lane), *x = *at;

    if (x && x->used_bytes + call_cost(h) > CALL_LANE_BYTES)
        return fl_fail(err, FL_CORRUPT, "lane %u sends past its credit: %llu bytes and %llu more",
                       h->lane, (unsigned long long)x->used_bytes,
                       (unsigned long long)call_cost(h));
    if (!x) {
        if (p->n_in == CALL_LANES)
            return fl_fail(err, FL_CORRUPT, "calls in more than %d lanes", CALL_LANES);
        x = FL_FAULT("call.lane") ? NULL : calloc(1, sizeof(*x));
        if (!x)
            return fl_fail(err, FL_EXHAUSTED, "no memory for a lane");
        x->lane = h->lane;
        *at = x;
        p->n_in++;
    }
    x->n++;
    x->used_bytes += call_cost(h);
    *out = x;
    return FL_OK;
}

static void lane_release(struct call_peer *p, struct call_in_lane *x, const struct call_req *req)
{
    x->used_bytes -= req->cost_bytes;
    if (x->held_by == req) {
        x->held_by = NULL;
        lane_wait(p, x);
        call_pump_later(p);
    }
    if (--x->n == 0)
        lane_drop(p, x);
}

/* ---- one request */

static struct call_req **bucket_at(struct call_peer *p, uint64_t id)
{
    struct call_req **at = &p->req_bucket[(id ^ id >> 16) % CALL_REQ_BUCKETS];

    while (*at && (*at)->id != id)
        at = &(*at)->bucket_next;
    return at;
}

static void unlink_req(struct call_req *req)
{
    struct call_peer *p = req->peer;

    *bucket_at(p, req->id) = req->bucket_next;
    *(req->prev ? &req->prev->next : &p->reqs) = req->next;
    if (req->next)
        req->next->prev = req->prev;
    p->n_reqs--;
    lane_release(p, req->lane, req);
    req->peer = NULL;
    req->lane = NULL;
}

static void tell_unwanted(struct call_req *req)
{
    void (*fn)(void *arg, struct call_req *r) = req->on_unwanted;

    req->unwanted = true;
    req->on_unwanted = NULL;
    if (fn)
        fn(req->on_unwanted_arg, req);
}

static void say_error(struct call_peer *p, const struct call_req *req, const struct fl_err *e)
{
    uint8_t body[WIRE_REASON_MAX];
    struct wire_msg m = { .head = { .kind = WIRE_ERROR,
                                    .id = req->id,
                                    .lane = req->lane->lane,
                                    .method = req->number },
                          .body = body };
    struct fl_err err = { 0 };
    enum fl_status st;

    m.head.body_bytes = (uint32_t)wire_reason_write(body, e);
    st = stream_send(p->s, &m, &err);
    if (st != FL_OK && st != FL_UNREACHABLE)
        stream_close(p->s, &err); /* the caller would wait for ever */
}

static void say_credit(struct call_peer *p, const struct call_req *req)
{
    struct wire_msg m = { .head = { .kind = WIRE_CREDIT, .id = req->id, .lane = req->lane->lane } };
    struct fl_err err = { 0 };
    enum fl_status st = stream_send(p->s, &m, &err);

    if (st != FL_OK && st != FL_UNREACHABLE)
        stream_close(p->s, &err);
}

static void finish(struct call_req *req)
{
    if (req->peer)
        unlink_req(req);
    free(req);
}

void call_answer(struct call_req *req, const struct call_answer *a)
{
    struct call_peer *p = req->peer;
    struct wire_msg m = {
        .body = a->body.data, .blob = a->blob.data, .hold = a->hold, .fds = (int *)(uintptr_t)a->fds
    };
    struct fl_err err = { 0 };
    enum fl_status st = FL_UNREACHABLE;

    if (p && p->s && req->unwanted) {
        say_credit(p, req);
    } else if (p && p->s) {
        m.head = (struct wire_head){ .kind = WIRE_REPLY,
                                     .id = req->id,
                                     .lane = req->lane->lane,
                                     .method = req->number,
                                     .body_bytes = (uint32_t)a->body.len,
                                     .blob_bytes = a->blob.len,
                                     .n_fds = (uint8_t)a->n_fds };
        st = a->body.len > WIRE_MAX_BODY || a->n_fds > WIRE_MAX_FDS
                 ? fl_fail(&err, FL_INVALID,
                           "the answer has a body of %zu bytes and %u descriptors, at "
                           "most %d and %d go",
                           a->body.len, a->n_fds, WIRE_MAX_BODY, WIRE_MAX_FDS)
                 : stream_send(p->s, &m, &err);
        if (st != FL_OK && st != FL_UNREACHABLE) {
            fl_wrap(&err, st, "%s", name_of(req));
            say_error(p, req, &err);
        }
    }
    if (st != FL_OK && a->hold)
        a->hold->free(a->hold);
    finish(req);
}

void call_reply(struct call_req *req, struct fl_bytes body, struct fl_bytes blob)
{
    call_answer(req, &(struct call_answer){ .body = body, .blob = blob });
}

void call_reply_hold(struct call_req *req, struct fl_bytes body, struct fl_bytes blob,
                     struct wire_hold *hold)
{
    call_answer(req, &(struct call_answer){ .body = body, .blob = blob, .hold = hold });
}

void call_fail(struct call_req *req, const struct fl_err *err)
{
    struct call_peer *p = req->peer;

    assert(err->status != FL_OK);
    if (p && p->s && req->unwanted)
        say_credit(p, req);
    else if (p && p->s)
        say_error(p, req, err);
    finish(req);
}

bool call_unwanted(const struct call_req *req)
{
    return req->unwanted || !req->peer;
}

void call_on_unwanted(struct call_req *req, void (*fn)(void *arg, struct call_req *req), void *arg)
{
    req->on_unwanted = fn;
    req->on_unwanted_arg = arg;
}

void call_hold_lane(struct call_req *req)
{
    if (req->lane && !req->lane->held_by)
        req->lane->held_by = req;
}

const struct wire_hello *call_req_from(const struct call_req *req)
{
    return req->peer && req->peer->s ? stream_peer(req->peer->s) : NULL;
}

uint64_t call_req_due_ns(const struct call_req *req)
{
    return req->due_ns;
}

uint32_t call_req_budget_ms(const struct call_req *req)
{
    uint64_t now, left;

    if (!req->due_ns)
        return 0;
    now = req->peer ? fl_loop_now_ns(req->peer->loop) : req->due_ns;
    left = req->due_ns > now ? (req->due_ns - now) / 1000000 : 0;
    return left < 1 ? 1 : left > UINT32_MAX ? UINT32_MAX : (uint32_t)left;
}

/* ---- serving */

static enum fl_status refuse(struct call_peer *p, struct call_req *req, struct fl_err *err)
{
    if (req->due_ns && fl_loop_now_ns(p->loop) >= req->due_ns)
        return fl_fail(err, FL_TIMEOUT, "%s: its time was over before it was served", name_of(req));
    if (!req->method && !(p->life && p->life->other))
        return fl_fail(err, FL_UNSUPPORTED, "method %u is not served here", req->number);
    if (req->method && FL_FAULT(req->method->name))
        return fl_fail(err, FL_EXHAUSTED, "fault %s", req->method->name);
    return FL_OK;
}

/* Hands req over, or answers it; either way it may be gone after. The blob's place goes with it. */
static void serve(struct call_peer *p, struct call_req *req, const struct wire_msg *m,
                  const struct call_place *place)
{
    const struct call_method *method = req->method;
    struct fl_err err;
    bool not_served = refuse(p, req, &err) != FL_OK;

    if (not_served)
        call_fail(req, &err);
    else if (method)
        method->serve(p->service, req, m);
    else
        p->life->other(p->service, req, m);
    if (not_served && place->theirs && method->lost)
        method->lost(p->service, place->theirs);
    free(place->ours);
}

static void queued_free(struct call_peer *p, struct call_queued *q)
{
    for (unsigned i = 0; i < q->m.head.n_fds; i++)
        if (q->fds[i] >= 0)
            close(q->fds[i]);
    if (q->place.theirs && q->req->method->lost)
        q->req->method->lost(p->service, q->place.theirs);
    free(q->place.ours);
    free(q);
}

static enum fl_status queue_up(struct call_req *req, const struct wire_msg *m,
                               const struct call_place *place, struct fl_err *err)
{
    const struct wire_head *h = &m->head;
    bool apart = place->ours || place->theirs;
    size_t n = h->body_bytes + (apart ? 0 : h->blob_bytes);
    struct call_queued *q = FL_FAULT("call.queue") ? NULL : malloc(sizeof(*q) + n);
    struct call_in_lane *x = req->lane;

    if (!q)
        return fl_fail(err, FL_EXHAUSTED, "%s: no memory to queue it", name_of(req));
    *q = (struct call_queued){ .req = req, .m.head = *h, .place = *place };
    q->m.body = q->copy;
    q->m.blob = apart ? m->blob : q->copy + h->body_bytes;
    q->m.fds = q->fds;
    if (h->body_bytes)
        memcpy(q->copy, m->body, h->body_bytes);
    if (n > h->body_bytes)
        memcpy(q->copy + h->body_bytes, m->blob, n - h->body_bytes);
    for (unsigned i = 0; i < h->n_fds; i++) {
        q->fds[i] = m->fds[i];
        m->fds[i] = -1;
    }
    *(x->last ? &x->last->next : &x->first) = q;
    x->last = q;
    req->queued = q;
    return FL_OK;
}

static struct call_queued *queue_pop(struct call_in_lane *x)
{
    struct call_queued *q = x->first;

    x->first = q->next;
    if (!x->first)
        x->last = NULL;
    q->req->queued = NULL;
    return q;
}

/* What we have to say waits already: serve no more until it has left. */
static bool outbox_full(struct call_peer *p)
{
    if (p->s->queued_bytes < p->s->bound_bytes)
        return false;
    stream_tell_drained(p->s);
    return true;
}

static void serve_queued(struct call_peer *p, struct call_queued *q)
{
    struct call_req *req = q->req;
    struct call_place place = q->place;

    if (req->unwanted) {
        queued_free(p, q);
        say_credit(p, req);
        finish(req);
        return;
    }
    q->place = (struct call_place){ 0 };
    serve(p, req, &q->m, &place);
    queued_free(p, q);
}

void call_serve_waiting(struct call_peer *p)
{
    struct call_in_lane *x;

    while (p->s && !p->dead && (x = p->wait_first) && !outbox_full(p)) {
        struct call_queued *q = x->first && !x->held_by ? queue_pop(x) : NULL;
        uint32_t lane = x->lane;

        p->wait_first = x->wait_next;
        if (!p->wait_first)
            p->wait_last = NULL;
        x->waiting = false;
        if (!q)
            continue;
        serve_queued(p, q);
        if ((x = *lane_at(p, lane)))
            lane_wait(p, x);
    }
}

static enum fl_status req_create(struct call_peer *p, const struct wire_head *h,
                                 struct call_req **out, struct fl_err *err)
{
    struct call_req **at = bucket_at(p, h->id), *req;
    struct call_in_lane *lane = NULL;
    enum fl_status st;

    if (*at || !h->id)
        return fl_fail(err, FL_CORRUPT, "call %llu came twice", (unsigned long long)h->id);
    if (p->n_reqs == CALL_IN_FLIGHT)
        return fl_fail(err, FL_CORRUPT, "more than %d calls at a time", CALL_IN_FLIGHT);
    req = FL_FAULT("call.req") ? NULL : calloc(1, sizeof(*req));
    st = req ? lane_take(p, h, &lane, err) : fl_fail(err, FL_EXHAUSTED, "no memory for a call");
    if (st != FL_OK) {
        free(req);
        return st;
    }
    req->peer = p;
    req->lane = lane;
    req->method = find(p, h->method);
    req->id = h->id;
    req->cost_bytes = call_cost(h);
    req->number = h->method;
    if (h->budget_ms)
        req->due_ns = fl_loop_now_ns(p->loop) + h->budget_ms * 1000000ull;
    *at = req;
    req->next = p->reqs;
    if (req->next)
        req->next->prev = req;
    p->reqs = req;
    p->n_reqs++;
    *out = req;
    return FL_OK;
}

enum fl_status call_on_request(struct call_peer *p, const struct wire_msg *m, struct fl_err *err)
{
    struct call_room *room = call_room_at(p, m->blob);
    struct call_place place = { 0 };
    struct call_req *req = NULL;
    enum fl_status st = req_create(p, &m->head, &req, err);

    if (room) {
        *(room->method ? &place.theirs : &place.ours) = room->at;
        if (st != FL_OK)
            call_room_drop(p, room);
        *room = (struct call_room){ 0 };
    }
    if (st != FL_OK)
        return st;
    if (!req->lane->first && !req->lane->held_by && !outbox_full(p)) {
        serve(p, req, m, &place);
        return FL_OK;
    }
    st = queue_up(req, m, &place, err);
    if (st != FL_OK) { /* one call is refused, the others go on */
        call_fail(req, err);
        if (place.theirs && find(p, m->head.method)->lost)
            find(p, m->head.method)->lost(p->service, place.theirs);
        free(place.ours);
        return FL_OK;
    }
    lane_wait(p, req->lane);
    return FL_OK;
}

void call_on_cancel(struct call_peer *p, uint64_t id)
{
    struct call_req *req = *bucket_at(p, id);

    if (!req || req->unwanted)
        return; /* its answer crossed the cancel */
    req->unwanted = true;
    if (req->on_unwanted)
        tell_unwanted(req);
}

void call_on_event(struct call_peer *p, const struct wire_msg *m)
{
    const struct call_method *method = find(p, m->head.method);
    struct call_room *room = call_room_at(p, m->blob);
    struct call_room kept = room ? *room : (struct call_room){ 0 };

    if (room)
        *room = (struct call_room){ 0 };
    if (method)
        method->serve(p->service, NULL, m);
    else if (p->life && p->life->other)
        p->life->other(p->service, NULL, m);
    if (!kept.method)
        free(kept.at);
}

void *call_request_room(struct call_peer *p, const struct wire_head *h)
{
    const struct call_method *method = find(p, h->method);
    struct call_room *room = call_room_free(p);
    void *theirs = room && method && method->room ? method->room(p->service, h->blob_bytes) : NULL;
    void *at = theirs;

    /* Memory of ours, so that a request that must wait is queued without a copy of its bulk. */
    if (room && !at && h->blob_bytes >= OURS_BYTES && h->blob_bytes <= WIRE_MAX_POOLED)
        at = malloc(h->blob_bytes);
    if (at)
        *room = (struct call_room){ .at = at, .id = h->id, .method = theirs ? method : NULL };
    return at;
}

void call_room_drop(struct call_peer *p, struct call_room *room)
{
    if (!room->reply && room->method && room->method->lost)
        room->method->lost(p->service, room->at);
    else if (!room->reply && !room->method)
        free(room->at);
    *room = (struct call_room){ 0 };
}

void call_orphan_all(struct call_peer *p)
{
    struct call_req *req;

    p->wait_first = p->wait_last = NULL;
    for (unsigned i = 0; i < CALL_BUCKETS; i++)
        for (struct call_in_lane *x = p->in[i]; x; x = x->next)
            x->first = x->last = NULL;
    while ((req = p->reqs)) {
        struct call_queued *q = req->queued;

        unlink_req(req);
        if (q) { /* nobody has seen it */
            queued_free(p, q);
            free(req);
        } else {
            tell_unwanted(req);
        }
    }
}
