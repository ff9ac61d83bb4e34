/* bench_plane - whole updates of weights on devices: trainer, engines and driver, a process each
 *
 *     bench_plane [--tiny|--thin|--big] [--rounds N] [--only MODE]
 *         times, one device, then two where there are two; only MODE, or fixed-MODE
 *     bench_plane --updates N [--tiny|--thin|--big]
 *         so many of each; roots from memory, what is held
 *     bench_plane --faults [--tiny]
 *         two engines; one is killed or stopped in each phase
 *
 * The engines are on the second device where there is one. ms is what the driver waits for, from
 * its call to the last commit, one update after the other; idle_ms the same after 20 ms in which
 * everyone slept. link_ms: what the device's events say that the bytes took, gathered and digested
 * on the way. pause_ms: of the engine, from the last step to its new addresses. publish_ms: the
 * trainer's digests, before the call. limit: one kernel that copies the same bytes (one device),
 * one peer copy (two). cold_ms: the first update of a run. JSON lines. Exit 1: something did not
 * hold. */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "bench/median.h"
#include "bench/plane_seats.h"
#include "common/base/fault.h"
#include "common/base/id.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "transport/link/dev_priv.h"
#include "transport/xfer/coord.h"

enum { WARM = 3, ROUNDS_MAX = 4096, ENGINES_MAX = 2, LINK_WAIT_MS = 20000 };
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
    posix_spawn_file_actions_adddup2(&files, ends[1], PLANE_FD);
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

static bool fixed; /* engines whose addresses stay */

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
        d.engines[i].seat.fixed = fixed;
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

static double ms_of(uint64_t ns)
{
    return (double)ns / 1e6;
}

static void look(struct kid *k, struct plane_seen *out)
{
    char what = PLANE_LOOK;

    if (write(k->fd, &what, 1) != 1 ||
        recv(k->fd, out, sizeof(*out), MSG_WAITALL) != (ssize_t)sizeof(*out)) {
        fprintf(stderr, "bench_plane: %s does not answer\n", k->seat.me.name);
        exit(1);
    }
}

enum { WALL, IDLE, MOVE, LINK, PAUSE, PUBLISH, RECONCILE, PLAN, VERIFY, COMMIT, COLUMNS };
static const char *const columns[COLUMNS] = { "ms",        "idle_ms",    "move_ms",      "link_ms",
                                              "pause_ms",  "publish_ms", "reconcile_ms", "plan_ms",
                                              "verify_ms", "commit_ms" };
static double table[COLUMNS][ROUNDS_MAX];

static double one_update(enum xfer_mode mode)
{
    uint64_t from = fl_clock_boot_ns();

    if (update(XFER_ADVANCE, mode, 0, 60000) != FL_OK)
        return -1;
    return ms_of(fl_clock_boot_ns() - from);
}

/* All wait for nothing for a while, as between steps of a run: they sleep when the update comes. */
static double idle_update(enum xfer_mode mode)
{
    next_version_of_trainer();
    nanosleep(&(struct timespec){ .tv_nsec = 20000000 }, NULL);
    return one_update(mode);
}

static void note_round(unsigned i)
{
    struct plane_seen t;

    look(&d.trainer, &t);
    table[MOVE][i] = ms_of(d.rep.move_ns);
    table[LINK][i] = ms_of(d.rep.link_ns);
    table[PAUSE][i] = ms_of(d.rep.pause_ns);
    table[PUBLISH][i] = ms_of(t.publish_ns);
    table[RECONCILE][i] = ms_of(d.rep.reconcile_ns);
    table[PLAN][i] = ms_of(d.rep.plan_ns);
    table[VERIFY][i] = ms_of(d.rep.verify_ns);
    table[COMMIT][i] = ms_of(d.rep.commit_ns);
}

static void say_times(const char *name, enum xfer_mode mode, unsigned rounds, double cold)
{
    double max[COLUMNS] = { 0 }, mid[COLUMNS];

    for (unsigned k = 0; k < COLUMNS; k++) {
        mid[k] = median(table[k], rounds);
        max[k] = table[k][rounds - 1];
    }
    printf("{\"name\":\"update %s %s\",\"mode\":\"%s\",\"bytes\":%" PRIu64
           ",\"other_bytes\":%" PRIu64 ",\"cold_ms\":%.3f",
           name, xfer_mode_name(mode), xfer_mode_name(d.rep.mode), d.rep.bytes, d.rep.other_bytes,
           cold);
    for (unsigned k = 0; k < COLUMNS; k++)
        printf(",\"%s\":%.4f", columns[k], mid[k]);
    printf(",\"max_ms\":%.3f,\"max_idle_ms\":%.3f,\"max_pause_ms\":%.4f,\"predicted_ms\":%.3f,"
           "\"limit_ms\":%.3f,\"ratio\":%.3f,\"link_ratio\":%.3f}\n",
           max[WALL], max[IDLE], max[PAUSE], ms_of(d.rep.predicted_ns), d.limit_ms,
           mid[WALL] / d.limit_ms, mid[LINK] / d.limit_ms);
    fflush(stdout);
}

static void times(const char *name, enum xfer_mode mode, unsigned rounds)
{
    double cold = 0;
    uint64_t began = fl_clock_boot_ns();

    for (int i = -WARM; i < (int)rounds; i++) {
        next_version_of_trainer();
        double took = one_update(mode);

        if (i == -WARM)
            cold = took;
        if (took >= 0 && i == -1 && d.rep.other_bytes &&
            ms_of(fl_clock_boot_ns() - began) < LINK_WAIT_MS)
            i--; /* what is measured is the link that is being made */
        if (took >= 0 && i >= 0) {
            table[WALL][i] = took;
            note_round((unsigned)i);
            took = table[IDLE][i] = idle_update(mode);
        }
        if (took < 0) {
            printf("{\"name\":\"update %s %s\",\"failed\":\"%s\"}\n", name, xfer_mode_name(mode),
                   d.why.text);
            wrong++;
            return;
        }
    }
    say_times(name, mode, rounds, cold);
}

/* ==== many updates ============================================================================ */
#ifdef __SANITIZE_ADDRESS__
enum { KEEPS_FREED = 1 }; /* what was freed is held back for a while */
#else
enum { KEEPS_FREED = 0 };
#endif
enum { SETTLED = 20 }; /* updates until everything that is made once has been made */
static void expect(bool holds, const char *fault, const char *what);

/* How many engines hold something else than the trainer has published. */
static unsigned check_root(unsigned at)
{
    unsigned differ = 0;

    for (unsigned i = 0; i < d.n_engines; i++) {
        struct plane_seen e;

        look(&d.engines[i], &e);
        if (xfer_version_same(&e.version, &d.rep.now) &&
            memcmp(e.root, d.rep.now.digest, sizeof(e.root)) == 0)
            continue;
        wrong++;
        differ++;
        printf("# NOT SO: update %u: engine %u says version %" PRIu64 ", digest %016" PRIx64
               ", its memory %016" PRIx64 "; the trainer version %" PRIu64 ", %016" PRIx64 "\n",
               at, i, e.version.number, e.version.digest[0], e.root[0], d.rep.now.number,
               d.rep.now.digest[0]);
    }
    return differ;
}

/* Until everything that is made once has been made: a communicator too. */
static void settle(const char *name, enum xfer_mode mode)
{
    uint64_t began = fl_clock_boot_ns();
    unsigned i = 0;

    do {
        next_version_of_trainer();
        expect(one_update(mode) >= 0, name, d.why.text);
        (void)check_root(i);
    } while (++i < SETTLED ||
             (d.rep.other_bytes && ms_of(fl_clock_boot_ns() - began) < LINK_WAIT_MS));
}

struct held { /* by the driver, the trainer and the first engine */
    struct plane_seen of[3];
};

static struct held held_now(void)
{
    struct held h = { 0 };

    plane_rss(&h.of[0]);
    look(&d.trainer, &h.of[1]);
    look(&d.engines[0], &h.of[2]);
    return h;
}

/* Engines' roots are made from their memory after each; what is held must not grow. */
static void many(const char *name, enum xfer_mode mode, unsigned n)
{
    static const char *const who[] = { "driver", "trainer", "engine" };
    struct held before, after;
    unsigned differ = 0;
    int64_t grew[3];
    double *took = calloc(n + 1, sizeof(*took));

    settle(name, mode);
    before = held_now();
    for (unsigned i = 0; took && i < n && wrong < 5; i++) {
        next_version_of_trainer();
        took[i] = one_update(mode);
        expect(took[i] >= 0, name, d.why.text);
        differ += check_root(i);
    }
    after = held_now();
    printf("{\"name\":\"%u updates %s %s\",\"roots_differ\":%u,\"ms\":%.3f,"
           "\"device_bytes\":%" PRIu64 ",\"device_grew\":%" PRId64,
           n, name, xfer_mode_name(mode), differ, took ? median(took, n) : 0,
           after.of[1].device_used_bytes,
           (int64_t)(after.of[1].device_used_bytes - before.of[1].device_used_bytes));
    for (unsigned k = 0; k < 3; k++) {
        grew[k] = (int64_t)(after.of[k].rss_kib - before.of[k].rss_kib);
        printf(",\"%s_kib\":%" PRIu64 ",\"%s_grew_kib\":%" PRId64, who[k], after.of[k].rss_kib,
               who[k], grew[k]);
    }
    printf("}\n");
    for (unsigned k = 0; k < 3; k++) {
        expect(grew[k] < 1024 || KEEPS_FREED, who[k], "its memory is as it was");
        expect(after.of[k].fds <= before.of[k].fds, who[k], "its descriptors are as they were");
    }
    expect(after.of[1].device_used_bytes <= before.of[1].device_used_bytes, name,
           "the device's memory is as it was");
    fflush(stdout);
    free(took);
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
    if (recv(PLANE_FD, &s, sizeof(s), MSG_WAITALL) != (ssize_t)sizeof(s))
        return 1;
    return strcmp(role, "--trainer") == 0 ? plane_trainer(&s) : plane_engine(&s);
}

struct wanted {
    const struct shape *shapes[2];
    unsigned rounds, updates;
    bool faults;
    const char *only; /* this mode, "fixed-" before it: of fixed addresses; NULL: all */
};

/* One pair of processes for each, so that every first update is a run's first. */
static void pair(const struct shape *s, const struct link_place *from, const struct link_place *to,
                 enum xfer_mode mode, bool stays, const struct wanted *w)
{
    char name[64];

    snprintf(name, sizeof(name), "%s%s", stays ? "fixed-" : "", xfer_mode_name(mode));
    if (w->only && strcmp(w->only, name) != 0)
        return;
    fixed = stays;
    snprintf(name, sizeof(name), "%s %s%s", s->name, from == to ? "one device" : "two devices",
             stays ? " fixed addresses" : "");
    start(s, from, to, 1, NULL);
    if (w->updates)
        many(name, mode, w->updates);
    else
        times(name, mode, w->rounds);
    stop();
    fixed = false;
}

static void pairs(const struct shape *s, const struct link_place *places, size_t n,
                  const struct wanted *w)
{
    pair(s, &places[0], &places[0], XFER_COPY, false, w);
    pair(s, &places[0], &places[0], XFER_SHARE, false, w);
    pair(s, &places[0], &places[0], XFER_COPY, true, w);
    pair(s, &places[0], &places[0], XFER_SHARE, true, w);
    if (n > 1)
        pair(s, &places[0], &places[1], XFER_P2P, false, w);
    if (n > 1 && places[0].nccl_version)
        pair(s, &places[0], &places[1], XFER_BROADCAST, false, w);
}

static void wanted_of(int argc, char **argv, struct wanted *w)
{
    *w = (struct wanted){ .shapes = { &shape_06, NULL }, .rounds = 20 };
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--big") == 0)
            w->shapes[1] = &shape_8;
        else if (strcmp(argv[i], "--tiny") == 0)
            w->shapes[0] = &shape_tiny;
        else if (strcmp(argv[i], "--thin") == 0)
            w->shapes[0] = &shape_thin;
        else if (strcmp(argv[i], "--faults") == 0)
            w->faults = true;
        else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc)
            w->rounds = (unsigned)atoi(argv[++i]);
        else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc)
            w->only = argv[++i];
        else if (strcmp(argv[i], "--updates") == 0 && i + 1 < argc)
            w->updates = (unsigned)atoi(argv[++i]);
    }
    if (w->rounds < 1 || w->rounds > ROUNDS_MAX)
        w->rounds = 20;
}

int main(int argc, char **argv)
{
    static struct link_place places[GPU_MAX];
    struct wanted w;
    size_t n;

    if (argc == 2 && (strcmp(argv[1], "--trainer") == 0 || strcmp(argv[1], "--engine") == 0))
        return child(argv[1]);
    wanted_of(argc, argv, &w);
    (void)fl_log_level_set("error", NULL);
    places_of(places, &n);
    if (n == 0) {
        puts("{\"name\":\"bench_plane\",\"skipped\":\"no device\"}");
        return 0;
    }
    if (!mkdtemp(folder))
        return 1;
    for (unsigned i = 0; !w.faults && i < 2 && w.shapes[i]; i++)
        pairs(w.shapes[i], places, n, &w);
    if (w.faults)
        faults(w.shapes[0], &places[0], n > 1 ? &places[1] : &places[0]);
    for (unsigned k = 0; k < 64; k++) { /* sockets of ours */
        char line[100];

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
