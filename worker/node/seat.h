/* worker/node/seat.h - a worker's seat: everything it is told, in a sealed memfd
 *
 * The job's key goes this way and no other: not by environment, not by command line. */
#pragma once
#include "worker/node/node_priv.h"

/* *fd is the caller's. */
enum fl_status node_seat_make(const struct node *n, const struct worker *w, int *fd,
                              struct fl_err *err);
