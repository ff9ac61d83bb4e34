/* transport/xfer/coord_end.c - the second half of an epoch: COMMIT, RESUME, ABORT, END, and the
 * report */
#include <inttypes.h>
#include <string.h>
#include "common/base/fault.h"
#include "common/base/log.h"
#include "transport/xfer/coord_priv.h"
#include "common/proto/methods.h"

void co_failed(struct co_member *m, enum fl_status st, const struct fl_err *err, const char *phase)
{
    struct fl_err why = { 0 };

    if (m->phase == CO_FAILED || m->phase == CO_COMMITTED)
        return;
    m->phase = CO_FAILED;
    if (err && strncmp(err->text, m->me.name, strlen(m->me.name)) == 0)
        m->why = *err; /* it names itself, bucket and giver too */
    else
        fl_fail(&why, st, "%s: %s: %s", m->me.name, phase,
                err && err->text[0] ? err->text : fl_status_name(st));
    if (why.status != FL_OK)
        m->why = why;
    m->why.status = st;
}

bool co_party_is(const struct xfer_coord *c, uint32_t party, enum co_phase phase)
{
    for (const struct co_member *m = c->members; m; m = m->next)
        if (!m->source && m->me.party == party && m->phase != CO_OUT && m->phase != phase)
            return false;
    return true;
}

bool co_first_of_party(const struct co_member *m)
{
    for (const struct co_member *o = m->c->members; o != m; o = o->next)
        if (!o->source && o->me.party == m->me.party && o->phase != CO_OUT)
            return false;
    return !m->source && m->phase != CO_OUT;
}

unsigned co_party_ranks(const struct xfer_coord *c, uint32_t party)
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

        if (!co_first_of_party(m))
            continue;
        if (co_party_is(c, m->me.party, CO_COMMITTED)) {
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

static void fill_report(struct xfer_coord *c)
{
    count_left(c);
    for (const struct co_member *m = c->members; m; m = m->next) {
        if (m->source || m->phase == CO_OUT || xfer_epoch_cmp(&m->st.seen, &c->epoch) != 0)
            continue; /* else its counts are of an epoch before */
        c->rep.bytes += m->st.bytes;
        c->rep.other_bytes += m->st.other_bytes;
        if (m->phase != CO_COMMITTED)
            continue;
        if (m->st.pause_ns > c->rep.pause_ns)
            c->rep.pause_ns = m->st.pause_ns;
        if (m->st.link_ns > c->rep.link_ns)
            c->rep.link_ns = m->st.link_ns;
        if (m->st.verify_ns > c->rep.verify_ns)
            c->rep.verify_ns = m->st.verify_ns;
    }
}

/* Last: done may start the next one, or destroy c. */
static void run_tell(struct xfer_coord *c, enum fl_status st, const struct fl_err *err)
{
    struct xfer_run *run = FL_TAKE(c->run);
    struct fl_err why = err && st != FL_OK ? *err : (struct fl_err){ 0 };
    struct xfer_report rep = c->rep;

    bool chose = c->req.mode == XFER_AUTO && st == FL_OK && rep.mode != c->auto_said;
    bool fill = c->req.kind == XFER_FILL; /* asked again and again: who asks says how it went */
    const char *text = st != FL_OK ? why.text : rep.first_left_behind.text;

    if (chose)
        c->auto_said = rep.mode;
    fl_log(fill || (st == FL_OK && !rep.n_left_behind && !chose)
               ? FL_LOG_DEBUG /* every step of a run has one */
               : FL_LOG_INFO,
           "weights %s %s set=%s epoch=%u.%u version=%" PRIu64
           " mode=%s committed=%u left_behind=%u bytes=%" PRIu64 " other_bytes=%" PRIu64
           " reconcile_us=%" PRIu64 " plan_us=%" PRIu64 " move_us=%" PRIu64 " verify_us=%" PRIu64
           " commit_us=%" PRIu64 " pause_us=%" PRIu64 " predicted_us=%" PRIu64 "%s%s%s",
           fill ? "fill" : "update", st == FL_OK ? "done" : "failed", c->set, rep.epoch.attempt,
           rep.epoch.seq, rep.now.number, xfer_mode_name(rep.mode), rep.n_committed,
           rep.n_left_behind, rep.bytes, rep.other_bytes, rep.reconcile_ns / 1000,
           rep.plan_ns / 1000, rep.move_ns / 1000, rep.verify_ns / 1000, rep.commit_ns / 1000,
           rep.pause_ns / 1000, rep.predicted_ns / 1000, *text ? " why=\"" : "", text,
           *text ? "\"" : "");
    if (st != FL_OK || rep.n_left_behind)
        co_times_say(c, fill ? FL_LOG_DEBUG : FL_LOG_INFO);
    run->done(run, st, &rep, &why);
}

static void run_close(struct xfer_coord *c)
{
    struct xfer_run *next = FL_TAKE(c->next_run);

    fl_muster_destroy(c->muster);
    c->muster = NULL;
    c->step = CO_IDLE;
    fl_timer_cancel(&c->wake);
    for (struct co_member *m = c->members; m; m = m->next)
        co_quiet(m);
    co_tell_late(c);
    co_sweep(c);
    if (next)
        co_run_begin(c, &c->next_req, next);
    else
        co_grant_next(c);
}

void co_run_finish(struct xfer_coord *c, enum fl_status st, const struct fl_err *err)
{
    struct fl_err why = err ? *err : (struct fl_err){ 0 };
    struct xfer_request req = c->req;

    c->warm = false;
    if (c->again && fl_loop_now_ns(c->loop) < req.due_ns) {
        co_run_begin(c, &req, c->run);
        return;
    }
    fill_report(c);
    run_close(c);
    run_tell(c, st, &why);
}

/* ---- END: givers ---- */

/* A version that was made from is gone from the folder, or damaged: it will be in the next update
 * too. */
static bool lacks_files(const struct co_member *m)
{
    return !m->source && m->phase == CO_FAILED && m->c->plan &&
           m->c->plan->mode == XFER_DISK_DELTA &&
           (m->why.status == FL_NOT_FOUND || m->why.status == FL_CORRUPT);
}

static void ask_end(struct co_member *m)
{
    Fl__XferEnd e = FL__XFER_END__INIT;
    Fl__XferEpoch epoch;
    bool good = true;

    for (const struct co_member *o = m->c->members; o; o = o->next) {
        good &= o->source || o->phase == CO_OUT || o->phase == CO_COMMITTED;
        e.has_files_bad |= lacks_files(o);
    }
    e.files_bad = e.has_files_bad;
    msg_epoch(&m->c->epoch, &epoch);
    e.set = m->c->set;
    e.epoch = &epoch;
    e.good = good;
    co_call(m, FL_XFER_END, &e.base, (struct fl_bytes){ 0 }, co_due(m->c, COORD_END_MS),
            co_heard_plain);
}

static void ended_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;

    if (st != FL_OK && st != FL_UNREACHABLE)
        fl_warn("weights giver not quiet set=%s why=\"%s\"", c->set, err->text);
    if (st != FL_OK && !c->run) /* whoever asked has been told that all is well */
        co_times_say(c, FL_LOG_INFO);
    c->warm = c->warm && st == FL_OK;
    if (c->run)
        co_run_finish(c, c->outcome, &c->why);
    else
        run_close(c);
}

/* When every engine has the version there is nothing left that the giver's end could change: the
 * run is told, and the next one, or a begin, waits for the end. */
void co_end_step(struct xfer_coord *c)
{
    bool all = c->outcome == FL_OK, any = false;

    for (const struct co_member *m = c->members; m; m = m->next) {
        all &= m->source || m->phase == CO_OUT || m->phase == CO_COMMITTED;
        any |= !m->source && m->phase == CO_COMMITTED;
    }
    co_step_begin(c, CO_END, "end of the epoch", co_due(c, COORD_END_MS), co_gives, ask_end,
                  ended_over);
    if (!all)
        return;
    c->warm |= any;
    fill_report(c);
    co_tell_late(c); /* before whoever asked goes on, as if all were well */
    run_tell(c, FL_OK, NULL);
}

/* ---- ABORT: takers that will not commit ---- */

static void heard_abort(struct co_member *m, enum fl_status st, const struct wire_msg *reply,
                        const struct fl_err *err)
{
    struct xfer_state s;

    if (st == FL_UNREACHABLE) {
        co_again(m, m->ask);
        return;
    }
    /* of the rest, what it said before */
    if (st == FL_OK && msg_read_state(reply, &s, NULL) == FL_OK) {
        m->st.state = s.state;
        m->st.bytes = s.bytes;
        m->st.other_bytes = s.other_bytes;
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
    co_call(m, FL_XFER_ABORT, &a.base, (struct fl_bytes){ 0 }, co_due(m->c, COORD_END_MS),
            heard_abort);
}

static void aborted_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;

    if (st != FL_OK && st != FL_UNREACHABLE)
        fl_warn("weights abort not quiet set=%s why=\"%s\"", c->set, err->text);
    co_end_step(c);
}

static bool is_aborted(const struct co_member *m)
{
    return !m->source && m->phase != CO_OUT && m->phase != CO_COMMITTED && m->fresh;
}

/* A step that nobody has a part in takes no turn. */
static bool nobody(const struct xfer_coord *c, bool (*who)(const struct co_member *m))
{
    for (const struct co_member *m = c->members; m; m = m->next)
        if (!m->gone && who(m))
            return false;
    return true;
}

static void abort_step(struct xfer_coord *c)
{
    if (nobody(c, is_aborted)) {
        co_end_step(c);
        return;
    }
    co_step_begin(c, CO_ABORT, "abort", co_due(c, COORD_END_MS), is_aborted, ask_abort,
                  aborted_over);
}

/* ---- PROBE: whoever was late, and those who were to give: slow, or silent? ---- */

static void heard_probe(struct co_member *m, enum fl_status st, const struct wire_msg *reply,
                        const struct fl_err *err)
{
    (void)reply;
    if (st == FL_UNREACHABLE || st == FL_AGAIN) {
        co_again(m, m->ask);
        return;
    }
    m->answers = st != FL_TIMEOUT;
    co_in(m, st, err);
}

static void ask_probe(struct co_member *m)
{
    co_ask_state(m, true, COORD_PROBE_MS, heard_probe);
}

static void probed_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    (void)st, (void)err; /* noted of each */
    abort_step(arg);
}

static bool is_probed(const struct co_member *m)
{
    return m->late || m->gives;
}

void co_abort_step(struct xfer_coord *c)
{
    bool late = false;

    for (struct co_member *m = c->members; m; m = m->next) {
        late |= m->late && !m->gone;
        m->answers = m->late; /* until the probe is over: it is waited for */
    }
    if (late)
        co_step_begin(c, CO_PROBE, "probe", co_due(c, COORD_PROBE_MS), is_probed, ask_probe,
                      probed_over);
    else
        abort_step(c);
}

/* ---- RESUME: engines of several ranks, when all have flipped ---- */

static void ask_resume(struct co_member *m)
{
    Fl__XferResume r = FL__XFER_RESUME__INIT;
    Fl__XferEpoch epoch;

    msg_epoch(&m->c->epoch, &epoch);
    r.set = m->c->set;
    r.epoch = &epoch;
    co_call(m, FL_XFER_RESUME, &r.base, (struct fl_bytes){ 0 }, co_due(m->c, COORD_END_MS),
            co_heard_plain);
}

static void resumed_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;

    for (struct co_member *m = c->members; m; m = m->next)
        if (m->mustered && st != FL_OK && fl_muster_status(c->muster, m->muster_at) != FL_OK)
            fl_warn("weights engine not resumed member=\"%s\" why=\"%s\"", m->me.name, err->text);
    co_abort_step(c);
}

/* Whole parties alone: one that is split between two versions serves neither. */
static bool is_resumed(const struct co_member *m)
{
    const struct xfer_coord *c = m->c;

    if (m->source || co_party_ranks(c, m->me.party) < 2)
        return false;
    if (m->phase ==
        CO_OUT) /* there already: a coordinator may have ended between flip and resume */
        return m->fresh && m->st.held && xfer_version_same(&m->st.serving, &c->target);
    return co_party_is(c, m->me.party, CO_COMMITTED);
}

void co_resume_step(struct xfer_coord *c)
{
    if (nobody(c, is_resumed)) {
        co_abort_step(c);
        return;
    }
    co_step_begin(c, CO_RESUME, "resume", co_due(c, COORD_END_MS), is_resumed, ask_resume,
                  resumed_over);
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
    if (st == FL_OK &&
        (m->st.state != RX_SERVING || !xfer_version_same(&m->st.serving, &m->c->target)))
        st = fl_fail(&err, FL_CANCELLED, "commit: it is %s, version %" PRIu64 ": %s",
                     rx_state_name(m->st.state), m->st.serving.number, m->st.why.text);
    if (st == FL_OK)
        m->phase = CO_COMMITTED;
    else
        co_failed(m, st, &err, "commit");
    co_in(m, st, &m->why);
}

/* As long as the whole update may take, within what a step of an engine may. */
static uint64_t commit_due(const struct xfer_coord *c)
{
    uint64_t ms = c->req.due_ns > c->run_ns ? (c->req.due_ns - c->run_ns) / 1000000 : 0;

    return co_due(c, ms < COORD_COMMIT_LEAST_MS ? COORD_COMMIT_LEAST_MS
                     : ms < COORD_COMMIT_MS     ? ms
                                                : COORD_COMMIT_MS);
}

static void ask_commit(struct co_member *m)
{
    Fl__XferCommit k = FL__XFER_COMMIT__INIT;
    Fl__XferEpoch epoch;

    msg_epoch(&m->c->epoch, &epoch);
    k.set = m->c->set;
    k.epoch = &epoch;
    k.hold = co_party_ranks(m->c, m->me.party) > 1;
    fl_muster_at(m->c->muster, m->muster_at, "commit, to the next step boundary");
    co_call(m, FL_XFER_COMMIT, &k.base, (struct fl_bytes){ 0 }, commit_due(m->c), heard_commit);
}

static void committed_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;
    char at[CO_AT_BYTES];

    c->rep.commit_ns = fl_loop_now_ns(c->loop) - c->step_ns;
    for (struct co_member *m = c->members; m; m = m->next)
        if (!m->source && m->phase == CO_STAGED && co_party_is(c, m->me.party, CO_STAGED)) {
            struct fl_err late = *err;

            if (st == FL_TIMEOUT)
                fl_fail(&late, st, "late, last heard in %s, %s", rx_state_name(m->st.state),
                        co_at(m, at));
            co_failed(m, st, &late, "commit");
        }
    co_resume_step(c);
}

static bool is_staged(const struct co_member *m)
{
    return !m->source && m->phase == CO_STAGED && co_party_is(m->c, m->me.party, CO_STAGED);
}

void co_commit_step(struct xfer_coord *c)
{
    if (FL_FAULT("xfer.decided")) { /* as if the coordinator had ended here: DESIGN 9, between
                                       VERIFIED and COMMIT */
        fl_fail(&c->why, FL_CANCELLED, "fault xfer.decided");
        co_run_finish(c, FL_CANCELLED, &c->why);
        return;
    }
    if (nobody(c, is_staged))
        co_resume_step(c); /* they have committed by themselves */
    else
        co_step_begin(c, CO_COMMIT, "commit", commit_due(c), is_staged, ask_commit, committed_over);
}
