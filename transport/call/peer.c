#include <stdlib.h>

#include "common/base/fault.h"
#include "transport/call/call_priv.h"

/* ---- callbacks may destroy the peer: the last one out frees it */

void call_enter(struct call_peer *p)
{
    p->busy++;
}

bool call_leave(struct call_peer *p)
{
    if (--p->busy || !p->dead)
        return true;
    fl_task_cancel(p->loop, &p->pump);
    call_ask_fini(p);
    free(p);
    return false;
}

static void pump(struct fl_task *t)
{
    struct call_peer *p = container_of(t, struct call_peer, pump);

    call_enter(p);
    call_serve_waiting(p);
    if (p->pump_ready && !p->dead && p->s) {
        p->pump_ready = p->starved = false;
        if (p->life && p->life->ready)
            p->life->ready(p->service);
    }
    (void)call_leave(p);
}

void call_pump_later(struct call_peer *p)
{
    if (!p->dead)
        fl_defer(p->loop, &p->pump);
}

/* ---- memory for blobs on their way in */

struct call_room *call_room_of_reply(struct call_peer *p, uint64_t id)
{
    for (unsigned i = 0; i < FL_LEN(p->rooms); i++)
        if (p->rooms[i].at && p->rooms[i].reply && p->rooms[i].id == id)
            return &p->rooms[i];
    return NULL;
}

struct call_room *call_room_at(struct call_peer *p, const void *at)
{
    for (unsigned i = 0; i < FL_LEN(p->rooms); i++)
        if (at && p->rooms[i].at == at && !p->rooms[i].reply)
            return &p->rooms[i];
    return NULL;
}

struct call_room *call_room_free(struct call_peer *p)
{
    for (unsigned i = 0; i < FL_LEN(p->rooms); i++)
        if (!p->rooms[i].at)
            return &p->rooms[i];
    return NULL;
}

/* ---- the stream's user */

static void ready_if_starved(struct call_peer *p)
{
    if (p->starved) {
        p->pump_ready = true;
        call_pump_later(p);
    }
}

static void on_opened(struct stream *s, const struct wire_hello *peer)
{
    struct call_peer *p = s->user_arg;

    call_enter(p);
    ready_if_starved(p);
    if (p->life && p->life->opened)
        p->life->opened(p->service, peer);
    (void)call_leave(p);
}

static void *on_room(struct stream *s, const struct wire_head *h)
{
    struct call_peer *p = s->user_arg;
    void *at;

    call_enter(p);
    at = h->kind == WIRE_REPLY ? call_reply_room(p, h) : call_request_room(p, h);
    (void)call_leave(p); /* room() does not destroy the peer: its answer would have no owner */
    return at;
}

static void on_message(struct stream *s, const struct wire_msg *m)
{
    struct call_peer *p = s->user_arg;
    struct fl_err err = { 0 };
    enum fl_status st = FL_OK;

    call_enter(p);
    switch (m->head.kind) {
    case WIRE_REQUEST:
        st = call_on_request(p, m, &err);
        break;
    case WIRE_REPLY:
    case WIRE_ERROR:
        st = call_on_reply(p, m, &err);
        break;
    case WIRE_CREDIT:
        st = call_on_credit(p, &m->head, &err);
        break;
    case WIRE_CANCEL:
        call_on_cancel(p, m->head.id);
        break;
    case WIRE_EVENT:
        call_on_event(p, m);
        break;
    default:
        break;
    }
    if (st != FL_OK && p->s && !p->dead)
        stream_close(p->s, &err);
    (void)call_leave(p);
}

static void on_drained(struct stream *s)
{
    struct call_peer *p = s->user_arg;

    ready_if_starved(p);
    call_pump_later(p);
}

static void end_connection(struct call_peer *p, const struct fl_err *why)
{
    for (unsigned i = 0; i < FL_LEN(p->rooms); i++)
        call_room_drop(p, &p->rooms[i]);
    call_orphan_all(p);
    call_end_all(p, FL_UNREACHABLE, why);
}

static void on_lost(struct stream *s, const struct fl_err *why)
{
    struct call_peer *p = s->user_arg;
    struct fl_err kept = *why;

    call_enter(p);
    end_connection(p, &kept);
    if (!p->dead && p->life && p->life->lost)
        p->life->lost(p->service, &kept);
    (void)call_leave(p);
}

static void on_closed(struct stream *s, const struct fl_err *why)
{
    struct call_peer *p = s->user_arg;
    struct fl_err kept = *why;

    call_enter(p);
    p->s = NULL;
    end_connection(p, &kept);
    if (!p->dead && p->life && p->life->closed)
        p->life->closed(p->service, &kept);
    (void)call_leave(p);
}

static const struct stream_user stream_side = {
    .opened = on_opened,
    .room = on_room,
    .message = on_message,
    .drained = on_drained,
    .lost = on_lost,
    .closed = on_closed,
};

/* ---- the face */

enum fl_status call_peer_create(struct stream *s_take, const struct call_method *methods, size_t n,
                                const struct call_life *life, void *service, struct call_peer **out,
                                struct fl_err *err)
{
    struct call_peer *p = FL_FAULT("call.peer") ? NULL : calloc(1, sizeof(*p));

    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory for calls to %s", stream_name(s_take));
    p->s = s_take;
    p->loop = s_take->loop;
    p->methods = methods;
    p->n_methods = n;
    p->life = life;
    p->service = service;
    p->free_slot = UINT32_MAX;
    p->pump.run = pump;
    s_take->user = &stream_side;
    s_take->user_arg = p;
    *out = p;
    return FL_OK;
}

void call_peer_destroy(struct call_peer *p)
{
    struct fl_err why;
    struct stream *s;

    if (!p || p->dead)
        return;
    s = p->s;
    call_enter(p);
    p->dead = true;
    p->s = NULL;
    if (s) {
        s->user = NULL;
        stream_close(s, NULL);
    }
    fl_fail(&why, FL_CANCELLED, "this side ended its connection");
    for (unsigned i = 0; i < FL_LEN(p->rooms); i++)
        call_room_drop(p, &p->rooms[i]);
    call_orphan_all(p);
    call_end_all(p, FL_CANCELLED, &why);
    (void)call_leave(p);
}

void call_peer_close(struct call_peer *p, const struct fl_err *why)
{
    if (p->s)
        stream_close(p->s, why);
}

struct stream *call_peer_stream(const struct call_peer *p)
{
    return p->s;
}
