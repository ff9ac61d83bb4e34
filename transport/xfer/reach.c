#include <stdlib.h>
#include <string.h>
#include "common/base/log.h"
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

/* ---- ahead of the epochs that will use it ---- */

static void ahead_on_ready(void *arg, struct line *ln, enum fl_status st, const struct fl_err *err)
{
    (void)arg;
    if (st == FL_OK)
        return;
    fl_warn("weights link did not open link=%s why=\"%s\"", ln->ops->name, err->text);
    line_abort(ln);
}

static void ahead_on_quiet(void *arg, struct line *ln)
{
    struct reach *r = arg;

    (void)ln;
    reach_drop(r->all, r);
}

static const struct line_user ahead_lines = { ahead_on_ready, ahead_on_quiet };

void reach_end(struct reaches *all, struct reach *r)
{
    if (r->by || r->views)
        return;
    if (r->line->state == LINE_QUIET) {
        reach_drop(all, r);
        return;
    }
    line_use(r->line, &ahead_lines, r);
    line_abort(r->line);
}

void reach_ahead(struct reaches *all, struct fl_loop *l, const struct take_team *team)
{
    struct fl_err err = { 0 };
    bool there = false;
    uint64_t key[2];

    line_key(key, team->ops, team->members, team->n);
    for (struct reach *r = all->first, *next; r; r = next) {
        const struct line *ln = r->line;
        bool same = ln->key[0] == key[0] && ln->key[1] == key[1],
             good = same && (ln->state == LINE_READY || ln->state == LINE_OPENING) &&
                    memcmp(ln->ticket, team->ticket, sizeof(team->ticket)) == 0;

        next = r->next;
        there |= good;
        if (!r->by && !good && (same || line_outdated(ln, team->members, team->n)))
            reach_end(all, r);
    }
    struct reach *r = there ? NULL : calloc(1, sizeof(*r));

    if (!r)
        return; /* without memory: the next epoch tries again */
    if (line_open(l, team->ops, team->places, team->n, team->self, team->ticket, key, &ahead_lines,
                  r, &r->line, &err) != FL_OK) {
        fl_warn("weights link did not open link=%s why=\"%s\"", team->ops->name, err.text);
        free(r);
        return;
    }
    line_note_team(r->line, team->members);
    r->all = all;
    r->next = all->first;
    all->first = r;
}
