/* transport/xfer/take.h - taking one part of a plan into one slot: the executor
 *
 * Dials the givers, maps or opens what the edges' links need, moves every bucket, keeps the ledger
 * of those that are in, and compares digests. It knows nothing of states: sink.c turns what it says
 * into events. In share mode nothing moves and the pieces are addresses in the giver's pages. */
#pragma once
#include "transport/xfer/line.h"
#include "transport/xfer/msg.h"
#include "transport/xfer/parcel.h"
#include "transport/xfer/port_priv.h"

enum { TAKE_WINDOW = 3 };
struct take;
struct reach_mem { /* mapped memory of a giver */
    struct reach_mem *next;
    struct fl_seat_ref who;
    uint64_t id;
    bool passing; /* of an engine, or a staging buffer: it will go */
    bool staged;  /* no bucket is there before it was asked for */
    struct link_mem mem;
};
/* what is reached over one line; outlives epochs, and takes. One for all who are pulled from */
struct reach {
    struct reach *next;
    struct reaches *all;
    struct line *line;
    struct reach_mem *mems;
    struct take *by; /* uses it now */
    unsigned views;  /* of what serves: mapped pages that must stay */
};
struct reaches { struct reach *first; };
struct take_team;
/* Opens the team's link for later epochs, unless it is open or on its way; ends what cannot be used
 * any more. */
void reach_ahead(struct reaches *all, struct fl_loop *l, const struct take_team *team);
/* nobody uses it: dropped, now or when it is quiet */
void reach_end(struct reaches *all, struct reach *r);
/* Unmaps what nobody will ask for again: passing memory, and that of earlier attempts of who. */
void reach_sweep(struct reach *r, const struct fl_seat_ref *who);
/* destroys it unless something still needs it */
void reach_drop(struct reaches *all, struct reach *r);
void reaches_fini(struct reaches *all);

struct take_team { /* of one edge of the part */
    const struct link_ops *ops; /* NULL: disk */
    struct link_place *places;
    struct xfer_member *members;
    unsigned n, self;
    uint32_t giver_edge;
    bool later; /* the link is for later epochs, see XferTeam */
    bool has_key; /* key: the id of the giver's memory 0, in its slot key_slot */
    uint64_t key;
    uint32_t key_slot;
    uint8_t ticket[256];
};
struct take_bad { /* what did not agree */
    struct fl_err why;
    uint32_t buckets[XFER_NAMED_BAD], tensors[XFER_NAMED_BAD], n_buckets, n_tensors;
    bool source_at_fault; /* our bytes are what the source has, and not what it published */
};
struct take;
struct take_user {
    void (*moved)(void *arg);                               /* a bucket is in */
    /* whole: all agreed; else parts wait for take_verdict() */
    void (*all_in)(void *arg, bool whole);
    /* it failed, or did not agree; abort comes next */
    void (*bad)(void *arg, const struct take_bad *b);
    void (*quiet)(void *arg);                               /* after take_abort() */
};
struct take_opts {
    struct xfer_port *port;
    struct reaches *reaches;
    const char *set, *name;
    const struct xfer_manifest *want;
    struct xfer_epoch epoch;
    struct xfer_version target;
    uint64_t plan[2];
    struct xfer_plan *part;         /* taken */
    uint64_t (*expect)[2];          /* of each tensor of the part; taken */
    struct take_team *teams;        /* of each edge; taken */
    struct link_mem slot;           /* not in share mode */
    bool check_equal;
    const char *delta_dir, *local_dir; /* the first is copied, the other stays the owner's */
    const struct take_user *user;
    void *arg;
};
/* Takes part, expect and teams in any case. Nothing has begun until take_start(). */
enum fl_status take_create(const struct take_opts *o, struct take **out, struct fl_err *err);
/* What was in before stays in: the same plan, the same target, and a slot that was not touched
 * since. */
bool take_inherit(struct take *t, const struct take *ledger);
void take_start(struct take *t);
/* n 0: all_in(whole) follows */
void take_verdict(struct take *t, const uint32_t *bad_tensors, size_t n);
void take_abort(struct take *t);
/* it has said what it had to, and nothing of it is under way, here or at a link */
bool take_idle(const struct take *t);
void take_strike(struct take *t, const struct take_bad *b);
void take_counts(const struct take *t, uint32_t *in, uint32_t *all, uint64_t *bytes);
uint64_t take_link_ns(const struct take *t); /* sum over what was pulled or cast */
/* of those bytes: by another link than the plan's */
uint64_t take_other_bytes(const struct take *t);
uint64_t take_verify_ns(const struct take *t);
/* 24 bytes for each tensor held in part; free() it. */
enum fl_status take_parts(const struct take *t, struct fl_bytes *out, struct fl_err *err);
/* Share mode: the giver's pages, laid out as ours (the plan has seen to it), and what they need to
 * stay. */
bool take_shares(const struct take *t);
const struct link_mem *take_shared(const struct take *t);
struct reach *take_reach(const struct take *t, size_t edge);
size_t take_n_edges(const struct take *t);
const struct xfer_member *take_giver(const struct take *t, size_t edge);
uint32_t take_giver_slot(const struct take *t);
const struct xfer_plan *take_part(const struct take *t);
const uint64_t (*take_expect(const struct take *t))[2];
bool take_same(const struct take *t, const uint64_t plan[2], const struct xfer_version *target);
void take_destroy(struct take *t); /* idle; NULL is fine */
void take_teams_free(struct take_team *teams, size_t n);
