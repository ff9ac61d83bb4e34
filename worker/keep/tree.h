/* worker/keep/tree.h - the processes below one, and how they are ended
 *
 * A session or a group is not enough: engines call setsid for their children. So the walk follows
 * parents through /proc, and each process is signalled through a pidfd after a second look at its
 * start time, for its number may have passed on meanwhile. Shared by keeper and daemon.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tree_stat { /* the fields of /proc/PID/stat that matter here */
    int pid, ppid, sid;
    char state; /* 'Z': a zombie is not alive */
    uint64_t start_time;
};
bool tree_stat(int pid, struct tree_stat *out); /* false: gone */

/* Which processes: all below root, root itself not; and those that mark() holds for, with all
 * below them. mark NULL: none. */
struct tree_pick {
    int root;
    bool (*mark)(const struct tree_stat *p, const void *arg);
    const void *arg;
};
/* One look and one signal each: how many live processes were found (not how many took it). sig 0
 * only counts. The caller itself is never meant. */
unsigned tree_signal(const struct tree_pick *pick, int sig);
