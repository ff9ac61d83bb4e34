#include "worker/roles/sglang/gen.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/conf/json.h"
#include "worker/roles/batch.h"
#include "worker/roles/rng.h"

enum { PROMPTS_MOST = 1 << 20, TOKENS_MOST = 1 << 28 };

void sglang_version_print(uint64_t version, const uint64_t digest[2], char out[SGLANG_VERSION_MAX])
{
    snprintf(out, SGLANG_VERSION_MAX, "%" PRIu64 ":%016" PRIx64 "%016" PRIx64, version, digest[0],
             digest[1]);
}

bool sglang_version_parse(const char *text, uint64_t *version, char digest[33])
{
    char *end;

    if (*text < '0' || *text > '9')
        return false;
    *version = strtoull(text, &end, 10);
    if (*end != ':' || strlen(end + 1) != 32 || strspn(end + 1, "0123456789abcdef") != 32)
        return false;
    memcpy(digest, end + 1, 33);
    return true;
}

/* ---- what is asked ---- */
static enum fl_status version_check(const struct fl_json_at *at, const struct sglang_serves *now,
                                    struct fl_err *err)
{
    bool none = now->version == FURLONG_NO_VERSION;
    char have[32] = "none";
    int64_t want = 0;

    if (!none)
        snprintf(have, sizeof(have), "%" PRIu64, now->version);
    if (fl_json_has(at, "version")) {
        FL_TRY(fl_json_int(at, "version", 0, INT64_MAX, &want, err));
        if (now->version != (uint64_t)want)
            return fl_fail(err, FL_STALE, "version %jd was asked for, this engine serves %s",
                           (intmax_t)want, have);
    }
    if (fl_json_has(at, "version_at_least")) {
        FL_TRY(fl_json_int(at, "version_at_least", 0, INT64_MAX, &want, err));
        if (none || now->version < (uint64_t)want)
            return fl_fail(err, FL_STALE,
                           "version %jd or later was asked for, this engine serves %s",
                           (intmax_t)want, have);
    }
    return none ? fl_fail(err, FL_STALE, "this engine serves no version yet") : FL_OK;
}

static enum fl_status texts_read(const struct fl_json_at *at, struct sglang_gen *g,
                                 struct fl_err *err)
{
    struct fl_json_at texts;
    size_t n;
    const char *text;

    FL_TRY(fl_json_array(at, "prompts", &texts, &n, err));
    if (n == 0 || n > PROMPTS_MOST)
        return fl_json_bad(at, "prompts", err, "holds %zu texts: must be 1 to %d", n, PROMPTS_MOST);
    for (size_t i = 0; i < n; i++) {
        struct fl_json_at item = fl_json_item(&texts, i);

        FL_TRY(fl_json_text(&item, NULL, &text, err));
        if (!*text)
            return fl_json_bad(&item, NULL, err, "is an empty prompt");
    }
    g->prompts = json_incref((json_t *)(uintptr_t)texts.json);
    g->n_prompts = (uint32_t)n;
    return FL_OK;
}

static enum fl_status tokens_read(const void *blob, size_t bytes, struct sglang_gen *g,
                                  struct fl_err *err)
{
    struct batch b;

    FL_TRY(batch_read(blob, bytes, 0, &b, err));
    g->tokens_given = true;
    g->n_prompts = b.n_samples;
    g->prompts = json_array();
    for (uint32_t i = 0; i < b.n_samples; i++) {
        json_t *one = json_array();

        for (uint32_t k = b.starts[i]; k < b.starts[i + 1]; k++)
            json_array_append_new(one, json_integer(b.tokens[k]));
        json_array_append_new(g->prompts, one);
    }
    batch_fini(&b);
    return g->n_prompts ? FL_OK : fl_fail(err, FL_INVALID, "generate: the blob holds no prompt");
}

static enum fl_status numbers_read(const struct fl_json_at *at, struct sglang_gen *g,
                                   struct fl_err *err)
{
    int64_t n, max_new, seed, step = 0, first = 0;

    FL_TRY(fl_json_int(at, "n", 1, 1 << 20, &n, err));
    FL_TRY(fl_json_int(at, "max_new_tokens", 1, 1 << 20, &max_new, err));
    FL_TRY(fl_json_int(at, "seed", 0, INT64_MAX, &seed, err));
    FL_TRY(fl_json_real(at, "temperature", &g->temperature, err));
    if (fl_json_has(at, "step"))
        FL_TRY(fl_json_int(at, "step", 0, UINT32_MAX, &step, err));
    if (fl_json_has(at, "first"))
        FL_TRY(fl_json_int(at, "first", 0, 1 << 30, &first, err));
    if (!(g->temperature >= 0 && g->temperature <= 1e3))
        return fl_json_bad(at, "temperature", err, "is %g: must be 0 to 1000", g->temperature);
    g->n = (uint32_t)n;
    g->max_new = (uint32_t)max_new;
    g->seed = (uint64_t)seed;
    g->step = (uint32_t)step;
    g->first = (uint32_t)first;
    return FL_OK;
}

enum fl_status sglang_gen_read(const void *body, size_t body_bytes, const void *blob,
                               size_t blob_bytes, const struct sglang_serves *now,
                               struct sglang_gen *out, struct fl_err *err)
{
    struct sglang_gen g = { 0 };
    const char *id = "";
    json_t *o = NULL;
    enum fl_status st = fl_json_parse(body_bytes ? body : "{}", body_bytes ? body_bytes : 2,
                                      "generate", FL_JSON_MAX, &o, err);

    if (st == FL_OK) {
        struct fl_json_at at = fl_json_root(o, "generate");

        st = version_check(&at, now, err);
        if (st == FL_OK)
            st = numbers_read(&at, &g, err);
        if (st == FL_OK && fl_json_has(&at, "id"))
            st = fl_json_text(&at, "id", &id, err);
        if (st == FL_OK)
            st = fl_json_has(&at, "prompts") ? texts_read(&at, &g, err)
                                             : tokens_read(blob, blob_bytes, &g, err);
        if (st == FL_OK && (uint64_t)g.n_prompts * g.n > PROMPTS_MOST)
            st = fl_fail(err, FL_INVALID, "generate: %u prompts %u times: at most %d samples",
                         g.n_prompts, g.n, PROMPTS_MOST);
        if (st == FL_OK && !(g.id = strdup(id)))
            st = fl_fail(err, FL_EXHAUSTED, "no memory for a request");
    }
    json_decref(o);
    if (st != FL_OK)
        sglang_gen_fini(&g);
    else
        *out = g;
    return st;
}

void sglang_gen_fini(struct sglang_gen *g)
{
    free(g->id);
    json_decref(g->prompts);
    *g = (struct sglang_gen){ 0 };
}

/* ---- what goes out ---- */
/* 31 bits that depend on seed, step, prompt and sample alone, not on which engine draws. */
static json_int_t sample_seed(const struct sglang_gen *g, uint32_t prompt, uint32_t sample)
{
    uint32_t counter[4] = { g->first + prompt, sample, g->step, RNG_SAMPLE },
             key[2] = { (uint32_t)g->seed, (uint32_t)(g->seed >> 32) }, out[4];

    rng_philox(counter, key, out);
    return (json_int_t)(out[0] & INT32_MAX);
}

char *sglang_gen_body(const struct sglang_gen *g, bool prompt_logprobs)
{
    json_t *prompts = json_array(), *params = json_array();

    for (uint32_t i = 0; i < g->n_prompts; i++)
        for (uint32_t k = 0; k < g->n; k++) {
            json_array_append(prompts, json_array_get(g->prompts, i));
            json_array_append_new(params,
                                  json_pack("{s:I, s:f, s:I}", "max_new_tokens",
                                            (json_int_t)g->max_new, "temperature", g->temperature,
                                            "sampling_seed", sample_seed(g, i, k)));
        }
    json_t *o = json_pack("{s:o, s:o, s:b, s:b}", g->tokens_given ? "input_ids" : "text", prompts,
                          "sampling_params", params, "return_logprob", 1, "stream", 0);
    if (!g->tokens_given && prompt_logprobs)
        json_object_set_new(o, "logprob_start_len", json_integer(0));
    else if (!g->tokens_given)
        json_object_set_new(o, "return_prompt_token_ids", json_true());
    char *text = o ? json_dumps(o, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;

    json_decref(o);
    return text;
}

/* ---- what came in ---- */
struct taking { /* all samples, one after the other */
    uint32_t n, n_tokens, room;
    int32_t *tokens, *lengths, *prompt_lengths;
    float *logprobs;
    json_t *texts, *spans;
};

static bool push(struct taking *t, int64_t token, double logprob)
{
    if (t->n_tokens == t->room) {
        uint32_t room = t->room ? t->room * 2 : 4096;
        int32_t *tokens = room > TOKENS_MOST ? NULL : realloc(t->tokens, room * sizeof(*tokens));

        if (!tokens)
            return false;
        t->tokens = tokens;
        float *logprobs = realloc(t->logprobs, room * sizeof(*logprobs));
        if (!logprobs)
            return false;
        t->logprobs = logprobs;
        t->room = room;
    }
    t->tokens[t->n_tokens] = (int32_t)token;
    t->logprobs[t->n_tokens++] = (float)logprob;
    return true;
}

static enum fl_status ids_take(struct taking *t, const struct fl_json_at *ids, size_t n,
                               struct fl_err *err)
{
    int64_t token;

    for (size_t i = 0; i < n; i++) {
        struct fl_json_at item = fl_json_item(ids, i);

        FL_TRY(fl_json_int(&item, NULL, 0, INT32_MAX, &token, err));
        if (!push(t, token, 0))
            return fl_fail(err, FL_EXHAUSTED, "no memory for %zu tokens", n);
    }
    return FL_OK;
}

/* [[log probability or null, token, text or null], ...] */
static enum fl_status pairs_take(struct taking *t, const struct fl_json_at *meta, const char *key,
                                 bool sampled, uint32_t *count, struct fl_err *err)
{
    struct fl_json_at pairs;
    double logprob = 0;
    int64_t token;
    size_t n;

    FL_TRY(fl_json_array(meta, key, &pairs, &n, err));
    for (size_t i = 0; i < n; i++) {
        struct fl_json_at pair = fl_json_item(&pairs, i);

        if (json_array_size(pair.json) < 2)
            return fl_json_bad(&pair, NULL, err, "is no [log probability, token, text]");
        struct fl_json_at first = fl_json_item(&pair, 0), second = fl_json_item(&pair, 1);
        if (sampled)
            FL_TRY(fl_json_real(&first, NULL, &logprob, err));
        FL_TRY(fl_json_int(&second, NULL, 0, INT32_MAX, &token, err));
        if (!push(t, token, logprob))
            return fl_fail(err, FL_EXHAUSTED, "no memory for %zu tokens", n);
    }
    *count = (uint32_t)n;
    return FL_OK;
}

static enum fl_status prompt_take(const struct sglang_gen *g, struct taking *t,
                                  const struct fl_json_at *item, const struct fl_json_at *meta,
                                  uint32_t *count, struct fl_err *err)
{
    struct fl_json_at ids;
    size_t n;

    if (g->tokens_given) {
        ids = fl_json_root(json_array_get(g->prompts, t->n / g->n), "tokens");
        *count = (uint32_t)json_array_size(ids.json);
        return ids_take(t, &ids, *count, err);
    }
    if (fl_json_has(item, "prompt_token_ids")) {
        FL_TRY(fl_json_array(item, "prompt_token_ids", &ids, &n, err));
        *count = (uint32_t)n;
        return ids_take(t, &ids, n, err);
    }
    if (json_array_size(json_object_get(meta->json, "input_token_logprobs")) == 0)
        return fl_fail(err, FL_UNSUPPORTED, "SGLang's answer has no tokens of the prompts");
    return pairs_take(t, meta, "input_token_logprobs", false, count, err);
}

static enum fl_status span_add(json_t *list, const struct fl_json_at *meta, const char *text,
                               int64_t tokens, struct fl_err *err)
{
    char digest[33];
    uint64_t version;

    if (!sglang_version_parse(text, &version, digest))
        return fl_fail(
            err, FL_STALE,
            "SGLang says weight_version '%.60s' (%s): this adapter loaded no such version; does "
            "somebody else update this server?",
            text, meta->up && meta->up->key ? meta->up->key : "generate");
    json_array_append_new(list, json_pack("{s:I, s:I, s:s}", "tokens", (json_int_t)tokens,
                                          "version", (json_int_t)version, "digest", digest));
    return FL_OK;
}

/* weight_versions is newer; without it one version stands for the whole answer. */
static enum fl_status spans_take(struct taking *t, const struct fl_json_at *meta, uint32_t made,
                                 struct fl_err *err)
{
    json_t *list = json_array();
    struct fl_json_at spans;
    const char *text;
    int64_t from = 0, start, end;
    size_t n = 0;
    enum fl_status st = FL_OK;

    json_array_append_new(t->spans, list);
    if (!fl_json_has(meta, "weight_versions")) {
        FL_TRY(fl_json_text(meta, "weight_version", &text, err));
        return span_add(list, meta, text, made, err);
    }
    FL_TRY(fl_json_array(meta, "weight_versions", &spans, &n, err));
    for (size_t i = 0; i < n && st == FL_OK; i++) {
        struct fl_json_at span = fl_json_item(&spans, i);

        FL_TRY(fl_json_text(&span, "version", &text, err));
        FL_TRY(fl_json_int(&span, "start", from, from, &start, err));
        FL_TRY(fl_json_int(&span, "end", start + 1, made, &end, err));
        st = span_add(list, meta, text, end - start, err);
        from = end;
    }
    if (st == FL_OK && from != made)
        st = fl_json_bad(&spans, NULL, err, "covers %jd of %u tokens", (intmax_t)from, made);
    return st;
}

static enum fl_status sample_take(const struct sglang_gen *g, struct taking *t,
                                  const struct fl_json_at *item, struct fl_err *err)
{
    struct fl_json_at meta, reason;
    const char *text, *type = "";
    uint32_t prompt = 0, made = 0;

    FL_TRY(fl_json_text(item, "text", &text, err));
    FL_TRY(fl_json_object(item, "meta_info", &meta, err));
    if (fl_json_has(&meta, "finish_reason")) {
        FL_TRY(fl_json_object(&meta, "finish_reason", &reason, err));
        FL_TRY(fl_json_text(&reason, "type", &type, err));
    }
    if (!strcmp(type, "abort")) {
        const char *why = json_string_value(json_object_get(reason.json, "message"));

        return fl_fail(err, FL_AGAIN, "SGLang aborted sample %u: %.120s", t->n,
                       why ? why : "no reason");
    }
    FL_TRY(prompt_take(g, t, item, &meta, &prompt, err));
    FL_TRY(pairs_take(t, &meta, "output_token_logprobs", true, &made, err));
    if (!prompt || !made)
        return fl_json_bad(item, NULL, err, "has %u tokens of prompt and %u of answer", prompt,
                           made);
    t->lengths[t->n] = (int32_t)(prompt + made);
    t->prompt_lengths[t->n++] = (int32_t)prompt;
    json_array_append_new(t->texts, json_string(text));
    return spans_take(t, &meta, made, err);
}

static enum fl_status samples_take(const struct sglang_gen *g, const json_t *answer,
                                   struct taking *t, struct fl_err *err)
{
    struct fl_json_at at = fl_json_root(answer, "generate's answer"), list = at;
    size_t n = json_is_array(answer) ? json_array_size(answer) : 1,
           want = (size_t)g->n_prompts * g->n;

    if (n != want || (!json_is_array(answer) && !json_is_object(answer)))
        return fl_fail(err, FL_CORRUPT, "SGLang answered with %zu samples, %zu were asked for", n,
                       want);
    for (size_t i = 0; i < n; i++) {
        struct fl_json_at item = json_is_array(answer) ? fl_json_item(&list, i) : at;
        enum fl_status st = sample_take(g, t, &item, err);

        if (st == FL_INVALID) /* by the reader of JSON: what came is not what the API promises */
            return fl_wrap(err, FL_CORRUPT, "SGLang");
        FL_TRY(st);
    }
    return FL_OK;
}

enum fl_status sglang_gen_take(const struct sglang_gen *g, const json_t *answer, double idle_s,
                               struct sglang_made *out, struct fl_err *err)
{
    size_t want = (size_t)g->n_prompts * g->n;
    struct taking t = { .texts = json_array(), .spans = json_array() };
    struct sglang_made made = { 0 };
    enum fl_status st;

    t.lengths = calloc(want, sizeof(*t.lengths));
    t.prompt_lengths = calloc(want, sizeof(*t.prompt_lengths));
    st = t.lengths && t.prompt_lengths ? samples_take(g, answer, &t, err)
                                       : fl_fail(err, FL_EXHAUSTED, "no memory for an answer");
    if (st == FL_OK) {
        struct batch b = { .n_tokens = t.n_tokens,
                           .n_samples = t.n,
                           .tokens = t.tokens,
                           .lengths = t.lengths,
                           .prompt_lengths = t.prompt_lengths,
                           .logprobs = t.logprobs };

        st = batch_write(&b, &made.blob, &made.blob_bytes, err);
    }
    if (st == FL_OK) {
        made.body = json_pack("{s:s, s:O, s:O, s:f}", "id", g->id, "texts", t.texts, "spans",
                              t.spans, "idle_s", idle_s);
        *out = made;
    }
    json_decref(t.texts);
    json_decref(t.spans);
    free(t.tokens);
    free(t.lengths);
    free(t.prompt_lengths);
    free(t.logprobs);
    return st;
}
