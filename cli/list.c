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
    void (*for_people)(json_t *row); /* what the columns show of it otherwise than --json does; or NULL */
};
#define COLUMNS(...) (const char *const[]){ __VA_ARGS__ }

static void job_for_people(json_t *row)
{
    char why[CLI_CELL_BYTES];

    cli_job_why(row, why, sizeof(why));
    json_object_set_new(row, "why", *why ? json_string(why) : json_null());
}

static void device_for_people(json_t *row)
{
    json_t *by = json_object_get(row, "held_by");

    if (json_is_true(json_object_get(row, "logical")))
        json_object_set_new(row, "name", json_string("logical"));
    if (json_is_true(json_object_get(row, "slowed")))
        json_object_set_new(row, "name",
                            json_sprintf("%s, slowed by heat or the power brake", cli_text(row, "name")));
    if (json_is_true(json_object_get(row, "told")) && json_array_size(by) == 0)
        json_array_append_new(by, json_string("nobody"));
}

static const struct kind kinds[] = {
    { "nodes", "/api/furlong/nodes",
      COLUMNS("name", "address", "state", "GPU used", "GPU", "CPU used", "CPU", "workers", "id"),
      COLUMNS("name", "address", "state", "resources.GPU.used", "resources.GPU.total",
              "resources.CPU.used", "resources.CPU.total", "workers", "id"), 9, NULL },
    { "devices", "/api/furlong/devices", COLUMNS("node", "device", "name", "uuid", "pci", "given to", "held by"),
      COLUMNS("node", "id", "name", "uuid", "pci", "given_to", "held_by"), 7, device_for_people },
    { "jobs", "/api/furlong/jobs/", COLUMNS("job", "status", "exit", "entrypoint", "why"),
      COLUMNS("submission_id", "status", "exit_code", "entrypoint", "why"), 5, job_for_people },
    { "workers", "/api/furlong/workers",
      COLUMNS("role", "rank", "attempt", "state", "node", "pid", "job", "why"),
      COLUMNS("role", "rank", "attempt", "state", "node", "pid", "job", "why"), 8, NULL },
    { "groups", "/api/furlong/groups", COLUMNS("group", "job", "state", "strategy"),
      COLUMNS("id", "job", "state", "strategy"), 4, NULL },
    { "leases", "/api/furlong/leases", COLUMNS("lease", "node", "job", "bundle", "state", "devices"),
      COLUMNS("id", "node", "job", "bundle", "state", "devices"), 6, NULL },
    { "ports", "/api/furlong/ports", COLUMNS("node", "port", "what", "role", "rank", "pid", "job"),
      COLUMNS("node", "port", "name", "role", "rank", "pid", "job"), 7, NULL },
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
    json_t *row;
    size_t r;

    json_array_foreach((json_t *)rows, r, row) {
        char text[CLI_COLUMNS][CLI_CELL_BYTES];
        const char *cells[CLI_COLUMNS];

        if (shown->for_people)
            shown->for_people(row);
        for (size_t i = 0; i < shown->n; i++)
            cells[i] = cell(row, shown->members[i], text[i], sizeof(text[i]));
        cli_table_row(t, cells);
    }
    cli_table_print(t, stdout);
    cli_table_destroy(t);
}

static void kind_names(char *out, size_t cap, const char *between)
{
    struct fl_str list = { out, 0, cap, cap - 1, false, false };

    for (size_t i = 0; i < FL_LEN(kinds); i++)
        fl_str_add(&list, "%s%s", i ? between : "", kinds[i].name);
}

static int show(const char *program, const struct cli_common *common, const char *what)
{
    const char *best = NULL;
    unsigned least = 4;
    char names[128];

    for (size_t i = 0; i < FL_LEN(kinds); i++) {
        unsigned far = fl_edit_distance(what, kinds[i].name);

        if (far == 0) {
            shown = &kinds[i];
            return cli_show(program, common, shown->path, print_rows);
        }
        best = far < least ? kinds[i].name : best;
        least = far < least ? far : least;
    }
    kind_names(names, sizeof(names), ", ");
    return cli_misused(program, "'%s' is none of %s%s%s%s", what, names, best ? "; did you mean " : "", best ? best : "", best ? "?" : "");
}

int cli_list(int argc, char **argv)
{
    struct cli_common common = { 0 };
    char names[128], usage[160];
    struct fl_opts o = {
        .program = "furlong list", .usage = usage, .about = "One line for each.", .tables = { { NULL, cli_common_opts, &common } },
    };

    kind_names(names, sizeof(names), "|");
    snprintf(usage, sizeof(usage), "%s [OPTION...]", names);
    int rc = fl_opts_main(&o, argc, argv);

    if (rc >= 0)
        return rc;
    kind_names(names, sizeof(names), ", ");
    if (o.n_words != 1)
        return cli_misused(o.program, "one of %s is wanted", names);
    return show(o.program, &common, o.words[0]);
}

int cli_list_jobs(const char *program, const struct cli_common *common)
{
    return show(program, common, "jobs");
}
