/* Bytes and descriptors between sockets, as a network that a test can cut: the relay is stopped
 * (nothing comes through, nothing breaks) or killed (everything breaks). */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include "bench/plane_seats.h"

enum { RELAY_BUF = 64 << 10, RELAY_FDS = 64 };

static void give_up(const char *what, const char *path)
{
    fprintf(stderr, "bench_plane: relay: %s %s: %s\n", what, path, strerror(errno));
    _exit(1);
}

static int open_at(const char *path, struct sockaddr_un *at)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    *at = (struct sockaddr_un){ .sun_family = AF_UNIX };
    snprintf(at->sun_path, sizeof(at->sun_path), "%s", path);
    if (fd < 0)
        give_up("socket", path);
    return fd;
}

struct way {
    int from, to;
};

/* Descriptors go with the first byte that they came with. */
static bool pass_on(const struct way *w, char *buf)
{
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(RELAY_FDS * sizeof(int))];
    } control;
    struct iovec io = { buf, RELAY_BUF };
    struct msghdr m = {
        .msg_iov = &io, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)
    };
    ssize_t n = recvmsg(w->from, &m, MSG_CMSG_CLOEXEC), sent;

    if (n <= 0)
        return false;
    io.iov_len = (size_t)n;
    if (m.msg_controllen == 0)
        m.msg_control = NULL;
    sent = sendmsg(w->to, &m, MSG_NOSIGNAL);
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
        for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
            close(fd);
        }
    for (ssize_t at = sent; sent > 0 && at < n; at += sent)
        sent = send(w->to, buf + at, (size_t)(n - at), MSG_NOSIGNAL);
    return sent > 0;
}

static void *carry(void *arg)
{
    struct way *w = arg;
    char *buf = malloc(RELAY_BUF);

    while (buf && pass_on(w, buf))
        ;
    shutdown(w->from, SHUT_RDWR); /* the other direction ends with this one */
    shutdown(w->to, SHUT_RDWR);
    free(buf);
    free(w);
    return NULL;
}

static void join_up(int near, const char *target)
{
    struct sockaddr_un at;
    int far = open_at(target, &at);

    if (connect(far, (struct sockaddr *)&at, sizeof(at)) < 0) {
        close(near);
        close(far);
        return;
    }
    for (int i = 0; i < 2; i++) {
        struct way *w = malloc(sizeof(*w));
        pthread_t t;

        if (!w)
            give_up("memory for", target);
        *w = i ? (struct way){ far, near } : (struct way){ near, far };
        if (pthread_create(&t, NULL, carry, w) != 0)
            give_up("a thread for", target);
        pthread_detach(t);
    }
}

int plane_relay(const struct relay *r)
{
    struct pollfd p[RELAY_WAYS + 1] = { [RELAY_WAYS] = { .fd = PLANE_FD, .events = POLLIN } };

    for (int i = 0; i < RELAY_WAYS; i++) {
        struct sockaddr_un at;

        p[i] = (struct pollfd){ .fd = open_at(r->at[i], &at), .events = POLLIN };
        (void)unlink(r->at[i]); /* of the attempt before */
        if (bind(p[i].fd, (struct sockaddr *)&at, sizeof(at)) < 0 || listen(p[i].fd, 64) < 0)
            give_up("listen on", r->at[i]);
    }
    (void)!write(PLANE_FD, "r", 1);
    while (poll(p, RELAY_WAYS + 1, -1) >= 0 || errno == EINTR) {
        if (p[RELAY_WAYS].revents)
            return 0; /* whoever wanted it is gone */
        for (int i = 0; i < RELAY_WAYS; i++)
            if (p[i].revents) {
                int fd = accept4(p[i].fd, NULL, NULL, SOCK_CLOEXEC);

                if (fd >= 0)
                    join_up(fd, r->to[i]);
            }
    }
    return 1;
}
