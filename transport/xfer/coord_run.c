/* transport/xfer/coord_run.c - the steps of one epoch: RECONCILE, GIVE, STAGE, COMMIT, RESUME, ABORT, END
 *
 * Each is one question to some members and one muster. A call that came back FL_UNREACHABLE is asked
 * again until the step's deadline: every message is answered from the state, so a repeat changes nothing. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "common/proto/methods.h"
#include "transport/xfer/coord_priv.h"

static void commit_step(struct xfer_coord *c);
static void abort_step(struct xfer_coord *c);
static void end_step(struct xfer_coord *c);

static void note_failed(struct co_member *m, enum fl_status st, const struct fl_err *err, const char *phase)
{
    struct fl_err why = { 0 };

    if (m->phase == CO_FAILED || m->phase == CO_COMMITTED)
        return;
    m->phase = CO_FAILED;
    if (err && strncmp(err->text, m->me.name, strlen(m->me.name)) == 0)
        m->why = *err; /* it names itself, bucket and giver too */
    else
        fl_fail(&why, st, "%s: %s: %s", m->me.name, phase, err && err->text[0] ? err->text : fl_status_name(st));
    if (why.status != FL_OK)
        m->why = why;
    m->why.status = st;
}

static bool party_is(const struct xfer_coord *c, uint32_t party, enum co_phase phase)
{
    for (const struct co_member *m = c->members; m; m = m->next)
        if (!m->source && m->me.party == party && m->phase != CO_OUT && m->phase != phase)
            return false;
    return true;
}

static bool first_of_party(const struct co_member *m)
{
    for (const struct co_member *o = m->c->members; o != m; o = o->next)
        if (!o->source && o->me.party == m->me.party && o->phase != CO_OUT)
            return false;
    return !m->source && m->phase != CO_OUT;
}

static unsigned party_ranks(const struct xfer_coord *c, uint32_t party)
{
    unsigned n = 0;

    for (const struct co_member *m = c->members; m; m = m->next)
        n += !m->source && !m->gone && m->me.party == party;
    return n;
}

/* ---- the end ---- */

static void count_left(struct xfer_coord *c)
{
    struct xfer_report *r = &c->rep;

    r->n_committed = c->n_there;
    for (const struct co_member *m = c->members; m; m = m->next) {
        const struct co_member *f = NULL;

        if (!first_of_party(m))
            continue;
        if (party_is(c, m->me.party, CO_COMMITTED)) {
            r->n_committed++;
            continue;
        }
        for (const struct co_member *o = c->members; o && !f; o = o->next)
            if (!o->source && o->me.party == m->me.party && o->phase == CO_FAILED)
                f = o;
        if (f && r->n_left_behind == 0)
            r->first_left_behind = f->why;
        if (r->n_left_behind < XFER_NAMED_LEFT_BEHIND) {
            r->left[r->n_left_behind].party = m->me.party;
            r->left[r->n_left_behind].why = f ? f->why : (struct fl_err){ 0 };
        }
        r->n_left_behind++;
    }
}

void co_run_finish(struct xfer_coord *c, enum fl_status st, const struct fl_err *err)
{
    struct xfer_run *run = c->run;
    struct fl_err why = err && st != FL_OK ? *err : (struct fl_err){ 0 };
    struct xfer_report rep;

    count_left(c);
    for (const struct co_member *m = c->members; m; m = m->next) {
        if (m->source || m->phase == CO_OUT)
            continue;
        c->rep.bytes += m->st.bytes;
        if (m->phase != CO_COMMITTED)
            continue;
        if (m->st.pause_ns > c->rep.pause_ns)
            c->rep.pause_ns = m->st.pause_ns;
        if (m->st.verify_ns > c->rep.verify_ns)
            c->rep.verify_ns = m->st.verify_ns;
    }
    fl_muster_destroy(c->muster);
    c->muster = NULL;
    c->step = CO_IDLE;
    c->run = NULL;
    rep = c->rep;
    for (struct co_member *m = c->members; m; m = m->next)
        co_quiet(m);
    co_sweep(c);
    fl_log(st == FL_OK && !rep.n_left_behind ? FL_LOG_DEBUG : FL_LOG_INFO, /* every step of a run has one */
           "weights update %s set=%s epoch=%u.%u version=%" PRIu64 " committed=%u left_behind=%u bytes=%" PRIu64
           " move_ms=%" PRIu64 " pause_us=%" PRIu64 " predicted_ms=%" PRIu64,
           st == FL_OK ? "done" : "failed", c->set, rep.epoch.attempt, rep.epoch.seq, rep.now.number,
           rep.n_committed, rep.n_left_behind, rep.bytes, rep.move_ns / 1000000, rep.pause_ns / 1000,
           rep.predicted_ns / 1000000);
    co_grant_next(c);
    run->done(run, st, &rep, &why); /* last: it may start the next one, or destroy c */
}

/* ---- END: givers ---- */

static void heard_end(struct co_member *m, enum fl_status st, const struct wire_msg *reply, const struct fl_err *err)
{
    (void)reply;
    if (st == FL_UNREACHABLE)
        co_again(m, m->ask);
    else
        co_in(m, st, err);
}

static void ask_end(struct co_member *m)
{
    Fl__XferEnd e = FL__XFER_END__INIT;
    Fl__XferEpoch epoch;
    bool good = true;

    for (const struct co_member *o = m->c->members; o; o = o->next)
        good &= o->source || o->phase == CO_OUT || o->phase == CO_COMMITTED;
    msg_epoch(&m->c->epoch, &epoch);
    e.set = m->c->set;
    e.epoch = &epoch;
    e.good = good;
    co_call(m, FL_XFER_END, &e.base, (struct fl_bytes){ 0 }, co_due(m->c, COORD_END_MS), heard_end);
}

static void ended_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;

    if (st != FL_OK && st != FL_UNREACHABLE)
        fl_warn("weights giver not quiet set=%s why=\"%s\"", c->set, err->text);
    co_run_finish(c, c->outcome, &c->why);
}

static bool is_giver(const struct co_member *m)
{
    return m->gives;
}

static void end_step(struct xfer_coord *c)
{
    co_step_begin(c, CO_END, "end of the epoch", co_due(c, COORD_END_MS), is_giver, ask_end, ended_over);
}

/* ---- ABORT: takers that will not commit ---- */

static void heard_abort(struct co_member *m, enum fl_status st, const struct wire_msg *reply, const struct fl_err *err)
{
    struct xfer_state s;

    if (st == FL_UNREACHABLE) {
        co_again(m, m->ask);
        return;
    }
    if (st == FL_OK && msg_read_state(reply, &s, NULL) == FL_OK) {
        uint32_t n = m->st.n_bad_tensors;

        s.n_bad_tensors = s.n_bad_tensors ? s.n_bad_tensors : n; /* keep what it said before */
        m->st.state = s.state;
        m->st.bytes = s.bytes;
    }
    co_in(m, st, err);
}

static void ask_abort(struct co_member *m)
{
    Fl__XferAbort a = FL__XFER_ABORT__INIT;
    Fl__XferEpoch epoch;
    Fl__Error why;

    msg_epoch(&m->c->epoch, &epoch);
    a.set = m->c->set;
    a.epoch = &epoch;
    msg_error(&m->why, &why);
    a.why = m->why.status != FL_OK ? &why : NULL;
    co_call(m, FL_XFER_ABORT, &a.base, (struct fl_bytes){ 0 }, co_due(m->c, COORD_END_MS), heard_abort);
}

static void aborted_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;

    if (st != FL_OK && st != FL_UNREACHABLE)
        fl_warn("weights abort not quiet set=%s why=\"%s\"", c->set, err->text);
    end_step(c);
}

static bool is_aborted(const struct co_member *m)
{
    return !m->source && m->phase != CO_OUT && m->phase != CO_COMMITTED && m->fresh;
}

static void abort_step(struct xfer_coord *c)
{
    co_step_begin(c, CO_ABORT, "abort", co_due(c, COORD_END_MS), is_aborted, ask_abort, aborted_over);
}

/* ---- RESUME: engines of several ranks, when all have flipped ---- */

static void heard_resume(struct co_member *m, enum fl_status st, const struct wire_msg *reply, const struct fl_err *err)
{
    (void)reply;
    if (st == FL_UNREACHABLE)
        co_again(m, m->ask);
    else
        co_in(m, st, err);
}

static void ask_resume(struct co_member *m)
{
    Fl__XferResume r = FL__XFER_RESUME__INIT;
    Fl__XferEpoch epoch;

    msg_epoch(&m->c->epoch, &epoch);
    r.set = m->c->set;
    r.epoch = &epoch;
    co_call(m, FL_XFER_RESUME, &r.base, (struct fl_bytes){ 0 }, co_due(m->c, COORD_END_MS), heard_resume);
}

static void resumed_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;

    for (struct co_member *m = c->members; m; m = m->next)
        if (m->mustered && st != FL_OK && fl_muster_status(c->muster, m->muster_at) != FL_OK)
            fl_warn("weights engine not resumed member=\"%s\" why=\"%s\"", m->me.name, err->text);
    abort_step(c);
}

/* Whole parties alone: one that is split between two versions serves neither. */
static bool is_resumed(const struct co_member *m)
{
    const struct xfer_coord *c = m->c;

    if (m->source || party_ranks(c, m->me.party) < 2)
        return false;
    if (m->phase == CO_OUT) /* there already: a coordinator may have ended between flip and resume */
        return m->fresh && m->st.held && xfer_version_same(&m->st.serving, &c->target);
    return party_is(c, m->me.party, CO_COMMITTED);
}

static void resume_step(struct xfer_coord *c)
{
    co_step_begin(c, CO_RESUME, "resume", co_due(c, COORD_END_MS), is_resumed, ask_resume, resumed_over);
}

/* ---- COMMIT ---- */

static void heard_commit(struct co_member *m, enum fl_status st, const struct wire_msg *reply,
                         const struct fl_err *why)
{
    struct fl_err err = why ? *why : (struct fl_err){ 0 };

    if (st == FL_UNREACHABLE) {
        co_again(m, m->ask);
        return;
    }
    if (st == FL_OK && !co_note_state(m, reply, &err))
        st = err.status;
    if (st == FL_OK && (m->st.state != RX_SERVING || !xfer_version_same(&m->st.serving, &m->c->target)))
        st = fl_fail(&err, FL_CANCELLED, "commit: it is %s, version %" PRIu64 ": %s", rx_state_name(m->st.state),
                     m->st.serving.number, m->st.why.text);
    if (st == FL_OK)
        m->phase = CO_COMMITTED;
    else
        note_failed(m, st, &err, "commit");
    co_in(m, st, &m->why);
}

static void ask_commit(struct co_member *m)
{
    Fl__XferCommit k = FL__XFER_COMMIT__INIT;
    Fl__XferEpoch epoch;

    msg_epoch(&m->c->epoch, &epoch);
    k.set = m->c->set;
    k.epoch = &epoch;
    k.hold = party_ranks(m->c, m->me.party) > 1;
    fl_muster_at(m->c->muster, m->muster_at, "commit, to the next step boundary");
    co_call(m, FL_XFER_COMMIT, &k.base, (struct fl_bytes){ 0 }, co_due(m->c, COORD_COMMIT_MS), heard_commit);
}

static void committed_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;

    c->rep.commit_ns = fl_loop_now_ns(c->loop) - c->step_ns;
    for (struct co_member *m = c->members; m; m = m->next)
        if (!m->source && m->phase == CO_STAGED && party_is(c, m->me.party, CO_STAGED))
            note_failed(m, st, err, "commit");
    resume_step(c);
}

static bool is_staged(const struct co_member *m)
{
    return !m->source && m->phase == CO_STAGED && party_is(m->c, m->me.party, CO_STAGED);
}

static void commit_step(struct xfer_coord *c)
{
    if (FL_FAULT("xfer.commit")) { /* as if the coordinator had ended here: DESIGN 9, between VERIFIED and COMMIT */
        fl_fail(&c->why, FL_CANCELLED, "fault xfer.commit");
        co_run_finish(c, FL_CANCELLED, &c->why);
        return;
    }
    co_step_begin(c, CO_COMMIT, "commit", co_due(c, COORD_COMMIT_MS), is_staged, ask_commit, committed_over);
}

/* ---- STAGE: begin, then wait, until each rank has verified or failed ---- */

static void ask_wait(struct co_member *m);
static void stage_settle(struct co_member *m);

static void heard_verify(struct co_member *m, enum fl_status st, const struct wire_msg *reply,
                         const struct fl_err *err)
{
    (void)reply;
    if (st == FL_UNREACHABLE) {
        co_again(m, m->ask);
    } else if (st != FL_OK) {
        note_failed(m, st, err, "verify");
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
    co_call(m, FL_XFER_VERIFY, &v.base, (struct fl_bytes){ 0 }, co_due(m->c, COORD_WAIT_MS), heard_verify);
}

/* All ranks of the engine are in: their sums can be compared. */
static void party_verify(struct xfer_coord *c, uint32_t party)
{
    for (const struct co_member *m = c->members; m; m = m->next)
        if (!m->source && m->me.party == party && m->phase != CO_OUT && m->phase != CO_ALL_IN &&
            m->phase != CO_STAGED)
            return;
    for (struct co_member *m = c->members; m; m = m->next)
        if (!m->source && m->me.party == party && m->phase == CO_ALL_IN && !m->calling) {
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
        fl_fail(&why, failed->why.status, "another rank of the engine failed: %s", failed->why.text);
        co_quiet(m);
        note_failed(m, why.status, &why, "stage");
        co_in(m, why.status, &m->why);
    }
}

static void stage_failed(struct co_member *m, enum fl_status st, const struct fl_err *err)
{
    note_failed(m, st, err, "stage");
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

static void stage_settle(struct co_member *m)
{
    struct xfer_coord *c = m->c;
    const struct xfer_state *s = &m->st;
    struct fl_err err = { 0 };

    fl_muster_at(c->muster, m->muster_at, "%s, bucket %u of %u", s->state == RX_DIRTY ? "dirty" : "staging",
                 s->buckets_in, s->buckets_all);
    if (xfer_epoch_cmp(&s->seen, &c->epoch) != 0) {
        fl_fail(&err, FL_STALE, "it is in epoch %u.%u now", s->seen.attempt, s->seen.seq);
        stage_failed(m, FL_STALE, &err);
    } else if (s->state == RX_VERIFIED || (s->state == RX_SERVING && xfer_version_same(&s->serving, &c->target))) {
        m->phase = CO_STAGED;
        co_in(m, FL_OK, NULL);
        party_verify(c, m->me.party);
    } else if (s->all_in) {
        m->phase = CO_ALL_IN;
        party_verify(c, m->me.party);
    } else if (s->why.status != FL_OK || s->state == RX_ABORTING || s->state == RX_EMPTY || s->state == RX_SERVING) {
        err = s->why;
        if (err.status == FL_OK)
            fl_fail(&err, FL_CANCELLED, "it is %s", rx_state_name(s->state));
        stage_failed(m, err.status, &err);
    } else {
        m->ask = ask_wait;
        ask_wait(m);
    }
}

static void heard_state(struct co_member *m, enum fl_status st, const struct wire_msg *reply, const struct fl_err *why)
{
    struct fl_err err = why ? *why : (struct fl_err){ 0 };

    if (st == FL_UNREACHABLE || st == FL_AGAIN) {
        if (m->ask == ask_wait)
            fl_muster_at(m->c->muster, m->muster_at, "no answer; staging, bucket %u of %u before", m->st.buckets_in,
                         m->st.buckets_all);
        else
            fl_muster_at(m->c->muster, m->muster_at, "begin: %s", err.text);
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

static void ask_wait(struct co_member *m)
{
    Fl__XferWait w = FL__XFER_WAIT__INIT;
    Fl__XferEpoch epoch;

    msg_epoch(&m->c->epoch, &epoch);
    w.set = m->c->set;
    w.epoch = &epoch;
    w.wait_ms = COORD_WAIT_MS;
    co_call(m, FL_XFER_WAIT, &w.base, (struct fl_bytes){ 0 }, co_due(m->c, 2 * COORD_WAIT_MS), heard_state);
}

/* ---- BEGIN to a taker ---- */

struct team_msg { /* what one XferTeam points at */
    Fl__XferTeam t;
    Fl__XferPlace *places, **place_list;
    struct msg_member *members;
    Fl__XferMember **member_list;
};

static void team_free(struct team_msg *t)
{
    free(t->places);
    free(t->place_list);
    free(t->members);
    free(t->member_list);
}

static struct co_member *by_index(struct xfer_coord *c, uint32_t index)
{
    for (struct co_member *m = c->members; m; m = m->next)
        if (m->index == index && ((m->gives && index < c->plan->n_sources) ||
                                  (!m->source && m->phase != CO_OUT && m->fresh && index >= c->plan->n_sources)))
            return m;
    return NULL;
}

static const struct link_ops *link_of(const struct xfer_coord *c, const struct xfer_edge *e)
{
    return c->o.links ? c->o.links[e->link] : link_table[e->link];
}

/* The giver, then the takers; of those who pull none needs to know of the others. */
static bool team_make(struct xfer_coord *c, const struct xfer_edge *e, const struct co_member *self, uint32_t edge,
                      struct team_msg *out)
{
    const struct link_ops *ops = link_of(c, e);
    bool pulls = (ops->caps & LINK_PULL) || c->plan->mode == XFER_SHARE;
    unsigned n = pulls ? (self->gives && self->index == e->from ? 1 : 2) : e->n_to + 1;
    bool good = true;

    *out = (struct team_msg){ .places = calloc(n, sizeof(*out->places)),
                              .place_list = calloc(n, sizeof(*out->place_list)),
                              .members = calloc(n, sizeof(*out->members)),
                              .member_list = calloc(n, sizeof(*out->member_list)) };
    fl__xfer_team__init(&out->t);
    if (!out->places || !out->place_list || !out->members || !out->member_list)
        return false;
    for (unsigned i = 0; i < n && good; i++) {
        const struct co_member *m = i == 0  ? by_index(c, e->from)
                                    : pulls ? self
                                            : by_index(c, c->plan->to[e->first_to + i - 1]);

        good = m != NULL;
        if (!good)
            break;
        msg_place(&m->st.place, &out->places[i]);
        out->place_list[i] = &out->places[i];
        msg_member(&m->me, &out->members[i]);
        out->member_list[i] = &out->members[i].m;
        if (m == self)
            out->t.self = i;
    }
    out->t.edge = edge;
    out->t.link = (char *)(uintptr_t)ops->name;
    out->t.n_places = out->t.n_members = n;
    out->t.places = out->place_list;
    out->t.members = out->member_list;
    return good;
}

static bool edge_has(const struct xfer_coord *c, const struct xfer_edge *e, uint32_t member)
{
    if (e->from == member)
        return true;
    for (uint32_t i = 0; i < e->n_to; i++)
        if (c->plan->to[e->first_to + i] == member)
            return true;
    return false;
}

/* Where edge is among the edges of member's part. */
static uint32_t edge_in_part(const struct xfer_coord *c, uint32_t edge, uint32_t member)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < edge; i++)
        n += edge_has(c, &c->plan->edges[i], member);
    return n;
}

struct begin_msg {
    Fl__XferBegin b;
    Fl__XferEpoch epoch;
    Fl__XferVersion target;
    struct team_msg *teams;
    Fl__XferTeam **list;
    void *part;
    size_t part_bytes;
};

static void begin_free(struct begin_msg *b)
{
    for (size_t i = 0; i < b->b.n_teams; i++)
        team_free(&b->teams[i]);
    free(b->teams);
    free(b->list);
    free(b->part);
}

static bool begin_teams(struct xfer_coord *c, struct co_member *m, struct begin_msg *b)
{
    uint32_t mine = 0;

    b->teams = calloc(c->plan->n_edges + 1, sizeof(*b->teams));
    b->list = calloc(c->plan->n_edges + 1, sizeof(*b->list));
    if (!b->teams || !b->list)
        return false;
    b->b.teams = b->list;
    for (uint32_t i = 0; i < c->plan->n_edges; i++) {
        const struct xfer_edge *e = &c->plan->edges[i];
        struct team_msg *t = &b->teams[b->b.n_teams];
        struct co_member *giver;

        if (!edge_has(c, e, m->index))
            continue;
        if (e->link == XFER_LINK_DISK) {
            mine++;
            continue;
        }
        b->list[b->b.n_teams++] = &t->t;
        if (!team_make(c, e, m, mine++, t))
            return false;
        giver = by_index(c, e->from);
        if (giver == m)
            continue;
        t->t.has_giver_edge = t->t.has_ticket = true;
        t->t.giver_edge = edge_in_part(c, i, e->from);
        if (t->t.giver_edge >= giver->n_tickets)
            return false;
        t->t.ticket = (ProtobufCBinaryData){ sizeof(giver->tickets[0]), giver->tickets[t->t.giver_edge] };
    }
    return true;
}

static enum fl_status begin_make(struct xfer_coord *c, struct co_member *m, struct begin_msg *b, struct fl_err *err)
{
    *b = (struct begin_msg){ 0 };
    fl__xfer_begin__init(&b->b);
    msg_epoch(&c->epoch, &b->epoch);
    msg_version(&c->target, &b->target);
    FL_TRY(xfer_part_encode(c->plan, m->index, &b->part, &b->part_bytes, err));
    b->b.set = c->set;
    b->b.epoch = &b->epoch;
    b->b.target = &b->target;
    b->b.mode = c->plan->mode;
    b->b.slots = c->plan->slots;
    b->b.number = c->target.number;
    b->b.plan = msg_hash(c->plan->hash);
    b->b.part = msg_hash(c->plan->part_hash[m->index]);
    b->b.has_part_bytes = b->b.has_member = true;
    b->b.part_bytes = b->part_bytes;
    b->b.member = m->index;
    if (!begin_teams(c, m, b))
        return fl_fail(err, FL_EXHAUSTED, "no memory, or no ticket, to begin at %s", m->me.name);
    return FL_OK;
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
    struct begin_msg b;
    struct fl_err err = { 0 };
    enum fl_status st = begin_make(c, m, &b, &err);
    char *blob = st == FL_OK ? malloc(b.part_bytes + digests + 1) : NULL;

    fl_muster_at(c->muster, m->muster_at, "begin");
    if (st == FL_OK && !blob)
        st = fl_fail(&err, FL_EXHAUSTED, "no memory to begin at %s", m->me.name);
    if (st == FL_OK) {
        memcpy(blob, b.part, b.part_bytes);
        memcpy(blob + b.part_bytes, c->expect, digests);
        b.b.delta_dir = wrote ? (char *)(uintptr_t)wrote->delta_dir : NULL;
        b.b.has_hold = true;
        b.b.hold = party_ranks(c, m->me.party) > 1;
        co_call(m, FL_XFER_BEGIN, &b.b.base, (struct fl_bytes){ blob, b.part_bytes + digests }, co_due(c, COORD_END_MS),
                heard_state);
    }
    begin_free(&b);
    free(blob);
    if (st != FL_OK)
        stage_failed(m, st, &err);
}

/* ---- after STAGE ---- */

static unsigned parties_staged(const struct xfer_coord *c)
{
    unsigned n = 0;

    for (const struct co_member *m = c->members; m; m = m->next)
        n += first_of_party(m) && party_is(c, m->me.party, CO_STAGED);
    return n;
}

static unsigned parties_live(const struct xfer_coord *c)
{
    unsigned n = 0;

    for (const struct co_member *m = c->members; m; m = m->next) {
        bool live = first_of_party(m);

        for (const struct co_member *o = c->members; o && live; o = o->next)
            live = o->source || o->me.party != m->me.party || !o->gone;
        n += live;
    }
    return n;
}

/* A one-slot engine has flipped by itself when it verified: there is no way back for it. */
static bool any_committed(const struct xfer_coord *c)
{
    for (const struct co_member *m = c->members; m; m = m->next)
        if (!m->source && m->phase == CO_STAGED && m->st.state == RX_SERVING)
            return true;
    return false;
}

static void staged_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;
    unsigned staged = parties_staged(c), live = parties_live(c);
    unsigned least = c->req.least_engines ? c->req.least_engines : live + c->n_there;

    c->rep.move_ns = fl_loop_now_ns(c->loop) - c->step_ns;
    for (struct co_member *m = c->members; m; m = m->next)
        if (!m->source && (m->phase == CO_TAKES || m->phase == CO_ALL_IN)) {
            struct fl_err late = { 0 };

            fl_fail(&late, FL_TIMEOUT, "at the deadline it was %s, bucket %u of %u", rx_state_name(m->st.state),
                    m->st.buckets_in, m->st.buckets_all);
            note_failed(m, FL_TIMEOUT, &late, "stage");
        }
    c->outcome = FL_OK;
    if (co_source_at_fault(c, &c->why)) {
        c->outcome = c->why.status;
    } else if (staged + c->n_there < least || (live == 0 && c->n_takers > 0)) {
        c->outcome = st != FL_OK ? st : FL_UNREACHABLE;
        c->why = *err;
        if (st == FL_OK)
            fl_fail(&c->why, FL_UNREACHABLE, "%u engines hold the version, %u must", staged + c->n_there, least);
    }
    if (c->outcome == FL_OK || any_committed(c))
        commit_step(c);
    else
        abort_step(c);
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

static enum fl_status note_begun(struct co_member *m, const struct wire_msg *reply, struct fl_err *err)
{
    Fl__XferBegun *r = fl__xfer_begun__unpack(NULL, reply->head.body_bytes, reply->body);
    bool good = r != NULL;

    free(m->tickets);
    m->n_tickets = m->c->plan->n_edges;
    m->tickets = calloc(m->n_tickets + 1, sizeof(*m->tickets));
    m->delta_dir[0] = '\0';
    good = good && m->tickets;
    for (size_t i = 0; good && i < r->n_tickets; i++) {
        good = r->tickets[i]->edge < m->n_tickets && r->tickets[i]->ticket.len == sizeof(m->tickets[0]);
        if (good)
            memcpy(m->tickets[r->tickets[i]->edge], r->tickets[i]->ticket.data, sizeof(m->tickets[0]));
    }
    if (good && r->delta_dir)
        good = FL_COPY(m->delta_dir, r->delta_dir);
    if (r)
        fl__xfer_begun__free_unpacked(r, NULL);
    return good ? FL_OK : fl_fail(err, FL_CORRUPT, "tickets that do not decode");
}

static void heard_give(struct co_member *m, enum fl_status st, const struct wire_msg *reply, const struct fl_err *why)
{
    struct fl_err err = why ? *why : (struct fl_err){ 0 };

    if (st == FL_UNREACHABLE || st == FL_AGAIN) {
        fl_muster_at(m->c->muster, m->muster_at, "%s", err.text);
        co_again(m, m->ask);
        return;
    }
    if (st == FL_OK)
        st = note_begun(m, reply, &err);
    co_in(m, st, &err);
}

static void ask_give(struct co_member *m)
{
    struct xfer_coord *c = m->c;
    struct begin_msg b;
    struct fl_err err = { 0 };
    enum fl_status st = begin_make(c, m, &b, &err);

    fl_muster_at(c->muster, m->muster_at, "begin");
    if (st == FL_OK) {
        b.b.give = true;
        b.b.delta_dir = c->delta_dir;
        co_call(m, FL_XFER_BEGIN, &b.b.base, (struct fl_bytes){ b.part, b.part_bytes }, c->req.due_ns, heard_give);
    }
    begin_free(&b);
    if (st != FL_OK)
        co_in(m, st, &err);
}

static void given_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;

    if (st == FL_OK) {
        stage_step(c);
        return;
    }
    c->outcome = st;
    c->why = *err;
    for (struct co_member *m = c->members; m; m = m->next)
        if (m->phase == CO_TAKES)
            note_failed(m, st, err, "begin"); /* nothing has begun there */
    end_step(c);
}

static bool is_asked_to_give(const struct co_member *m)
{
    return m->gives;
}

/* ---- RECONCILE and PLAN ---- */

static void planned(struct xfer_coord *c)
{
    uint64_t now = fl_loop_now_ns(c->loop);
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
                note_failed(m, st, &err, "plan");
            m->gives = false; /* nobody has begun */
        }
        c->outcome = st;
        c->why = err;
        if (!any && c->n_takers && c->n_there < (c->req.least_engines ? c->req.least_engines : c->n_there + c->n_takers))
            c->outcome = fl_fail(&c->why, FL_TIMEOUT, "no engine that lacks version %" PRIu64 " has reported",
                                 c->target.number);
        resume_step(c);
        return;
    }
    c->rep.plan_ns = fl_loop_now_ns(c->loop) - now;
    c->rep.mode = c->plan->mode;
    c->rep.predicted_ns = c->plan->predicted_ns;
    fl_debug("weights plan set=%s epoch=%u.%u version=%" PRIu64 " mode=%s slots=%d edges=%zu buckets=%zu bytes=%" PRIu64
            " predicted_ms=%" PRIu64,
            c->set, c->epoch.attempt, c->epoch.seq, c->target.number, xfer_mode_name(c->plan->mode),
            c->plan->slots == XFER_ONE_SLOT ? 1 : 2, c->plan->n_edges, c->plan->n_buckets, c->plan->bytes,
            c->plan->predicted_ns / 1000000);
    co_step_begin(c, CO_GIVE, "begin at the source", c->req.due_ns, is_asked_to_give, ask_give, given_over);
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

void co_run_begin(struct xfer_coord *c, const struct xfer_request *req, struct xfer_run *r)
{
    c->req = *req;
    c->run = r;
    c->rep = (struct xfer_report){ .mode = req->mode };
    c->target = (struct xfer_version){ 0 };
    c->outcome = FL_OK;
    c->why = (struct fl_err){ 0 };
    c->n_takers = c->n_there = 0;
    co_reconcile(c, reconciled_over);
}

/* Dead in the middle: its engine is left behind, and where it was a giver those who need it say so. */
void co_run_gone(struct co_member *m)
{
    struct fl_err why = m->why;

    if (m->source || m->phase == CO_OUT || m->phase == CO_COMMITTED)
        return;
    note_failed(m, FL_UNREACHABLE, &why, "stage");
    party_fail(m);
}
