/* transport/call/call.h - requests and replies over any stream
 *
 * At most once: when a stream is lost, calls in flight end FL_UNREACHABLE and are not sent again.
 * Every op comes back exactly once, on the loop thread.
 *
 * Lanes. Requests of one lane reach the service in the order in which they were started, each after
 * serve() of the one before has returned. A service that must finish one first calls
 * call_hold_lane(); the lane then stands until that request is answered. Replies come in any order.
 * Events are handed over when they arrive and never wait for a held lane.
 *
 * Credits. A request counts its frame (32 bytes, body, blob) against its lane from start to answer.
 * A lane holds CALL_LANE_BYTES, or one request of any size; beyond, call_start() says FL_AGAIN and
 * ready() follows. A cancelled or late request counts until the peer has dealt with it (CREDIT).
 *
 * Bulk. A blob over WIRE_PIECE goes in pieces, and messages of other lanes and all replies overtake
 * between two of them: a small message waits for one piece at most. Two bulk messages of one
 * stream go one after the other; where that hurts, a second stream is the answer. */
#pragma once
#include "transport/wire/wire.h"

enum {
    CALL_LANE_BYTES = 16 << 20,
    CALL_LANES = 1024,     /* with requests in flight at the same time */
    CALL_IN_FLIGHT = 65536 /* requests a peer */
};
struct call_peer;
struct call_args {
    uint16_t method;
    uint32_t lane;
    uint64_t due_ns; /* 0: none, for constructors and generation only */
    struct fl_bytes body, blob;
    struct wire_hold *hold; /* of the blob: see wire_msg */
    const int *fds;         /* duplicated */
    unsigned n_fds;
};
struct call_op { /* embed it, zeroed; the caller sets done and room */
    struct call_peer *peer;
    uint64_t id;
    struct fl_timer late;
    /* Last thing that happens to op: it may be freed or started again inside, its peer destroyed.
     * reply on FL_OK alone; otherwise err, as the service made it */
    void (*done)(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                 const struct fl_err *err);
    /* Where the reply's blob is received, asked once its length is known; the memory is the owner's
     * of op from then on, also when the reply never ends: nothing is written to it once done has
     * run. NULL (the pointer or its answer): call's own, for done alone. */
    void *(*room)(struct call_op *op, uint64_t blob_bytes);
    /* set by call_start() */
    struct call_op *prev, *next;
    uint16_t method;
};
/* FL_AGAIN: no credit, or not open; not started, ready() follows. FL_TIMEOUT: due has passed. */
enum fl_status call_start(struct call_peer *p, const struct call_args *a, struct call_op *op,
                          struct fl_err *err);
void call_cancel(struct call_op *op); /* done runs now, FL_CANCELLED; not in flight: nothing */
/* One way, no answer: FL_UNREACHABLE while there is no connection, FL_AGAIN as of stream_send(). */
enum fl_status call_event(struct call_peer *p, uint16_t method, uint32_t lane, struct fl_bytes body,
                          struct fl_err *err);

struct call_req; /* being served; answered once, on the loop thread; outlives its peer until then */
struct call_method {
    uint16_t method;
    const char *name; /* in logs, metrics and errors, and of a fault point: the nth request that comes */
    void (*serve)(void *service, struct call_req *req, const struct wire_msg *m); /* event: req NULL */
    /* As call_op.room, for the request's blob: serve() takes it over, or lost() when it is not served. */
    void *(*room)(void *service, uint64_t blob_bytes);
    void (*lost)(void *service, void *room);
};
struct call_answer {
    struct fl_bytes body, blob;
    struct wire_hold *hold; /* of the blob: see wire_msg; when nobody wants the answer it is freed at once */
    const int *fds;         /* duplicated */
    unsigned n_fds;
};
void call_answer(struct call_req *req, const struct call_answer *a);
void call_reply(struct call_req *req, struct fl_bytes body, struct fl_bytes blob);
void call_reply_hold(struct call_req *req, struct fl_bytes body, struct fl_bytes blob,
                     struct wire_hold *hold);
void call_fail(struct call_req *req, const struct fl_err *err); /* status, origin, native, text as given */
bool call_unwanted(const struct call_req *req); /* cancelled, or the caller is gone: answer anyhow */
/* Told once if req becomes unwanted before it is answered; then answer it soon. */
void call_on_unwanted(struct call_req *req, void (*fn)(void *arg, struct call_req *req), void *arg);
void call_hold_lane(struct call_req *req); /* inside serve(): see above */
const struct wire_hello *call_req_from(const struct call_req *req); /* who asks, proved in HELLO; NULL: gone */
uint64_t call_req_due_ns(const struct call_req *req);    /* on our clock, 0: none; hand it on as due_ns */
uint32_t call_req_budget_ms(const struct call_req *req); /* left now, at least 1; 0: no limit          */

struct call_life { /* how the stream fares; each may be NULL; arg: service */
    void (*opened)(void *service, const struct wire_hello *peer); /* each (re)connection            */
    void (*lost)(void *service, const struct fl_err *why);        /* calls in flight have come back */
    void (*closed)(void *service, const struct fl_err *why);      /* last; call_peer_destroy() may be called here */
    void (*ready)(void *service);                                 /* after FL_AGAIN: try again      */
    /* What no method of the table takes, for relays: m->head.method; req NULL: an event.
     * NULL: FL_UNSUPPORTED, which names the number. */
    void (*other)(void *service, struct call_req *req, const struct wire_msg *m);
};
/* Takes s on FL_OK and sets its user. methods and life are the caller's and stay; life may be NULL.
 * A server calls it inside accepted(), a client right after stream_connect() with user NULL there. */
enum fl_status call_peer_create(struct stream *s_take, const struct call_method *methods, size_t n,
                                const struct call_life *life, void *service, struct call_peer **out,
                                struct fl_err *err);
/* Ops in flight come back FL_CANCELLED before it returns; what was sent still leaves. NULL is fine. */
void call_peer_destroy(struct call_peer *p);
/* The other side is told why; then closed() as if it had hung up. */
void call_peer_close(struct call_peer *p, const struct fl_err *why);
struct stream *call_peer_stream(const struct call_peer *p); /* NULL after closed() */
