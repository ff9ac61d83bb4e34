#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "tests/t.h"
#include "worker/client/arena.h"

#define MIB ((size_t)1 << 20)

static size_t resident_kib(void)
{
    unsigned long pages = 0, rss = 0;
    FILE *in = fopen("/proc/self/statm", "re");

    t_true(in && fscanf(in, "%lu %lu", &pages, &rss) == 2);
    fclose(in);
    return rss * (size_t)sysconf(_SC_PAGESIZE) / 1024;
}

static uint8_t *fresh(struct arena *a, uint32_t tag, size_t bytes, uint8_t fill)
{
    struct fl_err err;
    void *p = NULL;

    t_ok(arena_alloc(a, tag, bytes, &p, &err), &err);
    if (fill)
        memset(p, fill, bytes);
    return p;
}

/* Reads one byte; false: the page may not be touched. */
static bool readable(const uint8_t *p)
{
    int pipes[2];
    ssize_t n;

    t_true(pipe(pipes) == 0);
    n = write(pipes[1], p, 1); /* EFAULT instead of a signal */
    t_true(n == 1 || errno == EFAULT);
    close(pipes[0]);
    close(pipes[1]);
    return n == 1;
}

static void gives_zeroed_aligned_memory(void **state)
{
    static const struct { size_t bytes, align; } rows[] = {
        { 1, 4096 }, { 4096, 4096 }, { 4097, 4096 }, { 2 * MIB, 2 * MIB }, { 5 * MIB + 3, 2 * MIB } };
    struct arena a;
    struct fl_err err;

    (void)state;
    t_ok(arena_init(&a, t_tmp(), &err), &err);
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        uint8_t *p = fresh(&a, FURLONG_TAG_KV, rows[i].bytes, 0);

        t_int_eq((uintptr_t)p % rows[i].align, 0, "%zu bytes", rows[i].bytes);
        t_int_eq(p[0] + p[rows[i].bytes - 1], 0);
        if (i % 2)
            arena_free(&a, p);
    }
    arena_free(&a, NULL);
    arena_free(&a, &a); /* not ours: passed over */
    arena_fini(&a);
}

static void dropped_memory_comes_back_to_the_system(void **state)
{
    struct furlong_moved m;
    struct arena a;
    struct fl_err err;
    size_t before, held;
    uint8_t *kv, *keep;

    (void)state;
    t_ok(arena_init(&a, t_tmp(), &err), &err);
    before = resident_kib();
    kv = fresh(&a, FURLONG_TAG_KV, 64 * MIB, 7);
    keep = fresh(&a, FURLONG_TAG_OPTIMIZER, 8 * MIB, 9);
    held = resident_kib();
    t_true(held - before > 70 * 1024, "held %zu KiB", held - before);
    t_ok(arena_offload(&a, FURLONG_TAG_KV | FURLONG_TAG_OPTIMIZER, &m, &err), &err);
    t_int_eq(m.dropped_bytes, 64 * MIB);
    t_int_eq(m.kept_bytes, 8 * MIB);
    t_int_eq(m.written_bytes, 0);
    t_true(held - resident_kib() > 62 * 1024, "gave back %zu KiB", held - resident_kib());
    t_true(!readable(kv), "what is out may not be touched");
    t_int_eq(keep[123], 9, "kept in place");
    t_ok(arena_onload(&a, FURLONG_TAG_KV | FURLONG_TAG_OPTIMIZER, &m, &err), &err);
    t_int_eq(kv[MIB], 0, "the same address, zeros");
    kv[0] = 1;
    arena_fini(&a);
}

static void untouched_memory_is_not_counted(void **state)
{
    struct furlong_moved m;
    struct arena a;
    struct fl_err err;

    (void)state;
    t_ok(arena_init(&a, t_tmp(), &err), &err);
    fresh(&a, FURLONG_TAG_KV, 32 * MIB, 0);
    t_ok(arena_offload(&a, FURLONG_TAG_KV, &m, &err), &err);
    t_int_eq(m.dropped_bytes, 0);
    arena_fini(&a);
}

static void disk_keeps_the_content(void **state)
{
    struct furlong_moved m;
    struct arena a;
    struct fl_err err;
    int fds = t_open_fds();
    uint8_t *p, *q;

    (void)state;
    t_ok(arena_init(&a, t_tmp(), &err), &err);
    t_ok(arena_keep(&a, FURLONG_TAG_OPTIMIZER, FURLONG_KEEP_DISK, NULL, &err), &err);
    p = fresh(&a, FURLONG_TAG_OPTIMIZER, 3 * MIB, 3);
    q = fresh(&a, FURLONG_TAG_OPTIMIZER, 4096, 4);
    t_ok(arena_offload(&a, FURLONG_TAG_OPTIMIZER, &m, &err), &err);
    t_int_eq(m.written_bytes, 3 * MIB + 4096);
    t_true(!readable(p) && !readable(q));
    t_ok(arena_offload(&a, FURLONG_TAG_OPTIMIZER, &m, &err), &err);
    t_int_eq(m.written_bytes, 0, "out already");
    t_int_eq(arena_out(&a), FURLONG_TAG_OPTIMIZER);
    t_ok(arena_onload(&a, FURLONG_TAG_OPTIMIZER, &m, &err), &err);
    t_true(p[0] == 3 && p[3 * MIB - 1] == 3 && q[4095] == 4);
    t_int_eq(arena_out(&a), 0);
    arena_fini(&a);
    t_int_eq(t_open_fds(), fds);
}

/* Each failure in turn: whatever fails, the bytes are there and nothing is left open. */
static void failures_lose_nothing(void **state)
{
    int fds = t_open_fds();

    (void)state;
    for (unsigned nth = 1;; nth++) {
        enum fl_status out, in = FL_OK;
        struct arena a;
        struct fl_err err;
        uint8_t *p, *q;
        bool met;

        t_ok(arena_init(&a, t_tmp(), &err), &err);
        t_ok(arena_keep(&a, FURLONG_TAG_DEFAULT, FURLONG_KEEP_DISK, NULL, &err), &err);
        p = fresh(&a, FURLONG_TAG_DEFAULT, MIB, 5);
        q = fresh(&a, FURLONG_TAG_DEFAULT, MIB, 6);
        fl_fault_arm(nth);
        out = arena_offload(&a, FURLONG_TAG_DEFAULT, NULL, &err);
        if (out == FL_OK)
            in = arena_onload(&a, FURLONG_TAG_DEFAULT, NULL, &err);
        met = fl_fault_disarm();
        if (in != FL_OK)
            t_ok(arena_onload(&a, FURLONG_TAG_DEFAULT, NULL, &err), &err);
        t_true(p[MIB - 1] == 5 && q[0] == 6, "nth=%u", nth);
        t_true(met == (out != FL_OK || in != FL_OK), "nth=%u", nth);
        arena_fini(&a);
        t_int_eq(t_open_fds(), fds, "nth=%u", nth);
        if (!met)
            break;
    }
}

static void refuses(void **state)
{
    struct arena a;
    struct fl_err err = { 0 };
    void *p = NULL;

    (void)state;
    t_ok(arena_init(&a, "/nowhere/at/all", &err), &err);
    t_refused(arena_alloc(&a, 0, 1, &p, &err), FL_INVALID, &err);
    t_refused(arena_alloc(&a, 3, 1, &p, &err), FL_INVALID, &err);
    t_refused(arena_alloc(&a, 32, 1, &p, &err), FL_INVALID, &err);
    t_refused(arena_alloc(&a, FURLONG_TAG_KV, 0, &p, &err), FL_INVALID, &err);
    t_refused(arena_alloc(&a, FURLONG_TAG_KV, SIZE_MAX - 5, &p, &err), FL_INVALID, &err);
    t_true(arena_alloc(&a, FURLONG_TAG_KV, (size_t)1 << 60, &p, &err) != FL_OK && !p);
    t_has(err.text, "1152921504606846976");
    t_refused(arena_keep(&a, 0, FURLONG_KEEP_IN, NULL, &err), FL_INVALID, &err);
    t_ok(arena_keep(&a, FURLONG_TAG_KV, FURLONG_KEEP_DISK, NULL, &err), &err);
    p = fresh(&a, FURLONG_TAG_KV, 4096, 1);
    t_refused(arena_offload(&a, FURLONG_TAG_KV, NULL, &err), FL_NOT_FOUND, &err);
    t_has(err.text, "/nowhere/at/all");
    t_int_eq(((uint8_t *)p)[5], 1, "nothing half done");
    t_int_eq(arena_out(&a), 0);
    arena_fini(&a);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(gives_zeroed_aligned_memory),
        cmocka_unit_test(dropped_memory_comes_back_to_the_system),
        cmocka_unit_test(untouched_memory_is_not_counted),
        cmocka_unit_test(disk_keeps_the_content),
        cmocka_unit_test(failures_lose_nothing),
        cmocka_unit_test(refuses),
    };

    return t_run("client arena", tests);
}
