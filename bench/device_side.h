/* bench/device_side.h - what both processes of bench_device are: a slot, its buckets, its links
 *
 * The trainer gives orders over a socket, the other process carries them out and answers with
 * times. What fails ends the process. */
#pragma once
#include "bench/median.h"
#include "bench/must.h"
#include "bench/shapes.h"
#include "transport/link/dev_priv.h"
#include "transport/link/nccl_api.h"

enum { WARM = 3, ROUNDS_MAX = 64, SEGS_MAX = 1024, BUCKETS_MAX = 64, CHILD_FD = 3 };

struct times {                        /* of one method, ms */
    double cold, median, max, device; /* device: median of what its events say; 0: not asked */
    bool right;
};
struct laps {
    double ms[ROUNDS_MAX], cold, max;
};
void lap(struct laps *l, int i, double ms); /* i from -WARM on: before 0 it only warms up */
struct times laps_times(struct laps *l, unsigned n); /* right, and nothing of the device */
double now_ms(void);

struct layout { /* of a model: each tensor in segments, those in buckets */
    struct link_seg segs[SEGS_MAX];
    size_t n_segs, first[BUCKETS_MAX], n[BUCKETS_MAX], n_buckets;
    uint64_t bytes, payload;
};

/* ==== what the two say ======================================================================== */
enum what {
    DO_SLOT,
    DO_MAP,
    DO_PULL,
    DO_UNMAP,
    DO_HANDLES,
    DO_NCCL,
    DO_CAST,
    DO_RAW,
    DO_RAW_EACH,
    DO_END
};
struct order {
    enum what what;
    unsigned rounds, n_handles;
    struct shape shape;
    struct link_place place;
    struct link_key key;
    uint8_t ticket[256];
};
struct answer {
    struct times t;
    double open_ms;
    uint64_t sum[2];
};
struct piece { /* DO_HANDLES: so many follow the order */
    struct gpu_handle h;
    uint64_t off, bytes;
};
void tell(int fd, const struct order *o);
void read_all(int fd, void *at, size_t n);

/* ==== one of them ============================================================================= */
struct side {
    const struct gpu_ops *gpu;
    struct fl_loop *loop;
    struct link_place place, both[2];
    struct layout y;
    struct link_mem slot, view;
    struct link *ipc, *nccl;
    struct link_dev *dev;
    unsigned in_flight;
    size_t next;
    uint64_t (*digests)[2];
    struct link_op ops[BUCKETS_MAX];
    double device_ms;
    bool failed;
    bool casts;
};
extern struct side me;

void side_open(const char *uuid);
void slot_new(const struct shape *s);         /* in place of the one before */
void digest_slot(bool from, uint64_t out[2]); /* from: as the bytes are that leave it */
double open_link(const struct link_ops *ops, const struct link_team *team,
                 struct link **out); /* ms */
void team_of(const struct order *o, unsigned self, struct link_team *team);
struct times updates(unsigned n); /* all buckets, n times: pulled, or cast */
/* NCCL by hand: one message of all bytes, the limit of casts; each: one a tensor. */
struct times raw_nccl(const uint8_t *ticket, int rank, const struct shape *each, unsigned n);
int child(const char *uuid); /* the engine's process */
