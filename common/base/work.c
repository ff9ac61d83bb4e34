/* common/base/work.c - two threads for calls that block */
#include <signal.h>

#include "common/base/fault.h"
#include "common/base/loop_priv.h"

static void work_back(struct fl_task *t)
{
    struct fl_work *w = container_of(t, struct fl_work, back);
    struct fl_loop *l = w->loop;

    l->pool.in_flight--;
    fl_loop_release(l);
    w->loop = NULL;
    w->done(w, w->st); /* last: the memory may go in it */
}

static void *pool_main(void *arg)
{
    struct fl_loop *l = arg;
    struct fl_pool *p = &l->pool;

    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (!p->waiting.first && !p->closing)
            pthread_cond_wait(&p->more, &p->lock);
        if (p->closing)
            break;
        struct fl_task *t = p->waiting.first;
        struct fl_work *w = container_of(t, struct fl_work, back);

        p->waiting.first = t->next;
        pthread_mutex_unlock(&p->lock);
        w->work(w);
        w->st = FL_OK;
        fl_post(l, &w->back);
        pthread_mutex_lock(&p->lock);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* On first use: libfurlong and small programs never need them. They take no signals: those belong
 * to the program, or to the loop of a daemon. */
static bool pool_ready(struct fl_loop *l)
{
    struct fl_pool *p = &l->pool;
    sigset_t all, old;

    if (p->n_threads == POOL_THREADS)
        return true;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (p->n_threads < POOL_THREADS && !FL_FAULT("base.pool") &&
           pthread_create(&p->threads[p->n_threads], NULL, pool_main, l) == 0)
        p->n_threads++;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return p->n_threads > 0;
}

void fl_work_start(struct fl_loop *l, struct fl_work *w)
{
    struct fl_pool *p = &l->pool;

    w->loop = l;
    w->back.run = work_back;
    w->back.next = NULL;
    atomic_init(&w->back.queued, false);
    fl_loop_hold(l);
    p->in_flight++;
    if (p->closing || !pool_ready(l)) { /* closing: started by a callback of the loop's destroy */
        w->st = p->closing ? FL_CANCELLED : FL_EXHAUSTED;
        fl_post(l, &w->back);
        return;
    }
    pthread_mutex_lock(&p->lock);
    if (p->waiting.first)
        p->waiting.last->next = &w->back;
    else
        p->waiting.first = &w->back;
    p->waiting.last = &w->back;
    pthread_cond_signal(&p->more);
    pthread_mutex_unlock(&p->lock);
}

void fl_pool_init(struct fl_loop *l)
{
    pthread_mutex_init(&l->pool.lock, NULL);
    pthread_cond_init(&l->pool.more, NULL);
}

void fl_pool_fini(struct fl_loop *l)
{
    struct fl_pool *p = &l->pool;

    pthread_mutex_lock(&p->lock);
    struct fl_task *never = p->waiting.first;

    p->waiting.first = NULL;
    p->closing = true;
    pthread_cond_broadcast(&p->more);
    pthread_mutex_unlock(&p->lock);
    for (unsigned i = 0; i < p->n_threads; i++)
        pthread_join(p->threads[i], NULL);
    p->n_threads = 0;
    while (never) {
        struct fl_work *w = container_of(never, struct fl_work, back);

        never = never->next;
        w->st = FL_CANCELLED;
        fl_post(l, &w->back);
    }
    pthread_cond_destroy(&p->more);
    pthread_mutex_destroy(&p->lock);
}
