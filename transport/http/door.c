/* Who comes in, and how long it may take to say what it wants.
 *
 * libmicrohttpd counts silence alone, so a client that sends a byte now and then would keep its
 * connection for ever: each connection has a time by which a request must be whole, too. And
 * whoever speaks something else than is spoken here is told so by transport/door, in front of it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "transport/http/server_priv.h"

enum {
    BODY_FLOOR = 64 /* bytes a millisecond: slower than that nobody sends a body */
};
static const char plain[] = "This port speaks HTTP/1.1 without TLS (http://)";
static const char over_tls[] =
    "This port speaks TLS: use https:// in place of http://, and for `ray job` --verify=FILE "
    "with the CA's certificate";

/* ---- connections of MHD's ---- */

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
    struct http_mhd *m = arg;
    struct http_server *s = m->server;
    struct http_conn *c = *slot;

    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *fd =
            MHD_get_connection_info(conn, MHD_CONNECTION_INFO_CONNECTION_FD);
        const union MHD_ConnectionInfo *from =
            MHD_get_connection_info(conn, MHD_CONNECTION_INFO_CLIENT_ADDRESS);

        s->n_conns++;
        m->n_conns++;
        c = fd && from ? calloc(1, sizeof(*c)) : NULL;
        if (!c)
            return; /* only without a time of its own */
        c->server = s;
        c->fd = fd->connect_fd;
        c->far = !fl_sockaddr_is_loopback(from->client_addr);
        s->n_far += c->far;
        *slot = c;
        wants_by(c, s->c.idle_ms);
        return;
    }
    s->n_conns--;
    if (--m->n_conns == 0 && m != s->mhd)
        http_kick(s); /* it goes, but not from inside itself */
    if (c) {
        s->n_far -= c->far;
        fl_timer_cancel(&c->due);
        free(c);
        *slot = NULL;
    }
    if (s->door)
        door_look(s->door);
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

/* Silence is MHD's to end, after idle_ms; the next request must be whole in as much again. MHD
 * reads what is there and is not told again of an end that was there with it: nothing more comes on
 * such a connection, and it need not wait for its time. What MHD has read already is still
 * answered. */
void http_door_answered(struct http_server *s, struct MHD_Connection *conn)
{
    struct http_conn *c = conn_of(conn);
    char byte;

    if (!c || s->ending)
        return;
    wants_by(c, 2 * (uint64_t)s->c.idle_ms);
    if (recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0)
        (void)shutdown(c->fd, SHUT_RD); /* wakes MHD, which then reads the end */
}

/* ---- the door ---- */

static void come_in(void *arg, int fd, const struct sockaddr *from, socklen_t len)
{
    struct http_server *s = arg;

    MHD_add_connection(http_mhd_for_new(s)->daemon, fd, from, len); /* its own to close, also when it fails */
    http_kick(s);
}

static unsigned inside(void *arg, unsigned *far)
{
    const struct http_server *s = arg;

    *far = s->n_far;
    return s->n_conns;
}

void http_server_says(struct http_server *s, const char *elsewhere)
{
    char text[DOOR_SAYS_MAX + 1];

    snprintf(text, sizeof(text), "%s; %s", s->tls ? over_tls : plain, elsewhere);
    door_says(s->door, text);
}

enum fl_status http_door_create(struct http_server *s, int fd_take, struct fl_err *err)
{
    struct door_config c = {
        .speaks = s->tls ? DOOR_TLS : DOOR_TEXT,
        .says = s->tls ? over_tls : plain,
        .max = s->c.connections_max,
        /* a quarter is kept for this host's own commands, whatever others do */
        .far_max = s->c.connections_max - s->c.connections_max / 4,
        .wait_ms = s->c.idle_ms,
        .in = come_in,
        .inside = inside,
        .arg = s
    };

    return door_create(s->loop, fd_take, &c, &s->door, err);
}
