/* common/base/muster.h - one wait on several parties
 *
 * One deadline, one outcome, one sentence about who is late. All waits on more than one peer go
 * through it, so that no message can forget rank, host and phase. */
#pragma once
#include "common/base/loop.h"

/* over runs once, from the loop, never from inside a call below:
 *   FL_OK           all are in with FL_OK, but for those excused
 *   FL_TIMEOUT      the deadline came; the text names who is late and where they were last
 *   FL_UNREACHABLE  all were excused
 *   else            the first failure that came in, once all have answered (or see _hasty)
 * due_ns 0: no deadline. Afterwards whatever is told to it changes nothing. */
struct fl_muster;
enum fl_status fl_muster_create(struct fl_loop *l, const char *what, unsigned parties,
                                uint64_t due_ns,
                                void (*over)(void *arg, enum fl_status st, const struct fl_err *e),
                                void *arg, struct fl_muster **out, struct fl_err *err);
void fl_muster_name(struct fl_muster *m, unsigned i, const char *fmt, ...)
    __attribute__((format(printf, 3, 4))); /* "rank 3 on gpu-b" */
void fl_muster_at(struct fl_muster *m, unsigned i, const char *fmt, ...)
    __attribute__((format(printf, 3, 4))); /* "staging, bucket 17 of 33" */
/* Counts once; err may be NULL when st is FL_OK. */
void fl_muster_in(struct fl_muster *m, unsigned i, enum fl_status st, const struct fl_err *err);
void fl_muster_excuse(struct fl_muster *m, unsigned i); /* dead: no longer waited for */
/* The first failure ends it: where the others cannot come in without the one that failed. */
void fl_muster_hasty(struct fl_muster *m);
/* FL_AGAIN: still waited for; FL_UNREACHABLE: excused; else what it came in with */
enum fl_status fl_muster_status(const struct fl_muster *m, unsigned i);
void fl_muster_destroy(struct fl_muster *m); /* over does not run any more; NULL is fine */
