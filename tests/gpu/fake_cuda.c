/* tests/gpu/fake_cuda.c - a libcuda.so.1 that only looks like it: what the table of the real driver
 * does with its answers, where no device is
 *
 * Memory is malloc's and nothing runs. FAKE_CUDA_INIT, FAKE_CUDA_RETAIN, FAKE_CUDA_MODULE: the
 * number that these answer with; FAKE_CUDA_MIG=1, FAKE_CUDA_INTEGRATED=1. Like the driver, calls
 * want a context that is current on the calling thread. */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/gpu/cuda_api.h"

enum { INVALID_CONTEXT = 201 };
static _Thread_local cu_context current;
static char the_context;
static atomic_int contexts, streams, events, chunks, modules;
/* How many of each there are now. */
int fake_cuda_left(void);

/* clang-format off */
#define EXPORT __attribute__((visibility("default")))
#define ANSWER(name, ...) EXPORT cu_result name(__VA_ARGS__); cu_result name(__VA_ARGS__)
#define NEEDS_CONTEXT do { if (current != (void *)&the_context) return INVALID_CONTEXT; } while (0)
/* clang-format on */

static int said(const char *name)
{
    const char *word = getenv(name);

    return word ? atoi(word) : 0;
}

int fake_cuda_left(void)
{
    return contexts + streams + events + chunks + modules;
}

ANSWER(cuInit, unsigned flags)
{
    (void)flags;
    return said("FAKE_CUDA_INIT");
}
ANSWER(cuGetErrorName, cu_result r, const char **name)
{
    *name = r == 802   ? "CUDA_ERROR_SYSTEM_NOT_READY"
            : r == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
            : r == 46  ? "CUDA_ERROR_DEVICE_UNAVAILABLE"
            : r == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
            : r == 304 ? "CUDA_ERROR_OPERATING_SYSTEM"
                       : "CUDA_ERROR_OTHER";
    return CU_OK;
}
ANSWER(cuGetErrorString, cu_result r, const char **text)
{
    *text = r == 802 ? "system not yet initialized" : "as it says";
    return CU_OK;
}
ANSWER(cuDeviceGetCount, int *n)
{
    *n = 1;
    return CU_OK;
}
ANSWER(cuDeviceGet, cu_device *d, int ordinal)
{
    *d = ordinal;
    return CU_OK;
}
ANSWER(cuDeviceGetUuid, struct cu_uuid *u, cu_device d)
{
    (void)d;
    memset(u, 0x11, sizeof(*u));
    return CU_OK;
}
ANSWER(cuDeviceGetUuid_v2, struct cu_uuid *u, cu_device d)
{
    (void)d;
    memset(u, said("FAKE_CUDA_MIG") ? 0x22 : 0x11, sizeof(*u));
    return CU_OK;
}
ANSWER(cuDeviceGetName, char *name, int len, cu_device d)
{
    (void)d;
    snprintf(name, (size_t)len, "Stand-in");
    return CU_OK;
}
ANSWER(cuDeviceTotalMem_v2, size_t *bytes, cu_device d)
{
    (void)d;
    *bytes = 1 << 30;
    return CU_OK;
}
ANSWER(cuDeviceGetAttribute, int *value, int attribute, cu_device d)
{
    (void)d;
    *value = attribute == CU_ATTR_INTEGRATED        ? said("FAKE_CUDA_INTEGRATED")
             : attribute == CU_ATTR_MAJOR           ? 8
             : attribute == CU_ATTR_MINOR           ? 0
             : attribute == CU_ATTR_MULTIPROCESSORS ? 4
                                                    : 1;
    return CU_OK;
}
ANSWER(cuDeviceCanAccessPeer, int *can, cu_device d, cu_device other)
{
    (void)d, (void)other;
    *can = 0;
    return CU_OK;
}
ANSWER(cuDevicePrimaryCtxRetain, cu_context *c, cu_device d)
{
    int r = said("FAKE_CUDA_RETAIN");

    (void)d;
    if (r)
        return r;
    contexts++;
    *c = (void *)&the_context;
    return CU_OK;
}
ANSWER(cuDevicePrimaryCtxRelease_v2, cu_device d)
{
    (void)d;
    contexts--;
    return CU_OK;
}
ANSWER(cuCtxSetCurrent, cu_context c)
{
    current = c;
    return CU_OK;
}
ANSWER(cuCtxSynchronize, void)
{
    NEEDS_CONTEXT;
    return CU_OK;
}
ANSWER(cuCtxEnablePeerAccess, cu_context other, unsigned flags)
{
    (void)other, (void)flags;
    return CU_OK;
}
ANSWER(cuMemGetInfo_v2, size_t *free_bytes, size_t *total)
{
    NEEDS_CONTEXT;
    *free_bytes = 1 << 20; /* of one memory with the host: without what the page cache would give */
    *total = 1 << 30;
    return CU_OK;
}
ANSWER(cuMemGetAllocationGranularity, size_t *bytes, const struct cu_prop *p, int option)
{
    (void)p, (void)option;
    *bytes = 2 << 20;
    return CU_OK;
}
ANSWER(cuMemCreate, uint64_t *h, size_t bytes, const struct cu_prop *p, unsigned long long flags)
{
    (void)bytes, (void)flags;
    NEEDS_CONTEXT;
    if (p->handle_types != CU_HANDLE_POSIX_FD)
        return CU_INVALID_VALUE;
    *h = (uint64_t)++chunks;
    return CU_OK;
}
ANSWER(cuMemRelease, uint64_t h)
{
    (void)h;
    chunks--;
    return CU_OK;
}
ANSWER(cuMemExportToShareableHandle, void *out, uint64_t h, int type, unsigned long long flags)
{
    int fd = open("/dev/null", O_RDWR); /* not closed at exec: nobody says that the driver's is */

    (void)h, (void)type, (void)flags;
    if (fd < 0)
        return 304;
    memcpy(out, &fd, sizeof(fd));
    return CU_OK;
}
ANSWER(cuMemImportFromShareableHandle, uint64_t *h, void *os_handle, int type)
{
    (void)os_handle, (void)type;
    *h = (uint64_t)++chunks;
    return CU_OK;
}
ANSWER(cuMemAddressReserve, uint64_t *p, size_t bytes, size_t align, uint64_t at,
       unsigned long long flags)
{
    (void)bytes, (void)align, (void)at, (void)flags;
    *p = 1ull << 40;
    return CU_OK;
}
ANSWER(cuMemAddressFree, uint64_t p, size_t bytes)
{
    (void)p, (void)bytes;
    return CU_OK;
}
ANSWER(cuMemMap, uint64_t p, size_t bytes, size_t off, uint64_t h, unsigned long long flags)
{
    (void)p, (void)bytes, (void)off, (void)h, (void)flags;
    return CU_OK;
}
ANSWER(cuMemUnmap, uint64_t p, size_t bytes)
{
    (void)p, (void)bytes;
    return CU_OK;
}
ANSWER(cuMemSetAccess, uint64_t p, size_t bytes, const struct cu_access *a, size_t n)
{
    (void)p, (void)bytes, (void)a, (void)n;
    return CU_OK;
}
ANSWER(cuMemAlloc_v2, uint64_t *p, size_t bytes)
{
    NEEDS_CONTEXT;
    *p = (uint64_t)(uintptr_t)malloc(bytes);
    return *p ? CU_OK : CU_OUT_OF_MEMORY;
}
ANSWER(cuMemFree_v2, uint64_t p)
{
    NEEDS_CONTEXT;
    free((void *)(uintptr_t)p);
    return CU_OK;
}
ANSWER(cuPointerGetAttribute, void *out, int attribute, uint64_t p)
{
    (void)out, (void)attribute, (void)p;
    return CU_INVALID_VALUE;
}
ANSWER(cuIpcGetMemHandle, struct cu_ipc *h, uint64_t p)
{
    (void)h, (void)p;
    return CU_NOT_SUPPORTED;
}
ANSWER(cuIpcOpenMemHandle_v2, uint64_t *p, struct cu_ipc h, unsigned flags)
{
    (void)p, (void)h, (void)flags;
    return CU_NOT_SUPPORTED;
}
ANSWER(cuIpcCloseMemHandle, uint64_t p)
{
    (void)p;
    return CU_OK;
}
ANSWER(cuMemHostRegister_v2, void *p, size_t bytes, unsigned flags)
{
    (void)p, (void)bytes, (void)flags;
    NEEDS_CONTEXT;
    return CU_OK;
}
ANSWER(cuMemHostUnregister, void *p)
{
    (void)p;
    return CU_OK;
}
ANSWER(cuStreamCreate, cu_stream *s, unsigned flags)
{
    (void)flags;
    NEEDS_CONTEXT;
    streams++;
    *s = (void *)&streams;
    return CU_OK;
}
ANSWER(cuStreamDestroy_v2, cu_stream s)
{
    (void)s;
    streams--;
    return CU_OK;
}
ANSWER(cuStreamSynchronize, cu_stream s)
{
    (void)s;
    NEEDS_CONTEXT;
    return CU_OK;
}
ANSWER(cuStreamWaitEvent, cu_stream s, cu_event e, unsigned flags)
{
    (void)s, (void)e, (void)flags;
    NEEDS_CONTEXT;
    return CU_OK;
}
ANSWER(cuEventCreate, cu_event *e, unsigned flags)
{
    (void)flags;
    NEEDS_CONTEXT;
    events++;
    *e = (void *)&events;
    return CU_OK;
}
ANSWER(cuEventDestroy_v2, cu_event e)
{
    (void)e;
    events--;
    return CU_OK;
}
ANSWER(cuEventRecord, cu_event e, cu_stream s)
{
    (void)e, (void)s;
    NEEDS_CONTEXT;
    return CU_OK;
}
ANSWER(cuEventQuery, cu_event e)
{
    (void)e;
    NEEDS_CONTEXT;
    return CU_OK;
}
ANSWER(cuEventSynchronize, cu_event e)
{
    (void)e;
    NEEDS_CONTEXT;
    return CU_OK;
}
ANSWER(cuEventElapsedTime, float *ms, cu_event from, cu_event to)
{
    (void)from, (void)to;
    NEEDS_CONTEXT;
    *ms = 0;
    return CU_OK;
}
ANSWER(cuMemcpyAsync, uint64_t to, uint64_t from, size_t bytes, cu_stream s)
{
    (void)s;
    NEEDS_CONTEXT;
    memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return CU_OK;
}
ANSWER(cuMemsetD8Async, uint64_t to, unsigned char value, size_t bytes, cu_stream s)
{
    (void)s;
    NEEDS_CONTEXT;
    memset((void *)(uintptr_t)to, value, bytes);
    return CU_OK;
}
ANSWER(cuModuleLoadData, cu_module *m, const void *image)
{
    int r = said("FAKE_CUDA_MODULE");

    (void)image;
    NEEDS_CONTEXT;
    if (r)
        return r;
    modules++;
    *m = (void *)&modules;
    return CU_OK;
}
ANSWER(cuModuleUnload, cu_module m)
{
    (void)m;
    modules--;
    return CU_OK;
}
ANSWER(cuModuleGetFunction, cu_function *f, cu_module m, const char *name)
{
    (void)m, (void)name;
    *f = (void *)&modules;
    return CU_OK;
}
ANSWER(cuLaunchKernel, cu_function f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
       unsigned by, unsigned bz, unsigned shared, cu_stream s, void **params, void **extra)
{
    (void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)s;
    (void)params, (void)extra;
    NEEDS_CONTEXT;
    return CU_OK;
}
