/* worker/client/peers.h - other processes of the job: where they are, streams to them, what is
 * asked
 *
 * Loop thread, but for what furlong.h gives to programs.
 * A conn is one stream to one attempt of one process; it lives until it breaks or the program
 * leaves. A peer is a role and a rank over all its attempts: it asks the directory, takes the conn
 * of the attempt that lives now, and sends what waits. */
#pragma once
#include "worker/client/client.h"
#include "worker/client/uplink.h"

enum { CLIENT_GUESTS_MAX = 16384 }; /* streams that others opened to us */

struct client_where { /* one attempt of one process */
    struct fl_seat_ref who;
    char name[CLIENT_NAME]; /* "rollout 3 on gpu-b" */
    char boot_id[37], tcp[80], unix_path[108];
};

struct wire_hello client_hello(const struct furlong *f);
enum fl_status client_peers_open(struct furlong *f, struct fl_err *err); /* listens too */
/* All asks come back FL_CANCELLED, all streams end. */
void client_peers_close(struct furlong *f);
void client_peers_free(struct furlong *f);             /* the loop has ended */
const char *client_peers_tcp(const struct furlong *f); /* HOST:PORT that others reach us at */

struct Fl__Where;
/* false: no worker id */
bool client_where_of(const struct Fl__Where *pb, struct client_where *out);

/* ---- conns ---- */
struct client_conn;
struct client_conn_user { /* embed it; opened at most once, then closed at most once */
    struct furlong *f;
    void (*opened)(struct client_conn_user *u, struct call_peer *call);
    /* or could not be opened */
    void (*closed)(struct client_conn_user *u, const struct fl_err *why);
    void (*ready)(struct client_conn_user *u); /* after FL_AGAIN; may be NULL */
    struct client_conn *conn;
    struct client_conn_user *next;
    bool told;
};
/* opened may run before it returns. An error: nothing was started. */
enum fl_status client_conn_use(struct furlong *f, const struct client_where *where,
                               struct client_conn_user *u, struct fl_err *err);
void client_conn_drop(struct client_conn_user *u); /* nothing runs any more; idle is fine */
/* That attempt is known to have ended: its stream closes now, whatever TCP still believes. */
void client_conn_gone(struct furlong *f, struct fl_seat_ref who, const struct fl_err *why);
/* Closes the stream under this call_peer: the other side does not read. */
void client_conn_break(struct furlong *f, struct call_peer *call, const struct fl_err *why);

/* ---- asks ---- */
struct client_ask { /* embed it, zeroed; set what is above the line */
    struct furlong_peer *peer;
    uint32_t lane;
    uint64_t due_ns; /* 0: none */
    void *body;      /* packed Ask, malloc'd; freed when sent */
    size_t body_bytes;
    const void *blob; /* lent until done */
    uint64_t blob_bytes;
    void (*done)(struct client_ask *a); /* once; nothing of it is in use any more */
    /* set when done runs */
    enum fl_status st;
    struct fl_err err;
    struct furlong_answer answer; /* FL_OK: whoever owns the ask owns this */

    struct client_ask *next;
    struct call_op op;
    struct call_peer *call; /* while sent */
    struct wire_hold hold;
    struct fl_timer timer;
    void *room;
    bool waiting, sent, held, over;
};
/* Any thread: packs method and body. FL_INVALID: sizes. */
enum fl_status client_ask_pack(struct client_ask *a, struct furlong_peer *p, uint32_t lane,
                               const char *method, const struct furlong_data *what,
                               struct fl_err *err);
void client_ask_start(struct client_ask *a);
/* done runs, now or when its blob is no longer read */
void client_ask_cancel(struct client_ask *a);
/* "looked for", "connecting to", "asked" */
const char *client_ask_phase(const struct client_ask *a);

/* ---- peers ---- */
const char *client_peer_name(const struct furlong_peer *p); /* "rollout 3" */
/* For the weight plane: a stream to that peer's living attempt, sooner or later. */
struct client_reach { /* embed it */
    void (*reached)(struct client_reach *r, const struct client_where *where,
                    struct call_peer *call);
    /* reached again when it is back */
    void (*broke)(struct client_reach *r, const struct fl_err *why);
    struct furlong_peer *peer;
    struct client_reach *next;
    bool up;
};
void client_reach_start(struct client_reach *r, struct furlong_peer *p);
void client_reach_stop(struct client_reach *r);
/* a driver's list changed */
void client_peer_news(struct furlong *f, const char *role, uint32_t rank);
