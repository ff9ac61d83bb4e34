#pragma once
#include "transport/call/call.h"
#include "transport/link/link.h"

/* ==== transport/xfer/xfer.h: versions, manifests, plans, epochs =============================== */
struct xfer_version { uint64_t number, digest[2]; }; /* the same only when both are equal       */
struct xfer_epoch { uint32_t attempt, seq; };        /* attempt: of the driver, from the head   */
struct xfer_box { uint64_t at[FL_DIMS], len[FL_DIMS]; };
struct xfer_tensor { /* the whole tensor, in the same words on every side */
    const char *name;
    enum fl_dtype dtype;
    uint8_t ndim;
    uint64_t shape[FL_DIMS];
};
struct xfer_piece { uint32_t tensor, mem; uint64_t off; struct xfer_box box; };
struct xfer_manifest { /* what one process holds, or wants to hold */
    struct fl_seat_ref who;
    uint32_t party;                    /* the trainer, or the engine that it is a rank of */
    const struct xfer_tensor *tensors; /* sorted by name */
    const struct xfer_piece *pieces;
    size_t n_tensors, n_pieces;
    uint64_t hash[2];
};
/* A tensor's digest is a sum mod 2^64, in two lanes, of mix(atom, index of the atom in the whole
 * tensor); a version's is the sum of mix(tensor's digest, tensor's index). A sum: shards, buckets,
 * ranks and any order give the same value, and replicas count once. The plan fixes the atom of each
 * tensor: the largest power of two up to 16 bytes that divides every contiguous run of every box on
 * either side. It catches accidents, not enemies. */
void xfer_digest_add(uint64_t digest[2], const void *run, size_t bytes, uint64_t first_atom,
                     unsigned atom_bytes);

enum xfer_mode { XFER_AUTO, XFER_SHARE, XFER_COPY, XFER_BROADCAST, XFER_P2P, XFER_DISK_DELTA };
enum xfer_slots {
    XFER_TWO_SLOTS, /* the old version serves until the new one is verified               */
    XFER_ONE_SLOT   /* the engine is DIRTY from before the first byte: no way back to old */
};
struct xfer_bucket { uint32_t edge, first_seg, n_segs; uint64_t bytes; };
struct xfer_edge { uint32_t link, from, first_to, n_to, first_bucket, n_buckets; };
struct xfer_plan { /* a mode is only another way to fill this; one executor runs them all */
    enum xfer_mode mode;
    enum xfer_slots slots;
    const struct xfer_edge *edges;
    const struct xfer_bucket *buckets;
    const struct link_seg *segs;
    const uint32_t *to;             /* members, indexed by the edges               */
    const uint64_t (*part_hash)[2]; /* per member: each checks its own part alone  */
    size_t n_edges, n_buckets, n_segs, n_to, n_members;
    uint64_t hash[2], predicted_ns;
};
struct xfer_plan_in {
    const struct xfer_manifest *sources, *engines;
    const struct link_place *places; /* sources, then engines */
    size_t n_sources, n_engines;
    enum xfer_mode mode;
    enum xfer_slots slots;
    uint64_t bucket_bytes, spare_bytes;
};
/* Pure. FL_INVALID: names, dtypes or shapes differ; err shows both sides' lines of the first one.
 * FL_EXHAUSTED: no room to stage; err says how much, and what one slot would give up. */
enum fl_status xfer_plan_make(const struct xfer_plan_in *in, struct xfer_plan **out,
                              struct fl_err *err);
void xfer_plan_destroy(struct xfer_plan *p);
