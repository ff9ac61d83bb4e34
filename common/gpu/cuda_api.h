/* common/gpu/cuda_api.h - the part of the CUDA driver's interface that is used, so that no CUDA is
 * needed to build
 *
 * Names, numbers and layouts are the driver's (CUDA 12 and 13); tests compare them with cuda.h
 * where that is installed. */
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef int cu_result;
typedef int cu_device;
typedef struct cu_context_ *cu_context;
typedef struct cu_stream_ *cu_stream;
typedef struct cu_event_ *cu_event;
typedef struct cu_module_ *cu_module;
typedef struct cu_function_ *cu_function;
struct cu_uuid {
    uint8_t bytes[16];
};
struct cu_ipc {
    uint8_t reserved[64];
};
struct cu_location {
    int type, id;
};
struct cu_prop {
    int type, handle_types;
    struct cu_location location;
    void *win32;
    struct {
        unsigned char compression, rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
};
struct cu_access {
    struct cu_location location;
    int flags;
};

enum {
    CU_OK = 0,
    CU_INVALID_VALUE = 1,
    CU_OUT_OF_MEMORY = 2,
    CU_DEVICE_UNAVAILABLE = 46,
    CU_NO_DEVICE = 100,
    CU_NO_BINARY = 209,
    CU_PTX_TOO_NEW = 222,
    CU_OPERATING_SYSTEM = 304,
    CU_NOT_READY = 600,
    CU_PEER_ALREADY = 704,
    CU_NOT_SUPPORTED = 801,
    CU_SYSTEM_NOT_READY = 802,
    CU_DRIVER_MISMATCH = 803,
    CU_ATTR_MULTIPROCESSORS = 16,
    CU_ATTR_INTEGRATED = 18,
    CU_ATTR_MAJOR = 75,
    CU_ATTR_MINOR = 76,
    CU_ATTR_VMM = 102,
    CU_ATTR_POSIX_FD = 103,
    CU_ATTR_GPUDIRECT_VMM = 110,
    CU_ATTR_IPC_EVENT = 125,
    CU_ALLOCATION_PINNED = 1,
    CU_HANDLE_POSIX_FD = 1,
    CU_LOCATION_DEVICE = 1,
    CU_ACCESS_READ = 1,
    CU_ACCESS_READ_WRITE = 3,
    CU_GRANULARITY_RECOMMENDED = 1,
    CU_STREAM_NON_BLOCKING = 1,
    CU_IPC_LAZY_PEER = 1,
    CU_HOST_PORTABLE = 1,
    CU_MEMORY_DEVICE = 2,
    CU_POINTER_MEMORY_TYPE = 2,
    CU_POINTER_IS_MANAGED = 8,
    CU_POINTER_ORDINAL = 9,
    CU_POINTER_LEGACY_IPC = 10,
    CU_POINTER_RANGE_START = 11,
    CU_POINTER_RANGE_SIZE = 12
};

#define CU_FUNCTIONS(F)                                                                            \
    F(init, "cuInit", unsigned flags)                                                              \
    F(error_name, "cuGetErrorName", cu_result r, const char **name)                                \
    F(error_text, "cuGetErrorString", cu_result r, const char **text)                              \
    F(count, "cuDeviceGetCount", int *n)                                                           \
    F(device, "cuDeviceGet", cu_device *d, int ordinal)                                            \
    F(uuid, "cuDeviceGetUuid_v2", struct cu_uuid *u, cu_device d)                                  \
    F(device_name, "cuDeviceGetName", char *name, int len, cu_device d)                            \
    F(total, "cuDeviceTotalMem_v2", size_t *bytes, cu_device d)                                    \
    F(attribute, "cuDeviceGetAttribute", int *value, int attribute, cu_device d)                   \
    F(can_peer, "cuDeviceCanAccessPeer", int *can, cu_device d, cu_device other)                   \
    F(retain, "cuDevicePrimaryCtxRetain", cu_context *c, cu_device d)                              \
    F(release, "cuDevicePrimaryCtxRelease_v2", cu_device d)                                        \
    F(current, "cuCtxSetCurrent", cu_context c)                                                    \
    F(sync, "cuCtxSynchronize", void)                                                              \
    F(peer, "cuCtxEnablePeerAccess", cu_context other, unsigned flags)                             \
    F(memory, "cuMemGetInfo_v2", size_t *free_bytes, size_t *total)                                \
    F(granularity, "cuMemGetAllocationGranularity", size_t *bytes, const struct cu_prop *p,        \
      int option)                                                                                  \
    F(create, "cuMemCreate", uint64_t *h, size_t bytes, const struct cu_prop *p,                   \
      unsigned long long flags)                                                                    \
    F(release_chunk, "cuMemRelease", uint64_t h)                                                   \
    F(export_chunk, "cuMemExportToShareableHandle", void *out, uint64_t h, int type,               \
      unsigned long long flags)                                                                    \
    F(import_chunk, "cuMemImportFromShareableHandle", uint64_t *h, void *os_handle, int type)      \
    F(reserve, "cuMemAddressReserve", uint64_t *p, size_t bytes, size_t align, uint64_t at,        \
      unsigned long long flags)                                                                    \
    F(unreserve, "cuMemAddressFree", uint64_t p, size_t bytes)                                     \
    F(map, "cuMemMap", uint64_t p, size_t bytes, size_t off, uint64_t h, unsigned long long flags) \
    F(unmap, "cuMemUnmap", uint64_t p, size_t bytes)                                               \
    F(access, "cuMemSetAccess", uint64_t p, size_t bytes, const struct cu_access *a, size_t n)     \
    F(alloc, "cuMemAlloc_v2", uint64_t *p, size_t bytes)                                           \
    F(free, "cuMemFree_v2", uint64_t p)                                                            \
    F(pointer, "cuPointerGetAttribute", void *out, int attribute, uint64_t p)                      \
    F(ipc_get, "cuIpcGetMemHandle", struct cu_ipc *h, uint64_t p)                                  \
    F(ipc_open, "cuIpcOpenMemHandle_v2", uint64_t *p, struct cu_ipc h, unsigned flags)             \
    F(ipc_close, "cuIpcCloseMemHandle", uint64_t p)                                                \
    F(pin, "cuMemHostRegister_v2", void *p, size_t bytes, unsigned flags)                          \
    F(unpin, "cuMemHostUnregister", void *p)                                                       \
    F(stream, "cuStreamCreate", cu_stream *s, unsigned flags)                                      \
    F(stream_free, "cuStreamDestroy_v2", cu_stream s)                                              \
    F(stream_sync, "cuStreamSynchronize", cu_stream s)                                             \
    F(stream_wait, "cuStreamWaitEvent", cu_stream s, cu_event e, unsigned flags)                   \
    F(event, "cuEventCreate", cu_event *e, unsigned flags)                                         \
    F(event_free, "cuEventDestroy_v2", cu_event e)                                                 \
    F(event_record, "cuEventRecord", cu_event e, cu_stream s)                                      \
    F(event_query, "cuEventQuery", cu_event e)                                                     \
    F(event_sync, "cuEventSynchronize", cu_event e)                                                \
    F(event_ms, "cuEventElapsedTime", float *ms, cu_event from, cu_event to)                       \
    F(copy, "cuMemcpyAsync", uint64_t to, uint64_t from, size_t bytes, cu_stream s)                \
    F(fill, "cuMemsetD8Async", uint64_t to, unsigned char value, size_t bytes, cu_stream s)        \
    F(module, "cuModuleLoadData", cu_module *m, const void *image)                                 \
    F(module_free, "cuModuleUnload", cu_module m)                                                  \
    F(function, "cuModuleGetFunction", cu_function *f, cu_module m, const char *name)              \
    F(launch, "cuLaunchKernel", cu_function f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, \
      unsigned by, unsigned bz, unsigned shared, cu_stream s, void **params, void **extra)

struct cu_api {
#define CU_MEMBER(name, symbol, ...) cu_result (*name)(__VA_ARGS__);
    CU_FUNCTIONS(CU_MEMBER)
#undef CU_MEMBER
};
