#include <stdio.h>

#include "cli/cli.h"
#include "cli/daemons.h"

struct stop {
    struct cli_common common;
    bool cluster, private, force;
    int64_t grace_s;
};
static const struct fl_opt opts[] = {
    { FL_OPT_SWITCH, "cluster", .at = offsetof(struct stop, cluster),
      .help = "end the whole cluster: its jobs, every node's daemon, the head" },
    { FL_OPT_SWITCH, "private", .at = offsetof(struct stop, private),
      .help = "also the private clusters of running `furlong train` commands" },
    { FL_OPT_INT, "grace-period", .arg = "SECONDS", .fallback = "20", .max = 3600, .at = offsetof(struct stop, grace_s),
      .help = "time for an orderly end before it is forced" },
    { FL_OPT_SWITCH, "force", .letter = 'f', .at = offsetof(struct stop, force), .help = "as --grace-period=0" },
    { 0 }
};

static int stop_cluster(const struct stop *s)
{
    json_t *body = json_pack("{s:s}", "why", "furlong stop --cluster");
    struct cli_cluster c;
    struct fl_err err = { 0 };
    enum fl_status st = cli_cluster_find(s->common.address, &c, &err);

    if (st == FL_OK)
        st = cli_call(&c, "POST", "/api/furlong/shutdown", body, 60000, NULL, &err);
    json_decref(body);
    if (st != FL_OK)
        return cli_failed("furlong stop", &err);
    puts("the cluster ends");
    return 0;
}

/* Daemons before heads: each takes its workers with it and says good-bye to a head that is still there. */
static int stop_here(const struct stop *s)
{
    struct cli_daemon *d;
    struct fl_err err = { 0 };
    size_t n, ended = 0;
    int rc = 0;

    if (cli_daemons_find(&d, &n, &err) != FL_OK)
        return cli_failed("furlong stop", &err);
    for (size_t i = n; i-- > 0;) {
        if (d[i].private && !s->private)
            continue;
        if (cli_daemon_end(&d[i], s->force ? 0 : (uint32_t)s->grace_s * 1000, &err) != FL_OK)
            rc = cli_failed("furlong stop", &err);
        else
            ended++;
    }
    cli_daemons_free(d, n);
    if (s->common.json)
        printf("{\"ended\": %zu}\n", ended);
    else if (rc == 0)
        printf(ended ? "%zu ended\n" : "nothing of this user's runs here\n", ended);
    return rc;
}

int cli_stop(int argc, char **argv)
{
    struct stop s = { 0 };
    struct fl_opts o = {
        .program = "furlong stop", .usage = "[OPTION...]",
        .about = "Ends the daemon and the head that run here, with the workers of this node.",
        .tables = { { NULL, opts, &s }, { NULL, cli_common_opts, &s.common } },
    };
    int rc = fl_opts_main(&o, argc, argv);

    if (rc >= 0)
        return rc;
    if (o.n_words)
        return cli_misused(o.program, "'%s' is no option", o.words[0]);
    return s.cluster ? stop_cluster(&s) : stop_here(&s);
}
