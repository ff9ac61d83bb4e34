/* cli/cli.h - the verbs of the `furlong` command, one file each
 *
 * Each takes its own words (argv[0] is the verb) and returns the exit code: 0, 2 for usage, 1 for a
 * failure of ours, otherwise the job's. */
#pragma once
#include "cli/api.h"
#include "common/conf/opt.h"

struct cli_verb {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
};
int cli_start(int argc, char **argv);
int cli_stop(int argc, char **argv);
int cli_status(int argc, char **argv);
int cli_train(int argc, char **argv);
int cli_job(int argc, char **argv);
int cli_logs(int argc, char **argv);
int cli_list(int argc, char **argv);
int cli_explain(int argc, char **argv);

/* The verb that argv[1] names, or the help, or the nearest one; program as in "furlong job". */
int cli_dispatch(const char *program, const char *about, const struct cli_verb *verbs, int argc,
                 char **argv);

/* The two options of every verb that asks a head. */
struct cli_common {
    const char *address;
    bool json;
};
extern const struct fl_opt cli_common_opts[]; /* of a struct cli_common */

/* "furlong VERB: sentence" on stderr; returns 2 for what was given wrong (FL_INVALID), 128 + signal for FL_CANCELLED,
 * else 1. */
int cli_failed(const char *program, const struct fl_err *err);
/* Usage: the same with 2. */
int cli_misused(const char *program, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* GET path from the cluster that common names, printed as it is (--json) or by print. */
int cli_show(const char *program, const struct cli_common *common, const char *path,
             void (*print)(const json_t *answer));
void cli_print_json(const json_t *o);
