/* cli/ray.h - the same binary by the name `ray`: Ray's verbs, flags, texts and exit codes
 *
 * Sentences are Ray's where scripts look for them, without its time stamps and colours. Exit codes are Ray's: 2 for
 * usage, 1 for a failure, 0 otherwise; `job submit` gives 1 for a job that failed. A flag of Ray that means nothing
 * here is taken, and named once on stderr. */
#pragma once
#include "cli/cli.h"

#define RAY_VERSION "2.60.0"

int ray_main(int argc, char **argv);

/* Verbs, as those of cli.h. */
int ray_start(int argc, char **argv);
int ray_stop(int argc, char **argv);
int ray_status(int argc, char **argv);
int ray_job(int argc, char **argv);
int ray_list(int argc, char **argv);
int ray_summary(int argc, char **argv);
int ray_health_check(int argc, char **argv);
int ray_symmetric_run(int argc, char **argv);
int ray_get_auth_token(int argc, char **argv);

/* Flags of Ray that mean nothing here, ended by a NULL name. */
struct ray_flag {
    const char *name; /* without dashes */
    bool value;       /* it takes one   */
};
/* Takes those of passed out of argv and names them, then parses the rest. -1: go on; else exit with it. */
int ray_opts(struct fl_opts *o, const struct ray_flag *passed, int argc, char **argv);
/* "Usage: ... Error: sentence" on stderr; returns 2. */
int ray_misused(const struct fl_opts *o, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* "ConnectionError: sentence" on stderr, as the last line of a Python trace; returns 1. */
int ray_failed(const char *kind, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* text between two rules of its own length, and an empty line before and after */
void ray_framed(const char *text);

/* The cluster that a command without a job means: address, RAY_ADDRESS, else the head that runs here. An address
 * without http:// is the one that nodes join (6379): the head's HTTP side is asked from the daemons of this machine,
 * else port 8265 of that host, which must say that it belongs to that address.
 *
 * FL_NOT_FOUND   none is named and none runs here
 * FL_UNREACHABLE nobody answers, or not the head of that address */
enum fl_status ray_find(const char *address, struct cli_cluster *out, struct fl_err *err);
/* The same for job and state commands: RAY_API_SERVER_ADDRESS and RAY_ADDRESS count more than address; none and no
 * head here: http://localhost:8265. Slashes at the end are dropped. */
enum fl_status ray_find_api(const char *address, struct cli_cluster *out, struct fl_err *err);

/* Is this command part of a launcher's line over ssh that stops the worker of a running cluster and starts it again at
 * the same head ("... ray stop --force ; ... ray start --address=HEAD ...")? On a cluster that the launcher has not
 * started itself (the daemon is with the head that it joined first, and that is another machine's) that ends what others run.
 * True: said so on stderr, with the launcher's flag. */
bool ray_refuse_fan_out(const char *program, const char *start_at); /* start_at: --address of a start; NULL: a stop */

/* ==== pure, for tests ============================================================================== */
bool ray_is_fan_out(const char *line, const char *head); /* line: of the shell that runs this command */
/* What `ray status` prints, from the answers of /api/furlong/status, /nodes and /groups; free() it. */
char *ray_status_text(const json_t *status, const json_t *nodes, const json_t *groups, bool verbose, const char *now);
const char *ray_clock(char out[32]); /* local time with microseconds */
char *ray_repr(const json_t *v);     /* as Python prints it; free() it */
