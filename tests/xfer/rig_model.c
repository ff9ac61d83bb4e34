/* What the weights of a version are, apart from the plane: written from it, compared with it. */
#include "tests/xfer/rig_priv.h"
#include <inttypes.h>
#include <stdlib.h>
#include "tests/gpu/mem.h"

/* clang-format off */
#define AFTER_HEAD                                                                    \
    { "layer.buffer", FL_F32,  2, { 0, 64 } }, /* of no bytes, as models have them */ \
    { "layer.down",   FL_BF16, 2, { 64, 160 } },                                      \
    { "layer.norm",   FL_F32,  1, { 64 } },                                           \
    { "layer.qkv",    FL_BF16, 3, { 4, 48, 64 } },                                    \
    { "layer.up",     FL_F16,  2, { 160, 64 } },                                      \
    { "scale",        FL_F32,  0, { 0 } },                                            \
    { "table",        FL_U8,   1, { 1026 } }
static const struct xfer_tensor tensors[] = { /* sorted by name */
    { "embed",        FL_F32,  2, { 96, 64 } },
    AFTER_HEAD
};
/* The dimension that a shard is cut along; -1: each rank holds all of it. */
static const int cut_dim[] = { 0, 1, 1, -1, 1, 0, -1, -1 };
static const struct xfer_tensor with_head[RIG_TENSORS] = { /* "head" is "embed" once more */
    { "embed",        FL_F32,  2, { 96, 64 } },
    { "head",         FL_F32,  2, { 96, 64 } },
    AFTER_HEAD
};
/* clang-format on */

static uint64_t model_bytes(void)
{
    uint64_t n = 0;

    for (unsigned i = 0; i < FL_LEN(tensors); i++)
        n += xfer_tensor_bytes(&tensors[i]);
    return n;
}

static uint8_t *model_made(uint64_t version, const uint8_t *few_from)
{
    uint64_t seed = version * 7919 + 1, n = model_bytes();
    uint8_t *m = malloc(n);

    if (few_from)
        memcpy(m, few_from, n);
    for (uint64_t i = 0; i < n; i += few_from ? 1 + t_random(&seed) % 1000 : 1)
        m[i] = (uint8_t)(t_random(&seed) >> 32);
    return m;
}

static const uint8_t *reference(struct rig *r, uint64_t version)
{
    bool few = r->o.few_change;

    t_true(version < FL_LEN(r->model));
    for (uint64_t v = few ? 0 : version; v <= version; v++)
        if (!r->model[v])
            r->model[v] = model_made(v, few && v > 0 ? r->model[v - 1] : NULL);
    return r->model[version];
}

static unsigned base_of(const struct xfer_tensor *t)
{
    for (unsigned i = 0; i < FL_LEN(tensors); i++)
        if (strcmp(tensors[i].name, t->name) == 0)
            return i;
    return 0; /* the head */
}

static const uint8_t *reference_of(struct rig *r, uint64_t version, const struct xfer_tensor *t)
{
    bool untied = r->o.head_differs && strcmp(t->name, "head") == 0;
    const uint8_t *at = reference(r, version + untied);

    for (unsigned i = 0; i < base_of(t); i++)
        at += xfer_tensor_bytes(&tensors[i]);
    return at;
}

/* fn(whole tensor at, piece at, bytes) for each contiguous run of a box. */
static void each_run(const struct xfer_tensor *t, const struct xfer_box *b,
                     void (*fn)(void *arg, uint64_t whole_off, uint64_t piece_off, uint64_t bytes),
                     void *arg)
{
    uint64_t e = xfer_dtype_bytes(t->dtype), at[FL_DIMS] = { 0 }, piece = 0;
    uint64_t row = t->ndim ? b->len[t->ndim - 1] * e : e;

    if (xfer_box_bytes(t, b) == 0)
        return;
    for (;;) {
        uint64_t off = 0;

        for (unsigned d = 0; d < t->ndim; d++)
            off = off * t->shape[d] + b->at[d] + at[d];
        fn(arg, off * e, piece, row);
        piece += row;
        int d = (int)t->ndim - 2;

        while (d >= 0 && ++at[d] == b->len[d])
            at[d--] = 0;
        if (d < 0)
            return;
    }
}

void rig_lay_out(struct rig_proc *p, bool shard, bool head)
{
    const struct xfer_tensor *all = head ? with_head : tensors;
    size_t n = head ? FL_LEN(with_head) : FL_LEN(tensors);
    uint64_t off = 0;

    for (unsigned i = 0; i < n; i++) {
        struct xfer_box b = xfer_box_whole(&all[i]);
        int d = shard ? cut_dim[base_of(&all[i])] : -1;

        if (d >= 0) {
            b.len[d] = all[i].shape[d] / p->ranks;
            b.at[d] = b.len[d] * p->rank;
        }
        p->pieces[i] = (struct xfer_piece){ .tensor = i, .off = off, .box = b };
        off += (xfer_box_bytes(&all[i], &b) + XFER_ALIGN - 1) / XFER_ALIGN * XFER_ALIGN;
    }
    p->mem_bytes = off;
    p->m = (struct xfer_manifest){ .who = p->me.who,
                                   .party = p->me.party,
                                   .tensors = all,
                                   .pieces = p->pieces,
                                   .mem_bytes = &p->mem_bytes,
                                   .n_tensors = n,
                                   .n_pieces = n,
                                   .n_mems = 1 };
    if (p->r->o.bend)
        p->r->o.bend(p, NULL);
    t_ok(xfer_manifest_seal(&p->m, NULL), NULL);
}

struct copying {
    uint8_t *piece;
    const uint8_t *whole;
    bool differs;
};

static void copy_in(void *arg, uint64_t whole_off, uint64_t piece_off, uint64_t bytes)
{
    struct copying *c = arg;

    memcpy(c->piece + piece_off, c->whole + whole_off, bytes);
}

static void compare(void *arg, uint64_t whole_off, uint64_t piece_off, uint64_t bytes)
{
    struct copying *c = arg;

    c->differs |= memcmp(c->piece + piece_off, c->whole + whole_off, bytes) != 0;
}

void rig_write(struct rig_proc *p, uint64_t version)
{
    char *slot = xfer_source_data(p->src, NULL)->addr;

    for (unsigned i = 0; i < p->m.n_tensors; i++) {
        const struct xfer_tensor *t = &p->m.tensors[i];
        uint64_t bytes = xfer_box_bytes(t, &p->pieces[i].box);
        struct copying c = { malloc(bytes + 1), reference_of(p->r, version, t), false };

        each_run(t, &p->pieces[i].box, copy_in, &c);
        t_mem_write(slot + p->pieces[i].off, c.piece, bytes);
        free(c.piece);
    }
}

void rig_flip_bit(struct rig_proc *p, uint64_t off)
{
    uint8_t *at = (uint8_t *)xfer_source_data(p->src, NULL)->addr + off, byte = t_mem_byte(at) ^ 1;

    t_mem_write(at, &byte, 1);
}

static void check_engine(struct rig_proc *p)
{
    struct xfer_version v;
    const struct link_mem *mem = xfer_sink_data(p->sink, &v);

    if (!mem || rig_state(p) == RX_COMMITTING)
        return;
    t_true((p->window ? p->shown : p->reads) == mem->addr || !p->live,
           "%s reads what the plane says", p->me.name);
    if (p->window && p->live) /* what is seen is what captured graphs read */
        t_true(t_mem_same(p->reads, mem->addr, p->m.mem_bytes[0]), "%s sees it", p->me.name);
    for (unsigned i = 0; i < p->m.n_tensors; i++) {
        const struct xfer_tensor *t = &p->m.tensors[i];
        uint64_t bytes = xfer_box_bytes(t, &p->pieces[i].box);
        struct copying c = { malloc(bytes + 1), reference_of(p->r, v.number, t), false };

        t_mem_read(c.piece, (char *)mem->addr + p->pieces[i].off, bytes);
        each_run(t, &p->pieces[i].box, compare, &c);
        free(c.piece);
        t_true(!c.differs, "%s serves other bytes of %s than version %" PRIu64 " has", p->me.name,
               t->name, v.number);
    }
}

static void version_digest(struct rig *r, uint64_t version, uint64_t digest[2])
{
    digest[0] = digest[1] = 0;
    const struct xfer_manifest *m = &rig_source(r, 0)->m;

    for (unsigned i = 0; i < m->n_tensors; i++) {
        struct xfer_box b = xfer_box_whole(&m->tensors[i]);
        uint64_t d[2] = { 0, 0 };

        xfer_digest_piece(d, &m->tensors[i], &b, reference_of(r, version, &m->tensors[i]));
        xfer_digest_fold(digest, d, i);
    }
}

void rig_check(struct rig *r)
{
    for (unsigned i = 0; i < r->n; i++)
        if (r->p[i].sink && r->p[i].live)
            check_engine(&r->p[i]);
}

void rig_check_all_serve(struct rig *r, uint64_t version)
{
    uint64_t digest[2];

    version_digest(r, version, digest);
    rig_check(r);
    for (unsigned i = 0; i < r->n; i++) {
        struct rig_proc *p = &r->p[i];
        struct xfer_version v;

        if (!p->sink || !p->live)
            continue;
        t_true(xfer_sink_data(p->sink, &v) != NULL, "%s serves nothing: %s", p->me.name,
               rx_state_name(rig_state(p)));
        t_int_eq(v.number, version, "%s", p->me.name);
        t_true(v.digest[0] == digest[0] && v.digest[1] == digest[1],
               "digest of version %" PRIu64 " at %s", version, p->me.name);
        t_true(!p->paused, "%s stands", p->me.name);
    }
}
