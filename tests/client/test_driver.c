#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/client/fake.h"
#include "tests/client/server.h"
#include "tests/t.h"

struct run {
    struct fake *fake;
    struct furlong *me;
    struct furlong_layout *layout;
};

static struct run run_make(const char *trainers, const char *engines)
{
    struct run r = { .fake = fake_create() };
    struct furlong_flag flags[] = { { "trainer", trainers },
                                    { "rollout", engines },
                                    { "colocate", NULL } };
    struct fl_err err;

    r.me = fake_joined(r.fake, "driver", 0, 1);
    t_ok(furlong_place(r.me, flags, 3, &r.layout, &err), &err);
    return r;
}

static void run_end(struct run *r)
{
    furlong_layout_free(r->layout);
    furlong_leave(r->me);
    fake_destroy(r->fake);
}

static enum fl_status launch_by(__typeof__(furlong_launch) *how, struct run *r, const char *role,
                                const char *play, const char *world,
                                const struct furlong_launch_opts *o, struct furlong_group **out,
                                struct fl_err *err)
{
    char words[64], *argv[] = { "/proc/self/exe", (char *)(uintptr_t)play, NULL },
                    *env[] = { words, "PLAY=yes=no", NULL };

    snprintf(words, sizeof(words), "FAKE_WORLD=%s", world);
    return how(r->me, r->layout, role, argv, env, o, out, err);
}

static enum fl_status launch(struct run *r, const char *role, const char *play, const char *world,
                             const struct furlong_launch_opts *o, struct furlong_group **out,
                             struct fl_err *err)
{
    return launch_by(furlong_launch, r, role, play, world, o, out, err);
}

static void layouts_can_be_read(void **state)
{
    struct run r = run_make("1", "2");
    struct furlong_layout_rank rank;
    struct furlong_layout *y = NULL;
    struct fl_err err = { 0 };
    char *json, text[64] = "";
    int pipes[2];

    (void)state;
    t_int_eq(furlong_layout_count(r.layout, "trainer"), 1);
    t_int_eq(furlong_layout_count(r.layout, "rollout"), 2);
    t_int_eq(furlong_layout_count(r.layout, "critic"), 0);
    t_true(furlong_layout_rank(r.layout, "rollout", 1, &rank));
    t_str_eq(rank.node, "gpu-\"a\"");
    t_int_eq(rank.n_devices, 1);
    t_true(!furlong_layout_rank(r.layout, "rollout", 2, &rank));
    furlong_layout_json(r.layout, &json);
    t_str_eq(json, "{\"group\":\"ab0000000000000000000000000000000000\",\"master\":\"127.0.0.1\","
                   "\"master_port\":29500,"
                   "\"roles\":{\"trainer\":[{\"rank\":0,\"node\":\"gpu-\\\"a\\\"\",\"address\":"
                   "\"127.0.0.1\",\"local_rank\":0,"
                   "\"devices\":[\"0\"],\"bundles\":[]}],\"rollout\":[{\"rank\":0,\"node\":\"gpu-"
                   "\\\"a\\\"\",\"address\":"
                   "\"127.0.0.1\",\"local_rank\":0,\"devices\":[\"0\"],\"bundles\":[]},{\"rank\":1,"
                   "\"node\":\"gpu-\\\"a\\\"\","
                   "\"address\":\"127.0.0.1\",\"local_rank\":1,\"devices\":[\"0\"],\"bundles\":[]}]"
                   "},\"derived\":[{\"flag\":"
                   "\"rollout-num-gpus\",\"value\":\"1\",\"why\":\"one device is left\"}]}");
    free(json);
    t_true(pipe(pipes) == 0);
    furlong_layout_print(r.layout, pipes[1]);
    t_true(read(pipes[0], text, sizeof(text) - 1) > 0);
    t_str_eq(text, "trainer 0  gpu-a  0\n");
    close(pipes[0]);
    close(pipes[1]);
    t_refused(furlong_place(r.me, (struct furlong_flag[]){ { "trainer", "33" } }, 1, &y, &err),
              FL_INVALID, &err);
    t_has(err.text, "33 devices asked");
    t_refused(furlong_place(r.me, (struct furlong_flag[]){ { "", "1" } }, 1, &y, &err), FL_INVALID,
              &err);
    t_true(!y);
    furlong_layout_free(NULL);
    run_end(&r);
}

static void only_drivers_place(void **state)
{
    struct fake *fake = fake_create();
    struct furlong *f = fake_joined(fake, "trainer", 0, 1);
    struct furlong_layout *y = NULL;
    struct fl_err err = { 0 };

    (void)state;
    t_refused(furlong_place(f, NULL, 0, &y, &err), FL_DENIED, &err);
    furlong_leave(f);
    fake_destroy(fake);
}

static void a_group_lives_and_ends(void **state)
{
    struct run r = run_make("1", "3");
    struct furlong_answer each[3];
    struct furlong_member m;
    struct furlong_group *g;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(launch(&r, "rollout", "server", "3", NULL, &g, &err), &err);
    t_int_eq(furlong_group_size(g), 3);
    furlong_group_member(g, 2, &m);
    t_int_eq(m.state, FURLONG_LIVE);
    t_int_eq(m.attempt, 1);
    t_str_eq(m.node, "gpu-a");
    t_true(!furlong_group_peer(g, 3) && furlong_group_peer(g, 2));
    t_ok(furlong_ask_all(g, "echo", &(struct furlong_data){ "hello", 5, "blob", 4 }, 10000, each,
                         &err),
         &err);
    for (int i = 0; i < 3; i++) {
        t_int_eq(each[i].body_bytes, 5);
        t_true(memcmp(each[i].blob, "blob", 4) == 0);
        furlong_answer_free(&each[i]);
    }
    t_int_eq(fake_finds(r.fake), 0, "a driver needs no directory for its members");
    furlong_group_end(g);
    t_int_eq(fake_running(r.fake, 0), 0);
    run_end(&r);
}

static void programs_that_do_not_join(void **state)
{
    struct run r = run_make("1", "1");
    struct furlong_launch_opts o = { .start_ms = 300 };
    struct furlong_group *g = NULL;
    struct fl_err err = { 0 };

    (void)state;
    t_refused(launch(&r, "trainer", "exit3", "1", NULL, &g, &err), FL_UNREACHABLE, &err);
    t_has(err.text, "trainer 0 on gpu-a");
    t_has(err.text, "exit code 3");
    t_refused(launch(&r, "rollout", "never", "1", &o, &g, &err), FL_TIMEOUT, &err);
    t_has(err.text, "rollout 0 on gpu-a, attempt 1 has not joined");
    t_true(!g);
    t_refused(launch(&r, "critic", "server", "1", NULL, &g, &err), FL_NOT_FOUND, &err);
    t_int_eq(fake_running(r.fake, 0), 0, "nothing half done");
    run_end(&r);
}

/* Neither joins before the other has started. */
static void roles_start_side_by_side(void **state)
{
    struct furlong_group *trainers, *engines;
    struct fl_err err = { 0 };

    (void)state;
    setenv("MEET", t_path("meet"), 1);
    struct run r = run_make("1", "1");

    t_ok(launch_by(furlong_launch_start, &r, "rollout", "meets", "1", NULL, &engines, &err), &err);
    t_refused(furlong_group_wait(engines, 1, &err), FL_TIMEOUT, &err);
    t_has(err.text, "rollout 0 on gpu-a, attempt 1 has not joined");
    t_ok(launch_by(furlong_launch_start, &r, "trainer", "meets", "1", NULL, &trainers, &err), &err);
    t_ok(furlong_group_wait(engines, 20000, &err), &err);
    t_ok(furlong_group_wait(trainers, 20000, &err), &err);
    furlong_group_end(engines);
    furlong_group_end(trainers);
    t_ok(launch_by(furlong_launch_start, &r, "rollout", "exit3", "1", NULL, &engines, &err), &err);
    t_refused(furlong_group_wait(engines, 20000, &err), FL_UNREACHABLE, &err);
    t_has(err.text, "exit code 3");
    furlong_group_end(engines);
    t_refused(launch_by(furlong_launch_start, &r, "critic", "server", "1", NULL, &engines, &err),
              FL_NOT_FOUND, &err);
    t_int_eq(fake_running(r.fake, 0), 0);
    run_end(&r);
}

static void a_killed_member_comes_back(void **state)
{
    struct run r = run_make("1", "2");
    struct furlong_launch_opts o = { .restart_max = 1, .backoff_ms = 10, .backoff_max_ms = 100 };
    struct furlong_member m = { 0 };
    struct furlong_group *g;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(launch(&r, "rollout", "server", "2", &o, &g, &err), &err);
    t_ok(furlong_ask(furlong_group_peer(g, 1), 0, "count", NULL, 10000, NULL, &err), &err);
    fake_kill(r.fake, "rollout", 1, SIGKILL);
    while (m.attempt != 2)
        furlong_group_member(g, 1, &m);
    t_ok(furlong_group_wait(g, 20000, &err), &err);
    furlong_group_member(g, 1, &m);
    t_int_eq(m.state, FURLONG_LIVE);
    t_str_eq(m.why, "signal 9");
    t_ok(furlong_ask(furlong_group_peer(g, 1), 0, "count", NULL, 10000, NULL, &err), &err);
    fake_kill(r.fake, "rollout", 1, SIGKILL);
    while (m.state != FURLONG_ENDED)
        furlong_group_member(g, 1, &m);
    t_refused(furlong_group_wait(g, 20000, &err), FL_UNREACHABLE, &err);
    t_has(err.text, "rollout 1 on gpu-a, attempt 2 ended: signal 9");
    t_refused(furlong_ask(furlong_group_peer(g, 1), 0, "count", NULL, 10000, NULL, &err),
              FL_UNREACHABLE, &err);
    t_has(err.text, "signal 9");
    furlong_group_end(g);
    run_end(&r);
}

static void asking_all_names_who_is_missing(void **state)
{
    struct run r = run_make("1", "3");
    struct furlong_answer each[3];
    struct furlong_group *g;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(launch(&r, "rollout", "server", "3", NULL, &g, &err), &err);
    t_ok(furlong_ask_all(g, "count", NULL, 10000, NULL, &err), &err);
    fake_kill(r.fake, "rollout", 1, SIGSTOP);
    t_refused(furlong_ask_all(g, "count", NULL, 300, each, &err), FL_TIMEOUT, &err);
    t_has(err.text, "count");
    t_has(err.text, "rollout 1 on gpu-a (asked)");
    t_int_eq(each[0].body_bytes, 1);
    t_int_eq(each[1].body_bytes, 0);
    t_int_eq(each[2].body_bytes, 1);
    furlong_answer_free(&each[0]);
    furlong_answer_free(&each[2]);
    fake_kill(r.fake, "rollout", 1, SIGCONT);
    t_refused(furlong_ask_all(g, "refuse", NULL, 10000, NULL, &err), FL_STALE, &err);
    t_has(err.text, "on gpu-a: version 3 was asked for");
    fake_kill(r.fake, "rollout", 2, SIGKILL);
    t_refused(furlong_ask_all(g, "count", NULL, 20000, NULL, &err), FL_UNREACHABLE, &err);
    t_has(err.text, "rollout 2 on gpu-a"); /* it was asked, or known to be gone already */
    furlong_group_end(g);
    run_end(&r);
}

/* A process that was stopped reads nothing: what was sent to it must not hold its caller for good.
 */
static void a_stopped_process_does_not_hold_a_blob(void **state)
{
    struct run r = run_make("1", "1");
    struct furlong_data d = { .blob_bytes = 64 << 20 };
    struct furlong_group *g;
    struct fl_err err = { 0 };

    (void)state;
    d.blob = calloc(1, d.blob_bytes);
    t_ok(launch(&r, "rollout", "server", "1", NULL, &g, &err), &err);
    t_ok(furlong_ask(furlong_group_peer(g, 0), 0, "count", NULL, 10000, NULL, &err), &err);
    fake_kill(r.fake, "rollout", 0, SIGSTOP);
    t_refused(furlong_ask(furlong_group_peer(g, 0), 0, "count", &d, 200, NULL, &err), FL_TIMEOUT,
              &err);
    fake_kill(r.fake, "rollout", 0, SIGCONT);
    t_ok(furlong_ask(furlong_group_peer(g, 0), 0, "count", &d, 20000, NULL, &err), &err);
    free((void *)(uintptr_t)d.blob);
    furlong_group_end(g);
    run_end(&r);
}

static void who_hangs_is_ended_and_comes_back(void **state)
{
    struct furlong_launch_opts o = { .restart_max = 1, .backoff_ms = 10, .backoff_max_ms = 10 };
    struct run r = run_make("1", "2");
    struct furlong_member m;
    struct furlong_group *g;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(launch(&r, "rollout", "server", "2", &o, &g, &err), &err);
    t_ok(furlong_ask_all(g, "count", NULL, 10000, NULL, &err), &err);
    t_int_eq(furlong_group_late(g, 1, &m), FURLONG_IN_TIME);
    fake_kill(r.fake, "rollout", 1, SIGSTOP);
    t_refused(furlong_ask_all(g, "count", NULL, 300, NULL, &err), FL_TIMEOUT, &err);
    t_int_eq(furlong_group_late(g, 0, &m), FURLONG_IN_TIME);
    t_int_eq(furlong_group_late(g, 1, &m), FURLONG_SILENT);
    t_int_eq(m.attempt, 1);
    t_has(m.why, "rollout 1 on gpu-a");
    t_ok(furlong_member_end(g, 1, m.attempt, m.why, 20000, &err), &err);
    t_int_eq(furlong_group_late(g, 1, &m), FURLONG_IN_TIME);
    t_ok(furlong_member_end(g, 1, 1, NULL, 20000, &err), &err); /* it has ended: nothing happens */
    t_ok(furlong_group_wait(g, 20000, &err), &err);
    furlong_group_member(g, 1, &m);
    t_int_eq(m.attempt, 2);
    t_ok(furlong_ask_all(g, "count", NULL, 10000, NULL, &err), &err);
    t_refused(furlong_member_end(g, 2, 1, NULL, 1000, &err), FL_NOT_FOUND, &err);
    furlong_group_end(g);
    run_end(&r);
}

static void a_group_restarts(void **state)
{
    struct run r = run_make("2", "1");
    struct furlong_member m;
    struct furlong_group *g;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(launch(&r, "trainer", "server", "2", NULL, &g, &err), &err);
    t_ok(furlong_group_restart(g, 20000, &err), &err);
    for (uint32_t i = 0; i < 2; i++) {
        furlong_group_member(g, i, &m);
        t_int_eq(m.attempt, 2);
        t_int_eq(m.state, FURLONG_LIVE);
    }
    t_ok(furlong_ask_all(g, "count", NULL, 10000, NULL, &err), &err);
    furlong_group_end(g);
    run_end(&r);
}

static void a_driver_that_comes_back_finds_its_group(void **state)
{
    struct run r = run_make("1", "2");
    struct furlong_answer a;
    struct furlong_group *g;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(launch(&r, "rollout", "server", "2", NULL, &g, &err), &err);
    t_ok(furlong_ask_all(g, "count", NULL, 10000, NULL, &err), &err);
    furlong_layout_free(r.layout);
    furlong_leave(r.me); /* as if it had crashed: the group was not ended */
    t_int_eq(fake_running(r.fake, 2), 2);
    t_ok(fake_join(r.fake, "driver", 0, 1, 2, &r.me, &err), &err);
    t_ok(furlong_place(r.me, (struct furlong_flag[]){ { "rollout", "2" } }, 1, &r.layout, &err),
         &err);
    t_ok(launch(&r, "rollout", "server", "2", NULL, &g, &err), &err);
    t_int_eq(fake_running(r.fake, 2), 2, "no second process");
    t_ok(furlong_ask(furlong_group_peer(g, 0), 0, "count", NULL, 10000, &a, &err), &err);
    t_true(a.body_bytes == 1 && *(const char *)a.body == '2', "the same process counts on");
    furlong_answer_free(&a);
    furlong_group_end(g);
    run_end(&r);
}

static void a_daemon_that_restarts_tells_the_members_again(void **state)
{
    struct run r = run_make("1", "1");
    struct furlong_launch_opts o = { .restart_max = 1, .backoff_ms = 1 };
    struct furlong_member m = { 0 };
    struct furlong_group *g;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(launch(&r, "rollout", "server", "1", &o, &g, &err), &err);
    fake_down(r.fake);
    fake_kill(r.fake, "rollout", 0, SIGKILL); /* while nobody can tell the driver */
    fake_up(r.fake);
    while (m.attempt != 2)
        furlong_group_member(g, 0, &m);
    t_ok(furlong_group_wait(g, 20000, &err), &err);
    furlong_group_end(g);
    run_end(&r);
}

/* A socket of two ends: the first to come listens, the second calls it. */
static int meet(const char *path)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    snprintf(a.sun_path, sizeof(a.sun_path), "%s", path);
    if (bind(fd, (struct sockaddr *)&a, sizeof(a)) == 0)
        return listen(fd, 1) < 0 ? -1 : accept(fd, NULL, NULL);
    while (connect(fd, (struct sockaddr *)&a, sizeof(a)) < 0)
        if (errno != ECONNREFUSED) /* bound, and not listening yet */
            return -1;
    return 0;
}

static int play(const char *role)
{
    struct furlong *f = NULL;
    struct fl_err err = { 0 };

    if (strcmp(role, "exit3") == 0)
        return 3;
    if (strcmp(role, "never") == 0)
        return pause();
    if (strcmp(role, "meets") == 0 && meet(getenv("MEET")) < 0)
        return 1;
    if (strcmp(getenv("PLAY"), "yes=no") != 0 || furlong_join(FURLONG_ABI, &f, &err) != FL_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    return server_wait(server_start(f), &err) == FL_OK ? 0 : 1;
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(layouts_can_be_read),
        cmocka_unit_test(only_drivers_place),
        cmocka_unit_test(a_group_lives_and_ends),
        cmocka_unit_test(programs_that_do_not_join),
        cmocka_unit_test(roles_start_side_by_side),
        cmocka_unit_test(a_killed_member_comes_back),
        cmocka_unit_test(asking_all_names_who_is_missing),
        cmocka_unit_test(a_stopped_process_does_not_hold_a_blob),
        cmocka_unit_test(who_hangs_is_ended_and_comes_back),
        cmocka_unit_test(a_group_restarts),
        cmocka_unit_test(a_driver_that_comes_back_finds_its_group),
        cmocka_unit_test(a_daemon_that_restarts_tells_the_members_again),
    };

    if (fake_role(argc, argv))
        return play(fake_role(argc, argv));
    return t_run("client driver", tests);
}
