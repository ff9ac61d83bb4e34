/* transport/xfer/coord_run.c - the first half of an epoch: RECONCILE, PLAN, GIVE, STAGE
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

/* ---- STAGE: begin, then wait, until each rank has verified or failed ---- */

static void ask_wait(struct co_member *m);
static void ask_keep(struct co_member *m);

/* An engine that cannot be filled now is left behind, and filled later. Held until its deadline the
 * fill would keep a begin from being granted, and what the engine waits for (its weights' memory
 * back) may come after that begin. */
static bool fills(const struct xfer_coord *c)
{
    return c->req.kind == XFER_FILL;
}

static void heard_verify(struct co_member *m, enum fl_status st, const struct wire_msg *reply,
                         const struct fl_err *err)
{
    (void)reply;
    if (st == FL_UNREACHABLE) {
        co_again(m, m->ask);
    } else if (st != FL_OK) {
        co_failed(m, st, err, "verify");
        co_in(m, st, &m->why);
    } else {
        m->phase = CO_TAKES;
        m->ask = ask_wait;
        ask_wait(m);
    }
}

static void ask_verify(struct co_member *m)
{
    Fl__XferVerify v = FL__XFER_VERIFY__INIT;
    Fl__XferEpoch epoch;
    uint32_t bad[XFER_NAMED_BAD], n_bad;

    msg_epoch(&m->c->epoch, &epoch);
    v.set = m->c->set;
    v.epoch = &epoch;
    v.good = co_party_sums(m->c, m->me.party, bad, &n_bad);
    v.bad_tensors = bad;
    v.n_bad_tensors = n_bad;
    co_call(m, FL_XFER_VERIFY, &v.base, (struct fl_bytes){ 0 }, co_due(m->c, COORD_WAIT_MS),
            heard_verify);
}

/* All ranks of the engine are in: their sums can be compared. */
static void party_verify(struct xfer_coord *c, uint32_t party)
{
    for (const struct co_member *m = c->members; m; m = m->next)
        if (!m->source && m->me.party == party && m->phase != CO_OUT && m->phase != CO_ALL_IN &&
            m->phase != CO_STAGED)
            return;
    for (struct co_member *m = c->members; m; m = m->next)
        if (!m->source && m->me.party == party && m->phase == CO_ALL_IN && m->ask != ask_verify) {
            co_quiet(m);
            m->ask = ask_verify;
            ask_verify(m);
        }
}

/* One rank failed: its engine cannot commit, and the others of it are not waited for. */
static void party_fail(struct co_member *failed)
{
    struct fl_err why = { 0 };

    for (struct co_member *m = failed->c->members; m; m = m->next) {
        if (m->source || m == failed || m->me.party != failed->me.party || m->phase == CO_OUT ||
            m->phase == CO_FAILED)
            continue;
        fl_fail(&why, failed->why.status, "another rank of the engine failed: %s",
                failed->why.text);
        co_quiet(m);
        co_failed(m, why.status, &why, "stage");
        co_in(m, why.status, &m->why);
    }
}

static void stage_failed(struct co_member *m, enum fl_status st, const struct fl_err *err)
{
    co_failed(m, st, err, "stage");
    co_in(m, st, &m->why);
    party_fail(m);
}

static void note_parts(struct co_member *m, const struct wire_msg *reply)
{
    free(m->parts);
    m->parts = malloc(m->st.digest_bytes + 1);
    m->n_parts = m->parts ? m->st.digest_bytes / 24 : 0;
    if (m->parts)
        memcpy(m->parts, (const char *)reply->blob + m->st.manifest_bytes, m->n_parts * 24);
}

static bool is_staged_there(const struct co_member *m)
{
    const struct xfer_state *s = &m->st;

    return s->state == RX_VERIFIED ||
           (s->state == RX_SERVING && xfer_version_same(&s->serving, &m->c->target));
}

static void stage_settle(struct co_member *m)
{
    struct xfer_coord *c = m->c;
    const struct xfer_state *s = &m->st;
    struct fl_err err = { 0 };

    fl_muster_at(c->muster, m->muster_at, "%s, bucket %u of %u",
                 s->state == RX_DIRTY ? "dirty" : "staging", s->buckets_in, s->buckets_all);
    if (xfer_epoch_cmp(&s->seen, &c->epoch) != 0) {
        fl_fail(&err, FL_STALE, "it is in epoch %u.%u now", s->seen.attempt, s->seen.seq);
        stage_failed(m, FL_STALE, &err);
    } else if (is_staged_there(m)) {
        m->phase = CO_STAGED;
        co_later(m, ask_keep, COORD_KEEP_MS);
        co_in(m, FL_OK, NULL);
        party_verify(c, m->me.party);
    } else if (s->all_in) {
        m->phase = CO_ALL_IN;
        co_later(m, ask_keep, COORD_KEEP_MS);
        party_verify(c, m->me.party);
    } else if (s->why.status != FL_OK || s->state == RX_ABORTING || s->state == RX_EMPTY ||
               s->state == RX_SERVING) {
        err = s->why;
        if (err.status == FL_OK)
            fl_fail(&err, FL_CANCELLED, "it is %s", rx_state_name(s->state));
        stage_failed(m, err.status, &err);
    } else {
        m->ask = ask_wait;
        ask_wait(m);
    }
}

static void heard_state(struct co_member *m, enum fl_status st, const struct wire_msg *reply,
                        const struct fl_err *why)
{
    struct fl_err err = why ? *why : (struct fl_err){ 0 };

    if (m->ask != ask_wait && co_begun(m, st)) {
        m->ask(m);
        return;
    }
    if (st == FL_UNREACHABLE || (st == FL_AGAIN && (m->ask == ask_wait || !fills(m->c)))) {
        if (m->ask == ask_wait)
            fl_muster_at(m->c->muster, m->muster_at, "no answer; staging, bucket %u of %u before",
                         m->st.buckets_in, m->st.buckets_all);
        else
            fl_muster_at(m->c->muster, m->muster_at, "begin: %s", err.text);
        m->not_now = m->ask != ask_wait;
        co_again(m, m->ask);
        return;
    }
    if (st == FL_OK && !co_note_state(m, reply, &err))
        st = err.status;
    if (st != FL_OK) {
        stage_failed(m, st, &err);
        return;
    }
    if (m->st.all_in)
        note_parts(m, reply);
    stage_settle(m);
}

/* It has its part and waits for others. */
static void heard_keep(struct co_member *m, enum fl_status st, const struct wire_msg *reply,
                       const struct fl_err *why)
{
    struct fl_err err = why ? *why : (struct fl_err){ 0 };

    if (st == FL_UNREACHABLE || st == FL_AGAIN) {
        co_again(m, m->ask);
        return;
    }
    if (st == FL_OK && !co_note_state(m, reply, &err))
        st = err.status;
    if (st != FL_OK)
        stage_failed(m, st, &err);
    else if (xfer_epoch_cmp(&m->st.seen, &m->c->epoch) == 0 &&
             (m->phase == CO_STAGED ? is_staged_there(m) : m->st.all_in))
        co_later(m, ask_keep, COORD_KEEP_MS);
    else
        stage_settle(m);
}

static void wait_for(struct co_member *m, co_heard heard)
{
    Fl__XferWait w = FL__XFER_WAIT__INIT;
    Fl__XferEpoch epoch;

    msg_epoch(&m->c->epoch, &epoch);
    w.set = m->c->set;
    w.epoch = &epoch;
    w.wait_ms = COORD_WAIT_MS;
    /* answered earlier when more are in, so that a message can name the bucket */
    w.has_have_in = true;
    w.have_in = m->st.buckets_in;
    co_call(m, FL_XFER_WAIT, &w.base, (struct fl_bytes){ 0 }, co_due(m->c, 2 * COORD_WAIT_MS),
            heard);
}

static void ask_wait(struct co_member *m)
{
    wait_for(m, heard_state);
}

static void ask_keep(struct co_member *m)
{
    wait_for(m, heard_keep);
}

/* ---- BEGIN to a taker ---- */

/* Nobody else takes, so nobody is to be waited for between VERIFIED and COMMIT. */
static bool is_alone(const struct xfer_coord *c, const struct co_member *m)
{
    return c->n_takers == 1 && co_party_ranks(c, m->me.party) == 1 &&
           (c->req.least_engines <= 1 + c->n_there);
}

static const struct co_member *giver_of(const struct xfer_coord *c)
{
    for (const struct co_member *m = c->members; m; m = m->next)
        if (m->gives && m->delta_dir[0])
            return m;
    return NULL;
}

static void ask_take(struct co_member *m)
{
    struct xfer_coord *c = m->c;
    size_t digests = c->plan->n_tensors * sizeof(*c->expect);
    const struct co_member *wrote = giver_of(c);
    struct co_begin b;
    struct fl_err err = { 0 };
    enum fl_status st = co_begin_make(c, m, &b, &err);
    char *blob = st == FL_OK ? malloc(b.part_bytes + digests + 1) : NULL;

    if (!m->not_now) /* else the reason stays, also while the question is on its way once more */
        fl_muster_at(c->muster, m->muster_at, "begin");
    if (st == FL_OK && !blob)
        st = fl_fail(&err, FL_EXHAUSTED, "no memory to begin at %s", m->me.name);
    if (st == FL_OK) {
        if (b.part_bytes)
            memcpy(blob, b.part, b.part_bytes);
        memcpy(blob + b.part_bytes, c->expect, digests);
        b.b.delta_dir = wrote ? (char *)(uintptr_t)wrote->delta_dir : NULL;
        b.b.has_hold = true;
        b.b.hold = co_party_ranks(c, m->me.party) > 1;
        b.b.has_commit = b.b.has_wait_ms = true;
        b.b.wait_ms = COORD_BEGIN_WAIT_MS;
        b.b.commit = is_alone(c, m);
        co_call(m, FL_XFER_BEGIN, &b.b.base, (struct fl_bytes){ blob, b.part_bytes + digests },
                co_due(c, COORD_END_MS), heard_state);
    }
    co_begin_free(&b);
    free(blob);
    if (st != FL_OK)
        stage_failed(m, st, &err);
}

/* ---- after STAGE ---- */

static unsigned parties_staged(const struct xfer_coord *c)
{
    unsigned n = 0;

    for (const struct co_member *m = c->members; m; m = m->next)
        n += co_first_of_party(m) && co_party_is(c, m->me.party, CO_STAGED);
    return n;
}

static unsigned parties_live(const struct xfer_coord *c)
{
    unsigned n = 0;

    for (const struct co_member *m = c->members; m; m = m->next) {
        bool live = co_first_of_party(m);

        for (const struct co_member *o = c->members; o && live; o = o->next)
            live = o->source || o->me.party != m->me.party || !o->gone;
        n += live;
    }
    return n;
}

/* An engine of one slot, or one that was alone, has flipped by itself when it verified: there is no
 * way back for it, and nothing to tell it. */
static bool note_committed(struct xfer_coord *c)
{
    bool any = false;

    for (struct co_member *m = c->members; m; m = m->next)
        if (!m->source && m->phase == CO_STAGED && m->st.state == RX_SERVING) {
            any = true;
            if (co_party_ranks(c, m->me.party) == 1)
                m->phase = CO_COMMITTED;
        }
    return any;
}

/* All that were asked have staged, but some did not even report. */
static void few_staged(struct xfer_coord *c, unsigned have, unsigned least)
{
    const struct co_member *m = c->members;

    while (m && (m->source || m->phase != CO_FAILED))
        m = m->next;
    c->outcome = m ? m->why.status : FL_UNREACHABLE;
    fl_fail(&c->why, c->outcome, "%u engines hold the version, %u must%s%s", have, least,
            m ? "; " : "", m ? m->why.text : "");
}

/* Engines that must hold the version. In a fill each stands for itself: one whose memory is
 * given away would else keep another from serving, for whom the driver may wait before it gives
 * it back. */
static unsigned least_engines(const struct xfer_coord *c, unsigned live)
{
    if (c->req.least_engines)
        return c->req.least_engines;
    return c->n_there + (fills(c) ? 1 : live);
}

/* By somebody who answers: RECONCILE says what has changed there. */
static bool was_refused(enum fl_status st)
{
    return st != FL_OK && st != FL_UNREACHABLE && st != FL_TIMEOUT && st != FL_CORRUPT;
}

static void staged_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;
    unsigned staged = parties_staged(c), live = parties_live(c);
    unsigned least = least_engines(c, live);
    bool committed = note_committed(c);
    char at[CO_AT_BYTES];

    c->rep.move_ns = fl_loop_now_ns(c->loop) - c->step_ns;
    for (struct co_member *m = c->members; m; m = m->next)
        if (!m->source && (m->phase == CO_TAKES || m->phase == CO_ALL_IN)) {
            struct fl_err late = { 0 };

            fl_fail(&late, FL_TIMEOUT, "late, last heard in %s, %s", rx_state_name(m->st.state),
                    co_at(m, at));
            co_failed(m, FL_TIMEOUT, &late, "stage");
        }
    c->outcome = FL_OK;
    if (co_source_at_fault(c, &c->why)) {
        c->outcome = c->why.status;
    } else if (c->give_why.status != FL_OK && !staged) {
        c->why = c->give_why;
        c->outcome = c->why.status;
    } else if (staged + c->n_there < least || (live == 0 && c->n_takers > 0)) {
        c->outcome = st != FL_OK ? st : FL_UNREACHABLE;
        c->why = *err;
        if (st == FL_OK)
            few_staged(c, staged + c->n_there, least);
    }
    c->again = c->early && !committed && live && was_refused(c->outcome);
    if (c->outcome == FL_OK || committed)
        co_commit_step(c);
    else
        co_abort_step(c);
}

static bool is_taker(const struct co_member *m)
{
    return m->phase == CO_TAKES;
}

static void stage_step(struct xfer_coord *c)
{
    co_step_begin(c, CO_STAGE, "stage", c->req.due_ns, is_taker, ask_take, staged_over);
}

/* ---- GIVE: sources first, so that tickets are there ---- */

/* In one step with STAGE: who takes from it would wait for what does not come. */
static void give_refused(struct co_member *giver, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = giver->c;

    fl_fail(&c->give_why, st, "begin at the source: %s: %s", giver->me.name, err->text);
    for (struct co_member *m = c->members; m; m = m->next) {
        if (m->source || (m->phase != CO_TAKES && m->phase != CO_ALL_IN))
            continue;
        co_quiet(m);
        co_failed(m, st, &c->give_why, "begin");
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
    if (st == FL_UNREACHABLE || (st == FL_AGAIN && !fills(m->c))) {
        fl_muster_at(m->c->muster, m->muster_at, "%s", err.text);
        co_again(m, m->ask);
        return;
    }
    if (st == FL_OK)
        st = co_note_begun(m, reply, &err);
    if (st != FL_OK)
        fl_fail(&m->why, st, "%s: begin at the source: %s", m->me.name, err.text);
    if (st != FL_OK && m->c->step == CO_STAGE)
        give_refused(m, st, &err);
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
        stage_step(c);
        return;
    }
    c->outcome = st;
    c->why = *err;
    for (struct co_member *m = c->members; m; m = m->next)
        if (m->phase == CO_TAKES)
            co_failed(m, st, err, "begin"); /* nothing has begun there */
    co_end_step(c);
}

static bool is_asked_to_give(const struct co_member *m)
{
    return m->gives;
}

/* ---- both in one ---- */

static void ask_begin(struct co_member *m)
{
    if (m->gives)
        ask_give(m);
    else
        ask_take(m);
}

static bool gives_or_takes(const struct co_member *m)
{
    return m->gives || is_taker(m);
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
        co_step_begin(c, CO_STAGE, "stage", c->req.due_ns, gives_or_takes, ask_begin, staged_over);
    else
        co_step_begin(c, CO_GIVE, "begin at the source", c->req.due_ns, is_asked_to_give, ask_give,
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

/* A dead giver gives nothing more: nobody waits for its bytes. Who has them all may still serve
 * them. */
static void giver_gone(struct co_member *giver)
{
    for (struct co_member *m = giver->c->members; m; m = m->next) {
        if (m->source || m == giver || (m->phase != CO_TAKES && m->phase != CO_ALL_IN))
            continue;
        co_quiet(m);
        co_failed(m, FL_UNREACHABLE, &giver->why, "stage");
        co_in(m, FL_UNREACHABLE, &m->why);
    }
}

/* Dead in the middle: its engine is left behind, and who was to take from it. */
void co_run_gone(struct co_member *m)
{
    struct xfer_coord *c = m->c;
    struct fl_err why = m->why;

    if (m->gives && c->step == CO_STAGE)
        giver_gone(m);
    if (!m->source && c->run && c->step == CO_RECONCILE)
        m->phase = CO_TAKES; /* it is not known yet whether it would have */
    if (m->source || m->phase == CO_OUT || m->phase == CO_COMMITTED)
        return;
    co_failed(m, FL_UNREACHABLE, &why, "stage");
    party_fail(m);
}
