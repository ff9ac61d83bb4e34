/* Each fault point that an ordinary join, ask, set of weights or update meets fails once: the call
 * says so or goes on, comes back in its time, and leaves nothing behind. The daemon and head of the
 * test are spared. */
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>

#include "common/base/fault.h"
#include "common/base/log.h"
#include "tests/client/fake.h"
#include "tests/client/server.h"
#include "tests/client/weights_roles.h"
#include "tests/t.h"

enum { NTH_MAX = 2000, LATE_MS = 15000 * T_SLOWDOWN };

/* One that ends while its peer still has a descriptor of the same stream: that one goes a moment
 * later. */
static void descriptors_are(int before, unsigned nth)
{
    uint64_t end = fl_clock_boot_ns() + 5000 * 1000000ull;

    while (t_open_fds() > before && fl_clock_boot_ns() < end)
        (void)poll(NULL, 0, 1);
    if (t_open_fds() <= before)
        return;
    char names[512];

    t_open_names(names, sizeof(names));
    t_true(false, "nth=%u: %d more descriptors: %s", nth, t_open_fds() - before, names);
}

static void in_time(uint64_t began_ns, unsigned nth)
{
    uint64_t ms = (fl_clock_boot_ns() - began_ns) / 1000000;

    t_true(ms < LATE_MS, "nth=%u: took %ju ms", nth, (uintmax_t)ms);
}

static void has_words(enum fl_status st, const struct fl_err *err, unsigned nth)
{
    t_true(st == FL_OK || (err->status == st && err->text[0]), "nth=%u: %s without a word", nth,
           fl_status_name(st));
}

/* ---- join ------------------------------------------------------------------------------------ */
static void every_place_of_a_join(void **state)
{
    struct fake *fake = fake_create();
    unsigned nth = 1, failed = 0;
    bool met = true;

    (void)state;
    furlong_leave(fake_joined(fake, "driver", 0, 1));
    int before = t_open_fds();

    for (; met && nth < NTH_MAX; nth++) {
        struct furlong *f = NULL;
        struct fl_err err = { 0 };
        uint64_t began_ns = fl_clock_boot_ns();

        fl_fault_arm(nth);
        enum fl_status st = fake_join(fake, "driver", 0, 1, 1, &f, &err);
        met = fl_fault_disarm();
        t_true((st == FL_OK) == (f != NULL), "nth=%u", nth);
        has_words(st, &err, nth);
        failed += st != FL_OK;
        furlong_leave(f);
        in_time(began_ns, nth);
        descriptors_are(before, nth);
    }
    t_true(nth > 10 && failed > 3, "%u places, %u of them end a join", nth, failed);
    fake_destroy(fake);
}

/* ---- ask ------------------------------------------------------------------------------------- */
static enum fl_status ask(struct furlong_peer *p, uint32_t budget_ms, struct fl_err *err)
{
    static char blob[80000];
    struct furlong_data d = { "{}", 2, blob, sizeof(blob) };
    struct furlong_answer a = { 0 };
    enum fl_status st = furlong_ask(p, 0, "echo", &d, budget_ms, &a, err);

    if (st == FL_OK)
        t_true(a.body_bytes == 2 && a.blob_bytes == sizeof(blob) &&
               memcmp(a.blob, blob, sizeof(blob)) == 0);
    furlong_answer_free(&a);
    return st;
}

static void every_place_of_an_ask(void **state)
{
    unsigned nth = 1, failed = 0;
    bool met = true;

    (void)state;
    for (; met && nth < NTH_MAX; nth++) {
        int before = t_open_fds();
        struct fake *fake = fake_create();
        struct furlong *me = fake_joined(fake, "trainer", 0, 1);
        struct server *engine = server_start(fake_joined(fake, "rollout", 0, 1));
        struct furlong_peer *peer;
        struct fl_err err = { 0 };

        t_ok(furlong_peer(me, "rollout", 0, &peer, &err), &err);
        uint64_t began_ns = fl_clock_boot_ns();
        fl_fault_arm(nth);
        enum fl_status st = ask(peer, 5000, &err);
        met = fl_fault_disarm();
        has_words(st, &err, nth);
        failed += st != FL_OK;
        t_ok(ask(peer, 20000, &err),
             &err); /* what was tried twice by itself works, what failed works now */
        in_time(began_ns, nth);
        furlong_leave(me);
        server_end(engine);
        fake_destroy(fake);
        descriptors_are(before, nth);
    }
    t_true(nth > 10 && failed > 3, "%u places, %u of them end an ask", nth, failed);
}

/* ---- a set of weights, without anybody else ----------------------------------------------------
 */
static enum fl_status offer_and_accept(struct furlong *f, struct fl_err *err)
{
    static const struct furlong_tensor t = {
        .name = "w", .dtype = FL_F32, .ndim = 1, .shape = { 4096 }
    };
    struct furlong_weights *w = NULL;
    enum fl_status st = furlong_weights_offer(f, "mine", &t, 1, NULL, &w, err);

    if (st == FL_OK) {
        memset(furlong_weights_data(w, 0), 7, 4096 * 4);
        st = furlong_weights_publish(w, 0, err);
    }
    furlong_weights_drop(w);
    if (st != FL_OK)
        return st;
    w = NULL;
    st = furlong_weights_accept(f, "others", &t, 1, NULL, &w, err);
    furlong_weights_drop(w);
    return st;
}

static void every_place_of_a_set(void **state)
{
    struct fake *fake = fake_create();
    struct furlong *f = fake_joined(fake, "trainer", 0, 1);
    unsigned nth = 1, failed = 0;
    bool met = true;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(offer_and_accept(f, &err), &err);
    int before = t_open_fds();
    for (; met && nth < NTH_MAX; nth++) {
        uint64_t began_ns = fl_clock_boot_ns();

        fl_fault_arm(nth);
        enum fl_status st = offer_and_accept(f, &err);
        met = fl_fault_disarm();
        has_words(st, &err, nth);
        failed += st != FL_OK;
        t_ok(offer_and_accept(f, &err), &err); /* the name of the set is free again */
        in_time(began_ns, nth);
        descriptors_are(before, nth);
    }
    t_true(nth > 2 && failed > 1, "%u places, %u of them end it", nth, failed);
    furlong_leave(f);
    fake_destroy(fake);
}

/* ---- an update --------------------------------------------------------------------------------
 */
struct player {
    struct furlong *f;
    pthread_t thread;
    int (*run)(struct furlong *f);
    int rc;
};

static void *play(void *arg)
{
    struct player *p = arg;

    p->rc = p->run(p->f);
    return NULL;
}

static void player_start(struct player *p, struct fake *fake, const char *role,
                         int (*run)(struct furlong *f))
{
    *p = (struct player){ .f = fake_joined(fake, role, 0, 1), .run = run };
    t_true(pthread_create(&p->thread, NULL, play, p) == 0);
}

static void player_end(struct player *p, struct fake *fake, const char *role)
{
    fake_stop(fake, role, 0, 5000);
    t_true(pthread_join(p->thread, NULL) == 0);
    furlong_leave(p->f);
}

static struct furlong_group *group(struct furlong *me, struct furlong_layout *y, const char *role)
{
    char *argv[] = { "/bin/false", NULL }, *env[] = { NULL }; /* runs already: nothing is started */
    struct furlong_group *g = NULL;
    struct fl_err err;

    t_ok(furlong_launch(me, y, role, argv, env, &(struct furlong_launch_opts){ .start_ms = 20000 },
                        &g, &err),
         &err);
    return g;
}

static enum fl_status update(struct furlong_group *from, struct furlong_group *to,
                             uint32_t budget_ms, struct fl_err *err)
{
    struct furlong_update how = { .set = "policy", .mode = "copy", .budget_ms = budget_ms };

    return furlong_update(from, to, &how, NULL, err);
}

static void every_place_of_an_update(void **state)
{
    unsigned nth = 1, failed = 0;
    bool met = true;

    (void)state;
    for (; met && nth < NTH_MAX; nth++) {
        int before = t_open_fds();
        struct fake *fake = fake_create();
        struct furlong *me = fake_joined(fake, "driver", 0, 1);
        struct furlong_layout *y;
        struct player trainer, engine;
        struct fl_err err = { 0 };

        player_start(&trainer, fake, "trainer", run_trainer);
        player_start(&engine, fake, "rollout", run_engine);
        t_ok(furlong_place(me, (struct furlong_flag[]){ { "trainer", "1" }, { "rollout", "1" } }, 2,
                           &y, &err),
             &err);
        struct furlong_group *from = group(me, y, "trainer"), *to = group(me, y, "rollout");

        uint64_t began_ns = fl_clock_boot_ns();
        fl_fault_arm(nth);
        enum fl_status st = update(from, to, 3000, &err);
        met = fl_fault_disarm();
        has_words(st, &err, nth);
        failed += st != FL_OK;
        st = update(from, to, 3000, &err);
        in_time(began_ns, nth);
        furlong_group_end(to);
        furlong_group_end(from);
        furlong_layout_free(y);
        player_end(&engine, fake, "rollout");
        player_end(&trainer, fake, "trainer");
        /* One that the fault has ended says so when it has returned, not before. */
        t_true(st == FL_OK || engine.rc || trainer.rc, "nth=%u: the update after it: %s", nth,
               err.text);
        furlong_leave(me);
        fake_destroy(fake);
        descriptors_are(before, nth);
    }
    t_true(nth > 10 && failed > 3, "%u places, %u of them end an update", nth, failed);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_place_of_a_join),
        cmocka_unit_test(every_place_of_an_ask),
        cmocka_unit_test(every_place_of_a_set),
        cmocka_unit_test(every_place_of_an_update),
    };

    (void)fl_log_level_set("error", NULL); /* each failure is told once more by somebody */
    return t_run("client sweep", tests);
}
