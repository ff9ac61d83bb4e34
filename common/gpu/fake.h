/* common/gpu/fake.h - which devices the fake has, which of them a process sees, and who holds how
 * much
 *
 * FURLONG_GPU=fake, fake:N or fake:gb10. As a driver does, a process sees those of
 * CUDA_VISIBLE_DEVICES alone, in that order. FURLONG_GPU_FAKE_BYTES: memory of each (default
 * 1 GiB), beyond which allocation fails; FURLONG_GPU_FAKE_NAME: of the product;
 * FURLONG_GPU_FAKE_VMM=0: without chunks, as virtual GPUs and WSL are. With
 * FURLONG_GPU_FAKE_DIR, a folder, processes note there what they hold: the driver's table of
 * processes, which gpu_watch_procs() reads. FURLONG_GPU_FAKE_GUARD: guard.h;
 * FURLONG_GPU_FAKE_ASYNC: later.h. */
#pragma once
#include "common/gpu/watch.h"

struct later;

/* What gpu_ops.stream_raw gives of the fake and of host memory: a library that stands in for NCCL
 * reaches the device's memory between the two. */
struct fake_stream {
    void (*begins)(void), (*ends)(void);
    /* Streams whose work happens later: run(arg) in its turn. NULL: do it now. */
    bool (*then)(struct later *later, void (*run)(void *arg), const void *arg, size_t bytes);
    struct later *later;
};

/* What the machine has, for daemons; CUDA_VISIBLE_DEVICES does not count. *n: room in, count
 * out. */
enum fl_status gpu_fake_list(struct gpu_info *out, size_t *n, struct fl_err *err);
/* What this process sees. */
enum fl_status gpu_fake_visible(struct gpu_info *out, size_t *n, struct fl_err *err);
size_t fake_device(const char *uuid); /* its place in the machine; GPU_MAX: none */
struct gpu_info fake_describe(size_t device);
void fake_pci(size_t device, char out[32]);

/* Of this process; GPU_MAX devices. */
void fake_hold(size_t device);                 /* opened: in the table from now on, with no bytes */
bool fake_take(size_t device, uint64_t bytes); /* false: it has not so many left */
void fake_give(size_t device, uint64_t bytes);
uint64_t fake_held(size_t device);

/* Of all processes that live. FL_UNSUPPORTED: no FURLONG_GPU_FAKE_DIR. */
enum fl_status fake_procs(const char *uuid, struct gpu_proc *out, size_t *n, struct fl_err *err);
