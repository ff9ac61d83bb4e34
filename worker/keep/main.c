/* furlong-keep SPEC-FILE - runs one worker and tells how it ended */
#include "worker/keep/keeper.h"
#include "worker/keep/output.h"
#include "common/base/fault.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

static bool signals(struct keeper *k)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    sigprocmask(SIG_SETMASK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    k->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return k->signal_fd >= 0;
}

static bool set_up(struct keeper *k, char why[256])
{
    int type;
    socklen_t len = sizeof(type);

    if (getsid(0) != getpid())
        (void)setsid(); /* the daemon's spawn has done it; by hand it is done here */
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) < 0 || !signals(k) || chdir("/") < 0) {
        snprintf(why, 256, "cannot become a keeper: %s", strerror(errno));
        return false;
    }
    if (getsockopt(KEEP_CONTROL_FD, SOL_SOCKET, SO_TYPE, &type, &len) == 0 &&
        type == SOCK_SEQPACKET) {
        fcntl(KEEP_CONTROL_FD, F_SETFD, FD_CLOEXEC);
        k->clients[0] = KEEP_CONTROL_FD;
    }
    if (k->spec.has_seat && fcntl(KEEP_SEAT_FD, F_SETFD, FD_CLOEXEC) < 0) {
        snprintf(why, 256, "the seat's descriptor %d did not come: %s", KEEP_SEAT_FD,
                 strerror(errno));
        return false;
    }
    if (!keep_listen(k, why))
        return false;
    k->out_fd = output_open(k->spec.out_path);
    k->err_fd = strcmp(k->spec.out_path, k->spec.err_path) ? output_open(k->spec.err_path)
                                                           : fcntl(k->out_fd, F_DUPFD_CLOEXEC, 0);
    if (k->out_fd < 0 || k->err_fd < 0) {
        snprintf(why, 256, "cannot open %s: %s",
                 k->out_fd < 0 ? k->spec.out_path : k->spec.err_path, strerror(errno));
        return false;
    }
    group_make(&k->group, k->spec.name, k->spec.memory_max_bytes);
    return true;
}

static void turn(struct keeper *k)
{
    struct pollfd p[3 + KEEP_CLIENTS] = {
        { .fd = k->signal_fd, .events = POLLIN },
        { .fd = k->listen_fd, .events = POLLIN },
        { .fd = k->exec_fd, .events = POLLIN },
    };

    for (unsigned i = 0; i < KEEP_CLIENTS; i++)
        p[3 + i] = (struct pollfd){ .fd = k->clients[i], .events = POLLIN };
    if (poll(p, 3 + KEEP_CLIENTS, keep_wait_ms(k)) > 0) {
        if (p[0].revents)
            keep_on_signals(k);
        if (p[2].revents)
            keep_on_exec(k);
        for (unsigned i = 0; i < KEEP_CLIENTS; i++)
            if (p[3 + i].revents && k->clients[i] == p[3 + i].fd)
                keep_client_read(k, i);
        if (p[1].revents)
            keep_accept(k);
    }
    keep_advance(k);
}

static int keep(struct keeper *k)
{
    char path[512], why[256];

    if (!set_up(k, why) || !keep_start_worker(k, why)) {
        keep_record_failed(k->spec.dir, why);
        fprintf(stderr, "furlong-keep: %s\n", why);
        group_remove(&k->group);
        return 1;
    }
    keep_tell(k);
    while (k->phase != KEEP_ENDED)
        turn(k);
    bool ok = keep_record(k, why);

    if (!ok)
        fprintf(stderr, "furlong-keep: %s\n", why);
    group_remove(&k->group);
    snprintf(path, sizeof(path), "%s/keep.sock", k->spec.dir);
    (void)unlink(path);
    keep_tell(k);
    return ok ? 0 : 1;
}

int main(int argc, char **argv)
{
    struct keeper k = {
        .listen_fd = -1, .signal_fd = -1, .exec_fd = -1, .out_fd = -1, .err_fd = -1
    };
    struct fl_err err = { 0 };
    char why[256];

    for (unsigned i = 0; i < KEEP_CLIENTS; i++)
        k.clients[i] = -1;
    if (argc != 2 || argv[1][0] == '-') {
        fprintf(stderr,
                "usage: furlong-keep SPEC-FILE\nRuns one worker; started by furlong-node.\n");
        return 2;
    }
    if (fl_fault_env(&err) != FL_OK || !keep_spec_read(argv[1], &k.spec, why)) {
        fprintf(stderr, "furlong-keep: %s\n", err.status == FL_OK ? why : err.text);
        return 2;
    }
    int rc = keep(&k);

    keep_spec_free(&k.spec);
    return rc;
}
