/* common/gpu/later.h - the fake's streams as a device's: what they are given happens later
 *
 * FURLONG_GPU_FAKE_ASYNC=US: a thread for each stream, which begins each thing US microseconds
 * after it could. Copies to and from the program's own memory are no exception: a device that
 * reaches it reads it when it comes to it. What is given back too early, or read before it was
 * waited for, is seen by tests. Without it everything has happened when the call returns. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

bool later_on(void);
struct later;                              /* one stream */
struct later *later_create(size_t device); /* NULL: no memory, no thread */
void later_end(struct later *s);           /* at once; what it has been given still happens */
void later_sync(struct later *s);          /* until it has happened */
void later_sync_all(size_t device);        /* of all streams of the device */
/* run(arg), in its turn; LATER_ARG bytes of arg are copied. false: no memory. */
enum { LATER_ARG = 64 };
bool later_do(struct later *s, void (*run)(void *arg), const void *arg, size_t bytes);

struct later_event;
struct later_event *later_event_create(void);
void later_event_free(struct later_event *e); /* streams that wait for it keep it */
bool later_record(struct later *s, struct later_event *e);
bool later_wait(struct later *s, struct later_event *e); /* the stream waits */
bool later_event_done(struct later_event *e);            /* or was never recorded */
void later_event_sync(struct later_event *e);
uint64_t later_event_ns(struct later_event *e);
