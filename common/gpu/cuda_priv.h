/* common/gpu/cuda_priv.h - the driver by its functions: devices and memory (cuda.c), streams,
 * events and kernels (cuda_stream.c) */
#pragma once
#include "common/gpu/cuda_api.h"
#include "common/gpu/gpu_priv.h"

enum { KERNELS_MAX = 32 };
struct gpu {
    struct gpu_info info;
    cu_device device;
    cu_context context;
    cu_module module; /* loaded at the first launch */
    struct {
        const char *name;
        cu_function f;
    } kernels[KERNELS_MAX];
    size_t n_kernels;
    struct pinned *pinned;
};
struct gpu_stream {
    struct gpu *g;
    cu_stream s;
};
struct gpu_event {
    struct gpu *g;
    cu_event e;
};

extern struct cu_api cuda; /* filled by the first call that lists or opens */

enum fl_status cuda_failed(struct fl_err *err, cu_result r, const char *what, uint64_t n);
/* CUDA_CHECK(err, "what", n, call): returns what the driver said, as a status. */
#define CUDA_CHECK(err, what, n, call)                                                             \
    do {                                                                                           \
        cu_result r_ = (call);                                                                     \
        if (r_ != CU_OK)                                                                           \
            return cuda_failed(err, r_, what, (uint64_t)(n));                                      \
    } while (0)

static inline enum fl_status cuda_use(struct gpu *g, struct fl_err *err)
{
    CUDA_CHECK(err, "use device", g->info.ordinal, cuda.current(g->context));
    return FL_OK;
}

enum fl_status cuda_stream(struct gpu *g, struct gpu_stream **out, struct fl_err *err);
void cuda_stream_free(struct gpu_stream *s);
enum fl_status cuda_raw_sync(struct gpu *g, void *raw, struct fl_err *err);
void *cuda_stream_raw(struct gpu_stream *s);
enum fl_status cuda_stream_sync(struct gpu_stream *s, struct fl_err *err);
enum fl_status cuda_stream_wait(struct gpu_stream *s, struct gpu_event *e, struct fl_err *err);
enum fl_status cuda_event(struct gpu *g, struct gpu_event **out, struct fl_err *err);
void cuda_event_free(struct gpu_event *e);
enum fl_status cuda_event_record(struct gpu_event *e, struct gpu_stream *s, struct fl_err *err);
enum fl_status cuda_event_done(struct gpu_event *e, struct fl_err *err);
enum fl_status cuda_event_sync(struct gpu_event *e, struct fl_err *err);
enum fl_status cuda_event_ms(struct gpu_event *from, struct gpu_event *to, float *ms,
                             struct fl_err *err);
enum fl_status cuda_copy(struct gpu_stream *s, uint64_t to, uint64_t from, uint64_t bytes,
                         struct fl_err *err);
enum fl_status cuda_fill(struct gpu_stream *s, uint64_t to, uint8_t value, uint64_t bytes,
                         struct fl_err *err);
enum fl_status cuda_launch(struct gpu_stream *s, const struct gpu_launch *l, struct fl_err *err);
enum fl_status cuda_sync(struct gpu *g, struct fl_err *err);
