/* one face over a device (or its fake), one that is one memory with the host, and the host:
 * FURLONG_GPU says which */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "tests/gpu/two.h"
#include "tests/arena/small.h"
#include "tests/t.h"

static const struct gpu_ops *gpu;
static struct gpu_info info;
static struct fl_err err;

/* The test's own way to the memory. */
struct eye {
    struct gpu *g;
    struct gpu_stream *s;
};

static struct eye eye_open(void)
{
    struct eye e;

    t_ok(gpu->open(info.uuid, &e.g, &err), &err);
    t_ok(gpu->stream(e.g, &e.s, &err), &err);
    return e;
}

static void eye_close(struct eye *e)
{
    gpu->stream_free(e->s);
    gpu->close(e->g);
}

static void paint(struct eye *e, void *p, uint64_t bytes, uint64_t seed)
{
    uint64_t *host = malloc(bytes);

    for (uint64_t i = 0; i < bytes / 8; i++)
        host[i] = seed * 0x9e3779b97f4a7c15ull + i;
    t_ok(gpu->copy(e->s, (uint64_t)(uintptr_t)p, (uint64_t)(uintptr_t)host, bytes, &err), &err);
    t_ok(gpu->stream_sync(e->s, &err), &err);
    free(host);
}

static bool painted(struct eye *e, const void *p, uint64_t bytes, uint64_t seed)
{
    uint64_t *host = malloc(bytes), i = 0;

    memset(host, 0xcc, bytes);
    t_ok(gpu->copy(e->s, (uint64_t)(uintptr_t)host, (uint64_t)(uintptr_t)p, bytes, &err), &err);
    t_ok(gpu->stream_sync(e->s, &err), &err);
    while (i < bytes / 8 && host[i] == (seed ? seed * 0x9e3779b97f4a7c15ull + i : 0))
        i++;
    free(host);
    return i == bytes / 8;
}

static uint64_t held(struct arena *a, uint32_t tag)
{
    struct arena_usage u;

    arena_usage(a, false, &u);
    return u.tags[__builtin_ctz(tag)].held_bytes;
}

/* ==== memory ==== */
static void gives_aligned_zeros(void **state)
{
    static const struct {
        uint64_t bytes, align;
    } rows[] = {
        { 1, 4096 },          { 4096, 4096 },           { 4097, 4096 },
        { 2 * MIB, 2 * MIB }, { 5 * MIB + 3, 2 * MIB }, { 8, 4096 },
    };
    struct arena *a = arena_fresh(gpu, info.uuid, &small);
    struct eye e = eye_open();

    (void)state;
    for (size_t i = 0; i < 3 * FL_LEN(rows); i++) {
        uint64_t bytes = rows[i % FL_LEN(rows)].bytes, whole = (bytes + 7) / 8 * 8;
        uint8_t *p = arena_some(a, FURLONG_TAG_KV, bytes, ARENA_ZEROED);

        t_int_eq((uintptr_t)p % rows[i % FL_LEN(rows)].align, 0, "%llu bytes",
                 (unsigned long long)bytes);
        t_true(painted(&e, p, whole, 0), "%llu bytes are zero, row %zu", (unsigned long long)bytes,
               i);
        paint(&e, p, whole, 77); /* what comes back is not */
        if (i % 2)
            arena_free(a, p);
    }
    arena_free(a, NULL);
    arena_free(a, &e); /* not ours: passed over */
    arena_destroy(a);
    eye_close(&e);
}

/* What has been started on memory that then cannot be given ends before that goes. */
static void zeros_that_fail_half_way_leave_nothing(void **state)
{
    struct arena *a = arena_fresh(gpu, info.uuid, &small);
    void *p;

    (void)state;
    t_ok(fl_fault_set("gpu.fill:5=fail", NULL), NULL);
    t_refused(arena_alloc(a, FURLONG_TAG_KV, 8 * CHUNK, ARENA_ZEROED, &p, &err), FL_UNREACHABLE,
              &err);
    t_ok(fl_fault_set("", NULL), NULL);
    t_int_eq(held(a, FURLONG_TAG_KV), 0);
    arena_destroy(a);
}

static void pieces_never_lie_on_each_other(void **state)
{
    struct {
        uint64_t *p, bytes, seed;
    } live[40] = { 0 };
    struct arena *a = arena_fresh(gpu, info.uuid, &small);
    struct eye e = eye_open();
    uint64_t seed = 4;

    (void)state;
    for (unsigned round = 0; round < 400; round++) {
        size_t i = t_random(&seed) % FL_LEN(live);

        if (live[i].p) {
            t_true(painted(&e, live[i].p, live[i].bytes, live[i].seed), "round %u", round);
            arena_free(a, live[i].p);
            live[i].p = NULL;
            continue;
        }
        live[i].bytes = 8 * (1 + t_random(&seed) % (round % 10 == 0 ? 3 * CHUNK / 8 : 20000));
        live[i].seed = round + 1;
        live[i].p = arena_some(a, FURLONG_TAG_DEFAULT, live[i].bytes, 0);
        paint(&e, live[i].p, live[i].bytes, live[i].seed);
    }
    for (size_t i = 0; i < FL_LEN(live); i++)
        if (live[i].p) {
            t_true(painted(&e, live[i].p, live[i].bytes, live[i].seed));
            arena_free(a, live[i].p);
        }
    t_int_eq(held(a, FURLONG_TAG_DEFAULT), 0, "chunks go when nothing is in them");
    struct arena_usage u;
    arena_usage(a, false, &u);
    t_int_eq(u.tags[4].used_bytes, 0);
    t_true(u.peak_held_bytes >= CHUNK);
    arena_destroy(a);
    eye_close(&e);
}

static void chunks_are_as_large_as_asked(void **state)
{
    static const struct arena_opts odd = { .chunk_bytes = { 3 * MIB, 10 * MIB } };
    struct arena *a = arena_fresh(gpu, info.uuid, &odd);

    (void)state;
    uint64_t unit = info.granularity_bytes;
    arena_some(a, FURLONG_TAG_WEIGHTS, 1, 0);
    arena_some(a, FURLONG_TAG_KV, 1, 0);
    struct arena_usage u;
    arena_usage(a, false, &u);
    t_int_eq(u.peak_held_bytes,
             (3 * MIB + unit - 1) / unit * unit + (10 * MIB + unit - 1) / unit * unit);
    uint64_t first = u.peak_held_bytes;
    void *last = arena_some(a, FURLONG_TAG_DEFAULT, 1, 0); /* 64 MiB unless said */
    arena_usage(a, true, &u);
    t_true(u.peak_held_bytes > 64 * MIB);
    t_int_eq(u.tags[0].chunks + u.tags[1].chunks + u.tags[4].chunks, 3);
    arena_free(a, last);
    arena_usage(a, true, &u);
    t_true(u.peak_held_bytes > 64 * MIB, "until it is restarted");
    arena_usage(a, false, &u);
    t_int_eq(u.peak_held_bytes, first);
    arena_destroy(a);
    a = arena_fresh(gpu, info.uuid, &(struct arena_opts){ 0 });
    void *w = arena_some(a, FURLONG_TAG_WEIGHTS, 1, 0);
    t_int_eq(held(a, FURLONG_TAG_WEIGHTS), gpu == &gpu_host ? 0 : 256 * MIB, "unless said");
    arena_free(a, w);
    arena_destroy(a);
}

/* ==== offload and onload ==== */
static void dropped_memory_comes_back_at_its_address(void **state)
{
    struct arena *a = arena_fresh(gpu, info.uuid, &small);
    struct eye e = eye_open();
    struct arena_moved m;
    void *p = NULL;

    (void)state;
    uint8_t *kv = arena_some(a, FURLONG_TAG_KV, 3 * CHUNK, 0),
            *graph = arena_some(a, FURLONG_TAG_GRAPH, CHUNK, 0);
    paint(&e, kv, 3 * CHUNK, 5);
    paint(&e, graph, CHUNK, 6);
    uint64_t before = held(a, FURLONG_TAG_KV);
    t_true(before >= 3 * CHUNK);
    t_ok(arena_offload(a, FURLONG_TAG_KV, &m, &err), &err);
    t_int_eq(m.dropped_bytes, before);
    t_int_eq(m.kept_bytes + m.backed_bytes + m.written_bytes, 0);
    t_int_eq(held(a, FURLONG_TAG_KV), 0);
    t_int_eq(arena_out(a), FURLONG_TAG_KV);
    t_true(painted(&e, graph, CHUNK, 6), "another tag");
    t_refused(arena_alloc(a, FURLONG_TAG_KV, 1, 0, &p, &err), FL_AGAIN, &err);
    t_ok(arena_offload(a, FURLONG_TAG_KV, &m, &err), &err);
    t_int_eq(m.dropped_bytes, 0, "out already");
    t_ok(arena_onload(a, FURLONG_TAG_KV | FURLONG_TAG_GRAPH, &m, &err), &err);
    t_true(m.wall_ns >= m.setup_ns);
    if (gpu == &gpu_host)
        t_true(painted(&e, kv, 3 * CHUNK, 0), "host memory comes back as zeros");
    paint(&e, kv, 3 * CHUNK, 9);
    t_true(painted(&e, kv, 3 * CHUNK, 9));
    t_int_eq(arena_out(a), 0);
    arena_destroy(a);
    eye_close(&e);
}

static void untouched_host_memory_is_not_counted(void **state)
{
    struct arena *a = arena_fresh(gpu, info.uuid, &small);
    struct arena_moved m;

    (void)state;
    arena_some(a, FURLONG_TAG_KV, 8 * CHUNK, ARENA_ZEROED);
    t_ok(arena_offload(a, FURLONG_TAG_KV, &m, &err), &err);
    t_int_eq(m.dropped_bytes, gpu == &gpu_host ? 0 : 8 * CHUNK);
    arena_destroy(a);
}

/* Many pieces, some freed before and some while they are out; what is left holds what it held. */
static void content_survives(uint32_t tag, enum furlong_keep how, struct arena_moved *out,
                             struct arena_moved *in)
{
    struct {
        void *p;
        uint64_t bytes;
    } all[60];
    struct arena *a = arena_fresh(gpu, info.uuid, &small);
    struct eye e = eye_open();
    uint64_t seed = 15;

    t_ok(arena_keep(a, tag, how, NULL, &err), &err);
    for (size_t i = 0; i < FL_LEN(all); i++) {
        all[i].bytes = 8 * (1 + t_random(&seed) % (i % 9 ? 30000 : 3 * CHUNK / 8));
        all[i].p = arena_some(a, tag, all[i].bytes, 0);
        paint(&e, all[i].p, all[i].bytes, i + 1);
    }
    for (size_t i = 0; i < FL_LEN(all); i += 7)
        arena_free(a, all[i].p);
    t_ok(arena_offload(a, tag, out, &err), &err);
    for (size_t i = 1; i < FL_LEN(all); i += 7)
        arena_free(a, all[i].p);
    t_ok(arena_onload(a, tag, in, &err), &err);
    for (size_t i = 0; i < FL_LEN(all); i++)
        if (i % 7 > 1)
            t_true(painted(&e, all[i].p, all[i].bytes, i + 1), "piece %zu", i);
    for (size_t i = 0; i < FL_LEN(all); i++)
        if (i % 7 > 1)
            arena_free(a, all[i].p);
    t_int_eq(held(a, tag), 0);
    arena_destroy(a);
    eye_close(&e);
}

static void the_host_keeps_a_devices_content(void **state)
{
    struct arena_moved out, in;

    (void)state;
    content_survives(FURLONG_TAG_OPTIMIZER, FURLONG_KEEP_HOST, &out, &in);
    t_int_eq(out.dropped_bytes + out.written_bytes, 0);
    t_true((out.backed_bytes > 0) == !info.integrated, "one memory: nothing is copied to the host");
    t_true((out.kept_bytes > 0) == info.integrated);
    t_true(in.backed_bytes <= out.backed_bytes);
}

static void the_disk_keeps_content(void **state)
{
    struct arena_moved out, in;
    int fds = t_open_fds();

    (void)state;
    content_survives(FURLONG_TAG_OPTIMIZER, FURLONG_KEEP_DISK, &out, &in);
    t_int_eq(out.dropped_bytes + out.kept_bytes + out.backed_bytes, 0);
    t_true(out.written_bytes > 0 && in.written_bytes > 0 && in.written_bytes <= out.written_bytes);
    t_int_eq(t_open_fds(), fds);
}

/* Nobody has said how a tag is kept: what can be made or sent again goes, the rest is saved where
 * that is another memory. */
static void each_tag_goes_its_own_way(void **state)
{
    static const struct {
        uint32_t tag;
        bool saved;
    } rows[] = {
        { FURLONG_TAG_WEIGHTS, false }, { FURLONG_TAG_KV, false },
        { FURLONG_TAG_GRAPH, false },   { FURLONG_TAG_OPTIMIZER, true },
        { FURLONG_TAG_DEFAULT, true },
    };
    struct arena *a = arena_fresh(gpu, info.uuid, &small);
    struct eye e = eye_open();
    void *p[FL_LEN(rows)];

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        p[i] = arena_some(a, rows[i].tag, CHUNK, 0);
        paint(&e, p[i], CHUNK, 40 + i);
    }
    for (size_t i = 0; i < FL_LEN(rows); i++) { /* one at a time: no other tag is touched */
        bool stays = rows[i].saved && info.integrated;
        struct arena_moved m;

        t_ok(arena_offload(a, rows[i].tag, &m, &err), &err);
        t_int_eq(m.dropped_bytes, rows[i].saved ? 0 : CHUNK, "tag %u", rows[i].tag);
        t_int_eq(m.kept_bytes, stays ? CHUNK : 0, "tag %u", rows[i].tag);
        t_int_eq(m.backed_bytes, rows[i].saved && !stays ? CHUNK : 0, "tag %u", rows[i].tag);
        t_int_eq(held(a, rows[i].tag), stays ? CHUNK : 0, "tag %u", rows[i].tag);
        for (size_t k = i + 1; k < FL_LEN(rows); k++)
            t_true(painted(&e, p[k], CHUNK, 40 + k), "tag %u", rows[k].tag);
    }
    struct arena_usage u;
    arena_usage(a, false, &u);
    t_true((u.pool_bytes == 0) == info.integrated, "no second copy in one memory");
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        t_ok(arena_onload(a, rows[i].tag, NULL, &err), &err);
        if (rows[i].saved)
            t_true(painted(&e, p[i], CHUNK, 40 + i), "tag %u", rows[i].tag);
    }
    arena_destroy(a);
    eye_close(&e);
}

static void what_stays_is_as_it_was(void **state)
{
    struct arena_moved m;
    struct arena *a = arena_fresh(gpu, info.uuid, &small);
    struct eye e = eye_open();

    (void)state;
    void *p = arena_some(a, FURLONG_TAG_DEFAULT, CHUNK, 0);
    t_ok(arena_keep(a, FURLONG_TAG_DEFAULT, FURLONG_KEEP_IN, NULL, &err), &err);
    paint(&e, p, CHUNK, 8);
    t_ok(arena_offload(a, FURLONG_TAG_DEFAULT, &m, &err), &err);
    t_int_eq(m.kept_bytes, CHUNK);
    t_true(painted(&e, p, CHUNK, 8));
    arena_some(a, FURLONG_TAG_DEFAULT, CHUNK, 0); /* it is in place: more may come */
    t_ok(arena_onload(a, FURLONG_TAG_DEFAULT, &m, &err), &err);
    t_true(painted(&e, p, CHUNK, 8));
    t_true(!arena_drops(a, FURLONG_TAG_DEFAULT) && arena_drops(a, FURLONG_TAG_KV) &&
           arena_drops(a, FURLONG_TAG_WEIGHTS));
    arena_destroy(a);
    eye_close(&e);
}

static void the_pool_is_made_once_and_holds_one_backup(void **state)
{
    struct arena *a = arena_fresh(gpu, info.uuid, &small);
    struct arena_usage u;

    (void)state;
    if (info.integrated) {
        t_ok(arena_pool_prepare(a, 64 * MIB, &err), &err);
        arena_usage(a, false, &u);
        t_int_eq(u.pool_bytes, 0, "nothing is ever copied to the host");
        arena_destroy(a);
        return;
    }
    t_ok(arena_keep(a, FURLONG_TAG_WEIGHTS, FURLONG_KEEP_HOST, NULL, &err), &err);
    arena_some(a, FURLONG_TAG_WEIGHTS, 80 * MIB, 0);
    arena_some(a, FURLONG_TAG_OPTIMIZER, 90 * MIB, 0);
    t_ok(arena_pool_prepare(a, 90 * MIB, &err), &err);
    arena_usage(a, false, &u);
    t_int_eq(u.pool_bytes, 96 * MIB);
    for (unsigned step = 0; step < 4; step++) {
        t_ok(arena_offload(a, FURLONG_TAG_OPTIMIZER, NULL, &err), &err);
        t_ok(arena_onload(a, FURLONG_TAG_OPTIMIZER, NULL, &err), &err);
        t_ok(arena_offload(a, FURLONG_TAG_WEIGHTS, NULL, &err), &err);
        arena_usage(a, false, &u);
        t_true(u.pool_used_bytes == 96 * MIB && u.pool_bytes == 96 * MIB, "step %u: %llu", step,
               (unsigned long long)u.pool_bytes);
        t_int_eq(arena_pool_drop(a), 0, "it is in use");
        t_ok(arena_onload(a, FURLONG_TAG_WEIGHTS, NULL, &err), &err);
    }
    arena_usage(a, true, &u);
    t_int_eq(u.peak_pool_used_bytes, 96 * MIB, "one backup at a time");
    t_int_eq(u.pool_used_bytes, 0);
    t_int_eq(arena_pool_drop(a), 96 * MIB);
    arena_usage(a, false, &u);
    t_int_eq(u.pool_bytes + u.peak_pool_used_bytes, 0);
    arena_destroy(a);
}

/* ---- the device's table, with a count of what the arena asks of it ---- */
static struct {
    struct gpu_stream *streams[4];
    unsigned n_streams, copies, flying, most_flying, pinned;
} asked;

static enum fl_status counted_copy(struct gpu_stream *s, uint64_t to, uint64_t from, uint64_t bytes,
                                   struct fl_err *e)
{
    unsigned i = 0;

    while (i < asked.n_streams && asked.streams[i] != s)
        i++;
    if (i == asked.n_streams && i < FL_LEN(asked.streams))
        asked.streams[asked.n_streams++] = s;
    asked.copies++;
    asked.flying++;
    asked.most_flying = asked.flying > asked.most_flying ? asked.flying : asked.most_flying;
    return gpu->copy(s, to, from, bytes, e);
}

static enum fl_status counted_event_sync(struct gpu_event *event, struct fl_err *e)
{
    asked.flying = 0;
    return gpu->event_sync(event, e);
}

static enum fl_status counted_stream_sync(struct gpu_stream *s, struct fl_err *e)
{
    asked.flying = 0;
    return gpu->stream_sync(s, e);
}

static enum fl_status counted_pin(struct gpu *g, uint64_t bytes, void **out, struct fl_err *e)
{
    asked.pinned++;
    return gpu->pin(g, bytes, out, e);
}

/* Copies are given to two streams and not waited for one by one; the pool is made the first time.
 */
static void copies_run_on_two_streams(void **state)
{
    enum { CHUNKS = 12 };
    struct gpu_ops counted = *gpu;
    struct arena_opts with = small;
    struct arena *a = NULL;

    (void)state;
    if (info.integrated)
        t_skip("one memory: nothing is copied");
    counted.copy = counted_copy;
    counted.event_sync = counted_event_sync;
    counted.stream_sync = counted_stream_sync;
    counted.pin = counted_pin;
    with.folder = t_tmp();
    t_ok(arena_create(&counted, info.uuid, &with, &a, &err), &err);
    arena_some(a, FURLONG_TAG_OPTIMIZER, (uint64_t)CHUNKS * CHUNK, 0);
    for (unsigned i = 0; i < 6; i++) { /* out and in, three times */
        memset(&asked, 0, sizeof(asked));
        t_ok(i % 2 ? arena_onload(a, FURLONG_TAG_OPTIMIZER, NULL, &err)
                   : arena_offload(a, FURLONG_TAG_OPTIMIZER, NULL, &err),
             &err);
        t_int_eq(asked.n_streams, 2, "turn %u", i);
        t_true(asked.copies >= CHUNKS && asked.most_flying >= CHUNKS / 2, "turn %u: %u of %u", i,
               asked.most_flying, asked.copies);
        t_int_eq(asked.pinned, i == 0, "turn %u", i);
    }
    arena_destroy(a);
}

/* ==== threads ==== */
struct busy {
    struct arena *a;
    pthread_t thread;
    unsigned failed;
};

static void *allocate(void *arg)
{
    struct busy *b = arg;

    for (unsigned i = 0; i < 200; i++) {
        void *p = NULL, *q = NULL;

        b->failed += arena_alloc(b->a, FURLONG_TAG_DEFAULT, 5000 + i, 0, &p, NULL) != FL_OK;
        b->failed += arena_alloc(b->a, FURLONG_TAG_WEIGHTS, CHUNK / 2, 0, &q, NULL) != FL_OK;
        arena_free(b->a, p);
        arena_free(b->a, q);
    }
    return NULL;
}

static void any_thread_may_allocate(void **state)
{
    struct arena *a = arena_fresh(gpu, info.uuid, &small);
    struct busy busy[3] = { { .a = a }, { .a = a }, { .a = a } };
    struct arena_usage u;

    (void)state;
    arena_some(a, FURLONG_TAG_KV, CHUNK, 0);
    for (size_t i = 0; i < FL_LEN(busy); i++)
        t_int_eq(pthread_create(&busy[i].thread, NULL, allocate, &busy[i]), 0);
    for (unsigned i = 0; i < 20; i++) {
        t_ok(arena_offload(a, FURLONG_TAG_KV, NULL, &err), &err);
        t_ok(arena_onload(a, FURLONG_TAG_KV, NULL, &err), &err);
    }
    for (size_t i = 0; i < FL_LEN(busy); i++) {
        pthread_join(busy[i].thread, NULL);
        t_int_eq(busy[i].failed, 0);
    }
    arena_usage(a, false, &u);
    t_int_eq(u.tags[0].used_bytes + u.tags[4].used_bytes, 0);
    arena_destroy(a);
}

/* ==== limits ==== */
static void the_end_of_memory_says_what_would_help(void **state)
{
    struct arena_usage u, after;
    const char *bytes = getenv("FURLONG_GPU_FAKE_BYTES");
    struct arena *a;
    void *p = NULL, *w;

    (void)state;
    if (!bytes || strcmp(bytes, "256MiB") != 0)
        t_skip("the numbers are those of FURLONG_GPU_FAKE_BYTES=256MiB");
    a = arena_fresh(gpu, info.uuid, &small);
    w = arena_some(a, FURLONG_TAG_WEIGHTS, 16 * MIB, 0);
    arena_some(a, FURLONG_TAG_WEIGHTS, 16 * MIB, 0);
    arena_some(a, FURLONG_TAG_KV, 60 * MIB, 0);
    arena_note_slots(a, 2);
    arena_usage(a, false, &u);
    t_refused(arena_alloc(a, FURLONG_TAG_OPTIMIZER, 200 * MIB, 0, &p, &err), FL_EXHAUSTED, &err);
    t_has(err.text, "one slot of weights would save 16.0 MiB");
    if (!info.integrated) /* 256 - 92 are free */
        t_has(err.text, "a kv_cache smaller by 36.0 MiB would make room");
    else /* what is free is not said, and all of kv_cache would not do */
        t_true(strstr(err.text, "would make room") == NULL, "%s", err.text);
    t_has(err.text, "weights 32.0 MiB, kv_cache 60.0 MiB");
    arena_usage(a, false, &after);
    t_int_eq(after.held_bytes, u.held_bytes, "nothing half done");
    t_true(p == NULL);
    t_ok(arena_offload(a, FURLONG_TAG_KV, NULL, &err), &err);
    t_ok(arena_alloc(a, FURLONG_TAG_OPTIMIZER, 208 * MIB, 0, &p, &err), &err);
    t_refused(arena_onload(a, FURLONG_TAG_KV, NULL, &err), FL_EXHAUSTED, &err);
    t_has(err.text, "onload of kv_cache");
    t_int_eq(arena_out(a), FURLONG_TAG_KV, "still out");
    t_int_eq(held(a, FURLONG_TAG_KV), 0);
    arena_free(a, w);
    arena_free(a, p);
    t_ok(arena_onload(a, FURLONG_TAG_KV, NULL, &err), &err);
    arena_destroy(a);
}

static void refuses(void **state)
{
    struct arena *a = arena_fresh(gpu, info.uuid, &small), *none = NULL;
    void *p = NULL;

    (void)state;
    t_refused(arena_create(gpu, "GPU-of-nobody", NULL, &none, &err), FL_NOT_FOUND, &err);
    t_refused(arena_alloc(a, 0, 1, 0, &p, &err), FL_INVALID, &err);
    t_refused(arena_alloc(a, 3, 1, 0, &p, &err), FL_INVALID, &err);
    t_refused(arena_alloc(a, 32, 1, 0, &p, &err), FL_INVALID, &err);
    t_refused(arena_alloc(a, FURLONG_TAG_KV, 0, 0, &p, &err), FL_INVALID, &err);
    t_refused(arena_alloc(a, FURLONG_TAG_KV, UINT64_MAX - 5, 0, &p, &err), FL_INVALID, &err);
    t_refused(arena_alloc(a, FURLONG_TAG_KV, (uint64_t)1 << 60, 0, &p, &err), FL_EXHAUSTED, &err);
    t_has(err.text, "1152921504606846976");
    t_true(p == NULL && none == NULL);
    t_refused(arena_keep(a, 0, FURLONG_KEEP_IN, NULL, &err), FL_INVALID, &err);
    t_refused(arena_keep(a, FURLONG_TAG_KV, (enum furlong_keep)9, NULL, &err), FL_INVALID, &err);
    t_ok(arena_keep(a, FURLONG_TAG_KV, FURLONG_KEEP_DISK, "/nowhere/at/all", &err), &err);
    struct eye e = eye_open();
    p = arena_some(a, FURLONG_TAG_KV, 4096, 0);
    paint(&e, p, 4096, 3);
    t_refused(arena_offload(a, FURLONG_TAG_KV, NULL, &err), FL_NOT_FOUND, &err);
    t_has(err.text, "/nowhere/at/all");
    t_true(painted(&e, p, 4096, 3), "nothing half done");
    t_int_eq(arena_out(a), 0);
    eye_close(&e);
    arena_destroy(a);
}

/* ==== sharing ==== */
struct note {
    uint64_t chunk_bytes, off, bytes;
    uint32_t n;
};

static void send_export(int sock, const struct arena_export *x)
{
    struct note n = { x->chunk_bytes, x->off, x->bytes, x->n };

    two_send(sock, &n, sizeof(n), -1);
    for (uint32_t i = 0; i < x->n; i++)
        two_send(sock, "f", 1, x->fds[i]);
}

static bool take_export(int sock, struct arena_export *x)
{
    struct note n;
    char f;

    if (two_take(sock, &n, sizeof(n), NULL) != sizeof(n))
        return false;
    *x = (struct arena_export){ n.chunk_bytes, n.off, n.bytes, n.n, calloc(n.n, sizeof(int)) };
    for (uint32_t i = 0; i < x->n; i++)
        two_take(sock, &f, 1, &x->fds[i]);
    return true;
}

static void shared_memory_stays_and_is_counted_by_holder(void **state)
{
    struct arena *a = arena_fresh(gpu, info.uuid, &small);
    struct eye e = eye_open();
    struct arena_export x;
    struct arena_holding who[4];
    struct arena_moved m;
    struct arena_usage u;
    int sock;
    char said;

    (void)state;
    void *w = arena_some(a, FURLONG_TAG_WEIGHTS, 2 * CHUNK, ARENA_OWN_CHUNKS),
         *mine = arena_some(a, FURLONG_TAG_WEIGHTS, CHUNK, 0);
    paint(&e, w, 2 * CHUNK, 21);
    paint(&e, mine, CHUNK, 22);
    pid_t pid = two_start("read", &sock);
    t_ok(arena_export(a, w, 2 * CHUNK, "rollout 3", &x, &err), &err);
    t_int_eq(x.n, 2);
    t_int_eq(x.off, 0);
    send_export(sock, &x);
    arena_export_fini(&x);
    t_int_eq(two_take(sock, &said, 1, NULL), 1);
    t_int_eq(said, 'y');
    t_int_eq(arena_holders(a, who, FL_LEN(who)), 1);
    t_str_eq(who[0].holder, "rollout 3");
    t_int_eq(who[0].bytes, 2 * CHUNK);
    t_ok(arena_offload(a, FURLONG_TAG_WEIGHTS, &m, &err), &err);
    t_int_eq(m.shared_bytes, 2 * CHUNK, "what others map stays");
    t_int_eq(m.dropped_bytes, CHUNK);
    t_true(painted(&e, w, 2 * CHUNK, 21));
    t_ok(arena_onload(a, FURLONG_TAG_WEIGHTS, NULL, &err), &err);
    arena_free(a, w); /* ours is given back, the pages live on over there */
    arena_usage(a, false, &u);
    t_int_eq(u.left_bytes, 2 * CHUNK);
    t_int_eq(u.tags[0].shared_bytes, 0);
    two_send(sock, "again", 5, -1);
    t_int_eq(two_take(sock, &said, 1, NULL), 1);
    t_int_eq(said, 'y');
    t_int_eq(two_end(pid, sock), 0);
    arena_release(a, "rollout 3");
    arena_usage(a, false, &u);
    t_int_eq(u.left_bytes, 0);
    t_int_eq(arena_holders(a, who, FL_LEN(who)), 0);
    void *again = arena_some(a, FURLONG_TAG_WEIGHTS, 2 * CHUNK, ARENA_OWN_CHUNKS);
    t_true(again == w, "the address can be had again");
    t_ok(arena_offload(a, FURLONG_TAG_WEIGHTS, &m, &err), &err);
    t_int_eq(m.shared_bytes, 0);
    arena_destroy(a);
    eye_close(&e);
}

static void a_view_outlives_the_one_who_made_it(void **state)
{
    struct arena *a = arena_fresh(gpu, info.uuid, &small);
    struct eye e = eye_open();
    struct arena_view *v = NULL;
    struct arena_export x;
    struct arena_usage u;
    int sock;

    (void)state;
    pid_t pid = two_start("give", &sock);
    t_true(take_export(sock, &x));
    t_ok(arena_import(a, &x, false, &v, &err), &err);
    arena_export_fini(&x);
    t_int_eq(kill(pid, SIGKILL), 0);
    t_true(WIFSIGNALED(two_end(pid, sock)));
    t_true(painted(&e, arena_view_data(v), CHUNK + 8192, 33));
    arena_usage(a, false, &u);
    t_int_eq(u.viewed_bytes, 2 * CHUNK);
    t_int_eq(u.held_bytes, 0, "another's memory is not ours");
    arena_view_drop(a, v);
    arena_usage(a, false, &u);
    t_int_eq(u.viewed_bytes, 0);
    arena_destroy(a);
    eye_close(&e);
}

static void memory_changes_places_under_fixed_addresses(void **state)
{
    struct arena *a = arena_fresh(gpu, info.uuid, &small);
    struct eye e = eye_open();
    struct arena_export xp, xq;
    struct arena_view *vp, *vq;

    (void)state;
    void *p = arena_some(a, FURLONG_TAG_WEIGHTS, 2 * CHUNK, ARENA_OWN_CHUNKS),
         *q = arena_some(a, FURLONG_TAG_WEIGHTS, 2 * CHUNK, ARENA_OWN_CHUNKS);
    void *plain = arena_some(a, FURLONG_TAG_WEIGHTS, 2 * CHUNK, 0);
    paint(&e, p, 2 * CHUNK, 1);
    paint(&e, q, 2 * CHUNK, 2);
    t_ok(arena_exchange(a, p, q, &err), &err);
    t_true(painted(&e, p, 2 * CHUNK, 2) && painted(&e, q, 2 * CHUNK, 1));
    t_refused(arena_exchange(a, p, plain, &err), FL_INVALID, &err);
    t_refused(arena_exchange(a, p, p, &err), FL_INVALID, &err);
    t_ok(arena_export(a, p, 2 * CHUNK, "one", &xp, &err), &err);
    t_ok(arena_export(a, q, 2 * CHUNK, "two", &xq, &err), &err);
    t_ok(arena_exchange(a, p, q, &err), &err); /* who holds a chunk is known wherever it lies */
    t_ok(arena_import(a, &xp, false, &vp, &err), &err);
    t_ok(arena_import(a, &xq, false, &vq, &err), &err);
    t_true(painted(&e, arena_view_data(vp), 2 * CHUNK, 2));
    t_ok(arena_view_exchange(a, vp, vq, &err), &err);
    t_true(painted(&e, arena_view_data(vp), 2 * CHUNK, 1) &&
           painted(&e, arena_view_data(vq), 2 * CHUNK, 2));
    t_refused(arena_view_exchange(a, vp, vp, &err), FL_INVALID, &err);
    arena_release(a, "one");
    struct arena_moved m;
    t_ok(arena_keep(a, FURLONG_TAG_WEIGHTS, FURLONG_KEEP_HOST, NULL, &err), &err);
    t_ok(arena_offload(a, FURLONG_TAG_WEIGHTS, &m, &err), &err);
    t_int_eq(m.shared_bytes, 2 * CHUNK, "two still holds its own");
    t_int_eq(m.backed_bytes, info.integrated ? 0 : 4 * CHUNK, "what stays is not saved");
    t_true(painted(&e, arena_view_data(vp), 2 * CHUNK, 1));
    arena_export_fini(&xp);
    arena_export_fini(&xq);
    arena_view_drop(a, vp);
    arena_view_drop(a, vq);
    arena_destroy(a);
    eye_close(&e);
}

static void wrong_exports_are_refused(void **state)
{
    struct arena *a = arena_fresh(gpu, info.uuid, &small);
    struct arena_export x, bad;
    struct arena_view *v = NULL;
    int fds = t_open_fds();

    (void)state;
    void *p = arena_some(a, FURLONG_TAG_WEIGHTS, CHUNK, ARENA_OWN_CHUNKS);
    t_refused(arena_export(a, &fds, 8, "one", &x, &err), FL_INVALID, &err);
    t_refused(arena_export(a, p, 0, "one", &x, &err), FL_INVALID, &err);
    t_refused(arena_export(a, p, 8, "", &x, &err), FL_INVALID, &err);
    t_refused(arena_export(a, p, 3 * CHUNK, "one", &x, &err), FL_AGAIN,
              &err); /* no memory under all of it */
    t_int_eq(arena_holders(a, &(struct arena_holding){ 0 }, 1), 0, "nothing half done");
    t_ok(arena_export(a, p, CHUNK, "one", &x, &err), &err);
    bad = x;
    bad.bytes = CHUNK + 1;
    t_refused(arena_import(a, &bad, false, &v, &err), FL_INVALID, &err);
    bad = x;
    bad.chunk_bytes = 12345;
    t_refused(arena_import(a, &bad, false, &v, &err), FL_INVALID, &err);
    bad = x;
    bad.fds = &(int){ 0 }; /* no chunk */
    t_true(arena_import(a, &bad, false, &v, &err) != FL_OK);
    t_true(v == NULL);
    arena_export_fini(&x);
    arena_destroy(a);
    t_true(t_open_fds() <= fds);
}

/* ==== faults ==== */
/* Each failure in turn: whatever fails, the bytes are there and nothing is left open. */
static void failures_lose_nothing(enum furlong_keep how)
{
    int fds = t_open_fds();
    struct eye e = eye_open();

    for (unsigned nth = 1;; nth++) {
        struct arena *a = arena_fresh(gpu, info.uuid, &small);
        enum fl_status out, in = FL_OK;

        t_ok(arena_keep(a, FURLONG_TAG_DEFAULT, how, NULL, &err), &err);
        void *p = arena_some(a, FURLONG_TAG_DEFAULT, 2 * CHUNK, 0),
             *q = arena_some(a, FURLONG_TAG_DEFAULT, 8192, 0);
        paint(&e, p, 2 * CHUNK, 5);
        paint(&e, q, 8192, 6);
        fl_fault_arm(nth);
        out = arena_offload(a, FURLONG_TAG_DEFAULT, NULL, &err);
        if (out == FL_OK)
            in = arena_onload(a, FURLONG_TAG_DEFAULT, NULL, &err);
        bool met = fl_fault_disarm();
        t_int_eq(arena_out(a), in == FL_OK ? 0 : FURLONG_TAG_DEFAULT, "nth=%u", nth);
        if (in != FL_OK)
            t_ok(arena_onload(a, FURLONG_TAG_DEFAULT, NULL, &err), &err);
        t_true(painted(&e, p, 2 * CHUNK, 5) && painted(&e, q, 8192, 6), "nth=%u", nth);
        struct arena_usage u;
        arena_usage(a, false, &u);
        t_int_eq(u.pool_used_bytes, 0, "nth=%u", nth);
        arena_destroy(a);
        t_true(nth < 500);
        if (!met) {
            t_true(nth > 2, "only %u places can fail", nth);
            break;
        }
    }
    eye_close(&e);
    t_int_eq(t_open_fds(), fds);
}

static void failures_of_the_host_copy_lose_nothing(void **state)
{
    (void)state;
    if (!info.integrated)
        failures_lose_nothing(FURLONG_KEEP_HOST);
}

static void failures_of_the_disk_lose_nothing(void **state)
{
    (void)state;
    failures_lose_nothing(FURLONG_KEEP_DISK);
}

static void failures_of_sharing_leave_nothing(void **state)
{
    int fds = t_open_fds();
    enum fl_status st = FL_INTERNAL;

    (void)state;
    for (unsigned nth = 1; st != FL_OK; nth++) {
        struct arena *a = arena_fresh(gpu, info.uuid, &small);
        struct arena_export x = { 0 };
        struct arena_view *v = NULL;
        void *p = arena_some(a, FURLONG_TAG_WEIGHTS, 3 * CHUNK, ARENA_OWN_CHUNKS), *q = NULL;

        fl_fault_arm(nth);
        st = arena_alloc(a, FURLONG_TAG_WEIGHTS, 3 * CHUNK, ARENA_OWN_CHUNKS, &q, &err);
        if (st == FL_OK)
            st = arena_export(a, p, 3 * CHUNK, "one", &x, &err);
        if (st == FL_OK)
            st = arena_import(a, &x, false, &v, &err);
        if (st == FL_OK)
            st = arena_exchange(a, p, q, &err);
        t_true(fl_fault_disarm() == (st != FL_OK), "nth=%u", nth);
        arena_export_fini(&x);
        arena_view_drop(a, v);
        arena_destroy(a);
        t_int_eq(t_open_fds(), fds, "nth=%u", nth);
        t_true(nth < 200);
    }
}

/* ==== the second process ==== */
static int second(const char *mode)
{
    struct arena *a = arena_fresh(gpu, info.uuid, &small);
    struct eye e = eye_open();
    struct arena_export x;
    struct arena_view *v;
    char word[5];

    if (strcmp(mode, "give") == 0) {
        arena_some(a, FURLONG_TAG_WEIGHTS, 4096, 0);
        uint8_t *p = arena_some(a, FURLONG_TAG_WEIGHTS, CHUNK + 8192, 0);

        paint(&e, p, CHUNK + 8192, 33);
        t_ok(arena_export(a, p, CHUNK + 8192, "first", &x, &err), &err);
        send_export(TWO_FD, &x);
        two_take(TWO_FD, word, sizeof(word), NULL); /* is killed here */
        return 1;
    }
    if (!take_export(TWO_FD, &x))
        return 1;
    t_ok(arena_import(a, &x, false, &v, &err), &err);
    arena_export_fini(&x);
    two_send(TWO_FD, painted(&e, arena_view_data(v), 2 * CHUNK, 21) ? "y" : "n", 1, -1);
    two_take(TWO_FD, word, sizeof(word), NULL);
    two_send(TWO_FD, painted(&e, arena_view_data(v), 2 * CHUNK, 21) ? "y" : "n", 1, -1);
    arena_view_drop(a, v);
    arena_destroy(a);
    eye_close(&e);
    return 0;
}

int main(int argc, char **argv)
{
    enum {
        HOST = 1,
        FAKE = 2,
        CUDA = 4,
        EVERY = HOST | FAKE | CUDA
    }; /* failures can be asked for, and memory filled */
    static const struct {
        struct CMUnitTest test;
        unsigned where;
    } all_tests[] = {
        { cmocka_unit_test(gives_aligned_zeros), EVERY },
        { cmocka_unit_test(zeros_that_fail_half_way_leave_nothing), FAKE },
        { cmocka_unit_test(pieces_never_lie_on_each_other), EVERY },
        { cmocka_unit_test(chunks_are_as_large_as_asked), EVERY },
        { cmocka_unit_test(dropped_memory_comes_back_at_its_address), EVERY },
        { cmocka_unit_test(untouched_host_memory_is_not_counted), EVERY },
        { cmocka_unit_test(the_host_keeps_a_devices_content), EVERY },
        { cmocka_unit_test(the_disk_keeps_content), EVERY },
        { cmocka_unit_test(each_tag_goes_its_own_way), FAKE | CUDA },
        { cmocka_unit_test(what_stays_is_as_it_was), EVERY },
        { cmocka_unit_test(the_pool_is_made_once_and_holds_one_backup), EVERY },
        { cmocka_unit_test(copies_run_on_two_streams), FAKE | CUDA },
        { cmocka_unit_test(any_thread_may_allocate), EVERY },
        { cmocka_unit_test(the_end_of_memory_says_what_would_help), FAKE },
        { cmocka_unit_test(refuses), EVERY },
        { cmocka_unit_test(shared_memory_stays_and_is_counted_by_holder), EVERY },
        { cmocka_unit_test(a_view_outlives_the_one_who_made_it), EVERY },
        { cmocka_unit_test(memory_changes_places_under_fixed_addresses), EVERY },
        { cmocka_unit_test(wrong_exports_are_refused), EVERY },
        { cmocka_unit_test(failures_of_the_host_copy_lose_nothing), HOST | FAKE },
        { cmocka_unit_test(failures_of_the_disk_lose_nothing), HOST | FAKE },
        { cmocka_unit_test(failures_of_sharing_leave_nothing), HOST | FAKE },
    };
    struct CMUnitTest tests[FL_LEN(all_tests)];
    size_t n_tests = 0;
    struct gpu_info all[GPU_MAX];
    size_t n = GPU_MAX;

    if (gpu_pick(&gpu, &err) != FL_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    if (gpu->list(all, &n, &err) != FL_OK || n == 0) {
        printf("1..0 # SKIP no device: table %s\n", gpu->name);
        return 0;
    }
    info = all[0];
    if (argc == 3 && strcmp(argv[1], "--second") == 0)
        return second(argv[2]);
    unsigned here = gpu == &gpu_host ? HOST : gpu == &gpu_fake ? FAKE : CUDA;
    for (size_t i = 0; i < FL_LEN(all_tests); i++)
        if (all_tests[i].where & here)
            tests[n_tests++] = all_tests[i].test;
        else
            printf("# SKIP %s: not of table %s\n", all_tests[i].test.name, gpu->name);
    return t_run_("arena", tests, n_tests);
}
