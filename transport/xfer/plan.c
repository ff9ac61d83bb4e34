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

#define NO_LINK UINT8_MAX
enum { BUCKET_NS = 20000 };   /* control work a bucket: one operation there and back on the loop */
enum { SHARE_NS = 10000 };    /* flipping, whatever the size: always less than a bucket */
enum { COST_UNIT = 1 << 20 }; /* nearness: cost of so many bytes */

struct taken {
    uint32_t from, from_mem, to_mem;
    uint8_t once;
    uint32_t order;
    struct link_seg seg;
};

struct planner {
    const struct xfer_plan_in *in;
    const struct link_ops *const *links;
    size_t n_links;
    struct fl_err *err;
    struct plan_table table;
    struct plan_holders holders;
    uint8_t *link_of;    /* source x engine: index of the link, or NO_LINK */
    uint64_t *near;      /* source x engine: cost of COST_UNIT on it       */
    uint64_t *given;     /* bytes each source has been asked for           */
    uint64_t fair_bytes; /* what each source gives when all give the same  */
    /* of the party in hand */
    struct box_list *seen; /* per tensor: what its ranks have counted */
    uint64_t *counted;     /* per tensor, in bytes                    */
    /* of the engine in hand */
    uint32_t engine, last_source;
    struct taken *taken;
    size_t n_taken, cap_taken;
    /* what comes out */
    struct plan_owned *out;
    uint64_t *edge_hash; /* broadcast: of an edge's segments; 0: not for joining */
    uint64_t *busy_ns;   /* per member */
    size_t n_edges, cap_edges, cap_hash, n_buckets, cap_buckets, n_segs, cap_segs, cap_once, n_to;
    uint32_t *edge_of_to; /* receivers as they come: edge and member, sorted into to[] at the end */
    uint32_t *member_of_to;
    size_t cap_edge_of_to, cap_member_of_to;
};

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

uint64_t plan_seg_bytes(const struct link_seg *s)
{
    return s->run_bytes * s->rows;
}

static enum fl_status no_memory(const struct planner *pl)
{
    return fl_fail(pl->err, FL_EXHAUSTED, "no memory for a plan over %zu tensors", pl->table.n);
}

/* ---- links ---- */

static uint8_t choose_link(const struct planner *pl, const struct link_place *a,
                           const struct link_place *b, uint64_t *cost)
{
    uint8_t best = NO_LINK;

    *cost = UINT64_MAX;
    for (size_t i = 0; i < pl->n_links; i++) {
        const struct link_ops *k = pl->links[i];
        uint32_t needs = modes[pl->in->mode].needs;

        if ((k->caps & needs) != needs || !(k->caps & (LINK_PULL | LINK_SEND | LINK_CAST)) ||
            !k->reaches(a, b, NULL))
            continue;
        uint64_t c = k->cost_ns(a, b, COST_UNIT);

        if (best == NO_LINK || c < *cost) {
            best = (uint8_t)i;
            *cost = c;
        }
    }
    return best;
}

static enum fl_status find_links(struct planner *pl)
{
    size_t n_s = pl->in->n_sources, n_e = pl->in->n_engines;

    pl->link_of = malloc(n_s * n_e + 1);
    pl->near = malloc((n_s * n_e + 1) * sizeof(*pl->near));
    if (!pl->link_of || !pl->near)
        return no_memory(pl);
    for (size_t s = 0; s < n_s; s++)
        for (size_t e = 0; e < n_e; e++)
            pl->link_of[s * n_e + e] = choose_link(pl, &pl->in->places[s], &pl->in->places[n_s + e],
                                                   &pl->near[s * n_e + e]);
    return FL_OK;
}

static uint64_t nearness(const struct planner *pl, uint32_t source)
{
    return pl->in->mode == XFER_DISK_DELTA ? 0 : pl->near[source * pl->in->n_engines + pl->engine];
}

/* ---- choosing a source ---- */

/* The nearest holder; of equally near ones the one that gave least, except that an engine stays
 * with its last source as long as that gives no more than its fair share above: few pairs instead
 * of all with all. */
static const struct holder *choose_holder(const struct planner *pl, const struct shard *sh,
                                          uint64_t *cost)
{
    const struct holder *first = &pl->holders.holders[sh->first_holder], *least = NULL,
                        *last = NULL;
    bool fixed = pl->in->mode == XFER_BROADCAST; /* rank 0 of each shard group, for all engines */

    *cost = UINT64_MAX;
    for (const struct holder *h = first; h < first + sh->n_holders; h++) {
        uint64_t c = nearness(pl, h->source);

        if (c == UINT64_MAX || (least && (fixed || c > *cost)))
            continue;
        if (!least || c < *cost) {
            least = h;
            last = NULL;
        }
        if (pl->given[h->source] < pl->given[least->source])
            least = h;
        if (h->source == pl->last_source)
            last = h;
        *cost = c;
    }
    if (last && !fixed &&
        (pl->in->mode == XFER_SHARE || /* one mapping has all of it */
         pl->given[last->source] < pl->given[least->source] + pl->fair_bytes))
        return last;
    return least;
}

struct cover { /* one seg of one part, on its way from a holder to a piece */
    struct planner *pl;
    uint32_t from, from_mem, to_mem;
    uint8_t once;
};

static bool take_seg(void *arg, const struct link_seg *seg)
{
    struct cover *c = arg;
    struct planner *pl = c->pl;

    if (pl->n_taken >= UINT32_MAX ||
        !plan_grow(&pl->taken, &pl->cap_taken, pl->n_taken + 1, sizeof(*pl->taken)))
        return false;
    pl->taken[pl->n_taken] =
        (struct taken){ c->from, c->from_mem, c->to_mem, c->once, (uint32_t)pl->n_taken, *seg };
    pl->n_taken++;
    return true;
}

struct candidate {
    const struct shard *shard;
    const struct holder *holder;
    uint64_t cost;
};

static int by_cost(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;

    if (x->cost != y->cost)
        return x->cost < y->cost ? -1 : 1;
    return x->shard < y->shard ? -1 : x->shard > y->shard;
}

/* Shards of tensor t that meet want: they are sorted by where they begin in dimension 0, and
 * far_end never falls, so the first that can meet it is found by halving. */
static enum fl_status find_candidates(struct planner *pl, uint32_t t, const struct xfer_box *want,
                                      struct candidate **out, size_t *n, size_t *cap)
{
    const struct xfer_tensor *tensor = &pl->table.tensors[t];
    uint32_t low = pl->holders.first_shard[t], end = pl->holders.first_shard[t + 1], high = end;
    uint64_t want_end = tensor->ndim ? want->at[0] + want->len[0] : 1;
    struct xfer_box both;

    while (low < high) {
        uint32_t mid = low + (high - low) / 2;

        if (tensor->ndim && pl->holders.shards[mid].far_end <= want->at[0])
            low = mid + 1;
        else
            high = mid;
    }
    *n = 0;
    for (uint32_t i = low; i < end; i++) {
        const struct shard *sh = &pl->holders.shards[i];

        if (tensor->ndim && sh->box->at[0] >= want_end)
            break;
        if (!box_meet(tensor->ndim, sh->box, want, &both))
            continue;
        struct candidate c = { .shard = sh };

        c.holder = choose_holder(pl, sh, &c.cost);
        if (!c.holder)
            continue;
        if (!plan_grow(out, cap, *n + 1, sizeof(**out)))
            return no_memory(pl);
        (*out)[(*n)++] = c;
    }
    if (*n > 1)
        qsort(*out, *n, sizeof(**out), by_cost);
    return FL_OK;
}

static enum fl_status uncovered(const struct planner *pl, uint32_t t, const struct xfer_box *box)
{
    const struct xfer_tensor *tensor = &pl->table.tensors[t];
    struct xfer_box both;
    bool exists = false; /* then it is the way that lacks */

    for (uint32_t i = pl->holders.first_shard[t]; i < pl->holders.first_shard[t + 1]; i++)
        exists = exists || box_meet(tensor->ndim, pl->holders.shards[i].box, box, &both);
    char line[130], where[160];
    struct fl_str s = FL_STR_ON(where);

    for (unsigned d = 0; d < tensor->ndim; d++)
        fl_str_add(&s, "%s%llu:%llu", d ? ", " : "", (unsigned long long)box->at[d],
                   (unsigned long long)(box->at[d] + box->len[d]));
    return fl_fail(pl->err, exists ? FL_UNREACHABLE : FL_INVALID,
                   exists ? "no link for %s reaches engine rank %u from a source of [%s] of %s"
                          : "mode %s, engine rank %u: no source has [%s] of %s",
                   xfer_mode_name(pl->in->mode), pl->engine, where,
                   xfer_tensor_line(tensor, line, sizeof(line)));
}

/* Brings one box of a piece from as few sources as it takes. */
static enum fl_status cover_box(struct planner *pl, uint32_t t, const struct xfer_piece *piece,
                                const struct xfer_box *want, uint8_t once)
{
    const struct xfer_tensor *tensor = &pl->table.tensors[t];
    struct box_list rest = { 0 }, got = { 0 };
    struct candidate *found = NULL;
    size_t n = 0, cap = 0;
    bool ok = box_list_add(&rest, want);
    enum fl_status st = ok ? find_candidates(pl, t, want, &found, &n, &cap) : no_memory(pl);

    for (size_t i = 0; i < n && st == FL_OK && rest.n > 0; i++) {
        const struct holder *h = found[i].holder;
        const struct xfer_piece *src = &pl->in->sources[h->source].pieces[h->piece];
        struct cover c = { pl, h->source, src->mem, piece->mem, once };

        got.n = 0;
        ok = box_list_cut(&rest, tensor->ndim, found[i].shard->box, &got);
        for (size_t k = 0; k < got.n && ok; k++) {
            ok = box_segments(tensor, t, &got.at[k], (struct placed){ &src->box, src->off },
                              (struct placed){ &piece->box, piece->off }, take_seg, &c);
            pl->given[h->source] += xfer_box_bytes(tensor, &got.at[k]);
            pl->last_source = h->source;
        }
        if (!ok)
            st = no_memory(pl);
    }
    if (st == FL_OK && rest.n > 0)
        st = uncovered(pl, t, &rest.at[0]);
    free(found);
    box_list_fini(&rest);
    box_list_fini(&got);
    return st;
}

/* Whole tensors on disk stand for sources: one writer a tensor, the one that writes least. */
static enum fl_status cover_from_disk(struct planner *pl, uint32_t t,
                                      const struct xfer_piece *piece, const struct xfer_box *want,
                                      uint8_t once)
{
    const struct xfer_tensor *tensor = &pl->table.tensors[t];
    struct xfer_box whole = xfer_box_whole(tensor);
    const struct shard *sh = NULL;
    char line[130];

    for (uint32_t i = pl->holders.first_shard[t]; i < pl->holders.first_shard[t + 1]; i++)
        if (box_same(tensor->ndim, pl->holders.shards[i].box, &whole))
            sh = &pl->holders.shards[i];
    if (!sh)
        return fl_fail(pl->err, FL_INVALID,
                       "disk-delta writes whole tensors, and no source has all of %s",
                       xfer_tensor_line(tensor, line, sizeof(line)));
    /* The first holder, so that all engines read one writer's files. */
    struct cover c = { pl, pl->holders.holders[sh->first_holder].source, 0, piece->mem, once };

    if (!box_segments(tensor, t, want, (struct placed){ &whole, 0 },
                      (struct placed){ &piece->box, piece->off }, take_seg, &c))
        return no_memory(pl);
    return FL_OK;
}

static enum fl_status cover_boxes(struct planner *pl, uint32_t t, const struct xfer_piece *piece,
                                  const struct box_list *l, uint8_t once)
{
    for (size_t i = 0; i < l->n; i++)
        FL_TRY(pl->in->mode == XFER_DISK_DELTA ? cover_from_disk(pl, t, piece, &l->at[i], once)
                                               : cover_box(pl, t, piece, &l->at[i], once));
    return FL_OK;
}

/* What another rank of the party has counted already is brought too, but counts no more. */
static enum fl_status cover_piece(struct planner *pl, uint32_t t, const struct xfer_piece *piece)
{
    const struct xfer_tensor *tensor = &pl->table.tensors[t];
    struct box_list fresh = { 0 }, again = { 0 }, *seen = &pl->seen[t];
    bool ok = box_list_add(&fresh, &piece->box);

    for (size_t i = 0; i < seen->n && ok && fresh.n > 0; i++)
        ok = box_list_cut(&fresh, tensor->ndim, &seen->at[i], &again);
    enum fl_status st = ok ? cover_boxes(pl, t, piece, &fresh, 1) : no_memory(pl);

    if (st == FL_OK)
        st = cover_boxes(pl, t, piece, &again, 0);
    for (size_t i = 0; i < fresh.n && st == FL_OK; i++) {
        pl->counted[t] += xfer_box_bytes(tensor, &fresh.at[i]);
        if (!box_list_add(seen, &fresh.at[i]))
            st = no_memory(pl);
    }
    box_list_fini(&fresh);
    box_list_fini(&again);
    return st;
}

/* ---- edges and buckets of one engine ---- */

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

/* Does that edge bring the very same? */
static bool same_edge(const struct planner *pl, uint32_t edge, const struct taken *t, size_t n,
                      uint64_t hash)
{
    const struct xfer_edge *e = &pl->out->edges[edge];

    if (pl->edge_hash[edge] != hash || e->from != t->from)
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
    bool sorted = true;

    pl->engine = engine;
    pl->last_source = UINT32_MAX;
    pl->n_taken = 0;
    for (size_t i = 0; i < m->n_pieces; i++)
        FL_TRY(cover_piece(pl, map[m->pieces[i].tensor], &m->pieces[i]));
    if (pl->in->mode == XFER_SHARE)
        FL_TRY(check_shared(pl));
    for (size_t i = 1; i < pl->n_taken && sorted; i++)
        sorted = by_edge(&pl->taken[i - 1], &pl->taken[i]) < 0;
    if (!sorted)
        qsort(pl->taken, pl->n_taken, sizeof(*pl->taken), by_edge);
    for (size_t i = 0, n; i < pl->n_taken; i += n) {
        for (n = 1; i + n < pl->n_taken && pl->taken[i + n].from == pl->taken[i].from; n++)
            ;
        if (!add_edge(pl, &pl->taken[i], n))
            return no_memory(pl);
    }
    return FL_OK;
}

/* ---- parties ---- */

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
    enum fl_status st = done ? FL_OK : no_memory(pl);

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
        return no_memory(pl);
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
            if (!(k->caps & LINK_MAP) && (r == 0 || !(k->caps & LINK_CAST)))
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
    return bad ? no_memory(pl) : FL_OK;
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
        return no_memory(pl);
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

static enum fl_status prepare(struct planner *pl)
{
    uint64_t all = 0;

    FL_TRY(check_room(pl));
    FL_TRY(plan_table_make(pl->in, &pl->table, pl->err));
    FL_TRY(plan_holders_make(pl->in, &pl->table, &pl->holders, pl->err));
    FL_TRY(find_links(pl));
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
    return pl->given && pl->seen && pl->counted && pl->busy_ns && pl->out ? FL_OK : no_memory(pl);
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
