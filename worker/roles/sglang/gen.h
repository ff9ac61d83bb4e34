/* worker/roles/sglang/gen.h - one `generate` call: from docs/roles.md to SGLang's /generate and
 * back
 *
 * No I/O: what goes out and what came in are texts, so tests need no server. Prompts are repeated n
 * times instead of asking SGLang for n: the order of the answers is then ours, and every sample has
 * a seed of its own. */
#pragma once
#include <furlong/furlong.h>
#include <jansson.h>

#include "common/base/base.h"

/* How a version is told to SGLang and comes back with every sample: "NUMBER:DIGEST". */
enum { SGLANG_VERSION_MAX = 64 };
void sglang_version_print(uint64_t version, const uint64_t digest[2], char out[SGLANG_VERSION_MAX]);
bool sglang_version_parse(const char *text, uint64_t *version, char digest[33]);

struct sglang_serves {
    uint64_t version; /* FURLONG_NO_VERSION: none */
    uint64_t digest[2];
};
struct sglang_gen {
    char *id;
    json_t *prompts; /* texts, or lists of tokens */
    bool tokens_given;
    uint32_t n_prompts, n, max_new, step, first;
    uint64_t seed;
    double temperature;
};
/* FL_STALE: asks for a version that is not served, both numbers in err; FL_INVALID names the
 * member. */
enum fl_status sglang_gen_read(const void *body, size_t body_bytes, const void *blob,
                               size_t blob_bytes, const struct sglang_serves *now,
                               struct sglang_gen *out, struct fl_err *err);
void sglang_gen_fini(struct sglang_gen *g);
/* NULL: no memory. prompt_logprobs: for releases that do not know return_prompt_token_ids, whose
 * prompt tokens come with their log probabilities; free() it. */
char *sglang_gen_body(const struct sglang_gen *g, bool prompt_logprobs);

struct sglang_made {
    json_t *body; /* json_decref() */
    void *blob;   /* free() */
    size_t blob_bytes;
};
/* FL_UNSUPPORTED: no tokens of the prompts in it: ask again with prompt_logprobs. FL_AGAIN: a
 * sample was aborted. FL_STALE: a version that we never gave it. FL_CORRUPT: names the sample and
 * the member. */
enum fl_status sglang_gen_take(const struct sglang_gen *g, const json_t *answer, double idle_s,
                               struct sglang_made *out, struct fl_err *err);
