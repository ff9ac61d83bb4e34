/* bench/plane_driver.h - bench_plane's driver: one trainer and engines, a process each
 *
 * plane_d is the plane that runs now. Whatever cannot be set up ends the program with a sentence. */
#pragma once
#include <sys/types.h>
#include "bench/plane_seats.h"
#include "transport/xfer/coord.h"

enum { PLANE_ENGINES = 2 };
struct plane_kid {
    struct seat seat;
    int fd;    /* orders; -1: none */
    pid_t pid; /* 0: none */
    struct call_peer *peer;
    pid_t relay; /* all that it says and hears goes through it; 0: none */
    int relay_fd;
};
struct plane {
    struct fl_loop *loop;
    struct plane_kid trainer, engines[PLANE_ENGINES];
    unsigned n_engines;
    struct xfer_coord *coord;
    /* the last update */
    bool running;
    enum fl_status st;
    struct xfer_report rep;
    struct fl_err why;
    uint64_t version; /* that the trainer has published last */
    double limit_ms;
    void (*each_turn)(void); /* of an update that runs; NULL: nothing to do */
};
extern struct plane plane_d;

struct plane_opts {
    const struct shape *shape;
    const struct link_place *trainer, *engines; /* where they are */
    unsigned n_engines;
    bool fixed;            /* engines whose addresses stay */
    bool relays;           /* a relay for each engine, to cut it off by */
    uint64_t bucket_bytes; /* 0: the coordinator's own */
};
void plane_start(const struct plane_opts *o);
void plane_stop(void);
void plane_clean(void); /* its folder of sockets, when all is over */

void plane_add_engine(unsigned i); /* a process, the next attempt of that seat */
void plane_add_trainer(void);
/* That process is killed if it is there, waited for, and the driver knows. */
void plane_gone(struct plane_kid *k, const char *how);
void plane_order(struct plane_kid *k, char what);
void plane_fault(struct plane_kid *k, const char *spec); /* FURLONG_FAULT of it from now on */
void plane_look(struct plane_kid *k, struct plane_seen *out);

void plane_next_version(void); /* the trainer begins, writes and publishes */
void plane_rest(unsigned ms);  /* in the driver's loop */
struct plane_ask {
    enum xfer_kind kind;
    enum xfer_mode mode;
    enum xfer_slots slots;
    unsigned least_engines, due_ms;
};
enum fl_status plane_update(const struct plane_ask *a); /* waits; rep and why are in plane_d */
/* How many engines serve something else than the last update brought, by their memory; each is said. */
unsigned plane_roots_differ(const char *when);

/* An engine killed, stopped and cut off in each phase of updates, a trainer killed in each. Returns
 * how much did not hold; each is said. */
unsigned plane_faults(const struct shape *s, const struct link_place *from,
                      const struct link_place *to);
