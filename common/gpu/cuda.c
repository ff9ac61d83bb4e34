#include "common/gpu/cuda_priv.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/base/fault.h"

struct cu_api cuda;
/* Of the whole device, where cuda.uuid is of the part that this process has (MIG); NULL: not told.
 */
static cu_result (*whole_uuid)(struct cu_uuid *u, cu_device d);
static struct fl_err cu_err; /* why there is no driver */
static bool cu_ready;
static pthread_once_t cu_once = PTHREAD_ONCE_INIT;

/* ==== the driver ==== */
/* What to do about answers whose text does not say. "": it does. */
static const char *hint(cu_result r)
{
    switch (r) {
    case CU_DEVICE_UNAVAILABLE:
        return ": another process has it alone (compute mode of nvidia-smi -q), or it is being "
               "reset";
    case CU_NO_BINARY:
    case CU_PTX_TOO_NEW:
        return ": the device code is built for other chips (option gpu_archs), or the driver is "
               "too old";
    case CU_OPERATING_SYSTEM:
        return ": descriptors (ulimit -n) or mappings have run out, or the container forbids it";
    case CU_SYSTEM_NOT_READY:
        return ": is the fabric manager running?";
    case CU_DRIVER_MISMATCH:
        return ": libcuda is not of the kernel module's version: load the module anew, or mount "
               "its own";
    default:
        return "";
    }
}

static void load(void)
{
    static const struct {
        const char *symbol;
        size_t at;
    } table[] = {
#define CU_ROW(name, symbol, ...) { symbol, offsetof(struct cu_api, name) },
        CU_FUNCTIONS(CU_ROW)
#undef CU_ROW
    };
    /* Whatever torch brought along is the same library: a second one would be a second driver
     * state. */
    void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

    if (!lib) {
        (void)fl_fail(&cu_err, FL_UNSUPPORTED, "no CUDA driver: %s", dlerror());
        return;
    }
    for (size_t i = 0; i < FL_LEN(table); i++) {
        void *f = dlsym(lib, table[i].symbol);

        if (!f) {
            (void)fl_fail(&cu_err, FL_UNSUPPORTED,
                          "the CUDA driver lacks %s: CUDA 12 or newer is wanted", table[i].symbol);
            return;
        }
        memcpy((char *)&cuda + table[i].at, &f, sizeof(f));
    }
    cu_result r = cuda.init(0);
    if (r != CU_OK) {
        const char *name = "?", *text = "";

        (void)cuda.error_name(r, &name);
        (void)cuda.error_text(r, &text);
        fl_err_set(&cu_err, FL_UNSUPPORTED, FL_FROM_CUDA, r,
                   "the CUDA driver does not start: %s (%d), %s%s", name, r, text, hint(r));
        return;
    }
    *(void **)&whole_uuid = dlsym(lib, "cuDeviceGetUuid"); /* may be gone one day */
    cu_ready = true;
}

static enum fl_status need_driver(struct fl_err *err)
{
    pthread_once(&cu_once, load);
    if (!cu_ready && err)
        *err = cu_err;
    return cu_ready ? FL_OK : FL_UNSUPPORTED;
}

enum fl_status cuda_failed(struct fl_err *err, cu_result r, const char *what, uint64_t n)
{
    const char *name = "?", *text = "";
    enum fl_status st = r == CU_OUT_OF_MEMORY ? FL_EXHAUSTED
                        : r == CU_NOT_SUPPORTED || r == CU_NO_BINARY || r == CU_PTX_TOO_NEW
                            ? FL_UNSUPPORTED
                        : r == CU_INVALID_VALUE ? FL_INVALID
                                                : FL_UNREACHABLE;

    (void)cuda.error_name(r, &name);
    (void)cuda.error_text(r, &text);
    fl_err_set(err, st, FL_FROM_CUDA, r, "%s (%llu): %s, %s%s", what, (unsigned long long)n, name,
               text, hint(r));
    return st;
}

static int attribute(cu_device d, int which)
{
    int v = 0;

    return cuda.attribute(&v, which, d) == CU_OK ? v : 0;
}

static struct cu_prop chunk_prop(const struct gpu *g)
{
    struct cu_prop p = { .type = CU_ALLOCATION_PINNED,
                         .handle_types = CU_HANDLE_POSIX_FD,
                         .location = { CU_LOCATION_DEVICE, g->device } };

    p.flags.rdma = attribute(g->device, CU_ATTR_GPUDIRECT_VMM) != 0;
    return p;
}

static bool is_part(const struct cu_uuid *u, cu_device d, struct cu_uuid *whole)
{
    return whole_uuid && whole_uuid(whole, d) == CU_OK && memcmp(whole, u, sizeof(*u)) != 0;
}

/* As nvidia-smi calls it. */
static void uuid_text(char out[GPU_UUID_BYTES], const struct cu_uuid *u, cu_device d)
{
    struct cu_uuid whole;

    gpu_uuid_text(out, u->bytes);
    if (is_part(u, d, &whole))
        memcpy(out, "MIG", 3);
}

/* A process sees one part of a device at most, so that the whole one's name means it as well. */
static bool is_called(const struct gpu_info *info, const char *uuid)
{
    char text[GPU_UUID_BYTES];
    struct cu_uuid u, whole;
    cu_device d;

    if (strcmp(info->uuid, uuid) == 0)
        return true;
    if (cuda.device(&d, info->ordinal) != CU_OK || cuda.uuid(&u, d) != CU_OK ||
        !is_part(&u, d, &whole))
        return false;
    gpu_uuid_text(text, whole.bytes);
    return strcmp(text, uuid) == 0;
}

static enum fl_status describe(int ordinal, struct gpu_info *out, struct fl_err *err)
{
    struct gpu g = { 0 };
    struct cu_uuid u;
    size_t total = 0, granularity = 0;

    CUDA_CHECK(err, "device", ordinal, cuda.device(&g.device, ordinal));
    CUDA_CHECK(err, "uuid of device", ordinal, cuda.uuid(&u, g.device));
    CUDA_CHECK(err, "memory of device", ordinal, cuda.total(&total, g.device));
    *out = (struct gpu_info){
        .ordinal = ordinal,
        .major = attribute(g.device, CU_ATTR_MAJOR),
        .minor = attribute(g.device, CU_ATTR_MINOR),
        .multiprocessors = attribute(g.device, CU_ATTR_MULTIPROCESSORS),
        .integrated = attribute(g.device, CU_ATTR_INTEGRATED) != 0,
        .vmm = attribute(g.device, CU_ATTR_VMM) != 0,
        .posix_fd = attribute(g.device, CU_ATTR_POSIX_FD) != 0,
        .total_bytes = total,
    };
    out->legacy_ipc = !out->integrated || attribute(g.device, CU_ATTR_IPC_EVENT) != 0;
    (void)cuda.device_name(out->name, sizeof(out->name), g.device);
    uuid_text(out->uuid, &u, g.device);
    struct cu_prop p = chunk_prop(&g);
    if (out->vmm && cuda.granularity(&granularity, &p, CU_GRANULARITY_RECOMMENDED) == CU_OK)
        out->granularity_bytes = granularity;
    return FL_OK;
}

static enum fl_status cuda_list(struct gpu_info *out, size_t *n, struct fl_err *err)
{
    int count = 0;

    FL_TRY(need_driver(err));
    cu_result r = cuda.count(&count);
    if (r != CU_OK && r != CU_NO_DEVICE)
        return cuda_failed(err, r, "count devices", 0);
    if ((size_t)count > *n)
        return fl_fail(err, FL_EXHAUSTED, "%d devices, room for %zu", count, *n);
    for (int i = 0; i < count; i++)
        FL_TRY(describe(i, &out[i], err));
    *n = (size_t)count;
    return FL_OK;
}

static enum fl_status cuda_open(const char *uuid, struct gpu **out, struct fl_err *err)
{
    struct gpu_info all[GPU_MAX];
    size_t n = GPU_MAX, i = 0;

    FL_TRY(cuda_list(all, &n, err));
    while (i < n && !is_called(&all[i], uuid))
        i++;
    if (i == n)
        return fl_fail(err, FL_NOT_FOUND, "no device %s among the %zu that this process sees", uuid,
                       n);
    struct gpu *g = calloc(1, sizeof(*g));
    if (!g)
        return fl_fail(err, FL_EXHAUSTED, "no memory for device %s", uuid);
    g->info = all[i];
    cu_result r = cuda.device(&g->device, g->info.ordinal);
    if (r == CU_OK && !FL_FAULT("gpu.context"))
        r = cuda.retain(&g->context, g->device);
    if (r != CU_OK || !g->context) {
        free(g);
        return fl_wrap(err, cuda_failed(err, r ? r : CU_OUT_OF_MEMORY, "context of device", i),
                       "device %s", uuid);
    }
    *out = g;
    return FL_OK;
}

static const struct gpu_info *cuda_info(const struct gpu *g)
{
    return &g->info;
}

static enum fl_status cuda_memory(struct gpu *g, uint64_t *free_bytes, uint64_t *total,
                                  struct fl_err *err)
{
    size_t f, t;

    FL_TRY(cuda_use(g, err));
    if (g->info.integrated) /* what CUDA calls free leaves out what the page cache would give */
        return fl_fail(err, FL_UNSUPPORTED, "device %s shares the host's memory and does not say",
                       g->info.uuid);
    CUDA_CHECK(err, "memory of device", g->info.ordinal, cuda.memory(&f, &t));
    *free_bytes = f;
    *total = t;
    return FL_OK;
}

/* ==== chunks ==== */
static enum fl_status cuda_chunk_create(struct gpu *g, uint64_t bytes, struct gpu_chunk *out,
                                        struct fl_err *err)
{
    struct cu_prop p = chunk_prop(g);
    uint64_t h;

    if (FL_FAULT("gpu.chunk"))
        return cuda_failed(err, CU_OUT_OF_MEMORY, "chunk of bytes", bytes);
    FL_TRY(cuda_use(g, err));
    CUDA_CHECK(err, "chunk of bytes", bytes, cuda.create(&h, bytes, &p, 0));
    *out = (struct gpu_chunk){ h, bytes };
    return FL_OK;
}

static void cuda_chunk_release(struct gpu *g, struct gpu_chunk *c)
{
    (void)cuda.current(g->context);
    (void)cuda.release_chunk(c->handle);
    *c = (struct gpu_chunk){ 0 };
}

static uint64_t cuda_chunk_held(struct gpu *g, const struct gpu_chunk *c)
{
    (void)g;
    return c->bytes;
}

static enum fl_status cuda_chunk_export(struct gpu *g, const struct gpu_chunk *c, int *fd,
                                        struct fl_err *err)
{
    int got = -1;

    FL_TRY(cuda_use(g, err));
    CUDA_CHECK(err, "export a chunk of bytes", c->bytes,
               cuda.export_chunk(&got, c->handle, CU_HANDLE_POSIX_FD, 0));
    (void)fcntl(got, F_SETFD, FD_CLOEXEC); /* a child must not hold the device's memory */
    *fd = got;
    return FL_OK;
}

static enum fl_status cuda_chunk_import(struct gpu *g, int fd, uint64_t bytes,
                                        struct gpu_chunk *out, struct fl_err *err)
{
    uint64_t h;

    FL_TRY(cuda_use(g, err));
    CUDA_CHECK(err, "import a chunk of bytes", bytes,
               cuda.import_chunk(&h, (void *)(intptr_t)fd, CU_HANDLE_POSIX_FD));
    *out = (struct gpu_chunk){ h, bytes };
    return FL_OK;
}

static enum fl_status cuda_reserve(struct gpu *g, uint64_t bytes, uint64_t *addr,
                                   struct fl_err *err)
{
    FL_TRY(cuda_use(g, err));
    CUDA_CHECK(err, "reserve addresses, bytes", bytes, cuda.reserve(addr, bytes, 0, 0, 0));
    return FL_OK;
}

static void cuda_unreserve(struct gpu *g, uint64_t addr, uint64_t bytes)
{
    (void)cuda.current(g->context);
    (void)cuda.unreserve(addr, bytes);
}

static enum fl_status cuda_map(struct gpu *g, uint64_t addr, const struct gpu_chunk *c,
                               bool writable, struct fl_err *err)
{
    struct cu_access a = { { CU_LOCATION_DEVICE, g->device },
                           writable ? CU_ACCESS_READ_WRITE : CU_ACCESS_READ };
    cu_result r;

    FL_TRY(cuda_use(g, err));
    CUDA_CHECK(err, "map bytes", c->bytes, cuda.map(addr, c->bytes, 0, c->handle, 0));
    r = cuda.access(addr, c->bytes, &a, 1);
    if (r == CU_OK)
        return FL_OK;
    (void)cuda.unmap(addr, c->bytes);
    return cuda_failed(err, r, "give access to bytes", c->bytes);
}

static enum fl_status cuda_unmap(struct gpu *g, uint64_t addr, uint64_t bytes, struct fl_err *err)
{
    FL_TRY(cuda_use(g, err));
    CUDA_CHECK(err, "unmap bytes", bytes, cuda.unmap(addr, bytes));
    return FL_OK;
}

/* ==== plain memory ==== */
static enum fl_status cuda_alloc(struct gpu *g, uint64_t bytes, uint64_t *addr, struct fl_err *err)
{
    FL_TRY(cuda_use(g, err));
    CUDA_CHECK(err, "allocate bytes", bytes, cuda.alloc(addr, bytes));
    return FL_OK;
}

static void cuda_free(struct gpu *g, uint64_t addr)
{
    (void)cuda.current(g->context);
    (void)cuda.free(addr);
}

static enum fl_status cuda_ipc_get(struct gpu *g, uint64_t addr, struct gpu_handle *out,
                                   uint64_t *off, struct fl_err *err)
{
    struct cu_ipc h;
    uint64_t start = addr;
    int capable = 0;

    FL_TRY(cuda_use(g, err));
    CUDA_CHECK(err, "look at address", addr, cuda.pointer(&capable, CU_POINTER_LEGACY_IPC, addr));
    if (!capable)
        return fl_fail(err, FL_UNSUPPORTED,
                       "memory at %#llx is of a chunk or a pool: it has no IPC handle",
                       (unsigned long long)addr);
    CUDA_CHECK(err, "look at address", addr, cuda.pointer(&start, CU_POINTER_RANGE_START, addr));
    CUDA_CHECK(err, "IPC handle of address", addr, cuda.ipc_get(&h, addr));
    memcpy(out->b, h.reserved, sizeof(out->b));
    *off = addr - start;
    return FL_OK;
}

/* Asked of an address that may be anybody's: what the driver does not know is the host's. */
static enum fl_status cuda_where(uint64_t addr, struct gpu_where *out, struct fl_err *err)
{
    struct gpu_where w = { .start = addr };
    unsigned type = 0;
    int ordinal = 0, capable = 0, managed = 0;
    size_t bytes = 0;
    struct cu_uuid id;
    cu_device d;

    FL_TRY(need_driver(err));
    if (cuda.pointer(&type, CU_POINTER_MEMORY_TYPE, addr) != CU_OK || type != CU_MEMORY_DEVICE)
        return fl_fail(err, FL_NOT_FOUND, "memory at %#llx is on no device",
                       (unsigned long long)addr);
    CUDA_CHECK(err, "device of address", addr, cuda.pointer(&ordinal, CU_POINTER_ORDINAL, addr));
    CUDA_CHECK(err, "look at device", ordinal, cuda.device(&d, ordinal));
    CUDA_CHECK(err, "UUID of device", ordinal, cuda.uuid(&id, d));
    uuid_text(w.uuid, &id, d);
    (void)cuda.pointer(&managed, CU_POINTER_IS_MANAGED, addr);
    (void)cuda.pointer(&capable, CU_POINTER_LEGACY_IPC, addr);
    w.handle = capable && !managed &&
               cuda.pointer(&w.start, CU_POINTER_RANGE_START, addr) == CU_OK &&
               cuda.pointer(&bytes, CU_POINTER_RANGE_SIZE, addr) == CU_OK;
    w.bytes = bytes;
    *out = w;
    return FL_OK;
}

static enum fl_status cuda_ipc_open(struct gpu *g, const struct gpu_handle *handle, uint64_t *addr,
                                    struct fl_err *err)
{
    struct cu_ipc h;

    memcpy(h.reserved, handle->b, sizeof(h.reserved));
    FL_TRY(cuda_use(g, err));
    CUDA_CHECK(err, "open an IPC handle on device", g->info.ordinal,
               cuda.ipc_open(addr, h, CU_IPC_LAZY_PEER));
    return FL_OK;
}

static void cuda_ipc_close(struct gpu *g, uint64_t addr)
{
    (void)cuda.current(g->context);
    (void)cuda.ipc_close(addr);
}

static uint64_t cuda_left_of(struct gpu *g, uint64_t addr)
{
    uint64_t start = 0;
    size_t bytes = 0;

    if (cuda.current(g->context) != CU_OK ||
        cuda.pointer(&start, CU_POINTER_RANGE_START, addr) != CU_OK ||
        cuda.pointer(&bytes, CU_POINTER_RANGE_SIZE, addr) != CU_OK || start > addr ||
        bytes < addr - start)
        return UINT64_MAX;
    return bytes - (addr - start);
}

static enum fl_status cuda_peer(struct gpu *g, const struct gpu *other, struct fl_err *err)
{
    int can = 0;

    CUDA_CHECK(err, "peer access of device", g->info.ordinal,
               cuda.can_peer(&can, g->device, other->device));
    if (!can)
        return fl_fail(err, FL_UNSUPPORTED, "device %s cannot read the memory of %s", g->info.uuid,
                       other->info.uuid);
    FL_TRY(cuda_use(g, err));
    cu_result r = cuda.peer(other->context, 0);
    return r == CU_OK || r == CU_PEER_ALREADY
               ? FL_OK
               : cuda_failed(err, r, "peer access to device", (uint64_t)other->device);
}

/* ==== pinned host memory ==== */
struct pinned {
    struct pinned *next;
    void *at;
    uint64_t bytes;
};

static pthread_mutex_t pinned_lock = PTHREAD_MUTEX_INITIALIZER; /* of the lists alone */

static enum fl_status cuda_pin(struct gpu *g, uint64_t bytes, void **out, struct fl_err *err)
{
    struct pinned *p = malloc(sizeof(*p));
    enum fl_status st;
    cu_result r;

    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory to note pinned memory");
    *p = (struct pinned){ .bytes = bytes };
    st = gpu_touched_pages(bytes, &p->at, err);
    if (st != FL_OK) {
        free(p);
        return st;
    }
    r = cuda.current(g->context);
    if (r == CU_OK)
        r = cuda.pin(p->at, bytes, CU_HOST_PORTABLE);
    if (r != CU_OK) {
        (void)munmap(p->at, bytes);
        free(p);
        return cuda_failed(err, r, "pin bytes", bytes);
    }
    pthread_mutex_lock(&pinned_lock);
    p->next = g->pinned;
    g->pinned = p;
    pthread_mutex_unlock(&pinned_lock);
    *out = p->at;
    return FL_OK;
}

static void cuda_unpin(struct gpu *g, void *at)
{
    struct pinned **link = &g->pinned, *p;

    pthread_mutex_lock(&pinned_lock);
    while (*link && (*link)->at != at)
        link = &(*link)->next;
    p = *link;
    if (p)
        *link = p->next;
    pthread_mutex_unlock(&pinned_lock);
    if (!p)
        return;
    (void)cuda.current(g->context);
    (void)cuda.unpin(p->at);
    (void)munmap(p->at, p->bytes);
    free(p);
}

static void cuda_close(struct gpu *g)
{
    if (!g)
        return;
    while (g->pinned)
        cuda_unpin(g, g->pinned->at);
    if (g->module) {
        (void)cuda.current(g->context);
        (void)cuda.module_free(g->module);
    }
    (void)cuda.release(g->device);
    free(g);
}

const struct gpu_ops gpu_cuda = {
    .name = "cuda",
    .list = cuda_list,
    .open = cuda_open,
    .close = cuda_close,
    .info = cuda_info,
    .memory = cuda_memory,
    .chunk_create = cuda_chunk_create,
    .chunk_release = cuda_chunk_release,
    .chunk_held = cuda_chunk_held,
    .sync = cuda_sync,
    .chunk_export = cuda_chunk_export,
    .chunk_import = cuda_chunk_import,
    .reserve = cuda_reserve,
    .unreserve = cuda_unreserve,
    .map = cuda_map,
    .unmap = cuda_unmap,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .ipc_get = cuda_ipc_get,
    .ipc_open = cuda_ipc_open,
    .ipc_close = cuda_ipc_close,
    .left_of = cuda_left_of,
    .peer = cuda_peer,
    .where = cuda_where,
    .pin = cuda_pin,
    .unpin = cuda_unpin,
    .stream = cuda_stream,
    .stream_free = cuda_stream_free,
    .stream_raw = cuda_stream_raw,
    .raw_sync = cuda_raw_sync,
    .stream_sync = cuda_stream_sync,
    .stream_wait = cuda_stream_wait,
    .event = cuda_event,
    .event_free = cuda_event_free,
    .event_record = cuda_event_record,
    .event_done = cuda_event_done,
    .event_sync = cuda_event_sync,
    .event_ms = cuda_event_ms,
    .copy = cuda_copy,
    .fill = cuda_fill,
    .launch = cuda_launch,
};
