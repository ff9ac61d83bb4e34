/* transport/link/nccl_api.h - the part of NCCL that is used, so that no NCCL is needed to build
 *
 * Names, numbers and layouts are NCCL's (2.18 and newer); a test compares them with nccl.h where
 * that is installed. */
#pragma once
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include "common/base/base.h"

typedef struct nccl_comm_ *nccl_comm;
struct nccl_id {
    char internal[128];
};
struct nccl_config { /* of 2.18: newer libraries fill in what is not there */
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
};
enum {
    NCCL_OK = 0,
    NCCL_IN_PROGRESS = 7,
    NCCL_UINT8 = 1,
    NCCL_CONFIG_MAGIC = 0xcafebeef,
    NCCL_CONFIG_VERSION = 21800,
    NCCL_UNDEFINED = INT_MIN,
    NCCL_OLDEST = 21800
};

#define NCCL_FUNCTIONS(F)                                                                          \
    F(version, "ncclGetVersion", int *version)                                                     \
    F(unique_id, "ncclGetUniqueId", struct nccl_id *id)                                            \
    F(init, "ncclCommInitRankConfig", nccl_comm *comm, int n, struct nccl_id id, int rank,         \
      struct nccl_config *config)                                                                  \
    F(async_error, "ncclCommGetAsyncError", nccl_comm comm, int *error)                            \
    F(abort, "ncclCommAbort", nccl_comm comm)                                                      \
    F(broadcast, "ncclBroadcast", const void *from, void *to, size_t count, int type, int root,    \
      nccl_comm comm, void *stream)

struct nccl_api {
#define NCCL_MEMBER(name, symbol, ...) int (*name)(__VA_ARGS__);
    NCCL_FUNCTIONS(NCCL_MEMBER)
#undef NCCL_MEMBER
    const char *(*error_text)(int error);
    uint32_t number; /* 22809 is 2.28.9 */
};
/* The one that is in the process already, else FURLONG_NCCL (a path), else libnccl.so.2. Once.
 * FL_UNSUPPORTED: err says what was looked for. */
enum fl_status nccl_load(const struct nccl_api **out, struct fl_err *err);
