/* A training step: the same weights for any number of ranks and threads, and real learning. */
#include "tests/t.h"

#include "worker/roles/learner.h"
#include "worker/roles/rng.h"

#include <malloc.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KEEPS_FREED 1
#elif defined(__has_feature)
#define KEEPS_FREED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define KEEPS_FREED 0
#endif

static const struct model_config config = {
    .vocab = 12, .dim = 32, .layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 8, .ffn = 40,
    .max_len = 16, .rope_theta = 10000, .norm_eps = 1e-6f,
};
enum { SAMPLES = 61, MOST = SAMPLES * 10 };

struct made {
    struct batch b;
    int32_t tokens[MOST], lengths[SAMPLES], prompts[SAMPLES];
    float logp[MOST], advantages[SAMPLES];
    uint32_t starts[SAMPLES + 1];
};

static void make(struct made *m)
{
    uint64_t seed = 5;
    uint32_t at = 0;

    for (uint32_t s = 0; s < SAMPLES; s++) {
        m->prompts[s] = 2 + (int32_t)(t_random(&seed) % 4);
        m->lengths[s] = m->prompts[s] + 1 + (int32_t)(t_random(&seed) % 4);
        m->advantages[s] = (float)(t_random(&seed) % 200) / 100 - 1;
        m->starts[s] = at;
        for (int32_t k = 0; k < m->lengths[s]; k++, at++) {
            m->tokens[at] = (int32_t)(t_random(&seed) % config.vocab);
            m->logp[at] = k < m->prompts[s] ? 0 : -2.4f;
        }
    }
    m->starts[SAMPLES] = at;
    m->b = (struct batch){ .n_tokens = at, .n_samples = SAMPLES, .tokens = m->tokens, .lengths = m->lengths,
                           .prompt_lengths = m->prompts, .logprobs = m->logp,
                           .advantages = m->advantages, .starts = m->starts };
}

struct outcome {
    float *w;
    struct learner_sums sums;
    double norm;
};

static struct outcome step(const struct model_layout *l, const struct batch *b, uint32_t world,
                           uint32_t threads)
{
    struct learner *k[8] = { 0 };
    void *sums[8];
    size_t bytes = 0;
    struct outcome out = { .w = aligned_alloc(64, l->floats * sizeof(float)) };
    float **w = calloc(l->n, sizeof(*w)), *m = calloc(l->floats, sizeof(*m)),
          *v = calloc(l->floats, sizeof(*v));
    struct fl_err err;

    model_init(l, out.w, 1);
    model_point(l, out.w, w);
    for (uint32_t r = 0; r < world; r++) {
        struct learner_opts o = { .lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.99f, .eps = 1e-8f, .clip_grad = 1,
                                  .inv_temp = 1, .policy = { 0.2f, 0.28f, 0.01f }, .rank = r,
                                  .world = world, .threads = threads };

        t_ok(learner_create(l, &o, &k[r], &err), &err);
        t_ok(learner_gradient(k[r], w, b, (struct learner_part){ 0, b->n_samples }, &sums[r], &bytes, &err),
             &err);
    }
    learner_fold(sums, world, bytes);
    learner_apply(k[0], sums[0], 1, w, m, v, &out.sums, &out.norm);
    for (uint32_t r = 0; r < world; r++)
        learner_destroy(k[r]);
    free(w);
    free(m);
    free(v);
    return out;
}

static void ranks_and_threads_agree(void **state)
{
    static const struct { const char *name; uint32_t world, threads; bool bits; } rows[] = {
        { "2 ranks", 2, 1, true },     { "4 ranks", 4, 1, true },   { "8 ranks", 8, 1, true },
        { "2 threads", 1, 2, true },   { "3 threads", 1, 3, true }, { "8 threads", 1, 8, true },
        { "2 ranks of 2", 2, 2, true }, { "3 ranks", 3, 1, false }, { "5 ranks", 5, 1, false },
    };
    static struct made m;
    struct model_layout *l;
    struct fl_err err;

    (void)state;
    make(&m);
    t_ok(model_layout_create(&config, &l, &err), &err);
    struct outcome one = step(l, &m.b, 1, 1);
    t_true(one.norm > 1e-3 && one.sums.tokens > 60);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct outcome x = step(l, &m.b, rows[i].world, rows[i].threads);
        double diff = 0, size = 0;

        t_int_eq(x.sums.tokens, one.sums.tokens, "%s", rows[i].name);
        if (rows[i].bits)
            t_mem_eq(x.w, one.w, l->floats * sizeof(float), "%s", rows[i].name);
        for (size_t j = 0; j < l->floats; j++) {
            diff += pow((double)(x.w[j] - one.w[j]), 2);
            size += pow((double)one.w[j], 2);
        }
        t_true(sqrt(diff) <= 1e-5 * sqrt(size), "%s: %g", rows[i].name, sqrt(diff / size));
        free(x.w);
    }
    free(one.w);
    model_layout_destroy(l);
}

/* The derivative of the whole loss by one weight, through shards, tree and policy. */
static void loss_follows_gradient(void **state)
{
    static struct made m;
    struct model_layout *l;
    struct learner *k;
    struct learner_opts o = { .inv_temp = 0.8f, .policy = { 0.2f, 0.28f, 0.05f }, .world = 1, .threads = 1 };
    struct fl_err err;
    void *sum;
    size_t bytes;
    double at[2], slope = 0, size = 0;

    (void)state;
    make(&m);
    for (uint32_t i = 0; i < m.b.n_tokens; i++)
        m.logp[i] = m.logp[i] < 0 ? -2.45f - 0.01f * (float)(i % 3) : 0; /* ratios away from the clip */
    t_ok(model_layout_create(&config, &l, &err), &err);
    t_ok(learner_create(l, &o, &k, &err), &err);
    float *w = aligned_alloc(64, l->floats * sizeof(float)), **wp = calloc(l->n, sizeof(*wp));
    model_init(l, w, 1);
    model_point(l, w, wp);
    struct learner_part all = { 0, SAMPLES };
    t_ok(learner_gradient(k, wp, &m.b, all, &sum, &bytes, &err), &err);
    float *g = malloc(l->floats * sizeof(float));
    memcpy(g, sum, l->floats * sizeof(float));
    for (size_t j = 0; j < l->floats; j++)
        size += (double)g[j] * (double)g[j];
    double h = 2e-2 / sqrt(size);
    for (int side = 0; side < 2; side++) {
        model_init(l, w, 1);
        for (size_t j = 0; j < l->floats; j++)
            w[j] += (float)((side ? h : -h) * (double)g[j]);
        t_ok(learner_gradient(k, wp, &m.b, all, &sum, &bytes, &err), &err);
        at[side] = ((struct learner_sums *)(void *)((float *)sum + l->floats))->loss;
    }
    slope = (at[1] - at[0]) / (2 * h);
    t_true(fabs(slope - size) <= 1e-3 * size, "by differences %g, gradient %g", slope, size);
    t_true(learner_drop(k) > l->floats * sizeof(float), "memory comes back");
    t_int_eq(learner_drop(k), 0);
    t_ok(learner_gradient(k, wp, &m.b, all, &sum, &bytes, &err), &err);
    t_refused(learner_gradient(k, wp, &m.b, (struct learner_part){ 5, SAMPLES + 1 }, &sum, &bytes, &err),
              FL_INVALID, &err);
    free(g);
    free(w);
    free(wp);
    learner_destroy(k);
    model_layout_destroy(l);
}

static void compare_sees_the_gap(void **state)
{
    static struct made m;
    struct model_layout *l;
    struct learner *k;
    struct learner_opts o = { .inv_temp = 1, .world = 1, .threads = 1 };
    struct learner_sums gap = { 0 };
    struct fl_err err;

    (void)state;
    make(&m);
    t_ok(model_layout_create(&config, &l, &err), &err);
    t_ok(learner_create(l, &o, &k, &err), &err);
    float *w = calloc(l->floats, sizeof(float)), **wp = calloc(l->n, sizeof(*wp));
    model_point(l, w, wp); /* all zero: every token is equally likely, 1 in 12 */
    t_ok(learner_compare(k, wp, &m.b, &gap, &err), &err);
    t_true(fabs(gap.abs_diff / gap.tokens - fabs(log(12) - 2.4)) < 1e-6, "%g", gap.abs_diff / gap.tokens);
    free(w);
    free(wp);
    learner_destroy(k);
    model_layout_destroy(l);
}

static size_t resident_bytes(void)
{
    unsigned long pages = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");

    t_true(f && fscanf(f, "%lu %lu", &pages, &resident) == 2);
    (void)fclose(f);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

/* What offload gives back is memory of the machine, not a number: resident size falls by it. */
static void memory_comes_back(void **state)
{
    struct model_config large = config;
    static struct made m;
    struct model_layout *l;
    struct learner *k;
    struct learner_opts o = { .inv_temp = 1, .world = 1, .threads = 2 };
    struct fl_err err;
    void *sum;
    size_t bytes;

    (void)state;
    if (KEEPS_FREED)
        t_skip("the sanitizer keeps what is freed");
    large.dim = large.ffn = 512;
    large.max_len = 64;
    make(&m);
    t_ok(model_layout_create(&large, &l, &err), &err);
    t_ok(learner_create(l, &o, &k, &err), &err);
    float *w = calloc(l->floats, sizeof(float)), **wp = calloc(l->n, sizeof(*wp));
    model_point(l, w, wp);
    for (int round = 0; round < 2; round++) {
        t_ok(learner_gradient(k, wp, &m.b, (struct learner_part){ 0, SAMPLES }, &sum, &bytes, &err), &err);
        size_t before = resident_bytes(), said = learner_drop(k);
        (void)malloc_trim(0);
        size_t after = resident_bytes();

        t_true(said > 8 * l->floats, "%zu bytes said to be given back", said);
        t_true(before - after > said * 7 / 10, "%zu said, %zd seen", said, (ssize_t)(before - after));
    }
    free(w);
    free(wp);
    learner_destroy(k);
    model_layout_destroy(l);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_and_threads_agree),
        cmocka_unit_test(loss_follows_gradient),
        cmocka_unit_test(compare_sees_the_gap),
        cmocka_unit_test(memory_comes_back),
    };

    return t_run("learner", tests);
}
