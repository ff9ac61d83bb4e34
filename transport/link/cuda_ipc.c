/* transport/link/cuda_ipc.c - processes of one host whose weights lie on devices: one kernel a
 * bucket
 *
 * The receiver maps the source's pages once and gathers from them, digests on the way, by a launch
 * on a stream of its own; the source only holds still, and may be dead. The end is an event that
 * the loop looks at: a timer sleeps until shortly before it is due, then the loop turns without
 * sleeping, because waking another core costs more (88 us) than most copies have left. */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#include "common/base/fault.h"
#include "common/base/str.h"
#include "transport/link/ipc_priv.h"

enum {
    SAME_BYTES_PER_US = 2060000, /* a gather kernel inside one H200, payload          */
    PEER_BYTES_PER_US = 393000,  /* copied from another H200 over NVLink              */
    START_NS = 30000,            /* launch, event, digests back                       */
    SPIN_AHEAD_NS = 150000,      /* turning begins so long before the predicted end   */
    SPIN_PAST_NS = 300000,       /* and stops so long after it, and an eighth         */
    LOOK_AGAIN_NS = 200000,      /* then a timer looks                                */
    DIGESTS_MIN = 1024,
    FAR_MEAN_BYTES = 1 << 20,
    FULL_BYTES = 448 << 20 /* of a bucket: one that has less is the last one, mostly */
};

static bool may_read(const struct link_place *from, const struct link_place *to)
{
    if (strcmp(from->gpu_uuid, to->gpu_uuid) == 0)
        return true;
    for (uint32_t i = 0; i < to->n_gpu_peers && i < LINK_PEERS; i++)
        if (to->gpu_peers[i] == link_gpu_id(from->gpu_uuid))
            return true;
    return false;
}

static bool ipc_reaches(const struct link_place *a, const struct link_place *b,
                        struct fl_err *why_not)
{
    if (!a->gpu_uuid[0] || !b->gpu_uuid[0])
        fl_fail(why_not, FL_UNREACHABLE, "the weights at %s are in host memory",
                a->gpu_uuid[0] ? b->addr : a->addr);
    else if (!a->host_boot[0] || strcmp(a->host_boot, b->host_boot) != 0 ||
             strcmp(a->addr, b->addr) != 0)
        fl_fail(why_not, FL_UNREACHABLE, "%s and %s are not one machine", a->addr, b->addr);
    else if (a->pid_ns != b->pid_ns)
        fl_fail(why_not, FL_UNREACHABLE,
                "the two processes at %s are in different pid namespaces (containers)", a->addr);
    else if (!(a->vmm_fd && b->vmm_fd) && a->legacy_ipc && b->legacy_ipc && a->ipc_ns != b->ipc_ns)
        fl_fail(why_not, FL_UNSUPPORTED,
                "device %s shares memory by handle alone, and the two processes at %s are in "
                "different ipc namespaces: run the containers with --ipc=host, or one with the "
                "other's",
                a->gpu_uuid, a->addr);
    else if (!(a->vmm_fd && b->vmm_fd) && !(a->legacy_ipc && b->legacy_ipc))
        fl_fail(why_not, FL_UNSUPPORTED,
                "device %s shares memory between processes neither by descriptor nor by handle: "
                "the probe of %s tried both; a container may lack --ipc=host",
                a->gpu_uuid, a->addr);
    else if (!may_read(a, b))
        fl_fail(why_not, FL_UNSUPPORTED,
                "device %s cannot read the memory of %s: no peer access, or it is hidden from "
                "that process",
                b->gpu_uuid, a->gpu_uuid);
    else
        return true;
    return false;
}

static uint64_t copy_ns(const struct link_place *from, const struct link_place *to, uint64_t bytes)
{
    uint64_t rate =
        strcmp(from->gpu_uuid, to->gpu_uuid) == 0 ? SAME_BYTES_PER_US : PEER_BYTES_PER_US;

    return (uint64_t)((double)bytes * 1000 / (double)rate);
}

static uint64_t ipc_cost_ns(const struct link_place *from, const struct link_place *to,
                            uint64_t bytes)
{
    return START_NS + copy_ns(from, to, bytes);
}

/* ==== opening: a context takes a third of a second, so not on the loop ======================== */
static void table_drop(struct ipc *k, struct ipc_table *t)
{
    dev_table_free(k->dev, &t->t); /* waits for the launches that read it */
    free(t->far);
    *t = (struct ipc_table){ 0 };
}

static void ipc_release(struct ipc *k)
{
    for (unsigned i = 0; k->dev && i < IPC_MAX_PULLS; i++) {
        struct ipc_pull *p = &k->pulls[i];
        struct dev_table sums = { .addr = p->sums };

        if (p->begun)
            k->dev->gpu->event_free(p->begun);
        if (p->moved)
            k->dev->gpu->event_free(p->moved);
        if (p->rest)
            k->dev->gpu->event_free(p->rest);
        if (p->ended)
            k->dev->gpu->event_free(p->ended);
        dev_table_free(k->dev, &sums);
        pthread_mutex_lock(&k->dev->lock);
        if (p->back)
            k->dev->gpu->unpin(k->dev->g, p->back);
        pthread_mutex_unlock(&k->dev->lock);
    }
    for (unsigned i = 0; k->dev && i < IPC_TABLES; i++)
        table_drop(k, &k->tables[i]);
    if (k->aside)
        k->dev->gpu->stream_free(k->aside);
    if (k->stream)
        k->dev->gpu->stream_free(k->stream);
    free(k->members);
    free(k);
}

static void open_work(struct fl_work *w)
{
    struct ipc *k = container_of(w, struct ipc, opening);
    enum fl_status st = FL_FAULT("link.ipc.open")
                            ? fl_fail(&k->open_err, FL_UNREACHABLE, "fault link.ipc.open")
                            : link_dev_get(k->self.gpu_uuid, &k->dev, &k->open_err);

    if (st == FL_OK) {
        pthread_mutex_lock(&k->dev->lock);
        st = k->dev->gpu->stream(k->dev->g, &k->stream, &k->open_err);
        if (st == FL_OK)
            st = k->dev->gpu->stream(k->dev->g, &k->aside, &k->open_err);
        pthread_mutex_unlock(&k->dev->lock);
    }
    if (st ==
        FL_OK) /* here, where it may take a while, and where a chip that it is not for is said */
        st = dev_warm(k->dev, &k->open_err);
    k->open_err.status = st;
}

static void open_done(struct fl_work *w, enum fl_status st)
{
    struct ipc *k = container_of(w, struct ipc, opening);
    struct link_op *ready = FL_TAKE(k->ready), *quiet = FL_TAKE(k->quiet);

    if (st == FL_OK)
        st = k->open_err.status;
    else
        fl_fail(&k->open_err, st, "no thread to open device %s", k->self.gpu_uuid);
    k->state = st == FL_OK ? IPC_OPEN : IPC_BROKEN;
    if (k->closed) {
        ipc_release(k);
        return;
    }
    if (ready) {
        if (k->stop)
            link_op_set(ready, FL_CANCELLED, "cuda_ipc: aborted while it opened");
        else
            link_op_set(ready, st, "cuda_ipc: %s", k->open_err.text);
        if (quiet)
            link_tell_quiet(&k->base, quiet);
        ready->done(ready); /* last: may close the link */
    }
}

static enum fl_status ipc_open(struct fl_loop *l, const struct link_team *team, struct link **out,
                               struct link_op *ready, struct fl_err *err)
{
    struct ipc *k = team->self < team->n ? calloc(1, sizeof(*k)) : NULL;

    if (!k)
        return fl_fail(err, team->self < team->n ? FL_EXHAUSTED : FL_INVALID,
                       "cuda_ipc: member %u of a team of %u", team->self, team->n);
    k->base.loop = l;
    k->self = team->members[team->self];
    k->n_members = team->n;
    k->members = malloc(team->n * sizeof(*k->members));
    if (!k->members || !k->self.gpu_uuid[0]) {
        enum fl_status st = k->members
                                ? fl_fail(err, FL_INVALID, "cuda_ipc: this member names no device")
                                : fl_fail(err, FL_EXHAUSTED, "no memory for a team of %u", team->n);

        free(k->members);
        free(k);
        return st;
    }
    memcpy(k->members, team->members, team->n * sizeof(*k->members));
    k->ready = ready;
    k->opening = (struct fl_work){ .work = open_work, .done = open_done };
    fl_work_start(l, &k->opening);
    *out = &k->base;
    return FL_OK;
}

/* ==== the end of pulls ======================================================================== */
static struct ipc_pull *first_pull(struct ipc *k)
{
    return &k->pulls[k->first % IPC_MAX_PULLS];
}

static void add_digests(struct ipc_pull *p)
{
    for (size_t i = 0; p->digests && i < p->n; i++) {
        p->digests[i][0] += p->back[i][0];
        p->digests[i][1] += p->back[i][1];
    }
}

/* The first one has ended, st says how. Its op is told last: it may close the link. */
static struct link_op *pull_ends(struct ipc *k, enum fl_status st, const struct fl_err *why)
{
    struct ipc_pull *p = first_pull(k);
    struct link_op *op = p->op;
    float ms = 0;

    if (k->stop && st == FL_OK) {
        link_op_set(op, FL_CANCELLED, "cuda_ipc: a pull of %llu bytes was ended",
                    (unsigned long long)p->bytes);
    } else if (st == FL_OK) {
        add_digests(p);
        link_op_set(op, FL_OK, "%s", "");
        (void)k->dev->gpu->event_ms(p->begun, p->ended, &ms, NULL);
    } else {
        link_op_set(op, st, "cuda_ipc: pull of %llu bytes on device %s: %s",
                    (unsigned long long)p->bytes, k->self.gpu_uuid, why->text);
    }
    op->bytes = p->bytes;
    /* of the device: how late the loop looked is not in it */
    op->took_ns = (uint64_t)((double)ms * 1e6) + 1;
    ipc_view_put(k->dev, p->view);
    k->first++;
    k->n_pulls--;
    return op;
}

static void look_later(struct ipc *k, uint64_t now)
{
    const struct ipc_pull *p = first_pull(k);
    uint64_t due = p->began_ns + p->expect_ns, in_ns = LOOK_AGAIN_NS;

    if (now + SPIN_AHEAD_NS < due)
        in_ns = due - SPIN_AHEAD_NS - now;
    else if (now < due + SPIN_PAST_NS + p->expect_ns / 8)
        in_ns = 0;
    if (in_ns == 0)
        fl_post(k->base.loop, &k->poll);
    else
        fl_timer_arm(k->base.loop, &k->look, fl_loop_now_ns(k->base.loop) + in_ns);
}

/* One at a time: what its owner does then may close the link, or give another one's memory back. */
static void poll_pulls(struct ipc *k)
{
    struct fl_err err = { 0 };
    enum fl_status st = k->n_pulls ? k->dev->gpu->event_done(first_pull(k)->ended, &err) : FL_AGAIN;
    struct link_op *op = NULL;

    if (st == FL_OK && FL_FAULT("link.pull"))
        st = fl_fail(&err, FL_UNREACHABLE, "fault link.pull");
    if (st != FL_AGAIN) {
        op = pull_ends(k, st, &err);
        if (k->n_pulls)
            fl_post(k->base.loop, &k->poll);
        else if (k->quiet)
            link_tell_quiet(&k->base, FL_TAKE(k->quiet));
    } else if (k->n_pulls) {
        look_later(k, fl_clock_boot_ns());
    }
    if (op)
        op->done(op);
}

static void on_poll(struct fl_task *t)
{
    poll_pulls(container_of(t, struct ipc, poll));
}

static void on_look(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    poll_pulls(container_of(t, struct ipc, look));
}

/* ==== pull ==================================================================================== */
/* What is digested after the last byte has come is waited for: so little of it is left for then.
 * Another copy costs 4 us, and behind a full bucket comes the next one, whose bytes take longer. */
static size_t last_part(const struct link_seg *segs, size_t n)
{
    uint64_t all = 0, left = 0;
    size_t i = n;

    for (size_t k = 0; k < n; k++)
        all += segs[k].rows * segs[k].run_bytes;
    while (all < FULL_BYTES && i > 0 &&
           (left += segs[i - 1].rows * segs[i - 1].run_bytes) <= all / 16)
        i--;
    return i; /* n: all at once */
}

/* Long stretches from another device: the copy engines reach 0.99 of the link's rate and a kernel
 * that reads over it 0.93. */
static struct dev_stretch *far_stretches(const struct link_seg *segs, size_t n, size_t cut,
                                         size_t *cut_out, size_t *n_out)
{
    struct dev_stretch *far = malloc((n + 1) * sizeof(*far));
    uint64_t bytes = 0;
    size_t first = far ? dev_stretches(segs, cut, far) : 0;
    size_t made = far ? first + dev_stretches(segs + cut, n - cut, far + first) : 0;

    for (size_t i = 0; i < made; i++) {
        if (far[i].bytes == 0)
            made = 0;
        else
            bytes += far[i].bytes;
    }
    if (made == 0 || bytes / made < FAR_MEAN_BYTES) {
        free(far);
        return NULL;
    }
    *cut_out = first;
    *n_out = made;
    return far;
}

static enum fl_status table_far(struct ipc_table *t, const struct link_seg *segs, size_t n,
                                struct fl_err *err)
{
    size_t cut = last_part(segs, n);
    struct kernel_piece *pieces = NULL;

    t->far = far_stretches(segs, n, cut, &t->far_cut, &t->n_far);
    if (!t->far)
        return FL_OK; /* by a kernel that reads over there */
    enum fl_status st = dev_pieces_cut(segs, cut, &pieces, &t->t_cut, err);

    free(pieces); /* how many there are is asked for */
    if (st != FL_OK)
        free(FL_TAKE(t->far));
    return st;
}

static enum fl_status table_for(struct ipc *k, const struct link_seg *segs, size_t n, bool from_far,
                                struct ipc_table **out, struct fl_err *err)
{
    XXH128_hash_t h = XXH3_128bits_withSeed(segs, n * sizeof(*segs), from_far);
    struct ipc_table *oldest = &k->tables[0];

    for (unsigned i = 0; i < IPC_TABLES; i++) {
        struct ipc_table *t = &k->tables[i];

        if (t->t.addr && t->key[0] == h.low64 && t->key[1] == h.high64) {
            t->used = ++k->uses;
            *out = t;
            return FL_OK;
        }
        if (t->used < oldest->used)
            oldest = t;
    }
    table_drop(k, oldest);
    *oldest = (struct ipc_table){ .key = { h.low64, h.high64 } };
    if (from_far)
        FL_TRY(table_far(oldest, segs, n, err));
    enum fl_status st = dev_table_make(k->dev, k->dev->upload, segs, n,
                                       oldest->far ? DEV_TO : DEV_MOVE, &oldest->t, err);

    if (st != FL_OK) {
        table_drop(k, oldest);
        return st;
    }
    oldest->used = ++k->uses;
    *out = oldest;
    return FL_OK;
}

/* Events and room for n digests: made once for each place in the ring, and kept. */
static enum fl_status pull_room(struct ipc *k, struct ipc_pull *p, size_t n, struct fl_err *err)
{
    const struct gpu_ops *gpu = k->dev->gpu;
    size_t room = n > DIGESTS_MIN ? 2 * n : DIGESTS_MIN;

    if (!p->begun)
        FL_TRY(gpu->event(k->dev->g, &p->begun, err));
    if (!p->moved)
        FL_TRY(gpu->event(k->dev->g, &p->moved, err));
    if (!p->rest)
        FL_TRY(gpu->event(k->dev->g, &p->rest, err));
    if (!p->ended)
        FL_TRY(gpu->event(k->dev->g, &p->ended, err));
    if (p->room >= n)
        return FL_OK;
    if (p->sums)
        gpu->free(k->dev->g, p->sums);
    if (p->back)
        gpu->unpin(k->dev->g, p->back);
    p->sums = 0;
    p->back = NULL;
    p->room = 0;
    FL_TRY(gpu->alloc(k->dev->g, room * sizeof(*p->back), &p->sums, err));
    FL_TRY(gpu->pin(k->dev->g, room * sizeof(*p->back), (void **)&p->back, err));
    p->room = room;
    return FL_OK;
}

/* The kernel a on stream s, and all that was summed up on its way to the host. */
static enum fl_status launch_kernel(struct ipc *k, struct ipc_pull *p, struct gpu_stream *s,
                                    const struct kernel_move_args *a, struct fl_err *err)
{
    const struct gpu_ops *gpu = k->dev->gpu;

    FL_TRY(kernel_move_start(gpu, k->dev->g, s, a, err));
    if (p->digests)
        FL_TRY(gpu->copy(s, dev_addr(p->back), p->sums, p->n * sizeof(*p->back), err));
    return gpu->event_record(p->ended, s, err);
}

static enum fl_status clear_sums(struct ipc *k, struct ipc_pull *p, struct gpu_stream *s,
                                 struct fl_err *err)
{
    return p->digests ? k->dev->gpu->fill(s, p->sums, 0, p->n * sizeof(*p->back), err) : FL_OK;
}

static enum fl_status copy_far(struct ipc *k, const struct ipc_table *t, size_t first, size_t end,
                               uint64_t from, uint64_t to, struct fl_err *err)
{
    for (size_t i = first; i < end; i++)
        FL_TRY(k->dev->gpu->copy(k->stream, to + t->far[i].to_off, from + t->far[i].from_off,
                                 t->far[i].bytes, err));
    return FL_OK;
}

static enum fl_status launch_far(struct ipc *k, struct ipc_pull *p, const struct ipc_table *t,
                                 uint64_t from, uint64_t to, struct fl_err *err)
{
    const struct gpu_ops *gpu = k->dev->gpu;
    struct kernel_move_args a = {
        .pieces = t->t.addr, .n = t->t_cut, .from = to, .digests = p->sums
    };
    size_t done = 0;

    FL_TRY(clear_sums(k, p, k->aside, err));
    FL_TRY(copy_far(k, t, 0, t->far_cut, from, to, err));
    if (p->digests && t->t_cut < t->t.n) { /* while the rest is on its way */
        FL_TRY(gpu->event_record(p->moved, k->stream, err));
        FL_TRY(gpu->stream_wait(k->aside, p->moved, err));
        FL_TRY(kernel_move_start(gpu, k->dev->g, k->aside, &a, err));
        done = t->t_cut;
    }
    FL_TRY(copy_far(k, t, t->far_cut, t->n_far, from, to, err));
    if (!p->digests)
        return gpu->event_record(p->ended, k->stream, err);
    a.pieces += done * sizeof(struct kernel_piece);
    a.n = t->t.n - done;
    FL_TRY(gpu->event_record(p->rest, k->stream, err));
    FL_TRY(gpu->stream_wait(k->aside, p->rest, err));
    return launch_kernel(k, p, k->aside, &a, err);
}

static enum fl_status launch(struct ipc *k, struct ipc_pull *p, const struct ipc_table *t,
                             const struct link_mem *theirs, const struct link_mem *mine,
                             struct fl_err *err)
{
    struct kernel_move_args a = { .pieces = t->t.addr,
                                  .n = t->t.n,
                                  .from = dev_addr(theirs->addr),
                                  .to = dev_addr(mine->addr),
                                  .digests = p->digests ? p->sums : 0 };

    if (t->far) {
        FL_TRY(k->dev->gpu->event_record(p->begun, k->stream, err));
        return launch_far(k, p, t, a.from, a.to, err);
    }
    /* the device has come to this process, if it was at another */
    FL_TRY(clear_sums(k, p, k->stream, err));
    FL_TRY(k->dev->gpu->event_record(p->begun, k->stream, err));
    return launch_kernel(k, p, k->stream, &a, err);
}

static enum fl_status pull_check(const struct ipc *k, const struct link_mem *theirs,
                                 const struct link_mem *mine, struct fl_err *err)
{
    const struct ipc_view *v = theirs->impl;
    const struct link_pages *p = link_pages_of(mine);

    if (k->stop)
        return fl_fail(err, FL_CANCELLED, "cuda_ipc: the link was aborted");
    if (k->state != IPC_OPEN)
        return fl_fail(err, FL_AGAIN, "cuda_ipc: the link is not open yet");
    if (!v || !theirs->on_device || v->magic != IPC_VIEW_MAGIC)
        return fl_fail(err, FL_INVALID, "cuda_ipc: memory at %p was not mapped by this link",
                       theirs->addr);
    if (v->key.kind == IPC_CHUNKS && v->n_mapped != v->key.n_chunks)
        return fl_fail(err, FL_INVALID, "cuda_ipc: %u of %u chunks are mapped", v->n_mapped,
                       v->key.n_chunks);
    if (!p || strcmp(p->uuid, k->self.gpu_uuid) != 0)
        return fl_fail(err, FL_INVALID, "cuda_ipc: memory at %p is not on device %s", mine->addr,
                       k->self.gpu_uuid);
    if (k->n_pulls >= IPC_MAX_PULLS)
        return fl_fail(err, FL_AGAIN, "cuda_ipc: %u pulls are in flight", k->n_pulls);
    return FL_OK;
}

/* The stream has one thing after the other. */
static uint64_t expected_ns(const struct ipc *k, const struct ipc_view *v, uint64_t bytes,
                            uint64_t now)
{
    const struct ipc_pull *before = &k->pulls[(k->first + k->n_pulls - 1) % IPC_MAX_PULLS];
    struct link_place from = { 0 };
    uint64_t due = k->n_pulls ? before->began_ns + before->expect_ns : now;

    (void)FL_COPY(from.gpu_uuid, v->key.uuid);
    return copy_ns(&from, &k->self, bytes) + (due > now ? due - now : 0);
}

static enum fl_status ipc_pull(struct link *base, const struct link_mem *theirs,
                               const struct link_mem *mine, const struct link_seg *segs, size_t n,
                               uint64_t (*digests)[2], struct link_op *op, struct fl_err *err)
{
    struct ipc *k = container_of(base, struct ipc, base);
    struct ipc_pull *p;
    struct ipc_table *table;
    uint64_t bytes;

    FL_TRY(pull_check(k, theirs, mine, err));
    if (k->n_pulls == 0)
        k->first = 0; /* room that is made already */
    p = &k->pulls[(k->first + k->n_pulls) % IPC_MAX_PULLS];
    FL_TRY(link_check_segs(segs, n, theirs->bytes, mine->bytes, &bytes, err));
    p->view = theirs->impl;
    FL_TRY(table_for(k, segs, n, strcmp(p->view->key.uuid, k->self.gpu_uuid) != 0, &table, err));
    p->op = op;
    p->digests = digests;
    p->n = n;
    p->bytes = bytes;
    p->began_ns = fl_clock_boot_ns();
    p->expect_ns = expected_ns(k, p->view, bytes, p->began_ns);
    pthread_mutex_lock(&k->dev->lock);
    enum fl_status st = pull_room(k, p, n, err);

    if (st == FL_OK) {
        st = launch(k, p, table, theirs, mine, err);
        if (st != FL_OK) /* part of it may be on the stream: nothing of it is left when we return */
        {
            (void)k->dev->gpu->stream_sync(k->stream, NULL);
            (void)k->dev->gpu->stream_sync(k->aside, NULL);
        }
    }
    pthread_mutex_unlock(&k->dev->lock);
    if (st != FL_OK)
        return st;
    p->view->users++;
    if (k->n_pulls++ == 0)
        fl_post(base->loop, &k->poll);
    return FL_OK;
}

/* ==== the end of the link ===================================================================== */
/* A launch cannot be taken back; it ends within its copy's time, or the device is lost. */
static void ipc_abort(struct link *base, struct link_op *quiet)
{
    struct ipc *k = container_of(base, struct ipc, base);

    k->stop = true;
    if (k->state != IPC_OPENING && k->n_pulls == 0)
        link_tell_quiet(base, quiet);
    else
        k->quiet = quiet;
}

static void ipc_close(struct link *base)
{
    struct ipc *k = container_of(base, struct ipc, base);
    struct link_op *ready = FL_TAKE(k->ready), *quiet = FL_TAKE(k->quiet);

    k->stop = true;
    while (k->n_pulls) {
        struct fl_err err = { 0 };
        enum fl_status st = k->dev->gpu->event_sync(first_pull(k)->ended, &err);
        struct link_op *op = pull_ends(k, st, &err);

        op->done(op);
    }
    fl_task_cancel(base->loop, &k->poll);
    fl_timer_cancel(&k->look);
    if (quiet)
        link_tell_quiet(base, quiet);
    if (ready) {
        link_op_set(ready, FL_CANCELLED, "cuda_ipc: closed while it opened");
        ready->done(ready);
    }
    link_tell_now(base);
    k->closed = true;
    if (k->state != IPC_OPENING)
        ipc_release(k);
}

static enum fl_status ipc_open_link(struct fl_loop *l, const struct link_team *team,
                                    struct link **out, struct link_op *ready, struct fl_err *err)
{
    FL_TRY(ipc_open(l, team, out, ready, err));
    struct ipc *k = container_of(*out, struct ipc, base);

    k->poll.run = on_poll;
    k->look.fire = on_look;
    return FL_OK;
}

const struct link_ops link_cuda_ipc = {
    .name = "cuda_ipc",
    .caps = LINK_DEVICE | LINK_MAP | LINK_PULL | LINK_SEGS | LINK_ALONE,
    .reaches = ipc_reaches,
    .cost_ns = ipc_cost_ns,
    .ticket = link_no_ticket,
    .open = ipc_open_link,
    .share = ipc_share,
    .map = ipc_map,
    .unmap = ipc_unmap,
    .pull = ipc_pull,
    .send = link_no_send,
    .recv = link_no_recv,
    .cast = link_no_cast,
    .cast_segs = link_no_cast_segs,
    .progress = link_no_progress,
    .event_fd = link_no_event_fd,
    .abort = ipc_abort,
    .close = ipc_close,
};
