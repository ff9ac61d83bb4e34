/* our own driver header against the one that CUDA installs */
#include <cuda.h>

enum { THEIR_NON_BLOCKING = CU_STREAM_NON_BLOCKING }; /* the one name that is both sides' */
#define CU_STREAM_NON_BLOCKING OUR_NON_BLOCKING
#include "common/gpu/cuda_api.h"
#include "tests/t.h"

#define SAME(ours, theirs)                                                                         \
    _Static_assert((long long)(ours) == (long long)(theirs), #ours " is " #theirs)
SAME(CU_OK, CUDA_SUCCESS);
SAME(CU_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
SAME(CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(CU_DEVICE_UNAVAILABLE, CUDA_ERROR_DEVICE_UNAVAILABLE);
SAME(CU_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME(CU_NO_BINARY, CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME(CU_PTX_TOO_NEW, CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
SAME(CU_OPERATING_SYSTEM, CUDA_ERROR_OPERATING_SYSTEM);
SAME(CU_SYSTEM_NOT_READY, CUDA_ERROR_SYSTEM_NOT_READY);
SAME(CU_DRIVER_MISMATCH, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
SAME(CU_NOT_READY, CUDA_ERROR_NOT_READY);
SAME(CU_PEER_ALREADY, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
SAME(CU_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
SAME(CU_ATTR_MULTIPROCESSORS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(CU_ATTR_INTEGRATED, CU_DEVICE_ATTRIBUTE_INTEGRATED);
SAME(CU_ATTR_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(CU_ATTR_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(CU_ATTR_VMM, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(CU_ATTR_POSIX_FD, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(CU_ATTR_GPUDIRECT_VMM, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
SAME(CU_ATTR_IPC_EVENT, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED);
SAME(CU_ALLOCATION_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(CU_HANDLE_POSIX_FD, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(CU_ACCESS_READ, CU_MEM_ACCESS_FLAGS_PROT_READ);
SAME(CU_ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(CU_GRANULARITY_RECOMMENDED, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
SAME(OUR_NON_BLOCKING, THEIR_NON_BLOCKING);
SAME(CU_IPC_LAZY_PEER, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
SAME(CU_HOST_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE);
SAME(CU_MEMORY_DEVICE, CU_MEMORYTYPE_DEVICE);
SAME(CU_POINTER_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME(CU_POINTER_IS_MANAGED, CU_POINTER_ATTRIBUTE_IS_MANAGED);
SAME(CU_POINTER_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME(CU_POINTER_LEGACY_IPC, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
SAME(CU_POINTER_RANGE_START, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
SAME(CU_POINTER_RANGE_SIZE, CU_POINTER_ATTRIBUTE_RANGE_SIZE);

SAME(sizeof(struct cu_uuid), sizeof(CUuuid));
SAME(sizeof(struct cu_ipc), sizeof(CUipcMemHandle));
SAME(sizeof(struct cu_location), sizeof(CUmemLocation));
SAME(sizeof(struct cu_prop), sizeof(CUmemAllocationProp));
SAME(offsetof(struct cu_prop, type), offsetof(CUmemAllocationProp, type));
SAME(offsetof(struct cu_prop, handle_types), offsetof(CUmemAllocationProp, requestedHandleTypes));
SAME(offsetof(struct cu_prop, location), offsetof(CUmemAllocationProp, location));
SAME(offsetof(struct cu_prop, win32), offsetof(CUmemAllocationProp, win32HandleMetaData));
SAME(offsetof(struct cu_prop, flags), offsetof(CUmemAllocationProp, allocFlags));
SAME(offsetof(struct cu_prop, flags.usage), offsetof(CUmemAllocationProp, allocFlags.usage));
SAME(sizeof(((struct cu_prop *)0)->flags), sizeof(((CUmemAllocationProp *)0)->allocFlags));
SAME(offsetof(struct cu_location, id), offsetof(CUmemLocation, id));
SAME(sizeof(cu_result), sizeof(CUresult));
SAME(offsetof(struct cu_prop, flags.rdma),
     offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));
SAME(sizeof(struct cu_access), sizeof(CUmemAccessDesc));
SAME(offsetof(struct cu_access, flags), offsetof(CUmemAccessDesc, flags));
SAME(sizeof(uint64_t), sizeof(CUdeviceptr));
SAME(sizeof(uint64_t), sizeof(CUmemGenericAllocationHandle));
SAME(sizeof(cu_device), sizeof(CUdevice));

/* The header renames a function when a newer version of it is the right one to call. */
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
static void symbols_are_the_headers(void **state)
{
    static const struct {
        const char *name, *symbol;
    } all[] = {
#define ROW(name, symbol, ...) { #name, symbol },
        CU_FUNCTIONS(ROW)
#undef ROW
    };
    static const char *const current[] = {
        TEXT(cuDeviceGetUuid),    TEXT(cuDeviceTotalMem),  TEXT(cuDevicePrimaryCtxRelease),
        TEXT(cuMemGetInfo),       TEXT(cuMemAlloc),        TEXT(cuMemFree),
        TEXT(cuIpcOpenMemHandle), TEXT(cuMemHostRegister), TEXT(cuStreamDestroy),
        TEXT(cuEventDestroy),
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(current); i++) {
        size_t k = 0;

        while (k < FL_LEN(all) && strcmp(all[k].symbol, current[i]) != 0)
            k++;
        t_true(k < FL_LEN(all), "the header calls %s, the table does not", current[i]);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = { cmocka_unit_test(symbols_are_the_headers) };

    return t_run("cuda_api", tests);
}
