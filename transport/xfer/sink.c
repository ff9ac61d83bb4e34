#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "common/base/log.h"
#include "transport/link/dev.h"
#include "transport/xfer/sink_priv.h"

/* ---- what serves ---- */

static void view_fini(struct xfer_sink *s, struct sink_view *v)
{
    for (size_t i = 0; i < v->n_reaches; i++) {
        v->reaches[i]->views--;
        reach_drop(&s->reaches, v->reaches[i]);
    }
    free(v->reaches);
    *v = (struct sink_view){ .slot = -1 };
}

void sink_slot_give_back(struct xfer_sink *s, int slot)
{
    if (slot < 0 || !s->have_slot[slot])
        return;
    s->have_slot[slot] = false;
    s->ops->done_with(s->arg, &s->slot[slot]);
}

static void forget_version(struct xfer_sink *s)
{
    view_fini(s, &s->view);
    s->serving = (struct xfer_version){ 0 };
}

void sink_forget_ledger(struct xfer_sink *s)
{
    take_destroy(s->take);
    s->take = NULL;
    s->all_in = false;
}

static bool view_make(struct xfer_sink *s, struct sink_view *v)
{
    size_t n = take_n_edges(s->take);

    *v = (struct sink_view){ .slot = take_shares(s->take) ? -1 : s->stage_slot };
    v->reaches = calloc(n + 1, sizeof(struct reach *));
    if (!v->reaches)
        return false;
    v->mem = take_shares(s->take) ? *take_shared(s->take) : s->slot[s->stage_slot];
    for (size_t i = 0; take_shares(s->take) && i < n; i++) {
        v->reaches[v->n_reaches++] = take_reach(s->take, i);
        take_reach(s->take, i)->views++;
    }
    if (v->n_reaches) {
        v->maps_who = take_giver(s->take, 0)->who;
        v->maps_slot = take_giver_slot(s->take);
    }
    return true;
}

/* The digests that the source published, by our own tensors: for whoever is filled from here. Both
 * lists are sorted; a part names no tensor of which it brings nothing. */
static void note_digests(struct xfer_sink *s)
{
    const struct xfer_plan *p = take_part(s->take);
    const uint64_t(*expect)[2] = take_expect(s->take);

    for (size_t i = 0, t = 0; i < s->want->n_tensors; i++) {
        const char *name = s->want->tensors[i].name;

        while (t < p->n_tensors && strcmp(p->tensors[t].name, name) < 0)
            t++;
        if (t < p->n_tensors && strcmp(p->tensors[t].name, name) == 0)
            memcpy(s->digests[i], expect[t], sizeof(s->digests[i]));
    }
}

/* ---- the flip ---- */

/* What has come is seen at the addresses of what served. It was looked at before it counted as
 * verified, so only a lost device refuses now. */
static void flip_now(struct xfer_sink *s)
{
    struct link_mem seen = s->next.mem;
    struct fl_err err = { 0 };

    if (s->ops->show && s->ops->show(s->arg, &s->next.mem, &seen, &err) != FL_OK)
        fl_error("weights are not seen at their fixed addresses member=\"%s\" why=\"%s\"",
                 s->me.name, err.text);
    s->ops->flip(s->arg, &s->staged, &seen, &s->flipped_back);
}

static void do_flip(struct xfer_sink *s)
{
    s->flipping = true;
    if (!s->pause_from_ns)
        s->pause_from_ns = fl_clock_boot_ns(); /* the loop's stands within a turn */
    if ((s->hold || s->ops->show) && !s->paused) {
        s->pausing = true;
        s->ops->pause(s->arg, &s->paused_back);
        return;
    }
    flip_now(s);
}

static void on_flipped(struct fl_task *t)
{
    struct xfer_sink *s = container_of(t, struct xfer_sink, flipped_back);
    struct sink_view old = s->view;

    s->flipping = false;
    note_digests(s);
    s->view = s->next;
    s->next = (struct sink_view){ .slot = -1 };
    s->serving = s->staged;
    s->pause_ns = fl_clock_boot_ns() - s->pause_from_ns;
    s->pause_from_ns = 0;
    (void)sink_event(s, RX_FLIPPED, &s->rx.seen, NULL);
    if (old.slot >= 0 && old.slot != s->view.slot)
        sink_slot_give_back(s, old.slot);
    sink_forget_ledger(s);
    view_fini(s, &old);
    s->held = s->hold && s->paused;
    if (s->paused && !s->hold) {
        s->paused = false;
        s->ops->resume(s->arg);
    }
    sink_answer(s);
    sink_settle(s);
}

static void on_paused(struct fl_task *t)
{
    struct xfer_sink *s = container_of(t, struct xfer_sink, paused_back);

    s->pausing = false;
    s->paused = true;
    if (s->flipping) {
        flip_now(s);
        return;
    }
    forget_version(s); /* nothing reads it any more: from here on it may be written */
    if (s->begin_after_pause && s->take && s->rx.state == RX_DIRTY)
        take_start(s->take);
    s->begin_after_pause = false;
    sink_answer(s);
    sink_settle(s);
}

/* ---- one function changes the state ---- */

static void do_act(struct xfer_sink *s, enum rx_act act)
{
    switch (act) {
    case RX_DO_ABORT:
    case RX_DO_GIVE_WAY:
    case RX_DO_HOLD_LEDGER:
    case RX_DO_STRIKE:
        view_fini(s, &s->next);
        if (s->take)
            take_abort(s->take);
        break;
    case RX_DO_FLIP:
        do_flip(s);
        break;
    case RX_DO_GIVE_BACK:
        sink_forget_ledger(s);
        sink_slot_give_back(s, s->stage_slot);
        s->staged = (struct xfer_version){ 0 };
        break;
    default: /* begins are done where the message is */
        break;
    }
}

enum fl_status sink_event(struct xfer_sink *s, enum rx_event on, const struct xfer_epoch *e,
                          struct fl_err *err)
{
    enum rx_state was = s->rx.state;
    enum rx_act act;
    enum fl_status st = rx_event(&s->rx, on, e, &act, err);

    if (act != RX_DO_NOTHING)
        fl_debug("weights %s -> %s member=\"%s\" set=%s epoch=%u.%u on=%s", rx_state_name(was),
                 rx_state_name(s->rx.state), s->me.name, s->set.set, e->attempt, e->seq,
                 rx_event_name(on));
    do_act(s, act);
    return st;
}

/* ---- what the executor says ---- */

static void take_on_moved(void *arg)
{
    struct xfer_sink *s = arg;

    take_counts(s->take, &s->buckets_in, &s->buckets_all, &s->bytes);
    s->other_bytes = take_other_bytes(s->take);
    s->link_ns = take_link_ns(s->take);
    sink_answer(s); /* who wants to know how far it is */
}

static void take_on_bad(void *arg, const struct take_bad *b)
{
    struct xfer_sink *s = arg;

    s->bad = *b;
    fl_warn("weights not taken member=\"%s\" why=\"%s\"", s->me.name, b->why.text);
    if (s->rx.state == RX_DIRTY)
        take_strike(s->take, b);
    (void)sink_event(s, RX_BAD, &s->rx.seen, NULL);
    sink_answer(s);
}

static void take_on_all_in(void *arg, bool whole)
{
    struct xfer_sink *s = arg;
    struct take_bad none = { 0 };

    take_counts(s->take, &s->buckets_in, &s->buckets_all, &s->bytes);
    s->other_bytes = take_other_bytes(s->take);
    s->link_ns = take_link_ns(s->take);
    s->verify_ns = take_verify_ns(s->take);
    s->all_in = !whole;
    if (whole && (FL_FAULT("xfer.verified") || !view_make(s, &s->next))) {
        view_fini(s, &s->next);
        fl_fail(&none.why, FL_EXHAUSTED, "%s: no memory to serve what has arrived", s->me.name);
        take_on_bad(s, &none);
        return;
    }
    if (whole && s->ops->can_show && s->ops->can_show(s->arg, &s->next.mem, &none.why) != FL_OK) {
        view_fini(s, &s->next);
        take_on_bad(s, &none);
        return;
    }
    if (whole)
        (void)sink_event(s, RX_COMPLETE, &s->rx.seen, NULL);
    if (s->at_once && s->rx.state == RX_VERIFIED) /* the coordinator has said so in its begin */
        (void)sink_event(s, RX_COMMIT, &s->rx.seen, NULL);
    sink_lease(s);
    sink_answer(s);
}

static void take_on_quiet(void *arg)
{
    struct xfer_sink *s = arg;

    (void)sink_event(s, RX_QUIET, &s->rx.seen, NULL);
    sink_answer(s);
    sink_settle(s);
}

const struct take_user sink_takes = { take_on_moved, take_on_all_in, take_on_bad, take_on_quiet };

/* ---- the coordinator's silence ---- */

bool sink_busy(const struct xfer_sink *s)
{
    return s->take &&
           (s->rx.state == RX_STAGING || s->rx.state == RX_ABORTING || !take_idle(s->take));
}

void sink_lease(struct xfer_sink *s)
{
    if (s->rx.state == RX_STAGING || s->rx.state == RX_VERIFIED ||
        (s->rx.state == RX_DIRTY && s->take))
        fl_timer_arm_in(s->loop, &s->lease, s->lease_ms ? s->lease_ms : XFER_LEASE_MS);
    else
        fl_timer_cancel(&s->lease);
}

static void on_lease_over(struct fl_timer *t, uint64_t now_ns)
{
    struct xfer_sink *s = container_of(t, struct xfer_sink, lease);

    (void)now_ns;
    s->bad = (struct take_bad){ 0 };
    fl_fail(&s->bad.why, FL_TIMEOUT,
            "%s in %s: no word of the driver for %u ms, epoch %u.%u is dropped", s->me.name,
            rx_state_name(s->rx.state), s->lease_ms ? s->lease_ms : XFER_LEASE_MS,
            s->rx.seen.attempt, s->rx.seen.seq);
    fl_warn("weights epoch dropped why=\"%s\"", s->bad.why.text);
    (void)sink_event(s, RX_COORD_LOST, &s->rx.seen, NULL);
    sink_answer(s);
}

/* ---- giving to another engine ---- */

static enum fl_status give_slot_of(void *arg, const struct xfer_version *want,
                                   struct give_slot *out, struct fl_err *err)
{
    struct xfer_sink *s = arg;

    if (!s->rx.has_version || !xfer_version_same(want, &s->serving))
        return fl_fail(err, FL_INVALID, "%s does not serve version %" PRIu64, s->me.name,
                       want->number);
    if (s->offloaded) /* since it reported: its pages may be gone */
        return fl_fail(err, FL_AGAIN, "the weights of %s are offloaded", s->me.name);
    if (s->view.slot < 0)
        return fl_fail(err, FL_UNSUPPORTED, "%s serves from another's pages and gives none on",
                       s->me.name);
    *out = (struct give_slot){ .mems = &s->slot[s->view.slot],
                               .index = (uint32_t)s->view.slot,
                               .gen = (uint16_t)s->slot_gen[s->view.slot],
                               .number = s->serving.number };
    return FL_OK;
}

static void give_on_quiet(void *arg)
{
    sink_settle(arg);
}

static const struct give_user sink_gives = { give_slot_of, give_on_quiet, NULL, NULL, NULL };

/* ---- the engine's own calls ---- */

enum fl_status xfer_sink_can_offload(const struct xfer_sink *s, struct fl_err *err)
{
    if (sink_busy(s) || s->flipping || s->pausing || s->rx.state == RX_VERIFIED ||
        give_busy(&s->give) || FL_FAULT("xfer.offload"))
        return fl_fail(err, FL_AGAIN, "%s: epoch %u.%u is under way, weights are %s", s->me.name,
                       s->rx.seen.attempt, s->rx.seen.seq, rx_state_name(s->rx.state));
    return FL_OK;
}

enum fl_status xfer_sink_offload(struct xfer_sink *s, bool dropped, struct fl_err *err)
{
    FL_TRY(xfer_sink_can_offload(s, err));
    s->offloaded = true;
    if (!dropped)
        return FL_OK;
    forget_version(s);
    sink_forget_ledger(s);
    sink_slot_give_back(s, 0);
    sink_slot_give_back(s, 1);
    s->rx.has_version = false;
    s->rx.state = RX_EMPTY;
    sink_lease(s);
    return FL_OK;
}

void xfer_sink_onload(struct xfer_sink *s)
{
    s->offloaded = false;
}

void xfer_sink_report(const struct xfer_sink *s, struct rx_report *out)
{
    *out = (struct rx_report){ .who = s->me.who,
                               .state = s->rx.state,
                               .seen = s->rx.seen,
                               .serving = s->serving,
                               .staged = s->staged,
                               .buckets_in = s->buckets_in,
                               .buckets_all = s->buckets_all };
}

void xfer_sink_says(const struct xfer_sink *s, char *text, size_t n)
{
    const char *why = s->bad.why.status != FL_OK ? s->bad.why.text : "";

    if (s->rx.has_version && s->rx.state != RX_DIRTY)
        text[0] = '\0';
    else if (s->offloaded)
        snprintf(text, n, "the weights \"%s\" are offloaded", s->set.set);
    else if (s->rx.state == RX_DIRTY && s->open)
        snprintf(text, n,
                 "weights incomplete: version %" PRIu64 " is being written where they were%s%s",
                 s->dirty_number, why[0] ? "; " : "", why);
    else if (s->rx.state == RX_DIRTY)
        snprintf(text, n, "weights incomplete: version %" PRIu64 ", %u of %u buckets%s%s",
                 s->staged.number, s->buckets_in, s->buckets_all, why[0] ? "; " : "", why);
    else
        snprintf(text, n, "no version of the weights \"%s\" is here yet", s->set.set);
}

const struct link_mem *xfer_sink_data(const struct xfer_sink *s, struct xfer_version *version)
{
    if (!s->rx.has_version)
        return NULL;
    if (version)
        *version = s->serving;
    return &s->view.mem;
}

/* ---- life ---- */

static void on_stir(struct fl_task *t)
{
    struct xfer_sink *s = container_of(t, struct xfer_sink, stir);

    link_casts_stir();
    if (!s->view.n_reaches) /* who shares has nothing to move */
        link_dev_stir(s->place.gpu_uuid);
}

static void sink_free(struct xfer_sink *s)
{
    xfer_plan_destroy(s->part);
    free(s->want);
    free(s->image);
    free(s->local_dir);
    free(s->digests);
    free(s);
}

static enum fl_status sink_fill(struct xfer_sink *s, const struct xfer_sink_opts *o,
                                struct fl_err *err)
{
    if (o->want->n_mems != 1)
        return fl_fail(err, FL_INVALID, "weights \"%s\": %zu memories a slot, an engine has one",
                       o->set, o->want->n_mems);
    FL_TRY(xfer_manifest_encode(o->want, &s->image, &s->image_bytes, err));
    FL_TRY(xfer_manifest_decode(s->image, s->image_bytes, &s->want, err));
    s->digests = calloc(s->want->n_tensors + 1, sizeof(*s->digests));
    s->local_dir = o->local_dir ? strdup(o->local_dir) : NULL;
    if (!s->digests || (o->local_dir && !s->local_dir))
        return fl_fail(err, FL_EXHAUSTED, "no memory to accept weights \"%s\"", o->set);
    return port_add(s->port, &s->set, o->set, err);
}

enum fl_status xfer_sink_create(struct fl_loop *l, struct xfer_port *port,
                                const struct xfer_sink_opts *o, struct xfer_sink **out,
                                struct fl_err *err)
{
    struct xfer_sink *s = calloc(1, sizeof(*s));
    enum fl_status st;

    if (!s)
        return fl_fail(err, FL_EXHAUSTED, "no memory to accept weights \"%s\"", o->set);
    *s = (struct xfer_sink){ .loop = l,
                             .port = port,
                             .me = o->me,
                             .place = o->place,
                             .slots = o->slots,
                             .check_equal = o->check_equal,
                             .ops = o->ops,
                             .arg = o->arg,
                             .view = { .slot = -1 },
                             .next = { .slot = -1 } };
    s->set.serve = sink_serve;
    s->lease.fire = on_lease_over;
    s->paused_back.run = on_paused;
    s->flipped_back.run = on_flipped;
    s->stir.run = on_stir;
    st = sink_fill(s, o, err);
    if (st != FL_OK) {
        sink_free(s);
        return st;
    }
    give_init(&s->give, port, s->me.name, s->want, &sink_gives, s);
    s->give.passing = true;
    *out = s;
    return FL_OK;
}

void sink_settle(struct xfer_sink *s)
{
    if (!s->stopped || sink_busy(s) || s->flipping || s->pausing || give_busy(&s->give))
        return;
    fl_post(s->loop, s->stopped);
    s->stopped = NULL;
}

void xfer_sink_stop(struct xfer_sink *s, struct fl_task *stopped)
{
    s->stopping = true;
    s->stopped = stopped;
    fl_timer_cancel(&s->lease);
    give_stop(&s->give, "the weights are being dropped");
    if (!s->flipping)
        (void)sink_event(s, RX_ABORT, &s->rx.seen, NULL);
    sink_answer(s);
    sink_settle(s);
}

void xfer_sink_destroy(struct xfer_sink *s)
{
    if (!s)
        return;
    s->stopping = true;
    sink_answer(s);
    fl_timer_cancel(&s->lease);
    fl_task_cancel(s->loop, &s->stir);
    port_remove(s->port, &s->set);
    sink_forget_ledger(s);
    view_fini(s, &s->view);
    view_fini(s, &s->next);
    reaches_fini(&s->reaches);
    sink_slot_give_back(s, 0);
    sink_slot_give_back(s, 1);
    give_fini(&s->give);
    sink_free(s);
}
