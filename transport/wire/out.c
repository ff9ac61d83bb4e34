#include "transport/wire/out.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "common/base/fault.h"

enum {
    CHUNK_BYTES = 16 << 10,  /* several hundred small frames                                    */
    SMALL_BYTES = 8 << 10,   /* a blob up to this is copied beside its head                      */
    READY_BYTES = 256 << 10, /* with less than this ready the next piece of bulk comes over: more
                              * than a socket takes at once, so the line never runs dry          */
};
struct fd_set_ {
    unsigned n;
    int fd[WIRE_MAX_FDS];
};
struct out_seg {
    struct out_seg *next;
    const uint8_t *data;
    size_t len, off, cap; /* cap: of own[], 0 when data lies elsewhere */
    void *free_after;     /* a copied blob, with its last piece  */
    struct wire_hold *hold;
    struct fd_set_ *fds;
    bool piece;
    uint8_t own[];
};
struct out_bulk {
    struct out_bulk *next;
    struct wire_head head;
    size_t front_bytes; /* head and body; 0 once they are ready */
    const uint8_t *blob;
    uint64_t done; /* of blob */
    void *copy;
    struct wire_hold *hold;
    struct fd_set_ *fds;
    uint8_t front[];
};

static void fds_destroy(struct fd_set_ *f)
{
    if (!f)
        return;
    for (unsigned i = 0; i < f->n; i++)
        close(f->fd[i]);
    free(f);
}

static enum fl_status fds_create(const int *fds, unsigned n, struct fd_set_ **out,
                                 struct fl_err *err)
{
    struct fd_set_ *f = n ? calloc(1, sizeof(*f)) : NULL;

    if (n && !f)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u descriptors", n);
    for (; f && f->n < n; f->n++) {
        f->fd[f->n] = FL_FAULT("wire.dup") ? -1 : fcntl(fds[f->n], F_DUPFD_CLOEXEC, 3);
        if (f->fd[f->n] < 0) {
            unsigned at = f->n;
            int why = errno; /* never FL_UNREACHABLE: the connection is there, and whoever answers says so */

            fds_destroy(f);
            return fl_fail(err, why == EBADF ? FL_INVALID : FL_EXHAUSTED, "descriptor %u of %u to send: %s", at + 1, n,
                           strerrordesc_np(why));
        }
    }
    *out = f;
    return FL_OK;
}

static void seg_free(struct out_seg *g)
{
    struct wire_hold *hold = g->hold;

    fds_destroy(g->fds);
    free(g->free_after);
    free(g);
    if (hold)
        hold->free(hold); /* last: it may send, or destroy what it likes */
}

static void push(struct wire_out *o, struct out_seg *g)
{
    if (o->last)
        o->last->next = g;
    else
        o->first = g;
    o->last = g;
}

static struct out_seg *seg_create(size_t cap)
{
    struct out_seg *g = FL_FAULT("wire.queue") ? NULL : malloc(sizeof(*g) + cap);

    if (g) {
        *g = (struct out_seg){ .cap = cap };
        g->data = g->own;
    }
    return g;
}

/* Room for need bytes at the end of what is ready; with descriptors always in a segment of its own,
 * since they travel with its first byte. */
static struct out_seg *tail(struct wire_out *o, size_t need, bool fresh)
{
    struct out_seg *g = o->last;

    if (!fresh && g && g->data == g->own && g->cap - g->len >= need)
        return g;
    g = seg_create(need > CHUNK_BYTES ? need : CHUNK_BYTES);
    if (g)
        push(o, g);
    return g;
}

static void add(struct wire_out *o, struct out_seg *g, const void *data, size_t n)
{
    if (n)
        memcpy(g->own + g->len, data, n);
    g->len += n;
    o->ready_bytes += n;
}

static void add_ref(struct wire_out *o, struct out_seg *g, const void *data, size_t n)
{
    g->data = data;
    g->len = n;
    o->ready_bytes += n;
    push(o, g);
}

static bool lane_waits(const struct wire_out *o, const struct wire_head *h)
{
    if (h->kind != WIRE_REQUEST && h->kind != WIRE_EVENT && h->kind != WIRE_CANCEL &&
        h->kind != WIRE_BYE)
        return false;
    for (const struct out_bulk *b = o->bulk; b; b = b->next)
        if (h->kind == WIRE_BYE || b->head.lane == h->lane)
            return true;
    return false;
}

static enum fl_status put_bulk(struct wire_out *o, const struct wire_msg *m, struct fd_set_ *fds,
                               struct fl_err *err)
{
    const struct wire_head *h = &m->head;
    struct out_bulk *b =
        FL_FAULT("wire.queue") ? NULL : calloc(1, sizeof(*b) + WIRE_HEAD_BYTES + h->body_bytes);
    void *copy = b && !m->hold && h->blob_bytes ? malloc(h->blob_bytes) : NULL;

    if (!b || (!copy && !m->hold && h->blob_bytes)) {
        free(b);
        return fl_fail(err, FL_EXHAUSTED, "no memory for a message of %llu bytes",
                       (unsigned long long)h->blob_bytes + h->body_bytes);
    }
    if (copy)
        memcpy(copy, m->blob, h->blob_bytes);
    b->head = *h;
    b->front_bytes = WIRE_HEAD_BYTES + h->body_bytes;
    b->blob = copy ? copy : m->blob;
    b->copy = copy;
    b->hold = m->hold;
    b->fds = fds;
    wire_head_write(b->front, h);
    if (h->body_bytes)
        memcpy(b->front + WIRE_HEAD_BYTES, m->body, h->body_bytes);
    if (o->bulk_last)
        o->bulk_last->next = b;
    else
        o->bulk = b;
    o->bulk_last = b;
    o->queued_bytes += b->front_bytes + h->blob_bytes;
    return FL_OK;
}

static enum fl_status put_ready(struct wire_out *o, const struct wire_msg *m, struct fd_set_ *fds,
                                struct fl_err *err)
{
    const struct wire_head *h = &m->head;
    bool apart = m->hold || h->blob_bytes > SMALL_BYTES;
    size_t front = WIRE_HEAD_BYTES + h->body_bytes + (apart ? 0 : h->blob_bytes);
    struct out_seg *ref = apart ? seg_create(m->hold ? 0 : h->blob_bytes) : NULL;
    struct out_seg *g = apart && !ref ? NULL : tail(o, front, fds != NULL);
    uint8_t head[WIRE_HEAD_BYTES];

    if (!g) {
        free(ref);
        return fl_fail(err, FL_EXHAUSTED, "no memory for a message of %zu bytes", front);
    }
    g->fds = fds ? fds : g->fds;
    wire_head_write(head, h);
    add(o, g, head, sizeof(head));
    add(o, g, m->body, h->body_bytes);
    if (!apart) {
        add(o, g, m->blob, h->blob_bytes);
    } else if (m->hold) {
        ref->hold = m->hold;
        add_ref(o, ref, m->blob, h->blob_bytes);
    } else {
        push(o, ref);
        add(o, ref, m->blob, h->blob_bytes);
    }
    o->queued_bytes += WIRE_HEAD_BYTES + h->body_bytes + h->blob_bytes;
    return FL_OK;
}

enum fl_status wire_out_put(struct wire_out *o, const struct wire_msg *m, struct fl_err *err)
{
    struct fd_set_ *fds = NULL;
    enum fl_status st = fds_create(m->fds, m->head.n_fds, &fds, err);

    if (st != FL_OK)
        return st;
    st = m->head.blob_bytes > WIRE_PIECE || lane_waits(o, &m->head) ? put_bulk(o, m, fds, err)
                                                                    : put_ready(o, m, fds, err);
    if (st != FL_OK)
        fds_destroy(fds);
    return st;
}

/* The next piece of the first bulk frame becomes ready. */
static enum fl_status piece(struct wire_out *o, struct fl_err *err)
{
    struct out_bulk *b = o->bulk;
    uint64_t left = b->head.blob_bytes - b->done;
    size_t n = left > WIRE_PIECE ? WIRE_PIECE : (size_t)left;
    size_t front = b->front_bytes ? b->front_bytes : WIRE_HEAD_BYTES;
    struct out_seg *ref = seg_create(0);
    struct out_seg *g = ref ? tail(o, front, b->fds != NULL) : NULL;

    if (!g) {
        free(ref);
        return fl_fail(err, FL_EXHAUSTED, "no memory for a piece of %zu bytes", n);
    }
    if (b->front_bytes) {
        add(o, g, b->front, b->front_bytes);
        g->fds = b->fds ? b->fds : g->fds;
        b->fds = NULL;
        b->front_bytes = 0;
    } else {
        uint8_t more[WIRE_HEAD_BYTES];

        wire_head_write(
            more, &(struct wire_head){
                      .kind = WIRE_MORE, .lane = b->head.lane, .id = b->head.id, .blob_bytes = n });
        add(o, g, more, sizeof(more));
        o->queued_bytes += sizeof(more);
    }
    ref->piece = true;
    add_ref(o, ref, n ? b->blob + b->done : NULL, n);
    b->done += n;
    o->since_piece = 0;
    if (b->done == b->head.blob_bytes) {
        ref->hold = b->hold;
        ref->free_after = b->copy;
        o->bulk = b->next;
        if (!o->bulk)
            o->bulk_last = NULL;
        free(b);
    }
    return FL_OK;
}

enum fl_status wire_out_next(struct wire_out *o, struct iovec *iov, unsigned max_iov,
                             unsigned *n_iov, const int **fds, unsigned *n_fds, struct fl_err *err)
{
    unsigned n = 0;

    while (o->bulk && (o->ready_bytes < READY_BYTES || o->since_piece > WIRE_PIECE))
        FL_TRY(piece(o, err));
    *fds = NULL;
    *n_fds = 0;
    for (struct out_seg *g = o->first; g && n < max_iov; g = g->next) {
        if (g->fds && g->off == 0) {
            if (n)
                break;
            *fds = g->fds->fd;
            *n_fds = g->fds->n;
        }
        if (g->len > g->off)
            iov[n++] = (struct iovec){ (void *)(uintptr_t)(g->data + g->off), g->len - g->off };
    }
    *n_iov = n;
    return FL_OK;
}

void wire_out_gone(struct wire_out *o, size_t bytes)
{
    while (o->first) {
        struct out_seg *g = o->first;
        size_t n = g->len - g->off < bytes ? g->len - g->off : bytes;

        g->off += n;
        bytes -= n;
        o->ready_bytes -= n;
        o->queued_bytes -= n;
        if (!g->piece)
            o->since_piece += n;
        if (g->off < g->len)
            break;
        if (g == o->last && g->cap && !g->fds && !g->hold && !g->free_after && !g->piece) {
            g->off = g->len = 0; /* the chunk that the next small frame goes into */
            break;
        }
        o->first = g->next;
        if (!o->first)
            o->last = NULL;
        seg_free(g);
    }
}

void wire_out_clear(struct wire_out *o)
{
    struct wire_out all = *o;

    *o = (struct wire_out){ 0 };
    while (all.first) {
        struct out_seg *g = all.first;

        all.first = g->next;
        seg_free(g);
    }
    while (all.bulk) {
        struct out_bulk *b = all.bulk;
        struct wire_hold *hold = b->hold;

        all.bulk = b->next;
        fds_destroy(b->fds);
        free(b->copy);
        free(b);
        if (hold)
            hold->free(hold);
    }
}
