/* /api/v0/...: lists of what there is, as Ray's state commands and its dashboard read them */
#include <fnmatch.h>
#include <stdlib.h>
#include <strings.h>

#include "head/rest/rest.h"

enum { LIMIT = 100, LIMIT_MAX = 10000, FILTERS_MAX = 16, LOG_LINES = 1000, LOG_BYTES = 16 << 20 };

/* ---- answers ---- */

void rest_ray_reply(struct http_req *req, unsigned status, const char *msg, json_t *data_take)
{
    http_reply_json(req, status,
                    json_pack("{s:b,s:s,s:o}", "result", status == 200, "msg", msg, "data",
                              data_take ? data_take : json_object()));
}

static void refuse(struct http_req *req, unsigned status, const struct fl_err *err)
{
    rest_ray_reply(req, status, err->text, json_pack("{s:n}", "result"));
}

/* ---- rows ---- */

static const char *seat_state(const struct seat *s)
{
    switch (s->rec->state) {
    case FL__SEAT_STATE__SEAT_LIVE:
        return s->started ? "ALIVE" : "PENDING_CREATION";
    case FL__SEAT_STATE__SEAT_WAITING:
        return s->rec->who->attempt > 1 ? "RESTARTING" : "PENDING_CREATION";
    default:
        return "DEAD";
    }
}

static json_t *node_id_of(const struct node *n)
{
    return n ? rest_hex(&n->rec->who->id) : json_null();
}

static json_t *actor_row(const struct seat *s)
{
    const struct node *n = seat_node(s);
    const Fl__SeatRec *r = s->rec;

    return json_pack(
        "{s:o,s:s,s:s,s:o,s:o,s:o,s:i,s:s, s:n,s:{},s:o,s:b,s:o,s:s,s:i,s:i,s:n,s:{}}", "actor_id",
        rest_hex(&r->who->worker), "class_name", r->role, "state", seat_state(s), "job_id",
        rest_hex(&r->job), "name", json_sprintf("%s %u", r->role, r->rank), "node_id",
        node_id_of(n), "pid", s->pid, "ray_namespace", s->job->rec->submission_id,
        "serialized_runtime_env", "required_resources", "death_cause",
        r->exit && r->exit->why ? json_pack("{s:s}", "error_message", r->exit->why) : json_null(),
        "is_detached", 0, "placement_group_id", r->has_group ? rest_hex(&r->group) : json_null(),
        "repr_name", "", "num_restarts", (int)r->restarts,
        "num_restarts_due_to_lineage_reconstruction", 0, "call_site", "label_selector");
}

static void actors(struct head *h, json_t *rows)
{
    struct seat *s, *tmp;

    HASH_ITER (hh, h->seats, s, tmp)
        if (s->rec->has_group)
            json_array_append_new(rows, actor_row(s));
}

static const char *exit_type(const Fl__Exit *x)
{
    return !x                         ? NULL
           : x->cause == EXIT_STOPPED ? "INTENDED_SYSTEM_EXIT"
           : x->cause == EXIT_EXITED  ? x->code ? "USER_ERROR" : "INTENDED_USER_EXIT"
                                      : "SYSTEM_ERROR";
}

static void workers(struct head *h, json_t *rows)
{
    struct seat *s, *tmp;

    HASH_ITER (hh, h->seats, s, tmp) {
        const struct node *n = seat_node(s);
        const Fl__Exit *x = s->rec->exit;
        bool live = s->rec->state == FL__SEAT_STATE__SEAT_LIVE;

        json_array_append_new(
            rows, json_pack("{s:o,s:b,s:s,s:o,s:o,s:o,s:i, s:o,s:n,s:n,s:n,s:n,s:n,s:n}",
                            "worker_id", rest_hex(&s->rec->who->worker), "is_alive", live,
                            "worker_type", s->rec->has_group ? "WORKER" : "DRIVER", "exit_type",
                            rest_text(live ? NULL : exit_type(x)), "node_id", node_id_of(n), "ip",
                            rest_text(n ? n->rec->address : NULL), "pid", s->pid, "exit_detail",
                            rest_text(live || !x ? NULL : x->why), "worker_launch_time_ms",
                            "worker_launched_time_ms", "start_time_ms", "end_time_ms",
                            "debugger_port", "num_paused_threads"));
    }
}

json_t *rest_resources(const Fl__Inventory *i, bool head_node)
{
    json_t *o = json_object();

    for (size_t k = 0; k < i->n_total; k++)
        json_object_set_new(o, i->total[k]->name,
                            json_real((double)i->total[k]->e4 / PLACEMENT_ONE));
    if (head_node)
        json_object_set_new(o, "node:__internal_head__", json_real(1));
    return o;
}

json_t *rest_labels(const struct node *n)
{
    json_t *o = json_pack("{s:o}", "ray.io/node-id", rest_hex(&n->rec->who->id));

    for (size_t i = 0; i < n->rec->inventory->n_labels; i++)
        json_object_set_new(o, n->rec->inventory->labels[i]->key,
                            json_string(n->rec->inventory->labels[i]->value));
    return o;
}

/* The head's own host has one, the first to have joined if there are more. */
const struct node *rest_head_node(struct head *h)
{
    struct node *n, *tmp, *best = NULL;

    HASH_ITER (hh, h->nodes, n, tmp)
        if (strcmp(n->rec->boot_id, h->boot_id) == 0 &&
            (!best || (strcmp(n->rec->address, h->node_ip) == 0 &&
                       strcmp(best->rec->address, h->node_ip) != 0)))
            best = n;
    return best;
}

bool rest_node_alive(const struct node *n)
{
    return n->rec->fate == FL__NODE_FATE__NODE_IN;
}

static void nodes(struct head *h, json_t *rows)
{
    const struct node *head = rest_head_node(h);
    struct node *n, *tmp;

    HASH_ITER (hh, h->nodes, n, tmp)
        json_array_append_new(
            rows, json_pack("{s:o,s:s,s:b,s:s,s:o,s:s,s:o,s:o, s:I,s:I}", "node_id",
                            rest_hex(&n->rec->who->id), "node_ip", n->rec->address, "is_head_node",
                            n == head, "state", rest_node_alive(n) ? "ALIVE" : "DEAD",
                            "state_message", rest_text(n->rec->why), "node_name", n->rec->name,
                            "resources_total", rest_resources(n->rec->inventory, n == head),
                            "labels", rest_labels(n), "start_time_ms", (json_int_t)n->joined_ms,
                            "end_time_ms", (json_int_t)n->left_ms));
}

static const char *group_state(const struct group *g)
{
    switch (g->rec->state) {
    case FL__GROUP_STATE__GROUP_PLACED:
        return bundle_lost(g->rec) ? "RESCHEDULING" : "CREATED";
    case FL__GROUP_STATE__GROUP_PENDING:
    case FL__GROUP_STATE__GROUP_PREPARING:
        return "PENDING";
    default:
        return "REMOVED";
    }
}

static json_t *bundles(struct head *h, const struct group *g)
{
    json_t *list = json_array();

    for (size_t i = 0; i < g->rec->n_bundles; i++) {
        const Fl__BundleRec *b = g->rec->bundles[i];
        struct lease *l = b->lease ? lease_of(h, b->lease) : NULL;
        json_t *wants = json_object();

        for (size_t k = 0; k < b->n_wants; k++)
            json_object_set_new(wants, b->wants[k]->name,
                                json_real((double)b->wants[k]->e4 / PLACEMENT_ONE));
        json_array_append_new(list, json_pack("{s:{s:o,s:i},s:o,s:o,s:{}}", "bundle_id",
                                              "placement_group_id", rest_hex(&g->rec->id),
                                              "bundle_index", (int)i, "node_id",
                                              l ? rest_hex(&l->rec->at->id) : json_null(),
                                              "unit_resources", wants, "label_selector"));
    }
    return list;
}

static void placement_groups(struct head *h, json_t *rows)
{
    struct group *g, *tmp;

    HASH_ITER (hh, h->groups, g, tmp)
        json_array_append_new(rows,
                              json_pack("{s:o,s:s,s:o,s:s, s:o,s:b,s:{}}", "placement_group_id",
                                        rest_hex(&g->rec->id), "name", "", "creator_job_id",
                                        rest_hex(&g->rec->job), "state", group_state(g), "bundles",
                                        bundles(h, g), "is_detached", 0, "stats"));
}

static void jobs(struct head *h, json_t *rows)
{
    struct job *j, *tmp;

    HASH_ITER (hh, h->jobs, j, tmp)
        if (!j->rec->delete_asked)
            json_array_append_new(rows, rest_job_json(j));
}

static void none(struct head *h, json_t *rows)
{
    (void)h, (void)rows;
}

struct kind {
    const char *name;
    void (*rows)(struct head *h, json_t *rows);
    const char *plain, *filters; /* columns without detail, and those that filters may name */
};
static const struct kind kinds[] = {
    { "actors", actors, " actor_id class_name state job_id name node_id pid ray_namespace ",
      " actor_id class_name state job_id name node_id pid ray_namespace placement_group_id "
      "repr_name " },
    { "nodes", nodes,
      " node_id node_ip is_head_node state state_message node_name resources_total labels ",
      " node_id node_ip is_head_node state node_name " },
    { "placement_groups", placement_groups, " placement_group_id name creator_job_id state ",
      " placement_group_id name creator_job_id state is_detached " },
    { "jobs", jobs, " job_id submission_id entrypoint type status message error_type driver_info ",
      " job_id submission_id entrypoint type status message error_type " },
    { "workers", workers, " worker_id is_alive worker_type exit_type node_id ip pid ",
      " worker_id is_alive worker_type exit_type node_id ip pid debugger_port "
      "num_paused_threads " },
    { "tasks", none, " ",
      " task_id attempt_number name state job_id actor_id type func_or_class_name parent_task_id "
      "node_id worker_id worker_pid error_type " },
    { "objects", none, " ",
      " object_id object_size task_status attempt_number reference_type call_site type pid ip " },
    { "runtime_envs", none, " ", " runtime_env success node_id " },
    { "cluster_events", none, " ", " severity time source_type message event_id " },
};

/* ---- filters ---- */

struct filter {
    char key[64];
    bool equal;
    const char *value;
};
struct query {
    struct filter f[FILTERS_MAX];
    unsigned n_keys, n_predicates, n_values;
    bool detail, bad_predicate;
    char predicate[16];
    uint64_t limit;
};

static void on_key(void *arg, const char *value)
{
    struct query *q = arg;

    if (q->n_keys++ < FILTERS_MAX) {
        struct filter *f = &q->f[q->n_keys - 1];

        (void)FL_COPY(f->key, value);
        for (char *p = f->key; *p; p++)
            *p = (char)(*p >= 'A' && *p <= 'Z' ? *p + 32 : *p);
    }
}

static void on_predicate(void *arg, const char *value)
{
    struct query *q = arg;

    if (strcmp(value, "=") != 0 && strcmp(value, "!=") != 0 && !q->bad_predicate) {
        q->bad_predicate = true;
        (void)FL_COPY(q->predicate, value);
    }
    if (q->n_predicates++ < FILTERS_MAX)
        q->f[q->n_predicates - 1].equal = value[0] == '=';
}

static void on_value(void *arg, const char *value)
{
    struct query *q = arg;

    if (q->n_values++ < FILTERS_MAX)
        q->f[q->n_values - 1].value = value;
}

static bool has_word(const char *list, const char *word)
{
    char spaced[80];

    snprintf(spaced, sizeof(spaced), " %s ", word);
    return strstr(list, spaced) != NULL;
}

static bool truthy(const char *text)
{
    return text && (strcasecmp(text, "true") == 0 || strcmp(text, "1") == 0);
}

static enum fl_status read_query(struct http_req *req, const struct kind *k, struct query *q,
                                 struct fl_err *err)
{
    FL_TRY(http_req_number(req, "limit", LIMIT, INT64_MAX, &q->limit, err));
    if (q->limit > LIMIT_MAX)
        return fl_fail(err, FL_INVALID,
                       "Given limit %llu exceeds the supported limit %d. Use a lower limit.",
                       (unsigned long long)q->limit, LIMIT_MAX);
    q->detail = truthy(http_req_query(req, "detail"));
    http_req_each_query(req, "filter_keys", on_key, q);
    http_req_each_query(req, "filter_predicates", on_predicate, q);
    http_req_each_query(req, "filter_values", on_value, q);
    if (q->n_keys > FILTERS_MAX || q->n_keys != q->n_predicates || q->n_keys != q->n_values)
        return fl_fail(err, FL_INVALID,
                       "a filter is filter_keys, filter_predicates and filter_values, at most %d "
                       "of them; got %u, %u and %u",
                       FILTERS_MAX, q->n_keys, q->n_predicates, q->n_values);
    if (q->bad_predicate)
        return fl_fail(err, FL_INVALID,
                       "Unsupported filter predicate %s is given. Available predicates: =, !=.",
                       q->predicate);
    for (unsigned i = 0; i < q->n_keys; i++)
        if (!has_word(k->filters, q->f[i].key))
            return fl_fail(
                err, FL_INVALID,
                "The given filter column %s is not supported. Supported filter columns:%s",
                q->f[i].key, k->filters);
    return FL_OK;
}

static bool is_value(const json_t *v, const char *text)
{
    int64_t n;

    if (json_is_string(v))
        return strcasecmp(json_string_value(v), text) == 0;
    if (json_is_boolean(v))
        return json_is_true(v) == truthy(text);
    if (json_is_integer(v))
        return fl_parse_i64(text, INT64_MIN, INT64_MAX, &n, NULL) == FL_OK &&
               n == json_integer_value(v);
    return false;
}

static bool fits(const json_t *row, const struct query *q)
{
    for (unsigned i = 0; i < q->n_keys; i++)
        if (is_value(json_object_get(row, q->f[i].key), q->f[i].value) != q->f[i].equal)
            return false;
    return true;
}

static json_t *columns(json_t *row, const struct kind *k, bool detail)
{
    const char *name;
    json_t *v, *out;

    if (detail)
        return json_incref(row);
    out = json_object();
    json_object_foreach (row, name, v)
        if (has_word(k->plain, name))
            json_object_set(out, name, v);
    return out;
}

static json_t *envelope(size_t total, size_t filtered, json_t *result)
{
    return json_pack("{s:{s:I,s:I,s:I,s:o,s:s,s:n}}", "result", "total", (json_int_t)total,
                     "num_after_truncation", (json_int_t)(total < LIMIT_MAX ? total : LIMIT_MAX),
                     "num_filtered", (json_int_t)filtered, "result", result,
                     "partial_failure_warning", "", "warnings");
}

void rest_state_list(void *head, struct http_req *req)
{
    const char *name = http_req_param(req, "kind");
    const struct kind *k = NULL;
    struct query q = { 0 };
    struct fl_err err;
    size_t i, filtered = 0;
    json_t *all, *row;

    for (i = 0; i < FL_LEN(kinds); i++)
        if (strcmp(kinds[i].name, name) == 0)
            k = &kinds[i];
    if (!k) {
        http_reply_text(req, 404, "404: Not Found");
        return;
    }
    if (read_query(req, k, &q, &err) != FL_OK) {
        refuse(req, 400, &err);
        return;
    }
    all = json_array();
    k->rows(head, all);
    json_t *out = json_array();
    json_array_foreach (all, i, row) {
        if (!fits(row, &q))
            continue;
        if (filtered++ < q.limit)
            json_array_append_new(out, columns(row, k, q.detail));
    }
    rest_ray_reply(req, 200, "", envelope(json_array_size(all), filtered, out));
    json_decref(all);
}

/* ---- sums ---- */

static json_t *sum_actors(struct head *h, size_t *n)
{
    json_t *sum = json_object();
    struct seat *s, *tmp;

    HASH_ITER (hh, h->seats, s, tmp) {
        if (!s->rec->has_group)
            continue;
        json_t *one = json_object_get(sum, s->rec->role);
        const char *state = seat_state(s);

        if (!one) {
            one = json_pack("{s:s,s:{}}", "class_name", s->rec->role, "state_counts");
            json_object_set_new(sum, s->rec->role, one);
        }
        json_t *counts = json_object_get(one, "state_counts");
        json_object_set_new(counts, state,
                            json_integer(json_integer_value(json_object_get(counts, state)) + 1));
        ++*n;
    }
    return json_pack("{s:o,s:I,s:s}", "summary", sum, "total_actors", (json_int_t)*n, "summary_by",
                     "class");
}

void rest_state_summary(void *head, struct http_req *req)
{
    const char *kind = http_req_param(req, "kind");
    size_t n = 0;
    json_t *sum = NULL;

    if (strcmp(kind, "actors") == 0)
        sum = sum_actors(head, &n);
    else if (strcmp(kind, "tasks") == 0)
        sum = json_pack("{s:{},s:i,s:i,s:i,s:s}", "summary", "total_tasks", 0, "total_actor_tasks",
                        0, "total_actor_scheduled", 0, "summary_by", "func_name");
    else if (strcmp(kind, "objects") == 0)
        sum = json_pack("{s:{},s:i,s:f,s:b,s:s}", "summary", "total_objects", 0, "total_size_mb",
                        0.0, "callsite_enabled", 0, "summary_by", "callsite");
    if (!sum) {
        http_reply_text(req, 404, "404: Not Found");
        return;
    }
    rest_ray_reply(req, 200, "",
                   envelope(n, n, json_pack("{s:{s:o}}", "node_id_to_summary", "cluster", sum)));
}

/* ---- logs: those of jobs, which lie with the head ---- */

/* The node that is asked for; answered when there is none. */
static const struct node *asked_node(struct head *h, struct http_req *req)
{
    const char *id = http_req_query(req, "node_id"), *ip = http_req_query(req, "node_ip");
    struct fl_node_id raw;
    struct node *n, *tmp;
    struct fl_err err;

    if (id && *id && fl_hex_parse(id, &raw, sizeof(raw)) && (n = node_find(h, &raw)))
        return n;
    HASH_ITER (hh, h->nodes, n, tmp)
        if (!(id && *id) && ip && *ip && strcmp(n->rec->address, ip) == 0)
            return n;
    if (!(id && *id) && !(ip && *ip)) {
        fl_fail(&err, FL_INVALID,
                "Both node id and node ip are not provided. Please provide at "
                "least one of them.");
        refuse(req, 400, &err);
    } else {
        fl_fail(&err, FL_NOT_FOUND, "Cannot find matching node_id for a given node ip %.60s",
                ip ? ip : id);
        refuse(req, 404, &err);
    }
    return NULL;
}

void rest_state_logs(void *head, struct http_req *req)
{
    const struct node *n = asked_node(head, req);
    const char *glob = http_req_query(req, "glob");
    struct head *h = head;
    struct job *j, *tmp;
    char name[96];

    if (!n)
        return;
    json_t *files = json_array();
    HASH_ITER (hh, h->jobs, j, tmp) {
        snprintf(name, sizeof(name), "job-driver-%s.log", j->rec->submission_id);
        if (n == rest_head_node(h) && !j->rec->delete_asked &&
            fnmatch(glob && *glob ? glob : "*", name, 0) == 0)
            json_array_append_new(files, json_string(name));
    }
    rest_ray_reply(req, 200, "", json_pack("{s:{s:o}}", "result", "driver", files));
}

static struct job *asked_log(struct head *h, struct http_req *req)
{
    const char *id = http_req_query(req, "submission_id"), *file = http_req_query(req, "filename");
    char name[64];

    if (!id && file && strncmp(file, "job-driver-", 11) == 0 && FL_COPY(name, file + 11)) {
        size_t len = strlen(name);

        if (len > 4 && strcmp(name + len - 4, ".log") == 0)
            name[len - 4] = '\0';
        id = name;
    }
    struct job *j = id ? job_named(h, id) : NULL;
    return j && !j->rec->delete_asked ? j : NULL;
}

struct job *rest_log_job(struct head *h, struct http_req *req, int64_t *n)
{
    struct job *j = asked_log(h, req);
    const char *lines = http_req_query(req, "lines");
    struct fl_err err;

    *n = LOG_LINES;
    if (!j) {
        http_reply_text(req, 404,
                        "no such log; logs are named by submission_id or as "
                        "job-driver-SUBMISSION_ID.log");
        return NULL;
    }
    if (lines && fl_parse_i64(lines, -1, INT32_MAX, n, &err) != FL_OK) {
        http_reply_text(req, 400, "lines: %s", err.text);
        return NULL;
    }
    return j;
}

/* The last lines, or all of them for lines=-1. */
void rest_state_log_file(void *head, struct http_req *req)
{
    int64_t n;
    struct job *j = rest_log_job(head, req, &n);
    struct fl_str out = FL_STR_HEAP(LOG_BYTES + (1 << 17));

    if (!j)
        return;
    struct fl_str tail = FL_STR_HEAP(LOG_BYTES);
    if (n)
        joblog_tail(j, &tail, n < 0 ? UINT32_MAX : (unsigned)n);
    if (n < 0)
        joblog_preamble(j, &out);
    fl_str_add_bytes(&out, fl_str_text(&tail), tail.len);
    http_reply_header(req, "Content-Disposition", "attachment; filename=\"job-driver-%s.log\"",
                      j->rec->submission_id);
    http_reply_bytes(req, 200, "text/plain; charset=utf-8",
                     (struct fl_bytes){ fl_str_text(&out), out.len });
    fl_str_fini(&tail);
    fl_str_fini(&out);
}

void rest_state_timeline(void *head, struct http_req *req)
{
    (void)head;
    http_reply_json(req, 200, json_array()); /* there are no tasks of Ray's kind */
}
