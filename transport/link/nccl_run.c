/* transport/link/nccl_run.c - the thread that owns the communicators: its orders and its turns */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "common/base/fault.h"
#include "transport/link/nccl_priv.h"

enum {
    SPIN_NS = 300000, /* after the last progress: no longer than three wakes of another core */
    NAP_NS = 50000,   /* then so long between two looks */
    EXIT_WAIT_S = 2   /* four times what an abort took     */
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t more, gone;
    bool started;
    LIST_HEAD(, nccl) links;
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
void nccl_tell(struct nccl *k)
{
    if (!k->silent)
        fl_post(k->base.loop, &k->back);
}

void nccl_job_over(struct nccl_job *j, enum fl_status st, const struct fl_err *why)
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
    nccl_tell(k);
    nccl_unlock();
}

void nccl_opened(struct nccl *k)
{
    nccl_lock();
    k->opened = true;
    nccl_tell(k);
    nccl_unlock();
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
        nccl_die(k, FL_CANCELLED, &err);
    }
    if (stop) {
        nccl_lock();
        k->quiet_over = true;
        nccl_tell(k);
        nccl_unlock();
    }
    if (k->state == NCCL_DEAD) {
        bool any;

        nccl_lock();
        any = !STAILQ_EMPTY(&k->asked);
        nccl_unlock();
        if (any)
            nccl_die(k, FL_UNREACHABLE, &k->why);
        return false;
    }
    if (k->state != NCCL_READY) {
        st = nccl_opening(k, moved, &err);
    } else {
        nccl_take_asked(k);
        st = nccl_issue(k, moved, &err);
        if (st == FL_OK)
            st = nccl_finish(k, moved, &err);
    }
    if (st != FL_OK)
        nccl_die(k, st, &err);
    return k->state != NCCL_READY || !STAILQ_EMPTY(&k->now);
}

static void forget(struct nccl *k)
{
    struct dev_table warm = { .addr = k->warm };

    for (unsigned i = 0; k->dev && i < NCCL_MAX_JOBS; i++)
        nccl_room_drop(k, &k->rooms[i]);
    for (unsigned i = 0; k->dev && i < NCCL_TABLES; i++)
        nccl_table_drop(k, &k->tables[i]);
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
    if (last)
        nccl_stages_back();
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
    if (late)
        nccl_stages_back();
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
