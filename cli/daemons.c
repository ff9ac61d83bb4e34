#include "cli/daemons.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cli/interrupt.h"
#include "common/base/fault.h"

extern char **environ;
enum { READY_FD = 3, READY_BYTES = 16 << 10, INFO_BYTES = 64 << 10, MAX_DAEMONS = 256, NODE_KILL_MS = 6000, UNREADY_MS = 5000, USAGE = 2 };

static uint64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* posix_spawn hands down blocked and ignored signals unless told otherwise, and descriptors that
 * another thread opened a moment ago: both are cut here. */
static enum fl_status spawn(const char *path, char *const *argv, const char *log, int ready,
                            pid_t *pid, struct fl_err *err)
{
    posix_spawn_file_actions_t files;
    posix_spawnattr_t how;
    sigset_t none, all;
    int rc;

    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&how);
    posix_spawnattr_setflags(&how,
                             POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setsigmask(&how, &none);
    posix_spawnattr_setsigdefault(&how, &all);
    rc = posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
    if (!rc)
        rc = posix_spawn_file_actions_addopen(&files, 1, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (!rc)
        rc = posix_spawn_file_actions_adddup2(&files, 1, 2);
    if (!rc)
        rc = posix_spawn_file_actions_adddup2(&files, ready, READY_FD);
    if (!rc)
        rc = posix_spawn_file_actions_addclosefrom_np(&files, READY_FD + 1);
    if (!rc)
        rc = posix_spawn(pid, path, &files, &how, argv, environ);
    posix_spawnattr_destroy(&how);
    posix_spawn_file_actions_destroy(&files);
    errno = rc;
    return rc ? fl_fail_errno(err, "start %s", path) : FL_OK;
}

static bool ended_within(int pidfd, uint32_t ms)
{
    struct pollfd p = { .fd = pidfd, .events = POLLIN };
    int rc;

    do
        rc = poll(&p, 1, (int)ms);
    while (rc < 0 && errno == EINTR);
    return rc > 0;
}

/* The number that it ended with; -1: it was killed, or is still there after its last word. */
static int exit_code(pid_t pid)
{
    int fd = pidfd_open(pid, 0), ws = 0;
    bool over = fd >= 0 && ended_within(fd, UNREADY_MS) && waitpid(pid, &ws, WNOHANG) == pid;

    if (fd >= 0)
        close(fd);
    return over && WIFEXITED(ws) ? WEXITSTATUS(ws) : -1;
}

/* What it said before it went: a usage error comes before there is a --ready-fd to say it on. */
static enum fl_status ended_early(const char *program, pid_t pid, const char *log, struct fl_err *err)
{
    char tail[512] = "";
    FILE *f = fopen(log, "re");

    if (f) {
        (void)fseek(f, -(long)(sizeof(tail) - 1), SEEK_END); /* a shorter file is read from its start */
        tail[fread(tail, 1, sizeof(tail) - 1, f)] = 0;
        fclose(f);
    }
    size_t len = strlen(tail);
    while (len && tail[len - 1] == '\n')
        tail[--len] = 0;
    const char *line = strrchr(tail, '\n');
    size_t len_program = strlen(program);

    line = line ? line + 1 : tail;
    if (exit_code(pid) == USAGE)
        return fl_fail(err, FL_INVALID, "%s", strncmp(line, program, len_program) == 0 && line[len_program] == ':' ? line + len_program + 2 : line);
    return fl_fail(err, FL_INTERNAL, "%s ended before it was ready: %.160s (its log: %s)", program,
                   line, log);
}

static enum fl_status read_ready(const char *program, pid_t pid, const char *log, int fd, uint32_t wait_ms,
                                 json_t **ready, struct fl_err *err)
{
    uint64_t due = now_ms() + wait_ms;
    char line[READY_BYTES];
    size_t len = 0;
    json_error_t bad;

    for (;;) {
        uint64_t now = now_ms();
        struct pollfd p[2] = { { .fd = fd, .events = POLLIN }, { .fd = cli_signals_fd(), .events = POLLIN } };
        ssize_t n;
        int ready_fds = poll(p, 2, now < due ? (int)(due - now) : 0);

        FL_TRY(cli_interrupted(err, "%s to be ready; it is ended again", program));
        if (ready_fds == 0)
            return fl_fail(err, FL_TIMEOUT, "%s was not ready within %u ms; its log is %s", program,
                           wait_ms, log);
        n = read(fd, line + len, sizeof(line) - 1 - len);
        if (n < 0 && errno != EINTR)
            return fl_fail_errno(err, "wait for %s", program);
        if (n == 0)
            break;
        len += n > 0 ? (size_t)n : 0;
        if (len == sizeof(line) - 1)
            break;
    }
    line[len] = 0;
    *ready = json_loads(line, JSON_REJECT_DUPLICATES, &bad);
    if (!*ready)
        return ended_early(program, pid, log, err);
    const char *said = json_string_value(json_object_get(*ready, "error"));
    if (said) {
        enum fl_status st = fl_fail(err, exit_code(pid) == USAGE ? FL_INVALID : FL_UNREACHABLE, "%s", said);

        json_decref(*ready);
        *ready = NULL;
        return st;
    }
    return FL_OK;
}

/* One that nobody waits for any more would come up later, and stay. */
static void end_unready(pid_t pid)
{
    int fd = pidfd_open(pid, 0);

    (void)kill(pid, SIGTERM); /* our child, not reaped yet: the number is its own */
    if (fd >= 0 && !ended_within(fd, UNREADY_MS))
        (void)kill(pid, SIGKILL);
    if (fd >= 0)
        close(fd);
    (void)waitpid(pid, NULL, fd >= 0 ? 0 : WNOHANG);
}

enum fl_status cli_daemon_start(const char *program, const char *const *args, const char *log_dir,
                                uint32_t wait_ms, json_t **ready, struct fl_err *err)
{
    char path[FL_PATH_MAX], log[FL_PATH_MAX];
    const char *argv[64] = { program, "--ready-fd=3" };
    size_t n = 2;
    int fds[2];
    pid_t pid;

    FL_TRY(fl_program_path(program, path, err));
    FL_TRY(fl_mkdirs(log_dir, err));
    FL_TRY(fl_path(log, err, "%s/%s.log", log_dir, program));
    while (*args && n < sizeof(argv) / sizeof(*argv) - 1)
        argv[n++] = *args++;
    if (*args)
        return fl_fail(err, FL_INVALID, "%s: more than %zu arguments", program, n);
    if (FL_FAULT("cli.spawn") || pipe2(fds, O_CLOEXEC) < 0)
        return fl_fail_errno(err, "pipe to %s", program);

    enum fl_status st = spawn(path, (char *const *)argv, log, fds[1], &pid, err);

    close(fds[1]);
    if (st == FL_OK)
        st = read_ready(program, pid, log, fds[0], wait_ms, ready, err);
    close(fds[0]);
    if (st == FL_TIMEOUT || st == FL_CANCELLED)
        end_unready(pid);
    return st;
}

static int heads_first(const void *a, const void *b)
{
    const struct cli_daemon *x = a, *y = b;

    return x->kind != y->kind ? x->kind - y->kind : strcmp(x->dir, y->dir);
}

/* False: no such file, not ours to read, or of a process that is gone. */
static bool look_at(const char *runtime, const char *name, struct cli_daemon *d)
{
    char file[FL_PATH_MAX], *text;
    size_t len;

    *d = (struct cli_daemon){ .kind = name[0] };
    if (fl_path(d->dir, NULL, "%s/%s", runtime, name) != FL_OK ||
        fl_path(file, NULL, "%s/%s.json", d->dir, d->kind == 'h' ? "head" : "node") != FL_OK ||
        fl_file_read(file, INFO_BYTES, &text, &len, NULL) != FL_OK)
        return false;
    d->info = json_loadb(text, len, JSON_REJECT_DUPLICATES, NULL);
    free(text);
    d->pid = (pid_t)json_integer_value(json_object_get(d->info, "pid"));
    d->start_time = (uint64_t)json_integer_value(json_object_get(d->info, "start_time"));
    d->private = json_is_true(json_object_get(d->info, "private"));
    if (d->pid > 0 && fl_pid_alive(d->pid, d->start_time))
        return true;
    json_decref(d->info);
    return false;
}

enum fl_status cli_daemons_find(struct cli_daemon **out, size_t *n, struct fl_err *err)
{
    char runtime[FL_PATH_MAX];
    struct cli_daemon *all;
    size_t used = 0;
    DIR *dir;

    FL_TRY(fl_runtime_dir(NULL, runtime, err));
    dir = opendir(runtime);
    if (!dir)
        return fl_fail_errno(err, "open %s", runtime);
    all = calloc(MAX_DAEMONS, sizeof(*all));
    for (struct dirent *e; all && (e = readdir(dir)) && used < MAX_DAEMONS;)
        if ((e->d_name[0] == 'h' || e->d_name[0] == 'n') && e->d_name[1] == '-')
            used += look_at(runtime, e->d_name, &all[used]);
    closedir(dir);
    if (!all)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the list of daemons");
    qsort(all, used, sizeof(*all), heads_first);
    *out = all;
    *n = used;
    return FL_OK;
}

void cli_daemons_free(struct cli_daemon *d, size_t n)
{
    for (size_t i = 0; i < n; i++)
        json_decref(d[i].info);
    free(d);
}

bool cli_daemon_wait(const struct cli_daemon *d, uint32_t ms)
{
    int fd = pidfd_open(d->pid, 0);
    bool gone = fd < 0 || !fl_pid_alive(d->pid, d->start_time) || ended_within(fd, ms);

    if (fd >= 0)
        close(fd);
    if (gone)
        (void)waitpid(d->pid, NULL, WNOHANG); /* ours if this command started it: nobody may wait for it after us */
    return gone;
}

enum fl_status cli_daemon_end(const struct cli_daemon *d, uint32_t term_ms, struct fl_err *err)
{
    const char *what = d->kind == 'h' ? "head" : "worker daemon";
    bool at_once = term_ms == 0 && d->kind == 'n'; /* killed outright it would leave its workers behind */
    int fd = pidfd_open(d->pid, 0);
    enum fl_status st = FL_OK;

    if (at_once)
        term_ms = NODE_KILL_MS;
    if (fd < 0)
        return errno == ESRCH ? FL_OK : fl_fail_errno(err, "open the %s, pid %d", what, (int)d->pid);
    if (!fl_pid_alive(d->pid, d->start_time)) { /* the number may belong to another by now */
        close(fd);
        return FL_OK;
    }
    if (pidfd_send_signal(fd, at_once ? SIGQUIT : SIGTERM, NULL, 0) < 0 && errno != ESRCH)
        st = fl_fail_errno(err, "stop the %s, pid %d", what, (int)d->pid);
    else if (!ended_within(fd, term_ms)) {
        (void)pidfd_send_signal(fd, SIGKILL, NULL, 0); /* may have ended just now */
        if (!ended_within(fd, 5000))
            st = fl_fail(err, FL_TIMEOUT, "the %s, pid %d, does not end, even when killed", what,
                         (int)d->pid);
    }
    close(fd);
    (void)waitpid(d->pid, NULL, WNOHANG); /* ours if this command started it: it shall not stay a zombie */
    return st;
}

enum fl_status cli_daemon_watch(const struct cli_daemon *d, struct fl_loop *l,
                                void (*ended)(void *arg, unsigned events), void *arg, int *fd,
                                struct fl_watch **w, struct fl_err *err)
{
    *fd = pidfd_open(d->pid, 0);
    if (*fd < 0)
        return fl_fail_errno(err, "watch pid %d", (int)d->pid);
    return fl_watch_create(l, *fd, POLLIN, ended, arg, w, err);
}

void cli_daemon_unwatch(struct fl_watch *w, int fd)
{
    fl_watch_destroy(w);
    if (fd >= 0)
        close(fd);
}
