#include "worker/client/sync.h"
#include <errno.h>
#include <time.h>
#include <furlong/furlong.h>

void client_cond_init(pthread_cond_t *c)
{
    pthread_condattr_t a;

    pthread_condattr_init(&a);
    pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
    pthread_cond_init(c, &a);
    pthread_condattr_destroy(&a);
}

struct timespec client_until(uint32_t wait_ms)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += wait_ms / 1000;
    t.tv_nsec += (long)(wait_ms % 1000) * 1000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000;
    }
    return t;
}

bool client_cond_wait(pthread_cond_t *c, pthread_mutex_t *mu, uint32_t wait_ms,
                      const struct timespec *until)
{
    if (wait_ms == FURLONG_FOREVER)
        return pthread_cond_wait(c, mu) == 0;
    return pthread_cond_timedwait(c, mu, until) != ETIMEDOUT;
}

static void sync_begin(struct fl_task *t)
{
    struct client_sync *s = container_of(t, struct client_sync, task);

    s->begin(s);
}

enum fl_status client_sync_run(struct fl_loop *l, struct client_sync *s,
                               void (*begin)(struct client_sync *s), struct fl_err *err)
{
    s->task.run = sync_begin;
    s->begin = begin;
    s->over = false;
    pthread_mutex_init(&s->mu, NULL);
    client_cond_init(&s->over_cond);
    fl_post(l, &s->task);
    pthread_mutex_lock(&s->mu);
    while (!s->over)
        pthread_cond_wait(&s->over_cond, &s->mu);
    pthread_mutex_unlock(&s->mu);
    pthread_cond_destroy(&s->over_cond);
    pthread_mutex_destroy(&s->mu);
    if (s->st != FL_OK && err)
        *err = s->err;
    return s->st;
}

void client_sync_end(struct client_sync *s, enum fl_status st, const struct fl_err *err)
{
    pthread_mutex_lock(&s->mu);
    s->st = st;
    s->err = err ? *err : (struct fl_err){ .status = st };
    s->over = true;
    pthread_cond_signal(&s->over_cond);
    pthread_mutex_unlock(&s->mu);
}
