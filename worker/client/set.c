#include "worker/client/weights_priv.h"

/* ---- tensors -------------------------------------------------------------------------------- */
struct order {
    const struct furlong_tensor *t;
    uint32_t index;
};

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct order *)a)->t->name, ((const struct order *)b)->t->name);
}

struct xfer_box weights_box(const struct furlong_tensor *t)
{
    struct xfer_box b = { 0 };
    bool whole = t->len[0] == 0;

    for (unsigned d = 0; d < t->ndim && d < FL_DIMS; d++) {
        b.at[d] = whole ? 0 : t->at[d];
        b.len[d] = whole ? t->shape[d] : t->len[d];
    }
    return b;
}

uint64_t weights_tensor_bytes(const struct furlong_tensor *t)
{
    struct xfer_tensor x = { .dtype = t->dtype, .ndim = t->ndim };
    struct xfer_box b = weights_box(t);

    memcpy(x.shape, t->shape, sizeof(x.shape));
    return t->ndim > FL_DIMS ? 0 : xfer_box_bytes(&x, &b);
}

/* Both sides lay their tensors out by the same rule, so equal tensors mean equal slots: sharing. */
static enum fl_status manifest_fill(struct furlong_weights *w, const struct furlong_tensor *t,
                                    const struct order *o, struct xfer_tensor *tensors,
                                    struct xfer_piece *pieces, struct fl_err *err)
{
    uint64_t off = 0;

    for (uint32_t i = 0; i < w->n; i++) {
        const struct furlong_tensor *in = o[i].t;
        uint64_t bytes;

        tensors[i] = (struct xfer_tensor){ .name = in->name, .dtype = in->dtype, .ndim = in->ndim };
        memcpy(tensors[i].shape, in->shape, sizeof(tensors[i].shape));
        pieces[i] = (struct xfer_piece){ .tensor = i, .off = off, .box = weights_box(in) };
        bytes = in->ndim > FL_DIMS ? 0 : xfer_box_bytes(&tensors[i], &pieces[i].box);
        if (off + bytes + XFER_ALIGN < off)
            return fl_fail(err, FL_INVALID, "%s: tensor %s: sizes overflow", w->set, in->name);
        w->offset[o[i].index] = off;
        if (w->lent.n) {
            pieces[i].mem = w->lent.at[o[i].index].mem;
            pieces[i].off = w->lent.at[o[i].index].off;
        }
        off = (off + bytes + XFER_ALIGN - 1) / XFER_ALIGN * XFER_ALIGN;
    }
    (void)t;
    w->slot_bytes = off ? off : XFER_ALIGN;
    return FL_OK;
}

void laid_out_fini(struct laid_out *l)
{
    free(l->order);
    free(l->tensors);
    free(l->pieces);
}

enum fl_status weights_lay_out(struct furlong_weights *w, const struct furlong_tensor *t, size_t n,
                               struct laid_out *l, struct fl_err *err)
{
    if (n == 0 || n > XFER_MAX_TENSORS || !t)
        return fl_fail(err, FL_INVALID, "%s: 1 to %d tensors, not %zu", w->set, XFER_MAX_TENSORS,
                       n);
    w->n = (uint32_t)n;
    w->offset = calloc(n, sizeof(*w->offset));
    l->order = calloc(n, sizeof(*l->order));
    l->tensors = calloc(n, sizeof(*l->tensors));
    l->pieces = calloc(n, sizeof(*l->pieces));
    if (!w->offset || !l->order || !l->tensors || !l->pieces)
        return fl_fail(err, FL_EXHAUSTED, "%s: no memory for %zu tensors", w->set, n);
    for (uint32_t i = 0; i < n; i++) {
        if (!t[i].name || !*t[i].name)
            return fl_fail(err, FL_INVALID, "%s: tensor %u has no name", w->set, i);
        l->order[i] = (struct order){ &t[i], i };
    }
    qsort(l->order, n, sizeof(*l->order), by_name);
    FL_TRY(manifest_fill(w, t, l->order, l->tensors, l->pieces, err));
    l->m = (struct xfer_manifest){ .who = w->f->seat.who,
                                   .party = w->f->seat.shown.rank,
                                   .tensors = l->tensors,
                                   .pieces = l->pieces,
                                   .mem_bytes = w->lent.n ? w->lent.bytes : &w->slot_bytes,
                                   .n_tensors = n,
                                   .n_pieces = n,
                                   .n_mems = w->lent.n ? w->lent.n : 1 };
    return xfer_manifest_seal(&l->m, err);
}

bool weights_one_slot(const struct furlong_weights *w, const struct furlong_weights_opts *o)
{
    return o->slots ? o->slots == 1 : slots_one(&w->home, w->slot_bytes);
}

/* ---- making one ----------------------------------------------------------------------------- */
void weights_free(struct furlong_weights *w)
{
    if (!w)
        return;
    for (unsigned i = 0; i < w->n_slots; i++)
        slots_free(&w->slots[i]);
    if (w->has_spare)
        slots_free(&w->spare);
    slots_lent_fini(&w->lent);
    link_window_destroy(w->window);
    free(w->lies);
    free(w->offset);
    pthread_mutex_destroy(&w->mu);
    free(w);
}

struct furlong_weights_opts weights_opts(const struct furlong *f,
                                         const struct furlong_weights_opts *o)
{
    struct furlong_weights_opts all = { 0 };

    if (o) /* no byte beyond what the program was compiled for */
        memcpy(&all, o, f->abi < 2 ? offsetof(struct furlong_weights_opts, device) : sizeof(all));
    return all;
}

enum fl_status weights_new(struct furlong *f, const char *set, const struct furlong_weights_opts *o,
                           struct furlong_weights **out, struct fl_err *err)
{
    struct furlong_weights *w;

    FL_TRY(client_here(f, err));
    if (!set || !*set || strlen(set) >= sizeof(w->set))
        return fl_fail(err, FL_INVALID, "a set's name has 1 to %zu bytes", sizeof(w->set) - 1);
    if (o->slots > 2)
        return fl_fail(err, FL_INVALID, "%s: 1 or 2 slots, not %u", set, o->slots);
    w = FL_FAULT("client.weights") ? NULL : calloc(1, sizeof(*w));
    if (!w)
        return fl_fail(err, FL_EXHAUSTED, "%s: no memory", set);
    w->f = f;
    w->version.number = FURLONG_NO_VERSION;
    (void)FL_COPY(w->set, set);
    pthread_mutex_init(&w->mu, NULL);
    *out = w;
    return FL_OK;
}

enum fl_status weights_member(const struct furlong *f, struct xfer_member *me, struct fl_err *err)
{
    struct client_where at = { 0 };

    *me = (struct xfer_member){ .who = f->seat.who, .party = f->seat.shown.rank };
    (void)FL_COPY(me->name, f->seat.name);
    (void)FL_COPY(at.boot_id, f->seat.boot_id);
    if (!FL_COPY(at.tcp, client_peers_tcp(f)) || !FL_COPY(at.unix_path, f->seat.peer_sock))
        return fl_fail(err, FL_INVALID, "%s: addresses are too long", f->seat.name);
    client_where_print(&at, me->where);
    return FL_OK;
}

void weights_added(struct furlong_weights *w)
{
    w->next = w->f->sets;
    w->f->sets = w;
}

/* ---- both ----------------------------------------------------------------------------------- */
void *furlong_weights_data(const struct furlong_weights *w, size_t i)
{
    struct furlong_weights *mine = (struct furlong_weights *)(uintptr_t)w;
    uint8_t *at;

    if (i >= w->n)
        return NULL;
    pthread_mutex_lock(&mine->mu);
    at = w->data;
    pthread_mutex_unlock(&mine->mu);
    if (w->lies)
        return w->lies[i];
    return at ? at + w->offset[i] : NULL;
}

const void *furlong_weights_last(const struct furlong_weights *w, size_t i)
{
    struct furlong_weights *mine = (struct furlong_weights *)(uintptr_t)w;
    const uint8_t *at;

    if (!w->last || w->lies)
        return furlong_weights_data(w, i);
    if (i >= w->n)
        return NULL;
    pthread_mutex_lock(&mine->mu);
    at = w->last;
    pthread_mutex_unlock(&mine->mu);
    return at + w->offset[i];
}

uint64_t furlong_weights_version(const struct furlong_weights *w, uint64_t digest[2])
{
    struct furlong_weights *mine = (struct furlong_weights *)(uintptr_t)w;
    struct xfer_version v;

    pthread_mutex_lock(&mine->mu);
    v = w->version;
    pthread_mutex_unlock(&mine->mu);
    if (digest) {
        digest[0] = v.digest[0];
        digest[1] = v.digest[1];
    }
    return v.number;
}

struct asking {
    struct client_sync sync;
    const struct furlong_weights *w;
    char *text;
    size_t room;
};

static void why_begin(struct client_sync *s)
{
    struct asking *a = container_of(s, struct asking, sync);

    if (a->w->sink)
        xfer_sink_says(a->w->sink, a->text, a->room);
    client_sync_end(s, FL_OK, NULL);
}

void furlong_weights_why(const struct furlong_weights *w, char *text, size_t room)
{
    struct asking a = { .w = w, .text = text, .room = room };

    if (!room)
        return;
    text[0] = '\0';
    if (client_here(w->f, NULL) == FL_OK)
        client_sync_run(w->f->loop, &a.sync, why_begin, NULL);
}

struct dropping {
    struct client_sync sync;
    struct furlong_weights *w;
    struct fl_task stopped;
};

static void drop_stopped(struct fl_task *t)
{
    struct dropping *d = container_of(t, struct dropping, stopped);
    struct furlong_weights *w = d->w;

    fl_timer_cancel(&w->retry);
    xfer_source_destroy(w->source);
    xfer_sink_destroy(w->sink);
    accept_no_more(w);
    for (struct furlong_weights **at = &w->f->sets; *at; at = &(*at)->next) {
        if (*at != w)
            continue;
        *at = w->next;
        break;
    }
    client_sync_end(&d->sync, FL_OK, NULL);
}

/* The thread that drops may be the one that would have answered them. */
static void answer_waiting(struct furlong_weights *w)
{
    struct furlong_call *c;
    struct fl_err why;

    while ((c = inbox_take_of(&w->f->inbox, w))) {
        w->untold |= c->ev.what == FURLONG_RESUME; /* to be told without the set */
        fl_fail(&why, FL_CANCELLED, "weights \"%s\" are being dropped", w->set);
        furlong_refuse(c, &why);
    }
}

static void drop_begin(struct client_sync *s)
{
    struct dropping *d = container_of(s, struct dropping, sync);

    d->w->dropping = true;
    accept_flush(d->w);
    answer_waiting(d->w);
    d->stopped.run = drop_stopped;
    if (d->w->source)
        xfer_source_stop(d->w->source, &d->stopped);
    else
        xfer_sink_stop(d->w->sink, &d->stopped);
}

void furlong_weights_drop(struct furlong_weights *w)
{
    struct dropping d = { .w = w };

    if (!w || client_here(w->f, NULL) != FL_OK)
        return;
    if (w->home.arena) /* as cudaFree; a lost device is past that */
        (void)arena_wait(w->home.arena, NULL);
    client_sync_run(w->f->loop, &d.sync, drop_begin, NULL);
    weights_free(w);
}

void client_weights_drop_all(struct furlong *f)
{
    while (f->sets) /* nobody else adds or drops: the program leaves */
        furlong_weights_drop(f->sets);
}
