#include <stdlib.h>
#include "common/proto/methods.h"
#include "worker/client/plane.h"
#include "xfer.pb-c.h"

/* A program joins first and loads its model then. Until it has offered or accepted the set, and a
 * trainer has published something, it is not ready, which is not the same as left behind. */
enum {
    PROBE_LANE = 0x70726f62, /* "prob": waits for nothing else */
    PROBE_FIRST_MS = 10,
    PROBE_LAST_MS = 500,
    PROBE_ANSWER_MS = 10000
};

static bool is_ready(struct plane_member *m, const struct wire_msg *reply)
{
    Fl__XferReport *r = fl__xfer_report__unpack(NULL, reply->head.body_bytes, reply->body);
    bool ready = r && (!m->source || r->has_published);

    if (ready || !r)
        m->unpublished_ns = 0;
    else if (!m->unpublished_ns)
        m->unpublished_ns = fl_loop_now_ns(m->plane->d->f->loop);
    if (r)
        fl__xfer_report__free_unpacked(r, NULL);
    return ready;
}

static void probe_answered(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                           const struct fl_err *err)
{
    struct plane_member *m = container_of(op, struct plane_member, probe);

    (void)err;
    m->probing = false;
    if (st == FL_CANCELLED || !m->reached)
        return;
    if (st != FL_OK)
        m->unpublished_ns = 0;
    m->ready = st == FL_OK && is_ready(m, reply);
    m->heard = st == FL_OK || st == FL_NOT_FOUND;
    plane_heard(m->plane);
    if (m->ready)
        return;
    m->probe_ms = m->probe_ms * 2 < PROBE_LAST_MS ? m->probe_ms * 2 : PROBE_LAST_MS;
    fl_timer_arm_in(m->plane->d->f->loop, &m->probe_again, m->probe_ms);
}

static void probe(struct plane_member *m)
{
    Fl__XferReconcile r = FL__XFER_RECONCILE__INIT;
    struct fl_loop *l = m->plane->d->f->loop;
    uint8_t body[128];
    struct call_args a = { .method = FL_XFER_RECONCILE,
                           .lane = PROBE_LANE,
                           .due_ns = fl_loop_now_ns(l) + PROBE_ANSWER_MS * (uint64_t)1000000 };

    r.set = m->plane->set; /* 63 bytes at most */
    r.attempt = m->plane->d->f->seat.who.attempt;
    a.body = (struct fl_bytes){ body, fl__xfer_reconcile__pack(&r, body) };
    m->probe.done = probe_answered;
    m->probing = call_start(m->call, &a, &m->probe, NULL) == FL_OK;
    if (!m->probing)
        fl_timer_arm_in(l, &m->probe_again, m->probe_ms);
}

static void probe_fire(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    probe(container_of(t, struct plane_member, probe_again));
}

void plane_probe_start(struct plane_member *m, struct call_peer *call)
{
    m->call = call;
    m->ready = m->heard = false;
    m->unpublished_ns = 0;
    m->probe_ms = PROBE_FIRST_MS;
    m->probe_again.fire = probe_fire;
    probe(m);
}

void plane_probe_stop(struct plane_member *m)
{
    fl_timer_cancel(&m->probe_again);
    if (m->probing)
        call_cancel(&m->probe);
    m->ready = m->heard = false;
    m->unpublished_ns = 0;
}
