/* bench_plane - whole updates of weights on devices: trainer, engines and driver, a process each
 *
 *     bench_plane [--tiny|--thin|--big] [--rounds N] [--only MODE]
 *         times, one device, then two where there are two; only MODE, or fixed-MODE
 *     bench_plane --updates N [--tiny|--thin|--big]
 *         so many of each; roots from memory, what is held
 *     bench_plane --faults [--tiny]
 *         two engines; one is killed, stopped, cut off in each phase, and so is the trainer killed
 *
 * The engines are on the second device where there is one. ms is what the driver waits for, from
 * its call to the last commit, one update after the other; idle_ms the same after 20 ms in which
 * everyone slept in his loop. link_ms: what the device's events say that the bytes took, gathered
 * and digested on the way. pause_ms: of the engine, from the last step to its new addresses.
 * publish_ms: the trainer's digests, before the call. limit: one kernel that copies the same bytes
 * (one device), one peer copy (two). cold_ms: the first update of a run. JSON lines. Exit 1:
 * something did not hold. */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include "bench/median.h"
#include "bench/must.h"
#include "bench/plane_driver.h"
#include "common/base/fault.h"
#include "common/base/log.h"
#include "transport/link/dev_priv.h"

enum { WARM = 3, ROUNDS_MAX = 4096, LINK_WAIT_MS = 20000 };
static struct plane *const d = &plane_d;
static unsigned wrong;
static struct fl_err err;

static double ms_of(uint64_t ns)
{
    return (double)ns / 1e6;
}

enum { WALL, IDLE, MOVE, LINK, PAUSE, PUBLISH, RECONCILE, PLAN, VERIFY, COMMIT, COLUMNS };
static const char *const columns[COLUMNS] = { "ms",        "idle_ms",    "move_ms",      "link_ms",
                                              "pause_ms",  "publish_ms", "reconcile_ms", "plan_ms",
                                              "verify_ms", "commit_ms" };
static double table[COLUMNS][ROUNDS_MAX];

static double one_update(enum xfer_mode mode)
{
    uint64_t from = fl_clock_boot_ns();

    if (plane_update(
            &(struct plane_ask){ .mode = mode, .slots = XFER_TWO_SLOTS, .due_ms = 60000 }) != FL_OK)
        return -1;
    return ms_of(fl_clock_boot_ns() - from);
}

/* All wait for nothing for a while, as between steps of a run: they sleep, the driver too, each in
 * his loop, when the update comes. */
static double idle_update(enum xfer_mode mode)
{
    plane_next_version();
    plane_rest(20);
    return one_update(mode);
}

static void note_round(unsigned i)
{
    struct plane_seen t;

    plane_look(&d->trainer, &t);
    table[MOVE][i] = ms_of(d->rep.move_ns);
    table[LINK][i] = ms_of(d->rep.link_ns);
    table[PAUSE][i] = ms_of(d->rep.pause_ns);
    table[PUBLISH][i] = ms_of(t.publish_ns);
    table[RECONCILE][i] = ms_of(d->rep.reconcile_ns);
    table[PLAN][i] = ms_of(d->rep.plan_ns);
    table[VERIFY][i] = ms_of(d->rep.verify_ns);
    table[COMMIT][i] = ms_of(d->rep.commit_ns);
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
           name, xfer_mode_name(mode), xfer_mode_name(d->rep.mode), d->rep.bytes,
           d->rep.other_bytes, cold);
    for (unsigned k = 0; k < COLUMNS; k++)
        printf(",\"%s\":%.4f", columns[k], mid[k]);
    printf(",\"max_ms\":%.3f,\"max_idle_ms\":%.3f,\"max_pause_ms\":%.4f,\"predicted_ms\":%.3f,"
           "\"limit_ms\":%.3f,\"ratio\":%.3f,\"link_ratio\":%.3f}\n",
           max[WALL], max[IDLE], max[PAUSE], ms_of(d->rep.predicted_ns), d->limit_ms,
           mid[WALL] / d->limit_ms, mid[LINK] / d->limit_ms);
    fflush(stdout);
}

static void times(const char *name, enum xfer_mode mode, unsigned rounds)
{
    double cold = 0;
    uint64_t began = fl_clock_boot_ns();

    for (int i = -WARM; i < (int)rounds; i++) {
        plane_next_version();
        double took = one_update(mode);

        if (i == -WARM)
            cold = took;
        if (took >= 0 && i == -1 && d->rep.other_bytes &&
            ms_of(fl_clock_boot_ns() - began) < LINK_WAIT_MS)
            i--; /* what is measured is the link that is being made */
        if (took >= 0 && i >= 0) {
            table[WALL][i] = took;
            note_round((unsigned)i);
            took = table[IDLE][i] = idle_update(mode);
        }
        if (took < 0) {
            printf("{\"name\":\"update %s %s\",\"failed\":\"%s\"}\n", name, xfer_mode_name(mode),
                   d->why.text);
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
static void expect(bool holds, const char *who, const char *what)
{
    if (holds)
        return;
    wrong++;
    printf("# NOT SO: %s: %s\n", who, what);
}

/* Until everything that is made once has been made: a communicator too. */
static void settle(const char *name, enum xfer_mode mode)
{
    uint64_t began = fl_clock_boot_ns();
    unsigned i = 0;

    do {
        plane_next_version();
        expect(one_update(mode) >= 0, name, d->why.text);
        wrong += plane_roots_differ(name);
    } while (++i < SETTLED ||
             (d->rep.other_bytes && ms_of(fl_clock_boot_ns() - began) < LINK_WAIT_MS));
}

struct held { /* by the driver, the trainer and the first engine */
    struct plane_seen of[3];
};

static struct held held_now(void)
{
    struct held h = { 0 };

    plane_rss(&h.of[0]);
    plane_look(&d->trainer, &h.of[1]);
    plane_look(&d->engines[0], &h.of[2]);
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
        plane_next_version();
        took[i] = one_update(mode);
        expect(took[i] >= 0, name, d->why.text);
        unsigned now = plane_roots_differ(name);

        differ += now;
        wrong += now;
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

static void places_of(struct link_place *out, size_t *n)
{
    const struct gpu_ops *gpu;
    struct gpu_info all[GPU_MAX];
    struct gpu_found *found;

    *n = GPU_MAX;
    must(gpu_pick(&gpu, &err));
    must(gpu->list(all, n, &err));
    found = calloc(*n + 1, sizeof(*found));
    for (size_t i = 0; i < *n; i++)
        found[i] = (struct gpu_found){ .info = all[i],
                                       .opens = true,
                                       .fd_shares = all[i].posix_fd,
                                       .handle_shares = all[i].legacy_ipc,
                                       .peers = ~0ull };
    for (size_t i = 0; i < *n; i++) {
        must(link_place_here(NULL, &out[i], &err));
        must(link_place_device(&out[i], all[i].uuid, found, *n, &err));
    }
    free(found);
}

/* Ends with whoever started it, however that ends. */
static int child(const char *role)
{
    static union {
        struct seat seat;
        struct relay relay;
    } s;
    bool relays = strcmp(role, "--relay") == 0;
    size_t n = relays ? sizeof(s.relay) : sizeof(s.seat);

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    must(fl_fault_env(&err));
    if (recv(PLANE_FD, &s, n, MSG_WAITALL) != (ssize_t)n)
        return 1;
    if (relays)
        return plane_relay(&s.relay);
    return strcmp(role, "--trainer") == 0 ? plane_trainer(&s.seat) : plane_engine(&s.seat);
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
    snprintf(name, sizeof(name), "%s %s%s", s->name, from == to ? "one device" : "two devices",
             stays ? " fixed addresses" : "");
    plane_start(&(struct plane_opts){
        .shape = s, .trainer = from, .engines = to, .n_engines = 1, .fixed = stays });
    if (w->updates)
        many(name, mode, w->updates);
    else
        times(name, mode, w->rounds);
    plane_stop();
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

    if (argc == 2 && (strcmp(argv[1], "--trainer") == 0 || strcmp(argv[1], "--engine") == 0 ||
                      strcmp(argv[1], "--relay") == 0))
        return child(argv[1]);
    wanted_of(argc, argv, &w);
    (void)fl_log_level_set("error", NULL);
    places_of(places, &n);
    if (n == 0) {
        puts("{\"name\":\"bench_plane\",\"skipped\":\"no device\"}");
        return 0;
    }
    for (unsigned i = 0; !w.faults && i < 2 && w.shapes[i]; i++)
        pairs(w.shapes[i], places, n, &w);
    if (w.faults)
        wrong += plane_faults(w.shapes[0], &places[0], n > 1 ? &places[1] : &places[0]);
    plane_clean();
    return wrong != 0;
}
