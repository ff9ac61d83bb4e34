/* Bytes of a device's memory through pinned memory, for those who may wait */
#include <string.h>
#include "transport/link/dev_priv.h"

static enum fl_status range_fits(const struct link_mem *mem, uint64_t off, uint64_t bytes,
                                 struct fl_err *err)
{
    if (off <= mem->bytes && bytes <= mem->bytes - off)
        return FL_OK;
    return fl_fail(err, FL_INVALID, "bytes %llu to %llu of a memory of %llu",
                   (unsigned long long)off, (unsigned long long)(off + bytes),
                   (unsigned long long)mem->bytes);
}

/* All of them queued, one wait: what costs is the wait. */
static enum fl_status bounce_runs(const struct link_mem *mem, const struct link_run *runs, size_t n,
                                  void *host, bool read, struct fl_err *err)
{
    uint64_t all = 0;
    struct link_dev *d;
    enum fl_status st = FL_OK;

    FL_TRY(dev_of(mem, &d, err));
    for (size_t i = 0; i < n; i++) {
        FL_TRY(range_fits(mem, runs[i].off, runs[i].bytes, err));
        all += runs[i].bytes;
        if (runs[i].bytes > DEV_BOUNCE_BYTES || all > DEV_BOUNCE_BYTES)
            return fl_fail(err, FL_INVALID, "runs of more than %d bytes at a time",
                           DEV_BOUNCE_BYTES);
    }
    pthread_mutex_lock(&d->service);
    if (!read)
        memcpy(d->bounce, host, all);
    all = 0;
    for (size_t i = 0; i < n && st == FL_OK; i++) {
        uint64_t here = dev_addr(d->bounce) + all, there = dev_addr(mem->addr) + runs[i].off;

        st = d->gpu->copy(d->stream, read ? here : there, read ? there : here, runs[i].bytes, err);
        all += runs[i].bytes;
    }
    enum fl_status ended = d->gpu->stream_sync(d->stream, st == FL_OK ? err : NULL);

    if (st == FL_OK)
        st = ended;
    if (st == FL_OK && read)
        memcpy(host, d->bounce, all);
    pthread_mutex_unlock(&d->service);
    return st;
}

static enum fl_status through_bounce(const struct link_mem *mem, uint64_t off, void *host,
                                     uint64_t bytes, bool read, struct fl_err *err)
{
    for (uint64_t at = 0; at < bytes; at += DEV_BOUNCE_BYTES) {
        struct link_run r = { off + at,
                              bytes - at < DEV_BOUNCE_BYTES ? bytes - at : DEV_BOUNCE_BYTES };

        FL_TRY(bounce_runs(mem, &r, 1, (char *)host + at, read, err));
    }
    return FL_OK;
}

enum fl_status link_mem_get(const struct link_mem *mem, const struct link_run *runs, size_t n,
                            void *to, struct fl_err *err)
{
    char *at = to;

    if (mem->on_device)
        return bounce_runs(mem, runs, n, to, true, err);
    for (size_t i = 0; i < n; at += runs[i++].bytes)
        FL_TRY(link_mem_read(mem, runs[i].off, at, runs[i].bytes, err));
    return FL_OK;
}

enum fl_status link_mem_put(const struct link_mem *mem, const struct link_run *runs, size_t n,
                            const void *from, struct fl_err *err)
{
    const char *at = from;

    if (mem->on_device)
        return bounce_runs(mem, runs, n, (void *)(uintptr_t)from, false, err);
    for (size_t i = 0; i < n; at += runs[i++].bytes)
        FL_TRY(link_mem_write(mem, runs[i].off, at, runs[i].bytes, err));
    return FL_OK;
}

enum fl_status link_mem_read(const struct link_mem *mem, uint64_t off, void *to, uint64_t bytes,
                             struct fl_err *err)
{
    FL_TRY(range_fits(mem, off, bytes, err));
    if (mem->on_device)
        return through_bounce(mem, off, to, bytes, true, err);
    memcpy(to, (const char *)mem->addr + off, bytes);
    return FL_OK;
}

enum fl_status link_mem_write(const struct link_mem *mem, uint64_t off, const void *from,
                              uint64_t bytes, struct fl_err *err)
{
    FL_TRY(range_fits(mem, off, bytes, err));
    if (mem->on_device)
        return through_bounce(mem, off, (void *)(uintptr_t)from, bytes, false, err);
    memcpy((char *)mem->addr + off, from, bytes);
    return FL_OK;
}
