/* Every place that can fail made to fail once, and events in random order: whatever happens, an
 * engine that serves has the bytes of its version, and a healthy plane comes right again. */
#include <inttypes.h>
#include <stdlib.h>
#include "common/base/fault.h"
#include "tests/xfer/epoch_rig.h"

/* A new driver, new streams: what is left of the old ones is the members' to sort out. */
static void heal(struct rig *r, uint32_t attempt, enum xfer_mode mode, uint64_t version)
{
    (void)fl_fault_disarm();
    t_ok(fl_fault_set(NULL, NULL), NULL);
    rig_coord(r, attempt);
    t_true(rig_update(r, mode, version) == FL_OK, "not healed: %s", r->err.text);
    rig_check_all_serve(r, version);
}

struct sweep_row {
    const char *name;
    enum xfer_mode mode;
    struct rig_opts o;
};
/* clang-format off */
static const struct sweep_row sweep_rows[] = {
    { "copy",             XFER_COPY,  { .n_sources = 1, .n_engines = 1 } },
    { "copy, engine of 2",XFER_COPY,  { .n_sources = 1, .n_engines = 1, .ranks = 2 } },
    { "copy, one slot",   XFER_COPY,  { .n_sources = 1, .n_engines = 1, .slots = XFER_ONE_SLOT } },
    { "share",            XFER_SHARE, { .n_sources = 1, .n_engines = 1 } },
    { "tcp",              XFER_P2P,   { .n_sources = 1, .n_engines = 1, .addr_of_engines = "127.0.0.2" } },
    { "disk-delta",       XFER_DISK_DELTA, { .n_sources = 1, .n_engines = 1 } },
};
/* clang-format on */
static const char *const places[] = { "xfer.bucket",     "xfer.pull",       "xfer.room",
                                      "xfer.verified",   "xfer.decided",    "xfer.delta_write",
                                      "xfer.delta_take", "link.map",        "link.pull",
                                      "link.tcp.listen", "link.tcp.thread", "call.peer",
                                      "wire.line" };

/* One update in which a place fails; true: it failed. */
static bool one_fault(const struct sweep_row *w, unsigned round, void (*arm)(unsigned),
                      unsigned nth, bool *met)
{
    struct rig_opts o = w->o;
    char delta[48], local[48];
    struct xfer_request q;
    struct rig r;
    bool failed;

    snprintf(delta, sizeof(delta), "sweep-%u", round);
    snprintf(local, sizeof(local), "sweep-local-%u", round);
    o.delta_dir = t_path(delta);
    o.local_dir = t_path(local);
    o.bucket_bytes = 32768;
    rig_init(&r, &o);
    rig_next(&r, 1);
    t_true(rig_update(&r, w->mode, 1) == FL_OK, "%s: %s", w->name, r.err.text);
    rig_next(&r, 2);
    q = (struct xfer_request){ .target = { .number = 2 },
                               .mode = w->mode,
                               .slots = o.slots,
                               .due_ns = fl_loop_now_ns(r.loop) + 2000000000ull };
    arm(nth);
    failed = rig_run(&r, &q) != FL_OK;
    *met = fl_fault_disarm();
    rig_check(&r);
    heal(&r, 2, w->mode, 2);
    rig_fini(&r);
    return failed;
}

static unsigned round_no;

static void arm_named(unsigned place)
{
    char spec[64];

    snprintf(spec, sizeof(spec), "%s:1=fail", places[place]);
    t_ok(fl_fault_set(spec, NULL), NULL);
}

static void each_place_in_each_mode(void **state)
{
    (void)state;
    for (size_t i = 0; i < FL_LEN(sweep_rows); i++) {
        unsigned failures = 0;
        bool met;

        for (unsigned p = 0; p < FL_LEN(places); p++)
            failures += one_fault(&sweep_rows[i], round_no++, arm_named, p, &met);
        t_true(failures >= 2, "%s: %u failures: the faults are not met", sweep_rows[i].name,
               failures);
    }
}

/* Those of the wire too, and each time that one is met. */
static void each_place_each_time(void **state)
{
    unsigned nth = 1, failures = 0;
    bool met = true;

    (void)state;
    for (; met; nth += 2) {
        t_true(nth < 500, "places without end");
        failures += one_fault(&sweep_rows[0], round_no++, fl_fault_arm, nth, &met);
    }
    t_true(nth > 20 && failures > 10, "%u places, %u failures", nth, failures);
}

/* ---- random ---- */

struct walk {
    struct rig r;
    uint64_t seed, version;
    uint32_t attempt;
    enum xfer_mode mode;
    bool began;
    unsigned committed, restarts;
};

static uint64_t pick(struct walk *w, uint64_t n)
{
    return t_random(&w->seed) % n;
}

static void release_all(struct walk *w)
{
    for (unsigned i = 0; i < w->r.n; i++) {
        struct rig_proc *p = &w->r.p[i];

        p->hold_flip = p->hold_pause = false;
        if (p->flip_task)
            fl_post(w->r.loop, p->flip_task);
        if (p->pause_task)
            fl_post(w->r.loop, p->pause_task);
        p->flip_task = p->pause_task = NULL;
        if (p->frozen)
            rig_thaw(p);
    }
}

static void start_update(struct walk *w)
{
    struct xfer_request q = { .kind = pick(w, 4) ? XFER_ADVANCE : XFER_FILL,
                              .target = { .number = w->version },
                              .mode = w->mode,
                              .slots = w->r.o.slots,
                              .party = XFER_ALL_PARTIES,
                              .least_engines = (unsigned)pick(w, 3),
                              .due_ns =
                                  fl_loop_now_ns(w->r.loop) + (500 + pick(w, 5000)) * 1000000 };

    if (!w->r.running && !rig_source(&w->r, 0)->waiting)
        rig_start(&w->r, &q);
}

static void on_begun(struct xfer_wait *wait, enum fl_status st, const struct fl_err *err)
{
    struct rig_proc *p = container_of(wait, struct rig_proc, wait);

    (void)err;
    p->waiting = false;
    p->wait_st = st;
}

static void next_version(struct walk *w)
{
    struct rig_proc *p = rig_source(&w->r, 0);

    if (p->waiting || w->version > 50)
        return;
    if (!w->began) {
        p->wait.done = on_begun;
        w->began =
            xfer_source_begin(p->src, w->version + 1, fl_loop_now_ns(w->r.loop) + 2000000000ull,
                              &p->wait, NULL) == FL_OK;
        p->waiting = w->began;
        return;
    }
    w->began = false;
    if (p->wait_st != FL_OK)
        return; /* refused: frozen as before */
    rig_write(p, w->version + 1);
    p->waiting = xfer_source_publish(p->src, w->version + 1, &p->wait, NULL) == FL_OK;
    t_true(p->waiting);
    w->version++;
}

static void restart_engine(struct walk *w)
{
    struct rig_proc *p = rig_engine(&w->r, (unsigned)pick(w, w->r.o.n_engines), 0);

    if (w->restarts++ > 12)
        return;
    p->hold_flip = p->hold_pause = false;
    rig_kill(p, pick(w, 2));
    (void)rig_restart(p);
}

/* It resumes from its checkpoint: the last version, published anew. */
static void restart_source(struct walk *w)
{
    struct rig_proc *p = rig_source(&w->r, 0);

    if (w->restarts++ > 12)
        return;
    p->waiting = false;
    rig_kill(p, pick(w, 2));
    p = rig_restart(p);
    w->began = false;
    p->wait.done = on_begun;
    rig_write(p, w->version);
    p->waiting = xfer_source_publish(p->src, w->version, &p->wait, NULL) == FL_OK;
    t_true(p->waiting);
}

static void offload(struct walk *w, struct rig_proc *p)
{
    bool dropped = pick(w, 2);

    if (xfer_sink_can_offload(p->sink, NULL) != FL_OK)
        return;
    if (dropped)
        p->reads = NULL; /* its program lets go first */
    t_true(xfer_sink_offload(p->sink, dropped, NULL) == FL_OK);
    if (pick(w, 2))
        xfer_sink_onload(p->sink);
}

static void one_event(struct walk *w)
{
    char spec[64];
    static const char *const names[] = { "xfer.bucket",  "xfer.pull", "xfer.room", "xfer.verified",
                                         "xfer.decided", "link.map",  "link.pull" };
    struct rig_proc *p = rig_engine(&w->r, (unsigned)pick(w, w->r.o.n_engines), 0);

    switch (pick(w, 17)) {
    case 0:
    case 1:
    case 2:
    case 3:
        start_update(w);
        break;
    case 4:
    case 5:
        next_version(w);
        break;
    case 6:
        rig_coord(&w->r, ++w->attempt);
        break;
    case 7:
        rig_pass(&w->r, pick(w, 40000));
        break;
    case 8:
        restart_engine(w);
        break;
    case 9:
        p->hold_flip = true;
        break;
    case 10:
        p->hold_pause = true;
        break;
    case 11:
        release_all(w);
        break;
    case 12:
        snprintf(spec, sizeof(spec), "%s:%u=fail", names[pick(w, FL_LEN(names))],
                 1 + (unsigned)pick(w, 3));
        t_ok(fl_fault_set(spec, NULL), NULL);
        break;
    case 13:
        restart_source(w);
        break;
    case 14:
        (pick(w, 3) ? p : rig_source(&w->r, 0))->frozen = true;
        break;
    default:
        offload(w, p);
        break;
    }
}

static void settle(struct walk *w)
{
    struct rig *r = &w->r;

    t_ok(fl_fault_set(NULL, NULL), NULL);
    release_all(w);
    for (unsigned i = 0; i < r->n; i++)
        if (r->p[i].sink && r->p[i].live)
            xfer_sink_onload(r->p[i].sink);
    rig_coord(r, ++w->attempt);
    rig_until(r, !rig_source(r, 0)->waiting);
    if (w->began)
        next_version(w);
    rig_until(r, !rig_source(r, 0)->waiting);
    t_true(rig_update(r, w->mode, w->version) == FL_OK, "seed walk %s: %s", xfer_mode_name(w->mode),
           r->err.text);
    rig_check_all_serve(r, w->version);
}

static void random_walk(uint64_t seed, enum xfer_mode mode, const struct rig_opts *o)
{
    static struct walk w; /* large */

    w = (struct walk){ .seed = seed, .attempt = 1, .mode = mode };
    rig_init(&w.r, o);
    rig_next(&w.r, 1);
    w.version = 1;
    for (unsigned i = 0; i < 120; i++) {
        unsigned turns = (unsigned)pick(&w, 12);

        one_event(&w);
        for (unsigned t = 0; t < turns; t++) {
            rig_turn(&w.r);
            rig_check(&w.r);
        }
    }
    settle(&w);
    rig_fini(&w.r);
}

static uint64_t base;

static void any_order(void **state)
{
    static const struct {
        enum xfer_mode mode;
        struct rig_opts o;
    } rows[] = {
        { XFER_COPY, { .n_sources = 1, .n_engines = 3, .bucket_bytes = 32768 } },
        { XFER_COPY,
          { .n_sources = 1, .n_engines = 2, .slots = XFER_ONE_SLOT, .bucket_bytes = 32768 } },
        { XFER_COPY, { .n_sources = 1, .n_engines = 2, .src_slots = 1, .bucket_bytes = 32768 } },
        { XFER_P2P,
          { .n_sources = 1,
            .n_engines = 2,
            .bucket_bytes = 32768,
            .addr_of_engines = "127.0.0.2" } },
        { XFER_SHARE, { .n_sources = 1, .n_engines = 2 } },
        { XFER_SHARE, { .n_sources = 1, .n_engines = 2, .src_slots = 1, .slots = XFER_ONE_SLOT } },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++)
        for (uint64_t seed = base + 1; seed <= base + 6; seed++)
            random_walk(seed * 1000003 + i, rows[i].mode, &rows[i].o);
}

int main(int argc, char **argv)
{
    if (argc > 1) /* other walks than every run has */
        base = (uint64_t)atoi(argv[1]);
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_place_in_each_mode),
        cmocka_unit_test(each_place_each_time),
        cmocka_unit_test(any_order),
    };

    return t_run("coord_random", tests);
}
