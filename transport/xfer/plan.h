/* transport/xfer/plan.h - which piece of which source goes where, made once and hashed
 *
 * Members are the sources, then the engines' ranks. An edge is one source and one receiver, or with
 * broadcast one source and all receivers that want the very same bytes at the same places. Its
 * buckets are moved by its link: pulled segment by segment where the link has LINK_PULL; else
 * packed, sent or cast, and unpacked: the packed form of a bucket is its segments' runs, one after
 * the other in the plan's order. In share mode the segments say where each piece of the engine lies
 * in the source's mapped memory, one run each, and nothing is moved. In disk-delta mode from_off is
 * the offset in the whole tensor, row-major, and the link is XFER_LINK_DISK. */
#pragma once
#include "transport/link/link.h"
#include "transport/xfer/manifest.h"

enum xfer_mode { XFER_AUTO, XFER_SHARE, XFER_COPY, XFER_BROADCAST, XFER_P2P, XFER_DISK_DELTA };
const char *xfer_mode_name(enum xfer_mode m); /* as in --update-weight-transfer-mode */
enum xfer_slots {
    XFER_TWO_SLOTS, /* the old version serves until the new one is verified               */
    XFER_ONE_SLOT   /* the engine is DIRTY from before the first byte: no way back to old */
};
#define XFER_LINK_DISK UINT32_MAX
#define XFER_NO_LIMIT UINT64_MAX
#define XFER_BUCKET_BYTES (512ull << 20) /* default of --update-weight-buffer-size */

struct xfer_bucket { uint64_t bytes; uint32_t edge, first_seg, n_segs, from_mem, to_mem, pad; };
struct xfer_edge { uint32_t link, from, first_to, n_to, first_bucket, n_buckets; };
struct xfer_plan { /* a mode is only another way to fill this; one executor runs them all */
    enum xfer_mode mode; /* never XFER_AUTO */
    enum xfer_slots slots;
    /* the union, sorted by name: link_seg.tensor, digest order */
    const struct xfer_tensor *tensors;
    const struct xfer_edge *edges; /* by receiver, then source */
    const struct xfer_bucket *buckets; /* none is larger than bucket_bytes */
    const struct link_seg *segs;
    const uint8_t *once; /* per segment: 1 counts in the engine's digest, 0 is a replica of bytes
                          * that another rank of the same engine counts                           */
    const uint32_t *to;  /* members, indexed by the edges */
    const uint64_t (*part_hash)[2]; /* per member: of its part, see below */
    size_t n_tensors, n_edges, n_buckets, n_segs, n_to, n_members, n_sources;
    uint64_t hash[2], predicted_ns, bytes; /* bytes: moved, over all receivers */
};
struct xfer_plan_in {
    const struct xfer_manifest *sources, *engines; /* sealed */
    const struct link_place *places;               /* sources, then engines */
    size_t n_sources, n_engines;
    enum xfer_mode mode;
    enum xfer_slots slots;
    uint64_t bucket_bytes; /* 0: XFER_BUCKET_BYTES */
    uint64_t spare_bytes; /* room to stage at the rank that has the least, or XFER_NO_LIMIT */
    bool may_share; /* auto only: every engine can serve from mapped pages */
    const struct link_ops *const *links; /* NULL: link_table; edges index it */
    size_t n_links;
};
/* Pure. Every byte of every engine is written exactly once, or the plan fails.
 * FL_INVALID      names, dtypes or shapes differ (err shows both sides' lines of the first one), a
 *                 piece that no source covers, an engine whose ranks leave part of a tensor out,
 *                 layouts that cannot be shared
 * FL_UNREACHABLE  no link of the mode reaches from a source to an engine that needs it
 * FL_EXHAUSTED    no room to stage; err says how much, and what one slot would give up */
enum fl_status xfer_plan_make(const struct xfer_plan_in *in, struct xfer_plan **out,
                              struct fl_err *err);
/* Which links would have been faster, and why they do not reach, of the first edge that has any: a
 * sentence; "": none. */
void xfer_plan_passed_over(const struct xfer_plan_in *in, const struct xfer_plan *p, char *text,
                           size_t n);
void xfer_plan_destroy(struct xfer_plan *p); /* its memory goes with the last holder */
struct xfer_plan *xfer_plan_keep(struct xfer_plan *p); /* one more holder, on the same thread */
FL_AUTO_DEFINE(xfer_plan)

/* The part of one member as it travels: its edges, buckets and segments, and the plan's table of
 * tensors. part_hash is the XXH3-128 of these bytes. free() it. */
enum fl_status xfer_part_encode(const struct xfer_plan *p, uint32_t member, void **out,
                                size_t *n_bytes, struct fl_err *err);
/* A plan that holds this member's edges alone. Trusts nothing: bounds, indexes, bucket sums.
 * FL_CORRUPT: not a part, or not with this hash (hash NULL: not compared). */
enum fl_status xfer_part_decode(const void *image, size_t n_bytes, const uint64_t hash[2],
                                struct xfer_plan **out, struct fl_err *err);
/* What a member checks before the first byte: every segment lies inside its memory, and for an
 * engine every byte of every piece is written exactly once. mine: sealed. */
enum fl_status xfer_part_check(const struct xfer_plan *part, uint32_t member,
                               const struct xfer_manifest *mine, struct fl_err *err);
