#include "tests/t.h"

#include <dirent.h>
#include <ftw.h>
#include <stdlib.h>
#include <unistd.h>

static char tmp_dir[64], skip_why[256];

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st;
    (void)kind;
    (void)at;
    (void)remove(path); /* whatever stays is seen by the next one who looks into /tmp */
    return 0;
}

/* cmocka's "not ok 4 # SKIP name" is a failure to those who read TAP: it leaves as "ok 4 - name # SKIP why". */
static ssize_t tap_write(void *cookie, const char *buf, size_t n)
{
    char name[128], line[512];
    size_t len = n, done = 0;
    int number;

    (void)cookie;
    if (n < sizeof(line)) {
        memcpy(line, buf, n);
        line[n] = 0;
        if (sscanf(line, "not ok %d # SKIP %127[^\n]", &number, name) == 2) {
            len = (size_t)snprintf(line, sizeof(line), "ok %d - %s # SKIP %.256s\n", number, name, skip_why);
            buf = line;
        }
    }
    while (done < len) {
        ssize_t w = write(STDOUT_FILENO, buf + done, len - done);

        if (w < 0)
            return 0; /* an error, to stdio */
        done += (size_t)w;
    }
    return (ssize_t)n;
}

static void speak_tap(void)
{
    FILE *f = fopencookie(NULL, "w", (cookie_io_functions_t){ .write = tap_write });

    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (!f)
        return;
    setvbuf(f, NULL, _IOLBF, BUFSIZ);
    fflush(stdout);
    stdout = f;
}

int t_run_(const char *name, const struct CMUnitTest *tests, size_t n)
{
    speak_tap();
    cmocka_set_test_filter(getenv("T_ONLY")); /* a pattern of names; NULL: all */
    int failed = _cmocka_run_group_tests(name, tests, n, NULL, NULL);

    if (tmp_dir[0])
        (void)nftw(tmp_dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return failed != 0;
}

void t_skip(const char *why, ...)
{
    va_list ap;

    va_start(ap, why);
    vsnprintf(skip_why, sizeof(skip_why), why, ap);
    va_end(ap);
    skip();
    abort(); /* skip() does not return */
}

static void fail_at(const char *file, int line, const char *what, const char *fmt, va_list ap)
{
    char text[1024];

    vsnprintf(text, sizeof(text), fmt, ap);
    print_error("%s:%d: %s%s\n", file, line, what, text);
    _fail(file, line);
}

void t_fail_(const char *file, int line, const char *what, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    fail_at(file, line, what, fmt, ap);
    va_end(ap);
}

void t_int_eq_(const char *file, int line, const char *what, intmax_t got, intmax_t wanted,
               const char *fmt, ...)
{
    char text[256];
    va_list ap;

    if (got == wanted)
        return;
    snprintf(text, sizeof(text), "%s is %jd, not %jd;", what, got, wanted);
    va_start(ap, fmt);
    fail_at(file, line, text, fmt, ap);
    va_end(ap);
}

void t_str_eq_(const char *file, int line, const char *what, const char *got, const char *wanted,
               const char *fmt, ...)
{
    char text[2048];
    va_list ap;

    if (got && wanted && strcmp(got, wanted) == 0)
        return;
    snprintf(text, sizeof(text), "%s is \"%s\", not \"%s\";", what, got ? got : "(null)",
             wanted ? wanted : "(null)");
    va_start(ap, fmt);
    fail_at(file, line, text, fmt, ap);
    va_end(ap);
}

void t_has_(const char *file, int line, const char *text, const char *part)
{
    if (!text || !strstr(text, part))
        t_fail_(file, line, "a part is missing:", " \"%s\" in \"%s\"", part,
                text ? text : "(null)");
}

void t_ok_(const char *file, int line, const char *what, enum fl_status st,
           const struct fl_err *err)
{
    if (st != FL_OK)
        t_fail_(file, line, what, ": %s: %s", fl_status_name(st), err ? err->text : "");
}

void t_refused_(const char *file, int line, const char *what, enum fl_status st,
                enum fl_status wanted, const struct fl_err *err)
{
    if (st != wanted)
        t_fail_(file, line, what, ": %s, not %s: %s", fl_status_name(st), fl_status_name(wanted),
                err->text);
    if (err->status != wanted || !err->text[0] || strchr(err->text, '\n'))
        t_fail_(file, line, what, ": err holds %s: \"%s\"", fl_status_name(err->status), err->text);
}

int t_open_fds(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = -3; /* ".", ".." and d itself */

    if (!d)
        return -1;
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

void t_open_names(char *out, size_t cap)
{
    DIR *d = opendir("/proc/self/fd");
    size_t len = 0;

    out[0] = 0;
    for (struct dirent *e; d && (e = readdir(d)) && len < cap;) {
        char path[300], what[200];
        snprintf(path, sizeof(path), "/proc/self/fd/%s", e->d_name);
        ssize_t n = readlink(path, what, sizeof(what) - 1);

        if (n > 0 && atoi(e->d_name) != dirfd(d))
            len += (size_t)snprintf(out + len, cap - len, "%s%s %.*s", len ? ", " : "", e->d_name, (int)n, what);
    }
    if (d)
        closedir(d);
}

const char *t_tmp(void)
{
    if (!tmp_dir[0]) {
        snprintf(tmp_dir, sizeof(tmp_dir), "/tmp/furlong-t-XXXXXX"); /* short: sockets lie in it */
        if (!mkdtemp(tmp_dir)) {
            perror(tmp_dir);
            exit(99); /* TAP and meson: a hard error */
        }
    }
    return tmp_dir;
}

const char *t_path(const char *name)
{
    static char paths[4][256];
    static unsigned at;
    char *p = paths[at++ % 4];

    snprintf(p, sizeof(paths[0]), "%s/%s", t_tmp(), name);
    return p;
}

uint64_t t_random(uint64_t *seed)
{
    *seed ^= *seed >> 12;
    *seed ^= *seed << 25;
    *seed ^= *seed >> 27;
    return *seed * 2685821657736338717u;
}
