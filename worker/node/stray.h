/* worker/node/stray.h - work that nobody can answer for: ended before this node joins
 *
 * Folders of workers whose spec cannot be read, and those of an earlier node id of the same state
 * folder, which was lost meanwhile. The lock on the state folder says that no other daemon has
 * them. */
#pragma once
#include "worker/node/node_priv.h"

/* Ends what runs in dir, a worker's folder, and removes it; the last one of another id takes that
 * folder along. */
void node_stray_end(struct node *n, const char *dir, const char *why);
/* All folders below the runtime folder that name our state folder and another id. */
void node_strays_find(struct node *n);
enum fl_status node_strays_claim(struct node *n, struct fl_err *err); /* <dir>/state: whose it is */
void node_strays_forget(struct node *n);
