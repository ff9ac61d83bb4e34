/* transport/xfer/source_priv.h - the trainer's side from inside: begin, publish and life (source.c),
 * digests (source_digest.c), the coordinator's messages (source_serve.c) */
#pragma once
#include "transport/xfer/delta.h"
#include "transport/xfer/give.h"
#include "transport/xfer/source.h"

enum src_state {
    SRC_WRITING,   /* the slot in hand is the program's                  */
    SRC_DIGESTING, /* whole and frozen; its digests are being made       */
    SRC_PUBLISHED, /* frozen; engines may read it                        */
    SRC_ASKING     /* begin() waits for the coordinator; frozen until then */
};
struct xfer_source {
    struct port_set set; /* first of all: how the port finds us */
    struct fl_loop *loop;
    struct xfer_port *port;
    struct xfer_member me;
    struct link_place place;
    const struct xfer_manifest *have;
    struct xfer_manifest *have_own; /* decoded copy: one heap block */
    void *image;
    size_t image_bytes;
    struct link_mem *mems[2]; /* of each slot: have->n_mems */
    unsigned n_slots, slot;   /* slot: in hand */
    enum src_state state;
    bool has_published, was_read; /* was_read: some coordinator has had us in an epoch */
    bool taken_back;              /* the next slot was granted, and nobody reads it since  */
    bool in_copies;               /* some of the memory is staged: see XferReport */
    unsigned published_slot;
    uint64_t number, published;
    uint64_t (*digests)[2]; /* of each piece, of the published version */
    uint64_t (*fresh)[2];   /* being made */
    struct fl_work digest_work;
    struct fl_err digest_err;
    /* on a device: the runs of all pieces, memory by memory; tensor is the piece */
    struct link_seg *segs;
    size_t *segs_of; /* of each memory, where they begin; one more */
    size_t n_segs;
    struct link_digester **digesters; /* of each memory */
    enum fl_status (*room)(void *arg, uint64_t bytes, struct link_mem *out, struct fl_err *err);
    void (*done_with)(void *arg, struct link_mem *room);
    void *arg;
    struct xfer_wait *wait; /* of begin or publish */
    struct fl_task wait_back;
    struct fl_err wait_err;
    uint64_t asked, asked_number, begin_due_ns;
    bool granted; /* but what would be written is still being read here: when that is over */
    struct fl_timer begin_late;
    uint32_t attempt_seen; /* of the driver */
    struct call_req *watch;
    bool watch_hears; /* of what is published, too                  */
    uint64_t heard;   /* by whoever watches: how many publishes       */
    struct fl_timer watch_over;
    struct give give;
    struct fl_task stir; /* casts are near */
    struct delta_writer delta;
    uint64_t publishes;     /* counts */
    uint64_t delta_publish; /* which one was written last */
    struct fl_task *stopped;
    bool stopping;
};

/* source.c */
void source_grant(struct xfer_source *s); /* begin() ends: the slot is the program's */
void source_refuse(struct xfer_source *s, const struct fl_err *err);
unsigned source_next_slot(const struct xfer_source *s); /* that begin() is to hand out */
static inline uint32_t source_slot_gen(unsigned slot) /* its memory stays as long as the source */
{
    return slot + 1;
}
/* source_digest.c: the slot in hand, into fresh and digest_err. */
void source_digest_work(struct fl_work *w);
/* source_serve.c */
void source_serve(struct port_set *set, uint16_t method, struct call_req *req,
                  const ProtobufCMessage *msg, const struct wire_msg *m);
void source_watch_answer(struct xfer_source *s); /* whoever listens, if anybody does */
void source_watch_on_over(struct fl_timer *t, uint64_t now_ns);
void source_on_stir(struct fl_task *t);
