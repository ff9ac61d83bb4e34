/* tests/head/rig.h - a head on a held clock, with daemons that are played by the test
 *
 * Streams are in-memory pairs; the journal is a real one in the test's folder. What a daemon is
 * told it does as a real one would, unless the test has set it to refuse, or to say nothing. */
#pragma once
#include "head/state.h"
#include "tests/t.h"

enum { FAKE_LEASES = 64, FAKE_WORKERS = 64, FAKE_EVENTS = 64 };

struct rig {
    struct fl_loop *loop;
    struct fl_held_clock clock;
    struct head *head;
    struct stream_server *server;
    char state_dir[1024], target[64];
    struct head_config cfg;
    unsigned ended, terms;
};
void rig_start(struct rig *r, const char *name,
               const struct head_config *like); /* NULL: defaults */
void rig_again(struct rig *r);                  /* the head ends and starts on the same journal */
void rig_stop_head(struct rig *r);
void rig_open_head(struct rig *r);
enum fl_status rig_try_head(struct rig *r, struct fl_err *err);
void rig_end(struct rig *r);
void rig_pass(struct rig *r, uint64_t ms); /* time passes; nothing waits for it */
void rig_turns(struct rig *r, unsigned n);

struct fake_worker {
    struct fl_seat_ref who;
    struct fl_job_id job;
    char role[32], command[256], cwd[128];
    uint32_t rank, world, local_rank, local_world, master_port;
    char master_addr[64], devices[128], env[1024];
    uint64_t leases[16];
    size_t n_leases;
    uint8_t key[32];
    Fl__WorkerPhase phase;
    bool stop_asked;
    uint32_t stop_term_ms;
    unsigned starts;
};
struct fake { /* a daemon */
    struct rig *rig;
    struct call_peer *peer;
    struct fl_node_ref who;
    char name[64], address[64], boot_id[40];
    double cpus;
    unsigned gpus;
    struct fl_term highest;
    bool open, joined, fenced, closed;
    unsigned told_fenced;
    enum fl_status join_status;
    char join_text[256];
    uint32_t dial_port; /* 0: it asks for no dial-back */
    Fl__JoinReply *reply;

    Fl__Lease *leases[FAKE_LEASES];
    struct fake_worker workers[FAKE_WORKERS];
    size_t n_leases, n_workers;
    unsigned prepares, commits, releases, stops, shutdowns;
    /* what it does when told: FL_OK, a refusal, or nothing at all */
    enum fl_status on_prepare, on_commit, on_start;
    bool mute_prepare, mute_commit, mute_start,
        stop_ends; /* stop_ends: a stop is followed by the end */
    bool leaves;   /* NODE_SHUTDOWN is followed by NODE_LEAVE */
    struct {
        uint32_t method;
        struct fl_seat_ref to;
        Fl__Members *members;
    } events[FAKE_EVENTS];
    size_t n_events;
    struct call_req *unanswered;
};
/* Connects and joins; *f is initialised by fake_init(). */
void fake_init(struct fake *f, struct rig *r, const char *name, const char *address, unsigned gpus);
void fake_connect(struct fake *f);
void fake_join(struct fake *f); /* until it has joined, been fenced or been refused */
void fake_up(struct fake *f, struct rig *r, const char *name, const char *address, unsigned gpus);
void fake_cut(struct fake *f);   /* the stream ends, what runs goes on */
void fake_again(struct fake *f); /* connects and joins anew, with what it has */
void fake_beat(struct fake *f);
struct fake_worker *fake_worker(struct fake *f, const char *role,
                                uint32_t rank); /* the youngest; NULL */
void fake_joined(struct fake *f, struct fake_worker *w);
void fake_exit(struct fake *f, struct fake_worker *w, int code); /* until the head has it on disk */
enum fl_status fake_exit_try(struct fake *f, struct fake_worker *w, int code);
uint64_t fake_log(struct fake *f, struct fake_worker *w, unsigned stream, uint64_t offset,
                  const char *text);
void fake_down(struct fake *f); /* forgets everything of it */

/* A call of a daemon or, relayed, of a worker; status of the answer, *out as unpacked or NULL. */
struct asked {
    struct call_op op;
    bool done;
    enum fl_status st;
    struct fl_err err;
    struct fl_str body;
};
void ask_start(struct fake *f, uint16_t method, const void *msg, struct asked *a);
void ask_relay(struct fake *f, struct fake_worker *from, uint32_t method, const void *msg,
               struct asked *a);
void ask_wait(struct fake *f, struct asked *a);
void *asked_msg(struct asked *a, const ProtobufCMessageDescriptor *d);
void ask_free(struct asked *a);

char *submit(struct rig *r, const char *entrypoint,
             const struct job_ask *like); /* its id; static */
struct job *job(struct rig *r, const char *id);
