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
void fl_loop_stop(struct fl_loop *l);
void fl_loop_destroy(struct fl_loop *l);
uint64_t fl_loop_now_ns(const struct fl_loop *l); /* read once a turn */

struct fl_task { /* embed it; container_of finds the owner */
    struct fl_task *next;
    atomic_bool queued;
    void (*run)(struct fl_task *t);
};
bool fl_post(struct fl_loop *l, struct fl_task *t);  /* any thread; false: is queued already     */
void fl_defer(struct fl_loop *l, struct fl_task *t); /* end of this turn: where batches are sent */

struct fl_timer {
    struct fl_loop *loop; /* NULL while idle */
    size_t heap_slot;
    uint64_t due_ns;
    void (*fire)(struct fl_timer *t, uint64_t now_ns);
};
void fl_timer_arm(struct fl_loop *l, struct fl_timer *t, uint64_t due_ns); /* again: moves it */
void fl_timer_cancel(struct fl_timer *t);                                  /* idle is fine    */

struct fl_watch; /* readiness of a descriptor that stays the caller's */
enum fl_status fl_watch_create(struct fl_loop *l, int fd, unsigned poll_events,
                               void (*ready)(void *arg, unsigned poll_events), void *arg,
                               struct fl_watch **out, struct fl_err *err);
void fl_watch_events(struct fl_watch *w, unsigned poll_events);
void fl_watch_destroy(struct fl_watch *w);

struct fl_work { /* what blocks: file digests, unpacking, name lookup; on a pool thread */
    struct fl_task back;
    void (*work)(struct fl_work *w);                    /* pool thread; touches *w alone */
    void (*done)(struct fl_work *w, enum fl_status st); /* loop thread, exactly once     */
};
void fl_work_start(struct fl_loop *l, struct fl_work *w);

/* One wait on several parties: one deadline, one outcome, one sentence about who is late. All waits
 * on more than one peer go through it, so that no message can forget rank, host and phase. */
struct fl_muster;
enum fl_status fl_muster_create(struct fl_loop *l, const char *what, unsigned parties,
                                uint64_t due_ns,
                                void (*over)(void *arg, enum fl_status st, const struct fl_err *e),
                                void *arg, struct fl_muster **out, struct fl_err *err);
void fl_muster_name(struct fl_muster *m, unsigned i, const char *fmt, ...)
    __attribute__((format(printf, 3, 4))); /* "rank 3 on gpu-b" */
void fl_muster_at(struct fl_muster *m, unsigned i, const char *fmt, ...)
    __attribute__((format(printf, 3, 4))); /* "staging, bucket 17 of 33" */
void fl_muster_in(struct fl_muster *m, unsigned i, enum fl_status st, const struct fl_err *err);
void fl_muster_excuse(struct fl_muster *m, unsigned i); /* dead: no longer waited for */
void fl_muster_destroy(struct fl_muster *m);

