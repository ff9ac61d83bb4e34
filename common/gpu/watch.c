#include "common/gpu/watch.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/fault.h"
#include "common/base/str.h"
#include "common/gpu/gpu_priv.h"
#include "common/gpu/nvml_api.h"

static struct nvml_api nvml;
static struct fl_err nvml_err; /* why there is none */
static bool nvml_ready;
static pthread_once_t nvml_once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char uuid[GPU_UUID_BYTES];
    uint64_t violation_ns;
} last[GPU_MAX]; /* at the last question */

static void load(void)
{
    static const struct {
        const char *symbol;
        size_t at;
    } table[] = {
#define NVML_ROW(name, symbol, ...) { symbol, offsetof(struct nvml_api, name) },
        NVML_FUNCTIONS(NVML_ROW)
#undef NVML_ROW
    };
    void *lib = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    nvml_result r;

    if (!lib) {
        (void)fl_fail(&nvml_err, FL_UNSUPPORTED, "no NVML: %s", dlerror());
        return;
    }
    for (size_t i = 0; i < FL_LEN(table); i++) {
        void *f =
            dlsym(lib, table[i].symbol); /* what a driver lacks is answered "not supported" below */

        memcpy((char *)&nvml + table[i].at, &f, sizeof(f));
    }
    r = nvml.init && nvml.count && nvml.by_index && nvml.by_uuid && nvml.uuid ? nvml.init()
                                                                              : NVML_NOT_SUPPORTED;
    if (r != NVML_OK) {
        fl_err_set(&nvml_err, FL_UNSUPPORTED, FL_FROM_CUDA, r, "NVML does not start (error %d)", r);
        return;
    }
    nvml_ready = true;
}

/* FL_OK: NVML answers. FL_AGAIN: the fake does. Nothing is picked where a driver could be: picking
 * starts it. */
static enum fl_status who_answers(struct fl_err *err)
{
    const char *word = getenv("FURLONG_GPU");
    const struct gpu_ops *ops;

    if (word && *word && strcmp(word, "cuda") != 0) {
        FL_TRY(gpu_pick(&ops, err));
        return ops == &gpu_fake
                   ? FL_AGAIN
                   : fl_fail(err, FL_UNSUPPORTED, "no devices: FURLONG_GPU=%.40s", word);
    }
    pthread_once(&nvml_once, load);
    if (!nvml_ready && err)
        *err = nvml_err;
    return nvml_ready ? FL_OK : FL_UNSUPPORTED;
}

static enum fl_status failed(struct fl_err *err, nvml_result r, const char *what, const char *uuid)
{
    enum fl_status st = r == NVML_NOT_FOUND       ? FL_NOT_FOUND
                        : r == NVML_NO_PERMISSION ? FL_DENIED
                        : r == NVML_NOT_SUPPORTED ? FL_UNSUPPORTED
                                                  : FL_UNREACHABLE;

    fl_err_set(err, st, FL_FROM_CUDA, r, "device %s: %s: NVML error %d", uuid, what, r);
    return st;
}

static enum fl_status find(const char *uuid, nvml_device *out, struct fl_err *err)
{
    nvml_result r = nvml.by_uuid(uuid, out);

    return r == NVML_OK ? FL_OK : failed(err, r, "look it up", uuid);
}

static enum fl_status describe(unsigned i, struct gpu_seen *out, struct fl_err *err)
{
    struct nvml_memory m;
    struct nvml_busy b;
    nvml_device d;
    nvml_result r = nvml.by_index(i, &d);

    *out = (struct gpu_seen){ .total_bytes = UINT64_MAX,
                              .free_bytes = UINT64_MAX,
                              .busy_pct = UINT32_MAX };
    if (r == NVML_OK)
        r = nvml.uuid(d, out->uuid, sizeof(out->uuid));
    if (r != NVML_OK)
        return failed(err, r, "look at it", out->uuid);
    if (!nvml.name || nvml.name(d, out->name, sizeof(out->name)) != NVML_OK)
        (void)FL_COPY(out->name, "unnamed device");
    if (nvml.capability)
        (void)nvml.capability(d, &out->major, &out->minor);
    if (nvml.memory && nvml.memory(d, &m) == NVML_OK) {
        out->total_bytes = m.total;
        out->free_bytes = m.free;
    }
    if (nvml.busy && nvml.busy(d, &b) == NVML_OK)
        out->busy_pct = b.gpu;
    return FL_OK;
}

static enum fl_status fake_watch(struct gpu_seen *out, size_t *n, struct fl_err *err)
{
    struct gpu_info all[GPU_MAX];
    size_t count = GPU_MAX;

    FL_TRY(gpu_fake_list(all, &count, err));
    if (count > *n)
        return fl_fail(err, FL_EXHAUSTED, "%zu devices, room for %zu", count, *n);
    for (size_t i = 0; i < count; i++) {
        out[i] = (struct gpu_seen){ .major = all[i].major,
                                    .minor = all[i].minor,
                                    .total_bytes = all[i].total_bytes,
                                    .free_bytes = all[i].total_bytes,
                                    .busy_pct = UINT32_MAX };
        (void)FL_COPY(out[i].uuid, all[i].uuid);
        (void)FL_COPY(out[i].name, all[i].name);
    }
    *n = count;
    return FL_OK;
}

enum fl_status gpu_watch(struct gpu_seen *out, size_t *n, struct fl_err *err)
{
    enum fl_status st = who_answers(err);
    unsigned count = 0;
    nvml_result r;

    if (st == FL_AGAIN)
        return fake_watch(out, n, err);
    FL_TRY(st);
    r = nvml.count(&count);
    if (r != NVML_OK)
        return failed(err, r, "count", "any");
    if (count > *n)
        return fl_fail(err, FL_EXHAUSTED, "%u devices, room for %zu", count, *n);
    for (unsigned i = 0; i < count; i++)
        FL_TRY(describe(i, &out[i], err));
    *n = count;
    return FL_OK;
}

static enum fl_status fake_slowdown(const char *uuid, bool *slowed, struct fl_err *err)
{
    struct gpu_info all[GPU_MAX];
    size_t n = GPU_MAX, i = 0;

    FL_TRY(gpu_fake_list(all, &n, err));
    while (i < n && strcmp(all[i].uuid, uuid) != 0)
        i++;
    if (i == n)
        return fl_fail(err, FL_NOT_FOUND, "no device %s among the %zu of this machine", uuid, n);
    *slowed = FL_FAULT("gpu.thermal");
    return FL_OK;
}

/* Whether heat has cost time since the last question, by a counter that only grows; the first
 * question says no. */
static bool violated_since(const char *uuid, uint64_t total_ns)
{
    bool more = false;

    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < GPU_MAX; i++) {
        if (last[i].uuid[0] && strcmp(last[i].uuid, uuid) != 0)
            continue;
        more = last[i].uuid[0] && total_ns > last[i].violation_ns;
        (void)FL_COPY(last[i].uuid, uuid);
        last[i].violation_ns = total_ns;
        break;
    }
    pthread_mutex_unlock(&lock);
    return more;
}

enum fl_status gpu_slowdown(const char *uuid, bool *slowed, struct fl_err *err)
{
    const unsigned long long bad =
        NVML_HW_SLOWDOWN | NVML_SW_THERMAL | NVML_HW_THERMAL | NVML_POWER_BRAKE;
    enum fl_status st = who_answers(err);
    struct nvml_violation v = { 0 };
    unsigned long long bits = 0;
    bool since = false, counted, told;
    nvml_device d;

    if (st == FL_AGAIN)
        return fake_slowdown(uuid, slowed, err);
    FL_TRY(st);
    FL_TRY(find(uuid, &d, err));
    counted = nvml.violation && nvml.violation(d, NVML_POLICY_THERMAL, &v) == NVML_OK;
    told = nvml.reasons && nvml.reasons(d, &bits) == NVML_OK;
    if (!counted && !told)
        return fl_fail(err, FL_UNSUPPORTED, "device %s does not say whether it was slowed down",
                       uuid);
    if (counted)
        since = violated_since(uuid, v.violation_ns);
    *slowed = since || (told && (bits & bad));
    return FL_OK;
}

enum fl_status gpu_users(const char *uuid, struct gpu_user *out, size_t *n, struct fl_err *err)
{
    struct nvml_process all[256];
    unsigned count = FL_LEN(all);
    enum fl_status st = who_answers(err);
    nvml_device d;
    nvml_result r;

    if (st == FL_AGAIN)
        return fl_fail(err, FL_UNSUPPORTED, "device %s does not say who uses it", uuid);
    FL_TRY(st);
    FL_TRY(find(uuid, &d, err));
    r = nvml.processes ? nvml.processes(d, &count, all) : NVML_NOT_SUPPORTED;
    if (r != NVML_OK)
        return failed(err, r, "processes", uuid);
    if (count > *n)
        return fl_fail(err, FL_EXHAUSTED, "device %s: %u processes, room for %zu", uuid, count, *n);
    for (unsigned i = 0; i < count; i++)
        out[i] = (struct gpu_user){ all[i].pid, all[i].bytes };
    *n = count;
    return FL_OK;
}
