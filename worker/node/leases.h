/* worker/node/leases.h - what this node has promised of itself
 *
 * PREPARED ends by itself hold_ms after it came, counted here. COMMITTED is on disk before it is
 * answered, and ends by release alone; what runs on it goes first. */
#pragma once
#include "common/base/loop.h"
#include "node.pb-c.h"

enum { LEASES_MAX = 4096, LEASE_PORTS_MAX = 64 };
struct leases;
struct leases_config {
    const char *path;                     /* of the file with the committed ones; copied */
    const Fl__Inventory *inventory;       /* the bound; stays the caller's               */
    bool (*used)(void *arg, uint64_t id); /* does a worker run on it?                    */
    void *arg;
};
/* Reads what an earlier start had committed; a damaged file is FL_CORRUPT. */
enum fl_status node_leases_create(struct fl_loop *l, const struct leases_config *cfg,
                                  struct leases **out, struct fl_err *err);
void node_leases_destroy(struct leases *s); /* the file stays; NULL is fine */

/* All of m, or none. FL_STALE: by a head before highest, or for another start than me. FL_INVALID:
 * a device or amount that this node does not have. FL_EXHAUSTED: taken; err has the numbers. Asked
 * again for the same ids: the hold starts anew. */
enum fl_status node_leases_prepare(struct leases *s, const Fl__LeasePrepare *m,
                                   const struct fl_term *highest, const struct fl_node_ref *me,
                                   struct fl_err *err);
/* FL_NOT_FOUND: one of them is not held (any more); then none is committed. */
enum fl_status node_leases_commit(struct leases *s, const uint64_t *ids, size_t n,
                                  struct fl_err *err);
/* Marks it; it goes when nothing uses it, by node_leases_sweep(). Unknown: nothing. */
void node_leases_release(struct leases *s, uint64_t id);
void node_leases_sweep(struct leases *s);
void node_leases_clear(struct leases *s); /* fenced: all of them, used or not */
bool node_leases_has(const struct leases *s, uint64_t id);
bool node_leases_committed(const struct leases *s, uint64_t id);
size_t node_leases_count(const struct leases *s);
/* Borrowed until the next change. */
Fl__Lease *const *node_leases_list(const struct leases *s, size_t *n);
