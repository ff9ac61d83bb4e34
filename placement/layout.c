#include "placement/placement.h"

#include <stdlib.h>

/* ---- request ---- */

/* How many bundles the run asks for, and the sorted slot where its engines begin. */
static void sizes(const struct layout_flags *f, uint32_t *n, uint32_t *engines_at)
{
    uint32_t actors = (uint32_t)f->actor_nodes * (uint32_t)f->actor_gpus_per_node;
    uint32_t rollout = (uint32_t)f->rollout_gpus, eval = (uint32_t)f->eval_gpus;

    *engines_at = 0;
    if (f->debug_train_only)
        *n = actors;
    else if (f->debug_rollout_only)
        *n = rollout + eval;
    else if (f->colocate)
        *n = actors > rollout ? actors : rollout;
    else {
        *n = actors + rollout + eval;
        *engines_at = actors;
    }
}

static int resource_named(const struct placement_snapshot *snap, const char *name)
{
    for (size_t i = 0; i < snap->n_resources; i++)
        if (strcmp(snap->resources[i], name) == 0)
            return (int)i;
    return -1;
}

/* Miles asks for one CPU with each GPU. A node with fewer cores than devices could then never be
 * used whole, so the least share that a node can give is asked for instead. */
static int64_t cpu_share(const struct placement_snapshot *snap, int cpu)
{
    int64_t share = PLACEMENT_ONE;

    for (size_t i = 0; i < snap->n_nodes; i++) {
        const struct placement_node *n = &snap->nodes[i];
        int64_t has = 0;

        if (!n->n_devices || !n->takes_work)
            continue;
        for (size_t k = 0; k < n->n_amounts; k++)
            if (n->total[k].resource == cpu)
                has = n->total[k].e4;
        has /= (int64_t)n->n_devices;
        share = has < share ? has : share;
    }
    return share;
}

enum fl_status layout_request(const struct layout_flags *flags,
                              const struct placement_snapshot *snap, struct placement_request **out,
                              struct fl_err *err)
{
    struct layout_derived derived[LAYOUT_DERIVED_MAX];
    struct layout_flags f;
    uint32_t n, engines_at;
    size_t n_derived;

    FL_TRY(layout_resolve(flags, snap, &f, derived, &n_derived, err));
    sizes(&f, &n, &engines_at);
    int gpu = resource_named(snap, "GPU"), cpu = resource_named(snap, "CPU");
    if (gpu < 0)
        return fl_fail(err, FL_INVALID, "no node reports the resource GPU");
    /* one block: request, bundles, and the amounts that all bundles share */
    struct {
        struct placement_request req;
        struct fl_amount wants[2];
        struct placement_bundle bundles[];
    } *all = calloc(1, sizeof(*all) + n * sizeof(all->bundles[0]));
    if (!all)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u bundles", n);
    size_t n_wants = 1;
    all->wants[0] = (struct fl_amount){ (uint16_t)gpu, PLACEMENT_ONE };
    if (cpu >= 0 && cpu_share(snap, cpu) > 0)
        all->wants[n_wants++] = (struct fl_amount){ (uint16_t)cpu, cpu_share(snap, cpu) };
    for (uint32_t i = 0; i < n; i++)
        all->bundles[i] = (struct placement_bundle){ .wants = all->wants, .n_wants = n_wants };
    all->req = (struct placement_request){ PLACEMENT_PACK, all->bundles, n };
    *out = &all->req;
    return FL_OK;
}

void placement_request_destroy(struct placement_request *r)
{
    free(r); /* the first member of its block */
}

/* ---- assignment ---- */

static uint32_t device_of(const struct placement_plan *plan, uint32_t bundle)
{
    return plan->devices[plan->slots[bundle].first_device];
}

static int by_place(const void *a, const void *b, void *arg)
{
    const struct placement_plan *plan = arg;
    uint32_t i = *(const uint32_t *)a, k = *(const uint32_t *)b;
    const struct placement_slot *x = &plan->slots[i], *y = &plan->slots[k];

    if (x->node != y->node) /* the snapshot's nodes are sorted by address */
        return x->node < y->node ? -1 : 1;
    return device_of(plan, i) < device_of(plan, k) ? -1 : 1;
}

struct assign {
    const struct placement_snapshot *snap;
    const struct placement_plan *plan;
    struct layout *y;
    uint32_t *sorted;
    struct layout_rank *actors;
    struct layout_engine *engines;
};

static const struct placement_slot *slot_at(const struct assign *a, uint32_t slot)
{
    return &a->plan->slots[a->sorted[slot]];
}

static enum fl_status straddles(const struct assign *a, const struct layout_engine *e,
                                uint32_t other, const char *size_flag, struct fl_err *err)
{
    const struct placement_node *x = &a->snap->nodes[e->node], *z = &a->snap->nodes[other];

    return fl_fail(err, FL_INVALID,
                   "an engine part of %u GPUs (slots %u to %u) would lie on %s (%zu GPUs) and %s "
                   "(%zu GPUs): make the trainer's GPUs and each node's a multiple of %s, or give "
                   "--num-gpus-per-node %zu",
                   e->n_slots, e->first_slot, e->first_slot + e->n_slots - 1, x->name, x->n_devices,
                   z->name, z->n_devices, size_flag,
                   x->n_devices < z->n_devices ? x->n_devices : z->n_devices);
}

/* Engines of one kind over gpus slots from at on, in parts that each lie on one node. */
static enum fl_status engines_assign(struct assign *a, uint32_t at, uint32_t gpus, uint32_t each,
                                     bool eval, struct fl_err *err)
{
    enum { PORTS_EACH = 3 }; /* its own, nccl's, the bootstrap's */
    uint32_t wide = (uint32_t)a->y->flags.gpus_per_node, part = each < wide ? each : wide;
    uint32_t parts_each = each / part, n = gpus / each * parts_each;

    for (uint32_t i = 0; i < n; i++) {
        struct layout_engine *e = &a->engines[a->y->n_engines];
        uint32_t first = at + i * part;

        *e = (struct layout_engine){ .first_slot = first,
                                     .n_slots = part,
                                     .node = slot_at(a, first)->node,
                                     .part_of = (uint32_t)a->y->n_engines - i % parts_each,
                                     .base_port = LAYOUT_FIRST_PORT,
                                     .eval = eval };
        for (uint32_t k = 1; k < part; k++)
            if (slot_at(a, first + k)->node != e->node)
                return straddles(
                    a, e, slot_at(a, first + k)->node,
                    eval ? "--eval-num-gpus-per-engine" : "--rollout-num-gpus-per-engine", err);
        /* slots are sorted, so those of one node follow each other */
        if (a->y->n_engines && e[-1].node == e->node)
            e->base_port = e[-1].base_port + PORTS_EACH;
        a->y->n_engines++;
    }
    return FL_OK;
}

/* What Miles only finds out when a server cannot bind: it gives the engines of --num-gpus-per-node
 * devices the address of the first of them. A wider node than there is makes that a wrong one. */
static enum fl_status width_holds(const struct assign *a, struct fl_err *err)
{
    size_t wide = (size_t)a->y->flags.gpus_per_node, first = 0;

    for (size_t i = 0; i < a->y->n_engines; i++) {
        const struct layout_engine *e = &a->engines[i], *f = &a->engines[first];
        const struct placement_node *n = &a->snap->nodes[f->node];

        if (e->eval != f->eval || e->first_slot + e->n_slots > f->first_slot + wide) {
            first = i; /* of the next supposed node */
            continue;
        }
        if (e->node != f->node && wide > n->n_devices)
            return fl_fail(err, FL_INVALID,
                           "--num-gpus-per-node %zu, but %s has %zu: the engine on %s would be "
                           "given an address of %s; give %zu or leave it out",
                           wide, n->name, n->n_devices, a->snap->nodes[e->node].name, n->name,
                           n->n_devices);
    }
    return FL_OK;
}

static enum fl_status assign_all(struct assign *a, struct fl_err *err)
{
    struct layout *y = a->y;
    const struct layout_flags *f = &y->flags;
    uint32_t n, engines_at;

    sizes(f, &n, &engines_at);
    if (a->plan->n_slots != n)
        return fl_fail(err, FL_INVALID, "a plan of %zu bundles for a run of %u", a->plan->n_slots,
                       n);
    for (uint32_t i = 0; i < n; i++) {
        if (a->plan->slots[i].n_devices != 1)
            return fl_fail(err, FL_INVALID, "bundle %u of the plan has %u devices, not 1", i,
                           a->plan->slots[i].n_devices);
        a->sorted[i] = i;
    }
    qsort_r(a->sorted, n, sizeof(a->sorted[0]), by_place, (void *)a->plan);
    y->n_sorted = n;
    y->n_actors = (size_t)f->actor_nodes * (size_t)f->actor_gpus_per_node;
    y->n_actors = y->n_actors < n ? y->n_actors : n;
    for (uint32_t r = 0; r < y->n_actors; r++)
        a->actors[r] =
            (struct layout_rank){ r, slot_at(a, r)->node, device_of(a->plan, a->sorted[r]) };
    y->master_node = slot_at(a, 0)->node;
    y->master_port = LAYOUT_MASTER_PORT;
    if (f->debug_train_only)
        return FL_OK;
    FL_TRY(engines_assign(a, engines_at, (uint32_t)f->rollout_gpus, (uint32_t)f->gpus_per_engine,
                          false, err));
    if (f->eval_gpus)
        FL_TRY(engines_assign(a, engines_at + (uint32_t)f->rollout_gpus, (uint32_t)f->eval_gpus,
                              (uint32_t)f->gpus_per_eval_engine, true, err));
    return width_holds(a, err);
}

enum fl_status layout_assign(const struct layout_flags *flags,
                             const struct placement_snapshot *snap,
                             const struct placement_plan *plan, struct layout **out,
                             struct fl_err *err)
{
    size_t n = plan->n_slots;
    struct layout *y = calloc(1, sizeof(*y));
    struct assign a = { .snap = snap, .plan = plan, .y = y };
    enum fl_status st;

    if (y) {
        y->sorted = a.sorted = calloc(n + 1, sizeof(a.sorted[0]));
        y->actors = a.actors = calloc(n + 1, sizeof(a.actors[0]));
        y->engines = a.engines = calloc(n + 1, sizeof(a.engines[0]));
    }
    if (y && a.sorted && a.actors && a.engines) {
        st = layout_resolve(flags, snap, &y->flags, y->derived, &y->n_derived, err);
        if (st == FL_OK)
            st = assign_all(&a, err);
    } else {
        st = fl_fail(err, FL_EXHAUSTED, "no memory for a layout of %zu", n);
    }
    if (st != FL_OK) {
        layout_destroy(y);
        return st;
    }
    *out = y;
    return FL_OK;
}

void layout_destroy(struct layout *y)
{
    if (!y)
        return;
    free((void *)y->sorted);
    free((void *)y->actors);
    free((void *)y->engines);
    free(y);
}
