#include "transport/xfer/image.h"
#include <stdlib.h>
#include "transport/xfer/manifest.h"

enum { MANIFEST_MAGIC = 0x316d6c66 }; /* "flm1" */

void image_put(struct image_out *o, const void *data, size_t n_bytes)
{
    if (o->cap - o->n < n_bytes && !o->bad) {
        size_t cap = (o->cap + n_bytes) * 2 + 256;
        unsigned char *grown = realloc(o->data, cap);

        if (grown) {
            o->data = grown;
            o->cap = cap;
        } else {
            o->bad = true;
        }
    }
    if (o->bad || n_bytes == 0)
        return;
    memcpy(o->data + o->n, data, n_bytes);
    o->n += n_bytes;
}

void image_put_tensor(struct image_out *o, const struct xfer_tensor *t)
{
    uint32_t name_bytes = (uint32_t)strlen(t->name) + 1;

    image_put_u32(o, name_bytes);
    image_put_u32(o, (uint32_t)t->dtype << 8 | t->ndim);
    image_put(o, t->shape, t->ndim * sizeof(t->shape[0]));
    image_put(o, t->name, name_bytes);
}

void image_get_tensor(struct image_in *in, struct xfer_tensor *out)
{
    uint32_t name_bytes = image_get_u32(in), kind = image_get_u32(in);

    *out = (struct xfer_tensor){ .dtype = kind >> 8, .ndim = kind & 0xff };
    if (out->ndim > FL_DIMS)
        in->bad = true;
    else
        image_get(in, out->shape, out->ndim * sizeof(out->shape[0]));
    out->name = image_view(in, name_bytes);
    if (!out->name || name_bytes == 0 ||
        memchr(out->name, 0, name_bytes) != out->name + name_bytes - 1) {
        in->bad = true;
        out->name = "";
    }
}

static void put_pieces(struct image_out *o, const struct xfer_manifest *m)
{
    for (size_t i = 0; i < m->n_pieces; i++) {
        const struct xfer_piece *p = &m->pieces[i];
        unsigned ndim = p->tensor < m->n_tensors ? m->tensors[p->tensor].ndim : 0;

        image_put_u32(o, p->tensor);
        image_put_u32(o, p->mem);
        image_put_u64(o, p->off);
        image_put(o, p->box.at, ndim * sizeof(p->box.at[0]));
        image_put(o, p->box.len, ndim * sizeof(p->box.len[0]));
    }
}

enum fl_status xfer_manifest_encode(const struct xfer_manifest *m, void **out, size_t *n_bytes,
                                    struct fl_err *err)
{
    struct image_out o = { 0 };

    image_put_u32(&o, MANIFEST_MAGIC);
    image_put_u32(&o, m->party);
    image_put(&o, m->who.id.b, sizeof(m->who.id.b));
    image_put_u32(&o, m->who.attempt);
    image_put_u64(&o, m->n_tensors);
    image_put_u64(&o, m->n_pieces);
    image_put_u64(&o, m->n_mems);
    image_put(&o, m->mem_bytes, m->n_mems * sizeof(m->mem_bytes[0]));
    for (size_t i = 0; i < m->n_tensors; i++)
        image_put_tensor(&o, &m->tensors[i]);
    put_pieces(&o, m);
    if (o.bad) {
        free(o.data);
        return fl_fail(err, FL_EXHAUSTED, "no memory for a manifest of %zu tensors", m->n_tensors);
    }
    *out = o.data;
    *n_bytes = o.n;
    return FL_OK;
}

/* One block: the manifest, its arrays, and a copy of the image that the names lie in. */
struct decoded {
    struct xfer_manifest m;
    uint64_t *mem_bytes;
    struct xfer_tensor *tensors;
    struct xfer_piece *pieces;
};

static void get_pieces(struct image_in *in, struct decoded *d)
{
    for (size_t i = 0; i < d->m.n_pieces && !in->bad; i++) {
        struct xfer_piece *p = &d->pieces[i];

        p->tensor = image_get_u32(in);
        p->mem = image_get_u32(in);
        p->off = image_get_u64(in);
        if (p->tensor >= d->m.n_tensors) {
            in->bad = true;
            return;
        }
        size_t n = d->tensors[p->tensor].ndim * sizeof(p->box.at[0]);

        image_get(in, p->box.at, n);
        image_get(in, p->box.len, n);
    }
}

static struct decoded *decoded_create(const struct xfer_manifest *head, const void *image,
                                      size_t n_bytes, unsigned char **copy)
{
    size_t mems = head->n_mems * sizeof(uint64_t),
           tensors = head->n_tensors * sizeof(struct xfer_tensor),
           pieces = head->n_pieces * sizeof(struct xfer_piece);
    struct decoded *d = calloc(1, sizeof(*d) + mems + tensors + pieces + n_bytes);

    if (!d)
        return NULL;
    d->m = *head;
    d->mem_bytes = (void *)(d + 1);
    d->tensors = (void *)((char *)d->mem_bytes + mems);
    d->pieces = (void *)((char *)d->tensors + tensors);
    *copy = (void *)((char *)d->pieces + pieces);
    memcpy(*copy, image, n_bytes);
    d->m.mem_bytes = d->mem_bytes;
    d->m.tensors = d->tensors;
    d->m.pieces = d->pieces;
    return d;
}

enum fl_status xfer_manifest_decode(const void *image, size_t n_bytes, struct xfer_manifest **out,
                                    struct fl_err *err)
{
    struct image_in in = { .data = image, .left = n_bytes };
    struct xfer_manifest head = { 0 };
    unsigned char *copy;
    bool ours = image_get_u32(&in) == MANIFEST_MAGIC;

    head.party = image_get_u32(&in);
    image_get(&in, head.who.id.b, sizeof(head.who.id.b));
    head.who.attempt = image_get_u32(&in);
    head.n_tensors = image_get_u64(&in);
    head.n_pieces = image_get_u64(&in);
    head.n_mems = image_get_u64(&in);
    if (in.bad || !ours || head.n_tensors > XFER_MAX_TENSORS || head.n_pieces > XFER_MAX_PIECES ||
        head.n_mems > XFER_MAX_MEMS || /* each tensor and piece takes so many bytes at least */
        head.n_tensors * 10 + head.n_pieces * 16 + head.n_mems * 8 > in.left)
        return fl_fail(err, FL_CORRUPT, "%zu bytes are not a manifest: its beginning is wrong",
                       n_bytes);
    size_t at = n_bytes - in.left;
    struct decoded *d = decoded_create(&head, image, n_bytes, &copy);

    if (!d)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a manifest of %zu tensors",
                       head.n_tensors);
    in = (struct image_in){ .data = copy + at, .left = n_bytes - at };
    image_get(&in, d->mem_bytes, head.n_mems * sizeof(uint64_t));
    for (size_t i = 0; i < head.n_tensors && !in.bad; i++)
        image_get_tensor(&in, &d->tensors[i]);
    get_pieces(&in, d);
    enum fl_status st =
        in.bad || in.left
            ? fl_fail(err, FL_CORRUPT, "a manifest of %zu bytes ends in the wrong place", n_bytes)
            : xfer_manifest_seal(&d->m, err);

    if (st != FL_OK) {
        free(d);
        return st;
    }
    *out = &d->m;
    return FL_OK;
}
