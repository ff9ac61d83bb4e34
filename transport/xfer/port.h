/* transport/xfer/port.h - what one process answers of the weight plane
 *
 * The sets that this process offers (source.h) or accepts (sink.h), by name, and the one way in for
 * all methods from FL_XFER_FIRST on. The coordinator calls sources and sinks; a sink calls the
 * source of an edge, for keys and for the digests of what did not agree. Nobody else calls. */
#pragma once
#include "transport/xfer/xfer.h"

struct xfer_member { /* one process of the plane, as others name and reach it */
    struct fl_seat_ref who;
    uint32_t party;  /* the trainer, or the engine that it is a rank of; own numbers each    */
    char name[64];   /* "rollout 3 on gpu-b", for every message about it                     */
    char where[192]; /* for xfer_dialer.dial alone, carried as it is: how to get a call_peer */
};
struct xfer_dial { /* embed it; done comes once, from dial() or later, unless undial() was called */
    void (*done)(struct xfer_dial *d, enum fl_status st, struct call_peer *peer,
                 const struct fl_err *err);
};
struct xfer_dialer { /* how a sink reaches a source; who->who.attempt is part of the question */
    void *arg;
    /* peer: borrowed for done */
    void (*dial)(void *arg, const struct xfer_member *who, struct xfer_dial *d);
    void (*undial)(void *arg, struct xfer_dial *d); /* done does not run */
};
/* embed it; comes back once, on the loop thread, never inside the call that takes it */
struct xfer_wait {
    void (*done)(struct xfer_wait *w, enum fl_status st, const struct fl_err *err);
};

struct xfer_port;
enum fl_status xfer_port_create(struct fl_loop *l, const struct xfer_dialer *dialer,
                                struct xfer_port **out, struct fl_err *err);
/* Other links than link_table, for tests: the coordinator is given the same
 * (xfer_coord_opts.links). */
void xfer_port_links(struct xfer_port *p, const struct link_ops *const *links, size_t n);
void xfer_port_destroy(struct xfer_port *p); /* after its sources and sinks; NULL is fine */

/* All methods of the plane, for call_peer_create() with the port as service, or behind a service of
 * one's own that hands requests on to xfer_port_serve(). */
enum { XFER_N_METHODS = 13 };
extern const struct call_method xfer_methods[XFER_N_METHODS];
bool xfer_method_is(uint16_t method);
void xfer_port_serve(struct xfer_port *p, struct call_req *req, const struct wire_msg *m);
