/* worker/node/visible.h - lists of devices as CUDA_VISIBLE_DEVICES writes them (pure)
 *
 * Entries are numbers, or UUIDs that may be cut to a prefix that fits one device. One id space is
 * translated into another here and nowhere else. */
#pragma once
#include "common/base/base.h"

enum { NODE_DEVICES_MAX = 1024, NODE_DEVICE_ID = 64 };
struct node_visible {
    size_t n;
    bool set; /* false: there is no list, all are visible */
    char id[NODE_DEVICES_MAX][NODE_DEVICE_ID];
};
/* list NULL, or "NoDevFiles": see set and n. FL_INVALID: an empty entry, one that is there twice,
 * or neither number nor UUID; what ("CUDA_VISIBLE_DEVICES") and the entry are named. */
enum fl_status node_visible_parse(const char *what, const char *list, struct node_visible *out,
                                  struct fl_err *err);
/* Which of the n devices with these UUIDs an entry means. FL_NOT_FOUND; FL_INVALID: it fits
 * several. */
enum fl_status node_visible_find(const char *entry, const char *const *uuids, size_t n, size_t *out,
                                 struct fl_err *err);
/* Position of id in a list, or -1. */
int node_visible_index(const char *list, const char *id);
bool node_truthy(const char *value); /* as Ray reads its switches: "1", "true", ... */
