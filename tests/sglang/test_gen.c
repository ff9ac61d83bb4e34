/* generate, as texts: what goes to SGLang, what of its answers is taken, and what is refused. */
#include "worker/roles/sglang/gen.h"

#include <stdlib.h>

#include "common/base/fault.h"
#include "common/conf/json.h"
#include "tests/t.h"
#include "worker/roles/batch.h"

#define D1 "00000000000000010000000000000002"
#define D2 "00000000000000030000000000000004"
static const struct sglang_serves serving = { 7, { 1, 2 } };

static enum fl_status read_text(const char *body, const struct sglang_serves *now,
                                struct sglang_gen *g, struct fl_err *err)
{
    return sglang_gen_read(body, strlen(body), NULL, 0, now, g, err);
}

static struct sglang_gen gen_of(const char *body)
{
    struct sglang_gen g;
    struct fl_err err;

    t_ok(read_text(body, &serving, &g, &err), &err);
    return g;
}

#define ASK "\"n\":1,\"max_new_tokens\":4,\"temperature\":1,\"seed\":5"

static void versions(void **state)
{
    static const struct {
        const char *text;
        bool ok;
    } rows[] = {
        { "7:" D1, true },      { "0:" D2, true }, { "default", false },
        { "7", false },         { "7:", false },   { "-7:" D1, false },
        { "7:" D1 "0", false }, { "", false },     { "7:0000000000000001000000000000000G", false },
    };
    char text[SGLANG_VERSION_MAX], digest[33];
    uint64_t v;

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++)
        t_true(sglang_version_parse(rows[i].text, &v, digest) == rows[i].ok, "%s", rows[i].text);
    sglang_version_print(UINT64_MAX - 1, (uint64_t[2]){ UINT64_MAX, 0 }, text);
    t_true(sglang_version_parse(text, &v, digest) && v == UINT64_MAX - 1, "%s", text);
    t_str_eq(digest, "ffffffffffffffff0000000000000000");
}

static void asked(void **state)
{
    static const struct {
        const char *body;
        enum fl_status wanted;
        const char *why;
    } rows[] = {
        { "{\"prompts\":[\"a\"]," ASK "}", FL_OK, "" },
        { "{\"prompts\":[\"a\"],\"version\":7," ASK "}", FL_OK, "" },
        { "{\"prompts\":[\"a\"],\"version_at_least\":6," ASK "}", FL_OK, "" },
        { "{\"prompts\":[\"a\"],\"version\":8," ASK "}", FL_STALE,
          "version 8 was asked for, this engine serves 7" },
        { "{\"prompts\":[\"a\"],\"version_at_least\":8," ASK "}", FL_STALE, "8 or later" },
        { "{\"prompts\":[]," ASK "}", FL_INVALID, "holds 0 texts" },
        { "{\"prompts\":[\"\"]," ASK "}", FL_INVALID, "empty prompt" },
        { "{\"prompts\":[3]," ASK "}", FL_INVALID, "prompts[0]" },
        { "{\"prompts\":[\"a\"],\"n\":0,\"max_new_tokens\":1,\"temperature\":1,\"seed\":1}",
          FL_INVALID, "n: 0" },
        { "{\"prompts\":[\"a\"],\"n\":1,\"max_new_tokens\":1,\"temperature\":-1,\"seed\":1}",
          FL_INVALID, "temperature" },
        { "{\"prompts\":[\"a\",\"b\"],\"n\":1048576,\"max_new_tokens\":1,\"temperature\":1,"
          "\"seed\":1}",
          FL_INVALID, "samples" },
        { "{" ASK "}", FL_CORRUPT, "" }, /* neither prompts nor tokens */
        { "[", FL_INVALID, "generate" },
    };
    const struct sglang_serves none = { FURLONG_NO_VERSION, { 0, 0 } };
    struct sglang_gen g = { 0 };
    struct fl_err err;

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        enum fl_status st = read_text(rows[i].body, &serving, &g, &err);

        t_int_eq(st, rows[i].wanted, "%s", rows[i].body);
        if (st == FL_OK)
            sglang_gen_fini(&g);
        else
            t_has(err.text, rows[i].why);
    }
    t_refused(read_text(rows[0].body, &none, &g, &err), FL_STALE, &err);
    t_has(err.text, "no version yet");
}

/* Every sample its own seed, that depends on step, prompt and sample, and not on which part asks.
 */
static void seeds(void **state)
{
    struct sglang_gen
        both = gen_of("{\"prompts\":[\"a\",\"b\"],\"n\":2,\"max_new_tokens\":4,\"temperature\":0.5,"
                      "\"seed\":5,\"step\":3,\"first\":10}"),
        second = gen_of("{\"prompts\":[\"b\"],\"n\":2,\"max_new_tokens\":4,\"temperature\":0.5,"
                        "\"seed\":5,\"step\":3,\"first\":11}");
    char *a = sglang_gen_body(&both, false), *b = sglang_gen_body(&second, true);
    json_t *x = json_loads(a, 0, NULL), *y = json_loads(b, 0, NULL);
    const json_t *px = json_object_get(x, "sampling_params"),
                 *py = json_object_get(y, "sampling_params");

    (void)state;
    t_int_eq(json_array_size(json_object_get(x, "text")), 4);
    t_int_eq(json_array_size(px), 4);
    t_true(json_equal(json_array_get(px, 2), json_array_get(py, 0)));
    t_true(json_equal(json_array_get(px, 3), json_array_get(py, 1)));
    t_true(!json_equal(json_array_get(px, 0), json_array_get(px, 1)));
    t_true(!json_equal(json_array_get(px, 0), json_array_get(px, 2)));
    t_true(json_is_true(json_object_get(x, "return_prompt_token_ids")) &&
           !json_object_get(x, "logprob_start_len"));
    t_true(json_is_integer(json_object_get(y, "logprob_start_len")) &&
           !json_object_get(y, "return_prompt_token_ids"));
    json_decref(x);
    json_decref(y);
    free(a);
    free(b);
    sglang_gen_fini(&both);
    sglang_gen_fini(&second);
}

static void tokens_go_as_they_came(void **state)
{
    const int32_t tokens[] = { 5, 6, 7 }, lengths[] = { 2, 1 }, prompts[] = { 2, 1 };
    const struct batch b = { .n_tokens = 3,
                             .n_samples = 2,
                             .tokens = tokens,
                             .lengths = lengths,
                             .prompt_lengths = prompts };
    struct sglang_gen g;
    struct fl_err err;
    void *blob;
    size_t bytes;

    (void)state;
    t_ok(batch_write(&b, &blob, &bytes, &err), &err);
    t_ok(sglang_gen_read("{" ASK "}", strlen("{" ASK "}"), blob, bytes, &serving, &g, &err), &err);
    char *text = sglang_gen_body(&g, false);
    t_has(text, "\"input_ids\":[[5,6],[7]]");
    t_true(!strstr(text, "return_prompt_token_ids"));
    free(text);
    free(blob);
    sglang_gen_fini(&g);
}

#define META(more)                                                                                 \
    "\"meta_info\":{\"finish_reason\":{\"type\":\"stop\"},\"weight_version\":\"7:" D1 "\","        \
    "\"output_token_logprobs\":[[-0.5,11,null],[-0.25,12,\"x\"]]" more "}"
#define SAMPLE(more) "{\"text\":\"ok\",\"prompt_token_ids\":[3,4]," META(more) "}"

static const struct {
    const char *name, *answer;
    enum fl_status wanted;
    const char *has; /* in the body, or in why not */
} answers[] = {
    { "one version", "[" SAMPLE("") "]", FL_OK,
      "[[{\"tokens\":2,\"version\":7,\"digest\":\"" D1 "\"}]]" },
    { "a single sample without its list", SAMPLE(""), FL_OK, "\"texts\":[\"ok\"]" },
    { "two spans",
      "[" SAMPLE(",\"weight_versions\":[{\"version\":\"7:" D1 "\",\"start\":0,\"end\":1},"
                 "{\"version\":\"8:" D2 "\",\"start\":1,\"end\":2}]") "]",
      FL_OK,
      "[[{\"tokens\":1,\"version\":7,\"digest\":\"" D1
      "\"},{\"tokens\":1,\"version\":8,\"digest\":\"" D2 "\"}]]" },
    { "spans with a hole",
      "[" SAMPLE(",\"weight_versions\":[{\"version\":\"7:" D1 "\",\"start\":1,\"end\":2}]") "]",
      FL_CORRUPT, "start" },
    { "spans too short",
      "[" SAMPLE(",\"weight_versions\":[{\"version\":\"7:" D1 "\",\"start\":0,\"end\":1}]") "]",
      FL_CORRUPT, "covers 1 of 2" },
    { "spans too long",
      "[" SAMPLE(",\"weight_versions\":[{\"version\":\"7:" D1 "\",\"start\":0,\"end\":3}]") "]",
      FL_CORRUPT, "end" },
    { "a version of somebody else's",
      "[" SAMPLE(",\"weight_versions\":[{\"version\":\"41\",\"start\":0,\"end\":2}]") "]", FL_STALE,
      "'41'" },
    { "no tokens of the prompt", "[{\"text\":\"ok\"," META("") "}]", FL_UNSUPPORTED, "prompts" },
    { "tokens of the prompt by their log probabilities",
      "[{\"text\":\"ok\"," META(",\"input_token_logprobs\":[[null,3,null],[-1,4,null]]") "}]",
      FL_OK, "ok" },
    { "aborted",
      "[{\"text\":\"\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"message\":\"no "
      "room\"}}}]",
      FL_AGAIN, "no room" },
    { "none", "[]", FL_CORRUPT, "0 samples" },
    { "one too many", "[" SAMPLE("") "," SAMPLE("") "]", FL_CORRUPT, "2 samples" },
    { "a text", "\"ok\"", FL_CORRUPT, "samples" },
    { "null", "null", FL_CORRUPT, "samples" },
    { "no meta_info", "[{\"text\":\"ok\",\"prompt_token_ids\":[3]}]", FL_CORRUPT, "meta_info" },
    { "no log probabilities",
      "[{\"text\":\"ok\",\"prompt_token_ids\":[3],\"meta_info\":{\"weight_version\":\"7:" D1
      "\"}}]",
      FL_CORRUPT, "output_token_logprobs" },
    { "nothing made",
      "[{\"text\":\"\",\"prompt_token_ids\":[3],\"meta_info\":{\"output_token_logprobs\":[]}}]",
      FL_CORRUPT, "0 of answer" },
    { "a pair that is none",
      "[{\"text\":\"ok\",\"prompt_token_ids\":[3],\"meta_info\":{\"output_token_logprobs\":[[1]]}}"
      "]",
      FL_CORRUPT, "log probability" },
    { "a token that is none",
      "[{\"text\":\"ok\",\"prompt_token_ids\":[3],\"meta_info\":{\"output_token_logprobs\":[[-1,-7,"
      "null]]}}]",
      FL_CORRUPT, "output_token_logprobs" },
    { "a null log probability",
      "[{\"text\":\"ok\",\"prompt_token_ids\":[3],\"meta_info\":{\"output_token_logprobs\":[[null,"
      "7,null]]}}]",
      FL_CORRUPT, "output_token_logprobs" },
};

static void taken(void **state)
{
    (void)state;
    for (size_t i = 0; i < FL_LEN(answers); i++) {
        struct sglang_gen g = gen_of("{\"id\":\"0.1\",\"prompts\":[\"ab\"]," ASK "}");
        json_t *o = json_loads(answers[i].answer, JSON_DECODE_ANY, NULL);
        struct sglang_made m = { 0 };
        struct fl_err err = { 0 };
        enum fl_status st;

        t_true(o != NULL, "%s", answers[i].name);
        st = sglang_gen_take(&g, o, 0.5, &m, &err);
        t_int_eq(st, answers[i].wanted, "%s: %s", answers[i].name, err.text);
        if (st == FL_OK) {
            char *text = json_dumps(m.body, JSON_COMPACT);
            struct batch b;

            t_has(text, answers[i].has);
            t_has(text, "\"id\":\"0.1\"");
            t_ok(batch_read(m.blob, m.blob_bytes, BATCH_LOGPROBS, &b, &err), &err);
            t_int_eq(b.n_tokens, 4);
            t_int_eq(b.prompt_lengths[0], 2);
            t_true(b.tokens[1] == 4 && b.tokens[3] == 12 && b.logprobs[1] == 0 &&
                   b.logprobs[3] == -0.25f);
            batch_fini(&b);
            free(text);
        } else {
            t_has(err.text, answers[i].has);
            t_true(!m.body && !m.blob, "%s", answers[i].name);
        }
        json_decref(m.body);
        free(m.blob);
        json_decref(o);
        sglang_gen_fini(&g);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(versions), cmocka_unit_test(asked),
        cmocka_unit_test(seeds),    cmocka_unit_test(tokens_go_as_they_came),
        cmocka_unit_test(taken),
    };

    return t_run("sglang gen", tests);
}
