/* transport/xfer/plan_priv.h - the steps of xfer_plan_make, for its files and tests */
#pragma once
#include "common/base/str.h"
#include "transport/xfer/plan.h"

/* ---- box algebra (plan_box.c) ---- */
enum { BOX_CUTS = 2 * FL_DIMS }; /* most boxes that are left of one when another is cut out */
bool box_meet(unsigned ndim, const struct xfer_box *a, const struct xfer_box *b,
              struct xfer_box *out); /* false: nothing in common */
bool box_same(unsigned ndim, const struct xfer_box *a, const struct xfer_box *b);
/* What is left of a without b, which lies inside of a: disjoint boxes, returns how many. */
unsigned box_cut(unsigned ndim, const struct xfer_box *a, const struct xfer_box *b,
                 struct xfer_box out[BOX_CUTS]);

struct box_list { struct xfer_box *at; size_t n, cap; };
bool box_list_add(struct box_list *l, const struct xfer_box *b); /* false: no memory */
void box_list_fini(struct box_list *l);
/* Takes what is in cut out of every box of l; what was taken goes to taken (NULL: nowhere). */
bool box_list_cut(struct box_list *l, unsigned ndim, const struct xfer_box *cut,
                  struct box_list *taken);

/* A box that lies somewhere: both sides of a segment. */
struct placed { const struct xfer_box *box; uint64_t off; };
/* The segments that bring part from one place to the other; emit is called for each, in order.
 * part lies inside both. Stops at the first false, and returns it. */
bool box_segments(const struct xfer_tensor *t, uint32_t tensor, const struct xfer_box *part,
                  struct placed from, struct placed to,
                  bool (*emit)(void *arg, const struct link_seg *seg), void *arg);

/* ---- the union of all tensors (plan_table.c) ---- */
struct plan_table {
    struct xfer_tensor *tensors; /* sorted by name; names are borrowed from the manifests */
    size_t n;
    uint32_t **map; /* per manifest, sources first: its index to ours */
};
/* FL_INVALID: the first name in order that one side lacks, or that differs; both lines. */
enum fl_status plan_table_make(const struct xfer_plan_in *in, struct plan_table *out,
                               struct fl_err *err);
void plan_table_fini(struct plan_table *t, const struct xfer_plan_in *in);

/* ---- which sources hold what (plan_holders.c) ---- */
struct holder { uint32_t source, piece; };
struct shard { /* one box of a tensor, and all that hold it */
    const struct xfer_box *box;
    uint64_t far_end; /* largest end in dimension 0 of this shard and those before it */
    uint32_t first_holder, n_holders;
};
struct plan_holders {
    struct holder *holders;
    struct shard *shards;  /* of a tensor: sorted by box                    */
    uint32_t *first_shard; /* per tensor, and one more: where the next ones begin */
};
enum fl_status plan_holders_make(const struct xfer_plan_in *in, const struct plan_table *table,
                                 struct plan_holders *out, struct fl_err *err);
void plan_holders_fini(struct plan_holders *h);

/* ---- a plan that owns its arrays ---- */
struct plan_owned {
    struct xfer_plan p;
    unsigned more; /* holders besides the first */
    struct xfer_tensor *tensors;
    char *names;
    struct xfer_edge *edges;
    struct xfer_bucket *buckets;
    struct link_seg *segs;
    uint8_t *once;
    uint32_t *to;
    uint64_t (*part_hash)[2];
};
void plan_owned_publish(struct plan_owned *o); /* sets the pointers in p */
/* Copies table, names included. */
enum fl_status plan_owned_tensors(struct plan_owned *o, const struct xfer_tensor *t, size_t n,
                                  struct fl_err *err);
uint64_t plan_seg_bytes(const struct link_seg *s); /* run_bytes x rows */
/* Grows an array by doubling; false: no memory, the array is as it was. */
bool plan_grow(void *array, size_t *cap, size_t want, size_t item_bytes);

/* ---- ways that are not there (plan_say.c) ---- */
/* can carry that mode, wherever it reaches */
bool plan_link_fits(enum xfer_mode m, const struct link_ops *k);
struct plan_gap { /* two places, and what is asked of a link between them */
    enum xfer_mode mode;
    const struct link_place *from, *to;
    uint64_t faster_than_ns; /* for PLAN_GAP_BYTES; UINT64_MAX: any */
};
enum { PLAN_GAP_BYTES = 1 << 30 };
/* "cuda_ipc: why it does not reach; nccl: ..."; "": all of them reach. */
void plan_why_not(const struct plan_gap *g, const struct link_ops *const *links, size_t n,
                  struct fl_str *out);

/* ---- a plan in the making (plan.c, plan_cover.c, plan_edges.c) ---- */
#define PLAN_NO_LINK UINT8_MAX
struct taken {
    uint32_t from, from_mem, to_mem;
    uint8_t once;
    uint32_t order;
    struct link_seg seg;
};

struct planner {
    const struct xfer_plan_in *in;
    const struct link_ops *const *links;
    size_t n_links;
    struct fl_err *err;
    struct plan_table table;
    struct plan_holders holders;
    uint8_t *link_of;    /* source x engine: index of the link, or NO_LINK */
    uint64_t *near;      /* source x engine: cost of COST_UNIT on it       */
    uint64_t *given;     /* bytes each source has been asked for           */
    uint64_t fair_bytes; /* what each source gives when all give the same  */
    uint32_t writer;     /* disk-delta: who writes all of it; n_sources: nobody can */
    /* of the party in hand */
    struct box_list *seen; /* per tensor: what its ranks have counted */
    uint64_t *counted;     /* per tensor, in bytes                    */
    /* of the engine in hand */
    uint32_t engine, last_source;
    struct taken *taken;
    size_t n_taken, cap_taken;
    /* what comes out */
    struct plan_owned *out;
    uint64_t *edge_hash; /* broadcast: of an edge's segments; 0: not for joining */
    uint64_t *busy_ns;   /* per member */
    size_t n_edges, cap_edges, cap_hash, n_buckets, cap_buckets, n_segs, cap_segs, cap_once, n_to;
    uint32_t *edge_of_to; /* receivers as they come: edge and member, sorted into to[] at the end */
    uint32_t *member_of_to;
    size_t cap_edge_of_to, cap_member_of_to;
};
enum fl_status plan_no_memory(const struct planner *pl);
/* The shard that is all of tensor t; NULL: no source holds it whole. */
const struct shard *plan_whole_shard(const struct planner *pl, uint32_t t);
/* Takes all of a piece of the engine in hand, tensor t of the table: what counts, and replicas. */
enum fl_status plan_cover_piece(struct planner *pl, uint32_t t, const struct xfer_piece *piece);
/* What was taken becomes edges and buckets; false: no memory. */
bool plan_add_edges(struct planner *pl);
