/* A peer that holds the key and then sends whatever it likes. */
#include <stdlib.h>
#include <string.h>

#include "transport/call/call.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { KEPT = 8 };
static struct call_req *kept[KEPT];
static struct call_peer *server_peer;

static void serve(void *service, struct call_req *req, const struct wire_msg *m)
{
    unsigned i = m->head.lane % KEPT;

    (void)service;
    if (!req)
        return;
    if (m->head.budget_ms & 1)
        call_hold_lane(req);
    if (m->head.budget_ms & 2) {
        call_reply(req, (struct fl_bytes){ m->body, m->head.body_bytes }, (struct fl_bytes){ 0 });
        return;
    }
    if (kept[i])
        call_reply(kept[i], (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
    kept[i] = req;
}

static void *room(void *service, uint64_t n)
{
    (void)service;
    return n < 100000 ? malloc(n) : NULL;
}

static void serve_room(void *service, struct call_req *req, const struct wire_msg *m)
{
    if (m->head.blob_bytes && m->head.blob_bytes < 100000)
        free((void *)(uintptr_t)m->blob);
    serve(service, req, m);
}

static void lost(void *service, void *at)
{
    (void)service;
    free(at);
}

static const struct call_method methods[] = {
    { 1, "keep", serve, NULL, NULL },
    { 2, "room", serve_room, room, lost },
};

static void done(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                 const struct fl_err *err)
{
    (void)st;
    (void)reply;
    (void)err;
    free(op);
}

static void on_opened(void *service, const struct wire_hello *peer)
{
    (void)service;
    (void)peer;
    for (unsigned i = 0; i < 4 && server_peer; i++) { /* calls for the fuzzer to answer */
        struct call_op *op = calloc(1, sizeof(*op));

        op->done = done;
        if (call_start(server_peer, &(struct call_args){ .method = 1, .lane = i }, op, NULL) !=
            FL_OK)
            free(op);
    }
}

static const struct call_life life = { .opened = on_opened };

static void accepted(void *arg, struct stream *s)
{
    (void)arg;
    if (call_peer_create(s, methods, FL_LEN(methods), &life, NULL, &server_peer, NULL) != FL_OK)
        abort();
}

static bool closed;

static void on_closed(struct stream *s, const struct fl_err *why)
{
    (void)s;
    (void)why;
    closed = true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t bulk[3 * WIRE_PIECE];
    static const struct stream_user user = { .closed = on_closed };
    struct fl_held_clock held = { 1000000000 };
    struct fl_clock clock = fl_held_clock(&held);
    struct stream_to at = { .target = "pair:f" };
    struct wire_hello me = { 0 };
    struct stream_server *server;
    struct stream *s;
    struct fl_loop *l;

    server_peer = NULL;
    closed = false;
    if (fl_loop_create(&clock, &l, NULL) != FL_OK ||
        stream_listen(l, &stream_pair, &at, &me, accepted, NULL, &server, NULL) != FL_OK ||
        stream_connect(l, &stream_pair, &at, &me, &user, NULL, &s, NULL) != FL_OK)
        abort();
    for (int i = 0; i < 20; i++)
        fl_loop_turn(l, 0);
    for (size_t i = 0; i + 8 <= size && !closed; i += 8) {
        const uint8_t *p = data + i;
        struct wire_msg m = { .head = { .kind = p[0] % 12,
                                        .lane = p[1] % 16,
                                        .id = p[2] < 8 ? (uint64_t)p[2] << 16 | p[3] % 4 : p[2],
                                        .method = p[4] % 4,
                                        .budget_ms = p[5],
                                        .body_bytes = p[6],
                                        .blob_bytes = p[7] < 4 ? p[7] * (size_t)WIRE_PIECE / 2
                                                               : p[7] * 300u },
                              .body = bulk,
                              .blob = bulk };

        (void)stream_send(s, &m, NULL);
        if (p[3] & 0x80)
            for (int k = 0; k < 3; k++)
                fl_loop_turn(l, 0);
        if (p[3] == 0x7f && server_peer) {
            call_peer_destroy(server_peer);
            server_peer = NULL;
        }
    }
    for (int i = 0; i < 30; i++)
        fl_loop_turn(l, 0);
    call_peer_destroy(server_peer);
    for (unsigned i = 0; i < KEPT; i++)
        if (kept[i])
            call_reply(kept[i], (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
    memset(kept, 0, sizeof(kept));
    if (!closed) {
        s->user = NULL;
        stream_close(s, NULL);
    }
    stream_server_destroy(server);
    for (int i = 0; i < 10; i++)
        fl_loop_turn(l, 0);
    fl_loop_pass(l, &held, 3000000000);
    fl_loop_destroy(l);
    return 0;
}
