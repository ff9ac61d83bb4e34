/* The default run without processes: engine and learner in turn, on the prompts that ship, from
 * random weights, by reward alone. Several seeds, because one may be lucky. */
#include "tests/t.h"

#include <stdlib.h>

#include "common/conf/train_flags.h"
#include "worker/roles/engine.h"
#include "worker/roles/learner.h"
#include "worker/roles/prompts.h"
#include "worker/roles/reward.h"
#include "worker/roles/rng.h"

struct school {
    struct train_flags f;
    struct fl_opts o;
    struct prompts *train, *held;
    struct alphabet a;
    struct model_layout *l;
    struct engine *e;
    struct learner *k;
    float *base, **w, *m, *v;
};

static void school_up(struct school *s, uint64_t seed)
{
    struct fl_err err;
    char path[1024];

    memset(s, 0, sizeof(*s));
    s->o.program = "t";
    train_flags_tables(&s->f, s->o.tables);
    t_ok(train_flags_parse(&s->f, &s->o, 1, (char *[]){ "t", NULL }, &err), &err);
    t_ok(prompts_shipped("lookup.jsonl", path, &err), &err);
    t_ok(prompts_load(path, "input", "label", &s->train, &err), &err);
    t_ok(prompts_shipped("lookup-heldout.jsonl", path, &err), &err);
    t_ok(prompts_load(path, "input", "label", &s->held, &err), &err);
    alphabet_init(&s->a);
    for (uint32_t i = 0; i < s->train->n; i++) {
        alphabet_add(&s->a, s->train->rows[i].input);
        alphabet_add(&s->a, s->train->rows[i].label);
    }
    alphabet_settle(&s->a);
    struct model_config c = {
        s->a.n, (uint32_t)s->f.hidden_size, (uint32_t)s->f.num_layers, (uint32_t)s->f.num_attention_heads,
        (uint32_t)s->f.num_query_groups, (uint32_t)s->f.kv_channels, (uint32_t)s->f.ffn_hidden_size,
        (uint32_t)s->f.max_position_embeddings, !s->f.untie, (float)s->f.rotary_base, (float)s->f.norm_epsilon,
    };
    struct learner_opts o = {
        .lr = (float)s->f.lr, .beta1 = (float)s->f.adam_beta1, .beta2 = (float)s->f.adam_beta2,
        .eps = (float)s->f.adam_eps, .clip_grad = (float)s->f.clip_grad, .inv_temp = 1,
        .policy = { (float)s->f.eps_clip, (float)s->f.eps_clip_high, (float)s->f.entropy_coef },
        .world = 1, .threads = 2,
    };
    t_ok(model_layout_create(&c, &s->l, &err), &err);
    t_ok(engine_create(s->l, 256, ALPHABET_END, &s->e, &err), &err);
    t_ok(learner_create(s->l, &o, &s->k, &err), &err);
    s->base = aligned_alloc(64, s->l->floats * sizeof(float));
    s->w = calloc(s->l->n, sizeof(*s->w));
    s->m = calloc(s->l->floats, sizeof(float));
    s->v = calloc(s->l->floats, sizeof(float));
    model_init(s->l, s->base, seed);
    model_point(s->l, s->base, s->w);
    engine_weights(s->e, s->w, 0, (uint64_t[2]){ 0, 0 });
}

static void school_down(struct school *s)
{
    engine_destroy(s->e);
    learner_destroy(s->k);
    model_layout_destroy(s->l);
    prompts_destroy(s->train);
    prompts_destroy(s->held);
    free(s->base);
    free(s->w);
    free(s->m);
    free(s->v);
    train_flags_fini(&s->f);
}

static struct engine_request *answer(struct school *s, const struct prompts *p, const uint32_t *rows,
                                     uint32_t n_prompts, uint32_t n, float temperature, uint64_t seed,
                                     uint32_t step)
{
    int32_t *tokens = malloc(n_prompts * 64 * sizeof(*tokens));
    uint32_t *lengths = malloc(n_prompts * sizeof(*lengths)), at = 0;
    struct engine_request *got, q = { .n_prompts = n_prompts, .n = n, .tokens = tokens, .lengths = lengths,
                                      .max_new = 1, .temperature = temperature, .seed = seed, .step = step };
    struct fl_err err;

    for (uint32_t i = 0; i < n_prompts; at += lengths[i++])
        t_ok(alphabet_encode(&s->a, p->rows[rows[i]].input, tokens + at, &lengths[i], &err), &err);
    t_ok(engine_submit(s->e, &q, &err), &err);
    while (!(got = engine_done(s->e)))
        engine_step(s->e);
    free(tokens);
    free(lengths);
    return got;
}

static double rewards(struct school *s, const struct prompts *p, const uint32_t *rows,
                      const struct engine_request *q, float *r)
{
    double sum = 0;

    for (uint32_t i = 0; i < q->n_prompts * q->n; i++) {
        const struct engine_seq *x = &q->seqs[i];
        char text[65];
        struct reward_row row = { "", text, p->rows[rows[i / q->n]].label };

        alphabet_decode(&s->a, x->tokens + x->n_prompt, x->n - x->n_prompt, text);
        t_ok(reward_score(NULL, &row, 1, 0, &r[i], NULL), NULL);
        sum += (double)r[i];
    }
    return sum / (q->n_prompts * q->n);
}

static void learn(struct school *s, const struct engine_request *q, const float *r, uint64_t t)
{
    uint32_t n = q->n_prompts * q->n, at = 0;
    int32_t *tokens = malloc(n * 64 * sizeof(*tokens)), *lengths = malloc(n * 2 * sizeof(*lengths));
    float *logp = malloc(n * 64 * sizeof(*logp)), *adv = malloc(n * sizeof(*adv));
    uint32_t *starts = malloc((n + 1) * sizeof(*starts));
    struct learner_sums sums;
    struct fl_err err;
    double norm;
    size_t bytes;
    void *sum;

    for (uint32_t i = 0; i < n; at += q->seqs[i++].n) {
        starts[i] = at;
        lengths[i] = (int32_t)q->seqs[i].n;
        lengths[n + i] = (int32_t)q->seqs[i].n_prompt;
        memcpy(tokens + at, q->seqs[i].tokens, q->seqs[i].n * sizeof(*tokens));
        memcpy(logp + at, q->seqs[i].logp, q->seqs[i].n * sizeof(*logp));
    }
    starts[n] = at;
    for (uint32_t i = 0; i < n; i += q->n)
        policy_advantages(r + i, q->n, true, adv + i);
    struct batch b = { at, n, tokens, lengths, lengths + n, logp, adv, starts, NULL };
    t_ok(learner_gradient(s->k, s->w, &b, (struct learner_part){ 0, n }, &sum, &bytes, &err), &err);
    learner_apply(s->k, sum, t, s->w, s->m, s->v, &sums, &norm);
    if (t == 1)
        t_true(sums.abs_diff / sums.tokens <= 1e-5, "%g", sums.abs_diff / sums.tokens);
    free(tokens);
    free(lengths);
    free(logp);
    free(adv);
    free(starts);
}

static void one_seed(uint64_t seed)
{
    struct school s;
    double first = 0, last = 0;

    school_up(&s, seed);
    uint32_t batch = (uint32_t)s.f.rollout_batch_size, n = (uint32_t)s.f.n_samples_per_prompt;
    uint32_t *order = malloc(s.train->n * sizeof(*order)), *rows = malloc(batch * sizeof(*rows));
    float *r = malloc(batch * n * sizeof(*r));
    for (uint32_t step = 0; step < s.f.num_rollout; step++) {
        for (uint32_t i = 0; i < batch; i++) {
            uint64_t at = (uint64_t)step * batch + i;

            if (i == 0 || at % s.train->n == 0)
                rng_shuffle(order, s.train->n, seed, (uint32_t)(at / s.train->n));
            rows[i] = order[at % s.train->n];
        }
        struct engine_request *q = answer(&s, s.train, rows, batch, n, 1, seed, step);
        double mean = rewards(&s, s.train, rows, q, r);

        first = step == 0 ? mean : first;
        last += step + 10 >= s.f.num_rollout ? mean / 10 : 0;
        learn(&s, q, r, step + 1);
        engine_request_destroy(q);
    }
    uint32_t *all = malloc(s.held->n * sizeof(*all));
    float *rh = malloc(s.held->n * sizeof(*rh));
    for (uint32_t i = 0; i < s.held->n; i++)
        all[i] = i;
    struct engine_request *q = answer(&s, s.held, all, s.held->n, 1, 0, seed, 0);
    double held = rewards(&s, s.held, all, q, rh);
    printf("# seed %ju: reward %.3f, then %.3f; held out %.3f\n", (uintmax_t)seed, first, last, held);
    engine_request_destroy(q);
    free(all);
    free(rh);
    free(order);
    free(rows);
    free(r);
    school_down(&s);
    t_true(first < 0.2, "seed %ju begins at %.3f", (uintmax_t)seed, first);
    t_true(last > 0.9, "seed %ju ends at %.3f", (uintmax_t)seed, last);
    t_true(held > 0.8, "seed %ju, held out: %.3f", (uintmax_t)seed, held);
}

static void default_run_learns(void **state)
{
    const char *seeds = getenv("FURLONG_TEST_SEEDS");
    int n = seeds ? atoi(seeds) : 3;

    (void)state;
    for (int seed = 1; seed <= n; seed++)
        one_seed((uint64_t)seed);
}

int main(void)
{
    static const struct CMUnitTest tests[] = { cmocka_unit_test(default_run_learns) };

    return t_run("learn", tests);
}
