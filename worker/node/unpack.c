#include "worker/node/unpack.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zip.h>

#include "common/base/fault.h"
#include "common/base/str.h"

enum { NAME_BYTES = 1024, PART_BYTES = 255, READ_BYTES = 256 << 10, RATIO_FROM = 64 << 20 };

struct unpack {
    zip_t *zip;
    int dir;
    uint64_t packed, bytes;
    const struct unpack_limits *limits;
    char buf[READ_BYTES];
};

/* ---- names ---- */

static enum fl_status bad_name(const char *name, const char *why, struct fl_err *err)
{
    return fl_fail(err, FL_CORRUPT, "entry \"%.120s\" %s", name, why);
}

static enum fl_status check_name(const char *name, struct fl_err *err)
{
    size_t len = strlen(name);

    if (!len || len >= NAME_BYTES)
        return bad_name(name, "has no name, or one of over 1023 bytes", err);
    if (name[0] == '/' || strchr(name, '\\'))
        return bad_name(name, "is absolute or has a backslash", err);
    for (size_t i = 0; i < len;) {
        size_t n = fl_utf8_len(name + i, len - i);

        if (!n || (unsigned char)name[i] < ' ' || name[i] == 0x7f)
            return bad_name(name, "has a name that is no text", err);
        i += n;
    }
    for (const char *p = name; *p;) {
        size_t n = strcspn(p, "/");

        if (n == 0 || n > PART_BYTES || (n == 1 && p[0] == '.') ||
            (n == 2 && p[0] == '.' && p[1] == '.'))
            return bad_name(name, "leaves the folder, or has an empty or too long part", err);
        p += n;
        p += *p == '/';
    }
    return FL_OK;
}

/* The folders of name, made where they are not; the last part's folder is returned, to be closed.
 */
static enum fl_status enter(struct unpack *u, char *name, int *out, const char **last,
                            struct fl_err *err)
{
    int at = dup(u->dir);
    char *part = name, *slash;

    while (at >= 0 && (slash = strchr(part, '/')) && slash[1]) {
        int next = -1;

        *slash = 0;
        if (mkdirat(at, part, 0755) == 0 || errno == EEXIST)
            next = openat(at, part, O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        close(at);
        at = next;
        if (at >= 0)
            *slash = '/';
        part = slash + 1;
    }
    if (at < 0)
        return errno == ENOTDIR || errno == ELOOP
                   ? fl_fail(err, FL_CORRUPT, "entry \"%.120s\" lies below one that is a file",
                             name)
                   : fl_fail_errno(err, "folder of entry %.120s", name);
    *out = at;
    *last = part;
    return FL_OK;
}

/* ---- entries ---- */

static enum fl_status check_kind(struct unpack *u, zip_uint64_t i, const char *name, mode_t *mode,
                                 struct fl_err *err)
{
    zip_uint8_t system = 0;
    zip_uint32_t attributes = 0;

    *mode = 0644;
    if (zip_file_get_external_attributes(u->zip, i, 0, &system, &attributes) < 0 ||
        system != ZIP_OPSYS_UNIX || !(attributes >> 16))
        return FL_OK;
    mode_t kind = (attributes >> 16) & S_IFMT;
    if (kind && kind != S_IFREG && kind != S_IFDIR)
        return bad_name(name, "is a link or a special file", err);
    *mode = ((attributes >> 16) & 0777) | 0600;
    return FL_OK;
}

static enum fl_status count(struct unpack *u, uint64_t more, struct fl_err *err)
{
    if (more > u->limits->bytes - u->bytes)
        return fl_fail(err, FL_CORRUPT, "it unpacks to more than %llu MiB",
                       (unsigned long long)(u->limits->bytes >> 20));
    u->bytes += more;
    if (u->bytes > RATIO_FROM && u->bytes / u->limits->ratio > u->packed)
        return fl_fail(err, FL_CORRUPT, "it unpacks to more than %u times its size, as bombs do",
                       u->limits->ratio);
    return FL_OK;
}

static enum fl_status copy_out(struct unpack *u, zip_file_t *from, int fd, const char *name,
                               struct fl_err *err)
{
    zip_int64_t n;

    while ((n = zip_fread(from, u->buf, sizeof(u->buf))) > 0) {
        FL_TRY(count(u, (uint64_t)n, err));
        for (zip_int64_t done = 0; done < n;) {
            ssize_t w = FL_FAULT("unpack.write") ? (errno = ENOSPC, -1)
                                                 : write(fd, u->buf + done, (size_t)(n - done));

            if (w < 0 && errno != EINTR)
                return fl_fail_errno(err, "write entry %.120s", name);
            done += w > 0 ? w : 0;
        }
    }
    return n < 0
               ? fl_fail(err, FL_CORRUPT, "entry \"%.120s\": %.80s", name, zip_file_strerror(from))
               : FL_OK;
}

static enum fl_status one_file(struct unpack *u, zip_uint64_t i, char *name, mode_t mode,
                               struct fl_err *err)
{
    zip_file_t *from = FL_FAULT("unpack.open") ? NULL : zip_fopen_index(u->zip, i, 0);
    const char *last;
    int dir = -1, fd = -1;

    if (!from)
        return fl_fail(err, FL_CORRUPT, "entry \"%.120s\": %.80s", name, zip_strerror(u->zip));
    enum fl_status st = enter(u, name, &dir, &last, err);
    if (st == FL_OK) {
        fd = openat(dir, last, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
        if (fd < 0)
            st = errno == EEXIST || errno == EISDIR ? bad_name(name, "is there twice", err)
                                                    : fl_fail_errno(err, "make %.120s", name);
    }
    if (st == FL_OK)
        st = copy_out(u, from, fd, name, err);
    if (fd >= 0)
        close(fd);
    if (dir >= 0)
        close(dir);
    zip_fclose(from);
    return st;
}

static enum fl_status one_folder(struct unpack *u, char *name, struct fl_err *err)
{
    const char *last;
    int dir;

    FL_TRY(enter(u, name, &dir, &last, err));
    name[strlen(name) - 1] = 0; /* its slash: enter() has left it, and last begins before it */
    int rc = mkdirat(dir, last, 0755);
    int number = errno;

    close(dir);
    errno = number;
    return rc < 0 && number != EEXIST ? fl_fail_errno(err, "make folder %.120s", name) : FL_OK;
}

static enum fl_status one(struct unpack *u, zip_uint64_t i, struct fl_err *err)
{
    char name[NAME_BYTES];
    const char *given = zip_get_name(u->zip, i, ZIP_FL_ENC_RAW);
    mode_t mode;

    if (!given)
        return fl_fail(err, FL_CORRUPT, "entry %llu: %.80s", (unsigned long long)i,
                       zip_strerror(u->zip));
    FL_TRY(check_name(given, err));
    FL_TRY(check_kind(u, i, given, &mode, err));
    (void)FL_COPY(name, given);
    return name[strlen(name) - 1] == '/' ? one_folder(u, name, err)
                                         : one_file(u, i, name, mode, err);
}

static enum fl_status all(struct unpack *u, const char *dir, struct fl_err *err)
{
    zip_int64_t n = zip_get_num_entries(u->zip, 0);
    enum fl_status st = FL_OK;

    if (n < 0 || n > u->limits->entries)
        return fl_fail(err, FL_CORRUPT, "it has %lld entries, at most %u are taken", (long long)n,
                       u->limits->entries);
    u->dir = open(dir, O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (u->dir < 0)
        return fl_fail_errno(err, "open %s", dir);
    for (zip_int64_t i = 0; st == FL_OK && i < n; i++)
        st = one(u, (zip_uint64_t)i, err);
    close(u->dir);
    return st;
}

static enum fl_status from_source(zip_source_t *source, zip_error_t *why, uint64_t packed,
                                  const char *dir, const struct unpack_limits *limits,
                                  struct fl_err *err)
{
    struct unpack *u = calloc(1, sizeof(*u));
    enum fl_status st = u ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory to unpack");

    if (st == FL_OK) {
        u->limits = limits;
        u->packed = packed;
        u->zip = source ? zip_open_from_source(source, ZIP_RDONLY | ZIP_CHECKCONS, why) : NULL;
        if (!u->zip)
            st = fl_fail(err, FL_CORRUPT, "it is no zip: %.100s", zip_error_strerror(why));
    }
    if (st == FL_OK) {
        source = NULL; /* the archive's now */
        st = all(u, dir, err);
        zip_discard(u->zip);
    }
    if (source)
        zip_source_free(source);
    free(u);
    return st;
}

enum fl_status unpack_zip(const char *zip, const char *dir, const struct unpack_limits *limits,
                          struct fl_err *err)
{
    zip_error_t why;
    struct stat sb;

    if (stat(zip, &sb) < 0)
        return fl_fail_errno(err, "open %s", zip);
    zip_error_init(&why);
    enum fl_status st = from_source(zip_source_file_create(zip, 0, -1, &why), &why,
                                    (uint64_t)sb.st_size, dir, limits, err);
    zip_error_fini(&why);
    return st;
}

enum fl_status unpack_zip_bytes(struct fl_bytes zip, const char *dir,
                                const struct unpack_limits *limits, struct fl_err *err)
{
    zip_error_t why;

    zip_error_init(&why);
    enum fl_status st = from_source(zip_source_buffer_create(zip.data, zip.len, 0, &why), &why,
                                    zip.len, dir, limits, err);
    zip_error_fini(&why);
    return st;
}
