#include "cli/ssh.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cli/interrupt.h"
#include "cli/quote.h"
#include "common/base/file.h"
#include "common/base/str.h"

extern char **environ;
enum { AT_ONCE = 64, SAID_BYTES = 4096, WORDS = 48, CONNECT_S = 10, INPUT_BYTES = 4096 };

struct one {
    pid_t pid; /* 0: not started; -1: over */
    int out;   /* what it says, both streams; -1: closed */
    char said[SAID_BYTES]; /* the end of it */
    size_t len;
};
struct all {
    const struct hosts *h;
    const struct ssh_run *r;
    char *command, *base, control[FL_PATH_MAX];
    const char *words[WORDS]; /* ssh and its options; the host's name and the command follow */
    size_t n_words;
    struct one *ones;
};

static uint64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* Passwords cannot be asked for: nobody sits at n terminals. */
static enum fl_status make_words(struct all *a, struct fl_err *err)
{
    static char connect[32];
    const char *given = getenv("FURLONG_SSH");
    char runtime[FL_PATH_MAX], *save = NULL;

    FL_TRY(fl_runtime_dir(NULL, runtime, err));
    FL_TRY(fl_path(a->control, err, "ControlPath=%s/s-%%C", runtime));
    a->base = strdup(given && *given ? given : "ssh");
    snprintf(connect, sizeof(connect), "ConnectTimeout=%d", CONNECT_S);
    for (char *w = a->base ? strtok_r(a->base, " ", &save) : NULL; w && a->n_words < WORDS - 20; w = strtok_r(NULL, " ", &save))
        a->words[a->n_words++] = w;
    const char *const options[] = { "-T", "-o", "BatchMode=yes", "-o", connect, "-o", "ControlMaster=auto", "-o", a->control,
                                    "-o", "ControlPersist=60", "-o", "LogLevel=ERROR" };

    for (size_t i = 0; i < FL_LEN(options); i++)
        a->words[a->n_words++] = options[i];
    return a->n_words > FL_LEN(options) ? FL_OK : fl_fail(err, FL_INVALID, "FURLONG_SSH is empty");
}

/* The whole input is in the pipe before ssh reads it: it is short. */
static int input_pipe(const char *text)
{
    size_t len = text ? strlen(text) : 0;
    int fds[2];

    if (!len)
        return open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (len > INPUT_BYTES || pipe2(fds, O_CLOEXEC) < 0)
        return -1;
    if (write(fds[1], text, len) != (ssize_t)len) {
        close(fds[0]);
        fds[0] = -1;
    }
    close(fds[1]);
    return fds[0];
}

/* A host's name has no letter that a shell would read: hosts_parse() saw to that. */
static char *for_host(const char *command, const char *host)
{
    const char *at = strstr(command, "%h");
    char *line = NULL;

    if (!at)
        return strdup(command);
    return asprintf(&line, "%.*s%s%s", (int)(at - command), command, host, at + 2) < 0 ? NULL : line;
}

static enum fl_status start(struct all *a, size_t i, struct fl_err *err)
{
    posix_spawn_file_actions_t files;
    posix_spawnattr_t how;
    sigset_t set;
    int fds[2], in = input_pipe(a->r->input), rc;
    struct one *o = &a->ones[i];

    char *command = for_host(a->command, host_bare(a->h->names[i]));

    a->words[a->n_words] = a->h->names[i];
    a->words[a->n_words + 1] = command;
    a->words[a->n_words + 2] = NULL;
    if (!command || in < 0 || pipe2(fds, O_CLOEXEC) < 0) {
        free(command);
        if (in >= 0)
            close(in);
        return fl_fail_errno(err, "pipes for ssh to %s", a->h->names[i]);
    }
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&how);
    posix_spawnattr_setflags(&how, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    sigemptyset(&set);
    posix_spawnattr_setsigmask(&how, &set);
    sigfillset(&set);
    posix_spawnattr_setsigdefault(&how, &set);
    posix_spawn_file_actions_adddup2(&files, in, 0);
    posix_spawn_file_actions_adddup2(&files, fds[1], 1);
    posix_spawn_file_actions_adddup2(&files, fds[1], 2);
    rc = posix_spawnp(&o->pid, a->words[0], &files, &how, (char *const *)a->words, environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&how);
    free(command);
    close(in);
    close(fds[1]);
    if (rc) {
        close(fds[0]);
        o->pid = -1;
        errno = rc;
        return fl_fail_errno(err, "start %s", a->words[0]);
    }
    o->out = fds[0];
    return FL_OK;
}

static void keep(struct one *o, const char *data, size_t n)
{
    size_t room = SAID_BYTES - 1;

    if (n > room) {
        data += n - room;
        n = room;
    }
    if (o->len + n > room) {
        memmove(o->said, o->said + (o->len + n - room), room - n);
        o->len = room - n;
    }
    memcpy(o->said + o->len, data, n);
    o->len += n;
    o->said[o->len] = 0;
}

static const char *last_line(struct one *o)
{
    while (o->len && strchr("\r\n ", o->said[o->len - 1]))
        o->said[--o->len] = 0;
    const char *nl = strrchr(o->said, '\n');

    return nl ? nl + 1 : o->said;
}

/* Over: its exit code, -1 while it runs. A shared connection's master holds the pipe open: the end of the child
 * counts, not the end of what it says. */
static int over(struct one *o)
{
    char data[2048];
    ssize_t n;
    int ws;
    pid_t p = waitpid(o->pid, &ws, WNOHANG);

    while (o->out >= 0) {
        struct pollfd f = { .fd = o->out, .events = POLLIN };

        if (poll(&f, 1, 0) <= 0)
            break;
        n = read(o->out, data, sizeof(data));
        if (n <= 0) {
            close(o->out);
            o->out = -1;
        } else {
            keep(o, data, (size_t)n);
        }
    }
    if (p == 0)
        return -1;
    if (o->out >= 0)
        close(o->out);
    o->out = -1;
    o->pid = -1;
    return p > 0 && WIFEXITED(ws) ? WEXITSTATUS(ws) : 255;
}

static void stop(struct one *o)
{
    if (o->pid > 0) {
        (void)kill(-o->pid, SIGKILL); /* a group of its own: nothing else is in it */
        (void)waitpid(o->pid, NULL, 0);
    }
    if (o->pid > 0 && o->out >= 0)
        close(o->out);
    o->pid = -1;
}

/* What goes on there without us may still come to its end. */
static enum fl_status given_up(struct all *a, size_t begun, bool *done, enum fl_status st)
{
    for (size_t i = 0; i < begun; i++) {
        done[i] |= a->ones[i].pid > 0;
        stop(&a->ones[i]);
    }
    return st;
}

static enum fl_status run(struct all *a, bool *done, struct fl_err *err)
{
    size_t next = 0, busy = 0, bad = 0, n = a->h->n;
    uint64_t due = now_ms() + a->r->wait_ms;
    char first[200] = "";

    while ((next < n && !bad) || busy) {
        struct pollfd fds[AT_ONCE + 1];
        size_t k = 0;

        while (next < n && busy < AT_ONCE && !bad) {
            FL_TRY(start(a, next++, err));
            busy++;
        }
        for (size_t i = 0; i < next && k < AT_ONCE; i++)
            if (a->ones[i].pid > 0)
                fds[k++] = (struct pollfd){ .fd = a->ones[i].out, .events = POLLIN };
        fds[k] = (struct pollfd){ .fd = cli_signals_fd(), .events = POLLIN };
        (void)poll(fds, k + 1, 50); /* the end of a child makes no event of its own */
        enum fl_status st = cli_interrupted(err, "ssh to %zu hosts", busy);

        if (st != FL_OK)
            return given_up(a, next, done, st);
        bool late = now_ms() >= due;

        for (size_t i = 0; i < next; i++) {
            struct one *o = &a->ones[i];
            int code = o->pid > 0 ? over(o) : -2;

            bool cut = code == -1 && late;

            if (cut) {
                stop(o);
                keep(o, "\nno answer in time", 18);
                code = 255;
            }
            if (code < 0)
                continue;
            busy--;
            done[i] = code == 0 || cut;
            if (code && !bad++)
                snprintf(first, sizeof(first), "%.60s: %.100s (exit code %d)", a->h->names[i],
                         *last_line(o) ? last_line(o) : "it said nothing", code);
        }
    }
    return bad ? fl_fail(err, FL_UNREACHABLE, "%s%s", first, bad > 1 || next < n ? "; others may have failed too" : "") : FL_OK;
}

enum fl_status ssh_run_all(const struct hosts *h, const struct ssh_run *r, bool *done, struct fl_err *err)
{
    struct all a = { .h = h, .r = r, .ones = calloc(h->n + 1, sizeof(struct one)), .command = cli_shell_line(r->command) };
    enum fl_status st = a.ones ? make_words(&a, err) : fl_fail(err, FL_EXHAUSTED, "no memory for %zu hosts", h->n);

    for (size_t i = 0; a.ones && i < h->n; i++)
        a.ones[i].out = -1;
    if (st == FL_OK)
        st = run(&a, done, err);
    for (size_t i = 0; a.ones && i < h->n; i++)
        if (a.ones[i].pid > 0)
            stop(&a.ones[i]);
    free(a.base);
    free(a.command);
    free(a.ones);
    return st;
}
