/* tests/arena/small.h - an arena of small chunks, and memory of it */
#pragma once
#include "common/gpu/gpu.h"
#include "tests/t.h"
#include "transport/arena/arena.h"

#define MIB ((uint64_t)1 << 20)
enum { CHUNK = 2 << 20 }; /* so that little memory makes many */
static const struct arena_opts small = { .chunk_bytes = { CHUNK, CHUNK, CHUNK, CHUNK, CHUNK },
                                         .wait_ms = 1 };

/* o's own chunks and wait; the folder is the test's. */
static inline struct arena *arena_fresh(const struct gpu_ops *gpu, const char *uuid,
                                        const struct arena_opts *o)
{
    struct arena_opts with = *o;
    struct arena *a = NULL;
    struct fl_err err;

    with.folder = t_tmp();
    t_ok(arena_create(gpu, uuid, &with, &a, &err), &err);
    return a;
}

static inline void *arena_some(struct arena *a, uint32_t tag, uint64_t bytes, uint32_t flags)
{
    struct fl_err err;
    void *p = NULL;

    t_ok(arena_alloc(a, tag, bytes, flags, &p, &err), &err);
    t_true(p != NULL);
    return p;
}
