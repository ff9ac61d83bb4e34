/* Which version the sources have published, and its digest: of each tensor from their pieces' */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>
#include "transport/xfer/coord_priv.h"

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct co_tensor *)a)->name, ((const struct co_tensor *)b)->name);
}

struct co_tensor *co_tensor_of(struct xfer_coord *c, const char *name)
{
    struct co_tensor key = { .name = name }, *at;
    size_t next = c->last_tensor + 1 < c->n_tensors ? c->last_tensor + 1 : 0;

    if (c->n_tensors && strcmp(c->tensors[next].name, name) == 0) { /* asked for in order, mostly */
        c->last_tensor = next;
        return &c->tensors[next];
    }
    at = c->n_tensors ? bsearch(&key, c->tensors, c->n_tensors, sizeof(key), by_name) : NULL;
    c->last_tensor = at ? (size_t)(at - c->tensors) : 0;
    return at;
}

static void forget_held(struct xfer_coord *c)
{
    free(c->held);
    c->held = NULL;
    c->n_held = 0;
}

enum fl_status co_list_tensors(struct xfer_coord *c, bool (*who)(const struct co_member *m),
                               struct fl_err *err)
{
    size_t n = 0, kept = 0;

    forget_held(c); /* it points into the list */
    free(c->tensors);
    c->tensors = NULL;
    c->n_tensors = 0;
    for (struct co_member *m = c->members; m; m = m->next)
        n += who(m) ? m->manifest->n_tensors : 0;
    c->tensors = calloc(n + 1, sizeof(*c->tensors));
    if (!c->tensors)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu tensors", n);
    n = 0;
    for (struct co_member *m = c->members; m; m = m->next)
        for (size_t i = 0; who(m) && i < m->manifest->n_tensors; i++)
            c->tensors[n++].name = m->manifest->tensors[i].name;
    if (n)
        qsort(c->tensors, n, sizeof(*c->tensors), by_name);
    for (size_t i = 0; i < n; i++)
        if (kept == 0 || strcmp(c->tensors[kept - 1].name, c->tensors[i].name) != 0)
            c->tensors[kept++] = c->tensors[i];
    c->n_tensors = kept;
    return FL_OK;
}

static void fold_version(const struct xfer_coord *c, uint64_t number, struct xfer_version *out)
{
    *out = (struct xfer_version){ .number = number };
    for (size_t i = 0; i < c->n_tensors; i++)
        xfer_digest_fold(out->digest, c->tensors[i].digest, (uint32_t)i);
}

bool co_reported_source(const struct co_member *m)
{
    return m->source && !m->gone && m->fresh;
}

static uint64_t box_hash(const struct xfer_tensor *t, const struct xfer_box *b)
{
    uint64_t words[2 * FL_DIMS];

    memcpy(words, b->at, t->ndim * sizeof(*words));
    memcpy(words + t->ndim, b->len, t->ndim * sizeof(*words));
    return XXH3_64bits(words, 2u * t->ndim * sizeof(*words));
}

static int by_box(const void *a, const void *b)
{
    const struct co_held *x = a, *y = b;

    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    if (x->box != y->box)
        return x->box < y->box ? -1 : 1;
    return x->order < y->order ? -1 : x->order > y->order;
}

static bool same_box(const struct co_held *a, const struct co_held *b)
{
    return a && a->tensor == b->tensor && a->box == b->box;
}

static size_t hold_all(struct xfer_coord *c, struct co_held *out)
{
    size_t n = 0;

    for (const struct co_member *m = c->members; m; m = m->next)
        for (size_t i = 0; co_reported_source(m) && i < m->manifest->n_pieces; i++, n++) {
            const struct xfer_piece *p = &m->manifest->pieces[i];
            const struct xfer_tensor *t = &m->manifest->tensors[p->tensor];

            if (out)
                out[n] = (struct co_held){ (uint32_t)(co_tensor_of(c, t->name) - c->tensors),
                                           box_hash(t, &p->box), n, m, (uint32_t)i };
        }
    return n;
}

/* Each tensor's boxes, each counted once, have all of its bytes. */
static enum fl_status check_cover(struct xfer_coord *c, struct fl_err *err)
{
    for (size_t i = 0, end; i < c->n_held; i = end) {
        const struct co_held *h = &c->held[i];
        const struct xfer_tensor *t =
            &h->m->manifest->tensors[h->m->manifest->pieces[h->piece].tensor];
        uint64_t bytes = 0;

        for (end = i; end < c->n_held && c->held[end].tensor == h->tensor; end++)
            if (end == i || !same_box(&c->held[end - 1], &c->held[end]))
                bytes +=
                    xfer_box_bytes(t, &c->held[end].m->manifest->pieces[c->held[end].piece].box);
        if (bytes != xfer_tensor_bytes(t))
            return fl_fail(err, FL_INVALID,
                           "the sources' pieces of %s have %" PRIu64
                           " bytes together, the tensor has %" PRIu64
                           ": boxes of two ranks must be the same or apart",
                           t->name, bytes, xfer_tensor_bytes(t));
    }
    return FL_OK;
}

static void sources_key(const struct xfer_coord *c, uint64_t out[2])
{
    XXH3_state_t x;

    XXH3_128bits_reset(&x);
    for (const struct co_member *m = c->members; m; m = m->next) {
        const void *at[2] = { m, m->manifest };

        if (!co_reported_source(m))
            continue;
        XXH3_128bits_update(&x, at, sizeof(at));
        XXH3_128bits_update(&x, &m->me.who.attempt, sizeof(m->me.who.attempt));
        XXH3_128bits_update(&x, m->manifest->hash, sizeof(m->manifest->hash));
    }
    XXH128_hash_t h = XXH3_128bits_digest(&x);

    out[0] = h.low64;
    out[1] = h.high64;
}

/* All pieces, sorted, so that hundreds of ranks with thousands of pieces each cost a sort and not a
 * comparison of each with each; and that once, not for every version. */
static enum fl_status list_held(struct xfer_coord *c, struct fl_err *err)
{
    uint64_t key[2];
    size_t n = hold_all(c, NULL);

    sources_key(c, key);
    if (c->held && c->sources_key[0] == key[0] && c->sources_key[1] == key[1]) {
        for (size_t i = 0; i < c->n_tensors; i++)
            memset(c->tensors[i].digest, 0, sizeof(c->tensors[i].digest));
        return FL_OK;
    }
    FL_TRY(co_list_tensors(c, co_reported_source, err));
    c->held = calloc(n + 1, sizeof(*c->held));
    if (!c->held)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the %zu pieces of the sources", n);
    c->n_held = hold_all(c, c->held);
    qsort(c->held, n, sizeof(*c->held), by_box);
    enum fl_status st = check_cover(c, err);

    if (st != FL_OK) {
        forget_held(c);
        return st;
    }
    memcpy(c->sources_key, key, sizeof(key));
    return FL_OK;
}

/* Each box once; replicas of it must have the same digest. */
static enum fl_status add_sources(struct xfer_coord *c, struct fl_err *err)
{
    const struct co_held *first = NULL;

    for (const struct co_held *h = c->held; h < c->held + c->n_held; h++) {
        const uint64_t *digest = h->m->digests[h->piece];

        if (same_box(first, h)) {
            if (memcmp(first->m->digests[first->piece], digest, sizeof(h->m->digests[0])) != 0)
                return fl_fail(err, FL_CORRUPT,
                               "%s and %s hold different bytes of %s in version %" PRIu64,
                               first->m->me.name, h->m->me.name, c->tensors[h->tensor].name,
                               h->m->st.published);
            continue;
        }
        first = h;
        c->tensors[h->tensor].digest[0] += digest[0];
        c->tensors[h->tensor].digest[1] += digest[1];
    }
    return FL_OK;
}

enum fl_status co_published(struct xfer_coord *c, struct xfer_version *out, struct fl_err *err)
{
    const struct co_member *first = NULL;

    for (const struct co_member *m = c->members; m; m = m->next) {
        if (!co_reported_source(m))
            continue;
        if (!m->st.has_published || m->n_digests < m->manifest->n_pieces)
            return fl_fail(err, FL_AGAIN, "%s is writing", m->me.name);
        if (first && first->st.published != m->st.published)
            return fl_fail(err, FL_AGAIN,
                           "%s has published version %" PRIu64 ", %s version %" PRIu64,
                           first->me.name, first->st.published, m->me.name, m->st.published);
        first = first ? first : m;
    }
    if (!first)
        return fl_fail(err, FL_AGAIN, "no source of \"%s\" is there", c->set);
    FL_TRY(list_held(c, err));
    FL_TRY(add_sources(c, err));
    fold_version(c, first->st.published, out);
    return FL_OK;
}
