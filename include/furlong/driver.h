#pragma once
#include <furlong/furlong.h>

/* ==== include/furlong/driver.h: what only a driver may do ===================================== */
struct furlong_layout;
struct furlong_group;
struct furlong_flag { const char *name, *value; };
enum fl_status furlong_place(struct furlong *f, const struct furlong_flag *flags, size_t n,
                             struct furlong_layout **out, struct fl_err *err);
void furlong_layout_print(const struct furlong_layout *y, int fd);
uint32_t furlong_layout_count(const struct furlong_layout *y, const char *role); /* ranks of it */
void furlong_layout_json(const struct furlong_layout *y, char **out_take); /* for run.json; free() */
void furlong_layout_free(struct furlong_layout *y); /* and gives the placement group back */

enum furlong_member_state { FURLONG_STARTING, FURLONG_LIVE, FURLONG_ENDED };
struct furlong_member { /* a snapshot; why: the cause of the last end, "" if none yet */
    uint32_t rank, attempt;
    enum furlong_member_state state;
    char node[64], why[256];
};
struct furlong_launch_opts {
    uint32_t restart_max;                  /* per member, by the head, after which it stays ENDED  */
    uint32_t backoff_ms, backoff_max_ms;   /* doubles from the first to the second                 */
    uint32_t start_ms;                     /* all members must have joined by then; 0: no deadline */
};
/* Starts one process per rank of the role and returns when all have joined (or names who has not). */
enum fl_status furlong_launch(struct furlong *f, const struct furlong_layout *y, const char *role,
                              char *const argv[], char *const env[],
                              const struct furlong_launch_opts *o, struct furlong_group **out,
                              struct fl_err *err);
uint32_t furlong_group_size(const struct furlong_group *g);
void furlong_group_member(struct furlong_group *g, uint32_t i, struct furlong_member *out);
struct furlong_peer *furlong_group_peer(struct furlong_group *g, uint32_t i); /* borrowed; follows attempts */
/* FL_TIMEOUT names who is not LIVE; FL_UNREACHABLE: a member is ENDED for good. */
enum fl_status furlong_group_wait(struct furlong_group *g, uint32_t budget_ms, struct fl_err *err);
/* Ends every member and starts each again as its next attempt; returns as furlong_launch. */
enum fl_status furlong_group_restart(struct furlong_group *g, uint32_t budget_ms,
                                     struct fl_err *err);

/* Several asks in flight from one thread; each comes back exactly once, in any order. */
struct furlong_asks;
struct furlong_done {
    uint64_t tag;
    enum fl_status status;
    struct fl_err err;
    struct furlong_answer answer; /* on FL_OK: furlong_answer_free() */
};
enum fl_status furlong_asks_create(struct furlong *f, uint32_t bound, struct furlong_asks **out,
                                   struct fl_err *err);
enum fl_status furlong_asks_start(struct furlong_asks *a, struct furlong_peer *p, uint32_t lane,
                                  const char *method, const struct furlong_data *what,
                                  uint32_t budget_ms, uint64_t tag, struct fl_err *err);
enum fl_status furlong_asks_next(struct furlong_asks *a, uint32_t wait_ms,
                                 struct furlong_done *out, struct fl_err *err); /* FL_AGAIN: none came */
void furlong_asks_destroy(struct furlong_asks *a); /* cancels what is in flight */

/* One JSON object a step: to the head, for those who follow or look. Kept: the last 1,024. */
void furlong_step_record(struct furlong *f, const char *json);

enum fl_status furlong_ask_all(struct furlong_group *g, const char *method,
                               const struct furlong_data *what, uint32_t budget_ms, struct furlong_answer *each,
                               struct fl_err *err); /* err names who was late or refused */
struct furlong_update {
    uint64_t version;
    const char *set, *mode;
    uint32_t least_engines, budget_ms;
};
struct furlong_report {
    uint64_t version, digest[2], bytes, move_ns, pause_ns, predicted_ns;
    uint32_t committed, left_behind;
};
enum fl_status furlong_update(struct furlong_group *from, struct furlong_group *to,
                              const struct furlong_update *how, struct furlong_report *out,
                              struct fl_err *err);
void furlong_group_end(struct furlong_group *g);

