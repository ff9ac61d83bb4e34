#include <stdlib.h>
#include <unistd.h>
#define HASH_NONFATAL_OOM 1
#include <uthash.h>
#include "common/base/fault.h"
#include "common/base/id.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "worker/client/peers_priv.h"

struct wire_hello client_hello(const struct furlong *f)
{
    struct wire_hello h = { .seat = f->seat.who, .node = f->seat.at, .role = "worker" };

    (void)FL_COPY(h.build, FURLONG_VERSION);
    return h;
}

/* ---- streams that we open ------------------------------------------------------------------- */
struct client_conn {
    struct client_line line; /* first */
    struct client_where at;
    struct call_peer *call;
    struct client_conn_user *users;
    struct client_conn *next;
    bool open, over_unix;
    unsigned unix_tries;
};
enum { UNIX_TRIES = 3 };

static enum fl_status conn_dial(struct client_conn *c, struct fl_err *err);

static void conn_unlink(struct client_conn *c)
{
    for (struct client_conn **at = &c->line.f->peers->conns; *at; at = &(*at)->next) {
        if (*at == c) {
            *at = c->next;
            return;
        }
    }
}

/* Each user hears it, also those that others drop meanwhile; then c is gone. */
static void conn_end(struct client_conn *c, const struct fl_err *why)
{
    struct call_peer *call = FL_TAKE(c->call);

    conn_unlink(c);
    c->line.f->peers->ending = true;
    call_peer_destroy(call); /* what is in flight comes back first */
    c->line.f->peers->ending = false;
    while (c->users) {
        struct client_conn_user *u = c->users;

        c->users = u->next;
        u->conn = NULL;
        u->closed(u, why);
    }
    free(c);
}

/* Any of them may drop itself or others on the way, so the list is walked from its start each
 * time. */
static void users_tell(struct client_conn *c, void (*tell)(struct client_conn_user *u))
{
    struct client_conn_user *u;

    for (u = c->users; u; u = u->next)
        u->told = false;
    do {
        for (u = c->users; u && u->told; u = u->next)
            ;
        if (u) {
            u->told = true;
            tell(u);
        }
    } while (u);
}

static void user_opened(struct client_conn_user *u)
{
    u->opened(u, u->conn->call);
}

static void user_ready(struct client_conn_user *u)
{
    if (u->ready)
        u->ready(u);
}

static void conn_opened(void *service, const struct wire_hello *peer)
{
    struct client_conn *c = service;

    (void)peer;
    c->open = true;
    users_tell(c, user_opened);
}

static void conn_ready(void *service)
{
    users_tell(service, user_ready);
}

static void conn_closed(void *service, const struct fl_err *why)
{
    struct client_conn *c = service;
    struct fl_err err = { 0 };

    /* Another mount or user namespace; or a full backlog, which is over in a moment: tcp is for
     * good, and carries no descriptors. */
    if (!c->open && c->over_unix && *c->at.tcp) {
        call_peer_destroy(FL_TAKE(c->call));
        c->over_unix = ++c->unix_tries < UNIX_TRIES;
        if (conn_dial(c, &err) == FL_OK)
            return;
    } else if (why) {
        err = *why;
    }
    if (err.status == FL_OK)
        fl_fail(&err, FL_UNREACHABLE, "it hung up");
    fl_wrap(&err, err.status, "%s", c->at.name);
    conn_end(c, &err);
}

static const struct call_life conn_life = {
    .opened = conn_opened, .closed = conn_closed, .ready = conn_ready, .other = client_calls_other
};

static enum fl_status conn_dial(struct client_conn *c, struct fl_err *err)
{
    struct furlong *f = c->line.f;
    char target[160];
    struct fl_str text = FL_STR_ON(target);
    struct wire_hello me = client_hello(f);
    struct stream_to to = { .target = target,
                            .key = { f->seat.key, sizeof(f->seat.key) },
                            .tls = f->seat.tls,
                            .connect_ms = CLIENT_CONNECT_MS };
    struct stream *s;
    enum fl_status st;

    me.want = c->at.who;
    fl_str_add(&text, "%s%s", c->over_unix ? "unix:" : "",
               c->over_unix ? c->at.unix_path : c->at.tcp);
    FL_TRY(stream_connect(f->loop, &stream_sock, &to, &me, NULL, NULL, &s, err));
    st = FL_FAULT("client.conn")
             ? fl_fail(err, FL_EXHAUSTED, "no memory for calls to %s", c->at.name)
             : call_peer_create(s, client_methods, FL_LEN(client_methods), &conn_life, c, &c->call,
                                err);
    if (st != FL_OK)
        stream_close(s, NULL);
    return st;
}

static bool same_machine(const struct furlong *f, const struct client_where *w)
{
    return *f->seat.boot_id && strcmp(f->seat.boot_id, w->boot_id) == 0 && *w->unix_path &&
           access(w->unix_path, R_OK | W_OK) == 0;
}

enum fl_status client_conn_use(struct furlong *f, const struct client_where *where,
                               struct client_conn_user *u, struct fl_err *err)
{
    struct client_conn *c = f->peers->conns;
    enum fl_status st;

    u->f = f;
    while (c && !fl_seat_ref_same(&c->at.who, &where->who))
        c = c->next;
    if (!c) {
        c = calloc(1, sizeof(*c));
        if (!c)
            return fl_fail(err, FL_EXHAUSTED, "no memory for a stream to %s", where->name);
        *c = (struct client_conn){ .line.f = f, .at = *where, .over_unix = same_machine(f, where) };
        st = conn_dial(c, err);
        if (st != FL_OK) {
            free(c);
            return fl_wrap(err, st, "connect to %s", where->name);
        }
        c->next = f->peers->conns;
        f->peers->conns = c;
    }
    u->conn = c;
    u->next = c->users;
    c->users = u;
    if (c->open)
        u->opened(u, c->call);
    return FL_OK;
}

void client_conn_drop(struct client_conn_user *u)
{
    if (!u->conn)
        return;
    for (struct client_conn_user **at = &u->conn->users; *at; at = &(*at)->next) {
        if (*at != u)
            continue;
        *at = u->next;
        break;
    }
    u->conn = NULL;
}

void client_conn_gone(struct furlong *f, struct fl_seat_ref who, const struct fl_err *why)
{
    struct client_conn *c = f->peers ? f->peers->conns : NULL;

    while (c && !fl_seat_ref_same(&c->at.who, &who))
        c = c->next;
    if (c)
        conn_end(c, why);
}

void client_conn_break(struct furlong *f, struct call_peer *call, const struct fl_err *why)
{
    for (struct client_conn *c = f->peers->conns; c; c = c->next) {
        if (c->call != call)
            continue;
        conn_end(c, why);
        return;
    }
}

/* ---- streams that others open --------------------------------------------------------------- */
struct client_guest {
    struct client_line line; /* first */
    struct call_peer *call;
    struct client_guest *next, **at;
};
struct client_seen { /* the highest attempt of each seat that called us */
    struct fl_worker_id id;
    uint32_t attempt;
    UT_hash_handle hh;
};

static void guest_end(struct client_guest *g)
{
    *g->at = g->next;
    if (g->next)
        g->next->at = g->at;
    g->line.f->peers->n_guests--;
    call_peer_destroy(g->call);
    free(g);
}

static void guest_closed(void *service, const struct fl_err *why)
{
    (void)why;
    guest_end(service);
}

static const struct call_life guest_life = { .closed = guest_closed, .other = client_calls_other };

static void guest_accepted(void *arg, struct stream *s)
{
    struct furlong *f = arg;
    struct client_guest *g = NULL;
    struct fl_err err;

    if (f->peers->n_guests >= CLIENT_GUESTS_MAX)
        fl_fail(&err, FL_EXHAUSTED, "%s has %d callers already", f->seat.name, CLIENT_GUESTS_MAX);
    else if (FL_FAULT("client.guest") || !(g = calloc(1, sizeof(*g))))
        fl_fail(&err, FL_EXHAUSTED, "%s has no memory for one more caller", f->seat.name);
    if (!g) {
        stream_close(s, &err);
        return;
    }
    g->line.f = f;
    if (call_peer_create(s, client_methods, FL_LEN(client_methods), &guest_life, g, &g->call,
                         &err) != FL_OK) {
        stream_close(s, &err);
        free(g);
        return;
    }
    f->peers->n_guests++;
    g->next = f->peers->guests;
    g->at = &f->peers->guests;
    if (g->next)
        g->next->at = &g->next;
    f->peers->guests = g;
}

/* A process whose seat was given on may still run, and believe that it is the one. */
static enum fl_status guest_admit(void *arg, const struct wire_hello *peer, struct fl_err *err)
{
    struct furlong *f = arg;
    struct client_seen *seen;

    if (strcmp(peer->role, "worker") != 0)
        return fl_fail(err, FL_DENIED, "%s takes calls of workers, not of a %.15s", f->seat.name,
                       peer->role);
    HASH_FIND(hh, f->peers->seen, &peer->seat.id, sizeof(peer->seat.id), seen);
    if (seen && peer->seat.attempt < seen->attempt)
        return fl_fail(err, FL_STALE, "%s knows attempt %u of that seat, the caller is attempt %u",
                       f->seat.name, seen->attempt, peer->seat.attempt);
    if (!seen) {
        seen = calloc(1, sizeof(*seen));
        if (!seen)
            return fl_fail(err, FL_EXHAUSTED, "%s has no memory for one more caller", f->seat.name);
        seen->id = peer->seat.id;
        HASH_ADD(hh, f->peers->seen, id, sizeof(seen->id), seen);
        if (!seen->hh.tbl) {
            free(seen);
            return fl_fail(err, FL_EXHAUSTED, "%s has no memory for one more caller", f->seat.name);
        }
    }
    seen->attempt = peer->seat.attempt;
    return FL_OK;
}

static enum fl_status listen_at(struct furlong *f, const char *target, struct stream_server **out,
                                struct fl_err *err)
{
    struct wire_hello me = client_hello(f);
    struct stream_to at = { .target = target,
                            .key = { f->seat.key, sizeof(f->seat.key) },
                            .tls = f->seat.tls,
                            .admit = guest_admit };

    FL_TRY(stream_listen(f->loop, &stream_sock, &at, &me, guest_accepted, f, out, err));
    return FL_OK;
}

enum fl_status client_guests_open(struct furlong *f, struct fl_err *err)
{
    char target[320];
    struct fl_str text = FL_STR_ON(target);
    enum fl_status st;

    fl_str_add(&text, "unix:%s", f->seat.peer_sock);
    st = listen_at(f, target, &f->peers->on_unix, err);
    if (st != FL_OK)
        return fl_wrap(err, st, "listen for peers");
    text = (struct fl_str)FL_STR_ON(target);
    fl_str_add(&text, strchr(f->seat.shown.address, ':') ? "[%s]:0" : "%s:0",
               f->seat.shown.address);
    st = listen_at(f, target, &f->peers->on_tcp, err);
    return st == FL_OK ? FL_OK : fl_wrap(err, st, "listen for peers at this node's address");
}

void client_conns_close(struct furlong *f)
{
    struct client_seen *seen, *next;
    struct fl_err err;

    stream_server_destroy(FL_TAKE(f->peers->on_unix));
    stream_server_destroy(FL_TAKE(f->peers->on_tcp));
    (void)unlink(f->seat.peer_sock); /* the server may have done it */
    fl_fail(&err, FL_CANCELLED, "%s leaves", f->seat.name);
    while (f->peers->conns)
        conn_end(f->peers->conns, &err);
    while (f->peers->guests)
        guest_end(f->peers->guests);
    HASH_ITER (hh, f->peers->seen, seen, next) {
        HASH_DEL(f->peers->seen, seen);
        free(seen);
    }
}
