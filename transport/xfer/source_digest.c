/* What a version's pieces are, as digests: on the pool, by the device where they lie on one */
#include <stdlib.h>
#include <string.h>
#include "transport/xfer/plan_priv.h"
#include "transport/xfer/source_priv.h"

/* The runs of all pieces, each with its piece: made once, one launch a version. */
struct piece_segs {
    struct link_seg *at;
    size_t n, cap;
};

static bool add_seg(void *arg, const struct link_seg *seg)
{
    struct piece_segs *ps = arg;

    if (!plan_grow(&ps->at, &ps->cap, ps->n + 1, sizeof(*seg)))
        return false;
    ps->at[ps->n++] = *seg;
    return true;
}

static enum fl_status device_segs(struct xfer_source *s, struct fl_err *err)
{
    struct piece_segs ps = { 0 };
    bool good = s->segs_of != NULL;

    if (s->segs)
        return FL_OK;
    for (size_t m = 0; good && m < s->have->n_mems; m++) {
        s->segs_of[m] = ps.n;
        for (size_t i = 0; good && i < s->have->n_pieces; i++) {
            const struct xfer_piece *p = &s->have->pieces[i];
            const struct xfer_tensor *t = &s->have->tensors[p->tensor];
            struct placed at = { &p->box, p->off };

            good = p->mem != m || xfer_box_bytes(t, &p->box) == 0 ||
                   box_segments(t, (uint32_t)i, &p->box, at, at, add_seg, &ps);
        }
    }
    if (!good) {
        free(ps.at);
        return fl_fail(err, FL_EXHAUSTED, "no memory for the runs of %zu pieces",
                       s->have->n_pieces);
    }
    s->segs = ps.at;
    s->n_segs = s->segs_of[s->have->n_mems] = ps.n;
    return FL_OK;
}

/* What the device needs for it is kept: of 16 GB it is a table of 8 MB, which takes as long to make
 * as the digests. */
static enum fl_status mem_digests(struct xfer_source *s, size_t m, const struct link_seg *segs,
                                  size_t n, uint64_t (*each)[2], struct fl_err *err)
{
    const struct link_mem *mem = &s->mems[s->slot][m];

    if (!s->digesters[m])
        FL_TRY(link_digester_create(mem, segs, n, true, &s->digesters[m], err));
    return link_digester_run(s->digesters[m], mem, each, err);
}

static enum fl_status device_digests(struct xfer_source *s, struct fl_err *err)
{
    FL_TRY(device_segs(s, err));
    uint64_t(*each)[2] = calloc(s->n_segs + 1, sizeof(*each));

    if (!each)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu digests", s->n_segs);
    enum fl_status st = FL_OK;

    for (size_t m = 0; m < s->have->n_mems && st == FL_OK; m++) {
        size_t at = s->segs_of[m], n = s->segs_of[m + 1] - at;

        if (n)
            st = mem_digests(s, m, s->segs + at, n, each + at, err);
    }
    for (size_t i = 0; i < s->n_segs; i++) { /* tensor: the piece */
        s->fresh[s->segs[i].tensor][0] += each[i][0];
        s->fresh[s->segs[i].tensor][1] += each[i][1];
    }
    free(each);
    return st;
}

void source_digest_work(struct fl_work *w)
{
    struct xfer_source *s = container_of(w, struct xfer_source, digest_work);

    memset(s->fresh, 0, s->have->n_pieces * sizeof(*s->fresh));
    s->digest_err = (struct fl_err){ 0 };
    if (s->mems[s->slot][0].on_device) {
        s->digest_err.status = device_digests(s, &s->digest_err);
        return;
    }
    for (size_t i = 0; i < s->have->n_pieces; i++) {
        const struct xfer_piece *p = &s->have->pieces[i];

        xfer_digest_piece(s->fresh[i], &s->have->tensors[p->tensor], &p->box,
                          (const char *)s->mems[s->slot][p->mem].addr + p->off);
    }
}
