/* An update that does the last one's plan again: what is not asked, and what happens if it has to
 * be. */
#include <inttypes.h>
#include "common/base/fault.h"
#include "common/proto/methods.h"
#include "tests/xfer/epoch_rig.h"

static const struct rig_opts one_engine = { .n_sources = 1, .n_engines = 1 };
static const enum xfer_mode pulled[] = { XFER_COPY, XFER_SHARE };

static void forget_served(struct rig *r)
{
    for (unsigned i = 0; i < r->n; i++)
        memset(r->p[i].served, 0, sizeof(r->p[i].served));
}

static void update_to(struct rig *r, enum xfer_mode mode, uint64_t v)
{
    rig_next(r, v);
    forget_served(r);
    t_ok(rig_update(r, mode, v), &r->err);
    rig_check_all_serve(r, v);
}

static void updates_to(struct rig *r, enum xfer_mode mode, uint64_t from, uint64_t last)
{
    for (uint64_t v = from; v <= last; v++)
        update_to(r, mode, v);
}

/* Two questions and two answers are all that lies between the driver's call and its answer; where
 * pages are shared it is one: the source has told what it published. */
static void one_engine_is_asked_twice(void **state)
{
    (void)state;
    for (size_t k = 0; k < FL_LEN(pulled); k++) {
        struct rig r;

        rig_init(&r, &one_engine);
        for (uint64_t v = 1; v <= 6; v++) {
            update_to(&r, pulled[k], v);
            if (v < 4) /* until both slots have been given once */
                continue;
            struct rig_proc *e = rig_engine(&r, 0, 0), *s = rig_source(&r, 0);

            t_int_eq(rig_served(e, FL_XFER_RECONCILE), pulled[k] == XFER_SHARE ? 0 : 1);
            t_int_eq(rig_served(s, FL_XFER_RECONCILE), pulled[k] == XFER_SHARE ? 0 : 1);
            t_int_eq(rig_served(e, FL_XFER_BEGIN), 1);
            t_true(rig_served(e, FL_XFER_WAIT) <= 1, "none, unless the bytes take long");
            t_int_eq(rig_served(e, FL_XFER_COMMIT), 0, "nobody is to be waited for");
            t_int_eq(rig_served(s, FL_XFER_BEGIN), 1);
            t_int_eq(rig_served(s, FL_XFER_KEY), 0, "its memory is mapped");
        }
        rig_fini(&r);
    }
}

/* Of several none commits before all have verified. */
static void several_wait_for_each_other(void **state)
{
    struct rig r;

    (void)state;
    rig_init(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 2 });
    updates_to(&r, XFER_COPY, 1, 4);
    for (unsigned e = 0; e < 2; e++)
        t_int_eq(rig_served(rig_engine(&r, e, 0), FL_XFER_COMMIT), 1);
    rig_next(&r, 5);
    t_true(rig_update_at(&r, "xfer.verified:1=fail", XFER_COPY, 5) != FL_OK); /* one of the two */
    t_int_eq(r.rep.n_committed, 0);
    rig_check_all_serve(&r, 4);
    t_ok(rig_update(&r, XFER_COPY, 5), &r.err);
    rig_check_all_serve(&r, 5);
    rig_fini(&r);
}

/* A fill wants more than the one engine that lacks the version: it does not commit alone. */
static void fewer_than_asked_for_do_not_commit(void **state)
{
    struct rig r;
    struct xfer_request q;

    (void)state;
    rig_init(&r, &one_engine);
    update_to(&r, XFER_COPY, 1);
    rig_next(&r, 2);
    q = (struct xfer_request){ .target = { .number = 2 },
                               .mode = XFER_COPY,
                               .party = XFER_ALL_PARTIES,
                               .least_engines = 2,
                               .due_ns = fl_loop_now_ns(r.loop) + 5000000000ull };
    t_true(rig_run(&r, &q) != FL_OK);
    t_int_eq(r.rep.n_committed, 0);
    rig_check_all_serve(&r, 1);
    rig_fini(&r);
}

static void a_part_that_is_gone_is_sent_again(void **state)
{
    static const char *const at[] = { "xfer.part:1=fail", "xfer.part:2=fail" }; /* giver, taker */

    (void)state;
    for (size_t k = 0; k < FL_LEN(at); k++) {
        struct rig r;

        rig_init(&r, &one_engine);
        updates_to(&r, XFER_COPY, 1, 3);
        t_ok(fl_fault_set(at[k], NULL), NULL);
        update_to(&r, XFER_COPY, 4);
        t_ok(fl_fault_set(NULL, NULL), NULL);
        t_int_eq(rig_served(rig_source(&r, 0), FL_XFER_BEGIN) +
                     rig_served(rig_engine(&r, 0, 0), FL_XFER_BEGIN),
                 3, "one of the two was asked twice");
        rig_fini(&r);
    }
}

/* Giver and takers begin in one step: nobody waits for a giver that said no. */
static void a_giver_that_refuses(void **state)
{
    struct rig r;
    uint64_t began;

    (void)state;
    rig_init(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 2 });
    updates_to(&r, XFER_COPY, 1, 3);
    rig_next(&r, 4);
    began = fl_loop_now_ns(r.loop);
    t_int_eq(rig_update_at(&r, "xfer.give:1=fail", XFER_COPY, 4), FL_INTERNAL);
    t_has(r.err.text, "begin at the source");
    t_has(r.err.text, "trainer 0");
    t_true(fl_loop_now_ns(r.loop) - began < 2000000000ull, "not at the deadline of 60 s");
    rig_check_all_serve(&r, 3);
    t_ok(rig_update(&r, XFER_COPY, 4), &r.err);
    rig_check_all_serve(&r, 4);
    rig_fini(&r);
}

/* The run is told when the engines have it; what the givers have to hear still is on its way. */
static void the_next_one_waits_for_the_end(void **state)
{
    struct rig r;
    struct xfer_run more = { 0 };
    struct xfer_request q;
    struct fl_err err = { 0 };

    (void)state;
    rig_init(&r, &one_engine);
    updates_to(&r, XFER_COPY, 1, 3);
    q = (struct xfer_request){ .target = { .number = 3 },
                               .mode = XFER_COPY,
                               .party = XFER_ALL_PARTIES,
                               .due_ns = fl_loop_now_ns(r.loop) + 60000000000ull };
    rig_start(&r, &q);
    t_refused(xfer_start(r.coord, &q, &more, &err), FL_AGAIN, &err);
    rig_until(&r, !r.running);
    t_ok(r.st, &r.err);
    t_int_eq(r.rep.n_committed, 1, "it was there");
    update_to(&r, XFER_COPY, 4);
    rig_coord(&r, 2); /* another driver, while the giver has not heard the end */
    update_to(&r, XFER_SHARE, 5);
    rig_fini(&r);
}

/* Its next attempt has nothing mapped and no part, and the other keeps both. */
static void an_engine_that_came_back(void **state)
{
    struct rig r;

    (void)state;
    rig_init(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 2 });
    updates_to(&r, XFER_COPY, 1, 3);
    rig_kill(rig_engine(&r, 1, 0), true);
    rig_restart(rig_engine(&r, 1, 0));
    updates_to(&r, XFER_COPY, 4, 6);
    rig_fini(&r);
}

/* ==== an update of shared pages that begins without RECONCILE ==== */
static void share_to_4(struct rig *r)
{
    rig_init(r, &one_engine);
    updates_to(r, XFER_SHARE, 1, 4);
    t_int_eq(rig_served(rig_engine(r, 0, 0), FL_XFER_RECONCILE), 0, "as it would be once more");
}

static void five_is_published(struct rig *r)
{
    share_to_4(r);
    rig_next(r, 5);
}

static void five_is_shared(struct rig *r) /* and that is the end */
{
    t_ok(rig_update(r, XFER_SHARE, 5), &r->err);
    rig_check_all_serve(r, 5);
    rig_fini(r);
}

/* Whoever answers no has changed since it was last heard: it is asked how, in the same update. */
static void a_refusal_leads_to_reconcile(void **state)
{
    static const char *const at[] = { "xfer.give:1=fail", "xfer.verified:1=fail" };

    (void)state;
    for (size_t k = 0; k < FL_LEN(at); k++) {
        struct rig r;

        share_to_4(&r);
        t_ok(fl_fault_set(at[k], NULL), NULL);
        update_to(&r, XFER_SHARE, 5);
        t_ok(fl_fault_set(NULL, NULL), NULL);
        t_int_eq(rig_served(rig_engine(&r, 0, 0), FL_XFER_RECONCILE), 1, "%s", at[k]);
        t_int_eq(r.rep.n_committed, 1);
        updates_to(&r, XFER_SHARE, 6, 8);
        t_int_eq(rig_served(rig_engine(&r, 0, 0), FL_XFER_RECONCILE), 0, "and then no more");
        rig_fini(&r);
    }
}

static void an_engine_that_dropped_its_version(void **state)
{
    struct rig r;
    struct rig_proc *e;

    (void)state;
    five_is_published(&r);
    e = rig_engine(&r, 0, 0);
    t_ok(xfer_sink_offload(e->sink, true, &r.err), &r.err); /* nobody was told */
    e->reads = NULL;
    e->serving = (struct xfer_version){ 0 };
    xfer_sink_onload(e->sink);
    five_is_shared(&r);
}

/* Another version than the one that is asked for is published: what was told is no answer. */
static void a_version_that_is_not_published(void **state)
{
    struct rig r;

    (void)state;
    five_is_published(&r);
    t_true(rig_update(&r, XFER_SHARE, 6) != FL_OK);
    t_has(r.err.text, "5 is published");
    rig_check_all_serve(&r, 4);
    t_ok(rig_update(&r, XFER_SHARE, 5), &r.err);
    rig_check_all_serve(&r, 5);
    t_ok(rig_update(&r, XFER_SHARE, 5), &r.err);
    t_int_eq(r.rep.n_committed, 1, "it was there");
    rig_fini(&r);
}

static void another_driver_knows_nothing(void **state)
{
    struct rig r;

    (void)state;
    five_is_published(&r);
    rig_coord(&r, 2);
    forget_served(&r);
    t_ok(rig_update(&r, XFER_SHARE, 5), &r.err);
    t_true(rig_served(rig_engine(&r, 0, 0), FL_XFER_RECONCILE) >= 1, "it was asked");
    rig_check_all_serve(&r, 5);
    rig_fini(&r);
}

/* Dead since: the update fails as it did, and the next attempt is filled. */
static void an_engine_that_died_since(void **state)
{
    struct rig r;

    (void)state;
    five_is_published(&r);
    rig_kill(rig_engine(&r, 0, 0), false); /* the driver finds out when it asks */
    struct xfer_request q = { .kind = XFER_ADVANCE,
                              .target = { .number = 5 },
                              .mode = XFER_SHARE,
                              .party = XFER_ALL_PARTIES,
                              .due_ns = fl_loop_now_ns(r.loop) + 3000000000ull };

    t_true(rig_run(&r, &q) != FL_OK);
    t_int_eq(r.rep.n_committed, 0);
    rig_restart(rig_engine(&r, 0, 0));
    five_is_shared(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_engine_is_asked_twice),
        cmocka_unit_test(several_wait_for_each_other),
        cmocka_unit_test(fewer_than_asked_for_do_not_commit),
        cmocka_unit_test(a_part_that_is_gone_is_sent_again),
        cmocka_unit_test(a_giver_that_refuses),
        cmocka_unit_test(the_next_one_waits_for_the_end),
        cmocka_unit_test(an_engine_that_came_back),
        cmocka_unit_test(a_refusal_leads_to_reconcile),
        cmocka_unit_test(an_engine_that_dropped_its_version),
        cmocka_unit_test(a_version_that_is_not_published),
        cmocka_unit_test(another_driver_knows_nothing),
        cmocka_unit_test(an_engine_that_died_since),
    };

    return t_run("epoch_again", tests);
}
