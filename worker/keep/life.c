#include "worker/keep/keeper.h"
#include "worker/keep/output.h"
#include "worker/keep/tree.h"
#include "common/base/fault.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    TICK_MS = 1000,     /* looks at the size of the outputs, and at the kernel's OOM counter */
    FULL_TICK_MS = 100, /* ... when an output is half full */
    KILL_ROUND_MS = 10
};
enum { STAGE_CWD = 1, STAGE_FILES, STAGE_EXEC };

uint64_t keep_now_ms(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_BOOTTIME, &ts);
    return (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
}

uint64_t keep_oom_kills(void)
{
    FILE *f = fopen("/proc/vmstat", "re");
    char line[128];
    unsigned long long n = 0;

    while (f && fgets(line, sizeof(line), f))
        if (sscanf(line, "oom_kill %llu", &n) == 1)
            break;
    if (f)
        fclose(f);
    return n;
}

static void __attribute__((noreturn)) child_fail(int fd, int stage)
{
    struct exec_news news = { stage, errno };

    (void)!write(fd, &news, sizeof(news)); /* nobody to tell when that fails */
    _exit(127);
}

/* Between fork and exec. The keeper has one thread, so any function may be called here. */
static void __attribute__((noreturn)) child_run(struct keeper *k, int news_fd, pid_t keeper)
{
    int null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    sigset_t none;

    group_enter(&k->group);
    (void)setsid(); /* kill(0, ...) in the worker means the worker, and no terminal is its own */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != keeper)
        _exit(127);
    if (null_fd < 0 || dup2(null_fd, 0) < 0 || dup2(k->out_fd, 1) < 0 || dup2(k->err_fd, 2) < 0)
        child_fail(news_fd, STAGE_FILES);
    /* The seat stays where it is; everything else of ours goes at exec. */
    if (k->spec.has_seat && fcntl(KEEP_SEAT_FD, F_SETFD, 0) < 0)
        child_fail(news_fd, STAGE_FILES);
    if (k->spec.cwd && chdir(k->spec.cwd) < 0)
        child_fail(news_fd, STAGE_CWD);
    signal(SIGPIPE, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    environ = k->spec.env; /* execvp searches the worker's PATH, not ours */
    if (FL_FAULT("keep.exec"))
        child_fail(news_fd, STAGE_EXEC);
    execvp(k->spec.argv[0], k->spec.argv);
    child_fail(news_fd, STAGE_EXEC);
}

bool keep_start_worker(struct keeper *k, char why[256])
{
    int news[2];
    pid_t keeper = getpid();
    struct tree_stat st;

    if (!keep_preload_tried(k, why))
        return false;
    if (pipe2(news, O_CLOEXEC) < 0) {
        snprintf(why, 256, "no pipe: %s", strerror(errno));
        return false;
    }
    k->born_ms = keep_now_ms();
    k->oom_base = keep_oom_kills();
    k->worker = FL_FAULT("keep.fork") ? -1 : fork();
    if (k->worker == 0)
        child_run(k, news[1], keeper);
    close(news[1]);
    if (k->worker < 0) {
        snprintf(why, 256, "cannot fork for %s: %s", k->spec.argv[0], strerror(errno));
        close(news[0]);
        return false;
    }
    k->exec_fd = news[0];
    if (tree_stat(k->worker, &st))
        k->worker_start = st.start_time;
    return true;
}

void keep_on_exec(struct keeper *k)
{
    ssize_t n = read(k->exec_fd, &k->exec_news, sizeof(k->exec_news));

    if (n < 0 && errno == EINTR)
        return;
    close(k->exec_fd);
    k->exec_fd = -1;
    if (n == sizeof(k->exec_news))
        return; /* it leaves by itself */
    k->executed = true;
    if (k->phase == KEEP_STARTING)
        k->phase = KEEP_RUNNING;
    (void)FL_FAULT("keep.started");
    keep_tell(k);
}

static struct tree_pick own_tree(void)
{
    return (struct tree_pick){ .root = (int)getpid() };
}

void keep_stop(struct keeper *k, enum proc_cause cause, const char *text, uint32_t term_ms,
               uint32_t kill_ms)
{
    uint64_t now = keep_now_ms(), due = now + term_ms;

    if (!k->asked && !k->worker_over) {
        struct tree_pick pick = own_tree();

        k->asked = true;
        k->asked_cause = cause;
        k->asked_ms = now;
        k->term_due_ms = due;
        snprintf(k->asked_text, sizeof(k->asked_text), "%s", text ? text : "");
        k->phase = KEEP_ENDING;
        if (term_ms) /* the whole tree: a shell in front would die alone and leave its script behind
                      */
            tree_signal(&pick, k->spec.stop_signal);
    }
    if (due < k->term_due_ms)
        k->term_due_ms = due;
    k->spec.kill_ms = kill_ms ? kill_ms : k->spec.kill_ms;
}

/* True: no child is left, and so no descendant either, for orphans come to us. */
static bool reap(struct keeper *k)
{
    for (;;) {
        struct rusage ru;
        int status;
        pid_t pid = wait4(-1, &status, WNOHANG, &ru);

        if (pid < 0 && errno == EINTR)
            continue;
        if (pid <= 0)
            return pid < 0;
        if ((uint64_t)ru.ru_maxrss * 1024 > k->peak_bytes)
            k->peak_bytes = (uint64_t)ru.ru_maxrss * 1024;
        if (pid == k->worker) {
            k->worker_over = true;
            k->status = status;
            k->lived_ms = keep_now_ms() - k->born_ms;
        } else if (WIFSIGNALED(status) && (k->asked || k->worker_over)) {
            k->tree_ended++;
        }
    }
}

void keep_on_signals(struct keeper *k)
{
    struct signalfd_siginfo si;

    while (read(k->signal_fd, &si, sizeof(si)) == sizeof(si)) {
        char text[64];

        if (si.ssi_signo == SIGCHLD)
            continue;
        snprintf(text, sizeof(text), "its keeper got signal %u from pid %u", si.ssi_signo,
                 si.ssi_pid);
        keep_stop(k, PROC_STOPPED, text, k->spec.term_ms, k->spec.kill_ms);
    }
}

static void kill_round(struct keeper *k, uint64_t now)
{
    struct tree_pick pick = own_tree();

    if (!k->killing) {
        k->killing = true;
        k->phase = KEEP_ENDING;
        k->kill_due_ms = now + k->spec.kill_ms;
        group_kill(&k->group);
    }
    unsigned found = tree_signal(&pick, SIGKILL);

    if (now >= k->kill_due_ms) { /* in the kernel, and not to be had */
        k->tree_left = found;
        k->phase = KEEP_ENDED;
    }
}

/* The daemon of a private cluster does not come back: nobody else would end this tree. */
static void look_for_daemon(struct keeper *k, uint64_t now)
{
    bool heard = k->asked || k->spec.orphan_ms == 0;
    char text[96];

    for (unsigned i = 0; i < KEEP_CLIENTS && !heard; i++)
        heard = k->clients[i] >= 0;
    if (heard)
        k->orphan_due_ms = 0;
    else if (!k->orphan_due_ms)
        k->orphan_due_ms = now + k->spec.orphan_ms;
    if (!k->orphan_due_ms || now < k->orphan_due_ms)
        return;
    snprintf(text, sizeof(text), "its daemon was away for %.1f s (--orphan-timeout)",
             k->spec.orphan_ms / 1000.0);
    k->orphan_due_ms = 0;
    keep_stop(k, PROC_STOPPED, text, k->spec.term_ms, k->spec.kill_ms);
}

void keep_advance(struct keeper *k)
{
    uint64_t now = keep_now_ms();
    bool none_left = reap(k);

    if (none_left && k->exec_fd >= 0) /* its news may still be in the pipe */
        keep_on_exec(k);
    if (none_left) {
        k->phase = KEEP_ENDED;
        return;
    }
    look_for_daemon(k, now);
    if ((k->worker_over && !k->asked) || (k->asked && now >= k->term_due_ms))
        kill_round(k, now);
    if (!k->killing)
        k->oom_base = k->worker_over ? k->oom_base : keep_oom_kills();
}

int keep_wait_ms(const struct keeper *k)
{
    uint64_t now = keep_now_ms();
    unsigned full;

    if (k->killing)
        return KILL_ROUND_MS;
    full = output_hold(k->out_fd, k->spec.log_max_bytes);
    unsigned full_err = output_hold(k->err_fd, k->spec.log_max_bytes);
    int tick = (full_err > full ? full_err : full) >= 50 ? FULL_TICK_MS : TICK_MS;

    if (k->asked && k->term_due_ms < now + (uint64_t)tick)
        return k->term_due_ms > now ? (int)(k->term_due_ms - now) : 0;
    return tick;
}
