#include "tests/xfer/stall_link.h"
#include <stdlib.h>
#include <string.h>

struct stall stall;

enum { STALLED_MAX = 64 };
struct stalled {
    struct link *k;
    struct link_op *op;
    bool quiet;
};
static struct stalled list[STALLED_MAX];
static unsigned n_list;

struct link {
    struct fl_loop *loop;
}; /* what every link begins with */

static void op_run(struct fl_task *t)
{
    struct link_op *op = container_of(t, struct link_op, back);

    op->done(op);
}

static void op_end(struct fl_loop *l, struct link_op *op, enum fl_status st, const char *why)
{
    op->err = (struct fl_err){ 0 };
    if (st != FL_OK)
        fl_fail(&op->err, st, "%s", why);
    op->back.run = op_run;
    fl_post(l, &op->back);
}

static void add(struct link *k, struct link_op *op, bool quiet)
{
    if (n_list == STALLED_MAX)
        abort();
    list[n_list++] = (struct stalled){ k, op, quiet };
}

static enum fl_status stall_pull(struct link *k, const struct link_mem *theirs,
                                 const struct link_mem *mine, const struct link_seg *segs, size_t n,
                                 uint64_t (*digests)[2], struct link_op *op, struct fl_err *err)
{
    if (!stall.stall_pulls)
        return link_shm.pull(k, theirs, mine, segs, n, digests, op, err);
    stall.waiting++;
    add(k, op, false);
    return FL_OK;
}

static void stall_abort(struct link *k, struct link_op *quiet)
{
    unsigned waited = stall.waiting;

    for (unsigned i = 0; i < n_list; i++)
        if (list[i].op && list[i].k == k && !list[i].quiet) {
            stall.waiting--;
            op_end(k->loop, list[i].op, FL_CANCELLED, "aborted");
            list[i].op = NULL;
        }
    if (!stall.stall_quiet || waited == stall.waiting) {
        link_shm.abort(k, quiet);
        return;
    }
    stall.quiets++;
    add(k, quiet, true);
}

void stall_quiet_now(void)
{
    for (unsigned i = 0; i < n_list; i++)
        if (list[i].op && list[i].quiet) {
            stall.quiets--;
            link_shm.abort(list[i].k, list[i].op);
            list[i].op = NULL;
        }
    n_list = 0;
}

static enum fl_status shm_open(struct fl_loop *l, const struct link_team *team, struct link **out,
                               struct link_op *ready, struct fl_err *err)
{
    return link_shm.open(l, team, out, ready, err);
}
static enum fl_status shm_share(struct link *k, const struct link_mem *m, struct link_key *out,
                                struct fl_err *e)
{
    return link_shm.share(k, m, out, e);
}
static enum fl_status shm_map(struct link *k, const struct link_key *t, bool w,
                              struct link_mem *out, struct fl_err *err)
{
    return link_shm.map(k, t, w, out, err);
}
static void shm_unmap(struct link *k, struct link_mem *m)
{
    link_shm.unmap(k, m);
}
static bool shm_reaches(const struct link_place *a, const struct link_place *b, struct fl_err *why)
{
    return link_shm.reaches(a, b, why);
}
static uint64_t shm_cost(const struct link_place *a, const struct link_place *b, uint64_t bytes)
{
    return link_shm.cost_ns(a, b, bytes);
}
static enum fl_status shm_ticket(uint8_t out[256], struct fl_err *err)
{
    return link_shm.ticket(out, err);
}
static enum fl_status no_send(struct link *k, unsigned to, struct link_span w, struct link_op *op,
                              struct fl_err *e)
{
    (void)k, (void)to, (void)w, (void)op;
    return fl_fail(e, FL_UNSUPPORTED, "no send");
}
static enum fl_status no_cast(struct link *k, unsigned to, struct link_span w, struct link_op *op,
                              struct fl_err *e)
{
    return no_send(k, to, w, op, e);
}
static unsigned no_progress(struct link *k)
{
    (void)k;
    return 0;
}
static int no_fd(struct link *k)
{
    (void)k;
    return -1;
}
static void shm_close(struct link *k)
{
    link_shm.close(k);
}

const struct link_ops link_stall = {
    .name = "stall",
    .caps = LINK_HOST | LINK_MAP | LINK_PULL | LINK_SEGS | LINK_ALONE,
    .reaches = shm_reaches,
    .cost_ns = shm_cost,
    .ticket = shm_ticket,
    .open = shm_open,
    .share = shm_share,
    .map = shm_map,
    .unmap = shm_unmap,
    .pull = stall_pull,
    .send = no_send,
    .recv = no_send,
    .cast = no_cast,
    .progress = no_progress,
    .event_fd = no_fd,
    .abort = stall_abort,
    .close = shm_close,
};

/* ---- mail: ends of one ticket find each other; the nth send meets the nth receive ---- */

enum { MAIL_ENDS = 64, MAIL_OPS = 64, MAIL_TEAM = 8 };
struct letter {
    struct link_op *op;
    const uint8_t *from;
    uint8_t *to;
    uint64_t bytes;
    unsigned with;
};
struct mail {
    struct link base;
    uint8_t ticket[256];
    unsigned self, n, n_ops;
    bool aborted;
    struct link_op *ready;
    struct letter ops[MAIL_OPS];
};
static struct mail *ends[MAIL_ENDS];
static uint64_t tickets;
static bool cut;

void mail_cut(bool on)
{
    cut = on;
}

unsigned mail_open(void)
{
    unsigned n = 0;

    for (unsigned i = 0; i < MAIL_ENDS; i++)
        n += ends[i] != NULL;
    return n;
}

static enum fl_status mail_ticket(uint8_t out[256], struct fl_err *err)
{
    (void)err;
    memset(out, 0, 256);
    tickets++;
    memcpy(out, &tickets, sizeof(tickets));
    return FL_OK;
}

static struct mail *partner(const struct mail *k, unsigned member)
{
    for (unsigned i = 0; i < MAIL_ENDS; i++)
        if (ends[i] && ends[i]->self == member && !ends[i]->aborted &&
            memcmp(ends[i]->ticket, k->ticket, sizeof(k->ticket)) == 0)
            return ends[i];
    return NULL;
}

static enum fl_status mail_open_link(struct fl_loop *l, const struct link_team *team,
                                     struct link **out, struct link_op *ready, struct fl_err *err)
{
    struct mail *k = calloc(1, sizeof(*k));
    unsigned at = 0;

    while (at < MAIL_ENDS && ends[at])
        at++;
    if (!k || at == MAIL_ENDS || team->n > MAIL_TEAM) {
        free(k);
        return fl_fail(err, FL_EXHAUSTED, "mail: no room");
    }
    *k = (struct mail){ .base = { l }, .self = team->self, .n = team->n, .ready = ready };
    memcpy(k->ticket, team->ticket, sizeof(k->ticket));
    ends[at] = k;
    *out = &k->base;
    for (unsigned i = 0; i < team->n; i++)
        if (!partner(k, i))
            return FL_OK; /* ready when the last one has come */
    for (unsigned i = 0; i < team->n; i++) {
        struct mail *p = partner(k, i);

        op_end(l, p->ready, FL_OK, "");
        p->ready = NULL;
    }
    return FL_OK;
}

static struct letter *first_with(struct mail *k, unsigned with)
{
    for (unsigned i = 0; i < k->n_ops; i++)
        if (k->ops[i].with == with)
            return &k->ops[i];
    return NULL;
}

static void take_out(struct mail *k, struct letter *p, enum fl_status st, const char *why)
{
    struct link_op *op = p->op;

    memmove(p, p + 1, (size_t)(&k->ops[k->n_ops] - (p + 1)) * sizeof(*p));
    k->n_ops--;
    op_end(k->base.loop, op, st, why);
}

/* Delivers what has met: a send to one, or a cast when all have asked for it. */
static void deliver(struct mail *k)
{
    struct mail *root = partner(k, 0);

    for (unsigned i = 1; root && k->n == 2 && i < 2; i++) {
        struct mail *to = partner(k, i);
        struct letter *s = first_with(root, i), *g = to ? first_with(to, 0) : NULL;

        if (s && g && s->bytes == g->bytes) {
            memcpy(g->to, s->from, s->bytes);
            take_out(root, s, FL_OK, "");
            take_out(to, g, FL_OK, "");
            deliver(k);
            return;
        }
    }
    if (!root || k->n == 2)
        return;
    for (unsigned i = 0; i < k->n; i++)
        if (!partner(k, i) || !first_with(partner(k, i), 0))
            return;
    for (unsigned i = k->n; i-- > 0;) {
        struct letter *g = first_with(partner(k, i), 0);

        if (i > 0)
            memcpy(g->to, first_with(root, 0)->from, g->bytes);
        take_out(partner(k, i), g, FL_OK, "");
    }
    deliver(k);
}

static enum fl_status put(struct mail *k, unsigned with, struct link_span span, struct link_op *op,
                          struct fl_err *err)
{
    uint8_t *at = (uint8_t *)span.mem->addr + span.off;

    if (k->aborted || cut)
        return fl_fail(err, FL_UNREACHABLE, "mail: the partner is gone");
    if (k->n_ops == 2) /* so that FL_AGAIN is met too */
        return fl_fail(err, FL_AGAIN, "mail: full");
    k->ops[k->n_ops++] = (struct letter){ op, at, at, span.bytes, with };
    deliver(k);
    return FL_OK;
}

static enum fl_status mail_send(struct link *b, unsigned to, struct link_span what,
                                struct link_op *op, struct fl_err *err)
{
    return put(container_of(b, struct mail, base), to, what, op, err);
}
static enum fl_status mail_cast(struct link *b, unsigned root, struct link_span what,
                                struct link_op *op, struct fl_err *err)
{
    return put(container_of(b, struct mail, base), root, what, op, err);
}

static void mail_abort(struct link *b, struct link_op *quiet)
{
    struct mail *k = container_of(b, struct mail, base);

    k->aborted = true;
    if (k->ready)
        op_end(b->loop, k->ready, FL_CANCELLED, "aborted");
    k->ready = NULL;
    while (k->n_ops)
        take_out(k, &k->ops[0], FL_CANCELLED, "aborted");
    op_end(b->loop, quiet, FL_OK, "");
}

static void mail_close(struct link *b)
{
    for (unsigned i = 0; i < MAIL_ENDS; i++)
        if (ends[i] && &ends[i]->base == b) {
            free(ends[i]);
            ends[i] = NULL;
            return;
        }
}

static bool mail_reaches(const struct link_place *a, const struct link_place *b, struct fl_err *why)
{
    (void)a, (void)b, (void)why;
    return true;
}
static enum fl_status no_share(struct link *k, const struct link_mem *m, struct link_key *out,
                               struct fl_err *e)
{
    (void)k, (void)m, (void)out;
    return fl_fail(e, FL_UNSUPPORTED, "no pages");
}
static enum fl_status no_map(struct link *k, const struct link_key *t, bool w, struct link_mem *o,
                             struct fl_err *e)
{
    (void)k, (void)t, (void)w, (void)o;
    return fl_fail(e, FL_UNSUPPORTED, "no pages");
}
static enum fl_status no_pull(struct link *k, const struct link_mem *theirs,
                              const struct link_mem *mine, const struct link_seg *segs, size_t n,
                              uint64_t (*digests)[2], struct link_op *op, struct fl_err *err)
{
    (void)k, (void)theirs, (void)mine, (void)segs, (void)n, (void)digests, (void)op;
    return fl_fail(err, FL_UNSUPPORTED, "no pages");
}

const struct link_ops link_mail = {
    .name = "mail",
    .caps = LINK_HOST | LINK_SEND | LINK_CAST,
    .reaches = mail_reaches,
    .cost_ns = shm_cost,
    .ticket = mail_ticket,
    .open = mail_open_link,
    .share = no_share,
    .map = no_map,
    .unmap = shm_unmap,
    .pull = no_pull,
    .send = mail_send,
    .recv = mail_send,
    .cast = mail_cast,
    .progress = no_progress,
    .event_fd = no_fd,
    .abort = mail_abort,
    .close = mail_close,
};
