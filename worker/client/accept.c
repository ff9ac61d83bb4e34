#include "worker/client/weights_priv.h"

enum { RETRY_MS = 50 }; /* no memory or no room in the lane for an event that has to get through */

/* ---- the engine's side of the plane --------------------------------------------------------- */
static enum fl_status sink_room(void *arg, uint64_t bytes, struct link_mem *out, struct fl_err *err)
{
    struct furlong_weights *w = arg;
    struct fl_err why = { 0 };
    char size[16];
    enum fl_status st;

    if (w->has_spare && w->spare.bytes == bytes) {
        *out = w->spare;
        w->has_spare = false;
        return FL_OK;
    }
    st = slots_alloc(&w->home, bytes, out, &why);
    if (st == FL_EXHAUSTED && w->rooms)
        return fl_fail(
            err, st,
            "no room for a second slot: one slot saves %s, with nothing served during an "
            "update; %.150s",
            fl_bytes_text(size, bytes), why.text);
    if (st != FL_OK && err)
        *err = why;
    w->rooms += st == FL_OK;
    return st;
}

/* One slot is kept for the next epoch: first touch of new pages is the slow part of an update. */
static void sink_done_with(void *arg, struct link_mem *room)
{
    struct furlong_weights *w = arg;

    if (w->away || w->dropping || w->has_spare) {
        slots_free(room);
        w->rooms--;
        return;
    }
    w->spare = *room;
    w->has_spare = true;
}

static void quiet_wait(struct fl_work *q) /* a lost device is past that */
{
    (void)arena_wait(container_of(q, struct furlong_weights, quiet)->home.arena, NULL);
}

static void quiet_over(struct fl_work *q, enum fl_status st)
{
    struct furlong_weights *w = container_of(q, struct furlong_weights, quiet);

    (void)st;
    fl_post(w->f->loop, FL_TAKE(w->then));
}

/* The program leaves, or has lost its seat: it answers no more. What it gave the device before may
 * still read the weights. */
static void post_when_quiet(struct furlong_weights *w, struct fl_task *then)
{
    if (!w->home.arena) {
        fl_post(w->f->loop, then);
        return;
    }
    w->then = then; /* a PAUSE or a COMMIT: the sink has one at a time */
    w->quiet = (struct fl_work){ .work = quiet_wait, .done = quiet_over };
    fl_work_start(w->f->loop, &w->quiet);
}

static bool event_put(struct furlong_weights *w, enum furlong_what what, struct fl_task *then)
{
    struct furlong_call *c;
    struct fl_err err = { 0 };

    if (w->dropping) { /* whoever drops it may be who would answer */
        w->untold |= what == FURLONG_RESUME;
        if (then)
            fl_post(w->f->loop, then);
        return true;
    }
    c = client_call_new(w->f, what, NULL);
    if (!c)
        return false;
    c->set = w;
    c->then = then;
    if (what == FURLONG_COMMIT)
        c->ev.version = w->next_version.number;
    if (client_call_put(c, &err) == FL_OK)
        return true;
    if (err.status == FL_EXHAUSTED)
        return false;
    if (then)
        post_when_quiet(w, then);
    return true;
}

/* PAUSE, COMMIT and RESUME have to get through, or the epoch hangs here until its lease ends. */
void accept_flush(struct furlong_weights *w)
{
    if (w->paused && event_put(w, FURLONG_PAUSE, w->paused))
        w->paused = NULL;
    if (w->flipped && !w->paused && event_put(w, FURLONG_COMMIT, w->flipped))
        w->flipped = NULL;
    if (w->resume_due && !w->paused && !w->flipped && event_put(w, FURLONG_RESUME, NULL))
        w->resume_due = false;
    if (w->paused || w->flipped || w->resume_due)
        fl_timer_arm_in(w->f->loop, &w->retry, RETRY_MS);
}

static void events_retry(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    accept_flush(container_of(t, struct furlong_weights, retry));
}

static void sink_pause(void *arg, struct fl_task *paused)
{
    struct furlong_weights *w = arg;

    w->f->paused_by_plane++;
    w->pauses++;
    w->paused = paused;
    accept_flush(w);
}

static void sink_flip(void *arg, const struct xfer_version *now, const struct link_mem *mem,
                      struct fl_task *flipped)
{
    struct furlong_weights *w = arg;

    pthread_mutex_lock(&w->mu);
    w->next_version = *now;
    w->next_data = mem->addr;
    w->next_fd = link_mem_fd(mem);
    pthread_mutex_unlock(&w->mu);
    w->flipped = flipped;
    accept_flush(w);
}

static void sink_resume(void *arg)
{
    struct furlong_weights *w = arg;

    if (w->pauses) {
        w->pauses--;
        w->f->paused_by_plane--;
    }
    if (w->f->paused_by_plane || w->f->paused_by_driver)
        return;
    w->resume_due = true;
    accept_flush(w);
}

void accept_no_more(struct furlong_weights *w)
{
    struct furlong_call *c;
    bool held = w->pauses > 0 || w->untold;

    w->f->paused_by_plane -= w->pauses;
    w->pauses = 0;
    if (!held || w->f->paused_by_plane || w->f->paused_by_driver)
        return;
    c = client_call_new(w->f, FURLONG_RESUME, NULL); /* of no set: this one goes */
    if (!c || client_call_put(c, NULL) != FL_OK)
        fl_warn("nobody is told that steps may run again set=%s", w->set);
}

static enum fl_status sink_can_show(void *arg, const struct link_mem *comes, struct fl_err *err)
{
    return link_window_can(((struct furlong_weights *)arg)->window, comes, err);
}

/* The program has answered PAUSE, and what its stream was given has run. */
static enum fl_status sink_show(void *arg, const struct link_mem *comes, struct link_mem *seen,
                                struct fl_err *err)
{
    struct furlong_weights *w = arg;

    FL_TRY(link_window_show(w->window, comes, false, err));
    seen->addr = link_window_data(w->window);
    return FL_OK;
}

static const struct xfer_sink_ops fixed_ops = { .room = sink_room,
                                                .done_with = sink_done_with,
                                                .pause = sink_pause,
                                                .flip = sink_flip,
                                                .resume = sink_resume,
                                                .can_show = sink_can_show,
                                                .show = sink_show };

static const struct xfer_sink_ops sink_ops = { .room = sink_room,
                                               .done_with = sink_done_with,
                                               .pause = sink_pause,
                                               .flip = sink_flip,
                                               .resume = sink_resume };

static void serves_nothing(struct furlong_weights *w)
{
    pthread_mutex_lock(&w->mu);
    w->data = NULL;
    w->version = (struct xfer_version){ .number = FURLONG_NO_VERSION };
    pthread_mutex_unlock(&w->mu);
}

void client_weights_settle(struct furlong_call *c)
{
    struct furlong_weights *w = c->set;
    struct fl_err err = { 0 };

    /* Kernels that read what is given up now have run, or the device is lost. */
    if ((c->ev.what == FURLONG_PAUSE || c->ev.what == FURLONG_COMMIT) &&
        slots_settle(&w->home, &err) != FL_OK)
        fl_warn("weights: the device was not waited for set=%s why=\"%s\"", w->set, err.text);

    if (c->ev.what == FURLONG_PAUSE)
        serves_nothing(w);
    if (c->ev.what != FURLONG_COMMIT)
        return;
    pthread_mutex_lock(&w->mu);
    w->data = (uint8_t *)(uintptr_t)w->next_data;
    w->version = w->next_version;
    w->next_data = NULL;
    pthread_mutex_unlock(&w->mu);
}

enum fl_status furlong_weights_coming(const struct furlong_weights *w, size_t i,
                                      struct furlong_coming *out, struct fl_err *err)
{
    struct furlong_weights *mine = (struct furlong_weights *)(uintptr_t)w;
    struct furlong_coming c = { .fd = -1 };

    FL_TRY(client_here(w->f, err));
    if (i >= w->n)
        return fl_fail(err, FL_INVALID, "%s has %u tensors, not %zu", w->set, w->n, i + 1);
    pthread_mutex_lock(&mine->mu);
    if (w->next_data)
        c = (struct furlong_coming){ w->next_data + w->offset[i],
                                     w->next_fd,
                                     w->offset[i],
                                     w->next_version.number,
                                     { w->next_version.digest[0], w->next_version.digest[1] } };
    pthread_mutex_unlock(&mine->mu);
    if (!c.data)
        return fl_fail(err, FL_NOT_FOUND, "%s: no COMMIT is in hand", w->set);
    *out = c;
    return FL_OK;
}

enum fl_status furlong_weights_commit(struct furlong_weights *w, struct furlong_call *c,
                                      struct fl_err *err)
{
    FL_TRY(client_here(w->f, err));
    if (c->set != w || c->ev.what != FURLONG_COMMIT)
        return fl_fail(err, FL_INVALID, "%s: %s is no COMMIT of these weights", w->set,
                       c->ev.method);
    furlong_reply(c, NULL, 0);
    return FL_OK;
}

static void accept_begin(struct client_sync *s)
{
    struct making *k = container_of(s, struct making, sync);
    struct furlong_weights *w = k->w;
    struct xfer_sink_opts o = { .set = w->set,
                                .want = k->m,
                                .slots = k->slots,
                                .check_equal = k->check_equal,
                                .place = k->place,
                                .ops = w->window ? &fixed_ops : &sink_ops,
                                .arg = w };
    const char *sock = w->f->seat.peer_sock, *slash = strrchr(sock, '/');
    char beside[1024]; /* the worker's own folder: goes with it */
    struct fl_err err;
    enum fl_status st = weights_member(w->f, &o.me, &err);

    snprintf(beside, sizeof(beside), "%.*s/weights", slash ? (int)(slash - sock) : 1,
             slash ? sock : ".");
    o.local_dir = k->local_dir ? k->local_dir : beside;

    if (st == FL_OK)
        st = xfer_sink_create(w->f->loop, w->f->port, &o, &w->sink, &err);
    if (st == FL_OK)
        weights_added(w);
    client_sync_end(s, st, &err);
}

static enum fl_status window_open(struct furlong_weights *w, struct fl_err *err)
{
    if (!w->home.arena)
        return fl_fail(err, FL_UNSUPPORTED, "%s: weights in host memory have no fixed addresses",
                       w->set);
    return link_window_create(w->home.uuid, w->slot_bytes, &w->window, err);
}

enum fl_status furlong_weights_accept(struct furlong *f, const char *set,
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
    k.check_equal = o.check_equal;
    k.local_dir = o.local_dir;
    FL_TRY(weights_new(f, set, &o, &w, err));
    w->retry.fire = events_retry;
    st = slots_home_find(f, t, t ? n : 0, &o, &w->home, err);
    w->home.set = w->set;
    if (st == FL_OK)
        st = weights_lay_out(w, t, n, &l, err);
    if (st == FL_OK && o.fixed_addresses)
        st = window_open(w, err);
    if (st == FL_OK)
        st = slots_place(f, &w->home, &k.place, err);
    k.w = w;
    if (st == FL_OK)
        k.slots = weights_one_slot(w, &o) ? XFER_ONE_SLOT : XFER_TWO_SLOTS;
    if (st == FL_OK)
        st = client_sync_run(f->loop, &k.sync, accept_begin, err);
    laid_out_fini(&l);
    if (st != FL_OK) {
        weights_free(w);
        return st;
    }
    *out = w;
    return FL_OK;
}

/* ---- offload -------------------------------------------------------------------------------- */
struct going {
    struct client_sync sync;
    struct furlong *f;
    bool drop;
    struct furlong_moved *m;
};

/* A version that is kept, on a device: its memory goes and comes back under it. */
static bool own_slot(const struct furlong_weights *w, struct link_mem *out)
{
    const struct link_mem *mem = xfer_sink_data(w->sink, NULL);
    struct arena_chunks c;

    if (!mem || !w->home.arena || !arena_chunks_of(w->home.arena, mem->addr, mem->bytes, &c))
        return false; /* none, the host's, or the trainer's */
    *out = *mem;
    return true;
}

static enum fl_status comes_back(struct furlong_weights *w, struct fl_err *err)
{
    struct link_mem mem;

    if (!own_slot(w, &mem))
        return FL_OK;
    FL_TRY(slots_return(&mem, err));
    return w->window ? link_window_show(w->window, &mem, false, err) : FL_OK;
}

static void onload_begin(struct client_sync *s)
{
    enum fl_status st = FL_OK;
    struct fl_err err = { 0 };

    for (struct furlong_weights *w = container_of(s, struct going, sync)->f->sets; w; w = w->next) {
        if (!w->sink || !w->away)
            continue;
        w->away = false;
        if (st == FL_OK)
            st = comes_back(w, &err);
        xfer_sink_onload(w->sink);
    }
    client_sync_end(s, st, &err);
}

static enum fl_status sink_offload(struct furlong_weights *w, struct going *g, struct fl_err *err)
{
    struct xfer_version serving;
    const struct link_mem *mem = xfer_sink_data(w->sink, &serving);
    uint64_t bytes = mem ? mem->bytes : 0;
    struct link_mem own;
    enum fl_status st;

    w->away = true; /* done_with() keeps nothing from here on */
    st = xfer_sink_offload(w->sink, g->drop, err);
    if (st != FL_OK) {
        w->away = false;
        return fl_wrap(err, st, "%s", w->set);
    }
    if (w->has_spare) {
        bytes += w->spare.bytes;
        slots_free(&w->spare);
        w->has_spare = false;
        w->rooms--;
    }
    if (g->drop && w->window) /* or what was seen there would stay */
        link_window_hide(w->window);
    if (g->drop) {
        g->m->dropped_bytes += bytes;
        serves_nothing(w);
    } else if (own_slot(w, &own)) { /* the arena counts it */
        if (w->window)
            link_window_hide(w->window);
        slots_leave(&own);
    } else {
        g->m->kept_bytes += bytes;
    }
    return FL_OK;
}

/* All sets, or none: one that takes part in an update holds the others. */
static void offload_begin(struct client_sync *s)
{
    struct going *g = container_of(s, struct going, sync);
    enum fl_status st = FL_OK;
    struct fl_err err;

    for (struct furlong_weights *w = g->f->sets; w && st == FL_OK; w = w->next)
        if (w->sink && !w->away && (st = xfer_sink_can_offload(w->sink, &err)) != FL_OK)
            fl_wrap(&err, st, "%s", w->set);
    for (struct furlong_weights *w = g->f->sets; w && st == FL_OK; w = w->next)
        if (w->sink && !w->away)
            st = sink_offload(w, g, &err);
    client_sync_end(s, st, &err);
}

enum fl_status client_weights_offload(struct furlong *f, uint32_t tags, struct furlong_moved *m,
                                      struct fl_err *err)
{
    struct furlong_moved arena = { 0 }, sets = { 0 };
    struct going g = { .f = f, .drop = memory_drops(&f->memory, FURLONG_TAG_WEIGHTS), .m = &sets };
    uint64_t at;
    enum fl_status st;

    if (tags & FURLONG_TAG_WEIGHTS) /* kernels that read them may still run */
        FL_TRY(arena_wait_all(err));
    at = fl_clock_boot_ns();
    if (tags & FURLONG_TAG_WEIGHTS)
        FL_TRY(client_sync_run(f->loop, &g.sync, offload_begin, err));
    sets.setup_s = (double)(fl_clock_boot_ns() - at) / 1e9;
    st = memory_offload(&f->memory, tags, &arena, err);
    if (st != FL_OK) {
        if (tags & FURLONG_TAG_WEIGHTS)
            client_sync_run(f->loop, &g.sync, onload_begin, NULL);
        return st;
    }
    *m = (struct furlong_moved){ .setup_s = sets.setup_s + arena.setup_s,
                                 .copy_s = arena.copy_s,
                                 .dropped_bytes = sets.dropped_bytes + arena.dropped_bytes,
                                 .kept_bytes = sets.kept_bytes + arena.kept_bytes,
                                 .written_bytes = arena.written_bytes,
                                 .backed_bytes = arena.backed_bytes };
    return FL_OK;
}

enum fl_status client_weights_onload(struct furlong *f, uint32_t tags, struct furlong_moved *m,
                                     struct fl_err *err)
{
    struct going g = { .f = f };

    FL_TRY(memory_onload(&f->memory, tags, m, err));
    if (tags & FURLONG_TAG_WEIGHTS)
        return client_sync_run(f->loop, &g.sync, onload_begin, err);
    return FL_OK;
}
