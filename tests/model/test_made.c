/* A generation in parts: cut, asked for, taken, joined; and answers that are not what was asked. */
#include "tests/t.h"

#include <stdlib.h>

#include "common/conf/json.h"
#include "worker/roles/batch.h"
#include "worker/roles/drv_made.h"

static struct prompt prompt_rows[] = { { "a", "1" }, { "bb", "2" }, { "ccc", "3" }, { "d", "4" }, { "e", "5" } };
static const struct prompts prompts = { prompt_rows, 5 };
static const uint32_t order[] = { 4, 0, 2, 1, 3 };
static const struct drv_job job = { .p = &prompts, .rows = order, .n_prompts = 5, .n = 2, .max_new = 3,
                                    .step = 9, .temperature = 0.5, .seed = 77, .version = 6 };

static void cuts(void **state)
{
    static const struct { uint32_t prompts, engines, parts; } rows[] = {
        { 1, 1, 1 }, { 64, 1, 1 }, { 64, 2, 4 }, { 5, 2, 3 }, { 2, 8, 2 }, { 7, 3, 4 },
    };
    struct fl_err err;

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct drv_parts p;
        uint32_t at = 0;

        t_ok(drv_parts_cut(&p, rows[i].prompts, rows[i].engines, &err), &err);
        t_int_eq(p.n, rows[i].parts, "%u prompts over %u", rows[i].prompts, rows[i].engines);
        for (uint32_t k = 0; k < p.n; at = p.parts[k++].to) {
            t_int_eq(p.parts[k].from, at);
            t_true(p.parts[k].to > at);
        }
        t_int_eq(at, rows[i].prompts);
        drv_parts_fini(&p);
    }
}

static void asks(void **state)
{
    struct drv_part p = { .from = 1, .to = 3 };
    char *text = drv_part_body(&job, &p, 4);
    json_t *o = json_loads(text, 0, NULL);

    (void)state;
    t_str_eq(json_string_value(json_object_get(o, "id")), "9.4");
    t_str_eq(json_string_value(json_array_get(json_object_get(o, "prompts"), 0)), "a");
    t_str_eq(json_string_value(json_array_get(json_object_get(o, "prompts"), 1)), "ccc");
    t_int_eq(json_integer_value(json_object_get(o, "first")), 1);
    t_int_eq(json_integer_value(json_object_get(o, "step")), 9);
    t_int_eq(json_integer_value(json_object_get(o, "version")), 6);
    t_int_eq(json_integer_value(json_object_get(o, "n")), 2);
    json_decref(o);
    free(text);
}

/* One sample a text; each has two tokens of prompt and as many of answer as its text has letters. */
static struct furlong_answer answer(const char *const *texts, uint32_t n, const char *spans)
{
    int32_t tokens[128], lengths[32], prompt[32];
    float logp[128];
    struct batch b = { .n_samples = n, .tokens = tokens, .lengths = lengths, .prompt_lengths = prompt,
                       .logprobs = logp };
    struct furlong_answer a = { 0 };
    json_t *list = json_array(), *all = json_array();
    void *blob;
    size_t bytes;
    struct fl_err err;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t len = (uint32_t)strlen(texts[i]);
        char span[256];

        lengths[i] = (int32_t)(2 + len);
        prompt[i] = 2;
        for (uint32_t k = 0; k < 2 + len; k++, b.n_tokens++) {
            tokens[b.n_tokens] = k < 2 ? 0 : texts[i][k - 2];
            logp[b.n_tokens] = k < 2 ? 0 : -(float)k;
        }
        snprintf(span, sizeof(span), spans, len);
        json_array_append_new(all, json_loads(span, 0, NULL));
        json_array_append_new(list, json_string(texts[i]));
    }
    t_ok(batch_write(&b, &blob, &bytes, &err), &err);
    json_t *o = json_pack("{s:o, s:o, s:f}", "texts", list, "spans", all, "idle_s", 0.5);
    a.body = json_dumps(o, JSON_ENSURE_ASCII);
    a.body_bytes = strlen(a.body);
    a.blob = blob;
    a.blob_bytes = bytes;
    json_decref(o);
    return a;
}

static void answer_free(struct furlong_answer *a)
{
    free((void *)(uintptr_t)a->body);
    free((void *)(uintptr_t)a->blob);
}

static void joins(void **state)
{
    static const char *const texts[3][4] = { { "x", "yy", "z", "w" }, { "k", "l", "mmm", "n" }, { "o", "p" } };
    static const char span[] = "[{\"tokens\":%u,\"version\":6,\"digest\":\"d\"}]";
    struct drv_parts p;
    struct drv_made m = { .asked_again = 3 };
    struct fl_err err;

    (void)state;
    t_ok(drv_parts_cut(&p, 5, 2, &err), &err);
    for (int k = 2; k >= 0; k--) { /* whoever comes first */
        struct furlong_answer a = answer(texts[k], k == 2 ? 2 : 4, span);

        t_ok(drv_part_take(&job, &p.parts[k], &a, "d", &err), &err);
        answer_free(&a);
    }
    t_ok(drv_parts_join(&p, 2, &m, &err), &err);
    t_int_eq(m.n_samples, 10);
    t_int_eq(m.asked_again, 3);
    t_int_eq(m.odd_digests, 0);
    t_true(m.idle_s == 0.75, "%g", m.idle_s);
    static const char *const all[] = { "x", "yy", "z", "w", "k", "l", "mmm", "n", "o", "p" };
    uint32_t at = 0;
    for (int i = 0; i < 10; i++) {
        t_str_eq(m.texts[i], all[i]);
        t_int_eq(m.versions[i], 6);
        t_int_eq(m.tokens[at + 2], all[i][0]);
        at += (uint32_t)m.lengths[i];
    }
    t_int_eq(at, m.n_tokens);
    drv_made_fini(&m);
    drv_parts_fini(&p);
}

static void odd_answers(void **state)
{
    static const struct {
        const char *name;
        const char *texts[4];
        uint32_t n;
        const char *spans, *part;
    } rows[] = {
        { "too few", { "a", "b", "c" }, 3, "[{\"tokens\":%u,\"version\":6,\"digest\":\"d\"}]", "3 samples" },
        { "an empty answer", { "a", "", "c", "d" }, 4, "[{\"tokens\":%u,\"version\":6,\"digest\":\"d\"}]", "sample 1" },
        { "spans that do not add up", { "a", "b", "c", "d" }, 4, "[{\"tokens\":2,\"version\":6,\"digest\":\"d\"}]", "2 tokens" },
        { "no spans", { "a", "b", "c", "d" }, 4, "[]", "0 tokens" },
        { "spans that are none", { "a", "b", "c", "d" }, 4, "{\"tokens\":%u}", "spans" },
        { "no version", { "a", "b", "c", "d" }, 4, "[{\"tokens\":%u,\"digest\":\"d\"}]", "version" },
    };
    struct fl_err err;

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct drv_part p = { .from = 0, .to = 2 };
        struct furlong_answer a = answer(rows[i].texts, rows[i].n, rows[i].spans);

        t_refused(drv_part_take(&job, &p, &a, "d", &err), FL_INVALID, &err);
        t_has(err.text, rows[i].part);
        t_true(!p.there && !p.tokens, "%s: nothing half taken", rows[i].name);
        answer_free(&a);
    }
    static const char *const texts[] = { "a", "b", "c", "d" };
    struct drv_parts p;
    struct furlong_answer a = answer(texts, 4, "[{\"tokens\":%u,\"version\":6,\"digest\":\"other\"}]");
    t_ok(drv_parts_cut(&p, 2, 1, &err), &err);
    t_ok(drv_part_take(&job, &p.parts[0], &a, "d", &err), &err);
    t_int_eq(p.parts[0].odd_digests, 4);
    drv_parts_fini(&p);
    answer_free(&a);
}

/* A model that has not learnt yet writes anything: the run goes on with U+FFFD for NUL. */
static void a_nul_in_a_text(void **state)
{
    static const char *const texts[] = { "a", "b\xef\xbf\xbd!", "\\u0000", "\\\xef\xbf\xbd" };
    struct drv_part p = { .from = 0, .to = 2 };
    struct furlong_answer a = answer(texts, 4, "[{\"tokens\":%u,\"version\":6,\"digest\":\"d\"}]");
    struct fl_err err;
    char *at;

    (void)state;
    for (int i = 0; i < 2; i++) {
        at = strstr(a.body, "\\uFFFD");
        t_true(at != NULL, "%s", (const char *)a.body);
        memcpy(at, "\\u0000", 6);
    }
    t_ok(drv_part_take(&job, &p, &a, "d", &err), &err);
    for (int i = 0; i < 4; i++)
        t_str_eq(p.texts[i], texts[i]); /* a backslash and letters stay */
    struct drv_parts all = { malloc(sizeof(p)), 1, 0 };
    all.parts[0] = p;
    drv_parts_fini(&all);
    answer_free(&a);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(cuts),
        cmocka_unit_test(asks),
        cmocka_unit_test(joins),
        cmocka_unit_test(odd_answers),
        cmocka_unit_test(a_nul_in_a_text),
    };

    return t_run("made", tests);
}
