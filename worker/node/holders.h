/* worker/node/holders.h - which processes have a device of this node open, and whose they are; and
 * which devices are slowed
 *
 * Measured, by the driver's table of processes, not read from what was asked for: a program may
 * take another device than the one it was given. The driver numbers processes as the host does;
 * from a process namespace of its own a daemon cannot tell whose they are. The driver is asked by
 * the pool, once a beat. */
#pragma once
#include "worker/node/node_priv.h"

struct holders;
enum fl_status node_holders_create(struct node *n, struct holders **out, struct fl_err *err);
void node_holders_destroy(struct holders *h); /* NULL is fine */
void node_holders_look(struct holders *h);    /* unless it does already */
void node_holders_anew(struct holders *h);    /* this head knows nothing: tell it all */
/* What the last look found; who has devices open only if it is not what was told last. The message
 * borrows until the next call. */
void node_holders_fill(struct holders *h, Fl__Beat *m);
