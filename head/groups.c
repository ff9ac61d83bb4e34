#include <inttypes.h>
#include <stdlib.h>

#include "common/base/log.h"
#include "common/base/str.h"
#include "head/state.h"

/* ---- flags ---- */

static const struct {
    const char *name;
    size_t at;
    bool is_switch;
} flag_table[] = {
    { "actor-num-nodes", offsetof(struct layout_flags, actor_nodes), false },
    { "actor-num-gpus-per-node", offsetof(struct layout_flags, actor_gpus_per_node), false },
    { "rollout-num-gpus", offsetof(struct layout_flags, rollout_gpus), false },
    { "rollout-num-gpus-per-engine", offsetof(struct layout_flags, gpus_per_engine), false },
    { "num-gpus-per-node", offsetof(struct layout_flags, gpus_per_node), false },
    { "eval-num-gpus", offsetof(struct layout_flags, eval_gpus), false },
    { "eval-num-gpus-per-engine", offsetof(struct layout_flags, gpus_per_eval_engine), false },
    { "colocate", offsetof(struct layout_flags, colocate), true },
    { "use-critic", offsetof(struct layout_flags, critic), true },
    { "debug-train-only", offsetof(struct layout_flags, debug_train_only), true },
    { "debug-rollout-only", offsetof(struct layout_flags, debug_rollout_only), true },
};

static enum fl_status flag_read(const Fl__Flag *f, struct layout_flags *out, struct fl_err *err)
{
    const char *name = f->name + strspn(f->name, "-");

    for (size_t i = 0; i < FL_LEN(flag_table); i++) {
        char *at = (char *)out + flag_table[i].at;
        int64_t v;

        if (strcmp(name, flag_table[i].name) != 0)
            continue;
        if (flag_table[i].is_switch) {
            *(bool *)at = !f->value || !f->value[0] || strcmp(f->value, "true") == 0 ||
                          strcmp(f->value, "1") == 0;
            return FL_OK;
        }
        if (!f->value)
            return fl_fail(err, FL_INVALID, "--%s needs a number", name);
        if (fl_parse_i64(f->value, 0, 1 << 20, &v, err) != FL_OK)
            return fl_wrap(err, FL_INVALID, "--%s", name);
        *(int32_t *)(void *)at = (int32_t)v;
        return FL_OK;
    }
    return fl_fail(
        err, FL_INVALID,
        "--%s is no flag of a placement; furlong train --help lists them under placement", name);
}

enum fl_status flags_read(const Fl__GroupRec *g, struct layout_flags *out, struct fl_err *err)
{
    *out = (struct layout_flags){ -1, -1, -1, -1, -1, -1, -1, false, false, false, false };
    for (size_t i = 0; i < g->n_flags; i++)
        FL_TRY(flag_read(g->flags[i], out, err));
    return FL_OK;
}

/* ---- making and ending ---- */

enum fl_status group_make(struct head *h, struct job *j, const Fl__GroupRec *like,
                          struct group **out, struct fl_err *err)
{
    Fl__GroupRec rec = *like;
    struct fl_group_id id;

    FL_TRY(fl_random(&id, sizeof(id), err));
    rec.id = BYTES_OF(id);
    rec.job = j->rec->id;
    rec.state = FL__GROUP_STATE__GROUP_PENDING;
    FL_TRY(head_record(h, REC_GROUP, &rec, NULL, err));
    *out = group_of(h, &rec.id);
    head_kick(h);
    return FL_OK;
}

enum fl_status group_end(struct head *h, struct group *g, struct after *then, struct fl_err *err)
{
    Fl__GroupRec rec = *g->rec;

    rec.state = FL__GROUP_STATE__GROUP_ENDING;
    FL_TRY(head_record(h, REC_GROUP, &rec, then, err));
    group_asks_answer(g, FL_CANCELLED, NULL);
    head_kick(h);
    return FL_OK;
}

void group_asks_answer(struct group *g, enum fl_status st, const struct fl_err *err)
{
    struct ask *a, *next;

    DL_FOREACH_SAFE (g->asks, a, next) {
        DL_DELETE(g->asks, a);
        if (st == FL_OK && g->rec->layout)
            reply_msg(a->req, g->rec->layout);
        else if (err)
            call_fail(a->req, err);
        else
            reply_refuse(a->req, st == FL_OK ? FL_INTERNAL : st, "the placement group has ended");
        free(a);
    }
}

/* ---- leases ---- */

struct lot { /* leases of one node that one message is about */
    struct head *head;
    struct fl_node_id node;
    bool release;
    size_t n;
    uint64_t ids[];
};

static void freed(struct head *h, uint64_t *ids, size_t n)
{
    Fl__LeaseIdsRec rec = FL__LEASE_IDS_REC__INIT;
    struct fl_err err;

    rec.ids = ids;
    rec.n_ids = n;
    if (n && head_record(h, REC_LEASES_FREED, &rec, NULL, &err) != FL_OK)
        fl_warn("leases cannot be written off yet why=\"%s\"", err.text);
}

static void lot_answered(struct send *t, enum fl_status st, const struct wire_msg *reply,
                         const struct fl_err *err)
{
    struct lot *lot = t->arg;
    struct head *h = t->head;

    (void)reply;
    for (size_t i = 0; i < lot->n; i++) {
        struct lease *l = lease_of(h, lot->ids[i]);

        if (l) {
            l->calling = false;
            l->acked |= st == FL_OK && !lot->release;
        }
    }
    /* Not known there: a release has come about, and a commit came too late. */
    if ((st == FL_OK && lot->release) || st == FL_NOT_FOUND || st == FL_STALE)
        freed(h, lot->ids, lot->n);
    else if (st != FL_OK)
        fl_info("leases not %s yet why=\"%s\"", lot->release ? "released" : "committed", err->text);
    if (st != FL_OK)
        head_wake_at(h, fl_loop_now_ns(h->loop) + HEAD_RETRY_MS * 1000000ull);
    free(lot);
    head_kick(h);
}

static bool to_send(const struct lease *l, bool release)
{
    Fl__LeaseState want = release ? FL__LEASE_STATE__RELEASING : FL__LEASE_STATE__COMMITTED;

    return l->rec->state == want && !l->calling && (release || !l->acked);
}

static void send_lot(struct head *h, struct node *n, bool release)
{
    Fl__LeaseIds m = FL__LEASE_IDS__INIT;
    struct lease *l;
    struct lot *lot;
    struct fl_err err;
    size_t held;

    DL_COUNT2(n->held, l, held, next_held);
    lot = must(malloc(sizeof(*lot) + held * sizeof(lot->ids[0])));

    *lot = (struct lot){ .head = h, .node = n->id, .release = release };
    EACH_HELD (n, l) {
        struct group *g = group_of(h, &l->rec->group);

        if (to_send(l, release) && !(g && g->placing))
            lot->ids[lot->n++] = l->id;
    }
    m.ids = lot->ids;
    m.n_ids = lot->n;
    if (!lot->n || node_send(n, release ? FL_LEASE_RELEASE : FL_LEASE_COMMIT, &m, HEAD_SEND_MS,
                             &(struct send){ .done = lot_answered, .arg = lot }, &err) != FL_OK) {
        free(lot);
        return;
    }
    for (size_t i = 0; i < lot->n; i++)
        lease_of(h, lot->ids[i])->calling = true;
}

void leases_settle(struct head *h)
{
    struct node *n, *tmp;
    struct lease *l, *ltmp;
    bool any = false;

    HASH_ITER (hh, h->leases, l, ltmp)
        any |= to_send(l, true) || to_send(l, false);
    if (!any)
        return;
    HASH_ITER (hh, h->nodes, n, tmp)
        if (n->state == NODE_READY && n->up) {
            send_lot(h, n, true);
            send_lot(h, n, false);
        }
}

/* To RELEASING, in the journal; true when the group holds none any more. */
static bool release_all(struct head *h, struct group *g, bool prepared_only)
{
    struct lease *l, *tmp;
    bool none = true;

    HASH_ITER (hh, h->leases, l, tmp) {
        Fl__Lease rec = *l->rec;

        if (!same_bytes(&l->rec->group, &g->rec->id) ||
            (prepared_only && l->rec->state == FL__LEASE_STATE__COMMITTED))
            continue;
        none = false;
        rec.has_state = true;
        rec.state = FL__LEASE_STATE__RELEASING;
        if (l->rec->state != FL__LEASE_STATE__RELEASING)
            (void)head_record(h, REC_LEASE, &rec, NULL, NULL); /* tried again at the next turn */
    }
    return none;
}

/* ---- what is to be done ---- */

static bool seats_ended(struct head *h, const struct group *g)
{
    struct seat *s, *tmp;

    HASH_ITER (hh, h->seats, s, tmp)
        if (s->rec->has_group && same_bytes(&s->rec->group, &g->rec->id) &&
            (s->rec->state != FL__SEAT_STATE__SEAT_CLOSED || s->rec->ending))
            return false;
    return true;
}

static void settle_ending(struct head *h, struct group *g)
{
    Fl__GroupRec rec = *g->rec;
    struct fl_err err;

    if (g->placing || !seats_ended(h, g) || !release_all(h, g, false))
        return;
    rec.state = FL__GROUP_STATE__GROUP_ENDED;
    (void)head_record(h, REC_GROUP, &rec, NULL, &err); /* g is gone, or tried again */
}

/* A head that ended between prepare and commit: nothing was decided. */
static void settle_preparing(struct head *h, struct group *g)
{
    Fl__GroupRec rec = *g->rec;
    struct fl_err err;

    if (g->placing || !release_all(h, g, true))
        return;
    rec.state = g->roles ? FL__GROUP_STATE__GROUP_PLACED : FL__GROUP_STATE__GROUP_PENDING;
    if (rec.state == FL__GROUP_STATE__GROUP_PENDING && g->rec->n_flags) {
        rec.layout = NULL; /* made again from the flags and the nodes there are then */
        rec.n_bundles = 0;
    }
    (void)head_record(h, REC_GROUP, &rec, NULL, &err);
}

static void settle_asks(struct head *h, struct group *g, uint64_t now_ns)
{
    struct ask *a, *next;
    struct fl_err err;
    bool late = false;

    DL_FOREACH_SAFE (g->asks, a, next) {
        bool tried = g->tried == h->resources || h->state == HEAD_RECOVERING;
        bool due = (a->once ? tried : a->due_ns && a->due_ns <= now_ns) && !g->placing;

        if (!call_unwanted(a->req) && !due) {
            if (a->due_ns > now_ns)
                head_wake_at(h, a->due_ns);
            continue;
        }
        late |= !call_unwanted(a->req);
        DL_DELETE(g->asks, a);
        reply_refuse(a->req, FL_EXHAUSTED, "no room for the placement %s: %s",
                     h->state == HEAD_RECOVERING ? "while the head recovers" : "now",
                     g->why[0] ? g->why : "its nodes have not reported yet");
        free(a);
    }
    if (late && !g->asks && g->rec->state == FL__GROUP_STATE__GROUP_PENDING)
        (void)group_end(h, g, NULL, &err);
}

static void settle_group(struct head *h, struct group *g, uint64_t now_ns)
{
    switch (g->rec->state) {
    case FL__GROUP_STATE__GROUP_PREPARING:
        settle_preparing(h, g);
        return;
    case FL__GROUP_STATE__GROUP_ENDING:
        settle_ending(h, g);
        return;
    case FL__GROUP_STATE__GROUP_PENDING:
    case FL__GROUP_STATE__GROUP_PLACED:
        break;
    default:
        return;
    }
    bool wants = g->rec->state == FL__GROUP_STATE__GROUP_PENDING || bundle_lost(g->rec);
    if (wants && !g->placing && h->state == HEAD_READY && g->tried != h->resources) {
        if (g->retry_ns > now_ns)
            head_wake_at(h, g->retry_ns);
        else if (release_all(h, g, true)) /* what an earlier try left behind goes first */
            place_group(g);
    }
    settle_asks(h, g, now_ns);
}

void groups_settle(struct head *h)
{
    uint64_t now = fl_loop_now_ns(h->loop);
    struct group *g, *tmp;

    HASH_ITER (hh, h->groups, g, tmp)
        settle_group(h, g, now);
}
