#include "worker/roles/drv_seat.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/base/file.h"
#include "common/conf/json.h"

enum {
    WORDS = 256,
    WORD_BYTES = 640,
    BACKOFF_MS = 100,
    BACKOFF_MAX_MS = 5000,
    END_MS = 30000,
    LOOK_MS = 20
};

static const char *const side_roles[] = { [DRV_TRAINERS] = "trainer", [DRV_ENGINES] = "rollout" };

void drv_nap(unsigned ms)
{
    (void)poll(NULL, 0, (int)ms);
}

static double seat_now_s(struct driver *d)
{
    struct timespec t;

    (void)d;
    (void)clock_gettime(CLOCK_BOOTTIME, &t); /* cannot fail with a known clock */
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- placement ------------------------------------------------------------------------------- */
static enum fl_status seat_place(struct driver *d, struct fl_err *err)
{
    static const char *const names[] = { "actor-num-nodes", "actor-num-gpus-per-node",
                                         "rollout-num-gpus", "rollout-num-gpus-per-engine",
                                         "num-gpus-per-node" };
    const struct train_flags *f = &d->flags;
    const int64_t values[] = { f->actor_num_nodes, f->actor_num_gpus_per_node, f->rollout_num_gpus,
                               f->rollout_num_gpus_per_engine, f->num_gpus_per_node };
    struct drv_seat *s = d->seat;
    struct furlong_flag flags[8];
    char text[5][24], within[24], *json = NULL;
    size_t n = 0;

    for (size_t i = 0; i < 5; i++) {
        if (values[i] <= 0 || (f->colocate && i == 2))
            continue; /* not given: the head derives it */
        snprintf(text[i], sizeof(text[i]), "%jd", (intmax_t)values[i]);
        flags[n++] = (struct furlong_flag){ names[i], text[i] };
    }
    if (f->place_timeout_s > 0) {
        snprintf(within, sizeof(within), "%.3f", f->place_timeout_s);
        flags[n++] = (struct furlong_flag){ "place-timeout", within };
    }
    flags[n++] = (struct furlong_flag){ "colocate", f->colocate ? "true" : "false" };
    FL_TRY(furlong_place(s->f, flags, n, &s->layout, err));
    if (d->out_fd >= 0)
        furlong_layout_print(s->layout, d->out_fd);
    if (d->log_fd >= 0)
        furlong_layout_print(s->layout, d->log_fd);
    furlong_layout_json(s->layout, &json);
    enum fl_status st = drv_run_json(d, json, err);
    free(json);
    return st;
}

/* ---- processes ------------------------------------------------------------------------------- */
struct words {
    char *at[WORDS];
    size_t n;
};

static void words_free(struct words *w)
{
    for (size_t i = 0; i < w->n; i++)
        free(w->at[i]);
}

static bool word(struct words *w, const char *fmt, ...)
{
    va_list ap;
    char *text = NULL;

    va_start(ap, fmt);
    if (w->n + 1 < WORDS && vasprintf(&text, fmt, ap) >= 0)
        w->at[w->n++] = text;
    va_end(ap);
    return text != NULL;
}

/* Everything that was given, then what the driver settled: the later word wins. */
static enum fl_status builtin_words(struct driver *d, enum drv_side side, struct words *w,
                                    struct fl_err *err)
{
    const struct model_config *c = &d->config;
    char path[FL_PATH_MAX], hex[ALPHABET_HEX];
    bool ok;

    FL_TRY(
        fl_program_path(side == DRV_TRAINERS ? "furlong-trainer" : "furlong-rollout", path, err));
    ok = word(w, "%s", path);
    for (size_t t = 0; t < TRAIN_FLAG_TABLES; t++) {
        char **given = fl_opts_words(&d->opts, t);

        for (char **g = given; ok && g && *g; g++)
            ok = word(w, "%s", *g);
        ok = ok && given;
        fl_words_free(given);
    }
    alphabet_to_hex(&d->alphabet, hex);
    ok = ok && word(w, "--alphabet=%s", hex) && word(w, "--vocab-size=%u", c->vocab) &&
         word(w, "--hidden-size=%u", c->dim) && word(w, "--num-layers=%u", c->layers) &&
         word(w, "--num-attention-heads=%u", c->heads) &&
         word(w, "--num-query-groups=%u", c->kv_heads) &&
         word(w, "--kv-channels=%u", c->head_dim) && word(w, "--ffn-hidden-size=%u", c->ffn) &&
         word(w, "--max-position-embeddings=%u", c->max_len) &&
         word(w, "--rotary-base=%.9g", (double)c->rope_theta) &&
         word(w, "--norm-epsilon=%.9g", (double)c->norm_eps) &&
         word(w, "--%suntie-embeddings-and-output-weights", c->tied ? "no-" : "") &&
         word(w, "--%sqk-layernorm", c->qk_norm ? "" : "no-") &&
         word(w, "--seed=%jd", (intmax_t)d->flags.seed);
    return ok ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory for a command line");
}

/* The attempt that m's cause belongs to; 0: none has ended. */
static uint32_t ended_attempt(const struct furlong_member *m)
{
    if (!m->why[0])
        return 0;
    return m->state == FURLONG_ENDED ? m->attempt : m->attempt - 1;
}

static enum fl_status told_init(struct drv_seat *s, enum drv_side side, struct fl_err *err)
{
    uint32_t n = furlong_group_size(s->groups[side]);

    s->told[side] = calloc(n, sizeof(*s->told[side]));
    if (!s->told[side])
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u members", n);
    for (uint32_t i = 0; i < n; i++) {
        struct furlong_member m;

        furlong_group_member(s->groups[side], i, &m);
        s->told[side][i] = ended_attempt(&m);
    }
    return FL_OK;
}

enum { DIR_MAX = 1100 };
static enum fl_status update_how(struct driver *d, uint64_t version, char dir[DIR_MAX],
                                 struct furlong_update *out, struct fl_err *err)
{
    const struct train_flags *f = &d->flags;

    *out = (struct furlong_update){
        .version = version,
        .set = "policy",
        .mode = f->mode,
        .least_engines = (uint32_t)f->min_engines,
        .budget_ms = (uint32_t)(f->update_timeout_s * 1000),
        .slots = (uint32_t)f->weight_slots,
        .bucket_bytes = f->buffer_size,
    };
    if (strcmp(f->mode, "disk-delta") != 0)
        return FL_OK;
    snprintf(dir, DIR_MAX, "%s%s",
             f->update_weight_disk_dir ? f->update_weight_disk_dir : d->run_dir,
             f->update_weight_disk_dir ? "" : "/weights");
    out->dir = dir;
    return fl_mkdirs(dir, err);
}

static enum fl_status plane_open(struct driver *d, struct fl_err *err)
{
    struct drv_seat *s = d->seat;
    struct furlong_update how;
    char dir[DIR_MAX];

    FL_TRY(update_how(d, 0, dir, &how, err));
    return furlong_plane(s->groups[DRV_TRAINERS], s->groups[DRV_ENGINES], &how, err);
}

static enum fl_status not_started(const struct driver *d, enum drv_side side, enum fl_status st,
                                  struct fl_err *err)
{
    const char *command = side == DRV_TRAINERS ? d->flags.trainer_cmd : d->flags.rollout_cmd;

    if (st == FL_NOT_FOUND && command)
        return fl_wrap(err, st, "--%s-cmd '%s' cannot be run: give a program that each node has",
                       side_roles[side], command);
    return fl_wrap(err, st, "start the %ss", side_roles[side]);
}

static enum fl_status seat_launch(struct driver *d, enum drv_side side, struct fl_err *err)
{
    struct drv_seat *s = d->seat;
    const char *command = side == DRV_TRAINERS ? d->flags.trainer_cmd : d->flags.rollout_cmd;
    /* trainers hold one state together: one that ends takes the others down, and the driver decides
     */
    struct furlong_launch_opts o = {
        .restart_max = side == DRV_ENGINES ? (uint32_t)d->flags.max_restarts : 0,
        .backoff_ms = BACKOFF_MS,
        .backoff_max_ms = BACKOFF_MAX_MS,
        .start_ms = (uint32_t)(d->flags.start_timeout_s * 1000),
    };
    struct words w = { .n = 0 };
    enum fl_status st = FL_OK;

    if (!command)
        st = builtin_words(d, side, &w, err);
    else if (!word(&w, "/bin/sh") || !word(&w, "-c") || !word(&w, "%s", command))
        st = fl_fail(err, FL_EXHAUSTED, "no memory for a command line");
    w.at[w.n] = NULL;
    if (st == FL_OK)
        st = furlong_launch_start(s->f, s->layout, side_roles[side], w.at, NULL, &o,
                                  &s->groups[side], err);
    words_free(&w);
    if (st != FL_OK)
        return not_started(d, side, st, err);
    d->n_of[side] = furlong_group_size(s->groups[side]);
    return FL_OK;
}

static enum fl_status seat_joined(struct driver *d, struct fl_err *err)
{
    struct drv_seat *s = d->seat;
    double until_s = d->ops->now_s(d) + (double)d->flags.start_timeout_s;

    for (bool all = false; !all;) { /* in turn: whoever ends for good is heard of at once */
        bool over = d->ops->now_s(d) >= until_s;

        all = true;
        for (unsigned side = 0; side < 2; side++) {
            enum fl_status st =
                s->groups[side] ? furlong_group_wait(s->groups[side], LOOK_MS, err) : FL_OK;

            all &= st == FL_OK;
            if (st != FL_OK && (st != FL_TIMEOUT || over))
                return not_started(d, (enum drv_side)side, st, err);
        }
    }
    for (unsigned side = 0; side < 2; side++)
        if (s->groups[side] && !s->told[side])
            FL_TRY(told_init(s, (enum drv_side)side, err));
    /* a driver that came back: trainers that live may write before the first update */
    return s->groups[DRV_TRAINERS] && s->groups[DRV_ENGINES] ? plane_open(d, err) : FL_OK;
}

/* A shell's 128 and more are signals of what it ran: memory, somebody's kill. Those pass, and are
 * tried again. */
enum { EXIT_BY_SIGNAL = 128 };

static bool ended_by_itself(struct furlong_group *g, struct furlong_member *out)
{
    for (uint32_t i = 0; g && i < furlong_group_size(g); i++) {
        int code = furlong_member_exit_code(g, i);

        furlong_group_member(g, i, out);
        if (code >= 0 && code < EXIT_BY_SIGNAL)
            return true;
    }
    return false;
}

/* Of engines the head starts each again, up to --max-restarts. */
static enum fl_status seat_not_up(struct driver *d, enum fl_status st, struct fl_err *err)
{
    const struct drv_seat *s = d->seat;
    struct furlong_group *g = s->groups[DRV_TRAINERS];
    struct furlong_member m;

    if (st != FL_UNREACHABLE || d->attempt > 1)
        return st;
    for (uint32_t waited = 0; !ended_by_itself(g, &m); waited += LOOK_MS) {
        if (!g || waited >= DRV_CAUSE_MS) /* the call fails before its end is known */
            return st;
        drv_nap(LOOK_MS);
    }
    return fl_fail(
        err, FL_INVALID,
        "%s, before it had answered a call: it would do so again, its last lines say why", m.why);
}

bool drv_seat_tell(struct driver *d, enum drv_side side, uint32_t wait_ms)
{
    struct drv_seat *s = d->seat;
    bool said = false;

    for (uint32_t waited = 0; s->told[side]; waited += LOOK_MS) {
        for (uint32_t i = 0; i < furlong_group_size(s->groups[side]); i++) {
            struct furlong_member m;

            furlong_group_member(s->groups[side], i, &m);
            uint32_t ended = ended_attempt(&m);
            if (ended <= s->told[side][i])
                continue;
            s->told[side][i] = ended;
            said = true;
            drv_say(d, "%s (attempt %u)", m.why, ended);
        }
        if (said || waited >= wait_ms)
            return said;
        drv_nap(LOOK_MS);
    }
    return false; /* they have not joined yet */
}

void drv_seat_end(struct driver *d, enum drv_side side, uint32_t rank, uint32_t attempt,
                  const char *why)
{
    struct drv_seat *s = d->seat;
    struct fl_err err = { 0 };
    struct furlong_member m;
    char name[128], cause[256];

    furlong_group_member(s->groups[side], rank, &m);
    int len = snprintf(name, sizeof(name), "%s %u on %s: ", side_roles[side], rank, m.node);
    if (!strncmp(why, name, (size_t)len))
        why += len;
    drv_say(d, "%s%s; it is ended", name, why);
    snprintf(cause, sizeof(cause), "ended by its driver (%.200s)", why);
    if (furlong_member_end(s->groups[side], rank, attempt, cause, END_MS, &err) != FL_OK)
        drv_say(d, "%s", err.text); /* what needs it fails, and says so */
}

static uint32_t seat_end_late(struct driver *d, enum drv_side side, enum furlong_late from)
{
    struct drv_seat *s = d->seat;
    uint32_t n = 0;

    for (uint32_t i = 0; i < furlong_group_size(s->groups[side]); i++) {
        struct furlong_member m;

        if (furlong_group_late(s->groups[side], i, &m) < from)
            continue;
        drv_seat_end(d, side, i, m.attempt, m.why);
        n++;
    }
    return n;
}

static void seat_finish(struct driver *d)
{
    struct drv_seat *s = d->seat;

    free(s->told[DRV_ENGINES]);
    free(s->told[DRV_TRAINERS]);

    furlong_group_end(s->groups[DRV_ENGINES]);
    furlong_group_end(s->groups[DRV_TRAINERS]);
    furlong_layout_free(s->layout);
}

/* ---- calls ----------------------------------------------------------------------------------- */
static void sum_into(json_t *sum, const json_t *more)
{
    const char *key;
    json_t *v;

    json_object_foreach ((json_t *)(uintptr_t)more, key, v) {
        const json_t *had = json_object_get(sum, key);

        if (json_is_integer(v) && json_is_integer(had))
            json_object_set_new(sum, key,
                                json_integer(json_integer_value(had) + json_integer_value(v)));
        else if (json_is_real(v) && json_is_number(had) &&
                 json_number_value(had) < json_real_value(v))
            json_object_set(sum, key, v); /* times: the slowest member's */
    }
}

static bool is_move(const char *method)
{
    return !strncmp(method, "offload", 7) || !strncmp(method, "onload", 6) ||
           !strcmp(method, "clear_memory");
}

/* The first answer; of offload and onload bytes are added and the longest times taken over all. */
static enum fl_status answers_join(const char *method, const struct furlong_answer *each,
                                   uint32_t n, json_t **out, struct fl_err *err)
{
    json_t *all = NULL;

    for (uint32_t i = 0; i < n; i++) {
        json_t *o = NULL;

        if (!each[i].body_bytes)
            continue;
        enum fl_status st =
            fl_json_parse(each[i].body, each[i].body_bytes, method, FL_JSON_MAX, &o, err);
        if (st != FL_OK) {
            json_decref(all);
            return st;
        }
        if (all && is_move(method))
            sum_into(all, o);
        if (all)
            json_decref(o);
        else
            all = o;
    }
    *out = all ? all : json_object();
    return FL_OK;
}

static enum fl_status seat_ask(struct driver *d, enum drv_side side, const char *method,
                               const char *body, uint32_t budget_ms, json_t **first_answer,
                               struct fl_err *err)
{
    struct drv_seat *s = d->seat;
    uint32_t n = furlong_group_size(s->groups[side]);
    struct furlong_answer *each = calloc(n, sizeof(*each));
    struct furlong_data what = { .body = body, .body_bytes = body ? strlen(body) : 0 };

    if (!each)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u answers", n);
    enum fl_status st = furlong_ask_all(s->groups[side], method, &what, budget_ms, each, err);
    if (st == FL_OK && first_answer)
        st = answers_join(method, each, n, first_answer, err);
    for (uint32_t i = 0; i < n; i++)
        furlong_answer_free(&each[i]);
    free(each);
    return st;
}

static enum fl_status seat_update(struct driver *d, uint64_t version, struct furlong_report *out,
                                  struct fl_err *err)
{
    struct drv_seat *s = d->seat;
    struct furlong_update how;
    char dir[DIR_MAX];

    FL_TRY(update_how(d, version, dir, &how, err));
    return furlong_update(s->groups[DRV_TRAINERS], s->groups[DRV_ENGINES], &how, out, err);
}

static enum fl_status seat_restart(struct driver *d, enum drv_side side, struct fl_err *err)
{
    struct drv_seat *s = d->seat;

    (void)drv_seat_tell(d, side, 0);
    FL_TRY(
        furlong_group_restart(s->groups[side], (uint32_t)(d->flags.start_timeout_s * 1000), err));
    for (uint32_t i = 0; i < furlong_group_size(s->groups[side]); i++) {
        struct furlong_member m; /* those that were ended for it are no news */

        furlong_group_member(s->groups[side], i, &m);
        s->told[side][i] = m.attempt - 1;
    }
    return FL_OK;
}

static enum fl_status seat_wait_engines(struct driver *d, struct fl_err *err)
{
    struct drv_seat *s = d->seat;
    struct furlong_member m;

    for (uint32_t waited = 0; waited < DRV_CAUSE_MS; waited += LOOK_MS) {
        bool engine = drv_seat_tell(d, DRV_ENGINES, 0), trainer = drv_seat_tell(d, DRV_TRAINERS, 0);

        if (engine || trainer)
            break;
        drv_nap(LOOK_MS);
    }
    for (uint32_t i = 0; s->groups[DRV_TRAINERS] && i < furlong_group_size(s->groups[DRV_TRAINERS]);
         i++) {
        furlong_group_member(s->groups[DRV_TRAINERS], i, &m);
        if (m.state == FURLONG_ENDED)
            return fl_fail(err, FL_UNREACHABLE, "%s", m.why);
    }
    return furlong_group_wait(s->groups[DRV_ENGINES], (uint32_t)(d->flags.start_timeout_s * 1000),
                              err);
}

static void seat_record(struct driver *d, const char *json)
{
    struct drv_seat *s = d->seat;

    furlong_step_record(s->f, json);
    furlong_progress(s->f, d->step, d->n_steps);
}

const struct drv_ops drv_ops_seat = {
    .place = seat_place,
    .launch = seat_launch,
    .joined = seat_joined,
    .not_up = seat_not_up,
    .ask = seat_ask,
    .train = drv_seat_train,
    .generate = drv_seat_generate,
    .update = seat_update,
    .end_late = seat_end_late,
    .restart = seat_restart,
    .wait_engines = seat_wait_engines,
    .record = seat_record,
    .now_s = seat_now_s,
    .finish = seat_finish,
};
