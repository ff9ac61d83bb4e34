/* The keeper above this process, watched: one that is killed takes us along.
 *
 * A keeper that ends by itself has ended its tree before. Killed, it leaves that to the daemon, and
 * where that one was killed too there would be nobody: the kernel ends the keeper's own child,
 * which is mostly a shell in front of us. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "common/base/file.h"
#include "common/base/log.h"
#include "worker/client/client.h"

enum { PARENTS_MAX = 32 };
#define KEEPER "furlong-keep"

/* False where /proc is of another pid namespace than we are: its numbers are others' here. */
static bool proc_is_ours(void)
{
    char self[16], me[16];
    ssize_t n = readlink("/proc/self", self, sizeof(self) - 1);

    self[n > 0 ? n : 0] = '\0';
    snprintf(me, sizeof(me), "%d", (int)getpid());
    return strcmp(self, me) == 0;
}

/* 0: there is none above us that can be seen, as in a container that a worker started. */
static int keeper_above(void)
{
    struct fl_pid_stat s;
    int pid = proc_is_ours() ? getpid() : 0;

    for (int i = 0; i < PARENTS_MAX && pid > 1 && fl_pid_stat(pid, &s, NULL) == FL_OK; i++) {
        if (strcmp(s.name, KEEPER) == 0)
            return pid;
        pid = s.parent;
    }
    return 0;
}

static void keeper_gone(void *arg, unsigned events)
{
    struct furlong *f = arg;

    (void)events;
    fl_error("keeper was killed, this process ends worker=%s", f->seat.name);
    (void)kill(getpid(), SIGKILL);
}

enum fl_status client_kept_open(struct furlong *f, struct fl_err *err)
{
    struct fl_pid_stat s;
    int keeper = keeper_above();

    if (!keeper)
        return FL_OK;
    f->keeper_fd = (int)syscall(SYS_pidfd_open, keeper, 0);
    if (f->keeper_fd < 0) { /* forbidden in some containers; the daemon sees it, too */
        fl_warn("keeper is not watched pid=%d errno=%d", keeper, errno);
        return FL_OK;
    }
    /* It ended in between, and the number is another's. Whoever is between it and us may end at any
     * time: that is not looked at again. */
    if (fl_pid_stat(keeper, &s, NULL) != FL_OK || strcmp(s.name, KEEPER) != 0)
        keeper_gone(f, 0);
    return fl_watch_create(f->loop, f->keeper_fd, POLLIN, keeper_gone, f, &f->keeper, err);
}

void client_kept_close(struct furlong *f)
{
    fl_watch_destroy(f->keeper);
    f->keeper = NULL;
    if (f->keeper_fd >= 0)
        close(f->keeper_fd);
    f->keeper_fd = -1;
}
