#include <stdlib.h>

#include "common/base/log.h"
#include "common/proto/pb.h"
#include "head/state.h"

/* What a worker asks of the head, relayed by its daemon. The same question asked again gets the
 * same answer: a driver that starts again finds its placement, its roles and its members. */
struct question {
    struct head *head;
    struct job *job;
    struct seat *from;
    struct call_req *req;
    const ProtobufCBinaryData *body;
};

static void *body_of(const struct question *q, const ProtobufCMessageDescriptor *d)
{
    void *m = pb_unpack(d, q->body->data, q->body->len, NULL);

    if (!m)
        reply_refuse(q->req, FL_CORRUPT, "a %s of %zu bytes cannot be decoded", d->short_name,
                     q->body->len);
    return m;
}

static void answer_when_durable(struct after *a, enum fl_status st, const struct fl_err *err)
{
    if (st == FL_OK)
        reply_empty(a->req);
    else
        call_fail(a->req, err);
    free(a);
}

/* ---- members ---- */

static bool listed(const struct seat *s, const struct job *j, const ProtobufCBinaryData *group,
                   const char *role)
{
    return s->job == j && s->rec->has_group && (!group || same_bytes(&s->rec->group, group)) &&
           (!role || strcmp(s->rec->role, role) == 0);
}

static int by_rank(const void *a, const void *b)
{
    const Fl__Where *x = *(Fl__Where *const *)a, *y = *(Fl__Where *const *)b;
    int d = strcmp(x->role, y->role);

    return d ? d : x->rank < y->rank ? -1 : x->rank > y->rank;
}

static void reply_members(struct head *h, struct call_req *req, struct job *j,
                          const ProtobufCBinaryData *group, const char *role)
{
    Fl__Members m = FL__MEMBERS__INIT;
    size_t n = HASH_COUNT(h->seats);
    Fl__Where *all = must(calloc(n + 1, sizeof(*all)));
    Fl__SeatRef *refs = must(calloc(n + 1, sizeof(*refs)));
    struct seat *s, *tmp;

    m.members = must(calloc(n + 1, sizeof(*m.members)));
    HASH_ITER (hh, h->seats, s, tmp) {
        if (!listed(s, j, group, role))
            continue;
        members_fill(h, s, &all[m.n_members], &refs[m.n_members]);
        m.members[m.n_members] = &all[m.n_members];
        m.n_members++;
    }
    qsort(m.members, m.n_members, sizeof(*m.members), by_rank);
    reply_msg(req, &m);
    free(m.members);
    free(refs);
    free(all);
}

struct wanted_members {
    ProtobufCBinaryData group;
    uint8_t id[18];
    char role[64];
};

static void members_when_durable(struct after *a, enum fl_status st, const struct fl_err *err)
{
    struct wanted_members *w = a->arg;
    struct job *j = job_of(a->head, &(ProtobufCBinaryData){ sizeof(struct fl_job_id), a->key });

    w->group.data = w->id;
    if (st != FL_OK)
        call_fail(a->req, err);
    else if (!j)
        reply_refuse(a->req, FL_NOT_FOUND, "the job is gone");
    else
        reply_members(a->head, a->req, j, &w->group, w->role);
    free(w);
    free(a);
}

static void members_later(const struct question *q, const struct group *g, const char *role)
{
    struct after *a = after_new(q->head, members_when_durable);
    struct wanted_members *w = must(calloc(1, sizeof(*w)));

    memcpy(w->id, &g->id, sizeof(w->id));
    w->group.len = sizeof(w->id);
    (void)FL_COPY(w->role, role);
    a->arg = w;
    a->req = q->req;
    memcpy(a->key, &q->job->id, sizeof(q->job->id));
    head_after(a);
}

static void serve_list(struct question *q)
{
    reply_members(q->head, q->req, q->job, NULL, NULL);
}

static void serve_find(struct question *q)
{
    Fl__Find *m = body_of(q, &fl__find__descriptor);
    struct seat *s, *tmp, *found = NULL;
    Fl__Where w;
    Fl__SeatRef ref;

    if (!m)
        return;
    HASH_ITER (hh, q->head->seats, s, tmp)
        if (s->job == q->job && s->rec->rank == m->rank && strcmp(s->rec->role, m->role) == 0)
            found = s; /* the youngest group's */
    if (found) {
        members_fill(q->head, found, &w, &ref);
        reply_msg(q->req, &w);
    } else {
        reply_refuse(q->req, FL_NOT_FOUND, "job %s has no %s %u", q->job->rec->submission_id,
                     m->role, m->rank);
    }
    free_msg(m);
}

static void serve_step(struct question *q)
{
    Fl__StepRecord *m = body_of(q, &fl__step_record__descriptor);
    struct fl_err err;

    if (!m)
        return;
    if (steps_add(q->job, m->json, &err) == FL_OK) {
        reply_empty(q->req);
        followers_wake(q->job);
    } else {
        call_fail(q->req, &err);
    }
    free_msg(m);
}

/* ---- placement groups ---- */

static bool same_flags(const Fl__GroupRec *g, const Fl__Place *m)
{
    if (g->n_flags != m->n_flags)
        return false;
    for (size_t i = 0; i < m->n_flags; i++)
        if (strcmp(g->flags[i]->name, m->flags[i]->name) != 0 ||
            strcmp(g->flags[i]->value ? g->flags[i]->value : "",
                   m->flags[i]->value ? m->flags[i]->value : "") != 0)
            return false;
    return true;
}

static struct group *group_asked(struct question *q, const Fl__Place *m, struct fl_err *err)
{
    Fl__GroupRec rec = FL__GROUP_REC__INIT;
    struct layout_flags flags;
    struct group *g, *tmp;
    unsigned held = 0;

    HASH_ITER (hh, q->head->groups, g, tmp) {
        held += g->job == q->job;
        if (g->job == q->job && !g->rec->driver && same_flags(g->rec, m) &&
            g->rec->state != FL__GROUP_STATE__GROUP_ENDING)
            return g;
    }
    if (held >= HEAD_GROUPS_A_JOB) {
        fl_fail(err, FL_EXHAUSTED,
                "job %s holds %u placement groups, which is the most that one may; end one of them "
                "first",
                q->job->rec->submission_id, held);
        return NULL;
    }
    rec.flags = m->flags;
    rec.n_flags = m->n_flags;
    if (m->n_flags == 0) {
        fl_fail(err, FL_INVALID, "a placement needs at least one flag, such as --actor-num-nodes");
        return NULL;
    }
    if (flags_read(&rec, &flags, err) != FL_OK ||
        group_make(q->head, q->job, &rec, &g, err) != FL_OK)
        return NULL;
    return g;
}

static void serve_place(struct question *q)
{
    Fl__Place *m = body_of(q, &fl__place__descriptor);
    struct head *h = q->head;
    struct fl_err err = { 0 };
    uint64_t now = fl_loop_now_ns(h->loop);

    if (!m)
        return;
    struct group *g = journal_accepts(h->journal, &err) == FL_OK ? group_asked(q, m, &err) : NULL;
    if (!g) {
        call_fail(q->req, &err);
    } else if (g->rec->state == FL__GROUP_STATE__GROUP_PLACED && !g->placing &&
               !bundle_lost(g->rec)) {
        reply_msg(q->req, g->rec->layout);
    } else {
        struct ask *a = must(calloc(1, sizeof(*a)));

        a->req = q->req;
        a->group = g;
        a->due_ns = call_req_due_ns(q->req);
        a->once = m->has_wait_ms && m->wait_ms == 0;
        if (m->has_wait_ms && (!a->due_ns || now + m->wait_ms * 1000000ull < a->due_ns))
            a->due_ns = now + m->wait_ms * 1000000ull;
        DL_APPEND(g->asks, a);
        head_kick(h);
    }
    free_msg(m);
}

static struct group *own_group(const struct question *q, const ProtobufCBinaryData *id)
{
    struct group *g = group_of(q->head, id);

    if (g && g->job == q->job && g->rec->state != FL__GROUP_STATE__GROUP_ENDING)
        return g;
    reply_refuse(q->req, FL_NOT_FOUND, "job %s has no such placement group, or it has ended",
                 q->job->rec->submission_id);
    return NULL;
}

static void serve_group_end(struct question *q)
{
    Fl__Group *m = body_of(q, &fl__group__descriptor);
    struct group *g = m ? group_of(q->head, &m->group) : NULL;
    struct fl_err err;

    if (m && (!g || g->job != q->job)) {
        reply_empty(q->req); /* it has ended already */
    } else if (g) {
        struct after *a = after_new(q->head, answer_when_durable);

        a->req = q->req;
        if (group_end(q->head, g, a, &err) != FL_OK)
            call_fail(q->req, &err);
    }
    free_msg(m);
}

/* ---- roles ---- */

static uint32_t ranks_of(const struct group *g, const char *role)
{
    uint32_t n = 0;

    for (size_t i = 0; g->rec->layout && i < g->rec->layout->n_ranks; i++)
        n += strcmp(g->rec->layout->ranks[i]->role, role) == 0;
    return n;
}

static enum fl_status role_again(struct head *h, struct group *g, const char *role, bool ended_only,
                                 struct fl_err *err)
{
    struct seat *s, *tmp;

    HASH_ITER (hh, h->seats, s, tmp)
        if (listed(s, g->job, &g->rec->id, role) &&
            (!ended_only || s->rec->state == FL__SEAT_STATE__SEAT_CLOSED))
            FL_TRY(seat_again(s, s->rec->restarts, err));
    return FL_OK;
}

static enum fl_status launch(struct question *q, struct group *g, Fl__Launch *m, struct fl_err *err)
{
    Fl__RoleRec rec = FL__ROLE_REC__INIT;
    struct role *r = role_of(g, m->role);
    uint32_t world = ranks_of(g, m->role);
    bool was_ended = r && r->rec->ended;

    if (r && !was_ended)
        return FL_OK; /* it runs: its members are the answer */
    if (world == 0)
        return fl_fail(err, FL_INVALID, "the placement has no role %s", m->role);
    if (m->n_argv == 0)
        return fl_fail(err, FL_INVALID, "role %s has no command to run", m->role);
    if (strcmp(m->role, "driver") == 0 || strlen(m->role) > 31)
        return fl_fail(err, FL_INVALID, "%.40s is no name for a role", m->role);
    FL_TRY(journal_accepts(q->head->journal, err));
    rec.launch = m;
    rec.world = world;
    FL_TRY(head_record(q->head, REC_ROLE, &rec, NULL, err));
    if (was_ended)
        return role_again(q->head, g, m->role, true, err);
    for (uint32_t i = 0; i < world; i++) {
        struct fl_worker_id id;

        FL_TRY(fl_random(&id, sizeof(id), err));
        FL_TRY(seat_make(q->head, q->job, g, m->role, i, world, &id, err));
    }
    return FL_OK;
}

static void serve_launch(struct question *q)
{
    Fl__Launch *m = body_of(q, &fl__launch__descriptor);
    struct group *g = m ? own_group(q, &m->group) : NULL;
    struct fl_err err;

    if (g && g->rec->state != FL__GROUP_STATE__GROUP_PLACED)
        reply_refuse(q->req, FL_AGAIN, "the placement group is not placed yet");
    else if (g && launch(q, g, m, &err) != FL_OK)
        call_fail(q->req, &err);
    else if (g)
        members_later(q, g, m->role);
    head_kick(q->head);
    free_msg(m);
}

static void serve_role(struct question *q, bool again)
{
    Fl__Role *m = body_of(q, &fl__role__descriptor);
    struct group *g = m ? own_group(q, &m->group) : NULL;
    struct role *r = g ? role_of(g, m->role) : NULL;
    struct fl_err err;

    if (g && !r) {
        reply_refuse(q->req, FL_NOT_FOUND, "role %s was not launched in this placement group",
                     m->role);
    } else if (r && again && r->rec->ended) {
        reply_refuse(q->req, FL_INVALID, "role %s has ended; launch it again", m->role);
    } else if (r && again) {
        fl_info("role starts again role=%s job=%s why=\"%s\"", m->role, q->job->rec->submission_id,
                m->why ? m->why : "");
        if (role_again(q->head, g, m->role, false, &err) == FL_OK)
            members_later(q, g, m->role);
        else
            call_fail(q->req, &err);
    } else if (r) {
        Fl__RoleRec rec = *r->rec;
        struct after *a = after_new(q->head, answer_when_durable);

        a->req = q->req;
        rec.has_ended = rec.ended = true;
        if (head_record(q->head, REC_ROLE, &rec, a, &err) != FL_OK)
            call_fail(q->req, &err);
    }
    head_kick(q->head);
    free_msg(m);
}

static struct seat *seat_asked(const struct question *q, const Fl__MemberEnd *m)
{
    struct seat *s, *tmp;

    HASH_ITER (hh, q->head->seats, s, tmp)
        if (listed(s, q->job, &m->group, m->role) && s->rec->rank == m->rank)
            return s;
    reply_refuse(q->req, FL_NOT_FOUND, "job %s has no %s %u in that placement group",
                 q->job->rec->submission_id, m->role, m->rank);
    return NULL;
}

/* Kept in memory alone: a head that ends before the daemon has taken it is asked again. */
static void serve_member_end(struct question *q)
{
    Fl__MemberEnd *m = body_of(q, &fl__member_end__descriptor);
    struct seat *s = m ? seat_asked(q, m) : NULL;

    if (s && m->attempt > s->rec->who->attempt) {
        reply_refuse(q->req, FL_INVALID, "%s %u has no attempt %u yet, it is at %u", m->role,
                     m->rank, m->attempt, s->rec->who->attempt);
    } else if (s) {
        if (m->attempt == s->rec->who->attempt && s->rec->state == FL__SEAT_STATE__SEAT_LIVE &&
            !s->force_why) {
            s->force_why = must(strdup(m->why && *m->why ? m->why : "the driver ends it"));
            fl_info("worker is ended by its driver role=%s rank=%u attempt=%u job=%s why=\"%s\"",
                    m->role, m->rank, m->attempt, q->job->rec->submission_id, s->force_why);
            head_kick(q->head);
        }
        reply_empty(q->req);
    }
    free_msg(m);
}

static void serve_role_end(struct question *q)
{
    serve_role(q, false);
}

static void serve_role_restart(struct question *q)
{
    serve_role(q, true);
}

/* ---- who may ask what ---- */

static const struct {
    uint32_t method;
    bool driver_only;
    void (*serve)(struct question *q);
} questions[] = {
    { FL_DIR_FIND, false, serve_find },
    { FL_MEMBERS_LIST, false, serve_list },
    { FL_STEP_RECORD, true, serve_step },
    { FL_GROUP_PLACE, true, serve_place },
    { FL_WORKERS_LAUNCH, true, serve_launch },
    { FL_ROLE_END, true, serve_role_end },
    { FL_ROLE_RESTART, true, serve_role_restart },
    { FL_GROUP_END, true, serve_group_end },
    { FL_MEMBER_END, true, serve_member_end },
};

static bool speaks(struct question *q, const Fl__Relay *m)
{
    q->from = seat_of(q->head, &m->from->worker);
    q->job = q->from ? q->from->job : NULL;
    if (!q->from || !same_bytes(&q->job->rec->id, &m->job)) {
        reply_refuse(q->req, FL_NOT_FOUND, "the head does not know this worker");
        return false;
    }
    if (q->from->rec->state != FL__SEAT_STATE__SEAT_LIVE ||
        q->from->rec->who->attempt != m->from->attempt) {
        reply_refuse(
            q->req, FL_STALE, "attempt %u of %s %u speaks, attempt %u is the one that counts",
            m->from->attempt, q->from->rec->role, q->from->rec->rank, q->from->rec->who->attempt);
        return false;
    }
    return true;
}

void relay_serve(struct uplink *u, struct call_req *req, const Fl__Relay *m)
{
    struct question q = { .head = uplink_head(u), .req = req, .body = &m->body };

    if (!speaks(&q, m))
        return;
    for (size_t i = 0; i < FL_LEN(questions); i++) {
        if (questions[i].method != m->method)
            continue;
        if (questions[i].driver_only && q.from->rec->has_group)
            reply_refuse(req, FL_DENIED, "%s %u asks what only the driver may", q.from->rec->role,
                         q.from->rec->rank);
        else
            questions[i].serve(&q);
        return;
    }
    reply_refuse(req, FL_UNSUPPORTED, "the head has no method %u", m->method);
}
