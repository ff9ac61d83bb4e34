/* tests/xfer/epoch_rig.h - a whole weight plane in one process: trainer ranks, engines, a driver
 *
 * Everybody talks over stream_pair on one loop with a clock that moves only while nothing happens.
 * With RIG_DEVICES=same, two or three, all memory is of devices: one for both sides, one for each,
 * or one for the trainer and two for engines. Bytes are compared with a reference model, never with
 * what the plane says about itself. */
#pragma once
#include "tests/t.h"
#include "transport/xfer/coord.h"
#include "transport/xfer/sink.h"
#include "transport/xfer/source.h"
#include "transport/xfer/plan.h"

enum { RIG_HELD = 64 };
enum { RIG_PROCS = 48, RIG_TENSORS = 9, RIG_PEERS = 32, RIG_STEPS = 4096 };
struct rig;
struct rig_proc { /* a trainer rank or a rank of an engine */
    struct rig *r;
    bool source, live;
    struct xfer_member me;
    char at[64];
    struct xfer_port *port;
    struct stream_server *server;
    struct call_peer *accepted[RIG_PEERS];
    unsigned n_accepted;
    unsigned served[XFER_N_METHODS]; /* requests, in the order of xfer_methods */
    /* The nth request of that method to come stops it: from there on it answers nothing, as a process that was
     * stopped. nth 0: none will. */
    uint16_t trap_method;
    unsigned trap_nth;
    uint32_t trap_in; /* not before so many buckets are in */
    bool stopped_at; /* it has come */
    bool frozen;
    struct call_req *held[RIG_HELD];
    unsigned n_held;
    struct xfer_manifest m;
    struct xfer_piece pieces[RIG_TENSORS];
    uint64_t mem_bytes;
    unsigned rank, ranks;
    /* source */
    struct xfer_source *src;
    struct link_mem slot[2];
    struct xfer_wait wait;
    bool waiting;
    enum fl_status wait_st;
    struct fl_err wait_err;
    /* sink */
    struct xfer_sink *sink;
    struct xfer_version serving;
    const void *reads;                 /* NULL: no step may run */
    struct link_window *window;        /* of fixed addresses */
    const void *shown;                 /* what is seen there */
    bool paused, hold_flip, hold_pause; /* hold: the test posts it */
    struct fl_task *flip_task, *pause_task;
    unsigned rooms, flips, pauses, resumes;
    struct fl_task stopped;
    bool is_stopped;
};
struct rig_opts {
    unsigned n_sources, n_engines, ranks; /* ranks of each engine */
    bool hosts;         /* names say where: "rollout 1 on host-b" */
    bool sharded;       /* the trainer's ranks hold shards, not replicas */
    unsigned src_slots; /* 0: 2 */
    enum xfer_slots slots;
    bool check_equal;
    const char *delta_dir, *local_dir;
    bool few_change; /* from version to version, as trained weights do; else all differ */
    bool own_local;  /* a local_dir for each engine: NAME-PARTY */
    bool fixed;      /* engines' addresses stay: memory is exchanged under them */
    bool real_clock; /* threads of links take real time: then ours is, too       */
    const char *addr_of_engines; /* another address: no shm between trainer and engines */
    const struct link_ops *const *links;
    size_t n_links;
    uint64_t bucket_bytes;
    bool source_head, engine_head, head_differs; /* a tensor "head": the bytes of "embed", or not */
    /* As each process comes: its manifest before it is sealed (place NULL), and where it says that it is. */
    void (*bend)(struct rig_proc *p, struct link_place *place);
};
struct rig_link { struct rig *r; struct call_peer *peer; struct rig_proc *to; bool closed; };
struct rig {
    struct rig_opts o;
    struct fl_loop *loop;
    struct fl_held_clock clock;
    struct rig_proc p[RIG_PROCS];
    unsigned n;
    struct xfer_coord *coord;
    struct rig_link links[512];
    unsigned n_links;
    struct xfer_run run;
    bool running;
    enum fl_status st;
    struct fl_err err;
    struct xfer_report rep;
    uint8_t *model[256]; /* the reference, by version */
    int fds_before;
    unsigned idle;
};
void rig_init(struct rig *r, const struct rig_opts *o);
void rig_fini(struct rig *r); /* checks that no descriptor is left */
const char *rig_devices(void); /* NULL: host memory */
const char *rig_uuid(const struct rig_proc *p); /* of the device that its memory is on */
struct rig_proc *rig_source(struct rig *r, unsigned i);
struct rig_proc *rig_engine(struct rig *r, unsigned party, unsigned rank);
void rig_coord(struct rig *r, uint32_t attempt); /* replaces the one that is there, without a word */
void rig_thaw(struct rig_proc *p); /* goes on; what came meanwhile comes back unheard, and is asked again */
void rig_kill(struct rig_proc *p, bool tell);    /* its streams break; tell: the driver hears of it */
void rig_drop(struct rig_proc *p);               /* an engine's program gives its weights up, and stays */
void rig_accept(struct rig_proc *p);
struct rig_proc *rig_join(struct rig *r, unsigned party); /* an engine that was not there */
struct rig_proc *rig_restart(struct rig_proc *p); /* the next attempt of the same seat */

/* One turn; while nothing happens the clock goes on, by a millisecond at first, then faster. */
void rig_turn(struct rig *r);
#define rig_until(r, cond)                                                                        \
    do {                                                                                          \
        unsigned rig_n_ = 0;                                                                      \
        while (!(cond)) {                                                                         \
            t_true(rig_n_++ < 200000, "waited for " #cond);                                       \
            rig_turn(r);                                                                          \
        }                                                                                         \
    } while (0)
void rig_pass(struct rig *r, uint64_t ms);

void rig_write(struct rig_proc *p, uint64_t version); /* the reference of that version into its slot */
void rig_flip_bit(struct rig_proc *p, uint64_t off); /* of a source, behind the plane's back */
enum fl_status rig_begin(struct rig *r, uint64_t version, uint64_t wait_ms); /* all sources */
void rig_publish(struct rig *r, uint64_t version);
void rig_next(struct rig *r, uint64_t version); /* begin unless it is the first, write, publish */
void rig_start(struct rig *r, const struct xfer_request *q);
enum fl_status rig_update(struct rig *r, enum xfer_mode mode, uint64_t version); /* waits */
enum fl_status rig_update_at(struct rig *r, const char *fault, enum xfer_mode mode,
                             uint64_t version); /* where that place fails */
enum fl_status rig_run(struct rig *r, const struct xfer_request *q);
void rig_bring(struct rig *r, enum xfer_mode mode, uint64_t version); /* next, update: all serve it */
void rig_serving(struct rig *r, const struct rig_opts *o, enum xfer_mode mode); /* init, bring 1 */
/* Whoever serves has the reference's bytes of that version, and its digest, and no step runs else. */
void rig_check(struct rig *r);
void rig_check_all_serve(struct rig *r, uint64_t version);
unsigned rig_served(struct rig_proc *p, uint16_t method); /* since it was asked last */
enum rx_state rig_state(const struct rig_proc *p);
