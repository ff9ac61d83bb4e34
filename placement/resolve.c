/* placement/resolve.c - the sizes of a run: what was given, what follows, what the nodes say
 *
 * Miles assumes 8 GPUs a node where nothing is given, and a run on other nodes waits or fails far
 * from the cause. Here the nodes are asked, and what they said is part of the answer. */
#include "placement/placement.h"

#include <stdio.h>

struct seen { /* the nodes that take work and have devices */
    int32_t nodes, total, least, most;
    const char *least_name;
};

struct resolver {
    struct layout_flags *f;
    struct layout_derived *derived;
    size_t n;
    struct seen seen;
};

static struct seen look(const struct placement_snapshot *snap)
{
    struct seen s = { .least = INT32_MAX };

    for (size_t i = 0; i < snap->n_nodes; i++) {
        int32_t n = (int32_t)snap->nodes[i].n_devices;

        if (!snap->nodes[i].takes_work || !n)
            continue;
        s.nodes++;
        s.total += n;
        s.most = n > s.most ? n : s.most;
        if (n < s.least) {
            s.least = n;
            s.least_name = snap->nodes[i].name;
        }
    }
    return s;
}

static void derived(struct resolver *r, int32_t *flag, const char *name, int32_t value,
                    const char *fmt, ...) __attribute__((format(printf, 5, 6)));
static void derived(struct resolver *r, int32_t *flag, const char *name, int32_t value,
                    const char *fmt, ...)
{
    struct layout_derived *d = &r->derived[r->n++];
    va_list ap;

    *flag = value;
    d->flag = name;
    snprintf(d->value, sizeof(d->value), "%d", value);
    va_start(ap, fmt);
    vsnprintf(d->why, sizeof(d->why), fmt, ap);
    va_end(ap);
}

static int32_t actors(const struct layout_flags *f)
{
    return f->actor_nodes * f->actor_gpus_per_node;
}

static enum fl_status check_given(const struct layout_flags *f, struct fl_err *err)
{
    const struct {
        const char *flag;
        int32_t value, least;
    } all[] = {
        { "--actor-num-nodes", f->actor_nodes, 1 },
        { "--actor-num-gpus-per-node", f->actor_gpus_per_node, 1 },
        { "--rollout-num-gpus", f->rollout_gpus, 1 },
        { "--rollout-num-gpus-per-engine", f->gpus_per_engine, 1 },
        { "--num-gpus-per-node", f->gpus_per_node, 1 },
        { "--eval-num-gpus", f->eval_gpus, 0 },
        { "--eval-num-gpus-per-engine", f->gpus_per_eval_engine, 1 },
    };
    enum { MOST = 1 << 20 };

    for (size_t i = 0; i < FL_LEN(all); i++)
        if (all[i].value != -1 && (all[i].value < all[i].least || all[i].value > MOST))
            return fl_fail(err, FL_INVALID, "%s %d: give %d to %d", all[i].flag, all[i].value,
                           all[i].least, MOST);
    if (f->actor_nodes > 0 && f->actor_gpus_per_node > 0 &&
        (int64_t)f->actor_nodes * f->actor_gpus_per_node > MOST)
        return fl_fail(err, FL_INVALID,
                       "--actor-num-nodes %d x --actor-num-gpus-per-node %d: more "
                       "than %d GPUs",
                       f->actor_nodes, f->actor_gpus_per_node, MOST);
    if (f->debug_train_only && f->debug_rollout_only)
        return fl_fail(err, FL_INVALID,
                       "--debug-train-only and --debug-rollout-only: give one of them");
    if (f->eval_gpus > 0 && f->colocate)
        return fl_fail(err, FL_INVALID, "--eval-num-gpus %d: not with --colocate", f->eval_gpus);
    return FL_OK;
}

static const char *plural(int32_t n)
{
    return n == 1 ? "" : "s";
}

/* The trainer alone, or trainer and engines on the same devices: all that the nodes have. */
static enum fl_status trainer_everywhere(struct resolver *r, struct fl_err *err)
{
    struct layout_flags *f = r->f;
    const struct seen *s = &r->seen;

    if (f->actor_nodes < 0 && f->actor_gpus_per_node < 0) {
        derived(r, &f->actor_nodes, "--actor-num-nodes", s->nodes, "nodes that have GPUs");
        derived(r, &f->actor_gpus_per_node, "--actor-num-gpus-per-node", s->least,
                s->least == s->most ? "GPUs of each node" : "GPUs of the smallest node, %s",
                s->least_name);
    } else if (f->actor_nodes < 0) {
        derived(r, &f->actor_nodes, "--actor-num-nodes", 1, "its default");
    } else if (f->actor_gpus_per_node < 0) {
        int32_t share = s->total / f->actor_nodes;

        if (share == 0)
            return fl_fail(err, FL_INVALID,
                           "--actor-num-nodes %d: the nodes have %d GPUs in all; give less",
                           f->actor_nodes, s->total);
        if (f->actor_nodes <= s->nodes)
            derived(r, &f->actor_gpus_per_node, "--actor-num-gpus-per-node", s->least,
                    s->least == s->most ? "GPUs of each node" : "GPUs of the smallest node, %s",
                    s->least_name);
        else
            derived(r, &f->actor_gpus_per_node, "--actor-num-gpus-per-node", share,
                    "%d GPUs over --actor-num-nodes %d", s->total, f->actor_nodes);
    }
    return FL_OK;
}

/* Trainer beside engines, and how much of it was not said: whole nodes where there are several,
 * else half of the devices. Left: what is not spoken for by engines. */
static enum fl_status trainer_beside(struct resolver *r, struct fl_err *err)
{
    struct layout_flags *f = r->f;
    const struct seen *s = &r->seen;
    int32_t spoken = (f->rollout_gpus > 0 ? f->rollout_gpus : 0) + f->eval_gpus;
    int32_t left = s->total - spoken, want_nodes = f->actor_nodes > 0 ? f->actor_nodes : 1;

    if (f->actor_gpus_per_node > 0) {
        if (f->actor_nodes < 0)
            derived(r, &f->actor_nodes, "--actor-num-nodes", 1, "its default");
        return FL_OK;
    }
    if (left < want_nodes + (f->rollout_gpus < 0))
        return fl_fail(err, FL_INVALID,
                       "%d GPU%s on %d node%s, %d for engines: %d left, and a trainer "
                       "(--actor-num-nodes %d)%s takes %d: use --colocate, give less, or add nodes",
                       s->total, plural(s->total), s->nodes, plural(s->nodes), spoken, left, want_nodes,
                       f->rollout_gpus < 0 ? " beside an engine" : "", want_nodes + (f->rollout_gpus < 0));
    if (f->rollout_gpus > 0) { /* the rest trains */
        if (f->actor_nodes < 0 && left > s->least && left % s->least == 0)
            want_nodes = left / s->least;
        if (f->actor_nodes < 0)
            derived(r, &f->actor_nodes, "--actor-num-nodes", want_nodes,
                    "%d GPUs are left beside the engines", left);
        int32_t share = left / f->actor_nodes;

        derived(r, &f->actor_gpus_per_node, "--actor-num-gpus-per-node",
                f->actor_nodes <= s->nodes && share > s->most ? s->most : share,
                "%d of %d GPUs are left beside the engines", left, s->total);
        return FL_OK;
    }
    if (s->nodes > want_nodes) { /* whole nodes train, whole nodes generate */
        if (f->actor_nodes < 0)
            derived(r, &f->actor_nodes, "--actor-num-nodes", s->nodes / 2, "half of %d nodes",
                    s->nodes);
        int32_t cap = (left - 1) / f->actor_nodes; /* an engine needs one */

        derived(r, &f->actor_gpus_per_node, "--actor-num-gpus-per-node",
                s->least < cap ? s->least : cap,
                s->least == s->most ? "GPUs of each node" : "GPUs of the smallest node, %s",
                s->least_name);
        return FL_OK;
    }
    if (f->actor_nodes < 0)
        derived(r, &f->actor_nodes, "--actor-num-nodes", 1, "one node has GPUs");
    derived(r, &f->actor_gpus_per_node, "--actor-num-gpus-per-node",
            left / 2 / f->actor_nodes ? left / 2 / f->actor_nodes : 1, "half of %d GPUs", left);
    return FL_OK;
}

static enum fl_status engines_beside(struct resolver *r, struct fl_err *err)
{
    struct layout_flags *f = r->f;
    int32_t left = r->seen.total - actors(f) - f->eval_gpus;
    int32_t whole = left - left % f->gpus_per_engine;

    if (f->rollout_gpus > 0)
        return FL_OK;
    if (left <= 0 || whole == 0)
        return fl_fail(err, FL_INVALID,
                       "%d GPU%s on %d node%s, %d for the trainer: %d left for engines of %d; use "
                       "--colocate, give less, or add nodes",
                       r->seen.total, plural(r->seen.total), r->seen.nodes, plural(r->seen.nodes),
                       actors(f), left < 0 ? 0 : left, f->gpus_per_engine);
    derived(r, &f->rollout_gpus, "--rollout-num-gpus", whole, "left beside %d of the trainer",
            actors(f));
    return FL_OK;
}

/* What Miles does with it: the trainer's actors are made, on the engines' devices. */
static enum fl_status rollout_only(struct resolver *r, struct fl_err *err)
{
    struct layout_flags *f = r->f;

    if (f->colocate && f->rollout_gpus < 0) {
        FL_TRY(trainer_everywhere(r, err));
        derived(r, &f->rollout_gpus, "--rollout-num-gpus", actors(f),
                "the trainer's, by --colocate");
    } else {
        int32_t left = r->seen.total - f->eval_gpus, whole = left - left % f->gpus_per_engine;

        if (f->rollout_gpus < 0 && whole <= 0)
            return fl_fail(err, FL_INVALID, "%d GPU%s on %d node%s hold no engine of %d; give less with "
                           "--rollout-num-gpus-per-engine, or add nodes",
                           r->seen.total, plural(r->seen.total), r->seen.nodes, plural(r->seen.nodes),
                           f->gpus_per_engine);
        if (f->rollout_gpus < 0)
            derived(r, &f->rollout_gpus, "--rollout-num-gpus", whole, "all GPUs of the nodes");
        int32_t wide = f->rollout_gpus < f->gpus_per_node ? f->rollout_gpus : f->gpus_per_node;

        derived(r, &f->actor_gpus_per_node, "--actor-num-gpus-per-node", wide,
                "by --debug-rollout-only");
        derived(r, &f->actor_nodes, "--actor-num-nodes", f->rollout_gpus / wide,
                "by --debug-rollout-only");
    }
    f->colocate = false;
    return FL_OK;
}

static enum fl_status check_engines(const struct layout_flags *f, struct fl_err *err)
{
    const struct {
        const char *flag, *size_flag;
        int32_t gpus, each;
    } both[] = {
        { "--rollout-num-gpus", "--rollout-num-gpus-per-engine", f->rollout_gpus,
          f->gpus_per_engine },
        { "--eval-num-gpus", "--eval-num-gpus-per-engine", f->eval_gpus, f->gpus_per_eval_engine },
    };

    for (size_t i = 0; i < FL_LEN(both); i++) {
        if (both[i].gpus <= 0)
            continue;
        if (both[i].gpus < both[i].each || (i == 1 && both[i].gpus % both[i].each))
            return fl_fail(err, FL_INVALID, "%s %d holds no engine of %s %d%s", both[i].flag,
                           both[i].gpus, both[i].size_flag, both[i].each,
                           both[i].gpus < both[i].each ? "" : " without a rest");
        if (both[i].each > f->gpus_per_node && both[i].each % f->gpus_per_node)
            return fl_fail(err, FL_INVALID,
                           "%s %d is no multiple of --num-gpus-per-node %d: an engine over several "
                           "nodes takes whole ones",
                           both[i].size_flag, both[i].each, f->gpus_per_node);
    }
    return FL_OK;
}

enum fl_status layout_resolve(const struct layout_flags *flags,
                              const struct placement_snapshot *snap, struct layout_flags *out,
                              struct layout_derived list[LAYOUT_DERIVED_MAX], size_t *n_derived,
                              struct fl_err *err)
{
    struct layout_flags f = *flags;
    struct layout_derived own[LAYOUT_DERIVED_MAX];
    struct resolver r = { .f = &f, .derived = own, .seen = look(snap) };

    FL_TRY(check_given(&f, err));
    if (!r.seen.nodes)
        return fl_fail(err, FL_INVALID,
                       "none of %zu nodes has GPUs and takes work: start nodes with --num-gpus N",
                       snap->n_nodes);
    f.eval_gpus = f.eval_gpus < 0 ? 0 : f.eval_gpus;
    f.gpus_per_engine = f.gpus_per_engine < 0 ? 1 : f.gpus_per_engine;
    if (f.gpus_per_eval_engine < 0)
        f.gpus_per_eval_engine = f.gpus_per_engine;
    if (f.gpus_per_node < 0)
        derived(&r, &f.gpus_per_node, "--num-gpus-per-node", r.seen.least,
                r.seen.least == r.seen.most ? "GPUs of each node" : "GPUs of the smallest node, %s",
                r.seen.least_name);
    if (f.debug_train_only) {
        FL_TRY(trainer_everywhere(&r, err));
        f.rollout_gpus = f.eval_gpus = 0;
    } else if (f.debug_rollout_only) {
        FL_TRY(rollout_only(&r, err));
    } else if (f.colocate) {
        FL_TRY(trainer_everywhere(&r, err));
        if (f.rollout_gpus != actors(&f))
            derived(&r, &f.rollout_gpus, "--rollout-num-gpus", actors(&f),
                    "the trainer's, by --colocate");
    } else {
        FL_TRY(trainer_beside(&r, err));
        FL_TRY(engines_beside(&r, err));
    }
    FL_TRY(check_engines(&f, err));
    *out = f;
    memcpy(list, own, r.n * sizeof(own[0]));
    *n_derived = r.n;
    return FL_OK;
}
