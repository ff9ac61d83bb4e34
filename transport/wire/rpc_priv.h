/* transport/wire/rpc_priv.h - what the three files of the gRPC carrier share; private to them, and the only
 * one that includes gRPC
 *
 * A line is one call of one streaming method; its messages are pieces of the byte stream, cut
 * anywhere. One completion queue and one pump thread serve the process. The pump waits, drains what
 * is there, and posts it as one chain; everything that starts something runs on the loop thread.
 * Each operation in flight has a tag inside its line or port, and each tag comes back exactly once
 * before that memory goes. */
#pragma once
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <grpc/support/alloc.h>
#include <stdatomic.h>

#include "transport/tls/tls.h"
#include "transport/wire/sock.h"

#define RPC_METHOD "/furlong.Wire/Stream"
#define RPC_MARK "furlong" /* in the server's first metadata: it is one of ours */
enum { RPC_KEEP_MS = 10000 };

struct rpc_tag {
    struct fl_task back;
    struct fl_loop *loop;
    bool ok;
    atomic_bool out; /* orders the loop's last touch before the pump's first */
    void (*done)(void *owner, bool ok);
    void *owner;
};
void rpc_tag_init(struct rpc_tag *t, struct fl_loop *l, void *owner,
                  void (*done)(void *owner, bool ok));

/* ---- the queue (rpc_hub.c): one user for each line and port that is not gone yet */

enum fl_status rpc_hub_get(struct fl_err *err);
void rpc_hub_put(void);
grpc_completion_queue *rpc_queue(void); /* of who is a user */
grpc_server *rpc_server_create(void);
extern const grpc_channel_args rpc_channel_args;

/* ---- lines (rpc.c) */

struct rpc_line {
    struct wire_line k;
    grpc_channel *channel; /* client */
    grpc_call *call;
    struct rpc_tag first, recv, send, end, part;
    struct fl_task poke;
    struct fl_timer late;
    bool up, dropped, parted, over; /* over: the status is here, nothing more comes */
    bool blocked;                   /* a write waits for the send that is in flight */
    grpc_byte_buffer *incoming;     /* gRPC's while recv is out */
    grpc_byte_buffer *got;          /* being read               */
    grpc_byte_buffer_reader reader;
    grpc_slice slice; /* of got, from slice_off on */
    size_t slice_off;
    bool has_reader, has_slice;
    grpc_metadata_array metadata, trailing;
    grpc_status_code code;
    grpc_slice details;
    int cancelled; /* server: the client is gone */
    struct tls_id *tls;
    struct fl_work look; /* gRPC says too little of a connection that was not to be */
    struct fl_err why, found;
    char target[WIRE_HOST_MAX + 8];
};
/* NULL: no memory. first is called when the first operations are done. */
struct rpc_line *rpc_line_create(struct fl_loop *l, void (*first)(void *owner, bool ok));
void rpc_batch(struct rpc_line *k, struct rpc_tag *tag, const grpc_op *ops, size_t n);
void rpc_arm_recv(struct rpc_line *k);
void rpc_free_when_quiet(struct rpc_line *k); /* one that was dropped, when its last tag is back */

/* ---- the server (rpc_port.c): struct wire_carrier's listen */

enum fl_status rpc_listen(struct fl_loop *l, const struct stream_to *at, bool has_key,
                          void (*arrived)(void *arg, struct wire_line *k_take), void *arg,
                          struct wire_port **out, struct fl_err *err);
