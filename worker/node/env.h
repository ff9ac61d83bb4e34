/* worker/node/env.h - the environment of a worker (pure)
 *
 * The daemon's own, what the spec puts on top, and what only the daemon knows: see miles' rules of
 * CUDA_VISIBLE_DEVICES. Device ids are those of the node's list, never counted anew. */
#pragma once
#include "common/base/base.h"
#include "node.pb-c.h"
#include "worker/node/addr.h"

struct node_env_in {
    const char *const *base; /* the daemon's environment, ended by NULL */
    const Fl__WorkerSpec *spec;
    const struct fl_addr *addr;
    const char *node;
    const char *python_path; /* in front of PYTHONPATH; NULL or "": nothing */
    int seat_fd;
};
/* An engine meets its likes at a port of its own, the first of NODE_ENGINE_PORTS in a row; all
 * trainers at one. */
enum { NODE_ENGINE_PORTS = 4 };
bool node_is_engine(const Fl__WorkerSpec *spec);
/* *out: ended by NULL, node_env_free(). FL_INVALID: a name with '=' or none. */
enum fl_status node_env_make(const struct node_env_in *in, char ***out, struct fl_err *err);
void node_env_free(char **env);
