#include "worker/roles/model.h"
#include "worker/roles/rng.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_VOCAB = 1 << 20, MAX_DIM = 1 << 14, MAX_LAYERS = 256, MAX_LEN = 1 << 20 };

static enum fl_status in_range(const char *flag, uint32_t v, uint32_t lo, uint32_t hi,
                               struct fl_err *err)
{
    if (v >= lo && v <= hi)
        return FL_OK;
    return fl_fail(err, FL_INVALID, "%s is %u: must be %u to %u", flag, v, lo, hi);
}

enum fl_status model_config_check(const struct model_config *c, struct fl_err *err)
{
    FL_TRY(in_range("vocabulary", c->vocab, 2, MAX_VOCAB, err));
    FL_TRY(in_range("--hidden-size", c->dim, 1, MAX_DIM, err));
    FL_TRY(in_range("--num-layers", c->layers, 1, MAX_LAYERS, err));
    FL_TRY(in_range("--num-attention-heads", c->heads, 1, MAX_DIM, err));
    FL_TRY(in_range("--num-query-groups", c->kv_heads, 1, c->heads, err));
    FL_TRY(in_range("--kv-channels", c->head_dim, 2, MAX_DIM, err));
    FL_TRY(in_range("--ffn-hidden-size", c->ffn, 1, MAX_DIM, err));
    FL_TRY(in_range("--max-position-embeddings", c->max_len, 2, MAX_LEN, err));
    if (c->heads % c->kv_heads)
        return fl_fail(err, FL_INVALID,
                       "--num-attention-heads %u is no multiple of --num-query-groups %u; give one "
                       "that divides it",
                       c->heads, c->kv_heads);
    if (c->head_dim % 2)
        return fl_fail(err, FL_INVALID, "--kv-channels %u is odd: rotary positions turn pairs",
                       c->head_dim);
    if (!(c->rope_theta >= 1) || !(c->norm_eps > 0))
        return fl_fail(err, FL_INVALID,
                       "--rotary-base %g must be at least 1, --norm-epsilon %g above 0",
                       (double)c->rope_theta, (double)c->norm_eps);
    return FL_OK;
}

static void tensor_add(struct model_layout *l, uint64_t rows, uint64_t cols, const char *name)
{
    struct model_tensor *t = &l->tensors[l->n++];

    t->ndim = cols ? 2 : 1;
    t->shape[0] = rows;
    t->shape[1] = cols;
    t->count = rows * (cols ? cols : 1);
    t->offset = l->floats;
    l->floats += (t->count + 15) & ~(size_t)15;
    snprintf(t->name, sizeof(t->name), "%s", name);
}

static void layer_add(struct model_layout *l, uint32_t layer)
{
    const struct model_config *c = &l->cfg;
    uint64_t q = (uint64_t)c->heads * c->head_dim, kv = (uint64_t)c->kv_heads * c->head_dim;
    const struct {
        const char *name;
        uint64_t rows, cols;
    } parts[PARTS] = {
        [PART_NORM1] = { "input_layernorm", c->dim, 0 },
        [PART_Q] = { "self_attn.q_proj", q, c->dim },
        [PART_K] = { "self_attn.k_proj", kv, c->dim },
        [PART_V] = { "self_attn.v_proj", kv, c->dim },
        [PART_O] = { "self_attn.o_proj", c->dim, q },
        [PART_NORM2] = { "post_attention_layernorm", c->dim, 0 },
        [PART_GATE] = { "mlp.gate_proj", c->ffn, c->dim },
        [PART_UP] = { "mlp.up_proj", c->ffn, c->dim },
        [PART_DOWN] = { "mlp.down_proj", c->dim, c->ffn },
    };

    for (int p = 0; p < PARTS; p++) {
        char name[56];

        snprintf(name, sizeof(name), "model.layers.%u.%s.weight", layer, parts[p].name);
        tensor_add(l, parts[p].rows, parts[p].cols, name);
    }
}

static void qk_norms_add(struct model_layout *l, uint32_t layer)
{
    for (int k = 0; k < 2; k++) {
        char name[56];

        snprintf(name, sizeof(name), "model.layers.%u.self_attn.%c_norm.weight", layer, "qk"[k]);
        tensor_add(l, l->cfg.head_dim, 0, name);
    }
}

/* In double, then rounded: the table is the same on every machine. */
static void rope_fill(struct model_layout *l)
{
    uint32_t half = l->cfg.head_dim / 2;

    for (uint32_t pos = 0; pos < l->cfg.max_len; pos++)
        for (uint32_t i = 0; i < half; i++) {
            double angle = pos * pow((double)l->cfg.rope_theta, -2.0 * i / l->cfg.head_dim);
            float *at = l->rope + (size_t)pos * l->cfg.head_dim;

            at[i] = (float)cos(angle);
            at[half + i] = (float)sin(angle);
        }
}

enum fl_status model_layout_create(const struct model_config *c, struct model_layout **out,
                                   struct fl_err *err)
{
    FL_TRY(model_config_check(c, err));
    FL_AUTO(model_layout) struct model_layout *l = calloc(1, sizeof(*l));
    uint32_t n = model_qnorm_at(c, c->qk_norm ? c->layers : 0);

    if (l) {
        l->cfg = *c;
        l->tensors = calloc(n, sizeof(*l->tensors));
        l->rope = calloc((size_t)c->max_len * c->head_dim, sizeof(*l->rope));
    }
    if (!l || !l->tensors || !l->rope)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the layout of %u layers", c->layers);
    tensor_add(l, c->vocab, c->dim, "model.embed_tokens.weight");
    for (uint32_t i = 0; i < c->layers; i++)
        layer_add(l, i);
    tensor_add(l, c->dim, 0, "model.norm.weight");
    if (!c->tied)
        tensor_add(l, c->vocab, c->dim, "lm_head.weight");
    for (uint32_t i = 0; c->qk_norm && i < c->layers; i++)
        qk_norms_add(l, i);
    rope_fill(l);
    *out = FL_TAKE(l);
    return FL_OK;
}

void model_layout_destroy(struct model_layout *l)
{
    if (!l)
        return;
    free(l->tensors);
    free(l->rope);
    free(l);
}

void model_point(const struct model_layout *l, float *base, float **w)
{
    for (uint32_t i = 0; i < l->n; i++)
        w[i] = base + l->tensors[i].offset;
}

void model_init(const struct model_layout *l, float *base, uint64_t seed)
{
    const struct model_config *c = &l->cfg;

    memset(base, 0, l->floats * sizeof(*base));
    for (uint32_t i = 0; i < l->n; i++) {
        const struct model_tensor *t = &l->tensors[i];
        float *w = base + t->offset, bound;

        if (t->ndim == 1) {
            for (size_t j = 0; j < t->count; j++)
                w[j] = 1;
            continue;
        }
        bound = sqrtf(3.f / (float)t->shape[1]);
        if (i == 0)
            bound = c->tied ? 0.1f * bound : 1.f;
        else if (i == model_head_at(c))
            bound *= 0.1f;
        rng_fill(w, t->count, bound, seed, i);
    }
}
