/* cli/foreign.h - a job of a head that is not ours: Ray's Jobs API alone
 *
 * Its log comes through the WebSocket that Ray's own client reads. A connection that ends early is made again, and
 * nothing is shown twice or lost; only the job's state says that it has ended. */
#pragma once
#include "cli/api.h"

struct foreign_follow {
    void (*show)(void *arg, const char *text, size_t len); /* pieces of the log, in order */
    void *arg;
    const char *program;  /* of its sentences on stderr                                    */
    bool leave;           /* Ctrl-C stops the watching; else it stops the job and waits for it, a second one stops waiting */
    uint32_t away_max_ms; /* a head that is away for longer ends the watching              */
};
/* FL_OK: it has ended; *details is the job as its head tells it, the caller's to json_decref().
 * FL_CANCELLED: the user stopped waiting. FL_UNREACHABLE: the head stayed away. FL_NOT_FOUND, FL_DENIED: as it says. */
enum fl_status foreign_follow(const struct cli_cluster *c, const char *job, const struct foreign_follow *how, json_t **details,
                              struct fl_err *err);
