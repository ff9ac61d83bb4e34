#include "common/base/lease.h"
#include "tests/t.h"

enum { NO = -1, PREP = LEASE_PREPARED, COMM = LEASE_COMMITTED, RELE = LEASE_RELEASING };

static const struct row {
    const char *name;
    int journal, daemon;
    bool runs, fenced, older;
    enum lease_act wanted;
} rows[] = {
    { "both know it, it runs", COMM, COMM, true, false, false, LEASE_KEEP },
    { "both know it, nothing started yet", COMM, COMM, false, false, false, LEASE_KEEP },
    { "the COMMIT was lost", COMM, PREP, false, false, false, LEASE_KEEP },
    { "head died before it decided", PREP, PREP, false, false, false, LEASE_FREE },
    { "the PREPARE never came or ran out", PREP, NO, false, false, false, LEASE_FREE },
    { "not decided, yet committed and working", PREP, COMM, true, false, false,
      LEASE_END_WORK_THEN_FREE },
    { "the daemon lost its state", COMM, NO, false, false, false, LEASE_RESCHEDULE },
    { "the daemon gave up by itself", COMM, RELE, true, false, false, LEASE_RESCHEDULE },
    { "the RELEASE was lost, work goes on", RELE, COMM, true, false, false,
      LEASE_END_WORK_THEN_FREE },
    { "the RELEASE was lost, all quiet", RELE, COMM, false, false, false, LEASE_FREE },
    { "released on both sides", RELE, NO, false, false, false, LEASE_FREE },
    { "the daemon holds what nobody promised", NO, COMM, true, false, false,
      LEASE_END_WORK_THEN_FREE },
    { "an unknown preparation", NO, PREP, false, false, false, LEASE_FREE },
    { "neither knows it", NO, NO, false, false, false, LEASE_KEEP },
    { "fenced node is back, it ran on", COMM, COMM, true, true, false, LEASE_END_WORK_THEN_FREE },
    { "fenced node is back, it had ended", COMM, COMM, false, true, false, LEASE_FREE },
    { "fenced: not started again a second time", COMM, NO, false, true, false, LEASE_FREE },
    { "fenced, forgotten by the journal", NO, COMM, true, true, false, LEASE_END_WORK_THEN_FREE },
    { "old journal meets unknown work", NO, COMM, true, false, true, LEASE_SHOW },
    { "old journal meets unknown preparation", NO, PREP, false, false, true, LEASE_SHOW },
    { "old journal saw it prepared only", PREP, COMM, true, false, true, LEASE_SHOW },
    { "old journal, same promise", COMM, COMM, true, false, true, LEASE_KEEP },
    { "old journal, released since", COMM, NO, false, false, true, LEASE_FREE },
    { "old journal, being released", COMM, RELE, true, false, true, LEASE_SHOW },
    { "old journal released it, still there", RELE, COMM, true, false, true,
      LEASE_END_WORK_THEN_FREE },
    { "old journal, and the node was fenced", NO, COMM, true, true, true,
      LEASE_END_WORK_THEN_FREE },
};

static enum lease_act ask(int journal, int daemon, bool runs, bool fenced, bool older)
{
    struct fl_lease j = { .state = (enum lease_state)journal };
    struct fl_lease d = { .state = (enum lease_state)daemon };

    return lease_reconcile(journal == NO ? NULL : &j, daemon == NO ? NULL : &d, runs, fenced,
                           older);
}

static void each_row_ends_as_said(void **state)
{
    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        const struct row *r = &rows[i];

        t_int_eq(ask(r->journal, r->daemon, r->runs, r->fenced, r->older), r->wanted, "%s",
                 r->name);
    }
}

/* Whatever the sides say: running work is never freed under its feet, an old journal neither ends
 * nor places again what it does not know, and nothing starts twice after a fence. */
static void no_answer_harms(void **state)
{
    (void)state;
    for (int bits = 0; bits < 8; bits++)
        for (int j = NO; j <= RELE; j++)
            for (int d = NO; d <= RELE; d++) {
                bool runs = bits & 1, fenced = bits & 2, older = bits & 4;
                enum lease_act act = ask(j, d, runs, fenced, older);

                t_true(!(runs && act == LEASE_FREE), "j=%d d=%d bits=%d", j, d, bits);
                t_true(!(!runs && act == LEASE_END_WORK_THEN_FREE), "j=%d d=%d", j, d);
                if (fenced || older)
                    t_true(act != LEASE_RESCHEDULE, "j=%d d=%d bits=%d", j, d, bits);
                if (older && !fenced && j == NO && d != NO)
                    t_int_eq(act, LEASE_SHOW, "d=%d", d);
                if (!older)
                    t_true(act != LEASE_SHOW, "j=%d d=%d bits=%d", j, d, bits);
            }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_row_ends_as_said),
        cmocka_unit_test(no_answer_harms),
    };

    return t_run("lease", tests);
}
