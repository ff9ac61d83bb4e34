/* what people met with weights on devices, real ones or the fake's; some of it between two
 * processes */
#include <stdlib.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "kernels/digest.h"
#include "tests/gpu/mem.h"
#include "tests/gpu/two.h"
#include "tests/link/wait.h"
#include "tests/t.h"
#include "transport/link/dev_priv.h"
#include "transport/link/link_priv.h"

enum { DEVICES = 3, MIB = 1 << 20 };
static struct gpu_info devices[GPU_MAX];
static size_t n_devices = GPU_MAX;
static struct fl_err err;
static char told[4096]; /* by another process */

static void needs(unsigned n)
{
    if (n_devices < n)
        t_skip("%u devices are wanted, this machine has %zu", n, n_devices);
}

static struct link_place place_of(unsigned i, bool fd, bool handle)
{
    struct gpu_found found = {
        .info = devices[i], .opens = true, .fd_shares = fd, .handle_shares = handle
    };
    struct link_place p;

    t_ok(link_place_here(NULL, &p, &err), &err);
    t_ok(link_place_device(&p, devices[i].uuid, &found, 1, &err), &err);
    return p;
}

static struct link *opened(struct fl_loop *l, const struct link_ops *ops,
                           const struct link_place *p)
{
    struct link_team team = { .members = p, .n = 1 };
    struct wait ready = wait_for();
    struct link *k;

    t_ok(ops->open(l, &team, &k, &ready.op, &err), &err);
    t_until(l, ready.times == 1, 5000);
    t_ok(ready.op.err.status, &ready.op.err);
    return k;
}

static void pull_all(struct fl_loop *l, const struct link_ops *ops, struct link *k,
                     const struct link_mem *from, const struct link_mem *to, uint64_t bytes)
{
    struct link_seg all = { .run_bytes = bytes, .rows = 1 };
    struct wait w = wait_for();
    uint64_t got[1][2] = { 0 }, want[2] = { 0 };
    void *came = malloc(bytes);

    t_ok(ops->pull(k, from, to, &all, 1, got, &w.op, &err), &err);
    t_until(l, w.times == 1, 10000);
    t_ok(w.op.err.status, &w.op.err);
    t_mem_read(came, to->addr, bytes);
    kernel_digest_add(want, came, bytes, 0);
    free(came);
    t_mem_eq(got[0], want, sizeof(want));
}

/* Memory mapped from chunks that somebody else made: no handle, no descriptor. It is said, and goes
 * through the host. */
static void p70_memory_that_cannot_be_exported(void **state)
{
    struct fl_loop *l;
    struct link_dev *d;
    struct gpu_chunk chunk;
    struct link_mem foreign, to, view = { 0 };
    struct link_key key = { 0 };
    uint64_t addr;

    (void)state;
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    struct link_place p = place_of(0, true, true);
    struct link *ipc = opened(l, &link_cuda_ipc, &p), *a = opened(l, &link_tcp, &p),
                *b = opened(l, &link_tcp, &p);

    t_ok(link_dev_get(devices[0].uuid, &d, &err), &err);
    t_ok(d->gpu->chunk_create(d->g, 2 * MIB, &chunk, &err), &err);
    t_ok(d->gpu->reserve(d->g, 2 * MIB, &addr, &err), &err);
    t_ok(d->gpu->map(d->g, addr, &chunk, true, &err), &err);
    t_ok(link_dev_foreign(devices[0].uuid, addr, 2 * MIB, &foreign, &err), &err);
    t_mem_fill(foreign.addr, 0x3c, 2 * MIB);
    t_refused(link_cuda_ipc.share(ipc, &foreign, &key, &err), FL_UNSUPPORTED, &err);
    t_has(err.text, "neither chunks nor a handle");
    t_has(err.text, "through the host");
    t_ok(link_dev_alloc(devices[0].uuid, 2 * MIB, &to, &err), &err);
    t_ok(link_tcp.share(a, &foreign, &key, &err), &err);
    t_ok(link_tcp.map(b, &key, false, &view, &err), &err);
    pull_all(l, &link_tcp, b, &view, &to, 2 * MIB);
    t_true(t_mem_same(to.addr, foreign.addr, 2 * MIB));
    t_int_eq(t_mem_byte((char *)to.addr + MIB), 0x3c);
    link_tcp.unmap(b, &view);
    link_tcp.close(a);
    link_tcp.close(b);
    link_cuda_ipc.close(ipc);
    link_dev_free(&foreign);
    link_dev_free(&to);
    t_ok(d->gpu->unmap(d->g, addr, 2 * MIB, &err), &err);
    d->gpu->unreserve(d->g, addr, 2 * MIB);
    d->gpu->chunk_release(d->g, &chunk);
    fl_loop_destroy(l);
}

/* ---- another process whose memory is a plain allocation ---- */
static unsigned device_of(const char *uuid)
{
    for (unsigned i = 0; i < n_devices; i++)
        if (strcmp(devices[i].uuid, uuid) == 0)
            return i;
    return 0;
}

/* The same for a device whichever number it has: its place among the names. */
static uint8_t mark_of(const char *uuid)
{
    uint8_t mark = 0x50;

    for (size_t i = 0; i < n_devices; i++)
        mark = (uint8_t)(mark + (strcmp(devices[i].uuid, uuid) < 0));
    return mark;
}

/* Its memory is on that device, whichever number it has there. */
static int exporter(const char *uuid, int sock)
{
    unsigned which = device_of(uuid);
    struct link_place p = place_of(which, false, true); /* descriptors do not get through here */
    struct link_mem mem;
    struct link_key key = { 0 };
    struct link_dev *d;
    struct fl_loop *l;
    uint64_t addr;
    char any;

    t_ok(fl_loop_create(NULL, &l, &err), &err);
    struct link *k = opened(l, &link_cuda_ipc, &p);

    t_ok(link_dev_get(uuid, &d, &err), &err);
    t_ok(d->gpu->alloc(d->g, 2 * MIB, &addr, &err), &err);
    t_ok(link_dev_foreign(uuid, addr, 2 * MIB, &mem, &err), &err);
    t_mem_fill(mem.addr, mark_of(uuid), 2 * MIB);
    t_ok(link_cuda_ipc.share(k, &mem, &key, &err), &err);
    two_send(sock, &key, sizeof(key), -1);
    (void)two_take(sock, &any, 1, NULL); /* until the test is over */
    _exit(0);
}

/* What is on stderr while memory is shared for three updates, in a process that has shared none
 * before. */
static int tells_steps_down(void)
{
    struct link_place fd = place_of(0, true, true), handle = place_of(0, false, true);
    struct link_mem plain, chunks;
    struct link_dev *d;
    struct fl_loop *l;
    uint64_t addr;
    FILE *f = tmpfile();

    t_ok(fl_log_level_set("info", &err), &err);
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    struct link *k[2] = { opened(l, &link_cuda_ipc, &fd), opened(l, &link_cuda_ipc, &handle) };

    t_ok(link_dev_get(devices[0].uuid, &d, &err), &err);
    t_ok(d->gpu->alloc(d->g, 2 * MIB, &addr, &err), &err);
    t_ok(link_dev_foreign(devices[0].uuid, addr, 2 * MIB, &plain, &err), &err);
    t_ok(link_dev_alloc(devices[0].uuid, 2 * MIB, &chunks, &err), &err);
    t_true(f && dup2(fileno(f), STDERR_FILENO) >= 0);
    for (unsigned update = 0; update < 3; update++)
        for (unsigned i = 0; i < 4; i++) {
            struct link_key key = { 0 };

            (void)link_cuda_ipc.share(k[i / 2], i % 2 ? &plain : &chunks, &key, NULL);
        }
    rewind(f);
    size_t n = fread(told, 1, sizeof(told) - 1, f);

    two_send(TWO_FD, told, n + 1, -1);
    _exit(0);
}

static unsigned times(const char *text, const char *part)
{
    unsigned n = 0;

    for (const char *at = text; (at = strstr(at, part)); at++)
        n++;
    return n;
}

/* By descriptor unless that cannot be: each reason for a handle once, whatever the number of
 * updates. */
static void a_step_down_is_said_once_with_its_reason(void **state)
{
    int sock;

    (void)state;
    pid_t pid = two_start("steps-down", &sock);

    t_true(two_take(sock, told, sizeof(told), NULL) > 0);
    t_int_eq(two_end(pid, sock), 0);
    t_int_eq(times(told, "shared by IPC handle, not by descriptor"), 2, "%s", told);
    t_int_eq(times(told, "the memory is an allocation without chunks"), 1, "%s", told);
    t_int_eq(times(told, "descriptors of chunks do not reach other processes here"), 1, "%s", told);
}

static pid_t exporter_start(const char *uuid, int *sock, struct link_key *key)
{
    pid_t pid = two_start(uuid, sock);

    t_int_eq(two_take(*sock, key, sizeof(*key), NULL), sizeof(*key),
             "the other process shares its memory");
    return pid;
}

static void p72_one_handle_is_opened_once(void **state)
{
    struct link_place p = place_of(0, true, true);
    struct link_mem first = { 0 }, again = { 0 }, to;
    struct link_key key = { 0 };
    unsigned before = dev_handles_opened();
    struct fl_loop *l;
    int sock;

    (void)state;
    if (devices[0].integrated)
        t_skip("an integrated device has no IPC handles");
    pid_t other = exporter_start(devices[0].uuid, &sock, &key);

    t_ok(fl_loop_create(NULL, &l, &err), &err);
    struct link *k = opened(l, &link_cuda_ipc, &p);

    t_ok(link_dev_alloc(devices[0].uuid, 2 * MIB, &to, &err), &err);
    t_ok(link_cuda_ipc.map(k, &key, false, &first, &err), &err);
    for (unsigned i = 0; i < 200; i++) { /* updates */
        t_ok(link_cuda_ipc.map(k, &key, false, &again, &err), &err);
        t_true(again.addr == first.addr, "mapped once more");
        pull_all(l, &link_cuda_ipc, k, &again, &to, 2 * MIB);
        link_cuda_ipc.unmap(k, &again);
    }
    t_int_eq(dev_handles_opened() - before, 1, "opened once, whatever comes");
    t_int_eq(t_mem_byte((char *)to.addr + MIB), mark_of(devices[0].uuid));
    link_cuda_ipc.unmap(k, &first);
    link_dev_free(&to);
    link_cuda_ipc.close(k);
    fl_loop_destroy(l);
    t_int_eq(two_end(other, sock), 0);
}

/* The probe has tried: what does not work between processes here is never tried by an update. */
static void p73_what_the_probe_could_not_is_not_used(void **state)
{
    struct link_place good = place_of(0, true, true), no_fd = place_of(0, false, true),
                      none = place_of(0, false, false);

    (void)state;
    t_true(link_cuda_ipc.reaches(&good, &good, NULL));
    t_true(link_cuda_ipc.reaches(&no_fd, &good, NULL), "by handle");
    good.ipc_ns++;
    t_true(!link_cuda_ipc.reaches(&no_fd, &good, &err), "handles stay in an ipc namespace");
    t_has(err.text, "--ipc=host");
    good.ipc_ns--;
    t_true(!link_cuda_ipc.reaches(&none, &good, &err));
    t_int_eq(err.status, FL_UNSUPPORTED);
    t_has(err.text, "neither by descriptor nor by handle");
    t_true(link_tcp.reaches(&none, &good, NULL), "the host's way is left");
}

static void p75_many_small_tensors_cost_one_launch(void **state)
{
    enum { N = 20000, EACH = 96 };
    static struct link_seg segs[N];
    static uint64_t digests[N][2];
    static uint64_t sent[N * EACH / 8], came[N * EACH / 8];
    struct link_place p = place_of(0, true, true);
    struct link_mem from, to, view = { 0 };
    struct link_key key = { 0 };
    struct wait w = wait_for();
    unsigned before = dev_handles_opened();
    struct fl_loop *l;
    uint64_t seed = 9;

    (void)state;
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    struct link *k = opened(l, &link_cuda_ipc, &p);

    t_ok(link_dev_alloc(devices[0].uuid, N * EACH, &from, &err), &err);
    t_ok(link_dev_alloc(devices[0].uuid, N * EACH, &to, &err), &err);
    for (uint64_t i = 0; i < N * EACH / 8; i++)
        sent[i] = t_random(&seed);
    t_mem_write(from.addr, sent, sizeof(sent));
    for (uint64_t i = 0; i < N; i++)
        segs[i] = (struct link_seg){
            .from_off = i * EACH, .to_off = (N - 1 - i) * EACH, .run_bytes = EACH, .rows = 1
        };
    t_ok(link_cuda_ipc.share(k, &from, &key, &err), &err);
    t_ok(link_cuda_ipc.map(k, &key, false, &view, &err), &err);
    if (!t_on_cuda()) /* of the fake: a second one would fail */
        t_ok(fl_fault_set("gpu.launch:2=fail,gpu.copy:9=fail", &err), &err);
    t_ok(link_cuda_ipc.pull(k, &view, &to, segs, N, digests, &w.op, &err), &err);
    t_until(l, w.times == 1, 10000);
    t_ok(fl_fault_set(NULL, &err), &err);
    t_ok(w.op.err.status, &w.op.err);
    t_mem_read(came, to.addr, sizeof(came));
    for (uint64_t i = 0; i < N; i++) {
        uint64_t want[2] = { 0 };

        kernel_digest_add(want, (char *)came + segs[i].to_off, EACH, 0);
        t_mem_eq(digests[i], want, sizeof(want), "tensor %u", (unsigned)i);
        t_mem_eq((char *)came + segs[i].to_off, (char *)sent + segs[i].from_off, EACH);
    }
    t_int_eq(dev_handles_opened(), before, "no handle at all: the slot was mapped");
    link_cuda_ipc.unmap(k, &view);
    link_cuda_ipc.close(k);
    link_dev_free(&from);
    link_dev_free(&to);
    fl_loop_destroy(l);
}

static void p78_devices_are_named_never_counted(void **state)
{
    struct gpu_found found[2] = { { .info = devices[1], .opens = true, .fd_shares = true },
                                  { .info = devices[0], .opens = true, .fd_shares = true } };
    struct link_place p = { 0 };

    (void)state; /* this process's view is 1,0: what counts is the name */
    t_ok(link_place_device(&p, devices[0].uuid, found, 2, &err), &err);
    t_str_eq(p.gpu_uuid, devices[0].uuid);
    t_refused(link_place_device(&p, devices[2].uuid, found, 2, &err), FL_NOT_FOUND, &err);
    t_has(err.text, devices[2].uuid);
    t_has(err.text, devices[0].uuid);
    t_has(err.text, devices[1].uuid);
    t_str_eq(p.gpu_uuid, devices[0].uuid, "as it was");
}

/* The other process sees the devices the other way round: each is read from the one that was named.
 */
static void p78_each_reads_from_the_device_that_it_names(void **state)
{
    struct fl_loop *l;

    (void)state;
    needs(2);
    if (devices[0].integrated)
        t_skip("an integrated device has no IPC handles");
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    t_int_eq(setenv("CUDA_VISIBLE_DEVICES", "1,0", 1), 0);
    for (unsigned i = 0; i < 2; i++) {
        struct link_place p = place_of(i, true, true);
        struct link_mem view = { 0 }, to;
        struct link_key key = { 0 };
        int sock;
        pid_t other = exporter_start(devices[i].uuid, &sock, &key);
        struct link *k = opened(l, &link_cuda_ipc, &p);

        t_ok(link_dev_alloc(devices[i].uuid, 2 * MIB, &to, &err), &err);
        t_ok(link_cuda_ipc.map(k, &key, false, &view, &err), &err);
        pull_all(l, &link_cuda_ipc, k, &view, &to, 2 * MIB);
        t_int_eq(t_mem_byte((char *)to.addr + MIB), mark_of(devices[i].uuid), "device %u", i);
        link_cuda_ipc.unmap(k, &view);
        link_cuda_ipc.close(k);
        link_dev_free(&to);
        t_int_eq(two_end(other, sock), 0);
    }
    t_int_eq(unsetenv("CUDA_VISIBLE_DEVICES"), 0);
    fl_loop_destroy(l);
}

static void p80_a_hidden_device_is_no_error(void **state)
{
    struct link_place a = place_of(0, true, true), b = place_of(1, true, true);

    (void)state; /* each process sees its own alone */
    t_true(!link_cuda_ipc.reaches(&a, &b, &err));
    t_int_eq(err.status, FL_UNSUPPORTED);
    t_has(err.text, "hidden");
    t_has(err.text, devices[0].uuid);
    t_true(link_nccl.reaches(&a, &b, &err), "%s", err.text);
    t_true(link_tcp.reaches(&a, &b, NULL));
    b.pid_ns++;
    t_true(!link_cuda_ipc.reaches(&a, &b, &err));
    t_has(err.text, "pid namespaces");
}

static uint64_t free_bytes(unsigned i)
{
    struct link_dev *d;
    uint64_t left, all;

    t_ok(link_dev_get(devices[i].uuid, &d, &err), &err);
    t_ok(d->gpu->memory(d->g, &left, &all, &err), &err);
    return left;
}

struct crossing {
    struct link *k[2][3];
    struct wait ready[2][3];
};

/* Two teams of three, a device each; each rank opens them in an order of its own. */
static void p112_groups_may_be_joined_in_any_order(void **state)
{
    unsigned n = n_devices < 3 ? (unsigned)n_devices : 3;
    struct link_place p[3];
    uint64_t seed = 11;
    struct fl_loop *l;

    (void)state;
    needs(2);
    for (unsigned i = 0; i < n; i++)
        p[i] = place_of(i, true, true);
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    for (unsigned run = 0; run < 8; run++) {
        struct link_team team[2] = { { .members = p, .n = n }, { .members = p, .n = n } };
        static struct crossing c;

        c = (struct crossing){ 0 };
        for (unsigned g = 0; g < 2; g++)
            t_ok(link_nccl.ticket(team[g].ticket, &err), &err);
        for (unsigned rank = 0; rank < n; rank++)
            for (unsigned i = 0, flip = (unsigned)(t_random(&seed) >> 60) & 1; i < 2; i++) {
                unsigned g = i ^ flip;

                team[g].self = rank;
                c.ready[g][rank] = wait_for();
                t_ok(link_nccl.open(l, &team[g], &c.k[g][rank], &c.ready[g][rank].op, &err), &err);
                fl_loop_turn(l, (int)(t_random(&seed) >> 62));
            }
        for (unsigned g = 0; g < 2; g++)
            for (unsigned rank = 0; rank < n; rank++) {
                t_until(l, c.ready[g][rank].times == 1, 10000);
                t_ok(c.ready[g][rank].op.err.status, &c.ready[g][rank].op.err);
            }
        for (unsigned g = 0; g < 2; g++)
            for (unsigned rank = 0; rank < n; rank++)
                link_nccl.close(c.k[g][rank]);
    }
    fl_loop_destroy(l);
}

/* Between two devices; both ranks are here. */
struct pair {
    struct link_place p[2];
    struct link *k[2];
};

static uint64_t pair_open(struct fl_loop *l, struct pair *x)
{
    struct link_team team = { .members = x->p, .n = 2 };
    struct wait ready[2] = { wait_for(), wait_for() };
    uint64_t from = fl_clock_boot_ns();

    t_ok(link_nccl.ticket(team.ticket, &err), &err);
    for (unsigned i = 0; i < 2; i++) {
        team.self = i;
        t_ok(link_nccl.open(l, &team, &x->k[i], &ready[i].op, &err), &err);
    }
    t_until(l, ready[0].times && ready[1].times, 10000);
    t_ok(ready[0].op.err.status, &ready[0].op.err);
    t_ok(ready[1].op.err.status, &ready[1].op.err);
    return fl_clock_boot_ns() - from;
}

/* Until both are quiet: NCCL has ended them by then. */
static void pair_close(struct fl_loop *l, struct pair *x)
{
    struct wait quiet[2] = { wait_for(), wait_for() };

    for (unsigned i = 0; i < 2; i++)
        link_nccl.abort(x->k[i], &quiet[i].op);
    t_until(l, quiet[0].times && quiet[1].times, 10000);
    for (unsigned i = 0; i < 2; i++)
        link_nccl.close(x->k[i]);
}

static int mib(uint64_t before, uint64_t after)
{
    return (int)((int64_t)(before - after) / MIB);
}

/* A driver gives memory back in its own time: what is free when it has come to rest. */
static uint64_t settled_bytes(struct fl_loop *l)
{
    uint64_t rest_ns = t_on_cuda() ? 300000000 : 0, since = fl_clock_boot_ns(),
             left = free_bytes(0);

    while (fl_clock_boot_ns() - since < rest_ns) {
        fl_loop_turn(l, 20);
        since = free_bytes(0) == left ? since : fl_clock_boot_ns();
        left = free_bytes(0);
    }
    return left;
}

/* What it needs for casts goes when it is idle, the rest when it is closed; and another one is soon
 * there. NCCL's code comes with the first one and stays: it is the process's. */
static void p94_an_idle_communicator_holds_little(void **state)
{
    enum { LITTLE_MIB = 50, STAGE_MIB = 64 };
    struct wait w[2];
    struct link_mem mem[2];
    /* apart in the source: through a stage */
    struct link_seg rows = {
        .run_bytes = 4096, .rows = 64, .from_step = 8192, .to_step = 4096, .byte_step = 4096
    };
    struct fl_loop *l;

    (void)state;
    needs(2);
    struct pair x = { .p = { place_of(0, true, true), place_of(1, true, true) } };

    t_ok(fl_loop_create(NULL, &l, &err), &err);
    for (unsigned i = 0; i < 2; i++)
        t_ok(link_dev_alloc(devices[i].uuid, MIB, &mem[i], &err), &err);
    uint64_t without = settled_bytes(l);

    (void)pair_open(l, &x);
    uint64_t first = settled_bytes(l);

    pair_close(l, &x);
    uint64_t before = settled_bytes(l), took_ns = pair_open(l, &x), open = settled_bytes(l);

    for (unsigned i = 0; i < 2; i++) {
        w[i] = wait_for();
        t_ok(link_nccl.cast_segs(x.k[i], 0, &mem[i], &rows, 1, NULL, &w[i].op, &err), &err);
    }
    t_until(l, w[0].times && w[1].times, 10000);
    int casts_mib = mib(open, free_bytes(0));

    t_until(l, mib(open, free_bytes(0)) < LITTLE_MIB, 6000);
    uint64_t idle = free_bytes(0);

    pair_close(l, &x);
    uint64_t closed = settled_bytes(l);

    printf("# the first communicator takes %d MiB, %d of them stay; the next one %d, with casts %d "
           "more, idle "
           "%d, closed %d; it is there in %.0f ms\n",
           mib(without, first), mib(without, before), mib(before, open), casts_mib,
           mib(before, idle), mib(before, closed), (double)took_ns / 1e6);
    t_true(casts_mib >= STAGE_MIB, "a stage, while casts are under way");
    t_true(mib(before, closed) < LITTLE_MIB, "%d MiB of one that is closed", mib(before, closed));
    t_true(took_ns < 2000000000ull * T_SLOWDOWN, "%.1f s to be there again", (double)took_ns / 1e9);
    for (unsigned i = 0; i < 2; i++)
        link_dev_free(&mem[i]);
    fl_loop_destroy(l);
}

/* More chunks than descriptors in a message: several keys, and one refused in the middle leaves
 * nothing. */
static void many_chunks_take_several_keys(void **state)
{
    enum { CHUNKS = 150, EACH = 2 * MIB };
    struct link_place p = place_of(0, true, true);
    struct gpu_chunk chunks[CHUNKS];
    int fds[CHUNKS];
    struct link_pages pages = { .magic = LINK_PAGES, .n_chunks = CHUNKS, .fds = fds };
    struct link_mem mem = { .bytes = (uint64_t)CHUNKS * EACH - 77,
                            .chunk_bytes = EACH,
                            .on_device = true,
                            .impl = &pages };
    struct link_mem view = { 0 };
    struct link_key keys[3] = { 0 };
    struct link_dev *d;
    struct fl_loop *l;
    uint64_t addr;

    (void)state;
    fl_copy(pages.uuid, sizeof(pages.uuid), devices[0].uuid);
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    struct link *k = opened(l, &link_cuda_ipc, &p);

    t_ok(link_dev_get(devices[0].uuid, &d, &err), &err);
    t_ok(d->gpu->reserve(d->g, (uint64_t)CHUNKS * EACH, &addr, &err), &err);
    for (unsigned i = 0; i < CHUNKS; i++) {
        t_ok(d->gpu->chunk_create(d->g, EACH, &chunks[i], &err), &err);
        t_ok(d->gpu->map(d->g, addr + (uint64_t)i * EACH, &chunks[i], true, &err), &err);
        t_ok(d->gpu->chunk_export(d->g, &chunks[i], &fds[i], &err), &err);
        t_mem_write((void *)(uintptr_t)(addr + (uint64_t)i * EACH), &(uint64_t){ i + 1 },
                    sizeof(uint64_t));
    }
    mem.addr = (void *)(uintptr_t)addr;
    for (unsigned i = 0; i < 3; i++) {
        keys[i].part = i;
        t_ok(link_cuda_ipc.share(k, &mem, &keys[i], &err), &err);
        t_int_eq(keys[i].parts, 3);
        t_int_eq(keys[i].n_fds, i < 2 ? 64 : 22);
    }
    t_ok(link_cuda_ipc.map(k, &keys[0], false, &view, &err), &err);
    t_refused(link_cuda_ipc.map(k, &keys[2], false, &view, &err), FL_CORRUPT, &err);
    t_true(view.impl == NULL, "nothing half done is left");
    for (unsigned i = 0; i < 3; i++)
        t_ok(link_cuda_ipc.map(k, &keys[i], false, &view, &err), &err);
    t_int_eq(view.bytes, mem.bytes);
    for (unsigned i = 0; i < CHUNKS; i++)
        t_true(t_mem_same((char *)view.addr + (uint64_t)i * EACH, &(uint64_t){ i + 1 },
                          sizeof(uint64_t)),
               "chunk %u", i);
    link_cuda_ipc.unmap(k, &view);
    link_cuda_ipc.close(k);
    for (unsigned i = 0; i < CHUNKS; i++) {
        t_ok(d->gpu->unmap(d->g, addr + (uint64_t)i * EACH, EACH, &err), &err);
        close(fds[i]);
        d->gpu->chunk_release(d->g, &chunks[i]);
    }
    d->gpu->unreserve(d->g, addr, (uint64_t)CHUNKS * EACH);
    fl_loop_destroy(l);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(p70_memory_that_cannot_be_exported),
        cmocka_unit_test(p72_one_handle_is_opened_once),
        cmocka_unit_test(p73_what_the_probe_could_not_is_not_used),
        cmocka_unit_test(a_step_down_is_said_once_with_its_reason),
        cmocka_unit_test(p75_many_small_tensors_cost_one_launch),
        cmocka_unit_test(p78_devices_are_named_never_counted),
        cmocka_unit_test(p78_each_reads_from_the_device_that_it_names),
        cmocka_unit_test(p80_a_hidden_device_is_no_error),
        cmocka_unit_test(p94_an_idle_communicator_holds_little),
        cmocka_unit_test(p112_groups_may_be_joined_in_any_order),
        cmocka_unit_test(many_chunks_take_several_keys),
    };
    const struct gpu_ops *gpu;

    if (gpu_pick(&gpu, &err) != FL_OK || gpu->list(devices, &n_devices, &err) != FL_OK ||
        n_devices == 0) {
        fprintf(stderr, "test_pain: no devices: %s\n", err.text);
        return 1;
    }
    if (argc == 3 && strcmp(argv[1], "--second") == 0)
        return strcmp(argv[2], "steps-down") == 0 ? tells_steps_down() : exporter(argv[2], TWO_FD);
    for (size_t i = n_devices; i < DEVICES; i++) { /* not here: for what asks names alone */
        devices[i] = devices[0];
        devices[i].uuid[GPU_UUID_BYTES - 2] =
            (char)('0' + (devices[0].uuid[GPU_UUID_BYTES - 2] + i) % 8);
    }
    return t_run("pain", tests);
}
