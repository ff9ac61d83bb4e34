/* transport/fmt/delta_priv.h - what writing and applying of deltas share */
#pragma once
#include "transport/fmt/delta.h"

enum { DELTA_SUM = 33 }; /* XXH3-128 as hex, with its end */
void delta_checksum(const void *data, size_t bytes, char out[DELTA_SUM]);
/* DIR/weight_v000012 */
enum fl_status delta_dir(const char *dir, int64_t version, char *out, struct fl_err *err);
uint64_t delta_item_bytes(enum fl_dtype t);            /* 0: no dtype */
uint64_t delta_entry_bytes(const struct st_entry *what);
