/* transport/xfer/give_priv.h - giving from inside: edges and sends (give.c), keys and checks
 * (give_key.c) */
#pragma once
#include "transport/xfer/give.h"

struct give_send { /* one parcel on its way */
    struct give_edge *edge;
    struct link_op op;
    struct link_mem room; /* of a packed one; malloc'd once */
    bool busy;
};
struct give_edge {
    struct give *give;
    const struct xfer_edge *e;
    struct link_place place; /* ours, in its team */
    struct line *line; /* NULL: nothing to open (disk), or spent */
    bool owns;         /* the line: those who pull over one kind of link share the first one's */
    /* being made for later epochs: the takers pull in this one. Until begin is answered */
    const struct line *ahead;
    bool sends, failed, done;
    uint32_t bucket;   /* being cut, counted from the edge's first */
    struct parcels parcels;
    size_t next_parcel;
    bool cut;
    unsigned in_flight;
    struct give_send window[GIVE_WINDOW];
    struct fl_timer again;
};
/* Must that memory be staged for whoever pulls over ops? */
bool give_stages(const struct give *g, uint32_t mem, const struct link_ops *ops);
/* The staging buffer; made at first. */
enum fl_status give_stage_area(struct give *g, const struct link_mem **out, struct fl_err *err);
bool give_stage_quiet(const struct give *g);
void give_stage_stop(struct give *g); /* the epoch ends: refuses who waits */
void give_stage_end(struct give *g);  /* quiet: gives the buffer back */
enum fl_status give_asked_now(const struct give *g, const Fl__XferEpoch *epoch,
                              ProtobufCBinaryData plan, uint32_t mem, struct fl_err *err);
void give_settle(struct give *g); /* something came back: the epoch may have ended */
/* Lines kept from epoch to epoch, and those being made (give_line.c). */
void give_line_keep(struct give *g, struct line *ln);
/* Ready, or, if the epoch cannot do without, on its way. It is the caller's; NULL: there is
 * none. */
struct line *give_line_kept(struct give *g, const uint64_t key[2], bool ready);
/* Makes that team's line in the background, unless it is on its way. NULL: it is to be made in this
 * epoch, because no other link brings the edge's bytes in less time than making it takes, or there
 * is no room to keep it. */
const struct line *give_line_ahead(struct give *g, const struct give_edge *ge,
                                   const struct link_ops *ops, const struct link_place *places,
                                   const struct xfer_member *members, unsigned n,
                                   const uint64_t key[2]);
/* Ends kept lines of teams of which one has started again. */
void give_line_sweep(struct give *g, const struct xfer_member *members, unsigned n);
