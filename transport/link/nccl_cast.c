/* transport/link/nccl_cast.c - a bucket on its way: stages, gathers and broadcasts
 *
 * Parcels are gathered on one stream, sent on another, and spread out by the receivers, all
 * ordered by events on the devices, so that the thread runs ahead and the wire never waits for it.
 * A stage that another link had last is looked at until it is free: the thread waits on no stream.
 * What NCCL has not taken yet (a communicator that does not block says so) is asked for again
 * before the next call. */
#include <stdlib.h>
#include "common/base/fault.h"
#include "transport/link/nccl_priv.h"

enum { NCCL_SUMS_MIN = 1024 };
struct nccl_stage {
    uint64_t addr;
    struct gpu_event *full, *free;
    const struct nccl *user; /* who recorded free */
    bool taken; /* by a call that NCCL has not taken yet */
};
struct nccl_ring { /* of a device: its links take turns */
    struct nccl_ring *next;
    struct link_dev *dev;
    struct nccl_stage stages[NCCL_STAGES];
    unsigned next_stage;
};
static struct nccl_ring *rings; /* the thread's */
static struct nccl_thrown {
    struct nccl_thrown *next;
    struct link_dev *dev;
    uint64_t addr;
    void *pinned;
} * thrown; /* the thread's */

/* ==== memory that goes ======================================================================== */
static void give_back(struct link_dev *d, uint64_t addr, void *pinned)
{
    struct dev_table room = { .addr = addr };

    dev_table_free(d, &room);
    if (pinned)
        d->gpu->unpin(d->g, pinned);
}

void nccl_throw(struct link_dev *d, uint64_t addr, void *pinned)
{
    struct nccl_thrown *t = addr || pinned ? malloc(sizeof(*t)) : NULL;

    if (t) {
        *t = (struct nccl_thrown){ thrown, d, addr, pinned };
        thrown = t;
    } else {
        give_back(d, addr, pinned); /* none, or there is no memory to note it */
    }
}

void nccl_thrown_back(void)
{
    for (struct nccl_thrown *t; (t = thrown); free(t)) {
        thrown = t->next;
        give_back(t->dev, t->addr, t->pinned);
    }
}

/* ==== stages ================================================================================== */
static void ring_drop(struct nccl_ring *r)
{
    const struct gpu_ops *gpu = r->dev->gpu;

    for (unsigned i = 0; i < NCCL_STAGES; i++) {
        struct nccl_stage *s = &r->stages[i];
        struct dev_table room = { .addr = s->addr };

        dev_table_free(r->dev, &room); /* waits for what still uses it */
        if (s->full)
            gpu->event_free(s->full);
        if (s->free)
            gpu->event_free(s->free);
        *s = (struct nccl_stage){ 0 };
    }
}

static enum fl_status stage_make(struct nccl *k, struct nccl_stage *s, struct fl_err *err)
{
    const struct gpu_ops *gpu = k->dev->gpu;

    FL_TRY(gpu->alloc(k->dev->g, NCCL_STAGE_BYTES, &s->addr, err));
    FL_TRY(gpu->event(k->dev->g, &s->full, err));
    FL_TRY(gpu->event(k->dev->g, &s->free, err));
    s->user = k;
    return gpu->event_record(s->free, k->work, err);
}

enum fl_status nccl_ring_of(struct nccl *k, struct fl_err *err)
{
    struct nccl_ring *r = rings;

    while (r && r->dev != k->dev)
        r = r->next;
    if (!r) {
        r = calloc(1, sizeof(*r));
        if (!r)
            return fl_fail(err, FL_EXHAUSTED, "no memory for stages");
        r->dev = k->dev;
        r->next = rings;
        rings = r;
    }
    k->ring = r;
    return FL_OK;
}

/* Another link's stage is waited for here and not by the stream: what is on a stream behind one
 * whose rank is dead cannot be ended, and this thread is to end that one too. */
static bool came_free(struct nccl *k, const struct nccl_stage *s, struct fl_err *err)
{
    return k->dev->gpu->event_done(s->free, err) == FL_OK;
}

/* NULL with err FL_OK: the next one is another link's still, or in a call that NCCL has not taken.
 */
static struct nccl_stage *stage_next(struct nccl *k, struct fl_err *err)
{
    struct nccl_stage *s = &k->ring->stages[k->ring->next_stage % NCCL_STAGES];

    if (s->taken || (s->free && s->user != k && !came_free(k, s, err)))
        return NULL;
    if (!s->free && stage_make(k, s, err) != FL_OK) {
        nccl_throw(k->dev, s->addr, NULL);
        if (s->full)
            k->dev->gpu->event_free(s->full);
        if (s->free)
            k->dev->gpu->event_free(s->free);
        *s = (struct nccl_stage){ 0 };
        return NULL;
    }
    return s;
}
/* ==== calls ==== */
/* FL_AGAIN: not taken yet. */
enum fl_status nccl_comm_state(struct nccl *k, struct fl_err *err)
{
    int r = NCCL_OK, got = k->api->async_error(k->comm, &r);

    if (got == NCCL_OK && r == NCCL_IN_PROGRESS)
        return FL_AGAIN;
    if (got != NCCL_OK || r != NCCL_OK)
        return fl_fail(err, FL_UNREACHABLE, "rank %u of %u: %s", k->self, k->n,
                       k->api->error_text(got != NCCL_OK ? got : r));
    return FL_OK;
}

enum fl_status nccl_call(struct nccl *k, uint64_t addr, uint64_t bytes, unsigned root,
                         struct fl_err *err)
{
    void *at = (void *)(uintptr_t)addr;
    int r = FL_FAULT("link.nccl.broadcast")
                ? 1
                : k->api->broadcast(at, at, bytes, NCCL_UINT8, (int)root, k->comm,
                                    k->dev->gpu->stream_raw(k->wire));

    if (r != NCCL_OK && r != NCCL_IN_PROGRESS)
        return fl_fail(err, FL_UNREACHABLE, "rank %u of %u: %s", k->self, k->n,
                       k->api->error_text(r));
    k->in_call = true;
    return FL_OK;
}

/* Is there another broadcast to come? Its kernel must find room. */
static bool more_follows(const struct nccl_job *j)
{
    return j->next_parcel < j->table->n_parcels || STAILQ_NEXT(j, next) != NULL;
}

/* Beside NCCL's own kernel, which must find room at once. stage 0: digests alone. */
static enum fl_status move(struct nccl *k, struct nccl_job *j, const struct nccl_parcel *p,
                           uint64_t stage, struct fl_err *err)
{
    uint64_t slot = dev_addr(j->mem.addr);
    bool gathers = j->root == k->self || p->direct;
    struct kernel_move_args a = { .pieces =
                                      j->table->t.addr + p->first * sizeof(struct kernel_piece),
                                  .n = p->n,
                                  .from = gathers ? slot : stage,
                                  .to = gathers ? stage : slot,
                                  .digests = j->digests ? j->room->sums : 0,
                                  .beside = more_follows(j) };

    pthread_mutex_lock(&k->dev->lock);
    enum fl_status st = kernel_move_start(k->dev->gpu, k->dev->g, k->work, &a, err);

    pthread_mutex_unlock(&k->dev->lock);
    return st;
}

static enum fl_status room_grow(struct nccl *k, struct nccl_room *r, size_t n, struct fl_err *err)
{
    const struct gpu_ops *gpu = k->dev->gpu;
    size_t want = n > NCCL_SUMS_MIN ? 2 * n : NCCL_SUMS_MIN;

    if (r->n >= n)
        return FL_OK;
    nccl_throw(k->dev, r->sums, r->back);
    r->sums = 0;
    r->back = NULL;
    r->n = 0;
    FL_TRY(gpu->alloc(k->dev->g, want * sizeof(*r->back), &r->sums, err));
    FL_TRY(gpu->pin(k->dev->g, want * sizeof(*r->back), (void **)&r->back, err));
    r->n = want;
    return FL_OK;
}

static enum fl_status job_begin(struct nccl *k, struct nccl_job *j, struct fl_err *err)
{
    const struct gpu_ops *gpu = k->dev->gpu;
    struct nccl_room *r = k->rooms;

    while (r->taken) /* as many as jobs can be in flight */
        r++;
    if (!r->end)
        FL_TRY(gpu->event(k->dev->g, &r->end, err));
    if (j->digests) {
        FL_TRY(room_grow(k, r, j->n, err));
        FL_TRY(gpu->fill(k->work, r->sums, 0, j->n * sizeof(*r->back), err));
    }
    FL_TRY(nccl_table_for(k, j, err));
    r->taken = true;
    j->room = r;
    j->began_ns = fl_clock_boot_ns();
    return FL_OK;
}

/* Before the call: on the root the stage is filled, elsewhere it is only free. */
static enum fl_status packed_call(struct nccl *k, struct nccl_job *j, const struct nccl_parcel *p,
                                  struct nccl_stage *s, struct fl_err *err)
{
    const struct gpu_ops *gpu = k->dev->gpu;

    if (j->root == k->self) {
        FL_TRY(gpu->stream_wait(k->work, s->free, err));
        FL_TRY(move(k, j, p, s->addr, err));
        FL_TRY(gpu->event_record(s->full, k->work, err));
        FL_TRY(gpu->stream_wait(k->wire, s->full, err));
    } else {
        FL_TRY(gpu->stream_wait(k->wire, s->free, err));
    }
    FL_TRY(nccl_call(k, s->addr, p->bytes, j->root, err));
    s->user = k;
    s->taken = true;
    k->stage = s;
    k->ring->next_stage++;
    return FL_OK;
}

/* What is behind on the wire by now is there for the other stream. */
static enum fl_status work_after_wire(struct nccl *k, struct fl_err *err)
{
    FL_TRY(k->dev->gpu->event_record(k->mark, k->wire, err));
    return k->dev->gpu->stream_wait(k->work, k->mark, err);
}

/* NCCL has taken it: what comes after it on the streams. */
static enum fl_status parcel_taken(struct nccl *k, struct nccl_job *j, struct fl_err *err)
{
    const struct gpu_ops *gpu = k->dev->gpu;
    struct nccl_stage *s = FL_TAKE(k->stage);
    const struct nccl_parcel *p = &j->table->parcels[j->next_parcel++];
    bool root = j->root == k->self;

    k->in_call = false;
    if (s)
        s->taken = false;
    if (s && root)
        FL_TRY(gpu->event_record(s->free, k->wire, err));
    if (!root && (s || j->digests))
        FL_TRY(work_after_wire(k, err));
    if (p->direct ? j->digests != NULL : !root)
        FL_TRY(move(k, j, p, s ? s->addr : 0, err));
    if (s && !root)
        FL_TRY(gpu->event_record(s->free, k->work, err));
    if (j->next_parcel < j->table->n_parcels)
        return FL_OK;
    j->issued = true;
    FL_TRY(work_after_wire(k, err));
    if (j->digests)
        FL_TRY(gpu->copy(k->work, dev_addr(j->room->back), j->room->sums,
                         j->n * sizeof(*j->room->back), err));
    return gpu->event_record(j->room->end, k->work, err);
}

static struct nccl_job *job_to_issue(struct nccl *k)
{
    struct nccl_job *j;

    STAILQ_FOREACH(j, &k->now, next)
    if (!j->issued)
        return j;
    return NULL;
}

/* One step of issuing; *moved: something happened. */
enum fl_status nccl_issue(struct nccl *k, bool *moved, struct fl_err *err)
{
    struct nccl_job *j = job_to_issue(k);
    const struct nccl_parcel *p;
    struct nccl_stage *s;
    enum fl_status st;

    if (!j)
        return FL_OK;
    if (k->in_call) {
        st = nccl_comm_state(k, err);
        if (st == FL_AGAIN)
            return FL_OK;
        FL_TRY(st);
        *moved = true;
        return parcel_taken(k, j, err);
    }
    if (!j->room)
        FL_TRY(job_begin(k, j, err));
    p = &j->table->parcels[j->next_parcel];
    if (p->direct) {
        *moved = true;
        return nccl_call(k, dev_addr(j->mem.addr) + (j->root == k->self ? p->from_off : p->to_off),
                         p->bytes, j->root, err);
    }
    s = stage_next(k, err);
    if (!s)
        return err->status;
    *moved = true;
    return packed_call(k, j, p, s, err);
}
void nccl_room_drop(struct nccl *k, struct nccl_room *r)
{
    nccl_throw(k->dev, r->sums, r->back);
    if (r->end)
        k->dev->gpu->event_free(r->end);
}

void nccl_stages_back(void)
{
    for (struct nccl_ring *r = rings; r; r = r->next)
        ring_drop(r);
}

void nccl_call_forget(struct nccl *k)
{
    if (k->stage)
        k->stage->taken = false;
    k->stage = NULL;
    k->in_call = false;
}
