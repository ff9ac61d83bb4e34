/* transport/xfer/part.c - a member's part of a plan: its image, and what the member checks in it */
#include <stdlib.h>
#include <string.h>
#include "transport/xfer/image.h"
#include "transport/xfer/plan_priv.h"

enum {
    PART_MAGIC = 0x31706c66, /* "flp1" */
    PART_MAX_MEMBERS = 1 << 20
};

void plan_owned_publish(struct plan_owned *o)
{
    o->p.tensors = o->tensors;
    o->p.edges = o->edges;
    o->p.buckets = o->buckets;
    o->p.segs = o->segs;
    o->p.once = o->once;
    o->p.to = o->to;
    o->p.part_hash = (const uint64_t(*)[2])o->part_hash;
}

enum fl_status plan_owned_tensors(struct plan_owned *o, const struct xfer_tensor *t, size_t n,
                                  struct fl_err *err)
{
    size_t names = 0;

    for (size_t i = 0; i < n; i++)
        names += strlen(t[i].name) + 1;
    o->tensors = malloc((n + 1) * sizeof(*t));
    o->names = malloc(names + 1);
    if (!o->tensors || !o->names)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a plan over %zu tensors", n);
    char *at = o->names;

    for (size_t i = 0; i < n; i++) {
        o->tensors[i] = t[i];
        o->tensors[i].name = at;
        at = stpcpy(at, t[i].name) + 1;
    }
    o->p.n_tensors = n;
    return FL_OK;
}

void xfer_plan_destroy(struct xfer_plan *p)
{
    if (!p)
        return;
    struct plan_owned *o = container_of(p, struct plan_owned, p);

    if (o->more) {
        o->more--;
        return;
    }
    free(o->tensors);
    free(o->names);
    free(o->edges);
    free(o->buckets);
    free(o->segs);
    free(o->once);
    free(o->to);
    free(o->part_hash);
    free(o);
}

struct xfer_plan *xfer_plan_keep(struct xfer_plan *p)
{
    container_of(p, struct plan_owned, p)->more++;
    return p;
}

static bool edge_is_of(const struct xfer_plan *p, const struct xfer_edge *e, uint32_t member)
{
    if (e->from == member)
        return true;
    for (uint32_t r = 0; r < e->n_to; r++)
        if (p->to[e->first_to + r] == member)
            return true;
    return false;
}

/* Edges, buckets and segments are written with indexes into the part, so that its reader finds a
 * plan. */
static void put_edges(struct image_out *o, const struct xfer_plan *p, const uint32_t *mine,
                      size_t n)
{
    struct xfer_edge sum = { 0 };
    uint32_t first_seg = 0;

    for (size_t i = 0; i < n; i++) {
        struct xfer_edge e = p->edges[mine[i]];

        e.first_to = sum.n_to;
        e.first_bucket = sum.n_buckets;
        sum.n_to += e.n_to;
        sum.n_buckets += e.n_buckets;
        image_put(o, &e, sizeof(e));
    }
    for (size_t i = 0; i < n; i++)
        image_put(o, &p->to[p->edges[mine[i]].first_to], p->edges[mine[i]].n_to * sizeof(*p->to));
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < p->edges[mine[i]].n_buckets; k++) {
            struct xfer_bucket b = p->buckets[p->edges[mine[i]].first_bucket + k];

            b.edge = i;
            b.first_seg = first_seg;
            first_seg += b.n_segs;
            image_put(o, &b, sizeof(b));
        }
    for (size_t i = 0; i < n;
         i++) { /* an edge's buckets lie one after the other, and so do their segments */
        const struct xfer_edge *e = &p->edges[mine[i]];
        const struct xfer_bucket *b = &p->buckets[e->first_bucket];
        size_t segs =
            e->n_buckets ? b[e->n_buckets - 1].first_seg + b[e->n_buckets - 1].n_segs - b->first_seg
                         : 0;

        if (segs)
            image_put(o, &p->segs[b->first_seg], segs * sizeof(*p->segs));
    }
    for (size_t i = 0; i < n; i++) {
        const struct xfer_edge *e = &p->edges[mine[i]];

        for (uint32_t k = 0; k < e->n_buckets; k++) {
            const struct xfer_bucket *b = &p->buckets[e->first_bucket + k];

            image_put(o, &p->once[b->first_seg], b->n_segs);
        }
    }
}

static void count_part(const struct xfer_plan *p, const uint32_t *mine, size_t n,
                       uint32_t counts[3], uint8_t *named)
{
    for (size_t i = 0; i < n; i++) {
        const struct xfer_edge *e = &p->edges[mine[i]];

        counts[0] += e->n_to;
        counts[1] += e->n_buckets;
        for (uint32_t k = 0; k < e->n_buckets; k++) {
            const struct xfer_bucket *b = &p->buckets[e->first_bucket + k];

            counts[2] += b->n_segs;
            for (uint32_t s = 0; s < b->n_segs; s++)
                named[p->segs[b->first_seg + s].tensor] = 1;
        }
    }
}

enum fl_status xfer_part_encode(const struct xfer_plan *p, uint32_t member, void **out,
                                size_t *n_bytes, struct fl_err *err)
{
    uint32_t *mine = malloc((p->n_edges + 1) * sizeof(*mine)), counts[3] = { 0 }, n_named = 0;
    uint8_t *named = calloc(p->n_tensors + 1, 1);
    struct image_out o = { .bad = !mine || !named };
    size_t n = 0;

    for (uint32_t e = 0; e < p->n_edges && !o.bad; e++)
        if (edge_is_of(p, &p->edges[e], member))
            mine[n++] = e;
    if (!o.bad) {
        count_part(p, mine, n, counts, named);
        for (size_t t = 0; t < p->n_tensors; t++)
            n_named += named[t];
        const uint32_t head[] = { PART_MAGIC,
                                  p->mode,
                                  p->slots,
                                  member,
                                  (uint32_t)p->n_members,
                                  (uint32_t)p->n_sources,
                                  (uint32_t)p->n_tensors,
                                  n_named,
                                  (uint32_t)n,
                                  counts[0],
                                  counts[1],
                                  counts[2] };

        image_put(&o, head, sizeof(head));
        put_edges(&o, p, mine, n);
        for (uint32_t t = 0; t < p->n_tensors; t++)
            if (named[t]) {
                image_put_u32(&o, t);
                image_put_tensor(&o, &p->tensors[t]);
            }
    }
    free(mine);
    free(named);
    if (o.bad) {
        free(o.data);
        return fl_fail(err, FL_EXHAUSTED, "no memory for a part of %u segments", counts[2]);
    }
    *out = o.data;
    *n_bytes = o.n;
    return FL_OK;
}

/* ---- reading ---- */

static bool get_array(struct image_in *in, void *array, size_t n, size_t item_bytes)
{
    void **out = array;
    const void *at = image_view(in, n * item_bytes); /* counts are 32 bits, items small */

    if (!at)
        return false;
    *out = malloc(n * item_bytes + 1);
    if (*out)
        memcpy(*out, at, n * item_bytes);
    return *out != NULL;
}

static bool get_names(struct image_in *in, struct plan_owned *o, uint32_t n_named)
{
    struct xfer_tensor t;
    size_t names = in->left;
    char *at = o->names = malloc(names + 1);

    o->tensors = calloc(o->p.n_tensors + 1, sizeof(*o->tensors));
    if (!at || !o->tensors)
        return false;
    *at = 0;
    for (size_t i = 0; i < o->p.n_tensors; i++)
        o->tensors[i].name = at; /* "": of others' parts */
    at++;
    for (uint32_t i = 0; i < n_named; i++) {
        uint32_t index = image_get_u32(in);

        image_get_tensor(in, &t);
        if (in->bad || index >= o->p.n_tensors || xfer_dtype_bytes(t.dtype) == 0)
            return false;
        o->tensors[index] = t;
        o->tensors[index].name = at;
        at = stpcpy(at, t.name) + 1;
    }
    return in->left == 0;
}

static bool indexes_hold(const struct plan_owned *o, uint32_t member)
{
    const struct xfer_plan *p = &o->p;
    uint64_t to = 0, buckets = 0, segs = 0;

    for (size_t i = 0; i < p->n_edges; i++) {
        const struct xfer_edge *e = &o->edges[i];

        if (e->first_to != to || e->first_bucket != buckets || e->from >= p->n_sources ||
            e->n_to > p->n_to - to || e->n_buckets > p->n_buckets - buckets)
            return false;
        for (uint32_t k = 0; k < e->n_to; k++)
            if (o->to[to + k] < p->n_sources || o->to[to + k] >= p->n_members)
                return false;
        if (!edge_is_of(p, e, member))
            return false;
        for (uint32_t k = 0; k < e->n_buckets; k++)
            if (o->buckets[buckets + k].edge != i)
                return false;
        to += e->n_to;
        buckets += e->n_buckets;
    }
    for (size_t i = 0; i < p->n_buckets; i++) {
        const struct xfer_bucket *b = &o->buckets[i];
        uint64_t bytes = 0;

        if (b->first_seg != segs || b->n_segs > p->n_segs - segs)
            return false;
        for (uint32_t k = 0; k < b->n_segs; k++) {
            const struct link_seg *s = &o->segs[segs + k];
            uint64_t part;

            if (s->rows == 0 || s->run_bytes == 0 || s->tensor >= p->n_tensors ||
                !o->tensors[s->tensor].name[0] || o->once[segs + k] > 1 ||
                __builtin_mul_overflow(s->run_bytes, s->rows, &part) ||
                __builtin_add_overflow(bytes, part, &bytes))
                return false;
        }
        if (bytes != b->bytes)
            return false;
        segs += b->n_segs;
    }
    return to == p->n_to && buckets == p->n_buckets && segs == p->n_segs;
}

static bool get_part(struct image_in *in, struct plan_owned *o)
{
    uint32_t head[12];

    image_get(in, head, sizeof(head));
    if (in->bad || head[0] != PART_MAGIC || head[1] == XFER_AUTO || head[1] > XFER_DISK_DELTA ||
        head[2] > XFER_ONE_SLOT || head[4] > PART_MAX_MEMBERS || head[5] > head[4] ||
        head[3] >= head[4] || head[6] > XFER_MAX_TENSORS || head[7] > head[6])
        return false;
    o->p.mode = head[1];
    o->p.slots = head[2];
    o->p.n_members = head[4];
    o->p.n_sources = head[5];
    o->p.n_tensors = head[6];
    o->p.n_edges = head[8];
    o->p.n_to = head[9];
    o->p.n_buckets = head[10];
    o->p.n_segs = head[11];
    if (!get_array(in, &o->edges, head[8], sizeof(*o->edges)) ||
        !get_array(in, &o->to, head[9], sizeof(*o->to)) ||
        !get_array(in, &o->buckets, head[10], sizeof(*o->buckets)) ||
        !get_array(in, &o->segs, head[11], sizeof(*o->segs)) ||
        !get_array(in, &o->once, head[11], 1) || !get_names(in, o, head[7]))
        return false;
    plan_owned_publish(o);
    return indexes_hold(o, head[3]);
}

enum fl_status xfer_part_decode(const void *image, size_t n_bytes, const uint64_t hash[2],
                                struct xfer_plan **out, struct fl_err *err)
{
    struct image_in in = { .data = image, .left = n_bytes };
    uint64_t is[2];

    xfer_hash128(image, n_bytes, is);
    if (hash && (is[0] != hash[0] || is[1] != hash[1]))
        return fl_fail(err, FL_CORRUPT, "part of a plan, %zu bytes: hash %016llx, must be %016llx",
                       n_bytes, (unsigned long long)is[0], (unsigned long long)hash[0]);
    struct plan_owned *o = calloc(1, sizeof(*o));

    if (!o)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a part of a plan");
    if (!get_part(&in, o)) {
        xfer_plan_destroy(&o->p);
        return fl_fail(err, FL_CORRUPT, "%zu bytes are not a part of a plan: at %zu", n_bytes,
                       n_bytes - in.left);
    }
    for (size_t i = 0; i < o->p.n_buckets; i++)
        o->p.bytes +=
            o->p.mode == XFER_SHARE ? 0 : o->buckets[i].bytes * o->edges[o->buckets[i].edge].n_to;
    *out = &o->p;
    return FL_OK;
}
