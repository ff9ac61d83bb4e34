#include "worker/roles/drv_made.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/conf/json.h"
#include "worker/roles/batch.h"

enum { PARTS_PER_ENGINE = 2 };

enum fl_status drv_parts_cut(struct drv_parts *p, uint32_t n_prompts, uint32_t engines,
                             struct fl_err *err)
{
    uint32_t most = engines > 1 ? engines * PARTS_PER_ENGINE : 1;
    uint32_t each = (n_prompts + most - 1) / most;

    *p = (struct drv_parts){ .n = (n_prompts + each - 1) / each };
    p->parts = calloc(p->n, sizeof(*p->parts));
    if (!p->parts)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u parts of a generation", p->n);
    p->left = p->n;
    for (uint32_t i = 0; i < p->n; i++) {
        p->parts[i].from = i * each;
        p->parts[i].to = (i + 1) * each < n_prompts ? (i + 1) * each : n_prompts;
    }
    return FL_OK;
}

static void part_clear(struct drv_part *p)
{
    for (uint32_t i = 0; p->texts && i < p->n_samples; i++)
        free(p->texts[i]);
    free(p->texts);
    free(p->tokens);
    free(p->lengths);
    free(p->prompt_lengths);
    free(p->logprobs);
    free(p->versions);
    *p = (struct drv_part){ .from = p->from, .to = p->to };
}

void drv_parts_fini(struct drv_parts *p)
{
    for (uint32_t i = 0; p->parts && i < p->n; i++)
        part_clear(&p->parts[i]);
    free(p->parts);
    *p = (struct drv_parts){ 0 };
}

char *drv_part_body(const struct drv_job *j, const struct drv_part *p, uint32_t number)
{
    json_t *prompts = json_array();
    char id[48];

    snprintf(id, sizeof(id), "%u.%u", j->step, number);
    for (uint32_t i = p->from; i < p->to; i++)
        json_array_append_new(prompts, json_string(j->p->rows[j->rows[i]].input));
    json_t *o =
        json_pack("{s:s, s:o, s:I, s:I, s:f, s:I, s:I, s:I, s:I}", "id", id, "prompts", prompts,
                  "n", (json_int_t)j->n, "max_new_tokens", (json_int_t)j->max_new, "temperature",
                  j->temperature, "seed", (json_int_t)j->seed, "step", (json_int_t)j->step, "first",
                  (json_int_t)p->from, "version", (json_int_t)j->version);
    char *text = o ? json_dumps(o, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;

    json_decref(o);
    return text;
}

/* ---- what came ------------------------------------------------------------------------------- */
static bool blob_copy(struct drv_part *p, const struct batch *b)
{
    size_t t = (size_t)b->n_tokens, s = (size_t)b->n_samples;

    p->n_tokens = b->n_tokens;
    p->tokens = malloc((t + 1) * sizeof(*p->tokens));
    p->logprobs = malloc((t + 1) * sizeof(*p->logprobs));
    p->lengths = malloc((s + 1) * sizeof(*p->lengths));
    p->prompt_lengths = malloc((s + 1) * sizeof(*p->prompt_lengths));
    p->texts = calloc(s + 1, sizeof(*p->texts));
    p->versions = malloc((s + 1) * sizeof(*p->versions));
    if (!p->tokens || !p->logprobs || !p->lengths || !p->prompt_lengths || !p->texts ||
        !p->versions)
        return false;
    p->n_samples = b->n_samples;
    memcpy(p->tokens, b->tokens, t * sizeof(*p->tokens));
    memcpy(p->logprobs, b->logprobs, t * sizeof(*p->logprobs));
    memcpy(p->lengths, b->lengths, s * sizeof(*p->lengths));
    memcpy(p->prompt_lengths, b->prompt_lengths, s * sizeof(*p->prompt_lengths));
    return true;
}

static enum fl_status blob_take(const struct drv_job *j, struct drv_part *p,
                                const struct furlong_answer *a, struct fl_err *err)
{
    struct batch b;
    uint32_t want = (p->to - p->from) * j->n;

    FL_TRY(batch_read(a->blob, a->blob_bytes, BATCH_LOGPROBS, &b, err));
    enum fl_status st = FL_OK;
    if (b.n_samples != want)
        st = fl_fail(err, FL_INVALID, "%u samples came, %u were asked for", b.n_samples, want);
    for (uint32_t i = 0; st == FL_OK && i < b.n_samples; i++)
        if (b.lengths[i] == b.prompt_lengths[i])
            st = fl_fail(err, FL_INVALID, "sample %u has no answer", i);
    if (st == FL_OK && !blob_copy(p, &b))
        st = fl_fail(err, FL_EXHAUSTED, "no memory for %u samples", want);
    batch_fini(&b);
    return st;
}

static enum fl_status spans_take(const struct drv_job *j, struct drv_part *p, uint32_t i,
                                 const struct fl_json_at *spans, const char *digest,
                                 struct fl_err *err)
{
    size_t n = json_array_size(spans->json);
    int64_t tokens, version, sum = 0;

    p->versions[i] = UINT64_MAX;
    for (size_t k = 0; k < n; k++) {
        struct fl_json_at span = fl_json_item(spans, k);
        const char *of;

        FL_TRY(fl_json_int(&span, "tokens", 1, INT32_MAX, &tokens, err));
        FL_TRY(fl_json_int(&span, "version", 0, INT64_MAX, &version, err));
        FL_TRY(fl_json_text(&span, "digest", &of, err));
        p->versions[i] = (uint64_t)version < p->versions[i] ? (uint64_t)version : p->versions[i];
        p->odd_digests += (uint64_t)version == j->version && *digest && strcmp(of, digest) != 0;
        sum += tokens;
    }
    if (sum != p->lengths[i] - p->prompt_lengths[i])
        return fl_json_bad(spans, NULL, err, "names %jd tokens, the answer has %d", (intmax_t)sum,
                           p->lengths[i] - p->prompt_lengths[i]);
    return FL_OK;
}

static enum fl_status body_take(const struct drv_job *j, struct drv_part *p, const json_t *o,
                                const char *digest, struct fl_err *err)
{
    struct fl_json_at at = fl_json_root(o, "generate's answer"), texts, spans;
    size_t n_texts, n_spans;

    FL_TRY(fl_json_array(&at, "texts", &texts, &n_texts, err));
    FL_TRY(fl_json_array(&at, "spans", &spans, &n_spans, err));
    if (n_texts != p->n_samples || n_spans != p->n_samples)
        return fl_json_bad(&at, "texts", err, "holds %zu, spans %zu: %u samples came", n_texts,
                           n_spans, p->n_samples);
    for (uint32_t i = 0; i < p->n_samples; i++) {
        struct fl_json_at text = fl_json_item(&texts, i), of = fl_json_item(&spans, i);
        const char *t;

        FL_TRY(fl_json_text(&text, NULL, &t, err));
        p->texts[i] = strdup(t);
        if (!p->texts[i])
            return fl_fail(err, FL_EXHAUSTED, "no memory for an answer");
        if (!json_is_array(of.json))
            return fl_json_bad(&of, NULL, err, "is no list of spans");
        FL_TRY(spans_take(j, p, i, &of, digest, err));
    }
    if (fl_json_has(&at, "idle_s"))
        FL_TRY(fl_json_real(&at, "idle_s", &p->idle_s, err));
    return FL_OK;
}

/* Strings end with NUL here, and a text of a model that has not learnt yet may hold one: it becomes
 * U+FFFD, whose escape is as long. */
static void nuls_replace(char *body, size_t n)
{
    static const char nul[] = "\\u0000", other[] = "\\ufffd";

    for (size_t i = 0; i + sizeof(nul) - 1 <= n; i++) {
        if (body[i] != '\\')
            continue;
        if (memcmp(body + i, nul, sizeof(nul) - 1) == 0)
            memcpy(body + i, other, sizeof(other) - 1);
        i++; /* what is escaped begins no escape */
    }
}

static enum fl_status body_parse(const struct furlong_answer *a, json_t **out, struct fl_err *err)
{
    bool plain = !a->body_bytes || !memmem(a->body, a->body_bytes, "\\u0000", 6);
    char *copy = plain ? NULL : malloc(a->body_bytes);
    const char *text = plain ? a->body : copy;
    enum fl_status st;

    if (!plain && !copy)
        return fl_fail(err, FL_EXHAUSTED, "no memory for generate's answer");
    if (copy) {
        memcpy(copy, a->body, a->body_bytes);
        nuls_replace(copy, a->body_bytes);
    }
    st = fl_json_parse(text, a->body_bytes, "generate's answer", FL_JSON_MAX, out, err);
    free(copy);
    return st;
}

enum fl_status drv_part_take(const struct drv_job *j, struct drv_part *p,
                             const struct furlong_answer *a, const char *digest, struct fl_err *err)
{
    json_t *o = NULL;
    enum fl_status st;

    part_clear(p);
    st = blob_take(j, p, a, err);
    if (st == FL_OK)
        st = body_parse(a, &o, err);
    if (st == FL_OK)
        st = body_take(j, p, o, digest, err);
    json_decref(o);
    if (st != FL_OK)
        part_clear(p);
    p->there = st == FL_OK;
    return st;
}

/* ---- the whole ------------------------------------------------------------------------------- */
void drv_made_fini(struct drv_made *m)
{
    for (uint32_t i = 0; m->texts && i < m->n_samples; i++)
        free(m->texts[i]);
    free(m->texts);
    free(m->tokens);
    free(m->lengths);
    free(m->prompt_lengths);
    free(m->logprobs);
    free(m->versions);
    *m = (struct drv_made){ 0 };
}

static bool made_room(struct drv_made *m, size_t samples, size_t tokens)
{
    m->tokens = malloc((tokens + 1) * sizeof(*m->tokens));
    m->logprobs = malloc((tokens + 1) * sizeof(*m->logprobs));
    m->lengths = malloc((samples + 1) * sizeof(*m->lengths));
    m->prompt_lengths = malloc((samples + 1) * sizeof(*m->prompt_lengths));
    m->versions = malloc((samples + 1) * sizeof(*m->versions));
    m->texts = calloc(samples + 1, sizeof(*m->texts));
    return m->tokens && m->logprobs && m->lengths && m->prompt_lengths && m->versions && m->texts;
}

static void part_join(struct drv_made *m, struct drv_part *p)
{
    uint32_t s = p->n_samples;

    memcpy(m->tokens + m->n_tokens, p->tokens, p->n_tokens * sizeof(*m->tokens));
    memcpy(m->logprobs + m->n_tokens, p->logprobs, p->n_tokens * sizeof(*m->logprobs));
    memcpy(m->lengths + m->n_samples, p->lengths, s * sizeof(*m->lengths));
    memcpy(m->prompt_lengths + m->n_samples, p->prompt_lengths, s * sizeof(*m->prompt_lengths));
    memcpy(m->versions + m->n_samples, p->versions, s * sizeof(*m->versions));
    memcpy(m->texts + m->n_samples, p->texts, s * sizeof(*m->texts));
    memset(p->texts, 0, s * sizeof(*p->texts)); /* handed over */
    m->n_tokens += p->n_tokens;
    m->n_samples += s;
    m->odd_digests += p->odd_digests;
}

enum fl_status drv_parts_join(struct drv_parts *p, uint32_t engines, struct drv_made *out,
                              struct fl_err *err)
{
    struct drv_made m = { .asked_again = out->asked_again };
    size_t samples = 0, tokens = 0;

    snprintf(m.why, sizeof(m.why), "%s", out->why);
    for (uint32_t i = 0; i < p->n; i++) {
        samples += p->parts[i].n_samples;
        tokens += p->parts[i].n_tokens;
        m.idle_s += p->parts[i].idle_s / (engines ? engines : 1);
    }
    if (!made_room(&m, samples, tokens)) {
        drv_made_fini(&m);
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu samples", samples);
    }
    for (uint32_t i = 0; i < p->n; i++)
        part_join(&m, &p->parts[i]);
    *out = m;
    return FL_OK;
}
