/* worker/node/unpack.h - a zip of somebody else's making, into a folder of ours and nowhere else
 *
 * Refused: names that are absolute, leave the folder, repeat or are no text; links and other
 * special files; more than the limits, whatever the archive says of itself. A refused one leaves
 * the folder to be removed by the caller. Blocks: for the pool. */
#pragma once
#include "common/base/base.h"

struct unpack_limits {
    uint64_t bytes;   /* of all files */
    uint32_t entries; /* files and folders */
    uint32_t ratio;   /* of all bytes to those of the archive, once they are over 64 MiB */
};
#define UNPACK_LIMITS                                                                              \
    {                                                                                              \
        4ull << 30, 100000, 250                                                                    \
    }
/* dir exists and is empty. FL_CORRUPT: what is wrong with it; FL_EXHAUSTED: no room on the disk. */
enum fl_status unpack_zip(const char *zip, const char *dir, const struct unpack_limits *limits,
                          struct fl_err *err);
enum fl_status unpack_zip_bytes(struct fl_bytes zip, const char *dir,
                                const struct unpack_limits *limits, struct fl_err *err);
