/* transport/wire/frame.h - the bytes of a frame: head, reason, HELLO; private to wire and its tests
 *
 * Everything here is pure: bytes in, values or one sentence out. */
#pragma once
#include "transport/wire/wire.h"

enum {
    WIRE_HEAD_BYTES = 32,
    WIRE_NONCE = 32,
    WIRE_PROOF = 32,
    WIRE_KEY_MAX = 128,
    WIRE_REASON_MAX = 16 + 256,
    WIRE_HELLO_BYTES = 240,     /* versions, who, nonce              */
    WIRE_HELLO_MAX_BODY = 4096, /* what another version may put there */
};
void wire_head_write(uint8_t out[WIRE_HEAD_BYTES], const struct wire_head *h);
void wire_head_read(const uint8_t in[WIRE_HEAD_BYTES], struct wire_head *out);
/* What no peer of ours sends is FL_CORRUPT. in_hello: before a stream is open. */
enum fl_status wire_head_check(const struct wire_head *h, bool in_hello, struct fl_err *err);

/* status u32, origin u32, native i32, length u32, text: the body of WIRE_ERROR and WIRE_BYE. */
size_t wire_reason_write(uint8_t out[WIRE_REASON_MAX], const struct fl_err *e);
enum fl_status wire_reason_read(const void *body, size_t len, struct fl_err *out, struct fl_err *err);

/* HELLO goes in four steps, the step in head.id:
 *   1 client  versions, who, nonce
 *   2 server  versions, who, nonce, proof of the key over both
 *   3 client  its proof of the key over both
 *   4 server  nothing: come in
 * A refusal at any step is WIRE_BYE with the reason. */
enum wire_step { WIRE_STEP_CLIENT = 1, WIRE_STEP_SERVER, WIRE_STEP_PROOF, WIRE_STEP_IN };
void wire_hello_write(uint8_t out[WIRE_HELLO_BYTES], const struct wire_hello *h,
                      const uint8_t nonce[WIRE_NONCE]);
/* FL_UNSUPPORTED: another major, with both versions. FL_CORRUPT: no HELLO. Further bytes are a later
 * minor's and are left alone. */
enum fl_status wire_hello_read(const void *body, size_t len, struct wire_hello *out,
                               struct fl_err *err);
/* by: WIRE_STEP_SERVER or WIRE_STEP_PROOF, so that neither side's proof is the other's. */
void wire_proof(struct fl_bytes key, enum wire_step by, const uint8_t client[WIRE_HELLO_BYTES],
                const uint8_t server[WIRE_HELLO_BYTES], uint8_t out[WIRE_PROOF]);
