/* Every build of the kernels against plain loops in double, and against each other bit by bit. */
#include "tests/t.h"

#include "worker/roles/mat.h"
#include "worker/roles/rng.h"

#include <math.h>
#include <stdlib.h>

enum { MOST = 70 * 70 };

static void fill(float *x, size_t n, uint32_t stream)
{
    rng_fill(x, n, 2, 7, stream);
}

static const struct { size_t m, k, n; } sizes[] = {
    { 1, 1, 1 }, { 1, 8, 4 }, { 3, 16, 16 }, { 5, 7, 33 }, { 17, 20, 19 }, { 64, 64, 48 }, { 2, 70, 3 },
};

static void products(void **state)
{
    static float a[MOST], w[MOST], b[MOST], c[MOST], t[MOST], first[3][MOST];
    size_t n_kinds;
    const struct mat_ops *const *kinds = mat_all(&n_kinds);

    (void)state;
    for (size_t s = 0; s < sizeof(sizes) / sizeof(*sizes); s++)
        for (size_t kind = 0; kind < n_kinds; kind++) {
            size_t m = sizes[s].m, k = sizes[s].k, n = sizes[s].n;
            const struct mat_ops *mat = kinds[kind];

            fill(a, m * k, 1);
            fill(w, n * k, 2);
            fill(b, k * n, 3);
            fill(c, m * n, 4);
            mat->nt(c, a, w, m, k, n);
            for (size_t i = 0; i < m; i++)
                for (size_t j = 0; j < n; j++) {
                    double sum = 0;

                    for (size_t x = 0; x < k; x++)
                        sum += (double)a[i * k + x] * (double)w[j * k + x];
                    t_true(fabs((double)c[i * n + j] - sum) < 1e-4, "%s nt %zu", mat->name, s);
                }
            if (kind == 0)
                memcpy(first[0], c, sizeof(c));
            t_mem_eq(c, first[0], m * n * sizeof(float), "%s nt %zu", mat->name, s);

            for (int more = 0; more < 2; more++) { /* set, then add the same */
                mat->nn(c, a, b, m, k, n, more);
                for (size_t i = 0; i < m; i++)
                    for (size_t j = 0; j < n; j++) {
                        double sum = 0;

                        for (size_t x = 0; x < k; x++)
                            sum += (double)a[i * k + x] * (double)b[x * n + j];
                        t_true(fabs((double)c[i * n + j] - sum * (1 + more)) < 2e-4, "%s nn %zu",
                               mat->name, s);
                    }
            }
            if (kind == 0)
                memcpy(first[1], c, sizeof(c));
            t_mem_eq(c, first[1], m * n * sizeof(float), "%s nn %zu", mat->name, s);

            fill(t, k * n, 5);
            mat->tn(t, a, c, m, k, n); /* c as b[m,n] */
            if (kind == 0)
                memcpy(first[2], t, sizeof(t));
            t_mem_eq(t, first[2], k * n * sizeof(float), "%s tn %zu", mat->name, s);
            fill(b, k * n, 5);
            for (size_t i = 0; i < k; i++)
                for (size_t j = 0; j < n; j++) {
                    double sum = (double)b[i * n + j];

                    for (size_t x = 0; x < m; x++)
                        sum += (double)a[x * k + i] * (double)c[x * n + j];
                    t_true(fabs((double)t[i * n + j] - sum) < 1e-2, "%s tn %zu", mat->name, s);
                }
        }
}

/* A row's result must not depend on the rows that are computed with it. */
static void rows_alone(void **state)
{
    static float a[9 * 64], w[64 * 64], together[9 * 64], alone[64];
    const struct mat_ops *mat = mat_pick();

    (void)state;
    fill(a, 9 * 64, 1);
    fill(w, 64 * 64, 2);
    mat->nt(together, a, w, 9, 64, 64);
    for (size_t r = 0; r < 9; r++) {
        mat->nt(alone, a + r * 64, w, 1, 64, 64);
        t_mem_eq(alone, together + r * 64, sizeof(alone), "row %zu", r);
    }
}

static void exponential(void **state)
{
    size_t n_kinds;
    const struct mat_ops *const *kinds = mat_all(&n_kinds);
    enum { N = 20011 };
    static float x[N], y[N];

    (void)state;
    for (size_t kind = 0; kind < n_kinds; kind++) {
        for (int i = 0; i < N; i++)
            x[i] = -90.f + 180.f * (float)i / N;
        kinds[kind]->exp(y, x, N);
        for (int i = 0; i < N; i++) {
            double want = exp((double)x[i]);

            if (x[i] < -87.f)
                t_true(y[i] == 0.f, "%g", (double)x[i]);
            else if (x[i] < 88.f)
                t_true(fabs((double)y[i] - want) <= 2e-7 * want, "exp(%g) is %g, not %g",
                       (double)x[i], (double)y[i], want);
            else
                t_true(isfinite(y[i]), "exp(%g)", (double)x[i]);
        }
        float odd[3] = { 0, -INFINITY, 1 };

        kinds[kind]->exp(odd, odd, 3);
        t_true(odd[0] == 1.f && odd[1] == 0.f && fabsf(odd[2] - 2.7182818f) < 1e-6f);
    }
}

/* The known answers of the Random123 distribution for philox4x32-10. */
static void philox(void **state)
{
    static const struct { uint32_t c[4], k[2], want[4]; } rows[] = {
        { { 0 }, { 0 }, { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 } },
        { { ~0u, ~0u, ~0u, ~0u }, { ~0u, ~0u }, { 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd } },
        { { 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344 },
          { 0xa4093822, 0x299f31d0 },
          { 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 } },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        uint32_t out[4];

        rng_philox(rows[i].c, rows[i].k, out);
        for (int j = 0; j < 4; j++)
            t_int_eq(out[j], rows[i].want[j], "row %zu word %d", i, j);
    }
}

static void numbers(void **state)
{
    uint32_t order[100], seen[100] = { 0 };
    double mean = 0;

    (void)state;
    for (uint32_t i = 0; i < 4096; i++) {
        float u = rng_uniform(3, RNG_SAMPLE, 5, i, 0);

        t_true(u >= 0 && u < 1);
        mean += (double)u / 4096;
    }
    t_true(fabs(mean - 0.5) < 0.02, "%g", mean);
    t_true(rng_uniform(3, RNG_SAMPLE, 5, 1, 0) != rng_uniform(4, RNG_SAMPLE, 5, 1, 0), "seed");
    t_true(rng_uniform(3, RNG_SAMPLE, 5, 1, 0) != rng_uniform(3, RNG_SAMPLE, 6, 1, 0), "step");
    t_true(rng_uniform(3, RNG_SAMPLE, 5, 1, 0) != rng_uniform(3, RNG_SAMPLE, 5, 1, 1), "position");
    rng_shuffle(order, 100, 1, 0);
    for (int i = 0; i < 100; i++)
        seen[order[i]]++;
    for (int i = 0; i < 100; i++)
        t_int_eq(seen[i], 1, "%d", i);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(products), cmocka_unit_test(rows_alone), cmocka_unit_test(exponential),
        cmocka_unit_test(philox),   cmocka_unit_test(numbers),
    };

    return t_run("mat", tests);
}
