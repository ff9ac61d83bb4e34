/* transport/xfer/coord_grant.c - begin() of a source: granted when no engine reads what will be
 * written
 *
 * Engines that serve from the pages in question are made DIRTY first; with one slot these are all
 * that share, with two those that were left behind. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/id.h"
#include "common/base/log.h"
#include "common/proto/methods.h"
#include "transport/xfer/coord_priv.h"
#include "transport/xfer/port_priv.h"

static void grant_over(void *arg, enum fl_status st, const struct fl_err *err);

/* ---- watching ---- */

static void watch_later(struct co_member *m)
{
    fl_timer_arm_in(m->c->loop, &m->watch_again, 10 * COORD_AGAIN_MS);
}

static void on_watch_again(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    co_watch(container_of(t, struct co_member, watch_again));
}

static void on_watched(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                       const struct fl_err *err)
{
    struct co_member *m = container_of(op, struct co_member, watch_op);
    struct xfer_state s;

    (void)err;
    m->watching = false;
    if (m->gone || m->c->ending)
        return;
    if (st != FL_OK || msg_read_state(reply, &s, NULL) != FL_OK) {
        watch_later(m);
        return;
    }
    if (s.publishes != m->published_heard && s.digest_bytes)
        co_note_published(m, &s, reply->blob);
    m->wants = s.wants;
    if (s.wants && s.asked != m->told) {
        m->told = m->asked = s.asked;
        m->wants_number = s.wants_number;
        m->wants_slot = s.wants_slot;
        /* the answer has to be there in time */
        m->wants_due_ns = co_due(m->c, s.wants_ms - s.wants_ms / 8);
        co_grant_next(m->c);
    }
    co_watch(m);
}

void co_watch(struct co_member *m)
{
    Fl__XferWatch w = FL__XFER_WATCH__INIT;
    struct call_args a = { .method = FL_XFER_WATCH,
                           .lane = XFER_LANE,
                           .due_ns = co_due(m->c, 2 * COORD_WATCH_MS) };
    enum fl_status st;

    m->watch_again.fire = on_watch_again;
    m->watch_op.done = on_watched;
    w.set = m->c->set;
    w.attempt = m->c->o.attempt;
    w.wait_ms = COORD_WATCH_MS;
    w.has_told = m->told != 0;
    w.told = m->told;
    w.has_heard = true;
    w.heard = m->published_heard;
    st = msg_pack(&w.base, &a.body, NULL);
    if (st == FL_OK) {
        m->watching = true;
        st = call_start(m->peer, &a, &m->watch_op, NULL);
        free((void *)(uintptr_t)a.body.data);
    }
    if (st != FL_OK) {
        m->watching = false;
        watch_later(m);
    }
}

/* ---- one question at a time ---- */

static void ask_grant(struct co_member *m)
{
    Fl__XferGrant g = FL__XFER_GRANT__INIT;
    Fl__Error e;

    g.set = m->c->set;
    g.attempt = m->c->o.attempt;
    g.asked = m->asked;
    msg_error(&m->c->why, &e);
    g.refused = m->c->why.status != FL_OK ? &e : NULL;
    co_call(m, FL_XFER_GRANT, &g.base, (struct fl_bytes){ 0 },
            m->wants_due_ns + COORD_END_MS * 1000000ull, co_heard_plain);
}

static bool is_granting(const struct co_member *m)
{
    return m == m->c->granting;
}

static void grant_say(struct xfer_coord *c, const struct fl_err *refused)
{
    c->why = refused ? *refused : (struct fl_err){ 0 };
    if (refused)
        fl_warn("weights begin refused set=%s member=\"%s\" why=\"%s\"", c->set,
                c->granting->me.name, refused->text);
    c->granting->wants = false;
    if (!refused)
        c->granting->early = false; /* it writes the next one */
    co_tell_late(c); /* before the source hears that it is refused */
    co_step_begin(c, CO_GRANT, "grant", co_due(c, COORD_END_MS), is_granting, ask_grant,
                  grant_over);
}

static void grant_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;
    struct xfer_run *next = c->next_run;

    (void)st; /* unheard, the source says so itself when its time is over */
    (void)err;
    c->granting = NULL;
    c->step = CO_IDLE;
    co_sweep(c);
    c->next_run = NULL;
    if (next) {
        co_run_begin(c, &c->next_req, next);
        return;
    }
    co_grant_next(c);
    co_make_ready(c); /* what it has published meanwhile */
}

static bool reads_slot(const struct co_member *m, const struct co_member *source)
{
    return !m->source && !m->gone && m->known && m->st.maps &&
           (m->st.maps_slot == source->wants_slot || m->st.maps_slot == XFER_ANY_SLOT) &&
           fl_seat_ref_same(&m->st.maps_who, &source->me.who);
}

static bool is_holder(const struct co_member *m)
{
    return reads_slot(m, m->c->granting);
}

static void heard_open(struct co_member *m, enum fl_status st, const struct wire_msg *reply,
                       const struct fl_err *why)
{
    struct fl_err err = why ? *why : (struct fl_err){ 0 };

    if (st == FL_UNREACHABLE || st == FL_AGAIN || st == FL_CANCELLED) {
        co_again(m, m->ask);
        return;
    }
    if (st == FL_NOT_FOUND && co_reads_nothing(m))
        st = FL_OK;
    else if (st == FL_OK && co_note_state(m, reply, &err))
        st = reads_slot(m, m->c->granting) ? FL_AGAIN : FL_OK;
    else if (st == FL_OK)
        st = err.status;
    if (st == FL_AGAIN)
        co_again(m, m->ask);
    else
        co_in(m, st, &err);
}

static void ask_open(struct co_member *m)
{
    struct xfer_coord *c = m->c;
    Fl__XferBegin b = FL__XFER_BEGIN__INIT;
    Fl__XferEpoch epoch;
    const uint64_t none[2] = { 0, 0 };

    msg_epoch(&c->epoch, &epoch);
    b.set = c->set;
    b.epoch = &epoch;
    b.mode = XFER_SHARE;
    b.slots = XFER_ONE_SLOT;
    b.number = c->granting->wants_number;
    b.plan = b.part = msg_hash(none);
    b.has_open = b.open = b.has_open_slot = true;
    b.open_slot = c->granting->wants_slot;
    fl_muster_at(c->muster, m->muster_at, "reads slot %u of %s", c->granting->wants_slot,
                 c->granting->me.name);
    co_call(m, FL_XFER_BEGIN, &b.base, (struct fl_bytes){ 0 }, c->granting->wants_due_ns,
            heard_open);
}

static void opened_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;
    struct fl_err why = { 0 };

    if (c->granting->gone || st == FL_OK || st == FL_UNREACHABLE) {
        grant_say(c, NULL); /* all are dirty, or gone */
        return;
    }
    fl_fail(&why, FL_TIMEOUT, "begin of version %" PRIu64 ": %s", c->granting->wants_number,
            err->text);
    grant_say(c, &why);
}

/* It has just said what it reads, or was at rest when it was last heard and cannot have moved
 * since. */
static bool is_settled(const struct co_member *m)
{
    return m->fresh ||
           (m->known && !m->st.maps && (m->st.state == RX_EMPTY || m->st.state == RX_SERVING));
}

static uint64_t grant_due(const struct xfer_coord *c)
{
    uint64_t due = co_due(c, COORD_RECONCILE_MS);

    return c->granting->wants_due_ns < due ? c->granting->wants_due_ns : due;
}

static void reported_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;
    unsigned holders = 0;
    struct fl_err why = { 0 };

    (void)st;
    (void)err;
    for (const struct co_member *m = c->members; m; m = m->next) {
        /* came while the others were asked */
        if (!m->source && !m->gone && !m->mustered && !is_settled(m)) {
            co_reconcile(c, grant_due(c), reported_over);
            return;
        }
    }
    for (const struct co_member *m = c->members; m; m = m->next) {
        if (!m->source && !m->gone && !is_settled(m) && why.status == FL_OK)
            fl_fail(&why, FL_TIMEOUT,
                    "begin of version %" PRIu64 ": %s does not say whether it reads slot %u of %s",
                    c->granting->wants_number, m->me.name, c->granting->wants_slot,
                    c->granting->me.name);
        if (!m->gone && m->known && m->st.seen.attempt == c->o.attempt &&
            m->st.seen.seq > c->epoch.seq)
            c->epoch.seq = m->st.seen.seq;
        holders += reads_slot(m, c->granting);
    }
    if (why.status != FL_OK) {
        grant_say(c, &why);
        return;
    }
    if (!holders) {
        grant_say(c, NULL);
        return;
    }
    c->epoch.seq++;
    co_step_begin(c, CO_OPEN, "give up a slot", c->granting->wants_due_ns, is_holder, ask_open,
                  opened_over);
}

void co_grant_next(struct xfer_coord *c)
{
    if (c->step != CO_IDLE)
        return; /* after the run: one thing at a time */
    for (struct co_member *m = c->members; m; m = m->next)
        if (m->source && m->wants && !m->gone) {
            c->granting = m;
            co_reconcile(c, grant_due(c), reported_over);
            return;
        }
}
