/* bench/plane_seats.h - the processes that bench_plane's driver works with: a trainer, engines, relays
 *
 * Each is started with its seat on descriptor PLANE_FD, answers 'r' when it is ready (the trainer its
 * limit too), and then takes orders there, a byte each. Fault points of its own, beside those of the
 * plane: plane.flip, when an engine is told to. */
#pragma once
#include "bench/shapes.h"
#include "transport/xfer/port.h"

enum { PLANE_FD = 3 };
enum {
    PLANE_NEXT = 'n', /* trainer: begin, write and publish the next version; a byte answers: its status */
    PLANE_LOOK = 'l', /* struct plane_seen answers */
    PLANE_FAULT = 'f' /* so many bytes follow as PLANE_SPEC says: faults from now on; a byte answers */
};
enum { PLANE_SPEC = 64 };
struct seat { /* travels whole */
    struct xfer_member me;
    char at[96];  /* where it listens: me.where, or behind a relay */
    char via[96]; /* how it reaches the trainer; "": as the trainer says */
    uint64_t first_version; /* trainer: the next one to publish */
    struct link_place place, other; /* other: of the engines, for the trainer's limit */
    struct shape shape;
    bool fixed; /* an engine whose addresses stay */
};
struct plane_seen {
    struct xfer_version version; /* of what an engine serves, as it says */
    uint64_t root[2];            /* as its memory says: digested now */
    uint64_t rss_kib, fds;
    uint64_t device_used_bytes;  /* of the whole device */
    uint64_t publish_ns;         /* trainer: digests of the last version */
    const void *addr;            /* where the engine reads; NULL: nothing serves, and says has why */
    char says[256];
    uint64_t flipped_ns;         /* an engine's last flip, by the clock since boot */
};
enum { RELAY_WAYS = 2 };
struct relay { /* listens at, and passes on to; paths of sockets */
    char at[RELAY_WAYS][96], to[RELAY_WAYS][96];
};
int plane_engine(const struct seat *s);  /* until it is killed */
int plane_trainer(const struct seat *s); /* the same, or its driver goes */
int plane_relay(const struct relay *r);  /* the same */
void plane_rss(struct plane_seen *out);  /* of this process */
