/* transport/xfer/coord_priv.h - the coordinator from inside
 *
 * coord.c            members, their calls, watching the sources, life
 * coord_published.c  which version the sources have published, and its digest
 * coord_decide.c     what the reports mean: the target, who gives and who takes
 * coord_plan.c       the plan; coord_tied.c: tensors that are one in the engines
 * coord_early.c      an update that is ready before it is asked for
 * coord_begin.c      what a begin says
 * coord_run.c        the first half of an epoch: RECONCILE, PLAN, GIVE
 * coord_stage.c      STAGE
 * coord_fault.c      digests that do not agree, and whose fault that is
 * coord_end.c        the second half: COMMIT, RESUME, ABORT, END
 * coord_grant.c      begin() of a source
 * coord_times.c      when each rank was asked and had answered */
#pragma once
#include "common/base/log.h"
#include "common/base/muster.h"
#include "transport/xfer/coord.h"
#include "transport/xfer/msg.h"
#include "transport/xfer/plan.h"

enum {
    COORD_RECONCILE_MS = 5000, /* a report is at hand; who needs longer is late */
    COORD_BEGIN_WAIT_MS = 2,   /* what is over by then needs no XFER_WAIT */
    COORD_WAIT_MS = 5000,      /* of one XFER_WAIT: well inside the lease       */
    COORD_KEEP_MS = 5000, /* who waits for others hears of us as often: well inside the lease */
    COORD_WATCH_MS = 10000,
    COORD_COMMIT_MS = 30000,   /* to the next step boundary                     */
    COORD_COMMIT_LEAST_MS = 2000,
    COORD_END_MS = 10000,      /* until links are quiet                         */
    COORD_PROBE_MS = 1000,     /* who was late: does it answer at all?          */
    COORD_AGAIN_MS = 20
};
enum co_step {
    CO_IDLE,
    CO_RECONCILE,
    CO_GIVE,
    CO_STAGE,
    CO_COMMIT,
    CO_RESUME,
    CO_PROBE,
    CO_ABORT,
    CO_END,
    CO_OPEN,
    CO_GRANT,
    CO_STEPS
};
enum co_phase { CO_OUT, CO_TAKES, CO_ALL_IN, CO_STAGED, CO_COMMITTED, CO_FAILED };
struct co_ticket {
    uint8_t bytes[256];
    bool later;
    uint32_t serial; /* of the line; 0: not said */
};
struct co_time {
    uint64_t asked_ns, in_ns; /* 0: not asked, not answered */
    enum fl_status st;        /* of the answer              */
};
struct co_member;
typedef void (*co_ask)(struct co_member *m);
typedef void (*co_heard)(struct co_member *m, enum fl_status st, const struct wire_msg *reply,
                         const struct fl_err *err);
struct co_member {
    struct co_member *next;
    struct xfer_coord *c;
    struct call_peer *peer;
    struct xfer_member me;
    bool source, gone;
    struct xfer_manifest *manifest; /* as last reported */
    struct xfer_state st;           /* the last report; known: there is one */
    bool known, fresh;              /* fresh: of this run */
    uint64_t (*digests)[2];         /* of each piece, or of each tensor: as in the report */
    size_t n_digests;
    uint64_t *parts; /* sums of tensors held in part: 3 words each */
    size_t n_parts;
    /* the call in hand */
    struct call_op op;
    bool calling;
    bool late, answers; /* late: a step's deadline, or a call's, came before its answer */
    uint64_t call_due_ns;
    co_ask ask;
    co_heard heard;
    struct fl_timer again;
    unsigned muster_at;
    bool mustered;
    bool not_now; /* BEGIN was answered so: the phase says why */
    bool has_part; /* told_part: what it was sent of a plan; it may still have it */
    uint64_t told_part[2];
    /* this run */
    bool gives;
    enum co_phase phase;
    uint32_t index; /* in the plan */
    /* while it is decided who takes what: the live ranks of one engine, in the order in which they came */
    bool first;
    struct co_member *next_rank;
    struct fl_err why;
    struct co_ticket *tickets; /* of a giver, by edge of its part */
    size_t n_tickets;
    char delta_dir[320];
    struct co_time times[CO_STEPS];
    /* what a source has told of its own accord; early: it has, and nothing came of that yet */
    bool early;
    uint64_t published_heard; /* publishes of the last such report */
    struct xfer_state early_st;
    uint64_t (*early_digests)[2]; /* of each piece */
    /* a source's begin() */
    struct call_op watch_op;
    bool watching, wants;
    uint64_t told, asked, wants_number, wants_due_ns;
    uint32_t wants_slot;
    struct fl_timer watch_again;
};
struct co_tensor { /* of the target version */
    const char *name;
    uint64_t digest[2];
};
struct co_held { /* a piece of a source; sorted, so that replicas of one box lie side by side */
    uint32_t tensor;
    uint64_t box;
    size_t order;
    const struct co_member *m;
    uint32_t piece;
};
struct xfer_coord {
    struct fl_loop *loop;
    char set[64];
    char *delta_dir;
    struct xfer_coord_opts o;
    struct co_member *members; /* in the order in which they came */
    struct xfer_epoch epoch;   /* the last one begun, or seen by a member */
    enum co_step step;
    struct fl_muster *muster;
    const char *what; /* of the step */
    void (*over)(void *arg, enum fl_status st, const struct fl_err *err); /* of the step */
    /* the run in hand */
    struct xfer_request req;
    struct xfer_run *run;
    struct xfer_report rep;
    char passed_over[200]; /* by the plan */
    struct xfer_plan *plan; /* of the last epoch, and what was asked then */
    struct co_member **by_index; /* who is what in the plan */
    uint64_t question[2];
    enum xfer_mode auto_said; /* what auto chose when it was last told at info */
    /* every member did its part of this plan in the last epoch: lines are open, tickets known */
    bool warm;
    /* ready: see coord_early.c; early: begun so; again: that was refused */
    bool ready, early, again;
    struct fl_err give_why; /* of the giver that refused */
    struct xfer_version target;
    struct co_tensor *tensors; /* sorted by name */
    struct co_held *held; /* of all sources, while their manifests are those of sources_key */
    size_t n_held;
    uint64_t sources_key[2];
    size_t last_tensor; /* the one that was looked up last */
    size_t n_tensors;
    uint64_t (*expect)[2];     /* by the plan's tensors */
    unsigned n_takers, n_there; /* parties that take; that have the target already */
    enum fl_status outcome;
    struct fl_err why;
    uint64_t step_ns, run_ns;
    struct fl_timer wake; /* shortly before the bytes are predicted to be there */
    /* begin() of a source, between runs */
    struct co_member *granting;
    struct xfer_request next_req; /* came while granting */
    struct xfer_run *next_run;
    bool ending;
};
/* coord.c */
void co_call(struct co_member *m, uint16_t method, const ProtobufCMessage *msg,
             struct fl_bytes blob, uint64_t due_ns, co_heard heard);
void co_again(struct co_member *m, co_ask ask); /* a little later */
void co_later(struct co_member *m, co_ask ask, uint64_t ms);
void co_quiet(struct co_member *m);             /* no call, no timer */
void co_in(struct co_member *m, enum fl_status st, const struct fl_err *err);
/* It has no set of that name: where a begin asks who reads what will be written, it does not. */
bool co_reads_nothing(struct co_member *m);
/* RECONCILE, which is answered at once, in any state. brief: without an engine's digests. */
void co_ask_state(struct co_member *m, bool brief, uint64_t ms, co_heard heard);
/* Of a question whose answer says nothing but yes: asked again of whom it did not reach. */
void co_heard_plain(struct co_member *m, enum fl_status st, const struct wire_msg *reply,
                    const struct fl_err *err);
void co_step_begin(struct xfer_coord *c, enum co_step step, const char *what, uint64_t due_ns,
                   bool (*who)(const struct co_member *m), co_ask ask,
                   void (*over)(void *arg, enum fl_status st, const struct fl_err *err));
bool co_note_state(struct co_member *m, const struct wire_msg *reply, struct fl_err *err);
void co_forget_run(struct xfer_coord *c); /* what members were in the run before */
void co_reconcile(struct xfer_coord *c, uint64_t due_ns,
                  void (*over)(void *arg, enum fl_status st, const struct fl_err *err));
uint64_t co_due(const struct xfer_coord *c, uint64_t ms);
void co_sweep(struct xfer_coord *c); /* frees who is gone and not missed */
/* A dead rank of an engine whose other ranks live and wait for it: without it the engine takes
 * nothing. */
bool co_missed(const struct co_member *m);
bool co_gives(const struct co_member *m);
enum { CO_AT_BYTES = 48 };
/* "bucket 3 of 12" of this epoch, as last heard */
const char *co_at(const struct co_member *m, char text[CO_AT_BYTES]);
void co_tell_late(struct xfer_coord *c);
bool co_silent(const struct co_member *m); /* late, and not heard since: asked, not waited for */
/* coord_published.c */
bool co_reported_source(const struct co_member *m);
/* The names of all these members' tensors, sorted, each once. They are borrowed from the manifests. */
enum fl_status co_list_tensors(struct xfer_coord *c, bool (*who)(const struct co_member *m),
                               struct fl_err *err);
struct co_tensor *co_tensor_of(struct xfer_coord *c, const char *name); /* NULL: not in the list */
/* The version that the sources have published; FL_AGAIN: they have not, or not the same. */
enum fl_status co_published(struct xfer_coord *c, struct xfer_version *out, struct fl_err *err);
/* coord_decide.c: target, epoch, and who gives and takes. n_takers 0: all have it. */
enum fl_status co_decide(struct xfer_coord *c, struct fl_err *err);
bool co_first_alive(const struct co_member *m); /* of its party, of those that are not gone */
/* coord_plan.c: c->plan, and what its tensors' digests must be. */
enum fl_status co_plan(struct xfer_coord *c, struct fl_err *err);
/* coord_fault.c */
bool co_source_at_fault(struct xfer_coord *c, struct fl_err *err);
/* False: some do not agree, or could not be added. */
bool co_party_sums(struct xfer_coord *c, uint32_t party, uint32_t bad[XFER_NAMED_BAD],
                   uint32_t *n_bad);
/* coord_tied.c: sources' tensors that no engine wants and that have the bytes of one that they do
 * want go from the manifests, which are copies; *room keeps what they then point at. FL_OK: some
 * went; FL_NOT_FOUND: none could. */
struct co_untied;
enum fl_status co_drop_tied(struct xfer_coord *c, struct xfer_plan_in *in,
                            struct xfer_manifest *sources, struct co_untied **room,
                            struct fl_err *err);
void co_untied_free(struct co_untied *u); /* NULL is fine */
/* coord_begin.c */
struct co_team { /* what one XferTeam points at */
    Fl__XferTeam t;
    Fl__XferPlace *places, **place_list;
    struct msg_member *members;
    Fl__XferMember **member_list;
};
struct co_begin {
    Fl__XferBegin b;
    Fl__XferEpoch epoch;
    Fl__XferVersion target;
    struct co_team *teams;
    Fl__XferTeam **list;
    void *part;
    size_t part_bytes;
};
/* FL_EXHAUSTED: no memory, or a giver's ticket is missing. co_begin_free() in any case. */
enum fl_status co_begin_make(struct xfer_coord *c, struct co_member *m, struct co_begin *b,
                             struct fl_err *err);
void co_begin_free(struct co_begin *b);
/* The answer to a begin. True: it lacks the part that it was to have kept, and is to be asked
 * again. */
bool co_begun(struct co_member *m, enum fl_status st);
enum fl_status co_note_begun(struct co_member *m, const struct wire_msg *reply, struct fl_err *err);
/* coord_early.c. A source has told its state and digests; is what was made of them what is asked
 * for? */
void co_note_published(struct co_member *m, const struct xfer_state *s, const char *blob);
void co_make_ready(struct xfer_coord *c); /* if it can be: nothing is under way, and all is known */
bool co_is_ready(const struct xfer_coord *c, const struct xfer_request *req);
/* coord_stage.c */
void co_stage_step(struct xfer_coord *c);
void co_ask_take(struct co_member *m); /* BEGIN to a taker, then waits */
void co_staged_over(void *arg, enum fl_status st, const struct fl_err *err);
void co_party_fail(struct co_member *failed); /* its engine's other ranks, with it */
bool co_takes(const struct co_member *m);
/* An engine that cannot be filled now is left behind, and filled later. Held until its deadline the
 * fill would keep a begin from being granted, and what the engine waits for (its weights' memory
 * back) may come after that begin. */
bool co_fills(const struct xfer_coord *c);
/* coord_run.c */
/* what it is goes into the report, and the members begin */
void co_plan_stands(struct xfer_coord *c);
void co_run_begin(struct xfer_coord *c, const struct xfer_request *req, struct xfer_run *r);
void co_run_gone(struct co_member *m); /* m->gone is set, m->why says how */
/* coord_end.c */
void co_commit_step(struct xfer_coord *c);
/* without a commit: nothing was taken, or nobody lacked it */
void co_resume_step(struct xfer_coord *c);
void co_abort_step(struct xfer_coord *c);
void co_end_step(struct xfer_coord *c);
void co_run_finish(struct xfer_coord *c, enum fl_status st, const struct fl_err *err);
void co_failed(struct co_member *m, enum fl_status st, const struct fl_err *err, const char *phase);
bool co_party_is(const struct xfer_coord *c, uint32_t party, enum co_phase phase);
bool co_first_of_party(const struct co_member *m);
unsigned co_party_ranks(const struct xfer_coord *c, uint32_t party);
/* coord_times.c */
void co_times_begin(struct xfer_coord *c);
void co_times_asked(struct co_member *m); /* in c->step */
void co_times_in(struct co_member *m, enum fl_status st);
/* a line for each rank, the late ones first */
void co_times_say(const struct xfer_coord *c, enum fl_log_level level);
/* coord_grant.c */
void co_watch(struct co_member *m);
void co_grant_next(struct xfer_coord *c);
