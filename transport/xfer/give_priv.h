/* transport/xfer/give_priv.h - giving from inside: edges and sends (give.c), keys and checks (give_key.c) */
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
    bool sends, failed, done;
    uint32_t bucket;   /* being cut, counted from the edge's first */
    struct parcels parcels;
    size_t next_parcel;
    bool cut;
    unsigned in_flight;
    struct give_send window[GIVE_WINDOW];
    struct fl_timer again;
};
void give_settle(struct give *g); /* something came back: the epoch may have ended */
