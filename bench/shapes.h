/* bench/shapes.h - the tensors of two models, bf16: Qwen3-0.6B (310, 1.19 GB), 8B (399, 16.4 GB) */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { SHAPES_MAX = 400, SHAPES_ALIGN = 256 };
struct shape {
    const char *name;
    unsigned layers;
    uint64_t hidden, q, kv, ffn, vocab, head;
    bool tied;
};
static const struct shape shape_06 = { "0.6B", 28, 1024, 2048, 1024, 3072, 151936, 128, true };
static const struct shape shape_8 = { "8B", 36, 4096, 4096, 1024, 12288, 151936, 128, false };
/* As many tensors as 0.6B, 1/16 as wide: what control costs, where memory is short. */
static const struct shape shape_thin = { "thin", 28, 64, 128, 64, 192, 9496, 8, true };
static const struct shape shape_tiny = { "tiny", 2, 256, 512, 256, 768, 8192, 128, true };

struct shape_tensor {
    char name[24];
    uint64_t rows, columns; /* 0 columns: of one dimension */
};

static inline uint64_t shape_bytes(const struct shape_tensor *t)
{
    return 2 * t->rows * (t->columns ? t->columns : 1);
}

/* In the order of a model's file; returns how many there are. */
static inline size_t shape_each(const struct shape *s, struct shape_tensor out[SHAPES_MAX])
{
    const struct shape_tensor per[] = {
        { "q_proj", s->q, s->hidden },      { "k_proj", s->kv, s->hidden },
        { "v_proj", s->kv, s->hidden },     { "o_proj", s->hidden, s->q },
        { "gate_proj", s->ffn, s->hidden }, { "up_proj", s->ffn, s->hidden },
        { "down_proj", s->hidden, s->ffn }, { "input_norm", s->hidden, 0 },
        { "post_norm", s->hidden, 0 },      { "q_norm", s->head, 0 },
        { "k_norm", s->head, 0 },
    };
    size_t n = 0;

    out[n++] = (struct shape_tensor){ "embed_tokens", s->vocab, s->hidden };
    for (unsigned l = 0; l < s->layers; l++)
        for (size_t i = 0; i < sizeof(per) / sizeof(per[0]); i++, n++) {
            out[n] = per[i];
            snprintf(out[n].name, sizeof(out[n].name), "layers.%02u.%s", l % 100, per[i].name);
        }
    out[n++] = (struct shape_tensor){ "norm", s->hidden, 0 };
    if (!s->tied)
        out[n++] = (struct shape_tensor){ "lm_head", s->vocab, s->hidden };
    return n;
}

/* Their bytes alone. */
static inline size_t shape_tensors(const struct shape *s, uint64_t bytes[SHAPES_MAX])
{
    struct shape_tensor all[SHAPES_MAX];
    size_t n = shape_each(s, all);

    for (size_t i = 0; i < n; i++)
        bytes[i] = shape_bytes(&all[i]);
    return n;
}
