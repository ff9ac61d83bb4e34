/* bf16 and f16 against f32: every value there and back, and rounding held against a search for the
 * nearest */
#include <math.h>

#include "kernels/half.h"
#include "tests/t.h"

static uint32_t bits_of(float f)
{
    uint32_t b;

    memcpy(&b, &f, sizeof(b));
    return b;
}

static float of_bits(uint32_t b)
{
    float f;

    memcpy(&f, &b, sizeof(f));
    return f;
}

static void every_value_comes_back(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x10000; h++) {
        float b = kernel_f32_of_bf16((uint16_t)h), f = kernel_f32_of_f16((uint16_t)h);
        uint32_t nan_b = (h & 0x7fff) > 0x7f80, nan_f = (h & 0x7fff) > 0x7c00;

        if (nan_b)
            t_true(isnan(b) && (kernel_bf16_of_f32(b) & 0x7fff) > 0x7f80, "bf16 %04x", h);
        else
            t_int_eq(kernel_bf16_of_f32(b), h, "bf16 %04x", h);
        if (nan_f)
            t_true(isnan(f) && (kernel_f16_of_f32(f) & 0x7fff) > 0x7c00, "f16 %04x", h);
        else
            t_int_eq(kernel_f16_of_f32(f), h, "f16 %04x", h);
    }
}

/* Of the two neighbours the nearer one; of equally near ones the even one. */
static void nearest(const char *name, float x, uint16_t got, float (*back)(uint16_t),
                    uint16_t infinity)
{
    uint16_t mag = got & 0x7fff;
    double is = fabs((double)back(mag)), want = fabs((double)x);
    double below = mag ? fabs((double)back((uint16_t)(mag - 1))) : -1;
    double above = mag < infinity ? fabs((double)back((uint16_t)(mag + 1))) : INFINITY;

    t_int_eq(got >> 15, bits_of(x) >> 31, "%s of %a: sign", name, (double)x);
    if (mag == infinity) { /* halfway from the largest to the next one that there would be */
        double largest = below, step = largest - (double)back((uint16_t)(infinity - 2));

        t_true(want >= largest + step / 2, "%s of %a is infinite", name, (double)x);
        return;
    }
    if (mag + 1 == infinity)
        above = is + (is - below);
    t_true(want - is <= above - want || isinf(above), "%s of %a: next above is nearer", name,
           (double)x);
    t_true(below < 0 || is - want <= want - below, "%s of %a: next below is nearer", name,
           (double)x);
    if (want - is == above - want || (below >= 0 && is - want == want - below))
        t_int_eq(mag & 1, 0, "%s of %a: a tie goes to even", name, (double)x);
}

static void rounds_to_nearest_even(void **state)
{
    uint64_t seed = 77;

    (void)state;
    for (unsigned i = 0; i < 300000; i++) {
        uint32_t b = (uint32_t)(t_random(&seed) >> 20);

        if (i % 3 == 0) /* ties and their neighbours, of both kinds */
            b = (b & 0xffff0000u) | (0x7fff + i % 4);
        if (i % 3 == 1)
            b = (b & 0xffffe000u) | (0xfff + i % 4);
        if (i % 5 == 0) /* where f16 is subnormal */
            b = (b & 0x80ffffffu) | (0x33 + i % 6) << 24;
        float x = of_bits(b);

        if (isnan(x) || isinf(x))
            continue;
        nearest("bf16", x, kernel_bf16_of_f32(x), kernel_f32_of_bf16, 0x7f80);
        nearest("f16", x, kernel_f16_of_f32(x), kernel_f32_of_f16, 0x7c00);
    }
}

struct known {
    float f;
    uint16_t bf16, f16;
};
static const struct known known[] = {
    { 0.0f, 0, 0 },
    { -0.0f, 0x8000, 0x8000 },
    { 1.0f, 0x3f80, 0x3c00 },
    { -2.5f, 0xc020, 0xc100 },
    { 65504.0f, 0x4780, 0x7bff },
    { 65519.0f, 0x4780, 0x7bff },
    { 65520.0f, 0x4780, 0x7c00 },
    { 5.9604645e-8f, 0x3380, 0x0001 },
    { 2.9802322e-8f, 0x3300, 0x0000 },
    { 3.0e38f, 0x7f62, 0x7c00 },
    { INFINITY, 0x7f80, 0x7c00 },
    { -INFINITY, 0xff80, 0xfc00 },
};

static void known_values(void **state)
{
    (void)state;
    for (size_t i = 0; i < FL_LEN(known); i++) {
        t_int_eq(kernel_bf16_of_f32(known[i].f), known[i].bf16, "bf16 of %a", (double)known[i].f);
        t_int_eq(kernel_f16_of_f32(known[i].f), known[i].f16, "f16 of %a", (double)known[i].f);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_value_comes_back),
        cmocka_unit_test(rounds_to_nearest_even),
        cmocka_unit_test(known_values),
    };

    return t_run("half", tests);
}
