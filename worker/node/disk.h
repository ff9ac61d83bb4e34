/* worker/node/disk.h - how much room a file system has, asked of it on a thread of its own
 *
 * A file system whose server is gone answers never. The pool's threads are waited for when the loop
 * ends, this one is waited for by nobody: it is left behind together with what it touches. */
#pragma once
#include <sys/statvfs.h>

#include "common/base/base.h"
#include "node.pb-c.h"

enum { NODE_DISK_LATE_MS = 5000 }; /* without an answer for so long, what was known is not told */

struct node_disk;
enum fl_status node_disk_create(const char *path, int (*ask)(const char *path, struct statvfs *v),
                                struct node_disk **out, struct fl_err *err);
/* Asks anew, unless an answer is still awaited. Never waits, as the next one. */
void node_disk_look(struct node_disk *d, uint64_t now_ns);
/* What was answered last; absent where nothing was, or where the next answer is late. */
void node_disk_fill(struct node_disk *d, uint64_t now_ns, Fl__NodeStats *out);
void node_disk_destroy(struct node_disk *d); /* NULL is fine */
