#pragma once
#include <furlong/types.h>

/* ==== include/furlong/furlong.h: a program's seat in a run =====================================
 * Needs libc, and the driver by dlopen; exports furlong_* alone; starts one thread of its own for
 * the sockets and touches no signal. Any thread may call, one at a time per object. In a forked
 * child every call gives FL_UNSUPPORTED. Work comes to the program by furlong_next(), on its own
 * thread: there are no callbacks. Units are in the names, texts are UTF-8, err may be NULL. */
#define FURLONG_ABI 1u
#define FURLONG_MAIN 0u /* lane: one ordered queue each; others by number, as the roles agree */
#define FURLONG_FOREVER UINT32_MAX
struct furlong;
struct furlong_peer;    /* another process of the run                  */
struct furlong_call;    /* something to answer, once                   */
struct furlong_weights; /* one set of weights, offered or accepted     */

struct furlong_seat { /* borrowed until furlong_leave() */
    const char *job, *role, *node, *address, *run_dir;
    uint32_t rank, world, local_rank, local_world, attempt;
    const char *const *device_uuids;
    uint32_t n_devices;
    const char *master_addr;
    uint16_t master_port;
};
/* FL_UNSUPPORTED: not started by a daemon, or another ABI; err says which. */
enum fl_status furlong_join(uint32_t abi, struct furlong **out, struct fl_err *err);
const struct furlong_seat *furlong_seat(const struct furlong *f);
void furlong_leave(struct furlong *f); /* refuses what is unanswered; NULL is fine */

enum furlong_what {
    FURLONG_CALL,    /* method, body, blob                                             */
    FURLONG_PAUSE,   /* engine: finish the step in hand and start none                 */
    FURLONG_COMMIT,  /* engine: version is verified; answer by furlong_weights_commit() */
    FURLONG_RESUME,  /* engine: steps may run                                          */
    FURLONG_OFFLOAD, /* tags: arena memory is moved by the library, your own by you    */
    FURLONG_ONLOAD,
    FURLONG_SQUEEZE, /* give back up to bytes; answer with a uint64_t: how many        */
    FURLONG_STOP     /* leave inside budget_ms                                         */
};
struct furlong_event { /* borrowed until call is answered */
    enum furlong_what what;
    uint32_t tags, budget_ms; /* 0: no limit */
    const char *method, *from; /* from: "rollout 3 on gpu-b" */
    const void *body, *blob;
    size_t body_bytes, blob_bytes;
    uint64_t version, bytes;
    struct furlong_call *call; /* answer every event, by reply, refuse or commit */
};
/* FL_AGAIN: nothing came in wait_ms. FL_UNREACHABLE: the daemon was away for too long. */
enum fl_status furlong_next(struct furlong *f, uint32_t lane, uint32_t wait_ms,
                            struct furlong_event *ev, struct fl_err *err);
/* What travels: body is small (at most 16 MiB) and by convention JSON; blob is bulk, by convention a
 * safetensors image. Borrowed for the call. */
struct furlong_data { const void *body; size_t body_bytes; const void *blob; size_t blob_bytes; };
void furlong_reply(struct furlong_call *c, const void *body, size_t bytes);
void furlong_reply_data(struct furlong_call *c, const struct furlong_data *d);
void furlong_refuse(struct furlong_call *c, const struct fl_err *why);

struct furlong_answer { const void *body, *blob; size_t body_bytes, blob_bytes; void *impl; };
enum fl_status furlong_peer(struct furlong *f, const char *role, uint32_t rank,
                            struct furlong_peer **out, struct fl_err *err);
enum fl_status furlong_ask(struct furlong_peer *p, uint32_t lane, const char *method,
                           const struct furlong_data *what, uint32_t budget_ms,
                           struct furlong_answer *out, struct fl_err *err); /* blocks */
void furlong_answer_free(struct furlong_answer *a);

struct furlong_tensor {
    const char *name;
    enum fl_dtype dtype;
    uint8_t ndim;
    uint64_t shape[FL_DIMS];            /* the whole tensor                              */
    uint64_t at[FL_DIMS], len[FL_DIMS]; /* the box this process holds; len[0] 0: all     */
    void *data; /* contiguous, row-major, 16-byte aligned; NULL: the arena gives it */
};
struct furlong_weights_opts {
    uint32_t slots;       /* 0: two where memory allows; 1: the old version is given up early */
    bool fixed_addresses; /* captured graphs: commit remaps; 12 ms for 16 GiB on an H200      */
    void *stream;         /* CUstream that the program's kernels run on; NULL: host memory    */
};
/* Trainer. Between publish and the next begin the memory is frozen: engines read it. begin asks the
 * coordinator and returns when nobody reads what will be written: with one slot, when every engine
 * that maps it has become DIRTY. FL_TIMEOUT names who still reads. */
enum fl_status furlong_weights_offer(struct furlong *f, const char *set,
                                     const struct furlong_tensor *t, size_t n,
                                     const struct furlong_weights_opts *o,
                                     struct furlong_weights **out, struct fl_err *err);
enum fl_status furlong_weights_begin(struct furlong_weights *w, uint64_t version,
                                     uint32_t budget_ms, struct fl_err *err);
enum fl_status furlong_weights_publish(struct furlong_weights *w, uint64_t version,
                                       struct fl_err *err);
/* Engine. Pointers of furlong_weights_data() change in commit (trainer: begin), nowhere else. */
enum fl_status furlong_weights_accept(struct furlong *f, const char *set,
                                      const struct furlong_tensor *t, size_t n,
                                      const struct furlong_weights_opts *o,
                                      struct furlong_weights **out, struct fl_err *err);
enum fl_status furlong_weights_commit(struct furlong_weights *w, struct furlong_call *c,
                                      struct fl_err *err);
/* Both. data: trainer, where the version in hand is written; engine, the version that serves. */
void *furlong_weights_data(const struct furlong_weights *w, size_t i);
uint64_t furlong_weights_version(const struct furlong_weights *w, uint64_t digest[2]);
void furlong_weights_drop(struct furlong_weights *w);

enum furlong_tag {
    FURLONG_TAG_WEIGHTS = 1, FURLONG_TAG_KV = 2, FURLONG_TAG_GRAPH = 4, FURLONG_TAG_OPTIMIZER = 8,
    FURLONG_TAG_DEFAULT = 16
};
enum fl_status furlong_arena_alloc(struct furlong *f, enum furlong_tag tag, int device,
                                   size_t bytes, void **out, struct fl_err *err);
void furlong_arena_free(struct furlong *f, void *p);
void furlong_metric(struct furlong *f, const char *name, double value);
void furlong_progress(struct furlong *f, uint64_t done, uint64_t total);

