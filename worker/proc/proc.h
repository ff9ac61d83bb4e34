#pragma once
#include "common/base/base.h"
#include "common/base/loop.h"

/* ==== worker/proc/proc.h: process life =========================================================
 * Each worker is the one child of a keeper: a small static program without threads, gRPC, libuv or
 * CUDA; session leader and subreaper of the tree, owner of its cgroup. It writes the exit record
 * (fsync, rename) before it leaves, and it outlives the daemon. */
enum { PROC_SEAT_FD = 3 }; /* what FURLONG_SEAT_FD says in the worker's environment */
enum proc_cause { /* numbers travel and lie on disk: append only */
    PROC_EXITED, PROC_SIGNALLED, PROC_STOPPED, PROC_GUARD, PROC_CGROUP_OOM, PROC_KERNEL_OOM,
    PROC_EXEC_FAILED, PROC_FENCED, PROC_KEEPER_LOST
};
struct proc_spec { /* borrowed for the call */
    struct fl_seat_ref who;
    const char *keeper;                   /* path of furlong-keep                   */
    const char *const *argv, *const *env; /* complete: nothing is inherited unseen  */
    const char *cwd, *dir;                /* dir: keeper's socket, spec, exit record */
    const char *out_path, *err_path;
    uint64_t memory_max_bytes, log_max_bytes;
    uint32_t term_ms, kill_ms, orphan_ms; /* orphan_ms: without a daemon for so long; 0: for ever */
    const char *const *device_uuids;
    size_t n_devices;
    int stop_signal; /* what stop() sends first; 0: SIGTERM */
    int seat_fd; /* becomes descriptor PROC_SEAT_FD of the worker; -1: none */
};
struct proc_exit {
    struct fl_seat_ref who;
    enum proc_cause cause;
    int code, signal;
    uint64_t lived_ms, peak_bytes, device_bytes_left; /* 0 before the lease is free again */
    unsigned tree_ended, tree_left;
    char why[256];   /* one sentence to act on */
    char last[2048]; /* end of stderr          */
};
struct proc; /* ends with its gone(), or with forget(): not to be touched afterwards */
struct proc_user {
    void (*started)(void *arg, struct proc *p, int pid); /* the worker executes its program */
    void (*gone)(void *arg, struct proc *p, const struct proc_exit *x); /* once; whole tree ended */
};
struct proc_ops {
    /* The folder s->dir exists and is the caller's. Both callbacks come later, from the loop. */
    enum fl_status (*start)(struct fl_loop *l, const struct proc_spec *s, const struct proc_user *u,
                            void *arg, struct proc **out, struct fl_err *err);
    /* Finds the keeper by its socket in dir, or what it left: gone() then comes from the record. */
    enum fl_status (*adopt)(struct fl_loop *l, const char *dir, const struct proc_user *u,
                            void *arg, struct proc **out, struct fl_err *err);
    /* SIGTERM (or the spec's stop_signal) to the whole tree, SIGKILL term_ms later, looks that nobody is left. Again: nothing. */
    void (*stop)(struct proc *p, enum proc_cause why, const char *text, uint32_t term_ms);
    void (*forget)(struct proc *p); /* the daemon leaves; keeper and worker live on */
};
extern const struct proc_ops proc_keeper;
const char *proc_cause_name(enum proc_cause c);
