/* transport/link/nccl_table.c - how a bucket's segments become parcels, and the tables of it on the
 * device
 *
 * What is contiguous on both sides is a parcel of its own and goes from where it lies to where it
 * belongs; the rest is packed, a stage at a time. All ranks cut by one rule, so nobody has to say
 * it. */
#include <stdlib.h>
#include <xxhash.h>
#include "transport/link/nccl_priv.h"

void nccl_table_drop(struct nccl *k, struct nccl_table *t)
{
    nccl_throw(k->dev, t->t.addr, NULL);
    free(t->parcels);
    *t = (struct nccl_table){ 0 };
}

struct cutting {
    struct kernel_piece *pieces;
    size_t n;
    struct nccl_table *t;
    size_t cap;
    bool gathers;
};

static struct nccl_parcel *parcel_new(struct cutting *c)
{
    struct nccl_table *t = c->t;

    if (t->n_parcels == c->cap) {
        size_t cap = c->cap ? 2 * c->cap : 16;
        struct nccl_parcel *grown = realloc(t->parcels, cap * sizeof(*grown));

        if (!grown)
            return NULL;
        t->parcels = grown;
        c->cap = cap;
    }
    t->parcels[t->n_parcels] = (struct nccl_parcel){ .first = c->n };
    return &t->parcels[t->n_parcels++];
}

/* A piece goes into the packed parcel in hand, or begins the next one. */
static bool pack(struct cutting *c, struct kernel_piece *p)
{
    struct nccl_parcel *at = c->t->n_parcels ? &c->t->parcels[c->t->n_parcels - 1] : NULL;
    uint64_t bytes = (p->run_bytes * p->rows + 15) / 16 * 16; /* so that the next one is aligned */

    if (!at || at->direct || at->bytes + bytes > NCCL_STAGE_BYTES)
        at = parcel_new(c);
    if (!at)
        return false;
    if (c->gathers) {
        p->to_off = at->bytes;
        p->to_step = p->run_bytes;
    } else {
        p->from_off = at->bytes;
        p->from_step = p->run_bytes;
    }
    at->bytes += bytes;
    at->n++;
    c->n++;
    return true;
}

static bool go_direct(struct cutting *c, const struct dev_stretch *s, size_t n_pieces)
{
    struct nccl_parcel *at = parcel_new(c);

    if (!at)
        return false;
    at->direct = true;
    at->n = n_pieces;
    at->bytes = s->bytes;
    at->from_off = s->from_off;
    at->to_off = s->to_off;
    for (size_t i = 0; i < n_pieces && !c->gathers;
         i++) { /* digested where they have come to lie */
        c->pieces[c->n + i].from_off = c->pieces[c->n + i].to_off;
        c->pieces[c->n + i].from_step = c->pieces[c->n + i].to_step;
    }
    c->n += n_pieces;
    return true;
}

/* All ranks cut the same segments by the same rule. pieces: all of them, in order. */
static enum fl_status parcels_make(const struct nccl_job *j, struct cutting *c, size_t n_pieces,
                                   struct fl_err *err)
{
    struct dev_stretch *all = malloc((j->n + 1) * sizeof(*all));
    size_t n = all ? dev_stretches(j->segs, j->n, all) : 0;
    bool good = all != NULL;

    for (size_t i = 0; good && i < n; i++) {
        size_t last = all[i].first + all[i].n, k = c->n;

        while (k < n_pieces && c->pieces[k].tensor < last) /* tensor: the segment */
            k++;
        if (all[i].bytes >= NCCL_DIRECT_MIN)
            good = go_direct(c, &all[i], k - c->n);
        while (good && c->n < k)
            good = pack(c, &c->pieces[c->n]);
    }
    free(all);
    return good ? FL_OK
                : fl_fail(err, FL_EXHAUSTED, "no memory for the parcels of %zu segments", j->n);
}

enum fl_status nccl_table_for(struct nccl *k, struct nccl_job *j, struct fl_err *err)
{
    XXH128_hash_t h = XXH3_128bits(j->segs, j->n * sizeof(*j->segs));
    bool gathers = j->root == k->self;
    struct nccl_table *oldest = &k->tables[0];
    struct kernel_piece *cut;
    size_t n;

    for (unsigned i = 0; i < NCCL_TABLES; i++) {
        struct nccl_table *t = &k->tables[i];

        if (t->t.addr && t->key[0] == h.low64 && t->key[1] == h.high64 && t->gathers == gathers) {
            t->used = ++k->uses;
            j->table = t;
            return FL_OK;
        }
        if (t->used < oldest->used)
            oldest = t;
    }
    nccl_table_drop(k, oldest); /* more of them than jobs can be in flight */
    FL_TRY(dev_pieces_cut(j->segs, j->n, &cut, &n, err));
    struct cutting c = { .pieces = cut, .t = oldest, .gathers = gathers };
    enum fl_status st = parcels_make(j, &c, n, err);

    if (st == FL_OK)
        st = dev_table_room(k->dev, n, &oldest->t, err);
    if (st == FL_OK)
        st = dev_table_upload(k->dev, k->dev->upload, cut, &oldest->t, err);
    free(cut);
    if (st != FL_OK) {
        nccl_table_drop(k, oldest);
        return st;
    }
    oldest->key[0] = h.low64;
    oldest->key[1] = h.high64;
    oldest->gathers = gathers;
    oldest->used = ++k->uses;
    j->table = oldest;
    return FL_OK;
}
