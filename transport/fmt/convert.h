/* transport/fmt/convert.h - bf16 and f16 against f32, in plain C, round to nearest even
 *
 * NaN stays NaN (quiet, its upper payload kept), infinities stay, too large becomes infinity, f16's
 * subnormals are exact. Loops that the compiler turns into vector code. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline float fmt_f32_of_bf16(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float f;

    memcpy(&f, &bits, sizeof(f));
    return f;
}

static inline uint16_t fmt_bf16_of_f32(float f)
{
    uint32_t bits;

    memcpy(&bits, &f, sizeof(bits));
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40; /* rounding could carry a NaN into infinity or past it */

    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

float fmt_f32_of_f16(uint16_t h);
uint16_t fmt_f16_of_f32(float f);

/* n values; dst and src do not overlap. */
void fmt_bf16_from_f32(uint16_t *dst, const float *src, size_t n);
void fmt_f32_from_bf16(float *dst, const uint16_t *src, size_t n);
void fmt_f16_from_f32(uint16_t *dst, const float *src, size_t n);
void fmt_f32_from_f16(float *dst, const uint16_t *src, size_t n);
