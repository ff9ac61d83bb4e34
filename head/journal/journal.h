/* head/journal/journal.h - the truth about promises
 *
 * One SQLite file in WAL mode, written by one thread of its own. Every record carries a checksum
 * over its number, kind and body. All calls are made on the loop thread; callbacks come there. */
#pragma once
#include "common/base/base.h"
#include "common/base/loop.h"

struct journal;
struct journal_op { /* embed it; busy from append to durable */
    struct fl_task back;
    void (*durable)(struct journal_op *op, enum fl_status st, const struct fl_err *err);
};
struct journal_apply {
    uint16_t kind;
    void (*apply)(void *state, struct fl_bytes body);
};
struct journal_emit { /* handed to snapshot(): one call a record that is to live on */
    void (*put)(struct journal_emit *e, uint16_t kind, struct fl_bytes body);
};
struct journal_opts {
    const struct journal_apply *table; /* kinds 1 to 255; an unknown kind in the file is refused */
    size_t n_table;
    void *state;
    /* The whole state as records: what applying them to an empty state gives back. */
    void (*snapshot)(void *state, struct journal_emit *e);
    uint64_t compact_records, compact_bytes; /* since the last snapshot; 0: 8192 and 8 MiB        */
    uint64_t reserve_bytes;                  /* of free disk, to accept work; 0: 32 MiB           */
    uint64_t queue_bytes;                    /* bound of what waits for the disk; 0: 64 MiB       */
};
struct journal_opened { /* what journal_open found */
    struct fl_term term;
    uint64_t records, last_seq;
    bool fresh;     /* there was none before           */
    char note[256]; /* "" unless a damaged tail was cut */
};

/* Takes the lock that keeps a second head out (FL_EXISTS names its pid), refuses network file
 * systems (FL_UNSUPPORTED names --state-dir), cuts a torn or damaged tail at the last whole record
 * with a note, replays through apply, and adds one to the term, durably, before it returns.
 * FL_CORRUPT: nothing whole is left; the file is not touched. */
enum fl_status journal_open(struct fl_loop *l, const char *path, const struct journal_opts *opts,
                            struct journal **out, struct journal_opened *found, struct fl_err *err);

/* Applies now. op->durable runs when the group it fell into is on disk: one fsync for all that came
 * meanwhile. Nobody outside hears of it before. op may be NULL. While the disk is full the group is
 * tried again until it fits, and durable waits; FL_EXHAUSTED, nothing applied: the queue's bound.
 */
enum fl_status journal_append(struct journal *j, uint16_t kind, struct fl_bytes body,
                              struct journal_op *op, struct fl_err *err);

/* Runs op->durable when all that was appended before is on disk. */
enum fl_status journal_fence(struct journal *j, struct journal_op *op, struct fl_err *err);

/* FL_EXHAUSTED with the numbers while the disk has no room or does not take what waits already. Ask
 * it before new work is accepted; what already runs may go on to append. */
enum fl_status journal_accepts(struct journal *j, struct fl_err *err);

/* The next term above `seen`; *term is changed in op->durable's turn, not before it is on disk. */
enum fl_status journal_raise_term(struct journal *j, uint64_t seen, struct fl_term *term,
                                  struct journal_op *op, struct fl_err *err);

uint64_t journal_seq(const struct journal *j); /* of the last record that was applied */

struct journal_stats {
    uint64_t records, groups, bytes, compactions, queued_bytes, file_bytes;
};
void journal_stats(const struct journal *j, struct journal_stats *out);

/* Writes what waits, closes, gives the lock back. Ops in flight come back before it returns. */
void journal_destroy(struct journal *j);
FL_AUTO_DEFINE(journal)
