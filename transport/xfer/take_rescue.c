/* transport/xfer/take_rescue.c - an edge whose team broke is pulled by its taker alone
 *
 * A broadcast ends for all when one of them dies. Whoever lives aborts, waits until nothing touches
 * its slot any more, and pulls the buckets that it lacks over the first link that reaches the giver
 * by itself; those that are in stay in. */
#include "common/base/log.h"
#include "transport/xfer/take_priv.h"

static const struct link_ops *other_way(const struct take_edge *te)
{
    const struct xfer_port *port = te->take->o.port;
    const struct link_ops *best = NULL;
    const struct link_place *from = &te->team->places[0], *to = &te->team->places[te->team->self];

    for (size_t i = 0; i < port->n_links; i++) {
        const struct link_ops *k = port->links[i];

        if ((k->caps & (LINK_PULL | LINK_ALONE)) != (LINK_PULL | LINK_ALONE) ||
            !k->reaches(from, to, NULL))
            continue;
        if (!best || k->cost_ns(from, to, 1 << 30) < best->cost_ns(from, to, 1 << 30))
            best = k;
    }
    return best;
}

bool take_rescue(struct take_edge *te, const struct fl_err *why)
{
    struct take *t = te->take;
    const struct link_ops *ops = take_pulls(te) ? NULL : other_way(te);

    if (!ops || t->over || t->aborting)
        return false;
    fl_warn("weights go another way member=\"%s\" epoch=%u.%u in=%u of=%u from=%s to=%s why=\"%s\"",
            t->o.name, t->o.epoch.attempt, t->o.epoch.seq, te->n_in, te->e->n_buckets,
            te->ops->name, ops->name, why->text);
    te->falling = true;
    te->pair[0] = te->team->places[0];
    te->pair[1] = te->team->places[te->team->self];
    fl_timer_cancel(&te->again);
    te->ops = ops;
    line_abort(te->reach->line);
    return true;
}

void take_rescue_go(struct take_edge *te)
{
    struct take *t = te->take;
    struct reach *spent = te->reach;
    struct fl_err err = { 0 };

    if (te->in_flight || spent->line->state != LINE_QUIET || t->over)
        return;
    te->reach = NULL;
    spent->by = NULL;
    reach_drop(t->o.reaches, spent);
    te->falling = te->started = te->cut = false;
    te->rescued = true;
    te->bucket = te->part = 0;
    te->next_parcel = 0;
    if (take_open(te, &err) != FL_OK)
        take_fail(t, te, te->e->first_bucket, err.status, &err);
}
