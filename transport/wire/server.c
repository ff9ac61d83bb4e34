#include <stdlib.h>
#include <stdio.h>
#include <string.h>

#include "transport/wire/stream_priv.h"

void wire_server_left(struct wire_stream *w)
{
    struct stream_server *s = w->server;

    if (!s)
        return;
    w->server = NULL;
    if (w->prev)
        w->prev->next = w->next;
    else
        s->greeting = w->next;
    if (w->next)
        w->next->prev = w->prev;
    w->prev = w->next = NULL;
    if (s->n_greeting-- == WIRE_GREETINGS)
        s->port->ops->pause(s->port, false);
    if (w->state == WIRE_GONE && s->at.refused)
        s->at.refused(s->arg, &w->why);
}

static void too_late(struct fl_timer *t, uint64_t now_ns)
{
    struct wire_stream *w = container_of(t, struct wire_stream, due);
    struct fl_err why;

    (void)now_ns;
    fl_fail(&why, FL_TIMEOUT, "%s: HELLO did not end within %u ms", w->name, w->to.connect_ms);
    wire_stream_refuse(w, &why);
}

static void arrived(void *arg, struct wire_line *k)
{
    struct stream_server *s = arg;
    struct wire_stream *w;

    if (wire_stream_create(s->loop, s->ops, &s->me, &w, NULL) != FL_OK) {
        k->ops->drop(k); /* it will try again, and so may we have memory then */
        return;
    }
    w->line = k;
    k->user = &wire_stream_line;
    k->arg = w;
    w->server = s;
    w->to.connect_ms = s->at.connect_ms ? s->at.connect_ms : WIRE_CONNECT_MS;
    w->state = WIRE_GREETING;
    snprintf(w->name, sizeof(w->name), "%s", k->peer[0] ? k->peer : s->port->at);
    w->next = s->greeting;
    if (w->next)
        w->next->prev = w;
    s->greeting = w;
    w->due.fire = too_late;
    fl_timer_arm_in(s->loop, &w->due, w->to.connect_ms);
    if (++s->n_greeting == WIRE_GREETINGS)
        s->port->ops->pause(s->port, true); /* the next ones wait in the kernel */
}

enum fl_status stream_listen(struct fl_loop *l, const struct stream_ops *kind,
                             const struct stream_to *at, const struct wire_hello *me,
                             void (*accepted)(void *arg, struct stream *s_take), void *arg,
                             struct stream_server **out, struct fl_err *err)
{
    struct stream_server *s = calloc(1, sizeof(*s));
    enum fl_status st;

    if (!s)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a server");
    *s = (struct stream_server){
        .loop = l, .ops = kind, .at = *at, .accepted = accepted, .arg = arg
    };
    if (me)
        s->me = *me;
    s->at.key_path = NULL;
    s->at.key.data = s->key;
    st = wire_key_load(at, s->key, &s->at.key.len, err);
    if (st == FL_OK)
        st = kind->carrier->listen(l, at, s->at.key.len || at->key_of || at->tls, arrived, s,
                                   &s->port, err);
    s->at.target = NULL; /* the caller's */
    if (st != FL_OK) {
        explicit_bzero(s->key, sizeof(s->key));
        free(s);
        return st;
    }
    *out = s;
    return FL_OK;
}

const char *stream_server_at(const struct stream_server *s)
{
    return s->port->at;
}

void stream_server_term(struct stream_server *s, const struct fl_term *term)
{
    s->me.term = *term;
}

void stream_server_destroy(struct stream_server *s)
{
    struct fl_err why;

    if (!s)
        return;
    fl_fail(&why, FL_UNREACHABLE, "the server ends");
    s->at.refused = NULL;
    while (s->greeting) {
        struct wire_stream *w = s->greeting;

        wire_stream_refuse(w, &why);
        wire_server_left(w); /* it lingers on its own */
    }
    s->port->ops->close(s->port);
    explicit_bzero(s->key, sizeof(s->key));
    free(s);
}
