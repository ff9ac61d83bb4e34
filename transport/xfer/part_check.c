/* transport/xfer/part_check.c - is a part what its member can do, and all that it needs?
 *
 * A plan that is wrong, from a defect or from another manifest than the member's own, must not
 * write a byte. So each segment is held against the member's own pieces: inside of one, at the
 * place that its offset in the whole tensor says, no byte twice, and in sum as many as the pieces
 * have. */
#include <stdlib.h>
#include <string.h>
#include "transport/xfer/plan_priv.h"

enum { MAX_RUNS = 1 << 24 }; /* looked at one by one where segments interleave */

struct checker {
    const struct xfer_plan *part;
    const struct xfer_manifest *mine;
    struct fl_err *err;
    uint32_t *by_place; /* my pieces that have bytes, by memory and offset */
    size_t n_placed;
    uint32_t *local;    /* tensor of the plan to mine; UINT32_MAX   */
    struct span {
        uint64_t at, end;
        uint32_t mem, seg;
    } * spans;
    size_t n_spans;
};

static int piece_order(const struct xfer_piece *p, uint32_t mem, uint64_t off)
{
    if (p->mem != mem)
        return p->mem < mem ? -1 : 1;
    return p->off < off ? -1 : p->off > off;
}

static int by_place(const void *a, const void *b, void *arg)
{
    const struct xfer_manifest *m = arg;
    const struct xfer_piece *q = &m->pieces[*(const uint32_t *)b];

    return piece_order(&m->pieces[*(const uint32_t *)a], q->mem, q->off);
}

static uint32_t find_tensor(const struct xfer_manifest *m, const char *name)
{
    size_t low = 0, high = m->n_tensors;

    while (low < high) {
        size_t mid = low + (high - low) / 2;
        int c = strcmp(m->tensors[mid].name, name);

        if (c == 0)
            return (uint32_t)mid;
        if (c < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return UINT32_MAX;
}

static enum fl_status match_tensors(struct checker *c)
{
    char a[130], b[130];

    for (size_t t = 0; t < c->part->n_tensors; t++) {
        const struct xfer_tensor *theirs = &c->part->tensors[t];

        c->local[t] = theirs->name[0] ? find_tensor(c->mine, theirs->name) : UINT32_MAX;
        if (!theirs->name[0])
            continue;
        const struct xfer_tensor *mine =
            c->local[t] == UINT32_MAX ? NULL : &c->mine->tensors[c->local[t]];

        if (!mine || mine->dtype != theirs->dtype || mine->ndim != theirs->ndim ||
            memcmp(mine->shape, theirs->shape, mine->ndim * sizeof(mine->shape[0])) != 0)
            return fl_fail(c->err, FL_INVALID, "the plan says %s, here is %s",
                           xfer_tensor_line(theirs, a, sizeof(a)),
                           mine ? xfer_tensor_line(mine, b, sizeof(b)) : "no such tensor");
    }
    return FL_OK;
}

/* My piece that holds off in mem; NULL: none. */
static const struct xfer_piece *piece_at(const struct checker *c, uint32_t mem, uint64_t off)
{
    size_t low = 0, high = c->n_placed;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (piece_order(&c->mine->pieces[c->by_place[mid]], mem, off) <= 0)
            low = mid + 1;
        else
            high = mid;
    }
    const struct xfer_piece *p = low ? &c->mine->pieces[c->by_place[low - 1]] : NULL;

    if (!p || p->mem != mem ||
        off - p->off >= xfer_box_bytes(&c->mine->tensors[p->tensor], &p->box))
        return NULL;
    return p;
}

/* Offset in the whole tensor of the byte at loc of a piece; and how many follow it contiguously in
 * both. */
static uint64_t whole_offset(const struct xfer_tensor *t, const struct xfer_box *box, uint64_t loc,
                             uint64_t *follow)
{
    uint64_t item = xfer_dtype_bytes(t->dtype), step = item, whole = loc % item, run = item;
    uint64_t rest = loc / item;
    bool joined = true;

    for (unsigned d = t->ndim; d-- > 0;) {
        whole += (box->at[d] + rest % box->len[d]) * step;
        rest /= box->len[d];
        step *= t->shape[d];
        if (joined)
            run *= box->len[d];
        joined = joined && box->len[d] == t->shape[d];
    }
    *follow = run - loc % run;
    return whole;
}

static bool run_fits(const struct checker *c, const struct xfer_piece *p, const struct link_seg *s,
                     uint64_t off, uint64_t first_byte)
{
    const struct xfer_tensor *t = &c->mine->tensors[p->tensor];
    uint64_t follow, bytes = xfer_box_bytes(t, &p->box);

    if (off < p->off || off - p->off >= bytes || s->run_bytes > bytes - (off - p->off))
        return false;
    return whole_offset(t, &p->box, off - p->off, &follow) == first_byte && s->run_bytes <= follow;
}

/* Steps are the same for all rows, so the first, second and last decide. */
static enum fl_status check_seg(const struct checker *c, const struct link_seg *s, uint32_t mem,
                                bool receives)
{
    uint64_t off = receives ? s->to_off : s->from_off, step = receives ? s->to_step : s->from_step;
    uint64_t last = s->rows - 1, span, whole;
    const struct xfer_piece *p = piece_at(c, mem, off);
    const uint64_t rows[] = { 0, last > 0, last };
    bool ok = p && p->tensor == c->local[s->tensor] && !__builtin_mul_overflow(last, step, &span) &&
              !__builtin_add_overflow(off, span, &span) &&
              !__builtin_mul_overflow(last, s->byte_step, &whole);

    for (unsigned i = 0; i < 3 && ok; i++)
        ok = run_fits(c, p, s, off + rows[i] * step, s->first_byte + rows[i] * s->byte_step);
    if (ok)
        return FL_OK;
    return fl_fail(
        c->err, FL_INVALID,
        "a segment of %.80s, %u runs of %llu bytes at %llu of memory %u, is not where this "
        "process has byte %llu of it",
        c->part->tensors[s->tensor].name, s->rows, (unsigned long long)s->run_bytes,
        (unsigned long long)off, mem, (unsigned long long)s->first_byte);
}

/* Reads from whole tensors on disk. */
static enum fl_status check_disk(const struct checker *c, const struct link_seg *s)
{
    const struct xfer_tensor *t = &c->part->tensors[s->tensor];
    uint64_t last = s->rows - 1, end;

    if (!__builtin_mul_overflow(last, s->from_step, &end) &&
        !__builtin_add_overflow(end, s->from_off, &end) &&
        !__builtin_add_overflow(end, s->run_bytes, &end) && end <= xfer_tensor_bytes(t) &&
        s->from_off == s->first_byte && (last == 0 || s->from_step == s->byte_step))
        return FL_OK;
    return fl_fail(c->err, FL_INVALID,
                   "a segment of %.80s reads byte %llu on of a file that has %llu", t->name,
                   (unsigned long long)s->from_off, (unsigned long long)xfer_tensor_bytes(t));
}

static int by_start(const void *a, const void *b)
{
    const struct span *x = a, *y = b;

    if (x->mem != y->mem)
        return x->mem < y->mem ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

static enum fl_status twice(const struct checker *c, const struct span *x)
{
    return fl_fail(
        c->err, FL_INVALID, "the plan writes byte %llu of memory %u twice, part of %.80s",
        (unsigned long long)x->at, x->mem, c->part->tensors[c->part->segs[x->seg].tensor].name);
}

/* Segments whose extents meet, as columns of one matrix do: their runs one by one. */
static enum fl_status check_runs(const struct checker *c, const struct span *from, size_t n)
{
    uint64_t n_runs = 0, k = 0;
    enum fl_status st = FL_OK;

    for (size_t i = 0; i < n; i++)
        n_runs += c->part->segs[from[i].seg].rows;
    struct span *runs = n_runs <= MAX_RUNS ? malloc(n_runs * sizeof(*runs)) : NULL;

    if (!runs)
        return fl_fail(c->err, FL_EXHAUSTED, "%llu interleaved runs are too many to check",
                       (unsigned long long)n_runs);
    for (size_t i = 0; i < n; i++) {
        const struct link_seg *s = &c->part->segs[from[i].seg];

        for (uint32_t r = 0; r < s->rows; r++) {
            uint64_t at = s->to_off + r * s->to_step;

            runs[k++] = (struct span){ at, at + s->run_bytes, from[i].mem, from[i].seg };
        }
    }
    qsort(runs, n_runs, sizeof(*runs), by_start);
    for (uint64_t i = 1; i < n_runs && st == FL_OK; i++)
        if (runs[i].at < runs[i - 1].end)
            st = twice(c, &runs[i]);
    free(runs);
    return st;
}

static enum fl_status check_disjoint(struct checker *c)
{
    qsort(c->spans, c->n_spans, sizeof(*c->spans), by_start);
    for (size_t i = 0, n; i < c->n_spans; i += n) {
        uint64_t end = c->spans[i].end;

        for (n = 1; i + n < c->n_spans && c->spans[i + n].mem == c->spans[i].mem &&
                    c->spans[i + n].at < end;
             n++)
            end = c->spans[i + n].end > end ? c->spans[i + n].end : end;
        if (n > 1 || c->part->segs[c->spans[i].seg].rows > 1)
            FL_TRY(check_runs(c, &c->spans[i], n));
    }
    return FL_OK;
}

static enum fl_status check_segs(struct checker *c, uint32_t member, uint64_t *written)
{
    for (size_t i = 0; i < c->part->n_buckets; i++) {
        const struct xfer_bucket *b = &c->part->buckets[i];
        const struct xfer_edge *e = &c->part->edges[b->edge];
        bool sends = e->from == member, disk = e->link == XFER_LINK_DISK;

        for (uint32_t k = 0; k < b->n_segs; k++) {
            const struct link_seg *s = &c->part->segs[b->first_seg + k];

            if (disk)
                FL_TRY(check_disk(c, s));
            if (!(disk && sends))
                FL_TRY(check_seg(c, s, sends ? b->from_mem : b->to_mem, !sends));
            if (sends)
                continue;
            *written += plan_seg_bytes(s);
            c->spans[c->n_spans++] =
                (struct span){ s->to_off, s->to_off + (s->rows - 1ull) * s->to_step + s->run_bytes,
                               b->to_mem, b->first_seg + k };
        }
    }
    return FL_OK;
}

static enum fl_status check_all(struct checker *c, uint32_t member)
{
    uint64_t written = 0, wanted = 0;

    FL_TRY(match_tensors(c));
    FL_TRY(check_segs(c, member, &written));
    if (member < c->part->n_sources)
        return FL_OK;
    for (size_t i = 0; i < c->mine->n_pieces; i++)
        wanted +=
            xfer_box_bytes(&c->mine->tensors[c->mine->pieces[i].tensor], &c->mine->pieces[i].box);
    if (written != wanted)
        return fl_fail(c->err, FL_INVALID, "the plan writes %llu bytes, this process wants %llu",
                       (unsigned long long)written, (unsigned long long)wanted);
    return check_disjoint(c);
}

enum fl_status xfer_part_check(const struct xfer_plan *part, uint32_t member,
                               const struct xfer_manifest *mine, struct fl_err *err)
{
    struct checker c = { .part = part, .mine = mine, .err = err };

    c.by_place = malloc((mine->n_pieces + 1) * sizeof(*c.by_place));
    c.local = malloc((part->n_tensors + 1) * sizeof(*c.local));
    c.spans = malloc((part->n_segs + 1) * sizeof(*c.spans));
    enum fl_status st = FL_OK;

    if (!c.by_place || !c.local || !c.spans) {
        st = fl_fail(err, FL_EXHAUSTED, "no memory to check %zu segments", part->n_segs);
    } else {
        for (uint32_t i = 0; i < mine->n_pieces; i++)
            if (xfer_box_bytes(&mine->tensors[mine->pieces[i].tensor], &mine->pieces[i].box))
                c.by_place[c.n_placed++] = i;
        qsort_r(c.by_place, c.n_placed, sizeof(*c.by_place), by_place, (void *)mine);
        st = check_all(&c, member);
    }
    free(c.by_place);
    free(c.local);
    free(c.spans);
    return st;
}
