/* kernels/half.h - bf16 and f16 against f32, in plain C, round to nearest even
 *
 * NaN stays NaN (quiet, its upper payload kept), infinities stay, too large becomes infinity, f16's
 * subnormals are exact. move.cu gives the same bits. */
#pragma once
#include <stdint.h>
#include <string.h>

static inline float kernel_f32_of_bf16(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float f;

    memcpy(&f, &bits, sizeof(f));
    return f;
}

static inline uint16_t kernel_bf16_of_f32(float f)
{
    uint32_t bits;

    memcpy(&bits, &f, sizeof(bits));
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40; /* rounding could carry a NaN into infinity or past it */

    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

/* Shifted into f32's place an f16 has an exponent that is 112 too small; multiplying by 2^112 puts
 * that right, for subnormals too, and leaves infinities and NaN to be seen by their exponent. */
static inline float kernel_f32_of_f16(uint16_t h)
{
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t scale_bits = 0x77800000u; /* 2^112 */
    float f, scale;

    memcpy(&f, &bits, sizeof(f));
    memcpy(&scale, &scale_bits, sizeof(scale));
    f *= scale;
    memcpy(&bits, &f, sizeof(bits));
    if ((h & 0x7c00) == 0x7c00)
        bits = 0x7f800000u | (uint32_t)(h & 0x3ff) << 13;
    bits |= sign;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static inline uint16_t kernel_f16_of_f32(float f)
{
    uint32_t bits, sign, out;

    memcpy(&bits, &f, sizeof(bits));
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) {
        out = 0x7e00 | (bits >> 13 & 0x3ff);
    } else if (bits >= 0x477ff000) { /* 65520 and more round to infinity */
        out = 0x7c00;
    } else if (bits >= 0x38800000) { /* normal in f16: round the 13 bits that go */
        out = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
    } else { /* adding 2^-1 of the last place makes the hardware round to a multiple of 2^-24 */
        memcpy(&f, &bits, sizeof(f));
        f += 0.5f;
        memcpy(&bits, &f, sizeof(bits));
        out = bits - 0x3f000000;
    }
    return (uint16_t)(sign | out);
}
