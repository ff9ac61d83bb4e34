#include "common/base/base.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static const char *const status_names[FL_STATUS_COUNT] = {
    [FL_OK] = "ok",
    [FL_AGAIN] = "again",
    [FL_INVALID] = "invalid",
    [FL_EXHAUSTED] = "exhausted",
    [FL_UNREACHABLE] = "unreachable",
    [FL_UNSUPPORTED] = "unsupported",
    [FL_CORRUPT] = "corrupt",
    [FL_STALE] = "stale",
    [FL_DENIED] = "denied",
    [FL_EXISTS] = "exists",
    [FL_NOT_FOUND] = "not found",
    [FL_TIMEOUT] = "timeout",
    [FL_CANCELLED] = "cancelled",
    [FL_INTERNAL] = "internal",
};

const char *fl_status_name(enum fl_status st)
{
    return (unsigned)st < FL_STATUS_COUNT ? status_names[st] : "unknown status";
}

enum fl_status fl_status_of_errno(int err_no)
{
    static const struct {
        int err_no;
        enum fl_status st;
    } table[] = {
        { EAGAIN, FL_AGAIN },
        { EINTR, FL_AGAIN },
        { EBUSY, FL_AGAIN },
        { EINPROGRESS, FL_AGAIN },
        { EINVAL, FL_INVALID },
        { ENAMETOOLONG, FL_INVALID },
        { E2BIG, FL_INVALID },
        { ENOTDIR, FL_INVALID },
        { EISDIR, FL_INVALID },
        { ENOEXEC, FL_INVALID },
        { EDOM, FL_INVALID },
        { ERANGE, FL_INVALID },
        { ELOOP, FL_INVALID },
        { ENOMEM, FL_EXHAUSTED },
        { ENOSPC, FL_EXHAUSTED },
        { EDQUOT, FL_EXHAUSTED },
        { EMFILE, FL_EXHAUSTED },
        { ENFILE, FL_EXHAUSTED },
        { ENOBUFS, FL_EXHAUSTED },
        { EFBIG, FL_EXHAUSTED },
        { ECONNREFUSED, FL_UNREACHABLE },
        { ECONNRESET, FL_UNREACHABLE },
        { ECONNABORTED, FL_UNREACHABLE },
        { EPIPE, FL_UNREACHABLE },
        { ENOTCONN, FL_UNREACHABLE },
        { EHOSTUNREACH, FL_UNREACHABLE },
        { EHOSTDOWN, FL_UNREACHABLE },
        { ENETUNREACH, FL_UNREACHABLE },
        { ENETDOWN, FL_UNREACHABLE },
        { ENODEV, FL_UNREACHABLE },
        { ENXIO, FL_UNREACHABLE },
        { EIO, FL_UNREACHABLE },
        { ESTALE, FL_UNREACHABLE },
        { ENOSYS, FL_UNSUPPORTED },
        { EOPNOTSUPP, FL_UNSUPPORTED },
        { EAFNOSUPPORT, FL_UNSUPPORTED },
        { EPROTONOSUPPORT, FL_UNSUPPORTED },
        { EXDEV, FL_UNSUPPORTED },
        { EBADMSG, FL_CORRUPT },
        { EPROTO, FL_CORRUPT },
        { EILSEQ, FL_CORRUPT },
        { EACCES, FL_DENIED },
        { EPERM, FL_DENIED },
        { EROFS, FL_DENIED },
        { EEXIST, FL_EXISTS },
        { EADDRINUSE, FL_EXISTS },
        { ENOTEMPTY, FL_EXISTS },
        { ENOENT, FL_NOT_FOUND },
        { ESRCH, FL_NOT_FOUND },
        { ECHILD, FL_NOT_FOUND },
        { EADDRNOTAVAIL, FL_NOT_FOUND },
        { ETIMEDOUT, FL_TIMEOUT },
        { ECANCELED, FL_CANCELLED },
    };

    for (size_t i = 0; i < FL_LEN(table); i++)
        if (table[i].err_no == err_no)
            return table[i].st;
    return FL_INTERNAL;
}

/* One line whatever came in, and an ending that shows where a longer one was cut: never inside a
 * UTF-8 character, since the text goes into JSON and protobuf strings. */
static void text_finish(char *text, size_t cap, bool cut)
{
    if (cut) {
        size_t n = cap - 4;

        while (n > 0 && ((unsigned char)text[n] & 0xc0) == 0x80)
            n--;
        memcpy(text + n, "...", 4);
    }
    for (char *p = text; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            *p = ' ';
}

static void err_setv(struct fl_err *err, enum fl_status st, enum fl_origin origin, int native,
                     const char *fmt, va_list ap)
{
    if (!err)
        return;
    err->status = st;
    err->origin = origin;
    err->native = native;
    int n = vsnprintf(err->text, sizeof(err->text), fmt, ap);
    text_finish(err->text, sizeof(err->text), n >= (int)sizeof(err->text));
}

void fl_err_set(struct fl_err *err, enum fl_status st, enum fl_origin origin, int native,
                const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    err_setv(err, st, origin, native, fmt, ap);
    va_end(ap);
}

enum fl_status fl_fail(struct fl_err *err, enum fl_status st, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    err_setv(err, st, FL_FROM_SELF, 0, fmt, ap);
    va_end(ap);
    return st;
}

/* ": old text" behind what err holds by now */
static void err_append(struct fl_err *err, const char *tail)
{
    size_t len = strlen(err->text), room = sizeof(err->text) - len;
    int n = snprintf(err->text + len, room, ": %s", tail);

    text_finish(err->text, sizeof(err->text), n >= (int)room);
}

enum fl_status fl_fail_errno(struct fl_err *err, const char *fmt, ...)
{
    int err_no = errno;
    enum fl_status st = fl_status_of_errno(err_no);
    char reason[80];
    va_list ap;

    if (!err)
        return st;
    va_start(ap, fmt);
    err_setv(err, st, FL_FROM_ERRNO, err_no, fmt, ap);
    va_end(ap);
    err_append(err, strerror_r(err_no, reason, sizeof(reason)));
    errno = err_no;
    return st;
}

enum fl_status fl_wrap(struct fl_err *err, enum fl_status st, const char *fmt, ...)
{
    char inner[sizeof(err->text)];
    va_list ap;

    if (!err)
        return st;
    memcpy(inner, err->text, sizeof(inner));
    va_start(ap, fmt);
    err_setv(err, st, err->origin, err->native, fmt, ap);
    va_end(ap);
    if (inner[0])
        err_append(err, inner);
    return st;
}
