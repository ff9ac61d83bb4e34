/* transport/link/nccl_comm.c - a communicator from joining to its end: set-up, deadlines, death
 *
 * NCCL reports neither a killed nor a stopped peer: every wait has a deadline of ours. */
#include <string.h>
#include "common/base/fault.h"
#include "common/base/log.h"
#include "transport/link/nccl_priv.h"

enum {
    HOST_FLOOR_BYTES_PER_US = 100000, /* slower than that is not slow, it is silent */
    NET_FLOOR_BYTES_PER_US = 2000
};

/* ==== deadlines and death ===================================================================== */
struct nccl_patience nccl_patience = { .join_ms = 5000, .late_ms = 1000 };

static uint64_t late_ns(const struct nccl *k, const struct nccl_job *j, bool first)
{
    bool one_host = true;

    for (unsigned i = 1; i < k->n; i++)
        one_host &= strcmp(k->members[0].host_boot, k->members[i].host_boot) == 0;
    uint64_t floor = one_host ? HOST_FLOOR_BYTES_PER_US : NET_FLOOR_BYTES_PER_US;

    return ((uint64_t)(first ? nccl_patience.join_ms : 0) + nccl_patience.late_ms) * 1000000u +
           3 * (j->bytes * 1000 / floor);
}

/* The wire is its own from here on. */
static void now_first(struct nccl *k, struct nccl_job *j, bool was_idle)
{
    uint64_t now = fl_clock_boot_ns();

    j->due_ns = now + late_ns(k, j, was_idle);
    k->end_near_ns = now + nccl_wire_ns(k, j->root, j->bytes);
}

void nccl_die(struct nccl *k, enum fl_status st, const struct fl_err *why)
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
    nccl_call_forget(k);
    k->state = NCCL_DEAD;
    nccl_lock();
    k->dead = true;
    k->why = *why;
    STAILQ_CONCAT(&k->now, &k->asked);
    nccl_unlock();
    while ((j = STAILQ_FIRST(&k->now))) {
        STAILQ_REMOVE_HEAD(&k->now, next);
        nccl_job_over(j, st, why);
    }
    if (!was_open)
        nccl_opened(k);
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
    FL_TRY(nccl_ring_of(k, err));
    FL_TRY(dev_warm(k->dev, err));
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
    FL_TRY(k->dev->gpu->alloc(k->dev->g, NCCL_WARM_BYTES, &k->warm, err));
    k->state = NCCL_WARMING;
    return nccl_call(k, k->warm, NCCL_WARM_BYTES, 0, err);
}

static enum fl_status warming(struct nccl *k, bool *moved, struct fl_err *err)
{
    if (k->in_call) {
        enum fl_status st = nccl_comm_state(k, err);

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
    nccl_throw(k->dev, k->warm, NULL);
    k->warm = 0;
    k->state = NCCL_READY;
    *moved = true;
    nccl_opened(k);
    return FL_OK;
}

enum fl_status nccl_opening(struct nccl *k, bool *moved, struct fl_err *err)
{
    enum fl_status st;

    if (fl_clock_boot_ns() > k->due_ns && k->state != NCCL_NEW)
        return fl_fail(err, FL_TIMEOUT, "rank %u of %u waited %d s for the others", k->self, k->n,
                       NCCL_OPEN_MS / 1000);
    if (k->state == NCCL_NEW)
        return join(k, err);
    if (k->state == NCCL_WARMING)
        return warming(k, moved, err);
    st = nccl_comm_state(k, err);
    if (st == FL_AGAIN)
        return FL_OK;
    return st == FL_OK ? warm_up(k, err) : st;
}

enum fl_status nccl_finish(struct nccl *k, bool *moved, struct fl_err *err)
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
                now_first(k, after, false);
            *moved = true;
            nccl_job_over(j, FL_OK, NULL);
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

void nccl_take_asked(struct nccl *k)
{
    bool idle = STAILQ_EMPTY(&k->now);
    struct nccl_job *first;

    nccl_lock();
    STAILQ_CONCAT(&k->now, &k->asked);
    nccl_unlock();
    first = STAILQ_FIRST(&k->now);
    if (idle && first)
        now_first(k, first, true);
}
