#include <furlong/torch.h>
#include <stdatomic.h>

#include "worker/client/memory.h"

static _Thread_local struct fl_err last;

static enum fl_status by_index(int device, struct arena **out, struct fl_err *err)
{
    struct gpu_info all[GPU_MAX];
    const struct gpu_ops *gpu;
    size_t n = GPU_MAX;

    FL_TRY(gpu_pick(&gpu, err));
    FL_TRY(gpu->list(all, &n, err));
    if (device < 0 || (size_t)device >= n)
        return fl_fail(err, FL_NOT_FOUND, "device %d: this process sees %zu", device, n);
    return arena_of_device(all[device].uuid, out, err);
}

/* Asked for on every allocation: the answer of a process does not change. */
static struct arena *arena_at(int device, struct fl_err *err)
{
    static _Atomic(struct arena *) known[GPU_MAX];
    struct arena *a = device >= 0 && device < GPU_MAX ? atomic_load(&known[device]) : NULL;

    if (a || by_index(device, &a, err) != FL_OK)
        return a;
    atomic_store(&known[device], a);
    return a;
}

static void *give(enum furlong_tag tag, ssize_t bytes, int device)
{
    struct arena *a = arena_here(&last) == FL_OK ? arena_at(device, &last) : NULL;
    void *p = NULL;

    if (a && bytes > 0)
        (void)arena_alloc(a, tag, (uint64_t)bytes, 0, &p, &last);
    return p;
}

void *furlong_torch_alloc(ssize_t bytes, int device, void *stream)
{
    (void)stream; /* memory is there when this returns, whatever runs */
    return give(FURLONG_TAG_DEFAULT, bytes, device);
}

void *furlong_torch_alloc_weights(ssize_t bytes, int device, void *stream)
{
    (void)stream;
    return give(FURLONG_TAG_WEIGHTS, bytes, device);
}

void *furlong_torch_alloc_kv_cache(ssize_t bytes, int device, void *stream)
{
    (void)stream;
    return give(FURLONG_TAG_KV, bytes, device);
}

void *furlong_torch_alloc_cuda_graph(ssize_t bytes, int device, void *stream)
{
    (void)stream;
    return give(FURLONG_TAG_GRAPH, bytes, device);
}

void *furlong_torch_alloc_optimizer(ssize_t bytes, int device, void *stream)
{
    (void)stream;
    return give(FURLONG_TAG_OPTIMIZER, bytes, device);
}

void furlong_torch_free(void *p, ssize_t bytes, int device, void *stream)
{
    struct arena *a = p && arena_here(&last) == FL_OK ? arena_at(device, &last) : NULL;

    (void)bytes;
    (void)stream;
    if (!a)
        return;
    (void)arena_wait(a, NULL); /* as cudaFree: kernels that were given it may still run; a lost
                                  device is past that */
    arena_free(a, p);
}

static int outcome(enum fl_status st)
{
    return st == FL_OK ? 0 : -1;
}

int furlong_torch_keep(uint32_t tags, enum furlong_keep how, const char *folder)
{
    return outcome(arena_keep_all(tags, how, folder, &last));
}

int furlong_torch_offload(uint32_t tags, struct furlong_moved *out)
{
    struct arena_moved m = { 0 };
    enum fl_status st = arena_offload_all(tags, &m, &last);

    memory_shown(out, &m);
    return outcome(st);
}

int furlong_torch_onload(uint32_t tags, struct furlong_moved *out)
{
    struct arena_moved m = { 0 };
    enum fl_status st = arena_onload_all(tags, &m, &last);

    memory_shown(out, &m);
    return outcome(st);
}

const char *furlong_torch_error(void)
{
    return last.text;
}
