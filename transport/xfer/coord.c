#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/id.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "common/proto/methods.h"
#include "transport/xfer/coord_priv.h"
#include "transport/xfer/port_priv.h"

/* ---- one call a member ---- */

/* "bucket 3 of 12: "; of a source nothing. */
static const char *co_at_colon(const struct co_member *m, char text[CO_AT_BYTES])
{
    size_t len = m->source ? 0 : strlen(co_at(m, text));

    snprintf(text + len, CO_AT_BYTES - len, "%s", len ? ": " : "");
    return text;
}

static void on_reply(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                     const struct fl_err *err)
{
    struct co_member *m = container_of(op, struct co_member, op);
    struct fl_err late = { 0 };
    char at[CO_AT_BYTES];

    m->calling = false;
    if (m->heard && st == FL_TIMEOUT && fl_loop_now_ns(m->c->loop) >= m->call_due_ns) {
        m->late = true;
        m->answers = false;
        fl_fail(&late, FL_TIMEOUT, "%sno answer in %.1f s", co_at_colon(m, at),
                (double)(fl_loop_now_ns(m->c->loop) - m->c->step_ns) / 1e9);
        err = &late;
    }
    port_awake(m->c->loop, &m->st.place);
    if (m->heard && !m->gone)
        m->heard(m, st, reply, err);
}

static void on_again(struct fl_timer *t, uint64_t now_ns)
{
    struct co_member *m = container_of(t, struct co_member, again);

    (void)now_ns;
    if (!m->gone && !m->calling)
        m->ask(m);
}

void co_later(struct co_member *m, co_ask ask, uint64_t ms)
{
    m->ask = ask;
    fl_timer_arm_in(m->c->loop, &m->again, ms);
}

void co_again(struct co_member *m, co_ask ask)
{
    co_later(m, ask, COORD_AGAIN_MS);
}

void co_quiet(struct co_member *m)
{
    fl_timer_cancel(&m->again);
    m->heard = NULL; /* the end of a call in flight is of no interest any more */
    if (m->calling)
        call_cancel(&m->op);
}

void co_call(struct co_member *m, uint16_t method, const ProtobufCMessage *msg,
             struct fl_bytes blob, uint64_t due_ns, co_heard heard)
{
    struct call_args a = { .method = method, .lane = XFER_LANE, .due_ns = due_ns, .blob = blob };
    struct fl_err err = { 0 };
    enum fl_status st = msg_pack(msg, &a.body, &err);

    m->heard = heard;
    m->call_due_ns = due_ns;
    m->op.done = on_reply;
    port_awake(m->c->loop, &m->st.place);
    if (st == FL_OK) {
        m->calling = true;
        st = call_start(m->peer, &a, &m->op, &err);
        free((void *)(uintptr_t)a.body.data);
    }
    if (st == FL_OK)
        return;
    m->calling = false;
    if (st == FL_AGAIN || st == FL_UNREACHABLE)
        co_again(m, m->ask); /* between two connections: the step's deadline ends this */
    else
        heard(m, st, NULL, &err);
}

/* ---- a step: the same question to some, one muster ---- */

void co_in(struct co_member *m, enum fl_status st, const struct fl_err *err)
{
    co_times_in(m, st);
    if (m->mustered && m->c->muster)
        fl_muster_in(m->c->muster, m->muster_at, st, err);
}

void co_heard_plain(struct co_member *m, enum fl_status st, const struct wire_msg *reply,
                    const struct fl_err *err)
{
    (void)reply;
    if (st == FL_UNREACHABLE)
        co_again(m, m->ask);
    else
        co_in(m, st, err);
}

uint64_t co_due(const struct xfer_coord *c, uint64_t ms)
{
    return fl_loop_now_ns(c->loop) + ms * 1000000;
}

static void step_over(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct xfer_coord *c = arg;
    char at[CO_AT_BYTES];

    for (struct co_member *m = c->members; m && st == FL_TIMEOUT; m = m->next)
        if (m->mustered && !m->gone && fl_muster_status(c->muster, m->muster_at) == FL_AGAIN) {
            m->late = true;
            m->answers = false;
            if (m->why.status == FL_OK)
                fl_fail(&m->why, FL_TIMEOUT, "%s: %s: %sno answer in %.1f s", m->me.name,
                        m->source && c->step == CO_STAGE ? "begin at the source" : c->what,
                        co_at_colon(m, at), (double)(fl_loop_now_ns(c->loop) - c->step_ns) / 1e9);
        }
    c->over(c, st, err);
}

void co_tell_late(struct xfer_coord *c)
{
    bool source = false;

    for (const struct co_member *m = c->members; m; m = m->next)
        source |= m->late && m->source && !m->gone;
    for (struct co_member *m = c->members; m; m = m->next) {
        if (m->late && !m->gone && m->source == source && c->o.late)
            c->o.late(c->o.late_arg, m->me.who, m->answers, &m->why);
        m->late = false;
    }
}

bool co_silent(const struct co_member *m)
{
    return m->late && !m->answers;
}

static void ask_all(struct xfer_coord *c, co_ask ask, bool sources)
{
    for (struct co_member *m = c->members; m; m = m->next) {
        if (m->source != sources || !m->mustered)
            continue;
        if (m->ask == ask && !m->calling && !m->gone)
            ask(m);
        if (co_silent(m))
            fl_muster_excuse(c->muster, m->muster_at);
    }
}

void co_step_begin(struct xfer_coord *c, enum co_step step, const char *what, uint64_t due_ns,
                   bool (*who)(const struct co_member *m), co_ask ask,
                   void (*over)(void *arg, enum fl_status st, const struct fl_err *err))
{
    unsigned n = 0;
    struct fl_err err = { 0 };

    fl_muster_destroy(c->muster);
    c->muster = NULL;
    c->step = step;
    c->what = what;
    c->over = over;
    c->step_ns = fl_loop_now_ns(c->loop);
    for (struct co_member *m = c->members; m; m = m->next) {
        co_quiet(m); /* also those who are late: what they say now belongs to no step */
        m->mustered = !m->gone && who(m);
        m->not_now = false;
        n += m->mustered;
    }
    if (fl_muster_create(c->loop, what, n, due_ns, step_over, c, &c->muster, &err) != FL_OK) {
        fl_error("weights update cannot go on why=\"%s\"", err.text);
        over(c, err.status, &err);
        return;
    }
    n = 0;
    for (struct co_member *m = c->members; m; m = m->next) {
        if (!m->mustered)
            continue;
        m->muster_at = n++;
        co_times_asked(m);
        fl_muster_name(c->muster, m->muster_at, "%s", m->me.name);
        m->ask = ask;
    }
    ask_all(c, ask, false); /* engines first: they have the more to do */
    ask_all(c, ask, true);
}

/* ---- RECONCILE ---- */

static bool note_digests(struct co_member *m, const char *blob)
{
    size_t n = m->st.digest_bytes / sizeof(*m->digests);

    free(m->digests);
    m->digests = malloc(m->st.digest_bytes + 1);
    m->n_digests = m->digests ? n : 0;
    if (m->digests)
        memcpy(m->digests, blob + m->st.manifest_bytes, n * sizeof(*m->digests));
    return m->digests != NULL;
}

bool co_note_state(struct co_member *m, const struct wire_msg *reply, struct fl_err *err)
{
    return msg_read_state(reply, &m->st, err) == FL_OK;
}

static enum fl_status note_report(struct co_member *m, const struct wire_msg *reply,
                                  struct fl_err *err)
{
    struct xfer_manifest *fresh = NULL;
    struct xfer_state st;

    FL_TRY(msg_read_state(reply, &st, err));
    if (st.source != m->source || !fl_seat_ref_same(&st.who, &m->me.who))
        return fl_fail(err, FL_STALE, "another process answers, attempt %u", st.who.attempt);
    m->st = st;
    if (st.manifest_bytes)
        FL_TRY(xfer_manifest_decode(reply->blob, st.manifest_bytes, &fresh, err));
    if (fresh) {
        free(m->manifest);
        m->manifest = fresh;
        m->manifest->who = m->me.who;
        m->manifest->party = m->me.party;
    }
    if (!m->manifest)
        return fl_fail(err, FL_CORRUPT, "a report without a manifest");
    if (!note_digests(m, reply->blob))
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu digests",
                       (size_t)st.digest_bytes / 16);
    m->known = m->fresh = true;
    return FL_OK;
}

bool co_reads_nothing(struct co_member *m)
{
    if (!m->c->granting || m->source)
        return false;
    m->known = false;
    m->fresh = true;
    return true;
}

static void heard_report(struct co_member *m, enum fl_status st, const struct wire_msg *reply,
                         const struct fl_err *why)
{
    struct fl_err err = why ? *why : (struct fl_err){ 0 };

    /* Neither offered nor accepted: its program loads, and will. A fill is tried again as a
     * whole. */
    if (st == FL_NOT_FOUND && m->c->run && m->c->req.kind == XFER_ADVANCE) {
        fl_fail(&m->why, st, "%s: %s", m->me.name, err.text);
        fl_muster_at(m->c->muster, m->muster_at, "%s", err.text);
        co_again(m, m->ask);
        return;
    }
    if (st == FL_UNREACHABLE || st == FL_AGAIN ||
        (st == FL_CANCELLED && m->c->granting && !m->source)) {
        co_again(m, m->ask); /* cancelled: its program gives the set up, and has it no more then */
        return;
    }
    if (st == FL_NOT_FOUND && co_reads_nothing(m))
        st = FL_OK;
    else if (st == FL_OK)
        st = note_report(m, reply, &err);
    m->why = err;
    if (st != FL_OK && !m->source)
        fl_fail(&m->why, st, "%s: %s: %s", m->me.name, m->c->what, err.text);
    co_in(m, st, &err);
}

void co_ask_state(struct co_member *m, bool brief, uint64_t ms, co_heard heard)
{
    Fl__XferReconcile r = FL__XFER_RECONCILE__INIT;

    r.set = m->c->set;
    r.attempt = m->c->o.attempt;
    r.has_known = m->manifest != NULL;
    if (m->manifest)
        r.known = msg_hash(m->st.manifest);
    r.has_brief = true;
    r.brief = brief;
    co_call(m, FL_XFER_RECONCILE, &r.base, (struct fl_bytes){ 0 }, co_due(m->c, ms), heard);
}

static void ask_report(struct co_member *m)
{
    bool brief = m->c->granting || m->c->req.kind == XFER_ADVANCE; /* its sources have it */

    co_ask_state(m, brief, COORD_RECONCILE_MS, heard_report);
}

static bool anyone(const struct co_member *m)
{
    (void)m;
    return true;
}

void co_forget_run(struct xfer_coord *c)
{
    c->ready = false;
    for (struct co_member *m = c->members; m; m = m->next) {
        m->fresh = m->gives = false;
        m->phase = CO_OUT;
        if (!m->gone) /* else it says how */
            m->why = (struct fl_err){ 0 };
        m->n_parts = 0;
        m->late = m->answers = false;
    }
}

void co_reconcile(struct xfer_coord *c, uint64_t due_ns,
                  void (*over)(void *arg, enum fl_status st, const struct fl_err *err))
{
    co_forget_run(c);
    co_step_begin(c, CO_RECONCILE, "reconcile", due_ns, anyone, ask_report, over);
}

/* ---- members ---- */

static void member_free(struct co_member *m)
{
    co_quiet(m);
    fl_timer_cancel(&m->watch_again);
    if (m->watching) {
        m->gone = true;
        call_cancel(&m->watch_op);
    }
    free(m->manifest);
    free(m->digests);
    free(m->early_digests);
    free(m->parts);
    free(m->tickets);
    free(m);
}

bool co_missed(const struct co_member *m)
{
    bool others = false;

    for (const struct co_member *o = m->c->members; o && !m->source && m->gone; o = o->next) {
        if (o->gone || o->source)
            continue;
        if (memcmp(&o->me.who.id, &m->me.who.id, sizeof(m->me.who.id)) == 0)
            return false; /* started again */
        others |= o->me.party == m->me.party;
    }
    return others;
}

bool co_gives(const struct co_member *m)
{
    return m->gives;
}

void co_sweep(struct xfer_coord *c)
{
    for (struct co_member **at = &c->members; *at;) {
        struct co_member *m = *at;

        if (!m->gone || co_missed(m)) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        member_free(m);
    }
}

const char *co_at(const struct co_member *m, char text[CO_AT_BYTES])
{
    bool begun = !m->source && m->phase != CO_OUT && m->st.buckets_all &&
                 xfer_epoch_cmp(&m->st.seen, &m->c->epoch) == 0;

    if (begun)
        snprintf(text, CO_AT_BYTES, "bucket %u of %u", m->st.buckets_in, m->st.buckets_all);
    else
        snprintf(text, CO_AT_BYTES, "no bucket begun");
    return text;
}

static void member_gone(struct co_member *m, const struct fl_err *cause)
{
    const char *how = cause && cause->text[0] ? cause->text : "ended";
    char at[CO_AT_BYTES];

    if (m->gone)
        return;
    co_quiet(m);
    m->gone = true;
    m->c->ready = false;
    fl_timer_cancel(&m->watch_again);
    if (m->watching)
        call_cancel(&m->watch_op);
    if (m->c->run)
        fl_fail(&m->why, FL_UNREACHABLE, "%s is gone in %s%s%s: %s", m->me.name, m->c->what,
                m->source ? "" : ", ", m->source ? "" : co_at(m, at), how);
    else
        fl_fail(&m->why, FL_UNREACHABLE, "%s is gone: %s", m->me.name, how);
    if (m->c->step != CO_IDLE)
        co_run_gone(m);
    if (m->mustered && m->c->muster)
        fl_muster_excuse(m->c->muster, m->muster_at);
    if (m->c->step == CO_IDLE)
        co_sweep(m->c);
}

void xfer_coord_gone(struct xfer_coord *c, struct fl_seat_ref who, const struct fl_err *cause)
{
    for (struct co_member *m = c->members, *next; m; m = next) {
        next = m->next;
        if (!m->gone && fl_seat_ref_same(&m->me.who, &who)) {
            member_gone(m, cause);
            return;
        }
    }
}

static enum fl_status member_add(struct xfer_coord *c, struct call_peer *peer,
                                 const struct xfer_member *me, bool source, struct fl_err *err)
{
    struct fl_err replaced = { 0 };
    struct co_member *m, **last = &c->members;

    for (m = c->members; m; m = m->next) {
        if (m->gone || memcmp(&m->me.who.id, &me->who.id, sizeof(me->who.id)) != 0)
            continue;
        if (m->me.who.attempt >= me->who.attempt)
            return fl_fail(err, m->me.who.attempt == me->who.attempt ? FL_EXISTS : FL_STALE,
                           "attempt %u of %s is a member already", m->me.who.attempt, m->me.name);
        fl_fail(&replaced, FL_UNREACHABLE, "started again as attempt %u", me->who.attempt);
        member_gone(m, &replaced);
        break;
    }
    m = calloc(1, sizeof(*m));
    if (!m)
        return fl_fail(err, FL_EXHAUSTED, "no memory for member %s", me->name);
    *m = (struct co_member){ .c = c, .peer = peer, .me = *me, .source = source };
    m->again.fire = on_again;
    while (*last)
        last = &(*last)->next;
    *last = m;
    c->ready = false;
    if (source)
        co_watch(m);
    return FL_OK;
}

enum fl_status xfer_coord_add_source(struct xfer_coord *c, struct call_peer *peer,
                                     const struct xfer_member *m, struct fl_err *err)
{
    return member_add(c, peer, m, true, err);
}

enum fl_status xfer_coord_add_engine(struct xfer_coord *c, struct call_peer *peer,
                                     const struct xfer_member *m, struct fl_err *err)
{
    return member_add(c, peer, m, false, err);
}

/* ---- life ---- */

enum fl_status xfer_coord_create(struct fl_loop *l, const struct xfer_coord_opts *o,
                                 struct xfer_coord **out, struct fl_err *err)
{
    struct xfer_coord *c = calloc(1, sizeof(*c));

    if (!c)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a coordinator");
    c->loop = l;
    c->o = *o;
    c->epoch = (struct xfer_epoch){ .attempt = o->attempt };
    if (!FL_COPY(c->set, o->set)) {
        free(c);
        return fl_fail(err, FL_INVALID,
                       "the name \"%s\" of a set of weights is longer than %zu bytes", o->set,
                       sizeof(c->set) - 1);
    }
    c->delta_dir = o->delta_dir ? strdup(o->delta_dir) : NULL;
    if (o->delta_dir && !c->delta_dir) {
        free(c);
        return fl_fail(err, FL_EXHAUSTED, "no memory for a coordinator");
    }
    c->o.set = c->set;
    c->o.delta_dir = c->delta_dir;
    *out = c;
    return FL_OK;
}

enum fl_status xfer_start(struct xfer_coord *c, const struct xfer_request *req, struct xfer_run *r,
                          struct fl_err *err)
{
    if (c->run || c->next_run)
        return fl_fail(err, FL_AGAIN, "an update of \"%s\" is in flight: epoch %u.%u", c->set,
                       c->epoch.attempt, c->epoch.seq);
    if (c->step != CO_IDLE) { /* a source's begin is being granted: right after it */
        c->next_req = *req;
        c->next_run = r;
        return FL_OK;
    }
    co_run_begin(c, req, r);
    return FL_OK;
}

void xfer_coord_destroy(struct xfer_coord *c)
{
    struct xfer_run *run;
    struct fl_err err = { 0 };

    if (!c)
        return;
    run = c->run ? c->run : c->next_run;
    c->ending = true;
    fl_timer_cancel(&c->wake);
    fl_muster_destroy(c->muster);
    for (struct co_member *m = c->members; m; m = m->next)
        m->gone = true;
    c->step = CO_IDLE;
    co_sweep(c);
    if (run) {
        fl_fail(&err, FL_CANCELLED, "the coordinator of \"%s\" ends in epoch %u.%u", c->set,
                c->epoch.attempt, c->epoch.seq);
        run->done(run, FL_CANCELLED, &c->rep, &err);
    }
    xfer_plan_destroy(c->plan);
    free(c->tensors);
    free(c->by_index);
    free(c->held);
    free(c->expect);
    free(c->delta_dir);
    free(c);
}
