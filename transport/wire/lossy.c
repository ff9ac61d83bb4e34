#include "transport/wire/lossy.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/fault.h"
#include "transport/wire/stream_priv.h"

enum { LATE_BYTES = 1 << 20 };

struct late { /* bytes on their way */
    struct late *next;
    uint64_t due_ns;
    size_t len, off;
    uint8_t data[];
};
struct lossy_line {
    struct wire_line k;
    struct wire_line *inner;
    struct lossy_plan plan;
    uint64_t dice, out, in; /* bytes so far */
    struct fl_task poke;
    unsigned poke_what;
    struct fl_timer late;
    struct late *first, *last;
    size_t late_bytes;
};

static uint64_t roll(struct lossy_line *k) /* splitmix64 */
{
    uint64_t z = k->dice += 0x9e3779b97f4a7c15u;

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static void poke(struct lossy_line *k, unsigned what)
{
    k->poke_what |= what;
    fl_post(k->k.loop, &k->poke);
}

static void poked(struct fl_task *t)
{
    struct lossy_line *k = container_of(t, struct lossy_line, poke);
    unsigned what = k->poke_what;

    k->poke_what = 0;
    k->k.user->ready(k->k.arg, what);
}

/* The first bytes of iov, as many as chance and cut leave. False: not now. */
static bool shorten(struct lossy_line *k, const struct iovec *iov, unsigned *n, bool cut,
                    uint64_t left, struct iovec *out)
{
    uint64_t most = UINT64_MAX;
    unsigned m = 0;

    if (k->plan.again_pct && roll(k) % 100 < k->plan.again_pct)
        return false;
    if (k->plan.chunk_max)
        most = 1 + roll(k) % k->plan.chunk_max;
    if (cut && left < most)
        most = left;
    for (unsigned i = 0; i < *n && most; i++) {
        out[m] = iov[i];
        if (out[m].iov_len > most)
            out[m].iov_len = most;
        most -= out[m].iov_len;
        if (out[m].iov_len)
            m++;
    }
    *n = m;
    return true;
}

static enum fl_status cut(struct fl_err *err)
{
    return fl_fail(err, FL_UNREACHABLE, "the other side hung up");
}

/* A copy with the planned bit turned round, or late, or both. */
static struct late *copy(struct lossy_line *k, const struct iovec *iov, unsigned n)
{
    size_t len = 0;
    struct late *c;

    for (unsigned i = 0; i < n; i++)
        len += iov[i].iov_len;
    c = calloc(1, sizeof(*c) + len);
    if (!c)
        return NULL;
    for (unsigned i = 0; i < n; i++) {
        memcpy(c->data + c->len, iov[i].iov_base, iov[i].iov_len);
        c->len += iov[i].iov_len;
    }
    if (k->plan.flip_out && k->plan.flip_out_at >= k->out && k->plan.flip_out_at < k->out + len)
        c->data[k->plan.flip_out_at - k->out] ^= (uint8_t)(1u << (k->plan.seed % 8));
    return c;
}

static void arrive(struct lossy_line *k);

static enum fl_status lossy_write(struct wire_line *line, const struct iovec *iov, unsigned n,
                                  const int *fds, unsigned n_fds, size_t *wrote, struct fl_err *err)
{
    struct lossy_line *k = container_of(line, struct lossy_line, k);
    struct iovec part[LINE_IOV];
    struct late *c = NULL;
    enum fl_status st;

    if (k->plan.cut_out && k->out >= k->plan.cut_out_at)
        return cut(err);
    if (!shorten(k, iov, &n, k->plan.cut_out, k->plan.cut_out_at - k->out, part)) {
        poke(k, LINE_OUT);
        return FL_AGAIN;
    }
    if ((k->plan.flip_out || k->plan.delay_ms) && !(c = copy(k, part, n)))
        return fl_fail(err, FL_EXHAUSTED, "no memory for bytes that arrive late");
    if (k->plan.delay_ms && !n_fds) {
        if (k->late_bytes > LATE_BYTES) {
            free(c);
            return FL_AGAIN; /* arrive() says when */
        }
        c->due_ns = fl_loop_now_ns(line->loop) + k->plan.delay_ms * 1000000ull;
        if (k->last)
            k->last->next = c;
        else
            k->first = c;
        k->last = c;
        k->late_bytes += c->len;
        *wrote = c->len;
        if (!k->late.loop)
            fl_timer_arm(line->loop, &k->late, k->first->due_ns);
    } else {
        struct iovec one = { c ? c->data : NULL, c ? c->len : 0 };

        st = k->inner->ops->write(k->inner, c ? &one : part, c ? 1 : n, fds, n_fds, wrote, err);
        free(c);
        if (st != FL_OK)
            return st;
    }
    k->out += *wrote;
    return FL_OK;
}

static enum fl_status lossy_read(struct wire_line *line, const struct iovec *iov, unsigned n,
                                 int fds[LINE_FDS], unsigned *n_fds, size_t *got,
                                 struct fl_err *err)
{
    struct lossy_line *k = container_of(line, struct lossy_line, k);
    struct iovec part[LINE_IOV];

    if (k->plan.cut_in && k->in >= k->plan.cut_in_at)
        return cut(err);
    if (!shorten(k, iov, &n, k->plan.cut_in, k->plan.cut_in_at - k->in, part)) {
        poke(k, LINE_IN);
        return FL_AGAIN;
    }
    FL_TRY(k->inner->ops->read(k->inner, part, n, fds, n_fds, got, err));
    k->in += *got;
    if (k->plan.chunk_max || k->plan.cut_in)
        poke(k, LINE_IN); /* there may be more, or the cut is due */
    return FL_OK;
}

static void lossy_drop(struct wire_line *line)
{
    struct lossy_line *k = container_of(line, struct lossy_line, k);

    if (k->inner)
        k->inner->ops->drop(k->inner);
    fl_task_cancel(line->loop, &k->poke);
    fl_timer_cancel(&k->late);
    while (k->first) {
        struct late *c = k->first;

        k->first = c->next;
        free(c);
    }
    free(k);
}

/* What was late and is due now goes over to the inner line. */
static void arrive(struct lossy_line *k)
{
    bool was_full = k->late_bytes > LATE_BYTES;
    enum fl_status st = FL_OK;
    struct fl_err err;

    while (k->first && k->first->due_ns <= fl_loop_now_ns(k->k.loop) && st == FL_OK) {
        struct late *c = k->first;
        struct iovec iov = { c->data + c->off, c->len - c->off };
        size_t wrote = 0;

        st = k->inner->ops->write(k->inner, &iov, 1, NULL, 0, &wrote, &err);
        c->off += wrote;
        k->late_bytes -= wrote;
        if (c->off < c->len)
            continue;
        k->first = c->next;
        if (!k->first)
            k->last = NULL;
        free(c);
    }
    if (k->first && k->first->due_ns > fl_loop_now_ns(k->k.loop))
        fl_timer_arm(k->k.loop, &k->late, k->first->due_ns);
    if (st != FL_OK && st != FL_AGAIN)
        k->k.user->ready(k->k.arg, LINE_IN); /* reading tells how it broke */
    else if (was_full && k->late_bytes <= LATE_BYTES)
        k->k.user->ready(k->k.arg, LINE_OUT);
}

static void late_fire(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    arrive(container_of(t, struct lossy_line, late));
}

static const struct line_ops lossy_ops = { .write = lossy_write,
                                           .read = lossy_read,
                                           .drop = lossy_drop };

/* ---- the inner line's user */

static void inner_up(void *arg)
{
    struct lossy_line *k = arg;

    k->k.caps = k->inner->caps;
    k->k.user->up(k->k.arg);
}

static void inner_ready(void *arg, unsigned what)
{
    struct lossy_line *k = arg;

    if ((what & LINE_OUT) && k->first) {
        arrive(k); /* may end k: reading has its own readiness */
        if (what & LINE_IN)
            poke(k, LINE_IN);
        return;
    }
    k->k.user->ready(k->k.arg, what);
}

static void inner_down(void *arg, const struct fl_err *why)
{
    struct lossy_line *k = arg;

    k->k.user->down(k->k.arg, why);
}

static const struct line_user inner_user = { .up = inner_up,
                                             .ready = inner_ready,
                                             .down = inner_down };

static struct lossy_line *line_create(struct fl_loop *l, const struct lossy_plan *plan)
{
    struct lossy_line *k = calloc(1, sizeof(*k));

    if (!k)
        return NULL;
    k->k = (struct wire_line){ .ops = &lossy_ops, .loop = l };
    k->plan = *plan;
    k->dice = plan->seed;
    k->poke.run = poked;
    k->late.fire = late_fire;
    if (plan->spoil && *plan->spoil == 0)
        k->plan.cut_out = k->plan.cut_in = k->plan.flip_out = false;
    else if (plan->spoil)
        --*plan->spoil;
    return k;
}

static enum fl_status need_plan(const struct stream_to *to, struct fl_err *err)
{
    if (!to->lossy || !to->lossy->over)
        return fl_fail(err, FL_INVALID, "stream_lossy to %s without a plan", to->target);
    return FL_OK;
}

static enum fl_status lossy_dial(struct fl_loop *l, const struct stream_to *to,
                                 const struct line_user *user, void *arg, struct wire_line **out,
                                 struct fl_err *err)
{
    struct lossy_line *k;
    enum fl_status st;

    FL_TRY(need_plan(to, err));
    k = line_create(l, to->lossy);
    if (!k)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a connection to %s", to->target);
    k->k.user = user;
    k->k.arg = arg;
    st = to->lossy->over->carrier->dial(l, to, &inner_user, k, &k->inner, err);
    if (st != FL_OK) {
        free(k);
        return st;
    }
    *out = &k->k;
    return FL_OK;
}

struct lossy_port {
    struct wire_port p;
    struct wire_port *inner;
    struct fl_loop *loop;
    struct lossy_plan plan;
};

static void inner_arrived(void *arg, struct wire_line *inner)
{
    struct lossy_port *p = arg;
    struct lossy_line *k = line_create(p->loop, &p->plan);

    if (!k) {
        inner->ops->drop(inner);
        return;
    }
    k->inner = inner;
    k->k.caps = inner->caps;
    memcpy(k->k.peer, inner->peer, sizeof(k->k.peer));
    inner->user = &inner_user;
    inner->arg = k;
    p->p.arrived(p->p.arg, &k->k);
}

static void lossy_close(struct wire_port *port)
{
    struct lossy_port *p = container_of(port, struct lossy_port, p);

    p->inner->ops->close(p->inner);
    free(p);
}

static void lossy_pause(struct wire_port *port, bool on)
{
    struct lossy_port *p = container_of(port, struct lossy_port, p);

    p->inner->ops->pause(p->inner, on);
}

static enum fl_status lossy_listen(struct fl_loop *l, const struct stream_to *at, bool has_key,
                                   void (*arrived)(void *arg, struct wire_line *k_take), void *arg,
                                   struct wire_port **out, struct fl_err *err)
{
    static const struct wire_port_ops ops = { .close = lossy_close, .pause = lossy_pause };
    struct lossy_port *p;
    enum fl_status st;

    FL_TRY(need_plan(at, err));
    p = calloc(1, sizeof(*p));
    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory to listen at %s", at->target);
    p->p = (struct wire_port){ .ops = &ops, .arrived = arrived, .arg = arg };
    p->loop = l;
    p->plan = *at->lossy;
    st = at->lossy->over->carrier->listen(l, at, has_key, inner_arrived, p, &p->inner, err);
    if (st != FL_OK) {
        free(p);
        return st;
    }
    memcpy(p->p.at, p->inner->at, sizeof(p->p.at));
    *out = &p->p;
    return FL_OK;
}

static const struct wire_carrier lossy_carrier = { .dial = lossy_dial, .listen = lossy_listen };
const struct stream_ops stream_lossy = {
    .name = "lossy",
    .caps = STREAM_FDS | STREAM_LOCAL,
    .send = wire_send,
    .close = wire_close,
    .carrier = &lossy_carrier,
};
