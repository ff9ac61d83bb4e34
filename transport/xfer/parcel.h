/* transport/xfer/parcel.h - what a link without LINK_PULL carries of a bucket, in order
 *
 * Both sides cut the same segments by the same rule, so nothing about it travels. What is
 * contiguous in both memories goes as it lies; short runs are packed together. A parcel is small
 * enough that digests keep pace with the wire, and large enough that a send costs nothing beside
 * its bytes. */
#pragma once
#include "transport/link/link.h"

enum {
    PARCEL_DIRECT_MIN = 64 << 10, /* a contiguous stretch of so much is not packed */
    PARCEL_PACKED_MAX = 1 << 20,  /* room for a packed parcel                      */
    PARCEL_DIRECT_MAX = 16 << 20
};
struct parcel_run { uint64_t from_off, to_off, first_byte, bytes; uint32_t seg; };
struct parcel {
    bool packed; /* its runs one after the other; else one stretch at from_off and to_off */
    uint64_t from_off, to_off, bytes;
    size_t first_run, n_runs;
};
struct parcels {
    struct parcel *p;
    struct parcel_run *runs;
    size_t n, n_runs, p_cap, runs_cap;
};
/* Pure. Every byte of the segments is in exactly one run, in order. FL_EXHAUSTED: no memory. */
enum fl_status parcels_cut(const struct link_seg *segs, size_t n, struct parcels *out,
                           struct fl_err *err);
void parcels_fini(struct parcels *p);
void parcel_pack(const struct parcels *ps, size_t i, const void *from_mem, void *packed);
/* Spreads a packed parcel out (packed NULL: it lies in place already) and adds to the digests, one
 * a segment. */
void parcel_land(const struct parcels *ps, size_t i, const void *packed, void *to_mem,
                 uint64_t (*digests)[2]);
