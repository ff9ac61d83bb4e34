/* common/base/loop_priv.h - what loop.c, timer.c and work.c share */
#pragma once
#include <pthread.h>
#include <sys/epoll.h>

#include "common/base/loop.h"

enum { LOOP_EVENTS = 64, POOL_THREADS = 2 };

struct fl_task_list { struct fl_task *first, *last; };

struct fl_pool {
    pthread_mutex_t lock;
    pthread_cond_t more;
    pthread_t threads[POOL_THREADS];
    unsigned n_threads;
    struct fl_task_list waiting; /* of fl_work.back, linked by next */
    bool closing;
    size_t in_flight; /* loop thread: started and not yet done */
};

struct fl_loop {
    struct fl_clock clock;
    uint64_t now_ns;
    uint64_t awake_until_ns; /* fl_loop_awake() */
    int epoll_fd, wake_fd;
    bool no_pwait2; /* kernel older than 5.11: whole milliseconds */

    _Atomic(struct fl_task *) mailbox; /* last posted first; taken whole */
    struct fl_task_list posted;        /* taken from the mailbox, first posted first */
    struct fl_task_list deferred, deferred_now;

    struct fl_timer *timers; /* root of a pairing heap                */
    struct fl_timer *due;    /* of this turn, in order                */
    uint64_t timer_seq;

    struct fl_watch *watches;
    struct epoll_event events[LOOP_EVENTS];
    int n_events, at_event;

    struct fl_pool pool;
    size_t holds;
    atomic_bool stop;
};

void fl_loop_refresh(struct fl_loop *l); /* reads the clock */

/* timer.c */
bool fl_timers_next(const struct fl_loop *l, uint64_t *due_ns); /* false: none armed */
unsigned fl_timers_fire(struct fl_loop *l);
void fl_timers_forget(struct fl_loop *l);

/* work.c */
void fl_pool_init(struct fl_loop *l);
void fl_pool_fini(struct fl_loop *l); /* every work comes back before it returns */
