/* worker/proc/lost.h - ends the tree of a worker whose keeper was killed
 *
 * Nobody is its parent any more, so it is found by its cgroup, by the session that the keeper led,
 * and by PROC_MARK in the environment that every process of it was born with; and all below those.
 */
#pragma once
#include "worker/proc/proc.h"

#define PROC_MARK "FURLONG_WORKER" /* =<first 16 hex of the worker id>-<attempt> */

struct proc_lost;
/* Signals, looks, until two looks find nobody or due is over; then over() once, from the loop.
 * left: those that stayed. dir: the worker's folder, its last part names the cgroup. */
enum fl_status proc_lost_start(struct fl_loop *l, const char *dir, const char *mark, int keeper_pid,
                               uint64_t due_ns,
                               void (*over)(void *arg, unsigned ended, unsigned left), void *arg,
                               struct proc_lost **out, struct fl_err *err);
void proc_lost_destroy(struct proc_lost *x);
