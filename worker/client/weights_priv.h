/* worker/client/weights_priv.h - what the files about weights share: set.c, offer.c, accept.c */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "transport/xfer/sink.h"
#include "transport/xfer/source.h"
#include "worker/client/peers.h"
#include "worker/client/slots.h"
#include "worker/client/sync.h"
#include "worker/client/weights.h"

struct furlong_weights {
    struct furlong *f;
    char set[64];
    uint32_t n;
    uint64_t *offset; /* of the caller's tensors in a slot */
    void **lies;      /* the tensors themselves, given where they lie; else NULL */
    uint64_t slot_bytes;
    struct slots_home home;
    struct slots_lent lent;
    struct furlong_weights *next; /* of f->sets: loop thread */

    pthread_mutex_t mu; /* what follows */
    uint8_t *data, *last;
    struct xfer_version version; /* number FURLONG_NO_VERSION: none */

    struct xfer_source *source; /* a trainer's: loop thread */
    struct link_mem slots[2];
    unsigned n_slots;
    struct xfer_wait wait;
    struct client_sync *waiting;

    struct xfer_sink *sink; /* an engine's: loop thread */
    struct link_mem spare;  /* the slot before the last, for the next epoch */
    unsigned rooms;         /* slots that there are, with the spare one */
    struct link_window *window; /* fixed addresses; NULL: they change */
    bool has_spare, away, dropping;
    struct fl_task *paused, *flipped; /* the sink's, until the program has answered */
    struct fl_work quiet; /* where nobody answers: until the device has */
    struct fl_task *then; /* what is posted then */
    bool resume_due;
    unsigned pauses; /* of paused_by_plane: this set's */
    bool untold;     /* a RESUME that went with the set: another is owed */
    const uint8_t *next_data; /* of a COMMIT until it is answered; else NULL */
    int next_fd;              /* that next_data begins; -1: none */
    struct xfer_version next_version;
    struct fl_timer retry;
    struct fl_task stopped;
};

struct laid_out { /* a manifest and what it points to */
    struct order *order;
    struct xfer_tensor *tensors;
    struct xfer_piece *pieces;
    struct xfer_manifest m;
};
struct making { /* of source or sink, on the loop */
    struct client_sync sync;
    struct furlong_weights *w;
    const struct xfer_manifest *m;
    struct link_place place;
    enum xfer_slots slots;
    bool check_equal;
    const char *local_dir; /* NULL: beside the peer socket */
};
/* What the program said, as far as its ABI goes. */
struct furlong_weights_opts weights_opts(const struct furlong *f,
                                         const struct furlong_weights_opts *o);
enum fl_status weights_new(struct furlong *f, const char *set, const struct furlong_weights_opts *o,
                           struct furlong_weights **out, struct fl_err *err);
void weights_free(struct furlong_weights *w);
enum fl_status weights_lay_out(struct furlong_weights *w, const struct furlong_tensor *t, size_t n,
                               struct laid_out *l, struct fl_err *err);
uint64_t weights_tensor_bytes(const struct furlong_tensor *t); /* of the box that is here */
void laid_out_fini(struct laid_out *l);
struct xfer_box weights_box(const struct furlong_tensor *t);
bool weights_one_slot(const struct furlong_weights *w, const struct furlong_weights_opts *o);
/* Loop thread. */
enum fl_status weights_member(const struct furlong *f, struct xfer_member *me, struct fl_err *err);
void weights_added(struct furlong_weights *w); /* to f->sets */
void accept_flush(struct furlong_weights *w);   /* events that are still to be told */
void accept_no_more(struct furlong_weights *w); /* its sink is gone: what it held up goes on */
