/* transport/link/ipc_priv.h - the link inside one host's devices: keys and views (ipc_key.c), pulls
 * (ipc_pull.c), and when they end (cuda_ipc.c) */
#pragma once
#include <sys/queue.h>
#include "transport/link/dev_priv.h"
#include "transport/link/link_priv.h"

enum {
    IPC_KEY_MAGIC = 0x63706966, /* "fipc" */
    IPC_VIEW_MAGIC = 0x76706966,
    IPC_MAX_PULLS = 16,   /* in flight on a link; past it FL_AGAIN until one is back */
    IPC_TABLES = 256,     /* kept on the device: those of a plan serve every version */
    IPC_MAX_CHUNKS = 4096 /* 1 TiB in chunks of 256 MiB */
};
#define IPC_CHUNK_MOST ((uint64_t)64 << 30)
enum ipc_kind { IPC_CHUNKS = 1, IPC_HANDLE = 2 };
struct ipc_key { /* in link_key.blob */
    uint32_t magic, kind;
    int32_t pid; /* in the pid namespace that both are in: reaches() has seen to it */
    uint32_t n_chunks, first_chunk, pad;
    char uuid[48];
    uint64_t bytes, chunk_bytes, off;
    struct gpu_handle handle;
};
_Static_assert(sizeof(struct ipc_key) <= sizeof(((struct link_key *)0)->blob), "fits a key");

/* Somebody's memory seen here; pulls in flight count as users, so that unmap cannot come too
 * early. */
struct ipc_view {
    struct link_pages pages; /* first: a view is memory of this device like any other */
    uint32_t magic, users;
    struct ipc_key key;
    uint64_t base, reserved_bytes;
    struct gpu_chunk *chunks; /* kept: what is shown elsewhere too has to be mapped again */
    uint32_t n_mapped;
    bool writable;
};

struct ipc_pull {
    struct ipc *k;
    struct link_op *op;
    struct ipc_view *view;
    struct gpu_event *begun, *moved, *rest, *ended;
    uint64_t sums;       /* on the device */
    uint64_t (*back)[2]; /* pinned; a pair a segment, as far as room goes */
    size_t room;
    uint64_t (*digests)[2];
    size_t n;
    uint64_t bytes, began_ns, expect_ns;
};
struct ipc_table {
    uint64_t key[2], used;
    struct dev_table t;
    struct dev_stretch *far;      /* copied so from another device, and t digests; NULL: t moves */
    size_t n_far, far_cut, t_cut; /* cut: so many of them, and of t's pieces, come before the end */
};
enum ipc_state { IPC_OPENING, IPC_OPEN, IPC_BROKEN };
struct ipc {
    struct link base;
    struct link_place self, *members;
    unsigned n_members;
    enum ipc_state state;
    bool stop, closed;
    struct link_dev *dev;
    struct gpu_stream *stream,
        *aside; /* aside: digests of what was copied, beside the next copies */
    struct fl_work opening;
    struct fl_err open_err;
    struct link_op *ready, *quiet;
    struct ipc_pull pulls[IPC_MAX_PULLS]; /* a ring in the stream's order */
    unsigned first, n_pulls;
    struct ipc_table tables[IPC_TABLES];
    uint64_t uses;
    struct fl_task poll;
    struct fl_timer look;
};
/* cuda_ipc.c: what a pull is expected to take. */
uint64_t ipc_copy_ns(const struct link_place *from, const struct link_place *to, uint64_t bytes);
enum fl_status ipc_pull(struct link *base, const struct link_mem *theirs,
                        const struct link_mem *mine, const struct link_seg *segs, size_t n,
                        uint64_t (*digests)[2], struct link_op *op, struct fl_err *err);
void ipc_table_drop(struct ipc *k, struct ipc_table *t);
enum fl_status ipc_share(struct link *k, const struct link_mem *mine, struct link_key *out,
                         struct fl_err *err);
enum fl_status ipc_map(struct link *k, const struct link_key *theirs, bool writable,
                       struct link_mem *out, struct fl_err *err);
void ipc_unmap(struct link *k, struct link_mem *theirs);
void ipc_view_put(struct link_dev *d, struct ipc_view *v);
