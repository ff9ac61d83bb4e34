/* transport/arena/arena.h - memory by tag that goes and comes back at the same addresses
 *
 * One arena is one device's memory in one process, or the host's (table gpu_host): the face is the
 * same. A tag has a range of addresses, reserved once, under which chunks of physical memory come
 * and go. Chunks can be exported from birth. What others map is counted by chunk and holder, never
 * by process: pages live on with whoever maps them. Any thread; one call at a time (mutex). Nothing
 * may be using the memory of a tag while it goes. */
#pragma once
#include <furlong/furlong.h>

#include "common/gpu/gpu.h"

enum { ARENA_TAGS = 5, ARENA_HOLDER_BYTES = 64 };
struct arena;
struct arena_opts {                   /* zeros: the defaults */
    uint64_t chunk_bytes[ARENA_TAGS]; /* by bit of the tag: 256 MiB for weights, 64 MiB else;
                                         rounded up to what the device has */
    uint64_t reserve_bytes;           /* addresses a tag: four times the device's memory */
    const char *folder;               /* of FURLONG_KEEP_DISK */
    uint32_t wait_ms;                 /* for memory that others are giving back: 2000 */
};
/* uuid: of the device; of host memory "host". Opens the device. FL_UNSUPPORTED: it has no
 * chunks. */
enum fl_status arena_create(const struct gpu_ops *gpu, const char *uuid, const struct arena_opts *o,
                            struct arena **out, struct fl_err *err);
void arena_destroy(struct arena *a); /* with all its memory; NULL is fine */
/* "weights", "kv_cache", "cuda_graph", "optimizer", "default" */
const char *arena_tag_name(uint32_t tag);

/* ---- memory ---- */
enum {
    ARENA_ZEROED = 1u << 0,    /* bytes are 0                                                     */
    ARENA_OWN_CHUNKS = 1u << 1 /* shares no chunk with other memory: may be exported, exchanged */
};
/* Aligned to 4 KiB, from 2 MiB on to 2 MiB.
 *
 * FL_AGAIN      the tag is offloaded
 * FL_EXHAUSTED  err says what is held here and what one slot, or a smaller kv_cache, would save */
enum fl_status arena_alloc(struct arena *a, uint32_t tag, uint64_t bytes, uint32_t flags,
                           void **out, struct fl_err *err);
/* also while its tag is out; what is not of this arena is passed over */
void arena_free(struct arena *a, void *p);
/* Until all that this process gave the device has run: before memory is freed that it may use. */
enum fl_status arena_wait(struct arena *a, struct fl_err *err);
/* The same for one stream, the driver's own (CUstream); NULL: as arena_wait(). */
enum fl_status arena_wait_stream(struct arena *a, void *stream, struct fl_err *err);
/* What the device still has; UINT64_MAX: it does not say (integrated devices). */
uint64_t arena_left_bytes(struct arena *a);
/* The chunks that hold those bytes: their addresses, and the tag. false: not all of it is of this
 * arena. */
struct arena_chunks {
    uint64_t start, end;
    uint32_t tag;
};
bool arena_chunks_of(struct arena *a, const void *p, uint64_t bytes, struct arena_chunks *out);
/* Weights are held in so many slots: for the advice when memory ends. 1 at first. */
void arena_note_slots(struct arena *a, unsigned slots);

/* ---- offload and onload ---- */
/* What offload does with a tag. At first: weights, kv_cache and cuda_graph are dropped; optimizer
 * and default go to pinned host memory, where that is memory of its own, else they stay. Where host
 * and device share one memory nothing is copied to the host: FURLONG_KEEP_HOST keeps in place. */
enum fl_status arena_keep(struct arena *a, uint32_t tags, enum furlong_keep how, const char *folder,
                          struct fl_err *err);
bool arena_drops(struct arena *a, uint32_t tag);

struct arena_moved { /* of one offload or onload */
    /* spent in mapping, unmapping, making and giving back memory, opening files */
    uint64_t setup_ns;
    uint64_t copy_ns; /* the copies' own time, from the first to the last; runs beside the set-up */
    uint64_t wall_ns; /* the whole call */
    uint64_t dropped_bytes, kept_bytes, backed_bytes,
        written_bytes;     /* gone, in place, to or from the host, the disk */
    uint64_t shared_bytes; /* of kept_bytes: stayed because others map it */
    uint64_t grown_bytes;  /* offload: the device is fuller by so much than three offloads ago, more
                              than 64 MiB each time; 0: it is not growing */
};
/* Waits for the device, then moves. A tag that is out or in already is no error. What others map
 * stays.
 *
 * Memory that was just given back elsewhere may come late: onload waits until the device has room,
 * at most wait_ms, and maps nothing before.
 *
 * On failure of an offload what had moved is brought back, and nothing was dropped; err says when
 * even that failed, and the tag is out then. On failure of an onload a tag is in or out as a whole:
 * arena_out().
 * FL_EXHAUSTED  offload: no host memory, or the disk is full; onload: no device memory */
enum fl_status arena_offload(struct arena *a, uint32_t tags, struct arena_moved *out,
                             struct fl_err *err);
enum fl_status arena_onload(struct arena *a, uint32_t tags, struct arena_moved *out,
                            struct fl_err *err);
uint32_t arena_out(struct arena *a); /* tags that are offloaded now */
/* The pinned pool, made before it is needed: it is slow (half a second a GiB). It stays until
 * arena_pool_drop(). */
enum fl_status arena_pool_prepare(struct arena *a, uint64_t bytes, struct fl_err *err);
uint64_t arena_pool_drop(struct arena *a); /* what holds no backup is given back; returns bytes */

/* ---- sharing ---- */
struct arena_export {                 /* chunks, in order of their addresses */
    uint64_t chunk_bytes, off, bytes; /* off: where the memory begins in the first chunk */
    uint32_t n;
    int *fds; /* the caller's; close after the peer has answered: arena_export_fini() */
};
/* Memory of one allocation. holder: who will map it ("rollout 3"), until arena_release(). It does
 * not go while held. */
enum fl_status arena_export(struct arena *a, const void *p, uint64_t bytes, const char *holder,
                            struct arena_export *out, struct fl_err *err);
void arena_export_fini(struct arena_export *x);
void arena_release(struct arena *a, const char *holder); /* unmapped by it, or it is gone */

struct arena_view; /* another process's memory, mapped here */
enum fl_status arena_import(struct arena *a, const struct arena_export *theirs, bool writable,
                            struct arena_view **out, struct fl_err *err);
void *arena_view_data(const struct arena_view *v);
void arena_view_drop(struct arena *a, struct arena_view *v); /* NULL is fine */

/* For captured graphs: the addresses stay, the memory under them is exchanged. Both of one size and
 * writability; of arena_alloc with ARENA_OWN_CHUNKS. Nothing may be using either. On failure both
 * are as they were, or err says that they are not mapped. */
enum fl_status arena_exchange(struct arena *a, void *p, void *q, struct fl_err *err);
enum fl_status arena_view_exchange(struct arena *a, struct arena_view *p, struct arena_view *q,
                                   struct fl_err *err);

/* ---- accounting ---- */
struct arena_usage {
    struct arena_tag_usage {
        uint64_t used_bytes;   /* allocated, here or out     */
        uint64_t held_bytes;   /* physical memory held here  */
        uint64_t shared_bytes; /* of held: mapped by others  */
        uint32_t chunks, chunks_out;
        bool out;
    } tags[ARENA_TAGS];
    uint64_t held_bytes, peak_held_bytes; /* of all tags              */
    uint64_t left_bytes;   /* given back here and still mapped by others: not free on the device */
    uint64_t viewed_bytes; /* others' memory seen here: theirs, counted there */
    uint64_t pool_bytes, pool_used_bytes, peak_pool_used_bytes; /* pinned host memory        */
};
void arena_usage(struct arena *a, bool restart_peaks, struct arena_usage *out);
struct arena_holding {
    char holder[ARENA_HOLDER_BYTES];
    uint32_t tag;
    uint64_t bytes;
};
/* a line a holder and tag; how many */
size_t arena_holders(struct arena *a, struct arena_holding *out, size_t room);

FL_AUTO_DEFINE(arena)
