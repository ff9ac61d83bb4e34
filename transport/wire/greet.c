#include <string.h>

#include "common/base/fault.h"
#include "common/base/id.h"
#include "transport/wire/stream_priv.h"

static struct fl_bytes key_of(const struct wire_stream *w)
{
    return w->to.key;
}

static enum fl_status say(struct wire_stream *w, enum wire_step step, const void *body, size_t len,
                          struct fl_err *err)
{
    struct wire_msg m = { .head = { .kind = WIRE_HELLO, .id = step, .body_bytes = (uint32_t)len },
                          .body = body };

    return wire_stream_put(w, &m, err);
}

static enum fl_status introduce(struct wire_stream *w, uint8_t out[WIRE_HELLO_BYTES],
                                struct fl_err *err)
{
    uint8_t nonce[WIRE_NONCE];

    FL_TRY(FL_FAULT("wire.nonce") ? fl_fail_errno(err, "a random number for HELLO")
                                  : fl_random(nonce, sizeof(nonce), err));
    wire_hello_write(out, &w->me, nonce);
    return FL_OK;
}

static enum fl_status prove(struct wire_stream *w, enum wire_step by, const uint8_t *proof,
                            struct fl_err *err)
{
    uint8_t right[WIRE_PROOF];

    wire_proof(key_of(w), by, w->hello[0], w->hello[1], right);
    if (!fl_equal_ct(right, proof, WIRE_PROOF))
        return fl_fail(err, FL_DENIED,
                       "the other side holds another key (role %s, %s key here): "
                       "both need the same token or job",
                       w->peer.role[0] ? w->peer.role : "unnamed", key_of(w).len ? "a" : "no");
    return FL_OK;
}

static bool seat_given(const struct fl_seat_ref *s)
{
    static const struct fl_seat_ref nobody;

    return !fl_seat_ref_same(s, &nobody);
}

static enum fl_status check_want(const struct fl_seat_ref *want, const struct fl_seat_ref *is,
                                 struct fl_err *err)
{
    char a[FL_SHORT], b[FL_SHORT];

    if (!seat_given(want) || fl_seat_ref_same(want, is))
        return FL_OK;
    return fl_fail(err, FL_STALE, "worker %s attempt %u is wanted and this is worker %s attempt %u",
                   fl_short(a, &want->id), want->attempt, fl_short(b, &is->id), is->attempt);
}

/* ---- client */

enum fl_status wire_greet_start(struct wire_stream *w, struct fl_err *err)
{
    FL_TRY(introduce(w, w->hello[0], err));
    return say(w, WIRE_STEP_CLIENT, w->hello[0], WIRE_HELLO_BYTES, err);
}

static enum fl_status client_hears_server(struct wire_stream *w, const uint8_t *body, size_t len,
                                          struct fl_err *err)
{
    uint8_t proof[WIRE_PROOF];

    FL_TRY(wire_hello_read(body, len, &w->peer, err));
    if (len < WIRE_HELLO_BYTES + WIRE_PROOF)
        return fl_fail(err, FL_CORRUPT, "HELLO of %zu bytes has no proof", len);
    memcpy(w->hello[1], body, WIRE_HELLO_BYTES);
    FL_TRY(prove(w, WIRE_STEP_SERVER, body + WIRE_HELLO_BYTES, err));
    FL_TRY(check_want(&w->me.want, &w->peer.seat, err));
    wire_proof(key_of(w), WIRE_STEP_PROOF, w->hello[0], w->hello[1], proof);
    return say(w, WIRE_STEP_PROOF, proof, sizeof(proof), err);
}

/* ---- server */

static enum fl_status server_hears_client(struct wire_stream *w, const uint8_t *body, size_t len,
                                          struct fl_err *err)
{
    struct stream_server *s = w->server;
    uint8_t answer[WIRE_HELLO_BYTES + WIRE_PROOF];
    struct fl_bytes key = s->at.key;

    FL_TRY(wire_hello_read(body, len, &w->peer, err));
    memcpy(w->hello[0], body, WIRE_HELLO_BYTES);
    if (s->at.key_of)
        FL_TRY(s->at.key_of(s->arg, &w->peer, &key, err));
    if (key.len > WIRE_KEY_MAX)
        return fl_fail(err, FL_INVALID, "a key of %zu bytes, at most %d are taken", key.len,
                       WIRE_KEY_MAX);
    if (key.len)
        memcpy(w->key, key.data, key.len);
    w->to.key = (struct fl_bytes){ w->key, key.len };
    FL_TRY(introduce(w, w->hello[1], err));
    memcpy(answer, w->hello[1], WIRE_HELLO_BYTES);
    wire_proof(key_of(w), WIRE_STEP_SERVER, w->hello[0], w->hello[1], answer + WIRE_HELLO_BYTES);
    return say(w, WIRE_STEP_SERVER, answer, sizeof(answer), err);
}

static enum fl_status server_hears_proof(struct wire_stream *w, const uint8_t *body, size_t len,
                                         struct fl_err *err)
{
    struct stream_server *s = w->server;

    if (len != WIRE_PROOF)
        return fl_fail(err, FL_CORRUPT, "a proof of %zu bytes, it has %d", len, WIRE_PROOF);
    FL_TRY(prove(w, WIRE_STEP_PROOF, body, err));
    FL_TRY(check_want(&w->peer.want, &w->me.seat, err));
    if (s->at.admit)
        FL_TRY(s->at.admit(s->arg, &w->peer, err));
    return say(w, WIRE_STEP_IN, NULL, 0, err);
}

enum fl_status wire_greet(struct wire_stream *w, const struct wire_msg *m, struct fl_err *err)
{
    uint64_t step = m->head.id;
    size_t len = m->head.body_bytes;

    if (w->server && w->step == 0 && step == WIRE_STEP_CLIENT)
        FL_TRY(server_hears_client(w, m->body, len, err));
    else if (w->server && w->step == WIRE_STEP_CLIENT && step == WIRE_STEP_PROOF)
        FL_TRY(server_hears_proof(w, m->body, len, err));
    else if (!w->server && w->step == 0 && step == WIRE_STEP_SERVER)
        FL_TRY(client_hears_server(w, m->body, len, err));
    else if (w->server || w->step != WIRE_STEP_SERVER || step != WIRE_STEP_IN)
        return fl_fail(err, FL_CORRUPT, "step %llu of HELLO out of turn", (unsigned long long)step);
    w->step = (unsigned)step;
    if (step == (w->server ? WIRE_STEP_PROOF : WIRE_STEP_IN))
        wire_stream_opened(w);
    return FL_OK;
}
