#include "worker/roles/sglang/shell.h"

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/fault.h"

extern char **environ;

enum { CHILD_FD = 3 };

/* Ours without the seat, whose descriptor does not go along. NULL: no memory. */
static char **child_env(void)
{
    size_t n = 0, at = 0;

    while (environ[n])
        n++;
    char **env = calloc(n + 1, sizeof(*env));
    for (size_t i = 0; env && i < n; i++)
        if (strncmp(environ[i], "FURLONG_SEAT_FD=", 16) != 0)
            env[at++] = environ[i];
    return env;
}

enum fl_status shell_start(const char *command, int fd, pid_t *out, struct fl_err *err)
{
    char *argv[] = { (char[]){ "/bin/sh" }, (char[]){ "-c" }, (char *)(uintptr_t)command, NULL };
    char **env = child_env();
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    sigset_t none, all;
    pid_t pid = 0;

    if (!env)
        return fl_fail(err, FL_EXHAUSTED, "no memory for an environment");
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&files);
    if (fd >= 0)
        posix_spawn_file_actions_adddup2(&files, fd, CHILD_FD);
    posix_spawnattr_init(&attr);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK |
                                        POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setpgroup(&attr, 0);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setsigdefault(&attr, &all);
    int why =
        FL_FAULT("sglang.spawn") ? EAGAIN : posix_spawn(&pid, argv[0], &files, &attr, argv, env);

    free(env);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&files);
    errno = why;
    if (why)
        return fl_fail_errno(err, "start %s", command);
    *out = pid;
    return FL_OK;
}
