/* kernels/digest.c - the additive digest in plain C
 *
 * The tensor is cut into blocks of 256 bytes. Inside of one, each 32-bit word (little endian) is
 * multiplied by a 32-bit weight of its place, and the sum of these by a hash of the block's number:
 *
 *     lane l of the digest = sum over blocks b of hash(b, l) * sum over words m of (word + P) *
 * weight[l][m]
 *
 * where P has a 1 for each byte that is there. All of it is linear mod 2^64 in the bytes, so a
 * block may come in parts and in any order; and a changed word always changes its block's sum,
 * because an odd number times a smaller one is not 0. The inner product is 32x32 to 64 bits, which
 * vector units have. */
#include "kernels/digest_priv.h"
#include "kernels/digest_weights.h"
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

enum { BLOCK = DIGEST_BLOCK, BLOCK_WORDS = DIGEST_WORDS };
#define EACH_BYTE_ONE DIGEST_EACH_BYTE_ONE
#define word_weight digest_word_weight
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as they lie");

static uint64_t block_weight(uint64_t number, unsigned lane)
{
    uint64_t z = (number * 2 + lane + 1) * DIGEST_HASH_STEP;

    z = (z ^ (z >> 30)) * DIGEST_HASH_MUL_1;
    z = (z ^ (z >> 27)) * DIGEST_HASH_MUL_2;
    return (z ^ (z >> 31)) | 1;
}

/* A part of one block: n bytes from byte at of block number on. Words are 33 bits wide here. */
static void add_part(uint64_t digest[2], const unsigned char *run, size_t n, uint64_t number,
                     unsigned at)
{
    uint64_t sum[2] = { 0, 0 };

    while (n > 0) {
        unsigned in_word = at % 4, take = 4 - in_word < n ? 4 - in_word : (unsigned)n;
        uint32_t word = 0, there = 0;

        memcpy((char *)&word + in_word, run, take);
        memset((char *)&there + in_word, 1, take);
        for (unsigned lane = 0; lane < 2; lane++)
            sum[lane] += ((uint64_t)word + there) * word_weight[lane][at / 4];
        run += take;
        n -= take;
        at += take;
    }
    for (unsigned lane = 0; lane < 2; lane++)
        digest[lane] += sum[lane] * block_weight(number, lane);
}

/* What P adds to a whole block. */
static uint64_t whole_presence(unsigned lane)
{
    uint64_t sum = 0;

    for (unsigned m = 0; m < BLOCK_WORDS; m++)
        sum += (uint64_t)EACH_BYTE_ONE * word_weight[lane][m];
    return sum;
}

/* Whole blocks: digested, and copied to dst unless that is NULL. Plain stores:
 * those past the caches were a third slower where this was measured. */
typedef void add_blocks_fn(uint64_t digest[2], unsigned char *dst, const unsigned char *run,
                           size_t blocks, uint64_t number);

static void add_blocks_plain(uint64_t digest[2], unsigned char *dst, const unsigned char *run,
                             size_t blocks, uint64_t number)
{
    const uint64_t presence[2] = { whole_presence(0), whole_presence(1) };

    for (size_t b = 0; b < blocks; b++, run += BLOCK) {
        uint64_t sum0 = 0, sum1 = 0;
        uint32_t words[BLOCK_WORDS];

        memcpy(words, run, BLOCK);
        for (unsigned m = 0; m < BLOCK_WORDS; m++) {
            sum0 += (uint64_t)words[m] * word_weight[0][m];
            sum1 += (uint64_t)words[m] * word_weight[1][m];
        }
        if (dst)
            memcpy(dst + b * BLOCK, words, BLOCK);
        digest[0] += (sum0 + presence[0]) * block_weight(number + b, 0);
        digest[1] += (sum1 + presence[1]) * block_weight(number + b, 1);
    }
}

#if defined(__x86_64__)
#include <immintrin.h>

/* vpmuludq multiplies the even words of its operands: odd words are shifted down on both sides. */
__attribute__((target("avx2"))) static void add_blocks_avx2(uint64_t digest[2], unsigned char *dst,
                                                            const unsigned char *run, size_t blocks,
                                                            uint64_t number)
{
    const uint64_t presence[2] = { whole_presence(0), whole_presence(1) };

    for (size_t b = 0; b < blocks; b++, run += BLOCK) {
        __m256i sum[2][2] = { { _mm256_setzero_si256(), _mm256_setzero_si256() },
                              { _mm256_setzero_si256(), _mm256_setzero_si256() } };

        for (unsigned m = 0; m < BLOCK_WORDS; m += 8) {
            __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(run + 4 * m));
            __m256i odd = _mm256_srli_epi64(x, 32);

            if (dst)
                _mm256_storeu_si256((__m256i *)(void *)(dst + b * BLOCK + 4 * m), x);
            for (unsigned lane = 0; lane < 2; lane++) {
                __m256i w = _mm256_load_si256((const __m256i *)(const void *)&word_weight[lane][m]);

                sum[lane][0] = _mm256_add_epi64(sum[lane][0], _mm256_mul_epu32(x, w));
                sum[lane][1] =
                    _mm256_add_epi64(sum[lane][1], _mm256_mul_epu32(odd, _mm256_srli_epi64(w, 32)));
            }
        }
        for (unsigned lane = 0; lane < 2; lane++) {
            uint64_t part[4];

            _mm256_storeu_si256((__m256i *)(void *)part,
                                _mm256_add_epi64(sum[lane][0], sum[lane][1]));
            digest[lane] += (part[0] + part[1] + part[2] + part[3] + presence[lane]) *
                            block_weight(number + b, lane);
        }
    }
}

__attribute__((target("avx512f"))) static void add_blocks_avx512(uint64_t digest[2],
                                                                 unsigned char *dst,
                                                                 const unsigned char *run,
                                                                 size_t blocks, uint64_t number)
{
    const uint64_t presence[2] = { whole_presence(0), whole_presence(1) };
    __m512i even_w[2][4], odd_w[2][4];

    for (unsigned lane = 0; lane < 2; lane++)
        for (unsigned i = 0; i < 4; i++) {
            even_w[lane][i] = _mm512_loadu_si512(&word_weight[lane][16 * i]);
            odd_w[lane][i] = _mm512_srli_epi64(even_w[lane][i], 32);
        }
    for (size_t b = 0; b < blocks; b++, run += BLOCK) {
        __m512i sum[2][2] = { { _mm512_setzero_si512(), _mm512_setzero_si512() },
                              { _mm512_setzero_si512(), _mm512_setzero_si512() } };

        for (unsigned i = 0; i < 4; i++) {
            __m512i x = _mm512_loadu_si512(run + 64 * i), odd = _mm512_srli_epi64(x, 32);

            if (dst)
                _mm512_storeu_si512(dst + b * BLOCK + 64 * i, x);
            for (unsigned lane = 0; lane < 2; lane++) {
                sum[lane][0] = _mm512_add_epi64(sum[lane][0], _mm512_mul_epu32(x, even_w[lane][i]));
                sum[lane][1] =
                    _mm512_add_epi64(sum[lane][1], _mm512_mul_epu32(odd, odd_w[lane][i]));
            }
        }
        for (unsigned lane = 0; lane < 2; lane++) {
            __m512i all = _mm512_add_epi64(sum[lane][0], sum[lane][1]);
            uint64_t part[4];

            _mm256_storeu_si256(
                (__m256i *)(void *)part,
                _mm256_add_epi64(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1)));
            digest[lane] += (part[0] + part[1] + part[2] + part[3] + presence[lane]) *
                            block_weight(number + b, lane);
        }
    }
}
#endif

struct body {
    const char *name;
    add_blocks_fn *add;
};
static const struct body bodies[] = {
#if defined(__x86_64__)
    { "avx512", add_blocks_avx512 },
    { "avx2", add_blocks_avx2 },
#endif
    { "plain", add_blocks_plain },
};

static bool body_runs(const struct body *b)
{
#if defined(__x86_64__)
    if (b->add == add_blocks_avx512)
        return __builtin_cpu_supports("avx512f");
    if (b->add == add_blocks_avx2)
        return __builtin_cpu_supports("avx2");
#endif
    return b->add == add_blocks_plain;
}

static const struct body *body_here(void)
{
    static const struct body *_Atomic chosen; /* any thread may come first: all choose the same */
    const struct body *b = atomic_load_explicit(&chosen, memory_order_relaxed);

    if (!b) {
        for (b = bodies; !body_runs(b); b++)
            ;
        atomic_store_explicit(&chosen, b, memory_order_relaxed);
    }
    return b;
}

const char *kernel_digest_body(void)
{
    return body_here()->name;
}

size_t kernel_digest_bodies(void)
{
    return sizeof(bodies) / sizeof(bodies[0]);
}

static void add_with(add_blocks_fn *add, uint64_t digest[2], unsigned char *dst,
                     const unsigned char *run, size_t bytes, uint64_t first_byte)
{
    uint64_t number = first_byte / BLOCK, sum[2] = { 0, 0 };
    size_t at = first_byte % BLOCK, head = at ? (BLOCK - at < bytes ? BLOCK - at : bytes) : 0;

    if (head > 0) {
        add_part(sum, run, head, number++, (unsigned)at);
        if (dst)
            memcpy(dst, run, head);
    }
    size_t blocks = (bytes - head) / BLOCK, tail = bytes - head - blocks * BLOCK;

    if (blocks > 0)
        add(sum, dst ? dst + head : NULL, run + head, blocks, number);
    if (tail > 0) {
        add_part(sum, run + bytes - tail, tail, number + blocks, 0);
        if (dst)
            memcpy(dst + bytes - tail, run + bytes - tail, tail);
    }
    digest[0] += sum[0];
    digest[1] += sum[1];
}

void kernel_digest_add(uint64_t digest[2], const void *run, size_t bytes, uint64_t first_byte)
{
    add_with(body_here()->add, digest, NULL, run, bytes, first_byte);
}

void kernel_digest_copy(uint64_t digest[2], void *dst, const void *run, size_t bytes,
                        uint64_t first_byte)
{
    add_with(body_here()->add, digest, dst, run, bytes, first_byte);
}

bool kernel_digest_with(size_t body, uint64_t digest[2], void *dst, const void *run, size_t bytes,
                        uint64_t first_byte)
{
    if (!body_runs(&bodies[body]))
        return false;
    add_with(bodies[body].add, digest, dst, run, bytes, first_byte);
    return true;
}
