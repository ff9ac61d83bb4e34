#include "tests/head/rig.h"

#include <stdlib.h>

enum { WAIT_MS = 5000 };

/* ---- the head ---- */

static void on_ended(void *arg)
{
    ((struct rig *)arg)->ended++;
}

static void on_term(void *arg, const struct fl_term *term)
{
    struct rig *r = arg;

    r->terms++;
    stream_server_term(r->server, term);
}

enum fl_status rig_try_head(struct rig *r, struct fl_err *err)
{
    return head_create(r->loop, &r->cfg, &r->head, err);
}

void rig_open_head(struct rig *r)
{
    struct fl_err err = { 0 };
    struct stream_to at = { .target = r->target, .admit = head_admit };

    t_ok(rig_try_head(r, &err), &err);
    struct wire_hello me = head_hello(r->head);
    t_ok(stream_listen(r->loop, &stream_pair, &at, &me, head_accept, r->head, &r->server, &err),
         &err);
    head_on_term(r->head, on_term, r);
}

void rig_start(struct rig *r, const char *name, const struct head_config *like)
{
    struct fl_err err = { 0 };

    memset(r, 0, sizeof(*r));
    r->clock.now_ns = 1000000000000;
    struct fl_clock clock = fl_held_clock(&r->clock);
    t_ok(fl_loop_create(&clock, &r->loop, &err), &err);
    if (like)
        r->cfg = *like;
    snprintf(r->state_dir, sizeof(r->state_dir), "%s", t_path(name));
    snprintf(r->target, sizeof(r->target), "pair:%s", name);
    r->cfg.state_dir = r->state_dir;
    r->cfg.node_ip = "10.0.0.1";
    r->cfg.boot_id = "boot-1";
    r->cfg.http = "http://10.0.0.1:8265";
    r->cfg.rpc = "10.0.0.1:6379";
    r->cfg.ended = on_ended;
    r->cfg.arg = r;
    rig_open_head(r);
}

/* Whatever a test did: each lease is in the list of its node, once, and in no other. */
static void check_leases(struct head *h)
{
    struct lease *l, *tmp;
    struct node *n, *ntmp;
    size_t listed = 0, placed = 0;

    HASH_ITER (hh, h->leases, l, tmp) {
        t_true(l->at == node_of(h, &l->rec->at->id), "lease %llu", (unsigned long long)l->id);
        placed += l->at != NULL;
    }
    HASH_ITER (hh, h->nodes, n, ntmp)
        EACH_HELD (n, l) {
            t_true(l->at == n, "lease %llu", (unsigned long long)l->id);
            listed++;
        }
    t_int_eq(listed, placed);
}

void rig_stop_head(struct rig *r)
{
    check_leases(r->head);
    stream_server_destroy(r->server);
    head_destroy(r->head);
    r->server = NULL;
    r->head = NULL;
}

void rig_again(struct rig *r)
{
    rig_stop_head(r);
    rig_turns(r, 4);
    rig_open_head(r);
}

void rig_end(struct rig *r)
{
    rig_stop_head(r);
    rig_turns(r, 4);
    fl_loop_destroy(r->loop);
}

void rig_turns(struct rig *r, unsigned n)
{
    while (n--)
        fl_loop_turn(r->loop, 5);
}

void rig_pass(struct rig *r, uint64_t ms)
{
    /* In steps shorter than a beat, as a head that runs sees time pass. */
    for (uint64_t step; ms; ms -= step) {
        step = ms < 500 ? ms : 500;
        fl_loop_pass(r->loop, &r->clock, step * 1000000);
        rig_turns(r, 2);
    }
}

/* ---- calls ---- */

static void on_answer(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                      const struct fl_err *err)
{
    struct asked *a = container_of(op, struct asked, op);

    a->done = true;
    a->st = st;
    if (err)
        a->err = *err;
    if (st == FL_OK)
        fl_str_add_bytes(&a->body, reply->body, reply->head.body_bytes);
}

void ask_start(struct fake *f, uint16_t method, const void *msg, struct asked *a)
{
    struct fl_str buf = FL_STR_HEAP(1 << 24);
    struct call_args args = { .method = method, .body = pack_msg(msg, &buf) };

    *a = (struct asked){ .op.done = on_answer, .body = FL_STR_HEAP(1 << 24) };
    t_ok(call_start(f->peer, &args, &a->op, &a->err), &a->err);
    fl_str_fini(&buf);
}

void ask_relay(struct fake *f, struct fake_worker *from, uint32_t method, const void *msg,
               struct asked *a)
{
    struct fl_str buf = FL_STR_HEAP(1 << 24);
    Fl__Relay m = FL__RELAY__INIT;
    Fl__SeatRef who = FL__SEAT_REF__INIT;
    struct fl_bytes body = msg ? pack_msg(msg, &buf) : (struct fl_bytes){ "", 0 };

    who.worker = BYTES_OF(from->who.id);
    who.attempt = from->who.attempt;
    m.from = &who;
    m.job = BYTES_OF(from->job);
    m.method = method;
    m.body = (ProtobufCBinaryData){ body.len, (uint8_t *)(uintptr_t)body.data };
    ask_start(f, FL_RELAY, &m, a);
    fl_str_fini(&buf);
}

void ask_wait(struct fake *f, struct asked *a)
{
    t_until(f->rig->loop, a->done, WAIT_MS);
}

void *asked_msg(struct asked *a, const ProtobufCMessageDescriptor *d)
{
    t_int_eq(a->st, FL_OK, "%s", a->err.text);
    void *m = protobuf_c_message_unpack(d, NULL, a->body.len, (const uint8_t *)a->body.data);
    t_true(m, "%s", d->short_name);
    return m;
}

void ask_free(struct asked *a)
{
    if (!a->done)
        call_cancel(&a->op);
    fl_str_fini(&a->body);
}

/* ---- what a daemon is told ---- */

static void *body(const struct wire_msg *m, const ProtobufCMessageDescriptor *d)
{
    void *msg = protobuf_c_message_unpack(d, NULL, m->head.body_bytes, m->body);

    t_true(msg, "%s from the head", d->short_name);
    return msg;
}

static void say(struct call_req *req, enum fl_status st, const char *text)
{
    if (st == FL_OK)
        reply_empty(req);
    else
        reply_refuse(req, st, "%s", text);
}

static void on_prepare(void *arg, struct call_req *req, const struct wire_msg *m)
{
    struct fake *f = arg;
    Fl__LeasePrepare *p = body(m, &fl__lease_prepare__descriptor);
    Fl__LeasePrepared done = FL__LEASE_PREPARED__INIT;
    uint32_t ports[64];

    f->prepares++;
    if (f->mute_prepare) {
        f->unanswered = req;
    } else if (f->on_prepare != FL_OK) {
        say(req, f->on_prepare, "no, says the test");
    } else {
        for (size_t i = 0; i < p->n_leases && f->n_leases < FAKE_LEASES; i++) {
            f->leases[f->n_leases] = copy_msg(p->leases[i]);
            f->leases[f->n_leases]->has_state = true;
            f->leases[f->n_leases++]->state = FL__LEASE_STATE__PREPARED;
        }
        for (uint32_t i = 0; i < p->free_ports && i < 64; i++)
            ports[done.n_ports++] = p->ports_from + i;
        done.ports = ports;
        reply_msg(req, &done);
    }
    free_msg(p);
}

static Fl__Lease **lease_at(struct fake *f, uint64_t id)
{
    for (size_t i = 0; i < f->n_leases; i++)
        if (f->leases[i]->id == id)
            return &f->leases[i];
    return NULL;
}

static void drop_lease(struct fake *f, uint64_t id)
{
    Fl__Lease **l = lease_at(f, id);

    if (!l)
        return;
    free_msg(*l);
    *l = f->leases[--f->n_leases];
}

static void on_commit(void *arg, struct call_req *req, const struct wire_msg *m)
{
    struct fake *f = arg;
    Fl__LeaseIds *ids = body(m, &fl__lease_ids__descriptor);
    bool known = true;

    f->commits++;
    for (size_t i = 0; i < ids->n_ids; i++)
        known &= lease_at(f, ids->ids[i]) != NULL;
    if (f->mute_commit) {
        f->unanswered = req;
    } else if (f->on_commit != FL_OK || !known) {
        say(req, f->on_commit != FL_OK ? f->on_commit : FL_NOT_FOUND, "no such lease");
    } else {
        for (size_t i = 0; i < ids->n_ids; i++)
            (*lease_at(f, ids->ids[i]))->state = FL__LEASE_STATE__COMMITTED;
        say(req, FL_OK, "");
    }
    free_msg(ids);
}

static void on_release(void *arg, struct call_req *req, const struct wire_msg *m)
{
    struct fake *f = arg;
    Fl__LeaseIds *ids = body(m, &fl__lease_ids__descriptor);

    f->releases++;
    for (size_t i = 0; i < ids->n_ids; i++)
        drop_lease(f, ids->ids[i]);
    say(req, FL_OK, "");
    free_msg(ids);
}

static void list(char *out, size_t cap, const char *fmt, const char *a, const char *b)
{
    size_t len = strlen(out);

    snprintf(out + len, cap - len, fmt, a, b);
}

static void take_spec(struct fake_worker *w, const Fl__WorkerSpec *s)
{
    unsigned starts = w->starts;

    memset(w, 0, sizeof(*w));
    w->starts = starts + 1;
    memcpy(&w->who.id, s->who->worker.data, sizeof(w->who.id));
    w->who.attempt = s->who->attempt;
    memcpy(&w->job, s->job.data, sizeof(w->job));
    (void)FL_COPY(w->role, s->role);
    w->rank = s->rank;
    w->world = s->world;
    w->local_rank = s->local_rank;
    w->local_world = s->local_world;
    w->master_port = s->master_port;
    (void)FL_COPY(w->master_addr, s->master_addr ? s->master_addr : "");
    (void)FL_COPY(w->cwd, s->cwd ? s->cwd : "");
    t_int_eq(s->key.len, 32);
    memcpy(w->key, s->key.data, 32);
    for (size_t i = 0; i < s->n_argv; i++)
        list(w->command, sizeof(w->command), "%s%s", i ? " " : "", s->argv[i]);
    for (size_t i = 0; i < s->n_device_ids; i++)
        list(w->devices, sizeof(w->devices), "%s%s", i ? "," : "", s->device_ids[i]);
    for (size_t i = 0; i < s->n_env; i++) {
        list(w->env, sizeof(w->env), "%s=%s;", s->env[i]->name, s->env[i]->value);
    }
    for (size_t i = 0; i < s->n_leases && i < 16; i++)
        w->leases[w->n_leases++] = s->leases[i];
    w->phase = FL__WORKER_PHASE__WORKER_STARTING;
}

static void on_start(void *arg, struct call_req *req, const struct wire_msg *m)
{
    struct fake *f = arg;
    Fl__WorkerSpec *s = body(m, &fl__worker_spec__descriptor);
    struct fake_worker *w = NULL;

    for (size_t i = 0; i < f->n_workers; i++) /* asked again: answered as if done */
        if (memcmp(&f->workers[i].who.id, s->who->worker.data, 28) == 0 &&
            f->workers[i].who.attempt == s->who->attempt)
            w = &f->workers[i];
    if (f->mute_start) {
        f->unanswered = req;
        if (!w)
            take_spec(&f->workers[f->n_workers++], s);
    } else if (w) {
        w->starts++;
        say(req, FL_OK, "");
    } else if (f->on_start != FL_OK) {
        say(req, f->on_start, "no such program");
    } else {
        t_true(f->n_workers < FAKE_WORKERS);
        take_spec(&f->workers[f->n_workers++], s);
        say(req, FL_OK, "");
    }
    free_msg(s);
}

static void on_stop(void *arg, struct call_req *req, const struct wire_msg *m)
{
    struct fake *f = arg;
    Fl__WorkerStop *s = body(m, &fl__worker_stop__descriptor);

    f->stops++;
    for (size_t i = 0; i < f->n_workers; i++)
        if (memcmp(&f->workers[i].who.id, s->who->worker.data, 28) == 0 &&
            f->workers[i].who.attempt == s->who->attempt) {
            f->workers[i].stop_asked = true;
            f->workers[i].stop_term_ms = s->term_ms;
        }
    say(req, FL_OK, "");
    free_msg(s);
}

static void on_deliver(void *arg, struct call_req *req, const struct wire_msg *m)
{
    struct fake *f = arg;
    Fl__Deliver *d = body(m, &fl__deliver__descriptor);

    (void)req;
    t_true(f->n_events < FAKE_EVENTS);
    f->events[f->n_events].method = d->method;
    memcpy(&f->events[f->n_events].to.id, d->to->worker.data, 28);
    f->events[f->n_events].to.attempt = d->to->attempt;
    f->events[f->n_events++].members = fl__members__unpack(NULL, d->body.len, d->body.data);
    free_msg(d);
}

static void left(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                 const struct fl_err *err)
{
    (void)st, (void)reply, (void)err;
    free(op);
}

static void on_shutdown(void *arg, struct call_req *req, const struct wire_msg *m)
{
    struct fake *f = arg;
    Fl__Shutdown bye = FL__SHUTDOWN__INIT;
    struct fl_str buf = FL_STR_HEAP(1000);

    (void)m;
    f->shutdowns++;
    say(req, FL_OK, "");
    if (f->leaves) {
        struct call_op *op = calloc(1, sizeof(*op));
        struct call_args args = { .method = FL_NODE_LEAVE, .body = pack_msg(&bye, &buf) };

        op->done = left;
        t_ok(call_start(f->peer, &args, op, NULL), NULL);
    }
    fl_str_fini(&buf);
}

static void on_fenced(void *arg, struct call_req *req, const struct wire_msg *m)
{
    struct fake *f = arg;

    (void)m;
    t_true(!req, "nobody waits for its answer");
    f->told_fenced++;
}

static const struct call_method methods[] = {
    { FL_LEASE_PREPARE, "prepare", on_prepare },   { FL_LEASE_COMMIT, "commit", on_commit },
    { FL_LEASE_RELEASE, "release", on_release },   { FL_WORKER_START, "start", on_start },
    { FL_WORKER_STOP, "stop", on_stop },           { FL_DELIVER, "deliver", on_deliver },
    { FL_NODE_SHUTDOWN, "shutdown", on_shutdown }, { FL_NODE_FENCED, "fenced", on_fenced },
};

/* ---- its life ---- */

static void on_opened(void *arg, const struct wire_hello *peer)
{
    struct fake *f = arg;

    t_str_eq(peer->role, "head");
    f->open = true;
    if (!FL_SAME(f->highest.cluster, peer->term.cluster) || peer->term.head > f->highest.head)
        f->highest = peer->term;
}

static void on_closed(void *arg, const struct fl_err *why)
{
    struct fake *f = arg;

    (void)why;
    call_peer_destroy(f->peer);
    f->peer = NULL;
    f->open = f->joined = false;
    f->closed = true;
}

static const struct call_life life = { .opened = on_opened, .closed = on_closed };

void fake_init(struct fake *f, struct rig *r, const char *name, const char *address, unsigned gpus)
{
    static uint64_t seed = 77;

    memset(f, 0, sizeof(*f));
    f->rig = r;
    for (size_t i = 0; i < sizeof(f->who.id); i++)
        ((uint8_t *)&f->who.id)[i] = (uint8_t)t_random(&seed);
    f->who.start = 1;
    f->cpus = 8;
    f->gpus = gpus;
    (void)FL_COPY(f->name, name);
    (void)FL_COPY(f->address, address);
    (void)FL_COPY(f->boot_id, "boot-1");
    f->leaves = true;
}

void fake_connect(struct fake *f)
{
    struct wire_hello me = { .node = f->who, .term = f->highest, .role = "node" };
    struct stream_to to = { .target = f->rig->target };
    struct stream *s = NULL;
    struct fl_err err = { 0 };

    f->closed = false;
    t_ok(stream_connect(f->rig->loop, &stream_pair, &to, &me, NULL, NULL, &s, &err), &err);
    t_ok(call_peer_create(s, methods, FL_LEN(methods), &life, f, &f->peer, &err), &err);
    t_until(f->rig->loop, f->open || f->closed, WAIT_MS);
}

static void worker_state(const struct fake_worker *w, Fl__WorkerState *m, Fl__SeatRef *who)
{
    *m = (Fl__WorkerState)FL__WORKER_STATE__INIT;
    *who = (Fl__SeatRef)FL__SEAT_REF__INIT;
    who->worker = BYTES_OF(w->who.id);
    who->attempt = w->who.attempt;
    m->who = who;
    m->job = BYTES_OF(w->job);
    m->role = (char *)(uintptr_t)w->role;
    m->rank = w->rank;
    m->phase = w->phase;
    m->has_pid = true;
    m->pid = 4242;
    m->tcp = w->phase == FL__WORKER_PHASE__WORKER_JOINED ? "10.0.0.1:4000" : NULL;
    m->leases = (uint64_t *)(uintptr_t)w->leases;
    m->n_leases = w->n_leases;
}

void fake_join(struct fake *f)
{
    Fl__JoinRequest m = FL__JOIN_REQUEST__INIT;
    Fl__Inventory inv = FL__INVENTORY__INIT;
    Fl__Amount amounts[2] = { FL__AMOUNT__INIT, FL__AMOUNT__INIT },
               *all[2] = { &amounts[0], &amounts[1] };
    Fl__Device devices[16], *devs[16];
    char ids[16][8];
    Fl__WorkerState states[FAKE_WORKERS], *ws[FAKE_WORKERS];
    Fl__SeatRef refs[FAKE_WORKERS];
    struct asked a;

    amounts[0].name = "CPU";
    amounts[0].e4 = (int64_t)(f->cpus * 10000);
    amounts[1].name = "GPU";
    amounts[1].e4 = (int64_t)f->gpus * 10000;
    inv.total = all;
    inv.n_total = f->gpus ? 2 : 1;
    for (unsigned i = 0; i < f->gpus && i < 16; i++) {
        devices[i] = (Fl__Device)FL__DEVICE__INIT;
        snprintf(ids[i], sizeof(ids[i]), "%u", i);
        devices[i].id = ids[i];
        devs[i] = &devices[i];
    }
    inv.devices = devs;
    inv.n_devices = f->gpus;
    m.name = f->name;
    m.address = f->address;
    m.has_dial_port = f->dial_port != 0;
    m.dial_port = f->dial_port;
    m.boot_id = f->boot_id;
    m.inventory = &inv;
    m.leases = f->leases;
    m.n_leases = f->n_leases;
    for (size_t i = 0; i < f->n_workers; i++) {
        worker_state(&f->workers[i], &states[i], &refs[i]);
        if (f->workers[i].phase != FL__WORKER_PHASE__WORKER_GONE)
            ws[m.n_workers++] = &states[i];
    }
    m.workers = ws;
    f->join_status = FL_UNREACHABLE;
    if (!f->peer)
        return;
    ask_start(f, FL_NODE_JOIN, &m, &a);
    ask_wait(f, &a);
    f->join_status = a.st;
    (void)FL_COPY(f->join_text, a.err.text);
    free_msg(f->reply);
    f->reply = NULL;
    if (a.st == FL_OK) {
        f->reply = asked_msg(&a, &fl__join_reply__descriptor);
        f->fenced = f->reply->fenced;
        f->joined = !f->fenced;
        for (size_t i = 0; i < f->reply->n_end_leases; i++)
            drop_lease(f, f->reply->end_leases[i]);
        for (size_t i = 0; i < f->reply->n_end_workers; i++)
            for (size_t k = 0; k < f->n_workers; k++)
                if (memcmp(&f->workers[k].who.id, f->reply->end_workers[i]->worker.data, 28) == 0 &&
                    f->workers[k].who.attempt == f->reply->end_workers[i]->attempt)
                    f->workers[k].phase = FL__WORKER_PHASE__WORKER_GONE;
    }
    ask_free(&a);
}

void fake_up(struct fake *f, struct rig *r, const char *name, const char *address, unsigned gpus)
{
    fake_init(f, r, name, address, gpus);
    fake_connect(f);
    fake_join(f);
    t_int_eq(f->join_status, FL_OK, "%s: %s", name, f->join_text);
    t_until(r->loop, node_find(r->head, &f->who.id)->state == NODE_READY, WAIT_MS);
}

void fake_cut(struct fake *f)
{
    struct fl_err err;

    bool joined = f->joined;

    if (!f->peer)
        return;
    fl_fail(&err, FL_UNREACHABLE, "cut by the test");
    call_peer_close(f->peer, &err);
    t_until(f->rig->loop, f->peer == NULL, WAIT_MS);
    if (f->rig->head && joined) {
        struct node *n = node_find(f->rig->head, &f->who.id);
        t_until(f->rig->loop, !n || !n->up, WAIT_MS);
    }
}

void fake_again(struct fake *f)
{
    for (int i = 0; i < 5 && !f->joined; i++) { /* a head that takes a later term closes first */
        if (!f->peer)
            fake_connect(f);
        rig_turns(f->rig, 4);
        fake_join(f);
        if (f->fenced || f->join_status == FL_EXISTS || f->join_status == FL_AGAIN)
            break;
    }
}

void fake_beat(struct fake *f)
{
    struct fl_str buf = FL_STR_HEAP(1000);
    Fl__Beat m = FL__BEAT__INIT;

    m.seq = 1;
    if (f->peer)
        (void)call_event(f->peer, FL_NODE_BEAT, 0, pack_msg(&m, &buf), NULL);
    fl_str_fini(&buf);
    rig_turns(f->rig, 2);
}

/* ---- its workers ---- */

struct fake_worker *fake_worker(struct fake *f, const char *role, uint32_t rank)
{
    for (size_t i = f->n_workers; i-- > 0;)
        if (strcmp(f->workers[i].role, role) == 0 && f->workers[i].rank == rank)
            return &f->workers[i];
    return NULL;
}

static enum fl_status changed(struct fake *f, struct fake_worker *w, Fl__Exit *x)
{
    Fl__WorkerState m;
    Fl__SeatRef who;
    struct asked a;

    worker_state(w, &m, &who);
    m.exit = x;
    ask_start(f, FL_WORKER_CHANGED, &m, &a);
    ask_wait(f, &a);
    enum fl_status st = a.st;
    ask_free(&a);
    return st;
}

void fake_joined(struct fake *f, struct fake_worker *w)
{
    w->phase = FL__WORKER_PHASE__WORKER_JOINED;
    t_int_eq(changed(f, w, NULL), FL_OK);
}

enum fl_status fake_exit_try(struct fake *f, struct fake_worker *w, int code)
{
    Fl__Exit x = FL__EXIT__INIT;
    char why[128];

    snprintf(why, sizeof(why), "%s %u ended with code %d", w->role, w->rank, code);
    x.cause = w->stop_asked ? EXIT_STOPPED : EXIT_EXITED;
    x.has_code = true;
    x.code = code;
    x.why = why;
    w->phase = FL__WORKER_PHASE__WORKER_GONE;
    return changed(f, w, &x);
}

void fake_exit(struct fake *f, struct fake_worker *w, int code)
{
    t_int_eq(fake_exit_try(f, w, code), FL_OK);
}

uint64_t fake_log(struct fake *f, struct fake_worker *w, unsigned stream, uint64_t offset,
                  const char *text)
{
    Fl__LogPush m = FL__LOG_PUSH__INIT;
    Fl__SeatRef who = FL__SEAT_REF__INIT;
    struct asked a;

    who.worker = BYTES_OF(w->who.id);
    who.attempt = w->who.attempt;
    m.who = &who;
    m.job = BYTES_OF(w->job);
    m.role = w->role;
    m.rank = w->rank;
    m.offset = offset;
    m.data = (ProtobufCBinaryData){ strlen(text), (uint8_t *)(uintptr_t)text };
    m.has_stream = true;
    m.stream = stream;
    ask_start(f, FL_LOG_PUSH, &m, &a);
    ask_wait(f, &a);
    Fl__LogPushed *done = asked_msg(&a, &fl__log_pushed__descriptor);
    uint64_t next = done->next;
    free_msg(done);
    ask_free(&a);
    return next;
}

void fake_down(struct fake *f)
{
    fake_cut(f);
    for (size_t i = 0; i < f->n_leases; i++)
        free_msg(f->leases[i]);
    for (size_t i = 0; i < f->n_events; i++)
        free_msg(f->events[i].members);
    free_msg(f->reply);
    if (f->unanswered)
        reply_empty(f->unanswered);
    memset(f, 0, sizeof(*f));
}

/* ---- jobs ---- */

struct submitted {
    bool done;
    enum fl_status st;
};

static void on_submitted(struct after *a, enum fl_status st, const struct fl_err *err)
{
    struct submitted *s = a->arg;

    (void)err;
    s->done = true;
    s->st = st;
    free(a);
}

char *submit(struct rig *r, const char *entrypoint, const struct job_ask *like)
{
    static char id[64];
    struct job_ask ask = like ? *like : (struct job_ask){ 0 };
    struct submitted s = { 0 };
    struct after *a = after_new(r->head, on_submitted);
    struct fl_err err = { 0 };

    a->arg = &s;
    ask.entrypoint = entrypoint;
    t_ok(job_submit(r->head, &ask, a, id, &err), &err);
    t_true(!s.done, "not before it is on disk");
    t_until(r->loop, s.done, WAIT_MS);
    t_int_eq(s.st, FL_OK);
    return id;
}

struct job *job(struct rig *r, const char *id)
{
    struct job *j = job_named(r->head, id);

    t_true(j, "job %s", id);
    return j;
}
