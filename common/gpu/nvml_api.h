/* common/gpu/nvml_api.h - the part of NVML's interface that is used; names with a version keep
 * their meaning */
#pragma once
#include <stdint.h>

typedef int nvml_result;
typedef struct nvml_device_ *nvml_device;
struct nvml_memory {
    uint64_t total, free, used;
};
struct nvml_pci {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};
struct nvml_process { /* since version 2 of the call */
    unsigned pid;
    unsigned long long bytes; /* all ones: not said */
    unsigned gpu_instance, compute_instance;
};
struct nvml_busy { /* of a process, since a time */
    unsigned pid;
    unsigned long long at_us; /* of the wall clock */
    unsigned sm_pct, memory_pct, encoder_pct, decoder_pct;
};
struct nvml_violation {
    uint64_t reference_ns, violation_ns;
};

enum {
    NVML_OK = 0,
    NVML_NOT_SUPPORTED = 3,
    NVML_NO_PERMISSION = 4,
    NVML_NOT_FOUND = 6,
    NVML_P2P_OK = 0,
    NVML_P2P_NVLINK = 2,
    NVML_POLICY_THERMAL = 1, /* of violations */
    NVML_HW_SLOWDOWN = 0x8,
    NVML_SW_THERMAL = 0x20,
    NVML_HW_THERMAL = 0x40,
    NVML_POWER_BRAKE = 0x80 /* reasons */
};

/* NEEDED: without it there is no NVML here. ASKED: what a driver lacks is "not said". */
#define NVML_FUNCTIONS(NEEDED, ASKED)                                                              \
    NEEDED(nvml_result, init, "nvmlInit_v2", void)                                                 \
    NEEDED(nvml_result, shutdown, "nvmlShutdown", void)                                            \
    NEEDED(const char *, error, "nvmlErrorString", nvml_result r)                                  \
    NEEDED(nvml_result, count, "nvmlDeviceGetCount_v2", unsigned *n)                               \
    NEEDED(nvml_result, by_index, "nvmlDeviceGetHandleByIndex_v2", unsigned i, nvml_device *d)     \
    NEEDED(nvml_result, by_uuid, "nvmlDeviceGetHandleByUUID", const char *uuid, nvml_device *d)    \
    NEEDED(nvml_result, uuid, "nvmlDeviceGetUUID", nvml_device d, char *out, unsigned len)         \
    ASKED(nvml_result, name, "nvmlDeviceGetName", nvml_device d, char *out, unsigned len)          \
    ASKED(nvml_result, memory, "nvmlDeviceGetMemoryInfo", nvml_device d, struct nvml_memory *m)    \
    ASKED(nvml_result, pci, "nvmlDeviceGetPciInfo_v3", nvml_device d, struct nvml_pci *p)          \
    ASKED(nvml_result, p2p, "nvmlDeviceGetP2PStatus", nvml_device a, nvml_device b, int what,      \
          int *status)                                                                             \
    ASKED(nvml_result, violation, "nvmlDeviceGetViolationStatus", nvml_device d, int policy,       \
          struct nvml_violation *v)                                                                \
    ASKED(nvml_result, processes, "nvmlDeviceGetComputeRunningProcesses_v3", nvml_device d,        \
          unsigned *n, struct nvml_process *out)                                                   \
    ASKED(nvml_result, busy, "nvmlDeviceGetProcessUtilization", nvml_device d,                     \
          struct nvml_busy *out, unsigned *n, unsigned long long since_us)                         \
    ASKED(nvml_result, reasons, "nvmlDeviceGetCurrentClocksThrottleReasons", nvml_device d,        \
          unsigned long long *bits)

struct nvml_api {
#define NVML_MEMBER(result, name, symbol, ...) result (*name)(__VA_ARGS__);
    NVML_FUNCTIONS(NVML_MEMBER, NVML_MEMBER)
#undef NVML_MEMBER
};
