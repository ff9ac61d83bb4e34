/* common/gpu/probe.h - what the devices of this machine really can, found out in a child that exits
 *
 * Drivers answer that a device exports descriptors and handles; containers, namespaces and policies
 * decide whether another process can use them. The probe is a program (furlong-probe) of two
 * processes that try it on each device. A daemon runs it on a pool thread: its own process never
 * opens a device. */
#pragma once
#include "common/gpu/gpu.h"

struct gpu_found {
    struct gpu_info info;
    bool opens, fd_shares, handle_shares;              /* seen to work between two processes */
    uint64_t peers; /* bit i: reads the memory of the i-th of the list */
    char opens_not[160], fd_not[160], handle_not[160]; /* why not; "" where it works */
};
/* Runs program (a path) and reads its answer. *n: room in, count out. Blocks, at most wait_ms.
 * FL_UNSUPPORTED: no driver, err says what was looked for. FL_TIMEOUT: ended by force. */
enum fl_status gpu_probe(const char *program, uint32_t wait_ms, struct gpu_found *out, size_t *n,
                         struct fl_err *err);
/* The program's main(). */
int gpu_probe_main(int argc, char **argv);
