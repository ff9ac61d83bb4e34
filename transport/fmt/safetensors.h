/* transport/fmt/safetensors.h - safetensors: images in memory, files, and folders of several files
 *
 * Reading trusts nothing: header of at most 16 MiB of strict UTF-8 JSON without duplicate keys, every dtype known,
 * every size computed without overflow, data without hole or overlap up to the last byte. What is
 * read is mapped, not copied, and stays good until the reader is destroyed. */
#pragma once
#include "common/base/base.h"

enum { ST_MAX_HEADER = 16 << 20 };   /* bytes; the format allows 100 MB, 71,000 tensors take 9 MB */
enum { ST_MAX_TENSORS = 1 << 20 };
enum { ST_MAX_FILES = 99999 };       /* model-%05d-of-%05d */
enum { ST_MAX_NAME = 512 };          /* bytes */

struct st_tensor {
    const char *name;
    enum fl_dtype dtype; /* valid if known; else dtype_name alone says it */
    bool known;          /* of enum fl_dtype; other legal dtypes are carried as bytes */
    char dtype_name[12];
    uint8_t ndim;
    uint64_t shape[FL_DIMS];
    const void *data; /* in the mapping; 8-byte aligned at best */
    uint64_t bytes;
    uint32_t file; /* of a folder; else 0 */
};
struct st_meta { const char *key, *value; };

/* An image in memory (borrowed, must outlive the reader), a file, or a folder with model.safetensors or
 * model.safetensors.index.json. FL_CORRUPT: not safetensors; err says which rule, which tensor, which values.
 * FL_NOT_FOUND, FL_DENIED: from the file system. */
struct st_reader;
enum fl_status st_read_image(const void *image, size_t bytes, struct st_reader **out,
                             struct fl_err *err);
enum fl_status st_read_file(const char *path, struct st_reader **out, struct fl_err *err);
enum fl_status st_read_folder(const char *dir, struct st_reader **out, struct fl_err *err);
size_t st_count(const struct st_reader *r);
const struct st_tensor *st_at(const struct st_reader *r, size_t i);            /* sorted by name */
const struct st_tensor *st_find(const struct st_reader *r, const char *name);  /* NULL: none     */
/* FL_NOT_FOUND, or FL_INVALID with what is wanted and what is there. */
enum fl_status st_need(const struct st_reader *r, const char *name, enum fl_dtype dtype,
                       unsigned ndim, const uint64_t *shape, const struct st_tensor **out,
                       struct fl_err *err);
const char *st_meta(const struct st_reader *r, const char *key); /* of __metadata__, for a folder of the index */
const char *st_file_meta(const struct st_reader *r, uint32_t file, const char *key);
size_t st_meta_count(const struct st_reader *r);
struct st_meta st_meta_at(const struct st_reader *r, size_t i);
void st_reader_destroy(struct st_reader *r);
FL_AUTO_DEFINE(st_reader)

/* Writing: declare all, then give the bytes of each in the declared order, then finish. A file appears
 * under its name when it is whole and on disk, or not at all (temporary name, fsync, rename, fsync of the
 * folder). The order in the file is ours: alignment down, then name; data begins 64-byte aligned. */
struct st_entry {
    const char *name;
    enum fl_dtype dtype;
    uint8_t ndim;
    uint64_t shape[FL_DIMS];
    const void *data; /* all of it; NULL: given by st_write_part() */
};
enum fl_status st_write_file(const char *path, const struct st_entry *t, size_t n,
                             const struct st_meta *meta, size_t n_meta, struct fl_err *err);
/* An image in memory; free() it. */
enum fl_status st_write_image(const struct st_entry *t, size_t n, const struct st_meta *meta,
                              size_t n_meta, void **out, size_t *bytes, struct fl_err *err);
/* Streaming: tensors in any order, each in parts from its beginning to its end. */
struct st_writer;
enum fl_status st_writer_create(const char *path, const struct st_entry *t, size_t n,
                                const struct st_meta *meta, size_t n_meta, struct st_writer **out,
                                struct fl_err *err);
enum fl_status st_write_part(struct st_writer *w, size_t i, const void *data, size_t bytes,
                             struct fl_err *err);
/* FL_INVALID: a tensor is not complete. Either way the writer is spent; destroy it. */
enum fl_status st_writer_finish(struct st_writer *w, struct fl_err *err);
void st_writer_destroy(struct st_writer *w); /* unfinished: removes the temporary file */
FL_AUTO_DEFINE(st_writer)
/* Into a new folder: files of at most file_bytes (0: 5 GB), model.safetensors alone if one is enough, else
 * model-%05d-of-%05d.safetensors and the index, which is written last and carries meta. */
enum fl_status st_write_folder(const char *dir, const struct st_entry *t, size_t n,
                               const struct st_meta *meta, size_t n_meta, uint64_t file_bytes,
                               struct fl_err *err);
