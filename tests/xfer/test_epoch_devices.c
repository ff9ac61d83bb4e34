/* updates between devices: modes, addresses that stay, and what ends a broadcast */
#include <dlfcn.h>
#include <inttypes.h>
#include <stdlib.h>
#include <time.h>
#include "common/proto/methods.h"
#include "tests/gpu/mem.h"
#include "tests/xfer/epoch_rig.h"
#include "transport/link/dev.h"

static void p114_every_mode_brings_the_same(void **state)
{
    static const enum xfer_mode modes[] = { XFER_COPY, XFER_SHARE, XFER_P2P, XFER_AUTO };
    struct rig r;

    (void)state;
    for (size_t m = 0; m < FL_LEN(modes); m++) {
        struct rig_opts o = { .n_sources = 1, .n_engines = 2, .check_equal = true };

        rig_init(&r, &o);
        for (uint64_t v = 1; v <= 3; v++) {
            rig_next(&r, v);
            t_ok(rig_update(&r, modes[m], v), &r.err);
            rig_check(&r);
            rig_check_all_serve(&r, v);
        }
        rig_fini(&r);
    }
}

/* A trainer of two ranks with a shard each. */
static void two_givers(unsigned ranks, void (*bend)(struct rig_proc *p, struct link_place *place))
{
    struct rig_opts o = {
        .n_sources = 2, .n_engines = 1, .ranks = ranks, .sharded = true, .bend = bend
    };
    struct rig r;

    rig_init(&r, &o);
    for (uint64_t v = 1; v <= 2; v++) {
        rig_next(&r, v);
        t_ok(rig_update(&r, XFER_P2P, v), &r.err);
        rig_check(&r);
        rig_check_all_serve(&r, v);
    }
    rig_fini(&r);
}

static void shards_meet(void **state)
{
    (void)state;
    two_givers(2, NULL);
}

/* The memory under a captured graph changes: what the engine reads stays where it was, whether it
 * is the engine's own slots or the trainer's that take turns there. */
static void addresses_stay(void **state)
{
    static const enum xfer_mode modes[] = { XFER_COPY,  XFER_COPY,  XFER_COPY, XFER_SHARE,
                                            XFER_SHARE, XFER_SHARE, XFER_COPY, XFER_SHARE };
    struct rig_opts o = { .n_sources = 1, .n_engines = 2, .fixed = true };
    const void *at[2] = { NULL, NULL };
    struct rig r;

    (void)state;
    rig_init(&r, &o);
    for (uint64_t v = 1; v <= FL_LEN(modes); v++) {
        rig_next(&r, v);
        t_ok(rig_update(&r, modes[v - 1], v), &r.err);
        rig_check(&r);
        rig_check_all_serve(&r, v);
        for (unsigned e = 0; e < 2; e++) {
            const void *reads = rig_engine(&r, e, 0)->reads;

            t_true(v == 1 || reads == at[e], "engine %u reads version %u elsewhere", e,
                   (unsigned)v);
            at[e] = reads;
        }
    }
    rig_fini(&r);
}

/* A device without room for a second slot: the old version serves, and the way out is said. */
static void p76_no_room_keeps_the_old_version(void **state)
{
    struct rig_opts o = { .n_sources = 1, .n_engines = 1 };
    struct rig r;

    (void)state;
    rig_serving(&r, &o, XFER_COPY);
    rig_next(&r, 2);
    t_ok(rig_update(&r, XFER_COPY, 2), &r.err); /* what is made at the first use is there */
    rig_next(&r, 3);
    struct t_hog *h = t_hog_leave(rig_uuid(rig_engine(&r, 0, 0)), 0);

    t_true(rig_update(&r, XFER_COPY, 3) != FL_OK);
    printf("# no room: %s\n", r.rep.first_left_behind.text);
    t_has(r.rep.first_left_behind.text, "with one slot");
    rig_check_all_serve(&r, 2);
    t_hog_end(h);
    t_ok(rig_update(&r, XFER_COPY, 3), &r.err);
    rig_check_all_serve(&r, 3);
    rig_fini(&r);
}

/* Slots of so many chunks that their keys take several messages: the last tensor lies behind 16 GiB
 * of addresses that nobody touches. */
static void far_apart(struct rig_proc *p, struct link_place *place)
{
    const uint64_t far = (uint64_t)16 << 30;

    if (place || !p->source)
        return;
    p->pieces[p->m.n_pieces - 1].off += far;
    p->mem_bytes += far;
}

/* Two givers' keys come in parts, in turns, over the one line that an engine pulls by. */
static void large_slots_of_two_givers(void **state)
{
    (void)state;
    two_givers(1, far_apart);
}

/* An epoch that ends between two parts of a key leaves nothing that a later one takes for mapped.
 */
static void half_a_key_is_no_mapping(void **state)
{
    struct rig_opts o = { .n_sources = 1, .n_engines = 1, .bend = far_apart };
    struct rig_proc *source;
    struct rig r;

    (void)state;
    rig_init(&r, &o);
    source = rig_source(&r, 0);
    rig_next(&r, 1);
    source->trap_method = FL_XFER_KEY;
    source->trap_nth = 2;
    t_true(rig_update(&r, XFER_COPY, 1) != FL_OK);
    t_true(source->stopped_at, "it was asked for the second part");
    rig_thaw(source);
    t_ok(rig_update(&r, XFER_COPY, 1), &r.err);
    rig_check(&r);
    rig_check_all_serve(&r, 1);
    rig_fini(&r);
}

static uint64_t memory_left(void)
{
    struct gpu_info all[GPU_MAX];
    size_t n = FL_LEN(all);
    uint64_t sum = 0;
    const struct gpu_ops *gpu;

    t_ok(gpu_pick(&gpu, NULL), NULL);
    t_ok(gpu->list(all, &n, NULL), NULL);
    for (size_t i = 0; i < n; i++) {
        uint64_t left, total;
        struct gpu *g;

        t_ok(gpu->open(all[i].uuid, &g, NULL), NULL);
        t_ok(gpu->memory(g, &left, &total, NULL), NULL);
        gpu->close(g);
        sum += left;
    }
    return sum;
}

static void p74_memory_is_flat_over_100_updates(void **state)
{
    enum { ONE_BUCKET = 2 << 20 }; /* as a device has it: of its chunks */
    struct rig_opts o = { .n_sources = 1, .n_engines = 2 };
    uint64_t left = 0, at_end;
    struct rig r;

    (void)state;
    rig_init(&r, &o);
    for (uint64_t v = 1; v <= 50; v++)
        for (unsigned again = 0; again < 2; again++) {
            if (again)
                t_ok(rig_begin(&r, v, 60000), &r.err);
            if (again)
                rig_publish(&r, v);
            else
                rig_next(&r, v);
            t_ok(rig_update(&r, XFER_COPY, v), &r.err);
            if (v == 2)
                left = memory_left();
        }
    at_end = memory_left();
    t_true(at_end + (t_on_cuda() ? ONE_BUCKET : 0) >= left,
           "%" PRIu64 " bytes of all devices, then %" PRIu64, left, at_end);
    rig_fini(&r);
}

/* ---- by NCCL ---- */

/* Of the library that stands in for NCCL; NULL with the real one, whose ranks cannot be made silent
 * here. */
static void (*silence)(int rank);
static int (*casts)(void);

static void needs_ranks(const char *devices, bool silent)
{
    if (strcmp(rig_devices(), "same") == 0 ||
        (strcmp(devices, "three") == 0 && strcmp(rig_devices(), "two") == 0))
        t_skip("NCCL has no two ranks on a device: %s are wanted", devices);
    if (!casts && !t_on_cuda())
        t_skip("nothing stands in for NCCL on a fake device: FURLONG_NCCL");
    if (silent && !silence)
        t_skip("a rank that falls silent is the stand-in's; bench_plane --faults kills and stops "
               "engines on real devices");
}

enum way { BY_NCCL, BY_PULL };
/* The next version by a broadcast, and which way it went: as the plane says, and as the library has
 * seen it. */
static enum way broadcast(struct rig *r, uint64_t v)
{
    int before = casts ? casts() : 0;

    rig_next(r, v);
    t_ok(rig_update(r, XFER_BROADCAST, v), &r->err);
    t_int_eq(r->rep.mode, XFER_BROADCAST);
    rig_check_all_serve(r, v);
    t_true(r->rep.other_bytes == 0 || r->rep.other_bytes == r->rep.bytes, "one way or the other");
    t_true(!casts || (casts() > before) == (r->rep.other_bytes == 0),
           "%d casts, %" PRIu64 " bytes elsewhere", casts ? casts() - before : 0,
           r->rep.other_bytes);
    return r->rep.other_bytes ? BY_PULL : BY_NCCL;
}

/* Until the communicator is there. Returns the version. */
static uint64_t broadcast_until_nccl(struct rig *r, uint64_t v)
{
    while (broadcast(r, v) != BY_NCCL) {
        t_true(++v < FL_LEN(r->model), "no communicator");
        nanosleep(&(struct timespec){ .tv_nsec = 5000000 }, NULL);
    }
    return v;
}

/* Nobody waits for a communicator: versions are pulled until it is there. */
static void broadcast_goes_by_nccl(void **state)
{
    struct rig_opts o = { .n_sources = 1, .n_engines = 1, .real_clock = true };
    struct rig r;

    (void)state;
    needs_ranks("two", false);
    rig_init(&r, &o);
    t_int_eq(broadcast(&r, 1), BY_PULL, "it has only just been asked for");
    uint64_t v = broadcast_until_nccl(&r, 2);

    for (unsigned i = 0; i < 4; i++)
        t_int_eq(broadcast(&r, ++v), BY_NCCL, "once made, it stays");
    rig_fini(&r);
}

/* One of three falls silent in the middle of a broadcast: the other pulls what it lacks, in the
 * same epoch. */
static void p82_a_broken_broadcast_is_pulled(void **state)
{
    struct rig_opts o = { .n_sources = 1, .n_engines = 2, .real_clock = true, .check_equal = true };
    struct rig r;

    (void)state;
    needs_ranks("three", true);
    rig_init(&r, &o);
    uint64_t v = broadcast_until_nccl(&r, 1) + 1;
    struct xfer_request q = { .target = { .number = v },
                              .mode = XFER_BROADCAST,
                              .party = XFER_ALL_PARTIES,
                              .least_engines = 1 };
    uint32_t seq = r.rep.epoch.seq;

    rig_next(&r, v);
    silence(2); /* rollout 1 */
    q.due_ns = fl_loop_now_ns(r.loop) + 30000000000ull;
    rig_start(&r, &q);
    rig_until(&r, rig_state(rig_engine(&r, 1, 0)) == RX_STAGING);
    rig_kill(rig_engine(&r, 1, 0), true);
    rig_until(&r, !r.running);
    t_ok(r.st, &r.err);
    t_int_eq(r.rep.n_committed, 1);
    t_int_eq(r.rep.n_left_behind, 1);
    t_true(r.rep.other_bytes > 0 && r.rep.other_bytes <= r.rep.bytes);
    t_int_eq(r.rep.epoch.seq, seq + 1, "the same epoch");
    rig_check_all_serve(&r, v);
    silence(-1);
    (void)rig_restart(rig_engine(&r, 1, 0));
    t_int_eq(broadcast(&r, ++v), BY_PULL, "the new communicator is being made");
    v = broadcast_until_nccl(&r, v + 1);
    t_int_eq(broadcast(&r, v + 1), BY_NCCL, "and used again");
    rig_fini(&r);
}

/* Who is to be in the new communicator and does not come: nobody waits for it, update after update.
 */
static void a_communicator_that_is_never_made_delays_nobody(void **state)
{
    /* less than who is missing is waited for, once, under sanitizers too */
    const uint64_t join_ns = 1000000000ull * (T_SLOWDOWN > 1 ? 4 : 1);
    struct rig_opts o = { .n_sources = 1, .n_engines = 2, .real_clock = true };
    struct rig r;

    (void)state;
    needs_ranks("three", true);
    rig_init(&r, &o);
    silence(1);
    uint64_t began_ns = fl_clock_boot_ns();

    for (uint64_t v = 1; v <= 8; v++)
        t_int_eq(broadcast(&r, v), BY_PULL);
    t_true(fl_clock_boot_ns() - began_ns < join_ns, "8 updates");
    silence(-1);
    t_int_eq(broadcast(&r, broadcast_until_nccl(&r, 9) + 1), BY_NCCL);
    rig_fini(&r);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(p114_every_mode_brings_the_same),
        cmocka_unit_test(shards_meet),
        cmocka_unit_test(addresses_stay),
        cmocka_unit_test(p76_no_room_keeps_the_old_version),
        cmocka_unit_test(p74_memory_is_flat_over_100_updates),
        cmocka_unit_test(large_slots_of_two_givers),
        cmocka_unit_test(half_a_key_is_no_mapping),
        cmocka_unit_test(broadcast_goes_by_nccl),
        cmocka_unit_test(p82_a_broken_broadcast_is_pulled),
        cmocka_unit_test(a_communicator_that_is_never_made_delays_nobody),
    };
    const char *path = getenv("FURLONG_NCCL");
    void *fake = path ? dlopen(path, RTLD_NOW) : NULL;

    if (!rig_devices() || setenv("FURLONG_GPU_FAKE_BYTES", "128g", 0) != 0 || (path && !fake)) {
        fprintf(stderr, "test_epoch_devices: wants RIG_DEVICES=same, two or three; FURLONG_NCCL, "
                        "where it is said, is a library that stands in for NCCL\n");
        return 1;
    }
    if (fake) {
        *(void **)&silence = dlsym(fake, "fake_nccl_silence");
        *(void **)&casts = dlsym(fake, "fake_nccl_casts");
    }
    return t_run("epoch on devices", tests);
}
