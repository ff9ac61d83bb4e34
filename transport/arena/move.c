/* Offload and onload. Content goes in parts, packed one after another into the backup; a part lies
 * in one chunk and, in host memory, in one block. Copies run on two streams while chunks before
 * them go, or after them come. */
#include <stdlib.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "transport/arena/arena_priv.h"

static uint64_t host_address(const struct arena *a, const struct region *r, const struct part *p)
{
    return (uint64_t)(uintptr_t)(a->pool.blocks[r->blocks[p->at / ARENA_BLOCK_BYTES]].at +
                                 p->at % ARENA_BLOCK_BYTES);
}

static enum furlong_keep how_kept(const struct arena *a, const struct region *r)
{
    return r->keep == FURLONG_KEEP_HOST && a->info.integrated ? FURLONG_KEEP_IN : r->keep;
}

/* ==== what is to be saved ==== */
static bool leaves(const struct region *r, size_t i)
{
    return r->chunks[i].state == CHUNK_IN && r->chunks[i].holders == 0;
}

/* One run of used bytes, cut at chunks and at blocks. parts NULL: counts alone. */
static void cut_run(const struct region *r, uint64_t off, uint64_t end, struct part *parts,
                    size_t *n, uint64_t *at)
{
    while (off < end) {
        uint64_t i = off / r->chunk_bytes, chunk_end = (i + 1) * r->chunk_bytes;
        uint64_t len = (end < chunk_end ? end : chunk_end) - off,
                 room = ARENA_BLOCK_BYTES - *at % ARENA_BLOCK_BYTES;

        if (!leaves(r, i)) {
            off += len;
            continue;
        }
        len = len < room ? len : room;
        if (parts)
            parts[*n] = (struct part){ off, len, *at, (uint32_t)i };
        (*n)++;
        *at += len;
        off += len;
    }
}

/* What lies between free spans is used; short gaps are taken along. */
static void cut_all(const struct region *r, struct part *parts, size_t *n, uint64_t *bytes)
{
    uint64_t begin = 0, end = 0;

    *n = 0;
    *bytes = 0;
    for (size_t i = 0; i <= r->n_free; i++) {
        uint64_t free_off = i < r->n_free ? r->free[i].off : r->bytes;
        uint64_t free_end = i < r->n_free ? free_off + r->free[i].bytes : r->bytes;

        end = free_off;
        if (i < r->n_free && free_end - free_off <= ARENA_GAP_BYTES && free_end < r->bytes)
            continue;
        cut_run(r, begin, end, parts, n, bytes);
        begin = free_end;
    }
}

static enum fl_status parts_make(struct region *r, uint64_t *bytes, struct fl_err *err)
{
    size_t n;

    cut_all(r, NULL, &n, bytes);
    r->parts = n ? malloc(n * sizeof(*r->parts)) : NULL;
    if (n && !r->parts)
        return fl_fail(err, FL_EXHAUSTED, "no memory to note %zu parts", n);
    cut_all(r, r->parts, &r->n_parts, bytes);
    return FL_OK;
}

static void backup_forget(struct arena *a, struct region *r)
{
    if (r->blocks)
        pool_give(&a->pool, r->blocks, r->n_blocks);
    if (r->file >= 0)
        close(r->file);
    free(r->blocks);
    free(r->parts);
    r->blocks = NULL;
    r->parts = NULL;
    r->n_blocks = r->n_parts = 0;
    r->file = -1;
}

/* ==== copies, timed by the device ==== */
struct copies {
    struct gpu_event *from, *to[ARENA_STREAMS];
};

static void copies_free(struct arena *a, struct copies *c)
{
    if (c->from)
        a->gpu->event_free(c->from);
    for (unsigned i = 0; i < ARENA_STREAMS; i++)
        if (c->to[i])
            a->gpu->event_free(c->to[i]);
}

static enum fl_status copies_begin(struct arena *a, struct copies *c, struct fl_err *err)
{
    *c = (struct copies){ 0 };
    FL_TRY(arena_streams(a, err));
    FL_TRY(a->gpu->event(a->g, &c->from, err));
    for (unsigned i = 0; i < ARENA_STREAMS; i++)
        FL_TRY(a->gpu->event(a->g, &c->to[i], err));
    FL_TRY(a->gpu->event_record(c->from, a->streams[0], err));
    for (unsigned i = 1; i < ARENA_STREAMS; i++) /* none before the clock runs */
        FL_TRY(a->gpu->stream_wait(a->streams[i], c->from, err));
    return FL_OK;
}

static enum fl_status copies_end(struct arena *a, struct copies *c, struct arena_moved *m,
                                 struct fl_err *err)
{
    float most = 0;

    for (unsigned i = 0; i < ARENA_STREAMS; i++)
        FL_TRY(a->gpu->event_record(c->to[i], a->streams[i], err));
    for (unsigned i = 0; i < ARENA_STREAMS; i++) {
        float ms = 0;

        FL_TRY(a->gpu->event_sync(c->to[i], err));
        FL_TRY(a->gpu->event_ms(c->from, c->to[i], &ms, err));
        most = ms > most ? ms : most;
    }
    m->copy_ns += (uint64_t)(most * 1e6f);
    return FL_OK;
}

/* All parts of the chunk that part *k is of; *k moves past them. */
static enum fl_status copy_chunk(struct arena *a, struct region *r, size_t *k, struct gpu_stream *s,
                                 bool out, uint64_t *bytes, struct fl_err *err)
{
    uint32_t chunk = r->parts[*k].chunk;

    for (; *k < r->n_parts && r->parts[*k].chunk == chunk; (*k)++) {
        const struct part *p = &r->parts[*k];
        uint64_t here = r->base + p->off, there = host_address(a, r, p);

        FL_TRY(out ? a->gpu->copy(s, there, here, p->bytes, err)
                   : a->gpu->copy(s, here, there, p->bytes, err));
        *bytes += p->bytes;
    }
    return FL_OK;
}

/* ==== onload ==== */
static enum fl_status chunk_back(struct arena *a, struct region *r, size_t i, struct arena_moved *m,
                                 struct fl_err *err)
{
    uint64_t at = arena_now_ns();
    enum fl_status st = arena_chunk_in(a, r, i, err);

    m->setup_ns += arena_now_ns() - at;
    return st;
}

static enum fl_status host_back(struct arena *a, struct region *r, struct arena_moved *m,
                                struct fl_err *err)
{
    struct copies c;
    unsigned turn = 0;
    enum fl_status st = copies_begin(a, &c, err);

    for (size_t k = 0; st == FL_OK && k < r->n_parts; turn++) {
        st = chunk_back(a, r, r->parts[k].chunk, m, err);
        if (st == FL_OK)
            st = copy_chunk(a, r, &k, a->streams[turn % ARENA_STREAMS], false, &m->backed_bytes,
                            err);
    }
    if (st == FL_OK)
        st = copies_end(a, &c, m, err);
    else
        (void)a->gpu->sync(a->g, NULL); /* what was started ends before its memory goes again */
    copies_free(a, &c);
    return st;
}

/* What has been freed while it was out, and memory that has come in its place, have nothing in the
 * backup. */
static void parts_forget(struct region *r, const bool *came)
{
    size_t n = 0;

    for (size_t k = 0; k < r->n_parts; k++)
        if (came[r->parts[k].chunk])
            r->parts[n++] = r->parts[k];
    r->n_parts = n;
}

/* Everything that is out comes back, or nothing does. */
static enum fl_status region_back(struct arena *a, struct region *r, struct arena_moved *m,
                                  struct fl_err *err)
{
    bool *came = calloc(r->n_high + 1, sizeof(*came)); /* by this call */
    enum fl_status st = FL_OK;
    uint64_t wanted = 0;

    if (!came)
        return fl_fail(err, FL_EXHAUSTED, "no memory to bring back %zu chunks", r->n_high);
    for (size_t i = 0; i < r->n_high; i++) {
        came[i] = r->chunks[i].state == CHUNK_OUT;
        wanted += came[i] ? r->chunk_bytes : 0;
    }
    parts_forget(r, came);
    if (r->blocks)
        st = host_back(a, r, m, err);
    for (size_t i = 0; i < r->n_high && st == FL_OK;
         i++) /* dropped ones, and all before they are read from a file */
        if (r->chunks[i].state == CHUNK_OUT)
            st = chunk_back(a, r, i, m, err);
    if (st == FL_OK && r->file >= 0)
        st = disk_read(a, r, m, err);
    for (size_t i = 0; i < r->n_high && st != FL_OK; i++)
        if (came[i])
            arena_chunk_gone(a, r, i, CHUNK_OUT);
    free(came);
    if (st == FL_EXHAUSTED)
        arena_say_full(a, wanted, err);
    if (st != FL_OK)
        return st;
    backup_forget(a, r);
    return FL_OK;
}

/* What is to come back, of those tags. */
static uint64_t out_bytes(struct arena *a, uint32_t tags)
{
    uint64_t bytes = 0;

    pthread_mutex_lock(&a->mu);
    for (unsigned t = 0; t < ARENA_TAGS; t++) {
        const struct region *r = &a->regions[t];

        for (size_t i = 0; r->out && (tags & 1u << t) && i < r->n_high; i++)
            bytes += r->chunks[i].state == CHUNK_OUT ? r->chunk_bytes : 0;
    }
    pthread_mutex_unlock(&a->mu);
    return bytes;
}

static const char *first_out(struct arena *a, uint32_t tags)
{
    uint32_t out = arena_out(a) & tags;

    return out ? arena_tag_name(out & -out) : "nothing";
}

enum fl_status arena_onload(struct arena *a, uint32_t tags, struct arena_moved *out,
                            struct fl_err *err)
{
    struct arena_moved m = { 0 };
    uint64_t begin = arena_now_ns();
    enum fl_status st = FL_OK;
    unsigned i = 0;

    st = arena_room_wait(a, out_bytes(a, tags), err);
    if (st != FL_OK)
        return fl_wrap(err, st, "arena: onload of %s", first_out(a, tags));
    pthread_mutex_lock(&a->mu);
    for (; i < ARENA_TAGS && st == FL_OK; i++)
        if (a->regions[i].out && (tags & 1u << i)) {
            st = region_back(a, &a->regions[i], &m, err);
            a->regions[i].out = st != FL_OK;
        }
    pthread_mutex_unlock(&a->mu);
    m.wall_ns = arena_now_ns() - begin;
    if (st != FL_OK)
        return fl_wrap(err, st, "arena: onload of %s", arena_tag_name(1u << (i - 1)));
    if (out)
        *out = m;
    return FL_OK;
}

/* ==== offload ==== */
static void chunk_leaves(struct arena *a, struct region *r, size_t i, struct arena_moved *m)
{
    uint64_t at = arena_now_ns();

    arena_chunk_gone(a, r, i, CHUNK_OUT);
    m->setup_ns += arena_now_ns() - at;
}

/* The backup's room, then the copies: a chunk goes when its copies have ended, the next ones under
 * way meanwhile. */
static enum fl_status host_copies(struct arena *a, struct region *r, struct gpu_event **ended,
                                  struct arena_moved *m, struct fl_err *err)
{
    uint32_t flying[ARENA_FLIGHT];
    size_t first = 0, n = 0;

    for (size_t k = 0; k < r->n_parts || first < n;) {
        if (k < r->n_parts && n - first < ARENA_FLIGHT) {
            struct gpu_stream *s = a->streams[n % ARENA_STREAMS];

            flying[n % ARENA_FLIGHT] = r->parts[k].chunk;
            FL_TRY(copy_chunk(a, r, &k, s, true, &m->backed_bytes, err));
            FL_TRY(a->gpu->event_record(ended[n % ARENA_FLIGHT], s, err));
            n++;
            continue;
        }
        FL_TRY(a->gpu->event_sync(ended[first % ARENA_FLIGHT], err));
        chunk_leaves(a, r, flying[first % ARENA_FLIGHT], m);
        first++;
    }
    return FL_OK;
}

static enum fl_status to_host(struct arena *a, struct region *r, uint64_t bytes,
                              struct arena_moved *m, struct fl_err *err)
{
    struct gpu_event *ended[ARENA_FLIGHT] = { NULL };
    struct copies c = { 0 };
    uint64_t at = arena_now_ns();
    size_t n = (bytes + ARENA_BLOCK_BYTES - 1) / ARENA_BLOCK_BYTES;
    enum fl_status st = FL_OK;

    if (bytes == 0)
        return FL_OK;
    uint32_t *blocks = malloc(n * sizeof(*blocks));
    if (!blocks)
        return fl_fail(err, FL_EXHAUSTED, "no memory to note %zu blocks", n);
    st = pool_take(a, blocks, n, err);
    m->setup_ns += arena_now_ns() - at;
    if (st != FL_OK) {
        free(blocks);
        return fl_wrap(err, st, "%llu bytes of pinned host memory", (unsigned long long)bytes);
    }
    r->blocks = blocks;
    r->n_blocks = n;
    for (unsigned i = 0; i < ARENA_FLIGHT && st == FL_OK; i++)
        st = a->gpu->event(a->g, &ended[i], err);
    if (st == FL_OK)
        st = copies_begin(a, &c, err);
    if (st == FL_OK)
        st = host_copies(a, r, ended, m, err);
    if (st == FL_OK)
        st = copies_end(a, &c, m, err);
    else
        (void)a->gpu->sync(a->g, NULL); /* no copy may run into blocks that are given back */
    for (unsigned i = 0; i < ARENA_FLIGHT; i++)
        if (ended[i])
            a->gpu->event_free(ended[i]);
    copies_free(a, &c);
    return st;
}

/* Content is saved first; what fails there has moved nothing, or is brought back. */
static enum fl_status save(struct arena *a, struct region *r, enum furlong_keep how,
                           struct arena_moved *m, struct fl_err *err)
{
    uint64_t bytes;
    enum fl_status st = parts_make(r, &bytes, err);

    if (st == FL_OK && how == FURLONG_KEEP_HOST)
        st = to_host(a, r, bytes, m, err);
    if (st == FL_OK && how == FURLONG_KEEP_DISK && bytes > 0)
        st = disk_write(a, r, m, err);
    if (st == FL_OK)
        return FL_OK;
    struct arena_moved none = { 0 };
    struct fl_err again;
    bool some_out = false;

    for (size_t i = 0; i < r->n_high; i++)
        some_out |= r->chunks[i].state == CHUNK_OUT;
    if (some_out && region_back(a, r, &none, &again) != FL_OK) {
        r->out = true; /* its content is in the backup still */
        return fl_wrap(err, st, "partly out, and not brought back (%.80s)", again.text);
    }
    backup_forget(a, r);
    return st;
}

static enum fl_status region_offload(struct arena *a, struct region *r, struct arena_moved *m,
                                     struct fl_err *err)
{
    enum furlong_keep how = how_kept(a, r);
    struct arena_moved mine = { 0 };

    if (how == FURLONG_KEEP_HOST || how == FURLONG_KEEP_DISK)
        FL_TRY(save(a, r, how, &mine, err));
    for (size_t i = 0; i < r->n_high; i++) {
        if (r->chunks[i].state != CHUNK_IN)
            continue;
        uint64_t held = arena_chunk_held(a, r, i);

        if (how == FURLONG_KEEP_IN || r->chunks[i].holders > 0) {
            mine.kept_bytes += held;
            mine.shared_bytes += r->chunks[i].holders > 0 ? held : 0;
            continue;
        }
        mine.dropped_bytes += how == FURLONG_KEEP_NOT ? held : 0;
        chunk_leaves(a, r, i, &mine);
    }
    m->setup_ns += mine.setup_ns;
    m->copy_ns += mine.copy_ns;
    m->dropped_bytes += mine.dropped_bytes;
    m->kept_bytes += mine.kept_bytes;
    m->backed_bytes += mine.backed_bytes;
    m->written_bytes += mine.written_bytes;
    m->shared_bytes += mine.shared_bytes;
    r->out = true;
    return FL_OK;
}

static bool saves(const struct arena *a, const struct region *r)
{
    enum furlong_keep how = how_kept(a, r);

    return how == FURLONG_KEEP_HOST || how == FURLONG_KEEP_DISK;
}

static enum fl_status bring_back(struct arena *a, uint32_t went, enum fl_status st,
                                 struct fl_err *err)
{
    struct arena_moved none = { 0 };
    struct fl_err again;

    for (unsigned i = 0; i < ARENA_TAGS; i++) {
        struct region *r = &a->regions[i];

        if (!(went & 1u << i))
            continue;
        r->out = region_back(a, r, &none, &again) != FL_OK;
        if (r->out)
            (void)fl_wrap(err, st, "%s is out, and not brought back (%.60s)",
                          arena_tag_name(1u << i), again.text);
    }
    return st;
}

/* First those whose content is saved, which may fail: what is only dropped cannot be brought back
 * as it was. */
static enum fl_status offload_tags(struct arena *a, uint32_t tags, struct arena_moved *m,
                                   struct fl_err *err)
{
    enum fl_status st = FL_OK;
    uint32_t went = 0;

    for (unsigned k = 0; k < 2 * ARENA_TAGS && st == FL_OK; k++) {
        unsigned i = k % ARENA_TAGS;
        struct region *r = &a->regions[i];

        if (r->out || !(tags & 1u << i) || saves(a, r) != (k < ARENA_TAGS))
            continue;
        st = region_offload(a, r, m, err);
        if (st == FL_OK)
            went |= 1u << i;
        else
            (void)fl_wrap(err, st, "of %s", arena_tag_name(1u << i));
    }
    return st == FL_OK ? FL_OK : bring_back(a, went, st, err);
}

enum fl_status arena_offload(struct arena *a, uint32_t tags, struct arena_moved *out,
                             struct fl_err *err)
{
    struct arena_moved m = { 0 };
    uint64_t begin = arena_now_ns();
    enum fl_status st;

    pthread_mutex_lock(&a->mu);
    st = a->gpu->sync(a->g, err); /* kernels that still run must not lose their memory */
    if (st == FL_OK)
        st = offload_tags(a, tags, &m, err);
    if (st == FL_OK)
        arena_growth_note(a, &m);
    pthread_mutex_unlock(&a->mu);
    m.wall_ns = arena_now_ns() - begin;
    if (st != FL_OK)
        return fl_wrap(err, st, "arena: offload");
    if (out)
        *out = m;
    return FL_OK;
}

enum fl_status arena_pool_prepare(struct arena *a, uint64_t bytes, struct fl_err *err)
{
    enum fl_status st = FL_OK;

    pthread_mutex_lock(&a->mu);
    if (!a->info.integrated) /* where nothing is copied to the host */
        st = pool_reserve(a, (bytes + ARENA_BLOCK_BYTES - 1) / ARENA_BLOCK_BYTES, err);
    pthread_mutex_unlock(&a->mu);
    return st;
}

uint64_t arena_pool_drop(struct arena *a)
{
    uint64_t bytes;

    pthread_mutex_lock(&a->mu);
    bytes = pool_drop(a);
    pthread_mutex_unlock(&a->mu);
    return bytes;
}
