/* worker/proc/fake.h - proc_fake: worker processes that a test plays itself
 *
 * start() and adopt() remember; nothing happens until the test says so. stop() ends the process in
 * a later turn with the cause it was given, unless it was made stubborn. */
#pragma once
#include "worker/proc/proc.h"

struct proc_fake_told { /* what the last start() was given, copied */
    struct fl_seat_ref who;
    char argv0[128], dir[256], cwd[256], env[16384]; /* env: one a line */
    bool adopted, stopped;
    enum proc_cause stop_cause;
    char stop_text[256];
    uint32_t stop_term_ms;
    int seat_fd; /* a duplicate of the seat; proc_fake_forget_all() closes it */
};
size_t proc_fake_count(void); /* that were started or adopted and have not ended */
struct proc *proc_fake_find(const struct fl_seat_ref *who);
const struct proc_fake_told *proc_fake_told(const struct proc *p);
void proc_fake_start(struct proc *p, int pid);                       /* started() now */
void proc_fake_end(struct proc *p, enum proc_cause cause, int code); /* gone() now */
void proc_fake_stubborn(struct proc *p);
void proc_fake_fail_next(enum fl_status st); /* the next start() gives this */
void proc_fake_forget_all(void);
