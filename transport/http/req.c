#include <assert.h>
#include <poll.h>
#include <stdlib.h>
#include <strings.h>

#include "common/base/fault.h"
#include "common/conf/json.h"
#include "transport/http/server_priv.h"

#define JSON_TYPE "application/json; charset=utf-8"
#define TEXT_TYPE "text/plain; charset=utf-8"

/* ---- what was asked */

const char *http_req_method(const struct http_req *req)
{
    return req->method;
}

const char *http_req_path(const struct http_req *req)
{
    return req->path;
}

const char *http_req_param(const struct http_req *req, const char *name)
{
    for (unsigned i = 0; i < req->params.n; i++)
        if (strcmp(req->params.p[i].name, name) == 0)
            return req->params.p[i].value;
    return NULL;
}

const char *http_req_query(const struct http_req *req, const char *name)
{
    return MHD_lookup_connection_value(req->conn, MHD_GET_ARGUMENT_KIND, name);
}

const char *http_req_header(const struct http_req *req, const char *name)
{
    return MHD_lookup_connection_value(req->conn, MHD_HEADER_KIND, name);
}

struct fl_bytes http_req_body(const struct http_req *req)
{
    return (struct fl_bytes){ req->body ? req->body : "", req->body_len };
}

const char *http_req_cookie(const struct http_req *req, const char *name)
{
    return MHD_lookup_connection_value(req->conn, MHD_COOKIE_KIND, name);
}

char *http_req_take_body(struct http_req *req, size_t *len)
{
    char *body = req->body;

    *len = req->body_len;
    req->server->bodies_bytes -= req->body_cap;
    req->body = NULL;
    req->body_len = req->body_cap = 0;
    return body;
}

struct query_walk {
    const char *name;
    void (*each)(void *arg, const char *value);
    void *arg;
};

static enum MHD_Result on_query(void *arg, enum MHD_ValueKind kind, const char *key,
                                const char *value)
{
    struct query_walk *w = arg;

    (void)kind;
    if (strcmp(key, w->name) == 0)
        w->each(w->arg, value ? value : "");
    return MHD_YES;
}

void http_req_each_query(const struct http_req *req, const char *name,
                         void (*each)(void *arg, const char *value), void *arg)
{
    struct query_walk w = { name, each, arg };

    MHD_get_connection_values(req->conn, MHD_GET_ARGUMENT_KIND, on_query, &w);
}

bool http_req_from_loopback(const struct http_req *req)
{
    return req->loopback;
}

bool http_req_is_tls(const struct http_req *req)
{
    return req->server->tls != NULL;
}

enum fl_status http_req_number(const struct http_req *req, const char *name, uint64_t absent,
                               uint64_t max, uint64_t *out, struct fl_err *err)
{
    const char *text = http_req_query(req, name);
    int64_t n;

    if (!text) {
        *out = absent;
        return FL_OK;
    }
    if (fl_parse_i64(text, 0, max > INT64_MAX ? INT64_MAX : (int64_t)max, &n, err) != FL_OK)
        return fl_wrap(err, FL_INVALID, "%s of the query", name);
    *out = (uint64_t)n;
    return FL_OK;
}

enum fl_status http_req_json(const struct http_req *req, json_t **out, struct fl_err *err)
{
    json_t *j;

    FL_TRY(
        fl_json_parse(req->body ? req->body : "", req->body_len, "body", req->body_max, &j, err));
    if (!json_is_object(j)) {
        json_decref(j);
        return fl_fail(err, FL_INVALID, "the body is no JSON object");
    }
    *out = j;
    return FL_OK;
}

/* ---- a client that leaves */

static void hangup_stop(struct http_req *req)
{
    fl_watch_destroy(req->hangup);
    req->hangup = NULL;
}

static void resume(struct http_req *req)
{
    if (!req->suspended)
        return;
    req->suspended = false;
    MHD_resume_connection(req->conn);
    http_kick(req->server);
}

void http_req_left(struct http_req *req)
{
    void (*gone)(void *arg, struct http_req *r) = req->gone;

    hangup_stop(req);
    if (req->ws) {
        http_ws_lost(req->ws);
        req->ws = NULL;
    }
    if (req->state != HTTP_HANDLED && req->state != HTTP_STREAMING)
        return;
    req->state = HTTP_LEFT;
    req->gone = NULL;
    if (gone)
        gone(req->gone_arg, req);
    fl_task_cancel(req->server->loop, &req->more_task);
}

static void hung_up(void *arg, unsigned events)
{
    struct http_req *req = arg;

    (void)events;
    http_req_left(req);
    resume(req); /* MHD closes it */
}

/* MHD does not look at a connection that sleeps, so we do. */
void http_req_on_gone(struct http_req *req, void (*gone)(void *arg, struct http_req *req),
                      void *arg)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(req->conn, MHD_CONNECTION_INFO_CONNECTION_FD);

    req->gone = gone;
    req->gone_arg = arg;
    hangup_stop(req);
    if (gone && info) /* without a watch it is told when the answer is sent */
        (void)fl_watch_create(req->server->loop, info->connect_fd, POLLRDHUP, hung_up, req,
                              &req->hangup, NULL);
}

void *http_req_gone_arg(const struct http_req *req)
{
    return req->gone_arg;
}

/* ---- answers */

void http_reply_header(struct http_req *req, const char *name, const char *fmt, ...)
{
    va_list ap;
    size_t n;

    if (req->n_headers == FL_LEN(req->headers))
        return;
    n = req->n_headers++;
    fl_copy(req->headers[n].name, sizeof(req->headers[n].name), name);
    va_start(ap, fmt);
    vsnprintf(req->headers[n].value, sizeof(req->headers[n].value), fmt, ap);
    va_end(ap);
    for (char *p = req->headers[n].value; *p; p++)
        if ((unsigned char)*p < ' ')
            *p = ' '; /* a line end would begin a header of somebody else's choice */
}

void http_set_response(struct http_req *req, unsigned status, const char *type,
                       struct MHD_Response *r)
{
    assert(req->state == HTTP_READING || req->state == HTTP_HANDLED);
    req->response = r;
    req->status = status;
    if (r) {
        if (type)
            MHD_add_response_header(r, MHD_HTTP_HEADER_CONTENT_TYPE, type);
        MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
        MHD_add_response_header(r, HTTP_PRODUCT_HEADER, FURLONG_VERSION); /* refusals too: who answers is known */
        MHD_add_response_header(r, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
        for (unsigned i = 0; i < req->n_headers; i++)
            MHD_add_response_header(r, req->headers[i].name, req->headers[i].value);
    }
}

void http_answered(struct http_req *req, enum http_state state)
{
    if (state != HTTP_STREAMING) {
        hangup_stop(req);
        req->gone = NULL;
    }
    req->state = state;
    if (!req->in_handler)
        resume(req); /* MHD asks for the answer in its next turn */
}

enum MHD_Result http_req_answer(struct http_req *req)
{
    enum MHD_Result rc;

    if (!req->response)
        return MHD_NO; /* no memory: the connection is closed */
    rc = MHD_queue_response(req->conn, req->status, req->response);
    MHD_destroy_response(req->response); /* MHD keeps its own reference */
    req->response = NULL;
    return rc;
}

static struct MHD_Response *text_response(char *text_take, size_t len)
{
    return MHD_create_response_from_buffer(len, text_take, MHD_RESPMEM_MUST_FREE);
}

static void json_error(struct http_req *req, unsigned status, const char *text)
{
    char room[2048];
    struct fl_str clean = FL_STR_ON(room);

    fl_str_add_utf8(&clean, text, strlen(text)); /* it may quote what was asked */
    json_t *j = json_pack("{s:s}", "error", fl_str_text(&clean));
    char *out = j ? json_dumps(j, JSON_COMPACT) : NULL;

    json_decref(j);
    http_set_response(req, status, JSON_TYPE, out ? text_response(out, strlen(out)) : NULL);
}

bool http_plain_errors(const struct http_req *req)
{
    const struct http_config *c = &req->server->c;

    return c->plain_errors &&
           !(c->json_below && strncmp(req->path, c->json_below, strlen(c->json_below)) == 0);
}

void http_set_error(struct http_req *req, unsigned status, const char *text)
{
    if (http_plain_errors(req)) {
        http_set_response(req, status, TEXT_TYPE,
                          MHD_create_response_from_buffer(strlen(text), (void *)(uintptr_t)text,
                                                          MHD_RESPMEM_MUST_COPY));
        return;
    }
    json_error(req, status, text);
}

void http_reply_json(struct http_req *req, unsigned status, json_t *take)
{
    char *out =
        take && !FL_FAULT("http.json") ? json_dumps(take, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;

    json_decref(take);
    if (out)
        http_set_response(req, status, JSON_TYPE, text_response(out, strlen(out)));
    else
        http_set_error(req, 500, "no memory for the answer");
    http_answered(req, HTTP_ANSWERED);
}

void http_reply_bytes(struct http_req *req, unsigned status, const char *content_type,
                      struct fl_bytes bytes)
{
    http_set_response(
        req, status, content_type,
        MHD_create_response_from_buffer(
            bytes.len, (void *)(uintptr_t)(bytes.data ? bytes.data : ""), MHD_RESPMEM_MUST_COPY));
    http_answered(req, HTTP_ANSWERED);
}

void http_reply_error(struct http_req *req, unsigned status, const char *fmt, ...)
{
    char text[512];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    json_error(req, status, text);
    http_answered(req, HTTP_ANSWERED);
}

void http_reply_text(struct http_req *req, unsigned status, const char *fmt, ...)
{
    char text[4096];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    http_reply_bytes(req, status, TEXT_TYPE, (struct fl_bytes){ text, strlen(text) });
}

void http_reply_fail(struct http_req *req, const struct fl_err *err)
{
    http_reply_error(req, http_status_of(err->status), "%s", err->text);
}

unsigned http_status_of(enum fl_status st)
{
    static const uint16_t table[FL_STATUS_COUNT] = {
        // clang-format off
        [FL_OK] = 200,          [FL_AGAIN] = 503,     [FL_INVALID] = 400,   [FL_EXHAUSTED] = 503,
        [FL_UNREACHABLE] = 502, [FL_UNSUPPORTED] = 501, [FL_CORRUPT] = 400, [FL_STALE] = 409,
        [FL_DENIED] = 403,      [FL_EXISTS] = 409,    [FL_NOT_FOUND] = 404, [FL_TIMEOUT] = 504,
        [FL_CANCELLED] = 503,   [FL_INTERNAL] = 500,
        // clang-format on
    };

    return st < FL_STATUS_COUNT ? table[st] : 500;
}

/* ---- answers bit by bit */

static ssize_t stream_read(void *arg, uint64_t pos, char *out, size_t max)
{
    struct http_req *req = arg;
    size_t n = req->stream_len - req->stream_from;

    (void)pos;
    if (req->state == HTTP_LEFT)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    if (n == 0 && req->stream_end)
        return MHD_CONTENT_READER_END_OF_STREAM;
    if (n == 0) {
        req->suspended = true; /* until there is more to send */
        MHD_suspend_connection(req->conn);
        return 0;
    }
    n = n < max ? n : max;
    memcpy(out, req->stream + req->stream_from, n);
    req->stream_from += n;
    if (req->stream_from == req->stream_len)
        req->stream_from = req->stream_len = 0;
    if (req->stream_full && req->stream_len - req->stream_from <= HTTP_STREAM_BYTES / 2) {
        req->stream_full = false;
        fl_defer(req->server->loop, &req->more_task);
    }
    return (ssize_t)n;
}

static void more_task(struct fl_task *t)
{
    struct http_req *req = container_of(t, struct http_req, more_task);

    if (req->state == HTTP_STREAMING && req->more)
        req->more(req->gone_arg, req);
}

enum fl_status http_reply_start(struct http_req *req, unsigned status, const char *content_type,
                                void (*more)(void *arg, struct http_req *req), struct fl_err *err)
{
    struct MHD_Response *r =
        FL_FAULT("http.stream")
            ? NULL
            : MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16 << 10, stream_read, req, NULL);

    if (!r)
        return fl_fail(err, FL_EXHAUSTED, "no memory to answer %s", req->path);
    http_set_response(req, status, content_type, r);
    req->more = more;
    req->more_task.run = more_task;
    http_answered(req, HTTP_STREAMING);
    return FL_OK;
}

enum fl_status http_reply_write(struct http_req *req, struct fl_bytes bytes, struct fl_err *err)
{
    size_t waits = req->stream_len - req->stream_from;

    assert(req->state == HTTP_STREAMING && !req->stream_end);
    if (waits && waits + bytes.len > HTTP_STREAM_BYTES) {
        req->stream_full = true;
        return fl_fail(err, FL_AGAIN, "%zu bytes of the answer wait for the client", waits);
    }
    if (req->stream_from) {
        memmove(req->stream, req->stream + req->stream_from, waits);
        req->stream_from = 0;
        req->stream_len = waits;
    }
    if (req->stream_cap < waits + bytes.len) {
        size_t cap = waits + bytes.len < 4096 ? 4096 : waits + bytes.len;
        char *p = FL_FAULT("http.stream") ? NULL : realloc(req->stream, cap);

        if (!p)
            return fl_fail(err, FL_EXHAUSTED, "no memory for %zu bytes of the answer", cap);
        req->stream = p;
        req->stream_cap = cap;
    }
    if (bytes.len)
        memcpy(req->stream + waits, bytes.data, bytes.len);
    req->stream_len = waits + bytes.len;
    resume(req);
    return FL_OK;
}

void http_reply_end(struct http_req *req)
{
    req->stream_end = true;
    req->gone = NULL;
    hangup_stop(req);
    req->state = HTTP_ANSWERED;
    resume(req);
}

void http_reply_cut(struct http_req *req)
{
    req->gone = NULL;
    hangup_stop(req);
    req->state = HTTP_LEFT;
    resume(req);
}

void http_req_end(struct http_req *req)
{
    enum http_state was = req->state;

    if (was != HTTP_HANDLED && was != HTTP_STREAMING)
        return;
    http_req_left(req);
    if (was == HTTP_HANDLED) {
        req->state = HTTP_HANDLED;
        http_set_error(req, 503, "this server ends");
        req->state = HTTP_ANSWERED;
    }
    resume(req);
}

void http_req_free(struct http_req *req)
{
    hangup_stop(req);
    fl_task_cancel(req->server->loop, &req->more_task);
    if (req->response)
        MHD_destroy_response(req->response);
    *(req->prev ? &req->prev->next : &req->server->reqs) = req->next;
    if (req->next)
        req->next->prev = req->prev;
    req->server->bodies_bytes -= req->body_cap;
    free(req->body);
    free(req->stream);
    free(req);
}
