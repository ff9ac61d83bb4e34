/* transport/fmt/delta_priv.h - what writing, applying and bringing together of versions share */
#pragma once
#include <jansson.h>
#include "transport/fmt/delta.h"

enum { DELTA_SUM = 33 }; /* XXH3-128 as hex, with its end */
#define DELTA_FILE_BYTES (256ull << 20)
void delta_checksum(const void *data, size_t bytes, char out[DELTA_SUM]);
/* DIR/weight_v000012, DIR/base_v000012 */
enum fl_status delta_dir(const char *dir, int64_t version, char *out, struct fl_err *err);
enum fl_status delta_base_dir(const char *dir, int64_t version, char *out, struct fl_err *err);
/* A base_v is written under that name, and renamed when it is whole. */
#define DELTA_PART ".part"
bool delta_is_written(const char *folder); /* it has its index */
uint64_t delta_item_bytes(enum fl_dtype t);            /* 0: no dtype */
uint64_t delta_entry_bytes(const struct st_entry *what);
/* Of version, base_version, encoding and extra; map: tensor to file name. It makes the folder a version. */
enum fl_status delta_index_write(const char *folder, const struct delta_opts *o, json_t *map,
                                 struct fl_err *err);
enum fl_status delta_base_open(const char *dir, int64_t version, struct delta_version **out,
                               struct fl_err *err); /* of base_v; else as delta_open */
/* As delta_apply; without check the result is not compared with its checksum. */
enum fl_status delta_apply_to(const struct delta_version *v, const struct st_entry *what,
                              const void *was, void *to, bool check, struct fl_err *err);

/* A whole version and the changes after it, mapped: version by version, oldest first. */
struct delta_chain {
    struct st_reader *local; /* it begins there; NULL: v[0] is a base */
    int64_t local_version;
    struct delta_version **v;
    size_t n, cap;
    int64_t base;            /* v[0] is the base_v of that version; DELTA_NO_BASE: it is none */
    int64_t bad_base;        /* the one that was found to be damaged last */
    const atomic_int *pace;  /* NULL, or enum delta_pace */
};
/* Finds a chain to version and lets use() make something of it. Where files of it are damaged, or are removed
 * meanwhile, use() is called again with a chain that has others, if there is one: first from local, then from
 * the newest base, then from older ones. c: local and pace are set; local is the chain's from here on. */
typedef enum fl_status (*delta_use)(struct delta_chain *c, void *arg, struct fl_err *err);
enum fl_status delta_chain_over(struct delta_chain *c, const char *dir, int64_t version,
                                delta_use use, void *arg, struct fl_err *err);
/* The whole version: e (free() it) without data, in the order of the names; most: bytes of the largest. */
enum fl_status delta_chain_entries(const struct delta_chain *c, struct st_entry **e, size_t *n,
                                   uint64_t *most, struct fl_err *err);
/* One tensor through all versions, in one buffer. What comes out has been compared. */
enum fl_status delta_chain_carry(struct delta_chain *c, const struct st_entry *e, void *buf,
                                 struct fl_err *err);
