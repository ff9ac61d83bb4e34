/* Some rows of many sequences at once, against a cache of keys and values. The same kernels in the
 * same order as model_train.c: a row's numbers do not depend on which rows go with it. */
#include "worker/roles/mat.h"
#include "worker/roles/model.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct model_cache {
    const struct model_layout *l;
    const struct mat_ops *mat;
    uint32_t slots, len;
    float *kv; /* [layer][key, value][slot][pos][kv_heads * head_dim] */
    size_t kv_bytes;
    bool away;
    float *scratch;
    float *x, *n, *q, *k, *v, *o, *gate, *up, *act, *inv, *lse, *p;
};

static size_t scratch_lay(struct model_cache *s, float *base)
{
    const struct model_config *c = &s->l->cfg;
    size_t q = (size_t)c->heads * c->head_dim, kv = (size_t)c->kv_heads * c->head_dim, used = 0;
    const struct {
        float **at;
        size_t each;
    } parts[] = {
        { &s->x, c->dim },   { &s->n, c->dim },     { &s->q, q },          { &s->k, kv },
        { &s->v, kv },       { &s->o, q },          { &s->gate, c->ffn },  { &s->up, c->ffn },
        { &s->act, c->ffn }, { &s->inv, c->heads }, { &s->lse, c->heads },
    };

    for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++) {
        *parts[i].at = base ? base + used : NULL;
        used += parts[i].each * MODEL_ROWS;
    }
    s->p = base ? base + used : NULL;
    return used + s->len;
}

enum fl_status model_cache_create(const struct model_layout *l, uint32_t slots, uint32_t len,
                                  struct model_cache **out, struct fl_err *err)
{
    FL_AUTO(model_cache) struct model_cache *c = calloc(1, sizeof(*c));

    if (!c)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a cache");
    c->l = l;
    c->mat = mat_pick();
    c->slots = slots;
    c->len = len;
    c->kv = MAP_FAILED;
    c->kv_bytes =
        (size_t)l->cfg.layers * 2 * slots * len * l->cfg.kv_heads * l->cfg.head_dim * sizeof(float);
    c->scratch = calloc(scratch_lay(c, NULL), sizeof(float));
    c->kv = mmap(NULL, c->kv_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!c->scratch || c->kv == MAP_FAILED)
        return fl_fail(err, FL_EXHAUSTED,
                       "no memory for a cache of %u sequences of %u tokens (%zu MiB)", slots, len,
                       c->kv_bytes >> 20);
    scratch_lay(c, c->scratch);
    *out = FL_TAKE(c);
    return FL_OK;
}

void model_cache_destroy(struct model_cache *c)
{
    if (!c)
        return;
    if (c->kv != MAP_FAILED)
        (void)munmap(c->kv, c->kv_bytes); /* ours, whole: cannot fail */
    free(c->scratch);
    free(c);
}

/* Pages that were ever touched. */
static size_t resident(const struct model_cache *c)
{
    enum { WINDOW = 4096 }; /* pages looked at in one call */
    unsigned char held[WINDOW];
    size_t page = (size_t)sysconf(_SC_PAGESIZE), n = 0;

    for (size_t at = 0; at < c->kv_bytes; at += WINDOW * page) {
        size_t len = c->kv_bytes - at < WINDOW * page ? c->kv_bytes - at : WINDOW * page;

        if (mincore((char *)c->kv + at, len, held))
            return 0;
        for (size_t i = 0; i < (len + page - 1) / page; i++)
            n += held[i] & 1;
    }
    return n * page;
}

size_t model_cache_drop(struct model_cache *c)
{
    size_t had = c->away ? 0 : resident(c);

    if (c->away || madvise(c->kv, c->kv_bytes, MADV_DONTNEED))
        return 0;
    c->away = true;
    return had;
}

void model_cache_back(struct model_cache *c)
{
    c->away = false;
}

static float *cache_at(const struct model_cache *c, uint32_t layer, int value, uint32_t slot)
{
    size_t kv = (size_t)c->l->cfg.kv_heads * c->l->cfg.head_dim;

    return c->kv + (((size_t)layer * 2 + (size_t)value) * c->slots + slot) * c->len * kv;
}

void model_cache_copy(struct model_cache *c, uint32_t from, uint32_t to, uint32_t len)
{
    size_t bytes = (size_t)len * c->l->cfg.kv_heads * c->l->cfg.head_dim * sizeof(float);

    for (uint32_t i = 0; i < c->l->cfg.layers; i++)
        for (int value = 0; value < 2; value++)
            memcpy(cache_at(c, i, value, to), cache_at(c, i, value, from), bytes);
}

static void heads_decode(struct model_cache *s, uint32_t layer, const struct model_row *rows,
                         uint32_t n)
{
    const struct model_config *c = &s->l->cfg;
    size_t hd = c->head_dim, q = c->heads * hd, kv = c->kv_heads * hd;
    uint32_t group = c->heads / c->kv_heads;
    float scale = 1.f / __builtin_sqrtf((float)hd);

    for (uint32_t r = 0; r < n; r++) {
        const float *cs = s->l->rope + (size_t)rows[r].pos * hd;
        float *keys = cache_at(s, layer, 0, rows[r].slot);
        float *values = cache_at(s, layer, 1, rows[r].slot);

        s->mat->rope(s->q + r * q, c->heads, hd / 2, cs, false);
        s->mat->rope(s->k + r * kv, c->kv_heads, hd / 2, cs, false);
        memcpy(keys + rows[r].pos * kv, s->k + r * kv, kv * sizeof(float));
        memcpy(values + rows[r].pos * kv, s->v + r * kv, kv * sizeof(float));
        for (uint32_t h = 0; h < c->heads; h++)
            s->mat->attend(s->o + r * q + h * hd, s->lse + r * c->heads + h, s->q + r * q + h * hd,
                           keys + h / group * hd, values + h / group * hd, kv, rows[r].pos + 1, hd,
                           scale, s->p);
    }
}

static void layer_decode(struct model_cache *s, float *const *w, uint32_t i,
                         const struct model_row *rows, uint32_t n)
{
    const struct model_config *c = &s->l->cfg;
    const struct mat_ops *mat = s->mat;
    size_t q = (size_t)c->heads * c->head_dim, kv = (size_t)c->kv_heads * c->head_dim;

    mat->norm(s->n, s->inv, s->x, w[model_at(i, PART_NORM1)], n, c->dim, c->norm_eps);
    mat->nt(s->q, s->n, w[model_at(i, PART_Q)], n, c->dim, q);
    mat->nt(s->k, s->n, w[model_at(i, PART_K)], n, c->dim, kv);
    mat->nt(s->v, s->n, w[model_at(i, PART_V)], n, c->dim, kv);
    if (c->qk_norm) { /* in place: a row's norm is known before the row is written */
        uint32_t at = model_qnorm_at(c, i);

        mat->norm(s->q, s->inv, s->q, w[at], (size_t)n * c->heads, c->head_dim, c->norm_eps);
        mat->norm(s->k, s->inv, s->k, w[at + 1], (size_t)n * c->kv_heads, c->head_dim, c->norm_eps);
    }
    heads_decode(s, i, rows, n);
    mat->nt(s->n, s->o, w[model_at(i, PART_O)], n, q, c->dim);
    mat->add(s->x, s->n, (size_t)n * c->dim);
    mat->norm(s->n, s->inv, s->x, w[model_at(i, PART_NORM2)], n, c->dim, c->norm_eps);
    mat->nt(s->gate, s->n, w[model_at(i, PART_GATE)], n, c->dim, c->ffn);
    mat->nt(s->up, s->n, w[model_at(i, PART_UP)], n, c->dim, c->ffn);
    mat->swiglu(s->act, s->gate, s->up, (size_t)n * c->ffn);
    mat->nt(s->n, s->act, w[model_at(i, PART_DOWN)], n, c->ffn, c->dim);
    mat->add(s->x, s->n, (size_t)n * c->dim);
}

void model_decode(struct model_cache *s, float *const *w, const struct model_row *rows, uint32_t n,
                  const float *inv_temp, float *logp)
{
    const struct model_config *c = &s->l->cfg;
    uint32_t wanted = 0;

    for (uint32_t r = 0; r < n; r++)
        memcpy(s->x + (size_t)r * c->dim, w[0] + (size_t)rows[r].token * c->dim,
               c->dim * sizeof(float));
    for (uint32_t i = 0; i < c->layers; i++)
        layer_decode(s, w, i, rows, n);
    for (uint32_t r = 0; r < n; r++)
        if (rows[r].wanted)
            memmove(s->x + (size_t)wanted++ * c->dim, s->x + (size_t)r * c->dim,
                    c->dim * sizeof(float));
    s->mat->norm(s->n, s->inv, s->x, w[model_norm_at(c)], wanted, c->dim, c->norm_eps);
    s->mat->nt(logp, s->n, w[model_head_at(c)], wanted, c->dim, c->vocab);
    for (uint32_t r = 0; r < n; r++)
        if (rows[r].wanted) {
            s->mat->log_softmax(logp, c->vocab, inv_temp[rows[r].slot]);
            logp += c->vocab;
        }
}
