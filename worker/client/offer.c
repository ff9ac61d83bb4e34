#include "worker/client/weights_priv.h"

static void offer_begin(struct client_sync *s)
{
    struct making *k = container_of(s, struct making, sync);
    struct furlong_weights *w = k->w;
    struct xfer_source_opts o = { .set = w->set, .have = k->m, .n_slots = w->n_slots };
    struct fl_err err;
    enum fl_status st = weights_member(w->f, &o.me, &err);

    memcpy(o.slot, w->slots, sizeof(o.slot));
    if (st == FL_OK)
        st = link_place_here(w->f->seat.shown.address, &o.place, &err);
    if (st == FL_OK)
        st = xfer_source_create(w->f->loop, w->f->port, &o, &w->source, &err);
    if (st == FL_OK)
        weights_added(w);
    client_sync_end(s, st, &err);
}

static enum fl_status slots_fill(struct furlong_weights *w, const struct furlong_tensor *t,
                                 bool one, struct fl_err *err)
{
    for (unsigned i = 0; i < (one ? 1 : 2); i++) {
        enum fl_status st = link_mem_alloc(w->slot_bytes, &w->slots[i], err);

        if (st != FL_OK)
            return fl_wrap(err, st, "%s: slot %u of %llu bytes", w->set, i,
                           (unsigned long long)w->slot_bytes);
        w->n_slots++;
    }
    for (uint32_t i = 0; i < w->n; i++) {
        struct xfer_tensor x = { .dtype = t[i].dtype, .ndim = t[i].ndim };
        struct xfer_box b = weights_box(&t[i]);

        memcpy(x.shape, t[i].shape, sizeof(x.shape));
        if (t[i].data)
            memcpy((uint8_t *)w->slots[0].addr + w->offset[i], t[i].data, xfer_box_bytes(&x, &b));
    }
    w->data = w->last = w->slots[0].addr;
    return FL_OK;
}

enum fl_status furlong_weights_offer(struct furlong *f, const char *set,
                                     const struct furlong_tensor *t, size_t n,
                                     const struct furlong_weights_opts *o,
                                     struct furlong_weights **out, struct fl_err *err)
{
    struct furlong_weights *w = NULL;
    struct laid_out l = { 0 };
    struct making k = { .m = &l.m };
    enum fl_status st;

    FL_TRY(weights_new(f, set, o, &w, err));
    st = weights_lay_out(w, t, n, &l, err);
    if (st == FL_OK)
        st = slots_fill(w, t, weights_one_slot(w, o), err);
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

enum fl_status furlong_weights_publish(struct furlong_weights *w, uint64_t version,
                                       struct fl_err *err)
{
    return move(w, version, 0, true, err);
}
