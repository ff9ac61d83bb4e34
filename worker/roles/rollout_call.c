/* The `generate` call: what comes in as JSON, and what goes out. */
#include "worker/roles/rollout.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/fault.h"
#include "common/conf/json.h"
#include "worker/roles/batch.h"

enum { PROMPTS_MOST = 1 << 20 };

struct asked { /* of one request, until it is answered */
    struct furlong_call *call;
    char *id;
};

static void asked_free(struct asked *a)
{
    if (a)
        free(a->id);
    free(a);
}

/* "version": exactly that one; "version_at_least". */
static enum fl_status version_check(const struct rollout *r, const struct fl_json_at *at,
                                    struct fl_err *err)
{
    uint64_t have = furlong_weights_version(r->weights, NULL);
    char text[200] = "none", why[160] = "";
    int64_t want = 0;

    if (have != FURLONG_NO_VERSION)
        snprintf(text, sizeof(text), "%" PRIu64, have);
    else if (fl_json_has(at, "version") || fl_json_has(at, "version_at_least"))
        furlong_weights_why(r->weights, why, sizeof(why));
    if (why[0])
        snprintf(text, sizeof(text), "none: %s", why);
    if (fl_json_has(at, "version")) {
        FL_TRY(fl_json_int(at, "version", 0, INT64_MAX, &want, err));
        if (have != (uint64_t)want)
            return fl_fail(err, FL_STALE, "version %jd was asked for, this engine serves %s",
                           (intmax_t)want, text);
    }
    if (fl_json_has(at, "version_at_least")) {
        FL_TRY(fl_json_int(at, "version_at_least", 0, INT64_MAX, &want, err));
        if (have == FURLONG_NO_VERSION || have < (uint64_t)want)
            return fl_fail(err, FL_STALE,
                           "version %jd or later was asked for, this engine serves %s",
                           (intmax_t)want, text);
    }
    return FL_OK;
}

static enum fl_status texts_read(const struct rollout *r, const struct fl_json_at *at,
                                 struct engine_request *q, int32_t **tokens, uint32_t **lengths,
                                 struct fl_err *err)
{
    struct fl_json_at texts;
    size_t n, total = 0;

    FL_TRY(fl_json_array(at, "prompts", &texts, &n, err));
    if (n == 0 || n > PROMPTS_MOST)
        return fl_json_bad(at, "prompts", err, "holds %zu texts: must be 1 to %d", n, PROMPTS_MOST);
    for (size_t i = 0; i < n; i++)
        total += json_string_length(json_array_get(texts.json, i));
    *tokens = malloc((total + 1) * sizeof(**tokens));
    *lengths = malloc(n * sizeof(**lengths));
    if (!*tokens || !*lengths)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu prompts", n);
    total = 0;
    for (size_t i = 0; i < n; i++) {
        struct fl_json_at item = fl_json_item(&texts, i);
        const char *text;

        FL_TRY(fl_json_text(&item, NULL, &text, err));
        FL_TRY(alphabet_encode(&r->args.alphabet, text, *tokens + total, &(*lengths)[i], err));
        total += (*lengths)[i];
    }
    q->n_prompts = (uint32_t)n;
    return FL_OK;
}

/* Prompts as tokens: the blob's tokens and lengths. */
static enum fl_status blob_read(const struct furlong_event *ev, struct engine_request *q,
                                int32_t **tokens, uint32_t **lengths, struct fl_err *err)
{
    struct batch b;

    FL_TRY(batch_read(ev->blob, ev->blob_bytes, 0, &b, err));
    *tokens = malloc(((size_t)b.n_tokens + 1) * sizeof(**tokens));
    *lengths = malloc(((size_t)b.n_samples + 1) * sizeof(**lengths));
    q->n_prompts = b.n_samples;
    bool ok = *tokens && *lengths;
    if (ok) {
        memcpy(*tokens, b.tokens, (size_t)b.n_tokens * sizeof(**tokens));
        for (uint32_t i = 0; i < b.n_samples; i++)
            (*lengths)[i] = (uint32_t)b.lengths[i];
    }
    batch_fini(&b);
    return ok ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory for the prompts");
}

static enum fl_status numbers_read(const struct fl_json_at *at, struct engine_request *q,
                                   struct fl_err *err)
{
    int64_t n, max_new, seed, step = 0, first = 0;
    double temperature;

    FL_TRY(fl_json_int(at, "n", 1, 1 << 20, &n, err));
    FL_TRY(fl_json_int(at, "max_new_tokens", 1, 1 << 20, &max_new, err));
    FL_TRY(fl_json_int(at, "seed", 0, INT64_MAX, &seed, err));
    FL_TRY(fl_json_real(at, "temperature", &temperature, err));
    if (fl_json_has(at, "step"))
        FL_TRY(fl_json_int(at, "step", 0, UINT32_MAX, &step, err));
    if (fl_json_has(at, "first"))
        FL_TRY(fl_json_int(at, "first", 0, 1 << 30, &first, err));
    if (!(temperature >= 0 && temperature <= 1e3))
        return fl_json_bad(at, "temperature", err, "is %g: must be 0 to 1000", temperature);
    q->n = (uint32_t)n;
    q->max_new = (uint32_t)max_new;
    q->seed = (uint64_t)seed;
    q->step = (uint32_t)step;
    q->first = (uint32_t)first;
    q->temperature = (float)temperature;
    return FL_OK;
}

static enum fl_status submit(struct rollout *r, const struct furlong_event *ev,
                             const struct fl_json_at *at, struct fl_err *err)
{
    struct engine_request q = { 0 };
    int32_t *tokens = NULL;
    uint32_t *lengths = NULL;
    struct asked *a = NULL;
    const char *id = "";
    enum fl_status st = version_check(r, at, err);

    if (st == FL_OK)
        st = numbers_read(at, &q, err);
    if (st == FL_OK && fl_json_has(at, "id"))
        st = fl_json_text(at, "id", &id, err);
    if (st == FL_OK)
        st = fl_json_has(at, "prompts") ? texts_read(r, at, &q, &tokens, &lengths, err)
                                        : blob_read(ev, &q, &tokens, &lengths, err);
    if (st == FL_OK) {
        a = calloc(1, sizeof(*a));
        if (a)
            *a = (struct asked){ ev->call, strdup(id) };
        if (!a || !a->id)
            st = fl_fail(err, FL_EXHAUSTED, "no memory for a request");
    }
    if (st == FL_OK) {
        q.tokens = tokens;
        q.lengths = lengths;
        q.user = a;
        st = engine_submit(r->engine, &q, err);
    }
    if (st != FL_OK)
        asked_free(a);
    free(tokens);
    free(lengths);
    return st;
}

void rollout_generate(struct rollout *r, const struct furlong_event *ev)
{
    struct fl_err err = { 0 };
    json_t *o = NULL;
    enum fl_status st = role_body(ev, &o, &err);

    if (st == FL_OK) {
        struct fl_json_at at = fl_json_root(o, "generate");

        st = submit(r, ev, &at, &err);
        json_decref(o);
    }
    if (st != FL_OK)
        role_refuse(ev->call, st, &err);
}

/* ---- the answer ------------------------------------------------------------------------------ */
static json_t *spans_json(const struct engine_seq *s)
{
    json_t *list = json_array();

    for (uint32_t i = 0; i < s->n_spans; i++) {
        char digest[40];

        snprintf(digest, sizeof(digest), "%016" PRIx64 "%016" PRIx64, s->spans[i].digest[0],
                 s->spans[i].digest[1]);
        json_array_append_new(list, json_pack("{s:I, s:I, s:s}", "tokens",
                                              (json_int_t)s->spans[i].tokens, "version",
                                              (json_int_t)s->spans[i].version, "digest", digest));
    }
    return list;
}

static json_t *body_make(struct rollout *r, const struct engine_request *q, const char *id)
{
    json_t *texts = json_array(), *spans = json_array();
    char *text = malloc(r->layout->cfg.max_len + 1);

    for (uint32_t i = 0; text && i < q->n_prompts * q->n; i++) {
        const struct engine_seq *s = &q->seqs[i];

        alphabet_decode(&r->args.alphabet, s->tokens + s->n_prompt, s->n - s->n_prompt, text);
        json_array_append_new(texts, json_string(text));
        json_array_append_new(spans, spans_json(s));
    }
    free(text);
    return json_pack("{s:s, s:o, s:o, s:f}", "id", id, "texts", texts, "spans", spans, "idle_s",
                     r->idle_s);
}

static enum fl_status blob_make(const struct engine_request *q, void **blob, size_t *bytes,
                                struct fl_err *err)
{
    uint32_t n = q->n_prompts * q->n, total = 0;

    for (uint32_t i = 0; i < n; i++)
        total += q->seqs[i].n;
    int32_t *tokens = malloc(((size_t)total + 2 * (size_t)n) * sizeof(*tokens));
    float *logp = malloc((size_t)total * sizeof(*logp));
    enum fl_status st = fl_fail(err, FL_EXHAUSTED, "no memory for an answer of %u tokens", total);

    if (tokens && logp) {
        int32_t *lengths = tokens + total, *prompts = lengths + n;
        struct batch b = { .n_tokens = total,
                           .n_samples = n,
                           .tokens = tokens,
                           .lengths = lengths,
                           .prompt_lengths = prompts,
                           .logprobs = logp };
        uint32_t at = 0;

        for (uint32_t i = 0; i < n; at += q->seqs[i++].n) {
            memcpy(tokens + at, q->seqs[i].tokens, q->seqs[i].n * sizeof(*tokens));
            memcpy(logp + at, q->seqs[i].logp, q->seqs[i].n * sizeof(*logp));
            lengths[i] = (int32_t)q->seqs[i].n;
            prompts[i] = (int32_t)q->seqs[i].n_prompt;
        }
        st = batch_write(&b, blob, bytes, err);
    }
    free(logp);
    free(tokens);
    return st;
}

void rollout_answer(struct rollout *r, struct engine_request *q_take)
{
    struct asked *a = q_take->user;
    struct fl_err err = { 0 };
    void *blob = NULL;
    size_t bytes = 0;
    enum fl_status st = FL_FAULT("engine.answer")
                            ? fl_fail(&err, FL_INTERNAL, "RuntimeError: out of memory")
                            : blob_make(q_take, &blob, &bytes, &err);

    if (st == FL_OK)
        role_reply(a->call, body_make(r, q_take, a->id), blob, bytes);
    else
        role_refuse(a->call, st, &err);
    r->idle_s = 0;
    r->served++;
    free(blob);
    asked_free(a);
    engine_request_destroy(q_take);
}
