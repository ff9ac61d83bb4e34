/* whatever bytes come: refused, or every tensor lies inside them */
#include <stdlib.h>
#include <string.h>
#include "transport/fmt/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct st_reader *r = NULL;
    uint64_t len = size;
    unsigned char *image = malloc(size + 8);
    volatile unsigned sum = 0;

    memcpy(image, &len, 8); /* as a header without data, so that mutations reach the JSON ... */
    memcpy(image + 8, data, size);
    for (unsigned k = 0; k < 2; k++) { /* ... and as it is */
        if (st_read_image(k ? data : image, k ? size : size + 8, &r, NULL) != FL_OK)
            continue;
        for (size_t i = 0; i < st_count(r); i++) {
            const struct st_tensor *t = st_at(r, i);

            for (uint64_t b = 0; b < t->bytes; b++)
                sum += ((const unsigned char *)t->data)[b];
        }
        st_reader_destroy(r);
        r = NULL;
    }
    free(image);
    (void)sum; /* reading is what matters */
    return 0;
}
