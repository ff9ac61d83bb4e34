/* kernels/move.h - many pieces of memory moved in one launch, digests on the way; and the plain C
 * twin of each
 *
 * A piece is rows runs of one tensor. from and to count from the two bases of the launch, so that a
 * table of pieces is made and uploaded once for a plan and used for every version and either
 * slot. */
#pragma once
#include <stddef.h>
#include <stdint.h>

struct kernel_piece { /* the layout of struct link_seg, which has the meaning of each */
    uint64_t from_off, to_off, first_byte, run_bytes, from_step, to_step, byte_step;
    uint32_t rows, tensor; /* tensor: which digest it adds to */
};
enum kernel_cast { KERNEL_NO_CAST, KERNEL_F32_TO_BF16, KERNEL_F32_TO_F16 };
enum { KERNEL_PIECE_BYTES = 128 << 10, KERNEL_MOVE_BLOCK = 256 };

/* Cut so that no piece moves more than KERNEL_PIECE_BYTES: the blocks of a launch take them in
 * turn. out NULL: counts alone. Returns how many. */
size_t kernel_pieces_cut(const struct kernel_piece *pieces, size_t n, enum kernel_cast cast,
                         struct kernel_piece *out);

/* With a cast, first_byte, run_bytes, to_* and byte_step count bytes of the result and are even,
 * from_* count bytes of the 32-bit source and are multiples of 4, as the addresses of such tensors
 * are. to NULL, without a cast: digests alone. digests: two lanes a tensor, added to; NULL: none.
 * Round to nearest, ties to even, NaN stays NaN. */
void kernel_move(const struct kernel_piece *pieces, size_t n, const void *from, void *to,
                 uint64_t (*digests)[2], enum kernel_cast cast);

/* flags[i] = 1 where block i (block_bytes, the last may be shorter) of a and b differ, else 0. */
void kernel_changed(const void *a, const void *b, uint64_t bytes, uint32_t block_bytes,
                    uint8_t *flags);
