/* cli/job.h - what `job submit` and `train` share */
#pragma once
#include "cli/cli.h"
#include "cli/follow.h"

enum { CLI_JOB_BYTES = 128 };
/* What a submission asks for its command, by the flags that both commands have. */
struct cli_wants {
    const char *id;
    double cpus, gpus;
    uint64_t memory;
};
extern const struct fl_opt cli_wants_opts[];
bool cli_wants_put(json_t *submission, const struct cli_wants *w); /* false: no memory */
/* Durable when it returns. submission: body of POST /api/jobs/. */
enum fl_status cli_submit(const struct cli_cluster *c, const json_t *submission, char id[CLI_JOB_BYTES],
                          struct fl_err *err);
/* Why it waits, or in one line what ended it; "": its status says all. */
void cli_job_why(const json_t *job, char *out, size_t cap);
/* Follows it and says how it ended; the exit code of a verb. */
int cli_watch(const char *program, const struct cli_cluster *c, const char *job, const struct cli_follow *how);
int cli_job_submit(int argc, char **argv);
int cli_list_jobs(const char *program, const struct cli_common *common);
