/* What dashboards, probes and autoscalers of Ray read beside the jobs: nodes, sums, health */
#include <stdlib.h>
#include <time.h>

#include "head/rest/rest.h"

static double wall_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* ---- nodes ---- */

static json_t *devices(const struct node *n)
{
    json_t *list = json_array();

    for (size_t i = 0; i < n->rec->inventory->n_devices; i++) {
        const Fl__Device *d = n->rec->inventory->devices[i];

        if (!d->logical)
            json_array_append_new(list,
                                  json_pack("{s:i,s:o,s:s,s:n,s:n,s:I,s:[]}", "index", (int)i,
                                            "uuid", rest_text(d->uuid), "name", d->id,
                                            "utilizationGpu", "memoryUsed", "memoryTotal",
                                            (json_int_t)(d->memory_bytes >> 20), "processesPids"));
    }
    return list;
}

static json_t *raylet(struct head *h, const struct node *n)
{
    bool own = n == rest_head_node(h);

    return json_pack("{s:o,s:s,s:o,s:s,s:s,s:b,s:o,s:o,s:s}", "nodeId", rest_hex(&n->rec->who->id),
                     "state", rest_node_alive(n) ? "ALIVE" : "DEAD", "stateMessage",
                     rest_text(n->rec->why), "nodeManagerAddress", n->rec->address,
                     "nodeManagerHostname", n->rec->name, "isHeadNode", own, "resourcesTotal",
                     rest_resources(n->rec->inventory, own), "labels", rest_labels(n), "nodeName",
                     n->rec->name);
}

static json_t *node_row(struct head *h, const struct node *n)
{
    const Fl__NodeStats *s = n->stats;
    uint64_t total = s ? s->mem_total : 0, avail = s ? s->mem_available : n->memory_available;
    uint64_t used = total > avail ? total - avail : 0, disk = s ? s->disk_total : 0;
    uint64_t disk_used = disk > (s ? s->disk_free : 0) ? disk - s->disk_free : 0;
    double load = n->load_e2 / 100.0;
    int cores = s ? (int)s->cores : 0;

    return json_pack(
        "{s:f,s:s,s:s,s:f,s:[i,i],s:[I,I,f,I],s:I,s:f,s:[[f,f,f],[f,f,f]],s:{s:{s:I,s:I,s:I,s:f}},"
        "s:[I,I,I,I],s:o,s:[I,I],s:[f,f],s:n,s:o}",
        "now", wall_s(), "hostname", n->rec->name, "ip", n->rec->address, "cpu",
        s ? s->cpu_e2 / 100.0 : 0.0, "cpus", cores, cores, "mem", (json_int_t)total,
        (json_int_t)avail, total ? 100.0 * (double)used / (double)total : 0.0, (json_int_t)used,
        "shm", (json_int_t)(s ? s->mem_shared : 0), "bootTime", s ? (double)s->boot_s : 0.0,
        "loadAvg", load, load, load, cores ? load / cores : 0.0, cores ? load / cores : 0.0,
        cores ? load / cores : 0.0, "disk", "/", "total", (json_int_t)disk, "used",
        (json_int_t)disk_used, "free", (json_int_t)(s ? s->disk_free : 0), "percent",
        disk ? 100.0 * (double)disk_used / (double)disk : 0.0, "diskIo",
        (json_int_t)(s ? s->disk_read : 0), (json_int_t)(s ? s->disk_write : 0), (json_int_t)0,
        (json_int_t)0, "gpus", devices(n), "network", (json_int_t)(s ? s->net_sent : 0),
        (json_int_t)(s ? s->net_received : 0), "networkSpeed", 0.0, 0.0, "workers", "raylet",
        raylet(h, n));
}

static json_t *logical(struct head *h)
{
    json_t *all = json_object();
    struct node *n, *tmp;

    HASH_ITER (hh, h->nodes, n, tmp) {
        char id[2 * sizeof(n->id) + 1];
        struct fl_str text = FL_STR_HEAP(64 << 10);

        if (!rest_node_alive(n))
            continue;
        FL_HEX(n->id, id);
        rest_usage_lines(h, n, "", &text);
        json_object_set_new(all, id, json_stringn(fl_str_text(&text), text.len));
        fl_str_fini(&text);
    }
    return all;
}

void rest_ray_nodes(void *head, struct http_req *req)
{
    const char *view = http_req_query(req, "view");
    struct head *h = head;
    json_t *list = json_array();
    struct node *n, *tmp;

    if (view && strcmp(view, "summary") == 0) {
        HASH_ITER (hh, h->nodes, n, tmp)
            json_array_append_new(list, node_row(h, n));
        rest_ray_reply(req, 200, "Node summary fetched.",
                       json_pack("{s:o,s:o}", "summary", list, "nodeLogicalResources", logical(h)));
    } else if (view && strcasecmp(view, "hostNameList") == 0) {
        HASH_ITER (hh, h->nodes, n, tmp)
            if (rest_node_alive(n))
                json_array_append_new(list, json_string(n->rec->name));
        rest_ray_reply(req, 200, "Node hostname list fetched.",
                       json_pack("{s:o}", "hostNameList", list));
    } else {
        char msg[128];

        json_decref(list);
        snprintf(msg, sizeof(msg), "Unknown view %.80s", view ? view : "None");
        rest_ray_reply(req, 500, msg, NULL);
    }
}

void rest_ray_node(void *head, struct http_req *req)
{
    const char *id = http_req_param(req, "id");
    struct head *h = head;
    struct fl_node_id raw;
    struct node *n = fl_hex_parse(id, &raw, sizeof(raw)) ? node_find(h, &raw) : NULL;

    if (n)
        rest_ray_reply(req, 200, "Node details fetched.",
                       json_pack("{s:o}", "detail", node_row(h, n)));
    else
        rest_ray_reply(req, 404, "there is no such node", NULL);
}

/* ---- the cluster in one text ---- */

static void add_bytes_of(struct fl_str *out, double bytes)
{
    static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB" };
    unsigned u = 0;

    for (; bytes >= 1024 && u + 1 < FL_LEN(units); u++)
        bytes /= 1024;
    fl_str_add(out, u ? "%.2f%s" : "%.0f%s", bytes, units[u]);
}

static bool in_bytes(const char *resource)
{
    return strcmp(resource, "memory") == 0 || strcmp(resource, "object_store_memory") == 0;
}

/* " 1.0/2.0 CPU" a line, of one node or of all; what marks nodes is left out, as Ray does. */
void rest_usage_lines(struct head *h, const struct node *only, const char *indent,
                      struct fl_str *out)
{
    json_t *all = rest_usage(h, only), *v;
    const char *name;

    json_object_foreach (all, name, v) {
        double used = json_number_value(json_object_get(v, "used"));
        double total = json_number_value(json_object_get(v, "total"));

        if (strncmp(name, "node:", 5) == 0)
            continue;
        fl_str_add(out, "%s", indent);
        if (in_bytes(name)) {
            add_bytes_of(out, used);
            fl_str_add(out, "/");
            add_bytes_of(out, total);
        } else {
            fl_str_add(out, "%.1f/%.1f", used, total);
        }
        fl_str_add(out, " %s\n", name);
    }
    json_decref(all);
}

static void add_demand(struct fl_str *out, const struct group *g)
{
    for (size_t i = 0; i < g->rec->n_bundles; i++) {
        const Fl__BundleRec *b = g->rec->bundles[i];

        if (b->lease)
            continue;
        fl_str_add(out, " {");
        for (size_t k = 0; k < b->n_wants; k++)
            fl_str_add(out, "%s'%s': %.1f", k ? ", " : "", b->wants[k]->name,
                       (double)b->wants[k]->e4 / PLACEMENT_ONE);
        fl_str_add(out, "}: 1+ pending %s\n", g->rec->driver ? "tasks/actors" : "placement groups");
    }
}

static void add_nodes(struct head *h, bool alive, const char *otherwise, struct fl_str *out)
{
    struct node *n, *tmp;
    char id[2 * sizeof(n->id) + 1];
    size_t was = out->len;

    HASH_ITER (hh, h->nodes, n, tmp) {
        if (rest_node_alive(n) != alive)
            continue;
        FL_HEX(n->id, id);
        if (alive)
            fl_str_add(out, " 1 node_%s\n", id);
        else
            fl_str_add(out, " %s: %s (ip: %s)\n", n->rec->name,
                       n->rec->why ? n->rec->why : "NodeTerminated", n->rec->address);
    }
    if (out->len == was)
        fl_str_add(out, " (no %s)\n", otherwise);
}

static void add_status(struct head *h, struct fl_str *out)
{
    static const char rule[] = "---------------------------------------------------------------";
    struct timespec t;
    struct tm tm;
    char when[32];
    struct group *g, *tmp;

    clock_gettime(CLOCK_REALTIME, &t);
    localtime_r(&t.tv_sec, &tm);
    strftime(when, sizeof(when), "%Y-%m-%d %H:%M:%S", &tm);
    fl_str_add(out, "======== Autoscaler status: %s.%06ld ========\nNode status\n%s\nActive:\n",
               when, t.tv_nsec / 1000, rule);
    add_nodes(h, true, "active nodes", out);
    fl_str_add(out, "Pending:\n (no pending nodes)\nRecent failures:\n");
    add_nodes(h, false, "failures", out);
    fl_str_add(out, "\nResources\n%s\nTotal Usage:\n", rule);
    rest_usage_lines(h, NULL, " ", out);
    fl_str_add(out, "\nFrom request_resources:\n (none)\nPending Demands:\n");
    size_t was = out->len;
    HASH_ITER (hh, h->groups, g, tmp)
        if (g->rec->state == FL__GROUP_STATE__GROUP_PENDING)
            add_demand(out, g);
    if (out->len == was)
        fl_str_add(out, " (no resource demands)\n");
    if (out->len && out->data[out->len - 1] == '\n')
        out->data[--out->len] = '\0';
}

static json_t *usage_pairs(struct head *h)
{
    json_t *all = rest_usage(h, NULL), *out = json_object(), *v;
    const char *name;

    json_object_foreach (all, name, v)
        json_object_set_new(out,
                            strcmp(name, "object_store_memory") == 0 ? "objectStoreMemory" : name,
                            json_pack("[f,f]", json_number_value(json_object_get(v, "used")),
                                      json_number_value(json_object_get(v, "total"))));
    json_decref(all);
    return out;
}

void rest_cluster_status(void *head, struct http_req *req)
{
    const char *format = http_req_query(req, "format");
    struct head *h = head;
    struct fl_str text = FL_STR_HEAP(4 << 20);

    add_status(h, &text);
    if (format && strcmp(format, "1") == 0) {
        rest_ray_reply(req, 200, "Got formatted cluster status.",
                       json_pack("{s:s}", "clusterStatus", fl_str_text(&text)));
    } else {
        rest_ray_reply(req, 200, "Got cluster status.",
                       json_pack("{s:s,s:n,s:{s:f,s:{s:o,s:[],s:[],s:[]}}}", "autoscalingStatus",
                                 fl_str_text(&text), "autoscalingError", "clusterStatus", "time",
                                 wall_s(), "loadMetricsReport", "usage", usage_pairs(h),
                                 "resourceDemand", "pgDemand", "requestDemand"));
    }
    fl_str_fini(&text);
}

/* ---- health, and what is asked out of habit ---- */

static void healthy(struct http_req *req, bool good, const char *otherwise)
{
    const char *text = good ? "success" : otherwise;

    http_reply_bytes(req, good ? 200 : 503, "application/text; charset=utf-8",
                     (struct fl_bytes){ text, strlen(text) });
}

void rest_gcs_healthz(void *head, struct http_req *req)
{
    struct head *h = head;
    struct fl_err err;
    char text[320];
    bool good = journal_accepts(h->journal, &err) == FL_OK;

    snprintf(text, sizeof(text), "Health check failed: %s", good ? "" : err.text);
    healthy(req, good, text);
}

void rest_local_healthz(void *head, struct http_req *req)
{
    const struct node *n = rest_head_node(head);

    healthy(req, n && n->state == NODE_READY, "Local Raylet failed");
}

void rest_grafana(void *head, struct http_req *req)
{
    struct head *h = head;
    const char *host = getenv("RAY_GRAFANA_HOST");

    if (host && strcmp(host, "DISABLED") == 0)
        rest_ray_reply(
            req, 200, "Grafana disabled",
            json_pack("{s:s,s:s}", "grafanaHost", "DISABLED", "sessionName", h->session));
    else
        rest_ray_reply(req, 500, "Grafana healthcheck failed",
                       json_pack("{s:s}", "exception", "this head asks no Grafana"));
}

void rest_prometheus(void *head, struct http_req *req)
{
    (void)head;
    rest_ray_reply(req, 500, "prometheus healthcheck failed.",
                   json_pack("{s:s}", "reason", "this head asks no Prometheus"));
}

void rest_usage_stats(void *head, struct http_req *req)
{
    (void)head; /* nothing is ever sent anywhere */
    rest_ray_reply(req, 200, "Fetched usage stats enabled",
                   json_pack("{s:b,s:b}", "usageStatsEnabled", 0, "usageStatsPromptEnabled", 1));
}

void rest_timezone(void *head, struct http_req *req)
{
    time_t now = time(NULL);
    struct tm tm;
    char offset[8], text[8];

    (void)head;
    localtime_r(&now, &tm);
    strftime(offset, sizeof(offset), "%z", &tm);
    snprintf(text, sizeof(text), "%.3s:%.2s", offset, offset + 3);
    http_reply_json(req, 200, json_pack("{s:s,s:s}", "offset", text, "value", tm.tm_zone));
}

/* A job whose program has joined keeps the cluster in use, as a driver of Ray's does. */
void rest_activities(void *head, struct http_req *req)
{
    struct head *h = head;
    struct job *j, *tmp;
    unsigned live = 0;
    uint64_t last = 0;

    HASH_ITER (hh, h->jobs, j, tmp) {
        live += !job_over(j) && j->rec->connected;
        if (job_over(j) && j->rec->connected && j->rec->end_ms > last)
            last = j->rec->end_ms;
    }
    http_reply_json(
        req, 200,
        json_pack("{s:{s:s,s:o,s:f,s:o}}", "driver", "is_active", live ? "ACTIVE" : "INACTIVE",
                  "reason", live ? json_sprintf("Number of active drivers: %u", live) : json_null(),
                  "timestamp", wall_s(), "last_activity_at",
                  last ? json_real((double)last / 1000) : json_null()));
}
