#include <stdio.h>
#include <stdlib.h>
#include "common/base/id.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "worker.pb-c.h"
#include "worker/client/driver.h"
#include "worker/client/peers_priv.h"

/* ---- states --------------------------------------------------------------------------------- */
enum peer_event {
    EV_WANTED,  /* somebody waits                             */
    EV_LIVES,   /* the directory named an attempt that joined */
    EV_NOT_YET, /* not joined, or the directory is away       */
    EV_NEVER,   /* no such rank, or ended for good            */
    EV_DENIED,  /* it knows another key                       */
    EV_OPEN,    /* the stream is there                        */
    EV_CLOSED,  /* it broke, or could not be made             */
    EV_AGAIN,   /* the pause is over, or there is news        */
    EV_ALONE,   /* nobody waits any more                      */
};
static void peer_find(struct furlong_peer *p);
static void peer_connect(struct furlong_peer *p);
static void peer_pause(struct furlong_peer *p);
static void peer_opened(struct furlong_peer *p);
static void peer_broke(struct furlong_peer *p);
static void peer_fail(struct furlong_peer *p);
static void peer_rest(struct furlong_peer *p);

/* clang-format off */
static const struct peer_edge {
    enum peer_state from;
    enum peer_event on;
    enum peer_state to;
    void (*act)(struct furlong_peer *p);
} peer_edges[] = {
    { PEER_IDLE,       EV_WANTED,  PEER_FINDING,    peer_find    },
    { PEER_FINDING,    EV_LIVES,   PEER_CONNECTING, peer_connect },
    { PEER_FINDING,    EV_NOT_YET, PEER_WAITING,    peer_pause   },
    { PEER_FINDING,    EV_NEVER,   PEER_WAITING,    peer_fail    },
    { PEER_WAITING,    EV_AGAIN,   PEER_FINDING,    peer_find    },
    { PEER_WAITING,    EV_ALONE,   PEER_IDLE,       peer_rest    },
    { PEER_CONNECTING, EV_OPEN,    PEER_READY,      peer_opened  },
    { PEER_CONNECTING, EV_CLOSED,  PEER_WAITING,    peer_pause   },
    { PEER_CONNECTING, EV_DENIED,  PEER_WAITING,    peer_fail    },
    { PEER_READY,      EV_CLOSED,  PEER_WAITING,    peer_broke   },
};
/* clang-format on */
static const char *const peer_states[PEER_STATES] = { "idle", "finding", "waiting", "connecting",
                                                      "ready" };

static void peer_event(struct furlong_peer *p, enum peer_event on)
{
    for (size_t i = 0; i < FL_LEN(peer_edges); i++) {
        const struct peer_edge *e = &peer_edges[i];

        if (e->from != p->state || e->on != on)
            continue;
        fl_debug("peer peer=%s from=%s to=%s", p->name, peer_states[e->from], peer_states[e->to]);
        p->state = e->to;
        e->act(p);
        return;
    }
}

static void peer_rest(struct furlong_peer *p)
{
    fl_timer_cancel(&p->again);
    p->pause_ms = CLIENT_RETRY_MIN_MS;
}

/* ---- finding -------------------------------------------------------------------------------- */
bool client_where_of(const struct Fl__Where *pb, struct client_where *out)
{
    if (pb->who->worker.len != sizeof(out->who.id))
        return false;
    *out = (struct client_where){ .who.attempt = pb->who->attempt };
    memcpy(&out->who.id, pb->who->worker.data, sizeof(out->who.id));
    snprintf(out->name, sizeof(out->name), "%.60s %u on %.60s", pb->role, pb->rank,
             pb->node ? pb->node : "?");
    (void)FL_COPY(out->boot_id, pb->boot_id ? pb->boot_id : "");
    if (!FL_COPY(out->tcp, pb->tcp ? pb->tcp : ""))
        *out->tcp = '\0'; /* cut is as good as none */
    if (!FL_COPY(out->unix_path, pb->unix_path ? pb->unix_path : ""))
        *out->unix_path = '\0';
    return true;
}

static void peer_found(struct furlong_peer *p, const struct Fl__Where *w)
{
    struct client_where at;

    if (!client_where_of(w, &at)) {
        fl_fail(&p->last, FL_CORRUPT, "the directory's answer for %s has no worker id", p->name);
        peer_event(p, EV_NEVER);
    } else if (w->state == FURLONG_LIVE) {
        p->at = at;
        peer_event(p, EV_LIVES);
    } else if (w->state == FURLONG_ENDED) {
        fl_fail(&p->last, FL_UNREACHABLE, "%s has ended: %s", at.name,
                w->why && *w->why ? w->why : "no cause is known");
        peer_event(p, EV_NEVER);
    } else {
        fl_fail(&p->last, FL_TIMEOUT, "%s, attempt %u, has not joined yet%s%s", at.name,
                at.who.attempt, w->why && *w->why ? "; the one before: " : "",
                w->why ? w->why : "");
        peer_event(p, EV_NOT_YET);
    }
}

static void find_done(struct client_relay *r, enum fl_status st, const struct wire_msg *reply,
                      const struct fl_err *err)
{
    struct furlong_peer *p = container_of(r, struct furlong_peer, find);
    Fl__Where *w =
        st == FL_OK ? fl__where__unpack(NULL, reply->head.body_bytes, reply->body) : NULL;

    if (w) {
        peer_found(p, w);
        fl__where__free_unpacked(w, NULL);
        return;
    }
    if (st == FL_OK)
        fl_fail(&p->last, FL_CORRUPT, "the directory's answer for %s is no Where message", p->name);
    else
        p->last = *err;
    peer_event(p, EV_NEVER);
}

static void peer_find(struct furlong_peer *p)
{
    Fl__Find m = FL__FIND__INIT;
    struct client_where at;
    uint32_t state;
    char why[256];

    /* A driver is told about its members, so that its calls need no head. */
    if (client_driver_knows(p->f, p->role, p->rank, &at, &state, why)) {
        if (state == FURLONG_LIVE) {
            p->at = at;
            peer_event(p, EV_LIVES);
            return;
        }
        fl_fail(&p->last, state == FURLONG_ENDED ? FL_UNREACHABLE : FL_TIMEOUT, "%s %s%s%s",
                at.name, state == FURLONG_ENDED ? "has ended" : "has not joined yet",
                *why ? ": " : "", why);
        peer_event(p, state == FURLONG_ENDED ? EV_NEVER : EV_NOT_YET);
        return;
    }
    m.role = p->role;
    m.rank = p->rank;
    p->find = (struct client_relay){ .again = true, .done = find_done };
    if (client_relay_start(&p->find, p->f, FL_DIR_FIND, &m.base, &p->last) != FL_OK)
        peer_event(p, EV_NEVER);
}

static void peer_again(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    peer_event(container_of(t, struct furlong_peer, again), EV_AGAIN);
}

static void peer_pause(struct furlong_peer *p)
{
    if (!p->asks && !p->reaches) {
        peer_event(p, EV_ALONE);
        return;
    }
    fl_timer_arm_in(p->f->loop, &p->again, p->pause_ms);
    p->pause_ms = p->pause_ms * 2 < CLIENT_RETRY_MAX_MS ? p->pause_ms * 2 : CLIENT_RETRY_MAX_MS;
}

/* ---- the stream ----------------------------------------------------------------------------- */
static void conn_is_open(struct client_conn_user *u, struct call_peer *call)
{
    struct furlong_peer *p = container_of(u, struct furlong_peer, conn);

    p->call = call;
    peer_event(p, EV_OPEN);
}

static void conn_is_closed(struct client_conn_user *u, const struct fl_err *why)
{
    struct furlong_peer *p = container_of(u, struct furlong_peer, conn);

    p->last = *why;
    p->call = NULL;
    peer_event(p, why->status == FL_DENIED && p->state == PEER_CONNECTING ? EV_DENIED : EV_CLOSED);
}

static void conn_is_ready(struct client_conn_user *u)
{
    client_peer_send(container_of(u, struct furlong_peer, conn));
}

static void peer_connect(struct furlong_peer *p)
{
    p->conn = (struct client_conn_user){ .opened = conn_is_open,
                                         .closed = conn_is_closed,
                                         .ready = conn_is_ready };
    if (client_conn_use(p->f, &p->at, &p->conn, &p->last) != FL_OK)
        peer_event(p, EV_CLOSED);
}

static struct client_reach *reach_with(struct furlong_peer *p, bool up)
{
    struct client_reach *r = p->reaches;

    while (r && r->up != up)
        r = r->next;
    return r;
}

static void peer_opened(struct furlong_peer *p)
{
    p->pause_ms = CLIENT_RETRY_MIN_MS;
    for (struct client_reach *r; (r = reach_with(p, false));) {
        r->up = true;
        r->reached(r, &p->at, p->call);
    }
    client_peer_send(p);
}

static void peer_broke(struct furlong_peer *p)
{
    for (struct client_reach *r; (r = reach_with(p, true));) {
        r->up = false;
        r->broke(r, &p->last);
    }
    peer_pause(p);
}

static void peer_fail(struct furlong_peer *p)
{
    struct fl_err why = p->last;

    client_peer_ended(p, &why);
    peer_pause(p); /* for the weight plane, which waits for as long as the group lives */
}

void client_peer_want(struct furlong_peer *p)
{
    if (p->state == PEER_READY)
        client_peer_send(p);
    else
        peer_event(p, EV_WANTED);
}

void client_peer_news(struct furlong *f, const char *role, uint32_t rank)
{
    struct furlong_peer *p;

    pthread_mutex_lock(&f->peers->mu);
    for (p = f->peers->first; p; p = p->next)
        if (p->rank == rank && strcmp(p->role, role) == 0)
            break;
    pthread_mutex_unlock(&f->peers->mu);
    if (!p || p->state != PEER_WAITING)
        return;
    fl_timer_cancel(&p->again);
    p->pause_ms = CLIENT_RETRY_MIN_MS;
    peer_event(p, EV_AGAIN);
}

void client_reach_start(struct client_reach *r, struct furlong_peer *p)
{
    r->peer = p;
    r->up = false;
    r->next = p->reaches;
    p->reaches = r;
    if (p->state == PEER_READY) {
        r->up = true;
        r->reached(r, &p->at, p->call);
    } else {
        peer_event(p, EV_WANTED);
    }
}

void client_reach_stop(struct client_reach *r)
{
    struct client_reach **at;

    if (!r->peer)
        return;
    for (at = &r->peer->reaches; *at && *at != r; at = &(*at)->next)
        ;
    if (*at)
        *at = r->next;
    r->peer = NULL;
}

/* ---- the list ------------------------------------------------------------------------------- */
const char *client_peer_name(const struct furlong_peer *p)
{
    return p->name;
}

enum fl_status furlong_peer(struct furlong *f, const char *role, uint32_t rank,
                            struct furlong_peer **out, struct fl_err *err)
{
    struct furlong_peer *p, *known;

    FL_TRY(client_here(f, err));
    if (!role || !*role || strlen(role) >= sizeof(p->role))
        return fl_fail(err, FL_INVALID, "a role's name has 1 to %zu bytes, not %zu",
                       sizeof(p->role) - 1, role ? strlen(role) : (size_t)0);
    p = calloc(1, sizeof(*p));
    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory for one more peer");
    *p = (struct furlong_peer){ .f = f,
                                .rank = rank,
                                .pause_ms = CLIENT_RETRY_MIN_MS,
                                .again.fire = peer_again,
                                .asks_end = &p->asks };
    (void)FL_COPY(p->role, role);
    snprintf(p->name, sizeof(p->name), "%s %u", role, rank);
    pthread_mutex_lock(&f->peers->mu);
    for (known = f->peers->first; known; known = known->next)
        if (known->rank == rank && strcmp(known->role, role) == 0)
            break;
    if (!known && f->peers->n < CLIENT_PEERS_MAX) {
        p->next = f->peers->first;
        f->peers->first = p;
        f->peers->n++;
        known = p;
    }
    pthread_mutex_unlock(&f->peers->mu);
    if (known != p)
        free(p);
    if (!known)
        return fl_fail(err, FL_EXHAUSTED, "%d peers are known already", CLIENT_PEERS_MAX);
    *out = known;
    return FL_OK;
}

enum fl_status client_peers_open(struct furlong *f, struct fl_err *err)
{
    f->peers = calloc(1, sizeof(*f->peers));
    if (!f->peers)
        return fl_fail(err, FL_EXHAUSTED, "no memory for peers");
    pthread_mutex_init(&f->peers->mu, NULL);
    return client_guests_open(f, err);
}

void client_peers_close(struct furlong *f)
{
    struct fl_err err;

    if (!f->peers)
        return;
    fl_fail(&err, FL_CANCELLED, "%s leaves", f->seat.name);
    for (struct furlong_peer *p = f->peers->first; p; p = p->next) {
        fl_timer_cancel(&p->again);
        client_relay_cancel(&p->find);
        client_conn_drop(&p->conn);
        p->reaches = NULL;
        p->state = PEER_IDLE;
        p->call = NULL;
    }
    client_conns_close(f); /* asks in flight come back */
    for (struct furlong_peer *p = f->peers->first; p; p = p->next)
        client_peer_ended(p, &err);
}

void client_peers_free(struct furlong *f)
{
    struct furlong_peer *next;

    if (!f->peers)
        return;
    for (struct furlong_peer *p = f->peers->first; p; p = next) {
        next = p->next;
        free(p);
    }
    pthread_mutex_destroy(&f->peers->mu);
    free(f->peers);
    f->peers = NULL;
}

const char *client_peers_tcp(const struct furlong *f)
{
    return stream_server_at(f->peers->on_tcp);
}
