/* common/gpu/probe_priv.h - what the probe writes: a head, then a struct gpu_found a device */
#pragma once
#include <stdint.h>

enum { PROBE_MAGIC = 0x50475546 };
struct probe_head {
    uint32_t magic, each_bytes, n, status;
    char text[256];
};
