#include "common/base/loop_priv.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "common/base/fault.h"

struct fl_watch {
    struct fl_loop *loop; /* NULL: the loop went first */
    struct fl_watch *next, *prev;
    int fd;
    unsigned events;
    void (*ready)(void *arg, unsigned poll_events);
    void *arg;
};

_Static_assert(EPOLLIN == POLLIN && EPOLLOUT == POLLOUT && EPOLLERR == POLLERR &&
                   EPOLLHUP == POLLHUP && EPOLLPRI == POLLPRI && EPOLLRDHUP == POLLRDHUP,
               "poll's bits are epoll's");

/* The loop whose turn runs on this thread: posting to it needs no wake, it looks before it sleeps.
 */
static _Thread_local struct fl_loop *turning;

uint64_t fl_clock_boot_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_BOOTTIME, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static uint64_t boot_now(void *arg)
{
    (void)arg;
    return fl_clock_boot_ns();
}

static uint64_t held_now(void *arg)
{
    return ((struct fl_held_clock *)arg)->now_ns;
}

struct fl_clock fl_held_clock(struct fl_held_clock *h)
{
    return (struct fl_clock){ held_now, h };
}

void fl_loop_refresh(struct fl_loop *l)
{
    l->now_ns = l->clock.now_ns(l->clock.arg);
}

uint64_t fl_loop_now_ns(const struct fl_loop *l)
{
    return l->now_ns;
}

enum fl_status fl_loop_create(const struct fl_clock *clock, struct fl_loop **out,
                              struct fl_err *err)
{
    struct fl_loop *l = calloc(1, sizeof(*l));

    if (!l)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a loop");
    l->clock = clock ? *clock : (struct fl_clock){ boot_now, NULL };
    l->wake_fd = -1;
    l->epoll_fd = FL_FAULT("base.epoll") ? -1 : epoll_create1(EPOLL_CLOEXEC);
    if (l->epoll_fd >= 0 && !FL_FAULT("base.eventfd"))
        l->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    /* Edge-triggered: each write is one event and nobody has to read the counter back. */
    struct epoll_event ev = { .events = EPOLLIN | EPOLLET, .data.ptr = NULL };

    if (l->wake_fd < 0 || FL_FAULT("base.wake") ||
        epoll_ctl(l->epoll_fd, EPOLL_CTL_ADD, l->wake_fd, &ev) < 0) {
        enum fl_status st = fl_fail_errno(err, "descriptors of a loop");

        if (l->wake_fd >= 0)
            close(l->wake_fd);
        if (l->epoll_fd >= 0)
            close(l->epoll_fd);
        free(l);
        return st;
    }
    fl_pool_init(l);
    fl_loop_refresh(l);
    *out = l;
    return FL_OK;
}

/* ---- tasks ---- */

static void list_add(struct fl_task_list *q, struct fl_task *t)
{
    t->next = NULL;
    if (q->first)
        q->last->next = t;
    else
        q->first = t;
    q->last = t;
}

static struct fl_task *list_pop(struct fl_task_list *q)
{
    struct fl_task *t = q->first;

    if (t)
        q->first = t->next;
    return t;
}

static bool list_drop(struct fl_task_list *q, struct fl_task *t)
{
    struct fl_task *before = NULL;

    for (struct fl_task *x = q->first; x; before = x, x = x->next) {
        if (x != t)
            continue;
        if (before)
            before->next = t->next;
        else
            q->first = t->next;
        if (q->last == t)
            q->last = before;
        return true;
    }
    return false;
}

static void wake(struct fl_loop *l)
{
    static const uint64_t one = 1;

    if (turning == l)
        return;
    while (write(l->wake_fd, &one, sizeof(one)) < 0 && errno == EINTR)
        ;
}

/* newest ... oldest, oldest->next is overwritten. Whoever finds the mailbox empty wakes the loop:
 * one write a burst. After the push the loop may run and free the tasks. */
static void mailbox_push(struct fl_loop *l, struct fl_task *newest, struct fl_task *oldest)
{
    struct fl_task *head = atomic_load_explicit(&l->mailbox, memory_order_relaxed);

    do
        oldest->next = head;
    while (!atomic_compare_exchange_weak_explicit(&l->mailbox, &head, newest, memory_order_seq_cst,
                                                  memory_order_relaxed));
    if (!head)
        wake(l);
}

bool fl_post(struct fl_loop *l, struct fl_task *t)
{
    if (atomic_exchange_explicit(&t->queued, true, memory_order_acq_rel))
        return false;
    mailbox_push(l, t, t);
    return true;
}

void fl_post_chain(struct fl_loop *l, struct fl_task *first)
{
    struct fl_task *newest = NULL, *oldest = first;

    while (first) {
        struct fl_task *next = first->next;

        atomic_store_explicit(&first->queued, true, memory_order_relaxed);
        first->next = newest;
        newest = first;
        first = next;
    }
    if (newest)
        mailbox_push(l, newest, oldest);
}

/* The mailbox holds the last one first: turned round behind what was taken before. */
static void mailbox_take(struct fl_loop *l)
{
    struct fl_task *newest = atomic_exchange_explicit(&l->mailbox, NULL, memory_order_seq_cst);
    struct fl_task *first = NULL, *last = newest;

    while (newest) {
        struct fl_task *older = newest->next;

        newest->next = first;
        first = newest;
        newest = older;
    }
    if (!first)
        return;
    if (l->posted.first)
        l->posted.last->next = first;
    else
        l->posted.first = first;
    l->posted.last = last;
}

void fl_defer(struct fl_loop *l, struct fl_task *t)
{
    if (!atomic_exchange_explicit(&t->queued, true, memory_order_acq_rel))
        list_add(&l->deferred, t);
}

void fl_task_cancel(struct fl_loop *l, struct fl_task *t)
{
    if (!atomic_load_explicit(&t->queued, memory_order_acquire))
        return;
    mailbox_take(l);
    bool found =
        list_drop(&l->posted, t) || list_drop(&l->deferred, t) || list_drop(&l->deferred_now, t);
    assert(found); /* else another thread is posting it right now */
    (void)found;
    atomic_store_explicit(&t->queued, false, memory_order_release);
}

static unsigned tasks_run(struct fl_task_list *q)
{
    struct fl_task *t;
    unsigned ran = 0;

    while ((t = list_pop(q))) {
        atomic_store_explicit(&t->queued, false, memory_order_release);
        t->run(t);
        ran++;
    }
    return ran;
}

/* Only what is there by now: a task that posts itself again gives the descriptors a turn first. A
 * cancel in between may take more out of the mailbox, so the count and not the end is the bound. */
static unsigned posted_run(struct fl_loop *l)
{
    mailbox_take(l);
    struct fl_task *last = l->posted.last, *t;
    unsigned ran = 0;

    while ((t = list_pop(&l->posted))) {
        bool end = t == last;

        atomic_store_explicit(&t->queued, false, memory_order_release);
        t->run(t);
        ran++;
        if (end)
            break;
    }
    return ran;
}

static unsigned deferred_run(struct fl_loop *l)
{
    l->deferred_now = l->deferred;
    l->deferred = (struct fl_task_list){ 0 };
    return tasks_run(&l->deferred_now);
}

/* ---- watches ---- */

enum fl_status fl_watch_create(struct fl_loop *l, int fd, unsigned poll_events,
                               void (*ready)(void *arg, unsigned poll_events), void *arg,
                               struct fl_watch **out, struct fl_err *err)
{
    struct fl_watch *w = malloc(sizeof(*w));

    if (!w)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a watch");
    *w = (struct fl_watch){ .fd = fd, .events = poll_events, .ready = ready, .arg = arg };
    struct epoll_event ev = { .events = poll_events ? poll_events : EPOLLET, .data.ptr = w };

    if (FL_FAULT("base.watch") || epoll_ctl(l->epoll_fd, EPOLL_CTL_ADD, fd, &ev) < 0) {
        enum fl_status st = fl_fail_errno(err, "watch descriptor %d", fd);

        free(w);
        return st;
    }
    w->loop = l;
    w->next = l->watches;
    if (w->next)
        w->next->prev = w;
    l->watches = w;
    *out = w;
    return FL_OK;
}

/* Errors and hang-ups are reported by epoll whether asked for or not, over and over. Edge-triggered
 * with nothing asked for they come once at most, and the turn drops that one. */
void fl_watch_events(struct fl_watch *w, unsigned poll_events)
{
    struct epoll_event ev = { .events = poll_events ? poll_events : EPOLLET, .data.ptr = w };

    if (!w->loop || w->events == poll_events)
        return;
    w->events = poll_events;
    int rc = epoll_ctl(w->loop->epoll_fd, EPOLL_CTL_MOD, w->fd, &ev);
    assert(rc == 0); /* the descriptor was closed before its watch */
    (void)rc;
}

void fl_watch_destroy(struct fl_watch *w)
{
    if (!w)
        return;
    struct fl_loop *l = w->loop;

    if (l) {
        epoll_ctl(l->epoll_fd, EPOLL_CTL_DEL, w->fd, NULL);
        for (int i = l->at_event; i < l->n_events; i++)
            if (l->events[i].data.ptr == w)
                l->events[i].data.ptr = NULL; /* was ready too, later in this turn */
        if (w->prev)
            w->prev->next = w->next;
        else
            l->watches = w->next;
        if (w->next)
            w->next->prev = w->prev;
    }
    free(w);
}

static unsigned watches_run(struct fl_loop *l)
{
    unsigned ran = 0;

    for (l->at_event = 0; l->at_event < l->n_events;) {
        struct epoll_event *ev = &l->events[l->at_event++];
        struct fl_watch *w = ev->data.ptr;

        if (!w || !w->events) /* the wake, one destroyed meanwhile, or one set silent */
            continue;
        unsigned what = ev->events & (w->events | EPOLLERR | EPOLLHUP);

        if (!what)
            continue;
        w->ready(w->arg, what);
        ran++;
    }
    l->n_events = l->at_event = 0;
    return ran;
}

/* ---- turns ---- */

static int epoll_sleep(struct fl_loop *l, uint64_t ns)
{
    if (!l->no_pwait2) {
        struct timespec ts = { (time_t)(ns / 1000000000u), (long)(ns % 1000000000u) };
        int n =
            epoll_pwait2(l->epoll_fd, l->events, LOOP_EVENTS, ns == UINT64_MAX ? NULL : &ts, NULL);

        if (n >= 0 || errno != ENOSYS)
            return n;
        l->no_pwait2 = true;
    }
    /* rounded up: a timer never finds itself early */
    int ms = ns == UINT64_MAX ? -1 : ns > 3600000000000u ? 3600000 : (int)((ns + 999999) / 1000000);

    return epoll_wait(l->epoll_fd, l->events, LOOP_EVENTS, ms);
}

void fl_loop_awake(struct fl_loop *l, uint64_t for_ns)
{
    uint64_t until = fl_clock_boot_ns() + (for_ns < FL_AWAKE_MAX_NS ? for_ns : FL_AWAKE_MAX_NS);

    if (l->clock.now_ns == boot_now && until > l->awake_until_ns)
        l->awake_until_ns = until;
}

static void loop_sleep(struct fl_loop *l, int wait_ms)
{
    uint64_t ns = wait_ms < 0 ? UINT64_MAX : (uint64_t)wait_ms * 1000000u, due;

    fl_loop_refresh(l);
    if (fl_timers_next(l, &due)) {
        uint64_t left = due > l->now_ns ? due - l->now_ns : 0;

        ns = left < ns ? left : ns;
    }
    bool awake = ns && l->awake_until_ns > l->now_ns;

    if (awake || l->deferred.first || l->posted.first || atomic_load(&l->mailbox))
        ns = 0;
    int n = epoll_sleep(l, ns);

    assert(n >= 0 || errno == EINTR);
    l->n_events = n < 0 ? 0 : n;
    if (awake && n == 0)
        sched_yield(); /* whoever is to answer may need this core */
    fl_loop_refresh(l);
}

unsigned fl_loop_turn(struct fl_loop *l, int wait_ms)
{
    struct fl_loop *outer = turning;
    unsigned ran = 0;

    assert(outer != l); /* a callback may not turn its own loop */
    turning = l;
    loop_sleep(l, wait_ms);
    ran += watches_run(l);
    ran += posted_run(l);
    ran += fl_timers_fire(l);
    ran += deferred_run(l);
    turning = outer;
    return ran;
}

void fl_loop_run(struct fl_loop *l)
{
    while (!atomic_load(&l->stop) || l->holds)
        fl_loop_turn(l, -1);
    atomic_store(&l->stop, false);
}

void fl_loop_stop(struct fl_loop *l)
{
    atomic_store(&l->stop, true);
    wake(l);
}

void fl_loop_hold(struct fl_loop *l)
{
    l->holds++;
}

void fl_loop_release(struct fl_loop *l)
{
    assert(l->holds);
    l->holds--;
}

void fl_loop_pass(struct fl_loop *l, struct fl_held_clock *h, uint64_t by_ns)
{
    uint64_t end = h->now_ns + by_ns, due;

    while (fl_timers_next(l, &due) && due <= end) {
        h->now_ns = due > h->now_ns ? due : h->now_ns;
        fl_loop_turn(l, 0);
    }
    h->now_ns = end;
    fl_loop_turn(l, 0);
}

void fl_loop_destroy(struct fl_loop *l)
{
    if (!l)
        return;
    fl_pool_fini(l);
    while (l->holds) /* tags that others bring back: not one may find the loop gone */
        fl_loop_turn(l, -1);
    turning = l; /* no wakes any more */
    do {
        mailbox_take(l);
        tasks_run(&l->posted);
        deferred_run(l);
    } while (l->deferred.first || atomic_load(&l->mailbox));
    turning = NULL;
    fl_timers_forget(l);
    for (struct fl_watch *w = l->watches; w; w = w->next)
        w->loop = NULL; /* its owner still destroys it */
    close(l->wake_fd);
    close(l->epoll_fd);
    free(l);
}
