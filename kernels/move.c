#include "kernels/move.h"

#include <string.h>

#include "kernels/digest.h"
#include "kernels/half.h"

size_t kernel_pieces_cut(const struct kernel_piece *pieces, size_t n, enum kernel_cast cast,
                         struct kernel_piece *out)
{
    size_t made = 0;

    for (size_t i = 0; i < n; i++) {
        const struct kernel_piece *p = &pieces[i];
        uint32_t rows = p->run_bytes >= KERNEL_PIECE_BYTES
                            ? 1
                            : (uint32_t)(KERNEL_PIECE_BYTES / (p->run_bytes ? p->run_bytes : 1));

        for (uint64_t row = 0; row < p->rows; row += rows)
            for (uint64_t at = 0; at < p->run_bytes; at += KERNEL_PIECE_BYTES, made++) {
                uint64_t left = p->run_bytes - at;
                struct kernel_piece q = *p;

                q.from_off += row * p->from_step + (cast == KERNEL_NO_CAST ? at : 2 * at);
                q.to_off += row * p->to_step + at;
                q.first_byte += row * p->byte_step + at;
                q.run_bytes = left < KERNEL_PIECE_BYTES ? left : KERNEL_PIECE_BYTES;
                q.rows = p->rows - row < rows ? (uint32_t)(p->rows - row) : rows;
                if (out)
                    out[made] = q;
            }
    }
    return made;
}

/* ==== plain twins ==== */
static void move_run(const char *from, char *to, uint64_t bytes, uint64_t first, uint64_t *digest,
                     enum kernel_cast cast)
{
    if (cast == KERNEL_NO_CAST) {
        if (!to)
            kernel_digest_add(digest, from, bytes, first);
        else if (digest)
            kernel_digest_copy(digest, to, from, bytes, first);
        else
            memcpy(to, from, bytes);
        return;
    }
    for (uint64_t at = 0; at + 1 < bytes; at += 2) {
        float x;
        uint16_t y;

        memcpy(&x, from + 2 * at, sizeof(x));
        y = cast == KERNEL_F32_TO_BF16 ? kernel_bf16_of_f32(x) : kernel_f16_of_f32(x);
        memcpy(to + at, &y, sizeof(y));
    }
    if (digest)
        kernel_digest_add(digest, to, bytes, first);
}

void kernel_move(const struct kernel_piece *pieces, size_t n, const void *from, void *to,
                 uint64_t (*digests)[2], enum kernel_cast cast)
{
    for (size_t i = 0; i < n; i++) {
        const struct kernel_piece *p = &pieces[i];

        for (uint32_t row = 0; row < p->rows; row++)
            move_run((const char *)from + p->from_off + row * p->from_step,
                     to ? (char *)to + p->to_off + row * p->to_step : NULL, p->run_bytes,
                     p->first_byte + row * p->byte_step, digests ? digests[p->tensor] : NULL, cast);
    }
}

void kernel_changed(const void *a, const void *b, uint64_t bytes, uint32_t block_bytes,
                    uint8_t *flags)
{
    for (uint64_t at = 0; at < bytes; at += block_bytes) {
        uint64_t n = bytes - at < block_bytes ? bytes - at : block_bytes;

        flags[at / block_bytes] = memcmp((const char *)a + at, (const char *)b + at, n) != 0;
    }
}
