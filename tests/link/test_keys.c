/* keys of device memory that a peer got wrong, or made up: each is refused before anything of it is
 * used, and leaves nothing */
#include <stdlib.h>
#include <unistd.h>
#include "common/base/str.h"
#include "tests/gpu/mem.h"
#include "tests/gpu/two.h"
#include "tests/link/wait.h"
#include "tests/t.h"
#include "transport/link/ipc_priv.h"
#include "transport/link/tcp_priv.h"

#define MIB ((uint64_t)1 << 20)
enum { EACH = 2 << 20, CHUNKS = WIRE_MAX_FDS + 2 };
static struct gpu_info device;
static struct fl_err err;

static struct link *opened(struct fl_loop *l)
{
    struct link_place p = { .vmm_fd = true, .legacy_ipc = true, .addr = "127.0.0.1" };
    struct link_team team = { .members = &p, .n = 1 };
    struct wait ready = wait_for();
    struct link *k;

    fl_copy(p.gpu_uuid, sizeof(p.gpu_uuid), device.uuid);
    t_ok(link_cuda_ipc.open(l, &team, &k, &ready.op, &err), &err);
    t_until(l, ready.times == 1, 5000);
    t_ok(ready.op.err.status, &ready.op.err);
    return k;
}

static struct ipc_key read_key(const struct link_key *k)
{
    struct ipc_key key;

    memcpy(&key, k->blob, sizeof(key));
    return key;
}

static struct link_key with(const struct link_key *k, const struct ipc_key *key)
{
    struct link_key out = *k;

    memcpy(out.blob, key, sizeof(*key));
    return out;
}

/* ---- chunks, in two keys ---- */
struct many {
    struct link_dev *d;
    struct gpu_chunk chunks[CHUNKS];
    int fds[CHUNKS];
    struct link_pages pages;
    struct link_mem mem;
    struct link_key keys[2];
};

static void many_make(struct many *m, struct link *k)
{
    uint64_t addr;

    *m = (struct many){ .pages = { .magic = LINK_PAGES, .n_chunks = CHUNKS } };
    m->pages.fds = m->fds;
    fl_copy(m->pages.uuid, sizeof(m->pages.uuid), device.uuid);
    t_ok(link_dev_get(device.uuid, &m->d, &err), &err);
    t_ok(m->d->gpu->reserve(m->d->g, (uint64_t)CHUNKS * EACH, &addr, &err), &err);
    for (unsigned i = 0; i < CHUNKS; i++) {
        t_ok(m->d->gpu->chunk_create(m->d->g, EACH, &m->chunks[i], &err), &err);
        t_ok(m->d->gpu->map(m->d->g, addr + i * EACH, &m->chunks[i], true, &err), &err);
        t_ok(m->d->gpu->chunk_export(m->d->g, &m->chunks[i], &m->fds[i], &err), &err);
    }
    m->mem = (struct link_mem){ .addr = (void *)(uintptr_t)addr,
                                .bytes = (uint64_t)CHUNKS * EACH,
                                .chunk_bytes = EACH,
                                .on_device = true,
                                .impl = &m->pages };
    for (unsigned i = 0; i < 2; i++) {
        m->keys[i].part = i;
        t_ok(link_cuda_ipc.share(k, &m->mem, &m->keys[i], &err), &err);
    }
}

static void many_drop(struct many *m)
{
    for (unsigned i = 0; i < CHUNKS; i++) {
        (void)m->d->gpu->unmap(m->d->g, (uint64_t)(uintptr_t)m->mem.addr + i * EACH, EACH, NULL);
        close(m->fds[i]);
        m->d->gpu->chunk_release(m->d->g, &m->chunks[i]);
    }
    m->d->gpu->unreserve(m->d->g, (uint64_t)(uintptr_t)m->mem.addr, (uint64_t)CHUNKS * EACH);
}

enum wrong {
    HANDLE_BEHIND_CHUNKS,
    OTHER_BYTES,
    OTHER_OFF,
    FIRST_AGAIN,
    SECOND_FIRST,
    HUGE_CHUNKS,
    WHOLE_SPACE,
    WRONGS
};

/* What is sent as the first key and as the second one. */
static void spoil(enum wrong w, struct link_key keys[2])
{
    struct ipc_key a = read_key(&keys[0]), b = read_key(&keys[1]);

    switch (w) {
    case HANDLE_BEHIND_CHUNKS: /* its bytes would be believed, and nothing is behind them */
        b.kind = IPC_HANDLE;
        b.bytes = (uint64_t)1 << 50;
        keys[1].n_fds = 0;
        break;
    case OTHER_BYTES:
        b.bytes -= EACH;
        break;
    case OTHER_OFF:
        b.bytes -= EACH;
        b.off = EACH;
        break;
    case FIRST_AGAIN:
        b = a;
        break;
    case SECOND_FIRST:
        a = b;
        break;
    case HUGE_CHUNKS:
        a.chunk_bytes = (uint64_t)1 << 62;
        a.n_chunks = 3;
        keys[0].n_fds = 1;
        break;
    case WHOLE_SPACE:
        a.chunk_bytes = UINT64_MAX - EACH / 2;
        a.n_chunks = 1;
        keys[0].n_fds = 1;
        break;
    default:
        break;
    }
    keys[0] = with(&keys[0], &a);
    keys[1] = with(&keys[1], &b);
}

static void two_keys_are_of_one_memory(void **state)
{
    struct fl_loop *l;
    struct many m;

    (void)state;
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    struct link *k = opened(l);

    many_make(&m, k);
    int fds = t_open_fds();
    for (enum wrong w = 0; w < WRONGS; w++) {
        struct link_key keys[2] = { m.keys[0], m.keys[1] };
        struct link_mem view = { 0 };
        enum fl_status st;

        spoil(w, keys);
        st = link_cuda_ipc.map(k, &keys[0], false, &view, &err);
        t_true((st == FL_OK) == (w < SECOND_FIRST), "row %d: %s", (int)w, err.text);
        if (st == FL_OK)
            st = link_cuda_ipc.map(k, &keys[1], false, &view, &err);
        t_refused(st, FL_CORRUPT, &err);
        t_true(view.impl == NULL, "row %d: nothing is left", (int)w);
        t_int_eq(t_open_fds(), fds, "row %d", (int)w);
    }
    many_drop(&m);
    link_cuda_ipc.close(k);
    fl_loop_destroy(l);
}

/* ---- a handle, of another process ---- */
static int exporter(void)
{
    struct fl_loop *l;
    struct link_mem mem;
    struct link_key key = { 0 };
    struct link_dev *d;
    uint64_t addr;
    char any;

    t_ok(fl_loop_create(NULL, &l, &err), &err);
    struct link *k = opened(l);

    t_ok(link_dev_get(device.uuid, &d, &err), &err);
    t_ok(d->gpu->alloc(d->g, 2 * MIB, &addr, &err), &err);
    t_ok(link_dev_foreign(device.uuid, addr, 2 * MIB, &mem, &err), &err);
    t_ok(link_cuda_ipc.share(k, &mem, &key, &err), &err);
    two_send(TWO_FD, &key, sizeof(key), -1);
    (void)two_take(TWO_FD, &any, 1, NULL); /* until the test is over */
    _exit(0);
}

static void a_handle_is_no_larger_than_its_memory(void **state)
{
    static const struct {
        uint64_t off, bytes;
    } rows[] = {
        { 0, 2 * MIB + 1 }, { 4096, 2 * MIB }, { UINT64_MAX - 4095, 8192 }, { 3 * MIB, 16 }
    };
    struct link_mem view = { 0 };
    struct link_key good;
    struct fl_loop *l;
    int sock;

    (void)state;
    if (device.integrated)
        t_skip("an integrated device has no IPC handles");
    pid_t other = two_start("handle", &sock);

    t_int_eq(two_take(sock, &good, sizeof(good), NULL), sizeof(good));
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    struct link *k = opened(l);

    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct ipc_key key = read_key(&good);

        key.off = rows[i].off;
        key.bytes = rows[i].bytes;
        struct link_key bad = with(&good, &key);

        t_refused(link_cuda_ipc.map(k, &bad, false, &view, &err), FL_CORRUPT, &err);
        t_true(view.impl == NULL, "row %zu", i);
    }
    t_ok(link_cuda_ipc.map(k, &good, false, &view, &err), &err);
    t_int_eq(view.bytes, 2 * MIB);
    link_cuda_ipc.unmap(k, &view);
    link_cuda_ipc.close(k);
    fl_loop_destroy(l);
    t_int_eq(two_end(other, sock), 0);
}

/* ---- links whose memory is one piece ---- */
static void one_piece_has_one_key(void **state)
{
    static const struct link_ops *const ops[] = { &link_shm, &link_tcp };
    struct link_place p = { .addr = "127.0.0.1" };
    struct link_team team = { .members = &p, .n = 1 };
    struct link_mem mem, view = { 0 };
    struct fl_loop *l;

    (void)state;
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    t_ok(link_mem_alloc(8192, &mem, &err), &err);
    for (size_t i = 0; i < FL_LEN(ops); i++) {
        struct wait ready = wait_for();
        struct link_key key = { 0 };
        struct link *k;

        t_ok(ops[i]->open(l, &team, &k, &ready.op, &err), &err);
        t_until(l, ready.times == 1, 5000);
        t_ok(ops[i]->share(k, &mem, &key, &err), &err);
        t_ok(ops[i]->map(k, &key, false, &view, &err), &err);
        key.part = 1; /* a peer that says there are two: the first would never be unmapped */
        t_refused(ops[i]->map(k, &key, false, &view, &err), FL_CORRUPT, &err);
        t_true(view.impl == NULL, "%s: what out had is unmapped", ops[i]->name);
        ops[i]->close(k);
    }
    link_mem_free(&mem);
    fl_loop_destroy(l);
}

/* A line that lives long: memory comes and goes, also at an address that something else had. */
static struct link *tcp_opened(struct fl_loop *l)
{
    struct link_place p = { .addr = "127.0.0.1" };
    struct link_team team = { .members = &p, .n = 1 };
    struct wait ready = wait_for();
    struct link *k;

    t_ok(link_tcp.open(l, &team, &k, &ready.op, &err), &err);
    t_until(l, ready.times == 1, 5000);
    return k;
}

static enum fl_status tcp_pulled(struct fl_loop *l, struct link *k, const struct link_key *key)
{
    struct link_seg all = { .run_bytes = 4096, .rows = 1 };
    struct link_mem to, view = { 0 };
    struct wait w = wait_for();

    t_ok(link_mem_alloc(4096, &to, &err), &err);
    t_ok(link_tcp.map(k, key, false, &view, &err), &err);
    t_ok(link_tcp.pull(k, &view, &to, &all, 1, NULL, &w.op, &err), &err);
    t_until(l, w.times == 1, 10000);
    link_tcp.unmap(k, &view);
    link_mem_free(&to);
    err = w.op.err;
    return w.op.err.status;
}

static void memory_comes_and_goes_on_a_line(void **state)
{
    enum { STEP = 64, SET = 1024 };
    struct link_key first = { 0 }, key;
    struct link_mem block;
    struct fl_loop *l;

    (void)state;
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    struct link *k = tcp_opened(l);

    t_ok(link_mem_alloc(TCP_MAX_REGIONS * STEP + 8192, &block, &err), &err);
    for (unsigned i = 0; i <= TCP_MAX_REGIONS; i++) {
        struct link_mem mem = { .addr = (char *)block.addr + i * STEP, .bytes = 4096 };

        key = (struct link_key){ 0 };
        t_ok(link_tcp.share(k, &mem, &key, &err), &err);
        first = i ? first : key;
        if (i == 0 || i == SET || i == TCP_MAX_REGIONS)
            t_ok(tcp_pulled(l, k, &key), &err);
        if (i == SET)
            t_ok(tcp_pulled(l, k, &first), &err); /* a set lies in so many */
    }
    t_refused(tcp_pulled(l, k, &first), FL_NOT_FOUND, &err); /* not what has its place now */
    link_mem_free(&block);
    for (unsigned i = 0; i < 3; i++) { /* of a device: what described the last one is gone */
        struct link_mem slot;

        t_ok(link_dev_alloc(device.uuid, 2 * MIB, &slot, &err), &err);
        key = (struct link_key){ 0 };
        t_ok(link_tcp.share(k, &slot, &key, &err), &err);
        t_ok(tcp_pulled(l, k, &key), &err);
        link_dev_free(&slot);
    }
    link_tcp.close(k);
    fl_loop_destroy(l);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_comes_and_goes_on_a_line),
        cmocka_unit_test(two_keys_are_of_one_memory),
        cmocka_unit_test(a_handle_is_no_larger_than_its_memory),
        cmocka_unit_test(one_piece_has_one_key),
    };
    struct gpu_info all[GPU_MAX];
    const struct gpu_ops *gpu;
    size_t n = GPU_MAX;

    if (gpu_pick(&gpu, &err) != FL_OK || gpu->list(all, &n, &err) != FL_OK || n == 0) {
        printf("1..0 # SKIP no device: %s\n", err.text);
        return 0;
    }
    device = all[0];
    if (argc == 3 && strcmp(argv[1], "--second") == 0)
        return exporter();
    return t_run("keys", tests);
}
