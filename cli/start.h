/* cli/start.h - the daemons of this machine as flags describe them: for `start`, `train` and the `ray` name */
#pragma once
#include "cli/daemons.h"
#include "transport/tls/tls.h"

struct cli_start { /* NULL and 0 in the lower half: the daemon's default */
    int64_t port, http_port, wait_s;
    const char *http_host; /* NULL: ip */
    const char *ip;        /* head: NULL is cli_head_ip(); node: NULL is the way to the head */
    struct tls_opts tls;   /* empty: what the environment says */
    const char *name, *cpus, *gpus, *memory, *resources, *labels, *state_dir, *log_level;
};
const char *cli_head_ip(void);

/* *head, *node: the daemon's json file; the caller's to json_decref(). */
enum fl_status cli_start_head(const struct cli_start *s, json_t **head, struct fl_err *err);
enum fl_status cli_start_node(const struct cli_start *s, const char *address, json_t **node,
                              struct fl_err *err);
void cli_describe(struct cli_daemon *d, char kind, const json_t *info); /* borrows nothing */

/* Waits for SIGINT, SIGTERM or SIGHUP (*ended is NULL), or for one of d[0..n), n <= 2, children of this process,
 * to end by itself: then *wstatus is as waitpid() tells it. Ends none of them. */
enum fl_status cli_block(const struct cli_daemon *d, size_t n, const struct cli_daemon **ended,
                         int *wstatus, struct fl_err *err);
void cli_end_all(const char *program, const struct cli_daemon *d, size_t n); /* last first; failures to stderr */
