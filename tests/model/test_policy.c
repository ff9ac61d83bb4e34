#include "tests/t.h"

#include "worker/roles/mat.h"
#include "worker/roles/policy.h"

#include <math.h>

static void close_to(double got, double want, const char *what)
{
    t_true(fabs(got - want) <= 1e-6 * fmax(1, fabs(want)), "%s: %.9g, not %.9g", what, got, want);
}

static void advantages(void **state)
{
    static const struct { const char *name; float r[4]; bool divide; double want[4]; } rows[] = {
        { "one of four", { 1, 0, 0, 0 }, false, { 0.75, -0.25, -0.25, -0.25 } },
        { "one of four, divided", { 1, 0, 0, 0 }, true, { 1.7320468, -0.57734894, -0.57734894, -0.57734894 } },
        { "all the same", { 1, 1, 1, 1 }, true, { 0, 0, 0, 0 } },
        { "two levels", { 2, 2, -2, -2 }, true, { 0.9999995, 0.9999995, -0.9999995, -0.9999995 } },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        float a[4];

        policy_advantages(rows[i].r, 4, rows[i].divide, a);
        for (int j = 0; j < 4; j++)
            close_to((double)a[j], rows[i].want[j], rows[i].name);
    }
}

/* By hand. eps 0.2 / 0.28; scale 1/2 (two samples), so each of two tokens weighs 1/4.
 * Ratios: e^0.1 = 1.105170918 (inside), e^0.5 = 1.648721271 (above), e^-0.5 = 0.60653066 (below). */
static void clipped_loss(void **state)
{
    static const struct {
        const char *name;
        float diff[2], advantage;
        double loss, slope[2];
        unsigned clipped;
    } rows[] = {
        { "inside", { 0, 0.1f }, 1, -(1 + 1.105170918) / 4, { -0.25, -1.105170918 / 4 }, 0 },
        { "good and too likely: held", { 0.5f, 0 }, 2, -(1.28 * 2 + 2) / 4, { 0, -0.5 }, 1 },
        { "good and too unlikely: goes on", { -0.5f, 0 }, 2, -(0.60653066 * 2 + 2) / 4, { -0.60653066 * 2 / 4, -0.5 }, 0 },
        { "bad and too unlikely: held", { -0.5f, 0 }, -1, (0.8 + 1) / 4, { 0, 0.25 }, 1 },
        { "bad and too likely: goes on", { 0.5f, 0 }, -1, (1.648721271 + 1) / 4, { 1.648721271 / 4, 0.25 }, 0 },
        { "no advantage", { 0.5f, -0.5f }, 0, 0, { 0, 0 }, 0 },
    };
    static const struct policy_opts opts = { 0.2f, 0.28f, 0 };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        float old[2] = { -1.5f, -0.7f }, logp[2] = { old[0] + rows[i].diff[0], old[1] + rows[i].diff[1] };
        float entropy[2] = { 1, 1 }, d_logp[2], d_entropy[2];
        struct policy_sample s = { logp, old, entropy, 2, rows[i].advantage };
        struct policy_sum sum = { 0 };

        policy_loss(&opts, &s, 0.5, d_logp, d_entropy, &sum);
        close_to(sum.loss, rows[i].loss, rows[i].name);
        for (int j = 0; j < 2; j++)
            close_to((double)d_logp[j], rows[i].slope[j], rows[i].name);
        t_int_eq(sum.clipped, rows[i].clipped, "%s", rows[i].name);
        t_int_eq(sum.tokens, 2);
        close_to(sum.abs_diff, fabs((double)rows[i].diff[0]) + fabs((double)rows[i].diff[1]), rows[i].name);
    }
}

static void entropy_bonus(void **state)
{
    struct policy_opts opts = { 0.2f, 0.2f, 0.1f };
    float x[1] = { -1 }, entropy[1] = { 2 }, d_logp[1], d_entropy[1];
    struct policy_sample s = { x, x, entropy, 1, 0 };
    struct policy_sum sum = { 0 };

    (void)state;
    policy_loss(&opts, &s, 1, d_logp, d_entropy, &sum);
    close_to(sum.loss, -0.2, "loss");
    close_to((double)d_entropy[0], -0.1, "slope");
}

/* First step of Adam: m = 0.1 g, v = 0.001 g^2, both corrected to g and g^2: a step of lr against
 * the sign. Second, with another gradient, by hand: m = 0.09 * 2 + 0.1 * -1 = 0.08, corrected by
 * 1 / 0.19; v = 0.999 * 0.004 + 0.001 * 1 = 0.004996, corrected by 1 / 0.001999. */
static void adam(void **state)
{
    const struct mat_ops *mat = mat_pick();
    float w[1] = { 1 }, m[1] = { 0 }, v[1] = { 0 }, g[1] = { 4 };
    struct mat_adam a = { 0.01f, 0.9f, 0.999f, 1e-8f, 0, 1 / 0.1f, 1 / 0.001f, 0.5f };

    (void)state;
    mat->adam(w, m, v, g, 1, &a); /* clipped: the gradient counts as 2 */
    close_to((double)m[0], 0.2, "m");
    close_to((double)v[0], 0.004, "v");
    close_to((double)w[0], 0.99, "first step");
    g[0] = -2;
    a.fix1 = 1 / 0.19f;
    a.fix2 = 1 / 0.001999f;
    mat->adam(w, m, v, g, 1, &a);
    close_to((double)w[0], 0.99 - 0.01 * (0.08 / 0.19) / sqrt(0.004996 / 0.001999), "second step");
    a.decay = 0.1f;
    g[0] = 0;
    float before = w[0], drift = 0.01f * (0.9f * m[0] * a.fix1) / sqrtf(0.999f * v[0] * a.fix2);

    mat->adam(w, m, v, g, 1, &a);
    close_to((double)w[0], (double)(before - drift - 0.01f * 0.1f * before), "decay");
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(advantages),
        cmocka_unit_test(clipped_loss),
        cmocka_unit_test(entropy_bonus),
        cmocka_unit_test(adam),
    };

    return t_run("policy", tests);
}
