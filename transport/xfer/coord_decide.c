/* What an update is to bring, who takes it and who gives it, by what all of them have reported */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "transport/xfer/coord_priv.h"

static int by_party(const void *a, const void *b)
{
    const struct co_member *x = *(struct co_member *const *)a, *y = *(struct co_member *const *)b;

    if (x->me.party != y->me.party)
        return x->me.party < y->me.party ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}

/* Once for a decision: thousands of engines that each look for their ranks among all members are
 * seconds of the driver's loop. */
static enum fl_status link_ranks(struct xfer_coord *c, struct fl_err *err)
{
    struct co_member **all;
    uint32_t n = 0;

    for (struct co_member *m = c->members; m; m = m->next)
        n += !m->source && !m->gone;
    all = malloc((n + 1) * sizeof(struct co_member *));
    if (!all)
        return fl_fail(err, FL_EXHAUSTED, "no memory to look at %u engines", n);
    n = 0;
    for (struct co_member *m = c->members; m; m = m->next) {
        m->first = false;
        m->next_rank = NULL;
        if (m->source || m->gone)
            continue;
        m->index = n; /* until there is a plan: the order */
        all[n++] = m;
    }
    qsort(all, n, sizeof(struct co_member *), by_party);
    for (uint32_t i = 0; i < n; i++) {
        all[i]->first = i == 0 || all[i - 1]->me.party != all[i]->me.party;
        if (!all[i]->first)
            all[i - 1]->next_rank = all[i];
    }
    free(all);
    return FL_OK;
}

/* Of the first rank: of all of its engine. */
static bool party_all(const struct co_member *first,
                      bool (*is)(const struct co_member *m, const void *arg), const void *arg)
{
    for (const struct co_member *m = first; m; m = m->next_rank)
        if (!is(m, arg))
            return false;
    return true;
}

static bool serves(const struct co_member *m, const void *version)
{
    return m->fresh && m->st.has_serving && m->st.state != RX_DIRTY &&
           xfer_version_same(&m->st.serving, version);
}

static bool can_give(const struct co_member *m, const void *version)
{
    return serves(m, version) && !m->st.maps && !m->st.offloaded &&
           m->n_digests >= m->manifest->n_tensors;
}

static bool is_fresh(const struct co_member *m, const void *arg)
{
    (void)arg;
    return m->fresh;
}

bool co_first_alive(const struct co_member *m)
{
    for (const struct co_member *o = m->c->members; o != m; o = o->next)
        if (!o->source && !o->gone && o->me.party == m->me.party)
            return false;
    return !m->source && !m->gone;
}

/* As many serve the one as the other: what the source has published, else the later number. */
static bool wins_tie(const struct xfer_version *v, const struct xfer_version *over,
                     const struct xfer_version *published)
{
    if (published && (xfer_version_same(v, published) || xfer_version_same(over, published)))
        return xfer_version_same(v, published);
    return v->number > over->number;
}

/* What most engines serve: the current version when the sources have gone on, or are gone. */
static bool most_served(const struct xfer_coord *c, const uint64_t *number,
                        const struct xfer_version *published, struct xfer_version *out)
{
    const struct co_member *last = NULL; /* engines mostly serve the same */
    unsigned best = 0;

    for (const struct co_member *m = c->members; m; m = m->next) {
        unsigned n = 0;

        if (!m->first || !m->fresh || !m->st.has_serving ||
            (number && m->st.serving.number != *number) ||
            (last && xfer_version_same(&last->st.serving, &m->st.serving)))
            continue;
        last = m;
        for (const struct co_member *o = c->members; o; o = o->next)
            n += o->first && party_all(o, serves, &m->st.serving);
        if (n > best || (n == best && n && wins_tie(&m->st.serving, out, published))) {
            best = n;
            *out = m->st.serving;
        }
    }
    return best > 0;
}

/* Engines of one party give: its ranks' manifests are the sources, and their digests are whole
 * tensors'. */
static enum fl_status engines_give(struct xfer_coord *c, struct fl_err *err)
{
    uint32_t party = 0;
    bool found = false;

    for (struct co_member *m = c->members; m && !found; m = m->next)
        if (m->first && party_all(m, can_give, &c->target)) {
            party = m->me.party;
            found = true;
        }
    if (!found)
        return fl_fail(
            err, FL_NOT_FOUND,
            "nobody can give version %" PRIu64
            " of \"%s\": no source has it published, no engine serves it from memory of its own",
            c->target.number, c->set);
    for (struct co_member *m = c->members; m; m = m->next)
        m->gives = !m->source && !m->gone && m->me.party == party;
    return FL_OK;
}

static enum fl_status choose_givers(struct xfer_coord *c, bool from_sources, struct fl_err *err)
{
    if (from_sources) {
        for (struct co_member *m = c->members; m; m = m->next)
            m->gives = co_reported_source(m);
        return FL_OK;
    }
    FL_TRY(engines_give(c, err));
    FL_TRY(co_list_tensors(c, co_gives, err));
    for (struct co_member *m = c->members; m; m = m->next)
        for (size_t i = 0; m->gives && i < m->manifest->n_tensors; i++)
            memcpy(co_tensor_of(c, m->manifest->tensors[i].name)->digest, m->digests[i],
                   sizeof(m->digests[i]));
    return FL_OK;
}

static enum fl_status choose_target(struct xfer_coord *c, bool *from_sources, struct fl_err *err)
{
    const struct xfer_request *r = &c->req;
    bool any = r->target.digest[0] || r->target.digest[1];
    struct xfer_version now, most;
    struct fl_err why = { 0 };
    enum fl_status st = co_published(c, &now, &why);

    if (st != FL_OK && st != FL_AGAIN) {
        *err = why;
        return st;
    }
    *from_sources = st == FL_OK;
    if (r->kind == XFER_ADVANCE) {
        if (st != FL_OK)
            return fl_fail(err, st, "version %" PRIu64 " of \"%s\": %s", r->target.number, c->set,
                           why.text);
        if (now.number != r->target.number || (any && !xfer_version_same(&now, &r->target)))
            return fl_fail(err, FL_INVALID,
                           "version %" PRIu64 " of \"%s\" is asked for, %" PRIu64 " is published%s",
                           r->target.number, c->set, now.number,
                           now.number == r->target.number ? " with another digest" : "");
        c->target = now;
        return FL_OK;
    }
    if (most_served(c, r->target.number || any ? &r->target.number : NULL,
                    st == FL_OK ? &now : NULL, &most))
        c->target = any ? r->target : most;
    else if (st == FL_OK && (!(r->target.number || any) || now.number == r->target.number))
        c->target = any ? r->target : now;
    else
        return fl_fail(err, FL_NOT_FOUND,
                       "no version of \"%s\" to fill with: no engine serves one, %s", c->set,
                       why.text[0] ? why.text : "the source has published another");
    *from_sources = st == FL_OK && xfer_version_same(&now, &c->target);
    return FL_OK;
}

/* One of its ranks is dead: the others are left behind with it. */
static void fail_crippled(struct co_member *first, const struct co_member *dead)
{
    struct fl_err why = { 0 };

    for (struct co_member *m = first; m; m = m->next_rank) {
        fl_fail(&why, FL_UNREACHABLE, "another rank of the engine failed: %s", dead->why.text);
        m->phase = CO_TAKES;
        co_failed(m, why.status, &why, "reconcile");
    }
}

static const struct co_member *missed_of(const struct xfer_coord *c, uint32_t party)
{
    for (const struct co_member *m = c->members; m; m = m->next)
        if (m->gone && m->me.party == party && co_missed(m))
            return m;
    return NULL;
}

static void take_all(struct co_member *first)
{
    bool fresh = party_all(first, is_fresh, NULL);

    for (struct co_member *m = first; m; m = m->next_rank) {
        m->phase = fresh ? CO_TAKES : CO_FAILED;
        if (!fresh && m->why.status == FL_OK)
            fl_fail(&m->why, FL_TIMEOUT, "%s: reconcile: %s", m->me.name,
                    m->fresh ? "another rank of the engine is late" : "no answer");
    }
}

static void choose_takers(struct xfer_coord *c)
{
    bool any_gone = false;

    for (const struct co_member *m = c->members; m && !any_gone; m = m->next)
        any_gone = m->gone;
    c->n_takers = c->n_there = 0;
    for (struct co_member *m = c->members; m; m = m->next) {
        const struct co_member *dead = m->first && any_gone ? missed_of(c, m->me.party) : NULL;
        bool there;

        if (!m->first)
            continue;
        if (dead) {
            fail_crippled(m, dead);
            continue;
        }
        there = party_all(m, serves, &c->target);
        if (c->req.kind == XFER_FILL && c->req.party != XFER_ALL_PARTIES &&
            c->req.party != m->me.party)
            continue;
        c->n_there += there;
        if (there)
            continue;
        c->n_takers++;
        take_all(m);
    }
}

static enum fl_status next_epoch(struct xfer_coord *c, struct fl_err *err)
{
    for (const struct co_member *m = c->members; m; m = m->next) {
        if (m->gone || !m->known)
            continue;
        if (m->st.seen.attempt > c->o.attempt)
            return fl_fail(err, FL_STALE,
                           "attempt %u of the driver is over: %s has seen attempt %u", c->o.attempt,
                           m->me.name, m->st.seen.attempt);
        if (m->st.seen.attempt == c->o.attempt && m->st.seen.seq > c->epoch.seq)
            c->epoch.seq = m->st.seen.seq;
    }
    c->epoch.seq++;
    return FL_OK;
}

enum fl_status co_decide(struct xfer_coord *c, struct fl_err *err)
{
    bool from_sources;

    for (const struct co_member *m = c->members; m; m = m->next)
        if (m->source && !m->gone && !m->fresh)
            return fl_fail(err, m->why.status ? m->why.status : FL_TIMEOUT, "%s did not report: %s",
                           m->me.name, m->why.text[0] ? m->why.text : "no answer");
    FL_TRY(next_epoch(c, err));
    FL_TRY(link_ranks(c, err));
    FL_TRY(choose_target(c, &from_sources, err));
    choose_takers(c);
    if (c->n_takers == 0)
        return FL_OK;
    return choose_givers(c, from_sources, err);
}
