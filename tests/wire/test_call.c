/* One suite over all carriers: what a call promises, whatever carries it. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "tests/wire/duo.h"

static void answers_come_back(void **state)
{
    static const size_t sizes[][2] = {
        { 8, 0 }, { 9, 1 }, { 100, 5000 }, { 70000, 70000 }, { 8, 3 * WIRE_PIECE }
    };

    (void)state;
    EACH_CARRIER(c)
    {
        struct duo d;
        struct fl_err err = { 0 };

        duo_open(&d, c);
        for (unsigned i = 0; i < FL_LEN(sizes); i++) {
            struct ask a = { 0 };

            t_ok(ask_sized(&d, &a, ECHO, 0, i, sizes[i][0], sizes[i][1], 0, &err), &err);
            t_int_eq(a.done, 0, "never inside call_start");
            duo_until(&d, a.done);
            t_int_eq(a.st, FL_OK, "%s", a.err.text);
            t_int_eq(a.body_len, sizes[i][0]);
            t_int_eq(a.blob_len, sizes[i][1]);
            for (size_t k = 0; k < a.blob_len; k++)
                if (a.blob[k] != (uint8_t)(i + k * 11 + (k >> 9)))
                    t_true(false, "byte %zu over %s", k, c->name);
            t_true(!a.op.peer);
            ask_fini(&a);
        }
        duo_fini(&d);
    }
}

static void errors_pass_as_they_are(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct duo d;
        struct ask a = { 0 }, b = { 0 };

        duo_open(&d, c);
        ask(&d, &a, FAIL, 0, 1);
        ask(&d, &b, UNKNOWN, 0, 1);
        duo_until(&d, a.done && b.done);
        t_int_eq(a.st, FL_EXHAUSTED);
        t_int_eq(a.err.status, FL_EXHAUSTED);
        t_int_eq(a.err.origin, FL_FROM_CUDA);
        t_int_eq(a.err.native, 2);
        t_str_eq(a.err.text, "bucket 3: out of memory");
        t_int_eq(b.st, FL_UNSUPPORTED);
        t_has(b.err.text, "method 99");
        duo_fini(&d);
    }
}

/* From outside, by the method's name: the nth request that comes is refused, and no other. */
static void a_request_is_a_fault_point(void **state)
{
    struct fl_err err = { 0 };

    (void)state;
    EACH_CARRIER(c)
    {
        struct ask a[3] = { 0 };
        struct duo d;

        duo_open(&d, c);
        t_ok(fl_fault_set("echo:2=fail", &err), &err);
        for (unsigned i = 0; i < 3; i++)
            ask(&d, &a[i], ECHO, 0, i);
        duo_until(&d, a[0].done && a[1].done && a[2].done);
        for (unsigned i = 0; i < 3; i++)
            t_int_eq(a[i].st, i == 1 ? FL_EXHAUSTED : FL_OK, "%s", a[i].err.text);
        t_has(a[1].err.text, "fault echo");
        t_ok(fl_fault_set(NULL, &err), &err);
        for (unsigned i = 0; i < 3; i++)
            ask_fini(&a[i]);
        duo_fini(&d);
    }
}

static void lanes_keep_order_and_replies_do_not(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct duo d;
        struct ask a[20] = { 0 };

        duo_open(&d, c);
        for (unsigned i = 0; i < 20; i++)
            ask(&d, &a[i], KEEP, i % 3, i);
        duo_until(&d, d.b.n_kept == 20);
        for (unsigned lane = 0; lane < 3; lane++) {
            uint64_t last = 0;

            for (unsigned i = 0; i < 20; i++) {
                if (d.b.order[i] % 3 != lane)
                    continue;
                t_true(d.b.order[i] >= last);
                last = d.b.order[i];
            }
        }
        for (unsigned i = 20; i-- > 0;)
            reply_kept(&d.b, i);
        duo_until(&d, a[0].done);
        for (unsigned i = 0; i < 20; i++) {
            t_int_eq(a[i].done, 1);
            t_int_eq(a[i].st, FL_OK);
            ask_fini(&a[i]);
        }
        duo_fini(&d);
    }
}

static void a_held_lane_waits_and_others_go_on(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct duo d;
        struct ask a[4] = { 0 }, other = { 0 };
        struct fl_err err = { 0 };

        duo_open(&d, c);
        for (unsigned i = 0; i < 4; i++)
            ask(&d, &a[i], ONE_BY_ONE, 7, i);
        ask(&d, &other, ECHO, 8, 100);
        t_ok(call_event(d.a.peer, NOTE, 7, (struct fl_bytes){ 0 }, &err), &err);
        duo_until(&d, other.done && d.b.n_notes);
        t_int_eq(d.b.n_kept, 1);
        for (unsigned i = 0; i < 4; i++) {
            t_int_eq(d.b.n_kept, i + 1);
            if (i == 2) { /* cancelled while it waits: never served */
                call_cancel(&a[3].op);
                ask_fini(&other);
                ask(&d, &other, ECHO, 8, 100);
                duo_until(&d, other.done);
            }
            reply_kept(&d.b, i);
            if (i == 2)
                break;
            duo_until(&d, d.b.n_kept == i + 2);
        }
        duo_until(&d, a[2].done);
        for (int i = 0; i < 20; i++)
            fl_loop_turn(d.loop, 0);
        t_int_eq(d.b.n_kept, 3);
        t_int_eq(a[3].st, FL_CANCELLED);
        for (unsigned i = 0; i < 4; i++)
            ask_fini(&a[i]);
        ask_fini(&other);
        duo_fini(&d);
    }
}

static void credits_bound_a_lane(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct duo d;
        struct ask big[2] = { 0 }, small = { 0 };
        struct fl_err err = { 0 };

        if (c->plan)
            continue;
        duo_open(&d, c);
        t_ok(ask_sized(&d, &big[0], KEEP, 1, 0, 8, CALL_LANE_BYTES + 5, 0, &err),
             &err); /* alone: any size */
        t_refused(ask_sized(&d, &small, KEEP, 1, 0, 8, 0, 0, &err), FL_AGAIN, &err);
        t_has(err.text, "lane 1");
        t_ok(ask_sized(&d, &big[1], KEEP, 2, 1, 8, CALL_LANE_BYTES - 100, 0, &err), &err);
        t_refused(ask_sized(&d, &small, KEEP, 2, 0, 100, 0, 0, &err), FL_AGAIN, &err);
        duo_until(&d, d.b.n_kept == 2);
        for (int i = 0; i < 10; i++)
            fl_loop_turn(d.loop, 0);
        t_int_eq(d.a.ready, 0);
        reply_kept(&d.b, 0);
        duo_until(&d, d.a.ready == 1);
        t_ok(ask_sized(&d, &small, ECHO, d.b.order[0] ? 2 : 1, 0, 8, 0, 0, &err), &err);
        duo_until(&d, small.done);
        /* Cancelled: counts until the peer has dealt with it. */
        ask_fini(&small);
        small = (struct ask){ 0 };
        call_cancel(&big[d.b.order[0] ? 0 : 1].op);
        t_refused(ask_sized(&d, &small, ECHO, d.b.order[0] ? 1 : 2, 0, 100, CALL_LANE_BYTES - 1000,
                            0, &err),
                  FL_AGAIN, &err);
        duo_until(&d, d.b.n_unwanted == 1);
        t_true(call_unwanted(d.b.kept[1]));
        reply_kept(&d.b, 1);
        duo_until(&d, d.a.ready == 2);
        t_ok(ask_sized(&d, &small, ECHO, d.b.order[0] ? 1 : 2, 0, 100, CALL_LANE_BYTES - 1000, 0,
                       &err),
             &err);
        duo_until(&d, small.done);
        for (unsigned i = 0; i < 2; i++)
            ask_fini(&big[i]);
        ask_fini(&small);
        duo_fini(&d);
    }
}

static void a_late_call_ends_at_its_time(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct duo d;
        struct ask a = { 0 }, b = { 0 };
        struct fl_err err = { 0 };

        duo_open(&d, c);
        t_ok(ask_sized(&d, &a, KEEP, 0, 0, 8, 0, fl_loop_now_ns(d.loop) + 250000001, &err), &err);
        duo_until(&d, d.b.n_kept == 1);
        t_int_eq(d.b.budget_ms, 251, "over %s", c->name);
        fl_loop_pass(d.loop, &d.held, 100000000);
        t_int_eq(call_req_budget_ms(d.b.kept[0]), 151, "a hop takes off what it spent");
        t_int_eq(call_req_due_ns(d.b.kept[0]), 1000000000 + 251000000ull);
        fl_loop_pass(d.loop, &d.held, 150000000);
        t_int_eq(a.done, 0);
        fl_loop_pass(d.loop, &d.held, 1);
        t_int_eq(a.done, 1);
        t_int_eq(a.st, FL_TIMEOUT);
        duo_until(&d, d.b.n_unwanted == 1);
        reply_kept(&d.b, 0);
        t_refused(ask_sized(&d, &b, KEEP, 0, 0, 8, 0, fl_loop_now_ns(d.loop), &err), FL_TIMEOUT,
                  &err);
        ask(&d, &b, ECHO, 0, 1);
        duo_until(&d, b.done);
        t_int_eq(a.done, 1);
        ask_fini(&b);
        duo_fini(&d);
    }
}

static void what_waited_too_long_is_not_served(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct duo d;
        struct ask a = { 0 }, b = { 0 };
        struct fl_err err = { 0 };
        uint64_t due;

        duo_open(&d, c);
        ask(&d, &a, ONE_BY_ONE, 0, 1);
        due = fl_loop_now_ns(d.loop) + 50000000;
        t_ok(ask_sized(&d, &b, KEEP, 0, 2, 8, 0, due, &err), &err);
        duo_until(&d, d.b.n_kept == 1);
        for (int i = 0; i < 20; i++)
            fl_loop_turn(d.loop, 0);
        fl_loop_pass(d.loop, &d.held, 60000000);
        reply_kept(&d.b, 0);
        duo_until(&d, a.done && b.done);
        t_int_eq(b.st, FL_TIMEOUT);
        for (int i = 0; i < 20; i++)
            fl_loop_turn(d.loop, 0);
        t_int_eq(d.b.n_served, 1);
        ask_fini(&a);
        duo_fini(&d);
    }
}

static void cancel_is_now(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct duo d;
        struct ask a = { 0 }, b = { 0 };

        duo_open(&d, c);
        ask(&d, &a, KEEP, 0, 1);
        duo_until(&d, d.b.n_kept == 1);
        call_cancel(&a.op);
        t_int_eq(a.done, 1);
        t_int_eq(a.st, FL_CANCELLED);
        call_cancel(&a.op); /* nothing */
        t_int_eq(a.done, 1);
        reply_kept(&d.b, 0); /* crosses the cancel */
        ask(&d, &b, ECHO, 0, 1);
        duo_until(&d, b.done);
        t_int_eq(a.done, 1);
        ask_fini(&b);
        duo_fini(&d);
    }
}

static void bulk_goes_without_copies_both_ways(void **state)
{
    enum { BYTES = 8 << 20 };

    (void)state;
    EACH_CARRIER(c)
    {
        struct duo d;
        struct ask a = { .room = c->plan ? NULL : malloc(BYTES) };
        uint8_t *room = a.room;
        struct fl_err err = { 0 };

        if (c->plan)
            continue;
        duo_open(&d, c);
        t_ok(ask_sized(&d, &a, BULK, 0, 77, 8, BYTES, 0, &err), &err);
        duo_until(&d, a.done && d.b.lent.freed);
        t_int_eq(a.st, FL_OK);
        t_int_eq(d.b.lent.freed, 1);
        for (size_t k = 0; k < BYTES; k++)
            if (room[k] != (uint8_t)(77 + k * 11 + (k >> 9)))
                t_true(false, "byte %zu", k);
        free(d.b.room);
        ask_fini(&a);
        free(room);
        duo_fini(&d);
    }
}

static void a_cancelled_reply_leaves_its_memory_alone(void **state)
{
    enum { BYTES = 8 << 20 };

    (void)state;
    EACH_CARRIER(c)
    {
        struct duo d;
        struct ask a = { .room = c->plan ? NULL : calloc(1, BYTES) }, b = { 0 };
        uint8_t *room = a.room;
        struct fl_err err = { 0 };

        if (c->plan)
            continue;
        duo_open(&d, c);
        t_ok(ask_sized(&d, &a, BULK, 0, 77, 8, BYTES, 0, &err), &err);
        duo_until(&d, room[1] || a.done);
        t_int_eq(a.done, 0, "still under way");
        call_cancel(&a.op);
        free(room); /* the sanitizer sees who writes there now */
        ask(&d, &b, ECHO, 1, 1);
        duo_until(&d, b.done && d.b.lent.freed);
        free(d.b.room);
        ask_fini(&b);
        duo_fini(&d);
    }
}

static void descriptors_ride_both_ways(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct duo d;
        struct ask a = { .op.done = ask_done, .fd = -1 };
        struct fl_err err = { 0 };
        char text[16] = "";
        int fd;

        duo_open(&d, c);
        fd = memfd_create("t", MFD_CLOEXEC);
        if (stream_caps(call_peer_stream(d.a.peer)) & STREAM_FDS) {
            t_ok(call_start(d.a.peer,
                            &(struct call_args){ .method = GIVE_FD, .fds = &fd, .n_fds = 1 }, &a.op,
                            &err),
                 &err);
            duo_until(&d, a.done);
            t_int_eq(a.st, FL_OK, "%s", a.err.text);
            t_true(pread(a.fd, text, sizeof(text) - 1, 0) > 0);
            t_str_eq(text, "given back");
            ask_fini(&a);
        } else {
            t_refused(call_start(d.a.peer,
                                 &(struct call_args){ .method = GIVE_FD, .fds = &fd, .n_fds = 1 },
                                 &a.op, &err),
                      FL_UNSUPPORTED, &err);
        }
        close(fd);
        duo_fini(&d);
    }
}

static void many_calls_at_once(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        enum { N = 3000 };
        struct duo d;
        struct ask *a = calloc(N, sizeof(*a));

        duo_open(&d, c);
        for (unsigned i = 0; i < N; i++)
            ask(&d, &a[i], i % 2 ? ECHO : KEEP, i % 1000, i);
        duo_until(&d, d.b.n_kept == N / 2);
        for (unsigned i = 0; i < N / 2; i++)
            reply_kept(&d.b, i);
        duo_until(&d, all_done(a, N));
        for (unsigned i = 0; i < N; i++) {
            t_int_eq(a[i].done, 1);
            t_int_eq(a[i].st, FL_OK);
            ask_fini(&a[i]);
        }
        free(a);
        duo_fini(&d);
    }
}

static void a_slow_reader_holds_up_serving(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        enum { N = 40 };
        struct duo d;
        struct ask *a;
        struct fl_err err = { 0 };
        unsigned done = 0;

        if (c->plan)
            continue;
        a = calloc(N, sizeof(*a));
        duo_open(&d, c);
        call_peer_stream(d.b.peer)->bound_bytes = 100000;
        for (unsigned i = 0; i < N; i++)
            t_ok(ask_sized(&d, &a[i], ECHO, i, i, 8, 60000, 0, &err), &err);
        while (done < N) {
            size_t most = call_peer_stream(d.b.peer)->queued_bytes;

            t_true(most < 300000, "%zu bytes wait over %s", most, c->name);
            fl_loop_turn(d.loop, 5);
            done = 0;
            for (unsigned i = 0; i < N; i++)
                done += a[i].done;
        }
        for (unsigned i = 0; i < N; i++) {
            t_int_eq(a[i].st, FL_OK);
            ask_fini(&a[i]);
        }
        free(a);
        duo_fini(&d);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_come_back),
        cmocka_unit_test(errors_pass_as_they_are),
        cmocka_unit_test(a_request_is_a_fault_point),
        cmocka_unit_test(lanes_keep_order_and_replies_do_not),
        cmocka_unit_test(a_held_lane_waits_and_others_go_on),
        cmocka_unit_test(credits_bound_a_lane),
        cmocka_unit_test(a_late_call_ends_at_its_time),
        cmocka_unit_test(what_waited_too_long_is_not_served),
        cmocka_unit_test(cancel_is_now),
        cmocka_unit_test(bulk_goes_without_copies_both_ways),
        cmocka_unit_test(a_cancelled_reply_leaves_its_memory_alone),
        cmocka_unit_test(descriptors_ride_both_ways),
        cmocka_unit_test(many_calls_at_once),
        cmocka_unit_test(a_slow_reader_holds_up_serving),
    };

    rig_warm();
    return t_run("call", tests);
}
