/* transport/xfer/delta.h - disk-delta: the giver's folders, the taker's own copy
 *
 * Both run on the pool. The giver writes a base first and the changes against what it wrote last
 * after that; it keeps a copy of what it wrote last to compare with. Between the updates (delta_tidy.c) it
 * makes a new base when the changes since the last one are as many bytes as that, or very many, and
 * removes what nobody needs: two whole versions after a base is there no engine is still on its way below it. */
#pragma once
#include "transport/fmt/delta.h"
#include "transport/link/dev.h"
#include "transport/xfer/msg.h"
#include "transport/xfer/plan.h"

enum { DELTA_MOST_VERSIONS = 500, /* after a base: a late engine opens them all */
       DELTA_RETRY_VERSIONS = 16, /* after a base that could not be made */
       DELTA_QUIET_VERSIONS = 2 };
struct delta_tidy { /* one at a time, in a process */
    struct fl_work w;
    atomic_int pace; /* enum delta_pace */
    char dir[320];
    unsigned bases; /* of the writer, when it began */
    bool older;     /* folders of writers before this one go */
    int64_t prune, compact; /* DELTA_NO_BASE: is not due */
    uint64_t bytes;         /* what the new base stands for */
    unsigned versions;
    struct fl_err removed, made;
};
struct delta_writer {
    struct fl_work w;
    struct delta_tidy tidy;
    const struct xfer_manifest *have;
    struct fl_loop *loop;
    const struct link_mem *mems; /* of this write */
    char root[256], dir[320];    /* dir: where the last one went */
    char tag[32];                /* of this process and set: folders of two of them never mix */
    unsigned generation;         /* +1 when a number is written again with other bytes */
    char *copy;                  /* of what is on a device, while it is written */
    uint64_t *copy_at;           /* of each piece */
    void **was;                  /* per tensor: what was written last */
    int64_t was_version, version;
    int64_t last; /* the highest in `dir`, whether `was` is it or not */
    bool wrote, whole;   /* by the last start */
    bool damaged;        /* nobody can follow the versions in `dir` */
    struct delta_stats stats;
    struct fl_err err;
    /* what is in `dir`, for delta_tidy.c */
    int64_t base;         /* the newest */
    unsigned bases;       /* that were written whole, anywhere: counts */
    uint64_t base_bytes, since_bytes;
    unsigned since;       /* versions after the newest base */
    unsigned written;     /* since that base was there */
    unsigned in_dir, retry_at, most_versions;
    bool older_due, prune_due, told_removed, told_made, stopping;
    /* loop thread */
    void (*done)(struct delta_writer *d, enum fl_status st, const struct fl_err *err);
    void (*quiet)(struct delta_writer *d); /* nothing is done behind the updates any more */
};
void delta_writer_init(struct delta_writer *d, const struct xfer_manifest *have,
                       const struct fl_seat_ref *who, const char *set,
                       void (*done)(struct delta_writer *, enum fl_status, const struct fl_err *),
                       void (*quiet)(struct delta_writer *));
void delta_writer_start(struct delta_writer *d, struct fl_loop *l, const char *root,
                        uint64_t version, bool same_bytes, const struct link_mem *mems);
/* Nothing is being written: the next version goes whole to a folder of its own, where nothing
 * before it is needed. */
void delta_writer_renew(struct delta_writer *d);
/* The update is over: goes on with what is due between two. */
void delta_writer_over(struct delta_writer *d);
/* Ends what is done behind the updates, and begins no more; quiet() follows if it is busy. */
void delta_writer_stop(struct delta_writer *d);
bool delta_writer_busy(const struct delta_writer *d);
void delta_writer_fini(struct delta_writer *d); /* not busy */
/* delta_tidy.c: a version was written; an update begins; what is done is about another folder now. */
void delta_tidy_written(struct delta_writer *d);
void delta_tidy_hold(struct delta_writer *d);
void delta_tidy_elsewhere(struct delta_writer *d);
/* Folders beside `dir` of the same process and set's earlier attempts and generations: drop() each. What drop() fails at
 * with FL_AGAIN stays without a word. */
enum fl_status delta_drop_older(const char *dir,
                                enum fl_status (*drop)(const char *path, struct fl_err *err),
                                struct fl_err *err);

/* Pool thread. Brings local_dir to version and copies the segments (from_off: in the whole tensor)
 * into mem. digests: one a segment, added to. */
enum fl_status delta_take(const char *dir, const char *local_dir, uint64_t version,
                          const struct xfer_plan *part, const struct link_seg *segs, size_t n,
                          const struct link_mem *mem, uint64_t (*digests)[2], struct fl_err *err);
