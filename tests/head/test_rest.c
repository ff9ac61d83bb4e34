/* The HTTP face, over a real socket: what commands and Ray's clients read. */
#include <jansson.h>
#include <stdlib.h>

#include "tests/head/run.h"
#include "transport/http/http.h"

struct web { /* a run, served */
    struct run run;
    struct http_server *server;
    struct http_client *client;
    char url[64];
};

struct got { /* one request and what came back */
    struct http_call call;
    bool done;
    enum fl_status st;
    struct http_answer answer;
    json_t *json;
};

static void on_done(struct http_call *c, enum fl_status st, struct http_answer *answer,
                    const struct fl_err *err)
{
    struct got *g = container_of(c, struct got, call);

    (void)err;
    g->done = true;
    g->st = st;
    if (answer) {
        g->answer = *answer;
        *answer = (struct http_answer){ 0 };
    }
}

static void web_serve(struct web *w)
{
    struct fl_err err = { 0 };
    struct http_config c = { .routes = head_routes(),
                             .arg = w->run.rig.head,
                             .allowed = head_allows };

    t_ok(http_server_create(w->run.rig.loop, &c, &w->server, &err), &err);
    snprintf(w->url, sizeof(w->url), "http://127.0.0.1:%u", http_server_port(w->server));
    t_ok(http_client_create(w->run.rig.loop, &w->client, &err), &err);
}

static void web_start(struct web *w, const char *name, unsigned gpus)
{
    run_start(&w->run, name, gpus, 0);
    web_serve(w);
}

static void web_end(struct web *w)
{
    http_client_destroy(w->client);
    http_server_destroy(w->server);
    run_end(&w->run);
}

static void ask(struct web *w, const char *method, const char *path, const char *body,
                struct got *g)
{
    char url[512];
    struct fl_err err = { 0 };
    struct http_ask a = { .method = method, .url = url };

    snprintf(url, sizeof(url), "%s%s", w->url, path);
    if (body)
        a.body = (struct fl_bytes){ body, strlen(body) };
    *g = (struct got){ .call.done = on_done };
    t_ok(http_start(w->client, &a, &g->call, &err), &err);
}

static void wait_for(struct web *w, struct got *g)
{
    UNTIL(&w->run.rig, g->done);
    t_int_eq(g->st, FL_OK);
    g->json = json_loads(g->answer.body, 0, NULL);
}

static void drop(struct got *g)
{
    json_decref(g->json);
    http_answer_fini(&g->answer);
}

static void get(struct web *w, const char *path, unsigned status, struct got *g)
{
    ask(w, "GET", path, NULL, g);
    wait_for(w, g);
    t_int_eq(g->answer.status, status, "%s: %.200s", path, g->answer.body);
}

static const char *text(const json_t *o, const char *name)
{
    const char *s = json_string_value(json_object_get(o, name));

    return s ? s : "";
}

static void version_is_what_rays_client_wants(void **unused)
{
    struct web w;
    struct got g;

    (void)unused;
    web_start(&w, "version", 0);
    get(&w, "/api/version", 200, &g);
    t_str_eq(text(g.json, "version"), "4");
    t_str_eq(text(g.json, "ray_version"), "2.60.0");
    t_int_eq(strncmp(text(g.json, "session_name"), "session_", 8), 0);
    drop(&g);
    web_end(&w);
}

static void bad_submissions_say_what_is_wrong(void **unused)
{
    static const struct {
        const char *body, *says;
    } rows[] = {
        { "", "body" },
        { "[]", "object" },
        { "{}", "entrypoint" },
        { "{\"entrypoint\": 3}", "entrypoint must be a string" },
                { "{\"entrypoint\": \"x\", \"colour\": 1}", "unexpected keyword argument 'colour'" },
        { "{\"entrypoint\": \"x\", \"submission_id\": \"a/b\"}", "submission_id" },
        { "{\"entrypoint\": \"x\", \"entrypoint_num_gpus\": -1}", "entrypoint_num_gpus" },
        { "{\"entrypoint\": \"x\", \"entrypoint_num_gpus\": \"two\"}", "entrypoint_num_gpus" },
        { "{\"entrypoint\": \"x\", \"entrypoint_memory\": 1.5}", "entrypoint_memory" },
        { "{\"entrypoint\": \"x\", \"entrypoint_resources\": [1]}", "entrypoint_resources" },
        { "{\"entrypoint\": \"x\", \"metadata\": {\"a\": 1}}", "metadata" },
        { "{\"entrypoint\": \"x\", \"runtime_env\": \"pip\"}", "runtime_env" },
        { "{\"entrypoint\": \"x\", \"runtime_env\": {\"pip\": []}}", "pip" },
        { "{\"entrypoint\": \"x\", \"runtime_env\": {\"env_vars\": {\"A\": 1}}}",
          "A is not a name with a string" },
        { "{\"entrypoint\": \"x\", \"runtime_env\": {\"env_vars\": {\"A=B\": \"1\"}}}", "A=B" },
        { "{\"entrypoint\": \"x\", \"runtime_env\": {\"working_dir\": \"here\"}}", "only packages that were uploaded" },
        { "{\"entrypoint\": \"x\", \"furlong\": {\"driver_restarts\": -1}}", "driver_restarts" },
        { "{\"entrypoint\": \"x\", \"furlong\": {\"speed\": 1}}", "speed" },
    };
    struct web w;
    struct got g;

    (void)unused;
    web_start(&w, "badsubmit", 0);
    unsigned jobs = HASH_CNT(hh, w.run.rig.head->jobs);
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        ask(&w, "POST", "/api/jobs/", rows[i].body, &g);
        wait_for(&w, &g);
        t_int_eq(g.answer.status, 400, "%s", rows[i].body);
        t_has(g.answer.body, rows[i].says);
        drop(&g);
    }
    t_int_eq(HASH_CNT(hh, w.run.rig.head->jobs), jobs, "nothing half done");
    web_end(&w);
}

static void a_job_is_submitted_shown_and_stopped(void **unused)
{
    static const char body[] =
        "{\"entrypoint\": \"python3 train.py\", \"submission_id\": \"mine\", \"job_id\": null,"
        " \"metadata\": {\"who\": \"me\"}, \"runtime_env\": {\"env_vars\": {\"A\": \"1\"}, "
        "\"working_dir\": \"/tmp\"},"
        " \"furlong\": {\"driver_restarts\": 2, \"run_dir\": \"/tmp/run\"}}";
    struct web w;
    struct got g, again;
    struct run *x = &w.run;

    (void)unused;
    web_start(&w, "submit", 0);
    ask(&w, "POST", "/api/jobs/", body, &g);
    wait_for(&w, &g);
    t_int_eq(g.answer.status, 200, "%s", g.answer.body);
    t_str_eq(text(g.json, "submission_id"), "mine");
    t_str_eq(text(g.json, "job_id"), "mine");
    drop(&g);
    ask(&w, "POST", "/api/jobs/", body, &again);
    wait_for(&w, &again);
    t_int_eq(again.answer.status, 500);
    t_has(again.answer.body, "already exists");
    drop(&again);

    x->driver = driver_of(&x->rig, &x->a, "mine");
    t_str_eq(x->driver->cwd, "/tmp");
    t_has(x->driver->env, "A=1;");
    get(&w, "/api/jobs/mine", 200, &g);
    t_str_eq(text(g.json, "type"), "SUBMISSION");
    t_str_eq(text(g.json, "status"), "RUNNING");
    t_str_eq(text(g.json, "entrypoint"), "python3 train.py");
    t_str_eq(text(json_object_get(g.json, "metadata"), "who"), "me");
    t_str_eq(text(json_object_get(g.json, "runtime_env"), "working_dir"), "/tmp");
    t_true(json_is_null(json_object_get(g.json, "driver_info")), "no program of ours has joined");
    t_true(json_is_null(json_object_get(g.json, "job_id")));
    t_true(!json_object_get(g.json, "run_dir"), "what Ray has no field for stands elsewhere");
    t_true(json_integer_value(json_object_get(g.json, "start_time")) > 1600000000000);
    char hex[65];
    fl_hex(hex, x->driver->key, 32);
    t_true(!strstr(g.answer.body, hex), "the key is never shown");
    drop(&g);
    get(&w, "/api/furlong/jobs/mine", 200, &g);
    t_str_eq(text(g.json, "run_dir"), "/tmp/run");
    t_true(json_is_null(json_object_get(g.json, "exit_code")));
    drop(&g);
    get(&w, "/api/jobs/", 200, &g);
    t_int_eq(json_array_size(g.json), 2);
    drop(&g);
    get(&w, "/api/jobs/nobody", 404, &g);
    t_str_eq(g.answer.body, "Job nobody does not exist");
    drop(&g);

    ask(&w, "POST", "/api/jobs/mine/stop", "{}", &g);
    wait_for(&w, &g);
    t_true(json_is_true(json_object_get(g.json, "stopped")));
    drop(&g);
    UNTIL(&x->rig, x->driver->stop_asked);
    fake_exit(&x->a, x->driver, 143);
    UNTIL(&x->rig, job_over(job(&x->rig, "mine")));
    ask(&w, "POST", "/api/jobs/mine/stop", NULL, &g);
    wait_for(&w, &g);
    t_true(json_is_false(json_object_get(g.json, "stopped")));
    drop(&g);
    web_end(&w);
}

static void log_at(struct web *w, uint64_t offset, unsigned wait_ms, struct got *g)
{
    char path[160];

    snprintf(path, sizeof(path), "/api/furlong/jobs/%s/log?offset=%llu&wait_ms=%u", w->run.job,
             (unsigned long long)offset, wait_ms);
    ask(w, "GET", path, NULL, g);
}

static const char *header(const struct got *g, const char *name)
{
    static char buf[64];

    return http_answer_header(&g->answer, name, buf, sizeof(buf)) ? buf : "";
}

static void a_log_is_followed_to_its_end(void **unused)
{
    struct web w;
    struct got g;
    struct run *x = &w.run;

    (void)unused;
    web_start(&w, "follow", 0);
    fake_log(&x->a, x->driver, 1, 0, "one\n");
    log_at(&w, 0, 10000, &g);
    wait_for(&w, &g);
    t_str_eq(g.answer.body, "one\n");
    t_str_eq(header(&g, "x-furlong-offset"), "4");
    t_str_eq(header(&g, "x-furlong-state"), "RUNNING");
    drop(&g);
    log_at(&w, 4, 10000, &g);
    rig_turns(&x->rig, 20);
    t_true(!g.done, "it sleeps until there is more");
    fake_log(&x->a, x->driver, 1, 4, "two\n");
    wait_for(&w, &g);
    t_str_eq(g.answer.body, "two\n");
    drop(&g);
    log_at(&w, 8, 2000, &g);
    rig_turns(&x->rig, 20);
    rig_pass(&x->rig, 2100);
    wait_for(&w, &g);
    t_str_eq(g.answer.body, "", "or its time is over");
    drop(&g);
    log_at(&w, 8, 10000, &g);
    rig_turns(&x->rig, 10);
    fake_exit(&x->a, x->driver, 3);
    wait_for(&w, &g);
    t_str_eq(header(&g, "x-furlong-state"), "FAILED");
    t_str_eq(header(&g, "x-furlong-exit-code"), "3");
    drop(&g);
    log_at(&w, 4, 0, &g);
    wait_for(&w, &g);
    t_str_eq(g.answer.body, "two\n", "any part of it can be read again");
    drop(&g);
    log_at(&w, 99999, 0, &g);
    wait_for(&w, &g);
    t_str_eq(header(&g, "x-furlong-offset"), "8", "beyond the end is the end");
    drop(&g);
    get(&w, "/api/furlong/jobs/nobody/log", 404, &g);
    drop(&g);
    char path[160];
    snprintf(path, sizeof(path), "/api/furlong/jobs/%s/log?offset=many", x->job);
    get(&w, path, 400, &g);
    t_has(g.answer.body, "offset");
    drop(&g);
    web_end(&w);
}

static void steps_at(struct web *w, uint64_t from, unsigned wait_ms, struct got *g)
{
    char path[160];

    snprintf(path, sizeof(path), "/api/furlong/jobs/%s/steps?from=%llu&wait_ms=%u", w->run.job,
             (unsigned long long)from, wait_ms);
    ask(w, "GET", path, NULL, g);
}

static void steps_are_followed(void **unused)
{
    struct web w;
    struct got g;
    struct run *x = &w.run;
    struct fl_err err;

    (void)unused;
    web_start(&w, "restsaid", 0);
    t_ok(steps_add(job(&x->rig, x->job), "{\"step\":0}", &err), &err);
    steps_at(&w, 0, 5000, &g);
    wait_for(&w, &g);
    t_int_eq(json_array_size(json_object_get(g.json, "steps")), 1, "%s", g.answer.body);
    t_int_eq(json_integer_value(json_object_get(g.json, "next")), 1);
    drop(&g);
    steps_at(&w, 1, 5000, &g);
    rig_turns(&x->rig, 10);
    t_true(!g.done);
    t_ok(steps_add(job(&x->rig, x->job), "{\"step\":1}", &err), &err);
    followers_wake(job(&x->rig, x->job));
    wait_for(&w, &g);
    t_int_eq(json_integer_value(json_object_get(g.json, "next")), 2);
    drop(&g);
    steps_at(&w, 77, 5000, &g); /* of a head before this one, which counted further */
    wait_for(&w, &g);
    t_int_eq(json_array_size(json_object_get(g.json, "steps")), 2, "none of this head is missed");
    t_int_eq(json_integer_value(json_object_get(g.json, "next")), 2);
    drop(&g);
    fake_exit(&x->a, x->driver, 0);
    steps_at(&w, 2, 5000, &g);
    wait_for(&w, &g);
    t_str_eq(text(g.json, "state"), "SUCCEEDED");
    t_int_eq(json_integer_value(json_object_get(g.json, "exit_code")), 0);
    drop(&g);
    web_end(&w);
}

static void the_cluster_is_shown(void **unused)
{
    struct web w;
    struct got g;
    struct run *x = &w.run;

    (void)unused;
    web_start(&w, "shown", 3);
    Fl__Layout *y = place(x, split_1_1, 4);
    free_msg(launch(x, y, "trainer", 0));
    UNTIL(&x->rig, fake_worker(&x->a, "trainer", 0));
    fake_joined(&x->a, fake_worker(&x->a, "trainer", 0));

    get(&w, "/api/furlong/status", 200, &g);
    t_str_eq(text(g.json, "state"), "READY");
    const json_t *gpu = json_object_get(json_object_get(g.json, "resources"), "GPU");
    t_int_eq(json_integer_value(json_object_get(gpu, "used")), 2, "%s", g.answer.body);
    t_int_eq(json_integer_value(json_object_get(gpu, "total")), 3);
    drop(&g);
    get(&w, "/api/furlong/nodes", 200, &g);
    t_str_eq(text(json_array_get(g.json, 0), "name"), "a");
    t_str_eq(text(json_array_get(g.json, 0), "state"), "READY");
    t_int_eq(json_array_size(json_object_get(json_array_get(g.json, 0), "devices")), 3);
    drop(&g);
    get(&w, "/api/furlong/workers", 200, &g);
    t_int_eq(json_array_size(g.json), 2);
    t_str_eq(text(json_array_get(g.json, 1), "role"), "trainer");
    t_str_eq(text(json_array_get(g.json, 1), "state"), "LIVE");
    drop(&g);
    get(&w, "/api/furlong/groups", 200, &g);
    t_str_eq(text(json_array_get(g.json, 0), "state"), "PLACED");
    t_has(text(json_array_get(g.json, 0), "layout"), "trainer 0 of 1");
    const json_t *bundle = json_array_get(json_object_get(json_array_get(g.json, 0), "bundles"), 1);
    t_str_eq(text(bundle, "node"), "a");
    t_str_eq(json_string_value(json_array_get(json_object_get(bundle, "devices"), 0)), "1");
    drop(&g);
    get(&w, "/api/furlong/leases", 200, &g);
    t_int_eq(json_array_size(g.json), 2);
    t_str_eq(text(json_array_get(g.json, 0), "state"), "COMMITTED");
    drop(&g);
    get(&w, "/metrics", 200, &g);
    t_has(g.answer.body, "furlong_nodes{state=\"READY\"} 1");
    t_has(g.answer.body, "furlong_groups_placed_total 1");
    drop(&g);
    free_msg(y);
    web_end(&w);
}

static void a_decision_is_explained_from_the_journal(void **unused)
{
    struct web w;
    struct got g;
    struct run *x = &w.run;
    struct asked q;
    char path[160];

    (void)unused;
    web_start(&w, "explain", 2);
    snprintf(path, sizeof(path), "/api/furlong/explain/%s", x->job);
    get(&w, path, 404, &g);
    drop(&g);
    Fl__Layout *y = place(x, split_1_1, 4);
    get(&w, path, 200, &g);
    t_str_eq(text(g.json, "decision"), "placed");
    t_has(text(g.json, "text"), "bundle 0: a 10.0.0.1, device 0");
    t_has(text(g.json, "text"), "trainer");
    t_has(text(g.json, "text"), "rollout");
    drop(&g);
    place_start(x, colocated_2, 4, 0, &q);
    ask_wait(&x->a, &q);
    ask_free(&q);
    http_server_destroy(w.server);
    http_client_destroy(w.client);
    rig_again(&x->rig); /* and it is still known by the next head */
    UNTIL(&x->rig, x->a.peer == NULL);
    fake_again(&x->a);
    web_serve(&w);
    get(&w, path, 200, &g);
    t_str_eq(text(g.json, "decision"), "waiting");
    t_has(text(g.json, "text"), "10.0.0.1");
    t_int_eq(json_array_size(json_object_get(g.json, "decisions")), 2);
    t_true(json_is_true(
        json_object_get(json_array_get(json_object_get(g.json, "decisions"), 0), "same")));
    drop(&g);
    free_msg(y);
    web_end(&w);
}

static void from_elsewhere_the_token_is_needed(void **unused)
{
    struct rig r;
    struct head_config cfg = { .token = "0123456789abcdef0123456789abcdef" };

    (void)unused;
    rig_start(&r, "token", &cfg);
    t_true(head_allows(r.head, NULL, NULL, true));
    t_true(!head_allows(r.head, NULL, NULL, false));
    t_true(!head_allows(r.head, NULL, "", false));
    t_true(!head_allows(r.head, NULL, "0123456789abcdef0123456789abcdee", false));
    t_true(!head_allows(r.head, NULL, "0123456789abcdef", false));
    t_true(head_allows(r.head, NULL, "0123456789abcdef0123456789abcdef", false));
    rig_end(&r);
    rig_start(&r, "notoken", NULL);
    t_true(!head_allows(r.head, NULL, "", false), "without a token nobody is let in");
    rig_end(&r);
}

static void until_idle_goes_as_soon_as_the_end_was_read(void **unused)
{
    struct web w;
    struct got g;
    struct run *x = &w.run;

    (void)unused;
    web_start(&w, "told", 0);
    x->rig.head->cfg.until_idle = true;
    log_at(&w, 0, 10000, &g);
    rig_turns(&x->rig, 10);
    fake_exit(&x->a, x->driver, 0);
    wait_for(&w, &g);
    drop(&g);
    UNTIL(&x->rig, job(&x->rig, x->job)->rec->cleaned);
    rig_pass(&x->rig, 1000);
    UNTIL(&x->rig, x->rig.ended == 1);
    web_end(&w);
}

static void shutdown_answers_first(void **unused)
{
    struct web w;
    struct got g;

    (void)unused;
    web_start(&w, "restdown", 0);
    ask(&w, "POST", "/api/furlong/shutdown", "{\"why\": \"enough\"}", &g);
    wait_for(&w, &g);
    t_int_eq(g.answer.status, 200);
    drop(&g);
    t_int_eq(w.run.rig.head->state, HEAD_ENDING);
    t_str_eq(w.run.rig.head->end_why, "enough");
    ask(&w, "POST", "/api/jobs/", "{\"entrypoint\": \"x\"}", &g);
    wait_for(&w, &g);
    t_int_eq(g.answer.status, 503);
    drop(&g);
    web_end(&w);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(version_is_what_rays_client_wants),
        cmocka_unit_test(bad_submissions_say_what_is_wrong),
        cmocka_unit_test(a_job_is_submitted_shown_and_stopped),
        cmocka_unit_test(a_log_is_followed_to_its_end),
        cmocka_unit_test(steps_are_followed),
        cmocka_unit_test(the_cluster_is_shown),
        cmocka_unit_test(a_decision_is_explained_from_the_journal),
        cmocka_unit_test(from_elsewhere_the_token_is_needed),
        cmocka_unit_test(until_idle_goes_as_soon_as_the_end_was_read),
        cmocka_unit_test(shutdown_answers_first),
    };

    return t_run("rest", tests);
}
