/* transport/link/nccl_run.c - the thread that owns the communicators
 *
 * A bucket goes in parcels. What is contiguous on both sides goes from where it lies to where it
 * belongs; the rest a stage at a time, gathered on one stream, sent on another, and spread
 * out by the receivers, all ordered by events on the devices, so that the thread runs ahead and the
 * wire never waits for it. What NCCL has not taken yet (a communicator that does not block says so)
 * is asked for again before the next call. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>
#include "common/base/fault.h"
#include "common/base/log.h"
#include "transport/link/nccl_priv.h"

enum {
    HOST_FLOOR_BYTES_PER_US = 100000, /* slower than that is not slow, it is silent */
    NET_FLOOR_BYTES_PER_US = 2000,
    SPIN_NS = 300000, /* after the last progress: no longer than three wakes of another core */
    NAP_NS = 50000,   /* then so long between two looks */
    NCCL_SUMS_MIN = 1024,
    EXIT_WAIT_S = 2 /* four times what an abort took     */
};
struct nccl_stage {
    uint64_t addr;
    struct gpu_event *full, *free;
    bool taken; /* by a call that NCCL has not taken yet */
};
struct nccl_ring { /* of a device: its links take turns */
    struct nccl_ring *next;
    struct link_dev *dev;
    struct nccl_stage stages[NCCL_STAGES];
    unsigned next_stage;
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t more, gone;
    bool started;
    LIST_HEAD(, nccl) links;
    struct nccl_ring *rings; /* the thread's */
} th = { .lock = PTHREAD_MUTEX_INITIALIZER };

void nccl_lock(void)
{
    pthread_mutex_lock(&th.lock);
}

void nccl_unlock(void)
{
    pthread_mutex_unlock(&th.lock);
}

void nccl_wake(void)
{
    pthread_mutex_lock(&th.lock);
    pthread_cond_signal(&th.more);
    pthread_mutex_unlock(&th.lock);
}

void nccl_free(struct nccl *k)
{
    free(k->members);
    free(k);
}

/* ==== what goes back to the loop ============================================================== */
static void tell(struct nccl *k)
{
    if (!k->silent)
        fl_post(k->base.loop, &k->back);
}

static void job_over(struct nccl_job *j, enum fl_status st, const struct fl_err *why)
{
    struct nccl *k = j->k;

    if (st == FL_OK)
        link_op_set(j->op, FL_OK, "%s", "");
    else
        link_op_set(j->op, st, "nccl: %s", why->text);
    j->op->bytes = j->bytes;
    j->op->took_ns = fl_clock_boot_ns() - (j->began_ns ? j->began_ns : j->asked_ns);
    if (j->room)
        j->room->taken = false;
    nccl_lock();
    STAILQ_INSERT_TAIL(&k->over, j, next);
    tell(k);
    nccl_unlock();
}

static void opened(struct nccl *k)
{
    nccl_lock();
    k->opened = true;
    tell(k);
    nccl_unlock();
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

    pthread_mutex_lock(&k->dev->lock);
    enum fl_status st = gpu->alloc(k->dev->g, NCCL_STAGE_BYTES, &s->addr, err);

    pthread_mutex_unlock(&k->dev->lock);
    FL_TRY(st);
    FL_TRY(gpu->event(k->dev->g, &s->full, err));
    FL_TRY(gpu->event(k->dev->g, &s->free, err));
    return gpu->event_record(s->free, k->work, err);
}

static enum fl_status ring_of(struct nccl *k, struct fl_err *err)
{
    struct nccl_ring *r = th.rings;

    while (r && r->dev != k->dev)
        r = r->next;
    if (!r) {
        r = calloc(1, sizeof(*r));
        if (!r)
            return fl_fail(err, FL_EXHAUSTED, "no memory for stages");
        r->dev = k->dev;
        r->next = th.rings;
        th.rings = r;
    }
    k->ring = r;
    return FL_OK;
}

/* NULL with err FL_OK: the next one is in a call that NCCL has not taken yet. */
static struct nccl_stage *stage_next(struct nccl *k, struct fl_err *err)
{
    struct nccl_stage *s = &k->ring->stages[k->ring->next_stage % NCCL_STAGES];

    if (s->taken)
        return NULL;
    if (!s->free && stage_make(k, s, err) != FL_OK) {
        struct dev_table room = { .addr = s->addr };

        dev_table_free(k->dev, &room);
        if (s->full)
            k->dev->gpu->event_free(s->full);
        if (s->free)
            k->dev->gpu->event_free(s->free);
        *s = (struct nccl_stage){ 0 };
        return NULL;
    }
    return s;
}

/* ==== tables ================================================================================== */
static void table_drop(struct nccl *k, struct nccl_table *t)
{
    dev_table_free(k->dev, &t->t);
    free(t->parcels);
    *t = (struct nccl_table){ 0 };
}

struct cutting {
    struct kernel_piece *pieces;
    size_t n;
    struct nccl_table *t;
    size_t cap;
    bool gathers;
};

static struct nccl_parcel *parcel_new(struct cutting *c)
{
    struct nccl_table *t = c->t;

    if (t->n_parcels == c->cap) {
        size_t cap = c->cap ? 2 * c->cap : 16;
        struct nccl_parcel *grown = realloc(t->parcels, cap * sizeof(*grown));

        if (!grown)
            return NULL;
        t->parcels = grown;
        c->cap = cap;
    }
    t->parcels[t->n_parcels] = (struct nccl_parcel){ .first = c->n };
    return &t->parcels[t->n_parcels++];
}

/* A piece goes into the packed parcel in hand, or begins the next one. */
static bool pack(struct cutting *c, struct kernel_piece *p)
{
    struct nccl_parcel *at = c->t->n_parcels ? &c->t->parcels[c->t->n_parcels - 1] : NULL;
    uint64_t bytes = (p->run_bytes * p->rows + 15) / 16 * 16; /* so that the next one is aligned */

    if (!at || at->direct || at->bytes + bytes > NCCL_STAGE_BYTES)
        at = parcel_new(c);
    if (!at)
        return false;
    if (c->gathers) {
        p->to_off = at->bytes;
        p->to_step = p->run_bytes;
    } else {
        p->from_off = at->bytes;
        p->from_step = p->run_bytes;
    }
    at->bytes += bytes;
    at->n++;
    c->n++;
    return true;
}

static bool go_direct(struct cutting *c, const struct dev_stretch *s, size_t n_pieces)
{
    struct nccl_parcel *at = parcel_new(c);

    if (!at)
        return false;
    at->direct = true;
    at->n = n_pieces;
    at->bytes = s->bytes;
    at->from_off = s->from_off;
    at->to_off = s->to_off;
    for (size_t i = 0; i < n_pieces && !c->gathers;
         i++) { /* digested where they have come to lie */
        c->pieces[c->n + i].from_off = c->pieces[c->n + i].to_off;
        c->pieces[c->n + i].from_step = c->pieces[c->n + i].to_step;
    }
    c->n += n_pieces;
    return true;
}

/* All ranks cut the same segments by the same rule. pieces: all of them, in order. */
static enum fl_status parcels_make(const struct nccl_job *j, struct cutting *c, size_t n_pieces,
                                   struct fl_err *err)
{
    struct dev_stretch *all = malloc((j->n + 1) * sizeof(*all));
    size_t n = all ? dev_stretches(j->segs, j->n, all) : 0;
    bool good = all != NULL;

    for (size_t i = 0; good && i < n; i++) {
        size_t last = all[i].first + all[i].n, k = c->n;

        while (k < n_pieces && c->pieces[k].tensor < last) /* tensor: the segment */
            k++;
        if (all[i].bytes >= NCCL_DIRECT_MIN)
            good = go_direct(c, &all[i], k - c->n);
        while (good && c->n < k)
            good = pack(c, &c->pieces[c->n]);
    }
    free(all);
    return good ? FL_OK
                : fl_fail(err, FL_EXHAUSTED, "no memory for the parcels of %zu segments", j->n);
}

static enum fl_status table_for(struct nccl *k, struct nccl_job *j, struct fl_err *err)
{
    XXH128_hash_t h = XXH3_128bits(j->segs, j->n * sizeof(*j->segs));
    bool gathers = j->root == k->self;
    struct nccl_table *oldest = &k->tables[0];
    struct kernel_piece *cut;
    size_t n;

    for (unsigned i = 0; i < NCCL_TABLES; i++) {
        struct nccl_table *t = &k->tables[i];

        if (t->t.addr && t->key[0] == h.low64 && t->key[1] == h.high64 && t->gathers == gathers) {
            t->used = ++k->uses;
            j->table = t;
            return FL_OK;
        }
        if (t->used < oldest->used)
            oldest = t;
    }
    table_drop(k, oldest); /* more of them than jobs can be in flight */
    FL_TRY(dev_pieces_cut(j->segs, j->n, &cut, &n, err));
    struct cutting c = { .pieces = cut, .t = oldest, .gathers = gathers };
    enum fl_status st = parcels_make(j, &c, n, err);

    if (st == FL_OK)
        st = dev_table_upload(k->dev, k->work, cut, n, &oldest->t, err);
    free(cut);
    if (st != FL_OK) {
        table_drop(k, oldest);
        return st;
    }
    oldest->key[0] = h.low64;
    oldest->key[1] = h.high64;
    oldest->gathers = gathers;
    oldest->used = ++k->uses;
    j->table = oldest;
    return FL_OK;
}

/* ==== calls ====================================================================================
 */
/* FL_AGAIN: not taken yet. */
static enum fl_status comm_state(struct nccl *k, struct fl_err *err)
{
    int r = NCCL_OK, got = k->api->async_error(k->comm, &r);

    if (got == NCCL_OK && r == NCCL_IN_PROGRESS)
        return FL_AGAIN;
    if (got != NCCL_OK || r != NCCL_OK)
        return fl_fail(err, FL_UNREACHABLE, "rank %u of %u: %s", k->self, k->n,
                       k->api->error_text(got != NCCL_OK ? got : r));
    return FL_OK;
}

static enum fl_status call_broadcast(struct nccl *k, uint64_t addr, uint64_t bytes, unsigned root,
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
    if (r->sums)
        gpu->free(k->dev->g, r->sums);
    if (r->back)
        gpu->unpin(k->dev->g, r->back);
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
    enum fl_status st = FL_OK;

    while (r->taken) /* as many as jobs can be in flight */
        r++;
    if (!r->end)
        FL_TRY(gpu->event(k->dev->g, &r->end, err));
    if (j->digests) {
        pthread_mutex_lock(&k->dev->lock);
        st = room_grow(k, r, j->n, err);
        pthread_mutex_unlock(&k->dev->lock);
        FL_TRY(st);
        FL_TRY(gpu->fill(k->work, r->sums, 0, j->n * sizeof(*r->back), err));
    }
    FL_TRY(table_for(k, j, err));
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
    FL_TRY(call_broadcast(k, s->addr, p->bytes, j->root, err));
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
static enum fl_status issue(struct nccl *k, bool *moved, struct fl_err *err)
{
    struct nccl_job *j = job_to_issue(k);
    const struct nccl_parcel *p;
    struct nccl_stage *s;
    enum fl_status st;

    if (!j)
        return FL_OK;
    if (k->in_call) {
        st = comm_state(k, err);
        if (st == FL_AGAIN)
            return FL_OK;
        FL_TRY(st);
        *moved = true;
        return parcel_taken(k, j, err);
    }
    if (!j->room)
        FL_TRY(job_begin(k, j, err));
    p = &j->table->parcels[j->next_parcel];
    *moved = true;
    if (p->direct)
        return call_broadcast(
            k, dev_addr(j->mem.addr) + (j->root == k->self ? p->from_off : p->to_off), p->bytes,
            j->root, err);
    s = stage_next(k, err);
    return s ? packed_call(k, j, p, s, err) : err->status;
}

/* ==== deadlines and death ===================================================================== */
static uint64_t late_ns(const struct nccl *k, const struct nccl_job *j, bool first)
{
    bool one_host = true;

    for (unsigned i = 1; i < k->n; i++)
        one_host &= strcmp(k->members[0].host_boot, k->members[i].host_boot) == 0;
    uint64_t floor = one_host ? HOST_FLOOR_BYTES_PER_US : NET_FLOOR_BYTES_PER_US;

    return ((uint64_t)(first ? NCCL_JOIN_MS : 0) + NCCL_LATE_MS) * 1000000u +
           3 * (j->bytes * 1000 / floor);
}

static void die(struct nccl *k, enum fl_status st, const struct fl_err *why)
{
    bool was_open = k->state == NCCL_READY;
    struct nccl_job *j;

    if (k->comm) {
        (void)k->api->abort(k->comm); /* a third to half of a second when a rank is dead */
        k->comm = NULL;
    }
    if (k->wire)
        (void)k->dev->gpu->stream_sync(k->wire, NULL);
    if (k->work)
        (void)k->dev->gpu->stream_sync(k->work, NULL);
    if (k->stage)
        k->stage->taken = false;
    k->stage = NULL;
    k->in_call = false;
    k->state = NCCL_DEAD;
    nccl_lock();
    k->dead = true;
    k->why = *why;
    STAILQ_CONCAT(&k->now, &k->asked);
    nccl_unlock();
    while ((j = STAILQ_FIRST(&k->now))) {
        STAILQ_REMOVE_HEAD(&k->now, next);
        job_over(j, st, why);
    }
    if (!was_open)
        opened(k);
    if (st != FL_CANCELLED)
        fl_warn("nccl communicator is spent rank=%u ranks=%u why=\"%s\"", k->self, k->n, why->text);
}

/* ==== a communicator's life =================================================================== */
static enum fl_status join(struct nccl *k, struct fl_err *err)
{
    struct nccl_config config = { .size = sizeof(config),
                                  .magic = NCCL_CONFIG_MAGIC,
                                  .version = NCCL_CONFIG_VERSION,
                                  .cga_cluster_size = NCCL_UNDEFINED,
                                  .min_ctas = NCCL_UNDEFINED,
                                  .max_ctas = NCCL_UNDEFINED,
                                  .split_share = NCCL_UNDEFINED };
    int r;

    FL_TRY(link_dev_get(k->members[k->self].gpu_uuid, &k->dev, err));
    FL_TRY(ring_of(k, err));
    FL_TRY(k->dev->gpu->stream(k->dev->g, &k->work, err));
    FL_TRY(k->dev->gpu->stream(k->dev->g, &k->wire, err));
    FL_TRY(k->dev->gpu->event(k->dev->g, &k->mark, err)); /* and the context is current here */
    r = FL_FAULT("link.nccl.init")
            ? 1
            : k->api->init(&k->comm, (int)k->n, k->id, (int)k->self, &config);
    if (r != NCCL_OK && r != NCCL_IN_PROGRESS)
        return fl_fail(err, FL_UNREACHABLE, "rank %u of %u does not join: %s", k->self, k->n,
                       k->api->error_text(r));
    k->state = NCCL_JOINING;
    k->due_ns = fl_clock_boot_ns() + NCCL_OPEN_MS * 1000000ull;
    return FL_OK;
}

/* The first broadcast sets up connections, a sixth of a second: not inside of an epoch. */
static enum fl_status warm_up(struct nccl *k, struct fl_err *err)
{
    pthread_mutex_lock(&k->dev->lock);
    enum fl_status st = k->dev->gpu->alloc(k->dev->g, NCCL_WARM_BYTES, &k->warm, err);

    pthread_mutex_unlock(&k->dev->lock);
    FL_TRY(st);
    k->state = NCCL_WARMING;
    return call_broadcast(k, k->warm, NCCL_WARM_BYTES, 0, err);
}

static enum fl_status warming(struct nccl *k, bool *moved, struct fl_err *err)
{
    if (k->in_call) {
        enum fl_status st = comm_state(k, err);

        if (st == FL_AGAIN)
            return FL_OK;
        FL_TRY(st);
        k->in_call = false;
        FL_TRY(k->dev->gpu->event_record(k->mark, k->wire, err));
    }
    enum fl_status st = k->dev->gpu->event_done(k->mark, err);

    if (st == FL_AGAIN)
        return FL_OK;
    FL_TRY(st);
    struct dev_table warm = { .addr = k->warm };

    dev_table_free(k->dev, &warm);
    k->warm = 0;
    k->state = NCCL_READY;
    *moved = true;
    opened(k);
    return FL_OK;
}

static enum fl_status opening(struct nccl *k, bool *moved, struct fl_err *err)
{
    enum fl_status st;

    if (fl_clock_boot_ns() > k->due_ns && k->state != NCCL_NEW)
        return fl_fail(err, FL_TIMEOUT, "rank %u of %u waited %d s for the others", k->self, k->n,
                       NCCL_OPEN_MS / 1000);
    if (k->state == NCCL_NEW)
        return join(k, err);
    if (k->state == NCCL_WARMING)
        return warming(k, moved, err);
    st = comm_state(k, err);
    if (st == FL_AGAIN)
        return FL_OK;
    return st == FL_OK ? warm_up(k, err) : st;
}

static enum fl_status finish(struct nccl *k, bool *moved, struct fl_err *err)
{
    struct nccl_job *j = STAILQ_FIRST(&k->now);
    enum fl_status st;

    if (!j)
        return FL_OK;
    if (j->issued) {
        st = k->dev->gpu->event_done(j->room->end, err);
        if (st == FL_OK) {
            for (size_t i = 0; j->digests && i < j->n; i++) {
                j->digests[i][0] += j->room->back[i][0];
                j->digests[i][1] += j->room->back[i][1];
            }
            STAILQ_REMOVE_HEAD(&k->now, next);
            struct nccl_job *after = STAILQ_FIRST(&k->now);

            if (after)
                after->due_ns = fl_clock_boot_ns() + late_ns(k, after, false);
            *moved = true;
            job_over(j, FL_OK, NULL);
            return FL_OK;
        }
        if (st != FL_AGAIN)
            return st;
    }
    if (fl_clock_boot_ns() < j->due_ns)
        return FL_OK;
    return fl_fail(err, FL_TIMEOUT,
                   "a broadcast of %llu bytes from rank %u (%s) to %u ranks was not over after "
                   "%llu ms at rank %u: "
                   "one of them is dead or stopped",
                   (unsigned long long)j->bytes, j->root, k->members[j->root].addr, k->n - 1,
                   (unsigned long long)((fl_clock_boot_ns() - j->asked_ns) / 1000000), k->self);
}

static void take_asked(struct nccl *k)
{
    bool idle = STAILQ_EMPTY(&k->now);
    struct nccl_job *first;

    nccl_lock();
    STAILQ_CONCAT(&k->now, &k->asked);
    nccl_unlock();
    first = STAILQ_FIRST(&k->now);
    if (idle && first)
        first->due_ns = fl_clock_boot_ns() + late_ns(k, first, true);
}

/* ==== the thread ============================================================================== */
/* true: something happened, or something is under way that must be looked at. */
static bool step(struct nccl *k, bool *moved)
{
    struct fl_err err = { 0 };
    enum fl_status st = FL_OK;

    nccl_lock();
    bool stop = k->stop && !k->quiet_over;

    nccl_unlock();
    if (stop && k->state != NCCL_DEAD) {
        fl_fail(&err, FL_CANCELLED, "the link was ended");
        die(k, FL_CANCELLED, &err);
    }
    if (stop) {
        nccl_lock();
        k->quiet_over = true;
        tell(k);
        nccl_unlock();
    }
    if (k->state == NCCL_DEAD) {
        bool any;

        nccl_lock();
        any = !STAILQ_EMPTY(&k->asked);
        nccl_unlock();
        if (any)
            die(k, FL_UNREACHABLE, &k->why);
        return false;
    }
    if (k->state != NCCL_READY) {
        st = opening(k, moved, &err);
    } else {
        take_asked(k);
        st = issue(k, moved, &err);
        if (st == FL_OK)
            st = finish(k, moved, &err);
    }
    if (st != FL_OK)
        die(k, st, &err);
    return k->state != NCCL_READY || !STAILQ_EMPTY(&k->now);
}

static void room_drop(struct nccl *k, struct nccl_room *r)
{
    struct dev_table sums = { .addr = r->sums };

    dev_table_free(k->dev, &sums);
    if (r->end)
        k->dev->gpu->event_free(r->end);
    pthread_mutex_lock(&k->dev->lock);
    if (r->back)
        k->dev->gpu->unpin(k->dev->g, r->back);
    pthread_mutex_unlock(&k->dev->lock);
}

static void forget(struct nccl *k)
{
    struct dev_table warm = { .addr = k->warm };

    for (unsigned i = 0; k->dev && i < NCCL_MAX_JOBS; i++)
        room_drop(k, &k->rooms[i]);
    for (unsigned i = 0; k->dev && i < NCCL_TABLES; i++)
        table_drop(k, &k->tables[i]);
    if (k->dev)
        dev_table_free(k->dev, &warm);
    if (k->mark)
        k->dev->gpu->event_free(k->mark);
    if (k->work)
        k->dev->gpu->stream_free(k->work);
    if (k->wire)
        k->dev->gpu->stream_free(k->wire);
    nccl_lock();
    LIST_REMOVE(k, next);
    k->gone = true;
    bool orphan = k->orphan, last = LIST_EMPTY(&th.links);

    pthread_cond_broadcast(&th.gone);
    nccl_unlock();
    for (struct nccl_ring *r = last ? th.rings : NULL; r; r = r->next)
        ring_drop(r);
    if (orphan)
        nccl_free(k);
}

/* The links there are; a link goes in forget() alone, so the list stands while the lock is not
 * held. */
static bool turn(bool *moved)
{
    struct nccl *k, *next;
    bool busy = false;

    nccl_lock();
    k = LIST_FIRST(&th.links);
    nccl_unlock();
    for (; k; k = next) {
        busy |= step(k, moved);
        nccl_lock();
        next = LIST_NEXT(k, next);
        bool over = k->let_go && k->quiet_over;

        nccl_unlock();
        if (over)
            forget(k);
    }
    return busy;
}

static void nap(uint64_t since_ns)
{
    struct timespec ts = { .tv_nsec = NAP_NS };

    if (fl_clock_boot_ns() - since_ns > SPIN_NS)
        nanosleep(&ts, NULL);
}

static bool any_order(void)
{
    const struct nccl *k;

    LIST_FOREACH(k, &th.links, next)
    if (!STAILQ_EMPTY(&k->asked) || (k->stop && !k->quiet_over) || (k->let_go && k->quiet_over) ||
        k->state == NCCL_NEW)
        return true;
    return false;
}

static void wait_for_orders(void)
{
    struct timespec until;
    int late = 0;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += NCCL_IDLE_MS / 1000;
    nccl_lock();
    while (!any_order() && late == 0)
        late = pthread_cond_timedwait(&th.more, &th.lock, &until);
    nccl_unlock();
    for (struct nccl_ring *r = late ? th.rings : NULL; r; r = r->next)
        ring_drop(r);
    nccl_lock();
    while (late && !any_order())
        pthread_cond_wait(&th.more, &th.lock);
    nccl_unlock();
}

static void *thread_main(void *arg)
{
    uint64_t moved_ns = 0;

    (void)arg;
    for (;;) {
        bool moved = false, busy = turn(&moved);

        if (moved)
            moved_ns = fl_clock_boot_ns();
        else if (busy)
            nap(moved_ns);
        else
            wait_for_orders();
    }
    return NULL;
}

static bool any_leaving(void)
{
    const struct nccl *k;

    LIST_FOREACH(k, &th.links, next)
    if (k->let_go)
        return true;
    return false;
}

/* A process that ends while NCCL aborts would take its libraries away under it. */
static void settle_at_exit(void)
{
    struct timespec until;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += EXIT_WAIT_S;
    nccl_lock();
    while (any_leaving() && pthread_cond_timedwait(&th.gone, &th.lock, &until) == 0)
        ;
    nccl_unlock();
}

enum fl_status nccl_thread_start(struct fl_err *err)
{
    sigset_t all, was;
    pthread_t t;
    int e = 0;

    nccl_lock();
    if (!th.started) {
        pthread_cond_init(&th.more, NULL);
        pthread_cond_init(&th.gone, NULL);
        sigfillset(&all); /* signals are the program's */
        pthread_sigmask(SIG_SETMASK, &all, &was);
        e = FL_FAULT("link.nccl.thread") ? EAGAIN : pthread_create(&t, NULL, thread_main, NULL);
        pthread_sigmask(SIG_SETMASK, &was, NULL);
        th.started = e == 0;
        if (e == 0) {
            pthread_detach(t);
            (void)atexit(settle_at_exit);
        }
    }
    nccl_unlock();
    return e ? fl_fail(err, FL_EXHAUSTED, "nccl: no thread: %s", strerror(e)) : FL_OK;
}

void nccl_thread_add(struct nccl *k)
{
    nccl_lock();
    LIST_INSERT_HEAD(&th.links, k, next);
    pthread_cond_signal(&th.more);
    nccl_unlock();
}

void nccl_wait_gone(struct nccl *k)
{
    nccl_lock();
    while (!k->gone)
        pthread_cond_wait(&th.gone, &th.lock);
    nccl_unlock();
}
