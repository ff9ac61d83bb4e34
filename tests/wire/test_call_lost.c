/* One suite over all carriers: a call is made at most once and ends once, whatever breaks. */

#include "common/base/fault.h"
#include "tests/wire/duo.h"

static void calls_of_a_lost_stream_end(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct duo d;
        struct ask a[3] = { 0 };
        struct fl_err err = { 0 };

        if (c->plan)
            continue;
        duo_init(&d, c);
        d.to.again = true;
        duo_dial(&d);
        t_refused(ask_sized(&d, &a[0], KEEP, 0, 0, 8, 0, 0, &err), FL_AGAIN, &err);
        duo_until(&d, d.a.opened == 1 && d.b.opened == 1);
        t_int_eq(d.a.ready, 1);
        for (unsigned i = 0; i < 3; i++)
            ask(&d, &a[i], i == 1 ? ONE_BY_ONE : KEEP, 0, i);
        duo_until(&d, d.b.n_kept == 2);
        call_peer_close(d.b.peer, &(struct fl_err){ .status = FL_INTERNAL, .text = "going down" });
        duo_until(&d, d.a.lost && d.b.closed);
        for (unsigned i = 0; i < 3; i++) {
            t_int_eq(a[i].done, 1);
            t_int_eq(a[i].st, FL_UNREACHABLE);
            t_has(a[i].err.text, "going down");
        }
        t_int_eq(d.b.n_unwanted, 2);
        for (int i = 0; i < 2000 && d.a.opened < 2; i++) {
            fl_loop_pass(d.loop, &d.held, 10000000);
            fl_loop_turn(d.loop, 1);
        }
        duo_until(&d, d.a.opened == 2 && d.b.opened == 2);
        t_int_eq(d.b.n_served, 2, "nothing is sent again");
        reply_kept(&d.b, 0); /* outlive their peer */
        reply_kept(&d.b, 1);
        ask(&d, &a[0], ECHO, 0, 5);
        duo_until(&d, a[0].done);
        t_int_eq(a[0].st, FL_OK);
        ask_fini(&a[0]);
        duo_fini(&d);
    }
}

static void a_cut_anywhere_ends_each_call_once(void **state)
{
    static struct lossy_plan cut;
    static const struct carrier c = { "pair", &stream_lossy, "pair:x", &cut };

    (void)state;
    for (unsigned way = 0; way < 2; way++) {
        for (uint64_t at = 336; at < 336 + 400; at++) { /* behind HELLO */
            struct duo d;
            struct ask a[3] = { 0 };
            struct fl_err err = { 0 };
            unsigned cuts = 1, asked = 0;

            cut = (struct lossy_plan){ .over = &stream_pair,
                                       .cut_out = way,
                                       .cut_in = !way,
                                       .cut_out_at = at,
                                       .cut_in_at = at,
                                       .spoil = &cuts };
            duo_init(&d, &c);
            duo_dial(&d);
            duo_until(&d, d.a.opened || d.a.closed);
            for (; asked < 3 && d.a.opened; asked++)
                if (ask_sized(&d, &a[asked], asked == 1 ? FAIL : ECHO, 0, asked, 30, 40, 0, &err) !=
                    FL_OK)
                    break;
            for (int i = 0; i < 60 && !d.a.closed; i++)
                fl_loop_turn(d.loop, 0);
            for (unsigned i = 0; i < asked; i++) {
                t_int_eq(a[i].done, 1, "cut at %d", (int)at);
                t_true(a[i].st == FL_UNREACHABLE || a[i].st == (i == 1 ? FL_EXHAUSTED : FL_OK));
                ask_fini(&a[i]);
            }
            t_true(d.b.n_served <= 3, "at most once each");
            duo_fini(&d);
        }
    }
}

static void request_memory_of_a_cut_call_comes_back(void **state)
{
    static struct lossy_plan cut;
    static const struct carrier c = { "pair", &stream_lossy, "pair:x", &cut };
    struct duo d;
    struct ask a = { 0 };
    struct fl_err err = { 0 };
    unsigned cuts = 1;

    (void)state;
    cut = (struct lossy_plan){
        .over = &stream_pair, .cut_out = true, .cut_out_at = 3000000, .spoil = &cuts
    };
    duo_init(&d, &c);
    duo_dial(&d);
    duo_until(&d, d.a.opened && d.b.opened);
    t_ok(ask_sized(&d, &a, BULK, 0, 0, 8, 5000000, 0, &err), &err);
    duo_until(&d, d.a.closed && d.b.closed);
    t_int_eq(a.st, FL_UNREACHABLE);
    t_int_eq(d.b.n_lost_rooms, 1);
    t_int_eq(d.b.n_served, 0);
    duo_fini(&d);
}

static void ask_more(struct ask *a)
{
    struct fl_err err = { 0 };

    if (a->d->b.n_served < 50) {
        ask_fini(a);
        ask(a->d, a, ECHO, 0, 0);
    } else {
        t_refused(call_start(a->d->a.peer,
                             &(struct call_args){ .method = ECHO, .body.len = WIRE_MAX_BODY + 1 },
                             &a->op, &err),
                  FL_INVALID, &err);
    }
}

static void destroy_peer(struct ask *a)
{
    call_peer_destroy(a->d->a.peer);
    a->d->a.peer = NULL;
}

static void done_may_do_anything(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct duo d;
        struct ask a = { .then = ask_more }, b = { .then = destroy_peer }, e = { 0 };

        duo_open(&d, c);
        ask(&d, &a, ECHO, 0, 0);
        duo_until(&d, d.b.n_served == 50 && a.done);
        ask_fini(&a);
        ask(&d, &e, KEEP, 0, 0);
        ask(&d, &b, FAIL, 0, 0);
        duo_until(&d, b.done);
        t_int_eq(b.st, FL_EXHAUSTED);
        t_int_eq(e.st, FL_CANCELLED, "came back when the peer was destroyed");
        t_int_eq(e.done, 1);
        duo_until(&d, d.b.closed);
        if (d.b.kept[0])
            reply_kept(&d.b, 0);
        duo_fini(&d);
    }
}

static void every_fault_ends_each_call_once(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        bool met = true;

        for (unsigned nth = 1; met && !c->plan; nth++) {
            struct duo d;
            struct ask a[4] = { 0 };
            struct fl_err err = { 0 };
            unsigned asked = 0;

            t_true(nth < 300);
            duo_open(&d, c);
            fl_fault_arm(nth);
            for (; asked < 4; asked++)
                if (ask_sized(&d, &a[asked], asked == 1 ? ONE_BY_ONE : ECHO, 0, asked, 8,
                              asked == 3 ? 2 * WIRE_PIECE : 9, fl_loop_now_ns(d.loop) + 1000000000,
                              &err) != FL_OK)
                    break;
            for (int i = 0; i < 300; i++) {
                fl_loop_turn(d.loop, 1);
                if (d.b.n_kept && d.b.kept[0])
                    reply_kept(&d.b, 0);
                if (all_done(a, asked) || d.a.closed)
                    break;
            }
            met = fl_fault_disarm();
            fl_loop_pass(d.loop, &d.held, 1100000000);
            for (unsigned i = 0; i < asked; i++) {
                t_int_eq(a[i].done, 1, "fault %u, call %u over %s", nth, i, c->name);
                t_true(met || a[i].st == FL_OK, "%s", a[i].err.text);
                ask_fini(&a[i]);
            }
            duo_fini(&d);
        }
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_of_a_lost_stream_end),
        cmocka_unit_test(a_cut_anywhere_ends_each_call_once),
        cmocka_unit_test(request_memory_of_a_cut_call_comes_back),
        cmocka_unit_test(done_may_do_anything),
        cmocka_unit_test(every_fault_ends_each_call_once),
    };

    rig_warm();
    return t_run("call lost", tests);
}
