#include "worker/roles/engine.h"

#include <stdlib.h>
#include <string.h>

#include "worker/roles/mat.h"
#include "worker/roles/rng.h"

struct slot {
    struct engine_seq *seq;
    uint32_t fed;    /* tokens whose keys and values are in the cache */
    uint32_t leader; /* the slot that feeds the prompt for this one, or itself */
};
struct engine {
    const struct model_layout *l;
    const struct mat_ops *mat;
    struct model_cache *cache;
    struct slot *slots;
    uint32_t n_slots, used, queued;
    int32_t end_token;
    float *const *w;
    uint64_t version, digest[2];
    struct engine_seq *wait_first, **wait_last;
    struct engine_request *requests, *done_first, **done_last; /* requests: all that are not done */
    float *inv_temp, *logp, *prob;
    struct model_row rows[MODEL_ROWS];
    uint32_t n_rows;
    bool away;
};

enum fl_status engine_create(const struct model_layout *l, uint32_t slots, int32_t end_token,
                             struct engine **out, struct fl_err *err)
{
    FL_AUTO(engine) struct engine *e = calloc(1, sizeof(*e));

    if (slots > MODEL_ROWS / 2)
        slots = MODEL_ROWS / 2; /* so that a step always has room for prompts too */
    if (e) {
        e->l = l;
        e->mat = mat_pick();
        e->n_slots = slots;
        e->end_token = end_token;
        e->wait_last = &e->wait_first;
        e->done_last = &e->done_first;
        e->slots = calloc(slots, sizeof(*e->slots));
        e->inv_temp = calloc(slots, sizeof(*e->inv_temp));
        e->logp = calloc((size_t)slots * l->cfg.vocab, sizeof(*e->logp));
        e->prob = calloc(l->cfg.vocab, sizeof(*e->prob));
    }
    if (!e || !e->slots || !e->inv_temp || !e->logp || !e->prob)
        return fl_fail(err, FL_EXHAUSTED, "no memory for an engine of %u sequences", slots);
    FL_TRY(model_cache_create(l, slots, l->cfg.max_len, &e->cache, err));
    *out = FL_TAKE(e);
    return FL_OK;
}

void engine_request_destroy(struct engine_request *r)
{
    if (!r)
        return;
    for (uint32_t i = 0; r->seqs && i < r->n_prompts * r->n; i++) {
        free(r->seqs[i].tokens);
        free(r->seqs[i].logp);
        free(r->seqs[i].spans);
    }
    free(r->seqs);
    free(r);
}

void engine_destroy(struct engine *e)
{
    struct engine_request *r;

    if (!e)
        return;
    while ((r = e->requests)) {
        e->requests = r->next;
        engine_request_destroy(r);
    }
    while (e->done_last && (r = engine_done(e)))
        engine_request_destroy(r);
    model_cache_destroy(e->cache);
    free(e->slots);
    free(e->inv_temp);
    free(e->logp);
    free(e->prob);
    free(e);
}

void engine_weights(struct engine *e, float *const *w, uint64_t version, const uint64_t digest[2])
{
    e->w = w;
    e->version = version;
    memcpy(e->digest, digest, sizeof(e->digest));
}

/* ---- requests -------------------------------------------------------------------------------- */
static enum fl_status request_check(const struct engine *e, const struct engine_request *r,
                                    struct fl_err *err)
{
    const int32_t *t = r->tokens;

    if (!r->n_prompts || !r->n || !r->max_new)
        return fl_fail(err, FL_INVALID, "%u prompts, %u samples each, %u tokens: none may be 0",
                       r->n_prompts, r->n, r->max_new);
    if ((uint64_t)r->n_prompts * r->n > ENGINE_QUEUE_MAX - e->queued)
        return fl_fail(err, FL_EXHAUSTED,
                       "%u prompts of %u samples: %u sequences wait, at most %d may", r->n_prompts,
                       r->n, e->queued, ENGINE_QUEUE_MAX);
    for (uint32_t i = 0; i < r->n_prompts; t += r->lengths[i++]) {
        if (r->lengths[i] < 1 || r->lengths[i] >= e->l->cfg.max_len)
            return fl_fail(
                err, FL_INVALID,
                "prompt %u has %u tokens: must be 1 to %u (--max-position-embeddings, less one)", i,
                r->lengths[i], e->l->cfg.max_len - 1);
        for (uint32_t j = 0; j < r->lengths[i]; j++)
            if (t[j] < 0 || (uint32_t)t[j] >= e->l->cfg.vocab)
                return fl_fail(err, FL_INVALID, "prompt %u: token %d, the vocabulary has %u", i,
                               t[j], e->l->cfg.vocab);
    }
    return FL_OK;
}

static bool seq_make(const struct engine *e, struct engine_request *r, uint32_t i,
                     const int32_t *prompt, uint32_t len)
{
    struct engine_seq *s = &r->seqs[i];
    uint32_t room = len + r->max_new < e->l->cfg.max_len ? len + r->max_new : e->l->cfg.max_len;

    s->of = r;
    s->index = i;
    s->rng_index = r->first * r->n + i;
    s->n_prompt = s->n = len;
    s->tokens = malloc(room * sizeof(*s->tokens));
    s->logp = calloc(room, sizeof(*s->logp));
    s->spans = calloc(1, sizeof(*s->spans));
    if (s->tokens)
        memcpy(s->tokens, prompt, len * sizeof(*prompt));
    return s->tokens && s->logp && s->spans;
}

static void wait_push(struct engine *e, struct engine_seq *s)
{
    s->next = NULL;
    *e->wait_last = s;
    e->wait_last = &s->next;
    e->queued++;
}

static struct engine_seq *wait_pop(struct engine *e)
{
    struct engine_seq *s = e->wait_first;

    e->wait_first = s->next;
    if (!e->wait_first)
        e->wait_last = &e->wait_first;
    e->queued--;
    return s;
}

enum fl_status engine_submit(struct engine *e, const struct engine_request *what,
                             struct fl_err *err)
{
    FL_TRY(request_check(e, what, err));
    struct engine_request *r = malloc(sizeof(*r));
    uint32_t total = what->n_prompts * what->n;
    const int32_t *at = what->tokens;
    bool ok = r != NULL;

    if (ok) {
        *r = *what;
        r->seqs = calloc(total, sizeof(*r->seqs));
        r->left = total;
        ok = r->seqs != NULL;
    }
    for (uint32_t p = 0; ok && p < what->n_prompts; at += what->lengths[p++])
        for (uint32_t j = 0; ok && j < what->n; j++)
            ok = seq_make(e, r, p * what->n + j, at, what->lengths[p]);
    if (!ok) {
        engine_request_destroy(r);
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u sequences", total);
    }
    r->tokens = NULL; /* the caller's; each sequence has its own */
    r->lengths = NULL;
    r->next = e->requests;
    e->requests = r;
    for (uint32_t i = 0; i < total; i++)
        wait_push(e, &r->seqs[i]);
    return FL_OK;
}

struct engine_request *engine_done(struct engine *e)
{
    struct engine_request *r = e->done_first;

    if (!r)
        return NULL;
    e->done_first = r->next;
    if (!e->done_first)
        e->done_last = &e->done_first;
    r->next = NULL;
    return r;
}

static void request_finish(struct engine *e, struct engine_request *r)
{
    struct engine_request **at = &e->requests;

    while (*at != r)
        at = &(*at)->next;
    *at = r->next;
    r->next = NULL;
    *e->done_last = r;
    e->done_last = &r->next;
}

/* ---- one step -------------------------------------------------------------------------------- */
static bool same_prompt(const struct engine_seq *a, const struct engine_seq *b)
{
    return a->of == b->of && a->index / a->of->n == b->index / b->of->n && a->n == a->n_prompt &&
           b->n == b->n_prompt;
}

static void admit(struct engine *e)
{
    uint32_t leader = UINT32_MAX;

    for (uint32_t i = 0; i < e->n_slots && e->wait_first; i++) {
        if (e->slots[i].seq)
            continue;
        struct engine_seq *s = wait_pop(e);

        if (leader == UINT32_MAX || !same_prompt(e->slots[leader].seq, s))
            leader = i;
        e->slots[i] = (struct slot){ s, 0, leader };
        e->inv_temp[i] = s->of->temperature > 0 ? 1.f / s->of->temperature : 1.f;
        e->used++;
    }
}

static void rows_of(struct engine *e, uint32_t slot)
{
    struct slot *s = &e->slots[slot];

    if (!s->seq || s->leader != slot)
        return;
    while (s->fed < s->seq->n && e->n_rows < MODEL_ROWS) {
        e->rows[e->n_rows++] =
            (struct model_row){ slot, s->fed, s->seq->tokens[s->fed], s->fed + 1 == s->seq->n };
        s->fed++;
    }
}

/* Sequences that run come first, one row each; prompts take what is left. */
static void rows_make(struct engine *e)
{
    e->n_rows = 0;
    for (uint32_t i = 0; i < e->n_slots; i++)
        if (e->slots[i].seq && e->slots[i].fed + 1 == e->slots[i].seq->n)
            rows_of(e, i);
    for (uint32_t i = 0; i < e->n_slots; i++)
        rows_of(e, i);
}

static int32_t choose(struct engine *e, const struct engine_seq *s, const float *logp)
{
    uint32_t vocab = e->l->cfg.vocab, best = 0;
    double sum = 0, at;

    if (s->of->temperature <= 0) {
        for (uint32_t i = 1; i < vocab; i++)
            best = logp[i] > logp[best] ? i : best;
        return (int32_t)best;
    }
    e->mat->exp(e->prob, logp, vocab);
    for (uint32_t i = 0; i < vocab; i++)
        sum += (double)e->prob[i];
    at = sum * (double)rng_uniform(s->of->seed, RNG_SAMPLE, s->of->step, s->rng_index,
                                   s->n - s->n_prompt);
    sum = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        sum += (double)e->prob[i];
        if (at < sum)
            return (int32_t)i;
    }
    return (int32_t)vocab - 1;
}

static void span_add(const struct engine *e, struct engine_seq *s)
{
    struct engine_span *last = s->n_spans ? &s->spans[s->n_spans - 1] : NULL;

    if (!last || last->version != e->version ||
        memcmp(last->digest, e->digest, sizeof(e->digest))) {
        struct engine_span *more =
            realloc(s->spans, (s->n_spans + 1) * sizeof(*more)); /* one a version: few */

        if (more) {
            s->spans = more;
            last = &s->spans[s->n_spans++];
            *last = (struct engine_span){ 0, e->version, { e->digest[0], e->digest[1] } };
        }
    }
    if (last)
        last->tokens++;
}

static void seq_grow(struct engine *e, uint32_t slot, const float *logp)
{
    struct engine_seq *s = e->slots[slot].seq;
    int32_t t = choose(e, s, logp);

    s->tokens[s->n] = t;
    s->logp[s->n++] = logp[t];
    span_add(e, s);
    if (t != e->end_token && s->n - s->n_prompt < s->of->max_new && s->n < e->l->cfg.max_len)
        return;
    s->done = true;
    e->slots[slot].seq = NULL;
    e->used--;
    if (--s->of->left == 0)
        request_finish(e, s->of);
}

/* Samples of the same prompt that waited for its prefill: they get its cache and draw from the same
 * probabilities. Before the leader moves on, which may free its slot. */
static void followers_grow(struct engine *e, uint32_t leader, const float *logp)
{
    uint32_t len = e->slots[leader].seq->n;

    for (uint32_t i = 0; i < e->n_slots; i++) {
        if (i == leader || !e->slots[i].seq || e->slots[i].leader != leader)
            continue;
        model_cache_copy(e->cache, leader, i, len);
        e->slots[i].fed = len;
        e->slots[i].leader = i;
        seq_grow(e, i, logp);
    }
}

bool engine_busy(const struct engine *e)
{
    return e->w && !e->away && (e->used || e->wait_first);
}

void engine_step(struct engine *e)
{
    const float *logp = e->logp;

    if (!engine_busy(e))
        return;
    admit(e);
    rows_make(e);
    model_decode(e->cache, e->w, e->rows, e->n_rows, e->inv_temp, e->logp);
    for (uint32_t i = 0; i < e->n_rows; i++) {
        if (!e->rows[i].wanted)
            continue;
        followers_grow(e, e->rows[i].slot, logp);
        seq_grow(e, e->rows[i].slot, logp);
        logp += e->l->cfg.vocab;
    }
}

/* ---- memory ---------------------------------------------------------------------------------- */
size_t engine_offload(struct engine *e)
{
    for (uint32_t i = 0; i < e->n_slots; i++) /* what ran waits again, behind what waits already */
        if (e->slots[i].seq) {
            wait_push(e, e->slots[i].seq);
            e->slots[i].seq = NULL;
        }
    e->used = 0;
    e->away = true;
    return model_cache_drop(e->cache);
}

void engine_onload(struct engine *e)
{
    model_cache_back(e->cache);
    e->away = false;
}
