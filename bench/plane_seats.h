/* bench/plane_seats.h - the processes that bench_plane's driver works with: a trainer and engines
 *
 * Each is started with its seat on descriptor PLANE_FD, answers 'r' when it is ready (the trainer its
 * limit too), and then takes orders there, a byte each. */
#pragma once
#include "bench/shapes.h"
#include "transport/xfer/port.h"

enum { PLANE_FD = 3 };
enum {
    PLANE_NEXT = 'n', /* trainer: begin, write and publish the next version; a byte answers: its status */
    PLANE_LOOK = 'l'  /* struct plane_seen answers */
};
struct seat { /* travels whole */
    struct xfer_member me;
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
    const void *addr;            /* where the engine reads */
};
int plane_engine(const struct seat *s);  /* until it is killed */
int plane_trainer(const struct seat *s); /* the same, or its driver goes */
void plane_rss(struct plane_seen *out);  /* of this process */
