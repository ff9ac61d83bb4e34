/* sets of weights in one process: their first values, from the host's memory or a device's into
 * either, and several of them that go together */
#include "common/base/fault.h"
#include "common/gpu/gpu.h"
#include "tests/client/fake.h"
#include "tests/gpu/mem.h"
#include "tests/t.h"
#include "transport/xfer/sink_priv.h"
#include "worker/client/weights_priv.h"

enum { N = 4096 };

static struct gpu_info all[GPU_MAX];
static size_t n_devices = GPU_MAX;
static const struct gpu_ops *gpu;

/* As another library of the program would have allocated it. */
static void *on_device(size_t i, struct gpu **g)
{
    uint64_t at;
    struct fl_err err = { 0 };

    t_ok(gpu->open(all[i].uuid, g, &err), &err);
    t_ok(gpu->alloc(*g, N, &at, &err), &err);
    t_mem_fill((void *)(uintptr_t)at, (uint8_t)(17 + i), N);
    return (void *)(uintptr_t)at;
}

static void first_values_come_from_where_they_lie(void **state)
{
    const struct row {
        const char *name;
        int from; /* -1: host memory */
        const char *to, *said;
    } rows[] = {
        { "host to host", -1, "host", NULL },
        { "host to device", -1, all[0].uuid, NULL },
        { "device to the same", 0, all[0].uuid, NULL },
        { "device to host", 0, "host", NULL },
        { "device to another", 1, all[0].uuid, "w lies on device " },
    };
    struct fake *fake = fake_create();
    struct furlong *f = fake_joined(fake, "trainer", 0, 1);
    static uint8_t here[N], got[N];

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        const struct row *r = &rows[i];
        struct furlong_weights_opts o = { .slots = 1, .device = r->to };
        struct furlong_weights *w = NULL;
        struct gpu *g = NULL;
        struct fl_err err = { 0 };

        memset(here, 16, N);
        struct furlong_tensor t = { .name = "w",
                                    .dtype = FL_U8,
                                    .ndim = 1,
                                    .shape = { N },
                                    .data = r->from < 0 ? here : on_device((size_t)r->from, &g) };
        enum fl_status st = furlong_weights_offer(f, "mine", &t, 1, &o, &w, &err);

        if (r->said) {
            t_refused(st, FL_INVALID, &err);
            t_has(err.text, r->said);
            t_has(err.text, all[0].uuid);
        } else {
            t_int_eq(st, FL_OK, "%s: %s", r->name, err.text);
            t_mem_read(got, furlong_weights_data(w, 0), N);
            t_int_eq(got[0], 17 + r->from, "%s", r->name);
            t_int_eq(got[N - 1], 17 + r->from, "%s", r->name);
            furlong_weights_drop(w);
        }
        if (g) {
            gpu->free(g, (uint64_t)(uintptr_t)t.data);
            gpu->close(g);
        }
    }
    furlong_leave(f);
    fake_destroy(fake);
}

/* One that takes part in an update: the others stay where they are. */
static void sets_go_together_or_not_at_all(void **state)
{
    struct furlong_weights_opts o = { .slots = 1, .device = "host" };
    struct furlong_tensor t = { .name = "w", .dtype = FL_U8, .ndim = 1, .shape = { N } };
    struct fake *fake = fake_create();
    struct furlong *f = fake_joined(fake, "rollout", 0, 1);
    struct furlong_weights *w[2];
    struct furlong_moved moved;
    struct fl_err err = { 0 };
    char why[128];

    (void)state;
    t_ok(furlong_weights_accept(f, "a", &t, 1, &o, &w[0], &err), &err);
    t_ok(furlong_weights_accept(f, "b", &t, 1, &o, &w[1], &err), &err);
    t_ok(fl_fault_set("xfer.offload:2=fail", NULL), NULL);
    t_refused(furlong_arena_offload(f, FURLONG_TAG_WEIGHTS, &moved, &err), FL_AGAIN, &err);
    t_ok(fl_fault_set("", NULL), NULL);
    for (int i = 0; i < 2; i++) {
        furlong_weights_why(w[i], why, sizeof(why));
        t_has(why, "is here yet");
    }
    t_ok(furlong_arena_offload(f, FURLONG_TAG_WEIGHTS, &moved, &err), &err);
    for (int i = 0; i < 2; i++) {
        furlong_weights_why(w[i], why, sizeof(why));
        t_has(why, "are offloaded");
        furlong_weights_drop(w[i]);
    }
    furlong_leave(f);
    fake_destroy(fake);
}

/* A program drops a set behind the kernels that it has just started on it. */
static void kernels_end_before_their_set_goes(void **state)
{
    struct furlong_weights_opts o = { .slots = 1, .device = all[0].uuid };
    struct furlong_tensor t = { .name = "w", .dtype = FL_U8, .ndim = 1, .shape = { N } };
    struct fake *fake = fake_create();
    struct furlong *f = fake_joined(fake, "trainer", 0, 1);
    struct furlong_weights *w;
    struct gpu_stream *s;
    struct gpu *g;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(gpu->open(all[0].uuid, &g, &err), &err);
    t_ok(gpu->stream(g, &s, &err), &err);
    for (unsigned i = 0; i < 5; i++) {
        t_ok(furlong_weights_offer(f, "mine", &t, 1, &o, &w, &err), &err);
        for (unsigned k = 0; k < 4; k++)
            t_ok(gpu->fill(s, (uint64_t)(uintptr_t)furlong_weights_data(w, 0), 7, N, &err), &err);
        furlong_weights_drop(w);
    }
    t_ok(gpu->stream_sync(s, &err), &err);
    gpu->stream_free(s);
    gpu->close(g);
    furlong_leave(f);
    fake_destroy(fake);
}

/* Whose device is lost keeps what it has: nothing goes that could not be waited for. */
static void an_offload_that_cannot_wait_moves_nothing(void **state)
{
    struct furlong_weights_opts o = { .slots = 1, .device = all[0].uuid };
    struct furlong_tensor t = { .name = "w", .dtype = FL_U8, .ndim = 1, .shape = { N } };
    struct fake *fake = fake_create();
    struct furlong *f = fake_joined(fake, "rollout", 0, 1);
    struct furlong_weights *w;
    struct furlong_moved moved;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(furlong_weights_accept(f, "mine", &t, 1, &o, &w, &err), &err);
    t_ok(slots_alloc(&w->home, N, &w->spare, &err), &err);
    w->has_spare = true;
    w->rooms = 1;
    t_ok(fl_fault_set("gpu.sync:1=fail", NULL), NULL);
    t_refused(furlong_arena_offload(f, FURLONG_TAG_WEIGHTS, &moved, &err), FL_UNREACHABLE, &err);
    t_ok(fl_fault_set("", NULL), NULL);
    t_true(w->has_spare && t_mem_there(w->spare.addr), "it is there still");
    furlong_weights_drop(w);
    furlong_leave(f);
    fake_destroy(fake);
}

struct pausing {
    struct client_sync sync;
    struct fl_task paused;
    struct furlong_weights *w;
    struct gpu_event *behind;
    enum fl_status device;
};

static void has_paused(struct fl_task *t)
{
    struct pausing *p = container_of(t, struct pausing, paused);

    p->device = gpu->event_done(p->behind, NULL);
    client_sync_end(&p->sync, FL_OK, NULL);
}

static void pause_begin(struct client_sync *s)
{
    struct pausing *p = container_of(s, struct pausing, sync);

    p->paused.run = has_paused;
    p->w->sink->ops->pause(p->w->sink->arg, &p->paused);
}

/* A program that is given no more events has kernels on its streams still: whoever asked it to
 * stand is answered behind them. */
static void a_seat_that_is_lost_stands_behind_its_kernels(void **state)
{
    struct furlong_weights_opts o = { .slots = 1, .device = all[0].uuid };
    struct furlong_tensor t = { .name = "w", .dtype = FL_U8, .ndim = 1, .shape = { N } };
    struct fake *fake = fake_create();
    struct furlong *f = fake_joined(fake, "rollout", 0, 1);
    struct pausing p = { .device = FL_INTERNAL };
    struct fl_err err = { 0 }, lost = { .status = FL_STALE };
    struct gpu_stream *s;
    struct gpu *g;
    uint64_t at;

    (void)state;
    t_ok(gpu->open(all[0].uuid, &g, &err), &err);
    t_ok(gpu->stream(g, &s, &err), &err);
    t_ok(gpu->event(g, &p.behind, &err), &err);
    t_ok(gpu->alloc(g, N, &at, &err), &err);
    t_ok(furlong_weights_accept(f, "mine", &t, 1, &o, &p.w, &err), &err);
    inbox_close(&f->inbox, &lost);
    for (unsigned k = 0; k < 8; k++)
        t_ok(gpu->fill(s, at, 7, N, &err), &err);
    t_ok(gpu->event_record(p.behind, s, &err), &err);
    t_ok(client_sync_run(f->loop, &p.sync, pause_begin, &err), &err);
    t_int_eq(p.device, FL_OK, "the kernels before have run");
    furlong_weights_drop(p.w);
    gpu->free(g, at);
    gpu->event_free(p.behind);
    gpu->stream_free(s);
    gpu->close(g);
    furlong_leave(f);
    fake_destroy(fake);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_values_come_from_where_they_lie),
        cmocka_unit_test(sets_go_together_or_not_at_all),
        cmocka_unit_test(kernels_end_before_their_set_goes),
        cmocka_unit_test(an_offload_that_cannot_wait_moves_nothing),
        cmocka_unit_test(a_seat_that_is_lost_stands_behind_its_kernels),
    };

    if (gpu_pick(&gpu, NULL) != FL_OK || gpu->list(all, &n_devices, NULL) != FL_OK || n_devices < 2)
        return 1;
    return t_run("sets", tests);
}
