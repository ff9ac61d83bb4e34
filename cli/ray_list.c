#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "cli/ray.h"
#include "cli/table.h"
#include "cli/yaml_print.h"
#include "common/base/str.h"

/* ==== which rows there are ========================================================================= */
struct list {
    const char *address, *format, *filters[16];
    size_t n_filters;
    int64_t limit, timeout_s;
    bool detail;
};
static const char *const kinds[] = { "actors", "jobs", "placement-groups", "nodes", "workers", "tasks", "objects", "runtime-envs", "cluster-events" };
static const struct fl_opt opts[] = {
    { FL_OPT_TEXT, "address", .arg = "URL|HOST:PORT", .at = offsetof(struct list, address), .help = "of the head" },
    { FL_OPT_TEXT, "format", .arg = "FORMAT", .choices = "default|json|table|yaml", .fallback = "default", .at = offsetof(struct list, format), .help = "how rows are shown; yaml with --detail" },
    { FL_OPT_INT, "limit", .arg = "N", .fallback = "100", .min = 1, .max = 10000, .at = offsetof(struct list, limit), .help = "rows at most" },
    { FL_OPT_INT, "timeout", .arg = "SECONDS", .fallback = "30", .min = 1, .max = 3600, .at = offsetof(struct list, timeout_s), .help = "to wait for the head" },
    { FL_OPT_SWITCH, "detail", .at = offsetof(struct list, detail), .help = "all that is known" },
    { 0 }
};
static const struct ray_flag passed[] = { { "log-style", true }, { "log-color", true }, { "verbose", false }, { 0 } };

/* --filter may come several times: they are taken out of argv first. */
static int take_filters(struct list *l, int argc, char **argv)
{
    int out = 0;

    for (int i = 0; i < argc; i++) {
        const char *value = NULL;

        if ((strcmp(argv[i], "-f") == 0 || strcmp(argv[i], "--filter") == 0) && i + 1 < argc)
            value = argv[++i];
        else if (strncmp(argv[i], "--filter=", 9) == 0)
            value = argv[i] + 9;
        if (value && l->n_filters < FL_LEN(l->filters))
            l->filters[l->n_filters++] = value;
        else
            argv[out++] = argv[i];
    }
    argv[out] = NULL;
    return out;
}

static void add_escaped(struct fl_str *s, const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.~", text[i]))
            fl_str_add_bytes(s, text + i, 1);
        else
            fl_str_add(s, "%%%02X", (unsigned char)text[i]);
}

static int make_path(const struct list *l, const struct fl_opts *o, const char *kind, struct fl_str *p)
{
    char name[40];

    (void)FL_COPY(name, kind);
    for (char *c = name; *c; c++)
        *c = *c == '-' ? '_' : *c;
    fl_str_add(p, "/api/v0/%s?limit=%lld&timeout=%lld&detail=%d", name, (long long)l->limit, (long long)l->timeout_s, l->detail);
    for (size_t i = 0; i < l->n_filters; i++) {
        const char *eq = strchr(l->filters[i], '='), *end = eq && eq > l->filters[i] && eq[-1] == '!' ? eq - 1 : eq;

        if (!eq || end == l->filters[i])
            return ray_misused(o, "The given filter %s is not supported. Supported filters: =, !=", l->filters[i]);
        fl_str_add(p, "&filter_keys=");
        add_escaped(p, l->filters[i], (size_t)(end - l->filters[i]));
        fl_str_add(p, "&filter_predicates=%s&filter_values=", end == eq ? "%3D" : "%21%3D");
        add_escaped(p, eq + 1, strlen(eq + 1));
    }
    return p->cut ? ray_misused(o, "the filters are longer than %zu bytes", p->max) : -1;
}

/* ==== printing ===================================================================================== */
static void cell_of(const json_t *v, struct fl_str *s)
{
    const char *key;
    json_t *item;
    size_t i;

    if (json_is_string(v)) {
        fl_str_add(s, "%s", json_string_value(v));
    } else if (json_is_object(v)) {
        json_object_foreach((json_t *)v, key, item) {
            fl_str_add(s, "%s%s: ", s->len ? "\n" : "", key);
            if (json_is_string(item))
                fl_str_add(s, "%s", json_string_value(item));
            else
                cell_of(item, s);
        }
    } else if (json_is_array(v)) {
        json_array_foreach((json_t *)v, i, item) {
            fl_str_add(s, i ? "\n" : "");
            cell_of(item, s);
        }
    } else if (v && !json_is_null(v)) {
        char *text = ray_repr(v);

        fl_str_add(s, "%s", text);
        free(text);
    }
}

/* Cells may have several lines, and go below each other, as in Ray's tables. */
static void print_table(const json_t *rows)
{
    enum { COLUMNS = 24, CELL_BYTES = 4096 };
    const json_t *first = json_array_get(rows, 0), *row;
    const char *names[COLUMNS], *name;
    size_t width[COLUMNS], n = 0, r;
    json_t *v;
    struct fl_str *cells = calloc(json_array_size(rows) * COLUMNS + 1, sizeof(*cells));
    const char **at = calloc(json_array_size(rows) * COLUMNS + 1, sizeof(*at)); /* what of it is not printed yet */

    if (!cells || !at)
        abort();
    json_object_foreach((json_t *)first, name, v)
        if (n < COLUMNS)
            names[n++] = name;
    for (size_t i = 0; i < n; i++) {
        width[i] = strlen(names[i]);
        json_array_foreach((json_t *)rows, r, row) {
            struct fl_str *s = &cells[r * COLUMNS + i];

            *s = (struct fl_str)FL_STR_HEAP(CELL_BYTES);
            cell_of(json_object_get(row, names[i]), s);
            at[r * COLUMNS + i] = fl_str_text(s);
            for (const char *line = fl_str_text(s); line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL)
                if (strcspn(line, "\n") > width[i])
                    width[i] = strcspn(line, "\n");
        }
    }
    fputs("    ", stdout);
    for (size_t i = 0; i < n; i++) {
        char head[64];

        snprintf(head, sizeof(head), "%s", names[i]);
        for (char *c = head; *c; c++)
            *c = (char)(*c >= 'a' && *c <= 'z' ? *c - 32 : *c);
        printf("%-*s%s", i + 1 < n ? (int)width[i] : 0, head, i + 1 < n ? "  " : "\n");
    }
    json_array_foreach((json_t *)rows, r, row)
        for (bool more = true, top = true; more; top = false) {
            if (top)
                printf("%2zu  ", r);
            else
                fputs("    ", stdout);
            more = false;
            for (size_t i = 0; i < n; i++) {
                const char *c = at[r * COLUMNS + i];
                size_t len = strcspn(c, "\n");

                printf("%.*s%*s%s", (int)len, c, i + 1 < n ? (int)(width[i] - len) : 0, "", i + 1 < n ? "  " : "\n");
                at[r * COLUMNS + i] = c + len + (c[len] != 0);
                more |= *at[r * COLUMNS + i] != 0;
            }
        }
    for (size_t i = 0; i < json_array_size(rows) * COLUMNS; i++)
        fl_str_fini(&cells[i]);
    free(cells);
    free(at);
}

static void print_default(const json_t *data, const json_t *rows)
{
    char now[32];

    if (!json_array_size(rows)) {
        puts("No resource in the cluster");
        return;
    }
    printf("\n======== List: %s ========\nStats:\n------------------------------\nTotal: %lld\n\n"
           "Table:\n------------------------------\n", ray_clock(now), (long long)cli_int(data, "total"));
    print_table(rows);
    putchar('\n');
}

/* As Ray's command shows them, in whichever format: sizes as "15.766 GiB". */
static void name_sizes(json_t *rows)
{
    static const char *const sizes[] = { "memory", "object_store_memory" };
    json_t *row;
    size_t r;

    json_array_foreach(rows, r, row)
        for (size_t i = 0; i < FL_LEN(sizes); i++) {
            json_t *all = json_object_get(row, "resources_total"), *v = json_object_get(all, sizes[i]);

            if (json_is_number(v))
                json_object_set_new(all, sizes[i], json_sprintf("%.3f GiB", json_number_value(v) / (1 << 30)));
        }
}

/* The rows of an answer: {"result": true, "data": {"result": {"result": [...], "total": N}}}. -1: *data is it. */
static int get(const char *address, const char *path, uint32_t timeout_ms, json_t **answer, const json_t **data)
{
    struct cli_cluster c;
    struct fl_err err = { 0 };

    if (ray_find_api(address, &c, &err) != FL_OK)
        return ray_failed("ConnectionError", "%s", err.text);
    if (cli_call(&c, "GET", path, NULL, timeout_ms, answer, &err) != FL_OK)
        return ray_failed("ray.util.state.exception.ServerUnavailable", "%s", err.text);
    *data = json_object_get(json_object_get(*answer, "data"), "result");
    if (json_is_true(json_object_get(*answer, "result")))
        return -1;
    int rc = ray_failed("ray.util.state.exception.RayStateApiException", "API server internal error. See dashboard.log file "
                        "for more details. Error: %s", cli_text(*answer, "msg"));

    json_decref(*answer);
    return rc;
}

int ray_list(int argc, char **argv)
{
    struct list l = { 0 };
    struct fl_opts o = { .program = "ray list", .usage = "[OPTIONS] {actors|jobs|placement-groups|nodes|workers|tasks|objects|runtime-envs|cluster-events}",
                         .about = "One row for each.", .tables = { { NULL, opts, &l } } };
    struct fl_str path = FL_STR_HEAP(4096);
    json_t *answer;
    const json_t *data;
    bool known = false;
    int rc;

    argc = take_filters(&l, argc, argv);
    rc = ray_opts(&o, passed, argc, argv);
    if (rc >= 0)
        return rc;
    if (o.n_words != 1)
        return ray_misused(&o, "Missing argument '{actors|jobs|placement-groups|nodes|workers|tasks|objects|runtime-envs|cluster-events}'.");
    for (size_t i = 0; i < FL_LEN(kinds); i++)
        known |= strcmp(kinds[i], o.words[0]) == 0;
    if (!known)
        return ray_misused(&o, "Invalid value for '{actors|jobs|placement-groups|nodes|workers|tasks|objects|runtime-envs|cluster-events}': "
                           "'%s' is not one of 'actors', 'jobs', 'placement-groups', 'nodes', 'workers', 'tasks', 'objects', "
                           "'runtime-envs', 'cluster-events'.", o.words[0]);
    rc = make_path(&l, &o, o.words[0], &path);
    if (rc < 0)
        rc = get(l.address, fl_str_text(&path), (uint32_t)l.timeout_s * 1000, &answer, &data);
    fl_str_fini(&path);
    if (rc >= 0)
        return rc;
    json_t *rows = json_object_get(data, "result");

    name_sizes(rows);
    if (strcmp(l.format, "json") == 0) {
        json_dumpf(rows, stdout, JSON_ENCODE_ANY);
        putchar('\n');
    } else if (strcmp(l.format, "yaml") == 0 || (l.detail && strcmp(l.format, "default") == 0)) {
        char *text = yaml_text(rows);

        puts(text); /* and an empty line, as Ray's */
        free(text);
    } else {
        print_default(data, rows);
    }
    json_decref(answer);
    return fflush(stdout) == 0 ? 0 : 1;
}

/* ==== summary ====================================================================================== */
static const struct summary {
    const char *name, *title, *group;
    const char *const totals[4];
} summaries[] = {
    { "tasks",   "Tasks",   "func_name", { "total_actor_scheduled", "total_actor_tasks", "total_tasks" } },
    { "actors",  "Actors",  "class",     { "total_actors" } },
    { "objects", "Objects", "callsite",  { "total_objects", "total_size_mb" } },
};

static void print_summary(const struct summary *s, const json_t *data)
{
    const json_t *cluster = json_object_get(json_object_get(data, "node_id_to_summary"), "cluster"), *row;
    const char *name;
    char now[32];
    size_t n = 0;
    struct fl_str counts = FL_STR_HEAP(4096);

    printf("\n======== %s Summary: %s ========\nStats:\n------------------------------------\n", s->title, ray_clock(now));
    for (size_t i = 0; s->totals[i]; i++)
        printf("%s: %lld\n", s->totals[i], (long long)cli_int(cluster, s->totals[i]));
    printf("\n\nTable (group by %s):\n------------------------------------\n", s->group);
    json_object_foreach(json_object_get(cluster, "summary"), name, row) {
        if (n == 0)
            printf("    %-40s  STATE_COUNTS\n", *s->group == 'c' && s->group[1] == 'l' ? "CLASS_NAME" : "FUNC_OR_CLASS_NAME");
        counts.len = 0;
        cell_of(json_object_get(row, "state_counts"), &counts);
        for (char *c = counts.data; c && *c; c++)
            *c = *c == '\n' ? ',' : *c;
        printf("%-3zu %-40s  %s\n", n++, name, fl_str_text(&counts));
    }
    putchar('\n');
    fl_str_fini(&counts);
}

int ray_summary(int argc, char **argv)
{
    struct list l = { 0 };
    struct fl_opts o = { .program = "ray summary", .usage = "{tasks|actors|objects} [OPTIONS]", .about = "Counts by state.",
                         .tables = { { NULL, opts, &l } } };
    char path[64];
    json_t *answer;
    const json_t *data;
    int rc = ray_opts(&o, passed, argc, argv);

    if (rc >= 0)
        return rc;
    for (size_t i = 0; o.n_words == 1 && i < FL_LEN(summaries); i++) {
        if (strcmp(summaries[i].name, o.words[0]) != 0)
            continue;
        snprintf(path, sizeof(path), "/api/v0/%s/summarize", o.words[0]);
        rc = get(l.address, path, (uint32_t)l.timeout_s * 1000, &answer, &data);
        if (rc >= 0)
            return rc;
        const json_t *inner = json_object_get(data, "result");

        print_summary(&summaries[i], inner ? inner : data);
        json_decref(answer);
        return 0;
    }
    return ray_misused(&o, "No such command '%s'.", o.n_words ? o.words[0] : "");
}
