/* transport/http/server_priv.h - the inside of the HTTP server; private to http and its tests */
#pragma once
#include <microhttpd.h>

#include "common/base/addr.h"
#include "common/base/str.h"
#include "transport/door/door.h"
#include "transport/http/http.h"

enum {
    HTTP_PARAMS = 4,
    HTTP_PATH_MAX = 2048,
    HTTP_NAME_MAX = 256,
    HTTP_BODY_MAX = 1 << 20,
    HTTP_CONNECTIONS = 256,
    HTTP_IDLE_MS = 30000,
    HTTP_CONNECTION_MEMORY = 64 << 10, /* headers of one request */
    HTTP_STREAM_BYTES = 256 << 10,
    HTTP_BODIES_MAX = 256 << 20, /* of all requests that are being read */
};
/* ---- route.c: pure */
struct http_params {
    unsigned n;
    struct {
        char name[32];
        const char *value;
    } p[HTTP_PARAMS]; /* values in text */
    char text[HTTP_PATH_MAX];
};
/* The first route that fits. NULL: none; *known: a route with another method would. */
const struct http_route *http_route_find(const struct http_route *routes, const char *method,
                                         const char *path, struct http_params *out, bool *known);
/* Host names a machine of ours: an address, localhost, one of names. A name that anybody can point
 * at this machine is not enough: behind it stands a page of somebody else (DNS rebinding). */
bool http_host_ok(const char *host_header, const char *own_host, const char *const *names);
/* Origin is absent or the very host and port that are asked. */
bool http_origin_ok(const char *origin, const char *host_header);
const char *http_bearer(const char *authorization); /* NULL: none */

/* ---- a request, from its first line until MHD is done with it */
enum http_state {
    HTTP_READING,   /* its body comes                                          */
    HTTP_HANDLED,   /* the handler has it; without an answer so far            */
    HTTP_ANSWERED,  /* response is there, or goes                              */
    HTTP_STREAMING, /* response goes, and more of it is written                */
    HTTP_UPGRADED,  /* its connection is a WebSocket's                         */
    HTTP_LEFT       /* the client is gone: the handler's is over               */
};
struct http_req {
    struct http_server *server;
    struct MHD_Connection *conn;
    const struct http_route *route;
    struct http_req *prev, *next; /* of all */
    enum http_state state;
    char method[16];
    char path[HTTP_PATH_MAX];
    struct http_params params;
    char *body;
    size_t body_len, body_cap, body_max, ignored;
    bool loopback, in_handler, suspended;
    unsigned early; /* status of a refusal that waits for the body to end */
    char early_text[256];

    struct MHD_Response *response;
    unsigned status;
    struct {
        char name[64];
        char value[256];
    } headers[8];
    unsigned n_headers;
    struct fl_watch *hangup; /* while somebody wants to know */
    void (*gone)(void *arg, struct http_req *req);
    void *gone_arg;

    char *stream; /* bytes that wait to be sent, from stream_from on */
    size_t stream_len, stream_from, stream_cap;
    bool stream_end, stream_full;
    void (*more)(void *arg, struct http_req *req);
    struct fl_task more_task;
    struct http_ws *ws; /* that its socket will be, until it is */
};
struct http_conn { /* a connection, from its first byte to its last */
    struct http_server *server;
    int fd;
    bool far; /* not from loopback */
    struct fl_timer due;
};
/* One of libmicrohttpd's. It shows one certificate all its life: when there is a new one, another takes the connections that
 * come, and the older one goes with its last. */
struct http_mhd {
    struct http_server *server;
    struct http_mhd *older;
    struct MHD_Daemon *daemon;
    struct fl_watch *watch;
    struct fl_timer timer;
    unsigned n_conns;
};
struct http_server {
    struct fl_loop *loop;
    struct http_config c;
    char *host;
    char **hosts; /* copies, ended by NULL */
    uint16_t port;
    struct http_mhd *mhd; /* the newest */
    struct door *door; /* in front of it: it listens */
    struct tls_id *tls;   /* NULL: plain */
    unsigned tls_turn;    /* of the certificate that the newest shows */
    unsigned n_conns, n_far;
    struct fl_task kick;
    struct http_req *reqs;
    struct http_ws *sockets;
    size_t bodies_bytes;
    bool ending;
};
void http_kick(struct http_server *s); /* MHD has something to do */
/* door.c */
enum fl_status http_door_create(struct http_server *s, int fd_take, struct fl_err *err);
struct http_mhd *http_mhd_for_new(struct http_server *s); /* who takes the next connection; server.c */
void http_door_notify(void *mhd, struct MHD_Connection *conn, void **slot,
                      enum MHD_ConnectionNotificationCode what);
void http_door_headers(struct http_req *req, uint64_t body_bytes); /* are whole, a body follows */
void http_door_whole(struct http_req *req);                        /* so is the body            */
void http_door_answered(struct http_server *s, struct MHD_Connection *conn);
/* req.c */
enum MHD_Result http_req_answer(struct http_req *req); /* response is handed to MHD */
void http_req_left(struct http_req *req);              /* tells the handler, once   */
void http_req_end(struct http_req *req);               /* the server goes: 503      */
void http_req_free(struct http_req *req);
bool http_plain_errors(const struct http_req *req);
void http_set_error(struct http_req *req, unsigned status, const char *text);
void http_set_response(struct http_req *req, unsigned status, const char *type,
                       struct MHD_Response *r);
void http_answered(struct http_req *req, enum http_state state);
/* ws.c */
void http_ws_lost(struct http_ws *ws);
void http_ws_end_all(struct http_server *s); /* 1001, and closed */
void http_ws_accept_key(const char *key, char out[32]);
struct http_ws_io { /* what frames come from and go to; a socket, but in the tests of the decoder */
    ssize_t (*recv)(void *arg, void *buf, size_t len); /* -1 and EAGAIN: nothing there */
    ssize_t (*send)(void *arg, const void *data, size_t len);
    void *arg;
};
/* Reads all frames that io has, answers pings and close. FL_CORRUPT: they are none. */
enum fl_status http_ws_feed(const struct http_ws_io *io, bool *closed);
