/* tests/http/rig.h - a server with one handler of each kind and a client in one loop, in plain HTTP or over TLS */
#pragma once
#include "tests/certs.h"
#include "tests/t.h"
#include "transport/http/http.h"

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
extern struct t_cert web_ca;
extern struct tls_id *web_id; /* by the server */
extern bool web_tls;          /* of the test that runs */
extern const struct http_route web_routes[];

void web_open(struct web *w);
void web_close(struct web *w);
uint8_t web_stream_byte(size_t at);    /* of GET /stream */
void *web_serve_thread(void *arg);     /* of a struct web: for a client that blocks */

struct web_ask {
    struct http_call call;
    unsigned done;
    enum fl_status st;
    struct http_answer answer;
    struct fl_err err;
    size_t pieces, got;
    size_t stop_at;
    char header[200];
};
void web_on_done(struct http_call *c, enum fl_status st, struct http_answer *answer, const struct fl_err *err);
const char *web_header(struct web_ask *a, const char *name);
void web_ask(struct web *w, struct web_ask *a, const char *method, const char *path, struct fl_bytes body,
             const char *const *headers);
void web_ask_wait(struct web *w, struct web_ask *a, const char *method, const char *path, struct fl_bytes body,
                  const char *const *headers);

int web_plainly(void **state);
int web_over_tls(void **state);
#define WEB_PLAIN(test) { #test, test, web_plainly, NULL, NULL }
#define WEB_BOTH(test)  WEB_PLAIN(test), { #test ", TLS", test, web_over_tls, NULL, NULL }
/* t_run() with a CA and a certificate of it. */
#define web_run(group, tests) (web_certs_make(), web_certs_end(t_run(group, tests)))
void web_certs_make(void);
int web_certs_end(int rc);
