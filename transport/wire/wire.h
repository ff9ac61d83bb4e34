#pragma once
#include "common/base/base.h"
#include "common/base/loop.h"

/* ==== transport/wire/wire.h: one envelope on every wire ========================================
 * Head and daemon (gRPC), daemon and worker (unix socket), worker and worker (unix, TCP) and the
 * in-memory pair of the tests carry the same messages; a daemon relays bodies undecoded. */
enum { WIRE_MAJOR = 1, WIRE_MINOR = 0, WIRE_MAX_BODY = 16 << 20, WIRE_MAX_FDS = 64 };
enum wire_kind {
    WIRE_HELLO = 1, /* first, both ways: versions, features, who, terms, proof of the key */
    WIRE_REQUEST,   /* wants exactly one WIRE_REPLY or WIRE_ERROR of the same id          */
    WIRE_REPLY,
    WIRE_ERROR,  /* body: status, origin, text                                    */
    WIRE_CANCEL, /* the answer to id is not wanted; the work may still happen     */
    WIRE_EVENT,  /* one way                                                       */
    WIRE_CREDIT, /* this lane may send so many bytes more                         */
    WIRE_BYE     /* nothing follows; reason in the body                           */
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
struct wire_msg { /* a view, good during the callback */
    struct wire_head head;
    const void *body, *blob;
    int *fds; /* set an entry to -1 to keep it; the rest is closed for you */
    struct wire_hold *hold; /* sending: NULL: what cannot leave at once of the blob is copied; else it is
                             * read in place until hold->free(), which a failed send() does not call */
};
struct wire_hello {
    uint16_t major, minor; /* major must be equal; the lower minor is spoken */
    uint64_t features;
    struct fl_term term;
    struct fl_node_ref node;
    struct fl_seat_ref seat;
    struct fl_seat_ref want; /* who the caller takes the other side for; zero: anyone. Else FL_STALE */
    char role[16], build[48];
};
enum { STREAM_FDS = 1u << 0, STREAM_LOCAL = 1u << 1 };
struct stream;
struct stream_user { /* all on the loop thread */
    void (*opened)(struct stream *s, const struct wire_hello *peer); /* each (re)connection  */
    void *(*room)(struct stream *s, const struct wire_head *h);      /* of the blob; NULL: a pool */
    void (*message)(struct stream *s, const struct wire_msg *m);
    void (*drained)(struct stream *s);                          /* room again after FL_AGAIN  */
    void (*lost)(struct stream *s, const struct fl_err *why);   /* trying again, with back-off */
    void (*closed)(struct stream *s, const struct fl_err *why); /* once, last                 */
};
struct stream_ops {
    const char *name;
    unsigned caps;
    enum fl_status (*send)(struct stream *s, const struct wire_msg *m, struct fl_err *err);
    void (*close)(struct stream *s, const struct fl_err *why);
};
extern const struct stream_ops stream_rpc, stream_sock, stream_pair, stream_lossy;
struct stream {
    const struct stream_ops *ops;
    struct fl_loop *loop;
    const struct stream_user *user;
    void *user_arg;
    size_t queued_bytes, bound_bytes; /* past it requests get FL_AGAIN; events coalesce or close */
};
struct stream_to {
    const char *target; /* "unix:/path" or "HOST:PORT"; port 0: any free one */
    const char *key_path; /* hex digits; NULL: key                           */
    struct fl_bytes key;  /* copied                                          */
    uint32_t connect_ms;
    bool again; /* after a loss: connect again, with back-off */
};
enum fl_status stream_connect(struct fl_loop *l, const struct stream_ops *kind,
                              const struct stream_to *to, const struct wire_hello *me,
                              const struct stream_user *user, void *arg, struct stream **out,
                              struct fl_err *err);
struct stream_server;
enum fl_status stream_listen(struct fl_loop *l, const struct stream_ops *kind,
                             const struct stream_to *at, const struct wire_hello *me,
                             void (*accepted)(void *arg, struct stream *s_take), void *arg,
                             struct stream_server **out, struct fl_err *err);
const char *stream_server_at(const struct stream_server *s); /* the target to connect to, port filled in */
/* What HELLO says from now on: a head that met a daemon with a higher term. Streams that are open keep what was said. */
void stream_server_term(struct stream_server *s, const struct fl_term *term);
void stream_server_destroy(struct stream_server *s);

