#include "transport/xfer/source.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/log.h"
#include "common/base/str.h"
#include "common/proto/methods.h"
#include "transport/xfer/delta.h"
#include "transport/xfer/plan_priv.h"
#include "transport/xfer/give.h"

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
    uint64_t delta_publish,
        publishes; /* publishes: counts; delta_publish: which one was written last */
    struct fl_task *stopped;
    bool stopping;
};

/* ---- what begin and publish wait for ---- */

static void source_settle(struct xfer_source *s)
{
    if (!s->stopped || s->state == SRC_DIGESTING || give_busy(&s->give) || s->wait)
        return;
    fl_post(s->loop, s->stopped);
    s->stopped = NULL;
}

static void wait_run(struct fl_task *t)
{
    struct xfer_source *s = container_of(t, struct xfer_source, wait_back);
    struct xfer_wait *w = s->wait;
    struct fl_err err = s->wait_err;

    s->wait = NULL;
    source_settle(s);
    w->done(w, err.status, &err);
}

static void wait_over(struct xfer_source *s, enum fl_status st, const struct fl_err *err)
{
    s->wait_err = err ? *err : (struct fl_err){ .status = st };
    fl_post(s->loop, &s->wait_back);
}

static unsigned next_slot(const struct xfer_source *s)
{
    return s->n_slots == 2 && s->has_published ? 1 - s->published_slot : 0;
}

/* Our own copy of it to a folder outlives its epoch: nothing stops a write to a slow disk. */
static bool is_copied(const struct xfer_source *s)
{
    return s->give.writing && s->give.slot.mems == s->mems[next_slot(s)];
}

static void grant(struct xfer_source *s)
{
    s->granted = is_copied(s);
    if (s->granted)
        return;
    fl_timer_cancel(&s->begin_late);
    s->slot = next_slot(s);
    s->number = s->asked_number;
    s->state = SRC_WRITING;
    if (s->n_slots == 1)
        s->has_published = false; /* from here on those bytes are no version */
    fl_debug("weights begun member=%s version=%" PRIu64 " slot=%u", s->me.name, s->number, s->slot);
    wait_over(s, FL_OK, NULL);
}

static void refuse(struct xfer_source *s, const struct fl_err *err)
{
    s->granted = false;
    fl_timer_cancel(&s->begin_late);
    s->state = SRC_PUBLISHED;
    wait_over(s, err->status, err);
}

static void begin_on_late(struct fl_timer *t, uint64_t now_ns)
{
    struct xfer_source *s = container_of(t, struct xfer_source, begin_late);
    struct fl_err err = { 0 };

    (void)now_ns;
    fl_fail(&err, FL_TIMEOUT, "begin of version %" PRIu64 " at %s: %s slot %u%s", s->asked_number,
            s->me.name,
            s->granted ? "a version is still being written to its folder from"
                       : "the driver did not say in time that nobody reads",
            next_slot(s), s->granted ? "" : " any more");
    refuse(s, &err);
}

/* The slots' memories stay as long as the source. */
static uint32_t slot_gen(unsigned slot)
{
    return slot + 1;
}

static void state_of(const struct xfer_source *s, struct xfer_state *out)
{
    uint64_t now = fl_loop_now_ns(s->loop);
    uint64_t left_ms = s->begin_due_ns > now ? (s->begin_due_ns - now) / 1000000 : 0;

    *out = (struct xfer_state){ .source = true,
                                .who = s->me.who,
                                .party = s->me.party,
                                .seen = s->give.epoch,
                                .has_manifest = true,
                                .manifest = { s->have->hash[0], s->have->hash[1] },
                                .has_place = true,
                                .place = s->place,
                                .has_published = s->has_published && s->state != SRC_DIGESTING,
                                .published = s->published,
                                .publishes = s->publishes,
                                .slot = s->has_published ? s->published_slot : s->slot,
                                .slot_gen = slot_gen(s->published_slot),
                                .writing = s->state == SRC_WRITING || s->state == SRC_DIGESTING,
                                .n_slots = s->n_slots,
                                .wants = s->state == SRC_ASKING,
                                .wants_number = s->asked_number,
                                .wants_slot = next_slot(s),
                                .wants_ms = left_ms < UINT32_MAX ? (uint32_t)left_ms : UINT32_MAX,
                                .asked = s->asked };
}

static struct fl_bytes digests_of(const struct xfer_source *s, bool any)
{
    return (struct fl_bytes){ s->digests, any ? s->have->n_pieces * sizeof(*s->digests) : 0 };
}

static bool has_news(const struct xfer_source *s, uint64_t heard)
{
    return s->has_published && s->state != SRC_WRITING && s->state != SRC_DIGESTING &&
           s->publishes != heard;
}

static void watch_answer(struct xfer_source *s)
{
    struct fl_bytes digests = digests_of(s, s->watch_hears && has_news(s, s->heard));
    struct call_req *req = s->watch;
    struct xfer_state st;

    if (!req)
        return;
    s->watch = NULL;
    fl_timer_cancel(&s->watch_over);
    state_of(s, &st);
    st.digest_bytes = digests.len;
    msg_reply_state(req, &st, digests);
}

static void watch_on_over(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    watch_answer(container_of(t, struct xfer_source, watch_over));
}

enum fl_status xfer_source_begin(struct xfer_source *s, uint64_t version, uint64_t due_ns,
                                 struct xfer_wait *w, struct fl_err *err)
{
    if (s->stopping)
        return fl_fail(err, FL_CANCELLED, "weights \"%s\" are being dropped", s->set.set);
    if (s->wait || s->state != SRC_PUBLISHED)
        return fl_fail(err, FL_INVALID,
                       "begin of version %" PRIu64 ": version %" PRIu64
                       " was begun and is not published yet",
                       version, s->state == SRC_ASKING ? s->asked_number : s->number);
    s->wait = w;
    s->asked++;
    s->asked_number = version;
    s->begin_due_ns = due_ns;
    if (!s->was_read) {
        grant(s);
        return FL_OK;
    }
    s->state = SRC_ASKING;
    fl_timer_arm(s->loop, &s->begin_late, due_ns);
    watch_answer(s);
    return FL_OK;
}

/* ---- publish ---- */

/* The runs of all pieces, each with its piece: made once, one launch a version. */
struct piece_segs {
    struct link_seg *at;
    size_t n, cap;
};

static bool add_seg(void *arg, const struct link_seg *seg)
{
    struct piece_segs *ps = arg;

    if (!plan_grow(&ps->at, &ps->cap, ps->n + 1, sizeof(*seg)))
        return false;
    ps->at[ps->n++] = *seg;
    return true;
}

static enum fl_status device_segs(struct xfer_source *s, struct fl_err *err)
{
    struct piece_segs ps = { 0 };
    bool good = s->segs_of != NULL;

    if (s->segs)
        return FL_OK;
    for (size_t m = 0; good && m < s->have->n_mems; m++) {
        s->segs_of[m] = ps.n;
        for (size_t i = 0; good && i < s->have->n_pieces; i++) {
            const struct xfer_piece *p = &s->have->pieces[i];
            const struct xfer_tensor *t = &s->have->tensors[p->tensor];
            struct placed at = { &p->box, p->off };

            good = p->mem != m || xfer_box_bytes(t, &p->box) == 0 ||
                   box_segments(t, (uint32_t)i, &p->box, at, at, add_seg, &ps);
        }
    }
    if (!good) {
        free(ps.at);
        return fl_fail(err, FL_EXHAUSTED, "no memory for the runs of %zu pieces",
                       s->have->n_pieces);
    }
    s->segs = ps.at;
    s->n_segs = s->segs_of[s->have->n_mems] = ps.n;
    return FL_OK;
}

/* What the device needs for it is kept: of 16 GB it is a table of 8 MB, which takes as long to make
 * as the digests. */
static enum fl_status mem_digests(struct xfer_source *s, size_t m, const struct link_seg *segs,
                                  size_t n, uint64_t (*each)[2], struct fl_err *err)
{
    const struct link_mem *mem = &s->mems[s->slot][m];

    if (!s->digesters[m])
        FL_TRY(link_digester_create(mem, segs, n, true, &s->digesters[m], err));
    return link_digester_run(s->digesters[m], mem, each, err);
}

static enum fl_status device_digests(struct xfer_source *s, struct fl_err *err)
{
    FL_TRY(device_segs(s, err));
    uint64_t(*each)[2] = calloc(s->n_segs + 1, sizeof(*each));

    if (!each)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu digests", s->n_segs);
    enum fl_status st = FL_OK;

    for (size_t m = 0; m < s->have->n_mems && st == FL_OK; m++) {
        size_t at = s->segs_of[m], n = s->segs_of[m + 1] - at;

        if (n)
            st = mem_digests(s, m, s->segs + at, n, each + at, err);
    }
    for (size_t i = 0; i < s->n_segs; i++) { /* tensor: the piece */
        s->fresh[s->segs[i].tensor][0] += each[i][0];
        s->fresh[s->segs[i].tensor][1] += each[i][1];
    }
    free(each);
    return st;
}

static void digest_work(struct fl_work *w)
{
    struct xfer_source *s = container_of(w, struct xfer_source, digest_work);

    memset(s->fresh, 0, s->have->n_pieces * sizeof(*s->fresh));
    s->digest_err = (struct fl_err){ 0 };
    if (s->mems[s->slot][0].on_device) {
        s->digest_err.status = device_digests(s, &s->digest_err);
        return;
    }
    for (size_t i = 0; i < s->have->n_pieces; i++) {
        const struct xfer_piece *p = &s->have->pieces[i];

        xfer_digest_piece(s->fresh[i], &s->have->tensors[p->tensor], &p->box,
                          (const char *)s->mems[s->slot][p->mem].addr + p->off);
    }
}

static void digest_done(struct fl_work *w, enum fl_status st)
{
    struct xfer_source *s = container_of(w, struct xfer_source, digest_work);
    uint64_t(*old)[2] = s->digests;
    struct fl_err err = s->digest_err;

    if (st == FL_OK && err.status != FL_OK)
        st = fl_wrap(&err, err.status, "the digests of version %" PRIu64, s->number);
    else if (st != FL_OK)
        fl_fail(&err, st, "the digests of version %" PRIu64 " were not made", s->number);
    if (st != FL_OK) {
        s->state = SRC_WRITING;
        wait_over(s, st, &err);
        source_settle(s);
        return;
    }
    s->digests = s->fresh;
    s->fresh = old;
    s->has_published = true;
    s->published = s->number;
    s->published_slot = s->slot;
    s->publishes++;
    s->state = SRC_PUBLISHED;
    fl_debug("weights published member=%s version=%" PRIu64 " slot=%u", s->me.name, s->number,
             s->slot);
    if (s->watch_hears)
        watch_answer(s); /* before whoever published goes on and asks for the update */
    wait_over(s, FL_OK, NULL);
    source_settle(s);
}

enum fl_status xfer_source_publish(struct xfer_source *s, uint64_t version, struct xfer_wait *w,
                                   struct fl_err *err)
{
    if (s->stopping)
        return fl_fail(err, FL_CANCELLED, "weights \"%s\" are being dropped", s->set.set);
    if (s->wait || s->state != SRC_WRITING)
        return fl_fail(err, FL_INVALID,
                       "publish of version %" PRIu64
                       " without begin: the weights are frozen at version %" PRIu64,
                       version, s->published);
    if (s->publishes && version != s->number)
        return fl_fail(err, FL_INVALID,
                       "publish of version %" PRIu64 ", but version %" PRIu64 " was begun", version,
                       s->number);
    s->number = version;
    s->wait = w;
    s->state = SRC_DIGESTING;
    s->digest_work = (struct fl_work){ .work = digest_work, .done = digest_done };
    fl_work_start(s->loop, &s->digest_work);
    return FL_OK;
}

const struct link_mem *xfer_source_data(const struct xfer_source *s, unsigned *index)
{
    if (index)
        *index = s->slot;
    return &s->mems[s->slot][0];
}

bool xfer_source_version(const struct xfer_source *s, uint64_t *number)
{
    if (s->has_published)
        *number = s->published;
    return s->has_published;
}

/* ---- giving ---- */

static enum fl_status give_slot_of(void *arg, const struct xfer_version *want,
                                   struct give_slot *out, struct fl_err *err)
{
    struct xfer_source *s = arg;

    if (!s->has_published || s->state == SRC_DIGESTING)
        return fl_fail(err, FL_AGAIN, "%s is writing version %" PRIu64, s->me.name, s->number);
    if (want->number != s->published)
        return fl_fail(err, FL_INVALID,
                       "%s has published version %" PRIu64 ", version %" PRIu64 " is asked for",
                       s->me.name, s->published, want->number);
    s->was_read = true;
    *out = (struct give_slot){ .mems = s->mems[s->published_slot],
                               .index = s->published_slot,
                               .gen = (uint16_t)slot_gen(s->published_slot),
                               .number = s->published };
    return FL_OK;
}

static void give_on_quiet(void *arg)
{
    source_settle(arg);
}

static void give_write(void *arg, const char *delta_dir, uint64_t number)
{
    struct xfer_source *s = arg;

    delta_writer_start(&s->delta, s->loop, delta_dir, number, s->delta_publish == s->publishes,
                       s->give.slot.mems);
    s->delta_publish = s->publishes;
}

static void give_on_written(struct delta_writer *d, enum fl_status st, const struct fl_err *err)
{
    struct xfer_source *s = container_of(d, struct xfer_source, delta);

    if (st != FL_OK)
        s->delta_publish = 0;
    give_written(&s->give, st, d->dir, err);
    if (s->granted)
        grant(s);
}

static enum fl_status give_room(void *arg, uint64_t bytes, struct link_mem *out, struct fl_err *err)
{
    struct xfer_source *s = arg;

    return s->room ? s->room(s->arg, bytes, out, err)
                   : fl_fail(err, FL_UNSUPPORTED, "%s stages nothing", s->me.name);
}

static void give_done_with(void *arg, struct link_mem *room)
{
    struct xfer_source *s = arg;

    s->done_with(s->arg, room);
}

static const struct give_user source_gives = { give_slot_of, give_on_quiet, give_write, give_room,
                                               give_done_with };

/* ---- the coordinator's messages ---- */

static enum fl_status driver_is_current(struct xfer_source *s, uint32_t attempt, struct fl_err *err)
{
    if (attempt < s->attempt_seen)
        return fl_fail(err, FL_STALE, "attempt %u of the driver is over: %s has heard attempt %u",
                       attempt, s->me.name, s->attempt_seen);
    s->attempt_seen = attempt;
    return FL_OK;
}

static void serve_reconcile(struct xfer_source *s, struct call_req *req, const Fl__XferReconcile *m)
{
    struct xfer_state st;

    state_of(s, &st);
    msg_reply_report(req, m, &st, (struct fl_bytes){ s->image, s->image_bytes },
                     digests_of(s, st.has_published));
    if (s->place.gpu_uuid[0])
        fl_defer(s->loop, &s->stir); /* behind the answer */
}

static void on_stir(struct fl_task *t)
{
    (void)t;
    link_casts_stir();
}

static void watch_unwanted(void *arg, struct call_req *req)
{
    struct xfer_source *s = arg;

    if (s->watch == req)
        watch_answer(s);
}

static void serve_watch(struct xfer_source *s, struct call_req *req, const Fl__XferWatch *m)
{
    watch_answer(s); /* one at a time: the coordinator that came later is the one that listens */
    s->watch = req;
    s->watch_hears = m->has_heard;
    s->heard = m->heard;
    s->was_read = true; /* whoever listens also grants */
    if ((s->state == SRC_ASKING && (!m->has_told || m->told != s->asked)) ||
        (s->watch_hears && has_news(s, s->heard))) {
        watch_answer(s);
        return;
    }
    call_on_unwanted(req, watch_unwanted, s);
    fl_timer_arm_in(s->loop, &s->watch_over, m->wait_ms);
}

static void serve_end(struct xfer_source *s, struct call_req *req, const Fl__XferEnd *e)
{
    struct xfer_epoch epoch = msg_read_epoch(e->epoch);
    struct xfer_state st;

    if (e->files_bad && s->give.active && !s->give.writing &&
        xfer_epoch_cmp(&epoch, &s->give.epoch) == 0)
        delta_writer_renew(&s->delta);
    state_of(s, &st);
    give_end(&s->give, req, e, &st);
}

static void serve_grant(struct xfer_source *s, struct call_req *req, const Fl__XferGrant *m)
{
    struct xfer_state st;
    struct fl_err err;

    if (s->state == SRC_ASKING && m->asked == s->asked) {
        if (m->refused) {
            msg_read_error(m->refused, &err);
            refuse(s, &err);
        } else {
            grant(s);
        }
    } /* else said before, or asked no longer */
    state_of(s, &st);
    msg_reply_state(req, &st, (struct fl_bytes){ 0 });
}

static void source_serve(struct port_set *set, uint16_t method, struct call_req *req,
                         const ProtobufCMessage *msg, const struct wire_msg *m)
{
    struct xfer_source *s = container_of(set, struct xfer_source, set);
    const void *p = msg;
    struct fl_err err = { 0 };
    uint32_t attempt = s->attempt_seen;

    if (method != FL_XFER_WATCH)
        port_awake(s->loop, &s->place);
    if (method == FL_XFER_RECONCILE)
        attempt = ((const Fl__XferReconcile *)p)->attempt;
    else if (method == FL_XFER_WATCH)
        attempt = ((const Fl__XferWatch *)p)->attempt;
    else if (method == FL_XFER_GRANT)
        attempt = ((const Fl__XferGrant *)p)->attempt;
    else if (method == FL_XFER_BEGIN)
        attempt = ((const Fl__XferBegin *)p)->epoch->attempt;
    if (s->stopping)
        fl_fail(&err, FL_CANCELLED, "weights \"%s\" are being dropped at %s", s->set.set,
                s->me.name);
    else
        (void)driver_is_current(s, attempt, &err);
    if (err.status != FL_OK) {
        call_fail(req, &err);
        return;
    }
    switch (method) {
    case FL_XFER_RECONCILE:
        serve_reconcile(s, req, p);
        break;
    case FL_XFER_BEGIN:
        give_begin(&s->give, req, p, m);
        break;
    case FL_XFER_END:
        serve_end(s, req, p);
        break;
    case FL_XFER_WATCH:
        serve_watch(s, req, p);
        break;
    case FL_XFER_GRANT:
        serve_grant(s, req, p);
        break;
    case FL_XFER_KEY:
        give_key(&s->give, req, p);
        break;
    case FL_XFER_CHECK:
        give_check(&s->give, req, p, m);
        break;
    case FL_XFER_STAGE:
        give_stage_ask(&s->give, req, p);
        break;
    default:
        fl_fail(&err, FL_UNSUPPORTED, "%s gives weights and takes none", s->me.name);
        call_fail(req, &err);
    }
}

/* ---- life ---- */

static enum fl_status slot_fill(struct xfer_source *s, unsigned slot, const struct link_mem *mems,
                                const struct xfer_manifest *have, const char *set,
                                struct fl_err *err)
{
    s->mems[slot] = calloc(have->n_mems, sizeof(*mems));
    if (!s->mems[slot])
        return fl_fail(err, FL_EXHAUSTED, "no memory to note %zu memories", have->n_mems);
    for (size_t m = 0; m < have->n_mems; m++) {
        s->mems[slot][m] = mems[m];
        if (mems[m].bytes < have->mem_bytes[m])
            return fl_fail(err, FL_INVALID,
                           "slot %u of weights \"%s\" has %" PRIu64 " bytes, %" PRIu64
                           " are laid out",
                           slot, set, mems[m].bytes, have->mem_bytes[m]);
    }
    return FL_OK;
}

static enum fl_status source_fill(struct xfer_source *s, const struct xfer_source_opts *o,
                                  struct fl_err *err)
{
    if (o->n_slots < 1 || o->n_slots > 2)
        return fl_fail(err, FL_INVALID, "weights \"%s\": %u slots, 1 or 2 are possible", o->set,
                       o->n_slots);
    if (o->have->n_mems != 1 && !(o->mems && o->n_slots == 1))
        return fl_fail(err, FL_INVALID,
                       "weights \"%s\": %zu memories a slot, one is possible where slots change",
                       o->set, o->have->n_mems);
    for (unsigned i = 0; i < o->n_slots; i++)
        FL_TRY(slot_fill(s, i, o->mems ? o->mems : &o->slot[i], o->have, o->set, err));
    FL_TRY(xfer_manifest_encode(o->have, &s->image, &s->image_bytes, err));
    FL_TRY(xfer_manifest_decode(s->image, s->image_bytes, &s->have_own, err));
    s->have = s->have_own;
    s->digests = calloc(s->have->n_pieces + 1, sizeof(*s->digests));
    s->fresh = calloc(s->have->n_pieces + 1, sizeof(*s->fresh));
    s->segs_of = calloc(s->have->n_mems + 1, sizeof(*s->segs_of));
    s->digesters = calloc(s->have->n_mems + 1, sizeof(*s->digesters));
    if (!s->digests || !s->fresh || !s->segs_of || !s->digesters)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu pieces of weights", s->have->n_pieces);
    return FL_OK;
}

static void source_free(struct xfer_source *s)
{
    free(s->digests);
    free(s->fresh);
    for (size_t m = 0; s->digesters && m < s->have->n_mems; m++)
        link_digester_destroy(s->digesters[m]);
    free(s->digesters);
    free(s->segs);
    free(s->segs_of);
    free(s->mems[0]);
    free(s->mems[1]);
    free(s->image);
    free(s->have_own);
    free(s);
}

enum fl_status xfer_source_create(struct fl_loop *l, struct xfer_port *port,
                                  const struct xfer_source_opts *o, struct xfer_source **out,
                                  struct fl_err *err)
{
    struct xfer_source *s = calloc(1, sizeof(*s));
    enum fl_status st;

    if (!s)
        return fl_fail(err, FL_EXHAUSTED, "no memory to offer weights \"%s\"", o->set);
    s->loop = l;
    s->port = port;
    s->me = o->me;
    s->place = o->place;
    s->n_slots = o->n_slots;
    s->room = o->room;
    s->done_with = o->done_with;
    s->arg = o->arg;
    s->set.serve = source_serve;
    s->wait_back.run = wait_run;
    s->stir.run = on_stir;
    s->begin_late.fire = begin_on_late;
    s->watch_over.fire = watch_on_over;
    st = source_fill(s, o, err);
    if (st == FL_OK)
        st = port_add(port, &s->set, o->set, err);
    if (st != FL_OK) {
        source_free(s);
        return st;
    }
    give_init(&s->give, port, s->me.name, s->have, &source_gives, s);
    delta_writer_init(&s->delta, s->have, &s->me.who, give_on_written);
    *out = s;
    return FL_OK;
}

void xfer_source_stop(struct xfer_source *s, struct fl_task *stopped)
{
    struct fl_err err = { 0 };

    s->stopping = true;
    s->stopped = stopped;
    watch_answer(s);
    fl_fail(&err, FL_CANCELLED, "weights \"%s\" are being dropped", s->set.set);
    if (s->state == SRC_ASKING)
        refuse(s, &err);
    give_stop(&s->give, err.text);
    source_settle(s);
}

void xfer_source_destroy(struct xfer_source *s)
{
    if (!s)
        return;
    watch_answer(s);
    fl_timer_cancel(&s->begin_late);
    fl_task_cancel(s->loop, &s->wait_back);
    fl_task_cancel(s->loop, &s->stir);
    port_remove(s->port, &s->set);
    give_fini(&s->give);
    delta_writer_fini(&s->delta);
    source_free(s);
}
