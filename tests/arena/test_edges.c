/* what the arena does at its edges: tags that fail together, memory freed while it is out, holes,
 * and numbers that a peer made up */
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "tests/gpu/mem.h"
#include "tests/arena/small.h"
#include "tests/t.h"
#include "transport/arena/process.h"

static const struct gpu_ops *gpu;
static struct gpu_info info;
static struct fl_err err;

static bool filled(const void *p, uint64_t bytes, uint8_t value)
{
    uint8_t *wanted = malloc(bytes);

    memset(wanted, value, bytes);
    bool same = t_mem_same(p, wanted, bytes);
    free(wanted);
    return same;
}

/* Everything of a tag is freed while it is out, and other memory takes its place: what was saved is
 * nobody's. */
static void what_is_freed_while_out_does_not_come_back(void **state)
{
    static const enum furlong_keep kinds[] = { FURLONG_KEEP_DISK, FURLONG_KEEP_HOST };

    (void)state;
    for (size_t i = 0; i < FL_LEN(kinds); i++) {
        struct arena *a = arena_fresh(gpu, info.uuid, &small);
        void *p = arena_some(a, FURLONG_TAG_OPTIMIZER, 2 * CHUNK, 0), *q;

        t_ok(arena_keep(a, FURLONG_TAG_OPTIMIZER, kinds[i], NULL, &err), &err);
        t_mem_fill(p, 5, 2 * CHUNK);
        t_ok(arena_offload(a, FURLONG_TAG_OPTIMIZER, NULL, &err), &err);
        arena_free(a, p);
        q = arena_some(a, FURLONG_TAG_OPTIMIZER, 2 * CHUNK, 0);
        t_mem_fill(q, 9, 2 * CHUNK);
        t_ok(arena_onload(a, FURLONG_TAG_OPTIMIZER, NULL, &err), &err);
        t_true(filled(q, 2 * CHUNK, 9), "kept by %d: the new memory holds what was written there",
               (int)kinds[i]);
        arena_destroy(a);
    }
}

/* Several tags at once: what cannot be saved keeps the others, those that would be dropped too,
 * where they are and as they are. */
static void tags_go_together_or_not_at_all(void **state)
{
    const uint32_t saved = FURLONG_TAG_OPTIMIZER | FURLONG_TAG_DEFAULT,
                   all = saved | FURLONG_TAG_WEIGHTS | FURLONG_TAG_KV;
    bool met = true;

    (void)state;
    for (unsigned nth = 1; met; nth++) {
        struct arena *a = arena_fresh(gpu, info.uuid, &small);
        void *w = arena_some(a, FURLONG_TAG_WEIGHTS, CHUNK, 0),
             *kv = arena_some(a, FURLONG_TAG_KV, CHUNK, 0);
        void *o = arena_some(a, FURLONG_TAG_OPTIMIZER, CHUNK, 0),
             *d = arena_some(a, FURLONG_TAG_DEFAULT, CHUNK, 0);

        t_ok(arena_keep(a, saved, FURLONG_KEEP_DISK, NULL, &err), &err);
        t_mem_fill(w, 1, CHUNK);
        t_mem_fill(kv, 2, CHUNK);
        t_mem_fill(o, 3, CHUNK);
        t_mem_fill(d, 4, CHUNK);
        fl_fault_arm(nth);
        enum fl_status st = arena_offload(a, all, NULL, &err);
        met = fl_fault_disarm();
        t_int_eq(arena_out(a), st == FL_OK ? all : 0, "nth=%u", nth);
        if (st != FL_OK)
            t_true(filled(w, CHUNK, 1) && filled(kv, CHUNK, 2) && filled(o, CHUNK, 3) &&
                       filled(d, CHUNK, 4),
                   "nth=%u: all is as it was", nth);
        arena_destroy(a);
        t_true(nth < 200);
    }
}

static void a_disk_that_is_full_is_named(void **state)
{
    struct arena *a = arena_fresh(gpu, info.uuid, &small);

    (void)state;
    arena_some(a, FURLONG_TAG_OPTIMIZER, CHUNK, 0);
    t_ok(arena_keep(a, FURLONG_TAG_OPTIMIZER, FURLONG_KEEP_DISK, NULL, &err), &err);
    t_ok(fl_fault_set("arena.move:1=fail", &err), &err);
    t_true(arena_offload(a, FURLONG_TAG_OPTIMIZER, NULL, &err) != FL_OK);
    t_has(err.text, "of optimizer");
    t_has(err.text, t_tmp());
    t_ok(fl_fault_set(NULL, &err), &err);
    arena_destroy(a);
}

/* Half of the device is free, in holes: that is memory, and addresses cost nothing. */
static void holes_are_no_end_of_memory(void **state)
{
    void *all[120], *p = NULL;
    struct arena *a = arena_fresh(gpu, info.uuid, &small);

    (void)state;
    if (info.integrated || t_on_cuda()) {
        arena_destroy(a);
        t_skip("256 MiB of a device's own memory are wanted");
    }
    for (size_t i = 0; i < FL_LEN(all); i++)
        all[i] = arena_some(a, FURLONG_TAG_DEFAULT, CHUNK, 0);
    for (size_t i = 0; i < FL_LEN(all); i += 2)
        arena_free(a, all[i]);
    t_ok(arena_alloc(a, FURLONG_TAG_DEFAULT, 100 * MIB, 0, &p, &err),
         &err); /* 256 - 120 are free */
    arena_destroy(a);
}

static void numbers_that_overflow_are_refused(void **state)
{
    static const struct arena_export rows[] = {
        { .chunk_bytes = (uint64_t)1 << 63, .off = 1, .bytes = 1 << 30, .n = 2 },
        { .chunk_bytes = (uint64_t)1 << 62, .off = CHUNK, .bytes = 1 << 30, .n = 4 },
        { .chunk_bytes = UINT64_MAX - CHUNK + 1, .off = 4096, .bytes = 4096, .n = 1 },
    };
    struct arena *a = arena_fresh(gpu, info.uuid, &small);
    int fds = t_open_fds();

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        int none[] = { -1, -1, -1, -1 };
        struct arena_export x = rows[i];
        struct arena_view *v = NULL;

        x.fds = none;
        t_refused(arena_import(a, &x, false, &v, &err), FL_INVALID, &err);
        t_has(err.text, "chunks of");
    }
    t_int_eq(t_open_fds(), fds);
    arena_destroy(a);
}

/* A virtual GPU, or WSL. */
static void a_device_without_chunks_is_said(void **state)
{
    struct arena *a = NULL;

    (void)state;
    t_refused(arena_create(gpu, info.uuid, NULL, &a, &err), FL_UNSUPPORTED, &err);
    t_has(err.text, info.uuid);
    t_has(err.text, "virtual memory management");
    t_has(err.text, "host memory");
    t_true(a == NULL);
}

/* Of this program: the library's own is not reached. */
static unsigned asked_to_hear;

int pthread_atfork(void (*before)(void), void (*parent)(void), void (*child)(void))
{
    (void)before, (void)parent, (void)child;
    asked_to_hear++;
    return 0;
}

/* What is registered for forks cannot be taken back: a program that tries again and again would
 * grow, and its forks with it. */
static void forks_are_heard_of_once(void **state)
{
    struct arena *a;

    (void)state;
    for (unsigned i = 0; i < 3; i++)
        t_refused(arena_of_device("GPU-nowhere", &a, &err), FL_NOT_FOUND, &err);
    t_int_eq(asked_to_hear, 1);
}

int main(void)
{
    static const struct CMUnitTest without[] = { cmocka_unit_test(
        a_device_without_chunks_is_said) };
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_freed_while_out_does_not_come_back),
        cmocka_unit_test(tags_go_together_or_not_at_all),
        cmocka_unit_test(a_disk_that_is_full_is_named),
        cmocka_unit_test(holes_are_no_end_of_memory),
        cmocka_unit_test(numbers_that_overflow_are_refused),
        cmocka_unit_test(forks_are_heard_of_once),
    };
    struct gpu_info all[GPU_MAX];
    size_t n = GPU_MAX;

    if (gpu_pick(&gpu, &err) != FL_OK || gpu->list(all, &n, &err) != FL_OK || n == 0) {
        printf("1..0 # SKIP no device: %s\n", err.text);
        return 0;
    }
    info = all[0];
    return info.vmm ? t_run("arena edges", tests) : t_run("arena without chunks", without);
}
