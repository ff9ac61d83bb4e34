/* plans at the size of a large model: how long they take, and that nobody carries more than it must
 */
#include <inttypes.h>
#include <stdlib.h>
#include <time.h>
#include "tests/t.h"
#include "transport/xfer/plan.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOWED 1 /* a part of the layers shows the same */
#else
#define SLOWED 0
#endif
enum {
    BIG_LAYERS = SLOWED ? 8 : 61,
    BIG_EXPERTS = 384,
    BIG_TRAINERS = 256,
    BIG_RANKS = 128,
    BIG_EP_TRAIN = 32,
    BIG_EP_ENGINE = 16
};

struct big {
    struct xfer_manifest m;
    struct xfer_tensor *tensors;
    struct xfer_piece *pieces;
    uint64_t bytes;
};

static void big_add(struct big *b, char *name, unsigned ndim, const uint64_t *shape,
                    const struct xfer_box *box)
{
    struct xfer_tensor *t = &b->tensors[b->m.n_tensors];

    *t = (struct xfer_tensor){ .name = name, .dtype = FL_BF16, .ndim = (uint8_t)ndim };
    memcpy(t->shape, shape, ndim * sizeof(*shape));
    b->pieces[b->m.n_pieces++] =
        (struct xfer_piece){ (uint32_t)b->m.n_tensors++, 0, b->bytes, *box };
    b->bytes += xfer_box_bytes(t, box);
    b->bytes = (b->bytes + XFER_ALIGN - 1) / XFER_ALIGN * XFER_ALIGN;
}

static void big_member(struct big *b, char (*names)[40], unsigned rank, unsigned ep, uint32_t party)
{
    static const uint64_t expert[3][2] = { { 7168, 2048 }, { 2048, 7168 }, { 2048, 7168 } };
    static const uint64_t dense[2] = { 7168, 7168 };
    size_t per = BIG_EXPERTS * 3, all = BIG_LAYERS * (per + 8);

    *b = (struct big){ .tensors = calloc(all / ep + BIG_LAYERS * 12, sizeof(struct xfer_tensor)),
                       .pieces = calloc(all / ep + BIG_LAYERS * 12, sizeof(struct xfer_piece)) };
    for (unsigned l = 0; l < BIG_LAYERS; l++) {
        char(*n)[40] = names + l * (per + 8);

        for (unsigned d = 0; d < 8; d++) { /* dense: whole at trainers, columns at engines */
            struct xfer_box box = { .len = { 7168, 7168 } };

            if (ep == BIG_EP_ENGINE)
                box = (struct xfer_box){ .at = { 0, rank % ep * 448 }, .len = { 7168, 448 } };
            big_add(b, n[d], 2, dense, &box);
        }
        for (unsigned x = 0; x < BIG_EXPERTS; x++)
            for (unsigned k = 0; k < 3 && x * ep / BIG_EXPERTS == rank % ep; k++) {
                struct xfer_box box = { .len = { expert[k][0], expert[k][1] } };

                big_add(b, n[8 + x * 3 + k], 2, expert[k], &box);
            }
    }
    b->m.tensors = b->tensors;
    b->m.pieces = b->pieces;
    b->m.mem_bytes = &b->bytes;
    b->m.n_mems = 1;
    b->m.party = party;
    b->m.who.id.b[0] = (uint8_t)rank;
    b->m.who.id.b[1] = ep == BIG_EP_ENGINE;
}

static uint64_t thread_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Nobody sends or receives more than 1.05 times what must be: of what is sent an equal share,
 * because every shard has as many holders as any other; of what is received what the rank wants. */
static void check_shares(const struct xfer_plan *p, const struct xfer_plan_in *in, uint64_t all)
{
    uint64_t *bytes = calloc(p->n_members, sizeof(*bytes)), most_sent = 0,
             least = all / p->n_sources;
    double worst = 0;

    for (size_t i = 0; i < p->n_buckets; i++) {
        const struct xfer_edge *e = &p->edges[p->buckets[i].edge];

        bytes[e->from] += p->buckets[i].bytes * e->n_to;
        for (uint32_t k = 0; k < e->n_to; k++)
            bytes[p->to[e->first_to + k]] += p->buckets[i].bytes;
    }
    for (size_t m = 0; m < p->n_sources; m++)
        most_sent = bytes[m] > most_sent ? bytes[m] : most_sent;
    for (size_t e = 0; e < in->n_engines; e++) {
        uint64_t wants = 0;

        for (size_t k = 0; k < in->engines[e].n_pieces; k++)
            wants += xfer_box_bytes(&in->engines[e].tensors[in->engines[e].pieces[k].tensor],
                                    &in->engines[e].pieces[k].box);
        double share = (double)bytes[p->n_sources + e] / (double)wants;

        worst = share > worst ? share : worst;
    }
    free(bytes);
    printf("# most sent by one rank %.4f times an equal share, most received %.4f times what it "
           "wants\n",
           (double)most_sent / (double)least, worst);
    t_true((double)most_sent <= 1.05 * (double)least, "%llu of %llu", (unsigned long long)most_sent,
           (unsigned long long)least);
    t_true(worst <= 1.05);
}

/* 1 T parameters, 384 experts in 61 layers: 256 trainer ranks, experts over 32 of them, to 8
 * engines of 16 ranks. */
static void large_model(void **state)
{
    size_t per = BIG_EXPERTS * 3 + 8, n_names = BIG_LAYERS * per;
    char(*names)[40] = malloc(n_names * 40);
    struct big *members = calloc(BIG_TRAINERS + BIG_RANKS, sizeof(*members));
    struct xfer_manifest *m = calloc(BIG_TRAINERS + BIG_RANKS, sizeof(*m));
    struct link_place *places = calloc(BIG_TRAINERS + BIG_RANKS, sizeof(*places));
    struct fl_err err = { 0 };
    struct xfer_plan *p;

    (void)state;
    for (size_t i = 0; i < n_names; i++) {
        unsigned in = (unsigned)(i % per), x = (in - 8) / 3;

        if (in < 8)
            snprintf(names[i], 40, "layers.%02zu.dense.%u", i / per, in);
        else
            snprintf(names[i], 40, "layers.%02zu.experts.%03u.%u", i / per, x, (in - 8) % 3);
    }
    for (unsigned i = 0; i < BIG_TRAINERS + BIG_RANKS; i++) {
        bool trainer = i < BIG_TRAINERS;
        unsigned rank = trainer ? i : i - BIG_TRAINERS;

        big_member(&members[i], names, rank, trainer ? BIG_EP_TRAIN : BIG_EP_ENGINE,
                   rank / BIG_EP_ENGINE);
        t_ok(xfer_manifest_seal(&members[i].m, &err), &err);
        m[i] = members[i].m;
        snprintf(places[i].addr, sizeof(places[i].addr), "%u", i / 8);
        snprintf(places[i].host_boot, sizeof(places[i].host_boot), "%u", i / 8);
    }
    struct xfer_plan_in in = { .sources = m,
                               .engines = m + BIG_TRAINERS,
                               .places = places,
                               .n_sources = BIG_TRAINERS,
                               .n_engines = BIG_RANKS,
                               .mode = XFER_P2P,
                               .spare_bytes = XFER_NO_LIMIT };
    uint64_t began_ns = thread_ns();

    t_ok(xfer_plan_make(&in, &p, &err), &err);
    uint64_t took_ms = (thread_ns() - began_ns) / 1000000; /* others have this machine too */
    uint64_t want = 0;

    for (unsigned i = 0; i < BIG_RANKS; i++)
        for (size_t k = 0; k < m[BIG_TRAINERS + i].n_pieces; k++)
            want +=
                xfer_box_bytes(&m[BIG_TRAINERS + i].tensors[m[BIG_TRAINERS + i].pieces[k].tensor],
                               &m[BIG_TRAINERS + i].pieces[k].box);
    t_int_eq(p->bytes, want);
    check_shares(p, &in, want);
    bool emulated = getenv("MESON_EXE_WRAPPER") != NULL;
    t_true(SLOWED || emulated || took_ms < 2000, "%llu ms", (unsigned long long)took_ms);
    printf(
        "# %llu ms, %zu tensors, %zu edges, %zu buckets, %zu segments, %.2f TB, predicted %.1f s\n",
        (unsigned long long)took_ms, p->n_tensors, p->n_edges, p->n_buckets, p->n_segs,
        (double)p->bytes / 1e12, (double)p->predicted_ns / 1e9);
    xfer_plan_destroy(p);
    for (unsigned i = 0; i < BIG_TRAINERS + BIG_RANKS; i++) {
        free(members[i].tensors);
        free(members[i].pieces);
    }
    free(members);
    free(m);
    free(places);
    free(names);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(large_model),
    };

    return t_run("plan size", tests);
}
