/* worker/node/nvml.h - the GPUs of this machine, through NVML
 *
 * Loaded by dlopen, so one binary runs with and without a driver; no context is made and no device
 * file stays open in a child. Versioned symbols keep their ABI; the few layouts that are used are
 * declared in nvml.c. */
#pragma once
#include "common/base/base.h"

enum { NVML_GPUS = 64 };
struct nvml_gpu {
    char uuid[80], name[64], pci[32];
    uint64_t memory_bytes; /* 0: it does not say, memory is shared with the CPU: never "no GPU" */
    bool unified;
    int numa;        /* -1: not known                              */
    unsigned island; /* the same for devices that NVLink connects  */
};
struct nvml;
/* FL_UNSUPPORTED: no library or no driver here. lib NULL: libnvidia-ml.so.1. */
enum fl_status nvml_open(const char *lib, struct nvml **out, struct fl_err *err);
enum fl_status nvml_list(struct nvml *n, struct nvml_gpu *out, size_t *count, struct fl_err *err);
/* Used memory of the device, for "is it back?"; FL_UNSUPPORTED: this device does not say. */
enum fl_status nvml_used(struct nvml *n, const char *uuid, uint64_t *used_bytes,
                         struct fl_err *err);
void nvml_close(struct nvml *n);
