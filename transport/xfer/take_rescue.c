/* transport/xfer/take_rescue.c - an edge whose team broke, or is not there yet, is pulled by its
 * taker alone
 *
 * A broadcast ends for all when one of them dies. Whoever lives aborts, waits until nothing touches
 * its slot any more, and pulls the buckets that it lacks over the first link that reaches the giver
 * by itself; those that are in stay in. */
#include "common/base/log.h"
#include "transport/xfer/take_priv.h"

static const struct link_ops *other_way(const struct take_edge *te)
{
    return port_other_way(te->take->o.port, &te->team->places[0],
                          &te->team->places[te->team->self]);
}

static void go_by(struct take_edge *te, const struct link_ops *ops)
{
    te->pair[0] = te->team->places[0];
    te->pair[1] = te->team->places[te->team->self];
    te->ops = ops;
}

enum fl_status take_go_other_way(struct take_edge *te, struct fl_err *err)
{
    const struct link_ops *ops = other_way(te);

    if (!ops)
        return fl_fail(err, FL_UNSUPPORTED, "%s: no link to pull from %s while %s is being made",
                       te->take->o.name, te->team->members[0].name, te->ops->name);
    go_by(te, ops);
    te->rescued = true;
    return FL_OK;
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
    fl_timer_cancel(&te->again);
    go_by(te, ops);
    line_abort(te->reach->line);
    return true;
}

/* Every update meets it anew: it is said once. */
static bool first_time(struct xfer_port *p, const struct link_ops *ops)
{
    for (size_t i = 0; i < p->n_links && i < 32; i++)
        if (p->links[i] == ops) {
            bool said = p->not_shown & 1u << i;

            p->not_shown |= 1u << i;
            return !said;
        }
    return true;
}

bool take_not_shown(struct take_edge *te, const struct fl_err *why)
{
    struct take *t = te->take;
    const struct link_place *from = &te->team->places[0], *to = &te->team->places[te->team->self];
    const struct link_ops *ops = NULL;
    struct fl_err err = { 0 };

    for (size_t i = 0; i < t->o.port->n_links && !ops; i++) { /* cheapest first */
        const struct link_ops *k = t->o.port->links[i];

        if (k != te->ops && (k->caps & LINK_PULL) && (k->caps & LINK_ALONE) &&
            k->reaches(from, to, NULL))
            ops = k;
    }
    if (!ops || te->rescued || te->n_in || t->o.part->mode == XFER_SHARE)
        return false;
    if (first_time(t->o.port, te->ops))
        fl_warn("weights go another way member=\"%s\" epoch=%u.%u from=%s to=%s why=\"%s\"",
                t->o.name, t->o.epoch.attempt, t->o.epoch.seq, te->ops->name, ops->name, why->text);
    go_by(te, ops);
    take_half_drop(te);
    te->reach = NULL; /* open, and perhaps other edges': it goes when the take does */
    te->started = false;
    te->rescued = true;
    te->part = 0;
    te->next_parcel = 0;
    if (take_open(te, &err) != FL_OK)
        take_fail(t, te, te->e->first_bucket, err.status, &err);
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
