#include <inttypes.h>
#include <stdlib.h>

#include "common/base/log.h"
#include "head/state.h"

/* ---- may it join ---- */

static struct node *holder_of_name(struct head *h, const char *name, const struct fl_node_id *but)
{
    struct node *n, *tmp;

    HASH_ITER (hh, h->nodes, n, tmp)
        if (n->rec->fate == FL__NODE_FATE__NODE_IN && strcmp(n->rec->name, name) == 0 &&
            !FL_SAME(n->id, *but))
            return n;
    return NULL;
}

static bool inventory_ok(const Fl__Inventory *inv, struct fl_err *err)
{
    for (size_t i = 0; i < inv->n_total; i++)
        if (inv->total[i]->e4 < 0 || inv->total[i]->name[0] == '\0')
            return fl_fail(err, FL_INVALID, "inventory: amount %zu (%s) is negative or has no name",
                           i, inv->total[i]->name) == FL_OK;
    for (size_t i = 0; i < inv->n_devices; i++)
        for (size_t k = 0; k < i; k++)
            if (strcmp(inv->devices[i]->id, inv->devices[k]->id) == 0)
                return fl_fail(err, FL_INVALID, "inventory: device %s is there twice",
                               inv->devices[i]->id) == FL_OK;
    return true;
}

/* FL_AGAIN: it may come back; anything else: not as it is. */
static enum fl_status may_join(struct head *h, const struct fl_node_ref *who,
                               const Fl__JoinRequest *m, struct fl_err *err)
{
    struct node *same = node_find(h, &who->id), *name = holder_of_name(h, m->name, &who->id);
    static const struct fl_node_id none;

    if (FL_SAME(who->id, none) || who->start == 0)
        return fl_fail(err, FL_INVALID,
                       "a node joins without an id or a start; HELLO carries both");
    if (m->name[0] == '\0' || strlen(m->name) > 63 || strlen(m->address) > 63)
        return fl_fail(err, FL_INVALID,
                       "node name \"%.80s\" must have 1 to 63 bytes, address "
                       "\"%.80s\" at most 63",
                       m->name, m->address);
    if (!inventory_ok(m->inventory, err))
        return FL_INVALID;
    if (name && name->state == NODE_SUSPECT)
        return fl_fail(err, FL_AGAIN,
                       "node name %s belongs to %s, which is silent just now; %s waits for it to "
                       "come back or to be given up, or takes another --node-name",
                       m->name, name->rec->address, m->address);
    if (name)
        return fl_fail(err, FL_EXISTS,
                       "node name %s belongs to the node at %s already; start the one at %s with "
                       "another --node-name",
                       m->name, name->rec->address, m->address);
    if (!same || same->rec->fate != FL__NODE_FATE__NODE_IN)
        return FL_OK;
    bool moved =
        strcmp(same->rec->boot_id, m->boot_id) != 0 && strcmp(same->rec->address, m->address) != 0;
    if (moved && same->state != NODE_SUSPECT)
        return fl_fail(err, FL_EXISTS,
                       "the node at %s has the id of the live node at %s: a copied disk; remove "
                       "node.json from the state folder of the copy",
                       m->address, same->rec->address);
    if (moved)
        return fl_fail(err, FL_AGAIN,
                       "the node at %s has the id of the node at %s, which is silent just now; it "
                       "is asked again when that one is given up",
                       m->address, same->rec->address);
    if (who->start < same->rec->who->start)
        return fl_fail(err, FL_STALE,
                       "start %" PRIu64 " of node %s, but start %" PRIu64 " has joined already",
                       who->start, m->name, same->rec->who->start);
    return FL_OK;
}

/* ---- what it has, against the journal ---- */

struct tally { /* what the reply will list, and what the journal must forget */
    struct head *head;
    struct node *node;
    const Fl__JoinRequest *join;
    Fl__SeatRef **end_workers;
    size_t n_end_workers;
    uint64_t *end_leases, *freed;
    size_t n_end_leases, n_freed;
    unsigned shown;
};

static bool foreign(const struct head *h, const Fl__Lease *l)
{
    return l->by->head >= h->foreign_from && l->by->head < h->foreign_to;
}

static void view(const Fl__Lease *l, struct fl_lease *out)
{
    *out = (struct fl_lease){ .id = l->id, .state = (enum lease_state)l->state };
}

static bool runs_on(const Fl__JoinRequest *m, uint64_t lease)
{
    for (size_t i = 0; i < m->n_workers; i++)
        if (m->workers[i]->phase != FL__WORKER_PHASE__WORKER_GONE)
            for (size_t k = 0; k < m->workers[i]->n_leases; k++)
                if (m->workers[i]->leases[k] == lease)
                    return true;
    return false;
}

static void show_lease(struct tally *t, const Fl__Lease *l)
{
    struct unknown_lease *u = must(calloc(1, sizeof(*u)));

    u->lease = copy_msg(l);
    LL_PREPEND(t->node->leases, u);
    t->shown++;
}

static void show_worker(struct tally *t, const Fl__WorkerState *w)
{
    struct unknown_worker *u = must(calloc(1, sizeof(*u)));

    u->state = copy_msg(w);
    LL_PREPEND(t->node->workers, u);
    t->shown++;
}

/* The workers that hold it go first; the daemon frees a lease when nothing runs on it any more. */
static void end_work_of(struct tally *t, uint64_t lease)
{
    for (size_t i = 0; i < t->join->n_workers; i++) {
        Fl__WorkerState *w = t->join->workers[i];

        for (size_t k = 0; k < w->n_leases; k++)
            if (w->leases[k] == lease && w->phase != FL__WORKER_PHASE__WORKER_GONE)
                t->end_workers[t->n_end_workers++] = w->who;
    }
}

static void settle_lease(struct tally *t, struct lease *mine, const Fl__Lease *theirs)
{
    struct fl_lease a, b;
    bool runs = theirs && runs_on(t->join, theirs->id);
    bool older = t->head->foreign_to &&
                 (mine ? mine->rec->by->head < t->head->foreign_to : foreign(t->head, theirs));

    if (mine)
        view(mine->rec, &a);
    if (theirs)
        view(theirs, &b);
    switch (lease_reconcile(mine ? &a : NULL, theirs ? &b : NULL, runs, false, older)) {
    case LEASE_KEEP:
        if (mine)
            mine->acked = theirs && theirs->state == FL__LEASE_STATE__COMMITTED;
        return;
    case LEASE_SHOW:
        if (theirs)
            show_lease(t, theirs);
        if (mine)
            t->freed[t->n_freed++] = mine->id;
        return;
    case LEASE_END_WORK_THEN_FREE:
        end_work_of(t, theirs->id);
        /* fall through */
    case LEASE_FREE:
    case LEASE_RESCHEDULE: /* its bundle is empty then, and the group looks for another place */
        if (theirs)
            t->end_leases[t->n_end_leases++] = theirs->id;
        if (mine)
            t->freed[t->n_freed++] = mine->id;
        return;
    }
}

static const Fl__Lease *held(const Fl__JoinRequest *m, const struct lease *l)
{
    for (size_t i = 0; i < m->n_leases; i++)
        if (m->leases[i]->id == l->id && same_bytes(&m->leases[i]->group, &l->rec->group))
            return m->leases[i];
    return NULL;
}

static void settle_leases(struct tally *t)
{
    struct lease *l, *tmp;

    for (size_t i = 0; i < t->join->n_leases; i++) {
        Fl__Lease *theirs = t->join->leases[i];
        struct lease *mine = lease_of(t->head, theirs->id);

        if (mine && (!same_bytes(&mine->rec->group, &theirs->group) ||
                     !same_bytes(&mine->rec->at->id, &t->node->rec->who->id)))
            mine = NULL; /* another head gave that number as well */
        settle_lease(t, mine, theirs);
    }
    HASH_ITER (hh, t->head->leases, l, tmp)
        if (same_bytes(&l->rec->at->id, &t->node->rec->who->id) && !held(t->join, l))
            settle_lease(t, l, NULL);
}

static void end_worker(struct tally *t, const Fl__WorkerState *w)
{
    for (size_t i = 0; i < t->n_end_workers; i++)
        if (t->end_workers[i] == w->who)
            return;
    if (w->phase != FL__WORKER_PHASE__WORKER_GONE)
        t->end_workers[t->n_end_workers++] = w->who;
}

static void learn(struct seat *s, const Fl__WorkerState *w)
{
    s->started = true;
    s->joined = w->phase == FL__WORKER_PHASE__WORKER_JOINED;
    s->pid = w->pid;
    free(s->tcp);
    free(s->unix_path);
    s->tcp = w->tcp ? must(strdup(w->tcp)) : NULL;
    s->unix_path = w->unix_path ? must(strdup(w->unix_path)) : NULL;
    free(s->ports);
    s->ports = must(calloc(w->n_ports + 1, sizeof(*s->ports)));
    s->n_ports = w->n_ports;
    for (size_t i = 0; i < w->n_ports; i++) {
        (void)FL_COPY(s->ports[i].name, w->ports[i]->name);
        s->ports[i].number = (uint16_t)w->ports[i]->number;
    }
    seat_dirty(s);
}

/* A later head started this attempt; its number is the journal's from now on. */
static void follow_attempt(struct tally *t, struct seat *s, const Fl__WorkerState *w)
{
    Fl__SeatRec rec = *s->rec;
    Fl__SeatRef ref = *w->who;
    struct fl_err err;

    rec.who = &ref;
    rec.at = t->node->rec->who;
    rec.state = FL__SEAT_STATE__SEAT_LIVE;
    rec.has_ending = false;
    rec.ending = 0;
    if (head_record(t->head, REC_SEAT, &rec, NULL, &err) == FL_OK)
        learn(s, w);
}

static void settle_worker(struct tally *t, const Fl__WorkerState *w)
{
    struct seat *s = seat_of(t->head, &w->who->worker);
    bool gone = w->phase == FL__WORKER_PHASE__WORKER_GONE;
    bool older = t->head->foreign_to != 0;

    uint32_t attempt = w->who->attempt;
    if (!s || (older && job_given_up(s->job))) {
        if (older && !gone)
            show_worker(t, w);
        else
            end_worker(t, w);
        return;
    }
    if (older && !job_over(s->job) &&
        (attempt > s->rec->who->attempt ||
         (attempt == s->rec->who->attempt && s->rec->state == FL__SEAT_STATE__SEAT_WAITING)))
        follow_attempt(t, s, w);
    bool live = s->rec->state == FL__SEAT_STATE__SEAT_LIVE && attempt == s->rec->who->attempt;
    if (gone && (live || attempt == s->rec->ending))
        seat_gone(s, attempt, w->exit, NULL);
    else if (live)
        learn(s, w);
    else if (attempt != s->rec->ending)
        end_worker(t, w);
}

static bool listed(const Fl__JoinRequest *m, const struct seat *s)
{
    for (size_t i = 0; i < m->n_workers; i++)
        if (same_bytes(&m->workers[i]->who->worker, &s->rec->who->worker) &&
            m->workers[i]->who->attempt == s->rec->who->attempt)
            return true;
    return false;
}

/* The start was lost on the way and is sent again, unless a later head may have seen it end. */
static void settle_absent(struct tally *t, struct seat *s)
{
    Fl__Exit x = FL__EXIT__INIT;
    char why[256];

    s->started = s->joined = s->stopping = false;
    s->ready_ns = 0;
    if (s->rec->ending) {
        Fl__SeatRec rec = *s->rec;

        rec.ending = 0;
        (void)head_record(t->head, REC_SEAT, &rec, NULL, NULL); /* else it is stopped once more */
    }
    if (!t->head->foreign_to || s->rec->state != FL__SEAT_STATE__SEAT_LIVE)
        return;
    snprintf(why, sizeof(why),
             "%s %u on %s has ended, and how is not known: this head's journal "
             "is older than the cluster",
             s->rec->role, s->rec->rank, t->node->rec->name);
    x.cause = EXIT_KEEPER_LOST;
    x.why = why;
    seat_gone(s, s->rec->who->attempt, &x, NULL);
}

static void settle_workers(struct tally *t)
{
    struct seat *s, *tmp;

    for (size_t i = 0; i < t->join->n_workers; i++)
        settle_worker(t, t->join->workers[i]);
    HASH_ITER (hh, t->head->seats, s, tmp)
        if (s->rec->at && same_bytes(&s->rec->at->id, &t->node->rec->who->id) &&
            (s->rec->state == FL__SEAT_STATE__SEAT_LIVE || s->rec->ending) && !listed(t->join, s))
            settle_absent(t, s);
}

static void answer(struct tally *t, struct call_req *req, bool fenced)
{
    Fl__JoinReply reply = FL__JOIN_REPLY__INIT;

    reply.beat_ms = t->head->cfg.beat_ms;
    reply.silent_ms = t->head->cfg.silent_ms;
    reply.has_fenced = fenced;
    reply.fenced = fenced;
    reply.n_end_workers = t->n_end_workers;
    reply.end_workers = t->end_workers;
    reply.n_end_leases = t->n_end_leases;
    reply.end_leases = t->end_leases;
    reply_msg(req, &reply);
}

static size_t pairs(const Fl__JoinRequest *m)
{
    size_t n = m->n_workers + 1;

    for (size_t i = 0; i < m->n_workers; i++)
        n += m->workers[i]->n_leases;
    return n;
}

static void tally_init(struct tally *t, struct head *h, struct node *n, const Fl__JoinRequest *m)
{
    *t = (struct tally){ .head = h, .node = n, .join = m };
    t->end_workers = must(calloc(pairs(m) + 1, sizeof(*t->end_workers)));
    t->end_leases = must(calloc(m->n_leases + 1, sizeof(*t->end_leases)));
    t->freed = must(calloc(m->n_leases + HASH_COUNT(h->leases) + 1, sizeof(*t->freed)));
}

static void tally_fini(struct tally *t)
{
    free(t->end_workers);
    free(t->end_leases);
    free(t->freed);
}

/* ---- the join itself ---- */

struct joining { /* from the record to its being on disk */
    Fl__JoinRequest *join;
    const struct uplink *up; /* compared, never followed: it may have ended meanwhile */
};

static void joined(struct after *a, enum fl_status st, const struct fl_err *err)
{
    struct joining *w = a->arg;
    struct head *h = a->head;
    struct node *n = node_find(h, (struct fl_node_id *)a->key);
    struct fl_err e;

    if (st != FL_OK) {
        call_fail(a->req, err);
    } else if (!n || n->up != w->up || call_unwanted(a->req)) {
        reply_refuse(a->req, FL_UNREACHABLE, "the stream ended while the node joined");
    } else {
        struct tally t;

        tally_init(&t, h, n, w->join);
        node_forget_unknown(n);
        settle_leases(&t);
        settle_workers(&t);
        Fl__LeaseIdsRec freed = FL__LEASE_IDS_REC__INIT;
        freed.ids = t.freed;
        freed.n_ids = t.n_freed;
        if (t.n_freed && head_record(h, REC_LEASES_FREED, &freed, NULL, &e) != FL_OK) {
            call_fail(a->req, &e); /* it joins again, and the same is found again */
        } else {
            if (t.shown)
                fl_warn("unknown work is shown and left alone node=%s pieces=%u", n->rec->name,
                        t.shown);
            answer(&t, a->req, false);
            n->beat_ns = fl_loop_now_ns(h->loop);
            node_event(n, NODE_EV_JOINED);
        }
        tally_fini(&t);
    }
    free_msg(w->join);
    free(w);
    free(a);
    head_kick(h);
}

static void tell_fenced(struct head *h, struct node *n, const Fl__JoinRequest *m,
                        struct call_req *req)
{
    struct tally t;

    tally_init(&t, h, n, m);
    for (size_t i = 0; i < m->n_workers; i++)
        end_worker(&t, m->workers[i]);
    for (size_t i = 0; i < m->n_leases; i++)
        t.end_leases[t.n_end_leases++] = m->leases[i]->id;
    fl_info("fenced node is back and ends what it ran node=%s workers=%zu", m->name, m->n_workers);
    answer(&t, req, true);
    tally_fini(&t);
}

static uint32_t number_of(const ProtobufCBinaryData *job)
{
    const uint8_t *b = job->data;

    return job->len == 4 ? (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3]
                         : 0;
}

/* Numbers of leases and jobs, attempts and seats of live jobs come from the journal alone: a daemon
 * that has one which the journal has never seen shows that records are missing from it, also when
 * the terms do not. The term from which on they are missing; 0: none is. */
static uint64_t missing_since(struct head *h, const Fl__JoinRequest *m)
{
    uint64_t since = 0, before = h->first_term > 1 ? h->first_term - 1 : h->first_term;

    for (size_t i = 0; i < m->n_leases; i++) {
        const Fl__Lease *l = m->leases[i];

        if (l->id > h->last_lease && memcmp(l->by->cluster.data, h->term.cluster, 16) == 0 &&
            !foreign(h, l) && (!since || l->by->head < since))
            since = l->by->head;
    }
    for (size_t i = 0; !h->foreign_to && i < m->n_workers; i++) {
        const Fl__WorkerState *w = m->workers[i];
        struct seat *s = seat_of(h, &w->who->worker);
        struct job *j = job_of(h, &w->job);
        bool missed = s   ? w->who->attempt > s->rec->who->attempt
                      : j ? !job_over(j)
                          : number_of(&w->job) >= (h->next_job ? h->next_job : 1);

        if (missed && w->phase != FL__WORKER_PHASE__WORKER_GONE && (!since || before < since))
            since = before;
    }
    return since;
}

void join_serve(struct uplink *u, struct call_req *req, const Fl__JoinRequest *m)
{
    struct fl_node_ref who = uplink_who(u);
    struct fl_err err;

    if (may_join(uplink_head(u), &who, m, &err) != FL_OK || dial_back(u, req, m, &err) != FL_OK) {
        fl_warn("node is refused why=\"%s\"", err.text);
        call_fail(req, &err);
    }
}

void join_settle(struct uplink *u, struct call_req *req, const Fl__JoinRequest *m)
{
    struct head *h = uplink_head(u);
    struct fl_node_ref who = uplink_who(u);
    Fl__NodeRec rec = FL__NODE_REC__INIT;
    Fl__NodeRef ref = FL__NODE_REF__INIT;
    struct fl_err err;

    if (may_join(h, &who, m, &err) != FL_OK) { /* once more: another of that name may have joined meanwhile */
        fl_warn("node is refused why=\"%s\"", err.text);
        call_fail(req, &err);
        return;
    }
    uint64_t since = missing_since(h, m);
    if (since) {
        reply_refuse(req, FL_STALE,
                     "this head's journal is older than what the node has; come back");
        uplink_older(u, since);
        return;
    }
    struct node *n = node_find(h, &who.id);
    if (n && n->rec->fate == FL__NODE_FATE__NODE_FENCED && n->rec->who->start >= who.start) {
        tell_fenced(h, n, m, req);
        return;
    }
    ref.id = BYTES_OF(who.id);
    ref.start = who.start;
    rec.who = &ref;
    rec.name = m->name;
    rec.address = m->address;
    rec.boot_id = m->boot_id;
    rec.inventory = m->inventory;
    rec.runtime_dir = m->runtime_dir;

    struct after *a = after_new(h, joined);
    struct joining *w = must(calloc(1, sizeof(*w)));
    w->join = copy_msg(m);
    w->up = u;
    a->arg = w;
    a->req = req;
    memcpy(a->key, &who.id, sizeof(who.id));
    if (head_record(h, REC_NODE, &rec, a, &err) != FL_OK) {
        free_msg(w->join);
        free(w);
        call_fail(req, &err);
        return;
    }
    n = node_find(h, &who.id);
    n->beat_ns = fl_loop_now_ns(h->loop);
    node_event(n, NODE_EV_JOIN);
    uplink_join(u, n);
}

/* ---- and later changes ---- */

static void acknowledged(struct after *a, enum fl_status st, const struct fl_err *err)
{
    if (st == FL_OK)
        reply_empty(a->req);
    else
        call_fail(a->req, err);
    free(a);
}

static void ignored(struct send *s, enum fl_status st, const struct wire_msg *reply,
                    const struct fl_err *err)
{
    (void)s, (void)st, (void)reply, (void)err; /* the daemon lists it again if it still has it */
}

/* The last worker of a lease that nobody knows has ended: the lease goes as well. */
static void unknown_changed(struct node *n, const Fl__WorkerState *w)
{
    struct unknown_worker *u, *next;
    struct unknown_lease *l, *lnext;
    Fl__LeaseIds ids = FL__LEASE_IDS__INIT;
    struct fl_err err;

    LL_FOREACH_SAFE(n->workers, u, next)
    {
        if (!same_bytes(&u->state->who->worker, &w->who->worker))
            continue;
        LL_DELETE(n->workers, u);
        free_msg(u->state);
        if (w->phase != FL__WORKER_PHASE__WORKER_GONE) {
            u->state = copy_msg(w);
            LL_PREPEND(n->workers, u);
            return;
        }
        free(u);
    }
    LL_FOREACH_SAFE(n->leases, l, lnext)
    {
        bool mine = false, used = false;

        for (size_t i = 0; i < w->n_leases; i++)
            mine |= w->leases[i] == l->lease->id;
        LL_FOREACH (n->workers, u)
            for (size_t i = 0; i < u->state->n_leases; i++)
                used |= u->state->leases[i] == l->lease->id;
        ids.ids = &l->lease->id;
        ids.n_ids = 1;
        if (!mine || used)
            continue;
        if (node_send(n, FL_LEASE_RELEASE, &ids, HEAD_SEND_MS, &(struct send){ .done = ignored },
                      &err) != FL_OK)
            continue; /* shown until the node joins again */
        LL_DELETE(n->leases, l);
        free_msg(l->lease);
        free(l);
        head_resources_changed(n->head);
    }
}

void worker_changed(struct head *h, struct node *n, const Fl__WorkerState *w, struct call_req *req)
{
    struct seat *s = seat_of(h, &w->who->worker);
    bool gone = w->phase == FL__WORKER_PHASE__WORKER_GONE;

    if (!s) {
        unknown_changed(n, w);
        reply_empty(req);
        return;
    }
    uint32_t attempt = w->who->attempt;
    bool live = s->rec->state == FL__SEAT_STATE__SEAT_LIVE && attempt == s->rec->who->attempt;
    if (gone && (live || (s->rec->ending && attempt == s->rec->ending))) {
        struct after *a = after_new(h, acknowledged);

        a->req = req;
        seat_gone(s, attempt, w->exit, a);
        return;
    }
    if (live)
        learn(s, w);
    reply_empty(req); /* of an attempt that is over: heard before */
    members_push(h);
    head_kick(h);
}
