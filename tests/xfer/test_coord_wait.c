/* Who has its part and waits for others hears of the driver all the same; and what the others do
 * meanwhile. */
#include <inttypes.h>
#include "common/base/fault.h"
#include "tests/xfer/epoch_rig.h"

static void start(struct rig *r, enum xfer_mode mode, uint64_t version, uint64_t due_ms)
{
    struct xfer_request q = { .kind = XFER_ADVANCE,
                              .target = { .number = version },
                              .mode = mode,
                              .slots = r->o.slots,
                              .party = XFER_ALL_PARTIES,
                              .due_ns = fl_loop_now_ns(r->loop) + due_ms * 1000000 };

    rig_start(r, &q);
}

/* The last one begins long after the first has everything: longer than a lease. */
static void who_is_first_waits_longer_than_its_lease(void **state)
{
    static const struct {
        const char *name;
        struct rig_opts o;
        unsigned party, rank; /* who is late */
    } rows[] = {
        { "another engine", { .n_sources = 1, .n_engines = 2 }, 1, 0 },
        { "another rank", { .n_sources = 1, .n_engines = 1, .ranks = 2 }, 0, 1 },
        { "another rank, one slot",
          { .n_sources = 1, .n_engines = 1, .ranks = 2, .slots = XFER_ONE_SLOT },
          0,
          1 },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct rig r;
        struct xfer_sink *late;

        rig_init(&r, &rows[i].o);
        rig_next(&r, 1);
        t_ok(rig_update(&r, XFER_COPY, 1), &r.err);
        rig_next(&r, 2);
        late = rig_engine(&r, rows[i].party, rows[i].rank)->sink;
        t_ok(xfer_sink_offload(late, false, &r.err), &r.err);
        start(&r, XFER_COPY, 2, 4 * XFER_LEASE_MS);
        for (unsigned ms = 0; ms < 2 * XFER_LEASE_MS; ms += 500)
            rig_pass(&r, 500);
        xfer_sink_onload(late);
        rig_until(&r, !r.running);
        t_true(r.st == FL_OK, "%s: %s", rows[i].name, r.err.text);
        t_int_eq(r.rep.n_left_behind, 0, "%s", r.rep.first_left_behind.text);
        rig_check_all_serve(&r, 2);
        rig_fini(&r);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_is_first_waits_longer_than_its_lease),
    };

    return t_run("coord_wait", tests);
}
