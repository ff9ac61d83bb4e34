/* Who of a plane is reached, and its updates and fills, one at a time; loop thread */
#include "common/base/id.h"
#include "common/base/log.h"
#include "worker/client/plane.h"
#include "worker/client/weights.h"

enum { FILL_PAUSE_MS = 1000 }; /* after a fill that did not succeed */

/* ---- members -------------------------------------------------------------------------------- */
static void member_holds(struct plane *p, struct plane_member *m, bool holds)
{
    struct client_driver *d = p->d;
    struct member *x;

    m->holds = holds;
    pthread_mutex_lock(&d->mu);
    x = member_find(d, p->to_role, m->party);
    if (x && (!holds || fl_seat_ref_same(&x->at.who, &m->at.who)))
        x->holds = holds;
    if (x && holds)
        x->late_attempt = 0; /* it is heard again */
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->mu);
}

static void member_add(struct plane_member *m)
{
    struct plane *p = m->plane;
    struct xfer_member who = { .who = m->at.who, .party = m->party };
    struct fl_err err;
    enum fl_status st;

    (void)FL_COPY(who.name, m->at.name);
    client_where_print(&m->at, who.where);
    st = m->source ? xfer_coord_add_source(p->coord, m->call, &who, &err)
                   : xfer_coord_add_engine(p->coord, m->call, &who, &err);
    m->added = st == FL_OK;
    if (!m->added)
        fl_warn("member left out of the weight plane member=%s why=%s", m->at.name, err.text);
}

static void member_reached(struct client_reach *r, const struct client_where *where,
                           struct call_peer *call)
{
    struct plane_member *m = container_of(r, struct plane_member, reach);

    m->reached = true;
    m->in_run = m->holds = false;
    m->at = *where;
    plane_probe_start(m, call);
}

static void member_broke(struct client_reach *r, const struct fl_err *why)
{
    struct plane_member *m = container_of(r, struct plane_member, reach);
    bool added = m->added;

    plane_probe_stop(m);
    m->reached = m->added = m->in_run = false;
    if (!m->source)
        member_holds(m->plane, m, false);
    if (added)
        xfer_coord_gone(m->plane->coord, m->at.who, why);
}

static bool member_lives(struct plane *p, const struct plane_member *m, struct fl_str *who)
{
    struct client_driver *d = p->d;
    struct member *x;
    bool lives;

    pthread_mutex_lock(&d->mu);
    x = member_find(d, m->source ? p->from_role : p->to_role, m->party);
    lives = x && x->state == FURLONG_LIVE;
    if (x && who) {
        fl_str_add(who, "%s", who->len ? ", " : "");
        member_print(x, who);
    }
    pthread_mutex_unlock(&d->mu);
    return lives;
}

bool plane_feeds(struct client_driver *d, const char *role)
{
    for (struct plane *p = d->planes; p; p = p->next)
        if (p->has_version && strcmp(p->to_role, role) == 0)
            return true;
    return false;
}

/* A source is admitted, and so its begin() answered, when every engine that lives has said what it
 * reads. late: engines that say nothing are the coordinator's to judge. */
static void plane_admit(struct plane *p, bool late)
{
    bool all_heard = true;

    for (uint32_t i = p->n_from; i < p->n_from + p->n_to; i++) {
        struct plane_member *m = &p->members[i];

        if (!m->added && (m->ready || (late && m->reached && !m->heard)))
            member_add(m);
        all_heard &= m->heard || m->ready || !member_lives(p, m, NULL);
    }
    for (uint32_t i = 0; i < p->n_from && (all_heard || late); i++)
        if (p->members[i].ready && !p->members[i].added)
            member_add(&p->members[i]);
}

void plane_heard(struct plane *p)
{
    if (!p->coord)
        return;
    plane_admit(p, false);
    plane_go(p);
}

void planes_heard(struct client_driver *d)
{
    for (struct plane *p = d->planes, *next; p; p = next) {
        next = p->next;
        plane_heard(p);
    }
}

void plane_members_start(struct plane *p)
{
    for (uint32_t i = 0; i < p->n_from + p->n_to; i++) {
        struct plane_member *m = &p->members[i];
        bool source = i < p->n_from;
        uint32_t party = source ? i : i - p->n_from;

        *m = (struct plane_member){ .reach = { .reached = member_reached, .broke = member_broke },
                                    .plane = p,
                                    .party = party,
                                    .source = source };
        client_reach_start(&m->reach, furlong_group_peer(source ? p->from : p->to, party));
    }
}

void plane_members_stop(struct plane *p)
{
    for (uint32_t i = 0; i < p->n_from + p->n_to; i++) {
        client_reach_stop(&p->members[i].reach);
        p->members[i].reached = p->members[i].added = false;
        plane_probe_stop(&p->members[i]);
    }
}

/* ---- runs ----------------------------------------------------------------------------------- */
static bool left_behind(const struct xfer_report *rep, uint32_t party)
{
    unsigned n =
        rep->n_left_behind < XFER_NAMED_LEFT_BEHIND ? rep->n_left_behind : XFER_NAMED_LEFT_BEHIND;

    for (unsigned i = 0; i < n; i++)
        if (rep->left[i].party == party)
            return true;
    /* not all are named: better filled once more than served stale */
    return rep->n_left_behind > n;
}

static void run_noted(struct plane *p, const struct xfer_report *rep)
{
    for (uint32_t i = p->n_from; i < p->n_from + p->n_to; i++) {
        struct plane_member *m = &p->members[i];

        bool behind = left_behind(rep, m->party);

        /* not one that came back meanwhile; and a fill that passes over an engine, because it gave
         * its memory away, takes nothing from it */
        if (m->in_run && !(behind && p->filling))
            member_holds(p, m, !behind);
    }
}

static void run_started(struct plane *p)
{
    p->running = true;
    for (uint32_t i = 0; i < p->n_from + p->n_to; i++)
        p->members[i].in_run = p->members[i].added;
}

static bool fill_is_due(const struct plane *p)
{
    for (uint32_t i = p->n_from; i < p->n_from + p->n_to && p->has_version; i++)
        if (p->members[i].added && !p->members[i].holds)
            return true;
    return false;
}

static void report_fill(struct furlong_report *out, const struct xfer_report *rep)
{
    *out = (struct furlong_report){ .version = rep->now.number,
                                    .digest = { rep->now.digest[0], rep->now.digest[1] },
                                    .bytes = rep->bytes,
                                    .move_ns = rep->move_ns,
                                    .pause_ns = rep->pause_ns,
                                    .predicted_ns = rep->predicted_ns,
                                    .committed = rep->n_committed,
                                    .left_behind = rep->n_left_behind,
                                    .first_behind = rep->first_left_behind };
    (void)FL_COPY(out->mode, xfer_mode_name(rep->mode));
}

static void set_has_version(struct plane *p)
{
    pthread_mutex_lock(&p->d->mu);
    p->has_version = true;
    pthread_mutex_unlock(&p->d->mu);
}

/* The connection of a source broke while the update stood in line behind the end of the last one:
 * nothing has begun, and it starts when all are reached again. */
static bool starts_again(struct plane *p, struct updating *u, enum fl_status st)
{
    bool away = false;

    for (uint32_t i = 0; i < p->n_from; i++)
        away |= !p->members[i].added;
    if (!u || st != FL_AGAIN || !away || p->waiting || fl_loop_now_ns(p->d->f->loop) >= u->due_ns)
        return false;
    p->waiting = u;
    fl_timer_arm(p->d->f->loop, &p->reach_due, u->due_ns);
    return true;
}

static void run_done(struct xfer_run *r, enum fl_status st, const struct xfer_report *rep,
                     const struct fl_err *err)
{
    struct plane *p = container_of(r, struct plane, run);
    struct updating *u = FL_TAKE(p->current);

    p->running = false;
    if (st == FL_OK) {
        set_has_version(p);
        run_noted(p, rep);
        if (p->filling)
            fl_info("engines filled set=%s version=%llu n=%u", p->set,
                    (unsigned long long)rep->now.number, rep->n_committed);
        p->not_filled[0] = '\0';
    } else if (p->filling && err && strncmp(p->not_filled, err->text, sizeof(p->not_filled) - 1)) {
        (void)FL_COPY(p->not_filled, err->text);
        fl_info("engines not filled yet set=%s why=\"%s\"", p->set, err->text);
    }
    if (st != FL_CANCELLED && p->filling && fill_is_due(p))
        fl_timer_arm_in(p->d->f->loop, &p->again, FILL_PAUSE_MS);
    p->filling = false;
    if (!starts_again(p, u, st) && u) {
        if (rep)
            report_fill(&u->report, rep);
        client_sync_end(&u->sync, st, err);
    }
    if (st == FL_CANCELLED)
        return; /* the coordinator goes */
    plane_go(p);
}

void plane_update_fail(struct plane *p, enum fl_status st, const struct fl_err *err)
{
    struct updating *u = FL_TAKE(p->waiting);

    fl_timer_cancel(&p->reach_due);
    client_sync_end(&u->sync, st, err);
}

static bool source_over(struct plane *p, const struct plane_member *m, struct fl_err *err)
{
    struct client_driver *d = p->d;
    struct member *x;
    bool over;

    pthread_mutex_lock(&d->mu);
    x = member_find(d, p->from_role, m->party);
    over = x && x->state == FURLONG_ENDED;
    if (over)
        fl_fail(err, FL_UNREACHABLE, "%s ended: %s", x->at.name,
                *x->why ? x->why : "no cause is known");
    pthread_mutex_unlock(&d->mu);
    return over;
}

/* FL_OK: the update may start; FL_AGAIN: some that live are not reached, or not ready, yet. */
static enum fl_status reached_enough(struct plane *p, bool late, struct fl_err *err)
{
    char text[200] = "";
    struct fl_str who = FL_STR_ON(text);
    uint32_t sources = 0, engines = 0, missing = 0;
    const struct plane_member *mute = NULL;

    for (uint32_t i = 0; i < p->n_from + p->n_to; i++) {
        struct plane_member *m = &p->members[i];

        if (m->added) {
            sources += m->source;
            engines += !m->source;
        } else if (m->source && source_over(p, m, err)) {
            return FL_UNREACHABLE; /* nobody starts it again before this update is over */
        } else if (m->source || member_lives(p, m, NULL)) {
            missing++;
            (void)member_lives(p, m, &who);
            if (m->unpublished_ns && m->unpublished_ns <= p->waiting->half_ns)
                mute = m;
        }
    }
    if (!missing)
        return engines ? FL_OK
                       : fl_fail(err, FL_UNREACHABLE, "no engine of role %s lives", p->to_role);
    if (!late)
        return FL_AGAIN;
    if (mute)
        return fl_fail(err, FL_INVALID,
                       "%s has offered \"%s\" and published no version of it: publish the first "
                       "one before answering a call",
                       mute->at.name, p->set);
    if (sources < p->n_from || !engines)
        return fl_fail(err, FL_TIMEOUT, "no weights are offered or accepted yet by %s", text);
    return FL_OK; /* engines that do not answer are left behind and filled later */
}

static void update_start(struct plane *p, bool late)
{
    struct updating *u = p->waiting;
    struct xfer_request req = { .kind = XFER_ADVANCE,
                                .target.number = u->how->version,
                                .mode = u->mode,
                                .slots = u->how->slots == 1 ? XFER_ONE_SLOT : XFER_TWO_SLOTS,
                                .party = XFER_ALL_PARTIES,
                                .least_engines = u->how->least_engines,
                                .due_ns = u->due_ns };
    struct fl_err err;
    enum fl_status st;

    if (late)
        plane_admit(p, true);
    st = reached_enough(p, late, &err);
    if (st == FL_AGAIN)
        return;
    if ((st == FL_TIMEOUT || st == FL_INVALID) && fl_loop_now_ns(p->d->f->loop) < u->due_ns)
        return; /* nobody to start with yet: reach_due fires once more */
    if (st == FL_OK)
        st = xfer_start(p->coord, &req, &p->run, &err);
    if (st != FL_OK) {
        plane_update_fail(p, st, &err);
        return;
    }
    fl_timer_cancel(&p->reach_due);
    run_started(p);
    p->current = FL_TAKE(p->waiting);
}

static void fill_start(struct plane *p)
{
    struct xfer_request req = { .kind = XFER_FILL,
                                .mode = XFER_AUTO,
                                .slots = XFER_TWO_SLOTS,
                                .party = XFER_ALL_PARTIES,
                                .due_ns = fl_loop_now_ns(p->d->f->loop) +
                                          PLANE_FILL_MS * (uint64_t)1000000 };
    struct fl_err err;

    if (xfer_start(p->coord, &req, &p->run, &err) != FL_OK) {
        fl_warn("engines not filled set=%s why=%s", p->set, err.text);
        fl_timer_arm_in(p->d->f->loop, &p->again, FILL_PAUSE_MS);
        return;
    }
    run_started(p);
    p->filling = true;
}

void plane_go(struct plane *p)
{
    if (p->running || !p->coord)
        return;
    if (p->waiting)
        update_start(p, p->waiting->late);
    else if (!p->again.loop && fill_is_due(p))
        fill_start(p);
}

static void fill_again(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    plane_go(container_of(t, struct plane, again));
}

static void reach_late(struct fl_timer *t, uint64_t now_ns)
{
    struct plane *p = container_of(t, struct plane, reach_due);
    struct updating *u = p->waiting;
    struct fl_err err;

    if (now_ns < u->half_ns) { /* some seconds of silence are over: say what it is */
        if (reached_enough(p, true, &err) != FL_OK)
            fl_warn("update waits set=%s version=%llu why=\"%s\"", p->set,
                    (unsigned long long)u->how->version, err.text);
        fl_timer_arm(p->d->f->loop, &p->reach_due, u->half_ns);
        return;
    }
    u->late = true;
    if (now_ns < u->due_ns)
        fl_timer_arm(p->d->f->loop, &p->reach_due, u->due_ns);
    if (!p->running) {
        update_start(p, true);
    } else if (now_ns >= u->due_ns) {
        fl_fail(&err, FL_TIMEOUT, "a fill of engines that came back is in flight");
        plane_update_fail(p, FL_TIMEOUT, &err);
    }
}

void plane_runs_init(struct plane *p)
{
    p->again.fire = fill_again;
    p->reach_due.fire = reach_late;
    p->run.done = run_done;
}
