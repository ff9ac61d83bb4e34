/* transport/fmt/delta_pull.c - a host's own full copy, brought from version to version
 *
 * The copy is one file, and its version is in the file's metadata, so the rename that brings the
 * new one is the whole commit: at any moment there is one whole version or none, and whoever was
 * interrupted begins again. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/str.h"
#include "transport/fmt/delta_priv.h"

enum { MAX_CHAIN = 10000, LOCK_WAIT_MS = 60000, LOCK_LOOK_MS = 10 };

struct pulling {
    struct st_reader *local; /* NULL: from a base */
    int64_t local_version;
    struct delta_version **chain; /* oldest first */
    size_t n, cap;
};

static enum fl_status open_local(const char *local_dir, struct st_reader **out, int64_t *version,
                                 struct fl_err *err)
{
    char path[FL_PATH_MAX];

    FL_TRY(fl_path(path, err, "%s/model.safetensors", local_dir));
    FL_TRY(st_read_file(path, out, err));
    if (!st_meta(*out, "version") ||
        fl_parse_i64(st_meta(*out, "version"), 0, 999999, version, NULL) != FL_OK)
        return fl_fail(err, FL_CORRUPT, "%s does not say its version", path);
    return FL_OK;
}

int64_t delta_local_version(const char *local_dir)
{
    FL_AUTO(st_reader) struct st_reader *r = NULL;
    int64_t version;

    return open_local(local_dir, &r, &version, NULL) == FL_OK ? version : DELTA_NO_BASE;
}

static void pulling_fini(struct pulling *p)
{
    st_reader_destroy(p->local);
    for (size_t i = 0; i < p->n; i++)
        delta_version_destroy(p->chain[i]);
    free(p->chain);
}

static enum fl_status chain_add(struct pulling *p, struct delta_version *v_take, struct fl_err *err)
{
    size_t cap = p->cap ? p->cap * 2 : 16;
    void *grown =
        p->n < p->cap ? p->chain : realloc(p->chain, cap * sizeof(struct delta_version *));

    if (!grown || p->n >= MAX_CHAIN) {
        delta_version_destroy(v_take);
        return fl_fail(err, FL_EXHAUSTED, "no room for a chain of %zu versions", p->n);
    }
    p->cap = p->n < p->cap ? p->cap : cap;
    p->chain = grown;
    p->chain[p->n++] = v_take;
    return FL_OK;
}

/* From the wanted version back to the local one or to a base; then turned round. A base on the way
 * makes the local copy superfluous. */
static enum fl_status find_chain(struct pulling *p, const char *dir, int64_t version,
                                 struct fl_err *err)
{
    for (int64_t at = version; at != DELTA_NO_BASE && !(p->local && at == p->local_version);) {
        struct delta_version *v;

        FL_TRY(delta_open(dir, at, &v, err));
        at = delta_base_of(v);
        FL_TRY(chain_add(p, v, err));
    }
    for (size_t i = 0; i < p->n / 2; i++) {
        struct delta_version *v = p->chain[i];

        p->chain[i] = p->chain[p->n - 1 - i];
        p->chain[p->n - 1 - i] = v;
    }
    if (p->n && delta_base_of(p->chain[0]) == DELTA_NO_BASE) {
        st_reader_destroy(p->local);
        p->local = NULL;
    }
    return FL_OK;
}

static const struct st_reader *names_of(const struct pulling *p)
{
    return p->local ? p->local : delta_files(p->chain[0]);
}

static enum fl_status check_names(const struct pulling *p, const struct st_reader *all,
                                  struct fl_err *err)
{
    for (size_t v = 0; v < p->n; v++) {
        const struct st_reader *r = delta_files(p->chain[v]);

        for (size_t i = 0; i < st_count(r); i++)
            if (!st_find(all, st_at(r, i)->name))
                return fl_fail(err, FL_CORRUPT, "tensor %.80s is changed and was never there",
                               st_at(r, i)->name);
    }
    return FL_OK;
}

/* One tensor through all versions, in one buffer. */
static enum fl_status carry(const struct pulling *p, const struct st_tensor *t,
                            const struct st_entry *e, void *buf, struct fl_err *err)
{
    const void *was = p->local ? t->data : NULL;

    for (size_t v = 0; v < p->n; v++) {
        FL_TRY(delta_apply(p->chain[v], e, was, buf, err));
        was = buf;
    }
    return FL_OK;
}

static enum fl_status write_copy(const struct pulling *p, const char *path, int64_t version,
                                 struct fl_err *err)
{
    const struct st_reader *all = names_of(p);
    size_t n = st_count(all), most = 1;
    struct st_entry *e = calloc(n + 1, sizeof(*e));
    FL_AUTO(st_writer) struct st_writer *w = NULL;
    char number[24];
    struct st_meta meta = { "version", number };
    enum fl_status st =
        e ? check_names(p, all, err) : fl_fail(err, FL_EXHAUSTED, "no memory for %zu tensors", n);

    snprintf(number, sizeof(number), "%" PRId64, version);
    for (size_t i = 0; i < n && st == FL_OK; i++) {
        const struct st_tensor *t = st_at(all, i);

        if (!t->known)
            st = fl_fail(err, FL_UNSUPPORTED, "tensor %.80s has dtype %s", t->name, t->dtype_name);
        e[i] = (struct st_entry){ .name = t->name, .dtype = t->dtype, .ndim = t->ndim };
        memcpy(e[i].shape, t->shape, sizeof(e[i].shape));
        most = t->bytes > most ? t->bytes : most;
    }
    void *buf = malloc(most);

    if (st == FL_OK && !buf)
        st = fl_fail(err, FL_EXHAUSTED, "no memory for a tensor of %zu bytes", most);
    if (st == FL_OK)
        st = st_writer_create(path, e, n, &meta, 1, &w, err);
    for (size_t i = 0; i < n && st == FL_OK; i++) {
        const struct st_tensor *t = st_at(all, i);

        st = t->bytes ? carry(p, t, &e[i], buf, err) : FL_OK;
        if (st == FL_OK && t->bytes)
            st = st_write_part(w, i, buf, t->bytes, err);
    }
    if (st == FL_OK)
        st = st_writer_finish(w, err);
    free(buf);
    free(e);
    return st;
}

static enum fl_status pull_locked(const char *dir, const char *local_dir, int64_t version,
                                  struct fl_err *err)
{
    struct pulling p = { .local_version = DELTA_NO_BASE };
    struct fl_err why;
    char path[FL_PATH_MAX];

    if (open_local(local_dir, &p.local, &p.local_version, &why) != FL_OK) {
        st_reader_destroy(p.local); /* damaged, or not there: from a base then */
        p = (struct pulling){ .local_version = DELTA_NO_BASE };
    }
    enum fl_status st = fl_path(path, err, "%s/model.safetensors", local_dir);

    if (st == FL_OK && p.local_version > version)
        st = fl_fail(err, FL_STALE, "%s has version %lld, asked is %lld", local_dir,
                     (long long)p.local_version, (long long)version);
    if (st == FL_OK && p.local_version != version) {
        st = find_chain(&p, dir, version, err);
        if (st == FL_OK)
            st = write_copy(&p, path, version, err);
    }
    pulling_fini(&p);
    return st;
}

/* Engines of one host share the copy; the first does the work. A holder that dies lets go. */
static enum fl_status lock_copy(const char *local_dir, int *out, struct fl_err *err)
{
    const struct timespec look = { .tv_nsec = LOCK_LOOK_MS * 1000000l };
    char path[FL_PATH_MAX];

    FL_TRY(fl_path(path, err, "%s/.lock", local_dir));
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);

    if (fd < 0)
        return fl_fail_errno(err, "open %s", path);
    for (unsigned ms = 0; flock(fd, LOCK_EX | LOCK_NB) < 0; ms += LOCK_LOOK_MS) {
        if (errno != EWOULDBLOCK && errno != EINTR) {
            enum fl_status st = fl_fail_errno(err, "lock %s", path);

            close(fd);
            return st;
        }
        if (ms >= LOCK_WAIT_MS) {
            close(fd);
            return fl_fail(err, FL_TIMEOUT, "another process has held %s for 60 s", path);
        }
        nanosleep(&look, NULL);
    }
    *out = fd;
    return FL_OK;
}

enum fl_status delta_pull(const char *dir, const char *local_dir, int64_t version,
                          struct fl_err *err)
{
    int fd;

    if (version < 0)
        return fl_fail(err, FL_INVALID, "version %lld cannot be pulled", (long long)version);
    if (mkdir(local_dir, 0777) < 0 && errno != EEXIST)
        return fl_fail_errno(err, "make folder %s", local_dir);
    FL_TRY(lock_copy(local_dir, &fd, err));
    enum fl_status st = pull_locked(dir, local_dir, version, err);

    close(fd); /* lets go of the lock */
    return st;
}
