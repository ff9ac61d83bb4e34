#include "common/gpu/later.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <time.h>

#include "common/base/loop.h"

struct item {
    STAILQ_ENTRY(item) next;
    void (*run)(void *arg);
    _Alignas(16) char arg[LATER_ARG];
};
struct later {
    LIST_ENTRY(later) next;
    STAILQ_HEAD(, item) items;
    size_t device;
    struct timespec delay;
    bool busy, ended;
};
struct later_event {
    unsigned refs;
    uint64_t asked, happened, at_ns;
};

/* One lock and one condition for all: a fake has few streams and is in no hurry. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static LIST_HEAD(, later) streams;

static unsigned delay_us(void)
{
    const char *us = getenv("FURLONG_GPU_FAKE_ASYNC");

    return us ? (unsigned)strtoul(us, NULL, 10) : 0;
}

bool later_on(void)
{
    return delay_us() > 0;
}

static void *stream_main(void *arg)
{
    struct later *s = arg;
    struct item *i;

    pthread_mutex_lock(&lock);
    for (;;) {
        while (!(i = STAILQ_FIRST(&s->items)) && !s->ended)
            pthread_cond_wait(&moved, &lock);
        if (!i)
            break;
        STAILQ_REMOVE_HEAD(&s->items, next);
        s->busy = true;
        pthread_mutex_unlock(&lock);
        nanosleep(&s->delay, NULL);
        i->run(i->arg);
        free(i);
        pthread_mutex_lock(&lock);
        s->busy = false;
        pthread_cond_broadcast(&moved);
    }
    LIST_REMOVE(s, next);
    pthread_mutex_unlock(&lock);
    free(s);
    return NULL;
}

struct later *later_create(size_t device)
{
    struct later *s = calloc(1, sizeof(*s));
    sigset_t all, was;
    pthread_t t;

    if (!s)
        return NULL;
    STAILQ_INIT(&s->items);
    s->device = device;
    s->delay.tv_nsec = delay_us() % 1000000 * 1000l; /* here: the program may change its environment */
    sigfillset(&all); /* signals are the program's */
    pthread_sigmask(SIG_SETMASK, &all, &was);
    pthread_mutex_lock(&lock);
    int e = pthread_create(&t, NULL, stream_main, s);

    if (e == 0) {
        pthread_detach(t);
        LIST_INSERT_HEAD(&streams, s, next);
    }
    pthread_mutex_unlock(&lock);
    pthread_sigmask(SIG_SETMASK, &was, NULL);
    if (e == 0)
        return s;
    free(s);
    return NULL;
}

void later_end(struct later *s)
{
    pthread_mutex_lock(&lock);
    s->ended = true;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

static bool idle(const struct later *s)
{
    return !s->busy && STAILQ_EMPTY(&s->items);
}

void later_sync(struct later *s)
{
    pthread_mutex_lock(&lock);
    while (!idle(s))
        pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
}

static bool all_idle(size_t device)
{
    const struct later *s;

    LIST_FOREACH(s, &streams, next)
    if (s->device == device && !idle(s))
        return false;
    return true;
}

void later_sync_all(size_t device)
{
    pthread_mutex_lock(&lock);
    while (!all_idle(device))
        pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
}

bool later_do(struct later *s, void (*run)(void *arg), const void *arg, size_t bytes)
{
    struct item *i = malloc(sizeof(*i));

    if (!i)
        return false;
    i->run = run;
    memcpy(i->arg, arg, bytes);
    pthread_mutex_lock(&lock);
    STAILQ_INSERT_TAIL(&s->items, i, next);
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
    return true;
}

/* ==== events ==== */
struct mark {
    struct later_event *e;
    uint64_t nth;
};

struct later_event *later_event_create(void)
{
    struct later_event *e = calloc(1, sizeof(*e));

    if (e)
        e->refs = 1;
    return e;
}

static void put(struct later_event *e) /* with the lock held */
{
    if (--e->refs == 0)
        free(e);
}

void later_event_free(struct later_event *e)
{
    pthread_mutex_lock(&lock);
    put(e);
    pthread_mutex_unlock(&lock);
}

static void run_record(void *arg)
{
    struct mark *m = arg;

    pthread_mutex_lock(&lock);
    m->e->happened = m->nth > m->e->happened ? m->nth : m->e->happened;
    m->e->at_ns = fl_clock_boot_ns();
    put(m->e);
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

static void run_wait(void *arg)
{
    struct mark *m = arg;

    pthread_mutex_lock(&lock);
    while (m->e->happened < m->nth)
        pthread_cond_wait(&moved, &lock);
    put(m->e);
    pthread_mutex_unlock(&lock);
}

static bool mark(struct later *s, struct later_event *e, void (*run)(void *), bool record)
{
    pthread_mutex_lock(&lock);
    e->refs++;
    e->asked += record;
    struct mark m = { e, e->asked };

    pthread_mutex_unlock(&lock);
    if (later_do(s, run, &m, sizeof(m)))
        return true;
    later_event_free(e);
    return false;
}

bool later_record(struct later *s, struct later_event *e)
{
    return mark(s, e, run_record, true);
}

bool later_wait(struct later *s, struct later_event *e)
{
    return mark(s, e, run_wait, false);
}

bool later_event_done(struct later_event *e)
{
    pthread_mutex_lock(&lock);
    bool done = e->happened >= e->asked;

    pthread_mutex_unlock(&lock);
    return done;
}

void later_event_sync(struct later_event *e)
{
    pthread_mutex_lock(&lock);
    while (e->happened < e->asked)
        pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
}

uint64_t later_event_ns(struct later_event *e)
{
    pthread_mutex_lock(&lock);
    uint64_t at = e->at_ns;

    pthread_mutex_unlock(&lock);
    return at;
}
