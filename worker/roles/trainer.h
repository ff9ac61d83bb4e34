/* worker/roles/trainer.h - one rank of the built-in trainer
 *
 * Data parallel: every rank holds all weights and the optimizer, takes its shards of each batch, and
 * sums gradients at rank 0 (lane 1). Weights are read where they were published last and written
 * where the next version goes: there is no third copy. */
#pragma once
#include "worker/roles/ckpt.h"
#include "worker/roles/learner.h"
#include "worker/roles/role.h"

enum { TRAINER_LANE = 1 }; /* between the ranks of the trainer */

struct trainer {
    struct furlong *f;
    const struct furlong_seat *seat;
    struct role_args args;
    struct model_layout *layout;
    struct furlong_weights *weights;
    float **last, **next; /* one pointer per tensor: published last; the version in hand */
    struct learner *learner;
    float *m, *v;
    struct ckpt_state state;
    struct ckpt_lock *lock;
    bool begun, torn; /* torn: a call failed while it wrote; load() makes it whole */
    char *last_answer; /* of train: a driver that came back asks for it */
};
enum fl_status trainer_run(struct trainer *t, struct fl_err *err); /* until told to stop */

/* trainer_reduce.c: sum of all ranks, the same at all of them, in sum. */
enum fl_status trainer_reduce(struct trainer *t, uint64_t version, uint32_t part, void *sum,
                              size_t bytes, struct fl_err *err);
