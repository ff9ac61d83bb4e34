/* transport/wire/lossy.h - a carrier that behaves badly, by plan: for tests
 *
 * Wraps the lines of another carrier, at either end. The same plan and seed do the same each time. */
#pragma once
#include "transport/wire/wire.h"

struct lossy_plan {
    const struct stream_ops *over;
    uint64_t seed;
    unsigned chunk_max; /* a read or write moves 1 to so many bytes; 0: all        */
    unsigned again_pct; /* so many of 100 reads and writes say FL_AGAIN first      */
    unsigned delay_ms;  /* what is written arrives so much later                   */
    bool cut_out, cut_in;
    uint64_t cut_out_at, cut_in_at; /* hangs up when so many bytes went out, came in: also inside a frame */
    bool flip_out;
    uint64_t flip_out_at; /* one bit of that byte                                   */
    unsigned *spoil;      /* connections left that are cut and flipped; NULL: all of them */
};
