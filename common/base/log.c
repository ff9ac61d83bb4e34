#include "common/base/log.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LINE_MAX_BYTES = 2048 };
enum { LEVEL_UNREAD = -1 };

static const char *const level_names[] = { "error", "warn", "info", "debug" };
static atomic_int chosen = LEVEL_UNREAD;

static int level_of(const char *name)
{
    for (int i = 0; i < (int)FL_LEN(level_names); i++)
        if (name && strcmp(name, level_names[i]) == 0)
            return i;
    return -1;
}

enum fl_status fl_log_level_set(const char *name, struct fl_err *err)
{
    int level = level_of(name);

    if (level < 0)
        return fl_fail(err, FL_INVALID, "log level \"%s\" is not error, warn, info or debug", name);
    atomic_store(&chosen, level);
    return FL_OK;
}

bool fl_log_on(enum fl_log_level level)
{
    int now = atomic_load_explicit(&chosen, memory_order_relaxed);

    if (now == LEVEL_UNREAD) {
        now = level_of(getenv("FURLONG_LOG"));
        now = now < 0 ? FL_LOG_INFO : now;
        atomic_store(&chosen, now);
    }
    return (int)level <= now;
}

static size_t line_start(char *line, size_t cap, enum fl_log_level level)
{
    struct timespec ts;
    struct tm tm;

    clock_gettime(CLOCK_REALTIME, &ts);
    gmtime_r(&ts.tv_sec, &tm);
    size_t n = strftime(line, cap, "%Y-%m-%dT%H:%M:%S", &tm);
    return n + (size_t)snprintf(line + n, cap - n, ".%03ldZ %s ", ts.tv_nsec / 1000000,
                                level_names[level]);
}

void fl_log(enum fl_log_level level, const char *fmt, ...)
{
    char line[LINE_MAX_BYTES], said[LINE_MAX_BYTES];
    int saved = errno;
    va_list ap;

    if (!fl_log_on(level))
        return;
    size_t n = line_start(line, sizeof(line), level);
    va_start(ap, fmt);
    int wanted = vsnprintf(said, sizeof(said), fmt, ap);
    va_end(ap);

    /* \xNN is four bytes, "..." and the newline are four more */
    const char *p = said;
    for (; *p && n + 8 < sizeof(line); p++) {
        unsigned char c = (unsigned char)*p;

        if (c < 0x20 || c == 0x7f)
            n += (size_t)sprintf(line + n, "\\x%02x", c);
        else
            line[n++] = (char)c;
    }
    if (*p || wanted >= (int)sizeof(said)) {
        memcpy(line + n, "...", 3);
        n += 3;
    }
    line[n++] = '\n';
    (void)!write(STDERR_FILENO, line, n); /* where else could it be told? */
    errno = saved;
}
