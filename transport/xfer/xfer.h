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

/* An engine, all its ranks together, is one member. */
enum rx_state {
    RX_EMPTY,      /* no weights: new, restarted, or gave up what was dirty                     */
    RX_SERVING,    /* one verified version                                                      */
    RX_STAGING,    /* serves on; buckets arrive in the other slot                               */
    RX_VERIFIED,   /* digest equal; serves on; waits for COMMIT until its lease ends            */
    RX_COMMITTING, /* the flip, between two steps, on all ranks; nothing stops it               */
    RX_ABORTING,   /* serves on; the other slot may still be written until the links are quiet  */
    RX_DIRTY,      /* one slot: mixed bytes, serves nothing until an epoch verifies             */
    RX_HOME        /* in the table only: RX_SERVING if it has a version, else RX_EMPTY          */
};
enum rx_event { /* of an epoch not older than any seen; older: FL_STALE; repeats: answered as is */
    RX_BEGIN, RX_BEGIN_ONE_SLOT, RX_COMPLETE, RX_BAD, RX_COMMIT, RX_FLIPPED, RX_ABORT,
    RX_COORD_LOST, RX_QUIET
};
struct rx_edge { enum rx_state from; enum rx_event on; enum rx_state to; const char *act; };
static const struct rx_edge rx_edges[] __attribute__((unused)) = {
    { RX_EMPTY,      RX_BEGIN,          RX_STAGING,    "take room, check own part of the plan" },
    { RX_SERVING,    RX_BEGIN,          RX_STAGING,    "take room, check own part of the plan" },
    { RX_DIRTY,      RX_BEGIN,          RX_STAGING,    "forget ledger, take room"              },
    { RX_EMPTY,      RX_BEGIN_ONE_SLOT, RX_DIRTY,      "check own part"                        },
    { RX_SERVING,    RX_BEGIN_ONE_SLOT, RX_DIRTY,      "pause, forget version, then answer"    },
    { RX_DIRTY,      RX_BEGIN_ONE_SLOT, RX_DIRTY,      "same plan: answer ledger; else all"    },
    { RX_STAGING,    RX_COMPLETE,       RX_VERIFIED,   "report digest, start lease"            },
    { RX_STAGING,    RX_BAD,            RX_ABORTING,   "abort links, report bucket"            },
    { RX_STAGING,    RX_ABORT,          RX_ABORTING,   "abort links"                           },
    { RX_STAGING,    RX_COORD_LOST,     RX_ABORTING,   "abort links"                           },
    { RX_STAGING,    RX_BEGIN,          RX_ABORTING,   "newer epoch: abort, answer FL_AGAIN"   },
    { RX_VERIFIED,   RX_COMMIT,         RX_COMMITTING, "flip at the next step boundary"        },
    { RX_VERIFIED,   RX_ABORT,          RX_ABORTING,   "abort links"                           },
    { RX_VERIFIED,   RX_COORD_LOST,     RX_ABORTING,   "lease over: presumed abort"            },
    { RX_VERIFIED,   RX_BEGIN,          RX_ABORTING,   "newer epoch: abort, answer FL_AGAIN"   },
    { RX_COMMITTING, RX_FLIPPED,        RX_SERVING,    "report version, free the old slot"     },
    { RX_ABORTING,   RX_QUIET,          RX_HOME,       "give the room back"                    },
    { RX_DIRTY,      RX_COMPLETE,       RX_COMMITTING, "set version, resume"                   },
    { RX_DIRTY,      RX_BAD,            RX_DIRTY,      "strike those buckets from the ledger"  },
    { RX_DIRTY,      RX_ABORT,          RX_DIRTY,      "abort links, keep ledger"              },
    { RX_DIRTY,      RX_COORD_LOST,     RX_DIRTY,      "abort links, keep ledger"              },
};
struct rx_report { /* what RECONCILE asks of every engine before anything else */
    struct fl_seat_ref who;
    enum rx_state state;
    struct xfer_epoch seen;
    struct xfer_version serving, staged;
    uint32_t buckets_in, buckets_all;
};
struct xfer_sink_ops { /* the engine's side */
    enum fl_status (*room)(void *arg, uint64_t bytes, struct link_mem *out, struct fl_err *err);
    void (*pause)(void *arg, struct fl_task *paused); /* no step runs and none will start */
    void (*flip)(void *arg, const struct xfer_version *now, struct fl_task *flipped);
    void (*resume)(void *arg);
};
enum xfer_kind {
    XFER_ADVANCE, /* every member to a new version                                             */
    XFER_FILL     /* one late, restarted or dirty engine to the current one, from any holder   */
};
struct xfer_request {
    enum xfer_kind kind;
    struct xfer_version target;
    enum xfer_mode mode;
    enum xfer_slots slots;
    unsigned least_engines; /* fewer verified at due_ns: abort; else commit those, name the rest */
    uint64_t due_ns;
};
struct xfer_report {
    struct xfer_epoch epoch;
    struct xfer_version now;
    unsigned n_committed, n_left_behind;
    uint64_t bytes, reconcile_ns, plan_ns, move_ns, verify_ns, pause_ns, predicted_ns;
    struct fl_err first_left_behind; /* rank, host, bucket, phase */
};
/* RECONCILE, PLAN, STAGE, COMMIT or ABORT. Runs in the driver and keeps nothing that RECONCILE
 * cannot learn again, so a driver that comes back needs no log. */
struct xfer_coord;
struct xfer_run {
    void (*done)(struct xfer_run *r, enum fl_status st, const struct xfer_report *rep,
                 const struct fl_err *err);
};
enum fl_status xfer_coord_create(struct fl_loop *l, uint32_t attempt, struct xfer_coord **out,
                                 struct fl_err *err);
enum fl_status xfer_coord_add(struct xfer_coord *c, struct call_peer *engine_or_source,
                              struct fl_seat_ref who, uint32_t party, struct fl_err *err);
void xfer_coord_gone(struct xfer_coord *c, struct fl_seat_ref who, const struct fl_err *cause);
enum fl_status xfer_start(struct xfer_coord *c, const struct xfer_request *req, struct xfer_run *r,
                          struct fl_err *err); /* FL_AGAIN: one is in flight */
void xfer_coord_destroy(struct xfer_coord *c);

