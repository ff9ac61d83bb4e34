/* Forward and backward over whole sequences. Names: x residual stream, n normed, r 1/rms. */
#include "worker/roles/mat.h"
#include "worker/roles/model.h"

#include <stdlib.h>
#include <string.h>

struct layer_acts {
    float *x, *r1, *n1, *q, *k, *v, *lse, *o; /* o: heads' outputs, before o_proj */
    float *mid, *r2, *n2, *gate, *up, *act;
    float *q0, *k0, *rq, *rk; /* qk_norm: as they came from their layers, 1/rms of each head */
};
struct model_acts {
    const struct model_layout *l;
    const struct mat_ops *mat;
    struct layer_acts *layers;
    float *x_end, *r_end, *n_end;    /* after the last layer                */
    float *picked, *logp, *d_picked; /* rows of the targets                 */
    float *dx, *dn, *dq, *dk, *dv, *d_ffn1, *d_ffn2, *d_act, *d_o, *p, *dp, *prob;
    float *dq0, *dk0; /* qk_norm */
    char *memory;
    size_t memory_bytes, rows_room, targets_room, len_room;
    /* of the last model_score */
    struct model_batch batch;
    const struct model_target *targets;
    uint32_t rows, n_targets;
    float inv_temp;
};

enum fl_status model_acts_create(const struct model_layout *l, struct model_acts **out,
                                 struct fl_err *err)
{
    FL_AUTO(model_acts) struct model_acts *a = calloc(1, sizeof(*a));

    if (a)
        a->layers = calloc(l->cfg.layers, sizeof(*a->layers));
    if (!a || !a->layers)
        return fl_fail(err, FL_EXHAUSTED, "no memory for activations");
    a->l = l;
    a->mat = mat_pick();
    *out = FL_TAKE(a);
    return FL_OK;
}

void model_acts_destroy(struct model_acts *a)
{
    if (!a)
        return;
    free(a->memory);
    free(a->layers);
    free(a);
}

size_t model_acts_drop(struct model_acts *a)
{
    size_t had = a->memory_bytes;

    free(a->memory);
    a->memory = NULL;
    a->memory_bytes = a->rows_room = a->targets_room = a->len_room = 0;
    return had;
}

/* Hands out pieces; with base NULL it only counts. */
struct carver {
    char *base;
    size_t used;
};

static float *carve(struct carver *c, size_t floats)
{
    float *at = c->base ? (float *)(c->base + c->used) : NULL;

    c->used += (floats * sizeof(float) + 63) & ~(size_t)63;
    return at;
}

static size_t acts_lay(struct model_acts *a, char *base, size_t rows, size_t targets, size_t len)
{
    const struct model_config *c = &a->l->cfg;
    struct carver m = { base, 0 };
    size_t q = (size_t)c->heads * c->head_dim, kv = (size_t)c->kv_heads * c->head_dim;

    for (uint32_t i = 0; i < c->layers; i++) {
        struct layer_acts *y = &a->layers[i];

        y->x = carve(&m, rows * c->dim);
        y->r1 = carve(&m, rows);
        y->n1 = carve(&m, rows * c->dim);
        y->q = carve(&m, rows * q);
        y->k = carve(&m, rows * kv);
        y->v = carve(&m, rows * kv);
        y->lse = carve(&m, rows * c->heads);
        y->o = carve(&m, rows * q);
        y->mid = carve(&m, rows * c->dim);
        y->r2 = carve(&m, rows);
        y->n2 = carve(&m, rows * c->dim);
        y->gate = carve(&m, rows * c->ffn);
        y->up = carve(&m, rows * c->ffn);
        y->act = carve(&m, rows * c->ffn);
        y->q0 = carve(&m, c->qk_norm ? rows * q : 0);
        y->k0 = carve(&m, c->qk_norm ? rows * kv : 0);
        y->rq = carve(&m, c->qk_norm ? rows * c->heads : 0);
        y->rk = carve(&m, c->qk_norm ? rows * c->kv_heads : 0);
    }
    a->x_end = carve(&m, rows * c->dim);
    a->r_end = carve(&m, rows);
    a->n_end = carve(&m, rows * c->dim);
    a->picked = carve(&m, targets * c->dim);
    a->d_picked = carve(&m, targets * c->dim);
    a->logp = carve(&m, targets * c->vocab);
    a->dx = carve(&m, rows * c->dim);
    a->dn = carve(&m, rows * c->dim);
    a->dq = carve(&m, rows * q);
    a->d_o = carve(&m, rows * q);
    a->dk = carve(&m, rows * kv);
    a->dv = carve(&m, rows * kv);
    a->dq0 = carve(&m, c->qk_norm ? rows * q : 0);
    a->dk0 = carve(&m, c->qk_norm ? rows * kv : 0);
    a->d_ffn1 = carve(&m, rows * c->ffn);
    a->d_ffn2 = carve(&m, rows * c->ffn);
    a->d_act = carve(&m, rows * c->ffn);
    a->p = carve(&m, len);
    a->dp = carve(&m, len);
    a->prob = carve(&m, c->vocab);
    return m.used;
}

static enum fl_status acts_room(struct model_acts *a, size_t rows, size_t targets, size_t len,
                                struct fl_err *err)
{
    if (rows <= a->rows_room && targets <= a->targets_room && len <= a->len_room)
        return FL_OK;
    rows = rows > a->rows_room ? rows : a->rows_room;
    targets = targets > a->targets_room ? targets : a->targets_room;
    len = len > a->len_room ? len : a->len_room;
    model_acts_drop(a);
    size_t need = acts_lay(a, NULL, rows, targets, len);
    a->memory = aligned_alloc(64, need);
    if (!a->memory)
        return fl_fail(err, FL_EXHAUSTED, "no memory for activations of %zu tokens (%zu MiB)", rows,
                       need >> 20);
    a->memory_bytes = need;
    acts_lay(a, a->memory, rows, targets, len);
    a->rows_room = rows;
    a->targets_room = targets;
    a->len_room = len;
    return FL_OK;
}

static enum fl_status batch_check(const struct model_layout *l, const struct model_batch *b,
                                  const struct model_target *t, uint32_t n_targets,
                                  uint32_t *longest, struct fl_err *err)
{
    uint32_t rows = b->starts[b->n_seqs];

    for (uint32_t s = 0; s < b->n_seqs; s++) {
        uint32_t len = b->starts[s + 1] - b->starts[s];

        if (b->starts[s + 1] < b->starts[s] || len > l->cfg.max_len)
            return fl_fail(err, FL_INVALID, "sequence %u has %u tokens, the model takes %u", s, len,
                           l->cfg.max_len);
        *longest = len > *longest ? len : *longest;
    }
    for (uint32_t i = 0; i < rows; i++)
        if (b->tokens[i] < 0 || (uint32_t)b->tokens[i] >= l->cfg.vocab)
            return fl_fail(err, FL_INVALID, "token %d at %u: the vocabulary has %u", b->tokens[i],
                           i, l->cfg.vocab);
    for (uint32_t i = 0; i < n_targets; i++)
        if (t[i].row >= rows || t[i].token < 0 || (uint32_t)t[i].token >= l->cfg.vocab)
            return fl_fail(err, FL_INVALID, "target %u is token %d after row %u of %u", i,
                           t[i].token, t[i].row, rows);
    return FL_OK;
}

static void heads_forward(struct model_acts *a, struct layer_acts *y)
{
    const struct model_config *c = &a->l->cfg;
    size_t hd = c->head_dim, q = c->heads * hd, kv = c->kv_heads * hd;
    uint32_t group = c->heads / c->kv_heads;
    float scale = 1.f / __builtin_sqrtf((float)hd);

    for (uint32_t s = 0; s < a->batch.n_seqs; s++) {
        size_t first = a->batch.starts[s];

        for (size_t row = first; row < a->batch.starts[s + 1]; row++) {
            const float *cs = a->l->rope + (row - first) * hd;

            a->mat->rope(y->q + row * q, c->heads, hd / 2, cs, false);
            a->mat->rope(y->k + row * kv, c->kv_heads, hd / 2, cs, false);
            for (uint32_t h = 0; h < c->heads; h++)
                a->mat->attend(y->o + row * q + h * hd, y->lse + row * c->heads + h,
                               y->q + row * q + h * hd, y->k + first * kv + h / group * hd,
                               y->v + first * kv + h / group * hd, kv, row - first + 1, hd, scale,
                               a->p);
        }
    }
}

static void qk_forward(struct model_acts *a, struct layer_acts *y, float *const *w, uint32_t i)
{
    const struct model_config *c = &a->l->cfg;
    uint32_t at = model_qnorm_at(c, i);
    size_t n = a->rows;

    memcpy(y->q0, y->q, n * c->heads * c->head_dim * sizeof(float));
    memcpy(y->k0, y->k, n * c->kv_heads * c->head_dim * sizeof(float));
    a->mat->norm(y->q, y->rq, y->q0, w[at], n * c->heads, c->head_dim, c->norm_eps);
    a->mat->norm(y->k, y->rk, y->k0, w[at + 1], n * c->kv_heads, c->head_dim, c->norm_eps);
}

static void layer_forward(struct model_acts *a, float *const *w, uint32_t i, float *x_next)
{
    const struct model_config *c = &a->l->cfg;
    const struct mat_ops *mat = a->mat;
    struct layer_acts *y = &a->layers[i];
    size_t n = a->rows, q = (size_t)c->heads * c->head_dim, kv = (size_t)c->kv_heads * c->head_dim;

    mat->norm(y->n1, y->r1, y->x, w[model_at(i, PART_NORM1)], n, c->dim, c->norm_eps);
    mat->nt(y->q, y->n1, w[model_at(i, PART_Q)], n, c->dim, q);
    mat->nt(y->k, y->n1, w[model_at(i, PART_K)], n, c->dim, kv);
    mat->nt(y->v, y->n1, w[model_at(i, PART_V)], n, c->dim, kv);
    if (c->qk_norm)
        qk_forward(a, y, w, i);
    heads_forward(a, y);
    mat->nt(y->mid, y->o, w[model_at(i, PART_O)], n, q, c->dim);
    mat->add(y->mid, y->x, n * c->dim);
    mat->norm(y->n2, y->r2, y->mid, w[model_at(i, PART_NORM2)], n, c->dim, c->norm_eps);
    mat->nt(y->gate, y->n2, w[model_at(i, PART_GATE)], n, c->dim, c->ffn);
    mat->nt(y->up, y->n2, w[model_at(i, PART_UP)], n, c->dim, c->ffn);
    mat->swiglu(y->act, y->gate, y->up, n * c->ffn);
    mat->nt(x_next, y->act, w[model_at(i, PART_DOWN)], n, c->ffn, c->dim);
    mat->add(x_next, y->mid, n * c->dim);
}

static void head_forward(struct model_acts *a, float *const *w)
{
    const struct model_config *c = &a->l->cfg;

    a->mat->norm(a->n_end, a->r_end, a->x_end, w[model_norm_at(c)], a->rows, c->dim, c->norm_eps);
    for (uint32_t i = 0; i < a->n_targets; i++)
        memcpy(a->picked + (size_t)i * c->dim, a->n_end + (size_t)a->targets[i].row * c->dim,
               c->dim * sizeof(float));
    a->mat->nt(a->logp, a->picked, w[model_head_at(c)], a->n_targets, c->dim, c->vocab);
    for (uint32_t i = 0; i < a->n_targets; i++)
        a->mat->log_softmax(a->logp + (size_t)i * c->vocab, c->vocab, a->inv_temp);
}

/* Leaves the row's probabilities in a->prob. */
static float entropy_of(struct model_acts *a, const float *logp)
{
    double h = 0;

    a->mat->exp(a->prob, logp, a->l->cfg.vocab);
    for (uint32_t i = 0; i < a->l->cfg.vocab; i++)
        h -= (double)a->prob[i] * (double)logp[i];
    return (float)h;
}

enum fl_status model_score(struct model_acts *a, float *const *w, const struct model_batch *b,
                           const struct model_target *t, uint32_t n_targets, float inv_temp,
                           float *logp, float *entropy, struct fl_err *err)
{
    const struct model_config *c = &a->l->cfg;
    uint32_t longest = 0;

    FL_TRY(batch_check(a->l, b, t, n_targets, &longest, err));
    a->rows = b->starts[b->n_seqs];
    FL_TRY(acts_room(a, a->rows, n_targets, longest, err));
    a->batch = *b;
    a->targets = t;
    a->n_targets = n_targets;
    a->inv_temp = inv_temp;
    for (uint32_t r = 0; r < a->rows; r++)
        memcpy(a->layers[0].x + (size_t)r * c->dim, w[0] + (size_t)b->tokens[r] * c->dim,
               c->dim * sizeof(float));
    for (uint32_t i = 0; i < c->layers; i++)
        layer_forward(a, w, i, i + 1 < c->layers ? a->layers[i + 1].x : a->x_end);
    head_forward(a, w);
    for (uint32_t i = 0; i < n_targets; i++) {
        const float *row = a->logp + (size_t)i * c->vocab;

        logp[i] = row[t[i].token];
        if (entropy)
            entropy[i] = entropy_of(a, row);
    }
    return FL_OK;
}

/* Log probabilities become derivatives by the logits, in place. */
static void logits_back(struct model_acts *a, const float *d_logp, const float *d_entropy)
{
    uint32_t vocab = a->l->cfg.vocab;

    for (uint32_t i = 0; i < a->n_targets; i++) {
        float *row = a->logp + (size_t)i * vocab;
        float dl = d_logp[i] * a->inv_temp, de = d_entropy ? d_entropy[i] * a->inv_temp : 0;
        float h = entropy_of(a, row);

        for (uint32_t t = 0; t < vocab; t++)
            row[t] = -a->prob[t] * (dl + de * (row[t] + h));
        row[a->targets[i].token] += dl;
    }
}

static void head_back(struct model_acts *a, float *const *w, float *const *g)
{
    const struct model_config *c = &a->l->cfg;
    uint32_t head = model_head_at(c);

    a->mat->nn(a->d_picked, a->logp, w[head], a->n_targets, c->vocab, c->dim, false);
    a->mat->tn(g[head], a->logp, a->picked, a->n_targets, c->vocab, c->dim);
    memset(a->dn, 0, (size_t)a->rows * c->dim * sizeof(float));
    for (uint32_t i = 0; i < a->n_targets; i++)
        a->mat->add(a->dn + (size_t)a->targets[i].row * c->dim, a->d_picked + (size_t)i * c->dim,
                    c->dim);
    memset(a->dx, 0, (size_t)a->rows * c->dim * sizeof(float));
    a->mat->norm_back(a->dx, g[model_norm_at(c)], a->dn, a->x_end, w[model_norm_at(c)], a->r_end,
                      a->rows, c->dim);
}

static void heads_back(struct model_acts *a, const struct layer_acts *y)
{
    const struct model_config *c = &a->l->cfg;
    size_t hd = c->head_dim, q = c->heads * hd, kv = c->kv_heads * hd;
    uint32_t group = c->heads / c->kv_heads;
    float scale = 1.f / __builtin_sqrtf((float)hd);

    memset(a->dq, 0, a->rows * q * sizeof(float));
    memset(a->dk, 0, a->rows * kv * sizeof(float));
    memset(a->dv, 0, a->rows * kv * sizeof(float));
    for (uint32_t s = 0; s < a->batch.n_seqs; s++) {
        size_t first = a->batch.starts[s], end = a->batch.starts[s + 1];

        for (size_t row = first; row < end; row++)
            for (uint32_t h = 0; h < c->heads; h++) {
                size_t at = row * q + h * hd, keys = first * kv + h / group * hd;

                a->mat->attend_back(a->dq + at, a->dk + keys, a->dv + keys, a->d_o + at,
                                    y->lse[row * c->heads + h], y->q + at, y->k + keys, y->v + keys,
                                    kv, row - first + 1, hd, scale, a->p, a->dp);
            }
        for (size_t row = first; row < end; row++) {
            const float *cs = a->l->rope + (row - first) * hd;

            a->mat->rope(a->dq + row * q, c->heads, hd / 2, cs, true);
            a->mat->rope(a->dk + row * kv, c->kv_heads, hd / 2, cs, true);
        }
    }
}

/* From derivatives by the normed queries and keys to those by what the layers gave. */
static void qk_back(struct model_acts *a, const struct layer_acts *y, float *const *w, uint32_t i,
                    float *const *g)
{
    const struct model_config *c = &a->l->cfg;
    uint32_t at = model_qnorm_at(c, i);
    size_t nq = (size_t)a->rows * c->heads, nk = (size_t)a->rows * c->kv_heads;

    memset(a->dq0, 0, nq * c->head_dim * sizeof(float));
    memset(a->dk0, 0, nk * c->head_dim * sizeof(float));
    a->mat->norm_back(a->dq0, g[at], a->dq, y->q0, w[at], y->rq, nq, c->head_dim);
    a->mat->norm_back(a->dk0, g[at + 1], a->dk, y->k0, w[at + 1], y->rk, nk, c->head_dim);
}

static void mlp_back(struct model_acts *a, float *const *w, uint32_t i, float *const *g)
{
    const struct model_config *c = &a->l->cfg;
    const struct mat_ops *mat = a->mat;
    struct layer_acts *y = &a->layers[i];
    size_t n = a->rows;

    mat->nn(a->d_act, a->dx, w[model_at(i, PART_DOWN)], n, c->dim, c->ffn, false);
    mat->tn(g[model_at(i, PART_DOWN)], a->dx, y->act, n, c->dim, c->ffn);
    mat->swiglu_back(a->d_ffn1, a->d_ffn2, a->d_act, y->gate, y->up, n * c->ffn);
    mat->nn(a->dn, a->d_ffn1, w[model_at(i, PART_GATE)], n, c->ffn, c->dim, false);
    mat->nn(a->dn, a->d_ffn2, w[model_at(i, PART_UP)], n, c->ffn, c->dim, true);
    mat->tn(g[model_at(i, PART_GATE)], a->d_ffn1, y->n2, n, c->ffn, c->dim);
    mat->tn(g[model_at(i, PART_UP)], a->d_ffn2, y->n2, n, c->ffn, c->dim);
    mat->norm_back(a->dx, g[model_at(i, PART_NORM2)], a->dn, y->mid, w[model_at(i, PART_NORM2)],
                   y->r2, n, c->dim);
}

static void attention_back(struct model_acts *a, float *const *w, uint32_t i, float *const *g)
{
    const struct model_config *c = &a->l->cfg;
    const struct mat_ops *mat = a->mat;
    struct layer_acts *y = &a->layers[i];
    size_t n = a->rows, q = (size_t)c->heads * c->head_dim, kv = (size_t)c->kv_heads * c->head_dim;
    const float *dq = c->qk_norm ? a->dq0 : a->dq, *dk = c->qk_norm ? a->dk0 : a->dk;

    mat->nn(a->d_o, a->dx, w[model_at(i, PART_O)], n, c->dim, q, false);
    mat->tn(g[model_at(i, PART_O)], a->dx, y->o, n, c->dim, q);
    heads_back(a, y);
    if (c->qk_norm)
        qk_back(a, y, w, i, g);
    mat->nn(a->dn, dq, w[model_at(i, PART_Q)], n, q, c->dim, false);
    mat->nn(a->dn, dk, w[model_at(i, PART_K)], n, kv, c->dim, true);
    mat->nn(a->dn, a->dv, w[model_at(i, PART_V)], n, kv, c->dim, true);
    mat->tn(g[model_at(i, PART_Q)], dq, y->n1, n, q, c->dim);
    mat->tn(g[model_at(i, PART_K)], dk, y->n1, n, kv, c->dim);
    mat->tn(g[model_at(i, PART_V)], a->dv, y->n1, n, kv, c->dim);
    mat->norm_back(a->dx, g[model_at(i, PART_NORM1)], a->dn, y->x, w[model_at(i, PART_NORM1)],
                   y->r1, n, c->dim);
}

void model_back(struct model_acts *a, float *const *w, const float *d_logp, const float *d_entropy,
                float *const *g)
{
    const struct model_config *c = &a->l->cfg;

    logits_back(a, d_logp, d_entropy);
    head_back(a, w, g);
    for (uint32_t i = c->layers; i-- > 0;) {
        mlp_back(a, w, i, g); /* dx goes on: the residual's share is in it already */
        attention_back(a, w, i, g);
    }
    for (uint32_t r = 0; r < a->rows; r++)
        a->mat->add(g[0] + (size_t)a->batch.tokens[r] * c->dim, a->dx + (size_t)r * c->dim, c->dim);
}
