#include "kernels/launch.h"

#include <pthread.h>

#include "kernels/launch_priv.h"

/* Blocks a multiprocessor: more than it holds at once, so that early ones make room for late
 * ones. 1.2 GB on an H200: 0.613 ms with 4, 0.599 with 8. Each takes pieces in turn until none
 * is left. */
enum { BLOCKS_EACH = 8 };
static const char *const move_names[] = {
    [KERNEL_NO_CAST] = "furlong_move",
    [KERNEL_F32_TO_BF16] = "furlong_move_bf16",
    [KERNEL_F32_TO_F16] = "furlong_move_f16",
};

/* ==== the twins, with the device's parameters ==== */
static uint64_t param(void **params, unsigned i)
{
    return *(const uint64_t *)params[i];
}

static void *at(uint64_t addr)
{
    return (void *)(uintptr_t)addr;
}

static void run_move(void **params, enum kernel_cast cast)
{
    kernel_move(at(param(params, 0)), param(params, 1), at(param(params, 2)), at(param(params, 3)),
                at(param(params, 4)), cast);
}

static void twin_move(uint32_t grid, uint32_t block, void **params)
{
    (void)grid;
    (void)block;
    run_move(params, KERNEL_NO_CAST);
}

static void twin_move_bf16(uint32_t grid, uint32_t block, void **params)
{
    (void)grid;
    (void)block;
    run_move(params, KERNEL_F32_TO_BF16);
}

static void twin_move_f16(uint32_t grid, uint32_t block, void **params)
{
    (void)grid;
    (void)block;
    run_move(params, KERNEL_F32_TO_F16);
}

static void twin_changed(uint32_t grid, uint32_t block, void **params)
{
    (void)grid;
    (void)block;
    kernel_changed(at(param(params, 0)), at(param(params, 1)), param(params, 2),
                   *(const uint32_t *)params[3], at(param(params, 4)));
}

static const struct gpu_twin twins[] = {
    { "furlong_move", twin_move, { 8, 8, 8, 8, 8 } },
    { "furlong_digest", twin_move, { 8, 8, 8, 8, 8 } },
    { "furlong_move_bf16", twin_move_bf16, { 8, 8, 8, 8, 8 } },
    { "furlong_move_f16", twin_move_f16, { 8, 8, 8, 8, 8 } },
    { "furlong_changed", twin_changed, { 8, 8, 8, 4, 8 } },
};

/* ==== launches ==== */
static void note_code(void)
{
    const struct gpu_code code = { kernels_image_bytes ? kernels_image : NULL, twins,
                                   FL_LEN(twins) };

    gpu_code_set(&code);
}

static enum fl_status start(const struct gpu_ops *gpu, const struct gpu *g, struct gpu_stream *s,
                            const char *name, uint64_t items, bool beside, void **params,
                            struct fl_err *err)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    uint64_t all = (uint64_t)gpu->info(g)->multiprocessors;
    uint64_t most = beside ? (all + 1) / 2 : all * BLOCKS_EACH;
    struct gpu_launch l = { .kernel = name,
                            .grid = (uint32_t)(items < most ? items : most),
                            .block = KERNEL_MOVE_BLOCK,
                            .params = params };

    if (items == 0)
        return FL_OK;
    pthread_once(&once, note_code);
    return gpu->launch(s, &l, err);
}

enum fl_status kernel_move_start(const struct gpu_ops *gpu, const struct gpu *g,
                                 struct gpu_stream *s, const struct kernel_move_args *a,
                                 struct fl_err *err)
{
    struct kernel_move_args copy = *a;
    void *params[] = { &copy.pieces, &copy.n, &copy.from, &copy.to, &copy.digests };

    return start(gpu, g, s, a->to ? move_names[a->cast] : "furlong_digest", a->n, a->beside, params,
                 err);
}

enum fl_status kernel_changed_start(const struct gpu_ops *gpu, const struct gpu *g,
                                    struct gpu_stream *s, const struct kernel_changed_args *a,
                                    struct fl_err *err)
{
    struct kernel_changed_args copy = *a;
    void *params[] = { &copy.a, &copy.b, &copy.bytes, &copy.block_bytes, &copy.flags };

    if (a->block_bytes == 0)
        return fl_fail(err, FL_INVALID, "changed blocks of 0 bytes");
    return start(gpu, g, s, "furlong_changed", (a->bytes + a->block_bytes - 1) / a->block_bytes,
                 false, params, err);
}

bool kernel_has_device_code(void)
{
    return kernels_image_bytes != 0;
}
