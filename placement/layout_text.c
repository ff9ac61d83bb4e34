#include "placement/placement.h"

#include <stdio.h>

struct line {
    const char *role;
    uint32_t rank, first_slot, n_slots, node;
    char part[24];
};

static void devices_add(struct fl_str *s, const struct layout *y,
                        const struct placement_snapshot *snap, const struct placement_plan *plan,
                        const struct line *l)
{
    const struct placement_node *n = &snap->nodes[l->node];

    for (uint32_t i = 0; i < l->n_slots; i++) {
        const struct placement_slot *slot = &plan->slots[y->sorted[l->first_slot + i]];

        fl_str_add(s, "%s%s", i ? "," : "", n->devices[plan->devices[slot->first_device]].id);
    }
}

struct widths {
    int node, addr;
};

static void line_add(struct fl_str *out, const struct layout *y,
                     const struct placement_snapshot *snap, const struct placement_plan *plan,
                     const struct widths *w, const struct line *l)
{
    const struct placement_node *n = &snap->nodes[l->node];

    fl_str_add(out, "%-8s %5u  %-*s  %-*s  ", l->role, l->rank, w->node, n->name, w->addr, n->addr);
    devices_add(out, y, snap, plan, l);
    fl_str_add(out, "%s\n", l->part);
}

static struct widths measure(const struct layout *y, const struct placement_snapshot *snap,
                             const struct placement_plan *plan)
{
    struct widths w = { 4, 7 }; /* of the headings */

    for (size_t i = 0; i < y->n_sorted; i++) {
        const struct placement_node *n = &snap->nodes[plan->slots[y->sorted[i]].node];
        int name = (int)strlen(n->name), addr = (int)strlen(n->addr);

        w.node = name > w.node ? name : w.node;
        w.addr = addr > w.addr ? addr : w.addr;
    }
    return w;
}

void layout_text(const struct layout *y, const struct placement_snapshot *snap,
                 const struct placement_plan *plan, struct fl_str *out)
{
    struct widths w = measure(y, snap, plan);
    uint32_t rank[2] = { 0 }; /* rollout, eval */

    fl_str_add(out, "%-8s %5s  %-*s  %-*s  devices\n", "role", "rank", w.node, "node", w.addr,
               "address");
    for (int critic = 0; critic <= (y->flags.critic ? 1 : 0); critic++)
        for (size_t i = 0; i < y->n_actors; i++) {
            struct line l = { critic ? "critic" : "trainer",
                              (uint32_t)i,
                              y->actors[i].slot,
                              1,
                              y->actors[i].node,
                              "" };

            line_add(out, y, snap, plan, &w, &l);
        }
    for (size_t i = 0; i < y->n_engines; i++) {
        const struct layout_engine *e = &y->engines[i];
        bool first = e->part_of == i;
        struct line l = { e->eval ? "eval" : "rollout", 0, e->first_slot, e->n_slots, e->node, "" };

        rank[e->eval] += first;
        l.rank = rank[e->eval] - 1;
        if (!first)
            snprintf(l.part, sizeof(l.part), "  part %u", (unsigned)(i - e->part_of));
        line_add(out, y, snap, plan, &w, &l);
    }
    for (size_t i = 0; i < y->n_derived; i++)
        fl_str_add(out, "derived %s %s: %s\n", y->derived[i].flag, y->derived[i].value,
                   y->derived[i].why);
}
