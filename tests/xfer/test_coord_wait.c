/* Who has its part and waits for others hears of the driver all the same; and what the others do
 * meanwhile. */
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include "common/proto/methods.h"
#include "transport/xfer/port_priv.h"
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

/* ---- what changes behind the coordinator's back ---- */

/* It has reported that it serves, and its weights' memory goes before its begin comes. */
static void a_giver_that_offloads_meanwhile(void **state)
{
    struct xfer_request q = { .kind = XFER_FILL, .mode = XFER_COPY, .party = 1 };
    struct rig_proc *giver;
    struct rig r;

    (void)state;
    rig_init(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 2, .src_slots = 1 });
    rig_next(&r, 1);
    t_ok(rig_update(&r, XFER_COPY, 1), &r.err);
    t_ok(rig_begin(&r, 2, 5000), &r.err);
    rig_kill(rig_engine(&r, 1, 0), true);
    rig_restart(rig_engine(&r, 1, 0));
    giver = rig_engine(&r, 0, 0);
    (void)rig_served(giver, FL_XFER_RECONCILE);
    q.due_ns = fl_loop_now_ns(r.loop) + 5000000000ull;
    rig_start(&r, &q);
    rig_until(&r, rig_served(giver, FL_XFER_RECONCILE));
    t_ok(xfer_sink_offload(giver->sink, false, &r.err), &r.err);
    rig_until(&r, !r.running);
    t_true(r.st != FL_OK, "nothing is read from it");
    t_has(r.err.text, "offloaded");
    t_int_eq(rig_state(rig_engine(&r, 1, 0)), RX_EMPTY);
    xfer_sink_onload(giver->sink);
    q.due_ns = fl_loop_now_ns(r.loop) + 5000000000ull;
    t_ok(rig_run(&r, &q), &r.err);
    rig_check_all_serve(&r, 1);
    rig_fini(&r);
}

struct late_call {
    struct call_op op;
    enum fl_status st;
    bool over;
};

static void late_over(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                      const struct fl_err *err)
{
    struct late_call *c = container_of(op, struct late_call, op);

    (void)reply, (void)err;
    c->st = st;
    c->over = true;
}

static struct call_peer *peer_of(struct rig *r, const struct rig_proc *p)
{
    for (unsigned i = 0; i < r->n_links; i++)
        if (r->links[i].to == p && !r->links[i].closed)
            return r->links[i].peer;
    t_true(false, "no way to %s", p->me.name);
    return NULL;
}

static enum fl_status resume_late(struct rig *r, const struct rig_proc *p, uint32_t seq)
{
    Fl__XferEpoch e = FL__XFER_EPOCH__INIT;
    Fl__XferResume m = FL__XFER_RESUME__INIT;
    struct call_args a = { .method = FL_XFER_RESUME, .lane = XFER_LANE };
    struct late_call c = { .op.done = late_over };

    a.due_ns = fl_loop_now_ns(r->loop) + 5000000000ull;
    e.attempt = 1;
    e.seq = seq;
    m.set = (char *)(uintptr_t) "policy";
    m.epoch = &e;
    t_ok(msg_pack(&m.base, &a.body, &r->err), &r->err);
    t_ok(call_start(peer_of(r, p), &a, &c.op, &r->err), &r->err);
    free((void *)(uintptr_t)a.body.data);
    rig_until(r, c.over);
    return c.st;
}

/* One rank has flipped and stands until the others have: a word of the epoch before does not let it
 * go. */
static void a_late_resume_lets_nobody_go(void **state)
{
    struct rig_proc *first, *last;
    struct rig r;

    (void)state;
    rig_init(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 1, .ranks = 2 });
    rig_next(&r, 1);
    t_ok(rig_update(&r, XFER_COPY, 1), &r.err);
    rig_next(&r, 2);
    first = rig_engine(&r, 0, 0);
    last = rig_engine(&r, 0, 1);
    last->hold_flip = true;
    start(&r, XFER_COPY, 2, 20000);
    rig_until(&r, last->flip_task && rig_state(first) == RX_SERVING);
    t_int_eq(resume_late(&r, first, 1), FL_STALE);
    t_int_eq(first->resumes, 1, "of the first update alone");
    t_true(first->paused, "no step runs before the other has flipped");
    last->hold_flip = false;
    fl_post(r.loop, last->flip_task);
    last->flip_task = NULL;
    rig_until(&r, !r.running);
    t_ok(r.st, &r.err);
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

/* ---- a version that is still being written ---- */

enum { POOL = 2 };
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static unsigned blocked;

static void blocks(struct fl_work *w)
{
    (void)w;
    pthread_mutex_lock(&gate);
    pthread_mutex_unlock(&gate);
}

static void unblocked(struct fl_work *w, enum fl_status st)
{
    (void)w, (void)st;
    blocked--;
}

static void on_begun(struct xfer_wait *w, enum fl_status st, const struct fl_err *err)
{
    struct rig_proc *p = container_of(w, struct rig_proc, wait);

    (void)err;
    p->waiting = false;
    p->wait_st = st;
}

/* The folder is slow: the update gives up, and the trainer goes on to the next version in the same
 * memory, which is still read from. */
static void a_slow_folder_keeps_the_slot(void **state)
{
    struct fl_work works[POOL] = { { .work = blocks, .done = unblocked },
                                   { .work = blocks, .done = unblocked } };
    struct rig_proc *p;
    struct rig r;

    (void)state;
    rig_init(&r, &(struct rig_opts){ .n_sources = 1,
                                     .n_engines = 1,
                                     .src_slots = 1,
                                     .delta_dir = t_path("slow"),
                                     .local_dir = t_path("slow-own") });
    rig_next(&r, 1);
    t_ok(rig_update(&r, XFER_DISK_DELTA, 1), &r.err);
    rig_next(&r, 2);
    pthread_mutex_lock(&gate);
    blocked = POOL;
    for (unsigned i = 0; i < POOL; i++)
        fl_work_start(r.loop, &works[i]);
    start(&r, XFER_DISK_DELTA, 2, 3000);
    rig_until(&r, !r.running);
    t_int_eq(r.st, FL_TIMEOUT, "%s", r.err.text);
    p = rig_source(&r, 0);
    p->wait.done = on_begun;
    p->waiting = true;
    t_ok(xfer_source_begin(p->src, 3, fl_loop_now_ns(r.loop) + 60000000000ull, &p->wait, &r.err),
         &r.err);
    for (unsigned ms = 0; ms < 20000; ms += 500)
        rig_pass(&r, 500);
    t_true(p->waiting, "its memory is being read");
    pthread_mutex_unlock(&gate);
    rig_until(&r, !p->waiting && !blocked);
    t_int_eq(p->wait_st, FL_OK);
    rig_write(p, 3);
    rig_publish(&r, 3);
    t_ok(rig_update(&r, XFER_DISK_DELTA, 3), &r.err);
    rig_check_all_serve(&r, 3);
    rig_fini(&r);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_is_first_waits_longer_than_its_lease),
        cmocka_unit_test(a_giver_that_offloads_meanwhile),
        cmocka_unit_test(a_late_resume_lets_nobody_go),
        cmocka_unit_test(a_slow_folder_keeps_the_slot),
    };

    return t_run("coord_wait", tests);
}
