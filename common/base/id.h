/* common/base/id.h - ids, randomness, digests, comparison in constant time */
#pragma once
#include "common/base/base.h"

enum fl_status fl_random(void *out, size_t len, struct fl_err *err); /* of the kernel */
void fl_hex(char *out, const void *data, size_t len);                /* 2 * len + 1 bytes */
bool fl_hex_parse(const char *hex, void *out, size_t len); /* exactly len bytes, else untouched */

#define FL_HEX(id, text) fl_hex((text), &(id), sizeof(id)) /* an id struct, not a pointer */
#define FL_SAME(a, b) (sizeof(a) == sizeof(b) && memcmp(&(a), &(b), sizeof(a)) == 0)
enum { FL_SHORT = 9 };
const char *fl_short(char out[FL_SHORT], const void *id); /* its first 8 hex digits; returns out */

bool fl_term_older(const struct fl_term *a, const struct fl_term *than); /* same cluster, lower */
bool fl_seat_ref_same(const struct fl_seat_ref *a, const struct fl_seat_ref *b);

struct fl_sha256 { uint32_t h[8]; uint64_t bytes; uint8_t block[64]; };
void fl_sha256_init(struct fl_sha256 *s);
void fl_sha256_add(struct fl_sha256 *s, const void *data, size_t len);
void fl_sha256_end(struct fl_sha256 *s, uint8_t out[32]);
void fl_hmac_sha256(const void *key, size_t key_len, const struct fl_bytes *parts, size_t n,
                    uint8_t out[32]);
bool fl_equal_ct(const void *a, const void *b, size_t len); /* time depends on len alone */
