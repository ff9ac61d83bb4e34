/* transport/xfer/msg.h - the plane's messages, between protobuf and the words of xfer.h */
#pragma once
#include "transport/xfer/epoch.h"
#include "transport/xfer/port.h"
#include "xfer.pb-c.h"

#define XFER_ANY_SLOT UINT32_MAX
enum { XFER_NAMED_BAD = 64 }; /* bad buckets and tensors that a report names */

struct xfer_state { /* XferReport, decoded */
    bool source, offloaded, one_slot, held, maps, source_at_fault, all_in, has_manifest, has_place,
        has_serving;
    bool has_published, writing, wants, in_copies;
    struct fl_seat_ref who, maps_who;
    uint32_t party, maps_slot, buckets_in, buckets_all, slot, slot_gen, n_slots, wants_slot,
        wants_ms, n_bad_buckets, n_bad_tensors;
    struct xfer_epoch seen;
    uint64_t manifest[2];
    struct link_place place;
    enum rx_state state;
    struct xfer_version serving, staged;
    struct fl_err why; /* status FL_OK: nothing was wrong */
    uint32_t bad_buckets[XFER_NAMED_BAD], bad_tensors[XFER_NAMED_BAD];
    uint64_t bytes, other_bytes, link_ns, verify_ns, pause_ns, published, publishes, wants_number,
        asked, manifest_bytes, digest_bytes;
};
/* A packed message on the heap; free() data. FL_EXHAUSTED leaves it empty. */
enum fl_status msg_pack(const ProtobufCMessage *m, struct fl_bytes *out, struct fl_err *err);
void msg_reply(struct call_req *req, const ProtobufCMessage *m, struct fl_bytes blob);
void msg_reply_state(struct call_req *req, const struct xfer_state *s, struct fl_bytes blob);
/* To RECONCILE: the manifest's image, unless whoever asks knows it, and digests. */
void msg_reply_report(struct call_req *req, const Fl__XferReconcile *m, struct xfer_state *s,
                      struct fl_bytes image, struct fl_bytes digests);
/* FL_CORRUPT: not a report, or its blob is shorter than it says. */
enum fl_status msg_read_state(const struct wire_msg *m, struct xfer_state *out, struct fl_err *err);

/* What a giver calls a memory of its own: gen of the slot, over one line. */
static inline uint64_t msg_key_id(uint32_t serial, uint32_t gen, uint32_t mem)
{
    return (uint64_t)serial << 32 | (uint64_t)(uint16_t)gen << 16 | mem;
}
void msg_epoch(const struct xfer_epoch *e, Fl__XferEpoch *out);
struct xfer_epoch msg_read_epoch(const Fl__XferEpoch *e);
void msg_version(const struct xfer_version *v, Fl__XferVersion *out);
struct xfer_version msg_read_version(const Fl__XferVersion *v);
void msg_seat(const struct fl_seat_ref *s, Fl__SeatRef *out); /* borrows the id */
bool msg_read_seat(const Fl__SeatRef *s, struct fl_seat_ref *out);
void msg_place(const struct link_place *p, Fl__XferPlace *out); /* borrows the texts */
bool msg_read_place(const Fl__XferPlace *p, struct link_place *out);
struct msg_member { Fl__XferMember m; Fl__SeatRef who; };
void msg_member(const struct xfer_member *p, struct msg_member *out);
bool msg_read_member(const Fl__XferMember *m, struct xfer_member *out);
void msg_error(const struct fl_err *e, Fl__Error *out);
void msg_read_error(const Fl__Error *e, struct fl_err *out);
bool msg_read_hash(ProtobufCBinaryData b, uint64_t out[2]); /* 16 bytes */
static inline ProtobufCBinaryData msg_hash(const uint64_t hash[2])
{
    return (ProtobufCBinaryData){ 16, (uint8_t *)(uintptr_t)hash };
}
