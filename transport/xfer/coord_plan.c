#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>
#include "common/base/id.h"
#include "common/base/log.h"
#include "transport/xfer/coord_priv.h"

/* ---- the digests of what is published ---- */

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct co_tensor *)a)->name, ((const struct co_tensor *)b)->name);
}

static struct co_tensor *tensor_of(struct xfer_coord *c, const char *name)
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

/* The names of all givers' tensors, sorted, each once. They are borrowed from the manifests. */
static enum fl_status list_tensors(struct xfer_coord *c, bool (*who)(const struct co_member *m),
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

static bool is_source(const struct co_member *m)
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
        for (size_t i = 0; is_source(m) && i < m->manifest->n_pieces; i++, n++) {
            const struct xfer_piece *p = &m->manifest->pieces[i];
            const struct xfer_tensor *t = &m->manifest->tensors[p->tensor];

            if (out)
                out[n] = (struct co_held){ (uint32_t)(tensor_of(c, t->name) - c->tensors),
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

        if (!is_source(m))
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
    FL_TRY(list_tensors(c, is_source, err));
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

/* The version that the sources have published; FL_AGAIN: they have not, or not the same. */
static enum fl_status published(struct xfer_coord *c, struct xfer_version *out, struct fl_err *err)
{
    const struct co_member *first = NULL;

    for (const struct co_member *m = c->members; m; m = m->next) {
        if (!is_source(m))
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

/* ---- parties ---- */

static bool party_all(const struct xfer_coord *c, uint32_t party,
                      bool (*is)(const struct co_member *m, const void *arg), const void *arg)
{
    bool any = false;

    for (const struct co_member *m = c->members; m; m = m->next)
        if (!m->source && !m->gone && m->me.party == party) {
            any = true;
            if (!is(m, arg))
                return false;
        }
    return any;
}

static bool serves(const struct co_member *m, const void *version)
{
    return m->fresh && m->st.has_serving && m->st.state != RX_DIRTY &&
           xfer_version_same(&m->st.serving, version);
}

static bool can_give(const struct co_member *m, const void *version)
{
    return serves(m, version) && !m->st.maps && !m->st.offloaded &&
           m->n_digests >= m->manifest->n_tensors;
}

static bool is_fresh(const struct co_member *m, const void *arg)
{
    (void)arg;
    return m->fresh;
}

static bool is_first(const struct co_member *m)
{
    for (const struct co_member *o = m->c->members; o != m; o = o->next)
        if (!o->source && !o->gone && o->me.party == m->me.party)
            return false;
    return !m->source && !m->gone;
}

/* What most engines serve: the current version when the sources have gone on, or are gone. */
/* As many serve the one as the other: what the source has published, else the later number. */
static bool wins_tie(const struct xfer_version *v, const struct xfer_version *over,
                     const struct xfer_version *published)
{
    if (published && (xfer_version_same(v, published) || xfer_version_same(over, published)))
        return xfer_version_same(v, published);
    return v->number > over->number;
}

static bool most_served(const struct xfer_coord *c, const uint64_t *number,
                        const struct xfer_version *published, struct xfer_version *out)
{
    unsigned best = 0;

    for (const struct co_member *m = c->members; m; m = m->next) {
        unsigned n = 0;

        if (!is_first(m) || !m->fresh || !m->st.has_serving ||
            (number && m->st.serving.number != *number))
            continue;
        for (const struct co_member *o = c->members; o; o = o->next)
            n += is_first(o) && party_all(c, o->me.party, serves, &m->st.serving);
        if (n > best || (n == best && n && wins_tie(&m->st.serving, out, published))) {
            best = n;
            *out = m->st.serving;
        }
    }
    return best > 0;
}

/* Engines of one party give: its ranks' manifests are the sources, and their digests are whole
 * tensors'. */
static enum fl_status engines_give(struct xfer_coord *c, struct fl_err *err)
{
    uint32_t party = 0;
    bool found = false;

    for (struct co_member *m = c->members; m && !found; m = m->next)
        if (is_first(m) && party_all(c, m->me.party, can_give, &c->target)) {
            party = m->me.party;
            found = true;
        }
    if (!found)
        return fl_fail(
            err, FL_NOT_FOUND,
            "nobody can give version %" PRIu64
            " of \"%s\": no source has it published, no engine serves it from memory of its own",
            c->target.number, c->set);
    for (struct co_member *m = c->members; m; m = m->next)
        m->gives = !m->source && !m->gone && m->me.party == party;
    return FL_OK;
}

static bool gives(const struct co_member *m)
{
    return m->gives;
}

static enum fl_status choose_givers(struct xfer_coord *c, bool from_sources, struct fl_err *err)
{
    if (from_sources) {
        for (struct co_member *m = c->members; m; m = m->next)
            m->gives = is_source(m);
        return FL_OK;
    }
    FL_TRY(engines_give(c, err));
    FL_TRY(list_tensors(c, gives, err));
    for (struct co_member *m = c->members; m; m = m->next)
        for (size_t i = 0; m->gives && i < m->manifest->n_tensors; i++)
            memcpy(tensor_of(c, m->manifest->tensors[i].name)->digest, m->digests[i],
                   sizeof(m->digests[i]));
    return FL_OK;
}

static enum fl_status choose_target(struct xfer_coord *c, bool *from_sources, struct fl_err *err)
{
    const struct xfer_request *r = &c->req;
    bool any = r->target.digest[0] || r->target.digest[1];
    struct xfer_version now, most;
    struct fl_err why = { 0 };
    enum fl_status st = published(c, &now, &why);

    if (st != FL_OK && st != FL_AGAIN) {
        *err = why;
        return st;
    }
    *from_sources = st == FL_OK;
    if (r->kind == XFER_ADVANCE) {
        if (st != FL_OK)
            return fl_fail(err, st, "version %" PRIu64 " of \"%s\": %s", r->target.number, c->set,
                           why.text);
        if (now.number != r->target.number || (any && !xfer_version_same(&now, &r->target)))
            return fl_fail(err, FL_INVALID,
                           "version %" PRIu64 " of \"%s\" is asked for, %" PRIu64 " is published%s",
                           r->target.number, c->set, now.number,
                           now.number == r->target.number ? " with another digest" : "");
        c->target = now;
        return FL_OK;
    }
    if (most_served(c, r->target.number || any ? &r->target.number : NULL,
                    st == FL_OK ? &now : NULL, &most))
        c->target = any ? r->target : most;
    else if (st == FL_OK && (!(r->target.number || any) || now.number == r->target.number))
        c->target = any ? r->target : now;
    else
        return fl_fail(err, FL_NOT_FOUND,
                       "no version of \"%s\" to fill with: no engine serves one, %s", c->set,
                       why.text[0] ? why.text : "the source has published another");
    *from_sources = st == FL_OK && xfer_version_same(&now, &c->target);
    return FL_OK;
}

/* One of its ranks is dead: the others are left behind with it. */
static bool fail_crippled(struct xfer_coord *c, uint32_t party)
{
    const struct co_member *dead = c->members;
    struct fl_err why = { 0 };

    while (dead && (dead->me.party != party || !co_missed(dead)))
        dead = dead->next;
    for (struct co_member *m = c->members; m && dead; m = m->next) {
        if (m->source || m->gone || m->me.party != party)
            continue;
        fl_fail(&why, FL_UNREACHABLE, "another rank of the engine failed: %s", dead->why.text);
        m->phase = CO_TAKES;
        co_failed(m, why.status, &why, "reconcile");
    }
    return dead != NULL;
}

static void choose_takers(struct xfer_coord *c)
{
    c->n_takers = c->n_there = 0;
    for (struct co_member *m = c->members; m; m = m->next) {
        bool there;

        if (!is_first(m))
            continue;
        if (fail_crippled(c, m->me.party))
            continue;
        there = party_all(c, m->me.party, serves, &c->target);
        if (c->req.kind == XFER_FILL && c->req.party != XFER_ALL_PARTIES &&
            c->req.party != m->me.party)
            continue;
        c->n_there += there;
        if (there)
            continue;
        c->n_takers++;
        for (struct co_member *o = c->members; o; o = o->next) {
            if (o->source || o->gone || o->me.party != m->me.party)
                continue;
            o->phase = party_all(c, o->me.party, is_fresh, NULL) ? CO_TAKES : CO_FAILED;
            if (o->phase == CO_FAILED && o->why.status == FL_OK)
                fl_fail(&o->why, FL_TIMEOUT, "%s: reconcile: %s", o->me.name,
                        o->fresh ? "another rank of the engine is late" : "no answer");
        }
    }
}

static enum fl_status next_epoch(struct xfer_coord *c, struct fl_err *err)
{
    for (const struct co_member *m = c->members; m; m = m->next) {
        if (m->gone || !m->known)
            continue;
        if (m->st.seen.attempt > c->o.attempt)
            return fl_fail(err, FL_STALE,
                           "attempt %u of the driver is over: %s has seen attempt %u", c->o.attempt,
                           m->me.name, m->st.seen.attempt);
        if (m->st.seen.attempt == c->o.attempt && m->st.seen.seq > c->epoch.seq)
            c->epoch.seq = m->st.seen.seq;
    }
    c->epoch.seq++;
    return FL_OK;
}

enum fl_status co_decide(struct xfer_coord *c, struct fl_err *err)
{
    bool from_sources;

    for (const struct co_member *m = c->members; m; m = m->next)
        if (m->source && !m->gone && !m->fresh)
            return fl_fail(err, m->why.status ? m->why.status : FL_TIMEOUT, "%s did not report: %s",
                           m->me.name, m->why.text[0] ? m->why.text : "no answer");
    FL_TRY(next_epoch(c, err));
    FL_TRY(choose_target(c, &from_sources, err));
    choose_takers(c);
    if (c->n_takers == 0)
        return FL_OK;
    return choose_givers(c, from_sources, err);
}

/* ---- the plan ---- */

struct plan_room {
    struct xfer_manifest *m;
    struct link_place *places;
};

static void fill_side(struct xfer_coord *c, struct plan_room *r, size_t *at,
                      bool (*who)(const struct co_member *m))
{
    for (struct co_member *m = c->members; m; m = m->next)
        if (who(m)) {
            m->index = (uint32_t)*at;
            r->m[*at] = *m->manifest;
            r->places[*at] = m->st.place;
            ++*at;
        }
}

static bool takes(const struct co_member *m)
{
    return m->phase == CO_TAKES && !m->gone;
}

static enum xfer_slots slots_of(const struct xfer_coord *c, enum xfer_mode mode)
{
    for (const struct co_member *m = c->members; m; m = m->next)
        if ((takes(m) && m->st.one_slot && mode != XFER_SHARE) ||
            (m->gives && m->source && m->st.n_slots == 1 && mode == XFER_SHARE))
            return XFER_ONE_SLOT;
    return c->req.slots;
}

static enum fl_status expect_digests(struct xfer_coord *c, struct fl_err *err)
{
    free(c->expect);
    c->expect = calloc(c->plan->n_tensors + 1, sizeof(*c->expect));
    if (!c->expect)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu digests", c->plan->n_tensors);
    for (size_t i = 0; i < c->plan->n_tensors; i++) {
        const struct co_tensor *t = tensor_of(c, c->plan->tensors[i].name);

        if (t)
            memcpy(c->expect[i], t->digest, sizeof(c->expect[i]));
    }
    return FL_OK;
}

/* Planning is pure: the same question has the same plan, and from one step to the next it is the
 * same. */
static XXH128_hash_t question_of(const struct xfer_plan_in *in)
{
    struct {
        uint64_t who[2], attempt, party, hash[2];
    } m;
    struct {
        uint64_t mode, slots, bucket, spare, share, sources, engines;
    } all = {
        in->mode,      in->slots,     in->bucket_bytes, in->spare_bytes,
        in->may_share, in->n_sources, in->n_engines,
    };
    XXH3_state_t x;

    XXH3_128bits_reset(&x);
    XXH3_128bits_update(&x, &all, sizeof(all));
    for (size_t i = 0; i < in->n_sources + in->n_engines; i++) {
        const struct xfer_manifest *f = &in->sources[i]; /* engines lie behind */

        m.attempt = f->who.attempt;
        m.party = f->party;
        memcpy(m.hash, f->hash, sizeof(m.hash));
        XXH128_hash_t id = XXH3_128bits(f->who.id.b, sizeof(f->who.id.b));
        m.who[0] = id.low64;
        m.who[1] = id.high64;
        XXH3_128bits_update(&x, &m, sizeof(m));
        XXH3_128bits_update(&x, &in->places[i], sizeof(in->places[i]));
    }
    return XXH3_128bits_digest(&x);
}

static enum fl_status plan_again(struct xfer_coord *c, struct xfer_plan_in *in,
                                 struct xfer_manifest *sources, struct fl_err *err)
{
    struct co_untied *room = NULL;
    XXH128_hash_t q = question_of(in);

    if (c->plan && c->question[0] == q.low64 && c->question[1] == q.high64)
        return FL_OK;
    xfer_plan_destroy(c->plan);
    c->plan = NULL;
    c->warm = false;
    enum fl_status st = xfer_plan_make(in, &c->plan, err);

    if (st == FL_INVALID && co_drop_tied(c, in, sources, &room, err) == FL_OK)
        st = xfer_plan_make(in, &c->plan, err);
    if (st == FL_OK && in->mode == XFER_AUTO && c->plan->mode == XFER_SHARE &&
        slots_of(c, XFER_SHARE) != c->plan->slots) { /* the trainer's only slot */
        struct xfer_plan_in one = *in;

        one.mode = XFER_SHARE;
        one.slots = slots_of(c, XFER_SHARE);
        xfer_plan_destroy(FL_TAKE(c->plan));
        st = xfer_plan_make(&one, &c->plan, err);
    }
    co_untied_free(room);
    FL_TRY(st);
    xfer_plan_passed_over(in, c->plan, c->passed_over, sizeof(c->passed_over));
    if (c->passed_over[0])
        fl_info("weights go another way than the fastest set=%s mode=%s why=\"%s\"", c->set,
                xfer_mode_name(c->plan->mode), c->passed_over);
    c->question[0] = q.low64;
    c->question[1] = q.high64;
    return FL_OK;
}

/* On one device auto may share: nothing moves, and one copy less is held. In host memory it copies:
 * engines there may hold on to what they were given. */
static bool may_share(const struct xfer_coord *c)
{
    const char *device = NULL;

    for (const struct co_member *m = c->members; m; m = m->next) {
        if (!m->gives && !takes(m))
            continue;
        if (!m->st.place.gpu_uuid[0] || !m->st.place.vmm_fd ||
            (device && strcmp(device, m->st.place.gpu_uuid) != 0) || (m->gives && !m->source))
            return false;
        device = m->st.place.gpu_uuid;
    }
    return device != NULL;
}

enum fl_status co_plan(struct xfer_coord *c, struct fl_err *err)
{
    struct xfer_plan_in in = { .mode = c->req.mode,
                               .slots = slots_of(c, c->req.mode),
                               .bucket_bytes = c->o.bucket_bytes,
                               .spare_bytes = c->o.spare_bytes ? c->o.spare_bytes : XFER_NO_LIMIT,
                               .may_share = c->o.may_share || may_share(c),
                               .links = c->o.links,
                               .n_links = c->o.n_links };
    struct plan_room r;
    size_t n = 0, at = 0;
    enum fl_status st;

    for (struct co_member *m = c->members; m; m = m->next)
        n += m->gives + takes(m);
    r = (struct plan_room){ calloc(n + 1, sizeof(*r.m)), calloc(n + 1, sizeof(*r.places)) };
    if (r.m && r.places) {
        fill_side(c, &r, &at, gives);
        in.n_sources = at;
        fill_side(c, &r, &at, takes);
        in.n_engines = at - in.n_sources;
        in.sources = r.m;
        in.engines = r.m + in.n_sources;
        in.places = r.places;
        st = plan_again(c, &in, r.m, err);
    } else {
        st = fl_fail(err, FL_EXHAUSTED, "no memory to plan for %zu members", n);
    }
    free(r.m);
    free(r.places);
    FL_TRY(st);
    return expect_digests(c, err);
}

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

/* False: some do not agree, or could not be added. */
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
        if (is_first(m) && m->phase != CO_OUT)
            all = party_names(c, m->me.party, tensor);
    if (!(all && (c->n_takers > 1 || first->st.source_at_fault)))
        return false;
    fl_fail(err, FL_CORRUPT,
            "%s is at fault: %s failed at every one of %u engines in epoch %u.%u; first %s",
            giver->me.name, tensor < c->plan->n_tensors ? c->plan->tensors[tensor].name : "?",
            c->n_takers, c->epoch.attempt, c->epoch.seq, first->st.why.text);
    return true;
}
