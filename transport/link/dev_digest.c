/* transport/link/dev_digest.c - digests of what lies in memory, on a device by its kernel */
#include <stdlib.h>
#include <string.h>
#include "kernels/digest.h"
#include "transport/link/dev_priv.h"
#include "transport/link/link_priv.h"

struct link_digester {
    struct link_dev *dev;
    uint64_t least_bytes; /* up to the end of the last segment */
    size_t n;
    struct dev_table t;
    uint64_t sums;       /* on the device, a pair a segment */
    uint64_t (*back)[2]; /* as many here */
};

enum fl_status link_digester_create(const struct link_mem *mem, const struct link_seg *segs,
                                    size_t n, bool from, struct link_digester **out,
                                    struct fl_err *err)
{
    FL_AUTO(link_digester) struct link_digester *g = calloc(1, sizeof(*g));
    uint64_t bytes;

    FL_TRY(link_check_side(segs, n, mem->bytes, from, &bytes, err));
    if (!g)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu digests", n);
    FL_TRY(dev_of(mem, &g->dev, err));
    g->n = n;
    for (size_t i = 0; i < n; i++) {
        uint64_t end = (from ? segs[i].from_off + (segs[i].rows - 1) * segs[i].from_step
                             : segs[i].to_off + (segs[i].rows - 1) * segs[i].to_step) +
                       segs[i].run_bytes;

        g->least_bytes = end > g->least_bytes ? end : g->least_bytes;
    }
    g->back = malloc((n + 1) * sizeof(*g->back));
    if (!g->back)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu digests", n);
    enum fl_status st = g->dev->gpu->alloc(g->dev->g, (n + 1) * sizeof(*g->back), &g->sums, err);

    if (st != FL_OK)
        return st;
    st = dev_table_make(g->dev, g->dev->upload, segs, n, from ? DEV_FROM : DEV_TO, &g->t, err);
    if (st == FL_OK)
        *out = FL_TAKE(g);
    return st;
}

static enum fl_status digester_launch(struct link_digester *g, const struct link_mem *mem,
                                      struct fl_err *err)
{
    struct link_dev *d = g->dev;
    struct kernel_move_args a = {
        .pieces = g->t.addr, .n = g->t.n, .from = dev_addr(mem->addr), .digests = g->sums
    };

    FL_TRY(d->gpu->fill(d->stream, g->sums, 0, g->n * sizeof(*g->back), err));
    pthread_mutex_lock(&d->lock);
    enum fl_status st = kernel_move_start(d->gpu, d->g, d->stream, &a, err);

    pthread_mutex_unlock(&d->lock);
    if (st == FL_OK)
        st = d->gpu->copy(d->stream, dev_addr(g->back), g->sums, g->n * sizeof(*g->back), err);
    return st == FL_OK ? d->gpu->stream_sync(d->stream, err) : st;
}

enum fl_status link_digester_run(struct link_digester *g, const struct link_mem *mem,
                                 uint64_t (*digests)[2], struct fl_err *err)
{
    const struct link_pages *p = link_pages_of(mem);

    if (!p || strcmp(p->uuid, g->dev->uuid) != 0 || mem->bytes < g->least_bytes)
        return fl_fail(err, FL_INVALID,
                       "memory at %p of %llu bytes is not on device %s, or too small", mem->addr,
                       (unsigned long long)mem->bytes, g->dev->uuid);
    if (g->n == 0)
        return FL_OK;
    pthread_mutex_lock(&g->dev->service);
    enum fl_status st = digester_launch(g, mem, err);

    for (size_t i = 0; st == FL_OK && i < g->n; i++) {
        digests[i][0] += g->back[i][0];
        digests[i][1] += g->back[i][1];
    }
    pthread_mutex_unlock(&g->dev->service);
    return st;
}

void link_digester_destroy(struct link_digester *g)
{
    if (!g)
        return;
    if (g->dev) {
        struct dev_table sums = { .addr = g->sums };

        dev_table_free(g->dev, &g->t);
        dev_table_free(g->dev, &sums);
    }
    free(g->back);
    free(g);
}

static void digest_host(const struct link_mem *mem, const struct link_seg *segs, size_t n,
                        bool from, uint64_t (*digests)[2])
{
    for (size_t i = 0; i < n; i++)
        for (uint32_t r = 0; r < segs[i].rows; r++) {
            uint64_t off = from ? segs[i].from_off + r * segs[i].from_step
                                : segs[i].to_off + r * segs[i].to_step;

            kernel_digest_add(digests[i], (const char *)mem->addr + off, segs[i].run_bytes,
                              segs[i].first_byte + r * segs[i].byte_step);
        }
}

enum fl_status link_mem_digest(const struct link_mem *mem, const struct link_seg *segs, size_t n,
                               bool from, uint64_t (*digests)[2], struct fl_err *err)
{
    FL_AUTO(link_digester) struct link_digester *g = NULL;
    uint64_t bytes;

    if (!mem->on_device) {
        FL_TRY(link_check_side(segs, n, mem->bytes, from, &bytes, err));
        digest_host(mem, segs, n, from, digests);
        return FL_OK;
    }
    FL_TRY(link_digester_create(mem, segs, n, from, &g, err));
    return link_digester_run(g, mem, digests, err);
}
