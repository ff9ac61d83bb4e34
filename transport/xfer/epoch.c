#include "transport/xfer/epoch.h"

/* clang-format off */
const struct rx_edge rx_edges[] = {
    /* from          on                 to             act */
    { RX_EMPTY,      RX_BEGIN,          RX_STAGING,    RX_DO_STAGE       },
    { RX_SERVING,    RX_BEGIN,          RX_STAGING,    RX_DO_STAGE       },
    { RX_DIRTY,      RX_BEGIN,          RX_STAGING,    RX_DO_STAGE       },
    { RX_EMPTY,      RX_BEGIN_ONE_SLOT, RX_DIRTY,      RX_DO_DIRTY       },
    { RX_SERVING,    RX_BEGIN_ONE_SLOT, RX_DIRTY,      RX_DO_DIRTY       },
    { RX_DIRTY,      RX_BEGIN_ONE_SLOT, RX_DIRTY,      RX_DO_AGAIN_DIRTY },
    { RX_STAGING,    RX_COMPLETE,       RX_VERIFIED,   RX_DO_VERIFIED    },
    { RX_STAGING,    RX_BAD,            RX_ABORTING,   RX_DO_ABORT       },
    { RX_STAGING,    RX_ABORT,          RX_ABORTING,   RX_DO_ABORT       },
    { RX_STAGING,    RX_COORD_LOST,     RX_ABORTING,   RX_DO_ABORT       },
    { RX_STAGING,    RX_BEGIN,          RX_ABORTING,   RX_DO_GIVE_WAY    },
    { RX_STAGING,    RX_BEGIN_ONE_SLOT, RX_ABORTING,   RX_DO_GIVE_WAY    },
    { RX_VERIFIED,   RX_COMMIT,         RX_COMMITTING, RX_DO_FLIP        },
    { RX_VERIFIED,   RX_ABORT,          RX_ABORTING,   RX_DO_ABORT       },
    { RX_VERIFIED,   RX_COORD_LOST,     RX_ABORTING,   RX_DO_ABORT       },
    { RX_VERIFIED,   RX_BEGIN,          RX_ABORTING,   RX_DO_GIVE_WAY    },
    { RX_VERIFIED,   RX_BEGIN_ONE_SLOT, RX_ABORTING,   RX_DO_GIVE_WAY    },
    { RX_COMMITTING, RX_FLIPPED,        RX_SERVING,    RX_DO_SERVE       },
    { RX_ABORTING,   RX_QUIET,          RX_HOME,       RX_DO_GIVE_BACK   },
    { RX_DIRTY,      RX_COMPLETE,       RX_COMMITTING, RX_DO_FLIP        },
    { RX_DIRTY,      RX_BAD,            RX_DIRTY,      RX_DO_STRIKE      },
    { RX_DIRTY,      RX_ABORT,          RX_DIRTY,      RX_DO_HOLD_LEDGER },
    { RX_DIRTY,      RX_COORD_LOST,     RX_DIRTY,      RX_DO_HOLD_LEDGER },
};
/* clang-format on */
const size_t rx_n_edges = FL_LEN(rx_edges);

const char *rx_state_name(enum rx_state s)
{
    static const char *const names[] = { "EMPTY",      "SERVING",  "STAGING", "VERIFIED",
                                         "COMMITTING", "ABORTING", "DIRTY",   "HOME" };

    return (unsigned)s < FL_LEN(names) ? names[s] : "?";
}

const char *rx_event_name(enum rx_event e)
{
    static const char *const names[] = { "BEGIN", "BEGIN_ONE_SLOT", "COMPLETE",
                                         "BAD",   "COMMIT",         "FLIPPED",
                                         "ABORT", "COORD_LOST",     "QUIET" };

    return (unsigned)e < FL_LEN(names) ? names[e] : "?";
}

int xfer_epoch_cmp(const struct xfer_epoch *a, const struct xfer_epoch *b)
{
    if (a->attempt != b->attempt)
        return a->attempt < b->attempt ? -1 : 1;
    return a->seq == b->seq ? 0 : a->seq < b->seq ? -1 : 1;
}

bool xfer_version_same(const struct xfer_version *a, const struct xfer_version *b)
{
    return a->number == b->number && a->digest[0] == b->digest[0] && a->digest[1] == b->digest[1];
}

static const struct rx_edge *edge_of(enum rx_state from, enum rx_event on)
{
    for (size_t i = 0; i < rx_n_edges; i++)
        if (rx_edges[i].from == from && rx_edges[i].on == on)
            return &rx_edges[i];
    return NULL;
}

static void take_edge(struct rx *m, const struct rx_edge *e)
{
    if (e->act == RX_DO_DIRTY)
        m->has_version = false; /* given up before the first byte, not after */
    if (e->act == RX_DO_SERVE)
        m->has_version = true;
    m->state = e->to != RX_HOME ? e->to : m->has_version ? RX_SERVING : RX_EMPTY;
}

static enum fl_status begin_event(struct rx *m, enum rx_event on, const struct xfer_epoch *epoch,
                                  enum rx_act *act, struct fl_err *err)
{
    const struct rx_edge *e = edge_of(m->state, on);

    if (xfer_epoch_cmp(epoch, &m->seen) == 0)
        return FL_OK; /* began here before, whatever became of it: the state is the answer */
    if (!e)
        return fl_fail(err, FL_AGAIN, "epoch %u.%u is still %s here", m->seen.attempt, m->seen.seq,
                       rx_state_name(m->state));
    take_edge(m, e);
    *act = e->act;
    if (e->act == RX_DO_GIVE_WAY)
        return fl_fail(err, FL_AGAIN, "epoch %u.%u gives way first", m->seen.attempt, m->seen.seq);
    m->seen = *epoch;
    return FL_OK;
}

enum fl_status rx_event(struct rx *m, enum rx_event on, const struct xfer_epoch *epoch,
                        enum rx_act *act, struct fl_err *err)
{
    int order = xfer_epoch_cmp(epoch, &m->seen);
    const struct rx_edge *e;

    *act = RX_DO_NOTHING;
    if (order < 0)
        return fl_fail(err, FL_STALE, "epoch %u.%u is over: %u.%u has begun here since",
                       epoch->attempt, epoch->seq, m->seen.attempt, m->seen.seq);
    if (on == RX_BEGIN || on == RX_BEGIN_ONE_SLOT)
        return begin_event(m, on, epoch, act, err);
    e = edge_of(m->state, on);
    if (!e || order > 0)
        return FL_OK; /* nothing of that epoch has begun here, or this has happened already */
    take_edge(m, e);
    *act = e->act;
    return FL_OK;
}
