#include <stdlib.h>
#include <time.h>

#include "head/rest/rest.h"
#include "head/web/web.h"

/* ---- a piece of a list ---- */

struct piece {
    uint64_t first, count;
    const char *find; /* NULL: all */
};

static bool piece_of(struct http_req *req, struct piece *p)
{
    struct fl_err err;

    p->find = http_req_query(req, "find");
    if (p->find && !p->find[0])
        p->find = NULL;
    if (http_req_number(req, "first", 0, UINT32_MAX, &p->first, &err) == FL_OK &&
        http_req_number(req, "count", WEB_COUNT, WEB_COUNT_MAX, &p->count, &err) == FL_OK)
        return true;
    http_reply_error(req, 400, "%s", err.text);
    return false;
}

static bool has(const struct piece *p, const char *text)
{
    return !p->find || (text && strcasestr(text, p->find));
}

/* A choice of names in the query; *out is NULL without one. */
static bool choice_of(struct http_req *req, const char *name, const char *const *of, size_t n,
                      const char **out)
{
    const char *v = http_req_query(req, name);

    *out = NULL;
    if (!v || !v[0])
        return true;
    for (size_t i = 0; i < n && !*out; i++)
        if (strcmp(of[i], v) == 0)
            *out = of[i];
    if (!*out)
        http_reply_error(req, 400, "%s of the query: there is no %.40s", name, v);
    return *out != NULL;
}

static json_t *wall_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t);
    return json_integer((json_int_t)t.tv_sec * 1000 + t.tv_nsec / 1000000);
}

static json_t *answer(size_t total, size_t found, const struct piece *p, const char *name,
                      json_t *list)
{
    return json_pack("{s:o,s:I,s:I,s:I,s:o}", "now_ms", wall_ms(), "total", (json_int_t)total,
                     "found", (json_int_t)found, "first", (json_int_t)p->first, name, list);
}

/* ---- jobs ---- */

static int newest_first(const void *a, const void *b)
{
    const struct job *x = *(const struct job *const *)a, *y = *(const struct job *const *)b;

    return memcmp(&y->id, &x->id, sizeof(x->id)); /* ids are big-endian numbers */
}

static json_t *ms(bool has_it, uint64_t v)
{
    return has_it ? json_integer((json_int_t)v) : json_null();
}

static json_t *job_line(const struct job *j)
{
    const Fl__JobRec *r = j->rec;

    return json_pack("{s:s,s:s,s:s,s:o,s:o,s:o,s:o,s:i,s:b}", "submission_id", r->submission_id,
                     "status", job_status_name(r->status), "entrypoint", r->entrypoint, "message",
                     rest_job_message(j), "start_time", ms(r->has_start_ms, r->start_ms),
                     "end_time", ms(r->has_end_ms, r->end_ms), "exit_code",
                     r->has_exit_code ? json_integer(r->exit_code) : json_null(), "driver_attempt",
                     (int)r->attempt, "stop_asked", (int)r->stop_asked);
}

void web_browse_jobs(void *head, struct http_req *req)
{
    static const char *const states[] = { "PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED" };
    struct head *h = head;
    struct piece p;
    const char *status;
    struct job *j, *tmp;
    size_t n = 0, total = HASH_CNT(hh, h->jobs);

    if (!piece_of(req, &p) || !choice_of(req, "status", states, FL_LEN(states), &status))
        return;
    struct job **all = must(calloc(total + 1, sizeof(struct job *)));
    HASH_ITER (hh, h->jobs, j, tmp)
        if ((!status || strcmp(status, job_status_name(j->rec->status)) == 0) &&
            (has(&p, j->rec->submission_id) || has(&p, j->rec->entrypoint)))
            all[n++] = j;
    qsort(all, n, sizeof(*all), newest_first);
    json_t *list = json_array();
    for (size_t i = p.first; i < n && i - p.first < p.count; i++)
        json_array_append_new(list, job_line(all[i]));
    free(all);
    http_reply_json(req, 200, answer(total, n, &p, "jobs", list));
}

/* ---- one job ---- */

static json_t *seat_line(const struct seat *s)
{
    const struct node *n = seat_node(s);
    const Fl__SeatRec *r = s->rec;
    const Fl__Exit *x = r->exit;

    return json_pack("{s:s,s:i,s:i,s:s,s:o,s:o,s:o,s:i,s:o,s:o}", "role", r->role, "rank",
                     (int)r->rank, "attempt", (int)r->who->attempt, "state", rest_seat_state(s),
                     "node", rest_text(n ? n->rec->name : NULL), "devices", rest_given_to(s),
                     "pid", s->pid ? json_integer(s->pid) : json_null(), "restarts",
                     (int)r->restarts, "why", rest_text(x ? x->why : NULL), "peak_bytes",
                     x && x->has_peak_bytes ? json_integer((json_int_t)x->peak_bytes)
                                            : json_null());
}

static int by_role(const void *a, const void *b)
{
    const Fl__SeatRec *x = (*(const struct seat *const *)a)->rec,
                      *y = (*(const struct seat *const *)b)->rec;
    int driver = (int)y->has_group - (int)x->has_group, role = strcmp(x->role, y->role);

    if (driver)
        return -driver;
    return role ? role : (x->rank > y->rank) - (x->rank < y->rank);
}

static json_t *job_seats(struct head *h, const struct job *j, const struct piece *p, size_t *found)
{
    struct seat **all = must(calloc(HASH_COUNT(h->seats) + 1, sizeof(struct seat *))), *s, *tmp;
    json_t *list = json_array();
    size_t n = 0;

    HASH_ITER (hh, h->seats, s, tmp)
        if (s->job == j)
            all[n++] = s;
    qsort(all, n, sizeof(*all), by_role);
    for (size_t i = p->first; i < n && i - p->first < p->count; i++)
        json_array_append_new(list, seat_line(all[i]));
    free(all);
    *found = n;
    return list;
}

static json_t *job_groups(struct head *h, const struct job *j)
{
    json_t *list = json_array();
    struct group *g, *tmp;

    HASH_ITER (hh, h->groups, g, tmp)
        if (g->job == j)
            json_array_append_new(
                list, json_pack("{s:o,s:s,s:b,s:i,s:o,s:o}", "id", rest_hex(&g->rec->id), "state",
                                rest_group_state(g->rec->state), "driver", (int)g->rec->driver,
                                "bundles", (int)g->rec->n_bundles, "layout",
                                rest_text(g->rec->layout ? g->rec->layout->text : NULL), "why",
                                rest_text(g->why[0] ? g->why : g->rec->why)));
    return list;
}

static int job_decisions(struct head *h, const struct job *j)
{
    struct decision *d;
    int n = 0;

    DL_FOREACH (h->decisions, d)
        n += same_bytes(&d->rec->job, &j->rec->id);
    return n;
}

void web_browse_job(void *head, struct http_req *req)
{
    struct head *h = head;
    struct job *j = rest_job(h, req);
    struct piece p;
    size_t seats;

    if (!j || !piece_of(req, &p))
        return;
    json_t *o = job_line(j), *list = job_seats(h, j, &p, &seats);
    json_object_update_new(
        o, json_pack("{s:o,s:o,s:o,s:I,s:I,s:I,s:o,s:i,s:I,s:I,s:o}", "now_ms", wall_ms(),
                     "run_dir", rest_text(j->rec->run_dir), "driver_address",
                     rest_text(j->rec->driver_address), "log_bytes", (json_int_t)joblog_end(j),
                     "steps_next", (json_int_t)j->steps.next, "term", (json_int_t)h->term.head,
                     "groups", job_groups(h, j), "decisions", job_decisions(h, j), "workers_found",
                     (json_int_t)seats, "first", (json_int_t)p.first, "workers", list));
    http_reply_json(req, 200, o);
}

/* ---- nodes ---- */

static unsigned urgency(enum node_state s)
{
    static const unsigned order[NODE_STATES] = {
        [NODE_SUSPECT] = 0, [NODE_JOINING] = 1, [NODE_READY] = 2, [NODE_LOST] = 3, [NODE_GONE] = 4
    };

    return order[s];
}

/* Those that need to be looked at first; then as people count: n2 before n10. */
static int by_name(const void *a, const void *b)
{
    const struct node *x = *(const struct node *const *)a, *y = *(const struct node *const *)b;
    int state = (int)urgency(x->state) - (int)urgency(y->state);
    int name = state ? state : strverscmp(x->rec->name, y->rec->name);

    return name ? name : memcmp(&x->id, &y->id, sizeof(x->id));
}

/* Least memory first; those that have told nothing yet, or do not any more, last. */
static int by_memory(const void *a, const void *b)
{
    const struct node *x = *(const struct node *const *)a, *y = *(const struct node *const *)b;
    bool in_x = x->memory_available && urgency(x->state) < 3,
         in_y = y->memory_available && urgency(y->state) < 3;

    if (in_x != in_y)
        return in_x ? -1 : 1;
    if (in_x && x->memory_available != y->memory_available)
        return x->memory_available < y->memory_available ? -1 : 1;
    return by_name(a, b);
}

struct shown { /* a node of the piece, and what is on it */
    const struct node *node;
    json_t *devices, *others; /* others: processes that hold no device */
};

static struct shown *shown_of(struct shown *all, size_t n, const struct node *node)
{
    for (size_t i = 0; node && i < n; i++)
        if (all[i].node == node)
            return &all[i];
    return NULL;
}

static void put_on_device(struct shown *w, uint32_t device, json_t *process)
{
    json_t *d = json_array_get(w->devices, device);

    if (d)
        json_array_append(json_object_get(d, "processes"), process);
}

static void show_process(struct shown *all, size_t n, const struct seat *s)
{
    struct shown *w = shown_of(all, n, seat_node(s));
    struct lease *leases[SEAT_LEASES];
    size_t devices = 0, held;

    if (!w)
        return;
    json_t *one = json_pack("{s:s,s:s,s:i,s:s,s:o}", "job", s->job->rec->submission_id, "role",
                            s->rec->role, "rank", (int)s->rec->rank, "state", rest_seat_state(s),
                            "pid", s->pid ? json_integer(s->pid) : json_null());
    held = seat_leases(s, leases, SEAT_LEASES);
    for (size_t i = 0; i < held; i++)
        for (size_t k = 0; k < leases[i]->rec->n_devices; k++, devices++)
            put_on_device(w, leases[i]->rec->devices[k], one);
    if (!devices)
        json_array_append(w->others, one);
    json_decref(one);
}

static void show_unknown(struct shown *w)
{
    struct unknown_worker *u;

    LL_FOREACH (w->node->workers, u)
        json_array_append_new(w->others, json_pack("{s:n,s:s,s:i,s:s,s:i}", "job", "role",
                                                   u->state->role, "rank", (int)u->state->rank,
                                                   "state", "UNKNOWN", "pid", (int)u->state->pid));
}

static void show_lease(struct shown *w, const Fl__Lease *l)
{
    for (size_t k = 0; w && k < l->n_devices; k++) {
        json_t *d = json_array_get(w->devices, l->devices[k]);

        if (d)
            json_object_set_new(d, "leases",
                                json_integer(json_integer_value(json_object_get(d, "leases")) + 1));
    }
}

static json_t *devices_of(const struct node *n)
{
    json_t *list = json_array();

    for (uint32_t i = 0; i < n->rec->inventory->n_devices; i++) {
        const Fl__Device *d = n->rec->inventory->devices[i];

        json_array_append_new(list, json_pack("{s:s,s:o,s:I,s:b,s:b,s:i,s:[]}", "id", d->id,
                                              "uuid", rest_text(d->uuid), "memory_bytes",
                                              (json_int_t)d->memory_bytes, "logical",
                                              (int)d->logical, "slowed", (int)device_slowed(n, i),
                                              "leases", 0, "processes"));
    }
    return list;
}

static void fill(struct head *h, struct shown *all, size_t n)
{
    struct unknown_lease *u;
    struct lease *l, *ltmp;
    struct seat *s, *stmp;

    for (size_t i = 0; i < n; i++) {
        all[i].devices = devices_of(all[i].node);
        all[i].others = json_array();
        show_unknown(&all[i]);
        LL_FOREACH (all[i].node->leases, u)
            show_lease(&all[i], u->lease);
    }
    HASH_ITER (hh, h->leases, l, ltmp)
        show_lease(shown_of(all, n, node_of(h, &l->rec->at->id)), l->rec);
    HASH_ITER (hh, h->seats, s, stmp)
        if (s->rec->state == FL__SEAT_STATE__SEAT_LIVE)
            show_process(all, n, s);
}

static int64_t memory_total(const struct node *n)
{
    for (size_t i = 0; i < n->rec->inventory->n_total; i++)
        if (strcmp(n->rec->inventory->total[i]->name, "memory") == 0)
            return n->rec->inventory->total[i]->e4 / PLACEMENT_ONE;
    return 0;
}

static json_t *node_line(struct head *h, const struct shown *w)
{
    const struct node *n = w->node;
    json_t *labels = json_object(), *total = json_object();

    for (size_t i = 0; i < n->rec->inventory->n_labels; i++)
        json_object_set_new(labels, n->rec->inventory->labels[i]->key,
                            json_string(n->rec->inventory->labels[i]->value));
    for (size_t i = 0; i < n->rec->inventory->n_total; i++)
        json_object_set_new(total, n->rec->inventory->total[i]->name,
                            rest_amount(n->rec->inventory->total[i]->e4));
    return json_pack(
        "{s:o,s:s,s:s,s:s,s:f,s:o,s:f,s:o,s:I,s:o,s:o,s:o,s:o}", "id", rest_hex(&n->rec->who->id),
        "name", n->rec->name, "address", n->rec->address, "state", node_state_name(n->state),
        "beat_age_s", (double)(fl_loop_now_ns(h->loop) - n->beat_ns) / 1e9, "why",
        rest_text(n->rec->why), "load", n->load_e2 / 100.0, "memory_available",
        n->memory_available ? json_integer((json_int_t)n->memory_available) : json_null(),
        "memory_total", (json_int_t)memory_total(n), "total", total, "labels", labels, "devices",
        w->devices, "others", w->others);
}

void web_browse_nodes(void *head, struct http_req *req)
{
    static const char *const orders[] = { "name", "memory" };
    const char *states[NODE_STATES], *state, *order;
    struct head *h = head;
    struct piece p;
    struct node *nd, *tmp;
    size_t n = 0, shown = 0, total = HASH_COUNT(h->nodes);

    for (unsigned i = 0; i < NODE_STATES; i++)
        states[i] = node_state_name(i);
    if (!piece_of(req, &p) || !choice_of(req, "state", states, NODE_STATES, &state) ||
        !choice_of(req, "order", orders, FL_LEN(orders), &order))
        return;
    const struct node **all = must(calloc(total + 1, sizeof(struct node *)));
    HASH_ITER (hh, h->nodes, nd, tmp)
        if ((!state || strcmp(state, node_state_name(nd->state)) == 0) &&
            (has(&p, nd->rec->name) || has(&p, nd->rec->address)))
            all[n++] = nd;
    qsort(all, n, sizeof(*all), order == orders[1] ? by_memory : by_name);
    struct shown *w = must(calloc(p.count + 1, sizeof(*w)));
    for (size_t i = p.first; i < n && i - p.first < p.count; i++)
        w[shown++].node = all[i];
    fill(h, w, shown);
    json_t *list = json_array();
    for (size_t i = 0; i < shown; i++)
        json_array_append_new(list, node_line(h, &w[i]));
    free(w);
    free(all);
    http_reply_json(req, 200, answer(total, n, &p, "nodes", list));
}
