#pragma once
#include "common/base/base.h"

/* ==== common/base/loop.h: one thread owns the state ============================================
 * One file over epoll, an eventfd and a heap, for daemons, libfurlong and the Python module alike.
 * All is cancelled at once: after _cancel or _destroy returns, the callback does not run, not even
 * later in this turn, and the memory may go.
 * A turn: ready descriptors, posted tasks, due timers, deferred tasks. */
struct fl_loop;
struct fl_clock { uint64_t (*now_ns)(void *arg); void *arg; };

enum fl_status fl_loop_create(const struct fl_clock *clock, /* NULL: CLOCK_BOOTTIME */
                              struct fl_loop **out, struct fl_err *err);
void fl_loop_run(struct fl_loop *l); /* until stopped and every tag in flight is back */
void fl_loop_stop(struct fl_loop *l); /* any thread */
/* Whatever was posted, held or is still on the pool comes back before it returns; NULL is fine. */
void fl_loop_destroy(struct fl_loop *l);
uint64_t fl_loop_now_ns(const struct fl_loop *l); /* read once a turn */
uint64_t fl_clock_boot_ns(void);                  /* CLOCK_BOOTTIME, now   */

/* One turn for those who drive the loop themselves: waits up to wait_ms for something to do (-1: as
 * long as it takes, 0: not at all). Returns how many callbacks ran. */
unsigned fl_loop_turn(struct fl_loop *l, int wait_ms);

/* For so long from now on turns do not sleep but let others run: what is awaited comes sooner than
 * this core would wake (88 us where it was measured). Never shortens what was asked before; no more than
 * FL_AWAKE_MAX_NS at a time; nothing with a clock of one's own. Loop thread. */
enum { FL_AWAKE_MAX_NS = 2000000 };
void fl_loop_awake(struct fl_loop *l, uint64_t for_ns);

/* A tag given to somebody who brings it back by fl_post: fl_loop_run waits for it. Loop thread. */
void fl_loop_hold(struct fl_loop *l);
void fl_loop_release(struct fl_loop *l);

/* A clock that stands until it is moved: tests let an hour pass without waiting for it. */
struct fl_held_clock { uint64_t now_ns; };
struct fl_clock fl_held_clock(struct fl_held_clock *h);
/* Moves h by by_ns through every timer that falls due on the way, each at its own time. */
void fl_loop_pass(struct fl_loop *l, struct fl_held_clock *h, uint64_t by_ns);

struct fl_task { /* embed it; container_of finds the owner */
    struct fl_task *next;
    atomic_bool queued;
    void (*run)(struct fl_task *t);
};
bool fl_post(struct fl_loop *l, struct fl_task *t);  /* any thread; false: is queued already     */
/* The same for a chain linked by next, first to run first, none of them queued: one wake at most. */
void fl_post_chain(struct fl_loop *l, struct fl_task *first);
/* End of this turn: where batches are sent. Loop thread. Deferred by a deferred task: next turn. */
void fl_defer(struct fl_loop *l, struct fl_task *t);
/* Loop thread: does not run any more. For tasks that no other thread can be posting at this time. */
void fl_task_cancel(struct fl_loop *l, struct fl_task *t);

struct fl_timer { /* embed it, zeroed; the heap lies in the timers, so arming cannot fail */
    struct fl_loop *loop; /* NULL while idle */
    struct fl_timer *child, *next, *prev;
    uint64_t due_ns, seq; /* seq: the same due time fires in the order of arming */
    void (*fire)(struct fl_timer *t, uint64_t now_ns);
    bool due; /* on the list of this turn, no longer in the heap */
};
void fl_timer_arm(struct fl_loop *l, struct fl_timer *t, uint64_t due_ns); /* again: moves it */
void fl_timer_arm_in(struct fl_loop *l, struct fl_timer *t, uint64_t in_ms); /* from this turn on */
void fl_timer_cancel(struct fl_timer *t);                                  /* idle is fine    */

struct fl_watch; /* readiness of a descriptor that stays the caller's */
enum fl_status fl_watch_create(struct fl_loop *l, int fd, unsigned poll_events,
                               void (*ready)(void *arg, unsigned poll_events), void *arg,
                               struct fl_watch **out, struct fl_err *err);
void fl_watch_events(struct fl_watch *w, unsigned poll_events); /* 0: silent, hang-up included */
void fl_watch_destroy(struct fl_watch *w);

struct fl_work { /* what blocks: file digests, unpacking, name lookup; on a pool thread */
    struct fl_task back;
    struct fl_loop *loop; /* NULL while idle */
    enum fl_status st;
    void (*work)(struct fl_work *w);                    /* pool thread; touches *w alone */
    void (*done)(struct fl_work *w, enum fl_status st); /* loop thread, exactly once     */
};
/* st of done: FL_OK: work ran; FL_CANCELLED: not begun when the loop was destroyed; FL_EXHAUSTED:
 * no thread could be made. The loop holds it, as fl_loop_hold. */
void fl_work_start(struct fl_loop *l, struct fl_work *w);

/* Signals as events, for daemons: blocked in the calling thread (start no other thread before) and
 * in those that it starts, unblocked again by destroy. */
struct fl_signals;
enum fl_status fl_signals_create(struct fl_loop *l, const int *signals, size_t n,
                                 void (*got)(void *arg, int signal, int from_pid), void *arg,
                                 struct fl_signals **out, struct fl_err *err);
void fl_signals_destroy(struct fl_signals *s);
