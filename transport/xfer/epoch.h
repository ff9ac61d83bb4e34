/* transport/xfer/epoch.h - the states of a receiver, as a table
 *
 * Pure. One machine per rank of an engine; an engine of several ranks is one member and its ranks
 * move together because the coordinator moves them together (sink.h, coord.h). */
#pragma once
#include "transport/xfer/xfer.h"

enum rx_state {
    RX_EMPTY,      /* no weights: new, restarted, or gave up what was dirty                     */
    RX_SERVING,    /* one verified version                                                      */
    RX_STAGING,    /* serves on; buckets arrive in the other slot                               */
    RX_VERIFIED,   /* digest equal; serves on; waits for COMMIT until its lease ends            */
    RX_COMMITTING, /* the flip, between two steps, on all ranks; nothing stops it               */
    RX_ABORTING,   /* serves on; the other slot may still be written until the links are quiet  */
    RX_DIRTY,      /* one slot: mixed bytes, serves nothing until an epoch verifies             */
    RX_HOME,       /* in the table only: RX_SERVING if it has a version, else RX_EMPTY          */
    RX_STATES = RX_HOME
};
enum rx_event { /* of an epoch not older than any seen; older: FL_STALE; repeats: answered as is */
    RX_BEGIN, RX_BEGIN_ONE_SLOT, RX_COMPLETE, RX_BAD, RX_COMMIT, RX_FLIPPED, RX_ABORT,
    RX_COORD_LOST, RX_QUIET, RX_EVENTS
};
enum rx_act { /* what the owner of the machine does because the state changed */
    RX_DO_NOTHING,
    RX_DO_STAGE,       /* take room, check the own part of the plan, move           */
    RX_DO_DIRTY,       /* pause, forget the version, then answer                    */
    RX_DO_AGAIN_DIRTY, /* the same plan: answer from the ledger; else begin anew    */
    RX_DO_VERIFIED,    /* report the digest, start the lease                        */
    RX_DO_ABORT,       /* abort the links, report why                               */
    RX_DO_GIVE_WAY,    /* abort the links; the newer epoch is answered FL_AGAIN     */
    RX_DO_FLIP,        /* flip at the next step boundary                            */
    RX_DO_SERVE,       /* report the version, free the old slot                     */
    RX_DO_GIVE_BACK,   /* give the room back                                        */
    RX_DO_STRIKE,      /* strike the bad buckets from the ledger, abort the links   */
    RX_DO_HOLD_LEDGER  /* abort the links, keep the ledger                          */
};
struct rx_edge {
    enum rx_state from;
    enum rx_event on;
    enum rx_state to;
    enum rx_act act;
};
extern const struct rx_edge rx_edges[];
extern const size_t rx_n_edges;
const char *rx_state_name(enum rx_state s); /* "SERVING"; never NULL */
const char *rx_event_name(enum rx_event e);

struct rx { /* zeroed: RX_EMPTY, nothing seen */
    enum rx_state state;
    struct xfer_epoch seen; /* highest epoch that began here */
    bool has_version;
};
/* -1, 0, 1: a is older than, the same as, newer than b. */
int xfer_epoch_cmp(const struct xfer_epoch *a, const struct xfer_epoch *b);
bool xfer_version_same(const struct xfer_version *a, const struct xfer_version *b);

/* One event of one epoch.
 *
 * FL_OK     the state is what it says now; act: what is to be done because it changed, or
 *           RX_DO_NOTHING when the event repeats what has happened or is not due in this state
 * FL_AGAIN  a begin that has to wait: for an older epoch that gives way (act RX_DO_GIVE_WAY or
 *           nothing), or for a flip; the epoch is not noted as seen
 * FL_STALE  epoch is older than one seen here; nothing changed */
enum fl_status rx_event(struct rx *m, enum rx_event on, const struct xfer_epoch *epoch,
                        enum rx_act *act, struct fl_err *err);

struct rx_report { /* what RECONCILE asks of every engine before anything else */
    struct fl_seat_ref who;
    enum rx_state state;
    struct xfer_epoch seen;
    struct xfer_version serving, staged;
    uint32_t buckets_in, buckets_all;
};
