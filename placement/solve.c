#include "placement/placement.h"

#include <stdlib.h>

#include "placement/solve_priv.h"

enum { BUNDLES_MAX = 1 << 20 };

/* Made once a request, used for the cluster as it is and, if that fails, for an empty one. */
struct solver {
    const struct placement_snapshot *snap;
    const struct placement_request *req;
    uint32_t *sorted; /* bundles, those that ask for the same beside each other */
    struct kind *kinds;
    size_t n_kinds;
    uint32_t *take; /* per node, of the kind in hand */
    uint32_t *fits;
    uint32_t *order;
    int64_t *scratch;            /* room of the largest node */
    struct placement_plan *plan; /* NULL: only whether it fits */
    const struct kind *stuck;
};

/* ---- kinds ---- */

static int bytes_cmp(const void *a, size_t na, const void *b, size_t nb)
{
    return na != nb ? (na < nb ? -1 : 1) : na ? memcmp(a, b, na) : 0;
}

static int wants_cmp(const struct placement_bundle *a, const struct placement_bundle *b)
{
    if (a->n_wants != b->n_wants)
        return a->n_wants < b->n_wants ? -1 : 1;
    for (size_t i = 0; i < a->n_wants; i++) {
        const struct fl_amount *x = &a->wants[i], *y = &b->wants[i];

        if (x->resource != y->resource)
            return x->resource < y->resource ? -1 : 1;
        if (x->e4 != y->e4)
            return x->e4 < y->e4 ? -1 : 1;
    }
    return 0;
}

static int bundle_cmp(const struct placement_bundle *a, const struct placement_bundle *b)
{
    int c = a->affinity != b->affinity ? (a->affinity < b->affinity ? -1 : 1) : 0;

    if (!c && a->affinity != PLACEMENT_ANYWHERE)
        c = bytes_cmp(&a->node, sizeof(a->node), &b->node, sizeof(b->node));
    if (!c)
        c = wants_cmp(a, b);
    if (!c && a->n_must != b->n_must)
        c = a->n_must < b->n_must ? -1 : 1;
    for (size_t i = 0; !c && i < a->n_must; i++) {
        c = strcmp(a->must[i].key, b->must[i].key);
        c = c ? c : strcmp(a->must[i].value, b->must[i].value);
    }
    return c;
}

static int by_content(const void *a, const void *b, void *arg)
{
    const struct placement_request *req = arg;
    uint32_t i = *(const uint32_t *)a, k = *(const uint32_t *)b;
    int c = bundle_cmp(&req->bundles[i], &req->bundles[k]);

    return c ? c : i < k ? -1 : 1;
}

/* Fewest nodes first, then the largest, then in the order of the request. */
static int by_constraint(const void *a, const void *b, void *arg)
{
    const struct solver *s = arg;
    const struct kind *x = a, *y = b;
    int c;

    if (x->nodes != y->nodes)
        return x->nodes < y->nodes ? -1 : 1;
    for (uint32_t r = 0; r < s->snap->n_resources; r++) {
        int64_t wx = bundle_wants(x->bundle, r), wy = bundle_wants(y->bundle, r);

        if (strcmp(s->snap->resources[r], "GPU") == 0 && wx != wy)
            return wx > wy ? -1 : 1;
    }
    c = wants_cmp(y->bundle, x->bundle);
    return c ? c : s->sorted[x->first] < s->sorted[y->first] ? -1 : 1;
}

static void kinds_make(struct solver *s, const struct room *empty)
{
    const struct placement_bundle *bundles = s->req->bundles;
    const char *label;

    for (size_t i = 0; i < s->req->n_bundles; i++)
        s->sorted[i] = (uint32_t)i;
    qsort_r(s->sorted, s->req->n_bundles, sizeof(s->sorted[0]), by_content, (void *)s->req);
    for (size_t i = 0; i < s->req->n_bundles; i++) {
        const struct placement_bundle *b = &bundles[s->sorted[i]];
        struct kind *last = s->n_kinds ? &s->kinds[s->n_kinds - 1] : NULL;

        if (last && bundle_cmp(last->bundle, b) == 0)
            last->n++;
        else
            s->kinds[s->n_kinds++] = (struct kind){ .bundle = b, .first = (uint32_t)i, .n = 1 };
    }
    if (s->n_kinds == 1)
        return;
    for (size_t k = 0; k < s->n_kinds; k++)
        for (size_t i = 0; i < s->snap->n_nodes; i++)
            s->kinds[k].nodes += !room_rule(empty, i, s->kinds[k].bundle, &label) &&
                                 room_fits(empty, i, s->kinds[k].bundle) > 0;
    qsort_r(s->kinds, s->n_kinds, sizeof(s->kinds[0]), by_constraint, s);
}

/* ---- one kind over the nodes: fills s->take ---- */

static bool preferred(const struct solver *s, const struct placement_bundle *b, size_t node)
{
    return b->affinity == PLACEMENT_PREFER &&
           memcmp(&b->node, &s->snap->nodes[node].who.id, sizeof(b->node)) == 0;
}

struct pack_order {
    const struct solver *s;
    const struct room *r;
    const struct placement_bundle *b;
};

/* The preferred node, then nodes that this request has opened, then those that take the most. */
static int by_pack(const void *a, const void *b, void *arg)
{
    const struct pack_order *o = arg;
    uint32_t i = *(const uint32_t *)a, k = *(const uint32_t *)b;
    bool pi = preferred(o->s, o->b, i), pk = preferred(o->s, o->b, k);
    bool ui = o->r->nodes[i].bundles, uk = o->r->nodes[k].bundles;

    if (pi != pk)
        return pi ? -1 : 1;
    if (ui != uk)
        return ui ? -1 : 1;
    if (o->s->fits[i] != o->s->fits[k])
        return o->s->fits[i] > o->s->fits[k] ? -1 : 1;
    return i < k ? -1 : 1;
}

/* Of the nodes from place at on the one that takes all of left and keeps the least. */
static size_t tightest(const struct solver *s, const struct room *r, size_t at, size_t n,
                       uint32_t left)
{
    size_t best = SIZE_MAX;

    for (size_t i = at; i < n; i++) {
        uint32_t node = s->order[i], fits = s->fits[node];

        if (fits < left)
            continue;
        if (best == SIZE_MAX) {
            best = node;
            continue;
        }
        bool open = r->nodes[node].bundles, open_best = r->nodes[best].bundles;

        if (open != open_best ? open
                              : fits < s->fits[best] || (fits == s->fits[best] && node < best))
            best = node;
    }
    return best;
}

static uint32_t kind_pack(struct solver *s, const struct room *r, const struct kind *k)
{
    struct pack_order how = { s, r, k->bundle };
    uint32_t left = k->n, most = 0;
    size_t n = 0;

    for (size_t i = 0; i < s->snap->n_nodes; i++)
        if (s->fits[i]) {
            s->order[n++] = (uint32_t)i;
            most = s->fits[i] > most ? s->fits[i] : most;
        }
    qsort_r(s->order, n, sizeof(s->order[0]), by_pack, &how);
    for (size_t i = 0; i < n && left; i++) {
        uint32_t node = s->order[i];
        size_t all = SIZE_MAX;

        if (most >= left && !preferred(s, k->bundle, node))
            all = tightest(s, r, i, n, left);
        node = all == SIZE_MAX ? node : (uint32_t)all;
        s->take[node] = s->fits[node] < left ? s->fits[node] : left;
        left -= s->take[node];
    }
    return left;
}

static int by_spread(const void *a, const void *b, void *arg)
{
    const struct pack_order *o = arg;
    uint32_t i = *(const uint32_t *)a, k = *(const uint32_t *)b;
    bool pi = preferred(o->s, o->b, i), pk = preferred(o->s, o->b, k);
    uint32_t ni = o->r->nodes[i].bundles, nk = o->r->nodes[k].bundles;

    if (pi != pk)
        return pi ? -1 : 1;
    return ni != nk ? (ni < nk ? -1 : 1) : i < k ? -1 : 1;
}

/* Level by level: nobody gets another one while somebody who could has fewer. */
static uint32_t kind_spread(struct solver *s, const struct room *r, const struct kind *k)
{
    struct pack_order how = { s, r, k->bundle };
    bool strict = s->req->strategy == PLACEMENT_STRICT_SPREAD;
    uint32_t left = k->n, level = UINT32_MAX;
    size_t n = 0;

    for (size_t i = 0; i < s->snap->n_nodes; i++)
        if (s->fits[i] && !(strict && r->nodes[i].bundles)) {
            s->order[n++] = (uint32_t)i;
            level = r->nodes[i].bundles < level ? r->nodes[i].bundles : level;
        }
    qsort_r(s->order, n, sizeof(s->order[0]), by_spread, &how);
    while (left && n) {
        size_t stay = 0;

        for (size_t i = 0; i < n; i++) {
            uint32_t node = s->order[i];

            if (left && r->nodes[node].bundles + s->take[node] <= level) {
                s->take[node]++;
                left--;
            }
            if (!strict && s->take[node] < s->fits[node])
                s->order[stay++] = node;
        }
        n = stay;
        level++;
    }
    return left;
}

/* ---- the plan ---- */

/* The bundles of a kind are alike: in their order to the nodes in theirs. */
static void kind_assign(struct solver *s, struct room *r, const struct kind *k)
{
    uint32_t at = k->first, each = room_devices_of(r, k->bundle);

    for (size_t i = 0; i < s->snap->n_nodes; i++) {
        uint32_t n = s->take[i], *devices = NULL;

        if (!n)
            continue;
        if (s->plan) {
            devices = s->plan->devices + s->plan->n_devices;
            for (uint32_t j = 0; j < n; j++) {
                s->plan->slots[s->sorted[at++]] =
                    (struct placement_slot){ (uint32_t)i, (uint32_t)s->plan->n_devices, each };
                s->plan->n_devices += each;
            }
        }
        room_take(r, i, k->bundle, n, devices);
    }
}

/* only: the one node that may be used, SIZE_MAX: all */
static bool kinds_place(struct solver *s, struct room *r, size_t only)
{
    const char *label;

    for (size_t k = 0; k < s->n_kinds; k++) {
        const struct kind *kind = &s->kinds[k];

        memset(s->take, 0, s->snap->n_nodes * sizeof(s->take[0]));
        for (size_t i = 0; i < s->snap->n_nodes; i++)
            s->fits[i] = (only == SIZE_MAX || i == only) && !room_rule(r, i, kind->bundle, &label)
                             ? room_fits(r, i, kind->bundle)
                             : 0;
        bool spread =
            s->req->strategy == PLACEMENT_SPREAD || s->req->strategy == PLACEMENT_STRICT_SPREAD;

        if ((spread ? kind_spread(s, r, kind) : kind_pack(s, r, kind)) > 0) {
            s->stuck = kind;
            return false;
        }
        kind_assign(s, r, kind);
    }
    return true;
}

static bool node_holds_all(struct solver *s, struct room *r, size_t node)
{
    const struct placement_node *n = &s->snap->nodes[node];
    size_t bytes = (n->n_amounts + n->n_devices) * sizeof(s->scratch[0]);
    int64_t *kept = r->nodes[node].amounts; /* devices follow */
    const char *label;
    bool all = true;

    memcpy(s->scratch, kept, bytes);
    for (size_t k = 0; k < s->n_kinds && all; k++) {
        const struct kind *kind = &s->kinds[k];

        all = !room_rule(r, node, kind->bundle, &label) &&
              room_fits(r, node, kind->bundle) >= kind->n;
        if (all)
            room_take(r, node, kind->bundle, kind->n, NULL);
        else
            s->stuck = kind;
    }
    memcpy(kept, s->scratch, bytes);
    r->nodes[node].bundles = 0;
    return all;
}

/* One node for all: of those that can, the preferred one, else the one with the least devices free.
 */
static bool strict_pack(struct solver *s, struct room *r)
{
    size_t best = SIZE_MAX;
    int64_t least = 0;

    for (size_t i = 0; i < s->snap->n_nodes; i++) {
        int64_t has = room_has(r, i, r->gpu);

        if (preferred(s, s->kinds[0].bundle, i))
            has = -1;
        if ((best == SIZE_MAX || has < least) && node_holds_all(s, r, i)) {
            best = i;
            least = has;
        }
    }
    if (!s->n_kinds || best == SIZE_MAX) {
        s->stuck = s->stuck ? s->stuck : s->kinds;
        return false;
    }
    return kinds_place(s, r, best);
}

/* For certain nothing could do: a kind that has too few places even alone, or an amount that all
 * nodes together have not. */
static bool too_little(const struct solver *s, const struct room *r)
{
    bool strict = s->req->strategy == PLACEMENT_STRICT_SPREAD;
    const char *label;

    for (size_t k = 0; k < s->n_kinds; k++) {
        uint64_t places = 0;

        for (size_t i = 0; i < s->snap->n_nodes; i++) {
            uint32_t fits = room_rule(r, i, s->kinds[k].bundle, &label)
                                ? 0
                                : room_fits(r, i, s->kinds[k].bundle);

            places += strict ? fits > 0 : fits;
        }
        if (places < s->kinds[k].n)
            return true;
    }
    if (strict && s->req->n_bundles > s->snap->n_nodes)
        return true;
    for (uint32_t x = 0; x < s->snap->n_resources; x++) {
        int64_t asked = 0, has = 0;

        for (size_t k = 0; k < s->n_kinds; k++)
            asked += s->kinds[k].n * bundle_wants(s->kinds[k].bundle, x);
        for (size_t i = 0; i < s->snap->n_nodes; i++) {
            int64_t here = room_has(r, i, x);

            if (s->req->strategy != PLACEMENT_STRICT_PACK)
                has += here;
            else
                has = here > has ? here : has;
        }
        if (has < asked)
            return true;
    }
    return false;
}

/* Parts of devices are put where they leave the least. For parts of one size nothing is better; for
 * several this is a guess, and that it finds no room is no proof. */
static bool parts_alike(const struct solver *s, const struct room *r)
{
    int64_t part = 0;

    for (size_t k = 0; k < s->n_kinds; k++) {
        int64_t gpus = bundle_wants(s->kinds[k].bundle, r->gpu);

        if (gpus == 0 || gpus >= PLACEMENT_ONE)
            continue;
        if (part && part != gpus)
            return false;
        part = gpus;
    }
    return true;
}

/* One kind after the other is exact for one kind, and nearly always enough for several; where it is
 * not, the ways to share the nodes are searched. */
static enum search_end search(struct solver *s, struct room *r)
{
    uint32_t *take;
    enum search_end end;

    room_reset(r);
    if (too_little(s, r))
        return SEARCH_NONE;
    take = calloc(s->n_kinds * s->snap->n_nodes + 1, sizeof(*take));
    if (!take)
        return SEARCH_CUT;
    end = search_run(r, s->kinds, s->n_kinds, s->req->strategy == PLACEMENT_STRICT_SPREAD, take);
    if (end == SEARCH_FOUND) {
        room_reset(r);
        if (s->plan)
            s->plan->n_devices = 0;
        for (size_t k = 0; k < s->n_kinds; k++) {
            memcpy(s->take, take + k * s->snap->n_nodes, s->snap->n_nodes * sizeof(*take));
            kind_assign(s, r, &s->kinds[k]);
        }
    }
    free(take);
    return end == SEARCH_NONE && !parts_alike(s, r) ? SEARCH_CUT : end;
}

static enum search_end place(struct solver *s, struct room *r)
{
    bool one_node = s->req->strategy == PLACEMENT_STRICT_PACK;

    s->stuck = NULL;
    if (one_node ? strict_pack(s, r) : kinds_place(s, r, SIZE_MAX))
        return SEARCH_FOUND;
    if (s->n_kinds <= 1)
        return SEARCH_NONE;
    if (one_node)
        return parts_alike(s, r) || too_little(s, r) ? SEARCH_NONE : SEARCH_CUT;
    return search(s, r);
}

/* ---- the call ---- */

static enum fl_status check(const struct placement_snapshot *snap,
                            const struct placement_request *req, size_t *n_devices,
                            struct fl_err *err)
{
    *n_devices = 0;
    if (req->n_bundles == 0 || req->n_bundles > BUNDLES_MAX)
        return fl_fail(err, FL_INVALID, "%zu bundles asked, 1 to %d can be placed", req->n_bundles,
                       BUNDLES_MAX);
    for (size_t i = 0; i < req->n_bundles; i++) {
        const struct placement_bundle *b = &req->bundles[i];

        for (size_t k = 0; k < b->n_wants; k++) {
            const struct fl_amount *w = &b->wants[k];
            char text[24];

            amount_text(text, w->e4);
            if (w->resource >= snap->n_resources)
                return fl_fail(err, FL_INVALID, "bundle %zu asks for resource %u, unknown here", i,
                               w->resource);
            if (w->e4 < 0)
                return fl_fail(err, FL_INVALID, "bundle %zu asks for %s %s", i, text,
                               snap->resources[w->resource]);
            if (strcmp(snap->resources[w->resource], "GPU") != 0)
                continue;
            if (w->e4 > PLACEMENT_ONE && w->e4 % PLACEMENT_ONE)
                return fl_fail(err, FL_INVALID,
                               "bundle %zu asks for %s GPU: above one only whole ones", i, text);
            *n_devices += (size_t)((w->e4 + PLACEMENT_ONE - 1) / PLACEMENT_ONE);
            if (*n_devices > BUNDLES_MAX)
                return fl_fail(err, FL_INVALID, "more than %d GPUs asked", BUNDLES_MAX);
        }
    }
    return FL_OK;
}

/* The rooms are used up by an attempt; what is explained is what was there before it. */
static enum fl_status solver_explain(struct solver *s, const struct kind *stuck, bool never,
                                     struct placement_why *why, size_t *n_why, struct fl_err *err)
{
    struct failed f = { s->req, stuck };
    struct room now = { 0 }, empty = { 0 };
    enum fl_status st = room_init(&now, s->snap, false, err);

    if (st == FL_OK)
        st = room_init(&empty, s->snap, true, err);
    if (st == FL_OK) {
        if (why && n_why)
            explain_nodes(&now, &f, why, n_why);
        st = explain_text(&now, &empty, &f, never, err);
    }
    room_fini(&now);
    room_fini(&empty);
    return st;
}

static bool some_avoided(const struct placement_snapshot *snap)
{
    for (size_t i = 0; i < snap->n_nodes; i++)
        if (snap->nodes[i].avoid)
            return true;
    return false;
}

static enum fl_status solver_run(struct solver *s, struct room *now, struct room *empty,
                                 struct placement_why *why, size_t *n_why, struct fl_err *err)
{
    FL_TRY(room_init(now, s->snap, false, err));
    FL_TRY(room_init(empty, s->snap, true, err));
    kinds_make(s, empty);
    if (some_avoided(s->snap)) {
        now->careful = true;
        if (place(s, now) == SEARCH_FOUND)
            return FL_OK;
        now->careful = false;
        room_reset(now);
        s->plan->n_devices = 0;
    }
    if (place(s, now) == SEARCH_FOUND)
        return FL_OK;
    const struct kind *stuck = s->stuck;

    s->plan = NULL;
    return solver_explain(s, stuck, place(s, empty) == SEARCH_NONE, why, n_why, err);
}

static bool solver_init(struct solver *s)
{
    size_t n = s->snap->n_nodes, largest = 1;

    for (size_t i = 0; i < n; i++) {
        size_t here = s->snap->nodes[i].n_amounts + s->snap->nodes[i].n_devices;

        largest = here > largest ? here : largest;
    }
    s->sorted = calloc(s->req->n_bundles, sizeof(s->sorted[0]));
    s->kinds = calloc(s->req->n_bundles, sizeof(s->kinds[0]));
    s->take = calloc(n + 1, sizeof(s->take[0]));
    s->fits = calloc(n + 1, sizeof(s->fits[0]));
    s->order = calloc(n + 1, sizeof(s->order[0]));
    s->scratch = calloc(largest, sizeof(s->scratch[0]));
    return s->sorted && s->kinds && s->take && s->fits && s->order && s->scratch;
}

static void solver_fini(struct solver *s)
{
    free(s->sorted);
    free(s->kinds);
    free(s->take);
    free(s->fits);
    free(s->order);
    free(s->scratch);
}

static struct placement_plan *plan_create(size_t n_slots, size_t n_devices)
{
    struct placement_plan *p = calloc(1, sizeof(*p));

    if (!p)
        return NULL;
    p->n_slots = n_slots;
    p->slots = calloc(n_slots, sizeof(p->slots[0]));
    p->devices = calloc(n_devices + 1, sizeof(p->devices[0]));
    if (p->slots && p->devices)
        return p;
    placement_plan_destroy(p);
    return NULL;
}

enum fl_status placement_solve(const struct placement_snapshot *snap,
                               const struct placement_request *req, struct placement_plan **out,
                               struct placement_why *why, size_t *n_why, struct fl_err *err)
{
    struct solver s = { .snap = snap, .req = req };
    struct room now = { 0 }, empty = { 0 };
    enum fl_status st;
    size_t n_devices;

    FL_TRY(check(snap, req, &n_devices, err));
    struct placement_plan *plan = plan_create(req->n_bundles, n_devices);

    s.plan = plan;
    if (solver_init(&s) && plan)
        st = solver_run(&s, &now, &empty, why, n_why, err);
    else
        st = fl_fail(err, FL_EXHAUSTED, "no memory to place %zu bundles", req->n_bundles);
    room_fini(&now);
    room_fini(&empty);
    solver_fini(&s);
    if (st != FL_OK) {
        placement_plan_destroy(plan);
        return st;
    }
    if (n_why)
        *n_why = 0;
    *out = plan;
    return FL_OK;
}

void placement_plan_destroy(struct placement_plan *p)
{
    if (!p)
        return;
    free(p->slots);
    free(p->devices);
    free(p);
}
