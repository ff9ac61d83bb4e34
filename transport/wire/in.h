/* transport/wire/in.h - frames out of a stream of bytes; private to wire and its tests
 *
 * The reader asks where the next bytes shall go, reads, and says how many came. Small frames are
 * looked at where they were read; what is larger is received straight into its place. */
#pragma once
#include <sys/uio.h>
#include "transport/wire/frame.h"

enum { WIRE_IN_BUF = 64 << 10, WIRE_IN_IOV = 3, WIRE_IN_FDS = 2 * WIRE_MAX_FDS };
struct in_msg { /* a message that is larger than the buffer, or goes in pieces */
    bool active;
    struct wire_head head;
    uint8_t *body, *blob;
    bool blob_ours;          /* from malloc, not from room()  */
    uint64_t body_got, blob_got;
    uint64_t blob_part;      /* got at the end of this frame  */
    int fds[WIRE_MAX_FDS];
};
struct wire_in {
    uint8_t *buf; /* WIRE_IN_BUF, made by the first wire_in_iov() */
    size_t from, to;
    struct in_msg whole, bulk;
    struct in_msg *filling; /* which of the two the next bytes belong to */
    bool in_hello, stopped;
    unsigned n_fds; /* came, and no frame has claimed them yet */
    int fds[WIRE_IN_FDS];
    void *arg;
    void *(*room)(void *arg, const struct wire_head *h); /* NULL: memory of ours */
    enum fl_status (*message)(void *arg, const struct wire_msg *m, struct fl_err *err);
};
void wire_in_init(struct wire_in *in);
void wire_in_fini(struct wire_in *in); /* drops everything under way; may be filled again after it */
enum fl_status wire_in_iov(struct wire_in *in, struct iovec iov[WIRE_IN_IOV], int *n,
                           struct fl_err *err);
/* n bytes came where wire_in_iov() said, with these descriptors (taken). Calls message() for each
 * frame that is whole now. After a failure it must be stopped; then what comes is dropped. */
enum fl_status wire_in_got(struct wire_in *in, size_t n, const int *fds, unsigned n_fds,
                           struct fl_err *err);
void wire_in_stop(struct wire_in *in); /* inside message() too */
/* That memory is going: the rest of its blob is dropped. */
void wire_in_forget(struct wire_in *in, const void *room);
