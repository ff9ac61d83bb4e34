/* plans by rows and by random layouts */
#include <stdlib.h>
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

/* One source with all of it, one engine of n ranks. */
static void whole_to_parts(struct world *w, unsigned n)
{
    model(w);
    world_whole(w, world_source(w, "a"));
    for (unsigned r = 0; r < n; r++)
        tensor_parallel(w, world_engine(w, 0, "a"), r, n);
    world_seal(w);
}

static void tensor_parallel_from_whole(void **state)
{
    static struct world w;

    (void)state;
    whole_to_parts(&w, 4);
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

/* One source and one engine with all of it, whose own table of tensors may be bent. */
static struct xfer_tensor *bends(struct world *w)
{
    static struct xfer_tensor theirs[3];

    model(w);
    world_whole(w, world_source(w, "a"));
    world_whole(w, world_engine(w, 0, "a"));
    world_seal(w);
    memcpy(theirs, w->tensors, sizeof(theirs));
    w->engine_manifests[0].tensors = theirs;
    return theirs;
}
static void other_shape(struct world *w)
{
    struct xfer_tensor *t = &bends(w)[2];

    t->shape[0] = 16;
    t->shape[1] = 6;
}
static void other_name(struct world *w)
{
    bends(w)[1].name = "norm2";
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
    whole_to_parts(&w, 2);
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
    };

    return t_run("plan", tests);
}
