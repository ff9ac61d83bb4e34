/* worker/roles/rollout.h - the built-in rollout engine: engine.h behind libfurlong */
#pragma once
#include "worker/roles/engine.h"
#include "worker/roles/role.h"

struct rollout {
    struct furlong *f;
    struct role_args args;
    struct model_layout *layout;
    struct furlong_weights *weights;
    float **w; /* of the version that serves */
    struct engine *engine;
    bool paused;
    double idle_from, idle_s; /* since when there is nothing to do; summed since the last answer */
    uint64_t served;
};
enum fl_status rollout_run(struct rollout *r, struct fl_err *err); /* until told to stop */

/* rollout_call.c */
void rollout_generate(struct rollout *r, const struct furlong_event *ev);
void rollout_answer(struct rollout *r, struct engine_request *q_take);
