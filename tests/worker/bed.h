/* tests/worker/bed.h - a daemon under a head that the test plays, with real keepers
 *
 * Everything runs on one loop; the carrier is a socket instead of gRPC. */
#pragma once
#include "tests/t.h"
#include "common/base/str.h"
#include "node.pb-c.h"
#include "transport/call/call.h"
#include "worker.pb-c.h"
#include "worker/node/node.h"

enum { WAIT_MS = 20000, KEY = 32, LOG_MAX = 1 << 20, STATES = 64 };

extern const char *keeper_path, *victim_path, *fake_nvml;
extern uint8_t job_key[KEY];

struct bed { /* the head that is played, the daemon, and what was heard */
    struct fl_loop *loop;
    struct stream_server *server;
    struct call_peer *up; /* the daemon's connection; NULL while there is none */
    struct fl_term term;
    char target[64], runtime[40], state[128];
    struct node_config cfg;
    struct node *node;
    bool ended;
    enum fl_status end_st;
    struct fl_err end_err;

    Fl__JoinRequest *join; /* the last one */
    struct fl_node_ref from;
    Fl__Beat *uses; /* the last beat that told who has devices open */
    bool slowed_told; /* of the last beat */
    size_t n_slowed;
    uint32_t slowed;
    unsigned joins, beats, changes, leaves, relays;
    bool fence_next;
    struct fl_err refuse_join; /* status FL_OK: none */
    unsigned refuse_changes;   /* so many answers are failures */
    bool mute_logs, slow_logs, log_refused; /* slow: each piece is refused once */
    unsigned repeats;
    Fl__WorkerState *states[STATES];
    struct fl_str log;   /* all output, in order of arrival */
    size_t log_at_gone;  /* its length when a GONE came */
    uint64_t ends[4][3]; /* by rank and stream */
    uint64_t end_lease;  /* for the next JoinReply */
    struct call_op op;
    bool answered;
    enum fl_status st;
    struct fl_err st_err;
    Fl__LeasePrepared *prepared;
};

void on_log(void *service, struct call_req *req, const struct wire_msg *m);
void head_start(struct bed *b);
void head_stop(struct bed *b);
void head_restart(struct bed *b);
enum fl_status ask(struct bed *b, uint16_t method, const ProtobufCMessage *m);
void on_ended(void *arg, enum fl_status st, const struct fl_err *err);
void node_up(struct bed *b);
void bed_init(struct bed *b);
void bed_join(struct bed *b);
void bed_stop(struct bed *b);
void bed_fini(struct bed *b);
Fl__WorkerState *gone(struct bed *b, unsigned nth);
Fl__WorkerState *in_phase(struct bed *b, Fl__WorkerPhase phase);
struct fl_seat_ref seat_of(unsigned n);
enum fl_status try_start(struct bed *b, unsigned n, const char *word, const char *arg,
                         uint64_t lease);
void start(struct bed *b, unsigned n, const char *word, const char *arg);
enum fl_status stop(struct bed *b, unsigned n, const char *text, uint32_t term_ms);
enum fl_status lease(struct bed *b, uint64_t id, int64_t gpu_e4, uint32_t ports);
enum fl_status lease_ids(struct bed *b, uint16_t method, uint64_t id);
bool logged(const struct bed *b, const char *text);
bool alive(int pid);

/* For main(): KEEPER VICTIM FAKE-NVML. */
bool bed_args(int argc, char **argv);
void bed_end_all(void); /* whatever a failed test left */
