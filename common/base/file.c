#include "common/base/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/base/fault.h"

enum fl_status fl_path(char out[FL_PATH_MAX], struct fl_err *err, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    int n = vsnprintf(out, FL_PATH_MAX, fmt, ap);
    va_end(ap);
    if (n >= FL_PATH_MAX)
        return fl_fail(err, FL_INVALID, "path of %d bytes is too long (%d at most): %.60s...", n,
                       FL_PATH_MAX - 1, out);
    return FL_OK;
}

/* ---- whole files ---- */

static enum fl_status read_all(int fd, const char *path, size_t max_bytes, char **out, size_t *len,
                               struct fl_err *err)
{
    struct stat st;
    size_t cap, n = 0;
    ssize_t got = 1;

    if (fstat(fd, &st) < 0)
        return fl_fail_errno(err, "look at %s", path);
    if (S_ISDIR(st.st_mode))
        return fl_fail(err, FL_INVALID, "read %s: is a folder", path);
    /* Files of /proc say 0; others may grow. One byte more than allowed shows what is too long. */
    cap = st.st_size > 0 && (size_t)st.st_size < max_bytes ? (size_t)st.st_size + 1 : 4096;
    char *data = malloc(cap + 1);
    while (data && got > 0) {
        if (n == cap) {
            char *grown = n > max_bytes ? NULL : realloc(data, 2 * cap + 1);

            if (!grown)
                break;
            data = grown;
            cap *= 2;
        }
        got = FL_FAULT("base.read") ? -1 : read(fd, data + n, cap - n);
        if (got < 0 && errno == EINTR)
            got = 1;
        else if (got > 0)
            n += (size_t)got;
        if (n > max_bytes)
            break;
    }
    if (!data || (got > 0 && n <= max_bytes)) {
        free(data);
        return fl_fail(err, FL_EXHAUSTED, "read %s: no memory for %zu bytes", path, cap);
    }
    if (got < 0) {
        enum fl_status bad = fl_fail_errno(err, "read %s", path);

        free(data);
        return bad;
    }
    if (n > max_bytes) {
        free(data);
        return fl_fail(err, FL_EXHAUSTED, "read %s: longer than %zu bytes", path, max_bytes);
    }
    data[n] = '\0';
    *out = data;
    if (len)
        *len = n;
    return FL_OK;
}

enum fl_status fl_file_read(const char *path, size_t max_bytes, char **out, size_t *len,
                            struct fl_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return fl_fail_errno(err, "open %s", path);
    enum fl_status st = read_all(fd, path, max_bytes, out, len, err);
    close(fd);
    return st;
}

static bool write_all(int fd, const void *data, size_t len)
{
    const char *at = data;

    while (len) {
        ssize_t n = FL_FAULT("base.write") ? -1 : write(fd, at, len);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return false;
        at += n;
        len -= (size_t)n;
    }
    return true;
}

static enum fl_status sync_parent(const char *path, struct fl_err *err)
{
    const char *slash = strrchr(path, '/');
    char dir[FL_PATH_MAX];

    FL_TRY(slash ? fl_path(dir, err, "%.*s", slash == path ? 1 : (int)(slash - path), path)
                 : fl_path(dir, err, "."));
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return fl_fail_errno(err, "open folder %s", dir);
    enum fl_status st =
        fsync(fd) < 0 && errno != EINVAL ? fl_fail_errno(err, "sync folder %s", dir) : FL_OK;
    close(fd);
    return st;
}

enum fl_status fl_file_write(const char *path, unsigned mode, const void *data, size_t len,
                             struct fl_err *err)
{
    char tmp[FL_PATH_MAX];
    enum fl_status st = FL_OK;

    FL_TRY(fl_path(tmp, err, "%s.new-XXXXXX", path));
    int fd = mkostemp(tmp, O_CLOEXEC);
    if (fd < 0)
        return fl_fail_errno(err, "make %s", tmp);
    if (!write_all(fd, data, len) || fchmod(fd, (mode_t)mode) < 0 || FL_FAULT("base.fsync") ||
        fsync(fd) < 0)
        st = fl_fail_errno(err, "write %s", path);
    close(fd);
    if (st == FL_OK && (FL_FAULT("base.rename") || rename(tmp, path) < 0))
        st = fl_fail_errno(err, "rename %s to %s", tmp, path);
    if (st != FL_OK) {
        (void)unlink(tmp); /* the old file, if any, stays as it was */
        return st;
    }
    return sync_parent(path, err);
}

/* ---- folders ---- */

enum fl_status fl_mkdirs(const char *path, struct fl_err *err)
{
    char at[FL_PATH_MAX];
    struct stat st;

    FL_TRY(fl_path(at, err, "%s", path));
    for (char *p = at + 1;; p++) {
        if (*p != '/' && *p != '\0')
            continue;
        char was = *p;

        *p = '\0';
        if (mkdir(at, 0700) < 0 && errno != EEXIST)
            return fl_fail_errno(err, "make folder %s", at);
        *p = was;
        if (!was)
            break;
    }
    if (stat(path, &st) < 0)
        return fl_fail_errno(err, "look at %s", path);
    if (!S_ISDIR(st.st_mode))
        return fl_fail(err, FL_EXISTS, "%s is in the way: not a folder", path);
    return FL_OK;
}

enum { TREE_DEPTH = 64 };

static enum fl_status dir_empty(int dir_fd, unsigned depth, struct fl_err *err)
{
    struct dirent *e;
    enum fl_status st = FL_OK;
    DIR *d = fdopendir(dir_fd);

    if (!d) {
        close(dir_fd);
        return fl_fail_errno(err, "read folder");
    }
    while (st == FL_OK && (e = readdir(d))) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        if (unlinkat(dirfd(d), e->d_name, 0) == 0 || errno == ENOENT)
            continue;
        int fd = errno != EISDIR && errno != EPERM
                     ? -1
                     : openat(dirfd(d), e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0)
            st = fl_fail_errno(err, "remove %s", e->d_name);
        else if (depth >= TREE_DEPTH)
            close(fd), st = fl_fail(err, FL_INVALID, "remove %s: more than %d folders deep",
                                    e->d_name, TREE_DEPTH);
        else
            st = dir_empty(fd, depth + 1, err);
        if (st == FL_OK && unlinkat(dirfd(d), e->d_name, AT_REMOVEDIR) < 0 && errno != ENOENT)
            st = fl_fail_errno(err, "remove folder %s", e->d_name);
    }
    closedir(d);
    return st;
}

enum fl_status fl_tree_remove(const char *path, struct fl_err *err)
{
    if (unlink(path) == 0 || errno == ENOENT)
        return FL_OK;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return fl_fail_errno(err, "remove %s", path);
    enum fl_status st = dir_empty(fd, 0, err);
    if (st != FL_OK)
        return fl_wrap(err, st, "in %s", path);
    if (rmdir(path) < 0 && errno != ENOENT)
        return fl_fail_errno(err, "remove folder %s", path);
    return FL_OK;
}

/* ---- where things live ---- */

/* A folder under /tmp could have been made by somebody else before us. */
static enum fl_status own_folder(const char *path, struct fl_err *err)
{
    struct stat st;

    FL_TRY(fl_mkdirs(path, err));
    if (lstat(path, &st) < 0)
        return fl_fail_errno(err, "look at %s", path);
    if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid())
        return fl_fail(err, FL_DENIED,
                       "%s is not a folder of user %u (owner %u): remove it, or name another place by "
                       "FURLONG_RUNTIME_DIR or FURLONG_STATE_DIR",
                       path, (unsigned)geteuid(), (unsigned)st.st_uid);
    if ((st.st_mode & 077) && chmod(path, 0700) < 0)
        return fl_fail_errno(err, "close %s to others", path);
    return FL_OK;
}

static const char *env_path(const char *name)
{
    const char *v = getenv(name);

    return v && v[0] == '/' ? v : NULL; /* XDG: relative ones are ignored */
}

enum fl_status fl_runtime_dir(const char *dir, char out[FL_PATH_MAX], struct fl_err *err)
{
    const char *named = dir ? dir : getenv("FURLONG_RUNTIME_DIR");
    const char *xdg = env_path("XDG_RUNTIME_DIR");
    char path[FL_PATH_MAX];

    if (named && *named)
        FL_TRY(fl_path(path, err, "%s", named));
    else if (xdg && strlen(xdg) + strlen("/furlong") <= FL_RUNTIME_MAX && access(xdg, W_OK) == 0)
        FL_TRY(fl_path(path, err, "%s/furlong", xdg));
    else
        FL_TRY(fl_path(path, err, "/tmp/furlong-%u", (unsigned)geteuid()));
    if (path[0] != '/')
        return fl_fail(err, FL_INVALID, "runtime folder %s: give an absolute path", path);
    if (strlen(path) > FL_RUNTIME_MAX)
        return fl_fail(err, FL_INVALID,
                       "runtime folder %s has %zu bytes, %d at most: sockets lie below it; set "
                       "FURLONG_RUNTIME_DIR to a shorter one",
                       path, strlen(path), FL_RUNTIME_MAX);
    FL_TRY(own_folder(path, err));
    memcpy(out, path, sizeof(path));
    return FL_OK;
}

enum fl_status fl_state_dir(const char *dir, char out[FL_PATH_MAX], struct fl_err *err)
{
    const char *named = dir ? dir : getenv("FURLONG_STATE_DIR");
    const char *xdg = env_path("XDG_STATE_HOME"), *home = env_path("HOME");
    char path[FL_PATH_MAX];

    if (named && *named)
        FL_TRY(fl_path(path, err, "%s", named));
    else if (xdg)
        FL_TRY(fl_path(path, err, "%s/furlong", xdg));
    else if (home)
        FL_TRY(fl_path(path, err, "%s/.local/state/furlong", home));
    else
        return fl_fail(err, FL_INVALID, "no state folder: set FURLONG_STATE_DIR or HOME");
    FL_TRY(own_folder(path, err));
    memcpy(out, path, sizeof(path));
    return FL_OK;
}

enum fl_status fl_program_path(const char *name, char out[FL_PATH_MAX], struct fl_err *err)
{
    const char *bin = getenv("FURLONG_BIN_DIR");
    char path[FL_PATH_MAX], self[FL_PATH_MAX];

    if (!bin || !*bin) {
        ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

        if (n < 0)
            return fl_fail_errno(err, "find own program");
        self[n] = '\0';
        *strrchr(self, '/') = '\0';
        bin = self;
    }
    FL_TRY(fl_path(path, err, "%s/%s", bin, name));
    if (access(path, X_OK) < 0)
        return fl_fail_errno(err, "program %s (FURLONG_BIN_DIR names its folder)", path);
    memcpy(out, path, sizeof(path));
    return FL_OK;
}

enum fl_status fl_unix_addr(const char *path, struct sockaddr_un *out, struct fl_err *err)
{
    size_t len = strlen(path);

    if (len >= sizeof(out->sun_path))
        return fl_fail(err, FL_INVALID, "socket path of %zu bytes, %zu at most: %s", len,
                       sizeof(out->sun_path) - 1, path);
    *out = (struct sockaddr_un){ .sun_family = AF_UNIX };
    memcpy(out->sun_path, path, len + 1);
    return FL_OK;
}

/* ---- processes ---- */

/* The name in parentheses may hold spaces and parentheses itself. */
enum fl_status fl_pid_stat(int pid, struct fl_pid_stat *out, struct fl_err *err)
{
    char path[64], text[1024];
    unsigned long long start;

    snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
    int why = errno;

    if (fd >= 0)
        close(fd);
    if (n < 0 && (why == ENOENT || why == ESRCH)) /* it may go while it is read */
        return fl_fail(err, FL_NOT_FOUND, "no process %d", pid);
    errno = why;
    if (n < 0)
        return fl_fail_errno(err, "%s", path);
    text[n] = 0;
    const char *from = strchr(text, '('), *to = strrchr(text, ')');

    if (!from || !to || to < from ||
        sscanf(to + 1,
               " %c %d %d %d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
               &out->state, &out->parent, &out->group, &out->session, &start) != 5)
        return fl_fail(err, FL_CORRUPT, "%s: not as expected", path);
    snprintf(out->name, sizeof(out->name), "%.*s", (int)(to - from - 1), from + 1);
    out->start_time = start;
    return FL_OK;
}

enum fl_status fl_pid_start_time(int pid, uint64_t *out, struct fl_err *err)
{
    struct fl_pid_stat s;

    FL_TRY(fl_pid_stat(pid, &s, err));
    *out = s.start_time;
    return FL_OK;
}

bool fl_pid_alive(int pid, uint64_t start_time)
{
    struct fl_pid_stat s;

    return pid > 0 && fl_pid_stat(pid, &s, NULL) == FL_OK && s.start_time == start_time &&
           s.state != 'Z' && s.state != 'X';
}
