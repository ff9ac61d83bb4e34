/* transport/xfer/sink_priv.h - the engine's side from inside: life and flip (sink.c), messages
 * (sink_serve.c), what begins (sink_begin.c) */
#pragma once
#include "transport/xfer/give.h"
#include "transport/xfer/sink.h"
#include "transport/xfer/take.h"

enum { SINK_TELL_MS = 200 }; /* between two answers that only say how far it is */
enum { SINK_PENDING = 16 }; /* requests that wait for something here; beyond: FL_EXHAUSTED */
struct sink_pend {
    struct xfer_sink *sink;
    struct call_req *req;
    uint16_t method;
    struct fl_timer over; /* WAIT, and BEGIN that waits */
    bool waits;
    bool timed_out;
    uint32_t have_in;  /* of a WAIT: answered with more in, from tell_ns on */
    uint64_t tell_ns;
};
struct sink_view { /* what the engine reads */
    struct link_mem mem; /* a copy: addr NULL: nothing serves */
    int slot; /* own one; -1: mapped pages, or none */
    struct reach **reaches;
    size_t n_reaches;
    struct fl_seat_ref maps_who;
    uint32_t maps_slot;
};
struct xfer_sink {
    struct port_set set;
    struct fl_loop *loop;
    struct xfer_port *port;
    struct xfer_member me;
    struct link_place place;
    struct xfer_manifest *want;
    void *image;
    size_t image_bytes;
    enum xfer_slots slots;
    bool check_equal;
    char *local_dir;
    const struct xfer_sink_ops *ops;
    void *arg;

    struct rx rx;
    uint32_t attempt_seen; /* of the driver */
    struct link_mem slot[2];
    bool have_slot[2];
    uint64_t slot_gen[2], gens; /* gens: memories there have been; peers keep mappings by it */
    struct sink_view view, next;
    struct xfer_version serving, staged;
    uint64_t (*digests)[2]; /* of each tensor of the manifest, of what serves */
    int stage_slot;
    struct xfer_plan *part; /* the last one that was checked: the next epoch mostly has the same */
    uint64_t part_hash[2];
    struct take *take; /* running, verified, or the ledger of a dirty slot */
    struct reaches reaches;
    bool all_in, offloaded, paused, pausing, flipping, hold, held, open, begin_after_pause, at_once;
    struct take_bad bad;
    uint64_t bytes, other_bytes, link_ns, verify_ns, pause_from_ns, pause_ns;
    uint32_t buckets_in, buckets_all, lease_ms;
    uint64_t dirty_number; /* of the version that an open begin made room for */
    struct fl_timer lease;
    struct fl_task paused_back, flipped_back, stir;
    struct sink_pend pend[SINK_PENDING];
    struct give give;
    bool stopping;
    struct fl_task *stopped;
};
enum fl_status sink_event(struct xfer_sink *s, enum rx_event on, const struct xfer_epoch *e,
                          struct fl_err *err);
void sink_state(const struct xfer_sink *s, struct xfer_state *out);
void sink_answer(struct xfer_sink *s); /* all requests that need wait no longer */
void sink_lease(struct xfer_sink *s);  /* the coordinator has been heard */
void sink_settle(struct xfer_sink *s);
bool sink_busy(const struct xfer_sink *s); /* a take has bytes or calls under way */
void sink_forget_ledger(struct xfer_sink *s);
void sink_slot_give_back(struct xfer_sink *s, int slot);
extern const struct take_user sink_takes;
/* Pages of a source that are not read yet and may be without another word of the coordinator, or
 * are about to be: a flip cannot be stopped, and a dirty engine flips when it has verified. */
bool sink_may_read(const struct xfer_sink *s); /* sink_serve.c */
/* Held while it would say nothing new: until something happens here, or wait_ms are
 * over; have_in: so many buckets the driver knows of, UINT32_MAX: it does not ask. */
void sink_answer_when_due(struct xfer_sink *s, struct call_req *req, uint16_t method,
                          uint32_t wait_ms, uint32_t have_in);
void sink_reply_state(struct xfer_sink *s, struct call_req *req);
/* sink_begin.c */
void sink_begin(struct xfer_sink *s, struct call_req *req, const Fl__XferBegin *b,
                const struct wire_msg *m);
void sink_serve(struct port_set *set, uint16_t method, struct call_req *req,
                const ProtobufCMessage *msg, const struct wire_msg *m);
