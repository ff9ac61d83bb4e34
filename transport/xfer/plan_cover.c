/* transport/xfer/plan_cover.c - which source brings which part of a piece */
#include <stdlib.h>
#include <string.h>
#include "common/base/str.h"
#include "transport/xfer/plan_priv.h"

static uint64_t nearness(const struct planner *pl, uint32_t source)
{
    return pl->in->mode == XFER_DISK_DELTA ? 0 : pl->near[source * pl->in->n_engines + pl->engine];
}

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
            return plan_no_memory(pl);
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
    const struct shard *has = NULL; /* then it is the way that lacks */

    for (uint32_t i = pl->holders.first_shard[t]; i < pl->holders.first_shard[t + 1] && !has; i++)
        if (box_meet(tensor->ndim, pl->holders.shards[i].box, box, &both))
            has = &pl->holders.shards[i];
    char line[130], where[160], ways[200];
    struct fl_str s = FL_STR_ON(where), w = FL_STR_ON(ways);

    for (unsigned d = 0; d < tensor->ndim; d++)
        fl_str_add(&s, "%s%llu:%llu", d ? ", " : "", (unsigned long long)box->at[d],
                   (unsigned long long)(box->at[d] + box->len[d]));
    xfer_tensor_line(tensor, line, sizeof(line));
    if (!has)
        return fl_fail(pl->err, FL_INVALID, "mode %s, engine rank %u: no source has [%s] of %s",
                       xfer_mode_name(pl->in->mode), pl->engine, where, line);
    struct plan_gap g = {
        .mode = pl->in->mode,
        .from = &pl->in->places[pl->holders.holders[has->first_holder].source],
        .to = &pl->in->places[pl->in->n_sources + pl->engine],
        .faster_than_ns = UINT64_MAX,
    };

    plan_why_not(&g, pl->links, pl->n_links, &w);
    return fl_fail(pl->err, FL_UNREACHABLE, "no link for %s reaches engine rank %u with %.60s: %s",
                   xfer_mode_name(pl->in->mode), pl->engine, tensor->name,
                   ways[0] ? ways : "there is none");
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
    enum fl_status st = ok ? find_candidates(pl, t, want, &found, &n, &cap) : plan_no_memory(pl);

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
            st = plan_no_memory(pl);
    }
    if (st == FL_OK && rest.n > 0)
        st = uncovered(pl, t, &rest.at[0]);
    free(found);
    box_list_fini(&rest);
    box_list_fini(&got);
    return st;
}

const struct shard *plan_whole_shard(const struct planner *pl, uint32_t t)
{
    struct xfer_box whole = xfer_box_whole(&pl->table.tensors[t]);

    for (uint32_t i = pl->holders.first_shard[t]; i < pl->holders.first_shard[t + 1]; i++)
        if (box_same(pl->table.tensors[t].ndim, pl->holders.shards[i].box, &whole))
            return &pl->holders.shards[i];
    return NULL;
}

/* Whole tensors on disk stand for sources: all engines read one writer's files. */
static enum fl_status cover_from_disk(struct planner *pl, uint32_t t,
                                      const struct xfer_piece *piece, const struct xfer_box *want,
                                      uint8_t once)
{
    const struct xfer_tensor *tensor = &pl->table.tensors[t];
    struct xfer_box whole = xfer_box_whole(tensor);
    const struct shard *sh = plan_whole_shard(pl, t);
    char line[130];

    if (!sh)
        return fl_fail(pl->err, FL_INVALID,
                       "disk-delta writes whole tensors, and no source has all of %s",
                       xfer_tensor_line(tensor, line, sizeof(line)));
    if (pl->writer == pl->in->n_sources)
        return fl_fail(pl->err, FL_INVALID,
                       "disk-delta has one writer, and no source holds all tensors whole: %s is "
                       "whole at source %u, which lacks others; use broadcast or p2p",
                       xfer_tensor_line(tensor, line, sizeof(line)),
                       pl->holders.holders[sh->first_holder].source);
    struct cover c = { pl, pl->writer, 0, piece->mem, once };

    if (!box_segments(tensor, t, want, (struct placed){ &whole, 0 },
                      (struct placed){ &piece->box, piece->off }, take_seg, &c))
        return plan_no_memory(pl);
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
enum fl_status plan_cover_piece(struct planner *pl, uint32_t t, const struct xfer_piece *piece)
{
    const struct xfer_tensor *tensor = &pl->table.tensors[t];
    struct box_list fresh = { 0 }, again = { 0 }, *seen = &pl->seen[t];

    if (xfer_box_bytes(tensor, &piece->box) == 0)
        return FL_OK;
    bool ok = box_list_add(&fresh, &piece->box);

    for (size_t i = 0; i < seen->n && ok && fresh.n > 0; i++)
        ok = box_list_cut(&fresh, tensor->ndim, &seen->at[i], &again);
    enum fl_status st = ok ? cover_boxes(pl, t, piece, &fresh, 1) : plan_no_memory(pl);

    if (st == FL_OK)
        st = cover_boxes(pl, t, piece, &again, 0);
    for (size_t i = 0; i < fresh.n && st == FL_OK; i++) {
        pl->counted[t] += xfer_box_bytes(tensor, &fresh.at[i]);
        if (!box_list_add(seen, &fresh.at[i]))
            st = plan_no_memory(pl);
    }
    box_list_fini(&fresh);
    box_list_fini(&again);
    return st;
}
