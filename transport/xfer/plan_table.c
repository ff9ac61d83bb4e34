/* transport/xfer/plan_table.c - one table of tensors from all manifests
 *
 * Hundreds of manifests name the same tens of thousands of tensors in the same order, so the next
 * name is first guessed to be the one after the last, and looked up by its hash only when that
 * fails. */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#include "transport/xfer/plan_priv.h"

#define NOWHERE UINT32_MAX

struct entry {
    const struct xfer_tensor *by_source, *by_engine; /* as first met on each side; NULL: not yet */
    const struct xfer_tensor *differs;               /* met later, and not the same; by: */
    uint32_t differs_rank;
    bool source_differs;
    uint32_t next; /* guess: what followed it in a manifest */
    uint64_t hash;
};
struct building {
    struct entry *entries;
    size_t n, cap;
    uint32_t *slots; /* open addressing */
    size_t n_slots;
};

static const struct xfer_tensor *entry_tensor(const struct entry *e)
{
    return e->by_source ? e->by_source : e->by_engine;
}

static bool same_shape(const struct xfer_tensor *a, const struct xfer_tensor *b)
{
    return a == b || (a->dtype == b->dtype && a->ndim == b->ndim &&
                      memcmp(a->shape, b->shape, a->ndim * sizeof(a->shape[0])) == 0);
}

static bool rehash(struct building *b)
{
    size_t n = b->n_slots ? b->n_slots * 2 : 1024;
    uint32_t *slots = malloc(n * sizeof(*slots));

    if (!slots)
        return false;
    memset(slots, 0xff, n * sizeof(*slots));
    for (uint32_t i = 0; i < b->n; i++) {
        size_t at = b->entries[i].hash & (n - 1);

        while (slots[at] != NOWHERE)
            at = (at + 1) & (n - 1);
        slots[at] = i;
    }
    free(b->slots);
    b->slots = slots;
    b->n_slots = n;
    return true;
}

static uint32_t find_or_add(struct building *b, const struct xfer_tensor *t)
{
    uint64_t hash = XXH3_64bits(t->name, strlen(t->name));

    if ((b->n + 1) * 2 > b->n_slots && !rehash(b))
        return NOWHERE;
    size_t at = hash & (b->n_slots - 1);

    for (; b->slots[at] != NOWHERE; at = (at + 1) & (b->n_slots - 1)) {
        const struct entry *e = &b->entries[b->slots[at]];

        if (e->hash == hash && strcmp(entry_tensor(e)->name, t->name) == 0)
            return b->slots[at];
    }
    if (!plan_grow(&b->entries, &b->cap, b->n + 1, sizeof(*b->entries)))
        return NOWHERE;
    b->entries[b->n] = (struct entry){ .next = NOWHERE, .hash = hash };
    b->slots[at] = (uint32_t)b->n;
    return (uint32_t)b->n++;
}

static bool take_manifest(struct building *b, const struct xfer_manifest *m, bool is_source,
                          uint32_t rank, uint32_t *map)
{
    uint32_t last = NOWHERE;

    for (size_t i = 0; i < m->n_tensors; i++) {
        const struct xfer_tensor *t = &m->tensors[i];
        uint32_t guess = last == NOWHERE ? (b->n ? 0 : NOWHERE) : b->entries[last].next;

        if (guess != NOWHERE && (entry_tensor(&b->entries[guess])->name == t->name ||
                                 strcmp(entry_tensor(&b->entries[guess])->name, t->name) == 0))
            map[i] = guess;
        else if ((map[i] = find_or_add(b, t)) == NOWHERE)
            return false;
        struct entry *e = &b->entries[map[i]];

        const struct xfer_tensor *known = entry_tensor(e);

        if (known && !e->differs && !same_shape(known, t)) {
            e->differs = t;
            e->differs_rank = rank;
            e->source_differs = is_source;
        }
        if (is_source && !e->by_source)
            e->by_source = t;
        if (!is_source && !e->by_engine)
            e->by_engine = t;
        if (last != NOWHERE)
            b->entries[last].next = map[i];
        last = map[i];
    }
    return true;
}

static int by_name(const void *a, const void *b, void *arg)
{
    const struct entry *entries = arg;

    return strcmp(entry_tensor(&entries[*(const uint32_t *)a])->name,
                  entry_tensor(&entries[*(const uint32_t *)b])->name);
}

static enum fl_status check_entry(const struct entry *e, struct fl_err *err)
{
    char a[130], b[130];
    const struct xfer_tensor *s = e->by_source, *w = e->by_engine;

    if (!s)
        return fl_fail(err, FL_INVALID, "engines want %s, which no source has",
                       xfer_tensor_line(w, a, sizeof(a)));
    if (!w)
        return fl_fail(err, FL_INVALID, "sources have %s, which no engine wants",
                       xfer_tensor_line(s, a, sizeof(a)));
    if (e->differs)
        return fl_fail(err, FL_INVALID, "source has %s, %s rank %u %s %s",
                       xfer_tensor_line(s, a, sizeof(a)), e->source_differs ? "source" : "engine",
                       e->differs_rank, e->source_differs ? "has" : "wants",
                       xfer_tensor_line(e->differs, b, sizeof(b)));
    return FL_OK;
}

/* Entries in the order of names; maps are turned from entries to places in that order. */
static enum fl_status finish(struct building *b, const struct xfer_plan_in *in,
                             struct plan_table *out, struct fl_err *err)
{
    uint32_t *order = malloc((b->n + 1) * 2 * sizeof(*order)), *rank = order + b->n + 1;
    enum fl_status st = FL_OK;
    bool sorted = true;

    out->tensors = calloc(b->n + 1, sizeof(*out->tensors));
    if (!order || !out->tensors) {
        free(order);
        return fl_fail(err, FL_EXHAUSTED, "no memory for a table of %zu tensors", b->n);
    }
    for (uint32_t i = 0; i < b->n; i++) {
        order[i] = i;
        sorted = sorted && (i == 0 || by_name(&order[i - 1], &order[i], b->entries) < 0);
    }
    if (!sorted)
        qsort_r(order, b->n, sizeof(*order), by_name, b->entries);
    for (uint32_t i = 0; i < b->n && st == FL_OK; i++) {
        st = check_entry(&b->entries[order[i]], err);
        rank[order[i]] = i;
        out->tensors[i] = *entry_tensor(&b->entries[order[i]]);
    }
    out->n = b->n;
    for (size_t m = 0; m < in->n_sources + in->n_engines && st == FL_OK && !sorted; m++) {
        const struct xfer_manifest *man =
            m < in->n_sources ? &in->sources[m] : &in->engines[m - in->n_sources];

        for (size_t i = 0; i < man->n_tensors; i++)
            out->map[m][i] = rank[out->map[m][i]];
    }
    free(order);
    return st;
}

enum fl_status plan_table_make(const struct xfer_plan_in *in, struct plan_table *out,
                               struct fl_err *err)
{
    struct building b = { 0 };
    size_t n = in->n_sources + in->n_engines;
    bool ok = (out->map = calloc(n + 1, sizeof(*out->map))) != NULL;

    for (size_t m = 0; m < n && ok; m++) {
        bool is_source = m < in->n_sources;
        size_t rank = is_source ? m : m - in->n_sources;
        const struct xfer_manifest *man = is_source ? &in->sources[rank] : &in->engines[rank];

        out->map[m] = malloc((man->n_tensors + 1) * sizeof(*out->map[m]));
        ok = out->map[m] && take_manifest(&b, man, is_source, (uint32_t)rank, out->map[m]);
    }
    enum fl_status st =
        ok ? finish(&b, in, out, err)
           : fl_fail(err, FL_EXHAUSTED, "no memory for the tensors of %zu manifests", n);

    free(b.entries);
    free(b.slots);
    return st;
}

void plan_table_fini(struct plan_table *t, const struct xfer_plan_in *in)
{
    for (size_t m = 0; t->map && m < in->n_sources + in->n_engines; m++)
        free(t->map[m]);
    free(t->map);
    free(t->tensors);
    *t = (struct plan_table){ 0 };
}
