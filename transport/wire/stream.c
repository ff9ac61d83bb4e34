#include "transport/wire/stream_priv.h"
#include <assert.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/id.h"
#include "common/base/str.h"

enum { FLUSH_BYTES = 16 << 20, KEY_FILE_MAX = 4096 };

static void attempt(struct wire_stream *w);

/* ---- the end of a stream */

static void reap(struct fl_task *t)
{
    struct wire_stream *w = container_of(t, struct wire_stream, reap);

    assert(!w->reading && !w->flushing);
    if (w->s.user && w->s.user->closed)
        w->s.user->closed(&w->s, &w->why);
    wire_in_fini(&w->in);
    wire_out_clear(&w->out);
    fl_task_cancel(w->s.loop, &w->flush);
    free(w->target);
    explicit_bzero(w->key, sizeof(w->key));
    free(w);
}

static void line_drop(struct wire_stream *w)
{
    struct wire_line *k = w->line;

    w->line = NULL;
    w->blocked = false;
    if (k)
        k->ops->drop(k);
    wire_in_stop(&w->in);
    if (w->reading)
        w->in_dirty = true;
    else
        wire_in_fini(&w->in);
}

static void gone(struct wire_stream *w, const struct fl_err *why)
{
    if (w->state == WIRE_GONE)
        return;
    if (w->state == WIRE_LEAVING)
        fl_loop_release(w->s.loop);
    w->state = WIRE_GONE;
    if (why != &w->why)
        w->why = *why;
    fl_timer_cancel(&w->due);
    line_drop(w);
    wire_server_left(w);
    fl_defer(w->s.loop, &w->reap);
    wire_out_clear(&w->out); /* late: what it frees may call back */
    w->s.queued_bytes = 0;
}

/* ---- connections come and go */

static bool is_final(enum fl_status st)
{
    return st == FL_DENIED || st == FL_STALE || st == FL_UNSUPPORTED || st == FL_INVALID;
}

static void again(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    attempt(container_of(t, struct wire_stream, due));
}

/* Half of it is left to chance, so that all daemons of a head do not come back at once. */
static unsigned again_after_ms(struct wire_stream *w)
{
    uint16_t dice = 0;
    unsigned ms = w->again_ms ? w->again_ms : WIRE_AGAIN_MIN_MS;

    w->again_ms = ms * 2 > WIRE_AGAIN_MAX_MS ? WIRE_AGAIN_MAX_MS : ms * 2;
    (void)fl_random(&dice, sizeof(dice), NULL); /* else all wait equally long */
    return ms - ms / 2 * dice / UINT16_MAX;
}

void wire_stream_break(struct wire_stream *w, const struct fl_err *why)
{
    struct fl_err kept = *why;

    if (w->state == WIRE_GONE)
        return;
    if (w->state == WIRE_LEAVING) {
        gone(w, &w->why);
        return;
    }
    if (!w->to.again || is_final(why->status)) {
        gone(w, &kept);
        return;
    }
    w->state = WIRE_WAITING;
    line_drop(w);
    w->full = false;
    w->due.fire = again;
    fl_timer_arm_in(w->s.loop, &w->due, again_after_ms(w));
    wire_out_clear(&w->out);
    w->s.queued_bytes = 0;
    if (w->state != WIRE_WAITING || w->told_lost)
        return; /* once for each time, however many attempts fail */
    w->told_lost = true;
    if (w->s.user && w->s.user->lost)
        w->s.user->lost(&w->s, &kept);
}

static void too_late(struct fl_timer *t, uint64_t now_ns)
{
    struct wire_stream *w = container_of(t, struct wire_stream, due);
    struct fl_err why;

    (void)now_ns;
    fl_fail(&why, FL_TIMEOUT, "%s: %s within %u ms", w->name,
            w->state == WIRE_DIALLING ? "no connection" : "HELLO did not end",
            w->to.connect_ms ? w->to.connect_ms : WIRE_CONNECT_MS);
    wire_stream_refuse(w, &why);
}

static void attempt(struct wire_stream *w)
{
    const struct wire_carrier *c = w->s.ops->carrier;
    struct fl_err err = { 0 };

    w->state = WIRE_DIALLING;
    w->step = 0;
    w->due.fire = too_late;
    fl_timer_arm_in(w->s.loop, &w->due, w->to.connect_ms ? w->to.connect_ms : WIRE_CONNECT_MS);
    if (c->dial(w->s.loop, &w->to, &wire_stream_line, w, &w->line, &err) != FL_OK)
        wire_stream_break(w, &err);
}

void wire_stream_opened(struct wire_stream *w)
{
    struct stream_server *server = w->server;

    w->state = WIRE_OPEN;
    w->was_open = true;
    w->told_lost = false;
    w->again_ms = 0;
    w->in.in_hello = false;
    fl_timer_cancel(&w->due);
    wire_server_left(w);
    if (server && w->peer.role[0]) {
        size_t n = strlen(w->name);

        snprintf(w->name + n, sizeof(w->name) - n, " (%s)", w->peer.role);
    }
    if (server) {
        server->accepted(server->arg, &w->s);
        if (!w->s.user && w->state == WIRE_OPEN)
            wire_close(&w->s, NULL); /* nobody took it */
    }
    if (w->state == WIRE_OPEN && w->s.user && w->s.user->opened)
        w->s.user->opened(&w->s, &w->peer);
}

/* ---- out */

static void flush(struct wire_stream *w)
{
    size_t budget = FLUSH_BYTES;
    struct fl_err err = { 0 };

    if (w->flushing)
        return;
    w->flushing = true;
    while (w->line && !w->blocked && budget && !wire_out_empty(&w->out)) {
        struct iovec iov[LINE_IOV];
        const int *fds;
        unsigned n, n_fds;
        size_t wrote = 0;
        enum fl_status st = wire_out_next(&w->out, iov, LINE_IOV, &n, &fds, &n_fds, &err);

        if (st == FL_OK)
            st = FL_FAULT("wire.send")
                     ? fl_fail_errno(&err, "send")
                     : w->line->ops->write(w->line, iov, n, fds, n_fds, &wrote, &err);
        if (st == FL_AGAIN) {
            w->blocked = true;
        } else if (st != FL_OK) {
            fl_wrap(&err, st, "%s", w->name);
            wire_stream_break(w, &err);
        } else {
            budget -= wrote < budget ? wrote : budget;
            wire_out_gone(&w->out, wrote);
            w->s.queued_bytes = w->out.queued_bytes;
        }
    }
    w->flushing = false;
    if (w->line && !budget && !wire_out_empty(&w->out))
        fl_defer(w->s.loop, &w->flush); /* the others have their turn first */
    if (w->state == WIRE_LEAVING && wire_out_empty(&w->out))
        gone(w, &w->why);
    if (w->state == WIRE_OPEN && w->full && w->s.queued_bytes <= w->s.bound_bytes / 2) {
        w->full = false;
        if (w->s.user && w->s.user->drained)
            w->s.user->drained(&w->s);
    }
}

static void flush_task(struct fl_task *t)
{
    flush(container_of(t, struct wire_stream, flush));
}

enum fl_status wire_stream_put(struct wire_stream *w, const struct wire_msg *m, struct fl_err *err)
{
    FL_TRY(wire_out_put(&w->out, m, err));
    w->s.queued_bytes = w->out.queued_bytes;
    fl_defer(w->s.loop, &w->flush);
    return FL_OK;
}

enum fl_status wire_send(struct stream *s, const struct wire_msg *m, struct fl_err *err)
{
    struct wire_stream *w = wire_stream_of(s);
    const struct wire_head *h = &m->head;
    enum fl_status st;

    if (w->state == WIRE_LEAVING || w->state == WIRE_GONE || w->told_lost)
        return fl_fail(err, FL_UNREACHABLE, "%s: there is no connection", w->name);
    if (w->state != WIRE_OPEN)
        return fl_fail(err, FL_AGAIN, "%s: not connected yet", w->name);
    if (h->body_bytes > WIRE_MAX_BODY || h->n_fds > WIRE_MAX_FDS || h->blob_bytes > INT64_MAX)
        return fl_fail(
            err, FL_INVALID,
            "%s: a message of %u bytes, %llu of blob and %u descriptors; at most %d bytes "
            "and %d descriptors go, bulk belongs into the blob",
            w->name, h->body_bytes, (unsigned long long)h->blob_bytes, h->n_fds, WIRE_MAX_BODY,
            WIRE_MAX_FDS);
    if (h->n_fds && !(stream_caps(s) & STREAM_FDS))
        return fl_fail(err, FL_UNSUPPORTED, "%s carries no descriptors", w->name);
    if ((h->kind == WIRE_REQUEST || h->kind == WIRE_EVENT) && s->queued_bytes >= s->bound_bytes) {
        w->full = true;
        return fl_fail(err, FL_AGAIN, "%s: %zu bytes wait to leave", w->name, s->queued_bytes);
    }
    st = wire_stream_put(w, m, err);
    return st == FL_OK ? FL_OK : fl_wrap(err, st, "%s", w->name);
}

static void put_bye(struct wire_stream *w, const struct fl_err *why)
{
    uint8_t body[WIRE_REASON_MAX];
    struct wire_msg m = { .head = { .kind = WIRE_BYE }, .body = body };

    m.head.body_bytes = (uint32_t)wire_reason_write(body, why);
    (void)wire_stream_put(w, &m, NULL); /* the hang-up says it too, with less words */
}

static void lingered(struct fl_timer *t, uint64_t now_ns)
{
    struct wire_stream *w = container_of(t, struct wire_stream, due);

    (void)now_ns;
    gone(w, &w->why);
}

static void leave(struct wire_stream *w, const struct fl_err *why)
{
    put_bye(w, why);
    if (why != &w->why)
        w->why = *why;
    w->state = WIRE_LEAVING;
    wire_in_stop(
        &w->in); /* read on, so that the peer can read what we still say, but listen no more */
    fl_loop_hold(w->s.loop); /* until all has left, or for as long as it lingers */
    w->due.fire = lingered;
    fl_timer_arm_in(w->s.loop, &w->due, WIRE_LINGER_MS);
}

void wire_stream_refuse(struct wire_stream *w, const struct fl_err *why)
{
    bool told = w->line && (w->state == WIRE_GREETING || w->state == WIRE_OPEN);

    if (told && (!w->to.again || is_final(why->status))) {
        leave(w, why);
        return;
    }
    if (told)
        put_bye(w, why);
    flush(w);
    wire_stream_break(w, why);
}

void wire_close(struct stream *s, const struct fl_err *why)
{
    struct wire_stream *w = wire_stream_of(s);
    bool open = w->state == WIRE_OPEN && w->line;
    struct fl_err done = { .status = FL_OK, .text = "closed" };

    if (w->state == WIRE_LEAVING || w->state == WIRE_GONE)
        return;
    why = why ? why : &done;
    if (!open) {
        gone(w, why);
        return;
    }
    leave(w, why);
}

/* ---- in */

static void hung_up(struct wire_stream *w, const struct wire_msg *m)
{
    struct fl_err said, why;
    enum fl_status st = wire_reason_read(m->body, m->head.body_bytes, &said, &why);

    if (st != FL_OK) {
        fl_wrap(&why, st, "%s", w->name);
        wire_stream_break(w, &why);
        return;
    }
    why = said;
    fl_wrap(&why, said.status == FL_OK ? FL_UNREACHABLE : said.status, "%s %s", w->name,
            w->state == WIRE_OPEN ? "hung up" : "refuses");
    wire_stream_break(w, &why);
}

static enum fl_status on_message(void *arg, const struct wire_msg *m, struct fl_err *err)
{
    struct wire_stream *w = arg;

    if (m->head.kind == WIRE_BYE) {
        hung_up(w, m);
        return FL_OK;
    }
    if (w->state == WIRE_GREETING)
        return wire_greet(w, m, err);
    if (w->s.user && w->s.user->message)
        w->s.user->message(&w->s, m);
    return FL_OK;
}

static void *on_room(void *arg, const struct wire_head *h)
{
    struct wire_stream *w = arg;

    return w->state == WIRE_OPEN && w->s.user && w->s.user->room ? w->s.user->room(&w->s, h) : NULL;
}

/* One read. FL_AGAIN: nothing is left for now. */
static enum fl_status take(struct wire_stream *w, struct fl_err *err)
{
    struct iovec iov[WIRE_IN_IOV];
    int n, fds[LINE_FDS];
    unsigned n_fds = 0;
    size_t got = 0, room = 0;
    enum fl_status st;

    FL_TRY(wire_in_iov(&w->in, iov, &n, err));
    if (FL_FAULT("wire.recv"))
        return fl_fail_errno(err, "receive");
    FL_TRY(w->line->ops->read(w->line, iov, (unsigned)n, fds, &n_fds, &got, err));
    for (int i = 0; i < n; i++)
        room += iov[i].iov_len;
    st = wire_in_got(&w->in, got, fds, n_fds, err);
    return st == FL_OK && got < room ? FL_AGAIN : st;
}

static void line_ready(void *arg, unsigned what)
{
    struct wire_stream *w = arg;
    enum fl_status st = FL_OK;
    struct fl_err err = { 0 };

    if (what & LINE_OUT) {
        w->blocked = false;
        flush(w);
    }
    if (!(what & LINE_IN) || !w->line || w->reading)
        return;
    w->reading = true;
    for (unsigned i = 0; i < WIRE_READS && st == FL_OK && w->line; i++)
        st = take(w, &err);
    if (st != FL_OK && st != FL_AGAIN) {
        fl_wrap(&err, st, "%s", w->name);
        if (st == FL_UNREACHABLE)
            wire_stream_break(w, &err);
        else
            wire_stream_refuse(w, &err);
    }
    w->reading = false;
    if (w->in_dirty) {
        w->in_dirty = false;
        wire_in_fini(&w->in);
    }
}

static void line_up(void *arg)
{
    struct wire_stream *w = arg;
    struct fl_err err = { 0 };

    w->state = WIRE_GREETING;
    if (wire_greet_start(w, &err) != FL_OK)
        wire_stream_break(w, &err);
}

static void line_down(void *arg, const struct fl_err *why)
{
    wire_stream_break(arg, why);
}

const struct line_user wire_stream_line = { .up = line_up, .ready = line_ready, .down = line_down };

/* ---- the face */

enum fl_status wire_stream_create(struct fl_loop *l, const struct stream_ops *ops,
                                  const struct wire_hello *me, struct wire_stream **out,
                                  struct fl_err *err)
{
    struct wire_stream *w = FL_FAULT("wire.stream") ? NULL : calloc(1, sizeof(*w));

    if (!w)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a stream");
    w->s = (struct stream){ .ops = ops, .loop = l, .bound_bytes = WIRE_BOUND };
    w->flush.run = flush_task;
    w->reap.run = reap;
    w->in.arg = w;
    w->in.room = on_room;
    w->in.message = on_message;
    wire_in_init(&w->in);
    if (me)
        w->me = *me;
    *out = w;
    return FL_OK;
}

enum fl_status wire_key_load(const struct stream_to *to, uint8_t key[WIRE_KEY_MAX], size_t *len,
                             struct fl_err *err)
{
    char *text = NULL;
    const void *from = to->key.data;
    size_t n = to->key.len;
    enum fl_status st = FL_OK;

    if (to->key_path) {
        FL_TRY(fl_file_read(to->key_path, KEY_FILE_MAX, &text, &n, err));
        while (n && isspace((unsigned char)text[n - 1]))
            n--;
        from = text;
    }
    if (n > WIRE_KEY_MAX || (to->key_path && !n))
        st = fl_fail(err, FL_INVALID, "the key%s%s has %zu bytes, it must have 1 to %d",
                     to->key_path ? " in " : "", to->key_path ? to->key_path : "", n, WIRE_KEY_MAX);
    else if (n)
        memcpy(key, from, n);
    if (text)
        explicit_bzero(text, n);
    free(text);
    if (st == FL_OK)
        *len = n;
    return st;
}

enum fl_status stream_connect(struct fl_loop *l, const struct stream_ops *kind,
                              const struct stream_to *to, const struct wire_hello *me,
                              const struct stream_user *user, void *arg, struct stream **out,
                              struct fl_err *err)
{
    struct wire_stream *w;
    enum fl_status st = wire_stream_create(l, kind, me, &w, err);

    if (st != FL_OK)
        return st;
    w->to = *to;
    w->to.key_path = NULL;
    w->to.key.data = w->key;
    w->to.target = w->target = strdup(to->target ? to->target : "");
    st = w->target ? wire_key_load(to, w->key, &w->to.key.len, err)
                   : fl_fail(err, FL_EXHAUSTED, "no memory for a target");
    snprintf(w->name, sizeof(w->name), "%s", w->target ? w->target : "");
    w->state = WIRE_DIALLING;
    w->due.fire = too_late;
    if (st == FL_OK)
        st = kind->carrier->dial(l, &w->to, &wire_stream_line, w, &w->line, err);
    if (st != FL_OK) {
        free(w->target);
        explicit_bzero(w->key, sizeof(w->key));
        free(w);
        return st;
    }
    w->s.user = user;
    w->s.user_arg = arg;
    fl_timer_arm_in(l, &w->due, w->to.connect_ms ? w->to.connect_ms : WIRE_CONNECT_MS);
    *out = &w->s;
    return FL_OK;
}

void stream_tell_drained(struct stream *s)
{
    struct wire_stream *w = wire_stream_of(s);

    w->full = true;
    fl_defer(s->loop, &w->flush);
}

unsigned stream_caps(const struct stream *s)
{
    const struct wire_stream *w = wire_stream_of((struct stream *)(uintptr_t)s);

    return w->line ? w->line->caps : 0;
}

const struct wire_hello *stream_peer(const struct stream *s)
{
    const struct wire_stream *w = wire_stream_of((struct stream *)(uintptr_t)s);

    return w->state == WIRE_OPEN ? &w->peer : NULL;
}

const char *stream_name(const struct stream *s)
{
    return wire_stream_of((struct stream *)(uintptr_t)s)->name;
}

void stream_forget_room(struct stream *s, const void *room)
{
    wire_in_forget(&wire_stream_of(s)->in, room);
}
