/* transport/xfer/stage.h - how a bucket lies in a staging buffer, the same on both sides */
#pragma once
#include "transport/xfer/plan.h"

enum { STAGE_HALVES = 2, STAGE_ALIGN = 256 };
/* Bytes that n segments take there. */
uint64_t stage_bytes(const struct link_seg *segs, size_t n);
/* Segments that fill it (to_off counts from base), or that are read from it: the same runs,
 * moved. */
void stage_fills(const struct link_seg *segs, size_t n, uint64_t base, struct link_seg *out);
void stage_reads(const struct link_seg *segs, size_t n, uint64_t base, struct link_seg *out);
