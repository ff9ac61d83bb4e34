/* One suite over all carriers: what a call promises, whatever carries it. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "tests/wire/rig.h"
#include "transport/call/call.h"

static struct lossy_plan over_pair = {
    .over = &stream_pair, .seed = 1, .chunk_max = 50, .again_pct = 20
};
const struct carrier carriers[] = {
    { "unix", &stream_sock, "unix:*", NULL },
    { "tcp", &stream_sock, "127.0.0.1:0", NULL },
    { "pair", &stream_pair, "pair:x", NULL },
    { "rpc", &stream_rpc, "127.0.0.1:0", NULL },
    { "lossy pair", &stream_lossy, "pair:x", &over_pair },
    { 0 },
};

enum { ECHO = 1, KEEP, FAIL, GIVE_FD, BULK, NOTE, ONE_BY_ONE, UNKNOWN = 99 };
enum { KEPT = 4096 };
struct side {
    struct call_peer *peer;
    unsigned opened, lost, closed, ready;
    struct fl_err why;
    struct call_req *kept[KEPT];
    unsigned n_kept, n_notes, n_unwanted, n_served, n_lost_rooms;
    uint32_t budget_ms;
    uint64_t order[KEPT]; /* first number of each body that was served */
    uint8_t *room;
    struct lent {
        struct wire_hold hold;
        unsigned freed;
    } lent;
};
struct duo {
    const struct carrier *c;
    struct fl_loop *loop;
    struct fl_held_clock held;
    struct stream_server *server;
    struct side a, b; /* a asks, b serves */
    struct stream_to to, at;
    char target[200];
    int fds_before;
};
struct ask {
    struct call_op op;
    unsigned done;
    enum fl_status st;
    struct fl_err err;
    uint8_t *body, *blob, *room;
    size_t body_len, blob_len;
    int fd;
    void (*then)(struct ask *a);
    struct duo *d;
};

static void on_unwanted(void *arg, struct call_req *req)
{
    struct side *s = arg;

    (void)req;
    s->n_unwanted++;
}

static void note_order(struct side *s, const struct wire_msg *m)
{
    if (m->head.body_bytes >= 8)
        memcpy(&s->order[s->n_served % KEPT], m->body, 8);
    s->n_served++;
}

static void serve_echo(void *service, struct call_req *req, const struct wire_msg *m)
{
    note_order(service, m);
    call_reply(req, (struct fl_bytes){ m->body, m->head.body_bytes },
               (struct fl_bytes){ m->blob, m->head.blob_bytes });
}

static void serve_keep(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct side *s = service;

    note_order(s, m);
    s->budget_ms = call_req_budget_ms(req);
    call_on_unwanted(req, on_unwanted, s);
    s->kept[s->n_kept++ % KEPT] = req;
}

static void serve_one_by_one(void *service, struct call_req *req, const struct wire_msg *m)
{
    call_hold_lane(req);
    serve_keep(service, req, m);
}

static void serve_fail(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct fl_err e = { .status = FL_EXHAUSTED,
                        .origin = FL_FROM_CUDA,
                        .native = 2,
                        .text = "bucket 3: out of memory" };

    note_order(service, m);
    call_fail(req, &e);
}

static void serve_give_fd(void *service, struct call_req *req, const struct wire_msg *m)
{
    int fd = memfd_create("t", MFD_CLOEXEC);

    note_order(service, m);
    t_int_eq(m->head.n_fds, 1);
    t_true(fd >= 0 && dprintf(fd, "given back") > 0);
    call_answer(req, &(struct call_answer){ .fds = &fd, .n_fds = 1 });
    close(fd);
}

static void free_lent(struct wire_hold *h)
{
    container_of(h, struct lent, hold)->freed++;
}

static void *bulk_room(void *service, uint64_t bytes)
{
    struct side *s = service;

    return s->room = malloc(bytes);
}

static void bulk_lost(void *service, void *room)
{
    struct side *s = service;

    t_true(room == s->room);
    free(room);
    s->room = NULL;
    s->n_lost_rooms++;
}

static void serve_bulk(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct side *s = service;

    note_order(s, m);
    t_true(m->blob == s->room);
    s->lent.hold.free = free_lent;
    call_reply_hold(req, (struct fl_bytes){ 0 }, (struct fl_bytes){ s->room, m->head.blob_bytes },
                    &s->lent.hold);
}

static void serve_note(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct side *s = service;

    t_true(!req);
    t_int_eq(m->head.kind, WIRE_EVENT);
    s->n_notes++;
}

static const struct call_method methods[] = {
    { ECHO, "echo", serve_echo, NULL, NULL },
    { KEEP, "keep", serve_keep, NULL, NULL },
    { FAIL, "fail", serve_fail, NULL, NULL },
    { GIVE_FD, "give", serve_give_fd, NULL, NULL },
    { BULK, "bulk", serve_bulk, bulk_room, bulk_lost },
    { NOTE, "note", serve_note, NULL, NULL },
    { ONE_BY_ONE, "one", serve_one_by_one, NULL, NULL },
};

static void on_opened(void *service, const struct wire_hello *peer)
{
    (void)peer;
    ((struct side *)service)->opened++;
}

static void on_lost(void *service, const struct fl_err *why)
{
    struct side *s = service;

    s->lost++;
    s->why = *why;
}

static void on_closed(void *service, const struct fl_err *why)
{
    struct side *s = service;

    s->closed++;
    s->why = *why;
}

static void on_ready(void *service)
{
    ((struct side *)service)->ready++;
}

static const struct call_life life = {
    .opened = on_opened, .lost = on_lost, .closed = on_closed, .ready = on_ready
};

static void accepted(void *arg, struct stream *s)
{
    struct duo *d = arg;
    struct fl_err err = { 0 };

    call_peer_destroy(d->b.peer);
    d->b.peer = NULL;
    t_ok(call_peer_create(s, methods, FL_LEN(methods), &life, &d->b, &d->b.peer, &err), &err);
}

static void duo_dial(struct duo *d)
{
    struct wire_hello me = { .role = "driver" };
    struct stream *s = NULL;
    struct fl_err err = { 0 };

    t_ok(stream_connect(d->loop, d->c->ops, &d->to, &me, NULL, NULL, &s, &err), &err);
    t_ok(call_peer_create(s, NULL, 0, &life, &d->a, &d->a.peer, &err), &err);
}

#define duo_until(d, cond)                                                                         \
    do {                                                                                           \
        uint64_t end_ = fl_clock_boot_ns() + 10000000000u;                                         \
        while (!(cond)) {                                                                          \
            t_true(fl_clock_boot_ns() < end_, "waited for " #cond " over %s", (d)->c->name);       \
            fl_loop_turn((d)->loop, 5);                                                            \
        }                                                                                          \
    } while (0)

static void duo_init(struct duo *d, const struct carrier *c)
{
    struct wire_hello you = { .role = "worker" };
    struct fl_clock clock;
    struct fl_err err = { 0 };
    const char *star = strchr(c->listen, '*');

    (void)t_tmp();
    *d = (struct duo){ .c = c, .held.now_ns = 1000000000 };
    clock = fl_held_clock(&d->held);
    d->fds_before = t_open_fds();
    t_ok(fl_loop_create(&clock, &d->loop, &err), &err);
    snprintf(d->target, sizeof(d->target), "%.*s%s", star ? (int)(star - c->listen) : 100,
             c->listen, star ? t_path("s") : "");
    d->at = (struct stream_to){ .target = d->target, .lossy = c->plan, .key = { "k", 1 } };
    t_ok(stream_listen(d->loop, c->ops, &d->at, &you, accepted, d, &d->server, &err), &err);
    d->to = (struct stream_to){ .target = stream_server_at(d->server),
                                .lossy = c->plan,
                                .key = { "k", 1 } };
}

static void duo_open(struct duo *d, const struct carrier *c)
{
    duo_init(d, c);
    duo_dial(d);
    duo_until(d, d->a.opened && d->b.opened);
}

static void duo_fini(struct duo *d)
{
    call_peer_destroy(d->a.peer);
    call_peer_destroy(d->b.peer);
    stream_server_destroy(d->server);
    for (int i = 0; i < 20; i++)
        fl_loop_turn(d->loop, 0);
    fl_loop_pass(d->loop, &d->held, 2000000000); /* whoever still lingers */
    fl_loop_turn(d->loop, 0);
    fl_loop_destroy(d->loop);
    rig_same_fds(d->c, d->fds_before);
}

static void ask_done(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                     const struct fl_err *err)
{
    struct ask *a = container_of(op, struct ask, op);

    a->done++;
    a->st = st;
    t_true((st == FL_OK) == (reply != NULL) && (st == FL_OK) == (err == NULL));
    if (err)
        a->err = *err;
    if (reply) {
        a->body_len = reply->head.body_bytes;
        a->blob_len = reply->head.blob_bytes;
        a->body = malloc(a->body_len + 1);
        if (a->body_len)
            memcpy(a->body, reply->body, a->body_len);
        a->blob = malloc(a->blob_len + 1);
        if (a->blob_len)
            memcpy(a->blob, reply->blob, a->blob_len);
        if (a->room)
            t_true(reply->blob == a->room);
        if (reply->head.n_fds) {
            a->fd = reply->fds[0];
            reply->fds[0] = -1;
        }
    }
    if (a->then)
        a->then(a);
}

static void *ask_room(struct call_op *op, uint64_t bytes)
{
    struct ask *a = container_of(op, struct ask, op);

    (void)bytes;
    return a->room;
}

static enum fl_status ask_sized(struct duo *d, struct ask *a, uint16_t method, uint32_t lane,
                                uint64_t number, size_t body, size_t blob, uint64_t due_ns,
                                struct fl_err *err)
{
    uint8_t *p = calloc(1, body + 8), *q = malloc(blob + 1);
    enum fl_status st;

    *a = (struct ask){
        .op.done = ask_done, .op.room = ask_room, .fd = -1, .d = d, .then = a->then, .room = a->room
    };
    memcpy(p, &number, 8);
    for (size_t i = 0; i < blob; i++)
        q[i] = (uint8_t)(number + i * 11 + (i >> 9));
    st = call_start(d->a.peer,
                    &(struct call_args){ .method = method,
                                         .lane = lane,
                                         .due_ns = due_ns,
                                         .body = { p, body < 8 ? 8 : body },
                                         .blob = { q, blob } },
                    &a->op, err);
    free(p);
    free(q);
    return st;
}

static void ask(struct duo *d, struct ask *a, uint16_t method, uint32_t lane, uint64_t number)
{
    struct fl_err err = { 0 };

    t_ok(ask_sized(d, a, method, lane, number, 8, 0, 0, &err), &err);
}

static void ask_fini(struct ask *a)
{
    free(a->body);
    free(a->blob);
    if (a->fd >= 0)
        close(a->fd);
}

static void reply_kept(struct side *s, unsigned i)
{
    call_reply(s->kept[i], (struct fl_bytes){ "kept", 4 }, (struct fl_bytes){ 0 });
    s->kept[i] = NULL;
}

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

static bool all_done(const struct ask *a, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        if (!a[i].done)
            return false;
    return true;
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

/* ---- at most once */

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
        cmocka_unit_test(answers_come_back),
        cmocka_unit_test(errors_pass_as_they_are),
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
        cmocka_unit_test(calls_of_a_lost_stream_end),
        cmocka_unit_test(a_cut_anywhere_ends_each_call_once),
        cmocka_unit_test(request_memory_of_a_cut_call_comes_back),
        cmocka_unit_test(done_may_do_anything),
        cmocka_unit_test(every_fault_ends_each_call_once),
    };

    rig_warm();
    return t_run("call", tests);
}
