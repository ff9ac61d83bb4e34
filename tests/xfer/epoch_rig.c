#include "tests/xfer/epoch_rig.h"
#include <inttypes.h>
#include <stdlib.h>
#include <time.h>
#include "common/base/log.h"
#include "tests/gpu/mem.h"
#include "transport/link/dev.h"

/* clang-format off */
static const struct xfer_tensor tensors[] = { /* sorted by name */
    { "embed",        FL_F32,  2, { 96, 64 } },
    { "layer.buffer", FL_F32,  2, { 0, 64 } }, /* of no bytes, as models have them */
    { "layer.down",   FL_BF16, 2, { 64, 160 } },
    { "layer.norm",   FL_F32,  1, { 64 } },
    { "layer.qkv",    FL_BF16, 3, { 4, 48, 64 } },
    { "layer.up",     FL_F16,  2, { 160, 64 } },
    { "scale",        FL_F32,  0, { 0 } },
    { "table",        FL_U8,   1, { 1026 } },
};
/* The dimension that a shard is cut along; -1: each rank holds all of it. */
static const int cut_dim[] = { 0, 1, 1, -1, 1, 0, -1, -1 };
static const struct xfer_tensor with_head[RIG_TENSORS] = { /* "head" is "embed" once more */
    { "embed",        FL_F32,  2, { 96, 64 } },
    { "head",         FL_F32,  2, { 96, 64 } },
    { "layer.buffer", FL_F32,  2, { 0, 64 } }, /* of no bytes, as models have them */
    { "layer.down",   FL_BF16, 2, { 64, 160 } },
    { "layer.norm",   FL_F32,  1, { 64 } },
    { "layer.qkv",    FL_BF16, 3, { 4, 48, 64 } },
    { "layer.up",     FL_F16,  2, { 160, 64 } },
    { "scale",        FL_F32,  0, { 0 } },
    { "table",        FL_U8,   1, { 1026 } },
};
/* clang-format on */

static uint64_t model_bytes(void)
{
    uint64_t n = 0;

    for (unsigned i = 0; i < FL_LEN(tensors); i++)
        n += xfer_tensor_bytes(&tensors[i]);
    return n;
}

static const uint8_t *reference(struct rig *r, uint64_t version)
{
    uint64_t seed = version * 7919 + 1, n = model_bytes();

    t_true(version < FL_LEN(r->model));
    if (!r->model[version]) {
        r->model[version] = malloc(n);
        for (uint64_t i = 0; i < n; i++)
            r->model[version][i] = (uint8_t)(t_random(&seed) >> 32);
    }
    return r->model[version];
}

static unsigned base_of(const struct xfer_tensor *t)
{
    for (unsigned i = 0; i < FL_LEN(tensors); i++)
        if (strcmp(tensors[i].name, t->name) == 0)
            return i;
    return 0; /* the head */
}

static const uint8_t *reference_of(struct rig *r, uint64_t version, const struct xfer_tensor *t)
{
    bool untied = r->o.head_differs && strcmp(t->name, "head") == 0;
    const uint8_t *at = reference(r, version + untied);

    for (unsigned i = 0; i < base_of(t); i++)
        at += xfer_tensor_bytes(&tensors[i]);
    return at;
}

/* fn(whole tensor at, piece at, bytes) for each contiguous run of a box. */
static void each_run(const struct xfer_tensor *t, const struct xfer_box *b,
                     void (*fn)(void *arg, uint64_t whole_off, uint64_t piece_off, uint64_t bytes),
                     void *arg)
{
    uint64_t e = xfer_dtype_bytes(t->dtype), at[FL_DIMS] = { 0 }, piece = 0;
    uint64_t row = t->ndim ? b->len[t->ndim - 1] * e : e;

    if (xfer_box_bytes(t, b) == 0)
        return;
    for (;;) {
        uint64_t off = 0;

        for (unsigned d = 0; d < t->ndim; d++)
            off = off * t->shape[d] + b->at[d] + at[d];
        fn(arg, off * e, piece, row);
        piece += row;
        int d = (int)t->ndim - 2;

        while (d >= 0 && ++at[d] == b->len[d])
            at[d--] = 0;
        if (d < 0)
            return;
    }
}

static void lay_out(struct rig_proc *p, bool shard, bool head)
{
    const struct xfer_tensor *all = head ? with_head : tensors;
    size_t n = head ? FL_LEN(with_head) : FL_LEN(tensors);
    uint64_t off = 0;

    for (unsigned i = 0; i < n; i++) {
        struct xfer_box b = xfer_box_whole(&all[i]);
        int d = shard ? cut_dim[base_of(&all[i])] : -1;

        if (d >= 0) {
            b.len[d] = all[i].shape[d] / p->ranks;
            b.at[d] = b.len[d] * p->rank;
        }
        p->pieces[i] = (struct xfer_piece){ .tensor = i, .off = off, .box = b };
        off += (xfer_box_bytes(&all[i], &b) + XFER_ALIGN - 1) / XFER_ALIGN * XFER_ALIGN;
    }
    p->mem_bytes = off;
    p->m = (struct xfer_manifest){ .who = p->me.who,
                                   .party = p->me.party,
                                   .tensors = all,
                                   .pieces = p->pieces,
                                   .mem_bytes = &p->mem_bytes,
                                   .n_tensors = n,
                                   .n_pieces = n,
                                   .n_mems = 1 };
    if (p->r->o.bend)
        p->r->o.bend(p, NULL);
    t_ok(xfer_manifest_seal(&p->m, NULL), NULL);
}

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

static struct call_peer *dial_now(struct rig *r, struct rig_proc *to, bool shared)
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
            d->done(d, FL_OK, dial_now(r, &r->p[i], true), NULL);
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

static struct rig_proc *add_proc(struct rig *r, bool source, unsigned party, unsigned rank,
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
    lay_out(p, source ? r->o.sharded : ranks > 1, source ? r->o.source_head : r->o.engine_head);
    if (source)
        source_open(p);
    else
        sink_open(p);
    return p;
}

/* ---- life ---- */

/* What a driver opens at its first work stays open: descriptors are counted from there. */
static void devices_open(void)
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

void rig_init(struct rig *r, const struct rig_opts *o)
{
    static bool open;
    struct fl_clock c;
    struct fl_err err = { 0 };

    if (rig_devices() && !open)
        devices_open();
    open = true;
    t_ok(fl_log_level_set("error", NULL), NULL);
    *r = (struct rig){ .o = *o, .fds_before = t_open_fds(), .clock = { 1000000000 } };
    c = fl_held_clock(&r->clock);
    t_ok(fl_loop_create(o->real_clock ? NULL : &c, &r->loop, &err), &err);
    for (unsigned i = 0; i < o->n_sources; i++)
        add_proc(r, true, 0, i, o->n_sources, 1);
    for (unsigned e = 0; e < o->n_engines; e++)
        for (unsigned k = 0; k < (o->ranks ? o->ranks : 1); k++)
            add_proc(r, false, e, k, o->ranks ? o->ranks : 1, 1);
    rig_coord(r, 1);
}

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

static void proc_fini(struct rig_proc *p)
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

static void streams_close(struct rig_proc *p)
{
    stream_server_destroy(p->server);
    p->server = NULL;
    for (unsigned i = 0; i < p->n_accepted; i++)
        call_peer_destroy(p->accepted[i]);
    held_drop(p); /* nobody hears it any more */
    p->n_accepted = 0;
    p->live = false;
}

/* NCCL's thread ends communicators behind our back, and on the fake their memory is descriptors.
 * The real library keeps some from its first communicator on, once in a process. */
static void fds_come_back(int before)
{
    static bool nccl_has_its_own;

    for (unsigned i = 0; rig_devices() && i < 500 && t_open_fds() != before; i++)
        nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
    if (t_on_cuda() && !nccl_has_its_own && t_open_fds() > before)
        nccl_has_its_own = true;
    else
        t_int_eq(t_open_fds(), before, "descriptors");
}

void rig_fini(struct rig *r)
{
    xfer_coord_destroy(r->coord);
    r->coord = NULL;
    for (unsigned i = r->n; i-- > 0;)
        proc_fini(&r->p[i]);
    for (unsigned i = 0; i < r->n_links; i++)
        call_peer_destroy(r->links[i].peer);
    for (unsigned i = 0; i < r->n; i++) {
        streams_close(&r->p[i]);
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
    struct call_peer *peer = dial_now(r, p, false);
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

void rig_thaw(struct rig_proc *p)
{
    p->frozen = false; /* what came meanwhile is asked again: it is refused as by a broken stream */
    held_drop(p);
}

void rig_kill(struct rig_proc *p, bool tell)
{
    struct fl_err why = { 0 };

    p->reads = p->shown = NULL;
    streams_close(p);
    fl_fail(&why, FL_UNREACHABLE, "killed by signal 9");
    if (tell)
        xfer_coord_gone(p->r->coord, p->me.who, &why);
}

struct rig_proc *rig_restart(struct rig_proc *p)
{
    struct rig_proc *q =
        add_proc(p->r, p->source, p->me.party, p->rank, p->ranks, p->me.who.attempt + 1);

    coord_add(p->r, q);
    return q;
}

struct rig_proc *rig_join(struct rig *r, unsigned party)
{
    struct rig_proc *p = add_proc(r, false, party, 0, 1, 1);

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

struct copying {
    uint8_t *piece;
    const uint8_t *whole;
    bool differs;
};

static void copy_in(void *arg, uint64_t whole_off, uint64_t piece_off, uint64_t bytes)
{
    struct copying *c = arg;

    memcpy(c->piece + piece_off, c->whole + whole_off, bytes);
}

static void compare(void *arg, uint64_t whole_off, uint64_t piece_off, uint64_t bytes)
{
    struct copying *c = arg;

    c->differs |= memcmp(c->piece + piece_off, c->whole + whole_off, bytes) != 0;
}

void rig_write(struct rig_proc *p, uint64_t version)
{
    char *slot = xfer_source_data(p->src, NULL)->addr;

    for (unsigned i = 0; i < p->m.n_tensors; i++) {
        const struct xfer_tensor *t = &p->m.tensors[i];
        uint64_t bytes = xfer_box_bytes(t, &p->pieces[i].box);
        struct copying c = { malloc(bytes + 1), reference_of(p->r, version, t), false };

        each_run(t, &p->pieces[i].box, copy_in, &c);
        t_mem_write(slot + p->pieces[i].off, c.piece, bytes);
        free(c.piece);
    }
}

void rig_flip_bit(struct rig_proc *p, uint64_t off)
{
    uint8_t *at = (uint8_t *)xfer_source_data(p->src, NULL)->addr + off, byte = t_mem_byte(at) ^ 1;

    t_mem_write(at, &byte, 1);
}

static void on_waited(struct xfer_wait *w, enum fl_status st, const struct fl_err *err)
{
    struct rig_proc *p = container_of(w, struct rig_proc, wait);

    p->waiting = false;
    p->wait_st = st;
    p->wait_err = *err;
}

static bool any_waits(const struct rig *r)
{
    for (unsigned i = 0; i < r->n; i++)
        if (r->p[i].waiting)
            return true;
    return false;
}

enum fl_status rig_begin(struct rig *r, uint64_t version, uint64_t wait_ms)
{
    struct fl_err err = { 0 };
    enum fl_status st = FL_OK;

    for (unsigned i = 0; i < r->n; i++)
        if (r->p[i].source && r->p[i].live) {
            r->p[i].wait.done = on_waited;
            r->p[i].waiting = true;
            t_ok(xfer_source_begin(r->p[i].src, version,
                                   fl_loop_now_ns(r->loop) + wait_ms * 1000000, &r->p[i].wait,
                                   &err),
                 &err);
        }
    rig_until(r, !any_waits(r));
    for (unsigned i = 0; i < r->n; i++)
        if (r->p[i].source && r->p[i].live && r->p[i].wait_st != FL_OK) {
            st = r->p[i].wait_st;
            r->err = r->p[i].wait_err;
        }
    return st;
}

void rig_publish(struct rig *r, uint64_t version)
{
    struct fl_err err = { 0 };

    for (unsigned i = 0; i < r->n; i++)
        if (r->p[i].source && r->p[i].live) {
            r->p[i].wait.done = on_waited;
            r->p[i].waiting = true;
            t_ok(xfer_source_publish(r->p[i].src, version, &r->p[i].wait, &err), &err);
        }
    rig_until(r, !any_waits(r));
    for (unsigned i = 0; i < r->n; i++)
        if (r->p[i].source && r->p[i].live)
            t_ok(r->p[i].wait_st, &r->p[i].wait_err);
}

void rig_next(struct rig *r, uint64_t version)
{
    uint64_t was;

    if (xfer_source_version(rig_source(r, 0)->src, &was))
        t_ok(rig_begin(r, version, 60000), &r->err);
    for (unsigned i = 0; i < r->n; i++)
        if (r->p[i].source && r->p[i].live)
            rig_write(&r->p[i], version);
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

enum rx_state rig_state(const struct rig_proc *p)
{
    struct rx_report rep;

    xfer_sink_report(p->sink, &rep);
    return rep.state;
}

/* ---- what must always hold ---- */

static void check_engine(struct rig_proc *p)
{
    struct xfer_version v;
    const struct link_mem *mem = xfer_sink_data(p->sink, &v);

    if (!mem || rig_state(p) == RX_COMMITTING)
        return;
    t_true((p->window ? p->shown : p->reads) == mem->addr || !p->live,
           "%s reads what the plane says", p->me.name);
    if (p->window && p->live) /* what is seen is what captured graphs read */
        t_true(t_mem_same(p->reads, mem->addr, p->m.mem_bytes[0]), "%s sees it", p->me.name);
    for (unsigned i = 0; i < p->m.n_tensors; i++) {
        const struct xfer_tensor *t = &p->m.tensors[i];
        uint64_t bytes = xfer_box_bytes(t, &p->pieces[i].box);
        struct copying c = { malloc(bytes + 1), reference_of(p->r, v.number, t), false };

        t_mem_read(c.piece, (char *)mem->addr + p->pieces[i].off, bytes);
        each_run(t, &p->pieces[i].box, compare, &c);
        free(c.piece);
        t_true(!c.differs, "%s serves other bytes of %s than version %" PRIu64 " has", p->me.name,
               t->name, v.number);
    }
}

static void version_digest(struct rig *r, uint64_t version, uint64_t digest[2])
{
    digest[0] = digest[1] = 0;
    const struct xfer_manifest *m = &rig_source(r, 0)->m;

    for (unsigned i = 0; i < m->n_tensors; i++) {
        struct xfer_box b = xfer_box_whole(&m->tensors[i]);
        uint64_t d[2] = { 0, 0 };

        xfer_digest_piece(d, &m->tensors[i], &b, reference_of(r, version, &m->tensors[i]));
        xfer_digest_fold(digest, d, i);
    }
}

void rig_check(struct rig *r)
{
    for (unsigned i = 0; i < r->n; i++)
        if (r->p[i].sink && r->p[i].live)
            check_engine(&r->p[i]);
}

void rig_check_all_serve(struct rig *r, uint64_t version)
{
    uint64_t digest[2];

    version_digest(r, version, digest);
    rig_check(r);
    for (unsigned i = 0; i < r->n; i++) {
        struct rig_proc *p = &r->p[i];
        struct xfer_version v;

        if (!p->sink || !p->live)
            continue;
        t_true(xfer_sink_data(p->sink, &v) != NULL, "%s serves nothing: %s", p->me.name,
               rx_state_name(rig_state(p)));
        t_int_eq(v.number, version, "%s", p->me.name);
        t_true(v.digest[0] == digest[0] && v.digest[1] == digest[1],
               "digest of version %" PRIu64 " at %s", version, p->me.name);
        t_true(!p->paused, "%s stands", p->me.name);
    }
}
