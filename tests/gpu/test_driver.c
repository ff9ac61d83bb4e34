/* the driver's table over a driver that only looks like one: what it makes of the answers that no
 * machine here gives. Each case is a process of its own: a driver starts once. */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/gpu/gpu.h"
#include "tests/t.h"

static struct fl_err err;

static struct gpu *opened(void)
{
    struct gpu_info all[4];
    size_t n = FL_LEN(all);
    struct gpu *g = NULL;

    t_ok(gpu_cuda.list(all, &n, &err), &err);
    t_int_eq(n, 1);
    t_ok(gpu_cuda.open(all[0].uuid, &g, &err), &err);
    return g;
}

static int left(void)
{
    int (*f)(void);

    *(void **)&f = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "fake_cuda_left");
    return f();
}

/* ---- a driver that works ---- */
static void an_exported_chunk_is_closed_at_exec(void **state)
{
    struct gpu *g = opened();
    struct gpu_chunk c;
    int fd = -1;

    (void)state;
    t_ok(gpu_cuda.chunk_create(g, 2 << 20, &c, &err), &err);
    t_ok(gpu_cuda.chunk_export(g, &c, &fd, &err), &err);
    t_true(fcntl(fd, F_GETFD) & FD_CLOEXEC, "a child would keep the device's memory");
    close(fd);
    gpu_cuda.chunk_release(g, &c);
    gpu_cuda.close(g);
    t_int_eq(left(), 0);
}

struct elsewhere {
    struct gpu_event *a, *b;
    enum fl_status done, sync, ms;
};

static void *ask_elsewhere(void *arg)
{
    struct elsewhere *e = arg;
    float ms;

    e->done = gpu_cuda.event_done(e->a, NULL);
    e->sync = gpu_cuda.event_sync(e->a, NULL);
    e->ms = gpu_cuda.event_ms(e->a, e->b, &ms, NULL);
    return NULL;
}

/* The header promises it of every function. */
static void events_are_asked_by_any_thread(void **state)
{
    struct gpu *g = opened();
    struct elsewhere e = { 0 };
    struct gpu_stream *s;
    pthread_t t;

    (void)state;
    t_ok(gpu_cuda.stream(g, &s, &err), &err);
    t_ok(gpu_cuda.event(g, &e.a, &err), &err);
    t_ok(gpu_cuda.event(g, &e.b, &err), &err);
    t_ok(gpu_cuda.event_record(e.a, s, &err), &err);
    t_int_eq(pthread_create(&t, NULL, ask_elsewhere, &e), 0);
    pthread_join(t, NULL);
    t_int_eq(e.done, FL_OK);
    t_int_eq(e.sync, FL_OK);
    t_int_eq(e.ms, FL_OK);
    gpu_cuda.event_free(e.a);
    gpu_cuda.event_free(e.b);
    gpu_cuda.stream_free(s);
    gpu_cuda.close(g);
    t_int_eq(left(), 0);
}

/* ---- answers ---- */

static void says(enum fl_status st, enum fl_status wanted, const char *const *parts)
{
    t_refused(st, wanted, &err);
    for (; *parts; parts++)
        t_has(err.text, *parts);
}

static void a_fabric_that_is_not_up(void)
{
    const struct gpu_ops *gpu;
    struct gpu_info all[4];
    struct gpu *g;
    size_t n = 4;

    unsetenv("FURLONG_GPU");
    says(gpu_cuda.list(all, &n, &err), FL_UNSUPPORTED,
         (const char *const[]){ "SYSTEM_NOT_READY", "system not yet initialized", "fabric manager",
                                NULL });
    t_ok(gpu_pick(&gpu, &err), &err);
    t_true(gpu == &gpu_none);
    says(gpu->open("GPU-any", &g, &err), FL_UNSUPPORTED,
         (const char *const[]){ "GPU-any", "SYSTEM_NOT_READY", NULL });
}

static void a_device_that_another_has_alone(void)
{
    struct gpu_info all[4];
    struct gpu *g;
    size_t n = 4;

    t_ok(gpu_cuda.list(all, &n, &err), &err);
    says(gpu_cuda.open(all[0].uuid, &g, &err), FL_UNREACHABLE,
         (const char *const[]){ all[0].uuid, "DEVICE_UNAVAILABLE", "compute mode", NULL });
}

static void a_chip_that_the_code_is_not_for(void)
{
    static const unsigned char image[64];
    const struct gpu_code code = { .image = image };
    struct gpu *g = opened();
    struct gpu_launch l = { .kernel = "furlong_move", .grid = 1, .block = 32 };
    struct gpu_stream *s;

    gpu_code_set(&code);
    t_ok(gpu_cuda.stream(g, &s, &err), &err);
    says(gpu_cuda.launch(s, &l, &err), FL_UNSUPPORTED,
         (const char *const[]){ "(80)", "NO_BINARY_FOR_GPU", "built for", NULL });
    gpu_cuda.stream_free(s);
    gpu_cuda.close(g);
    t_int_eq(left(), 0);
}

static void a_part_of_a_device(void)
{
    struct gpu_info all[4];
    struct gpu *g;
    size_t n = 4;

    t_ok(gpu_cuda.list(all, &n, &err), &err);
    t_str_eq(all[0].uuid, "MIG-22222222-2222-2222-2222-222222222222");
    t_ok(gpu_cuda.open(all[0].uuid, &g, &err), &err);
    gpu_cuda.close(g);
    t_ok(gpu_cuda.open("GPU-11111111-1111-1111-1111-111111111111", &g, &err),
         &err); /* as NVML calls it */
    gpu_cuda.close(g);
    t_true(gpu_cuda.open("GPU-22222222-2222-2222-2222-222222222222", &g, &err) == FL_NOT_FOUND);
}

static void one_memory_with_the_host(void)
{
    struct gpu *g = opened();
    uint64_t free_bytes, total;

    t_true(gpu_cuda.info(g)->integrated);
    t_refused(gpu_cuda.memory(g, &free_bytes, &total, &err), FL_UNSUPPORTED, &err);
    gpu_cuda.close(g);
}

static const struct row {
    const char *name, *variable, *value;
    void (*run)(void);
} rows[] = {
    { "a fabric that is not up", "FAKE_CUDA_INIT", "802", a_fabric_that_is_not_up },
    { "a device that another has alone", "FAKE_CUDA_RETAIN", "46",
      a_device_that_another_has_alone },
    { "a chip that the code is not for", "FAKE_CUDA_MODULE", "209",
      a_chip_that_the_code_is_not_for },
    { "a part of a device", "FAKE_CUDA_MIG", "1", a_part_of_a_device },
    { "one memory with the host", "FAKE_CUDA_INTEGRATED", "1", one_memory_with_the_host },
};

static void run_row(void **state)
{
    const struct row *r = *state;

    r->run();
}

static int one(size_t i)
{
    struct CMUnitTest t = { .name = rows[i].name,
                            .test_func = run_row,
                            .initial_state = (void *)(uintptr_t)&rows[i] };

    return t_run_("driver answers", &t, 1);
}

static void answers_are_understood(void **state)
{
    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        char n[8];
        int status;

        snprintf(n, sizeof(n), "%zu", i);
        pid_t pid = fork(); /* no driver has started in this process yet */
        if (pid == 0) {
            (void)dup2(STDERR_FILENO, STDOUT_FILENO); /* the lines of TAP are the parent's */
            setenv(rows[i].variable, rows[i].value, 1);
            execl("/proc/self/exe", "test_driver", n, (char *)NULL);
            _exit(127);
        }
        t_int_eq(waitpid(pid, &status, 0), pid);
        t_int_eq(status, 0, "%s", rows[i].name);
    }
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_are_understood),
        cmocka_unit_test(an_exported_chunk_is_closed_at_exec),
        cmocka_unit_test(events_are_asked_by_any_thread),
    };

    if (argc == 2)
        return one((size_t)atoi(argv[1]));
    return t_run("driver", tests);
}
