#include "worker/keep/keeper.h"
#include "worker/keep/output.h"
#include "common/base/fault.h"
#include "common/base/file.h"
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

static void __attribute__((format(printf, 2, 3)))
add(char why[FORM_WHY_MAX + 1], const char *fmt, ...)
{
    size_t n = strlen(why);
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(why + n, FORM_WHY_MAX + 1 - n, fmt, ap);
    va_end(ap);
}

static enum proc_cause cause_of(const struct keeper *k)
{
    if (k->exec_news.stage)
        return PROC_EXEC_FAILED;
    if (k->asked)
        return k->asked_cause;
    if (!WIFSIGNALED(k->status))
        return PROC_EXITED;
    if (WTERMSIG(k->status) == SIGKILL && group_oom_kills(&k->group))
        return PROC_CGROUP_OOM;
    if (WTERMSIG(k->status) == SIGKILL && keep_oom_kills() > k->oom_base)
        return PROC_KERNEL_OOM;
    return PROC_SIGNALLED;
}

static void say_exec(const struct keeper *k, char why[FORM_WHY_MAX + 1])
{
    static const char *const stages[] = { "", "enter the working folder", "set up the outputs of",
                                          "execute" };
    int s = k->exec_news.stage;
    const char *what = s == 1 ? k->spec.cwd : k->spec.argv[0];

    add(why, "cannot %s %s: %s (errno %d)", stages[s > 0 && s < 4 ? s : 3], what,
        strerror(k->exec_news.error), k->exec_news.error);
}

static void say_why(const struct keeper *k, enum proc_cause cause, char why[FORM_WHY_MAX + 1])
{
    double s = (double)k->lived_ms / 1000;
    bool killed = WIFSIGNALED(k->status);

    if (cause == PROC_EXEC_FAILED) {
        say_exec(k, why);
        return;
    }
    if (k->asked)
        add(why, "%s after %.1f s", k->asked_text[0] ? k->asked_text : "stopped", s);
    else if (!killed)
        add(why, "ended with exit code %d after %.1f s", WEXITSTATUS(k->status), s);
    else
        add(why, "killed by signal %d (%s) after %.1f s", WTERMSIG(k->status),
            sigabbrev_np(WTERMSIG(k->status)) ? sigabbrev_np(WTERMSIG(k->status)) : "?", s);
    if (cause == PROC_CGROUP_OOM)
        add(why, " by its memory limit of %llu MiB",
            (unsigned long long)(k->spec.memory_max_bytes >> 20));
    if (cause == PROC_KERNEL_OOM)
        add(why, " while the kernel was out of memory");
    if (k->asked && killed && WTERMSIG(k->status) == SIGKILL)
        add(why, ", killed %llu ms after it was asked to go",
            (unsigned long long)(k->lived_ms + k->born_ms - k->asked_ms));
    if (k->tree_ended)
        add(why, "; %u other processes of it were ended", k->tree_ended);
    if (k->tree_left)
        add(why, "; %u of its processes could not be ended", k->tree_left);
}

/* 127 is the loader's word, and a shell's for a program that it did not find. */
static void say_loader(const char *last, size_t n, char why[FORM_WHY_MAX + 1])
{
    static const char said[] = "error while loading shared libraries: ";
    const char *at = memmem(last, n, said, sizeof(said) - 1);

    if (!at)
        return;
    at += sizeof(said) - 1;
    n -= (size_t)(at - last);
    const char *end = memchr(at, '\n', n);

    add(why, ": the loader has no %.*s", (int)(end ? (size_t)(end - at) : n), at);
}

static bool store(const char *dir, struct form *f, char why[256])
{
    char path[512];
    struct fl_err err = { 0 };
    bool ok = form_end(f) && !FL_FAULT("keep.record");

    snprintf(path, sizeof(path), "%s/exit", dir);
    if (ok)
        ok = fl_file_write(path, 0600, f->data, f->len, &err) == FL_OK;
    if (!ok)
        snprintf(why, 256, "%s", err.text[0] ? err.text : "no exit record could be made");
    form_fini(f);
    return ok;
}

bool keep_record(struct keeper *k, char failed[256])
{
    char why[FORM_WHY_MAX + 1] = "", last[FORM_LAST_MAX];
    enum proc_cause cause = cause_of(k);
    struct form f = { 0 };

    say_why(k, cause, why);
    form_begin(&f, FORM_EXIT);
    form_put_u64(&f, FORM_CAUSE, cause);
    if (!k->exec_news.stage && WIFEXITED(k->status))
        form_put_u64(&f, FORM_CODE, (uint64_t)WEXITSTATUS(k->status));
    if (WIFSIGNALED(k->status))
        form_put_u64(&f, FORM_SIGNAL, (uint64_t)WTERMSIG(k->status));
    form_put_u64(&f, FORM_PID, (uint64_t)k->worker);
    form_put_u64(&f, FORM_LIVED_MS, k->lived_ms);
    form_put_u64(&f, FORM_PEAK, k->peak_bytes);
    form_put_u64(&f, FORM_TREE_ENDED, k->tree_ended);
    form_put_u64(&f, FORM_TREE_LEFT, k->tree_left);
    size_t n = output_tail(k->err_fd, last, sizeof(last));

    if (!k->asked && WIFEXITED(k->status) && WEXITSTATUS(k->status) == 127)
        say_loader(last, n, why);
    form_put_text(&f, FORM_WHY, why);
    form_put(&f, FORM_LAST, last, n);
    return store(k->spec.dir, &f, failed);
}

void keep_record_failed(const char *dir, const char *why)
{
    char failed[256];
    struct form f = { 0 };

    form_begin(&f, FORM_EXIT);
    form_put_u64(&f, FORM_CAUSE, PROC_EXEC_FAILED);
    form_put_text(&f, FORM_WHY, why);
    if (!store(dir, &f, failed))
        fprintf(stderr, "furlong-keep: %s\n", failed);
}
