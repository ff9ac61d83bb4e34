/* The page's own answers: pieces of lists in a stable order, devices with their processes, bad
 * queries refused. */
#include <jansson.h>
#include <stdlib.h>

#include "common/base/file.h"
#include "head/web/web.h"
#include "tests/t.h"
#include "tests/web/crowd.h"
#include "transport/http/http.h"

enum { NODES = 120, JOBS = 70 };

struct web {
    struct fl_loop *loop;
    struct head *head;
    struct http_server *server;
    struct http_client *client;
};

struct got {
    struct http_call call;
    bool done;
    struct http_answer answer;
    json_t *json;
};

static void on_done(struct http_call *c, enum fl_status st, struct http_answer *answer,
                    const struct fl_err *err)
{
    struct got *g = container_of(c, struct got, call);

    (void)err;
    t_int_eq(st, FL_OK);
    g->done = true;
    g->answer = *answer;
    *answer = (struct http_answer){ 0 };
}

static void start(struct web *w, const char *name, unsigned nodes, unsigned jobs)
{
    struct head_config cfg = { .state_dir = t_path(name),
                               .beat_ms = 3600 * 1000,
                               .silent_ms = 86400 * 1000 };
    struct http_config c = { .routes = head_routes(), .allowed = head_allows };
    struct fl_err err = { 0 };

    *w = (struct web){ 0 };
    t_ok(fl_loop_create(NULL, &w->loop, &err), &err);
    t_ok(head_create(w->loop, &cfg, &w->head, &err), &err);
    crowd_make(w->head, nodes, jobs);
    c.arg = w->head;
    t_ok(http_server_create(w->loop, &c, &w->server, &err), &err);
    t_ok(http_client_create(w->loop, &w->client, &err), &err);
}

static void end(struct web *w)
{
    http_client_destroy(w->client);
    http_server_destroy(w->server);
    head_destroy(w->head);
    fl_loop_destroy(w->loop);
}

static void get(struct web *w, const char *path, unsigned status, struct got *g)
{
    char url[512];
    struct fl_err err = { 0 };
    struct http_ask a = { .url = url };

    snprintf(url, sizeof(url), "http://127.0.0.1:%u%s", http_server_port(w->server), path);
    *g = (struct got){ .call.done = on_done };
    t_ok(http_start(w->client, &a, &g->call, &err), &err);
    t_until(w->loop, g->done, 5000);
    t_int_eq(g->answer.status, status, "%s: %.200s", path, g->answer.body);
    g->json = json_loads(g->answer.body, 0, NULL);
}

static void drop(struct got *g)
{
    json_decref(g->json);
    http_answer_fini(&g->answer);
}

static json_int_t number(const json_t *o, const char *name)
{
    return json_integer_value(json_object_get(o, name));
}

static const char *word(const json_t *o, const char *name)
{
    const char *s = json_string_value(json_object_get(o, name));

    return s ? s : "";
}

static const json_t *row(const struct got *g, const char *list, size_t i)
{
    return json_array_get(json_object_get(g->json, list), i);
}

static size_t rows(const struct got *g, const char *list)
{
    return json_array_size(json_object_get(g->json, list));
}

static void the_page_is_open_and_guarded_by_its_policy(void **unused)
{
    struct web w;
    struct got g;
    char policy[512];

    (void)unused;
    start(&w, "page", 0, 0);
    get(&w, "/", 200, &g);
    t_int_eq(g.answer.body_len, web_page.html.len);
    t_int_eq(memcmp(g.answer.body, web_page.html.data, web_page.html.len), 0);
    t_has(http_answer_header(&g.answer, "content-type", policy, sizeof(policy)), "text/html");
    t_has(http_answer_header(&g.answer, "content-security-policy", policy, sizeof(policy)),
          "default-src 'none'");
    t_has(policy, "script-src 'sha256-");
    t_has(g.answer.headers, "frame-ancestors 'none'");
    t_has(g.answer.headers, "require-trusted-types-for 'script'");
    t_has(web_page.policy, policy); /* whole: a header that was cut would guard nothing */
    t_has(policy, web_page.policy);
    drop(&g);
    for (const struct http_route *r = head_routes(); r->pattern; r++) {
        t_true(strcmp(r->pattern, "/") != 0 || r->open, "who has no token yet must see the page");
        t_true(!r->open || (strncmp(r->pattern, "/api/furlong", 12) != 0 &&
                            strncmp(r->pattern, "/api/jobs", 9) != 0),
               "%s must ask for the token", r->pattern);
    }
    end(&w);
}

static void jobs_come_newest_first_in_pieces(void **unused)
{
    struct web w;
    struct got g;

    (void)unused;
    start(&w, "jobs", 2, JOBS);
    get(&w, "/api/furlong/browse/jobs?first=0&count=3", 200, &g);
    t_int_eq(number(g.json, "total"), JOBS);
    t_int_eq(number(g.json, "found"), JOBS);
    t_int_eq(rows(&g, "jobs"), 3);
    t_str_eq(word(row(&g, "jobs", 0), "submission_id"), "train-live");
    t_str_eq(word(row(&g, "jobs", 1), "submission_id"), "job-69");
    t_str_eq(word(row(&g, "jobs", 2), "submission_id"), "job-68");
    drop(&g);
    get(&w, "/api/furlong/browse/jobs?first=68&count=50", 200, &g);
    t_int_eq(rows(&g, "jobs"), 2);
    t_str_eq(word(row(&g, "jobs", 1), "submission_id"), "job-1");
    drop(&g);
    get(&w, "/api/furlong/browse/jobs?first=1000", 200, &g);
    t_int_eq(rows(&g, "jobs"), 0);
    t_int_eq(number(g.json, "found"), JOBS);
    drop(&g);
    get(&w, "/api/furlong/browse/jobs?find=JOB-6&status=FAILED", 200, &g);
    for (size_t i = 0; i < rows(&g, "jobs"); i++)
        t_str_eq(word(row(&g, "jobs", i), "status"), "FAILED");
    t_int_eq(number(g.json, "found"), 3); /* 6, 62, 66 */
    drop(&g);
    get(&w, "/api/furlong/browse/jobs?find=onerror", 200, &g);
    t_int_eq(number(g.json, "found"), 1);
    t_has(word(row(&g, "jobs", 0), "entrypoint"), crowd_evil);
    drop(&g);
    end(&w);
}

static void a_job_has_its_processes_and_devices(void **unused)
{
    struct web w;
    struct got g;

    (void)unused;
    start(&w, "job", 2, JOBS);
    get(&w, "/api/furlong/browse/jobs/train-live", 200, &g);
    t_int_eq(number(g.json, "workers_found"), 4);
    t_str_eq(word(row(&g, "workers", 0), "role"), "driver");
    t_str_eq(word(row(&g, "workers", 1), "role"), "rollout");
    t_int_eq(number(row(&g, "workers", 2), "rank"), 1);
    t_str_eq(
        json_string_value(json_array_get(json_object_get(row(&g, "workers", 2), "devices"), 0)),
        "1");
    t_str_eq(word(row(&g, "workers", 3), "role"), "trainer");
    t_str_eq(word(row(&g, "workers", 3), "state"), "LIVE");
    t_str_eq(word(row(&g, "workers", 3), "node"), "n0");
    t_int_eq(number(g.json, "steps_next"), CROWD_STEPS + 1);
    t_true(number(g.json, "log_bytes") > 0);
    t_has(word(row(&g, "groups", 0), "layout"), crowd_evil);
    drop(&g);
    get(&w, "/api/furlong/browse/jobs/train-live?first=3&count=5", 200, &g);
    t_int_eq(rows(&g, "workers"), 1);
    drop(&g);
    get(&w, "/api/furlong/browse/jobs/none", 404, &g);
    t_has(word(g.json, "error"), "none");
    drop(&g);
    end(&w);
}

static void nodes_show_what_runs_on_their_devices(void **unused)
{
    struct node *n;
    struct web w;
    struct got g;

    (void)unused;
    start(&w, "nodes", NODES, JOBS);
    for (n = w.head->nodes; strcmp(n->rec->name, "n0") != 0; n = n->hh.next)
        ;
    n->slowed_told = true;
    n->slowed = 1u << 1;
    get(&w, "/api/furlong/browse/nodes?count=200", 200, &g);
    t_int_eq(number(g.json, "total"), NODES);
    t_str_eq(word(row(&g, "nodes", 0), "state"), "SUSPECT");
    t_str_eq(word(row(&g, "nodes", 0), "name"), "n5");
    t_str_eq(word(row(&g, "nodes", 1), "name"), "n102");
    t_str_eq(word(row(&g, "nodes", 2), "name"), "n0");
    t_str_eq(word(row(&g, "nodes", 119), "name"), "n119"); /* as people count */
    const json_t *d0 = json_array_get(json_object_get(row(&g, "nodes", 2), "devices"), 0);
    const json_t *d1 = json_array_get(json_object_get(row(&g, "nodes", 2), "devices"), 1);
    t_int_eq(json_array_size(json_object_get(d0, "processes")), 2);
    t_int_eq(json_array_size(json_object_get(d1, "processes")), 1);
    t_int_eq(number(d0, "leases"), 1);
    t_true(json_is_false(json_object_get(d0, "slowed")) &&
           json_is_true(json_object_get(d1, "slowed")));
    t_str_eq(word(json_array_get(json_object_get(d1, "processes"), 0), "role"), "rollout");
    t_int_eq(json_array_size(json_object_get(row(&g, "nodes", 2), "others")), 0);
    t_int_eq(json_array_size(json_object_get(row(&g, "nodes", 3), "others")), 1);
    drop(&g);
    get(&w, "/api/furlong/browse/nodes?order=memory&count=200", 200, &g);
    t_str_eq(word(row(&g, "nodes", 0), "name"), "n11");
    t_str_eq(word(row(&g, "nodes", NODES - 1), "name"), "n7"); /* it has told nothing yet */
    t_true(json_is_null(json_object_get(row(&g, "nodes", NODES - 1), "memory_available")));
    drop(&g);
    get(&w, "/api/furlong/browse/nodes?find=10.1.0.11&state=READY", 200, &g);
    t_int_eq(number(g.json, "found"), 11); /* .11 and .110 to .119 */
    drop(&g);
    end(&w);
}

static void write_steps(const char *dir, unsigned n)
{
    char path[512];
    struct fl_str text = FL_STR_HEAP(1 << 20);
    struct fl_err err;

    t_ok(fl_mkdirs(dir, &err), &err);
    fl_str_add(&text, "not JSON\n[1]\n\n");
    for (unsigned i = 0; i < n; i++)
        fl_str_add(&text, "{\"step\":%u}\n", i);
    fl_str_add(&text, "{\"step\":%u", n); /* no end: it was being written */
    snprintf(path, sizeof(path), "%s/steps.jsonl", dir);
    t_ok(fl_file_write(path, 0600, text.data, text.len, &err), &err);
    fl_str_fini(&text);
}

/* The head ends and starts again on its journal. */
static void again(struct web *w, const char *name)
{
    end(w);
    start(w, name, 0, 0);
}

static void steps_of_runs_before_this_head_are_recalled(void **unused)
{
    struct web w;
    struct got g;
    struct fl_err err = { 0 };
    char dir[512];

    (void)unused;
    snprintf(dir, sizeof(dir), "%s", t_path("run"));
    write_steps(dir, HEAD_STEPS_KEPT + 5);
    start(&w, "recall", 1, 3);
    Fl__JobRec rec = *job_named(w.head, "job-1")->rec;
    rec.run_dir = dir;
    t_ok(head_record(w.head, REC_JOB, &rec, NULL, &err), &err);
    get(&w, "/api/furlong/jobs/job-1/steps?from=0", 200, &g);
    t_int_eq(rows(&g, "steps"), 0); /* it was submitted since the start: all that came is here */
    drop(&g);
    again(&w, "recall");
    get(&w, "/api/furlong/jobs/job-1/steps?from=0", 200, &g);
    t_int_eq(rows(&g, "steps"), 0);
    t_str_eq(word(g.json, "state"), "RUNNING"); /* not the end: they are on their way */
    drop(&g);
    get(&w, "/api/furlong/jobs/job-1/steps?from=0&wait_ms=5000", 200, &g);
    t_true(rows(&g, "steps") > 0);
    t_int_eq(number(row(&g, "steps", 0), "step"), 5); /* the last of them */
    drop(&g);
    char path[128];
    snprintf(path, sizeof(path), "/api/furlong/jobs/job-1/steps?from=%d", HEAD_STEPS_KEPT);
    get(&w, path, 200, &g);
    t_int_eq(number(g.json, "next"), HEAD_STEPS_KEPT);
    t_str_eq(word(g.json, "state"), "SUCCEEDED");
    drop(&g);
    get(&w, "/api/furlong/jobs/job-2/steps?from=0&wait_ms=5000", 200,
        &g); /* its folder is nowhere */
    t_int_eq(rows(&g, "steps"), 0);
    drop(&g);
    again(&w, "recall"); /* ends while it reads */
    get(&w, "/api/furlong/jobs/job-1/steps?from=0", 200, &g);
    drop(&g);
    end(&w);
}

static void sums_of_many_nodes_are_right(void **unused)
{
    struct web w;
    struct got g;

    (void)unused;
    start(&w, "sums", 2000, 3);
    get(&w, "/api/furlong/status", 200, &g);
    const json_t *all = json_object_get(g.json, "resources");
    t_int_eq(number(json_object_get(all, "memory"), "total"), 2000ll * 512 << 30);
    t_int_eq(number(json_object_get(all, "GPU"), "total"), 4000);
    t_int_eq(number(json_object_get(all, "GPU"), "used"), 2);
    drop(&g);
    end(&w);
}

static void bad_queries_name_the_place(void **unused)
{
    static const struct {
        const char *path, *says;
    } bad[] = {
        { "/api/furlong/browse/jobs?first=-1", "first" },
        { "/api/furlong/browse/jobs?count=201", "count" },
        { "/api/furlong/browse/jobs?count=x", "count" },
        { "/api/furlong/browse/jobs?status=GREEN", "GREEN" },
        { "/api/furlong/browse/nodes?state=GREEN", "state" },
        { "/api/furlong/browse/nodes?order=colour", "order" },
        { "/api/furlong/browse/jobs/job-1?count=1e9", "count" },
    };
    struct web w;
    struct got g;

    (void)unused;
    start(&w, "bad", 2, 3);
    for (size_t i = 0; i < FL_LEN(bad); i++) {
        get(&w, bad[i].path, 400, &g);
        t_has(word(g.json, "error"), bad[i].says);
        drop(&g);
    }
    end(&w);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_page_is_open_and_guarded_by_its_policy),
        cmocka_unit_test(jobs_come_newest_first_in_pieces),
        cmocka_unit_test(a_job_has_its_processes_and_devices),
        cmocka_unit_test(nodes_show_what_runs_on_their_devices),
        cmocka_unit_test(steps_of_runs_before_this_head_are_recalled),
        cmocka_unit_test(sums_of_many_nodes_are_right),
        cmocka_unit_test(bad_queries_name_the_place),
    };

    return t_run("browse", tests);
}
