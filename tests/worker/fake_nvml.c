/* tests/worker/fake_nvml.c - two GPUs that are not there; $FAKE_NVML_USED names a file with the
 * bytes that each of them has in use, so a test may let them go late; $FAKE_NVML_PROCS one with the
 * process that has the second of them open, its bytes (-1: not said), and percent of its time */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
struct memory {
    unsigned long long total, free, used;
};
struct pci {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};
struct process {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};
struct busy {
    unsigned pid;
    unsigned long long at_us;
    unsigned sm_pct, memory_pct, encoder_pct, decoder_pct;
};
static const char *const uuids[] = { "GPU-11111111-aaaa", "GPU-22222222-bbbb" };

EXPORT int nvmlInit_v2(void);
EXPORT int nvmlShutdown(void);
EXPORT const char *nvmlErrorString(int rc);
EXPORT int nvmlDeviceGetCount_v2(unsigned *n);
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out);
EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **out);
EXPORT int nvmlDeviceGetUUID(void *d, char *out, unsigned len);
EXPORT int nvmlDeviceGetName(void *d, char *out, unsigned len);
EXPORT int nvmlDeviceGetMemoryInfo(void *d, struct memory *out);
EXPORT int nvmlDeviceGetPciInfo_v3(void *d, struct pci *out);
EXPORT int nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *out);
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, struct process *out);
EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *out);
EXPORT int nvmlDeviceGetProcessUtilization(void *d, struct busy *out, unsigned *n,
                                           unsigned long long since_us);

int nvmlInit_v2(void)
{
    return 0;
}

int nvmlShutdown(void)
{
    return 0;
}

const char *nvmlErrorString(int rc)
{
    return rc == 3 ? "Not Supported" : "Not Found";
}

int nvmlDeviceGetCount_v2(unsigned *n)
{
    *n = 2;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out)
{
    *out = (void *)&uuids[i];
    return i < 2 ? 0 : 6;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **out)
{
    for (int i = 0; i < 2; i++)
        if (!strcmp(uuid, uuids[i])) {
            *out = (void *)&uuids[i];
            return 0;
        }
    return 6;
}

int nvmlDeviceGetUUID(void *d, char *out, unsigned len)
{
    snprintf(out, len, "%s", *(const char **)d);
    return 0;
}

int nvmlDeviceGetName(void *d, char *out, unsigned len)
{
    (void)d;
    snprintf(out, len, "Fake 9000");
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *d, struct memory *out)
{
    const char *path = getenv("FAKE_NVML_USED");
    FILE *f = path ? fopen(path, "r") : NULL;
    unsigned long long used[2] = { 0, 0 };

    if (!path)
        return 3; /* unified memory: it does not say */
    if (f && fscanf(f, "%llu %llu", &used[0], &used[1]) != 2)
        used[0] = used[1] = 0;
    if (f)
        fclose(f);
    *out = (struct memory){ .total = 80ull << 30,
                            .used = used[(const char **)d - (const char **)uuids] };
    return 0;
}

int nvmlDeviceGetPciInfo_v3(void *d, struct pci *out)
{
    (void)d;
    snprintf(out->bus_id, sizeof(out->bus_id), "00000000:FF:00.0");
    return 0;
}

int nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *out)
{
    (void)a;
    (void)b;
    *out = what == 2 ? 0 : 1;
    return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, struct process *out)
{
    const char *path = getenv("FAKE_NVML_PROCS");
    FILE *f = path ? fopen(path, "r") : NULL;
    long long bytes;

    if (!path)
        return 3;
    *n = f && d == &uuids[1] && fscanf(f, "%u %lld", &out->pid, &bytes) == 2;
    if (*n)
        out->bytes = (unsigned long long)bytes;
    if (f)
        fclose(f);
    return 0;
}

/* FAKE_NVML_HOT, a file: while it is there the second device is slowed by heat. */
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *out)
{
    const char *path = getenv("FAKE_NVML_HOT");

    if (!path)
        return 3;
    *out = d == &uuids[1] && access(path, F_OK) == 0 ? 0x40 : 0x4; /* at the power cap: as busy ones are */
    return 0;
}

int nvmlDeviceGetProcessUtilization(void *d, struct busy *out, unsigned *n,
                                    unsigned long long since_us)
{
    const char *path = getenv("FAKE_NVML_PROCS");
    FILE *f = path ? fopen(path, "r") : NULL;
    long long bytes;
    int rc = 6; /* no samples since then */

    if (f && *n && d == &uuids[1] && fscanf(f, "%u %lld %u", &out->pid, &bytes, &out->sm_pct) == 3) {
        out->at_us = since_us + 1;
        *n = 1;
        rc = 0;
    }
    if (f)
        fclose(f);
    return path ? rc : 3;
}
