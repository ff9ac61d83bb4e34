#include "head/packages.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "head/state.h"

struct package {
    UT_hash_handle hh;
    char name[PACKAGE_NAME_MAX + 1];
    uint64_t bytes, wanted_ns; /* when it was last asked for */
};
struct packages {
    struct head *head;
    char dir[FL_PATH_MAX];
    uint64_t pin_ns, bytes;
    struct package *by_name;
    struct package_put *puts; /* being written */
};

enum fl_status package_name_check(const char *name, struct fl_err *err)
{
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.+";
    size_t n = strlen(name);

    if (n < 5 || n > PACKAGE_NAME_MAX || name[0] == '.' || strspn(name, letters) != n)
        return fl_fail(err, FL_INVALID,
                       "package name \"%.80s\" must have 5 to %d letters, digits, '_', '-', '+' or "
                       "'.', and not begin with '.'",
                       name, PACKAGE_NAME_MAX);
    if (strcmp(name + n - 4, ".zip") != 0 && strcmp(name + n - 4, ".whl") != 0)
        return fl_fail(err, FL_INVALID, "package name \"%.80s\" must end in .zip or .whl", name);
    return FL_OK;
}

static struct package *find(struct packages *p, const char *name)
{
    struct package *k;

    HASH_FIND_STR(p->by_name, name, k);
    return k;
}

static void add(struct packages *p, const char *name, uint64_t bytes)
{
    struct package *k = find(p, name);

    if (!k) {
        k = must(calloc(1, sizeof(*k)));
        (void)FL_COPY(k->name, name);
        HASH_ADD_STR(p->by_name, name, k);
        must(k->hh.tbl);
    }
    p->bytes += bytes - k->bytes;
    k->bytes = bytes;
    k->wanted_ns = fl_loop_now_ns(p->head->loop);
}

/* ---- what may go ---- */

static bool in_use(const struct packages *p, const struct package *k)
{
    struct job *j, *tmp;

    if (fl_loop_now_ns(p->head->loop) < k->wanted_ns + p->pin_ns)
        return true;
    HASH_ITER (hh, p->head->jobs, j, tmp) {
        if (job_over(j))
            continue;
        if (j->rec->working_dir && strcmp(j->rec->working_dir, k->name) == 0)
            return true;
        for (size_t i = 0; i < j->rec->n_py_modules; i++)
            if (strcmp(j->rec->py_modules[i], k->name) == 0)
                return true;
    }
    return false;
}

static void drop(struct packages *p, struct package *k)
{
    char path[FL_PATH_MAX];

    if (fl_path(path, NULL, "%s/%s", p->dir, k->name) == FL_OK)
        (void)unlink(path); /* found again, and dropped again, at the next start */
    fl_info("package dropped name=%s bytes=%llu", k->name, (unsigned long long)k->bytes);
    p->bytes -= k->bytes;
    HASH_DEL(p->by_name, k);
    free(k);
}

/* The longest unasked first. */
static enum fl_status make_room(struct packages *p, uint64_t bytes, struct fl_err *err)
{
    while (p->bytes + bytes > PACKAGES_MAX_BYTES || HASH_COUNT(p->by_name) >= PACKAGES_MAX) {
        struct package *k, *tmp, *oldest = NULL;

        HASH_ITER (hh, p->by_name, k, tmp)
            if ((!oldest || k->wanted_ns < oldest->wanted_ns) && !in_use(p, k))
                oldest = k;
        if (!oldest)
            return fl_fail(err, FL_EXHAUSTED,
                           "no room for %llu bytes: %u packages in use hold %llu of %llu bytes; "
                           "submit again when a "
                           "job that uses one has ended",
                           (unsigned long long)bytes, HASH_COUNT(p->by_name),
                           (unsigned long long)p->bytes, PACKAGES_MAX_BYTES);
        drop(p, oldest);
    }
    return FL_OK;
}

/* ---- putting ---- */

static void write_it(struct fl_work *w)
{
    struct package_put *put = container_of(w, struct package_put, work);

    put->got = FL_FAULT("package.write")
                   ? fl_fail(&put->err, FL_EXHAUSTED, "package %s: no room", put->name)
                   : fl_file_write(put->path, 0600, put->data, put->len, &put->err);
}

static void written(struct fl_work *w, enum fl_status st)
{
    struct package_put *put = container_of(w, struct package_put, work);

    if (st != FL_OK)
        fl_fail(&put->err, st, "package %s was not written", put->name);
    else if ((st = put->got) == FL_OK && put->of) {
        add(put->of, put->name, put->len);
        fl_info("package stored name=%s bytes=%zu", put->name, put->len);
    }
    if (put->of)
        DL_DELETE(put->of->puts, put);
    free(put->data);
    put->data = NULL;
    put->done(put, st, &put->err);
}

enum fl_status packages_put(struct packages *p, struct package_put *put, struct fl_err *err)
{
    enum fl_status st = make_room(p, put->len, err);

    if (st == FL_OK)
        st = fl_path(put->path, err, "%s/%s", p->dir, put->name);
    if (st != FL_OK) {
        free(put->data);
        return st;
    }
    put->of = p;
    DL_APPEND(p->puts, put);
    put->work = (struct fl_work){ .work = write_it, .done = written };
    fl_work_start(p->head->loop, &put->work);
    return FL_OK;
}

bool packages_has(struct packages *p, const char *name)
{
    struct package *k = find(p, name);

    if (k)
        k->wanted_ns = fl_loop_now_ns(p->head->loop);
    return k != NULL;
}

/* ---- giving to daemons: a piece an ask, each daemon one ask at a time ---- */

static enum fl_status read_piece(struct packages *p, const Fl__PackageRead *m, uint8_t *buf,
                                 size_t *len, uint64_t *total, struct fl_err *err)
{
    struct package *k = find(p, m->name);
    char path[FL_PATH_MAX];

    if (!k)
        return fl_fail(err, FL_NOT_FOUND, "package %.130s is not on the head; upload it again",
                       m->name);
    if (m->offset > k->bytes)
        return fl_fail(err, FL_INVALID, "package %s has %llu bytes, asked from %llu on", k->name,
                       (unsigned long long)k->bytes, (unsigned long long)m->offset);
    k->wanted_ns = fl_loop_now_ns(p->head->loop);
    FL_TRY(fl_path(path, err, "%s/%s", p->dir, k->name));
    int fd = FL_FAULT("package.read") ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : pread(fd, buf, PACKAGE_PIECE_BYTES, (off_t)m->offset);
    enum fl_status st = n < 0 ? fl_fail_errno(err, "read %s", path) : FL_OK;

    if (fd >= 0)
        close(fd);
    FL_TRY(st);
    *len = (size_t)n;
    *total = k->bytes;
    return FL_OK;
}

void packages_serve(struct packages *p, struct call_req *req, const Fl__PackageRead *m)
{
    Fl__PackagePiece piece = FL__PACKAGE_PIECE__INIT;
    uint8_t *buf = must(malloc(PACKAGE_PIECE_BYTES));
    size_t len = 0;
    struct fl_err err;

    if (read_piece(p, m, buf, &len, &piece.total, &err) == FL_OK) {
        struct fl_str body = FL_STR_HEAP(64);

        call_reply(req, pack_msg(&piece, &body), (struct fl_bytes){ buf, len });
        fl_str_fini(&body);
    } else {
        call_fail(req, &err);
    }
    free(buf);
}

/* ---- life ---- */

enum fl_status packages_create(struct head *h, struct packages **out, struct fl_err *err)
{
    struct packages *p = calloc(1, sizeof(*p));
    const char *pin = getenv("RAY_RUNTIME_ENV_TEMPORARY_REFERENCE_EXPIRATION_S");
    char path[FL_PATH_MAX];
    int64_t pin_s = PACKAGE_PIN_S;
    struct dirent *e;
    struct stat sb;
    DIR *d = NULL;

    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory for packages");
    p->head = h;
    if (pin && fl_parse_i64(pin, 0, 1 << 30, &pin_s, err) != FL_OK)
        fl_warn("RAY_RUNTIME_ENV_TEMPORARY_REFERENCE_EXPIRATION_S is not taken why=\"%s\"",
                err->text);
    p->pin_ns = (uint64_t)pin_s * 1000000000ull;
    enum fl_status st = fl_path(p->dir, err, "%s/packages", h->state_dir);
    if (st == FL_OK)
        st = fl_mkdirs(p->dir, err);
    if (st == FL_OK && !(d = opendir(p->dir)))
        st = fl_fail_errno(err, "open %s", p->dir);
    while (d && (e = readdir(d))) {
        if (fl_path(path, NULL, "%s/%s", p->dir, e->d_name) != FL_OK || lstat(path, &sb) < 0 ||
            !S_ISREG(sb.st_mode))
            continue;
        if (package_name_check(e->d_name, NULL) == FL_OK)
            add(p, e->d_name, (uint64_t)sb.st_size);
        else
            (void)unlink(path); /* of a write that a kill cut short */
    }
    if (d)
        closedir(d);
    if (st != FL_OK) {
        packages_destroy(p);
        return st;
    }
    *out = p;
    return FL_OK;
}

void packages_destroy(struct packages *p)
{
    struct package *k, *tmp;

    if (!p)
        return;
    while (p->puts) { /* they are written all the same, and counted by the next head */
        struct package_put *put = p->puts;

        DL_DELETE(p->puts, put);
        put->of = NULL;
    }
    HASH_ITER (hh, p->by_name, k, tmp) {
        HASH_DEL(p->by_name, k);
        free(k);
    }
    free(p);
}
