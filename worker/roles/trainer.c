#include "worker/roles/trainer.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/conf/json.h"

enum { BEGIN_MS = 120000 };

static void point_last(struct trainer *t)
{
    for (uint32_t i = 0; i < t->layout->n; i++)
        t->last[i] = (float *)(uintptr_t)furlong_weights_last(t->weights, i); /* read alone */
}

static void point_next(struct trainer *t)
{
    for (uint32_t i = 0; i < t->layout->n; i++)
        t->next[i] = furlong_weights_data(t->weights, i);
}

/* What was published last becomes what the next version starts from. */
static enum fl_status begin(struct trainer *t, uint64_t version, uint32_t budget_ms,
                            struct fl_err *err)
{
    if (FL_FAULT("trainer.begin"))
        return fl_fail_errno(err, "begin of version %ju", (uintmax_t)version);
    FL_TRY(furlong_weights_begin(t->weights, version, budget_ms ? budget_ms : BEGIN_MS, err));
    t->begun = true;
    point_last(t);
    point_next(t);
    for (uint32_t i = 0; i < t->layout->n; i++)
        if (t->next[i] != t->last[i])
            memcpy(t->next[i], t->last[i], t->layout->tensors[i].count * sizeof(float));
    return FL_OK;
}

static enum fl_status publish(struct trainer *t, uint64_t version, struct fl_err *err)
{
    if (FL_FAULT("trainer.publish"))
        return fl_fail_errno(err, "publish version %ju", (uintmax_t)version);
    FL_TRY(furlong_weights_publish(t->weights, version, err));
    t->begun = t->torn = false;
    t->state.version = version;
    point_last(t);
    return FL_OK;
}

/* What a call that failed has begun. The optimizer, and with one slot the weights, may have taken
 * half a step: another one from there would be wrong in silence. */
static void take_back(struct trainer *t)
{
    if (!t->begun)
        return;
    t->begun = false;
    t->torn = true;
    (void)furlong_weights_abandon(t->weights, NULL); /* begun, by the one thread there is */
}

static enum fl_status is_whole(const struct trainer *t, const char *what, struct fl_err *err)
{
    return t->torn ? fl_fail(err, FL_INVALID,
                             "%s: the last train or load was cut short while it wrote; load a "
                             "checkpoint",
                             what)
                   : FL_OK;
}

/* ---- train ----------------------------------------------------------------------------------- */
struct train_call {
    int64_t step, version, epochs, minibatch;
    struct batch batch;
    uint32_t budget_ms;
    /* out */
    struct learner_sums sums, gap;
    double grad_norm, begin_s, train_s, publish_s, log_probs_s;
};

static enum fl_status train_read(const struct furlong_event *ev, struct train_call *c,
                                 struct fl_err *err)
{
    json_t *o = NULL;
    enum fl_status st;

    FL_TRY(role_body(ev, &o, err));
    struct fl_json_at at = fl_json_root(o, "train");
    c->epochs = 1;
    st = fl_json_int(&at, "step", 0, INT64_MAX, &c->step, err);
    if (st == FL_OK)
        st = fl_json_int(&at, "version", 0, INT64_MAX, &c->version, err);
    if (st == FL_OK && fl_json_has(&at, "epochs"))
        st = fl_json_int(&at, "epochs", 1, 1024, &c->epochs, err);
    if (st == FL_OK && fl_json_has(&at, "minibatch"))
        st = fl_json_int(&at, "minibatch", 0, INT32_MAX, &c->minibatch, err);
    json_decref(o);
    FL_TRY(st);
    c->budget_ms = ev->budget_ms;
    return batch_read(ev->blob, ev->blob_bytes, BATCH_LOGPROBS | BATCH_ADVANTAGES, &c->batch, err);
}

/* One optimizer step. The first one of a call opens the next version, as late as it can be: until
 * then gradients are computed from what the engines may still read. */
static enum fl_status train_part(struct trainer *t, struct train_call *c, uint32_t part,
                                 struct learner_part range, struct fl_err *err)
{
    void *sum;
    size_t bytes;

    if (FL_FAULT("trainer.train"))
        return fl_fail_errno(err, "train part %u", part);
    FL_TRY(learner_gradient(t->learner, part ? t->next : t->last, &c->batch, range, &sum, &bytes,
                            err));
    FL_TRY(trainer_reduce(t, (uint64_t)c->version, part, sum, bytes, err));
    if (part == 0) {
        double from = role_now_s();

        FL_TRY(begin(t, (uint64_t)c->version, c->budget_ms, err));
        c->begin_s = role_now_s() - from;
    }
    if (FL_FAULT("trainer.write"))
        return fl_fail_errno(err, "write weights of version %jd", (intmax_t)c->version);
    learner_apply(t->learner, sum, ++t->state.adam_steps, t->next, t->m, t->v, &c->sums,
                  &c->grad_norm);
    return FL_OK;
}

static enum fl_status train_all(struct trainer *t, struct train_call *c, struct fl_err *err)
{
    uint32_t n = c->batch.n_samples, part = 0;
    uint32_t each = c->minibatch && c->minibatch < n ? (uint32_t)c->minibatch : n;
    bool several = each < n || c->epochs > 1;
    uint64_t parts = (uint64_t)c->epochs * ((n + each - 1) / each);
    double from = role_now_s();

    point_last(t);
    if (several) /* later parts see weights that have moved: the gap is measured before */
        FL_TRY(learner_compare(t->learner, t->last, &c->batch, &c->gap, err));
    c->log_probs_s = role_now_s() - from;
    from = role_now_s();
    for (int64_t e = 0; e < c->epochs; e++)
        for (uint32_t at = 0; at < n; at += each) {
            struct learner_part range = { at, at + each < n ? at + each : n };

            FL_TRY(train_part(t, c, part++, range, err));
            furlong_progress(t->f, part, parts);
        }
    if (!several)
        c->gap = c->sums;
    c->train_s = role_now_s() - from - c->begin_s;
    return FL_OK;
}

static json_t *train_answer(const struct train_call *c)
{
    double tokens = c->gap.tokens > 0 ? c->gap.tokens : 1;

    return json_pack("{s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:I, s:f, s:f, s:f, s:f}", "step",
                     (json_int_t)c->step, "version", (json_int_t)c->version, "loss", c->sums.loss,
                     "grad_norm", c->grad_norm, "logprob_abs_diff", c->gap.abs_diff / tokens,
                     "entropy", c->sums.tokens > 0 ? c->sums.entropy / c->sums.tokens : 0.0,
                     "clip_fraction", c->sums.tokens > 0 ? c->sums.clipped / c->sums.tokens : 0.0,
                     "tokens", (json_int_t)c->batch.n_tokens, "begin_s", c->begin_s, "train_s",
                     c->train_s, "publish_s", c->publish_s, "log_probs_s", c->log_probs_s);
}

static enum fl_status on_train(struct trainer *t, const struct furlong_event *ev, json_t **answer,
                               struct fl_err *err)
{
    struct train_call c = { 0 };
    enum fl_status st = is_whole(t, "train", err);

    if (st == FL_OK)
        st = train_read(ev, &c, err);
    if (st == FL_OK)
        st = train_all(t, &c, err);
    if (st == FL_OK) {
        double from = role_now_s();

        st = publish(t, (uint64_t)c.version, err);
        c.publish_s = role_now_s() - from;
    }
    if (st == FL_OK) {
        t->state.step = (uint64_t)c.step + 1;
        *answer = train_answer(&c);
        free(t->last_answer);
        t->last_answer = *answer ? json_dumps(*answer, JSON_COMPACT) : NULL;
    }
    batch_fini(&c.batch);
    return st;
}

/* ---- the other calls ------------------------------------------------------------------------- */
static enum fl_status dir_of(const struct furlong_event *ev, char out[1024], struct fl_err *err)
{
    json_t *o = NULL;
    const char *dir = "";
    enum fl_status st;

    FL_TRY(role_body(ev, &o, err));
    struct fl_json_at at = fl_json_root(o, ev->method);
    st = fl_json_text(&at, "dir", &dir, err);
    if (st == FL_OK && strlen(dir) >= 1024)
        st = fl_fail(err, FL_INVALID, "%s: the path has %zu bytes", ev->method, strlen(dir));
    if (st == FL_OK)
        snprintf(out, 1024, "%s", dir);
    json_decref(o);
    return st;
}

static enum fl_status on_save(struct trainer *t, const struct furlong_event *ev, json_t **answer,
                              struct fl_err *err)
{
    char dir[1024], folder[1024];
    uint64_t bytes = 0;
    double from = role_now_s();

    FL_TRY(is_whole(t, "save", err));
    FL_TRY(dir_of(ev, dir, err));
    if (t->seat->rank == 0) {
        snprintf(folder, sizeof(folder), "%s", dir);
        if (strrchr(folder, '/'))
            *strrchr(folder, '/') = '\0';
        if (!t->lock)
            FL_TRY(ckpt_lock_take(folder, t->seat->job, t->seat->attempt, &t->lock, err));
        point_last(t);
        FL_TRY(ckpt_save(dir, t->layout, t->last, t->m, t->v, &t->args.alphabet, &t->state, &bytes,
                         err));
        ckpt_prune(folder, (uint32_t)t->args.flags.save_keep);
    }
    *answer = json_pack("{s:I, s:f}", "bytes", (json_int_t)bytes, "seconds", role_now_s() - from);
    return FL_OK;
}

static enum fl_status first_weights(struct trainer *t, struct fl_err *err)
{
    const char *hf = t->args.flags.hf_checkpoint;

    memset(t->m, 0, t->layout->floats * sizeof(float));
    memset(t->v, 0, t->layout->floats * sizeof(float));
    t->state = (struct ckpt_state){ .seed = (uint64_t)t->args.flags.seed };
    if (hf)
        return ckpt_load(hf, t->layout, t->next, NULL, NULL, NULL, err);
    float *base = malloc(t->layout->floats * sizeof(float));
    if (!base)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the first weights");
    model_init(t->layout, base, t->state.seed);
    for (uint32_t i = 0; i < t->layout->n; i++)
        memcpy(t->next[i], base + t->layout->tensors[i].offset,
               t->layout->tensors[i].count * sizeof(float));
    free(base);
    return FL_OK;
}

static enum fl_status on_load(struct trainer *t, const struct furlong_event *ev, json_t **answer,
                              struct fl_err *err)
{
    char dir[1024];
    struct ckpt_state s = { 0 };

    FL_TRY(dir_of(ev, dir, err));
    if (*dir)
        FL_TRY(ckpt_state_read(dir, &s, err));
    FL_TRY(begin(t, s.version, ev->budget_ms, err));
    if (*dir)
        FL_TRY(ckpt_load(dir, t->layout, t->next, t->m, t->v, &t->state, err));
    else
        FL_TRY(first_weights(t, err));
    FL_TRY(publish(t, t->state.version, err));
    *answer = json_pack("{s:I, s:I}", "step", (json_int_t)t->state.step, "version",
                        (json_int_t)t->state.version);
    return FL_OK;
}

static size_t give_back(struct trainer *t)
{
    size_t had = learner_drop(t->learner);

    (void)malloc_trim(0); /* the allocator keeps what was freed otherwise */
    return had;
}

static enum fl_status on_clear(struct trainer *t, const struct furlong_event *ev, json_t **answer,
                               struct fl_err *err)
{
    size_t had = give_back(t);

    (void)ev;
    (void)err;
    *answer =
        json_pack("{s:I, s:I}", "left_bytes", (json_int_t)(t->layout->floats * sizeof(float) * 3),
                  "dropped_bytes", (json_int_t)had);
    return FL_OK;
}

static enum fl_status on_state(struct trainer *t, const struct furlong_event *ev, json_t **answer,
                               struct fl_err *err)
{
    (void)ev;
    FL_TRY(is_whole(t, "state", err));
    *answer = json_pack("{s:I, s:I, s:o}", "step", (json_int_t)t->state.step, "version",
                        (json_int_t)t->state.version, "last",
                        t->last_answer ? json_loads(t->last_answer, 0, NULL) : json_null());
    return FL_OK;
}

static const struct {
    const char *name;
    enum fl_status (*serve)(struct trainer *t, const struct furlong_event *ev, json_t **answer,
                            struct fl_err *err);
} methods[] = {
    { "train", on_train },        { "save", on_save },   { "load", on_load },
    { "clear_memory", on_clear }, { "state", on_state },
};

static void serve_call(struct trainer *t, const struct furlong_event *ev)
{
    struct fl_err err = { 0 };
    json_t *answer = NULL;
    enum fl_status st = FL_UNSUPPORTED;
    size_t i;

    for (i = 0; i < sizeof(methods) / sizeof(*methods); i++)
        if (!strcmp(methods[i].name, ev->method))
            break;
    if (i < sizeof(methods) / sizeof(*methods))
        st = methods[i].serve(t, ev, &answer, &err);
    else
        st = fl_fail(&err, FL_UNSUPPORTED, "the trainer has no call '%.40s'", ev->method);
    if (st == FL_OK) {
        role_reply(ev->call, answer, NULL, 0);
    } else {
        take_back(t);
        role_refuse(ev->call, st, &err);
    }
}

static void serve_offload(struct trainer *t, const struct furlong_event *ev)
{
    struct furlong_moved moved = { 0 };
    struct fl_err err = { 0 };
    double from = role_now_s();
    size_t own = give_back(t);
    double own_s = role_now_s() - from;
    enum fl_status st = furlong_arena_offload(t->f, ev->tags, &moved, &err);

    if (st == FL_OK)
        role_reply_moved(ev->call, &moved, own, own_s);
    else
        role_refuse(ev->call, st, &err);
}

static enum fl_status serve(struct trainer *t, struct fl_err *err)
{
    struct furlong_event ev;

    for (;;) {
        uint64_t had = 0;

        FL_TRY(furlong_next(t->f, FURLONG_MAIN, FURLONG_FOREVER, &ev, err));
        switch (ev.what) {
        case FURLONG_CALL:
            serve_call(t, &ev);
            break;
        case FURLONG_OFFLOAD:
            serve_offload(t, &ev);
            break;
        case FURLONG_SQUEEZE:
            had = give_back(t);
            furlong_reply(ev.call, &had, sizeof(had));
            break;
        case FURLONG_STOP:
            furlong_reply(ev.call, NULL, 0);
            return FL_OK;
        default: /* onload: the arena's memory is back, ours comes when it is used */
            furlong_reply(ev.call, NULL, 0);
            break;
        }
    }
}

/* ---- start ----------------------------------------------------------------------------------- */
static enum fl_status memory(struct trainer *t, struct fl_err *err)
{
    const struct train_flags *f = &t->args.flags;
    size_t bytes = t->layout->floats * sizeof(float);
    bool disk = !strcmp(f->offload_train_target, "disk");
    void *m, *v;

    FL_TRY(furlong_arena_keep(t->f, FURLONG_TAG_OPTIMIZER,
                              disk ? FURLONG_KEEP_DISK : FURLONG_KEEP_IN, f->offload_train_disk_dir,
                              err));
    FL_TRY(furlong_arena_alloc(t->f, FURLONG_TAG_OPTIMIZER, -1, bytes, &m, err));
    t->m = m;
    FL_TRY(furlong_arena_alloc(t->f, FURLONG_TAG_OPTIMIZER, -1, bytes, &v, err));
    t->v = v;
    t->last = calloc(t->layout->n, sizeof(*t->last));
    t->next = calloc(t->layout->n, sizeof(*t->next));
    if (!t->last || !t->next)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u tensors", t->layout->n);
    return FL_OK;
}

static enum fl_status weights(struct trainer *t, struct fl_err *err)
{
    struct furlong_weights_opts o = { .slots = (uint32_t)t->args.flags.weight_slots };
    struct furlong_tensor *tensors = role_tensors(t->layout);

    if (!tensors)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u tensors", t->layout->n);
    enum fl_status st =
        furlong_weights_offer(t->f, "policy", tensors, t->layout->n, &o, &t->weights, err);
    free(tensors);
    FL_TRY(st);
    point_next(t); /* a new offer is begun */
    FL_TRY(first_weights(t, err));
    return publish(t, 0, err);
}

/* The node's cores, shared by the ranks there; no more than there are shards to work on. */
static uint32_t threads(const struct trainer *t)
{
    enum { MOST = 8 };
    long cores = sysconf(_SC_NPROCESSORS_ONLN),
         each = cores / (t->seat->local_world ? t->seat->local_world : 1);

    if (t->args.flags.train_threads)
        return (uint32_t)t->args.flags.train_threads;
    return each < 1 ? 1 : each > MOST ? MOST : (uint32_t)each;
}

static enum fl_status start(struct trainer *t, struct fl_err *err)
{
    const struct train_flags *f = &t->args.flags;
    struct learner_opts o = {
        .lr = (float)f->lr,
        .beta1 = (float)f->adam_beta1,
        .beta2 = (float)f->adam_beta2,
        .eps = (float)f->adam_eps,
        .decay = (float)f->weight_decay,
        .clip_grad = (float)f->clip_grad,
        .inv_temp = (float)(1 / f->temperature),
        .policy = { (float)f->eps_clip, (float)f->eps_clip_high, (float)f->entropy_coef },
        .rank = t->seat->rank,
        .world = t->seat->world,
        .threads = threads(t),
    };

    FL_TRY(model_layout_create(&t->args.config, &t->layout, err));
    FL_TRY(memory(t, err));
    FL_TRY(learner_create(t->layout, &o, &t->learner, err));
    FL_TRY(weights(t, err));
    fl_info("trainer ready rank=%u world=%u tensors=%u bytes=%zu", t->seat->rank, t->seat->world,
            t->layout->n, t->layout->floats * sizeof(float));
    return FL_OK;
}

static void stop(struct trainer *t)
{
    if (t->weights)
        furlong_weights_drop(t->weights);
    furlong_arena_free(t->f, t->m);
    furlong_arena_free(t->f, t->v);
    learner_destroy(t->learner);
    ckpt_lock_destroy(t->lock);
    model_layout_destroy(t->layout);
    free(t->last);
    free(t->next);
    free(t->last_answer);
}

enum fl_status trainer_run(struct trainer *t, struct fl_err *err)
{
    t->seat = furlong_seat(t->f);
    enum fl_status st = start(t, err);

    if (st == FL_OK)
        st = serve(t, err);
    stop(t);
    return st;
}
