#include "common/gpu/watch.h"

#include <ctype.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/base/fault.h"
#include "common/base/str.h"
#include "common/gpu/fake.h"
#include "common/gpu/gpu_priv.h"
#include "common/gpu/nvml_api.h"

enum { GPU_PROCS = 256 }; /* of one device */
struct gpu_watch {
    void *lib; /* NULL: the fake answers */
    struct nvml_api nvml;
    struct {
        char uuid[GPU_UUID_BYTES];
        uint64_t violation_ns;
    } last[GPU_MAX]; /* at the last question */
    struct {
        char uuid[GPU_UUID_BYTES];
        unsigned long long until_us; /* of the last sample that was seen */
    } busy[GPU_MAX];
};

static enum fl_status load(struct gpu_watch *w, const char *name, struct fl_err *err)
{
    static const struct {
        const char *symbol;
        size_t at;
        bool needed;
    } table[] = {
#define NVML_NEEDED(result, name, symbol, ...) { symbol, offsetof(struct nvml_api, name), true },
#define NVML_ASKED(result, name, symbol, ...) { symbol, offsetof(struct nvml_api, name), false },
        NVML_FUNCTIONS(NVML_NEEDED, NVML_ASKED)
#undef NVML_NEEDED
#undef NVML_ASKED
    };
    nvml_result r;

    w->lib = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!w->lib)
        return fl_fail(err, FL_UNSUPPORTED, "no NVML here: %s", dlerror());
    for (size_t i = 0; i < FL_LEN(table); i++) {
        void *f = dlsym(w->lib, table[i].symbol);

        if (!f && table[i].needed)
            return fl_fail(err, FL_UNSUPPORTED, "no NVML here: %s lacks %s", name, table[i].symbol);
        memcpy((char *)&w->nvml + table[i].at, &f, sizeof(f));
    }
    r = w->nvml.init();
    if (r == NVML_OK)
        return FL_OK;
    fl_err_set(err, FL_UNSUPPORTED, FL_FROM_CUDA, r, "NVML does not start: %s", w->nvml.error(r));
    return FL_UNSUPPORTED;
}

/* Nothing is picked where a driver could be: picking starts it. */
static enum fl_status who_answers(bool *fake, struct fl_err *err)
{
    const char *word = getenv("FURLONG_GPU");
    const struct gpu_ops *ops;

    *fake = false;
    if (!word || !*word || strcmp(word, "cuda") == 0)
        return FL_OK;
    FL_TRY(gpu_pick(&ops, err));
    *fake = ops == &gpu_fake;
    return *fake ? FL_OK
                 : fl_fail(err, FL_UNSUPPORTED, "no devices to watch: FURLONG_GPU=%.40s", word);
}

enum fl_status gpu_watch_open(const char *lib, struct gpu_watch **out, struct fl_err *err)
{
    struct gpu_watch *w;
    enum fl_status st;
    bool fake;

    FL_TRY(who_answers(&fake, err));
    w = calloc(1, sizeof(*w));
    if (!w)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a watch on devices");
    st = fake ? FL_OK : load(w, lib ? lib : "libnvidia-ml.so.1", err);
    if (st == FL_OK) {
        *out = w;
        return FL_OK;
    }
    if (w->lib)
        dlclose(w->lib);
    free(w);
    return st;
}

void gpu_watch_close(struct gpu_watch *w)
{
    if (!w)
        return;
    if (w->lib) {
        (void)w->nvml.shutdown();
        dlclose(w->lib);
    }
    free(w);
}

static enum fl_status failed(const struct gpu_watch *w, nvml_result r, const char *what,
                             const char *uuid, struct fl_err *err)
{
    enum fl_status st = r == NVML_NOT_FOUND       ? FL_NOT_FOUND
                        : r == NVML_NO_PERMISSION ? FL_DENIED
                        : r == NVML_NOT_SUPPORTED ? FL_UNSUPPORTED
                                                  : FL_UNREACHABLE;

    fl_err_set(err, st, FL_FROM_CUDA, r, "device %s: %s: %s", uuid, what, w->nvml.error(r));
    return st;
}

static enum fl_status find(struct gpu_watch *w, const char *uuid, nvml_device *out,
                           struct fl_err *err)
{
    nvml_result r = w->nvml.by_uuid(uuid, out);

    return r == NVML_OK ? FL_OK : failed(w, r, "look it up", uuid, err);
}

/* ---- the list ---- */

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

static bool nvlinked(struct gpu_watch *w, nvml_device a, nvml_device b)
{
    int status = -1;

    return w->nvml.p2p && w->nvml.p2p(a, b, NVML_P2P_NVLINK, &status) == NVML_OK &&
           status == NVML_P2P_OK;
}

static enum fl_status describe(struct gpu_watch *w, unsigned i, nvml_device d, struct gpu_seen *out,
                               struct fl_err *err)
{
    struct nvml_memory m;
    struct nvml_pci pci;
    char number[16];
    nvml_result r;

    *out = (struct gpu_seen){
        .numa = -1, .island = i, .total_bytes = UINT64_MAX, .free_bytes = UINT64_MAX
    };
    snprintf(number, sizeof(number), "%u", i);
    r = w->nvml.uuid(d, out->uuid, sizeof(out->uuid));
    if (r != NVML_OK)
        return failed(w, r, "its name", number, err);
    if (!w->nvml.name || w->nvml.name(d, out->name, sizeof(out->name)) != NVML_OK)
        (void)FL_COPY(out->name, "unnamed device");
    if (w->nvml.memory && w->nvml.memory(d, &m) == NVML_OK) {
        out->total_bytes = m.total;
        out->free_bytes = m.free;
    }
    if (w->nvml.pci && w->nvml.pci(d, &pci) == NVML_OK) {
        (void)FL_COPY(out->pci, pci.bus_id);
        out->numa = numa_of(out->pci);
    }
    return FL_OK;
}

static enum fl_status list_fake(struct gpu_seen *out, size_t *n, struct fl_err *err)
{
    struct gpu_info all[GPU_MAX];
    size_t count = GPU_MAX;

    FL_TRY(gpu_fake_list(all, &count, err));
    if (count > *n)
        return fl_fail(err, FL_EXHAUSTED, "%zu devices, room for %zu", count, *n);
    for (size_t i = 0; i < count; i++) {
        out[i] = (struct gpu_seen){ .numa = -1,
                                    .total_bytes = all[i].total_bytes,
                                    .free_bytes = all[i].total_bytes };
        (void)FL_COPY(out[i].uuid, all[i].uuid);
        (void)FL_COPY(out[i].name, all[i].name);
        fake_pci(i, out[i].pci);
    }
    *n = count;
    return FL_OK;
}

enum fl_status gpu_watch_list(struct gpu_watch *w, struct gpu_seen *out, size_t *n,
                              struct fl_err *err)
{
    nvml_device all[GPU_MAX];
    unsigned count = 0;
    nvml_result r;

    if (!w->lib)
        return list_fake(out, n, err);
    r = w->nvml.count(&count);
    if (r != NVML_OK)
        return failed(w, r, "count", "any", err);
    if (count > *n || count > GPU_MAX)
        return fl_fail(err, FL_EXHAUSTED, "%u devices, room for %zu", count,
                       *n < GPU_MAX ? *n : (size_t)GPU_MAX);
    for (unsigned i = 0; i < count; i++) {
        r = w->nvml.by_index(i, &all[i]);
        if (r != NVML_OK)
            return failed(w, r, "look at it", "any", err);
        FL_TRY(describe(w, i, all[i], &out[i], err));
        for (unsigned k = 0; k < i && out[i].island == i; k++)
            if (nvlinked(w, all[k], all[i]))
                out[i].island = out[k].island;
    }
    *n = count;
    return FL_OK;
}

/* ---- one device ---- */

static enum fl_status fake_used(const char *uuid, uint64_t *used_bytes, struct fl_err *err)
{
    struct gpu_proc all[GPU_PROCS];
    size_t n = GPU_PROCS;
    uint64_t sum = 0;

    FL_TRY(fake_procs(uuid, all, &n, err));
    for (size_t i = 0; i < n; i++)
        sum += all[i].bytes;
    *used_bytes = sum;
    return FL_OK;
}

enum fl_status gpu_watch_used(struct gpu_watch *w, const char *uuid, uint64_t *used_bytes,
                              struct fl_err *err)
{
    struct nvml_memory m;
    nvml_device d;
    nvml_result r;

    if (!w->lib)
        return fake_used(uuid, used_bytes, err);
    FL_TRY(find(w, uuid, &d, err));
    r = w->nvml.memory ? w->nvml.memory(d, &m) : NVML_NOT_SUPPORTED;
    if (r != NVML_OK)
        return failed(w, r, "its memory", uuid, err);
    *used_bytes = m.used;
    return FL_OK;
}

static enum fl_status fake_slowed(const char *uuid, bool *slowed, struct fl_err *err)
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
static bool violated_since(struct gpu_watch *w, const char *uuid, uint64_t total_ns)
{
    for (size_t i = 0; i < GPU_MAX; i++) {
        bool known = w->last[i].uuid[0];

        if (known && strcmp(w->last[i].uuid, uuid) != 0)
            continue;
        bool more = known && total_ns > w->last[i].violation_ns;

        (void)FL_COPY(w->last[i].uuid, uuid);
        w->last[i].violation_ns = total_ns;
        return more;
    }
    return false;
}

enum fl_status gpu_watch_slowed(struct gpu_watch *w, const char *uuid, bool *slowed,
                                struct fl_err *err)
{
    const unsigned long long bad =
        NVML_HW_SLOWDOWN | NVML_SW_THERMAL | NVML_HW_THERMAL | NVML_POWER_BRAKE;
    struct nvml_violation v = { 0 };
    unsigned long long bits = 0;
    bool since = false, counted, told;
    nvml_device d;

    if (!w->lib)
        return fake_slowed(uuid, slowed, err);
    FL_TRY(find(w, uuid, &d, err));
    counted = w->nvml.violation && w->nvml.violation(d, NVML_POLICY_THERMAL, &v) == NVML_OK;
    told = w->nvml.reasons && w->nvml.reasons(d, &bits) == NVML_OK;
    if (!counted && !told)
        return fl_fail(err, FL_UNSUPPORTED, "device %s does not say whether it was slowed down",
                       uuid);
    if (counted)
        since = violated_since(w, uuid, v.violation_ns);
    *slowed = since || (told && (bits & bad));
    return FL_OK;
}

enum fl_status gpu_watch_procs(struct gpu_watch *w, const char *uuid, struct gpu_proc *out,
                               size_t *n, struct fl_err *err)
{
    struct nvml_process all[GPU_PROCS];
    unsigned count = GPU_PROCS;
    nvml_device d;

    if (!w->lib)
        return fake_procs(uuid, out, n, err);
    FL_TRY(find(w, uuid, &d, err));
    nvml_result r = w->nvml.processes ? w->nvml.processes(d, &count, all) : NVML_NOT_SUPPORTED;

    if (r != NVML_OK)
        return failed(w, r, "its processes", uuid, err);
    for (unsigned i = 0; i < count && i < *n; i++)
        out[i] = (struct gpu_proc){ (int)all[i].pid, all[i].bytes, -1 };
    *n = count < *n ? count : *n;
    return FL_OK;
}

/* Where the samples of a device go on; NULL: that is one device more than there are. */
static unsigned long long *busy_until(struct gpu_watch *w, const char *uuid)
{
    enum { FIRST_US = 1000000 };
    struct timespec now;

    for (size_t i = 0; i < GPU_MAX; i++) {
        if (strcmp(w->busy[i].uuid, uuid) == 0)
            return &w->busy[i].until_us;
        if (w->busy[i].uuid[0])
            continue;
        (void)FL_COPY(w->busy[i].uuid, uuid);
        clock_gettime(CLOCK_REALTIME, &now); /* NVML's own: compared with nothing else */
        w->busy[i].until_us =
            (unsigned long long)now.tv_sec * 1000000 + (unsigned)now.tv_nsec / 1000 - FIRST_US;
        return &w->busy[i].until_us;
    }
    return NULL;
}

void gpu_watch_busy(struct gpu_watch *w, const char *uuid, struct gpu_proc *procs, size_t n)
{
    struct nvml_busy all[GPU_PROCS];
    unsigned count = GPU_PROCS;
    unsigned long long *until = w->lib ? busy_until(w, uuid) : NULL;
    nvml_device d;
    nvml_result r = NVML_OK;

    if (w->lib && (!until || !w->nvml.busy || w->nvml.by_uuid(uuid, &d) != NVML_OK))
        r = NVML_NOT_SUPPORTED;
    else if (w->lib)
        r = w->nvml.busy(d, all, &count, *until);
    else
        count = 0; /* the fake's kernels run on the host: none of it is busy */
    if (r == NVML_NOT_FOUND)
        count = 0; /* of nobody: all of them idle */
    bool told = r == NVML_OK || r == NVML_NOT_FOUND;

    for (size_t i = 0; i < n; i++)
        procs[i].sm_pct = told ? 0 : -1;
    for (unsigned k = 0; told && k < count; k++) {
        for (size_t i = 0; i < n; i++)
            if (procs[i].pid == (int)all[k].pid)
                procs[i].sm_pct = all[k].sm_pct < 100 ? (int)all[k].sm_pct : 100;
        if (all[k].at_us > *until)
            *until = all[k].at_us;
    }
}
