/* tests/wire/rig.h - two ends of a stream over each carrier in turn */
#pragma once
#include "tests/t.h"
#include "transport/wire/lossy.h"
#include "transport/wire/wire.h"

struct carrier {
    const char *name;
    const struct stream_ops *ops;
    const char *listen; /* target; a '*' stands for a path in the test's folder */
    struct lossy_plan *plan;
    bool tls; /* both ends with a certificate of one CA */
};
struct tls_id *rig_tls(void);           /* made at its first use */
extern const struct carrier carriers[]; /* ended by { 0 } */
#define EACH_CARRIER(c) for (const struct carrier *c = carriers; c->name; c++)

enum { RIG_GOT = 64 };
struct got { /* one message, copied */
    struct wire_head head;
    uint8_t *body, *blob;
    int fds[WIRE_MAX_FDS];
};
struct end {
    struct rig *rig;
    struct stream *s;
    unsigned opened, lost, closed, drained, n_got, frees;
    struct wire_hello peer;
    struct fl_err why; /* of closed or lost */
    struct got got[RIG_GOT];
    uint8_t *room; /* given for each blob, of room_bytes at least; NULL: none */
    size_t room_bytes;
    bool count_only; /* messages are counted, not kept */
    void (*on_message)(struct end *e, const struct wire_msg *m);
};
struct rig {
    const struct carrier *c;
    struct fl_loop *loop;
    struct fl_held_clock *clock; /* NULL: real time */
    struct stream_server *server;
    struct end client, far;
    struct stream_to to, at; /* set before rig_listen() and rig_dial() */
    struct wire_hello me, you;
    unsigned refused;
    struct fl_err refusal;
    char target[200];
    int fds_before;
};
extern const struct stream_user end_user;

void rig_init(struct rig *r, const struct carrier *c, struct fl_held_clock *held);
enum fl_status rig_listen(struct rig *r, struct fl_err *err);
enum fl_status rig_dial(struct rig *r, struct fl_err *err);
void rig_open(struct rig *r, const struct carrier *c); /* all of it, until both are open */
/* Once, before the first test: what gRPC opens for the whole process is open from then on. */
void rig_warm(void);
/* gRPC closes its sockets on threads of its own, soon after. */
void rig_same_fds(const struct carrier *c, int before);
void rig_fini(struct rig *r); /* and no descriptor is left */
/* Messages in flight arrive: turns until cond, 10 s at most. */
#define rig_until(r, cond) t_until((r)->loop, cond, 10000)
void end_forget(struct end *e); /* what it got */

/* kind, lane, id and parts; bytes of the blob follow from id */
void send_sized(struct end *e, enum wire_kind kind, uint32_t lane, uint64_t id, size_t body,
                size_t blob);
void check_sized(const struct got *g, enum wire_kind kind, uint32_t lane, uint64_t id, size_t body,
                 size_t blob);
