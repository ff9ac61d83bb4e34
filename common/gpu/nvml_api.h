/* common/gpu/nvml_api.h - the part of NVML's interface that is used; names with a version keep
 * their meaning */
#pragma once
#include <stdint.h>

typedef int nvml_result;
typedef struct nvml_device_ *nvml_device;
struct nvml_memory {
    uint64_t total, free, used;
};
struct nvml_busy {
    unsigned gpu, memory;
};
struct nvml_violation {
    uint64_t reference_ns, violation_ns;
};
struct nvml_process {
    unsigned pid;
    uint64_t bytes;
    unsigned gpu_instance, compute_instance;
};

enum {
    NVML_OK = 0,
    NVML_NOT_SUPPORTED = 3,
    NVML_NO_PERMISSION = 4,
    NVML_NOT_FOUND = 6,
    NVML_TOO_SMALL = 7,
    NVML_POLICY_THERMAL = 1, /* of violations */
    NVML_HW_SLOWDOWN = 0x8,
    NVML_SW_THERMAL = 0x20,
    NVML_HW_THERMAL = 0x40,
    NVML_POWER_BRAKE = 0x80 /* reasons */
};

#define NVML_FUNCTIONS(F)                                                                          \
    F(init, "nvmlInit_v2", void)                                                                   \
    F(count, "nvmlDeviceGetCount_v2", unsigned *n)                                                 \
    F(by_index, "nvmlDeviceGetHandleByIndex_v2", unsigned i, nvml_device *d)                       \
    F(by_uuid, "nvmlDeviceGetHandleByUUID", const char *uuid, nvml_device *d)                      \
    F(uuid, "nvmlDeviceGetUUID", nvml_device d, char *out, unsigned len)                           \
    F(name, "nvmlDeviceGetName", nvml_device d, char *out, unsigned len)                           \
    F(capability, "nvmlDeviceGetCudaComputeCapability", nvml_device d, int *major, int *minor)     \
    F(memory, "nvmlDeviceGetMemoryInfo", nvml_device d, struct nvml_memory *m)                     \
    F(busy, "nvmlDeviceGetUtilizationRates", nvml_device d, struct nvml_busy *b)                   \
    F(violation, "nvmlDeviceGetViolationStatus", nvml_device d, int policy,                        \
      struct nvml_violation *v)                                                                    \
    F(reasons, "nvmlDeviceGetCurrentClocksThrottleReasons", nvml_device d,                         \
      unsigned long long *bits)                                                                    \
    F(processes, "nvmlDeviceGetComputeRunningProcesses_v3", nvml_device d, unsigned *n,            \
      struct nvml_process *p)

struct nvml_api {
#define NVML_MEMBER(name, symbol, ...) nvml_result (*name)(__VA_ARGS__);
    NVML_FUNCTIONS(NVML_MEMBER)
#undef NVML_MEMBER
};
