#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/daemons.h"
#include "cli/ray.h"

struct stop { bool force; int64_t grace_s; };
static const struct fl_opt opts[] = {
    { FL_OPT_SWITCH, "force", .letter = 'f', .at = offsetof(struct stop, force), .help = "at once, by SIGKILL" },
    { FL_OPT_INT, "grace-period", .letter = 'g', .arg = "SECONDS", .fallback = "16", .max = 3600,
      .at = offsetof(struct stop, grace_s), .help = "time for an orderly end before it is forced" },
    { 0 }
};
static const struct ray_flag passed[] = { { "log-style", true }, { "log-color", true }, { "verbose", false }, { 0 } };

/* Ray ends whatever looks like it in the process table. Ours are known by their json files: this user's daemons,
 * with the workers of theirs, and nothing that merely has their name. Private clusters belong to their run. */
int ray_stop(int argc, char **argv)
{
    struct stop s = { 0 };
    struct fl_opts o = { .program = "ray stop", .about = "Ends what this user runs on this machine.",
                         .tables = { { NULL, opts, &s } } };
    struct cli_daemon *d;
    struct fl_err err = { 0 };
    size_t n, asked = 0, ended = 0;
    int rc = ray_opts(&o, passed, argc, argv);

    if (rc >= 0)
        return rc;
    if (cli_daemons_find(&d, &n, &err) != FL_OK)
        return ray_failed("Error", "%s", err.text);
    for (size_t i = n; i-- > 0;) { /* nodes before heads: a daemon says good-bye to a head that is there */
        if (d[i].private)
            continue;
        asked++;
        if (cli_daemon_end(&d[i], s.force ? 0 : (uint32_t)s.grace_s * 1000, &err) == FL_OK)
            ended++;
        else
            fprintf(stderr, "ray stop: %s\n", err.text);
    }
    cli_daemons_free(d, n);
    if (asked == 0)
        puts("Did not find any active Ray processes.");
    else if (ended == asked)
        printf("Stopped all %zu Ray processes.\n", ended);
    else
        printf("Stopped only %zu out of %zu Ray processes within the grace period %lld seconds.\n", ended, asked,
               (long long)s.grace_s);
    return 0;
}
