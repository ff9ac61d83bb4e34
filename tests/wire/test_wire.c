/* One suite over all carriers: what a stream promises, whatever carries it. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "tests/wire/rig.h"

static void introduces_both_sides(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct rig r;

        rig_open(&r, c);
        t_str_eq(r.client.peer.role, "node", "over %s", c->name);
        t_str_eq(r.client.peer.build, "test 2");
        t_int_eq(r.client.peer.features, 9);
        t_int_eq(r.client.peer.node.start, 2);
        t_mem_eq(r.client.peer.node.id.b, r.you.node.id.b, 28);
        t_int_eq(r.client.peer.major, WIRE_MAJOR);
        t_str_eq(r.far.peer.role, "worker");
        t_int_eq(r.far.peer.term.head, 7);
        t_mem_eq(r.far.peer.term.cluster, r.me.term.cluster, 16);
        t_int_eq(r.far.peer.seat.attempt, 3);
        t_mem_eq(r.far.peer.seat.id.b, r.me.seat.id.b, 28);
        t_has(stream_name(r.far.s), "(worker)");
        t_int_eq(r.client.opened, 1);
        rig_fini(&r);
    }
}

static void carries_every_size(void **state)
{
    static const struct {
        size_t body, blob;
    } sizes[] = {
        { 0, 0 },
        { 1, 0 },
        { 0, 1 },
        { 100, 8192 },
        { 5, 8193 },
        { 3, 65536 - 64 },
        { 65472, 0 },
        { 65536, 0 },
        { 70000, 70000 },
        { 10, WIRE_PIECE },
        { 10, WIRE_PIECE + 1 },
        { 100000, 3 * WIRE_PIECE + 5 },
        { 1, 1 },
    };

    (void)state;
    EACH_CARRIER(c)
    {
        struct rig r;

        rig_open(&r, c);
        for (int way = 0; way < 2; way++) {
            struct end *from = way ? &r.far : &r.client, *to = way ? &r.client : &r.far;

            for (unsigned i = 0; i < FL_LEN(sizes); i++)
                send_sized(from, WIRE_REQUEST, 4, i, sizes[i].body, sizes[i].blob);
            rig_until(&r, to->n_got == FL_LEN(sizes));
            for (unsigned i = 0; i < FL_LEN(sizes); i++)
                check_sized(&to->got[i], WIRE_REQUEST, 4, i, sizes[i].body, sizes[i].blob);
        }
        t_int_eq(r.client.s->queued_bytes, 0);
        rig_fini(&r);
    }
}

static void small_messages_pass_bulk_of_other_lanes(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct rig r;

        rig_open(&r, c);
        send_sized(&r.client, WIRE_EVENT, 1, 1, 10, 8 * WIRE_PIECE);
        send_sized(&r.client, WIRE_EVENT, 1, 2, 10, 0);
        send_sized(&r.client, WIRE_EVENT, 2, 3, 10, 0);
        send_sized(&r.client, WIRE_REPLY, 1, 4, 10, 100);
        rig_until(&r, r.far.n_got == 4);
        check_sized(&r.far.got[0], WIRE_EVENT, 2, 3, 10, 0);
        check_sized(&r.far.got[1], WIRE_REPLY, 1, 4, 10, 100);
        check_sized(&r.far.got[2], WIRE_EVENT, 1, 1, 10, 8 * WIRE_PIECE);
        check_sized(&r.far.got[3], WIRE_EVENT, 1, 2, 10, 0);
        rig_fini(&r);
    }
}

struct lent {
    struct wire_hold hold;
    unsigned freed;
};

static void on_free(struct wire_hold *h)
{
    container_of(h, struct lent, hold)->freed++;
}

static void moves_a_lent_blob_into_given_memory(void **state)
{
    enum { BYTES = 100 << 20 };
    uint8_t *blob = malloc(BYTES), *room = malloc(BYTES);

    (void)state;
    for (size_t i = 0; i < BYTES; i++)
        blob[i] = (uint8_t)(i * 2654435761u >> 13);
    EACH_CARRIER(c)
    {
        struct lent lent = { .hold.free = on_free };
        struct fl_err err = { 0 };
        struct rig r;

        if (c->plan)
            continue; /* bit by bit: the same, for minutes */
        rig_open(&r, c);
        memset(room, 0, BYTES);
        r.far.room = room;
        r.far.room_bytes = BYTES;
        t_ok(stream_send(r.client.s,
                         &(struct wire_msg){ .head = { .kind = WIRE_EVENT, .blob_bytes = BYTES },
                                             .blob = blob,
                                             .hold = &lent.hold },
                         &err),
             &err);
        t_int_eq(lent.freed, 0);
        rig_until(&r, r.far.n_got == 1);
        t_true(r.far.got[0].blob == room, "over %s", c->name);
        t_mem_eq(room, blob, BYTES, "over %s", c->name);
        rig_until(&r, lent.freed);
        t_int_eq(lent.freed, 1);
        rig_fini(&r);
    }
    free(blob);
    free(room);
}

static void frees_a_lent_blob_that_never_left(void **state)
{
    static uint8_t blob[3 * WIRE_PIECE];

    (void)state;
    EACH_CARRIER(c)
    {
        struct lent lent[3] = { { .hold.free = on_free },
                                { .hold.free = on_free },
                                { .hold.free = on_free } };
        struct fl_err err = { 0 };
        struct rig r;
        size_t sizes[] = { 0, 10, sizeof(blob) };

        rig_open(&r, c);
        for (unsigned i = 0; i < 3; i++)
            t_ok(stream_send(
                     r.client.s,
                     &(struct wire_msg){ .head = { .kind = WIRE_EVENT, .blob_bytes = sizes[i] },
                                         .blob = blob,
                                         .hold = &lent[i].hold },
                     &err),
                 &err);
        fl_fault_arm(1);
        fl_loop_turn(r.loop, 0);
        t_true(fl_fault_disarm(), "the first thing that fails is the send, over %s", c->name);
        rig_until(&r, r.client.closed);
        for (unsigned i = 0; i < 3; i++)
            t_int_eq(lent[i].freed, 1, "blob %u over %s", i, c->name);
        rig_fini(&r);
    }
}

static void forgets_the_given_memory(void **state)
{
    static uint8_t room[4 * WIRE_PIECE];

    (void)state;
    EACH_CARRIER(c)
    {
        struct rig r;

        if (c->plan)
            continue;
        rig_open(&r, c);
        r.far.room = room;
        r.far.room_bytes = sizeof(room);
        r.far.count_only = true;
        memset(room, 0, sizeof(room));
        send_sized(&r.client, WIRE_EVENT, 0, 5, 10, sizeof(room));
        rig_until(&r, room[0] || room[1]);
        t_int_eq(r.far.n_got, 0);
        stream_forget_room(r.far.s, room);
        memset(room, 0, sizeof(room));
        send_sized(&r.client, WIRE_EVENT, 0, 6, 10, 0);
        rig_until(&r, r.far.n_got == 2);
        for (size_t i = 0; i < sizeof(room); i++)
            t_int_eq(room[i], 0, "byte %zu over %s", i, c->name);
        rig_fini(&r);
    }
}

static void passes_descriptors(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct rig r;
        struct fl_err err = { 0 };
        int fds[WIRE_MAX_FDS];
        unsigned rounds = 0;
        char text[32];

        rig_open(&r, c);
        for (unsigned i = 0; i < WIRE_MAX_FDS; i++) {
            fds[i] = memfd_create("t", MFD_CLOEXEC);
            t_true(fds[i] >= 0 && dprintf(fds[i], "file %u", i) > 0);
        }
        if (!(stream_caps(r.client.s) & STREAM_FDS)) {
            t_refused(stream_send(r.client.s,
                                  &(struct wire_msg){ .head = { .kind = WIRE_EVENT, .n_fds = 1 },
                                                      .fds = fds },
                                  &err),
                      FL_UNSUPPORTED, &err);
        } else {
            for (unsigned n = 1; n <= WIRE_MAX_FDS; n += 21, rounds++) {
                t_ok(stream_send(r.client.s,
                                 &(struct wire_msg){ .head = { .kind = WIRE_EVENT,
                                                               .n_fds = (uint8_t)n,
                                                               .id = n,
                                                               .body_bytes = 3 },
                                                     .body = "abc",
                                                     .fds = fds },
                                 &err),
                     &err);
                send_sized(&r.client, WIRE_EVENT, 0, 1000 + n, 3, 2 * WIRE_PIECE * (n == 22));
            }
            rig_until(&r, r.far.n_got == 2 * rounds);
            for (unsigned i = 0; i < r.far.n_got; i++) {
                struct got *g = &r.far.got[i];

                t_int_eq(g->head.n_fds, g->head.id > 1000 ? 0 : g->head.id);
                for (unsigned j = 0; j < g->head.n_fds; j++) {
                    char wanted[32];

                    memset(text, 0, sizeof(text));
                    snprintf(wanted, sizeof(wanted), "file %u", j);
                    t_true(pread(g->fds[j], text, sizeof(text) - 1, 0) > 0);
                    t_str_eq(text, wanted);
                    t_true(fcntl(g->fds[j], F_GETFD) & FD_CLOEXEC);
                }
            }
        }
        for (unsigned i = 0; i < WIRE_MAX_FDS; i++)
            close(fds[i]);
        rig_fini(&r);
    }
}

static void pushes_back(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        static uint8_t body[60000];
        struct rig r;
        struct fl_err err = { 0 };
        struct wire_msg m = { .head = { .kind = WIRE_REQUEST, .body_bytes = sizeof(body) },
                              .body = body };
        enum fl_status st = FL_OK;
        unsigned sent = 0;

        rig_open(&r, c);
        r.client.s->bound_bytes = 1 << 20;
        r.far.count_only = true;
        while (st == FL_OK && sent < 1000)
            if ((st = stream_send(r.client.s, &m, &err)) == FL_OK)
                sent++;
        t_refused(st, FL_AGAIN, &err);
        t_int_eq(sent, 18, "as many as pass a mebibyte");
        m.head.kind = WIRE_REPLY;
        t_ok(stream_send(r.client.s, &m, &err), &err);
        rig_until(&r, r.client.drained);
        m.head.kind = WIRE_EVENT;
        t_ok(stream_send(r.client.s, &m, &err), &err);
        rig_until(&r, r.far.n_got == sent + 2);
        t_int_eq(r.client.drained, 1);
        rig_fini(&r);
    }
}

static void refuses_what_no_frame_may_have(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct rig r;
        struct fl_err err = { 0 };

        rig_open(&r, c);
        t_refused(stream_send(r.client.s,
                              &(struct wire_msg){
                                  .head = { .kind = WIRE_EVENT, .body_bytes = WIRE_MAX_BODY + 1 } },
                              &err),
                  FL_INVALID, &err);
        t_refused(stream_send(r.client.s,
                              &(struct wire_msg){ .head = { .kind = WIRE_EVENT, .n_fds = 65 } },
                              &err),
                  FL_INVALID, &err);
        t_has(err.text, "65");
        send_sized(&r.client, WIRE_EVENT, 0, 1, 1, 1);
        rig_until(&r, r.far.n_got == 1);
        rig_fini(&r);
    }
}

static void tells_why_it_closes(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct rig r;
        struct fl_err why = {
            .status = FL_STALE, .origin = FL_FROM_CUDA, .native = -7, .text = "term 3 is over"
        };

        rig_open(&r, c);
        send_sized(&r.client, WIRE_EVENT, 0, 1, 1, c->plan ? 3000 : 3 * WIRE_PIECE);
        stream_close(r.client.s, &why);
        rig_until(&r, r.far.closed && r.client.closed);
        t_int_eq(r.far.n_got, 1, "what was sent before arrives, over %s", c->name);
        t_int_eq(r.far.why.status, FL_STALE, "%s over %s", r.far.why.text, c->name);
        t_int_eq(r.far.why.origin, FL_FROM_CUDA);
        t_int_eq(r.far.why.native, -7);
        t_has(r.far.why.text, "term 3 is over");
        t_int_eq(r.client.why.status, FL_STALE);
        t_int_eq(r.client.closed, 1);
        rig_fini(&r);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(introduces_both_sides),
        cmocka_unit_test(carries_every_size),
        cmocka_unit_test(small_messages_pass_bulk_of_other_lanes),
        cmocka_unit_test(moves_a_lent_blob_into_given_memory),
        cmocka_unit_test(frees_a_lent_blob_that_never_left),
        cmocka_unit_test(forgets_the_given_memory),
        cmocka_unit_test(passes_descriptors),
        cmocka_unit_test(pushes_back),
        cmocka_unit_test(refuses_what_no_frame_may_have),
        cmocka_unit_test(tells_why_it_closes),
    };

    rig_warm();
    return t_run("wire", tests);
}
