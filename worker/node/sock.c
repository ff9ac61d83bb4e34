#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/proto/methods.h"
#include "common/proto/pb.h"
#include "worker/node/node_priv.h"

struct line { /* a worker's connection */
    struct node *node;
    struct worker *worker;
    struct call_peer *peer;
};

struct relayed { /* a worker's call on its way to the head */
    struct call_op op;
    struct call_req *req;
};

/* ---- what a worker says ---- */

static void refuse(struct call_req *req, enum fl_status st, const char *text)
{
    struct fl_err err;

    fl_fail(&err, st, "%s", text);
    if (req)
        call_fail(req, &err);
}

static void on_ready(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct line *l = service;
    struct fl_err err;
    Fl__WorkerReady *r =
        pb_unpack(&fl__worker_ready__descriptor, m->body, m->head.body_bytes, &err);

    if (!r) {
        if (req)
            call_fail(req, &err);
        return;
    }
    if (l->worker)
        worker_ready(l->worker, r);
    fl__worker_ready__free_unpacked(r, NULL);
    if (req)
        call_reply(req, (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
}

static void on_metric(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct line *l = service;
    Fl__Metric *x = pb_unpack(&fl__metric__descriptor, m->body, m->head.body_bytes, NULL);

    if (x && l->worker)
        node_uplink_metric(l->node->up, &l->worker->who, x->name, x->value);
    if (x)
        fl__metric__free_unpacked(x, NULL);
    if (req)
        call_reply(req, (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
}

static void on_progress(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct line *l = service;
    Fl__Progress *x = pb_unpack(&fl__progress__descriptor, m->body, m->head.body_bytes, NULL);

    if (x && l->worker) {
        node_uplink_metric(l->node->up, &l->worker->who, "progress/done", (double)x->done);
        node_uplink_metric(l->node->up, &l->worker->who, "progress/total", (double)x->total);
    }
    if (x)
        fl__progress__free_unpacked(x, NULL);
    if (req)
        call_reply(req, (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
}

static const struct call_method methods[] = {
    { FL_WORKER_READY, "worker_ready", on_ready, NULL, NULL },
    { FL_METRIC, "metric", on_metric, NULL, NULL },
    { FL_PROGRESS, "progress", on_progress, NULL, NULL },
};

/* ---- relays: bodies go through undecoded ---- */

static void on_relayed(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                       const struct fl_err *err)
{
    struct relayed *r = container_of(op, struct relayed, op);

    if (st == FL_OK)
        call_reply(r->req, (struct fl_bytes){ reply->body, reply->head.body_bytes },
                   (struct fl_bytes){ 0 });
    else
        call_fail(r->req, err);
    free(r);
}

static void on_unwanted(void *arg, struct call_req *req)
{
    struct relayed *r = arg;

    (void)req;
    call_cancel(&r->op); /* on_relayed answers what nobody reads, and frees */
}

static void relay(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct line *l = service;
    struct node *n = l->node;
    Fl__SeatRef from = FL__SEAT_REF__INIT;
    Fl__Relay out = FL__RELAY__INIT;
    struct relayed *r;
    struct fl_err err;

    if (m->head.method < FL_RELAYED_FIRST || m->head.method > FL_RELAYED_LAST || !req) {
        fl_fail(&err, FL_UNSUPPORTED, "method %u is none of a daemon's; %d to %d go to the head",
                m->head.method, FL_RELAYED_FIRST, FL_RELAYED_LAST);
        if (req)
            call_fail(req, &err);
        return;
    }
    if (!node_uplink_joined(n->up)) { /* nothing was started: asking again is safe */
        refuse(req, FL_AGAIN, "the head is away just now; ask again");
        return;
    }
    if (!l->worker || !(r = calloc(1, sizeof(*r)))) {
        refuse(req, l->worker ? FL_EXHAUSTED : FL_STALE,
               l->worker ? "no memory to relay" : "this worker has ended");
        return;
    }
    from.worker = (ProtobufCBinaryData){ sizeof(l->worker->who.id), (uint8_t *)&l->worker->who.id };
    from.attempt = l->worker->who.attempt;
    out.from = &from;
    out.job = l->worker->spec->job;
    out.method = m->head.method;
    out.body = (ProtobufCBinaryData){ m->head.body_bytes, (uint8_t *)(uintptr_t)m->body };
    r->req = req;
    r->op.done = on_relayed;
    if (node_uplink_call(n->up, FL_RELAY, LANE_RELAY, call_req_due_ns(req), &out.base, &r->op,
                         &err) != FL_OK) {
        if (err.status == FL_UNREACHABLE)
            err.status = FL_AGAIN; /* not sent */
        call_fail(req, &err);
        free(r);
        return;
    }
    fl_metric_add(n->count[NODE_RELAYS], 1);
    call_on_unwanted(req, on_unwanted, r);
}

/* ---- connections ---- */

static void on_closed(void *service, const struct fl_err *why)
{
    struct line *l = service;

    if (l->worker)
        fl_debug("worker's connection ended worker=\"%s\" why=\"%s\"", l->worker->name, why->text);
    node_line_destroy(l);
}
static const struct call_life life = { .closed = on_closed, .other = relay };

static enum fl_status key_of(void *arg, const struct wire_hello *claims, struct fl_bytes *key,
                             struct fl_err *err)
{
    struct worker *w = worker_find(arg, &claims->seat);
    char id[FL_SHORT];

    if (!w || w->gone)
        return fl_fail(err, FL_STALE, "no worker %s attempt %u runs under this daemon",
                       fl_short(id, &claims->seat.id), claims->seat.attempt);
    *key = (struct fl_bytes){ w->spec->key.data, w->spec->key.len };
    return FL_OK;
}

static void on_accepted(void *arg, struct stream *s_take)
{
    struct node *n = arg;
    const struct wire_hello *peer = stream_peer(s_take);
    struct worker *w = peer ? worker_find(n, &peer->seat) : NULL;
    struct line *l = w && !w->gone ? calloc(1, sizeof(*l)) : NULL;
    struct fl_err err;

    if (!l) {
        fl_fail(&err, w ? FL_EXHAUSTED : FL_STALE, "this worker cannot be served");
        stream_close(s_take, &err);
        return;
    }
    l->node = n;
    if (call_peer_create(s_take, methods, FL_LEN(methods), &life, l, &l->peer, &err) != FL_OK) {
        fl_warn("worker cannot be served worker=\"%s\" why=\"%s\"", w->name, err.text);
        stream_close(s_take, &err);
        free(l);
        return;
    }
    node_line_destroy(w->line); /* it has connected anew */
    l->worker = w;
    w->line = l;
}

void node_line_destroy(struct line *l)
{
    if (!l)
        return;
    if (l->worker)
        l->worker->line = NULL;
    call_peer_destroy(l->peer);
    free(l);
}

enum fl_status node_line_event(struct worker *w, uint16_t method, struct fl_bytes body,
                               struct fl_err *err)
{
    if (!w->line)
        return fl_fail(err, FL_UNREACHABLE, "%s is not connected", w->name);
    return call_event(w->line->peer, method, LANE_CONTROL, body, err);
}

enum fl_status node_sock_open(struct node *n, struct fl_err *err)
{
    struct wire_hello me = { .role = "node", .node = n->ident.me, .term = n->ident.highest };
    char target[FL_PATH_MAX + 8];
    struct stream_to at = { .target = target, .key_of = key_of };

    snprintf(target, sizeof(target), "unix:%s", n->sock_path);
    snprintf(me.build, sizeof(me.build), "%s", FURLONG_VERSION);
    return stream_listen(n->loop, &stream_sock, &at, &me, on_accepted, n, &n->server, err);
}

void node_sock_close(struct node *n)
{
    if (!n->server)
        return;
    stream_server_destroy(n->server);
    n->server = NULL;
    (void)unlink(n->sock_path); /* it may have gone with the server */
}
