/* worker/client/slots.h - the memory that weights lie in: the host's, or a device's arena
 *
 * A slot on a device has chunks of its own in the process' arena of that device (tag weights) and
 * is exported from birth. It looks to links like any device memory. What a trainer offers counts as
 * held by others all the time: an offload of its tag leaves it where engines read it. What an
 * engine holds goes with its tag. Any thread that may wait; one call at a time a set. */
#pragma once
#include "transport/arena/process.h"
#include "transport/link/dev.h"

enum { SLOTS_MEMS = 1024 }; /* memories that one set lies in */
struct furlong;
struct furlong_tensor;
struct furlong_weights_opts;
struct slots_home {            /* where the memory of a set is */
    char uuid[GPU_UUID_BYTES]; /* "": the host's */
    const char *set;
    struct arena *arena;
    void *stream; /* of the program; NULL: all of the device */
    bool offered;
};
/* By opts->device, by where the tensors' data lies, by the seat. FL_INVALID: the tensors lie on
 * several devices, or nothing says on which; FL_NOT_FOUND: not one of this process. */
enum fl_status slots_home_find(const struct furlong *f, const struct furlong_tensor *t, size_t n,
                               const struct furlong_weights_opts *o, struct slots_home *out,
                               struct fl_err *err);
/* What peers need to know to choose a way there; runs the probe of this machine's devices, once. */
enum fl_status slots_place(const struct furlong *f, const struct slots_home *h,
                           struct link_place *out, struct fl_err *err);
/* All that the program gave the device (its stream) before has run. */
enum fl_status slots_settle(const struct slots_home *h, struct fl_err *err);
bool slots_one(const struct slots_home *h, uint64_t bytes); /* two would leave nothing to others */

enum fl_status slots_alloc(const struct slots_home *h, uint64_t bytes, struct link_mem *out,
                           struct fl_err *err);
void slots_free(struct link_mem *mem); /* {0} is fine */
/* An engine's slot whose content goes with its tag, and comes back: nobody can map it meanwhile. */
void slots_leave(struct link_mem *mem);
enum fl_status slots_return(struct link_mem *mem, struct fl_err *err);

/* Tensors where they lie, as few memories as can be. Each tensor lies in one of them. */
struct slots_lent {
    struct link_mem *mems;
    uint64_t *bytes; /* of each */
    size_t n;
    bool staged; /* the last one is no memory: addresses of what nobody else can map */
    struct slots_span { uint32_t mem; uint64_t off; } *at; /* of each tensor */
};
enum fl_status slots_lend(const struct slots_home *h, const struct furlong_tensor *t,
                          const uint64_t *bytes, size_t n, struct slots_lent *out,
                          struct fl_err *err);
void slots_lent_fini(struct slots_lent *l);
