#include "worker/roles/sglang/shell.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
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

/* Between fork and exec: of a process with threads only what a signal handler may call. */
static void __attribute__((noreturn))
child_run(char *const argv[], char *const env[], int fd, pid_t parent)
{
    sigset_t none;

    (void)setpgid(0, 0);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(127);
    if (fd == CHILD_FD ? fcntl(fd, F_SETFD, 0) < 0 : fd >= 0 && dup2(fd, CHILD_FD) < 0)
        _exit(127);
    for (int i = 1; i < NSIG; i++)
        (void)signal(i, SIG_DFL); /* the two that cannot be caught are so already */
    sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    execve(argv[0], argv, env);
    _exit(127);
}

enum fl_status shell_start(const char *command, int fd, pid_t *out, struct fl_err *err)
{
    char *argv[] = { (char[]){ "/bin/sh" }, (char[]){ "-c" }, (char *)(uintptr_t)command, NULL };
    char **env = child_env();
    pid_t me = getpid(), pid;
    sigset_t all, before;

    if (!env)
        return fl_fail(err, FL_EXHAUSTED, "no memory for an environment");
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* no handler of ours runs in the child */
    errno = EAGAIN;
    pid = FL_FAULT("sglang.spawn") ? -1 : fork();
    if (pid == 0)
        child_run(argv, env, fd, me);
    int why = errno;

    pthread_sigmask(SIG_SETMASK, &before, NULL);
    free(env);
    errno = why;
    if (pid < 0)
        return fl_fail_errno(err, "start %s", command);
    (void)setpgid(pid, pid); /* whichever of us comes first */
    *out = pid;
    return FL_OK;
}
