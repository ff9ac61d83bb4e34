#include <stdio.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/table.h"
#include "common/base/str.h"

static void print_resources(const json_t *resources)
{
    static const char *const heads[] = { "resource", "used", "total" };
    struct cli_table *t = cli_table_create(heads, 3);
    const char *name;
    json_t *r;

    json_object_foreach((json_t *)resources, name, r) {
        char used[24], total[24];
        double u = cli_real(r, "used"), all = cli_real(r, "total");

        if (strncmp(name, "node:", 5) == 0) /* one of each node: says nothing here */
            continue;
        if (strcmp(name, "memory") == 0 || strcmp(name, "object_store_memory") == 0) {
            (void)fl_bytes_text(used, (uint64_t)u);
            (void)fl_bytes_text(total, (uint64_t)all);
        } else {
            snprintf(used, sizeof(used), "%g", u);
            snprintf(total, sizeof(total), "%g", all);
        }
        cli_table_row(t, (const char *[]){ name, used, total });
    }
    cli_table_print(t, stdout);
    cli_table_destroy(t);
}

/* Which processes have which device open, as the driver says. */
static void print_devices(const json_t *devices)
{
    static const char *const heads[] = { "node", "device", "held by" };
    struct cli_table *t = cli_table_create(heads, 3);
    json_t *d, *one;
    size_t i, k, told = 0;

    json_array_foreach((json_t *)devices, i, d) {
        char text[512] = "";
        struct fl_str held = FL_STR_ON(text);

        told += json_is_true(json_object_get(d, "told"));
        json_array_foreach(json_object_get(d, "held_by"), k, one)
            fl_str_add(&held, "%s%s", k ? ", " : "", json_string_value(one));
        if (json_is_true(json_object_get(d, "told")))
            cli_table_row(t, (const char *[]){ cli_text(d, "node"), cli_text(d, "id"), *text ? text : "nobody" });
    }
    if (told) {
        puts("");
        cli_table_print(t, stdout);
    }
    cli_table_destroy(t);
}

static void print_counts(const char *what, const json_t *counts)
{
    const char *name, *comma = "";
    json_t *n;

    printf("%-8s", what);
    json_object_foreach((json_t *)counts, name, n)
        if (json_integer_value(n) > 0) {
            printf("%s%lld %s", comma, (long long)json_integer_value(n), name);
            comma = ", ";
        }
    puts(*comma ? "" : "none");
}

static void print_status(const json_t *s)
{
    char up[24];
    json_t *w;
    size_t i;

    printf("cluster %.8s, %s for %s, term %lld\n", cli_text(s, "cluster"), cli_text(s, "state"),
           cli_duration(up, cli_real(s, "uptime_s")), (long long)cli_int(s, "term"));
    print_counts("nodes", json_object_get(s, "nodes"));
    print_counts("jobs", json_object_get(s, "jobs"));
    puts("");
    print_resources(json_object_get(s, "resources"));
    print_devices(json_object_get(s, "devices"));
    if (json_array_size(json_object_get(s, "troubled")))
        puts("\ntroubled:");
    json_array_foreach(json_object_get(s, "troubled"), i, w)
        printf("  node %s: %s\n", cli_text(w, "node"), cli_text(w, "why"));
    if (json_array_size(json_object_get(s, "waiting")))
        puts("\nwaiting:");
    json_array_foreach(json_object_get(s, "waiting"), i, w)
        printf("  %s, %s: %s\n", cli_text(w, "job"), cli_text(w, "what"), cli_text(w, "why"));
}

int cli_status(int argc, char **argv)
{
    struct cli_common common = { 0 };
    struct fl_opts o = {
        .program = "furlong status", .usage = "[OPTION...]",
        .about = "What the cluster has, what of it is used, and what waits.",
        .tables = { { NULL, cli_common_opts, &common } },
    };
    int rc = fl_opts_main(&o, argc, argv);

    if (rc >= 0)
        return rc;
    if (o.n_words)
        return cli_misused(o.program, "'%s' is no option", o.words[0]);
    return cli_show(o.program, &common, "/api/furlong/status", print_status);
}

/* ==== explain ====================================================================================== */
static void print_explanation(const json_t *e)
{
    const char *text = cli_text(e, "text");
    size_t len = strlen(text);

    printf("job %s: %s\n", cli_text(e, "job"), cli_text(e, "decision"));
    fputs(text, stdout);
    if (len && text[len - 1] != '\n')
        putchar('\n');
}

int cli_explain(int argc, char **argv)
{
    struct cli_common common = { 0 };
    struct fl_opts o = {
        .program = "furlong explain", .usage = "JOB-OR-GROUP [OPTION...]",
        .about = "Replays the placement of a job from the journal: what was asked, what each node had, what came out.",
        .tables = { { NULL, cli_common_opts, &common } },
    };
    char path[160];
    struct fl_str p = FL_STR_ON(path);
    int rc = fl_opts_main(&o, argc, argv);

    if (rc >= 0)
        return rc;
    if (o.n_words != 1)
        return cli_misused(o.program, "one job or placement group is wanted, see furlong job list");
    fl_str_add(&p, "/api/furlong/explain/%s", o.words[0]);
    if (p.cut)
        return cli_misused(o.program, "'%.40s...' is no id", o.words[0]);
    return cli_show(o.program, &common, path, print_explanation);
}
