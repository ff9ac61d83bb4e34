#include "transport/wire/frame.h"
#include <endian.h>
#include <string.h>
#include "common/base/id.h"

static void put16(uint8_t *p, uint16_t v)
{
    v = htole16(v);
    memcpy(p, &v, sizeof(v));
}

static void put32(uint8_t *p, uint32_t v)
{
    v = htole32(v);
    memcpy(p, &v, sizeof(v));
}

static void put64(uint8_t *p, uint64_t v)
{
    v = htole64(v);
    memcpy(p, &v, sizeof(v));
}

static uint16_t get16(const uint8_t *p)
{
    uint16_t v;

    memcpy(&v, p, sizeof(v));
    return le16toh(v);
}

static uint32_t get32(const uint8_t *p)
{
    uint32_t v;

    memcpy(&v, p, sizeof(v));
    return le32toh(v);
}

static uint64_t get64(const uint8_t *p)
{
    uint64_t v;

    memcpy(&v, p, sizeof(v));
    return le64toh(v);
}

void wire_head_write(uint8_t out[WIRE_HEAD_BYTES], const struct wire_head *h)
{
    put32(out, h->body_bytes);
    put32(out + 4, h->lane);
    put64(out + 8, h->blob_bytes);
    put64(out + 16, h->id);
    put32(out + 24, h->budget_ms);
    put16(out + 28, h->method);
    out[30] = h->kind;
    out[31] = h->n_fds;
}

void wire_head_read(const uint8_t in[WIRE_HEAD_BYTES], struct wire_head *out)
{
    *out = (struct wire_head){
        .body_bytes = get32(in),
        .lane = get32(in + 4),
        .blob_bytes = get64(in + 8),
        .id = get64(in + 16),
        .budget_ms = get32(in + 24),
        .method = get16(in + 28),
        .kind = in[30],
        .n_fds = in[31],
    };
}

static const struct frame_rule {
    const char *name;
    bool in_hello, when_open, fds;
    uint32_t body_max;
    uint64_t blob_max;
} rules[] = {
    // clang-format off
    [WIRE_HELLO]   = { "HELLO",   true,  false, false, WIRE_HELLO_MAX_BODY, 0          },
    [WIRE_REQUEST] = { "REQUEST", false, true,  true,  WIRE_MAX_BODY,       INT64_MAX  },
    [WIRE_REPLY]   = { "REPLY",   false, true,  true,  WIRE_MAX_BODY,       INT64_MAX  },
    [WIRE_ERROR]   = { "ERROR",   false, true,  false, WIRE_REASON_MAX,     0          },
    [WIRE_CANCEL]  = { "CANCEL",  false, true,  false, 0,                   0          },
    [WIRE_EVENT]   = { "EVENT",   false, true,  true,  WIRE_MAX_BODY,       INT64_MAX  },
    [WIRE_CREDIT]  = { "CREDIT",  false, true,  false, 0,                   0          },
    [WIRE_BYE]     = { "BYE",     true,  true,  false, WIRE_REASON_MAX,     0          },
    [WIRE_MORE]    = { "MORE",    false, true,  false, 0,                   WIRE_PIECE },
    // clang-format on
};

enum fl_status wire_head_check(const struct wire_head *h, bool in_hello, struct fl_err *err)
{
    const struct frame_rule *r = h->kind < FL_LEN(rules) ? &rules[h->kind] : NULL;

    if (!r || !r->name)
        return fl_fail(err, FL_CORRUPT,
                       "no frame has kind %u: the peer does not speak this protocol", h->kind);
    if (!(in_hello ? r->in_hello : r->when_open))
        return fl_fail(err, FL_CORRUPT, "%s frame %s HELLO", r->name,
                       in_hello ? "before" : "after");
    if (h->body_bytes > r->body_max || h->blob_bytes > r->blob_max)
        return fl_fail(err, FL_CORRUPT,
                       "%s frame with a body of %u and a blob of %llu bytes, at most "
                       "%u and %llu are taken",
                       r->name, h->body_bytes, (unsigned long long)h->blob_bytes, r->body_max,
                       (unsigned long long)r->blob_max);
    if (h->kind == WIRE_HELLO && (h->lane || h->budget_ms || h->method))
        return fl_fail(err, FL_CORRUPT, "HELLO frame with lane %u, method %u and %u ms", h->lane,
                       h->method, h->budget_ms);
    if (h->n_fds > (r->fds ? WIRE_MAX_FDS : 0))
        return fl_fail(err, FL_CORRUPT, "%s frame with %u descriptors, at most %u are taken",
                       r->name, h->n_fds, r->fds ? WIRE_MAX_FDS : 0u);
    return FL_OK;
}

size_t wire_reason_write(uint8_t out[WIRE_REASON_MAX], const struct fl_err *e)
{
    size_t n = strnlen(e->text, sizeof(e->text) - 1);

    put32(out, e->status);
    put32(out + 4, e->origin);
    put32(out + 8, (uint32_t)e->native);
    put32(out + 12, (uint32_t)n);
    memcpy(out + 16, e->text, n);
    return 16 + n;
}

enum fl_status wire_reason_read(const void *body, size_t len, struct fl_err *out,
                                struct fl_err *err)
{
    const uint8_t *p = body;
    uint32_t status, origin, n;

    if (len < 16)
        return fl_fail(err, FL_CORRUPT, "a reason of %zu bytes, at least 16 are needed", len);
    status = get32(p);
    origin = get32(p + 4);
    n = get32(p + 12);
    if (status >= FL_STATUS_COUNT || n != len - 16 || n >= sizeof(out->text))
        return fl_fail(err, FL_CORRUPT, "a reason with status %u and %u of %zu bytes of text",
                       status, n, len - 16);
    /* A later build may know more origins; the rest of what it says is still good. */
    fl_err_set(out, status, origin <= FL_FROM_SQLITE ? origin : FL_FROM_PEER, (int)get32(p + 8),
               "%.*s", (int)n, (const char *)p + 16);
    return FL_OK;
}

/* ---- HELLO: magic 0, major 4, minor 6, features 8, cluster 16, term 32, node 40, attempt 68,
 * start 72, seat 80, wanted attempt 108, wanted seat 112, zero 140, role 144, build 160, nonce 208.
 * The first eight bytes are the same in every version. */
#define HELLO_MAGIC 0x4c525546u /* "FURL" */

void wire_hello_write(uint8_t out[WIRE_HELLO_BYTES], const struct wire_hello *h,
                      const uint8_t nonce[WIRE_NONCE])
{
    bool default_version = h->major == 0 && h->minor == 0;

    memset(out, 0, WIRE_HELLO_BYTES);
    put32(out, HELLO_MAGIC);
    put16(out + 4, default_version ? WIRE_MAJOR : h->major);
    put16(out + 6, default_version ? WIRE_MINOR : h->minor);
    put64(out + 8, h->features);
    memcpy(out + 16, h->term.cluster, 16);
    put64(out + 32, h->term.head);
    memcpy(out + 40, h->node.id.b, 28);
    put32(out + 68, h->seat.attempt);
    put64(out + 72, h->node.start);
    memcpy(out + 80, h->seat.id.b, 28);
    put32(out + 108, h->want.attempt);
    memcpy(out + 112, h->want.id.b, 28);
    memcpy(out + 144, h->role, strnlen(h->role, sizeof(h->role) - 1));
    memcpy(out + 160, h->build, strnlen(h->build, sizeof(h->build) - 1));
    memcpy(out + 208, nonce, WIRE_NONCE);
}

/* One word or sentence for logs: printable, ended, and nothing behind the end. */
static bool text_ok(const uint8_t *p, size_t cap)
{
    size_t n = strnlen((const char *)p, cap);

    if (n == cap)
        return false;
    for (size_t i = 0; i < cap; i++)
        if (i < n ? p[i] < ' ' || p[i] > '~' : p[i] != 0)
            return false;
    return true;
}

enum fl_status wire_hello_read(const void *body, size_t len, struct wire_hello *out,
                               struct fl_err *err)
{
    const uint8_t *p = body;

    if (len < 8 || get32(p) != HELLO_MAGIC)
        return fl_fail(err, FL_CORRUPT, "HELLO of %zu bytes does not begin as one", len);
    if (get16(p + 4) != WIRE_MAJOR) {
        bool said = len >= WIRE_HELLO_BYTES && text_ok(p + 144, 16) && text_ok(p + 160, 48);

        return fl_fail(err, FL_UNSUPPORTED,
                       "the peer (%.16s %.48s) speaks version %u.%u of the protocol and this side (%s) "
                       "%d.%d: use the same release on both",
                       said ? (const char *)p + 144 : "", said ? (const char *)p + 160 : "of another release",
                       get16(p + 4), get16(p + 6), FURLONG_VERSION, WIRE_MAJOR, WIRE_MINOR);
    }
    if (len < WIRE_HELLO_BYTES)
        return fl_fail(err, FL_CORRUPT, "HELLO of %zu bytes, at least %d are needed", len,
                       WIRE_HELLO_BYTES);
    if (!text_ok(p + 144, 16) || !text_ok(p + 160, 48) || get32(p + 140) != 0)
        return fl_fail(err, FL_CORRUPT, "HELLO whose role or build is no text");
    *out = (struct wire_hello){
        .major = get16(p + 4),
        .minor = get16(p + 6),
        .features = get64(p + 8),
        .term.head = get64(p + 32),
        .seat.attempt = get32(p + 68),
        .node.start = get64(p + 72),
        .want.attempt = get32(p + 108),
    };
    memcpy(out->term.cluster, p + 16, 16);
    memcpy(out->node.id.b, p + 40, 28);
    memcpy(out->seat.id.b, p + 80, 28);
    memcpy(out->want.id.b, p + 112, 28);
    memcpy(out->role, p + 144, 16);
    memcpy(out->build, p + 160, 48);
    return FL_OK;
}

void wire_proof(struct fl_bytes key, enum wire_step by, const uint8_t client[WIRE_HELLO_BYTES],
                const uint8_t server[WIRE_HELLO_BYTES], uint8_t out[WIRE_PROOF])
{
    const char *who = by == WIRE_STEP_SERVER ? "furlong hello: server" : "furlong hello: client";
    const struct fl_bytes parts[] = {
        { who, strlen(who) },
        { client, WIRE_HELLO_BYTES },
        { server, WIRE_HELLO_BYTES },
    };

    fl_hmac_sha256(key.data, key.len, parts, FL_LEN(parts), out);
}
