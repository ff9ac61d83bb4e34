/* transport/link/tcp_take.c - the receiver's side: a connection for each source, pulls one after
 * the other */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "kernels/digest.h"
#include "transport/link/tcp_priv.h"

struct tcp_taking {
    struct tcp_end end;
    LIST_ENTRY(tcp_taking) next;
    char addr[64];
    uint16_t port;
    bool connected;
    uint64_t moved_ns;      /* when something last happened */
    struct tcp_pulls pulls; /* the first one is arriving */
    unsigned char *tx;      /* asks that the socket has not taken yet */
    size_t tx_at, tx_n, tx_cap;
    struct tcp_say say; /* of the first pull; said bytes of it are here */
    size_t said;
    size_t seg; /* where the next byte goes */
    uint32_t row;
    uint64_t run_at;
};

struct tcp_taking *tcp_taking_of(struct tcp_end *e)
{
    return container_of(e, struct tcp_taking, end);
}

static void taking_close(struct tcp *k, struct tcp_taking *c, enum fl_status st, const char *why)
{
    struct tcp_pull *p;

    (void)k;
    close(c->end.fd); /* leaves the epoll set with it */
    LIST_REMOVE(c, next);
    while ((p = STAILQ_FIRST(&c->pulls))) {
        STAILQ_REMOVE_HEAD(&c->pulls, next);
        link_op_set(p->op, st, "tcp: pull from %s port %u: %s, %llu of %llu bytes arrived", c->addr,
                    c->port, why, (unsigned long long)p->arrived, (unsigned long long)p->bytes);
        tcp_pull_over(k, p);
    }
    free(c->tx);
    free(c);
}

void tcp_take_close_all(struct tcp *k)
{
    for (struct tcp_taking *c; (c = LIST_FIRST(&k->takings));)
        taking_close(k, c, FL_CANCELLED, "the link was ended");
}

void tcp_take_late(struct tcp *k, uint64_t now_ns)
{
    struct tcp_taking *c, *next;

    for (c = LIST_FIRST(&k->takings); c; c = next) {
        uint64_t limit_ms = c->connected ? TCP_STALL_MS : TCP_CONNECT_MS;

        next = LIST_NEXT(c, next);
        if (!STAILQ_EMPTY(&c->pulls) && now_ns > c->moved_ns &&
            now_ns - c->moved_ns > limit_ms * 1000000ull)
            taking_close(k, c, FL_TIMEOUT,
                         c->connected ? "nothing came for 30 s" : "no connection in 5 s");
    }
}

static struct tcp_taking *taking_find(struct tcp *k, const struct tcp_key *to)
{
    struct tcp_taking *c;

    LIST_FOREACH(c, &k->takings, next)
    if (c->port == to->port && strcmp(c->addr, to->addr) == 0)
        return c;
    return NULL;
}

static int connect_to(const struct tcp_key *to)
{
    struct addrinfo *a,
        how = { .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM };
    char port[8];
    int one = 1;

    snprintf(port, sizeof(port), "%u", to->port);
    if (getaddrinfo(to->addr, port, &how, &a) != 0) {
        errno = EINVAL;
        return -1;
    }
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

    if (fd >= 0) {
        (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)); /* only slower without */
        if (connect(fd, a->ai_addr, a->ai_addrlen) < 0 && errno != EINPROGRESS) {
            int e = errno;

            close(fd);
            errno = e;
            fd = -1;
        }
    }
    freeaddrinfo(a);
    return fd;
}

static struct tcp_taking *taking_open(struct tcp *k, const struct tcp_key *to, struct link_op *op)
{
    struct tcp_taking *c = calloc(1, sizeof(*c));
    int fd = c ? connect_to(to) : -1;

    if (fd < 0) {
        link_op_set(op, c && errno != EMFILE && errno != ENFILE ? FL_UNREACHABLE : FL_EXHAUSTED,
                    "tcp: connect to %s port %u: %s", to->addr, to->port, strerror(errno));
        free(c);
        return NULL;
    }
    c->end = (struct tcp_end){ TCP_TAKES, fd };
    memcpy(c->addr, to->addr, sizeof(c->addr));
    c->port = to->port;
    c->moved_ns = fl_clock_boot_ns();
    STAILQ_INIT(&c->pulls);
    LIST_INSERT_HEAD(&k->takings, c, next);
    if (!tcp_watch(k, &c->end, EPOLLOUT, true)) {
        link_op_set(op, FL_EXHAUSTED, "tcp: connect to %s port %u: %s", to->addr, to->port,
                    strerror(errno));
        taking_close(k, c, FL_EXHAUSTED, "epoll");
        return NULL;
    }
    return c;
}

static bool tx_room(struct tcp_taking *c, size_t more)
{
    if (c->tx_at == c->tx_n)
        c->tx_at = c->tx_n = 0;
    if (c->tx_cap - c->tx_n >= more)
        return true;
    unsigned char *grown = realloc(c->tx, c->tx_n + more);

    if (!grown)
        return false;
    c->tx = grown;
    c->tx_cap = c->tx_n + more;
    return true;
}

static bool add_ask(struct tcp_taking *c, const struct tcp_pull *p)
{
    struct tcp_ask ask = {
        .magic = TCP_ASK_MAGIC, .n_runs = (uint32_t)p->n, .region = p->from.region, .id = p->id
    };

    if (!tx_room(c, sizeof(ask) + p->n * sizeof(struct tcp_run)))
        return false;
    memcpy(ask.token, p->from.token, sizeof(ask.token));
    memcpy(c->tx + c->tx_n, &ask, sizeof(ask));
    c->tx_n += sizeof(ask);
    for (size_t i = 0; i < p->n; i++, c->tx_n += sizeof(struct tcp_run)) {
        const struct link_seg *s = &p->segs[i];
        struct tcp_run r = { s->from_off, s->run_bytes, s->from_step, s->rows, 0 };

        memcpy(c->tx + c->tx_n, &r, sizeof(r));
    }
    return true;
}

static bool write_asks(struct tcp *k, struct tcp_taking *c)
{
    while (c->tx_at < c->tx_n) {
        ssize_t n = send(c->end.fd, c->tx + c->tx_at, c->tx_n - c->tx_at, MSG_NOSIGNAL);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            break;
        if (n < 0)
            return false;
        c->tx_at += (size_t)n;
    }
    return tcp_watch(k, &c->end, EPOLLIN | (c->tx_at < c->tx_n ? EPOLLOUT : 0), false);
}

void tcp_take_start(struct tcp *k, struct tcp_pull *p)
{
    struct tcp_taking *c = taking_find(k, &p->from);

    if (!c && !(c = taking_open(k, &p->from, p->op))) {
        tcp_pull_over(k, p);
        return;
    }
    if (!add_ask(c, p)) {
        link_op_set(p->op, FL_EXHAUSTED, "tcp: no memory to ask for %zu segments", p->n);
        tcp_pull_over(k, p);
        return;
    }
    if (STAILQ_EMPTY(&c->pulls))
        c->moved_ns = fl_clock_boot_ns();
    STAILQ_INSERT_TAIL(&c->pulls, p, next);
    if (c->connected && !write_asks(k, c))
        taking_close(k, c, FL_UNREACHABLE, strerror(errno));
}

/* ---- bytes ---- */

static unsigned next_iov(const struct tcp_taking *c, const struct tcp_pull *p, struct iovec *iov,
                         size_t *bytes)
{
    size_t seg = c->seg, all = 0;
    uint32_t row = c->row;
    uint64_t at = c->run_at;
    unsigned n = 0;

    while (n < TCP_IOV && seg < p->n && all < TCP_CALL_BYTES) {
        const struct link_seg *s = &p->segs[seg];
        uint64_t len = s->run_bytes - at;

        if (len > TCP_CALL_BYTES - all)
            len = TCP_CALL_BYTES - all;
        iov[n++] = (struct iovec){ (char *)p->to.addr + s->to_off + row * s->to_step + at, len };
        all += len;
        at = 0;
        if (++row == s->rows) {
            row = 0;
            seg++;
        }
    }
    *bytes = all;
    return n;
}

/* got bytes lie where next_iov() said, or at bounce; they are digested while they are in the
 * cache. */
static void advance(struct tcp_taking *c, struct tcp_pull *p, size_t got, const char *bounce)
{
    p->arrived += got;
    while (got > 0) {
        const struct link_seg *s = &p->segs[c->seg];
        size_t n = s->run_bytes - c->run_at < got ? s->run_bytes - c->run_at : got;

        if (p->digests)
            kernel_digest_add(
                p->digests[c->seg],
                bounce ? bounce : (char *)p->to.addr + s->to_off + c->row * s->to_step + c->run_at,
                n, s->first_byte + c->row * s->byte_step + c->run_at);
        if (bounce)
            bounce += n;
        got -= n;
        c->run_at += n;
        if (c->run_at < s->run_bytes)
            return;
        c->run_at = 0;
        if (++c->row == s->rows) {
            c->row = 0;
            c->seg++;
        }
    }
}

static void pull_ends(struct tcp *k, struct tcp_taking *c, struct tcp_pull *p)
{
    STAILQ_REMOVE_HEAD(&c->pulls, next);
    c->said = 0;
    c->seg = 0;
    c->row = 0;
    c->run_at = 0;
    tcp_pull_over(k, p);
}

/* 1: go on; 0: nothing more now; -1: broken, errno says how. */
static int read_say(struct tcp *k, struct tcp_taking *c, struct tcp_pull *p)
{
    ssize_t n = recv(c->end.fd, (char *)&c->say + c->said, sizeof(c->say) - c->said, 0);

    if (n <= 0) {
        errno = n == 0 ? ECONNRESET : errno;
        return n < 0 && errno == EINTR ? 1 : n < 0 && errno == EAGAIN ? 0 : -1;
    }
    c->said += (size_t)n;
    if (c->said < sizeof(c->say))
        return 1;
    if (c->say.magic != TCP_SAY_MAGIC || c->say.id != p->id ||
        (c->say.status == FL_OK && c->say.bytes != p->bytes)) {
        errno = EPROTO;
        return -1;
    }
    if (c->say.status == FL_OK)
        return 1;
    enum fl_status st =
        c->say.status < FL_STATUS_COUNT ? (enum fl_status)c->say.status : FL_CORRUPT;

    link_op_set(p->op, st, "tcp: %s port %u: %.*s", c->addr, c->port, (int)sizeof(c->say.text) - 1,
                c->say.text);
    pull_ends(k, c, p);
    return 1;
}

/* got bytes at bounce go to where iov says, which is a device's. */
static bool land(const struct tcp_pull *p, const struct iovec *iov, size_t got, const char *bounce)
{
    struct link_run runs[TCP_IOV];
    unsigned n = 0;

    for (size_t left = got; left > 0; left -= runs[n++].bytes)
        runs[n] = (struct link_run){ (uint64_t)(uintptr_t)iov[n].iov_base -
                                         (uint64_t)(uintptr_t)p->to.addr,
                                     iov[n].iov_len < left ? iov[n].iov_len : left };
    return link_mem_put(&p->to, runs, n, bounce, NULL) == FL_OK;
}

static int read_bytes(struct tcp *k, struct tcp_taking *c, struct tcp_pull *p)
{
    struct iovec iov[TCP_IOV];
    size_t all;
    struct msghdr m = { .msg_iov = iov, .msg_iovlen = next_iov(c, p, iov, &all) };
    struct iovec one = { k->bounce, all };
    bool device = p->to.on_device;

    if (device && !tcp_bounce(k)) {
        errno = ENOMEM;
        return -1;
    }
    if (device) {
        one.iov_base = k->bounce;
        m = (struct msghdr){ .msg_iov = &one, .msg_iovlen = 1 };
    }
    ssize_t n = FL_FAULT("link.tcp.recv") ? 0 : recvmsg(c->end.fd, &m, 0);

    if (n <= 0) {
        errno = n == 0 ? ECONNRESET : errno;
        return n < 0 && errno == EINTR ? 1 : n < 0 && errno == EAGAIN ? 0 : -1;
    }
    if (device && !land(p, iov, (size_t)n, k->bounce)) {
        errno = EIO;
        return -1;
    }
    advance(c, p, (size_t)n, device ? k->bounce : NULL);
    if (c->seg == p->n) {
        link_op_set(p->op, FL_OK, "%s", "");
        pull_ends(k, c, p);
        return 1;
    }
    return (size_t)n == all; /* less: the socket is empty, asking again would only say so */
}

static bool connect_ends(struct tcp *k, struct tcp_taking *c)
{
    int e = 0;
    socklen_t len = sizeof(e);

    if (getsockopt(c->end.fd, SOL_SOCKET, SO_ERROR, &e, &len) < 0 || e) {
        errno = e ? e : errno;
        return false;
    }
    c->connected = true;
    c->moved_ns = fl_clock_boot_ns();
    return write_asks(k, c);
}

void tcp_take_ready(struct tcp *k, struct tcp_taking *c, unsigned events)
{
    bool ok = true;
    int more = 1;

    if (!c->connected && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP)))
        ok = connect_ends(k, c);
    else if (events & EPOLLOUT)
        ok = write_asks(k, c);
    for (unsigned i = 0;
         ok && more > 0 && i < TCP_TURN_CALLS && (events & (EPOLLIN | EPOLLERR | EPOLLHUP)); i++) {
        struct tcp_pull *p = STAILQ_FIRST(&c->pulls);

        if (!p) { /* nothing was asked: the peer left, or talks out of turn */
            taking_close(k, c, FL_UNREACHABLE, "closed");
            return;
        }
        more = c->said < sizeof(c->say) ? read_say(k, c, p) : read_bytes(k, c, p);
        ok = more >= 0;
        if (ok)
            c->moved_ns = fl_clock_boot_ns();
        if (ok && STAILQ_EMPTY(&c->pulls))
            break;
    }
    if (!ok)
        taking_close(k, c, errno == EPROTO ? FL_CORRUPT : FL_UNREACHABLE, strerror(errno));
}
