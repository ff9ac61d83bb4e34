#include "worker/client/weights_priv.h"

/* Copies of what nobody else can map, for one epoch at a time. */
static enum fl_status staging_room(void *arg, uint64_t bytes, struct link_mem *out,
                                   struct fl_err *err)
{
    struct furlong_weights *w = arg;

    return slots_alloc(&w->home, bytes, out, err);
}

static void staging_done(void *arg, struct link_mem *room)
{
    (void)arg;
    slots_free(room);
}

static void offer_begin(struct client_sync *s)
{
    struct making *k = container_of(s, struct making, sync);
    struct furlong_weights *w = k->w;
    struct xfer_source_opts o = { .set = w->set,
                                  .have = k->m,
                                  .place = k->place,
                                  .n_slots = w->lies ? 1 : w->n_slots,
                                  .mems = w->lent.mems,
                                  .room = w->lent.staged ? staging_room : NULL,
                                  .done_with = staging_done,
                                  .arg = w };
    struct fl_err err;
    enum fl_status st = weights_member(w->f, &o.me, &err);

    memcpy(o.slot, w->slots, sizeof(o.slot));
    if (st == FL_OK)
        st = xfer_source_create(w->f->loop, w->f->port, &o, &w->source, &err);
    if (st == FL_OK)
        weights_added(w);
    client_sync_end(s, st, &err);
}

/* First values, from the host's memory or a device's, into either. */
static enum fl_status copy_in(const struct link_mem *slot, uint64_t off,
                              const struct furlong_tensor *t, struct fl_err *err)
{
    uint64_t bytes = weights_tensor_bytes(t), addr = (uint64_t)(uintptr_t)t->data;
    struct link_seg all = { .to_off = off, .run_bytes = bytes, .rows = 1 };
    const struct link_pages *pages = link_pages_of(slot);
    const struct gpu_ops *gpu;
    struct gpu_where w;
    struct link_mem from;
    enum fl_status st;

    if (!t->data || bytes == 0)
        return FL_OK;
    if (!gpu_in_use() || gpu_pick(&gpu, NULL) != FL_OK || gpu->where(addr, &w, NULL) != FL_OK)
        return link_mem_write(slot, off, t->data, bytes, err);
    if (pages && strcmp(w.uuid, pages->uuid) != 0)
        return fl_fail(
            err, FL_INVALID,
            "%s lies on device %s, its set on %s: bring it there, or offer it from there", t->name,
            w.uuid, pages->uuid);
    FL_TRY(link_dev_foreign(w.uuid, addr, bytes, &from, err));
    st = pages ? link_mem_move(&from, slot, &all, 1, err)
               : link_mem_read(&from, 0, (char *)slot->addr + off, bytes, err);
    link_dev_free(&from);
    return st;
}

static enum fl_status slots_fill(struct furlong_weights *w, const struct furlong_tensor *t,
                                 bool one, struct fl_err *err)
{
    if (w->home.arena)
        arena_note_slots(w->home.arena, one ? 1 : 2);
    for (unsigned i = 0; i < (one ? 1 : 2); i++) {
        enum fl_status st = slots_alloc(&w->home, w->slot_bytes, &w->slots[i], err);

        if (st != FL_OK)
            return fl_wrap(err, st, "%s: slot %u of %llu bytes", w->set, i,
                           (unsigned long long)w->slot_bytes);
        w->n_slots++;
    }
    FL_TRY(slots_settle(&w->home, err)); /* what fills the first values */
    for (uint32_t i = 0; i < w->n; i++) {
        enum fl_status st = copy_in(&w->slots[0], w->offset[i], &t[i], err);

        if (st != FL_OK)
            return fl_wrap(err, st, "%s: first values of %s", w->set, t[i].name);
    }
    w->data = w->last = w->slots[0].addr;
    return FL_OK;
}

static enum fl_status lend(struct furlong_weights *w, const struct furlong_tensor *t, size_t n,
                           struct fl_err *err)
{
    uint64_t *bytes;
    enum fl_status st;

    if (!w->home.arena)
        return fl_fail(err, FL_UNSUPPORTED,
                       "%s: in_place is for tensors on a device; the host's are copied in", w->set);
    if (n == 0 || n > XFER_MAX_TENSORS || !t)
        return fl_fail(err, FL_INVALID, "%s: 1 to %d tensors, not %zu", w->set, XFER_MAX_TENSORS,
                       n);
    bytes = calloc(n, sizeof(*bytes));
    w->lies = calloc(n, sizeof(*w->lies));
    if (!bytes || !w->lies) {
        free(bytes);
        return fl_fail(err, FL_EXHAUSTED, "%s: no memory for %zu tensors", w->set, n);
    }
    for (size_t i = 0; i < n; i++) {
        bytes[i] = weights_tensor_bytes(&t[i]);
        w->lies[i] = t[i].data;
    }
    st = slots_lend(&w->home, t, bytes, n, &w->lent, err);
    free(bytes);
    return st == FL_OK ? st : fl_wrap(err, st, "%s", w->set);
}

enum fl_status furlong_weights_offer(struct furlong *f, const char *set,
                                     const struct furlong_tensor *t, size_t n,
                                     const struct furlong_weights_opts *given,
                                     struct furlong_weights **out, struct fl_err *err)
{
    struct furlong_weights_opts o;
    struct furlong_weights *w = NULL;
    struct laid_out l = { 0 };
    struct making k = { .m = &l.m };
    enum fl_status st;

    FL_TRY(client_here(f, err));
    o = weights_opts(f, given);
    FL_TRY(weights_new(f, set, &o, &w, err));
    st = slots_home_find(f, t, t ? n : 0, &o, &w->home, err);
    w->home.offered = true;
    w->home.set = w->set;
    if (st == FL_OK && o.in_place)
        st = lend(w, t, n, err);
    if (st == FL_OK)
        st = weights_lay_out(w, t, n, &l, err);
    if (st == FL_OK && !o.in_place)
        st = slots_fill(w, t, weights_one_slot(w, &o), err);
    if (st == FL_OK)
        st = slots_place(f, &w->home, &k.place, err);
    k.w = w;
    if (st == FL_OK)
        st = client_sync_run(f->loop, &k.sync, offer_begin, err);
    laid_out_fini(&l);
    if (st != FL_OK) {
        weights_free(w);
        return st;
    }
    *out = w;
    return FL_OK;
}

/* ---- the trainer's calls -------------------------------------------------------------------- */
struct moving {
    struct client_sync sync;
    struct furlong_weights *w;
    uint64_t version;
    uint32_t budget_ms;
    bool publish;
};

static void source_done(struct xfer_wait *wait, enum fl_status st, const struct fl_err *err)
{
    struct furlong_weights *w = container_of(wait, struct furlong_weights, wait);
    struct client_sync *s = w->waiting;
    struct moving *m = container_of(s, struct moving, sync);

    if (st == FL_OK) {
        pthread_mutex_lock(&w->mu);
        w->data = xfer_source_data(w->source, NULL)->addr;
        if (m->publish) {
            w->last = w->data;
            w->version = (struct xfer_version){ .number = m->version };
        }
        pthread_mutex_unlock(&w->mu);
    }
    w->waiting = NULL;
    client_sync_end(s, st, err);
}

static void source_begin(struct client_sync *s)
{
    struct moving *m = container_of(s, struct moving, sync);
    struct furlong_weights *w = m->w;
    uint64_t due = 0;
    struct fl_err err;
    enum fl_status st;

    if (m->budget_ms && m->budget_ms != FURLONG_FOREVER)
        due = fl_loop_now_ns(w->f->loop) + (uint64_t)m->budget_ms * 1000000;
    if (w->waiting) { /* another thread's, or one that Ctrl-C gave up: it is not ours to end */
        fl_fail(&err, FL_INVALID, "begin or publish is under way");
        client_sync_end(s, FL_INVALID, &err);
        return;
    }
    w->waiting = s;
    w->wait.done = source_done;
    if (m->publish)
        st = xfer_source_publish(w->source, m->version, &w->wait, &err);
    else
        st = xfer_source_begin(w->source, m->version, due ? due : UINT64_MAX, &w->wait, &err);
    if (st == FL_OK)
        return;
    w->waiting = NULL;
    client_sync_end(s, st, &err);
}

static enum fl_status move(struct furlong_weights *w, uint64_t version, uint32_t budget_ms,
                           bool publish, struct fl_err *err)
{
    struct moving m = { .w = w, .version = version, .budget_ms = budget_ms, .publish = publish };
    enum fl_status st;

    FL_TRY(client_here(w->f, err));
    if (!w->source)
        return fl_fail(err, FL_INVALID, "%s: these weights are accepted, not offered", w->set);
    if (version == FURLONG_NO_VERSION)
        return fl_fail(err, FL_INVALID, "%s: that number stands for no version", w->set);
    /* whole only when kernels have written it */
    st = publish ? slots_settle(&w->home, err) : FL_OK;
    if (st == FL_OK)
        st = client_sync_run(w->f->loop, &m.sync, source_begin, err);
    return st == FL_OK ? FL_OK
                       : fl_wrap(err, st, "%s: %s version %llu", w->set,
                                 publish ? "publish" : "begin", (unsigned long long)version);
}

enum fl_status furlong_weights_begin(struct furlong_weights *w, uint64_t version,
                                     uint32_t budget_ms, struct fl_err *err)
{
    return move(w, version, budget_ms, false, err);
}

static void abandon_begin(struct client_sync *s)
{
    struct moving *m = container_of(s, struct moving, sync);
    struct furlong_weights *w = m->w;
    struct fl_err err;
    enum fl_status st = xfer_source_abandon(w->source, &err);

    if (st == FL_OK) {
        pthread_mutex_lock(&w->mu);
        w->data = xfer_source_data(w->source, NULL)->addr;
        pthread_mutex_unlock(&w->mu);
    }
    client_sync_end(s, st, &err);
}

enum fl_status furlong_weights_abandon(struct furlong_weights *w, struct fl_err *err)
{
    struct moving m = { .w = w };

    FL_TRY(client_here(w->f, err));
    if (!w->source)
        return fl_fail(err, FL_INVALID, "%s: these weights are accepted, not offered", w->set);
    enum fl_status st = client_sync_run(w->f->loop, &m.sync, abandon_begin, err);

    return st == FL_OK ? FL_OK : fl_wrap(err, st, "%s", w->set);
}

enum fl_status furlong_weights_publish(struct furlong_weights *w, uint64_t version,
                                       struct fl_err *err)
{
    return move(w, version, 0, true, err);
}
