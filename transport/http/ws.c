/* A connection that has become a WebSocket: MHD hands its socket over and keeps the account */
#include <errno.h>
#include <openssl/evp.h>
#include <poll.h>
#include <stdlib.h>
#include <strings.h>
#include <sys/socket.h>
#include <wslay/wslay.h>

#include "common/base/fault.h"
#include "transport/http/server_priv.h"

enum {
    WS_RECV_MAX = 64 << 10, /* of one message; clients have nothing to say */
    WS_PING_MS = 20000,     /* so that what lies between does not take it for idle */
    WS_CLOSE_MS = 5000,     /* for the other side to answer our close frame */
    WS_KEY_BYTES = 24,      /* 16 bytes in base64 */
};
#define WS_GUID "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

struct http_ws {
    struct http_ws *prev, *next; /* of the server's */
    struct http_server *server;
    struct MHD_UpgradeResponseHandle *urh; /* NULL: MHD has not handed it over yet */
    int fd;
    struct fl_watch *watch;
    wslay_event_context_ptr frames;
    const struct http_ws_user *user;
    void *arg;
    bool full, closing, over;
    uint16_t code; /* to close with, once all that waits has left */
    struct fl_timer timer;
    struct fl_task task; /* more, or the end */
};

/* ---- frames ---- */

static ssize_t on_recv(wslay_event_context_ptr ctx, uint8_t *buf, size_t len, int flags, void *arg)
{
    const struct http_ws_io *io = arg;
    ssize_t n;

    (void)flags;
    do
        n = io->recv(io->arg, buf, len);
    while (n < 0 && errno == EINTR);
    if (n > 0)
        return n;
    wslay_event_set_error(ctx, n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)
                                   ? WSLAY_ERR_WOULDBLOCK
                                   : WSLAY_ERR_CALLBACK_FAILURE);
    return -1;
}

static ssize_t on_send(wslay_event_context_ptr ctx, const uint8_t *data, size_t len, int flags,
                       void *arg)
{
    const struct http_ws_io *io = arg;
    ssize_t n;

    (void)flags;
    do
        n = io->send(io->arg, data, len);
    while (n < 0 && errno == EINTR);
    if (n >= 0)
        return n;
    wslay_event_set_error(ctx, errno == EAGAIN || errno == EWOULDBLOCK
                                   ? WSLAY_ERR_WOULDBLOCK
                                   : WSLAY_ERR_CALLBACK_FAILURE);
    return -1;
}

static wslay_event_context_ptr frames_of(const struct http_ws_io *io)
{
    static const struct wslay_event_callbacks calls = { .recv_callback = on_recv,
                                                        .send_callback = on_send };
    wslay_event_context_ptr frames = NULL;

    if (FL_FAULT("http.ws.frames") ||
        wslay_event_context_server_init(&frames, &calls, (void *)(uintptr_t)io) != 0)
        return NULL;
    wslay_event_config_set_max_recv_msg_length(frames, WS_RECV_MAX);
    wslay_event_config_set_no_buffering(frames, 1); /* nobody reads what clients send */
    return frames;
}

enum fl_status http_ws_feed(const struct http_ws_io *io, bool *closed)
{
    wslay_event_context_ptr frames = frames_of(io);

    if (!frames)
        return FL_EXHAUSTED;
    int bad = wslay_event_recv(frames);
    if (!bad && wslay_event_want_write(frames))
        bad = wslay_event_send(frames);
    *closed = wslay_event_get_close_received(frames);
    wslay_event_context_free(frames);
    return bad ? FL_CORRUPT : FL_OK;
}

void http_ws_accept_key(const char *key, char out[32])
{
    uint8_t digest[EVP_MAX_MD_SIZE];
    char text[128];
    unsigned n = 0;
    struct fl_str s = FL_STR_ON(text);

    fl_str_add(&s, "%s%s", key, WS_GUID);
    EVP_Digest(s.data, s.len, digest, &n, EVP_sha1(), NULL); /* what RFC 6455 fixed; no secret */
    EVP_EncodeBlock((unsigned char *)out, digest, 20);
}

/* ---- the socket ---- */

static ssize_t io_recv(void *arg, void *buf, size_t len)
{
    return recv(((struct http_ws *)arg)->fd, buf, len, MSG_DONTWAIT);
}

static ssize_t io_send(void *arg, const void *data, size_t len)
{
    return send(((struct http_ws *)arg)->fd, data, len, MSG_DONTWAIT | MSG_NOSIGNAL);
}

struct ws_and_io { /* one piece of memory: wslay keeps the address of the second */
    struct http_ws ws;
    struct http_ws_io io;
};

static void ws_free(struct http_ws *ws)
{
    fl_timer_cancel(&ws->timer);
    fl_task_cancel(ws->server->loop, &ws->task);
    fl_watch_destroy(ws->watch);
    if (ws->frames)
        wslay_event_context_free(ws->frames);
    if (ws->urh) {
        MHD_upgrade_action(ws->urh, MHD_UPGRADE_ACTION_CLOSE);
        http_kick(ws->server);
    }
    *(ws->prev ? &ws->prev->next : &ws->server->sockets) = ws->next;
    if (ws->next)
        ws->next->prev = ws->prev;
    free(ws);
}

static void ws_over(struct http_ws *ws)
{
    if (ws->over)
        return;
    ws->over = true;
    fl_watch_destroy(ws->watch);
    ws->watch = NULL;
    fl_defer(ws->server->loop, &ws->task);
}

static void on_task(struct fl_task *t)
{
    struct http_ws *ws = container_of(t, struct http_ws, task);

    if (ws->over) {
        ws->user->gone(ws->arg, ws);
        ws_free(ws);
    } else if (ws->full && !ws->closing) {
        ws->full = false;
        ws->user->more(ws->arg, ws);
    }
}

static void pump(struct http_ws *ws)
{
    if (!ws->urh || ws->over)
        return;
    int bad = wslay_event_send(ws->frames);
    /* wslay sends a close frame before all data that waits, and then no more of it. */
    if (!bad && ws->closing && ws->code && wslay_event_get_queued_msg_count(ws->frames) == 0) {
        bad = wslay_event_queue_close(ws->frames, ws->code, NULL, 0);
        ws->code = 0;
        if (!bad)
            bad = wslay_event_send(ws->frames);
        fl_timer_arm_in(ws->server->loop, &ws->timer, WS_CLOSE_MS);
    }
    if (bad) {
        ws_over(ws);
        return;
    }
    if (ws->full && wslay_event_get_queued_msg_length(ws->frames) <= HTTP_STREAM_BYTES / 2)
        fl_defer(ws->server->loop, &ws->task);
    bool reads = wslay_event_want_read(ws->frames), writes = wslay_event_want_write(ws->frames);
    if (!reads && !writes) {
        ws_over(ws);
        return;
    }
    fl_watch_events(ws->watch, (reads ? POLLIN : 0) | (writes ? POLLOUT : 0));
}

static void on_socket(void *arg, unsigned events)
{
    struct http_ws *ws = arg;

    if ((events & (POLLIN | POLLHUP | POLLERR)) && wslay_event_recv(ws->frames) != 0)
        ws_over(ws);
    pump(ws);
}

static void on_timer(struct fl_timer *t, uint64_t now_ns)
{
    static const struct wslay_event_msg ping = { .opcode = WSLAY_PING };
    struct http_ws *ws = container_of(t, struct http_ws, timer);

    (void)now_ns;
    if (ws->closing && !ws->code) {
        ws_over(ws); /* its close frame does not come */
        return;
    }
    if (wslay_event_get_queued_msg_count(ws->frames) == 0)
        (void)wslay_event_queue_msg(ws->frames, &ping); /* no memory: the next one */
    fl_timer_arm_in(ws->server->loop, &ws->timer, WS_PING_MS);
    pump(ws);
}

/* MHD has sent the 101 and hands over the socket; extra is what came behind the request. */
static void on_upgraded(void *arg, struct MHD_Connection *conn, void *con_cls, const char *extra,
                        size_t extra_len, MHD_socket fd, struct MHD_UpgradeResponseHandle *urh)
{
    struct http_ws *ws = arg;

    (void)conn, (void)extra;
    ((struct http_req *)con_cls)->ws = NULL;
    ws->urh = urh;
    ws->fd = fd;
    if (extra_len || ws->over || /* a client that speaks before it has heard 101 */
        fl_watch_create(ws->server->loop, fd, POLLIN, on_socket, ws, &ws->watch, NULL) != FL_OK) {
        ws->over = true;
        fl_defer(ws->server->loop, &ws->task);
        return;
    }
    fl_timer_arm_in(ws->server->loop, &ws->timer, WS_PING_MS);
    pump(ws);
}

/* ---- the face ---- */

static bool has_word(const char *list, const char *word)
{
    size_t n = strlen(word);

    while (list && *list) {
        list += strspn(list, " \t,");
        size_t len = strcspn(list, ",");
        size_t bare = len;

        while (bare && (list[bare - 1] == ' ' || list[bare - 1] == '\t'))
            bare--;
        if (bare == n && strncasecmp(list, word, n) == 0)
            return true;
        list += len;
    }
    return false;
}

static enum fl_status looks_right(const struct http_req *req, const char **key, struct fl_err *err)
{
    const char *version = http_req_header(req, "Sec-WebSocket-Version");

    *key = http_req_header(req, "Sec-WebSocket-Key");
    if (!has_word(http_req_header(req, "Upgrade"), "websocket") ||
        !has_word(http_req_header(req, "Connection"), "Upgrade"))
        return fl_fail(err, FL_INVALID,
                       "No WebSocket UPGRADE hdr: None\n Can \"Upgrade\" only to \"WebSocket\".");
    if (!version || strcmp(version, "13") != 0)
        return fl_fail(err, FL_INVALID, "Unsupported version: %.20s", version ? version : "None");
    if (!*key || strlen(*key) != WS_KEY_BYTES)
        return fl_fail(err, FL_INVALID,
                       "Handshake error: Sec-WebSocket-Key is not 16 bytes in base64");
    return FL_OK;
}

enum fl_status http_ws_accept(struct http_req *req, const struct http_ws_user *user, void *arg,
                              struct http_ws **out, struct fl_err *err)
{
    struct http_server *s = req->server;
    struct MHD_Response *r = NULL;
    char accept[32];
    const char *key;

    FL_TRY(looks_right(req, &key, err));
    struct ws_and_io *both = FL_FAULT("http.ws") ? NULL : calloc(1, sizeof(*both));
    struct http_ws *ws = both ? &both->ws : NULL;
    if (ws) {
        both->io = (struct http_ws_io){ io_recv, io_send, ws };
        ws->frames = frames_of(&both->io);
        r = ws->frames ? MHD_create_response_for_upgrade(on_upgraded, ws) : NULL;
    }
    if (!r) {
        if (ws && ws->frames)
            wslay_event_context_free(ws->frames);
        free(both);
        return fl_fail(err, FL_EXHAUSTED, "no memory for a WebSocket");
    }
    ws->server = s;
    ws->user = user;
    ws->arg = arg;
    ws->timer.fire = on_timer;
    ws->task.run = on_task;
    ws->next = s->sockets;
    if (ws->next)
        ws->next->prev = ws;
    s->sockets = ws;
    http_ws_accept_key(key, accept);
    http_set_response(req, 101, NULL, r);
    MHD_add_response_header(r, MHD_HTTP_HEADER_UPGRADE, "websocket");
    MHD_add_response_header(r, "Sec-WebSocket-Accept", accept);
    req->ws = ws;
    http_answered(req, HTTP_UPGRADED);
    *out = ws;
    return FL_OK;
}

enum fl_status http_ws_text(struct http_ws *ws, struct fl_bytes text, struct fl_err *err)
{
    struct wslay_event_msg m = { WSLAY_TEXT_FRAME, text.data, text.len };
    size_t waits = wslay_event_get_queued_msg_length(ws->frames);

    if (ws->closing || ws->over)
        return fl_fail(err, FL_CANCELLED, "the WebSocket is closed");
    if (waits && waits + text.len > HTTP_STREAM_BYTES) {
        ws->full = true;
        return fl_fail(err, FL_AGAIN, "%zu bytes wait for the client", waits);
    }
    if (FL_FAULT("http.ws.text") || wslay_event_queue_msg(ws->frames, &m) != 0)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu bytes of a WebSocket", text.len);
    pump(ws);
    return FL_OK;
}

void http_ws_close(struct http_ws *ws, uint16_t code)
{
    if (ws->closing || ws->over)
        return;
    ws->closing = true;
    ws->code = code;
    pump(ws);
}

/* The request ended before MHD had handed its socket over. */
void http_ws_lost(struct http_ws *ws)
{
    if (!ws->urh)
        ws_over(ws);
}

void http_ws_end_all(struct http_server *s)
{
    while (s->sockets) {
        struct http_ws *ws = s->sockets;

        if (ws->urh && !ws->over && wslay_event_queue_close(ws->frames, 1001, NULL, 0) == 0)
            (void)wslay_event_send(ws->frames); /* as far as it goes */
        ws->user->gone(ws->arg, ws);
        ws_free(ws);
    }
}
