/* transport/http/http.h - HTTP in the loop: a server on libmicrohttpd, a client on libcurl
 *
 * All on the loop thread, except http_fetch(). Handlers never block: one that cannot answer now
 * keeps the request and answers it in a later turn; the connection sleeps meanwhile. */
#pragma once
#include <jansson.h>
#include "common/base/base.h"
#include "common/base/loop.h"

/* ==== server ====================================================================================== */
/* Every answer of ours has it, refusals too. A body whose members are somebody else's to choose
 * (/api/version) cannot say whose it is, and Server is what proxies put their own name into. */
#define HTTP_PRODUCT_HEADER "X-Furlong-Version"
struct http_server;
struct tls_id;
struct http_req; /* good until it is answered, or gone() ran; who keeps it beyond the handler sets gone */

struct http_route { /* a table of these, ended by { 0 }; the first that fits serves */
    const char *method;  /* "GET"; NULL: every method */
    const char *pattern; /* "/api/jobs/{id}/stop"; {id} takes one segment, {rest*} all that is left */
    void (*handle)(void *arg, struct http_req *req);
    size_t body_max_bytes; /* 0: the server's */
    bool open;             /* asks no token, from nowhere: /api/version and the page, which holds no data */
};
struct http_config { /* copied, but for the routes */
    const char *host; /* an address of this machine; NULL: 127.0.0.1 */
    uint16_t port;    /* 0: a free one, see http_server_port() */
    const struct http_route *routes;
    void *arg;
    size_t body_max_bytes;     /* 0: 1 MiB; more is answered 413 */
    unsigned connections_max;  /* 0: 256, a quarter of them for loopback alone; beyond: refused, the listener goes on */
    uint32_t idle_ms;          /* 0: 30 s; for silence between bytes, and for all headers of a request; a body has
                                * a second more for each 64 KiB */
    const char *const *hosts;  /* names besides localhost, addresses and host that Host: may carry */
    /* Asked for each request whose route is not open; bearer is NULL without one. NULL: a request
     * from loopback is let in, any other is refused. */
    bool (*allowed)(void *arg, struct http_req *req, const char *bearer, bool from_loopback);
    /* Asked first of all, for every request: the status of a refusal, or 0; text is its body. NULL: none. */
    unsigned (*refuses)(void *arg, struct http_req *req, char *text, size_t cap);
    struct tls_id *tls; /* NULL: plain. Else TLS, with this certificate, or what is put in its place; none is asked of
                         * clients. Borrowed as long as the server */
    bool plain_errors; /* what the server itself refuses is told as text/plain, in aiohttp's words where it has some */
    const char *json_below; /* but below this path as {"error": …} like everything there; NULL: nowhere. A literal */
};
/* Binds and listens. FL_EXISTS: the port is taken; FL_UNREACHABLE: no interface has that address. */
enum fl_status http_server_create(struct fl_loop *l, const struct http_config *c,
                                  struct http_server **out, struct fl_err *err);
uint16_t http_server_port(const struct http_server *s);
/* Whoever speaks no HTTP/1.1 here is told what this port speaks, and this: where else to go. */
void http_server_says(struct http_server *s, const char *elsewhere);
/* Requests that wait for an answer are answered 503 first and their gone() runs. NULL is fine. */
void http_server_destroy(struct http_server *s);

const char *http_req_method(const struct http_req *req);
const char *http_req_path(const struct http_req *req);                     /* decoded, no query   */
const char *http_req_param(const struct http_req *req, const char *name);  /* of the pattern      */
const char *http_req_query(const struct http_req *req, const char *name);  /* decoded, or NULL    */
const char *http_req_header(const struct http_req *req, const char *name); /* any case, or NULL   */
struct fl_bytes http_req_body(const struct http_req *req);                 /* ends in a NUL past len */
const char *http_req_cookie(const struct http_req *req, const char *name); /* or NULL */
/* The body becomes the caller's: free(). NULL with *len 0: there is none. */
char *http_req_take_body(struct http_req *req, size_t *len);
/* Each value of a name that the query may have several times, in its order. */
void http_req_each_query(const struct http_req *req, const char *name,
                         void (*each)(void *arg, const char *value), void *arg);
bool http_req_from_loopback(const struct http_req *req);
bool http_req_is_tls(const struct http_req *req);
/* A whole number of the query, or absent when the name is not there. FL_INVALID names it. */
enum fl_status http_req_number(const struct http_req *req, const char *name, uint64_t absent,
                               uint64_t max, uint64_t *out, struct fl_err *err);
/* The body as a JSON object; the caller owns it: json_decref(). */
enum fl_status http_req_json(const struct http_req *req, json_t **out, struct fl_err *err);

/* The client left, or the server ends, before the answer: req dies when gone returns. */
void http_req_on_gone(struct http_req *req, void (*gone)(void *arg, struct http_req *req), void *arg);
void *http_req_gone_arg(const struct http_req *req);

/* One of these answers, once; req is gone when it returns. */
void http_reply_json(struct http_req *req, unsigned status, json_t *take); /* NULL: no memory, 500 */
void http_reply_bytes(struct http_req *req, unsigned status, const char *content_type,
                      struct fl_bytes bytes); /* content_type NULL: none is told */
void http_reply_error(struct http_req *req, unsigned status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4))); /* {"error": "one sentence"} */
void http_reply_fail(struct http_req *req, const struct fl_err *err); /* status from err->status */
void http_reply_text(struct http_req *req, unsigned status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4))); /* text/plain, at most 4 KiB */
/* A header of the answer to come; before it is given. */
void http_reply_header(struct http_req *req, const char *name, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* An answer of unknown length, written bit by bit. After start the request is the stream's:
 * write copies; FL_AGAIN past 256 KiB waiting, more() runs when there is room again; gone()
 * (http_req_on_gone, its arg is more's too) when the client left. end closes it properly; cut breaks
 * the connection, so that the client knows that something is missing. */
enum fl_status http_reply_start(struct http_req *req, unsigned status, const char *content_type,
                                void (*more)(void *arg, struct http_req *req), struct fl_err *err);
enum fl_status http_reply_write(struct http_req *req, struct fl_bytes bytes, struct fl_err *err);
void http_reply_end(struct http_req *req);
void http_reply_cut(struct http_req *req);

unsigned http_status_of(enum fl_status st);

/* ==== WebSocket =================================================================================== */
struct http_ws;
struct http_ws_user {
    /* After FL_AGAIN: less than half of the bound waits. */
    void (*more)(void *arg, struct http_ws *ws);
    /* Closed, by either side, or the server ends: ws dies when it returns. Never from inside a call. */
    void (*gone)(void *arg, struct http_ws *ws);
};
/* Answers req with 101; what a client sends is read and thrown away. FL_INVALID: it asked for no
 * WebSocket, or wrongly; then req is still to be answered. user is the caller's and stays. */
enum fl_status http_ws_accept(struct http_req *req, const struct http_ws_user *user, void *arg,
                              struct http_ws **out, struct fl_err *err);
/* One text frame; text must be UTF-8. FL_AGAIN past 256 KiB waiting: nothing was taken. */
enum fl_status http_ws_text(struct http_ws *ws, struct fl_bytes text, struct fl_err *err);
/* What waits is sent, then the close frame; gone() follows. Again: nothing more. */
void http_ws_close(struct http_ws *ws, uint16_t code);

/* ==== client ====================================================================================== */
struct http_ask {
    const char *method;          /* NULL: GET, or POST with a body */
    const char *url;
    const char *const *headers;  /* "Name: value", ended by NULL; or NULL */
    struct fl_bytes body;        /* copied when the call is started in a loop */
    uint32_t timeout_ms;         /* of the whole request; 0: 30 s */
    size_t answer_max_bytes;     /* 0: 64 MiB; more ends it FL_EXHAUSTED */
    const char *ca_path;         /* of https: the certificates that are trusted; NULL: the system's */
    bool unverified;             /* of https: whoever answers is believed */
    /* Reading as it comes: body stays empty then. A status other than FL_OK ends the request, and is
     * the only way to end it from inside. */
    enum fl_status (*piece)(void *arg, unsigned status, struct fl_bytes piece);
    void *arg;
};
struct http_answer {
    unsigned status;
    char *body; /* ends in a NUL past body_len */
    size_t body_len;
    char *headers; /* lines of "name: value", names in lower case */
};
void http_answer_fini(struct http_answer *a);
/* Value of a header, "" when it has none, NULL when absent; good until fini. */
const char *http_answer_header(const struct http_answer *a, const char *name, char *buf, size_t cap);

/* Asks and waits: for the command line, no loop needed. Proxies are bypassed, redirects not followed.
 * FL_OK: there is an answer, whatever its status. FL_UNREACHABLE, FL_TIMEOUT, FL_EXHAUSTED, FL_INVALID. */
enum fl_status http_fetch(const struct http_ask *ask, struct http_answer *out, struct fl_err *err);

/* Reads a WebSocket to its end: asks with Upgrade (ask->headers, token and all), hands each piece of text to ask->piece
 * (status 101), answers pings, and gives up a server that is silent for a minute and answers none itself. timeout_ms is
 * for connecting and the answer to Upgrade.
 *
 * stop_fd       readable: reading ends; -1: nothing stops it
 * FL_OK         closed by the server in the proper way
 * FL_CANCELLED  stop_fd, or what piece() returned instead of FL_OK
 * FL_UNREACHABLE, FL_TIMEOUT, FL_CORRUPT  it broke; some of it may have come
 * others        refused by an answer in HTTP: FL_NOT_FOUND, FL_DENIED, FL_INVALID, FL_INTERNAL; err has its text */
enum fl_status http_ws_read(const struct http_ask *ask, int stop_fd, struct fl_err *err);

/* The same inside a loop; done runs once, never from inside http_start(). */
struct http_client;
struct http_call { /* embed it */
    struct http_client *client;
    void *priv;
    void (*done)(struct http_call *c, enum fl_status st, struct http_answer *answer,
                 const struct fl_err *err); /* answer: to look at; keep by moving it out */
};
enum fl_status http_client_create(struct fl_loop *l, struct http_client **out, struct fl_err *err);
void http_client_destroy(struct http_client *c); /* calls in flight come back FL_CANCELLED first */
enum fl_status http_start(struct http_client *c, const struct http_ask *ask, struct http_call *call,
                          struct fl_err *err);
void http_cancel(struct http_call *call); /* done runs now, FL_CANCELLED; idle is fine */
