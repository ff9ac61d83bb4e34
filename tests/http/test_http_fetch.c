/* The clients that block: a request, a certificate that is looked at, a socket that is read to its
 * end */
#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/http/rig.h"

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
    t_true(pthread_create(&t, NULL, web_serve_thread, &w) == 0);
    snprintf(url, sizeof(url), "%s/echo?q=1", w.url);
    t_ok(http_fetch(&(struct http_ask){ .url = url, .body = { "xyz", 3 }, .ca_path = web_ca.cert },
                    &a, &err),
         &err);
    t_int_eq(a.status, 200);
    t_str_eq(a.body, "xyz");
    t_str_eq(http_answer_header(&a, "X-Query", buf, sizeof(buf)), "1");
    http_answer_fini(&a);
    snprintf(url, sizeof(url), "%s/keep", w.url);
    t_refused(http_fetch(&(struct http_ask){ .url = url, .timeout_ms = 50, .ca_path = web_ca.cert },
                         &a, &err),
              FL_TIMEOUT, &err);
    snprintf(url, sizeof(url), "%s/echo", w.url);
    t_refused(http_fetch(&(struct http_ask){ .url = url,
                                             .body = { "xyz", 3 },
                                             .answer_max_bytes = 2,
                                             .ca_path = web_ca.cert },
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
    t_cert_make(&expired_cert, "expired", &web_ca, "IP:127.0.0.1", -9, -1);
    t_cert_make(&named_cert, "named", &web_ca, "DNS:elsewhere", 0, 9);
    const struct {
        const char *name;
        const struct t_cert *cert; /* of the server; NULL: it speaks plainly */
        const char *scheme, *ca;
        bool unverified;
        enum fl_status wanted;
        unsigned status;
        const char *says, *remedy;
    } rows[] = {
        { "all well", &web_ca, "https", web_ca.cert, false, FL_OK, 200, "", "" },
        { "plain at a TLS port", &web_ca, "http", NULL, false, FL_OK, 400, "This port speaks TLS",
          "use https://" },
        { "TLS at a plain port", NULL, "https", web_ca.cert, false, FL_DENIED, 0, "speaks no TLS",
          "use http://" },
        { "another CA", &web_ca, "https", other.cert, false, FL_DENIED, 0,
          "not signed by a CA that is trusted", "--verify=FILE" },
        { "no CA given", &web_ca, "https", NULL, false, FL_DENIED, 0,
          "not signed by a CA that is trusted", "RAY_TLS_CA_CERT" },
        { "no such CA file", &web_ca, "https", "/nowhere/ca.crt", false, FL_DENIED, 0,
          "cannot be read", "give another" },
        { "another CA, unverified", &web_ca, "https", other.cert, true, FL_OK, 200, "", "" },
        { "expired", &expired_cert, "https", web_ca.cert, false, FL_DENIED, 0, "has expired",
          "a new one" },
        { "another name", &named_cert, "https", web_ca.cert, false, FL_DENIED, 0,
          "does not name this address", "subjectAltName" },
    };
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct web w = { 0 };
        struct http_answer a = { 0 };
        struct tls_id *id = web_id;
        char url[100];
        pthread_t t;

        if (rows[i].cert && rows[i].cert != &web_ca)
            t_ok(tls_id_create(rows[i].cert->cert, rows[i].cert->key, web_ca.cert, &id, &err),
                 &err);
        w.fds_before = t_open_fds();
        w.config = (struct http_config){ .routes = web_routes,
                                         .arg = &w,
                                         .tls = rows[i].cert ? id : NULL };
        t_ok(fl_loop_create(NULL, &w.loop, &err), &err);
        t_ok(http_server_create(w.loop, &w.config, &w.server, &err), &err);
        t_true(pthread_create(&t, NULL, web_serve_thread, &w) == 0);
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
        if (id != web_id)
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
    t_true(pthread_create(&t, NULL, web_serve_thread, &w) == 0);
    for (unsigned i = 0; i < FL_LEN(rows); i++) {
        struct heard *h = calloc(1, sizeof(*h));
        struct fl_err err = { 0 };
        char url[100];
        int fds[2];

        t_true(h && pipe(fds) == 0);
        snprintf(url, sizeof(url), "%s%s", w.url, rows[i].path);
        *h = (struct heard){ .stop = rows[i].stop ? fds[1] : -1,
                             .stop_at = ALL,
                             .answer = rows[i].answer };
        struct http_ask ask = {
            .url = url, .headers = headers, .ca_path = web_ca.cert, .piece = on_heard, .arg = h
        };

        t_int_eq(http_ws_read(&ask, fds[0], &err), rows[i].wanted, "%s: %s", rows[i].name,
                 err.text);
        t_has(err.text, rows[i].text);
        if (rows[i].len)
            t_int_eq(h->len, rows[i].len, "%s", rows[i].name);
        t_true(!rows[i].len || (memcmp(h->text, "one\nyyy", 7) == 0 &&
                                memcmp(h->text + ALL - 6, "\xc3\xa9 end", 6) == 0),
               "%s", rows[i].name);
        close(fds[0]);
        close(fds[1]);
        free(h);
    }
    struct fl_err err = { 0 };

    t_refused(http_ws_read(&(struct http_ask){ .url = "http://127.0.0.1:1/x", .piece = on_heard },
                           -1, &err),
              FL_UNREACHABLE, &err);
    t_refused(http_ws_read(&(struct http_ask){ .url = "ftp://127.0.0.1:1/x", .piece = on_heard },
                           -1, &err),
              FL_INVALID, &err);
    fl_loop_stop(w.loop);
    pthread_join(t, NULL);
    web_close(&w);
}

/* What answers instead of a head, byte by byte: nothing of it is taken for a socket. */
static void *garbage_thread(void *arg)
{
    int fd = *(int *)arg;

    for (;;) {
        static const char *const says[] = {
            "HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: no\r\n\r\n",
            "SSH-2.0\r\n\r\n", ""
        };
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

/* A byte now and then, which never makes an answer. */
static void *trickle_thread(void *arg)
{
    int c = accept(*(int *)arg, NULL, NULL);
    struct pollfd gone = { .fd = c, .events = POLLRDHUP };

    while (c >= 0 && poll(&gone, 1, 10) == 0 && send(c, "H", 1, MSG_NOSIGNAL) == 1)
        continue;
    close(c);
    return NULL;
}

/* A server that is none, of one thread. */
struct false_server {
    int fd;
    char url[64];
    pthread_t thread;
};

static void false_start(struct false_server *f, void *(*run)(void *fd))
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t len = sizeof(at);

    f->fd = socket(AF_INET, SOCK_STREAM, 0);
    t_true(f->fd >= 0 && bind(f->fd, (struct sockaddr *)&at, len) == 0 && listen(f->fd, 4) == 0 &&
           getsockname(f->fd, (struct sockaddr *)&at, &len) == 0);
    snprintf(f->url, sizeof(f->url), "http://127.0.0.1:%u/x", ntohs(at.sin_port));
    t_true(pthread_create(&f->thread, NULL, run, &f->fd) == 0);
}

static void false_end(struct false_server *f)
{
    shutdown(f->fd, SHUT_RDWR);
    pthread_join(f->thread, NULL);
    close(f->fd);
}

static void waits_for_no_trickle(void **state)
{
    struct false_server f;
    struct fl_err err = { 0 };

    (void)state;
    false_start(&f, trickle_thread);
    t_refused(http_ws_read(&(struct http_ask){ .url = f.url, .timeout_ms = 300, .piece = on_heard },
                           -1, &err),
              FL_TIMEOUT, &err);
    false_end(&f);
}

static void reads_no_garbage(void **state)
{
    struct false_server f;

    (void)state;
    false_start(&f, garbage_thread);
    for (unsigned i = 0; i < 3; i++) {
        struct fl_err err = { 0 };
        enum fl_status st =
            http_ws_read(&(struct http_ask){ .url = f.url, .piece = on_heard }, -1, &err);

        t_int_eq(st, i == 2 ? FL_UNREACHABLE : FL_CORRUPT, "%u: %s", i, err.text);
    }
    false_end(&f);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        WEB_BOTH(fetches),
        WEB_PLAIN(says_what_is_wrong_with_tls),
        WEB_BOTH(reads_sockets),
        WEB_PLAIN(reads_no_garbage),
        WEB_PLAIN(waits_for_no_trickle),
    };

    return web_run("http fetch", tests);
}
