#include "transport/link/dev_priv.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "common/base/str.h"
#include "transport/link/link_priv.h"

enum { CHUNK_BYTES = 256 << 20 }; /* 16 GiB remap in 3.4 ms; of 64 MiB in 12 ms */
static struct link_dev *devices;
static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint handles_opened;

/* ==== devices ================================================================================= */
struct dev_stir { /* the least that a device can be given to do */
    struct kernel_piece piece;
    _Alignas(16) unsigned char from[16], to[16];
};

static struct dev_stir *stir_of(const struct link_dev *d)
{
    return (struct dev_stir *)(void *)((char *)d->bounce + DEV_BOUNCE_BYTES);
}

static enum fl_status dev_open(const char *uuid, struct link_dev **out, struct fl_err *err)
{
    struct link_dev *d = calloc(1, sizeof(*d));
    enum fl_status st;

    if (!d)
        return fl_fail(err, FL_EXHAUSTED, "no memory for device %s", uuid);
    (void)FL_COPY(d->uuid, uuid);
    st = gpu_pick(&d->gpu, err);
    if (st == FL_OK)
        st = d->gpu->open(uuid, &d->g, err);
    if (st == FL_OK)
        st = d->gpu->stream(d->g, &d->stream, err);
    if (st == FL_OK)
        st = d->gpu->stream(d->g, &d->upload, err);
    if (st == FL_OK)
        st = d->gpu->pin(d->g, DEV_BOUNCE_BYTES + sizeof(struct dev_stir), &d->bounce, err);
    if (st != FL_OK) {
        if (d->upload)
            d->gpu->stream_free(d->upload);
        if (d->stream)
            d->gpu->stream_free(d->stream);
        if (d->g)
            d->gpu->close(d->g);
        free(d);
        return fl_wrap(err, st, "open device %s", uuid);
    }
    *stir_of(d) = (struct dev_stir){ .piece = { .run_bytes = sizeof(stir_of(d)->to), .rows = 1 } };
    pthread_mutex_init(&d->lock, NULL);
    pthread_mutex_init(&d->handles, NULL);
    pthread_mutex_init(&d->service, NULL);
    *out = d;
    return FL_OK;
}

enum fl_status link_dev_get(const char *uuid, struct link_dev **out, struct fl_err *err)
{
    enum fl_status st = FL_OK;

    pthread_mutex_lock(&devices_lock);
    struct link_dev *d = devices;

    while (d && strcmp(d->uuid, uuid) != 0)
        d = d->next;
    if (!d) {
        st = dev_open(uuid, &d, err);
        if (st == FL_OK) {
            d->next = devices;
            devices = d;
        }
    }
    pthread_mutex_unlock(&devices_lock);
    if (st == FL_OK)
        *out = d;
    return st;
}

void link_dev_stir(const char *uuid)
{
    if (pthread_mutex_trylock(&devices_lock) != 0)
        return; /* one is being opened */
    struct link_dev *d = devices;

    while (d && strcmp(d->uuid, uuid) != 0)
        d = d->next;
    pthread_mutex_unlock(&devices_lock);
    if (!d || pthread_mutex_trylock(&d->lock) != 0)
        return;
    const struct dev_stir *w = stir_of(d);
    struct kernel_move_args a = {
        .pieces = dev_addr(&w->piece), .n = 1, .from = dev_addr(w->from), .to = dev_addr(w->to)
    };

    (void)kernel_move_start(d->gpu, d->g, d->stream, &a, NULL); /* without it: only later */
    pthread_mutex_unlock(&d->lock);
}

enum fl_status dev_warm(struct link_dev *d, struct fl_err *err)
{
    const struct dev_stir *w = stir_of(d);
    struct kernel_move_args a = {
        .pieces = dev_addr(&w->piece), .n = 1, .from = dev_addr(w->from), .to = dev_addr(w->to)
    };

    pthread_mutex_lock(&d->lock);
    enum fl_status st = d->warm ? FL_OK : kernel_move_start(d->gpu, d->g, d->stream, &a, err);

    a.digests = a.to;
    a.to = 0;
    if (st == FL_OK && !d->warm)
        st = kernel_move_start(d->gpu, d->g, d->stream, &a, err);
    d->warm = st == FL_OK;
    pthread_mutex_unlock(&d->lock);
    return st == FL_OK ? d->gpu->stream_sync(d->stream, err) : st;
}

const struct link_pages *link_pages_of(const struct link_mem *mem)
{
    const struct link_pages *p = mem->impl;

    return mem->on_device && p && p->magic == LINK_PAGES ? p : NULL;
}

enum fl_status dev_of(const struct link_mem *mem, struct link_dev **out, struct fl_err *err)
{
    const struct link_pages *p = link_pages_of(mem);

    if (!p)
        return fl_fail(err, FL_INVALID, "memory at %p: nobody said on which device it is",
                       mem->addr);
    return link_dev_get(p->uuid, out, err);
}

/* ==== slots =================================================================================== */
struct own_slot {
    struct link_pages pages;
    bool foreign;
    uint64_t reserved_bytes;
    struct gpu_chunk *chunks;
    int *fds;
    unsigned n_mapped;
};

static struct own_slot *own_slot_of(const struct link_mem *mem)
{
    const struct link_pages *p = link_pages_of(mem);

    return p ? container_of(p, struct own_slot, pages) : NULL;
}

static void slot_drop(struct link_dev *d, struct own_slot *o, uint64_t addr)
{
    pthread_mutex_lock(&d->lock);
    for (unsigned i = 0; i < o->n_mapped; i++)
        (void)d->gpu->unmap(d->g, addr + i * o->chunks[0].bytes, o->chunks[0].bytes, NULL);
    for (unsigned i = 0; i < o->pages.n_chunks; i++) {
        if (o->fds[i] >= 0)
            close(o->fds[i]);
        if (o->chunks[i].bytes)
            d->gpu->chunk_release(d->g, &o->chunks[i]);
    }
    if (addr)
        d->gpu->unreserve(d->g, addr, o->reserved_bytes);
    pthread_mutex_unlock(&d->lock);
    free(o->chunks);
    free(o->fds);
    free(o);
}

static enum fl_status slot_fill(struct link_dev *d, struct own_slot *o, uint64_t chunk,
                                uint64_t *addr, struct fl_err *err)
{
    FL_TRY(d->gpu->reserve(d->g, o->reserved_bytes, addr, err));
    for (unsigned i = 0; i < o->pages.n_chunks; i++) {
        FL_TRY(d->gpu->chunk_create(d->g, chunk, &o->chunks[i], err));
        FL_TRY(d->gpu->map(d->g, *addr + i * chunk, &o->chunks[i], true, err));
        o->n_mapped++;
        FL_TRY(d->gpu->chunk_export(d->g, &o->chunks[i], &o->fds[i], err));
    }
    return FL_OK;
}

static enum fl_status say_full(struct link_dev *d, uint64_t bytes, struct fl_err *err)
{
    uint64_t left = 0, all = 0;
    char want[16], has[16];

    if (!err || d->gpu->memory(d->g, &left, &all, NULL) != FL_OK)
        return FL_EXHAUSTED;
    return fl_fail(err, FL_EXHAUSTED,
                   "device %s has %s left, a second slot for the weights takes %s; with one slot "
                   "it is not needed: "
                   "the engine then serves nothing while it is updated",
                   d->uuid, fl_bytes_text(has, left), fl_bytes_text(want, bytes));
}

enum fl_status link_dev_alloc(const char *uuid, uint64_t bytes, struct link_mem *out,
                              struct fl_err *err)
{
    struct link_dev *d;
    uint64_t addr = 0;

    FL_TRY(link_dev_get(uuid, &d, err));
    uint64_t grain = d->gpu->info(d->g)->granularity_bytes;

    if (!grain || bytes > INT64_MAX)
        return fl_fail(err, grain ? FL_INVALID : FL_UNSUPPORTED,
                       "a slot of %llu bytes on device %s%s", (unsigned long long)bytes, uuid,
                       grain ? "" : ": its driver has no virtual memory management");
    uint64_t whole = ((bytes ? bytes : 1) + grain - 1) / grain * grain;
    uint64_t chunk = whole < CHUNK_BYTES ? whole : CHUNK_BYTES;
    uint32_t n = (uint32_t)((whole + chunk - 1) / chunk);
    struct own_slot *o = calloc(1, sizeof(*o));

    if (!o)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a slot");
    *o = (struct own_slot){ .pages = { .magic = LINK_PAGES, .n_chunks = n },
                            .reserved_bytes = n * chunk,
                            .chunks = calloc(n, sizeof(*o->chunks)),
                            .fds = malloc(n * sizeof(*o->fds)) };
    (void)FL_COPY(o->pages.uuid, uuid);
    o->pages.fds = o->fds;
    o->pages.chunks = o->chunks;
    enum fl_status st =
        o->chunks && o->fds ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory for %u chunks", n);

    for (unsigned i = 0; st == FL_OK && i < n; i++)
        o->fds[i] = -1;
    if (st != FL_OK) {
        o->pages.n_chunks = 0;
        slot_drop(d, o, 0);
        return st;
    }
    pthread_mutex_lock(&d->lock);
    st = slot_fill(d, o, chunk, &addr, err);
    if (st == FL_EXHAUSTED)
        (void)say_full(d, bytes, err);
    pthread_mutex_unlock(&d->lock);
    if (st != FL_OK) {
        slot_drop(d, o, addr);
        return st;
    }
    *out = (struct link_mem){ .addr = (void *)(uintptr_t)addr,
                              .bytes = bytes,
                              .chunk_bytes = chunk,
                              .on_device = true,
                              .impl = &o->pages };
    return FL_OK;
}

enum fl_status link_dev_foreign(const char *uuid, uint64_t addr, uint64_t bytes,
                                struct link_mem *out, struct fl_err *err)
{
    struct own_slot *o = calloc(1, sizeof(*o));

    if (!o)
        return fl_fail(err, FL_EXHAUSTED, "no memory to describe a slot");
    *o = (struct own_slot){ .pages = { .magic = LINK_PAGES }, .foreign = true };
    if (!FL_COPY(o->pages.uuid, uuid)) {
        free(o);
        return fl_fail(err, FL_INVALID, "%.60s is not the name of a device", uuid);
    }
    *out = (struct link_mem){
        .addr = (void *)(uintptr_t)addr, .bytes = bytes, .on_device = true, .impl = &o->pages
    };
    return FL_OK;
}

enum fl_status link_dev_staged(const char *uuid, uint64_t addr, uint64_t bytes,
                               struct link_mem *out, struct fl_err *err)
{
    FL_TRY(link_dev_foreign(uuid, addr, bytes, out, err));
    own_slot_of(out)->pages.staged = true;
    return FL_OK;
}

void link_dev_free(struct link_mem *mem)
{
    struct own_slot *o = own_slot_of(mem);
    struct link_dev *d;

    if (!o)
        return;
    if (o->foreign)
        free(o);
    else if (link_dev_get(o->pages.uuid, &d, NULL) == FL_OK)
        slot_drop(d, o, dev_addr(mem->addr));
    *mem = (struct link_mem){ 0 };
}

/* ==== what belongs to others ================================================================== */
struct dev_opened {
    struct dev_opened *next;
    struct gpu_handle h;
    uint64_t addr, bytes;
    unsigned users;
};

enum fl_status dev_handle_open(struct link_dev *d, const struct gpu_handle *h, uint64_t *addr,
                               uint64_t *bytes, struct fl_err *err)
{
    struct dev_opened *o;
    enum fl_status st = FL_OK;

    pthread_mutex_lock(&d->handles);
    for (o = d->opened; o && memcmp(&o->h, h, sizeof(*h)) != 0; o = o->next)
        ;
    if (!o) {
        o = calloc(1, sizeof(*o));
        st = o ? d->gpu->ipc_open(d->g, h, &o->addr, err)
               : fl_fail(err, FL_EXHAUSTED, "no memory for a handle");
        if (st == FL_OK) {
            atomic_fetch_add(&handles_opened, 1);
            o->h = *h;
            o->bytes = d->gpu->left_of(d->g, o->addr);
            o->next = d->opened;
            d->opened = o;
        } else {
            free(o);
        }
    }
    if (st == FL_OK) {
        o->users++;
        *addr = o->addr;
        *bytes = o->bytes;
    }
    pthread_mutex_unlock(&d->handles);
    return st;
}

void dev_handle_close(struct link_dev *d, uint64_t addr)
{
    pthread_mutex_lock(&d->handles);
    for (struct dev_opened **at = &d->opened; *at; at = &(*at)->next) {
        struct dev_opened *o = *at;

        if (o->addr != addr)
            continue;
        if (--o->users == 0) {
            d->gpu->ipc_close(d->g, addr);
            *at = o->next;
            free(o);
        }
        break;
    }
    pthread_mutex_unlock(&d->handles);
}

unsigned dev_handles_opened(void)
{
    return atomic_load(&handles_opened);
}

enum fl_status dev_map_chunks(struct link_dev *d, uint64_t addr, const int *fds, unsigned n,
                              uint64_t each, bool writable, struct gpu_chunk *keep,
                              struct fl_err *err)
{
    enum fl_status st = FL_OK;
    unsigned i = 0;

    pthread_mutex_lock(&d->lock);
    for (; i < n && st == FL_OK; i++) {
        struct gpu_chunk c;

        st = FL_FAULT("link.ipc.import") ? fl_fail(err, FL_DENIED, "fault link.ipc.import")
                                         : d->gpu->chunk_import(d->g, fds[i], each, &c, err);
        if (st != FL_OK)
            break;
        st = d->gpu->map(d->g, addr + i * each, &c, writable, err);
        if (st == FL_OK && keep)
            keep[i] = c;
        else
            d->gpu->chunk_release(d->g, &c); /* lives on while it is mapped */
        if (st != FL_OK)
            break;
    }
    for (unsigned k = 0; st != FL_OK && k < i; k++) {
        (void)d->gpu->unmap(d->g, addr + k * each, each, NULL);
        if (keep)
            d->gpu->chunk_release(d->g, &keep[k]);
    }
    pthread_mutex_unlock(&d->lock);
    return st;
}

/* ==== places ================================================================================== */
uint64_t link_gpu_id(const char *uuid)
{
    uint64_t h = 0xcbf29ce484222325ull; /* FNV-1a */

    for (; *uuid; uuid++)
        h = (h ^ (unsigned char)*uuid) * 0x100000001b3ull;
    return h;
}

enum fl_status link_place_device(struct link_place *p, const char *uuid,
                                 const struct gpu_found *found, size_t n, struct fl_err *err)
{
    char text[160] = "";
    struct fl_str list = FL_STR_ON(text);

    for (size_t i = 0; i < n; i++) {
        if (strcmp(found[i].info.uuid, uuid) != 0) {
            fl_str_add(&list, "%s%s", list.len ? ", " : "", found[i].info.uuid);
            continue;
        }
        (void)FL_COPY(p->gpu_uuid, uuid);
        p->unified = found[i].info.integrated;
        p->vmm_fd = found[i].fd_shares;
        p->legacy_ipc = found[i].handle_shares;
        p->n_gpu_peers = 0;
        for (size_t k = 0; k < n && p->n_gpu_peers < LINK_PEERS; k++)
            if (k != i && (found[i].peers >> k & 1))
                p->gpu_peers[p->n_gpu_peers++] = link_gpu_id(found[k].info.uuid);
        link_place_nccl(p);
        return FL_OK;
    }
    return fl_fail(err, FL_NOT_FOUND, "no device %s here; there are: %s", uuid, n ? text : "none");
}
