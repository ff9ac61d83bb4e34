#include "worker/roles/reward.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common/base/str.h"

extern char **environ;

enum { LINE_MAX_BYTES = 64, ANSWER_MAX = 64 << 20 };

static bool same_answer(const char *a, const char *b)
{
    static const char blank[] = " \t\r\n";
    size_t n, m;

    a += strspn(a, blank);
    b += strspn(b, blank);
    for (n = strlen(a); n && strchr(blank, a[n - 1]); n--)
        ;
    for (m = strlen(b); m && strchr(blank, b[m - 1]); m--)
        ;
    return n == m && !memcmp(a, b, n);
}

static uint64_t now_ms(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_BOOTTIME, &t); /* cannot fail with a known clock */
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* One child with its standard streams as pipes. In a session of its own, so that it is ended with
 * whatever it started. */
struct child {
    const char *command;
    pid_t pid;
    int in, out;
    struct fl_str got;
    const char *text;
    size_t left;
    uint64_t due_ms;
};

static void child_end(struct child *c)
{
    if (c->in >= 0)
        (void)close(c->in);
    if (c->out >= 0)
        (void)close(c->out);
    if (c->pid > 0) {
        (void)kill(-c->pid, SIGKILL); /* may be gone already */
        while (waitpid(c->pid, NULL, 0) < 0 && errno == EINTR)
            ;
    }
    fl_str_fini(&c->got);
}

static enum fl_status child_start(struct child *c, struct fl_err *err)
{
    char *argv[] = { "/bin/sh", "-c", (char *)c->command, NULL };
    int in[2] = { -1, -1 }, out[2] = { -1, -1 }, rc;
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    sigset_t none, all;

    if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC)) {
        if (in[0] >= 0) {
            (void)close(in[0]);
            (void)close(in[1]);
        }
        return fl_fail_errno(err, "--reward-cmd: no pipe");
    }
    c->in = in[1];
    c->out = out[0];
    (void)fcntl(c->in, F_SETFL, O_NONBLOCK);
    (void)fcntl(c->out, F_SETFL, O_NONBLOCK);
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, in[0], 0);
    posix_spawn_file_actions_adddup2(&files, out[1], 1);
    posix_spawnattr_init(&attr);
    posix_spawnattr_setflags(&attr,
                             POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setsigdefault(&attr, &all);
    rc = posix_spawn(&c->pid, argv[0], &files, &attr, argv, environ);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&files);
    (void)close(in[0]);
    (void)close(out[1]);
    if (rc) {
        c->pid = 0;
        errno = rc;
        return fl_fail_errno(err, "--reward-cmd '%.80s'", c->command);
    }
    return FL_OK;
}

static void child_feed(struct child *c)
{
    ssize_t n = write(c->in, c->text, c->left);

    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n > 0) {
        c->text += n;
        c->left -= (size_t)n;
    }
    if (n < 0 ||
        c->left == 0) { /* a command that does not read to the end is judged by its answer */
        (void)close(c->in);
        c->in = -1;
    }
}

/* true: the end of its output */
static bool child_read(struct child *c)
{
    char part[16384];
    ssize_t n = read(c->out, part, sizeof(part));

    if (n > 0)
        fl_str_add_bytes(&c->got, part, (size_t)n);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

static enum fl_status child_talk(struct child *c, struct fl_err *err)
{
    bool ended = false;

    while (!ended) {
        struct pollfd p[2] = { { c->out, POLLIN, 0 }, { c->in, POLLOUT, 0 } };
        uint64_t now = now_ms();

        if (now >= c->due_ms)
            return fl_fail(
                err, FL_TIMEOUT,
                "--reward-cmd '%.80s' took longer than --reward-timeout and was ended; give it "
                "more time, or smaller batches",
                c->command);
        if (poll(p, 2, (int)(c->due_ms - now)) < 0 && errno != EINTR)
            return fl_fail_errno(err, "--reward-cmd: poll");
        if (c->in >= 0 && p[1].revents)
            child_feed(c);
        if (p[0].revents)
            ended = child_read(c);
        if (c->got.cut)
            return fl_fail(err, FL_INVALID,
                           "--reward-cmd '%.80s' wrote more than %zu bytes for one batch",
                           c->command, c->got.max);
    }
    return FL_OK;
}

static enum fl_status child_wait(struct child *c, struct fl_err *err)
{
    int status = 0;
    pid_t got;

    while ((got = waitpid(c->pid, &status, WNOHANG)) == 0 && now_ms() < c->due_ms)
        (void)poll(NULL, 0, 1); /* its output has ended: so has it, or nearly */
    if (got == 0)
        return fl_fail(err, FL_TIMEOUT,
                       "--reward-cmd '%.80s' closed its output and did not end in time",
                       c->command);
    (void)kill(-c->pid, SIGKILL); /* what it left behind in its session */
    c->pid = 0;
    if (WIFSIGNALED(status))
        return fl_fail(err, FL_INVALID, "--reward-cmd '%.80s' was ended by signal %d", c->command,
                       WTERMSIG(status));
    if (WEXITSTATUS(status))
        return fl_fail(err, FL_INVALID, "--reward-cmd '%.80s' ended with exit code %d", c->command,
                       WEXITSTATUS(status));
    return FL_OK;
}

static enum fl_status answer_read(const struct child *c, uint32_t n, float *out, struct fl_err *err)
{
    const char *p = fl_str_text(&c->got);

    for (uint32_t i = 0; i < n; i++) {
        size_t len = strcspn(p, "\n");
        char line[LINE_MAX_BYTES], *end;

        if (!*p)
            return fl_fail(
                err, FL_INVALID,
                "--reward-cmd '%.80s' answered %u lines to %u; it has to print one number for "
                "each line that it reads",
                c->command, i, n);
        snprintf(line, sizeof(line), "%.*s", (int)(len < 63 ? len : 63), p);
        double v = strtod(line, &end);
        if (end == line || *(end + strspn(end, " \r\t")) || !isfinite(v))
            return fl_fail(
                err, FL_INVALID,
                "--reward-cmd '%.80s', line %u: '%s' is no number; print the reward alone, and "
                "what else there is to say on stderr",
                c->command, i + 1, line);
        out[i] = (float)v;
        p += len + (p[len] == '\n');
    }
    if (*(p + strspn(p, " \r\t\n")))
        return fl_fail(err, FL_INVALID, "--reward-cmd '%.80s' answered more than %u lines",
                       c->command, n);
    return FL_OK;
}

static char *rows_text(const struct reward_row *rows, uint32_t n, size_t *len)
{
    struct fl_str s = FL_STR_HEAP((size_t)1 << 30);

    for (uint32_t i = 0; i < n && !s.cut; i++) {
        json_t *o = json_pack("{s:s, s:s, s:s}", "prompt", rows[i].prompt, "response",
                              rows[i].response, "label", rows[i].label);
        char *line = o ? json_dumps(o, JSON_COMPACT) : NULL;

        if (!line)
            s.cut = true;
        else
            fl_str_add(&s, "%s\n", line);
        free(line);
        json_decref(o);
    }
    if (s.cut) {
        fl_str_fini(&s);
        return NULL;
    }
    *len = s.len;
    return s.data ? s.data : strdup("");
}

enum fl_status reward_score(const char *command, const struct reward_row *rows, uint32_t n,
                            uint32_t budget_ms, float *out, struct fl_err *err)
{
    struct child c = { .command = command, .in = -1, .out = -1, .got = FL_STR_HEAP(ANSWER_MAX) };
    enum fl_status st;

    if (!command) {
        for (uint32_t i = 0; i < n; i++)
            out[i] = same_answer(rows[i].response, rows[i].label) ? 1.f : 0.f;
        return FL_OK;
    }
    char *text = rows_text(rows, n, &c.left);
    if (!text)
        return fl_fail(err, FL_EXHAUSTED, "--reward-cmd: no memory for %u rows", n);
    c.text = text;
    c.due_ms = now_ms() + budget_ms;
    st = child_start(&c, err);
    if (st == FL_OK)
        st = child_talk(&c, err);
    if (st == FL_OK)
        st = child_wait(&c, err);
    if (st == FL_OK)
        st = answer_read(&c, n, out, err);
    child_end(&c);
    free(text);
    return st;
}
