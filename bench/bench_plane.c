/* bench_plane - whole updates of weights on devices: trainer, engines and driver, a process each
 *
 *     bench_plane [--tiny|--big] [--rounds N]   times, one device, then two where there are two
 *     bench_plane --faults [--tiny]             two engines; one is killed or stopped in each phase
 *
 * The engines are on the second device where there is one. wall is what the driver waits for, from
 * its call to the last commit; the phases are its report's. limit: one kernel that copies the same
 * bytes (one device), one peer copy (two). JSON lines. Exit 1: something did not hold. */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "bench/shapes.h"
#include "common/base/fault.h"
#include "common/base/id.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "transport/link/dev_priv.h"
#include "transport/xfer/coord.h"
#include "transport/xfer/sink.h"
#include "transport/xfer/source.h"

enum { WARM = 3, ROUNDS_MAX = 4096, ENGINES_MAX = 2, CHILD_FD = 3, LINK_WAIT_MS = 20000 };
extern char **environ;
static struct fl_err err;
static struct fl_loop *loop;
static const struct gpu_ops *gpu;

static void must(enum fl_status st, const char *what)
{
    if (st == FL_OK)
        return;
    fprintf(stderr, "bench_plane: %s: %s\n", what, err.text);
    exit(1);
}

/* ==== what all processes know ================================================================= */
struct seat { /* a process of the plane; travels to it whole */
    struct xfer_member me;
    struct link_place place, other; /* other: of the engines, for the trainer's limit */
    struct shape shape;
};
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
    must(xfer_manifest_seal(&x->m, &err), "manifest");
}

static struct xfer_port *port;
static struct model model;

static void on_accepted(void *arg, struct stream *s_take)
{
    struct call_peer *p;

    (void)arg;
    must(call_peer_create(s_take, xfer_methods, XFER_N_METHODS, NULL, port, &p, &err), "accept");
}

/* The one giver that there is: reached once. */
static void dial(void *arg, const struct xfer_member *who, struct xfer_dial *d)
{
    static struct call_peer *peer;
    static struct fl_seat_ref to;
    struct stream_to st = { .target = who->where, .again = true };
    struct wire_hello me = { .role = "worker" };
    struct stream *s;

    (void)arg;
    if (!peer || !fl_seat_ref_same(&to, &who->who)) {
        must(stream_connect(loop, &stream_sock, &st, &me, NULL, NULL, &s, &err), "connect");
        must(call_peer_create(s, NULL, 0, NULL, NULL, &peer, &err), "connect");
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
    struct xfer_dialer d = { NULL, dial, undial };
    struct stream_to at = { .target = s->me.where };
    struct wire_hello me = { .role = "worker", .seat = s->me.who };
    struct stream_server *server;

    must(fl_loop_create(NULL, &loop, &err), "loop");
    must(gpu_pick(&gpu, &err), "devices");
    must(xfer_port_create(loop, &d, &port, &err), "port");
    must(stream_listen(loop, &stream_sock, &at, &me, on_accepted, NULL, &server, &err),
         s->me.where);
    model_make(&model, s);
}

/* ==== an engine =============================================================================== */
static const struct seat *engine_seat;

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
    fl_post(loop, flipped);
}

static void resume(void *arg)
{
    (void)arg;
}

static int engine(const struct seat *s)
{
    static const struct xfer_sink_ops ops = {
        room, done_with, pause_now, flip, resume, NULL, NULL
    };
    struct xfer_sink_opts o = {
        .set = "policy", .me = s->me, .place = s->place, .slots = XFER_TWO_SLOTS, .ops = &ops
    };
    struct xfer_sink *sink;

    engine_seat = s;
    serve(s);
    o.want = &model.m;
    must(xfer_sink_create(loop, port, &o, &sink, &err), "sink");
    (void)!write(CHILD_FD, "r", 1);
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

static void told(enum fl_status st)
{
    unsigned char b = (unsigned char)st;

    (void)!write(CHILD_FD, &b, 1);
}

static void on_published(struct xfer_wait *w, enum fl_status st, const struct fl_err *e)
{
    (void)w;
    (void)e;
    told(st);
}

static void publish(void)
{
    const struct link_mem *at = xfer_source_data(source, NULL);
    uint64_t mark = next_version * 0x9e3779b97f4a7c15ull;

    must(link_mem_write(at, 4096, &mark, sizeof(mark), &err), "write");
    waited.done = on_published;
    must(xfer_source_publish(source, next_version, &waited, &err), "publish");
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
    if (read(CHILD_FD, &what, 1) != 1)
        _exit(0);
    next_version++;
    if (!begun) {
        begun = true;
        publish();
        return;
    }
    waited.done = on_begun;
    must(xfer_source_begin(source, next_version, fl_loop_now_ns(loop) + 30000000000ull, &waited,
                           &err),
         "begin");
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

    must(link_dev_get(s->place.gpu_uuid, &d, &err), "device");
    must(dev_table_make(d, d->stream, &all, 1, DEV_MOVE, &t, &err), "table");
    if (!same) {
        must(link_dev_get(s->other.gpu_uuid, &far, &err), "device");
        must(gpu->peer(d->g, far->g, &err), "peer");
        must(gpu->alloc(far->g, model.bytes, &to, &err), "target");
    }
    must(gpu->event(d->g, &a, &err), "event");
    must(gpu->event(d->g, &b, &err), "event");
    for (int i = 0; i < 8; i++) {
        struct kernel_move_args m = {
            .pieces = t.addr, .n = t.n, .from = dev_addr(slots[0].addr), .to = to
        };

        must(gpu->event_record(a, d->stream, &err), "event");
        if (same)
            must(kernel_move_start(gpu, d->g, d->stream, &m, &err), "kernel");
        else
            must(gpu->copy(d->stream, to, m.from, model.bytes, &err), "copy");
        must(gpu->event_record(b, d->stream, &err), "event");
        must(gpu->event_sync(b, &err), "event");
        must(gpu->event_ms(a, b, &ms, &err), "event");
        best = ms < best ? ms : best;
    }
    if (!same)
        gpu->free(far->g, to);
    dev_table_free(d, &t);
    gpu->event_free(a);
    gpu->event_free(b);
    return (double)best;
}

static int trainer(const struct seat *s)
{
    struct xfer_source_opts o = { .set = "policy", .me = s->me, .place = s->place, .n_slots = 2 };
    enum { PART = 16 << 20 };
    uint64_t *part = malloc(PART), x = 88172645463325252ull;
    double limit;

    serve(s);
    for (unsigned i = 0; i < 2; i++)
        must(link_dev_alloc(s->place.gpu_uuid, model.bytes, &slots[i], &err), "slot");
    for (size_t i = 0; i < PART / 8; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        part[i] = x;
    }
    for (uint64_t at = 0; at < model.bytes; at += PART)
        for (unsigned i = 0; i < 2; i++)
            must(link_mem_write(&slots[i], at, part,
                                model.bytes - at < PART ? model.bytes - at : PART, &err),
                 "fill");
    free(part);
    limit = copy_limit_ms(s);
    memcpy(o.slot, slots, sizeof(slots));
    o.have = &model.m;
    must(xfer_source_create(loop, port, &o, &source, &err), "source");
    must(fl_watch_create(loop, CHILD_FD, 1, on_order, NULL, &orders, &err), "orders");
    (void)!write(CHILD_FD, "r", 1);
    (void)!write(CHILD_FD, &limit, sizeof(limit));
    fl_loop_run(loop);
    return 0;
}

/* ==== the driver ============================================================================== */
struct kid {
    struct seat seat;
    int fd;
    pid_t pid;
    struct call_peer *peer;
};
struct driver {
    struct kid trainer, engines[ENGINES_MAX];
    unsigned n_engines;
    struct xfer_coord *coord;
    struct xfer_run run;
    bool running;
    enum fl_status st;
    struct xfer_report rep;
    struct fl_err why;
    uint64_t version;
    double limit_ms;
};
static struct driver d;
static char folder[64] = "/tmp/bench-plane-XXXXXX";
static unsigned wrong;

static void start_kid(struct kid *k, const char *role, const char *fault)
{
    char *argv[] = { "bench_plane", (char *)(uintptr_t)role, NULL }, spec[100];
    posix_spawn_file_actions_t files;
    int ends[2];
    char ready;

    snprintf(spec, sizeof(spec), "%s", fault ? fault : "");
    setenv("FURLONG_FAULT", spec, 1);
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        exit(1);
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, ends[1], CHILD_FD);
    if (posix_spawn(&k->pid, "/proc/self/exe", &files, NULL, argv, environ) != 0)
        exit(1);
    posix_spawn_file_actions_destroy(&files);
    close(ends[1]);
    k->fd = ends[0];
    if (write(k->fd, &k->seat, sizeof(k->seat)) != (ssize_t)sizeof(k->seat) ||
        read(k->fd, &ready, 1) != 1) {
        fprintf(stderr, "bench_plane: %s does not start\n", role);
        exit(1);
    }
}

static void reach(struct kid *k)
{
    struct stream_to st = { .target = k->seat.me.where, .again = true };
    struct wire_hello me = { .role = "worker" };
    struct stream *s;

    must(stream_connect(loop, &stream_sock, &st, &me, NULL, NULL, &s, &err), "connect");
    must(call_peer_create(s, NULL, 0, NULL, NULL, &k->peer, &err), "connect");
}

static void seat_of(struct kid *k, bool is_trainer, unsigned i, const struct link_place *place,
                    const struct link_place *other, const struct shape *shape)
{
    struct seat *s = &k->seat;

    s->shape = *shape;
    s->place = *place;
    s->other = *other;
    s->me.who.id.b[0] = is_trainer ? 1 : 2;
    s->me.who.id.b[1] = (uint8_t)i;
    s->me.who.attempt++;
    s->me.party = i;
    snprintf(s->me.name, sizeof(s->me.name), "%s %u", is_trainer ? "trainer" : "rollout", i);
    snprintf(s->me.where, sizeof(s->me.where), "unix:%s/%s-%u-%u", folder, is_trainer ? "t" : "e",
             i, s->me.who.attempt);
}

static void add_engine(unsigned i, const char *fault)
{
    struct kid *k = &d.engines[i];

    seat_of(k, false, i, &k->seat.place, &k->seat.other, &k->seat.shape);
    start_kid(k, "--engine", fault);
    reach(k);
    must(xfer_coord_add_engine(d.coord, k->peer, &k->seat.me, &err), "engine");
}

static void end_kid(struct kid *k)
{
    if (k->pid <= 0)
        return;
    (void)kill(k->pid, SIGKILL); /* ours, and not waited for yet */
    while (waitpid(k->pid, NULL, 0) < 0 && errno == EINTR)
        ;
    close(k->fd);
    k->pid = 0;
    k->fd = -1;
}

static void engine_died(unsigned i, const char *how)
{
    struct kid *k = &d.engines[i];
    struct fl_err why = { 0 };

    end_kid(k);
    fl_fail(&why, FL_UNREACHABLE, "%s", how);
    xfer_coord_gone(d.coord, k->seat.me.who, &why);
    call_peer_destroy(FL_TAKE(k->peer));
}

static void start(const struct shape *shape, const struct link_place *from,
                  const struct link_place *to, unsigned n, const char *fault)
{
    struct xfer_coord_opts o = { .set = "policy", .attempt = 1 };

    d = (struct driver){ .n_engines = n };
    must(fl_loop_create(NULL, &loop, &err), "loop");
    must(xfer_coord_create(loop, &o, &d.coord, &err), "driver");
    seat_of(&d.trainer, true, 0, from, to, shape);
    start_kid(&d.trainer, "--trainer", NULL);
    if (read(d.trainer.fd, &d.limit_ms, sizeof(d.limit_ms)) != (ssize_t)sizeof(d.limit_ms))
        exit(1);
    reach(&d.trainer);
    must(xfer_coord_add_source(d.coord, d.trainer.peer, &d.trainer.seat.me, &err), "trainer");
    for (unsigned i = 0; i < n; i++) {
        d.engines[i].seat.shape = *shape;
        d.engines[i].seat.place = *to;
        add_engine(i, i == 1 ? fault : NULL);
    }
}

static void stop(void)
{
    xfer_coord_destroy(FL_TAKE(d.coord));
    for (unsigned i = 0; i < d.n_engines; i++) {
        call_peer_destroy(FL_TAKE(d.engines[i].peer));
        end_kid(&d.engines[i]);
    }
    call_peer_destroy(FL_TAKE(d.trainer.peer));
    end_kid(&d.trainer);
    fl_loop_destroy(FL_TAKE(loop));
}

static void next_version_of_trainer(void)
{
    unsigned char st = 255;

    if (write(d.trainer.fd, "n", 1) != 1)
        exit(1);
    while (recv(d.trainer.fd, &st, 1, MSG_DONTWAIT) <
           0) /* begin asks the driver: the loop must turn */
        fl_loop_turn(loop, 1);
    if (st != FL_OK) {
        fprintf(stderr, "bench_plane: the trainer has not published: status %u\n", st);
        exit(1);
    }
    d.version++;
}

static void on_run(struct xfer_run *r, enum fl_status st, const struct xfer_report *rep,
                   const struct fl_err *e)
{
    (void)r;
    d.running = false;
    d.st = st;
    d.rep = *rep;
    d.why = *e;
}

/* until: a process that died is noticed, as keepers notice it. */
static enum fl_status update(enum xfer_kind kind, enum xfer_mode mode, unsigned least,
                             unsigned due_ms)
{
    struct xfer_request q = { .kind = kind,
                              .target = { .number = kind == XFER_ADVANCE ? d.version : 0 },
                              .mode = mode,
                              .slots = XFER_TWO_SLOTS,
                              .party = XFER_ALL_PARTIES,
                              .least_engines = least,
                              .due_ns = fl_clock_boot_ns() + due_ms * 1000000ull };

    fl_loop_turn(loop, 0);
    d.run.done = on_run;
    d.running = true;
    must(xfer_start(d.coord, &q, &d.run, &err), "update");
    while (d.running) {
        fl_loop_turn(loop, 1);
        for (unsigned i = 0; i < d.n_engines; i++) {
            siginfo_t si = { 0 };

            if (d.engines[i].pid > 0 &&
                waitid(P_PID, (id_t)d.engines[i].pid, &si, WEXITED | WNOHANG | WNOWAIT) == 0 &&
                si.si_pid)
                engine_died(i, "killed by signal 9");
        }
    }
    return d.st;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static double ms_of(uint64_t ns)
{
    return (double)ns / 1e6;
}

static void times(const char *name, enum xfer_mode mode, unsigned rounds)
{
    double wall[ROUNDS_MAX], move[ROUNDS_MAX], pause[ROUNDS_MAX], cold = 0;
    struct xfer_report rep = { 0 };
    uint64_t began = fl_clock_boot_ns();

    for (int i = -WARM; i < (int)rounds; i++) {
        next_version_of_trainer();
        uint64_t from = fl_clock_boot_ns();
        enum fl_status st = update(XFER_ADVANCE, mode, 0, 60000);
        double took = ms_of(fl_clock_boot_ns() - from);

        if (st != FL_OK) {
            printf("{\"name\":\"update %s %s\",\"failed\":\"%s\"}\n", name, xfer_mode_name(mode),
                   d.why.text);
            wrong++;
            return;
        }
        if (i == -WARM)
            cold = took;
        if (i == -1 && d.rep.other_bytes && ms_of(fl_clock_boot_ns() - began) < LINK_WAIT_MS)
            i--; /* pulled, because the link is still being made: once more */
        if (i < 0)
            continue;
        wall[i] = took;
        move[i] = ms_of(d.rep.move_ns);
        pause[i] = ms_of(d.rep.pause_ns);
        rep = d.rep;
    }
    qsort(wall, rounds, sizeof(*wall), by_value);
    qsort(move, rounds, sizeof(*move), by_value);
    qsort(pause, rounds, sizeof(*pause), by_value);
    printf("{\"name\":\"update %s %s\",\"mode\":\"%s\",\"bytes\":%" PRIu64
           ",\"other_bytes\":%" PRIu64
           ",\"ms\":%.3f,\"max_ms\":%.3f,\"cold_ms\":%.3f,\"move_ms\":%.3f,\"pause_ms\":%.4f,"
           "\"reconcile_ms\":%.3f,"
           "\"plan_ms\":%.3f,\"verify_ms\":%.3f,\"commit_ms\":%.3f,\"predicted_ms\":%.3f,\"limit_"
           "ms\":%.3f,\"ratio\":%.3f}\n",
           name, xfer_mode_name(mode), xfer_mode_name(rep.mode), rep.bytes, rep.other_bytes,
           wall[rounds / 2], wall[rounds - 1], cold, move[rounds / 2], pause[rounds / 2],
           ms_of(rep.reconcile_ns), ms_of(rep.plan_ns), ms_of(rep.verify_ns), ms_of(rep.commit_ns),
           ms_of(rep.predicted_ns), d.limit_ms, wall[rounds / 2] / d.limit_ms);
    fflush(stdout);
}

/* ==== death and silence in each phase ========================================================= */
static void expect(bool holds, const char *fault, const char *what)
{
    if (holds)
        return;
    wrong++;
    printf("# NOT SO: %s: %s (committed %u, left %u: %s)\n", fault, what, d.rep.n_committed,
           d.rep.n_left_behind, d.rep.first_left_behind.text);
}

static void one_fault(const struct shape *s, const struct link_place *from,
                      const struct link_place *to, const char *fault, enum xfer_mode mode)
{
    bool stops = strstr(fault, "stop") != NULL;

    start(s, from, to, 2, fault);
    next_version_of_trainer();
    uint64_t began = fl_clock_boot_ns();

    expect(update(XFER_ADVANCE, mode, 1, 4000) == FL_OK, fault,
           "the update of the other engine succeeds");
    double took = ms_of(fl_clock_boot_ns() - began);

    expect(d.rep.n_committed == 1 && d.rep.n_left_behind == 1, fault,
           "one commits, one is left behind");
    expect(strstr(d.rep.first_left_behind.text, "rollout 1") != NULL, fault,
           "the message names it");
    expect(took < 6000, fault, "inside the deadline");
    printf("{\"name\":\"%s %s\",\"ms\":%.1f,\"says\":\"%.160s\"}\n", xfer_mode_name(mode), fault,
           took, d.rep.first_left_behind.text);
    fflush(stdout);
    if (stops)
        engine_died(1, "killed after it had stopped");
    add_engine(1, NULL); /* the next attempt of it */
    expect(update(XFER_FILL, XFER_AUTO, 0, 20000) == FL_OK && d.rep.n_left_behind == 0, fault,
           "it is filled");
    next_version_of_trainer();
    expect(update(XFER_ADVANCE, mode, 0, 20000) == FL_OK && d.rep.n_committed == 2, fault,
           "the next update reaches both");
    stop();
}

static void faults(const struct shape *s, const struct link_place *from,
                   const struct link_place *to)
{
    static const char *const all[] = { "xfer.pull:1=kill",     "xfer.bucket:1=kill",
                                       "xfer.verified:1=kill", "xfer.pull:1=stop",
                                       "xfer.bucket:1=stop",   "xfer.verified:1=stop" };

    for (size_t i = 0; i < FL_LEN(all); i++)
        one_fault(s, from, to, all[i], XFER_P2P);
}

static void places_of(struct link_place *out, size_t *n)
{
    struct gpu_info all[GPU_MAX];
    struct gpu_found *found;

    *n = GPU_MAX;
    must(gpu_pick(&gpu, &err), "devices");
    must(gpu->list(all, n, &err), "devices");
    found = calloc(*n + 1, sizeof(*found));
    for (size_t i = 0; i < *n; i++)
        found[i] = (struct gpu_found){ .info = all[i],
                                       .opens = true,
                                       .fd_shares = all[i].posix_fd,
                                       .handle_shares = all[i].legacy_ipc,
                                       .peers = ~0ull };
    for (size_t i = 0; i < *n; i++) {
        must(link_place_here(NULL, &out[i], &err), "place");
        must(link_place_device(&out[i], all[i].uuid, found, *n, &err), "place");
    }
    free(found);
}

static int child(const char *role)
{
    static struct seat s;

    must(fl_fault_env(&err), "FURLONG_FAULT");
    if (recv(CHILD_FD, &s, sizeof(s), MSG_WAITALL) != (ssize_t)sizeof(s))
        return 1;
    return strcmp(role, "--trainer") == 0 ? trainer(&s) : engine(&s);
}

int main(int argc, char **argv)
{
    const struct shape *shapes[2] = { &shape_06, NULL };
    static struct link_place places[GPU_MAX];
    unsigned rounds = 20;
    bool with_faults = false;
    size_t n;

    if (argc == 2 && (strcmp(argv[1], "--trainer") == 0 || strcmp(argv[1], "--engine") == 0))
        return child(argv[1]);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--big") == 0)
            shapes[1] = &shape_8;
        else if (strcmp(argv[i], "--tiny") == 0)
            shapes[0] = &shape_tiny;
        else if (strcmp(argv[i], "--thin") == 0)
            shapes[0] = &shape_thin;
        else if (strcmp(argv[i], "--faults") == 0)
            with_faults = true;
        else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc)
            rounds = (unsigned)atoi(argv[++i]);
    }
    rounds = rounds < 1 || rounds > ROUNDS_MAX ? 20 : rounds;
    (void)fl_log_level_set("error", NULL);
    places_of(places, &n);
    if (n == 0) {
        puts("{\"name\":\"bench_plane\",\"skipped\":\"no device\"}");
        return 0;
    }
    if (!mkdtemp(folder))
        return 1;
    const struct link_place *far = n > 1 ? &places[1] : &places[0];

    for (unsigned i = 0; !with_faults && i < 2 && shapes[i]; i++) {
        static const enum xfer_mode one[] = { XFER_COPY, XFER_SHARE },
                                    two[] = { XFER_P2P, XFER_BROADCAST };
        char name[64];

        for (unsigned k = 0; k < 2; k++) {
            start(shapes[i], &places[0], &places[0], 1, NULL);
            snprintf(name, sizeof(name), "%s one device", shapes[i]->name);
            times(name, one[k], rounds);
            stop();
        }
        for (unsigned k = 0; n > 1 && k < (places[0].nccl_version ? 2 : 1); k++) {
            start(shapes[i], &places[0], far, 1, NULL);
            snprintf(name, sizeof(name), "%s two devices", shapes[i]->name);
            times(name, two[k], rounds);
            stop();
        }
    }
    if (with_faults)
        faults(shapes[0], &places[0], far);
    char line[100];

    for (unsigned k = 0; k < 64; k++) { /* sockets of ours */
        snprintf(line, sizeof(line), "%s/t-0-%u", folder, k);
        (void)unlink(line);
        for (unsigned e = 0; e < ENGINES_MAX; e++) {
            snprintf(line, sizeof(line), "%s/e-%u-%u", folder, e, k);
            (void)unlink(line);
        }
    }
    (void)rmdir(folder);
    return wrong != 0;
}
