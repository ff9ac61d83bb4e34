/* transport/xfer/line.h - one link of one edge, from opening to quiet
 *
 * Opened once and kept for later epochs of the same members, until something went wrong on it: then
 * it is aborted, and what it may touch is reused when it is quiet and not before. */
#pragma once
#include <xxhash.h>
#include "transport/xfer/port.h"

enum line_state { LINE_OPENING, LINE_READY, LINE_ABORTING, LINE_QUIET };
struct line;
struct line_user {
    /* once */
    void (*ready)(void *arg, struct line *ln, enum fl_status st, const struct fl_err *err);
    /* after line_abort(), once; the line may be destroyed here */
    void (*quiet)(void *arg, struct line *ln);
};
struct line {
    struct fl_loop *loop;
    const struct link_ops *ops;
    struct link *k;
    enum line_state state;
    uint64_t key[2]; /* of members and link: line_key() */
    uint64_t serial; /* of the giver: keys are good with the line that made them */
    uint8_t ticket[256];
    unsigned n_members, self;
    const struct line_user *user;
    void *arg;
    struct link_op ready, quiet;
    bool ending; /* being destroyed: its user hears nothing more */
    /* n_members of them, of a team whose members act together; NULL: not noted */
    struct fl_seat_ref *who;
    struct fl_watch *watch;
    struct fl_err broken;
};
/* The team whose members these are; ticket NULL: make it (member 0). user may be called before a
 * later turn of the loop only. */
enum fl_status line_open(struct fl_loop *l, const struct link_ops *ops,
                         const struct link_place *places, unsigned n, unsigned self,
                         const uint8_t *ticket, const uint64_t key[2], const struct line_user *user,
                         void *arg, struct line **out, struct fl_err *err);
void line_use(struct line *ln, const struct line_user *user, void *arg); /* for the next epoch */
void line_abort(struct line *ln); /* LINE_QUIET already: quiet() comes all the same, later */
/* with nothing in flight; one that is not READY or QUIET may take half a second; NULL is fine */
void line_destroy(struct line *ln);
void line_note_team(struct line *ln, const struct xfer_member *members);
/* One of its members has started again since: nobody will use it any more. */
bool line_outdated(const struct line *ln, const struct xfer_member *members, unsigned n);
void line_key(uint64_t out[2], const struct link_ops *ops, const struct xfer_member *members,
              unsigned n);
