/* transport/xfer/take_check.c - whether what is in is what the source published, and if not, where
 * not
 *
 * A tensor that this rank holds whole is compared here; of one held in part the sum goes to the
 * coordinator, which has those of the other ranks. When a tensor does not agree, the giver digests
 * the same segments in its own memory: the buckets that differ were damaged on the way or here; if
 * none differs, the source's memory is not what it published. Replicas of part of a tensor are in
 * nobody's sum and are compared with the giver's always. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/proto/methods.h"
#include "transport/xfer/take_priv.h"

static void check_next(struct take *t);

uint64_t take_verify_ns(const struct take *t)
{
    return t->verify_ns;
}

static void verified(struct take *t)
{
    t->verify_ns += fl_clock_boot_ns() - t->verify_from_ns;
}

static void say_bad(struct take *t, enum fl_status st, const char *what)
{
    struct take_bad *b = &t->found;
    const struct xfer_plan *p = t->o.part;
    const char *name = b->n_tensors ? p->tensors[b->tensors[0]].name : "?";
    char bucket[48] = "";

    t->over = t->done = true;
    verified(t);
    if (b->n_buckets)
        snprintf(bucket, sizeof(bucket), ", bucket %u of %zu", b->buckets[0] + 1, p->n_buckets);
    fl_fail(&b->why, st, "%s%s of epoch %u.%u, %s: %s (%u buckets, %u tensors)", t->o.name, bucket,
            t->o.epoch.attempt, t->o.epoch.seq, name, what, b->n_buckets, b->n_tensors);
    t->o.user->bad(t->o.arg, b);
}

static void note_tensor(struct take *t, uint32_t tensor)
{
    for (uint32_t i = 0; i < t->found.n_tensors; i++)
        if (t->found.tensors[i] == tensor)
            return;
    if (t->found.n_tensors < XFER_NAMED_BAD)
        t->found.tensors[t->found.n_tensors++] = tensor;
}

static void note_bucket(struct take *t, uint32_t bucket)
{
    if (t->found.n_buckets < XFER_NAMED_BAD)
        t->found.buckets[t->found.n_buckets++] = bucket;
}

static bool have_parts(const struct take *t)
{
    for (size_t i = 0; i < t->o.part->n_tensors; i++)
        if (t->once_bytes[i] && t->sum_bytes[i] != xfer_tensor_bytes(&t->o.part->tensors[i]))
            return true;
    return false;
}

static void agreed(struct take *t)
{
    verified(t);
    t->done = t->verdict_given || !have_parts(t);
    t->o.user->all_in(t->o.arg, t->done);
}

/* ---- the giver's digests of suspect buckets ---- */

static void check_over(struct take *t)
{
    if (t->found.n_buckets) {
        say_bad(t, FL_CORRUPT, "what arrived is not what was sent");
    } else if (t->locating) {
        t->found.source_at_fault = true;
        say_bad(t, FL_CORRUPT, "the source's memory is not what it published");
    } else {
        agreed(t);
    }
}

static void check_unknown(struct take *t)
{
    /* the giver cannot be asked: everything that may be wrong counts as wrong */
    for (uint32_t b = t->check_at; b < t->o.part->n_buckets; b++)
        if (t->suspect[b])
            note_bucket(t, b);
    say_bad(t, FL_CORRUPT, "digests differ and the source cannot be asked where");
}

static void check_on_digests(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                             const struct fl_err *err)
{
    struct take *t = container_of(op, struct take, check_call);
    const struct xfer_bucket *b = &t->o.part->buckets[t->check_at];

    (void)err;
    t->check_calls = false;
    if (t->aborting) {
        take_settle(t);
        return;
    }
    if (st != FL_OK || reply->head.blob_bytes != b->n_segs * sizeof(t->digests[0])) {
        check_unknown(t);
        return;
    }
    for (uint32_t s = 0; s < b->n_segs; s++)
        if (memcmp((const char *)reply->blob + s * sizeof(t->digests[0]),
                   t->digests[b->first_seg + s], sizeof(t->digests[0])) != 0)
            note_tensor(t, t->o.part->segs[b->first_seg + s].tensor);
    if (memcmp(reply->blob, t->digests[b->first_seg], reply->head.blob_bytes) != 0)
        note_bucket(t, t->check_at);
    t->check_at++;
    check_next(t);
}

static void check_ask(struct take *t, struct call_peer *peer)
{
    const struct xfer_bucket *b = &t->o.part->buckets[t->check_at];
    Fl__XferCheck c = FL__XFER_CHECK__INIT;
    Fl__XferEpoch epoch;
    struct call_args a;

    take_begin_call(t, &epoch, &a);
    a.due_ns += b->bytes; /* 1 GB/s at the worst */
    a.method = FL_XFER_CHECK;
    a.blob =
        (struct fl_bytes){ &t->o.part->segs[b->first_seg], b->n_segs * sizeof(struct link_seg) };
    c.set = (char *)(uintptr_t)t->o.set;
    c.epoch = &epoch;
    c.plan = msg_hash(t->o.plan);
    c.mem = b->from_mem;
    t->check_call.done = check_on_digests;
    if (take_call(peer, &c.base, &a, &t->check_call, &t->check_calls, NULL) != FL_OK)
        check_unknown(t);
}

static void check_on_dialed(struct xfer_dial *d, enum fl_status st, struct call_peer *peer,
                            const struct fl_err *err)
{
    struct take *t = container_of(d, struct take, check_dial);

    (void)err;
    t->check_dials = false;
    if (t->aborting)
        take_settle(t);
    else if (st != FL_OK)
        check_unknown(t);
    else
        check_ask(t, peer);
}

static void check_next(struct take *t)
{
    const struct xfer_plan *p = t->o.part;

    while (t->check_at < p->n_buckets && !t->suspect[t->check_at])
        t->check_at++;
    if (t->check_at == p->n_buckets) {
        check_over(t);
        return;
    }
    t->check_dial.done = check_on_dialed;
    t->check_dials = true;
    t->o.port->dialer.dial(t->o.port->dialer.arg,
                           &t->o.teams[p->buckets[t->check_at].edge].members[0], &t->check_dial);
}

void take_check_cancel(struct take *t)
{
    if (t->check_dials)
        t->o.port->dialer.undial(t->o.port->dialer.arg, &t->check_dial);
    t->check_dials = false;
    if (t->check_calls)
        call_cancel(&t->check_call);
}

/* ---- sums ---- */

static void add_sums(struct take *t)
{
    const struct xfer_plan *p = t->o.part;

    memset(t->sum, 0, p->n_tensors * sizeof(*t->sum));
    memset(t->once, 0, p->n_tensors * sizeof(*t->once));
    memset(t->sum_bytes, 0, p->n_tensors * sizeof(*t->sum_bytes));
    memset(t->once_bytes, 0, p->n_tensors * sizeof(*t->once_bytes));
    for (size_t i = 0; i < p->n_segs; i++) {
        const struct link_seg *s = &p->segs[i];

        t->sum[s->tensor][0] += t->digests[i][0];
        t->sum[s->tensor][1] += t->digests[i][1];
        t->sum_bytes[s->tensor] += (uint64_t)s->rows * s->run_bytes;
        if (!p->once[i])
            continue;
        t->once[s->tensor][0] += t->digests[i][0];
        t->once[s->tensor][1] += t->digests[i][1];
        t->once_bytes[s->tensor] += (uint64_t)s->rows * s->run_bytes;
    }
}

/* Buckets whose segments cannot be vouched for: of wrong tensors, or replicas that no sum
 * counts. */
static bool mark_suspects(struct take *t)
{
    const struct xfer_plan *p = t->o.part;
    bool any = false;

    for (uint32_t b = 0; b < p->n_buckets; b++) {
        t->suspect[b] = false;
        for (uint32_t k = 0; k < p->buckets[b].n_segs; k++) {
            size_t i = p->buckets[b].first_seg + k;
            uint32_t tensor = p->segs[i].tensor;
            bool part = t->sum_bytes[tensor] != xfer_tensor_bytes(&p->tensors[tensor]);
            /* its files carry checksums */
            bool disk = p->edges[p->buckets[b].edge].link == XFER_LINK_DISK;

            if (t->locating ? t->wrong[tensor] : part && !p->once[i] && !disk)
                t->suspect[b] = any = true;
        }
    }
    return any;
}

static void locate(struct take *t)
{
    t->locating = true;
    t->check_at = 0;
    for (uint32_t i = 0; i < t->o.part->n_tensors; i++)
        if (t->wrong[i])
            note_tensor(t, i);
    (void)mark_suspects(t);
    if (t->o.part->mode == XFER_DISK_DELTA)
        check_unknown(t);
    else
        check_next(t);
}

static void compare_sums(struct take *t)
{
    const struct xfer_plan *p = t->o.part;
    bool any = false;

    add_sums(t);
    for (size_t i = 0; i < p->n_tensors; i++) {
        bool whole = t->sum_bytes[i] && t->sum_bytes[i] == xfer_tensor_bytes(&p->tensors[i]);

        t->wrong[i] = whole && memcmp(t->sum[i], t->o.expect[i], sizeof(t->sum[i])) != 0;
        any |= t->wrong[i];
    }
    if (any)
        locate(t);
    else if (mark_suspects(t))
        check_next(t);
    else
        agreed(t);
}

/* ---- --check-weight-update-equal: all bytes once more ---- */

static void equal_work(struct fl_work *w)
{
    struct take *t = container_of(w, struct take, equal);
    const struct xfer_plan *p = t->o.part;

    for (uint32_t i = 0; i < p->n_buckets; i++) {
        const struct xfer_bucket *b = &p->buckets[i];
        const struct take_edge *te = &t->edges[b->edge];
        bool share = p->mode == XFER_SHARE;
        const struct link_mem *mem = share ? take_mapped(te, b->from_mem) : &t->o.slot;
        uint64_t(*again)[2] = calloc(b->n_segs + 1, sizeof(*again));

        if (!again ||
            link_mem_digest(mem, &p->segs[b->first_seg], b->n_segs, share, again, NULL) != FL_OK) {
            t->equal_differs = t->suspect[i] = true; /* not read is not equal */
            free(again);
            continue;
        }
        t->suspect[i] =
            !share && memcmp(again, t->digests[b->first_seg], b->n_segs * sizeof(*again)) != 0;
        t->equal_differs |= t->suspect[i];
        memcpy(t->digests[b->first_seg], again, b->n_segs * sizeof(*again));
        free(again);
    }
}

static void equal_done(struct fl_work *w, enum fl_status st)
{
    struct take *t = container_of(w, struct take, equal);

    t->in_work--;
    if (t->aborting) {
        take_settle(t);
    } else if (st != FL_OK || t->equal_differs) {
        for (uint32_t i = 0; i < t->o.part->n_buckets; i++)
            if (t->suspect[i])
                note_bucket(t, i);
        say_bad(t, FL_CORRUPT, "what was written is not what had arrived");
    } else {
        compare_sums(t);
    }
}

void take_compare(struct take *t)
{
    t->verify_from_ns = fl_clock_boot_ns(); /* the loop's stands within a turn */
    if (t->o.check_equal) {
        t->equal = (struct fl_work){ .work = equal_work, .done = equal_done };
        t->in_work++;
        fl_work_start(t->o.port->loop, &t->equal);
    } else if (t->o.part->mode == XFER_SHARE) {
        /* the writer's own digest, and its version word: nothing was copied */
        t->verdict_given = true;
        agreed(t);
    } else {
        compare_sums(t);
    }
}

void take_verdict(struct take *t, const uint32_t *bad_tensors, size_t n)
{
    if (t->over || t->aborting)
        return;
    t->verify_from_ns = fl_clock_boot_ns();
    t->verdict_given = true;
    for (size_t i = 0; i < n; i++)
        if (bad_tensors[i] < t->o.part->n_tensors)
            t->wrong[bad_tensors[i]] = true;
    if (n)
        locate(t);
    else
        agreed(t);
}

enum fl_status take_parts(const struct take *t, struct fl_bytes *out, struct fl_err *err)
{
    const struct xfer_plan *p = t->o.part;
    uint64_t *at, *list = malloc((p->n_tensors + 1) * 24);

    if (!list)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the sums of %zu tensors", p->n_tensors);
    at = list;
    for (size_t i = 0; i < p->n_tensors; i++)
        if (t->once_bytes[i] && t->sum_bytes[i] != xfer_tensor_bytes(&p->tensors[i])) {
            at[0] = i;
            at[1] = t->once[i][0];
            at[2] = t->once[i][1];
            at += 3;
        }
    *out = (struct fl_bytes){ list, (size_t)(at - list) * sizeof(*at) };
    return FL_OK;
}
