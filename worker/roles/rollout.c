#include "worker/roles/rollout.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/log.h"

/* Pointers move in commit, and are gone while nothing serves. */
static void look_at_weights(struct rollout *r)
{
    uint64_t digest[2] = { 0, 0 };
    uint64_t version = furlong_weights_version(r->weights, digest);
    bool serves = version != FURLONG_NO_VERSION;

    for (uint32_t i = 0; serves && i < r->layout->n; i++) {
        r->w[i] = furlong_weights_data(r->weights, i);
        serves = r->w[i] != NULL;
    }
    engine_weights(r->engine, serves ? r->w : NULL, version, digest);
}

static void on_commit(struct rollout *r, const struct furlong_event *ev)
{
    struct fl_err err = { 0 };

    if (FL_FAULT("engine.commit")) {
        (void)fl_fail_errno(&err, "commit of version %ju", (uintmax_t)ev->version);
        role_refuse(ev->call, err.status, &err);
        return;
    }
    if (furlong_weights_commit(r->weights, ev->call, &err) != FL_OK)
        fl_warn("commit failed version=%ju why=%s", (uintmax_t)ev->version, err.text);
    look_at_weights(r);
}

static void on_offload(struct rollout *r, const struct furlong_event *ev)
{
    struct furlong_moved moved = { 0 };
    struct fl_err err = { 0 };
    double from = role_now_s(), own_s;
    size_t own = 0;
    enum fl_status st;

    if (ev->tags & FURLONG_TAG_WEIGHTS) /* not touched from here on */
        engine_weights(r->engine, NULL, FURLONG_NO_VERSION, (uint64_t[2]){ 0, 0 });
    if (ev->tags & FURLONG_TAG_KV)
        own = engine_offload(r->engine);
    (void)malloc_trim(0); /* finished requests are given back too */
    own_s = role_now_s() - from;
    if (ev->tags &
        FURLONG_TAG_WEIGHTS) { /* the plane moves them when this is answered, and says so */
        furlong_reply(ev->call, NULL, 0);
        look_at_weights(r);
        return;
    }
    st = furlong_arena_offload(r->f, ev->tags, &moved, &err);
    if (st == FL_OK)
        role_reply_moved(ev->call, &moved, own, own_s);
    else
        role_refuse(ev->call, st, &err);
}

static void on_event(struct rollout *r, const struct furlong_event *ev)
{
    uint64_t had = 0;

    switch (ev->what) {
    case FURLONG_CALL:
        if (!strcmp(ev->method, "generate")) {
            rollout_generate(r, ev);
        } else {
            struct fl_err err = { 0 };

            role_refuse(ev->call,
                        fl_fail(&err, FL_UNSUPPORTED, "the engine has no call '%.40s'", ev->method),
                        &err);
        }
        return;
    case FURLONG_COMMIT:
        on_commit(r, ev);
        return;
    case FURLONG_OFFLOAD:
        on_offload(r, ev);
        return;
    case FURLONG_ONLOAD:
        if (ev->tags & FURLONG_TAG_KV)
            engine_onload(r->engine);
        break;
    case FURLONG_PAUSE:
    case FURLONG_RESUME:
        r->paused = ev->what == FURLONG_PAUSE;
        break;
    case FURLONG_SQUEEZE:
        had = engine_offload(r->engine); /* what ran starts over from its tokens */
        engine_onload(r->engine);
        furlong_reply(ev->call, &had, sizeof(had));
        return;
    case FURLONG_STOP:
        break;
    }
    furlong_reply(ev->call, NULL, 0);
    look_at_weights(r); /* a one-slot update takes them at PAUSE */
}

static void step(struct rollout *r)
{
    struct engine_request *q;

    if (FL_FAULT("engine.step"))
        abort();
    engine_step(r->engine);
    while ((q = engine_done(r->engine)))
        rollout_answer(r, q);
}

static void idle(struct rollout *r, bool busy)
{
    double now = role_now_s();

    if (!busy && r->idle_from == 0)
        r->idle_from = now;
    if (busy && r->idle_from != 0) {
        r->idle_s += now - r->idle_from;
        r->idle_from = 0;
    }
}

static enum fl_status serve(struct rollout *r, struct fl_err *err)
{
    struct furlong_event ev = { 0 };

    for (;;) {
        bool busy = !r->paused && engine_busy(r->engine);

        idle(r, busy);
        enum fl_status st = furlong_next(r->f, FURLONG_MAIN, busy ? 0 : FURLONG_FOREVER, &ev, err);
        if (st == FL_AGAIN) { /* nothing to hear: one step; events fall between steps */
            if (busy)
                step(r);
            continue;
        }
        FL_TRY(st);
        bool last = ev.what == FURLONG_STOP;
        on_event(r, &ev);
        if (last)
            return FL_OK;
    }
}

static enum fl_status start(struct rollout *r, struct fl_err *err)
{
    const struct train_flags *f = &r->args.flags;
    char local[1024] = ""; /* engines of one node do not share a copy */
    struct furlong_weights_opts o = { .slots = (uint32_t)f->weight_slots,
                                      .check_equal = f->check_weight_update_equal || f->ci_test };

    FL_TRY(model_layout_create(&r->args.config, &r->layout, err));
    FL_TRY(
        engine_create(r->layout, (uint32_t)f->max_running_requests, ALPHABET_END, &r->engine, err));
    if (f->local_checkpoint_dir) {
        FL_TRY(fl_mkdirs(f->local_checkpoint_dir, err));
        if ((size_t)snprintf(local, sizeof(local), "%s/%s-%u", f->local_checkpoint_dir,
                             furlong_seat(r->f)->role, furlong_seat(r->f)->rank) >= sizeof(local))
            return fl_fail(err, FL_INVALID,
                           "--update-weight-local-checkpoint-dir: the path is too long");
        o.local_dir = local;
    }
    struct furlong_tensor *t = role_tensors(r->layout);
    r->w = calloc(r->layout->n, sizeof(*r->w));
    if (!t || !r->w) {
        free(t);
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u tensors", r->layout->n);
    }
    enum fl_status st =
        furlong_weights_accept(r->f, "policy", t, r->layout->n, &o, &r->weights, err);
    free(t);
    FL_TRY(st);
    fl_info("engine ready rank=%u tensors=%u", furlong_seat(r->f)->rank, r->layout->n);
    return FL_OK;
}

enum fl_status rollout_run(struct rollout *r, struct fl_err *err)
{
    enum fl_status st = start(r, err);

    if (st == FL_OK)
        st = serve(r, err);
    if (r->weights)
        furlong_weights_drop(r->weights);
    engine_destroy(r->engine);
    model_layout_destroy(r->layout);
    free(r->w);
    return st;
}
