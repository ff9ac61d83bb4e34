#include "transport/wire/in.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "common/base/fault.h"

void wire_in_init(struct wire_in *in)
{
    void *arg = in->arg;
    __typeof__(in->room) room = in->room;
    __typeof__(in->message) message = in->message;

    *in = (struct wire_in){ .in_hello = true, .arg = arg, .room = room, .message = message };
}

static void msg_drop(struct in_msg *m)
{
    if (!m->active)
        return;
    for (unsigned i = 0; i < m->head.n_fds; i++)
        if (m->fds[i] >= 0)
            close(m->fds[i]);
    free(m->body);
    if (m->blob_ours)
        free(m->blob);
    *m = (struct in_msg){ 0 };
}

void wire_in_fini(struct wire_in *in)
{
    msg_drop(&in->whole);
    msg_drop(&in->bulk);
    for (unsigned i = 0; i < in->n_fds; i++)
        close(in->fds[i]);
    free(in->buf);
    wire_in_init(in);
}

void wire_in_stop(struct wire_in *in)
{
    in->stopped = true;
}

void wire_in_forget(struct wire_in *in, const void *room)
{
    struct in_msg *both[] = { &in->whole, &in->bulk };

    for (unsigned i = 0; i < FL_LEN(both); i++)
        if (room && both[i]->active && both[i]->blob == room && !both[i]->blob_ours)
            both[i]->blob = NULL; /* the rest lands in the buffer and is skipped */
}

enum fl_status wire_in_iov(struct wire_in *in, struct iovec iov[WIRE_IN_IOV], int *n,
                           struct fl_err *err)
{
    struct in_msg *m = in->stopped ? NULL : in->filling;
    int k = 0;

    if (!in->buf && !(in->buf = FL_FAULT("wire.buffer") ? NULL : malloc(WIRE_IN_BUF)))
        return fl_fail(err, FL_EXHAUSTED, "no memory for a buffer of %d bytes", WIRE_IN_BUF);
    if (in->stopped || in->from == in->to)
        in->from = in->to = 0;
    if (m && m->body_got < m->head.body_bytes)
        iov[k++] = (struct iovec){ m->body + m->body_got, m->head.body_bytes - m->body_got };
    if (m && m->blob && m->blob_got < m->blob_part)
        iov[k++] = (struct iovec){ m->blob + m->blob_got, m->blob_part - m->blob_got };
    if (in->to == WIRE_IN_BUF) { /* less than a frame is left at its end */
        memmove(in->buf, in->buf + in->from, in->to - in->from);
        in->to -= in->from;
        in->from = 0;
    }
    iov[k++] = (struct iovec){ in->buf + in->to, WIRE_IN_BUF - in->to };
    *n = k;
    return FL_OK;
}

static enum fl_status claim_fds(struct wire_in *in, unsigned n, int *out, struct fl_err *err)
{
    if (n > in->n_fds)
        return fl_fail(err, FL_CORRUPT, "a frame speaks of %u descriptors and %u came", n,
                       in->n_fds);
    memcpy(out, in->fds, n * sizeof(*out));
    in->n_fds -= n;
    memmove(in->fds, in->fds + n, in->n_fds * sizeof(*out));
    return FL_OK;
}

static enum fl_status deliver(struct wire_in *in, const struct wire_head *h, const void *body,
                              const void *blob, int *fds, struct fl_err *err)
{
    struct wire_msg m = { .head = *h, .body = body, .blob = blob, .fds = fds };
    enum fl_status st = in->message(in->arg, &m, err);

    for (unsigned i = 0; i < h->n_fds; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    return st;
}

static bool has_room(const struct wire_in *in, const struct wire_head *h)
{
    return in->room && h->blob_bytes &&
           (h->kind == WIRE_REQUEST || h->kind == WIRE_REPLY || h->kind == WIRE_EVENT);
}

/* A message that does not fit into the buffer: find the places for its parts. */
static enum fl_status begin(struct wire_in *in, struct in_msg *m, const struct wire_head *h,
                            struct fl_err *err)
{
    *m = (struct in_msg){ .head = *h };
    m->blob_part = h->blob_bytes > WIRE_PIECE ? WIRE_PIECE : h->blob_bytes;
    m->head.n_fds = 0;
    m->active = true;
    FL_TRY(claim_fds(in, h->n_fds, m->fds, err));
    m->head.n_fds = h->n_fds;
    if (h->body_bytes && !(m->body = FL_FAULT("wire.body") ? NULL : malloc(h->body_bytes)))
        return fl_fail(err, FL_EXHAUSTED, "no memory for a body of %u bytes", h->body_bytes);
    if (!h->blob_bytes)
        return FL_OK;
    if (has_room(in, h))
        m->blob = in->room(in->arg, h);
    if (in->stopped || m->blob)
        return FL_OK;
    if (h->blob_bytes > WIRE_MAX_POOLED)
        return fl_fail(
            err, FL_EXHAUSTED,
            "the peer sends a blob of %llu bytes that nobody gave a place, at most %d are "
            "taken then",
            (unsigned long long)h->blob_bytes, WIRE_MAX_POOLED);
    m->blob = FL_FAULT("wire.blob") ? NULL : malloc(h->blob_bytes);
    if (!m->blob)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a blob of %llu bytes",
                       (unsigned long long)h->blob_bytes);
    m->blob_ours = true;
    return FL_OK;
}

static enum fl_status begin_more(struct wire_in *in, const struct wire_head *h, struct fl_err *err)
{
    struct in_msg *b = &in->bulk;
    uint64_t left = b->active ? b->head.blob_bytes - b->blob_got : 0;

    if (!b->active || h->id != b->head.id || h->blob_bytes == 0 || h->blob_bytes > left)
        return fl_fail(
            err, FL_CORRUPT, "a piece of %llu bytes for message %llu, which waits for %llu",
            (unsigned long long)h->blob_bytes, (unsigned long long)h->id, (unsigned long long)left);
    b->blob_part = b->blob_got + h->blob_bytes;
    in->filling = b;
    return FL_OK;
}

/* Moves what the buffer already holds of the message under way; true when its frame is whole. */
static bool fill(struct wire_in *in)
{
    struct in_msg *m = in->filling;
    size_t n = in->to - in->from;

    if (n > m->head.body_bytes - m->body_got)
        n = m->head.body_bytes - m->body_got;
    if (n)
        memcpy(m->body + m->body_got, in->buf + in->from, n);
    in->from += n;
    m->body_got += n;
    if (m->body_got < m->head.body_bytes)
        return false;
    n = in->to - in->from;
    if (n > m->blob_part - m->blob_got)
        n = m->blob_part - m->blob_got;
    if (n && m->blob)
        memcpy(m->blob + m->blob_got, in->buf + in->from, n);
    in->from += n;
    m->blob_got += n;
    return m->blob_got == m->blob_part;
}

static enum fl_status finish(struct wire_in *in, struct fl_err *err)
{
    struct in_msg *m = in->filling;
    enum fl_status st;

    in->filling = NULL;
    if (m->blob_got < m->head.blob_bytes)
        return FL_OK; /* more pieces follow, other frames between them */
    st = deliver(in, &m->head, m->body, m->blob, m->fds, err);
    m->head.n_fds = 0;
    msg_drop(m);
    return st;
}

/* One whole small frame, or the start of a larger one; *more: call again. */
static enum fl_status step(struct wire_in *in, bool *more, struct fl_err *err)
{
    uint8_t *p = in->buf + in->from;
    size_t have = in->to - in->from;
    struct wire_head h;
    int fds[WIRE_MAX_FDS];
    uint64_t rest;

    *more = false;
    if (in->filling) {
        *more = fill(in);
        return *more ? finish(in, err) : FL_OK;
    }
    if (have < WIRE_HEAD_BYTES)
        return FL_OK;
    wire_head_read(p, &h);
    FL_TRY(wire_head_check(&h, in->in_hello, err));
    rest = h.body_bytes + h.blob_bytes;
    if (h.kind == WIRE_MORE) {
        in->from += WIRE_HEAD_BYTES;
        *more = true;
        return begin_more(in, &h, err);
    }
    if (rest > WIRE_IN_BUF - WIRE_HEAD_BYTES) {
        struct in_msg *m = h.blob_bytes > WIRE_PIECE ? &in->bulk : &in->whole;

        if (m->active)
            return fl_fail(err, FL_CORRUPT, "message %llu begins inside message %llu",
                           (unsigned long long)h.id, (unsigned long long)m->head.id);
        in->from += WIRE_HEAD_BYTES;
        *more = true;
        in->filling = m;
        return begin(in, m, &h, err);
    }
    if (have - WIRE_HEAD_BYTES < rest)
        return FL_OK;
    FL_TRY(claim_fds(in, h.n_fds, fds, err));
    in->from += WIRE_HEAD_BYTES + (size_t)rest;
    *more = true;
    p += WIRE_HEAD_BYTES;
    if (has_room(in, &h)) {
        void *room = in->room(in->arg, &h);

        if (room)
            memcpy(room, p + h.body_bytes, h.blob_bytes);
        return deliver(in, &h, p, room ? room : p + h.body_bytes, fds, err);
    }
    return deliver(in, &h, p, p + h.body_bytes, fds, err);
}

/* Bytes that went straight to their place. */
static size_t took(struct in_msg *m, size_t n)
{
    uint64_t body = m->head.body_bytes - m->body_got, blob;

    body = body < n ? body : n;
    m->body_got += body;
    n -= body;
    blob = m->blob ? m->blob_part - m->blob_got : 0;
    blob = blob < n ? blob : n;
    m->blob_got += blob;
    return n - blob;
}

enum fl_status wire_in_got(struct wire_in *in, size_t n, const int *fds, unsigned n_fds,
                           struct fl_err *err)
{
    enum fl_status st = FL_OK;
    bool more = true;

    if (in->stopped || n_fds > WIRE_IN_FDS - in->n_fds) {
        for (unsigned i = 0; i < n_fds; i++)
            close(fds[i]);
        in->from = in->to = 0;
        if (in->stopped)
            return FL_OK;
        return fl_fail(err, FL_CORRUPT, "%u descriptors came that no frame speaks of",
                       n_fds + in->n_fds);
    }
    if (n_fds)
        memcpy(in->fds + in->n_fds, fds, n_fds * sizeof(*fds));
    in->n_fds += n_fds;
    if (in->filling)
        n = took(in->filling, n);
    in->to += n;
    while (st == FL_OK && more && !in->stopped)
        st = step(in, &more, err);
    return st;
}
