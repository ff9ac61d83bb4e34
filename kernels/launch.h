/* kernels/launch.h - the device forms of kernels/move.h, started on a stream
 *
 * Each checks its launch and never synchronizes; every value equals the plain twin's bit for bit.
 * On the fake and on host memory the twins run. All addresses are the device's, the table of pieces
 * too. */
#pragma once
#include "common/gpu/gpu.h"
#include "kernels/move.h"

struct kernel_move_args {
    uint64_t pieces; /* struct kernel_piece[n], as kernel_pieces_cut() makes them */
    uint64_t n;
    uint64_t from, to; /* to 0: digests alone, nothing is written; without a cast */
    uint64_t digests; /* uint64_t[][2], added to; 0: none */
    enum kernel_cast cast;
    bool beside; /* others' kernels must find room: one block on every second multiprocessor */
};
enum fl_status kernel_move_start(const struct gpu_ops *gpu, const struct gpu *g,
                                 struct gpu_stream *s, const struct kernel_move_args *a,
                                 struct fl_err *err);

struct kernel_changed_args {
    uint64_t a, b, bytes;
    uint32_t block_bytes;
    uint64_t flags; /* a byte a block */
};
enum fl_status kernel_changed_start(const struct gpu_ops *gpu, const struct gpu *g,
                                    struct gpu_stream *s, const struct kernel_changed_args *a,
                                    struct fl_err *err);

bool kernel_has_device_code(void); /* false: built without a CUDA compiler */
