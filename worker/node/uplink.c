#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/addr.h"
#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/proto/methods.h"
#include "common/proto/pb.h"
#include "worker/node/disk.h"
#include "worker/node/holders.h"
#include "worker/node/inventory.h"
#include "worker/node/node_priv.h"
#include "worker/node/ports.h"
#include "worker/node/procs.h"
#include "worker/node/stats.h"

enum {
    CONNECT_MS = 5000,
    JOIN_MS = 15000,
    LEAVE_MS = 1000,
    BEAT_METRICS = 256, /* a beat */
    METRICS_MAX = 4096, /* kept */
    METRIC_NAME = 128
};

struct reading { /* the last value of one metric of one worker */
    struct {
        struct fl_seat_ref who;
        char name[METRIC_NAME];
    } key;
    double value;
    bool changed;
    UT_hash_handle hh;
};

enum up_state {
    UP_WAITING, /* for the next attempt          */
    UP_LOOKING, /* for the way to the head       */
    UP_CONNECTING,
    UP_JOINING,
    UP_JOINED,
    UP_PURGING, /* fenced: ends everything first */
    UP_LEFT
};

struct uplink {
    struct node_stats_past past;
    struct node_procs procs;
    struct node *node;
    enum up_state state;
    struct call_peer *peer;
    bool ever, away_said;
    uint32_t back_ms;
    struct fl_timer again, beat, wait, orphan;
    struct fl_err last; /* why it is not joined */
    struct call_op join, leave;
    uint32_t beat_ms;
    uint64_t seq;
    struct reading *readings;
    void (*left)(struct node *n);
    struct fl_work look; /* own address: a name is looked up */
    struct stream_server *door; /* where the head dials back while a join is under way */
    bool keyed;                 /* the head asks for the token, and is asked for it */
    struct fl_addr found;
    struct fl_err look_err;
    bool looking, dead; /* dead: destroyed while the pool still looks */
    char head[256], build[48]; /* build: of a head that is of another release than this daemon */
};

static void connect_now(struct uplink *u);
static bool address_is_certified(struct uplink *u);

bool node_uplink_joined(const struct uplink *u)
{
    return u && u->state == UP_JOINED;
}

/* ---- away and back ---- */

static void hang_up(struct uplink *u)
{
    struct call_peer *peer = FL_TAKE(u->peer);

    stream_server_destroy(FL_TAKE(u->door));
    fl_timer_cancel(&u->beat);
    call_peer_destroy(peer); /* calls in flight come back: nobody may start new ones from there */
    node_serve_drop(u->node);
}

/* For good as far as a first start is concerned: the same again would fail the same way. */
static bool hopeless(enum fl_status st)
{
    return st == FL_DENIED || st == FL_INVALID || st == FL_EXISTS || st == FL_UNSUPPORTED;
}

static void come_back(struct uplink *u, const struct fl_err *why)
{
    struct node *n = u->node;

    if (u->state == UP_LEFT)
        return;
    u->state = UP_WAITING;
    node_away(n);
    u->last = *why;
    hang_up(u);
    if (!u->ever && hopeless(why->status)) {
        if (why->status == FL_UNSUPPORTED)
            (void)fl_wrap(&u->last, why->status, "node %s cannot join", n->name);
        node_fail(n, &u->last);
        return;
    }
    if (!u->away_said)
        fl_warn("head is away address=%s why=\"%s\"", n->cfg.address, why->text);
    u->away_said = true;
    if (u->ever && n->cfg.orphan_s && !u->orphan.loop)
        fl_timer_arm_in(n->loop, &u->orphan, (uint64_t)n->cfg.orphan_s * 1000);
    u->back_ms = u->back_ms ? u->back_ms * 2 : NODE_BACKOFF_MIN_MS;
    if (u->back_ms > NODE_BACKOFF_MAX_MS)
        u->back_ms = NODE_BACKOFF_MAX_MS;
    fl_timer_arm_in(n->loop, &u->again, u->back_ms);
}

static void on_again(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    connect_now(container_of(t, struct uplink, again));
}

static void on_wait(struct fl_timer *t, uint64_t now_ns)
{
    struct uplink *u = container_of(t, struct uplink, wait);
    struct fl_err err;

    (void)now_ns;
    if (u->node->workers) /* adopted: they need no head, and a head may come back */
        return;
    fl_fail(&err, FL_UNREACHABLE, "no head at %.80s within %lld s: %s", u->node->cfg.address,
            (long long)u->node->cfg.wait_s, u->last.status ? u->last.text : "nobody answers");
    node_fail(u->node, &err);
}

static void on_orphan(struct fl_timer *t, uint64_t now_ns)
{
    struct uplink *u = container_of(t, struct uplink, orphan);
    char why[128];

    (void)now_ns;
    snprintf(why, sizeof(why), "there was no head for %lld s (--orphan-timeout)",
             (long long)u->node->cfg.orphan_s);
    node_stop(u->node, why, NODE_TERM_MS);
}

/* ---- join ---- */

static void beat(struct uplink *u)
{
    Fl__Beat m = FL__BEAT__INIT;
    Fl__WorkerMetric metrics[BEAT_METRICS], *list[BEAT_METRICS];
    Fl__SeatRef who[BEAT_METRICS];
    Fl__NodeStats stats;
    struct fl_err err;

    m.seq = ++u->seq;
    m.has_memory_available = m.has_load_e2 = true;
    m.memory_available = node_memory_available();
    m.load_e2 = node_load_e2();
    node_stats_read(&u->past, &stats);
    node_disk_fill(u->node->disk, fl_loop_now_ns(u->node->loop), &stats);
    m.stats = &stats;
    node_procs_add(&u->procs, u->node, &m);
    m.metrics = list;
    for (struct reading *r = u->readings; r && m.n_metrics < BEAT_METRICS; r = r->hh.next) {
        size_t i = m.n_metrics;

        if (!r->changed)
            continue;
        r->changed = false;
        who[i] = (Fl__SeatRef)FL__SEAT_REF__INIT;
        who[i].worker = (ProtobufCBinaryData){ sizeof(r->key.who.id), (uint8_t *)&r->key.who.id };
        who[i].attempt = r->key.who.attempt;
        metrics[i] = (Fl__WorkerMetric)FL__WORKER_METRIC__INIT;
        metrics[i].who = &who[i];
        metrics[i].name = r->key.name;
        metrics[i].value = r->value;
        list[m.n_metrics++] = &metrics[i];
    }
    node_holders_fill(u->node->holders, &m);
    struct fl_bytes b = node_pack(&m.base);

    if (b.data && !FL_FAULT("node.beat") &&
        call_event(u->peer, FL_NODE_BEAT, LANE_CONTROL, b, &err) != FL_OK)
        fl_debug("beat not sent why=\"%s\"", err.text);
    free((void *)(uintptr_t)b.data);
}

static void on_beat(struct fl_timer *t, uint64_t now_ns)
{
    struct uplink *u = container_of(t, struct uplink, beat);

    beat(u);
    node_holders_look(u->node->holders);
    node_disk_look(u->node->disk, now_ns);
    node_ports_settle(u->node); /* of leases that ran out, and of workers that could not start */
    fl_timer_arm(u->node->loop, t, now_ns + u->beat_ms * 1000000ull);
}

static void purge(struct uplink *u, const char *why)
{
    fl_warn("ends what it ran why=\"%s\"", why);
    u->state = UP_PURGING;
    hang_up(u);
    node_fenced(u->node); /* comes back by node_uplink_purged(), at once when nothing runs */
}

void node_uplink_fenced(struct uplink *u, const char *why)
{
    if (u->state == UP_JOINED)
        purge(u, why);
}

void node_uplink_purged(struct uplink *u)
{
    struct fl_err err;

    if (u->state != UP_PURGING)
        return;
    if (node_ident_restart(&u->node->ident, &err) != FL_OK) {
        come_back(u, &err); /* it hears the same once more */
        return;
    }
    u->back_ms = 0;
    connect_now(u);
}

static void obey(struct uplink *u, const Fl__JoinReply *r)
{
    struct node *n = u->node;

    for (size_t i = 0; i < r->n_end_workers; i++) {
        struct fl_seat_ref who = { .attempt = r->end_workers[i]->attempt };
        struct worker *w = NULL;

        if (r->end_workers[i]->worker.len == sizeof(who.id)) {
            memcpy(&who.id, r->end_workers[i]->worker.data, sizeof(who.id));
            w = worker_find(n, &who);
        }
        if (w)
            worker_stop(w, PROC_STOPPED, "the head does not want it any more", NODE_TERM_MS);
    }
    for (size_t i = 0; i < r->n_end_leases; i++)
        node_leases_release(n->leases, r->end_leases[i]);
    node_leases_sweep(n->leases);
    node_ports_settle(n);
}

static void joined(struct uplink *u, const Fl__JoinReply *r)
{
    struct node *n = u->node;

    u->state = UP_JOINED;
    u->back_ms = 0;
    u->beat_ms = r->beat_ms ? r->beat_ms : 1000;
    fl_timer_cancel(&u->wait);
    fl_timer_cancel(&u->orphan);
    fl_metric_add(n->count[NODE_JOINS], 1);
    fl_info("joined head=%s cluster=%02x%02x%02x%02x term=%llu start=%llu beat_ms=%u silent_ms=%u",
            n->cfg.address, n->ident.highest.cluster[0], n->ident.highest.cluster[1],
            n->ident.highest.cluster[2], n->ident.highest.cluster[3],
            (unsigned long long)n->ident.highest.head, (unsigned long long)n->ident.me.start,
            u->beat_ms, r->silent_ms);
    u->away_said = false;
    for (struct reading *k = u->readings; k; k = k->hh.next)
        k->changed = true; /* this head may be a new one */
    node_holders_anew(u->node->holders);
    fl_timer_arm_in(n->loop, &u->beat, u->beat_ms);
    obey(u, r);
    if (!u->ever) {
        u->ever = true;
        node_joined(n);
    }
    for (struct worker *w = n->workers, *next; w; w = next) {
        next = w->hh.next;
        node_follow_kick(w);
        worker_tell(w);
    }
}

static void on_join(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                    const struct fl_err *err)
{
    struct uplink *u = container_of(op, struct uplink, join);
    Fl__JoinReply *r = NULL;
    struct fl_err bad;

    stream_server_destroy(FL_TAKE(u->door));
    if (u->state != UP_JOINING)
        return; /* on_closed goes on, or it is over */
    if (st == FL_OK &&
        !(r = pb_unpack(&fl__join_reply__descriptor, reply->body, reply->head.body_bytes, &bad)))
        err = &bad;
    if (!r) {
        struct fl_err why = *err;

        come_back(u, &why);
        return;
    }
    if (r->fenced)
        purge(u, "this node was silent for too long and was fenced");
    else
        joined(u, r);
    fl__join_reply__free_unpacked(r, NULL);
}

/* Whoever proves the key and hears who answers has all it came for. */
static void dialled_back(void *arg, struct stream *s)
{
    (void)arg;
    stream_close(s, NULL);
}

/* For the head to prove this node's address. One that lies on loopback needs no proof. 0: it
 * listens nowhere. */
static enum fl_status open_door(struct uplink *u, uint32_t *port, struct fl_err *err)
{
    struct node *n = u->node;
    struct wire_hello me = { .role = "node", .node = n->ident.me };
    char target[sizeof(n->addr.text) + 8];
    struct stream_to at = { .target = target,
                            .key_path = u->keyed ? n->token_path : NULL,
                            .tls = n->cfg.tls };

    *port = 0;
    if (n->addr.loopback || (!u->keyed && !n->cfg.tls))
        return FL_OK;
    snprintf(me.build, sizeof(me.build), "%s", FURLONG_VERSION);
    snprintf(target, sizeof(target), strchr(n->addr.text, ':') ? "[%s]:0" : "%s:0", n->addr.text);
    stream_server_destroy(FL_TAKE(u->door));
    FL_TRY(stream_listen(n->loop, &stream_sock, &at, &me, dialled_back, u, &u->door, err));
    *port = (uint32_t)strtoul(strrchr(stream_server_at(u->door), ':') + 1, NULL, 10);
    return FL_OK;
}

static enum fl_status send_join(struct uplink *u, struct fl_err *err)
{
    struct node *n = u->node;
    Fl__JoinRequest m = FL__JOIN_REQUEST__INIT;
    Fl__Term highest = FL__TERM__INIT;
    size_t count = HASH_COUNT(n->workers), i = 0;
    struct worker_msg *msgs = calloc(count + 1, sizeof(*msgs));
    Fl__WorkerState **list = calloc(count + 1, sizeof(*list));
    enum fl_status st;

    highest.cluster =
        (ProtobufCBinaryData){ sizeof(n->ident.highest.cluster), n->ident.highest.cluster };
    highest.head = n->ident.highest.head;
    m.name = n->name;
    m.address = n->addr.text;
    m.boot_id = n->boot_id;
    m.inventory = n->inventory;
    m.leases = (Fl__Lease **)(uintptr_t)node_leases_list(n->leases, &m.n_leases);
    for (struct worker *w = n->workers; msgs && list && w; w = w->hh.next, i++) {
        worker_msg_make(w, &msgs[i]);
        list[i] = &msgs[i].state;
        w->dirty |= w->gone; /* an end is told by itself until that is acknowledged */
    }
    m.workers = list;
    m.n_workers = i;
    m.highest = &highest;
    m.runtime_dir = n->dir;
    st = open_door(u, &m.dial_port, err);
    m.has_dial_port = m.dial_port != 0;
    if (st != FL_OK) {
        free(msgs);
        free(list);
        return st;
    }
    struct fl_bytes b = msgs && list ? node_pack(&m.base) : (struct fl_bytes){ 0 };
    struct call_args a = { .method = FL_NODE_JOIN,
                           .lane = LANE_CONTROL,
                           .due_ns = fl_loop_now_ns(n->loop) + JOIN_MS * 1000000ull,
                           .body = b };

    u->join.done = on_join;
    st = b.data ? call_start(u->peer, &a, &u->join, err)
                : fl_fail(err, FL_EXHAUSTED, "no memory to join");
    free((void *)(uintptr_t)b.data);
    free(msgs);
    free(list);
    return st;
}

/* ---- the stream ---- */

/* The head's term against the highest ever heard. false: not this head, not now. */
static bool take_term(struct uplink *u, const struct fl_term *term)
{
    struct node *n = u->node;
    static const struct fl_term none;
    bool known = memcmp(n->ident.highest.cluster, none.cluster, sizeof(none.cluster)) != 0;
    struct fl_err err;

    if (fl_term_older(term, &n->ident.highest)) {
        fl_fail(&err, FL_STALE,
                "the head at %.80s has term %llu and this daemon has seen %llu: its journal is "
                "older than the cluster",
                n->cfg.address, (unsigned long long)term->head,
                (unsigned long long)n->ident.highest.head);
        call_peer_close(u->peer, &err);
        come_back(u, &err);
        return false;
    }
    if (known && memcmp(term->cluster, n->ident.highest.cluster, sizeof(term->cluster)) &&
        (n->workers || node_leases_count(n->leases))) {
        purge(u, "the head belongs to another cluster than what runs here");
        return false;
    }
    if (node_ident_heard(&n->ident, term, &err) != FL_OK) {
        come_back(u, &err);
        return false;
    }
    return true;
}

/* The protocol decides who may join; which release it is of is said, once a head. */
static void note_release(struct uplink *u, const struct wire_hello *peer)
{
    const struct node *n = u->node;

    if (!peer->build[0] || strcmp(peer->build, FURLONG_VERSION) == 0 ||
        strcmp(peer->build, u->build) == 0)
        return;
    (void)FL_COPY(u->build, peer->build);
    fl_info("head is of another release head=%s own=%s", peer->build, FURLONG_VERSION);
    json_array_append_new(
        n->cfg.notes,
        json_sprintf("versions: the head at %s is of release %s and this daemon of %s; both speak "
                     "protocol %u, so it joins",
                     n->cfg.address, peer->build, FURLONG_VERSION, peer->major));
}

static void on_opened(void *service, const struct wire_hello *peer)
{
    struct uplink *u = ((struct node *)service)->up;
    struct fl_err err;

    if (u->state != UP_CONNECTING || !take_term(u, &peer->term))
        return;
    note_release(u, peer);
    u->state = UP_JOINING;
    if (send_join(u, &err) != FL_OK)
        come_back(u, &err);
}

static void on_closed(void *service, const struct fl_err *why)
{
    struct uplink *u = ((struct node *)service)->up;
    struct fl_err copy = *why;

    come_back(u, &copy);
}

static void on_ready(void *service)
{
    struct node *n = service;

    for (struct worker *w = n->workers, *next; w; w = next) {
        next = w->hh.next;
        node_follow_kick(w);
    }
}
static const struct call_life life = { .opened = on_opened,
                                       .closed = on_closed,
                                       .ready = on_ready };

static void dial(struct uplink *u)
{
    struct node *n = u->node;
    struct wire_hello me = { .role = "node", .node = n->ident.me, .term = n->ident.highest };
    struct stream_to to = { .target = n->cfg.address, .connect_ms = CONNECT_MS, .tls = n->cfg.tls };
    struct stream *s;
    struct fl_err err;

    u->state = UP_CONNECTING;
    snprintf(me.build, sizeof(me.build), "%s", FURLONG_VERSION);
    /* A head on loopback asks its daemons for no token, and takes one that it did not ask for
     * amiss. */
    u->keyed = !fl_addr_is_loopback(n->cfg.address) && access(n->token_path, R_OK) == 0;
    to.key_path = u->keyed ? n->token_path : NULL;
    enum fl_status st = FL_FAULT("node.connect") ? fl_fail_errno(&err, "connect to the head")
                                                 : stream_connect(n->loop, n->cfg.carrier, &to, &me,
                                                                  NULL, NULL, &s, &err);

    if (st == FL_OK) {
        st =
            call_peer_create(s, node_serve_methods, node_serve_n_methods, &life, n, &u->peer, &err);
        if (st != FL_OK)
            stream_close(s, &err);
    }
    if (st != FL_OK)
        come_back(u, &err);
}

/* ---- own address ---- */

static void look_work(struct fl_work *w)
{
    struct uplink *u = container_of(w, struct uplink, look);

    u->look_err.status = node_addr_find(NULL, u->head, &u->found, &u->look_err);
}

static void look_done(struct fl_work *w, enum fl_status st)
{
    struct uplink *u = container_of(w, struct uplink, look);
    struct node *n = u->node;
    struct fl_err err;

    u->looking = false;
    if (u->dead) {
        free(u);
        return;
    }
    if (st != FL_OK)
        fl_fail(&u->look_err, st, "no thread to look for the way to the head");
    if (st == FL_OK)
        st = u->look_err.status;
    if (st == FL_OK)
        st = node_inventory_at(n->inventory, u->found.text, &u->look_err);
    if (u->state != UP_LOOKING)
        return;
    if (st != FL_OK) {
        err = u->look_err;
        if (st == FL_INVALID && strncmp(err.text, "--address", 9))
            err.status = FL_UNREACHABLE; /* a name that is not there yet may come */
        come_back(u, &err);
        return;
    }
    n->addr = u->found;
    fl_info("own address=%s interface=%s: %s", n->addr.text, n->addr.iface, n->addr.why);
    if (address_is_certified(u))
        dial(u);
}

/* Others dial this node's workers at its address, and look for it in the certificate. */
static bool address_is_certified(struct uplink *u)
{
    struct node *n = u->node;
    struct fl_err err;

    if (!n->cfg.tls || n->addr.loopback || tls_id_names(n->cfg.tls, n->addr.text, &err) == FL_OK)
        return true;
    come_back(u, &err);
    return false;
}

static void connect_now(struct uplink *u)
{
    if (u->node->strays) { /* node_uplink_may() comes */
        u->state = UP_WAITING;
        return;
    }
    if (u->node->addr.text[0]) {
        if (address_is_certified(u))
            dial(u);
        return;
    }
    u->state = UP_LOOKING;
    u->look.work = look_work;
    u->look.done = look_done;
    u->looking = true;
    fl_work_start(u->node->loop, &u->look);
}

void node_uplink_may(struct uplink *u)
{
    if (u && u->state == UP_WAITING && !u->again.loop)
        connect_now(u);
}

/* ---- face ---- */

enum fl_status node_uplink_create(struct node *n, struct uplink **out, struct fl_err *err)
{
    struct uplink *u = calloc(1, sizeof(*u));

    if (!u)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the way to the head");
    u->node = n;
    u->again.fire = on_again;
    u->beat.fire = on_beat;
    u->wait.fire = on_wait;
    u->orphan.fire = on_orphan;
    (void)FL_COPY(u->head, n->cfg.address);
    *out = u;
    fl_timer_arm_in(n->loop, &u->wait, (uint64_t)n->cfg.wait_s * 1000);
    fl_timer_arm_in(n->loop, &u->again,
                    0); /* from the loop: everything of the node is there then */
    return FL_OK;
}

void node_uplink_destroy(struct uplink *u)
{
    struct reading *r, *tmp;

    if (!u)
        return;
    u->state = UP_LEFT;
    hang_up(u);
    fl_timer_cancel(&u->again);
    fl_timer_cancel(&u->wait);
    fl_timer_cancel(&u->orphan);
    HASH_ITER (hh, u->readings, r, tmp) {
        HASH_DEL(u->readings, r);
        free(r);
    }
    u->dead = true;
    if (!u->looking)
        free(u);
}

enum fl_status node_uplink_call(struct uplink *u, uint16_t method, uint32_t lane, uint64_t due_ns,
                                const ProtobufCMessage *m, struct call_op *op, struct fl_err *err)
{
    struct fl_bytes b;
    enum fl_status st;

    if (!node_uplink_joined(u))
        return fl_fail(err, FL_UNREACHABLE, "the head is away");
    b = node_pack(m);
    if (!b.data)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a message to the head");
    struct call_args a = { .method = method, .lane = lane, .due_ns = due_ns, .body = b };

    st = call_start(u->peer, &a, op, err);
    free((void *)(uintptr_t)b.data);
    return st;
}

void node_uplink_metric(struct uplink *u, const struct fl_seat_ref *who, const char *name,
                        double value)
{
    struct reading key = { 0 }, *r;

    key.key.who = *who;
    if (!FL_COPY(key.key.name, name))
        return; /* longer than any that is known */
    HASH_FIND(hh, u->readings, &key.key, sizeof(key.key), r);
    if (!r) {
        r = HASH_COUNT(u->readings) < METRICS_MAX ? calloc(1, sizeof(*r)) : NULL;
        if (!r)
            return;
        r->key = key.key;
        HASH_ADD(hh, u->readings, key, sizeof(r->key), r);
        if (!r->hh.tbl) {
            free(r);
            return;
        }
    }
    r->changed = true;
    r->value = value;
}

void node_uplink_forget_metrics(struct uplink *u, const struct fl_seat_ref *who)
{
    struct reading *r, *tmp;

    HASH_ITER (hh, u->readings, r, tmp) {
        if (!fl_seat_ref_same(&r->key.who, who))
            continue;
        HASH_DEL(u->readings, r);
        free(r);
    }
}

static void on_leave(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                     const struct fl_err *err)
{
    struct uplink *u = container_of(op, struct uplink, leave);
    struct node *n = u->node;

    (void)reply;
    if (st != FL_OK)
        fl_debug("leaving was not acknowledged why=\"%s\"", err ? err->text : "");
    if (u->left)
        FL_TAKE(u->left)(n);
}

void node_uplink_leave(struct uplink *u, const char *why, void (*left)(struct node *n))
{
    Fl__Shutdown m = FL__SHUTDOWN__INIT;

    m.why = (char *)(uintptr_t)why;
    u->left = left;
    u->leave.done = on_leave;
    if (node_uplink_call(u, FL_NODE_LEAVE, LANE_CONTROL,
                         fl_loop_now_ns(u->node->loop) + LEAVE_MS * 1000000ull, &m.base, &u->leave,
                         NULL) != FL_OK)
        FL_TAKE(u->left)(u->node);
}
