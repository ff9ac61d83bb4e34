/* plans by rows, by random layouts, and at the size of a large model */
#include <stdlib.h>
#include <time.h>
#include "tests/xfer/world.h"
#include "transport/xfer/plan_priv.h"

/* ---- random layouts ---- */

static void random_tensors(struct world *w, uint64_t *seed)
{
    static const enum fl_dtype kinds[] = { FL_F32, FL_BF16, FL_U8, FL_I64, FL_F16 };
    size_t n = 1 + t_random(seed) % 5;

    for (size_t i = 0; i < n; i++) {
        uint64_t shape[4];
        unsigned ndim = t_random(seed) % 5;
        char name[WORLD_NAME];

        for (unsigned d = 0; d < ndim; d++)
            shape[d] = 1 + t_random(seed) % 9;
        snprintf(name, sizeof(name), "t%02zu", i);
        world_tensor(w, name, kinds[t_random(seed) % FL_LEN(kinds)], ndim, shape);
    }
}

/* Cuts each tensor among n members along one dimension, unevenly; a tensor too small goes to all.
 */
static void shard(struct world *w, struct world_member **m, size_t n, uint64_t *seed)
{
    for (uint32_t t = 0; t < w->n_tensors; t++) {
        const struct xfer_tensor *x = &w->tensors[t];
        unsigned d = x->ndim ? t_random(seed) % x->ndim : 0;
        struct xfer_box b = xfer_box_whole(x);
        uint64_t at = 0;

        for (size_t i = 0; i < n; i++) {
            if (x->ndim && x->shape[d] >= n) {
                uint64_t left = x->shape[d] - at - (n - 1 - i), take = 1 + t_random(seed) % left;

                b.at[d] = at;
                b.len[d] = i + 1 < n ? take : x->shape[d] - at;
                at += b.len[d];
            }
            world_piece(w, m[i], t, &b, t_random(seed) % 2, t_random(seed) % 20);
        }
    }
}

/* Boxes that overlap as they like, with one member that has all. */
static void scatter(struct world *w, struct world_member *m, uint64_t *seed)
{
    for (uint32_t t = 0; t < w->n_tensors; t++) {
        const struct xfer_tensor *x = &w->tensors[t];
        struct xfer_box b = { .at = { 0 } };

        for (unsigned d = 0; d < x->ndim; d++) {
            b.at[d] = t_random(seed) % x->shape[d];
            b.len[d] = 1 + t_random(seed) % (x->shape[d] - b.at[d]);
        }
        world_piece(w, m, t, &b, t_random(seed) % 2, t_random(seed) % 9);
    }
}

static void group(struct world *w, bool source, uint32_t party, size_t n, uint64_t *seed)
{
    struct world_member *m[WORLD_MEMBERS];
    char machine[8];

    for (size_t i = 0; i < n; i++) {
        snprintf(machine, sizeof(machine), "m%u", (unsigned)(t_random(seed) % 3));
        m[i] = source ? world_source(w, machine) : world_engine(w, party, machine);
    }
    shard(w, m, n, seed);
}

static void random_layouts(void **state)
{
    static const enum xfer_mode modes[] = { XFER_P2P, XFER_BROADCAST, XFER_AUTO, XFER_DISK_DELTA };
    static struct world w;

    (void)state;
    for (uint64_t round = 1; round <= 400; round++) {
        uint64_t seed = round * 7919;
        struct fl_err err = { 0 };
        struct xfer_plan *p, *q;

        world_init(&w);
        random_tensors(&w, &seed);
        enum xfer_mode mode = modes[round % FL_LEN(modes)];
        size_t replicas = 1 + t_random(&seed) % 3;

        for (size_t i = 0; i < replicas; i++)
            group(&w, true, 0, mode == XFER_DISK_DELTA ? 1 : 1 + t_random(&seed) % 4, &seed);
        if (mode != XFER_DISK_DELTA)
            scatter(&w, world_source(&w, "m1"), &seed);
        size_t engines = 1 + t_random(&seed) % 4;

        for (uint32_t e = 0; e < engines; e++)
            group(&w, false, e, 1 + t_random(&seed) % 4, &seed);
        if (round % 3 == 0) /* ranks that overlap within their engine */
            scatter(&w, world_engine(&w, 0, "m2"), &seed);
        world_seal(&w);
        struct xfer_plan_in in = world_in(&w, mode);

        in.bucket_bytes = round % 2 ? 0 : 1 + t_random(&seed) % 150;
        t_ok(xfer_plan_make(&in, &p, &err), &err);
        world_run(&w, &in, p);
        t_ok(xfer_plan_make(&in, &q, &err), &err);
        t_mem_eq(p->hash, q->hash, sizeof(p->hash), "the same input gives the same plan");
        xfer_plan_destroy(p);
        xfer_plan_destroy(q);
        world_fini(&w);
    }
}

/* ---- rows: a small model under tensor parallelism ---- */

static const uint64_t wide[] = { 8, 12 }, norm[] = { 12 };

static void model(struct world *w)
{
    world_init(w);
    world_tensor(w, "down", FL_BF16, 2, wide);
    world_tensor(w, "norm", FL_BF16, 1, norm);
    world_tensor(w, "up", FL_BF16, 2, wide);
}

/* Rank r of n: down by columns, up by rows, norm whole. */
static void tensor_parallel(struct world *w, struct world_member *m, unsigned r, unsigned n)
{
    struct xfer_box b = { .at = { 0, r * 12 / n }, .len = { 8, 12 / n } };

    world_piece(w, m, 0, &b, 0, 0);
    b = xfer_box_whole(&w->tensors[1]);
    world_piece(w, m, 1, &b, 0, 0);
    b = (struct xfer_box){ .at = { r * 8 / n }, .len = { 8 / n, 12 } };
    world_piece(w, m, 2, &b, 0, 0);
}

static struct xfer_plan *plan(struct world *w, enum xfer_mode mode)
{
    struct xfer_plan_in in = world_in(w, mode);
    struct fl_err err = { 0 };
    struct xfer_plan *p = NULL;

    t_ok(xfer_plan_make(&in, &p, &err), &err);
    return p;
}

static void tensor_parallel_from_whole(void **state)
{
    static struct world w;

    (void)state;
    model(&w);
    world_whole(&w, world_source(&w, "a"));
    for (unsigned r = 0; r < 4; r++)
        tensor_parallel(&w, world_engine(&w, 0, "a"), r, 4);
    world_seal(&w);
    struct xfer_plan *p = plan(&w, XFER_P2P);
    struct xfer_plan_in in = world_in(&w, XFER_P2P);

    t_int_eq(p->n_edges, 4);
    t_int_eq(p->n_segs, 12, "a column shard is one segment of many rows");
    t_int_eq(p->segs[0].rows, 8);
    t_int_eq(p->segs[0].run_bytes, 6);
    t_int_eq(p->bytes, 4 * (8 * 3 * 2 + 24 + 2 * 12 * 2));
    world_run(&w, &in, p);
    xfer_plan_destroy(p);
    world_fini(&w);
}

static void nearest_first_then_even(void **state)
{
    static struct world w;
    unsigned from[4] = { 0 };

    (void)state;
    model(&w);
    for (unsigned s = 0; s < 4; s++)
        world_whole(&w, world_source(&w, s < 3 ? "a" : "b"));
    for (unsigned e = 0; e < 7; e++)
        world_whole(&w, world_engine(&w, e, e < 6 ? "a" : "b"));
    world_seal(&w);
    struct xfer_plan *p = plan(&w, XFER_P2P);

    t_int_eq(p->n_edges, 7, "each engine stays with one source");
    for (size_t i = 0; i < p->n_edges; i++) {
        from[p->edges[i].from]++;
        t_str_eq(link_table[p->edges[i].link]->name, "shm");
    }
    t_true(from[0] == 2 && from[1] == 2 && from[2] == 2 && from[3] == 1, "%u %u %u %u", from[0],
           from[1], from[2], from[3]);
    xfer_plan_destroy(p);
    world_fini(&w);
}

static void one_engine_draws_on_all(void **state)
{
    static struct world w;
    uint64_t from[4] = { 0 };

    (void)state;
    world_init(&w);
    for (unsigned i = 0; i < 8; i++)
        world_tensor(&w, (char[]){ 't', (char)('0' + i), 0 }, FL_F32, 1, &(uint64_t){ 100 });
    for (unsigned s = 0; s < 4; s++)
        world_whole(&w, world_source(&w, "a"));
    world_whole(&w, world_engine(&w, 0, "b"));
    world_seal(&w);
    struct xfer_plan *p = plan(&w, XFER_P2P);

    for (size_t i = 0; i < p->n_buckets; i++)
        from[p->edges[p->buckets[i].edge].from] += p->buckets[i].bytes;
    for (unsigned s = 0; s < 4; s++)
        t_int_eq(from[s], 800, "source %u", s);
    t_str_eq(link_table[p->edges[0].link]->name, "tcp");
    xfer_plan_destroy(p);
    world_fini(&w);
}

static void broadcast_joins_equal_receivers(void **state)
{
    static struct world w;

    (void)state;
    model(&w);
    world_whole(&w, world_source(&w, "a"));
    world_whole(&w, world_source(&w, "a"));
    for (unsigned e = 0; e < 3; e++)
        for (unsigned r = 0; r < 2; r++)
            tensor_parallel(&w, world_engine(&w, e, "b"), r, 2);
    world_seal(&w);
    struct xfer_plan *p = plan(&w, XFER_BROADCAST);
    struct xfer_plan_in in = world_in(&w, XFER_BROADCAST);

    t_int_eq(p->n_edges, 2, "one for each rank's layout");
    for (size_t i = 0; i < 2; i++) {
        t_int_eq(p->edges[i].from, 0, "the first holder is the root");
        t_int_eq(p->edges[i].n_to, 3);
        t_int_eq(p->to[p->edges[i].first_to + 1], 2 + 2 + i);
    }
    world_run(&w, &in, p);
    xfer_plan_destroy(p);
    world_fini(&w);
}

static void share_maps_and_moves_nothing(void **state)
{
    static struct world w;
    struct fl_err err = { 0 };

    (void)state;
    model(&w);
    world_whole(&w, world_source(&w, "a"));
    world_whole(&w, world_engine(&w, 0, "a"));
    world_seal(&w);
    struct xfer_plan *p = plan(&w, XFER_SHARE);

    t_int_eq(p->bytes, 0);
    t_int_eq(p->n_segs, 3);
    t_int_eq(p->segs[2].from_off, 512);
    xfer_plan_destroy(p);
    struct xfer_plan_in in = world_in(&w, XFER_AUTO);

    in.may_share = true;
    t_ok(xfer_plan_make(&in, &p, &err), &err);
    t_int_eq(p->mode, XFER_SHARE, "auto takes what moves nothing");
    xfer_plan_destroy(p);
    in.may_share = false;
    t_ok(xfer_plan_make(&in, &p, &err), &err);
    t_int_eq(p->mode, XFER_COPY);
    xfer_plan_destroy(p);
    world_fini(&w);
}

/* ---- refusals ---- */

struct refusal {
    const char *name;
    void (*build)(struct world *w);
    enum xfer_mode mode;
    enum fl_status st;
    const char *says[3];
};

static void other_shape(struct world *w)
{
    static struct xfer_tensor theirs[3];

    model(w);
    world_whole(w, world_source(w, "a"));
    world_whole(w, world_engine(w, 0, "a"));
    world_seal(w);
    memcpy(theirs, w->tensors, sizeof(theirs));
    theirs[2].shape[0] = 16;
    theirs[2].shape[1] = 6;
    w->engine_manifests[0].tensors = theirs;
}
static void other_name(struct world *w)
{
    static struct xfer_tensor theirs[3];

    model(w);
    world_whole(w, world_source(w, "a"));
    world_whole(w, world_engine(w, 0, "a"));
    world_seal(w);
    memcpy(theirs, w->tensors, sizeof(theirs));
    theirs[1].name = "norm2";
    w->engine_manifests[0].tensors = theirs;
}
static void half_a_source(struct world *w)
{
    struct world_member *m;

    model(w);
    m = world_source(w, "a");
    tensor_parallel(w, m, 0, 2);
    world_whole(w, world_engine(w, 0, "a"));
    world_seal(w);
}
/* Stages of a pipeline. */
static void tensors_apart(struct world *w)
{
    struct world_member *m[2];

    model(w);
    m[0] = world_source(w, "a");
    m[1] = world_source(w, "a");
    for (uint32_t t = 0; t < w->n_tensors; t++) {
        struct xfer_box whole = xfer_box_whole(&w->tensors[t]);

        world_piece(w, m[t % 2], t, &whole, 0, 256);
    }
    world_whole(w, world_engine(w, 0, "a"));
    world_seal(w);
}
static void half_an_engine(struct world *w)
{
    model(w);
    world_whole(w, world_source(w, "a"));
    tensor_parallel(w, world_engine(w, 7, "a"), 1, 2);
    world_seal(w);
}
static void two_machines(struct world *w)
{
    model(w);
    world_whole(w, world_source(w, "a"));
    world_whole(w, world_engine(w, 0, "b"));
    world_seal(w);
}
static void other_layout(struct world *w)
{
    model(w);
    world_whole(w, world_source(w, "a"));
    tensor_parallel(w, world_engine(w, 0, "a"), 0, 1);
    world_seal(w);
}
static const struct refusal refusals[] = {
    { "shapes differ",
      other_shape,
      XFER_P2P,
      FL_INVALID,
      { "up bf16 [8, 12]", "up bf16 [16, 6]" } },
    { "names differ", other_name, XFER_P2P, FL_INVALID, { "norm bf16 [12]", "no engine wants" } },
    { "a piece nobody has",
      half_a_source,
      XFER_P2P,
      FL_INVALID,
      { "no source has", "down", "6:12" } },
    { "an engine that is not whole",
      half_an_engine,
      XFER_P2P,
      FL_INVALID,
      { "engine 7", "96 of 192 bytes" } },
    { "copy between machines", two_machines, XFER_COPY, FL_UNREACHABLE, { "no link for copy" } },
    { "share between machines", two_machines, XFER_SHARE, FL_UNREACHABLE, { "no link for share" } },
    { "share of other layouts",
      other_layout,
      XFER_SHARE,
      FL_INVALID,
      { "cannot share", "use copy" } },
    { "delta of shards", half_a_source, XFER_DISK_DELTA, FL_INVALID, { "whole tensors", "down" } },
    { "delta of tensors apart",
      tensors_apart,
      XFER_DISK_DELTA,
      FL_INVALID,
      { "one writer", "down", "use broadcast or p2p" } },
};

static void refuses(void **state)
{
    static struct world w;

    (void)state;
    for (size_t i = 0; i < FL_LEN(refusals); i++) {
        const struct refusal *r = &refusals[i];
        struct fl_err err = { 0 };
        struct xfer_plan *p = NULL;

        r->build(&w);
        struct xfer_plan_in in = world_in(&w, r->mode);

        printf("# %s\n", r->name);
        t_refused(xfer_plan_make(&in, &p, &err), r->st, &err);
        t_true(p == NULL);
        for (size_t k = 0; k < 3 && r->says[k]; k++)
            t_has(err.text, r->says[k]);
        world_fini(&w);
    }
}

static void room_for_a_second_slot(void **state)
{
    static struct world w;
    struct fl_err err = { 0 };
    struct xfer_plan *p;

    (void)state;
    two_machines(&w);
    struct xfer_plan_in in = world_in(&w, XFER_AUTO);

    in.spare_bytes = 700;
    t_refused(xfer_plan_make(&in, &p, &err), FL_EXHAUSTED, &err);
    t_has(err.text, "700 B");
    t_has(err.text, "one slot");
    in.slots = XFER_ONE_SLOT;
    t_ok(xfer_plan_make(&in, &p, &err), &err);
    t_int_eq(p->slots, XFER_ONE_SLOT);
    xfer_plan_destroy(p);
    in.slots = XFER_TWO_SLOTS;
    in.spare_bytes = 704;
    t_ok(xfer_plan_make(&in, &p, &err), &err);
    xfer_plan_destroy(p);
    world_fini(&w);
}

static void hash_depends_on_all(void **state)
{
    static struct world w;
    uint64_t seen[6][2];
    size_t n = 0;

    (void)state;
    for (unsigned v = 0; v < 5;
         v++) { /* what changes: nothing, bucket, mode, a layout, who takes part */
        struct fl_err err = { 0 };
        struct xfer_plan *p;

        model(&w);
        world_whole(&w, world_source(&w, "a"));
        world_whole(&w, world_engine(&w, 0, "a"));
        if (v == 3)
            tensor_parallel(&w, world_engine(&w, 1, "a"), 0, 1);
        if (v == 4) {
            world_whole(&w, world_engine(&w, 1, "a"));
            w.engines[1].m.who.attempt = 2;
        }
        world_seal(&w);
        struct xfer_plan_in in = world_in(&w, v == 2 ? XFER_BROADCAST : XFER_P2P);

        in.bucket_bytes = v == 1 ? 64 : 0;
        t_ok(xfer_plan_make(&in, &p, &err), &err);
        memcpy(seen[n++], p->hash, sizeof(p->hash));
        xfer_plan_destroy(p);
        world_fini(&w);
    }
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < i; k++)
            t_true(memcmp(seen[i], seen[k], sizeof(seen[i])) != 0, "%zu and %zu", i, k);
}

/* A part that was bent on its way is refused, whatever bit it is: by its hash, and without one by
 * what it says. */
static void bent_parts(void **state)
{
    static struct world w;
    struct fl_err err = { 0 };
    size_t n, passed = 0;
    void *image;

    (void)state;
    model(&w);
    world_whole(&w, world_source(&w, "a"));
    for (unsigned r = 0; r < 2; r++)
        tensor_parallel(&w, world_engine(&w, 0, "a"), r, 2);
    world_seal(&w);
    struct xfer_plan *p = plan(&w, XFER_P2P);

    t_ok(xfer_part_encode(p, 1, &image, &n, &err), &err);
    for (size_t bit = 0; bit < n * 8; bit++) {
        unsigned char *bent = malloc(n);
        struct xfer_plan *part = NULL;

        memcpy(bent, image, n);
        bent[bit / 8] ^= (unsigned char)(1 << bit % 8);
        t_int_eq(xfer_part_decode(bent, n, p->part_hash[1], &part, NULL), FL_CORRUPT, "bit %zu",
                 bit);
        if (xfer_part_decode(bent, n, NULL, &part, NULL) ==
            FL_OK) { /* may be nonsense, must be safe */
            passed += xfer_part_check(part, 1, &w.engine_manifests[0], NULL) == FL_OK;
            xfer_plan_destroy(part);
        }
        free(bent);
    }
    printf("# %zu of %zu bent bits are harmless to the receiver\n", passed, n * 8);
    for (size_t cut = 0; cut < n; cut++) {
        struct xfer_plan *part = NULL;
        unsigned char *some = malloc(cut + 1);

        memcpy(some, image, cut);
        t_int_eq(xfer_part_decode(some, cut, NULL, &part, NULL), FL_CORRUPT, "%zu of %zu bytes",
                 cut, n);
        free(some);
    }
    free(image);
    xfer_plan_destroy(p);
    world_fini(&w);
}

/* ---- size ---- */

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
        cmocka_unit_test(tensor_parallel_from_whole),
        cmocka_unit_test(nearest_first_then_even),
        cmocka_unit_test(one_engine_draws_on_all),
        cmocka_unit_test(broadcast_joins_equal_receivers),
        cmocka_unit_test(share_maps_and_moves_nothing),
        cmocka_unit_test(refuses),
        cmocka_unit_test(room_for_a_second_slot),
        cmocka_unit_test(hash_depends_on_all),
        cmocka_unit_test(bent_parts),
        cmocka_unit_test(random_layouts),
        cmocka_unit_test(large_model),
    };

    return t_run("plan", tests);
}
