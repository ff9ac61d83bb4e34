/* transport/wire/wire.h - one envelope on every wire
 *
 * Head and daemon (gRPC), daemon and worker (unix socket), worker and worker (unix, TCP) and the
 * in-memory pair of the tests carry the same messages; a daemon relays bodies undecoded.
 *
 * Targets: "unix:PATH" and "HOST:PORT" (stream_sock), "HOST:PORT" (stream_rpc), "pair:NAME"
 * (stream_pair, inside one loop). An IPv6 address is written "[::1]:PORT".
 *
 * Every stream opens with HELLO: who speaks, since when, and a proof of the shared key by
 * challenge, both ways, before a body is decoded. A refusal ends as one sentence: FL_DENIED (another
 * key), FL_UNSUPPORTED (another major), FL_STALE (not the one that was wanted), FL_CORRUPT
 * (garbage), FL_TIMEOUT (silence). */
#pragma once
#include "common/base/base.h"
#include "common/base/loop.h"

enum {
    WIRE_MAJOR = 1,
    WIRE_MINOR = 0,
    WIRE_MAX_BODY = 16 << 20,
    WIRE_MAX_FDS = 64,
    WIRE_MAX_POOLED = 1 << 30, /* a blob that room() gave no place for */
    WIRE_PIECE = 1 << 20,      /* a larger blob is cut so: others wait for one piece at most */
    WIRE_BOUND = 64 << 20      /* bound_bytes of a new stream */
};
enum wire_kind {
    WIRE_HELLO = 1, /* first, both ways: versions, features, who, terms, proof of the key */
    WIRE_REQUEST,   /* wants exactly one WIRE_REPLY or WIRE_ERROR of the same id          */
    WIRE_REPLY,
    WIRE_ERROR,  /* body: status, origin, native, text                            */
    WIRE_CANCEL, /* the answer to id is not wanted; the work may still happen     */
    WIRE_EVENT,  /* one way                                                       */
    WIRE_CREDIT, /* this lane may send so many bytes more                         */
    WIRE_BYE,    /* nothing follows; reason in the body, as of WIRE_ERROR         */
    WIRE_MORE    /* the next piece of the blob that is under way; carriers only   */
};
struct wire_head {       /* little endian; in front of each frame on sockets */
    uint32_t body_bytes; /* protobuf in proto2 syntax: presence is real      */
    uint32_t lane;       /* order holds inside a lane, never between lanes   */
    uint64_t blob_bytes; /* raw bytes after the body, never decoded          */
    uint64_t id;
    uint32_t budget_ms; /* time left for the request, 0: none; a hop takes off what it spent */
    uint16_t method;
    uint8_t kind, n_fds;
};
_Static_assert(sizeof(struct wire_head) == 32, "wire format");

struct wire_hold { /* embed it: a blob that is lent to a send rather than copied */
    void (*free)(struct wire_hold *h); /* loop thread, exactly once: sent, or will never be */
};
/* Received: a view, good during the callback; body and blob may lie at any address.
 * Sent: borrowed during send(), which copies, but see hold. */
struct wire_msg {
    struct wire_head head;
    const void *body, *blob;
    int *fds; /* received: set an entry to -1 to keep it, the rest is closed for you;
               * sent: duplicated, they stay the caller's */
    struct wire_hold *hold; /* sending: set, the blob is not copied but read in place until hold->free(),
                             * which never runs inside send() and not at all when that failed */
};
struct wire_hello {
    uint16_t major, minor; /* major must be equal; the lower minor is spoken; 0.0: this build's */
    uint64_t features;
    struct fl_term term;
    struct fl_node_ref node;
    struct fl_seat_ref seat;
    struct fl_seat_ref want; /* who the caller takes the other side for; zero: anyone. Else FL_STALE */
    char role[16], build[48];
};
enum { STREAM_FDS = 1u << 0, STREAM_LOCAL = 1u << 1 };
struct stream;
struct stream_user { /* all on the loop thread; an entry may be NULL */
    void (*opened)(struct stream *s, const struct wire_hello *peer); /* each (re)connection  */
    void *(*room)(struct stream *s, const struct wire_head *h);      /* of the blob; NULL: a pool */
    void (*message)(struct stream *s, const struct wire_msg *m);
    void (*drained)(struct stream *s);                          /* room again after FL_AGAIN  */
    void (*lost)(struct stream *s, const struct fl_err *why);   /* trying again, with back-off */
    void (*closed)(struct stream *s, const struct fl_err *why); /* once, last: s goes after it */
};
struct wire_carrier;
struct stream_ops {
    const char *name;
    unsigned caps; /* what the carrier can do; a stream's own: stream_caps() */
    enum fl_status (*send)(struct stream *s, const struct wire_msg *m, struct fl_err *err);
    void (*close)(struct stream *s, const struct fl_err *why);
    const struct wire_carrier *carrier;
};
extern const struct stream_ops stream_rpc; /* of wire_rpc_dep, the only part that links gRPC */
extern const struct stream_ops stream_sock, stream_pair, stream_lossy;
struct stream {
    const struct stream_ops *ops;
    struct fl_loop *loop;
    const struct stream_user *user; /* NULL: nobody listens any more; set it before s is given away */
    void *user_arg;
    size_t queued_bytes, bound_bytes; /* past it requests and events get FL_AGAIN, then drained() */
};

/* FL_OK         taken whole; it leaves at the end of the turn, in one batch with the others
 * FL_AGAIN      not open yet (opened() follows) or bound_bytes are waiting (drained() follows);
 *               answers, credits and cancels are always taken: requests bound them
 * FL_UNREACHABLE closed, or between two connections: nothing is kept for the next one
 * FL_INVALID    a body, blob or number of descriptors that no frame may have
 * FL_UNSUPPORTED descriptors on a carrier without STREAM_FDS */
static inline enum fl_status stream_send(struct stream *s, const struct wire_msg *m,
                                         struct fl_err *err)
{
    return s->ops->send(s, m, err);
}
/* What was taken still leaves, for a second at most; then BYE with why (NULL: done). closed() comes
 * in a later turn, or never when s->user is set to NULL. s must not be used by its owner again. */
static inline void stream_close(struct stream *s, const struct fl_err *why)
{
    s->ops->close(s, why);
}
void stream_tell_drained(struct stream *s); /* drained() follows as after FL_AGAIN */
unsigned stream_caps(const struct stream *s);                  /* STREAM_* of this connection   */
const struct wire_hello *stream_peer(const struct stream *s);  /* NULL while not open           */
const char *stream_name(const struct stream *s);               /* for errors: "unix:/x (node)"  */
/* The memory that room() gave is about to go: the rest of that blob is read and dropped. */
void stream_forget_room(struct stream *s, const void *room);

struct lossy_plan;
struct tls_id;
struct stream_to {
    const char *target;
    const char *key_path; /* its content without trailing white space is the key */
    struct fl_bytes key;  /* or the key itself, up to 128 bytes, copied. Neither: no proof, loopback only */
    uint32_t connect_ms;  /* connection and HELLO together; 0: 5 s */
    struct tls_id *tls;   /* NULL: plain. Over TCP both sides show a certificate (transport/tls); unix sockets and
                           * pairs have no need. Borrowed as long as the stream, or the server, is there */
    bool again;           /* reconnects, 100 ms to 2 s apart, until closed or refused for good */
    const struct lossy_plan *lossy; /* stream_lossy: over what, and what it does to it (lossy.h) */

    /* A server's say; arg is that of stream_listen(). Each may be NULL.
     * key_of: the key of whoever claims to be this, before anything is proved; borrowed for the
     * call. admit: after the proof; what it returns other than FL_OK is told to the peer. */
    enum fl_status (*key_of)(void *arg, const struct wire_hello *claims, struct fl_bytes *key,
                             struct fl_err *err);
    enum fl_status (*admit)(void *arg, const struct wire_hello *peer, struct fl_err *err);
    void (*refused)(void *arg, const struct fl_err *why); /* whoever came did not get in: for the log */
    const char *says; /* stream_rpc without TLS: one sentence for who speaks another protocol there, say where theirs is
                       * spoken. Copied; NULL: what this port is */
};
/* Starts connecting; names are resolved on the pool. opened(), or closed() with the reason (lost()
 * first and another attempt with again). Nothing is called before it returns. */
enum fl_status stream_connect(struct fl_loop *l, const struct stream_ops *kind,
                              const struct stream_to *to, const struct wire_hello *me,
                              const struct stream_user *user, void *arg, struct stream **out,
                              struct fl_err *err);
struct stream_server;
/* accepted() gets each stream after its HELLO, sets user and user_arg, and owns it; opened() follows.
 * HOST must be an address, not a name; port 0 takes a free one. A stale unix socket file is replaced,
 * a live one is FL_EXISTS. */
enum fl_status stream_listen(struct fl_loop *l, const struct stream_ops *kind,
                             const struct stream_to *at, const struct wire_hello *me,
                             void (*accepted)(void *arg, struct stream *s_take), void *arg,
                             struct stream_server **out, struct fl_err *err);
const char *stream_server_at(const struct stream_server *s); /* as a target: the real port */
/* What HELLO says from now on: a head that met a daemon with a higher term. Streams that are open keep what was said. */
void stream_server_term(struct stream_server *s, const struct fl_term *term);
void stream_server_destroy(struct stream_server *s); /* streams that were accepted live on */
