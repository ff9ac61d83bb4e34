/* transport/xfer/plan.c - covers what every engine wants with what the sources have
 *
 * Work is per piece of an engine: the shards of its tensor that meet it (found by search, not by
 * going through all sources), nearest first, each cut out of what is still wanted until nothing is.
 */
#include "transport/xfer/plan.h"
#include <stdlib.h>
#include <string.h>
#include "common/base/str.h"
#include "transport/xfer/image.h"
#include "transport/xfer/plan_priv.h"

enum { BUCKET_NS = 20000 };   /* control work a bucket: one operation there and back on the loop */
enum { SHARE_NS = 10000 };    /* flipping, whatever the size: always less than a bucket */
enum { COST_UNIT = 1 << 20 }; /* nearness: cost of so many bytes */

static const struct {
    const char *name;
    uint32_t needs;
} modes[] = {
    [XFER_AUTO] = { "auto", 0 },
    [XFER_SHARE] = { "share", LINK_MAP },
    [XFER_COPY] = { "copy", LINK_MAP | LINK_PULL },
    [XFER_BROADCAST] = { "broadcast", 0 },
    [XFER_P2P] = { "p2p", 0 },
    [XFER_DISK_DELTA] = { "disk-delta", 0 },
};

const char *xfer_mode_name(enum xfer_mode m)
{
    return (unsigned)m < FL_LEN(modes) ? modes[m].name : "no mode";
}

bool plan_link_fits(enum xfer_mode m, const struct link_ops *k)
{
    return (k->caps & modes[m].needs) == modes[m].needs &&
           (k->caps & (LINK_PULL | LINK_SEND | LINK_CAST));
}

uint64_t plan_seg_bytes(const struct link_seg *s)
{
    return s->run_bytes * s->rows;
}

enum fl_status plan_no_memory(const struct planner *pl)
{
    return fl_fail(pl->err, FL_EXHAUSTED, "no memory for a plan over %zu tensors", pl->table.n);
}

/* ---- links ---- */

static uint8_t choose_link(const struct planner *pl, const struct link_place *a,
                           const struct link_place *b, uint64_t *cost)
{
    uint8_t best = PLAN_NO_LINK;
    bool best_casts = false; /* one to all is what that mode asks for; pulls add up at the source */

    *cost = UINT64_MAX;
    for (size_t i = 0; i < pl->n_links; i++) {
        const struct link_ops *k = pl->links[i];

        if (!plan_link_fits(pl->in->mode, k) || !k->reaches(a, b, NULL))
            continue;
        uint64_t c = k->cost_ns(a, b, COST_UNIT);
        bool casts = pl->in->mode == XFER_BROADCAST && (k->caps & LINK_CAST);

        if (best != PLAN_NO_LINK && casts == best_casts ? c >= *cost
                                                        : best != PLAN_NO_LINK && !casts)
            continue;
        best = (uint8_t)i;
        best_casts = casts;
        *cost = c;
    }
    return best;
}

static enum fl_status find_links(struct planner *pl)
{
    size_t n_s = pl->in->n_sources, n_e = pl->in->n_engines;

    pl->link_of = malloc(n_s * n_e + 1);
    pl->near = malloc((n_s * n_e + 1) * sizeof(*pl->near));
    if (!pl->link_of || !pl->near)
        return plan_no_memory(pl);
    for (size_t s = 0; s < n_s; s++)
        for (size_t e = 0; e < n_e; e++)
            pl->link_of[s * n_e + e] = choose_link(pl, &pl->in->places[s], &pl->in->places[n_s + e],
                                                   &pl->near[s * n_e + e]);
    return FL_OK;
}

/* ---- engines and parties ---- */

static enum fl_status check_shared(const struct planner *pl)
{
    char line[130];

    for (size_t i = 0; i < pl->n_taken; i++) {
        const struct taken *t = &pl->taken[i], *first = &pl->taken[0];
        const struct link_seg *s = &t->seg;

        if (s->rows == 1 && s->from_off == s->to_off && t->from == first->from &&
            t->from_mem == first->from_mem)
            continue;
        return fl_fail(
            pl->err, FL_INVALID,
            "engine rank %u cannot share %s: %u runs, at %llu of source %u, wanted at %llu; "
            "sharing needs equal layouts in one memory of one source (source %u), use copy",
            pl->engine, xfer_tensor_line(&pl->table.tensors[s->tensor], line, sizeof(line)),
            s->rows, (unsigned long long)s->from_off, t->from, (unsigned long long)s->to_off,
            first->from);
    }
    return FL_OK;
}

static enum fl_status plan_engine(struct planner *pl, uint32_t engine)
{
    const struct xfer_manifest *m = &pl->in->engines[engine];
    const uint32_t *map = pl->table.map[pl->in->n_sources + engine];

    pl->engine = engine;
    pl->last_source = UINT32_MAX;
    pl->n_taken = 0;
    for (size_t i = 0; i < m->n_pieces; i++)
        FL_TRY(plan_cover_piece(pl, map[m->pieces[i].tensor], &m->pieces[i]));
    if (pl->in->mode == XFER_SHARE)
        FL_TRY(check_shared(pl));
    return plan_add_edges(pl) ? FL_OK : plan_no_memory(pl);
}

static enum fl_status check_party(const struct planner *pl, uint32_t party)
{
    char line[130];

    for (uint32_t t = 0; t < pl->table.n; t++) {
        uint64_t all = xfer_tensor_bytes(&pl->table.tensors[t]);

        if (pl->counted[t] != all)
            return fl_fail(pl->err, FL_INVALID,
                           "engine %u: its ranks together want %llu of %llu bytes of %s", party,
                           (unsigned long long)pl->counted[t], (unsigned long long)all,
                           xfer_tensor_line(&pl->table.tensors[t], line, sizeof(line)));
    }
    return FL_OK;
}

/* Engines' ranks are planned in the order of their parties, so that one set of marks is enough. */
static enum fl_status plan_parties(struct planner *pl)
{
    size_t n = pl->in->n_engines;
    bool *done = calloc(n + 1, sizeof(*done));
    enum fl_status st = done ? FL_OK : plan_no_memory(pl);

    for (uint32_t i = 0; i < n && st == FL_OK; i++) {
        if (done[i])
            continue;
        uint32_t party = pl->in->engines[i].party;

        memset(pl->counted, 0, pl->table.n * sizeof(*pl->counted));
        for (size_t t = 0; t < pl->table.n; t++)
            pl->seen[t].n = 0;
        for (uint32_t k = i; k < n && st == FL_OK; k++) {
            if (done[k] || pl->in->engines[k].party != party)
                continue;
            done[k] = true;
            st = plan_engine(pl, k);
        }
        if (st == FL_OK)
            st = check_party(pl, party);
    }
    free(done);
    return st;
}

/* ---- the end ---- */

static enum fl_status place_receivers(struct planner *pl)
{
    struct plan_owned *o = pl->out;
    uint32_t at = 0;

    o->to = malloc((pl->n_to + 1) * sizeof(*o->to));
    if (!o->to)
        return plan_no_memory(pl);
    for (size_t e = 0; e < pl->n_edges; e++) {
        o->edges[e].first_to = at;
        at += o->edges[e].n_to;
        o->edges[e].n_to = 0;
    }
    for (size_t i = 0; i < pl->n_to; i++) {
        struct xfer_edge *e = &o->edges[pl->edge_of_to[i]];

        o->to[e->first_to + e->n_to++] = pl->member_of_to[i];
    }
    return FL_OK;
}

/* Each member works through its edges one after the other, all members at once: the longest of
 * them is the estimate. A source whose pages are mapped does nothing; one that casts sends once. */
static uint64_t predict(struct planner *pl)
{
    struct plan_owned *o = pl->out;
    uint64_t longest = 0;

    if (pl->in->mode == XFER_SHARE)
        return SHARE_NS;
    for (size_t i = 0; i < pl->n_edges; i++) {
        const struct xfer_edge *e = &o->edges[i];
        uint64_t bytes = 0, ns = 0;

        for (uint32_t b = 0; b < e->n_buckets; b++)
            bytes += o->buckets[e->first_bucket + b].bytes;
        o->p.bytes += bytes * e->n_to;
        if (e->link == XFER_LINK_DISK)
            continue;
        const struct link_ops *k = pl->links[e->link];

        for (uint32_t r = 0; r < e->n_to; r++) {
            uint32_t to = o->to[e->first_to + r];

            ns = k->cost_ns(&pl->in->places[e->from], &pl->in->places[to], bytes) +
                 (uint64_t)e->n_buckets * BUCKET_NS;
            pl->busy_ns[to] += ns;
            /* out of a device's memory to another device: its links out are what all takers
             * share */
            bool out_of_device =
                strcmp(pl->in->places[e->from].gpu_uuid, pl->in->places[to].gpu_uuid) != 0;

            if ((!(k->caps & LINK_MAP) || out_of_device) && (r == 0 || !(k->caps & LINK_CAST)))
                pl->busy_ns[e->from] += ns;
        }
    }
    for (size_t m = 0; m < o->p.n_members; m++)
        longest = pl->busy_ns[m] > longest ? pl->busy_ns[m] : longest;
    return longest;
}

static enum fl_status hash_parts(struct planner *pl)
{
    struct plan_owned *o = pl->out;
    size_t n = o->p.n_members;
    struct image_out all = { 0 };

    image_put_u32(&all, o->p.mode);
    image_put_u32(&all, o->p.slots);
    for (size_t i = 0; i < pl->table.n; i++)
        image_put_tensor(&all, &pl->table.tensors[i]);
    for (uint32_t m = 0; m < n; m++) {
        const struct xfer_manifest *man =
            m < pl->in->n_sources ? &pl->in->sources[m] : &pl->in->engines[m - pl->in->n_sources];
        void *image;
        size_t n_bytes;
        enum fl_status st = xfer_part_encode(&o->p, m, &image, &n_bytes, pl->err);

        if (st != FL_OK) {
            free(all.data);
            return st;
        }
        xfer_hash128(image, n_bytes, o->part_hash[m]);
        free(image);
        image_put(&all, man->hash, sizeof(man->hash));
        image_put(&all, o->part_hash[m], sizeof(o->part_hash[m]));
    }
    xfer_hash128(all.data, all.n, o->p.hash);
    bool bad = all.bad;

    free(all.data);
    return bad ? plan_no_memory(pl) : FL_OK;
}

static enum fl_status finish(struct planner *pl)
{
    struct plan_owned *o = pl->out;

    FL_TRY(place_receivers(pl));
    FL_TRY(plan_owned_tensors(o, pl->table.tensors, pl->table.n, pl->err));
    o->p.mode = pl->in->mode;
    o->p.slots = pl->in->slots;
    o->p.n_edges = pl->n_edges;
    o->p.n_buckets = pl->n_buckets;
    o->p.n_segs = pl->n_segs;
    o->p.n_to = pl->n_to;
    o->p.n_sources = pl->in->n_sources;
    o->p.n_members = pl->in->n_sources + pl->in->n_engines;
    o->part_hash = calloc(o->p.n_members + 1, sizeof(*o->part_hash));
    if (!o->part_hash)
        return plan_no_memory(pl);
    plan_owned_publish(o);
    o->p.predicted_ns = predict(pl);
    return hash_parts(pl);
}

static enum fl_status check_room(const struct planner *pl)
{
    char need[16], have[16];

    if (pl->in->slots == XFER_ONE_SLOT || pl->in->mode == XFER_SHARE ||
        pl->in->spare_bytes == XFER_NO_LIMIT)
        return FL_OK;
    for (size_t e = 0; e < pl->in->n_engines; e++) {
        const struct xfer_manifest *m = &pl->in->engines[e];
        uint64_t bytes = 0;

        for (size_t i = 0; i < m->n_mems; i++)
            bytes += m->mem_bytes[i];
        if (bytes > pl->in->spare_bytes)
            return fl_fail(
                pl->err, FL_EXHAUSTED,
                "engine rank %zu needs %s to stage the new weights beside the old ones and has %s; "
                "with one slot it needs none, but serves nothing from the first byte until all is "
                "verified",
                e, fl_bytes_text(need, bytes), fl_bytes_text(have, pl->in->spare_bytes));
    }
    return FL_OK;
}

/* Engines read one folder: the first source that holds every tensor whole writes it. */
static enum fl_status find_writer(struct planner *pl)
{
    size_t n = pl->in->n_sources, need = 0;
    struct {
        size_t whole;
        uint32_t last;
    } *has = calloc(n + 1, sizeof(*has));

    if (!has)
        return plan_no_memory(pl);
    for (uint32_t t = 0; t < pl->table.n; t++) {
        const struct shard *sh = plan_whole_shard(pl, t);

        need += xfer_tensor_bytes(&pl->table.tensors[t]) != 0;
        for (uint32_t i = 0; sh && i < sh->n_holders; i++) {
            uint32_t s = pl->holders.holders[sh->first_holder + i].source;

            if (xfer_tensor_bytes(&pl->table.tensors[t]) && has[s].last != t + 1)
                has[s].whole++;
            has[s].last = t + 1;
        }
    }
    for (pl->writer = 0; pl->writer < n && has[pl->writer].whole != need; pl->writer++)
        ;
    free(has);
    return FL_OK;
}

static enum fl_status prepare(struct planner *pl)
{
    uint64_t all = 0;

    FL_TRY(check_room(pl));
    FL_TRY(plan_table_make(pl->in, &pl->table, pl->err));
    FL_TRY(plan_holders_make(pl->in, &pl->table, &pl->holders, pl->err));
    FL_TRY(find_links(pl));
    if (pl->in->mode == XFER_DISK_DELTA)
        FL_TRY(find_writer(pl));
    for (size_t e = 0; e < pl->in->n_engines; e++)
        for (size_t i = 0; i < pl->in->engines[e].n_pieces; i++) {
            const struct xfer_piece *p = &pl->in->engines[e].pieces[i];

            all += xfer_box_bytes(&pl->in->engines[e].tensors[p->tensor], &p->box);
        }
    pl->fair_bytes = all / pl->in->n_sources;
    pl->given = calloc(pl->in->n_sources + 1, sizeof(*pl->given));
    pl->seen = calloc(pl->table.n + 1, sizeof(*pl->seen));
    pl->counted = calloc(pl->table.n + 1, sizeof(*pl->counted));
    pl->busy_ns = calloc(pl->in->n_sources + pl->in->n_engines, sizeof(*pl->busy_ns));
    pl->out = calloc(1, sizeof(*pl->out));
    return pl->given && pl->seen && pl->counted && pl->busy_ns && pl->out ? FL_OK
                                                                          : plan_no_memory(pl);
}

static void planner_fini(struct planner *pl)
{
    for (size_t t = 0; pl->seen && t < pl->table.n; t++)
        box_list_fini(&pl->seen[t]);
    plan_table_fini(&pl->table, pl->in);
    plan_holders_fini(&pl->holders);
    free(pl->link_of);
    free(pl->near);
    free(pl->given);
    free(pl->seen);
    free(pl->counted);
    free(pl->busy_ns);
    free(pl->taken);
    free(pl->edge_hash);
    free(pl->edge_of_to);
    free(pl->member_of_to);
    xfer_plan_destroy(pl->out ? &pl->out->p : NULL);
}

static enum fl_status make_one(const struct xfer_plan_in *in, struct xfer_plan **out,
                               struct fl_err *err)
{
    struct planner pl = { .in = in,
                          .err = err,
                          .links = in->links ? in->links : link_table,
                          .n_links = in->links ? in->n_links : link_table_n };
    enum fl_status st = prepare(&pl);

    if (st == FL_OK)
        st = plan_parties(&pl);
    if (st == FL_OK)
        st = finish(&pl);
    if (st == FL_OK) {
        *out = &pl.out->p;
        pl.out = NULL;
    }
    planner_fini(&pl);
    return st;
}

/* Of the modes that work here the one with the least estimate; the first of equals. Disk is for
 * hosts that share nothing else, and is never chosen. */
static enum fl_status make_auto(const struct xfer_plan_in *in, struct xfer_plan **out,
                                struct fl_err *err)
{
    static const enum xfer_mode tries[] = { XFER_SHARE, XFER_COPY, XFER_P2P, XFER_BROADCAST };
    struct xfer_plan *best = NULL;
    enum fl_status st = FL_OK;

    for (size_t i = 0; i < FL_LEN(tries); i++) {
        struct xfer_plan_in one = *in;
        struct xfer_plan *p;

        one.mode = tries[i];
        if (one.mode == XFER_SHARE && !in->may_share)
            continue;
        st = make_one(&one, &p, err);
        if (st == FL_EXHAUSTED && !best) /* no room for a second slot: the same for all that move */
            return st;
        if (st != FL_OK)
            continue;
        bool better = !best || p->predicted_ns < best->predicted_ns;

        xfer_plan_destroy(better ? best : p);
        best = better ? p : best;
    }
    if (!best)
        return st;
    *out = best;
    return FL_OK;
}

enum fl_status xfer_plan_make(const struct xfer_plan_in *in, struct xfer_plan **out,
                              struct fl_err *err)
{
    if (in->n_sources == 0 || in->n_engines == 0 ||
        in->n_sources + in->n_engines > UINT32_MAX / 2 || (unsigned)in->mode >= FL_LEN(modes))
        return fl_fail(err, FL_INVALID,
                       "a plan of mode %d needs sources and engines, has %zu and %zu",
                       (int)in->mode, in->n_sources, in->n_engines);
    return in->mode == XFER_AUTO ? make_auto(in, out, err) : make_one(in, out, err);
}
