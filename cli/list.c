#include <stdio.h>
#include <string.h>

#include "cli/job.h"
#include "cli/table.h"
#include "common/base/str.h"

/* One kind of thing: where it is read, its columns and the members that fill them. A member "a.b" looks
 * into an object; one that is an array is joined by commas. */
struct kind {
    const char *name, *path;
    const char *const *heads, *const *members;
    size_t n;
};
#define COLUMNS(...) (const char *const[]){ __VA_ARGS__ }
static const struct kind kinds[] = {
    { "nodes", "/api/furlong/nodes",
      COLUMNS("name", "address", "state", "GPU used", "GPU", "CPU used", "CPU", "workers", "id"),
      COLUMNS("name", "address", "state", "resources.GPU.used", "resources.GPU.total",
              "resources.CPU.used", "resources.CPU.total", "workers", "id"), 9 },
    { "jobs", "/api/furlong/jobs/", COLUMNS("job", "status", "exit", "entrypoint", "message"),
      COLUMNS("submission_id", "status", "exit_code", "entrypoint", "message"), 5 },
    { "workers", "/api/furlong/workers",
      COLUMNS("role", "rank", "attempt", "state", "node", "pid", "job", "why"),
      COLUMNS("role", "rank", "attempt", "state", "node", "pid", "job", "why"), 8 },
    { "groups", "/api/furlong/groups", COLUMNS("group", "job", "state", "strategy"),
      COLUMNS("id", "job", "state", "strategy"), 4 },
    { "devices", "/api/furlong/devices", COLUMNS("node", "device", "name", "uuid", "pci", "held by"),
      COLUMNS("node", "id", "name", "uuid", "pci", "held_by"), 6 },
    { "leases", "/api/furlong/leases", COLUMNS("lease", "node", "job", "bundle", "state", "devices"),
      COLUMNS("id", "node", "job", "bundle", "state", "devices"), 6 },
    { "ports", "/api/furlong/ports", COLUMNS("node", "port", "what", "role", "rank", "pid", "job"),
      COLUMNS("node", "port", "name", "role", "rank", "pid", "job"), 7 },
};

static void put_value(struct fl_str *out, const json_t *v)
{
    const json_t *item;
    size_t i;

    if (json_is_string(v))
        fl_str_add(out, "%s", json_string_value(v));
    else if (json_is_integer(v))
        fl_str_add(out, "%lld", (long long)json_integer_value(v));
    else if (json_is_real(v))
        fl_str_add(out, "%g", json_real_value(v));
    else if (json_is_array(v))
        json_array_foreach((json_t *)v, i, item) {
            fl_str_add(out, i ? "," : "");
            put_value(out, item);
        }
}

static const char *cell(const json_t *row, const char *member, char *text, size_t cap)
{
    struct fl_str s = { text, 0, cap, cap - 1, false, false };
    char name[64];
    size_t len;

    for (; member && row; member = member[len] ? member + len + 1 : NULL) {
        len = strcspn(member, ".");
        snprintf(name, sizeof(name), "%.*s", (int)len, member);
        row = json_object_get(row, name);
    }
    *text = 0;
    put_value(&s, row);
    return *text ? text : NULL;
}

static const struct kind *shown;

static void print_rows(const json_t *rows)
{
    struct cli_table *t = cli_table_create(shown->heads, shown->n);
    const json_t *row;
    size_t r;

    json_array_foreach((json_t *)rows, r, row) {
        char text[CLI_COLUMNS][CLI_CELL_BYTES];
        const char *cells[CLI_COLUMNS];

        for (size_t i = 0; i < shown->n; i++)
            cells[i] = cell(row, shown->members[i], text[i], sizeof(text[i]));
        cli_table_row(t, cells);
    }
    cli_table_print(t, stdout);
    cli_table_destroy(t);
}

static int show(const char *program, const struct cli_common *common, const char *what)
{
    char names[128];
    struct fl_str list = FL_STR_ON(names);

    for (size_t i = 0; i < FL_LEN(kinds); i++) {
        if (strcmp(kinds[i].name, what) == 0) {
            shown = &kinds[i];
            return cli_show(program, common, shown->path, print_rows);
        }
        fl_str_add(&list, "%s%s", i ? ", " : "", kinds[i].name);
    }
    return cli_misused(program, "'%s' is none of %s", what, names);
}

int cli_list(int argc, char **argv)
{
    struct cli_common common = { 0 };
    struct fl_opts o = {
        .program = "furlong list", .usage = "nodes|devices|jobs|workers|groups|leases|ports [OPTION...]",
        .about = "One line for each.", .tables = { { NULL, cli_common_opts, &common } },
    };
    int rc = fl_opts_main(&o, argc, argv);

    if (rc >= 0)
        return rc;
    if (o.n_words != 1)
        return cli_misused(o.program, "one of nodes, devices, jobs, workers, groups, leases, ports is wanted");
    return show(o.program, &common, o.words[0]);
}

int cli_list_jobs(const char *program, const struct cli_common *common)
{
    return show(program, common, "jobs");
}
