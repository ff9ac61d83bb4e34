#pragma once
#include "common/base/base.h"

/* ==== placement/placement.h: pure ============================================================= */
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
    int64_t asked_e4, has_e4;
    const char *rule; /* which rule said no, when it was not an amount */
};
/* FL_EXHAUSTED: would fit an empty cluster. FL_INVALID: can never fit. Either way why gets a line a
 * node (*n_why: room in, used out). *out is written on FL_OK alone; the caller owns it. */
enum fl_status placement_solve(const struct placement_snapshot *snap,
                               const struct placement_request *req, struct placement_plan **out,
                               struct placement_why *why, size_t *n_why, struct fl_err *err);
void placement_plan_destroy(struct placement_plan *p);

struct layout_flags { /* Miles' words; -1: not given */
    int32_t actor_nodes, actor_gpus_per_node, rollout_gpus, gpus_per_engine, gpus_per_node;
    int32_t eval_gpus, gpus_per_eval_engine;
    bool colocate, critic, debug_train_only, debug_rollout_only;
};
struct layout_rank { uint32_t slot, node, local_rank; };
struct layout_engine { uint32_t first_slot, n_slots, node, part_of, base_port; };
struct layout {
    const uint32_t *sorted; /* logical slot to bundle: by address, then device */
    const struct layout_rank *actors;
    const struct layout_engine *engines;
    size_t n_sorted, n_actors, n_engines;
    uint32_t master_node;
    uint16_t master_port;
};
enum fl_status layout_request(const struct layout_flags *flags,
                              const struct placement_snapshot *snap, /* fills what is not given */
                              struct placement_request **out, struct fl_err *err);
enum fl_status layout_assign(const struct layout_flags *flags,
                             const struct placement_snapshot *snap,
                             const struct placement_plan *plan, struct layout **out,
                             struct fl_err *err);

