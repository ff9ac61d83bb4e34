/* common/base/port.h - who listens at a port of this host (its network namespace) */
#pragma once
#include "common/base/base.h"

/* True: somebody does; who is "pid 12 (python3 -m http.server)", or that it is another user's. */
bool fl_port_holder(uint16_t port, char *who, size_t cap);
/* see() for each process that can be seen to listen there, at any address; false from it ends the
 * look. */
void fl_port_holders(uint16_t port, bool (*see)(void *arg, int pid), void *arg);
/* Of all in this network namespace that ask here, one alone has a port, while the descriptor is
 * open: it is a name beside the port (an abstract unix socket) and keeps nobody from binding it.
 * -1: another has it (EADDRINUSE), or errno says why there is no descriptor. */
int fl_port_hold(uint16_t port);
/* The range that outgoing connections take their ports from; 0 and 0 when it cannot be read. */
void fl_port_ephemeral(uint16_t *first, uint16_t *last);
