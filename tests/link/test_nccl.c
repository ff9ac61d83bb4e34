/* the link by NCCL over a library that only looks like it: ranks of one process, one device each */
#include <dlfcn.h>
#include <stdlib.h>
#include "common/base/fault.h"
#include "common/base/str.h"
#include "common/gpu/later.h"
#include "kernels/digest.h"
#include "tests/link/wait.h"
#include "tests/t.h"
#include "transport/link/dev.h"
#include "transport/link/nccl_priv.h"

enum { RANKS = 3, MIB = 1 << 20 };
static struct gpu_info devices[RANKS];
static void (*silence)(int rank);
static int (*aborts)(void), (*casts)(void);

struct team {
    struct fl_loop *loop;
    struct link_place places[RANKS];
    struct link *k[RANKS];
    struct link_mem mem[RANKS];
};

static void place_of(unsigned i, struct link_place *out)
{
    struct gpu_found found = { .info = devices[i], .opens = true, .fd_shares = true };
    struct fl_err err = { 0 };

    t_ok(link_place_here(NULL, out, &err), &err);
    t_ok(link_place_device(out, devices[i].uuid, &found, 1, &err), &err);
}

static void team_open(struct team *t, uint64_t bytes)
{
    struct link_team team = { .members = t->places, .n = RANKS };
    struct wait ready[RANKS];
    struct fl_err err = { 0 };
    uint64_t seed = 3;

    *t = (struct team){ 0 };
    t_ok(fl_loop_create(NULL, &t->loop, &err), &err);
    for (unsigned i = 0; i < RANKS; i++)
        place_of(i, &t->places[i]);
    t_ok(link_nccl.ticket(team.ticket, &err), &err);
    for (unsigned i = 0; i < RANKS; i++) {
        team.self = i;
        ready[i] = wait_for();
        t_ok(link_nccl.open(t->loop, &team, &t->k[i], &ready[i].op, &err), &err);
        t_ok(link_dev_alloc(devices[i].uuid, bytes, &t->mem[i], &err), &err);
    }
    for (unsigned i = 0; i < RANKS; i++) {
        t_until(t->loop, ready[i].times == 1, 10000);
        t_ok(ready[i].op.err.status, &ready[i].op.err);
    }
    for (uint64_t i = 0; i + 8 <= bytes; i += 8)
        *(uint64_t *)((char *)t->mem[0].addr + i) = t_random(&seed);
}

static void team_close(struct team *t)
{
    for (unsigned i = 0; i < RANKS; i++)
        if (t->k[i])
            link_nccl.close(t->k[i]);
    for (unsigned i = 0; i < RANKS; i++)
        link_dev_free(&t->mem[i]);
    fl_loop_destroy(t->loop);
}

static void cast(struct team *t, unsigned rank, const struct link_seg *segs, size_t n,
                 uint64_t (*digests)[2], struct wait *w)
{
    struct fl_err err = { 0 };

    *w = wait_for();
    t_ok(link_nccl.cast_segs(t->k[rank], 0, &t->mem[rank], segs, n, digests, &w->op, &err), &err);
}

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
    { .from_off = 1 << 20, /* packed, more than one stage holds */
      .to_off = 2 << 20,
      .first_byte = 1 << 20,
      .run_bytes = 1 << 20,
      .rows = 66,
      .from_step = 1 << 20,
      .to_step = (1 << 20) + 16,
      .byte_step = 1 << 20 },
    { .from_off = 67 << 20, .to_off = 70 << 20, .run_bytes = 2 << 20, .rows = 1 }, /* as it lies */
};

static void gathers_casts_and_spreads(void **state)
{
    struct team t;
    struct wait w[RANKS];
    uint64_t got[RANKS][4][2] = { 0 }, want[4][2] = { 0 };

    (void)state;
    team_open(&t, 72 * MIB);
    unsigned char *copy = calloc(1, 72 * MIB);

    for (size_t i = 0; i < FL_LEN(segs); i++)
        for (uint32_t r = 0; r < segs[i].rows; r++) {
            const char *from = (char *)t.mem[0].addr + segs[i].from_off + r * segs[i].from_step;

            memcpy(copy + segs[i].to_off + r * segs[i].to_step, from, segs[i].run_bytes);
            kernel_digest_add(want[i], from, segs[i].run_bytes,
                              segs[i].first_byte + r * segs[i].byte_step);
        }
    for (unsigned round = 0; round < 2; round++) { /* the second one finds its tables made */
        memset(got, 0, sizeof(got));
        for (unsigned i = 1; i < RANKS; i++)
            memset(t.mem[i].addr, 0, 72 * MIB);
        for (unsigned i = 0; i < RANKS; i++)
            cast(&t, i, segs, FL_LEN(segs), i ? got[i] : NULL, &w[i]);
        t_int_eq(w[0].times, 0, "comes back through the loop");
        for (unsigned i = 0; i < RANKS; i++) {
            t_until(t.loop, w[i].times == 1, 20000);
            t_ok(w[i].op.err.status, &w[i].op.err);
            t_true(w[i].op.took_ns > 0 && w[i].op.bytes == (68ull << 20) + 5000 + 1800);
            if (i == 0)
                continue;
            t_mem_eq(t.mem[i].addr, copy, 72 * MIB, "rank %u: every byte, and no other", i);
            t_mem_eq(got[i], want, sizeof(want), "rank %u", i);
        }
    }
    free(copy);
    team_close(&t);
}

static void many_in_order(void **state)
{
    enum { N = 24, EACH = 70000 };
    struct team t;
    static struct wait w[RANKS][N];
    static struct link_seg all[N];
    unsigned next[RANKS] = { 0 }, again = 0;

    (void)state;
    team_open(&t, N * EACH);
    for (unsigned i = 0; i < N; i++)
        all[i] = (struct link_seg){
            .from_off = i * EACH, .to_off = i * EACH, .run_bytes = EACH, .rows = 1
        };
    while (next[0] < N || next[1] < N || next[2] < N) {
        for (unsigned i = 0; i < RANKS; i++)
            while (next[i] < N) {
                struct wait *one = &w[i][next[i]];
                struct fl_err err = { 0 };

                *one = wait_for();
                enum fl_status st = link_nccl.cast_segs(t.k[i], 0, &t.mem[i], &all[next[i]], 1,
                                                        NULL, &one->op, &err);
                if (st == FL_AGAIN) {
                    again++;
                    break;
                }
                t_ok(st, &err);
                next[i]++;
            }
        fl_loop_turn(t.loop, 20);
        t_true(again < 100000, "nothing comes back");
    }
    for (unsigned i = 0; i < RANKS; i++) {
        for (unsigned k = 0; k < N; k++) {
            t_until(t.loop, w[i][k].times == 1, 10000);
            t_ok(w[i][k].op.err.status, &w[i][k].op.err);
        }
        t_mem_eq(t.mem[i].addr, t.mem[0].addr, N * EACH);
    }
    t_true(again > 0, "there is a bound");
    team_close(&t);
}

/* A stopped process says nothing: the deadline is ours, and the memory is ours after it. */
static void a_silent_rank_is_named_by_the_deadline(void **state)
{
    struct team t;
    struct wait w[RANKS], quiet = wait_for();
    struct fl_err err = { 0 };
    struct link_seg one = { .run_bytes = 4 * MIB, .rows = 1 };
    int before = aborts();

    (void)state;
    team_open(&t, 8 * MIB);
    for (unsigned i = 0; i < RANKS; i++)
        cast(&t, i, &one, 1, NULL, &w[i]);
    for (unsigned i = 0; i < RANKS; i++)
        t_until(t.loop, w[i].times == 1, 10000);
    silence(2);
    uint64_t began = fl_clock_boot_ns();
    struct wait more[2][2];

    for (unsigned k = 0; k < 2;
         k++) /* the second is due a second after the first, and both end with it */
        for (unsigned i = 0; i < 2; i++)
            cast(&t, i, &one, 1, NULL, &more[k][i]);
    for (unsigned k = 0; k < 2; k++)
        for (unsigned i = 0; i < 2; i++) {
            t_until(t.loop, more[k][i].times == 1, 12000);
            t_refused(more[k][i].op.err.status, FL_TIMEOUT, &more[k][i].op.err);
            t_has(more[k][i].op.err.text, "dead or stopped");
        }
    t_true(fl_clock_boot_ns() - began < 8000000000ull, "6 s and some");
    t_true(aborts() >= before + 2, "both gave their communicator up");
    silence(-1);
    memset(t.mem[1].addr, 0x77, t.mem[1].bytes);
    fl_loop_turn(t.loop, 20);
    for (uint64_t i = 0; i < t.mem[1].bytes; i++)
        t_true(((unsigned char *)t.mem[1].addr)[i] == 0x77, "written after it came back");
    t_refused(link_nccl.cast_segs(t.k[1], 0, &t.mem[1], &one, 1, NULL, &w[1].op, &err),
              FL_UNREACHABLE, &err);
    t_has(err.text, "spent");
    link_nccl.abort(t.k[1], &quiet.op);
    t_until(t.loop, quiet.times == 1, 5000);
    team_close(&t);
}

/* One cast hangs, and the next one needs more room than there was, or the place of an older table:
 * what would wait for the device would wait for the dead, and the deadline behind it. */
static void nothing_waits_for_the_dead(void **state)
{
    enum { MANY = 3000, OTHERS = NCCL_TABLES + 4 };
    static struct link_seg many[MANY];
    static uint64_t digests[2][RANKS][MANY][2];
    struct nccl_patience was = nccl_patience;
    struct link_seg one = { .run_bytes = 2 * MIB, .rows = 1 };
    struct link_seg kept[2][RANKS];
    struct team t;
    struct wait w[2][RANKS];

    (void)state;
    for (uint32_t i = 0; i < MANY; i++)
        many[i] = (struct link_seg){
            .from_off = i * 64, .to_off = i * 64, .run_bytes = 48, .rows = 1, .tensor = i
        };
    for (unsigned round = 0; round < 2; round++) {
        team_open(&t, 8 * MIB);
        for (uint32_t k = 0; k < (round ? OTHERS : 2); k += 2) { /* two at a time: two rooms */
            for (unsigned c = 0; c < 2; c++)
                for (unsigned i = 0; i < RANKS; i++) {
                    struct link_seg s = { .to_off = (k + c) * 16, .run_bytes = 100, .rows = 1 };

                    kept[c][i] = s; /* lent until it is back */
                    cast(&t, i, &kept[c][i], 1, digests[c][i], &w[c][i]);
                }
            for (unsigned c = 0; c < 2; c++)
                for (unsigned i = 0; i < RANKS; i++) {
                    t_until(t.loop, w[c][i].times == 1, 10000);
                    t_ok(w[c][i].op.err.status, &w[c][i].op.err);
                }
        }
        silence(2);
        nccl_patience = (struct nccl_patience){ .join_ms = 300, .late_ms = 300 };
        for (unsigned i = 0; i < 2; i++) {
            cast(&t, i, &one, 1, digests[0][i], &w[0][i]);
            cast(&t, i, many, round ? 1 : MANY, digests[1][i], &w[1][i]);
        }
        for (unsigned c = 0; c < 2; c++)
            for (unsigned i = 0; i < 2; i++) {
                t_until(t.loop, w[c][i].times == 1, 8000);
                t_refused(w[c][i].op.err.status, FL_TIMEOUT, &w[c][i].op.err);
            }
        silence(-1);
        nccl_patience = was;
        team_close(&t);
    }
}

static void *digests_elsewhere(void *arg)
{
    struct link_seg one = { .run_bytes = MIB, .rows = 1 };
    uint64_t digest[1][2] = { 0 };

    (void)link_mem_digest(arg, &one, 1, true, digest, NULL); /* what it needed is given back */
    return NULL;
}

/* Others of this process give memory of the device back, and wait for the broadcast that hangs: the
 * thread that is to end it does not wait for them. */
static void nobody_is_waited_for_who_waits_for_the_dead(void **state)
{
    struct nccl_patience was = nccl_patience;
    struct link_seg one = { .run_bytes = 2 * MIB, .rows = 1 },
                    rows = { .to_off = 16, .run_bytes = 48, .rows = 1 };
    uint64_t digests[2][1][2] = { 0 };
    struct wait w[2][RANKS];
    struct fl_err err = { 0 };
    struct link_dev *d;
    pthread_t other;
    struct team t;

    (void)state;
    team_open(&t, 8 * MIB);
    t_ok(link_dev_get(devices[0].uuid, &d, &err), &err);
    silence(2);
    nccl_patience = (struct nccl_patience){ .join_ms = 600, .late_ms = 300 };
    int before = casts();

    for (unsigned i = 0; i < 2; i++)
        cast(&t, i, &one, 1, NULL, &w[0][i]);
    t_until(t.loop, casts() > before, 5000); /* it is on the wire */
    t_int_eq(pthread_create(&other, NULL, digests_elsewhere, &t.mem[0]), 0);
    for (uint64_t till = fl_clock_boot_ns() + 200000000; fl_clock_boot_ns() < till;) {
        if (pthread_mutex_trylock(&d->lock) != 0) /* the other one has it, and waits */
            break;
        pthread_mutex_unlock(&d->lock);
        fl_loop_turn(t.loop, 5);
    }
    for (unsigned i = 0; i < 2; i++)
        cast(&t, i, &rows, 1, digests[i], &w[1][i]);
    for (unsigned c = 0; c < 2; c++)
        for (unsigned i = 0; i < 2; i++) {
            t_until(t.loop, w[c][i].times == 1, 8000);
            t_refused(w[c][i].op.err.status, FL_TIMEOUT, &w[c][i].op.err);
        }
    pthread_join(other, NULL);
    silence(-1);
    nccl_patience = was;
    team_close(&t);
}

/* A table that does not get to the device, behind a broadcast that hangs: what was allocated for it
 * is given back when nothing is under way, and whoever asked hears at once. */
static void a_table_that_fails_waits_for_nobody(void **state)
{
    struct link_seg one = { .run_bytes = 2 * MIB, .rows = 1 },
                    rows = { .to_off = 16, .run_bytes = 48, .rows = 1 };
    struct wait w[2][RANKS];
    struct team t;
    int before;

    (void)state;
    if (!later_on())
        t_skip("of streams that work later: here a call that hangs is the last that is taken");
    team_open(&t, 8 * MIB);
    for (unsigned i = 0; i < RANKS; i++) /* its table is there from here on */
        cast(&t, i, &one, 1, NULL, &w[0][i]);
    for (unsigned i = 0; i < RANKS; i++)
        t_until(t.loop, w[0][i].times == 1, 10000);
    silence(2);
    before = casts();
    for (unsigned i = 0; i < 2; i++)
        cast(&t, i, &one, 1, NULL, &w[0][i]);
    t_until(t.loop, casts() > before, 5000); /* it is on the wire */
    t_ok(fl_fault_set("gpu.copy:1=fail,gpu.copy:2=fail", NULL), NULL);
    for (unsigned i = 0; i < 2; i++)
        cast(&t, i, &rows, 1, NULL, &w[1][i]);
    for (unsigned c = 0; c < 2; c++)
        for (unsigned i = 0; i < 2; i++) {
            t_until(t.loop, w[c][i].times == 1, 4000);
            t_refused(w[c][i].op.err.status, FL_UNREACHABLE, &w[c][i].op.err);
            t_has(w[c][i].op.err.text, "copy of");
        }
    t_ok(fl_fault_set("", NULL), NULL);
    silence(-1);
    team_close(&t);
}

/* Two communicators of one device take turns on its stages: the one that is ended waits for a stage
 * that the other one has, whose rank is dead. */
static void one_that_ends_does_not_hold_the_other(void **state)
{
    enum { PAIR = 2 };
    struct nccl_patience was = nccl_patience;
    struct link_seg rows = { .to_off = 0,
                             .run_bytes = MIB,
                             .rows = 200,
                             .from_step = MIB,
                             .to_step = MIB + 16 },
                    few = {
                        .to_off = 16, .run_bytes = 48, .rows = 3, .from_step = 64, .to_step = 80
                    };
    struct wait ready[PAIR], w[PAIR], big[PAIR], quiet = wait_for();
    struct link_team team = { .n = PAIR };
    struct link_mem mem[PAIR];
    struct link *k[PAIR];
    struct fl_err err = { 0 };
    struct team t;
    int before;

    (void)state;
    team_open(&t, 204 * MIB);
    team.members = t.places;
    t_ok(link_nccl.ticket(team.ticket, &err), &err);
    for (unsigned i = 0; i < PAIR; i++) {
        team.self = i;
        ready[i] = wait_for();
        t_ok(link_nccl.open(t.loop, &team, &k[i], &ready[i].op, &err), &err);
        t_ok(link_dev_alloc(devices[i].uuid, MIB, &mem[i], &err), &err);
    }
    for (unsigned i = 0; i < PAIR; i++)
        t_until(t.loop, ready[i].times == 1, 10000);
    silence(2); /* of the three, not of the two */
    nccl_patience = (struct nccl_patience){ .join_ms = 3000, .late_ms = 300 };
    before = casts();
    for (unsigned i = 0; i < PAIR; i++)
        cast(&t, i, &rows, 1, NULL, &big[i]);
    t_until(t.loop, casts() >= before + 4 || big[0].times, 10000); /* all stages are theirs */
    for (unsigned i = 0; i < PAIR; i++) {
        w[i] = wait_for();
        t_ok(link_nccl.cast_segs(k[i], 0, &mem[i], &few, 1, NULL, &w[i].op, &err), &err);
    }
    for (uint64_t till = fl_clock_boot_ns() + 200000000;
         fl_clock_boot_ns() < till && casts() < before + 5;)
        fl_loop_turn(t.loop, 5); /* it has asked for a stage by then */
    link_nccl.abort(k[0], &quiet.op);
    t_until(t.loop, quiet.times == 1, 9000);
    for (unsigned i = 0; i < PAIR; i++) {
        t_until(t.loop, big[i].times == 1, 9000);
        t_refused(big[i].op.err.status, FL_TIMEOUT, &big[i].op.err);
    }
    silence(-1);
    nccl_patience = was;
    for (unsigned i = 0; i < PAIR; i++)
        link_nccl.close(k[i]);
    for (unsigned i = 0; i < PAIR; i++)
        link_dev_free(&mem[i]);
    team_close(&t);
}

/* Somebody else has heard of the death: no deadline is waited for. */
static void abort_ends_it_at_once(void **state)
{
    struct team t;
    struct wait w[RANKS], quiet = wait_for();
    struct fl_err err = { 0 };
    struct link_seg one = { .run_bytes = 4 * MIB, .rows = 1 };

    (void)state;
    team_open(&t, 8 * MIB);
    silence(2);
    for (unsigned i = 0; i < 2; i++)
        cast(&t, i, &one, 1, NULL, &w[i]);
    uint64_t began = fl_clock_boot_ns();

    link_nccl.abort(t.k[1], &quiet.op);
    t_int_eq(quiet.times, 0, "quiet comes through the loop");
    t_until(t.loop, quiet.times == 1, 5000);
    t_int_eq(w[1].times, 1, "before quiet");
    t_refused(w[1].op.err.status, FL_CANCELLED, &w[1].op.err);
    t_true(fl_clock_boot_ns() - began < 1000000000ull * T_SLOWDOWN);
    t_refused(link_nccl.cast_segs(t.k[1], 0, &t.mem[1], &one, 1, NULL, &w[1].op, &err),
              FL_CANCELLED, &err);
    link_nccl.close(t.k[0]); /* with one in flight */
    t.k[0] = NULL;
    t_int_eq(w[0].times, 1, "before close returned");
    t_refused(w[0].op.err.status, FL_CANCELLED, &w[0].op.err);
    silence(-1);
    team_close(&t);
}

static void ends_while_it_opens(void **state)
{
    struct link_place place[2];
    struct link_team team = { .members = place, .n = 2 };
    struct wait ready = wait_for(), quiet = wait_for(), again = wait_for();
    struct link *a = NULL, *b = NULL;
    struct fl_err err = { 0 };
    struct fl_loop *l;

    (void)state;
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    place_of(0, &place[0]);
    place_of(1, &place[1]);
    t_ok(link_nccl.ticket(team.ticket, &err), &err);
    t_ok(link_nccl.open(l, &team, &a, &ready.op, &err), &err); /* the other one never comes */
    fl_loop_turn(l, 20);
    t_int_eq(ready.times, 0);
    link_nccl.abort(a, &quiet.op);
    t_until(l, quiet.times == 1 && ready.times == 1, 5000);
    t_refused(ready.op.err.status, FL_CANCELLED, &ready.op.err);
    t_ok(link_nccl.ticket(team.ticket, &err), &err);
    t_ok(link_nccl.open(l, &team, &b, &again.op, &err), &err);
    link_nccl.close(b);
    t_int_eq(again.times, 1, "before close returned");
    link_nccl.close(a);
    fl_loop_destroy(l);
}

static void faults(void **state)
{
    bool met = true;

    (void)state;
    for (unsigned nth = 1; met; nth++) {
        struct link_place place[2];
        struct link_team team = { .members = place, .n = 2 };
        struct wait ready[2] = { wait_for(), wait_for() }, w[2] = { wait_for(), wait_for() };
        struct link *k[2] = { NULL, NULL };
        struct link_mem mem[2] = { 0 };
        struct link_seg one = { .run_bytes = 100000, .rows = 1 };
        struct fl_err err = { 0 };
        struct fl_loop *l;
        enum fl_status st;

        t_ok(fl_loop_create(NULL, &l, &err), &err);
        for (unsigned i = 0; i < 2; i++) {
            place_of(i, &place[i]);
            t_ok(link_dev_alloc(devices[i].uuid, 100000, &mem[i], &err), &err);
        }
        fl_fault_arm(nth);
        st = link_nccl.ticket(team.ticket, &err);
        for (unsigned i = 0; i < 2 && st == FL_OK; i++) {
            team.self = i;
            st = link_nccl.open(l, &team, &k[i], &ready[i].op, &err);
        }
        for (unsigned i = 0; i < 2 && st == FL_OK; i++) {
            t_until(l, ready[0].times || ready[1].times, 10000);
            if (ready[i].times && ready[i].op.err.status == FL_OK) /* else the other one failed */
                t_until(l, ready[1 - i].times, 10000);
            st = ready[i].times ? ready[i].op.err.status : ready[1 - i].op.err.status;
        }
        for (unsigned i = 0; i < 2 && st == FL_OK; i++)
            st = link_nccl.cast_segs(k[i], 0, &mem[i], &one, 1, NULL, &w[i].op, &err);
        if (st == FL_OK) {
            t_until(l, w[0].times || w[1].times, 20000);
            for (unsigned i = 0; i < 2; i++)
                st = w[i].times && w[i].op.err.status != FL_OK ? w[i].op.err.status : st;
            if (st == FL_OK) {
                t_until(l, w[0].times && w[1].times, 20000);
                st = w[0].op.err.status ? w[0].op.err.status : w[1].op.err.status;
            }
        }
        met = fl_fault_disarm();
        t_true(met || st == FL_OK, "nth=%u: %s", nth, err.text);
        if (st == FL_OK)
            t_mem_eq(mem[0].addr, mem[1].addr, 100000, "nth=%u", nth);
        for (unsigned i = 0; i < 2; i++)
            if (k[i])
                link_nccl.close(k[i]);
        for (unsigned i = 0; i < 2; i++)
            link_dev_free(&mem[i]);
        fl_loop_destroy(l);
    }
}

struct row {
    const char *name;
    void (*bend)(struct link_place *p);
    enum fl_status why;
    const char *text;
};
static void no_device(struct link_place *p)
{
    p->gpu_uuid[0] = 0;
}
static void no_nccl(struct link_place *p)
{
    p->nccl_version = 0;
}
static void other_nccl(struct link_place *p)
{
    p->nccl_version = 22803;
}
static void other_settings(struct link_place *p)
{
    fl_copy(p->nccl_env, sizeof(p->nccl_env), "NCCL_CUMEM_ENABLE=0");
}
static void same_device(struct link_place *p)
{
    fl_copy(p->gpu_uuid, sizeof(p->gpu_uuid), devices[0].uuid);
}
static const struct row rows[] = {
    { "host memory", no_device, FL_UNREACHABLE, "host memory" },
    { "no library", no_nccl, FL_UNSUPPORTED, "no NCCL" },
    { "another version, both are named", other_nccl, FL_UNSUPPORTED, "22803" },
    { "other settings, both are named", other_settings, FL_UNSUPPORTED, "NCCL_CUMEM_ENABLE=0" },
    { "one device for two ranks", same_device, FL_UNSUPPORTED, "one device" },
};

static void who_is_reached(void **state)
{
    struct link_place a, b;
    struct fl_err err = { 0 };

    (void)state;
    place_of(0, &a);
    place_of(1, &b);
    t_true(link_nccl.reaches(&a, &b, &err), "%s", err.text);
    t_int_eq(a.nccl_version, 22809);
    t_has(a.nccl_env, "NCCL_NVLS_ENABLE=0"); /* whatever it was */
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct link_place bent = b;

        rows[i].bend(&bent);
        t_true(!link_nccl.reaches(&a, &bent, &err), "%s", rows[i].name);
        t_int_eq(err.status, rows[i].why, "%s", rows[i].name);
        t_has(err.text, rows[i].text);
    }
    other_nccl(&b);
    t_true(!link_nccl.reaches(&a, &b, &err));
    t_has(err.text, "22809");
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(gathers_casts_and_spreads),
        cmocka_unit_test(many_in_order),
        cmocka_unit_test(a_silent_rank_is_named_by_the_deadline),
        cmocka_unit_test(nothing_waits_for_the_dead),
        cmocka_unit_test(nobody_is_waited_for_who_waits_for_the_dead),
        cmocka_unit_test(a_table_that_fails_waits_for_nobody),
        cmocka_unit_test(one_that_ends_does_not_hold_the_other),
        cmocka_unit_test(abort_ends_it_at_once),
        cmocka_unit_test(ends_while_it_opens),
        cmocka_unit_test(faults),
        cmocka_unit_test(who_is_reached),
    };
    const struct gpu_ops *gpu;
    size_t n = RANKS;
    const char *path = getenv("FURLONG_NCCL");
    void *fake = path ? dlopen(path, RTLD_NOW) : NULL;

    if (!fake || gpu_pick(&gpu, NULL) != FL_OK || gpu->list(devices, &n, NULL) != FL_OK ||
        n != RANKS) {
        fprintf(stderr, "test_nccl: wants FURLONG_NCCL and FURLONG_GPU=fake:3\n");
        return 1;
    }
    *(void **)&silence = dlsym(fake, "fake_nccl_silence");
    *(void **)&aborts = dlsym(fake, "fake_nccl_aborts");
    *(void **)&casts = dlsym(fake, "fake_nccl_casts");
    return t_run("nccl", tests);
}
