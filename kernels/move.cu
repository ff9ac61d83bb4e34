/* kernels/move.cu - device form of kernels/move.h; every value equals the plain C twin's bit for
 * bit */
#include <stdint.h>

#define DIGEST_TABLE static __constant__
#include "kernels/digest_weights.h"

#include "kernels/move.h"

namespace {

/* SEGMENT: a warp's stretch, 32 blocks of the digest, one hash a thread. */
constexpr unsigned WARP = 32, SEGMENT = 8192;
constexpr unsigned STEPS = SEGMENT / (WARP * 16);

struct sums { uint64_t lane[2]; };

__device__ uint64_t block_weight(uint64_t number, unsigned lane)
{
    uint64_t z = (number * 2 + lane + 1) * DIGEST_HASH_STEP;

    z = (z ^ (z >> 30)) * DIGEST_HASH_MUL_1;
    z = (z ^ (z >> 27)) * DIGEST_HASH_MUL_2;
    return (z ^ (z >> 31)) | 1;
}

/* Bytes [first, first + n) of the tensor, at most one word of its blocks each time: for heads,
 * tails and odd alignment. */
__device__ void add_bytes(sums &s, const unsigned char *p, uint64_t first, unsigned n)
{
    while (n) {
        unsigned at = first % DIGEST_BLOCK, in_word = at % 4,
                 take = 4 - in_word < n ? 4 - in_word : n;
        uint32_t word = 0, there = 0;

        for (unsigned i = 0; i < take; i++) {
            word |= (uint32_t)p[i] << 8 * (in_word + i);
            there |= 1u << 8 * (in_word + i);
        }
        for (unsigned l = 0; l < 2; l++)
            s.lane[l] += ((uint64_t)word + there) * digest_word_weight[l][at / 4] *
                         block_weight(first / DIGEST_BLOCK, l);
        p += take;
        first += take;
        n -= take;
    }
}

__device__ uint16_t to_bf16(uint32_t x)
{
    if ((x & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(x >> 16 | 0x40);
    return (uint16_t)((x + 0x7fffu + (x >> 16 & 1)) >> 16);
}

__device__ uint16_t to_f16(uint32_t x)
{
    uint32_t sign = x >> 16 & 0x8000u, m = x & 0x7fffffffu;

    if (m > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (m >> 13 & 0x3ffu));
    if (m >= 0x477ff000u) /* rounds to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (m < 0x38800000u) { /* subnormal or zero */
        uint32_t shift = 126 - (m >> 23), full = (m & 0x7fffffu) | 0x800000u;

        if (m < 0x33000000u)
            return (uint16_t)sign;
        uint32_t half = full >> shift, rest = full & ((1u << shift) - 1), mid = 1u << (shift - 1);
        return (uint16_t)(sign | (half + (rest > mid || (rest == mid && (half & 1)))));
    }
    uint32_t r = m + 0xfffu + (m >> 13 & 1);
    return (uint16_t)(sign | ((r - 0x38000000u) >> 13));
}

template <int CAST> __device__ uint4 load(const unsigned char *from, uint64_t out_off)
{
    if (CAST == KERNEL_NO_CAST)
        return *reinterpret_cast<const uint4 *>(from + out_off);
    const uint4 *p = reinterpret_cast<const uint4 *>(from + 2 * out_off);
    uint4 a = p[0], b = p[1];
    auto two = [](uint32_t x, uint32_t y) {
        return CAST == KERNEL_F32_TO_BF16 ? to_bf16(x) | (uint32_t)to_bf16(y) << 16
                                          : to_f16(x) | (uint32_t)to_f16(y) << 16;
    };
    return make_uint4(two(a.x, a.y), two(a.z, a.w), two(b.x, b.y), two(b.z, b.w));
}

/* Plain loads and stores: with the hint that the data is not needed again 16 GB took 2.5% longer
 * (H200). One run, by one warp: everything on 16 bytes, the run beginning at a whole block of the
 * digest. */
template <int CAST, bool DIGEST, bool STORE>
__device__ void run_fast(sums &s, const unsigned char *from, unsigned char *to, uint64_t first,
                         uint64_t bytes, const uint32_t (&w)[2][4], const uint64_t (&presence)[2])
{
    /* loads in flight: a cast reads twice as much */
    constexpr unsigned BATCH = CAST == KERNEL_NO_CAST ? 8 : 4;
    unsigned lane = threadIdx.x % WARP;

    for (uint64_t at = 0; at < bytes; at += SEGMENT) {
        uint64_t hash[2], number = (first + at) / DIGEST_BLOCK;

        if (DIGEST)
            for (unsigned l = 0; l < 2; l++)
                hash[l] = block_weight(number + lane, l);
        for (unsigned step = 0; step < STEPS; step += BATCH) {
            uint4 v[BATCH];

#pragma unroll
            for (unsigned i = 0; i < BATCH; i++) {
                uint64_t off = at + ((step + i) * WARP + lane) * 16;

                v[i] = make_uint4(0, 0, 0, 0);
                if (off < bytes)
                    v[i] = load<CAST>(from, off);
            }
#pragma unroll
            for (unsigned i = 0; i < BATCH; i++) {
                uint64_t off = at + ((step + i) * WARP + lane) * 16;
                bool in = off < bytes;

                if (STORE && in)
                    *reinterpret_cast<uint4 *>(to + off) = v[i];
                for (unsigned l = 0; DIGEST && l < 2; l++) {
                    uint64_t h = __shfl_sync(0xffffffffu, hash[l], 2 * (step + i) + lane / 16);
                    uint64_t sum = presence[l] + (uint64_t)v[i].x * w[l][0] +
                                   (uint64_t)v[i].y * w[l][1] + (uint64_t)v[i].z * w[l][2] +
                                   (uint64_t)v[i].w * w[l][3];

                    if (in)
                        s.lane[l] += sum * h;
                }
            }
        }
    }
}

template <typename T, bool STORE>
__device__ void carry(unsigned char *b, const unsigned char *from, unsigned char *to)
{
    *reinterpret_cast<T *>(b) = *reinterpret_cast<const T *>(from);
    if (STORE)
        *reinterpret_cast<T *>(to) = *reinterpret_cast<T *>(b);
}

/* One run, by one warp, at any alignment: as wide as the two addresses and the length allow. */
template <int CAST, bool DIGEST, bool STORE>
__device__ void run_any(sums &s, const unsigned char *from, unsigned char *to, uint64_t first,
                        uint64_t bytes)
{
    unsigned lane = threadIdx.x % WARP;

    if (CAST != KERNEL_NO_CAST) {
        for (uint64_t at = 2 * lane; at + 1 < bytes; at += 2 * WARP) {
            uint32_t x = *reinterpret_cast<const uint32_t *>(from + 2 * at);
            uint16_t y = CAST == KERNEL_F32_TO_BF16 ? to_bf16(x) : to_f16(x);

            *reinterpret_cast<uint16_t *>(to + at) = y;
            if (DIGEST)
                add_bytes(s, reinterpret_cast<unsigned char *>(&y), first + at, 2);
        }
        return;
    }
    uint64_t align = (uint64_t)from | (STORE ? (uint64_t)to : 0);
    unsigned width = align % 16 == 0  ? 16
                     : align % 8 == 0 ? 8
                     : align % 4 == 0 ? 4
                     : align % 2 == 0 ? 2
                                      : 1;
    uint64_t whole = bytes / width * width;

    for (uint64_t at = lane * width; at < whole; at += WARP * width) {
        alignas(16) unsigned char b[16];

        switch (width) {
        case 16: carry<uint4, STORE>(b, from + at, to + at); break;
        case 8: carry<uint64_t, STORE>(b, from + at, to + at); break;
        case 4: carry<uint32_t, STORE>(b, from + at, to + at); break;
        case 2: carry<uint16_t, STORE>(b, from + at, to + at); break;
        default: carry<unsigned char, STORE>(b, from + at, to + at);
        }
        if (DIGEST)
            add_bytes(s, b, first + at, width);
    }
    for (uint64_t at = whole + lane; at < bytes; at += WARP) {
        unsigned char b = from[at];

        if (STORE)
            to[at] = b;
        if (DIGEST)
            add_bytes(s, &b, first + at, 1);
    }
}

template <int CAST, bool DIGEST, bool STORE = true>
__device__ void move(const kernel_piece *pieces, uint64_t n, const unsigned char *from,
                     unsigned char *to, unsigned long long *digests)
{
    unsigned warp = threadIdx.x / WARP, warps = blockDim.x / WARP, slot = threadIdx.x % 16;
    uint32_t w[2][4];
    uint64_t presence[2] = { 0, 0 };

    for (unsigned l = 0; l < 2; l++)
        for (unsigned i = 0; i < 4; i++) {
            w[l][i] = digest_word_weight[l][4 * slot + i];
            presence[l] += (uint64_t)DIGEST_EACH_BYTE_ONE * w[l][i];
        }
    for (uint64_t i = blockIdx.x; i < n; i += gridDim.x) {
        const kernel_piece p = pieces[i];
        uint64_t parts = (p.run_bytes + SEGMENT - 1) / SEGMENT, all = parts * p.rows;
        uint64_t odd = (uint64_t)from + p.from_off | p.run_bytes | (p.rows > 1 ? p.from_step : 0) |
                       (STORE ? (uint64_t)to + p.to_off | (p.rows > 1 ? p.to_step : 0) : 0);
        bool fast = odd % 16 == 0 && p.first_byte % DIGEST_BLOCK == 0 &&
                    (p.rows == 1 || p.byte_step % DIGEST_BLOCK == 0);
        sums s = { { 0, 0 } };

        for (uint64_t k = warp; k < all; k += warps) { /* each warp a stretch of a row */
            uint64_t row = k / parts, at = k % parts * SEGMENT;
            uint64_t bytes = p.run_bytes - at < SEGMENT ? p.run_bytes - at : SEGMENT;
            const unsigned char *f =
                from + p.from_off + row * p.from_step + (CAST == KERNEL_NO_CAST ? at : 2 * at);
            unsigned char *t = to + p.to_off + row * p.to_step + at;
            uint64_t first = p.first_byte + row * p.byte_step + at;

            if (fast)
                run_fast<CAST, DIGEST, STORE>(s, f, t, first, bytes, w, presence);
            else
                run_any<CAST, DIGEST, STORE>(s, f, t, first, bytes);
        }
        for (unsigned l = 0; DIGEST && l < 2; l++) {
            for (unsigned d = WARP / 2; d; d /= 2)
                s.lane[l] += __shfl_down_sync(0xffffffffu, s.lane[l], d);
            if (threadIdx.x % WARP == 0 && s.lane[l])
                atomicAdd(&digests[2 * (uint64_t)p.tensor + l], (unsigned long long)s.lane[l]);
        }
    }
}

} // namespace

#define MOVE_KERNEL(name, cast)                                                                    \
    extern "C" __global__ void __launch_bounds__(KERNEL_MOVE_BLOCK)                                \
        name(const kernel_piece *pieces, uint64_t n, const unsigned char *from, unsigned char *to, \
             unsigned long long *digests)                                                          \
    {                                                                                              \
        if (digests)                                                                               \
            move<cast, true>(pieces, n, from, to, digests);                                        \
        else                                                                                       \
            move<cast, false>(pieces, n, from, to, digests);                                       \
    }
MOVE_KERNEL(furlong_move, KERNEL_NO_CAST)
MOVE_KERNEL(furlong_move_bf16, KERNEL_F32_TO_BF16)
MOVE_KERNEL(furlong_move_f16, KERNEL_F32_TO_F16)

/* Nothing is written: what is read may be mapped read-only. */
extern "C" __global__ void __launch_bounds__(KERNEL_MOVE_BLOCK)
furlong_digest(const kernel_piece *pieces, uint64_t n, const unsigned char *from, unsigned char *,
               unsigned long long *digests)
{
    move<KERNEL_NO_CAST, true, false>(pieces, n, from, nullptr, digests);
}

/* One warp a block of the two versions: flags are bytes, so no two warps write the same word's
 * neighbours at once. */
extern "C" __global__ void __launch_bounds__(KERNEL_MOVE_BLOCK)
    furlong_changed(const unsigned char *a, const unsigned char *b, uint64_t bytes,
                    uint32_t block_bytes, unsigned char *flags)
{
    unsigned lane = threadIdx.x % WARP;
    uint64_t warp = (uint64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    uint64_t warps = (uint64_t)gridDim.x * (blockDim.x / WARP),
             blocks = (bytes + block_bytes - 1) / block_bytes;
    bool wide = ((uint64_t)a | (uint64_t)b | block_bytes) % 16 == 0;

    for (uint64_t i = warp; i < blocks; i += warps) {
        uint64_t at = i * block_bytes, n = bytes - at < block_bytes ? bytes - at : block_bytes;
        uint64_t whole = wide ? n / 16 * 16 : 0;
        bool differs = false;

        for (uint64_t k = lane * 16; k < whole; k += WARP * 16) {
            uint4 x = __ldcs(reinterpret_cast<const uint4 *>(a + at + k)),
                  y = __ldcs(reinterpret_cast<const uint4 *>(b + at + k));

            differs |= (x.x ^ y.x) | (x.y ^ y.y) | (x.z ^ y.z) | (x.w ^ y.w);
        }
        for (uint64_t k = whole + lane; k < n; k += WARP)
            differs |= a[at + k] != b[at + k];
        if (__any_sync(0xffffffffu, differs) && lane == 0)
            flags[i] = 1;
        else if (lane == 0)
            flags[i] = 0;
    }
}
