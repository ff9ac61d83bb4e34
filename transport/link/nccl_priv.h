/* transport/link/nccl_priv.h - the link by NCCL from inside: the loop's end (nccl.c), the thread
 * (nccl_run.c), communicators (nccl_comm.c), casts (nccl_cast.c), their parcels (nccl_table.c)
 *
 * One thread of a process owns all communicators and makes every call: an abort is its next call.
 * Communicators do not block, so it never waits inside of one. */
#pragma once
#include <pthread.h>
#include <sys/queue.h>
#include "transport/link/dev_priv.h"
#include "transport/link/link_priv.h"
#include "transport/link/nccl_api.h"

enum {
    /* a parcel: 0.18 ms at 370 GB/s, so that gathering hides behind it */
    NCCL_STAGE_BYTES = 64 << 20,
    NCCL_STAGES = 3,   /* of a device, for all its links                                   */
    NCCL_MAX_JOBS = 8, /* in flight on a link; past it FL_AGAIN until one is back          */
    NCCL_TABLES = 256, /* buckets of 512 MiB: what one device holds */
    NCCL_WARM_BYTES = 4 << 20,
    NCCL_OPEN_MS = 60000, /* until all ranks have come */
    NCCL_IDLE_MS = 2000   /* after which the stages are given back   */
};
/* From here on what is contiguous on both sides is sent from where it lies to where it belongs. */
enum { NCCL_DIRECT_MIN = 1 << 20 };
struct nccl_parcel {
    size_t first, n; /* pieces: of a packed one to be moved, of a direct one to be digested */
    uint64_t bytes;
    bool direct;
    uint64_t from_off, to_off; /* of a direct one */
};
struct nccl_table {
    uint64_t key[2], used;
    bool gathers;
    struct dev_table t;
    struct nccl_parcel *parcels;
    size_t n_parcels;
};
struct nccl_room { /* of a job in flight; kept: giving device memory back waits for the device */
    struct gpu_event *end;
    uint64_t sums;
    uint64_t (*back)[2]; /* pinned */
    size_t n;
    bool taken;
};
struct nccl_job {
    STAILQ_ENTRY(nccl_job) next;
    struct nccl *k;
    struct link_op *op;
    unsigned root;
    struct link_mem mem;
    const struct link_seg *segs;
    size_t n;
    uint64_t (*digests)[2];
    uint64_t bytes, asked_ns;
    /* the thread's */
    const struct nccl_table *table;
    size_t next_parcel;
    bool issued;
    uint64_t due_ns, began_ns;
    struct nccl_room *room;
};
STAILQ_HEAD(nccl_jobs, nccl_job);
struct nccl_patience { /* of the process; tests have less */
    unsigned join_ms;  /* for the first cast of an idle link: others may be late */
    unsigned late_ms;  /* then 3 times what the slowest link takes               */
};
extern struct nccl_patience nccl_patience;
enum nccl_state { NCCL_NEW, NCCL_JOINING, NCCL_WARMING, NCCL_READY, NCCL_DEAD };
struct nccl {
    struct link base;
    LIST_ENTRY(nccl) next;
    struct link_place *members;
    unsigned n, self;
    struct nccl_id id;
    /* under the thread's lock */
    struct nccl_jobs asked, over;
    bool stop, let_go, gone;
    bool silent; /* nothing is posted to the loop any more       */
    bool orphan; /* the thread frees it when it is done with it */
    bool opened;
    struct fl_err why; /* of opening; of death */
    bool dead;
    /* the loop's */
    struct fl_task back;
    struct link_op *ready, *quiet;
    bool quiet_over;
    unsigned n_jobs, delivering;
    struct fl_timer look; /* shortly before the end of what is in flight */
    uint64_t left_ns;     /* that is expected to take                     */
    bool closed;
    /* the thread's */
    enum nccl_state state;
    const struct nccl_api *api;
    struct link_dev *dev;
    nccl_comm comm;
    struct gpu_stream *work, *wire;
    struct gpu_event *mark; /* on the wire: what the other stream waits for */
    uint64_t warm, due_ns, uses;
    uint64_t end_near_ns; /* of the first cast under way, expected */
    bool in_call; /* NCCL has not taken the last call yet */
    struct nccl_ring *ring;
    struct nccl_stage *stage; /* of that call */
    struct nccl_jobs now;
    struct nccl_room rooms[NCCL_MAX_JOBS];
    struct nccl_table tables[NCCL_TABLES];
};
/* nccl_run.c, for the loop's end and the thread's. */
enum fl_status nccl_thread_start(struct fl_err *err); /* of the process; stays */
void nccl_thread_add(struct nccl *k);
void nccl_lock(void);
void nccl_unlock(void);
void nccl_wake(void);
uint64_t nccl_wire_ns(const struct nccl *k, unsigned root, uint64_t bytes); /* on an idle wire */
void nccl_wait_gone(struct nccl *k); /* let go, and the thread has forgotten it */
void nccl_free(struct nccl *k);
/* The thread's alone. */
void nccl_tell(struct nccl *k); /* with the lock held */
void nccl_opened(struct nccl *k);
void nccl_job_over(struct nccl_job *j, enum fl_status st, const struct fl_err *why);
/* nccl_comm.c. The two report what ends the communicator; *moved: something happened. */
enum fl_status nccl_opening(struct nccl *k, bool *moved, struct fl_err *err);
enum fl_status nccl_finish(struct nccl *k, bool *moved, struct fl_err *err);
enum fl_status nccl_comm_state(struct nccl *k, struct fl_err *err); /* FL_AGAIN: not taken yet */
void nccl_die(struct nccl *k, enum fl_status st, const struct fl_err *why);
void nccl_take_asked(struct nccl *k);
/* nccl_cast.c */
enum fl_status nccl_ring_of(struct nccl *k, struct fl_err *err);
enum fl_status nccl_call(struct nccl *k, uint64_t addr, uint64_t bytes, unsigned root,
                         struct fl_err *err);
void nccl_call_forget(struct nccl *k); /* aborted: it will not be taken any more */
enum fl_status nccl_issue(struct nccl *k, bool *moved, struct fl_err *err);
void nccl_room_drop(struct nccl *k, struct nccl_room *r);
void nccl_stages_back(void); /* of all devices: nothing is under way */
/* Memory that is not needed any more. Giving it back waits for the device, and behind a broadcast
 * whose ranks are dead that has no end: it is kept until nothing is under way. */
void nccl_throw(struct link_dev *d, uint64_t addr, void *pinned); /* 0, NULL: none */
void nccl_thrown_back(void);                                      /* nothing is under way */
/* nccl_table.c */
enum fl_status nccl_table_for(struct nccl *k, struct nccl_job *j, struct fl_err *err);
void nccl_table_drop(struct nccl *k, struct nccl_table *t);
