/* transport/arena/arena_priv.h - regions, chunks, spans */
#pragma once
#include <pthread.h>

#define HASH_NONFATAL_OOM 1
#include <uthash.h>

#include "transport/arena/arena.h"

enum {
    ARENA_SMALL_ALIGN = 4096,
    ARENA_BIG = 2 << 20, /* from here on aligned to it                                        */
    ARENA_BLOCK_BYTES = 32 << 20, /* of the pinned pool, and the longest copy: 0.6 ms at 55 GB/s */
    /* free bytes between used ones that are copied along: a copy is 6 us */
    ARENA_GAP_BYTES = 64 << 10,
    ARENA_FLIGHT = 16, /* chunks whose copies are under way at a time                       */
    ARENA_STREAMS = 2,
    ARENA_HOLDINGS_MAX = 65536
};
#define ARENA_VIEW_MOST ((uint64_t)1 << 46) /* of an import: half of the addresses of a process */
enum chunk_state { CHUNK_NONE, CHUNK_IN, CHUNK_OUT };
struct chunk {
    struct gpu_chunk mem;
    uint64_t used_bytes, serial; /* serial: for holders, moves along in an exchange */
    enum chunk_state state;
    uint32_t holders;
};
struct span {
    uint64_t off, bytes;
};
struct piece {
    uint64_t addr; /* key */
    uint64_t off, bytes;
    bool own_chunks;
    UT_hash_handle hh;
};
struct part {
    uint64_t off, bytes, at;
    uint32_t chunk;
}; /* at: in the backup */
struct region {
    uint64_t base, bytes, chunk_bytes;
    struct chunk *chunks;
    size_t n_chunks, n_high; /* high: beyond it no chunk has ever been */
    struct span *free;       /* sorted, never two that touch */
    size_t n_free, cap_free;
    struct piece *pieces;
    enum furlong_keep keep;
    char folder[1024];
    bool out;
    /* while something is out with its content */
    struct part *parts;
    size_t n_parts;
    uint32_t *blocks; /* of the pool */
    size_t n_blocks;
    int file;
};
struct slab {
    void *at;
    uint64_t bytes;
};
enum { ARENA_WAIT_MS = 2000 }; /* 25 times what the reaping of a killed process took */
struct pool {
    struct slab *slabs;
    size_t n_slabs;
    struct pool_block {
        char *at;
        bool taken;
    } * blocks;
    size_t n_blocks, n_taken, peak_taken;
};
struct holding { /* a chunk that somebody maps; it may be gone here already */
    char holder[ARENA_HOLDER_BYTES];
    uint64_t serial, bytes;
    uint32_t tag;
};
struct arena {
    pthread_mutex_t mu;
    const struct gpu_ops *gpu;
    struct gpu *g;
    struct gpu_info info;
    struct region regions[ARENA_TAGS];
    struct gpu_stream *streams[ARENA_STREAMS]; /* made at the first copy */
    struct pool pool;
    struct holding *holdings;
    size_t n_holdings;
    uint64_t chunks_bytes, peak_bytes, viewed_bytes, next_serial, reserve_bytes;
    unsigned slots;
    uint32_t wait_ms;
    struct growth { /* of the device's used memory, from one offload to the next */
        uint64_t used_bytes, rose_bytes;
        unsigned rises;
        bool noted;
    } growth;
};
/* room.c: until so many bytes are free on the device, or wait_ms are over; FL_EXHAUSTED: err says
 * who holds them. Where the device does not say, there is room. */
enum fl_status arena_room_wait(struct arena *a, uint64_t bytes, struct fl_err *err);
void arena_growth_note(struct arena *a, struct arena_moved *m);
struct fl_str;
void arena_say_others(struct arena *a, struct fl_str *s); /* "; held by pid 12 (20.0 GiB)" */

/* arena.c: memory under one chunk's addresses, or none. */
enum fl_status arena_chunk_in(struct arena *a, struct region *r, size_t i, struct fl_err *err);
void arena_chunk_gone(struct arena *a, struct region *r, size_t i, enum chunk_state to);
uint64_t arena_chunk_held(struct arena *a, const struct region *r, size_t i);
struct region *arena_region_at(struct arena *a, uint64_t addr);
enum fl_status arena_streams(struct arena *a, struct fl_err *err);
/* count.c: err says that so many bytes do not fit, and what would help. */
void arena_say_full(struct arena *a, uint64_t wanted_bytes, struct fl_err *err);

/* pool.c: blocks of pinned memory, in slabs that are kept. All or none are taken. */
enum fl_status pool_reserve(struct arena *a, size_t free_blocks, struct fl_err *err);
enum fl_status pool_take(struct arena *a, uint32_t *blocks, size_t n, struct fl_err *err);
void pool_give(struct pool *p, const uint32_t *blocks, size_t n);
uint64_t pool_drop(struct arena *a);
/* disk.c: the parts of r to and from a file without a name. */
enum fl_status disk_write(struct arena *a, struct region *r, struct arena_moved *m,
                          struct fl_err *err);
enum fl_status disk_read(struct arena *a, struct region *r, struct arena_moved *m,
                         struct fl_err *err);

uint64_t arena_now_ns(void);
