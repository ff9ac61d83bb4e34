#include <stdlib.h>

#include "common/base/log.h"
#include "head/state.h"

/* ---- looking up ---- */

bool same_bytes(const ProtobufCBinaryData *a, const ProtobufCBinaryData *b)
{
    return a->len == b->len && memcmp(a->data, b->data, a->len) == 0;
}

#define FIND(table, handle, key, size, out) HASH_FIND(handle, table, key, size, out)

struct node *node_find(struct head *h, const struct fl_node_id *id)
{
    struct node *n;

    FIND(h->nodes, hh, id, sizeof(*id), n);
    return n;
}

struct node *node_of(struct head *h, const ProtobufCBinaryData *id)
{
    struct node *n = NULL;

    if (id->len == sizeof(struct fl_node_id))
        FIND(h->nodes, hh, id->data, id->len, n);
    return n;
}

struct job *job_of(struct head *h, const ProtobufCBinaryData *id)
{
    struct job *j = NULL;

    if (id->len == sizeof(struct fl_job_id))
        FIND(h->jobs_by_id, hh_id, id->data, id->len, j);
    return j;
}

struct job *job_named(struct head *h, const char *submission_id)
{
    struct job *j;

    HASH_FIND_STR(h->jobs, submission_id, j);
    return j;
}

struct group *group_of(struct head *h, const ProtobufCBinaryData *id)
{
    struct group *g = NULL;

    if (id->len == sizeof(struct fl_group_id))
        FIND(h->groups, hh, id->data, id->len, g);
    return g;
}

struct lease *lease_of(struct head *h, uint64_t id)
{
    struct lease *l;

    FIND(h->leases, hh, &id, sizeof(id), l);
    return l;
}

struct seat *seat_of(struct head *h, const ProtobufCBinaryData *worker)
{
    struct seat *s = NULL;

    if (worker->len == sizeof(struct fl_worker_id))
        FIND(h->seats, hh, worker->data, worker->len, s);
    return s;
}

struct role *role_of(const struct group *g, const char *name)
{
    struct role *r;

    LL_FOREACH (g->roles, r)
        if (strcmp(r->rec->launch->role, name) == 0)
            return r;
    return NULL;
}

bool job_over(const struct job *j)
{
    return j->rec->status == FL__JOB_STATUS__JOB_STOPPED ||
           j->rec->status == FL__JOB_STATUS__JOB_SUCCEEDED ||
           j->rec->status == FL__JOB_STATUS__JOB_FAILED;
}

/* ---- taking apart ---- */

static void seat_delete(struct head *h, struct seat *s)
{
    readings_free(s);
    HASH_DEL(h->seats, s);
    free_msg(s->rec);
    free(s->tcp);
    free(s->force_why);
    free(s->unix_path);
    free(s->ports);
    free(s);
}

static void lease_unplace(struct lease *l)
{
    if (l->at)
        DL_DELETE2(l->at->held, l, prev_held, next_held);
    l->at = NULL;
}

static void lease_place(struct head *h, struct lease *l)
{
    lease_unplace(l);
    l->at = node_of(h, &l->rec->at->id);
    if (l->at)
        DL_APPEND2(l->at->held, l, prev_held, next_held);
}

static void lease_delete(struct head *h, struct lease *l)
{
    struct group *g = group_of(h, &l->rec->group);

    for (size_t i = 0; g && i < g->rec->n_bundles; i++)
        if (g->rec->bundles[i]->lease == l->id)
            g->rec->bundles[i]->lease = 0;
    lease_unplace(l);
    HASH_DEL(h->leases, l);
    free_msg(l->rec);
    free(l);
    head_resources_changed(h);
}

static void group_delete(struct head *h, struct group *g)
{
    struct seat *s, *tmp;
    struct role *r, *next;

    HASH_ITER (hh, h->seats, s, tmp)
        if (s->rec->has_group && same_bytes(&s->rec->group, &g->rec->id))
            seat_delete(h, s);
    LL_FOREACH_SAFE(g->roles, r, next)
    {
        free_msg(r->rec);
        free(r);
    }
    group_asks_answer(g, FL_CANCELLED, NULL);
    placing_free(g);
    HASH_DEL(h->groups, g);
    free_msg(g->rec);
    free(g);
}

static void job_delete(struct head *h, struct job *j)
{
    struct seat *s, *stmp;
    struct group *g, *gtmp;

    HASH_ITER (hh, h->groups, g, gtmp)
        if (g->job == j)
            group_delete(h, g);
    HASH_ITER (hh, h->seats, s, stmp)
        if (s->job == j)
            seat_delete(h, s);
    followers_free(j);
    tails_free(j);
    joblog_close(j);
    steps_fini(&j->steps);
    if (job_over(j))
        h->n_jobs_over--;
    HASH_DELETE(hh, h->jobs, j);
    HASH_DELETE(hh_id, h->jobs_by_id, j);
    free_msg(j->rec);
    free(j);
}

void node_forget_unknown(struct node *n)
{
    while (n->leases) {
        struct unknown_lease *u = n->leases;

        n->leases = u->next;
        free_msg(u->lease);
        free(u);
    }
    while (n->workers) {
        struct unknown_worker *u = n->workers;

        n->workers = u->next;
        free_msg(u->state);
        free(u);
    }
}

static void node_delete(struct head *h, struct node *n)
{
    while (n->held)
        lease_unplace(n->held);
    node_forget_unknown(n);
    HASH_DEL(h->nodes, n);
    free_msg(n->stats);
    free_msg(n->procs);
    uses_free(n);
    free_msg(n->rec);
    free(n);
}

static void forget_decision(struct head *h, struct decision *d);

void tables_free(struct head *h)
{
    struct job *j, *jtmp;
    struct group *g, *gtmp;
    struct seat *s, *stmp;
    struct lease *l, *ltmp;
    struct node *n, *ntmp;
    struct heard *w, *wtmp;

    HASH_ITER (hh, h->jobs, j, jtmp)
        job_delete(h, j);
    HASH_ITER (hh, h->groups, g, gtmp)
        group_delete(h, g);
    HASH_ITER (hh, h->seats, s, stmp)
        seat_delete(h, s);
    HASH_ITER (hh, h->leases, l, ltmp)
        lease_delete(h, l);
    HASH_ITER (hh, h->nodes, n, ntmp)
        node_delete(h, n);
    HASH_ITER (hh, h->heard, w, wtmp) {
        HASH_DEL(h->heard, w);
        free(w);
    }
    while (h->decisions)
        forget_decision(h, h->decisions);
}

/* ---- applying ---- */

/* A record whose checksum holds and which cannot be read is a defect; the others are still true. */
#define UNPACK(type, body)                                                                         \
    __extension__({                                                                                \
        Fl__##type *m_ = (Fl__##type *)(void *)protobuf_c_message_unpack(DESC_##type, NULL,        \
                                                                         (body).len, (body).data); \
        if (!m_) {                                                                                 \
            fl_error("journal record cannot be read kind=" #type);                                 \
            return;                                                                                \
        }                                                                                          \
        m_;                                                                                        \
    })
#define DESC_HeadRec &fl__head_rec__descriptor
#define DESC_NodeRec &fl__node_rec__descriptor
#define DESC_JobRec &fl__job_rec__descriptor
#define DESC_GroupRec &fl__group_rec__descriptor
#define DESC_Lease &fl__lease__descriptor
#define DESC_LeaseIdsRec &fl__lease_ids_rec__descriptor
#define DESC_RoleRec &fl__role_rec__descriptor
#define DESC_SeatRec &fl__seat_rec__descriptor
#define DESC_DecisionRec &fl__decision_rec__descriptor
#define DESC_GoneRec &fl__gone_rec__descriptor

/* New objects go into their table by these; ids of a wrong length are a defect of the writer. */
#define NEW_OBJECT(h, type, name, bytes)                                                           \
    __extension__({                                                                                \
        struct type *o_ = must(calloc(1, sizeof(*o_)));                                            \
        memcpy(&o_->id, (bytes).data, sizeof(o_->id));                                             \
        HASH_ADD(hh, (h)->name, id, sizeof(o_->id), o_);                                           \
        must(o_->hh.tbl);                                                                          \
        o_;                                                                                        \
    })

static void apply_head(void *state, struct fl_bytes body)
{
    struct head *h = state;
    Fl__HeadRec *m = UNPACK(HeadRec, body);

    if (m->next_job > h->next_job)
        h->next_job = m->next_job;
    if (m->last_lease > h->last_lease)
        h->last_lease = m->last_lease;
    if (m->foreign_to) {
        h->foreign_from = m->foreign_from;
        h->foreign_to = m->foreign_to;
    }
    free_msg(m);
}

/* What lived on a node that is out: its leases are free, its seats have ended. */
static void node_out(struct head *h, struct node *n)
{
    struct seat *s, *stmp;

    while (n->held)
        lease_delete(h, n->held);
    HASH_ITER (hh, h->seats, s, stmp) {
        Fl__SeatRec *r = s->rec;

        if (!r->at || !same_bytes(&r->at->id, &n->rec->who->id))
            continue;
        r->ending = 0;
        seat_unplug(s);
        seat_dirty(s);
        if (r->state != FL__SEAT_STATE__SEAT_LIVE)
            continue;
        Fl__Exit x = FL__EXIT__INIT;
        char why[400];

        x.cause = EXIT_FENCED;
        snprintf(why, sizeof(why), "%s %u: its node %s (%s) %s", r->role, r->rank, n->rec->name,
                 n->rec->address, n->rec->why ? n->rec->why : "is gone");
        x.why = why;
        free_msg(r->exit);
        r->exit = copy_msg(&x);
        r->state = FL__SEAT_STATE__SEAT_OVER;
    }
    uses_free(n);
    node_forget_unknown(n);
}

static void apply_node(void *state, struct fl_bytes body)
{
    struct head *h = state;
    Fl__NodeRec *m = UNPACK(NodeRec, body);
    struct node *n = node_of(h, &m->who->id);
    struct lease *l, *ltmp;
    bool made = false;

    if (!n) {
        if (m->who->id.len != sizeof(n->id)) {
            free_msg(m);
            return;
        }
        n = NEW_OBJECT(h, node, nodes, m->who->id);
        n->head = h;
        n->state = NODE_LOST; /* until it joins or is awaited */
        made = true;
    }
    free_msg(n->rec);
    n->rec = m;
    if (made)
        HASH_ITER (hh, h->leases, l, ltmp)
            if (!l->at)
                lease_place(h, l);
    if (m->fate != FL__NODE_FATE__NODE_IN)
        node_out(h, n);
    head_resources_changed(h);
}

static void apply_job(void *state, struct fl_bytes body)
{
    struct head *h = state;
    Fl__JobRec *m = UNPACK(JobRec, body);
    struct job *j = job_of(h, &m->id);
    uint32_t number = 0;

    if (m->id.len != sizeof(struct fl_job_id)) {
        free_msg(m);
        return;
    }
    for (int i = 0; i < 4; i++)
        number = number << 8 | m->id.data[i];
    if (number >= h->next_job)
        h->next_job = number + 1u;
    bool was_over = j && job_over(j);
    if (!j) {
        j = must(calloc(1, sizeof(*j)));
        memcpy(&j->id, m->id.data, sizeof(j->id));
        j->head = h;
        j->pending_ns = h->loop ? fl_loop_now_ns(h->loop) : 0;
        j->replayed = h->journal == NULL; /* applied from inside journal_open() */
        j->rec = m;
        HASH_ADD(hh_id, h->jobs_by_id, id, sizeof(j->id), j);
        HASH_ADD_KEYPTR(hh, h->jobs, m->submission_id, strlen(m->submission_id), j);
        must(j->hh.tbl && j->hh_id.tbl ? j : NULL);
    } else { /* the key of the table lies in the record: out and in again would change the order */
        Fl__JobRec *old = j->rec;
        char *key = m->submission_id;

        m->submission_id = old->submission_id;
        old->submission_id = key;
        j->rec = m;
        free_msg(old);
    }
    h->n_jobs_over += !was_over && job_over(j);
    if (!was_over && job_over(j))
        j->end_ns = h->loop ? fl_loop_now_ns(h->loop) : 0;
}

static void apply_group(void *state, struct fl_bytes body)
{
    struct head *h = state;
    Fl__GroupRec *m = UNPACK(GroupRec, body);
    struct group *g = group_of(h, &m->id);
    struct job *j = job_of(h, &m->job);

    if (!j || m->id.len != sizeof(struct fl_group_id)) {
        free_msg(m);
        return;
    }
    if (!g) {
        g = NEW_OBJECT(h, group, groups, m->id);
        g->job = j;
    }
    free_msg(g->rec);
    g->rec = m;
    if (m->state == FL__GROUP_STATE__GROUP_PLACED) /* the decision to commit, in one record */
        for (size_t i = 0; i < m->n_bundles; i++) {
            struct lease *l = m->bundles[i]->lease ? lease_of(h, m->bundles[i]->lease) : NULL;

            if (l && l->rec->state == FL__LEASE_STATE__PREPARED) {
                l->rec->state = FL__LEASE_STATE__COMMITTED;
                l->rec->has_state = true;
                l->acked = false;
            } else if (!l) {
                m->bundles[i]->lease = 0;
            }
        }
    if (m->state == FL__GROUP_STATE__GROUP_ENDED || m->state == FL__GROUP_STATE__GROUP_REFUSED)
        group_delete(h, g);
}

static void apply_lease(void *state, struct fl_bytes body)
{
    struct head *h = state;
    Fl__Lease *m = UNPACK(Lease, body);
    struct lease *l = lease_of(h, m->id);

    if (m->id > h->last_lease)
        h->last_lease = m->id;
    if (!l) {
        l = must(calloc(1, sizeof(*l)));
        l->id = m->id;
        HASH_ADD(hh, h->leases, id, sizeof(l->id), l);
        must(l->hh.tbl);
    }
    free_msg(l->rec);
    l->rec = m;
    l->acked = false;
    lease_place(h, l);
    head_resources_changed(h);
}

static void apply_leases_freed(void *state, struct fl_bytes body)
{
    struct head *h = state;
    Fl__LeaseIdsRec *m = UNPACK(LeaseIdsRec, body);

    for (size_t i = 0; i < m->n_ids; i++) {
        struct lease *l = lease_of(h, m->ids[i]);

        if (l)
            lease_delete(h, l);
    }
    free_msg(m);
}

static void apply_role(void *state, struct fl_bytes body)
{
    struct head *h = state;
    Fl__RoleRec *m = UNPACK(RoleRec, body);
    struct group *g = group_of(h, &m->launch->group);
    struct role *r = g ? role_of(g, m->launch->role) : NULL;

    if (!g) {
        free_msg(m);
        return;
    }
    if (!r) {
        r = must(calloc(1, sizeof(*r)));
        LL_APPEND(g->roles, r);
    }
    free_msg(r->rec);
    r->rec = m;
}

static void apply_seat(void *state, struct fl_bytes body)
{
    struct head *h = state;
    Fl__SeatRec *m = UNPACK(SeatRec, body);
    struct seat *s = seat_of(h, &m->who->worker);
    struct job *j = job_of(h, &m->job);

    if (!j || m->who->worker.len != sizeof(struct fl_worker_id) ||
        (m->has_group && !group_of(h, &m->group))) {
        free_msg(m);
        return;
    }
    if (!s) {
        s = NEW_OBJECT(h, seat, seats, m->who->worker);
        s->job = j;
    }
    free_msg(s->rec);
    s->rec = m;
    seat_dirty(s);
}

static void forget_decision(struct head *h, struct decision *d)
{
    DL_DELETE(h->decisions, d);
    h->n_decisions--;
    h->decision_bytes -= d->bytes;
    free_msg(d->rec);
    free(d);
}

static void apply_decision(void *state, struct fl_bytes body)
{
    struct head *h = state;
    Fl__DecisionRec *m = UNPACK(DecisionRec, body);
    struct decision *d = must(calloc(1, sizeof(*d)));

    d->rec = m;
    d->bytes = body.len;
    DL_APPEND(h->decisions, d);
    h->n_decisions++;
    h->decision_bytes += body.len;
    while (h->n_decisions > HEAD_DECISIONS_KEPT ||
           (h->decision_bytes > HEAD_DECISION_BYTES && h->n_decisions > 1))
        forget_decision(h, h->decisions);
}

static void apply_gone(void *state, struct fl_bytes body)
{
    struct head *h = state;
    Fl__GoneRec *m = UNPACK(GoneRec, body);

    for (size_t i = 0; i < m->n_jobs; i++) {
        struct job *j = job_of(h, &m->jobs[i]);

        if (j)
            job_delete(h, j);
    }
    for (size_t i = 0; i < m->n_nodes; i++) {
        struct node *n = node_of(h, &m->nodes[i]);

        if (n)
            node_delete(h, n);
    }
    free_msg(m);
}

const struct journal_apply head_apply[] = {
    { REC_HEAD, apply_head },         { REC_NODE, apply_node },
    { REC_JOB, apply_job },           { REC_GROUP, apply_group },
    { REC_LEASE, apply_lease },       { REC_LEASES_FREED, apply_leases_freed },
    { REC_ROLE, apply_role },         { REC_SEAT, apply_seat },
    { REC_DECISION, apply_decision }, { REC_GONE, apply_gone },
};
const size_t head_apply_n = FL_LEN(head_apply);

/* ---- the whole of it as records ---- */

static void put(struct journal_emit *e, enum rec_kind kind, const void *msg)
{
    char small[2048];
    struct fl_str buf = FL_STR_ON(small);

    e->put(e, kind, pack_msg(msg, &buf));
    fl_str_fini(&buf);
}

/* In the order in which applying needs them: leases before the groups that name them. */
void head_snapshot(void *state, struct journal_emit *e)
{
    struct head *h = state;
    Fl__HeadRec head = FL__HEAD_REC__INIT;
    struct node *n, *ntmp;
    struct job *j, *jtmp;
    struct group *g, *gtmp;
    struct lease *l, *ltmp;
    struct seat *s, *stmp;
    struct decision *d;
    struct role *r;

    head.has_next_job = true;
    head.next_job = h->next_job;
    head.has_foreign_from = head.has_foreign_to = h->foreign_to != 0;
    head.has_last_lease = true;
    head.last_lease = h->last_lease;
    head.foreign_from = h->foreign_from;
    head.foreign_to = h->foreign_to;
    put(e, REC_HEAD, &head);
    HASH_ITER (hh, h->nodes, n, ntmp)
        put(e, REC_NODE, n->rec);
    HASH_ITER (hh, h->jobs, j, jtmp)
        put(e, REC_JOB, j->rec);
    HASH_ITER (hh, h->leases, l, ltmp)
        put(e, REC_LEASE, l->rec);
    HASH_ITER (hh, h->groups, g, gtmp) {
        put(e, REC_GROUP, g->rec);
        LL_FOREACH (g->roles, r)
            put(e, REC_ROLE, r->rec);
    }
    HASH_ITER (hh, h->seats, s, stmp)
        put(e, REC_SEAT, s->rec);
    DL_FOREACH (h->decisions, d)
        put(e, REC_DECISION, d->rec);
}
