#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/conf/json.h"
#include "common/gpu/watch.h"
#include "worker/node/disk.h"
#include "worker/node/holders.h"
#include "worker/node/inventory.h"
#include "worker/node/node_priv.h"
#include "worker/node/package.h"
#include "worker/node/ports.h"
#include "worker/node/stray.h"

enum { END_SLACK_MS = 8000 /* over term and kill: draining output, telling the head */ };

struct fl_bytes node_pack(const ProtobufCMessage *m)
{
    size_t len = protobuf_c_message_get_packed_size(m);
    uint8_t *buf = FL_FAULT("node.pack") ? NULL : malloc(len ? len : 1);

    return (struct fl_bytes){ buf, buf ? protobuf_c_message_pack(m, buf) : 0 };
}

bool node_may_start(const struct node *n)
{
    return !n->ending;
}

/* ---- node.json ---- */

static char *json_text(const struct node *n)
{
    char node[2 * sizeof(n->ident.me.id) + 1];
    uint64_t start_time = 0;

    FL_HEX(n->ident.me.id, node);
    (void)fl_pid_start_time((int)getpid(), &start_time, NULL);
    json_t *j = json_pack("{ss sI ss si sI ss ss ss sb sI sb ss ss sO*}", "node", node, "start",
                          (json_int_t)n->ident.me.start, "name", n->name, "pid", (int)getpid(),
                          "start_time", (json_int_t)start_time, "address", n->addr.text, "head",
                          n->cfg.address, "sock", n->sock_path, "private", n->cfg.is_private, "joins",
                          (json_int_t)n->joins, "joined", n->joined, "interface", n->addr.iface,
                          "address_why", n->addr.why, "notes", n->cfg.notes);
    char *text = j ? json_dumps(j, JSON_COMPACT) : NULL;

    json_decref(j);
    return text;
}

static enum fl_status json_write(const struct node *n, struct fl_err *err)
{
    char *text = json_text(n);
    enum fl_status st = text ? fl_file_write(n->json_path, 0600, text, strlen(text), err)
                             : fl_fail(err, FL_EXHAUSTED, "no memory for %s", n->json_path);

    free(text);
    return st;
}

static void say_ready(struct node *n)
{
    char *text = json_text(n);
    int fd = (int)n->cfg.ready_fd;

    if (n->ready_said || fd < 0 || !text) {
        free(text);
        return;
    }
    n->ready_said = true;
    (void)!write(fd, text, strlen(text)); /* whoever waited may have gone */
    (void)!write(fd, "\n", 1);
    close(fd);
    free(text);
}

void node_joined(struct node *n)
{
    struct fl_err err;

    n->joins++;
    n->joined = true;
    if (json_write(n, &err) != FL_OK)
        fl_warn("node.json not written why=\"%s\"", err.text);
    say_ready(n);
}

void node_away(struct node *n)
{
    if (!n->joined || n->ending)
        return;
    n->joined = false;
    (void)json_write(n, NULL); /* what it says is older then */
}

/* ---- ending ---- */

static void on_end_task(struct fl_task *t)
{
    struct node *n = container_of(t, struct node, end_task);

    n->ended(n->arg, n->end_status, n->end_status == FL_OK ? NULL : &n->end_err);
}

/* Sockets and folders go; the state folder stays. */
static void tidy(struct node *n)
{
    struct worker *w, *tmp;
    struct fl_err err;

    HASH_ITER (hh, n->workers, w, tmp)
        worker_destroy(w, w->gone);
    node_sock_close(n);
    if (n->workers == NULL && fl_tree_remove(n->dir, &err) != FL_OK)
        fl_warn("runtime folder not removed why=\"%s\"", err.text);
}

static void over(struct node *n)
{
    if (n->over)
        return;
    n->over = true;
    fl_timer_cancel(&n->end_due);
    tidy(n);
    fl_post(n->loop, &n->end_task); /* whoever hears it may destroy the node */
}

static void on_left(struct node *n)
{
    over(n);
}

static void leave(struct node *n)
{
    if (n->leaving)
        return;
    n->leaving = true;
    node_uplink_leave(n->up, n->why, on_left);
}

static void on_end_due(struct fl_timer *t, uint64_t now_ns)
{
    struct node *n = container_of(t, struct node, end_due);

    (void)now_ns;
    fl_warn("ending takes too long, leaves alive=%zu told=%d", workers_alive(n),
            node_uplink_joined(n->up));
    over(n);
}

void node_worker_over(struct node *n)
{
    if (!n->workers)
        node_uplink_purged(n->up);
    if (!n->ending || n->over)
        return;
    if (!n->workers || (!workers_alive(n) && !node_uplink_joined(n->up)))
        leave(n);
}

void node_stop(struct node *n, const char *why, uint32_t term_ms)
{
    struct worker *w, *tmp;

    if (n->ending)
        return;
    n->ending = true;
    (void)FL_COPY(n->why, why);
    fl_info("node ends why=\"%s\" workers=%zu", why, workers_alive(n));
    fl_timer_arm_in(n->loop, &n->end_due, (uint64_t)term_ms + NODE_KILL_MS + END_SLACK_MS);
    HASH_ITER (hh, n->workers, w, tmp)
        worker_stop(w, PROC_STOPPED, why, term_ms);
    node_worker_over(n);
}

void node_fail(struct node *n, const struct fl_err *err)
{
    if (n->over || n->ending)
        return;
    n->end_status = err->status;
    n->end_err = *err;
    if (!n->workers) {
        node_stop(n, err->text, NODE_TERM_MS);
        return;
    }
    /* Adopted work is not ours to end: it runs on under its keepers, for a daemon that gets
     * through. */
    n->over = true;
    fl_post(n->loop, &n->end_task);
}

void node_fenced(struct node *n)
{
    struct worker *w, *tmp;

    node_leases_clear(n->leases);
    HASH_ITER (hh, n->workers, w, tmp) {
        w->untold = true;
        if (w->gone)
            worker_destroy(w, true);
        else
            worker_stop(w, PROC_FENCED, "its node was fenced", NODE_FENCE_TERM_MS);
    }
    node_ports_settle(n);
    node_worker_over(n);
}

/* ---- beginning ---- */

static enum fl_status take_name(struct node *n, struct fl_err *err)
{
    char host[256] = "";

    if (!n->cfg.name && gethostname(host, sizeof(host) - 1) < 0)
        return fl_fail_errno(err, "name of this host (give --node-name)");
    const char *name = n->cfg.name ? n->cfg.name : host;

    if (!FL_COPY(n->name, name) || !*name)
        return fl_fail(err, FL_INVALID, "--node-name=%.100s: 1 to %zu bytes", name,
                       sizeof(n->name) - 1);
    for (const char *p = name; *p; p++)
        if ((unsigned char)*p <= ' ' || *p == '/' || (unsigned char)*p >= 0x7f)
            return fl_fail(err, FL_INVALID,
                           "--node-name=%s: letters, digits and signs alone, without blanks or '/'",
                           name);
    return FL_OK;
}

static enum fl_status take_boot_id(struct node *n, struct fl_err *err)
{
    char *text;
    size_t len;

    FL_TRY(fl_file_read("/proc/sys/kernel/random/boot_id", 64, &text, &len, err));
    text[strcspn(text, "\n")] = 0;
    (void)FL_COPY(n->boot_id, text);
    free(text);
    return FL_OK;
}

static enum fl_status take_paths(struct node *n, struct fl_err *err)
{
    char id[FL_SHORT], state[FL_PATH_MAX];
    const char *token = getenv("FURLONG_TOKEN_PATH");

    FL_TRY(fl_runtime_dir(n->cfg.runtime_dir, n->runtime, err));
    FL_TRY(fl_path(n->dir, err, "%s/n-%s", n->runtime, fl_short(id, &n->ident.me.id)));
    FL_TRY(fl_path(n->sock_path, err, "%s/node.sock", n->dir));
    FL_TRY(fl_path(n->json_path, err, "%s/node.json", n->dir));
    FL_TRY(fl_state_dir(n->cfg.state_dir, state, err));
    if (token && *token)
        FL_TRY(fl_path(n->token_path, err, "%s", token));
    else
        FL_TRY(fl_path(n->token_path, err, "%s/token", state));
    return fl_mkdirs(n->dir, err);
}

static bool lease_used(void *arg, uint64_t id)
{
    return worker_holds(arg, id);
}

static enum fl_status take_leases(struct node *n, struct fl_err *err)
{
    char path[FL_PATH_MAX];
    struct leases_config cfg = {
        .path = path, .inventory = n->inventory, .used = lease_used, .arg = n
    };

    FL_TRY(fl_path(path, err, "%s/leases", n->dir));
    return node_leases_create(n->loop, &cfg, &n->leases, err);
}

// clang-format off
static const struct fl_metric_name metric_names[NODE_METRICS] = {
    [NODE_WORKERS]      = { FL_GAUGE,   "furlong_node_workers", "worker processes that live", NULL, 0 },
    [NODE_STARTED]      = { FL_COUNTER, "furlong_node_workers_started_total", "worker processes started", NULL, 0 },
    [NODE_ENDED]        = { FL_COUNTER, "furlong_node_workers_ended_total", "worker processes ended", NULL, 0 },
    [NODE_PUSHED_BYTES] = { FL_COUNTER, "furlong_node_log_bytes_total", "bytes of output pushed to the head", NULL, 0 },
    [NODE_GONE_BYTES]   = { FL_COUNTER, "furlong_node_log_gone_bytes_total", "bytes of output given back before they were pushed", NULL, 0 },
    [NODE_JOINS]        = { FL_COUNTER, "furlong_node_joins_total", "times the head took this node in", NULL, 0 },
    [NODE_RELAYS]       = { FL_COUNTER, "furlong_node_relays_total", "calls of workers relayed to the head", NULL, 0 },
};
// clang-format on

size_t node_counts(const struct node *n, const char *names[NODE_METRICS], double values[NODE_METRICS])
{
    for (size_t i = 0; i < NODE_METRICS; i++) {
        names[i] = metric_names[i].name;
        values[i] = fl_metric_value(n->count[i]);
    }
    return NODE_METRICS;
}

static enum fl_status take_metrics(struct node *n, struct fl_err *err)
{
    FL_TRY(fl_metrics_create(&n->metrics, err));
    for (size_t i = 0; i < NODE_METRICS; i++)
        FL_TRY(fl_metric(n->metrics, &metric_names[i], NULL, 0, &n->count[i], err));
    return FL_OK;
}

static enum fl_status begin(struct node *n, struct fl_err *err)
{
    char line[256];

    FL_TRY(take_name(n, err));
    FL_TRY(node_addr_check(n->cfg.address, err));
    if (n->cfg.ip && fl_addr_is_any(n->cfg.ip))
        n->cfg.ip = NULL; /* others are told where this node really is, as without it */
    if (n->cfg.ip) {
        FL_TRY(node_addr_find(n->cfg.ip, n->cfg.address, &n->addr, err));
        fl_info("own address=%s interface=%s: %s", n->addr.text, n->addr.iface, n->addr.why);
    }
    FL_TRY(node_inventory_make(&n->cfg, getenv("CUDA_VISIBLE_DEVICES"), n->cfg.nvml, &n->gpus,
                               &n->inventory, err));
    if (n->addr.text[0])
        FL_TRY(node_inventory_at(n->inventory, n->addr.text, err));
    FL_TRY(node_ident_open(n->cfg.state_dir, &n->ident, err));
    FL_TRY(take_boot_id(n, err));
    FL_TRY(take_paths(n, err));
    FL_TRY(take_metrics(n, err));
    FL_TRY(take_leases(n, err));
    FL_TRY(node_tail_create(n, &n->tail, err));
    FL_TRY(node_strays_claim(n, err));
    node_strays_find(n);
    workers_adopt(n);
    FL_TRY(node_sock_open(n, err));
    FL_TRY(json_write(n, err));
    FL_TRY(node_packages_create(n, &n->packages, err));
    if (n->gpus)
        FL_TRY(node_holders_create(n, &n->holders, err));
    FL_TRY(node_disk_create(n->ident.dir, n->cfg.room ? n->cfg.room : statvfs, &n->disk, err));
    node_disk_look(n->disk, fl_loop_now_ns(n->loop));
    FL_TRY(node_uplink_create(n, &n->up, err));
    fl_info("node ready to join name=%s start=%llu dir=%s %s", n->name,
            (unsigned long long)n->ident.me.start, n->dir, node_inventory_text(n->inventory, line));
    return FL_OK;
}

enum fl_status node_create(struct fl_loop *l, const struct node_config *cfg,
                           void (*ended)(void *arg, enum fl_status st, const struct fl_err *err),
                           void *arg, struct node **out, struct fl_err *err)
{
    struct node *n = calloc(1, sizeof(*n));
    enum fl_status st;

    if (!n)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a node");
    n->loop = l;
    n->cfg = *cfg;
    n->ended = ended;
    n->arg = arg;
    n->ident.lock_fd = -1;
    n->end_task.run = on_end_task;
    n->end_due.fire = on_end_due;
    st = begin(n, err);
    if (st != FL_OK) {
        node_destroy(n);
        return st;
    }
    *out = n;
    return FL_OK;
}

void node_destroy(struct node *n)
{
    struct worker *w, *tmp;

    if (!n)
        return;
    fl_timer_cancel(&n->end_due);
    fl_task_cancel(n->loop, &n->end_task);
    HASH_ITER (hh, n->workers, w, tmp)
        worker_destroy(w, false);
    node_strays_forget(n);
    node_uplink_destroy(n->up);
    node_packages_destroy(n->packages);
    if (n->server)
        node_sock_close(n);
    if (n->json_path[0])
        (void)unlink(n->json_path); /* nobody serves it any more; it may be gone with its folder */
    node_leases_destroy(n->leases);
    node_tail_destroy(n->tail);
    fl_metrics_destroy(n->metrics);
    node_holders_destroy(n->holders);
    node_disk_destroy(n->disk);
    node_ports_fini(n);
    gpu_watch_close(n->gpus);
    if (n->inventory)
        fl__inventory__free_unpacked(n->inventory, NULL);
    node_ident_close(&n->ident);
    free(n);
}
