/* transport/wire/carrier.h - what a carrier is to a stream: a line of bytes; private to wire
 *
 * A carrier makes lines, by dialling or by listening, and moves bytes over them without blocking.
 * Frames, HELLO, bounds, deadlines and reconnecting are the stream's, the same over every carrier. */
#pragma once
#include <sys/uio.h>
#include "transport/wire/wire.h"

enum { LINE_IN = 1, LINE_OUT = 2, LINE_IOV = 64, LINE_READ_IOV = 4, LINE_FDS = 64 };
struct wire_line;
struct line_user { /* loop thread; a line may be dropped inside each */
    void (*up)(void *arg);                            /* dialled; never for a line that arrived */
    void (*ready)(void *arg, unsigned what);          /* LINE_IN: read; LINE_OUT: write again   */
    void (*down)(void *arg, const struct fl_err *why); /* dialling failed; drop it               */
};
struct line_ops {
    /* Both move what they can. FL_AGAIN: nothing now, ready() follows. FL_UNREACHABLE: hung up; any
     * other status: broken. write: fds go with the first byte. read: *n_fds in room for, out came
     * (the caller owns them). */
    enum fl_status (*write)(struct wire_line *k, const struct iovec *iov, unsigned n, const int *fds,
                            unsigned n_fds, size_t *wrote, struct fl_err *err);
    enum fl_status (*read)(struct wire_line *k, const struct iovec *iov, unsigned n, int fds[LINE_FDS],
                           unsigned *n_fds, size_t *got, struct fl_err *err);
    /* Gone for its user when it returns. Bytes that were written may still be on their way. */
    void (*drop)(struct wire_line *k);
};
struct wire_line { /* embedded by each carrier */
    const struct line_ops *ops;
    struct fl_loop *loop;
    const struct line_user *user;
    void *arg;
    unsigned caps;
    char peer[64]; /* for errors, "" where the target says it all */
};
struct wire_port; /* a listener, embedded by each carrier */
struct wire_port_ops {
    void (*close)(struct wire_port *p); /* nothing arrives any more, freed */
    void (*pause)(struct wire_port *p, bool on);
};
struct wire_port {
    const struct wire_port_ops *ops;
    char at[128]; /* the target to connect to */
    void (*arrived)(void *arg, struct wire_line *k_take);
    void *arg;
};
struct wire_carrier {
    /* up() or down() follows, never inside dial. user is set before. */
    enum fl_status (*dial)(struct fl_loop *l, const struct stream_to *to, const struct line_user *user,
                           void *arg, struct wire_line **out, struct fl_err *err);
    enum fl_status (*listen)(struct fl_loop *l, const struct stream_to *at, bool has_key,
                             void (*arrived)(void *arg, struct wire_line *k_take), void *arg,
                             struct wire_port **out, struct fl_err *err);
};

/* ---- targets */
enum { WIRE_HOST_MAX = 254 };
/* "HOST:PORT" or "[V6]:PORT". FL_INVALID says what is wrong with it. */
enum fl_status wire_target_split(const char *target, char host[WIRE_HOST_MAX], uint16_t *port,
                                 struct fl_err *err);
bool wire_host_is_loopback(const char *host); /* 127.0.0.0/8, ::1, localhost */
/* FL_DENIED: beyond loopback nobody listens without a key. */
enum fl_status wire_port_check(const char *host, bool has_key, struct fl_err *err);
