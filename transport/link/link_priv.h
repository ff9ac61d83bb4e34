/* transport/link/link_priv.h - what the links share */
#pragma once
#include "transport/link/link.h"

struct link { /* in each kind's own struct */
    struct fl_loop *loop;
    struct fl_task tell; /* brings back the two below, which are not in flight anywhere else */
    struct link_op *ready, *quiet;
};
void link_tell_ready(struct link *k, struct link_op *ready);
void link_tell_quiet(struct link *k, struct link_op *quiet);
void link_tell_now(struct link *k); /* by close: what was told and has not been heard yet */

/* Memory that link_mem_alloc() made: link_mem.impl of the owner. */
struct link_block {
    uint32_t magic;
    int fd;
    uint64_t bytes; /* of the file: whole pages */
};
const struct link_block *link_block_of(const struct link_mem *mem); /* NULL: not of ours */

enum { LINK_STEP_BYTES = 1 << 20 }; /* looked at between two of them: is this still wanted? */

/* Sets the outcome, any thread; then link_op_end() posts it. */
void link_op_set(struct link_op *op, enum fl_status st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void link_op_end(struct fl_loop *l, struct link_op *op);

/* FL_INVALID names the first segment that leaves its memory. *bytes: all that will be moved. */
enum fl_status link_check_segs(const struct link_seg *segs, size_t n, uint64_t from_bytes,
                               uint64_t to_bytes, uint64_t *bytes, struct fl_err *err);
/* The offsets of one side alone. */
enum fl_status link_check_side(const struct link_seg *segs, size_t n, uint64_t room, bool from,
                               uint64_t *bytes, struct fl_err *err);

/* Entries for what a link cannot: FL_UNSUPPORTED. */
enum fl_status link_no_ticket(uint8_t out[256], struct fl_err *err); /* FL_OK, zeros */
enum fl_status link_no_send(struct link *k, unsigned to, struct link_span what, struct link_op *op,
                            struct fl_err *err);
enum fl_status link_no_recv(struct link *k, unsigned from, struct link_span where,
                            struct link_op *op, struct fl_err *err);
enum fl_status link_no_cast(struct link *k, unsigned root, struct link_span what,
                            struct link_op *op, struct fl_err *err);
enum fl_status link_no_cast_segs(struct link *k, unsigned root, const struct link_mem *mem,
                                 const struct link_seg *segs, size_t n, uint64_t (*digests)[2],
                                 struct link_op *op, struct fl_err *err);
unsigned link_no_progress(struct link *k);
int link_no_event_fd(struct link *k);
