/* transport/xfer/take_priv.h - the executor from inside
 *
 * take.c edges and life, take_key.c the way to givers, take_move.c bytes, take_check.c digests */
#pragma once
#include "transport/link/dev.h"
#include "transport/xfer/stage.h"
#include "transport/xfer/take.h"

struct take_op { /* one bucket pulled, or one parcel received */
    struct take_edge *edge;
    struct link_op op;
    struct fl_work land; /* a parcel's digests and places, on the pool */
    struct link_mem room;
    uint32_t bucket, n_buckets; /* n: pulled together */
    size_t parcel;
    bool busy;
    /* of a staged bucket (take_stage.c) */
    struct xfer_dial dial;
    struct call_op call; /* STAGE */
    struct fl_timer later; /* asked, or pulled, once more */
    bool dialing, calling, granted, staged, last;
    uint32_t half;
    uint64_t off; /* granted: where that half lies */
    struct link_seg *segs;
};
struct take_edge {
    struct take *take;
    const struct xfer_edge *e;
    const struct take_team *team;
    const struct link_ops *ops; /* the team's, unless it broke or is still being made */
    struct link_place pair[2];  /* giver and taker, for another link than that */
    bool falling, rescued;
    struct reach *reach;
    struct xfer_dial dial;
    struct call_op call; /* KEY */
    bool dialing, calling, started, in;
    uint32_t giver_slot;
    uint32_t part, parts; /* of the key that is asked for: one message holds so many descriptors */
    struct reach_mem *half; /* of which parts are mapped: not the reach's before all of it is */
    uint64_t slot_id; /* of the giver's memory 0 in that slot */
    uint32_t bucket, n_in; /* bucket: next one to start, counted from the edge's first */
    struct parcels parcels;
    size_t next_parcel, landed; /* of the bucket in hand */
    bool cut;
    unsigned in_flight, staging; /* staging: halves asked for, or in hand */
    uint32_t done[STAGE_HALVES], n_done; /* read, and not said yet */
    struct take_op window[TAKE_WINDOW];
    struct fl_timer again;
    struct fl_work disk; /* the whole edge at once */
    struct fl_err disk_err;
};
struct take {
    struct take_opts o;
    char delta_dir[320];
    struct take_edge *edges;
    bool *in; /* the ledger, of each bucket */
    uint64_t (*digests)[2]; /* of each segment that is in */
    uint32_t n_in;
    uint64_t moved_bytes, other_bytes, link_ns, verify_ns, verify_from_ns;
    bool started, aborting, over; /* over: failed, or told to stop */
    bool done;                    /* it has said all that it has to say */
    unsigned in_work;             /* on the pool */
    struct fl_task quiet_back, all_back;
    /* comparing: of each tensor all our segments, and those that count for the engine */
    uint64_t (*sum)[2], (*once)[2];
    uint64_t *sum_bytes, *once_bytes;
    bool *wrong;   /* of each tensor */
    bool *suspect; /* of each bucket: to be compared with the giver's */
    struct fl_work equal;
    bool equal_differs;
    uint32_t check_at;
    bool check_calls, locating, verdict_given;
    struct xfer_dial check_dial;
    bool check_dials;
    struct call_op check_call;
    struct take_bad found;
};
static inline bool take_disk(const struct take_edge *te)
{
    return te->e->link == XFER_LINK_DISK;
}
bool take_pulls(const struct take_edge *te); /* else both sides act: the giver sends */
void take_go(struct take_edge *te);          /* whatever is next for it */
void take_next_key(struct take_edge *te);
void take_pull(struct take_edge *te);
void take_receive(struct take_edge *te);
bool take_staged(const struct take_edge *te, uint32_t mem);
/* Asks for that bucket, then pulls it. false: as many as may be are asked for. */
bool take_stage(struct take_edge *te, struct take_op *o, uint32_t bucket);
void take_stage_cancel(struct take_op *o);
void take_stage_pulled(struct take_op *o); /* its bytes are here */
void take_files(struct take_edge *te);
void take_bucket_in(struct take_edge *te, uint32_t bucket);
/* true: FL_AGAIN, and take_go() follows */
bool take_wait_again(struct take_edge *te, enum fl_status st);
enum fl_status take_open(struct take_edge *te, struct fl_err *err); /* its line */
/* A link between several has broken under the edge: what it lacks is pulled by another link, in
 * this epoch. false: there is none, or it is pulled already. */
bool take_rescue(struct take_edge *te, const struct fl_err *why);
/* From the beginning: the team's link is being made. FL_UNSUPPORTED: there is no other. */
enum fl_status take_go_other_way(struct take_edge *te, struct fl_err *err);
/* The giver cannot show its memory over the edge's link: all of it is pulled over another, in this
 * epoch. false: there is none, or it is that one. */
bool take_not_shown(struct take_edge *te, const struct fl_err *why);
void take_rescue_go(struct take_edge *te); /* falling: something came back, or the line is quiet */
void take_fail(struct take *t, const struct take_edge *te, uint32_t bucket, enum fl_status st,
               const struct fl_err *why);
void take_settle(struct take *t);
void take_compare(struct take *t);       /* everything is in */
void take_check_cancel(struct take *t);
void take_half_drop(struct take_edge *te);
const struct reach_mem *take_mapping(const struct take_edge *te, uint32_t mem);
const struct link_mem *take_mapped(const struct take_edge *te, uint32_t mem);
void take_begin_call(struct take *t, Fl__XferEpoch *epoch, struct call_args *a);
/* Starts it; *calling as long as it is under way. */
enum fl_status take_call(struct call_peer *peer, const ProtobufCMessage *m, struct call_args *a,
                         struct call_op *op, bool *calling, struct fl_err *err);
