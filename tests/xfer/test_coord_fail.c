/* What fails in an epoch, and what holds all the same. */
#include <inttypes.h>
#include "common/base/fault.h"
#include "tests/xfer/epoch_rig.h"

static const struct rig_opts plain = { .n_sources = 1, .n_engines = 2 };

static struct xfer_request request(struct rig *r, enum xfer_kind kind, uint64_t version,
                                   unsigned least, uint64_t due_ms)
{
    return (struct xfer_request){ .kind = kind,
                                  .target = { .number = version },
                                  .mode = XFER_COPY,
                                  .slots = r->o.slots,
                                  .party = XFER_ALL_PARTIES,
                                  .least_engines = least,
                                  .due_ns = fl_loop_now_ns(r->loop) + due_ms * 1000000 };
}

static enum fl_status advance(struct rig *r, uint64_t version, unsigned least, uint64_t due_ms)
{
    struct xfer_request q = request(r, XFER_ADVANCE, version, least, due_ms);

    return rig_run(r, &q);
}

static enum fl_status fill(struct rig *r, uint32_t party)
{
    struct xfer_request q = request(r, XFER_FILL, 0, 1, 20000);

    q.party = party;
    return rig_run(r, &q);
}

static uint64_t serves(const struct rig_proc *p)
{
    struct xfer_version v = { 0 };

    return xfer_sink_data(p->sink, &v) ? v.number : UINT64_MAX;
}

/* ---- FILL ---- */

static void fill_after_restart(void **state)
{
    struct rig r;
    struct rig_proc *p;

    (void)state;
    rig_serving(&r, &plain, XFER_COPY);
    rig_kill(rig_engine(&r, 1, 0), true);
    p = rig_restart(rig_engine(&r, 1, 0));
    t_int_eq(rig_state(p), RX_EMPTY);
    t_ok(fill(&r, 1), &r.err);
    t_int_eq(rig_engine(&r, 0, 0)->flips, 1, "nobody else is touched");
    rig_check_all_serve(&r, 1);
    rig_fini(&r);
}

/* The trainer has one slot and is writing the next version: the other engine gives. */
static void fill_from_an_engine(void **state)
{
    struct rig r;

    (void)state;
    for (unsigned ranks = 1; ranks <= 2; ranks++) {
        rig_serving(
            &r,
            &(struct rig_opts){ .n_sources = 1, .n_engines = 2, .src_slots = 1, .ranks = ranks },
            XFER_COPY);
        t_ok(rig_begin(&r, 2, 5000), &r.err);
        rig_write(rig_source(&r, 0), 2);
        for (unsigned k = 0; k < ranks; k++) {
            rig_kill(rig_engine(&r, 1, k), true);
            rig_restart(rig_engine(&r, 1, k));
        }
        t_ok(fill(&r, 1), &r.err);
        t_int_eq(r.rep.n_committed, 1);
        rig_check_all_serve(&r, 1);
        rig_publish(&r, 2);
        t_ok(rig_update(&r, XFER_COPY, 2), &r.err);
        rig_check_all_serve(&r, 2);
        rig_fini(&r);
    }
}

static void fill_without_a_holder(void **state)
{
    struct rig r;

    (void)state;
    rig_init(&r, &plain);
    t_int_eq(fill(&r, 1), FL_NOT_FOUND);
    t_has(r.err.text, "policy");
    rig_fini(&r);
}

/* ---- drivers ---- */

static void an_older_driver_is_stale(void **state)
{
    struct rig r;

    (void)state;
    rig_init(&r, &plain);
    rig_next(&r, 1);
    rig_coord(&r, 2);
    t_ok(rig_update(&r, XFER_COPY, 1), &r.err);
    rig_next(&r, 2);
    rig_coord(&r, 1);
    t_int_eq(rig_update(&r, XFER_COPY, 2), FL_STALE, "%s", r.err.text);
    t_has(r.err.text, "attempt 1");
    rig_check_all_serve(&r, 1);
    rig_fini(&r);
}

static void stop_before_commit(struct rig *r)
{
    rig_next(r, 1);
    t_ok(rig_update(r, XFER_COPY, 1), &r->err);
    rig_next(r, 2);
    t_int_eq(rig_update_at(r, "xfer.decided:1=fail", XFER_COPY, 2), FL_CANCELLED);
    xfer_coord_destroy(r->coord);
    r->coord = NULL;
    for (unsigned e = 0; e < 2; e++)
        t_int_eq(rig_state(rig_engine(r, e, 0)), RX_VERIFIED);
    rig_check_all_serve(r, 1); /* they serve on */
}

static void presumed_abort(void **state)
{
    struct rig r;

    (void)state;
    rig_init(&r, &plain);
    stop_before_commit(&r);
    rig_pass(&r, XFER_LEASE_MS - 100);
    t_int_eq(rig_state(rig_engine(&r, 0, 0)), RX_VERIFIED, "the lease is not over");
    rig_pass(&r, 200);
    rig_until(&r, rig_state(rig_engine(&r, 0, 0)) == RX_SERVING &&
                      rig_state(rig_engine(&r, 1, 0)) == RX_SERVING);
    rig_check_all_serve(&r, 1);
    for (unsigned e = 0; e < 2; e++)
        t_int_eq(rig_engine(&r, e, 0)->rooms, 1, "what was staged is dropped");
    rig_coord(&r, 2);
    t_ok(rig_update(&r, XFER_COPY, 2), &r.err);
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

static void the_next_driver_does_not_wait_for_the_lease(void **state)
{
    struct rig r;
    uint64_t from;

    (void)state;
    rig_init(&r, &plain);
    stop_before_commit(&r);
    rig_coord(&r, 2);
    from = fl_loop_now_ns(r.loop);
    t_ok(rig_update(&r, XFER_COPY, 2), &r.err);
    t_true(fl_loop_now_ns(r.loop) - from < 5000000000ull);
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

/* ---- bytes ---- */

static void a_bad_bucket_at_one_engine(void **state)
{
    struct rig r;
    struct xfer_left left;

    (void)state;
    rig_serving(&r, &plain, XFER_COPY);
    rig_next(&r, 2);
    t_ok(fl_fault_set("xfer.bucket:5=fail", NULL), NULL);
    t_ok(advance(&r, 2, 1, 20000), &r.err);
    t_ok(fl_fault_set(NULL, NULL), NULL);
    t_int_eq(r.rep.n_committed, 1);
    t_int_eq(r.rep.n_left_behind, 1);
    left = r.rep.left[0];
    t_int_eq(left.why.status, FL_CORRUPT, "%s", left.why.text);
    t_has(left.why.text, "rollout");
    t_has(left.why.text, "(1 buckets, 1 tensors)");
    t_int_eq(serves(rig_engine(&r, left.party, 0)), 1, "it serves on");
    t_int_eq(serves(rig_engine(&r, 1 - left.party, 0)), 2);
    rig_check(&r);
    t_ok(fill(&r, left.party), &r.err);
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

/* All that live have to have it unless the driver says how many are enough. */
static void one_bad_engine_without_a_least(void **state)
{
    struct rig r;

    (void)state;
    rig_serving(&r, &plain, XFER_COPY);
    rig_next(&r, 2);
    t_int_eq(rig_update_at(&r, "xfer.bucket:5=fail", XFER_COPY, 2), FL_CORRUPT);
    rig_check_all_serve(&r, 1);
    t_ok(rig_update(&r, XFER_COPY, 2), &r.err);
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

static void a_bucket_bad_everywhere_is_the_sources_fault(void **state)
{
    char spec[512];
    size_t n = 0;
    struct rig r;

    (void)state;
    for (unsigned i = 1; i <= 16; i++) /* 2 engines, 3 buckets each */
        n += (size_t)snprintf(spec + n, sizeof(spec) - n, "%sxfer.bucket:%u=fail", i > 1 ? "," : "",
                              i);
    rig_init(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 2, .bucket_bytes = 32768 });
    rig_next(&r, 1);
    t_ok(fl_fault_set(spec, NULL), NULL);
    t_int_eq(advance(&r, 1, 1, 20000), FL_CORRUPT);
    t_ok(fl_fault_set(NULL, NULL), NULL);
    t_has(r.err.text, "trainer 0 is at fault");
    t_has(r.err.text, "every one of 2 engines");
    t_int_eq(r.rep.n_committed, 0);
    rig_fini(&r);
}

/* The trainer wrote without begin: one engine is enough to know. */
static void a_source_that_does_not_hold_still(void **state)
{
    static const unsigned ranks[] = { 1, 2 };
    struct rig r;

    (void)state;
    for (size_t i = 0; i < FL_LEN(ranks); i++) {
        rig_init(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 1, .ranks = ranks[i] });
        rig_next(&r, 1);
        rig_flip_bit(rig_source(&r, 0), 100);
        t_int_eq(advance(&r, 1, 1, 20000), FL_CORRUPT, "%u ranks", ranks[i]);
        t_has(r.err.text, "trainer 0 is at fault");
        t_has(r.err.text, "embed");
        t_has(r.err.text, "not what it published");
        for (unsigned k = 0; k < ranks[i]; k++)
            t_int_eq(rig_state(rig_engine(&r, 0, k)), RX_EMPTY);
        rig_fini(&r);
    }
}

static void replicas_that_differ(void **state)
{
    struct rig r;

    (void)state;
    rig_init(&r, &(struct rig_opts){ .n_sources = 2, .n_engines = 1 });
    for (unsigned i = 0; i < 2; i++)
        rig_write(rig_source(&r, i), 1);
    rig_flip_bit(rig_source(&r, 1), rig_source(&r, 1)->pieces[4].off);
    rig_publish(&r, 1);
    t_int_eq(rig_update(&r, XFER_COPY, 1), FL_CORRUPT);
    t_has(r.err.text, "trainer 0 and trainer 1 hold different bytes of layer.qkv");
    rig_fini(&r);
}

/* ---- engines that die, or are late ---- */

static void an_engine_dies_in_staging(void **state)
{
    struct rig r;
    struct xfer_request q;

    (void)state;
    for (unsigned tell = 0; tell < 2; tell++) {
        rig_init(&r, &plain);
        rig_next(&r, 1);
        q = request(&r, XFER_ADVANCE, 1, tell ? 0 : 1, 3000);
        rig_start(&r, &q);
        rig_until(&r, rig_state(rig_engine(&r, 1, 0)) == RX_STAGING);
        rig_kill(rig_engine(&r, 1, 0), tell);
        rig_until(&r, !r.running);
        t_ok(r.st, &r.err);
        t_int_eq(r.rep.n_committed, 1);
        t_int_eq(r.rep.n_left_behind, 1);
        t_has(r.rep.first_left_behind.text, tell ? "killed by signal 9" : "late, last heard");
        t_has(r.rep.first_left_behind.text, "rollout 1");
        rig_check(&r);
        t_int_eq(serves(rig_engine(&r, 0, 0)), 1);
        if (!tell)
            xfer_coord_gone(r.coord, rig_engine(&r, 1, 0)->me.who, NULL);
        rig_restart(rig_engine(&r, 1, 0));
        t_ok(fill(&r, 1), &r.err);
        rig_check_all_serve(&r, 1);
        rig_fini(&r);
    }
}

static void late_without_a_least_aborts(void **state)
{
    struct rig r;
    struct xfer_request q;

    (void)state;
    rig_init(&r, &plain);
    rig_next(&r, 1);
    q = request(&r, XFER_ADVANCE, 1, 0, 3000);
    rig_start(&r, &q);
    rig_until(&r, rig_state(rig_engine(&r, 1, 0)) == RX_STAGING);
    rig_kill(rig_engine(&r, 1, 0), false);
    rig_until(&r, !r.running);
    t_int_eq(r.st, FL_TIMEOUT);
    t_has(r.err.text, "stage: 1 of 2 missing");
    t_has(r.err.text, "rollout 1");
    t_int_eq(rig_state(rig_engine(&r, 0, 0)), RX_EMPTY, "all or nothing before the first commit");
    rig_fini(&r);
}

static void one_rank_of_an_engine_dies(void **state)
{
    struct rig r;
    struct xfer_request q;

    (void)state;
    rig_serving(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 2, .ranks = 2 }, XFER_COPY);
    rig_next(&r, 2);
    q = request(&r, XFER_ADVANCE, 2, 0, 5000);
    rig_start(&r, &q);
    rig_until(&r, rig_state(rig_engine(&r, 1, 1)) == RX_STAGING);
    rig_kill(rig_engine(&r, 1, 1), true);
    rig_until(&r, !r.running);
    t_ok(r.st, &r.err);
    t_int_eq(r.rep.n_committed, 1);
    t_int_eq(r.rep.n_left_behind, 1);
    t_int_eq(serves(rig_engine(&r, 1, 0)), 1, "its other rank has not gone ahead");
    rig_check(&r);
    rig_restart(rig_engine(&r, 1, 1));
    t_ok(fill(&r, 1), &r.err);
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

static void an_offloaded_engine_is_waited_for(void **state)
{
    struct rig r;
    struct xfer_request q;
    struct rig_proc *p;

    (void)state;
    rig_serving(&r, &plain, XFER_COPY);
    p = rig_engine(&r, 1, 0);
    p->reads = NULL;
    t_ok(xfer_sink_offload(p->sink, true, &r.err), &r.err);
    t_int_eq(p->rooms, 0, "the memory is given back");
    rig_next(&r, 2);
    q = request(&r, XFER_ADVANCE, 2, 0, 20000);
    rig_start(&r, &q);
    rig_until(&r, rig_state(rig_engine(&r, 0, 0)) == RX_VERIFIED);
    for (unsigned i = 0; i < 300; i++)
        rig_turn(&r);
    t_true(r.running && rig_state(p) == RX_EMPTY);
    xfer_sink_onload(p->sink);
    rig_until(&r, !r.running);
    t_ok(r.st, &r.err);
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

/* A driver that waits for the one that came back may give the other its memory back only after
 * that. */
static void an_offloaded_engine_keeps_nobody_from_a_fill(void **state)
{
    struct rig r;
    struct xfer_request q;
    struct rig_proc *away, *back;

    (void)state;
    rig_serving(&r, &plain, XFER_COPY);
    back = rig_engine(&r, 0, 0);
    away = rig_engine(&r, 1, 0);
    away->reads = NULL;
    t_ok(xfer_sink_offload(away->sink, true, &r.err), &r.err);
    rig_kill(back, true);
    rig_restart(back);
    q = request(&r, XFER_FILL, 0, 0, 20000);
    t_ok(rig_run(&r, &q), &r.err);
    t_int_eq(r.rep.n_committed, 1);
    t_int_eq(serves(back), 1);
    t_int_eq(r.rep.n_left_behind, 1);
    t_has(r.rep.first_left_behind.text, "offloaded");
    q = request(&r, XFER_FILL, 0, 0, 20000);
    t_true(rig_run(&r, &q) != FL_OK, "nobody could be filled");
    t_has(r.err.text, "rollout 1");
    xfer_sink_onload(away->sink);
    q = request(&r, XFER_FILL, 0, 0, 20000);
    t_ok(rig_run(&r, &q), &r.err);
    rig_check_all_serve(&r, 1);
    rig_fini(&r);
}

/* Joined, known to the driver, and its weights are not accepted: an update waits, and says so when
 * it may not any longer. */
static void an_engine_that_accepts_late_is_waited_for(void **state)
{
    struct rig r;
    struct xfer_request q;

    (void)state;
    rig_init(&r, &plain);
    rig_next(&r, 1);
    rig_drop(rig_engine(&r, 0, 0));
    rig_drop(rig_engine(&r, 1, 0));
    t_int_eq(advance(&r, 1, 1, 2000), FL_TIMEOUT);
    t_has(r.err.text, "rollout 0");
    t_has(r.err.text, "neither offered nor accepted");
    q = request(&r, XFER_ADVANCE, 1, 2, 20000);
    rig_start(&r, &q);
    for (unsigned i = 0; i < 50; i++)
        rig_turn(&r);
    t_true(r.running);
    rig_accept(rig_engine(&r, 0, 0));
    rig_accept(rig_engine(&r, 1, 0));
    rig_until(&r, !r.running);
    t_ok(r.st, &r.err);
    rig_check_all_serve(&r, 1);
    rig_fini(&r);
}

/* The driver ends while one rank of an engine has flipped and the other has not: neither runs a
 * step until a driver has brought both to one version. */
static void a_driver_ends_between_two_ranks(void **state)
{
    struct rig r;
    struct xfer_request q;
    struct rig_proc *ahead, *behind;

    (void)state;
    rig_serving(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 1, .ranks = 2 }, XFER_COPY);
    rig_next(&r, 2);
    ahead = rig_engine(&r, 0, 0);
    behind = rig_engine(&r, 0, 1);
    behind->hold_flip = true;
    q = request(&r, XFER_ADVANCE, 2, 0, 20000);
    rig_start(&r, &q);
    rig_until(&r, rig_state(ahead) == RX_SERVING && serves(ahead) == 2 && behind->flip_task);
    rig_coord(&r, 2);
    rig_pass(&r, 2 * XFER_LEASE_MS);
    t_true(ahead->paused && behind->paused, "an engine of two versions runs no step");
    behind->hold_flip = false;
    fl_post(r.loop, behind->flip_task);
    behind->flip_task = NULL;
    rig_until(&r, rig_state(behind) == RX_SERVING);
    t_true(ahead->paused && behind->paused, "nobody has said yet that both have flipped");
    t_ok(rig_update(&r, XFER_COPY, 2), &r.err);
    t_int_eq(r.rep.bytes, 0, "they have it: a word is enough");
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

/* ---- one slot ---- */

/* Version 1 serves, and 2 breaks off in the same slot; what a whole one moves. */
static uint64_t breaks_off(struct rig *r, const char *fault, enum fl_status st)
{
    uint64_t all;

    rig_serving(r, &(struct rig_opts){ .n_sources = 1, .n_engines = 1, .slots = XFER_ONE_SLOT },
                XFER_COPY);
    all = r->rep.bytes;
    rig_next(r, 2);
    t_int_eq(rig_update_at(r, fault, XFER_COPY, 2), st);
    t_int_eq(rig_state(rig_engine(r, 0, 0)), RX_DIRTY);
    return all;
}

static void the_ledger_goes_on_where_it_was(void **state)
{
    struct rig r;
    struct rx_report rep;

    (void)state;
    uint64_t all = breaks_off(&r, "xfer.pull:9=fail", FL_UNREACHABLE);
    struct rig_proc *e = rig_engine(&r, 0, 0);

    t_has(r.err.text, "bucket 9 of 12");
    t_true(xfer_sink_data(e->sink, NULL) == NULL, "it serves nothing");
    t_true(e->paused);
    xfer_sink_report(e->sink, &rep);
    t_true(rep.buckets_in >= 5 && rep.buckets_in <= 8, "%u", rep.buckets_in);
    t_ok(rig_update(&r, XFER_COPY, 2), &r.err);
    t_true(r.rep.bytes < all * 2 / 3, "%" PRIu64 " of %" PRIu64 " bytes again", r.rep.bytes, all);
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

/* Another version in the same slot: nothing of the ledger counts. */
static void the_ledger_is_of_one_version(void **state)
{
    struct rig r;

    (void)state;
    uint64_t all = breaks_off(&r, "xfer.pull:9=fail", FL_UNREACHABLE);

    rig_bring(&r, XFER_COPY, 3);
    t_int_eq(r.rep.bytes, all);
    rig_fini(&r);
}

static void bad_buckets_are_struck_from_the_ledger(void **state)
{
    struct rig r;

    (void)state;
    uint64_t all = breaks_off(&r, "xfer.bucket:4=fail", FL_CORRUPT);

    t_ok(rig_update(&r, XFER_COPY, 2), &r.err);
    t_true(r.rep.bytes > 0 && r.rep.bytes < all / 4, "%" PRIu64 " of %" PRIu64, r.rep.bytes, all);
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(fill_after_restart),
        cmocka_unit_test(fill_from_an_engine),
        cmocka_unit_test(fill_without_a_holder),
        cmocka_unit_test(an_older_driver_is_stale),
        cmocka_unit_test(presumed_abort),
        cmocka_unit_test(the_next_driver_does_not_wait_for_the_lease),
        cmocka_unit_test(a_bad_bucket_at_one_engine),
        cmocka_unit_test(one_bad_engine_without_a_least),
        cmocka_unit_test(a_bucket_bad_everywhere_is_the_sources_fault),
        cmocka_unit_test(a_source_that_does_not_hold_still),
        cmocka_unit_test(replicas_that_differ),
        cmocka_unit_test(an_engine_dies_in_staging),
        cmocka_unit_test(late_without_a_least_aborts),
        cmocka_unit_test(one_rank_of_an_engine_dies),
        cmocka_unit_test(an_offloaded_engine_is_waited_for),
        cmocka_unit_test(an_offloaded_engine_keeps_nobody_from_a_fill),
        cmocka_unit_test(an_engine_that_accepts_late_is_waited_for),
        cmocka_unit_test(a_driver_ends_between_two_ranks),
        cmocka_unit_test(the_ledger_goes_on_where_it_was),
        cmocka_unit_test(the_ledger_is_of_one_version),
        cmocka_unit_test(bad_buckets_are_struck_from_the_ledger),
    };

    return t_run("coord_fail", tests);
}
