#include "worker/roles/rng.h"

enum { ROUNDS = 10 };

void rng_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];

    for (int i = 0; i < ROUNDS; i++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;

        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

static float unit(uint32_t bits)
{
    return (float)(bits >> 8) * 0x1p-24f;
}

float rng_uniform(uint64_t seed, enum rng_use use, uint32_t step, uint32_t sample, uint32_t at)
{
    uint32_t out[4];

    rng_philox((uint32_t[4]){ at, sample, step, use },
               (uint32_t[2]){ (uint32_t)seed, (uint32_t)(seed >> 32) }, out);
    return unit(out[0]);
}

void rng_fill(float *x, size_t n, float bound, uint64_t seed, uint32_t stream)
{
    uint32_t out[4];

    for (size_t i = 0; i < n; i++) {
        if (i % 4 == 0)
            rng_philox(
                (uint32_t[4]){ (uint32_t)(i / 4), (uint32_t)((uint64_t)i >> 34), stream, RNG_INIT },
                (uint32_t[2]){ (uint32_t)seed, (uint32_t)(seed >> 32) }, out);
        x[i] = (unit(out[i % 4]) * 2.f - 1.f) * bound;
    }
}

void rng_shuffle(uint32_t *order, uint32_t n, uint64_t seed, uint32_t epoch)
{
    for (uint32_t i = 0; i < n; i++)
        order[i] = i;
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j = (uint32_t)((double)rng_uniform(seed, RNG_SHUFFLE, epoch, 0, i) * i);
        uint32_t held = order[i - 1];

        order[i - 1] = order[j];
        order[j] = held;
    }
}
