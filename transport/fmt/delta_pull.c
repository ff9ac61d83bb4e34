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

enum { LOCK_WAIT_MS = 60000, LOCK_LOOK_MS = 10 };

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

struct copying {
    const char *path;
    int64_t version;
};

static enum fl_status write_copy(struct delta_chain *c, void *arg, struct fl_err *err)
{
    const struct copying *to = arg;
    FL_AUTO(st_writer) struct st_writer *w = NULL;
    struct st_entry *e;
    char number[24];
    struct st_meta meta = { "version", number };
    uint64_t most;
    size_t n;

    FL_TRY(delta_chain_entries(c, &e, &n, &most, err));
    void *buf = malloc(most);
    enum fl_status st =
        buf ? FL_OK
            : fl_fail(err, FL_EXHAUSTED, "no memory for a tensor of %" PRIu64 " bytes", most);

    snprintf(number, sizeof(number), "%" PRId64, to->version);
    if (st == FL_OK)
        st = st_writer_create(to->path, e, n, &meta, 1, &w, err);
    for (size_t i = 0; i < n && st == FL_OK; i++) {
        uint64_t bytes = delta_entry_bytes(&e[i]);

        st = bytes ? delta_chain_carry(c, &e[i], buf, err) : FL_OK;
        if (st == FL_OK && bytes)
            st = st_write_part(w, i, buf, bytes, err);
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
    struct delta_chain c = { .local_version = DELTA_NO_BASE };
    char path[FL_PATH_MAX];
    struct copying to = { path, version };
    enum fl_status st = fl_path(path, err, "%s/model.safetensors", local_dir);

    if (st == FL_OK && open_local(local_dir, &c.local, &c.local_version, NULL) != FL_OK) {
        st_reader_destroy(c.local); /* damaged, or not there: from a base then */
        c = (struct delta_chain){ .local_version = DELTA_NO_BASE };
    }
    if (st == FL_OK && c.local_version > version)
        st = fl_fail(err, FL_STALE, "%s has version %lld, asked is %lld", local_dir,
                     (long long)c.local_version, (long long)version);
    if (st == FL_OK && c.local_version != version)
        return delta_chain_over(&c, dir, version, write_copy, &to, err);
    st_reader_destroy(c.local);
    return st;
}

static enum fl_status lock_try(const char *path, int fd, unsigned wait_ms, struct fl_err *err)
{
    const struct timespec look = { .tv_nsec = LOCK_LOOK_MS * 1000000l };

    for (unsigned ms = 0; flock(fd, LOCK_EX | LOCK_NB) < 0; ms += LOCK_LOOK_MS) {
        if (errno != EWOULDBLOCK && errno != EINTR)
            return fl_fail_errno(err, "lock %s", path);
        if (ms >= wait_ms)
            return fl_fail(err, FL_TIMEOUT, "another process has held %s for %u s", path,
                           wait_ms / 1000);
        nanosleep(&look, NULL);
    }
    return FL_OK;
}

/* Engines of one host share the copy; the first does the work. A holder that dies lets go. What was
 * locked may have been forgotten by delta_forget() meanwhile: then there is another one. */
static enum fl_status lock_copy(const char *local_dir, int *out, struct fl_err *err)
{
    struct stat s = { 0 };
    char path[FL_PATH_MAX];

    FL_TRY(fl_path(path, err, "%s/.lock", local_dir));
    while (s.st_nlink == 0) {
        if (mkdir(local_dir, 0777) < 0 && errno != EEXIST)
            return fl_fail_errno(err, "make folder %s", local_dir);
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);

        if (fd < 0)
            return fl_fail_errno(err, "open %s", path);
        enum fl_status st = lock_try(path, fd, LOCK_WAIT_MS, err);

        if (st == FL_OK && fstat(fd, &s) < 0)
            st = fl_fail_errno(err, "look at %s", path);
        if (st != FL_OK || s.st_nlink == 0)
            close(fd);
        else
            *out = fd;
        FL_TRY(st);
    }
    return FL_OK;
}

enum fl_status delta_pull(const char *dir, const char *local_dir, int64_t version,
                          struct fl_err *err)
{
    int fd;

    if (version < 0)
        return fl_fail(err, FL_INVALID, "version %lld cannot be pulled", (long long)version);
    FL_TRY(lock_copy(local_dir, &fd, err));
    enum fl_status st = pull_locked(dir, local_dir, version, err);

    close(fd); /* lets go of the lock */
    return st;
}

/* Of our own files alone; the lock last: whoever waits for it finds that it is gone. */
static enum fl_status forget_files(const char *local_dir, struct fl_err *err)
{
    static const char *const ours[] = { "model.safetensors", "model.safetensors.tmp", ".lock" };
    char path[FL_PATH_MAX];

    for (size_t i = 0; i < FL_LEN(ours); i++) {
        FL_TRY(fl_path(path, err, "%s/%s", local_dir, ours[i]));
        if ((FL_FAULT("fmt.forget") || unlink(path) < 0) && errno != ENOENT)
            return fl_fail_errno(err, "remove %s", path);
    }
    return FL_OK;
}

enum fl_status delta_forget(const char *local_dir, struct fl_err *err)
{
    enum fl_status st = FL_OK;
    char path[FL_PATH_MAX];

    FL_TRY(fl_path(path, err, "%s/.lock", local_dir));
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);

    if (fd < 0 && errno != ENOENT)
        return fl_fail_errno(err, "open %s", path);
    if (fd >= 0) {
        st = flock(fd, LOCK_EX | LOCK_NB) == 0 ? forget_files(local_dir, err)
             : errno == EWOULDBLOCK            ? fl_fail(err, FL_AGAIN, "%s is held", path)
                                               : fl_fail_errno(err, "lock %s", path);
        close(fd);
    }
    if (st == FL_OK && rmdir(local_dir) < 0 && errno != ENOTEMPTY && errno != ENOENT)
        st = fl_fail_errno(err, "remove folder %s", local_dir);
    return st;
}
