#include "worker/proc/proc.h"
#include "worker/proc/keeper_priv.h"
#include "worker/proc/lost.h"
#include "worker/proc/record.h"
#include "worker/keep/form.h"
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/id.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    FIND_EVERY_MS = 20, /* adopting: the keeper may be a moment before its listen() */
    FIND_FOR_MS = 1000,
    SLACK_MS = 3000, /* a keeper that takes longer than term, kill and this hangs, and is ended */
    LOST_FOR_MS = 5000,
    UNSEEN_MS = 2000
};

struct proc {
    struct fl_loop *loop;
    const struct proc_user *user;
    void *arg;
    struct proc_exit exit; /* who from the start, the rest at the end */
    char dir[FL_PATH_MAX], mark[64];
    uint32_t term_ms, kill_ms;
    int control_fd, pid_fd, keeper_pid;
    struct fl_watch *control, *pid_watch;
    struct fl_timer find, overdue;
    uint64_t find_until_ns;
    struct fl_task later; /* gone() of what had ended before it was adopted */
    struct proc_lost *lost;
    bool told_started, stopping;
    enum proc_cause stop_cause;
    char stop_text[FORM_WHY_MAX + 1];
};

static void proc_close(struct proc *p)
{
    fl_watch_destroy(p->control);
    fl_watch_destroy(p->pid_watch);
    fl_timer_cancel(&p->find);
    fl_timer_cancel(&p->overdue);
    fl_task_cancel(p->loop, &p->later);
    proc_lost_destroy(p->lost);
    if (p->control_fd >= 0)
        close(p->control_fd);
    if (p->pid_fd >= 0)
        close(p->pid_fd);
}

static void proc_destroy(struct proc *p)
{
    if (!p)
        return;
    proc_close(p);
    free(p);
}
FL_AUTO_DEFINE(proc)

static void proc_over(struct proc *p)
{
    const struct proc_user *user = p->user;
    void *arg = p->arg;

    proc_close(p);
    p->control = p->pid_watch = NULL;
    p->lost = NULL;
    p->control_fd = p->pid_fd = -1;
    user->gone(arg, p, &p->exit);
    free(p);
}

/* From the record, if there is one. */
static bool take_record(struct proc *p)
{
    struct fl_seat_ref who = p->exit.who;
    struct fl_err err;
    enum fl_status st = proc_record_read(p->dir, &p->exit, &err);

    p->exit.who = who;
    if (st != FL_OK && st != FL_NOT_FOUND)
        fl_warn("exit record unreadable why=\"%s\"", err.text);
    return st == FL_OK;
}

static void on_later(struct fl_task *t)
{
    proc_over(container_of(t, struct proc, later));
}

/* The last line that the keeper wrote, when it wrote any: it says why there is no record. */
static void add_complaint(const struct proc *p, struct fl_str *why)
{
    char path[FL_PATH_MAX], *text;
    size_t len;

    if (fl_path(path, NULL, "%s/" PROC_KEEPER_LOG, p->dir) != FL_OK ||
        fl_file_read(path, 65536, &text, &len, NULL) != FL_OK)
        return;
    while (len && text[len - 1] == '\n')
        text[--len] = 0;
    const char *line = strrchr(text, '\n');

    if (len)
        fl_str_add(why, "; it said: %s", line ? line + 1 : text);
    free(text);
}

static void on_lost_over(void *arg, unsigned ended, unsigned left)
{
    struct proc *p = arg;
    struct fl_err err;

    memset(p->exit.why, 0, sizeof(p->exit.why));
    p->exit.cause = p->stopping ? p->stop_cause : PROC_KEEPER_LOST;
    p->exit.code = -1;
    p->exit.tree_ended = ended;
    p->exit.tree_left = left;
    struct fl_str why = FL_STR_ON(p->exit.why);

    if (p->stopping)
        fl_str_add(&why, "%s; ", p->stop_text);
    fl_str_add(&why,
               "its keeper (pid %d) was killed and left no record; %u of its processes were ended",
               p->keeper_pid, ended);
    if (left)
        fl_str_add(&why, ", %u could not be", left);
    add_complaint(p, &why);
    if (proc_record_write(p->dir, &p->exit, &err) != FL_OK)
        fl_warn("exit record not written why=\"%s\"", err.text); /* a next start looks again */
    fl_post(p->loop, &p->later); /* not from inside the walk's own timer */
}

static void keeper_is_lost(struct proc *p)
{
    struct fl_err err;

    if (p->lost || take_record(p)) {
        if (!p->lost)
            proc_over(p);
        return;
    }
    fl_timer_cancel(&p->overdue);
    if (proc_lost_start(p->loop, p->dir, p->mark, p->keeper_pid,
                        fl_loop_now_ns(p->loop) + LOST_FOR_MS * 1000000ull, on_lost_over, p,
                        &p->lost, &err) != FL_OK) {
        fl_error("tree not ended why=\"%s\"", err.text);
        fl_timer_arm_in(p->loop, &p->find, FIND_FOR_MS); /* again when there is memory */
    }
}

static void take_state(struct proc *p, const uint8_t *buf, size_t len)
{
    struct form_field f;
    size_t at = 0;
    int pid = 0;

    if (!form_check(buf, len, FORM_STATE))
        return;
    while (form_next(buf, len, &at, &f)) {
        if (f.tag == FORM_PID)
            pid = (int)form_u64(&f);
        if (f.tag == FORM_GROUP)
            proc_say_group(form_text(&f));
    }
    if (pid > 0 && !p->told_started) {
        p->told_started = true;
        p->user->started(p->arg, p, pid);
    }
}

/* false: nothing more to read there. started() may not end p: only gone() and forget() do, and a
 * user that forgets inside started() is ours alone, so it is not allowed. */
static bool control_read(struct proc *p)
{
    uint8_t buf[FORM_MSG_MAX];
    ssize_t n = recv(p->control_fd, buf, sizeof(buf), MSG_DONTWAIT);

    if (n > 0)
        take_state(p, buf, (size_t)n);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        fl_watch_destroy(p->control); /* the keeper leaves: its pidfd says the rest */
        p->control = NULL;
    }
    return n > 0;
}

static void on_control(void *arg, unsigned events)
{
    (void)events;
    (void)control_read(arg);
}

static void on_keeper_over(void *arg, unsigned events)
{
    struct proc *p = arg;
    siginfo_t si;

    (void)events;
    fl_watch_destroy(p->pid_watch);
    p->pid_watch = NULL;
    while (p->control && control_read(p)) /* started() before gone() */
        ;
    (void)waitid(P_PIDFD, (id_t)p->pid_fd, &si, WEXITED | WNOHANG); /* not our child when adopted */
    keeper_is_lost(p);
}

static enum fl_status watch(struct proc *p, struct fl_err *err)
{
    p->pid_fd = FL_FAULT("proc.pidfd") ? -1 : (int)syscall(SYS_pidfd_open, p->keeper_pid, 0);
    if (p->pid_fd < 0)
        return fl_fail_errno(err, "pidfd of keeper %d", p->keeper_pid);
    FL_TRY(fl_watch_create(p->loop, p->pid_fd, POLLIN, on_keeper_over, p, &p->pid_watch, err));
    return fl_watch_create(p->loop, p->control_fd, POLLIN, on_control, p, &p->control, err);
}

static void on_overdue(struct fl_timer *t, uint64_t now_ns)
{
    struct proc *p = container_of(t, struct proc, overdue);

    (void)now_ns;
    fl_warn("keeper hangs, ended pid=%d dir=%s", p->keeper_pid, p->dir);
    if (p->pid_fd >= 0)
        (void)syscall(SYS_pidfd_send_signal, p->pid_fd, SIGKILL, NULL, 0);
}

static void send_stop(struct proc *p)
{
    struct form f = { 0 };

    form_begin(&f, FORM_STOP);
    form_put_u64(&f, FORM_CAUSE, p->stop_cause);
    form_put_u64(&f, FORM_TERM_MS, p->term_ms);
    form_put_text(&f, FORM_WHY, p->stop_text);
    if (!form_end(&f) || send(p->control_fd, f.data, f.len, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
        fl_warn("stop not sent keeper=%d why=\"%s\"", p->keeper_pid, strerror(errno));
    form_fini(&f);
    fl_timer_arm_in(p->loop, &p->overdue, (uint64_t)p->term_ms + p->kill_ms + SLACK_MS);
}

static void keeper_stop(struct proc *p, enum proc_cause why, const char *text, uint32_t term_ms)
{
    if (p->stopping)
        return;
    p->stopping = true;
    p->stop_cause = why;
    p->term_ms = term_ms;
    snprintf(p->stop_text, sizeof(p->stop_text), "%s", text ? text : "stopped");
    if (p->control_fd >= 0)
        send_stop(p);
}

static struct proc *proc_new(struct fl_loop *l, const char *dir, const struct proc_user *u,
                             void *arg)
{
    struct proc *p = calloc(1, sizeof(*p));

    if (!p)
        return NULL;
    *p = (struct proc){ .loop = l, .user = u, .arg = arg, .control_fd = -1, .pid_fd = -1 };
    p->later.run = on_later;
    p->overdue.fire = on_overdue;
    if (!FL_COPY(p->dir, dir)) {
        free(p);
        return NULL;
    }
    return p;
}

/* A keeper that cannot be watched must not run: it is told to end at once, for only it can end its
 * tree and take its cgroup away. The wait is that of a program that has just started, 20 ms here.
 */
static void end_unseen(struct proc *p)
{
    const struct timespec ms = { .tv_nsec = 1000000 };

    p->stop_cause = PROC_STOPPED;
    p->term_ms = 0;
    send_stop(p);
    fl_timer_cancel(&p->overdue);
    for (unsigned i = 0; i < UNSEEN_MS; i++) {
        if (waitpid(p->keeper_pid, NULL, WNOHANG) != 0)
            return;
        nanosleep(&ms, NULL);
    }
    (void)kill(p->keeper_pid, SIGKILL);
    (void)waitpid(p->keeper_pid, NULL, 0);
}

static enum fl_status keeper_start(struct fl_loop *l, const struct proc_spec *s,
                                   const struct proc_user *u, void *arg, struct proc **out,
                                   struct fl_err *err)
{
    FL_AUTO(proc) struct proc *p = proc_new(l, s->dir, u, arg);

    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a worker in %s", s->dir);
    p->exit.who = s->who;
    p->kill_ms = s->kill_ms;
    proc_mark(p->mark, sizeof(p->mark), &s->who);
    FL_TRY(proc_spec_write(s, p->mark, err));
    FL_TRY(proc_spawn(s, p->mark, &p->keeper_pid, &p->control_fd, err));
    enum fl_status st = watch(p, err);

    if (st != FL_OK) {
        end_unseen(p);
        return fl_wrap(err, st, "starting %s", s->argv[0]);
    }
    *out = FL_TAKE(p);
    return FL_OK;
}

/* FL_OK: connected and watched. FL_NOT_FOUND: nobody listens there (any more, or yet). */
static enum fl_status find_keeper(struct proc *p, struct fl_err *err)
{
    struct sockaddr_un at;
    struct ucred who;
    socklen_t len = sizeof(who);
    char path[FL_PATH_MAX];
    int fd;

    FL_TRY(fl_path(path, err, "%s/keep.sock", p->dir));
    FL_TRY(fl_unix_addr(path, &at, err));
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return fl_fail_errno(err, "socket for %s", path);
    if (connect(fd, (struct sockaddr *)&at, sizeof(at)) < 0) {
        close(fd);
        return fl_fail(err, FL_NOT_FOUND, "no keeper at %s", path);
    }
    p->control_fd = fd;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &len) < 0)
        return fl_fail_errno(err, "peer of %s", path);
    p->keeper_pid = who.pid;
    enum fl_status st = watch(p, err);

    if (st == FL_OK && p->stopping)
        send_stop(p);
    return st;
}

static void on_find(struct fl_timer *t, uint64_t now_ns)
{
    struct proc *p = container_of(t, struct proc, find);
    struct fl_err err;
    enum fl_status st = find_keeper(p, &err);

    if (st == FL_OK)
        return;
    if (p->control_fd >= 0) {
        close(p->control_fd);
        p->control_fd = -1;
    }
    if (now_ns < p->find_until_ns && !take_record(p)) {
        fl_timer_arm_in(p->loop, &p->find, FIND_EVERY_MS);
        return;
    }
    keeper_is_lost(p);
}

static enum fl_status keeper_adopt(struct fl_loop *l, const char *dir, const struct proc_user *u,
                                   void *arg, struct proc **out, struct fl_err *err)
{
    FL_AUTO(proc) struct proc *p = proc_new(l, dir, u, arg);

    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory to adopt %s", dir);
    FL_TRY(proc_spec_who(dir, &p->exit.who, &p->kill_ms, err));
    proc_mark(p->mark, sizeof(p->mark), &p->exit.who);
    p->find.fire = on_find;
    p->find_until_ns = fl_loop_now_ns(l) + FIND_FOR_MS * 1000000ull;
    fl_timer_arm(l, &p->find, fl_loop_now_ns(l));
    *out = FL_TAKE(p);
    return FL_OK;
}

const struct proc_ops proc_keeper = {
    .start = keeper_start,
    .adopt = keeper_adopt,
    .stop = keeper_stop,
    .forget = proc_destroy,
};
