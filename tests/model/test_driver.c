/* The loop of the driver, over hands that only write down what they are asked: the three columns of
 * a step, side by side, what follows a failure, and what is recorded. */
#include "tests/t.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/base/file.h"
#include "common/conf/json.h"
#include "worker/roles/ckpt.h"
#include "worker/roles/driver.h"

enum { LOG = 16384, WORDS = 40 };
struct fake {
    char log[LOG]; /* "launch:rollout offload_kv ..." */
    pthread_mutex_t mu;
    const char *fail; /* what fails, at its nth time, with this */
    int fail_at, met;
    enum fl_status fail_with;
    atomic_int generating, overlapped; /* now; generations during which a step trained */
    uint64_t state_step, state_version;
    double abs_diff, clock;
    uint64_t digest; /* of updates: changes with the version only */
    uint32_t odd_digests;
    enum furlong_late late[2], then_late[2]; /* of a side, somebody; from the failure on */
    uint64_t versions_asked[64];
    int n_generated;
};
struct rig {
    struct driver d;
    struct fake f;
    char line[1024], *argv[WORDS];
};

static void note(struct fake *f, const char *what)
{
    (void)pthread_mutex_lock(&f->mu);
    size_t len = strlen(f->log);
    snprintf(f->log + len, LOG - len, "%s%s", len ? " " : "", what);
    (void)pthread_mutex_unlock(&f->mu);
}

static enum fl_status met(struct fake *f, const char *what, struct fl_err *err)
{
    note(f, what);
    if (f->fail && !strcmp(f->fail, what) && ++f->met == f->fail_at) {
        memcpy(f->late, f->then_late, sizeof(f->late));
        return fl_fail(err, f->fail_with, "%s failed, as the test wants", what);
    }
    return FL_OK;
}

static enum fl_status fake_place(struct driver *d, struct fl_err *err)
{
    return drv_run_json(d, "{\"roles\":{}}", err);
}

static enum fl_status fake_launch(struct driver *d, enum drv_side side, struct fl_err *err)
{
    d->n_of[side] = 1;
    return met(d->seat, side == DRV_TRAINERS ? "launch:trainer" : "launch:rollout", err);
}

static enum fl_status fake_joined(struct driver *d, struct fl_err *err)
{
    return met(d->seat, "joined", err);
}

static enum fl_status fake_not_up(struct driver *d, enum fl_status st, struct fl_err *err)
{
    (void)d;
    (void)err;
    return st;
}

static enum fl_status fake_ask(struct driver *d, enum drv_side side, const char *method, const char *body,
                               uint32_t budget_ms, json_t **first, struct fl_err *err)
{
    struct fake *f = d->seat;
    struct ckpt_state s = { f->state_step, f->state_version, 0, 0 };
    char what[64];

    t_true(budget_ms > 0);
    snprintf(what, sizeof(what), "%s%s", side == DRV_TRAINERS ? "T." : "E.", method);
    FL_TRY(met(f, what, err));
    if (!strcmp(method, "load")) {
        json_t *o = json_loads(body, 0, NULL);
        const char *dir = json_string_value(json_object_get(o, "dir"));

        if (*dir)
            t_ok(ckpt_state_read(dir, &s, err), err);
        else
            s = (struct ckpt_state){ 0 };
        json_decref(o);
    }
    if (!strcmp(method, "save")) { /* a checkpoint as far as the driver looks at one */
        json_t *o = json_loads(body, 0, NULL);
        const char *dir = json_string_value(json_object_get(o, "dir"));
        int step = (int)json_integer_value(json_object_get(o, "step"));
        char path[1200], text[128];

        snprintf(text, sizeof(text), "{\"step\":%d,\"version\":%d,\"adam_steps\":%d,\"seed\":1}", step, step, step);
        snprintf(path, sizeof(path), "%s/state.json", dir);
        t_ok(fl_mkdirs(dir, err), err);
        t_ok(fl_file_write(path, 0600, text, strlen(text), err), err);
        json_decref(o);
    }
    if (first)
        *first = json_pack("{s:f, s:f, s:I, s:I, s:I, s:I, s:I}", "setup_s", 0.25, "copy_s", 0.5,
                           "dropped_bytes", (json_int_t)7, "kept_bytes", (json_int_t)8, "written_bytes",
                           (json_int_t)9, "step", (json_int_t)s.step, "version", (json_int_t)s.version);
    return FL_OK;
}

static enum fl_status fake_train(struct driver *d, const char *body, const void *blob, size_t bytes,
                                 json_t **answer, struct fl_err *err)
{
    struct fake *f = d->seat;

    t_true(body && blob && bytes > 100);
    FL_TRY(met(f, "train", err));
    for (int i = 0; i < 2000 && d->flags.is_async && d->now.step + 1 < d->n_steps &&
                    !atomic_load(&f->generating) && !atomic_load(&f->overlapped); i++)
        usleep(500); /* the next generation was started before: its thread comes */
    if (atomic_load(&f->generating))
        atomic_fetch_add(&f->overlapped, 1);
    *answer = json_pack("{s:f, s:f, s:f}", "loss", 0.5, "grad_norm", 2.0, "logprob_abs_diff", f->abs_diff);
    return FL_OK;
}

static enum fl_status fake_generate(struct driver *d, const struct drv_job *j, struct drv_made *out,
                                    struct fl_err *err)
{
    struct fake *f = d->seat;
    uint32_t n = j->n_prompts * j->n;

    if (f->n_generated < 64)
        f->versions_asked[f->n_generated++] = j->version;
    FL_TRY(met(f, j->temperature > 0 ? "generate" : "evaluate", err));
    atomic_fetch_add(&f->generating, 1);
    for (int i = 0; i < 200 && d->flags.is_async && !atomic_load(&f->overlapped); i++)
        usleep(500); /* until the step before trains, for at most 100 ms */
    *out = (struct drv_made){ .n_samples = n, .n_tokens = 3 * n, .odd_digests = f->odd_digests, .idle_s = 0.125 };
    out->tokens = calloc(out->n_tokens, sizeof(int32_t));
    out->lengths = calloc(n, sizeof(int32_t));
    out->prompt_lengths = calloc(n, sizeof(int32_t));
    out->logprobs = calloc(out->n_tokens, sizeof(float));
    out->texts = calloc(n, sizeof(char *));
    out->versions = calloc(n, sizeof(uint64_t));
    for (uint32_t i = 0; i < n; i++) {
        out->lengths[i] = 3;
        out->prompt_lengths[i] = 2;
        out->versions[i] = j->version;
        out->texts[i] = strdup(i % 4 ? "wrong" : j->p->rows[j->rows[i / j->n]].label);
    }
    atomic_fetch_sub(&f->generating, 1);
    return FL_OK;
}

static enum fl_status fake_update(struct driver *d, uint64_t version, struct furlong_report *out,
                                  struct fl_err *err)
{
    struct fake *f = d->seat;

    t_int_eq(atomic_load(&f->generating), 0, "an update overlaps a generation");
    enum fl_status st = met(f, "update", err);

    if (st != FL_OK) /* as the library says it */
        return fl_wrap(err, st, "update to version %ju", (uintmax_t)version);
    *out = (struct furlong_report){ .version = version, .digest = { version + 1, f->digest }, .committed = 2,
                                    .bytes = 100, .mode = "copy" };
    return FL_OK;
}

static uint32_t fake_end_late(struct driver *d, enum drv_side side, enum furlong_late from)
{
    struct fake *f = d->seat;

    if (f->late[side] < from || !f->late[side])
        return 0;
    note(f, side == DRV_TRAINERS ? "end:trainer" : "end:rollout");
    f->late[side] = FURLONG_IN_TIME;
    return 1;
}

static enum fl_status fake_restart(struct driver *d, enum drv_side side, struct fl_err *err)
{
    return met(d->seat, side == DRV_TRAINERS ? "restart:trainer" : "restart:rollout", err);
}

static enum fl_status fake_wait(struct driver *d, struct fl_err *err)
{
    return met(d->seat, "wait", err);
}

static void fake_record(struct driver *d, const char *json)
{
    t_has(json, "\"step\":");
    note(d->seat, "record");
}

static double fake_now(struct driver *d)
{
    struct fake *f = d->seat;

    (void)pthread_mutex_lock(&f->mu);
    double now = f->clock += 0.001;
    (void)pthread_mutex_unlock(&f->mu);
    return now;
}

static void fake_finish(struct driver *d)
{
    note(d->seat, "finish");
}

static const struct drv_ops fake_ops = {
    fake_place,  fake_launch,  fake_joined, fake_not_up, fake_ask,  fake_train,  fake_generate, fake_update,
    fake_end_late, fake_restart, fake_wait, fake_record, fake_now, fake_finish,
};

static struct rig *rig_new(const char *flags, uint32_t attempt)
{
    static const char prompts[] = "{\"input\":\"ab\",\"label\":\"c\"}\n{\"input\":\"ba\",\"label\":\"c\"}\n";
    struct rig *r = calloc(1, sizeof(*r));
    struct fl_err err = { 0 };
    int argc = 1;

    (void)pthread_mutex_init(&r->f.mu, NULL);
    t_ok(fl_file_write(t_path("p.jsonl"), 0600, prompts, strlen(prompts), &err), &err);
    snprintf(r->line, sizeof(r->line),
             "--prompt-data %s --eval-prompt-data %s --run-dir %s --rollout-batch-size 2 --n-samples-per-prompt 4 "
             "--num-rollout 1 --eval-interval 0 --save-interval 0 %s",
             t_path("p.jsonl"), t_path("p.jsonl"), t_path("run"), flags);
    r->argv[0] = "driver";
    for (char *w = strtok(r->line, " "); w && argc < WORDS; w = strtok(NULL, " "))
        r->argv[argc++] = w;
    r->d = (struct driver){ .ops = &fake_ops, .seat = &r->f, .job_name = "job", .node_name = "n",
                            .attempt = attempt, .steps_fd = -1, .log_fd = -1,
                            .out_fd = -1 };
    r->d.opts.program = "driver";
    train_flags_tables(&r->d.flags, r->d.opts.tables);
    t_ok(train_flags_parse(&r->d.flags, &r->d.opts, argc, r->argv, &err), &err);
    return r;
}

static struct rig *rig_up(const char *flags, uint32_t attempt)
{
    struct rig *r = rig_new(flags, attempt);
    struct fl_err err;

    t_ok(drv_setup(&r->d, &err), &err);
    return r;
}

static void rig_down(struct rig *r)
{
    drv_fini(&r->d);
    (void)pthread_mutex_destroy(&r->f.mu);
    free(r);
}

static void run_dir_clear(void)
{
    struct fl_err err;

    t_ok(fl_tree_remove(t_path("run"), &err), &err);
}

/* ---- the table of the design ------------------------------------------------------------------ */
#define UP "launch:rollout joined E.resume "
#define UP_AWAY "launch:rollout joined E.resume E.offload_kv E.offload_weights launch:trainer joined T.state "
static void columns(void **state)
{
    static const struct { const char *name, *flags, *start, *step; } rows[] = {
        { "split", "", "launch:rollout launch:trainer joined E.resume T.state E.pause update E.resume", "generate train E.pause update E.resume record" },
        { "colocated", "--colocate",
          UP_AWAY "T.offload E.onload_weights update E.onload_kv",
          "generate E.offload_kv E.offload_weights T.onload train T.offload E.onload_weights update E.onload_kv record" },
        { "peak on the device", "--colocate-memory-peak-device gpu",
          UP_AWAY "T.clear_memory E.onload_weights T.offload update E.onload_kv",
          "generate E.offload_kv T.onload E.offload_weights train T.clear_memory E.onload_weights T.offload update E.onload_kv record" },
        { "colocated, trainer stays", "--colocate --no-offload-train",
          UP_AWAY "T.clear_memory E.onload_weights update E.onload_kv",
          "generate E.offload_kv E.offload_weights train T.clear_memory E.onload_weights update E.onload_kv record" },
        { "colocated, engines stay", "--colocate --no-offload-rollout",
          UP "launch:trainer joined T.state T.offload update", "generate T.onload train T.offload update record" },
        { "colocated, weights stay", "--colocate --offload-rollout-level kv_cache",
          "launch:rollout joined E.resume E.offload_kv launch:trainer joined T.state T.offload update E.onload_kv",
          "generate E.offload_kv T.onload train T.offload update E.onload_kv record" },
        { "split with offload", "--offload",
          "launch:rollout launch:trainer joined E.resume E.offload_kv E.offload_weights T.state T.offload E.onload_weights E.pause update E.resume E.onload_kv",
          "generate E.offload_kv E.offload_weights T.onload train T.offload E.onload_weights E.pause update E.resume E.onload_kv record" },
        { "saved and evaluated", "--colocate --save-interval 1 --eval-interval 1",
          UP_AWAY "T.offload E.onload_weights update E.onload_kv",
          "generate E.offload_kv E.offload_weights T.onload train T.save T.offload E.onload_weights update E.onload_kv evaluate record" },
    };
    struct fl_err err;

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        char want[1024];

        run_dir_clear();
        struct rig *r = rig_up(rows[i].flags, 1);
        t_ok(drv_run(&r->d, &err), &err);
        snprintf(want, sizeof(want), "%s %s", rows[i].start, rows[i].step);
        t_str_eq(r->f.log, want, "%s", rows[i].name);
        t_int_eq(r->d.version, 1);
        rig_down(r);
    }
}

static void side_by_side(void **state)
{
    struct fl_err err;

    (void)state;
    run_dir_clear();
    struct rig *r = rig_up("--async --num-rollout 6 --update-weights-interval 2", 1);
    t_ok(drv_run(&r->d, &err), &err); /* fake_update looks that no generation runs */
    int updates = 0;
    for (const char *p = r->f.log; (p = strstr(p, "update")); p++)
        updates++;
    t_int_eq(updates, 4, "one at the start, three of six steps: %s", r->f.log);
    t_true(atomic_load(&r->f.overlapped) > 0, "no step trained while a generation ran");
    static const uint64_t want[] = { 0, 0, 0, 2, 2, 4 };
    t_int_eq(r->f.n_generated, 6);
    for (int i = 0; i < 6; i++)
        t_int_eq(r->f.versions_asked[i], want[i], "generation %d", i);
    rig_down(r);
}

/* ---- failures --------------------------------------------------------------------------------- */
static uint64_t records(uint64_t *last_version)
{
    char path[1200];
    struct fl_json_lines *lines;
    struct fl_err err;
    json_t *o;
    uint64_t n = 0;

    snprintf(path, sizeof(path), "%s/steps.jsonl", t_path("run"));
    t_ok(fl_json_lines_open(path, 1 << 20, &lines, &err), &err);
    for (; fl_json_lines_next(lines, &o, &err) == FL_OK; n++) {
        t_int_eq(json_integer_value(json_object_get(o, "step")), n, "a step missing or doubled");
        *last_version = (uint64_t)json_integer_value(json_object_get(o, "weights_version"));
        json_decref(o);
    }
    fl_json_lines_close(lines);
    return n;
}

static void goes_on(void **state)
{
    static const struct {
        const char *name, *flags, *fail;
        int at;
        enum fl_status with;
        const char *then; /* part of the log after the failure */
        enum furlong_late late[2];
    } rows[] = {
        { "a trainer ends, no checkpoint", "--num-rollout 4", "train", 3, FL_UNREACHABLE,
          "train restart:trainer T.load E.pause update E.resume generate train" },
        { "a trainer ends after a checkpoint", "--num-rollout 6 --save-interval 2", "train", 4, FL_UNREACHABLE,
          "train restart:trainer T.load E.pause update E.resume generate train" },
        { "a trainer ends, colocated", "--num-rollout 3 --colocate --save-interval 1", "train", 2, FL_UNREACHABLE,
          "train restart:trainer T.load T.offload E.onload_weights update E.onload_kv generate" },
        { "a trainer ends, side by side", "--num-rollout 4 --async", "train", 2, FL_UNREACHABLE, "restart:trainer T.load E.pause update" },
        { "an engine ends while it releases", "--num-rollout 2 --colocate", "E.offload_kv", 2, FL_UNREACHABLE,
          "generate E.offload_kv wait E.offload_kv E.offload_weights T.onload" },
        { "a trainer ends after it saved", "--num-rollout 4 --save-interval 2 --colocate", "T.offload", 3, FL_UNREACHABLE,
          "T.save T.offload restart:trainer T.load T.offload E.onload_weights update E.onload_kv record generate" },
        { "an engine ends in an update", "--num-rollout 2", "update", 2, FL_UNREACHABLE, "update wait update E.resume" },
        { "an engine ends in its start", "--num-rollout 2", "E.resume", 1, FL_UNREACHABLE,
          "launch:trainer joined E.resume joined E.resume T.state E.pause update" },
        { "an engine is slow in an update", "--num-rollout 2", "update", 2, FL_TIMEOUT, "update end:rollout wait update E.resume",
          { [DRV_ENGINES] = FURLONG_SLOW } },
        { "a trainer hangs in an update", "--num-rollout 2", "update", 2, FL_TIMEOUT, "update end:trainer restart:trainer T.load",
          { [DRV_TRAINERS] = FURLONG_SILENT } },
        { "an engine hangs in pause", "--num-rollout 2", "E.pause", 2, FL_TIMEOUT, "E.pause end:rollout wait E.pause update",
          { [DRV_ENGINES] = FURLONG_SILENT } },
        { "a trainer hangs in offload", "--num-rollout 2 --colocate", "T.offload", 2, FL_TIMEOUT,
          "T.offload end:trainer restart:trainer T.load", { [DRV_TRAINERS] = FURLONG_SILENT } },
        { "an engine keeps a begin waiting", "--num-rollout 2", "train", 2, FL_TIMEOUT, "train end:rollout wait restart:trainer T.load",
          { [DRV_ENGINES] = FURLONG_SILENT } },
    };
    struct fl_err err;

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        uint64_t version = 0;

        run_dir_clear();
        struct rig *r = rig_up(rows[i].flags, 1);
        r->f.fail = rows[i].fail;
        r->f.fail_at = rows[i].at;
        r->f.fail_with = rows[i].with;
        memcpy(r->f.then_late, rows[i].late, sizeof(r->f.then_late));
        t_ok(drv_run(&r->d, &err), &err);
        t_has(r->f.log, rows[i].then);
        t_int_eq(records(&version), r->d.n_steps, "%s", rows[i].name);
        t_int_eq(version, r->d.n_steps, "%s", rows[i].name);
        rig_down(r);
    }
}

static void gives_up(void **state)
{
    static const struct { const char *name, *flags, *fail; int at; enum fl_status with; const char *part; } rows[] = {
        { "a wrong batch", "", "train", 1, FL_INVALID, "train failed" },
        { "no more restarts", "--max-restarts 0", "train", 1, FL_UNREACHABLE, "train failed" },
        { "save", "--save-interval 1", "T.save", 1, FL_EXHAUSTED, "save" },
        { "onload", "--colocate", "T.onload", 1, FL_EXHAUSTED, "onload" },
        { "generate", "", "generate", 1, FL_INVALID, "generate" },
        { "a reward command that is late", "--reward-cmd yes>/dev/null --reward-timeout 0.05", "none", 1, FL_INVALID, "--reward-timeout" },
        { "tensors differ", "", "update", 1, FL_INVALID, "update to version 0" },
        { "an engine never comes back", "--colocate", "wait", 1, FL_UNREACHABLE, "wait failed" },
    };
    struct fl_err err;

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        run_dir_clear();
        struct rig *r = rig_up(rows[i].flags, 1);
        r->f.fail = rows[i].fail;
        r->f.fail_at = rows[i].at;
        r->f.fail_with = rows[i].with;
        if (!strcmp(rows[i].fail, "wait")) { /* the engine's own failure brings it there */
            r->f.fail = "E.offload_kv";
            r->f.fail_with = FL_UNREACHABLE;
            r->d.flags.max_restarts = 0;
            t_ok(drv_run(&r->d, &err), &err);
            rig_down(r);
            continue;
        }
        t_refused(drv_run(&r->d, &err), rows[i].with, &err);
        t_has(err.text, rows[i].part);
        rig_down(r);
    }
}

/* A later attempt of the driver: the trainers have lived on, or have not. */
static void comes_back(void **state)
{
    static const struct {
        const char *name;
        uint64_t trainer_step; /* where they stand; four steps are on record */
        bool pending;
        const char *then;
        const char *refuses; /* when it is asked the second time */
    } rows[] = {
        { "between two steps", 4, false, "T.state E.pause update E.resume generate train E.pause update E.resume record generate" },
        { "trained, not recorded", 5, true, "T.state E.pause update E.resume record generate train" },
        { "trained, nothing pending", 5, false, "T.state restart:trainer T.load E.pause update E.resume generate" },
        { "the trainers are new", 0, false, "T.state restart:trainer T.load E.pause update E.resume generate" },
        { "a train was cut short", 4, false, "T.state restart:trainer T.load E.pause update E.resume generate", "T.state" },
    };
    struct fl_err err;

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        uint64_t version = 0;
        char path[1200];

        run_dir_clear();
        struct rig *r = rig_up("--num-rollout 4 --save-interval 2", 1);
        t_ok(drv_run(&r->d, &err), &err);
        rig_down(r);
        snprintf(path, sizeof(path), "%s/step.pending", t_path("run"));
        if (rows[i].pending) {
            static const char text[] = "{\"step\":4,\"reward_mean\":0.5,\"tokens\":3}";

            t_ok(fl_file_write(path, 0600, text, strlen(text), &err), &err);
        } else {
            (void)unlink(path); /* the last step's */
        }
        r = rig_up("--num-rollout 7 --save-interval 2", 2);
        r->f.state_step = r->f.state_version = rows[i].trainer_step;
        r->f.fail = rows[i].refuses;
        r->f.fail_at = 2;
        r->f.fail_with = FL_INVALID;
        t_ok(drv_run(&r->d, &err), &err);
        t_has(r->f.log, rows[i].then);
        t_int_eq(records(&version), 7, "%s", rows[i].name);
        t_int_eq(version, 7, "%s", rows[i].name);
        rig_down(r);
    }
}

static void ci_test_stops(void **state)
{
    struct fl_err err;

    (void)state;
    run_dir_clear();
    struct rig *r = rig_up("--ci-test", 1);
    r->f.abs_diff = 2e-3;
    t_refused(drv_run(&r->d, &err), FL_CORRUPT, &err);
    t_has(err.text, "--ci-test");
    t_has(err.text, "0.002");
    rig_down(r);
    run_dir_clear();
    r = rig_up("--ci-test", 1);
    r->f.odd_digests = 3;
    t_refused(drv_run(&r->d, &err), FL_CORRUPT, &err);
    t_has(err.text, "3 samples");
    rig_down(r);
    run_dir_clear();
    r = rig_up("", 1); /* without the flag it is a remark */
    r->f.abs_diff = 2e-3;
    r->f.odd_digests = 3;
    t_ok(drv_run(&r->d, &err), &err);
    rig_down(r);
}

static void an_earlier_run_is_in_the_way(void **state)
{
    struct fl_err err;

    (void)state;
    run_dir_clear();
    struct rig *r = rig_up("--num-rollout 4 --save-interval 2", 1);
    t_ok(drv_run(&r->d, &err), &err);
    rig_down(r);
    r = rig_new("--num-rollout 4", 1);
    t_refused(drv_setup(&r->d, &err), FL_EXISTS, &err);
    t_has(err.text, "step 4");
    t_has(err.text, "--load");
    rig_down(r);
}

/* ---- records ---------------------------------------------------------------------------------- */
static void fields(void **state)
{
    static const char *const names[] = {
        "step", "reward_mean", "eval_reward_mean", "response_len_mean", "weights_version", "weights_digest",
        "train_rollout_logprob_abs_diff", "staleness_mean", "perf/step_time", "perf/rollout_time",
        "perf/train_time", "perf/train_wait_time", "perf/update_weights_time", "perf/sleep_time",
        "perf/wake_up_time", "perf/finalize_and_resume_engines_time", "perf/engine_release_time",
        "perf/sleep_setup_time", "perf/sleep_copy_time", "perf/wake_up_setup_time", "perf/wake_up_copy_time",
        "perf/engine_idle_time", "perf/update_weights_share", "clean", "clean_phases", "unclean_why",
        "dropped_bytes", "kept_bytes", "written_bytes",
    };
    struct fl_err err;
    char path[1200];
    json_t *o = NULL;

    (void)state;
    run_dir_clear();
    struct rig *r = rig_up("--colocate --eval-interval 1", 1);
    r->f.fail = "E.onload_weights"; /* the second: of the step */
    r->f.fail_at = 2;
    r->f.fail_with = FL_UNREACHABLE;
    t_ok(drv_run(&r->d, &err), &err);
    rig_down(r);
    snprintf(path, sizeof(path), "%s/steps.jsonl", t_path("run"));
    t_ok(fl_json_load(path, 1 << 20, &o, &err), &err);
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        t_true(json_object_get(o, names[i]) != NULL, "%s is missing", names[i]);
    t_true(fabs(json_number_value(json_object_get(o, "reward_mean")) - 0.25) < 1e-9);
    t_true(fabs(json_number_value(json_object_get(o, "eval_reward_mean")) - 0.5) < 1e-9);
    t_true(fabs(json_number_value(json_object_get(o, "perf/sleep_copy_time")) - 0.5) < 1e-9);
    t_int_eq(json_integer_value(json_object_get(o, "dropped_bytes")), 7);
    t_int_eq(json_integer_value(json_object_get(o, "weights_version")), 1);
    t_str_eq(json_string_value(json_object_get(o, "weights_digest")), "00000000000000020000000000000000");
    t_true(json_is_false(json_object_get(o, "clean")));
    t_true(json_is_true(json_object_get(json_object_get(o, "clean_phases"), "train")));
    t_has(json_string_value(json_object_get(json_object_get(o, "unclean_why"), "finalize_and_resume_engines")),
          "as the test wants");
    json_decref(o);
    snprintf(path, sizeof(path), "%s/run.json", t_path("run"));
    t_ok(fl_json_load(path, 1 << 20, &o, &err), &err);
    t_true(json_is_true(json_object_get(json_object_get(o, "flags"), "colocate")));
    t_true(json_is_object(json_object_get(o, "placement")));
    json_decref(o);
}

static void a_torn_record(void **state)
{
    static const char text[] = "{\"step\":0}\n{\"step\":1}\n{\"step\":2,\"rew";
    struct fl_err err;
    char path[1200], *left;
    size_t len;
    uint64_t whole = 0;

    (void)state;
    run_dir_clear();
    struct rig *r = rig_up("", 2);
    snprintf(path, sizeof(path), "%s/steps.jsonl", t_path("run"));
    t_ok(fl_file_write(path, 0600, text, strlen(text), &err), &err);
    t_ok(drv_steps_open(&r->d, &whole, &err), &err);
    t_int_eq(whole, 2);
    t_ok(fl_file_read(path, 1000, &left, &len, &err), &err);
    t_str_eq(left, "{\"step\":0}\n{\"step\":1}\n");
    free(left);
    t_ok(drv_steps_cut(&r->d, 1, &whole, &err), &err);
    t_int_eq(whole, 1);
    t_ok(fl_file_read(path, 1000, &left, &len, &err), &err);
    t_str_eq(left, "{\"step\":0}\n");
    free(left);
    rig_down(r);
}

static void advice(void **state)
{
    static const struct {
        const char *name;
        struct drv_means m;
        bool colocate, is_async;
        uint32_t trainers, engines;
        const char *part;
    } rows[] = {
        { "nothing ran", { .n = 0 }, false, false, 1, 1, "nothing to advise" },
        { "rollout heavy, a split that fits", { 10, 8, 1, 0.1, 0, 0, 10 }, false, false, 4, 4, "--rollout-num-gpus 7" },
        { "rollout heavy, two devices", { 10, 8, 1, 0.1, 0, 0, 10 }, false, false, 1, 1, "--rollout-num-gpus 2" },
        { "rollout heavy, colocated", { 10, 8, 1, 0.1, 0, 0, 10 }, true, false, 4, 4, "--actor-num-nodes" },
        { "both work, split", { 10, 4, 5, 0.1, 0, 0, 10 }, false, false, 1, 1, "--async would hide up to 40%" },
        { "both work, side by side already", { 10, 4, 5, 0.1, 0, 0, 10 }, false, true, 1, 1, "keep the defaults" },
        { "train heavy", { 10, 1, 8, 0.1, 0, 0, 10 }, false, false, 1, 1, "keep the defaults" },
        { "both work, colocated", { 10, 4, 5, 0.1, 0, 0, 10 }, true, false, 1, 1, "keep the defaults" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        char out[256];

        drv_advise(&rows[i].m, rows[i].colocate, rows[i].is_async, rows[i].trainers, rows[i].engines, out);
        t_true(strstr(out, rows[i].part) != NULL, "%s: %s", rows[i].name, out);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(columns),       cmocka_unit_test(side_by_side), cmocka_unit_test(goes_on),
        cmocka_unit_test(gives_up),      cmocka_unit_test(comes_back), cmocka_unit_test(an_earlier_run_is_in_the_way),   cmocka_unit_test(ci_test_stops),
        cmocka_unit_test(fields),        cmocka_unit_test(a_torn_record), cmocka_unit_test(advice),
    };

    return t_run("driver", tests);
}
