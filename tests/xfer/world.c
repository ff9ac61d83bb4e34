#include "tests/xfer/world.h"
#include <stdlib.h>
#include "tests/xfer/bucket.h"

void world_init(struct world *w)
{
    memset(w, 0, sizeof(*w));
}

static void member_fini(struct world_member *m)
{
    for (unsigned i = 0; i < 2; i++) {
        free(m->mem[i]);
        free(m->writes[i]);
    }
}

void world_fini(struct world *w)
{
    for (size_t i = 0; i < w->n_sources; i++)
        member_fini(&w->sources[i]);
    for (size_t i = 0; i < w->n_engines; i++)
        member_fini(&w->engines[i]);
    for (size_t i = 0; i < w->n_tensors; i++)
        free(w->truth[i]);
}

void world_tensor(struct world *w, const char *name, enum fl_dtype t, unsigned ndim,
                  const uint64_t *shape)
{
    size_t i = w->n_tensors++;
    struct xfer_tensor *x = &w->tensors[i];
    uint64_t seed = i + 1;

    snprintf(w->names[i], WORLD_NAME, "%s", name);
    *x = (struct xfer_tensor){ .name = w->names[i], .dtype = t, .ndim = (uint8_t)ndim };
    memcpy(x->shape, shape, ndim * sizeof(*shape));
    w->truth[i] = malloc(xfer_tensor_bytes(x));
    for (uint64_t k = 0; k < xfer_tensor_bytes(x); k++)
        w->truth[i][k] = (unsigned char)(t_random(&seed) >> 40);
}

static void place(struct link_place *p, const char *machine)
{
    *p = (struct link_place){ .pid_ns = 1, .ipc_ns = 1 };
    snprintf(p->host_boot, sizeof(p->host_boot), "%s", machine);
    snprintf(p->addr, sizeof(p->addr), "%s", machine);
}

static void member_init(struct world_member *m, uint8_t kind, size_t i, uint32_t party)
{
    m->m = (struct xfer_manifest){ .party = party, .who = { .attempt = 1 } };
    m->m.who.id.b[0] = kind;
    m->m.who.id.b[1] = (uint8_t)i;
}

struct world_member *world_source(struct world *w, const char *machine)
{
    size_t i = w->n_sources++;

    place(&w->places[i], machine); /* sources first: all of them before the engines */
    member_init(&w->sources[i], 1, i, 0);
    return &w->sources[i];
}

struct world_member *world_engine(struct world *w, uint32_t party, const char *machine)
{
    size_t i = w->n_engines++;

    place(&w->places[w->n_sources + i], machine);
    member_init(&w->engines[i], 2, i, party);
    return &w->engines[i];
}

void world_piece(struct world *w, struct world_member *m, uint32_t tensor,
                 const struct xfer_box *box, uint32_t mem, uint64_t gap)
{
    const struct xfer_tensor *t = &w->tensors[tensor];
    uint64_t item = xfer_dtype_bytes(t->dtype), off = m->mem_bytes[mem] + gap;

    t_true(m->m.n_pieces < WORLD_PIECES);
    off = (off + item - 1) / item * item;
    m->pieces[m->m.n_pieces++] = (struct xfer_piece){ tensor, mem, off, *box };
    m->mem_bytes[mem] = off + xfer_box_bytes(t, box);
}

void world_whole(struct world *w, struct world_member *m)
{
    for (uint32_t t = 0; t < w->n_tensors; t++) {
        struct xfer_box b = xfer_box_whole(&w->tensors[t]);

        world_piece(w, m, t, &b, 0, -m->mem_bytes[0] % XFER_ALIGN);
    }
}

/* The place of an element in the whole tensor, by its number in a box. */
static uint64_t whole_index(const struct xfer_tensor *t, const struct xfer_box *b, uint64_t k)
{
    uint64_t index = 0, step = 1;

    for (unsigned d = t->ndim; d-- > 0;) {
        index += (b->at[d] + k % b->len[d]) * step;
        k /= b->len[d];
        step *= t->shape[d];
    }
    return index;
}

static void each_element(const struct world *w, const struct world_member *m, size_t piece,
                         void (*fn)(unsigned char *at, const unsigned char *truth, uint64_t item))
{
    const struct xfer_piece *p = &m->pieces[piece];
    const struct xfer_tensor *t = &w->tensors[p->tensor];
    uint64_t item = xfer_dtype_bytes(t->dtype), n = xfer_box_bytes(t, &p->box) / item;

    for (uint64_t k = 0; k < n; k++)
        fn(m->mem[p->mem] + p->off + k * item,
           w->truth[p->tensor] + whole_index(t, &p->box, k) * item, item);
}

static void put_truth(unsigned char *at, const unsigned char *truth, uint64_t item)
{
    memcpy(at, truth, item);
}

static void is_truth(unsigned char *at, const unsigned char *truth, uint64_t item)
{
    t_mem_eq(at, truth, item, "an element differs from the naive copy");
}

static void seal(struct world *w, struct world_member *m, struct xfer_manifest *out, bool source)
{
    struct fl_err err = { 0 };

    for (unsigned i = 0; i < 2; i++) {
        m->mem[i] = malloc(m->mem_bytes[i] + 1);
        m->writes[i] = calloc(m->mem_bytes[i] + 1, 1);
        memset(m->mem[i], 0xee, m->mem_bytes[i] + 1);
    }
    for (size_t i = 0; i < m->m.n_pieces && source; i++)
        each_element(w, m, i, put_truth);
    m->m.tensors = w->tensors;
    m->m.n_tensors = w->n_tensors;
    m->m.pieces = m->pieces;
    m->m.mem_bytes = m->mem_bytes;
    m->m.n_mems = 2;
    t_ok(xfer_manifest_seal(&m->m, &err), &err);
    *out = m->m;
}

void world_seal(struct world *w)
{
    for (size_t i = 0; i < w->n_sources; i++)
        seal(w, &w->sources[i], &w->source_manifests[i], true);
    for (size_t i = 0; i < w->n_engines; i++)
        seal(w, &w->engines[i], &w->engine_manifests[i], false);
}

struct xfer_plan_in world_in(const struct world *w, enum xfer_mode mode)
{
    return (struct xfer_plan_in){ .sources = w->source_manifests,
                                  .engines = w->engine_manifests,
                                  .places = w->places,
                                  .n_sources = w->n_sources,
                                  .n_engines = w->n_engines,
                                  .mode = mode,
                                  .spare_bytes = XFER_NO_LIMIT };
}

/* ---- carrying out ---- */

static void note_writes(struct world_member *m, const struct xfer_bucket *b,
                        const struct link_seg *s)
{
    for (uint32_t r = 0; r < s->rows; r++)
        for (uint64_t k = 0; k < s->run_bytes; k++)
            m->writes[b->to_mem][s->to_off + r * s->to_step + k]++;
}

static void run_bucket(struct world *w, const struct xfer_plan *p, const struct xfer_bucket *b,
                       uint32_t to, uint64_t (*digests)[2])
{
    const struct xfer_edge *e = &p->edges[b->edge];
    const struct world_member *src = &w->sources[e->from];
    struct world_member *dst = &w->engines[to - w->n_sources];
    const struct link_seg *segs = &p->segs[b->first_seg];
    unsigned char *packed = malloc(b->bytes);
    uint64_t(*sums)[2] = calloc(b->n_segs, sizeof(*sums));
    uint64_t(*again)[2] = calloc(b->n_segs, sizeof(*again));

    if (e->link == XFER_LINK_DISK) { /* files stand for the source: whole tensors */
        unsigned char *at = packed;

        for (uint32_t i = 0; i < b->n_segs; i++)
            for (uint32_t r = 0; r < segs[i].rows; r++, at += segs[i].run_bytes)
                memcpy(at, w->truth[segs[i].tensor] + segs[i].from_off + r * segs[i].from_step,
                       segs[i].run_bytes);
    } else {
        bucket_pack(segs, b->n_segs, src->mem[b->from_mem], packed);
        bucket_digest(segs, b->n_segs, src->mem[b->from_mem], true, again);
    }
    bucket_unpack(segs, b->n_segs, packed, dst->mem[b->to_mem], sums);
    if (e->link != XFER_LINK_DISK)
        t_mem_eq(sums, again, b->n_segs * sizeof(*sums),
                 "source and receiver agree on each segment");
    for (uint32_t i = 0; i < b->n_segs; i++) {
        note_writes(dst, b, &segs[i]);
        if (!p->once[b->first_seg + i])
            continue;
        digests[segs[i].tensor][0] += sums[i][0];
        digests[segs[i].tensor][1] += sums[i][1];
    }
    free(packed);
    free(sums);
    free(again);
}

static void check_writes(const struct world *w, const struct world_member *m)
{
    uint64_t wanted = 0, written = 0;

    for (size_t i = 0; i < m->m.n_pieces; i++) {
        const struct xfer_piece *p = &m->pieces[i];
        uint64_t bytes = xfer_box_bytes(&w->tensors[p->tensor], &p->box);

        wanted += bytes;
        for (uint64_t k = 0; k < bytes; k++)
            t_int_eq(m->writes[p->mem][p->off + k], 1, "byte %llu of piece %zu",
                     (unsigned long long)k, i);
        each_element(w, m, i, is_truth);
    }
    for (unsigned i = 0; i < 2; i++)
        for (uint64_t k = 0; k < m->mem_bytes[i]; k++)
            written += m->writes[i][k];
    t_int_eq(written, wanted, "bytes outside of the pieces were written");
}

static void check_part(const struct world *w, const struct xfer_plan *p, uint32_t member)
{
    const struct xfer_manifest *m = member < w->n_sources
                                        ? &w->source_manifests[member]
                                        : &w->engine_manifests[member - w->n_sources];
    struct fl_err err = { 0 };
    struct xfer_plan *part;
    uint64_t wrong[2] = { p->part_hash[member][0] ^ 1, p->part_hash[member][1] };
    void *image;
    size_t n;

    t_ok(xfer_part_encode(p, member, &image, &n, &err), &err);
    t_refused(xfer_part_decode(image, n, wrong, &part, &err), FL_CORRUPT, &err);
    err = (struct fl_err){ 0 };
    t_ok(xfer_part_decode(image, n, p->part_hash[member], &part, &err), &err);
    free(image);
    t_ok(xfer_part_check(part, member, m, &err), &err);
    xfer_plan_destroy(part);
}

static void check_digests(const struct world *w, const struct xfer_plan *p, uint64_t (*digests)[2],
                          uint32_t party)
{
    for (size_t t = 0; t < p->n_tensors; t++) {
        struct xfer_box whole = xfer_box_whole(&w->tensors[t]);
        uint64_t wanted[2] = { 0 };

        xfer_digest_piece(wanted, &w->tensors[t], &whole, w->truth[t]);
        t_mem_eq(digests[t], wanted, sizeof(wanted), "party %u, tensor %s", party,
                 w->tensors[t].name);
    }
}

void world_run(struct world *w, const struct xfer_plan_in *in, const struct xfer_plan *p)
{
    uint64_t limit = in->bucket_bytes ? in->bucket_bytes : XFER_BUCKET_BYTES;

    for (size_t i = 0; i < p->n_buckets; i++)
        t_true(p->buckets[i].bytes <= limit && p->buckets[i].bytes > 0, "bucket %zu of %llu bytes",
               i, (unsigned long long)p->buckets[i].bytes);
    for (uint32_t party = 0; party < w->n_engines; party++) {
        uint64_t digests[WORLD_TENSORS][2] = { { 0 } };
        bool any = false;

        for (size_t i = 0; i < p->n_buckets; i++) {
            const struct xfer_edge *e = &p->edges[p->buckets[i].edge];

            for (uint32_t k = 0; k < e->n_to; k++) {
                uint32_t to = p->to[e->first_to + k];

                if (w->engines[to - w->n_sources].m.party != party)
                    continue;
                run_bucket(w, p, &p->buckets[i], to, digests);
                any = true;
            }
        }
        if (any)
            check_digests(w, p, digests, party);
    }
    for (size_t i = 0; i < w->n_engines; i++)
        check_writes(w, &w->engines[i]);
    for (uint32_t m = 0; m < p->n_members; m++)
        check_part(w, p, m);
}
