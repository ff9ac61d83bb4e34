#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "transport/http/server_priv.h"
#include "transport/tls/tls.h"

enum { BACKLOG = 128, IGNORED_MAX = 4 << 20, LAST_TURNS = 8 };

/* ---- MHD's turns: its epoll descriptor is one of ours, and its next timeout a timer of ours */

static void run(struct http_mhd *m)
{
    MHD_UNSIGNED_LONG_LONG ms;

    MHD_run(m->daemon);
    if (MHD_get_timeout(m->daemon, &ms) == MHD_YES)
        fl_timer_arm_in(m->server->loop, &m->timer, ms);
    else
        fl_timer_cancel(&m->timer);
}

static void on_ready(void *arg, unsigned events)
{
    (void)events;
    run(arg);
}

static void on_timer(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    run(container_of(t, struct http_mhd, timer));
}

static void mhd_end(struct http_mhd *m)
{
    fl_watch_destroy(m->watch);
    if (m->daemon)
        MHD_stop_daemon(m->daemon);
    fl_timer_cancel(&m->timer); /* last: its connections may have kicked */
    free(m);
}

static void on_kick(struct fl_task *t)
{
    struct http_server *s = container_of(t, struct http_server, kick);

    for (struct http_mhd **at = &s->mhd, *m; (m = *at) != NULL;) {
        run(m);
        if (m == s->mhd || m->n_conns) {
            at = &m->older;
            continue;
        }
        *at = m->older;
        mhd_end(m);
    }
}

void http_kick(struct http_server *s)
{
    fl_post(s->loop, &s->kick); /* never inside MHD: a handler may be under way */
}

/* ---- who may ask */

static bool is_loopback(struct MHD_Connection *conn)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(conn, MHD_CONNECTION_INFO_CLIENT_ADDRESS);

    return info && fl_sockaddr_is_loopback(info->client_addr);
}

static void refuse(struct http_req *req, unsigned status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

static void refuse(struct http_req *req, unsigned status, const char *fmt, ...)
{
    va_list ap;

    req->early = status;
    va_start(ap, fmt);
    vsnprintf(req->early_text, sizeof(req->early_text), fmt, ap);
    va_end(ap);
}

/* A person followed a link on another site: what comes is shown in a window of its own, and that
 * site cannot read it. A frame or a script of theirs says otherwise here. */
static bool followed_link(const struct http_req *req)
{
    const char *mode = http_req_header(req, "Sec-Fetch-Mode");
    const char *dest = http_req_header(req, "Sec-Fetch-Dest");

    return strcmp(req->method, "GET") == 0 && mode && strcasecmp(mode, "navigate") == 0 && dest &&
           strcasecmp(dest, "document") == 0;
}

/* A page of another site must not make a browser speak to us, whatever it asks for. */
static bool from_here(struct http_req *req)
{
    const char *host = http_req_header(req, "Host"), *origin = http_req_header(req, "Origin");
    const char *site = http_req_header(req, "Sec-Fetch-Site");

    if (host && !http_host_ok(host, req->server->host, (const char *const *)req->server->hosts)) {
        refuse(req, 403,
               "Host %.100s is no name of this server: use its address, or name it in the "
               "server's hosts",
               host);
        return false;
    }
    if (!http_origin_ok(origin, host) ||
        (site && strcasecmp(site, "cross-site") == 0 && !followed_link(req))) {
        refuse(req, 403, "a page of another site (Origin %.100s) may not ask here",
               origin ? origin : "hidden");
        return false;
    }
    return true;
}

static bool allowed(struct http_req *req)
{
    struct http_server *s = req->server;
    const char *bearer = http_bearer(http_req_header(req, "Authorization"));

    if (req->route->open)
        return true;
    if (s->c.allowed ? s->c.allowed(s->c.arg, req, bearer, req->loopback) : req->loopback)
        return true;
    if (!bearer)
        http_reply_header(req, "WWW-Authenticate", "Bearer");
    refuse(req, bearer ? 403 : 401,
           bearer ? "the token is not this server's"
                  : "a token is needed from other hosts: Authorization: Bearer TOKEN");
    return false;
}

/* What is refused before the body is looked at. */
static void look(struct http_req *req)
{
    const char *length = http_req_header(req, "Content-Length");
    const struct http_config *c = &req->server->c;
    int64_t n;
    bool known;

    req->early = c->refuses ? c->refuses(c->arg, req, req->early_text, sizeof(req->early_text)) : 0;
    if (req->early || !from_here(req))
        return;
    req->route =
        http_route_find(req->server->c.routes, req->method, req->path, &req->params, &known);
    if (!req->route && http_plain_errors(req)) {
        refuse(req, known ? 405 : 404, "%s", known ? "405: Method Not Allowed" : "404: Not Found");
        return;
    }
    if (!req->route) {
        refuse(req, known ? 405 : 404, known ? "%s is not for %.120s" : "there is no %s %.120s",
               req->method, req->path);
        return;
    }
    if (!allowed(req))
        return;
    req->body_max =
        req->route->body_max_bytes ? req->route->body_max_bytes : req->server->c.body_max_bytes;
    if (length &&
        (fl_parse_i64(length, 0, INT64_MAX, &n, NULL) != FL_OK || (uint64_t)n > req->body_max))
        refuse(req, 413, "a body of %.20s bytes, at most %zu are taken", length, req->body_max);
    else
        http_door_headers(req, length ? (uint64_t)n : req->body_max);
}

/* ---- one request through MHD */

static struct http_req *begin(struct http_server *s, struct MHD_Connection *conn, const char *url,
                              const char *method)
{
    struct http_req *req = FL_FAULT("http.req") ? NULL : calloc(1, sizeof(*req));

    if (!req)
        return NULL;
    req->server = s;
    req->conn = conn;
    req->loopback = is_loopback(conn);
    req->next = s->reqs;
    if (req->next)
        req->next->prev = req;
    s->reqs = req;
    if (!FL_COPY(req->method, method) || !FL_COPY(req->path, url))
        refuse(req, 414, "a path of more than %d bytes", HTTP_PATH_MAX - 1);
    else
        look(req);
    return req;
}

static bool take(struct http_req *req, const char *data, size_t n)
{
    if (!req->early && n > req->body_max - req->body_len)
        refuse(req, 413, "the body has more than %zu bytes", req->body_max);
    if (req->early) {
        req->ignored += n;
        return req->ignored <= IGNORED_MAX; /* then it is closed instead of answered */
    }
    if (req->body_len + n + 1 > req->body_cap) {
        size_t cap = req->body_cap ? req->body_cap * 2 : 4096;
        char *p;

        cap = cap > req->body_len + n + 1 ? cap : req->body_len + n + 1;
        if (req->server->bodies_bytes + cap - req->body_cap > HTTP_BODIES_MAX) {
            refuse(req, 503, "bodies of %d MiB are being read already; try again",
                   HTTP_BODIES_MAX >> 20);
            return true;
        }
        p = FL_FAULT("http.body") ? NULL : realloc(req->body, cap);
        if (!p)
            return false;
        req->server->bodies_bytes += cap - req->body_cap;
        req->body = p;
        req->body_cap = cap;
    }
    memcpy(req->body + req->body_len, data, n);
    req->body_len += n;
    req->body[req->body_len] = 0;
    return true;
}

static enum MHD_Result handle(struct http_req *req)
{
    struct http_server *s = req->server;

    if (s->ending)
        refuse(req, 503, "this server ends");
    if (req->early) {
        http_set_error(req, req->early, req->early_text);
        req->state = HTTP_ANSWERED;
        return http_req_answer(req);
    }
    req->state = HTTP_HANDLED;
    req->in_handler = true;
    req->route->handle(s->c.arg, req);
    req->in_handler = false;
    if (req->state == HTTP_ANSWERED || req->state == HTTP_STREAMING || req->state == HTTP_UPGRADED)
        return http_req_answer(req);
    if (req->state == HTTP_LEFT) /* cut before it began */
        return MHD_NO;
    req->suspended = true;
    MHD_suspend_connection(req->conn);
    return MHD_YES;
}

static enum MHD_Result on_request(void *arg, struct MHD_Connection *conn, const char *url,
                                  const char *method, const char *version, const char *data,
                                  size_t *data_len, void **slot)
{
    struct http_req *req = *slot;

    (void)version;
    if (!req) {
        *slot = req = begin(arg, conn, url, method);
        if (!req)
            return MHD_NO;
        /* A body that is refused is not waited for: MHD answers now and closes. */
        if (req->early && http_req_header(req, "Content-Length") &&
            strcmp(http_req_header(req, "Content-Length"), "0") != 0)
            return handle(req);
        return MHD_YES;
    }
    if (*data_len) {
        size_t n = *data_len;

        *data_len = 0;
        return take(req, data, n) ? MHD_YES : MHD_NO;
    }
    switch (req->state) {
    case HTTP_READING:
        http_door_whole(req);
        return handle(req);
    case HTTP_ANSWERED:
    case HTTP_STREAMING:
    case HTTP_UPGRADED:
        return http_req_answer(req); /* it slept, and has its answer now */
    default:
        return MHD_NO;
    }
}

static void on_completed(void *arg, struct MHD_Connection *conn, void **slot,
                         enum MHD_RequestTerminationCode how)
{
    struct http_req *req = *slot;

    (void)how;
    http_door_answered(arg, conn);
    if (!req)
        return;
    *slot = NULL;
    http_req_left(req);
    http_req_free(req);
}

/* ---- the server */

static enum fl_status listen_at(const char *host, uint16_t *port, int *out, struct fl_err *err)
{
    union {
        struct sockaddr sa;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } a = { .v4 = { .sin_family = AF_INET, .sin_port = htons(*port) } };
    socklen_t len = sizeof(a.v4);
    int fd, one = 1;

    if (inet_pton(AF_INET, strcmp(host, "localhost") == 0 ? "127.0.0.1" : host, &a.v4.sin_addr) !=
        1) {
        a.v6 = (struct sockaddr_in6){ .sin6_family = AF_INET6, .sin6_port = htons(*port) };
        len = sizeof(a.v6);
        if (inet_pton(AF_INET6, host, &a.v6.sin6_addr) != 1)
            return fl_fail(err, FL_INVALID, "HTTP at %s: that is no address", host);
    }
    fd = FL_FAULT("http.socket")
             ? -1
             : socket(a.sa.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return fl_fail_errno(err, "socket for HTTP at %s port %u", host, *port);
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)); /* bind says it */
    if (FL_FAULT("http.bind") || bind(fd, &a.sa, len) < 0 || listen(fd, BACKLOG) < 0 ||
        getsockname(fd, &a.sa, &len) < 0) {
        int number = errno;

        close(fd);
        errno = number;
        if (number == EADDRINUSE)
            return fl_fail(err, FL_EXISTS,
                           "HTTP port %u of %s is in use by another process: choose another "
                           "one",
                           *port, host);
        if (number == EADDRNOTAVAIL)
            return fl_fail(err, FL_UNREACHABLE, "no interface of this machine has the address %s",
                           host);
        return fl_fail_errno(err, "HTTP at %s port %u", host, *port);
    }
    *port = ntohs(a.sa.sa_family == AF_INET ? a.v4.sin_port : a.v6.sin6_port);
    *out = fd;
    return FL_OK;
}

/* The byte at p, as %XX or as it is; how many characters that took. */
static size_t byte_at(const char *p, char *out)
{
    unsigned byte;

    *out = *p;
    if (p[0] != '%' || !isxdigit((unsigned char)p[1]) || !isxdigit((unsigned char)p[2]))
        return *p != '\0';
    (void)sscanf(p + 1, "%2x", &byte);
    *out = (char)byte;
    return 3;
}

/* %XX as bytes, in place, where they make characters. What would be no UTF-8, or a NUL that ends
 * the text and makes it another's, stays as it is written: answers quote what was asked, as JSON.
 */
static size_t unescape(void *arg, struct MHD_Connection *conn, char *text)
{
    size_t n = 0;

    (void)arg;
    (void)conn;
    for (const char *p = text; *p;) {
        char c[4];
        size_t ends[4], got = 0, at = 0, used;

        while (got < 4 && (used = byte_at(p + at, &c[got])) > 0)
            ends[got++] = at += used;
        size_t len = c[0] ? fl_utf8_len(c, got) : 0;

        if (len) {
            memcpy(text + n, c, len);
            p += ends[len - 1];
            n += len;
        } else {
            text[n++] = *p++ == '%' ? '%' : '?';
        }
    }
    text[n] = '\0';
    return n;
}

static struct MHD_Daemon *start_mhd(struct http_mhd *m, const struct tls_pem *pem)
{
    struct http_server *s = m->server;
    struct MHD_OptionItem tls[] = {
        { MHD_OPTION_HTTPS_MEM_CERT, 0, pem ? pem->cert : NULL },
        { MHD_OPTION_HTTPS_MEM_KEY, 0, pem ? pem->key : NULL },
        { MHD_OPTION_HTTPS_PRIORITIES, 0,
          (void *)(uintptr_t) "NORMAL:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2" },
        { MHD_OPTION_END, 0, NULL },
    };
    struct MHD_OptionItem plain[] = { { MHD_OPTION_END, 0, NULL } };
    unsigned idle_s = (s->c.idle_ms + 999) / 1000;
    unsigned how = MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_ALLOW_UPGRADE |
                   MHD_USE_NO_LISTEN_SOCKET | (pem ? MHD_USE_TLS : 0);

    return MHD_start_daemon(how, 0, NULL, NULL, on_request, s, MHD_OPTION_NOTIFY_COMPLETED,
                            on_completed, s, MHD_OPTION_NOTIFY_CONNECTION, http_door_notify, m,
                            MHD_OPTION_CONNECTION_LIMIT, s->c.connections_max,
                            MHD_OPTION_CONNECTION_TIMEOUT, idle_s,
                            MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HTTP_CONNECTION_MEMORY,
                            MHD_OPTION_UNESCAPE_CALLBACK, unescape, NULL, MHD_OPTION_ARRAY,
                            pem ? tls : plain, MHD_OPTION_END);
}

static enum fl_status mhd_create(struct http_server *s, const struct tls_pem *pem,
                                 struct http_mhd **out, struct fl_err *err)
{
    const union MHD_DaemonInfo *info;
    struct http_mhd *m = calloc(1, sizeof(*m));
    enum fl_status st;

    if (!m)
        return fl_fail(err, FL_EXHAUSTED, "no memory for an HTTP server");
    m->server = s;
    m->timer.fire = on_timer;
    if (!FL_FAULT("http.start"))
        m->daemon = start_mhd(m, pem);
    info = m->daemon ? MHD_get_daemon_info(m->daemon, MHD_DAEMON_INFO_EPOLL_FD) : NULL;
    st = !m->daemon
             ? fl_fail(err, FL_EXHAUSTED,
                       "HTTP at %s port %u could not start: out of memory or descriptors%s",
                       s->host, s->port, pem ? ", or GnuTLS does not take the certificate" : "")
         : !info ? fl_fail(err, FL_UNSUPPORTED, "libmicrohttpd has no epoll here")
                 : fl_watch_create(s->loop, info->epoll_fd, POLLIN, on_ready, m, &m->watch, err);
    if (st != FL_OK) {
        mhd_end(m);
        return st;
    }
    *out = m;
    return FL_OK;
}

/* The next one, in front of those that there are. */
static enum fl_status mhd_next(struct http_server *s, struct fl_err *err)
{
    struct tls_pem pem = { 0 };
    struct http_mhd *m = NULL;

    if (s->tls)
        FL_TRY(tls_id_pem(s->tls, &pem, err));
    enum fl_status st = mhd_create(s, s->tls ? &pem : NULL, &m, err);

    if (st == FL_OK) {
        m->older = s->mhd;
        s->mhd = m;
        s->tls_turn = pem.turn;
    }
    tls_pem_fini(&pem);
    return st;
}

struct http_mhd *http_mhd_for_new(struct http_server *s)
{
    struct fl_err err;
    unsigned turn = s->tls ? tls_id_look(s->tls) : 0;

    if (turn == s->tls_turn)
        return s->mhd;
    if (mhd_next(s, &err) == FL_OK) {
        http_kick(s); /* the one before may have no connection */
    } else {
        s->tls_turn = turn; /* not again with every connection */
        if (s->tls->renewed)
            s->tls->renewed(s->tls, &err);
    }
    return s->mhd;
}

static enum fl_status start(struct http_server *s, int fd, struct fl_err *err)
{
    enum fl_status st;

    s->tls = s->c.tls;
    if (s->tls && MHD_is_feature_supported(MHD_FEATURE_TLS) != MHD_YES)
        st = fl_fail(err, FL_UNSUPPORTED, "libmicrohttpd was built without TLS here");
    else
        st = mhd_next(s, err);
    if (st == FL_OK)
        return http_door_create(s, fd, err);
    close(fd);
    return st;
}

static enum fl_status copy_names(struct http_server *s, const struct http_config *c,
                                 struct fl_err *err)
{
    size_t n = 0;

    while (c->hosts && c->hosts[n])
        n++;
    s->host = strdup(c->host ? c->host : "127.0.0.1");
    s->hosts = calloc(n + 1, sizeof(*s->hosts));
    for (size_t i = 0; s->hosts && i < n; i++)
        if (!(s->hosts[i] = strdup(c->hosts[i])))
            return fl_fail(err, FL_EXHAUSTED, "no memory for a name");
    s->c.hosts = NULL;
    s->c.host = NULL;
    return s->host && s->hosts ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory for a name");
}

enum fl_status http_server_create(struct fl_loop *l, const struct http_config *c,
                                  struct http_server **out, struct fl_err *err)
{
    struct http_server *s = calloc(1, sizeof(*s));
    enum fl_status st;
    int fd = -1;

    if (!s)
        return fl_fail(err, FL_EXHAUSTED, "no memory for an HTTP server");
    s->loop = l;
    s->c = *c;
    s->c.body_max_bytes = c->body_max_bytes ? c->body_max_bytes : HTTP_BODY_MAX;
    s->c.connections_max = c->connections_max ? c->connections_max : HTTP_CONNECTIONS;
    s->c.idle_ms = c->idle_ms ? c->idle_ms : HTTP_IDLE_MS;
    s->port = c->port;
    s->kick.run = on_kick;
    st = copy_names(s, c, err);
    if (st == FL_OK)
        st = listen_at(s->host, &s->port, &fd, err);
    if (st == FL_OK)
        st = start(s, fd, err);
    if (st != FL_OK) {
        http_server_destroy(s);
        return st;
    }
    *out = s;
    return FL_OK;
}

uint16_t http_server_port(const struct http_server *s)
{
    return s->port;
}

/* Connections that sleep are woken before MHD stops, or it would wait for them. */
static void answer_the_rest(struct http_server *s)
{
    bool again = true;

    s->ending = true;
    for (int i = 0; i < LAST_TURNS && again; i++) {
        again = false;
        for (struct http_req *req = s->reqs, *next; req; req = next) {
            next = req->next;
            again |= req->suspended;
            http_req_end(req);
        }
        for (struct http_mhd *m = s->mhd; m; m = m->older) {
            MHD_run(m->daemon);
            MHD_run(m->daemon); /* one turn takes up what was woken, the next one writes */
        }
    }
}

void http_server_destroy(struct http_server *s)
{
    if (!s)
        return;
    door_destroy(s->door);
    s->door = NULL;
    if (s->mhd) {
        http_ws_end_all(s);
        answer_the_rest(s);
    }
    for (struct http_mhd *m = s->mhd, *older; m; m = older) {
        older = m->older;
        mhd_end(m);
    }
    fl_task_cancel(s->loop, &s->kick);
    for (char **h = s->hosts; h && *h; h++)
        free(*h);
    free(s->hosts);
    free(s->host);
    free(s);
}
