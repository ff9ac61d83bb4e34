/* worker/client/sync.h - a program's thread lets the loop do something and waits for it */
#pragma once
#include <pthread.h>
#include "common/base/base.h"
#include "common/base/loop.h"

struct client_sync { /* on the waiting thread's stack; begin() on the loop, then once end() */
    struct fl_task task;
    void (*begin)(struct client_sync *s);
    pthread_mutex_t mu;
    pthread_cond_t over_cond;
    bool over;
    enum fl_status st;
    struct fl_err err;
};
/* Returns what end() was given; whatever *s is embedded in is untouched by the loop from then
 * on. */
enum fl_status client_sync_run(struct fl_loop *l, struct client_sync *s,
                               void (*begin)(struct client_sync *s), struct fl_err *err);
void client_sync_end(struct client_sync *s, enum fl_status st, const struct fl_err *err);

void client_cond_init(pthread_cond_t *c); /* on CLOCK_MONOTONIC */
struct timespec client_until(uint32_t wait_ms);
/* Waits; false: the time is over. FURLONG_FOREVER waits for good. mu is held. */
bool client_cond_wait(pthread_cond_t *c, pthread_mutex_t *mu, uint32_t wait_ms,
                      const struct timespec *until);
