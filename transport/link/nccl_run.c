/* transport/link/nccl_run.c - the thread that owns the communicators: its orders and its turns */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "common/base/fault.h"
#include "transport/link/nccl_priv.h"

enum {
    SPIN_NS = 300000,  /* after the last progress: no longer than three wakes of another core */
    STIR_NS = 500000,  /* after word that casts are near: five wakes */
    NAP_NS = 50000,    /* then so long between two looks */
    EARLY_NS = 200000, /* before a cast's expected end: what a nap may take, its wake included */
    LATE_NS = 450000,  /* after it */
    EXIT_WAIT_S = 2    /* four times what an abort took */
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t more, gone;
    bool started, stirred;
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

/* Casts of this process are near: its thread does not have to be woken for the first one. */
void link_casts_stir(void)
{
    if (pthread_mutex_trylock(&th.lock) != 0)
        return; /* it is awake */
    th.stirred = !LIST_EMPTY(&th.links);
    if (th.stirred)
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

/* With the lock held, for the list. */
static bool any_under_way(void)
{
    const struct nccl *k;

    LIST_FOREACH(k, &th.links, next)
    if (k->state == NCCL_JOINING || k->state == NCCL_WARMING || !STAILQ_EMPTY(&k->now))
        return true;
    return false;
}

static void forget(struct nccl *k)
{
    for (unsigned i = 0; k->dev && i < NCCL_MAX_JOBS; i++)
        nccl_room_drop(k, &k->rooms[i]);
    for (unsigned i = 0; k->dev && i < NCCL_TABLES; i++)
        nccl_table_drop(k, &k->tables[i]);
    if (k->dev)
        nccl_throw(k->dev, k->warm, NULL);
    if (k->mark)
        k->dev->gpu->event_free(k->mark);
    if (k->work)
        k->dev->gpu->stream_free(k->work);
    if (k->wire)
        k->dev->gpu->stream_free(k->wire);
    nccl_lock();
    LIST_REMOVE(k, next);
    bool idle = !any_under_way();

    nccl_unlock();
    if (idle)
        nccl_thrown_back();
    nccl_lock();
    k->gone = true;
    bool orphan = k->orphan, last = LIST_EMPTY(&th.links);

    pthread_cond_broadcast(&th.gone);
    nccl_unlock();
    if (last)
        nccl_stages_back();
    if (orphan)
        nccl_free(k);
}

/* An end that is seen late is late for the run: a nap on an idle core takes 50 us and its wake. */
static bool near_end(const struct nccl *k, uint64_t now_ns)
{
    return !STAILQ_EMPTY(&k->now) && now_ns + EARLY_NS > k->end_near_ns &&
           now_ns < k->end_near_ns + LATE_NS;
}

struct seen {
    bool moved; /* something happened            */
    bool busy;  /* something must be looked at   */
    bool near;  /* and is expected to end by now */
};

/* The links there are; a link goes in forget() alone, so the list stands while the lock is not
 * held. */
static struct seen turn(void)
{
    struct nccl *k, *next;
    struct seen s = { 0 };

    nccl_lock();
    k = LIST_FIRST(&th.links);
    nccl_unlock();
    for (; k; k = next) {
        s.busy |= step(k, &s.moved);
        s.near |= near_end(k, fl_clock_boot_ns());
        nccl_lock();
        next = LIST_NEXT(k, next);
        bool over = k->let_go && k->quiet_over;

        nccl_unlock();
        if (over)
            forget(k);
    }
    return s;
}

static bool any_order(void)
{
    const struct nccl *k;

    LIST_FOREACH(k, &th.links, next)
    if (!STAILQ_EMPTY(&k->asked) || (k->stop && !k->quiet_over) || (k->let_go && k->quiet_over) ||
        k->state == NCCL_NEW)
        return true;
    return th.stirred;
}

/* True: an order is near. */
static bool wait_for_orders(void)
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
    bool stirred = th.stirred;

    th.stirred = false;
    nccl_unlock();
    return stirred;
}

static void *thread_main(void *arg)
{
    const struct timespec nap = { .tv_nsec = NAP_NS };
    uint64_t awake_until_ns = 0;

    (void)arg;
    for (;;) {
        struct seen s = turn();
        uint64_t now = fl_clock_boot_ns();

        if (s.moved)
            awake_until_ns = now + SPIN_NS > awake_until_ns ? now + SPIN_NS : awake_until_ns;
        else if (s.near || now < awake_until_ns)
            sched_yield(); /* whoever is to ask, or to answer, may need this core */
        else if (s.busy)
            nanosleep(&nap, NULL);
        else {
            nccl_thrown_back();
            if (wait_for_orders())
                awake_until_ns = fl_clock_boot_ns() + STIR_NS;
        }
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
