/* common/gpu/host_priv.h - host memory with the face of a device: its table (host.c) and its
 * streams (host_stream.c) */
#pragma once
#include "common/gpu/fake.h"
#include "common/gpu/gpu_priv.h"
#include "common/gpu/later.h"

struct gpu {
    struct gpu_info info;
    struct block *blocks;
    bool counted;  /* against the fake device's memory */
    size_t device; /* of the fake's, in the machine's order */
};
struct gpu_stream {
    struct fake_stream raw; /* first: what libraries are given */
    struct gpu *g;
    struct later *later; /* NULL: everything has happened when the call returns */
};
struct gpu_event {
    struct later_event *later;
    uint64_t at_ns;
};
/* As calls that wait for the whole device. */
static inline void host_settle(const struct gpu *g)
{
    if (g->counted && later_on())
        later_sync_all(g->device);
}
enum fl_status fake_sync(struct gpu *g, struct fl_err *err);
enum fl_status fake_raw_sync(struct gpu *g, void *raw, struct fl_err *err);
enum fl_status fake_stream(struct gpu *g, struct gpu_stream **out, struct fl_err *err);
void fake_stream_free(struct gpu_stream *s);
void *fake_stream_raw(struct gpu_stream *s);
enum fl_status fake_stream_sync(struct gpu_stream *s, struct fl_err *err);
enum fl_status fake_stream_wait(struct gpu_stream *s, struct gpu_event *e, struct fl_err *err);
enum fl_status fake_event(struct gpu *g, struct gpu_event **out, struct fl_err *err);
void fake_event_free(struct gpu_event *e);
enum fl_status fake_event_record(struct gpu_event *e, struct gpu_stream *s, struct fl_err *err);
enum fl_status fake_event_done(struct gpu_event *e, struct fl_err *err);
enum fl_status fake_event_sync(struct gpu_event *e, struct fl_err *err);
enum fl_status fake_event_ms(struct gpu_event *from, struct gpu_event *to, float *ms,
                             struct fl_err *err);
enum fl_status fake_copy(struct gpu_stream *s, uint64_t to, uint64_t from, uint64_t bytes,
                         struct fl_err *err);
enum fl_status fake_fill(struct gpu_stream *s, uint64_t to, uint8_t value, uint64_t bytes,
                         struct fl_err *err);
enum fl_status fake_launch(struct gpu_stream *s, const struct gpu_launch *l, struct fl_err *err);
