/* transport/xfer/coord_run.c - the first half of an epoch: RECONCILE, PLAN, GIVE, and on to STAGE
 *
 * GIVE comes before STAGE because takers need the givers' tickets. When everyone did the same plan
 * in the epoch before they are known, and both are one step.
 *
 * Each is one question to some members and one muster. A call that came back FL_UNREACHABLE is
 * asked again until the step's deadline: every message is answered from the state, so a repeat
 * changes nothing. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/log.h"
#include "common/base/str.h"
#include "common/proto/methods.h"
#include "transport/xfer/coord_priv.h"
#include "transport/xfer/port_priv.h"

/* ---- GIVE: sources first, so that tickets are there ---- */

/* Nobody waits for bytes that do not come. Who has them all may still serve them. */
static void takers_fail(struct xfer_coord *c, enum fl_status st, const struct fl_err *why,
                        const char *phase)
{
    for (struct co_member *m = c->members; m; m = m->next) {
        if (m->source || m->gives || (m->phase != CO_TAKES && m->phase != CO_ALL_IN))
            continue;
        co_quiet(m);
        co_failed(m, st, why, phase);
        co_in(m, st, &m->why);
    }
}

static void heard_give(struct co_member *m, enum fl_status st, const struct wire_msg *reply,
                       const struct fl_err *why)
{
    struct fl_err err = why ? *why : (struct fl_err){ 0 };

    if (co_begun(m, st)) {
        m->ask(m);
        return;
    }
    if (st == FL_UNREACHABLE || (st == FL_AGAIN && !co_fills(m->c))) {
        fl_muster_at(m->c->muster, m->muster_at, "%s", err.text);
        co_again(m, m->ask);
        return;
    }
    if (st == FL_OK)
        st = co_note_begun(m, reply, &err);
    if (st != FL_OK)
        fl_fail(&m->why, st, "%s: begin at the source: %s", m->me.name, err.text);
    if (st != FL_OK && m->c->step == CO_STAGE) { /* both in one */
        fl_fail(&m->c->give_why, st, "begin at the source: %s: %s", m->me.name, err.text);
        takers_fail(m->c, st, &m->c->give_why, "begin");
    }
    co_in(m, st, &err);
}

static void ask_give(struct co_member *m)
{
    struct xfer_coord *c = m->c;
    struct co_begin b;
    struct fl_err err = { 0 };
    enum fl_status st = co_begin_make(c, m, &b, &err);

    fl_muster_at(c->muster, m->muster_at, "begin");
    if (st == FL_OK) {
        b.b.give = true;
        b.b.delta_dir = c->delta_dir;
        co_call(m, FL_XFER_BEGIN, &b.b.base, (struct fl_bytes){ b.part, b.part_bytes },
                c->req.due_ns, heard_give);
    }
    co_begin_free(&b);
    if (st != FL_OK)
        co_in(m, st, &err);
}

static void given_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;

    for (const struct co_member *m = c->members; m; m = m->next)
        if (m->gives && m->gone) {
            st = FL_UNREACHABLE;
            err = &m->why;
        }
    if (st == FL_OK) {
        co_stage_step(c);
        return;
    }
    c->outcome = st;
    c->why = *err;
    for (struct co_member *m = c->members; m; m = m->next)
        if (m->phase == CO_TAKES)
            co_failed(m, st, err, "begin"); /* nothing has begun there */
    co_end_step(c);
}

/* ---- both in one ---- */

static void ask_begin(struct co_member *m)
{
    if (m->gives)
        ask_give(m);
    else
        co_ask_take(m);
}

static bool gives_or_takes(const struct co_member *m)
{
    return m->gives || co_takes(m);
}

/* Tickets of those who pull are no more than the way to the giver; where both sides act the line is
 * made anew when one of them has dropped it. */
static bool all_pull(const struct xfer_coord *c)
{
    for (size_t i = 0; i < c->plan->n_edges; i++) {
        uint32_t link = c->plan->edges[i].link;

        if (c->plan->mode != XFER_SHARE &&
            (link == XFER_LINK_DISK ||
             !((c->o.links ? c->o.links[link] : link_table[link])->caps & LINK_PULL)))
            return false;
    }
    return c->plan->mode != XFER_DISK_DELTA;
}

static void begin_step(struct xfer_coord *c)
{
    uint64_t ns = c->plan->predicted_ns;

    if (ns > XFER_AWAKE_NS / 2)
        fl_timer_arm(c->loop, &c->wake, fl_loop_now_ns(c->loop) + ns - ns / 16 - XFER_AWAKE_NS / 8);
    if (c->warm && all_pull(c))
        co_step_begin(c, CO_STAGE, "stage", c->req.due_ns, gives_or_takes, ask_begin,
                      co_staged_over);
    else
        co_step_begin(c, CO_GIVE, "begin at the source", c->req.due_ns, co_gives, ask_give,
                      given_over);
}

/* ---- RECONCILE and PLAN ---- */

/* Those that lack the version are all late, or refused: the first of them says why. */
static void none_reported(struct xfer_coord *c)
{
    const struct co_member *m = c->members;

    while (m && (m->source || m->phase != CO_FAILED))
        m = m->next;
    c->outcome =
        fl_fail(&c->why, FL_TIMEOUT, "no engine that lacks version %" PRIu64 " has reported%s%s",
                c->target.number, m ? ": " : "", m ? m->why.text : "");
}

void co_plan_stands(struct xfer_coord *c)
{
    c->rep.mode = c->plan->mode;
    fl_copy(c->rep.passed_over, sizeof(c->rep.passed_over), c->passed_over);
    c->rep.predicted_ns = c->plan->predicted_ns;
    fl_debug("weights plan set=%s epoch=%u.%u version=%" PRIu64
             " mode=%s slots=%d edges=%zu buckets=%zu bytes=%" PRIu64 " predicted_ms=%" PRIu64,
             c->set, c->epoch.attempt, c->epoch.seq, c->target.number,
             xfer_mode_name(c->plan->mode), c->plan->slots == XFER_ONE_SLOT ? 1 : 2,
             c->plan->n_edges, c->plan->n_buckets, c->plan->bytes, c->plan->predicted_ns / 1000000);
    begin_step(c);
}

static void planned(struct xfer_coord *c)
{
    uint64_t began_ns = fl_clock_boot_ns(); /* the loop's stands within a turn */
    struct fl_err err = { 0 };
    enum fl_status st = FL_OK;
    bool any = false;

    for (const struct co_member *m = c->members; m; m = m->next)
        any |= m->phase == CO_TAKES;
    if (any)
        st = co_plan(c, &err);
    if (st != FL_OK || !any) {
        for (struct co_member *m = c->members; m; m = m->next) {
            if (m->phase == CO_TAKES && st != FL_OK)
                co_failed(m, st, &err, "plan");
            m->gives = false; /* nobody has begun */
        }
        c->outcome = st;
        c->why = err;
        if (!any && c->n_takers &&
            c->n_there < (c->req.least_engines ? c->req.least_engines : c->n_there + c->n_takers))
            none_reported(c);
        co_resume_step(c);
        return;
    }
    c->rep.plan_ns = fl_clock_boot_ns() - began_ns;
    co_plan_stands(c);
}

static void reconciled_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;
    struct fl_err why = { 0 };

    (void)st; /* who did not report is left behind, or is a source and fails the run below */
    (void)err;
    c->rep.reconcile_ns = fl_loop_now_ns(c->loop) - c->step_ns;
    st = co_decide(c, &why);
    c->rep.epoch = c->epoch;
    c->rep.now = c->target;
    if (st != FL_OK) {
        co_run_finish(c, st, &why);
        return;
    }
    planned(c);
}

/* The answers are about to come: whoever has to act on them should not have to be woken. */
static void on_wake(struct fl_timer *t, uint64_t now_ns)
{
    struct xfer_coord *c = container_of(t, struct xfer_coord, wake);

    (void)now_ns;
    for (const struct co_member *m = c->members; m; m = m->next)
        if (m->gives)
            port_awake(c->loop, &m->st.place);
}

void co_run_begin(struct xfer_coord *c, const struct xfer_request *req, struct xfer_run *r)
{
    uint64_t now = fl_loop_now_ns(c->loop);
    uint64_t half = req->due_ns > now ? (req->due_ns - now) / 2 : 0; /* the rest is for the bytes */
    bool ready = co_is_ready(c, req);

    co_sweep(c); /* the dead who have been started again since */
    c->req = *req;
    c->run = r;
    c->rep = (struct xfer_report){ .mode = req->mode };
    c->outcome = FL_OK;
    c->why = c->give_why = (struct fl_err){ 0 };
    c->run_ns = now;
    co_times_begin(c);
    c->wake.fire = on_wake;
    c->early = ready;
    c->ready = c->again = false;
    if (ready) {
        c->rep.epoch = c->epoch;
        c->rep.now = c->target;
        co_plan_stands(c);
        return;
    }
    c->target = (struct xfer_version){ 0 };
    c->n_takers = c->n_there = 0;
    co_reconcile(
        c, now + (half < COORD_RECONCILE_MS * 1000000ull ? half : COORD_RECONCILE_MS * 1000000ull),
        reconciled_over);
}

/* Dead in the middle: its engine is left behind, and who was to take from it. */
void co_run_gone(struct co_member *m)
{
    struct xfer_coord *c = m->c;
    struct fl_err why = m->why;

    if (m->gives && c->step == CO_STAGE)
        takers_fail(c, FL_UNREACHABLE, &why, "stage");
    if (!m->source && c->run && c->step == CO_RECONCILE)
        m->phase = CO_TAKES; /* it is not known yet whether it would have */
    if (m->source || m->phase == CO_OUT || m->phase == CO_COMMITTED)
        return;
    co_failed(m, FL_UNREACHABLE, &why, "stage");
    co_party_fail(m);
}
