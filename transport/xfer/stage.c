#include "transport/xfer/stage.h"

static uint64_t after(uint64_t at, const struct link_seg *s)
{
    uint64_t end = at + s->rows * s->run_bytes;

    return (end + STAGE_ALIGN - 1) / STAGE_ALIGN * STAGE_ALIGN;
}

uint64_t stage_bytes(const struct link_seg *segs, size_t n)
{
    uint64_t at = 0;

    for (size_t i = 0; i < n; i++)
        at = after(at, &segs[i]);
    return at;
}

void stage_fills(const struct link_seg *segs, size_t n, uint64_t base, struct link_seg *out)
{
    uint64_t at = base;

    for (size_t i = 0; i < n; i++) {
        out[i] = segs[i];
        out[i].to_off = at;
        out[i].to_step = segs[i].run_bytes;
        at = after(at, &segs[i]);
    }
}

void stage_reads(const struct link_seg *segs, size_t n, uint64_t base, struct link_seg *out)
{
    uint64_t at = base;

    for (size_t i = 0; i < n; i++) {
        out[i] = segs[i];
        out[i].from_off = at;
        out[i].from_step = segs[i].run_bytes;
        at = after(at, &segs[i]);
    }
}
