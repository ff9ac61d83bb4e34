#include "common/gpu/cuda_priv.h"

#include <stdlib.h>
#include <string.h>

enum fl_status cuda_stream(struct gpu *g, struct gpu_stream **out, struct fl_err *err)
{
    struct gpu_stream *s = calloc(1, sizeof(*s));
    cu_result r;

    if (!s)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a stream");
    s->g = g;
    r = cuda.current(g->context);
    if (r == CU_OK)
        r = cuda.stream(&s->s, CU_STREAM_NON_BLOCKING);
    if (r != CU_OK) {
        free(s);
        return cuda_failed(err, r, "stream on device", (uint64_t)g->info.ordinal);
    }
    *out = s;
    return FL_OK;
}

void cuda_stream_free(struct gpu_stream *s)
{
    if (!s)
        return;
    (void)cuda.current(s->g->context);
    (void)cuda.stream_free(s->s);
    free(s);
}

enum fl_status cuda_raw_sync(struct gpu *g, void *raw, struct fl_err *err)
{
    FL_TRY(cuda_use(g, err));
    CUDA_CHECK(err, "wait for a stream of device", g->info.ordinal, cuda.stream_sync(raw));
    return FL_OK;
}

void *cuda_stream_raw(struct gpu_stream *s)
{
    return s->s;
}

enum fl_status cuda_stream_sync(struct gpu_stream *s, struct fl_err *err)
{
    FL_TRY(cuda_use(s->g, err));
    CUDA_CHECK(err, "wait for device", s->g->info.ordinal, cuda.stream_sync(s->s));
    return FL_OK;
}

enum fl_status cuda_stream_wait(struct gpu_stream *s, struct gpu_event *e, struct fl_err *err)
{
    FL_TRY(cuda_use(s->g, err));
    CUDA_CHECK(err, "order streams on device", s->g->info.ordinal, cuda.stream_wait(s->s, e->e, 0));
    return FL_OK;
}

enum fl_status cuda_event(struct gpu *g, struct gpu_event **out, struct fl_err *err)
{
    struct gpu_event *e = calloc(1, sizeof(*e));
    cu_result r;

    if (!e)
        return fl_fail(err, FL_EXHAUSTED, "no memory for an event");
    e->g = g;
    r = cuda.current(g->context);
    if (r == CU_OK)
        r = cuda.event(&e->e, 0);
    if (r != CU_OK) {
        free(e);
        return cuda_failed(err, r, "event on device", (uint64_t)g->info.ordinal);
    }
    *out = e;
    return FL_OK;
}

void cuda_event_free(struct gpu_event *e)
{
    if (!e)
        return;
    (void)cuda.current(e->g->context);
    (void)cuda.event_free(e->e);
    free(e);
}

enum fl_status cuda_event_record(struct gpu_event *e, struct gpu_stream *s, struct fl_err *err)
{
    FL_TRY(cuda_use(s->g, err));
    CUDA_CHECK(err, "record on device", s->g->info.ordinal, cuda.event_record(e->e, s->s));
    return FL_OK;
}

enum fl_status cuda_event_done(struct gpu_event *e, struct fl_err *err)
{
    FL_TRY(cuda_use(e->g, err));
    cu_result r = cuda.event_query(e->e);

    return r == CU_OK          ? FL_OK
           : r == CU_NOT_READY ? FL_AGAIN
                               : cuda_failed(err, r, "device", (uint64_t)e->g->info.ordinal);
}

enum fl_status cuda_event_sync(struct gpu_event *e, struct fl_err *err)
{
    FL_TRY(cuda_use(e->g, err));
    CUDA_CHECK(err, "wait for device", e->g->info.ordinal, cuda.event_sync(e->e));
    return FL_OK;
}

enum fl_status cuda_event_ms(struct gpu_event *from, struct gpu_event *to, float *ms,
                             struct fl_err *err)
{
    FL_TRY(cuda_use(from->g, err));
    CUDA_CHECK(err, "time on device", from->g->info.ordinal, cuda.event_ms(ms, from->e, to->e));
    return FL_OK;
}

enum fl_status cuda_copy(struct gpu_stream *s, uint64_t to, uint64_t from, uint64_t bytes,
                         struct fl_err *err)
{
    FL_TRY(cuda_use(s->g, err));
    CUDA_CHECK(err, "copy bytes", bytes, cuda.copy(to, from, bytes, s->s));
    return FL_OK;
}

enum fl_status cuda_fill(struct gpu_stream *s, uint64_t to, uint8_t value, uint64_t bytes,
                         struct fl_err *err)
{
    FL_TRY(cuda_use(s->g, err));
    CUDA_CHECK(err, "fill bytes", bytes, cuda.fill(to, value, bytes, s->s));
    return FL_OK;
}

/* Functions are looked up once: a launch costs no names. */
static enum fl_status find_kernel(struct gpu *g, const char *name, cu_function *out,
                                  struct fl_err *err)
{
    for (size_t i = 0; i < g->n_kernels; i++)
        if (strcmp(g->kernels[i].name, name) == 0) {
            *out = g->kernels[i].f;
            return FL_OK;
        }
    if (!gpu_code.image)
        return fl_fail(err, FL_UNSUPPORTED, "kernel %s: this build has no device code", name);
    if (g->n_kernels == KERNELS_MAX)
        return fl_fail(err, FL_INTERNAL, "kernel %s: more than %d kernels", name, KERNELS_MAX);
    if (!g->module)
        CUDA_CHECK(err, "load device code for compute capability",
                   g->info.major * 10 + g->info.minor, cuda.module(&g->module, gpu_code.image));
    CUDA_CHECK(err, name, 0, cuda.function(out, g->module, name));
    g->kernels[g->n_kernels].name = name;
    g->kernels[g->n_kernels++].f = *out;
    return FL_OK;
}

enum fl_status cuda_launch(struct gpu_stream *s, const struct gpu_launch *l, struct fl_err *err)
{
    cu_function f;

    FL_TRY(cuda_use(s->g, err));
    FL_TRY(find_kernel(s->g, l->kernel, &f, err));
    CUDA_CHECK(
        err, l->kernel, l->grid,
        cuda.launch(f, l->grid, 1, 1, l->block, 1, 1, l->shared_bytes, s->s, l->params, NULL));
    return FL_OK;
}

enum fl_status cuda_sync(struct gpu *g, struct fl_err *err)
{
    FL_TRY(cuda_use(g, err));
    CUDA_CHECK(err, "wait for device", g->info.ordinal, cuda.sync());
    return FL_OK;
}
