#include "worker/client/plane.h"
#include <stdlib.h>
#include "common/base/id.h"

static void plane_end(struct plane *p, const struct fl_err *why)
{
    for (struct plane **at = &p->d->planes; *at; at = &(*at)->next) {
        if (*at != p)
            continue;
        pthread_mutex_lock(&p->d->mu);
        *at = p->next;
        pthread_mutex_unlock(&p->d->mu);
        break;
    }
    fl_timer_cancel(&p->again);
    if (p->waiting)
        plane_update_fail(p, why->status, why);
    plane_members_stop(p);
    xfer_coord_destroy(FL_TAKE(p->coord)); /* a run comes back FL_CANCELLED */
    fl_timer_cancel(&p->again);
    free(p->members);
    free(p);
}

static void member_late(void *arg, struct fl_seat_ref who, bool answers, const struct fl_err *why)
{
    struct plane *p = arg;

    for (uint32_t i = 0; i < p->n_from + p->n_to; i++) {
        struct plane_member *m = &p->members[i];

        if (fl_seat_ref_same(&m->at.who, &who))
            member_is_late(p->d, m->source ? p->from_role : p->to_role, m->party, who.attempt,
                           answers, why->text);
    }
}

static enum fl_status coord_make(struct plane *p, const struct furlong_update *how,
                                 struct fl_err *err)
{
    struct xfer_coord_opts o = { .set = p->set,
                                 .attempt = p->d->f->seat.who.attempt,
                                 .bucket_bytes = how->bucket_bytes,
                                 .delta_dir = how->dir,
                                 .late = member_late,
                                 .late_arg = p };

    p->bucket_bytes = how->bucket_bytes;
    if (!FL_COPY(p->dir, how->dir ? how->dir : ""))
        return fl_fail(err, FL_INVALID, "the delta folder's path has more than %zu bytes",
                       sizeof(p->dir));
    return xfer_coord_create(p->d->f->loop, &o, &p->coord, err);
}

static enum fl_status plane_make(struct client_driver *d, const struct updating *u,
                                 struct plane **out, struct fl_err *err)
{
    struct plane *p = calloc(1, sizeof(*p));
    enum fl_status st;

    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the weight plane");
    *p = (struct plane){
        .d = d, .from = u->from, .to = u->to, .n_from = u->from->n, .n_to = u->to->n
    };
    plane_runs_init(p);
    (void)FL_COPY(p->from_role, u->from->role);
    (void)FL_COPY(p->to_role, u->to->role);
    p->members = calloc(p->n_from + p->n_to, sizeof(*p->members));
    if (!p->members || !FL_COPY(p->set, u->how->set))
        st = fl_fail(err, p->members ? FL_INVALID : FL_EXHAUSTED, "set %.70s: its name or memory",
                     u->how->set);
    else
        st = coord_make(p, u->how, err);
    if (st != FL_OK) {
        free(p->members);
        free(p);
        return st;
    }
    pthread_mutex_lock(&d->mu);
    p->next = d->planes;
    d->planes = p;
    pthread_mutex_unlock(&d->mu);
    *out = p;
    return FL_OK;
}

/* Other buckets or another folder: the coordinator keeps nothing that it cannot learn again. */
static enum fl_status plane_fits(struct plane *p, const struct furlong_update *how,
                                 struct fl_err *err)
{
    if (p->bucket_bytes == how->bucket_bytes && strcmp(p->dir, how->dir ? how->dir : "") == 0)
        return FL_OK;
    plane_members_stop(p);
    xfer_coord_destroy(FL_TAKE(p->coord));
    FL_TRY(coord_make(p, how, err));
    plane_members_start(p);
    return FL_OK;
}

static struct plane *plane_find(const struct updating *u)
{
    struct plane *p = u->from->d->planes;

    while (p && !(p->from == u->from && p->to == u->to && strcmp(p->set, u->how->set) == 0))
        p = p->next;
    return p;
}

static void open_begin(struct client_sync *s)
{
    struct updating *u = container_of(s, struct updating, sync);
    struct plane *p = plane_find(u);
    enum fl_status st = FL_OK;
    struct fl_err err;

    if (!p) {
        st = plane_make(u->from->d, u, &p, &err);
        if (st == FL_OK)
            plane_members_start(p);
    }
    client_sync_end(s, st, &err);
}

static void update_begin(struct client_sync *s)
{
    struct updating *u = container_of(s, struct updating, sync);
    struct client_driver *d = u->from->d;
    uint64_t now = fl_loop_now_ns(d->f->loop);
    uint32_t budget_ms = u->how->budget_ms ? u->how->budget_ms : PLANE_FILL_MS;
    struct plane *p = plane_find(u);
    enum fl_status st = FL_OK;
    struct fl_err err;
    bool is_new = false;

    u->due_ns = now + (uint64_t)budget_ms * 1000000;
    u->half_ns = now + (uint64_t)(budget_ms / 2) * 1000000; /* until then a model may still load */
    if (!p) {
        st = plane_make(d, u, &p, &err);
        is_new = st == FL_OK;
    } else if (p->waiting || (p->running && !p->filling)) {
        st = fl_fail(&err, FL_AGAIN, "%s: another update is in flight", p->set);
    } else if (!p->running) {
        st = plane_fits(p, u->how, &err);
    }
    if (st != FL_OK) {
        client_sync_end(s, st, &err);
        return;
    }
    p->waiting = u;
    fl_timer_arm_in(d->f->loop, &p->reach_due,
                    budget_ms / 2 < PLANE_TELL_MS ? budget_ms / 2 : PLANE_TELL_MS);
    if (is_new)
        plane_members_start(p);
    plane_go(p);
}

static enum fl_status mode_of(const char *name, enum xfer_mode *out, struct fl_err *err)
{
    *out = XFER_AUTO;
    if (!name)
        return FL_OK;
    for (enum xfer_mode m = XFER_AUTO; m <= XFER_DISK_DELTA; m++) {
        *out = m;
        if (strcmp(xfer_mode_name(m), name) == 0)
            return FL_OK;
    }
    return fl_fail(err, FL_INVALID,
                   "there is no mode %.40s; auto, share, copy, broadcast, p2p and disk-delta are",
                   name);
}

static enum fl_status how_check(const struct furlong_update *how, enum xfer_mode *mode,
                                struct fl_err *err)
{
    if (!how->set || !*how->set || how->slots > 2)
        return fl_fail(err, FL_INVALID, "an update needs the name of a set, and 1 or 2 slots");
    FL_TRY(mode_of(how->mode, mode, err));
    if (*mode == XFER_DISK_DELTA && (!how->dir || !*how->dir))
        return fl_fail(err, FL_INVALID, "disk-delta needs a folder that all nodes see");
    return FL_OK;
}

enum fl_status furlong_plane(struct furlong_group *from, struct furlong_group *to,
                             const struct furlong_update *how, struct fl_err *err)
{
    struct updating u = { .from = from, .to = to, .how = how };

    FL_TRY(client_here(from->d->f, err));
    FL_TRY(how_check(how, &u.mode, err));
    return client_sync_run(from->d->f->loop, &u.sync, open_begin, err);
}

enum fl_status furlong_update(struct furlong_group *from, struct furlong_group *to,
                              const struct furlong_update *how, struct furlong_report *out,
                              struct fl_err *err)
{
    struct updating u = { .from = from, .to = to, .how = how };
    enum fl_status st;

    FL_TRY(client_here(from->d->f, err));
    FL_TRY(how_check(how, &u.mode, err));
    group_none_late(from);
    group_none_late(to);
    st = client_sync_run(from->d->f->loop, &u.sync, update_begin, err);
    if (out)
        *out = u.report;
    return st == FL_OK ? FL_OK
                       : fl_wrap(err, st, "update %s to version %llu", how->set,
                                 (unsigned long long)how->version);
}

/* ---- groups that end ------------------------------------------------------------------------ */
struct ending {
    struct client_sync sync;
    struct furlong_group *g;
};

static void group_ends(struct client_sync *s)
{
    struct furlong_group *g = container_of(s, struct ending, sync)->g;
    struct fl_err why;

    fl_fail(&why, FL_CANCELLED, "group %s ends", g->role);
    for (struct plane *p = g->d->planes, *next; p; p = next) {
        next = p->next;
        if (p->from == g || p->to == g)
            plane_end(p, &why);
    }
    client_sync_end(s, FL_OK, NULL);
}

void plane_group_ends(struct furlong_group *g)
{
    struct ending e = { .g = g };

    client_sync_run(g->d->f->loop, &e.sync, group_ends, NULL);
}

void planes_close(struct client_driver *d)
{
    struct fl_err why;

    fl_fail(&why, FL_CANCELLED, "%s leaves", d->f->seat.name);
    while (d->planes)
        plane_end(d->planes, &why);
}
