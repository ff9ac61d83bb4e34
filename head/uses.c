#include <stdlib.h>

#include "common/base/log.h"
#include "head/state.h"

void uses_free(struct node *n)
{
    free(n->uses);
    n->uses = NULL;
    n->n_uses = 0;
    n->uses_told = n->slowed_told = false;
}

size_t seat_leases(const struct seat *s, struct lease **out, size_t cap)
{
    struct head *h = s->job->head;
    const Fl__LayoutRank *rank = seat_rank(s);
    const Fl__JobRec *j = s->job->rec;
    struct group *g = s->rec->has_group ? group_of(h, &s->rec->group)
                      : j->has_group    ? group_of(h, &j->group)
                                        : NULL;
    size_t n = 0, wants = !g ? 0 : s->rec->has_group ? (rank ? rank->n_bundles : 0) : 1;

    for (size_t i = 0; i < wants && n < cap; i++) {
        size_t b = s->rec->has_group ? rank->bundles[i] : 0;
        struct lease *l = b < g->rec->n_bundles ? lease_of(h, g->rec->bundles[b]->lease) : NULL;

        if (l)
            out[n++] = l;
    }
    return n;
}

/* A program may open another device than its own, and nobody else would ever say so. */
static void note_elsewhere(struct node *n, const struct use *u)
{
    struct head *h = n->head;
    ProtobufCBinaryData id = BYTES_OF(u->who.id);
    struct seat *s = seat_of(h, &id);
    struct lease *leases[SEAT_LEASES];
    const Fl__Inventory *inv = n->rec->inventory;
    char given[256] = "";
    struct fl_str text = FL_STR_ON(given);

    if (!s || s->rec->who->attempt != u->who.attempt || s->elsewhere == u->who.attempt)
        return;
    size_t n_leases = seat_leases(s, leases, SEAT_LEASES), devices = 0;

    for (size_t i = 0; i < n_leases; i++)
        for (size_t k = 0; k < leases[i]->rec->n_devices; k++, devices++) {
            uint32_t d = leases[i]->rec->devices[k];

            if (d == u->device)
                return;
            if (d < inv->n_devices)
                fl_str_add(&text, "%s%s", devices ? ", " : "", inv->devices[d]->id);
        }
    if (!devices)
        return; /* nothing of it is promised: a driver that looks at what there is */
    s->elsewhere = u->who.attempt;
    const Fl__Device *d = inv->devices[u->device];

    fl_warn("worker uses a device that it was not given role=%s rank=%u node=%s device=%s pid=%d "
            "given=\"%s\"",
            s->rec->role, s->rec->rank, n->rec->name, d->id, u->pid, given);
    joblog_note(s->job, "%s %u on %s: its process %d uses device %s (%s%s%s), and was given %s",
                s->rec->role, s->rec->rank, n->rec->name, u->pid, d->id,
                d->uuid ? d->uuid : "logical", d->pci ? " at " : "", d->pci ? d->pci : "", given);
}

void uses_take(struct node *n, const Fl__Beat *b)
{
    if (!b->uses_told)
        return;
    uses_free(n);
    n->uses_told = true;
    n->uses = must(calloc(b->n_uses + 1, sizeof(*n->uses)));
    for (size_t i = 0; i < b->n_uses; i++) {
        const Fl__DeviceUse *m = b->uses[i];
        struct use *u = &n->uses[n->n_uses];

        if (m->device >= n->rec->inventory->n_devices)
            continue;
        *u = (struct use){
            .device = m->device, .pid = m->pid, .has_bytes = m->has_bytes, .bytes = m->bytes,
            .has_pct = m->has_sm_pct && m->sm_pct <= 100, .sm_pct = m->sm_pct
        };
        if (m->who && m->who->worker.len == sizeof(u->who.id)) {
            memcpy(&u->who.id, m->who->worker.data, sizeof(u->who.id));
            u->who.attempt = m->who->attempt;
            u->known = true;
        }
        n->n_uses++;
        if (u->known)
            note_elsewhere(n, u);
    }
}

void slowed_take(struct node *n, const Fl__Beat *b)
{
    n->slowed_told = b->has_slowed_told && b->slowed_told;
    n->slowed = 0;
    for (size_t i = 0; n->slowed_told && i < b->n_slowed; i++)
        if (b->slowed[i] < 64) /* a daemon looks at no more */
            n->slowed |= 1ull << b->slowed[i];
}

bool device_slowed(const struct node *n, uint32_t device)
{
    return n->slowed_told && device < 64 && (n->slowed >> device & 1);
}
