/* The engine: what a sequence becomes depends on its prompt, seed and weights, and on nothing else. */
#include "tests/t.h"

#include "worker/roles/engine.h"

#include <math.h>
#include <stdlib.h>

static const struct model_config config = {
    .vocab = 13, .dim = 24, .layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 6, .ffn = 20,
    .max_len = 24, .rope_theta = 100, .norm_eps = 1e-5f,
};
static const int32_t prompts[] = { 1, 4, 2, 6, 3, 5, 7, 2, 2, 6, 1, 3, 4, 4, 11, 12 };
static const uint32_t lengths[] = { 4, 2, 10 };
static const uint64_t digest_a[2] = { 1, 2 }, digest_b[2] = { 3, 4 };

struct rig {
    struct model_layout *l;
    float *base, **w;
    struct engine *e;
};

static void rig_up(struct rig *r, uint32_t slots)
{
    struct fl_err err;

    t_ok(model_layout_create(&config, &r->l, &err), &err);
    r->base = aligned_alloc(64, r->l->floats * sizeof(float));
    r->w = calloc(r->l->n, sizeof(*r->w));
    model_point(r->l, r->base, r->w);
    model_init(r->l, r->base, 3);
    for (size_t j = 0; j < r->l->tensors[model_head_at(&config)].count; j++)
        r->w[model_head_at(&config)][j] *= 20; /* probabilities that differ */
    t_ok(engine_create(r->l, slots, 0, &r->e, &err), &err);
    engine_weights(r->e, r->w, 7, digest_a);
}

static void rig_down(struct rig *r)
{
    engine_destroy(r->e);
    free(r->w);
    free(r->base);
    model_layout_destroy(r->l);
}

static struct engine_request ask(uint32_t n, uint32_t max_new, float temperature)
{
    return (struct engine_request){ .n_prompts = 3, .n = n, .tokens = prompts, .lengths = lengths,
                                    .max_new = max_new, .temperature = temperature, .seed = 11,
                                    .step = 2, .first = 5 };
}

static struct engine_request *run(struct engine *e)
{
    struct engine_request *r = NULL;

    for (int i = 0; i < 10000 && !(r = engine_done(e)); i++) {
        t_true(engine_busy(e));
        engine_step(e);
    }
    t_true(r != NULL, "never done");
    return r;
}

static void same(const struct engine_request *a, const struct engine_request *b, const char *what)
{
    for (uint32_t i = 0; i < a->n_prompts * a->n; i++) {
        t_int_eq(a->seqs[i].n, b->seqs[i].n, "%s: sample %u", what, i);
        t_mem_eq(a->seqs[i].tokens, b->seqs[i].tokens, a->seqs[i].n * sizeof(int32_t), "%s: sample %u",
                 what, i);
        t_mem_eq(a->seqs[i].logp, b->seqs[i].logp, a->seqs[i].n * sizeof(float), "%s: sample %u", what, i);
    }
}

static void whatever_the_batch(void **state)
{
    static const uint32_t slots[] = { 1, 2, 5, 64, 100000 };
    struct engine_request q = ask(6, 9, 0.9f), *first = NULL;
    struct fl_err err;

    (void)state;
    for (size_t i = 0; i < sizeof(slots) / sizeof(*slots); i++) {
        struct rig r;

        rig_up(&r, slots[i]);
        t_ok(engine_submit(r.e, &q, &err), &err);
        struct engine_request *got = run(r.e);
        if (first)
            same(first, got, "slots");
        rig_down(&r);
        if (first)
            engine_request_destroy(got);
        else
            first = got;
    }
    bool differ = false;
    for (uint32_t i = 1; i < 6; i++)
        differ |= first->seqs[i].n != first->seqs[0].n ||
                  memcmp(first->seqs[i].tokens, first->seqs[0].tokens, first->seqs[0].n * 4) != 0;
    t_true(differ, "six samples of one prompt are all the same");
    engine_request_destroy(first);
}

static void retracted_and_among_others(void **state)
{
    struct engine_request q = ask(6, 9, 0.9f), other = ask(3, 5, 2.f), *plain, *mixed;
    struct fl_err err;
    struct rig r;

    (void)state;
    other.seed = 99;
    rig_up(&r, 64);
    t_ok(engine_submit(r.e, &q, &err), &err);
    plain = run(r.e);
    rig_down(&r);

    rig_up(&r, 7);
    t_ok(engine_submit(r.e, &other, &err), &err);
    engine_step(r.e);
    q.user = &q;
    t_ok(engine_submit(r.e, &q, &err), &err);
    for (int i = 0; i < 4; i++)
        engine_step(r.e);
    t_true(engine_offload(r.e) > 0, "pages were in use");
    t_true(!engine_busy(r.e), "nothing runs without a cache");
    engine_step(r.e);
    engine_onload(r.e);
    mixed = run(r.e);
    if (mixed->user != &q) {
        engine_request_destroy(mixed);
        mixed = run(r.e);
    }
    t_true(mixed->user == &q);
    same(plain, mixed, "mixed and retracted");
    engine_request_destroy(plain);
    engine_request_destroy(mixed);
    rig_down(&r);
}

/* The trainer's view of the same samples. */
static void agrees_with_training(void **state)
{
    struct engine_request q = ask(4, 9, 0.7f), *got;
    struct model_acts *acts;
    struct fl_err err;
    struct rig r;

    (void)state;
    rig_up(&r, 5);
    t_ok(engine_submit(r.e, &q, &err), &err);
    got = run(r.e);
    t_ok(model_acts_create(r.l, &acts, &err), &err);
    for (uint32_t i = 0; i < 12; i++) {
        const struct engine_seq *s = &got->seqs[i];
        uint32_t starts[2] = { 0, s->n };
        struct model_batch b = { s->tokens, starts, 1 };
        struct model_target t[24];
        float logp[24];

        for (uint32_t k = s->n_prompt; k < s->n; k++)
            t[k - s->n_prompt] = (struct model_target){ k - 1, s->tokens[k] };
        t_ok(model_score(acts, r.w, &b, t, s->n - s->n_prompt, 1 / 0.7f, logp, NULL, &err), &err);
        for (uint32_t k = s->n_prompt; k < s->n; k++)
            t_true(fabsf(logp[k - s->n_prompt] - s->logp[k]) <= 1e-5f, "sample %u token %u", i, k);
        for (uint32_t k = 0; k < s->n_prompt; k++)
            t_true(s->logp[k] == 0);
    }
    model_acts_destroy(acts);
    engine_request_destroy(got);
    rig_down(&r);
}

static void ends_and_greedy(void **state)
{
    struct engine_request q = ask(2, 40, 0), *got;
    struct fl_err err;
    struct rig r;

    (void)state;
    rig_up(&r, 8);
    t_ok(engine_submit(r.e, &q, &err), &err);
    got = run(r.e);
    for (uint32_t i = 0; i < 6; i++) {
        const struct engine_seq *s = &got->seqs[i];
        bool ended = s->tokens[s->n - 1] == 0;

        t_true(ended || s->n == config.max_len, "sample %u stops at the end token or the longest", i);
        for (uint32_t k = s->n_prompt; k + 1 < s->n; k++)
            t_true(s->tokens[k] != 0, "sample %u goes on after its end", i);
    }
    t_mem_eq(got->seqs[0].tokens, got->seqs[1].tokens, got->seqs[0].n * 4, "greedy is greedy");
    engine_request_destroy(got);
    rig_down(&r);
}

/* New weights in the middle: the answer says which tokens came from which. */
static void spans_name_versions(void **state)
{
    struct engine_request q = ask(1, 6, 1), *got;
    struct fl_err err;
    struct rig r;
    uint32_t seen = 0;

    (void)state;
    rig_up(&r, 8);
    t_ok(engine_submit(r.e, &q, &err), &err);
    engine_step(r.e);
    engine_step(r.e);
    engine_weights(r.e, NULL, 0, digest_b);
    t_true(!engine_busy(r.e), "no weights, no steps");
    engine_weights(r.e, r.w, 8, digest_b);
    got = run(r.e);
    for (uint32_t i = 0; i < 3; i++) {
        const struct engine_seq *s = &got->seqs[i];
        uint32_t sum = 0;

        t_int_eq(s->spans[0].version, 7);
        t_true(s->spans[0].digest[1] == 2);
        for (uint32_t k = 0; k < s->n_spans; k++)
            sum += s->spans[k].tokens;
        t_int_eq(sum, s->n - s->n_prompt, "sample %u", i);
        if (s->n_spans == 2) {
            t_int_eq(s->spans[0].tokens, 2);
            t_int_eq(s->spans[1].version, 8);
            seen++;
        }
    }
    t_true(seen > 0, "no sample crossed the change");
    engine_request_destroy(got);
    rig_down(&r);
}

static void refusals(void **state)
{
    static const struct {
        const char *name;
        int32_t token;
        uint32_t len, n, max_new;
        enum fl_status st;
        const char *part;
    } rows[] = {
        { "no such token", 13, 1, 1, 1, FL_INVALID, "token 13" },
        { "negative token", -1, 1, 1, 1, FL_INVALID, "token -1" },
        { "empty prompt", 1, 0, 1, 1, FL_INVALID, "0 tokens" },
        { "too long", 1, 24, 1, 1, FL_INVALID, "24 tokens" },
        { "no samples", 1, 1, 0, 1, FL_INVALID, "0 samples" },
        { "no tokens wanted", 1, 1, 1, 0, FL_INVALID, "none may be 0" },
        { "too many", 1, 1, ENGINE_QUEUE_MAX + 1, 1, FL_EXHAUSTED, "at most" },
    };
    struct fl_err err;
    struct rig r;

    (void)state;
    rig_up(&r, 2);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        int32_t tokens[24];
        struct engine_request q = { .n_prompts = 1, .n = rows[i].n, .tokens = tokens,
                                    .lengths = &rows[i].len, .max_new = rows[i].max_new };

        for (int k = 0; k < 24; k++)
            tokens[k] = rows[i].token;
        t_refused(engine_submit(r.e, &q, &err), rows[i].st, &err);
        t_has(err.text, rows[i].part);
        t_true(!engine_busy(r.e), "%s: nothing half done", rows[i].name);
    }
    struct engine_request q = ask(2, 4, 1);
    t_ok(engine_submit(r.e, &q, &err), &err);
    engine_step(r.e); /* dropped with work in it: the sanitizers look */
    rig_down(&r);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(whatever_the_batch),   cmocka_unit_test(retracted_and_among_others),
        cmocka_unit_test(agrees_with_training), cmocka_unit_test(ends_and_greedy),
        cmocka_unit_test(spans_name_versions),  cmocka_unit_test(refusals),
    };

    return t_run("engine", tests);
}
