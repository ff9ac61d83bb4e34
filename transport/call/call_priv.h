/* transport/call/call_priv.h - one peer: what it asks (ask.c), what it serves (serve.c), its life
 * (peer.c); private to call and its tests */
#pragma once
#include "transport/call/call.h"

enum { CALL_BUCKETS = 64, CALL_REQ_BUCKETS = 512, CALL_SLOTS_FIRST = 64 };

/* A request that counts against its lane. op NULL: cancelled or late, the peer still has it. */
struct call_slot {
    uint64_t id; /* 0: free, next_free holds */
    struct call_op *op;
    uint64_t cost_bytes;
    uint32_t lane, next_free;
};
struct call_out_lane {
    struct call_out_lane *next;
    uint32_t lane, n;
    uint64_t used_bytes;
};
struct call_in_lane {
    struct call_in_lane *next; /* of the bucket */
    struct call_in_lane *wait_next;
    uint32_t lane, n; /* n: requests that are not answered yet */
    uint64_t used_bytes;
    bool waiting; /* on the list of lanes whose queue may go on */
    struct call_req *held_by;
    struct call_queued *first, *last;
};
struct call_req { /* freed by its answer */
    struct call_peer *peer; /* NULL: it is gone */
    struct call_in_lane *lane;
    struct call_req *prev, *next; /* of all in the peer */
    struct call_req *bucket_next; /* of the same hash   */
    const struct call_method *method; /* NULL: life->other */
    struct call_queued *queued; /* not served yet */
    uint64_t id, due_ns, cost_bytes;
    uint16_t number;
    bool unwanted;
    void (*on_unwanted)(void *arg, struct call_req *req);
    void *on_unwanted_arg;
};
struct call_place { /* where the blob of a request lies, if not in the carrier's memory */
    void *ours;
    void *theirs; /* of method->room() */
};
struct call_queued { /* a request that waits for its lane, with its message */
    struct call_queued *next;
    struct call_req *req;
    struct wire_msg m;
    struct call_place place;
    int fds[WIRE_MAX_FDS];
    uint8_t copy[]; /* body, and blob if it has no place */
};
struct call_room { /* memory that a blob is being received into */
    void *at;
    uint64_t id;
    bool reply;
    const struct call_method *method; /* its room() gave the memory; NULL: it is ours, or an op's */
};
struct call_peer {
    struct stream *s; /* NULL once closed or destroyed */
    struct fl_loop *loop;
    const struct call_method *methods;
    size_t n_methods;
    const struct call_life *life;
    void *service;
    unsigned busy; /* callbacks under way: freed by the last one */
    bool dead;
    struct call_room rooms[2]; /* one message goes in pieces, another may come between */

    struct call_slot *slots;
    uint32_t n_slots, free_slot, n_in_flight;
    uint64_t turn; /* upper bits of an id, so that no id comes twice */
    struct call_op *first, *last;
    struct call_out_lane *out[CALL_BUCKETS];
    unsigned n_out;
    bool starved; /* FL_AGAIN was said: ready() is owed */

    struct call_in_lane *in[CALL_BUCKETS];
    struct call_in_lane *wait_first, *wait_last;
    unsigned n_in, n_reqs;
    struct call_req *reqs, *req_bucket[CALL_REQ_BUCKETS];
    struct fl_task pump; /* lanes that may go on, and ready() */
    bool pump_ready;
};
static inline uint64_t call_cost(const struct wire_head *h)
{
    return sizeof(*h) + h->body_bytes + h->blob_bytes;
}
/* peer.c */
void call_enter(struct call_peer *p);
bool call_leave(struct call_peer *p); /* false: p is freed */
void call_pump_later(struct call_peer *p);
/* Each NULL when there is none: of the reply to id; that is this memory; not in use. */
struct call_room *call_room_of_reply(struct call_peer *p, uint64_t id);
struct call_room *call_room_at(struct call_peer *p, const void *at);
struct call_room *call_room_free(struct call_peer *p);
/* ask.c */
void *call_reply_room(struct call_peer *p, const struct wire_head *h);
enum fl_status call_on_reply(struct call_peer *p, const struct wire_msg *m, struct fl_err *err);
enum fl_status call_on_credit(struct call_peer *p, const struct wire_head *h, struct fl_err *err);
void call_end_all(struct call_peer *p, enum fl_status st, const struct fl_err *why);
void call_ask_fini(struct call_peer *p);
/* serve.c */
void *call_request_room(struct call_peer *p, const struct wire_head *h);
void call_room_drop(struct call_peer *p, struct call_room *room); /* its message never ends */
enum fl_status call_on_request(struct call_peer *p, const struct wire_msg *m, struct fl_err *err);
void call_on_cancel(struct call_peer *p, uint64_t id);
void call_on_event(struct call_peer *p, const struct wire_msg *m);
void call_serve_waiting(struct call_peer *p);
void call_orphan_all(struct call_peer *p);
