/* Server and client against each other over loopback, in one loop */
#include <stdlib.h>

#include "common/base/fault.h"
#include "tests/http/rig.h"
#include "transport/http/server_priv.h"

/* ---- pure parts */

static const struct http_route some_routes[] = {
    { "GET", "/api/version", NULL, 0, true },
    { "GET", "/api/jobs/", NULL, 0, false },
    { "POST", "/api/jobs/", NULL, 0, false },
    { "POST", "/api/jobs/{id}/stop", NULL, 0, false },
    { "GET", "/api/jobs/{id}", NULL, 0, false },
    { "GET", "/files/{name}/{rest*}", NULL, 0, false },
    { NULL, "/any", NULL, 0, false },
    { 0 },
};

static void finds_routes(void **state)
{
    static const struct {
        const char *method, *path, *pattern, *param, *value;
        bool known;
    } rows[] = {
        { "GET", "/api/version", "/api/version", NULL, NULL, true },
        { "HEAD", "/api/version", "/api/version", NULL, NULL, true },
        { "POST", "/api/version", NULL, NULL, NULL, true },
        { "GET", "/api/version/", NULL, NULL, NULL, false },
        { "GET", "/api/jobs/", "/api/jobs/", NULL, NULL, true },
        { "GET", "/api/jobs", NULL, NULL, NULL, false },
        { "GET", "/api/jobs/raysubmit_1", "/api/jobs/{id}", "id", "raysubmit_1", true },
        { "POST", "/api/jobs/a-b/stop", "/api/jobs/{id}/stop", "id", "a-b", true },
        { "POST", "/api/jobs//stop", NULL, NULL, NULL, false },
        { "GET", "/files/a/b/c/d", "/files/{name}/{rest*}", "rest", "b/c/d", true },
        { "GET", "/files/a/b/c/d", "/files/{name}/{rest*}", "name", "a", true },
        { "GET", "/files/a/", NULL, NULL, NULL, false },
        { "DELETE", "/any", "/any", NULL, NULL, true },
        { "GET", "", NULL, NULL, NULL, false },
        { "GET", "*", NULL, NULL, NULL, false },
        { "GET", "//", NULL, NULL, NULL, false },
    };

    (void)state;
    for (unsigned i = 0; i < FL_LEN(rows); i++) {
        struct http_params p;
        bool known;
        const struct http_route *r =
            http_route_find(some_routes, rows[i].method, rows[i].path, &p, &known);
        const char *value = NULL;

        t_true((r != NULL) == (rows[i].pattern != NULL), "%s %s", rows[i].method, rows[i].path);
        t_int_eq(known, rows[i].known, "%s %s", rows[i].method, rows[i].path);
        if (!r)
            continue;
        t_str_eq(r->pattern, rows[i].pattern, "%s %s", rows[i].method, rows[i].path);
        for (unsigned k = 0; rows[i].param && k < p.n; k++)
            if (strcmp(p.p[k].name, rows[i].param) == 0)
                value = p.p[k].value;
        if (rows[i].param)
            t_str_eq(value, rows[i].value, "%s", rows[i].path);
    }
}

static void knows_its_names(void **state)
{
    static const char *const names[] = { "gpu-a", "head.cluster", NULL };
    static const struct {
        const char *host;
        bool ok;
    } rows[] = {
        { "127.0.0.1:8265", true },
        { "127.0.0.1", true },
        { "10.1.2.3:8265", true },
        { "[::1]:8265", true },
        { "[fe80::1]", true },
        { "localhost:1", true },
        { "LocalHost", true },
        { "gpu-a:8265", true },
        { "HEAD.cluster", true },
        { "evil.example:8265", false },
        { "gpu-a.evil.example", false },
        { "127.0.0.1.evil.example", false },
        { "", false },
        { ":80", false },
        { "[::1", false },
        { "localhost:8265:1", false },
        { "localhost:x", false },
        { "[::1]x", false },
    };
    static const struct {
        const char *origin, *host;
        bool ok;
    } origins[] = {
        { NULL, "a:1", true },        { "http://a:1", "a:1", true }, { "http://b:1", "a:1", false },
        { "http://a", "a:1", false }, { "null", "a:1", false },      { "http://a:1", NULL, false },
    };

    (void)state;
    for (unsigned i = 0; i < FL_LEN(rows); i++)
        t_int_eq(http_host_ok(rows[i].host, "0.0.0.0", names), rows[i].ok, "%s", rows[i].host);
    for (unsigned i = 0; i < FL_LEN(origins); i++)
        t_int_eq(http_origin_ok(origins[i].origin, origins[i].host), origins[i].ok, "row %u", i);
    t_true(!http_bearer(NULL) && !http_bearer("Basic x") && !http_bearer("Bearer "));
    t_str_eq(http_bearer("bearer  abc"), "abc");
}

/* ---- what is asked and answered */

static void answers(void **state)
{
    struct web w = { 0 };
    struct web_ask a = { 0 };
    char *big = malloc(20 << 20);

    (void)state;
    memset(big, 'x', 20 << 20);
    web_open(&w);
    web_ask_wait(&w, &a, NULL, "/echo?q=a%20b%26&q2=1", (struct fl_bytes){ 0 }, NULL);
    t_int_eq(a.answer.status, 200);
    t_str_eq(web_header(&a, "X-Method"), "GET");
    t_str_eq(web_header(&a, "x-query"), "a b&");
    t_str_eq(web_header(&a, "Cache-Control"), "no-store");
    t_true(!web_header(&a, "x-que"));
    t_int_eq(a.answer.body_len, 0);
    web_ask_wait(&w, &a, NULL, "/echo", (struct fl_bytes){ "hello\0you", 9 }, NULL);
    t_str_eq(web_header(&a, "X-Method"), "POST");
    t_int_eq(a.answer.body_len, 9);
    t_mem_eq(a.answer.body, "hello\0you", 10);
    web_ask_wait(&w, &a, "PUT", "/echo", (struct fl_bytes){ "abc", 3 }, NULL);
    t_str_eq(web_header(&a, "X-Method"), "PUT");
    t_str_eq(a.answer.body, "abc");
    web_ask_wait(&w, &a, "HEAD", "/echo/7/x", (struct fl_bytes){ 0 }, NULL);
    t_str_eq(web_header(&a, "X-Id"), "7");
    web_ask_wait(&w, &a, "POST", "/big", (struct fl_bytes){ big, 20 << 20 }, NULL);
    t_int_eq(a.answer.status, 200);
    t_int_eq(a.answer.body_len, 20 << 20);
    web_ask_wait(&w, &a, "POST", "/json?n=9", (struct fl_bytes){ "{\"a\": 1}", 8 }, NULL);
    t_int_eq(a.answer.status, 201);
    t_str_eq(a.answer.body, "{\"a\":1,\"n\":9}");
    http_answer_fini(&a.answer);
    free(big);
    web_close(&w);
}

static void refuses(void **state)
{
    static const char *const cross[] = { "Origin: http://evil.example", NULL };
    static const char *const same[] = { "Sec-Fetch-Site: same-origin", NULL };
    static const char *const fetched[] = { "Sec-Fetch-Site: cross-site", NULL };
    static const char *const link[] = { "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate",
                                        "Sec-Fetch-Dest: document", NULL };
    static const char *const framed[] = { "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate",
                                          "Sec-Fetch-Dest: iframe", NULL };
    static const char *const rebound[] = { "Host: evil.example", NULL };
    static const struct {
        const char *name, *method, *path, *body;
        const char *const *headers;
        unsigned status;
        const char *text;
    } rows[] = {
        { "no such path", "GET", "/nothing", NULL, NULL, 404, "there is no GET /nothing" },
        { "another method", "POST", "/keep", NULL, NULL, 405, "POST is not for /keep" },
        { "another site's page", "GET", "/echo", NULL, cross, 403, "another site" },
        { "another site's page, no Origin", "GET", "/echo", NULL, fetched, 403, "another site" },
        { "a link on another site", "GET", "/echo", NULL, link, 200, "" },
        { "the same, but a form", "POST", "/json", "{}", link, 403, "another site" },
        { "a frame in another site", "GET", "/echo", NULL, framed, 403, "another site" },
        { "this site's page", "GET", "/echo", NULL, same, 200, "" },
        { "a name that is not ours", "GET", "/open", NULL, rebound, 403,
          "evil.example is no name of this server" },
        { "no JSON", "POST", "/json", "{\"a\":", NULL, 400, "body" },
        { "a key twice", "POST", "/json", "{\"a\":1,\"a\":2}", NULL, 400, "body" },
        { "no object", "POST", "/json", "[1]", NULL, 400, "no JSON object" },
        { "no number", "POST", "/json?n=x", "{}", NULL, 400, "n of the query" },
        { "too large a number", "POST", "/json?n=101", "{}", NULL, 400, "n of the query" },
    };
    struct web w = { 0 };
    struct web_ask a = { 0 };

    (void)state;
    web_open(&w);
    for (unsigned i = 0; i < FL_LEN(rows); i++) {
        struct fl_bytes body = { rows[i].body, rows[i].body ? strlen(rows[i].body) : 0 };

        web_ask_wait(&w, &a, rows[i].method, rows[i].path, body, rows[i].headers);
        t_int_eq(a.answer.status, rows[i].status, "%s: %s", rows[i].name, a.answer.body);
        t_has(a.answer.body, rows[i].text);
        if (rows[i].status >= 400)
            t_true(strncmp(a.answer.body, "{\"error\":\"", 10) == 0, "%s", a.answer.body);
    }
    http_answer_fini(&a.answer);
    web_close(&w);
}

static bool token_only(void *arg, struct http_req *req, const char *bearer, bool from_loopback)
{
    struct web *w = arg;

    (void)req;
    w->loopback_seen = from_loopback;
    return bearer && strcmp(bearer, "s3cret") == 0;
}

static void asks_for_the_token(void **state)
{
    static const char *const right[] = { "Authorization: Bearer s3cret", NULL };
    static const char *const wrong[] = { "Authorization: Bearer s3cres", NULL };
    struct web w = { .config.allowed = token_only };
    struct web_ask a = { 0 };

    (void)state;
    web_open(&w);
    web_ask_wait(&w, &a, NULL, "/echo", (struct fl_bytes){ 0 }, NULL);
    t_int_eq(a.answer.status, 401);
    t_str_eq(web_header(&a, "www-authenticate"), "Bearer");
    web_ask_wait(&w, &a, NULL, "/echo", (struct fl_bytes){ "body", 4 }, wrong);
    t_int_eq(a.answer.status, 403);
    web_ask_wait(&w, &a, NULL, "/echo", (struct fl_bytes){ 0 }, right);
    t_int_eq(a.answer.status, 200);
    web_ask_wait(&w, &a, NULL, "/open", (struct fl_bytes){ 0 }, NULL);
    t_int_eq(a.answer.status, 200);
    t_true(w.loopback_seen);
    http_answer_fini(&a.answer);
    web_close(&w);
}

static void answers_later(void **state)
{
    struct web w = { 0 };
    struct web_ask a = { 0 }, b = { 0 };

    (void)state;
    web_open(&w);
    web_ask(&w, &a, NULL, "/keep", (struct fl_bytes){ 0 }, NULL);
    t_until(w.loop, w.kept, 5000);
    web_ask_wait(&w, &b, NULL, "/echo", (struct fl_bytes){ 0 }, NULL);
    t_int_eq(a.done, 0);
    http_reply_json(w.kept, 200, json_pack("{s:i}", "late", 1));
    t_until(w.loop, a.done, 5000);
    t_str_eq(a.answer.body, "{\"late\":1}");
    t_int_eq(w.gone, 0);
    http_answer_fini(&a.answer);
    http_answer_fini(&b.answer);
    web_close(&w);
}

static void tells_when_the_client_left(void **state)
{
    struct web w = { 0 };
    struct web_ask a = { 0 }, b = { 0 };

    (void)state;
    web_open(&w);
    web_ask(&w, &a, NULL, "/keep", (struct fl_bytes){ 0 }, NULL);
    t_until(w.loop, w.kept, 5000);
    http_cancel(&a.call);
    t_int_eq(a.st, FL_CANCELLED);
    t_until(w.loop, w.gone, 5000);
    web_ask_wait(&w, &b, NULL, "/echo", (struct fl_bytes){ 0 }, NULL);
    t_int_eq(w.gone, 1);
    http_answer_fini(&b.answer);
    web_close(&w);
}

/* The server goes while path has not been answered. */
static void server_goes(struct web *w, struct web_ask *a, const char *path)
{
    web_open(w);
    web_ask(w, a, NULL, path, (struct fl_bytes){ 0 }, NULL);
    t_until(w->loop, w->kept, 5000);
    http_server_destroy(w->server);
    w->server = NULL;
    t_int_eq(w->gone, 1);
    t_until(w->loop, a->done, 5000);
}

static void ends_with_requests_that_wait(void **state)
{
    struct web w = { 0 };
    struct web_ask a = { 0 };

    (void)state;
    server_goes(&w, &a, "/keep");
    t_int_eq(a.st, FL_OK, "%s", a.err.text);
    t_int_eq(a.answer.status, 503);
    http_answer_fini(&a.answer);
    web_close(&w);
}

static void streams_with_back_pressure(void **state)
{
    struct web w = { .to_write = 5000000 };
    struct web_ask a = { 0 };

    (void)state;
    web_open(&w);
    web_ask_wait(&w, &a, NULL, "/stream", (struct fl_bytes){ 0 }, NULL);
    t_int_eq(a.answer.body_len, w.to_write);
    for (size_t i = 0; i < w.to_write; i++)
        if ((uint8_t)a.answer.body[i] != web_stream_byte(i))
            t_true(false, "byte %zu", i);
    t_true(w.mores > 5, "%u", w.mores);
    t_int_eq(w.gone, 0);
    http_answer_fini(&a.answer);
    web_close(&w);
}

static enum fl_status on_piece(void *arg, unsigned status, struct fl_bytes piece)
{
    struct web_ask *a = arg;

    t_int_eq(status, 200);
    a->pieces++;
    a->got += piece.len;
    return a->stop_at && a->got >= a->stop_at ? FL_CANCELLED : FL_OK;
}

static void streams_as_it_comes(void **state)
{
    struct web w = { 0 };
    struct web_ask a = { .call.done = web_on_done };
    struct fl_err err = { 0 };
    char url[100];

    (void)state;
    web_open(&w);
    snprintf(url, sizeof(url), "%s/stream", w.url);
    t_ok(http_start(
             w.client,
             &(struct http_ask){ .url = url, .piece = on_piece, .arg = &a, .ca_path = web_ca.cert },
             &a.call, &err),
         &err);
    t_until(w.loop, w.kept, 5000);
    for (unsigned i = 1; i <= 3; i++) {
        t_ok(http_reply_write(w.kept, (struct fl_bytes){ "some line\n", 10 }, &err), &err);
        t_until(w.loop, a.got == 10 * i, 5000);
    }
    a.stop_at = 40;
    t_ok(http_reply_write(w.kept, (struct fl_bytes){ "some line\n", 10 }, &err), &err);
    t_until(w.loop, a.done && w.gone, 5000);
    t_int_eq(a.st, FL_CANCELLED);
    t_int_eq(a.answer.body_len, 0);
    web_close(&w);
}

static void ends_with_a_stream_open(void **state)
{
    struct web w = { 0 };
    struct web_ask a = { 0 };

    (void)state;
    server_goes(&w, &a, "/stream");
    t_true(a.st != FL_OK, "an answer that was cut is no answer");
    http_answer_fini(&a.answer);
    web_close(&w);
}

static void every_fault_ends_well(void **state)
{
    bool met = true;

    (void)state;
    for (unsigned nth = 1; met; nth++) {
        struct web w = { .fds_before = t_open_fds(),
                         .config = {
                             .routes = web_routes, .arg = &w, .tls = web_tls ? web_id : NULL } };
        struct fl_err err = { 0 };
        struct web_ask a[3] = { 0 };
        static const char *const paths[] = { "/echo", "/json", "/stream" };
        enum fl_status st = FL_OK;
        char url[100];

        t_true(nth < 100);
        w.to_write = 1000;
        t_ok(fl_loop_create(NULL, &w.loop, &err), &err);
        fl_fault_arm(nth);
        st = http_server_create(w.loop, &w.config, &w.server, &err);
        if (st == FL_OK)
            st = http_client_create(w.loop, &w.client, &err);
        for (unsigned i = 0; st == FL_OK && i < 3; i++) {
            a[i].call.done = web_on_done;
            w.asked = 0;
            snprintf(url, sizeof(url), "%s://127.0.0.1:%u%s", web_tls ? "https" : "http",
                     http_server_port(w.server), paths[i]);
            st = http_start(w.client,
                            &(struct http_ask){ .url = url,
                                                .method = i == 1 ? "POST" : "GET",
                                                .ca_path = web_ca.cert,
                                                .body = { "{}", i == 1 ? 2 : 0 } },
                            &a[i].call, &err);
            if (st == FL_OK)
                t_until(w.loop, a[i].done, 5000);
        }
        met = fl_fault_disarm();
        for (unsigned i = 0; i < 3; i++) {
            t_true(met || (a[i].done && a[i].st == FL_OK && a[i].answer.status < 300), "%s",
                   a[i].err.text);
            http_answer_fini(&a[i].answer);
        }
        t_true(st == FL_OK || err.text[0], "fault %u", nth);
        web_close(&w);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(finds_routes),
        cmocka_unit_test(knows_its_names),
        WEB_BOTH(answers),
        WEB_BOTH(refuses),
        WEB_BOTH(asks_for_the_token),
        WEB_BOTH(answers_later),
        WEB_BOTH(tells_when_the_client_left),
        WEB_BOTH(ends_with_requests_that_wait),
        WEB_BOTH(streams_with_back_pressure),
        WEB_BOTH(streams_as_it_comes),
        WEB_BOTH(ends_with_a_stream_open),
        WEB_BOTH(every_fault_ends_well),
    };

    return web_run("http", tests);
}
