#include <stdlib.h>
#include <sys/mman.h>
#include "worker/client/client.h"

#define HUGE_FROM                                                                                  \
    ((uint64_t)4 << 20) /* from here on 2 MiB pages save more faults than they waste */

struct blob_head {   /* in front of every blob, a cache line */
    uint64_t mapped; /* bytes of the mapping; 0: heap */
    void *base;
    uint8_t pad[48];
};
_Static_assert(sizeof(struct blob_head) == 64, "keeps blobs aligned to 64 bytes");

void *client_blob_alloc(uint64_t bytes)
{
    struct blob_head *h;

    if (bytes > SIZE_MAX / 2)
        return NULL;
    if (bytes < HUGE_FROM) {
        h = aligned_alloc(64, sizeof(*h) + ((size_t)bytes + 63) / 64 * 64);
        if (!h)
            return NULL;
        *h = (struct blob_head){ .base = h };
    } else {
        size_t len = sizeof(*h) + (size_t)bytes;

        h = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                 0);
        if (h == MAP_FAILED)
            return NULL;
        (void)madvise(h, len, MADV_HUGEPAGE); /* a wish */
        *h = (struct blob_head){ .mapped = len, .base = h };
    }
    return h + 1;
}

void client_blob_free(void *blob)
{
    struct blob_head *h = blob;

    if (!h)
        return;
    h--;
    if (h->mapped)
        munmap(h->base, h->mapped);
    else
        free(h->base);
}
