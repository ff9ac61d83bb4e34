/* worker/roles/batch.h - the bulk of `train` and `generate`: samples as a safetensors image
 *
 *   tokens I32 [T], lengths I32 [S], prompt_lengths I32 [S], logprobs F32 [T], advantages F32 [S]
 *
 * docs/roles.md says who sends which. Reading checks that the parts fit together. */
#pragma once
#include "common/base/base.h"

struct batch {
    uint32_t n_tokens, n_samples;
    const int32_t *tokens, *lengths, *prompt_lengths;
    const float *logprobs, *advantages; /* NULL: not in it */
    uint32_t *starts;                   /* n_samples + 1; made by reading */
    void *keep;
};
/* *out: free(). What is NULL in b is left out. */
enum fl_status batch_write(const struct batch *b, void **out, size_t *bytes, struct fl_err *err);
enum { BATCH_LOGPROBS = 1, BATCH_ADVANTAGES = 2 }; /* what must be there */
/* The image is borrowed for as long as the batch. FL_INVALID, FL_CORRUPT: err says which part. */
enum fl_status batch_read(const void *image, size_t bytes, unsigned need, struct batch *out,
                          struct fl_err *err);
void batch_fini(struct batch *b);
