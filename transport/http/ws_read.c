/* A WebSocket that is read to its end: curl makes the connection (TLS too), wslay the frames */
#include <errno.h>
#include <openssl/evp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <wslay/wslay.h>

#include "common/base/fault.h"
#include "common/base/id.h"
#include "transport/http/server_priv.h"
#include "transport/http/transfer.h"

enum {
    ANSWER_MAX = 32 << 10, /* headers of the answer to Upgrade, or a refusal with its text */
    REQUEST_MAX = 8 << 10,
    PING_MS = 20000,
    SILENT_MS = 60000, /* three pings without an answer */
    NORMAL_CLOSE = 1000,
};
struct reading {
    const struct http_ask *ask;
    CURL *easy;
    int fd, stop_fd;
    wslay_event_context_ptr frames;
    char answer[ANSWER_MAX + 1];
    size_t len, from; /* bytes behind the headers are frames already: [from, len) */
    bool ended, text;
    uint64_t due_ms; /* of the answer to Upgrade, all of it */
    uint64_t heard_ms, pinged_ms;
    enum fl_status piece_st;
};

static uint64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static uint32_t left_ms(const struct reading *r)
{
    uint64_t now = now_ms();

    return now < r->due_ms ? (uint32_t)(r->due_ms - now) : 0;
}

/* FL_OK: events are there, or ms have passed (*none). */
static enum fl_status wait_for(struct reading *r, short events, uint32_t ms, bool *none,
                               struct fl_err *err)
{
    struct pollfd p[2] = { { r->fd, events, 0 }, { r->stop_fd, POLLIN, 0 } };
    int n = poll(p, 2, (int)ms);

    *none = n <= 0;
    if (n < 0 && errno != EINTR)
        return fl_fail_errno(err, "wait for %s", r->ask->url);
    return p[1].revents ? fl_fail(err, FL_CANCELLED, "reading %s was stopped", r->ask->url) : FL_OK;
}

/* ==== the connection ==== */
static enum fl_status connect_to(struct reading *r, struct http_transfer *t, struct fl_err *err)
{
    curl_socket_t fd = CURL_SOCKET_BAD;
    CURLcode rc;

    r->easy = t->easy;
    curl_easy_setopt(r->easy, CURLOPT_CONNECT_ONLY, 1L);
    rc = curl_easy_perform(r->easy);
    if (rc != CURLE_OK)
        return http_transfer_result(t, rc, err);
    if (curl_easy_getinfo(r->easy, CURLINFO_ACTIVESOCKET, &fd) != CURLE_OK || fd == CURL_SOCKET_BAD)
        return fl_fail(err, FL_UNREACHABLE, "%s: the connection has gone", r->ask->url);
    r->fd = fd;
    return FL_OK;
}

static enum fl_status send_all(struct reading *r, const char *data, size_t len, struct fl_err *err)
{
    while (len > 0) {
        size_t n = 0;
        bool none;
        CURLcode rc = curl_easy_send(r->easy, data, len, &n);

        if (rc != CURLE_OK && rc != CURLE_AGAIN)
            return fl_fail(err, FL_UNREACHABLE, "%s: %s", r->ask->url, curl_easy_strerror(rc));
        data += n;
        len -= n;
        if (rc != CURLE_AGAIN)
            continue;
        FL_TRY(wait_for(r, POLLOUT, left_ms(r), &none, err));
        if (none && !left_ms(r))
            return fl_fail(err, FL_TIMEOUT, "%s takes no request", r->ask->url);
    }
    return FL_OK;
}

/* Adds what has come to answer. FL_UNREACHABLE: closed. */
static enum fl_status receive_some(struct reading *r, struct fl_err *err)
{
    while (left_ms(r)) {
        size_t n = 0;
        bool none;
        CURLcode rc = curl_easy_recv(r->easy, r->answer + r->len, ANSWER_MAX - r->len, &n);

        if (rc == CURLE_OK && n > 0) {
            r->len += n;
            r->answer[r->len] = 0;
            return FL_OK;
        }
        if (rc != CURLE_AGAIN)
            return fl_fail(err, FL_UNREACHABLE, "%s: closed before it answered", r->ask->url);
        FL_TRY(wait_for(r, POLLIN, left_ms(r), &none, err));
    }
    return fl_fail(err, FL_TIMEOUT, "%s does not answer in time", r->ask->url);
}

/* ==== Upgrade ==== */
static enum fl_status send_request(struct reading *r, const char *key, struct fl_err *err)
{
    char text[REQUEST_MAX];
    struct fl_str s = FL_STR_ON(text);
    const char *host = strstr(r->ask->url, "://");
    size_t len;

    if (!host)
        return fl_fail(err, FL_INVALID, "'%.100s' is no address", r->ask->url);
    host += 3;
    len = strcspn(host, "/");
    fl_str_add(&s,
               "GET %s HTTP/1.1\r\nHost: %.*s\r\nUpgrade: websocket\r\nConnection: "
               "Upgrade\r\nSec-WebSocket-Version: 13\r\n"
               "Sec-WebSocket-Key: %s\r\nUser-Agent: furlong/" FURLONG_VERSION "\r\n",
               host[len] ? host + len : "/", (int)len, host, key);
    for (const char *const *h = r->ask->headers; h && *h; h++)
        fl_str_add(&s, "%s\r\n", *h);
    fl_str_add(&s, "\r\n");
    return s.cut ? fl_fail(err, FL_INVALID, "%.100s: more than %d bytes of request", r->ask->url,
                           REQUEST_MAX)
                 : send_all(r, s.data, s.len, err);
}

/* Value of a header of the answer, to its line's end; NULL: none. */
static const char *header(const char *answer, const char *name, size_t *len)
{
    size_t n = strlen(name);

    for (const char *p = strstr(answer, "\r\n"); p && p[2] != '\r'; p = strstr(p + 2, "\r\n"))
        if (strncasecmp(p + 2, name, n) == 0 && p[2 + n] == ':') {
            p += 3 + n;
            p += strspn(p, " \t");
            *len = strcspn(p, "\r");
            return p;
        }
    return NULL;
}

static enum fl_status status_of(unsigned http)
{
    return http == 401 || http == 403 ? FL_DENIED
           : http == 404              ? FL_NOT_FOUND
           : http >= 500              ? FL_INTERNAL
                                      : FL_INVALID;
}

/* A refusal: its text is what follows the headers, as far as it is told how much that is. */
static enum fl_status refused(struct reading *r, unsigned status, char *body, struct fl_err *err)
{
    size_t n, at = (size_t)(body - r->answer);
    const char *told = header(r->answer, "content-length", &n);
    size_t want = told ? (size_t)strtoul(told, NULL, 10) : 0;

    while (r->len - at < want && r->len < ANSWER_MAX)
        if (receive_some(r, NULL) != FL_OK)
            break;
    return fl_fail(err, status_of(status), "%s answered %u: %.120s", r->ask->url, status,
                   r->answer + at);
}

static enum fl_status upgrade(struct reading *r, struct fl_err *err)
{
    uint8_t random[16];
    char key[32], accept[32], *end;
    const char *told;
    unsigned status = 0;
    size_t n;

    FL_TRY(fl_random(random, sizeof(random), err));
    EVP_EncodeBlock((unsigned char *)key, random, sizeof(random));
    FL_TRY(send_request(r, key, err));
    while (!(end = strstr(r->answer, "\r\n\r\n"))) {
        if (r->len == ANSWER_MAX)
            return fl_fail(err, FL_CORRUPT, "%s: more than %d bytes of headers", r->ask->url,
                           ANSWER_MAX);
        FL_TRY(receive_some(r, err));
    }
    if (sscanf(r->answer, "HTTP/1.%*1[01] %3u", &status) != 1)
        return fl_fail(err, FL_CORRUPT, "%s answers what is no HTTP", r->ask->url);
    if (status != 101)
        return refused(r, status, end + 4, err);
    http_ws_accept_key(key, accept);
    told = header(r->answer, "sec-websocket-accept", &n);
    if (!told || n != strlen(accept) || memcmp(told, accept, n) != 0)
        return fl_fail(err, FL_CORRUPT, "%s: what answers is no WebSocket", r->ask->url);
    r->from = (size_t)(end + 4 - r->answer);
    return FL_OK;
}

/* ==== frames ==== */
static ssize_t on_recv(wslay_event_context_ptr ctx, uint8_t *buf, size_t len, int flags, void *arg)
{
    struct reading *r = arg;
    size_t n = 0;
    CURLcode rc;

    (void)flags;
    if (r->from < r->len) {
        n = r->len - r->from < len ? r->len - r->from : len;
        memcpy(buf, r->answer + r->from, n);
        r->from += n;
        return (ssize_t)n;
    }
    rc = curl_easy_recv(r->easy, buf, len, &n);
    if (rc == CURLE_OK && n > 0) {
        r->heard_ms = now_ms();
        return (ssize_t)n;
    }
    r->ended = rc != CURLE_AGAIN;
    wslay_event_set_error(ctx,
                          rc == CURLE_AGAIN ? WSLAY_ERR_WOULDBLOCK : WSLAY_ERR_CALLBACK_FAILURE);
    return -1;
}

static ssize_t on_send(wslay_event_context_ptr ctx, const uint8_t *data, size_t len, int flags,
                       void *arg)
{
    struct reading *r = arg;
    size_t n = 0;
    CURLcode rc = curl_easy_send(r->easy, data, len, &n);

    (void)flags;
    if (rc == CURLE_OK)
        return (ssize_t)n;
    r->ended = rc != CURLE_AGAIN;
    wslay_event_set_error(ctx,
                          rc == CURLE_AGAIN ? WSLAY_ERR_WOULDBLOCK : WSLAY_ERR_CALLBACK_FAILURE);
    return -1;
}

static int on_mask(wslay_event_context_ptr ctx, uint8_t *buf, size_t len, void *arg)
{
    (void)ctx;
    (void)arg;
    return fl_random(buf, len, NULL) == FL_OK ? 0 : -1;
}

static void on_chunk(wslay_event_context_ptr ctx,
                     const struct wslay_event_on_frame_recv_chunk_arg *a, void *arg)
{
    struct reading *r = arg;

    (void)ctx;
    if (r->text && r->piece_st == FL_OK && a->data_length)
        r->piece_st = r->ask->piece(r->ask->arg, 101, (struct fl_bytes){ a->data, a->data_length });
}

/* Control frames come between those of a message, and their chunks are no text. */
static void on_frame(wslay_event_context_ptr ctx,
                     const struct wslay_event_on_frame_recv_start_arg *a, void *arg)
{
    (void)ctx;
    ((struct reading *)arg)->text =
        a->opcode == WSLAY_TEXT_FRAME || a->opcode == WSLAY_CONTINUATION_FRAME;
}

static enum fl_status read_frames(struct reading *r, struct fl_err *err)
{
    r->heard_ms = r->pinged_ms = now_ms();
    for (;;) {
        uint64_t now;
        bool none;
        int bad = wslay_event_recv(r->frames);

        if (r->piece_st != FL_OK)
            return fl_fail(err, r->piece_st, "reading %s was ended", r->ask->url);
        if (!bad && wslay_event_want_write(r->frames))
            bad = wslay_event_send(r->frames);
        if (wslay_event_get_close_received(r->frames)) {
            unsigned code = wslay_event_get_status_code_received(r->frames);

            return code == NORMAL_CLOSE || code == WSLAY_CODE_NO_STATUS_RCVD
                       ? FL_OK
                       : fl_fail(err, FL_UNREACHABLE, "%s was closed with code %u", r->ask->url,
                                 code);
        }
        if (r->ended)
            return fl_fail(err, FL_UNREACHABLE, "%s: the connection broke", r->ask->url);
        if (bad || !wslay_event_want_read(r->frames))
            return fl_fail(err, FL_CORRUPT, "%s sends what are no frames", r->ask->url);
        FL_TRY(wait_for(r, wslay_event_want_write(r->frames) ? POLLIN | POLLOUT : POLLIN, PING_MS,
                        &none, err));
        now = now_ms();
        if (now - r->heard_ms > SILENT_MS)
            return fl_fail(err, FL_TIMEOUT, "%s has been silent for %d s", r->ask->url,
                           SILENT_MS / 1000);
        if (now - r->pinged_ms < PING_MS)
            continue;
        r->pinged_ms = now;
        (void)wslay_event_queue_msg(
            r->frames,
            &(struct wslay_event_msg){ .opcode = WSLAY_PING }); /* without memory: the next one */
        (void)wslay_event_send(r->frames);
    }
}

enum fl_status http_ws_read(const struct http_ask *ask, int stop_fd, struct fl_err *err)
{
    static const struct wslay_event_callbacks calls = { .recv_callback = on_recv,
                                                        .send_callback = on_send,
                                                        .genmask_callback = on_mask,
                                                        .on_frame_recv_start_callback = on_frame,
                                                        .on_frame_recv_chunk_callback = on_chunk };
    struct reading *r = calloc(1, sizeof(*r));
    struct http_transfer t;
    enum fl_status st = r ? http_transfer_init(&t, ask, false, err)
                          : fl_fail(err, FL_EXHAUSTED, "no memory to read %s", ask->url);

    if (st != FL_OK) {
        free(r);
        return st;
    }
    r->ask = ask;
    r->stop_fd = stop_fd;
    r->due_ms = now_ms() + (ask->timeout_ms ? ask->timeout_ms : HTTP_TIMEOUT_MS);
    st = connect_to(r, &t, err);
    if (st == FL_OK)
        st = upgrade(r, err);
    if (st == FL_OK &&
        (FL_FAULT("http.ws.read") || wslay_event_context_client_init(&r->frames, &calls, r) != 0))
        st = fl_fail(err, FL_EXHAUSTED, "no memory to read %s", ask->url);
    if (st == FL_OK) {
        wslay_event_config_set_no_buffering(r->frames, 1); /* messages have any length */
        st = read_frames(r, err);
        wslay_event_context_free(r->frames);
    }
    http_transfer_fini(&t);
    free(r);
    return st;
}
