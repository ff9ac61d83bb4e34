#include "tests/wire/duo.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

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

void duo_dial(struct duo *d)
{
    struct wire_hello me = { .role = "driver" };
    struct stream *s = NULL;
    struct fl_err err = { 0 };

    t_ok(stream_connect(d->loop, d->c->ops, &d->to, &me, NULL, NULL, &s, &err), &err);
    t_ok(call_peer_create(s, NULL, 0, &life, &d->a, &d->a.peer, &err), &err);
}

void duo_init(struct duo *d, const struct carrier *c)
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

void duo_open(struct duo *d, const struct carrier *c)
{
    duo_init(d, c);
    duo_dial(d);
    duo_until(d, d->a.opened && d->b.opened);
}

void duo_fini(struct duo *d)
{
    call_peer_destroy(d->a.peer);
    call_peer_destroy(d->b.peer);
    stream_server_destroy(d->server);
    for (unsigned i = 0; i < KEPT; i++) { /* they outlive their peer; one may have come after the test had looked */
        if (d->a.kept[i])
            reply_kept(&d->a, i);
        if (d->b.kept[i])
            reply_kept(&d->b, i);
    }
    for (int i = 0; i < 20; i++)
        fl_loop_turn(d->loop, 0);
    fl_loop_pass(d->loop, &d->held, 2000000000); /* whoever still lingers */
    fl_loop_turn(d->loop, 0);
    fl_loop_destroy(d->loop);
    rig_same_fds(d->c, d->fds_before);
}

void ask_done(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
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

enum fl_status ask_sized(struct duo *d, struct ask *a, uint16_t method, uint32_t lane,
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

void ask(struct duo *d, struct ask *a, uint16_t method, uint32_t lane, uint64_t number)
{
    struct fl_err err = { 0 };

    t_ok(ask_sized(d, a, method, lane, number, 8, 0, 0, &err), &err);
}

void ask_fini(struct ask *a)
{
    free(a->body);
    free(a->blob);
    if (a->fd >= 0)
        close(a->fd);
}

void reply_kept(struct side *s, unsigned i)
{
    call_reply(s->kept[i], (struct fl_bytes){ "kept", 4 }, (struct fl_bytes){ 0 });
    s->kept[i] = NULL;
}

bool all_done(const struct ask *a, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        if (!a[i].done)
            return false;
    return true;
}
