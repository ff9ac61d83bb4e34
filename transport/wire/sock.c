/* Unix and TCP sockets. Unix: the peer is this user or root, and descriptors travel as SCM_RIGHTS.
 */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "transport/tls/tls.h"
#include "transport/wire/resolve.h"
#include "transport/wire/sock.h"

/* A dead host is noticed after 10 + 3 * 5 s without traffic, and after 20 s with. */
enum { KEEP_IDLE_S = 10, KEEP_EVERY_S = 5, KEEP_TIMES = 3, UNACKED_MS = 20000, BUSY_MS = 10 };

struct sock_line {
    struct wire_line k;
    int fd;
    struct fl_watch *watch;
    bool connecting, shaking;
    struct tls_id *tls; /* whose session it will be, once connected */
    struct tls_session *session;
    struct fl_task more;  /* the session has bytes that no poll tells of */
    struct fl_task start; /* what dial found out, told in a later turn */
    struct fl_timer busy; /* the server's backlog is full: once more   */
    struct wire_resolve *names;
    struct wire_addrs addrs; /* left to try from at on */
    unsigned at;
    struct fl_err err;
    char target[128], host[WIRE_HOST_MAX];
};

static void try_next(struct sock_line *k);

static void line_close(struct sock_line *k)
{
    tls_session_destroy(k->session);
    k->session = NULL;
    fl_watch_destroy(k->watch);
    k->watch = NULL;
    if (k->fd >= 0)
        close(k->fd);
    k->fd = -1;
}

static void sock_drop(struct wire_line *line)
{
    struct sock_line *k = container_of(line, struct sock_line, k);

    line_close(k);
    fl_task_cancel(line->loop, &k->start);
    fl_task_cancel(line->loop, &k->more);
    fl_timer_cancel(&k->busy);
    wire_resolve_forget(k->names);
    free(k);
}

static enum fl_status hung_up(struct fl_err *err, const char *doing)
{
    if (errno == ECONNRESET || errno == EPIPE)
        return fl_fail(err, FL_UNREACHABLE, "the other side hung up");
    if (errno == ETIMEDOUT)
        return fl_fail(err, FL_UNREACHABLE, "the other side does not answer any more");
    return fl_fail_errno(err, "%s", doing);
}

/* Reading waits for POLLIN anyway, and does not take back what writing waits for. */
static enum fl_status watch_for(struct sock_line *k, enum fl_status st, unsigned events)
{
    if (st == FL_AGAIN && (events & POLLOUT))
        fl_watch_events(k->watch, POLLIN | POLLOUT);
    return st;
}

static enum fl_status sealed_write(struct sock_line *k, const struct iovec *iov, unsigned n,
                                   size_t *wrote, struct fl_err *err)
{
    unsigned events = 0;

    if (k->shaking)
        return FL_AGAIN; /* ready() follows */
    enum fl_status st = tls_session_write(k->session, iov, n, wrote, &events, err);

    return watch_for(k, st, events);
}

static enum fl_status sealed_read(struct sock_line *k, const struct iovec *iov, unsigned n,
                                  size_t *got, struct fl_err *err)
{
    unsigned events = 0;

    if (k->err.status)
        return fl_fail(err, k->err.status, "%s", k->err.text);
    if (k->shaking)
        return FL_AGAIN;
    enum fl_status st = tls_session_read(k->session, iov, n, got, &events, err);

    (void)watch_for(k, st, events);
    if (st == FL_OK && tls_session_has(k->session))
        fl_defer(k->k.loop, &k->more);
    return st;
}

static enum fl_status sock_write(struct wire_line *line, const struct iovec *iov, unsigned n,
                                 const int *fds, unsigned n_fds, size_t *wrote, struct fl_err *err)
{
    struct sock_line *k = container_of(line, struct sock_line, k);
    union {
        char room[CMSG_SPACE(LINE_FDS * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct msghdr m = { .msg_iov = (struct iovec *)(uintptr_t)iov, .msg_iovlen = n };
    ssize_t rc;

    if (k->session)
        return sealed_write(k, iov, n, wrote, err);
    if (n_fds) {
        m.msg_control = control.room;
        m.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        memset(control.room, 0, m.msg_controllen);
        *CMSG_FIRSTHDR(&m) = (struct cmsghdr){ .cmsg_level = SOL_SOCKET,
                                               .cmsg_type = SCM_RIGHTS,
                                               .cmsg_len = CMSG_LEN(n_fds * sizeof(int)) };
        memcpy(CMSG_DATA(CMSG_FIRSTHDR(&m)), fds, n_fds * sizeof(int));
    }
    do
        rc = sendmsg(k->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (rc < 0 && errno == EINTR);
    if (rc >= 0) {
        *wrote = (size_t)rc;
        return FL_OK;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
        fl_watch_events(k->watch, POLLIN | POLLOUT);
        return FL_AGAIN;
    }
    return hung_up(err, "send");
}

static enum fl_status take_fds(struct msghdr *m, int fds[LINE_FDS], unsigned *n_fds,
                               struct fl_err *err)
{
    unsigned n = 0;

    for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
        unsigned more = (unsigned)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));

        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS || n + more > LINE_FDS)
            continue;
        memcpy(fds + n, CMSG_DATA(c), more * sizeof(int));
        n += more;
    }
    if (m->msg_flags & MSG_CTRUNC) {
        while (n)
            close(fds[--n]);
        return fl_fail(err, FL_EXHAUSTED,
                       "descriptors were lost on their way in: more than %d came with "
                       "one message, or no more may be open here (see ulimit -n)",
                       LINE_FDS);
    }
    *n_fds = n;
    return FL_OK;
}

static enum fl_status sock_read(struct wire_line *line, const struct iovec *iov, unsigned n,
                                int fds[LINE_FDS], unsigned *n_fds, size_t *got, struct fl_err *err)
{
    struct sock_line *k = container_of(line, struct sock_line, k);
    union {
        char room[CMSG_SPACE(LINE_FDS * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct msghdr m = { .msg_iov = (struct iovec *)(uintptr_t)iov, .msg_iovlen = n };
    ssize_t rc;

    if (k->session)
        return sealed_read(k, iov, n, got, err);
    if (line->caps & STREAM_FDS) {
        m.msg_control = control.room;
        m.msg_controllen = sizeof(control.room);
    }
    do
        rc = recvmsg(k->fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (rc < 0 && errno == EINTR);
    if (rc < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? FL_AGAIN : hung_up(err, "receive");
    FL_TRY(take_fds(&m, fds, n_fds, err));
    if (rc == 0)
        return fl_fail(err, FL_UNREACHABLE, "the other side hung up");
    *got = (size_t)rc;
    return FL_OK;
}

static const struct line_ops sock_ops = { .write = sock_write,
                                          .read = sock_read,
                                          .drop = sock_drop };

/* ---- readiness */

static enum fl_status check_user(int fd, struct fl_err *err)
{
    struct ucred c;
    socklen_t len = sizeof(c);

    if (FL_FAULT("wire.peercred") || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &c, &len) < 0)
        return fl_fail_errno(err, "the user at the other end");
    if (c.uid != geteuid() && c.uid != 0)
        return fl_fail(err, FL_DENIED, "the other end belongs to user %u, this side to user %u",
                       c.uid, geteuid());
    return FL_OK;
}

static void connect_failed(struct sock_line *k, int number)
{
    fl_err_set(&k->err, FL_UNREACHABLE, FL_FROM_ERRNO, number, "connect to %s: %s", k->target,
               strerror(number));
    line_close(k);
    k->at++;
    try_next(k);
}

/* One step of TLS's greeting. Whoever was dialled finds a failure in its first read. */
static void shake(struct sock_line *k)
{
    unsigned events;
    enum fl_status st = tls_session_shake(k->session, &events, &k->err);

    if (st == FL_AGAIN) {
        fl_watch_events(k->watch, events);
        return;
    }
    k->shaking = false;
    fl_watch_events(k->watch, POLLIN);
    if (!k->tls) {
        k->k.user->ready(k->k.arg, LINE_IN);
    } else if (st == FL_OK) {
        k->k.user->up(k->k.arg);
    } else {
        fl_wrap(&k->err, st, "connect to %s", k->target);
        k->k.user->down(k->k.arg, &k->err);
    }
}

static void connected(struct sock_line *k)
{
    k->connecting = false;
    fl_watch_events(k->watch, POLLIN);
    if (k->tls) {
        if (tls_session_create(k->tls, k->fd, k->host, &k->session, &k->err) != FL_OK) {
            fl_wrap(&k->err, k->err.status, "connect to %s", k->target);
            k->k.user->down(k->k.arg, &k->err);
            return;
        }
        k->err = (struct fl_err){ 0 }; /* of an address that was tried before */
        k->shaking = true;
        shake(k);
        return;
    }
    if ((k->k.caps & STREAM_LOCAL) && check_user(k->fd, &k->err) != FL_OK) {
        fl_wrap(&k->err, k->err.status, "%s", k->target);
        k->k.user->down(k->k.arg, &k->err);
        return;
    }
    k->k.user->up(k->k.arg);
}

static void line_ready(void *arg, unsigned events)
{
    struct sock_line *k = arg;
    unsigned what = 0;

    if (k->connecting) {
        int number = 0;
        socklen_t len = sizeof(number);

        getsockopt(k->fd, SOL_SOCKET, SO_ERROR, &number, &len);
        if (number)
            connect_failed(k, number);
        else
            connected(k);
        return;
    }
    if (k->shaking) {
        shake(k);
        return;
    }
    if (events & (POLLIN | POLLHUP | POLLERR))
        what |= LINE_IN;
    if (events & POLLOUT) {
        fl_watch_events(k->watch, POLLIN);
        what |= LINE_OUT;
    }
    k->k.user->ready(k->k.arg, what);
}

static void read_more(struct fl_task *t)
{
    struct sock_line *k = container_of(t, struct sock_line, more);

    k->k.user->ready(k->k.arg, LINE_IN);
}

/* ---- connecting */

static void tcp_options(int fd)
{
    static const struct {
        int level, name, value;
    } set[] = {
        { IPPROTO_TCP, TCP_NODELAY, 1 },
        { SOL_SOCKET, SO_KEEPALIVE, 1 },
        { IPPROTO_TCP, TCP_KEEPIDLE, KEEP_IDLE_S },
        { IPPROTO_TCP, TCP_KEEPINTVL, KEEP_EVERY_S },
        { IPPROTO_TCP, TCP_KEEPCNT, KEEP_TIMES },
        { IPPROTO_TCP, TCP_USER_TIMEOUT, UNACKED_MS },
    };

    for (unsigned i = 0; i < FL_LEN(set); i++)
        (void)setsockopt(fd, set[i].level, set[i].name, &set[i].value,
                         sizeof(int)); /* all optional */
}

static void try_later(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    try_next(container_of(t, struct sock_line, busy));
}

/* The next address: connecting, or down with the last error when there is none left. Not inside
 * dial: what goes wrong at once is told at once. */
static void try_next(struct sock_line *k)
{
    const struct wire_addr *a = &k->addrs.a[k->at];
    struct fl_err err;

    if (k->at == k->addrs.n) {
        k->k.user->down(k->k.arg, &k->err);
        return;
    }
    k->fd = FL_FAULT("wire.socket")
                ? -1
                : socket(a->u.sa.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (k->fd < 0) {
        fl_fail_errno(&err, "socket to %s", k->target);
        k->k.user->down(k->k.arg, &err);
        return;
    }
    if (a->u.sa.sa_family != AF_UNIX)
        tcp_options(k->fd);
    k->connecting = true;
    if (!FL_FAULT("wire.connect") && connect(k->fd, &a->u.sa, a->len) == 0)
        errno = EINPROGRESS; /* told by the first readiness, like all others */
    if (errno == EAGAIN && a->u.sa.sa_family == AF_UNIX) { /* its backlog is full */
        line_close(k);
        k->busy.fire = try_later;
        fl_timer_arm_in(k->k.loop, &k->busy, BUSY_MS);
        return;
    }
    if (errno != EINPROGRESS) {
        connect_failed(k, errno);
        return;
    }
    if (fl_watch_create(k->k.loop, k->fd, POLLOUT, line_ready, k, &k->watch, &err) != FL_OK)
        k->k.user->down(k->k.arg, &err);
}

static void resolved(void *arg, enum fl_status st, const struct wire_addrs *addrs,
                     const struct fl_err *why)
{
    struct sock_line *k = arg;

    k->names = NULL;
    if (st == FL_OK) {
        k->addrs = *addrs;
        try_next(k);
    } else {
        k->k.user->down(k->k.arg, why);
    }
}

static void start(struct fl_task *t)
{
    try_next(container_of(t, struct sock_line, start));
}

static struct sock_line *line_create(struct fl_loop *l, int fd, unsigned caps)
{
    struct sock_line *k = FL_FAULT("wire.line") ? NULL : calloc(1, sizeof(*k));

    if (!k)
        return NULL;
    k->k = (struct wire_line){ .ops = &sock_ops, .loop = l, .caps = caps };
    k->fd = fd;
    k->start.run = start;
    k->more.run = read_more;
    return k;
}

static enum fl_status sock_dial(struct fl_loop *l, const struct stream_to *to,
                                const struct line_user *user, void *arg, struct wire_line **out,
                                struct fl_err *err)
{
    bool local = strncmp(to->target, "unix:", 5) == 0;
    struct wire_addrs now = { 0 };
    char host[WIRE_HOST_MAX];
    uint16_t port;
    struct sock_line *k;

    if (local)
        FL_TRY(wire_addr_unix(to->target + 5, &now, err));
    else
        FL_TRY(wire_target_split(to->target, host, &port, err));
    k = line_create(l, -1, local ? STREAM_FDS | STREAM_LOCAL : 0);
    if (!k)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a connection to %s", to->target);
    k->k.user = user;
    k->k.arg = arg;
    snprintf(k->target, sizeof(k->target), "%s", to->target);
    if (!local) {
        k->tls = to->tls;
        snprintf(k->host, sizeof(k->host), "%s", host);
    }
    if (!local && !wire_addr_parse(host, port, &now)) {
        enum fl_status st = wire_resolve(l, host, port, resolved, k, &k->names, err);

        if (st != FL_OK) {
            free(k);
            return st;
        }
    } else {
        k->addrs = now;
        fl_defer(l, &k->start);
    }
    *out = &k->k;
    return FL_OK;
}

enum fl_status sock_line_of(struct fl_loop *l, int fd_take, struct tls_id *tls,
                            struct wire_line **out, struct fl_err *err)
{
    union wire_sockaddr sa;
    socklen_t len = sizeof(sa);
    bool local = getsockname(fd_take, &sa.sa, &len) == 0 && sa.sa.sa_family == AF_UNIX;
    struct sock_line *k = line_create(l, fd_take, local ? STREAM_FDS | STREAM_LOCAL : 0);
    enum fl_status st;

    if (!k) {
        close(fd_take);
        return fl_fail(err, FL_EXHAUSTED, "no memory for a connection");
    }
    if (local) {
        struct ucred c = { 0 };

        st = check_user(fd_take, err);
        len = sizeof(c);
        (void)getsockopt(fd_take, SOL_SOCKET, SO_PEERCRED, &c, &len); /* for the name alone */
        snprintf(k->k.peer, sizeof(k->k.peer), "process %d", c.pid);
    } else {
        tcp_options(fd_take);
        len = sizeof(sa);
        if (getpeername(fd_take, &sa.sa, &len) == 0)
            wire_addr_text(&sa, k->k.peer, sizeof(k->k.peer));
        st = tls ? tls_session_create(tls, fd_take, NULL, &k->session, err) : FL_OK;
        k->shaking = tls != NULL;
    }
    if (st == FL_OK)
        st = fl_watch_create(l, fd_take, POLLIN, line_ready, k, &k->watch, err);
    if (st != FL_OK) {
        sock_drop(&k->k);
        return st;
    }
    *out = &k->k;
    return FL_OK;
}

static const struct wire_carrier sock_carrier = { .dial = sock_dial, .listen = sock_listen };
const struct stream_ops stream_sock = {
    .name = "sock",
    .caps = STREAM_FDS | STREAM_LOCAL,
    .send = wire_send,
    .close = wire_close,
    .carrier = &sock_carrier,
};
