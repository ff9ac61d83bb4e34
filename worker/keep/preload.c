/* What the worker's LD_PRELOAD names is tried in a process of its own first. A library that is not
 * there is passed over by the loader with a line that nobody reads, and one that lacks a library
 * itself ends whatever is started with code 127: neither says which worker it was. */
#include "worker/keep/keeper.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TRY_MS = 5000, SAID_MAX = 1024 }; /* a library that takes longer to come up has no say */

static char *of_env(char *const env[], const char *name)
{
    size_t len = strlen(name);

    for (; *env; env++)
        if (strncmp(*env, name, len) == 0)
            return *env;
    return NULL;
}

static void __attribute__((noreturn)) try_it(const struct keeper *k, int said)
{
    static const char *const taken[] = { "LD_PRELOAD=", "LD_LIBRARY_PATH=", "PATH=" };
    char *env[4] = { NULL }, *argv[] = { (char *)(uintptr_t) "true", NULL };
    size_t n = 0;
    sigset_t none;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (size_t i = 0; i < 3; i++)
        if ((env[n] = of_env(k->spec.env, taken[i])))
            n++;
    int null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);

    if (null_fd < 0 || dup2(null_fd, 0) < 0 || dup2(null_fd, 1) < 0 || dup2(said, 2) < 0 ||
        (k->spec.cwd && chdir(k->spec.cwd) < 0))
        _exit(0);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    environ = env;
    execvp(argv[0], argv);
    _exit(0); /* a machine without `true`: nothing is known */
}

static void listen_to(int fd, char said[SAID_MAX])
{
    struct pollfd p = { .fd = fd, .events = POLLIN };
    uint64_t due = keep_now_ms() + TRY_MS;
    size_t len = 0;

    while (len < SAID_MAX - 1) {
        uint64_t now = keep_now_ms();

        if (now >= due || poll(&p, 1, (int)(due - now)) == 0)
            break;
        ssize_t n = read(fd, said + len, SAID_MAX - 1 - len);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        len += (size_t)n;
    }
    said[len] = '\0';
}

bool keep_preload_tried(const struct keeper *k, char why[256])
{
    static const char *const complaints[] = { "object '",
                                              "error while loading shared libraries: " };
    const char *set = of_env(k->spec.env, "LD_PRELOAD="), *at = NULL;
    char said[SAID_MAX] = "";
    int ends[2];

    if (!set || !set[strlen("LD_PRELOAD=")] || pipe2(ends, O_CLOEXEC) < 0)
        return true;
    pid_t pid = fork();

    if (pid == 0)
        try_it(k, ends[1]);
    close(ends[1]);
    if (pid > 0) {
        listen_to(ends[0], said);
        (void)kill(pid, SIGKILL); /* ours, and not waited for yet */
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
            ;
    }
    close(ends[0]);
    for (size_t i = 0; i < 2 && !at; i++)
        at = strstr(said, complaints[i]);
    if (!at)
        return true;
    snprintf(why, 256, "%.80s cannot be loaded: %.*s", set, (int)strcspn(at, "\n"), at);
    return false;
}
