/* Links that are slow to be quiet, and links whose both sides act. */
#include <inttypes.h>
#include <stdlib.h>
#include "tests/xfer/bucket.h"
#include "tests/xfer/epoch_rig.h"
#include "tests/xfer/stall_link.h"
#include "transport/xfer/parcel.h"

static const struct link_ops *const stalls[] = { &link_stall };
static const struct link_ops *const mails[] = { &link_mail };

static void stalled(struct rig *r, enum xfer_slots slots, struct xfer_request *q, uint64_t due_ms)
{
    stall = (struct stall){ 0 };
    rig_serving(r,
                &(struct rig_opts){
                    .n_sources = 1, .n_engines = 1, .slots = slots, .links = stalls, .n_links = 1 },
                XFER_COPY);
    rig_next(r, 2);
    stall.stall_pulls = stall.stall_quiet = true;
    *q = (struct xfer_request){ .target = { .number = 2 },
                                .mode = XFER_COPY,
                                .slots = slots,
                                .due_ns = fl_loop_now_ns(r->loop) + due_ms * 1000000 };
    rig_start(r, q);
    rig_until(r, stall.waiting > 0);
}

static void an_abort_waits_for_quiet(void **state)
{
    struct rig r;
    struct xfer_request q;
    struct rig_proc *p;

    (void)state;
    stalled(&r, XFER_TWO_SLOTS, &q, 2000);
    p = rig_engine(&r, 0, 0);
    rig_until(&r, rig_state(p) == RX_ABORTING && stall.quiets == 1);
    rig_check_all_serve(&r, 1);
    rig_pass(&r, 1000);
    t_int_eq(rig_state(p), RX_ABORTING);
    t_int_eq(p->rooms, 2, "the slot may still be written: it is not given back");
    t_true(xfer_sink_offload(p->sink, true, NULL) == FL_AGAIN, "nor unmapped");
    stall.stall_pulls = false;
    stall.stall_quiet = false;
    stall_quiet_now();
    rig_until(&r, !r.running);
    t_int_eq(r.st, FL_TIMEOUT);
    t_has(r.err.text, "rollout 0");
    t_int_eq(rig_state(p), RX_SERVING);
    t_int_eq(p->rooms, 1);
    t_ok(rig_update(&r, XFER_COPY, 2), &r.err);
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

/* The next driver's begin is answered "not now" until the links of the older epoch are quiet. */
static void a_newer_epoch_waits_for_quiet(void **state)
{
    static const enum xfer_slots slots[] = { XFER_TWO_SLOTS, XFER_ONE_SLOT };
    struct rig r;
    struct xfer_request q;

    (void)state;
    for (unsigned i = 0; i < 2; i++) {
        stalled(&r, slots[i], &q, 60000);
        rig_coord(&r, 2);
        q.due_ns = fl_loop_now_ns(r.loop) + 20000000000ull;
        rig_start(&r, &q);
        rig_until(&r, stall.quiets == 1);
        for (unsigned k = 0; k < 200; k++)
            rig_turn(&r);
        t_true(r.running && stall.waiting == 0, "nothing has begun in the slot: %d %s", r.st,
               r.err.text);
        rig_check(&r);
        stall.stall_pulls = stall.stall_quiet = false;
        stall_quiet_now();
        rig_until(&r, !r.running);
        t_ok(r.st, &r.err);
        rig_check_all_serve(&r, 2);
        rig_fini(&r);
    }
}

/* ---- both sides act ---- */

struct mail_row {
    const char *name;
    enum xfer_mode mode;
    struct rig_opts o;
};
/* clang-format off */
static const struct mail_row mail_rows[] = {
    { "p2p",                XFER_P2P,       { .n_sources = 1, .n_engines = 2 } },
    { "p2p, sharded",       XFER_P2P,       { .n_sources = 2, .n_engines = 2, .ranks = 2, .sharded = true } },
    { "broadcast to 3",     XFER_BROADCAST, { .n_sources = 1, .n_engines = 3 } },
    { "broadcast, of 2",    XFER_BROADCAST, { .n_sources = 1, .n_engines = 2, .ranks = 2 } },
    { "one slot",           XFER_BROADCAST, { .n_sources = 1, .n_engines = 3, .slots = XFER_ONE_SLOT } },
};
/* clang-format on */

static void sent_and_cast(void **state)
{
    struct rig r;

    (void)state;
    for (size_t i = 0; i < FL_LEN(mail_rows); i++) {
        struct rig_opts o = mail_rows[i].o;

        o.links = mails;
        o.n_links = 1;
        rig_init(&r, &o);
        for (uint64_t v = 0; v < 4; v++) {
            rig_next(&r, v);
            t_true(rig_update(&r, mail_rows[i].mode, v) == FL_OK, "%s: %s", mail_rows[i].name,
                   r.err.text);
            rig_check_all_serve(&r, v);
        }
        rig_fini(&r);
        t_int_eq(mail_open(), 0, "%s", mail_rows[i].name);
    }
}

/* A partner that dies takes the others of its team down; the next epoch is made without it. */
static void a_cast_that_breaks(void **state)
{
    struct rig r;
    struct xfer_request q;

    (void)state;
    rig_serving(&r,
                &(struct rig_opts){ .n_sources = 1, .n_engines = 3, .links = mails, .n_links = 1 },
                XFER_BROADCAST);
    rig_next(&r, 2);
    mail_cut(true);
    q = (struct xfer_request){ .target = { .number = 2 },
                               .mode = XFER_BROADCAST,
                               .least_engines = 1,
                               .due_ns = fl_loop_now_ns(r.loop) + 5000000000ull };
    t_int_eq(rig_run(&r, &q), FL_UNREACHABLE);
    rig_check_all_serve(&r, 1);
    mail_cut(false);
    rig_kill(rig_engine(&r, 2, 0), true);
    t_ok(rig_update(&r, XFER_BROADCAST, 2), &r.err);
    t_int_eq(r.rep.n_committed, 2);
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
    t_int_eq(mail_open(), 0);
}

/* ---- parcels ---- */

static void parcels_cover_each_byte_once(void **state)
{
    uint64_t seed = 7;

    (void)state;
    for (unsigned round = 0; round < 60; round++) {
        struct link_seg segs[12];
        size_t n = 1 + t_random(&seed) % FL_LEN(segs);
        uint64_t from = 0, to = 0, all = 0;
        struct parcels ps;
        struct fl_err err = { 0 };

        for (size_t i = 0; i < n; i++) {
            uint64_t run = t_random(&seed) % (round % 3 ? 3000 : 200000) + 1,
                     gap = t_random(&seed) % 3 ? 0 : 64;
            uint32_t rows = 1 + (uint32_t)(t_random(&seed) % 9);

            segs[i] = (struct link_seg){ .from_off = from,
                                         .to_off = to,
                                         .run_bytes = run,
                                         .from_step = run + gap,
                                         .to_step = run,
                                         .byte_step = run,
                                         .rows = rows,
                                         .tensor = (uint32_t)i };
            from += rows * (run + gap);
            to += rows * run;
            all += rows * run;
        }
        uint8_t *a = malloc(from), *b = calloc(1, to), *packed = malloc(PARCEL_PACKED_MAX);
        uint64_t(*sent)[2] = calloc(n, 16), (*got)[2] = calloc(n, 16), bytes = 0;

        for (uint64_t i = 0; i < from; i++)
            a[i] = (uint8_t)t_random(&seed);
        t_ok(parcels_cut(segs, n, &ps, &err), &err);
        for (size_t i = 0; i < ps.n; i++) {
            t_true(ps.p[i].bytes <= (ps.p[i].packed ? PARCEL_PACKED_MAX : PARCEL_DIRECT_MAX));
            if (ps.p[i].packed)
                parcel_pack(&ps, i, a, packed);
            else
                memcpy(b + ps.p[i].to_off, a + ps.p[i].from_off, ps.p[i].bytes);
            parcel_land(&ps, i, ps.p[i].packed ? packed : NULL, b, got);
            bytes += ps.p[i].bytes;
        }
        t_int_eq(bytes, all);
        bucket_digest(segs, n, a, true, sent);
        t_mem_eq(got, sent, n * 16);
        memset(got, 0, n * 16);
        bucket_digest(segs, n, b, false, got);
        t_mem_eq(got, sent, n * 16, "the bytes are where they belong");
        parcels_fini(&ps);
        free(a);
        free(b);
        free(packed);
        free(sent);
        free(got);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_abort_waits_for_quiet),
        cmocka_unit_test(a_newer_epoch_waits_for_quiet),
        cmocka_unit_test(sent_and_cast),
        cmocka_unit_test(a_cast_that_breaks),
        cmocka_unit_test(parcels_cover_each_byte_once),
    };

    return t_run("epoch_links", tests);
}
