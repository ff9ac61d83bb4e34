/* transport/xfer/image.h - flat little-endian images of manifests and parts of plans
 *
 * Writing: a buffer that grows; one failed growth makes it bad, and the end asks once. Reading: a
 * view that never leaves its bytes; what is past the end reads as zero and makes the view bad. */
#pragma once
#include <string.h>
#include "common/base/base.h"
#include "common/base/str.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "images are copied as they lie");

struct image_out { unsigned char *data; size_t n, cap; bool bad; };
void image_put(struct image_out *o, const void *data, size_t n_bytes);
static inline void image_put_u32(struct image_out *o, uint32_t v)
{
    image_put(o, &v, sizeof(v));
}
static inline void image_put_u64(struct image_out *o, uint64_t v)
{
    image_put(o, &v, sizeof(v));
}

struct image_in { const unsigned char *data; size_t left; bool bad; };
static inline const void *image_view(struct image_in *in, size_t n_bytes)
{
    const void *at = in->data;

    if (n_bytes > in->left) {
        in->bad = true;
        in->left = 0;
        return NULL;
    }
    in->data += n_bytes;
    in->left -= n_bytes;
    return at;
}
static inline void image_get(struct image_in *in, void *out, size_t n_bytes)
{
    const void *at = image_view(in, n_bytes);

    if (at)
        memcpy(out, at, n_bytes);
    else
        memset(out, 0, n_bytes);
}
static inline uint32_t image_get_u32(struct image_in *in)
{
    uint32_t v;

    image_get(in, &v, sizeof(v));
    return v;
}
static inline uint64_t image_get_u64(struct image_in *in)
{
    uint64_t v;

    image_get(in, &v, sizeof(v));
    return v;
}

struct xfer_tensor;
void image_put_tensor(struct image_out *o, const struct xfer_tensor *t);
/* The name stays in the image, with its terminator; dtype, ndim and shape are not judged here. */
void image_get_tensor(struct image_in *in, struct xfer_tensor *out);

void xfer_hash128(const void *data, size_t n_bytes, uint64_t out[2]); /* XXH3-128 */
