/* placement/solve_priv.h - what room.c, solve.c and explain.c share */
#pragma once
#include "placement/placement.h"

/* What is left while a plan is made: a copy, so that a request that does not fit leaves no trace. */
struct room_node {
    int64_t *amounts; /* in the order of the node's own list */
    int64_t *devices;
    uint32_t bundles; /* of this request, by now */
};
struct room {
    const struct placement_snapshot *snap;
    struct room_node *nodes;
    int64_t *store;
    uint32_t gpu; /* resource that devices stand for; UINT32_MAX: nobody has any */
    bool careful; /* without the nodes that are to be avoided */
    bool empty;   /* as if nothing was taken and every node took work */
};
enum fl_status room_init(struct room *r, const struct placement_snapshot *snap, bool empty,
                         struct fl_err *err);
void room_reset(struct room *r); /* nothing is taken any more */
void room_fini(struct room *r);
/* A rule that keeps this bundle from this node whatever it has; NULL: none. */
const char *room_rule(const struct room *r, size_t node, const struct placement_bundle *b,
                      const char **label);
/* How many such bundles the node takes by amounts and devices. */
uint32_t room_fits(const struct room *r, size_t node, const struct placement_bundle *b);
int64_t room_has(const struct room *r, size_t node, uint32_t resource);
/* Takes n bundles, which must fit. devices gets theirs one after the other, as they were chosen:
 * whole ones from one island if one has enough, ascending; NULL: not wanted. */
void room_take(struct room *r, size_t node, const struct placement_bundle *b, uint32_t n,
               uint32_t *devices);
uint32_t room_devices_of(const struct room *r, const struct placement_bundle *b); /* of one bundle */
int64_t bundle_wants(const struct placement_bundle *b, uint32_t resource);

/* Bundles that ask for the same, as one. */
struct kind {
    const struct placement_bundle *bundle;
    uint32_t first, n; /* of the sorted list of bundles */
    uint32_t nodes;    /* on which one would do */
};

/* search.c: how many of each kind each node takes (take: a row of nodes a kind), for two kinds and
 * more. NONE: no way but those that put parts of different sizes on one device; CUT: more nodes, or
 * ways, than are looked at. FOUND: they are taken from r; else it is as before. */
enum search_end { SEARCH_FOUND, SEARCH_NONE, SEARCH_CUT };
enum search_end search_run(struct room *r, const struct kind *kinds, size_t n_kinds, bool one_each,
                           uint32_t *take);

/* explain.c */
struct failed { const struct placement_request *req; const struct kind *kind; };
void explain_nodes(const struct room *free, const struct failed *f, struct placement_why *why,
                   size_t *n_why);
enum fl_status explain_text(const struct room *free, const struct room *empty,
                            const struct failed *f, bool never, struct fl_err *err);
void amount_text(char out[24], int64_t e4);
