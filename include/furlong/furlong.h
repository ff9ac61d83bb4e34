#pragma once
#include <furlong/types.h>
#ifdef __cplusplus
extern "C" {
#endif

/* ==== include/furlong/furlong.h: a program's seat in a run =====================================
 * Needs libc alone; exports furlong_* and nothing else. Starts one thread of its own, for the
 * sockets, and touches no signal.
 *
 * Threads: any thread may call, one at a time per object. In a forked child every call gives
 * FL_UNSUPPORTED and changes nothing; call it in the program that joined, or exec.
 * Work comes to the program by furlong_next(), on the program's own thread: there are no callbacks.
 * Errors: the status says what to do next, err (may be NULL) one sentence with who, where, which
 * value. Outputs are written on FL_OK alone. Units are in the names, texts are UTF-8.
 * Ownership: what is passed in is borrowed for the call unless a comment says otherwise.
 *
 * Version rule: docs/library.md. A program names the ABI that it was compiled for in
 * furlong_join(); the library serves that one and every older one under the same soname. */
#define FURLONG_ABI 2u /* 2: device and in_place of struct furlong_weights_opts */
#define FURLONG_MAIN 0u /* lane: one ordered queue each; others by number, as the roles agree */
#define FURLONG_FOREVER UINT32_MAX
#define FURLONG_LANES 32u                 /* lanes of one process: numbers 0 to 31               */
#define FURLONG_BODY_MAX (15u << 20)      /* bytes of one body; what is bigger goes in the blob  */
#define FURLONG_QUEUE_MAX 4096u           /* calls that wait in one lane; past it FL_EXHAUSTED   */
struct furlong;
struct furlong_peer;    /* another process of the run                  */
struct furlong_call;    /* something to answer, once                   */
struct furlong_weights; /* one set of weights, offered or accepted     */

/* ---- the seat --------------------------------------------------------------------------------*/
struct furlong_seat { /* borrowed until furlong_leave() */
    const char *job, *role, *node, *address, *run_dir; /* address: of this node; run_dir: "" none */
    uint32_t rank, world, local_rank, local_world, attempt;
    const char *const *device_uuids;
    uint32_t n_devices;
    const char *master_addr; /* of rank 0, for programs that set up their own collectives */
    uint16_t master_port;
};
/* Take the seat that the daemon prepared, listen for peers, and say that this process is ready.
 * Call it when model and memory are loaded, or before: the driver waits for weights, not for this.
 *
 * FL_UNSUPPORTED  not started by a daemon (FURLONG_SEAT_FD is not set), another ABI, or joined before
 * FL_STALE        a later attempt of this seat runs already: exit
 * FL_UNREACHABLE  the daemon did not answer within 30 s */
enum fl_status furlong_join(uint32_t abi, struct furlong **out, struct fl_err *err);
const struct furlong_seat *furlong_seat(const struct furlong *f);

/* Refuses what is unanswered, ends the thread, closes all sockets, frees everything that belongs to
 * f: peers, weights and arena memory too. No other thread may be in a call. NULL is fine. */
void furlong_leave(struct furlong *f);

/* ---- what comes in ---------------------------------------------------------------------------*/
enum furlong_what {
    FURLONG_CALL,    /* method, body, blob                                             */
    FURLONG_PAUSE,   /* engine: finish the step in hand and start none                 */
    FURLONG_COMMIT,  /* engine: version is verified; answer by furlong_weights_commit() */
    FURLONG_RESUME,  /* engine: steps may run                                          */
    FURLONG_OFFLOAD, /* tags: arena memory goes when this is answered, so use none by then; */
                     /* memory of your own is moved by you                               */
    FURLONG_ONLOAD,  /* tags: arena memory is back already                              */
    FURLONG_SQUEEZE, /* give back up to bytes; answer with a uint64_t: how many        */
    FURLONG_STOP     /* leave inside budget_ms                                         */
};
struct furlong_event { /* borrowed until call is answered */
    enum furlong_what what;
    uint32_t tags, budget_ms; /* tags: of enum furlong_tag; budget_ms: left now, 0: no limit */
    const char *method, *from; /* from: "rollout 3 on gpu-b" */
    const void *body, *blob;   /* blob: 64-byte aligned */
    size_t body_bytes, blob_bytes;
    uint64_t version, bytes;
    struct furlong_call *call; /* answer every event, by reply, refuse or commit */
};
/* The next event of a lane, in the order of arrival. Several events may be in hand at a time; they
 * may be answered in any order, from any thread. Which event a method makes: docs/roles.md.
 * PAUSE, COMMIT, OFFLOAD, SQUEEZE, STOP from the daemon and the weight plane come in FURLONG_MAIN.
 *
 * wait_ms         0: look only; FURLONG_FOREVER
 * FL_AGAIN        nothing came in wait_ms
 * FL_UNREACHABLE  the daemon was away for longer than FURLONG_DAEMON_AWAY_MS (default 300000): exit
 * FL_STALE        this seat was given to a later attempt: exit */
enum fl_status furlong_next(struct furlong *f, uint32_t lane, uint32_t wait_ms,
                            struct furlong_event *ev, struct fl_err *err);

/* What travels: body is small (FURLONG_BODY_MAX) and by convention JSON; blob is bulk, by convention
 * a safetensors image. Borrowed for the call. */
struct furlong_data {
    const void *body;
    size_t body_bytes;
    const void *blob;
    size_t blob_bytes;
};
/* Each ends the call: the event's pointers and the call are gone when it returns. A caller that left
 * or cancelled meanwhile is no error. OFFLOAD and ONLOAD answered with no body get one from the
 * library: {"setup_s","copy_s","dropped_bytes","kept_bytes","written_bytes"}.
 * reply_data with a blob past 64 KiB returns when the blob has left; the others never wait. */
void furlong_reply(struct furlong_call *c, const void *body, size_t bytes);
void furlong_reply_data(struct furlong_call *c, const struct furlong_data *d);
void furlong_refuse(struct furlong_call *c, const struct fl_err *why); /* why: status not FL_OK */
/* The event's blob, to keep past the answer: the program's from here on. NULL: it had none, or it was
 * taken before. */
void *furlong_take_blob(struct furlong_call *c);
void furlong_blob_free(void *blob); /* NULL is fine */
bool furlong_unwanted(const struct furlong_call *c); /* the caller cancelled or is gone: work on it is lost */

/* ---- asking others ---------------------------------------------------------------------------*/
struct furlong_answer {
    const void *body, *blob; /* yours until furlong_answer_free(); blob: 64-byte aligned */
    size_t body_bytes, blob_bytes;
    void *impl;
};
/* A handle on the process that holds that rank of that role in this job, now and after restarts: each
 * ask finds the attempt of the moment. Does not wait. *out lives until furlong_leave(); the same role
 * and rank give the same handle. */
enum fl_status furlong_peer(struct furlong *f, const char *role, uint32_t rank,
                            struct furlong_peer **out, struct fl_err *err);
/* Call it and wait for the answer. Made at most once; calls of one lane are served in order.
 *
 * budget_ms       for finding, connecting and answering together; 0 or FURLONG_FOREVER: no limit
 * out             NULL: the answer is not wanted, its status is
 * FL_UNREACHABLE  the process ended or the stream broke; it may or may not have been done
 * FL_TIMEOUT      no answer in time, or nobody has joined as that rank yet (the text says which)
 * FL_NOT_FOUND    the job has no such role or rank
 * any other       the peer refused, in its own words */
enum fl_status furlong_ask(struct furlong_peer *p, uint32_t lane, const char *method,
                           const struct furlong_data *what, uint32_t budget_ms,
                           struct furlong_answer *out, struct fl_err *err);
void furlong_answer_free(struct furlong_answer *a); /* zeroed, or freed before: fine */

/* Several asks in flight from one thread; each comes back exactly once, in any order. */
struct furlong_asks;
struct furlong_done {
    uint64_t tag;
    enum fl_status status;
    struct fl_err err;
    struct furlong_answer answer; /* on FL_OK: furlong_answer_free() */
};
/* bound: asks in flight and not yet taken by _next; past it _start gives FL_AGAIN */
enum fl_status furlong_asks_create(struct furlong *f, uint32_t bound, struct furlong_asks **out,
                                   struct fl_err *err);
/* Copies method and body; what->blob stays yours and must hold still until its _next. */
enum fl_status furlong_asks_start(struct furlong_asks *a, struct furlong_peer *p, uint32_t lane,
                                  const char *method, const struct furlong_data *what,
                                  uint32_t budget_ms, uint64_t tag, struct fl_err *err);
/* FL_AGAIN: none came in wait_ms. FL_NOT_FOUND: none is in flight. */
enum fl_status furlong_asks_next(struct furlong_asks *a, uint32_t wait_ms,
                                 struct furlong_done *out, struct fl_err *err);
void furlong_asks_destroy(struct furlong_asks *a); /* cancels what is in flight; NULL is fine */

/* ---- weights ---------------------------------------------------------------------------------*/
struct furlong_tensor {
    const char *name;
    enum fl_dtype dtype;
    uint8_t ndim;
    uint64_t shape[FL_DIMS];            /* the whole tensor; one with a 0 has no bytes   */
    uint64_t at[FL_DIMS], len[FL_DIMS]; /* the box this process holds; len[0] 0: all     */
    void *data; /* initial values, contiguous, row-major, of the host or a device: copied in (or see
                 * in_place); NULL: zeros */
};
struct furlong_weights_opts {
    uint32_t slots;       /* 0: two where memory allows; 1: the old version is given up early */
    bool fixed_addresses; /* engine, on a device, captured graphs: data stays where it is, commit
                           * changes the memory under it; 12 ms for 16 GiB on an H200            */
    void *stream;         /* CUstream on which the program's kernels use these weights; NULL: all of
                           * the device is waited for instead, before the program's side of publish,
                           * commit and PAUSE counts as done                                   */
    bool check_equal;     /* engine: read all bytes once more and compare before they serve   */
    const char *local_dir; /* engine, disk-delta: for its own full copy; NULL: where its sockets are */
    /* Since ABI 2. */
    const char *device; /* where the weights lie: one of device_uuids, "host", or NULL: on the device
                         * that the tensors' data is on; the seat's own when a stream is given and it
                         * has one; else host memory                                             */
    bool in_place;      /* trainer, on a device: data is the memory itself, the program's from offer to
                         * drop; nothing is copied in. Memory of the arena (furlong_arena_alloc(),
                         * furlong/torch.h) is given as it lies, cudaMalloc's by its handle, all else
                         * through a staging buffer of the library's; the log says which and why. It
                         * is one slot: what was published may be written again after begin         */
};
/* Trainer. Between publish and the next begin the memory is frozen: engines read it. begin asks the
 * coordinator (the driver) and returns when nobody reads what will be written: with one slot, when
 * every engine that maps it has become DIRTY. After begin furlong_weights_data() is to be written
 * whole: with two slots it holds something older than furlong_weights_last(). A new offer is begun:
 * its first publish needs no begin.
 *
 * t               copied; sorted by name inside, the indexes stay the caller's
 * FL_TIMEOUT      begin: names who still reads
 * FL_INVALID      begin: begun already; publish: another version than the one begun
 * FL_EXHAUSTED    offer: no memory for the slots; err says how much */
enum fl_status furlong_weights_offer(struct furlong *f, const char *set,
                                     const struct furlong_tensor *t, size_t n,
                                     const struct furlong_weights_opts *o,
                                     struct furlong_weights **out, struct fl_err *err);
enum fl_status furlong_weights_begin(struct furlong_weights *w, uint64_t version,
                                     uint32_t budget_ms, struct fl_err *err);
enum fl_status furlong_weights_publish(struct furlong_weights *w, uint64_t version,
                                       struct fl_err *err);
/* Takes begin back where the version will not come to be: what was written since counts as nothing, and
 * begin may follow, of any version. With two slots the version published last stays, data() is last()
 * until then. With one (in_place too) its bytes were yours to write: no version is there for engines
 * until the next publish. Does not wait.
 *
 * FL_INVALID      nothing is begun; begin or publish is under way in another thread */
enum fl_status furlong_weights_abandon(struct furlong_weights *w, struct fl_err *err);
/* Engine. Serves nothing until the first commit. Pointers of furlong_weights_data() change in commit
 * (trainer: begin), nowhere else; memory of the version before is good until commit returns. */
enum fl_status furlong_weights_accept(struct furlong *f, const char *set,
                                      const struct furlong_tensor *t, size_t n,
                                      const struct furlong_weights_opts *o,
                                      struct furlong_weights **out, struct fl_err *err);
/* Answers c, which cannot be refused: furlong_reply() and furlong_refuse() do the same. */
enum fl_status furlong_weights_commit(struct furlong_weights *w, struct furlong_call *c,
                                      struct fl_err *err);
/* Engine, between a COMMIT event and its answer: what that version brings, for a program that serves from
 * memory of somebody else's and must have it there first. Read only, good until the next commit.
 *
 * out->fd        a descriptor of the library's that out->data lies in, at out->fd_offset: another process may
 *                map it; -1: none
 * FL_NOT_FOUND   no COMMIT is in hand */
struct furlong_coming {
    const void *data;
    int fd;
    uint64_t fd_offset, version, digest[2];
};
enum fl_status furlong_weights_coming(const struct furlong_weights *w, size_t i,
                                      struct furlong_coming *out, struct fl_err *err);
/* Both. data: trainer, where the version in hand is written; engine, the version that serves, NULL
 * while none does (before the first commit; from the answer to OFFLOAD or to a one-slot PAUSE to the
 * next commit). last: trainer, the version published last; engine, as data. version: trainer, the one
 * published last; engine, the one that serves; FURLONG_NO_VERSION: none. digest (may be NULL): of all
 * ranks' tensors together, so an engine knows it and one trainer rank does not: zeros. */
#define FURLONG_NO_VERSION UINT64_MAX
void *furlong_weights_data(const struct furlong_weights *w, size_t i);
const void *furlong_weights_last(const struct furlong_weights *w, size_t i);
uint64_t furlong_weights_version(const struct furlong_weights *w, uint64_t digest[2]);
/* Engine: why it serves nothing, for the answer to whoever asks it ("weights incomplete: version 7, 4 of 10
 * buckets; ..."); "" while it serves. Cut to room. Asks the library's own thread: not for every call. */
void furlong_weights_why(const struct furlong_weights *w, char *text, size_t room);
void furlong_weights_drop(struct furlong_weights *w); /* leaves the plane; waits until the links are quiet */

/* ---- memory that can go and come back --------------------------------------------------------*/
enum furlong_tag {
    FURLONG_TAG_WEIGHTS = 1,
    FURLONG_TAG_KV = 2,
    FURLONG_TAG_GRAPH = 4,
    FURLONG_TAG_OPTIMIZER = 8,
    FURLONG_TAG_DEFAULT = 16
};
enum furlong_keep {    /* what offload does with the content */
    FURLONG_KEEP_NOT,  /* dropped; host memory comes back as zeros, a device's as it may be  */
    FURLONG_KEEP_IN,   /* stays in place                                                     */
    FURLONG_KEEP_DISK, /* written to an unnamed file of the folder, read back by onload        */
    FURLONG_KEEP_HOST  /* device memory: copied to pinned host memory; host memory stays in place, as does a
                        * device's that is one with the host's */
};
/* Memory at an address that stays the same over offload and onload. Zeroed; aligned to 4 KiB, from
 * 2 MiB on to 2 MiB.
 *
 * device          -1: host; else an index into device_uuids
 * FL_AGAIN        the tag is offloaded
 * FL_UNSUPPORTED  a device on a machine without one
 * FL_EXHAUSTED    no memory; err says what is held, and what would help */
enum fl_status furlong_arena_alloc(struct furlong *f, enum furlong_tag tag, int device,
                                   size_t bytes, void **out, struct fl_err *err);
void furlong_arena_free(struct furlong *f, void *p); /* NULL is fine */
/* How the tags are offloaded. Default: weights, kv and graph KEEP_NOT, optimizer and default KEEP_HOST.
 * Accepted weights go with their tag: with KEEP_NOT the version is gone and the engine serves nothing
 * until the next commit, else they stay in place. Offered weights always stay: engines read them.
 * folder: for KEEP_DISK, NULL: run_dir. */
enum fl_status furlong_arena_keep(struct furlong *f, uint32_t tags, enum furlong_keep how,
                                  const char *folder, struct fl_err *err);
struct furlong_moved { /* of one offload or onload */
    double setup_s, copy_s;
    uint64_t dropped_bytes, kept_bytes, written_bytes;
    uint64_t backed_bytes; /* device memory, to or from pinned host memory */
};
/* By hand what FURLONG_OFFLOAD and _ONLOAD events do by themselves; what devices were given before is
 * waited for. A tag that is out or in already is no error. FL_EXHAUSTED: the disk is full; nothing of that
 * tag has moved. */
enum fl_status furlong_arena_offload(struct furlong *f, uint32_t tags, struct furlong_moved *out,
                                     struct fl_err *err);
enum fl_status furlong_arena_onload(struct furlong *f, uint32_t tags, struct furlong_moved *out,
                                    struct fl_err *err);

/* ---- what is watched -------------------------------------------------------------------------*/
/* Never wait, never fail: while the daemon is away the last value of each name is kept (256 names). */
void furlong_metric(struct furlong *f, const char *name, double value);
void furlong_progress(struct furlong *f, uint64_t done, uint64_t total);
#ifdef __cplusplus
}
#endif
