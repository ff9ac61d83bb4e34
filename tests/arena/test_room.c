/* memory that is not there: who has it, whether it comes, whether it grows; cases that people met,
 * by their numbers. Another process holds part of the device, and of a large one all but ROOM is
 * taken. */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common/gpu/fake.h"
#include "tests/gpu/mem.h"
#include "tests/gpu/two.h"
#include "tests/arena/small.h"
#include "tests/t.h"

enum { HELD_MIB = 160 };
#define ROOM (256 * MIB)
static const struct gpu_ops *gpu;
static struct gpu_info info;
static struct fl_err err;

/* ---- the trainer, as far as the device knows it ---- */
static int hold(int sock)
{
    uint64_t addr;
    struct gpu *g;
    char any = 'h';

    if (gpu->open(info.uuid, &g, NULL) != FL_OK ||
        gpu->alloc(g, HELD_MIB * MIB, &addr, NULL) != FL_OK)
        return 1;
    two_send(sock, &any, 1, -1);
    while (two_take(sock, &any, 1, NULL) == 1)
        if (any == 'f') {
            gpu->free(g, addr);
            two_send(sock, &any, 1, -1);
        }
    return 0;
}

static pid_t holder(int *sock)
{
    char any;
    pid_t pid = two_start("hold", sock);

    t_int_eq(two_take(*sock, &any, 1, NULL), 1, "the other process holds its memory");
    return pid;
}

static void *give_back(void *arg)
{
    struct arena *theirs = arg;

    nanosleep(&(struct timespec){ .tv_nsec = 150000000 }, NULL); /* later than it has answered */
    t_ok(arena_offload(theirs, FURLONG_TAG_KV, NULL, NULL), NULL);
    return NULL;
}

static void p88_a_resume_that_does_not_fit_says_who_has_the_memory(void **state)
{
    struct arena *a =
        arena_fresh(gpu, info.uuid,
                    &(struct arena_opts){ .chunk_bytes = { CHUNK, CHUNK, CHUNK, CHUNK, CHUNK },
                                          .wait_ms = 50 });
    struct arena_usage u;
    char pid_text[32];
    int sock;

    (void)state;
    pid_t pid = holder(&sock);
    struct t_hog *hog = t_hog_leave(info.uuid, ROOM);
    void *p = arena_some(a, FURLONG_TAG_KV, 120 * MIB, 0);

    t_ok(arena_offload(a, FURLONG_TAG_KV, NULL, &err), &err);
    struct arena *ours =
        arena_fresh(gpu, info.uuid,
                    &small); /* the fake counts a process's memory alone, its table everybody's */
    void *q = arena_some(ours, FURLONG_TAG_DEFAULT, 160 * MIB, 0);

    t_refused(arena_onload(a, FURLONG_TAG_KV, NULL, &err), FL_EXHAUSTED, &err);
    t_has(err.text, "onload of kv_cache");
    t_has(err.text, "has no 120 MiB more (");
    t_has(err.text, t_on_cuda() ? " MiB free)" : "(96.0 MiB free)");
    snprintf(pid_text, sizeof(pid_text), "pid %d has %s", (int)pid,
             t_on_cuda() ? "" : "160 MiB"); /* a real one has a context, too */
    t_has(err.text, pid_text);
    arena_usage(a, false, &u);
    t_int_eq(u.held_bytes, 0, "nothing is mapped by half");
    t_int_eq(arena_out(a), FURLONG_TAG_KV);
    arena_free(ours, q);
    t_ok(arena_onload(a, FURLONG_TAG_KV, NULL, &err), &err);
    arena_usage(a, false, &u);
    t_int_eq(u.held_bytes, 120 * MIB);
    arena_free(a, p);
    arena_destroy(ours);
    arena_destroy(a);
    t_hog_end(hog);
    two_end(pid, sock);
}

static void p89_memory_that_comes_late_is_waited_for(void **state)
{
    struct arena *a = arena_fresh(
                     gpu, info.uuid,
                     &(struct arena_opts){ .chunk_bytes = { CHUNK, CHUNK, CHUNK, CHUNK, CHUNK },
                                           .wait_ms = 5000 }),
                 *theirs = arena_fresh(gpu, info.uuid, &small);
    struct t_hog *hog = t_hog_leave(info.uuid, ROOM);
    pthread_t t;

    (void)state;
    arena_some(a, FURLONG_TAG_KV, 100 * MIB, 0);
    t_ok(arena_offload(a, FURLONG_TAG_KV, NULL, &err), &err);
    arena_some(theirs, FURLONG_TAG_KV, 200 * MIB, 0);
    uint64_t from = fl_clock_boot_ns();

    t_int_eq(pthread_create(&t, NULL, give_back, theirs), 0);
    t_ok(arena_onload(a, FURLONG_TAG_KV, NULL, &err), &err);
    t_true(fl_clock_boot_ns() - from > 100000000, "it waited for the device, not for a word");
    pthread_join(t, NULL);
    arena_destroy(theirs);
    arena_destroy(a);
    a = arena_fresh(gpu, info.uuid,
                    &(struct arena_opts){ .chunk_bytes = { CHUNK, CHUNK, CHUNK, CHUNK, CHUNK },
                                          .wait_ms = 30 });
    theirs = arena_fresh(gpu, info.uuid, &small);
    arena_some(a, FURLONG_TAG_KV, 100 * MIB, 0);
    t_ok(arena_offload(a, FURLONG_TAG_KV, NULL, &err), &err);
    arena_some(theirs, FURLONG_TAG_KV, 200 * MIB, 0);
    t_refused(arena_onload(a, FURLONG_TAG_KV, NULL, &err), FL_EXHAUSTED, &err); /* bounded */
    t_has(err.text, t_on_cuda() ? " MiB free" : "56.0 MiB free");
    arena_destroy(theirs);
    arena_destroy(a);
    t_hog_end(hog);
}

static void p95_growth_from_cycle_to_cycle_is_seen(void **state)
{
    struct arena *a = arena_fresh(gpu, info.uuid, &small),
                 *leaks = arena_fresh(gpu, info.uuid, &small);
    struct arena_moved m;

    (void)state;
    arena_some(a, FURLONG_TAG_KV, 16 * MIB, 0);
    for (unsigned i = 0; i < 50; i++) {
        t_ok(arena_offload(a, FURLONG_TAG_KV, &m, &err), &err);
        t_int_eq(m.grown_bytes, 0, "cycle %u is as the others", i);
        t_ok(arena_onload(a, FURLONG_TAG_KV, NULL, &err), &err);
    }
    for (unsigned i = 1; i <= 3; i++) {
        arena_some(leaks, FURLONG_TAG_DEFAULT, 66 * MIB, 0);
        t_ok(arena_offload(a, FURLONG_TAG_KV, &m, &err), &err);
        t_int_eq(m.grown_bytes, i < 3 ? 0 : 3 * 66 * MIB, "after %u", i);
        t_ok(arena_onload(a, FURLONG_TAG_KV, NULL, &err), &err);
    }
    t_ok(arena_offload(a, FURLONG_TAG_KV, &m, &err), &err);
    t_int_eq(m.grown_bytes, 0, "it has stopped");
    arena_destroy(leaks);
    arena_destroy(a);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(p88_a_resume_that_does_not_fit_says_who_has_the_memory),
        cmocka_unit_test(p89_memory_that_comes_late_is_waited_for),
        cmocka_unit_test(p95_growth_from_cycle_to_cycle_is_seen),
    };
    static struct gpu_info all[GPU_MAX];
    size_t n = GPU_MAX;

    if (argc < 3) /* the second process has it from the first */
        setenv("FURLONG_GPU_FAKE_DIR", t_tmp(), 1);
    if (gpu_pick(&gpu, &err) != FL_OK || gpu->list(all, &n, &err) != FL_OK || n == 0) {
        fprintf(stderr, "test_room: %s\n", err.text);
        return 1;
    }
    info = all[0];
    if (argc == 3 && strcmp(argv[1], "--second") == 0)
        return hold(TWO_FD);
    return t_run("room", tests);
}
