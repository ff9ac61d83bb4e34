/* worker/node/stats.h - what the host is doing, for beats: read from procfs, once a beat */
#pragma once
#include "common/base/base.h"
#include "node.pb-c.h"

struct node_stats_past { /* zeroed at first */
    uint64_t busy, all; /* ticks of all cores */
};
/* out: initialised by it; nothing of it is allocated. What cannot be read stays absent. */
void node_stats_read(struct node_stats_past *past, Fl__NodeStats *out);

/* The readers, on texts (pure). */
bool node_stats_cpu(const char *stat, uint64_t *busy, uint64_t *all, uint64_t *boot_s);
void node_stats_net(const char *dev, uint64_t *received, uint64_t *sent);
void node_stats_disks(const char *diskstats, uint64_t *read, uint64_t *written);
