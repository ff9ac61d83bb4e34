#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/daemons.h"
#include "cli/ray.h"

/* ==== a launcher's line that would break a cluster ================================================== */
bool ray_is_fan_out(const char *line, const char *head)
{
    const char *stop = strstr(line, "ray stop"), *start = stop ? strstr(stop, "ray start") : NULL;
    const char *at = start ? strstr(start, "--address") : NULL;
    size_t len = strlen(head);

    if (!at || !len)
        return false;
    at += strlen("--address");
    at += *at == '=' || *at == ' ';
    at += strspn(at, "\"'");
    return strncmp(at, head, len) == 0 && !(at[len] >= '0' && at[len] <= '9');
}

static void parent_line(char *out, size_t cap)
{
    char path[64];
    size_t n = 0;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/cmdline", (int)getppid());
    f = fopen(path, "re");
    if (f) {
        n = fread(out, 1, cap - 1, f);
        fclose(f);
    }
    for (size_t i = 0; i < n; i++)
        out[i] = out[i] ? out[i] : ' ';
    out[n] = 0;
}

bool ray_refuse_fan_out(const char *program, const char *start_at)
{
    struct cli_daemon *d;
    char line[8192];
    const char *ssh = getenv("SSH_CONNECTION");
    bool head_here = false, refuse = false;
    size_t n;

    parent_line(line, sizeof(line));
    if (cli_daemons_find(&d, &n, NULL) != FL_OK)
        return false;
    for (size_t i = 0; i < n; i++)
        head_here |= d[i].kind == 'h' && !d[i].private;
    for (size_t i = 0; i < n && !head_here && !refuse; i++) {
        const json_t *node = d[i].info;
        const char *head = cli_text(node, "head");

        if (d[i].kind != 'n' || d[i].private || !json_is_true(json_object_get(node, "joined")) || cli_int(node, "joins") != 1)
            continue;
        /* A shell gives its place to the last command: the line is not there to be seen any more. */
        refuse = start_at ? ssh && *ssh && !isatty(STDIN_FILENO) && strcmp(start_at, head) == 0 : ray_is_fan_out(line, head);
        if (refuse)
            fprintf(stderr, "%s: this node serves the running cluster of %s, and stopping it from a launcher's fan-out would break that "
                            "cluster; pass --no-join-ray-workers to the launcher. To end this node on purpose: furlong stop\n", program, head);
    }
    cli_daemons_free(d, n);
    return refuse;
}

/* ==== the verb ===================================================================================== */
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
    if (ray_refuse_fan_out(o.program, NULL))
        return 1;
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
