#include "transport/xfer/give_priv.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/proto/methods.h"

static void edge_pump(struct give_edge *ge);

void give_init(struct give *g, struct xfer_port *port, const char *name,
               const struct xfer_manifest *have, const struct give_user *user, void *arg)
{
    *g = (struct give){ .port = port, .name = name, .have = have, .user = user, .arg = arg };
}

/* ---- an edge ---- */

static void edge_on_ready(void *arg, struct line *ln, enum fl_status st, const struct fl_err *err)
{
    struct give_edge *ge = arg;

    if (st != FL_OK) {
        fl_warn("weights link did not open member=%s link=%s why=\"%s\"", ge->give->name,
                ln->ops->name, err->text);
        ge->failed = true;
        line_abort(ln);
        return;
    }
    edge_pump(ge);
}

static void edge_on_quiet(void *arg, struct line *ln)
{
    struct give *g = ((struct give_edge *)arg)->give;

    for (size_t i = 0; i < g->n_edges; i++)
        if (g->edges[i].line == ln)
            g->edges[i].line = NULL;
    line_destroy(ln);
    give_settle(g);
}

static const struct line_user edge_lines = { edge_on_ready, edge_on_quiet };

static void edge_fail(struct give_edge *ge, const struct fl_err *err)
{
    if (ge->failed)
        return;
    ge->failed = true;
    fl_warn("weights send failed member=%s epoch=%u.%u bucket=%u why=\"%s\"", ge->give->name,
            ge->give->epoch.attempt, ge->give->epoch.seq, ge->bucket, err->text);
    fl_timer_cancel(&ge->again);
    if (ge->line)
        line_abort(ge->line);
}

static void edge_on_sent(struct link_op *op)
{
    struct give_send *s = container_of(op, struct give_send, op);
    struct give_edge *ge = s->edge;
    struct give *g = ge->give;

    s->busy = false;
    ge->in_flight--;
    if (op->err.status != FL_OK)
        edge_fail(ge, &op->err);
    else
        edge_pump(ge);
    give_settle(g);
}

static void edge_on_again(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    edge_pump(container_of(t, struct give_edge, again));
}

/* The parcels of the bucket in hand; false: all buckets are sent, or it failed. */
static bool edge_cut(struct give_edge *ge, struct fl_err *err)
{
    const struct xfer_plan *part = ge->give->part;

    while (ge->bucket < ge->e->n_buckets) {
        const struct xfer_bucket *b = &part->buckets[ge->e->first_bucket + ge->bucket];

        if (!ge->cut) {
            parcels_fini(&ge->parcels);
            if (parcels_cut(&part->segs[b->first_seg], b->n_segs, &ge->parcels, err) != FL_OK)
                return false;
            ge->cut = true;
            ge->next_parcel = 0;
        }
        if (ge->next_parcel < ge->parcels.n)
            return true;
        ge->bucket++;
        ge->cut = false;
    }
    return false;
}

static enum fl_status edge_send(struct give_edge *ge, struct give_send *s, struct fl_err *err)
{
    const struct xfer_bucket *b = &ge->give->part->buckets[ge->e->first_bucket + ge->bucket];
    const struct link_mem *mem = &ge->give->slot.mems[b->from_mem];
    const struct parcel *p = &ge->parcels.p[ge->next_parcel];
    struct link_span span = { .mem = mem, .off = p->from_off, .bytes = p->bytes };

    if (FL_FAULT("xfer.send"))
        return fl_fail(err, FL_UNREACHABLE, "fault xfer.send");
    if (p->packed) {
        if (!s->room.addr) {
            s->room.addr = malloc(PARCEL_PACKED_MAX);
            s->room.bytes = PARCEL_PACKED_MAX;
        }
        if (!s->room.addr)
            return fl_fail(err, FL_EXHAUSTED, "no memory to pack a parcel");
        parcel_pack(&ge->parcels, ge->next_parcel, mem->addr, s->room.addr);
        span = (struct link_span){ .mem = &s->room, .off = 0, .bytes = p->bytes };
    }
    s->op = (struct link_op){ .done = edge_on_sent };
    if (ge->e->n_to > 1)
        return ge->line->ops->cast(ge->line->k, 0, span, &s->op, err);
    return ge->line->ops->send(ge->line->k, 1, span, &s->op, err);
}

/* The link gathers: a bucket at a time. */
static bool by_bucket(const struct give_edge *ge)
{
    return ge->line->ops->caps & LINK_SEGS;
}

static enum fl_status edge_cast(struct give_edge *ge, struct give_send *s, struct fl_err *err)
{
    const struct xfer_plan *part = ge->give->part;
    const struct xfer_bucket *b = &part->buckets[ge->e->first_bucket + ge->bucket];

    if (FL_FAULT("xfer.send"))
        return fl_fail(err, FL_UNREACHABLE, "fault xfer.send");
    s->op = (struct link_op){ .done = edge_on_sent };
    FL_TRY(ge->line->ops->cast_segs(ge->line->k, 0, &ge->give->slot.mems[b->from_mem],
                                    &part->segs[b->first_seg], b->n_segs, NULL, &s->op, err));
    ge->bucket++;
    return FL_OK;
}

static void edge_pump(struct give_edge *ge)
{
    struct fl_err err = { 0 };

    if (!ge->sends || ge->failed || ge->done || !ge->line || ge->line->state != LINE_READY)
        return;
    for (unsigned i = 0; i < GIVE_WINDOW; i++) {
        struct give_send *s = &ge->window[i];
        enum fl_status st;

        if (s->busy)
            continue;
        if (by_bucket(ge) ? ge->bucket == ge->e->n_buckets : !edge_cut(ge, &err)) {
            ge->done = err.status == FL_OK && ge->in_flight == 0;
            if (err.status != FL_OK)
                edge_fail(ge, &err);
            give_settle(ge->give);
            return;
        }
        s->edge = ge;
        st = by_bucket(ge) ? edge_cast(ge, s, &err) : edge_send(ge, s, &err);
        if (st == FL_AGAIN) {
            if (ge->in_flight == 0)
                fl_timer_arm_in(ge->give->port->loop, &ge->again, 1);
            return;
        }
        if (st != FL_OK) {
            edge_fail(ge, &err);
            return;
        }
        s->busy = true;
        ge->in_flight++;
        ge->next_parcel += !by_bucket(ge);
    }
}

static void edges_free(struct give *g)
{
    for (size_t i = 0; i < g->n_edges; i++) {
        parcels_fini(&g->edges[i].parcels);
        fl_timer_cancel(&g->edges[i].again);
        for (unsigned w = 0; w < GIVE_WINDOW; w++)
            free(g->edges[i].window[w].room.addr);
    }
    free(g->edges);
    g->edges = NULL;
    g->n_edges = 0;
    xfer_plan_destroy(g->part);
    g->part = NULL;
}

/* ---- the end of an epoch ---- */

static bool edges_quiet(const struct give *g)
{
    for (size_t i = 0; i < g->n_edges; i++) {
        const struct give_edge *ge = &g->edges[i];

        if (ge->in_flight ||
            (ge->line && (ge->line->state != LINE_READY || (ge->sends && !ge->done))))
            return false;
    }
    for (size_t i = 0; i < GIVE_RESCUES; i++)
        if (g->rescue[i] && g->rescue[i]->state != LINE_QUIET)
            return false;
    return !g->in_work && !g->writing && give_stage_quiet(g);
}

/* Called whenever something came back: when the epoch is ending and all is quiet, it has ended. */
void give_settle(struct give *g)
{
    struct call_req *req = g->end_req;

    if (!g->active || !g->ending || !edges_quiet(g))
        return;
    for (size_t i = 0; i < g->n_edges; i++)
        if (g->edges[i].line && g->edges[i].owns)
            give_line_keep(g, g->edges[i].line);
    for (size_t i = 0; i < GIVE_RESCUES; i++)
        line_destroy(FL_TAKE(g->rescue[i]));
    give_stage_end(g);
    edges_free(g);
    g->active = g->ending = false;
    g->end_req = NULL;
    if (req)
        msg_reply_state(req, &g->end_state, (struct fl_bytes){ 0 });
    g->user->quiet(g->arg);
}

static void edges_end(struct give *g, bool good)
{
    g->ending = true;
    give_stage_stop(g);
    for (size_t i = 0; i < GIVE_RESCUES; i++)
        if (g->rescue[i])
            line_abort(g->rescue[i]);
    for (size_t i = 0; i < g->n_edges; i++) {
        struct give_edge *ge = &g->edges[i];

        if (ge->line && (!good || g->passing || ge->line->state != LINE_READY)) {
            fl_timer_cancel(&ge->again);
            ge->failed = true;
            line_abort(ge->line);
        } /* else all of its takers have everything: what we sent comes back by itself */
    }
    give_settle(g);
}

static void begin_refuse(struct give *g, const struct fl_err *err)
{
    struct call_req *req = g->begin_req;

    g->begin_req = NULL;
    if (req)
        call_fail(req, err);
}

void give_stop(struct give *g, const char *why)
{
    struct fl_err err = { 0 };

    if (!g->active)
        return;
    fl_fail(&err, FL_CANCELLED, "%s", why);
    begin_refuse(g, &err);
    if (!g->ending)
        edges_end(g, false);
}

bool give_busy(const struct give *g)
{
    return g->active;
}

void give_fini(struct give *g)
{
    edges_free(g);
    xfer_plan_destroy(g->known);
    for (size_t i = 0; i < GIVE_LINES_KEPT; i++)
        line_destroy(g->kept[i]);
}

/* ---- BEGIN ---- */

static enum fl_status team_read(const Fl__XferTeam *t, struct link_place **places,
                                struct xfer_member **members, struct fl_err *err)
{
    size_t n = t->n_members;
    bool good = n >= 1 && n <= 4096 && t->n_places == n && t->self == 0; /* the giver is first */

    *places = calloc(n ? n : 1, sizeof(**places));
    *members = calloc(n ? n : 1, sizeof(**members));
    if (!*places || !*members)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a team of %zu", n);
    for (size_t i = 0; good && i < n; i++)
        good = msg_read_place(t->places[i], &(*places)[i]) &&
               msg_read_member(t->members[i], &(*members)[i]);
    return good ? FL_OK : fl_fail(err, FL_CORRUPT, "a team of %zu members does not decode", n);
}

/* One that is there, or is made now; where both sides act, making it is left to the background if
 * the takers can pull meanwhile. */
static enum fl_status edge_line(struct give *g, struct give_edge *ge, const struct link_ops *ops,
                                const struct link_place *places, const struct xfer_member *members,
                                unsigned n, const uint64_t key[2], struct fl_err *err)
{
    enum fl_status st = FL_OK;

    if (ge->sends)
        give_line_sweep(g, members, n);
    ge->line = give_line_kept(g, key, true);
    if (!ge->line && ge->sends && !g->passing) /* else nobody will use it again */
        ge->ahead = give_line_ahead(g, ge, ops, places, members, n, key);
    if (ge->ahead) {
        ge->sends = false;
        return FL_OK;
    }
    if (!ge->line)
        ge->line = give_line_kept(g, key, false);
    if (ge->line)
        line_use(ge->line, &edge_lines, ge);
    else
        st =
            line_open(g->port->loop, ops, places, n, 0, NULL, key, &edge_lines, ge, &ge->line, err);
    if (ge->line && ge->sends && !ge->line->who)
        line_note_team(ge->line, members);
    if (ge->line && !ge->line->serial)
        ge->line->serial = ++g->serials;
    return st;
}

static enum fl_status edge_open(struct give *g, struct give_edge *ge, const Fl__XferTeam *t,
                                struct fl_err *err)
{
    const struct link_ops *ops = port_link(g->port, t->link);
    struct link_place *places = NULL;
    struct xfer_member *members = NULL;
    uint64_t key[2];
    enum fl_status st;

    if (!ops)
        return fl_fail(err, FL_UNSUPPORTED, "%s has no link \"%s\"", g->name, t->link);
    st = team_read(t, &places, &members, err);
    if (st == FL_OK) {
        ge->place = places[0];
        line_key(key, ops, members, (unsigned)t->n_members);
        ge->sends = !(ops->caps & LINK_PULL) && g->mode != XFER_SHARE;
        for (size_t i = 0; i < g->n_edges && !ge->sends && !ge->line; i++)
            if (g->edges[i].owns && g->edges[i].line->ops == ops && !g->edges[i].sends)
                ge->line = g->edges[i].line;
        ge->owns = !ge->line;
        if (ge->owns)
            st = edge_line(g, ge, ops, places, members, (unsigned)t->n_members, key, err);
    }
    ge->owns = ge->owns && ge->line;
    free(places);
    free(members);
    return st;
}

static enum fl_status edges_open(struct give *g, const Fl__XferBegin *b, struct fl_err *err)
{
    g->edges = calloc(g->part->n_edges ? g->part->n_edges : 1, sizeof(*g->edges));
    if (!g->edges)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu edges", g->part->n_edges);
    g->n_edges = g->part->n_edges;
    for (size_t i = 0; i < g->n_edges; i++) {
        g->edges[i] = (struct give_edge){ .give = g, .e = &g->part->edges[i] };
        g->edges[i].again.fire = edge_on_again;
    }
    for (size_t i = 0; i < b->n_teams; i++) {
        const struct give_edge *ge =
            &g->edges[b->teams[i]->edge < g->n_edges ? b->teams[i]->edge : 0];

        if (b->teams[i]->edge >= g->n_edges || ge->line || ge->ahead)
            return fl_fail(err, FL_CORRUPT, "a team names edge %u of %zu", b->teams[i]->edge,
                           g->n_edges);
        FL_TRY(edge_open(g, &g->edges[b->teams[i]->edge], b->teams[i], err));
    }
    return FL_OK;
}

static void edge_ticket(struct give_edge *ge, uint32_t edge, Fl__XferTicket *t,
                        Fl__XferTicket **list, size_t *n)
{
    const struct line *ln = ge->line ? ge->line : ge->ahead;

    if (!ln)
        return;
    fl__xfer_ticket__init(t);
    t->edge = edge;
    t->ticket = (ProtobufCBinaryData){ sizeof(ln->ticket), (uint8_t *)(uintptr_t)ln->ticket };
    t->has_later = true;
    t->later = ge->ahead != NULL;
    t->has_serial = ge->line != NULL;
    t->serial = ge->line ? (uint32_t)ge->line->serial : 0;
    list[(*n)++] = t;
}

static void begin_answer(struct give *g, const char *delta_dir)
{
    struct call_req *req = g->begin_req;
    Fl__XferBegun r = FL__XFER_BEGUN__INIT;
    Fl__XferTicket *t = calloc(g->n_edges + 1, sizeof(*t)),
                   **list = calloc(g->n_edges + 1, sizeof(*list));
    struct fl_err err = { 0 };

    g->begin_req = NULL;
    for (size_t i = 0; t && list && i < g->n_edges; i++)
        edge_ticket(&g->edges[i], (uint32_t)i, &t[i], list, &r.n_tickets);
    r.tickets = list;
    r.delta_dir = (char *)(uintptr_t)delta_dir;
    if (t && list) {
        msg_reply(req, &r.base, (struct fl_bytes){ 0 });
    } else {
        fl_fail(&err, FL_EXHAUSTED, "no memory for %zu tickets", g->n_edges);
        call_fail(req, &err);
    }
    free(t);
    free(list);
    for (size_t i = 0; i < g->n_edges; i++)
        g->edges[i].ahead = NULL; /* from here on it goes its own way */
    for (size_t i = 0; !g->ending && i < g->n_edges; i++)
        edge_pump(&g->edges[i]); /* lines that were kept are ready already */
}

void give_written(struct give *g, enum fl_status st, const char *dir, const struct fl_err *err)
{
    g->writing = false;
    if (g->begin_req && st == FL_OK)
        begin_answer(g, dir);
    else if (g->begin_req)
        begin_refuse(g, err);
    give_settle(g);
}

static enum fl_status read_part(struct give *g, const Fl__XferBegin *b, const struct wire_msg *m,
                                const uint64_t hash[2], struct fl_err *err)
{
    if (!b->part_kept) {
        FL_TRY(xfer_part_decode(m->blob, m->head.blob_bytes, hash, &g->part, err));
        xfer_plan_destroy(g->known);
        g->known = xfer_plan_keep(g->part);
        memcpy(g->known_hash, hash, sizeof(g->known_hash));
        return FL_OK;
    }
    if (FL_FAULT("xfer.part") || !g->known || g->known_hash[0] != hash[0] ||
        g->known_hash[1] != hash[1])
        return fl_fail(err, FL_NOT_FOUND, "%s does not have that part of the plan", g->name);
    g->part = xfer_plan_keep(g->known);
    return FL_OK;
}

static enum fl_status begin_check(struct give *g, const Fl__XferBegin *b, const struct wire_msg *m,
                                  struct fl_err *err)
{
    struct xfer_epoch e = msg_read_epoch(b->epoch);
    int order = xfer_epoch_cmp(&e, &g->epoch);
    uint64_t part_hash[2];
    struct xfer_version want;

    if (order < 0)
        return fl_fail(err, FL_STALE, "epoch %u.%u is over: %u.%u has begun at %s since", e.attempt,
                       e.seq, g->epoch.attempt, g->epoch.seq, g->name);
    if (g->active) {
        if (order > 0)
            give_stop(g, "a newer epoch has begun");
        return fl_fail(err, FL_AGAIN, "%s still gives epoch %u.%u", g->name, g->epoch.attempt,
                       g->epoch.seq);
    }
    if (order == 0)
        return fl_fail(err, FL_STALE, "epoch %u.%u has ended at %s", e.attempt, e.seq, g->name);
    if (!b->target || !msg_read_hash(b->plan, g->plan) || !msg_read_hash(b->part, part_hash))
        return fl_fail(err, FL_CORRUPT, "a begin without target or hashes");
    want = msg_read_version(b->target);
    FL_TRY(g->user->slot(g->arg, &want, &g->slot, err));
    FL_TRY(read_part(g, b, m, part_hash, err));
    g->version = want;
    g->mode = (enum xfer_mode)b->mode;
    return FL_OK;
}

void give_begin(struct give *g, struct call_req *req, const Fl__XferBegin *b,
                const struct wire_msg *m)
{
    struct fl_err err = { 0 };
    enum fl_status st = FL_FAULT("xfer.give") ? fl_fail(&err, FL_INTERNAL, "fault xfer.give")
                                              : begin_check(g, b, m, &err);

    if (st != FL_OK) {
        call_fail(req, &err);
        return;
    }
    g->epoch = msg_read_epoch(b->epoch);
    g->active = true;
    g->begin_req = req;
    st = edges_open(g, b, &err);
    if (st != FL_OK) {
        begin_refuse(g, &err);
        edges_end(g, false);
        return;
    }
    if (g->mode != XFER_DISK_DELTA || !g->n_edges) { /* of replicas one writes */
        begin_answer(g, NULL);
    } else if (!g->user->write || !b->delta_dir) {
        fl_fail(&err, FL_UNSUPPORTED, "%s cannot write versions to a folder%s", g->name,
                b->delta_dir ? "" : ": the update names none");
        begin_refuse(g, &err);
        edges_end(g, false);
    } else {
        g->writing = true;
        g->user->write(g->arg, b->delta_dir, g->version.number);
    }
}

void give_end(struct give *g, struct call_req *req, const Fl__XferEnd *e,
              const struct xfer_state *state)
{
    struct xfer_epoch ep = msg_read_epoch(e->epoch);
    struct fl_err err = { 0 };
    int order = xfer_epoch_cmp(&ep, &g->epoch);

    if (order < 0) {
        fl_fail(&err, FL_STALE, "epoch %u.%u is over at %s", ep.attempt, ep.seq, g->name);
        call_fail(req, &err);
        return;
    }
    if (!g->active || order > 0) { /* ended already, or never began here */
        msg_reply_state(req, state, (struct fl_bytes){ 0 });
        return;
    }
    if (g->end_req) {
        fl_fail(&err, FL_CANCELLED, "asked again");
        call_fail(g->end_req, &err);
    }
    g->end_req = req;
    g->end_state = *state;
    if (g->ending)
        give_settle(g);
    else
        edges_end(g, e->good);
}
