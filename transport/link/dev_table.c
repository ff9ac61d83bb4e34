/* Segments as tables of pieces on the device, and as the stretches that copies take */
#include <stdlib.h>
#include <string.h>
#include "transport/link/dev_priv.h"

enum fl_status dev_table_room(struct link_dev *d, size_t n, struct dev_table *out,
                              struct fl_err *err)
{
    struct dev_table t = { .n = n };

    FL_TRY(d->gpu->alloc(d->g, (n + 1) * sizeof(struct kernel_piece), &t.addr, err));
    *out = t;
    return FL_OK;
}

/* Waited for: a device that reaches the program's memory by itself (GB10, Grace) reads it when it
 * comes to it, not before the call returns. And not behind a broadcast: where its ranks are dead
 * the wait would have no end. */
enum fl_status dev_table_upload(struct link_dev *d, struct gpu_stream *s,
                                const struct kernel_piece *cut, const struct dev_table *t,
                                struct fl_err *err)
{
    enum fl_status st = d->gpu->copy(s, t->addr, dev_addr(cut), t->n * sizeof(*cut), err);
    enum fl_status ended = d->gpu->stream_sync(s, st == FL_OK ? err : NULL);

    return st == FL_OK ? ended : st;
}

enum fl_status dev_pieces_cut(const struct link_seg *segs, size_t n, struct kernel_piece **out,
                              size_t *n_out, struct fl_err *err)
{
    struct kernel_piece *whole = malloc((n + 1) * sizeof(*whole)), *cut = NULL;
    size_t n_cut = 0;

    for (size_t i = 0; whole && i < n; i++) {
        memcpy(&whole[i], &segs[i], sizeof(*whole));
        whole[i].tensor = (uint32_t)i; /* digests are one a segment */
    }
    if (whole) {
        n_cut = kernel_pieces_cut(whole, n, KERNEL_NO_CAST, NULL);
        cut = malloc((n_cut + 1) * sizeof(*cut));
    }
    if (cut)
        kernel_pieces_cut(whole, n, KERNEL_NO_CAST, cut);
    free(whole);
    if (!cut)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a table of %zu segments", n);
    *out = cut;
    *n_out = n_cut;
    return FL_OK;
}

enum fl_status dev_table_make(struct link_dev *d, struct gpu_stream *s, const struct link_seg *segs,
                              size_t n, enum dev_side side, struct dev_table *out,
                              struct fl_err *err)
{
    struct kernel_piece *cut;
    size_t n_cut;

    FL_TRY(dev_pieces_cut(segs, n, &cut, &n_cut, err));
    for (size_t i = 0; side == DEV_TO && i < n_cut; i++) {
        cut[i].from_off = cut[i].to_off;
        cut[i].from_step = cut[i].to_step;
    }
    struct dev_table t = { 0 };
    enum fl_status st = dev_table_room(d, n_cut, &t, err);

    if (st == FL_OK)
        st = dev_table_upload(d, s, cut, &t, err);
    free(cut);
    if (st == FL_OK)
        *out = t;
    else
        dev_table_free(d, &t);
    return st;
}

size_t dev_stretches(const struct link_seg *segs, size_t n, struct dev_stretch *out)
{
    size_t made = 0;

    for (size_t i = 0; i < n; i++) {
        const struct link_seg *s = &segs[i];
        struct dev_stretch *last = made ? &out[made - 1] : NULL;
        bool whole = s->rows == 1 || (s->from_step == s->run_bytes && s->to_step == s->run_bytes);
        uint64_t bytes = whole ? s->rows * s->run_bytes : 0;

        if (whole && last && last->bytes && last->from_off + last->bytes == s->from_off &&
            last->to_off + last->bytes == s->to_off) {
            last->bytes += bytes;
            last->n++;
            continue;
        }
        out[made++] = (struct dev_stretch){ s->from_off, s->to_off, bytes, i, 1 };
    }
    return made;
}

void dev_table_free(struct link_dev *d, struct dev_table *t)
{
    if (!t->addr)
        return;
    d->gpu->free(d->g, t->addr);
    *t = (struct dev_table){ 0 };
}
