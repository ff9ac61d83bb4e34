/* common/gpu/watch.h - what a daemon may know of devices without opening one
 *
 * Through NVML, which makes no context and opens nothing that a child would inherit in use. What a
 * device does not say (an integrated one: its memory) is UINT64_MAX, never an error and never "no
 * device". With FURLONG_GPU=fake the fake's devices answer. Any thread. */
#pragma once
#include "common/gpu/gpu.h"

struct gpu_seen {
    char uuid[GPU_UUID_BYTES], name[64];
    int major, minor;
    uint64_t total_bytes, free_bytes; /* UINT64_MAX: not said */
    uint32_t busy_pct;                /* UINT32_MAX: not said */
};
/* *n: room in, count out. FL_UNSUPPORTED: no NVML here, err says what was looked for. */
enum fl_status gpu_watch(struct gpu_seen *out, size_t *n, struct fl_err *err);

/* Whether the device was slowed by heat or by its power brake since the last call (at the first:
 * whether it is now), for clean and unclean steps. Running at the power cap is how a busy device
 * runs, and does not count. FL_UNSUPPORTED: not told. FL_NOT_FOUND: no such device. */
enum fl_status gpu_slowdown(const char *uuid, bool *slowed, struct fl_err *err);

/* Processes that hold memory on the device, as the host numbers them: inside a pid namespace they
 * match nothing. bytes: UINT64_MAX where not said. FL_UNSUPPORTED: not told. */
struct gpu_user {
    uint32_t pid;
    uint64_t bytes;
};
enum fl_status gpu_users(const char *uuid, struct gpu_user *out, size_t *n, struct fl_err *err);
