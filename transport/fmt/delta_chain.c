/* transport/fmt/delta_chain.c - from a whole version to a later one, by the files of those between
 *
 * A host that has a copy follows the changes: they are less to read than a base. All others begin
 * at the newest base below the version. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "common/base/fault.h"
#include "transport/fmt/delta_priv.h"

enum { MAX_CHAIN = 10000, HOLD_LOOK_MS = 5 };

static void chain_clear(struct delta_chain *c)
{
    for (size_t i = 0; i < c->n; i++)
        delta_version_destroy(c->v[i]);
    free(c->v);
    c->v = NULL;
    c->n = c->cap = 0;
    c->base = DELTA_NO_BASE;
}

static void chain_forget_local(struct delta_chain *c)
{
    st_reader_destroy(c->local);
    c->local = NULL;
}

static enum fl_status chain_add(struct delta_chain *c, struct delta_version *v_take,
                                struct fl_err *err)
{
    size_t cap = c->cap ? c->cap * 2 : 16;
    void *grown = c->n < c->cap ? c->v : realloc(c->v, cap * sizeof(struct delta_version *));

    if (!grown || c->n >= MAX_CHAIN) {
        delta_version_destroy(v_take);
        return fl_fail(err, FL_EXHAUSTED, "no room for a chain of %zu versions", c->n);
    }
    c->cap = c->n < c->cap ? c->cap : cap;
    c->v = grown;
    c->v[c->n++] = v_take;
    return FL_OK;
}

/* Bases of versions below `below` alone: the others are damaged, or not wanted. */
static enum fl_status open_at(struct delta_chain *c, const char *dir, int64_t at, int64_t below,
                              struct delta_version **out, struct fl_err *err)
{
    if (FL_FAULT("fmt.chain"))
        return fl_fail_errno(err, "open version %" PRId64 " of %s", at, dir);
    enum fl_status st = at < below ? delta_base_open(dir, at, out, err) : FL_NOT_FOUND;

    if (st == FL_OK)
        c->base = at;
    if (st == FL_CORRUPT)
        c->bad_base = at;
    return st == FL_NOT_FOUND || st == FL_CORRUPT ? delta_open(dir, at, out, err) : st;
}

/* From the wanted version back to the local one or to a base; then turned round. A base on the way
 * makes the local copy superfluous. */
static enum fl_status chain_find(struct delta_chain *c, const char *dir, int64_t version,
                                 int64_t below, struct fl_err *err)
{
    for (int64_t at = version; at != DELTA_NO_BASE && !(c->local && at == c->local_version);) {
        struct delta_version *v;

        FL_TRY(open_at(c, dir, at, below, &v, err));
        at = delta_base_of(v);
        FL_TRY(chain_add(c, v, err));
    }
    for (size_t i = 0; i < c->n / 2; i++) {
        struct delta_version *v = c->v[i];

        c->v[i] = c->v[c->n - 1 - i];
        c->v[c->n - 1 - i] = v;
    }
    if (c->n && delta_base_of(c->v[0]) == DELTA_NO_BASE)
        chain_forget_local(c);
    return FL_OK;
}

/* What else there may be to begin at, after one that ended with st; false: nothing. */
static bool chain_else(struct delta_chain *c, int64_t *below, bool *again, enum fl_status st)
{
    if (st != FL_NOT_FOUND && st != FL_CORRUPT)
        return false;
    if (c->local) {
        chain_forget_local(c);
        *below = INT64_MAX;
        return true;
    }
    if (c->base != DELTA_NO_BASE && c->bad_base == c->base) {
        *below = c->base;
        return true;
    }
    bool first = !*again; /* a base came, and what was before it went, while we looked */

    *again = true;
    return first;
}

enum fl_status delta_chain_over(struct delta_chain *c, const char *dir, int64_t version,
                                delta_use use, void *arg, struct fl_err *err)
{
    int64_t below = c->local ? 0 : INT64_MAX;
    struct fl_err why = { 0 }, damage = { 0 };
    bool again = false;
    enum fl_status st;

    c->bad_base = DELTA_NO_BASE;
    do {
        chain_clear(c);
        st = chain_find(c, dir, version, below, &why);
        if (st == FL_OK)
            st = use(c, arg, &why);
        if (st == FL_CORRUPT)
            damage = why;
    } while (chain_else(c, &below, &again, st));
    chain_clear(c);
    chain_forget_local(c);
    if (st == FL_NOT_FOUND && c->bad_base != DELTA_NO_BASE)
        return fl_fail(err, FL_CORRUPT,
                       "base_v%06" PRId64 " of %s is damaged, and what it was made from is gone: a "
                       "whole version must be written anew",
                       c->bad_base, dir);
    if (st == FL_NOT_FOUND && damage.status != FL_OK)
        why = damage;
    if (st != FL_OK && err)
        *err = why;
    return st == FL_OK ? FL_OK : why.status;
}

static enum fl_status check_names(const struct delta_chain *c, const struct st_reader *all,
                                  struct fl_err *err)
{
    for (size_t v = 0; v < c->n; v++) {
        const struct st_reader *r = delta_files(c->v[v]);

        for (size_t i = 0; i < st_count(r); i++)
            if (!st_find(all, st_at(r, i)->name))
                return fl_fail(err, FL_CORRUPT, "tensor %.80s is changed and was never there",
                               st_at(r, i)->name);
    }
    return FL_OK;
}

static const struct st_reader *chain_names(const struct delta_chain *c)
{
    return c->local ? c->local : delta_files(c->v[0]);
}

enum fl_status delta_chain_entries(const struct delta_chain *c, struct st_entry **out, size_t *n,
                                   uint64_t *most, struct fl_err *err)
{
    const struct st_reader *all = chain_names(c);
    struct st_entry *e = calloc(st_count(all) + 1, sizeof(*e));
    enum fl_status st = e ? check_names(c, all, err)
                          : fl_fail(err, FL_EXHAUSTED, "no memory for %zu tensors", st_count(all));

    *most = 1;
    *n = st_count(all);
    for (size_t i = 0; i < *n && st == FL_OK; i++) {
        const struct st_tensor *t = st_at(all, i);

        if (!t->known)
            st = fl_fail(err, FL_UNSUPPORTED, "tensor %.80s has dtype %s", t->name, t->dtype_name);
        e[i] = (struct st_entry){ .name = t->name, .dtype = t->dtype, .ndim = t->ndim };
        memcpy(e[i].shape, t->shape, sizeof(e[i].shape));
        *most = t->bytes > *most ? t->bytes : *most;
    }
    if (st == FL_OK)
        *out = e;
    else
        free(e);
    return st;
}

static bool goes_on(const struct delta_chain *c)
{
    const struct timespec look = { .tv_nsec = HOLD_LOOK_MS * 1000000l };

    while (c->pace && atomic_load(c->pace) == DELTA_HOLD)
        nanosleep(&look, NULL);
    return !c->pace || atomic_load(c->pace) != DELTA_STOP;
}

/* Sums of a whole tensor for each of many versions would take most of the time: the last one says
 * it all. each: who is it that is damaged? */
static enum fl_status carry(struct delta_chain *c, const struct st_entry *e, void *buf, bool each,
                            struct fl_err *err)
{
    const void *was = c->local ? st_find(c->local, e->name)->data : NULL;
    size_t last = c->n;

    while (last > 0 && !st_find(delta_files(c->v[last - 1]), e->name))
        last--;
    for (size_t v = 0; v < c->n; v++) {
        if (!goes_on(c))
            return fl_fail(err, FL_CANCELLED, "stopped at tensor %.80s", e->name);
        enum fl_status st = delta_apply_to(c->v[v], e, was, buf, each || v + 1 == last, err);

        if (st == FL_CORRUPT && each && v == 0 && c->base != DELTA_NO_BASE)
            c->bad_base = c->base;
        if (st != FL_OK)
            return st;
        was = buf;
    }
    return FL_OK;
}

enum fl_status delta_chain_carry(struct delta_chain *c, const struct st_entry *e, void *buf,
                                 struct fl_err *err)
{
    enum fl_status st = carry(c, e, buf, false, err);

    return st == FL_CORRUPT ? carry(c, e, buf, true, err) : st;
}
