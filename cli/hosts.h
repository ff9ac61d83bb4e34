/* cli/hosts.h - lists of hosts as launchers write them */
#pragma once
#include "common/base/base.h"

enum { HOST_BYTES = 256, HOSTS_MAX = 10000 };
struct hosts {
    char (*names)[HOST_BYTES]; /* in order, each once; may have "user@" before it */
    size_t n;
};

/* "n[1-3,5],m07,10.0.0.7": commas and spaces part; brackets as Slurm writes them, zeros kept, several in a name.
 * FL_INVALID names the place; FL_EXHAUSTED: more than HOSTS_MAX. Adds to h, which begins as { 0 }. */
enum fl_status hosts_parse(const char *list, struct hosts *h, struct fl_err *err);
/* One host a line; what follows a space ("slots=8", "max_slots=8") or, in "host:8", the colon is passed over; #
 * begins a comment, blank lines count for nothing. A bracket list may stand on a line. FL_INVALID: "FILE line 3: ..." */
enum fl_status hosts_read(const char *path, struct hosts *h, struct fl_err *err);
const char *host_bare(const char *name); /* without "user@" */
void hosts_free(struct hosts *h);
