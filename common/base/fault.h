/* common/base/fault.h - places that a test can make fail
 *
 * FURLONG_FAULT=name:nth=fail|kill|stop[,...] in the environment of any process: the nth time that
 * FL_FAULT(name) is met there it is true, or the process kills or stops itself. With
 * FURLONG_FAULT_DIR each entry happens once over all processes that share that folder, so a process
 * that is started again is spared; it leaves a file `name:nth` that holds the pid. */
#pragma once
#include "common/base/base.h"

extern atomic_int fl_fault_state_; /* 0: nothing is set anywhere, the common case */
bool fl_fault_met(const char *name);

/* True when this place must fail; errno is EIO then. */
#define FL_FAULT(name)                                                                            \
    (__builtin_expect(atomic_load_explicit(&fl_fault_state_, memory_order_relaxed) != 0, 0) &&    \
     fl_fault_met(name))

/* For main(): says what is wrong with FURLONG_FAULT. Without it the first FL_FAULT reads it. */
enum fl_status fl_fault_env(struct fl_err *err);
enum fl_status fl_fault_set(const char *spec, struct fl_err *err); /* replaces all; "" or NULL: none */

/* The sweep: the nth place met from now on fails, whatever its name. */
void fl_fault_arm(unsigned nth);
bool fl_fault_disarm(void); /* true: the armed place was met */
/* The sweep passes over this thread while it stands in for somebody else. Returns whether it did. */
bool fl_fault_spare(bool spare);
