/* transport/link/ipc_key.c - how device memory is named to another process, and seen there
 *
 * By descriptors of chunks where the memory has chunks, by the legacy handle of the allocation
 * where it has none. Each step down is said once, with its reason. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "transport/link/ipc_priv.h"

static void say_handle(bool has_chunks)
{
    static atomic_bool said[2]; /* by reason */

    if (!atomic_exchange(&said[has_chunks], true))
        fl_info("weights are shared by IPC handle, not by descriptor why=\"%s\"",
                has_chunks
                    ? "descriptors of chunks do not reach other processes here, the probe tried"
                    : "the memory is an allocation without chunks");
}

static enum fl_status share_chunks(const struct link_mem *mine, const struct link_pages *pages,
                                   struct link_key *out, struct ipc_key *key, struct fl_err *err)
{
    uint32_t first = out->part * WIRE_MAX_FDS, n = pages->n_chunks;

    if (first >= n)
        return fl_fail(err, FL_INVALID, "cuda_ipc: part %u of memory with %u chunks", out->part, n);
    key->kind = IPC_CHUNKS;
    key->n_chunks = n;
    key->first_chunk = first;
    key->chunk_bytes = mine->chunk_bytes;
    key->off = pages->off;
    out->parts = (n + WIRE_MAX_FDS - 1) / WIRE_MAX_FDS;
    out->n_fds = n - first < WIRE_MAX_FDS ? n - first : WIRE_MAX_FDS;
    memcpy(out->fds, pages->fds + first, out->n_fds * sizeof(int));
    return FL_OK;
}

static enum fl_status share_handle(struct ipc *k, const struct link_mem *mine, struct ipc_key *key,
                                   struct fl_err *err)
{
    enum fl_status st = FL_UNSUPPORTED;

    if (!k->self.legacy_ipc)
        return fl_fail(err, FL_UNSUPPORTED,
                       "IPC handles of device %s do not reach other processes here: the probe of "
                       "this host tried",
                       k->self.gpu_uuid);
    key->kind = IPC_HANDLE;
    pthread_mutex_lock(&k->dev->lock);
    st = k->dev->gpu->ipc_get(k->dev->g, dev_addr(mine->addr), &key->handle, &key->off, err);
    pthread_mutex_unlock(&k->dev->lock);
    return st;
}

enum fl_status ipc_share(struct link *base, const struct link_mem *mine, struct link_key *out,
                         struct fl_err *err)
{
    struct ipc *k = container_of(base, struct ipc, base);
    const struct link_pages *pages = link_pages_of(mine);
    struct ipc_key key = { .magic = IPC_KEY_MAGIC, .pid = getpid(), .bytes = mine->bytes };
    struct fl_err why = { 0 };
    enum fl_status st;

    if (FL_FAULT("link.ipc.share"))
        return fl_fail(err, FL_UNSUPPORTED, "fault link.ipc.share");
    if (k->state == IPC_OPENING)
        return fl_fail(err, FL_AGAIN, "cuda_ipc: the link is not open yet");
    if (k->state != IPC_OPEN || !pages)
        return fl_fail(err, FL_INVALID, "cuda_ipc: %s",
                       pages ? "the link is not open" : "host memory is shared by shm");
    (void)FL_COPY(key.uuid, pages->uuid);
    out->parts = 1;
    out->n_fds = 0;
    if (pages->n_chunks && k->self.vmm_fd) {
        st = share_chunks(mine, pages, out, &key, err);
    } else {
        say_handle(pages->n_chunks > 0);
        st = share_handle(k, mine, &key, &why);
        if (st != FL_OK)
            fl_fail(
                err, FL_UNSUPPORTED,
                "device memory at %p has neither chunks nor a handle that others can open (%s); "
                "it goes through the host",
                mine->addr, why.text);
    }
    if (st != FL_OK)
        return st;
    memset(out->blob, 0, sizeof(out->blob));
    memcpy(out->blob, &key, sizeof(key));
    return FL_OK;
}

/* ==== views =================================================================================== */
static void view_drop(struct link_dev *d, struct ipc_view *v)
{
    if (v->key.kind == IPC_CHUNKS) {
        pthread_mutex_lock(&d->lock);
        for (uint32_t i = 0; i < v->n_mapped; i++)
            d->gpu->chunk_release(d->g, &v->chunks[i]);
        for (uint32_t i = 0; i < v->n_mapped; i++)
            (void)d->gpu->unmap(d->g, v->base + i * v->key.chunk_bytes, v->key.chunk_bytes, NULL);
        d->gpu->unreserve(d->g, v->base, v->reserved_bytes);
        pthread_mutex_unlock(&d->lock);
    } else if (v->key.kind == IPC_HANDLE) {
        dev_handle_close(d, v->base);
    }
    free(v->chunks);
    free(v);
}

void ipc_view_put(struct link_dev *d, struct ipc_view *v)
{
    if (--v->users == 0)
        view_drop(d, v);
}

static enum fl_status key_read(const struct link_key *theirs, struct ipc_key *key,
                               struct fl_err *err)
{
    uint64_t all;

    memcpy(key, theirs->blob, sizeof(*key));
    bool chunks = key->kind == IPC_CHUNKS;
    bool good = key->magic == IPC_KEY_MAGIC && key->bytes &&
                memchr(key->uuid, 0, sizeof(key->uuid)) && (chunks || key->kind == IPC_HANDLE);

    if (good && chunks)
        good = key->n_chunks && key->n_chunks <= IPC_MAX_CHUNKS &&
               key->first_chunk < key->n_chunks && !key->first_chunk == !theirs->part &&
               key->chunk_bytes && key->chunk_bytes <= IPC_CHUNK_MOST && theirs->n_fds &&
               theirs->n_fds <= key->n_chunks - key->first_chunk &&
               !__builtin_mul_overflow(key->chunk_bytes, (uint64_t)key->n_chunks, &all) &&
               key->off < all && key->bytes <= all - key->off;
    else if (good)
        good = theirs->n_fds == 0 && theirs->part == 0 &&
               !__builtin_add_overflow(key->off, key->bytes, &all);
    return good ? FL_OK
                : fl_fail(err, FL_CORRUPT,
                          "not a key of device memory: kind %u, part %u, %llu bytes at %llu of %u "
                          "chunks of %llu, %u descriptors",
                          key->kind, theirs->part, (unsigned long long)key->bytes,
                          (unsigned long long)key->off, key->n_chunks,
                          (unsigned long long)key->chunk_bytes, theirs->n_fds);
}

/* Beyond it is nobody's: a kernel that reads there ends the whole context. */
static enum fl_status handle_open(struct link_dev *d, const struct ipc_key *key, uint64_t *addr,
                                  struct fl_err *err)
{
    uint64_t bytes;

    FL_TRY(dev_handle_open(d, &key->handle, addr, &bytes, err));
    if (key->off <= bytes && key->bytes <= bytes - key->off)
        return FL_OK;
    dev_handle_close(d, *addr);
    return fl_fail(err, FL_CORRUPT, "a key for %llu bytes at %llu of an allocation of %llu",
                   (unsigned long long)key->bytes, (unsigned long long)key->off,
                   (unsigned long long)bytes);
}

static enum fl_status view_begin(struct ipc *k, const struct ipc_key *key, struct ipc_view *v,
                                 struct fl_err *err)
{
    struct link_dev *d = k->dev;
    enum fl_status st = FL_OK;

    if (key->kind == IPC_HANDLE)
        return handle_open(d, key, &v->base, err);
    v->reserved_bytes = key->n_chunks * key->chunk_bytes;
    v->chunks = calloc(key->n_chunks, sizeof(*v->chunks));
    if (!v->chunks)
        return fl_fail(err, FL_EXHAUSTED, "no memory to note %u chunks", key->n_chunks);
    v->pages.chunks = v->chunks;
    v->pages.off = key->off;
    pthread_mutex_lock(&d->lock);
    st = d->gpu->reserve(d->g, v->reserved_bytes, &v->base, err);
    pthread_mutex_unlock(&d->lock);
    return st;
}

static enum fl_status view_new(struct ipc *k, const struct ipc_key *key, bool writable,
                               struct ipc_view **out, struct fl_err *err)
{
    struct ipc_view *v = calloc(1, sizeof(*v));

    if (!v)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a view");
    *v = (struct ipc_view){ .pages = { .magic = LINK_PAGES },
                            .magic = IPC_VIEW_MAGIC,
                            .users = 1,
                            .key = *key,
                            .writable = writable };
    (void)FL_COPY(v->pages.uuid, k->self.gpu_uuid); /* read by this device, wherever it lies */
    enum fl_status st = view_begin(k, key, v, err);

    if (st != FL_OK) {
        free(v->chunks);
        free(v);
        return st;
    }
    *out = v;
    return FL_OK;
}

/* Keys of one memory differ in nothing but the chunk that they begin with. */
static bool same_memory(const struct ipc_key *a, const struct ipc_key *b)
{
    struct ipc_key c = *a;

    c.first_chunk = b->first_chunk;
    return memcmp(&c, b, sizeof(c)) == 0;
}

static enum fl_status map_part(struct ipc *k, const struct link_key *theirs,
                               const struct ipc_key *key, struct ipc_view *v, struct fl_err *err)
{
    if (key->kind != IPC_CHUNKS)
        return FL_OK;
    if (key->first_chunk != v->n_mapped || !same_memory(key, &v->key))
        return fl_fail(
            err, FL_CORRUPT,
            "a key for chunk %u of %u, of %llu bytes at %llu; chunk %u of %u is next, of "
            "%llu at %llu",
            key->first_chunk, key->n_chunks, (unsigned long long)key->bytes,
            (unsigned long long)key->off, v->n_mapped, v->key.n_chunks,
            (unsigned long long)v->key.bytes, (unsigned long long)v->key.off);
    FL_TRY(dev_map_chunks(k->dev, v->base + v->n_mapped * key->chunk_bytes, theirs->fds,
                          theirs->n_fds, key->chunk_bytes, v->writable, v->chunks + v->n_mapped,
                          err));
    v->n_mapped += theirs->n_fds;
    v->pages.n_chunks = v->n_mapped;
    return FL_OK;
}

/* A process cannot open its own handle, and has the memory already. */
static bool is_own_handle(const struct ipc_key *key)
{
    return key->kind == IPC_HANDLE && key->pid == getpid();
}

/* *v: NULL, or what the parts before have made. */
static enum fl_status map_key(struct ipc *k, const struct link_key *theirs, bool writable,
                              struct ipc_view **v, struct fl_err *err)
{
    struct ipc_key key;

    if (k->state != IPC_OPEN)
        return fl_fail(err, FL_INVALID, "cuda_ipc: the link is not open");
    FL_TRY(key_read(theirs, &key, err));
    if (is_own_handle(&key))
        return fl_fail(err, FL_UNSUPPORTED,
                       "an IPC handle cannot be opened in the process that made it");
    if (theirs->part == 0)
        FL_TRY(view_new(k, &key, writable, v, err));
    else if (!*v)
        return fl_fail(err, FL_CORRUPT, "part %u of a key whose first part is not here",
                       theirs->part);
    return FL_FAULT("link.map") ? fl_fail(err, FL_EXHAUSTED, "fault link.map")
                                : map_part(k, theirs, &key, *v, err);
}

enum fl_status ipc_map(struct link *base, const struct link_key *theirs, bool writable,
                       struct link_mem *out, struct fl_err *err)
{
    struct ipc *k = container_of(base, struct ipc, base);
    struct ipc_view *v = theirs->part ? out->impl : NULL;

    if (v && v->magic != IPC_VIEW_MAGIC)
        v = NULL;
    enum fl_status st = map_key(k, theirs, writable, &v, err);

    if (st != FL_OK) {
        if (v)
            view_drop(k->dev, v);
        if (v && theirs->part)
            *out = (struct link_mem){ 0 };
        return st;
    }
    *out = (struct link_mem){ .addr = (void *)(uintptr_t)(v->base + v->key.off),
                              .bytes = v->key.bytes,
                              .chunk_bytes = v->key.chunk_bytes,
                              .on_device = true,
                              .impl = v };
    return FL_OK;
}

void ipc_unmap(struct link *base, struct link_mem *theirs)
{
    struct ipc *k = container_of(base, struct ipc, base);

    if (theirs->impl)
        ipc_view_put(k->dev, theirs->impl);
    *theirs = (struct link_mem){ 0 };
}
