/* One suite over all carriers: connections that break, and addresses where nobody is. */
#include <fcntl.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/file.h"
#include "tests/wire/rig.h"

static void connects_again(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct fl_held_clock held;
        struct fl_err err = { 0 };
        struct rig r;
        struct stream *before;

        if (c->ops == &stream_lossy)
            continue;
        rig_init(&r, c, &held);
        r.to.again = true;
        t_ok(rig_listen(&r, &err), &err);
        t_ok(rig_dial(&r, &err), &err);
        rig_until(&r, r.client.opened == 1 && r.far.opened == 1);
        before = r.client.s;
        stream_close(r.far.s, NULL);
        rig_until(&r, r.client.lost == 1 && r.far.closed == 1);
        t_refused(stream_send(r.client.s, &(struct wire_msg){ .head.kind = WIRE_EVENT }, &err),
                  FL_UNREACHABLE, &err);
        stream_server_destroy(r.server);
        r.server = NULL;
        for (int i = 0; i < 20; i++)
            fl_loop_pass(r.loop, &held, 1000 * 1000000ull);
        t_int_eq(r.client.lost, 1, "told once, not at each attempt, over %s", c->name);
        r.at.target = r.to.target = NULL;
        snprintf(r.target, sizeof(r.target), "%s", stream_name(before));
        r.at.target = r.target;
        t_ok(rig_listen(&r, &err), &err);
        for (int i = 0; i < 2000 && r.far.opened < 2; i++) {
            fl_loop_pass(r.loop, &held, 10 * 1000000ull);
            fl_loop_turn(r.loop, 1);
        }
        rig_until(&r, r.client.opened == 2 && r.far.opened == 2);
        t_true(r.client.s == before);
        send_sized(&r.client, WIRE_EVENT, 0, 1, 1, 1);
        rig_until(&r, r.far.n_got == 1);
        rig_fini(&r);
    }
}

static void says_that_nobody_is_there(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct fl_err err = { 0 };
        struct rig r;

        rig_init(&r, c, NULL);
        t_ok(rig_listen(&r, &err), &err);
        snprintf(r.target, sizeof(r.target), "%s", stream_server_at(r.server));
        stream_server_destroy(r.server);
        r.server = NULL;
        r.to.target = r.target;
        t_ok(rig_dial(&r, &err), &err);
        t_int_eq(r.client.closed, 0, "never inside stream_connect");
        rig_until(&r, r.client.closed);
        t_int_eq(r.client.why.status, FL_UNREACHABLE, "over %s: %s", c->name, r.client.why.text);
        t_has(r.client.why.text, r.target);
        rig_fini(&r);
    }
}

static void one_server_an_address(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct stream_server *other = NULL;
        struct fl_err err = { 0 };
        struct rig r;

        rig_init(&r, c, NULL);
        t_ok(rig_listen(&r, &err), &err);
        r.at.target = stream_server_at(r.server);
        t_refused(stream_listen(r.loop, c->ops, &r.at, &r.you, NULL, NULL, &other, &err), FL_EXISTS,
                  &err);
        rig_fini(&r);
    }
}

static const struct bad_target {
    const char *name, *listen;
    bool key;
    enum fl_status wanted;
} bad_targets[] = {
    { "no port", "127.0.0.1", true, FL_INVALID },
    { "no number", "127.0.0.1:http", true, FL_INVALID },
    { "past the last port", "127.0.0.1:65536", true, FL_INVALID },
    { "v6 without brackets", "::1:80", true, FL_INVALID },
    { "a name", "example.invalid:0", true, FL_INVALID },
    { "nobody's address", "192.0.2.1:0", true, FL_UNREACHABLE },
    { "beyond loopback without a key", "0.0.0.0:0", false, FL_DENIED },
    { "a long path",
      "unix:/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
      "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
      true, FL_INVALID },
    { "no such folder", "unix:/nonexistent/s", true, FL_NOT_FOUND },
};

static void refuses_bad_targets(void **state)
{
    (void)state;
    for (unsigned i = 0; i < FL_LEN(bad_targets); i++) {
        struct carrier c = { "sock", &stream_sock, bad_targets[i].listen, NULL };
        struct fl_err err = { 0 };
        enum fl_status st;
        struct rig r;

        rig_init(&r, &c, NULL);
        if (!bad_targets[i].key)
            r.at.key = (struct fl_bytes){ 0 };
        st = rig_listen(&r, &err);
        t_int_eq(st, bad_targets[i].wanted, "%s: %s", bad_targets[i].name, err.text);
        rig_fini(&r);
    }
}

static void replaces_a_dead_socket_file(void **state)
{
    struct fl_err err = { 0 };
    struct rig r;

    (void)state;
    rig_init(&r, &carriers[0], NULL);
    t_ok(rig_listen(&r, &err), &err);
    t_true(rename(r.target + 5, t_path("moved")) == 0);
    stream_server_destroy(r.server); /* leaves the moved file: a killed server's */
    r.server = NULL;
    t_true(rename(t_path("moved"), r.target + 5) == 0);
    t_ok(rig_listen(&r, &err), &err);
    stream_server_destroy(r.server);
    r.server = NULL;
    t_true(access(r.target + 5, F_OK) != 0, "its own file goes with it");
    t_ok(fl_file_write(r.target + 5, 0600, "x", 1, &err), &err);
    t_refused(rig_listen(&r, &err), FL_EXISTS, &err);
    t_true(unlink(r.target + 5) == 0);
    rig_fini(&r);
}

/* The connection breaks after every number of bytes, in HELLO and in messages, in either direction:
 * what arrives is whole and in order, and both sides end with a sentence. */
static void survives_a_cut_anywhere(void **state)
{
    static struct lossy_plan cut = { .seed = 3 };
    static const struct carrier over[] = {
        { "pair", &stream_lossy, "pair:x", &cut },
        { "unix", &stream_lossy, "unix:*", &cut },
    };

    (void)state;
    for (unsigned i = 0; i < 2 * FL_LEN(over); i++) {
        const struct carrier *c = &over[i / 2];
        unsigned whole = 0;

        cut = (struct lossy_plan){ .seed = 3, .over = i / 2 ? &stream_sock : &stream_pair };
        for (uint64_t at = 0; whole < 3; at++) {
            struct fl_err err = { 0 };
            unsigned cuts = 1; /* of the client's line; the server's is good */
            struct rig r;

            t_true(at < 2000, "the whole talk is shorter");
            rig_init(&r, c, NULL);
            cut.cut_out = i % 2;
            cut.cut_in = !cut.cut_out;
            cut.cut_out_at = cut.cut_in_at = at;
            cut.spoil = &cuts;
            t_ok(rig_listen(&r, &err), &err);
            t_ok(rig_dial(&r, &err), &err);
            rig_until(&r, r.client.closed || r.client.opened);
            if (r.client.s && r.client.opened) {
                for (unsigned k = 0; k < 3; k++) {
                    send_sized(&r.client, WIRE_EVENT, 1, k, 20 + k, k * 9);
                    if (r.far.s && r.far.opened)
                        send_sized(&r.far, WIRE_EVENT, 1, k, 20 + k, k * 9);
                }
            }
            rig_until(&r, r.client.closed || (r.client.n_got == 3 && r.far.n_got == 3));
            whole = r.client.n_got == 3 && r.far.n_got == 3 ? whole + 1 : 0;
            rig_until(&r, r.far.closed || !r.client.closed || !r.far.s);
            for (unsigned k = 0; k < r.far.n_got; k++)
                check_sized(&r.far.got[k], WIRE_EVENT, 1, k, 20 + k, k * 9);
            for (unsigned k = 0; k < r.client.n_got; k++)
                check_sized(&r.client.got[k], WIRE_EVENT, 1, k, 20 + k, k * 9);
            if (r.client.closed)
                t_true(r.client.why.text[0] && r.client.why.status == FL_UNREACHABLE,
                       "cut at %d: %s", (int)at, r.client.why.text);
            rig_fini(&r);
        }
    }
}

/* One bit turned round anywhere in HELLO: nobody gets in. */
static void notices_every_turned_bit_of_hello(void **state)
{
    static struct lossy_plan flip;
    static const struct carrier c = { "pair", &stream_lossy, "pair:x", &flip };

    (void)state;
    for (unsigned at = 0; at < 336; at++) { /* both steps of the client: 272 and 64 bytes */
        struct fl_err err = { 0 };
        struct fl_held_clock held;
        unsigned flips = 1;
        struct rig r;

        flip = (struct lossy_plan){ .over = &stream_pair,
                                    .seed = at * 5,
                                    .flip_out = true,
                                    .flip_out_at = at,
                                    .spoil = &flips };
        rig_init(&r, &c, &held);
        t_ok(rig_listen(&r, &err), &err);
        t_ok(rig_dial(&r, &err), &err);
        for (int i = 0; i < 50; i++)
            fl_loop_turn(r.loop, 0);
        fl_loop_pass(r.loop, &held, 6000000000ull); /* a length that grew ends as silence */
        rig_until(&r, r.client.closed);
        t_int_eq(r.client.opened + r.far.opened, 0, "byte %u", at);
        rig_fini(&r);
    }
}

static const uint8_t three_pieces[3 * WIRE_PIECE];

static void every_fault_ends_well(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        /* gRPC connects on threads of its own, in real time */
        int wait_ms = c->ops == &stream_rpc ? 10 : 1;
        uint64_t pass_ns = c->ops == &stream_rpc ? 25000000 : 100000000;
        bool met = true;

        for (unsigned nth = 1; met; nth++) {
            struct fl_held_clock held;
            struct fl_err err = { 0 };
            enum fl_status st;
            struct rig r;

            t_true(nth < 500);
            if (c->ops == &stream_lossy)
                break;
            rig_init(&r, c, &held);
            fl_fault_arm(nth);
            st = rig_listen(&r, &err);
            if (st == FL_OK)
                st = rig_dial(&r, &err);
            for (int i = 0;
                 st == FL_OK && i < 400 && !(r.client.opened && r.far.opened) && !r.client.closed;
                 i++) {
                fl_loop_turn(r.loop, wait_ms);
                fl_loop_pass(r.loop, &held, pass_ns);
            }
            if (st == FL_OK && r.client.s && r.client.opened) {
                st = stream_send(r.client.s,
                                 &(struct wire_msg){
                                     .head = { .kind = WIRE_EVENT, .blob_bytes = 3 * WIRE_PIECE },
                                     .blob = three_pieces },
                                 &err);
                for (int i = 0; st == FL_OK && i < 400 && !r.far.n_got && !r.client.closed; i++) {
                    fl_loop_turn(r.loop, wait_ms);
                    fl_loop_pass(r.loop, &held, pass_ns);
                }
            }
            met = fl_fault_disarm();
            t_true(met || r.far.n_got == 1, "without a fault all goes well, over %s", c->name);
            t_true(st == FL_OK || err.text[0], "fault %u over %s", nth, c->name);
            t_true(!r.client.closed || r.client.why.text[0], "fault %u over %s", nth, c->name);
            rig_fini(&r);
        }
    }
}

static void looks_up_names(void **state)
{
    struct carrier c = { "tcp", &stream_sock, "127.0.0.1:0", NULL };
    struct fl_err err = { 0 };
    struct rig r;

    (void)state;
    rig_init(&r, &c, NULL);
    r.to.target = "no-such-host.invalid:1";
    t_ok(rig_dial(&r, &err), &err);
    rig_until(&r, r.client.closed);
    t_int_eq(r.client.why.status, FL_UNREACHABLE);
    t_has(r.client.why.text, "no-such-host.invalid");
    rig_fini(&r);

    rig_init(&r, &c, NULL); /* closed while the pool looks */
    r.to.target = "no-such-host.invalid:1";
    t_ok(rig_dial(&r, &err), &err);
    rig_fini(&r);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(connects_again),
        cmocka_unit_test(says_that_nobody_is_there),
        cmocka_unit_test(one_server_an_address),
        cmocka_unit_test(refuses_bad_targets),
        cmocka_unit_test(replaces_a_dead_socket_file),
        cmocka_unit_test(survives_a_cut_anywhere),
        cmocka_unit_test(notices_every_turned_bit_of_hello),
        cmocka_unit_test(every_fault_ends_well),
        cmocka_unit_test(looks_up_names),
    };

    rig_warm();
    return t_run("wire lost", tests);
}
