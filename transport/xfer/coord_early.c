/* transport/xfer/coord_early.c - an update whose RECONCILE would be no news
 *
 * Where pages are shared nothing moves, and half of an update was asking what is known: the only
 * engine has not been asked for anything since it reported or committed, and a source tells what it
 * has published when it has. So the target, its digests and the plan are made ready then, for a
 * request like the last one, and the update is its begin alone. Whoever has changed refuses that,
 * and the update starts again with RECONCILE. Where bytes move the question stays: it costs a
 * hundredth there, and engines make their device ready behind the answer. */
#include <stdlib.h>
#include <string.h>
#include "common/base/id.h"
#include "transport/xfer/coord_priv.h"

static bool all_known(const struct xfer_coord *c, uint64_t *number)
{
    const struct co_member *told = NULL;
    unsigned engines = 0;

    if (c->req.kind != XFER_ADVANCE || !c->warm || !c->plan || c->plan->mode != XFER_SHARE ||
        c->plan->slots != XFER_TWO_SLOTS)
        return false;
    for (const struct co_member *m = c->members; m; m = m->next) {
        if (m->gone || !m->known)
            return false;
        if (!m->source) {
            if (++engines > 1 || m->st.state != RX_SERVING || m->st.offloaded ||
                xfer_epoch_cmp(&m->st.seen, &c->epoch) != 0)
                return false;
            continue;
        }
        if (!m->early || (told && told->early_st.published != m->early_st.published))
            return false;
        told = m;
    }
    if (!told || engines != 1)
        return false;
    *number = told->early_st.published;
    return true;
}

static void take_early(struct co_member *m)
{
    m->fresh = true;
    if (!m->source)
        return;
    free(m->digests);
    m->digests = FL_TAKE(m->early_digests);
    m->n_digests = m->manifest->n_pieces;
    m->st = m->early_st;
    m->early = false;
}

void co_make_ready(struct xfer_coord *c)
{
    struct fl_err err; /* RECONCILE will tell */
    uint64_t number;

    if (c->step != CO_IDLE || c->run || c->next_run || !all_known(c, &number))
        return;
    co_forget_run(c);
    for (struct co_member *m = c->members; m; m = m->next)
        take_early(m);
    c->req.target = (struct xfer_version){ .number = number };
    c->ready =
        co_decide(c, &err) == FL_OK && c->n_takers == 1 && co_plan(c, &err) == FL_OK && c->warm;
}

void co_note_published(struct co_member *m, const struct xfer_state *s, const char *blob)
{
    size_t n = m->manifest ? m->manifest->n_pieces : 0;
    bool same = n && s->digest_bytes == n * sizeof(*m->early_digests) && !s->manifest_bytes &&
                memcmp(s->manifest, m->st.manifest, sizeof(s->manifest)) == 0 &&
                fl_seat_ref_same(&s->who, &m->me.who);

    free(m->early_digests);
    m->early_digests = same ? malloc(s->digest_bytes) : NULL;
    m->early = m->early_digests != NULL;
    m->published_heard = s->publishes;
    m->c->ready = false;
    if (!m->early)
        return;
    memcpy(m->early_digests, blob, s->digest_bytes);
    m->early_st = *s;
    co_make_ready(m->c);
}

bool co_is_ready(const struct xfer_coord *c, const struct xfer_request *req)
{
    const struct xfer_request *as = &c->req;
    bool any = !req->target.digest[0] && !req->target.digest[1];

    return c->ready && req->kind == as->kind && req->mode == as->mode && req->slots == as->slots &&
           req->party == as->party && req->least_engines == as->least_engines &&
           (any ? req->target.number == c->target.number
                : xfer_version_same(&req->target, &c->target));
}
