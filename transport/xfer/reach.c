#include <stdlib.h>
#include <string.h>
#include "transport/xfer/take.h"

static void reach_free(struct reach *r)
{
    for (struct reach_mem *m = r->mems, *next; m; m = next) {
        next = m->next;
        r->line->ops->unmap(r->line->k, &m->mem);
        free(m);
    }
    line_destroy(r->line);
    free(r);
}

void reach_drop(struct reaches *all, struct reach *r)
{
    if (r->by || r->views)
        return;
    for (struct reach **at = &all->first; *at; at = &(*at)->next)
        if (*at == r) {
            *at = r->next;
            break;
        }
    reach_free(r);
}

void reach_sweep(struct reach *r, const struct fl_seat_ref *who)
{
    for (struct reach_mem **at = &r->mems; *at && !r->views;) {
        struct reach_mem *m = *at;
        bool old = who && memcmp(&m->who.id, &who->id, sizeof(who->id)) == 0 &&
                   m->who.attempt != who->attempt;

        if (!m->passing && !old) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        r->line->ops->unmap(r->line->k, &m->mem);
        free(m);
    }
}

void reaches_fini(struct reaches *all)
{
    for (struct reach *r = all->first, *next; r; r = next) {
        next = r->next;
        reach_free(r);
    }
    all->first = NULL;
}
