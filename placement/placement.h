#pragma once
#include "common/base/base.h"
#include "common/base/str.h"

/* ==== placement/placement.h: which bundle goes on which devices of which node =================
 * Pure: no clock, no I/O, no log. The same snapshot and request always give the same plan, so that
 * any decision can be replayed later from the journal. */
enum { PLACEMENT_ONE = 10000 }; /* 0.4 + 0.4 + 0.2 is exactly 1 */
enum placement_strategy {
    PLACEMENT_PACK, PLACEMENT_SPREAD, PLACEMENT_STRICT_PACK, PLACEMENT_STRICT_SPREAD
};
enum placement_affinity { PLACEMENT_ANYWHERE, PLACEMENT_PREFER, PLACEMENT_ONLY };
struct placement_label { const char *key, *value; };
struct placement_device {
    const char *id; /* as in the node's visible list: number or UUID */
    int64_t free_e4;
    uint64_t memory_bytes;
    uint16_t numa, island; /* island: devices that reach each other by NVLink */
};
struct placement_node {
    struct fl_node_ref who;
    const char *name, *addr;
    uint8_t addr_sort[16]; /* IPv4 mapped: 10.0.0.9 sorts before 10.0.0.10 */
    bool takes_work;
    bool avoid; /* processes end on it again and again: taken where the others do not do */
    const struct fl_amount *total, *free;
    const struct placement_device *devices;
    const struct placement_label *labels;
    size_t n_amounts, n_devices, n_labels;
};
struct placement_snapshot { /* frozen; a function of the journal up to seq, so replayable */
    uint64_t journal_seq;
    const char *const *resources; /* names of fl_amount.resource */
    const struct placement_node *nodes; /* sorted by addr_sort, then id */
    size_t n_resources, n_nodes;
};
struct placement_bundle {
    const struct fl_amount *wants;
    const struct placement_label *must; /* values may be "!v", "in(a,b)", "!in(a,b)" */
    size_t n_wants, n_must;
    struct fl_node_id node;
    enum placement_affinity affinity;
};
struct placement_request {
    enum placement_strategy strategy;
    const struct placement_bundle *bundles;
    size_t n_bundles;
};
struct placement_slot { uint32_t node, first_device, n_devices; };
struct placement_plan {
    struct placement_slot *slots; /* one per bundle, in the request's order */
    uint32_t *devices;            /* indexes into the node's devices        */
    size_t n_slots, n_devices;
};
struct placement_why {
    uint32_t node;
    uint16_t resource;
    int64_t asked_e4, has_e4, total_e4; /* asked by the whole request; free, and in all, on the node */
    int64_t each_e4; /* asked by one of the bundles that found no node */
    const char *rule;  /* which rule said no, when it was not an amount; a static text */
    const char *label; /* the request's key, when the rule is about a label; else NULL  */
};
/* PACK takes as few nodes as it can, the one that is left with the least where several would do,
 * and keeps to one island of devices; SPREAD fills the emptiest first; the strict ones take exactly
 * one node for all, and one node for each. Devices go to the resource called "GPU": whole ones, or
 * a part of one.
 *
 * FL_EXHAUSTED: would fit an empty cluster. FL_INVALID: can never fit on these nodes, or the
 * request is wrong. Either way why gets a line a node (*n_why: room in, used out; both may be
 * NULL). *out is written on FL_OK alone; the caller owns it. Requests of several kinds of bundles
 * are placed by the most constrained kind first; where that fails, ways to share the nodes are
 * searched, up to 50,000 looks at nodes and 4,096 nodes times kinds. FL_INVALID wants a proof:
 * where the search was cut, or parts of devices of several sizes were asked, it is FL_EXHAUSTED. */
enum fl_status placement_solve(const struct placement_snapshot *snap,
                               const struct placement_request *req, struct placement_plan **out,
                               struct placement_why *why, size_t *n_why, struct fl_err *err);
void placement_plan_destroy(struct placement_plan *p); /* NULL is fine */
void placement_request_destroy(struct placement_request *r); /* of layout_request */
/* One line a node: "gpu-a 10.0.0.1: 16 GPU asked, 3 free of 8" or the rule. */
void placement_why_text(const struct placement_snapshot *snap, const struct placement_why *why,
                        size_t n_why, struct fl_str *out);
/* For addr_sort. false: no address; then the text itself, cut, so that names still have an order. */
bool placement_addr_sort(const char *addr, uint8_t out[16]);

struct layout_flags { /* Miles' words; -1: not given */
    int32_t actor_nodes, actor_gpus_per_node, rollout_gpus, gpus_per_engine, gpus_per_node;
    int32_t eval_gpus, gpus_per_eval_engine;
    bool colocate, critic, debug_train_only, debug_rollout_only;
};
struct layout_rank { uint32_t slot, node, local_rank; }; /* local_rank: device in the node's list */
struct layout_engine { /* a part: an engine over several nodes has several */
    uint32_t first_slot, n_slots, node;
    uint32_t part_of;   /* place of the engine's first part, the one that takes calls */
    uint32_t base_port; /* look for free ports from here on */
    bool eval;
};
struct layout_derived { const char *flag; char value[24], why[104]; };
enum { LAYOUT_DERIVED_MAX = 8, LAYOUT_FIRST_PORT = 15000, LAYOUT_MASTER_PORT = 20000 };
struct layout {
    struct layout_flags flags; /* as they came out: nothing is -1 but what this run has not */
    struct layout_derived derived[LAYOUT_DERIVED_MAX]; /* what the user did not give, and why so */
    size_t n_derived;
    const uint32_t *sorted; /* logical slot to bundle: by address, then device */
    const struct layout_rank *actors; /* critics too: rank r sits where actor r does */
    const struct layout_engine *engines;
    size_t n_sorted, n_actors, n_engines;
    uint32_t master_node; /* of rank 0 */
    uint16_t master_port; /* look for a free one from here on */
};
/* Miles' rules, but nothing is assumed about a node: what is not given comes from the nodes that take
 * work. FL_INVALID: a sentence with the flag, the value, what the nodes have, and what to do. */
enum fl_status layout_resolve(const struct layout_flags *flags,
                              const struct placement_snapshot *snap, struct layout_flags *out,
                              struct layout_derived derived[LAYOUT_DERIVED_MAX], size_t *n_derived,
                              struct fl_err *err);
enum fl_status layout_request(const struct layout_flags *flags,
                              const struct placement_snapshot *snap, /* fills what is not given */
                              struct placement_request **out, struct fl_err *err);
/* FL_INVALID also where a part of an engine would lie on two nodes. */
enum fl_status layout_assign(const struct layout_flags *flags,
                             const struct placement_snapshot *snap,
                             const struct placement_plan *plan, struct layout **out,
                             struct fl_err *err);
void layout_destroy(struct layout *y); /* NULL is fine */
/* For people: role, rank, node, address, devices; then what was derived. */
void layout_text(const struct layout *y, const struct placement_snapshot *snap,
                 const struct placement_plan *plan, struct fl_str *out);
