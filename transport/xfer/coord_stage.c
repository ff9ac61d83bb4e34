/* STAGE of an epoch: each taker begins, then is waited for until it has verified or failed */
#include <stdlib.h>
#include <string.h>
#include "common/proto/methods.h"
#include "transport/xfer/coord_priv.h"

static void ask_wait(struct co_member *m);
static void ask_keep(struct co_member *m);

bool co_fills(const struct xfer_coord *c)
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
void co_party_fail(struct co_member *failed)
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
    co_party_fail(m);
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
    if (st == FL_UNREACHABLE || (st == FL_AGAIN && (m->ask == ask_wait || !co_fills(m->c)))) {
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

void co_ask_take(struct co_member *m)
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
    return c->n_there + (co_fills(c) ? 1 : live);
}

/* By somebody who answers: RECONCILE says what has changed there. */
static bool was_refused(enum fl_status st)
{
    return st != FL_OK && st != FL_UNREACHABLE && st != FL_TIMEOUT && st != FL_CORRUPT;
}

void co_staged_over(void *arg, enum fl_status st, const struct fl_err *err)
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

bool co_takes(const struct co_member *m)
{
    return m->phase == CO_TAKES;
}

void co_stage_step(struct xfer_coord *c)
{
    co_step_begin(c, CO_STAGE, "stage", c->req.due_ns, co_takes, co_ask_take, co_staged_over);
}
