#pragma once
#include "common/base/base.h"
#include "common/base/loop.h"

/* ==== head/journal/journal.h: the truth about promises ========================================= */
struct journal;
struct journal_op {
    struct fl_task back;
    void (*durable)(struct journal_op *op, enum fl_status st, const struct fl_err *err);
};
struct journal_apply { uint16_t kind; void (*apply)(void *state, struct fl_bytes body); };
/* Takes the lock that keeps a second head out, cuts a torn tail with a note, replays through apply,
 * and adds one to the term, durably, before it returns. */
enum fl_status journal_open(struct fl_loop *l, const char *path, const struct journal_apply *table,
                            size_t n, void *state, struct journal **out, struct fl_term *term,
                            struct fl_err *err);
/* Applies now. durable runs when the group it fell into is on disk: one fsync for all that came
 * meanwhile, on the journal's own thread. Nobody outside hears of it before durable. */
enum fl_status journal_append(struct journal *j, uint16_t kind, struct fl_bytes body,
                              struct journal_op *op, struct fl_err *err);
void journal_destroy(struct journal *j);

