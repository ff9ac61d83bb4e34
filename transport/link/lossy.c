#include "transport/link/lossy.h"
#include <stdlib.h>
#include <sys/queue.h>
#include "transport/link/link_priv.h"

struct link_lossy_script link_lossy_script;

struct late { /* a pull that has not been handed on, or is being cut */
    LIST_ENTRY(late) next;
    struct lossy *k;
    struct fl_timer timer;
    struct link_op inner, *op;
    const struct link_mem *theirs, *mine;
    const struct link_seg *segs;
    size_t n;
    uint64_t (*digests)[2];
    struct link_seg half;
    bool cut, handed_on;
};
struct lossy {
    struct link base;
    struct link *inner;
    struct link_op ready_inner, quiet_inner, *ready, *quiet;
    LIST_HEAD(, late) late;
};

static struct lossy *of(struct link *base)
{
    return container_of(base, struct lossy, base);
}

static void late_ends(struct late *l, enum fl_status st, const char *why)
{
    struct link_op *op = l->op;

    fl_timer_cancel(&l->timer);
    LIST_REMOVE(l, next);
    if (why)
        link_op_set(op, st, "lossy: %s", why);
    else
        op->err = l->inner.err;
    op->bytes = l->inner.bytes;
    op->took_ns = l->inner.took_ns;
    free(l);
    op->done(op);
}

static void inner_done(struct link_op *inner)
{
    struct late *l = container_of(inner, struct late, inner);

    if (l->cut && inner->err.status == FL_OK)
        late_ends(l, FL_UNREACHABLE, "the pull was cut in the middle");
    else
        late_ends(l, FL_OK, NULL);
}

static void hand_on(struct fl_timer *t, uint64_t now_ns)
{
    struct late *l = container_of(t, struct late, timer);
    struct fl_err err;

    (void)now_ns;
    l->half = l->segs[0];
    l->half.run_bytes = l->half.run_bytes / 2 + 1;
    l->half.rows = 1;
    l->inner.done = inner_done;
    l->handed_on = true;
    enum fl_status st =
        link_shm.pull(l->k->inner, l->theirs, l->mine, l->cut ? &l->half : l->segs,
                      l->cut ? 1 : l->n, l->cut ? NULL : l->digests, &l->inner, &err);

    if (st == FL_AGAIN) { /* shm is full: a little later */
        l->handed_on = false;
        fl_timer_arm_in(l->k->base.loop, &l->timer, 1);
    } else if (st != FL_OK) {
        late_ends(l, st, err.text);
    }
}

static enum fl_status lossy_pull(struct link *base, const struct link_mem *theirs,
                                 const struct link_mem *mine, const struct link_seg *segs, size_t n,
                                 uint64_t (*digests)[2], struct link_op *op, struct fl_err *err)
{
    struct lossy *k = of(base);
    struct link_lossy_script *s = &link_lossy_script;
    uint64_t bytes;

    if (k->quiet)
        return fl_fail(err, FL_CANCELLED, "lossy: the link was aborted");
    FL_TRY(link_check_segs(segs, n, theirs->bytes, mine->bytes, &bytes, err));
    struct late *l = calloc(1, sizeof(*l));

    if (!l)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a pull");
    s->pulls++;
    *l = (struct late){ .k = k,
                        .timer = { .fire = hand_on },
                        .op = op,
                        .theirs = theirs,
                        .mine = mine,
                        .segs = segs,
                        .n = n,
                        .digests = digests,
                        .cut = s->pulls == s->cut };
    LIST_INSERT_HEAD(&k->late, l, next);
    if (s->pulls != s->lost)
        fl_timer_arm_in(base->loop, &l->timer, s->delay_ms);
    return FL_OK;
}

static void ready_done(struct link_op *inner)
{
    struct lossy *k = container_of(inner, struct lossy, ready_inner);

    k->ready->err = inner->err;
    k->ready->done(k->ready);
}

static enum fl_status lossy_open(struct fl_loop *l, const struct link_team *team, struct link **out,
                                 struct link_op *ready, struct fl_err *err)
{
    struct lossy *k = calloc(1, sizeof(*k));

    if (!k)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a link");
    *k = (struct lossy){ .base = { .loop = l },
                         .ready_inner = { .done = ready_done },
                         .ready = ready };
    LIST_INIT(&k->late);
    enum fl_status st = link_shm.open(l, team, &k->inner, &k->ready_inner, err);

    if (st != FL_OK)
        free(k);
    else
        *out = &k->base;
    return st;
}

/* Those that were handed on are shm's, which brings them back; the others come back here. */
static void end_waiting(struct lossy *k)
{
    struct late *l, *next;

    for (l = LIST_FIRST(&k->late); l; l = next) {
        next = LIST_NEXT(l, next);
        if (!l->handed_on)
            late_ends(l, FL_CANCELLED, "the link was ended");
    }
}

static void quiet_done(struct link_op *inner)
{
    struct lossy *k = container_of(inner, struct lossy, quiet_inner);
    struct link_op *quiet = k->quiet;

    quiet->err = inner->err;
    end_waiting(k);
    quiet->done(quiet);
}

static void lossy_abort(struct link *base, struct link_op *quiet)
{
    struct lossy *k = of(base);

    k->quiet = quiet;
    k->quiet_inner.done = quiet_done;
    link_shm.abort(k->inner, &k->quiet_inner);
}

static void lossy_close(struct link *base)
{
    struct lossy *k = of(base);

    end_waiting(k);
    link_shm.close(k->inner); /* brings back what it has, ready and quiet too */
    free(k);
}

static bool lossy_reaches(const struct link_place *a, const struct link_place *b,
                          struct fl_err *why)
{
    return link_shm.reaches(a, b, why);
}

static uint64_t lossy_cost_ns(const struct link_place *from, const struct link_place *to,
                              uint64_t bytes)
{
    return link_shm.cost_ns(from, to, bytes) + link_lossy_script.delay_ms * 1000000ull;
}

static enum fl_status lossy_share(struct link *base, const struct link_mem *mine,
                                  struct link_key *out, struct fl_err *err)
{
    return link_shm.share(of(base)->inner, mine, out, err);
}

static enum fl_status lossy_map(struct link *base, const struct link_key *theirs, bool writable,
                                struct link_mem *out, struct fl_err *err)
{
    return link_shm.map(of(base)->inner, theirs, writable, out, err);
}

static void lossy_unmap(struct link *base, struct link_mem *theirs)
{
    link_shm.unmap(of(base)->inner, theirs);
}

const struct link_ops link_lossy = {
    .name = "lossy",
    .caps = LINK_HOST | LINK_MAP | LINK_PULL | LINK_SEGS | LINK_ALONE,
    .reaches = lossy_reaches,
    .cost_ns = lossy_cost_ns,
    .ticket = link_no_ticket,
    .open = lossy_open,
    .share = lossy_share,
    .map = lossy_map,
    .unmap = lossy_unmap,
    .pull = lossy_pull,
    .send = link_no_send,
    .recv = link_no_recv,
    .cast = link_no_cast,
    .cast_segs = link_no_cast_segs,
    .progress = link_no_progress,
    .event_fd = link_no_event_fd,
    .abort = lossy_abort,
    .close = lossy_close,
};
