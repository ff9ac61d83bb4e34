#include "worker/roles/learner.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "worker/roles/mat.h"

enum { SHARDS = 8, MAX_DEPTH = 12 };

struct scratch { /* of one thread */
    struct model_acts *acts;
    int32_t *tokens;
    uint32_t *starts;
    struct model_target *targets;
    float *old, *logp, *entropy, *d_logp, *d_entropy;
    uint32_t tokens_room, samples_room;
};
struct learner {
    const struct model_layout *l;
    const struct mat_ops *mat;
    struct learner_opts o;
    uint32_t shards, local; /* of a minibatch; of this rank */
    size_t sum_floats;      /* gradient and sums            */
    struct scratch *threads;
    float **buffers; /* one per leaf of a thread's way down the tree: threads x (depth + 1) */
    uint32_t depth;
};
/* One subtree of shards: those congruent to first modulo stride, of this rank's numbering. */
struct job {
    struct learner *k;
    float *const *w;
    const struct batch *b;
    struct learner_part part;
    uint32_t first, stride, thread, threads, level;
    float *out;
    enum fl_status st;
    struct fl_err err;
};

static struct learner_sums *sums_of(const struct learner *k, float *sum)
{
    return (struct learner_sums *)(void *)(sum + k->l->floats); /* floats is a multiple of 16 */
}

static uint32_t shards_for(uint32_t world)
{
    uint32_t n = SHARDS;

    while (n % world)
        n += SHARDS;
    return n;
}

enum fl_status learner_create(const struct model_layout *l, const struct learner_opts *o,
                              struct learner **out, struct fl_err *err)
{
    FL_AUTO(learner) struct learner *k = calloc(1, sizeof(*k));

    if (!o->world || o->rank >= o->world || o->world > 1024)
        return fl_fail(err, FL_INVALID, "trainer rank %u of %u", o->rank, o->world);
    if (!k)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the learner");
    k->l = l;
    k->o = *o;
    k->o.threads = o->threads ? o->threads : 1;
    k->mat = mat_pick();
    k->shards = shards_for(o->world);
    k->local = k->shards / o->world;
    while ((1u << k->depth) < k->local)
        k->depth++;
    k->sum_floats = l->floats + sizeof(struct learner_sums) / sizeof(float);
    k->threads = calloc(k->o.threads, sizeof(*k->threads));
    k->buffers = calloc((size_t)k->o.threads * (k->depth + 1), sizeof(*k->buffers));
    if (!k->threads || !k->buffers)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the learner");
    for (uint32_t i = 0; i < k->o.threads; i++)
        FL_TRY(model_acts_create(l, &k->threads[i].acts, err));
    *out = FL_TAKE(k);
    return FL_OK;
}

static size_t scratch_drop(struct scratch *s)
{
    size_t had = s->acts ? model_acts_drop(s->acts) : 0;

    free(s->tokens);
    free(s->starts);
    free(s->targets);
    free(s->old);
    *s = (struct scratch){ .acts = s->acts };
    return had;
}

size_t learner_drop(struct learner *k)
{
    size_t had = 0;

    for (uint32_t i = 0; i < k->o.threads; i++)
        had += scratch_drop(&k->threads[i]);
    for (uint32_t i = 0; i < k->o.threads * (k->depth + 1); i++) {
        had += k->buffers[i] ? k->sum_floats * sizeof(float) : 0;
        free(k->buffers[i]);
        k->buffers[i] = NULL;
    }
    return had;
}

void learner_destroy(struct learner *k)
{
    if (!k)
        return;
    if (k->threads && k->buffers)
        (void)learner_drop(k);
    for (uint32_t i = 0; k->threads && i < k->o.threads; i++)
        model_acts_destroy(k->threads[i].acts);
    free(k->threads);
    free(k->buffers);
    free(k);
}

static enum fl_status scratch_room(struct scratch *s, uint32_t tokens, uint32_t samples,
                                   struct fl_err *err)
{
    if (tokens <= s->tokens_room && samples <= s->samples_room)
        return FL_OK;
    struct model_acts *acts = s->acts;

    free(s->tokens);
    free(s->starts);
    free(s->targets);
    free(s->old);
    *s = (struct scratch){ .acts = acts };
    s->tokens = malloc(((size_t)tokens + 1) * sizeof(*s->tokens));
    s->starts = malloc(((size_t)samples + 1) * sizeof(*s->starts));
    s->targets = malloc(((size_t)tokens + 1) * sizeof(*s->targets));
    s->old = malloc(((size_t)tokens + 1) * 5 * sizeof(*s->old));
    if (!s->tokens || !s->starts || !s->targets || !s->old)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u samples of %u tokens", samples, tokens);
    s->logp = s->old + tokens + 1;
    s->entropy = s->logp + tokens + 1;
    s->d_logp = s->entropy + tokens + 1;
    s->d_entropy = s->d_logp + tokens + 1;
    s->tokens_room = tokens;
    s->samples_room = samples;
    return FL_OK;
}

/* Packs the samples of one shard; targets are the answers' tokens. */
static enum fl_status shard_pack(struct job *j, uint32_t shard, struct model_batch *mb,
                                 uint32_t *n_targets, struct fl_err *err)
{
    const struct batch *b = j->b;
    struct scratch *s = &j->k->threads[j->thread];
    uint32_t tokens = 0, samples = 0, nt = 0;

    for (uint32_t i = j->part.from; i < j->part.to; i++)
        if (i % j->k->shards == shard) {
            tokens += (uint32_t)b->lengths[i];
            samples++;
        }
    FL_TRY(scratch_room(s, tokens, samples, err));
    tokens = samples = 0;
    for (uint32_t i = j->part.from; i < j->part.to; i++) {
        if (i % j->k->shards != shard)
            continue;
        s->starts[samples++] = tokens;
        memcpy(s->tokens + tokens, b->tokens + b->starts[i],
               (size_t)b->lengths[i] * sizeof(int32_t));
        for (int32_t t = b->prompt_lengths[i]; t < b->lengths[i]; t++) {
            s->old[nt] = b->logprobs[b->starts[i] + (uint32_t)t];
            s->targets[nt++] = (struct model_target){ tokens + (uint32_t)t - 1,
                                                      b->tokens[b->starts[i] + (uint32_t)t] };
        }
        tokens += (uint32_t)b->lengths[i];
    }
    s->starts[samples] = tokens;
    *mb = (struct model_batch){ s->tokens, s->starts, samples };
    *n_targets = nt;
    return FL_OK;
}

static void shard_loss(struct job *j, uint32_t shard, struct learner_sums *out)
{
    struct scratch *s = &j->k->threads[j->thread];
    struct policy_sum sum = { 0 };
    uint32_t at = 0;
    double scale = 1.0 / (j->part.to - j->part.from);

    for (uint32_t i = j->part.from; i < j->part.to; i++) {
        if (i % j->k->shards != shard)
            continue;
        struct policy_sample one = { s->logp + at, s->old + at, s->entropy + at,
                                     (uint32_t)(j->b->lengths[i] - j->b->prompt_lengths[i]),
                                     j->b->advantages[i] };

        policy_loss(&j->k->o.policy, &one, scale, s->d_logp + at, s->d_entropy + at, &sum);
        at += one.n;
    }
    out->loss += sum.loss;
    out->abs_diff += sum.abs_diff;
    out->entropy += sum.entropy;
    out->tokens += (double)sum.tokens;
    out->clipped += (double)sum.clipped;
}

static enum fl_status leaf(struct job *j, struct fl_err *err)
{
    struct learner *k = j->k;
    struct scratch *s = &k->threads[j->thread];
    uint32_t shard = k->o.rank + j->first * k->o.world, n;
    struct model_batch mb;
    float **g = malloc(k->l->n * sizeof(*g));

    if (!g)
        return fl_fail(err, FL_EXHAUSTED, "no memory for gradients");
    memset(j->out, 0, k->sum_floats * sizeof(float));
    enum fl_status st = shard_pack(j, shard, &mb, &n, err);
    if (st == FL_OK && n)
        st =
            model_score(s->acts, j->w, &mb, s->targets, n, k->o.inv_temp, s->logp, s->entropy, err);
    if (st == FL_OK && n) {
        shard_loss(j, shard, sums_of(k, j->out));
        model_point(k->l, j->out, g);
        model_back(s->acts, j->w, s->d_logp, k->o.policy.entropy_coef != 0 ? s->d_entropy : NULL,
                   g);
    }
    free(g);
    return st;
}

static void fold_into(const struct mat_ops *mat, float *to, const float *from, size_t floats)
{
    size_t grad = floats - sizeof(struct learner_sums) / sizeof(float);
    double *a = (double *)(void *)(to + grad);
    const double *b = (const double *)(const void *)(from + grad);

    mat->add(to, from, grad);
    for (size_t i = 0; i < sizeof(struct learner_sums) / sizeof(double); i++)
        a[i] += b[i];
}

static enum fl_status buffer_at(struct learner *k, uint32_t thread, uint32_t level, float **out,
                                struct fl_err *err)
{
    float **b = &k->buffers[thread * (k->depth + 1) + level];

    if (!*b)
        *b = aligned_alloc(64, (k->sum_floats * sizeof(float) + 63) & ~(size_t)63);
    if (!*b)
        return fl_fail(err, FL_EXHAUSTED, "no memory for gradients (%zu MiB)",
                       k->sum_floats * sizeof(float) >> 20);
    *out = *b;
    return FL_OK;
}

static void *subtree(void *arg);

/* Shards first, first + stride, ...: those of the left half, then of the right, then their sum. */
static enum fl_status both_halves(struct job *j, struct fl_err *err)
{
    struct job left = *j, right = *j;
    pthread_t other;
    bool apart = j->threads > 1;

    left.stride = right.stride = j->stride * 2;
    left.level = right.level = j->level + 1;
    right.first = j->first + j->stride;
    if (apart) {
        left.threads = j->threads - j->threads / 2;
        right.threads = j->threads / 2;
        right.thread = j->thread + left.threads;
        right.level = 0;
    }
    FL_TRY(buffer_at(j->k, right.thread, right.level, &right.out, err));
    apart = apart && pthread_create(&other, NULL, subtree, &right) == 0;
    (void)subtree(&left); /* into our own buffer */
    if (apart)
        (void)pthread_join(other, NULL);
    else if (left.st == FL_OK)
        (void)subtree(&right);
    if (left.st != FL_OK || right.st != FL_OK) {
        const struct job *bad = left.st != FL_OK ? &left : &right;

        return fl_fail(err, bad->st, "%s", bad->err.text);
    }
    fold_into(j->k->mat, j->out, right.out, j->k->sum_floats);
    return FL_OK;
}

static void *subtree(void *arg)
{
    struct job *j = arg;

    if (j->first + j->stride >= j->k->local)
        j->st = leaf(j, &j->err);
    else
        j->st = both_halves(j, &j->err);
    return NULL;
}

enum fl_status learner_gradient(struct learner *k, float *const *w, const struct batch *b,
                                struct learner_part part, void **sum, size_t *bytes,
                                struct fl_err *err)
{
    struct job j = { .k = k, .w = w, .b = b, .part = part, .stride = 1, .threads = k->o.threads };

    if (part.from >= part.to || part.to > b->n_samples)
        return fl_fail(err, FL_INVALID, "minibatch of samples %u to %u of %u", part.from, part.to,
                       b->n_samples);
    FL_TRY(buffer_at(k, 0, 0, &j.out, err));
    (void)subtree(&j);
    if (j.st != FL_OK)
        return fl_fail(err, j.st, "%s", j.err.text);
    *sum = j.out;
    *bytes = k->sum_floats * sizeof(float);
    return FL_OK;
}

/* The tree goes on: rank r and r + stride, strides halving, as the shards inside a rank. */
void learner_fold(void *const *sums, uint32_t n, size_t bytes)
{
    const struct mat_ops *mat = mat_pick();
    uint32_t stride = 1;

    while (stride * 2 < n)
        stride *= 2;
    for (; stride >= 1 && n > 1; stride /= 2)
        for (uint32_t i = 0; i < stride && i + stride < n; i++)
            fold_into(mat, sums[i], sums[i + stride], bytes / sizeof(float));
}

void learner_apply(struct learner *k, void *sum, uint64_t t, float *const *w, float *m, float *v,
                   struct learner_sums *out, double *grad_norm)
{
    const struct learner_opts *o = &k->o;
    double norm = sqrt(k->mat->sumsq(sum, k->l->floats));
    struct mat_adam a = { o->lr,
                          o->beta1,
                          o->beta2,
                          o->eps,
                          o->decay,
                          (float)(1 / (1 - pow((double)o->beta1, (double)t))),
                          (float)(1 / (1 - pow((double)o->beta2, (double)t))),
                          1 };

    if (o->clip_grad > 0 && norm > (double)o->clip_grad)
        a.scale = (float)((double)o->clip_grad / norm);
    for (uint32_t i = 0; i < k->l->n; i++) {
        const struct model_tensor *x = &k->l->tensors[i];

        k->mat->adam(w[i], m + x->offset, v + x->offset, (float *)sum + x->offset, x->count, &a);
    }
    *out = *sums_of(k, sum);
    *grad_norm = norm;
}

enum fl_status learner_compare(struct learner *k, float *const *w, const struct batch *b,
                               struct learner_sums *add, struct fl_err *err)
{
    struct scratch *s = &k->threads[0];
    struct job j = { .k = k, .w = w, .b = b, .part = { 0, b->n_samples } };

    for (uint32_t i = 0; i < k->local; i++) {
        struct model_batch mb;
        uint32_t n;

        FL_TRY(shard_pack(&j, k->o.rank + i * k->o.world, &mb, &n, err));
        if (!n)
            continue;
        FL_TRY(model_score(s->acts, w, &mb, s->targets, n, k->o.inv_temp, s->logp, NULL, err));
        for (uint32_t t = 0; t < n; t++)
            add->abs_diff += fabs((double)s->logp[t] - (double)s->old[t]);
        add->tokens += n;
    }
    return FL_OK;
}
