/* worker/proc/keeper_priv.h - what proc_keeper and its tests share */
#pragma once
#include "worker/proc/proc.h"

#define PROC_KEEPER_LOG "keep.log" /* in the worker's folder: what a keeper complains about */

/* "FURLONG_WORKER=<first 16 hex>-<attempt>": every process of the tree is born with it. */
void proc_mark(char *out, size_t cap, const struct fl_seat_ref *who);
enum fl_status proc_spec_write(const struct proc_spec *s, const char *mark, struct fl_err *err);
enum fl_status proc_spec_who(const char *dir, struct fl_seat_ref *who, uint32_t *kill_ms,
                             struct fl_err *err);
/* The keeper of s->dir/spec, in its own session; *control_fd is the daemon's end of its control
 * socket. */
enum fl_status proc_spawn(const struct proc_spec *s, const char *mark, int *pid, int *control_fd,
                          struct fl_err *err);
void proc_say_group(
    const char *group); /* once a process: in which cgroup workers run, or why in none */
