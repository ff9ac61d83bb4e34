/* worker/roles/learner.h - one rank's share of a training step, and the step itself
 *
 * The gradient of a minibatch is a sum over 8 shards (sample s is in shard s mod 8), added in a tree
 * whose order is the same for 1, 2, 4 and 8 ranks and for any number of threads: each of these
 * gives the same weights, bit by bit. Other numbers of ranks take a multiple of 8 shards. */
#pragma once
#include "common/base/base.h"
#include "worker/roles/batch.h"
#include "worker/roles/model.h"
#include "worker/roles/policy.h"

struct learner_opts {
    float lr, beta1, beta2, eps, decay, clip_grad, inv_temp;
    struct policy_opts policy;
    uint32_t rank, world, threads;
};
/* What a minibatch's sums travel in: the gradient, then these, in one buffer of floats. */
struct learner_sums { double loss, abs_diff, entropy, tokens, clipped; };
struct learner_part { uint32_t from, to; }; /* samples of the batch: one minibatch */

struct learner; /* gradient buffers, activations; the moments are the caller's */
enum fl_status learner_create(const struct model_layout *l, const struct learner_opts *o,
                              struct learner **out, struct fl_err *err);
void learner_destroy(struct learner *k);
FL_AUTO_DEFINE(learner)
size_t learner_drop(struct learner *k); /* gives back all that a step needs; comes by itself again */

/* This rank's sum over one minibatch, good until the next call. *bytes: the same at all ranks. */
enum fl_status learner_gradient(struct learner *k, float *const *w, const struct batch *b,
                                struct learner_part part, void **sum, size_t *bytes,
                                struct fl_err *err);
/* sums of all ranks in order of rank become one, in sums[0]. */
void learner_fold(void *const *sums, uint32_t n, size_t bytes);
/* Adam with the whole minibatch's sum. t: how many steps there were, this one included.
 * m, v: buffers of layout->floats. */
void learner_apply(struct learner *k, void *sum, uint64_t t, float *const *w, float *m, float *v,
                   struct learner_sums *out, double *grad_norm);
/* Mean of |log probability here - of the engine| over all answers' tokens of this rank's samples. */
enum fl_status learner_compare(struct learner *k, float *const *w, const struct batch *b,
                               struct learner_sums *add, struct fl_err *err);
