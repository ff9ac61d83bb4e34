#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>
#include "common/base/log.h"
#include "transport/xfer/coord_priv.h"

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
            c->by_index[*at] = m;
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
        const struct co_tensor *t = co_tensor_of(c, c->plan->tensors[i].name);

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

/* A giver whose memory nobody else can map: what they could is a buffer that it is copied to. */
static const struct co_member *in_copies(const struct xfer_coord *c)
{
    for (const struct co_member *m = c->members; m; m = m->next)
        if (m->gives && m->source && m->st.in_copies)
            return m;
    return NULL;
}

/* On one device auto may share: nothing moves, and one copy less is held. In host memory it copies:
 * engines there may hold on to what they were given. */
static bool may_share(const struct xfer_coord *c)
{
    const char *device = NULL;

    if (in_copies(c))
        return false;

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
                               .may_share = (c->o.may_share && !in_copies(c)) || may_share(c),
                               .links = c->o.links,
                               .n_links = c->o.n_links };
    struct plan_room r;
    size_t n = 0, at = 0;
    enum fl_status st;

    if (c->req.mode == XFER_SHARE && in_copies(c))
        return fl_fail(err, FL_INVALID,
                       "%s gives memory that no other process can map (a pool's, or chunks that "
                       "cannot be exported): it cannot be shared, use copy",
                       in_copies(c)->me.name);
    for (struct co_member *m = c->members; m; m = m->next)
        n += m->gives + takes(m);
    r = (struct plan_room){ calloc(n + 1, sizeof(*r.m)), calloc(n + 1, sizeof(*r.places)) };
    free(c->by_index);
    c->by_index = calloc(n + 1, sizeof(struct co_member *));
    if (r.m && r.places && c->by_index) {
        fill_side(c, &r, &at, co_gives);
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
