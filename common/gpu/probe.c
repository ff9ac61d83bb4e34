#include "common/gpu/probe.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/loop.h"
#include "common/base/str.h"
#include "common/gpu/probe_priv.h"

extern char **environ;

static enum fl_status start(const char *program, int *from, pid_t *pid, struct fl_err *err)
{
    char *argv[] = { (char *)(uintptr_t)program, (char *)(uintptr_t) "--raw", NULL };
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    sigset_t none, all;
    int ends[2], e;

    if (pipe2(ends, O_CLOEXEC) < 0)
        return fl_fail_errno(err, "a pipe to %s", program);
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
    posix_spawnattr_init(&attr);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setsigdefault(&attr, &all);
    e = posix_spawn(pid, program, &files, &attr, argv, environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attr);
    close(ends[1]);
    if (e != 0) {
        close(ends[0]);
        errno = e;
        return fl_fail_errno(err, "start %s", program);
    }
    *from = ends[0];
    return FL_OK;
}

/* All of len bytes before due_ns, or fewer at the end of the stream. */
static enum fl_status take(int fd, void *into, size_t len, size_t *got, uint64_t due_ns,
                           struct fl_err *err)
{
    *got = 0;
    while (*got < len) {
        uint64_t now = fl_clock_boot_ns();
        struct pollfd p = { .fd = fd, .events = POLLIN };
        int ready = now >= due_ns ? 0 : poll(&p, 1, (int)((due_ns - now) / 1000000u + 1));

        if (ready == 0)
            return fl_fail(err, FL_TIMEOUT, "the device probe did not end in time");
        ssize_t r = ready < 0 ? -1 : read(fd, (char *)into + *got, len - *got);
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return fl_fail_errno(err, "read from the device probe");
        if (r == 0)
            return FL_OK;
        *got += (size_t)r;
    }
    return FL_OK;
}

static enum fl_status answer(int fd, uint64_t due_ns, struct gpu_found *out, size_t *n,
                             struct fl_err *err)
{
    struct probe_head head;
    size_t got;

    FL_TRY(take(fd, &head, sizeof(head), &got, due_ns, err));
    if (got != sizeof(head) || head.magic != PROBE_MAGIC || head.each_bytes != sizeof(*out))
        return fl_fail(err, FL_INTERNAL,
                       "the device probe ended without an answer of this build: %zu bytes", got);
    if (head.status != FL_OK) {
        head.text[sizeof(head.text) - 1] = 0;
        return fl_fail(err,
                       head.status < FL_STATUS_COUNT ? (enum fl_status)head.status : FL_INTERNAL,
                       "%s", head.text);
    }
    if (head.n > *n)
        return fl_fail(err, FL_EXHAUSTED, "%u devices, room for %zu", head.n, *n);
    FL_TRY(take(fd, out, head.n * sizeof(*out), &got, due_ns, err));
    if (got != head.n * sizeof(*out))
        return fl_fail(err, FL_INTERNAL, "the device probe ended inside its answer");
    *n = head.n;
    return FL_OK;
}

enum fl_status gpu_probe(const char *program, uint32_t wait_ms, struct gpu_found *out, size_t *n,
                         struct fl_err *err)
{
    uint64_t due = fl_clock_boot_ns() + (uint64_t)wait_ms * 1000000u;
    enum fl_status st;
    int fd;
    pid_t pid;

    FL_TRY(start(program, &fd, &pid, err));
    st = answer(fd, due, out, n, err);
    close(fd);
    if (st != FL_OK)
        (void)kill(pid,
                   SIGKILL); /* our child and not yet waited for: the number is still its own */
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        ; /* ECHILD: whoever collects this process's children has done it */
    return st;
}
