/* common/gpu/watch.h - what a daemon may know of devices without opening one
 *
 * Through NVML, which makes no context and opens nothing that a child would inherit in use. What a
 * device does not say (an integrated one: its memory) is UINT64_MAX, never an error and never "no
 * device". With FURLONG_GPU=fake the fake's devices answer. One thread at a time. */
#pragma once
#include "common/gpu/gpu.h"

struct gpu_seen {
    char uuid[GPU_UUID_BYTES], name[64];
    char pci[32];                     /* as NVML writes it; "": not said               */
    int numa;                         /* -1: not known                                 */
    unsigned island;                  /* the same for devices that NVLink connects     */
    uint64_t total_bytes, free_bytes; /* UINT64_MAX: not said                          */
};

struct gpu_proc {
    int pid;        /* as the driver numbers them: the host's, whatever namespace one is in */
    uint64_t bytes; /* that it holds; UINT64_MAX: not said                                  */
    int sm_pct; /* of gpu_watch_busy(): time in which a kernel of it ran; -1: not said      */
};

struct gpu_watch;
/* lib NULL: libnvidia-ml.so.1; it takes 14 ms on two H200. FL_UNSUPPORTED: no NVML here, err says
 * what was looked for. */
enum fl_status gpu_watch_open(const char *lib, struct gpu_watch **out, struct fl_err *err);
void gpu_watch_close(struct gpu_watch *w); /* NULL is fine */

/* *n: room in, count out. */
enum fl_status gpu_watch_list(struct gpu_watch *w, struct gpu_seen *out, size_t *n,
                              struct fl_err *err);

/* Used memory of the device, for "is it back?". FL_UNSUPPORTED: not told. */
enum fl_status gpu_watch_used(struct gpu_watch *w, const char *uuid, uint64_t *used_bytes,
                              struct fl_err *err);

/* Whether the device was slowed by heat or by its power brake since the last call (at the first:
 * whether it is now): its steps take longer. Running at the power cap is how a busy device
 * runs, and does not count. FL_UNSUPPORTED: not told. FL_NOT_FOUND: no such device. */
enum fl_status gpu_watch_slowed(struct gpu_watch *w, const char *uuid, bool *slowed,
                                struct fl_err *err);

/* Who has the device open for computing. *n: room in, count out; more than there is room for are
 * left out. Any thread, beside the one of the others. FL_UNSUPPORTED: not told. */
enum fl_status gpu_watch_procs(struct gpu_watch *w, const char *uuid, struct gpu_proc *out,
                               size_t *n, struct fl_err *err);

/* How busy each of them kept the device since the last call for it (at the first: in the last
 * second), into sm_pct. One thread at a time. What the driver does not say is -1. */
void gpu_watch_busy(struct gpu_watch *w, const char *uuid, struct gpu_proc *procs, size_t n);
