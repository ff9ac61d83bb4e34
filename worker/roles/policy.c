#include "worker/roles/policy.h"

#include <math.h>

void policy_advantages(const float *rewards, uint32_t n, bool divide, float *out)
{
    double mean = 0, var = 0;

    for (uint32_t i = 0; i < n; i++)
        mean += (double)rewards[i] / n;
    for (uint32_t i = 0; i < n; i++)
        var += ((double)rewards[i] - mean) * ((double)rewards[i] - mean) / n;
    double by = divide ? sqrt(var) + 1e-6 : 1;
    for (uint32_t i = 0; i < n; i++)
        out[i] = (float)(((double)rewards[i] - mean) / by);
}

void policy_loss(const struct policy_opts *o, const struct policy_sample *s, double scale,
                 float *d_logp, float *d_entropy, struct policy_sum *sum)
{
    double each = s->n ? scale / s->n : 0, a = (double)s->advantage;

    for (uint32_t i = 0; i < s->n; i++) {
        double diff = (double)s->logp[i] - (double)s->old_logp[i], ratio = exp(diff);
        double lo = 1 - (double)o->eps_low, hi = 1 + (double)o->eps_high;
        double held = ratio < lo ? lo : ratio > hi ? hi : ratio;
        bool clipped = held * a < ratio * a; /* the minimum is the held one: no slope */

        sum->loss -= each * ((clipped ? held : ratio) * a);
        sum->loss -= each * (double)o->entropy_coef * (double)s->entropy[i];
        sum->entropy += (double)s->entropy[i];
        sum->abs_diff += fabs(diff);
        sum->clipped += clipped;
        d_logp[i] = clipped ? 0 : (float)(-each * a * ratio);
        d_entropy[i] = (float)(-each * (double)o->entropy_coef);
    }
    sum->tokens += s->n;
}
