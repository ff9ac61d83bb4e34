#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/addr.h"
#include "common/base/fault.h"
#include "common/base/str.h"
#include "transport/door/door.h"

enum {
    ACCEPTS = 64,    /* for one readiness: others of the loop have their turn then */
    FULL_MS = 100,   /* no descriptor is free: look again after so long */
    LINGER_MS = 1000 /* for a client that is told off to read it */
};

struct knock {
    struct knock *prev, *next; /* in the order they came */
    struct door *door;
    int fd;
    union {
        struct sockaddr sa;
        struct sockaddr_storage any;
    } from;
    socklen_t from_len;
    bool far, told;
    struct fl_watch *watch;
    struct fl_timer due;
};
struct door {
    struct fl_loop *loop;
    struct door_config c;
    char says[DOOR_SAYS_MAX + 1];
    int fd;
    struct fl_watch *watch;
    struct fl_timer full;
    struct knock *first, *last;
    unsigned n, n_far;
};

/* ---- room */

static unsigned inside(const struct door *d, unsigned *far)
{
    *far = 0;
    return d->c.inside ? d->c.inside(d->c.arg, far) : 0;
}

/* While somebody is at the door there is room: the oldest of them makes it. */
void door_look(struct door *d)
{
    unsigned far;

    fl_watch_events(d->watch, !d->full.loop && (d->n || inside(d, &far) < d->c.max) ? POLLIN : 0);
}

/* keep: the descriptor is another's now. */
static void knock_end(struct knock *k, bool keep)
{
    struct door *d = k->door;

    fl_watch_destroy(k->watch);
    fl_timer_cancel(&k->due);
    if (!keep)
        close(k->fd);
    *(k->prev ? &k->prev->next : &d->first) = k->next;
    *(k->next ? &k->next->prev : &d->last) = k->prev;
    d->n--;
    d->n_far -= k->far;
    free(k);
}

static bool oldest_goes(struct door *d, bool far)
{
    struct knock *k = d->first;

    while (k && far && !k->far)
        k = k->next;
    if (k)
        knock_end(k, false);
    return k != NULL;
}

static bool make_room(struct door *d, bool far)
{
    unsigned far_inside, all = inside(d, &far_inside) + d->n;

    if (far && far_inside + d->n_far >= d->c.far_max)
        return oldest_goes(d, true);
    return all < d->c.max || oldest_goes(d, false);
}

/* ---- one that came */

static void knock_late(struct fl_timer *t, uint64_t now_ns)
{
    struct knock *k = container_of(t, struct knock, due);
    struct door *d = k->door;

    (void)now_ns;
    knock_end(k, false);
    door_look(d);
}

static void tell_off(struct knock *k, unsigned speech)
{
    char words[DOOR_SAYS_MAX + 256];
    struct door *d = k->door;
    size_t n = door_answer(speech, d->c.status, d->says, words, sizeof(words));

    (void)send(k->fd, words, n, MSG_DONTWAIT | MSG_NOSIGNAL); /* fits; who left needs none */
    (void)shutdown(k->fd, SHUT_WR);
    k->told = true;
    fl_timer_arm_in(d->loop, &k->due, LINGER_MS);
}

static void come_in(struct knock *k)
{
    struct door *d = k->door;
    int fd = k->fd;
    struct sockaddr_storage from = k->from.any;
    socklen_t len = k->from_len;

    knock_end(k, true);
    d->c.in(d->c.arg, fd, (struct sockaddr *)&from, len);
}

/* Too little is there: it is not woken for the same bytes again and again. */
static void wait_for(struct knock *k, int bytes)
{
    (void)setsockopt(k->fd, SOL_SOCKET, SO_RCVLOWAT, &bytes,
                     sizeof(bytes)); /* on a TCP socket it cannot fail */
}

/* False: k is gone, or somebody else's. */
static bool judge(struct knock *k, bool whole)
{
    char first[DOOR_NEEDS];
    ssize_t n = recv(k->fd, first, sizeof(first), MSG_DONTWAIT | MSG_PEEK);
    unsigned speech;

    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    speech = n > 0 ? door_speech(first, (size_t)n, whole) : 0;
    if (n > 0 && !speech) {
        wait_for(k, DOOR_NEEDS);
        return true;
    }
    if (n <= 0) {
        knock_end(k, false);
        return false;
    }
    wait_for(k, 1);
    if (speech & k->door->c.speaks) {
        come_in(k);
        return false;
    }
    tell_off(k, speech);
    return true;
}

static void knock_ready(void *arg, unsigned events)
{
    struct knock *k = arg;
    struct door *d = k->door;
    char sink[4096];
    ssize_t n;

    if (!k->told) {
        (void)judge(k, (events & (POLLRDHUP | POLLHUP | POLLERR)) != 0);
    } else {
        n = recv(k->fd, sink, sizeof(sink),
                 MSG_DONTWAIT); /* a close with bytes unread would take back what was told */
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            knock_end(k, false);
    }
    door_look(d);
}

static void let_in(struct door *d, int fd, const struct knock *who)
{
    bool far = !fl_sockaddr_is_loopback(&who->from.sa);
    struct knock *k = make_room(d, far) && !FL_FAULT("door.knock") ? malloc(sizeof(*k)) : NULL;

    if (!k) {
        close(fd);
        return;
    }
    *k = (struct knock){ .door = d,
                         .fd = fd,
                         .from = who->from,
                         .from_len = who->from_len,
                         .far = far,
                         .prev = d->last };
    *(d->last ? &d->last->next : &d->first) = k;
    d->last = k;
    d->n++;
    d->n_far += far;
    k->due.fire = knock_late;
    fl_timer_arm_in(d->loop, &k->due, d->c.wait_ms);
    /* Mostly the first bytes are here by now, and nothing has to wake us for them. */
    if (judge(k, false) &&
        fl_watch_create(d->loop, fd, POLLIN | POLLRDHUP, knock_ready, k, &k->watch, NULL) != FL_OK)
        knock_end(k, false);
}

/* ---- the listener */

static void not_full(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    door_look(container_of(t, struct door, full));
}

static void door_ready(void *arg, unsigned events)
{
    struct door *d = arg;
    unsigned far;

    (void)events;
    for (unsigned i = 0; i < ACCEPTS && (d->n || inside(d, &far) < d->c.max); i++) {
        struct knock who = { .from_len = sizeof(who.from) };
        int fd = FL_FAULT("door.accept")
                     ? -1
                     : accept4(d->fd, &who.from.sa, &who.from_len, SOCK_CLOEXEC | SOCK_NONBLOCK);

        if (fd >= 0) {
            let_in(d, fd, &who);
        } else if (errno != ECONNABORTED && errno != EINTR) {
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                d->full.fire = not_full;
                fl_timer_arm_in(d->loop, &d->full, FULL_MS);
            }
            break;
        }
    }
    door_look(d);
}

void door_says(struct door *d, const char *sentence)
{
    (void)FL_COPY(d->says, sentence ? sentence : "");
}

enum fl_status door_create(struct fl_loop *l, int fd_take, const struct door_config *c,
                           struct door **out, struct fl_err *err)
{
    struct door *d = FL_FAULT("door.create") ? NULL : calloc(1, sizeof(*d));

    if (!d) {
        close(fd_take);
        return fl_fail(err, FL_EXHAUSTED, "no memory for a listener");
    }
    d->loop = l;
    d->c = *c;
    d->c.far_max = c->far_max ? c->far_max : c->max;
    d->fd = fd_take;
    door_says(d, c->says);
    enum fl_status st = fl_watch_create(l, fd_take, POLLIN, door_ready, d, &d->watch, err);

    if (st != FL_OK) {
        door_destroy(d);
        return st;
    }
    *out = d;
    return FL_OK;
}

void door_destroy(struct door *d)
{
    if (!d)
        return;
    while (d->first)
        knock_end(d->first, false);
    fl_watch_destroy(d->watch);
    fl_timer_cancel(&d->full);
    close(d->fd);
    free(d);
}
