/* worker/client/peers_priv.h - what conn.c, peers.c and ask.c share */
#pragma once
#include "worker/client/peers.h"

struct client_conn;
struct client_guest;
struct client_seen;
struct client_peers { /* loop thread, but for mu and first */
    struct client_conn *conns;
    struct client_guest *guests;
    struct client_seen *seen;
    unsigned n_guests;
    bool ending; /* a conn's calls are coming back because its process is gone */
    struct stream_server *on_unix, *on_tcp;
    pthread_mutex_t mu; /* guards the list of peers, not the peers */
    struct furlong_peer *first;
    unsigned n;
};
enum fl_status client_guests_open(struct furlong *f, struct fl_err *err);
void client_conns_close(struct furlong *f);

enum peer_state {
    PEER_IDLE,       /* nobody asks                                   */
    PEER_FINDING,    /* the directory is asked                        */
    PEER_WAITING,    /* not there yet, or not reached: again in a bit */
    PEER_CONNECTING, /* where it is is known                          */
    PEER_READY,      /* asks go out                                   */
    PEER_STATES
};
struct furlong_peer {
    struct furlong *f;
    char role[32], name[64];
    uint32_t rank;
    struct furlong_peer *next; /* of all; set once */
    /* loop thread */
    enum peer_state state;
    struct client_where at;
    struct client_conn_user conn;
    struct call_peer *call; /* READY */
    struct client_relay find;
    struct fl_timer again;
    uint32_t pause_ms;
    struct fl_err last; /* why it is not there yet */
    struct client_ask *asks, **asks_end;
    struct client_reach *reaches;
    bool sending;
};
void client_peer_want(struct furlong_peer *p); /* somebody waits for it */
void client_peer_send(struct furlong_peer *p); /* READY: what waits goes out, lane by lane */
void client_peer_ended(struct furlong_peer *p, const struct fl_err *why); /* all that waits fails */
