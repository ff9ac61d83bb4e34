/* worker/client/watch.h - metrics, progress and step records on their way to the daemon and the
 * head
 *
 * The program's threads leave them in a table and never wait; the loop sends. */
#pragma once
#include "worker/client/client.h"

enum {
    CLIENT_METRICS = 256,
    CLIENT_METRIC_NAME = 128,
    CLIENT_STEPS = 1024,
    CLIENT_STEP_MAX = 1 << 20
};
enum fl_status client_watch_open(struct furlong *f, struct fl_err *err);
void client_watch_up(struct furlong *f); /* loop: the daemon is there again */
/* A program's thread: until no record waits for the head, or wait_ms. */
void client_watch_drain(struct furlong *f, uint32_t wait_ms);
void client_watch_stop(struct furlong *f); /* loop thread */
void client_watch_free(struct furlong *f); /* the loop has ended; NULL is fine */
