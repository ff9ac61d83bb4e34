/* tests/xfer/bucket.h - one bucket by hand: what links do with its segments, in plain C */
#pragma once
#include "transport/link/link.h"

/* Gather the segments into room for all their bytes, or spread them out again. digests: one a
 * segment, added to; NULL: none. */
void bucket_pack(const struct link_seg *segs, size_t n, const void *from_mem, void *packed);
void bucket_unpack(const struct link_seg *segs, size_t n, const void *packed, void *to_mem,
                   uint64_t (*digests)[2]);
/* Of what the segments read, at the source (from) or at the receiver; one a segment. */
void bucket_digest(const struct link_seg *segs, size_t n, const void *mem, bool from,
                   uint64_t (*digests)[2]);
