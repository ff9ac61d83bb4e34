#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>
#include <zstd.h>
#include "common/base/fault.h"
#include "common/base/file.h"
#include "transport/fmt/delta_priv.h"
#include "transport/fmt/st_priv.h"

enum {
    ZSTD_LEVEL = 1
}; /* most of a change is zeros or already dense: more costs time and gains little */

/* Compressed changes that wait for their file. */
struct batch {
    struct st_entry *entries;
    struct st_meta *sums;
    void **data;
    char (*hex)[DELTA_SUM];
    size_t n, cap;
    uint64_t bytes;
};
struct writer {
    const struct delta_opts *o;
    char dir[FL_PATH_MAX];
    json_t *map; /* tensor to number of its file */
    size_t files;
    struct batch batch;
    unsigned char *change, *packed;
    size_t change_cap, packed_cap;
    struct delta_stats stats;
};

void delta_checksum(const void *data, size_t bytes, char out[DELTA_SUM])
{
    XXH128_hash_t h = XXH3_128bits(data, bytes);

    snprintf(out, DELTA_SUM, "%016llx%016llx", (unsigned long long)h.high64,
             (unsigned long long)h.low64);
}

enum fl_status delta_dir(const char *dir, int64_t version, char *out, struct fl_err *err)
{
    if (version < 0 || version > 999999)
        return fl_fail(err, FL_INVALID, "version %lld: folders have six digits",
                       (long long)version);
    return fl_path(out, err, "%s/weight_v%06lld", dir, (long long)version);
}

enum fl_status delta_base_dir(const char *dir, int64_t version, char *out, struct fl_err *err)
{
    if (version < 0 || version > 999999)
        return fl_fail(err, FL_INVALID, "version %lld: folders have six digits",
                       (long long)version);
    return fl_path(out, err, "%s/base_v%06lld", dir, (long long)version);
}

bool delta_is_written(const char *folder)
{
    char index[FL_PATH_MAX];

    return fl_path(index, NULL, "%s/model.safetensors.index.json", folder) == FL_OK &&
           access(index, F_OK) == 0;
}

uint64_t delta_item_bytes(enum fl_dtype t)
{
    const struct st_dtype *d = st_dtype_of(t);

    return d ? d->bits / 8 : 0;
}

uint64_t delta_entry_bytes(const struct st_entry *what)
{
    const struct st_dtype *d = st_dtype_of(what->dtype);
    uint64_t bytes = 0;

    return d && what->ndim <= FL_DIMS && st_size(d, what->ndim, what->shape, &bytes) ? bytes : 0;
}

const char *delta_encoding_name(enum delta_encoding e)
{
    return e == DELTA_XOR ? "xor" : "overwrite";
}

static bool room(unsigned char **at, size_t *cap, size_t want)
{
    if (want <= *cap)
        return true;
    free(*at);
    *at = malloc(want);
    *cap = *at ? want : 0;
    return *at != NULL;
}

static size_t encode_xor(unsigned char *out, const unsigned char *now, const unsigned char *was,
                         size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        out[i] = now[i] ^ was[i];
    return bytes;
}

/* The next element from i on that is not what it was. Most are: eight bytes are looked at together.
 */
static uint32_t next_changed(const unsigned char *now, const unsigned char *was, uint32_t i,
                             uint32_t n, size_t item)
{
    uint64_t a, b;

    for (; i * item + sizeof(a) <= n * item; i += (uint32_t)(sizeof(a) / item)) {
        memcpy(&a, now + i * item, sizeof(a));
        memcpy(&b, was + i * item, sizeof(b));
        if (a != b) /* little-endian, as the file: the lowest byte is the first */
            return i + (uint32_t)((unsigned)__builtin_ctzll(a ^ b) / 8 / item);
    }
    while (i < n && memcmp(now + i * item, was + i * item, item) == 0)
        i++;
    return i;
}

/* u32 count, positions, values: two passes, so that it is written in place. */
static size_t encode_overwrite(unsigned char *out, const unsigned char *now,
                               const unsigned char *was, size_t bytes, size_t item)
{
    uint32_t count = 0, n = (uint32_t)(bytes / item);
    unsigned char *positions = out + 4;

    for (uint32_t i = 0; (i = next_changed(now, was, i, n, item)) < n; i++, count++)
        memcpy(positions + 4ull * count, &i, 4);
    memcpy(out, &count, 4);
    unsigned char *values = positions + 4ull * count;

    for (uint32_t k = 0, i; k < count; k++) {
        memcpy(&i, positions + 4ull * k, 4);
        memcpy(values + k * item, now + (uint64_t)i * item, item);
    }
    return 4 + count * (4 + item);
}

static enum fl_status encode(struct writer *w, const struct delta_source *t, uint64_t bytes,
                             size_t *n, struct fl_err *err)
{
    size_t item = delta_item_bytes(t->what.dtype);

    if (w->o->encoding == DELTA_OVERWRITE && bytes / item >= UINT32_MAX)
        return fl_fail(err, FL_INVALID,
                       "tensor %.80s has %llu elements: overwrite counts in 32 bits, use xor",
                       t->what.name, (unsigned long long)(bytes / item));
    if (!room(&w->change, &w->change_cap,
              w->o->encoding == DELTA_XOR ? bytes : 4 + bytes / item * (4 + item)))
        return fl_fail(err, FL_EXHAUSTED, "no memory for the change of %.80s", t->what.name);
    *n = w->o->encoding == DELTA_XOR
             ? encode_xor(w->change, t->what.data, t->was, bytes)
             : encode_overwrite(w->change, t->what.data, t->was, bytes, item);
    size_t bound = ZSTD_compressBound(*n);

    if (!room(&w->packed, &w->packed_cap, bound))
        return fl_fail(err, FL_EXHAUSTED, "no memory for the change of %.80s", t->what.name);
    *n = ZSTD_compress(w->packed, bound, w->change, *n, ZSTD_LEVEL);
    return ZSTD_isError(*n) ? fl_fail(err, FL_INTERNAL, "compress %.80s: %s", t->what.name,
                                      ZSTD_getErrorName(*n))
                            : FL_OK;
}

/* ---- files ---- */

static void batch_clear(struct batch *b)
{
    for (size_t i = 0; i < b->n; i++)
        free(b->data[i]);
    b->n = 0;
    b->bytes = 0;
}

static void batch_fini(struct batch *b)
{
    batch_clear(b);
    free(b->entries);
    free(b->sums);
    free(b->data);
    free(b->hex);
}

static bool batch_grow(struct batch *b)
{
    size_t cap = b->cap ? b->cap * 2 : 64;
    void *e = realloc(b->entries, cap * sizeof(*b->entries));

    b->entries = e ? e : b->entries;
    void *s = realloc(b->sums, cap * sizeof(*b->sums));

    b->sums = s ? s : b->sums;
    void *d = realloc(b->data, cap * sizeof(*b->data));

    b->data = d ? d : b->data;
    void *h = realloc(b->hex, cap * sizeof(*b->hex));

    b->hex = h ? h : b->hex;
    if (!e || !s || !d || !h)
        return false;
    b->cap = cap;
    return true;
}

/* The number of files is known at the end only: until then they have names that no reader looks
 * for. */
static enum fl_status part_path(const struct writer *w, size_t file, char *out, struct fl_err *err)
{
    return fl_path(out, err, "%s/part-%05zu.safetensors", w->dir, file);
}

static enum fl_status flush(struct writer *w, struct fl_err *err)
{
    struct batch *b = &w->batch;
    char path[FL_PATH_MAX];

    if (b->n == 0)
        return FL_OK;
    if (w->files >= ST_MAX_FILES)
        return fl_fail(err, FL_INVALID, "more than %d files of changes", ST_MAX_FILES);
    FL_TRY(part_path(w, w->files + 1, path, err));
    for (size_t i = 0; i < b->n; i++) { /* the arrays have stopped moving */
        if (b->data[i]) /* a base is not compressed: its files are a checkpoint that anybody reads
                         */
            b->entries[i].data = b->data[i];
        b->sums[i].value = b->hex[i];
    }
    FL_TRY(st_write_file(path, b->entries, b->n, b->sums, b->n, err));
    w->files++;
    w->stats.written_bytes += b->bytes;
    batch_clear(b);
    return FL_OK;
}

static enum fl_status add(struct writer *w, const struct delta_source *t, uint64_t bytes,
                          size_t packed, struct fl_err *err)
{
    struct batch *b = &w->batch;
    bool base = w->o->base_version == DELTA_NO_BASE;
    void *copy = base ? NULL : malloc(packed + 1);

    if (b->n == b->cap && !batch_grow(b)) {
        free(copy);
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu changed tensors", b->n);
    }
    if (!base && !copy)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the change of %.80s", t->what.name);
    if (copy)
        memcpy(copy, w->packed, packed);
    b->entries[b->n] = base ? t->what
                            : (struct st_entry){ .name = t->what.name,
                                                 .dtype = FL_U8,
                                                 .ndim = 1,
                                                 .shape = { packed } };
    b->data[b->n] = copy;
    delta_checksum(t->what.data, bytes, b->hex[b->n]);
    b->sums[b->n].key = t->what.name;
    b->bytes += packed;
    b->n++;
    if (json_object_set_new(w->map, t->what.name, json_integer((json_int_t)w->files + 1)) < 0)
        return fl_fail(err, FL_INVALID, "tensor name %.80s is not UTF-8", t->what.name);
    return FL_OK;
}

static enum fl_status add_tensor(struct writer *w, const struct delta_source *t, struct fl_err *err)
{
    uint64_t bytes = delta_entry_bytes(&t->what),
             limit = w->o->file_bytes ? w->o->file_bytes : DELTA_FILE_BYTES;
    bool base = w->o->base_version == DELTA_NO_BASE;
    size_t packed = bytes;

    if (bytes == 0 || !t->what.data || base != !t->was)
        return fl_fail(err, FL_INVALID, "tensor %.80s: %llu bytes, with %s base", t->what.name,
                       (unsigned long long)bytes, base ? "no" : "a");
    w->stats.total++;
    w->stats.raw_bytes += bytes;
    if (!base && memcmp(t->what.data, t->was, bytes) == 0)
        return FL_OK;
    w->stats.changed++;
    if (!base)
        FL_TRY(encode(w, t, bytes, &packed, err));
    if (w->batch.n > 0 && w->batch.bytes + packed > limit)
        FL_TRY(flush(w, err));
    return add(w, t, bytes, packed, err);
}

static enum fl_status name_files(struct writer *w, struct fl_err *err)
{
    char from[FL_PATH_MAX], to[FL_PATH_MAX];
    const char *tensor;
    json_t *file;

    for (size_t f = 1; f <= w->files; f++) {
        FL_TRY(part_path(w, f, from, err));
        FL_TRY(fl_path(to, err, "%s/model-%05zu-of-%05zu.safetensors", w->dir, f, w->files));
        if (rename(from, to) < 0)
            return fl_fail_errno(err, "rename %s", from);
    }
    json_object_foreach (w->map, tensor, file) {
        char name[48];

        snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors",
                 (size_t)json_integer_value(file), w->files);
        json_object_set_new(w->map, tensor,
                            json_string(name)); /* of a key that is there: iteration goes on */
    }
    return FL_OK;
}

enum fl_status delta_index_write(const char *folder, const struct delta_opts *o, json_t *map,
                                 struct fl_err *err)
{
    bool base = o->base_version == DELTA_NO_BASE;
    json_t *meta =
        json_pack("{s:I, s:s, s:s}", "version", (json_int_t)o->version, "compression_format",
                  base ? "none" : "zstd", "checksum_format", "xxh3-128");
    json_t *root = json_pack("{s:o, s:O}", "metadata", meta, "weight_map", map);
    char path[FL_PATH_MAX], *text = NULL;
    enum fl_status st = fl_path(path, err, "%s/model.safetensors.index.json", folder);

    if (!base) {
        json_object_set_new(meta, "base_version", json_integer(o->base_version));
        json_object_set_new(meta, "delta_encoding", json_string(delta_encoding_name(o->encoding)));
    }
    for (size_t i = 0; i < o->n_extra; i++)
        json_object_set_new(meta, o->extra[i].key, json_string(o->extra[i].value));
    if (st == FL_OK && !(text = json_dumps(root, JSON_INDENT(2) | JSON_PRESERVE_ORDER)))
        st = fl_fail(err, FL_EXHAUSTED, "no memory for the index of %s", folder);
    if (st == FL_OK && FL_FAULT("fmt.index"))
        st = fl_fail(err, FL_INTERNAL, "fault before the index of %s", folder);
    if (st == FL_OK)
        st = fl_file_write(path, 0666, text, strlen(text), err);
    free(text);
    json_decref(root);
    return st;
}

static enum fl_status write_all(struct writer *w, const struct delta_source *t, size_t n,
                                struct fl_err *err)
{
    for (size_t i = 0; i < n; i++)
        FL_TRY(add_tensor(w, &t[i], err));
    FL_TRY(flush(w, err));
    if (json_object_size(w->map) != w->stats.changed)
        return fl_fail(err, FL_INVALID, "a name comes twice among %zu tensors", n);
    FL_TRY(name_files(w, err));
    return delta_index_write(w->dir, w->o, w->map, err);
}

enum fl_status delta_write(const char *dir, const struct delta_source *t, size_t n,
                           const struct delta_opts *o, struct delta_stats *stats,
                           struct fl_err *err)
{
    struct writer w = { .o = o };

    if (o->base_version != DELTA_NO_BASE && o->base_version >= o->version)
        return fl_fail(err, FL_INVALID, "version %lld cannot be made from version %lld",
                       (long long)o->version, (long long)o->base_version);
    FL_TRY(delta_dir(dir, o->version, w.dir, err));
    if (delta_is_written(w.dir))
        return fl_fail(err, FL_EXISTS, "%s is there already", w.dir);
    FL_TRY(fl_tree_remove(w.dir, err)); /* of a writer that did not get to its end */
    if (mkdir(w.dir, 0777) < 0)
        return fl_fail_errno(err, "make folder %s", w.dir);
    w.map = json_object();
    enum fl_status st =
        w.map ? write_all(&w, t, n, err) : fl_fail(err, FL_EXHAUSTED, "no memory for an index");

    if (st == FL_OK && stats)
        *stats = w.stats;
    if (st != FL_OK)
        (void)fl_tree_remove(w.dir, NULL); /* what is left has no index and is not there */
    batch_fini(&w.batch);
    json_decref(w.map);
    free(w.change);
    free(w.packed);
    return st;
}
