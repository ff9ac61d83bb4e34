/* transport/wire/out.h - what waits to leave on one connection; private to wire and its tests
 *
 * Two queues. Ready bytes leave in this order: small frames are copied one behind the other into
 * chunks, so that a burst is one write. Bulk frames wait behind and come over piece by piece
 * (WIRE_PIECE), whenever little is ready: whoever arrives meanwhile waits for one piece at most. A
 * frame whose lane has bulk waiting queues behind it, except answers and credits, which have no
 * order. */
#pragma once
#include <sys/uio.h>
#include "transport/wire/frame.h"

struct out_seg;
struct out_bulk;
struct wire_out {
    struct out_seg *first, *last;
    struct out_bulk *bulk, *bulk_last;
    size_t ready_bytes, queued_bytes; /* queued: all, ready or bulk */
    size_t since_piece;               /* small bytes that left since a piece did */
};
/* Copies head and body; the blob too unless m->hold is set; duplicates descriptors.
 * FL_EXHAUSTED: no memory or descriptors; nothing was taken. */
enum fl_status wire_out_put(struct wire_out *o, const struct wire_msg *m, struct fl_err *err);
/* Bytes to write next, from the front. The descriptors go with the first of these bytes.
 * FL_EXHAUSTED: no memory for the head of a piece: the connection is of no use. */
enum fl_status wire_out_next(struct wire_out *o, struct iovec *iov, unsigned max_iov, unsigned *n_iov,
                             const int **fds, unsigned *n_fds, struct fl_err *err);
void wire_out_gone(struct wire_out *o, size_t bytes); /* so many left; frees holds whose blob is out */
void wire_out_clear(struct wire_out *o);              /* frees all holds */
static inline bool wire_out_empty(const struct wire_out *o)
{
    return o->queued_bytes == 0;
}
