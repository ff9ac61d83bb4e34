/* transport/link/nccl.c - between devices that no pages reach: one broadcast, gathered and spread
 * on the way
 *
 * NCCL reports neither a killed nor a stopped peer, so every cast has a deadline of its own, and
 * who hears of a death elsewhere aborts. A communicator with a dead rank is spent. */
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "common/base/str.h"
#include "transport/link/nccl_priv.h"

enum {
    HOST_BYTES_PER_US = 370000, /* large broadcast between two H200 over NVLink     */
    NET_BYTES_PER_US = 45000,   /* one 400 Gb/s card                                 */
    START_NS = 120000,          /* first gather, a launch on either side, last spread */
    AWAKE_NS = 450000           /* around the end of a cast: a wake takes 88000 */
};

static bool one_host(const struct link_place *a, const struct link_place *b)
{
    return a->host_boot[0] && strcmp(a->host_boot, b->host_boot) == 0;
}

static bool nccl_reaches(const struct link_place *a, const struct link_place *b,
                         struct fl_err *why_not)
{
    if (!a->gpu_uuid[0] || !b->gpu_uuid[0])
        fl_fail(why_not, FL_UNREACHABLE, "the weights at %s are in host memory",
                a->gpu_uuid[0] ? b->addr : a->addr);
    else if (!a->nccl_version || !b->nccl_version)
        fl_fail(why_not, FL_UNSUPPORTED, "the process at %s has no NCCL",
                a->nccl_version ? b->addr : a->addr);
    else if (a->nccl_version != b->nccl_version)
        fl_fail(why_not, FL_UNSUPPORTED,
                "NCCL %u at %s and NCCL %u at %s do not talk to each other: load the same one",
                a->nccl_version, a->addr, b->nccl_version, b->addr);
    else if (strcmp(a->nccl_env, b->nccl_env) != 0)
        fl_fail(why_not, FL_UNSUPPORTED,
                "NCCL settings differ: \"%.80s\" at %s, \"%.80s\" at %s: set the same", a->nccl_env,
                a->addr, b->nccl_env, b->addr);
    else if (strcmp(a->gpu_uuid, b->gpu_uuid) == 0)
        fl_fail(why_not, FL_UNSUPPORTED, "NCCL has no two ranks on one device (%s)", a->gpu_uuid);
    else
        return true;
    return false;
}

static uint64_t nccl_cost_ns(const struct link_place *from, const struct link_place *to,
                             uint64_t bytes)
{
    return START_NS + bytes * 1000 / (one_host(from, to) ? HOST_BYTES_PER_US : NET_BYTES_PER_US);
}

static enum fl_status nccl_ticket(uint8_t out[256], struct fl_err *err)
{
    const struct nccl_api *api;
    struct nccl_id id;

    FL_TRY(nccl_load(&api, err));
    int r = FL_FAULT("link.nccl.ticket") ? 1 : api->unique_id(&id);

    if (r != NCCL_OK)
        return fl_fail(err, FL_UNREACHABLE, "NCCL makes no id: %s", api->error_text(r));
    memset(out, 0, 256);
    memcpy(out, &id, sizeof(id));
    return FL_OK;
}

uint64_t nccl_wire_ns(const struct nccl *k, unsigned root, uint64_t bytes)
{
    unsigned far = k->self == root ? (root + 1) % k->n : root;

    return nccl_cost_ns(&k->members[k->self], &k->members[far], bytes) - START_NS;
}

/* The thread will post: the loop is awake by then. Anew with each cast that comes back, so that
 * only the last one's time is guessed. */
static void expect_end(struct nccl *k)
{
    fl_timer_cancel(&k->look);
    if (k->n_jobs && k->left_ns < AWAKE_NS)
        fl_loop_awake(k->base.loop, k->left_ns + AWAKE_NS);
    else if (k->n_jobs)
        fl_timer_arm(k->base.loop, &k->look,
                     fl_loop_now_ns(k->base.loop) + k->left_ns - AWAKE_NS / 3);
}

/* ==== what the thread has brought back ======================================================== */
static struct nccl_job *next_over(struct nccl *k)
{
    nccl_lock();
    struct nccl_job *j = STAILQ_FIRST(&k->over);

    if (j)
        STAILQ_REMOVE_HEAD(&k->over, next);
    nccl_unlock();
    return j;
}

static struct link_op *ready_over(struct nccl *k)
{
    struct link_op *ready = NULL;

    nccl_lock();
    if (k->opened && k->ready) {
        ready = FL_TAKE(k->ready);
        ready->err = k->why;
    }
    nccl_unlock();
    if (ready)
        fl_loop_release(k->base.loop);
    return ready;
}

/* A callback may close the link; then the last delivery under way lets it go. */
static void deliver(struct nccl *k)
{
    struct nccl_job *j;
    struct link_op *ready;

    k->delivering++;
    while ((j = next_over(k))) {
        struct link_op *op = j->op;

        k->n_jobs--;
        k->left_ns -= nccl_wire_ns(k, j->root, j->bytes);
        free(j);
        expect_end(k);
        fl_loop_release(k->base.loop);
        op->done(op);
    }
    ready = ready_over(k);
    if (ready)
        ready->done(ready);
    nccl_lock();
    bool quiet = k->quiet_over && k->quiet;

    nccl_unlock();
    if (quiet)
        link_tell_quiet(&k->base, FL_TAKE(k->quiet));
    if (--k->delivering == 0 && k->closed)
        nccl_free(k);
}

static void on_back(struct fl_task *t)
{
    deliver(container_of(t, struct nccl, back));
}

static void on_look(struct fl_timer *t, uint64_t now_ns)
{
    struct nccl *k = container_of(t, struct nccl, look);

    (void)now_ns;
    fl_loop_awake(k->base.loop, AWAKE_NS);
}

/* ==== the face ================================================================================ */
static enum fl_status nccl_open(struct fl_loop *l, const struct link_team *team, struct link **out,
                                struct link_op *ready, struct fl_err *err)
{
    struct nccl *k = team->self < team->n ? calloc(1, sizeof(*k)) : NULL;
    enum fl_status st;

    if (!k)
        return fl_fail(err, team->self < team->n ? FL_EXHAUSTED : FL_INVALID,
                       "nccl: member %u of a team of %u", team->self, team->n);
    k->base.loop = l;
    k->n = team->n;
    k->self = team->self;
    k->back.run = on_back;
    k->look.fire = on_look;
    STAILQ_INIT(&k->asked);
    STAILQ_INIT(&k->over);
    STAILQ_INIT(&k->now);
    memcpy(&k->id, team->ticket, sizeof(k->id));
    k->members = malloc(team->n * sizeof(*k->members));
    st = k->members ? nccl_load(&k->api, err)
                    : fl_fail(err, FL_EXHAUSTED, "no memory for a team of %u", team->n);
    if (st == FL_OK && !team->members[team->self].gpu_uuid[0])
        st = fl_fail(err, FL_INVALID, "nccl: this member names no device");
    if (st == FL_OK)
        st = nccl_thread_start(err);
    if (st != FL_OK) {
        nccl_free(k);
        return st;
    }
    memcpy(k->members, team->members, team->n * sizeof(*k->members));
    k->ready = ready;
    fl_loop_hold(l);
    nccl_thread_add(k);
    *out = &k->base;
    return FL_OK;
}

static enum fl_status cast_check(struct nccl *k, unsigned root, const struct link_mem *mem,
                                 struct fl_err *err)
{
    const struct link_pages *p = link_pages_of(mem);
    enum fl_status st = FL_OK;

    nccl_lock();
    if (k->stop)
        st = fl_fail(err, FL_CANCELLED, "nccl: the link was aborted");
    else if (k->dead)
        st = fl_fail(err, FL_UNREACHABLE, "nccl: the communicator is spent: %s", k->why.text);
    else if (!k->opened)
        st = FL_AGAIN;
    nccl_unlock();
    if (st != FL_OK)
        return st == FL_AGAIN ? fl_fail(err, st, "nccl: the link is not open yet") : st;
    if (root >= k->n)
        return fl_fail(err, FL_INVALID, "nccl: root %u of a team of %u", root, k->n);
    if (!p || strcmp(p->uuid, k->members[k->self].gpu_uuid) != 0)
        return fl_fail(err, FL_INVALID, "nccl: memory at %p is not on device %s", mem->addr,
                       k->members[k->self].gpu_uuid);
    if (k->n_jobs >= NCCL_MAX_JOBS)
        return fl_fail(err, FL_AGAIN, "nccl: %u casts are in flight", k->n_jobs);
    return FL_OK;
}

static enum fl_status nccl_cast_segs(struct link *base, unsigned root, const struct link_mem *mem,
                                     const struct link_seg *segs, size_t n, uint64_t (*digests)[2],
                                     struct link_op *op, struct fl_err *err)
{
    struct nccl *k = container_of(base, struct nccl, base);
    uint64_t bytes;

    FL_TRY(cast_check(k, root, mem, err));
    FL_TRY(link_check_side(segs, n, mem->bytes, root == k->self, &bytes, err));
    struct nccl_job *j = calloc(1, sizeof(*j));

    if (!j)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a cast");
    *j = (struct nccl_job){ .k = k,
                            .op = op,
                            .root = root,
                            .mem = *mem,
                            .segs = segs,
                            .n = n,
                            .digests = digests,
                            .bytes = bytes,
                            .asked_ns = fl_clock_boot_ns() };
    k->n_jobs++;
    k->left_ns += nccl_wire_ns(k, root, bytes);
    expect_end(k);
    fl_loop_hold(base->loop);
    nccl_lock();
    STAILQ_INSERT_TAIL(&k->asked, j, next);
    nccl_unlock();
    nccl_wake();
    return FL_OK;
}

static enum fl_status nccl_share(struct link *k, const struct link_mem *mine, struct link_key *out,
                                 struct fl_err *err)
{
    (void)k, (void)mine, (void)out;
    return fl_fail(err, FL_UNSUPPORTED, "nccl shares no memory, it casts");
}

static enum fl_status nccl_map(struct link *k, const struct link_key *theirs, bool writable,
                               struct link_mem *out, struct fl_err *err)
{
    (void)k, (void)theirs, (void)writable, (void)out;
    return fl_fail(err, FL_UNSUPPORTED, "nccl maps no memory, it casts");
}

static void nccl_unmap(struct link *k, struct link_mem *theirs)
{
    (void)k;
    *theirs = (struct link_mem){ 0 };
}

static enum fl_status nccl_pull(struct link *k, const struct link_mem *theirs,
                                const struct link_mem *mine, const struct link_seg *segs, size_t n,
                                uint64_t (*digests)[2], struct link_op *op, struct fl_err *err)
{
    (void)k, (void)theirs, (void)mine, (void)segs, (void)n, (void)digests, (void)op;
    return fl_fail(err, FL_UNSUPPORTED, "nccl is not pulled from, it casts");
}

static void nccl_abort(struct link *base, struct link_op *quiet)
{
    struct nccl *k = container_of(base, struct nccl, base);

    k->quiet = quiet;
    nccl_lock();
    k->stop = true;
    bool over = k->quiet_over;

    nccl_unlock();
    if (over)
        link_tell_quiet(base, FL_TAKE(k->quiet));
    else
        nccl_wake();
}

/* With nothing in flight the thread ends the communicator by itself, which takes up to half a
 * second; else what is in flight is waited for. */
static void nccl_close(struct link *base)
{
    struct nccl *k = container_of(base, struct nccl, base);

    nccl_lock();
    k->stop = k->let_go = true;
    nccl_unlock();
    nccl_wake();
    if (k->n_jobs || k->ready || k->quiet)
        nccl_wait_gone(k);
    k->delivering++; /* the link stays until the last line */
    deliver(k);
    nccl_lock();
    k->silent = true;
    nccl_unlock();
    fl_task_cancel(base->loop, &k->back);
    fl_timer_cancel(&k->look);
    if (k->quiet)
        link_tell_quiet(base, FL_TAKE(k->quiet));
    link_tell_now(base);
    nccl_lock(); /* whoever comes last frees it */
    bool gone = k->gone;

    k->orphan = !gone;
    nccl_unlock();
    if (!gone)
        return;
    k->closed = true;
    if (--k->delivering == 0)
        nccl_free(k);
}

const struct link_ops link_nccl = {
    .name = "nccl",
    .caps = LINK_DEVICE | LINK_CAST | LINK_SEGS,
    .reaches = nccl_reaches,
    .cost_ns = nccl_cost_ns,
    .ticket = nccl_ticket,
    .open = nccl_open,
    .share = nccl_share,
    .map = nccl_map,
    .unmap = nccl_unmap,
    .pull = nccl_pull,
    .send = link_no_send,
    .recv = link_no_recv,
    .cast = link_no_cast,
    .cast_segs = nccl_cast_segs,
    .progress = link_no_progress,
    .event_fd = link_no_event_fd,
    .abort = nccl_abort,
    .close = nccl_close,
};
