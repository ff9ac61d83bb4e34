#include "placement/placement.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>

#include "placement/solve_priv.h"

void amount_text(char out[24], int64_t e4)
{
    int64_t rest = e4 % PLACEMENT_ONE;
    int n = snprintf(out, 24, "%lld", (long long)(e4 / PLACEMENT_ONE));

    if (!rest)
        return;
    snprintf(out + n, 24 - (size_t)n, ".%04lld", (long long)rest);
    for (n = (int)strlen(out); out[n - 1] == '0'; n--)
        out[n - 1] = '\0';
}

static int64_t asked_of(const struct failed *f, uint32_t resource)
{
    int64_t e4 = 0;

    for (size_t i = 0; i < f->req->n_bundles; i++)
        e4 += bundle_wants(&f->req->bundles[i], resource);
    return e4;
}

/* The amount that lets the fewest of these bundles onto the node. */
static uint16_t scarcest(const struct room *r, size_t node, const struct placement_bundle *b)
{
    uint16_t worst = 0;
    double least = __DBL_MAX__;

    for (size_t i = 0; i < b->n_wants; i++) {
        int64_t want = bundle_wants(b, b->wants[i].resource);
        double times =
            want ? (double)room_has(r, node, b->wants[i].resource) / (double)want : __DBL_MAX__;

        if (times < least) {
            least = times;
            worst = b->wants[i].resource;
        }
    }
    return worst;
}

static struct placement_why explain_node(const struct room *r, const struct room *empty,
                                         size_t node, const struct failed *f)
{
    const struct placement_bundle *b = f->kind->bundle;
    struct placement_why w = { .node = (uint32_t)node };

    w.rule = room_rule(r, node, b, &w.label);
    if (w.rule)
        return w;
    w.resource = scarcest(r, node, b);
    w.asked_e4 = asked_of(f, w.resource);
    w.has_e4 = room_has(r, node, w.resource);
    w.total_e4 = empty ? room_has(empty, node, w.resource) : 0;
    w.each_e4 = bundle_wants(b, w.resource);
    if (f->req->strategy == PLACEMENT_STRICT_SPREAD && room_fits(r, node, b))
        w.rule = "has room for one, and one a node is not enough";
    else if (w.has_e4 >= bundle_wants(b, w.resource) && !room_fits(r, node, b))
        w.rule = "has enough GPU in parts, but no whole one";
    else if (w.has_e4 >= w.asked_e4)
        w.rule = "has room that other bundles of this request need";
    return w;
}

void explain_nodes(const struct room *free, const struct failed *f, struct placement_why *why,
                   size_t *n_why)
{
    struct room empty = { 0 };
    bool totals = room_init(&empty, free->snap, true, NULL) == FL_OK;
    size_t n = 0;

    for (; n < *n_why && n < free->snap->n_nodes; n++)
        why[n] = explain_node(free, totals ? &empty : NULL, n, f);
    *n_why = n;
    room_fini(&empty);
}

/* What the nodes together have of a resource, or the best of them when one must hold all. */
static int64_t has_of(const struct room *r, const struct failed *f, uint32_t resource, size_t *best)
{
    const char *label;
    int64_t sum = 0, most = 0;

    *best = SIZE_MAX;
    for (size_t i = 0; i < r->snap->n_nodes; i++) {
        int64_t here = room_has(r, i, resource);

        if (room_rule(r, i, f->kind->bundle, &label))
            continue;
        sum += here;
        if (*best == SIZE_MAX || here > most) {
            most = here;
            *best = i;
        }
    }
    return f->req->strategy == PLACEMENT_STRICT_PACK ? most : sum;
}

/* " (gpu-a 2, gpu-b 1, and 7 more)" */
static void nodes_add(struct fl_str *s, const struct room *r, const struct failed *f,
                      uint32_t resource)
{
    enum { SHOWN = 4 };
    const char *label, *before = " (";
    size_t shown = 0, more = 0;
    char has[24];

    for (size_t i = 0; i < r->snap->n_nodes; i++) {
        if (room_rule(r, i, f->kind->bundle, &label) || !room_has(r, i, resource))
            continue;
        if (shown == SHOWN) {
            more++;
            continue;
        }
        amount_text(has, room_has(r, i, resource));
        fl_str_add(s, "%s%s %s", before, r->snap->nodes[i].name, has);
        before = ", ";
        shown++;
    }
    if (more)
        fl_str_add(s, ", %zu more", more);
    if (shown)
        fl_str_add(s, ")");
}

/* What there is too little of; UINT32_MAX: no single amount. Devices first: they are what a run is sized
 * by, and on a small machine cores are short whenever devices are. */
static uint32_t scarce(const struct room *r, const struct failed *f)
{
    uint32_t first = UINT32_MAX;
    size_t best;

    for (uint32_t k = 0; k < r->snap->n_resources; k++) {
        if (asked_of(f, k) <= has_of(r, f, k, &best) || best == SIZE_MAX)
            continue;
        if (strcmp(r->snap->resources[k], "GPU") == 0)
            return k;
        first = first == UINT32_MAX ? k : first;
    }
    return first;
}

static enum fl_status say_scarce(const struct room *r, const struct room *empty, const struct failed *f, uint32_t k,
                                 bool never, struct fl_err *err)
{
    const struct placement_snapshot *snap = r->snap;
    const char *what = snap->resources[k], *s = snap->n_nodes == 1 ? "" : "s";
    char asked[24], has[24], all[24], list[160] = "";
    struct fl_str nodes = FL_STR_ON(list);
    size_t best;

    amount_text(asked, asked_of(f, k));
    amount_text(all, has_of(empty, f, k, &best));
    amount_text(has, has_of(r, f, k, &best));
    if (f->req->strategy == PLACEMENT_STRICT_PACK)
        return fl_fail(err, never ? FL_INVALID : FL_EXHAUSTED, "%s: %s %s asked on one node, the best, %s, has %s%s",
                       never ? "can never fit" : "not now", asked, what, snap->nodes[best].name, has,
                       never ? "" : " free");
    nodes_add(&nodes, r, f, k);
    if (never)
        return fl_fail(err, FL_INVALID, "can never fit: %s %s asked, %zu node%s %s %s%s", asked, what, snap->n_nodes,
                       *s ? "s together" : "", *s ? "have" : "has", has, list);
    return fl_fail(err, FL_EXHAUSTED, "not now: %s %s asked, %s free of %s on %zu node%s%s", asked, what, has, all,
                   snap->n_nodes, s, list);
}

static bool blocked(const struct room *free, const struct room *empty, size_t node,
                    const struct failed *f)
{
    const char *label;

    return !room_rule(free, node, f->kind->bundle, &label) &&
           room_fits(empty, node, f->kind->bundle) > room_fits(free, node, f->kind->bundle);
}

enum fl_status explain_text(const struct room *free, const struct room *empty,
                            const struct failed *f, bool never, struct fl_err *err)
{
    const struct placement_snapshot *snap = free->snap;
    const struct room *r = never ? empty : free;
    const char *start = never ? "can never fit" : "not now";
    enum fl_status st = never ? FL_INVALID : FL_EXHAUSTED;
    size_t usable = 0;
    const char *label;

    if (!snap->n_nodes)
        return fl_fail(err, st, "%s: no node has joined", start);
    uint32_t k = scarce(r, f);
    if (k != UINT32_MAX)
        return say_scarce(r, empty, f, k, never, err);
    for (size_t i = 0; i < snap->n_nodes; i++)
        usable += !room_rule(r, i, f->kind->bundle, &label);
    /* where a node could take one, but not now, the caller has its line, and says who is in the way */
    for (size_t i = 0; i < snap->n_nodes && !never; i++)
        if (blocked(r, empty, i, f))
            return fl_fail(err, st, "%s: %u of %zu bundles have no node (%zu of %zu may be used)", start,
                           f->kind->n, f->req->n_bundles, usable, snap->n_nodes);
    struct placement_why w = explain_node(r, empty, 0, f);
    struct fl_str line = FL_STR_HEAP(160);

    placement_why_text(snap, &w, 1, &line);
    if (line.len)
        line.data[line.len - 1] = '\0'; /* without its end of line */
    fl_fail(err, st, "%s: %u of %zu bundles have no node (%zu of %zu may be used); first: %s",
            start, f->kind->n, f->req->n_bundles, usable, snap->n_nodes, fl_str_text(&line));
    fl_str_fini(&line);
    return st;
}

void placement_why_text(const struct placement_snapshot *snap, const struct placement_why *why,
                        size_t n_why, struct fl_str *out)
{
    for (size_t i = 0; i < n_why; i++) {
        const struct placement_why *w = &why[i];
        const struct placement_node *n = &snap->nodes[w->node];
        char asked[24], has[24], total[24];

        fl_str_add(out, "%s %s: ", n->name, n->addr);
        if (w->label) {
            fl_str_add(out, "label %s %s\n", w->label, w->rule);
            continue;
        }
        if (w->rule) {
            fl_str_add(out, "%s\n", w->rule);
            continue;
        }
        amount_text(asked, w->asked_e4);
        amount_text(has, w->has_e4);
        amount_text(total, w->total_e4);
        fl_str_add(out, "%s %s asked, %s free of %s\n", asked, snap->resources[w->resource], has,
                   total);
    }
}

bool placement_addr_sort(const char *addr, uint8_t out[16])
{
    static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };
    uint8_t v4[4];

    if (inet_pton(AF_INET, addr, v4) == 1) {
        memcpy(out, mapped, sizeof(mapped));
        memcpy(out + sizeof(mapped), v4, sizeof(v4));
        return true;
    }
    if (inet_pton(AF_INET6, addr, out) == 1)
        return true;
    memset(out, 0, 16);
    memcpy(out, addr, strnlen(addr, 16));
    return false;
}
