/* common/gpu/host.c - host memory with the face of a device: gpu_host as it is, gpu_fake with a
 * device's refusals
 *
 * Chunks and allocations are memfds, so exporting to another process, mapping at fixed addresses,
 * read-only mappings and memory that outlives its maker are real. Streams are in host_stream.c.
 * What the fake's devices are, and who holds what of them, is in fake.c. */
#include "common/gpu/host_priv.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/loop.h"
#include "common/base/str.h"
#include "common/gpu/guard.h"

enum { GRANULARITY = 2 << 20 };
struct block { /* of alloc and ipc_open */
    struct block *next;
    uint64_t addr, bytes;
    int fd; /* -1: another process's */
};
struct ticket {
    int32_t pid, fd;
    uint64_t bytes;
}; /* what a handle holds */
_Static_assert(sizeof(struct ticket) <= GPU_HANDLE_BYTES, "fits a handle");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER, blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static struct seen { /* device memory of this process, whichever struct gpu it was asked of */
    struct seen *next;
    uint64_t addr, bytes;
    size_t device;
    int fd; /* of a plain allocation, which has a handle; -1 */
} *seen;

static enum fl_status fake_open(const char *uuid, struct gpu **out, struct fl_err *err)
{
    struct gpu_info all[GPU_MAX];
    size_t n = GPU_MAX;

    FL_TRY(gpu_fake.list(all, &n, err));
    for (size_t i = 0; i < n; i++) {
        if (strcmp(all[i].uuid, uuid) != 0)
            continue;
        struct gpu *g = FL_FAULT("gpu.context") ? NULL : calloc(1, sizeof(*g));
        if (!g)
            return fl_fail(err, FL_EXHAUSTED, "no memory for device %s", uuid);
        *g = (struct gpu){ .info = all[i], .counted = true, .device = fake_device(uuid) };
        fake_hold(g->device);
        *out = g;
        return FL_OK;
    }
    return fl_fail(err, FL_NOT_FOUND, "no device %s among the %zu that this process sees", uuid, n);
}

static struct gpu_info host_describe(void)
{
    return (struct gpu_info){ .uuid = "host",
                              .name = "host memory",
                              .multiprocessors = 1,
                              .integrated = true,
                              .vmm = true,
                              .posix_fd = true,
                              .total_bytes = UINT64_MAX,
                              .granularity_bytes = GRANULARITY };
}

static enum fl_status host_list(struct gpu_info *out, size_t *n, struct fl_err *err)
{
    if (*n == 0)
        return fl_fail(err, FL_EXHAUSTED, "one device, room for none");
    out[0] = host_describe();
    *n = 1;
    return FL_OK;
}

static enum fl_status host_open(const char *uuid, struct gpu **out, struct fl_err *err)
{
    struct gpu *g;

    if (strcmp(uuid, "host") != 0)
        return fl_fail(err, FL_NOT_FOUND, "host memory is the device \"host\", not %s", uuid);
    g = FL_FAULT("gpu.context") ? NULL : calloc(1, sizeof(*g));
    if (!g)
        return fl_fail(err, FL_EXHAUSTED, "no memory for device %s", uuid);
    g->info = host_describe();
    *out = g;
    return FL_OK;
}

static const struct gpu_info *fake_info(const struct gpu *g)
{
    return &g->info;
}

/* As an integrated device's NVML answers: the host's pool is the truth there. */
static enum fl_status fake_memory(struct gpu *g, uint64_t *free_bytes, uint64_t *total,
                                  struct fl_err *err)
{
    if (g->info.integrated)
        return fl_fail(err, FL_UNSUPPORTED, "device %s shares the host's memory and does not say",
                       g->info.uuid);
    *total = g->info.total_bytes;
    *free_bytes = *total - fake_held(g->device);
    return FL_OK;
}

static bool take(struct gpu *g, uint64_t bytes)
{
    return !g->counted || fake_take(g->device, bytes);
}

static void give_back(struct gpu *g, uint64_t bytes)
{
    if (g->counted)
        fake_give(g->device, bytes);
}

static void note_seen(const struct gpu *g, uint64_t addr, uint64_t bytes, int fd, bool writable)
{
    struct seen *n = g->counted ? malloc(sizeof(*n)) : NULL;

    if (!n) /* without a note it is taken for the host's */
        return;
    pthread_mutex_lock(&lock);
    *n = (struct seen){ seen, addr, bytes, g->device, fd };
    seen = n;
    pthread_mutex_unlock(&lock);
    guard_add(addr, bytes, PROT_READ | (writable ? PROT_WRITE : 0));
}

static void forget_seen(uint64_t addr, uint64_t bytes)
{
    guard_remove(addr, bytes);
    pthread_mutex_lock(&lock);
    for (struct seen **p = &seen; *p;) {
        struct seen *n = *p;

        if (n->addr < addr || n->addr >= addr + bytes) {
            p = &n->next;
            continue;
        }
        *p = n->next;
        free(n);
    }
    pthread_mutex_unlock(&lock);
}

static enum fl_status fake_where(uint64_t addr, struct gpu_where *out, struct fl_err *err)
{
    enum fl_status st = FL_NOT_FOUND;

    pthread_mutex_lock(&lock);
    for (const struct seen *n = seen; n && st != FL_OK; n = n->next) {
        struct gpu_info info;

        if (addr < n->addr || addr >= n->addr + n->bytes)
            continue;
        info = fake_describe(n->device);
        *out = (struct gpu_where){ .start = n->addr, .bytes = n->bytes };
        out->handle = n->fd >= 0 && info.legacy_ipc;
        memcpy(out->uuid, info.uuid, sizeof(out->uuid));
        st = FL_OK;
    }
    pthread_mutex_unlock(&lock);
    return st == FL_OK ? st
                       : fl_fail(err, FL_NOT_FOUND, "memory at %#llx is on no device",
                                 (unsigned long long)addr);
}

/* A memfd of so many bytes, sealed at that size: a peer must not be able to cut it short. */
static enum fl_status pages(struct gpu *g, uint64_t bytes, int *fd, struct fl_err *err)
{
    if (FL_FAULT("gpu.chunk") || !take(g, bytes))
        return fl_fail(err, FL_EXHAUSTED, "device %s: no %llu bytes left", g->info.uuid,
                       (unsigned long long)bytes);
    *fd = memfd_create("furlong-memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd >= 0 && ftruncate(*fd, (off_t)bytes) == 0 &&
        fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0)
        return FL_OK;
    enum fl_status st =
        fl_fail_errno(err, "device memory of %llu bytes", (unsigned long long)bytes);
    if (*fd >= 0)
        close(*fd);
    give_back(g, bytes);
    return st;
}

static enum fl_status fake_chunk_create(struct gpu *g, uint64_t bytes, struct gpu_chunk *out,
                                        struct fl_err *err)
{
    int fd;

    if (!g->info.vmm)
        return fl_fail(err, FL_UNSUPPORTED, "device %s has no chunks", g->info.uuid);
    if (bytes == 0 || bytes % GRANULARITY)
        return fl_fail(err, FL_INVALID, "a chunk of %llu bytes is no multiple of %d",
                       (unsigned long long)bytes, GRANULARITY);
    FL_TRY(pages(g, bytes, &fd, err));
    *out = (struct gpu_chunk){ (uint64_t)fd << 1 | 1, bytes }; /* odd: counted here */
    return FL_OK;
}

static int chunk_fd(const struct gpu_chunk *c)
{
    return (int)(c->handle >> 1);
}

static void fake_chunk_release(struct gpu *g, struct gpu_chunk *c)
{
    if (c->handle & 1)
        give_back(g, c->bytes);
    close(chunk_fd(c));
    *c = (struct gpu_chunk){ 0 };
}

static uint64_t fake_chunk_held(struct gpu *g, const struct gpu_chunk *c)
{
    struct stat st;

    /* Pages of a fake device are there from birth, as a device's are. */
    if (g->counted || fstat(chunk_fd(c), &st) < 0)
        return c->bytes;
    return (uint64_t)st.st_blocks * 512;
}

static enum fl_status fake_chunk_export(struct gpu *g, const struct gpu_chunk *c, int *fd,
                                        struct fl_err *err)
{
    int got = FL_FAULT("gpu.export") ? -1 : fcntl(chunk_fd(c), F_DUPFD_CLOEXEC, 0);

    if (got < 0)
        return fl_fail_errno(err, "export a chunk of device %s", g->info.uuid);
    *fd = got;
    return FL_OK;
}

static enum fl_status fake_chunk_import(struct gpu *g, int fd, uint64_t bytes,
                                        struct gpu_chunk *out, struct fl_err *err)
{
    if (FL_FAULT("gpu.import"))
        return fl_fail(err, FL_DENIED, "import to device %s: not permitted", g->info.uuid);
    off_t size = lseek(fd, 0, SEEK_END);
    int got = size == (off_t)bytes ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;

    if (got < 0)
        return fl_fail(err, FL_INVALID,
                       "import to device %s: descriptor %d holds %lld bytes, not %llu",
                       g->info.uuid, fd, (long long)size, (unsigned long long)bytes);
    *out = (struct gpu_chunk){ (uint64_t)got << 1, bytes };
    return FL_OK;
}

static enum fl_status map_pages(void *at, uint64_t bytes, int fd, int prot, int flags,
                                uint64_t *addr, struct fl_err *err)
{
    void *p = FL_FAULT("gpu.map") ? MAP_FAILED : mmap(at, bytes, prot, flags, fd, 0);

    if (p == MAP_FAILED)
        return fl_fail_errno(err, "map %llu bytes", (unsigned long long)bytes);
    *addr = (uint64_t)(uintptr_t)p;
    return FL_OK;
}

/* Aligned to the granularity, as a device's addresses are. */
static enum fl_status fake_reserve(struct gpu *g, uint64_t bytes, uint64_t *addr,
                                   struct fl_err *err)
{
    uint64_t at, skip;

    if (bytes == 0 || bytes > INT64_MAX)
        return fl_fail(err, FL_INVALID, "device %s: cannot reserve %llu bytes of addresses",
                       g->info.uuid, (unsigned long long)bytes);
    FL_TRY(map_pages(NULL, bytes + GRANULARITY, -1, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, &at, err));
    skip = (GRANULARITY - at % GRANULARITY) % GRANULARITY;
    if (skip)
        munmap((void *)(uintptr_t)at, skip);
    if (skip < GRANULARITY)
        munmap((void *)(uintptr_t)(at + skip + bytes), GRANULARITY - skip);
    *addr = at + skip;
    return FL_OK;
}

static void fake_unreserve(struct gpu *g, uint64_t addr, uint64_t bytes)
{
    (void)g;
    munmap((void *)(uintptr_t)addr, bytes);
}

static enum fl_status fake_map(struct gpu *g, uint64_t addr, const struct gpu_chunk *c,
                               bool writable, struct fl_err *err)
{
    FL_TRY(map_pages((void *)(uintptr_t)addr, c->bytes, chunk_fd(c),
                     PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED | MAP_FIXED, &addr, err));
    (void)madvise((void *)(uintptr_t)addr, c->bytes, MADV_HUGEPAGE); /* a wish */
    note_seen(g, addr, c->bytes, -1, writable);
    return FL_OK;
}

static enum fl_status fake_unmap(struct gpu *g, uint64_t addr, uint64_t bytes, struct fl_err *err)
{
    if (g->counted)
        forget_seen(addr, bytes);
    return map_pages((void *)(uintptr_t)addr, bytes, -1, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, &addr, err);
}

/* ==== plain memory ==== */
static enum fl_status add_block(struct gpu *g, uint64_t addr, uint64_t bytes, int fd,
                                struct fl_err *err)
{
    struct block *b = malloc(sizeof(*b));

    if (!b)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a block");
    pthread_mutex_lock(&blocks_lock);
    *b = (struct block){ g->blocks, addr, bytes, fd };
    g->blocks = b;
    pthread_mutex_unlock(&blocks_lock);
    return FL_OK;
}

static struct block *take_block(struct gpu *g, uint64_t addr)
{
    struct block **p = &g->blocks, *b;

    pthread_mutex_lock(&blocks_lock);
    while (*p && (*p)->addr != addr)
        p = &(*p)->next;
    b = *p;
    if (b)
        *p = b->next;
    pthread_mutex_unlock(&blocks_lock);
    return b;
}

static void drop_block(struct gpu *g, uint64_t addr)
{
    struct block *b = take_block(g, addr);

    if (!b)
        return;
    if (g->counted)
        forget_seen(b->addr, b->bytes);
    munmap((void *)(uintptr_t)b->addr, b->bytes);
    if (b->fd >= 0) {
        close(b->fd);
        give_back(g, b->bytes);
    }
    free(b);
}

static enum fl_status fake_alloc(struct gpu *g, uint64_t bytes, uint64_t *addr, struct fl_err *err)
{
    uint64_t at;
    int fd;

    FL_TRY(pages(g, bytes, &fd, err));
    enum fl_status st = map_pages(NULL, bytes, fd, PROT_READ | PROT_WRITE, MAP_SHARED, &at, err);
    if (st == FL_OK) {
        st = add_block(g, at, bytes, fd, err);
        if (st == FL_OK) {
            note_seen(g, at, bytes, fd, true);
            *addr = at;
            return FL_OK;
        }
        munmap((void *)(uintptr_t)at, bytes);
    }
    close(fd);
    give_back(g, bytes);
    return st;
}

/* Of any device's allocation in this process, as the driver's. */
static enum fl_status fake_ipc_get(struct gpu *g, uint64_t addr, struct gpu_handle *out,
                                   uint64_t *off, struct fl_err *err)
{
    struct ticket t = { .pid = getpid(), .fd = -1 };

    pthread_mutex_lock(&lock);
    for (const struct seen *n = seen; n && g->info.legacy_ipc && t.fd < 0; n = n->next)
        if (addr >= n->addr && addr < n->addr + n->bytes && n->fd >= 0) {
            t.fd = n->fd;
            t.bytes = n->bytes;
            *off = addr - n->addr;
        }
    pthread_mutex_unlock(&lock);
    if (t.fd < 0)
        return fl_fail(err, FL_UNSUPPORTED, "memory at %#llx has no IPC handle",
                       (unsigned long long)addr);
    memset(out, 0, sizeof(*out));
    memcpy(out->b, &t, sizeof(t));
    return FL_OK;
}

static enum fl_status fake_ipc_open(struct gpu *g, const struct gpu_handle *h, uint64_t *addr,
                                    struct fl_err *err)
{
    struct ticket t;
    char path[64];
    uint64_t at;

    memcpy(&t, h->b, sizeof(t));
    if (t.pid == getpid()) /* as CUDA: the exporter cannot open its own */
        return fl_fail(err, FL_INVALID,
                       "an IPC handle cannot be opened in the process that made it");
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", t.pid, t.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return fl_fail_errno(err, "open an IPC handle of process %d", t.pid);
    enum fl_status st = map_pages(NULL, t.bytes, fd, PROT_READ | PROT_WRITE, MAP_SHARED, &at, err);
    close(fd);
    FL_TRY(st);
    st = add_block(g, at, t.bytes, -1, err);
    if (st != FL_OK) {
        munmap((void *)(uintptr_t)at, t.bytes);
        return st;
    }
    note_seen(g, at, t.bytes, -1, true);
    *addr = at;
    return FL_OK;
}

static uint64_t fake_left_of(struct gpu *g, uint64_t addr)
{
    uint64_t left = UINT64_MAX;

    pthread_mutex_lock(&blocks_lock);
    for (const struct block *b = g->blocks; b && left == UINT64_MAX; b = b->next)
        if (addr >= b->addr && addr - b->addr < b->bytes)
            left = b->bytes - (addr - b->addr);
    pthread_mutex_unlock(&blocks_lock);
    return left;
}

static enum fl_status fake_peer(struct gpu *g, const struct gpu *other, struct fl_err *err)
{
    if (FL_FAULT("gpu.peer"))
        return fl_fail(err, FL_UNSUPPORTED, "device %s cannot read the memory of %s", g->info.uuid,
                       other->info.uuid);
    return FL_OK;
}

static enum fl_status fake_pin(struct gpu *g, uint64_t bytes, void **out, struct fl_err *err)
{
    uint64_t at;

    FL_TRY(
        map_pages(NULL, bytes, -1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, &at, err));
    enum fl_status st = add_block(g, at, bytes, -1, err);
    if (st == FL_OK)
        *out = (void *)(uintptr_t)at;
    else
        munmap((void *)(uintptr_t)at, bytes);
    return st;
}

static void fake_free(struct gpu *g, uint64_t addr)
{
    host_settle(g);
    drop_block(g, addr);
}

static void fake_unpin(struct gpu *g, void *p)
{
    fake_free(g, (uint64_t)(uintptr_t)p);
}

static void fake_close(struct gpu *g)
{
    if (g)
        host_settle(g);
    while (g && g->blocks)
        drop_block(g, g->blocks->addr);
    free(g);
}

/* clang-format off */
#define MEMORY_OF_THE_HOST                                                                        \
    .close = fake_close, .info = fake_info, .memory = fake_memory, .sync = fake_sync,             \
    .chunk_create = fake_chunk_create, .chunk_release = fake_chunk_release,                       \
    .chunk_held = fake_chunk_held, .chunk_export = fake_chunk_export,                             \
    .chunk_import = fake_chunk_import, .reserve = fake_reserve, .unreserve = fake_unreserve,      \
    .map = fake_map, .unmap = fake_unmap, .alloc = fake_alloc, .free = fake_free,                 \
    .ipc_get = fake_ipc_get, .ipc_open = fake_ipc_open, .ipc_close = drop_block,                  \
    .left_of = fake_left_of, .peer = fake_peer, .where = fake_where, .pin = fake_pin,             \
    .unpin = fake_unpin, .stream = fake_stream, .stream_free = fake_stream_free,                  \
    .stream_raw = fake_stream_raw, .raw_sync = fake_raw_sync, .stream_sync = fake_stream_sync,    \
    .stream_wait = fake_stream_wait, .event = fake_event, .event_free = fake_event_free,          \
    .event_record = fake_event_record, .event_done = fake_event_done,                             \
    .event_sync = fake_event_sync, .event_ms = fake_event_ms, .copy = fake_copy,                  \
    .fill = fake_fill, .launch = fake_launch
/* clang-format on */
const struct gpu_ops gpu_fake = {
    .name = "fake", .list = gpu_fake_visible, .open = fake_open, MEMORY_OF_THE_HOST
};
const struct gpu_ops gpu_host = {
    .name = "host", .list = host_list, .open = host_open, MEMORY_OF_THE_HOST
};
