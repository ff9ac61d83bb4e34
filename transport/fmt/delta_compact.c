/* transport/fmt/delta_compact.c - a base from a base and what follows it
 *
 * It is made from the files alone, so whoever writes versions goes on meanwhile. What each tensor
 * must be is in the files as well: the checksum of the version that changed it last. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "common/base/file.h"
#include "transport/fmt/delta_priv.h"
#include "transport/fmt/st_priv.h"

struct compacting {
    struct delta_chain *chain;
    const char *dir, *part;
    int64_t version;
    uint64_t file_bytes;
    struct st_entry *e;
    struct st_meta *sums; /* one an entry */
    size_t n;
    void *buf; /* for the largest */
    json_t *map;
};

static const char *sum_of(const struct delta_chain *c, const char *tensor)
{
    for (size_t v = c->n; v-- > 0;) {
        const struct st_reader *r = delta_files(c->v[v]);
        const struct st_tensor *t = st_find(r, tensor);

        if (t)
            return st_file_meta(r, t->file, tensor);
    }
    return NULL;
}

/* A disk that runs full in the middle would also stop the writer of versions. */
static enum fl_status room_for(const struct compacting *k, struct fl_err *err)
{
    uint64_t bytes = 0, room;
    struct statvfs fs;

    for (size_t i = 0; i < k->n; i++)
        bytes += delta_entry_bytes(&k->e[i]);
    bytes += bytes / 8; /* and for what is written meanwhile */
    if (statvfs(k->dir, &fs) < 0)
        return fl_fail_errno(err, "look for room in %s", k->dir);
    room = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (FL_FAULT("fmt.compact_room") || (fs.f_blocks && room < bytes))
        return fl_fail(err, FL_EXHAUSTED,
                       "%s has room for %" PRIu64 " bytes, a base takes %" PRIu64, k->dir, room,
                       bytes);
    return FL_OK;
}

/* Tensors first to first + n - 1, one after the other through one buffer. */
static enum fl_status write_file(struct compacting *k, size_t first, size_t n, const char *name,
                                 struct fl_err *err)
{
    FL_AUTO(st_writer) struct st_writer *w = NULL;
    char path[FL_PATH_MAX];

    FL_TRY(fl_path(path, err, "%s/%s", k->part, name));
    FL_TRY(st_writer_create(path, k->e + first, n, k->sums + first, n, &w, err));
    for (size_t i = 0; i < n; i++) {
        const struct st_entry *e = &k->e[first + i];

        FL_TRY(delta_chain_carry(k->chain, e, k->buf, err));
        FL_TRY(st_write_part(w, i, k->buf, delta_entry_bytes(e), err));
        if (json_object_set_new(k->map, e->name, json_string(name)) < 0)
            return fl_fail(err, FL_EXHAUSTED, "no memory for the index of %s", k->part);
    }
    return st_writer_finish(w, err);
}

/* What else the version's index says, e.g. its digest, is true of its base, too. */
static enum fl_status write_index(struct compacting *k, struct fl_err *err)
{
    static const char *const not_those[] = { "version", "base_version", "delta_encoding",
                                             "compression_format", "checksum_format" };
    const struct st_reader *r = delta_files(k->chain->v[k->chain->n - 1]);
    struct st_meta *extra = calloc(st_meta_count(r) + 1, sizeof(*extra));
    struct delta_opts o = { .version = k->version, .base_version = DELTA_NO_BASE, .extra = extra };

    if (!extra)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the index of %s", k->part);
    for (size_t i = 0; i < st_meta_count(r); i++) {
        bool other = true;

        extra[o.n_extra] = st_meta_at(r, i);
        for (size_t j = 0; j < FL_LEN(not_those); j++)
            other &= strcmp(extra[o.n_extra].key, not_those[j]) != 0;
        o.n_extra += other;
    }
    enum fl_status st = delta_index_write(k->part, &o, k->map, err);

    free(extra);
    return st;
}

static enum fl_status write_files(struct compacting *k, struct fl_err *err)
{
    size_t files = 0, f = 0;
    char name[48];

    for (size_t at = 0; at < k->n; files++)
        at += st_take_file(k->e + at, k->n - at, k->file_bytes);
    if (files > ST_MAX_FILES)
        return fl_fail(err, FL_INVALID, "a base of %zu files, at most %d", files, ST_MAX_FILES);
    for (size_t i = 0; i < k->n; i++) {
        k->sums[i] = (struct st_meta){ k->e[i].name, sum_of(k->chain, k->e[i].name) };
        if (delta_entry_bytes(&k->e[i]) == 0 || !k->sums[i].value)
            return fl_fail(err, FL_CORRUPT, "tensor %.80s has no bytes, or no checksum",
                           k->e[i].name);
    }
    for (size_t at = 0, n; at < k->n; at += n) {
        n = st_take_file(k->e + at, k->n - at, k->file_bytes);
        snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", ++f, files);
        FL_TRY(write_file(k, at, n, name, err));
    }
    return write_index(k, err);
}

/* Anew each time: files that turn out to be damaged may have gone into what is there. */
static enum fl_status write_part(struct delta_chain *c, void *arg, struct fl_err *err)
{
    struct compacting *k = arg;
    uint64_t most;

    FL_TRY(fl_tree_remove(k->part, err));
    if (mkdir(k->part, 0777) < 0)
        return fl_fail_errno(err, "make folder %s", k->part);
    k->chain = c;
    FL_TRY(delta_chain_entries(c, &k->e, &k->n, &most, err));
    k->sums = calloc(k->n + 1, sizeof(*k->sums));
    k->buf = malloc(most);
    k->map = json_object();
    enum fl_status st =
        k->sums && k->buf && k->map
            ? room_for(k, err)
            : fl_fail(err, FL_EXHAUSTED, "no memory for a tensor of %" PRIu64 " bytes", most);

    if (st == FL_OK)
        st = write_files(k, err);
    free(FL_TAKE(k->e));
    free(FL_TAKE(k->sums));
    free(FL_TAKE(k->buf));
    json_decref(k->map);
    return st;
}

static enum fl_status give_name(const char *part, const char *whole, struct fl_err *err)
{
    FL_TRY(fl_tree_remove(whole, err)); /* a base that lost its index */
    if (FL_FAULT("fmt.compact") || rename(part, whole) < 0)
        return fl_fail_errno(err, "rename %s", part);
    return st_sync_folder_of(whole, err);
}

enum fl_status delta_compact(const char *dir, int64_t version, uint64_t file_bytes,
                             const atomic_int *pace, struct fl_err *err)
{
    struct delta_chain c = { .pace = pace };
    char whole[FL_PATH_MAX], part[FL_PATH_MAX];
    struct compacting k = { .dir = dir,
                            .part = part,
                            .version = version,
                            .file_bytes = file_bytes ? file_bytes : DELTA_FILE_BYTES };

    FL_TRY(delta_base_dir(dir, version, whole, err));
    FL_TRY(fl_path(part, err, "%s" DELTA_PART, whole));
    if (delta_is_written(whole))
        return fl_fail(err, FL_EXISTS, "%s is there already", whole);
    enum fl_status st = delta_chain_over(&c, dir, version, write_part, &k, err);

    if (st == FL_OK)
        st = give_name(part, whole, err);
    if (st != FL_OK)
        (void)fl_tree_remove(part, NULL); /* what stays is removed with the next one, or pruned */
    return st;
}
