/* bench/must.h - a bench ends at the first thing that fails, and says where and why */
#pragma once
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <furlong/types.h>

/* Of a call that writes its reason into err, whichever err is in sight. */
#define must(st) must_be((st), &err, __FILE_NAME__, __LINE__)
static inline void must_be(enum fl_status st, const struct fl_err *err, const char *file, int line)
{
    if (st == FL_OK)
        return;
    fprintf(stderr, "%s:%d: %s\n", file, line, err->text);
    exit(1);
}

static inline _Noreturn void die(const char *what, const struct fl_err *err) /* NULL: errno's */
{
    fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what,
            err ? err->text : strerror(errno));
    exit(1);
}
