/* transport/xfer/coord.h - RECONCILE, PLAN, STAGE, COMMIT or ABORT
 *
 * Runs in the driver and keeps nothing that RECONCILE cannot learn again, so a driver that comes
 * back needs no log. It also answers begin() of the sources: granted when no engine reads what will
 * be written. */
#pragma once
#include "transport/xfer/epoch.h"
#include "transport/xfer/port.h"

enum xfer_kind {
    XFER_ADVANCE, /* every member to a new version                                             */
    XFER_FILL     /* one late, restarted or dirty engine to the current one, from any holder   */
};
enum { XFER_ALL_PARTIES = UINT32_MAX };
struct xfer_request {
    enum xfer_kind kind;
    /* digest 0: the source's own. FILL, number 0 and digest 0: the current one */
    struct xfer_version target;
    enum xfer_mode mode;
    enum xfer_slots slots;
    uint32_t party;         /* FILL: that engine; XFER_ALL_PARTIES: whoever lacks it        */
    /* fewer verified at due_ns: abort; else commit those, name the rest. 0: all that live, of a
     * fill one */
    unsigned least_engines;
    uint64_t due_ns;
};
enum { XFER_NAMED_LEFT_BEHIND = 16 };
struct xfer_left { uint32_t party; struct fl_err why; }; /* rank, host, bucket, phase */
struct xfer_report {
    struct xfer_epoch epoch;
    struct xfer_version now;
    enum xfer_mode mode; /* what auto chose */
    unsigned n_committed, n_left_behind;
    /* of move_ns: what the links of the slowest engine say that its bytes took, one after the
     * other */
    uint64_t link_ns;
    /* other: of those, by another link than the plan's, which broke or is being made */
    uint64_t bytes, other_bytes;
    /* reconcile, plan: 0 where the update was ready when it was asked for */
    uint64_t reconcile_ns, plan_ns, move_ns, verify_ns, commit_ns, pause_ns, predicted_ns;
    struct fl_err first_left_behind;
    char passed_over[200]; /* faster links that do not reach, and why; "": none */
    struct xfer_left left[XFER_NAMED_LEFT_BEHIND]; /* the first of n_left_behind */
};
struct xfer_coord;
struct xfer_run { /* embed it; done comes once, on the loop thread, rep also on failure */
    void (*done)(struct xfer_run *r, enum fl_status st, const struct xfer_report *rep,
                 const struct fl_err *err);
};
struct xfer_coord_opts { /* copied */
    const char *set;
    uint32_t attempt;      /* of the driver, from the head                          */
    uint64_t bucket_bytes; /* --update-weight-buffer-size; 0: 512 MiB               */
    uint64_t spare_bytes;  /* room that an engine has for a second slot; 0: enough  */
    const char *delta_dir; /* the shared folder of disk-delta; NULL: none           */
    bool may_share;        /* auto: engines can serve from mapped pages             */
    /* Who was waited for in vain, told when that run (or begin) is over: it hangs, or the way to it
     * does, unless it still answers: then it is only slow. Engines that waited for a source that
     * hangs are not named. NULL: nobody listens. */
    void (*late)(void *arg, struct fl_seat_ref who, bool answers, const struct fl_err *why);
    void *late_arg;
    const struct link_ops *const *links; /* NULL: link_table */
    size_t n_links;
};
enum fl_status xfer_coord_create(struct fl_loop *l, const struct xfer_coord_opts *o,
                                 struct xfer_coord **out, struct fl_err *err);
/* peer stays the caller's, until gone or destroy. FL_EXISTS: that seat; FL_STALE: an older attempt
 * of it. A newer attempt replaces the older one, as if it were gone. */
enum fl_status xfer_coord_add_source(struct xfer_coord *c, struct call_peer *peer,
                                     const struct xfer_member *m, struct fl_err *err);
enum fl_status xfer_coord_add_engine(struct xfer_coord *c, struct call_peer *peer,
                                     const struct xfer_member *m, struct fl_err *err);
/* Known dead: excused at once from every wait, and forgotten. */
void xfer_coord_gone(struct xfer_coord *c, struct fl_seat_ref who, const struct fl_err *cause);
enum fl_status xfer_start(struct xfer_coord *c, const struct xfer_request *req, struct xfer_run *r,
                          struct fl_err *err); /* FL_AGAIN: one is in flight */
/* A run in flight comes back FL_CANCELLED; what it began ends by the members' leases. */
void xfer_coord_destroy(struct xfer_coord *c);
