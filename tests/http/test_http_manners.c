/* A raw client with bad manners: the server's bounds */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/http/rig.h"
#include "transport/http/server_priv.h"

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
    if (!web_tls)
        return r;
    t_ok(tls_session_create(web_id, r.fd, "127.0.0.1", &r.tls, &err), &err);
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
    struct web_ask a = { 0 };
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
    web_ask_wait(&w, &a, NULL, "/echo", (struct fl_bytes){ 0 }, NULL);
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
    web_close(&w);
}

/* Who speaks something else is told what is spoken here, and where to go. */
static void says_what_is_spoken_here(void **state)
{
    static const char elsewhere[] = "worker daemons join at 10.77.0.1:6379";
    static const struct {
        const char *name, *first;
        size_t n;
        bool tls; /* the server's */
        const char *says;
    } rows[] = {
        { "HTTP/2 at a plain port", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33, false,
          "This port speaks HTTP/1.1 without TLS (http://); worker daemons join at 10.77.0.1:6379" },
        { "TLS at a plain port", "\x16\3\1\2\0\1\0\1\xfc\3\3", 11, false,
          "This port speaks HTTP/1.1 without TLS (http://); worker daemons join at 10.77.0.1:6379\n" },
        { "HTTP/2 at a port with TLS", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33, true,
          "This port speaks TLS: use https:// in place of http://, and for `ray job` --verify=FILE with the CA's "
          "certificate; worker daemons join at 10.77.0.1:6379" },
        { "HTTP/1 at a port with TLS", "GET / HTTP/1.1\r\n\r\n", 18, true, "This port speaks TLS: use https://" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct web w = { 0 };
        struct raw r;
        char out[4096];
        size_t n;

        web_tls = rows[i].tls;
        web_open(&w);
        http_server_says(w.server, elsewhere);
        web_tls = false; /* of the client */
        r = raw_connect(&w);
        n = raw_talk(&w, &r, rows[i].first, rows[i].n, out, sizeof(out));
        t_true(memmem(out, n, rows[i].says, strlen(rows[i].says)) != NULL, "%s: %.*s", rows[i].name, (int)n, out);
        raw_close(&r);
        web_close(&w);
    }
}

/* A client that says all that it has to say and ends its half with it has its answers, and then the end: it does not
 * keep a connection until the time of a silent one. */
static void notices_a_half_close(void **state)
{
    static const char once[] = "GET /open HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
    static const char *const rows[] = { once, "GET /open HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
                                              "GET /open HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct web w = { 0 };
        struct raw r;
        char out[4096] = "", *second;
        size_t n;

        web_open(&w);
        r = raw_connect(&w);
        t_int_eq(raw_send(&r, rows[i], strlen(rows[i])), strlen(rows[i]));
        t_true(shutdown(r.fd, SHUT_WR) == 0);
        n = raw_talk(&w, &r, "", 0, out, sizeof(out)); /* to the end: three seconds at most */
        t_true(n > 0);
        second = strstr(out + 1, "HTTP/1.1 200");
        t_true(strncmp(out, "HTTP/1.1 200", 12) == 0 && (second != NULL) == (i == 1), "%zu: %s", i, out);
        t_true(raw_recv(&r, out, sizeof(out)) == 0, "the connection is kept");
        t_int_eq(w.server->n_conns, 0);
        raw_close(&r);
        web_close(&w);
    }
}

/* A certificate that is replaced is shown to who comes next; who is there keeps the connection. */
static void shows_the_new_certificate(void **state)
{
    static const char say[] = "GET /open HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
    char cert[FL_PATH_MAX], key[FL_PATH_MAX], out[4096];
    struct tls_id *live, *kept = web_id, *others;
    struct t_cert ca, first, second, other;
    struct raw old, new;
    struct fl_err err = { 0 };
    struct web w = { 0 };

    (void)state;
    t_cert_make(&other, "another-ca", NULL, NULL, 0, 9);
    t_cert_make(&ca, "old-ca", NULL, NULL, 0, 9);
    t_cert_make(&first, "first", &ca, "IP:127.0.0.1", 0, 9);
    t_cert_make(&second, "second", &other, "IP:127.0.0.1", 0, 9);
    snprintf(cert, sizeof(cert), "%s", t_path("live.crt"));
    snprintf(key, sizeof(key), "%s", t_path("live.key"));
    t_put(cert, first.cert);
    t_put(key, first.key);
    t_ok(tls_id_create(cert, key, ca.cert, &live, &err), &err);
    live->look_ns = 0;
    web_id = live;
    web_open(&w);
    old = raw_connect(&w);
    raw_talk(&w, &old, say, strlen(say), out, sizeof(out));
    t_has(out, "HTTP/1.1 200");
    t_put(cert, second.cert);
    t_put(key, second.key);
    t_ok(tls_id_create(second.cert, second.key, other.cert, &others, &err), &err);
    web_id = others;
    new = raw_connect(&w);
    raw_talk(&w, &new, say, strlen(say), out, sizeof(out));
    t_has(out, "HTTP/1.1 200");
    t_true(w.server->mhd->older != NULL, "the old one has a connection");
    raw_talk(&w, &old, say, strlen(say), out, sizeof(out));
    t_has(out, "HTTP/1.1 200");
    raw_close(&old);
    t_until(w.loop, !w.server->mhd->older, 5000);
    t_put(key, first.key); /* half of a pair: the one before is shown on */
    raw_close(&new);
    new = raw_connect(&w);
    raw_talk(&w, &new, say, strlen(say), out, sizeof(out));
    t_has(out, "HTTP/1.1 200");
    raw_close(&new);
    web_id = kept;
    web_close(&w);
    tls_id_destroy(live);
    tls_id_destroy(others);
    t_cert_free(&ca);
    t_cert_free(&other);
    t_cert_free(&first);
    t_cert_free(&second);
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
    w.config = (struct http_config){ .host = "192.0.2.1", .routes = web_routes };
    t_refused(http_server_create(w.loop, &w.config, &other, &err), FL_UNREACHABLE, &err);
    w.config.host = "some-name";
    t_refused(http_server_create(w.loop, &w.config, &other, &err), FL_INVALID, &err);
    web_close(&w);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        WEB_BOTH(bounds_bodies),         WEB_BOTH(survives_garbage),
        WEB_BOTH(gives_up_on_the_slow),  WEB_BOTH(bounds_connections),
        WEB_PLAIN(says_what_is_spoken_here), WEB_PLAIN(notices_a_half_close),
        { "shows_the_new_certificate", shows_the_new_certificate, web_over_tls, NULL, NULL },
        WEB_BOTH(says_who_has_the_port),
    };

    return web_run("http manners", tests);
}
