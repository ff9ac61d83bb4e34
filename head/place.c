#include <inttypes.h>
#include <stdlib.h>

#include "common/base/log.h"
#include "head/state.h"

/* One placement on its way through prepare and commit. It may die at any time: what counts is in
 * the journal, and groups_settle() goes on from there. */
struct placing_node {
    struct placing *owner;
    struct fl_node_id id;
    uint64_t *leases;
    size_t n_leases;
    unsigned party, calls;
    bool answered;
};
struct placing {
    struct head *head;
    struct group *group;
    struct fl_muster *muster;
    struct placing_node *nodes;
    size_t n_nodes;
    Fl__GroupRec *next; /* the group as it will be when this has succeeded */
    bool committing;
    uint64_t serial;
};

enum { PORTS_EACH = 4, PORTS_MAX = 1025 }; /* 256 engines of a node */

/* ---- helpers ---- */

void placing_free(struct group *g)
{
    struct placing *p = g->placing;

    if (!p)
        return;
    g->placing = NULL;
    fl_muster_destroy(p->muster);
    for (size_t i = 0; i < p->n_nodes; i++)
        free(p->nodes[i].leases);
    free(p->nodes);
    free_msg(p->next);
    free(p);
}

/* The placing that a late answer or a written record belongs to, if it is still that one. */
static struct placing *placing_of(struct head *h, const uint8_t key[32], uint64_t serial)
{
    ProtobufCBinaryData id = { sizeof(struct fl_group_id), (uint8_t *)(uintptr_t)key };
    struct group *g = group_of(h, &id);

    return g && g->placing && g->placing->serial == serial ? g->placing : NULL;
}

uint64_t lease_next_id(struct head *h)
{
    return h->term.head << 32 | (++h->next_lease & UINT32_MAX);
}

bool bundle_lost(const Fl__GroupRec *g)
{
    for (size_t i = 0; i < g->n_bundles; i++)
        if (!g->bundles[i]->lease)
            return true;
    return false;
}

static struct placing_node *node_part(struct placing *p, const struct fl_node_id *id)
{
    for (size_t i = 0; i < p->n_nodes; i++)
        if (FL_SAME(p->nodes[i].id, *id))
            return &p->nodes[i];
    p->nodes = must(realloc(p->nodes, (p->n_nodes + 1) * sizeof(*p->nodes)));
    p->nodes[p->n_nodes] =
        (struct placing_node){ .owner = p, .id = *id, .party = (unsigned)p->n_nodes };
    return &p->nodes[p->n_nodes++];
}

static void retry_later(struct group *g)
{
    g->tried = 0;
    g->retry_ns = fl_loop_now_ns(g->job->head->loop) + HEAD_RETRY_MS * 1000000ull;
    head_wake_at(g->job->head, g->retry_ns);
}

/* ---- the layout, in words ---- */

static Fl__LayoutRank *add_rank(Fl__Layout *y, const char *role, uint32_t rank)
{
    Fl__LayoutRank *r = must(malloc(sizeof(*r)));

    *r = (Fl__LayoutRank)FL__LAYOUT_RANK__INIT;
    r->role = must(strdup(role));
    r->rank = rank;
    r->node = must(strdup(""));
    r->address = must(strdup(""));
    y->ranks = must(realloc(y->ranks, (y->n_ranks + 1) * sizeof(*y->ranks)));
    y->ranks[y->n_ranks++] = r;
    return r;
}

static void add_bundle(Fl__LayoutRank *r, uint32_t bundle)
{
    r->bundles = must(realloc(r->bundles, (r->n_bundles + 1) * sizeof(*r->bundles)));
    r->bundles[r->n_bundles++] = bundle;
}

static void add_derived(Fl__Layout *y, const struct layout *from)
{
    y->derived = must(calloc(from->n_derived + 1, sizeof(*y->derived)));
    for (size_t i = 0; i < from->n_derived; i++) {
        Fl__Derived *d = must(malloc(sizeof(*d)));

        *d = (Fl__Derived)FL__DERIVED__INIT;
        d->flag = must(strdup(from->derived[i].flag));
        d->value = must(strdup(from->derived[i].value));
        d->why = must(strdup(from->derived[i].why));
        y->derived[y->n_derived++] = d;
    }
}

/* Which rank sits on which bundles; where those are comes from the leases. */
static Fl__Layout *layout_words(const struct layout *from, const ProtobufCBinaryData *group)
{
    Fl__Layout *y = must(malloc(sizeof(*y)));
    uint32_t rollout = 0, eval = 0;

    *y = (Fl__Layout)FL__LAYOUT__INIT;
    y->group.data = must(malloc(group->len));
    y->group.len = group->len;
    memcpy(y->group.data, group->data, group->len);
    y->master_addr = must(strdup(""));
    y->text = must(strdup(""));
    y->master_port = from->master_port;
    for (size_t i = 0; i < from->n_actors; i++)
        add_bundle(add_rank(y, "trainer", (uint32_t)i), from->sorted[from->actors[i].slot]);
    for (size_t i = 0; from->flags.critic && i < from->n_actors; i++)
        add_bundle(add_rank(y, "critic", (uint32_t)i), from->sorted[from->actors[i].slot]);
    for (size_t i = 0; i < from->n_engines; i++) {
        const struct layout_engine *e = &from->engines[i];
        Fl__LayoutRank *r = add_rank(y, e->eval ? "eval" : "rollout", e->eval ? eval++ : rollout++);

        r->has_base_port = true;
        r->base_port = e->base_port;
        for (uint32_t k = 0; k < e->n_slots; k++)
            add_bundle(r, from->sorted[e->first_slot + k]);
    }
    add_derived(y, from);
    return y;
}

static void set_text(char **at, const char *text)
{
    free(*at);
    *at = must(strdup(text));
}

static void place_rank(struct head *h, const Fl__GroupRec *g, Fl__LayoutRank *r)
{
    for (size_t i = 0; i < r->n_devices; i++)
        free(r->devices[i]);
    r->n_devices = 0;
    for (size_t i = 0; i < r->n_bundles; i++) {
        struct lease *l =
            r->bundles[i] < g->n_bundles ? lease_of(h, g->bundles[r->bundles[i]]->lease) : NULL;
        struct node *n = l ? node_of(h, &l->rec->at->id) : NULL;

        if (!n)
            continue;
        if (i == 0) {
            set_text(&r->node, n->rec->name);
            set_text(&r->address, n->rec->address);
        }
        r->devices =
            must(realloc(r->devices, (r->n_devices + l->rec->n_devices + 1) * sizeof(char *)));
        for (size_t k = 0; k < l->rec->n_devices; k++)
            if (l->rec->devices[k] < n->rec->inventory->n_devices)
                r->devices[r->n_devices++] =
                    must(strdup(n->rec->inventory->devices[l->rec->devices[k]]->id));
    }
}

/* node, address, devices, world and local ranks of every rank, from the leases of the bundles. */
static void layout_fill(struct head *h, const Fl__GroupRec *g, Fl__Layout *y)
{
    for (size_t i = 0; i < y->n_ranks; i++)
        place_rank(h, g, y->ranks[i]);
    for (size_t i = 0; i < y->n_ranks; i++) {
        Fl__LayoutRank *r = y->ranks[i];

        r->world = r->local_rank = r->local_world = 0;
        for (size_t k = 0; k < y->n_ranks; k++) {
            if (strcmp(y->ranks[k]->role, r->role) != 0)
                continue;
            r->world++;
            if (strcmp(y->ranks[k]->node, r->node) != 0)
                continue;
            r->local_rank += k < i;
            r->local_world++;
        }
        if (r->rank == 0 && (i == 0 || strcmp(r->role, "trainer") == 0))
            set_text(&y->master_addr, r->address);
    }
}

static void layout_print(Fl__Layout *y)
{
    struct fl_str out = FL_STR_HEAP(1 << 20);

    for (size_t i = 0; i < y->n_ranks; i++) {
        const Fl__LayoutRank *r = y->ranks[i];

        fl_str_add(&out, "%s %u of %u  %s  %s  ", r->role, r->rank, r->world, r->node, r->address);
        for (size_t k = 0; k < r->n_devices; k++)
            fl_str_add(&out, "%s%s", k ? "," : "devices ", r->devices[k]);
        fl_str_add(&out, "\n");
    }
    for (size_t i = 0; i < y->n_derived; i++)
        fl_str_add(&out, "derived: %s %s (%s)\n", y->derived[i]->flag, y->derived[i]->value,
                   y->derived[i]->why);
    set_text(&y->text, fl_str_text(&out));
    fl_str_fini(&out);
}

/* ---- solving ---- */

static void bundles_to_ask(Fl__DecisionRec *d, const Fl__GroupRec *g)
{
    d->strategy = g->strategy;
    d->bundles = must(calloc(g->n_bundles + 1, sizeof(*d->bundles)));
    for (size_t i = 0; i < g->n_bundles; i++) {
        Fl__AskBundle a = FL__ASK_BUNDLE__INIT;

        if (g->bundles[i]->lease)
            continue; /* this one still has its place */
        a.wants = g->bundles[i]->wants;
        a.n_wants = g->bundles[i]->n_wants;
        a.must = g->bundles[i]->must;
        a.n_must = g->bundles[i]->n_must;
        d->bundles[d->n_bundles++] = copy_msg(&a);
    }
}

/* The request of a group that has never been placed comes from its flags and the nodes of today. */
static enum fl_status flags_to_ask(Fl__DecisionRec *d, const Fl__GroupRec *g, struct fl_err *err)
{
    struct layout_flags flags;
    struct placement_request *req = NULL;
    struct snapshot *s = snapshot_of(d);
    enum fl_status st = flags_read(g, &flags, err);

    if (st == FL_OK)
        st = layout_request(&flags, snapshot_view(s), &req, err);
    if (st == FL_OK)
        decision_ask(d, snapshot_view(s), req);
    placement_request_destroy(req);
    snapshot_free(s);
    return st;
}

static Fl__BundleRec *bundle_new(const Fl__AskBundle *a)
{
    Fl__BundleRec b = FL__BUNDLE_REC__INIT;

    b.wants = a->wants;
    b.n_wants = a->n_wants;
    b.must = a->must;
    b.n_must = a->n_must;
    return copy_msg(&b);
}

/* Writes each lease of the plan down as PREPARED and puts its number into the bundle. */
static enum fl_status write_leases(struct placing *p, const Fl__DecisionRec *d,
                                   const struct placement_plan *plan, struct fl_err *err)
{
    struct head *h = p->head;
    struct job *j = p->group->job;
    size_t slot = 0;

    for (size_t i = 0; i < p->next->n_bundles; i++) {
        Fl__BundleRec *b = p->next->bundles[i];
        Fl__Lease l = FL__LEASE__INIT;
        Fl__Term by = FL__TERM__INIT;

        if (b->lease)
            continue;
        const struct placement_slot *at = &plan->slots[slot++];
        const Fl__SnapNode *n = d->nodes[at->node];
        l.id = lease_next_id(h);
        by.cluster = BYTES_OF(h->term.cluster);
        by.head = h->term.head;
        l.by = &by;
        l.at = n->who;
        l.group = p->next->id;
        l.job = j->rec->id;
        l.has_bundle = l.has_job_attempt = l.has_hold_ms = l.has_state = true;
        l.bundle = (uint32_t)i;
        l.job_attempt = j->rec->attempt;
        l.hold_ms = HEAD_HOLD_MS;
        l.state = FL__LEASE_STATE__PREPARED;
        l.amounts = b->wants;
        l.n_amounts = b->n_wants;
        l.devices = &plan->devices[at->first_device];
        l.n_devices = at->n_devices;
        FL_TRY(head_record(h, REC_LEASE, &l, NULL, err));
        b->has_lease = true;
        b->lease = l.id;
        struct placing_node *part = node_part(p, (const struct fl_node_id *)n->who->id.data);
        part->leases = must(realloc(part->leases, (part->n_leases + 1) * sizeof(*part->leases)));
        part->leases[part->n_leases++] = l.id;
    }
    return FL_OK;
}

/* ---- two phases ---- */

static void group_waits(struct group *g, enum group_wait wait, const char *why)
{
    g->wait = wait;
    (void)FL_COPY(g->why, why);
}

/* What was prepared is taken back by groups_settle(), which finds the group PREPARING and alone. */
static void give_up(struct placing *p, const struct fl_err *why)
{
    struct group *g = p->group;

    group_waits(g, WAIT_ROOM, why->text);
    fl_warn("placement is taken back job=%s why=\"%s\"", g->job->rec->submission_id, why->text);
    placing_free(g);
    retry_later(g);
    head_kick(g->job->head);
}

static void part_in(struct placing_node *part, enum fl_status st, const struct fl_err *err)
{
    fl_muster_in(part->owner->muster, part->party, st, err);
}

static void ports_in(struct placing *p, const struct placing_node *part,
                     const struct wire_msg *reply)
{
    struct node *n = node_find(p->head, &part->id);
    Fl__LeasePrepared *m = fl__lease_prepared__unpack(NULL, reply->head.body_bytes, reply->body);
    Fl__Layout *y = p->next->layout;
    size_t k = 0;

    for (size_t i = 0; m && y && n && i < y->n_ranks; i++) {
        if (!y->ranks[i]->has_base_port || strcmp(y->ranks[i]->node, n->rec->name) != 0)
            continue;
        if (k < m->n_ports)
            y->ranks[i]->base_port = m->ports[k];
        k += PORTS_EACH;
    }
    if (m && y && n && m->n_ports && strcmp(y->master_addr, n->rec->address) == 0)
        y->master_port = m->ports[m->n_ports - 1];
    free_msg(m);
}

static void call_in(struct send *t, enum fl_status st, const struct wire_msg *reply,
                    const struct fl_err *err)
{
    struct placing *p = placing_of(t->head, t->key, t->n >> 16);

    if (!p || (t->n & 0x7fff) >= p->n_nodes || p->committing != !!(t->n & 0x8000))
        return;
    struct placing_node *part = &p->nodes[t->n & 0x7fff];
    if (st == FL_OK && !p->committing)
        ports_in(p, part, reply);
    for (size_t i = 0; st == FL_OK && p->committing && i < part->n_leases; i++) {
        struct lease *l = lease_of(t->head, part->leases[i]);

        if (l)
            l->acked = true;
    }
    part_in(part, st, err);
}

static uint32_t ports_for(const struct placing *p, const struct node *n)
{
    const Fl__Layout *y = p->next->layout;
    uint32_t count = 1;

    for (size_t i = 0; y && i < y->n_ranks; i++)
        if (y->ranks[i]->has_base_port && strcmp(y->ranks[i]->node, n->rec->name) == 0)
            count += PORTS_EACH;
    return !y ? 0 : count < PORTS_MAX ? count : PORTS_MAX;
}

static enum fl_status send_prepare(struct placing *p, struct placing_node *part, struct node *n,
                                   const struct send *t, struct fl_err *err)
{
    Fl__LeasePrepare m = FL__LEASE_PREPARE__INIT;

    m.leases = must(calloc(part->n_leases, sizeof(*m.leases)));
    for (size_t k = 0; k < part->n_leases; k++) {
        struct lease *l = lease_of(p->head, part->leases[k]);

        if (l)
            m.leases[m.n_leases++] = l->rec;
    }
    m.has_free_ports = m.has_ports_from = true;
    m.free_ports = ports_for(p, n);
    m.ports_from = LAYOUT_FIRST_PORT;
    m.has_port_block = true;
    m.port_block = PORTS_EACH;
    enum fl_status st =
        m.n_leases == part->n_leases
            ? node_send(n, FL_LEASE_PREPARE, &m, HEAD_PLACE_MS, t, err)
            : fl_fail(err, FL_UNREACHABLE, "node %s was fenced meanwhile", n->rec->name);
    free(m.leases);
    return st;
}

static void send_phase(struct placing *p)
{
    for (size_t i = 0; i < p->n_nodes; i++) {
        struct placing_node *part = &p->nodes[i];
        struct node *n = node_find(p->head, &part->id);
        struct send t = { .done = call_in,
                          .n = p->serial << 16 | (p->committing ? 0x8000 : 0) | i };
        Fl__LeaseIds ids = FL__LEASE_IDS__INIT;
        struct fl_err err;
        enum fl_status st;

        memcpy(t.key, &p->group->id, sizeof(p->group->id));
        fl_muster_name(p->muster, part->party, "node %s", n ? n->rec->name : "?");
        fl_muster_at(p->muster, part->party, p->committing ? "commit" : "prepare");
        ids.ids = part->leases;
        ids.n_ids = part->n_leases;
        st = !n              ? fl_fail(&err, FL_UNREACHABLE, "the node is not there any more")
             : p->committing ? node_send(n, FL_LEASE_COMMIT, &ids, HEAD_PLACE_MS, &t, &err)
                             : send_prepare(p, part, n, &t, &err);
        if (st != FL_OK)
            part_in(part, st, &err);
    }
}

static enum fl_status gather(struct placing *p,
                             void (*over)(void *arg, enum fl_status st, const struct fl_err *e),
                             struct fl_err *err)
{
    struct fl_muster *old = p->muster;
    enum fl_status st = fl_muster_create(
        p->head->loop, p->committing ? "committing a placement" : "preparing a placement",
        (unsigned)p->n_nodes, fl_loop_now_ns(p->head->loop) + HEAD_PLACE_MS * 1000000ull, over, p,
        &p->muster, err);

    if (st == FL_OK) {
        fl_muster_destroy(old);
        send_phase(p);
    }
    return st;
}

static void on_committed(void *arg, enum fl_status st, const struct fl_err *e)
{
    struct placing *p = arg;
    struct group *g = p->group;
    struct head *h = p->head;

    if (st != FL_OK) /* decided all the same: sent again until it is taken, or the lease is lost */
        fl_warn("commit is late why=\"%s\"", e->text);
    fl_metric_add(h->count.placed, 1);
    placing_free(g);
    g->retry_ns = 0;
    if (!bundle_lost(g->rec))
        group_asks_answer(g, FL_OK, NULL);
    head_kick(h);
}

static void placed(struct after *a, enum fl_status st, const struct fl_err *err)
{
    struct placing *p = placing_of(a->head, a->key, a->n);
    struct fl_err e;

    if (p && st != FL_OK) {
        give_up(p, err);
    } else if (p) {
        p->committing = true;
        if (gather(p, on_committed, &e) != FL_OK)
            on_committed(p, e.status, &e);
    }
    free(a);
}

static void on_prepared(void *arg, enum fl_status st, const struct fl_err *e)
{
    struct placing *p = arg;
    struct fl_err err;

    if (st != FL_OK) {
        give_up(p, e);
        return;
    }
    if (p->group->rec->state == FL__GROUP_STATE__GROUP_ENDING) {
        fl_fail(&err, FL_CANCELLED, "the group has ended meanwhile");
        give_up(p, &err);
        return;
    }
    struct after *a = after_new(p->head, placed);
    memcpy(a->key, &p->group->id, sizeof(p->group->id));
    a->n = p->serial;
    p->next->state = FL__GROUP_STATE__GROUP_PLACED; /* this record is the decision */
    if (p->next->layout)
        layout_print(p->next->layout);
    if (head_record(p->head, REC_GROUP, p->next, a, &err) != FL_OK)
        give_up(p, &err);
}

static void promised(struct after *a, enum fl_status st, const struct fl_err *err)
{
    struct placing *p = placing_of(a->head, a->key, a->n);
    struct fl_err e;

    if (p && (st != FL_OK || gather(p, on_prepared, &e) != FL_OK))
        give_up(p, st != FL_OK ? err : &e);
    free(a);
}

/* ---- from a decision to a placing ---- */

static enum fl_status begin(struct group *g, const Fl__DecisionRec *d, const struct snapshot *s,
                            const struct placement_plan *plan, struct fl_err *err)
{
    static uint64_t serial;
    struct head *h = g->job->head;
    struct placing *p = must(calloc(1, sizeof(*p)));
    struct layout_flags flags;
    struct layout *y = NULL;

    g->placing = p;
    p->head = h;
    p->group = g;
    p->serial = ++serial;
    p->next = copy_msg(g->rec);
    if (p->next->n_flags && !p->next->layout) {
        FL_TRY(flags_read(g->rec, &flags, err));
        FL_TRY(layout_assign(&flags, snapshot_view(s), plan, &y, err));
        p->next->layout = layout_words(y, &g->rec->id);
        layout_destroy(y);
        p->next->has_strategy = true;
        p->next->strategy = d->strategy;
        p->next->bundles = must(calloc(d->n_bundles + 1, sizeof(*p->next->bundles)));
        for (size_t i = 0; i < d->n_bundles; i++)
            p->next->bundles[p->next->n_bundles++] = bundle_new(d->bundles[i]);
    }
    FL_TRY(write_leases(p, d, plan, err));
    if (p->next->layout)
        layout_fill(h, p->next, p->next->layout);
    p->next->state = FL__GROUP_STATE__GROUP_PREPARING;
    struct after *a = after_new(h, promised);
    memcpy(a->key, &g->id, sizeof(g->id));
    a->n = p->serial;
    return head_record(h, REC_GROUP, p->next, a, err);
}

static void remember(struct head *h, struct group *g, Fl__DecisionRec *d, enum fl_status st,
                     const struct fl_err *err)
{
    struct fl_err e;

    size_t len = strlen(err->text);

    if (st != FL_OK && len && strncmp(g->why, err->text, len) == 0)
        return; /* the same answer as before, for the same reason */
    d->status = st;
    d->text = must(strdup(st == FL_OK ? "" : err->text));
    if (head_record(h, REC_DECISION, d, NULL, &e) != FL_OK)
        fl_warn("decision is not written down, explain will not show it why=\"%s\"", e.text);
}

/* Jobs that hold some of it there, by name. */
static void add_holders(struct head *h, const Fl__SnapNode *n, const char *resource,
                        struct fl_str *out)
{
    enum { SHOWN = 3 };
    const struct job *shown[SHOWN];
    const struct node *at = node_of(h, &n->who->id);
    const struct lease *l;
    size_t n_shown = 0, more = 0;

    if (!at)
        return;
    EACH_HELD (at, l) {
        const struct job *j = job_of(h, &l->rec->job);
        bool has = false, known = !j;

        for (size_t i = 0; i < l->rec->n_amounts && !known; i++)
            has |= strcmp(l->rec->amounts[i]->name, resource) == 0 && l->rec->amounts[i]->e4 > 0;
        for (size_t i = 0; i < n_shown; i++)
            known |= shown[i] == j;
        if (known || !has)
            continue;
        more += n_shown == SHOWN;
        if (n_shown < SHOWN)
            shown[n_shown++] = j;
    }
    for (size_t i = 0; i < n_shown; i++)
        fl_str_add(out, "%s%s", i ? ", " : " (held by ", shown[i]->rec->submission_id);
    if (n_shown)
        fl_str_add(out, more ? " and others)" : ")");
}

/* Which nodes could take a bundle and cannot now, what they lack, and who has it. */
static void add_blockers(struct head *h, const Fl__DecisionRec *d,
                         const struct placement_snapshot *snap, const struct placement_why *why,
                         size_t n, struct fl_str *out)
{
    enum { SHOWN = 2 };
    size_t blocked = 0;

    for (size_t i = 0; i < n; i++) {
        const struct placement_why *w = &why[i];

        if (w->rule || w->has_e4 >= w->each_e4 || w->total_e4 < w->each_e4 || blocked++ >= SHOWN)
            continue;
        fl_str_add(out, "; node %s: %s %g wanted, %g free of %g", d->nodes[w->node]->name,
                   snap->resources[w->resource], (double)w->each_e4 / PLACEMENT_ONE,
                   (double)w->has_e4 / PLACEMENT_ONE, (double)w->total_e4 / PLACEMENT_ONE);
        add_holders(h, d->nodes[w->node], snap->resources[w->resource], out);
    }
    if (blocked > SHOWN)
        fl_str_add(out, "; and %zu more nodes", blocked - SHOWN);
}

/* Never: said at once. A driver's own resources may still come with another node, as Ray has it. */
static void refuse(struct group *g, const struct fl_err *err)
{
    struct head *h = g->job->head;
    Fl__GroupRec rec = *g->rec;
    struct fl_err e;

    fl_metric_add(h->count.refused, 1);
    group_asks_answer(g, err->status, err);
    rec.state = FL__GROUP_STATE__GROUP_ENDING;
    rec.why = (char *)(uintptr_t)err->text;
    if (head_record(h, REC_GROUP, &rec, NULL, &e) != FL_OK)
        retry_later(g);
}

/* A node that is silent just now may come back with what is missing: nothing is final before that.
 */
static bool node_away(struct head *h)
{
    struct node *n, *tmp;

    HASH_ITER (hh, h->nodes, n, tmp)
        if (n->rec->fate == FL__NODE_FATE__NODE_IN && n->state != NODE_READY)
            return true;
    return false;
}

void place_group(struct group *g)
{
    struct head *h = g->job->head;
    Fl__DecisionRec *d = decision_take(h, g);
    bool by_flags = g->rec->n_flags && !g->rec->layout;
    struct placement_plan *plan = NULL;
    struct fl_err err = { 0 };
    enum fl_status st = FL_OK;
    char reason[sizeof(g->why)] = "";
    struct fl_str text = FL_STR_ON(reason);

    if (by_flags)
        st = flags_to_ask(d, g->rec, &err);
    else
        bundles_to_ask(d, g->rec);
    if (st == FL_OK) {
        struct snapshot *s = snapshot_of(d);
        size_t n_why = snapshot_view(s)->n_nodes;
        struct placement_why *why = must(calloc(n_why + 1, sizeof(*why)));

        st = placement_solve(snapshot_view(s), snapshot_request(s), &plan, why, &n_why, &err);
        remember(h, g, d, st, &err);
        fl_str_add(&text, "%s", err.text);
        if (st == FL_EXHAUSTED)
            add_blockers(h, d, snapshot_view(s), why, n_why, &text);
        free(why);
        if (st == FL_OK) {
            st = begin(g, d, s, plan, &err);
            if (st != FL_OK)
                placing_free(g);
        }
        placement_plan_destroy(plan);
        snapshot_free(s);
    }
    decision_free(d);
    if (st == FL_OK)
        return;
    if (st == FL_EXHAUSTED && g->asks && strcmp(g->why, reason) != 0)
        joblog_note(g->job, "the placement group waits: %s", reason);
    group_waits(g, st == FL_INVALID ? WAIT_NODES : WAIT_ROOM, text.len ? reason : err.text);
    g->tried = h->resources;
    if (st == FL_INVALID && by_flags && !node_away(h))
        refuse(g, &err);
    else if (st != FL_EXHAUSTED && st != FL_INVALID)
        retry_later(g);
}
