/* worker/node/ident.h - who this node is: an id on its disk and a counter of its daemon's starts
 *
 * <state>/node/node.json, written whole or not at all. A second daemon on the same folder is
 * refused while the first lives. */
#pragma once
#include "common/base/base.h"
#include "common/base/file.h"

struct node_ident {
    char dir[FL_PATH_MAX]; /* <state>/node */
    int lock_fd;
    struct fl_node_ref me;
    struct fl_term highest; /* cluster all zero: no head has spoken yet */
};
/* Takes the lock, makes the id if there is none, and adds one to the start, durably. FL_EXISTS
 * names the pid that holds the folder; FL_CORRUPT the file that is to be removed. */
enum fl_status node_ident_open(const char *state_dir, struct node_ident *out, struct fl_err *err);
/* Also durable when they return FL_OK; unchanged otherwise. */
enum fl_status node_ident_restart(struct node_ident *id, struct fl_err *err); /* start + 1 */
enum fl_status node_ident_heard(struct node_ident *id, const struct fl_term *term,
                                struct fl_err *err);
void node_ident_close(struct node_ident *id);
