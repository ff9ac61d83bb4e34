#pragma once
#include "common/base/base.h"

/* ==== common/base/lease.h: promises about devices ===================
 * The journal is the truth about what was promised, daemons are the truth about what runs.
 * PREPARED ends by itself hold_ms after the daemon got it. COMMITTED ends by release, or by fencing
 * of that start of the daemon. After its start a head is RECOVERING and places nothing until each
 * node of the journal has reported, or its silence has run out. */
enum lease_state { LEASE_PREPARED, LEASE_COMMITTED, LEASE_RELEASING };
struct fl_lease {
    uint64_t id; /* from the journal; never given twice */
    struct fl_term by;
    struct fl_node_ref at;
    struct fl_group_id group;
    struct fl_job_id job;
    uint32_t bundle, job_attempt, hold_ms;
    enum lease_state state;
    const struct fl_amount *amounts;
    const uint32_t *devices;
    size_t n_amounts, n_devices;
};
enum lease_act { LEASE_KEEP, LEASE_FREE, LEASE_END_WORK_THEN_FREE, LEASE_RESCHEDULE, LEASE_SHOW };
/* Pure: one lease after a reconnect, by what each side knows (NULL: nothing). LEASE_SHOW: the
 * journal is older than the daemon: the work runs on, shown as unknown, and is not placed over. */
enum lease_act lease_reconcile(const struct fl_lease *journal, const struct fl_lease *daemon,
                               bool runs, bool fenced, bool journal_is_older);

