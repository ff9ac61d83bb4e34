#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "common/base/file.h"
#include "transport/fmt/st_priv.h"

enum { DATA_ALIGN = 64 };

/* Where everything goes: made from the entries, before any data is there. */
struct plan {
    unsigned char *head; /* 8 bytes of length and the header, padded */
    size_t head_bytes;
    uint64_t *off;   /* per entry, from the beginning of the file */
    uint64_t *bytes; /* per entry */
    uint64_t file_bytes;
};

struct order {
    const struct st_entry *e;
    uint32_t index;
    uint8_t align;
};

static int by_align(const void *a, const void *b)
{
    const struct order *x = a, *y = b;

    if (x->align != y->align)
        return x->align > y->align ? -1 : 1;
    return strcmp(x->e->name, y->e->name);
}

static void plan_fini(struct plan *p)
{
    free(p->head);
    free(p->off);
    free(p->bytes);
    *p = (struct plan){ 0 };
}

static enum fl_status place_entry(struct plan *p, const struct order *o, uint64_t *at,
                                  struct fl_err *err)
{
    const struct st_dtype *t = st_dtype_of(o->e->dtype);

    if (!o->e->name[0] || strlen(o->e->name) > ST_MAX_NAME ||
        strcmp(o->e->name, "__metadata__") == 0 || !t || o->e->ndim > FL_DIMS ||
        !st_size(t, o->e->ndim, o->e->shape, &p->bytes[o->index]) ||
        p->bytes[o->index] > INT64_MAX - *at)
        return fl_fail(err, FL_INVALID, "tensor %.80s cannot be written: dtype %d, %u dimensions",
                       o->e->name, (int)o->e->dtype, o->e->ndim);
    p->off[o->index] = *at;
    *at += p->bytes[o->index];
    return FL_OK;
}

static bool add_entry(json_t *header, const struct st_entry *e, uint64_t begin, uint64_t bytes)
{
    json_t *shape = json_array(), *one;

    for (unsigned d = 0; d < e->ndim; d++)
        json_array_append_new(shape, json_integer((json_int_t)e->shape[d]));
    one = json_pack("{s:s, s:o, s:[I, I]}", "dtype", st_dtype_of(e->dtype)->name, "shape", shape,
                    "data_offsets", (json_int_t)begin, (json_int_t)(begin + bytes));
    return json_object_set_new(header, e->name, one) == 0; /* refuses a name that is not UTF-8 */
}

/* The header's own length does not change what is in it, so it is written last and padded. */
static enum fl_status write_head(struct plan *p, json_t *header, struct fl_err *err)
{
    char *text = json_dumps(header, JSON_COMPACT | JSON_PRESERVE_ORDER);
    size_t n = text ? strlen(text) : 0, padded = (8 + n + DATA_ALIGN - 1) / DATA_ALIGN * DATA_ALIGN;
    uint64_t len = padded - 8;

    p->head = text ? malloc(padded) : NULL;
    if (!p->head || len > ST_MAX_HEADER) {
        free(text);
        return p->head ? fl_fail(err, FL_INVALID, "a header of %zu bytes, at most %d can be read",
                                 n, ST_MAX_HEADER)
                       : fl_fail(err, FL_EXHAUSTED, "no memory for a header");
    }
    memset(p->head, ' ', padded);
    memcpy(p->head, &len, 8);
    memcpy(p->head + 8, text, n);
    free(text);
    p->head_bytes = padded;
    return FL_OK;
}

static enum fl_status fill_header(json_t *header, const struct plan *p, const struct order *o,
                                  size_t n, const struct st_meta *meta, size_t n_meta,
                                  struct fl_err *err)
{
    json_t *m = json_object();

    for (size_t i = 0; i < n_meta; i++)
        if (json_object_set_new(m, meta[i].key, json_string(meta[i].value)) < 0) {
            json_decref(m);
            return fl_fail(err, FL_INVALID, "metadata %.80s is not UTF-8", meta[i].key);
        }
    if (n_meta)
        json_object_set_new(header, "__metadata__", m);
    else
        json_decref(m);
    for (size_t i = 0; i < n; i++)
        if (!add_entry(header, o[i].e, p->off[o[i].index], p->bytes[o[i].index]))
            return fl_fail(err, FL_INVALID, "tensor name %.80s is not UTF-8", o[i].e->name);
    return FL_OK;
}

static enum fl_status plan_make(struct plan *p, const struct st_entry *t, size_t n,
                                const struct st_meta *meta, size_t n_meta, struct fl_err *err)
{
    struct order *o = calloc(n + 1, sizeof(*o));
    json_t *header = json_object();
    enum fl_status st = FL_OK;
    uint64_t at = 0;

    *p = (struct plan){ .off = calloc(n + 1, sizeof(*p->off)),
                        .bytes = calloc(n + 1, sizeof(*p->bytes)) };
    if (!o || !header || !p->off || !p->bytes || n > ST_MAX_TENSORS)
        st = fl_fail(err, n > ST_MAX_TENSORS ? FL_INVALID : FL_EXHAUSTED, "no room for %zu tensors",
                     n);
    for (uint32_t i = 0; i < n && st == FL_OK; i++) {
        const struct st_dtype *kind = st_dtype_of(t[i].dtype);

        o[i] = (struct order){ &t[i], i, kind ? kind->bits : 0 };
    }
    if (st == FL_OK && n > 1)
        qsort(o, n, sizeof(*o), by_align);
    for (size_t i = 0; i < n && st == FL_OK; i++)
        st = place_entry(p, &o[i], &at, err);
    if (st == FL_OK)
        st = fill_header(header, p, o, n, meta, n_meta, err);
    if (st == FL_OK && json_object_size(header) != n + (n_meta ? 1 : 0))
        st = fl_fail(err, FL_INVALID, "a name comes twice among %zu tensors", n);
    if (st == FL_OK)
        st = write_head(p, header, err);
    for (size_t i = 0; i < n && st == FL_OK; i++)
        p->off[i] += p->head_bytes;
    p->file_bytes = at + p->head_bytes;
    json_decref(header);
    free(o);
    if (st != FL_OK)
        plan_fini(p);
    return st;
}

enum fl_status st_write_image(const struct st_entry *t, size_t n, const struct st_meta *meta,
                              size_t n_meta, void **out, size_t *bytes, struct fl_err *err)
{
    struct plan p;

    FL_TRY(plan_make(&p, t, n, meta, n_meta, err));
    char *image = malloc(p.file_bytes);

    if (image) {
        memcpy(image, p.head, p.head_bytes);
        for (size_t i = 0; i < n; i++)
            if (p.bytes[i])
                memcpy(image + p.off[i], t[i].data, p.bytes[i]);
        *out = image;
        *bytes = p.file_bytes;
    }
    enum fl_status st = image ? FL_OK
                              : fl_fail(err, FL_EXHAUSTED, "no memory for an image of %llu bytes",
                                        (unsigned long long)p.file_bytes);

    plan_fini(&p);
    return st;
}

/* ---- files ---- */

struct st_writer {
    struct plan p;
    size_t n;
    uint64_t *written; /* per tensor */
    char *path, *tmp;  /* tmp NULL: it has its name, or was never made */
    int fd;
};

static enum fl_status write_at(struct st_writer *w, const void *data, size_t bytes, uint64_t off,
                               struct fl_err *err)
{
    const char *at = data;

    while (bytes > 0) {
        ssize_t n = FL_FAULT("fmt.write") ? -1 : pwrite(w->fd, at, bytes, (off_t)off);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fl_fail_errno(err, "write %zu bytes to %s", bytes, w->tmp);
        at += n;
        off += (uint64_t)n;
        bytes -= (size_t)n;
    }
    return FL_OK;
}

enum fl_status st_writer_create(const char *path, const struct st_entry *t, size_t n,
                                const struct st_meta *meta, size_t n_meta, struct st_writer **out,
                                struct fl_err *err)
{
    FL_AUTO(st_writer) struct st_writer *w = calloc(1, sizeof(*w));

    if (!w)
        return fl_fail(err, FL_EXHAUSTED, "no memory to write %s", path);
    w->fd = -1;
    FL_TRY(plan_make(&w->p, t, n, meta, n_meta, err));
    w->n = n;
    w->written = calloc(n + 1, sizeof(*w->written));
    w->path = strdup(path);
    if (!w->written || !w->path || asprintf(&w->tmp, "%s.tmp", path) < 0) {
        w->tmp = NULL;
        return fl_fail(err, FL_EXHAUSTED, "no memory to write %s", path);
    }
    w->fd = FL_FAULT("fmt.create")
                ? -1
                : open(w->tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (w->fd < 0)
        return fl_fail_errno(err, "create %s", w->tmp);
    FL_TRY(write_at(w, w->p.head, w->p.head_bytes, 0, err));
    *out = FL_TAKE(w);
    return FL_OK;
}

enum fl_status st_write_part(struct st_writer *w, size_t i, const void *data, size_t bytes,
                             struct fl_err *err)
{
    if (i >= w->n || bytes > w->p.bytes[i] - w->written[i])
        return fl_fail(err, FL_INVALID,
                       "%s: %zu bytes more of tensor %zu of %zu are more than it has", w->path,
                       bytes, i, w->n);
    FL_TRY(write_at(w, data, bytes, w->p.off[i] + w->written[i], err));
    w->written[i] += bytes;
    return FL_OK;
}

enum fl_status st_sync_folder_of(const char *path, struct fl_err *err)
{
    char dir[FL_PATH_MAX];
    const char *slash = strrchr(path, '/');

    FL_TRY(fl_path(dir, err, "%.*s", slash ? (int)(slash - path + 1) : 1, slash ? path : "."));
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool ok = fd >= 0 && fsync(fd) == 0;
    enum fl_status st = ok ? FL_OK : fl_fail_errno(err, "sync folder %s", dir);

    if (fd >= 0)
        close(fd);
    return st;
}

enum fl_status st_writer_finish(struct st_writer *w, struct fl_err *err)
{
    for (size_t i = 0; i < w->n; i++)
        if (w->written[i] != w->p.bytes[i])
            return fl_fail(err, FL_INVALID, "%s: tensor %zu of %zu has %llu of %llu bytes", w->path,
                           i, w->n, (unsigned long long)w->written[i],
                           (unsigned long long)w->p.bytes[i]);
    if (FL_FAULT("fmt.fsync") || fsync(w->fd) < 0)
        return fl_fail_errno(err, "sync %s", w->tmp);
    if (FL_FAULT("fmt.rename") || rename(w->tmp, w->path) < 0)
        return fl_fail_errno(err, "rename %s to %s", w->tmp, w->path);
    free(w->tmp);
    w->tmp = NULL;
    return st_sync_folder_of(w->path, err);
}

void st_writer_destroy(struct st_writer *w)
{
    if (!w)
        return;
    if (w->fd >= 0)
        close(w->fd);
    if (w->tmp && w->fd >= 0)
        (void)unlink(w->tmp); /* may be gone with its folder */
    plan_fini(&w->p);
    free(w->written);
    free(w->path);
    free(w->tmp);
    free(w);
}

enum fl_status st_write_file(const char *path, const struct st_entry *t, size_t n,
                             const struct st_meta *meta, size_t n_meta, struct fl_err *err)
{
    FL_AUTO(st_writer) struct st_writer *w = NULL;

    FL_TRY(st_writer_create(path, t, n, meta, n_meta, &w, err));
    for (size_t i = 0; i < n; i++)
        if (w->p.bytes[i])
            FL_TRY(st_write_part(w, i, t[i].data, w->p.bytes[i], err));
    return st_writer_finish(w, err);
}

/* ---- folders ---- */

static uint64_t entry_bytes(const struct st_entry *e)
{
    uint64_t bytes = 0;

    return st_dtype_of(e->dtype) && st_size(st_dtype_of(e->dtype), e->ndim, e->shape, &bytes)
               ? bytes
               : 0;
}

size_t st_take_file(const struct st_entry *t, size_t n, uint64_t file_bytes)
{
    uint64_t sum = 0;
    size_t k = 0;

    while (k < n && (k == 0 || sum + entry_bytes(&t[k]) <= file_bytes))
        sum += entry_bytes(&t[k++]);
    return k;
}

static enum fl_status write_index(const char *dir, json_t *map, uint64_t total,
                                  const struct st_meta *meta, size_t n_meta, struct fl_err *err)
{
    json_t *root =
        json_pack("{s:{s:I}, s:O}", "metadata", "total_size", (json_int_t)total, "weight_map", map);
    char path[FL_PATH_MAX], *text = NULL;
    enum fl_status st = fl_path(path, err, "%s/model.safetensors.index.json", dir);

    for (size_t i = 0; i < n_meta && root; i++)
        json_object_set_new(json_object_get(root, "metadata"), meta[i].key,
                            json_string(meta[i].value));
    if (st == FL_OK && (!root || !(text = json_dumps(root, JSON_INDENT(2) | JSON_PRESERVE_ORDER))))
        st = fl_fail(err, FL_EXHAUSTED, "no memory for the index of %s", dir);
    if (st == FL_OK)
        st = fl_file_write(path, 0666, text, strlen(text), err);
    free(text);
    json_decref(root);
    return st;
}

static enum fl_status write_files(const char *dir, const struct st_entry *t, size_t n,
                                  uint64_t file_bytes, size_t files, json_t *map,
                                  struct fl_err *err)
{
    char path[FL_PATH_MAX], name[48];
    size_t at = 0;

    for (size_t f = 1; f <= files; f++) {
        size_t k = st_take_file(t + at, n - at, file_bytes);

        snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", f, files);
        FL_TRY(fl_path(path, err, "%s/%s", dir, name));
        FL_TRY(st_write_file(path, t + at, k, NULL, 0, err));
        for (size_t i = 0; i < k; i++)
            if (json_object_set_new(map, t[at + i].name, json_string(name)) < 0)
                return fl_fail(err, FL_EXHAUSTED, "no memory for the index of %s", dir);
        at += k;
    }
    return FL_OK;
}

enum fl_status st_write_folder(const char *dir, const struct st_entry *t, size_t n,
                               const struct st_meta *meta, size_t n_meta, uint64_t file_bytes,
                               struct fl_err *err)
{
    char path[FL_PATH_MAX];
    uint64_t total = 0;
    size_t files = 0;

    if (file_bytes == 0)
        file_bytes = 5000000000ull;
    for (size_t at = 0; at < n; files++)
        at += st_take_file(t + at, n - at, file_bytes);
    if (files > ST_MAX_FILES)
        return fl_fail(err, FL_INVALID, "%zu files of %llu bytes, at most %d", files,
                       (unsigned long long)file_bytes, ST_MAX_FILES);
    if (files <= 1) {
        FL_TRY(fl_path(path, err, "%s/model.safetensors", dir));
        return st_write_file(path, t, n, meta, n_meta, err);
    }
    for (size_t i = 0; i < n; i++)
        total += entry_bytes(&t[i]);
    json_t *map = json_object();
    enum fl_status st = map ? write_files(dir, t, n, file_bytes, files, map, err)
                            : fl_fail(err, FL_EXHAUSTED, "no memory for the index of %s", dir);

    if (st == FL_OK && json_object_size(map) != n)
        st = fl_fail(err, FL_INVALID, "a name comes twice among %zu tensors", n);
    if (st == FL_OK)
        st = write_index(dir, map, total, meta, n_meta, err);
    json_decref(map);
    return st;
}
