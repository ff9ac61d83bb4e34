/* Pinned memory is slow to make, so what was made stays: in slabs of what was missing, handed out
 * in blocks of one size so that nothing is ever in pieces too small. */
#include <stdlib.h>

#include "common/base/fault.h"
#include "transport/arena/arena_priv.h"

static enum fl_status grow(struct arena *a, size_t blocks, struct fl_err *err)
{
    struct pool *p = &a->pool;
    struct slab *slabs = realloc(p->slabs, (p->n_slabs + 1) * sizeof(*slabs));
    struct pool_block *all;
    void *at;

    if (slabs)
        p->slabs = slabs;
    all = realloc(p->blocks, (p->n_blocks + blocks) * sizeof(*all));
    if (all)
        p->blocks = all;
    if (!slabs || !all)
        return fl_fail(err, FL_EXHAUSTED, "no memory to note %zu pinned blocks", blocks);
    FL_TRY(a->gpu->pin(a->g, (uint64_t)blocks * ARENA_BLOCK_BYTES, &at, err));
    p->slabs[p->n_slabs++] = (struct slab){ at, (uint64_t)blocks * ARENA_BLOCK_BYTES };
    for (size_t i = 0; i < blocks; i++)
        p->blocks[p->n_blocks++] = (struct pool_block){ (char *)at + i * ARENA_BLOCK_BYTES, false };
    return FL_OK;
}

enum fl_status pool_reserve(struct arena *a, size_t free_blocks, struct fl_err *err)
{
    size_t idle = a->pool.n_blocks - a->pool.n_taken;

    return free_blocks <= idle ? FL_OK : grow(a, free_blocks - idle, err);
}

enum fl_status pool_take(struct arena *a, uint32_t *blocks, size_t n, struct fl_err *err)
{
    struct pool *p = &a->pool;
    size_t got = 0;

    FL_TRY(pool_reserve(a, n, err));
    for (size_t i = 0; got < n; i++)
        if (!p->blocks[i].taken) {
            p->blocks[i].taken = true;
            blocks[got++] = (uint32_t)i;
        }
    p->n_taken += n;
    p->peak_taken = p->n_taken > p->peak_taken ? p->n_taken : p->peak_taken;
    return FL_OK;
}

void pool_give(struct pool *p, const uint32_t *blocks, size_t n)
{
    for (size_t i = 0; i < n; i++)
        p->blocks[blocks[i]].taken = false;
    p->n_taken -= n;
}

uint64_t pool_drop(struct arena *a)
{
    struct pool *p = &a->pool;
    uint64_t bytes = 0;

    if (p->n_taken > 0) /* blocks are known by number: all or nothing */
        return 0;
    for (size_t i = 0; i < p->n_slabs; i++) {
        bytes += p->slabs[i].bytes;
        a->gpu->unpin(a->g, p->slabs[i].at);
    }
    p->n_slabs = p->n_blocks = 0;
    return bytes;
}
