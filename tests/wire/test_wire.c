/* One suite over all carriers: what a stream promises, whatever carries it. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/file.h"
#include "tests/wire/rig.h"

static struct lossy_plan over_pair = {
    .over = &stream_pair, .seed = 1, .chunk_max = 200, .again_pct = 20
};
static struct lossy_plan over_sock = {
    .over = &stream_sock, .seed = 2, .chunk_max = 900, .again_pct = 20
};
static struct lossy_plan over_rpc = {
    .over = &stream_rpc, .seed = 3, .chunk_max = 5000, .again_pct = 20
};
const struct carrier carriers[] = {
    { "unix", &stream_sock, "unix:*", NULL },
    { "tcp", &stream_sock, "127.0.0.1:0", NULL },
    { "tcp6", &stream_sock, "[::1]:0", NULL },
    { "pair", &stream_pair, "pair:x", NULL },
    { "rpc", &stream_rpc, "127.0.0.1:0", NULL },
    { "lossy pair", &stream_lossy, "pair:x", &over_pair },
    { "rpc6", &stream_rpc, "[::1]:0", NULL },
    { "lossy unix", &stream_lossy, "unix:*", &over_sock },
    { "lossy rpc", &stream_lossy, "127.0.0.1:0", &over_rpc },
    { 0 },
};

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

/* ---- HELLO */

static enum fl_status no_such_job(void *arg, const struct wire_hello *claims, struct fl_bytes *key,
                                  struct fl_err *err)
{
    (void)arg;
    (void)key;
    return fl_fail(err, FL_DENIED, "no job of worker attempt %u runs here", claims->seat.attempt);
}

static enum fl_status key_by_seat(void *arg, const struct wire_hello *claims, struct fl_bytes *key,
                                  struct fl_err *err)
{
    (void)arg;
    (void)err;
    *key = claims->seat.attempt == 3 ? (struct fl_bytes){ "three", 5 }
                                     : (struct fl_bytes){ "other", 5 };
    return FL_OK;
}

static enum fl_status fenced(void *arg, const struct wire_hello *peer, struct fl_err *err)
{
    (void)arg;
    return fl_fail(err, FL_STALE, "attempt %u was replaced", peer->seat.attempt);
}

static void set_wrong_key(struct rig *r)
{
    r->to.key = (struct fl_bytes){ "the kez", 7 };
}

static void set_no_key(struct rig *r)
{
    r->to.key = (struct fl_bytes){ 0 };
}

static void set_key_by_seat(struct rig *r)
{
    r->at.key = (struct fl_bytes){ 0 };
    r->at.key_of = key_by_seat;
    r->to.key = (struct fl_bytes){ "three", 5 };
}

static void set_other_seat(struct rig *r)
{
    set_key_by_seat(r);
    r->me.seat.attempt = 4;
}

static void set_no_job(struct rig *r)
{
    r->at.key_of = no_such_job;
}

static void set_fenced(struct rig *r)
{
    r->at.admit = fenced;
}

static void set_major(struct rig *r)
{
    r->me.major = 2;
    r->me.minor = 5;
}

static void set_far_major(struct rig *r)
{
    r->you.major = 7;
}

static void set_minor(struct rig *r)
{
    r->me.major = WIRE_MAJOR;
    r->me.minor = 99;
}

static void set_want(struct rig *r)
{
    memset(r->me.want.id.b, 0xaa, 28);
    r->me.want.attempt = 1;
    r->you.seat = r->me.want;
}

static void set_want_older(struct rig *r)
{
    set_want(r);
    r->you.seat.attempt = 2;
}

static const struct hello_row {
    const char *name;
    void (*set)(struct rig *r);
    enum fl_status wanted;
    const char *text;
} hello_rows[] = {
    { "another key", set_wrong_key, FL_DENIED, "another key" },
    { "no key", set_no_key, FL_DENIED, "another key" },
    { "key of the seat", set_key_by_seat, FL_OK, "" },
    { "key of another seat", set_other_seat, FL_DENIED, "another key" },
    { "no such job", set_no_job, FL_DENIED, "no job of worker attempt 3 runs here" },
    { "refused after the proof", set_fenced, FL_STALE, "attempt 3 was replaced" },
    { "another major", set_major, FL_UNSUPPORTED, "version 2.5 of the protocol and this side 1.0" },
    { "server of another major", set_far_major, FL_UNSUPPORTED, "version 7.0" },
    { "a later minor", set_minor, FL_OK, "" },
    { "the wanted one", set_want, FL_OK, "" },
    { "a later attempt than wanted", set_want_older, FL_STALE,
      "aaaaaaaa attempt 1 is wanted and this is" },
};

static void proves_the_key_before_anything(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        for (unsigned i = 0; i < FL_LEN(hello_rows); i++) {
            const struct hello_row *row = &hello_rows[i];
            struct fl_err err = { 0 };
            struct rig r;

            rig_init(&r, c, NULL);
            r.to.again = i % 2; /* a refusal is final, trying again or not */
            row->set(&r);
            t_ok(rig_listen(&r, &err), &err);
            t_ok(rig_dial(&r, &err), &err);
            rig_until(&r, r.client.closed || (r.client.opened && r.far.opened));
            t_int_eq(r.client.closed, row->wanted != FL_OK, "%s over %s: %s", row->name, c->name,
                     r.client.why.text);
            t_int_eq(r.client.why.status, row->wanted, "%s over %s: %s", row->name, c->name,
                     r.client.why.text);
            t_has(r.client.why.text, row->text);
            if (row->wanted != FL_OK) {
                rig_until(&r, r.refused);
                t_int_eq(r.far.opened, 0);
                t_int_eq(r.client.opened, 0);
            }
            rig_fini(&r);
        }
    }
}

static void reads_the_key_file(void **state)
{
    struct fl_err err = { 0 };
    struct rig r;

    (void)state;
    rig_init(&r, &carriers[0], NULL);
    t_ok(fl_file_write(t_path("token"), 0600, "the key \n", 9, &err), &err);
    r.to.key_path = t_path("token");
    t_ok(rig_listen(&r, &err), &err);
    t_ok(rig_dial(&r, &err), &err);
    rig_until(&r, r.client.opened && r.far.opened);
    rig_fini(&r);

    rig_init(&r, &carriers[0], NULL);
    t_ok(fl_file_write(t_path("token"), 0600, "\n", 1, &err), &err);
    r.to.key_path = t_path("token");
    r.to.target = "unix:/nowhere";
    t_refused(rig_dial(&r, &err), FL_INVALID, &err);
    r.to.key_path = t_path("none");
    t_refused(rig_dial(&r, &err), FL_NOT_FOUND, &err);
    rig_fini(&r);
}

static void gives_up_on_silence(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct fl_held_clock held;
        struct fl_err err = { 0 };
        struct rig r;

        if (c->ops == &stream_lossy)
            continue; /* lossy ones wait for their own timers */
        rig_init(&r, c, &held);
        r.to.connect_ms = 700;
        t_ok(rig_listen(&r, &err), &err);
        t_ok(rig_dial(&r, &err), &err);
        fl_loop_pass(r.loop, &held, 701 * 1000000ull);
        rig_until(&r, r.client.closed);
        t_int_eq(r.client.why.status, FL_TIMEOUT, "over %s: %s", c->name, r.client.why.text);
        t_has(r.client.why.text, "within 700 ms");
        rig_fini(&r);
    }
}

/* ---- who does not speak it at all */

static int raw_connect(const char *path)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    snprintf(a.sun_path, sizeof(a.sun_path), "%s", path);
    t_true(connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0);
    return fd;
}

static void talk_until_closed(struct rig *r, int fd, const uint8_t *say, size_t n)
{
    char sink[512];
    size_t sent = 0;

    for (int i = 0; i < 2000; i++) {
        ssize_t rc = sent < n ? send(fd, say + sent, n - sent, MSG_NOSIGNAL) : 0;

        sent += rc > 0 ? (size_t)rc : 0;
        rc = recv(fd, sink, sizeof(sink), 0);
        if (rc == 0 || (rc < 0 && errno != EAGAIN))
            return;
        fl_loop_turn(r->loop, 1);
    }
    t_true(false, "the server keeps a peer that speaks garbage");
}

static void throws_out_garbage(void **state)
{
    static const uint8_t zeros[64];
    static const struct wire_head late = { .kind = WIRE_REQUEST, .body_bytes = 3, .id = 1 };
    static const struct wire_head vast = { .kind = WIRE_HELLO, .body_bytes = 0x7fffffff, .id = 1 };
    static const struct wire_head early = { .kind = WIRE_HELLO, .body_bytes = 32, .id = 3 };
    static const struct {
        const char *name;
        const void *say;
        size_t n;
    } rows[] = {
        { "HTTP", "GET / HTTP/1.1\r\nHost: a\r\n\r\n.............", 40 },
        { "a request before HELLO", &late, sizeof(late) },
        { "a HELLO of two gigabytes", &vast, sizeof(vast) },
        { "a proof before HELLO", &early, 64 },
        { "zeros", zeros, 64 },
    };
    struct carrier c = { "unix", &stream_sock, "unix:*", NULL };
    struct fl_err err = { 0 };
    uint8_t noise[4096], again[64] = { 0 };
    uint64_t seed = 11;
    struct rig r;

    (void)state;
    rig_init(&r, &c, NULL);
    t_ok(rig_listen(&r, &err), &err);
    memcpy(again, &early, sizeof(early));
    for (unsigned i = 0; i < FL_LEN(rows); i++) {
        int fd = raw_connect(r.target + 5);

        talk_until_closed(&r, fd, i == 3 ? again : rows[i].say, rows[i].n);
        close(fd);
        rig_until(&r, r.refused == i + 1);
        t_int_eq(r.refusal.status, FL_CORRUPT, "%s: %s", rows[i].name, r.refusal.text);
    }
    for (unsigned i = 0; i < 50; i++) {
        int fd = raw_connect(r.target + 5);

        for (size_t k = 0; k < sizeof(noise); k++)
            noise[k] = (uint8_t)(t_random(&seed) >> 40);
        talk_until_closed(&r, fd, noise, sizeof(noise));
        close(fd);
    }
    t_ok(rig_dial(&r, &err), &err); /* and others still get in */
    rig_until(&r, r.client.opened && r.far.opened);
    rig_fini(&r);
}

static void gives_up_on_the_mute(void **state)
{
    struct carrier c = { "unix", &stream_sock, "unix:*", NULL };
    struct fl_held_clock held;
    struct fl_err err = { 0 };
    struct rig r;
    int fd;

    (void)state;
    rig_init(&r, &c, &held);
    t_ok(rig_listen(&r, &err), &err);
    fd = raw_connect(r.target + 5);
    for (int i = 0; i < 5; i++)
        fl_loop_turn(r.loop, 1);
    fl_loop_pass(r.loop, &held, 4999 * 1000000ull);
    t_int_eq(r.refused, 0);
    fl_loop_pass(r.loop, &held, 2 * 1000000ull);
    rig_until(&r, r.refused);
    t_int_eq(r.refusal.status, FL_TIMEOUT, "%s", r.refusal.text);
    t_has(r.refusal.text, "5000 ms");
    close(fd);
    rig_fini(&r);
}

static void send_fds(int fd, unsigned n)
{
    char byte = 1, room[CMSG_SPACE(200 * sizeof(int))] = { 0 };
    struct iovec iov = { &byte, 1 };
    struct msghdr m = { .msg_iov = &iov,
                        .msg_iovlen = 1,
                        .msg_control = room,
                        .msg_controllen = CMSG_SPACE(n * sizeof(int)) };
    int *fds = (int *)(void *)CMSG_DATA(CMSG_FIRSTHDR(&m));

    *CMSG_FIRSTHDR(&m) = (struct cmsghdr){ .cmsg_level = SOL_SOCKET,
                                           .cmsg_type = SCM_RIGHTS,
                                           .cmsg_len = CMSG_LEN(n * sizeof(int)) };
    for (unsigned i = 0; i < n; i++)
        fds[i] = 0;
    t_true(sendmsg(fd, &m, MSG_NOSIGNAL) == 1);
}

static void keeps_no_descriptor_that_it_did_not_ask_for(void **state)
{
    struct carrier c = { "unix", &stream_sock, "unix:*", NULL };
    struct fl_err err = { 0 };
    struct rig r;
    int fd;

    (void)state;
    rig_init(&r, &c, NULL);
    t_ok(rig_listen(&r, &err), &err);
    fd = raw_connect(r.target + 5);
    send_fds(fd, 100); /* more than a message may carry: some are lost */
    rig_until(&r, r.refused == 1);
    t_int_eq(r.refusal.status, FL_EXHAUSTED, "%s", r.refusal.text);
    close(fd);
    fd = raw_connect(r.target + 5);
    for (int i = 0; i < 3; i++)
        send_fds(fd, 60); /* that no frame speaks of */
    rig_until(&r, r.refused == 2);
    t_int_eq(r.refusal.status, FL_CORRUPT, "%s", r.refusal.text);
    close(fd);
    rig_fini(&r);
}

static void refuses_other_users(void **state)
{
    struct carrier c = { "unix", &stream_sock, "unix:*", NULL };
    struct fl_err err = { 0 };
    struct rig r;
    pid_t pid;
    int status;

    (void)state;
    if (geteuid() != 0)
        t_skip("only root can become another user");
    rig_init(&r, &c, NULL);
    t_ok(rig_listen(&r, &err), &err);
    t_true(chmod(t_tmp(), 0755) == 0 && chmod(r.target + 5, 0666) == 0);
    pid = fork(); /* system calls alone, then it leaves */
    if (pid == 0) {
        struct sockaddr_un a = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        char byte;

        memcpy(a.sun_path, r.target + 5, strlen(r.target + 5));
        if (setuid(65534) < 0 || connect(fd, (struct sockaddr *)&a, sizeof(a)) < 0)
            _exit(1);
        _exit(read(fd, &byte, 1) == 0 ? 0 : 2); /* hung up, without a word */
    }
    for (int i = 0; i < 2000 && waitpid(pid, &status, WNOHANG) == 0; i++)
        fl_loop_turn(r.loop, 5);
    t_true(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", status);
    t_true(chmod(t_tmp(), 0700) == 0);
    rig_fini(&r);
}

/* ---- connections that break */

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
                fl_loop_turn(r.loop, 1);
                fl_loop_pass(r.loop, &held, 100000000);
            }
            if (st == FL_OK && r.client.s && r.client.opened) {
                st = stream_send(r.client.s,
                                 &(struct wire_msg){
                                     .head = { .kind = WIRE_EVENT, .blob_bytes = 3 * WIRE_PIECE },
                                     .blob = three_pieces },
                                 &err);
                for (int i = 0; st == FL_OK && i < 400 && !r.far.n_got && !r.client.closed; i++) {
                    fl_loop_turn(r.loop, 1);
                    fl_loop_pass(r.loop, &held, 100000000);
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
        cmocka_unit_test(proves_the_key_before_anything),
        cmocka_unit_test(reads_the_key_file),
        cmocka_unit_test(gives_up_on_silence),
        cmocka_unit_test(throws_out_garbage),
        cmocka_unit_test(gives_up_on_the_mute),
        cmocka_unit_test(keeps_no_descriptor_that_it_did_not_ask_for),
        cmocka_unit_test(refuses_other_users),
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
    return t_run("wire", tests);
}
