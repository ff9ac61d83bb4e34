/* common/base/sha256.c - FIPS 180-4 and RFC 2104, here because libfurlong needs libc alone */
#include <string.h>

#include "common/base/id.h"

static const uint32_t first[8] = { 0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19 };

static const uint32_t k[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2
};

static uint32_t turn(uint32_t x, unsigned by)
{
    return x >> by | x << (32 - by);
}

static void block_add(uint32_t h[8], const uint8_t *block)
{
    uint32_t w[64], v[8];

    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 |
               (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];

        w[i] = w[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) + w[i - 7] +
               (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
    }
    memcpy(v, h, sizeof(v));
    for (int i = 0; i < 64; i++) {
        uint32_t e = v[4], a = v[0];
        uint32_t t1 = v[7] + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & v[5]) ^ (~e & v[6])) +
                      k[i] + w[i];
        uint32_t t2 =
            (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));

        memmove(v + 1, v, 7 * sizeof(v[0]));
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++)
        h[i] += v[i];
}

void fl_sha256_init(struct fl_sha256 *s)
{
    memcpy(s->h, first, sizeof(first));
    s->bytes = 0;
}

void fl_sha256_add(struct fl_sha256 *s, const void *data, size_t len)
{
    const uint8_t *at = data;
    size_t have = s->bytes % 64;

    s->bytes += len;
    while (len) {
        if (!have && len >= 64) {
            block_add(s->h, at);
            at += 64;
            len -= 64;
            continue;
        }
        size_t take = 64 - have < len ? 64 - have : len;

        memcpy(s->block + have, at, take);
        at += take;
        len -= take;
        have += take;
        if (have == 64) {
            block_add(s->h, s->block);
            have = 0;
        }
    }
}

void fl_sha256_end(struct fl_sha256 *s, uint8_t out[32])
{
    static const uint8_t pad[64] = { 0x80 };
    uint64_t bits = s->bytes * 8;
    uint8_t length[8];

    for (int i = 0; i < 8; i++)
        length[i] = (uint8_t)(bits >> (56 - 8 * i));
    fl_sha256_add(s, pad, 1 + (119 - s->bytes % 64) % 64);
    fl_sha256_add(s, length, sizeof(length));
    for (int i = 0; i < 32; i++)
        out[i] = (uint8_t)(s->h[i / 4] >> (24 - 8 * (i % 4)));
}

void fl_hmac_sha256(const void *key, size_t key_len, const struct fl_bytes *parts, size_t n,
                    uint8_t out[32])
{
    uint8_t padded[64] = { 0 }, in[64], around[64], inner[32];
    struct fl_sha256 s;

    fl_sha256_init(&s);
    if (key_len > sizeof(padded)) {
        fl_sha256_add(&s, key, key_len);
        fl_sha256_end(&s, padded);
    } else if (key_len) {
        memcpy(padded, key, key_len);
    }
    for (size_t i = 0; i < sizeof(padded); i++) {
        in[i] = padded[i] ^ 0x36;
        around[i] = padded[i] ^ 0x5c;
    }
    fl_sha256_init(&s);
    fl_sha256_add(&s, in, sizeof(in));
    for (size_t i = 0; i < n; i++)
        fl_sha256_add(&s, parts[i].data, parts[i].len);
    fl_sha256_end(&s, inner);
    fl_sha256_init(&s);
    fl_sha256_add(&s, around, sizeof(around));
    fl_sha256_add(&s, inner, sizeof(inner));
    fl_sha256_end(&s, out);
    explicit_bzero(padded, sizeof(padded));
    explicit_bzero(in, sizeof(in));
    explicit_bzero(around, sizeof(around));
}

bool fl_equal_ct(const void *a, const void *b, size_t len)
{
    const volatile uint8_t *x = a, *y = b;
    uint8_t differ = 0;

    for (size_t i = 0; i < len; i++)
        differ |= x[i] ^ y[i];
    return differ == 0;
}
