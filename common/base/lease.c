#include "common/base/lease.h"

enum { NONE = 3, SIDES }; /* a side that knows nothing, behind the states of enum lease_state */

/* Rows: what the journal says. Columns: what the daemon holds. FREE becomes END_WORK_THEN_FREE
 * where something runs. */
/* clang-format off */
static const enum lease_act table[SIDES][SIDES] = {
/*                      daemon: PREPARED    COMMITTED         RELEASING         nothing          */
    /* The decision to commit was not written, so it was not made: presumed abort. */
    [LEASE_PREPARED]  = { LEASE_FREE,       LEASE_FREE,       LEASE_FREE,       LEASE_FREE       },
    /* PREPARED: the COMMIT was lost and is sent again. */
    [LEASE_COMMITTED] = { LEASE_KEEP,       LEASE_KEEP,       LEASE_RESCHEDULE, LEASE_RESCHEDULE },
    [LEASE_RELEASING] = { LEASE_FREE,       LEASE_FREE,       LEASE_FREE,       LEASE_FREE       },
    [NONE]            = { LEASE_FREE,       LEASE_FREE,       LEASE_FREE,       LEASE_KEEP       },
};
/* The daemon has spoken with a later head: what that one did is not in this journal. */
static const enum lease_act table_older[SIDES][SIDES] = {
    [LEASE_PREPARED]  = { LEASE_SHOW,       LEASE_SHOW,       LEASE_SHOW,       LEASE_FREE       },
    /* nothing: the later head has released it, it is not lost */
    [LEASE_COMMITTED] = { LEASE_KEEP,       LEASE_KEEP,       LEASE_SHOW,       LEASE_FREE       },
    [LEASE_RELEASING] = { LEASE_FREE,       LEASE_FREE,       LEASE_FREE,       LEASE_FREE       },
    [NONE]            = { LEASE_SHOW,       LEASE_SHOW,       LEASE_SHOW,       LEASE_KEEP       },
};
/* clang-format on */

enum lease_act lease_reconcile(const struct fl_lease *journal, const struct fl_lease *daemon,
                               bool runs, bool fenced, bool journal_is_older)
{
    int said = journal ? (int)journal->state : NONE, held = daemon ? (int)daemon->state : NONE;
    enum lease_act act = (journal_is_older ? table_older : table)[said][held];

    /* Fencing freed it on the head's side, once; what was to start again has by now. */
    if (fenced && (journal || daemon))
        act = LEASE_FREE;
    return act == LEASE_FREE && runs ? LEASE_END_WORK_THEN_FREE : act;
}
