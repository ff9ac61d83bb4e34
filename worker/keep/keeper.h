/* worker/keep/keeper.h - the keeper's one object
 *
 * One process, one thread, one worker: spec in, worker executed, tree ended, exit record out. It
 * outlives whoever started it. Descriptors it is born with: KEEP_SEAT_FD for the worker (when the
 * spec says so) and KEEP_CONTROL_FD, a socket to the daemon of the moment; later daemons come by
 * keep.sock. Both speak forms: in STOP, out STATE. */
#pragma once
#include "worker/keep/form.h"
#include "worker/keep/group.h"
#include "worker/proc/proc.h"
#include <sys/types.h>

enum { KEEP_SEAT_FD = PROC_SEAT_FD, KEEP_CONTROL_FD = 4, KEEP_CLIENTS = 8 };

struct keep_spec {
    uint8_t *raw; /* owns every text below */
    char name[40];
    char **argv, **env;
    const char *cwd, *dir, *out_path, *err_path;
    uint64_t memory_max_bytes, log_max_bytes;
    uint32_t term_ms, kill_ms, orphan_ms;
    int stop_signal; /* SIGTERM or SIGINT */
    bool has_seat;
};
/* false: why says what is wrong with it. */
bool keep_spec_read(const char *path, struct keep_spec *out, char why[256]);
void keep_spec_free(struct keep_spec *s);

struct exec_news {
    int stage, error;
}; /* from the child, when it does not get as far as its program */

struct keeper {
    struct keep_spec spec;
    struct group group;
    enum keep_phase phase;
    int listen_fd, signal_fd, exec_fd, out_fd, err_fd;
    int clients[KEEP_CLIENTS]; /* -1: free */

    pid_t worker;
    uint64_t worker_start, born_ms;
    bool executed, worker_over;
    int status;
    uint64_t lived_ms, peak_bytes, oom_base;
    struct exec_news exec_news;

    bool asked; /* to stop, while the worker lived */
    enum proc_cause asked_cause;
    char asked_text[FORM_WHY_MAX + 1];
    uint64_t asked_ms, term_due_ms,
        kill_due_ms; /* kill_due: the last word, what is left is counted */
    uint64_t orphan_due_ms; /* 0: a daemon listens, or it may be away for good */
    bool killing;
    unsigned tree_ended, tree_left;
};
uint64_t keep_now_ms(void);
uint64_t keep_oom_kills(void); /* of the whole machine, since it started */

/* life.c */
/* What LD_PRELOAD names can be loaded, as far as a try tells (preload.c); false: why says what the loader lacks. */
bool keep_preload_tried(const struct keeper *k, char why[256]);
bool keep_start_worker(struct keeper *k, char why[256]);
void keep_on_exec(struct keeper *k); /* exec_fd is readable: it executes, or did not */
void keep_stop(struct keeper *k, enum proc_cause cause, const char *text, uint32_t term_ms,
               uint32_t kill_ms);
void keep_on_signals(struct keeper *k); /* reaps, takes SIGTERM as a stop */
void keep_advance(struct keeper *k);    /* whatever is due by now */
int keep_wait_ms(const struct keeper *k);
/* record.c: the last thing */
bool keep_record(struct keeper *k, char failed[256]);
void keep_record_failed(const char *dir, const char *why); /* nothing was ever executed */

/* serve.c */
bool keep_listen(struct keeper *k, char why[256]);
void keep_accept(struct keeper *k);
void keep_client_read(struct keeper *k, unsigned i);
void keep_tell(struct keeper *k); /* the state to everybody who listens */
