/* transport/xfer/sink.h - an engine's side: one rank of it
 *
 * Answers the coordinator by the table of epoch.h, moves buckets into a slot that nothing serves
 * from, digests them on the way, and flips between two steps. An engine of several ranks has one
 * sink a rank, each with the same party; nothing passes between them but through the coordinator.
 *
 * With two slots the old version serves until the new one has flipped. With one, or with mapped
 * pages that the trainer is about to write, the engine is DIRTY from before the first byte. */
#pragma once
#include "transport/xfer/epoch.h"
#include "transport/xfer/port.h"

struct xfer_sink;
struct xfer_sink_ops { /* the engine's side, all on the loop thread */
    /* Memory for one slot, shareable by the host's link, aligned to 256 bytes. */
    enum fl_status (*room)(void *arg, uint64_t bytes, struct link_mem *out, struct fl_err *err);
    void (*done_with)(void *arg, struct link_mem *room); /* quiet: free, pool or lend it */
    /* post it: no step runs and none will start */
    void (*pause)(void *arg, struct fl_task *paused);
    /* From here on the engine reads mem at its manifest's offsets: its own slot, or the trainer's
     * pages, mapped read-only. Post flipped between two steps. mem's memory stays good until the
     * next flip has been posted. */
    void (*flip)(void *arg, const struct xfer_version *now, const struct link_mem *mem,
                 struct fl_task *flipped);
    void (*resume)(void *arg);
    /* For engines whose addresses must stay (captured graphs), else NULL. can_show: what has come
     * and is verified, could it be seen there? Else the epoch fails here and the old version serves
     * on. show: it is, from now on, while the engine is paused; *seen is what flip() names. */
    enum fl_status (*can_show)(void *arg, const struct link_mem *comes, struct fl_err *err);
    enum fl_status (*show)(void *arg, const struct link_mem *comes, struct link_mem *seen,
                           struct fl_err *err);
};
struct xfer_sink_opts { /* all copied */
    const char *set;
    struct xfer_member me;
    struct link_place place;
    const struct xfer_manifest *want; /* one memory: pieces' offsets in a slot */
    enum xfer_slots slots;            /* XFER_ONE_SLOT: there is room for one only */
    /* --check-weight-update-equal: before COMMIT read all bytes once more and compare */
    bool check_equal;
    const char *local_dir;            /* disk-delta: this host's own full copy; NULL: refused */
    const struct xfer_sink_ops *ops;
    void *arg;
};
/* silence of the coordinator that ends an epoch here: presumed abort */
enum { XFER_LEASE_MS = 30000 };

/* FL_EXISTS: the set */
enum fl_status xfer_sink_create(struct fl_loop *l, struct xfer_port *port,
                                const struct xfer_sink_opts *o, struct xfer_sink **out,
                                struct fl_err *err);
/* Weights offloaded: BEGIN is answered FL_AGAIN from now on. dropped: their bytes are gone, so is
 * the version; the slot is handed back by done_with. FL_AGAIN: an epoch is under way here. */
enum fl_status xfer_sink_offload(struct xfer_sink *s, bool dropped, struct fl_err *err);
enum fl_status xfer_sink_can_offload(const struct xfer_sink *s, struct fl_err *err); /* would it? */
void xfer_sink_onload(struct xfer_sink *s);
void xfer_sink_report(const struct xfer_sink *s, struct rx_report *out);
/* Why nothing serves, a sentence for whoever asks the engine; "" while something does. */
void xfer_sink_says(const struct xfer_sink *s, char *text, size_t n);
/* What serves; NULL: nothing does. version may be NULL. */
const struct link_mem *xfer_sink_data(const struct xfer_sink *s, struct xfer_version *version);
/* Ends what is under way; stopped is posted when all links are quiet. Then, and not before,
 * destroy. */
void xfer_sink_stop(struct xfer_sink *s, struct fl_task *stopped);
void xfer_sink_destroy(struct xfer_sink *s); /* stopped, or never used; NULL is fine */
