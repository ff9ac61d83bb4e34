/* transport/link/dev_priv.h - an open device, for the links that use it */
#pragma once
#include <pthread.h>
#include "kernels/launch.h"
#include "transport/link/dev.h"

struct link_dev {
    struct link_dev *next;
    char uuid[GPU_UUID_BYTES];
    const struct gpu_ops *gpu;
    struct gpu *g;
    /* Around calls that change g: launch, map. Never while waiting, so never around free and unpin:
     * who is to end a broadcast that hangs has to launch. */
    pthread_mutex_t lock;
    pthread_mutex_t handles; /* of opened */
    pthread_mutex_t service; /* of what follows, for one who waits */
    struct gpu_stream *stream;
    struct gpu_stream *upload; /* of tables, any thread: nothing else is ever queued on it */
    void *bounce; /* pinned; behind it struct dev_stir */
    struct dev_opened *opened;
    bool warm;
};
enum { DEV_BOUNCE_BYTES = 8 << 20 };
/* Opens it at first, which blocks; stays open. */
enum fl_status link_dev_get(const char *uuid, struct link_dev **out, struct fl_err *err);
/* The code of the kernels that links launch is on the device: loading it waits for what runs there.
 */
enum fl_status dev_warm(struct link_dev *d, struct fl_err *err);
enum fl_status dev_of(const struct link_mem *mem, struct link_dev **out, struct fl_err *err);
static inline uint64_t dev_addr(const void *p)
{
    return (uint64_t)(uintptr_t)p;
}

/* A table of pieces on the device, there when the call returns; tensor of each is its segment. s is
 * waited for: d->upload, unless nothing else can be on it. */
struct dev_table {
    uint64_t addr, n;
};
enum dev_side { DEV_MOVE, DEV_FROM, DEV_TO }; /* both, or offsets of one side alone */
enum fl_status dev_table_make(struct link_dev *d, struct gpu_stream *s, const struct link_seg *segs,
                              size_t n, enum dev_side side, struct dev_table *out,
                              struct fl_err *err);
/* The same by hand, for who cannot give it back at once. cut: free() it; tensor of each is its
 * segment. */
enum fl_status dev_pieces_cut(const struct link_seg *segs, size_t n, struct kernel_piece **out,
                              size_t *n_out, struct fl_err *err);
enum fl_status dev_table_room(struct link_dev *d, size_t n, struct dev_table *out,
                              struct fl_err *err);
enum fl_status dev_table_upload(struct link_dev *d, struct gpu_stream *s,
                                const struct kernel_piece *cut, const struct dev_table *t,
                                struct fl_err *err);
/* What lies contiguous in both memories, as few and as long as they are, in order. */
struct dev_stretch {
    uint64_t from_off, to_off, bytes; /* bytes 0: one segment whose rows lie apart */
    size_t first, n;                  /* segments */
};
/* n of room */
size_t dev_stretches(const struct link_seg *segs, size_t n, struct dev_stretch *out);
void dev_table_free(struct link_dev *d, struct dev_table *t); /* waits for the device */

/* A handle is opened once in a process, however often it comes. *bytes: of what is seen at *addr;
 * UINT64_MAX: the driver does not say. */
enum fl_status dev_handle_open(struct link_dev *d, const struct gpu_handle *h, uint64_t *addr,
                               uint64_t *bytes, struct fl_err *err);
void dev_handle_close(struct link_dev *d, uint64_t addr);
unsigned dev_handles_opened(void); /* since the start: tests count them */
/* n chunks of descriptors, of each bytes, at addr. keep: their handles, to map them elsewhere too
 * and to release; NULL: they live as long as they are mapped. */
enum fl_status dev_map_chunks(struct link_dev *d, uint64_t addr, const int *fds, unsigned n,
                              uint64_t each, bool writable, struct gpu_chunk *keep,
                              struct fl_err *err);
