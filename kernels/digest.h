/* kernels/digest.h - the additive digest of a tensor's bytes, alone or while copying
 *
 * A tensor's digest is a sum mod 2^64, in two lanes, over its bytes: each byte counts with a weight
 * that depends on its index in the whole tensor alone. Being a sum it is the same over any split
 * into shards, buckets, runs and ranks, in any order, at any alignment, and independent of the plan
 * that moved the bytes. Zero bytes count too, so a run that was left out is seen. It catches
 * accidents, not enemies. This is the plain C form; device code must give the same values. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* digest += bytes [first_byte, first_byte + bytes) of the tensor, which lie at run. */
void kernel_digest_add(uint64_t digest[2], const void *run, size_t bytes, uint64_t first_byte);

/* The same while copying run to dst, which must not overlap; each byte is read from memory once. */
void kernel_digest_copy(uint64_t digest[2], void *dst, const void *run, size_t bytes,
                        uint64_t first_byte);

/* Which body runs on this machine: "avx512", "avx2" or "plain"; for logs and benches. */
const char *kernel_digest_body(void);
