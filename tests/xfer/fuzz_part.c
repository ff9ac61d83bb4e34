/* manifests and parts of plans, bent at will: refused, or safe to check and to carry out */
#include <stdlib.h>
#include <string.h>
#include "tests/xfer/bucket.h"
#include "transport/xfer/plan.h"

static const struct xfer_tensor tensors[] = {
    { "a", FL_BF16, 2, { 6, 8 } },
    { "b", FL_F32, 1, { 9 } },
};
static const uint64_t mem_bytes[] = { 200 };
static const struct xfer_piece pieces[] = {
    { 0, 0, 0, { { 0, 4 }, { 6, 4 } } },
    { 1, 0, 64, { { 0 }, { 9 } } },
};

static struct xfer_manifest manifest(void)
{
    struct xfer_manifest m = { .tensors = tensors,
                               .pieces = pieces,
                               .mem_bytes = mem_bytes,
                               .n_tensors = 2,
                               .n_pieces = 2,
                               .n_mems = 1 };

    if (xfer_manifest_seal(&m, NULL) != FL_OK)
        abort();
    return m;
}

/* A real image first, so that there is something to bend. */
static size_t good_image(bool part, unsigned char *out, size_t room)
{
    static const struct xfer_piece whole[] = {
        { 0, 0, 0, { { 0 }, { 6, 8 } } },
        { 1, 0, 96, { { 0 }, { 9 } } },
    };
    struct xfer_manifest engine[2] = { manifest(), manifest() }, source = manifest();
    struct xfer_piece other[2] = { { 0, 0, 0, { { 0, 0 }, { 6, 4 } } }, pieces[1] };
    struct link_place places[3] = { { .host_boot = "x", .addr = "x" },
                                    { .host_boot = "x", .addr = "x" },
                                    { .addr = "y" } };
    struct xfer_plan_in in = { .sources = &source,
                               .engines = engine,
                               .places = places,
                               .n_sources = 1,
                               .n_engines = 2,
                               .mode = XFER_P2P,
                               .spare_bytes = XFER_NO_LIMIT };
    struct xfer_plan *p;
    void *image;
    size_t n;

    source.pieces = whole;
    engine[1].pieces = other;
    if (xfer_manifest_seal(&source, NULL) || xfer_manifest_seal(&engine[1], NULL) ||
        xfer_plan_make(&in, &p, NULL))
        abort();
    if (part ? xfer_part_encode(p, 1, &image, &n, NULL)
             : xfer_manifest_encode(&engine[0], &image, &n, NULL))
        abort();
    n = n < room ? n : room;
    memcpy(out, image, n);
    free(image);
    xfer_plan_destroy(p);
    return n;
}

static void bend(unsigned char *image, size_t n, const uint8_t *data, size_t size)
{
    for (; size >= 3; data += 3, size -= 3)
        image[(data[0] | data[1] << 8) % n] = data[2];
}

/* What passed the check is carried out: the sanitizer sees a byte too far. */
static void carry_out(const struct xfer_plan *part)
{
    char *mem = malloc(mem_bytes[0]);

    for (size_t i = 0; i < part->n_buckets; i++) {
        const struct xfer_bucket *b = &part->buckets[i];
        char *packed = calloc(1, b->bytes);

        if (packed)
            bucket_unpack(part->segs + b->first_seg, b->n_segs, packed, mem, NULL);
        free(packed);
    }
    free(mem);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    unsigned char image[4096];
    struct xfer_manifest mine = manifest(), *m;
    struct xfer_plan *part;
    size_t n = good_image(true, image, sizeof(image));

    bend(image, n, data, size);
    if (xfer_part_decode(image, n, NULL, &part, NULL) == FL_OK) {
        if (xfer_part_check(part, 1, &mine, NULL) == FL_OK)
            carry_out(part);
        xfer_plan_destroy(part);
    }
    n = good_image(false, image, sizeof(image));
    bend(image, n, data, size);
    if (xfer_manifest_decode(image, n, &m, NULL) == FL_OK)
        free(m);
    if (xfer_manifest_decode(data, size, &m, NULL) == FL_OK)
        free(m);
    if (xfer_part_decode(data, size, NULL, &part, NULL) == FL_OK)
        xfer_plan_destroy(part);
    return 0;
}
