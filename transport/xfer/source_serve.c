/* What the coordinator asks a source: its state, that it give, whether begin() may go on */
#include "common/proto/methods.h"
#include "transport/xfer/source_priv.h"

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
                                .slot_gen = source_slot_gen(s->published_slot),
                                .writing = s->state == SRC_WRITING ||
                                           s->state == SRC_DIGESTING || !s->has_published,
                                .n_slots = s->n_slots,
                                .in_copies = s->in_copies,
                                .wants = s->state == SRC_ASKING,
                                .wants_number = s->asked_number,
                                .wants_slot = source_next_slot(s),
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

void source_watch_answer(struct xfer_source *s)
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

void source_watch_on_over(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    source_watch_answer(container_of(t, struct xfer_source, watch_over));
}

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

void source_on_stir(struct fl_task *t)
{
    (void)t;
    link_casts_stir();
}

static void watch_unwanted(void *arg, struct call_req *req)
{
    struct xfer_source *s = arg;

    if (s->watch == req)
        source_watch_answer(s);
}

static void serve_watch(struct xfer_source *s, struct call_req *req, const Fl__XferWatch *m)
{
    source_watch_answer(
        s); /* one at a time: the coordinator that came later is the one that listens */
    s->watch = req;
    s->watch_hears = m->has_heard;
    s->heard = m->heard;
    s->was_read = true; /* whoever listens also grants */
    if ((s->state == SRC_ASKING && (!m->has_told || m->told != s->asked)) ||
        (s->watch_hears && has_news(s, s->heard))) {
        source_watch_answer(s);
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
            source_refuse(s, &err);
        } else {
            source_grant(s);
        }
    } /* else said before, or asked no longer */
    state_of(s, &st);
    msg_reply_state(req, &st, (struct fl_bytes){ 0 });
}

void source_serve(struct port_set *set, uint16_t method, struct call_req *req,
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
