#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "transport/wire/resolve.h"
#include "transport/wire/sock.h"

enum {
    BACKLOG = 512,
    ACCEPTS = 64, /* for one readiness: others of the loop have their turn then */
    FULL_MS = 100 /* no descriptor is free: look again after so long             */
};
struct sock_port {
    struct wire_port p;
    struct fl_loop *loop;
    int fd;
    struct tls_id *tls;
    struct fl_watch *watch;
    struct fl_timer full;
    bool paused, closed, accepting;
    char path[sizeof(((struct sockaddr_un *)0)->sun_path)];
    struct stat made; /* the socket file, as it was made */
};

static void look(struct sock_port *p)
{
    if (p->watch)
        fl_watch_events(p->watch, p->paused || p->full.loop ? 0 : POLLIN);
}

static void sock_pause(struct wire_port *port, bool on)
{
    struct sock_port *p = container_of(port, struct sock_port, p);

    p->paused = on;
    look(p);
}

static void port_free(struct sock_port *p)
{
    struct stat now;

    fl_watch_destroy(p->watch);
    fl_timer_cancel(&p->full);
    if (p->path[0] && p->made.st_ino && stat(p->path, &now) == 0 && now.st_ino == p->made.st_ino &&
        now.st_dev == p->made.st_dev)
        (void)unlink(p->path); /* another server may stand there by now, that one stays */
    if (p->fd >= 0)
        close(p->fd);
    free(p);
}

static void sock_port_close(struct wire_port *port)
{
    struct sock_port *p = container_of(port, struct sock_port, p);

    p->closed = true;
    if (!p->accepting)
        port_free(p);
}

static void not_full(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    look(container_of(t, struct sock_port, full));
}

static void port_ready(void *arg, unsigned events)
{
    struct sock_port *p = arg;

    (void)events;
    p->accepting = true;
    for (unsigned i = 0; i < ACCEPTS && !p->paused && !p->closed; i++) {
        struct wire_line *k;
        int fd =
            FL_FAULT("wire.accept") ? -1 : accept4(p->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

        if (fd < 0 && (errno == ECONNABORTED || errno == EINTR))
            continue;
        if (fd < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                p->full.fire = not_full;
                fl_timer_arm_in(p->loop, &p->full, FULL_MS);
                look(p);
            }
            break;
        }
        if (sock_line_of(p->loop, fd, p->tls, &k, NULL) == FL_OK)
            p->p.arrived(p->p.arg, k);
    }
    p->accepting = false;
    if (p->closed)
        port_free(p);
}

static const struct wire_port_ops port_ops = { .close = sock_port_close, .pause = sock_pause };

/* A socket file without a server behind it is the rest of one that was killed. */
static enum fl_status clear_path(const struct wire_addr *a, struct fl_err *err)
{
    struct stat st;
    int fd, rc, number;

    if (lstat(a->u.un.sun_path, &st) < 0)
        return FL_OK;
    if (!S_ISSOCK(st.st_mode))
        return fl_fail(err, FL_EXISTS, "%s is there and no socket: choose another path",
                       a->u.un.sun_path);
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return fl_fail_errno(err, "socket");
    rc = connect(fd, &a->u.sa, a->len);
    number = errno;
    close(fd);
    if (rc == 0 || number == EAGAIN)
        return fl_fail(err, FL_EXISTS, "another process listens at %s", a->u.un.sun_path);
    if (number == ECONNREFUSED)
        (void)unlink(a->u.un.sun_path); /* bind says it if this failed */
    return FL_OK;
}

static enum fl_status bind_failed(const char *target, struct fl_err *err)
{
    if (errno == EADDRINUSE)
        return fl_fail(err, FL_EXISTS, "%s is in use by another process: choose another one",
                       target);
    if (errno == EADDRNOTAVAIL)
        return fl_fail(err, FL_UNREACHABLE, "no interface of this machine has the address of %s",
                       target);
    return fl_fail_errno(err, "listen at %s", target);
}

static enum fl_status open_port(struct sock_port *p, const char *target, const struct wire_addr *a,
                                struct fl_err *err)
{
    int one = 1;
    bool local = a->u.sa.sa_family == AF_UNIX;
    union wire_sockaddr got;
    socklen_t len = sizeof(got);

    p->fd = FL_FAULT("wire.socket")
                ? -1
                : socket(a->u.sa.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (p->fd < 0)
        return fl_fail_errno(err, "socket to listen at %s", target);
    if (local)
        FL_TRY(clear_path(a, err));
    else
        (void)setsockopt(p->fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)); /* bind says it */
    if (FL_FAULT("wire.bind") || bind(p->fd, &a->u.sa, a->len) < 0)
        return bind_failed(target, err);
    if (local) {
        snprintf(p->path, sizeof(p->path), "%s", a->u.un.sun_path);
        if (stat(p->path, &p->made) < 0 || chmod(p->path, 0600) < 0)
            return fl_fail_errno(err, "socket file of %s", target);
    }
    if (FL_FAULT("wire.listen") || listen(p->fd, BACKLOG) < 0)
        return bind_failed(target, err);
    if (local) {
        snprintf(p->p.at, sizeof(p->p.at), "%s", target);
    } else {
        if (getsockname(p->fd, &got.sa, &len) < 0)
            return fl_fail_errno(err, "address of %s", target);
        wire_addr_text(&got, p->p.at, sizeof(p->p.at));
    }
    return FL_OK;
}

static enum fl_status parse(const char *target, bool has_key, struct wire_addrs *out,
                            struct fl_err *err)
{
    char host[WIRE_HOST_MAX];
    uint16_t port;

    if (strncmp(target, "unix:", 5) == 0)
        return wire_addr_unix(target + 5, out, err);
    FL_TRY(wire_target_split(target, host, &port, err));
    FL_TRY(wire_port_check(host, has_key, err));
    if (!wire_addr_parse(host, port, out))
        return fl_fail(err, FL_INVALID,
                       "listen at %s: %s is no address of a machine, names are for "
                       "connecting",
                       target, host);
    return FL_OK;
}

enum fl_status sock_listen(struct fl_loop *l, const struct stream_to *at, bool has_key,
                           void (*arrived)(void *arg, struct wire_line *k_take), void *arg,
                           struct wire_port **out, struct fl_err *err)
{
    struct wire_addrs a;
    struct sock_port *p;
    enum fl_status st;

    FL_TRY(parse(at->target, has_key, &a, err));
    p = FL_FAULT("wire.port") ? NULL : calloc(1, sizeof(*p));
    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory to listen at %s", at->target);
    p->p = (struct wire_port){ .ops = &port_ops, .arrived = arrived, .arg = arg };
    p->loop = l;
    p->tls = at->tls;
    p->fd = -1;
    st = open_port(p, at->target, &a.a[0], err);
    if (st == FL_OK)
        st = fl_watch_create(l, p->fd, POLLIN, port_ready, p, &p->watch, err);
    if (st != FL_OK) {
        port_free(p);
        return st;
    }
    *out = &p->p;
    return FL_OK;
}

enum fl_status sock_open(const struct stream_to *at, bool has_key, int *out, char *real, size_t cap,
                         struct fl_err *err)
{
    struct sock_port *p;
    struct wire_addrs a;
    enum fl_status st;

    FL_TRY(parse(at->target, has_key, &a, err));
    p = calloc(1, sizeof(*p));
    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory to listen at %s", at->target);
    p->fd = -1;
    st = open_port(p, at->target, &a.a[0], err);
    if (st == FL_OK) {
        snprintf(real, cap, "%s", p->p.at);
        *out = p->fd;
        p->fd = -1;
    }
    port_free(p);
    return st;
}
