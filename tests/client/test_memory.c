/* host memory of a seat, device memory of the process, PyTorch's allocator: one offload by tag
 * moves all of it */
#include <furlong/torch.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include "tests/gpu/mem.h"
#include "tests/t.h"
#include "worker/client/weights_priv.h"

#define MIB ((size_t)1 << 20)
static struct fl_err err;
static struct gpu_info devices[GPU_MAX];
static size_t n_devices = GPU_MAX;

static void two_devices(void)
{
    if (n_devices < 2)
        t_skip("two devices are wanted, this machine has %zu", n_devices);
}

static uint64_t device_bytes(size_t i)
{
    struct arena_usage u;
    struct arena *a;

    t_ok(arena_of_device(devices[i].uuid, &a, &err), &err);
    arena_usage(a, false, &u);
    return u.held_bytes;
}

static void one_offload_moves_host_and_devices(void **state)
{
    struct client_memory m;
    struct furlong_moved moved;
    void *host, *first, *second, *kv;

    (void)state;
    two_devices();
    t_ok(memory_init(&m, t_tmp(), &err), &err);
    t_ok(memory_alloc(&m, NULL, FURLONG_TAG_OPTIMIZER, 3 * MIB, &host, &err), &err);
    t_ok(memory_alloc(&m, devices[0].uuid, FURLONG_TAG_OPTIMIZER, 3 * MIB, &first, &err), &err);
    t_ok(memory_alloc(&m, devices[1].uuid, FURLONG_TAG_OPTIMIZER, 3 * MIB, &second, &err), &err);
    t_ok(memory_alloc(&m, devices[0].uuid, FURLONG_TAG_KV, MIB, &kv, &err), &err);
    t_int_eq(t_mem_byte((uint8_t *)first + MIB), 0, "zeroed");
    memset(host, 1, 3 * MIB);
    t_mem_fill(first, 2, 3 * MIB);
    t_mem_fill(second, 3, 3 * MIB);
    t_ok(memory_offload(&m, FURLONG_TAG_OPTIMIZER, &moved, &err), &err);
    t_true(moved.kept_bytes >= 3 * MIB && moved.kept_bytes < 64 * MIB, "host memory stays: %llu",
           (unsigned long long)moved.kept_bytes);
    t_int_eq(moved.backed_bytes, 6 * MIB);
    t_true(t_mem_there(host) && !t_mem_there(first) && !t_mem_there(second) && t_mem_there(kv));
    t_ok(memory_onload(&m, FURLONG_TAG_OPTIMIZER, &moved, &err), &err);
    t_int_eq(moved.backed_bytes, 6 * MIB);
    t_true(((uint8_t *)host)[7] == 1 && t_mem_byte((uint8_t *)first + 3 * MIB - 1) == 2 &&
           t_mem_byte(second) == 3);
    memory_free(&m, first);
    memory_free(&m, host);
    memory_free(&m, NULL);
    memory_free(&m, &m); /* not ours: passed over */
    memory_fini(&m);     /* the rest goes with the seat */
    t_int_eq(device_bytes(0) + device_bytes(1), 0);
}

static void how_tags_are_kept_goes_for_all(void **state)
{
    struct client_memory m;
    struct furlong_moved moved;
    void *host, *dev;

    (void)state;
    two_devices();
    t_ok(memory_init(&m, t_tmp(), &err), &err);
    t_ok(memory_alloc(&m, NULL, FURLONG_TAG_DEFAULT, MIB, &host, &err), &err);
    t_ok(memory_alloc(&m, devices[1].uuid, FURLONG_TAG_DEFAULT, MIB, &dev, &err), &err);
    memset(host, 8, MIB);
    t_mem_fill(dev, 9, MIB);
    t_refused(memory_keep(&m, 0, FURLONG_KEEP_IN, NULL, &err), FL_INVALID, &err);
    t_ok(memory_keep(&m, FURLONG_TAG_DEFAULT, FURLONG_KEEP_DISK, NULL, &err), &err);
    t_ok(memory_offload(&m, FURLONG_TAG_DEFAULT, &moved, &err), &err);
    t_int_eq(moved.written_bytes, 2 * MIB);
    t_true(!t_mem_there(host) && !t_mem_there(dev));
    t_ok(memory_onload(&m, FURLONG_TAG_DEFAULT, &moved, &err), &err);
    t_true(((uint8_t *)host)[MIB - 1] == 8 && t_mem_byte((uint8_t *)dev + MIB - 1) == 9);
    t_true(memory_drops(&m, FURLONG_TAG_KV) && !memory_drops(&m, FURLONG_TAG_DEFAULT));
    t_ok(memory_keep(&m, FURLONG_TAG_DEFAULT, FURLONG_KEEP_HOST, NULL, &err), &err);
    memory_fini(&m);
}

static void torch_lies_in_the_same_arena(void **state)
{
    struct client_memory m;
    struct furlong_moved moved;
    void *mine;

    (void)state;
    two_devices();
    t_str_eq(furlong_torch_error(), "");
    uint8_t *weights = furlong_torch_alloc_weights(2 * MIB, 0, NULL),
            *kv = furlong_torch_alloc_kv_cache(2 * MIB, 0, NULL);
    uint8_t *graph = furlong_torch_alloc_cuda_graph(2 * MIB, 1, NULL),
            *opt = furlong_torch_alloc_optimizer(2 * MIB, 1, NULL);
    uint8_t *other = furlong_torch_alloc(100, 0, NULL);
    t_true(weights && kv && graph && opt && other);
    t_mem_fill(opt, 4, 2 * MIB);
    t_ok(memory_init(&m, t_tmp(), &err), &err);
    t_ok(memory_alloc(&m, devices[0].uuid, FURLONG_TAG_KV, MIB, &mine, &err), &err);
    t_true((uint8_t *)mine > kv - 64 * MIB && (uint8_t *)mine < kv + 64 * MIB,
           "one range of addresses a tag");
    t_int_eq(
        furlong_torch_offload(FURLONG_TAG_KV | FURLONG_TAG_GRAPH | FURLONG_TAG_OPTIMIZER, &moved),
        0);
    t_true(!t_mem_there(kv) && !t_mem_there(mine) && !t_mem_there(graph) && !t_mem_there(opt) &&
           t_mem_there(weights) && t_mem_there(other));
    t_int_eq(moved.backed_bytes, 2 * MIB);
    t_true(furlong_torch_alloc_kv_cache(100, 0, NULL) == NULL);
    t_has(furlong_torch_error(), "offloaded");
    t_int_eq(furlong_torch_onload(FURLONG_TAG_KV | FURLONG_TAG_GRAPH | FURLONG_TAG_OPTIMIZER, NULL),
             0);
    t_true(t_mem_there(kv) && t_mem_byte(opt + 2 * MIB - 1) == 4);
    t_true(furlong_torch_alloc(100, 7, NULL) == NULL);
    t_has(furlong_torch_error(), "device 7: this process sees ");
    t_true(furlong_torch_alloc_weights((ssize_t)1 << 40, 0, NULL) == NULL);
    t_int_eq(furlong_torch_keep(FURLONG_TAG_GRAPH, FURLONG_KEEP_IN, NULL), 0);
    t_int_eq(furlong_torch_keep(0, FURLONG_KEEP_IN, NULL), -1);
    memory_fini(&m);
    furlong_torch_free(weights, 2 * MIB, 0, NULL);
    furlong_torch_free(kv, 2 * MIB, 0, NULL);
    furlong_torch_free(graph, 2 * MIB, 1, NULL);
    furlong_torch_free(opt, 2 * MIB, 1, NULL);
    furlong_torch_free(other, 100, 0, NULL);
    furlong_torch_free(NULL, 0, 0, NULL);
    t_int_eq(device_bytes(0) + device_bytes(1), 0);
}

static void a_device_that_is_not_there_is_said(void **state)
{
    struct client_memory m;
    void *p = NULL;

    (void)state;
    t_ok(memory_init(&m, NULL, &err), &err);
    t_int_eq(setenv("FURLONG_ARENA_CHUNK", "lots", 1), 0);
    t_refused(memory_alloc(&m, "GPU-of-nobody", FURLONG_TAG_KV, 1, &p, &err), FL_INVALID, &err);
    t_has(err.text, "FURLONG_ARENA_CHUNK");
    t_int_eq(unsetenv("FURLONG_ARENA_CHUNK"), 0);
    t_refused(memory_alloc(&m, "GPU-of-nobody", FURLONG_TAG_KV, 1, &p, &err), FL_NOT_FOUND, &err);
    t_refused(memory_alloc(&m, NULL, 0, 1, &p, &err), FL_INVALID, &err);
    t_true(p == NULL);
    memory_fini(&m);
}

/* A program of ABI 1 hands in less than there is now: no byte beyond is read. */
static void options_of_an_older_program(void **state)
{
    size_t bytes = offsetof(struct furlong_weights_opts, device);
    struct furlong_weights_opts whole = { .slots = 2, .check_equal = true }, got;
    void *o = malloc(bytes); /* the sanitizer guards its end */
    struct furlong f = { .abi = 1 };

    (void)state;
    memcpy(o, &whole, bytes);
    got = weights_opts(&f, o);
    t_true(got.slots == 2 && got.check_equal && got.device == NULL && !got.in_place);
    free(o);
    f.abi = FURLONG_ABI;
    got = weights_opts(&f, &(struct furlong_weights_opts){ .device = "host", .in_place = true });
    t_str_eq(got.device, "host");
    t_true(got.in_place && weights_opts(&f, NULL).slots == 0);
}

static void slots_name_their_device(void **state)
{
    struct furlong f = { .abi = FURLONG_ABI };
    struct furlong_tensor t[2] = { { .name = "a", .dtype = FL_U8, .ndim = 1, .shape = { 64 } },
                                   { .name = "b", .dtype = FL_U8, .ndim = 1, .shape = { 64 } } };
    struct furlong_weights_opts o = { 0 };
    struct slots_home h = { 0 };
    uint8_t here[64];

    (void)state;
    two_devices();
    t_ok(slots_home_find(&f, t, 2, &o, &h, &err), &err);
    t_str_eq(h.uuid, "", "nothing says a device");
    t[0].data = here;
    t[1].data = furlong_torch_alloc_weights(64, 1, NULL);
    t_ok(slots_home_find(&f, t, 2, &o, &h, &err), &err);
    t_str_eq(h.uuid, devices[1].uuid, "where the data is");
    t[0].data = furlong_torch_alloc_weights(64, 0, NULL);
    t_refused(slots_home_find(&f, t, 2, &o, &h, &err), FL_INVALID, &err);
    t_has(err.text, "b lies on device");
    o.device = "host";
    t_ok(slots_home_find(&f, t, 2, &o, &h, &err), &err);
    t_str_eq(h.uuid, "");
    o.device = "GPU-of-nobody";
    t_refused(slots_home_find(&f, t, 2, &o, &h, &err), FL_NOT_FOUND, &err);
    o = (struct furlong_weights_opts){ .stream = &o };
    t_refused(slots_home_find(&f, NULL, 0, &o, &h, &err), FL_INVALID, &err);
    t_has(err.text, "say which");
    furlong_torch_free(t[0].data, 64, 0, NULL);
    furlong_torch_free(t[1].data, 64, 1, NULL);
}

/* Each thing that can fail on the way to a slot, or to tensors that are given where they lie, fails
 * once: nothing is left of it. */
static void slots_fail_without_a_trace(void **state)
{
    struct furlong f = { .abi = FURLONG_ABI };
    struct furlong_weights_opts o = { .device = devices[0].uuid };
    struct furlong_tensor t = { .name = "a", .dtype = FL_U8, .ndim = 1, .shape = { 64 } };
    struct slots_home h = { 0 };
    struct slots_lent lent = { 0 };
    struct link_mem m = { 0 };
    uint64_t bytes = 64;
    int fds;

    (void)state;
    if (t_on_cuda())
        t_skip("a driver keeps descriptors of its own: ours are counted on the fake");
    t_ok(slots_home_find(&f, NULL, 0, &o, &h, &err), &err);
    h.set = "sweep";
    for (unsigned offered = 0; offered < 2; offered++) {
        enum fl_status st = FL_EXHAUSTED;

        h.offered = offered;
        fds = t_open_fds();
        for (unsigned nth = 1; st != FL_OK; nth++) {
            t_true(nth < 50, "%s", err.text);
            fl_fault_arm(nth);
            st = slots_alloc(&h, 3 * MIB, &m, &err);
            fl_fault_disarm();
            t_true(st == FL_OK || (t_open_fds() == fds && device_bytes(0) == 0), "nth=%u: %s", nth,
                   err.text);
        }
        slots_leave(&m);
        t_ok(slots_return(&m, &err), &err);
        slots_free(&m);
        t_int_eq(t_open_fds(), fds);
        t_int_eq(device_bytes(0), 0);
    }
    t.data = furlong_torch_alloc_weights(64, 0, NULL);
    t_ok(slots_lend(&h, &t, &bytes, 1, &lent, &err), &err); /* the devices were looked at */
    slots_lent_fini(&lent);
    fds = t_open_fds();
    for (unsigned nth = 1, failed = 1; failed; nth++) {
        fl_fault_arm(nth);
        failed = slots_lend(&h, &t, &bytes, 1, &lent, &err) != FL_OK;
        fl_fault_disarm();
        t_true(nth < 50 && (!failed || t_open_fds() == fds), "nth=%u: %s", nth, err.text);
    }
    t_int_eq(lent.n, 1);
    slots_lent_fini(&lent);
    furlong_torch_free(t.data, 64, 0, NULL);
    t_int_eq(device_bytes(0), 0);
}

/* As with cudaFree: what the device was given has run before its memory goes. */
static void kernels_end_before_their_memory_goes(void **state)
{
    struct client_memory m;
    const struct gpu_ops *gpu;
    struct gpu_stream *s;
    struct gpu *g;
    void *p;

    (void)state;
    t_ok(gpu_pick(&gpu, &err), &err);
    t_ok(gpu->open(devices[0].uuid, &g, &err), &err);
    t_ok(gpu->stream(g, &s, &err), &err);
    t_ok(memory_init(&m, t_tmp(), &err), &err);
    for (unsigned i = 0; i < 5; i++) {
        t_ok(memory_alloc(&m, devices[0].uuid, FURLONG_TAG_DEFAULT, MIB, &p, &err), &err);
        for (unsigned k = 0; k < 4; k++)
            t_ok(gpu->fill(s, (uint64_t)(uintptr_t)p, 7, MIB, &err), &err);
        memory_free(&m, p);
    }
    t_ok(gpu->stream_sync(s, &err), &err);
    memory_fini(&m);
    gpu->stream_free(s);
    gpu->close(g);
}

static atomic_bool over;

static void *allocates(void *arg)
{
    (void)arg;
    while (!atomic_load(&over)) {
        void *p = furlong_torch_alloc(4 * MIB, 0, NULL);

        furlong_torch_free(p, 4 * MIB, 0, NULL);
    }
    return NULL;
}

/* A data loader that is forked frees tensors that it has inherited, whatever the other threads were
 * about when it was. */
static void a_forked_child_frees_nothing(void **state)
{
    void *p = furlong_torch_alloc(MIB, 0, NULL);
    pthread_t other;

    (void)state;
    t_int_eq(pthread_create(&other, NULL, allocates, NULL), 0);
    for (unsigned i = 0; i < 40; i++) {
        pid_t pid = fork();
        int status;

        if (pid == 0) {
            (void)alarm(20); /* one that waits for a thread that it does not have */
            furlong_torch_free(p, MIB, 0, NULL);
            bool refused = furlong_torch_alloc(100, 0, NULL) == NULL &&
                           strstr(furlong_torch_error(), "fork") != NULL &&
                           furlong_torch_offload(FURLONG_TAG_DEFAULT, NULL) == -1;
            _exit(refused ? 0 : 1);
        }
        t_int_eq(waitpid(pid, &status, 0), pid);
        t_int_eq(status, 0, "child %u", i);
    }
    atomic_store(&over, true);
    pthread_join(other, NULL);
    furlong_torch_free(p, MIB, 0, NULL);
    t_int_eq(device_bytes(0), 0);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(kernels_end_before_their_memory_goes),
        cmocka_unit_test(a_forked_child_frees_nothing),
        cmocka_unit_test(one_offload_moves_host_and_devices),
        cmocka_unit_test(how_tags_are_kept_goes_for_all),
        cmocka_unit_test(torch_lies_in_the_same_arena),
        cmocka_unit_test(a_device_that_is_not_there_is_said),
        cmocka_unit_test(options_of_an_older_program),
        cmocka_unit_test(slots_name_their_device),
        cmocka_unit_test(slots_fail_without_a_trace),
    };

    const struct gpu_ops *gpu;

    if (gpu_pick(&gpu, &err) != FL_OK || gpu->list(devices, &n_devices, &err) != FL_OK ||
        n_devices == 0) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    return t_run("client memory", tests);
}
