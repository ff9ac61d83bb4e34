/* worker/roles/policy.h - group-relative policy gradient with a clipped ratio
 *
 * Pure arithmetic. A group is the samples of one prompt; a sample's advantage is how much better it
 * did than its group. Loss: the mean over samples of the mean over a sample's tokens of
 * -min(ratio * A, clip(ratio, 1 - eps_low, 1 + eps_high) * A) - entropy_coef * entropy. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct policy_opts { float eps_low, eps_high, entropy_coef; };

/* (reward - mean) / (deviation + 1e-6), or without the division; all equal: zeros. */
void policy_advantages(const float *rewards, uint32_t n, bool divide, float *out);

/* One sample. scale: 1 / samples of the whole minibatch. d_*: derivatives of the loss. */
struct policy_sample { const float *logp, *old_logp, *entropy; uint32_t n; float advantage; };
struct policy_sum { double loss, abs_diff, entropy; uint64_t tokens, clipped; };
void policy_loss(const struct policy_opts *o, const struct policy_sample *s, double scale,
                 float *d_logp, float *d_entropy, struct policy_sum *sum);
