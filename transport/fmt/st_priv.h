/* transport/fmt/st_priv.h - what reading and writing of safetensors share */
#pragma once
#include "transport/fmt/safetensors.h"

struct st_dtype { const char *name; uint8_t bits; bool known; enum fl_dtype dtype; };
const struct st_dtype *st_dtype_named(const char *name);     /* NULL: not one of the format */
const struct st_dtype *st_dtype_of(enum fl_dtype t);         /* NULL: no dtype */
/* "BF16 [2, 3]" into line; returns it */
const char *st_shape_line(const char *dtype, unsigned ndim, const uint64_t *shape, char *line, size_t room);
/* product x bits / 8; false: too large, or not whole bytes */
bool st_size(const struct st_dtype *t, unsigned ndim, const uint64_t *shape, uint64_t *bytes);
/* How many of t go into one file: at least one. */
size_t st_take_file(const struct st_entry *t, size_t n, uint64_t file_bytes);
enum fl_status st_sync_folder_of(const char *path, struct fl_err *err);
