/* tests/client/fake_priv.h - what the fake's own thread (fake.c), its answers (fake_head.c) and the
 * test's side of it (fake_side.c) share */
#pragma once
#include <pthread.h>

#include "tests/client/fake.h"
#include "transport/call/call.h"
#include "worker.pb-c.h"
#include "worker/client/client.h"
#include "worker/client/sync.h"

enum { WORKERS = 64, WAIT_MS = 10000, GROUP_BYTES = 18 };
struct worker {
    struct fake *f;
    char role[32], name[32], dir[256], sock[300], tcp[80], unix_path[300], why[256];
    uint32_t rank, world, attempt, state;
    bool known;
    struct guest *guest;
    pid_t pid;
    int pidfd;
    struct fl_watch *watch;
    struct fl_timer again;
    uint32_t restarts_left, backoff_ms;
    char **argv, **env;
};
struct guest { /* a stream to the daemon */
    struct fake *f;
    struct worker *w;
    struct call_peer *call;
    struct guest *next;
};
struct metric {
    char name[128];
    double value;
};
struct fake {
    struct fl_loop *loop;
    pthread_t thread;
    char sock[300];
    unsigned number;
    uint8_t key[32];
    struct stream_server *server;
    struct guest *guests;
    struct worker workers[WORKERS];
    unsigned n_workers;
    bool head_away, listed, far;
    pthread_mutex_t mu; /* what the test waits for */
    pthread_cond_t changed;
    struct metric metrics[32];
    unsigned n_metrics, n_steps, n_finds, n_running;
    uint64_t progress;
    char last_step[256];
};
struct doing { /* on the fake's thread, for a test's thread */
    struct client_sync sync;
    struct fake *f;
    const char *role;
    uint32_t rank, number;
    uint64_t bytes, *out;
    const char *why;
    struct call_op op;
};

void changed(struct fake *f);
struct worker *find(struct fake *f, const char *role, uint32_t rank);
struct worker *worker_of(struct fake *f, const char *role, uint32_t rank, uint32_t world);
void tell_driver(struct fake *f);
int worker_seat(struct worker *w);
void strings_free(char **s);
void send_stop(struct worker *w, uint32_t budget_ms);
void up(struct fake *f);
void down(struct fake *f);

struct where_pb {
    Fl__Where w;
    Fl__SeatRef who;
    uint8_t id[28];
};
void fake_where_fill(const struct worker *w, struct where_pb *p);
size_t fake_members_pack(struct fake *f, const char *role, uint8_t **out); /* role NULL: all */
void fake_worker_spawn(struct worker *w);
extern const struct call_method fake_methods[];
extern const size_t fake_n_methods;
