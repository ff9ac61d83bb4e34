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
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

enum { BLOCK = 256, BLOCK_WORDS = BLOCK / 4 };
#define EACH_BYTE_ONE 0x01010101u
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as they lie");

static const uint32_t word_weight[2][BLOCK_WORDS] __attribute__((aligned(64))) = {
    /* odd, no two alike; any such numbers would do */
    /* clang-format off */
    {
        0x1c6cc88f, 0xee091ec7, 0xb79fa65b, 0x7438cf91, 0xffea4e79, 0x0d3cc25f, 0x4964c4b7, 0x4573f239,
        0x397bc495, 0x49aea409, 0x14d0f261, 0xcfe4e465, 0xcfdc7837, 0xbb8e1c59, 0xf3ebe1f5, 0xda12bc3b,
        0xf90579a9, 0xd1a0c60d, 0xc32ab1c1, 0x2f743a89, 0xb1bfe089, 0xca297f17, 0xb4b3eced, 0x4624234f,
        0xf8c8c221, 0x710e0a75, 0x80377c63, 0xd57f626b, 0x6350cc3f, 0xfa6c03f5, 0x6342cd67, 0x9b335c11,
        0xfcebcd67, 0xdf54f099, 0xe227d8fb, 0x06abda47, 0x864fd717, 0x01eb5dc9, 0x04737f67, 0x370fabdf,
        0x9d4be325, 0x97ab310d, 0x3d5362c7, 0x9b4b69cb, 0xce3d5517, 0xcb54872d, 0x344781a5, 0x7bfe8017,
        0x0d5035a9, 0x00dac5b1, 0x113d28d3, 0x0c865bc9, 0xf7748cdb, 0x94a4106b, 0x76b1136f, 0xcfb224f9,
        0xd15089ff, 0x164eae3f, 0xd62bcdb9, 0xedc0380f, 0x8b3a3357, 0xcd301bb1, 0xd52d8de3, 0x1cc6b129,
    },
    {
        0xd74df699, 0xa4af4991, 0x1053aac1, 0x37321849, 0x9450bc81, 0x52eaaef5, 0x4bcf0ffd, 0x1e9d24d1,
        0x0d3091a3, 0x7283ce77, 0xc594e0f3, 0x2e957e33, 0xd8e1cfdd, 0xfcdee90f, 0x30ad4d23, 0x4cec3cc5,
        0xf49959b9, 0x77be496d, 0x3a8d3719, 0xcd6580d5, 0x672414d3, 0xf7739ea3, 0x44518c55, 0x5d7b04a1,
        0x9a0eb1bd, 0x3f8cd74d, 0x2e255493, 0x0c094cab, 0xbe1ff9f3, 0x2e41b417, 0x788158a3, 0x70974551,
        0xa126bd65, 0x72f53eb7, 0x4d88f4bf, 0xb9a9d875, 0x3d4af3fb, 0x5233c4f5, 0x3699ed65, 0x6b47c557,
        0xe9927e5f, 0x16da408f, 0xf2daa615, 0x21b0b10f, 0xc86bdbb5, 0xc6a0ec43, 0xae696251, 0x06432021,
        0x432fd641, 0xe10c292b, 0x06d4963f, 0xb1a6f163, 0xfb84cae1, 0x179ff5a1, 0x310e90a5, 0x98528275,
        0x90b9bc7f, 0x73ccdb9d, 0x5c2e420f, 0x64904f61, 0x2998b0a1, 0xd89a986d, 0x6e7e0621, 0xe6f31407,
    },
    /* clang-format on */
};

static uint64_t block_weight(uint64_t number, unsigned lane)
{
    uint64_t z = (number * 2 + lane + 1) * 0x9e3779b97f4a7c15ull;

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
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
