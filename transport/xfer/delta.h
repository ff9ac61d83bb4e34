/* transport/xfer/delta.h - disk-delta: the giver's folders, the taker's own copy
 *
 * Both run on the pool. The giver writes a base first and the changes against what it wrote last
 * after that; it keeps a copy of what it wrote last to compare with. */
#pragma once
#include "transport/link/dev.h"
#include "transport/xfer/msg.h"
#include "transport/xfer/plan.h"

struct delta_writer {
    struct fl_work w;
    const struct xfer_manifest *have;
    const struct link_mem *mems; /* of this write */
    char root[256], dir[320];    /* dir: where the last one went */
    char tag[32];                /* of this process: folders of two of them never mix */
    unsigned generation;         /* +1 when a number is written again with other bytes */
    char *copy;                  /* of what is on a device, while it is written */
    uint64_t *copy_at;           /* of each piece */
    void **was;                  /* per tensor: what was written last */
    int64_t was_version, version;
    int64_t last; /* the highest in `dir`, whether `was` is it or not */
    struct fl_err err;
    /* loop thread */
    void (*done)(struct delta_writer *d, enum fl_status st, const struct fl_err *err);
};
void delta_writer_init(struct delta_writer *d, const struct xfer_manifest *have,
                       const struct fl_seat_ref *who,
                       void (*done)(struct delta_writer *, enum fl_status, const struct fl_err *));
void delta_writer_start(struct delta_writer *d, struct fl_loop *l, const char *root,
                        uint64_t version, bool same_bytes, const struct link_mem *mems);
/* Nothing is being written: the next version goes whole to a folder of its own, where nothing
 * before it is needed. */
void delta_writer_renew(struct delta_writer *d);
void delta_writer_fini(struct delta_writer *d);

/* Pool thread. Brings local_dir to version and copies the segments (from_off: in the whole tensor)
 * into mem. digests: one a segment, added to. */
enum fl_status delta_take(const char *dir, const char *local_dir, uint64_t version,
                          const struct xfer_plan *part, const struct link_seg *segs, size_t n,
                          const struct link_mem *mem, uint64_t (*digests)[2], struct fl_err *err);
