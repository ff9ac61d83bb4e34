#include "transport/xfer/manifest.h"
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#include "transport/xfer/image.h"

static const struct {
    const char *name;
    uint8_t bytes;
} dtypes[] = {
    [FL_F32] = { "f32", 4 },         [FL_F16] = { "f16", 2 },         [FL_BF16] = { "bf16", 2 },
    [FL_F8_E4M3] = { "f8_e4m3", 1 }, [FL_F8_E5M2] = { "f8_e5m2", 1 }, [FL_I64] = { "i64", 8 },
    [FL_I32] = { "i32", 4 },         [FL_U8] = { "u8", 1 },
};

uint64_t xfer_dtype_bytes(enum fl_dtype t)
{
    return (unsigned)t < FL_LEN(dtypes) ? dtypes[t].bytes : 0;
}

const char *xfer_dtype_name(enum fl_dtype t)
{
    return (unsigned)t < FL_LEN(dtypes) ? dtypes[t].name : "no dtype";
}

uint64_t xfer_tensor_bytes(const struct xfer_tensor *t)
{
    uint64_t bytes = xfer_dtype_bytes(t->dtype);

    for (unsigned d = 0; d < t->ndim; d++)
        bytes *= t->shape[d];
    return bytes;
}

uint64_t xfer_box_bytes(const struct xfer_tensor *t, const struct xfer_box *b)
{
    uint64_t bytes = xfer_dtype_bytes(t->dtype);

    for (unsigned d = 0; d < t->ndim; d++)
        bytes *= b->len[d];
    return bytes;
}

struct xfer_box xfer_box_whole(const struct xfer_tensor *t)
{
    struct xfer_box b = { .at = { 0 } };

    memcpy(b.len, t->shape, t->ndim * sizeof(b.len[0]));
    return b;
}

const char *xfer_tensor_line(const struct xfer_tensor *t, char *line, size_t room)
{
    struct fl_str s = { .data = line, .cap = room, .max = room - 1 };

    fl_str_add(&s, "%.80s %s [", t->name, xfer_dtype_name(t->dtype));
    for (unsigned d = 0; d < t->ndim && d < FL_DIMS; d++)
        fl_str_add(&s, "%s%llu", d ? ", " : "", (unsigned long long)t->shape[d]);
    fl_str_add(&s, "]");
    return line;
}

static enum fl_status check_tensor(const struct xfer_manifest *m, size_t i, struct fl_err *err)
{
    const struct xfer_tensor *t = &m->tensors[i];
    uint64_t bytes = xfer_dtype_bytes(t->dtype);
    size_t name_bytes = t->name ? strnlen(t->name, XFER_MAX_NAME + 1) : 0;

    if (name_bytes == 0 || name_bytes > XFER_MAX_NAME)
        return fl_fail(err, FL_INVALID, "tensor %zu has a name of %zu bytes, must be 1 to %d", i,
                       name_bytes, XFER_MAX_NAME);
    if (bytes == 0 || t->ndim > FL_DIMS)
        return fl_fail(err, FL_INVALID, "tensor %.80s has dtype %d and %u dimensions, at most %d",
                       t->name, (int)t->dtype, t->ndim, FL_DIMS);
    for (unsigned d = 0; d < t->ndim; d++) /* one of no bytes has no dimension that wraps either */
        if (__builtin_mul_overflow(bytes, t->shape[d] ? t->shape[d] : 1, &bytes) ||
            bytes > INT64_MAX)
            return fl_fail(err, FL_INVALID, "tensor %.80s: dimension %u is %llu, it is too large",
                           t->name, d, (unsigned long long)t->shape[d]);
    if (i > 0 && strcmp(m->tensors[i - 1].name, t->name) >= 0)
        return fl_fail(err, FL_INVALID,
                       "tensor %.80s comes after %.80s: names must be sorted, each once", t->name,
                       m->tensors[i - 1].name);
    return FL_OK;
}

static enum fl_status check_piece(const struct xfer_manifest *m, size_t i, struct fl_err *err)
{
    const struct xfer_piece *p = &m->pieces[i];

    if (p->tensor >= m->n_tensors || p->mem >= m->n_mems)
        return fl_fail(err, FL_INVALID, "piece %zu names tensor %u of %zu and memory %u of %zu", i,
                       p->tensor, m->n_tensors, p->mem, m->n_mems);
    const struct xfer_tensor *t = &m->tensors[p->tensor];

    bool empty = xfer_tensor_bytes(t) == 0;

    for (unsigned d = 0; d < t->ndim; d++)
        if ((p->box.len[d] == 0 && !empty) || p->box.at[d] > t->shape[d] ||
            p->box.len[d] > t->shape[d] - p->box.at[d])
            return fl_fail(
                err, FL_INVALID,
                "piece %zu of tensor %.80s: %llu from %llu on in dimension %u, which has %llu", i,
                t->name, (unsigned long long)p->box.len[d], (unsigned long long)p->box.at[d], d,
                (unsigned long long)t->shape[d]);
    uint64_t bytes = xfer_box_bytes(t, &p->box), room = m->mem_bytes[p->mem];

    if (p->off > room || bytes > room - p->off)
        return fl_fail(err, FL_INVALID,
                       "piece %zu of tensor %.80s: %llu bytes at %llu, memory %u has %llu", i,
                       t->name, (unsigned long long)bytes, (unsigned long long)p->off, p->mem,
                       (unsigned long long)room);
    if (p->off % xfer_dtype_bytes(t->dtype) != 0)
        return fl_fail(err, FL_INVALID,
                       "piece %zu of tensor %.80s: offset %llu is not a multiple of %s", i, t->name,
                       (unsigned long long)p->off, xfer_dtype_name(t->dtype));
    return FL_OK;
}

static int by_place(const void *a, const void *b, void *arg)
{
    const struct xfer_manifest *m = arg;
    const struct xfer_piece *p = &m->pieces[*(const uint32_t *)a],
                            *q = &m->pieces[*(const uint32_t *)b];

    if (p->mem != q->mem)
        return p->mem < q->mem ? -1 : 1;
    return p->off < q->off ? -1 : p->off > q->off;
}

/* Mostly the pieces lie in the order of their offsets and no sorting is needed. */
static enum fl_status check_overlap(const struct xfer_manifest *m, struct fl_err *err)
{
    uint32_t *order = malloc((m->n_pieces + 1) * sizeof(*order));
    enum fl_status st = FL_OK;
    bool sorted = true;
    size_t n = 0; /* those that have bytes */

    if (!order)
        return fl_fail(err, FL_EXHAUSTED, "no memory to check %zu pieces", m->n_pieces);
    for (uint32_t i = 0; i < m->n_pieces; i++) {
        if (xfer_box_bytes(&m->tensors[m->pieces[i].tensor], &m->pieces[i].box) == 0)
            continue;
        order[n++] = i;
        sorted = sorted && (n == 1 || by_place(&order[n - 2], &order[n - 1], (void *)m) < 0);
    }
    if (m->n_pieces > 0 && n == 0)
        st = fl_fail(err, FL_INVALID, "none of the %zu tensors has a byte", m->n_tensors);
    if (!sorted)
        qsort_r(order, n, sizeof(*order), by_place, (void *)m);
    for (size_t i = 1; i < n && st == FL_OK; i++) {
        const struct xfer_piece *p = &m->pieces[order[i - 1]], *q = &m->pieces[order[i]];
        const struct xfer_tensor *t = &m->tensors[p->tensor];

        if (p->mem == q->mem && q->off - p->off < xfer_box_bytes(t, &p->box))
            st = fl_fail(err, FL_INVALID,
                         "pieces of tensors %.80s and %.80s overlap in memory %u at %llu", t->name,
                         m->tensors[q->tensor].name, p->mem, (unsigned long long)q->off);
    }
    free(order);
    return st;
}

enum fl_status xfer_manifest_seal(struct xfer_manifest *m, struct fl_err *err)
{
    void *image;
    size_t n_bytes;

    if (m->n_tensors > XFER_MAX_TENSORS || m->n_pieces > XFER_MAX_PIECES ||
        m->n_mems > XFER_MAX_MEMS)
        return fl_fail(err, FL_INVALID,
                       "manifest with %zu tensors, %zu pieces, %zu memories; at most %d, %d, %d",
                       m->n_tensors, m->n_pieces, m->n_mems, XFER_MAX_TENSORS, XFER_MAX_PIECES,
                       XFER_MAX_MEMS);
    for (size_t i = 0; i < m->n_tensors; i++)
        FL_TRY(check_tensor(m, i, err));
    for (size_t i = 0; i < m->n_pieces; i++)
        FL_TRY(check_piece(m, i, err));
    FL_TRY(check_overlap(m, err));
    FL_TRY(xfer_manifest_encode(m, &image, &n_bytes, err));
    xfer_hash128(image, n_bytes, m->hash);
    free(image);
    return FL_OK;
}

void xfer_hash128(const void *data, size_t n_bytes, uint64_t out[2])
{
    XXH128_hash_t h = XXH3_128bits(data, n_bytes);

    out[0] = h.low64;
    out[1] = h.high64;
}

/* The innermost dimensions that a box has whole form one run with the next one outside. */
void xfer_digest_piece(uint64_t tensor_digest[2], const struct xfer_tensor *t,
                       const struct xfer_box *box, const void *data)
{
    uint64_t size = xfer_dtype_bytes(t->dtype), run = size, rows = 1, at[FL_DIMS] = { 0 };
    const char *from = data;
    unsigned d = t->ndim; /* dimensions from d on are inside of a run */

    if (xfer_box_bytes(t, box) == 0)
        return;
    while (d > 0) {
        run *= box->len[--d];
        if (box->len[d] != t->shape[d])
            break;
    }
    for (unsigned i = 0; i < d; i++)
        rows *= box->len[i];
    for (uint64_t r = 0; r < rows; r++, from += run) {
        uint64_t index = 0;

        for (unsigned i = 0; i < t->ndim; i++)
            index = index * t->shape[i] + box->at[i] + (i < d ? at[i] : 0);
        kernel_digest_add(tensor_digest, from, run, index * size);
        for (unsigned i = d; i-- > 0 && ++at[i] == box->len[i];)
            at[i] = 0;
    }
}

static uint64_t mix64(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

void xfer_digest_fold(uint64_t version_digest[2], const uint64_t tensor_digest[2], uint32_t index)
{
    uint64_t who = (index + 1ull) * 0x9e3779b97f4a7c15ull;

    version_digest[0] += mix64(mix64(tensor_digest[0] + who) ^ tensor_digest[1]);
    version_digest[1] += mix64(mix64(tensor_digest[1] + ~who) ^ tensor_digest[0]);
}
