/* worker/roles/role.h - what the built-in trainer and engine have in common
 *
 * Both take the words of `furlong train` (common/conf/train_flags.h) and two of the driver's own:
 * --alphabet and --vocab-size. The driver settles sizes and alphabet, so that all agree. */
#pragma once
#include <furlong/furlong.h>
#include <jansson.h>

#include "common/conf/train_flags.h"
#include "worker/roles/model.h"
#include "worker/roles/prompts.h"

struct role_args {
    struct train_flags flags;
    struct fl_opts opts;
    const char *alphabet_hex;
    int64_t vocab_size;
    struct alphabet alphabet;
    struct model_config config;
};
/* main() of either: flags into args, joins as *f, runs, leaves. The exit code: 2 for what it was
 * started with, 1 for what happened. */
int role_main(const char *program, int argc, char **argv, struct role_args *args,
              struct furlong **f, enum fl_status (*run)(struct fl_err *err));

/* The weights as the plane names them: one furlong_tensor per tensor of the layout. free(). */
struct furlong_tensor *role_tensors(const struct model_layout *l);

enum fl_status role_body(const struct furlong_event *ev, json_t **out, struct fl_err *err);
void role_reply(struct furlong_call *c, json_t *body_take, const void *blob, size_t bytes);
void role_refuse(struct furlong_call *c, enum fl_status st, const struct fl_err *err);
double role_now_s(void);
/* What an offload event is answered with: the arena's share plus our own. */
void role_reply_moved(struct furlong_call *c, const struct furlong_moved *m, size_t own_bytes,
                      double own_s);
