/* transport/xfer/give_key.c - keys of what is given, and digests of what did not agree */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/log.h"
#include "transport/link/dev.h"
#include "transport/xfer/give_priv.h"

enum fl_status give_asked_now(const struct give *g, const Fl__XferEpoch *epoch,
                              ProtobufCBinaryData plan, uint32_t mem, struct fl_err *err)
{
    struct xfer_epoch e = msg_read_epoch(epoch);
    uint64_t hash[2];

    if (xfer_epoch_cmp(&e, &g->epoch) > 0) /* its begin is on the way to us too */
        return fl_fail(err, FL_AGAIN, "epoch %u.%u has not begun at %s", e.attempt, e.seq, g->name);
    if (!g->active || g->ending || xfer_epoch_cmp(&e, &g->epoch) != 0)
        return fl_fail(err, FL_STALE, "%s does not give in epoch %u.%u", g->name, e.attempt, e.seq);
    if (!msg_read_hash(plan, hash) || hash[0] != g->plan[0] || hash[1] != g->plan[1])
        return fl_fail(err, FL_INVALID, "epoch %u.%u has another plan at %s: %016" PRIx64 " there",
                       e.attempt, e.seq, g->name, g->plan[0]);
    if (mem >= g->have->n_mems)
        return fl_fail(err, FL_INVALID, "%s has %zu memories, number %u is asked for", g->name,
                       g->have->n_mems, mem);
    return FL_OK;
}

/* Memory and line together: a key is good as long as the line that made it, and so is a mapping. */
static uint64_t key_id(const struct give *g, const struct line *ln, uint32_t mem)
{
    return msg_key_id((uint32_t)ln->serial, g->slot.gen, mem);
}

static void key_reply(struct give *g, struct call_req *req, const struct line *ln, uint32_t mem,
                      const struct link_key *key)
{
    Fl__XferKeyIs r = FL__XFER_KEY_IS__INIT;
    Fl__XferVersion v;
    struct call_answer a = { 0 };
    struct fl_err err = { 0 };
    bool stages = give_stages(g, mem, ln->ops);

    msg_version(&g->version, &v);
    r.id = key_id(g, ln, mem);
    r.bytes = stages ? g->stage.area.bytes : g->slot.mems[mem].bytes;
    r.slot = g->slot.index;
    r.version = &v;
    r.has_passing = true;
    r.passing = g->passing || stages;
    r.has_staged = stages;
    r.staged = stages;
    if (key) {
        r.has_blob = true;
        r.blob = (ProtobufCBinaryData){ sizeof(key->blob), (uint8_t *)(uintptr_t)key->blob };
        r.has_parts = true;
        r.parts = key->parts;
        a.fds = key->fds;
        a.n_fds = key->n_fds;
    }
    if (msg_pack(&r.base, &a.body, &err) != FL_OK) {
        call_fail(req, &err);
        return;
    }
    call_answer(req, &a);
    free((void *)(uintptr_t)a.body.data);
}

static void rescue_on_ready(void *arg, struct line *ln, enum fl_status st, const struct fl_err *err)
{
    struct give *g = arg;

    if (st == FL_OK)
        return;
    fl_warn("weights link did not open member=%s link=%s why=\"%s\"", g->name, ln->ops->name,
            err->text);
    line_abort(ln);
}

static void rescue_on_quiet(void *arg, struct line *ln)
{
    (void)ln;
    give_settle(arg);
}

static const struct line_user rescue_lines = { rescue_on_ready, rescue_on_quiet };

/* A line that is pulled from, opened when the first taker of a broken team asks for it. */
static struct line *rescue_line(struct give *g, const struct give_edge *ge, const char *link,
                                struct fl_err *err)
{
    const struct link_ops *ops = port_link(g->port, link);
    struct line **at = NULL;
    uint64_t key[2] = { 0, 0 };

    if (!ops || !(ops->caps & LINK_PULL)) {
        fl_fail(err, FL_UNSUPPORTED, "%s has no link \"%.20s\" to pull from", g->name, link);
        return NULL;
    }
    for (size_t i = 0; i < GIVE_RESCUES; i++) {
        if (g->rescue[i] && g->rescue[i]->ops == ops)
            at = &g->rescue[i];
        else if (!g->rescue[i] && !at)
            at = &g->rescue[i];
    }
    if (!at) {
        fl_fail(err, FL_EXHAUSTED, "%s has %d other links open", g->name, GIVE_RESCUES);
        return NULL;
    }
    if (!*at) {
        if (line_open(g->port->loop, ops, &ge->place, 1, 0, NULL, key, &rescue_lines, g, at, err) !=
            FL_OK)
            return NULL;
        (*at)->serial = ++g->serials;
    }
    if ((*at)->state == LINE_READY)
        return *at;
    if ((*at)->state == LINE_OPENING)
        fl_fail(err, FL_AGAIN, "%s opens %s", g->name, ops->name);
    else
        fl_fail(err, FL_UNREACHABLE, "%s did not open at %s", ops->name, g->name);
    return NULL;
}

void give_key(struct give *g, struct call_req *req, const Fl__XferKey *k)
{
    struct fl_err err = { 0 };
    struct link_key key = { 0 };
    const struct link_mem *shown;
    struct line *ln;

    if (give_asked_now(g, k->epoch, k->plan, k->mem, &err) != FL_OK) {
        call_fail(req, &err);
        return;
    }
    key.part = k->has_part ? k->part : 0;
    ln = k->edge < g->n_edges ? g->edges[k->edge].line : NULL;
    if (k->link && k->edge < g->n_edges)
        ln = rescue_line(g, &g->edges[k->edge], k->link, &err);
    for (size_t i = 0; ln && i < k->n_have; i++)
        if (k->have[i] == key_id(g, ln, k->mem)) {
            key_reply(g, req, ln, k->mem, NULL);
            return;
        }
    if (!ln && err.status == FL_OK)
        fl_fail(&err, FL_INVALID, "%s has no link open for edge %u", g->name, k->edge);
    shown = &g->slot.mems[k->mem];
    if (ln && give_stages(g, k->mem, ln->ops) && give_stage_area(g, &shown, &err) != FL_OK)
        ln = NULL;
    if (ln && ln->ops->share(ln->k, shown, &key, &err) == FL_OK) {
        key_reply(g, req, ln, k->mem, &key);
        return;
    }
    call_fail(req, &err);
}

struct give_work { /* CHECK: digests of segments, on the pool */
    struct fl_work w;
    struct give *give;
    struct call_req *req;
    struct link_mem mem;
    struct fl_err err;
    size_t n;
    uint64_t (*digests)[2];
    struct link_seg segs[];
};

static void check_work(struct fl_work *w)
{
    struct give_work *c = container_of(w, struct give_work, w);

    c->err.status = link_mem_digest(&c->mem, c->segs, c->n, true, c->digests, &c->err);
}

static void check_done(struct fl_work *w, enum fl_status st)
{
    struct give_work *c = container_of(w, struct give_work, w);
    struct give *g = c->give;
    struct fl_err err = c->err;

    if (st == FL_OK && err.status == FL_OK) {
        call_reply(c->req, (struct fl_bytes){ 0 }, (struct fl_bytes){ c->digests, c->n * 16 });
    } else {
        if (st != FL_OK)
            fl_fail(&err, st, "the digests of %zu segments were not made", c->n);
        call_fail(c->req, &err);
    }
    free(c->digests);
    free(c);
    g->in_work--;
    give_settle(g);
}

/* Both ends of every run of s lie inside bytes; overflow is outside. */
static bool seg_inside(const struct link_seg *s, uint64_t bytes)
{
    uint64_t end, steps;

    return s->rows > 0 && !__builtin_mul_overflow(s->from_step, (uint64_t)s->rows - 1, &steps) &&
           !__builtin_add_overflow(s->from_off, s->rows > 1 ? steps : 0, &end) &&
           !__builtin_add_overflow(end, s->run_bytes, &end) && end <= bytes;
}

void give_check(struct give *g, struct call_req *req, const Fl__XferCheck *c,
                const struct wire_msg *m)
{
    size_t n = m->head.blob_bytes / sizeof(struct link_seg);
    struct give_work *w = NULL;
    struct fl_err err = { 0 };

    if (give_asked_now(g, c->epoch, c->plan, c->mem, &err) != FL_OK) {
        call_fail(req, &err);
        return;
    }
    w = calloc(1, sizeof(*w) + n * sizeof(struct link_seg));
    if (w)
        w->digests = calloc(n ? n : 1, 16);
    if (!w || !w->digests) {
        fl_fail(&err, FL_EXHAUSTED, "no memory to check %zu segments", n);
        goto refuse;
    }
    memcpy(w->segs, m->blob, n * sizeof(struct link_seg));
    for (size_t i = 0; i < n; i++)
        if (!seg_inside(&w->segs[i], g->slot.mems[c->mem].bytes)) {
            fl_fail(&err, FL_INVALID, "segment %zu of %zu to check lies outside %s's memory", i, n,
                    g->name);
            goto refuse;
        }
    w->w.work = check_work;
    w->w.done = check_done;
    w->give = g;
    w->req = req;
    w->mem = g->slot.mems[c->mem];
    w->n = n;
    g->in_work++;
    fl_work_start(g->port->loop, &w->w);
    return;
refuse:
    if (w)
        free(w->digests);
    free(w);
    call_fail(req, &err);
}
