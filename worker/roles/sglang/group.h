/* worker/roles/sglang/group.h - weights by a torch process group (NCCL) of which we are rank 0
 *
 * Rank 0 has to speak torch's rendezvous and the engine's own NCCL, so it is a small Python program
 * beside us, furlong_sglang.group, run by the Python that the server runs in: versions agree by
 * construction. It needs a device of its own, since NCCL takes a device once a group. It gets the
 * weights' memory by descriptor, and one line of JSON a command; it answers each with one line. */
#pragma once
#include "worker/roles/sglang/calls.h"
#include "worker/roles/sglang/weights.h"

struct group;
enum fl_status group_create(const char *command, struct calls *c, struct group **out,
                            struct fl_err *err);
/* The group is made at the first update and kept. After a failure: destroy. */
enum fl_status group_update(struct group *g, const struct weights_version *v, bool flush,
                            uint32_t ms, struct fl_err *err);
void group_destroy(struct group *g); /* NULL is fine */
FL_AUTO_DEFINE(group)
