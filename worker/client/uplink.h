/* worker/client/uplink.h - the way to the daemon, and through it to the head
 *
 * Loop thread. The stream connects again by itself; what is asked meanwhile waits. A daemon that
 * was away for FURLONG_DAEMON_AWAY_MS, or says that the seat is another's, closes the inbox. */
#pragma once
#include "common/proto/methods.h"
#include "worker/client/client.h"

struct client_sync;
/* Listens, connects, says WORKER_READY; joined ends once with the outcome. */
enum fl_status client_uplink_open(struct furlong *f, struct client_sync *joined,
                                  struct fl_err *err);
/* relays in flight come back FL_CANCELLED; NULL is fine */
void client_uplink_close(struct furlong *f);
bool client_uplink_is_open(const struct furlong *f);
/* One way; lost while the daemon is away. */
enum fl_status client_uplink_event(struct furlong *f, uint16_t method, struct fl_bytes body);

/* A call to the head that the daemon relays; embed it, zeroed. done comes once, later. Methods that
 * may be made twice without harm are made again when the way or the head was lost, until due. */
struct client_relay {
    struct furlong *f;
    uint16_t method;
    bool again;
    uint64_t due_ns; /* 0: none */
    void *body;      /* malloc'd; freed when it is over */
    size_t body_bytes;
    void (*done)(struct client_relay *r, enum fl_status st, const struct wire_msg *reply,
                 const struct fl_err *err);

    struct client_relay *next, **at; /* of all that are under way */
    struct call_op op;
    struct fl_timer timer;
    struct fl_err failed;
    uint32_t pause_ms;
    bool sent;
};
struct ProtobufCMessage;
/* Takes the message's packed form. FL_EXHAUSTED: no memory, done does not run. */
enum fl_status client_relay_start(struct client_relay *r, struct furlong *f, uint16_t method,
                                  const struct ProtobufCMessage *m, struct fl_err *err);
/* The same when method, body and body_bytes are set: the body is freed in any case. */
enum fl_status client_relay_start_packed(struct client_relay *r, struct furlong *f);
void client_relay_cancel(struct client_relay *r); /* done does not run; idle is fine */

/* A program's thread: makes the call and waits. take gets the reply (loop thread) and its answer is
 * the outcome; may be NULL. */
enum fl_status client_relay_wait(struct furlong *f, uint16_t method, bool again, uint32_t budget_ms,
                                 const struct ProtobufCMessage *m,
                                 enum fl_status (*take)(void *arg, const struct wire_msg *reply,
                                                        struct fl_err *err),
                                 void *arg, struct fl_err *err);
