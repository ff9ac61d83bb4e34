/* worker/roles/drv_made.h - one generation over several engines: parts, and the whole they make
 *
 * Prompts go out in parts, a few to each engine at a time, so that a slow one gets fewer; what an
 * engine did not answer is asked again of another. The result does not depend on who made what. */
#pragma once
#include "worker/roles/driver.h"

struct drv_part { /* prompts from..to of the job, and what came for them */
    uint32_t from, to;
    bool asked, there;
    uint32_t failed; /* so often an engine failed in it, and lived on */
    int32_t *tokens, *lengths, *prompt_lengths;
    float *logprobs;
    char **texts;
    uint64_t *versions;
    uint32_t n_samples, n_tokens, odd_digests;
    double idle_s;
    uint32_t engine;
};
struct drv_parts { struct drv_part *parts; uint32_t n, left; };

enum fl_status drv_parts_cut(struct drv_parts *p, uint32_t n_prompts, uint32_t engines,
                             struct fl_err *err);
void drv_parts_fini(struct drv_parts *p);
/* The body of one `generate`; free(). */
char *drv_part_body(const struct drv_job *j, const struct drv_part *p, uint32_t number);
/* digest: of job->version, as in a span; "" not known. FL_INVALID: the answer is not what was asked. */
enum fl_status drv_part_take(const struct drv_job *j, struct drv_part *p,
                             const struct furlong_answer *a, const char *digest, struct fl_err *err);
enum fl_status drv_parts_join(struct drv_parts *p, uint32_t engines, struct drv_made *out,
                              struct fl_err *err);
