/* cli/wait.h - until the nodes of a run have joined */
#pragma once
#include "cli/api.h"
#include "cli/hosts.h"

struct wait_for {
    const struct hosts *names; /* by node name or address; NULL: not asked */
    int64_t nodes;             /* so many, whatever their names; 0: not asked */
    double gpus;               /* so many on all of them; 0: not asked */
};
struct wait_view { /* what one answer of the head amounts to */
    size_t joined, wanted; /* nodes */
    double gpus;           /* of those that are ready */
    bool enough;
    char missing[256]; /* "n3, n4", "n3, n4 and 7 more" */
};
/* Pure. nodes: the answer of /api/furlong/nodes. A name counts when the first label of it, or the address, is a
 * node's: launchers know n4.cluster.local as n4. */
void wait_look(const json_t *nodes, const struct wait_for *w, struct wait_view *out);

/* Looks until all are there, and says on stderr what has changed: "3/4 nodes, missing n4".
 * FL_TIMEOUT: err names who is missing. */
enum fl_status wait_for_nodes(const struct cli_cluster *c, const struct wait_for *w, uint32_t wait_ms, struct fl_err *err);
