/* Streams and events of host memory: everything has happened when the call returns, or, with
 * FURLONG_GPU_FAKE_ASYNC, later. */
#include "common/gpu/host_priv.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/fault.h"
#include "common/base/loop.h"
#include "common/gpu/guard.h"

enum fl_status fake_sync(struct gpu *g, struct fl_err *err)
{
    host_settle(g);
    return FL_FAULT("gpu.sync")
               ? fl_fail(err, FL_UNREACHABLE, "device %s fell off the bus", g->info.uuid)
               : FL_OK;
}

enum fl_status fake_stream(struct gpu *g, struct gpu_stream **out, struct fl_err *err)
{
    struct gpu_stream *s = FL_FAULT("gpu.stream") ? NULL : malloc(sizeof(*s));
    bool later = g->counted && later_on();

    if (!s)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a stream");
    *s = (struct gpu_stream){ .raw = { guard_open, guard_close },
                              .g = g,
                              .later = later ? later_create(g->device) : NULL };
    if (later && !s->later) {
        free(s);
        return fl_fail(err, FL_EXHAUSTED, "no thread for a stream");
    }
    s->raw.later = s->later;
    s->raw.then = s->later ? later_do : NULL;
    *out = s;
    return FL_OK;
}

void fake_stream_free(struct gpu_stream *s)
{
    if (s && s->later)
        later_end(s->later);
    free(s);
}

void *fake_stream_raw(struct gpu_stream *s)
{
    return &s->raw;
}

enum fl_status fake_raw_sync(struct gpu *g, void *raw, struct fl_err *err)
{
    (void)raw;
    return fake_sync(g, err);
}

enum fl_status fake_stream_sync(struct gpu_stream *s, struct fl_err *err)
{
    if (s->later)
        later_sync(s->later);
    return FL_FAULT("gpu.sync")
               ? fl_fail(err, FL_UNREACHABLE, "device %s fell off the bus", s->g->info.uuid)
               : FL_OK;
}

/* What may be refused at any call: the device is lost. */
static enum fl_status lost(const struct gpu_stream *s, struct fl_err *err)
{
    return FL_FAULT("gpu.sync")
               ? fl_fail(err, FL_UNREACHABLE, "device %s fell off the bus", s->g->info.uuid)
               : FL_OK;
}

static enum fl_status full(struct fl_err *err)
{
    return fl_fail(err, FL_EXHAUSTED, "no memory for what a stream is to do");
}

enum fl_status fake_stream_wait(struct gpu_stream *s, struct gpu_event *e, struct fl_err *err)
{
    FL_TRY(lost(s, err));
    return !s->later || later_wait(s->later, e->later) ? FL_OK : full(err);
}

enum fl_status fake_event(struct gpu *g, struct gpu_event **out, struct fl_err *err)
{
    struct gpu_event *e = FL_FAULT("gpu.event_made") ? NULL : calloc(1, sizeof(*e));
    bool later = g->counted && later_on();

    if (e && later && !(e->later = later_event_create())) {
        free(e);
        e = NULL;
    }
    if (!e)
        return fl_fail(err, FL_EXHAUSTED, "no memory for an event");
    *out = e;
    return FL_OK;
}

void fake_event_free(struct gpu_event *e)
{
    if (e && e->later)
        later_event_free(e->later);
    free(e);
}

enum fl_status fake_event_record(struct gpu_event *e, struct gpu_stream *s, struct fl_err *err)
{
    e->at_ns = fl_clock_boot_ns();
    FL_TRY(lost(s, err));
    return !s->later || later_record(s->later, e->later) ? FL_OK : full(err);
}

enum fl_status fake_event_done(struct gpu_event *e, struct fl_err *err)
{
    return FL_FAULT("gpu.slow") || (e->later && !later_event_done(e->later)) ? FL_AGAIN
           : FL_FAULT("gpu.event") ? fl_fail(err, FL_UNREACHABLE, "device lost")
                                   : FL_OK;
}

enum fl_status fake_event_sync(struct gpu_event *e, struct fl_err *err)
{
    (void)err;
    if (e->later)
        later_event_sync(e->later);
    return FL_OK;
}

static uint64_t event_ns(const struct gpu_event *e)
{
    return e->later ? later_event_ns(e->later) : e->at_ns;
}

enum fl_status fake_event_ms(struct gpu_event *from, struct gpu_event *to, float *ms,
                             struct fl_err *err)
{
    (void)err;
    *ms = (float)(event_ns(to) - event_ns(from)) / 1e6f;
    return FL_OK;
}

/* ==== work ==== */
struct copying {
    uint64_t to, from, bytes;
};

static void run_copy(void *arg)
{
    const struct copying *c = arg;

    guard_open();
    memmove((void *)(uintptr_t)c->to, (const void *)(uintptr_t)c->from, c->bytes);
    guard_close();
}

struct filling {
    uint64_t to, bytes;
    uint8_t value;
};

static void run_fill(void *arg)
{
    const struct filling *f = arg;

    guard_open();
    memset((void *)(uintptr_t)f->to, f->value, f->bytes);
    guard_close();
}

struct running {
    const struct gpu_twin *twin;
    uint32_t grid, block;
    uint64_t params[GPU_PARAMS];
};
_Static_assert(sizeof(struct running) <= LATER_ARG, "fits");

static void run_twin(void *arg)
{
    struct running *r = arg;
    void *params[GPU_PARAMS];

    for (unsigned i = 0; i < GPU_PARAMS; i++)
        params[i] = &r->params[i];
    guard_open();
    r->twin->run(r->grid, r->block, params);
    guard_close();
}

static enum fl_status give(struct gpu_stream *s, void (*run)(void *), void *arg, size_t bytes,
                           struct fl_err *err)
{
    if (s->later)
        return later_do(s->later, run, arg, bytes) ? FL_OK : full(err);
    run(arg);
    return FL_OK;
}

enum fl_status fake_copy(struct gpu_stream *s, uint64_t to, uint64_t from, uint64_t bytes,
                         struct fl_err *err)
{
    struct copying c = { to, from, bytes };

    if (FL_FAULT("gpu.copy"))
        return fl_fail(err, FL_UNREACHABLE, "device %s: copy of %llu bytes failed", s->g->info.uuid,
                       (unsigned long long)bytes);
    return give(s, run_copy, &c, sizeof(c), err);
}

enum fl_status fake_fill(struct gpu_stream *s, uint64_t to, uint8_t value, uint64_t bytes,
                         struct fl_err *err)
{
    struct filling f = { to, bytes, value };

    if (FL_FAULT("gpu.fill"))
        return fl_fail(err, FL_UNREACHABLE, "device %s: fill of %llu bytes failed", s->g->info.uuid,
                       (unsigned long long)bytes);
    return give(s, run_fill, &f, sizeof(f), err);
}

/* The first launch of a kernel loads its code, which waits for the device. */
static void load_once(struct gpu_stream *s, size_t twin)
{
    static _Atomic uint64_t loaded[GPU_MAX]; /* a bit a twin */

    if (s->later && !(atomic_fetch_or(&loaded[s->g->device], 1ull << twin) >> twin & 1))
        host_settle(s->g);
}

enum fl_status fake_launch(struct gpu_stream *s, const struct gpu_launch *l, struct fl_err *err)
{
    size_t i = 0;

    if (FL_FAULT("gpu.launch"))
        return fl_fail(err, FL_UNREACHABLE, "device %s: kernel %s failed", s->g->info.uuid,
                       l->kernel);
    while (i < gpu_code.n_twins && strcmp(gpu_code.twins[i].name, l->kernel) != 0)
        i++;
    if (i == gpu_code.n_twins)
        return fl_fail(err, FL_UNSUPPORTED, "kernel %s has no plain twin", l->kernel);
    struct running r = { &gpu_code.twins[i], l->grid, l->block, { 0 } };

    for (unsigned k = 0; k < GPU_PARAMS; k++)
        memcpy(&r.params[k], l->params[k], gpu_code.twins[i].param_bytes[k]);
    load_once(s, i);
    return give(s, run_twin, &r, sizeof(r), err);
}
