/* head/journal/store.h - the file behind the journal: SQLite, its lock, and what is left after
 * damage
 *
 * Used by one thread at a time: by the opener until the journal's thread takes it over. */
#pragma once
#include "head/journal/journal.h"

enum { STORE_TERM_KIND = 0 }; /* cluster id and term: the first record, and one at each start */

struct store;
struct store_record {
    struct store_record *next;
    uint64_t seq;
    uint16_t kind;
    bool first; /* of a snapshot: it and what follows stand for all that was before */
    size_t len;
    uint8_t body[];
};
struct store_batch { /* what one caller wants written; several make a transaction */
    struct store_batch *next;
    struct store_record *records;
};

enum fl_status store_open(const char *path, struct store **out, struct fl_err *err);
/* Hands every whole record to `each`, in order. What follows the last whole one is cut off, and
 * found's note says so; the damaged file stays beside the new one under .damaged. */
enum fl_status store_replay(struct store *s,
                            enum fl_status (*each)(void *arg, uint64_t seq, uint16_t kind,
                                                   struct fl_bytes body, struct fl_err *err),
                            void *arg, struct journal_opened *found, struct fl_err *err);
/* One transaction, on disk when it returns FL_OK; on failure nothing of it is there. */
enum fl_status store_write(struct store *s, const struct store_batch *first, struct fl_err *err);
/* After a write: moves the log into the file when it has grown, or when asked. */
void store_tidy(struct store *s, bool now);
enum fl_status store_room(const struct store *s, uint64_t reserve_bytes, struct fl_err *err);
uint64_t store_file_bytes(const struct store *s);
void store_destroy(struct store *s);
FL_AUTO_DEFINE(store)

/* Bytes of the log's current generation that SQLite did not take, read from path-wal after `frames`
 * valid ones: a torn or damaged tail. 0 when there is none. */
uint64_t store_wal_left(const char *wal_path, unsigned frames);
