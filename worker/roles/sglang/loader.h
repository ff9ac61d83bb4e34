/* worker/roles/sglang/loader.h - how furlong_sglang.load, inside the server, gets at the weights
 *
 * The adapter listens on an abstract socket, whose name the server has in FURLONG_SGLANG_SOCKET.
 * Each rank that loads connects, is checked by its uid, and gets two read-only descriptors in one
 * message: the memory of the version, and a JSON object that says which tensor lies where. It maps
 * the first, loads, and answers with one line of JSON: {"rank", "error"}. SGLang's own answer
 * cannot tell: a loader that raises ends it. */
#pragma once
#include "worker/roles/sglang/calls.h"
#include "worker/roles/sglang/weights.h"

struct loader {
    int fd;
    char name[80]; /* "@furlong-..." */
};
/* name: NULL: a random one. FL_EXISTS: somebody listens there. */
enum fl_status loader_open(struct loader *l, const char *name, struct fl_err *err);
void loader_close(struct loader *l);
/* Asks SGLang to run the loader and serves it. FL_UNSUPPORTED: the memory has no descriptor. */
enum fl_status loader_update(struct loader *l, struct calls *c, const struct weights_version *v,
                             bool flush, uint32_t ms, struct fl_err *err);
