#include <stdlib.h>
#include "common/base/fault.h"
#include "common/base/str.h"
#include "worker.pb-c.h"
#include "worker/client/peers_priv.h"
#include "worker/client/sync.h"

enum {
    GRACE_MS = 1000
}; /* for a peer to read the rest of a blob whose answer is not wanted any more */

struct answer_kept {
    Fl__Answer *pb;
    void *blob;
}; /* furlong_answer.impl */

void furlong_answer_free(struct furlong_answer *a)
{
    struct answer_kept *k = a->impl;

    if (k) {
        fl__answer__free_unpacked(k->pb, NULL);
        client_blob_free(k->blob);
        free(k);
    }
    *a = (struct furlong_answer){ 0 };
}

enum fl_status client_ask_pack(struct client_ask *a, struct furlong_peer *p, uint32_t lane,
                               const char *method, const struct furlong_data *what,
                               struct fl_err *err)
{
    Fl__Ask m = FL__ASK__INIT;

    if (!method || !*method || lane >= FURLONG_LANES)
        return fl_fail(err, FL_INVALID, "%s: %s", p->name,
                       lane < FURLONG_LANES ? "a call needs a method" : "there are lanes 0 to 31");
    if (what && what->body_bytes > FURLONG_BODY_MAX)
        return fl_fail(err, FL_INVALID,
                       "%s, %s: a body of %zu bytes, at most %u; put bulk in the blob", p->name,
                       method, what->body_bytes, FURLONG_BODY_MAX);
    m.method = (char *)(uintptr_t)method;
    m.from = p->f->seat.name;
    if (what && what->body_bytes) {
        m.has_body = true;
        m.body.data = (uint8_t *)(uintptr_t)what->body;
        m.body.len = what->body_bytes;
    }
    a->body = FL_FAULT("client.ask") ? NULL : malloc(fl__ask__get_packed_size(&m));
    if (!a->body)
        return fl_fail(err, FL_EXHAUSTED, "%s, %s: no memory for the call", p->name, method);
    a->body_bytes = fl__ask__pack(&m, a->body);
    a->peer = p;
    a->lane = lane;
    a->blob = what ? what->blob : NULL;
    a->blob_bytes = what ? what->blob_bytes : 0;
    return FL_OK;
}

const char *client_ask_phase(const struct client_ask *a)
{
    static const char *const phases[PEER_STATES] = { "not looked for", "looked for",
                                                     "not there yet", "being connected to",
                                                     "waiting for room to be asked" };

    return a->sent ? "asked" : phases[a->peer->state];
}

/* ---- over ----------------------------------------------------------------------------------- */
static void ask_settle(struct client_ask *a)
{
    if (!a->over || a->held)
        return;
    fl_timer_cancel(&a->timer);
    free(a->body);
    a->body = NULL;
    a->done(a);
}

static void ask_over(struct client_ask *a, enum fl_status st, const struct fl_err *err)
{
    a->st = st;
    if (err && st != FL_OK)
        a->err = *err;
    a->err.status = st;
    a->over = true;
    a->sent = false;
    if (st != FL_OK) {
        client_blob_free(FL_TAKE(a->room));
        furlong_answer_free(&a->answer);
    }
    /* A stopped process reads no more: the rest of our blob would keep its memory for good. */
    if (a->held)
        fl_timer_arm_in(a->peer->f->loop, &a->timer, GRACE_MS);
    ask_settle(a);
}

static void ask_unlink(struct client_ask *a)
{
    struct furlong_peer *p = a->peer;

    for (struct client_ask **at = &p->asks; *at; at = &(*at)->next) {
        if (*at != a)
            continue;
        *at = a->next;
        if (!a->next)
            p->asks_end = at;
        break;
    }
    a->waiting = false;
}

static enum fl_status answer_take(struct client_ask *a, const struct wire_msg *reply,
                                  struct fl_err *err)
{
    struct answer_kept *k = calloc(1, sizeof(*k));
    Fl__Answer *pb = k ? fl__answer__unpack(NULL, reply->head.body_bytes, reply->body) : NULL;

    if (!pb) {
        free(k);
        return fl_fail(err, k ? FL_CORRUPT : FL_EXHAUSTED, "%s: an answer of %u bytes that %s",
                       a->peer->name, reply->head.body_bytes,
                       k ? "is no Answer message" : "found no memory");
    }
    k->pb = pb;
    a->answer = (struct furlong_answer){ .impl = k };
    if (pb->has_body) {
        a->answer.body = pb->body.data;
        a->answer.body_bytes = pb->body.len;
    }
    if (!reply->head.blob_bytes)
        return FL_OK;
    if (!a->room || reply->blob != a->room)
        return fl_fail(err, FL_EXHAUSTED, "%s: no memory for a blob of %llu bytes", a->peer->name,
                       (unsigned long long)reply->head.blob_bytes);
    k->blob = FL_TAKE(a->room);
    a->answer.blob = k->blob;
    a->answer.blob_bytes = reply->head.blob_bytes;
    return FL_OK;
}

static void ask_done(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                     const struct fl_err *err)
{
    struct client_ask *a = container_of(op, struct client_ask, op);
    struct fl_err mine;

    if (a->over) /* cancelled by us: the outcome is written already */
        return;
    if (st == FL_OK) {
        st = answer_take(a, reply, &mine);
        err = &mine;
    } else if (st == FL_TIMEOUT && a->due_ns && fl_loop_now_ns(a->peer->f->loop) >= a->due_ns) {
        st = fl_fail(&mine, FL_TIMEOUT, "%s did not answer in time", a->peer->name);
        err = &mine;
    } else if (st == FL_CANCELLED && a->peer->f->peers->ending && !a->peer->f->leaving) {
        st = fl_fail(&mine, FL_UNREACHABLE, "%s ended while it was asked", a->peer->name);
        err = &mine;
    }
    ask_over(a, st, err);
}

static void *ask_room(struct call_op *op, uint64_t blob_bytes)
{
    struct client_ask *a = container_of(op, struct client_ask, op);

    a->room = client_blob_alloc(blob_bytes);
    return a->room;
}

static void ask_unheld(struct wire_hold *h)
{
    struct client_ask *a = container_of(h, struct client_ask, hold);

    a->held = false;
    ask_settle(a);
}

/* ---- on its way ----------------------------------------------------------------------------- */
/* FL_AGAIN: its lane has no credit, or the stream is full, or has just broken: nothing was sent, so
 * it waits for the next one. */
static enum fl_status ask_send(struct client_ask *a)
{
    struct call_args args = { .method = FL_ASK,
                              .lane = a->lane,
                              .due_ns = a->due_ns,
                              .body = { a->body, a->body_bytes },
                              .blob = { a->blob, a->blob_bytes },
                              .hold = a->blob_bytes ? &a->hold : NULL };
    struct fl_err err;
    enum fl_status st;

    a->op.done = ask_done;
    a->op.room = ask_room;
    a->hold.free = ask_unheld;
    a->held = a->blob_bytes > 0;
    st = call_start(a->peer->call, &args, &a->op, &err);
    if (st != FL_OK)
        a->held = false;
    if (st == FL_AGAIN || st == FL_UNREACHABLE)
        return FL_AGAIN;
    ask_unlink(a);
    if (st == FL_OK) {
        a->sent = true;
        a->call = a->peer->call;
        fl_timer_cancel(&a->timer); /* the call keeps the time from here on */
        free(a->body);
        a->body = NULL;
    } else {
        ask_over(a, st, &err);
    }
    return FL_OK;
}

void client_peer_send(struct furlong_peer *p)
{
    uint32_t full = 0; /* lanes that have to wait keep their order */
    struct client_ask *a;

    if (p->sending)
        return;
    p->sending = true;
    for (a = p->asks; a && p->state == PEER_READY;) {
        if (full & 1u << a->lane) {
            a = a->next;
        } else if (ask_send(a) == FL_AGAIN) {
            full |= 1u << a->lane;
        } else {
            a = p->asks; /* whoever owned it may have cancelled others */
        }
    }
    p->sending = false;
}

void client_peer_ended(struct furlong_peer *p, const struct fl_err *why)
{
    while (p->asks) {
        struct client_ask *a = p->asks;

        ask_unlink(a);
        ask_over(a, why->status, why);
    }
}

static void ask_late(struct client_ask *a)
{
    struct furlong_peer *p = a->peer;
    struct fl_err err;

    if (p->last.status != FL_OK && p->state != PEER_READY)
        fl_fail(&err, FL_TIMEOUT, "%s is %s: %s", p->name, client_ask_phase(a), p->last.text);
    else
        fl_fail(&err, FL_TIMEOUT, "%s is still %s", p->name, client_ask_phase(a));
    ask_unlink(a);
    ask_over(a, FL_TIMEOUT, &err);
}

static void ask_timer(struct fl_timer *t, uint64_t now_ns)
{
    struct client_ask *a = container_of(t, struct client_ask, timer);
    struct fl_err err;

    (void)now_ns;
    if (a->waiting) {
        ask_late(a);
        return;
    }
    fl_fail(&err, FL_UNREACHABLE, "%s does not read what it was sent", a->peer->name);
    client_conn_break(a->peer->f, a->call, &err);
}

void client_ask_start(struct client_ask *a)
{
    struct furlong_peer *p = a->peer;

    a->timer = (struct fl_timer){ .fire = ask_timer };
    if (p->f->leaving) {
        struct fl_err err;

        fl_fail(&err, FL_CANCELLED, "%s leaves", p->f->seat.name);
        ask_over(a, FL_CANCELLED, &err);
        return;
    }
    a->waiting = true;
    a->next = NULL;
    *p->asks_end = a;
    p->asks_end = &a->next;
    if (a->due_ns)
        fl_timer_arm(p->f->loop, &a->timer, a->due_ns);
    client_peer_want(p);
}

void client_ask_cancel(struct client_ask *a)
{
    struct fl_err err;

    if (a->over)
        return;
    fl_fail(&err, FL_CANCELLED, "%s: the call was cancelled", a->peer->name);
    if (a->waiting) {
        ask_unlink(a);
        ask_over(a, FL_CANCELLED, &err);
        return;
    }
    a->over = true; /* so that ask_done() leaves it to us */
    call_cancel(&a->op);
    ask_over(a, FL_CANCELLED, &err);
}

/* ---- one, and wait -------------------------------------------------------------------------- */
struct ask_wait {
    struct client_sync sync;
    struct client_ask ask;
    uint32_t budget_ms;
};

static uint64_t due_of(const struct furlong *f, uint32_t budget_ms)
{
    if (budget_ms == 0 || budget_ms == FURLONG_FOREVER)
        return 0;
    return fl_loop_now_ns(f->loop) + (uint64_t)budget_ms * 1000000;
}

static void wait_done(struct client_ask *a)
{
    struct ask_wait *w = container_of(a, struct ask_wait, ask);

    client_sync_end(&w->sync, a->st, &a->err);
}

static void wait_begin(struct client_sync *s)
{
    struct ask_wait *w = container_of(s, struct ask_wait, sync);

    w->ask.due_ns = due_of(w->ask.peer->f, w->budget_ms);
    client_ask_start(&w->ask);
}

enum fl_status furlong_ask(struct furlong_peer *p, uint32_t lane, const char *method,
                           const struct furlong_data *what, uint32_t budget_ms,
                           struct furlong_answer *out, struct fl_err *err)
{
    struct ask_wait w = { .ask.done = wait_done, .budget_ms = budget_ms };
    enum fl_status st;

    FL_TRY(client_here(p->f, err));
    FL_TRY(client_ask_pack(&w.ask, p, lane, method, what, err));
    st = client_sync_run(p->f->loop, &w.sync, wait_begin, err);
    if (st != FL_OK)
        return fl_wrap(err, st, "%s", method);
    if (out)
        *out = w.ask.answer;
    else
        furlong_answer_free(&w.ask.answer);
    return FL_OK;
}

/* ---- several -------------------------------------------------------------------------------- */
struct asks_one {
    struct client_ask ask;
    struct fl_task start;
    struct furlong_asks *of;
    uint64_t tag;
    uint32_t budget_ms;
    struct asks_one *next, *prev; /* of all that are in flight: loop thread */
    char method[64];
};
struct furlong_asks {
    struct furlong *f;
    uint32_t bound;
    pthread_mutex_t mu;
    pthread_cond_t came;
    uint32_t n; /* in flight or not yet taken */
    struct asks_one *done, **done_end;
    struct asks_one ring; /* in flight, on the loop */
    struct client_sync *ending;
};

static void asks_end_if_empty(struct furlong_asks *a)
{
    struct client_sync *s = a->ending;

    if (!s || a->ring.next != &a->ring)
        return;
    a->ending = NULL;
    client_sync_end(s, FL_OK, NULL);
}

static void one_done(struct client_ask *ask)
{
    struct asks_one *one = container_of(ask, struct asks_one, ask);
    struct furlong_asks *a = one->of;

    one->prev->next = one->next;
    one->next->prev = one->prev;
    one->next = NULL;
    pthread_mutex_lock(&a->mu);
    *a->done_end = one;
    a->done_end = &one->next;
    pthread_cond_signal(&a->came);
    pthread_mutex_unlock(&a->mu);
    asks_end_if_empty(a);
}

static void one_start(struct fl_task *t)
{
    struct asks_one *one = container_of(t, struct asks_one, start);
    struct furlong_asks *a = one->of;

    one->prev = a->ring.prev;
    one->next = &a->ring;
    one->prev->next = a->ring.prev = one;
    one->ask.due_ns = due_of(a->f, one->budget_ms);
    client_ask_start(&one->ask);
}

enum fl_status furlong_asks_create(struct furlong *f, uint32_t bound, struct furlong_asks **out,
                                   struct fl_err *err)
{
    struct furlong_asks *a;

    FL_TRY(client_here(f, err));
    if (bound == 0 || bound > 1u << 20)
        return fl_fail(err, FL_INVALID, "1 to %u asks in flight, not %u", 1u << 20, bound);
    a = calloc(1, sizeof(*a));
    if (!a)
        return fl_fail(err, FL_EXHAUSTED, "no memory for asks");
    a->f = f;
    a->bound = bound;
    a->done_end = &a->done;
    a->ring.next = a->ring.prev = &a->ring;
    pthread_mutex_init(&a->mu, NULL);
    client_cond_init(&a->came);
    *out = a;
    return FL_OK;
}

enum fl_status furlong_asks_start(struct furlong_asks *a, struct furlong_peer *p, uint32_t lane,
                                  const char *method, const struct furlong_data *what,
                                  uint32_t budget_ms, uint64_t tag, struct fl_err *err)
{
    struct asks_one *one;
    enum fl_status st;
    bool full;

    FL_TRY(client_here(a->f, err));
    one = calloc(1, sizeof(*one));
    if (!one)
        return fl_fail(err, FL_EXHAUSTED, "%s: no memory for one more ask", p->name);
    st = client_ask_pack(&one->ask, p, lane, method, what, err);
    pthread_mutex_lock(&a->mu);
    full = st == FL_OK && a->n >= a->bound;
    a->n += st == FL_OK && !full;
    pthread_mutex_unlock(&a->mu);
    if (st != FL_OK || full) {
        free(one->ask.body);
        free(one);
        return st != FL_OK
                   ? st
                   : fl_fail(err, FL_AGAIN, "%u asks are in flight or wait to be taken", a->bound);
    }
    one->ask.done = one_done;
    one->of = a;
    one->tag = tag;
    one->budget_ms = budget_ms;
    (void)FL_COPY(one->method, method);
    one->start.run = one_start;
    fl_post(a->f->loop, &one->start);
    return FL_OK;
}

static void one_hand_over(struct asks_one *one, struct furlong_done *out)
{
    *out = (struct furlong_done){
        .tag = one->tag, .status = one->ask.st, .err = one->ask.err, .answer = one->ask.answer
    };
    if (out->status != FL_OK)
        fl_wrap(&out->err, out->status, "%s", one->method);
    free(one);
}

enum fl_status furlong_asks_next(struct furlong_asks *a, uint32_t wait_ms, struct furlong_done *out,
                                 struct fl_err *err)
{
    struct timespec until = client_until(wait_ms);
    bool late = wait_ms == 0;
    struct asks_one *one;
    uint32_t left;

    FL_TRY(client_here(a->f, err));
    pthread_mutex_lock(&a->mu);
    while (!a->done && a->n && !late)
        late = !client_cond_wait(&a->came, &a->mu, wait_ms, &until);
    one = a->done;
    left = a->n;
    if (one) {
        a->done = one->next;
        if (!a->done)
            a->done_end = &a->done;
        a->n--;
    }
    pthread_mutex_unlock(&a->mu);
    if (!one && left == 0)
        return fl_fail(err, FL_NOT_FOUND, "no ask is in flight");
    if (!one)
        return fl_fail(err, FL_AGAIN, "none of %u asks came back in %u ms", left, wait_ms);
    one_hand_over(one, out);
    return FL_OK;
}

struct asks_ending {
    struct client_sync sync;
    struct furlong_asks *a;
};

static void asks_cancel(struct client_sync *s)
{
    struct furlong_asks *a = container_of(s, struct asks_ending, sync)->a;
    struct asks_one *one, *next;

    for (one = a->ring.next; one != &a->ring; one = next) {
        next = one->next;
        client_ask_cancel(&one->ask);
    }
    /* not before: the end of the last one would let a go while it is still read here */
    a->ending = s;
    asks_end_if_empty(a);
}

void furlong_asks_destroy(struct furlong_asks *a)
{
    struct asks_ending e = { .a = a };
    struct furlong_done done;

    if (!a || client_here(a->f, NULL) != FL_OK)
        return;
    client_sync_run(a->f->loop, &e.sync, asks_cancel, NULL);
    while (furlong_asks_next(a, 0, &done, NULL) == FL_OK)
        furlong_answer_free(&done.answer);
    pthread_cond_destroy(&a->came);
    pthread_mutex_destroy(&a->mu);
    free(a);
}
