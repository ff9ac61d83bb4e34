#include "tests/xfer/bucket.h"
#include <string.h>
#include "kernels/digest.h"

static void copy_run(uint64_t digest[2], const struct link_seg *s, uint32_t row, void *to,
                     const void *from)
{
    if (digest)
        kernel_digest_copy(digest, to, from, s->run_bytes, s->first_byte + row * s->byte_step);
    else
        memcpy(to, from, s->run_bytes);
}

void bucket_pack(const struct link_seg *segs, size_t n, const void *from_mem, void *packed)
{
    char *to = packed;

    for (size_t i = 0; i < n; i++)
        for (uint32_t r = 0; r < segs[i].rows; r++, to += segs[i].run_bytes)
            copy_run(NULL, &segs[i], r, to,
                     (const char *)from_mem + segs[i].from_off + r * segs[i].from_step);
}

void bucket_unpack(const struct link_seg *segs, size_t n, const void *packed, void *to_mem,
                        uint64_t (*digests)[2])
{
    const char *from = packed;

    for (size_t i = 0; i < n; i++)
        for (uint32_t r = 0; r < segs[i].rows; r++, from += segs[i].run_bytes)
            copy_run(digests ? digests[i] : NULL, &segs[i], r,
                     (char *)to_mem + segs[i].to_off + r * segs[i].to_step, from);
}

void bucket_digest(const struct link_seg *segs, size_t n, const void *mem, bool from,
                        uint64_t (*digests)[2])
{
    for (size_t i = 0; i < n; i++) {
        uint64_t off = from ? segs[i].from_off : segs[i].to_off,
                 step = from ? segs[i].from_step : segs[i].to_step;

        for (uint32_t r = 0; r < segs[i].rows; r++)
            kernel_digest_add(digests[i], (const char *)mem + off + r * step, segs[i].run_bytes,
                              segs[i].first_byte + r * segs[i].byte_step);
    }
}
