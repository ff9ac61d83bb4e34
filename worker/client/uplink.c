#include "worker/client/uplink.h"
#include <stdlib.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "worker.pb-c.h"
#include "worker/client/driver.h"
#include "worker/client/peers.h"
#include "worker/client/sync.h"
#include "worker/client/watch.h"

enum { TELL_AGAIN_MS = 50 };
struct client_uplink {
    struct client_line line;
    struct call_peer *call;
    bool open;
    struct fl_err over; /* status FL_OK: it may come back */
    uint32_t away_ms;
    struct fl_timer away, late, tell; /* late: the join's; tell: READY once more */
    struct client_sync *joined; /* whoever waits in furlong_join(); NULL afterwards */
    struct call_op ready;
    struct client_relay *relays;
};

/* ---- relays --------------------------------------------------------------------------------- */
static void relay_over(struct client_relay *r, enum fl_status st, const struct wire_msg *reply,
                       const struct fl_err *err)
{
    fl_timer_cancel(&r->timer);
    *r->at = r->next;
    if (r->next)
        r->next->at = r->at;
    r->at = NULL;
    free(r->body);
    r->body = NULL;
    r->done(r, st, reply, err);
}

static void relay_late(struct client_relay *r)
{
    struct furlong *f = r->f;
    struct fl_err err;

    fl_fail(&err, FL_TIMEOUT, "%s: %s did not answer in time", f->seat.name,
            f->up->open ? "the head" : "the daemon is away and");
    relay_over(r, FL_TIMEOUT, NULL, &err);
}

static void relay_try(struct client_relay *r);

static void relay_due(struct fl_timer *t, uint64_t now_ns)
{
    struct client_relay *r = container_of(t, struct client_relay, timer);

    if (r->failed.status != FL_OK)
        relay_over(r, r->failed.status, NULL, &r->failed);
    else if (r->due_ns && now_ns >= r->due_ns)
        relay_late(r);
    else
        relay_try(r);
}

static void relay_again(struct client_relay *r)
{
    uint64_t at = fl_loop_now_ns(r->f->loop) + (uint64_t)r->pause_ms * 1000000;

    r->pause_ms = r->pause_ms * 2 < CLIENT_RETRY_MAX_MS ? r->pause_ms * 2 : CLIENT_RETRY_MAX_MS;
    fl_timer_arm(r->f->loop, &r->timer, r->due_ns && r->due_ns < at ? r->due_ns : at);
}

static void relay_done(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                       const struct fl_err *err)
{
    struct client_relay *r = container_of(op, struct client_relay, op);

    r->sent = false;
    if ((st == FL_AGAIN || (st == FL_UNREACHABLE && r->again)) &&
        (!r->due_ns || fl_loop_now_ns(r->f->loop) < r->due_ns))
        relay_again(r);
    else
        relay_over(r, st, reply, err);
}

static void relay_try(struct client_relay *r)
{
    struct client_uplink *up = r->f->up;
    struct call_args a = { .method = r->method,
                           .due_ns = r->due_ns,
                           .body = { r->body, r->body_bytes } };
    enum fl_status st;

    if (up->over.status != FL_OK) {
        r->failed = up->over;
        fl_timer_arm(r->f->loop, &r->timer, fl_loop_now_ns(r->f->loop));
        return;
    }
    if (!up->open) { /* opened() tries again; until then only the deadline ends it */
        if (r->due_ns)
            fl_timer_arm(r->f->loop, &r->timer, r->due_ns);
        return;
    }
    fl_timer_cancel(&r->timer);
    r->op.done = relay_done;
    st = call_start(up->call, &a, &r->op, &r->failed);
    if (st == FL_OK) {
        r->sent = true;
    } else if (st == FL_AGAIN || st == FL_UNREACHABLE) {
        r->failed.status = FL_OK;
        relay_again(r);
    } else { /* never inside the call that started it */
        fl_timer_arm(r->f->loop, &r->timer, fl_loop_now_ns(r->f->loop));
    }
}

enum fl_status client_relay_start_packed(struct client_relay *r, struct furlong *f)
{
    if (!f->up) {
        free(FL_TAKE(r->body));
        return FL_CANCELLED;
    }
    r->f = f;
    r->pause_ms = CLIENT_RETRY_MIN_MS;
    r->timer = (struct fl_timer){ .fire = relay_due };
    r->next = f->up->relays;
    r->at = &f->up->relays;
    if (r->next)
        r->next->at = &r->next;
    f->up->relays = r;
    relay_try(r);
    return FL_OK;
}

enum fl_status client_relay_start(struct client_relay *r, struct furlong *f, uint16_t method,
                                  const struct ProtobufCMessage *m, struct fl_err *err)
{
    size_t len = protobuf_c_message_get_packed_size(m);

    if (len > WIRE_MAX_BODY)
        return fl_fail(err, FL_INVALID, "%zu bytes are too much for the head, at most %d", len,
                       WIRE_MAX_BODY);
    r->body = malloc(len ? len : 1);
    if (!r->body)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a message of %zu bytes", len);
    r->body_bytes = protobuf_c_message_pack(m, r->body);
    r->method = method;
    if (client_relay_start_packed(r, f) != FL_OK)
        return fl_fail(err, FL_CANCELLED, "%s leaves", f->seat.name);
    return FL_OK;
}

static void relay_dropped(struct client_relay *r, enum fl_status st, const struct wire_msg *reply,
                          const struct fl_err *err)
{
    (void)r, (void)st, (void)reply, (void)err;
}

void client_relay_cancel(struct client_relay *r)
{
    if (!r->at)
        return;
    r->done = relay_dropped;
    r->due_ns = 1; /* over for good: relay_done does not try again */
    if (r->sent)
        call_cancel(&r->op);
    else
        relay_over(r, FL_CANCELLED, NULL, NULL);
}

struct relay_wait {
    struct client_sync sync;
    struct client_relay relay;
    struct furlong *f;
    uint16_t method;
    uint32_t budget_ms;
    const struct ProtobufCMessage *m;
    enum fl_status (*take)(void *arg, const struct wire_msg *reply, struct fl_err *err);
    void *arg;
};

static void wait_over(struct client_relay *r, enum fl_status st, const struct wire_msg *reply,
                      const struct fl_err *err)
{
    struct relay_wait *w = container_of(r, struct relay_wait, relay);
    struct fl_err mine = { 0 };

    if (st == FL_OK && w->take) {
        st = w->take(w->arg, reply, &mine);
        err = &mine;
    }
    client_sync_end(&w->sync, st, err);
}

static void wait_begin(struct client_sync *s)
{
    struct relay_wait *w = container_of(s, struct relay_wait, sync);
    struct fl_err err;
    enum fl_status st;

    w->relay.done = wait_over;
    if (w->budget_ms && w->budget_ms != FURLONG_FOREVER)
        w->relay.due_ns = fl_loop_now_ns(w->f->loop) + (uint64_t)w->budget_ms * 1000000;
    st = client_relay_start(&w->relay, w->f, w->method, w->m, &err);
    if (st != FL_OK)
        client_sync_end(s, st, &err);
}

enum fl_status client_relay_wait(struct furlong *f, uint16_t method, bool again, uint32_t budget_ms,
                                 const struct ProtobufCMessage *m,
                                 enum fl_status (*take)(void *arg, const struct wire_msg *reply,
                                                        struct fl_err *err),
                                 void *arg, struct fl_err *err)
{
    struct relay_wait w = { .relay.again = again,
                            .f = f,
                            .method = method,
                            .budget_ms = budget_ms,
                            .m = m,
                            .take = take,
                            .arg = arg };

    return client_sync_run(f->loop, &w.sync, wait_begin, err);
}

/* ---- the daemon's own calls ----------------------------------------------------------------- */
static void serve_stop(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct furlong *f = ((struct client_line *)service)->f;
    Fl__WorkerStopping *pb = fl__worker_stopping__unpack(NULL, m->head.body_bytes, m->body);
    struct furlong_call *c = pb ? client_call_new(f, FURLONG_STOP, req) : NULL;
    struct fl_err err = { .status = FL_EXHAUSTED };

    if (c && pb->budget_ms)
        c->due_ns = fl_loop_now_ns(f->loop) + (uint64_t)pb->budget_ms * 1000000;
    if (!c || client_call_put(c, &err) != FL_OK)
        fl_warn("stop not handed on worker=%s why=%s", f->seat.name, err.text);
    if (pb)
        fl__worker_stopping__free_unpacked(pb, NULL);
}

static void serve_squeeze(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct furlong *f = ((struct client_line *)service)->f;
    Fl__Squeeze *pb = fl__squeeze__unpack(NULL, m->head.body_bytes, m->body);
    struct furlong_call *c = pb ? client_call_new(f, FURLONG_SQUEEZE, req) : NULL;
    struct fl_err err;
    enum fl_status st;

    if (c) {
        c->bare = true;
        c->ev.bytes = pb->bytes;
        st = client_call_put(c, &err);
    } else {
        st = fl_fail(&err, pb ? FL_EXHAUSTED : FL_CORRUPT, "%s: squeeze of %u bytes", f->seat.name,
                     m->head.body_bytes);
    }
    if (st != FL_OK && req)
        call_fail(req, &err);
    if (pb)
        fl__squeeze__free_unpacked(pb, NULL);
}

static void serve_members(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct furlong *f = ((struct client_line *)service)->f;

    (void)req;
    client_driver_members(f, m->body, m->head.body_bytes);
}

static const struct call_method uplink_methods[] = {
    { .method = FL_EV_STOP, .name = "stop", .serve = serve_stop },
    { .method = FL_EV_SQUEEZE, .name = "squeeze", .serve = serve_squeeze },
    { .method = FL_EV_MEMBERS, .name = "members", .serve = serve_members },
};

/* ---- the stream ----------------------------------------------------------------------------- */
static void joined_end(struct client_uplink *up, enum fl_status st, const struct fl_err *err)
{
    struct client_sync *s = up->joined;

    fl_timer_cancel(&up->late);
    up->joined = NULL;
    if (s)
        client_sync_end(s, st, err);
}

static void ready_answered(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                           const struct fl_err *err)
{
    struct client_uplink *up = container_of(op, struct client_uplink, ready);
    struct furlong *f = up->line.f;

    (void)reply;
    if (st == FL_UNREACHABLE || st == FL_CANCELLED)
        return; /* lost() has come or close() is under way */
    if (st != FL_OK) {
        inbox_close(&f->inbox, err);
        joined_end(up, st, err);
        return;
    }
    up->open = true;
    joined_end(up, FL_OK, NULL);
    for (struct client_relay *r = up->relays, *next; r; r = next) {
        next = r->next;
        if (!r->sent)
            relay_try(r);
    }
    client_driver_up(f);
    client_watch_up(f);
}

/* Until it is told the daemon gives us nothing to do: without memory for it now, a moment later. */
static void tell_ready(struct client_uplink *up)
{
    struct furlong *f = up->line.f;
    Fl__WorkerReady m = FL__WORKER_READY__INIT;
    uint8_t body[512];
    struct fl_err err;

    m.tcp = (char *)(uintptr_t)client_peers_tcp(f);
    m.unix_path = (char *)(uintptr_t)f->seat.peer_sock;
    m.pid = getpid();
    if (fl__worker_ready__get_packed_size(&m) > sizeof(body))
        return; /* paths of at most 107 bytes: cannot be */
    up->ready.done = ready_answered;
    if (call_start(up->call,
                   &(struct call_args){ .method = FL_WORKER_READY,
                                        .body = { body, fl__worker_ready__pack(&m, body) } },
                   &up->ready, &err) == FL_OK)
        return;
    fl_warn("daemon not told yet worker=%s why=%s", f->seat.name, err.text);
    fl_timer_arm_in(f->loop, &up->tell, TELL_AGAIN_MS);
}

static void uplink_tell(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    tell_ready(container_of(t, struct client_uplink, tell));
}

static void uplink_opened(void *service, const struct wire_hello *peer)
{
    struct client_uplink *up = service;

    (void)peer;
    fl_timer_cancel(&up->away);
    tell_ready(up);
}

static void uplink_lost(void *service, const struct fl_err *why)
{
    struct client_uplink *up = service;

    if (up->open)
        fl_warn("daemon away worker=%s limit_ms=%u why=%s", up->line.f->seat.name, up->away_ms,
                why ? why->text : "");
    up->open = false;
    fl_timer_cancel(&up->tell);
    if (!up->away.loop)
        fl_timer_arm_in(up->line.f->loop, &up->away, up->away_ms);
}

static void uplink_over(struct client_uplink *up, const struct fl_err *why)
{
    up->open = false;
    fl_timer_cancel(&up->tell);
    if (up->over.status == FL_OK)
        up->over = *why;
    inbox_close(&up->line.f->inbox, why);
    joined_end(up, why->status, why);
    while (up->relays) {
        struct client_relay *r = up->relays;

        r->due_ns = 1;
        r->again = false;
        if (r->sent)
            call_cancel(&r->op);
        else
            relay_over(r, why->status, NULL, why);
    }
}

static void uplink_closed(void *service, const struct fl_err *why)
{
    struct client_uplink *up = service;
    struct fl_err err = { 0 };

    if (why)
        err = *why;
    else
        fl_fail(&err, FL_UNREACHABLE, "the daemon hung up");
    if (err.status == FL_OK)
        err.status = FL_UNREACHABLE;
    fl_wrap(&err, err.status, "%s, its daemon at %.60s", up->line.f->seat.name,
            up->line.f->seat.daemon_sock);
    uplink_over(up, &err);
}

static void uplink_away(struct fl_timer *t, uint64_t now_ns)
{
    struct client_uplink *up = container_of(t, struct client_uplink, away);
    struct fl_err err;

    (void)now_ns;
    fl_fail(&err, FL_UNREACHABLE,
            "%s: the daemon was away for %u ms (FURLONG_DAEMON_AWAY_MS); leave now",
            up->line.f->seat.name, up->away_ms);
    uplink_over(up, &err);
}

static void uplink_late(struct fl_timer *t, uint64_t now_ns)
{
    struct client_uplink *up = container_of(t, struct client_uplink, late);
    struct fl_err err;

    (void)now_ns;
    fl_fail(&err, FL_UNREACHABLE, "%s: the daemon at %.80s did not answer within %d s",
            up->line.f->seat.name, up->line.f->seat.daemon_sock, CLIENT_JOIN_MS / 1000);
    joined_end(up, FL_UNREACHABLE, &err);
}

static const struct call_life uplink_life = { .opened = uplink_opened,
                                              .lost = uplink_lost,
                                              .closed = uplink_closed };

static uint32_t away_of_env(void)
{
    const char *text = getenv("FURLONG_DAEMON_AWAY_MS");
    int64_t ms;

    if (text && fl_parse_i64(text, 1, INT32_MAX, &ms, NULL) == FL_OK)
        return (uint32_t)ms;
    if (text)
        fl_warn("FURLONG_DAEMON_AWAY_MS passed over value=%.40s using=%d", text, CLIENT_AWAY_MS);
    return CLIENT_AWAY_MS;
}

enum fl_status client_uplink_open(struct furlong *f, struct client_sync *joined, struct fl_err *err)
{
    char target[160];
    struct fl_str text = FL_STR_ON(target);
    struct wire_hello me = client_hello(f);
    struct stream_to to = { .target = target,
                            .key = { f->seat.key, sizeof(f->seat.key) },
                            .again = true };
    struct client_uplink *up = calloc(1, sizeof(*up));
    struct stream *s;
    enum fl_status st;

    if (!up)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the way to the daemon");
    f->up = up;
    up->line.f = f;
    up->away_ms = away_of_env();
    up->away.fire = uplink_away;
    up->late.fire = uplink_late;
    up->tell.fire = uplink_tell;
    fl_str_add(&text, "unix:%s", f->seat.daemon_sock);
    FL_TRY(stream_connect(f->loop, &stream_sock, &to, &me, NULL, NULL, &s, err));
    st = FL_FAULT("client.uplink") ? fl_fail(err, FL_EXHAUSTED, "no memory for the daemon's calls")
                                   : call_peer_create(s, uplink_methods, FL_LEN(uplink_methods),
                                                      &uplink_life, up, &up->call, err);
    if (st != FL_OK) {
        stream_close(s, NULL);
        return st;
    }
    up->joined = joined;
    fl_timer_arm_in(f->loop, &up->late, CLIENT_JOIN_MS);
    return FL_OK;
}

void client_uplink_close(struct furlong *f)
{
    struct client_uplink *up = f->up;
    struct fl_err err;

    if (!up)
        return;
    fl_fail(&err, FL_CANCELLED, "%s leaves", f->seat.name);
    uplink_over(up, &err);
    fl_timer_cancel(&up->away);
    call_peer_destroy(up->call);
    free(up);
    f->up = NULL;
}

bool client_uplink_is_open(const struct furlong *f)
{
    return f->up && f->up->open;
}

enum fl_status client_uplink_event(struct furlong *f, uint16_t method, struct fl_bytes body)
{
    if (!client_uplink_is_open(f))
        return FL_UNREACHABLE;
    return call_event(f->up->call, method, 0, body, NULL);
}
