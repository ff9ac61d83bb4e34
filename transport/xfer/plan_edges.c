/* transport/xfer/plan_edges.c - what an engine takes, as edges and buckets */
#include <stdlib.h>
#include <string.h>
#include "transport/xfer/image.h"
#include "transport/xfer/plan_priv.h"

static int by_edge(const void *a, const void *b)
{
    const struct taken *x = a, *y = b;

    if (x->from != y->from)
        return x->from < y->from ? -1 : 1;
    if (x->from_mem != y->from_mem)
        return x->from_mem < y->from_mem ? -1 : 1;
    if (x->to_mem != y->to_mem)
        return x->to_mem < y->to_mem ? -1 : 1;
    return x->order < y->order ? -1 : 1;
}

static bool add_seg(struct planner *pl, const struct link_seg *s, uint8_t once)
{
    if (pl->n_segs >= UINT32_MAX ||
        !plan_grow(&pl->out->segs, &pl->cap_segs, pl->n_segs + 1, sizeof(*s)) ||
        !plan_grow(&pl->out->once, &pl->cap_once, pl->n_segs + 1, 1))
        return false;
    struct xfer_bucket *b = &pl->out->buckets[pl->n_buckets - 1];

    pl->out->segs[pl->n_segs] = *s;
    pl->out->once[pl->n_segs++] = once;
    b->n_segs++;
    b->bytes += plan_seg_bytes(s);
    return true;
}

static bool open_bucket(struct planner *pl, uint32_t edge, const struct taken *t)
{
    if (!plan_grow(&pl->out->buckets, &pl->cap_buckets, pl->n_buckets + 1,
                   sizeof(struct xfer_bucket)))
        return false;
    pl->out->buckets[pl->n_buckets++] = (struct xfer_bucket){ .edge = edge,
                                                              .first_seg = (uint32_t)pl->n_segs,
                                                              .from_mem = t->from_mem,
                                                              .to_mem = t->to_mem };
    pl->out->edges[edge].n_buckets++;
    return true;
}

/* The first n rows of s, which move to out; or, of a single row, so many bytes. */
static void cut_rows(struct link_seg *s, uint32_t n, struct link_seg *out)
{
    *out = *s;
    out->rows = n;
    s->rows -= n;
    s->from_off += n * s->from_step;
    s->to_off += n * s->to_step;
    s->first_byte += n * s->byte_step;
}

static void cut_bytes(struct link_seg *s, uint64_t n, struct link_seg *out)
{
    *out = *s;
    out->run_bytes = n;
    s->run_bytes -= n;
    s->from_off += n;
    s->to_off += n;
    s->first_byte += n;
}

/* A segment that no bucket holds is cut: by rows while one fits, else its runs by bytes. */
static bool pack_seg(struct planner *pl, uint32_t edge, const struct taken *t,
                     uint64_t bucket_bytes)
{
    struct link_seg rest = t->seg, part;
    uint64_t left = plan_seg_bytes(&rest);

    for (; left > 0; left -= plan_seg_bytes(&part)) {
        const struct xfer_bucket *b = &pl->out->buckets[pl->n_buckets - 1];
        uint64_t room = bucket_bytes - b->bytes;

        if (left > room && b->n_segs > 0) { /* a new one begins empty */
            if (!open_bucket(pl, edge, t))
                return false;
            room = bucket_bytes;
        }
        if (left <= room)
            part = rest;
        else if (rest.run_bytes <= room)
            cut_rows(&rest, (uint32_t)(room / rest.run_bytes), &part);
        else if (rest.rows > 1) { /* one row, to be cut by bytes */
            struct taken row = *t;

            cut_rows(&rest, 1, &row.seg);
            part = row.seg;
            if (!pack_seg(pl, edge, &row, bucket_bytes))
                return false;
            continue;
        } else
            cut_bytes(&rest, room, &part);
        if (!add_seg(pl, &part, t->once))
            return false;
    }
    return true;
}

static bool packs(struct planner *pl, uint32_t edge, const struct taken *t, size_t n)
{
    uint64_t limit = pl->in->bucket_bytes ? pl->in->bucket_bytes : XFER_BUCKET_BYTES;

    if (pl->in->mode == XFER_SHARE) /* nothing is moved, and pieces stay whole */
        limit = UINT64_MAX;
    for (size_t i = 0; i < n; i++) {
        if ((i == 0 || t[i].from_mem != t[i - 1].from_mem || t[i].to_mem != t[i - 1].to_mem) &&
            !open_bucket(pl, edge, &t[i]))
            return false;
        if (!pack_seg(pl, edge, &t[i], limit))
            return false;
    }
    return true;
}

static uint64_t hash_taken(const struct taken *t, size_t n, uint32_t link)
{
    uint64_t sum = link + 1, h[2];

    for (size_t i = 0; i < n; i++) {
        struct {
            uint64_t before;
            uint32_t mems[2], from, once;
            struct link_seg seg;
        } x = { sum, { t[i].from_mem, t[i].to_mem }, t[i].from, t[i].once, t[i].seg };

        xfer_hash128(&x, sizeof(x), h);
        sum = h[0];
    }
    return sum ? sum : 1;
}

static bool add_receiver(struct planner *pl, uint32_t edge, uint32_t member)
{
    if (!plan_grow(&pl->edge_of_to, &pl->cap_edge_of_to, pl->n_to + 1, sizeof(uint32_t)) ||
        !plan_grow(&pl->member_of_to, &pl->cap_member_of_to, pl->n_to + 1, sizeof(uint32_t)))
        return false;
    pl->edge_of_to[pl->n_to] = edge;
    pl->member_of_to[pl->n_to++] = member;
    pl->out->edges[edge].n_to++;
    return true;
}

/* NCCL has no two ranks on one device, so two engines there take part in two broadcasts. */
static bool shares_device(const struct planner *pl, uint32_t edge)
{
    const struct link_place *here = &pl->in->places[pl->in->n_sources + pl->engine];
    uint32_t link = pl->out->edges[edge].link;

    if (!here->gpu_uuid[0] || link == XFER_LINK_DISK || !(pl->links[link]->caps & LINK_CAST))
        return false;
    for (size_t i = 0; i < pl->n_to; i++)
        if (pl->edge_of_to[i] == edge &&
            strcmp(pl->in->places[pl->member_of_to[i]].gpu_uuid, here->gpu_uuid) == 0)
            return true;
    return false;
}

/* Does that edge bring the very same? */
static bool same_edge(const struct planner *pl, uint32_t edge, const struct taken *t, size_t n,
                      uint64_t hash)
{
    const struct xfer_edge *e = &pl->out->edges[edge];

    if (pl->edge_hash[edge] != hash || e->from != t->from || shares_device(pl, edge))
        return false;
    uint64_t bytes = 0, mine = 0;

    for (uint32_t b = 0; b < e->n_buckets; b++)
        bytes += pl->out->buckets[e->first_bucket + b].bytes;
    for (size_t i = 0; i < n; i++)
        mine += plan_seg_bytes(&t[i].seg);
    return bytes == mine;
}

static uint8_t link_to_here(const struct planner *pl, uint32_t source)
{
    return pl->link_of[source * pl->in->n_engines + pl->engine];
}

static bool add_edge(struct planner *pl, const struct taken *t, size_t n)
{
    uint32_t member = (uint32_t)pl->in->n_sources + pl->engine;
    uint32_t link = pl->in->mode == XFER_DISK_DELTA ? XFER_LINK_DISK : link_to_here(pl, t->from);
    uint64_t hash = pl->in->mode == XFER_BROADCAST ? hash_taken(t, n, link) : 0;

    for (uint32_t e = 0; hash && e < pl->n_edges; e++)
        if (same_edge(pl, e, t, n, hash))
            return add_receiver(pl, e, member);
    if (!plan_grow(&pl->out->edges, &pl->cap_edges, pl->n_edges + 1, sizeof(struct xfer_edge)) ||
        !plan_grow(&pl->edge_hash, &pl->cap_hash, pl->n_edges + 1, sizeof(uint64_t)))
        return false;
    pl->edge_hash[pl->n_edges] = hash;
    pl->out->edges[pl->n_edges++] = (struct xfer_edge){ .link = link,
                                                        .from = t->from,
                                                        .first_bucket = (uint32_t)pl->n_buckets };
    return packs(pl, (uint32_t)pl->n_edges - 1, t, n) &&
           add_receiver(pl, (uint32_t)pl->n_edges - 1, member);
}

bool plan_add_edges(struct planner *pl)
{
    bool sorted = true;

    for (size_t i = 1; i < pl->n_taken && sorted; i++)
        sorted = by_edge(&pl->taken[i - 1], &pl->taken[i]) < 0;
    if (!sorted)
        qsort(pl->taken, pl->n_taken, sizeof(*pl->taken), by_edge);
    for (size_t i = 0, n; i < pl->n_taken; i += n) {
        for (n = 1; i + n < pl->n_taken && pl->taken[i + n].from == pl->taken[i].from; n++)
            ;
        if (!add_edge(pl, &pl->taken[i], n))
            return false;
    }
    return true;
}
