/* worker/node/ports.h - the ports of this node that its work was given
 *
 * All come from one table, outside the range of outgoing connections, so that nobody takes one
 * between the moment when it was found free and the one when a model is loaded and it is bound.
 * Each is held (fl_port_hold) until its lease or its worker has gone, so that the daemon of another
 * cluster on this host finds another one. */
#pragma once
#include "worker/node/node_priv.h"

enum { NODE_PORTS_MAX = 2048 }; /* of one LEASE_PREPARE */

/* m->free_ports ports, blocks of m->port_block in a row; kept with the first lease by node_ports_give(). */
enum fl_status node_ports_find(struct node *n, const Fl__LeasePrepare *m, uint32_t ports[NODE_PORTS_MAX],
                               struct fl_err *err);
void node_ports_give(struct node *n, const Fl__LeasePrepare *m, const uint32_t *ports);
void node_ports_settle(struct node *n); /* leases or workers have gone: lets go what they had */
/* Of a worker that was adopted. */
void node_ports_again(struct node *n, const Fl__WorkerSpec *spec);
void node_ports_fini(struct node *n);
/* spec's own: each NAME gets a number and becomes NAME=PORT, in place.
 * FL_EXISTS: somebody listens at a number that it named; err says who. FL_EXHAUSTED: none is free. */
enum fl_status node_ports_of_worker(struct node *n, Fl__WorkerSpec *spec, struct fl_err *err);
