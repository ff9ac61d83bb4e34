/* one suite over every link, and over one that has a bad day */
#include <stdlib.h>
#include "common/base/fault.h"
#include "kernels/digest.h"
#include "tests/link/pair.h"
#include "tests/t.h"
#include "transport/link/lossy.h"

static struct kind kinds[8];
static size_t n_kinds;

#define EACH_KIND(k)                                                                               \
    for (size_t k = 0; k < n_kinds;                                                                \
         printf("# %s%s\n", kinds[k].ops->name, kinds[k].on_device ? " on a device" : ""), k++)

static void pulls_rows_and_digests(void **state)
{
    static const struct link_seg segs[] = {
        { .from_off = 0, .to_off = 100000, .first_byte = 0, .run_bytes = 5000, .rows = 1 },
        { .from_off = 7000,
          .to_off = 1,
          .first_byte = 77,
          .run_bytes = 6,
          .rows = 300,
          .from_step = 24,
          .to_step = 6,
          .byte_step = 24 },
        { .from_off = 200000,
          .to_off = 300000,
          .first_byte = 1 << 20,
          .run_bytes = 3000000,
          .rows = 2,
          .from_step = 3000000,
          .to_step = 3000001,
          .byte_step = 3000000 },
    };

    (void)state;
    EACH_KIND(k)
    {
        struct pair p;
        struct wait w = wait_for();
        struct fl_err err = { 0 };
        uint64_t got[3][2] = { { 1, 1 } }, want[3][2] = { { 1, 1 } }, all = 0;

        pair_open(&p, &kinds[k], 7 << 20);
        unsigned char *copy = calloc(1, p.dst.bytes);

        for (size_t i = 0; i < FL_LEN(segs); i++)
            for (uint32_t r = 0; r < segs[i].rows; r++, all += segs[i].run_bytes) {
                const unsigned char *from =
                    (unsigned char *)p.src.addr + segs[i].from_off + r * segs[i].from_step;

                memcpy(copy + segs[i].to_off + r * segs[i].to_step, from, segs[i].run_bytes);
                kernel_digest_add(want[i], from, segs[i].run_bytes,
                                  segs[i].first_byte + r * segs[i].byte_step);
            }
        t_ok(pair_pull(&p, segs, FL_LEN(segs), got, &w.op, &err), &err);
        t_int_eq(w.times, 0, "comes back through the loop");
        t_until(p.loop, w.times > 0, 10000);
        t_ok(w.op.err.status, &w.op.err);
        t_int_eq(w.op.bytes, all);
        t_true(w.op.took_ns > 0);
        t_mem_eq(p.dst.addr, copy, p.dst.bytes, "every byte, and no other");
        t_mem_eq(got, want, sizeof(want), "added to what was there");
        free(copy);
        pair_close(&p);
    }
}

static void many_at_once(void **state)
{
    enum { N = 300, EACH = 40000 };
    static struct wait w[N];
    static struct link_seg segs[N];

    (void)state;
    EACH_KIND(k)
    {
        struct pair p;
        struct fl_err err = { 0 };
        unsigned again = 0;

        pair_open(&p, &kinds[k], (uint64_t)N * EACH);
        for (unsigned i = 0; i < N; i++) {
            w[i] = wait_for();
            segs[i] = stretch(i, EACH);
            enum fl_status st = pair_pull(&p, &segs[i], 1, NULL, &w[i].op, &err);

            if (st == FL_AGAIN) { /* the bound: when one is back it goes */
                again++;
                t_true(again < 1000, "nothing comes back");
                fl_loop_turn(p.loop, 20);
                i--;
                continue;
            }
            t_ok(st, &err);
        }
        for (unsigned i = 0; i < N; i++) {
            t_until(p.loop, w[i].times > 0, 10000);
            t_ok(w[i].op.err.status, &w[i].op.err);
        }
        fl_loop_turn(p.loop, 0);
        for (unsigned i = 0; i < N; i++)
            t_int_eq(w[i].times, 1, "exactly once");
        t_mem_eq(p.dst.addr, p.src.addr, p.src.bytes);
        printf("# FL_AGAIN %u times\n", again);
        pair_close(&p);
    }
}

struct bad_seg {
    const char *name;
    struct link_seg seg;
};
static const struct bad_seg bad_segs[] = {
    { "past the source", { .from_off = 4000, .run_bytes = 97, .rows = 1 } },
    { "past the receiver", { .to_off = 4096, .run_bytes = 1, .rows = 1 } },
    { "by its last row", { .run_bytes = 8, .rows = 513, .from_step = 8, .to_step = 0 } },
    { "no rows", { .run_bytes = 8 } },
    { "no bytes", { .rows = 1 } },
    { "offset wraps", { .from_off = UINT64_MAX - 3, .run_bytes = 8, .rows = 1 } },
    { "step wraps", { .from_step = 1ull << 63, .run_bytes = 8, .rows = 3 } },
    { "length wraps", { .from_off = 8, .run_bytes = UINT64_MAX - 4, .rows = 1 } },
};

static void segments_stay_inside(void **state)
{
    (void)state;
    EACH_KIND(k)
    {
        struct pair p;
        static unsigned char was[4096];

        pair_open(&p, &kinds[k], 4096);
        memcpy(was, p.dst.addr, sizeof(was));
        for (size_t i = 0; i < FL_LEN(bad_segs); i++) {
            struct link_seg two[2] = { { .run_bytes = 16, .rows = 1 }, bad_segs[i].seg };
            struct wait w = wait_for();
            struct fl_err err = { 0 };

            t_refused(pair_pull(&p, two, 2, NULL, &w.op, &err), FL_INVALID, &err);
            fl_loop_turn(p.loop, 0);
            t_int_eq(w.times, 0, "%s: not started", bad_segs[i].name);
        }
        t_mem_eq(p.dst.addr, was, sizeof(was), "nothing half done");
        pair_close(&p);
    }
}

static void mapped_pages_are_the_pages(void **state)
{
    (void)state;
    EACH_KIND(k)
    {
        struct pair p;
        struct fl_err err = { 0 };
        struct link_key key = { 0 };
        struct link_mem again = { 0 };

        if (!(kinds[k].ops->caps & LINK_MAP))
            continue;
        pair_open(&p, &kinds[k], 1 << 16);
        strcpy(p.src.addr, "written after mapping");
        t_str_eq((char *)p.view.addr, "written after mapping");
        t_ok(p.ops->share(p.from, &p.src, &key, &err), &err);
        t_ok(p.ops->map(p.to, &key, true, &again, &err), &err);
        strcpy(again.addr, "and back");
        t_str_eq((char *)p.src.addr, "and back");
        p.ops->unmap(p.to, &again);
        t_true(again.addr == NULL);
        pair_close(&p);
    }
}

/* The source goes in the middle: pages that are mapped stay, a connection breaks. Nothing else
 * happens to anybody. */
static void source_goes(void **state)
{
    (void)state;
    EACH_KIND(k)
    {
        struct pair p;
        struct wait w = wait_for(), after = wait_for();
        struct fl_err err = { 0 };
        struct link_seg all = { .run_bytes = 64 << 20, .rows = 1 };

        pair_open(&p, &kinds[k], all.run_bytes);
        t_ok(pair_pull(&p, &all, 1, NULL, &w.op, &err), &err);
        p.ops->close(p.from);
        p.from = NULL;
        t_until(p.loop, w.times > 0, 10000);
        if (kinds[k].ops->caps & LINK_MAP) {
            t_ok(w.op.err.status, &w.op.err);
            t_mem_eq(p.dst.addr, p.src.addr, p.src.bytes);
        } else {
            t_refused(w.op.err.status, FL_UNREACHABLE, &w.op.err);
            t_ok(pair_pull(&p, &all, 1, NULL, &after.op, &err), &err);
            t_until(p.loop, after.times > 0, 10000);
            t_refused(after.op.err.status, FL_UNREACHABLE, &after.op.err);
            t_has(after.op.err.text, "127.0.0.1");
        }
        pair_close(&p);
    }
}

struct order {
    struct link_op op;
    unsigned *count, at;
};

static void came_in_order(struct link_op *op)
{
    struct order *o = container_of(op, struct order, op);

    o->at = ++*o->count;
}

/* Abort in the middle of much: each op comes back, then quiet, and from then on the memory is ours.
 */
static void abort_then_quiet(void **state)
{
    enum { N = 8, EACH = 8 << 20 };

    (void)state;
    EACH_KIND(k)
    {
        struct pair p;
        unsigned count = 0;
        struct order ops[N], quiet = { .op = { .done = came_in_order }, .count = &count };
        struct fl_err err = { 0 };
        struct link_seg segs[N];

        pair_open(&p, &kinds[k], (uint64_t)N * EACH);
        for (unsigned i = 0; i < N; i++) {
            ops[i] = (struct order){ .op = { .done = came_in_order }, .count = &count };
            segs[i] = stretch(i, EACH);
            t_ok(pair_pull(&p, &segs[i], 1, NULL, &ops[i].op, &err), &err);
        }
        t_until(p.loop, count > 0, 10000);
        p.ops->abort(p.to, &quiet.op);
        t_int_eq(quiet.at, 0, "quiet comes through the loop");
        t_until(p.loop, quiet.at > 0, 10000);
        t_ok(quiet.op.err.status, &quiet.op.err);
        t_int_eq(quiet.at, N + 1, "after all of them");
        unsigned cancelled = 0;

        for (unsigned i = 0; i < N; i++) {
            t_true(ops[i].at > 0);
            t_true(ops[i].op.err.status == FL_OK || ops[i].op.err.status == FL_CANCELLED, "%s",
                   ops[i].op.err.text);
            cancelled += ops[i].op.err.status == FL_CANCELLED;
        }
        t_true(cancelled > 0, "the test was too slow to abort anything");
        memset(p.dst.addr, 0x5a, p.dst.bytes);
        t_refused(pair_pull(&p, &segs[0], 1, NULL, &ops[0].op, &err), FL_CANCELLED, &err);
        for (unsigned i = 0; i < 20; i++)
            fl_loop_turn(p.loop, 1);
        for (uint64_t i = 0; i < p.dst.bytes; i++)
            t_true(((unsigned char *)p.dst.addr)[i] == 0x5a, "byte %llu was written after quiet",
                   (unsigned long long)i);
        pair_close(&p);
    }
}

static void abort_of_an_idle_link(void **state)
{
    (void)state;
    EACH_KIND(k)
    {
        struct pair p;
        struct wait quiet = wait_for(), other = wait_for();

        pair_open(&p, &kinds[k], 4096);
        p.ops->abort(p.to, &quiet.op);
        p.ops->abort(p.from, &other.op);
        t_until(p.loop, quiet.times == 1 && other.times == 1, 5000);
        pair_close(&p);
    }
}

static void close_brings_all_back(void **state)
{
    enum { N = 6, EACH = 4 << 20 };

    (void)state;
    EACH_KIND(k)
    {
        struct pair p;
        struct wait w[N];
        struct fl_err err = { 0 };
        struct link_seg segs[N];

        pair_open(&p, &kinds[k], (uint64_t)N * EACH);
        for (unsigned i = 0; i < N; i++) {
            w[i] = wait_for();
            segs[i] = stretch(i, EACH);
            t_ok(pair_pull(&p, &segs[i], 1, NULL, &w[i].op, &err), &err);
        }
        p.ops->close(p.to);
        for (unsigned i = 0; i < N; i++) {
            t_int_eq(w[i].times, 1, "before close returned");
            t_true(w[i].op.err.status == FL_OK || w[i].op.err.status == FL_CANCELLED, "%s",
                   w[i].op.err.text);
        }
        memset(p.dst.addr, 0x33, p.dst.bytes);
        fl_loop_turn(p.loop, 10);
        for (uint64_t i = 0; i < p.dst.bytes; i++)
            t_true(((unsigned char *)p.dst.addr)[i] == 0x33, "written after close");
        pair_open_end(&p, 1, &p.to); /* for pair_close */
        pair_close(&p);
    }
}

static void t_until_ready(struct fl_loop *l, struct wait *a, struct wait *b)
{
    t_until(l, a->times && b->times, 5000);
}

/* Every place that can fail does so once; nothing is left, and what failed says so. */
static void faults(void **state)
{
    (void)state;
    EACH_KIND(k)
    {
        struct fl_err err = { 0 };
        struct link_place here[2];
        int fds = t_open_fds();
        bool met = true;

        kind_place(&kinds[k], &here[0]);
        here[1] = here[0];
        for (unsigned nth = 1; met; nth++) {
            const struct link_ops *ops = kinds[k].ops;
            struct link_team team = { .members = here, .n = 2 };
            struct link *a = NULL, *b = NULL;
            struct link_mem src = { 0 }, dst = { 0 }, view = { 0 };
            struct link_key key = { 0 };
            struct link_seg all = { .run_bytes = 100000, .rows = 1 };
            struct wait ra = wait_for(), rb = wait_for(), w = wait_for();
            struct fl_loop *l;
            enum fl_status st;

            t_ok(fl_loop_create(NULL, &l, &err), &err);
            fl_fault_arm(nth);
            st = ops->open(l, &team, &a, &ra.op, &err);
            st = st ? st : ops->open(l, &team, &b, &rb.op, &err);
            if (st == FL_OK) /* a device is opened on the pool: then it is there, or the link says
                                why not */
                t_until_ready(l, &ra, &rb);
            st = st ? st : ra.op.err.status;
            st = st ? st : rb.op.err.status;
            st = st ? st : kind_mem(&kinds[k], 100000, &src, &err);
            st = st ? st : kind_mem(&kinds[k], 100000, &dst, &err);
            st = st ? st : ops->share(a, &src, &key, &err);
            st = st ? st : ops->map(b, &key, false, &view, &err);
            st = st ? st : ops->pull(b, &view, &dst, &all, 1, NULL, &w.op, &err);
            if (st == FL_OK) {
                t_until(l, w.times > 0, 10000);
                st = w.op.err.status;
            }
            met = fl_fault_disarm();
            t_true(met || st == FL_OK, "nth=%u: %s", nth, err.text);
            if (st == FL_OK) /* a pool thread less, or nothing failed */
                t_mem_eq(dst.addr, src.addr, 100000, "nth=%u", nth);
            if (view.impl)
                ops->unmap(b, &view);
            if (b)
                ops->close(b);
            if (a)
                ops->close(a);
            fl_loop_destroy(l);
            kind_mem_drop(&src);
            kind_mem_drop(&dst);
            t_int_eq(t_open_fds(), fds, "nth=%u", nth);
        }
    }
}

/* ---- lossy ---- */

static void a_bad_day(void **state)
{
    struct pair p;
    struct wait w[3], quiet = wait_for();
    struct fl_err err = { 0 };
    struct link_seg all = { .run_bytes = 4096, .rows = 1 };

    (void)state;
    pair_open_host(&p, &link_lossy, 4096);
    link_lossy_script = (struct link_lossy_script){ .delay_ms = 1, .cut = 1, .lost = 2 };
    for (unsigned i = 0; i < 3; i++) {
        w[i] = wait_for();
        t_ok(pair_pull(&p, &all, 1, NULL, &w[i].op, &err), &err);
    }
    t_until(p.loop, w[0].times == 1 && w[2].times == 1, 5000);
    t_refused(w[0].op.err.status, FL_UNREACHABLE, &w[0].op.err);
    t_ok(w[2].op.err.status, &w[2].op.err);
    t_int_eq(w[1].times, 0, "lost");
    p.ops->abort(p.to, &quiet.op);
    t_until(p.loop, quiet.times == 1, 5000);
    t_int_eq(w[1].times, 1);
    t_refused(w[1].op.err.status, FL_CANCELLED, &w[1].op.err);
    link_lossy_script = (struct link_lossy_script){ 0 };
    pair_close(&p);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(pulls_rows_and_digests),
        cmocka_unit_test(many_at_once),
        cmocka_unit_test(segments_stay_inside),
        cmocka_unit_test(mapped_pages_are_the_pages),
        cmocka_unit_test(source_goes),
        cmocka_unit_test(abort_then_quiet),
        cmocka_unit_test(abort_of_an_idle_link),
        cmocka_unit_test(close_brings_all_back),
        cmocka_unit_test(faults),
        cmocka_unit_test(a_bad_day),
    };

    for (size_t i = 0; i < link_table_n; i++) {
        uint32_t caps = link_table[i]->caps;

        if (!(caps & LINK_PULL))
            continue; /* test_nccl */
        if (caps & LINK_HOST)
            kinds[n_kinds++] = (struct kind){ link_table[i], false };
        if (caps & LINK_DEVICE)
            kinds[n_kinds++] = (struct kind){ link_table[i], true };
    }
    kinds[n_kinds++] = (struct kind){ &link_lossy, false };
    return t_run("link", tests);
}
