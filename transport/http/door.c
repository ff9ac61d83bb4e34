/* Who comes in, and how long it may take to say what it wants.
 *
 * libmicrohttpd counts silence alone, so a client that sends a byte now and then would keep its
 * connection for ever: each connection has a time by which a request must be whole, too. And where
 * TLS is spoken, whoever comes without it is told so in plain text rather than by a connection that
 * just ends: the first byte says which it is. */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "transport/http/server_priv.h"

enum {
    TLS_GREETING = 0x16, /* first byte of a record that begins TLS */
    ACCEPTS = 64,        /* for one readiness */
    FULL_MS = 100,       /* no descriptor is free: look again after so long */
    LINGER_MS = 1000,    /* for a client that is told off to read it */
    BODY_FLOOR = 64,     /* bytes a millisecond: slower than that nobody sends a body */
};
static const char no_tls[] = "This port speaks TLS: use https:// in place of http://, and for `ray "
                             "job` --verify=FILE with the CA's "
                             "certificate.\n";

/* ---- connections of MHD's ---- */

bool http_addr_is_loopback(const struct sockaddr *a)
{
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)a;
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)a;

    if (!a)
        return false;
    if (a->sa_family == AF_INET)
        return ntohl(v4->sin_addr.s_addr) >> 24 == 127;
    return a->sa_family == AF_INET6 &&
           (IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr) ||
            (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr) && v6->sin6_addr.s6_addr[12] == 127));
}

/* A quarter is kept for this host's own commands, whatever others do. */
static bool has_room(const struct http_server *s, const struct sockaddr *from)
{
    return http_addr_is_loopback(from) ||
           s->n_far < s->c.connections_max - s->c.connections_max / 4;
}

enum MHD_Result http_door_policy(void *arg, const struct sockaddr *from, socklen_t len)
{
    (void)len;
    return has_room(arg, from) ? MHD_YES : MHD_NO;
}

static void too_slow(struct fl_timer *t, uint64_t now_ns)
{
    struct http_conn *c = container_of(t, struct http_conn, due);

    (void)now_ns;
    (void)shutdown(c->fd, SHUT_RDWR); /* MHD finds it closed, and closes */
    http_kick(c->server);
}

static void wants_by(struct http_conn *c, uint64_t in_ms)
{
    c->due.fire = too_slow;
    fl_timer_arm_in(c->server->loop, &c->due, in_ms);
}

void http_door_notify(void *arg, struct MHD_Connection *conn, void **slot,
                      enum MHD_ConnectionNotificationCode what)
{
    struct http_server *s = arg;
    struct http_conn *c = *slot;

    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *fd =
            MHD_get_connection_info(conn, MHD_CONNECTION_INFO_CONNECTION_FD);
        const union MHD_ConnectionInfo *from =
            MHD_get_connection_info(conn, MHD_CONNECTION_INFO_CLIENT_ADDRESS);

        s->n_conns++;
        c = fd && from ? calloc(1, sizeof(*c)) : NULL;
        if (!c)
            return; /* only without a time of its own */
        c->server = s;
        c->fd = fd->connect_fd;
        c->far = !http_addr_is_loopback(from->client_addr);
        s->n_far += c->far;
        *slot = c;
        wants_by(c, s->c.idle_ms);
        return;
    }
    if (s->n_conns-- >= s->c.connections_max)
        http_kick(s); /* MHD listens again in its next turn, and nothing else would bring that on */
    if (c) {
        s->n_far -= c->far;
        fl_timer_cancel(&c->due);
        free(c);
        *slot = NULL;
    }
}

static struct http_conn *conn_of(struct MHD_Connection *conn)
{
    const union MHD_ConnectionInfo *i =
        MHD_get_connection_info(conn, MHD_CONNECTION_INFO_SOCKET_CONTEXT);

    return i ? i->socket_context : NULL;
}

void http_door_headers(struct http_req *req, uint64_t body_bytes)
{
    struct http_conn *c = conn_of(req->conn);

    if (c)
        wants_by(c, req->server->c.idle_ms + body_bytes / BODY_FLOOR);
}

void http_door_whole(struct http_req *req)
{
    struct http_conn *c = conn_of(req->conn);

    if (c)
        fl_timer_cancel(&c->due);
}

/* Silence is MHD's to end, after idle_ms; the next request must be whole in as much again. */
void http_door_answered(struct http_server *s, struct MHD_Connection *conn)
{
    struct http_conn *c = conn_of(conn);

    if (c && !s->ending)
        wants_by(c, 2 * (uint64_t)s->c.idle_ms);
}

/* ---- at the door: TLS or not ---- */

struct knock {
    struct knock *prev, *next;
    struct http_door *door;
    int fd;
    union {
        struct sockaddr sa;
        struct sockaddr_storage any;
    } from;
    socklen_t from_len;
    bool told; /* that it should speak TLS */
    struct fl_watch *watch;
    struct fl_timer due;
};
struct http_door {
    struct http_server *server;
    int fd;
    struct fl_watch *watch;
    struct fl_timer full;
    struct knock *knocks;
    unsigned n;
};

static void look(struct http_door *d)
{
    fl_watch_events(d->watch, d->n < d->server->c.connections_max && !d->full.loop ? POLLIN : 0);
}

/* keep: the descriptor is another's now. */
static void knock_end(struct knock *k, bool keep)
{
    struct http_door *d = k->door;

    fl_watch_destroy(k->watch);
    fl_timer_cancel(&k->due);
    if (!keep)
        close(k->fd);
    *(k->prev ? &k->prev->next : &d->knocks) = k->next;
    if (k->next)
        k->next->prev = k->prev;
    d->n--;
    free(k);
    look(d);
}

static void knock_late(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    knock_end(container_of(t, struct knock, due), false);
}

static void tell_off(struct knock *k)
{
    char text[512];
    int n = snprintf(text, sizeof(text),
                     "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n"
                     "Content-Length: %zu\r\nConnection: close\r\n\r\n%s",
                     strlen(no_tls), no_tls);

    (void)send(k->fd, text, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL); /* fits; who left needs none */
    (void)shutdown(k->fd, SHUT_WR);
    k->told = true;
    fl_timer_arm_in(k->door->server->loop, &k->due, LINGER_MS);
}

static void knock_ready(void *arg, unsigned events)
{
    struct knock *k = arg;
    struct http_server *s = k->door->server;
    char buf[4096];
    ssize_t n =
        recv(k->fd, buf, k->told ? sizeof(buf) : 1, MSG_DONTWAIT | (k->told ? 0 : MSG_PEEK));

    (void)events;
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        knock_end(k, false);
    } else if (k->told) {
        return; /* a close with bytes unread would take back what was told */
    } else if (buf[0] != TLS_GREETING) {
        tell_off(k);
    } else {
        int fd = k->fd;
        struct sockaddr_storage from = k->from.any;
        socklen_t len = k->from_len;

        knock_end(k, true);
        MHD_add_connection(s->mhd, fd, (struct sockaddr *)&from,
                           len); /* its own to close, also when it fails */
        http_kick(s);
    }
}

static void not_full(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    look(container_of(t, struct http_door, full));
}

static void let_in(struct http_door *d, int fd, const struct knock *who)
{
    struct knock *k = has_room(d->server, &who->from.sa) ? malloc(sizeof(*k)) : NULL;

    if (k)
        *k = (struct knock){ .door = d, .fd = fd, .from = who->from, .from_len = who->from_len };
    if (!k ||
        fl_watch_create(d->server->loop, fd, POLLIN, knock_ready, k, &k->watch, NULL) != FL_OK) {
        close(fd);
        free(k);
        return;
    }
    k->next = d->knocks;
    if (k->next)
        k->next->prev = k;
    d->knocks = k;
    d->n++;
    k->due.fire = knock_late;
    fl_timer_arm_in(d->server->loop, &k->due, d->server->c.idle_ms);
}

static void door_ready(void *arg, unsigned events)
{
    struct http_door *d = arg;

    (void)events;
    for (unsigned i = 0; i < ACCEPTS && d->n < d->server->c.connections_max; i++) {
        struct knock who = { .from_len = sizeof(who.from) };
        int fd = FL_FAULT("http.accept")
                     ? -1
                     : accept4(d->fd, &who.from.sa, &who.from_len, SOCK_CLOEXEC | SOCK_NONBLOCK);

        if (fd >= 0) {
            let_in(d, fd, &who);
        } else if (errno != ECONNABORTED && errno != EINTR) {
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                d->full.fire = not_full;
                fl_timer_arm_in(d->server->loop, &d->full, FULL_MS);
            }
            break;
        }
    }
    look(d);
}

enum fl_status http_door_create(struct http_server *s, int fd_take, struct http_door **out,
                                struct fl_err *err)
{
    struct http_door *d = calloc(1, sizeof(*d));

    if (!d) {
        close(fd_take);
        return fl_fail(err, FL_EXHAUSTED, "no memory for an HTTP server");
    }
    d->server = s;
    d->fd = fd_take;
    enum fl_status st = fl_watch_create(s->loop, fd_take, POLLIN, door_ready, d, &d->watch, err);

    if (st != FL_OK) {
        http_door_destroy(d);
        return st;
    }
    *out = d;
    return FL_OK;
}

void http_door_destroy(struct http_door *d)
{
    if (!d)
        return;
    while (d->knocks)
        knock_end(d->knocks, false);
    fl_watch_destroy(d->watch);
    fl_timer_cancel(&d->full);
    close(d->fd);
    free(d);
}
