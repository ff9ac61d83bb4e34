#include "tests/wire/rig.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/certs.h"

static void end_opened(struct stream *s, const struct wire_hello *peer)
{
    struct end *e = s->user_arg;

    e->opened++;
    e->peer = *peer;
}

static void *end_room(struct stream *s, const struct wire_head *h)
{
    struct end *e = s->user_arg;

    return e->room && h->blob_bytes <= e->room_bytes ? e->room : NULL;
}

static uint8_t *copy(const void *p, size_t n)
{
    uint8_t *c = malloc(n + 1);

    if (n)
        memcpy(c, p, n);
    return c;
}

static void end_message(struct stream *s, const struct wire_msg *m)
{
    struct end *e = s->user_arg;
    struct got *g = &e->got[e->n_got];

    e->n_got++;
    if (e->on_message)
        e->on_message(e, m);
    if (e->count_only)
        return;
    t_true(e->n_got <= RIG_GOT, "%u messages", e->n_got);
    g->head = m->head;
    g->body = copy(m->body, m->head.body_bytes);
    g->blob = m->blob == e->room ? e->room : copy(m->blob, m->head.blob_bytes);
    for (unsigned i = 0; i < m->head.n_fds; i++) {
        g->fds[i] = m->fds[i];
        m->fds[i] = -1;
    }
}

static void end_drained(struct stream *s)
{
    ((struct end *)s->user_arg)->drained++;
}

static void end_lost(struct stream *s, const struct fl_err *why)
{
    struct end *e = s->user_arg;

    e->lost++;
    e->why = *why;
}

static void end_closed(struct stream *s, const struct fl_err *why)
{
    struct end *e = s->user_arg;

    e->closed++;
    e->why = *why;
    e->s = NULL;
}

const struct stream_user end_user = {
    .opened = end_opened,
    .room = end_room,
    .message = end_message,
    .drained = end_drained,
    .lost = end_lost,
    .closed = end_closed,
};

void end_forget(struct end *e)
{
    for (unsigned i = 0; i < e->n_got && i < RIG_GOT; i++) {
        free(e->got[i].body);
        if (e->got[i].blob != e->room)
            free(e->got[i].blob);
        for (unsigned j = 0; j < e->got[i].head.n_fds; j++)
            close(e->got[i].fds[j]);
        e->got[i] = (struct got){ 0 };
    }
    e->n_got = 0;
}

static void accepted(void *arg, struct stream *s)
{
    struct rig *r = arg;

    if (r->far.s)
        stream_close(r->far.s, NULL), r->far.s->user = NULL;
    r->far.s = s;
    s->user = &end_user;
    s->user_arg = &r->far;
}

static void refused(void *arg, const struct fl_err *why)
{
    struct rig *r = arg;

    r->refused++;
    r->refusal = *why;
}

static struct tls_id *shown; /* of the whole program: a key a test would take as long as the test */

static void shown_end(void)
{
    tls_id_destroy(shown);
}

struct tls_id *rig_tls(void)
{
    struct t_cert ca;

    if (shown)
        return shown;
    t_cert_make(&ca, "ca", NULL, NULL, 0, 2);
    shown = t_tls_id("both", &ca);
    t_cert_free(&ca);
    atexit(shown_end);
    return shown;
}

void rig_init(struct rig *r, const struct carrier *c, struct fl_held_clock *held)
{
    struct tls_id *tls = c->tls ? rig_tls() : NULL;
    struct fl_err err = { 0 };
    struct fl_clock clock;
    const char *star = strchr(c->listen, '*');

    (void)t_tmp();
    *r = (struct rig){ .c = c, .clock = held };
    r->fds_before = t_open_fds();
    if (held) {
        held->now_ns = 1000000000;
        clock = fl_held_clock(held);
    }
    t_ok(fl_loop_create(held ? &clock : NULL, &r->loop, &err), &err);
    if (star)
        snprintf(r->target, sizeof(r->target), "%.*s%s", (int)(star - c->listen), c->listen,
                 t_path("s"));
    else
        snprintf(r->target, sizeof(r->target), "%s", c->listen);
    r->client.rig = r->far.rig = r;
    r->at = (struct stream_to){ .target = r->target,
                                .lossy = c->plan,
                                .refused = refused,
                                .key = { "the key", 7 },
                                .tls = tls };
    r->to = (struct stream_to){ .lossy = c->plan, .key = { "the key", 7 }, .tls = tls };
    r->me = (struct wire_hello){
        .features = 5, .term.head = 7, .seat.attempt = 3, .role = "worker", .build = "test 1"
    };
    r->you =
        (struct wire_hello){ .features = 9, .node.start = 2, .role = "node", .build = "test 2" };
    memset(r->me.term.cluster, 0xc1, 16);
    memset(r->me.seat.id.b, 0x5e, 28);
    memset(r->you.node.id.b, 0x0d, 28);
}

enum fl_status rig_listen(struct rig *r, struct fl_err *err)
{
    FL_TRY(stream_listen(r->loop, r->c->ops, &r->at, &r->you, accepted, r, &r->server, err));
    if (!r->to.target)
        r->to.target = stream_server_at(r->server);
    return FL_OK;
}

enum fl_status rig_dial(struct rig *r, struct fl_err *err)
{
    return stream_connect(r->loop, r->c->ops, &r->to, &r->me, &end_user, &r->client, &r->client.s,
                          err);
}

void rig_open(struct rig *r, const struct carrier *c)
{
    struct fl_err err = { 0 };

    rig_init(r, c, NULL);
    t_ok(rig_listen(r, &err), &err);
    t_ok(rig_dial(r, &err), &err);
    rig_until(r, r->client.closed || (r->client.opened && r->far.opened));
    t_true(!r->client.closed, "%s: %s", c->name, r->client.why.text);
}

void rig_fini(struct rig *r)
{
    if (r->client.s)
        stream_close(r->client.s, NULL);
    rig_until(r, !r->client.s);
    if (r->far.s)
        stream_close(r->far.s, NULL);
    rig_until(r, !r->far.s);
    stream_server_destroy(r->server);
    end_forget(&r->client);
    end_forget(&r->far);
    fl_loop_destroy(r->loop);
    if (r->fds_before >= 0)
        rig_same_fds(r->c, r->fds_before);
}

void rig_same_fds(const struct carrier *c, int before)
{
    enum { GONE_MS = 15000 }; /* a channel that is connecting is destroyed once it has, or has not */
    bool rpc = strstr(c->name, "rpc");
    uint64_t end = fl_clock_boot_ns() + GONE_MS * 1000000ull;
    char names[512] = "";

    while (rpc && t_open_fds() > before && fl_clock_boot_ns() < end)
        usleep(1000);
    if (t_open_fds() > before)
        t_open_names(names, sizeof(names));
    t_true(t_open_fds() <= before, "%d more descriptors are open over %s: %s", t_open_fds() - before,
           c->name, names);
}

void rig_warm(void)
{
    static const struct carrier c = { "rpc", &stream_rpc, "127.0.0.1:0", NULL };
    struct rig r;

    (void)rig_tls(); /* before gRPC's threads are there, as in the programs: what libcrypto keeps of
                      * a thread goes with that thread, and must not have gone before */
    rig_open(&r, &c);
    r.fds_before = -1;
    rig_fini(&r);
    for (int same = 0, last = -1; same < 50; same++) { /* those of the line go, the others stay */
        if (t_open_fds() != last)
            same = 0;
        last = t_open_fds();
        usleep(1000);
    }
}

static uint8_t byte_of(uint64_t id, size_t at)
{
    return (uint8_t)(id * 31 + at * 7 + (at >> 8) * 13 + (at >> 16));
}

static void pattern(uint8_t *p, uint64_t id, size_t n)
{
    for (size_t i = 0; i < n; i++)
        p[i] = byte_of(id, i);
}

void send_sized(struct end *e, enum wire_kind kind, uint32_t lane, uint64_t id, size_t body,
                size_t blob)
{
    uint8_t *p = malloc(body + 1), *q = malloc(blob + 1);
    struct fl_err err = { 0 };

    pattern(p, id + 1, body);
    pattern(q, id, blob);
    t_ok(stream_send(e->s,
                     &(struct wire_msg){ .head = { .kind = kind,
                                                   .lane = lane,
                                                   .id = id,
                                                   .body_bytes = (uint32_t)body,
                                                   .blob_bytes = blob,
                                                   .method = 9,
                                                   .budget_ms = 1234 },
                                         .body = p,
                                         .blob = q },
                     &err),
         &err);
    free(p);
    free(q);
}

void check_sized(const struct got *g, enum wire_kind kind, uint32_t lane, uint64_t id, size_t body,
                 size_t blob)
{
    t_int_eq(g->head.kind, kind);
    t_int_eq(g->head.lane, lane);
    t_int_eq(g->head.id, id);
    t_int_eq(g->head.method, 9);
    t_int_eq(g->head.budget_ms, 1234);
    t_int_eq(g->head.body_bytes, body);
    t_int_eq(g->head.blob_bytes, blob);
    for (size_t i = 0; i < body; i++)
        if (g->body[i] != byte_of(id + 1, i))
            t_true(false, "byte %zu of the body of %llu", i, (unsigned long long)id);
    for (size_t i = 0; i < blob; i++)
        if (g->blob[i] != byte_of(id, i))
            t_true(false, "byte %zu of the blob of %llu", i, (unsigned long long)id);
}
