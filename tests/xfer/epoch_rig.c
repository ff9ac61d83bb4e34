#include "tests/xfer/rig_priv.h"
#include <stdlib.h>
#include <time.h>
#include "common/base/fault.h"
#include "common/base/log.h"
#include "tests/gpu/mem.h"

/* ---- life ---- */

void rig_init(struct rig *r, const struct rig_opts *o)
{
    static bool open;
    struct fl_clock c;
    struct fl_err err = { 0 };

    if (rig_devices() && !open)
        rig_devices_open();
    open = true;
    t_ok(fl_log_level_set("error", NULL), NULL);
    *r = (struct rig){ .o = *o, .fds_before = t_open_fds(), .clock = { 1000000000 } };
    c = fl_held_clock(&r->clock);
    t_ok(fl_loop_create(o->real_clock ? NULL : &c, &r->loop, &err), &err);
    for (unsigned i = 0; i < o->n_sources; i++)
        rig_proc_add(r, true, 0, i, o->n_sources, 1);
    for (unsigned e = 0; e < o->n_engines; e++)
        for (unsigned k = 0; k < (o->ranks ? o->ranks : 1); k++)
            rig_proc_add(r, false, e, k, o->ranks ? o->ranks : 1, 1);
    rig_coord(r, 1);
}

/* NCCL's thread ends communicators behind our back, and on the fake their memory is descriptors.
 * Between two real devices the driver and NCCL open some of their own as they go and keep them
 * (seen: 2 to 4 at a time, in one case or another): there the sum over the process is bounded. On
 * one real device, as on the fake, nothing is left. */
static void fds_come_back(int before)
{
    enum { THEIRS = 64 };
    static int at_first;
    char names[8000];

    at_first = at_first ? at_first : before;
    for (unsigned i = 0; rig_devices() && i < 500 && t_open_fds() != before; i++)
        nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
    bool theirs = t_on_cuda() && rig_devices() && strcmp(rig_devices(), "same") != 0;

    if (t_open_fds() == before || (theirs && t_open_fds() <= at_first + THEIRS))
        return;
    t_open_names(names, sizeof(names));
    printf("# open: %s\n", names);
    t_int_eq(t_open_fds(), before, "descriptors");
}

void rig_fini(struct rig *r)
{
    xfer_coord_destroy(r->coord);
    r->coord = NULL;
    for (unsigned i = r->n; i-- > 0;)
        rig_proc_fini(&r->p[i]);
    for (unsigned i = 0; i < r->n_links; i++)
        call_peer_destroy(r->links[i].peer);
    for (unsigned i = 0; i < r->n; i++) {
        rig_proc_close(&r->p[i]);
        xfer_port_destroy(r->p[i].port);
    }
    for (unsigned i = 0; i < 20; i++)
        fl_loop_turn(r->loop, 0);
    fl_loop_destroy(r->loop);
    for (unsigned i = 0; i < FL_LEN(r->model); i++)
        free(r->model[i]);
    fds_come_back(r->fds_before);
}

struct rig_proc *rig_source(struct rig *r, unsigned i)
{
    for (unsigned k = r->n; k-- > 0;)
        if (r->p[k].source && r->p[k].rank == i)
            return &r->p[k];
    return NULL;
}

struct rig_proc *rig_engine(struct rig *r, unsigned party, unsigned rank)
{
    for (unsigned k = r->n; k-- > 0;)
        if (!r->p[k].source && r->p[k].me.party == party && r->p[k].rank == rank)
            return &r->p[k];
    return NULL;
}

static void coord_add(struct rig *r, struct rig_proc *p)
{
    struct call_peer *peer = rig_call(r, p, false);
    struct fl_err err = { 0 };

    if (p->source)
        t_ok(xfer_coord_add_source(r->coord, peer, &p->me, &err), &err);
    else
        t_ok(xfer_coord_add_engine(r->coord, peer, &p->me, &err), &err);
}

void rig_coord(struct rig *r, uint32_t attempt)
{
    struct xfer_coord_opts o = { .set = "policy",
                                 .attempt = attempt,
                                 .delta_dir = r->o.delta_dir,
                                 .bucket_bytes = r->o.bucket_bytes ? r->o.bucket_bytes : 8192,
                                 .links = r->o.links,
                                 .n_links = r->o.n_links };
    struct fl_err err = { 0 };

    xfer_coord_destroy(r->coord);
    r->running = false;
    t_ok(xfer_coord_create(r->loop, &o, &r->coord, &err), &err);
    for (unsigned i = 0; i < r->n; i++)
        if (r->p[i].live)
            coord_add(r, &r->p[i]);
}

struct rig_proc *rig_restart(struct rig_proc *p)
{
    struct rig_proc *q =
        rig_proc_add(p->r, p->source, p->me.party, p->rank, p->ranks, p->me.who.attempt + 1);

    coord_add(p->r, q);
    return q;
}

struct rig_proc *rig_join(struct rig *r, unsigned party)
{
    struct rig_proc *p = rig_proc_add(r, false, party, 0, 1, 1);

    coord_add(r, p);
    return p;
}

void rig_turn(struct rig *r)
{
    enum { LONG_IDLE = 8, SHORT_MS = 1, LONG_MS = 200 }; /* threads have had their time by then */

    if (fl_loop_turn(r->loop, 0) || fl_loop_turn(r->loop, 1)) {
        r->idle = 0;
        return;
    }
    if (r->o.real_clock)
        return;
    fl_loop_pass(r->loop, &r->clock,
                 (++r->idle < LONG_IDLE ? SHORT_MS
                  : rig_devices()       ? LONG_MS / 10
                                        : LONG_MS) *
                     1000000);
}

void rig_pass(struct rig *r, uint64_t ms)
{
    fl_loop_pass(r->loop, &r->clock, ms * 1000000);
    for (unsigned i = 0; i < 50; i++)
        fl_loop_turn(r->loop, 0);
}

/* ---- the trainer ---- */

#define EACH_SOURCE(r, p)                                                                          \
    for (struct rig_proc *p = (r)->p; p < (r)->p + (r)->n; p++)                                    \
        if (p->source && p->live)

static void on_waited(struct xfer_wait *w, enum fl_status st, const struct fl_err *err)
{
    struct rig_proc *p = container_of(w, struct rig_proc, wait);

    p->waiting = false;
    p->wait_st = st;
    p->wait_err = *err;
}

static struct xfer_wait *will_wait(struct rig_proc *p)
{
    p->wait.done = on_waited;
    p->waiting = true;
    return &p->wait;
}

static bool any_waits(const struct rig *r)
{
    for (unsigned i = 0; i < r->n; i++)
        if (r->p[i].waiting)
            return true;
    return false;
}

/* Until each has its answer; of those that failed the last one's, in r->err. */
static enum fl_status waited(struct rig *r)
{
    enum fl_status st = FL_OK;

    rig_until(r, !any_waits(r));
    EACH_SOURCE (r, p)
        if (p->wait_st != FL_OK) {
            st = p->wait_st;
            r->err = p->wait_err;
        }
    return st;
}

enum fl_status rig_begin(struct rig *r, uint64_t version, uint64_t wait_ms)
{
    uint64_t due_ns = fl_loop_now_ns(r->loop) + wait_ms * 1000000;
    struct fl_err err = { 0 };

    EACH_SOURCE (r, p)
        t_ok(xfer_source_begin(p->src, version, due_ns, will_wait(p), &err), &err);
    return waited(r);
}

void rig_publish(struct rig *r, uint64_t version)
{
    struct fl_err err = { 0 };

    EACH_SOURCE (r, p)
        t_ok(xfer_source_publish(p->src, version, will_wait(p), &err), &err);
    t_ok(waited(r), &r->err);
}

void rig_next(struct rig *r, uint64_t version)
{
    uint64_t was;

    if (xfer_source_version(rig_source(r, 0)->src, &was))
        t_ok(rig_begin(r, version, 60000), &r->err);
    EACH_SOURCE (r, p)
        rig_write(p, version);
    rig_publish(r, version);
}

/* ---- updates ---- */

static void on_run(struct xfer_run *run, enum fl_status st, const struct xfer_report *rep,
                   const struct fl_err *err)
{
    struct rig *r = container_of(run, struct rig, run);

    r->running = false;
    r->st = st;
    r->rep = *rep;
    r->err = *err;
}

void rig_start(struct rig *r, const struct xfer_request *q)
{
    struct fl_err err = { 0 };

    r->run.done = on_run;
    r->running = true;
    t_ok(xfer_start(r->coord, q, &r->run, &err), &err);
}

enum fl_status rig_run(struct rig *r, const struct xfer_request *q)
{
    rig_start(r, q);
    rig_until(r, !r->running);
    return r->st;
}

enum fl_status rig_update(struct rig *r, enum xfer_mode mode, uint64_t version)
{
    struct xfer_request q = { .target = { .number = version },
                              .mode = mode,
                              .slots = r->o.slots,
                              .party = XFER_ALL_PARTIES,
                              .due_ns = fl_loop_now_ns(r->loop) + 60000000000ull };

    return rig_run(r, &q);
}

enum fl_status rig_update_at(struct rig *r, const char *fault, enum xfer_mode mode,
                             uint64_t version)
{
    t_ok(fl_fault_set(fault, NULL), NULL);
    enum fl_status st = rig_update(r, mode, version);

    t_ok(fl_fault_set(NULL, NULL), NULL);
    return st;
}

void rig_bring(struct rig *r, enum xfer_mode mode, uint64_t version)
{
    rig_next(r, version);
    t_ok(rig_update(r, mode, version), &r->err);
    rig_check_all_serve(r, version);
}

void rig_serving(struct rig *r, const struct rig_opts *o, enum xfer_mode mode)
{
    rig_init(r, o);
    rig_bring(r, mode, 1);
}
