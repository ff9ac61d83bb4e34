/* bench/shapes.h - the tensors of two models, bf16: Qwen3-0.6B (310, 1.19 GB), 8B (399, 16.4 GB) */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SHAPES_MAX = 400, SHAPES_ALIGN = 256 };
struct shape {
    const char *name;
    uint64_t layers, hidden, q, kv, ffn, vocab, head;
    bool tied;
};
static const struct shape shape_06 = { "0.6B", 28, 1024, 2048, 1024, 3072, 151936, 128, true };
static const struct shape shape_8 = { "8B", 36, 4096, 4096, 1024, 12288, 151936, 128, false };
/* As many tensors as 0.6B, 1/16 as wide: what control costs, where memory is short. */
static const struct shape shape_thin = { "thin", 28, 64, 128, 64, 192, 9496, 8, true };
static const struct shape shape_tiny = { "tiny", 2, 256, 512, 256, 768, 8192, 128, true };

/* Bytes of each tensor; returns how many there are. */
static inline size_t shape_tensors(const struct shape *s, uint64_t out[SHAPES_MAX])
{
    const uint64_t per[11] = { s->q * s->hidden,   s->kv * s->hidden,  s->kv * s->hidden,
                               s->hidden * s->q,   s->ffn * s->hidden, s->ffn * s->hidden,
                               s->hidden * s->ffn, s->hidden,          s->hidden,
                               s->head,            s->head };
    size_t n = 0;

    out[n++] = 2 * s->vocab * s->hidden;
    for (uint64_t l = 0; l < s->layers; l++)
        for (size_t i = 0; i < 11; i++)
            out[n++] = 2 * per[i];
    out[n++] = 2 * s->hidden;
    if (!s->tied)
        out[n++] = 2 * s->vocab * s->hidden;
    return n;
}
