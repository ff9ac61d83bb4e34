/* Whole epochs: every mode, one and two slots, one and several ranks. */
#include <inttypes.h>
#include "common/base/fault.h"
#include "tests/xfer/epoch_rig.h"

struct mode_row {
    const char *name;
    enum xfer_mode mode;
    struct rig_opts o;
};
/* clang-format off */
static const struct mode_row mode_rows[] = {
    { "copy, two slots",        XFER_COPY,      { .n_sources = 1, .n_engines = 2 } },
    { "copy, one slot",         XFER_COPY,      { .n_sources = 1, .n_engines = 2, .slots = XFER_ONE_SLOT } },
    { "copy, equal checked",    XFER_COPY,      { .n_sources = 1, .n_engines = 1, .check_equal = true } },
    { "copy, engine of 2",      XFER_COPY,      { .n_sources = 1, .n_engines = 2, .ranks = 2 } },
    { "copy, one slot, of 2",   XFER_COPY,      { .n_sources = 1, .n_engines = 1, .ranks = 2, .slots = XFER_ONE_SLOT } },
    { "copy, replicas",         XFER_COPY,      { .n_sources = 2, .n_engines = 2 } },
    { "copy, trainer sharded",  XFER_COPY,      { .n_sources = 2, .n_engines = 2, .sharded = true } },
    { "p2p, sharded to sharded",XFER_P2P,       { .n_sources = 2, .n_engines = 2, .ranks = 2, .sharded = true } },
    { "p2p, 4 to 2",            XFER_P2P,       { .n_sources = 4, .n_engines = 1, .ranks = 2, .sharded = true } },
    { "share, two slots",       XFER_SHARE,     { .n_sources = 1, .n_engines = 2 } },
    { "share, one slot",        XFER_SHARE,     { .n_sources = 1, .n_engines = 2, .src_slots = 1, .slots = XFER_ONE_SLOT } },
    { "share, equal checked",   XFER_SHARE,     { .n_sources = 1, .n_engines = 1, .check_equal = true } },
    { "broadcast, shm",         XFER_BROADCAST, { .n_sources = 1, .n_engines = 3 } },
    { "broadcast, tcp",         XFER_BROADCAST, { .n_sources = 1, .n_engines = 2, .addr_of_engines = "127.0.0.2" } },
    { "p2p, tcp",               XFER_P2P,       { .n_sources = 2, .n_engines = 2, .addr_of_engines = "127.0.0.2" } },
    { "auto",                   XFER_AUTO,      { .n_sources = 1, .n_engines = 2 } },
};
/* clang-format on */

/* Five versions one after the other: kept links, kept mappings, both slots in turn. */
static void each_mode(void **state)
{
    (void)state;
    for (size_t i = 0; i < FL_LEN(mode_rows); i++) {
        const struct mode_row *w = &mode_rows[i];
        struct rig r;

        rig_init(&r, &w->o);
        for (uint64_t v = 0; v < 5; v++) {
            rig_next(&r, v);
            t_true(rig_update(&r, w->mode, v) == FL_OK, "%s, version %" PRIu64 ": %s", w->name, v, r.err.text);
            t_int_eq(r.rep.n_committed, w->o.n_engines, "%s", w->name);
            t_int_eq(r.rep.n_left_behind, 0, "%s: %s", w->name, r.rep.first_left_behind.text);
            t_int_eq(r.rep.now.number, v);
            t_true((r.rep.bytes == 0) == (w->mode == XFER_SHARE), "%s moved %" PRIu64, w->name, r.rep.bytes);
            rig_check_all_serve(&r, v);
        }
        rig_fini(&r);
    }
}

static void nothing_to_do_is_done(void **state)
{
    struct rig r;

    (void)state;
    rig_init(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 2 });
    rig_next(&r, 3);
    t_ok(rig_update(&r, XFER_COPY, 3), &r.err);
    t_ok(rig_update(&r, XFER_COPY, 3), &r.err);
    t_int_eq(r.rep.n_committed, 2, "they have it already");
    t_int_eq(r.rep.bytes, 0);
    t_int_eq(rig_engine(&r, 0, 0)->flips, 1);
    t_int_eq(rig_update(&r, XFER_COPY, 4), FL_INVALID, "that is not published");
    rig_check_all_serve(&r, 3);
    rig_fini(&r);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_mode),
        cmocka_unit_test(nothing_to_do_is_done),
    };

    return t_run("epoch_run", tests);
}
