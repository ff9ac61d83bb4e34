/* transport/xfer/source.h - a trainer's side: one rank of it
 *
 * Between publish and the next begin the memory is frozen: engines read it. Ranks with equal
 * replicas and ranks that each hold a shard are the same to it: the plan says who gives what, the
 * coordinator counts replicas once and refuses those that differ. */
#pragma once
#include "transport/xfer/port.h"

struct xfer_source;
struct xfer_source_opts { /* all copied */
    const char *set;
    struct xfer_member me;
    struct link_place place;
    const struct xfer_manifest *have; /* one memory: pieces' offsets in a slot */
    struct link_mem slot[2]; /* the memory is the owner's, until destroy; 256-byte aligned */
    unsigned n_slots; /* 1 or 2: begin hands out the one that was not published last */
    /* NULL, or the memories of the only slot: have->n_mems, slot[] is not looked at */
    const struct link_mem *mems;
    /* Room for copies of staged memory (struct link_pages), for one epoch at a time; NULL: none is
     * staged. */
    enum fl_status (*room)(void *arg, uint64_t bytes, struct link_mem *out, struct fl_err *err);
    void (*done_with)(void *arg, struct link_mem *room);
    void *arg;
};
enum fl_status xfer_source_create(struct fl_loop *l, struct xfer_port *port,
                                  const struct xfer_source_opts *o, struct xfer_source **out,
                                  struct fl_err *err);
/* The weights shall be written. w.done FL_OK: nobody reads what will be written, and it is the
 * caller's until publish. Granted at once while no coordinator has had this source in an epoch.
 * FL_TIMEOUT: at due_ns somebody still read; err names who. The next one may follow.
 * FL_INVALID at once: begun already. */
enum fl_status xfer_source_begin(struct xfer_source *s, uint64_t version, uint64_t due_ns,
                                 struct xfer_wait *w, struct fl_err *err);
/* Whole, and frozen from now on. w.done when the digests are known. FL_INVALID at once: version is
 * not the one begun. A new source is begun: its first publish needs no begin. */
enum fl_status xfer_source_publish(struct xfer_source *s, uint64_t version, struct xfer_wait *w,
                                   struct fl_err *err);
/* begin() is taken back: another may follow, of any version, and is granted at once. With two slots
 * what was published stays as it is; with one its bytes were the program's, and no version is there
 * until the next publish. FL_INVALID: nothing is begun, or begin or publish is under way. */
enum fl_status xfer_source_abandon(struct xfer_source *s, struct fl_err *err);
/* Where the version in hand is written, or was once published; index: of slot[], may be NULL. */
const struct link_mem *xfer_source_data(const struct xfer_source *s, unsigned *index);
/* false: none is published */
bool xfer_source_version(const struct xfer_source *s, uint64_t *number);
/* As xfer_sink_stop: no peer and no link touches the slots after stopped has been posted. */
void xfer_source_stop(struct xfer_source *s, struct fl_task *stopped);
void xfer_source_destroy(struct xfer_source *s);
