#include <stdlib.h>
#include "common/base/id.h"
#include "common/base/log.h"
#include "worker.pb-c.h"
#include "worker/client/driver_priv.h"

enum { LATER_LIMIT_MS = 60000 };

enum fl_status driver_of(struct furlong *f, struct client_driver **out, struct fl_err *err)
{
    FL_TRY(client_here(f, err));
    if (!f->driver)
        return fl_fail(err, FL_DENIED, "%s is no driver: placing and launching is the driver's",
                       f->seat.name);
    *out = f->driver;
    return FL_OK;
}

struct member *member_find(struct client_driver *d, const char *role, uint32_t rank)
{
    for (size_t i = 0; i < d->n_members; i++)
        if (d->members[i].rank == rank && strcmp(d->members[i].role, role) == 0)
            return &d->members[i];
    return NULL;
}

void member_print(const struct member *m, struct fl_str *out)
{
    fl_str_add(out, "%s", m->at.name);
    if (m->at.who.attempt)
        fl_str_add(out, ", attempt %u", m->at.who.attempt);
}

void member_is_late(struct client_driver *d, const char *role, uint32_t rank, uint32_t attempt,
                    bool answers, const char *why)
{
    struct member *m;

    pthread_mutex_lock(&d->mu);
    m = member_find(d, role, rank);
    if (m && m->at.who.attempt == attempt) {
        m->late_attempt = attempt;
        m->late_answers = answers;
        (void)FL_COPY(m->late_why, why);
    }
    pthread_mutex_unlock(&d->mu);
}

void group_none_late(struct furlong_group *g)
{
    pthread_mutex_lock(&g->d->mu);
    for (uint32_t i = 0; i < g->n; i++) {
        struct member *m = member_find(g->d, g->role, i);

        if (m)
            m->late_attempt = 0;
    }
    pthread_mutex_unlock(&g->d->mu);
}

bool client_driver_knows(struct furlong *f, const char *role, uint32_t rank,
                         struct client_where *at, uint32_t *state, char why[256])
{
    struct client_driver *d = f->driver;
    struct member *m;

    if (!d)
        return false;
    pthread_mutex_lock(&d->mu);
    m = member_find(d, role, rank);
    if (m) {
        *at = m->at;
        *state = m->state;
        (void)fl_copy(why, 256, m->why);
    }
    pthread_mutex_unlock(&d->mu);
    return m != NULL;
}

static struct member *member_add(struct client_driver *d, const char *role, uint32_t rank)
{
    if (d->n_members == d->room_members) {
        size_t room = d->room_members ? d->room_members * 2 : 16;
        struct member *more =
            room > DRIVER_MEMBERS_MAX ? NULL : realloc(d->members, room * sizeof(*more));

        if (!more)
            return NULL;
        d->members = more;
        d->room_members = room;
    }
    d->members[d->n_members] = (struct member){ .rank = rank };
    if (!FL_COPY(d->members[d->n_members].role, role))
        return NULL;
    return &d->members[d->n_members++];
}

/* Events may come twice and in any order around a restart of daemon or head: only what is newer
 * counts. */
static bool is_news(const struct member *m, const Fl__Where *w)
{
    if (!*m->at.name) /* nothing is known yet */
        return true;
    if (w->who->attempt != m->at.who.attempt)
        return w->who->attempt > m->at.who.attempt;
    return w->state > m->state;
}

/* mu is held. Says which attempt is known to have ended by this news. */
static bool member_take(struct member *m, const Fl__Where *w, struct fl_seat_ref *ended)
{
    bool new_one = w->who->attempt > m->at.who.attempt;
    bool over = *m->at.name && (new_one || w->state == FURLONG_ENDED);
    struct client_where at;

    if (!client_where_of(w, &at))
        return false;
    *ended = m->at.who;
    m->at = at;
    m->state = w->state;
    m->unrunnable = w->unrunnable;
    m->exit_code = w->has_exit_code ? (int)w->exit_code : -1;
    m->holds = m->holds && !over;
    (void)FL_COPY(m->node, w->node ? w->node : "");
    if (w->why && *w->why)
        (void)FL_COPY(m->why, w->why);
    return over;
}

static enum fl_status one_take(struct client_driver *d, const Fl__Where *w, struct fl_err *err)
{
    struct fl_seat_ref ended;
    struct fl_err why;
    struct member *m;
    bool news = false, over = false;
    char name[CLIENT_NAME], cause[256];

    pthread_mutex_lock(&d->mu);
    m = member_find(d, w->role, w->rank);
    if (!m)
        m = member_add(d, w->role, w->rank);
    news = m && is_news(m, w);
    if (news) {
        over = member_take(m, w, &ended);
        (void)FL_COPY(name, m->at.name);
        (void)FL_COPY(cause, m->why);
    }
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->mu);
    if (!m)
        return fl_fail(err, FL_EXHAUSTED, "no room for one more member, %d at most",
                       DRIVER_MEMBERS_MAX);
    if (over) {
        fl_fail(&why, FL_UNREACHABLE, "%s ended: %s", name, *cause ? cause : "no cause is known");
        client_conn_gone(d->f, ended, &why);
    }
    if (news)
        client_peer_news(d->f, w->role, w->rank);
    return FL_OK;
}

enum fl_status members_take(struct client_driver *d, const void *body, size_t bytes,
                            struct fl_err *err)
{
    Fl__Members *pb = fl__members__unpack(NULL, bytes, body);
    enum fl_status st = FL_OK;

    if (!pb)
        return fl_fail(err, FL_CORRUPT, "%zu bytes that are no Members message", bytes);
    for (size_t i = 0; i < pb->n_members && st == FL_OK; i++) {
        const Fl__Where *w = pb->members[i];

        if (w->state > FURLONG_ENDED || w->who->worker.len != sizeof(struct fl_worker_id))
            st = fl_fail(err, FL_CORRUPT, "member %s %u: state %u, an id of %zu bytes", w->role,
                         w->rank, w->state, w->who->worker.len);
        else
            st = one_take(d, w, err);
    }
    fl__members__free_unpacked(pb, NULL);
    planes_heard(d);
    return st;
}

void client_driver_members(struct furlong *f, const void *body, size_t bytes)
{
    struct fl_err err;

    if (f->driver && members_take(f->driver, body, bytes, &err) != FL_OK)
        fl_warn("news of members passed over why=%s", err.text);
}

static void list_done(struct client_relay *r, enum fl_status st, const struct wire_msg *reply,
                      const struct fl_err *err)
{
    struct client_driver *d = container_of(r, struct client_driver, list);

    d->listing = false;
    if (st == FL_OK)
        client_driver_members(d->f, reply->body, reply->head.body_bytes);
    else if (st != FL_CANCELLED)
        fl_warn("members not listed why=%s", err->text);
}

void client_driver_up(struct furlong *f)
{
    struct client_driver *d = f->driver;
    Fl__Members none = FL__MEMBERS__INIT; /* packs to nothing */

    if (!d || d->listing)
        return;
    d->list = (struct client_relay){ .again = true, .done = list_done };
    d->listing = client_relay_start(&d->list, f, FL_MEMBERS_LIST, &none.base, NULL) == FL_OK;
}

/* ---- in the background ---------------------------------------------------------------------- */
struct later {
    struct fl_task start;
    struct client_relay relay;
    struct client_driver *d;
};

static void later_end(struct later *x)
{
    struct client_driver *d = x->d;

    free(x->relay.body);
    free(x);
    pthread_mutex_lock(&d->mu);
    d->giving_back--;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->mu);
}

static void later_done(struct client_relay *r, enum fl_status st, const struct wire_msg *reply,
                       const struct fl_err *err)
{
    (void)reply;
    if (st != FL_OK && st != FL_NOT_FOUND && st != FL_CANCELLED)
        fl_warn("not given back method=%u why=%s", r->method, err ? err->text : "");
    later_end(container_of(r, struct later, relay));
}

static void later_start(struct fl_task *t)
{
    struct later *x = container_of(t, struct later, start);

    x->relay.due_ns = fl_loop_now_ns(x->d->f->loop) + LATER_LIMIT_MS * (uint64_t)1000000;
    x->relay.again = true;
    x->relay.done = later_done;
    if (client_relay_start_packed(&x->relay, x->d->f) != FL_OK)
        later_end(x);
}

void driver_send_later(struct client_driver *d, uint16_t method, const struct ProtobufCMessage *m)
{
    struct later *x = calloc(1, sizeof(*x));
    size_t len = protobuf_c_message_get_packed_size(m);

    if (x)
        x->relay.body = malloc(len ? len : 1);
    if (!x || !x->relay.body) {
        free(x);
        fl_warn("not given back method=%u why=no memory", method);
        return;
    }
    x->relay.body_bytes = protobuf_c_message_pack(m, x->relay.body);
    x->relay.method = method;
    x->d = d;
    x->start.run = later_start;
    pthread_mutex_lock(&d->mu);
    d->giving_back++;
    pthread_mutex_unlock(&d->mu);
    fl_post(d->f->loop, &x->start);
}

void client_driver_drain(struct furlong *f, uint32_t wait_ms)
{
    struct timespec until = client_until(wait_ms);
    struct client_driver *d = f->driver;
    bool late = false;

    if (!d)
        return;
    pthread_mutex_lock(&d->mu);
    while (d->giving_back && !late)
        late = !client_cond_wait(&d->changed, &d->mu, wait_ms, &until);
    pthread_mutex_unlock(&d->mu);
}

/* ---- life ----------------------------------------------------------------------------------- */
enum fl_status client_driver_open(struct furlong *f, struct fl_err *err)
{
    struct client_driver *d = calloc(1, sizeof(*d));

    if (!d)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a driver");
    d->f = f;
    pthread_mutex_init(&d->mu, NULL);
    client_cond_init(&d->changed);
    f->driver = d;
    return FL_OK;
}

void client_driver_close(struct furlong *f)
{
    if (!f->driver)
        return;
    client_relay_cancel(&f->driver->list);
    planes_close(f->driver);
}

void client_driver_free(struct furlong *f)
{
    struct client_driver *d = f->driver;

    if (!d)
        return;
    while (d->groups)
        group_free(d->groups);
    while (d->layouts)
        layout_end(d->layouts);
    free(d->members);
    pthread_cond_destroy(&d->changed);
    pthread_mutex_destroy(&d->mu);
    free(d);
    f->driver = NULL;
}
