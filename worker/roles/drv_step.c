/* What a step is made of. The three columns of the design are three tables of rows; a row that the
 * flags switch off is passed over. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "common/conf/json.h"
#include "worker/roles/batch.h"
#include "worker/roles/driver.h"
#include "worker/roles/policy.h"
#include "worker/roles/reward.h"
#include "worker/roles/rng.h"

/* ---- memory: who gives what back, when ------------------------------------------------------- */
enum row_when { ALWAYS, IF_KV, IF_WEIGHTS, IF_TRAIN_OFFLOAD, IF_NO_TRAIN_OFFLOAD };
struct row {
    enum drv_phase phase;
    enum drv_side side;
    const char *method;
    enum row_when when;
    uint32_t budget_ms;
};
/* clang-format off */
static const struct row after_rollout_colocated[] = {
    { DRV_RELEASE, DRV_ENGINES,  "offload_kv",      IF_KV,            DRV_MOVE_MS },
    { DRV_RELEASE, DRV_ENGINES,  "offload_weights", IF_WEIGHTS,       DRV_MOVE_MS },
    { DRV_WAKE,    DRV_TRAINERS, "onload",          IF_TRAIN_OFFLOAD, DRV_MOVE_MS },
    { 0 },
};
static const struct row after_rollout_peak[] = { /* both sides' weights are there for a while */
    { DRV_RELEASE, DRV_ENGINES,  "offload_kv",      IF_KV,            DRV_MOVE_MS },
    { DRV_WAKE,    DRV_TRAINERS, "onload",          IF_TRAIN_OFFLOAD, DRV_MOVE_MS },
    { DRV_RELEASE, DRV_ENGINES,  "offload_weights", IF_WEIGHTS,       DRV_MOVE_MS },
    { 0 },
};
static const struct row after_rollout_split[] = {
    { DRV_RELEASE, DRV_ENGINES,  "offload_kv",      IF_KV,            DRV_MOVE_MS },
    { DRV_RELEASE, DRV_ENGINES,  "offload_weights", IF_WEIGHTS,       DRV_MOVE_MS },
    { DRV_WAKE,    DRV_TRAINERS, "onload",          IF_TRAIN_OFFLOAD, DRV_MOVE_MS },
    { 0 },
};
static const struct row before_update_colocated[] = {
    { DRV_SLEEP,  DRV_TRAINERS, "offload",        IF_TRAIN_OFFLOAD,    DRV_MOVE_MS },
    { DRV_SLEEP,  DRV_TRAINERS, "clear_memory",   IF_NO_TRAIN_OFFLOAD, DRV_MOVE_MS },
    { DRV_RESUME, DRV_ENGINES,  "onload_weights", IF_WEIGHTS,          DRV_MOVE_MS },
    { 0 },
};
static const struct row before_update_peak[] = {
    { DRV_SLEEP,  DRV_TRAINERS, "clear_memory",   ALWAYS,              DRV_MOVE_MS },
    { DRV_RESUME, DRV_ENGINES,  "onload_weights", IF_WEIGHTS,          DRV_MOVE_MS },
    { DRV_SLEEP,  DRV_TRAINERS, "offload",        IF_TRAIN_OFFLOAD,    DRV_MOVE_MS },
    { 0 },
};
static const struct row before_update_split[] = {
    { DRV_SLEEP,  DRV_TRAINERS, "offload",        IF_TRAIN_OFFLOAD,    DRV_MOVE_MS },
    { DRV_RESUME, DRV_ENGINES,  "onload_weights", IF_WEIGHTS,          DRV_MOVE_MS },
    { DRV_UPDATE, DRV_ENGINES,  "pause",          ALWAYS,              DRV_PAUSE_MS },
    { 0 },
};
static const struct row after_update_colocated[] = {
    { DRV_RESUME, DRV_ENGINES, "onload_kv", IF_KV, DRV_MOVE_MS },
    { 0 },
};
static const struct row after_update_split[] = {
    { DRV_RESUME, DRV_ENGINES, "resume",    ALWAYS, DRV_PAUSE_MS },
    { DRV_RESUME, DRV_ENGINES, "onload_kv", IF_KV,  DRV_MOVE_MS },
    { 0 },
};
static const struct row engines_loaded[] = { /* start: they make room for the trainers */
    { DRV_RELEASE, DRV_ENGINES, "offload_kv",      IF_KV,      DRV_MOVE_MS },
    { DRV_RELEASE, DRV_ENGINES, "offload_weights", IF_WEIGHTS, DRV_MOVE_MS },
    { 0 },
};
/* clang-format on */

static bool applies(const struct driver *d, enum row_when when)
{
    switch (when) {
    case IF_KV:
        return d->flags.release_kv;
    case IF_WEIGHTS:
        return d->flags.release_weights;
    case IF_TRAIN_OFFLOAD:
        return d->flags.offload_train;
    case IF_NO_TRAIN_OFFLOAD:
        return !d->flags.offload_train;
    case ALWAYS:
        break;
    }
    return true;
}

static double real_of(const json_t *o, const char *key)
{
    return json_number_value(json_object_get(o, key)); /* absent: 0 */
}

static void moved(struct driver *d, const struct row *r, const json_t *said)
{
    if (r->phase == DRV_SLEEP) {
        d->now.sleep_setup_s += real_of(said, "setup_s");
        d->now.sleep_copy_s += real_of(said, "copy_s");
        d->now.dropped_bytes += (uint64_t)real_of(said, "dropped_bytes");
        d->now.kept_bytes += (uint64_t)real_of(said, "kept_bytes");
        d->now.written_bytes += (uint64_t)real_of(said, "written_bytes");
    } else if (r->phase == DRV_WAKE) {
        d->now.wake_setup_s += real_of(said, "setup_s");
        d->now.wake_copy_s += real_of(said, "copy_s");
    }
}

/* An engine that ended, or was ended because it was late, is started again by the head and filled;
 * then the row is asked again, which changes nothing at those that have answered. */
static enum fl_status row_run(struct driver *d, const struct row *r, struct fl_err *err)
{
    double from = d->ops->now_s(d);
    json_t *said = NULL;
    enum fl_status st;

    d->phase = r->phase;
    for (int n = 1;; n++) {
        st = d->ops->ask(d, r->side, r->method, NULL, r->budget_ms, &said, err);
        if (st == FL_TIMEOUT)
            (void)d->ops->end_late(d, r->side, FURLONG_SLOW);
        if (r->side != DRV_ENGINES || n == DRV_TRIES || (st != FL_UNREACHABLE && st != FL_TIMEOUT))
            break;
        drv_unclean(d, r->phase, "%s", err ? err->text : "an engine ended");
        FL_TRY(d->ops->wait_engines(d, err));
    }
    d->now.took_s[r->phase] += d->ops->now_s(d) - from;
    if (st == FL_OK)
        moved(d, r, said);
    json_decref(said);
    return st == FL_OK ? st : fl_wrap(err, st, "%s", r->method);
}

static enum fl_status rows_run(struct driver *d, const struct row *rows, struct fl_err *err)
{
    for (; rows->method; rows++)
        if (applies(d, rows->when))
            FL_TRY(row_run(d, rows, err));
    return FL_OK;
}

#define COLUMN(d, what)                                                                            \
    (!(d)->flags.colocate ? what##_split : (d)->flags.peak_on_gpu ? what##_peak : what##_colocated)

/* ---- weights --------------------------------------------------------------------------------- */
static enum fl_status digests_check(struct driver *d, const struct furlong_report *r,
                                    struct fl_err *err)
{
    bool same = r->digest[0] == d->served_digest[0] && r->digest[1] == d->served_digest[1];

    if (d->flags.ci_test && d->has_served && r->version == d->served && !same)
        return fl_fail(err, FL_CORRUPT, "--ci-test: version %ju has another digest than before",
                       (uintmax_t)r->version);
    return FL_OK;
}

static enum fl_status update(struct driver *d, struct fl_err *err)
{
    double from = d->ops->now_s(d);
    struct furlong_report r = { 0 };
    enum fl_status st;

    d->phase = DRV_UPDATE;
    for (int n = 1;; n++) {
        st = d->ops->update(d, d->version, &r, err);
        if (st == FL_OK || st == FL_INVALID || st == FL_UNSUPPORTED || n == DRV_TRIES)
            break;
        drv_unclean(d, DRV_UPDATE, "%s", err ? err->text : "");
        if (st == FL_TIMEOUT && d->ops->end_late(d, DRV_TRAINERS, FURLONG_SLOW))
            break; /* they start again from their last checkpoint */
        if (st == FL_TIMEOUT)
            (void)d->ops->end_late(d, DRV_ENGINES, FURLONG_SLOW);
        enum fl_status back = d->ops->wait_engines(d, err);
        if (back != FL_OK && back != FL_TIMEOUT)
            return back;
    }
    d->now.took_s[DRV_UPDATE] += d->ops->now_s(d) - from;
    if (st != FL_OK)
        return st; /* the text says which version of what */
    FL_TRY(digests_check(d, &r, err));
    if (r.left_behind) {
        drv_unclean(d, DRV_UPDATE, "%u left behind: %s", r.left_behind, r.first_behind.text);
        (void)d->ops->end_late(d, DRV_ENGINES, FURLONG_SILENT); /* slow ones are filled */
    }
    d->now.report = r;
    d->served = d->version;
    d->served_digest[0] = r.digest[0];
    d->served_digest[1] = r.digest[1];
    d->has_served = true;
    if (d->ops->end_late(d, DRV_TRAINERS, FURLONG_SILENT)) /* its pages were read all the same */
        return fl_fail(err, FL_UNREACHABLE,
                       "version %ju is served, and a trainer that gave it does not answer",
                       (uintmax_t)d->version);
    return FL_OK;
}

enum fl_status drv_settle(struct driver *d, struct fl_err *err)
{
    FL_TRY(rows_run(d, COLUMN(d, before_update), err));
    FL_TRY(update(d, err));
    return rows_run(d, d->flags.colocate ? after_update_colocated : after_update_split, err);
}

/* A process that has joined may still load its model; one that answers has its weights in place. */
static enum fl_status answers(struct driver *d, enum drv_side side, const char *method,
                              struct fl_err *err)
{
    enum fl_status st =
        d->ops->ask(d, side, method, NULL, (uint32_t)(d->flags.start_timeout_s * 1000), NULL, err);

    return st == FL_UNSUPPORTED || st == FL_INVALID ? FL_OK : st; /* it answered */
}

/* One that ended before it answered is started again by the head, up to --max-restarts. */
static enum fl_status engines_answer(struct driver *d, struct fl_err *err)
{
    enum { AGAIN_MS = 100, TRIES = 300 }; /* until its end, and then its next attempt, is known */

    for (unsigned n = 1;; n++) {
        enum fl_status st = answers(d, DRV_ENGINES, "resume", err);

        if (st != FL_UNREACHABLE || n == TRIES)
            return st;
        (void)poll(NULL, 0, AGAIN_MS);
        FL_TRY(d->ops->joined(d, err));
    }
}

/* On devices of their own both sides start, and load what they load, at the same time; on shared
 * ones the engines first, which then make room. */
enum fl_status drv_bring_up(struct driver *d, struct fl_err *err)
{
    FL_TRY(d->ops->launch(d, DRV_ENGINES, err));
    if (!d->flags.colocate)
        FL_TRY(d->ops->launch(d, DRV_TRAINERS, err));
    FL_TRY(d->ops->joined(d, err));
    FL_TRY(engines_answer(d, err));
    FL_TRY(rows_run(d, engines_loaded, err));
    if (d->flags.colocate) {
        FL_TRY(d->ops->launch(d, DRV_TRAINERS, err));
        FL_TRY(d->ops->joined(d, err));
    }
    return answers(d, DRV_TRAINERS, "state", err);
}

enum fl_status drv_after_rollout(struct driver *d, struct fl_err *err)
{
    return rows_run(d, COLUMN(d, after_rollout), err);
}

enum fl_status drv_change_over(struct driver *d, struct fl_err *err)
{
    return drv_settle(d, err);
}

/* ---- generate -------------------------------------------------------------------------------- */
/* The order of the prompts is a function of seed and pass: a run that resumes needs no state. */
struct drv_job drv_job_of(const struct driver *d, uint64_t step, uint32_t *rows)
{
    const struct train_flags *f = &d->flags;
    uint32_t batch = (uint32_t)f->rollout_batch_size, n = d->prompts->n;
    uint32_t *order = malloc(n * sizeof(*order));
    uint64_t pass = UINT64_MAX;

    for (uint32_t i = 0; i < batch; i++) {
        uint64_t at = step * batch + i;

        if (order && f->rollout_shuffle && at / n != pass) {
            pass = at / n;
            rng_shuffle(order, n, (uint64_t)f->seed, (uint32_t)pass);
        }
        rows[i] = order && f->rollout_shuffle ? order[at % n] : (uint32_t)(at % n);
    }
    free(order);
    return (struct drv_job){
        .p = d->prompts,
        .rows = rows,
        .n_prompts = batch,
        .n = (uint32_t)f->n_samples_per_prompt,
        .max_new = d->max_new,
        .step = (uint32_t)step,
        .temperature = f->temperature,
        .seed = (uint64_t)f->seed,
        .version = d->served,
    };
}

static enum fl_status rewards(struct driver *d, const struct drv_job *j, const struct drv_made *m,
                              float *out, struct fl_err *err)
{
    struct reward_row *rows = calloc(m->n_samples, sizeof(*rows));
    struct fl_err why = { 0 };

    if (!rows)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u rewards", m->n_samples);
    for (uint32_t i = 0; i < m->n_samples; i++) {
        const struct prompt *p = &j->p->rows[j->rows[i / j->n]];

        rows[i] = (struct reward_row){ p->input, m->texts[i], p->label };
    }
    enum fl_status st = reward_score(d->flags.reward_cmd, rows, m->n_samples,
                                     (uint32_t)(d->flags.reward_timeout_s * 1000), out, &why);
    free(rows);
    if (st == FL_OK)
        return FL_OK;
    /* late or not: it is the command's fault, and no trainer is started again for that */
    return fl_fail(err, st == FL_TIMEOUT || st == FL_UNREACHABLE ? FL_INVALID : st, "%s", why.text);
}

static enum fl_status odd_digests(struct driver *d, enum drv_phase phase, const struct drv_made *m,
                                  struct fl_err *err)
{
    if (m->asked_again)
        drv_unclean(d, phase, "%u requests asked again: %s", m->asked_again, m->why);
    if (!m->odd_digests)
        return FL_OK;
    if (d->flags.ci_test)
        return fl_fail(
            err, FL_CORRUPT,
            "--ci-test: %u samples came from weights with another digest than version %ju has",
            m->odd_digests, (uintmax_t)d->served);
    drv_unclean(d, phase, "%u samples from other weights than version %ju", m->odd_digests,
                (uintmax_t)d->served);
    return FL_OK;
}

enum fl_status drv_generate(struct driver *d, struct drv_made *out, struct fl_err *err)
{
    uint32_t *rows = malloc((size_t)d->flags.rollout_batch_size * sizeof(*rows));

    if (!rows)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %jd prompts",
                       (intmax_t)d->flags.rollout_batch_size);
    struct drv_job j = drv_job_of(d, d->now.step, rows);
    double from = d->ops->now_s(d);
    d->phase = DRV_ROLLOUT;
    enum fl_status st = d->ops->generate(d, &j, out, err);
    d->now.took_s[DRV_ROLLOUT] += d->ops->now_s(d) - from;
    free(rows);
    return st == FL_OK ? st : fl_wrap(err, st, "generate");
}

/* ---- train ----------------------------------------------------------------------------------- */
static enum fl_status score(struct driver *d, const struct drv_made *m, float *advantages,
                            struct fl_err *err)
{
    uint32_t n = (uint32_t)d->flags.n_samples_per_prompt;
    uint32_t *rows = malloc((size_t)d->flags.rollout_batch_size * sizeof(*rows));
    float *r = malloc(m->n_samples * sizeof(*r));
    enum fl_status st = FL_OK;
    double from = d->ops->now_s(d), sum = 0;

    if (!rows || !r)
        st = fl_fail(err, FL_EXHAUSTED, "no memory for %u rewards", m->n_samples);
    if (st == FL_OK) {
        struct drv_job j = drv_job_of(d, d->now.step, rows);

        st = rewards(d, &j, m, r, err);
    }
    for (uint32_t i = 0; st == FL_OK && i < m->n_samples; i += n) {
        policy_advantages(r + i, n, !d->flags.no_std_normalization, advantages + i);
        for (uint32_t k = 0; k < n; k++)
            sum += (double)r[i + k];
    }
    d->now.reward_mean = m->n_samples ? sum / m->n_samples : 0;
    d->now.took_s[DRV_ROLLOUT] += d->ops->now_s(d) - from;
    free(r);
    free(rows);
    return st;
}

static void look_at_samples(struct driver *d, const struct drv_made *m)
{
    double len = 0, stale = 0;

    for (uint32_t i = 0; i < m->n_samples; i++) {
        len += m->lengths[i] - m->prompt_lengths[i];
        stale += m->versions[i] <= d->version ? (double)(d->version - m->versions[i]) : 0;
    }
    d->now.response_len_mean = m->n_samples ? len / m->n_samples : 0;
    d->now.staleness_mean = m->n_samples ? stale / m->n_samples : 0;
    d->now.engine_idle_s = m->idle_s;
}

static enum fl_status train(struct driver *d, const struct drv_made *m, const float *advantages,
                            struct fl_err *err)
{
    struct batch b = { .n_tokens = m->n_tokens,
                       .n_samples = m->n_samples,
                       .tokens = m->tokens,
                       .lengths = m->lengths,
                       .prompt_lengths = m->prompt_lengths,
                       .logprobs = m->logprobs,
                       .advantages = advantages };
    void *blob = NULL;
    size_t bytes = 0;
    char body[192];
    json_t *said = NULL;
    double from = d->ops->now_s(d);

    snprintf(body, sizeof(body), "{\"step\":%ju,\"version\":%ju,\"epochs\":%jd,\"minibatch\":%jd}",
             (uintmax_t)d->now.step, (uintmax_t)d->version + 1, (intmax_t)d->flags.train_epochs,
             (intmax_t)d->flags.global_batch_size);
    FL_TRY(batch_write(&b, &blob, &bytes, err));
    d->phase = DRV_TRAIN;
    enum fl_status st = d->ops->train(d, body, blob, bytes, &said, err);
    d->now.took_s[DRV_TRAIN] += d->ops->now_s(d) - from;
    free(blob);
    if (st != FL_OK)
        return fl_wrap(err, st, "train");
    d->version++;
    d->now.loss = real_of(said, "loss");
    d->now.grad_norm = real_of(said, "grad_norm");
    d->now.entropy = real_of(said, "entropy");
    d->now.clip_fraction = real_of(said, "clip_fraction");
    d->now.logprob_abs_diff = real_of(said, "logprob_abs_diff");
    d->now.log_probs_s = real_of(said, "log_probs_s");
    d->now.train_s = real_of(said, "train_s");
    d->now.tokens = m->n_tokens;
    json_decref(said);
    return FL_OK;
}

enum fl_status drv_learn(struct driver *d, struct drv_made *m, struct fl_err *err)
{
    const double most = 1e-3; /* of --ci-test; the same arithmetic on both sides gives far less */
    float *advantages = malloc(m->n_samples * sizeof(*advantages));

    if (!advantages)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u advantages", m->n_samples);
    look_at_samples(d, m);
    enum fl_status st = odd_digests(d, DRV_ROLLOUT, m, err);
    if (st == FL_OK)
        st = score(d, m, advantages, err);
    if (st == FL_OK)
        st = train(d, m, advantages, err);
    free(advantages);
    if (st == FL_OK && d->flags.ci_test && d->now.step == 0 && d->now.logprob_abs_diff > most)
        return fl_fail(
            err, FL_CORRUPT,
            "--ci-test: before the first training step trainer and engine differ by %.3g in "
            "log probability, at most %.0e is allowed",
            d->now.logprob_abs_diff, most);
    return st;
}

/* ---- save and evaluate ----------------------------------------------------------------------- */
enum fl_status drv_save(struct driver *d, struct fl_err *err)
{
    const struct train_flags *f = &d->flags;
    uint64_t done = d->now.step + 1;
    bool due = f->save_interval && (done % (uint64_t)f->save_interval == 0 || done == d->n_steps);
    char dir[1100];
    double from = d->ops->now_s(d);

    if (!due)
        return FL_OK;
    d->phase = DRV_SAVE;
    snprintf(dir, sizeof(dir), "%s/step_%08ju", d->save_dir, (uintmax_t)done);
    json_t *o = json_pack("{s:s, s:I}", "dir", dir, "step", (json_int_t)done);
    char *body = o ? json_dumps(o, JSON_COMPACT) : NULL;
    json_decref(o);
    if (!body)
        return fl_fail(err, FL_EXHAUSTED, "no memory to save");
    enum fl_status st = d->ops->ask(d, DRV_TRAINERS, "save", body, DRV_LOAD_MS, NULL, err);
    free(body);
    d->now.took_s[DRV_SAVE] += d->ops->now_s(d) - from;
    d->now.saved = st == FL_OK;
    return st == FL_OK ? st : fl_wrap(err, st, "save");
}

enum fl_status drv_eval(struct driver *d, struct fl_err *err)
{
    const struct train_flags *f = &d->flags;
    uint64_t done = d->now.step + 1;
    struct drv_made m = { 0 };
    double from = d->ops->now_s(d), sum = 0;

    if (!d->evals || !f->eval_interval || (done % (uint64_t)f->eval_interval && done != d->n_steps))
        return FL_OK;
    uint32_t n = d->evals->n, *rows = malloc(n * sizeof(*rows));
    float *r = malloc(n * sizeof(*r));
    enum fl_status st = rows && r ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory to evaluate");
    d->phase = DRV_EVAL;
    for (uint32_t i = 0; st == FL_OK && i < n; i++)
        rows[i] = i;
    struct drv_job j = { .p = d->evals,
                         .rows = rows,
                         .n_prompts = n,
                         .n = 1,
                         .max_new = d->max_new,
                         .step = (uint32_t)d->now.step,
                         .seed = (uint64_t)f->seed,
                         .version = d->served };
    if (st == FL_OK)
        st = d->ops->generate(d, &j, &m, err);
    if (st == FL_OK)
        st = odd_digests(d, DRV_EVAL, &m, err);
    if (st == FL_OK)
        st = rewards(d, &j, &m, r, err);
    for (uint32_t i = 0; st == FL_OK && i < n; i++)
        sum += (double)r[i];
    d->now.eval_reward_mean = sum / n;
    d->now.has_eval = st == FL_OK;
    d->now.took_s[DRV_EVAL] += d->ops->now_s(d) - from;
    drv_made_fini(&m);
    free(rows);
    free(r);
    return st == FL_OK ? st : fl_wrap(err, st, "evaluate");
}
