#include "placement/solve_priv.h"

#include <stdlib.h>

/* Several kinds of bundles share nodes: how many of the first one each node takes decides what is left
 * for the next. Depth first, kind by kind and node by node, the most a node takes first; of nodes that
 * are alike a later one takes no more than an earlier one. */
enum {
    DEPTH_MAX = 4096, /* kinds times nodes: how deep it goes, 0.2 KiB each */
    LOOKS_MAX = 50000 /* at nodes: some milliseconds */
};
struct search {
    struct room *r;
    const struct kind *kinds;
    size_t n_kinds, n_nodes, words; /* words: of the room's store */
    bool one_each;
    uint32_t *take, *fits, *rest; /* of each kind and node; rest: fits of this node and those behind it */
    bool *allowed;                /* by the rules */
    size_t *like;                 /* of each node, the last one before it that is like it; SIZE_MAX: none */
    int64_t *before;              /* the store, for each kind, before it was placed */
    unsigned looks;
    bool cut;
};

static size_t words_of(const struct search *q, size_t node)
{
    const struct placement_node *n = &q->r->snap->nodes[node];

    return n->n_amounts + n->n_devices;
}

static bool same_form(const struct search *q, size_t a, size_t b)
{
    const struct placement_node *x = &q->r->snap->nodes[a], *y = &q->r->snap->nodes[b];
    bool same = x->n_amounts == y->n_amounts && x->n_devices == y->n_devices;

    for (size_t i = 0; same && i < x->n_amounts; i++)
        same = x->total[i].resource == y->total[i].resource;
    for (size_t k = 0; same && k < q->n_kinds; k++)
        same = q->allowed[k * q->n_nodes + a] == q->allowed[k * q->n_nodes + b];
    return same;
}

static bool kind_search(struct search *q, size_t k);

/* As many as the like node before took, where both had the same left. */
static uint32_t most_of(const struct search *q, size_t k, size_t node, uint32_t left)
{
    const uint32_t *fits = &q->fits[k * q->n_nodes];
    uint32_t most = fits[node] < left ? fits[node] : left;
    size_t like = q->like[node];

    if (like == SIZE_MAX || fits[like] != fits[node])
        return most;
    const int64_t *was = q->before + k * q->words + (q->r->nodes[like].amounts - q->r->store);

    if (memcmp(was, q->r->nodes[node].amounts, words_of(q, node) * sizeof(*was)) != 0)
        return most;
    uint32_t there = q->take[k * q->n_nodes + like];

    return there < most ? there : most;
}

static bool node_search(struct search *q, size_t k, size_t node, uint32_t left)
{
    if (left == 0)
        return kind_search(q, k + 1);
    if (node == q->n_nodes || q->rest[k * q->n_nodes + node] < left)
        return false;
    struct room_node *at = &q->r->nodes[node];
    const int64_t *was = q->before + k * q->words + (at->amounts - q->r->store);
    uint32_t *take = &q->take[k * q->n_nodes + node];

    for (uint32_t most = most_of(q, k, node, left), t = most + 1; t-- > 0 && !q->cut;) {
        if (t)
            room_take(q->r, node, q->kinds[k].bundle, t, NULL);
        *take = t;
        if (node_search(q, k, node + 1, left - t))
            return true;
        memcpy(at->amounts, was, words_of(q, node) * sizeof(*was));
        at->bundles -= t;
        q->cut = q->cut || ++q->looks > LOOKS_MAX;
    }
    *take = 0;
    return false;
}

static bool kind_search(struct search *q, size_t k)
{
    if (k == q->n_kinds)
        return true;
    uint32_t *fits = &q->fits[k * q->n_nodes], *rest = &q->rest[k * q->n_nodes];
    uint64_t sum = 0;

    memcpy(q->before + k * q->words, q->r->store, q->words * sizeof(*q->before));
    memset(&q->take[k * q->n_nodes], 0, q->n_nodes * sizeof(*q->take));
    for (size_t i = q->n_nodes; i-- > 0;) {
        fits[i] = q->allowed[k * q->n_nodes + i] ? room_fits(q->r, i, q->kinds[k].bundle) : 0;
        if (q->one_each)
            fits[i] = fits[i] && !q->r->nodes[i].bundles;
        sum += fits[i];
        rest[i] = sum < UINT32_MAX ? (uint32_t)sum : UINT32_MAX;
    }
    q->looks += (unsigned)q->n_nodes;
    return node_search(q, k, 0, q->kinds[k].n);
}

static bool search_init(struct search *q)
{
    size_t n = q->n_kinds * q->n_nodes;
    const char *label;

    for (size_t i = 0; i < q->n_nodes; i++)
        q->words += words_of(q, i);
    q->fits = calloc(n, sizeof(*q->fits));
    q->rest = calloc(n, sizeof(*q->rest));
    q->allowed = calloc(n, sizeof(*q->allowed));
    q->like = calloc(q->n_nodes, sizeof(*q->like));
    q->before = calloc(q->n_kinds * q->words + 1, sizeof(*q->before));
    if (!q->fits || !q->rest || !q->allowed || !q->like || !q->before)
        return false;
    for (size_t k = 0; k < q->n_kinds; k++)
        for (size_t i = 0; i < q->n_nodes; i++)
            q->allowed[k * q->n_nodes + i] = !room_rule(q->r, i, q->kinds[k].bundle, &label);
    for (size_t i = 0; i < q->n_nodes; i++) {
        q->like[i] = SIZE_MAX;
        for (size_t j = i; j-- > 0 && q->like[i] == SIZE_MAX;)
            if (same_form(q, i, j))
                q->like[i] = j;
    }
    return true;
}

enum search_end search_run(struct room *r, const struct kind *kinds, size_t n_kinds, bool one_each,
                           uint32_t *take)
{
    struct search q = { .r = r,
                        .kinds = kinds,
                        .n_kinds = n_kinds,
                        .n_nodes = r->snap->n_nodes,
                        .one_each = one_each,
                        .take = take };
    enum search_end end = SEARCH_CUT;

    if (n_kinds == 0 || q.n_nodes == 0 || n_kinds > DEPTH_MAX / q.n_nodes)
        return SEARCH_CUT;
    if (search_init(&q))
        end = kind_search(&q, 0) ? SEARCH_FOUND : q.cut ? SEARCH_CUT : SEARCH_NONE;
    free(q.fits);
    free(q.rest);
    free(q.allowed);
    free(q.like);
    free(q.before);
    return end;
}
