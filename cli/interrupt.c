#include "cli/interrupt.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

static struct {
    sigset_t before;
    int fd, taken;
    bool held;
} now = { .fd = -1 };

void cli_signals_hold(void)
{
    sigset_t set;

    if (now.held)
        return;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    now.fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    now.held = now.fd >= 0; /* else they act at once, as ever */
    if (now.held)
        sigprocmask(SIG_BLOCK, &set, &now.before);
}

void cli_signals_let(void)
{
    if (!now.held)
        return;
    close(now.fd);
    now.fd = -1;
    now.held = false;
    sigprocmask(SIG_SETMASK, &now.before, NULL);
}

int cli_signals_fd(void)
{
    return now.fd;
}

enum fl_status cli_interrupted(struct fl_err *err, const char *fmt, ...)
{
    struct signalfd_siginfo info;
    char what[160];
    va_list ap;

    if (!now.held || read(now.fd, &info, sizeof(info)) != (ssize_t)sizeof(info))
        return FL_OK;
    now.taken = (int)info.ssi_signo;
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    return fl_fail(err, FL_CANCELLED, "SIG%s came while waiting for %s", sigabbrev_np(now.taken), what);
}

int cli_interrupt_code(void)
{
    return now.taken ? 128 + now.taken : 0;
}
