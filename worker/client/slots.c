#include "worker/client/slots.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "worker/client/client.h"

enum { PROBE_MS = 60000 };

/* ---- what this machine's devices can -------------------------------------------------------- */
static pthread_mutex_t found_lock = PTHREAD_MUTEX_INITIALIZER;
static struct gpu_found found[GPU_MAX];
static size_t n_found;
static bool looked;

/* Without the probe's program: what the driver says of itself. */
static enum fl_status believe_driver(struct fl_err *err)
{
    struct gpu_info all[GPU_MAX];
    const struct gpu_ops *gpu;
    size_t n = GPU_MAX;

    FL_TRY(gpu_pick(&gpu, err));
    FL_TRY(gpu->list(all, &n, err));
    for (size_t i = 0; i < n; i++)
        found[i] = (struct gpu_found){ .info = all[i],
                                       .opens = true,
                                       .fd_shares = all[i].vmm && all[i].posix_fd,
                                       .handle_shares = all[i].legacy_ipc };
    n_found = n;
    return FL_OK;
}

static enum fl_status look(struct fl_err *err)
{
    char probe[FL_PATH_MAX];
    struct fl_err why = { 0 };
    size_t n = GPU_MAX;
    enum fl_status st = fl_program_path("furlong-probe", probe, &why);

    if (st == FL_OK)
        st = gpu_probe(probe, PROBE_MS, found, &n, &why);
    if (st == FL_OK) {
        n_found = n;
        return FL_OK;
    }
    fl_warn("devices are not probed, the driver is believed why=\"%s\"", why.text);
    return believe_driver(err);
}

static enum fl_status device_place(const char *uuid, struct link_place *out, struct fl_err *err)
{
    enum fl_status st = FL_OK;

    pthread_mutex_lock(&found_lock);
    if (!looked)
        st = look(err);
    looked |= st == FL_OK;
    if (st == FL_OK)
        st = link_place_device(out, uuid, found, n_found, err);
    pthread_mutex_unlock(&found_lock);
    return st;
}

enum fl_status slots_place(const struct furlong *f, const struct slots_home *h,
                           struct link_place *out, struct fl_err *err)
{
    FL_TRY(link_place_here(f->seat.shown.address, out, err));
    return h->arena ? device_place(h->uuid, out, err) : FL_OK;
}

/* ---- where ---------------------------------------------------------------------------------- */
static enum fl_status device_of_data(const struct furlong_tensor *t, size_t n,
                                     const struct gpu_ops *gpu, char out[GPU_UUID_BYTES],
                                     struct fl_err *err)
{
    out[0] = '\0';
    for (size_t i = 0; i < n; i++) {
        struct gpu_where w;

        if (!t[i].data || gpu->where((uint64_t)(uintptr_t)t[i].data, &w, NULL) != FL_OK)
            continue;
        if (out[0] && strcmp(out, w.uuid) != 0)
            return fl_fail(err, FL_INVALID,
                           "%s lies on device %s and what is before it on %s: a set lies on one",
                           t[i].name, w.uuid, out);
        memcpy(out, w.uuid, GPU_UUID_BYTES);
    }
    return FL_OK;
}

/* "": host memory */
static enum fl_status choose(const struct furlong *f, const struct furlong_tensor *t, size_t n,
                             const struct furlong_weights_opts *o, char out[GPU_UUID_BYTES],
                             struct fl_err *err)
{
    const struct gpu_ops *gpu;

    out[0] = '\0';
    if (o->device && strcmp(o->device, "host") == 0)
        return FL_OK;
    if (o->device)
        return fl_copy(out, GPU_UUID_BYTES, o->device) < GPU_UUID_BYTES
                   ? FL_OK
                   : fl_fail(err, FL_NOT_FOUND, "no device %.60s here", o->device);
    if (gpu_in_use()) {
        FL_TRY(gpu_pick(&gpu, err));
        FL_TRY(device_of_data(t, n, gpu, out, err));
    }
    if (out[0] || !o->stream)
        return FL_OK;
    if (f->seat.shown.n_devices != 1)
        return fl_fail(
            err, FL_INVALID,
            "a stream is given and no tensor tells its device: this seat has %u, say which",
            f->seat.shown.n_devices);
    return fl_copy(out, GPU_UUID_BYTES, f->seat.shown.device_uuids[0]) < GPU_UUID_BYTES
               ? FL_OK
               : fl_fail(err, FL_NOT_FOUND, "the seat's device is called %.60s",
                         f->seat.shown.device_uuids[0]);
}

enum fl_status slots_home_find(const struct furlong *f, const struct furlong_tensor *t, size_t n,
                               const struct furlong_weights_opts *o, struct slots_home *out,
                               struct fl_err *err)
{
    struct slots_home h = { .stream = o->stream };

    FL_TRY(choose(f, t, n, o, h.uuid, err));
    if (h.uuid[0])
        FL_TRY(arena_of_device(h.uuid, &h.arena, err));
    *out = h;
    return FL_OK;
}

enum fl_status slots_settle(const struct slots_home *h, struct fl_err *err)
{
    return h->arena ? arena_wait_stream(h->arena, h->stream, err) : FL_OK;
}

/* What Linux says can still be had; UINT64_MAX: it does not say. */
static uint64_t memory_available(void)
{
    unsigned long long kib;
    char line[128];
    FILE *in = fopen("/proc/meminfo", "re");
    uint64_t out = UINT64_MAX;

    while (in && fgets(line, sizeof(line), in)) {
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1) {
            out = kib * 1024;
            break;
        }
    }
    if (in)
        fclose(in);
    return out;
}

/* Two slots double the memory; a tenth is left to everybody else. */
bool slots_one(const struct slots_home *h, uint64_t bytes)
{
    uint64_t has = h->arena ? arena_left_bytes(h->arena) : UINT64_MAX;

    if (has == UINT64_MAX) /* the host's, or one with it */
        has = memory_available();
    return has != UINT64_MAX && bytes > has / 10 * 9 / 2;
}

/* ---- slots ---------------------------------------------------------------------------------- */
struct arena_slot {
    struct link_pages pages; /* first: how it is found again */
    struct arena *arena;
    struct arena_export x;
    char holder[ARENA_HOLDER_BYTES];
    bool held;  /* stays where it is when its tag goes */
    bool views; /* tensors that lie there; the memory is not ours to free */
};

static struct arena_slot *slot_of(const struct link_mem *mem)
{
    return container_of(link_pages_of(mem), struct arena_slot, pages);
}

static enum fl_status slot_export(struct arena_slot *s, const struct link_mem *mem,
                                  struct fl_err *err)
{
    static atomic_uint made;

    snprintf(s->holder, sizeof(s->holder), "weights %u", atomic_fetch_add(&made, 1));
    FL_TRY(arena_export(s->arena, mem->addr, mem->bytes, s->holder, &s->x, err));
    if (!s->held)
        arena_release(s->arena, s->holder);
    s->pages.n_chunks = s->x.n;
    s->pages.fds = s->x.fds;
    s->pages.off = s->x.off;
    return FL_OK;
}

static void slot_unexport(struct arena_slot *s)
{
    s->pages.n_chunks = 0;
    s->pages.fds = NULL;
    arena_export_fini(&s->x);
    arena_release(s->arena, s->holder);
}

/* The arena's memory with the face of a link's. */
static enum fl_status slot_make(const struct slots_home *h, void *addr, uint64_t bytes, bool views,
                                struct link_mem *out, struct fl_err *err)
{
    struct arena_slot *s = FL_FAULT("client.slot") ? NULL : malloc(sizeof(*s));
    struct link_mem m = { .addr = addr, .bytes = bytes, .on_device = true };
    enum fl_status st;

    if (!s)
        return fl_fail(err, FL_EXHAUSTED, "no memory to note a slot");
    *s = (struct arena_slot){
        .pages = { .magic = LINK_PAGES }, .arena = h->arena, .held = h->offered, .views = views
    };
    (void)FL_COPY(s->pages.uuid, h->uuid);
    m.impl = &s->pages;
    st = slot_export(s, &m, err);
    if (st != FL_OK) {
        free(s);
        return st;
    }
    m.chunk_bytes = s->x.chunk_bytes;
    *out = m;
    return FL_OK;
}

enum fl_status slots_alloc(const struct slots_home *h, uint64_t bytes, struct link_mem *out,
                           struct fl_err *err)
{
    uint32_t flags = ARENA_OWN_CHUNKS | (h->offered ? (uint32_t)ARENA_ZEROED : 0);
    enum fl_status st;
    void *addr;

    if (!h->arena)
        return link_mem_alloc(bytes, out, err);
    FL_TRY(arena_alloc(h->arena, FURLONG_TAG_WEIGHTS, bytes, flags, &addr, err));
    st = slot_make(h, addr, bytes, false, out, err);
    if (st != FL_OK)
        arena_free(h->arena, addr);
    return st;
}

void slots_free(struct link_mem *mem)
{
    struct arena_slot *s;

    if (!mem->on_device) {
        link_mem_free(mem);
        return;
    }
    s = slot_of(mem);
    slot_unexport(s);
    if (!s->views)
        arena_free(s->arena, mem->addr);
    free(s);
    *mem = (struct link_mem){ 0 };
}

void slots_leave(struct link_mem *mem)
{
    if (mem->on_device)
        slot_unexport(slot_of(mem));
}

enum fl_status slots_return(struct link_mem *mem, struct fl_err *err)
{
    return mem->on_device ? slot_export(slot_of(mem), mem, err) : FL_OK;
}

/* ---- tensors where they lie ----------------------------------------------------------------- */
enum lie { LIE_NOWHERE, LIE_ARENA, LIE_HANDLE, LIE_STAGED };
struct lying { /* a tensor, or a memory that several lie in */
    uint64_t addr, start, end;
    uint32_t tag, mem;
    enum lie how;
    size_t index;
};

static int by_how_and_start(const void *a, const void *b)
{
    const struct lying *x = a, *y = b;

    if (x->how != y->how)
        return x->how < y->how ? -1 : 1;
    if (x->tag != y->tag)
        return x->tag < y->tag ? -1 : 1;
    return x->start < y->start ? -1 : x->start > y->start;
}

static enum fl_status lies_where(const struct slots_home *h, const struct gpu_ops *gpu,
                                 const struct furlong_tensor *t, uint64_t bytes, bool handles,
                                 struct lying *out, struct fl_err *err)
{
    uint64_t addr = (uint64_t)(uintptr_t)t->data;
    struct arena_chunks c;
    struct gpu_where w;

    *out = (struct lying){ .addr = addr, .start = addr, .end = addr + bytes, .index = out->index };
    if (bytes == 0)
        return FL_OK;
    if (!t->data || gpu->where(addr, &w, NULL) != FL_OK || strcmp(w.uuid, h->uuid) != 0)
        return fl_fail(err, FL_INVALID,
                       "%s is to be given where it lies, and lies at %p, which is not on device %s",
                       t->name, t->data, h->uuid);
    if (arena_chunks_of(h->arena, t->data, bytes, &c)) {
        out->how = LIE_ARENA;
        out->start = c.start;
        out->end = c.end;
        out->tag = c.tag;
    } else if (w.handle && handles && addr + bytes <= w.start + w.bytes) {
        out->how = LIE_HANDLE;
        out->start = w.start;
        out->end = w.start + w.bytes;
    } else {
        out->how = LIE_STAGED;
    }
    return FL_OK;
}

/* Tensors of one memory follow each other; returns how many memories there are. */
static size_t memories(struct lying *l, size_t n)
{
    size_t made = 0, first = 0;

    for (size_t i = 0; i < n; i++) {
        struct lying *m = &l[first];
        bool joins = i != first && l[i].how == m->how && l[i].tag == m->tag &&
                     (l[i].start <= m->end || m->how == LIE_STAGED) && m->how != LIE_HANDLE;

        joins |=
            i != first && l[i].how == LIE_HANDLE && m->how == LIE_HANDLE && l[i].start == m->start;
        if (l[i].how == LIE_NOWHERE) {
            first = i + 1;
            continue;
        }
        if (joins) {
            m->end = l[i].end > m->end ? l[i].end : m->end;
        } else {
            first = i;
            made++;
        }
        l[i].mem = (uint32_t)made - 1;
    }
    return made;
}

static enum fl_status memory_make(const struct slots_home *h, const struct lying *m,
                                  struct link_mem *out, struct fl_err *err)
{
    uint64_t bytes = m->end - m->start;

    if (m->how == LIE_ARENA)
        return slot_make(h, (void *)(uintptr_t)m->start, bytes, true, out, err);
    if (m->how == LIE_HANDLE)
        return link_dev_foreign(h->uuid, m->start, bytes, out, err);
    return link_dev_staged(h->uuid, m->start, bytes, out, err);
}

static enum fl_status lent_fill(const struct slots_home *h, const struct lying *l, size_t n,
                                struct slots_lent *out, struct fl_err *err)
{
    for (size_t i = 0, first = 0; i < n; i++) {
        const struct lying *x = &l[i];

        if (x->how != LIE_NOWHERE && x->mem == out->n) { /* the first one of a new memory */
            first = i;
            FL_TRY(memory_make(h, x, &out->mems[out->n], err));
            out->bytes[out->n++] = x->end - x->start;
            out->staged |= x->how == LIE_STAGED;
        }
        out->at[x->index] = x->how == LIE_NOWHERE
                                ? (struct slots_span){ 0, 0 }
                                : (struct slots_span){ x->mem, x->addr - l[first].start };
    }
    return FL_OK;
}

static void say_how(const struct slots_home *h, const struct lying *l, size_t n, bool handles)
{
    const struct {
        const char *how, *why;
    } said[] = { [LIE_ARENA] = { "chunks", "memory of the arena" },
                 [LIE_HANDLE] = { "IPC handles", "plain allocations of the program's" },
                 [LIE_STAGED] = { "a staging buffer of two buckets",
                                  handles ? "memory of a pool, or of chunks that cannot be exported"
                                          : "IPC handles do not reach other processes here" } };
    size_t count[FL_LEN(said)] = { 0 };

    for (size_t i = 0; i < n; i++)
        count[l[i].how]++;
    for (unsigned how = LIE_ARENA; how <= LIE_STAGED; how++)
        if (count[how])
            fl_info(
                "weights given where they lie set=%s device=%s tensors=%zu by=\"%s\" why=\"%s\"",
                h->set, h->uuid, count[how], said[how].how, said[how].why);
}

enum fl_status slots_lend(const struct slots_home *h, const struct furlong_tensor *t,
                          const uint64_t *bytes, size_t n, struct slots_lent *out,
                          struct fl_err *err)
{
    struct lying *l = calloc(n + 1, sizeof(*l));
    struct slots_lent lent = { .at = calloc(n + 1, sizeof(*lent.at)) };
    struct link_place place = { 0 };
    const struct gpu_ops *gpu;
    enum fl_status st = device_place(h->uuid, &place, err);
    bool handles = place.legacy_ipc;
    size_t made = 0;

    if (st == FL_OK && (!l || !lent.at))
        st = fl_fail(err, FL_EXHAUSTED, "no memory to look at %zu tensors", n);
    if (st == FL_OK)
        st = gpu_pick(&gpu, err);
    for (int tries = 0; st == FL_OK && tries < 2; tries++) { /* too many allocations: no handles */
        for (size_t i = 0; i < n && st == FL_OK; i++) {
            l[i].index = i;
            st = lies_where(h, gpu, &t[i], bytes[i], handles, &l[i], err);
        }
        if (st == FL_OK)
            qsort(l, n, sizeof(*l), by_how_and_start);
        made = st == FL_OK ? memories(l, n) : 0;
        if (made <= SLOTS_MEMS)
            break;
        handles = false;
    }
    lent.mems = calloc(made + 1, sizeof(*lent.mems));
    lent.bytes = calloc(made + 1, sizeof(*lent.bytes));
    if (st == FL_OK && made > SLOTS_MEMS)
        st = fl_fail(err, FL_INVALID, "the tensors lie in %zu memories, %d are possible", made,
                     SLOTS_MEMS);
    if (st == FL_OK && made == 0)
        st = fl_fail(err, FL_INVALID, "no tensor has bytes: nothing can be given where it lies");
    if (st == FL_OK && (!lent.mems || !lent.bytes))
        st = fl_fail(err, FL_EXHAUSTED, "no memory to note %zu memories", made);
    if (st == FL_OK)
        st = lent_fill(h, l, n, &lent, err);
    if (st == FL_OK)
        say_how(h, l, n, place.legacy_ipc);
    free(l);
    if (st != FL_OK) {
        slots_lent_fini(&lent);
        return st;
    }
    *out = lent;
    return FL_OK;
}

void slots_lent_fini(struct slots_lent *l)
{
    for (size_t i = 0; i < l->n; i++)
        if (l->mems[i].chunk_bytes)
            slots_free(&l->mems[i]);
        else
            link_dev_free(&l->mems[i]);
    free(l->mems);
    free(l->bytes);
    free(l->at);
    *l = (struct slots_lent){ 0 };
}
