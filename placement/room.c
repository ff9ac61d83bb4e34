#include "placement/solve_priv.h"

#include <assert.h>
#include <stdlib.h>

enum fl_status room_init(struct room *r, const struct placement_snapshot *snap, bool empty,
                         struct fl_err *err)
{
    size_t all = 0;

    *r = (struct room){ .snap = snap, .gpu = UINT32_MAX, .empty = empty };
    for (size_t i = 0; i < snap->n_resources; i++)
        if (strcmp(snap->resources[i], "GPU") == 0)
            r->gpu = (uint32_t)i;
    for (size_t i = 0; i < snap->n_nodes; i++)
        all += snap->nodes[i].n_amounts + snap->nodes[i].n_devices;
    r->nodes = calloc(snap->n_nodes + 1, sizeof(*r->nodes));
    r->store = malloc((all + 1) * sizeof(*r->store));
    if (!r->nodes || !r->store) {
        room_fini(r);
        return fl_fail(err, FL_EXHAUSTED, "no memory to place on %zu nodes", snap->n_nodes);
    }
    room_reset(r);
    return FL_OK;
}

void room_reset(struct room *r)
{
    int64_t *at = r->store;

    for (size_t i = 0; i < r->snap->n_nodes; i++) {
        const struct placement_node *n = &r->snap->nodes[i];

        r->nodes[i].bundles = 0;
        r->nodes[i].amounts = at;
        for (size_t k = 0; k < n->n_amounts; k++)
            *at++ = (r->empty ? n->total : n->free)[k].e4;
        r->nodes[i].devices = at;
        for (size_t k = 0; k < n->n_devices; k++)
            *at++ = r->empty ? PLACEMENT_ONE : n->devices[k].free_e4;
    }
}

void room_fini(struct room *r)
{
    free(r->nodes);
    free(r->store);
    r->nodes = NULL;
    r->store = NULL;
}

int64_t bundle_wants(const struct placement_bundle *b, uint32_t resource)
{
    int64_t e4 = 0;

    for (size_t i = 0; i < b->n_wants; i++)
        if (b->wants[i].resource == resource)
            e4 += b->wants[i].e4;
    return e4;
}

uint32_t room_devices_of(const struct room *r, const struct placement_bundle *b)
{
    int64_t e4 = bundle_wants(b, r->gpu);

    return (uint32_t)((e4 + PLACEMENT_ONE - 1) / PLACEMENT_ONE);
}

int64_t room_has(const struct room *r, size_t node, uint32_t resource)
{
    const struct placement_node *n = &r->snap->nodes[node];
    int64_t e4 = 0;

    if (resource == r->gpu) {
        for (size_t i = 0; i < n->n_devices; i++)
            e4 += r->nodes[node].devices[i];
        return e4;
    }
    for (size_t i = 0; i < n->n_amounts; i++)
        if (n->total[i].resource == resource)
            return r->nodes[node].amounts[i];
    return 0;
}

/* ---- rules ---- */

static bool in_list(const char *list, size_t len, const char *word)
{
    size_t word_len = strlen(word);

    for (const char *p = list, *end = list + len; p <= end;) {
        const char *stop = memchr(p, ',', (size_t)(end - p));

        stop = stop ? stop : end;
        if ((size_t)(stop - p) == word_len && memcmp(p, word, word_len) == 0)
            return true;
        p = stop + 1;
    }
    return false;
}

/* "v", "!v", "in(a,b)", "!in(a,b)"; a node without the label satisfies the negative ones */
static bool label_holds(const char *must, const char *has)
{
    bool not = *must == '!';
    size_t len = strlen(must += not );
    bool in = len > 3 && memcmp(must, "in(", 3) == 0 && must[len - 1] == ')';

    if (!has)
        return not ;
    return not != (in ? in_list(must + 3, len - 4, has) : strcmp(must, has) == 0);
}

const char *room_rule(const struct room *r, size_t node, const struct placement_bundle *b,
                      const char **label)
{
    const struct placement_node *n = &r->snap->nodes[node];

    *label = NULL;
    if (!n->takes_work && !r->empty)
        return "takes no work now";
    if (n->avoid && r->careful)
        return "is avoided";
    if (b->affinity == PLACEMENT_ONLY && memcmp(&b->node, &n->who.id, sizeof(b->node)) != 0)
        return "another node is required";
    for (size_t i = 0; i < b->n_must; i++) {
        const char *has = NULL;

        for (size_t k = 0; k < n->n_labels && !has; k++)
            if (strcmp(n->labels[k].key, b->must[i].key) == 0)
                has = n->labels[k].value;
        if (!label_holds(b->must[i].value, has)) {
            *label = b->must[i].key;
            return "does not match";
        }
    }
    return NULL;
}

/* ---- amounts and devices ---- */

uint32_t room_fits(const struct room *r, size_t node, const struct placement_bundle *b)
{
    const struct placement_node *n = &r->snap->nodes[node];
    int64_t fits = UINT32_MAX;

    for (size_t i = 0; i < b->n_wants; i++) {
        int64_t want = bundle_wants(b, b->wants[i].resource), can = 0;

        if (want == 0)
            continue;
        if (b->wants[i].resource != r->gpu)
            can = room_has(r, node, b->wants[i].resource) / want;
        else if (want < PLACEMENT_ONE)
            for (size_t k = 0; k < n->n_devices; k++)
                can += r->nodes[node].devices[k] / want;
        else {
            for (size_t k = 0; k < n->n_devices; k++)
                can += r->nodes[node].devices[k] == PLACEMENT_ONE;
            can /= want / PLACEMENT_ONE;
        }
        fits = can < fits ? can : fits;
    }
    return fits < 0 ? 0 : (uint32_t)fits;
}

static uint32_t island_free(const struct room *r, size_t node, uint16_t island)
{
    const struct placement_node *n = &r->snap->nodes[node];
    uint32_t free = 0;

    for (size_t i = 0; i < n->n_devices; i++)
        free += n->devices[i].island == island && r->nodes[node].devices[i] == PLACEMENT_ONE;
    return free;
}

/* The island with the fewest whole devices that still has all that are wanted; if none has, the one
 * with the most. The first of equals. */
static uint16_t island_for(const struct room *r, size_t node, uint32_t wanted)
{
    const struct placement_node *n = &r->snap->nodes[node];
    uint32_t best = 0;
    uint16_t island = 0;

    for (size_t i = 0; i < n->n_devices; i++) {
        uint32_t free = island_free(r, node, n->devices[i].island);
        bool enough = free >= wanted, had = best >= wanted;

        if (free && (!best || (enough && !had) || (enough && had && free < best) ||
                     (!enough && !had && free > best))) {
            best = free;
            island = n->devices[i].island;
        }
    }
    return island;
}

static uint32_t *take_whole(struct room *r, size_t node, uint32_t wanted, uint32_t *out)
{
    const struct placement_node *n = &r->snap->nodes[node];

    while (wanted) {
        uint16_t island = island_for(r, node, wanted);

        for (size_t i = 0; i < n->n_devices && wanted; i++) {
            if (n->devices[i].island != island || r->nodes[node].devices[i] != PLACEMENT_ONE)
                continue;
            r->nodes[node].devices[i] = 0;
            wanted--;
            if (out)
                *out++ = (uint32_t)i;
        }
    }
    return out;
}

/* The device that is left with the least, so that whole ones stay whole. */
static uint32_t *take_part(struct room *r, size_t node, int64_t want, uint32_t *out)
{
    int64_t *devices = r->nodes[node].devices;
    size_t best = SIZE_MAX;

    for (size_t i = 0; i < r->snap->nodes[node].n_devices; i++)
        if (devices[i] >= want && (best == SIZE_MAX || devices[i] < devices[best]))
            best = i;
    assert(best != SIZE_MAX);
    devices[best] -= want;
    if (out)
        *out++ = (uint32_t)best;
    return out;
}

void room_take(struct room *r, size_t node, const struct placement_bundle *b, uint32_t n,
               uint32_t *devices)
{
    const struct placement_node *nd = &r->snap->nodes[node];
    int64_t gpus = bundle_wants(b, r->gpu);

    for (size_t i = 0; i < b->n_wants; i++)
        for (size_t k = 0; k < nd->n_amounts; k++)
            if (nd->total[k].resource == b->wants[i].resource)
                r->nodes[node].amounts[k] -= n * b->wants[i].e4;
    r->nodes[node].bundles += n;
    if (gpus >= PLACEMENT_ONE)
        take_whole(r, node, (uint32_t)(n * (gpus / PLACEMENT_ONE)), devices);
    else if (gpus > 0)
        for (uint32_t i = 0; i < n; i++)
            devices = take_part(r, node, gpus, devices);
}
