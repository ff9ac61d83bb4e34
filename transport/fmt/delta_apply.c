#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/str.h"
#include "transport/fmt/delta_priv.h"

struct delta_version {
    struct st_reader *files;
    int64_t version, base;
    enum delta_encoding encoding;
};

static enum fl_status get_number(const struct st_reader *r, const char *key, const char *dir,
                                 int64_t *out, struct fl_err *err)
{
    const char *text = st_meta(r, key);

    if (text && fl_parse_i64(text, 0, 999999, out, NULL) == FL_OK)
        return FL_OK;
    return fl_fail(err, FL_CORRUPT, "%s: metadata %s is \"%.40s\", must be a version", dir, key,
                   text ? text : "");
}

static enum fl_status read_meta(struct delta_version *v, const char *dir, int64_t version,
                                struct fl_err *err)
{
    const struct st_reader *r = v->files;
    const char *encoding = st_meta(r, "delta_encoding"), *packed = st_meta(r, "compression_format"),
               *sums = st_meta(r, "checksum_format");

    FL_TRY(get_number(r, "version", dir, &v->version, err));
    v->base = DELTA_NO_BASE;
    if (st_meta(r, "base_version"))
        FL_TRY(get_number(r, "base_version", dir, &v->base, err));
    if (v->version != version || v->base >= version)
        return fl_fail(err, FL_CORRUPT, "%s says version %lld made from %lld", dir,
                       (long long)v->version, (long long)v->base);
    if (!sums || strcmp(sums, "xxh3-128") != 0)
        return fl_fail(err, FL_UNSUPPORTED,
                       "%s: checksum_format is \"%.40s\", only xxh3-128 is read", dir,
                       sums ? sums : "");
    if (v->base == DELTA_NO_BASE)
        return FL_OK;
    if (!packed || strcmp(packed, "zstd") != 0)
        return fl_fail(err, FL_UNSUPPORTED,
                       "%s: compression_format is \"%.40s\", only zstd is read", dir,
                       packed ? packed : "");
    if (!encoding || (strcmp(encoding, "xor") != 0 && strcmp(encoding, "overwrite") != 0))
        return fl_fail(err, FL_CORRUPT, "%s: delta_encoding is \"%.40s\", must be xor or overwrite",
                       dir, encoding ? encoding : "");
    v->encoding = strcmp(encoding, "xor") == 0 ? DELTA_XOR : DELTA_OVERWRITE;
    return FL_OK;
}

static enum fl_status open_folder(const char *path, int64_t version, struct delta_version **out,
                                  struct fl_err *err)
{
    FL_AUTO(delta_version) struct delta_version *v = calloc(1, sizeof(*v));

    if (!v)
        return fl_fail(err, FL_EXHAUSTED, "no memory for version %lld", (long long)version);
    FL_TRY(st_read_folder(path, &v->files, err));
    FL_TRY(read_meta(v, path, version, err));
    *out = FL_TAKE(v);
    return FL_OK;
}

enum fl_status delta_open(const char *dir, int64_t version, struct delta_version **out,
                          struct fl_err *err)
{
    char path[FL_PATH_MAX];

    FL_TRY(delta_dir(dir, version, path, err));
    return open_folder(path, version, out, err);
}

enum fl_status delta_base_open(const char *dir, int64_t version, struct delta_version **out,
                               struct fl_err *err)
{
    FL_AUTO(delta_version) struct delta_version *v = NULL;
    char path[FL_PATH_MAX];

    FL_TRY(delta_base_dir(dir, version, path, err));
    FL_TRY(open_folder(path, version, &v, err));
    if (v->base != DELTA_NO_BASE)
        return fl_fail(err, FL_CORRUPT, "%s is made from version %lld, and must be whole", path,
                       (long long)v->base);
    *out = FL_TAKE(v);
    return FL_OK;
}

int64_t delta_base_of(const struct delta_version *v)
{
    return v->base;
}

const char *delta_meta(const struct delta_version *v, const char *key)
{
    return st_meta(v->files, key);
}

const struct st_reader *delta_files(const struct delta_version *v)
{
    return v->files;
}

/* Sizes are in the frame, and must be what the encoding allows: nothing else is unpacked. */
static enum fl_status unpack(const struct st_tensor *t, uint64_t least, uint64_t most,
                             unsigned char **out, size_t *n, struct fl_err *err)
{
    unsigned long long size = ZSTD_getFrameContentSize(t->data, t->bytes);

    if (size == ZSTD_CONTENTSIZE_ERROR || size == ZSTD_CONTENTSIZE_UNKNOWN || size < least ||
        size > most)
        return fl_fail(err, FL_CORRUPT,
                       "change of %.80s: a frame of %llu bytes, must have %" PRIu64 " to %" PRIu64,
                       t->name, size, least, most);
    unsigned char *room = malloc(size + 1);

    if (!room)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the change of %.80s, %llu bytes", t->name,
                       size);
    *n = ZSTD_decompress(room, size, t->data, t->bytes);
    if (ZSTD_isError(*n) || *n != size) {
        free(room);
        return fl_fail(err, FL_CORRUPT, "change of %.80s: %s", t->name, ZSTD_getErrorName(*n));
    }
    *out = room;
    return FL_OK;
}

static void apply_xor(const unsigned char *change, const unsigned char *was, unsigned char *to,
                      uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i++)
        to[i] = was[i] ^ change[i];
}

static enum fl_status apply_overwrite(const struct st_tensor *t, const unsigned char *change,
                                      size_t n, unsigned char *to, uint64_t elements, uint64_t item,
                                      struct fl_err *err)
{
    uint32_t count, at;

    memcpy(&count, change, 4);
    if (count > elements || n != 4 + count * (4 + item))
        return fl_fail(err, FL_CORRUPT, "change of %.80s: %u elements of %" PRIu64 " in %zu bytes",
                       t->name, count, elements, n);
    const unsigned char *values = change + 4 + 4ull * count;

    for (uint32_t i = 0; i < count; i++) {
        memcpy(&at, change + 4 + 4ull * i, 4);
        if (at >= elements)
            return fl_fail(err, FL_CORRUPT, "change of %.80s: element %u of %" PRIu64, t->name, at,
                           elements);
        memcpy(to + at * item, values + i * item, item);
    }
    return FL_OK;
}

static enum fl_status apply_change(const struct delta_version *v, const struct st_tensor *t,
                                   const struct st_entry *what, const void *was, void *to,
                                   uint64_t bytes, struct fl_err *err)
{
    uint64_t item = delta_item_bytes(what->dtype), elements = bytes / item;
    bool xor = v->encoding == DELTA_XOR;
    unsigned char *change = NULL;
    size_t n = 0;

    FL_TRY(unpack(t, xor? bytes : 4, xor? bytes : 4 + elements *(4 + item), &change, &n, err));
    if (!xor&&was != to)
        memcpy(to, was, bytes);
    enum fl_status st = FL_OK;

    if (xor)
        apply_xor(change, was, to, bytes);
    else
        st = apply_overwrite(t, change, n, to, elements, item, err);
    free(change);
    return st;
}

static enum fl_status check_sum(const struct delta_version *v, const struct st_tensor *t,
                                const void *to, uint64_t bytes, struct fl_err *err)
{
    const char *want = st_file_meta(v->files, t->file, t->name);
    char is[DELTA_SUM];

    delta_checksum(to, bytes, is);
    if (want && strcasecmp(want, is) == 0)
        return FL_OK;
    return fl_fail(err, FL_CORRUPT, "version %lld of %.80s has checksum %s, must be %.40s",
                   (long long)v->version, t->name, is, want ? want : "in the file's metadata");
}

enum fl_status delta_apply_to(const struct delta_version *v, const struct st_entry *what,
                              const void *was, void *to, bool check, struct fl_err *err)
{
    const struct st_tensor *t = st_find(v->files, what->name);
    uint64_t bytes = delta_entry_bytes(what);

    if (bytes == 0)
        return fl_fail(err, FL_INVALID, "tensor %.80s has no bytes", what->name);
    if (v->base == DELTA_NO_BASE) {
        FL_TRY(st_need(v->files, what->name, what->dtype, what->ndim, what->shape, &t, err));
        memcpy(to, t->data, bytes);
        return check ? check_sum(v, t, to, bytes, err) : FL_OK;
    }
    if (!was)
        return fl_fail(err, FL_INVALID, "version %lld of %.80s needs version %lld",
                       (long long)v->version, what->name, (long long)v->base);
    if (!t) {
        if (was != to)
            memcpy(to, was, bytes);
        return FL_OK;
    }
    if (!t->known || t->dtype != FL_U8 || t->ndim != 1)
        return fl_fail(err, FL_CORRUPT, "change of %.80s is not a list of bytes", t->name);
    FL_TRY(apply_change(v, t, what, was, to, bytes, err));
    return check ? check_sum(v, t, to, bytes, err) : FL_OK;
}

enum fl_status delta_apply(const struct delta_version *v, const struct st_entry *what,
                           const void *was, void *to, struct fl_err *err)
{
    return delta_apply_to(v, what, was, to, true, err);
}

void delta_version_destroy(struct delta_version *v)
{
    if (!v)
        return;
    st_reader_destroy(v->files);
    free(v);
}
