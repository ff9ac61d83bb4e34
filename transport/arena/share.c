/* Chunks in other processes, others' chunks here, and memory that changes places under fixed
 * addresses. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/str.h"
#include "transport/arena/arena_priv.h"

/* ==== export ==== */
bool arena_chunks_of(struct arena *a, const void *p, uint64_t bytes, struct arena_chunks *out)
{
    uint64_t addr = (uint64_t)(uintptr_t)p;
    struct region *r;

    pthread_mutex_lock(&a->mu);
    r = arena_region_at(a, addr);
    if (r && bytes && bytes <= r->base + r->bytes - addr) {
        uint64_t first = (addr - r->base) / r->chunk_bytes,
                 last = (addr + bytes - 1 - r->base) / r->chunk_bytes;

        *out = (struct arena_chunks){ r->base + first * r->chunk_bytes,
                                      r->base + (last + 1) * r->chunk_bytes,
                                      1u << (r - a->regions) };
        for (; first <= last && r; first++)
            r = r->chunks[first].state == CHUNK_IN ? r : NULL;
    } else {
        r = NULL;
    }
    pthread_mutex_unlock(&a->mu);
    return r != NULL;
}

static bool note_holder(struct arena *a, const char *holder, const struct chunk *c, uint32_t tag,
                        uint64_t bytes)
{
    struct holding *more = a->n_holdings < ARENA_HOLDINGS_MAX
                               ? realloc(a->holdings, (a->n_holdings + 1) * sizeof(*more))
                               : NULL;

    if (!more)
        return false;
    a->holdings = more;
    struct holding *h = &more[a->n_holdings++];
    *h = (struct holding){ .serial = c->serial, .bytes = bytes, .tag = tag };
    (void)FL_COPY(h->holder, holder);
    return true;
}

/* From the end back to n. */
static void forget_holders(struct arena *a, struct region *r, size_t first, size_t n_before)
{
    while (a->n_holdings > n_before) {
        a->n_holdings--;
        r->chunks[first + a->n_holdings - n_before].holders--;
    }
}

static enum fl_status export_chunks(struct arena *a, struct region *r, uint64_t off, uint64_t bytes,
                                    const char *holder, struct arena_export *x, struct fl_err *err)
{
    uint64_t first = off / r->chunk_bytes, last = (off + bytes - 1) / r->chunk_bytes;
    size_t before = a->n_holdings;
    enum fl_status st = FL_OK;

    x->fds = malloc((last - first + 1) * sizeof(*x->fds));
    if (!x->fds)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %llu descriptors",
                       (unsigned long long)(last - first + 1));
    for (uint64_t i = first; i <= last && st == FL_OK; i++) {
        struct chunk *c = &r->chunks[i];

        if (c->state != CHUNK_IN)
            st = fl_fail(err, FL_AGAIN, "the tag is offloaded");
        if (st == FL_OK)
            st = a->gpu->chunk_export(a->g, &c->mem, &x->fds[x->n], err);
        if (st == FL_OK)
            x->n++;
        if (st == FL_OK && !note_holder(a, holder, c, 1u << (r - a->regions), r->chunk_bytes))
            st = fl_fail(err, FL_EXHAUSTED,
                         "more than %d chunks are held by others, or no memory to note one",
                         ARENA_HOLDINGS_MAX);
        if (st == FL_OK)
            c->holders++;
    }
    if (st != FL_OK)
        forget_holders(a, r, first, before);
    return st;
}

enum fl_status arena_export(struct arena *a, const void *p, uint64_t bytes, const char *holder,
                            struct arena_export *out, struct fl_err *err)
{
    uint64_t addr = (uint64_t)(uintptr_t)p;
    struct arena_export x = { .bytes = bytes };
    enum fl_status st = FL_OK;
    struct region *r;

    if (bytes == 0 || !*holder || strlen(holder) >= ARENA_HOLDER_BYTES)
        return fl_fail(err, FL_INVALID, "arena: export of %llu bytes to \"%.80s\"",
                       (unsigned long long)bytes, holder);
    pthread_mutex_lock(&a->mu);
    r = arena_region_at(a, addr);
    if (!r || bytes > r->base + r->bytes - addr)
        st = fl_fail(err, FL_INVALID, "memory at %p is not of this arena", p);
    if (st == FL_OK) {
        x.chunk_bytes = r->chunk_bytes;
        x.off = (addr - r->base) % r->chunk_bytes;
        st = export_chunks(a, r, addr - r->base, bytes, holder, &x, err);
    }
    pthread_mutex_unlock(&a->mu);
    if (st != FL_OK) {
        arena_export_fini(&x);
        return fl_wrap(err, st, "arena: export of %llu bytes to %s", (unsigned long long)bytes,
                       holder);
    }
    *out = x;
    return FL_OK;
}

void arena_export_fini(struct arena_export *x)
{
    for (uint32_t i = 0; i < x->n; i++)
        if (x->fds[i] >= 0)
            close(x->fds[i]);
    free(x->fds);
    *x = (struct arena_export){ 0 };
}

static void chunk_let_go(struct arena *a, uint64_t serial)
{
    for (unsigned t = 0; t < ARENA_TAGS; t++)
        for (size_t i = 0; i < a->regions[t].n_high; i++)
            if (a->regions[t].chunks[i].state == CHUNK_IN &&
                a->regions[t].chunks[i].serial == serial) {
                a->regions[t].chunks[i].holders--;
                return;
            }
}

void arena_release(struct arena *a, const char *holder)
{
    size_t left = 0;

    pthread_mutex_lock(&a->mu);
    for (size_t i = 0; i < a->n_holdings; i++) {
        if (strcmp(a->holdings[i].holder, holder) == 0)
            chunk_let_go(a, a->holdings[i].serial);
        else
            a->holdings[left++] = a->holdings[i];
    }
    a->n_holdings = left;
    pthread_mutex_unlock(&a->mu);
}

/* ==== import ==== */
struct arena_view {
    uint64_t base, chunk_bytes, off;
    uint32_t n;
    bool writable;
    struct view_chunk {
        struct gpu_chunk mem;
        bool mapped;
    } chunks[];
};

static enum fl_status view_map(struct arena *a, struct arena_view *v, uint32_t i,
                               struct fl_err *err)
{
    FL_TRY(a->gpu->map(a->g, v->base + i * v->chunk_bytes, &v->chunks[i].mem, v->writable, err));
    v->chunks[i].mapped = true;
    return FL_OK;
}

static enum fl_status view_unmap(struct arena *a, struct arena_view *v, uint32_t i,
                                 struct fl_err *err)
{
    FL_TRY(a->gpu->unmap(a->g, v->base + i * v->chunk_bytes, v->chunk_bytes, err));
    v->chunks[i].mapped = false;
    return FL_OK;
}

static void view_free(struct arena *a, struct arena_view *v)
{
    for (uint32_t i = 0; i < v->n; i++) {
        if (v->chunks[i].mapped)
            (void)view_unmap(a, v, i, NULL); /* only a lost device refuses */
        a->gpu->chunk_release(a->g, &v->chunks[i].mem);
    }
    if (v->base)
        a->gpu->unreserve(a->g, v->base, v->n * v->chunk_bytes);
    free(v);
}

enum fl_status arena_import(struct arena *a, const struct arena_export *x, bool writable,
                            struct arena_view **out, struct fl_err *err)
{
    struct arena_view *v;
    enum fl_status st;
    uint64_t all, grain = a->info.granularity_bytes;

    if (x->n == 0 || x->chunk_bytes == 0 || x->chunk_bytes % grain || x->off >= x->chunk_bytes ||
        __builtin_mul_overflow(x->chunk_bytes, (uint64_t)x->n, &all) || all > ARENA_VIEW_MOST ||
        x->bytes > all - x->off)
        return fl_fail(err, FL_INVALID,
                       "arena: import of %llu bytes at %llu of %u chunks of %llu bytes",
                       (unsigned long long)x->bytes, (unsigned long long)x->off, x->n,
                       (unsigned long long)x->chunk_bytes);
    v = calloc(1, sizeof(*v) + x->n * sizeof(v->chunks[0]));
    if (!v)
        return fl_fail(err, FL_EXHAUSTED, "no memory to note %u chunks", x->n);
    *v = (struct arena_view){ .chunk_bytes = x->chunk_bytes, .off = x->off, .writable = writable };
    pthread_mutex_lock(&a->mu);
    st = a->gpu->reserve(a->g, all, &v->base, err);
    uint64_t reserved = st == FL_OK ? all : 0;
    for (uint32_t i = 0; i < x->n && st == FL_OK; i++) {
        st = a->gpu->chunk_import(a->g, x->fds[i], x->chunk_bytes, &v->chunks[i].mem, err);
        if (st == FL_OK) {
            v->n++;
            st = view_map(a, v, i, err);
        }
    }
    if (st == FL_OK) {
        a->viewed_bytes += reserved;
    } else {
        uint64_t base = v->base;

        v->base = 0; /* all of the addresses, not those of n chunks alone */
        for (uint32_t i = 0; i < v->n; i++)
            if (v->chunks[i].mapped) {
                (void)a->gpu->unmap(a->g, base + i * v->chunk_bytes, v->chunk_bytes, NULL);
                v->chunks[i].mapped = false;
            }
        if (reserved)
            a->gpu->unreserve(a->g, base, reserved);
        view_free(a, v);
    }
    pthread_mutex_unlock(&a->mu);
    if (st != FL_OK)
        return fl_wrap(err, st, "arena: import of %llu bytes", (unsigned long long)x->bytes);
    *out = v;
    return FL_OK;
}

void *arena_view_data(const struct arena_view *v)
{
    return (void *)(uintptr_t)(v->base + v->off);
}

void arena_view_drop(struct arena *a, struct arena_view *v)
{
    if (!v)
        return;
    pthread_mutex_lock(&a->mu);
    a->viewed_bytes -= v->n * v->chunk_bytes;
    view_free(a, v);
    pthread_mutex_unlock(&a->mu);
}

/* ==== exchange ==== */
enum fl_status arena_view_exchange(struct arena *a, struct arena_view *p, struct arena_view *q,
                                   struct fl_err *err)
{
    enum fl_status st = FL_OK;

    if (p == q || p->n != q->n || p->chunk_bytes != q->chunk_bytes || p->writable != q->writable)
        return fl_fail(err, FL_INVALID, "arena: views of %u and %u chunks cannot change places",
                       p->n, q->n);
    pthread_mutex_lock(&a->mu);
    for (uint32_t i = 0; i < p->n && st == FL_OK; i++) {
        struct arena_view *both[] = { p, q };

        for (unsigned k = 0; k < 2 && st == FL_OK; k++)
            if (both[k]->chunks[i].mapped)
                st = view_unmap(a, both[k], i, err);
    }
    for (uint32_t i = 0; i < p->n && st == FL_OK; i++) {
        struct gpu_chunk mem = p->chunks[i].mem;

        p->chunks[i].mem = q->chunks[i].mem;
        q->chunks[i].mem = mem;
    }
    for (uint32_t i = 0; i < p->n; i++) /* also what a failure left unmapped */
        for (unsigned k = 0; k < 2; k++) {
            struct arena_view *v = k ? q : p;
            enum fl_status one =
                v->chunks[i].mapped ? FL_OK : view_map(a, v, i, st == FL_OK ? err : NULL);

            st = st == FL_OK ? one : st;
        }
    pthread_mutex_unlock(&a->mu);
    return st == FL_OK ? FL_OK : fl_wrap(err, st, "arena: two views change places");
}

static struct piece *own_piece(struct arena *a, const void *p, struct region **r)
{
    uint64_t addr = (uint64_t)(uintptr_t)p;
    struct piece *found = NULL;

    *r = arena_region_at(a, addr);
    if (*r)
        HASH_FIND(hh, (*r)->pieces, &addr, sizeof(addr), found);
    return found && found->own_chunks ? found : NULL;
}

/* Unmaps both sides wholly before either is mapped again: an address never shows both memories in
 * turn to a reader. */
static enum fl_status exchange_chunks(struct arena *a, struct region *r, size_t x, size_t y,
                                      size_t n, struct fl_err *err)
{
    enum fl_status st = FL_OK;
    size_t gone = 0;

    for (; gone < 2 * n && st == FL_OK; gone += st == FL_OK)
        st = a->gpu->unmap(a->g, r->base + (gone < n ? x + gone : y + gone - n) * r->chunk_bytes,
                           r->chunk_bytes, err);
    for (size_t i = 0; i < n && st == FL_OK; i++) {
        struct chunk c = r->chunks[x + i];

        r->chunks[x + i] = r->chunks[y + i];
        r->chunks[y + i] = c;
    }
    for (size_t k = 0; k < gone; k++) {
        size_t i = k < n ? x + k : y + k - n;
        enum fl_status one = a->gpu->map(a->g, r->base + i * r->chunk_bytes, &r->chunks[i].mem,
                                         true, st == FL_OK ? err : NULL);

        st = st == FL_OK ? one : st;
    }
    return st;
}

enum fl_status arena_exchange(struct arena *a, void *p, void *q, struct fl_err *err)
{
    struct region *rp, *rq;
    struct piece *x, *y;
    enum fl_status st = FL_OK;

    pthread_mutex_lock(&a->mu);
    x = own_piece(a, p, &rp);
    y = own_piece(a, q, &rq);
    if (!x || !y || x == y || rp != rq || x->bytes != y->bytes)
        st = fl_fail(
            err, FL_INVALID,
            "%p and %p are not two allocations of one tag and size with chunks of their own", p, q);
    else if (rp->out)
        st = fl_fail(err, FL_AGAIN, "the tag is offloaded");
    else
        st = exchange_chunks(a, rp, x->off / rp->chunk_bytes, y->off / rp->chunk_bytes,
                             x->bytes / rp->chunk_bytes, err);
    pthread_mutex_unlock(&a->mu);
    return st == FL_OK ? FL_OK : fl_wrap(err, st, "arena: two allocations change places");
}
