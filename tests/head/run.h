/* tests/head/run.h - a job whose driver runs on a daemon of the test, and what it asks the head */
#pragma once
#include "tests/head/rig.h"

enum { WAIT_MS = 5000 };
#define UNTIL(r, cond) t_until((r)->loop, cond, WAIT_MS)

struct run { /* a job whose driver runs on a */
    struct rig rig;
    struct fake a, b;
    char job[64];
    struct fake_worker *driver;
};

extern const char *const split_1_1[4][2], *const split_2_2[4][2], *const colocated_2[4][2];
struct fake_worker *driver_of(struct rig *r, struct fake *f, const char *id);
void run_start(struct run *x, const char *name, unsigned gpus_a, unsigned gpus_b);
void run_end(struct run *x);
void place_start(struct run *x, const char *const flags[][2], size_t n, int64_t wait_ms,
                 struct asked *q);
Fl__Layout *place(struct run *x, const char *const flags[][2], size_t n);
Fl__Members *launch_try(struct run *x, const Fl__Layout *y, const char *role, uint32_t restarts,
                        struct fl_err *err);
Fl__Members *launch(struct run *x, const Fl__Layout *y, const char *role, uint32_t restarts);
enum fl_status role_call(struct run *x, const Fl__Layout *y, uint32_t method, const char *role);
void end_group(struct run *x, const Fl__Layout *y);
const Fl__Where *last_news(struct fake *f, const char *role, uint32_t rank);
void head_away(struct run *x);
