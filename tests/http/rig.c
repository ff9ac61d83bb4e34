#include "tests/http/rig.h"

struct t_cert web_ca;
struct tls_id *web_id;
bool web_tls;

int web_plainly(void **state)
{
    (void)state;
    web_tls = false;
    return 0;
}

int web_over_tls(void **state)
{
    (void)state;
    web_tls = true;
    return 0;
}

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

uint8_t web_stream_byte(size_t at)
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
            piece[i] = web_stream_byte(w->asked + i);
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

/* A socket that says a little, a lot, and then ends as the path asks: properly, with an error, or
 * not at all. */
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

const struct http_route web_routes[] = {
    { "GET", "/socket/{how}", h_socket, 0, false },
    { NULL, "/echo", h_echo, 0, false },
    { "GET", "/echo/{id}/x", h_echo, 0, false },
    { "POST", "/big", h_echo, 20 << 20, false },
    { "GET", "/keep", h_keep, 0, false },
    { "POST", "/json", h_json, 0, false },
    { "GET", "/stream", h_stream, 0, false },
    { "GET", "/open", h_echo, 0, true },
    { 0 },
};

void web_open(struct web *w)
{
    struct fl_err err = { 0 };

    w->fds_before = t_open_fds();
    t_ok(fl_loop_create(NULL, &w->loop, &err), &err);
    w->config.routes = web_routes;
    w->config.arg = w;
    w->config.tls = web_tls ? web_id : NULL;
    t_ok(http_server_create(w->loop, &w->config, &w->server, &err), &err);
    t_ok(http_client_create(w->loop, &w->client, &err), &err);
    snprintf(w->url, sizeof(w->url), "%s://127.0.0.1:%u", web_tls ? "https" : "http",
             http_server_port(w->server));
}

void web_close(struct web *w)
{
    http_client_destroy(w->client);
    http_server_destroy(w->server);
    fl_loop_destroy(w->loop);
    t_int_eq(t_open_fds(), w->fds_before);
}

void web_on_done(struct http_call *c, enum fl_status st, struct http_answer *answer,
                 const struct fl_err *err)
{
    struct web_ask *a = container_of(c, struct web_ask, call);

    a->done++;
    a->st = st;
    if (err)
        a->err = *err;
    if (answer) {
        a->answer = *answer;
        *answer = (struct http_answer){ 0 };
    }
}

const char *web_header(struct web_ask *a, const char *name)
{
    return http_answer_header(&a->answer, name, a->header, sizeof(a->header));
}

void web_ask(struct web *w, struct web_ask *a, const char *method, const char *path,
             struct fl_bytes body, const char *const *headers)
{
    struct fl_err err = { 0 };
    char url[300];

    http_answer_fini(&a->answer);
    *a = (struct web_ask){ .call.done = web_on_done };
    snprintf(url, sizeof(url), "%s%s", w->url, path);
    t_ok(http_start(w->client,
                    &(struct http_ask){ .method = method,
                                        .url = url,
                                        .body = body,
                                        .headers = headers,
                                        .ca_path = web_ca.cert },
                    &a->call, &err),
         &err);
}

void web_ask_wait(struct web *w, struct web_ask *a, const char *method, const char *path,
                  struct fl_bytes body, const char *const *headers)
{
    web_ask(w, a, method, path, body, headers);
    t_until(w->loop, a->done, 10000);
    t_int_eq(a->st, FL_OK, "%s", a->err.text);
}

void *web_serve_thread(void *arg)
{
    fl_loop_run(((struct web *)arg)->loop);
    return NULL;
}

void web_certs_make(void)
{
    t_cert_make(&web_ca, "ca", NULL, NULL, 0, 2);
    web_id = t_tls_id("server", &web_ca);
}

int web_certs_end(int rc)
{
    tls_id_destroy(web_id);
    t_cert_free(&web_ca);
    return rc;
}
