#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "common/base/loop.h"

struct fl_signals {
    struct fl_watch *watch;
    int fd;
    sigset_t mine; /* those that were not blocked before */
    void (*got)(void *arg, int signal, int from_pid);
    void *arg;
    bool reading, destroyed; /* got may destroy this while it is read */
};

static void signals_ready(void *arg, unsigned events)
{
    struct fl_signals *s = arg;
    struct signalfd_siginfo info;

    (void)events;
    s->reading = true;
    while (!s->destroyed && read(s->fd, &info, sizeof(info)) == (ssize_t)sizeof(info))
        s->got(s->arg, (int)info.ssi_signo, (int)info.ssi_pid);
    s->reading = false;
    if (s->destroyed)
        fl_signals_destroy(s);
}

enum fl_status fl_signals_create(struct fl_loop *l, const int *signals, size_t n,
                                 void (*got)(void *arg, int signal, int from_pid), void *arg,
                                 struct fl_signals **out, struct fl_err *err)
{
    struct fl_signals *s = calloc(1, sizeof(*s));
    sigset_t all, before;

    if (!s)
        return fl_fail(err, FL_EXHAUSTED, "no memory for signals");
    s->got = got;
    s->arg = arg;
    sigemptyset(&all);
    sigemptyset(&s->mine);
    pthread_sigmask(SIG_BLOCK, NULL, &before);
    for (size_t i = 0; i < n; i++) {
        sigaddset(&all, signals[i]);
        if (!sigismember(&before, signals[i]))
            sigaddset(&s->mine, signals[i]);
    }
    s->fd = signalfd(-1, &all, SFD_CLOEXEC | SFD_NONBLOCK);
    if (s->fd < 0) {
        enum fl_status st = fl_fail_errno(err, "signal descriptor");

        free(s);
        return st;
    }
    enum fl_status st = fl_watch_create(l, s->fd, POLLIN, signals_ready, s, &s->watch, err);
    if (st != FL_OK) {
        close(s->fd);
        free(s);
        return st;
    }
    pthread_sigmask(SIG_BLOCK, &s->mine, NULL);
    *out = s;
    return FL_OK;
}

void fl_signals_destroy(struct fl_signals *s)
{
    if (!s)
        return;
    s->destroyed = true;
    if (s->reading)
        return; /* the reader does it, as soon as got is back */
    fl_watch_destroy(s->watch);
    close(s->fd);
    pthread_sigmask(SIG_UNBLOCK, &s->mine, NULL);
    free(s);
}
