/* transport/xfer/give.h - giving a frozen slot to others, for one epoch at a time
 *
 * Shared by the trainer's side and by an engine that fills another one: keys for those who pull or
 * map, sends to those who cannot, digests of segments for those whose bytes did not agree. */
#pragma once
#include "transport/xfer/line.h"
#include "transport/xfer/msg.h"
#include "transport/xfer/parcel.h"
#include "transport/xfer/port_priv.h"
#include "transport/xfer/stage.h"

enum { GIVE_ASKS = 64 /* for buckets to be staged; beyond: FL_AGAIN */ };
enum { GIVE_RESCUES = 2, GIVE_LINES_KEPT = 64, GIVE_WINDOW = 4 };
struct give_slot { /* what is given */
    const struct link_mem *mems; /* have->n_mems */
    uint32_t index;
    uint16_t gen; /* not the same for any two memories of this process: peers keep mappings by it */
    uint64_t number;
};
struct give_edge;
struct give_half { /* of the staging buffer */
    enum { HALF_FREE, HALF_FILLS, HALF_FULL } state;
    uint32_t bucket; /* of the part: whoever takes the very same may read it too */
    unsigned readers;
    uint64_t since_ns;
};
struct give_ask { struct call_req *req; uint32_t bucket; };
struct give_stage { /* copies of memory that nobody else can map, for one epoch (give_stage.c) */
    struct link_mem area; /* bytes 0: none yet */
    uint64_t half_bytes;
    struct give_half halves[STAGE_HALVES];
    struct give_ask asks[GIVE_ASKS]; /* in their order */
    unsigned n_asks;
    struct fl_work fill; /* one at a time */
    struct link_seg *segs;
    size_t n_segs;
    uint32_t filling; /* half */
    uint32_t from_mem;
    bool busy;
    struct fl_err err;
    struct fl_timer late;
};
struct give_user {
    /* The slot that holds version number, or FL_INVALID, FL_AGAIN. */
    enum fl_status (*slot)(void *arg, const struct xfer_version *want, struct give_slot *out,
                           struct fl_err *err);
    void (*quiet)(void *arg); /* nothing is being given any more */
    /* Writes the version for disk-delta and answers through give_written(); NULL: cannot. */
    void (*write)(void *arg, const char *delta_dir, uint64_t number);
    /* Room for copies of staged memory, until the epoch is over; NULL: nothing is staged. */
    enum fl_status (*room)(void *arg, uint64_t bytes, struct link_mem *out, struct fl_err *err);
    void (*done_with)(void *arg, struct link_mem *room);
};
struct give {
    struct xfer_port *port;
    const char *name; /* of this member, for errors */
    const struct xfer_manifest *have;
    const struct give_user *user;
    void *arg;
    struct xfer_epoch epoch; /* highest that began here */
    bool active, ending, writing;
    uint64_t plan[2];
    enum xfer_mode mode;
    struct xfer_version version;
    struct give_slot slot;
    struct xfer_plan *part, *known; /* known: the last one, for an epoch that has the same */
    uint64_t known_hash[2];
    struct give_edge *edges;
    size_t n_edges;
    struct line *kept[GIVE_LINES_KEPT];
    struct give_stage stage;
    struct line *rescue[GIVE_RESCUES]; /* for takers of edges whose team broke: of this epoch */
    bool passing; /* the memory may go after the epoch: no line that reads it stays open */
    uint32_t serials;
    unsigned in_work; /* checks on the pool, which read the slot */
    struct call_req *begin_req, *end_req;
    struct xfer_state end_state;
};
void give_init(struct give *g, struct xfer_port *port, const char *name,
               const struct xfer_manifest *have, const struct give_user *user, void *arg);
/* BEGIN with give set, END, KEY, CHECK, STAGE: each answers req, now or later. state: the report
 * that END carries. */
void give_begin(struct give *g, struct call_req *req, const Fl__XferBegin *b,
                const struct wire_msg *m);
void give_end(struct give *g, struct call_req *req, const Fl__XferEnd *e,
              const struct xfer_state *state);
void give_key(struct give *g, struct call_req *req, const Fl__XferKey *k);
void give_check(struct give *g, struct call_req *req, const Fl__XferCheck *c,
                const struct wire_msg *m);
void give_stage_ask(struct give *g, struct call_req *req, const Fl__XferStage *s);
void give_written(struct give *g, enum fl_status st, const char *dir, const struct fl_err *err);
void give_stop(struct give *g, const char *why); /* quiet() follows if it says busy */
bool give_busy(const struct give *g);
void give_fini(struct give *g); /* not busy */
