#include "transport/xfer/msg.h"
#include <stdlib.h>
#include <string.h>
#include "common/base/str.h"

static char *borrow(const char *text)
{
    return (char *)(uintptr_t)text; /* protobuf-c reads it and says char * */
}

void msg_epoch(const struct xfer_epoch *e, Fl__XferEpoch *out)
{
    fl__xfer_epoch__init(out);
    out->attempt = e->attempt;
    out->seq = e->seq;
}

struct xfer_epoch msg_read_epoch(const Fl__XferEpoch *e)
{
    return (struct xfer_epoch){ .attempt = e->attempt, .seq = e->seq };
}

void msg_version(const struct xfer_version *v, Fl__XferVersion *out)
{
    fl__xfer_version__init(out);
    out->number = v->number;
    out->d0 = v->digest[0];
    out->d1 = v->digest[1];
}

struct xfer_version msg_read_version(const Fl__XferVersion *v)
{
    return (struct xfer_version){ .number = v->number, .digest = { v->d0, v->d1 } };
}

void msg_seat(const struct fl_seat_ref *s, Fl__SeatRef *out)
{
    fl__seat_ref__init(out);
    out->worker.data = (uint8_t *)(uintptr_t)s->id.b;
    out->worker.len = sizeof(s->id.b);
    out->attempt = s->attempt;
}

bool msg_read_seat(const Fl__SeatRef *s, struct fl_seat_ref *out)
{
    if (s->worker.len != sizeof(out->id.b))
        return false;
    memcpy(out->id.b, s->worker.data, sizeof(out->id.b));
    out->attempt = s->attempt;
    return true;
}

void msg_place(const struct link_place *p, Fl__XferPlace *out)
{
    fl__xfer_place__init(out);
    out->host_boot = borrow(p->host_boot);
    out->gpu_uuid = borrow(p->gpu_uuid);
    out->addr = borrow(p->addr);
    out->has_pid_ns = out->has_ipc_ns = out->has_nccl_version = true;
    out->pid_ns = p->pid_ns;
    out->ipc_ns = p->ipc_ns;
    out->nccl_version = p->nccl_version;
    out->has_unified = out->has_vmm_fd = out->has_legacy_ipc = true;
    out->unified = p->unified;
    out->vmm_fd = p->vmm_fd;
    out->legacy_ipc = p->legacy_ipc;
    out->n_gpu_peers = p->n_gpu_peers;
    out->gpu_peers = (uint64_t *)(uintptr_t)p->gpu_peers;
    out->nccl_env = borrow(p->nccl_env);
}

bool msg_read_place(const Fl__XferPlace *p, struct link_place *out)
{
    *out = (struct link_place){ .pid_ns = p->pid_ns,
                                .ipc_ns = p->ipc_ns,
                                .unified = p->unified,
                                .vmm_fd = p->vmm_fd,
                                .legacy_ipc = p->legacy_ipc,
                                .nccl_version = p->nccl_version };
    if (p->n_gpu_peers > LINK_PEERS)
        return false;
    out->n_gpu_peers = (uint32_t)p->n_gpu_peers;
    if (p->n_gpu_peers)
        memcpy(out->gpu_peers, p->gpu_peers, p->n_gpu_peers * sizeof(*p->gpu_peers));
    return FL_COPY(out->nccl_env, p->nccl_env ? p->nccl_env : "") &&
           FL_COPY(out->host_boot, p->host_boot) &&
           FL_COPY(out->gpu_uuid, p->gpu_uuid ? p->gpu_uuid : "") &&
           FL_COPY(out->addr, p->addr ? p->addr : "");
}

void msg_member(const struct xfer_member *p, struct msg_member *out)
{
    fl__xfer_member__init(&out->m);
    msg_seat(&p->who, &out->who);
    out->m.who = &out->who;
    out->m.party = p->party;
    out->m.name = borrow(p->name);
    out->m.where = borrow(p->where);
}

bool msg_read_member(const Fl__XferMember *m, struct xfer_member *out)
{
    *out = (struct xfer_member){ .party = m->party };
    return msg_read_seat(m->who, &out->who) && FL_COPY(out->name, m->name) &&
           FL_COPY(out->where, m->where);
}

void msg_error(const struct fl_err *e, Fl__Error *out)
{
    fl__error__init(out);
    out->status = e->status;
    out->has_origin = out->has_native = true;
    out->origin = e->origin;
    out->native = e->native;
    out->text = borrow(e->text);
}

void msg_read_error(const Fl__Error *e, struct fl_err *out)
{
    *out = (struct fl_err){ .status = e->status < FL_STATUS_COUNT ? (enum fl_status)e->status
                                                                  : FL_INTERNAL,
                            .origin = FL_FROM_PEER,
                            .native = e->native };
    fl_copy(out->text, sizeof(out->text), e->text ? e->text : "");
}

bool msg_read_hash(ProtobufCBinaryData b, uint64_t out[2])
{
    if (b.len != 16)
        return false;
    memcpy(out, b.data, 16);
    return true;
}

enum fl_status msg_pack(const ProtobufCMessage *m, struct fl_bytes *out, struct fl_err *err)
{
    size_t n = protobuf_c_message_get_packed_size(m);
    uint8_t *p = malloc(n ? n : 1);

    *out = (struct fl_bytes){ 0 };
    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a message of %zu bytes", n);
    protobuf_c_message_pack(m, p);
    *out = (struct fl_bytes){ p, n };
    return FL_OK;
}

void msg_reply(struct call_req *req, const ProtobufCMessage *m, struct fl_bytes blob)
{
    struct fl_err err = { 0 };
    struct fl_bytes body;

    if (msg_pack(m, &body, &err) != FL_OK) {
        call_fail(req, &err);
        return;
    }
    call_reply(req, body, blob);
    free((void *)(uintptr_t)body.data);
}

/* What XferReport points at while it is packed. */
struct report_parts {
    Fl__SeatRef who, maps;
    Fl__XferEpoch seen;
    Fl__XferPlace place;
    Fl__XferVersion serving, staged;
    Fl__Error why;
};

static void fill_sink(Fl__XferReport *r, struct report_parts *p, const struct xfer_state *s)
{
    r->has_state = r->has_buckets_in = r->has_buckets_all = r->has_offloaded = r->has_one_slot =
        true;
    r->has_held = r->has_source_at_fault = r->has_all_in = r->has_bytes = r->has_verify_ns = true;
    r->has_pause_ns = r->has_other_bytes = r->has_link_ns = true;
    r->state = s->state;
    r->buckets_in = s->buckets_in;
    r->buckets_all = s->buckets_all;
    r->offloaded = s->offloaded;
    r->one_slot = s->one_slot;
    r->held = s->held;
    r->source_at_fault = s->source_at_fault;
    r->all_in = s->all_in;
    r->bytes = s->bytes;
    r->other_bytes = s->other_bytes;
    r->link_ns = s->link_ns;
    r->verify_ns = s->verify_ns;
    r->pause_ns = s->pause_ns;
    msg_version(&s->serving, &p->serving);
    r->serving = s->has_serving ? &p->serving : NULL;
    msg_version(&s->staged, &p->staged);
    r->staged = &p->staged;
    msg_seat(&s->maps_who, &p->maps);
    r->maps = s->maps ? &p->maps : NULL;
    r->has_maps_slot = s->maps;
    r->maps_slot = s->maps_slot;
    msg_error(&s->why, &p->why);
    r->why = s->why.status != FL_OK ? &p->why : NULL;
    r->n_bad_buckets = s->n_bad_buckets;
    r->bad_buckets = (uint32_t *)(uintptr_t)s->bad_buckets;
    r->n_bad_tensors = s->n_bad_tensors;
    r->bad_tensors = (uint32_t *)(uintptr_t)s->bad_tensors;
}

static void fill_source(Fl__XferReport *r, const struct xfer_state *s)
{
    r->has_published = s->has_published;
    r->published = s->published;
    r->has_publishes = true;
    r->publishes = s->publishes;
    r->has_slot = r->has_slot_gen = r->has_writing = r->has_n_slots = true;
    r->slot = s->slot;
    r->slot_gen = s->slot_gen;
    r->writing = s->writing;
    r->n_slots = s->n_slots;
    r->has_in_copies = true;
    r->in_copies = s->in_copies;
    r->has_wants = r->has_wants_slot = r->has_asked = r->has_wants_ms = s->wants;
    r->wants = s->wants_number;
    r->wants_slot = s->wants_slot;
    r->asked = s->asked;
    r->wants_ms = s->wants_ms;
}

void msg_reply_state(struct call_req *req, const struct xfer_state *s, struct fl_bytes blob)
{
    struct report_parts p;
    Fl__XferReport r = FL__XFER_REPORT__INIT;

    msg_seat(&s->who, &p.who);
    r.who = &p.who;
    r.party = s->party;
    r.source = s->source;
    msg_epoch(&s->seen, &p.seen);
    r.seen = &p.seen;
    r.has_manifest = s->has_manifest;
    r.manifest = msg_hash(s->manifest);
    msg_place(&s->place, &p.place);
    r.place = s->has_place ? &p.place : NULL;
    r.has_manifest_bytes = r.has_digest_bytes = true;
    r.manifest_bytes = s->manifest_bytes;
    r.digest_bytes = s->digest_bytes;
    if (s->source)
        fill_source(&r, s);
    else
        fill_sink(&r, &p, s);
    msg_reply(req, &r.base, blob);
}

void msg_reply_report(struct call_req *req, const Fl__XferReconcile *m, struct xfer_state *s,
                      struct fl_bytes image, struct fl_bytes digests)
{
    uint64_t known[2];
    struct fl_err err = { 0 };

    if (m->has_known && msg_read_hash(m->known, known) && known[0] == s->manifest[0] &&
        known[1] == s->manifest[1])
        image.len = 0;
    s->manifest_bytes = image.len;
    s->digest_bytes = digests.len;
    char *blob = malloc(image.len + digests.len + 1);

    if (!blob) {
        fl_fail(&err, FL_EXHAUSTED, "no memory for a report of %zu bytes", image.len + digests.len);
        call_fail(req, &err);
        return;
    }
    if (image.len)
        memcpy(blob, image.data, image.len);
    if (digests.len)
        memcpy(blob + image.len, digests.data, digests.len);
    msg_reply_state(req, s, (struct fl_bytes){ blob, image.len + digests.len });
    free(blob);
}

static bool read_parts(const Fl__XferReport *r, struct xfer_state *s)
{
    s->has_manifest = r->has_manifest;
    s->has_place = r->place != NULL;
    s->maps = r->maps != NULL;
    s->has_serving = r->serving != NULL;
    if (r->serving)
        s->serving = msg_read_version(r->serving);
    if (r->staged)
        s->staged = msg_read_version(r->staged);
    if (r->why)
        msg_read_error(r->why, &s->why);
    s->n_bad_buckets =
        r->n_bad_buckets < XFER_NAMED_BAD ? (uint32_t)r->n_bad_buckets : XFER_NAMED_BAD;
    s->n_bad_tensors =
        r->n_bad_tensors < XFER_NAMED_BAD ? (uint32_t)r->n_bad_tensors : XFER_NAMED_BAD;
    if (s->n_bad_buckets)
        memcpy(s->bad_buckets, r->bad_buckets, s->n_bad_buckets * sizeof(uint32_t));
    if (s->n_bad_tensors)
        memcpy(s->bad_tensors, r->bad_tensors, s->n_bad_tensors * sizeof(uint32_t));
    return r->state < RX_STATES && msg_read_seat(r->who, &s->who) &&
           (!r->maps || msg_read_seat(r->maps, &s->maps_who)) &&
           (!r->has_manifest || msg_read_hash(r->manifest, s->manifest)) &&
           (!r->place || msg_read_place(r->place, &s->place));
}

enum fl_status msg_read_state(const struct wire_msg *m, struct xfer_state *out, struct fl_err *err)
{
    Fl__XferReport *r = fl__xfer_report__unpack(NULL, m->head.body_bytes, m->body);
    struct xfer_state s;
    bool good;

    if (!r)
        return fl_fail(err, FL_CORRUPT, "a report of the weight plane (%u bytes) does not decode",
                       m->head.body_bytes);
    s = (struct xfer_state){
        .source = r->source,
        .offloaded = r->offloaded,
        .one_slot = r->one_slot,
        .held = r->held,
        .source_at_fault = r->source_at_fault,
        .all_in = r->all_in,
        .party = r->party,
        .maps_slot = r->maps_slot,
        .buckets_in = r->buckets_in,
        .buckets_all = r->buckets_all,
        .has_published = r->has_published,
        .published = r->published,
        .publishes = r->publishes,
        .writing = r->writing,
        .slot = r->slot,
        .slot_gen = r->slot_gen,
        .n_slots = r->n_slots,
        .in_copies = r->in_copies,
        .wants = r->has_wants,
        .wants_number = r->wants,
        .wants_slot = r->wants_slot,
        .wants_ms = r->wants_ms,
        .asked = r->asked,
        .seen = msg_read_epoch(r->seen),
        .state = (enum rx_state)r->state,
        .bytes = r->bytes,
        .other_bytes = r->other_bytes,
        .link_ns = r->link_ns,
        .verify_ns = r->verify_ns,
        .pause_ns = r->pause_ns,
        .manifest_bytes = r->manifest_bytes,
        .digest_bytes = r->digest_bytes,
    };
    good = read_parts(r, &s) && s.manifest_bytes <= m->head.blob_bytes &&
           s.digest_bytes <= m->head.blob_bytes - s.manifest_bytes;
    fl__xfer_report__free_unpacked(r, NULL);
    if (!good)
        return fl_fail(err, FL_CORRUPT, "a report of the weight plane says what cannot be");
    *out = s;
    return FL_OK;
}
