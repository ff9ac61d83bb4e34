#include "bench/plane_seats.h"
#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "bench/must.h"
#include "common/base/fault.h"
#include "common/base/id.h"
#include "transport/link/dev_priv.h"
#include "transport/xfer/sink.h"
#include "transport/xfer/source.h"

static struct fl_err err;
static struct fl_loop *loop;
static const struct gpu_ops *gpu;

/* ==== what both know ========================================================================== */
struct model {
    struct xfer_tensor tensors[SHAPES_MAX];
    struct xfer_piece pieces[SHAPES_MAX];
    char names[SHAPES_MAX][16];
    struct xfer_manifest m;
    uint64_t bytes;
};

static void model_make(struct model *x, const struct seat *s)
{
    uint64_t size[SHAPES_MAX];
    size_t n = shape_tensors(&s->shape, size);

    x->bytes = 0;
    for (uint32_t i = 0; i < n; i++) {
        snprintf(x->names[i], sizeof(x->names[0]), "t%03u", i);
        x->tensors[i] = (struct xfer_tensor){ x->names[i], FL_BF16, 1, { size[i] / 2 } };
        x->pieces[i] = (struct xfer_piece){ i, 0, x->bytes, xfer_box_whole(&x->tensors[i]) };
        x->bytes += (size[i] + SHAPES_ALIGN - 1) / SHAPES_ALIGN * SHAPES_ALIGN;
    }
    x->m = (struct xfer_manifest){ .who = s->me.who,
                                   .party = s->me.party,
                                   .tensors = x->tensors,
                                   .pieces = x->pieces,
                                   .mem_bytes = &x->bytes,
                                   .n_tensors = n,
                                   .n_pieces = n,
                                   .n_mems = 1 };
    must(xfer_manifest_seal(&x->m, &err));
}

static struct xfer_port *port;
static struct model model;

static void on_accepted(void *arg, struct stream *s_take)
{
    struct call_peer *p;

    (void)arg;
    must(call_peer_create(s_take, xfer_methods, XFER_N_METHODS, NULL, port, &p, &err));
}

/* The one giver that there is: reached once. */
static void dial(void *arg, const struct xfer_member *who, struct xfer_dial *d)
{
    static struct call_peer *peer;
    static struct fl_seat_ref to;
    const char *via = arg;
    struct stream_to st = { .target = via[0] ? via : who->where, .again = true };
    struct wire_hello me = { .role = "worker" };
    struct stream *s;

    if (!peer || !fl_seat_ref_same(&to, &who->who)) {
        must(stream_connect(loop, &stream_sock, &st, &me, NULL, NULL, &s, &err));
        must(call_peer_create(s, NULL, 0, NULL, NULL, &peer, &err));
        to = who->who;
    }
    d->done(d, FL_OK, peer, NULL);
}

static void undial(void *arg, struct xfer_dial *d)
{
    (void)arg;
    (void)d;
}

static void serve(const struct seat *s)
{
    struct xfer_dialer d = { (void *)(uintptr_t)s->via, dial, undial };
    struct stream_to at = { .target = s->at };
    struct wire_hello me = { .role = "worker", .seat = s->me.who };
    struct stream_server *server;

    must(fl_loop_create(NULL, &loop, &err));
    must(gpu_pick(&gpu, &err));
    must(xfer_port_create(loop, &d, &port, &err));
    must(stream_listen(loop, &stream_sock, &at, &me, on_accepted, NULL, &server, &err));
    model_make(&model, s);
}

/* ==== what is seen of a process =============================================================== */
void plane_rss(struct plane_seen *out)
{
    char line[128];
    FILE *f = fopen("/proc/self/status", "r");
    DIR *d = opendir("/proc/self/fd");

    while (f && fgets(line, sizeof(line), f))
        (void)sscanf(line, "VmRSS: %" SCNu64, &out->rss_kib);
    out->fds = 0;
    while (d && readdir(d))
        out->fds++;
    if (f)
        fclose(f);
    if (d)
        closedir(d);
}

static void look(const struct seat *s, struct plane_seen *out)
{
    struct link_dev *d;
    uint64_t free_bytes = 0, all = 0;

    plane_rss(out);
    must(link_dev_get(s->place.gpu_uuid, &d, &err));
    (void)gpu->memory(d->g, &free_bytes, &all, NULL);
    out->device_used_bytes = all - free_bytes;
}

static void tell(const struct plane_seen *seen)
{
    if (send(PLANE_FD, seen, sizeof(*seen), MSG_NOSIGNAL) != (ssize_t)sizeof(*seen))
        _exit(1);
}

/* An order that is the same for all: it is done. */
static bool order_of_all(char what)
{
    char spec[PLANE_SPEC];

    if (what != PLANE_FAULT)
        return false;
    if (recv(PLANE_FD, spec, sizeof(spec), MSG_WAITALL) != (ssize_t)sizeof(spec))
        _exit(1);
    must(fl_fault_set(spec, &err));
    if (send(PLANE_FD, "f", 1, MSG_NOSIGNAL) != 1)
        _exit(1);
    return true;
}

/* ==== an engine =============================================================================== */
static const struct seat *engine_seat;

static uint64_t flipped_ns;

static struct link_mem kept; /* the slot that was given back: the next one */

static enum fl_status room(void *arg, uint64_t bytes, struct link_mem *out, struct fl_err *e)
{
    (void)arg;
    if (kept.bytes == bytes) {
        *out = kept;
        kept = (struct link_mem){ 0 };
        return FL_OK;
    }
    return link_dev_alloc(engine_seat->place.gpu_uuid, bytes, out, e);
}

static void done_with(void *arg, struct link_mem *mem)
{
    (void)arg;
    link_dev_free(&kept);
    kept = *mem;
}

static void pause_now(void *arg, struct fl_task *paused)
{
    (void)arg;
    fl_post(loop, paused);
}

static void flip(void *arg, const struct xfer_version *now, const struct link_mem *mem,
                 struct fl_task *flipped)
{
    (void)arg, (void)now, (void)mem;
    (void)FL_FAULT("plane.flip"); /* for kill and stop */
    flipped_ns = fl_clock_boot_ns();
    fl_post(loop, flipped);
}

static void resume(void *arg)
{
    (void)arg;
}

static struct link_window *window; /* where captured graphs would read */

static enum fl_status can_show(void *arg, const struct link_mem *comes, struct fl_err *e)
{
    (void)arg;
    return link_window_can(window, comes, e);
}

static enum fl_status show(void *arg, const struct link_mem *comes, struct link_mem *seen,
                           struct fl_err *e)
{
    (void)arg;
    FL_TRY(link_window_show(window, comes, false, e));
    seen->addr = link_window_data(window);
    return FL_OK;
}

/* The root digest of what lies where the engine reads, made from the bytes alone. */
static void root_of(const struct link_mem *mem, uint64_t root[2])
{
    static struct link_seg segs[SHAPES_MAX];
    static uint64_t digests[SHAPES_MAX][2];
    size_t n = model.m.n_pieces;

    for (size_t i = 0; i < n; i++)
        segs[i] = (struct link_seg){ .from_off = model.pieces[i].off,
                                     .run_bytes = xfer_tensor_bytes(&model.tensors[i]),
                                     .rows = 1,
                                     .tensor = (uint32_t)i };
    memset(digests, 0, sizeof(digests));
    root[0] = root[1] = 0;
    must(link_mem_digest(mem, segs, n, true, digests, &err));
    for (uint32_t i = 0; i < n; i++)
        xfer_digest_fold(root, digests[i], i);
}

static struct xfer_sink *sink;

static void engine_on_order(void *arg, unsigned events)
{
    struct plane_seen seen = { .flipped_ns = flipped_ns };
    const struct link_mem *mem;
    char what;

    (void)arg, (void)events;
    if (read(PLANE_FD, &what, 1) != 1)
        _exit(0);
    if (order_of_all(what))
        return;
    xfer_sink_says(sink, seen.says, sizeof(seen.says));
    mem = xfer_sink_data(sink, &seen.version);
    if (mem) {
        seen.addr = mem->addr;
        root_of(mem, seen.root);
    }
    look(engine_seat, &seen);
    tell(&seen);
}

int plane_engine(const struct seat *s)
{
    static const struct xfer_sink_ops ops = { .room = room,
                                              .done_with = done_with,
                                              .pause = pause_now,
                                              .flip = flip,
                                              .resume = resume },
                                      fixed = { .room = room,
                                                .done_with = done_with,
                                                .pause = pause_now,
                                                .flip = flip,
                                                .resume = resume,
                                                .can_show = can_show,
                                                .show = show };
    struct xfer_sink_opts o = { .set = "policy",
                                .me = s->me,
                                .place = s->place,
                                .slots = XFER_TWO_SLOTS,
                                .ops = s->fixed ? &fixed : &ops };
    struct fl_watch *orders;

    engine_seat = s;
    serve(s);
    o.want = &model.m;
    if (s->fixed)
        must(link_window_create(s->place.gpu_uuid, model.bytes, &window, &err));
    must(xfer_sink_create(loop, port, &o, &sink, &err));
    must(fl_watch_create(loop, PLANE_FD, 1, engine_on_order, NULL, &orders, &err));
    (void)!write(PLANE_FD, "r", 1);
    fl_loop_run(loop); /* until it is killed */
    return 0;
}

/* ==== the trainer ============================================================================= */
static struct xfer_source *source;
static struct link_mem slots[2];
static struct xfer_wait waited;
static struct fl_watch *orders;
static uint64_t next_version;
static bool begun;
static uint64_t publish_from_ns, publish_ns;
static const struct seat *trainer_seat;

static void told(enum fl_status st)
{
    unsigned char b = (unsigned char)st;

    (void)!write(PLANE_FD, &b, 1);
}

static void on_published(struct xfer_wait *w, enum fl_status st, const struct fl_err *e)
{
    (void)w;
    (void)e;
    publish_ns = fl_clock_boot_ns() - publish_from_ns;
    told(st);
}

static void publish(void)
{
    const struct link_mem *at = xfer_source_data(source, NULL);
    uint64_t mark = next_version * 0x9e3779b97f4a7c15ull;

    must(link_mem_write(at, 4096, &mark, sizeof(mark), &err));
    waited.done = on_published;
    publish_from_ns = fl_clock_boot_ns();
    must(xfer_source_publish(source, next_version, &waited, &err));
}

static void on_begun(struct xfer_wait *w, enum fl_status st, const struct fl_err *e)
{
    (void)w;
    if (st == FL_OK)
        publish();
    else {
        fprintf(stderr, "bench_plane: begin: %s\n", e->text);
        told(st);
    }
}

static void on_order(void *arg, unsigned events)
{
    char what;

    (void)arg, (void)events;
    if (read(PLANE_FD, &what, 1) != 1)
        _exit(0);
    if (order_of_all(what))
        return;
    if (what == PLANE_LOOK) {
        struct plane_seen seen = { .publish_ns = publish_ns };

        look(trainer_seat, &seen);
        tell(&seen);
        return;
    }
    if (!begun) {
        begun = true;
        next_version = trainer_seat->first_version;
        publish();
        return;
    }
    next_version++;
    waited.done = on_begun;
    must(xfer_source_begin(source, next_version, fl_loop_now_ns(loop) + 30000000000ull, &waited,
                           &err));
}

static double copy_limit_ms(const struct seat *s)
{
    struct link_dev *d, *far;
    struct gpu_event *a, *b;
    uint64_t to = dev_addr(slots[1].addr);
    bool same = strcmp(s->place.gpu_uuid, s->other.gpu_uuid) == 0;
    struct link_seg all = { .run_bytes = model.bytes, .rows = 1 };
    struct dev_table t;
    float ms, best = 1e9f;

    must(link_dev_get(s->place.gpu_uuid, &d, &err));
    must(dev_table_make(d, d->stream, &all, 1, DEV_MOVE, &t, &err));
    if (!same) {
        must(link_dev_get(s->other.gpu_uuid, &far, &err));
        must(gpu->peer(d->g, far->g, &err));
        must(gpu->alloc(far->g, model.bytes, &to, &err));
    }
    must(gpu->event(d->g, &a, &err));
    must(gpu->event(d->g, &b, &err));
    for (int i = 0; i < 8; i++) {
        struct kernel_move_args m = {
            .pieces = t.addr, .n = t.n, .from = dev_addr(slots[0].addr), .to = to
        };

        must(gpu->event_record(a, d->stream, &err));
        if (same)
            must(kernel_move_start(gpu, d->g, d->stream, &m, &err));
        else
            must(gpu->copy(d->stream, to, m.from, model.bytes, &err));
        must(gpu->event_record(b, d->stream, &err));
        must(gpu->event_sync(b, &err));
        must(gpu->event_ms(a, b, &ms, &err));
        best = ms < best ? ms : best;
    }
    if (!same)
        gpu->free(far->g, to);
    dev_table_free(d, &t);
    gpu->event_free(a);
    gpu->event_free(b);
    return (double)best;
}

int plane_trainer(const struct seat *s)
{
    struct xfer_source_opts o = { .set = "policy", .me = s->me, .place = s->place, .n_slots = 2 };
    enum { PART = 16 << 20 };
    uint64_t *part = malloc(PART), x = 88172645463325252ull;
    double limit;

    trainer_seat = s;
    serve(s);
    for (unsigned i = 0; i < 2; i++)
        must(link_dev_alloc(s->place.gpu_uuid, model.bytes, &slots[i], &err));
    for (size_t i = 0; i < PART / 8; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        part[i] = x;
    }
    for (uint64_t at = 0; at < model.bytes; at += PART)
        for (unsigned i = 0; i < 2; i++)
            must(link_mem_write(&slots[i], at, part,
                                model.bytes - at < PART ? model.bytes - at : PART, &err));
    free(part);
    limit = copy_limit_ms(s);
    memcpy(o.slot, slots, sizeof(slots));
    o.have = &model.m;
    must(xfer_source_create(loop, port, &o, &source, &err));
    must(fl_watch_create(loop, PLANE_FD, 1, on_order, NULL, &orders, &err));
    (void)!write(PLANE_FD, "r", 1);
    (void)!write(PLANE_FD, &limit, sizeof(limit));
    fl_loop_run(loop);
    return 0;
}
