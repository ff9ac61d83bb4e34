/* worker/node/procs.h - what this node's processes use, for beats */
#pragma once
#include "worker/node/node_priv.h"

enum { NODE_PROCS = 256, NODE_PROCS_EVERY = 5 /* beats: a look reads three files of each process */ };
struct node_procs { /* zeroed at first */
    unsigned beats;
    uint64_t looked_ns;
    size_t n;
    struct {
        int pid;
        uint64_t cpu_ms;
    } past[NODE_PROCS];
    /* of this look, good until the next one */
    char names[NODE_PROCS][48];
    Fl__ProcUse uses[NODE_PROCS], *list[NODE_PROCS];
    Fl__NodeCount counts[NODE_METRICS], *count_list[NODE_METRICS];
};
/* Adds them to m when it is time: the daemon first, then its workers. */
void node_procs_add(struct node_procs *p, const struct node *n, Fl__Beat *m);
