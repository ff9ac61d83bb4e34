#pragma once
#include "transport/wire/wire.h"

/* ==== transport/call/call.h: requests and replies over any stream ==============================
 * At most once: when a stream is lost, calls in flight end FL_UNREACHABLE and are not sent again.
 * A lane's requests are served in order, replies come in any order, every op comes back once. */
struct call_peer;
struct call_args {
    uint16_t method;
    uint32_t lane;
    uint64_t due_ns; /* 0: none, for constructors and generation only */
    struct fl_bytes body, blob;
    struct wire_hold *hold; /* of the blob: see wire_msg */
    const int *fds;
    unsigned n_fds;
};
struct call_op { /* embed it */
    struct call_peer *peer;
    uint64_t id;
    struct fl_timer late;
    void (*done)(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                 const struct fl_err *err);
    /* Where the reply's blob is received, asked once its length is known; the memory is the owner's of op
     * from then on, also when the reply never ends. NULL (the pointer or its answer): call's own, for done alone. */
    void *(*room)(struct call_op *op, uint64_t blob_bytes);
};
enum fl_status call_start(struct call_peer *p, const struct call_args *a, struct call_op *op,
                          struct fl_err *err); /* FL_AGAIN: no credit, not started */
void call_cancel(struct call_op *op);          /* done runs now, FL_CANCELLED      */

struct call_req; /* being served; answered once, on the loop thread */
struct call_method {
    uint16_t method;
    const char *name; /* in logs, metrics and errors */
    void (*serve)(void *service, struct call_req *req, const struct wire_msg *m); /* event: req NULL */
    /* As call_op.room, for the request's blob: serve() takes it over, or lost() when the stream broke first. */
    void *(*room)(void *service, uint64_t blob_bytes);
    void (*lost)(void *service, void *room);
};
const struct wire_hello *call_req_from(const struct call_req *req); /* who asks, proved in HELLO */
uint32_t call_req_budget_ms(const struct call_req *req);            /* left now; 0: no limit     */
void call_reply(struct call_req *req, struct fl_bytes body, struct fl_bytes blob);
void call_reply_hold(struct call_req *req, struct fl_bytes body, struct fl_bytes blob, struct wire_hold *hold);
void call_fail(struct call_req *req, const struct fl_err *err);
bool call_unwanted(const struct call_req *req); /* cancelled, or the caller is gone */
struct call_life { /* how the stream fares; each may be NULL; arg: service */
    void (*opened)(void *service, const struct wire_hello *peer); /* each (re)connection           */
    void (*lost)(void *service, const struct fl_err *why);        /* calls in flight have come back */
    void (*closed)(void *service, const struct fl_err *why);      /* last; call_peer_destroy() may be called here */
};
enum fl_status call_peer_create(struct stream *s_take, const struct call_method *methods, size_t n,
                                const struct call_life *life, void *service, struct call_peer **out, struct fl_err *err);
/* One way, no answer: dropped with FL_UNREACHABLE while there is no connection. */
enum fl_status call_event(struct call_peer *p, uint16_t method, uint32_t lane, struct fl_bytes body,
                          struct fl_err *err);
void call_peer_destroy(struct call_peer *p); /* ops in flight come back before it returns */

