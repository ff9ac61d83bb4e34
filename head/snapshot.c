#include <stdlib.h>

#include "head/state.h"

/* ---- from the tables to words ---- */

static int64_t used_by(const Fl__Lease *l, const char *name)
{
    for (size_t i = 0; i < l->n_amounts; i++)
        if (strcmp(l->amounts[i]->name, name) == 0)
            return l->amounts[i]->e4;
    return 0;
}

static void take(Fl__SnapNode *n, const Fl__Lease *l)
{
    int64_t each = l->n_devices ? used_by(l, "GPU") / (int64_t)l->n_devices : 0;

    for (size_t i = 0; i < n->n_free; i++)
        n->free[i]->e4 -= used_by(l, n->free[i]->name);
    for (size_t i = 0; i < l->n_devices; i++)
        if (l->devices[i] < n->n_devices)
            n->devices[l->devices[i]]->free_e4 -= each;
}

static char *copy_text(const char *text)
{
    return must(strdup(text));
}

static Fl__Amount *amount_new(const char *name, int64_t e4)
{
    Fl__Amount *a = must(malloc(sizeof(*a)));

    *a = (Fl__Amount)FL__AMOUNT__INIT;
    a->name = copy_text(name);
    a->e4 = e4;
    return a;
}

static Fl__Label *label_new(const char *key, const char *value)
{
    Fl__Label *l = must(malloc(sizeof(*l)));

    *l = (Fl__Label)FL__LABEL__INIT;
    l->key = copy_text(key);
    l->value = copy_text(value);
    return l;
}

static void *room(size_t n)
{
    return must(calloc(n + 1, sizeof(void *)));
}

static Fl__SnapDevice *device_new(const Fl__Device *d)
{
    Fl__SnapDevice *s = must(malloc(sizeof(*s)));

    *s = (Fl__SnapDevice)FL__SNAP_DEVICE__INIT;
    s->id = copy_text(d->id);
    s->free_e4 = PLACEMENT_ONE;
    s->has_memory_bytes = s->has_numa = s->has_island = true;
    s->memory_bytes = d->memory_bytes;
    s->numa = d->numa;
    s->island = d->island;
    return s;
}

static Fl__SnapNode *node_new(const struct node *n)
{
    const Fl__Inventory *inv = n->rec->inventory;
    Fl__SnapNode *s = must(malloc(sizeof(*s)));

    *s = (Fl__SnapNode)FL__SNAP_NODE__INIT;
    s->who = copy_msg(n->rec->who);
    s->name = copy_text(n->rec->name);
    s->address = copy_text(n->rec->address);
    s->takes_work = n->state == NODE_READY && n->up != NULL;
    s->has_avoid = s->avoid = node_troubled(n);
    s->total = room(inv->n_total);
    s->free = room(inv->n_total);
    s->devices = room(inv->n_devices);
    s->labels = room(inv->n_labels);
    for (size_t i = 0; i < inv->n_total; i++) {
        s->total[s->n_total++] = amount_new(inv->total[i]->name, inv->total[i]->e4);
        s->free[s->n_free++] = amount_new(inv->total[i]->name, inv->total[i]->e4);
    }
    for (size_t i = 0; i < inv->n_devices; i++)
        s->devices[s->n_devices++] = device_new(inv->devices[i]);
    for (size_t i = 0; i < inv->n_labels; i++)
        s->labels[s->n_labels++] = label_new(inv->labels[i]->key, inv->labels[i]->value);
    return s;
}

static int by_address(const void *a, const void *b)
{
    const Fl__SnapNode *x = *(Fl__SnapNode *const *)a, *y = *(Fl__SnapNode *const *)b;
    uint8_t p[16], q[16];

    placement_addr_sort(x->address, p);
    placement_addr_sort(y->address, q);
    int d = memcmp(p, q, sizeof(p));
    return d ? d : memcmp(x->who->id.data, y->who->id.data, sizeof(struct fl_node_id));
}

Fl__DecisionRec *decision_take(struct head *h, const struct group *g)
{
    Fl__DecisionRec *d = must(malloc(sizeof(*d)));
    struct node *n, *ntmp;
    struct lease *l, *ltmp;
    struct unknown_lease *u;
    struct by_id {
        UT_hash_handle hh;
        Fl__SnapNode *snap;
    } * all, *at, *index = NULL;
    size_t count = 0;

    *d = (Fl__DecisionRec)FL__DECISION_REC__INIT;
    d->group.data = must(malloc(g->rec->id.len));
    d->group.len = g->rec->id.len;
    memcpy(d->group.data, g->rec->id.data, g->rec->id.len);
    d->job.data = must(malloc(g->rec->job.len));
    d->job.len = g->rec->job.len;
    memcpy(d->job.data, g->rec->job.data, g->rec->job.len);
    d->seq = journal_seq(h->journal);
    d->flags = room(g->rec->n_flags);
    for (size_t i = 0; i < g->rec->n_flags; i++)
        d->flags[d->n_flags++] = copy_msg(g->rec->flags[i]);
    d->nodes = room(HASH_COUNT(h->nodes));
    all = must(calloc(HASH_COUNT(h->nodes) + 1u, sizeof(*all)));
    HASH_ITER (hh, h->nodes, n, ntmp) {
        if (n->rec->fate != FL__NODE_FATE__NODE_IN)
            continue;
        Fl__SnapNode *s = d->nodes[d->n_nodes++] = node_new(n);
        if (g->rec->driver)
            s->takes_work = job_may_run_on(g->job, n);
        LL_FOREACH (n->leases, u)
            take(s, u->lease);
        at = &all[count++];
        at->snap = s;
        HASH_ADD_KEYPTR(hh, index, s->who->id.data, s->who->id.len, at);
        must(at->hh.tbl);
    }
    HASH_ITER (hh, h->leases, l, ltmp) {
        HASH_FIND(hh, index, l->rec->at->id.data, l->rec->at->id.len, at);
        if (at)
            take(at->snap, l->rec);
    }
    HASH_CLEAR(hh, index);
    free(all);
    qsort(d->nodes, d->n_nodes, sizeof(*d->nodes), by_address);
    return d;
}

void decision_free(Fl__DecisionRec *d)
{
    free_msg(d); /* every part of it is on the heap, as after unpacking */
}

void decision_ask(Fl__DecisionRec *d, const struct placement_snapshot *snap,
                  const struct placement_request *req)
{
    d->strategy = req->strategy;
    d->bundles = room(req->n_bundles);
    for (size_t i = 0; i < req->n_bundles; i++) {
        const struct placement_bundle *b = &req->bundles[i];
        Fl__AskBundle *a = must(malloc(sizeof(*a)));

        *a = (Fl__AskBundle)FL__ASK_BUNDLE__INIT;
        a->wants = room(b->n_wants);
        a->must = room(b->n_must);
        for (size_t k = 0; k < b->n_wants; k++)
            a->wants[a->n_wants++] =
                amount_new(snap->resources[b->wants[k].resource], b->wants[k].e4);
        for (size_t k = 0; k < b->n_must; k++)
            a->must[a->n_must++] = label_new(b->must[k].key, b->must[k].value);
        if (b->affinity != PLACEMENT_ANYWHERE) {
            a->has_affinity = a->has_node = true;
            a->affinity = b->affinity;
            a->node.len = sizeof(b->node);
            a->node.data = must(malloc(sizeof(b->node)));
            memcpy(a->node.data, &b->node, sizeof(b->node));
        }
        d->bundles[d->n_bundles++] = a;
    }
}

/* ---- from words to what the solver reads ---- */

struct snapshot {
    struct placement_snapshot snap;
    struct placement_request req;
    const char **resources;
    size_t n_resources, cap;
};

static uint16_t intern(struct snapshot *s, const char *name)
{
    for (size_t i = 0; i < s->n_resources; i++)
        if (strcmp(s->resources[i], name) == 0)
            return (uint16_t)i;
    if (s->n_resources == s->cap) {
        s->cap = s->cap ? s->cap * 2 : 16;
        s->resources = must(realloc(s->resources, s->cap * sizeof(*s->resources)));
    }
    s->resources[s->n_resources] = name;
    return (uint16_t)s->n_resources++;
}

static struct fl_amount *amounts_of(struct snapshot *s, Fl__Amount *const *a, size_t n)
{
    struct fl_amount *out = must(calloc(n + 1, sizeof(*out)));

    for (size_t i = 0; i < n; i++)
        out[i] = (struct fl_amount){ intern(s, a[i]->name), a[i]->e4 };
    return out;
}

static struct placement_label *labels_of(Fl__Label *const *l, size_t n)
{
    struct placement_label *out = must(calloc(n + 1, sizeof(*out)));

    for (size_t i = 0; i < n; i++)
        out[i] = (struct placement_label){ l[i]->key, l[i]->value };
    return out;
}

static void fill_node(struct snapshot *s, struct placement_node *out, const Fl__SnapNode *n)
{
    struct placement_device *devices = must(calloc(n->n_devices + 1, sizeof(*devices)));

    memcpy(&out->who.id, n->who->id.data, sizeof(out->who.id));
    out->who.start = n->who->start;
    out->name = n->name;
    out->addr = n->address;
    placement_addr_sort(n->address, out->addr_sort);
    out->takes_work = n->takes_work;
    out->avoid = n->avoid;
    out->total = amounts_of(s, n->total, n->n_total);
    out->free = amounts_of(s, n->free, n->n_free);
    out->n_amounts = n->n_total;
    for (size_t i = 0; i < n->n_devices; i++)
        devices[i] =
            (struct placement_device){ n->devices[i]->id, n->devices[i]->free_e4,
                                       n->devices[i]->memory_bytes, (uint16_t)n->devices[i]->numa,
                                       (uint16_t)n->devices[i]->island };
    out->devices = devices;
    out->n_devices = n->n_devices;
    out->labels = labels_of(n->labels, n->n_labels);
    out->n_labels = n->n_labels;
}

struct snapshot *snapshot_of(const Fl__DecisionRec *d)
{
    struct snapshot *s = must(calloc(1, sizeof(*s)));
    struct placement_node *nodes = must(calloc(d->n_nodes + 1, sizeof(*nodes)));
    struct placement_bundle *bundles = must(calloc(d->n_bundles + 1, sizeof(*bundles)));

    for (size_t i = 0; i < d->n_nodes; i++)
        fill_node(s, &nodes[i], d->nodes[i]);
    for (size_t i = 0; i < d->n_bundles; i++) {
        const Fl__AskBundle *a = d->bundles[i];

        bundles[i].wants = amounts_of(s, a->wants, a->n_wants);
        bundles[i].n_wants = a->n_wants;
        bundles[i].must = labels_of(a->must, a->n_must);
        bundles[i].n_must = a->n_must;
        bundles[i].affinity = (enum placement_affinity)a->affinity;
        if (a->has_node && a->node.len == sizeof(bundles[i].node))
            memcpy(&bundles[i].node, a->node.data, a->node.len);
    }
    (void)intern(s, "GPU"); /* always known, so that a node without any says "0 of 0" */
    (void)intern(s, "CPU");
    s->snap =
        (struct placement_snapshot){ d->seq, s->resources, nodes, s->n_resources, d->n_nodes };
    s->req =
        (struct placement_request){ (enum placement_strategy)d->strategy, bundles, d->n_bundles };
    return s;
}

void snapshot_free(struct snapshot *s)
{
    if (!s)
        return;
    for (size_t i = 0; i < s->snap.n_nodes; i++) {
        const struct placement_node *n = &s->snap.nodes[i];

        free((void *)(uintptr_t)n->total);
        free((void *)(uintptr_t)n->free);
        free((void *)(uintptr_t)n->devices);
        free((void *)(uintptr_t)n->labels);
    }
    for (size_t i = 0; i < s->req.n_bundles; i++) {
        free((void *)(uintptr_t)s->req.bundles[i].wants);
        free((void *)(uintptr_t)s->req.bundles[i].must);
    }
    free((void *)(uintptr_t)s->snap.nodes);
    free((void *)(uintptr_t)s->req.bundles);
    free(s->resources);
    free(s);
}

const struct placement_snapshot *snapshot_view(const struct snapshot *s)
{
    return &s->snap;
}

const struct placement_request *snapshot_request(const struct snapshot *s)
{
    return &s->req;
}

/* ---- explaining ---- */

static void plan_lines(const struct placement_snapshot *snap, const struct placement_plan *p,
                       struct fl_str *out)
{
    for (size_t i = 0; i < p->n_slots; i++) {
        const struct placement_slot *s = &p->slots[i];
        const struct placement_node *n = &snap->nodes[s->node];

        fl_str_add(out, "bundle %zu: %s %s", i, n->name, n->addr);
        for (size_t k = 0; k < s->n_devices; k++)
            fl_str_add(out, "%s%s", k ? "," : ", device ",
                       n->devices[p->devices[s->first_device + k]].id);
        fl_str_add(out, "\n");
    }
}

/* Which rank sits on which bundle; a share that was placed anew has no layout of its own. */
static void role_lines(const struct snapshot *s, const Fl__DecisionRec *d,
                       const struct placement_plan *plan, struct fl_str *out)
{
    Fl__GroupRec g = FL__GROUP_REC__INIT;
    struct layout_flags flags;
    struct layout *y = NULL;

    g.flags = d->flags;
    g.n_flags = d->n_flags;
    if (!d->n_flags || flags_read(&g, &flags, NULL) != FL_OK ||
        layout_assign(&flags, &s->snap, plan, &y, NULL) != FL_OK)
        return;
    layout_text(y, &s->snap, plan, out);
    layout_destroy(y);
}

enum fl_status decision_explain(const Fl__DecisionRec *d, struct fl_str *lines, struct fl_err *err)
{
    struct snapshot *s = snapshot_of(d);
    size_t n_why = s->snap.n_nodes;
    struct placement_why *why = must(calloc(n_why + 1, sizeof(*why)));
    struct placement_plan *plan = NULL;
    enum fl_status st = placement_solve(&s->snap, &s->req, &plan, why, &n_why, err);

    if (st == FL_OK) {
        plan_lines(&s->snap, plan, lines);
        role_lines(s, d, plan, lines);
    } else {
        placement_why_text(&s->snap, why, n_why, lines);
    }
    placement_plan_destroy(plan);
    free(why);
    snapshot_free(s);
    return st;
}
