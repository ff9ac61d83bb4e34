/* What `ray status` prints, and which line of a launcher is a fan-out: pure */
#include <jansson.h>
#include <stdlib.h>

#include "cli/ray.h"
#include "tests/t.h"

static json_t *load(const char *text)
{
    json_error_t bad;
    json_t *o = json_loads(text, 0, &bad);

    t_true(o != NULL, "%s", bad.text);
    return o;
}

static void status(void **state)
{
    static const char wanted[] =
        "======== Autoscaler status: 2026-11-29 20:25:06.675753 ========\n"
        "Node status\n"
        "---------------------------------------------------------------\n"
        "Active:\n 1 node_aa\nPending:\n (no pending nodes)\nRecent failures:\n node_bb: NodeTerminated (ip: 10.0.0.2)\n\n"
        "Resources\n"
        "---------------------------------------------------------------\n"
        "Total Usage:\n 1.5/256.0 CPU\n 4.0/128.0 GPU (4.0 used of 4.0 reserved in placement groups)\n 0.0001/1.0 disk\n 0B/1.62TiB memory\n\n"
        "From request_resources:\n (none)\nPending Demands:\n j1, a placement group: 1+ pending: GPU: wanted 200, the cluster has 128\n";
    json_t *s = load("{\"resources\":{\"GPU\":{\"used\":4,\"total\":128},\"CPU\":{\"used\":1.5,\"total\":256},\"node:10.0.0.1\":{\"used\":0,\"total\":1},"
                     "\"memory\":{\"used\":0,\"total\":1781210836336},\"disk\":{\"used\":0.0001,\"total\":1}},"
                     "\"waiting\":[{\"job\":\"j1\",\"what\":\"a placement group\",\"why\":\"GPU: wanted 200, the cluster has 128\"}]}");
    json_t *n = load("[{\"id\":\"aa\",\"address\":\"10.0.0.1\",\"state\":\"READY\"},{\"id\":\"bb\",\"address\":\"10.0.0.2\",\"state\":\"LOST\"}]");
    json_t *g = load("[{\"state\":\"PLACED\",\"bundles\":[{\"amounts\":{\"GPU\":1}},{\"amounts\":{\"GPU\":3}}]},{\"state\":\"ENDED\",\"bundles\":[{\"amounts\":{\"GPU\":9}}]}]");
    char *text = ray_status_text(s, n, g, false, "2026-11-29 20:25:06.675753");

    (void)state;
    t_str_eq(text, wanted);
    free(text);
    json_decref(s);
    json_decref(n);
    json_decref(g);
}

static void fan_outs(void **state)
{
    static const struct { const char *name, *line; bool wanted; } rows[] = {
        { "Miles' own", "bash -c pkill -9 sglang ; ray stop --force ; pkill -9 miles ; ray start --address=10.0.0.1:6379 --num-gpus 8", true },
        { "in two words", "sh -c ray stop; ray start --address 10.0.0.1:6379", true },
        { "quoted", "sh -c ray stop; ray start --address='10.0.0.1:6379' --block", true },
        { "another head", "sh -c ray stop; ray start --address=10.0.0.2:6379", false },
        { "a longer port", "sh -c ray stop; ray start --address=10.0.0.1:63790", false },
        { "a stop alone", "bash -c ray stop --force", false },
        { "a start alone", "bash -c ray start --address=10.0.0.1:6379", false },
        { "start before stop", "bash -c ray start --address=10.0.0.1:6379; sleep 9; ray stop", false },
        { "a shell", "-bash", false },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++)
        t_int_eq(ray_is_fan_out(rows[i].line, "10.0.0.1:6379"), rows[i].wanted, "%s", rows[i].name);
}

static void reprs(void **state)
{
    static const struct { const char *json, *wanted; } rows[] = {
        { "[\"sh\",\"-c\",\"echo hi\"]", "['sh', '-c', 'echo hi']" },
        { "[\"it's\"]", "[\"it's\"]" },
        { "[\"both ' and \\\"\"]", "['both \\' and \"']" },
        { "{\"a\":null,\"b\":true,\"c\":1.5,\"d\":2.0,\"e\":-3}", "{'a': None, 'b': True, 'c': 1.5, 'd': 2.0, 'e': -3}" },
        { "[\"a\\nb\\t\\u0001\"]", "['a\\nb\\t\\x01']" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        json_t *v = load(rows[i].json);
        char *text = ray_repr(v);

        t_str_eq(text, rows[i].wanted);
        free(text);
        json_decref(v);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = { cmocka_unit_test(status), cmocka_unit_test(fan_outs), cmocka_unit_test(reprs) };

    return t_run("status_text", tests);
}
