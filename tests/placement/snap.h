/* tests/placement/snap.h - snapshots from a few numbers */
#pragma once
#include <stdlib.h>

#include "placement/placement.h"
#include "tests/t.h"

enum { RES_CPU, RES_GPU, RES_MEMORY, RES_N };
enum { SNAP_NODES = 16, SNAP_DEVICES = 16 };

struct snap_node {
    int gpus, cpus, busy; /* busy: a bit for each device that is taken */
    bool off;             /* takes no work */
    bool bad;             /* to be avoided */
    const char *label;    /* value of "zone" */
};

struct snap {
    struct placement_snapshot s;
    struct placement_node nodes[SNAP_NODES];
    struct fl_amount total[SNAP_NODES][2], free[SNAP_NODES][2];
    struct placement_device devices[SNAP_NODES][SNAP_DEVICES];
    struct placement_label labels[SNAP_NODES];
    char names[SNAP_NODES][16], addrs[SNAP_NODES][16], ids[SNAP_DEVICES][12];
};

static const char *const snap_resources[RES_N] = { "CPU", "GPU", "memory" };

/* Nodes gpu-a 10.0.0.1, gpu-b 10.0.0.2, ...; cpus 0: 64; ends at a node without gpus and cpus. */
static struct snap *snap_new(const struct snap_node *nodes)
{
    struct snap *x = calloc(1, sizeof(*x));
    size_t n = 0;

    for (; n < SNAP_NODES && (nodes[n].gpus || nodes[n].cpus); n++) {
        const struct snap_node *in = &nodes[n];
        struct placement_node *out = &x->nodes[n];
        int64_t cpus = (in->cpus ? in->cpus : 64) * PLACEMENT_ONE;

        snprintf(x->names[n], sizeof(x->names[n]), "gpu-%c", 'a' + (int)n);
        snprintf(x->addrs[n], sizeof(x->addrs[n]), "10.0.0.%zu", n + 1);
        x->total[n][0] = (struct fl_amount){ RES_CPU, cpus };
        x->total[n][1] = (struct fl_amount){ RES_GPU, in->gpus * PLACEMENT_ONE };
        memcpy(x->free[n], x->total[n], sizeof(x->total[n]));
        for (int d = 0; d < in->gpus; d++) {
            snprintf(x->ids[d], sizeof(x->ids[d]), "%d", d);
            x->devices[n][d] = (struct placement_device){
                .id = x->ids[d],
                .free_e4 = in->busy >> d & 1 ? 0 : PLACEMENT_ONE,
                .island = (uint16_t)(d / 4),
            };
            x->free[n][1].e4 -= in->busy >> d & 1 ? PLACEMENT_ONE : 0;
        }
        *out = (struct placement_node){ .name = x->names[n],
                                        .addr = x->addrs[n],
                                        .takes_work = !in->off,
                                        .avoid = in->bad,
                                        .total = x->total[n],
                                        .free = x->free[n],
                                        .devices = x->devices[n],
                                        .labels = &x->labels[n],
                                        .n_amounts = 2,
                                        .n_devices = (size_t)in->gpus,
                                        .n_labels = in->label != NULL };
        x->labels[n] = (struct placement_label){ "zone", in->label };
        out->who.id.b[0] = (uint8_t)(n + 1);
        t_true(placement_addr_sort(x->addrs[n], out->addr_sort));
    }
    x->s = (struct placement_snapshot){
        .resources = snap_resources, .nodes = x->nodes, .n_resources = RES_N, .n_nodes = n
    };
    return x;
}
