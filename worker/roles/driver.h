/* worker/roles/driver.h - the built-in driver: one run from its flags to its last step
 *
 * The loop knows what a step is made of; how that is asked of processes is behind struct drv_ops, so
 * that tests see the order of a step without any process. One thread runs the loop; with --async a
 * second one runs a generation, and the two meet before anything else touches the engines. */
#pragma once
#include <furlong/driver.h>
#include <jansson.h>

#include "common/conf/train_flags.h"
#include "worker/roles/model.h"
#include "worker/roles/prompts.h"

enum { DRV_LOAD_MS = 600000, DRV_MOVE_MS = 120000, DRV_PAUSE_MS = 30000, DRV_CAUSE_MS = 2000, DRV_TRIES = 3 };

/* ---- a generation ----------------------------------------------------------------------------- */
struct drv_job { /* prompts are rows of p */
    const struct prompts *p;
    const uint32_t *rows;
    uint32_t n_prompts, n, max_new, step;
    double temperature;
    uint64_t seed, version;
};
struct drv_made { /* samples prompt by prompt, n of each */
    uint32_t n_samples, n_tokens;
    int32_t *tokens, *lengths, *prompt_lengths;
    float *logprobs;
    char **texts;
    uint64_t *versions; /* the oldest of a sample's spans; UINT64_MAX: the engine did not say */
    double idle_s;      /* mean over the engines: waited for work */
    uint32_t odd_digests, asked_again;
    char why[192]; /* asked_again: the first reason */
};
void drv_made_fini(struct drv_made *m);

/* ---- what the loop asks for ------------------------------------------------------------------- */
enum drv_side { DRV_TRAINERS, DRV_ENGINES };
struct driver;
struct drv_ops {
    enum fl_status (*place)(struct driver *d, struct fl_err *err);
    /* Starts them, or finds those of an earlier attempt of this driver. */
    enum fl_status (*launch)(struct driver *d, enum drv_side side, struct fl_err *err);
    /* All that were launched have joined. The first that ends for good ends it, on either side. */
    enum fl_status (*joined)(struct driver *d, struct fl_err *err);
    /* After a start that failed by st: FL_INVALID if a trainer ended by itself, which it would do again. */
    enum fl_status (*not_up)(struct driver *d, enum fl_status st, struct fl_err *err);
    /* The same call to all of a side, and the sum of what they say they moved. */
    enum fl_status (*ask)(struct driver *d, enum drv_side side, const char *method, const char *body,
                          uint32_t budget_ms, json_t **first_answer, struct fl_err *err);
    /* FL_UNREACHABLE: a rank ended; its last words are in err. */
    enum fl_status (*train)(struct driver *d, const char *body, const void *blob, size_t bytes,
                            json_t **answer, struct fl_err *err);
    enum fl_status (*generate)(struct driver *d, const struct drv_job *job, struct drv_made *out,
                               struct fl_err *err);
    enum fl_status (*update)(struct driver *d, uint64_t version, struct furlong_report *out,
                             struct fl_err *err);
    /* Ends by force, and says who and where, whom ask or update waited for in vain; of those who are
     * slow or worse, or silent alone. How many. */
    uint32_t (*end_late)(struct driver *d, enum drv_side side, enum furlong_late from);
    enum fl_status (*restart)(struct driver *d, enum drv_side side, struct fl_err *err);
    /* Engines live and hold a version, after some of them ended. FL_UNREACHABLE: a trainer has. */
    enum fl_status (*wait_engines)(struct driver *d, struct fl_err *err);
    void (*record)(struct driver *d, const char *json);
    double (*now_s)(struct driver *d);
    void (*finish)(struct driver *d);
};

/* ---- a step ----------------------------------------------------------------------------------- */
enum drv_phase {
    DRV_ROLLOUT, DRV_RELEASE, DRV_WAKE, DRV_TRAIN, DRV_SAVE, DRV_SLEEP, DRV_UPDATE, DRV_RESUME,
    DRV_EVAL, DRV_PHASES
};
struct drv_step {
    uint64_t step;
    double began_s, took_s[DRV_PHASES];
    double sleep_setup_s, sleep_copy_s, wake_setup_s, wake_copy_s;
    uint64_t dropped_bytes, kept_bytes, written_bytes;
    char unclean[DRV_PHASES][160]; /* "" clean */
    double reward_mean, response_len_mean, eval_reward_mean, staleness_mean;
    bool has_eval, saved, overlapped; /* overlapped: generated while the step before trained */
    double wait_s;                    /* the trainer's, for a generation that ran beside it */
    double logprob_abs_diff, loss, grad_norm, entropy, clip_fraction, log_probs_s, train_s;
    double engine_idle_s;
    uint64_t tokens;
    struct furlong_report report;
};
struct drv_means { double total, rollout, train, update, move, engine_idle; uint64_t n; };

struct driver {
    const struct drv_ops *ops;
    void *seat; /* of the ops */
    const char *job_name, *node_name;
    uint32_t attempt;
    struct train_flags flags;
    struct fl_opts opts;
    char run_dir[1024], save_dir[1024], eval_path[1024], prompt_path[1024];
    struct prompts *prompts, *evals;
    struct alphabet alphabet;
    struct model_config config;
    uint32_t max_new;
    uint64_t n_steps;
    char load_dir[1024]; /* "" none: where the trainers start from */
    /* state */
    uint64_t step;    /* the next one to run      */
    uint64_t version; /* of the trainers' weights */
    uint64_t served, served_digest[2]; /* what the engines were given last */
    bool has_served;
    json_t *trainer_said; /* of the last train */
    struct drv_step now;
    enum drv_phase phase;
    struct drv_means means;
    char again[160]; /* why the next step to begin is run again */
    uint32_t restarts, n_of[2]; /* n_of: processes of each side */
    int steps_fd, log_fd, out_fd; /* -1: not open; out: where the table goes */
};

/* drv_setup.c: files and sizes; makes nothing. FL_INVALID: what the user gave is wrong. */
enum fl_status drv_look(struct driver *d, struct fl_err *err);
/* That, and the run's folders. */
enum fl_status drv_setup(struct driver *d, struct fl_err *err);
void drv_fini(struct driver *d);
/* drv_run.c: until the last step. */
enum fl_status drv_run(struct driver *d, struct fl_err *err);

/* drv_step.c */
enum fl_status drv_bring_up(struct driver *d, struct fl_err *err); /* the start-up row */
enum fl_status drv_settle(struct driver *d, struct fl_err *err);   /* its end: weights to the engines */
enum fl_status drv_generate(struct driver *d, struct drv_made *out, struct fl_err *err);
enum fl_status drv_learn(struct driver *d, struct drv_made *m, struct fl_err *err);
enum fl_status drv_change_over(struct driver *d, struct fl_err *err); /* from train to the next one */
enum fl_status drv_after_rollout(struct driver *d, struct fl_err *err);
enum fl_status drv_save(struct driver *d, struct fl_err *err);
enum fl_status drv_eval(struct driver *d, struct fl_err *err);
struct drv_job drv_job_of(const struct driver *d, uint64_t step, uint32_t *rows);

/* drv_record.c */
void drv_step_begin(struct driver *d, uint64_t step);
void drv_unclean(struct driver *d, enum drv_phase phase, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
enum fl_status drv_step_end(struct driver *d, struct fl_err *err);
json_t *drv_step_json(const struct driver *d);
enum fl_status drv_pending_write(struct driver *d, struct fl_err *err);
bool drv_pending_read(struct driver *d, uint64_t step);
void drv_pending_drop(const struct driver *d); /* all steps are written down */
enum fl_status drv_steps_open(struct driver *d, uint64_t *whole, struct fl_err *err);
enum fl_status drv_steps_cut(struct driver *d, uint64_t steps, uint64_t *whole, struct fl_err *err);
enum fl_status drv_run_json(struct driver *d, const char *placement, struct fl_err *err);
void drv_say(struct driver *d, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void drv_advice(struct driver *d);
/* Pure: what the means of a run suggest; out gets one line. engines, trainers: of the run. */
void drv_advise(const struct drv_means *m, bool colocate, bool is_async, uint32_t trainers,
                uint32_t engines, char out[256]);

extern const struct drv_ops drv_ops_seat; /* drv_seat.c: over libfurlong */
