#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/client/weights_plane.h"
#include "tests/client/weights_roles.h"
#include "tests/gpu/mem.h"
#include "tests/t.h"

static void of_devices(void)
{
    if (!getenv("ON_DEVICE"))
        t_skip("of weights on devices; here they are the host's");
}

/* ---- modes ---------------------------------------------------------------------------------- */
static void each_mode_brings_the_bytes(void **state)
{
    static const struct {
        const char *mode;
        unsigned trainers, engines;
        uint32_t slots;
        const char *env;
    } rows[] = {
        { "auto", 1, 2, 0, NULL },       { "copy", 1, 2, 2, NULL },
        { "broadcast", 1, 2, 0, NULL },  { "broadcast", 2, 2, 0, NULL },
        { "p2p", 2, 2, 0, NULL },        { "share", 1, 2, 2, NULL },
        { "disk-delta", 1, 2, 0, NULL }, { "copy", 2, 1, 1, "SLOTS=1" },
        { "share", 1, 1, 1, "SLOTS=1" }, { "copy", 1, 1, 2, "CHECK_EQUAL=1" },
    };
    char digest[24] = "";

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct plane p = plane_make(rows[i].trainers, rows[i].engines, rows[i].env, rows[i].env);

        t_int_eq(plane_look(&p, 0).version, -1, "nothing serves before the first update");
        for (uint64_t v = 0; v < 4; v++) {
            struct furlong_report r;

            if (v)
                plane_write(&p, v);
            r = plane_update(&p, v, rows[i].mode, rows[i].slots);
            t_int_eq(r.committed, rows[i].engines, "%s %u", rows[i].mode, rows[i].slots);
            t_int_eq(r.left_behind, 0);
            for (uint32_t e = 0; e < rows[i].engines; e++)
                plane_serves(&p, e, (long long)v);
        }
        t_true(!*digest || strcmp(digest, plane_look(&p, 0).digest) == 0,
               "%s: the digest of version 3 is the same in each mode", rows[i].mode);
        (void)snprintf(digest, sizeof(digest), "%s", plane_look(&p, 0).digest);
        plane_end(&p);
    }
}

/* The trainer fails between begin and publish, twice, and goes on. */
static void a_version_that_is_abandoned_never_was(void **state)
{
    static const struct {
        const char *mode, *env;
        uint32_t slots;
    } rows[] = { { "share", NULL, 2 }, { "copy", NULL, 0 }, { "share", "SLOTS=1", 1 } };
    uint64_t version = 2;

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct plane p = plane_make(1, 1, rows[i].env, rows[i].env);
        struct fl_err err = { 0 };

        for (uint64_t v = 0; v < 2; v++) {
            if (v)
                plane_write(&p, v);
            plane_update(&p, v, rows[i].mode, rows[i].slots);
        }
        for (unsigned k = 0; k < 2; k++) {
            t_ok(furlong_ask_all(p.trainers, "abandon",
                                 &(struct furlong_data){ &version, 8, NULL, 0 }, 20000, NULL, &err),
                 &err);
            if (rows[i].env)
                t_str_eq(plane_look(&p, 0).verdict, "none");
            else
                plane_serves(&p, 0, 1);
        }
        if (!rows[i].env) { /* what was published last is still there for whoever asks */
            plane_update(&p, 1, rows[i].mode, rows[i].slots);
            plane_serves(&p, 0, 1);
        }
        plane_write(&p, 3);
        plane_update(&p, 3, rows[i].mode, rows[i].slots);
        plane_serves(&p, 0, 3);
        plane_end(&p);
    }
}

/* Of two threads that begin, the one that waits is let in, and the other is refused. */
static void begin_of_two_threads(void **state)
{
    struct plane p = plane_make(1, 1, "SLOTS=1", "SLOTS=1");
    struct fl_err err = { 0 };

    (void)state;
    plane_update(&p, 0, "share", 1);
    for (uint64_t v = 1; v < 5; v++) {
        t_ok(furlong_ask_all(p.trainers, "twice", &(struct furlong_data){ &v, 8, NULL, 0 }, 20000,
                             NULL, &err),
             &err);
        plane_update(&p, v, "share", 1);
        plane_serves(&p, 0, (long long)v);
    }
    plane_end(&p);
}

/* ---- on devices ------------------------------------------------------------------------------ */
static void says(struct plane *p, const char *what)
{
    struct furlong_answer a = { 0 };
    struct fl_err err;
    char text[257] = "";

    t_ok(furlong_ask(furlong_group_peer(p->engines, 0), 0, "why", NULL, 10000, &a, &err), &err);
    if (a.body_bytes && a.body_bytes < sizeof(text))
        memcpy(text, a.body, a.body_bytes);
    furlong_answer_free(&a);
    if (what)
        t_has(text, what);
    else
        t_str_eq(text, "");
}

/* The trainer writes where the engine has read: until it is whole the engine says so to whoever
 * asks. */
static void p84_an_engine_says_why_it_serves_nothing(void **state)
{
    struct plane p = plane_make(1, 1, "SLOTS=1", "SLOTS=1");

    (void)state;
    says(&p, "no version of the weights \"policy\" is here yet");
    plane_update(&p, 0, "share", 1);
    plane_serves(&p, 0, 0);
    says(&p, NULL);
    plane_write(&p, 1);
    says(&p, "weights incomplete: version 1 is being written");
    t_str_eq(plane_look(&p, 0).verdict, "none");
    plane_update(&p, 1, "share", 1);
    plane_serves(&p, 0, 1);
    says(&p, NULL);
    plane_end(&p);
}

static enum fl_status ask_to_drop(struct plane *p, const char *how)
{
    struct fl_err err = { 0 };
    enum fl_status st =
        furlong_ask(furlong_group_peer(p->engines, 0), 0, how, NULL, 10000, NULL, &err);

    return st;
}

static void *drop_at_commit(void *arg)
{
    return (void *)(intptr_t)ask_to_drop(arg, "drop_at_commit");
}

/* The engine drops its set at this update's COMMIT; mark: it has been told to. */
static void update_while_it_drops(struct plane *p, const struct furlong_update *how,
                                  const char *mark)
{
    struct furlong_report r;
    struct fl_err err;
    pthread_t side;
    void *st;

    t_true(pthread_create(&side, NULL, drop_at_commit, p) == 0);
    for (unsigned i = 0; access(mark, F_OK) < 0; i++) {
        t_true(i < 20000, "the engine was not told");
        (void)poll(NULL, 0, 1);
    }
    (void)furlong_update(p->trainers, p->engines, how, &r, &err); /* there, or not any more */
    t_true(pthread_join(side, &st) == 0);
    t_int_eq((intptr_t)st, FL_OK);
}

/* The one thread of an engine drops its set while a COMMIT waits for that thread. */
static void a_set_is_dropped_under_its_commit(void **state)
{
    struct furlong_update how = {
        .set = "policy", .version = 1, .mode = "copy", .budget_ms = 15000
    };
    const char *mark = t_path("drops");
    struct fl_err err;
    char env[300];

    (void)state;
    snprintf(env, sizeof(env), "DROP_MARK=%s", mark);
    struct plane p = plane_make(1, 1, NULL, env);

    plane_update(&p, 0, "copy", 0);
    plane_write(&p, 1);
    update_while_it_drops(&p, &how, mark);
    t_ok(furlong_group_wait(p.engines, 20000, &err), &err);
    plane_write(&p, 2);
    plane_update(&p, 2, "copy", 0);
    plane_serves(&p, 0, 2);
    plane_end(&p);
}

/* It stands, its COMMIT waits for the thread that drops it, and RESUME would have come behind. */
static void a_set_is_dropped_before_it_lets_the_engine_go(void **state)
{
    struct furlong_update how = {
        .set = "policy", .version = 1, .mode = "share", .slots = 1, .budget_ms = 15000
    };
    const char *mark = t_path("drops while it stands");
    char env[300];

    (void)state;
    snprintf(env, sizeof(env), "DROP_MARK=%s", mark);
    t_true(setenv("SLOTS", "1", 1) == 0);
    struct plane p = plane_make(1, 1, NULL, env);

    plane_update(&p, 0, "share", 1);
    plane_write(&p, 1);
    t_str_eq(plane_look(&p, 0).paused, "paused");
    update_while_it_drops(&p, &how, mark);
    t_str_eq(plane_look(&p, 0).paused, "running");
    plane_end(&p);
    t_true(unsetenv("SLOTS") == 0);
}

/* It stands because its only slot is to be written; then it has none. */
static void a_set_is_dropped_while_it_holds_the_engine(void **state)
{
    struct plane p = plane_make(1, 1, "SLOTS=1", "SLOTS=1");

    (void)state;
    plane_update(&p, 0, "share", 1);
    plane_write(&p, 1);
    t_str_eq(plane_look(&p, 0).paused, "paused");
    t_int_eq(ask_to_drop(&p, "drop"), FL_OK);
    t_str_eq(plane_look(&p, 0).paused, "running");
    plane_update(&p, 1, "share", 1);
    plane_serves(&p, 0, 1);
    plane_end(&p);
}

/* The trainer's tensors stay the trainer's: wherever they lie, the same bytes arrive in every mode.
 */
static void p70_tensors_are_given_where_they_lie(void **state)
{
    static const char *const lies[] = { "LIES=arena", "LIES=plain", "LIES=pool" };
    static const char *const modes[] = { "copy", "auto", "p2p", "broadcast", "disk-delta" };
    char digest[24] = "";

    (void)state;
    of_devices();
    for (size_t i = 0; i < FL_LEN(lies); i++) {
        struct plane p = plane_make(1, 2, lies[i], NULL);

        for (uint64_t v = 0; v < FL_LEN(modes); v++)
            plane_comes(&p, v, modes[v]);
        t_true(!*digest || strcmp(digest, plane_look(&p, 0).digest) == 0, "%s: another digest",
               lies[i]);
        (void)snprintf(digest, sizeof(digest), "%s", plane_look(&p, 0).digest);
        plane_end(&p);
    }
}

/* Its layout is the engine's, and all of it is in one memory: but nobody can map that. */
static void what_is_staged_is_not_shared(void **state)
{
    struct furlong_update how = { .set = "policy", .mode = "share", .budget_ms = 20000 };
    struct furlong_report r = { 0 };
    struct plane p;
    struct fl_err err = { 0 };

    (void)state;
    of_devices();
    p = plane_make(1, 1, "LIES=row", NULL);
    t_refused(furlong_update(p.trainers, p.engines, &how, &r, &err), FL_INVALID, &err);
    t_has(err.text, "trainer 0");
    t_has(err.text, "use copy");
    for (uint64_t v = 0; v < 2; v++) {
        if (v)
            plane_write(&p, v);
        r = plane_update(&p, v, "auto", 0);
        t_str_eq(r.mode, "copy");
        plane_serves(&p, 0, (long long)v);
    }
    plane_end(&p);
}

/* As many as may wait for a staged bucket do: whoever comes later asks again. */
static void a_staged_bucket_is_asked_for_again(void **state)
{
    struct plane p;

    (void)state;
    of_devices();
    t_true(setenv("LIES", "pool", 1) == 0);
    p = plane_make(1, 2, "FURLONG_FAULT=xfer.asks:2=fail,xfer.asks:5=fail", NULL);
    for (uint64_t v = 0; v < 2; v++)
        plane_comes(&p, v, "copy");
    plane_end(&p);
    t_true(unsetenv("LIES") == 0);
}

/* An engine that dies at a bucket, with a half of the staging buffer in hand, holds up nobody. */
static void p82_who_dies_at_a_bucket_is_filled(void **state)
{
    struct furlong_update how = {
        .set = "policy", .mode = "copy", .budget_ms = 20000, .bucket_bytes = 64 << 10
    };
    struct furlong_report r = { 0 };
    struct plane p;
    struct fl_err err;

    (void)state;
    of_devices();
    p = plane_make(1, 2, "LIES=pool", "FAULT_1=xfer.staged:3=kill");
    t_ok(furlong_update(p.trainers, p.engines, &how, &r, &err), &err);
    t_true(r.committed == 1 && r.move_ns < 4000000000ull, "%u committed after %llu ms", r.committed,
           (unsigned long long)r.move_ns / 1000000);
    plane_serves(&p, 0, 0);
    t_ok(furlong_group_wait(p.engines, 20000, &err), &err);
    plane_serves(&p, 1, 0);
    plane_comes(&p, 1, "copy");
    plane_end(&p);
}

/* One that answers a bucket with an error, and lives: whoever asked hears its words, and the next
 * update needs no restart. */
static void p82_who_refuses_a_bucket_is_heard(void **state)
{
    struct furlong_update how = {
        .set = "policy", .mode = "copy", .budget_ms = 20000, .bucket_bytes = 64 << 10
    };
    struct furlong_report r = { 0 };
    struct plane p;
    struct fl_err err = { 0 };

    (void)state;
    of_devices();
    p = plane_make(1, 2, "LIES=pool", "FAULT_1=xfer.staged:3=fail");
    uint64_t began = fl_clock_boot_ns();
    enum fl_status st = furlong_update(p.trainers, p.engines, &how, &r, &err);
    const char *said = st == FL_OK ? r.first_behind.text : err.text;

    t_true(st != FL_OK || r.committed == 1, "%u committed", r.committed);
    t_has(said, "rollout 1");
    t_has(said, "fault xfer.staged");
    t_true(fl_clock_boot_ns() - began < how.budget_ms * 1000000ull, "before its deadline");
    plane_comes(&p, 1, "copy");
    plane_end(&p);
}

/* Memory that a container shows to nobody: through the host, and said so. */
static void p71_what_cannot_be_shown_goes_through_the_host(void **state)
{
    struct plane p;

    (void)state;
    of_devices();
    p = plane_make(1, 2, "FURLONG_FAULT=link.ipc.share:1=fail", NULL);
    for (uint64_t v = 0; v < 3; v++)
        plane_comes(&p, v, "copy");
    plane_end(&p);
}

/* A device without room for a second slot: the old version serves, and the way out is said. */
static void p76_no_room_for_a_second_slot(void **state)
{
    struct furlong_update how = {
        .version = 1, .set = "policy", .mode = "copy", .budget_ms = 20000
    };
    struct furlong_report r = { 0 };
    struct plane p;
    struct fl_err err = { 0 };

    (void)state;
    of_devices();
    p = plane_make(1, 1, NULL, "FURLONG_FAULT=client.slot:2=fail");
    plane_update(&p, 0, "copy", 2);
    plane_write(&p, 1);
    t_true(furlong_update(p.trainers, p.engines, &how, &r, &err) != FL_OK);
    printf("# no room: %s\n", err.text);
    t_has(err.text, "one slot saves 401 KiB");
    plane_serves(&p, 0, 0);
    plane_update(&p, 1, "copy", 2);
    plane_serves(&p, 0, 1);
    plane_end(&p);
}

/* An engine with captured graphs: what it reads stays where it was, in whichever mode. */
static void captured_graphs_read_where_they_did(void **state)
{
    static const char *const modes[] = { "copy", "copy", "share", "share", "copy", "share" };
    struct plane p;
    char at[24] = "";

    (void)state;
    of_devices();
    p = plane_make(1, 1, NULL, "FIXED=1");
    for (uint64_t v = 0; v < FL_LEN(modes); v++) {
        if (v)
            plane_write(&p, v);
        plane_update_by(&p, v, modes[v], 0);
        plane_serves(&p, 0, (long long)v);
        t_true(v == 0 || strcmp(at, plane_look(&p, 0).at) == 0, "version %u is read elsewhere",
               (unsigned)v);
        (void)snprintf(at, sizeof(at), "%s", plane_look(&p, 0).at);
    }
    plane_end(&p);
}

/* ---- failures ------------------------------------------------------------------------------- */
static void an_engine_that_comes_back_is_filled(void **state)
{
    struct plane p = plane_make(1, 2, NULL, NULL);
    struct furlong_member m = { 0 };
    struct fl_err err;

    (void)state;
    plane_update(&p, 0, "copy", 0);
    plane_write(&p, 1);
    plane_update(&p, 1, "copy", 0);
    fake_kill(p.fake, "rollout", 1, SIGKILL);
    while (m.attempt != 2)
        furlong_group_member(p.engines, 1, &m);
    t_ok(furlong_group_wait(p.engines, 20000, &err), &err);
    plane_serves(&p, 1, 1);
    plane_write(&p, 2);
    t_int_eq(plane_update(&p, 2, "copy", 0).committed, 2);
    plane_serves(&p, 0, 2);
    plane_serves(&p, 1, 2);
    plane_end(&p);
}

static void an_engine_that_dies_in_an_update_is_left_behind(void **state)
{
    struct plane p = plane_make(1, 2, NULL, "DIE_AT=1");
    struct furlong_report r;
    struct fl_err err;

    (void)state;
    plane_update(&p, 0, "copy", 0);
    plane_write(&p, 1);
    r = plane_update(&p, 1, "copy", 0);
    t_int_eq(r.committed, 1);
    t_true(r.first_behind.status != FL_OK || r.left_behind == 0, "%s", r.first_behind.text);
    t_ok(furlong_group_wait(p.engines, 20000, &err), &err);
    plane_serves(&p, 0, 1);
    plane_serves(&p, 1, 1);
    plane_end(&p);
}

static void trainers_that_restart_go_on(void **state)
{
    struct plane p = plane_make(2, 1, NULL, NULL);
    struct fl_err err;

    (void)state;
    plane_write(&p, 5);
    plane_update(&p, 5, "p2p", 0);
    t_ok(furlong_group_restart(p.trainers, 20000, &err), &err);
    plane_write(&p, 6);
    plane_update(&p, 6, "p2p", 0);
    plane_serves(&p, 0, 6);
    plane_end(&p);
}

static void a_driver_that_comes_back_needs_no_log(void **state)
{
    struct plane p = plane_make(1, 2, NULL, NULL);
    struct fl_err err;

    (void)state;
    plane_update(&p, 0, "copy", 0);
    plane_write(&p, 1);
    plane_update(&p, 1, "copy", 0);
    furlong_leave(p.me);
    t_ok(fake_join(p.fake, "driver", 0, 1, 2, &p.me, &err), &err);
    t_ok(furlong_place(p.me, (struct furlong_flag[]){ { "trainer", "1" }, { "rollout", "2" } }, 2,
                       &p.layout, &err),
         &err);
    p.trainers = plane_launch(&p, "trainer", "trainer", 1, NULL);
    p.engines = plane_launch(&p, "rollout", "engine", 2, NULL);
    t_ok(furlong_plane(p.trainers, p.engines, &(struct furlong_update){ .set = "policy" }, &err),
         &err);
    plane_write(&p, 2);
    t_int_eq(plane_update(&p, 2, "copy", 0).committed, 2);
    plane_serves(&p, 1, 2);
    plane_end(&p);
}

static void offloaded_weights_wait(void **state)
{
    struct plane p = plane_make(1, 1, NULL, NULL);
    struct furlong_update how = {
        .version = 1, .set = "policy", .mode = "copy", .budget_ms = 1000
    };
    struct furlong_answer a;
    struct fl_err err = { 0 };
    long before, after;

    (void)state;
    plane_update(&p, 0, "copy", 2);
    plane_write(&p, 1);
    before = plane_look(&p, 0).kib;
    t_ok(furlong_ask(furlong_group_peer(p.engines, 0), 0, "offload_weights", NULL, 10000, &a, &err),
         &err);
    t_true(!memmem(a.body, a.body_bytes, "\"dropped_bytes\":0,", 18), "%.*s", (int)a.body_bytes,
           (const char *)a.body);
    furlong_answer_free(&a);
    t_str_eq(plane_look(&p, 0).verdict, "none");
    after = plane_look(&p, 0).kib;
    t_true(t_on_cuda() || before - after > 100, "gave back %ld KiB",
           before - after); /* of the host's */
    t_true(furlong_update(p.trainers, p.engines, &how, NULL, &err) != FL_OK);
    t_has(err.text, "offload");
    t_ok(
        furlong_ask(furlong_group_peer(p.engines, 0), 0, "onload_weights", NULL, 10000, NULL, &err),
        &err);
    t_str_eq(plane_look(&p, 0).verdict, "none");
    plane_update(&p, 1, "copy", 2);
    plane_serves(&p, 0, 1);
    plane_end(&p);
}

/* ---- an update between an engine's join and its accept --------------------------------------- */
struct loading {
    struct plane p;
    const char *fifo;
    int fd;
};

static struct loading loading_make(unsigned engines, bool last_alone)
{
    struct loading l = { .fifo = t_path("loads") };
    char env[300];

    (void)unlink(l.fifo);
    t_true(mkfifo(l.fifo, 0600) == 0);
    snprintf(env, sizeof(env), "LOADS=%s%s", last_alone ? "+" : "", l.fifo);
    l.p = plane_make(1, engines, NULL, env);
    l.fd = open(l.fifo, O_WRONLY | O_CLOEXEC); /* an engine has joined and waits */
    t_true(l.fd >= 0);
    return l;
}

static void *loads_in_thread(void *arg)
{
    (void)poll(NULL, 0, 300);
    close(((struct loading *)arg)->fd);
    return NULL;
}

static void an_engine_that_still_loads_is_waited_for(void **state)
{
    struct loading l = loading_make(1, false);
    pthread_t t;

    (void)state;
    t_true(pthread_create(&t, NULL, loads_in_thread, &l) == 0);
    t_int_eq(plane_update(&l.p, 0, "copy", 0).committed, 1);
    t_true(pthread_join(t, NULL) == 0);
    plane_serves(&l.p, 0, 0);
    plane_end(&l.p);
}

static void an_engine_that_never_accepts_is_named(void **state)
{
    struct loading l = loading_make(1, false);
    struct furlong_update how = { .set = "policy", .budget_ms = 400 };
    struct fl_err err = { 0 };
    uint64_t began;

    (void)state;
    for (unsigned i = 0; i < 50 && (i == 0 || strstr(err.text, "trainer 0")); i++) {
        began = fl_clock_boot_ns(); /* on a busy machine the trainer is slow to start */
        t_refused(furlong_update(l.p.trainers, l.p.engines, &how, NULL, &err), FL_TIMEOUT, &err);
    }
    t_has(err.text, "accepted yet by rollout 0 on gpu-a");
    t_true(fl_clock_boot_ns() - began >= how.budget_ms * 1000000ull, "before its deadline");
    close(l.fd);
    how.budget_ms = 20000;
    t_ok(furlong_update(l.p.trainers, l.p.engines, &how, NULL, &err), &err);
    plane_serves(&l.p, 0, 0);
    plane_end(&l.p);
}

/* Of several, those that are ready by half the time are enough; the other is filled once it
 * accepts. */
static void an_update_goes_on_without_one_that_loads(void **state)
{
    struct loading l = loading_make(2, true);
    struct furlong_update how = { .set = "policy", .mode = "copy", .budget_ms = 1000 };
    struct furlong_report r = { 0 };
    struct fl_err err;

    (void)state;
    t_ok(furlong_update(l.p.trainers, l.p.engines, &how, &r, &err), &err);
    t_int_eq(r.committed, 1);
    plane_serves(&l.p, 0, 0);
    plane_write(&l.p, 1); /* who has not accepted reads nothing */
    close(l.fd);
    t_ok(furlong_group_wait(l.p.engines, 20000, &err), &err);
    plane_serves(&l.p, 1, 0);
    plane_end(&l.p);
}

/* Weights that are kept while they are out: the same version is back, and the next one comes. */
static void kept_weights_come_back(void **state)
{
    static const char *const how[] = { "KEEP=1", "FIXED=1" }; /* FIXED: dropped, and seen no more */
    const char *const gone[] = { "offload_weights", "onload_weights" };

    (void)state;
    of_devices();
    for (size_t i = 0; i < FL_LEN(how); i++) {
        struct plane p = plane_make(1, 1, NULL, how[i]);
        struct fl_err err;

        for (uint64_t v = 0; v < 3; v++) {
            if (v)
                plane_write(&p, v);
            plane_update(&p, v, v == 2 ? "share" : "copy", 2);
            for (size_t k = 0; k < FL_LEN(gone); k++)
                t_ok(furlong_ask(furlong_group_peer(p.engines, 0), 0, gone[k], NULL, 10000, NULL,
                                 &err),
                     &err);
            if (i == 0)
                plane_serves(&p, 0, (long long)v);
            else
                t_str_eq(plane_look(&p, 0).verdict, "none");
        }
        plane_end(&p);
    }
}

static void different_tensors_are_refused(void **state)
{
    struct plane p = plane_make(1, 1, NULL, "ODD=1");
    struct furlong_update how = { .set = "policy", .budget_ms = 5000 };
    struct fl_err err = { 0 };

    (void)state;
    t_refused(furlong_update(p.trainers, p.engines, &how, NULL, &err), FL_INVALID, &err);
    t_has(err.text, "z.embed");
    how.mode = "pigeon";
    t_refused(furlong_update(p.trainers, p.engines, &how, NULL, &err), FL_INVALID, &err);
    t_has(err.text, "pigeon");
    how.mode = "disk-delta";
    t_refused(furlong_update(p.trainers, p.engines, &how, NULL, &err), FL_INVALID, &err);
    how = (struct furlong_update){ 0 };
    t_refused(furlong_update(p.trainers, p.engines, &how, NULL, &err), FL_INVALID, &err);
    plane_end(&p);
}

static void the_drivers_pause_outlasts_an_update(void **state)
{
    struct plane p = plane_make(1, 1, "SLOTS=1", "SLOTS=1");
    struct fl_err err;

    (void)state;
    plane_update(&p, 0, "copy", 1);
    t_ok(furlong_ask_all(p.engines, "pause", NULL, 10000, NULL, &err), &err);
    plane_write(&p, 1);
    plane_update(&p, 1, "copy", 1);
    t_str_eq(plane_look(&p, 0).paused, "paused");
    t_ok(furlong_ask_all(p.engines, "resume", NULL, 10000, NULL, &err), &err);
    plane_serves(&p, 0, 1);
    plane_end(&p);
}

static long own_kib(void)
{
    long pages = 0, rss = 0;
    FILE *in = fopen("/proc/self/statm", "re");

    t_true(in && fscanf(in, "%ld %ld", &pages, &rss) == 2);
    fclose(in);
    return rss * sysconf(_SC_PAGESIZE) / 1024;
}

static void a_thousand_updates_leave_memory_flat(void **state)
{
    /* a sanitizer's own notes grow for some hundred updates more */
    enum { WARM = 100, ALL = 1000, SLACK_KIB = T_SLOWDOWN > 1 ? 4096 : 512 };
    struct plane p = plane_make(1, 1, NULL, NULL);
    long engine = 0, mine = 0;
    int engine_fds = 0, fds = 0;

    (void)state;
    for (uint64_t v = 1; v <= ALL; v++) {
        plane_write(&p, v);
        plane_update(&p, v, v % 2 ? "copy" : "share", 2);
        if (v == WARM) {
            engine = plane_look(&p, 0).kib;
            mine = own_kib();
            engine_fds = plane_look_how(&p, 0, "check_fds").fds;
            fds = t_open_fds();
        }
    }
    plane_serves(&p, 0, ALL);
    t_true(plane_look(&p, 0).kib - engine < SLACK_KIB, "engine: %ld KiB, then %ld", engine,
           plane_look(&p, 0).kib);
    t_int_eq(plane_look_how(&p, 0, "check_fds").fds, engine_fds, "descriptors of the engine");
    t_int_eq(t_open_fds(), fds, "descriptors of the driver");
    t_true(own_kib() - mine < SLACK_KIB, "driver: %ld KiB, then %ld", mine, own_kib());
    plane_end(&p);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_mode_brings_the_bytes),
        cmocka_unit_test(a_version_that_is_abandoned_never_was),
        cmocka_unit_test(begin_of_two_threads),
        cmocka_unit_test(p84_an_engine_says_why_it_serves_nothing),
        cmocka_unit_test(a_set_is_dropped_under_its_commit),
        cmocka_unit_test(a_set_is_dropped_before_it_lets_the_engine_go),
        cmocka_unit_test(a_set_is_dropped_while_it_holds_the_engine),
        cmocka_unit_test(p70_tensors_are_given_where_they_lie),
        cmocka_unit_test(what_is_staged_is_not_shared),
        cmocka_unit_test(a_staged_bucket_is_asked_for_again),
        cmocka_unit_test(p82_who_dies_at_a_bucket_is_filled),
        cmocka_unit_test(p82_who_refuses_a_bucket_is_heard),
        cmocka_unit_test(p71_what_cannot_be_shown_goes_through_the_host),
        cmocka_unit_test(p76_no_room_for_a_second_slot),
        cmocka_unit_test(captured_graphs_read_where_they_did),
        cmocka_unit_test(an_engine_that_comes_back_is_filled),
        cmocka_unit_test(an_engine_that_dies_in_an_update_is_left_behind),
        cmocka_unit_test(trainers_that_restart_go_on),
        cmocka_unit_test(a_driver_that_comes_back_needs_no_log),
        cmocka_unit_test(offloaded_weights_wait),
        cmocka_unit_test(an_engine_that_still_loads_is_waited_for),
        cmocka_unit_test(an_engine_that_never_accepts_is_named),
        cmocka_unit_test(an_update_goes_on_without_one_that_loads),
        cmocka_unit_test(kept_weights_come_back),
        cmocka_unit_test(different_tensors_are_refused),
        cmocka_unit_test(the_drivers_pause_outlasts_an_update),
    };
    static const struct CMUnitTest long_tests[] = { cmocka_unit_test(
        a_thousand_updates_leave_memory_flat) };
    const char *role = fake_role(argc, argv);

    if (role)
        return play_role(role);
    if (argc > 1 && strcmp(argv[1], "long") == 0)
        return t_run("client weights, a thousand updates", long_tests);
    return t_run("client weights", tests);
}
