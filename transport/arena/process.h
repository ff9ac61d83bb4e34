/* transport/arena/process.h - the arenas of this process: one a device, whoever asks first makes it
 *
 * PyTorch's allocator, the weights and the program's own allocations must lie in one arena, or an
 * offload by tag would miss some. They last as long as the process: others may still use their
 * memory while it ends. Any thread. */
#pragma once
#include "transport/arena/arena.h"

/* Chunks are as large as FURLONG_ARENA_WEIGHTS_CHUNK (of weights; default 256MiB) and
 * FURLONG_ARENA_CHUNK (64MiB) say. FL_UNSUPPORTED: no driver. FL_NOT_FOUND: no such device in this
 * process. FL_INVALID: a variable holds no size. */
enum fl_status arena_of_device(const char *uuid, struct arena **out, struct fl_err *err);
/* FL_UNSUPPORTED: in the child of a fork. The functions that give an err ask it themselves. */
enum fl_status arena_here(struct fl_err *err);
size_t arena_of_each(struct arena **out, size_t room); /* those that there are; how many */

/* arena_keep() for each, and for those that come. */
enum fl_status arena_keep_all(uint32_t tags, enum furlong_keep how, const char *folder,
                              struct fl_err *err);
/* Where FURLONG_KEEP_DISK writes, until arena_keep_all() names another; for arenas that come. */
enum fl_status arena_folder_all(const char *folder, struct fl_err *err);
/* Before memory goes that kernels may still be using: all that this process has given the devices
 * of its arenas has run. None: nothing. */
enum fl_status arena_wait_all(struct fl_err *err);
/* As arena_offload() and _onload(), over each; sums. On failure of one the others have moved. */
enum fl_status arena_offload_all(uint32_t tags, struct arena_moved *out, struct fl_err *err);
enum fl_status arena_onload_all(uint32_t tags, struct arena_moved *out, struct fl_err *err);
void arena_moved_add(struct arena_moved *sum, const struct arena_moved *m);
