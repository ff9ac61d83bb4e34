/* worker/node/node_priv.h - the daemon's object and its parts, for this folder and its tests */
#pragma once
#define HASH_NONFATAL_OOM 1 /* else uthash ends the process */
#include <uthash.h>

#include "common/base/file.h"
#include "common/base/id.h"
#include "common/base/loop.h"
#include "common/base/metrics.h"
#include "common/base/str.h"
#include "node.pb-c.h"
#include "transport/call/call.h"
#include "worker.pb-c.h"
#include "worker/node/addr.h"
#include "worker/node/ident.h"
#include "worker/node/leases.h"
#include "worker/node/node.h"
#include "worker/proc/proc.h"

enum {
    NODE_KEY_BYTES = 32,
    NODE_WORKERS_MAX = 1024,
    NODE_WORKER_PORTS = 16,
    NODE_BACKOFF_MIN_MS = 100,
    NODE_BACKOFF_MAX_MS = 2000,
    NODE_CALL_MS = 10000, /* a call to the head that should be answered at once */
    NODE_DRAIN_MS = 5000, /* the default of drain_ms */
    NODE_DRAINS_MAX = 24, /* how often it is waited  */
    NODE_TERM_MS = 10000,
    NODE_KILL_MS = 5000,
    NODE_FENCE_TERM_MS = 2000,
    NODE_PUSH_BYTES = 64 << 10,
    NODE_DEVICES_SEEN = 64 /* GPU_MAX: more than one machine has */
};
enum { LANE_CONTROL = 0, LANE_LOGS = 1, LANE_RELAY = 2, LANE_PACKAGES = 3 };

struct node;
struct worker;

/* ---- follow.c: one output of a worker, on its way to the head ---- */
struct follow {
    struct worker *worker;
    uint32_t stream; /* 1: out, 2: err */
    char path[FL_PATH_MAX];
    int fd;          /* -1: not open yet */
    uint64_t offset; /* acknowledged; as the head counts            */
    uint64_t
        shift; /* offset less place in the file: only where a file was emptied instead of holed */
    int watch; /* of inotify; -1: none, the ticker looks instead */
    UT_hash_handle hh;
    uint64_t sent_end; /* of the push in flight */
};

/* ---- worker.c ---- */
struct devmem; /* devmem.c */
struct line;   /* sock.c: a worker's connection */
enum node_metric {
    NODE_WORKERS,
    NODE_STARTED,
    NODE_ENDED,
    NODE_PUSHED_BYTES,
    NODE_GONE_BYTES,
    NODE_JOINS,
    NODE_RELAYS,
    NODE_METRICS
};
/* The daemon's own metrics, for the head to show. */
size_t node_counts(const struct node *n, const char *names[NODE_METRICS],
                   double values[NODE_METRICS]);
struct worker {
    UT_hash_handle hh;
    struct node *node;
    struct fl_seat_ref who;
    char name[96]; /* "trainer 3 (job raysubmit_x)" for logs and sentences */
    Fl__WorkerSpec *spec;
    char dir[FL_PATH_MAX];
    struct proc *proc; /* NULL once it is gone */
    int pid, keeper_pid; /* keeper_pid: 0 until pid is known */
    struct devmem *devmem; /* NULL: nothing to verify */
    bool joined, gone;     /* gone: and the memory of its devices is back, or is not coming */
    char tcp[80], unix_path[128];
    struct line *line;

    bool stop_asked, proc_stopped;
    enum proc_cause stop_cause;
    char stop_text[256];
    uint32_t stop_term_ms;
    struct fl_timer stop_late;
    struct proc_exit exit;

    bool untold; /* the head gave it up: its end is not reported */
    bool dirty;  /* the head does not know the latest            */
    bool telling, told_gone;
    struct call_op tell;
    struct fl_timer tell_again;
    uint32_t tell_ms;

    struct follow out, err;
    struct call_op push;
    struct follow *pushing;
    struct fl_timer push_again, drain;
    bool drain_over, out_was_last;
    unsigned drains;
    uint64_t drained; /* of its output, when the wait for the next piece began */
    int pushed_fd; /* <dir>/pushed: how far the head has the outputs */
};
enum fl_status worker_start(struct node *n, const Fl__WorkerSpec *spec, struct fl_err *err);
/* Everything that an earlier start left below <dir>/w. A folder that cannot be read is named in the
 * log, its tree ended by its keeper's spec, and removed. */
void workers_adopt(struct node *n);
struct worker *worker_find(struct node *n, const struct fl_seat_ref *who);
bool worker_holds(const struct node *n, uint64_t lease); /* one that lives */
/* First by word to a worker that has joined, then SIGTERM, then SIGKILL; twice is once. */
void worker_stop(struct worker *w, enum proc_cause cause, const char *text, uint32_t term_ms);
void worker_ready(struct worker *w, const Fl__WorkerReady *r); /* it listens */
struct worker_msg {                                            /* what a WorkerState borrows */
    Fl__WorkerState state;
    Fl__SeatRef who;
    Fl__Exit exit;
    Fl__Port port[NODE_WORKER_PORTS], *ports[NODE_WORKER_PORTS];
    char name[NODE_WORKER_PORTS][48];
};
void worker_msg_make(const struct worker *w, struct worker_msg *out);
void worker_tell(struct worker *w); /* now, if the head is there and does not know */
void worker_destroy(struct worker *w, bool remove_folder);
size_t workers_alive(const struct node *n);

enum fl_status node_follow_open(struct worker *w, struct fl_err *err);
void node_follow_kick(struct worker *w);       /* pushes what there is, if it may */
bool node_follow_done(const struct worker *w); /* gone, and the head has all that it wrote */
void node_follow_close(struct worker *w);
struct tail; /* one inotify descriptor for all of them */
enum fl_status node_tail_create(struct node *n, struct tail **out, struct fl_err *err);
void node_tail_destroy(struct tail *t);

/* ---- sock.c: node.sock ---- */
enum fl_status node_sock_open(struct node *n, struct fl_err *err);
void node_sock_close(struct node *n);
void node_line_destroy(struct line *l);
enum fl_status node_line_event(struct worker *w, uint16_t method, struct fl_bytes body,
                               struct fl_err *err);

/* ---- uplink.c: the stream to the head ---- */
struct uplink;
enum fl_status node_uplink_create(struct node *n, struct uplink **out, struct fl_err *err);
void node_uplink_destroy(struct uplink *u);
bool node_uplink_joined(const struct uplink *u);
/* FL_UNREACHABLE unless joined. */
enum fl_status node_uplink_call(struct uplink *u, uint16_t method, uint32_t lane, uint64_t due_ns,
                                const ProtobufCMessage *m, struct call_op *op, struct fl_err *err);
void node_uplink_metric(struct uplink *u, const struct fl_seat_ref *who, const char *name,
                        double value);
void node_uplink_forget_metrics(struct uplink *u, const struct fl_seat_ref *who);
void node_uplink_may(struct uplink *u);    /* no strays any more: go on */
/* The head says so: ends everything, then joins anew. */
void node_uplink_fenced(struct uplink *u, const char *why);
void node_uplink_purged(struct uplink *u); /* nothing runs any more: join anew, as the next start */
void node_uplink_leave(struct uplink *u, const char *why,
                       void (*left)(struct node *n)); /* tells the head */
extern const struct call_method node_serve_methods[]; /* serve.c: what the head asks */
extern const size_t node_serve_n_methods;
void node_serve_releases(struct node *n); /* answers releases that waited for workers to end */
void node_serve_drop(struct node *n);     /* the stream is gone: nobody waits any more      */

/* ---- node.c ---- */
struct stray;   /* stray.c */
struct packages; /* package.c */
struct release; /* serve.c */
struct holders; /* holders.c */
struct node_disk; /* disk.c */
struct node {
    struct fl_loop *loop;
    struct node_config cfg;
    void (*ended)(void *arg, enum fl_status st, const struct fl_err *err);
    void *arg;
    struct node_ident ident;
    char runtime[FL_PATH_MAX], dir[FL_PATH_MAX], sock_path[FL_PATH_MAX], json_path[FL_PATH_MAX];
    char name[64], boot_id[40], token_path[FL_PATH_MAX];
    struct fl_addr addr; /* text "" until the way to the head is known */
    Fl__Inventory *inventory;
    struct leases *leases;
    struct worker *workers;
    struct tail *tail;
    struct stream_server *server;
    struct uplink *up;
    struct packages *packages;
    struct release *releases;
    struct stray *strays; /* ended before it joins */
    struct {
        uint16_t port;
        uint64_t lease;
    } given[4096]; /* ports: nobody else gets them while the lease lives */
    size_t n_given;
    struct port_hold {
        int fd;
        uint16_t port;
    } *holds; /* of those, and of the workers' own */
    size_t n_holds;
    bool unheld_said;
    uint16_t ports_from; /* where the next is looked for; 0: at the beginning */
    struct gpu_watch *gpus; /* NULL: none but logical ones */
    struct holders *holders; /* NULL as well then */
    struct node_disk *disk;  /* of the state folder */
    struct fl_metrics *metrics;
    struct fl_metric *count[NODE_METRICS];
    unsigned joins; /* how often it has joined */
    bool joined;
    bool ready_said, ending, leaving, over;
    char why[256];
    enum fl_status end_status;
    struct fl_err end_err;
    struct fl_timer end_due;
    struct fl_task end_task;
};
/* A packed message in memory of its own; free() data. data NULL: no memory. */
struct fl_bytes node_pack(const ProtobufCMessage *m);
void node_joined(struct node *n);      /* node.json, and the first time the line of readiness */
void node_away(struct node *n);        /* the head is: node.json says so */
void node_fenced(struct node *n);      /* ends everything, untold */
void node_worker_over(struct node *n); /* one less: an end that waits may go on */
void node_fail(struct node *n,
               const struct fl_err *err); /* gives up: ends what runs, then ended(st) */
bool node_may_start(const struct node *n);
