/* Host lists, and what an answer of the head says of who has joined */
#include <jansson.h>
#include <stdlib.h>

#include "cli/hosts.h"
#include "cli/wait.h"
#include "common/base/file.h"
#include "tests/t.h"

static void lists(void **state)
{
    static const struct { const char *list, *wanted; } rows[] = {
        { "a,b c\td", "a b c d" },
        { "n[1-3,5]", "n1 n2 n3 n5" },
        { "n[08-11]", "n08 n09 n10 n11" },
        { "r[1-2]c[0,3]-x,m", "r1c0-x r1c3-x r2c0-x r2c3-x m" },
        { "a,b,a", "a b" },
        { "root@10.0.0.7,fd00::1", "root@10.0.0.7 fd00::1" },
        { "", "" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct hosts h = { 0 };
        struct fl_err err = { 0 };
        char got[256] = "";

        t_ok(hosts_parse(rows[i].list, &h, &err), &err);
        for (size_t k = 0; k < h.n; k++)
            snprintf(got + strlen(got), sizeof(got) - strlen(got), "%s%s", k ? " " : "", h.names[k]);
        t_str_eq(got, rows[i].wanted, "%s", rows[i].list);
        hosts_free(&h);
    }
}

static void bad_lists(void **state)
{
    static const struct { const char *list, *wanted; } rows[] = {
        { "n[1-", "] is missing" },   { "n[]", "nothing between" },      { "n[a]", "a number is wanted" },
        { "n[5-2]", "no range" },     { "n[1-]", "behind the dash" },    { "n[1;2]", "no range" },
        { "n[0-99999999]", "no range" }, { "-oProxyCommand=x", "no host name" }, { "a;b", "no host name" },
        { "$(x)", "no host name" },   { "n[1-9999],m[1-9999]", "more than 10000" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct hosts h = { 0 };
        struct fl_err err = { 0 };

        t_true(hosts_parse(rows[i].list, &h, &err) != FL_OK, "%s", rows[i].list);
        t_has(err.text, rows[i].wanted);
        hosts_free(&h);
    }
}

static void files(void **state) /* a blank line and a comment */
{
    static const char text[] = "# rack\nn1 slots=8\n\n  n2:4\nroot@n3 max_slots=2 # old\nn[4-5]\nfd00::1\n";
    struct hosts h = { 0 };
    struct fl_err err = { 0 };

    (void)state;
    t_ok(fl_file_write(t_path("hosts"), 0600, text, sizeof(text) - 1, &err), &err);
    t_ok(hosts_read(t_path("hosts"), &h, &err), &err);
    t_int_eq(h.n, 6);
    t_str_eq(h.names[1], "n2");
    t_str_eq(h.names[5], "fd00::1");
    t_str_eq(host_bare(h.names[2]), "n3");
    hosts_free(&h);
    t_ok(fl_file_write(t_path("hosts"), 0600, "n1\nn[2\n", 7, &err), &err);
    t_true(hosts_read(t_path("hosts"), &h, &err) == FL_INVALID);
    t_has(err.text, "line 2: ");
    hosts_free(&h);
    t_ok(fl_file_write(t_path("hosts"), 0600, "# none\n", 7, &err), &err);
    t_true(hosts_read(t_path("hosts"), &h, &err) == FL_INVALID);
    t_has(err.text, "names no host");
    hosts_free(&h);
}

static json_t *three_nodes(void)
{
    return json_loads("[{\"name\":\"n1\",\"address\":\"10.0.0.1\",\"state\":\"READY\",\"resources\":{\"GPU\":{\"used\":0,\"total\":4}}},"
                      "{\"name\":\"n2.cluster.local\",\"address\":\"10.0.0.2\",\"state\":\"READY\",\"resources\":{\"GPU\":{\"used\":0,\"total\":4}}},"
                      "{\"name\":\"n3\",\"address\":\"10.0.0.3\",\"state\":\"LOST\",\"resources\":{\"GPU\":{\"used\":0,\"total\":4}}}]", 0, NULL);
}

static void joined(void **state)
{
    static const struct { const char *names; int64_t nodes; double gpus; size_t joined, wanted; bool enough; const char *missing; } rows[] = {
        { "n1,n2",       0, 0,  2, 2, true,  "" },
        { "n1,n2,n3",    0, 0,  2, 3, false, "n3" }, /* lost is not there */
        { "n1,10.0.0.2", 0, 0,  2, 2, true,  "" },
        { "root@N1",     0, 0,  1, 1, true,  "" },
        { "n1,x[1-12]",  0, 0,  1, 13, false, "x1, x2, x3, x4, x5, x6, x7, x8 and 4 more" },
        { "10.0.0.20",   0, 0,  0, 1, false, "10.0.0.20" },
        { NULL,          2, 0,  2, 2, true,  "" },
        { NULL,          3, 0,  2, 3, false, "" },
        { NULL,          0, 8,  2, 0, true,  "" },
        { NULL,          0, 9,  2, 0, false, "" },
        { "n1",          0, 9,  1, 1, false, "" },
    };
    json_t *nodes = three_nodes();

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct hosts h = { 0 };
        struct wait_view v;
        struct wait_for w = { .names = rows[i].names ? &h : NULL, .nodes = rows[i].nodes, .gpus = rows[i].gpus };

        t_ok(hosts_parse(rows[i].names ? rows[i].names : "", &h, NULL), NULL);
        wait_look(nodes, &w, &v);
        t_int_eq(v.joined, rows[i].joined, "row %zu", i);
        t_int_eq(v.wanted, rows[i].wanted, "row %zu", i);
        t_int_eq(v.enough, rows[i].enough, "row %zu", i);
        t_str_eq(v.missing, rows[i].missing, "row %zu", i);
        hosts_free(&h);
    }
    json_decref(nodes);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists), cmocka_unit_test(bad_lists), cmocka_unit_test(files), cmocka_unit_test(joined),
    };

    return t_run("hosts", tests);
}
