/* /metrics: ours, then what Ray's dashboards and alerts look for under Ray's names, then what
 * workers measure of themselves. One head tells it for all nodes, each with its own labels. */
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/base/usage.h"
#include "head/rest/rest.h"

static void gauge(struct head *h, const struct fl_metric_name *name, const char *key,
                  const char *value, double v)
{
    struct fl_metric_label label = { key, value };
    struct fl_metric *m;

    if (fl_metric(h->metrics, name, key ? &label : NULL, key != NULL, &m, NULL) == FL_OK)
        fl_metric_set(m, v);
}

static void own(struct head *h)
{
    static const struct fl_metric_name
        nodes = { FL_GAUGE, "furlong_nodes", "Nodes by state" },
        jobs = { FL_GAUGE, "furlong_jobs", "Jobs by status" },
        leases = { FL_GAUGE, "furlong_leases", "Leases given" },
        groups = { FL_GAUGE, "furlong_groups", "Placement groups" },
        workers = { FL_GAUGE, "furlong_workers", "Seats in the directory" },
        term = { FL_GAUGE, "furlong_head_term", "Starts of a head of this cluster" },
        size = { FL_GAUGE, "furlong_journal_bytes", "Size of the journal's files" },
        records = { FL_GAUGE, "furlong_journal_records", "Records since the start" },
        syncs = { FL_GAUGE, "furlong_journal_groups", "Groups committed since the start" };
    unsigned by_state[NODE_STATES] = { 0 }, by_status[5] = { 0 };
    struct journal_stats s;
    struct node *n, *ntmp;
    struct job *j, *jtmp;

    HASH_ITER (hh, h->nodes, n, ntmp)
        by_state[n->state]++;
    HASH_ITER (hh, h->jobs, j, jtmp)
        by_status[j->rec->status]++;
    for (unsigned i = 0; i < NODE_STATES; i++)
        gauge(h, &nodes, "state", node_state_name(i), by_state[i]);
    for (unsigned i = 0; i < FL_LEN(by_status); i++)
        gauge(h, &jobs, "status", job_status_name(i), by_status[i]);
    journal_stats(h->journal, &s);
    gauge(h, &leases, NULL, NULL, HASH_COUNT(h->leases));
    gauge(h, &groups, NULL, NULL, HASH_COUNT(h->groups));
    gauge(h, &workers, NULL, NULL, HASH_COUNT(h->seats));
    gauge(h, &term, NULL, NULL, (double)h->term.head);
    gauge(h, &size, NULL, NULL, (double)s.file_bytes);
    gauge(h, &records, NULL, NULL, (double)s.records);
    gauge(h, &syncs, NULL, NULL, (double)s.groups);
}

/* ---- Ray's names ---- */

static void add_label(struct fl_str *out, const char *text)
{
    for (; *text; text++) {
        if (*text == '\n')
            fl_str_add(out, "\\n");
        else if (*text == '"' || *text == '\\')
            fl_str_add(out, "\\%c", *text);
        else
            fl_str_add_bytes(out, text, 1);
    }
}

static void head_line(struct fl_str *out, const char *name, const char *help, const char *kind)
{
    fl_str_add(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind);
}

/* NAN: the node does not tell it. */
static double number_of(const struct node *n, size_t i)
{
    const Fl__NodeStats *s = n->stats;
    double disk_free = s->has_disk_free ? (double)s->disk_free : NAN;
    double disk_used = (double)s->disk_total - disk_free;
    const double v[] = { s->cpu_e2 / 100.0,
                         s->cores,
                         (double)(s->mem_total - s->mem_available),
                         (double)s->mem_available,
                         (double)s->mem_total,
                         (double)s->mem_shared,
                         disk_used,
                         disk_free,
                         s->disk_total ? 100 * disk_used / (double)s->disk_total : NAN,
                         (double)s->disk_read,
                         (double)s->disk_write,
                         (double)s->net_sent,
                         (double)s->net_received };

    return v[i];
}

static void add_node_labels(struct head *h, const struct node *n, struct fl_str *out)
{
    bool head = n == rest_head_node(h);

    fl_str_add(out,
               "{ip=\"%s\",Version=\"%s\",SessionName=\"%s\",IsHeadNode=\"%s\",RayNodeType=\"%s\",",
               n->rec->address, h->ray_version, h->session, head ? "true" : "false",
               head ? "head" : "worker");
    fl_str_add(out, "node=\"");
    add_label(out, n->rec->name);
    fl_str_add(out, "\"");
}

static void of_nodes(struct head *h, struct fl_str *out)
{
    static const struct {
        const char *name, *help;
    } all[] = { /* in the order of number_of() */
                { "ray_node_cpu_utilization", "Total CPU usage on a node, percent" },
                { "ray_node_cpu_count", "Cores of a node" },
                { "ray_node_mem_used", "Memory usage on a node, bytes" },
                { "ray_node_mem_available", "Memory available on a node, bytes" },
                { "ray_node_mem_total", "Total memory on a node, bytes" },
                { "ray_node_mem_shared_bytes", "Shared memory usage on a node" },
                { "ray_node_disk_usage", "Disk used on a node, bytes" },
                { "ray_node_disk_free", "Disk free on a node, bytes" },
                { "ray_node_disk_utilization_percentage", "Disk used on a node, percent" },
                { "ray_node_disk_io_read", "Bytes read from disks" },
                { "ray_node_disk_io_write", "Bytes written to disks" },
                { "ray_node_network_sent", "Bytes sent" },
                { "ray_node_network_received", "Bytes received" }
    };
    struct node *n, *tmp;

    for (size_t i = 0; i < FL_LEN(all); i++) {
        head_line(out, all[i].name, all[i].help, "gauge");
        HASH_ITER (hh, h->nodes, n, tmp) {
            if (!n->stats || !rest_node_alive(n) || isnan(number_of(n, i)))
                continue;
            fl_str_add(out, "%s", all[i].name);
            add_node_labels(h, n, out);
            fl_str_add(out, "} %.17g\n", number_of(n, i));
        }
    }
    head_line(out, "ray_node_gpus_available", "Devices of a node", "gauge");
    HASH_ITER (hh, h->nodes, n, tmp) {
        if (!rest_node_alive(n))
            continue;
        fl_str_add(out, "ray_node_gpus_available");
        add_node_labels(h, n, out);
        fl_str_add(out, "} %zu\n", n->rec->inventory->n_devices);
    }
}

/* ---- processes ---- */

enum { CPU, RSS, USS, SHARED, FDS };
static const struct {
    const char *name, *help;
} component_names[] = { [CPU] = { "ray_component_cpu_percentage",
                                  "CPU of a process, percent of one core" },
                        [RSS] = { "ray_component_rss_mb", "Resident memory of a process" },
                        [USS] = { "ray_component_uss_mb", "What of it is its own" },
                        [SHARED] = { "ray_component_mem_shared_bytes", "What of it others share" },
                        [FDS] = { "ray_component_num_fds", "Open descriptors of a process" } };

static double component_number(const Fl__ProcUse *u, int which)
{
    const double v[] = { [CPU] = u->cpu_e2 / 100.0,
                         [RSS] = (double)u->rss / 1e6,
                         [USS] = (double)(u->rss - u->shared) / 1e6,
                         [SHARED] = (double)u->shared,
                         [FDS] = u->fds };

    return v[which];
}

static void add_component(struct head *h, const struct node *n, const Fl__ProcUse *u, int which,
                          struct fl_str *out)
{
    fl_str_add(out, "%s", component_names[which].name);
    add_node_labels(h, n, out);
    fl_str_add(out, ",Component=\"");
    add_label(out, u->component);
    fl_str_add(out, "\",pid=\"%d\"} %.17g\n", u->pid, component_number(u, which));
}

/* This process, since the last time it was asked. */
static void look_at_self(struct head *h, Fl__ProcUse *u)
{
    struct fl_usage seen = { 0 };
    uint64_t now_ns = fl_loop_now_ns(h->loop);

    (void)fl_usage_read((int)getpid(), &seen, NULL); /* zeros say it */
    u->component = "gcs";
    u->pid = (int)getpid();
    if (now_ns > h->used_ns && seen.cpu_ms >= h->used_ms)
        u->cpu_e2 =
            (uint32_t)((seen.cpu_ms - h->used_ms) * 10000 / ((now_ns - h->used_ns) / 1000000 + 1));
    u->rss = seen.rss_bytes;
    u->shared = seen.shared_bytes;
    u->fds = seen.fds;
    h->used_ns = now_ns;
    h->used_ms = seen.cpu_ms;
}

static void of_components(struct head *h, struct fl_str *out)
{
    const struct node *own = rest_head_node(h);
    Fl__ProcUse self = FL__PROC_USE__INIT;
    struct node *n, *tmp;

    look_at_self(h, &self);
    for (int which = 0; which < (int)FL_LEN(component_names); which++) {
        head_line(out, component_names[which].name, component_names[which].help, "gauge");
        if (own)
            add_component(h, own, &self, which, out);
        HASH_ITER (hh, h->nodes, n, tmp)
            for (size_t i = 0; n->procs && rest_node_alive(n) && i < n->procs->n_procs; i++)
                add_component(h, n, n->procs->procs[i], which, out);
    }
}

/* What worker processes do on devices; a line where the node's driver tells. */
static void of_devices(struct head *h, struct fl_str *out, bool busy)
{
    const char *name = busy ? "ray_component_gpu_percentage" : "ray_component_gpu_memory_mb";
    const char *help = busy ? "Time in which a worker's process kept a device busy, percent"
                            : "Device memory of a worker's process";
    struct node *n, *tmp;
    bool said = false;

    HASH_ITER (hh, h->nodes, n, tmp)
        for (size_t i = 0; rest_node_alive(n) && i < n->n_uses; i++) {
            const struct use *u = &n->uses[i];
            ProtobufCBinaryData id = BYTES_OF(u->who.id);
            struct seat *s =
                u->known && (busy ? u->has_pct : u->has_bytes) ? seat_of(h, &id) : NULL;

            if (!s)
                continue;
            if (!said)
                head_line(out, name, help, "gauge");
            said = true;
            fl_str_add(out, "%s", name);
            add_node_labels(h, n, out);
            fl_str_add(out, ",Component=\"ray::");
            add_label(out, s->rec->role);
            fl_str_add(out, "\",pid=\"%d\",GpuIndex=\"%u\"} %.17g\n", u->pid, u->device,
                       busy ? u->sm_pct : (double)u->bytes / 1e6);
        }
}

static void of_slowed(struct head *h, struct fl_str *out)
{
    struct node *n, *tmp;
    bool said = false;

    HASH_ITER (hh, h->nodes, n, tmp)
        for (uint32_t d = 0;
             rest_node_alive(n) && n->slowed_told && d < n->rec->inventory->n_devices; d++) {
            if (n->rec->inventory->devices[d]->logical)
                continue;
            if (!said)
                head_line(out, "furlong_device_slowed",
                          "Heat or the power brake slowed the device since the last beat", "gauge");
            said = true;
            fl_str_add(out, "furlong_device_slowed{node=\"");
            add_label(out, n->rec->name);
            fl_str_add(out, "\",device=\"");
            add_label(out, n->rec->inventory->devices[d]->id);
            fl_str_add(out, "\"} %d\n", device_slowed(n, d));
        }
}

/* What each daemon counts, under its own names and with its node. */
static void of_daemons(struct head *h, struct fl_str *out)
{
    const struct node *first = NULL;
    struct node *n, *tmp;

    HASH_ITER (hh, h->nodes, n, tmp)
        first = first || !n->procs || !rest_node_alive(n) ? first : n;
    for (size_t i = 0; first && i < first->procs->n_counts;
         i++) { /* all daemons are of one build: of one order */
        const char *name = first->procs->counts[i]->name;

        head_line(out, name, "Of the node's daemon", strstr(name, "_total") ? "counter" : "gauge");
        HASH_ITER (hh, h->nodes, n, tmp) {
            if (!n->procs || !rest_node_alive(n) || i >= n->procs->n_counts ||
                strcmp(n->procs->counts[i]->name, name) != 0)
                continue;
            fl_str_add(out, "%s{node=\"", name);
            add_label(out, n->rec->name);
            fl_str_add(out, "\"} %.17g\n", n->procs->counts[i]->value);
        }
    }
}

static void of_cluster(struct head *h, struct fl_str *out)
{
    static const char *const states[] = { "DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE",
                                          "DEAD" };
    json_t *all = rest_usage(h, NULL), *v;
    unsigned in = 0, failed = 0, seats[4] = { 0 }, groups[3] = { 0 };
    const char *name;
    struct node *n, *ntmp;
    struct seat *s, *stmp;
    struct group *g, *gtmp;

    HASH_ITER (hh, h->nodes, n, ntmp)
        *(rest_node_alive(n) ? &in : &failed) += 1;
    HASH_ITER (hh, h->seats, s, stmp)
        if (s->rec->has_group)
            seats[s->rec->state == FL__SEAT_STATE__SEAT_LIVE && s->started ? 2
                  : s->rec->state <= FL__SEAT_STATE__SEAT_LIVE             ? 1
                                                                           : 3]++;
    HASH_ITER (hh, h->groups, g, gtmp)
        groups[g->rec->state == FL__GROUP_STATE__GROUP_PLACED  ? 1
               : g->rec->state < FL__GROUP_STATE__GROUP_PLACED ? 0
                                                               : 2]++;
    head_line(out, "ray_cluster_active_nodes", "Active nodes on the cluster", "gauge");
    fl_str_add(out, "ray_cluster_active_nodes{node_type=\"furlong\"} %u\n", in);
    head_line(out, "ray_cluster_pending_nodes", "Pending nodes on the cluster", "gauge");
    fl_str_add(out, "ray_cluster_pending_nodes{node_type=\"furlong\"} 0\n");
    head_line(out, "ray_cluster_failed_nodes", "Failed nodes on the cluster", "gauge");
    fl_str_add(out, "ray_cluster_failed_nodes{node_type=\"furlong\"} %u\n", failed);
    head_line(out, "ray_actors", "Worker processes of roles", "gauge");
    for (size_t i = 0; i < FL_LEN(states); i++)
        fl_str_add(out, "ray_actors{State=\"%s\",SessionName=\"%s\",Version=\"%s\"} %u\n",
                   states[i], h->session, h->ray_version, seats[i]);
    head_line(out, "ray_placement_groups", "Placement groups", "gauge");
    fl_str_add(out,
               "ray_placement_groups{State=\"PENDING\"} %u\n"
               "ray_placement_groups{State=\"CREATED\"} %u\n"
               "ray_placement_groups{State=\"REMOVED\"} %u\n",
               groups[0], groups[1], groups[2]);
    head_line(out, "ray_resources", "Logical resources", "gauge");
    json_object_foreach (all, name, v) {
        double used = json_number_value(json_object_get(v, "used"));
        double total = json_number_value(json_object_get(v, "total"));

        for (int free_ = 0; free_ < 2; free_++) {
            fl_str_add(out, "ray_resources{Name=\"");
            add_label(out, name);
            fl_str_add(out, "\",State=\"%s\",SessionName=\"%s\",Version=\"%s\"} %.17g\n",
                       free_ ? "AVAILABLE" : "USED", h->session, h->ray_version,
                       free_ ? total - used : used);
        }
    }
    json_decref(all);
}

/* ---- what workers say ---- */

static void of_workers(struct head *h, struct fl_str *out)
{
    struct seat *s, *tmp;

    head_line(out, "furlong_worker_value", "What a worker measures of itself, by its own name",
              "gauge");
    HASH_ITER (hh, h->seats, s, tmp)
        for (const struct reading *r = s->readings; r; r = r->next) {
            fl_str_add(out, "furlong_worker_value{name=\"");
            add_label(out, r->name);
            fl_str_add(out, "\",job=\"");
            add_label(out, s->job->rec->submission_id);
            fl_str_add(out, "\",role=\"");
            add_label(out, s->rec->role);
            fl_str_add(out, "\",rank=\"%u\"} %.17g\n", s->rec->rank, r->value);
        }
}

void readings_free(struct seat *s)
{
    while (s->readings) {
        struct reading *r = s->readings;

        s->readings = r->next;
        free(r);
    }
}

void reading_take(struct seat *s, const char *name, double value)
{
    struct reading *r;
    unsigned n = 0;

    for (r = s->readings; r && strcmp(r->name, name) != 0; r = r->next)
        n++;
    if (!r && (n >= HEAD_READINGS || strlen(name) >= sizeof(r->name)))
        return;
    if (!r) {
        r = must(calloc(1, sizeof(*r)));
        (void)FL_COPY(r->name, name);
        r->next = s->readings;
        s->readings = r;
    }
    r->value = value;
}

void rest_metrics(void *head, struct http_req *req)
{
    struct head *h = head;
    struct fl_str text = FL_STR_HEAP(64 << 20);

    own(h);
    fl_metrics_text(h->metrics, &text);
    of_cluster(h, &text);
    of_nodes(h, &text);
    of_components(h, &text);
    of_devices(h, &text, false);
    of_devices(h, &text, true);
    of_slowed(h, &text);
    of_daemons(h, &text);
    of_workers(h, &text);
    if (text.cut)
        http_reply_text(req, 500, "RuntimeError: no memory for the metrics");
    else
        http_reply_bytes(req, 200, "text/plain; version=0.0.4; charset=utf-8",
                         (struct fl_bytes){ fl_str_text(&text), text.len });
    fl_str_fini(&text);
}
