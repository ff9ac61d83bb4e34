#include "transport/xfer/plan_priv.h"
#include <stdlib.h>
#include <string.h>

bool box_meet(unsigned ndim, const struct xfer_box *a, const struct xfer_box *b,
              struct xfer_box *out)
{
    struct xfer_box x = { .at = { 0 } };

    for (unsigned d = 0; d < ndim; d++) {
        uint64_t a_end = a->at[d] + a->len[d], b_end = b->at[d] + b->len[d];
        uint64_t end = a_end < b_end ? a_end : b_end;

        x.at[d] = a->at[d] > b->at[d] ? a->at[d] : b->at[d];
        if (end <= x.at[d])
            return false;
        x.len[d] = end - x.at[d];
    }
    *out = x;
    return true;
}

bool box_same(unsigned ndim, const struct xfer_box *a, const struct xfer_box *b)
{
    return memcmp(a->at, b->at, ndim * sizeof(a->at[0])) == 0 &&
           memcmp(a->len, b->len, ndim * sizeof(a->len[0])) == 0;
}

/* Slabs before and after b in each dimension; what remains has b's extent there. */
unsigned box_cut(unsigned ndim, const struct xfer_box *a, const struct xfer_box *b,
                 struct xfer_box out[BOX_CUTS])
{
    struct xfer_box rest = *a;
    unsigned n = 0;

    for (unsigned d = 0; d < ndim; d++) {
        uint64_t before = b->at[d] - rest.at[d], after = rest.len[d] - before - b->len[d];

        if (before > 0) {
            out[n] = rest;
            out[n++].len[d] = before;
        }
        if (after > 0) {
            out[n] = rest;
            out[n].at[d] = b->at[d] + b->len[d];
            out[n++].len[d] = after;
        }
        rest.at[d] = b->at[d];
        rest.len[d] = b->len[d];
    }
    return n;
}

bool plan_grow(void *array, size_t *cap, size_t want, size_t item_bytes)
{
    void **at = array;

    if (want <= *cap)
        return true;
    size_t grown = *cap ? *cap * 2 : 16;

    while (grown < want)
        grown *= 2;
    void *moved = realloc(*at, grown * item_bytes);

    if (!moved)
        return false;
    *at = moved;
    *cap = grown;
    return true;
}

bool box_list_add(struct box_list *l, const struct xfer_box *b)
{
    if (!plan_grow(&l->at, &l->cap, l->n + 1, sizeof(*b)))
        return false;
    l->at[l->n++] = *b;
    return true;
}

void box_list_fini(struct box_list *l)
{
    free(l->at);
    *l = (struct box_list){ 0 };
}

bool box_list_cut(struct box_list *l, unsigned ndim, const struct xfer_box *cut,
                  struct box_list *taken)
{
    for (size_t i = 0; i < l->n;) {
        struct xfer_box both, left[BOX_CUTS];

        if (!box_meet(ndim, &l->at[i], cut, &both)) {
            i++;
            continue;
        }
        unsigned n = box_cut(ndim, &l->at[i], &both, left);

        if (taken && !box_list_add(taken, &both))
            return false;
        /* what is left of it has nothing of cut, and need not be seen again */
        l->at[i] = l->at[--l->n];
        for (unsigned k = 0; k < n; k++)
            if (!box_list_add(l, &left[k]))
                return false;
    }
    return true;
}

/* One dimension outside of the runs, with its step in bytes in the three layouts. */
struct walk {
    uint64_t len, from, to, whole;
};

/* Dimensions that step together in all three layouts are one. */
static unsigned merge_walks(struct walk *w, unsigned n)
{
    unsigned kept = 0;

    for (unsigned i = 0; i < n; i++) { /* outermost first */
        struct walk *in = &w[i], *out = kept ? &w[kept - 1] : NULL;

        if (in->len == 1)
            continue;
        if (out && out->from == in->from * in->len && out->to == in->to * in->len &&
            out->whole == in->whole * in->len) {
            uint64_t len = out->len;

            *out = *in;
            out->len *= len;
        } else {
            w[kept++] = *in;
        }
    }
    return kept;
}

struct layout {
    uint64_t off, step[FL_DIMS];
};

static void layout_of(struct layout *l, unsigned ndim, uint64_t item, const uint64_t *len,
                      const uint64_t *at, const struct xfer_box *part, uint64_t off)
{
    l->off = off;
    for (unsigned d = ndim; d-- > 0; item *= len[d]) {
        l->step[d] = item;
        l->off += (part->at[d] - (at ? at[d] : 0)) * item;
    }
}

/* The longest of them is the segment's rows. False: more than a segment can say. */
static bool rows_of(struct walk *walk, unsigned *n, struct link_seg *seg)
{
    unsigned longest = 0;

    if (*n == 0)
        return true;
    for (unsigned i = 1; i < *n; i++)
        if (walk[i].len > walk[longest].len)
            longest = i;
    struct walk rows = walk[longest];

    if (rows.len > UINT32_MAX)
        return false;
    memmove(&walk[longest], &walk[longest + 1], (*n - longest - 1) * sizeof(walk[0]));
    --*n;
    seg->rows = (uint32_t)rows.len;
    seg->from_step = rows.from;
    seg->to_step = rows.to;
    seg->byte_step = rows.whole;
    return true;
}

bool box_segments(const struct xfer_tensor *t, uint32_t tensor, const struct xfer_box *part,
                  struct placed from, struct placed to,
                  bool (*emit)(void *arg, const struct link_seg *seg), void *arg)
{
    uint64_t run = xfer_dtype_bytes(t->dtype);
    struct layout f, o, w;
    struct walk walk[FL_DIMS];
    unsigned d = t->ndim, n = 0;

    layout_of(&f, t->ndim, run, from.box->len, from.box->at, part, from.off);
    layout_of(&o, t->ndim, run, to.box->len, to.box->at, part, to.off);
    layout_of(&w, t->ndim, run, t->shape, NULL, part, 0);
    while (d > 0) { /* a dimension that all three have whole continues into the one outside */
        run *= part->len[--d];
        if (part->len[d] != from.box->len[d] || part->len[d] != to.box->len[d] ||
            part->len[d] != t->shape[d])
            break;
    }
    for (unsigned i = 0; i < d; i++)
        walk[n++] = (struct walk){ part->len[i], f.step[i], o.step[i], w.step[i] };
    n = merge_walks(walk, n);
    struct link_seg seg = { .from_off = f.off,
                            .to_off = o.off,
                            .first_byte = w.off,
                            .run_bytes = run,
                            .rows = 1,
                            .tensor = tensor };
    uint64_t at[FL_DIMS] = { 0 }, times = 1;

    if (!rows_of(walk, &n, &seg))
        return false;
    for (unsigned i = 0; i < n; i++)
        times *= walk[i].len;
    for (uint64_t k = 0; k < times; k++) {
        struct link_seg s = seg;

        for (unsigned i = 0; i < n; i++) {
            s.from_off += at[i] * walk[i].from;
            s.to_off += at[i] * walk[i].to;
            s.first_byte += at[i] * walk[i].whole;
        }
        if (!emit(arg, &s))
            return false;
        for (unsigned i = n; i-- > 0 && ++at[i] == walk[i].len;)
            at[i] = 0;
    }
    return true;
}
