#include "cli/check.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/interrupt.h"
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/conf/opt.h"

extern char **environ;
enum { SAID_BYTES = 4096, WORDS = FL_OPT_MAX + 4, USAGE = 2 };
#define PROGRAM "furlong-driver"

static enum fl_status spawn(const char *const *words, int said, pid_t *pid, struct fl_err *err)
{
    char path[FL_PATH_MAX];
    const char *argv[WORDS] = { PROGRAM, "--check" };
    posix_spawn_file_actions_t files;
    posix_spawnattr_t how;
    sigset_t none, all;
    size_t n = 2;

    while (*words && n < WORDS - 1)
        argv[n++] = *words++;
    if (*words)
        return fl_fail(err, FL_INVALID, "more than %d flags", WORDS - 3);
    FL_TRY(fl_program_path(PROGRAM, path, err));
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&how);
    posix_spawnattr_setflags(&how, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setsigmask(&how, &none);
    posix_spawnattr_setsigdefault(&how, &all);
    int rc = posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
    rc = rc ? rc : posix_spawn_file_actions_adddup2(&files, said, 1);
    rc = rc ? rc : posix_spawn_file_actions_adddup2(&files, said, 2);
    rc = rc ? rc : posix_spawn(pid, path, &files, &how, (char *const *)argv, environ);
    posix_spawnattr_destroy(&how);
    posix_spawn_file_actions_destroy(&files);
    errno = rc;
    return rc ? fl_fail_errno(err, "start %s", path) : FL_OK;
}

/* The last of it; until the other end is closed. */
static enum fl_status read_said(int fd, char out[SAID_BYTES], struct fl_err *err)
{
    size_t len = 0;

    for (;;) {
        struct pollfd p[2] = { { .fd = fd, .events = POLLIN },
                               { .fd = cli_signals_fd(), .events = POLLIN } };

        (void)poll(p, 2, -1);
        FL_TRY(cli_interrupted(err, PROGRAM " to look at what the run reads"));
        if (!p[0].revents)
            continue;
        if (len == SAID_BYTES - 1) {
            len /= 2;
            memmove(out, out + SAID_BYTES - 1 - len, len);
        }
        ssize_t n = read(fd, out + len, SAID_BYTES - 1 - len);

        if (n < 0 && errno != EINTR)
            return fl_fail_errno(err, "wait for " PROGRAM);
        if (n == 0)
            break;
        len += n > 0 ? (size_t)n : 0;
    }
    while (len && out[len - 1] == '\n')
        len--;
    out[len] = '\0';
    return FL_OK;
}

static enum fl_status verdict(int ws, const char *said, struct fl_err *err)
{
    const char *line = strrchr(said, '\n');

    line = line ? line + 1 : said;
    if (strncmp(line, PROGRAM ": ", sizeof(PROGRAM ": ") - 1) == 0)
        line += sizeof(PROGRAM ": ") - 1;
    if (WIFEXITED(ws) && WEXITSTATUS(ws) == 0)
        return FL_OK;
    if (WIFEXITED(ws) && WEXITSTATUS(ws) == USAGE)
        return fl_fail(err, FL_INVALID, "%s", line);
    return fl_fail(err, FL_INTERNAL, "%s", *line ? line : PROGRAM " ended without a word");
}

enum fl_status cli_check_run(const char *const *words, struct fl_err *err)
{
    char said[SAID_BYTES] = "";
    int fds[2], ws = 0;
    pid_t pid;

    if (FL_FAULT("cli.check") || pipe2(fds, O_CLOEXEC) < 0)
        return fl_fail_errno(err, "pipe to " PROGRAM);
    enum fl_status st = spawn(words, fds[1], &pid, err);

    close(fds[1]);
    if (st == FL_OK) {
        st = read_said(fds[0], said, err);
        if (st != FL_OK)
            (void)kill(pid, SIGKILL); /* our child, not reaped yet; it has made nothing */
        while (waitpid(pid, &ws, 0) < 0 && errno == EINTR)
            ;
    }
    close(fds[0]);
    return st == FL_OK ? verdict(ws, said, err) : st;
}
