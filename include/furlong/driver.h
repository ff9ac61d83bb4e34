#pragma once
#include <furlong/furlong.h>
#ifdef __cplusplus
extern "C" {
#endif

/* ==== include/furlong/driver.h: what only a driver may do ======================================
 * A driver is the job's own process (role "driver", rank 0). Elsewhere these calls give FL_DENIED.
 * A driver that starts again as a later attempt makes the same calls: furlong_place() answers with
 * the group that the job holds, furlong_launch() with the processes that still run. */
struct furlong_layout;
struct furlong_group;
struct furlong_flag {
    const char *name, *value; /* as on the command line, without dashes; value NULL: a bare flag */
};
/* Ask the head for room for all roles that the flags describe (Miles' words), and reserve it.
 *
 * FL_INVALID    can never fit, or the flags contradict each other; err names the flag or the reason
 * FL_EXHAUSTED  not now; err says what is missing, where, and who has it. Waited for as long as the
 *               flag place-timeout says, in seconds; without it for as long as it takes */
enum fl_status furlong_place(struct furlong *f, const struct furlong_flag *flags, size_t n,
                             struct furlong_layout **out, struct fl_err *err);
void furlong_layout_print(const struct furlong_layout *y, int fd);
uint32_t furlong_layout_count(const struct furlong_layout *y, const char *role); /* ranks of it */
struct furlong_layout_rank { /* borrowed from y */
    const char *node, *address;
    const char *const *devices;
    uint32_t n_devices, local_rank, local_world;
};
bool furlong_layout_rank(const struct furlong_layout *y, const char *role, uint32_t rank,
                         struct furlong_layout_rank *out); /* false: no such rank */
/* One JSON object for run.json: {"group","master","roles":{ROLE:[{"rank","node","address","devices",
 * "bundles"}…]},"derived":[{"flag","value","why"}…]}. *out_take: free(). NULL when memory is short. */
void furlong_layout_json(const struct furlong_layout *y, char **out_take);
/* Gives the placement group back, in the background; groups launched on it must have ended. */
void furlong_layout_free(struct furlong_layout *y); /* NULL is fine */

enum furlong_member_state { FURLONG_STARTING, FURLONG_LIVE, FURLONG_ENDED };
struct furlong_member { /* a snapshot; why: the cause of the last end, "" if none yet */
    uint32_t rank, attempt;
    enum furlong_member_state state;
    char node[64], why[256];
};
struct furlong_launch_opts {
    uint32_t restart_max;                /* per member, by the head, after which it stays ENDED  */
    uint32_t backoff_ms, backoff_max_ms; /* doubles from the first to the second                 */
    uint32_t start_ms;                   /* all members must have joined by then; 0: no deadline */
    const char *cwd;                     /* NULL: the driver's                                   */
};
/* Starts one process per rank of the role and returns when all have joined.
 *
 * argv, env       NULL-terminated; env: NAME=VALUE on top of the daemon's; NULL: none
 * o               NULL: no restarts, no deadline
 * FL_TIMEOUT      names who has not joined
 * FL_NOT_FOUND    a shell's command is not there on a member's node, or may not be run (exit code 127, 126)
 * FL_UNREACHABLE  a member ended for good before; its last words are in err. Whichever it is, all
 *                 members are ended again and *out stays untouched */
enum fl_status furlong_launch(struct furlong *f, const struct furlong_layout *y, const char *role,
                              char *const argv[], char *const env[],
                              const struct furlong_launch_opts *o, struct furlong_group **out,
                              struct fl_err *err);
/* The same, and returns when they are started: furlong_group_wait() says when all have joined, and
 * furlong_group_end() ends those of a group that does not come up. So roles start side by side. */
enum fl_status furlong_launch_start(struct furlong *f, const struct furlong_layout *y,
                                    const char *role, char *const argv[], char *const env[],
                                    const struct furlong_launch_opts *o, struct furlong_group **out,
                                    struct fl_err *err);
uint32_t furlong_group_size(const struct furlong_group *g);
void furlong_group_member(struct furlong_group *g, uint32_t i, struct furlong_member *out);
/* The exit code of the end that furlong_member.why tells of; -1: none has ended yet, or not by itself (a signal,
 * a stop, a node that is gone). A shell gives 128 and the signal for a program of its own that was killed. */
int furlong_member_exit_code(struct furlong_group *g, uint32_t i);
/* Borrowed until furlong_leave(); follows attempts. */
struct furlong_peer *furlong_group_peer(struct furlong_group *g, uint32_t i);
/* Wait until all are LIVE, and, once a furlong_update() into this group committed, until all hold a
 * version: one that came back is filled by the library before it counts.
 * FL_TIMEOUT names who is not; FL_UNREACHABLE: a member is ENDED for good. */
enum fl_status furlong_group_wait(struct furlong_group *g, uint32_t budget_ms, struct fl_err *err);
enum furlong_late { FURLONG_IN_TIME, FURLONG_SLOW, FURLONG_SILENT };
/* Was member i, in the attempt that out names, waited for in vain by the last furlong_ask_all() of g, or by
 * the weight plane since its last furlong_update()? out->why says in what, and where it was last heard.
 * SLOW: it missed the deadline, but answers. SILENT: it hangs, or the way to it does; nobody but
 * furlong_member_end() ends it. */
enum furlong_late furlong_group_late(struct furlong_group *g, uint32_t i, struct furlong_member *out);
/* Ends that attempt of member i by force: its whole tree is killed without being asked, which also ends
 * what is stopped. What follows is what follows any end: the next attempt, up to restart_max, after its
 * back-off. Returns when it has ended, FL_OK too if that attempt had ended before.
 *
 * why           stands in the member's cause, for people
 * FL_TIMEOUT    its daemon has not said in budget_ms that it has ended; asked again it goes on */
enum fl_status furlong_member_end(struct furlong_group *g, uint32_t i, uint32_t attempt, const char *why,
                                  uint32_t budget_ms, struct fl_err *err);
/* Ends every member and starts each again as its next attempt; returns as furlong_launch, but the
 * group stays. */
enum fl_status furlong_group_restart(struct furlong_group *g, uint32_t budget_ms,
                                     struct fl_err *err);
/* Asks every member to stop (FURLONG_STOP with its budget, then by force), waits until all have ended,
 * frees g. NULL is fine. A group that was not ended is freed by furlong_leave() and runs on. */
void furlong_group_end(struct furlong_group *g);

/* The same call to every member in lane FURLONG_MAIN; waits for all, or for the budget.
 *
 * each          NULL, or furlong_group_size() answers: set for those that answered, zeroed for the rest
 * FL_OK         all answered. Else the first refusal's status, FL_TIMEOUT or FL_UNREACHABLE; err names
 *               who was late, gone or refused, the answers that came are in each all the same */
enum fl_status furlong_ask_all(struct furlong_group *g, const char *method,
                               const struct furlong_data *what, uint32_t budget_ms,
                               struct furlong_answer *each, struct fl_err *err);

struct furlong_update {
    uint64_t version;      /* what the trainers have published */
    const char *set, *mode; /* mode: auto, share, copy, broadcast, p2p, disk-delta; NULL: auto */
    uint32_t least_engines; /* commit at the deadline if so many have verified; 0: all that live */
    uint32_t budget_ms;
    uint32_t slots;        /* 0: two where memory allows; 1: one slot, engines are DIRTY meanwhile */
    uint64_t bucket_bytes; /* 0: 512 MiB */
    const char *dir;       /* disk-delta: a folder that all nodes see */
};
struct furlong_report {
    uint64_t version, digest[2], bytes, move_ns, pause_ns, predicted_ns;
    uint32_t committed, left_behind;
    char mode[16];             /* what was chosen                              */
    struct fl_err first_behind; /* FL_OK, or who was left behind, where and why */
};
/* Opens the plane of how->set ahead of its first update: from now on the library answers begin() of
 * the trainers and fills engines. A driver that starts again needs it before trainers write: until
 * a driver speaks, a trainer that was in an update before waits in begin(). version, budget_ms: not looked at. */
enum fl_status furlong_plane(struct furlong_group *from, struct furlong_group *to,
                             const struct furlong_update *how, struct fl_err *err);
/* Move a published version from the trainers to the engines: one epoch (docs/architecture.md).
 *
 * FL_OK           at least least_engines serve it; first_behind names one that does not
 * FL_TIMEOUT      too few verified in time: aborted, the old version serves on
 * FL_INVALID      tensors differ between the sides, version is not what was published, or a trainer
 *                 has offered and all the time published nothing
 * FL_AGAIN        weights are offloaded in an engine, or another update is in flight */
enum fl_status furlong_update(struct furlong_group *from, struct furlong_group *to,
                              const struct furlong_update *how, struct furlong_report *out,
                              struct fl_err *err);

/* One JSON object a step, up to 1 MiB: to the head, for those who follow or look. Never waits: up to
 * 1,024 that the head has not acknowledged are kept and sent when it is back, further ones are left
 * out; furlong_leave() waits 5 s for them. One whose acknowledgement was lost comes twice. */
void furlong_step_record(struct furlong *f, const char *json);
#ifdef __cplusplus
}
#endif
