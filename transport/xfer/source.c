#include "transport/xfer/source_priv.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/log.h"
#include "transport/link/dev.h"

/* ---- what begin and publish wait for ---- */

static void source_settle(struct xfer_source *s)
{
    if (!s->stopped || s->state == SRC_DIGESTING || give_busy(&s->give) ||
        delta_writer_busy(&s->delta) || s->wait)
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

unsigned source_next_slot(const struct xfer_source *s)
{
    return s->n_slots == 2 && s->has_published ? 1 - s->published_slot : 0;
}

/* Our own copy of it to a folder outlives its epoch: nothing stops a write to a slow disk. */
static bool is_copied(const struct xfer_source *s)
{
    return s->give.writing && s->give.slot.mems == s->mems[source_next_slot(s)];
}

void source_grant(struct xfer_source *s)
{
    s->granted = is_copied(s);
    if (s->granted)
        return;
    fl_timer_cancel(&s->begin_late);
    s->slot = source_next_slot(s);
    s->number = s->asked_number;
    s->state = SRC_WRITING;
    s->taken_back = false;
    if (s->n_slots == 1)
        s->has_published = false; /* from here on those bytes are no version */
    fl_debug("weights begun member=%s version=%" PRIu64 " slot=%u", s->me.name, s->number, s->slot);
    wait_over(s, FL_OK, NULL);
}

void source_refuse(struct xfer_source *s, const struct fl_err *err)
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
            source_next_slot(s), s->granted ? "" : " any more");
    source_refuse(s, &err);
}

enum fl_status xfer_source_begin(struct xfer_source *s, uint64_t version, uint64_t due_ns,
                                 struct xfer_wait *w, struct fl_err *err)
{
    if (s->stopping)
        return fl_fail(err, FL_CANCELLED, "weights \"%s\" are being dropped", s->set.set);
    if (s->wait)
        return fl_fail(err, FL_INVALID,
                       "begin of version %" PRIu64 ": begin or publish is under way", version);
    if (s->state != SRC_PUBLISHED)
        return fl_fail(err, FL_INVALID,
                       "begin of version %" PRIu64 ": version %" PRIu64
                       " was begun: publish it, or abandon it",
                       version, s->number);
    s->wait = w;
    s->asked++;
    s->asked_number = version;
    s->begin_due_ns = due_ns;
    if (!s->was_read || s->taken_back) {
        source_grant(s);
        return FL_OK;
    }
    s->state = SRC_ASKING;
    fl_timer_arm(s->loop, &s->begin_late, due_ns);
    source_watch_answer(s);
    return FL_OK;
}

enum fl_status xfer_source_abandon(struct xfer_source *s, struct fl_err *err)
{
    if (s->stopping)
        return fl_fail(err, FL_CANCELLED, "weights \"%s\" are being dropped", s->set.set);
    if (s->wait || s->state != SRC_WRITING)
        return fl_fail(err, FL_INVALID, "nothing to abandon: %s",
                       s->wait ? "begin or publish is under way" : "no version is begun");
    fl_debug("weights abandoned member=%s version=%" PRIu64 " slot=%u", s->me.name, s->number,
             s->slot);
    s->state = SRC_PUBLISHED;
    s->slot = s->has_published ? s->published_slot : 0;
    s->taken_back = true;
    return FL_OK;
}

/* ---- publish ---- */

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
        source_watch_answer(s); /* before whoever published goes on and asks for the update */
    wait_over(s, FL_OK, NULL);
    source_settle(s);
}

enum fl_status xfer_source_publish(struct xfer_source *s, uint64_t version, struct xfer_wait *w,
                                   struct fl_err *err)
{
    if (s->stopping)
        return fl_fail(err, FL_CANCELLED, "weights \"%s\" are being dropped", s->set.set);
    if (!s->wait && s->state == SRC_PUBLISHED && !s->has_published)
        return fl_fail(err, FL_INVALID,
                       "publish of version %" PRIu64 " without begin: version %" PRIu64
                       " was abandoned",
                       version, s->number);
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
    s->digest_work = (struct fl_work){ .work = source_digest_work, .done = digest_done };
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
                               .gen = (uint16_t)source_slot_gen(s->published_slot),
                               .number = s->published };
    return FL_OK;
}

static void give_on_quiet(void *arg)
{
    struct xfer_source *s = arg;

    delta_writer_over(&s->delta);
    source_settle(s);
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
        source_grant(s);
}

static void delta_on_quiet(struct delta_writer *d)
{
    source_settle(container_of(d, struct xfer_source, delta));
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

/* ---- life ---- */

static enum fl_status slot_fill(struct xfer_source *s, unsigned slot, const struct link_mem *mems,
                                const struct xfer_manifest *have, const char *set,
                                struct fl_err *err)
{
    s->mems[slot] = calloc(have->n_mems, sizeof(*mems));
    if (!s->mems[slot])
        return fl_fail(err, FL_EXHAUSTED, "no memory to note %zu memories", have->n_mems);
    for (size_t m = 0; m < have->n_mems; m++) {
        const struct link_pages *pages = link_pages_of(&mems[m]);

        s->mems[slot][m] = mems[m];
        s->in_copies |= pages && pages->staged;
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
    s->stir.run = source_on_stir;
    s->begin_late.fire = begin_on_late;
    s->watch_over.fire = source_watch_on_over;
    st = source_fill(s, o, err);
    if (st == FL_OK)
        st = port_add(port, &s->set, o->set, err);
    if (st != FL_OK) {
        source_free(s);
        return st;
    }
    give_init(&s->give, port, s->me.name, s->have, &source_gives, s);
    delta_writer_init(&s->delta, s->have, &s->me.who, s->set.set, give_on_written, delta_on_quiet);
    *out = s;
    return FL_OK;
}

void xfer_source_stop(struct xfer_source *s, struct fl_task *stopped)
{
    struct fl_err err = { 0 };

    s->stopping = true;
    s->stopped = stopped;
    source_watch_answer(s);
    fl_fail(&err, FL_CANCELLED, "weights \"%s\" are being dropped", s->set.set);
    if (s->state == SRC_ASKING)
        source_refuse(s, &err);
    delta_writer_stop(&s->delta);
    give_stop(&s->give, err.text);
    source_settle(s);
}

void xfer_source_destroy(struct xfer_source *s)
{
    if (!s)
        return;
    source_watch_answer(s);
    fl_timer_cancel(&s->begin_late);
    fl_task_cancel(s->loop, &s->wait_back);
    fl_task_cancel(s->loop, &s->stir);
    port_remove(s->port, &s->set);
    give_fini(&s->give);
    delta_writer_fini(&s->delta);
    source_free(s);
}
