#include "tests/t.h"

#include "worker/roles/model.h"
#include "worker/roles/rng.h"

#include <math.h>
#include <stdlib.h>

static const struct model_config small = {
    .vocab = 11, .dim = 24, .layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 6, .ffn = 20,
    .max_len = 16, .rope_theta = 100, .norm_eps = 1e-5f,
};
static const struct model_config small_tied = {
    .vocab = 7, .dim = 16, .layers = 1, .heads = 2, .kv_heads = 1, .head_dim = 8, .ffn = 12,
    .max_len = 16, .tied = true, .rope_theta = 10000, .norm_eps = 1e-6f,
};

static const struct model_config small_qk = {
    .vocab = 11, .dim = 20, .layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 6, .ffn = 14,
    .max_len = 16, .rope_theta = 1000, .norm_eps = 1e-5f, .qk_norm = true,
};

enum { MAX_T = 64 };
static const int32_t tokens[] = { 1, 4, 2, 6, 3, 5, 0, 2, 2, 6, 1, 3, 4, 4 };
static const uint32_t starts[] = { 0, 6, 7, 14 };
static const struct model_batch batch = { tokens, starts, 3 };
static const struct model_target targets[] = {
    { 0, 4 }, { 2, 6 }, { 4, 5 }, { 6, 3 }, { 9, 1 }, { 12, 4 }, { 12, 0 },
};
enum { N_TARGETS = sizeof(targets) / sizeof(*targets) };

struct rig {
    struct model_layout *l;
    struct model_acts *acts;
    float *w, *g, **wp, **gp;
};

static void rig_up(struct rig *r, const struct model_config *c)
{
    struct fl_err err;

    t_ok(model_layout_create(c, &r->l, &err), &err);
    t_ok(model_acts_create(r->l, &r->acts, &err), &err);
    r->w = aligned_alloc(64, r->l->floats * sizeof(float));
    r->g = aligned_alloc(64, r->l->floats * sizeof(float));
    r->wp = calloc(r->l->n, sizeof(*r->wp));
    r->gp = calloc(r->l->n, sizeof(*r->gp));
    model_point(r->l, r->w, r->wp);
    model_point(r->l, r->g, r->gp);
    model_init(r->l, r->w, 5);
    for (uint32_t i = 0; i < r->l->n; i++) /* norms away from one, a head with something to say */
        for (size_t j = 0; j < r->l->tensors[i].count; j++)
            r->wp[i][j] = r->l->tensors[i].ndim == 1 ? 0.7f + 0.05f * (float)(j % 9) :
                          i == model_head_at(c)      ? r->wp[i][j] * 8 :
                                                       r->wp[i][j];
    memset(r->g, 0, r->l->floats * sizeof(float));
}

static void rig_down(struct rig *r)
{
    free(r->gp);
    free(r->wp);
    free(r->g);
    free(r->w);
    model_acts_destroy(r->acts);
    model_layout_destroy(r->l);
}

static const float d_logp[N_TARGETS] = { 0.9f, -1.1f, 0.4f, 1.3f, -0.6f, 0.8f, 0.5f };
static const float d_entropy[N_TARGETS] = { 0.3f, 0.2f, -0.4f, 0.1f, 0.5f, -0.2f, 0.3f };

static double loss_at(struct rig *r)
{
    float logp[N_TARGETS], entropy[N_TARGETS];
    struct fl_err err;
    double loss = 0;

    t_ok(model_score(r->acts, r->wp, &batch, targets, N_TARGETS, 1.3f, logp, entropy, &err), &err);
    for (int i = 0; i < N_TARGETS; i++)
        loss += (double)d_logp[i] * (double)logp[i] + (double)d_entropy[i] * (double)entropy[i];
    return loss;
}

/* Central difference along one direction of a tensor, so that fp32 noise of single entries averages
 * out. The direction leans on the gradient, which makes the slope large against noise, and adds
 * something random to each entry, so that one that is wrongly zero shows too. */
static void check_tensor(struct rig *r, uint32_t i, uint32_t direction)
{
    const struct model_tensor *t = &r->l->tensors[i];
    float *dir = malloc(t->count * sizeof(float)), *kept = malloc(t->count * sizeof(float));
    double slope = 0, size = 0, norm = 0, step;

    rng_fill(dir, t->count, 1, 99 + direction, i);
    memcpy(kept, r->wp[i], t->count * sizeof(float));
    for (size_t j = 0; j < t->count; j++)
        norm += (double)r->gp[i][j] * (double)r->gp[i][j] / (double)t->count;
    for (size_t j = 0; j < t->count; j++)
        dir[j] = dir[j] * (float)sqrt(norm) + r->gp[i][j];
    for (size_t j = 0; j < t->count; j++) {
        slope += (double)dir[j] * (double)r->gp[i][j];
        size += (double)dir[j] * (double)dir[j];
    }
    step = 3e-2 / sqrt(size);
    double at[4];
    static const double k[4] = { -2, -1, 1, 2 };

    for (int x = 0; x < 4; x++) {
        for (size_t j = 0; j < t->count; j++)
            r->wp[i][j] = (float)((double)kept[j] + k[x] * step * (double)dir[j]);
        at[x] = loss_at(r);
    }
    memcpy(r->wp[i], kept, t->count * sizeof(float));
    double found = (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * step);

    t_true(fabs(found - slope) <= 1e-3 * fmax(fabs(slope), fabs(found)),
           "%s direction %u: gradient %g, by differences %g", t->name, direction, slope, found);
    t_true(fabs(slope) > 1e-3, "%s direction %u: nothing to see", t->name, direction);
    free(kept);
    free(dir);
}

static void gradients(void **state)
{
    static const struct model_config *const kinds[] = { &small, &small_tied, &small_qk };

    (void)state;
    for (int k = 0; k < 3; k++) {
        struct rig r;

        rig_up(&r, kinds[k]);
        (void)loss_at(&r);
        model_back(r.acts, r.wp, d_logp, d_entropy, r.gp);
        for (uint32_t i = 0; i < r.l->n; i++)
            for (uint32_t direction = 0; direction < 3; direction++)
                check_tensor(&r, i, direction);
        rig_down(&r);
    }
}

static void gradients_add_up(void **state)
{
    struct rig r;
    (void)state;
    rig_up(&r, &small);
    (void)loss_at(&r);
    model_back(r.acts, r.wp, d_logp, NULL, r.gp);
    float once = r.gp[model_at(1, PART_UP)][5];
    (void)loss_at(&r);
    model_back(r.acts, r.wp, d_logp, NULL, r.gp);
    t_true(once != 0 && r.gp[model_at(1, PART_UP)][5] == 2 * once);
    rig_down(&r);
}

/* Token by token with a cache, mixed with rows of other sequences, against whole sequences. */
static void decode_one(const struct model_config *config)
{
    struct rig r;
    struct model_cache *c;
    struct fl_err err;
    float inv_temp[3] = { 1.3f, 1.3f, 1.3f }, logp[N_TARGETS];
    static float out[MODEL_ROWS * 11], by_row[sizeof(tokens) / sizeof(*tokens)][11];

    rig_up(&r, config);
    t_ok(model_cache_create(r.l, 3, 16, &c, &err), &err);
    t_ok(model_score(r.acts, r.wp, &batch, targets, N_TARGETS, 1.3f, logp, NULL, &err), &err);
    for (uint32_t step = 0; step < 7; step++) { /* first four tokens of a sequence at once, then one */
        struct model_row rows[16];
        uint32_t n = 0, from[16];

        for (uint32_t s = 0; s < 3; s++) {
            uint32_t len = starts[s + 1] - starts[s], lo = step ? step + 3 : 0,
                     hi = step ? step + 4 : 4;

            for (uint32_t p = lo; p < hi && p < len; p++) {
                from[n] = starts[s] + p;
                rows[n++] = (struct model_row){ s, p, tokens[starts[s] + p], true };
            }
        }
        if (n)
            model_decode(c, r.wp, rows, n, inv_temp, out);
        for (uint32_t i = 0; i < n; i++)
            memcpy(by_row[from[i]], out + i * 11, sizeof(by_row[0]));
    }
    for (int i = 0; i < N_TARGETS; i++)
        t_true(fabsf(by_row[targets[i].row][targets[i].token] - logp[i]) <= 1e-5f,
               "target %d: %g by cache, %g at once", i,
               (double)by_row[targets[i].row][targets[i].token], (double)logp[i]);
    model_cache_destroy(c);
    rig_down(&r);
}

static void cache_agrees(void **state)
{
    (void)state;
    decode_one(&small);
    decode_one(&small_qk);
}

static void cache_copies(void **state)
{
    struct rig r;
    struct model_cache *c;
    struct fl_err err;
    float inv_temp[2] = { 1, 1 }, out[2 * 11];
    struct model_row prompt[] = { { 0, 0, 1, false }, { 0, 1, 4, false }, { 0, 2, 2, true } };
    struct model_row both[] = { { 0, 3, 6, true }, { 1, 3, 6, true } };

    (void)state;
    rig_up(&r, &small);
    t_ok(model_cache_create(r.l, 2, 16, &c, &err), &err);
    model_decode(c, r.wp, prompt, 3, inv_temp, out);
    model_cache_copy(c, 0, 1, 3);
    model_decode(c, r.wp, both, 2, inv_temp, out);
    t_mem_eq(out, out + 11, 11 * sizeof(float));
    t_true(model_cache_drop(c) >= 4096, "pages were touched");
    t_int_eq(model_cache_drop(c), 0, "twice");
    model_cache_back(c);
    model_decode(c, r.wp, prompt, 3, inv_temp, out);
    model_decode(c, r.wp, both, 1, inv_temp, out + 11);
    model_cache_destroy(c);
    rig_down(&r);
}

static void names_and_refusals(void **state)
{
    static const struct { const char *name; struct model_config c; const char *flag; } rows[] = {
        { "no vocabulary", { .vocab = 1, .dim = 8, .layers = 1, .heads = 1, .kv_heads = 1, .head_dim = 2, .ffn = 4, .max_len = 8, .rope_theta = 10, .norm_eps = 1 }, "vocabulary" },
        { "no width", { .vocab = 4, .layers = 1, .heads = 1, .kv_heads = 1, .head_dim = 2, .ffn = 4, .max_len = 8, .rope_theta = 10, .norm_eps = 1 }, "--hidden-size" },
        { "groups", { .vocab = 4, .dim = 8, .layers = 1, .heads = 3, .kv_heads = 2, .head_dim = 2, .ffn = 4, .max_len = 8, .rope_theta = 10, .norm_eps = 1 }, "--num-query-groups" },
        { "odd head", { .vocab = 4, .dim = 8, .layers = 1, .heads = 1, .kv_heads = 1, .head_dim = 3, .ffn = 4, .max_len = 8, .rope_theta = 10, .norm_eps = 1 }, "--kv-channels" },
    };
    struct rig r;
    struct fl_err err;
    struct model_layout *l = NULL;
    float logp[1];

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        t_refused(model_layout_create(&rows[i].c, &l, &err), FL_INVALID, &err);
        t_has(err.text, rows[i].flag);
    }
    rig_up(&r, &small);
    t_str_eq(r.l->tensors[0].name, "model.embed_tokens.weight");
    t_str_eq(r.l->tensors[model_at(1, PART_K)].name, "model.layers.1.self_attn.k_proj.weight");
    t_int_eq(r.l->tensors[model_at(1, PART_K)].shape[0], 12);
    t_str_eq(r.l->tensors[model_norm_at(&small)].name, "model.norm.weight");
    t_str_eq(r.l->tensors[model_head_at(&small)].name, "lm_head.weight");
    t_int_eq(r.l->n, model_head_at(&small) + 1);
    struct model_batch bad = { (int32_t[]){ 1, 99 }, (uint32_t[]){ 0, 2 }, 1 };
    struct model_target one = { 0, 1 };
    t_refused(model_score(r.acts, r.wp, &bad, &one, 1, 1, logp, NULL, &err), FL_INVALID, &err);
    t_has(err.text, "99");
    rig_down(&r);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients),    cmocka_unit_test(gradients_add_up),
        cmocka_unit_test(cache_agrees), cmocka_unit_test(cache_copies),
        cmocka_unit_test(names_and_refusals),
    };

    return t_run("model", tests);
}
