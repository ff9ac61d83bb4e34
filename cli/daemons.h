/* cli/daemons.h - starting our daemons, finding those that run here, ending them */
#pragma once
#include <sys/types.h>

#include <jansson.h>

#include "common/base/base.h"
#include "common/base/file.h"
#include "common/base/loop.h"

struct cli_daemon { /* a head or a node of this user on this machine, by its json file */
    char kind;      /* 'h' head, 'n' node                                             */
    pid_t pid;
    uint64_t start_time;
    bool private;
    char dir[FL_PATH_MAX];
    json_t *info; /* the file; owned */
};

/* Start program (found beside ours) as leader of a session of its own, and wait for the line on its
 * --ready-fd.
 *
 * argv        without the program's name and --ready-fd, NULL-terminated
 * log_dir     made if absent; standard streams go to PROGRAM.log in it, behind what is there
 * *ready      its json file; the caller's to json_decref()
 * err         the daemon's own sentence when it did not come up; FL_TIMEOUT names the log file; FL_INVALID: what it was
 *             given is wrong (it ended with 2)
 * One that is not ready in time, or is given up for a signal (cli/interrupt.h), is ended before this returns. */
enum fl_status cli_daemon_start(const char *program, const char *const *argv, const char *log_dir,
                                uint32_t wait_ms, json_t **ready, struct fl_err *err);

/* Those that really run, heads first. *out: free each with cli_daemons_free(). */
enum fl_status cli_daemons_find(struct cli_daemon **out, size_t *n, struct fl_err *err);
void cli_daemons_free(struct cli_daemon *d, size_t n);

/* False: still there after ms. */
bool cli_daemon_wait(const struct cli_daemon *d, uint32_t ms);
/* SIGTERM, then SIGKILL when term_ms is over; waits for its end through a pidfd. 0: at once, but a worker daemon
 * still ends its workers, by force. */
enum fl_status cli_daemon_end(const struct cli_daemon *d, uint32_t term_ms, struct fl_err *err);

/* ended(arg) runs in l when the daemon has ended, or is already gone. */
enum fl_status cli_daemon_watch(const struct cli_daemon *d, struct fl_loop *l,
                                void (*ended)(void *arg, unsigned events), void *arg, int *fd,
                                struct fl_watch **w, struct fl_err *err);
void cli_daemon_unwatch(struct fl_watch *w, int fd); /* NULL and -1 are fine */
