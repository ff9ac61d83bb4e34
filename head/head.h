/* head/head.h - the cluster's brain: nodes, jobs, placement groups, workers
 *
 * One object on one loop. Its durable part is tables of journal records; what is told to anybody is
 * on disk first. It runs no user code: drivers and workers live under the daemons. */
#pragma once
#include "common/base/loop.h"
#include "common/base/metrics.h"
#include "transport/wire/wire.h"

/* What was measured, and is spoken here. Ray's client refuses a head of another version than its
 * own where it compares, so a site with another client says so (--ray-version). */
#define HEAD_RAY_VERSION "2.60.0"
#define HEAD_RAY_COMMIT "b7f4259e944bf6959f721b106adc366ddfa0c356"

struct head;
struct http_route;
struct http_req;

struct head_config {
    const char *state_dir;       /* <state_dir>/head/journal.db and <state_dir>/logs */
    const char *node_ip;         /* of this host, as its daemon gives it             */
    const char *boot_id;         /* of this host; NULL: read                         */
    const char *rpc, *http;      /* addresses that drivers are told; may be set later */
    uint32_t beat_ms, silent_ms; /* 0: 1 s and 15 s */
    bool until_idle;             /* end when every job has ended and who followed has heard it */
    uint64_t log_keep_bytes;     /* of each job's log; 0: 64 MiB */
    uint32_t idle_wait_ms;       /* until_idle without any job yet: 0: 120 s */
    const char *token; /* asked from other addresses than loopback; NULL: they are refused */
    const char *ray_token; /* taken too, and asked from loopback as well: RAY_AUTH_MODE=token; NULL: that is off */
    struct tls_id *tls; /* that nodes are dialled with; NULL: plainly */
    const char *ray_version, *ray_commit; /* that /api/version claims; NULL: those of docs/ray.md */
    /* The head has ended: nothing runs any more; take it apart. */
    void (*ended)(void *arg);
    void *arg;
};
enum fl_status head_create(struct fl_loop *l, const struct head_config *cfg, struct head **out,
                           struct fl_err *err);
void head_destroy(struct head *h); /* workers and daemons live on */
FL_AUTO_DEFINE(head)

void head_accept(void *head, struct stream *s_take); /* accepted() of stream_listen() */
/* key_of() and admit() of stream_to: who may be a daemon of this head. */
enum fl_status head_key_of(void *head, const struct wire_hello *claims, struct fl_bytes *key,
                           struct fl_err *err);
enum fl_status head_admit(void *head, const struct wire_hello *peer, struct fl_err *err);
void head_refused(void *head, const struct fl_err *why); /* refused() of stream_to: said, once in a while */
struct wire_hello head_hello(const struct head *h);
/* term_changed runs when a daemon with a higher term was met, and the new term is on disk. */
void head_on_term(struct head *h, void (*term_changed)(void *arg, const struct fl_term *term),
                  void *arg);
void head_addresses(struct head *h, const char *rpc, const char *http);

/* Ends jobs, then daemons, then says ended(). Again: nothing more. */
void head_shutdown(struct head *h, const char *why);

const struct fl_term *head_term(const struct head *h);

#define HEAD_OWN_PATHS "/api/furlong/" /* all JSON below it, errors too; elsewhere as Ray's head answers */
const struct http_route *head_routes(void); /* arg: the head */
/* refuses() of http_config: browsers that would change something, and who lacks the token. */
unsigned head_refuses(void *head, struct http_req *req, char *text, size_t cap);
bool head_allows(void *head, struct http_req *req, const char *bearer, bool from_loopback);
