#include "worker/node/nvml.h"
#include "common/base/str.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <ctype.h>

/* nvml.h is not in Debian: these are its words, for the versions of the symbols named below. */
enum { NVML_SUCCESS = 0, NVML_NOT_SUPPORTED = 3, NVML_P2P_NVLINK = 2, NVML_P2P_OK = 0 };
struct nvml_memory {
    unsigned long long total, free, used;
};
struct nvml_pci {
    char legacy[16];
    unsigned int domain, bus, device, id, subsystem;
    char bus_id[32];
};
typedef void *nvml_device; /* opaque in the library too */

struct nvml {
    void *lib;
    int (*init)(void);
    int (*shutdown)(void);
    const char *(*error)(int);
    int (*count)(unsigned *n);
    int (*by_index)(unsigned i, nvml_device *out);
    int (*by_uuid)(const char *uuid, nvml_device *out);
    int (*uuid)(nvml_device d, char *out, unsigned len);
    int (*name)(nvml_device d, char *out, unsigned len);
    int (*memory)(nvml_device d, struct nvml_memory *out);
    int (*pci)(nvml_device d, struct nvml_pci *out);
    int (*p2p)(nvml_device a, nvml_device b, int what, int *out);
};

static bool load(struct nvml *n)
{
    static const char *const names[] = {
        "nvmlInit_v2",
        "nvmlShutdown",
        "nvmlErrorString",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetHandleByUUID",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetP2PStatus",
    };
    void **slots[] = { (void **)&n->init,  (void **)&n->shutdown, (void **)&n->error,
                       (void **)&n->count, (void **)&n->by_index, (void **)&n->by_uuid,
                       (void **)&n->uuid,  (void **)&n->name,     (void **)&n->memory,
                       (void **)&n->pci,   (void **)&n->p2p };

    for (size_t i = 0; i < FL_LEN(names); i++)
        if (!(*slots[i] = dlsym(n->lib, names[i])))
            return false;
    return true;
}

enum fl_status nvml_open(const char *lib, struct nvml **out, struct fl_err *err)
{
    struct nvml *n = calloc(1, sizeof(*n));
    int rc;

    if (!n)
        return fl_fail(err, FL_EXHAUSTED, "no memory for NVML");
    n->lib = dlopen(lib ? lib : "libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!n->lib || !load(n)) {
        enum fl_status st = fl_fail(err, FL_UNSUPPORTED, "no NVML here: %s",
                                    n->lib ? "a symbol is missing" : dlerror());

        if (n->lib)
            dlclose(n->lib);
        free(n);
        return st;
    }
    rc = n->init();
    if (rc != NVML_SUCCESS) {
        enum fl_status st = fl_fail(err, FL_UNSUPPORTED, "NVML does not start: %s", n->error(rc));

        dlclose(n->lib);
        free(n);
        return st;
    }
    *out = n;
    return FL_OK;
}

static int numa_of(const char *pci)
{
    char path[96], bus[32];
    FILE *f;
    int node = -1;
    size_t len = strlen(pci);

    /* NVML writes the domain with eight digits, sysfs with four, and lower case. */
    (void)fl_copy(bus, sizeof(bus), len > 12 ? pci + len - 12 : pci);
    for (char *p = bus; *p; p++)
        *p = (char)tolower((unsigned char)*p);
    snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/numa_node", bus);
    f = fopen(path, "re");
    if (f && fscanf(f, "%d", &node) != 1)
        node = -1;
    if (f)
        fclose(f);
    return node;
}

static enum fl_status list_one(struct nvml *n, unsigned i, nvml_device *devices, struct nvml_gpu *g,
                               struct nvml_gpu *all, struct fl_err *err)
{
    struct nvml_memory mem = { 0 };
    struct nvml_pci pci = { 0 };
    int rc = n->by_index(i, &devices[i]);

    memset(g, 0, sizeof(*g));
    if (rc == NVML_SUCCESS)
        rc = n->uuid(devices[i], g->uuid, sizeof(g->uuid));
    if (rc != NVML_SUCCESS)
        return fl_fail(err, FL_UNREACHABLE, "GPU %u: %s", i, n->error(rc));
    (void)n->name(devices[i], g->name, sizeof(g->name)); /* only shown */
    g->unified = n->memory(devices[i], &mem) == NVML_NOT_SUPPORTED;
    g->memory_bytes = mem.total;
    g->numa = -1;
    if (n->pci(devices[i], &pci) == NVML_SUCCESS) {
        (void)FL_COPY(g->pci, pci.bus_id);
        g->numa = numa_of(g->pci);
    }
    g->island = i;
    for (unsigned k = 0; k < i; k++) {
        int status = -1;

        if (n->p2p(devices[k], devices[i], NVML_P2P_NVLINK, &status) == NVML_SUCCESS &&
            status == NVML_P2P_OK) {
            g->island = all[k].island;
            break;
        }
    }
    return FL_OK;
}

enum fl_status nvml_list(struct nvml *n, struct nvml_gpu *out, size_t *count, struct fl_err *err)
{
    nvml_device devices[NVML_GPUS];
    unsigned all = 0;
    int rc = n->count(&all);

    if (rc != NVML_SUCCESS)
        return fl_fail(err, FL_UNREACHABLE, "GPUs cannot be counted: %s", n->error(rc));
    if (all > NVML_GPUS)
        all = NVML_GPUS;
    for (unsigned i = 0; i < all; i++)
        FL_TRY(list_one(n, i, devices, &out[i], out, err));
    *count = all;
    return FL_OK;
}

enum fl_status nvml_used(struct nvml *n, const char *uuid, uint64_t *used_bytes, struct fl_err *err)
{
    struct nvml_memory mem;
    nvml_device d;
    int rc = n->by_uuid(uuid, &d);

    if (rc == NVML_SUCCESS)
        rc = n->memory(d, &mem);
    if (rc != NVML_SUCCESS)
        return fl_fail(err, rc == NVML_NOT_SUPPORTED ? FL_UNSUPPORTED : FL_UNREACHABLE,
                       "GPU %s: %s", uuid, n->error(rc));
    *used_bytes = mem.used;
    return FL_OK;
}

void nvml_close(struct nvml *n)
{
    if (!n)
        return;
    (void)n->shutdown();
    dlclose(n->lib);
    free(n);
}
