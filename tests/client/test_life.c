/* What a program sees of its daemon, and of its own process */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "tests/client/fake.h"
#include "tests/client/pair.h"
#include "tests/t.h"
#include "worker/client/client.h"

/* ---- the daemon ----------------------------------------------------------------------------- */
static void a_daemon_that_restarts_is_not_noticed(void **state)
{
    struct pair p = pair_make();
    char last[256];

    (void)state;
    pair_says(p.peer, 0, "count", "1");
    fake_down(p.fake);
    pair_says(p.peer, 0, "count", "2");
    furlong_metric(p.me, "perf/step_time", 1);
    furlong_metric(p.me, "perf/step_time", 2.5);
    furlong_step_record(p.me, "{\"step\":1}");
    fake_up(p.fake);
    t_int_eq(fake_steps(p.fake, 1, last), 1);
    t_str_eq(last, "{\"step\":1}");
    t_true(fake_metric(p.fake, "perf/step_time", 2.5) == 2.5);
    pair_says(p.peer, 0, "count", "3");
    pair_end(&p);
}

static void a_head_that_is_away_is_waited_for(void **state)
{
    struct pair p = pair_make();
    struct asker a = { .p = p.peer, .method = "count" };
    char last[256];
    pthread_t t;

    (void)state;
    fake_head_away(p.fake, true);
    t_true(pthread_create(&t, NULL, pair_ask_in_thread, &a) == 0);
    for (unsigned i = 0; i < 5; i++) {
        char json[32];

        snprintf(json, sizeof(json), "{\"step\":%u}", i);
        furlong_step_record(p.me, json);
    }
    while (fake_finds(p.fake) < 3)
        usleep(1000);
    fake_head_away(p.fake, false);
    pthread_join(t, NULL);
    t_int_eq(a.st, FL_OK, "%s", a.err.text);
    t_int_eq(fake_steps(p.fake, 5, last), 5);
    t_str_eq(last, "{\"step\":4}");
    pair_end(&p);
}

static void a_daemon_away_for_too_long(void **state)
{
    struct fake *fake = fake_create();
    struct furlong_peer *p;
    struct furlong *f;
    struct furlong_event ev;
    struct fl_err err = { 0 };

    (void)state;
    setenv("FURLONG_DAEMON_AWAY_MS", "150", 1);
    f = fake_joined(fake, "rollout", 0, 1);
    unsetenv("FURLONG_DAEMON_AWAY_MS");
    fake_down(fake);
    t_refused(furlong_next(f, 0, 20000, &ev, &err), FL_UNREACHABLE, &err);
    t_has(err.text, "150 ms");
    t_ok(furlong_peer(f, "rollout", 0, &p, &err), &err);
    t_refused(furlong_ask(p, 0, "x", NULL, 0, NULL, &err), FL_UNREACHABLE, &err);
    furlong_leave(f);
    fake_up(fake);
    fake_destroy(fake);
}

static void a_seat_that_was_given_on(void **state)
{
    struct fake *fake = fake_create();
    struct furlong *f = fake_joined(fake, "rollout", 0, 1), *late = NULL;
    struct furlong_event ev;
    struct fl_err err = { 0 };

    (void)state;
    fake_forget(fake, "rollout", 0);
    fake_down(fake);
    fake_up(fake);
    t_refused(furlong_next(f, 0, 20000, &ev, &err), FL_STALE, &err);
    furlong_leave(f);
    fake_down(fake);
    setenv("FURLONG_DAEMON_AWAY_MS", "100", 1); /* nobody there at all */
    t_true(fake_join(fake, "rollout", 0, 1, 3, &late, &err) == FL_UNREACHABLE, "%s", err.text);
    unsetenv("FURLONG_DAEMON_AWAY_MS");
    t_true(!late);
    fake_up(fake);
    fake_destroy(fake);
}

static void stop_and_squeeze_come_from_the_daemon(void **state)
{
    struct pair p = pair_make();
    uint64_t got = 0;
    struct fl_err err;

    (void)state;
    t_ok(fake_squeeze(p.fake, "rollout", 0, 1 << 20, &got, &err), &err);
    t_int_eq(got, 1 << 19);
    furlong_progress(p.me, 7, 9);
    t_int_eq(fake_progress(p.fake, 7), 7);
    fake_stop(p.fake, "rollout", 0, 1234);
    t_has(server_seen(p.engine, "stop"), "stop");
    t_int_eq(server_wait(p.engine, NULL), FL_OK);
    p.engine = NULL;
    pair_end(&p);
}

/* ---- the process ---------------------------------------------------------------------------- */
static void a_forked_child_is_told(void **state)
{
    struct fake *fake = fake_create();
    struct furlong *f = fake_joined(fake, "trainer", 0, 1);
    int status = -1;
    pid_t pid;

    (void)state;
    pid = fork();
    if (pid == 0) {
        struct furlong_event ev;
        struct furlong_peer *p;
        void *mem;
        bool ok = furlong_next(f, 0, 0, &ev, NULL) == FL_UNSUPPORTED &&
                  furlong_peer(f, "x", 0, &p, NULL) == FL_UNSUPPORTED && !furlong_seat(f) &&
                  furlong_arena_alloc(f, FURLONG_TAG_KV, -1, 1, &mem, NULL) == FL_UNSUPPORTED;

        furlong_metric(f, "x", 1);
        furlong_leave(f);
        _exit(ok ? 0 : 1);
    }
    t_true(waitpid(pid, &status, 0) == pid);
    t_int_eq(status, 0);
    furlong_leave(f);
    fake_destroy(fake);
}

static void one_seat_a_process(void **state)
{
    struct fake *fake = fake_create();
    struct furlong *f = NULL, *again = NULL;
    struct fl_err err = { 0 };
    char number[16];
    int fd = fake_seat(fake, "trainer", 0, 1, 1);

    (void)state;
    t_refused(furlong_join(FURLONG_ABI + 1, &f, &err), FL_UNSUPPORTED, &err);
    t_has(err.text, "ABI");
    snprintf(number, sizeof(number), "%d", fd);
    setenv("FURLONG_SEAT_FD", number, 1);
    t_ok(furlong_join(FURLONG_ABI, &f, &err), &err);
    t_refused(furlong_join(FURLONG_ABI, &again, &err), FL_UNSUPPORTED, &err);
    furlong_leave(f);
    t_ok(furlong_join(FURLONG_ABI, &f, &err), &err);
    furlong_leave(f);
    unsetenv("FURLONG_SEAT_FD");
    close(fd);
    fake_destroy(fake);
}

static void signals_stay_as_they_were(void **state)
{
    struct pair p;
    struct sigaction before[65], after;
    sigset_t mask_before, mask_after;

    (void)state;
    for (int s = 1; s < 65; s++)
        sigaction(s, NULL, &before[s]);
    pthread_sigmask(SIG_SETMASK, NULL, &mask_before);
    p = pair_make();
    pair_says(p.peer, 0, "count", "1");
    for (int s = 1; s < 65; s++) {
        if (sigaction(s, NULL, &after) == 0)
            t_true(after.sa_handler == before[s].sa_handler, "signal %d", s);
    }
    pthread_sigmask(SIG_SETMASK, NULL, &mask_after);
    for (int s = 1; s < 65; s++)
        t_int_eq(sigismember(&mask_before, s), sigismember(&mask_after, s), "signal %d", s);
    pair_end(&p);
}

/* Whatever fails on the way in, joining pair_says so and leaves nothing behind. */
static void joining_fails_cleanly(void **state)
{
    struct fake *fake = fake_create();
    struct furlong *f = NULL;
    struct fl_err err;
    int fds;

    (void)state;
    f = fake_joined(fake, "driver", 0, 1);
    furlong_leave(f);
    fds = t_open_fds();
    for (unsigned i = 0; i < 3; i++) {
        static const char *const places[] = { "client.thread:1=fail", "client.uplink:1=fail",
                                              "client.seat:1=fail" };

        f = NULL;
        t_ok(fl_fault_set(places[i], &err), &err);
        t_true(fake_join(fake, "driver", 0, 1, 1, &f, &err) != FL_OK, "%s", places[i]);
        t_true(!f && err.text[0], "%s", places[i]);
        fl_fault_set("", NULL);
        t_true(t_open_fds() <= fds, "%s: %d, before %d", places[i], t_open_fds(), fds);
    }
    fake_destroy(fake);
}

static void asking_fails_cleanly(void **state)
{
    static const char *const places[] = { "client.ask:1=fail", "client.call:1=fail" };
    struct pair p = pair_make();
    struct fl_err err = { 0 };

    (void)state;
    for (size_t i = 0; i < FL_LEN(places); i++) {
        t_ok(fl_fault_set(places[i], &err), &err);
        t_refused(furlong_ask(p.peer, 0, "echo", NULL, 5000, NULL, &err), FL_EXHAUSTED, &err);
        fl_fault_set("", NULL);
    }
    fl_fault_set("client.conn:1=fail,client.guest:1=fail", NULL); /* tried again by itself */
    pair_says(p.peer, 0, "count", "1");
    fl_fault_set("", NULL);
    pair_end(&p);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_daemon_that_restarts_is_not_noticed),
        cmocka_unit_test(a_head_that_is_away_is_waited_for),
        cmocka_unit_test(a_daemon_away_for_too_long),
        cmocka_unit_test(a_seat_that_was_given_on),
        cmocka_unit_test(stop_and_squeeze_come_from_the_daemon),
        cmocka_unit_test(a_forked_child_is_told),
        cmocka_unit_test(one_seat_a_process),
        cmocka_unit_test(signals_stay_as_they_were),
        cmocka_unit_test(joining_fails_cleanly),
        cmocka_unit_test(asking_fails_cleanly),
    };

    return t_run("client life", tests);
}
