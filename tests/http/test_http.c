/* Server and client against each other over loopback, in one loop; and a raw client for bad
 * manners. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "tests/certs.h"
#include "tests/t.h"
#include "transport/http/http.h"
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

/* ---- a server with one handler of each kind, in plain HTTP and over TLS */

static struct t_cert ca;
static struct tls_id *shown; /* by the server */
static bool with_tls;        /* of the test that runs */

static int plainly(void **state)
{
    (void)state;
    with_tls = false;
    return 0;
}

static int over_tls(void **state)
{
    (void)state;
    with_tls = true;
    return 0;
}

struct web {
    struct fl_loop *loop;
    struct http_server *server;
    struct http_client *client;
    struct http_config config;
    struct http_req *kept;
    unsigned handled, gone, mores, asked;
    bool loopback_seen;
    size_t to_write; /* of a stream */
    char url[64];
    int fds_before;
};

static void on_gone(void *arg, struct http_req *req)
{
    struct web *w = arg;

    t_true(req == w->kept);
    w->kept = NULL;
    w->gone++;
}

static void h_echo(void *arg, struct http_req *req)
{
    struct web *w = arg;
    const char *q = http_req_query(req, "q");

    w->handled++;
    http_reply_header(req, "X-Method", "%s", http_req_method(req));
    http_reply_header(req, "X-Query", "%s", q ? q : "(none)");
    http_reply_header(req, "X-Id", "%s",
                      http_req_param(req, "id") ? http_req_param(req, "id") : "(none)");
    http_reply_bytes(req, 200, "application/octet-stream", http_req_body(req));
}

static void h_keep(void *arg, struct http_req *req)
{
    struct web *w = arg;

    w->handled++;
    w->kept = req;
    http_req_on_gone(req, on_gone, w);
    t_true(http_req_gone_arg(req) == w);
}

static void h_json(void *arg, struct http_req *req)
{
    struct fl_err err = { 0 };
    uint64_t n;
    json_t *j = NULL;

    (void)arg;
    if (http_req_json(req, &j, &err) != FL_OK ||
        http_req_number(req, "n", 7, 100, &n, &err) != FL_OK) {
        json_decref(j);
        http_reply_fail(req, &err);
        return;
    }
    json_object_set_new(j, "n", json_integer((json_int_t)n));
    http_reply_json(req, 201, j);
}

static uint8_t stream_byte(size_t at)
{
    return (uint8_t)(at * 7 + (at >> 10));
}

static void pour(void *arg, struct http_req *req)
{
    struct web *w = arg;
    struct fl_err err = { 0 };
    static uint8_t piece[50000];
    enum fl_status st = FL_OK;

    while (w->asked < w->to_write) {
        size_t n = w->to_write - w->asked < sizeof(piece) ? w->to_write - w->asked : sizeof(piece);

        for (size_t i = 0; i < n; i++)
            piece[i] = stream_byte(w->asked + i);
        st = http_reply_write(req, (struct fl_bytes){ piece, n }, &err);
        if (st != FL_OK)
            break;
        w->asked += (unsigned)n;
    }
    if (st == FL_AGAIN)
        return;
    w->kept = NULL;
    if (st == FL_OK)
        http_reply_end(req);
    else
        http_reply_cut(req);
}

static void on_more(void *arg, struct http_req *req)
{
    struct web *w = arg;

    w->mores++;
    pour(arg, req);
}

static void h_stream(void *arg, struct http_req *req)
{
    struct web *w = arg;
    struct fl_err err = { 0 };

    w->handled++;
    w->kept = req;
    http_req_on_gone(req, on_gone, w);
    if (http_reply_start(req, 200, "text/plain", on_more, &err) != FL_OK) {
        w->kept = NULL;
        http_reply_fail(req, &err);
        return;
    }
    if (w->to_write)
        pour(w, req);
}

/* A socket that says a little, a lot, and then ends as the path asks: properly, with an error, or not at all. */
static void ws_gone(void *arg, struct http_ws *ws)
{
    (void)arg;
    (void)ws;
}

static void ws_more(void *arg, struct http_ws *ws)
{
    (void)arg;
    (void)ws;
}

static void h_socket(void *arg, struct http_req *req)
{
    static const struct http_ws_user user = { .more = ws_more, .gone = ws_gone };
    const char *how = http_req_param(req, "how");
    bool close = strcmp(how, "close") == 0, fail = strcmp(how, "fail") == 0;
    static char much[200000];
    struct http_ws *ws;
    struct fl_err err = { 0 };

    if (http_ws_accept(req, &user, arg, &ws, &err) != FL_OK) {
        http_reply_fail(req, &err);
        return;
    }
    memset(much, 'y', sizeof(much));
    t_ok(http_ws_text(ws, (struct fl_bytes){ "one\n", 4 }, &err), &err);
    t_ok(http_ws_text(ws, (struct fl_bytes){ much, sizeof(much) }, &err), &err);
    t_ok(http_ws_text(ws, (struct fl_bytes){ "\xc3\xa9 end", 6 }, &err), &err);
    if (close || fail)
        http_ws_close(ws, close ? 1000 : 1011);
}

static const struct http_route routes[] = {
    { "GET", "/socket/{how}", h_socket, 0, false },
    { NULL, "/echo", h_echo, 0, false },         { "GET", "/echo/{id}/x", h_echo, 0, false },
    { "POST", "/big", h_echo, 20 << 20, false }, { "GET", "/keep", h_keep, 0, false },
    { "POST", "/json", h_json, 0, false },       { "GET", "/stream", h_stream, 0, false },
    { "GET", "/open", h_echo, 0, true },         { 0 },
};

static void web_open(struct web *w)
{
    struct fl_err err = { 0 };

    w->fds_before = t_open_fds();
    t_ok(fl_loop_create(NULL, &w->loop, &err), &err);
    w->config.routes = routes;
    w->config.arg = w;
    w->config.tls = with_tls ? shown : NULL;
    t_ok(http_server_create(w->loop, &w->config, &w->server, &err), &err);
    t_ok(http_client_create(w->loop, &w->client, &err), &err);
    snprintf(w->url, sizeof(w->url), "%s://127.0.0.1:%u", with_tls ? "https" : "http",
             http_server_port(w->server));
}

static void web_close(struct web *w)
{
    http_client_destroy(w->client);
    http_server_destroy(w->server);
    fl_loop_destroy(w->loop);
    t_int_eq(t_open_fds(), w->fds_before);
}

struct ask {
    struct http_call call;
    unsigned done;
    enum fl_status st;
    struct http_answer answer;
    struct fl_err err;
    size_t pieces, got;
    size_t stop_at;
    char header[200];
};

static void on_done(struct http_call *c, enum fl_status st, struct http_answer *answer,
                    const struct fl_err *err)
{
    struct ask *a = container_of(c, struct ask, call);

    a->done++;
    a->st = st;
    if (err)
        a->err = *err;
    if (answer) {
        a->answer = *answer;
        *answer = (struct http_answer){ 0 };
    }
}

static const char *header(struct ask *a, const char *name)
{
    return http_answer_header(&a->answer, name, a->header, sizeof(a->header));
}

static void ask(struct web *w, struct ask *a, const char *method, const char *path,
                struct fl_bytes body, const char *const *headers)
{
    struct fl_err err = { 0 };
    char url[300];

    http_answer_fini(&a->answer);
    *a = (struct ask){ .call.done = on_done };
    snprintf(url, sizeof(url), "%s%s", w->url, path);
    t_ok(http_start(w->client,
                    &(struct http_ask){ .method = method,
                                        .url = url,
                                        .body = body,
                                        .headers = headers,
                                        .ca_path = ca.cert },
                    &a->call, &err),
         &err);
}

static void ask_wait(struct web *w, struct ask *a, const char *method, const char *path,
                     struct fl_bytes body, const char *const *headers)
{
    ask(w, a, method, path, body, headers);
    t_until(w->loop, a->done, 10000);
    t_int_eq(a->st, FL_OK, "%s", a->err.text);
}

static void answers(void **state)
{
    struct web w = { 0 };
    struct ask a = { 0 };
    char *big = malloc(20 << 20);

    (void)state;
    memset(big, 'x', 20 << 20);
    web_open(&w);
    ask_wait(&w, &a, NULL, "/echo?q=a%20b%26&q2=1", (struct fl_bytes){ 0 }, NULL);
    t_int_eq(a.answer.status, 200);
    t_str_eq(header(&a, "X-Method"), "GET");
    t_str_eq(header(&a, "x-query"), "a b&");
    t_str_eq(header(&a, "Cache-Control"), "no-store");
    t_true(!header(&a, "x-que"));
    t_int_eq(a.answer.body_len, 0);
    ask_wait(&w, &a, NULL, "/echo", (struct fl_bytes){ "hello\0you", 9 }, NULL);
    t_str_eq(header(&a, "X-Method"), "POST");
    t_int_eq(a.answer.body_len, 9);
    t_mem_eq(a.answer.body, "hello\0you", 10);
    ask_wait(&w, &a, "PUT", "/echo", (struct fl_bytes){ "abc", 3 }, NULL);
    t_str_eq(header(&a, "X-Method"), "PUT");
    t_str_eq(a.answer.body, "abc");
    ask_wait(&w, &a, "HEAD", "/echo/7/x", (struct fl_bytes){ 0 }, NULL);
    t_str_eq(header(&a, "X-Id"), "7");
    ask_wait(&w, &a, "POST", "/big", (struct fl_bytes){ big, 20 << 20 }, NULL);
    t_int_eq(a.answer.status, 200);
    t_int_eq(a.answer.body_len, 20 << 20);
    ask_wait(&w, &a, "POST", "/json?n=9", (struct fl_bytes){ "{\"a\": 1}", 8 }, NULL);
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
    struct ask a = { 0 };

    (void)state;
    web_open(&w);
    for (unsigned i = 0; i < FL_LEN(rows); i++) {
        struct fl_bytes body = { rows[i].body, rows[i].body ? strlen(rows[i].body) : 0 };

        ask_wait(&w, &a, rows[i].method, rows[i].path, body, rows[i].headers);
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
    struct ask a = { 0 };

    (void)state;
    web_open(&w);
    ask_wait(&w, &a, NULL, "/echo", (struct fl_bytes){ 0 }, NULL);
    t_int_eq(a.answer.status, 401);
    t_str_eq(header(&a, "www-authenticate"), "Bearer");
    ask_wait(&w, &a, NULL, "/echo", (struct fl_bytes){ "body", 4 }, wrong);
    t_int_eq(a.answer.status, 403);
    ask_wait(&w, &a, NULL, "/echo", (struct fl_bytes){ 0 }, right);
    t_int_eq(a.answer.status, 200);
    ask_wait(&w, &a, NULL, "/open", (struct fl_bytes){ 0 }, NULL);
    t_int_eq(a.answer.status, 200);
    t_true(w.loopback_seen);
    http_answer_fini(&a.answer);
    web_close(&w);
}

static void answers_later(void **state)
{
    struct web w = { 0 };
    struct ask a = { 0 }, b = { 0 };

    (void)state;
    web_open(&w);
    ask(&w, &a, NULL, "/keep", (struct fl_bytes){ 0 }, NULL);
    t_until(w.loop, w.kept, 5000);
    ask_wait(&w, &b, NULL, "/echo", (struct fl_bytes){ 0 }, NULL);
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
    struct ask a = { 0 }, b = { 0 };

    (void)state;
    web_open(&w);
    ask(&w, &a, NULL, "/keep", (struct fl_bytes){ 0 }, NULL);
    t_until(w.loop, w.kept, 5000);
    http_cancel(&a.call);
    t_int_eq(a.st, FL_CANCELLED);
    t_until(w.loop, w.gone, 5000);
    ask_wait(&w, &b, NULL, "/echo", (struct fl_bytes){ 0 }, NULL);
    t_int_eq(w.gone, 1);
    http_answer_fini(&b.answer);
    web_close(&w);
}

static void ends_with_requests_that_wait(void **state)
{
    struct web w = { 0 };
    struct ask a = { 0 };

    (void)state;
    web_open(&w);
    ask(&w, &a, NULL, "/keep", (struct fl_bytes){ 0 }, NULL);
    t_until(w.loop, w.kept, 5000);
    http_server_destroy(w.server);
    w.server = NULL;
    t_int_eq(w.gone, 1);
    t_until(w.loop, a.done, 5000);
    t_int_eq(a.st, FL_OK, "%s", a.err.text);
    t_int_eq(a.answer.status, 503);
    http_answer_fini(&a.answer);
    web_close(&w);
}

static void streams_with_back_pressure(void **state)
{
    struct web w = { .to_write = 5000000 };
    struct ask a = { 0 };

    (void)state;
    web_open(&w);
    ask_wait(&w, &a, NULL, "/stream", (struct fl_bytes){ 0 }, NULL);
    t_int_eq(a.answer.body_len, w.to_write);
    for (size_t i = 0; i < w.to_write; i++)
        if ((uint8_t)a.answer.body[i] != stream_byte(i))
            t_true(false, "byte %zu", i);
    t_true(w.mores > 5, "%u", w.mores);
    t_int_eq(w.gone, 0);
    http_answer_fini(&a.answer);
    web_close(&w);
}

static enum fl_status on_piece(void *arg, unsigned status, struct fl_bytes piece)
{
    struct ask *a = arg;

    t_int_eq(status, 200);
    a->pieces++;
    a->got += piece.len;
    return a->stop_at && a->got >= a->stop_at ? FL_CANCELLED : FL_OK;
}

static void streams_as_it_comes(void **state)
{
    struct web w = { 0 };
    struct ask a = { .call.done = on_done };
    struct fl_err err = { 0 };
    char url[100];

    (void)state;
    web_open(&w);
    snprintf(url, sizeof(url), "%s/stream", w.url);
    t_ok(http_start(
             w.client,
             &(struct http_ask){ .url = url, .piece = on_piece, .arg = &a, .ca_path = ca.cert },
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
    struct ask a = { 0 };

    (void)state;
    web_open(&w);
    ask(&w, &a, NULL, "/stream", (struct fl_bytes){ 0 }, NULL);
    t_until(w.loop, w.kept, 5000);
    http_server_destroy(w.server);
    w.server = NULL;
    t_int_eq(w.gone, 1);
    t_until(w.loop, a.done, 5000);
    t_true(a.st != FL_OK, "an answer that was cut is no answer");
    http_answer_fini(&a.answer);
    web_close(&w);
}

/* ---- bad manners */

struct raw {
    int fd;
    struct tls_session *tls;
};

static struct raw raw_connect(struct web *w)
{
    struct sockaddr_in a = { .sin_family = AF_INET,
                             .sin_port = htons(http_server_port(w->server)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    struct raw r = { .fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0) };
    struct fl_err err = { 0 };
    enum fl_status st = FL_AGAIN;
    unsigned events;

    t_true(connect(r.fd, (struct sockaddr *)&a, sizeof(a)) == 0);
    fcntl(r.fd, F_SETFL, O_NONBLOCK);
    if (!with_tls)
        return r;
    t_ok(tls_session_create(shown, r.fd, "127.0.0.1", &r.tls, &err), &err);
    for (int i = 0; st == FL_AGAIN && i < 2000; i++) {
        st = tls_session_shake(r.tls, &events, &err);
        fl_loop_turn(w->loop, 1);
    }
    t_ok(st, &err);
    return r;
}

static void raw_close(struct raw *r)
{
    tls_session_destroy(r->tls);
    close(r->fd);
}

/* As send() and recv(): -1 is not now, 0 of the second one the end. */
static ssize_t raw_send(struct raw *r, const void *say, size_t n)
{
    struct iovec iov = { (void *)(uintptr_t)say, n };
    unsigned events;
    size_t wrote;

    if (!r->tls)
        return send(r->fd, say, n, MSG_NOSIGNAL);
    return tls_session_write(r->tls, &iov, 1, &wrote, &events, NULL) == FL_OK ? (ssize_t)wrote : -1;
}

static ssize_t raw_recv(struct raw *r, void *out, size_t cap)
{
    struct iovec iov = { out, cap };
    unsigned events;
    size_t got;

    if (!r->tls) {
        ssize_t n = recv(r->fd, out, cap, 0);

        return n < 0 && errno != EAGAIN ? 0 : n;
    }
    enum fl_status st = tls_session_read(r->tls, &iov, 1, &got, &events, NULL);

    return st == FL_OK ? (ssize_t)got : st == FL_AGAIN ? -1 : 0;
}

/* Sends, and reads until the server closes or has said enough. */
static size_t raw_talk(struct web *w, struct raw *r, const char *say, size_t n, char *out,
                       size_t cap)
{
    size_t sent = 0, got = 0;

    for (int turns = 0; turns < 3000; turns++) {
        ssize_t rc = sent < n ? raw_send(r, say + sent, n - sent) : 0;

        sent += rc > 0 ? (size_t)rc : 0;
        rc = raw_recv(r, out + got, cap - 1 - got);
        if (rc == 0 || got + 1 == cap)
            break;
        got += rc > 0 ? (size_t)rc : 0;
        out[got] = 0;
        if (rc > 0 && strstr(out, "}"))
            break;
        fl_loop_turn(w->loop, 1);
    }
    out[got] = 0;
    return got;
}

static void bounds_bodies(void **state)
{
    static const char head[] =
        "POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n";
    static const char chunked[] =
        "POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n";
    struct web w = { .config.body_max_bytes = 1000 };
    char out[4096], *say = malloc(200000);
    size_t n = strlen(chunked);
    struct raw fd;

    (void)state;
    web_open(&w);
    fd = raw_connect(&w);
    raw_talk(&w, &fd, head, strlen(head), out, sizeof(out));
    t_has(out, "HTTP/1.1 413");
    t_has(out, "a body of 99999999999 bytes, at most 1000 are taken");
    raw_close(&fd);
    memcpy(say, chunked, n);
    for (int i = 0; i < 20; i++) {
        n += (size_t)sprintf(say + n, "1000\r\n");
        memset(say + n, 'y', 4096);
        n += 4096;
        n += (size_t)sprintf(say + n, "\r\n");
    }
    n += (size_t)sprintf(say + n, "0\r\n\r\n");
    fd = raw_connect(&w);
    raw_talk(&w, &fd, say, n, out, sizeof(out));
    t_has(out, "HTTP/1.1 413");
    raw_close(&fd);
    t_int_eq(w.handled, 0);
    free(say);
    web_close(&w);
}

static void survives_garbage(void **state)
{
    static const char *const rows[] = {
        "\r\n\r\n\r\n",
        "GET\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "\x16\x03\x01\x02garbage",
        "GET /echo HTTP/1.1\r\n\r\n",
        "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        "GET /../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        "GET /%00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        "GET /echo?q=%zz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    };
    struct web w = { 0 };
    struct ask a = { 0 };
    uint64_t seed = 7;
    char out[4096];
    char *noise = malloc(300000);

    (void)state;
    web_open(&w);
    for (unsigned i = 0; i < FL_LEN(rows); i++) {
        struct raw fd = raw_connect(&w);

        for (int k = 0; k < 3; k++)
            fl_loop_turn(w.loop, 1);
        t_true(raw_send(&fd, rows[i], strlen(rows[i])) > 0);
        for (int k = 0; k < 5; k++)
            fl_loop_turn(w.loop, 1);
        raw_close(&fd);
    }
    for (size_t i = 0; i < 300000; i++)
        noise[i] = (char)(t_random(&seed) >> 32);
    for (int i = 0; i < 20; i++) {
        struct raw fd = raw_connect(&w);

        raw_talk(&w, &fd, noise + i * 10000, 100000, out, sizeof(out));
        raw_close(&fd);
    }
    ask_wait(&w, &a, NULL, "/echo", (struct fl_bytes){ 0 }, NULL);
    t_int_eq(a.answer.status, 200);
    http_answer_fini(&a.answer);
    free(noise);
    web_close(&w);
}

/* Silence is one way, a byte now and then another: neither keeps a connection. */
static void gives_up_on_the_slow(void **state)
{
    static const struct {
        const char *name, *first,
            *then; /* then: over and over, a little at a time; NULL: silence */
    } rows[] = {
        { "not a word", "", NULL },
        { "silent in the headers", "GET /ec", NULL },
        { "slow in the headers", "GET /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n", "X-A: b\r\n" },
        { "silent in the body",
          "POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\nx", NULL },
        { "slow in the body",
          "POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n", "x" },
        { "slow in chunks",
          "POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n",
          "1\r\nx\r\n" },
        { "slow in a second request",
          "GET /open HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /open HTTP/1.1\r\nHost: 127.0.0.1\r\n",
          "X-A: b\r\n" },
    };
    struct web w = { .config = { .idle_ms = 400, .body_max_bytes = 8000 } };
    struct raw all[FL_LEN(rows)];
    bool ended[FL_LEN(rows)] = { 0 };
    unsigned left = FL_LEN(rows);
    char out[4096];

    (void)state;
    web_open(&w);
    for (unsigned i = 0; i < FL_LEN(rows); i++) {
        all[i] = raw_connect(&w);
        if (*rows[i].first)
            t_true(raw_send(&all[i], rows[i].first, strlen(rows[i].first)) > 0, "%s", rows[i].name);
    }
    for (int turn = 0; left; turn++) { /* all of them at once: it is their own time that counts */
        t_true(turn < 1000, "%u connections are kept, one of them: %s", left,
               rows[ended[0] ? ended[1] ? 4 : 1 : 0].name);
        for (unsigned i = 0; i < FL_LEN(rows); i++) {
            ssize_t n;

            if (ended[i])
                continue;
            if (rows[i].then && turn % 5 == 0)
                (void)raw_send(&all[i], rows[i].then, strlen(rows[i].then));
            do
                n = raw_recv(&all[i], out, sizeof(out));
            while (n > 0);
            ended[i] = n == 0;
            left -= ended[i];
        }
        fl_loop_turn(w.loop, 20);
        usleep(5000);
    }
    for (unsigned i = 0; i < FL_LEN(rows); i++)
        raw_close(&all[i]);
    web_close(&w);
}

/* Who fills the server leaves others waiting, not the server broken. */
static void bounds_connections(void **state)
{
    enum { MOST = 8 };
    static const char say[] = "GET /open HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n";
    struct web w = { .config.connections_max = MOST };
    struct raw all[MOST], one;
    char out[4096];
    int taken = 0;

    (void)state;
    web_open(&w);
    for (; taken < MOST; taken++)
        all[taken] = raw_connect(&w);
    for (int i = 0; i < 20; i++)
        fl_loop_turn(w.loop, 1);
    for (int i = 0; i < MOST; i++)
        raw_close(&all[i]);
    for (int i = 0; i < 20; i++)
        fl_loop_turn(w.loop, 1);
    one = raw_connect(&w);
    raw_talk(&w, &one, say, strlen(say), out, sizeof(out));
    t_has(out, "HTTP/1.1 200");
    raw_close(&one);

    /* From other hosts three quarters at most: this host's commands have the rest. */
    struct sockaddr_in near = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) },
                       far = near;

    far.sin_addr.s_addr = htonl(0x0a000001);
    w.server->n_far = MOST * 3 / 4 - 1;
    t_int_eq(http_door_policy(w.server, (struct sockaddr *)&far, sizeof(far)), MHD_YES);
    w.server->n_far = MOST * 3 / 4;
    t_int_eq(http_door_policy(w.server, (struct sockaddr *)&far, sizeof(far)), MHD_NO);
    t_int_eq(http_door_policy(w.server, (struct sockaddr *)&near, sizeof(near)), MHD_YES);
    w.server->n_far = 0;
    web_close(&w);
}

static void says_who_has_the_port(void **state)
{
    struct web w = { 0 };
    struct http_server *other = NULL;
    struct fl_err err = { 0 };

    (void)state;
    web_open(&w);
    w.config.port = http_server_port(w.server);
    t_refused(http_server_create(w.loop, &w.config, &other, &err), FL_EXISTS, &err);
    t_has(err.text, "in use");
    w.config = (struct http_config){ .host = "192.0.2.1", .routes = routes };
    t_refused(http_server_create(w.loop, &w.config, &other, &err), FL_UNREACHABLE, &err);
    w.config.host = "some-name";
    t_refused(http_server_create(w.loop, &w.config, &other, &err), FL_INVALID, &err);
    web_close(&w);
}

static void every_fault_ends_well(void **state)
{
    bool met = true;

    (void)state;
    for (unsigned nth = 1; met; nth++) {
        struct web w = { .fds_before = t_open_fds(),
                         .config = {
                             .routes = routes, .arg = &w, .tls = with_tls ? shown : NULL } };
        struct fl_err err = { 0 };
        struct ask a[3] = { 0 };
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
            a[i].call.done = on_done;
            w.asked = 0;
            snprintf(url, sizeof(url), "%s://127.0.0.1:%u%s", with_tls ? "https" : "http",
                     http_server_port(w.server), paths[i]);
            st = http_start(w.client,
                            &(struct http_ask){ .url = url,
                                                .method = i == 1 ? "POST" : "GET",
                                                .ca_path = ca.cert,
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

/* ---- the blocking client */

static void *serve_thread(void *arg)
{
    fl_loop_run(((struct web *)arg)->loop);
    return NULL;
}

static void fetches(void **state)
{
    struct web w = { 0 };
    struct http_answer a = { 0 };
    struct fl_err err = { 0 };
    char url[100], buf[100];
    pthread_t t;

    (void)state;
    web_open(&w);
    setenv("http_proxy", "http://192.0.2.1:1", 1); /* not asked */
    t_true(pthread_create(&t, NULL, serve_thread, &w) == 0);
    snprintf(url, sizeof(url), "%s/echo?q=1", w.url);
    t_ok(http_fetch(&(struct http_ask){ .url = url, .body = { "xyz", 3 }, .ca_path = ca.cert }, &a,
                    &err),
         &err);
    t_int_eq(a.status, 200);
    t_str_eq(a.body, "xyz");
    t_str_eq(http_answer_header(&a, "X-Query", buf, sizeof(buf)), "1");
    http_answer_fini(&a);
    snprintf(url, sizeof(url), "%s/keep", w.url);
    t_refused(http_fetch(&(struct http_ask){ .url = url, .timeout_ms = 50, .ca_path = ca.cert }, &a,
                         &err),
              FL_TIMEOUT, &err);
    snprintf(url, sizeof(url), "%s/echo", w.url);
    t_refused(http_fetch(
                  &(struct http_ask){
                      .url = url, .body = { "xyz", 3 }, .answer_max_bytes = 2, .ca_path = ca.cert },
                  &a, &err),
              FL_EXHAUSTED, &err);
    t_refused(http_fetch(&(struct http_ask){ .url = "http://127.0.0.1:1/" }, &a, &err),
              FL_UNREACHABLE, &err);
    t_has(err.text, "127.0.0.1:1");
    t_refused(http_fetch(&(struct http_ask){ .url = "file:///etc/passwd" }, &a, &err), FL_INVALID,
              &err);
    t_refused(http_fetch(&(struct http_ask){ .url = "http://[" }, &a, &err), FL_INVALID, &err);
    t_refused(http_fetch(&(struct http_ask){ .url = "" }, &a, &err), FL_INVALID, &err);
    fl_loop_stop(w.loop);
    pthread_join(t, NULL);
    unsetenv("http_proxy");
    web_close(&w);
}

/* ---- TLS on one side, or a certificate that is not taken: a sentence, and soon */

static void says_what_is_wrong_with_tls(void **state)
{
    struct t_cert other, expired_cert, named_cert;
    struct fl_err err = { 0 };

    (void)state;
    t_cert_make(&other, "other-ca", NULL, NULL, 0, 9);
    t_cert_make(&expired_cert, "expired", &ca, "IP:127.0.0.1", -9, -1);
    t_cert_make(&named_cert, "named", &ca, "DNS:elsewhere", 0, 9);
    const struct {
        const char *name;
        const struct t_cert *cert; /* of the server; NULL: it speaks plainly */
        const char *scheme, *ca;
        bool unverified;
        enum fl_status wanted;
        unsigned status;
        const char *says, *remedy;
    } rows[] = {
        { "all well", &ca, "https", ca.cert, false, FL_OK, 200, "", "" },
        { "plain at a TLS port", &ca, "http", NULL, false, FL_OK, 400, "This port speaks TLS",
          "use https://" },
        { "TLS at a plain port", NULL, "https", ca.cert, false, FL_DENIED, 0, "speaks no TLS",
          "use http://" },
        { "another CA", &ca, "https", other.cert, false, FL_DENIED, 0,
          "not signed by a CA that is trusted", "--verify=FILE" },
        { "no CA given", &ca, "https", NULL, false, FL_DENIED, 0,
          "not signed by a CA that is trusted", "RAY_TLS_CA_CERT" },
        { "no such CA file", &ca, "https", "/nowhere/ca.crt", false, FL_DENIED, 0, "cannot be read",
          "give another" },
        { "another CA, unverified", &ca, "https", other.cert, true, FL_OK, 200, "", "" },
        { "expired", &expired_cert, "https", ca.cert, false, FL_DENIED, 0, "has expired",
          "a new one" },
        { "another name", &named_cert, "https", ca.cert, false, FL_DENIED, 0,
          "does not name this address", "subjectAltName" },
    };
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct web w = { 0 };
        struct http_answer a = { 0 };
        struct tls_id *id = shown;
        char url[100];
        pthread_t t;

        if (rows[i].cert && rows[i].cert != &ca)
            t_ok(tls_id_create(rows[i].cert->cert, rows[i].cert->key, ca.cert, &id, &err), &err);
        w.fds_before = t_open_fds();
        w.config =
            (struct http_config){ .routes = routes, .arg = &w, .tls = rows[i].cert ? id : NULL };
        t_ok(fl_loop_create(NULL, &w.loop, &err), &err);
        t_ok(http_server_create(w.loop, &w.config, &w.server, &err), &err);
        t_true(pthread_create(&t, NULL, serve_thread, &w) == 0);
        snprintf(url, sizeof(url), "%s://127.0.0.1:%u/open", rows[i].scheme,
                 http_server_port(w.server));
        err = (struct fl_err){ 0 };
        t_int_eq(http_fetch(&(struct http_ask){ .url = url,
                                                .ca_path = rows[i].ca,
                                                .unverified = rows[i].unverified,
                                                .timeout_ms = 10000 },
                            &a, &err),
                 rows[i].wanted, "%s: %s", rows[i].name, err.text);
        t_int_eq(a.status, rows[i].status, "%s", rows[i].name);
        t_has(rows[i].wanted == FL_OK ? a.body : err.text, rows[i].says);
        t_has(rows[i].wanted == FL_OK ? a.body : err.text, rows[i].remedy);
        http_answer_fini(&a);
        fl_loop_stop(w.loop);
        pthread_join(t, NULL);
        web_close(&w);
        if (id != shown)
            tls_id_destroy(id);
    }
    t_cert_free(&other);
    t_cert_free(&expired_cert);
    t_cert_free(&named_cert);
}

/* ---- a socket that is read to its end */

struct heard {
    char text[200100];
    size_t len;
    int stop; /* is made readable when all of it is there; -1: nobody stops */
    size_t stop_at;
    enum fl_status answer;
};

static enum fl_status on_heard(void *arg, unsigned status, struct fl_bytes piece)
{
    struct heard *h = arg;

    t_int_eq(status, 101);
    t_true(h->len + piece.len < sizeof(h->text));
    memcpy(h->text + h->len, piece.data, piece.len);
    h->len += piece.len;
    if (h->stop >= 0 && h->len >= h->stop_at)
        t_true(write(h->stop, "x", 1) == 1);
    return h->answer;
}

static void reads_sockets(void **state)
{
    static const char *const headers[] = { "Authorization: Bearer x", NULL };
    enum { ALL = 4 + 200000 + 6 };
    static const struct {
        const char *name, *path;
        enum fl_status answer, wanted;
        bool stop;
        size_t len;
        const char *text;
    } rows[] = {
        { "to its end", "/socket/close", FL_OK, FL_OK, false, ALL, "" },
        { "closed with an error", "/socket/fail", FL_OK, FL_UNREACHABLE, false, ALL, "code 1011" },
        { "stopped from outside", "/socket/stay", FL_OK, FL_CANCELLED, true, ALL, "stopped" },
        { "ended by who reads", "/socket/stay", FL_EXHAUSTED, FL_EXHAUSTED, false, 0, "ended" },
        { "no such path", "/none", FL_OK, FL_NOT_FOUND, false, 0, "404" },
        { "no socket there", "/echo", FL_OK, FL_INVALID, false, 0, "answered 200" },
    };
    struct web w = { 0 };
    pthread_t t;

    (void)state;
    web_open(&w);
    t_true(pthread_create(&t, NULL, serve_thread, &w) == 0);
    for (unsigned i = 0; i < FL_LEN(rows); i++) {
        struct heard *h = calloc(1, sizeof(*h));
        struct fl_err err = { 0 };
        char url[100];
        int fds[2];

        t_true(h && pipe(fds) == 0);
        snprintf(url, sizeof(url), "%s%s", w.url, rows[i].path);
        *h = (struct heard){ .stop = rows[i].stop ? fds[1] : -1, .stop_at = ALL, .answer = rows[i].answer };
        struct http_ask ask = { .url = url, .headers = headers, .ca_path = ca.cert, .piece = on_heard, .arg = h };

        t_int_eq(http_ws_read(&ask, fds[0], &err), rows[i].wanted, "%s: %s", rows[i].name, err.text);
        t_has(err.text, rows[i].text);
        if (rows[i].len)
            t_int_eq(h->len, rows[i].len, "%s", rows[i].name);
        t_true(!rows[i].len || (memcmp(h->text, "one\nyyy", 7) == 0 && memcmp(h->text + ALL - 6, "\xc3\xa9 end", 6) == 0), "%s", rows[i].name);
        close(fds[0]);
        close(fds[1]);
        free(h);
    }
    struct fl_err err = { 0 };

    t_refused(http_ws_read(&(struct http_ask){ .url = "http://127.0.0.1:1/x", .piece = on_heard }, -1, &err), FL_UNREACHABLE, &err);
    t_refused(http_ws_read(&(struct http_ask){ .url = "ftp://127.0.0.1:1/x", .piece = on_heard }, -1, &err), FL_INVALID, &err);
    fl_loop_stop(w.loop);
    pthread_join(t, NULL);
    web_close(&w);
}

/* What answers instead of a head, byte by byte: nothing of it is taken for a socket. */
static void *garbage_thread(void *arg)
{
    int fd = *(int *)arg;

    for (;;) {
        static const char *const says[] = { "HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: no\r\n\r\n", "SSH-2.0\r\n\r\n", "" };
        static unsigned n;
        char buf[2048];
        int c = accept(fd, NULL, NULL);

        if (c < 0)
            return NULL;
        (void)!recv(c, buf, sizeof(buf), 0);
        (void)!send(c, says[n % 3], strlen(says[n % 3]), MSG_NOSIGNAL);
        n++;
        close(c);
    }
}

static void reads_no_garbage(void **state)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    char url[64];
    pthread_t t;

    (void)state;
    t_true(fd >= 0 && bind(fd, (struct sockaddr *)&at, len) == 0 && listen(fd, 4) == 0 && getsockname(fd, (struct sockaddr *)&at, &len) == 0);
    t_true(pthread_create(&t, NULL, garbage_thread, &fd) == 0);
    snprintf(url, sizeof(url), "http://127.0.0.1:%u/x", ntohs(at.sin_port));
    for (unsigned i = 0; i < 3; i++) {
        struct fl_err err = { 0 };
        enum fl_status st = http_ws_read(&(struct http_ask){ .url = url, .piece = on_heard }, -1, &err);

        t_int_eq(st, i == 2 ? FL_UNREACHABLE : FL_CORRUPT, "%u: %s", i, err.text);
    }
    shutdown(fd, SHUT_RDWR);
    pthread_join(t, NULL);
    close(fd);
}

int main(void)
{
#define BOTH(test)                                                                                 \
    { #test, test, plainly, NULL, NULL },                                                          \
    {                                                                                              \
#test ", TLS", test, over_tls, NULL, NULL                                                  \
    }
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(finds_routes),
        cmocka_unit_test(knows_its_names),
        BOTH(answers),
        BOTH(refuses),
        BOTH(asks_for_the_token),
        BOTH(answers_later),
        BOTH(tells_when_the_client_left),
        BOTH(ends_with_requests_that_wait),
        BOTH(streams_with_back_pressure),
        BOTH(streams_as_it_comes),
        BOTH(ends_with_a_stream_open),
        BOTH(bounds_bodies),
        BOTH(survives_garbage),
        BOTH(gives_up_on_the_slow),
        BOTH(bounds_connections),
        BOTH(says_who_has_the_port),
        BOTH(every_fault_ends_well),
        BOTH(fetches),
        cmocka_unit_test(says_what_is_wrong_with_tls),
        cmocka_unit_test(answers),
        cmocka_unit_test(refuses),
        cmocka_unit_test(asks_for_the_token),
        cmocka_unit_test(answers_later),
        cmocka_unit_test(tells_when_the_client_left),
        cmocka_unit_test(ends_with_requests_that_wait),
        cmocka_unit_test(streams_with_back_pressure),
        cmocka_unit_test(streams_as_it_comes),
        cmocka_unit_test(ends_with_a_stream_open),
        cmocka_unit_test(bounds_bodies),
        cmocka_unit_test(survives_garbage),
        cmocka_unit_test(gives_up_on_the_slow),
        cmocka_unit_test(says_who_has_the_port),
        cmocka_unit_test(every_fault_ends_well),
        cmocka_unit_test(fetches),
        cmocka_unit_test(reads_sockets),
        cmocka_unit_test(reads_no_garbage),
    };

    t_cert_make(&ca, "ca", NULL, NULL, 0, 2);
    shown = t_tls_id("server", &ca);
    int rc = t_run("http", tests);

    tls_id_destroy(shown);
    t_cert_free(&ca);
    return rc;
}
