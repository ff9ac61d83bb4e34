/* transport/xfer/give_line.c - a giver's lines between epochs: kept, being made, spent
 *
 * Making a link whose members act together takes half a second and more, and its partners'
 * presence; an epoch that can do without it does not wait. */
#include <stdlib.h>
#include "common/base/log.h"
#include "transport/xfer/give_priv.h"

enum {
    AHEAD_MS = 3000
}; /* another way that takes longer is not worth it: a communicator is there by then */

static void ahead_on_ready(void *arg, struct line *ln, enum fl_status st, const struct fl_err *err)
{
    const struct give *g = arg;

    if (st == FL_OK) {
        fl_debug("weights link is ready member=\"%s\" link=%s members=%u", g->name, ln->ops->name,
                 ln->n_members);
        return;
    }
    fl_warn("weights link did not open member=\"%s\" link=%s why=\"%s\"", g->name, ln->ops->name,
            err->text);
    line_abort(ln);
}

static void ahead_on_quiet(void *arg, struct line *ln)
{
    struct give *g = arg;

    for (size_t i = 0; i < GIVE_LINES_KEPT; i++)
        if (g->kept[i] == ln)
            g->kept[i] = NULL;
    line_destroy(ln);
}

static const struct line_user ahead_lines = { ahead_on_ready, ahead_on_quiet };

static bool usable(const struct line *ln)
{
    return ln->state == LINE_READY || ln->state == LINE_OPENING;
}

static struct line **slot_of(struct give *g, const uint64_t key[2])
{
    for (size_t i = 0; i < GIVE_LINES_KEPT; i++) {
        const struct line *ln = g->kept[i];

        if (ln && usable(ln) && ln->key[0] == key[0] && ln->key[1] == key[1])
            return &g->kept[i];
    }
    return NULL;
}

static struct line **free_slot(struct give *g)
{
    for (size_t i = 0; i < GIVE_LINES_KEPT; i++)
        if (!g->kept[i])
            return &g->kept[i];
    return NULL;
}

void give_line_keep(struct give *g, struct line *ln)
{
    struct line **at = slot_of(g, ln->key) ? NULL : free_slot(g);

    if (!at) {
        line_destroy(ln); /* ready and idle: the next epoch opens a new one */
        return;
    }
    line_use(ln, &ahead_lines, g);
    *at = ln;
}

struct line *give_line_kept(struct give *g, const uint64_t key[2], bool ready)
{
    struct line **at = slot_of(g, key);
    struct line *ln = at && (!ready || (*at)->state == LINE_READY) ? *at : NULL;

    if (ln)
        *at = NULL;
    return ln;
}

static bool quick_otherwise(const struct give *g, const struct give_edge *ge,
                            const struct link_place *places, unsigned n)
{
    uint64_t bytes = 0, ns = 0; /* pulls add up at the source */

    for (uint32_t i = 0; i < ge->e->n_buckets; i++)
        bytes += g->part->buckets[ge->e->first_bucket + i].bytes;
    for (unsigned i = 1; i < n; i++) {
        const struct link_ops *ops = port_other_way(g->port, &places[0], &places[i]);

        if (!ops)
            return false;
        ns += ops->cost_ns(&places[0], &places[i], bytes);
    }
    return ns <= AHEAD_MS * 1000000ull;
}

const struct line *give_line_ahead(struct give *g, const struct give_edge *ge,
                                   const struct link_ops *ops, const struct link_place *places,
                                   const struct xfer_member *members, unsigned n,
                                   const uint64_t key[2])
{
    struct line **at = slot_of(g, key);
    struct fl_err err = { 0 };

    if (!quick_otherwise(g, ge, places, n))
        return NULL;
    if (at)
        return *at;
    at = free_slot(g);
    if (!at)
        return NULL;
    if (line_open(g->port->loop, ops, places, n, 0, NULL, key, &ahead_lines, g, at, &err) !=
        FL_OK) {
        fl_warn("weights link did not open member=\"%s\" link=%s why=\"%s\"", g->name, ops->name,
                err.text);
        return NULL; /* opening it in the epoch says why */
    }
    line_note_team(*at, members);
    return *at;
}

void give_line_sweep(struct give *g, const struct xfer_member *members, unsigned n)
{
    for (size_t i = 0; i < GIVE_LINES_KEPT; i++)
        if (g->kept[i] && line_outdated(g->kept[i], members, n))
            line_abort(g->kept[i]);
}
