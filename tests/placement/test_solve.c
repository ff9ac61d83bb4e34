#include <time.h>

#include "tests/placement/snap.h"

enum { ONE = PLACEMENT_ONE, MOST = 32 };

/* What one bundle asks for, and how often. */
struct ask {
    unsigned n;
    int64_t gpu, cpu;
    const char *zone;
    int node; /* 1: gpu-a, ...; with affinity */
    enum placement_affinity affinity;
};

struct asked {
    struct placement_request req;
    struct placement_bundle bundles[MOST];
    struct fl_amount wants[MOST][2];
    struct placement_label must[MOST];
};

static struct asked *asked_new(enum placement_strategy strategy, const struct ask *asks)
{
    struct asked *a = calloc(1, sizeof(*a));
    size_t n = 0;

    for (; asks->n; asks++)
        for (unsigned i = 0; i < asks->n; i++, n++) {
            a->wants[n][0] = (struct fl_amount){ RES_GPU, asks->gpu };
            a->wants[n][1] = (struct fl_amount){ RES_CPU, asks->cpu };
            a->must[n] = (struct placement_label){ "zone", asks->zone };
            a->bundles[n] = (struct placement_bundle){ .wants = a->wants[n],
                                                       .must = &a->must[n],
                                                       .n_wants = 2,
                                                       .n_must = asks->zone != NULL,
                                                       .affinity = asks->affinity };
            a->bundles[n].node.b[0] = (uint8_t)asks->node;
        }
    a->req = (struct placement_request){ strategy, a->bundles, n };
    return a;
}

/* "a0 a1 b0": node and devices of each bundle, in the order of the request */
static void plan_text(const struct placement_plan *p, struct fl_str *out)
{
    for (size_t i = 0; i < p->n_slots; i++) {
        fl_str_add(out, "%s%c", i ? " " : "", 'a' + (int)p->slots[i].node);
        for (uint32_t k = 0; k < p->slots[i].n_devices; k++)
            fl_str_add(out, "%s%u", k ? "," : "", p->devices[p->slots[i].first_device + k]);
    }
}

static const struct row {
    const char *name;
    struct snap_node nodes[5];
    enum placement_strategy how;
    struct ask asks[4];
    enum fl_status wanted;
    const char *plan; /* or a part of the error */
    /* clang-format off */
} rows[] = {
    { "as few nodes as possible",
      { { .gpus = 2 }, { .gpus = 8 }, { .gpus = 4 } }, PLACEMENT_PACK,
      { { .n = 5, .gpu = ONE } }, FL_OK, "b0 b1 b2 b3 b4" },
    { "the tightest of those that hold all",
      { { .gpus = 8 }, { .gpus = 4 }, { .gpus = 8 } }, PLACEMENT_PACK,
      { { .n = 3, .gpu = ONE } }, FL_OK, "b0 b1 b2" },
    { "the first of equals",
      { { .gpus = 4 }, { .gpus = 4 } }, PLACEMENT_PACK,
      { { .n = 2, .gpu = ONE } }, FL_OK, "a0 a1" },
    { "over two, the rest where it fits best",
      { { .gpus = 4 }, { .gpus = 2 }, { .gpus = 4 } }, PLACEMENT_PACK,
      { { .n = 6, .gpu = ONE } }, FL_OK, "a0 a1 a2 a3 b0 b1" },
    { "0.4 + 0.4 + 0.2 is one",
      { { .gpus = 1 } }, PLACEMENT_PACK,
      { { .n = 2, .gpu = 4000 }, { .n = 1, .gpu = 2000 } }, FL_OK, "a0 a0 a0" },
    { "and not a bit more",
      { { .gpus = 1 } }, PLACEMENT_PACK,
      { { .n = 2, .gpu = 4000 }, { .n = 1, .gpu = 2001 } }, FL_INVALID,
      "can never fit: 1.0001 GPU asked, 1 node has 1 (gpu-a 1)" },
    { "a part takes no whole device if it need not",
      { { .gpus = 2 } }, PLACEMENT_PACK,
      { { .n = 1, .gpu = ONE }, { .n = 2, .gpu = 5000 } }, FL_OK, "a0 a1 a1" },
    { "whole devices only",
      { { .gpus = 2 } }, PLACEMENT_PACK, { { .n = 1, .gpu = 15000 } }, FL_INVALID,
      "bundle 0 asks for 1.5 GPU: above one only whole ones" },
    { "one island if one is enough",
      { { .gpus = 8, .busy = 0x03 } }, PLACEMENT_PACK,
      { { .n = 2, .gpu = 2 * ONE } }, FL_OK, "a4,5 a6,7" },
    { "the smaller island if it is enough",
      { { .gpus = 8, .busy = 0x03 } }, PLACEMENT_PACK,
      { { .n = 1, .gpu = 2 * ONE } }, FL_OK, "a2,3" },
    { "cores count too",
      { { .gpus = 4, .cpus = 2 }, { .gpus = 4, .cpus = 8 } }, PLACEMENT_PACK,
      { { .n = 3, .gpu = ONE, .cpu = ONE } }, FL_OK, "b0 b1 b2" },
    { "what is largest goes first",
      { { .gpus = 2 }, { .gpus = 4 } }, PLACEMENT_PACK,
      { { .n = 2, .gpu = ONE }, { .n = 1, .gpu = 4 * ONE } }, FL_OK, "a0 a1 b0,1,2,3" },
    { "labels",
      { { .gpus = 4, .label = "x" }, { .gpus = 4, .label = "y" } }, PLACEMENT_PACK,
      { { .n = 1, .gpu = ONE, .zone = "y" }, { .n = 1, .gpu = ONE, .zone = "!y" },
        { .n = 1, .gpu = ONE, .zone = "in(w,y)" } },
      FL_OK, "b0 a0 b1" },
    { "a label that nobody has",
      { { .gpus = 4, .label = "x" }, { .gpus = 4 } }, PLACEMENT_PACK,
      { { .n = 1, .gpu = ONE, .zone = "in(y,z)" } }, FL_INVALID,
      "can never fit: 1 of 1 bundles have no node (0 of 2 may be used); first: gpu-a 10.0.0.1: label "
      "zone does not match" },
    { "hard affinity",
      { { .gpus = 4 }, { .gpus = 4 } }, PLACEMENT_PACK,
      { { .n = 1, .gpu = ONE, .node = 2, .affinity = PLACEMENT_ONLY } }, FL_OK, "b0" },
    { "hard affinity to a full node",
      { { .gpus = 4 }, { .gpus = 1, .busy = 1 } }, PLACEMENT_PACK,
      { { .n = 1, .gpu = ONE, .node = 2, .affinity = PLACEMENT_ONLY } }, FL_EXHAUSTED,
      "not now: 1 GPU asked, 0 free of 1" },
    { "soft affinity",
      { { .gpus = 4 }, { .gpus = 1 } }, PLACEMENT_PACK,
      { { .n = 2, .gpu = ONE, .node = 2, .affinity = PLACEMENT_PREFER } }, FL_OK, "a0 b0" },
    { "a node that takes no work",
      { { .gpus = 4, .off = true }, { .gpus = 2 } }, PLACEMENT_PACK,
      { { .n = 2, .gpu = ONE } }, FL_OK, "b0 b1" },
    { "a node to be avoided",
      { { .gpus = 4, .bad = true }, { .gpus = 2 } }, PLACEMENT_PACK,
      { { .n = 2, .gpu = ONE } }, FL_OK, "b0 b1" },
    { "to be avoided, and the others do not do",
      { { .gpus = 4, .bad = true }, { .gpus = 2 } }, PLACEMENT_PACK,
      { { .n = 3, .gpu = ONE } }, FL_OK, "a0 a1 a2" },
    { "may be back later",
      { { .gpus = 4, .off = true }, { .gpus = 2 } }, PLACEMENT_PACK,
      { { .n = 3, .gpu = ONE } }, FL_EXHAUSTED, "not now: 3 GPU asked, 2 free of 6 on 2 nodes" },
    { "strictly on one",
      { { .gpus = 2 }, { .gpus = 8 }, { .gpus = 4 } }, PLACEMENT_STRICT_PACK,
      { { .n = 2, .gpu = ONE }, { .n = 1, .gpu = 2 * ONE } }, FL_OK, "c2 c3 c0,1" },
    { "strictly on one, not now",
      { { .gpus = 4, .busy = 1 }, { .gpus = 3 } }, PLACEMENT_STRICT_PACK,
      { { .n = 4, .gpu = ONE } }, FL_EXHAUSTED,
      "not now: 4 GPU asked on one node, the best, gpu-a, has 3 free" },
    { "the first of equals is the wrong one",
      { { .gpus = 4 }, { .gpus = 5 } }, PLACEMENT_PACK,
      { { .n = 1, .gpu = 3 * ONE }, { .n = 3, .gpu = 2 * ONE } }, FL_OK, "b0,1,2 a0,1 a2,3 b3,4" },
    { "enough in all, and no way to share it",
      { { .gpus = 5 }, { .gpus = 5 } }, PLACEMENT_PACK,
      { { .n = 1, .gpu = 4 * ONE }, { .n = 2, .gpu = 3 * ONE } }, FL_INVALID,
      "can never fit: 2 of 3 bundles have no node (2 of 2 may be used)" },
    { "the same while some is taken",
      { { .gpus = 4, .busy = 1 }, { .gpus = 5 } }, PLACEMENT_PACK,
      { { .n = 1, .gpu = 3 * ONE }, { .n = 2, .gpu = 2 * ONE }, { .n = 1, .gpu = ONE } }, FL_OK,
      "a1,2,3 b0,1 b2,3 b4" },
    { "parts of three sizes: no proof",
      { { .gpus = 2 } }, PLACEMENT_PACK,
      { { .n = 2, .gpu = 4500 }, { .n = 2, .gpu = 3500 }, { .n = 2, .gpu = 2000 } }, FL_EXHAUSTED,
      "not now: 2 of 6 bundles have no node" },
    { "strictly on one, never",
      { { .gpus = 4 }, { .gpus = 3 } }, PLACEMENT_STRICT_PACK,
      { { .n = 5, .gpu = ONE } }, FL_INVALID,
      "can never fit: 5 GPU asked on one node, the best, gpu-a, has 4" },
    { "spread",
      { { .gpus = 4 }, { .gpus = 1 }, { .gpus = 4 } }, PLACEMENT_SPREAD,
      { { .n = 5, .gpu = ONE } }, FL_OK, "a0 a1 b0 c0 c1" },
    { "strictly one a node",
      { { .gpus = 4 }, { .gpus = 1 }, { .gpus = 4 } }, PLACEMENT_STRICT_SPREAD,
      { { .n = 1, .gpu = ONE }, { .n = 2, .gpu = 2 * ONE } }, FL_OK, "b0 a0,1 c0,1" },
    { "strictly one a node, too many",
      { { .gpus = 4 }, { .gpus = 4 } }, PLACEMENT_STRICT_SPREAD,
      { { .n = 3, .gpu = ONE } }, FL_INVALID,
      "can never fit: 3 of 3 bundles have no node (2 of 2 may be used); first: gpu-a 10.0.0.1: has "
      "room for one, and one a node is not enough" },
    { "no nodes", { { 0 } }, PLACEMENT_PACK, { { .n = 1, .gpu = ONE } }, FL_INVALID,
      "can never fit: no node has joined" },
    { "nothing asked", { { .gpus = 1 } }, PLACEMENT_PACK, { { 0 } }, FL_INVALID,
      "0 bundles asked" },
};
/* clang-format on */

static void each_row_is_solved(void **state)
{
    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        const struct row *r = &rows[i];
        struct snap *x = snap_new(r->nodes);
        struct asked *a = asked_new(r->how, r->asks);
        struct placement_plan *p = NULL;
        struct fl_str text = FL_STR_HEAP(4096);
        struct fl_err err = { 0 };
        enum fl_status st = placement_solve(&x->s, &a->req, &p, NULL, NULL, &err);

        t_int_eq(st, r->wanted, "%s: %s", r->name, err.text);
        t_true((st == FL_OK) == (p != NULL), "%s", r->name);
        if (st == FL_OK) {
            plan_text(p, &text);
            t_str_eq(fl_str_text(&text), r->plan, "%s", r->name);
        } else {
            t_true(strstr(err.text, r->plan), "%s: %s", r->name, err.text);
        }
        placement_plan_destroy(p);
        fl_str_fini(&text);
        free(a);
        free(x);
    }
}

static void every_node_gets_its_line(void **state)
{
    static const struct snap_node nodes[] = { { .gpus = 4, .busy = 0x7, .label = "x" },
                                              { .gpus = 4, .label = "y" },
                                              { .gpus = 2, .off = true, .label = "x" },
                                              { .gpus = 8, .cpus = 1, .label = "x" },
                                              { 0 } };
    static const struct ask asks[] = { { .n = 4, .gpu = ONE, .cpu = ONE, .zone = "x" }, { 0 } };
    struct snap *x = snap_new(nodes);
    struct asked *a = asked_new(PLACEMENT_PACK, asks);
    struct placement_plan *p = NULL;
    struct placement_why why[8];
    size_t n = FL_LEN(why);
    struct fl_str text = FL_STR_HEAP(4096);
    struct fl_err err = { 0 };

    (void)state;
    t_int_eq(placement_solve(&x->s, &a->req, &p, why, &n, &err), FL_EXHAUSTED, "%s", err.text);
    t_int_eq(n, 4);
    placement_why_text(&x->s, why, n, &text);
    t_str_eq(fl_str_text(&text), "gpu-a 10.0.0.1: 4 GPU asked, 1 free of 4\n"
                                 "gpu-b 10.0.0.2: label zone does not match\n"
                                 "gpu-c 10.0.0.3: takes no work now\n"
                                 "gpu-d 10.0.0.4: 4 CPU asked, 1 free of 1\n");
    n = 1; /* less room than nodes */
    t_int_eq(placement_solve(&x->s, &a->req, &p, why, &n, &err), FL_EXHAUSTED);
    t_int_eq(n, 1);
    fl_str_fini(&text);
    free(a);
    free(x);
}

/* Takes what the plan gives and finds nothing given twice, nothing in parts, no rule broken. */
static void check_plan(const struct snap *x, const struct asked *a, const struct placement_plan *p,
                       int round)
{
    int64_t devices[SNAP_NODES][SNAP_DEVICES], cpus[SNAP_NODES];
    unsigned bundles[SNAP_NODES] = { 0 }, nodes = 0;

    for (size_t n = 0; n < x->s.n_nodes; n++) {
        cpus[n] = x->free[n][0].e4;
        for (size_t d = 0; d < x->nodes[n].n_devices; d++)
            devices[n][d] = x->devices[n][d].free_e4;
    }
    t_int_eq(p->n_slots, a->req.n_bundles);
    for (size_t i = 0; i < p->n_slots; i++) {
        const struct placement_slot *s = &p->slots[i];
        int64_t left = a->wants[i][0].e4;

        nodes += bundles[s->node]++ == 0;
        cpus[s->node] -= a->wants[i][1].e4;
        t_true(x->nodes[s->node].takes_work, "round %d", round);
        for (uint32_t k = 0; k < s->n_devices; k++) {
            uint32_t d = p->devices[s->first_device + k];
            int64_t part = left < ONE ? left : ONE;

            t_true(d < x->nodes[s->node].n_devices, "round %d", round);
            devices[s->node][d] -= part;
            left -= part;
            t_true(devices[s->node][d] >= 0, "round %d: device %u given twice", round, d);
        }
        t_int_eq(left, 0, "round %d", round);
        t_true(cpus[s->node] >= 0, "round %d: cores given twice", round);
    }
    if (a->req.strategy == PLACEMENT_STRICT_PACK)
        t_int_eq(nodes, 1, "round %d", round);
    if (a->req.strategy == PLACEMENT_STRICT_SPREAD)
        t_int_eq(nodes, p->n_slots, "round %d", round);
}

static void random_requests_hold(void **state)
{
    uint64_t seed = 5;
    unsigned ends[FL_STATUS_COUNT] = { 0 };

    (void)state;
    for (int round = 0; round < 4000; round++) {
        struct snap_node nodes[8] = { 0 };
        struct ask asks[4] = { 0 };

        for (size_t i = 0, n = 1 + t_random(&seed) % 7; i < n; i++)
            nodes[i] = (struct snap_node){ .gpus = (int)(t_random(&seed) % 9),
                                           .cpus = 1 + (int)(t_random(&seed) % 16),
                                           .busy = (int)(t_random(&seed) & t_random(&seed)),
                                           .off = t_random(&seed) % 8 == 0 };
        for (size_t i = 0, n = 1 + t_random(&seed) % 3; i < n; i++)
            asks[i] =
                (struct ask){ .n = 1 + (unsigned)(t_random(&seed) % 8),
                              .gpu = t_random(&seed) % 2 ? (int64_t)(t_random(&seed) % 4) * ONE
                                                         : (int64_t)(t_random(&seed) % ONE),
                              .cpu = (int64_t)(t_random(&seed) % 20000) };
        struct snap *x = snap_new(nodes);
        struct asked *a = asked_new((enum placement_strategy)(t_random(&seed) % 4), asks);
        struct placement_plan *p = NULL, *again = NULL;
        struct placement_why why[8];
        size_t n_why = FL_LEN(why);
        struct fl_err err = { 0 };
        enum fl_status st = placement_solve(&x->s, &a->req, &p, why, &n_why, &err);

        ends[st]++;
        t_int_eq(placement_solve(&x->s, &a->req, &again, NULL, NULL, &err), st, "round %d", round);
        if (st == FL_OK) {
            check_plan(x, a, p, round);
            t_mem_eq(p->slots, again->slots, p->n_slots * sizeof(p->slots[0]), "round %d", round);
            t_mem_eq(p->devices, again->devices, p->n_devices * sizeof(p->devices[0]), "round %d",
                     round);
        } else {
            t_refused(st, st == FL_INVALID ? FL_INVALID : FL_EXHAUSTED, &err);
            t_int_eq(n_why, x->s.n_nodes, "round %d", round);
        }
        placement_plan_destroy(p);
        placement_plan_destroy(again);
        free(a);
        free(x);
    }
    t_true(ends[FL_OK] > 500 && ends[FL_INVALID] > 500 && ends[FL_EXHAUSTED] > 200,
           "ok %u, never %u, not now %u", ends[FL_OK], ends[FL_INVALID], ends[FL_EXHAUSTED]);
}

/* ---- against every way there is ---- */

struct left { /* on each node, while ways are tried */
    int64_t cpus[SNAP_NODES], devices[SNAP_NODES][SNAP_DEVICES];
    unsigned bundles[SNAP_NODES];
};

static bool any_way(const struct snap *x, const struct asked *a, bool empty, struct left *l,
                    size_t at);

static bool ways_of_parts(const struct snap *x, const struct asked *a, bool empty, struct left *l,
                          size_t at, size_t node)
{
    int64_t part = a->wants[at][0].e4;
    bool fits = false;

    for (size_t d = 0; d < x->nodes[node].n_devices && !fits; d++) {
        if (l->devices[node][d] < part)
            continue;
        l->devices[node][d] -= part;
        fits = any_way(x, a, empty, l, at + 1);
        l->devices[node][d] += part;
    }
    return fits;
}

/* Whole devices are alike: the first that are free do for all. */
static bool way_of_whole(const struct snap *x, const struct asked *a, bool empty, struct left *l,
                         size_t at, size_t node)
{
    int64_t want = a->wants[at][0].e4 / ONE;
    struct left was = *l;

    for (size_t d = 0; d < x->nodes[node].n_devices && want; d++)
        if (l->devices[node][d] == ONE) {
            l->devices[node][d] = 0;
            want--;
        }
    bool fits = !want && any_way(x, a, empty, l, at + 1);

    *l = was;
    return fits;
}

static bool any_way(const struct snap *x, const struct asked *a, bool empty, struct left *l,
                    size_t at)
{
    const struct placement_bundle *b = &a->bundles[at];
    bool fits = at == a->req.n_bundles;

    for (size_t n = 0; n < x->s.n_nodes && !fits; n++) {
        int64_t gpu = a->wants[at][0].e4, cpu = a->wants[at][1].e4;

        if ((!empty && !x->nodes[n].takes_work) || l->cpus[n] < cpu ||
            (b->affinity == PLACEMENT_ONLY && b->node.b[0] != n + 1) ||
            (a->req.strategy == PLACEMENT_STRICT_SPREAD && l->bundles[n]) ||
            (a->req.strategy == PLACEMENT_STRICT_PACK && l->bundles[n] != at))
            continue;
        l->cpus[n] -= cpu;
        l->bundles[n]++;
        fits = gpu > 0 && gpu < ONE ? ways_of_parts(x, a, empty, l, at, n)
                                    : way_of_whole(x, a, empty, l, at, n);
        l->bundles[n]--;
        l->cpus[n] += cpu;
    }
    return fits;
}

static bool fits_somehow(const struct snap *x, const struct asked *a, bool empty)
{
    struct left l = { 0 };

    for (size_t n = 0; n < x->s.n_nodes; n++) {
        l.cpus[n] = (empty ? x->total : x->free)[n][0].e4;
        for (size_t d = 0; d < x->nodes[n].n_devices; d++)
            l.devices[n][d] = empty ? ONE : x->devices[n][d].free_e4;
    }
    return any_way(x, a, empty, &l, 0);
}

/* Small requests of several kinds: placed where there is a way, "not now" where an empty cluster
 * has one, "never" where it has none. With parts of several sizes "not now" may be said for either.
 */
static void small_ones_get_the_true_answer(void **state)
{
    uint64_t seed = 11;
    unsigned ends[FL_STATUS_COUNT] = { 0 };

    (void)state;
    for (int round = 0; round < 6000; round++) {
        struct snap_node nodes[5] = { 0 };
        struct ask asks[4] = { 0 };
        int64_t part = 3000 + (int64_t)(t_random(&seed) % 3) * 1000;
        bool alike = true;
        size_t n_nodes = 1 + t_random(&seed) % 4;

        for (size_t i = 0; i < n_nodes; i++)
            nodes[i] = (struct snap_node){ .gpus = (int)(t_random(&seed) % 6),
                                           .cpus = 1 + (int)(t_random(&seed) % 6),
                                           .busy = (int)(t_random(&seed) & t_random(&seed)),
                                           .off = t_random(&seed) % 8 == 0 };
        for (size_t i = 0, n = 2 + t_random(&seed) % 2; i < n; i++) {
            asks[i] = (struct ask){ .n = 1 + (unsigned)(t_random(&seed) % 3),
                                    .gpu = (int64_t)(t_random(&seed) % 4) * ONE,
                                    .cpu = (int64_t)(t_random(&seed) % 4) * ONE / 2 };
            if (t_random(&seed) % 4 == 0) {
                asks[i].gpu = t_random(&seed) % 8 ? part : part + 500;
                alike = alike && asks[i].gpu == part;
            }
            if (t_random(&seed) % 8 == 0) {
                asks[i].affinity = PLACEMENT_ONLY;
                asks[i].node = 1 + (int)(t_random(&seed) % n_nodes);
            }
        }
        struct snap *x = snap_new(nodes);
        struct asked *a = asked_new((enum placement_strategy)(t_random(&seed) % 4), asks);
        bool now = fits_somehow(x, a, false), ever = now || fits_somehow(x, a, true);
        struct placement_plan *p = NULL;
        struct fl_err err = { 0 };
        enum fl_status st = placement_solve(&x->s, &a->req, &p, NULL, NULL, &err);

        ends[st]++;
        if (st == FL_OK)
            check_plan(x, a, p, round);
        t_true(st != FL_OK || now, "round %d: placed where no way is", round);
        t_true(st != FL_INVALID || !ever, "round %d: %s", round, err.text);
        t_true(!alike || (st == FL_OK) == now, "round %d: there is a way; %s", round, err.text);
        t_true(!alike || (st == FL_INVALID) == !ever, "round %d: it never fits; %s", round,
               err.text);
        placement_plan_destroy(p);
        free(a);
        free(x);
    }
    t_true(ends[FL_OK] > 1000 && ends[FL_INVALID] > 1000 && ends[FL_EXHAUSTED] > 300,
           "ok %u, never %u, not now %u", ends[FL_OK], ends[FL_INVALID], ends[FL_EXHAUSTED]);
}

/* A node for each bundle, and one bundle too many. Of nodes that are alike one way stands for all,
 * and it never fits; of others there are more ways than are looked at, and nothing is proved. */
static void a_search_ends(void **state)
{
    static const char *const names[] = { "GPU", "CPU" };
    enum { NODES = 100, WIDE = 5 };
    static struct placement_device devices[WIDE];
    static struct placement_node nodes[NODES];
    static struct fl_amount all[NODES][2];
    static struct placement_bundle bundles[NODES + 1];
    struct fl_amount three = { 0, 3 * ONE }, four = { 0, 4 * ONE };

    (void)state;
    for (size_t d = 0; d < WIDE; d++)
        devices[d] = (struct placement_device){ .id = "0", .free_e4 = ONE };
    for (size_t i = 0; i <= NODES; i++)
        bundles[i] =
            (struct placement_bundle){ .wants = i < NODES / 2 ? &four : &three, .n_wants = 1 };
    for (int alike = 0; alike < 2; alike++) {
        struct placement_snapshot s = {
            .resources = names, .nodes = nodes, .n_resources = 2, .n_nodes = NODES
        };
        struct placement_request req = { PLACEMENT_PACK, bundles, NODES + 1 };
        struct placement_plan *p = NULL;
        struct timespec start, end;
        struct fl_err err;

        for (size_t i = 0; i < NODES; i++) {
            all[i][0] = (struct fl_amount){ 0, WIDE * ONE };
            all[i][1] = (struct fl_amount){ 1, alike ? ONE : (int64_t)(i + 1) * ONE };
            nodes[i] = (struct placement_node){ .name = "n",
                                                .addr = "10.0.0.1",
                                                .takes_work = true,
                                                .total = all[i],
                                                .free = all[i],
                                                .devices = devices,
                                                .n_amounts = 2,
                                                .n_devices = WIDE };
            memcpy(&nodes[i].who.id, &i, sizeof(i));
        }
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
        t_refused(placement_solve(&s, &req, &p, NULL, NULL, &err),
                  alike ? FL_INVALID : FL_EXHAUSTED, &err);
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
        double took =
            (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec) / 1e9;

        printf("# %d nodes, %s: %.4f s\n", NODES, alike ? "alike" : "each another", took);
        t_true(took < 0.1 * T_SLOWDOWN, "took %.3f s", took);
    }
}

/* 10,000 nodes of 8. The time is processor time of this thread, so a busy machine does not fail it.
 */
static void ten_thousand_nodes_are_planned(void **state)
{
    enum { NODES = 10000, WIDE = 8 };
    static const char *const names[] = { "GPU" };
    struct placement_node *nodes = calloc(NODES, sizeof(*nodes));
    struct placement_device *devices = calloc(WIDE, sizeof(*devices));
    struct placement_bundle *bundles = calloc(NODES * WIDE, sizeof(*bundles));
    struct fl_amount all = { 0, WIDE * ONE }, want = { 0, ONE };
    struct placement_snapshot s = {
        .resources = names, .nodes = nodes, .n_resources = 1, .n_nodes = NODES
    };
    struct timespec start, end;

    (void)state;
    for (size_t d = 0; d < WIDE; d++)
        devices[d] = (struct placement_device){ .id = "0", .free_e4 = ONE };
    for (size_t i = 0; i < NODES; i++) {
        nodes[i] = (struct placement_node){ .name = "n",
                                            .addr = "10.0.0.1",
                                            .takes_work = true,
                                            .total = &all,
                                            .free = &all,
                                            .devices = devices,
                                            .n_amounts = 1,
                                            .n_devices = WIDE };
        memcpy(&nodes[i].who.id, &i, sizeof(i));
    }
    for (size_t i = 0; i < NODES * WIDE; i++)
        bundles[i] = (struct placement_bundle){ .wants = &want, .n_wants = 1 };
    for (int how = PLACEMENT_PACK; how <= PLACEMENT_SPREAD; how++) {
        struct placement_request req = { (enum placement_strategy)how, bundles, NODES * WIDE };
        struct placement_plan *p = NULL;
        struct fl_err err = { 0 };

        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
        t_ok(placement_solve(&s, &req, &p, NULL, NULL, &err), &err);
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
        double took =
            (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec) / 1e9;

        t_int_eq(p->n_devices, NODES * WIDE);
        printf("# %d nodes of %d, strategy %d: %.3f s\n", NODES, WIDE, how, took);
        t_true(took < 1.0 * T_SLOWDOWN, "took %.3f s", took);
        placement_plan_destroy(p);
    }
    free(nodes);
    free(devices);
    free(bundles);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_row_is_solved),   cmocka_unit_test(every_node_gets_its_line),
        cmocka_unit_test(random_requests_hold), cmocka_unit_test(small_ones_get_the_true_answer),
        cmocka_unit_test(a_search_ends),        cmocka_unit_test(ten_thousand_nodes_are_planned),
    };

    return t_run("solve", tests);
}
