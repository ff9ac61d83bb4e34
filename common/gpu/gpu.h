/* common/gpu/gpu.h - devices behind one table: the CUDA driver found by dlopen, none, or a fake for
 * tests
 *
 * One binary runs with and without a GPU. Device addresses are plain numbers (of the fake: host
 * addresses). One thread of a process owns its devices: the functions make the device's context
 * current for the calling thread and do not lock. Daemons never open a device: a context holds half
 * a gigabyte and does not survive a fork. Everything asynchronous is ordered by its stream; nothing
 * here synchronizes unless its name says so. */
#pragma once
#include "common/base/base.h"

enum { GPU_MAX = 64, GPU_UUID_BYTES = 41, GPU_HANDLE_BYTES = 64 };
struct gpu_info {
    char uuid[GPU_UUID_BYTES]; /* "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx" */
    char name[64];
    int ordinal; /* in this process alone: never in a message                        */
    int major, minor, multiprocessors;
    bool integrated;      /* one memory with the host: nothing is copied "to the host"        */
    bool vmm, posix_fd;   /* chunks can be made, and exported as descriptors                  */
    bool legacy_ipc;      /* driver's word; whether a container lets it through, a probe says */
    uint64_t total_bytes; /* UINT64_MAX: not said (integrated devices)                        */
    uint64_t granularity_bytes; /* of chunks */
};

struct gpu; /* an open device of this process */
struct gpu_stream;
struct gpu_event;
struct gpu_chunk {
    uint64_t handle, bytes;
}; /* physical memory; mapped where one wants it */
struct gpu_handle {
    uint8_t b[GPU_HANDLE_BYTES];
};
struct gpu_where { /* of an address */
    char uuid[GPU_UUID_BYTES];
    uint64_t start, bytes; /* of the whole allocation or mapping that it is in */
    bool handle;           /* it has an IPC handle: a plain allocation, of no chunk and no pool */
};
struct gpu_launch {
    const char *kernel; /* of kernels/, by name */
    uint32_t grid, block, shared_bytes;
    void **params;
};

struct gpu_ops {
    const char *name; /* "cuda", "none", "fake" */

    /* What there is; *n: room in, count out. FL_UNSUPPORTED: no driver, err says what was looked
     * for. */
    enum fl_status (*list)(struct gpu_info *out, size_t *n, struct fl_err *err);
    enum fl_status (*open)(const char *uuid, struct gpu **out, struct fl_err *err);
    void (*close)(struct gpu *g); /* what is still allocated goes with it; NULL is fine */
    const struct gpu_info *(*info)(const struct gpu *g);
    enum fl_status (*memory)(struct gpu *g, uint64_t *free_bytes, uint64_t *total_bytes,
                             struct fl_err *err);

    /* waits for all that this process gave the device */
    enum fl_status (*sync)(struct gpu *g, struct fl_err *err);

    /* Chunks are born exportable: the kind of handle cannot be added later. bytes: a multiple of
     * the granularity. */
    enum fl_status (*chunk_create)(struct gpu *g, uint64_t bytes, struct gpu_chunk *out,
                                   struct fl_err *err);
    /* lives on while mapped or imported anywhere */
    void (*chunk_release)(struct gpu *g, struct gpu_chunk *c);
    /* bytes of memory that it takes now */
    uint64_t (*chunk_held)(struct gpu *g, const struct gpu_chunk *c);
    enum fl_status (*chunk_export)(struct gpu *g, const struct gpu_chunk *c, int *fd,
                                   struct fl_err *err);
    enum fl_status (*chunk_import)(struct gpu *g, int fd, uint64_t bytes, struct gpu_chunk *out,
                                   struct fl_err *err);
    enum fl_status (*reserve)(struct gpu *g, uint64_t bytes, uint64_t *addr, struct fl_err *err);
    void (*unreserve)(struct gpu *g, uint64_t addr, uint64_t bytes);
    enum fl_status (*map)(struct gpu *g, uint64_t addr, const struct gpu_chunk *c, bool writable,
                          struct fl_err *err);
    enum fl_status (*unmap)(struct gpu *g, uint64_t addr, uint64_t bytes, struct fl_err *err);

    /* Plain allocations, for staging and as the foreign memory that others bring. These and pinned
     * memory: any thread. free and unpin wait for all that the device was given: under no lock, and
     * not behind what may never end. */
    enum fl_status (*alloc)(struct gpu *g, uint64_t bytes, uint64_t *addr, struct fl_err *err);
    void (*free)(struct gpu *g, uint64_t addr);
    /* A handle covers the whole allocation: off is where addr lies in it. FL_UNSUPPORTED: memory of
     * chunks and pools. */
    enum fl_status (*ipc_get)(struct gpu *g, uint64_t addr, struct gpu_handle *out, uint64_t *off,
                              struct fl_err *err);
    enum fl_status (*ipc_open)(struct gpu *g, const struct gpu_handle *h, uint64_t *addr,
                               struct fl_err *err);
    void (*ipc_close)(struct gpu *g, uint64_t addr);
    /* Bytes from addr to the end of the allocation or mapping it is in; UINT64_MAX: not said. */
    uint64_t (*left_of)(struct gpu *g, uint64_t addr);
    /* may read its memory */
    enum fl_status (*peer)(struct gpu *g, const struct gpu *other, struct fl_err *err);

    /* Where memory of this process lies that anybody may have allocated. FL_NOT_FOUND: on no
     * device. */
    enum fl_status (*where)(uint64_t addr, struct gpu_where *out, struct fl_err *err);

    /* Pinned host memory, every page of it there. Slow to make (half a second a GiB): once, and
     * kept. */
    enum fl_status (*pin)(struct gpu *g, uint64_t bytes, void **out, struct fl_err *err);
    void (*unpin)(struct gpu *g, void *p);

    enum fl_status (*stream)(struct gpu *g, struct gpu_stream **out, struct fl_err *err);
    void (*stream_free)(struct gpu_stream *s);
    enum fl_status (*stream_sync)(struct gpu_stream *s, struct fl_err *err);
    void *(*stream_raw)(struct gpu_stream *s); /* the driver's own, for NCCL */
    /* of somebody else's stream */
    enum fl_status (*raw_sync)(struct gpu *g, void *raw, struct fl_err *err);
    enum fl_status (*stream_wait)(struct gpu_stream *s, struct gpu_event *e, struct fl_err *err);
    enum fl_status (*event)(struct gpu *g, struct gpu_event **out, struct fl_err *err);
    void (*event_free)(struct gpu_event *e);
    enum fl_status (*event_record)(struct gpu_event *e, struct gpu_stream *s, struct fl_err *err);
    enum fl_status (*event_done)(struct gpu_event *e, struct fl_err *err); /* FL_AGAIN: not yet */
    enum fl_status (*event_sync)(struct gpu_event *e, struct fl_err *err);
    enum fl_status (*event_ms)(struct gpu_event *from, struct gpu_event *to, float *ms,
                               struct fl_err *err);

    /* Any of device, peer and pinned host on either side. */
    enum fl_status (*copy)(struct gpu_stream *s, uint64_t to, uint64_t from, uint64_t bytes,
                           struct fl_err *err);
    enum fl_status (*fill)(struct gpu_stream *s, uint64_t to, uint8_t value, uint64_t bytes,
                           struct fl_err *err);
    enum fl_status (*launch)(struct gpu_stream *s, const struct gpu_launch *l, struct fl_err *err);
};
/* gpu_host: host memory with the same face, one integrated device; a chunk is a sealed memfd whose
 * pages come when touched. */
extern const struct gpu_ops gpu_cuda, gpu_none, gpu_fake, gpu_host;

/* FURLONG_GPU=cuda|none|host|fake|fake:gb10|fake:N (N devices); unset: cuda where a driver is, else
 * none. The choice is made once. FL_INVALID: another word. */
enum fl_status gpu_pick(const struct gpu_ops **out, struct fl_err *err);
/* Can memory of this process be a device's? Does not start a driver: a host program must not pay
 * for one. */
bool gpu_in_use(void);
/* What kernels/ brings, noted once before the first launch: the device code that the driver picks
 * from (NULL: a build without a CUDA compiler), and the plain C twins that the fake and the host
 * run instead. params as for the device. */
enum { GPU_PARAMS = 5 };
struct gpu_twin {
    const char *name;
    void (*run)(uint32_t grid, uint32_t block, void **params);
    uint8_t param_bytes[GPU_PARAMS];
};
struct gpu_code {
    const void *image;
    const struct gpu_twin *twins;
    size_t n_twins;
};
void gpu_code_set(const struct gpu_code *code);
