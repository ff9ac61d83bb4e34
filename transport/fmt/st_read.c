#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/str.h"
#include "common/conf/json.h"
#include "transport/fmt/st_priv.h"

static const struct st_dtype dtypes[] = {
    { "F32", 32, true, FL_F32 },          { "F16", 16, true, FL_F16 },
    { "BF16", 16, true, FL_BF16 },        { "F8_E4M3", 8, true, FL_F8_E4M3 },
    { "F8_E5M2", 8, true, FL_F8_E5M2 },   { "I64", 64, true, FL_I64 },
    { "I32", 32, true, FL_I32 },          { "U8", 8, true, FL_U8 },
    { .name = "BOOL", .bits = 8 },        { .name = "I8", .bits = 8 },
    { .name = "I16", .bits = 16 },        { .name = "U16", .bits = 16 },
    { .name = "U32", .bits = 32 },        { .name = "U64", .bits = 64 },
    { .name = "F64", .bits = 64 },        { .name = "C64", .bits = 64 },
    { .name = "F8_E8M0", .bits = 8 },     { .name = "F8_E4M3FNUZ", .bits = 8 },
    { .name = "F8_E5M2FNUZ", .bits = 8 }, { .name = "F4", .bits = 4 },
    { .name = "F6_E2M3", .bits = 6 },     { .name = "F6_E3M2", .bits = 6 },
};

struct st_file {
    char *name;
    const unsigned char *map, *data;
    size_t bytes, data_bytes;
    bool mapped; /* else borrowed */
    json_t *header;
};
struct st_reader {
    struct st_file *files;
    size_t n_files, cap_files;
    struct st_tensor *tensors; /* sorted by name */
    size_t n_tensors, cap_tensors;
    json_t *index; /* of a folder, metadata alone with texts as values; NULL: a file's own */
};

const struct st_dtype *st_dtype_named(const char *name)
{
    for (size_t i = 0; i < FL_LEN(dtypes); i++)
        if (strcmp(dtypes[i].name, name) == 0)
            return &dtypes[i];
    return NULL;
}

const struct st_dtype *st_dtype_of(enum fl_dtype t)
{
    for (size_t i = 0; i < FL_LEN(dtypes); i++)
        if (dtypes[i].known && dtypes[i].dtype == t)
            return &dtypes[i];
    return NULL;
}

const char *st_shape_line(const char *dtype, unsigned ndim, const uint64_t *shape, char *line,
                          size_t room)
{
    struct fl_str s = { .data = line, .cap = room, .max = room - 1 };

    fl_str_add(&s, "%s [", dtype);
    for (unsigned d = 0; d < ndim; d++)
        fl_str_add(&s, "%s%llu", d ? ", " : "", (unsigned long long)shape[d]);
    fl_str_add(&s, "]");
    return line;
}

bool st_size(const struct st_dtype *t, unsigned ndim, const uint64_t *shape, uint64_t *bytes)
{
    uint64_t bits = t->bits;

    for (unsigned d = 0; d < ndim; d++)
        if (__builtin_mul_overflow(bits, shape[d], &bits))
            return false;
    *bytes = bits / 8;
    return bits % 8 == 0;
}

/* ---- one file ---- */

static bool get_u64(const json_t *j, uint64_t *out)
{
    if (!json_is_integer(j) || json_integer_value(j) < 0)
        return false;
    *out = (uint64_t)json_integer_value(j);
    return true;
}

static enum fl_status bad(const struct st_file *f, const char *name, struct fl_err *err,
                          const char *what)
{
    return fl_fail(err, FL_CORRUPT, "%s: tensor %.80s: %s", f->name, name, what);
}

static enum fl_status read_shape(const struct st_file *f, const char *name, const json_t *shape,
                                 struct st_tensor *t, struct fl_err *err)
{
    if (!json_is_array(shape) || json_array_size(shape) > FL_DIMS)
        return bad(f, name, err, "shape is not a list of at most 8 numbers");
    t->ndim = (uint8_t)json_array_size(shape);
    for (unsigned d = 0; d < t->ndim; d++)
        if (!get_u64(json_array_get(shape, d), &t->shape[d]))
            return bad(f, name, err, "shape has an entry that is not a whole number from 0 on");
    return FL_OK;
}

static enum fl_status read_entry(const struct st_file *f, const char *name, const json_t *e,
                                 struct st_tensor *t, struct fl_err *err)
{
    const json_t *offsets = json_object_get(e, "data_offsets");
    const char *dtype = json_string_value(json_object_get(e, "dtype"));
    const struct st_dtype *kind = dtype ? st_dtype_named(dtype) : NULL;
    uint64_t begin, end;
    char line[120];

    if (!json_is_object(e) || json_object_size(e) != 3 || !dtype)
        return bad(f, name, err, "must have dtype, shape and data_offsets, and nothing else");
    if (name[0] == 0 || strlen(name) > ST_MAX_NAME)
        return bad(f, name, err, "a name has 1 to 512 bytes");
    if (!kind)
        return fl_fail(err, FL_CORRUPT,
                       "%s: tensor %.80s has dtype %.20s, which the format does not know", f->name,
                       name, dtype);
    *t = (struct st_tensor){ .name = name, .dtype = kind->dtype, .known = kind->known };
    fl_copy(t->dtype_name, sizeof(t->dtype_name), kind->name);
    FL_TRY(read_shape(f, name, json_object_get(e, "shape"), t, err));
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 ||
        !get_u64(json_array_get(offsets, 0), &begin) || !get_u64(json_array_get(offsets, 1), &end))
        return bad(f, name, err, "data_offsets are not two whole numbers from 0 on");
    if (begin > end || end > f->data_bytes)
        return fl_fail(
            err, FL_CORRUPT,
            "%s: tensor %.80s has data_offsets %llu to %llu, the file has %zu bytes of data",
            f->name, name, (unsigned long long)begin, (unsigned long long)end, f->data_bytes);
    if (!st_size(kind, t->ndim, t->shape, &t->bytes) || t->bytes != end - begin)
        return fl_fail(err, FL_CORRUPT, "%s: tensor %.80s is %s and has %llu bytes of data",
                       f->name, name,
                       st_shape_line(kind->name, t->ndim, t->shape, line, sizeof(line)),
                       (unsigned long long)(end - begin));
    t->data = f->data + begin;
    return FL_OK;
}

static enum fl_status check_meta(const struct st_file *f, const json_t *meta, struct fl_err *err)
{
    const char *key;
    json_t *value;

    if (meta && !json_is_object(meta))
        return fl_fail(err, FL_CORRUPT, "%s: __metadata__ is not an object", f->name);
    json_object_foreach ((json_t *)(uintptr_t)meta, key, value)
        if (!json_is_string(value))
            return fl_fail(err, FL_CORRUPT, "%s: __metadata__ %.80s is not a text", f->name, key);
    return FL_OK;
}

static int by_data(const void *a, const void *b)
{
    const struct st_tensor *x = a, *y = b;

    if (x->data != y->data)
        return (const char *)x->data < (const char *)y->data ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes; /* empty ones first */
}

/* One after the other, from the first byte to the last: no hole, no overlap. */
static enum fl_status check_places(const struct st_file *f, struct st_tensor *t, size_t n,
                                   struct fl_err *err)
{
    const unsigned char *at = f->data;

    qsort(t, n, sizeof(*t), by_data);
    for (size_t i = 0; i < n; i++) {
        if (t[i].data != at)
            return fl_fail(err, FL_CORRUPT,
                           "%s: tensor %.80s begins at %zu, the data before it ends at %zu",
                           f->name, t[i].name, (size_t)((const unsigned char *)t[i].data - f->data),
                           (size_t)(at - f->data));
        at += t[i].bytes;
    }
    if (at != f->data + f->data_bytes)
        return fl_fail(err, FL_CORRUPT, "%s: tensors end at %zu of %zu bytes of data", f->name,
                       (size_t)(at - f->data), f->data_bytes);
    return FL_OK;
}

static enum fl_status grow(void *array, size_t *cap, size_t want, size_t item, struct fl_err *err)
{
    void **at = array;
    size_t more = *cap * 2 > want ? *cap * 2 : want;
    void *moved = want <= *cap ? *at : realloc(*at, more * item);

    if (!moved)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu tensors", want);
    *cap = want <= *cap ? *cap : more;
    *at = moved;
    return FL_OK;
}

static enum fl_status read_tensors(struct st_reader *r, uint32_t file, struct fl_err *err)
{
    const struct st_file *f = &r->files[file];
    size_t first = r->n_tensors, n = json_object_size(f->header);
    const char *name;
    json_t *e;

    if (n > ST_MAX_TENSORS)
        return fl_fail(err, FL_CORRUPT, "%s: %zu tensors, at most %d", f->name, n, ST_MAX_TENSORS);
    FL_TRY(check_meta(f, json_object_get(f->header, "__metadata__"), err));
    FL_TRY(grow(&r->tensors, &r->cap_tensors, first + n + 1, sizeof(*r->tensors), err));
    json_object_foreach (f->header, name, e) {
        struct st_tensor *t = &r->tensors[r->n_tensors];

        if (strcmp(name, "__metadata__") == 0)
            continue;
        FL_TRY(read_entry(f, name, e, t, err));
        t->file = file;
        r->n_tensors++;
    }
    return check_places(f, r->tensors + first, r->n_tensors - first, err);
}

static enum fl_status read_header(struct st_file *f, struct fl_err *err)
{
    uint64_t len;

    if (f->bytes < 10)
        return fl_fail(err, FL_CORRUPT, "%s: %zu bytes are no safetensors file", f->name, f->bytes);
    memcpy(&len, f->map, sizeof(len));
    if (len > ST_MAX_HEADER || len > f->bytes - 8)
        return fl_fail(err, FL_CORRUPT,
                       "%s: header of %llu bytes, the file has %zu and a header at most %d",
                       f->name, (unsigned long long)len, f->bytes, ST_MAX_HEADER);
    if (f->map[8] != '{')
        return fl_fail(err, FL_CORRUPT, "%s: the header does not begin with {", f->name);
    f->data = f->map + 8 + len;
    f->data_bytes = f->bytes - 8 - len;
    char what[FL_PATH_MAX + 16];

    snprintf(what, sizeof(what), "%s: header", f->name);
    enum fl_status st =
        fl_json_parse((const char *)f->map + 8, len, what, ST_MAX_HEADER, &f->header, err);

    if (st != FL_INVALID)
        return st;
    if (err)
        err->status = FL_CORRUPT; /* of the file, not of a caller */
    return FL_CORRUPT;
}

static enum fl_status map_file(const char *path, struct st_file *f, struct fl_err *err)
{
    int fd = FL_FAULT("fmt.open") ? -1 : open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    struct stat s = { 0 };

    if (fd < 0 || fstat(fd, &s) < 0 || !S_ISREG(s.st_mode) || s.st_size < 10) {
        enum fl_status st = fd < 0 ? fl_fail_errno(err, "open %s", path)
                            : S_ISREG(s.st_mode)
                                ? fl_fail(err, FL_CORRUPT, "%s: %lld bytes are no safetensors file",
                                          path, (long long)s.st_size)
                                : fl_fail(err, FL_INVALID, "%s is not a file", path);

        if (fd >= 0)
            close(fd);
        return st;
    }
    f->bytes = (size_t)s.st_size;
    void *map = mmap(NULL, f->bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    enum fl_status st = map == MAP_FAILED ? fl_fail_errno(err, "map %s", path) : FL_OK;

    close(fd);
    f->map = st == FL_OK ? map : NULL;
    f->mapped = st == FL_OK;
    return st;
}

/* Adds one file; image NULL: path is read. */
static enum fl_status add_file(struct st_reader *r, const char *path, const void *image,
                               size_t bytes, struct fl_err *err)
{
    FL_TRY(grow(&r->files, &r->cap_files, r->n_files + 1, sizeof(*r->files), err));
    struct st_file *f = &r->files[r->n_files];

    *f = (struct st_file){ .name = strdup(path), .map = image, .bytes = bytes };
    if (!f->name)
        return fl_fail(err, FL_EXHAUSTED, "no memory to read %s", path);
    r->n_files++;
    if (!image)
        FL_TRY(map_file(path, f, err));
    FL_TRY(read_header(f, err));
    return read_tensors(r, (uint32_t)r->n_files - 1, err);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct st_tensor *)a)->name, ((const struct st_tensor *)b)->name);
}

static enum fl_status sort_names(struct st_reader *r, struct fl_err *err)
{
    if (r->n_tensors > 1)
        qsort(r->tensors, r->n_tensors, sizeof(*r->tensors), by_name);
    for (size_t i = 1; i < r->n_tensors; i++)
        if (by_name(&r->tensors[i - 1], &r->tensors[i]) == 0)
            return fl_fail(err, FL_CORRUPT, "tensor %.80s is in %s and in %s", r->tensors[i].name,
                           r->files[r->tensors[i - 1].file].name,
                           r->files[r->tensors[i].file].name);
    return FL_OK;
}

static enum fl_status read_one(const char *path, const void *image, size_t bytes,
                               struct st_reader **out, struct fl_err *err)
{
    FL_AUTO(st_reader) struct st_reader *r = calloc(1, sizeof(*r));

    if (!r)
        return fl_fail(err, FL_EXHAUSTED, "no memory to read %s", path);
    FL_TRY(add_file(r, path, image, bytes, err));
    FL_TRY(sort_names(r, err));
    *out = FL_TAKE(r);
    return FL_OK;
}

enum fl_status st_read_image(const void *image, size_t bytes, struct st_reader **out,
                             struct fl_err *err)
{
    return read_one("image", image ? image : "", bytes, out, err);
}

enum fl_status st_read_file(const char *path, struct st_reader **out, struct fl_err *err)
{
    return read_one(path, NULL, 0, out, err);
}

/* ---- a folder ---- */

/* Names come from a file of somebody: they must stay in its folder. */
static bool plain_file_name(const char *name)
{
    size_t n = name ? strlen(name) : 0, tail = strlen(".safetensors");

    return n > tail && n < 256 && name[0] != '.' && !strchr(name, '/') &&
           strcmp(name + n - tail, ".safetensors") == 0;
}

static enum fl_status keep_meta(struct st_reader *r, const char *path, const json_t *meta,
                                struct fl_err *err)
{
    const char *key;
    json_t *value;

    r->index = json_object();
    if (!r->index)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the index %s", path);
    json_object_foreach ((json_t *)(uintptr_t)meta, key, value) {
        char number[32];

        snprintf(number, sizeof(number), "%lld", (long long)json_integer_value(value));
        if (json_is_integer(value) || json_is_string(value))
            json_object_set_new(
                r->index, key,
                json_string(json_is_string(value) ? json_string_value(value) : number));
    } /* what is neither text nor number is not ours to judge */
    return FL_OK;
}

static enum fl_status file_of_map(struct st_reader *r, const char *dir, const char *index,
                                  const char *tensor, const json_t *value, json_t *seen,
                                  struct fl_err *err)
{
    const char *name = json_string_value(value);
    char path[FL_PATH_MAX];

    if (!plain_file_name(name))
        return fl_fail(err, FL_CORRUPT,
                       "%s: tensor %.80s is in \"%.80s\", which is no file name of this folder",
                       index, tensor, name ? name : "something else than a text");
    if (json_object_get(seen, name))
        return FL_OK;
    if (r->n_files >= ST_MAX_FILES)
        return fl_fail(err, FL_CORRUPT, "%s names more than %d files", index, ST_MAX_FILES);
    FL_TRY(fl_path(path, err, "%s/%s", dir, name));
    enum fl_status st = add_file(r, path, NULL, 0, err);

    if (st != FL_OK)
        return fl_wrap(err, st == FL_NOT_FOUND ? FL_CORRUPT : st, "%s", index);
    return json_object_set_new(seen, name, json_integer((json_int_t)r->n_files - 1)) == 0
               ? FL_OK
               : fl_fail(err, FL_EXHAUSTED, "no memory for the index %s", index);
}

/* Each tensor of the map is in its file, and each tensor of the files is in the map. */
static enum fl_status check_map(const struct st_reader *r, const char *index, const json_t *map,
                                const json_t *seen, struct fl_err *err)
{
    if (json_object_size(map) != r->n_tensors)
        return fl_fail(err, FL_CORRUPT, "%s names %zu tensors, its files have %zu", index,
                       json_object_size(map), r->n_tensors);
    for (size_t i = 0; i < r->n_tensors; i++) {
        const struct st_tensor *t = &r->tensors[i];
        const char *file = json_string_value(json_object_get(map, t->name));

        if (!file || json_integer_value(json_object_get(seen, file)) != t->file)
            return fl_fail(err, FL_CORRUPT, "%s: tensor %.80s is in %s, %s%.80s", index, t->name,
                           r->files[t->file].name, file ? "not in " : "and not in the index",
                           file ? file : "");
    }
    return FL_OK;
}

static enum fl_status read_index(struct st_reader *r, const char *dir, const char *index,
                                 const json_t *root, struct fl_err *err)
{
    const json_t *map = json_object_get(root, "weight_map"),
                 *meta = json_object_get(root, "metadata");
    json_t *seen = json_object(), *value;
    enum fl_status st = FL_OK;
    const char *tensor;

    if (!json_is_object(map) || (meta && !json_is_object(meta)) || !seen)
        st = fl_fail(err, FL_CORRUPT, "%s has no weight_map, or metadata that is no object", index);
    if (st == FL_OK)
        st = keep_meta(r, index, meta, err);
    json_object_foreach ((json_t *)(uintptr_t)map, tensor, value)
        if (st == FL_OK)
            st = file_of_map(r, dir, index, tensor, value, seen, err);
    if (st == FL_OK)
        st = sort_names(r, err);
    if (st == FL_OK)
        st = check_map(r, index, map, seen, err);
    json_decref(seen);
    return st;
}

enum fl_status st_read_folder(const char *dir, struct st_reader **out, struct fl_err *err)
{
    char index[FL_PATH_MAX], single[FL_PATH_MAX];
    json_t *root;

    FL_TRY(fl_path(index, err, "%s/model.safetensors.index.json", dir));
    FL_TRY(fl_path(single, err, "%s/model.safetensors", dir));
    if (access(index, F_OK) < 0 && errno == ENOENT) {
        if (access(single, F_OK) < 0 && errno == ENOENT)
            return fl_fail(err, FL_NOT_FOUND,
                           "%s has neither model.safetensors nor model.safetensors.index.json",
                           dir);
        return st_read_file(single, out, err);
    }
    enum fl_status st = fl_json_load(index, ST_MAX_HEADER, &root, err);

    if (st != FL_OK)
        return fl_wrap(err, st == FL_INVALID ? FL_CORRUPT : st, "index of %s", dir);
    FL_AUTO(st_reader) struct st_reader *r = calloc(1, sizeof(*r));

    st = r ? read_index(r, dir, index, root, err)
           : fl_fail(err, FL_EXHAUSTED, "no memory to read %s", dir);
    json_decref(root);
    if (st == FL_OK)
        *out = FL_TAKE(r);
    return st;
}

/* ---- looking ---- */

size_t st_count(const struct st_reader *r)
{
    return r->n_tensors;
}

const struct st_tensor *st_at(const struct st_reader *r, size_t i)
{
    return i < r->n_tensors ? &r->tensors[i] : NULL;
}

const struct st_tensor *st_find(const struct st_reader *r, const char *name)
{
    const struct st_tensor key = { .name = name };

    return r->n_tensors ? bsearch(&key, r->tensors, r->n_tensors, sizeof(key), by_name) : NULL;
}

enum fl_status st_need(const struct st_reader *r, const char *name, enum fl_dtype dtype,
                       unsigned ndim, const uint64_t *shape, const struct st_tensor **out,
                       struct fl_err *err)
{
    const struct st_tensor *t = st_find(r, name);
    const struct st_dtype *kind = st_dtype_of(dtype);
    char want[120], is[120];

    if (!kind || ndim > FL_DIMS)
        return fl_fail(err, FL_INVALID, "tensor %.80s is wanted with dtype %d and %u dimensions",
                       name, (int)dtype, ndim);
    st_shape_line(kind->name, ndim, shape, want, sizeof(want));
    if (!t)
        return fl_fail(err, FL_NOT_FOUND, "no tensor %.80s %s in %s", name, want,
                       r->n_files ? r->files[0].name : "a folder without files");
    if (!t->known || t->dtype != dtype || t->ndim != ndim ||
        memcmp(t->shape, shape, ndim * sizeof(*shape)) != 0)
        return fl_fail(err, FL_INVALID, "tensor %.60s is %s in %.60s, wanted is %s", name,
                       st_shape_line(t->dtype_name, t->ndim, t->shape, is, sizeof(is)),
                       r->files[t->file].name, want);
    *out = t;
    return FL_OK;
}

static const json_t *meta_of(const struct st_reader *r)
{
    return r->index     ? r->index
           : r->n_files ? json_object_get(r->files[0].header, "__metadata__")
                        : NULL;
}

const char *st_meta(const struct st_reader *r, const char *key)
{
    return json_string_value(json_object_get(meta_of(r), key));
}

const char *st_file_meta(const struct st_reader *r, uint32_t file, const char *key)
{
    return file < r->n_files ? json_string_value(json_object_get(
                                   json_object_get(r->files[file].header, "__metadata__"), key))
                             : NULL;
}

size_t st_meta_count(const struct st_reader *r)
{
    return json_object_size(meta_of(r));
}

struct st_meta st_meta_at(const struct st_reader *r, size_t i)
{
    json_t *meta = (json_t *)(uintptr_t)meta_of(r);
    void *at = json_object_iter(meta);

    while (at && i-- > 0)
        at = json_object_iter_next(meta, at);
    return at ? (struct st_meta){ json_object_iter_key(at),
                                  json_string_value(json_object_iter_value(at)) }
              : (struct st_meta){ NULL, NULL };
}

void st_reader_destroy(struct st_reader *r)
{
    if (!r)
        return;
    for (size_t i = 0; i < r->n_files; i++) {
        struct st_file *f = &r->files[i];

        if (f->mapped)
            munmap((void *)(uintptr_t)f->map, f->bytes);
        json_decref(f->header);
        free(f->name);
    }
    json_decref(r->index);
    free(r->files);
    free(r->tensors);
    free(r);
}
