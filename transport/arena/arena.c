#include "transport/arena/arena.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/loop.h"
#include "common/base/str.h"
#include "transport/arena/arena_priv.h"

#define MIB ((uint64_t)1 << 20)
enum { ADDRESSES_EACH = 4 };
#define HOST_RESERVE_LEAST (64ull << 30)
#define HOST_RESERVE_MOST (16ull << 40)

uint64_t arena_now_ns(void)
{
    return fl_clock_boot_ns();
}

static uint64_t round_up(uint64_t n, uint64_t to)
{
    return (n + to - 1) / to * to;
}

const char *arena_tag_name(uint32_t tag)
{
    switch (tag) {
    case FURLONG_TAG_WEIGHTS:
        return "weights";
    case FURLONG_TAG_KV:
        return "kv_cache";
    case FURLONG_TAG_GRAPH:
        return "cuda_graph";
    case FURLONG_TAG_OPTIMIZER:
        return "optimizer";
    case FURLONG_TAG_DEFAULT:
        return "default";
    default:
        return "no tag";
    }
}

/* ==== birth and end ==== */
/* More addresses than memory cost nothing: what is free in holes can be had in one piece, and a
 * machine's memory may grow while it runs. */
static uint64_t addresses(const struct gpu_info *info)
{
    uint64_t host =
        (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) * ADDRESSES_EACH;

    if (info->total_bytes != UINT64_MAX)
        return info->total_bytes * ADDRESSES_EACH;
    return host < HOST_RESERVE_LEAST  ? HOST_RESERVE_LEAST
           : host > HOST_RESERVE_MOST ? HOST_RESERVE_MOST
                                      : host;
}

enum fl_status arena_create(const struct gpu_ops *gpu, const char *uuid, const struct arena_opts *o,
                            struct arena **out, struct fl_err *err)
{
    static const struct arena_opts none;
    struct arena *a = calloc(1, sizeof(*a));
    enum fl_status st;

    if (!a)
        return fl_fail(err, FL_EXHAUSTED, "no memory for an arena");
    o = o ? o : &none;
    st = gpu->open(uuid, &a->g, err);
    if (st != FL_OK) {
        free(a);
        return fl_wrap(err, st, "arena");
    }
    a->gpu = gpu;
    a->info = *gpu->info(a->g);
    if (!a->info.vmm || !a->info.posix_fd || !a->info.granularity_bytes) {
        st = fl_fail(err, FL_UNSUPPORTED,
                     "arena: device %s has no %s (a virtual GPU, or WSL): no memory under fixed "
                     "addresses, none that others can map; weights can lie in host memory",
                     uuid, a->info.vmm ? "chunks as descriptors" : "virtual memory management");
        gpu->close(a->g);
        free(a);
        return st;
    }
    a->slots = 1;
    a->wait_ms = o->wait_ms ? o->wait_ms : ARENA_WAIT_MS;
    a->reserve_bytes = o->reserve_bytes ? o->reserve_bytes : addresses(&a->info);
    (void)pthread_mutex_init(&a->mu, NULL); /* of the default kind: cannot fail */
    for (unsigned i = 0; i < ARENA_TAGS; i++) {
        struct region *r = &a->regions[i];
        bool content = (1u << i) & (FURLONG_TAG_OPTIMIZER | FURLONG_TAG_DEFAULT);

        r->chunk_bytes = o->chunk_bytes[i]                  ? o->chunk_bytes[i]
                         : (1u << i) == FURLONG_TAG_WEIGHTS ? 256 * MIB
                                                            : 64 * MIB;
        r->chunk_bytes = round_up(r->chunk_bytes, a->info.granularity_bytes);
        r->keep = content ? FURLONG_KEEP_HOST : FURLONG_KEEP_NOT;
        r->file = -1;
        (void)FL_COPY(r->folder, o->folder ? o->folder : "");
    }
    *out = a;
    return FL_OK;
}

static void region_fini(struct arena *a, struct region *r)
{
    struct piece *p, *next;

    for (size_t i = 0; i < r->n_chunks; i++)
        arena_chunk_gone(a, r, i, CHUNK_NONE);
    if (r->base)
        a->gpu->unreserve(a->g, r->base, r->bytes);
    HASH_ITER (hh, r->pieces, p, next) {
        HASH_DEL(r->pieces, p);
        free(p);
    }
    if (r->file >= 0)
        close(r->file);
    free(r->chunks);
    free(r->free);
    free(r->parts);
    free(r->blocks);
}

void arena_destroy(struct arena *a)
{
    if (!a)
        return;
    /* what still runs must not lose its memory; a lost device is past that */
    (void)a->gpu->sync(a->g, NULL);
    for (unsigned i = 0; i < ARENA_TAGS; i++)
        region_fini(a, &a->regions[i]);
    for (unsigned i = 0; i < ARENA_STREAMS; i++)
        if (a->streams[i])
            a->gpu->stream_free(a->streams[i]);
    for (size_t i = 0; i < a->pool.n_slabs; i++)
        a->gpu->unpin(a->g, a->pool.slabs[i].at);
    free(a->holdings);
    free(a->pool.slabs);
    free(a->pool.blocks);
    a->gpu->close(a->g);
    pthread_mutex_destroy(&a->mu);
    free(a);
}

enum fl_status arena_streams(struct arena *a, struct fl_err *err)
{
    for (unsigned i = 0; i < ARENA_STREAMS; i++)
        if (!a->streams[i])
            FL_TRY(a->gpu->stream(a->g, &a->streams[i], err));
    return FL_OK;
}

void arena_note_slots(struct arena *a, unsigned slots)
{
    pthread_mutex_lock(&a->mu);
    a->slots = slots;
    pthread_mutex_unlock(&a->mu);
}

/* ==== chunks ==== */
enum fl_status arena_chunk_in(struct arena *a, struct region *r, size_t i, struct fl_err *err)
{
    struct chunk *c = &r->chunks[i];
    struct gpu_chunk mem;
    enum fl_status st;

    FL_TRY(a->gpu->chunk_create(a->g, r->chunk_bytes, &mem, err));
    st = a->gpu->map(a->g, r->base + i * r->chunk_bytes, &mem, true, err);
    if (st != FL_OK) {
        a->gpu->chunk_release(a->g, &mem);
        return st;
    }
    c->mem = mem;
    c->state = CHUNK_IN;
    c->holders = 0;
    c->serial = ++a->next_serial;
    r->n_high = i >= r->n_high ? i + 1 : r->n_high;
    a->chunks_bytes += r->chunk_bytes;
    if (a->chunks_bytes > a->peak_bytes)
        a->peak_bytes = a->chunks_bytes;
    return FL_OK;
}

void arena_chunk_gone(struct arena *a, struct region *r, size_t i, enum chunk_state to)
{
    struct chunk *c = &r->chunks[i];

    if (c->state == CHUNK_IN) {
        /* ours and mapped: only a lost device refuses */
        (void)a->gpu->unmap(a->g, r->base + i * r->chunk_bytes, r->chunk_bytes, NULL);
        a->gpu->chunk_release(a->g, &c->mem);
        a->chunks_bytes -= r->chunk_bytes;
    }
    c->state = to;
}

uint64_t arena_chunk_held(struct arena *a, const struct region *r, size_t i)
{
    return r->chunks[i].state == CHUNK_IN ? a->gpu->chunk_held(a->g, &r->chunks[i].mem) : 0;
}

struct region *arena_region_at(struct arena *a, uint64_t addr)
{
    for (unsigned i = 0; i < ARENA_TAGS; i++)
        if (a->regions[i].base && addr >= a->regions[i].base &&
            addr < a->regions[i].base + a->regions[i].bytes)
            return &a->regions[i];
    return NULL;
}

/* The addresses of a tag, all free. */
static enum fl_status region_reserve(struct arena *a, struct region *r, struct fl_err *err)
{
    uint64_t bytes = round_up(a->reserve_bytes, r->chunk_bytes), base;
    struct chunk *chunks = calloc(bytes / r->chunk_bytes, sizeof(*chunks));
    struct span *spans = malloc(16 * sizeof(*spans));
    enum fl_status st = FL_EXHAUSTED;

    if (!chunks || !spans)
        (void)fl_fail(err, FL_EXHAUSTED, "no memory to note %llu chunks",
                      (unsigned long long)(bytes / r->chunk_bytes));
    else
        st = a->gpu->reserve(a->g, bytes, &base, err);
    if (st != FL_OK) {
        free(chunks);
        free(spans);
        return st;
    }
    spans[0] = (struct span){ 0, bytes };
    r->base = base;
    r->bytes = bytes;
    r->chunks = chunks;
    r->n_chunks = bytes / r->chunk_bytes;
    r->free = spans;
    r->n_free = 1;
    r->cap_free = 16;
    return FL_OK;
}

/* ==== spans ==== */
/* The first of these addresses from at on under which all memory is there; end: none. */
static uint64_t first_there(const struct region *r, uint64_t at, uint64_t end, uint64_t bytes,
                            uint64_t align)
{
    uint64_t high = r->n_high * r->chunk_bytes;

    while (at < high && at + bytes <= end) {
        uint64_t i = at / r->chunk_bytes, last = (at + bytes - 1) / r->chunk_bytes;

        while (i <= last && r->chunks[i].state == CHUNK_IN)
            i++;
        if (i > last)
            return at;
        at = round_up((i + 1) * r->chunk_bytes, align);
    }
    return end;
}

/* The first place that fits: first among memory that is there, then anywhere. */
static bool find_place(const struct region *r, uint64_t bytes, uint64_t align, size_t *span,
                       uint64_t *off)
{
    for (int there = 1; there >= 0; there--)
        for (size_t i = 0; i < r->n_free; i++) {
            uint64_t at = round_up(r->free[i].off, align), end = r->free[i].off + r->free[i].bytes;

            at = there ? first_there(r, at, end, bytes, align) : at;
            if (at >= end || end - at < bytes)
                continue;
            *span = i;
            *off = at;
            return true;
        }
    return false;
}

static bool room_for_span(struct region *r)
{
    struct span *bigger;

    if (HASH_COUNT(r->pieces) + 2 <=
        r->cap_free) /* one more than pieces, at most, lie between them */
        return true;
    bigger = realloc(r->free, 2 * r->cap_free * sizeof(*bigger));
    if (!bigger)
        return false;
    r->free = bigger;
    r->cap_free *= 2;
    return true;
}

/* Cuts [off, off + bytes) out of free span i. */
static void span_take(struct region *r, size_t i, uint64_t off, uint64_t bytes)
{
    struct span before = r->free[i], after = before;

    before.bytes = off - before.off;
    after.bytes = after.off + after.bytes - (off + bytes);
    after.off = off + bytes;
    if (before.bytes && after.bytes) {
        memmove(&r->free[i + 1], &r->free[i], (r->n_free - i) * sizeof(*r->free));
        r->n_free++;
        r->free[i] = before;
        r->free[i + 1] = after;
    } else if (before.bytes || after.bytes) {
        r->free[i] = before.bytes ? before : after;
    } else {
        memmove(&r->free[i], &r->free[i + 1], (r->n_free - i - 1) * sizeof(*r->free));
        r->n_free--;
    }
}

/* The opposite; joined with its neighbours. */
static void span_give(struct region *r, uint64_t off, uint64_t bytes)
{
    size_t i = 0;

    while (i < r->n_free && r->free[i].off < off)
        i++;
    bool joins_before = i > 0 && r->free[i - 1].off + r->free[i - 1].bytes == off;
    bool joins_after = i < r->n_free && off + bytes == r->free[i].off;

    if (joins_before) {
        r->free[i - 1].bytes += bytes + (joins_after ? r->free[i].bytes : 0);
        if (joins_after) {
            memmove(&r->free[i], &r->free[i + 1], (r->n_free - i - 1) * sizeof(*r->free));
            r->n_free--;
        }
    } else if (joins_after) {
        r->free[i] = (struct span){ off, bytes + r->free[i].bytes };
    } else {
        memmove(&r->free[i + 1], &r->free[i], (r->n_free - i) * sizeof(*r->free));
        r->free[i] = (struct span){ off, bytes };
        r->n_free++;
    }
}

/* Adds to, or takes from, what is used of each chunk under the span; chunks of which nothing is
 * used are given back. */
static void count_used(struct arena *a, struct region *r, uint64_t off, uint64_t bytes, bool more)
{
    for (uint64_t at = off; at < off + bytes;) {
        uint64_t i = at / r->chunk_bytes, end = (i + 1) * r->chunk_bytes;
        uint64_t len = (end < off + bytes ? end : off + bytes) - at;

        r->chunks[i].used_bytes += more ? len : -len;
        if (!more && r->chunks[i].used_bytes == 0)
            arena_chunk_gone(a, r, i, CHUNK_NONE);
        at += len;
    }
}

/* Memory under the whole span; on failure as before. */
static enum fl_status bring_in(struct arena *a, struct region *r, uint64_t off, uint64_t bytes,
                               struct fl_err *err)
{
    uint64_t first = off / r->chunk_bytes, last = (off + bytes - 1) / r->chunk_bytes;
    enum fl_status st = FL_OK;
    uint64_t i = first, wanted = 0;

    for (; i <= last && st == FL_OK; i++)
        if (r->chunks[i].state != CHUNK_IN) {
            st = arena_chunk_in(a, r, i, err);
            wanted += r->chunk_bytes;
        }
    if (st == FL_OK)
        return FL_OK;
    for (uint64_t k = first; k < i; k++)
        if (r->chunks[k].used_bytes == 0)
            arena_chunk_gone(a, r, k, CHUNK_NONE);
    wanted += (last + 1 - i) * r->chunk_bytes; /* at most: some of these may be there */
    if (st == FL_EXHAUSTED)
        arena_say_full(a, wanted, err);
    return st;
}

/* Pages of the host are zero from birth: there a chunk that has just come is left alone, so that
 * its pages come when they are touched. */
static enum fl_status zero(struct arena *a, const struct region *r, uint64_t off, uint64_t bytes,
                           struct fl_err *err)
{
    enum fl_status st = FL_OK;

    FL_TRY(arena_streams(a, err));
    for (uint64_t at = off; at < off + bytes && st == FL_OK;) {
        uint64_t i = at / r->chunk_bytes, end = (i + 1) * r->chunk_bytes;
        uint64_t len = (end < off + bytes ? end : off + bytes) - at;

        if (a->gpu != &gpu_host || r->chunks[i].used_bytes > 0)
            st = a->gpu->fill(a->streams[0], r->base + at, 0, len, err);
        at += len;
    }
    enum fl_status ended = a->gpu->stream_sync(a->streams[0], st == FL_OK ? err : NULL);

    return st == FL_OK ? ended : st;
}

/* ==== alloc and free ==== */
static enum fl_status place(struct arena *a, struct region *r, uint64_t bytes, uint32_t flags,
                            struct piece *p, struct fl_err *err)
{
    uint64_t align = bytes >= ARENA_BIG ? ARENA_BIG : ARENA_SMALL_ALIGN, asked = bytes, off;
    enum fl_status st = FL_OK;
    size_t span;

    if (flags & ARENA_OWN_CHUNKS) {
        align = r->chunk_bytes;
        bytes = round_up(bytes, r->chunk_bytes);
    }
    if (!find_place(r, bytes, align, &span, &off))
        return fl_fail(err, FL_EXHAUSTED, "no addresses left of %llu bytes",
                       (unsigned long long)r->bytes);
    if (!room_for_span(r))
        return fl_fail(err, FL_EXHAUSTED, "no memory to note a piece");
    FL_TRY(bring_in(a, r, off, bytes, err));
    if (flags & ARENA_ZEROED)
        st = zero(a, r, off, asked, err); /* the rest of own chunks is nobody's */
    *p = (struct piece){
        .addr = r->base + off, .off = off, .bytes = bytes, .own_chunks = flags & ARENA_OWN_CHUNKS
    };
    count_used(a, r, off, bytes, true);
    if (st == FL_OK) {
        HASH_ADD(hh, r->pieces, addr, sizeof(p->addr), p);
        if (!p->hh.tbl) /* uthash leaves it out when memory ends */
            st = fl_fail(err, FL_EXHAUSTED, "no memory to note a piece");
    }
    if (st != FL_OK) {
        count_used(a, r, off, bytes, false);
        return st;
    }
    span_take(r, span, off, bytes);
    return FL_OK;
}

static bool some_are_out(const struct region *r)
{
    size_t i = 0;

    while (i < r->n_high && r->chunks[i].state != CHUNK_OUT)
        i++;
    return i < r->n_high;
}

enum fl_status arena_alloc(struct arena *a, uint32_t tag, uint64_t bytes, uint32_t flags,
                           void **out, struct fl_err *err)
{
    enum fl_status st = FL_OK;
    struct region *r;
    struct piece *p;

    if (tag == 0 || (tag & (tag - 1)) || tag >= 1u << ARENA_TAGS)
        return fl_fail(err, FL_INVALID, "arena: %#x is not one tag", tag);
    r = &a->regions[__builtin_ctz(tag)];
    if (bytes == 0 || bytes > UINT64_MAX / 4)
        return fl_fail(err, FL_INVALID, "arena: cannot give %llu bytes", (unsigned long long)bytes);
    p = malloc(sizeof(*p));
    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory to note %llu bytes of the arena",
                       (unsigned long long)bytes);
    pthread_mutex_lock(&a->mu);
    if (r->out && some_are_out(r))
        st = fl_fail(err, FL_AGAIN, "the tag is offloaded");
    if (st == FL_OK && !r->base)
        st = region_reserve(a, r, err);
    if (st == FL_OK)
        st = place(a, r, round_up(bytes, ARENA_SMALL_ALIGN), flags, p, err);
    pthread_mutex_unlock(&a->mu);
    if (st != FL_OK) {
        free(p);
        return fl_wrap(err, st, "arena: %llu bytes of %s", (unsigned long long)bytes,
                       arena_tag_name(tag));
    }
    *out = (void *)(uintptr_t)p->addr;
    return FL_OK;
}

void arena_free(struct arena *a, void *at)
{
    uint64_t addr = (uint64_t)(uintptr_t)at;
    struct piece *p = NULL;
    struct region *r;

    pthread_mutex_lock(&a->mu);
    r = arena_region_at(a, addr);
    if (r)
        HASH_FIND(hh, r->pieces, &addr, sizeof(addr), p);
    if (p) {
        HASH_DEL(r->pieces, p);
        span_give(r, p->off, p->bytes);
        count_used(a, r, p->off, p->bytes, false);
    }
    pthread_mutex_unlock(&a->mu);
    free(p);
}

enum fl_status arena_wait(struct arena *a, struct fl_err *err)
{
    return a->gpu->sync(a->g, err); /* without the mutex: it may take as long as kernels do */
}

enum fl_status arena_wait_stream(struct arena *a, void *stream, struct fl_err *err)
{
    return stream ? a->gpu->raw_sync(a->g, stream, err) : arena_wait(a, err);
}

/* ==== rules ==== */
enum fl_status arena_keep(struct arena *a, uint32_t tags, enum furlong_keep how, const char *folder,
                          struct fl_err *err)
{
    if (tags == 0 || tags >= 1u << ARENA_TAGS || how > FURLONG_KEEP_HOST)
        return fl_fail(err, FL_INVALID, "arena: tags %#x, keep %d", tags, (int)how);
    if (folder && strlen(folder) >= sizeof(a->regions[0].folder))
        return fl_fail(err, FL_INVALID, "arena: folder of %zu bytes", strlen(folder));
    pthread_mutex_lock(&a->mu);
    for (unsigned i = 0; i < ARENA_TAGS; i++) {
        if (!(tags & 1u << i))
            continue;
        a->regions[i].keep = how;
        if (folder)
            (void)FL_COPY(a->regions[i].folder, folder); /* its length was checked */
    }
    pthread_mutex_unlock(&a->mu);
    return FL_OK;
}

bool arena_drops(struct arena *a, uint32_t tag)
{
    bool drops = false;

    pthread_mutex_lock(&a->mu);
    for (unsigned i = 0; i < ARENA_TAGS; i++)
        drops |= tag == 1u << i && a->regions[i].keep == FURLONG_KEEP_NOT;
    pthread_mutex_unlock(&a->mu);
    return drops;
}

uint32_t arena_out(struct arena *a)
{
    uint32_t out = 0;

    pthread_mutex_lock(&a->mu);
    for (unsigned i = 0; i < ARENA_TAGS; i++)
        out |= a->regions[i].out ? 1u << i : 0;
    pthread_mutex_unlock(&a->mu);
    return out;
}
