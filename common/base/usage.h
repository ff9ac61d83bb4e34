/* common/base/usage.h - what one process uses, as procfs tells */
#pragma once
#include "common/base/base.h"

struct fl_usage {
    uint64_t cpu_ms; /* since its start, of all cores */
    uint64_t rss_bytes, shared_bytes; /* the second is part of the first; the rest is its own */
    uint32_t fds;    /* open descriptors; 0 where another user's are hidden */
};
/* FL_NOT_FOUND: there is no such process. */
enum fl_status fl_usage_read(int pid, struct fl_usage *out, struct fl_err *err);
