/* cli/follow.h - watching a job until it ends
 *
 * Reading resumes where it was: the head may restart, or the connection drop, and nothing is shown
 * twice or lost. Ctrl-C once stops the job and waits for its end, a second one stops waiting. */
#pragma once
#include "cli/api.h"
#include "cli/daemons.h"

enum cli_show {
    CLI_SHOW_LOG,   /* the job's output as it comes, to stdout                  */
    CLI_SHOW_STEPS, /* one JSON object a step to stdout, the output to stderr   */
    CLI_SHOW_NONE
};
struct cli_follow {
    enum cli_show show;
    bool leave;           /* Ctrl-C stops the watching, not the job               */
    bool bar;             /* a progress bar on stderr, which is a terminal       */
    int64_t total;        /* steps of the run, for the bar; 0: not known         */
    const char *tried;    /* the command, shown where a shell did not find it; NULL: not known */
    uint32_t away_max_ms; /* a head that is away for longer ends the watching    */
    const struct cli_daemon *own; /* of a private cluster, at most 2: nobody starts them again */
    size_t n_own;
    const char *own_logs; /* their folder                                        */
    bool *own_ended;      /* set: one of them ended before the job               */
};
struct cli_end {
    int exit_code; /* the job's, 128 + signal if it was killed; 1 if it never ran */
    char state[16], message[1024];
};
/* FL_OK: it has ended, and how is in out.
 * FL_CANCELLED: the user stopped waiting. FL_UNREACHABLE: the head stayed away. The job goes on. */
enum fl_status cli_follow(const struct cli_cluster *c, const char *job, const struct cli_follow *how,
                          struct cli_end *out, struct fl_err *err);
