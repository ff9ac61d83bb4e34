/* transport/xfer/plan_holders.c - the pieces of all sources by tensor, equal boxes together */
#include <stdlib.h>
#include <string.h>
#include "transport/xfer/plan_priv.h"

struct sorting {
    const struct xfer_plan_in *in;
    unsigned ndim;
};

static const struct xfer_box *box_of(const struct xfer_plan_in *in, const struct holder *h)
{
    return &in->sources[h->source].pieces[h->piece].box;
}

static int by_box(const void *a, const void *b, void *arg)
{
    const struct sorting *s = arg;
    const struct holder *h = a, *k = b;
    const struct xfer_box *x = box_of(s->in, h), *y = box_of(s->in, k);

    for (unsigned d = 0; d < s->ndim; d++) {
        if (x->at[d] != y->at[d])
            return x->at[d] < y->at[d] ? -1 : 1;
        if (x->len[d] != y->len[d])
            return x->len[d] < y->len[d] ? -1 : 1;
    }
    if (h->source != k->source)
        return h->source < k->source ? -1 : 1;
    return h->piece < k->piece ? -1 : h->piece > k->piece;
}

/* Holders n of one tensor become shards; they come in the order of sources, so replicas of one box
 * alone need no sorting. */
static uint32_t shards_of(const struct xfer_plan_in *in, unsigned ndim, struct holder *all,
                          uint32_t first, uint32_t n, struct shard *out)
{
    struct sorting s = { in, ndim };
    uint32_t n_shards = 0;
    bool one = true;

    for (uint32_t i = 1; i < n && one; i++)
        one = box_same(ndim, box_of(in, &all[first]), box_of(in, &all[first + i]));
    if (!one)
        qsort_r(&all[first], n, sizeof(*all), by_box, &s);
    for (uint32_t i = 0; i < n; i++) {
        const struct xfer_box *box = box_of(in, &all[first + i]);
        uint64_t end = ndim ? box->at[0] + box->len[0] : 1;

        if (n_shards == 0 || !box_same(ndim, out[n_shards - 1].box, box)) {
            uint64_t before = n_shards ? out[n_shards - 1].far_end : 0;

            out[n_shards++] = (struct shard){ .box = box,
                                              .far_end = end > before ? end : before,
                                              .first_holder = first + i };
        }
        out[n_shards - 1].n_holders++;
    }
    return n_shards;
}

enum fl_status plan_holders_make(const struct xfer_plan_in *in, const struct plan_table *table,
                                 struct plan_holders *out, struct fl_err *err)
{
    size_t n_pieces = 0;

    for (size_t s = 0; s < in->n_sources; s++)
        n_pieces += in->sources[s].n_pieces;
    if (n_pieces >= UINT32_MAX)
        return fl_fail(err, FL_INVALID, "%zu pieces at the sources are too many", n_pieces);
    out->holders = malloc((n_pieces + 1) * sizeof(*out->holders));
    out->shards = calloc(n_pieces + 1, sizeof(*out->shards));
    out->first_shard = calloc(table->n + 2, sizeof(*out->first_shard));
    uint32_t *fill = calloc(table->n + 2, sizeof(*fill));

    if (!out->holders || !out->shards || !out->first_shard || !fill) {
        free(fill);
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu pieces at the sources", n_pieces);
    }
    for (size_t s = 0; s < in->n_sources; s++)
        for (size_t i = 0; i < in->sources[s].n_pieces; i++)
            fill[table->map[s][in->sources[s].pieces[i].tensor] + 1]++;
    for (size_t t = 0; t < table->n; t++)
        fill[t + 1] += fill[t];
    for (uint32_t s = 0; s < in->n_sources; s++)
        for (uint32_t i = 0; i < in->sources[s].n_pieces; i++)
            out->holders[fill[table->map[s][in->sources[s].pieces[i].tensor]]++] =
                (struct holder){ s, i };
    for (size_t t = 0; t < table->n; t++) { /* fill[t] is now where tensor t ends */
        uint32_t first = t ? fill[t - 1] : 0, at = out->first_shard[t];

        out->first_shard[t + 1] = at + shards_of(in, table->tensors[t].ndim, out->holders, first,
                                                 fill[t] - first, &out->shards[at]);
    }
    free(fill);
    return FL_OK;
}

void plan_holders_fini(struct plan_holders *h)
{
    free(h->holders);
    free(h->shards);
    free(h->first_shard);
    *h = (struct plan_holders){ 0 };
}
