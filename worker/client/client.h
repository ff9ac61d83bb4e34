/* worker/client/client.h - the inside of libfurlong: who owns what, and on which thread
 *
 * One thread runs the loop and owns every socket, peer, weight set and member list. The program's
 * threads own nothing of that: they fill an object, post it, and wait on it (sync.h). What both
 * sides touch lies behind one mutex each: the inbox (inbox.h), the arena, the table of metrics, the
 * members that a driver looks at. No lock is held while another is taken. */
#pragma once
#include <pthread.h>
#include <furlong/driver.h>
#include "common/base/base.h"
#include "common/base/loop.h"
#include "transport/call/call.h"
#include "worker/client/memory.h"
#include "worker/client/inbox.h"
#include "worker/client/seat.h"

enum {
    CLIENT_JOIN_MS = 30000,       /* the daemon's answer to WORKER_READY               */
    CLIENT_AWAY_MS = 300000,      /* default of FURLONG_DAEMON_AWAY_MS                 */
    CLIENT_LEAVE_MS = 5000,       /* what is still on its way when a program leaves    */
    CLIENT_RETRY_MIN_MS = 20,     /* asking the directory again: doubles from here ... */
    CLIENT_RETRY_MAX_MS = 500,    /* ... to here                                       */
    CLIENT_CONNECT_MS = 5000,     /* one connection and its HELLO                      */
    CLIENT_SPARE_BLOB = 64 << 10, /* replies up to here are copied instead of waited for */
    CLIENT_PEERS_MAX = 65536
};

struct client_uplink;
struct client_peers;
struct client_watch;  /* metrics, progress, step records */
struct client_driver; /* members, groups, planes         */
struct xfer_port;

struct client_line {
    struct furlong *f;
}; /* first in whatever is the service of a stream */

struct furlong {
    uint32_t abi; /* of the program */
    struct client_seat seat;
    struct fl_loop *loop;
    pthread_t thread;
    bool thread_up, by_env; /* by_env: holds the seat of this process */
    struct inbox inbox;
    struct client_memory memory;
    int keeper_fd; /* -1: none above us */
    struct fl_watch *keeper;
    struct client_uplink *up;
    struct client_peers *peers;
    struct client_watch *watch;
    struct client_driver *driver; /* NULL: this is no driver */
    struct xfer_port *port;
    struct client_room *rooms;    /* loop thread: blobs that are being received */
    struct furlong_weights *sets; /* loop thread, as the two below */
    struct plane_dial *dials;     /* of sinks to sources */
    bool leaving;
    bool paused_by_driver;
    unsigned paused_by_plane; /* sets in a one-slot update */
};

/* join.c: for tests, that seat several programs in one process. */
enum fl_status client_join(struct client_seat *seat_take, struct furlong **out, struct fl_err *err);

/* kept.c: a keeper that is killed takes this process along. Loop thread. */
enum fl_status client_kept_open(struct furlong *f, struct fl_err *err);
void client_kept_close(struct furlong *f);

/* here.c: false in a forked child; err gets the sentence. f is looked at in the child's copy
 * alone. */
void client_here_mark(void);
enum fl_status client_here(const struct furlong *f, struct fl_err *err);

/* blob.c: 64-byte aligned, huge pages from 4 MiB on. */
void *client_blob_alloc(uint64_t bytes); /* NULL: no memory */
void client_blob_free(void *blob);       /* NULL is fine    */

/* calls.c: what others ask of this process. service of the streams that bring it: a client_line. */
extern const struct call_method client_methods[1];
/* the weight plane's */
void client_calls_other(void *line, struct call_req *req, const struct wire_msg *m);
/* A call without a stream behind it: the daemon's STOP and SQUEEZE, the plane's PAUSE and COMMIT.
 * On failure nothing is kept. Loop thread. */
struct furlong_call *client_call_new(struct furlong *f, enum furlong_what what,
                                     struct call_req *req);
enum fl_status client_call_put(struct furlong_call *c_take, struct fl_err *err);
void client_calls_refuse_all(struct furlong *f); /* a program's thread; on its way out */
