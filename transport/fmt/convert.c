#include "transport/fmt/convert.h"

/* Shifted into f32's place an f16 has an exponent that is 112 too small; multiplying by 2^112 puts
 * that right, for subnormals too, and leaves infinities and NaN to be seen by their exponent. */
float fmt_f32_of_f16(uint16_t h)
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

uint16_t fmt_f16_of_f32(float f)
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
        float half = 0.5f;

        memcpy(&f, &bits, sizeof(f));
        f += half;
        memcpy(&bits, &f, sizeof(bits));
        out = bits - 0x3f000000;
    }
    return (uint16_t)(sign | out);
}

void fmt_bf16_from_f32(uint16_t *dst, const float *src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = fmt_bf16_of_f32(src[i]);
}

void fmt_f32_from_bf16(float *dst, const uint16_t *src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = fmt_f32_of_bf16(src[i]);
}

void fmt_f16_from_f32(uint16_t *dst, const float *src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = fmt_f16_of_f32(src[i]);
}

void fmt_f32_from_f16(float *dst, const uint16_t *src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = fmt_f32_of_f16(src[i]);
}
