/* transport/link/dev.h - device memory for links: whose it is, and work on it for those who may
 * wait
 *
 * A device is opened once in a process and stays open: a context takes a third of a second and half
 * a gigabyte. link_mem_read(), _write() and _digest() take memory of any kind, so their callers
 * never ask which they hold. */
#pragma once
#include "common/gpu/gpu.h"
#include "common/gpu/probe.h"
#include "transport/link/link.h"

enum { LINK_PAGES = 0x67706c66 }; /* "flpg" */
struct link_pages {               /* link_mem.impl of device memory */
    uint32_t magic;
    uint32_t n_chunks; /* 0: none that could be shared by descriptor */
    char uuid[GPU_UUID_BYTES];
    const int *fds; /* of each chunk, exported once; the owner's, until the memory goes */
    uint64_t off;   /* of the memory in the first chunk */
    const struct gpu_chunk *chunks; /* the same as this process has them; NULL: by fds */
    /* addresses that no other process can map: peers are given copies, a bucket at a time */
    bool staged;
};
const struct link_pages *link_pages_of(const struct link_mem *mem); /* NULL: host memory */

/* Work of this process is about to come: a device that several processes use changes from one to
 * the other in 130 us (H200), and does it while messages are under way. Waits for nobody; not open:
 * nothing. */
void link_dev_stir(const char *uuid);
/* A slot of our own on a device: chunks that any peer can map. Opens the device.
 * FL_EXHAUSTED: err says what the device has left and what one slot would save. */
enum fl_status link_dev_alloc(const char *uuid, uint64_t bytes, struct link_mem *out,
                              struct fl_err *err);
void link_dev_free(struct link_mem *mem); /* {0} is fine */
/* Memory that somebody else allocated there (cudaMalloc, PyTorch): shared by handle, else staged.
 * The description is freed by link_dev_free(), the memory is not. */
enum fl_status link_dev_foreign(const char *uuid, uint64_t addr, uint64_t bytes,
                                struct link_mem *out, struct fl_err *err);
/* The same without a handle: bytes of other things may lie between. */
enum fl_status link_dev_staged(const char *uuid, uint64_t addr, uint64_t bytes,
                               struct link_mem *out, struct fl_err *err);
/* Addresses that stay where captured graphs have them, while the memory that is seen there changes.
 * What is shown keeps its own addresses too. */
struct link_window;
enum fl_status link_window_create(const char *uuid, uint64_t bytes, struct link_window **out,
                                  struct fl_err *err);
/* FL_UNSUPPORTED: that memory has no chunks of its own to show. */
enum fl_status link_window_can(const struct link_window *w, const struct link_mem *mem,
                               struct fl_err *err);
/* Nothing may be reading there. On failure nothing is seen there. */
enum fl_status link_window_show(struct link_window *w, const struct link_mem *mem, bool writable,
                                struct fl_err *err);
void link_window_hide(struct link_window *w);
void *link_window_data(const struct link_window *w);
void link_window_destroy(struct link_window *w); /* NULL is fine */

/* For threads that may wait. */
/* The segments from one memory to another on the same device; the end of it is waited for. */
enum fl_status link_mem_move(const struct link_mem *from, const struct link_mem *to,
                             const struct link_seg *segs, size_t n, struct fl_err *err);
struct link_run {
    uint64_t off, bytes;
};
enum { LINK_RUNS_BYTES = 1 << 20 }; /* of all runs of one call */
enum fl_status link_mem_get(const struct link_mem *mem, const struct link_run *runs, size_t n,
                            void *to, struct fl_err *err); /* one after the other in to */
enum fl_status link_mem_put(const struct link_mem *mem, const struct link_run *runs, size_t n,
                            const void *from, struct fl_err *err);
enum fl_status link_mem_read(const struct link_mem *mem, uint64_t off, void *to, uint64_t bytes,
                             struct fl_err *err);
enum fl_status link_mem_write(const struct link_mem *mem, uint64_t off, const void *from,
                              uint64_t bytes, struct fl_err *err);
/* Of what the segments read (from) or were written to, added to digests, one a segment. */
enum fl_status link_mem_digest(const struct link_mem *mem, const struct link_seg *segs, size_t n,
                               bool from, uint64_t (*digests)[2], struct fl_err *err);

/* The same segments again and again: what they need on the device is made once. The segments are
 * not kept. */
struct link_digester;
enum fl_status link_digester_create(const struct link_mem *mem, const struct link_seg *segs,
                                    size_t n, bool from, struct link_digester **out,
                                    struct fl_err *err);
/* mem: where they lie inside, on the same device */
enum fl_status link_digester_run(struct link_digester *g, const struct link_mem *mem,
                                 uint64_t (*digests)[2], struct fl_err *err);
void link_digester_destroy(struct link_digester *g);  /* NULL is fine */
FL_AUTO_DEFINE(link_digester)

/* Where memory on a device is, by what the probe of this machine found. FL_NOT_FOUND: err lists
 * the devices there are. */
enum fl_status link_place_device(struct link_place *p, const char *uuid,
                                 const struct gpu_found *found, size_t n, struct fl_err *err);
/* Which NCCL this process has or would load, and its settings; link_place_device() does it. */
void link_place_nccl(struct link_place *p);
uint64_t link_gpu_id(const char *uuid); /* for link_place.gpu_peers */
