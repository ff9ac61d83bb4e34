/* worker/node/node.h - the worker daemon of one node
 *
 * Inventory, leases on devices, life of worker processes, their logs; one stream to the head. It
 * never opens a device and never forks. What it promised lies in its runtime folder, so the next
 * start of it finds and adopts everything. */
#pragma once
#include <sys/statvfs.h>

#include "common/base/loop.h"
#include "common/conf/opt.h"
#include "transport/tls/tls.h"
#include "transport/wire/wire.h"
#include "worker/proc/proc.h"

struct node_config {     /* texts are borrowed as long as the node lives; NULL or 0: the default */
    const char *address; /* of the head, HOST:PORT */
    const char *ip, *name, *resources, *labels, *state_dir, *runtime_dir, *log_level;
    double cpus;  /* < 0: what the machine and its cgroup have */
    int64_t gpus; /* < 0: what NVML shows; else so many logical devices */
    uint64_t memory_bytes, log_max_bytes;
    int64_t orphan_s; /* without a head for so long: ends what it runs, then itself; 0: never */
    int64_t wait_s;   /* at the start, for a head */
    int64_t ready_fd; /* -1: none */
    uint32_t drain_ms; /* how long a worker's end waits for each next piece of its output to go */
    struct json_t *notes; /* sentences for whoever started it; shown in node.json */
    bool is_private;  /* shown in node.json: of one run's own cluster */
    /* what tests put in the place of the real thing */
    const struct stream_ops *carrier; /* to the head */
    const struct proc_ops *proc;
    const char *keeper; /* path of furlong-keep */
    const char *nvml;   /* library; NULL: the system's */
    int (*room)(const char *path, struct statvfs *v); /* NULL: statvfs() */
    struct tls_id *tls; /* who this node is to other hosts, its workers too; NULL: plain */
};
extern const struct fl_opt node_opts[]; /* fills a struct node_config */

struct node;
/* Takes the lock on the state folder, adopts what an earlier start left, and starts to connect.
 * ended() runs once, from the loop: st FL_OK after node_stop(), else why it gave up. */
enum fl_status node_create(struct fl_loop *l, const struct node_config *cfg,
                           void (*ended)(void *arg, enum fl_status st, const struct fl_err *err),
                           void *arg, struct node **out, struct fl_err *err);
/* Ends all workers, tells the head, removes sockets and folders; then ended(). */
void node_stop(struct node *n, const char *why, uint32_t term_ms);
/* At once: keepers and workers live on, the next start adopts them. NULL is fine. */
void node_destroy(struct node *n);
