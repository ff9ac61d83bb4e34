/* worker/keep/group.h - the cgroup of one worker's tree, where the machine lets us have one
 *
 * A leaf of our own below the cgroup that we run in: v2 for cgroup.kill, else the v1 freezer; the
 * memory limit in whichever of the two has the memory controller. Read-only or absent: none, with
 * the reason, and the tree is then ended through its parents alone. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct group {
    char unified[256], freezer[256], memory[256]; /* folders of the leaf; "": none */
    bool memory_v2;
    char text[160]; /* "v2", "v1 freezer", "none: mkdir ...: Read-only file system" */
};
void group_make(struct group *g, const char *name, uint64_t memory_max_bytes);
void group_enter(const struct group *g); /* the calling process; between fork and exec */
/* SIGKILL to all members; false: this group cannot, walk the tree. */
bool group_kill(const struct group *g);
uint64_t group_oom_kills(const struct group *g); /* by its own limit */
void group_remove(struct group *g);
/* For whoever comes after a keeper that was killed: the leaves of that name, if they are there. */
void group_find(struct group *g, const char *name);
/* Our own folder in the hierarchy with that controller ("": v2), wherever that is mounted. */
bool group_own_folder(const char *controller, char *out, size_t cap);
