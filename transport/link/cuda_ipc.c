/* transport/link/cuda_ipc.c - processes of one host whose weights lie on devices: one kernel a
 * bucket
 *
 * The receiver maps the source's pages once and gathers from them, digests on the way, by a launch
 * on a stream of its own; the source only holds still, and may be dead. The end is an event that
 * the loop looks at: a timer sleeps until shortly before it is due, then the loop turns without
 * sleeping, because waking another core costs more (88 us) than most copies have left. */
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "transport/link/ipc_priv.h"

enum {
    SAME_BYTES_PER_US = 2060000, /* a gather kernel inside one H200, payload          */
    PEER_BYTES_PER_US = 393000,  /* copied from another H200 over NVLink              */
    START_NS = 30000,            /* launch, event, digests back                       */
    SPIN_AHEAD_NS = 150000,      /* turning begins so long before the predicted end   */
    SPIN_PAST_NS = 300000,       /* and stops so long after it, and an eighth         */
    LOOK_AGAIN_NS = 200000       /* then a timer looks                                */
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

uint64_t ipc_copy_ns(const struct link_place *from, const struct link_place *to, uint64_t bytes)
{
    uint64_t rate =
        strcmp(from->gpu_uuid, to->gpu_uuid) == 0 ? SAME_BYTES_PER_US : PEER_BYTES_PER_US;

    return (uint64_t)((double)bytes * 1000 / (double)rate);
}

static uint64_t ipc_cost_ns(const struct link_place *from, const struct link_place *to,
                            uint64_t bytes)
{
    return START_NS + ipc_copy_ns(from, to, bytes);
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

/* ==== opening: a context takes a third of a second, so not on the loop ======================== */
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
        if (p->back)
            k->dev->gpu->unpin(k->dev->g, p->back);
    }
    for (unsigned i = 0; k->dev && i < IPC_TABLES; i++)
        ipc_table_drop(k, &k->tables[i]);
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
    /* here, where it may take a while, and where a chip that it is not for is said */
    if (st == FL_OK)
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
    k->poll.run = on_poll;
    k->look.fire = on_look;
    k->opening = (struct fl_work){ .work = open_work, .done = open_done };
    fl_work_start(l, &k->opening);
    *out = &k->base;
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

const struct link_ops link_cuda_ipc = {
    .name = "cuda_ipc",
    .caps = LINK_DEVICE | LINK_MAP | LINK_PULL | LINK_SEGS | LINK_ALONE,
    .reaches = ipc_reaches,
    .cost_ns = ipc_cost_ns,
    .ticket = link_no_ticket,
    .open = ipc_open,
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
