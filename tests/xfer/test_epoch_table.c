/* The receiver's table: every state with every event, and what must never happen. */
#include "tests/t.h"
#include "transport/xfer/epoch.h"

static const struct xfer_epoch older = { 1, 9 }, now = { 2, 3 }, newer = { 2, 4 };

struct row { /* the whole table once more, by hand: what a change of it has to argue with */
    enum rx_state from;
    enum rx_event on;
    enum rx_state to; /* of a machine that has a version */
    enum rx_act act;
};
/* clang-format off */
static const struct row rows[] = {
    { RX_EMPTY,      RX_BEGIN,          RX_STAGING,    RX_DO_STAGE       },
    { RX_EMPTY,      RX_BEGIN_ONE_SLOT, RX_DIRTY,      RX_DO_DIRTY       },
    { RX_SERVING,    RX_BEGIN,          RX_STAGING,    RX_DO_STAGE       },
    { RX_SERVING,    RX_BEGIN_ONE_SLOT, RX_DIRTY,      RX_DO_DIRTY       },
    { RX_STAGING,    RX_BEGIN,          RX_ABORTING,   RX_DO_GIVE_WAY    },
    { RX_STAGING,    RX_BEGIN_ONE_SLOT, RX_ABORTING,   RX_DO_GIVE_WAY    },
    { RX_STAGING,    RX_COMPLETE,       RX_VERIFIED,   RX_DO_VERIFIED    },
    { RX_STAGING,    RX_BAD,            RX_ABORTING,   RX_DO_ABORT       },
    { RX_STAGING,    RX_ABORT,          RX_ABORTING,   RX_DO_ABORT       },
    { RX_STAGING,    RX_COORD_LOST,     RX_ABORTING,   RX_DO_ABORT       },
    { RX_VERIFIED,   RX_BEGIN,          RX_ABORTING,   RX_DO_GIVE_WAY    },
    { RX_VERIFIED,   RX_BEGIN_ONE_SLOT, RX_ABORTING,   RX_DO_GIVE_WAY    },
    { RX_VERIFIED,   RX_COMMIT,         RX_COMMITTING, RX_DO_FLIP        },
    { RX_VERIFIED,   RX_ABORT,          RX_ABORTING,   RX_DO_ABORT       },
    { RX_VERIFIED,   RX_COORD_LOST,     RX_ABORTING,   RX_DO_ABORT       },
    { RX_COMMITTING, RX_FLIPPED,        RX_SERVING,    RX_DO_SERVE       },
    { RX_ABORTING,   RX_QUIET,          RX_SERVING,    RX_DO_GIVE_BACK   },
    { RX_DIRTY,      RX_BEGIN,          RX_STAGING,    RX_DO_STAGE       },
    { RX_DIRTY,      RX_BEGIN_ONE_SLOT, RX_DIRTY,      RX_DO_AGAIN_DIRTY },
    { RX_DIRTY,      RX_COMPLETE,       RX_COMMITTING, RX_DO_FLIP        },
    { RX_DIRTY,      RX_BAD,            RX_DIRTY,      RX_DO_STRIKE      },
    { RX_DIRTY,      RX_ABORT,          RX_DIRTY,      RX_DO_HOLD_LEDGER },
    { RX_DIRTY,      RX_COORD_LOST,     RX_DIRTY,      RX_DO_HOLD_LEDGER },
};
/* clang-format on */

static const struct row *row_of(enum rx_state from, enum rx_event on)
{
    for (size_t i = 0; i < FL_LEN(rows); i++)
        if (rows[i].from == from && rows[i].on == on)
            return &rows[i];
    return NULL;
}

static bool is_begin(enum rx_event e)
{
    return e == RX_BEGIN || e == RX_BEGIN_ONE_SLOT;
}

static struct rx machine(enum rx_state s)
{
    return (struct rx){ .state = s, .seen = now, .has_version = s != RX_EMPTY && s != RX_DIRTY };
}

static void each_pair(void **state)
{
    (void)state;
    t_int_eq(rx_n_edges, FL_LEN(rows));
    for (unsigned s = 0; s < RX_STATES; s++)
        for (unsigned e = 0; e < RX_EVENTS; e++) {
            const struct row *w = row_of(s, e);
            struct rx m = machine(s);
            enum rx_act act = 99;
            struct fl_err err = { 0 };
            enum fl_status st = rx_event(&m, e, is_begin(e) ? &newer : &now, &act, &err);
            const char *what = rx_event_name(e), *where = rx_state_name(s);

            t_int_eq(m.state, w ? w->to : s, "%s on %s", where, what);
            t_int_eq(act, w ? w->act : RX_DO_NOTHING, "%s on %s", where, what);
            if (!is_begin(e))
                t_int_eq(st, FL_OK, "%s on %s", where, what);
            else
                t_int_eq(st, w && w->act != RX_DO_GIVE_WAY ? FL_OK : FL_AGAIN, "%s on %s", where,
                         what);
            t_true(xfer_epoch_cmp(&m.seen, st == FL_OK && is_begin(e) ? &newer : &now) == 0,
                   "%s on %s: what was refused is not seen", where, what);
        }
}

static void older_epochs_are_stale(void **state)
{
    (void)state;
    for (unsigned s = 0; s < RX_STATES; s++)
        for (unsigned e = 0; e < RX_EVENTS; e++) {
            struct rx m = machine(s), before = m;
            enum rx_act act = 99;
            struct fl_err err = { 0 };

            t_refused(rx_event(&m, e, &older, &act, &err), FL_STALE, &err);
            t_mem_eq(&m, &before, sizeof(m), "%s on %s", rx_state_name(s), rx_event_name(e));
            t_int_eq(act, RX_DO_NOTHING);
            t_has(err.text, "1.9");
            t_has(err.text, "2.3");
        }
}

/* What a newer epoch says that never began here (but for begin) must not touch the one that did. */
static void newer_epochs_have_to_begin(void **state)
{
    (void)state;
    for (unsigned s = 0; s < RX_STATES; s++)
        for (unsigned e = 0; e < RX_EVENTS; e++) {
            struct rx m = machine(s), before = m;
            enum rx_act act = 99;

            if (is_begin(e))
                continue;
            t_int_eq(rx_event(&m, e, &newer, &act, NULL), FL_OK);
            t_mem_eq(&m, &before, sizeof(m), "%s on %s", rx_state_name(s), rx_event_name(e));
            t_int_eq(act, RX_DO_NOTHING);
        }
}

static void a_begin_again_changes_nothing(void **state)
{
    (void)state;
    for (unsigned s = 0; s < RX_STATES; s++)
        for (unsigned e = RX_BEGIN; e <= RX_BEGIN_ONE_SLOT; e++) {
            struct rx m = machine(s), before = m;
            enum rx_act act = 99;

            t_int_eq(rx_event(&m, e, &now, &act, NULL), FL_OK);
            t_mem_eq(&m, &before, sizeof(m), "%s", rx_state_name(s));
            t_int_eq(act, RX_DO_NOTHING);
        }
}

static void versions(void **state)
{
    struct rx m = { 0 };
    enum rx_act act;
    struct xfer_epoch e = { 1, 1 };

    (void)state;
    t_ok(rx_event(&m, RX_BEGIN, &e, &act, NULL), NULL);
    t_ok(rx_event(&m, RX_ABORT, &e, &act, NULL), NULL);
    t_ok(rx_event(&m, RX_QUIET, &e, &act, NULL), NULL);
    t_int_eq(m.state, RX_EMPTY, "nothing was there to go home to");
    e.seq++;
    t_ok(rx_event(&m, RX_BEGIN, &e, &act, NULL), NULL);
    t_ok(rx_event(&m, RX_COMPLETE, &e, &act, NULL), NULL);
    t_ok(rx_event(&m, RX_COMMIT, &e, &act, NULL), NULL);
    t_ok(rx_event(&m, RX_FLIPPED, &e, &act, NULL), NULL);
    t_true(m.has_version && m.state == RX_SERVING);
    e.seq++;
    t_ok(rx_event(&m, RX_BEGIN_ONE_SLOT, &e, &act, NULL), NULL);
    t_true(!m.has_version && m.state == RX_DIRTY, "given up before the first byte");
    t_ok(rx_event(&m, RX_ABORT, &e, &act, NULL), NULL);
    t_true(!m.has_version && m.state == RX_DIRTY, "and there is no way back to it");
}

/* From every state every other can be reached, but that nothing leads to EMPTY once there is a
 * version. */
static void no_dead_ends(void **state)
{
    (void)state;
    for (unsigned from = 0; from < RX_STATES; from++) {
        bool seen[RX_STATES] = { 0 };
        bool grew = true;

        seen[from] = true;
        while (grew) {
            grew = false;
            for (size_t i = 0; i < rx_n_edges; i++) {
                enum rx_state to = rx_edges[i].to == RX_HOME ? RX_SERVING : rx_edges[i].to;

                if (seen[rx_edges[i].from] && !seen[to])
                    grew = seen[to] = true;
            }
        }
        t_true(seen[RX_SERVING], "%s never serves again", rx_state_name(from));
        for (unsigned to = 0; to < RX_STATES; to++)
            t_true(seen[to] || to == RX_EMPTY, "%s is not reached from %s", rx_state_name(to),
                   rx_state_name(from));
    }
}

/* Any events in any order: a machine with a version serves it in every state but DIRTY, and what
 * has been committed is not aborted. */
static void random_walks(void **state)
{
    uint64_t seed = 42;

    (void)state;
    for (unsigned walk = 0; walk < 200; walk++) {
        struct rx m = { 0 };
        struct xfer_epoch e = { 1, 1 };

        for (unsigned i = 0; i < 200; i++) {
            enum rx_event on = t_random(&seed) % RX_EVENTS;
            struct rx was = m;
            enum rx_act act;

            e.seq += t_random(&seed) % 8 == 0;
            (void)rx_event(&m, on, &e, &act, NULL);
            t_true(xfer_epoch_cmp(&m.seen, &was.seen) >= 0);
            if (was.state == RX_COMMITTING)
                t_true(m.state == RX_COMMITTING || (m.state == RX_SERVING && on == RX_FLIPPED));
            if (was.has_version && !m.has_version)
                t_true(act == RX_DO_DIRTY);
            if (m.state == RX_SERVING)
                t_true(m.has_version);
            if (m.state == RX_DIRTY || m.state == RX_EMPTY)
                t_true(!m.has_version);
        }
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_pair),
        cmocka_unit_test(older_epochs_are_stale),
        cmocka_unit_test(newer_epochs_have_to_begin),
        cmocka_unit_test(a_begin_again_changes_nothing),
        cmocka_unit_test(versions),
        cmocka_unit_test(no_dead_ends),
        cmocka_unit_test(random_walks),
    };

    return t_run("epoch_table", tests);
}
