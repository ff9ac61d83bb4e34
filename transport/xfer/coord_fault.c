/* Digests that do not agree: of an engine of several ranks, and who is to blame */
#include <stdlib.h>
#include <string.h>
#include "transport/xfer/coord_priv.h"

/* ---- digests of engines with several ranks ---- */

static bool add_parts(const struct xfer_coord *c, uint32_t party, uint64_t (*sum)[2], bool *named)
{
    for (const struct co_member *m = c->members; m; m = m->next)
        for (size_t i = 0; !m->source && !m->gone && m->me.party == party && i < m->n_parts; i++) {
            const uint64_t *p = &m->parts[3 * i];

            if (p[0] >= c->plan->n_tensors)
                return false;
            named[p[0]] = true;
            sum[p[0]][0] += p[1];
            sum[p[0]][1] += p[2];
        }
    return true;
}

bool co_party_sums(struct xfer_coord *c, uint32_t party, uint32_t bad[XFER_NAMED_BAD],
                   uint32_t *n_bad)
{
    uint64_t(*sum)[2] = calloc(c->plan->n_tensors + 1, sizeof(*sum));
    bool *named = calloc(c->plan->n_tensors + 1, sizeof(*named));
    bool good = sum && named && add_parts(c, party, sum, named);

    *n_bad = 0;
    for (size_t i = 0; good && i < c->plan->n_tensors; i++)
        if (named[i] && memcmp(sum[i], c->expect[i], sizeof(sum[i])) != 0 &&
            *n_bad < XFER_NAMED_BAD)
            bad[(*n_bad)++] = (uint32_t)i;
    free(sum);
    free(named);
    return good && *n_bad == 0;
}

/* ---- whose fault ---- */

static bool names_tensor(const struct co_member *m, uint32_t tensor)
{
    for (uint32_t i = 0; i < m->st.n_bad_tensors; i++)
        if (m->st.bad_tensors[i] == tensor)
            return true;
    return false;
}

static bool party_names(const struct xfer_coord *c, uint32_t party, uint32_t tensor)
{
    for (const struct co_member *m = c->members; m; m = m->next)
        if (!m->source && m->me.party == party && m->phase == CO_FAILED && names_tensor(m, tensor))
            return true;
    return false;
}

/* What failed at every engine that took it is the source's fault: with one engine only if its bytes
 * are those of the source's memory. */
bool co_source_at_fault(struct xfer_coord *c, struct fl_err *err)
{
    const struct co_member *first = NULL, *giver = NULL;
    uint32_t tensor = 0;
    bool all = true;

    for (const struct co_member *m = c->members; m; m = m->next) {
        giver = giver || !m->gives ? giver : m;
        first = !first && m->phase == CO_FAILED && m->st.n_bad_tensors ? m : first;
    }
    if (!first || !giver)
        return false;
    tensor = first->st.bad_tensors[0];
    for (const struct co_member *m = c->members; m && all; m = m->next)
        if (co_first_alive(m) && m->phase != CO_OUT)
            all = party_names(c, m->me.party, tensor);
    if (!(all && (c->n_takers > 1 || first->st.source_at_fault)))
        return false;
    fl_fail(err, FL_CORRUPT,
            "%s is at fault: %s failed at every one of %u engines in epoch %u.%u; first %s",
            giver->me.name, tensor < c->plan->n_tensors ? c->plan->tensors[tensor].name : "?",
            c->n_takers, c->epoch.attempt, c->epoch.seq, first->st.why.text);
    return true;
}
