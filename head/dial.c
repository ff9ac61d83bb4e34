/* A node that joins is dialled at the address that it gives: what cannot be reached there now would
 * not be reached by its peers later, when a model has been loaded and NCCL waits without a word.
 * The daemon listens there for as long as its join is under way, and its HELLO says which node
 * answers. */
#include <stdio.h>
#include <stdlib.h>

#include "common/base/addr.h"
#include "common/base/log.h"
#include "head/state.h"

enum { DIAL_MS = 4000 };

struct dial {
    struct dial *prev, *next;
    struct head *head;
    struct stream *s;        /* NULL: it has ended */
    const struct uplink *up; /* compared, never followed: it may have ended meanwhile */
    struct fl_node_ref who;
    struct call_req *req;
    Fl__JoinRequest *join;
    char from[64]; /* where the daemon's own connection came from */
    struct fl_task end;
    struct fl_err why;
};

static void dial_free(struct dial *d)
{
    DL_DELETE(d->head->dials, d);
    fl_task_cancel(d->head->loop, &d->end);
    free_msg(d->join);
    free(d);
}

/* In a turn of its own: what follows may end the stream that is being told of. */
static void on_end(struct fl_task *t)
{
    struct dial *d = container_of(t, struct dial, end);
    struct head *h = d->head;
    struct uplink *u = uplink_find(h, d->up, &d->who);

    if (d->s) {
        d->s->user = NULL;
        stream_close(d->s, NULL);
        d->s = NULL;
    }
    if (!u) {
        struct fl_err gone;

        fl_fail(&gone, FL_UNREACHABLE, "the daemon has gone");
        call_fail(d->req, &gone);
    } else if (d->why.status == FL_OK) {
        join_settle(u, d->req, d->join);
    } else {
        fl_warn("node is refused why=\"%s\"", d->why.text);
        call_fail(d->req, &d->why);
    }
    dial_free(d);
}

static void over(struct dial *d)
{
    fl_post(d->head->loop, &d->end);
}

static void on_opened(struct stream *s, const struct wire_hello *peer)
{
    struct dial *d = s->user_arg;

    if (!FL_SAME(peer->node.id, d->who.id))
        fl_fail(
            &d->why, FL_INVALID,
            "at %s, the address of node %.63s, another node answers: two hosts have that address; "
            "give this one another with --node-ip-address (it came from %s)",
            d->join->address, d->join->name, d->from);
    over(d);
}

static void on_closed(struct stream *s, const struct fl_err *why)
{
    struct dial *d = s->user_arg;

    d->s = NULL;
    if (d->end.queued) /* it had answered */
        return;
    fl_fail(&d->why, FL_INVALID,
            "node %.40s gives the address %s, where the head at %s does not reach it (%.90s): give "
            "one that "
            "head and nodes reach with --node-ip-address; it came from %s",
            d->join->name, d->join->address, d->head->node_ip, why->text, d->from);
    over(d);
}

static const struct stream_user user = { .opened = on_opened, .closed = on_closed };

/* "10.77.0.2:41234 (node)" to its address */
static void address_of(const char *name, char *out, size_t cap)
{
    const char *end = name[0] == '[' ? strchr(name, ']') : strchr(name, ':');
    size_t n = end ? (size_t)(end - name) - (name[0] == '[') : 0;

    snprintf(out, cap, "%.*s", (int)n, name + (name[0] == '['));
}

enum fl_status dial_back(struct uplink *u, struct call_req *req, const Fl__JoinRequest *m,
                         struct fl_err *err)
{
    struct head *h = uplink_head(u);
    struct wire_hello me = head_hello(h);
    char target[96];
    struct stream_to to = { .target = target,
                            .key = { h->token, strlen(h->token) },
                            .tls = h->cfg.tls,
                            .connect_ms = DIAL_MS };

    if (fl_addr_is_loopback(m->address) && !fl_addr_is_loopback(h->node_ip))
        return fl_fail(
            err, FL_INVALID,
            "node %.63s gives the address %s, which is this or that host to each that dials it, "
            "and the head at %s serves other hosts: give an address of its own with "
            "--node-ip-address",
            m->name, m->address, h->node_ip);
    if (!m->has_dial_port || m->dial_port == 0 || m->dial_port > UINT16_MAX) {
        join_settle(u, req, m);
        return FL_OK;
    }
    struct dial *d = must(calloc(1, sizeof(*d)));

    *d = (struct dial){
        .head = h, .up = u, .who = uplink_who(u), .req = req, .join = copy_msg(m), .end.run = on_end
    };
    address_of(uplink_from(u), d->from, sizeof(d->from));
    DL_APPEND(h->dials, d);
    snprintf(target, sizeof(target), strchr(m->address, ':') ? "[%s]:%u" : "%s:%u", m->address,
             m->dial_port);
    if (stream_connect(h->loop, &stream_sock, &to, &me, &user, d, &d->s, err) != FL_OK) {
        dial_free(d);
        return err->status;
    }
    return FL_OK;
}

void dials_end(struct head *h)
{
    while (h->dials) {
        struct dial *d = h->dials;
        struct fl_err ends;

        if (d->s) {
            d->s->user = NULL;
            stream_close(d->s, NULL);
        }
        fl_fail(&ends, FL_UNREACHABLE, "the head ends");
        call_fail(d->req, &ends);
        dial_free(d);
    }
}
