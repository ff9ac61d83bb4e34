#include <stdlib.h>

#include "common/base/log.h"
#include "common/proto/pb.h"
#include "head/packages.h"
#include "head/state.h"

struct uplink {
    struct uplink *prev, *next;
    struct head *head;
    struct call_peer *peer;
    struct fl_node_ref who;
    struct node *node; /* once it has joined on this stream */
    uint64_t seen;     /* highest term of ours that the daemon knew when it came */
    bool open;
};

/* ---- answering ---- */

void reply_empty(struct call_req *req)
{
    if (req)
        call_reply(req, (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
}

void reply_msg(struct call_req *req, const void *msg)
{
    struct fl_str buf = FL_STR_HEAP(WIRE_MAX_BODY);

    call_reply(req, pack_msg(msg, &buf), (struct fl_bytes){ 0 });
    fl_str_fini(&buf);
}

void reply_refuse(struct call_req *req, enum fl_status st, const char *fmt, ...)
{
    struct fl_err err;
    char text[sizeof(err.text)];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    fl_fail(&err, st, "%s", text);
    if (req)
        call_fail(req, &err);
}

/* ---- what a daemon says ---- */

/* The decoded body, or the request is refused. */
static void *decode(struct call_req *req, const struct wire_msg *m,
                    const ProtobufCMessageDescriptor *d)
{
    void *msg = pb_unpack(d, m->body, m->head.body_bytes, NULL);

    if (!msg)
        reply_refuse(req, FL_CORRUPT, "a %s of %u bytes cannot be decoded", d->short_name,
                     m->head.body_bytes);
    return msg;
}

static bool joined(struct uplink *u, struct call_req *req)
{
    if (u->node)
        return true;
    reply_refuse(req, FL_STALE, "this daemon has not joined on this connection");
    return false;
}

static void alive(struct uplink *u)
{
    u->node->beat_ns = fl_loop_now_ns(u->head->loop);
    node_event(u->node, NODE_EV_BEAT);
}

static void on_join(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct uplink *u = service;
    Fl__JoinRequest *join = req ? decode(req, m, &fl__join_request__descriptor) : NULL;

    if (join)
        join_serve(u, req, join);
    free_msg(join);
}

static void on_beat(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct uplink *u = service;
    Fl__Beat *beat = u->node ? decode(NULL, m, &fl__beat__descriptor) : NULL;

    reply_empty(req);
    if (!beat)
        return;
    u->node->memory_available = beat->memory_available;
    u->node->load_e2 = beat->load_e2;
    for (size_t i = 0; i < beat->n_metrics; i++) {
        const Fl__WorkerMetric *m1 = beat->metrics[i];
        struct seat *s = seat_of(u->head, &m1->who->worker);

        if (s && s->rec->who->attempt == m1->who->attempt)
            reading_take(s, m1->name, m1->value);
    }
    uses_take(u->node, beat);
    slowed_take(u->node, beat);
    if (beat->stats) {
        free_msg(u->node->stats);
        u->node->stats = copy_msg(beat->stats);
    }
    fl_metric_add(u->head->count.beats, 1);
    alive(u);
    if (beat->procs_told) { /* kept whole: it is read once a scrape */
        struct node *n = u->node;
        Fl__Beat *old = n->procs;

        n->procs = beat;
        beat = old;
    }
    free_msg(beat);
}

static void on_worker(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct uplink *u = service;
    Fl__WorkerState *w;

    if (!req || !joined(u, req) || !(w = decode(req, m, &fl__worker_state__descriptor)))
        return;
    alive(u);
    worker_changed(u->head, u->node, w, req);
    free_msg(w);
}

static void on_log(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct uplink *u = service;
    Fl__LogPushed done = FL__LOG_PUSHED__INIT;
    Fl__LogPush *push;
    struct fl_err err = { 0 };

    if (!req || !joined(u, req) || !(push = decode(req, m, &fl__log_push__descriptor)))
        return;
    struct job *j = job_of(u->head, &push->job);
    enum fl_status st = FL_OK;
    done.has_next = true;
    done.next = push->has_end ? push->end : push->offset + push->data.len;
    if (j) /* of a job that nobody knows any more: taken, and dropped */
        st = joblog_push(j, push, u->node->rec->name, &done.next, &err);
    if (st == FL_OK)
        reply_msg(req, &done);
    else
        call_fail(req, &err);
    free_msg(push);
}

static void on_relay(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct uplink *u = service;
    Fl__Relay *relay;

    if (!req || !joined(u, req) || !(relay = decode(req, m, &fl__relay__descriptor)))
        return;
    relay_serve(u, req, relay);
    free_msg(relay);
}

static void on_package(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct uplink *u = service;
    Fl__PackageRead *ask;

    if (!req || !joined(u, req) || !(ask = decode(req, m, &fl__package_read__descriptor)))
        return;
    packages_serve(u->head->packages, req, ask);
    free_msg(ask);
}

static void left(struct after *a, enum fl_status st, const struct fl_err *err)
{
    if (st == FL_OK)
        reply_empty(a->req);
    else
        call_fail(a->req, err);
    free(a);
}

static void on_leave(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct uplink *u = service;
    Fl__Shutdown *bye;
    struct fl_err err;

    if (!req || !joined(u, req) || !(bye = decode(req, m, &fl__shutdown__descriptor)))
        return;
    struct node *n = u->node;
    Fl__NodeRec rec = *n->rec;
    struct after *a = after_new(u->head, left);

    a->req = req;
    rec.has_fate = true;
    rec.fate = FL__NODE_FATE__NODE_LEFT;
    rec.why = "left the cluster";
    if (head_record(u->head, REC_NODE, &rec, a, &err) == FL_OK)
        node_event(n, NODE_EV_LEFT);
    else
        call_fail(req, &err);
    free_msg(bye);
}

static const struct call_method methods[] = {
    { FL_NODE_JOIN, "node_join", on_join },
    { FL_NODE_BEAT, "node_beat", on_beat },
    { FL_WORKER_CHANGED, "worker_changed", on_worker },
    { FL_LOG_PUSH, "log_push", on_log },
    { FL_RELAY, "relay", on_relay },
    { FL_PACKAGE_READ, "package_read", on_package },
    { FL_NODE_LEAVE, "node_leave", on_leave },
};

/* ---- the life of a stream ---- */

static struct heard *heard_of(struct head *h, const struct fl_node_id *id)
{
    struct heard *w;

    HASH_FIND(hh, h->heard, id, sizeof(*id), w);
    return w;
}

/* Before the daemon is told this head's term, so that none can know it that is not listed here. */
enum fl_status head_admit(void *head, const struct wire_hello *peer, struct fl_err *err)
{
    struct head *h = head;
    struct heard *w = heard_of(h, &peer->node.id);

    if (strcmp(peer->role, "node") != 0)
        return fl_fail(err, FL_DENIED, "a %.15s speaks to the head as if it were a daemon",
                       peer->role[0] ? peer->role : "nobody");
    if (w)
        return FL_OK;
    w = must(calloc(1, sizeof(*w)));
    w->id = peer->node.id;
    w->stranger = FL_SAME(peer->term.cluster, h->term.cluster) && peer->term.head == h->term.head;
    HASH_ADD(hh, h->heard, id, sizeof(w->id), w);
    must(w->hh.tbl);
    return FL_OK;
}

/* One that comes again and again, as daemons do, is said once a minute. Who hung up was refused nothing. */
void head_refused(void *head, const struct fl_err *why)
{
    enum { AGAIN_S = 60 };
    struct head *h = head;
    uint64_t now_ns = fl_loop_now_ns(h->loop);

    if (why->status == FL_UNREACHABLE || why->status == FL_CANCELLED)
        return;
    if (h->refused.status == why->status && now_ns - h->refused.ns < AGAIN_S * 1000000000ull) {
        h->refused.unsaid++;
        return;
    }
    fl_warn("somebody is not let in why=\"%s\" unsaid_before=%u", why->text, h->refused.unsaid);
    h->refused.ns = now_ns;
    h->refused.status = why->status;
    h->refused.unsaid = 0;
}

static void raised(struct after *a, enum fl_status st, const struct fl_err *err)
{
    struct head *h = a->head;

    h->raising = false;
    if (st != FL_OK)
        fl_error("term cannot be raised why=\"%s\"", err->text);
    else if (h->term_changed)
        h->term_changed(h->term_arg, &h->term);
    free(a);
}

/* Daemons have seen a later head than this journal knows of, or hold what it should know. Terms
 * from `from` on are those whose promises may be missing. */
static void journal_is_older(struct head *h, uint64_t seen, uint64_t from, const char *who)
{
    Fl__HeadRec rec = FL__HEAD_REC__INIT;
    struct fl_err err;

    fl_warn(
        "this journal is older than the cluster: its term is %llu, a daemon has seen %llu; what "
        "runs and is not in it is shown as unknown and left alone node=%s",
        (unsigned long long)h->term.head, (unsigned long long)seen, who);
    rec.has_foreign_from = rec.has_foreign_to = true;
    rec.foreign_from = h->foreign_to && h->foreign_from < from ? h->foreign_from : from;
    rec.foreign_to = (seen > h->term.head ? seen : h->term.head) + 1;
    h->raising = true;
    if (head_record(h, REC_HEAD, &rec, NULL, &err) != FL_OK ||
        journal_raise_term(h->journal, seen, &h->term, &after_new(h, raised)->op, &err) != FL_OK)
        h->raising = false; /* it comes back and this is tried again */
    if (h->state != HEAD_RECOVERING)
        jobs_after_older(h);
}

void uplink_older(struct uplink *u, uint64_t from)
{
    char id[FL_SHORT];

    if (!u->head->raising)
        journal_is_older(u->head, u->seen, from, fl_short(id, &u->who.id));
    uplink_close(u, FL_STALE, "this head takes a later term; come back");
}

static void on_opened(void *service, const struct wire_hello *peer)
{
    struct uplink *u = service;
    struct head *h = u->head;
    bool ours = FL_SAME(peer->term.cluster, h->term.cluster);

    u->open = true;
    u->who = peer->node;
    struct heard *w = heard_of(h, &peer->node.id);
    bool other = ours && (peer->term.head > h->term.head || (w && w->stranger));

    if (w)
        w->stranger = false;
    u->seen = ours ? peer->term.head : 0;
    if (other || h->raising)
        uplink_older(u, h->first_term);
}

static void uplink_free(struct uplink *u)
{
    DL_DELETE(u->head->uplinks, u);
    if (u->node && u->node->up == u)
        u->node->up = NULL;
    call_peer_destroy(u->peer);
    free(u);
}

static void on_closed(void *service, const struct fl_err *why)
{
    struct uplink *u = service;
    struct head *h = u->head;
    struct node *n = u->node && u->node->up == u ? u->node : NULL;
    struct seat *s, *tmp;

    if (n) {
        fl_info("daemon's stream ended node=%s why=\"%s\"", n->rec->name, why ? why->text : "");
        HASH_ITER (hh, h->seats, s, tmp)
            if (s->rec->at && same_bytes(&s->rec->at->id, &n->rec->who->id))
                seat_unplug(s);
        n->up = NULL;
        node_event(n, NODE_EV_CUT);
    }
    uplink_free(u);
    head_kick(h);
}

static void on_ready(void *service)
{
    head_kick(((struct uplink *)service)->head);
}

static const struct call_life life = { .opened = on_opened,
                                       .closed = on_closed,
                                       .ready = on_ready };

void head_accept(void *arg, struct stream *s_take)
{
    struct head *h = arg;
    struct uplink *u = must(calloc(1, sizeof(*u)));
    struct fl_err err;

    u->head = h;
    if (call_peer_create(s_take, methods, FL_LEN(methods), &life, u, &u->peer, &err) != FL_OK) {
        fl_warn("daemon cannot be served why=\"%s\"", err.text);
        stream_close(s_take, &err);
        free(u);
        return;
    }
    DL_APPEND(h->uplinks, u);
}

void uplink_close(struct uplink *u, enum fl_status st, const char *why)
{
    struct fl_err err;

    fl_fail(&err, st, "%s", why);
    call_peer_close(u->peer, &err);
}

void uplinks_destroy(struct head *h)
{
    while (h->uplinks)
        uplink_free(h->uplinks);
}

struct fl_node_ref uplink_who(const struct uplink *u)
{
    return u->who;
}

const char *uplink_from(const struct uplink *u)
{
    struct stream *s = call_peer_stream(u->peer);

    return s ? stream_name(s) : "";
}

struct uplink *uplink_find(const struct head *h, const struct uplink *was, const struct fl_node_ref *who)
{
    struct uplink *u;

    DL_FOREACH(h->uplinks, u)
        if (u == was && FL_SAME(u->who.id, who->id) && u->who.start == who->start)
            return u;
    return NULL;
}

/* The stream is that of the node from now on; an older one of the same daemon is closed. */
void uplink_join(struct uplink *u, struct node *n)
{
    if (n->up && n->up != u) {
        struct uplink *old = n->up;

        old->node = NULL;
        uplink_close(old, FL_STALE, "the same daemon has joined on another connection");
    }
    u->node = n;
    n->up = u;
}

struct head *uplink_head(const struct uplink *u)
{
    return u->head;
}

/* ---- calls to a daemon ---- */

static void sent(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                 const struct fl_err *err)
{
    struct send *s = container_of(op, struct send, op);

    s->done(s, st, reply, err);
    free(s);
}

enum fl_status node_send(struct node *n, uint16_t method, const void *msg, uint32_t budget_ms,
                         const struct send *want, struct fl_err *err)
{
    struct fl_str buf = FL_STR_HEAP(WIRE_MAX_BODY);
    enum fl_status st;

    if (!n || !n->up || !n->up->open)
        return fl_fail(err, FL_UNREACHABLE, "node %s is not connected", n ? n->rec->name : "?");
    struct send *s = must(malloc(sizeof(*s)));
    *s = *want;
    s->head = n->head;
    s->op = (struct call_op){ .done = sent };
    struct call_args args = { .method = method,
                              .body = pack_msg(msg, &buf),
                              .due_ns = fl_loop_now_ns(n->head->loop) + budget_ms * 1000000ull };
    st = call_start(n->up->peer, &args, &s->op, err);
    fl_str_fini(&buf);
    if (st != FL_OK)
        free(s);
    return st;
}

enum fl_status node_tell(struct node *n, uint16_t method, const void *msg, struct fl_err *err)
{
    struct fl_str buf = FL_STR_HEAP(WIRE_MAX_BODY);

    if (!n || !n->up || !n->up->open)
        return fl_fail(err, FL_UNREACHABLE, "node %s is not connected", n ? n->rec->name : "?");
    enum fl_status st = call_event(n->up->peer, method, 0, pack_msg(msg, &buf), err);
    fl_str_fini(&buf);
    return st;
}
