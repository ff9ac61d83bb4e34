/* worker/client/plane.h - one set of weights on its way from one group to another
 *
 * One plane a set: the coordinator of its epochs, and streams to every member of two groups. The
 * coordinator answers begin() of trainers whatever the program does meanwhile, and engines that
 * came back are filled by the library, between the program's own updates. Loop thread. */
#pragma once
#include "transport/xfer/coord.h"
#include "worker/client/driver_priv.h"

struct plane_member {
    struct client_reach reach;
    struct plane *plane;
    uint32_t party;
    bool source;
    bool reached; /* has a stream                    */
    bool added;   /* the coordinator knows it        */
    bool in_run;  /* was there when the run in flight began */
    bool holds;   /* an engine: the current version         */
    struct client_where at;
    /* plane_probe.c */
    bool heard, ready, probing; /* heard: it has said whether it is ready */
    uint64_t unpublished_ns; /* since when a source says that it has offered and published nothing;
                                0: it does not */
    struct call_peer *call;
    struct call_op probe;
    struct fl_timer probe_again;
    uint32_t probe_ms;
};
enum {
    PLANE_FILL_MS = 120000, /* a fill's time, and an update's that was given none */
    PLANE_TELL_MS = 10000   /* an update that has not begun by then says why */
};
struct updating { /* a program's call, while it waits for it */
    struct client_sync sync;
    struct furlong_group *from, *to;
    const struct furlong_update *how;
    enum xfer_mode mode;
    uint64_t half_ns, due_ns;
    bool late; /* half of its time is over: it starts with those that are ready */
    struct furlong_report report;
};
struct plane {
    struct client_driver *d;
    struct plane *next;
    char set[64], from_role[32], to_role[32];
    struct furlong_group *from, *to;
    struct xfer_coord *coord;
    uint64_t bucket_bytes;
    char dir[1024];
    struct plane_member *members; /* sources, then engines */
    uint32_t n_from, n_to;
    struct xfer_run run;
    bool running, filling, has_version;
    struct fl_timer again;     /* the next fill      */
    char not_filled[160];      /* why the last one did nothing, said once */
    struct fl_timer reach_due; /* of the one waiting */
    struct updating *waiting, *current;
};
/* plane_run.c */
void plane_runs_init(struct plane *p);
void plane_members_start(struct plane *p); /* they are reached, and again whenever they come back */
void plane_members_stop(struct plane *p);
void plane_go(struct plane *p);    /* whatever is due now and can start */
void plane_heard(struct plane *p); /* a probe was answered, or members changed */
void plane_update_fail(struct plane *p, enum fl_status st, const struct fl_err *err); /* waiting */
/* plane_probe.c */
void plane_probe_start(struct plane_member *m, struct call_peer *call);
void plane_probe_stop(struct plane_member *m);
