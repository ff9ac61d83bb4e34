/* tests/fmt/versions.h - a small model in several versions, in a folder and as a host's copy */
#pragma once
#include "tests/t.h"
#include "transport/fmt/delta.h"

enum { V_TENSORS = 5, V_VERSIONS = 5, V_MOST = 3000 };
extern const struct st_entry v_shapes[V_TENSORS];
extern unsigned char v_truth[V_VERSIONS][V_TENSORS][V_MOST];
void v_make(void); /* once, before all */
uint64_t v_bytes(size_t tensor);
enum fl_status v_write(const char *dir, int v, int base, enum delta_encoding e, uint64_t file_bytes,
                       struct delta_stats *stats, struct fl_err *err);
const char *v_folder(const char *name); /* empty */
/* A new one with all versions: 0 is a base, 1 to 4 each from the one before. */
const char *v_write_all(const char *name, enum delta_encoding e, uint64_t file_bytes);
void v_local_is(const char *local, int v);
