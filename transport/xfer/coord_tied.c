/* transport/xfer/coord_tied.c - tied tensors: one memory, two names
 *
 * A model whose head is its embedding is published by one trainer under both names and wanted by an
 * engine under one. A tensor that no engine wants is an error, because a name that was changed
 * looks the same; but where its bytes are those of a tensor of the same shape that the engines do
 * want, nothing can be lost by leaving it out. */
#include <stdlib.h>
#include <string.h>
#include "common/base/log.h"
#include "transport/xfer/coord_priv.h"

struct co_untied {
    struct co_untied *next;
    struct xfer_tensor *tensors; /* of one source */
    struct xfer_piece *pieces;
};

void co_untied_free(struct co_untied *u)
{
    for (struct co_untied *next; u; u = next) {
        next = u->next;
        free(u->tensors);
        free(u->pieces);
        free(u);
    }
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct xfer_tensor *)a)->name, ((const struct xfer_tensor *)b)->name);
}

static bool wanted(const struct xfer_plan_in *in, const struct xfer_tensor *t)
{
    for (size_t e = 0; e < in->n_engines; e++)
        if (bsearch(t, in->engines[e].tensors, in->engines[e].n_tensors, sizeof(*t), by_name))
            return true;
    return false;
}

static const uint64_t *digest_of(const struct xfer_coord *c, const char *name)
{
    for (size_t low = 0, high = c->n_tensors; low < high;) {
        size_t mid = low + (high - low) / 2;
        int order = strcmp(c->tensors[mid].name, name);

        if (order == 0)
            return c->tensors[mid].digest;
        low = order < 0 ? mid + 1 : low;
        high = order < 0 ? high : mid;
    }
    return NULL;
}

static bool same_kind(const struct xfer_tensor *a, const struct xfer_tensor *b)
{
    return a != b && a->dtype == b->dtype && a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, a->ndim * sizeof(a->shape[0])) == 0;
}

/* The one of m whose bytes are the same; *like: one that could have been, by its shape. */
static const struct xfer_tensor *twin_of(const struct xfer_coord *c, const struct xfer_plan_in *in,
                                         const struct xfer_manifest *m, const struct xfer_tensor *t,
                                         const struct xfer_tensor **like)
{
    const uint64_t *mine = digest_of(c, t->name);

    for (size_t i = 0; mine && i < m->n_tensors; i++) {
        const struct xfer_tensor *o = &m->tensors[i];
        const uint64_t *theirs = same_kind(t, o) && wanted(in, o) ? digest_of(c, o->name) : NULL;

        if (theirs && memcmp(mine, theirs, 2 * sizeof(*mine)) == 0)
            return o;
        *like = theirs ? o : *like;
    }
    return NULL;
}

static enum fl_status find_twins(const struct xfer_coord *c, const struct xfer_plan_in *in,
                                 const struct xfer_manifest *m, bool *drop, bool *any,
                                 struct fl_err *err)
{
    for (size_t i = 0; i < m->n_tensors; i++) {
        const struct xfer_tensor *t = &m->tensors[i], *like = NULL, *twin;

        if (wanted(in, t))
            continue;
        twin = twin_of(c, in, m, t, &like);
        if (!twin && like)
            return fl_fail(err, FL_INVALID,
                           "%s is wanted by no engine, and its bytes are not those of %s, to which "
                           "it would be tied",
                           t->name, like->name);
        if (!twin)
            return FL_NOT_FOUND; /* the plan has said it */
        drop[i] = *any = true;
        fl_debug("weights tied set=%s tensor=%s is=%s", c->set, t->name, twin->name);
    }
    return FL_OK;
}

static enum fl_status drop_some(struct xfer_manifest *m, const bool *drop, struct co_untied **room,
                                struct fl_err *err)
{
    struct co_untied *u = calloc(1, sizeof(*u));
    uint32_t *at = calloc(m->n_tensors + 1, sizeof(*at));
    size_t n = 0, n_pieces = 0;

    if (u) {
        u->tensors = calloc(m->n_tensors + 1, sizeof(*u->tensors));
        u->pieces = calloc(m->n_pieces + 1, sizeof(*u->pieces));
        u->next = *room;
        *room = u;
    }
    if (!u || !at || !u->tensors || !u->pieces) {
        free(at);
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu tensors", m->n_tensors);
    }
    for (size_t i = 0; i < m->n_tensors; i++) {
        at[i] = (uint32_t)n;
        if (!drop[i])
            u->tensors[n++] = m->tensors[i];
    }
    for (size_t i = 0; i < m->n_pieces; i++) {
        if (drop[m->pieces[i].tensor])
            continue;
        u->pieces[n_pieces] = m->pieces[i];
        u->pieces[n_pieces++].tensor = at[m->pieces[i].tensor];
    }
    free(at);
    m->tensors = u->tensors;
    m->pieces = u->pieces;
    m->n_tensors = n;
    m->n_pieces = n_pieces;
    return FL_OK;
}

enum fl_status co_drop_tied(struct xfer_coord *c, struct xfer_plan_in *in,
                            struct xfer_manifest *sources, struct co_untied **room,
                            struct fl_err *err)
{
    bool any = false;

    for (size_t s = 0; s < in->n_sources; s++) {
        bool *drop = calloc(sources[s].n_tensors + 1, sizeof(*drop)), here = false;
        enum fl_status st = drop ? find_twins(c, in, &sources[s], drop, &here, err)
                                 : fl_fail(err, FL_EXHAUSTED, "no memory for tied tensors");

        if (st == FL_OK && here)
            st = drop_some(&sources[s], drop, room, err);
        free(drop);
        FL_TRY(st);
        any |= here;
    }
    return any ? FL_OK : FL_NOT_FOUND;
}
