/* transport/xfer/plan_say.c - why a link is not used, in its own words */
#include "transport/xfer/plan_priv.h"

static bool carries(const struct link_ops *k, const struct plan_gap *g)
{
    bool on_devices = g->from->gpu_uuid[0] && g->to->gpu_uuid[0];

    return plan_link_fits(g->mode, k) && (k->caps & (on_devices ? LINK_DEVICE : LINK_HOST));
}

void plan_why_not(const struct plan_gap *g, const struct link_ops *const *links, size_t n,
                  struct fl_str *out)
{
    for (size_t i = 0; i < n; i++) {
        const struct link_ops *k = links[i];
        struct fl_err why = { 0 };

        if (!carries(k, g) || k->cost_ns(g->from, g->to, PLAN_GAP_BYTES) >= g->faster_than_ns ||
            k->reaches(g->from, g->to, &why))
            continue;
        fl_str_add(out, "%s%s: %s", out->len ? "; " : "", k->name, why.text);
    }
}

void xfer_plan_passed_over(const struct xfer_plan_in *in, const struct xfer_plan *p, char *text,
                           size_t n)
{
    const struct link_ops *const *links = in->links ? in->links : link_table;
    size_t n_links = in->links ? in->n_links : link_table_n;
    struct fl_str s = { text, 0, n, n - 1, false, false };

    text[0] = '\0';
    for (size_t e = 0; e < p->n_edges && s.len == 0; e++) {
        const struct xfer_edge *edge = &p->edges[e];

        if (edge->link == XFER_LINK_DISK || p->mode == XFER_SHARE)
            continue;
        struct plan_gap g = { .mode = p->mode,
                              .from = &in->places[edge->from],
                              .to = &in->places[p->to[edge->first_to]] };

        g.faster_than_ns = links[edge->link]->cost_ns(g.from, g.to, PLAN_GAP_BYTES);
        plan_why_not(&g, links, n_links, &s);
    }
}
