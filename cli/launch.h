/* cli/launch.h - a run on several nodes by one command: the head here, the others over ssh or by themselves */
#pragma once
#include "cli/cli.h"
#include "cli/daemons.h"
#include "cli/hosts.h"

struct launch {
    /* flags */
    const char *nodes, *hostfile, *hosts, *head_ip, *program;
    int64_t num_nodes, wait_s, node_gpus;
    bool no_join, keep;
    /* what it did */
    struct hosts names; /* the other nodes */
    bool named, joins;
    struct cli_daemon own[2];
    size_t n_own;
    struct cli_cluster cluster;
};
extern const struct fl_opt launch_opts[]; /* of a struct launch */

/* A cluster that is somebody else's (MILES_SCRIPT_EXTERNAL_RAY) is not joined over ssh: that would end what runs there. */
enum fl_status launch_may_join(const struct launch *l, struct fl_err *err);
/* The names that --nodes, --hosts or --hostfile give, with commas between; NULL: none. free() it. */
enum fl_status launch_names(const struct launch *l, char **out, struct fl_err *err);
bool launch_asked(const struct launch *l); /* any of the flags that name nodes was given */
/* Finds the cluster of address, or starts a head here; starts a worker daemon on each host over ssh where hosts were
 * given; waits until the named nodes, or so many, and so many devices have joined.
 *
 * On failure everything that it started is ended, here and there; err names the host or who is missing. */
enum fl_status launch_cluster(struct launch *l, const char *address, double gpus, struct cli_cluster *out, struct fl_err *err);
/* Ends the cluster if launch_cluster() started its head, unless --keep-cluster. */
void launch_end(struct launch *l);
void launch_fini(struct launch *l);
bool cli_env_true(const char *name); /* as Miles reads its variables: true and 1, any case */
