/* begin and publish: the source holds still, and is granted its slot when nobody reads it. */
#include <inttypes.h>
#include "common/base/fault.h"
#include "tests/xfer/epoch_rig.h"

static const struct rig_opts one_slot = {
    .n_sources = 1, .n_engines = 2, .src_slots = 1, .slots = XFER_ONE_SLOT
};

static void only_what_was_begun_is_published(void **state)
{
    struct rig r;
    struct rig_proc *p;
    struct fl_err err = { 0 };
    struct xfer_wait w = { 0 };

    (void)state;
    rig_init(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 1 });
    p = rig_source(&r, 0);
    rig_write(p, 1);
    t_refused(xfer_source_begin(p->src, 1, UINT64_MAX, &w, &err), FL_INVALID, &err);
    rig_publish(&r, 1);
    t_refused(xfer_source_publish(p->src, 2, &w, &err), FL_INVALID, &err);
    t_has(err.text, "without begin");
    t_has(err.text, "frozen at version 1");
    t_ok(rig_begin(&r, 2, 5000), &r.err);
    t_refused(xfer_source_publish(p->src, 3, &w, &err), FL_INVALID, &err);
    t_has(err.text, "version 2 was begun");
    t_refused(xfer_source_begin(p->src, 3, UINT64_MAX, &w, &err), FL_INVALID, &err);
    rig_fini(&r);
}

/* Before any driver was heard nobody can be reading. */
static void begin_without_a_driver(void **state)
{
    struct rig r;

    (void)state;
    rig_init(&r, &one_slot);
    xfer_coord_destroy(r.coord);
    r.coord = NULL;
    rig_write(rig_source(&r, 0), 0);
    rig_publish(&r, 0);
    t_ok(rig_begin(&r, 1, 1000), &r.err);
    rig_fini(&r);
}

/* An engine's program gives the set up, and stays: it reads nothing, whatever was known of it. */
static void who_has_dropped_holds_up_no_begin(void **state)
{
    struct rig r;

    (void)state;
    rig_serving(&r, &one_slot, XFER_SHARE);
    rig_drop(rig_engine(&r, 1, 0));
    t_ok(rig_begin(&r, 2, 5000), &r.err);
    t_int_eq(rig_state(rig_engine(&r, 0, 0)), RX_DIRTY);
    rig_accept(rig_engine(&r, 1, 0));
    rig_write(rig_source(&r, 0), 2);
    rig_publish(&r, 2);
    t_ok(rig_update(&r, XFER_SHARE, 2), &r.err);
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

static void one_slot_is_dirty_before_the_first_write(void **state)
{
    struct rig r;

    (void)state;
    rig_serving(&r, &one_slot, XFER_SHARE);
    t_ok(rig_begin(&r, 2, 5000), &r.err);
    for (unsigned e = 0; e < 2; e++) {
        t_int_eq(rig_state(rig_engine(&r, e, 0)), RX_DIRTY);
        t_true(rig_engine(&r, e, 0)->paused, "no step runs");
        t_true(xfer_sink_data(rig_engine(&r, e, 0)->sink, NULL) == NULL);
    }
    rig_write(rig_source(&r, 0), 2);
    rig_publish(&r, 2);
    t_ok(rig_update(&r, XFER_SHARE, 2), &r.err);
    t_int_eq(r.rep.bytes, 0);
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

static void begin_names_who_still_reads(void **state)
{
    struct rig r;
    struct rig_proc *p;

    (void)state;
    rig_serving(&r, &one_slot, XFER_SHARE);
    p = rig_engine(&r, 1, 0);
    p->hold_pause = true; /* a step that does not end */
    t_int_eq(rig_begin(&r, 2, 3000), FL_TIMEOUT);
    t_has(r.err.text, "rollout 1");
    t_has(r.err.text, "reads slot 0 of trainer 0");
    rig_until(&r, p->pause_task);
    fl_post(r.loop, p->pause_task);
    p->pause_task = NULL;
    t_ok(rig_begin(&r, 2, 3000), &r.err);
    rig_write(rig_source(&r, 0), 2);
    rig_publish(&r, 2);
    p->hold_pause = false;
    t_ok(rig_update(&r, XFER_SHARE, 2), &r.err);
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

static void who_is_dead_is_not_waited_for(void **state)
{
    struct rig r;

    (void)state;
    rig_serving(&r, &one_slot, XFER_SHARE);
    rig_kill(rig_engine(&r, 1, 0), true);
    t_ok(rig_begin(&r, 2, 3000), &r.err);
    rig_kill(rig_engine(&r, 0, 0), false);
    rig_write(rig_source(&r, 0), 2);
    rig_publish(&r, 2);
    xfer_coord_gone(r.coord, rig_engine(&r, 0, 0)->me.who, NULL);
    t_ok(rig_begin(&r, 3, 3000), &r.err);
    rig_fini(&r);
}

static void a_driver_that_is_gone_grants_nothing(void **state)
{
    struct rig r;

    (void)state;
    rig_serving(&r, &one_slot, XFER_SHARE);
    xfer_coord_destroy(r.coord);
    r.coord = NULL;
    t_int_eq(rig_begin(&r, 2, 2000), FL_TIMEOUT);
    t_has(r.err.text, "trainer 0");
    rig_check_all_serve(&r, 1); /* and it stayed frozen */
    rig_coord(&r, 2);
    t_ok(rig_begin(&r, 2, 20000), &r.err);
    rig_fini(&r);
}

/* Two slots: whoever was left behind reads the slot that is due next. */
static void two_slots_and_one_left_behind(void **state)
{
    struct rig r;
    struct xfer_request q;

    (void)state;
    rig_serving(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 2 }, XFER_SHARE);
    rig_next(&r, 2);
    t_ok(fl_fault_set("xfer.verified:1=fail", NULL), NULL);
    q = (struct xfer_request){ .target = { .number = 2 },
                               .mode = XFER_SHARE,
                               .least_engines = 1,
                               .due_ns = fl_loop_now_ns(r.loop) + 5000000000ull };
    t_ok(rig_run(&r, &q), &r.err);
    t_ok(fl_fault_set(NULL, NULL), NULL);
    t_int_eq(r.rep.n_left_behind, 1);
    rig_check(&r);
    t_ok(rig_begin(&r, 3, 5000), &r.err); /* its slot */
    t_int_eq(rig_state(rig_engine(&r, r.rep.left[0].party, 0)), RX_DIRTY, "it has given it up");
    t_int_eq(rig_state(rig_engine(&r, 1 - r.rep.left[0].party, 0)), RX_SERVING);
    rig_write(rig_source(&r, 0), 3);
    rig_publish(&r, 3);
    t_ok(rig_update(&r, XFER_SHARE, 3), &r.err);
    rig_check_all_serve(&r, 3);
    rig_fini(&r);
}

/* A trainer that went back: other weights under an old number are another version. */
static void an_old_number_with_new_bytes(void **state)
{
    struct rig r;
    struct xfer_version was, now;

    (void)state;
    rig_serving(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 1 }, XFER_COPY);
    xfer_sink_data(rig_engine(&r, 0, 0)->sink, &was);
    t_ok(rig_begin(&r, 1, 5000), &r.err);
    rig_write(rig_source(&r, 0), 9);
    rig_publish(&r, 1);
    t_ok(rig_update(&r, XFER_COPY, 1), &r.err);
    t_true(r.rep.bytes > 0, "it is not taken for the one that is there");
    xfer_sink_data(rig_engine(&r, 0, 0)->sink, &now);
    t_true(now.number == was.number && !xfer_version_same(&now, &was));
    rig_fini(&r);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_what_was_begun_is_published),
        cmocka_unit_test(begin_without_a_driver),
        cmocka_unit_test(who_has_dropped_holds_up_no_begin),
        cmocka_unit_test(one_slot_is_dirty_before_the_first_write),
        cmocka_unit_test(begin_names_who_still_reads),
        cmocka_unit_test(who_is_dead_is_not_waited_for),
        cmocka_unit_test(a_driver_that_is_gone_grants_nothing),
        cmocka_unit_test(two_slots_and_one_left_behind),
        cmocka_unit_test(an_old_number_with_new_bytes),
    };

    return t_run("coord_begin", tests);
}
