/* transport/xfer/coord_begin.c - what a begin says: the member's part, and who is in its teams */
#include <stdlib.h>
#include <string.h>
#include "common/base/str.h"
#include "transport/xfer/coord_priv.h"

static void team_free(struct co_team *t)
{
    free(t->places);
    free(t->place_list);
    free(t->members);
    free(t->member_list);
}

/* NULL: it has gone since, or gives or takes no more. */
static struct co_member *by_index(struct xfer_coord *c, uint32_t index)
{
    struct co_member *m = index < c->plan->n_members ? c->by_index[index] : NULL;
    bool takes = m && !m->source && m->phase != CO_OUT && m->fresh;

    return m && (index < c->plan->n_sources ? m->gives : takes) ? m : NULL;
}

static const struct link_ops *link_of(const struct xfer_coord *c, const struct xfer_edge *e)
{
    return c->o.links ? c->o.links[e->link] : link_table[e->link];
}

/* The giver, then the takers; of those who pull none needs to know of the others. */
static bool team_make(struct xfer_coord *c, const struct xfer_edge *e, const struct co_member *self,
                      uint32_t edge, struct co_team *out)
{
    const struct link_ops *ops = link_of(c, e);
    bool pulls = (ops->caps & LINK_PULL) || c->plan->mode == XFER_SHARE;
    unsigned n = pulls ? (self->gives && self->index == e->from ? 1 : 2) : e->n_to + 1;
    bool good = true;

    *out = (struct co_team){ .places = calloc(n, sizeof(*out->places)),
                             .place_list = calloc(n, sizeof(*out->place_list)),
                             .members = calloc(n, sizeof(*out->members)),
                             .member_list = calloc(n, sizeof(*out->member_list)) };
    fl__xfer_team__init(&out->t);
    if (!out->places || !out->place_list || !out->members || !out->member_list)
        return false;
    for (unsigned i = 0; i < n && good; i++) {
        const struct co_member *m = i == 0  ? by_index(c, e->from)
                                    : pulls ? self
                                            : by_index(c, c->plan->to[e->first_to + i - 1]);

        good = m != NULL;
        if (!good)
            break;
        msg_place(&m->st.place, &out->places[i]);
        out->place_list[i] = &out->places[i];
        msg_member(&m->me, &out->members[i]);
        out->member_list[i] = &out->members[i].m;
        if (m == self)
            out->t.self = i;
    }
    out->t.edge = edge;
    out->t.link = (char *)(uintptr_t)ops->name;
    out->t.n_places = out->t.n_members = n;
    out->t.places = out->place_list;
    out->t.members = out->member_list;
    return good;
}

static bool edge_has(const struct xfer_coord *c, const struct xfer_edge *e, uint32_t member)
{
    if (e->from == member)
        return true;
    for (uint32_t i = 0; i < e->n_to; i++)
        if (c->plan->to[e->first_to + i] == member)
            return true;
    return false;
}

/* Where edge is among the edges of member's part. */
static uint32_t edge_in_part(const struct xfer_coord *c, uint32_t edge, uint32_t member)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < edge; i++)
        n += edge_has(c, &c->plan->edges[i], member);
    return n;
}

void co_begin_free(struct co_begin *b)
{
    for (size_t i = 0; i < b->b.n_teams; i++)
        team_free(&b->teams[i]);
    free(b->teams);
    free(b->list);
    free(b->part);
}

static bool begin_teams(struct xfer_coord *c, struct co_member *m, struct co_begin *b)
{
    uint32_t mine = 0;

    b->teams = calloc(c->plan->n_edges + 1, sizeof(*b->teams));
    b->list = calloc(c->plan->n_edges + 1, sizeof(*b->list));
    if (!b->teams || !b->list)
        return false;
    b->b.teams = b->list;
    for (uint32_t i = 0; i < c->plan->n_edges; i++) {
        const struct xfer_edge *e = &c->plan->edges[i];
        struct co_team *t = &b->teams[b->b.n_teams];
        struct co_member *giver;

        if (!edge_has(c, e, m->index))
            continue;
        if (e->link == XFER_LINK_DISK) {
            mine++;
            continue;
        }
        b->list[b->b.n_teams++] = &t->t;
        if (!team_make(c, e, m, mine++, t))
            return false;
        giver = by_index(c, e->from);
        if (giver == m)
            continue;
        t->t.has_giver_edge = t->t.has_ticket = true;
        t->t.giver_edge = edge_in_part(c, i, e->from);
        if (t->t.giver_edge >= giver->n_tickets)
            return false;
        t->t.has_later = true;
        t->t.later = giver->tickets[t->t.giver_edge].later;
        t->t.ticket = (ProtobufCBinaryData){ sizeof(giver->tickets[0].bytes),
                                             giver->tickets[t->t.giver_edge].bytes };
        if (!giver->source || !giver->tickets[t->t.giver_edge].serial)
            continue;
        t->t.has_key = t->t.has_key_slot = true;
        t->t.key = msg_key_id(giver->tickets[t->t.giver_edge].serial, giver->st.slot_gen, 0);
        t->t.key_slot = giver->st.slot;
    }
    return true;
}

enum fl_status co_begin_make(struct xfer_coord *c, struct co_member *m, struct co_begin *b,
                             struct fl_err *err)
{
    *b = (struct co_begin){ 0 };
    fl__xfer_begin__init(&b->b);
    msg_epoch(&c->epoch, &b->epoch);
    msg_version(&c->target, &b->target);
    b->b.has_part_kept = true;
    b->b.part_kept = m->has_part &&
                     memcmp(m->told_part, c->plan->part_hash[m->index], sizeof(m->told_part)) == 0;
    if (!b->b.part_kept)
        FL_TRY(xfer_part_encode(c->plan, m->index, &b->part, &b->part_bytes, err));
    m->has_part = b->b.part_kept;
    b->b.set = c->set;
    b->b.epoch = &b->epoch;
    b->b.target = &b->target;
    b->b.mode = c->plan->mode;
    b->b.slots = c->plan->slots;
    b->b.number = c->target.number;
    b->b.plan = msg_hash(c->plan->hash);
    b->b.part = msg_hash(c->plan->part_hash[m->index]);
    b->b.has_part_bytes = b->b.has_member = true;
    b->b.part_bytes = b->part_bytes;
    b->b.member = m->index;
    if (!begin_teams(c, m, b))
        return fl_fail(err, FL_EXHAUSTED, "no memory, or no ticket, to begin at %s", m->me.name);
    return FL_OK;
}

bool co_begun(struct co_member *m, enum fl_status st)
{
    bool lacks = st == FL_NOT_FOUND && m->has_part;

    m->has_part = st == FL_OK || (m->has_part && !lacks);
    if (st == FL_OK)
        memcpy(m->told_part, m->c->plan->part_hash[m->index], sizeof(m->told_part));
    return lacks;
}

enum fl_status co_note_begun(struct co_member *m, const struct wire_msg *reply, struct fl_err *err)
{
    Fl__XferBegun *r = fl__xfer_begun__unpack(NULL, reply->head.body_bytes, reply->body);
    bool good = r != NULL;

    free(m->tickets);
    m->n_tickets = m->c->plan->n_edges;
    m->tickets = calloc(m->n_tickets + 1, sizeof(*m->tickets));
    m->delta_dir[0] = '\0';
    good = good && m->tickets;
    for (size_t i = 0; good && i < r->n_tickets; i++) {
        const Fl__XferTicket *t = r->tickets[i];

        good = t->edge < m->n_tickets && t->ticket.len == sizeof(m->tickets[0].bytes);
        if (!good)
            break;
        memcpy(m->tickets[t->edge].bytes, t->ticket.data, sizeof(m->tickets[0].bytes));
        m->tickets[t->edge].later = t->later;
        m->tickets[t->edge].serial = t->serial;
    }
    if (good && r->delta_dir)
        good = FL_COPY(m->delta_dir, r->delta_dir);
    if (r)
        fl__xfer_begun__free_unpacked(r, NULL);
    return good ? FL_OK : fl_fail(err, FL_CORRUPT, "tickets that do not decode");
}
