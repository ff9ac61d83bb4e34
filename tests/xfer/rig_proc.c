/* One process of the rig: its streams, its memory, and what its trainer or its engine does. */
#include "tests/xfer/rig_priv.h"
#include <stdlib.h>
#include "tests/gpu/mem.h"
#include "transport/link/dev.h"

/* ---- streams ---- */

static unsigned *served(struct rig_proc *p, uint16_t method)
{
    unsigned i = 0;

    while (i + 1 < XFER_N_METHODS && xfer_methods[i].method != method)
        i++;
    return &p->served[i];
}

unsigned rig_served(struct rig_proc *p, uint16_t method)
{
    unsigned n = *served(p, method);

    *served(p, method) = 0;
    return n;
}

static uint32_t buckets_in(const struct rig_proc *p)
{
    struct rx_report rep = { 0 };

    if (p->sink)
        xfer_sink_report(p->sink, &rep);
    return rep.buckets_in;
}

static void serve(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct rig_proc *p = service;

    if (!req)
        return;
    ++*served(p, m->head.method);
    if (p->trap_nth && m->head.method == p->trap_method && buckets_in(p) >= p->trap_in &&
        --p->trap_nth == 0)
        p->stopped_at = p->frozen = true;
    if (!p->frozen) {
        xfer_port_serve(p->port, req, m);
        return;
    }
    t_true(p->n_held < RIG_HELD);
    p->held[p->n_held++] = req;
}

static void held_drop(struct rig_proc *p)
{
    struct fl_err why = { .status = FL_UNREACHABLE };

    while (p->n_held)
        call_fail(p->held[--p->n_held], &why);
}

static void on_accepted(void *arg, struct stream *s_take)
{
    struct rig_proc *p = arg;
    static struct call_method methods[XFER_N_METHODS];
    struct fl_err err = { 0 };

    memcpy(methods, xfer_methods, sizeof(methods));
    for (unsigned i = 0; i < XFER_N_METHODS; i++)
        methods[i].serve = serve;

    t_true(p->n_accepted < RIG_PEERS);
    t_ok(call_peer_create(s_take, methods, XFER_N_METHODS, NULL, p, &p->accepted[p->n_accepted],
                          &err),
         &err);
    p->n_accepted++;
}

static void on_closed(void *service, const struct fl_err *why)
{
    struct rig_link *k = service;

    (void)why;
    k->closed = true;
}

static const struct call_life caller_life = { .closed = on_closed };

struct call_peer *rig_call(struct rig *r, struct rig_proc *to, bool shared)
{
    struct stream_to st = { .target = to->at };
    struct wire_hello me = { .role = "worker" };
    struct rig_link *k;
    struct stream *s;
    struct fl_err err = { 0 };

    for (unsigned i = 0; shared && i < r->n_links; i++)
        if (r->links[i].to == to && r->links[i].r == r && !r->links[i].closed)
            return r->links[i].peer;
    t_true(r->n_links < FL_LEN(r->links));
    k = &r->links[r->n_links++];
    *k = (struct rig_link){ .r = shared ? r : NULL, .to = to };
    t_ok(stream_connect(r->loop, &stream_pair, &st, &me, NULL, NULL, &s, &err), &err);
    t_ok(call_peer_create(s, NULL, 0, &caller_life, k, &k->peer, &err), &err);
    return k->peer;
}

static void rig_dial(void *arg, const struct xfer_member *who, struct xfer_dial *d)
{
    struct rig *r = arg;
    struct fl_err err = { 0 };

    for (unsigned i = 0; i < r->n; i++)
        if (r->p[i].live && memcmp(&r->p[i].me.who, &who->who, sizeof(who->who)) == 0) {
            d->done(d, FL_OK, rig_call(r, &r->p[i], true), NULL);
            return;
        }
    fl_fail(&err, FL_UNREACHABLE, "%s is not there", who->name);
    d->done(d, FL_UNREACHABLE, NULL, &err);
}

static void rig_undial(void *arg, struct xfer_dial *d)
{
    (void)arg;
    (void)d;
}

static void proc_listen(struct rig_proc *p)
{
    struct xfer_dialer d = { p->r, rig_dial, rig_undial };
    struct stream_to at = { .target = p->at };
    struct wire_hello me = { .role = "worker", .seat = p->me.who };
    struct fl_err err = { 0 };

    t_ok(xfer_port_create(p->r->loop, &d, &p->port, &err), &err);
    if (p->r->o.links)
        xfer_port_links(p->port, p->r->o.links, p->r->o.n_links);
    t_ok(stream_listen(p->r->loop, &stream_pair, &at, &me, on_accepted, p, &p->server, &err), &err);
    p->live = true;
}

/* ---- memory ---- */

const char *rig_devices(void)
{
    return getenv("RIG_DEVICES");
}

static const struct gpu_info *device_of(const struct rig_proc *p)
{
    static struct gpu_info all[GPU_MAX];
    size_t n = FL_LEN(all);
    const struct gpu_ops *gpu;
    struct fl_err err = { 0 };

    if (!all[0].uuid[0]) {
        t_ok(gpu_pick(&gpu, &err), &err);
        t_ok(gpu->list(all, &n, &err), &err);
    }
    if (p->source || strcmp(rig_devices(), "same") == 0)
        return &all[0];
    return &all[strcmp(rig_devices(), "three") == 0 ? 1 + p->me.party % 2 : 1];
}

const char *rig_uuid(const struct rig_proc *p)
{
    return device_of(p)->uuid;
}

static void place_of(struct rig_proc *p, const char *addr, struct link_place *out)
{
    struct fl_err err = { 0 };
    struct gpu_found found[3] = { 0 };

    t_ok(link_place_here(addr, out, &err), &err);
    if (!rig_devices()) {
        if (p->r->o.bend)
            p->r->o.bend(p, out);
        return;
    }
    for (unsigned i = 0; i < 3; i++)
        found[i] = (struct gpu_found){ .fd_shares = true, .peers = 7 };
    found[0].info = *device_of(&(struct rig_proc){ .source = true });
    found[1].info = *device_of(&(struct rig_proc){ .source = false });
    found[2].info = *device_of(&(struct rig_proc){ .me.party = 1 });
    t_ok(link_place_device(out, device_of(p)->uuid, found, 3, &err), &err);
    if (p->r->o.bend)
        p->r->o.bend(p, out);
}

static enum fl_status mem_new(const struct rig_proc *p, uint64_t bytes, struct link_mem *out,
                              struct fl_err *err)
{
    return rig_devices() ? link_dev_alloc(device_of(p)->uuid, bytes, out, err)
                         : link_mem_alloc(bytes, out, err);
}

static void mem_drop(struct link_mem *mem)
{
    if (mem->on_device)
        link_dev_free(mem);
    else
        link_mem_free(mem);
}

/* ---- an engine ---- */

static enum fl_status room(void *arg, uint64_t bytes, struct link_mem *out, struct fl_err *err)
{
    struct rig_proc *p = arg;

    FL_TRY(mem_new(p, bytes, out, err));
    t_mem_fill(out->addr, 0xee, out->bytes);
    p->rooms++;
    return FL_OK;
}

static void done_with(void *arg, struct link_mem *mem)
{
    struct rig_proc *p = arg;

    t_true(p->reads != mem->addr, "the slot that serves is handed back");
    t_true(p->window == NULL || p->shown != mem->addr, "the slot that is shown is handed back");
    mem_drop(mem);
    p->rooms--;
}

static void pause(void *arg, struct fl_task *paused)
{
    struct rig_proc *p = arg;

    p->pauses++;
    p->paused = true;
    if (p->hold_pause) {
        p->pause_task = paused;
        return;
    }
    fl_post(p->r->loop, paused);
}

static void flip(void *arg, const struct xfer_version *now, const struct link_mem *mem,
                 struct fl_task *flipped)
{
    struct rig_proc *p = arg;

    p->serving = *now;
    p->reads = mem->addr;
    p->flips++;
    if (p->hold_flip)
        p->flip_task = flipped;
    else
        fl_post(p->r->loop, flipped);
}

static void resume(void *arg)
{
    struct rig_proc *p = arg;

    p->resumes++;
    p->paused = false;
}

static enum fl_status can_show(void *arg, const struct link_mem *comes, struct fl_err *err)
{
    struct rig_proc *p = arg;
    struct link_place at = { 0 };

    place_of(p, p->r->o.addr_of_engines, &at);
    if (!p->window)
        FL_TRY(link_window_create(at.gpu_uuid, comes->bytes, &p->window, err));
    return link_window_can(p->window, comes, err);
}

static enum fl_status show(void *arg, const struct link_mem *comes, struct link_mem *seen,
                           struct fl_err *err)
{
    struct rig_proc *p = arg;

    t_true(p->paused, "memory changes under an engine that runs");
    FL_TRY(link_window_show(p->window, comes, false, err));
    seen->addr = link_window_data(p->window);
    p->shown = comes->addr;
    return FL_OK;
}

static const struct xfer_sink_ops engine_ops = { room, done_with, pause, flip, resume, NULL, NULL };
static const struct xfer_sink_ops fixed_ops = {
    room, done_with, pause, flip, resume, can_show, show
};

void rig_accept(struct rig_proc *p)
{
    struct rig *r = p->r;
    char local[512];

    snprintf(local, sizeof(local), "%s-%u", r->o.local_dir ? r->o.local_dir : "", p->me.party);
    struct xfer_sink_opts o = { .set = "policy",
                                .me = p->me,
                                .want = &p->m,
                                .slots = r->o.slots,
                                .check_equal = r->o.check_equal,
                                .local_dir = r->o.own_local ? local : r->o.local_dir,
                                .ops = r->o.fixed ? &fixed_ops : &engine_ops,
                                .arg = p };
    struct fl_err err = { 0 };

    place_of(p, r->o.addr_of_engines, &o.place);
    t_ok(xfer_sink_create(r->loop, p->port, &o, &p->sink, &err), &err);
}

static void sink_open(struct rig_proc *p)
{
    proc_listen(p);
    rig_accept(p);
}

static void source_open(struct rig_proc *p)
{
    struct rig *r = p->r;
    struct xfer_source_opts o = {
        .set = "policy", .me = p->me, .have = &p->m, .n_slots = r->o.src_slots ? r->o.src_slots : 2
    };
    struct fl_err err = { 0 };

    proc_listen(p);
    place_of(p, NULL, &o.place);
    for (unsigned i = 0; i < o.n_slots; i++) {
        t_ok(mem_new(p, p->mem_bytes, &p->slot[i], &err), &err);
        o.slot[i] = p->slot[i];
    }
    t_ok(xfer_source_create(r->loop, p->port, &o, &p->src, &err), &err);
}

struct rig_proc *rig_proc_add(struct rig *r, bool source, unsigned party, unsigned rank,
                              unsigned ranks, uint32_t attempt)
{
    struct rig_proc *p = &r->p[r->n++];

    t_true(r->n <= RIG_PROCS);
    *p = (struct rig_proc){ .r = r, .source = source, .rank = rank, .ranks = ranks };
    p->me.who.id.b[0] = source ? 1 : 2;
    p->me.who.id.b[1] = (uint8_t)party;
    p->me.who.id.b[2] = (uint8_t)rank;
    p->me.who.attempt = attempt;
    p->me.party = party;
    if (ranks > 1 && !source)
        snprintf(p->me.name, sizeof(p->me.name), "rollout %u.%u", party, rank);
    else
        snprintf(p->me.name, sizeof(p->me.name), "%s %u", source ? "trainer" : "rollout",
                 source ? rank : party);
    if (r->o.hosts) {
        size_t len = strlen(p->me.name);

        snprintf(p->me.name + len, sizeof(p->me.name) - len, " on host-%c",
                 source ? 'a' : (int)('a' + party));
    }
    snprintf(p->me.where, sizeof(p->me.where), "proc %u", r->n);
    snprintf(p->at, sizeof(p->at), "pair:proc-%u", r->n);
    rig_lay_out(p, source ? r->o.sharded : ranks > 1, source ? r->o.source_head : r->o.engine_head);
    if (source)
        source_open(p);
    else
        sink_open(p);
    return p;
}
/* What a driver opens at its first work stays open: descriptors are counted from there. */
void rig_devices_open(void)
{
    struct link_seg all = { .run_bytes = 4096, .rows = 1 };
    uint64_t digest[1][2] = { 0 };
    struct fl_err err = { 0 };

    for (unsigned i = 0; i < 3; i++) {
        struct rig_proc p = { .source = i == 0, .me.party = i };
        struct link_mem mem = { 0 };

        t_ok(mem_new(&p, all.run_bytes, &mem, &err), &err);
        t_mem_fill(mem.addr, 0, all.run_bytes);
        t_ok(link_mem_digest(&mem, &all, 1, true, digest, &err), &err);
        mem_drop(&mem);
    }
}

/* ---- its end ---- */

static void on_stopped(struct fl_task *t)
{
    container_of(t, struct rig_proc, stopped)->is_stopped = true;
}

void rig_drop(struct rig_proc *p)
{
    p->stopped.run = on_stopped;
    p->is_stopped = false;
    p->reads = NULL;
    xfer_sink_stop(p->sink, &p->stopped);
    rig_until(p->r, p->is_stopped);
    xfer_sink_destroy(p->sink);
    p->sink = NULL;
    p->is_stopped = false;
}

void rig_proc_fini(struct rig_proc *p)
{
    p->stopped.run = on_stopped;
    p->reads = p->shown = NULL; /* the engine reads nothing any more */
    p->hold_flip = p->hold_pause = false;
    if (p->src)
        xfer_source_stop(p->src, &p->stopped);
    else
        xfer_sink_stop(p->sink, &p->stopped);
    if (p->flip_task)
        fl_post(p->r->loop, p->flip_task);
    if (p->pause_task)
        fl_post(p->r->loop, p->pause_task);
    rig_until(p->r, p->is_stopped);
    xfer_source_destroy(p->src);
    xfer_sink_destroy(p->sink);
    link_window_destroy(FL_TAKE(p->window));
    t_int_eq(p->rooms, 0, "rooms of %s", p->me.name);
    for (unsigned i = 0; i < 2; i++)
        mem_drop(&p->slot[i]);
}

void rig_proc_close(struct rig_proc *p)
{
    stream_server_destroy(p->server);
    p->server = NULL;
    for (unsigned i = 0; i < p->n_accepted; i++)
        call_peer_destroy(p->accepted[i]);
    held_drop(p); /* nobody hears it any more */
    p->n_accepted = 0;
    p->live = false;
}

void rig_thaw(struct rig_proc *p)
{
    p->frozen = false; /* what came meanwhile is asked again: it is refused as by a broken stream */
    held_drop(p);
}

void rig_kill(struct rig_proc *p, bool tell)
{
    struct fl_err why = { 0 };

    p->reads = p->shown = NULL;
    rig_proc_close(p);
    fl_fail(&why, FL_UNREACHABLE, "killed by signal 9");
    if (tell)
        xfer_coord_gone(p->r->coord, p->me.who, &why);
}

enum rx_state rig_state(const struct rig_proc *p)
{
    struct rx_report rep;

    xfer_sink_report(p->sink, &rep);
    return rep.state;
}
