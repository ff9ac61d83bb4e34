/* worker/roles/rng.h - random numbers by address, not by history
 *
 * Philox 4x32 with ten rounds: a number is a pure function of (seed, what it is for, step, sample,
 * position), so the same run draws the same numbers whichever engine, batch or rank asks. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum rng_use { RNG_INIT = 1, RNG_SHUFFLE = 2, RNG_SAMPLE = 3 };

void rng_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);
/* Uniform in [0, 1) with 24 bits: exact in a float. */
float rng_uniform(uint64_t seed, enum rng_use use, uint32_t step, uint32_t sample, uint32_t at);
/* n numbers uniform in [-bound, bound); stream: which tensor. */
void rng_fill(float *x, size_t n, float bound, uint64_t seed, uint32_t stream);
/* A permutation of 0..n-1, each order equally likely up to 2^-24. */
void rng_shuffle(uint32_t *order, uint32_t n, uint64_t seed, uint32_t epoch);
