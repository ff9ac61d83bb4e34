/* transport/link/window.c - fixed addresses for captured graphs, and moves on one device
 *
 * The same chunks may be mapped at several addresses: what comes is written at its own, and read
 * through the window once it is shown there. */
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "transport/link/dev_priv.h"
#include "transport/link/link_priv.h"

#define WINDOW_ROUND ((uint64_t)2 << 30) /* chunks of any size up to it fit */

struct link_window {
    struct link_dev *dev;
    uint64_t base, reserved_bytes, each;
    uint32_t n; /* chunks that are seen now */
};

enum fl_status link_window_create(const char *uuid, uint64_t bytes, struct link_window **out,
                                  struct fl_err *err)
{
    struct link_window *w = calloc(1, sizeof(*w));
    enum fl_status st;

    if (!w)
        return fl_fail(err, FL_EXHAUSTED, "no memory for fixed addresses");
    w->reserved_bytes = (bytes / WINDOW_ROUND + 1) * WINDOW_ROUND;
    st = link_dev_get(uuid, &w->dev, err);
    if (st == FL_OK) {
        pthread_mutex_lock(&w->dev->lock);
        st = w->dev->gpu->reserve(w->dev->g, w->reserved_bytes, &w->base, err);
        pthread_mutex_unlock(&w->dev->lock);
    }
    if (st != FL_OK) {
        free(w);
        return fl_wrap(err, st, "fixed addresses on device %s", uuid);
    }
    *out = w;
    return FL_OK;
}

enum fl_status link_window_can(const struct link_window *w, const struct link_mem *mem,
                               struct fl_err *err)
{
    const struct link_pages *p = link_pages_of(mem);

    if (p && p->n_chunks && p->off == 0 && strcmp(p->uuid, w->dev->uuid) == 0 &&
        mem->chunk_bytes <= WINDOW_ROUND && p->n_chunks * mem->chunk_bytes <= w->reserved_bytes)
        return FL_OK;
    return fl_fail(
        err, FL_UNSUPPORTED,
        "memory at %p cannot be seen at the addresses that captured graphs have: it has "
        "no chunks of its own on device %s (memory shared by IPC handle); mode copy does "
        "not need it",
        mem->addr, w->dev->uuid);
}

static void hide_locked(struct link_window *w)
{
    for (; w->n; w->n--) /* ours and mapped: only a lost device refuses */
        (void)w->dev->gpu->unmap(w->dev->g, w->base + (w->n - 1) * w->each, w->each, NULL);
}

void link_window_hide(struct link_window *w)
{
    pthread_mutex_lock(&w->dev->lock);
    hide_locked(w);
    pthread_mutex_unlock(&w->dev->lock);
}

static enum fl_status show_chunks(struct link_window *w, const struct link_pages *p, bool writable,
                                  struct fl_err *err)
{
    enum fl_status st = FL_OK;

    pthread_mutex_lock(&w->dev->lock);
    for (; w->n < p->n_chunks && st == FL_OK; w->n += st == FL_OK)
        st = w->dev->gpu->map(w->dev->g, w->base + w->n * w->each, &p->chunks[w->n], writable, err);
    pthread_mutex_unlock(&w->dev->lock);
    return st;
}

enum fl_status link_window_show(struct link_window *w, const struct link_mem *mem, bool writable,
                                struct fl_err *err)
{
    const struct link_pages *p = link_pages_of(mem);
    enum fl_status st;

    FL_TRY(link_window_can(w, mem, err));
    link_window_hide(w);
    w->each = mem->chunk_bytes;
    if (FL_FAULT("link.window")) {
        st = fl_fail(err, FL_UNREACHABLE, "fault link.window");
    } else if (p->chunks) {
        st = show_chunks(w, p, writable, err);
    } else {
        st = dev_map_chunks(w->dev, w->base, p->fds, p->n_chunks, w->each, writable, NULL, err);
        w->n = st == FL_OK ? p->n_chunks : 0;
    }
    if (st != FL_OK)
        link_window_hide(w);
    return st;
}

void *link_window_data(const struct link_window *w)
{
    return (void *)(uintptr_t)w->base;
}

void link_window_destroy(struct link_window *w)
{
    if (!w)
        return;
    pthread_mutex_lock(&w->dev->lock);
    hide_locked(w);
    w->dev->gpu->unreserve(w->dev->g, w->base, w->reserved_bytes);
    pthread_mutex_unlock(&w->dev->lock);
    free(w);
}

/* ==== one device, one launch ================================================================= */
enum fl_status link_mem_move(const struct link_mem *from, const struct link_mem *to,
                             const struct link_seg *segs, size_t n, struct fl_err *err)
{
    const struct link_pages *p = link_pages_of(from), *q = link_pages_of(to);
    struct kernel_move_args a = { .from = dev_addr(from->addr), .to = dev_addr(to->addr) };
    struct dev_table t = { 0 };
    struct link_dev *d;
    uint64_t bytes;
    enum fl_status st;

    if (!p || !q || strcmp(p->uuid, q->uuid) != 0)
        return fl_fail(err, FL_INVALID, "a move between memories that are not on one device");
    FL_TRY(link_check_segs(segs, n, from->bytes, to->bytes, &bytes, err));
    FL_TRY(link_dev_get(p->uuid, &d, err));
    pthread_mutex_lock(&d->service);
    st = dev_table_make(d, d->upload, segs, n, DEV_MOVE, &t, err);
    if (st == FL_OK) {
        a.pieces = t.addr;
        a.n = t.n;
        pthread_mutex_lock(&d->lock);
        st = kernel_move_start(d->gpu, d->g, d->stream, &a, err);
        pthread_mutex_unlock(&d->lock);
    }
    if (st == FL_OK)
        st = d->gpu->stream_sync(d->stream, err);
    dev_table_free(d, &t);
    pthread_mutex_unlock(&d->service);
    return st;
}
