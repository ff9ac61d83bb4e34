#include <math.h>
#include <stdlib.h>

#include "head/rest/rest.h"

enum { STATUS_DEVICES = 64 }; /* beyond it they have an answer of their own */

static const char *head_state_name(enum head_state s)
{
    static const char *const names[] = { "RECOVERING", "READY", "ENDING" };

    return names[s];
}

const char *rest_group_state(Fl__GroupState s)
{
    static const char *const names[] = { "PENDING", "PREPARING", "PLACED",
                                         "ENDING",  "ENDED",     "REFUSED" };

    return (unsigned)s < FL_LEN(names) ? names[s] : "?";
}

static const char *strategy_name(uint32_t s)
{
    static const char *const names[] = { "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD" };

    return s < FL_LEN(names) ? names[s] : "?";
}

/* ---- what is used ---- */

static void add_amount(json_t *resources, const char *name, const char *member, int64_t e4)
{
    json_t *r = json_object_get(resources, name);

    if (!r) {
        r = json_pack("{s:i,s:i}", "used", 0, "total", 0);
        json_object_set_new(resources, name, r);
    }
    /* Not as ten-thousandths: the memory of two thousand nodes does not fit into 64 bits of them.
     */
    double sum = json_number_value(json_object_get(r, member)) + (double)e4 / PLACEMENT_ONE;
    sum = round(sum * PLACEMENT_ONE) / PLACEMENT_ONE;
    json_object_set_new(r, member,
                        floor(sum) == sum ? json_integer((json_int_t)sum) : json_real(sum));
}

static void add_lease(json_t *resources, const Fl__Lease *l)
{
    for (size_t i = 0; i < l->n_amounts; i++)
        add_amount(resources, l->amounts[i]->name, "used", l->amounts[i]->e4);
}

static void add_inventory(const struct node *n, json_t *resources)
{
    struct unknown_lease *u;

    for (size_t i = 0; i < n->rec->inventory->n_total; i++)
        add_amount(resources, n->rec->inventory->total[i]->name, "total",
                   n->rec->inventory->total[i]->e4);
    LL_FOREACH (n->leases, u)
        add_lease(resources, u->lease);
}

static void add_node(const struct node *n, json_t *resources)
{
    const struct lease *l;

    add_inventory(n, resources);
    EACH_HELD (n, l)
        add_lease(resources, l->rec);
}

json_t *rest_usage(struct head *h, const struct node *only)
{
    json_t *all = json_object();
    struct node *n, *tmp;

    HASH_ITER (hh, h->nodes, n, tmp)
        if (only ? n == only : rest_node_alive(n))
            add_node(n, all);
    return all;
}

/* ---- status ---- */

/* Why it is avoided, or null. */
static json_t *trouble(const struct node *n)
{
    return node_troubled(n) ? json_sprintf("%d workers ended on it within %d min, new ones go elsewhere where they can; the last: %s",
                                           HEAD_BAD_ENDS, HEAD_FAULT_S / 60, n->bad_why)
                            : json_null();
}

static json_t *troubled(struct head *h)
{
    json_t *list = json_array();
    struct node *n, *tmp;

    HASH_ITER (hh, h->nodes, n, tmp)
        if (n->rec->fate == FL__NODE_FATE__NODE_IN && node_troubled(n))
            json_array_append_new(list, json_pack("{s:s,s:o}", "node", n->rec->name, "why", trouble(n)));
    return list;
}

static void count(json_t *counts, const char *name)
{
    json_object_set_new(counts, name,
                        json_integer(json_integer_value(json_object_get(counts, name)) + 1));
}

static json_t *waiting(struct head *h)
{
    json_t *list = json_array();
    struct group *g, *tmp;

    HASH_ITER (hh, h->groups, g, tmp)
        if (g->rec->state == FL__GROUP_STATE__GROUP_PENDING ||
            (g->rec->state == FL__GROUP_STATE__GROUP_PLACED && bundle_lost(g->rec)))
            json_array_append_new(
                list,
                json_pack("{s:s,s:s,s:s,s:o}", "job", g->job->rec->submission_id, "what",
                          g->rec->driver ? "the driver's resources" : "a placement group", "why",
                          g->why[0]                     ? g->why
                          : h->state == HEAD_RECOVERING ? "the head waits for its nodes to report"
                                                        : "it is being placed",
                          "group", rest_hex(&g->rec->id)));
    return list;
}

static unsigned unknown_pieces(const struct head *h)
{
    struct node *n, *tmp;
    struct unknown_lease *l;
    struct unknown_worker *w;
    unsigned c = 0;

    HASH_ITER (hh, ((struct head *)(uintptr_t)h)->nodes, n, tmp) {
        LL_FOREACH (n->leases, l)
            c++;
        LL_FOREACH (n->workers, w)
            c++;
    }
    return c;
}

void rest_status(void *head, struct http_req *req)
{
    struct head *h = head;
    json_t *nodes = json_object(), *jobs = json_object(), *resources = json_object();
    char cluster[33];
    struct node *n, *ntmp;
    struct job *j, *jtmp;
    struct lease *l, *ltmp;

    HASH_ITER (hh, h->nodes, n, ntmp) {
        count(nodes, node_state_name(n->state));
        if (n->rec->fate == FL__NODE_FATE__NODE_IN)
            add_inventory(n, resources);
    }
    HASH_ITER (hh, h->leases, l,
               ltmp) { /* each once: thousands of nodes are looked at every second */
        const struct node *at = node_of(h, &l->rec->at->id);

        if (at && at->rec->fate == FL__NODE_FATE__NODE_IN)
            add_lease(resources, l->rec);
    }
    HASH_ITER (hh, h->jobs, j, jtmp)
        count(jobs, job_status_name(j->rec->status));
    fl_hex(cluster, h->term.cluster, sizeof(h->term.cluster));
    http_reply_json(
        req, 200,
        json_pack("{s:s,s:I,s:s,s:f,s:o,s:o,s:o,s:o,s:o,s:o,s:i,s:b,s:s,s:s,s:s}", "cluster", cluster,
                  "term", (json_int_t)h->term.head, "state", head_state_name(h->state), "uptime_s",
                  (double)(fl_loop_now_ns(h->loop) - h->start_ns) / 1e9, "nodes", nodes, "jobs",
                  jobs, "resources", resources, "devices",
                  rest_devices_in(h, STATUS_DEVICES), "troubled", troubled(h), "waiting", waiting(h), "unknown",
                  (int)unknown_pieces(h), "journal_older", h->foreign_to != 0, "journal_note",
                  h->opened.note, "address", h->rpc, "http", h->http));
}

/* ---- lists ---- */

static void count_workers(struct head *h)
{
    struct unknown_worker *u;
    struct node *n, *ntmp;
    struct seat *s, *tmp;

    HASH_ITER (hh, h->nodes, n, ntmp)
        LL_COUNT(n->workers, u, n->n_workers);
    HASH_ITER (hh, h->seats, s, tmp)
        if (s->rec->state == FL__SEAT_STATE__SEAT_LIVE && (n = seat_node(s)))
            n->n_workers++;
}

void rest_nodes(void *head, struct http_req *req)
{
    struct head *h = head;
    json_t *list = json_array();
    struct node *n, *tmp;

    count_workers(h);
    HASH_ITER (hh, h->nodes, n, tmp) {
        json_t *resources = json_object(), *labels = json_object();

        add_node(n, resources);
        for (size_t i = 0; i < n->rec->inventory->n_labels; i++)
            json_object_set_new(labels, n->rec->inventory->labels[i]->key,
                                json_string(n->rec->inventory->labels[i]->value));
        json_array_append_new(
            list, json_pack("{s:o,s:s,s:s,s:s,s:I,s:s,s:o,s:o,s:o,s:i,s:I,s:f,s:f,s:o,s:o}", "id",
                            rest_hex(&n->rec->who->id), "name", n->rec->name, "address",
                            n->rec->address, "state", node_state_name(n->state), "start",
                            (json_int_t)n->rec->who->start, "boot_id", n->rec->boot_id, "resources",
                            resources, "devices", rest_devices_of(h, n), "labels", labels, "workers",
                            (int)n->n_workers, "memory_available", (json_int_t)n->memory_available,
                            "load", n->load_e2 / 100.0, "beat_age_s",
                            (double)(fl_loop_now_ns(h->loop) - n->beat_ns) / 1e9, "why",
                            rest_text(n->rec->why), "trouble", trouble(n)));
    }
    http_reply_json(req, 200, list);
}

const char *rest_seat_state(const struct seat *s)
{
    switch (s->rec->state) {
    case FL__SEAT_STATE__SEAT_LIVE:
        return s->stopping || seat_wants_end(s) ? "STOPPING"
               : s->joined                      ? "LIVE"
               : s->started                     ? "RUNNING"
                                                : "STARTING";
    case FL__SEAT_STATE__SEAT_WAITING:
        return "WAITING";
    default:
        return "ENDED";
    }
}

static json_t *exit_json(const Fl__Exit *x)
{
    if (!x)
        return json_null();
    return json_pack("{s:i,s:i,s:i,s:I,s:I,s:o,s:o}", "cause", (int)x->cause, "code", (int)x->code,
                     "signal", (int)x->signal, "lived_ms", (json_int_t)x->lived_ms, "peak_bytes",
                     (json_int_t)x->peak_bytes, "why", rest_text(x->why), "last",
                     rest_text(x->last));
}

static json_t *seat_json(const struct seat *s)
{
    const struct node *n = seat_node(s);
    const Fl__SeatRec *r = s->rec;

    return json_pack("{s:o,s:s,s:i,s:i,s:i,s:s,s:o,s:o,s:s,s:o,s:i,s:o,s:o,s:b,s:o,s:o}", "id",
                     rest_hex(&r->who->worker), "role", r->role, "rank", (int)r->rank, "world",
                     (int)r->world, "attempt", (int)r->who->attempt, "state", rest_seat_state(s),
                     "node", rest_text(n ? n->rec->name : NULL), "pid",
                     s->pid ? json_integer(s->pid) : json_null(), "job", s->job->rec->submission_id,
                     "group", r->has_group ? rest_hex(&r->group) : json_null(), "restarts",
                     (int)r->restarts, "why", rest_text(r->exit ? r->exit->why : NULL), "exit",
                     exit_json(r->exit), "known", 1, "devices", rest_given_to(s), "uses",
                     rest_used_by(s));
}

void rest_workers(void *head, struct http_req *req)
{
    struct head *h = head;
    json_t *list = json_array();
    struct seat *s, *stmp;
    struct node *n, *ntmp;
    struct unknown_worker *u;

    HASH_ITER (hh, h->seats, s, stmp)
        json_array_append_new(list, seat_json(s));
    HASH_ITER (hh, h->nodes, n, ntmp)
        LL_FOREACH (n->workers, u)
            json_array_append_new(list,
                                  json_pack("{s:o,s:s,s:i,s:i,s:s,s:s,s:i,s:n,s:s,s:b}", "id",
                                            rest_hex(&u->state->who->worker), "role",
                                            u->state->role, "rank", (int)u->state->rank, "attempt",
                                            (int)u->state->who->attempt, "state", "UNKNOWN", "node",
                                            n->rec->name, "pid", (int)u->state->pid, "job", "why",
                                            "this head's journal does not know it; it runs on and "
                                            "nothing is placed over it",
                                            "known", 0));
    http_reply_json(req, 200, list);
}

static json_t *amounts_json(Fl__Amount *const *a, size_t n)
{
    json_t *o = json_object();

    for (size_t i = 0; i < n; i++)
        json_object_set_new(o, a[i]->name, rest_amount(a[i]->e4));
    return o;
}

static json_t *devices_json(const struct node *n, const Fl__Lease *l)
{
    json_t *devices = json_array();

    for (size_t i = 0; i < l->n_devices; i++)
        json_array_append_new(devices,
                              n && l->devices[i] < n->rec->inventory->n_devices
                                  ? json_string(n->rec->inventory->devices[l->devices[i]]->id)
                                  : json_integer(l->devices[i]));
    return devices;
}

/* Where it lies now; null and none while it waits for a place. */
static json_t *bundle_json(struct head *h, const Fl__BundleRec *b)
{
    struct lease *l = lease_of(h, b->lease);
    struct node *n = l ? node_of(h, &l->rec->at->id) : NULL;

    return json_pack("{s:o,s:o,s:o,s:I}", "node", rest_text(n ? n->rec->name : NULL), "devices",
                     l ? devices_json(n, l->rec) : json_array(), "amounts",
                     amounts_json(b->wants, b->n_wants), "lease", (json_int_t)b->lease);
}

void rest_groups(void *head, struct http_req *req)
{
    struct head *h = head;
    json_t *list = json_array();
    struct group *g, *tmp;
    struct role *r;

    HASH_ITER (hh, h->groups, g, tmp) {
        json_t *bundles = json_array(), *roles = json_array();

        for (size_t i = 0; i < g->rec->n_bundles; i++)
            json_array_append_new(bundles, bundle_json(h, g->rec->bundles[i]));
        LL_FOREACH (g->roles, r)
            json_array_append_new(roles, json_string(r->rec->launch->role));
        json_array_append_new(
            list,
            json_pack("{s:o,s:s,s:s,s:s,s:o,s:o,s:o,s:o}", "id", rest_hex(&g->rec->id), "job",
                      g->job->rec->submission_id, "state", rest_group_state(g->rec->state),
                      "strategy", strategy_name(g->rec->strategy), "bundles", bundles, "roles",
                      roles, "layout", rest_text(g->rec->layout ? g->rec->layout->text : NULL),
                      "why", rest_text(g->why[0] ? g->why : g->rec->why)));
    }
    http_reply_json(req, 200, list);
}

static json_t *lease_json(struct head *h, const struct node *n, const Fl__Lease *l,
                          const char *state)
{
    struct job *j = job_of(h, &l->job);

    return json_pack("{s:I,s:o,s:o,s:o,s:i,s:s,s:o,s:o,s:I}", "id", (json_int_t)l->id, "node",
                     rest_text(n ? n->rec->name : NULL), "job",
                     rest_text(j ? j->rec->submission_id : NULL), "group", rest_hex(&l->group),
                     "bundle", (int)l->bundle, "state", state, "amounts",
                     amounts_json(l->amounts, l->n_amounts), "devices", devices_json(n, l), "term",
                     (json_int_t)l->by->head);
}

void rest_leases(void *head, struct http_req *req)
{
    static const char *const states[] = { "PREPARED", "COMMITTED", "RELEASING" };
    struct head *h = head;
    json_t *list = json_array();
    struct lease *l, *ltmp;
    struct node *n, *ntmp;
    struct unknown_lease *u;

    HASH_ITER (hh, h->leases, l, ltmp)
        json_array_append_new(
            list,
            lease_json(h, node_of(h, &l->rec->at->id), l->rec,
                       (unsigned)l->rec->state < FL_LEN(states) ? states[l->rec->state] : "?"));
    HASH_ITER (hh, h->nodes, n, ntmp)
        LL_FOREACH (n->leases, u)
            json_array_append_new(list, lease_json(h, n, u->lease, "UNKNOWN"));
    http_reply_json(req, 200, list);
}

/* ---- explaining ---- */

static json_t *explain_one(struct head *h, const Fl__DecisionRec *d, struct fl_str *all)
{
    struct fl_str lines = FL_STR_HEAP(1 << 20), asked = FL_STR_HEAP(1 << 16);
    struct fl_err err = { 0 };
    enum fl_status st = decision_explain(d, &lines, &err);
    struct job *j = job_of(h, &d->job);
    const char *verdict = st == FL_OK ? "placed" : st == FL_INVALID ? "impossible" : "waiting";

    for (size_t i = 0; i < d->n_bundles;) { /* equal ones together */
        size_t same = 1;

        for (; i + same < d->n_bundles && d->bundles[i]->n_wants == d->bundles[i + same]->n_wants;
             same++) {
            size_t k = 0;

            while (k < d->bundles[i]->n_wants &&
                   d->bundles[i]->wants[k]->e4 == d->bundles[i + same]->wants[k]->e4 &&
                   strcmp(d->bundles[i]->wants[k]->name, d->bundles[i + same]->wants[k]->name) == 0)
                k++;
            if (k < d->bundles[i]->n_wants)
                break;
        }
        fl_str_add(&asked, "%s%zu bundle%s of", i ? "; " : "", same, same == 1 ? "" : "s");
        for (size_t k = 0; k < d->bundles[i]->n_wants; k++)
            fl_str_add(&asked, " %s %g", d->bundles[i]->wants[k]->name,
                       (double)d->bundles[i]->wants[k]->e4 / PLACEMENT_ONE);
        i += same;
    }
    fl_str_add(all, "asked: %s, %s, of %zu nodes at record %llu\n%s%s%s%s", fl_str_text(&asked),
               strategy_name(d->strategy), d->n_nodes, (unsigned long long)d->seq,
               st == FL_OK ? "" : err.text, st == FL_OK ? "" : "\n", fl_str_text(&lines),
               st == (enum fl_status)d->status
                   ? ""
                   : "(this head's solver decides otherwise than then)\n");
    json_t *one = json_pack("{s:o,s:o,s:I,s:s,s:b,s:s,s:s}", "group", rest_hex(&d->group), "job",
                            rest_text(j ? j->rec->submission_id : NULL), "seq", (json_int_t)d->seq,
                            "decision", verdict, "same", st == (enum fl_status)d->status, "asked",
                            fl_str_text(&asked), "text", fl_str_text(&lines));
    fl_str_fini(&asked);
    fl_str_fini(&lines);
    return one;
}

static bool concerns(const Fl__DecisionRec *d, const struct job *j, const char *id)
{
    char hex[64] = "";

    if (j)
        return same_bytes(&d->job, &j->rec->id);
    if (d->group.len * 2 < sizeof(hex))
        fl_hex(hex, d->group.data, d->group.len);
    return strlen(id) >= 8 && strncmp(hex, id, strlen(id)) == 0;
}

void rest_explain(void *head, struct http_req *req)
{
    struct head *h = head;
    const char *id = http_req_param(req, "id");
    struct job *j = job_named(h, id);
    struct fl_str text = FL_STR_HEAP(4 << 20);
    json_t *list = json_array(), *last = NULL;
    struct decision *d;

    DL_FOREACH (h->decisions, d)
        if (concerns(d->rec, j, id)) {
            last = explain_one(h, d->rec, &text);
            json_array_append_new(list, last);
        }
    if (!last) {
        http_reply_error(
            req, 404,
            "no placement decision is kept for %.80s; it names a job or a placement group", id);
        json_decref(list);
    } else {
        json_t *verdict = json_incref(json_object_get(last, "decision"));
        json_t *job = json_incref(json_object_get(last, "job"));

        http_reply_json(req, 200,
                        json_pack("{s:o,s:o,s:s,s:o}", "job", job, "decision", verdict, "text",
                                  fl_str_text(&text), "decisions", list));
    }
    fl_str_fini(&text);
}

/* ---- the rest ---- */

void rest_shutdown(void *head, struct http_req *req)
{
    struct fl_bytes body = http_req_body(req);
    const char *why = "asked to over HTTP";
    struct fl_err err;
    json_t *o = NULL;

    if (body.len && http_req_json(req, &o, &err) != FL_OK) {
        http_reply_error(req, 400, "%s", err.text);
        return;
    }
    if (json_is_string(json_object_get(o, "why")))
        why = json_string_value(json_object_get(o, "why"));
    http_reply_json(req, 200, json_pack("{s:b}", "stopping", 1));
    head_shutdown(head, why);
    json_decref(o);
}
