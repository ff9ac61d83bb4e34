/* head/state.h - the tables of the head, for its own files and tests
 *
 * Every object holds its journal record whole (`rec`) and beside it what is learnt again after a
 * start. rec changes by head_record() alone: pack, append, apply. What follows from the tables is
 * done by head_settle(), which looks at all of them and is asked for by head_kick(); it repeats
 * itself safely, so nothing needs to remember how far it had come. */
#pragma once
#define HASH_NONFATAL_OOM 1
#include <stdio.h>
#include <uthash.h>
#include <utlist.h>

#include "common/base/id.h"
#include "common/base/lease.h"
#include "common/base/loop.h"
#include "common/base/metrics.h"
#include "common/base/muster.h"
#include "common/base/str.h"
#include "common/proto/methods.h"
#include "head/head.h"
#include "head/journal/journal.h"
#include "head/records.h"
#include "journal.pb-c.h"
#include "node.pb-c.h"
#include "placement/placement.h"
#include "transport/call/call.h"
#include "worker.pb-c.h"

enum {
    HEAD_SEND_MS = 10000,     /* for a daemon to answer a call                               */
    HEAD_HOLD_MS = 30000,     /* a PREPARED lease ends by itself after so long               */
    HEAD_PLACE_MS = 5000,     /* for all daemons of a placement to prepare, or to commit     */
    HEAD_RETRY_MS = 1000,     /* what could not be sent is looked at again                   */
    HEAD_STOP_TERM_MS = 3000, /* SIGTERM, then SIGKILL: as Ray's; RAY_JOB_STOP_WAIT_TIME_S   */
    HEAD_LATE_MS = 30000,   /* a role not whole by then: who is missing is said; FURLONG_LATE_MS */
    HEAD_JOB_START_S = 900, /* PENDING for so long: failed; RAY_JOB_START_TIMEOUT_SECONDS  */
    HEAD_END_MS = 15000,    /* for jobs to end, and for daemons to leave, at a shutdown    */
    HEAD_TOLD_MS = 5000, /* until_idle: how long a follower may be silent before it reads the end */
    HEAD_DRIVER_BACKOFF_MS = 1000,
    HEAD_DRIVER_BACKOFF_MAX_MS = 30000,
    HEAD_JOBS_KEPT = 1024, /* ended ones; older are forgotten, with their logs            */
    HEAD_JOBS_LIVE = 4096,
    HEAD_DECISIONS_KEPT = 256,
    HEAD_DECISION_BYTES = 32 << 20,
    HEAD_NODES_OUT = 1024, /* that were fenced or left; older are forgotten */
    HEAD_STEPS_KEPT = 1024,
    HEAD_STEP_BYTES = 256 << 10,
    HEAD_GROUPS_A_JOB = 256,
    HEAD_BAD_ENDS = 3, /* so many in HEAD_FAULT_S: the node is avoided, and said to be troubled */
    HEAD_FAULT_S = 600, /* a worker that lived for so long begins to count its restarts anew */
    HEAD_READINGS = 64, /* of one worker; more of them are not kept */
};

/* ---- nodes ---- */
enum node_state { NODE_JOINING, NODE_READY, NODE_SUSPECT, NODE_LOST, NODE_GONE, NODE_STATES };
enum node_event {
    NODE_EV_JOIN,   /* it asks to join                             */
    NODE_EV_JOINED, /* written down and reconciled                 */
    NODE_EV_BEAT,
    NODE_EV_CUT,     /* its stream ended                            */
    NODE_EV_SILENT,  /* three beats were missed                     */
    NODE_EV_EXPIRED, /* silent_ms without a beat: fenced, once      */
    NODE_EV_LEFT     /* it said goodbye                             */
};
struct unknown_lease {
    struct unknown_lease *next;
    Fl__Lease *lease;
};
struct unknown_worker {
    struct unknown_worker *next;
    Fl__WorkerState *state;
};
struct use { /* a process that has a device open, as its daemon measured */
    uint32_t device;
    int pid;
    uint64_t bytes;
    struct fl_seat_ref who;
    uint32_t sm_pct;                /* of the time between two beats */
    bool has_bytes, has_pct, known; /* known: whose it is */
};
struct node {
    UT_hash_handle hh;
    struct fl_node_id id;
    Fl__NodeRec *rec;
    struct head *head;
    enum node_state state;
    struct uplink *up; /* NULL while it is not connected */
    uint64_t beat_ns;  /* last sign of life, on our clock */
    uint64_t memory_available;
    Fl__NodeStats *stats; /* NULL before the first beat */
    Fl__Beat *procs; /* the last one that told them, and the daemon's counts; or NULL */
    struct use *uses;
    size_t n_uses;
    bool uses_told; /* false: this node does not say */
    bool slowed_told;
    uint64_t slowed; /* a bit a device: by heat or the power brake, since the beat before */
    uint64_t bad_ns[HEAD_BAD_ENDS]; /* when workers last ended on it by a fault of their own */
    char bad_why[256];              /* of the last of them */
    uint64_t joined_ms, left_ms; /* wall clock, for people; of this start of the head */
    uint32_t load_e2;
    unsigned n_workers;           /* as counted for the list that is being written */
    bool reported;                /* since the start of this head */
    bool told_end;                /* to shut down */
    struct lease *held;           /* of the journal: a look at one node is not one at all leases */
    struct unknown_lease *leases; /* its daemon holds them, the journal does not know them */
    struct unknown_worker *workers;
};

/* ---- leases ---- */
struct lease {
    UT_hash_handle hh;
    uint64_t id;
    Fl__Lease *rec;
    struct node *at; /* in whose list it is; NULL: the journal has no such node */
    struct lease *prev_held, *next_held;
    bool acked;   /* the daemon has it as the record says */
    bool calling; /* a commit or a release is on its way  */
};
#define EACH_HELD(n, l) DL_FOREACH2 ((n)->held, l, next_held)

/* ---- groups ---- */
struct role {
    struct role *next;
    Fl__RoleRec *rec;
    uint64_t since_ns; /* its first process was promised; 0: none yet */
    bool late_told;    /* who has not joined was said */
};
struct ask { /* a GROUP_PLACE that waits for its answer */
    struct ask *prev, *next;
    struct call_req *req;
    struct group *group;
    uint64_t due_ns; /* 0: none */
    bool once;       /* one try, then the answer */
};
enum group_wait {
    WAIT_ROOM, /* on the nodes that there are */
    WAIT_NODES /* none of those can ever have it */
};
struct placing;
struct group {
    UT_hash_handle hh;
    struct fl_group_id id;
    Fl__GroupRec *rec;
    struct job *job;
    struct role *roles;
    struct ask *asks;
    struct placing *placing; /* two-phase commit in progress */
    uint64_t tried;          /* resources as they were when it did not fit */
    uint64_t retry_ns;       /* not before */
    char why[512];           /* what it waits for; both are set by group_waits() */
    enum group_wait wait;
};
struct decision {
    struct decision *prev, *next;
    size_t bytes;
    Fl__DecisionRec *rec;
};

/* ---- seats ---- */
enum exit_cause { /* as Exit.cause travels: enum proc_cause of worker/proc, which the head never
                     includes */
                  EXIT_EXITED = 0,
                  EXIT_SIGNALLED = 1,
                  EXIT_STOPPED = 2,
                  EXIT_EXEC_FAILED = 6,
                  EXIT_FENCED = 7,
                  EXIT_KEEPER_LOST = 8,
                  EXIT_SETUP_FAILED = 100 /* the head's own: its packages could not be had */
};
enum member_state { MEMBER_STARTING, MEMBER_LIVE, MEMBER_ENDED }; /* enum furlong_member_state */
struct reading { /* of a worker, by its own name */
    struct reading *next;
    char name[64];
    double value;
};
struct seat {
    UT_hash_handle hh;
    struct fl_worker_id id;
    Fl__SeatRec *rec;
    struct job *job;
    bool started; /* the daemon has said so */
    bool joined, stopping, calling, dirty, refused;
    int pid;
    char *tcp, *unix_path;
    struct seat_port {
        char name[48];
        uint16_t number;
    } *ports; /* what its daemon gave it */
    size_t n_ports;
    uint64_t ready_ns; /* waiting: not before */
    char *force_why;   /* this attempt ends without being asked; NULL: it does not */
    struct reading *readings;
    uint32_t elsewhere; /* attempt of which was said that it uses a device of others */
};

/* ---- jobs ---- */
struct recall;
struct steps {
    char **json;
    uint64_t next;         /* number of the next one */
    struct recall *recall; /* being read from the run's folder */
    bool recalled;
};
struct follower;
struct tail;
struct joblog;
struct job {
    UT_hash_handle hh, hh_id;
    struct fl_job_id id;
    Fl__JobRec *rec;
    struct head *head;
    bool replayed;       /* it is from the journal, not submitted since this start */
    uint64_t pending_ns; /* since when this head has it */
    bool log_followed, log_told, steps_followed, steps_told, asked_end;
    uint64_t followed_ns, end_ns;
    struct steps steps;
    struct joblog *log;
    struct follower *followers;
    struct tail *tails;
};

struct heard { /* a daemon that has been told this head's term */
    UT_hash_handle hh;
    struct fl_node_id id;
    bool stranger; /* ... and knew it already, from another head that took the same number */
};

enum head_state { HEAD_RECOVERING, HEAD_READY, HEAD_ENDING };
struct head {
    struct fl_loop *loop;
    struct head_config cfg;
    char state_dir[1024], logs_dir[1024], node_ip[64], boot_id[37], rpc[128], http[128], token[129];
    char key[64]; /* of the token, decoded nowhere: the hex digits are the key */
    struct journal *journal;
    struct journal_opened opened;
    struct fl_term term;
    uint64_t first_term; /* the one this head took when it opened the journal */
    bool raising;
    void (*term_changed)(void *arg, const struct fl_term *term);
    void *term_arg;

    enum head_state state;
    uint64_t start_ns;
    struct node *nodes;
    struct job *jobs, *jobs_by_id;
    struct group *groups;
    struct lease *leases;
    struct seat *seats;
    struct decision *decisions;
    unsigned n_decisions, n_jobs_over;
    size_t decision_bytes;
    struct heard *heard;
    struct uplink *uplinks;
    struct { /* the last one that did not get in and was said so */
        uint64_t ns;
        enum fl_status status;
        unsigned unsaid; /* since */
    } refused;
    uint64_t used_ns, used_ms; /* of CPU, when /metrics was asked last */
    struct dial *dials; /* nodes that are being dialled back */
    uint64_t next_job, next_lease, last_lease;
    uint64_t foreign_from, foreign_to; /* terms of heads whose journal this is not */
    uint64_t resources;                /* counts changes of what is free */

    struct fl_task settle;
    bool pushing;
    struct fl_timer sweep, wake;
    uint64_t swept_ns;
    uint64_t end_due_ns;
    bool end_told, ended;
    char end_why[128];
    uint32_t stop_term_ms, job_start_s, late_ms;
    char ray_token[257], ray_version[32], ray_commit[64], session[80];
    struct packages *packages;
    unsigned requests; /* HTTP requests that wait */
    bool had_jobs;

    struct fl_metrics *metrics;
    struct head_counters {
        struct fl_metric *submitted, *beats, *placed, *refused, *fenced, *restarts, *log_bytes;
    } count;
};

/* ---- record.c: pack, append, apply; and what is done when it is on disk ---- */
struct after {
    struct journal_op op;
    struct head *head;
    void (*then)(struct after *a, enum fl_status st, const struct fl_err *err); /* frees a */
    struct call_req *req;
    void *arg;
    uint8_t key[32];
    uint64_t n;
};
/* a may be NULL; on failure it is freed and nothing has changed. */
enum fl_status head_record(struct head *h, enum rec_kind kind, const void *msg, struct after *a,
                           struct fl_err *err);
struct after *after_new(struct head *h,
                        void (*then)(struct after *a, enum fl_status st, const struct fl_err *err));
/* then runs once all that was recorded before is on disk. */
void head_after(struct after *a);
void *must(
    void *p); /* p, or the end of this process: the journal has what matters, a restart reads it */
void *copy_msg(const void *msg);                                /* deep; free_msg() */
void free_msg(void *msg);                                       /* NULL is fine */
struct fl_bytes pack_msg(const void *msg, struct fl_str *into); /* in into's memory */
extern const struct journal_apply head_apply[];
extern const size_t head_apply_n;
void head_snapshot(void *head, struct journal_emit *e);

/* ---- tables.c ---- */
struct node *node_of(struct head *h, const ProtobufCBinaryData *id);
struct node *node_find(struct head *h, const struct fl_node_id *id);
struct job *job_of(struct head *h, const ProtobufCBinaryData *id);
struct job *job_named(struct head *h, const char *submission_id);
struct group *group_of(struct head *h, const ProtobufCBinaryData *id);
struct lease *lease_of(struct head *h, uint64_t id);
struct seat *seat_of(struct head *h, const ProtobufCBinaryData *worker);
struct role *role_of(const struct group *g, const char *name);
void tables_free(struct head *h);
bool job_over(const struct job *j);
bool same_bytes(const ProtobufCBinaryData *a, const ProtobufCBinaryData *b);
#define BYTES_OF(id) ((ProtobufCBinaryData){ sizeof(id), (uint8_t *)(uintptr_t) & (id) })

/* ---- head.c ---- */
void head_kick(struct head *h);                     /* settle at the end of this turn */
void head_wake_at(struct head *h, uint64_t due_ns); /* ... and at that time            */
void head_resources_changed(struct head *h);
void head_idle(struct head *h); /* until_idle and ENDING: is there anything left to wait for? */

/* ---- nodes.c ---- */
struct node_edge {
    enum node_state from;
    enum node_event on;
    enum node_state to;
    void (*act)(struct node *n);
};
extern const struct node_edge node_edges[];
extern const size_t node_edges_n;
bool node_event(struct node *n, enum node_event ev);
const char *node_state_name(enum node_state s);
void nodes_sweep(struct head *h, uint64_t now_ns);
void nodes_forget_old(struct head *h);
void nodes_await(struct head *h); /* after replay: all of the journal must report or run out */
bool nodes_all_in(struct head *h);
void node_forget_unknown(struct node *n);
/* A worker of a role ended on it: was it a fault, and is it one too many? */
void node_ended(struct node *n, const Fl__Exit *x);
bool node_troubled(const struct node *n);

/* ---- uses.c: devices as they are used, beside what was promised of them ---- */
void uses_take(struct node *n, const Fl__Beat *b);
void slowed_take(struct node *n, const Fl__Beat *b);
bool device_slowed(const struct node *n, uint32_t device);
void uses_free(struct node *n);
enum { SEAT_LEASES = 64 }; /* of one process; what is beyond is not shown */
/* Which it stands on; how many. */
size_t seat_leases(const struct seat *s, struct lease **out, size_t cap);

/* ---- uplink.c: one daemon's stream, and calls to it ---- */
struct uplink;
struct send { /* a call to a daemon; one a time in flight for each owner */
    struct call_op op;
    struct head *head;
    void (*done)(struct send *s, enum fl_status st, const struct wire_msg *reply,
                 const struct fl_err *err); /* s is freed when it returns */
    void *arg;
    uint8_t key[32];
    uint64_t n;
};
/* done comes back exactly once, never from inside; FL_UNREACHABLE, nothing started: not connected.
 */
enum fl_status node_send(struct node *n, uint16_t method, const void *msg, uint32_t budget_ms,
                         const struct send *s, struct fl_err *err);
enum fl_status node_tell(struct node *n, uint16_t method, const void *msg, struct fl_err *err);
void uplink_close(struct uplink *u, enum fl_status st, const char *why);
void uplinks_destroy(struct head *h);
struct fl_node_ref uplink_who(const struct uplink *u);
struct head *uplink_head(const struct uplink *u);
const char *uplink_from(const struct uplink *u);  /* the other end of its stream, as ADDRESS:PORT */
/* The one that it was, or NULL: it has ended. */
struct uplink *uplink_find(const struct head *h, const struct uplink *was,
                           const struct fl_node_ref *who);
void uplink_join(struct uplink *u, struct node *n);
/* This journal lacks what u's daemon has: takes a later term, and u has to come back. */
void uplink_older(struct uplink *u, uint64_t from);
void reply_empty(struct call_req *req);
void reply_msg(struct call_req *req, const void *msg);
void reply_refuse(struct call_req *req, enum fl_status st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- join.c: what a daemon says it has, against what the journal says ---- */
void join_serve(struct uplink *u, struct call_req *req, const Fl__JoinRequest *m);
/* Its address is good. */
void join_settle(struct uplink *u, struct call_req *req, const Fl__JoinRequest *m);

/* ---- dial.c: the address of a node that joins is dialled before it is believed ---- */
/* join_settle() or a refusal follows. FL_INVALID: refused at once; req is still to be answered. */
enum fl_status dial_back(struct uplink *u, struct call_req *req, const Fl__JoinRequest *m,
                         struct fl_err *err);
void dials_end(struct head *h);
void worker_changed(struct head *h, struct node *n, const Fl__WorkerState *w, struct call_req *req);

/* ---- jobs.c ---- */
struct job_ask { /* borrowed */
    const char *entrypoint, *submission_id, *metadata, *runtime_env, *cwd, *run_dir;
    const Fl__EnvVar *const *env;
    size_t n_env;
    const Fl__Amount *const *wants;
    size_t n_wants;
    uint32_t driver_restarts;
    const Fl__Label *const *labels; /* of the driver's node */
    size_t n_labels;
    const char *working_dir; /* packages, by name */
    const char *const *py_modules;
    size_t n_py_modules;
    bool off_head;
    const char *const *ports;
    size_t n_ports;
};
enum fl_status job_submit(struct head *h, const struct job_ask *ask, struct after *then,
                          char submission_id[64], struct fl_err *err);
/* *live: it was running or waiting. */
/* Why no driver of its job starts again: this member has used its restarts. */
enum fl_status job_used_up(const struct seat *member, const char *why);
enum fl_status job_stop(struct head *h, struct job *j, struct after *then, bool *live,
                        struct fl_err *err);
void jobs_settle(struct head *h);
/* Of one that has ended; told to nobody from then on. */
enum fl_status job_ask_delete(struct head *h, struct job *j, struct after *then,
                              struct fl_err *err);
/* What a driver finds in RAY_JOB_CONFIG_JSON_ENV_VAR; free(). */
char *job_config_json(const struct job *j);
bool job_wants_resources(const struct job *j);
struct seat *job_driver(struct job *j);
/* Why it has not started, for people; false: it has. */
bool job_waits(const struct job *j, struct fl_str *why);
bool node_is_heads(const struct node *n); /* that the head itself runs on */
bool job_may_run_on(const struct job *j, const struct node *n); /* its driver, now */
const char *job_status_name(Fl__JobStatus s);
void jobs_after_older(struct head *h);  /* the journal turned out to be older than the cluster */
bool job_given_up(const struct job *j); /* by that */
void job_forget_old(struct head *h);

/* ---- seats.c: the directory, starts, ends, restarts ---- */
void seats_settle(struct head *h);
void seat_gone(struct seat *s, uint32_t attempt, const Fl__Exit *x, struct after *then);
void seat_dirty(struct seat *s);
enum fl_status seat_again(struct seat *s, uint32_t restarts, struct fl_err *err);
struct node *seat_node(const struct seat *s);
const Fl__LayoutRank *seat_rank(
    const struct seat *s);         /* as placed; NULL: a driver, or its group has gone */
void members_push(struct head *h); /* at the end of this turn */
void members_push_now(struct head *h);
void members_fill(struct head *h, const struct seat *s, Fl__Where *w, Fl__SeatRef *ref);
bool seat_wants_end(const struct seat *s);
void seat_unplug(struct seat *s); /* its node's stream ended: nothing is known to be on its way */
enum fl_status seat_make(struct head *h, struct job *j, struct group *g, const char *role,
                         uint32_t rank, uint32_t world, const struct fl_worker_id *id,
                         struct fl_err *err);

/* ---- groups.c, place.c ---- */
void groups_settle(struct head *h);
void leases_settle(struct head *h);
void group_asks_answer(struct group *g, enum fl_status st, const struct fl_err *err);
enum fl_status group_make(struct head *h, struct job *j, const Fl__GroupRec *rec,
                          struct group **out, struct fl_err *err);
enum fl_status group_end(struct head *h, struct group *g, struct after *then, struct fl_err *err);
void place_group(struct group *g);
void placing_free(struct group *g);
void relay_serve(struct uplink *u, struct call_req *req, const Fl__Relay *m);
uint64_t lease_next_id(struct head *h);
bool bundle_lost(const Fl__GroupRec *g);
enum fl_status flags_read(const Fl__GroupRec *g, struct layout_flags *out, struct fl_err *err);

/* ---- snapshot.c: the tables as the solver wants them ----
 * Both ways of asking go through a DecisionRec: what is decided now and what is explained later see
 * the same bytes. */
struct snapshot; /* owns what snap and req point to; borrows from the decision */
struct snapshot *snapshot_of(const Fl__DecisionRec *d);
void snapshot_free(struct snapshot *s);
const struct placement_snapshot *snapshot_view(const struct snapshot *s);
const struct placement_request *snapshot_request(const struct snapshot *s);
/* The nodes as they are; bundles are added by the caller. decision_free() */
Fl__DecisionRec *decision_take(struct head *h, const struct group *g);
void decision_free(Fl__DecisionRec *d);
/* With the request as the solver made it from flags, in the decision's own words. */
void decision_ask(Fl__DecisionRec *d, const struct placement_snapshot *snap,
                  const struct placement_request *req);
/* The answer that was given, found again: OK with the plan's lines, or each node's reason. */
enum fl_status decision_explain(const Fl__DecisionRec *d, struct fl_str *lines, struct fl_err *err);

/* ---- steps.c, joblog.c, follow.c ---- */
enum fl_status steps_add(struct job *j, const char *json, struct fl_err *err);
void steps_fini(struct steps *s);
const char *steps_get(const struct steps *s, uint64_t number); /* NULL: not there any more */
/* Those from before this head began, from steps.jsonl of the run's folder where that can be read
 * here; once, and followers of steps wait for it. */
void steps_recall(struct job *j);

enum fl_status joblog_push(struct job *j, const Fl__LogPush *m, const char *node, uint64_t *next,
                           struct fl_err *err);
/* Bytes from *from on, which is moved up to what there still is. */
enum fl_status joblog_read(struct job *j, uint64_t *from, size_t max, char **out, size_t *len,
                           struct fl_err *err);
uint64_t joblog_end(struct job *j);
/* A line of the head's own, behind "furlong: ". */
void joblog_note(struct job *j, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void joblog_preamble(const struct job *j, struct fl_str *out);
void joblog_tail(struct job *j, struct fl_str *out, unsigned lines);
void joblog_close(struct job *j); /* opened again when it is needed */
void joblog_remove(struct head *h, const char *submission_id);

void followers_wake(struct job *j); /* something came, or the job ended */
void followers_free(struct job *j);
void reading_take(struct seat *s, const char *name, double value);
void readings_free(struct seat *s);
void tails_wake(struct job *j);
void tails_free(struct job *j);
bool job_told(const struct job *j, uint64_t now_ns); /* who followed has heard the end */
