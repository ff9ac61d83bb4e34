/* the digest is the same over any split, order and body, and sees what went wrong */
#include <stdlib.h>
#include "kernels/digest_priv.h"
#include "tests/t.h"

enum { BYTES = 20000, PAD = 64 };
static unsigned char data[BYTES + PAD];

static void fill(unsigned char *at, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        at[i] = (unsigned char)(t_random(&seed) >> 32);
}

/* Straight from the definition, a byte at a time: the weight of a place is what a lone byte there
 * gives. */
static void by_bytes(uint64_t digest[2], const unsigned char *run, size_t n, uint64_t first)
{
    for (size_t i = 0; i < n; i++)
        kernel_digest_with(kernel_digest_bodies() - 1, digest, NULL, run + i, 1, first + i);
}

static void bodies_agree(void **state)
{
    static unsigned char to[BYTES + PAD];
    uint64_t seed = 7;

    (void)state;
    for (unsigned round = 0; round < 200; round++) {
        size_t at = t_random(&seed) % PAD, n = t_random(&seed) % (BYTES / (1 + round % 20));
        uint64_t first = t_random(&seed) >> (round % 50), want[2] = { 1, 2 };

        by_bytes(want, data + at, n, first);
        for (size_t b = 0; b < kernel_digest_bodies(); b++) {
            uint64_t got[2] = { 1, 2 }, copied[2] = { 1, 2 };

            memset(to, 0, sizeof(to));
            if (!kernel_digest_with(b, got, NULL, data + at, n, first))
                continue; /* not on this machine */
            kernel_digest_with(b, copied, to + round % PAD, data + at, n, first);
            t_mem_eq(got, want, sizeof(want), "body %zu, %zu bytes at %zu, first %llx", b, n, at,
                     (unsigned long long)first);
            t_mem_eq(copied, want, sizeof(want), "copy, body %zu, %zu bytes", b, n);
            t_mem_eq(to + round % PAD, data + at, n, "body %zu, %zu bytes", b, n);
            t_true(to[round % PAD + n] == 0, "writes past the end");
        }
    }
}

static void any_split_any_order(void **state)
{
    uint64_t seed = 11, whole[2] = { 0 };

    (void)state;
    kernel_digest_add(whole, data, BYTES, 0);
    for (unsigned round = 0; round < 100; round++) {
        size_t cuts[20], n = 0, at = 0;
        uint64_t sum[2] = { 0 };

        while (n < FL_LEN(cuts) - 1 && at < BYTES) {
            cuts[n++] = at;
            at += 1 + t_random(&seed) % (BYTES / 10);
        }
        for (size_t i = 0; i < n; i++) { /* odd ones first, from behind */
            size_t k = i < n / 2 ? n - 1 - 2 * i - (n % 2) : 2 * (i - n / 2);
            size_t end = k + 1 < n ? cuts[k + 1] : BYTES;

            kernel_digest_add(sum, data + cuts[k], end - cuts[k], cuts[k]);
        }
        t_mem_eq(sum, whole, sizeof(sum), "round %u of %zu parts", round, n);
    }
}

struct accident {
    const char *name;
    void (*happens)(unsigned char *copy);
};
static void one_bit(unsigned char *c)
{
    c[BYTES / 2] ^= 1;
}
static void top_bit(unsigned char *c)
{
    c[3] ^= 0x80;
}
static void words_swapped(unsigned char *c)
{
    memcpy(c, data + 4, 4);
    memcpy(c + 4, data, 4);
}
static void blocks_swapped(unsigned char *c)
{
    memcpy(c + 256, data + 512, 256);
    memcpy(c + 512, data + 256, 256);
}
static void shifted(unsigned char *c)
{
    memmove(c + 2, data, BYTES - 2);
}
static void zeroed(unsigned char *c)
{
    memset(c + 4096, 0, 4096);
}
static void same_delta(
    unsigned char *c) /* every 32-bit word moves by the same amount, up and down */
{
    for (size_t i = 0; i < BYTES; i += 4)
        c[i] = (unsigned char)(c[i] + (i % 8 ? 1 : -1));
}
static const struct accident accidents[] = {
    { "one bit", one_bit },
    { "top bit of a word", top_bit },
    { "two words swapped", words_swapped },
    { "two blocks swapped", blocks_swapped },
    { "shifted by an element", shifted },
    { "a page of zeros", zeroed },
    { "all words moved alike", same_delta },
};

static void accidents_are_seen(void **state)
{
    static unsigned char copy[BYTES];
    uint64_t was[2] = { 0 };

    (void)state;
    kernel_digest_add(was, data, BYTES, 0);
    for (size_t i = 0; i < FL_LEN(accidents); i++) {
        uint64_t is[2] = { 0 };

        memcpy(copy, data, BYTES);
        accidents[i].happens(copy);
        kernel_digest_add(is, copy, BYTES, 0);
        t_true(is[0] != was[0] && is[1] != was[1], "%s", accidents[i].name);
    }
}

static void zeros_that_are_missing_are_seen(void **state)
{
    static const unsigned char zeros[BYTES];
    uint64_t all[2] = { 0 }, less[2] = { 0 };

    (void)state;
    kernel_digest_add(all, zeros, BYTES, 0);
    kernel_digest_add(less, zeros, BYTES - 300, 0);
    t_true(all[0] != less[0] && all[1] != less[1], "the last run of zeros was left out");
    kernel_digest_add(less, zeros, 300, BYTES - 300);
    t_mem_eq(all, less, sizeof(all), "and brought later");
}

/* Written down once: another machine, a later build and device code must give the same. */
static void known_value(void **state)
{
    unsigned char ramp[1000];
    uint64_t d[2] = { 0 };

    (void)state;
    for (size_t i = 0; i < sizeof(ramp); i++)
        ramp[i] = (unsigned char)(i * 7);
    kernel_digest_add(d, ramp, sizeof(ramp), 123456789);
    t_true(d[0] == 0x2e24c1476e0479d0ull && d[1] == 0x7ed636883dd12d58ull, "%016llx %016llx",
           (unsigned long long)d[0], (unsigned long long)d[1]);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(bodies_agree),       cmocka_unit_test(any_split_any_order),
        cmocka_unit_test(accidents_are_seen), cmocka_unit_test(zeros_that_are_missing_are_seen),
        cmocka_unit_test(known_value),
    };

    fill(data, sizeof(data), 3);
    printf("# body here: %s\n", kernel_digest_body());
    return t_run("digest", tests);
}
