#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/ray.h"

/* ==== the text: pure =============================================================================== */
static void put_amount(FILE *to, const char *name, double v)
{
    static const char *const unit[] = { "B", "KiB", "MiB", "GiB", "TiB" };
    size_t u = 0;

    if (strcmp(name, "memory") != 0 && strcmp(name, "object_store_memory") != 0) {
        char text[48];

        snprintf(text, sizeof(text), "%.4f", v); /* amounts have four decimals; Python drops zeros, but for one */
        for (size_t n = strlen(text); text[n - 1] == '0' && text[n - 2] != '.'; n--)
            text[n - 1] = 0;
        fputs(text, to);
        return;
    }
    for (; v >= 1024 && u + 1 < FL_LEN(unit); u++)
        v /= 1024;
    if (u == 0)
        fprintf(to, "%.0fB", v);
    else
        fprintf(to, "%.2f%s", v, unit[u]);
}

/* Of all placed groups. */
static double reserved(const json_t *groups, const char *name)
{
    const json_t *g, *b;
    size_t i, k;
    double sum = 0;

    json_array_foreach((json_t *)groups, i, g)
        if (strcmp(cli_text(g, "state"), "PLACED") == 0)
            json_array_foreach(json_object_get(g, "bundles"), k, b)
                sum += cli_real(json_object_get(b, "amounts"), name);
    return sum;
}

static void put_usage(FILE *to, const json_t *resources, const json_t *groups, const char *indent)
{
    const char *name;
    const json_t *r;
    size_t n = 0;
    const char *names[256];

    json_object_foreach((json_t *)resources, name, r)
        if (strncmp(name, "node:", 5) != 0 && strncmp(name, "accelerator_type:", 17) != 0 && n < FL_LEN(names))
            names[n++] = name;
    for (size_t i = 1; i < n; i++) /* few, and Ray sorts them */
        for (size_t k = i; k > 0 && strcmp(names[k - 1], names[k]) > 0; k--) {
            const char *t = names[k];

            names[k] = names[k - 1];
            names[k - 1] = t;
        }
    for (size_t i = 0; i < n; i++) {
        double held = groups ? reserved(groups, names[i]) : 0;

        r = json_object_get(resources, names[i]);
        fputs(indent, to);
        put_amount(to, names[i], cli_real(r, "used"));
        fputc('/', to);
        put_amount(to, names[i], cli_real(r, "total"));
        fprintf(to, " %s", names[i]);
        if (held > 0) {
            fputs(" (", to);
            put_amount(to, names[i], held); /* a lease of ours is in use from its start to its end */
            fputs(" used of ", to);
            put_amount(to, names[i], held);
            fputs(" reserved in placement groups)", to);
        }
        fputc('\n', to);
    }
}

static void put_nodes(FILE *to, const json_t *nodes)
{
    const json_t *n;
    size_t i;
    unsigned live = 0, lost = 0;

    fputs("Active:\n", to);
    json_array_foreach((json_t *)nodes, i, n)
        if (strcmp(cli_text(n, "state"), "READY") == 0 && ++live)
            fprintf(to, " 1 node_%s\n", cli_text(n, "id"));
    if (!live)
        fputs(" (no active nodes)\n", to);
    fputs("Pending:\n (no pending nodes)\nRecent failures:\n", to);
    json_array_foreach((json_t *)nodes, i, n)
        if (strcmp(cli_text(n, "state"), "READY") != 0 && ++lost)
            fprintf(to, " node_%s: %s (ip: %s)\n", cli_text(n, "id"),
                    strcmp(cli_text(n, "state"), "SUSPECT") == 0 ? "NodeSilent" : "NodeTerminated", cli_text(n, "address"));
    if (!lost)
        fputs(" (no failures)\n", to);
}

static void put_demands(FILE *to, const json_t *waiting)
{
    const json_t *w;
    size_t i;

    json_array_foreach((json_t *)waiting, i, w)
        fprintf(to, " %s, %s: 1+ pending: %s\n", cli_text(w, "job"), cli_text(w, "what"), cli_text(w, "why"));
    if (!json_array_size(waiting))
        fputs(" (no resource demands)\n", to);
}

static void put_each_node(FILE *to, const json_t *nodes)
{
    const json_t *n;
    size_t i;

    json_array_foreach((json_t *)nodes, i, n) {
        if (strcmp(cli_text(n, "state"), "READY") != 0)
            continue;
        fprintf(to, "\nNode: %s (node_%s)\n Id: %s\n Usage:\n", cli_text(n, "address"), cli_text(n, "id"), cli_text(n, "id"));
        put_usage(to, json_object_get(n, "resources"), NULL, "  ");
        fprintf(to, " Activity:\n");
        if (cli_int(n, "workers"))
            fprintf(to, "  Busy workers on node: %lld\n", (long long)cli_int(n, "workers"));
        else
            fputs("  (no activity)\n", to);
    }
}

char *ray_status_text(const json_t *status, const json_t *nodes, const json_t *groups, bool verbose, const char *now)
{
    char head[96], rule[96], *text = NULL;
    size_t len;
    FILE *to = open_memstream(&text, &len);

    if (!to)
        abort();
    snprintf(head, sizeof(head), "======== Autoscaler status: %s ========", now);
    memset(rule, '-', sizeof(rule));
    rule[strlen(head)] = 0;
    fprintf(to, "%s\nNode status\n%s\n", head, rule);
    put_nodes(to, nodes);
    fprintf(to, "\nResources\n%s\nTotal Usage:\n", rule);
    put_usage(to, json_object_get(status, "resources"), groups, " ");
    fputs("\nFrom request_resources:\n (none)\nPending Demands:\n", to);
    put_demands(to, json_object_get(status, "waiting"));
    if (verbose)
        put_each_node(to, nodes);
    if (fclose(to) != 0)
        abort();
    return text;
}

/* ==== the verb ===================================================================================== */
struct status { const char *address; bool verbose; };
static const struct fl_opt opts[] = {
    { FL_OPT_TEXT, "address", .arg = "HOST:PORT", .at = offsetof(struct status, address),
      .help = "of the head; else RAY_ADDRESS, or the head that runs here" },
    { FL_OPT_SWITCH, "verbose", .letter = 'v', .at = offsetof(struct status, verbose), .help = "each node" },
    { 0 }
};
static const struct ray_flag passed[] = {
    { "redis-password", true }, { "redis-username", true }, { "log-style", true }, { "log-color", true }, { 0 }
};

int ray_status(int argc, char **argv)
{
    struct status s = { 0 };
    struct fl_opts o = { .program = "ray status", .about = "Nodes and resources of the cluster.",
                         .tables = { { NULL, opts, &s } } };
    json_t *status = NULL, *nodes = NULL, *groups = NULL;
    struct cli_cluster c;
    struct fl_err err = { 0 };
    char now[32];
    int rc = ray_opts(&o, passed, argc, argv);

    if (rc >= 0)
        return rc;
    enum fl_status st = ray_find(s.address, &c, &err);

    if (st == FL_OK)
        st = cli_call(&c, "GET", "/api/furlong/status", NULL, 10000, &status, &err);
    if (st == FL_OK)
        st = cli_call(&c, "GET", "/api/furlong/nodes", NULL, 10000, &nodes, &err);
    if (st == FL_OK)
        st = cli_call(&c, "GET", "/api/furlong/groups", NULL, 10000, &groups, &err);
    if (st == FL_OK) {
        char *text = ray_status_text(status, nodes, groups, s.verbose, ray_clock(now));

        fputs(text, stdout);
        free(text);
    } else {
        rc = ray_failed(st == FL_DENIED ? "ray.exceptions.AuthenticationError" : "ConnectionError", "%s", err.text);
    }
    json_decref(status);
    json_decref(nodes);
    json_decref(groups);
    return st == FL_OK ? fflush(stdout) == 0 ? 0 : 1 : rc;
}
