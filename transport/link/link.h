#pragma once
#include "transport/wire/wire.h"

/* ==== transport/link/link.h: moving memory inside a team =======================================
 * A team is fixed when opened and lives for many epochs. Nothing blocks; each link_op comes back
 * exactly once, through the loop. */
enum link_cap {
    LINK_HOST = 1u << 0,   /* host memory                                              */
    LINK_DEVICE = 1u << 1, /* device memory                                            */
    LINK_MAP = 1u << 2,    /* map() gives memory that may be read in place: share mode */
    LINK_PULL = 1u << 3,   /* the receiver copies, the source only holds still         */
    LINK_SEND = 1u << 4,   /* both act, matched by order                               */
    LINK_CAST = 1u << 5,   /* one to all                                               */
    LINK_SEGS = 1u << 6,   /* pull, or cast_segs, takes scattered segments and digests on the way */
    LINK_ALONE = 1u << 7   /* a dead member cannot disturb the others                  */
};
enum { LINK_PEERS = 16, LINK_NCCL_ENV = 192 };
struct link_place { /* all that reaches() may look at; travels in each member's hello */
    char host_boot[37]; /* boot id: this machine, since this start */
    uint64_t pid_ns, ipc_ns;
    char gpu_uuid[41]; /* of the device that the memory is on, never an ordinal; "": host memory */
    bool unified, vmm_fd, legacy_ipc; /* each probed in a child, not assumed   */
    uint32_t n_gpu_peers;
    uint64_t gpu_peers[LINK_PEERS]; /* devices whose memory that one reads: link_gpu_id() of each */
    char addr[64];
    uint32_t nccl_version;        /* of the library that this process has or would load; 0: none */
    char nccl_env[LINK_NCCL_ENV]; /* NCCL_* settings on which both sides must agree, sorted */
};
struct link_mem { /* one owner; others hold counted views */
    void *addr;
    uint64_t bytes, chunk_bytes; /* chunk_bytes 0: one piece (cudaMalloc, mmap) */
    bool on_device;              /* then impl is a struct link_pages, see dev.h */
    void *impl;
};
struct link_key { /* what a peer needs to map it; descriptors ride on the same message */
    uint8_t blob[192];
    /* more chunks than descriptors: several keys. To share(): which one is wanted */
    uint32_t part, parts;
    uint32_t n_fds;
    int fds[WIRE_MAX_FDS]; /* stay the sharer's, as long as the memory is there */
};
struct link_seg { /* rows runs of one tensor; both sides and the whole tensor have their own step */
    uint64_t from_off, to_off;   /* of the first run, in the two memories                       */
    uint64_t first_byte;         /* of the first run in the whole tensor, for the digest        */
    uint64_t run_bytes;          /* contiguous everywhere                                       */
    uint64_t from_step, to_step; /* from one run to the next; not looked at with one row        */
    uint64_t byte_step;
    uint32_t rows, tensor; /* rows: at least 1 */
};
_Static_assert(sizeof(struct link_seg) == 64, "travels in plans");
struct link_span { const struct link_mem *mem; uint64_t off, bytes; };
struct link_op {
    struct fl_task back; /* posted by whichever thread saw the end */
    struct fl_err err;   /* err.status: the outcome                */
    uint64_t bytes, took_ns;
    void (*done)(struct link_op *op);
};
struct link;
struct link_team {
    const struct link_place *members;
    unsigned n, self;
    uint8_t ticket[256]; /* made by member 0: NCCL id, or where to connect */
};
struct link_ops {
    const char *name;
    uint32_t caps; /* only what the functions below really do: selection trusts it */
    bool (*reaches)(const struct link_place *a, const struct link_place *b, struct fl_err *why_not);
    uint64_t (*cost_ns)(const struct link_place *from, const struct link_place *to, uint64_t bytes);
    enum fl_status (*ticket)(uint8_t out[256], struct fl_err *err);
    enum fl_status (*open)(struct fl_loop *l, const struct link_team *team, struct link **out,
                           struct link_op *ready, struct fl_err *err);

    enum fl_status (*share)(struct link *k, const struct link_mem *mine, struct link_key *out,
                            struct fl_err *err);
    /* Of several parts: one call for each, in order, with the same out; whole after the last. On
     * failure what out had before is unmapped. */
    enum fl_status (*map)(struct link *k, const struct link_key *theirs, bool writable,
                          struct link_mem *out, struct fl_err *err);
    void (*unmap)(struct link *k, struct link_mem *theirs);

    /* segs, digests, both memories: lent until op is back. digests: one a segment, added to as the
     * bytes pass; NULL: none. theirs: from map(), also of a link without LINK_MAP. */
    enum fl_status (*pull)(struct link *k, const struct link_mem *theirs,
                           const struct link_mem *mine, const struct link_seg *segs, size_t n,
                           uint64_t (*digests)[2], struct link_op *op, struct fl_err *err);
    enum fl_status (*send)(struct link *k, unsigned to, struct link_span what, struct link_op *op,
                           struct fl_err *err);
    enum fl_status (*recv)(struct link *k, unsigned from, struct link_span where,
                           struct link_op *op, struct fl_err *err);
    enum fl_status (*cast)(struct link *k, unsigned root, struct link_span what,
                           struct link_op *op, struct fl_err *err); /* FL_AGAIN: not started */
    /* A whole bucket from the root to all others: gathered from mem there, spread out to mem
     * elsewhere, digests on the way. All give the same segments in the same order. */
    enum fl_status (*cast_segs)(struct link *k, unsigned root, const struct link_mem *mem,
                                const struct link_seg *segs, size_t n, uint64_t (*digests)[2],
                                struct link_op *op, struct fl_err *err);
    unsigned (*progress)(struct link *k);                           /* ends delivered        */
    int (*event_fd)(struct link *k); /* readable: call progress(); -1: ends come by themselves */

    /* Every op comes back FL_CANCELLED, then quiet. From there on, and not before, nothing of this
     * link touches the memory. Works with dead and stopped members. The link is spent. */
    void (*abort)(struct link *k, struct link_op *quiet);
    void (*close)(struct link *k);
};
extern const struct link_ops link_shm, link_cuda_ipc, link_nccl, link_tcp;
extern const struct link_ops *const link_table[]; /* cheapest first */
extern const size_t link_table_n;
/* Casts of this process are near: the thread that makes them is awake then. Waits for nobody. */
void link_casts_stir(void);

/* This process's own place: boot id, namespaces; addr as given, "" or NULL: 127.0.0.1. */
enum fl_status link_place_here(const char *addr, struct link_place *out, struct fl_err *err);

/* Host memory for slots: a sealed memfd that any link can share. Untouched: its first touch runs at
 * 1 GB/s. FL_EXHAUSTED: no memory, or no descriptor. */
enum fl_status link_mem_alloc(uint64_t bytes, struct link_mem *out, struct fl_err *err);
void link_mem_free(struct link_mem *mem);    /* {0} is fine */
int link_mem_fd(const struct link_mem *mem); /* of ours; stays ours */

