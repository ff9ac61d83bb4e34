/* An engine is killed, stopped or cut off in each phase of an update: the others commit in time,
 * the message says who, where, when and at which bucket; the next update works and the engine is
 * filled. And a trainer that is killed. */
#include <dlfcn.h>
#include <inttypes.h>
#include <stdlib.h>
#include <time.h>
#include "common/base/fault.h"
#include "common/proto/methods.h"
#include "tests/xfer/epoch_rig.h"
#include "transport/link/lossy.h"
#include "transport/link/nccl_priv.h"

enum { DUE_MS = 20000, SLOW_PULL_MS = 150 };
static const struct link_ops *const slow[] = { &link_lossy };

/* ---- how it ends ---- */
enum how { KILL, STOP, CUT, HOWS };
static const char *const how_names[HOWS] = { "kill", "stop", "cut" };

/* ---- where: the request that comes to it next, or its own flip ---- */
struct phase {
    const char *name;
    uint16_t method;                    /* 0: in its flip */
    uint32_t in;                        /* so many buckets are in by then, and not all */
    const char *killed, *stopped, *cut; /* what the message says of it */
};
/* clang-format off */
static const struct phase phases[] = {
    { "reconcile",    FL_XFER_RECONCILE, 0, "gone in reconcile, no bucket begun",
      "reconcile: no bucket begun: no answer in", "reconcile: no bucket begun: no answer in" },
    { "begin",        FL_XFER_BEGIN,     0, "gone in stage, no bucket begun",
      "stage: no bucket begun: no answer in", "stage: late, last heard in SERVING, no bucket begun" },
    { "staging",      FL_XFER_WAIT,      0, "gone in stage, bucket ",
      " of 12: no answer in", "stage: late, last heard in STAGING, bucket " },
    { "half way",     FL_XFER_WAIT,      1, "gone in stage, bucket ",
      " of 12: no answer in", "stage: late, last heard in STAGING, bucket " },
    { "verified",     FL_XFER_COMMIT,    0, "gone in commit, bucket 12 of 12",
      "commit: bucket 12 of 12: no answer in", "commit: late, last heard in VERIFIED, bucket 12 of 12" },
    { "flip",         0,                 0, "gone in commit, bucket 12 of 12",
      "commit: bucket 12 of 12: no answer in", "commit: late, last heard in VERIFIED, bucket 12 of 12" },
};
/* clang-format on */

struct way {
    const char *name;
    enum xfer_mode mode;
    bool slow, casts;
};

/* ---- NCCL's rank of it ---- */
static void nobody_listens(int rank)
{
    (void)rank;
}
static void (*silence)(int rank) = nobody_listens;
static int (*casts)(void);

static uint64_t served(const struct rig_proc *p)
{
    struct xfer_version v = { 0 };

    return xfer_sink_data(p->sink, &v) ? v.number : UINT64_MAX;
}

static uint64_t next(struct rig *r, const struct way *w, uint64_t v)
{
    rig_next(r, v);
    t_ok(rig_update(r, w->mode, v), &r->err);
    rig_check_all_serve(r, v);
    return v + 1;
}

/* The first version, and those until the communicator is there. Returns the number of the next. */
static uint64_t settle(struct rig *r, const struct way *w)
{
    uint64_t v = next(r, w, 1);

    for (unsigned i = 0; w->casts && i < 20; i++) {
        int before = casts();

        v = next(r, w, v);
        if (casts() > before)
            return v;
        nanosleep(&(struct timespec){ .tv_nsec = 5000000 }, NULL);
    }
    t_true(!w->casts, "no communicator");
    return v;
}

static bool there(const struct rig_proc *p, const struct phase *at)
{
    return at->method ? p->stopped_at : p->flip_task != NULL;
}

static void end_it(struct rig *r, struct rig_proc *p, enum how how)
{
    p->frozen = true;
    if (r->o.links == NULL)
        silence(2);
    if (how != STOP)
        rig_kill(p, how == KILL);
}

/* Whoever asks a driver that does not know why: it is dead by the next update at the latest. */
static void bury(struct rig *r, struct rig_proc *p, enum how how)
{
    struct fl_err why = { 0 };

    silence(-1);
    if (how == STOP)
        rig_kill(p, true);
    fl_fail(&why, FL_UNREACHABLE, "ended by the driver");
    if (how == CUT)
        xfer_coord_gone(r->coord, p->me.who, &why);
    if (p->flip_task)
        fl_post(r->loop, FL_TAKE(p->flip_task));
    p->hold_flip = false;
}

static void check_bucket(const char *text, uint32_t least)
{
    const char *bucket = strstr(text, "bucket ");
    unsigned n = 0;

    t_true(bucket && sscanf(bucket, "bucket %u of 12", &n) == 1 && n >= least && n < 12, "%s",
           text);
}

static void one(const struct way *w, const struct phase *at, enum how how)
{
    struct rig_opts o = { .n_sources = 1,
                          .n_engines = 2,
                          .hosts = true,
                          .links = w->slow ? slow : NULL,
                          .n_links = w->slow ? 1 : 0 };
    struct xfer_request q = { .mode = w->mode, .party = XFER_ALL_PARTIES, .least_engines = 1 };
    struct rig_proc *p, *other;
    struct rig r;

    printf("# %s, %s, %s\n", w->name, at->name, how_names[how]);
    rig_init(&r, &o);
    uint64_t v = settle(&r, w);

    p = rig_engine(&r, 1, 0);
    other = rig_engine(&r, 0, 0);
    rig_next(&r, v);
    link_lossy_script =
        (struct link_lossy_script){ .delay_ms = at->method == FL_XFER_WAIT ? SLOW_PULL_MS : 0 };
    p->trap_method = at->method;
    p->trap_nth = 1;
    p->trap_in = at->in;
    p->hold_flip = !at->method;
    q.target.number = v;
    q.due_ns = fl_loop_now_ns(r.loop) + DUE_MS * 1000000ull;
    /* Moved by a device it is over in one look: a rank that is silent from the beginning makes it
     * last. */
    bool silent = w->casts && at->method == FL_XFER_WAIT && how == KILL;

    if (silent)
        silence(2);
    rig_start(&r, &q);
    rig_until(&r, there(p, at) || (silent && rig_state(p) == RX_STAGING) || !r.running);
    for (unsigned i = 0; silent && i < 20 && r.running; i++)
        rig_turn(&r); /* the driver has heard that it has begun */
    if (!r.running && at->method == FL_XFER_WAIT && !w->slow) {
        printf("# all was in when it was first heard: there is no such phase here\n");
        rig_fini(&r);
        return;
    }
    t_true(r.running, "it was over before");
    end_it(&r, p, how);
    rig_until(&r, served(other) == v || !r.running);
    t_true(r.running || served(other) == v, "the other one: %s", r.err.text);
    t_true(fl_loop_now_ns(r.loop) <= q.due_ns + 100000000, "the other one commits by the deadline");
    rig_until(&r, !r.running);
    t_ok(r.st, &r.err);
    t_int_eq(r.rep.n_committed, 1);
    t_int_eq(r.rep.n_left_behind, 1, "%s", r.rep.first_left_behind.text);
    t_has(r.rep.first_left_behind.text, "rollout 1 on host-b");
    t_has(r.rep.first_left_behind.text, how == KILL   ? at->killed
                                        : how == STOP ? at->stopped
                                                      : at->cut);
    if (how == KILL)
        t_has(r.rep.first_left_behind.text, "killed by signal 9");
    if (at->method == FL_XFER_WAIT)
        check_bucket(r.rep.first_left_behind.text, at->in);
    link_lossy_script = (struct link_lossy_script){ 0 };
    bury(&r, p, how);

    v = next(&r, w, v + 1); /* without it */
    (void)rig_restart(p);
    q = (struct xfer_request){ .kind = XFER_FILL,
                               .mode = XFER_AUTO,
                               .party = 1,
                               .least_engines = 1,
                               .due_ns = fl_loop_now_ns(r.loop) + DUE_MS * 1000000ull };
    t_ok(rig_run(&r, &q), &r.err);
    rig_check_all_serve(&r, v - 1);
    (void)next(&r, w, v);
    rig_fini(&r);
}

static void sweep(const struct way *w)
{
    for (size_t i = 0; i < FL_LEN(phases); i++)
        for (enum how how = 0; how < HOWS && (w->slow || !phases[i].in); how++)
            one(w, &phases[i], how);
}

static void an_engine_that_pulls(void **state)
{
    static const struct way ways[] = {
        { "p2p", XFER_P2P, true, false },
        { "copy", XFER_COPY, true, false },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(ways); i++)
        sweep(&ways[i]);
}

static void an_engine_on_a_device(void **state)
{
    static const struct way w = { "p2p on devices", XFER_P2P, false, false };

    (void)state;
    sweep(&w);
}

static void an_engine_in_a_broadcast(void **state)
{
    static const struct way w = { "broadcast", XFER_BROADCAST, false, true };

    (void)state;
    if (!casts)
        t_skip("a rank that falls silent is the stand-in's, and there is no library of that kind here");
    nccl_patience = (struct nccl_patience){ .join_ms = 300, .late_ms = 100 };
    sweep(&w);
    nccl_patience = (struct nccl_patience){ .join_ms = 5000, .late_ms = 1000 };
}

/* ---- the trainer ---- */

struct loss {
    const char *name;
    uint16_t method; /* the request that comes to it, or, at_engine, to the first engine */
    uint32_t in;     /* at least, and then not all: see phase */
    bool at_engine;
    const char *says;
};
/* clang-format off */
static const struct loss losses[] = {
    { "reconcile", FL_XFER_RECONCILE, 0, false, "no source of \"policy\" is there" },
    { "begin",     FL_XFER_BEGIN,     0, false, "trainer 0 on host-a is gone in begin at the source: killed by signal 9" },
    { "key",       FL_XFER_KEY,       0, false, "trainer 0 on host-a is gone in stage: killed by signal 9" },
    { "half way",  FL_XFER_WAIT,      1, true,  "trainer 0 on host-a is gone in stage: killed by signal 9" },
};
/* clang-format on */

static void trainer_starts_again(struct rig *r, uint64_t v)
{
    (void)rig_restart(rig_source(r, 0));
    rig_write(rig_source(r, 0), v);
    rig_publish(r, v);
    t_ok(rig_update(r, XFER_P2P, v), &r->err);
    rig_check_all_serve(r, v);
}

static void lose_trainer(enum xfer_slots slots, const struct loss *at)
{
    struct rig_opts o = {
        .n_sources = 1, .n_engines = 2, .slots = slots, .hosts = true, .links = slow, .n_links = 1
    };
    struct xfer_request q = {
        .target = { .number = 2 }, .mode = XFER_P2P, .slots = slots, .party = XFER_ALL_PARTIES
    };
    bool dirty =
        slots == XFER_ONE_SLOT && at->method != FL_XFER_RECONCILE && at->method != FL_XFER_BEGIN;
    struct rig_proc *trap;
    struct rig r;

    printf("# the trainer, %s, %s\n", slots == XFER_ONE_SLOT ? "one slot" : "two slots", at->name);
    rig_init(&r, &o);
    rig_next(&r, 1);
    t_ok(rig_update(&r, XFER_P2P, 1), &r.err);
    rig_next(&r, 2);
    if (at->method == FL_XFER_BEGIN)
        rig_coord(&r, 2); /* a driver that knows nothing begins at the source first */
    link_lossy_script = (struct link_lossy_script){ .delay_ms = SLOW_PULL_MS };
    trap = at->at_engine ? rig_engine(&r, 0, 0) : rig_source(&r, 0);
    trap->trap_method = at->method;
    trap->trap_nth = 1;
    trap->trap_in = at->in;
    q.due_ns = fl_loop_now_ns(r.loop) + DUE_MS * 1000000ull;
    rig_start(&r, &q);
    rig_until(&r, trap->stopped_at || !r.running);
    t_true(r.running, "it was over before: %s", r.err.text);
    rig_thaw(trap);
    uint64_t died_ns = fl_loop_now_ns(r.loop);

    rig_kill(rig_source(&r, 0), true);
    rig_until(&r, !r.running);
    t_true(fl_loop_now_ns(r.loop) - died_ns < 5000000000ull,
           "a death that is known is not waited for");
    t_int_eq(r.st, at->method == FL_XFER_RECONCILE ? FL_AGAIN : FL_UNREACHABLE, "%s", r.err.text);
    t_has(r.err.text, at->says);
    for (unsigned e = 0; e < 2; e++) {
        struct rig_proc *p = rig_engine(&r, e, 0);
        char text[256];

        xfer_sink_says(p->sink, text, sizeof(text));
        if (!dirty) {
            t_int_eq(served(p), 1, "the old version, %s", text);
            t_str_eq(text, "");
            continue;
        }
        t_int_eq(rig_state(p), RX_DIRTY);
        t_true(xfer_sink_data(p->sink, NULL) == NULL && p->paused, "it serves nothing");
        t_has(text, "weights incomplete: version 2, ");
        t_has(text, " of 12 buckets; ");
        t_has(text, at->says);
    }
    rig_check(&r);
    link_lossy_script = (struct link_lossy_script){ 0 };
    trainer_starts_again(&r, 3);
    rig_fini(&r);
}

static void a_trainer_in_an_update(void **state)
{
    (void)state;
    for (size_t i = 0; i < FL_LEN(losses); i++) {
        lose_trainer(XFER_TWO_SLOTS, &losses[i]);
        lose_trainer(XFER_ONE_SLOT, &losses[i]);
    }
}

/* Its engines serve from the very pages that it writes: with one slot they have given them up
 * first. */
static void a_trainer_that_writes_what_is_shared(void **state)
{
    struct rig_opts o = { .n_sources = 1, .n_engines = 2, .src_slots = 1, .hosts = true };
    struct rig r;

    (void)state;
    rig_init(&r, &o);
    rig_next(&r, 1);
    t_ok(rig_update(&r, XFER_SHARE, 1), &r.err);
    rig_check_all_serve(&r, 1);
    t_ok(rig_begin(&r, 2, 5000), &r.err);
    rig_kill(rig_source(&r, 0), true); /* some of it is version 2 by now */
    for (unsigned e = 0; e < 2; e++) {
        struct rig_proc *p = rig_engine(&r, e, 0);
        char text[256];

        t_int_eq(rig_state(p), RX_DIRTY);
        t_true(xfer_sink_data(p->sink, NULL) == NULL && p->paused, "it serves nothing");
        xfer_sink_says(p->sink, text, sizeof(text));
        t_str_eq(text, "weights incomplete: version 2 is being written where they were");
    }
    (void)rig_restart(rig_source(&r, 0));
    rig_write(rig_source(&r, 0), 3);
    rig_publish(&r, 3);
    t_ok(rig_update(&r, XFER_SHARE, 3), &r.err);
    rig_check_all_serve(&r, 3);
    rig_fini(&r);
}

/* An engine of two ranks of which one died and has not come back: the others are updated without
 * it. */
static void half_an_engine_delays_nobody(void **state)
{
    struct rig_opts o = { .n_sources = 1, .n_engines = 2, .ranks = 2, .hosts = true };
    struct rig r;

    (void)state;
    rig_init(&r, &o);
    rig_next(&r, 1);
    t_ok(rig_update(&r, XFER_P2P, 1), &r.err);
    rig_kill(rig_engine(&r, 1, 1), true);
    for (uint64_t v = 2; v <= 3; v++) {
        rig_next(&r, v);
        t_ok(rig_update(&r, XFER_P2P, v), &r.err);
        t_int_eq(r.rep.n_committed, 1);
        t_int_eq(r.rep.n_left_behind, 1);
        t_has(r.rep.first_left_behind.text, "rollout 1.0 on host-b: reconcile: another rank");
        t_has(r.rep.first_left_behind.text, "rollout 1.1 on host-b is gone: killed by signal 9");
        t_int_eq(served(rig_engine(&r, 0, 0)), v);
        t_int_eq(served(rig_engine(&r, 1, 0)), 1);
        rig_check(&r);
    }
    (void)rig_restart(rig_engine(&r, 1, 1));
    rig_next(&r, 4);
    t_ok(rig_update(&r, XFER_P2P, 4), &r.err);
    t_int_eq(r.rep.n_committed, 2);
    rig_check_all_serve(&r, 4);
    rig_fini(&r);
}

int main(void)
{
    static const struct CMUnitTest host[] = {
        cmocka_unit_test(an_engine_that_pulls),
        cmocka_unit_test(a_trainer_in_an_update),
        cmocka_unit_test(a_trainer_that_writes_what_is_shared),
        cmocka_unit_test(half_an_engine_delays_nobody),
    };
    static const struct CMUnitTest devices[] = { cmocka_unit_test(an_engine_on_a_device),
                                                 cmocka_unit_test(an_engine_in_a_broadcast) };
    const char *path = getenv("FURLONG_NCCL");
    void *fake = path ? dlopen(path, RTLD_NOW) : NULL;

    if (!rig_devices())
        return t_run("phases", host);
    if (path && !fake)
        return 1;
    if (fake) {
        *(void **)&silence = dlsym(fake, "fake_nccl_silence");
        *(void **)&casts = dlsym(fake, "fake_nccl_casts");
    }
    return t_run("phases on devices", devices);
}
