/* tests/worker/victim.c - a worker that behaves as badly as it is told
 *
 *     victim WORD [ARG]    says "ready PID" on stdout when it has become that bad */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void ready(void)
{
    printf("ready %d\n", (int)getpid());
    fflush(stdout);
}

static void __attribute__((noreturn)) forever(void)
{
    for (;;)
        pause();
}

/* A grandchild in its own session, whose parent has gone; it says "ready" itself. */
static void daemonise(void)
{
    int up[2];
    char c;

    if (pipe(up) < 0)
        _exit(9);
    if (fork() == 0) {
        setsid();
        if (fork() == 0) {
            signal(SIGTERM, SIG_IGN);
            ready();
            close(up[0]);
            close(up[1]);
            forever();
        }
        _exit(0);
    }
    wait(NULL);
    close(up[1]);
    (void)!read(up[0], &c, 1); /* end of file: it is as far as it gets */
}

static void open_fds(void)
{
    for (int fd = 0; fd < 1024; fd++)
        if (fcntl(fd, F_GETFD) >= 0)
            printf("%d ", fd);
    printf("\n");
}

static void on_term_save(int sig)
{
    (void)sig;
    _exit(0);
}

static void saver(
    void) /* a shell in front of it dies by SIGTERM at once; this one saves and ends */
{
    signal(SIGTERM, on_term_save);
    ready();
    forever();
}

static void flood(const char *bytes)
{
    char line[1024];
    long long left = atoll(bytes);

    memset(line, 'x', sizeof(line));
    line[sizeof(line) - 1] = '\n';
    for (; left > 0; left -= (long long)sizeof(line))
        (void)!write(1, line, sizeof(line));
}

int main(int argc, char **argv)
{
    const char *word = argc > 1 ? argv[1] : "", *arg = argc > 2 ? argv[2] : "0";

    if (!strcmp(word, "exit")) {
        fprintf(stderr, "leaving with %s\n", arg);
        return atoi(arg);
    }
    if (!strcmp(word, "signal")) {
        signal(atoi(arg), SIG_DFL); /* a sanitizer may have its own */
        raise(atoi(arg));
    } else if (!strcmp(word, "wait")) {
        ready();
        forever();
    } else if (!strcmp(word, "stubborn")) {
        signal(SIGTERM, SIG_IGN);
        ready();
        forever();
    } else if (!strcmp(word, "leave-child")) { /* goes, and leaves somebody behind */
        daemonise();
        return atoi(arg);
    } else if (!strcmp(word, "with-child")) {
        daemonise();
        forever();
    } else if (!strcmp(word, "saver")) {
        saver();
    } else if (!strcmp(word, "fds")) {
        open_fds();
        return 0;
    } else if (!strcmp(word, "env")) {
        for (char **e = environ; *e; e++)
            puts(*e);
        return 0;
    } else if (!strcmp(word, "eat")) { /* more memory than it may */
        size_t n = (size_t)atoll(arg);
        volatile char *p = malloc(n);

        for (size_t i = 0; p && i < n; i += 4096)
            p[i] = 1;
        return 0;
    } else if (!strcmp(word, "flood")) {
        flood(arg);
        ready();
        forever();
    } else if (!strcmp(word, "pour")) { /* and goes */
        flood(arg);
        return 0;
    }
    return 99;
}
