#include "common/conf/train_flags.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* clang-format off */
#define AT(member) offsetof(struct train_flags, member)
#define TEXT(name_, member, arg_, fallback_, help_) \
    { .kind = FL_OPT_TEXT, .name = name_, .arg = arg_, .fallback = fallback_, .at = AT(member), .help = help_ }
#define WORD(name_, member, choices_, fallback_, help_) \
    { .kind = FL_OPT_TEXT, .name = name_, .arg = choices_, .choices = choices_, .fallback = fallback_, .at = AT(member), .help = help_ }
#define INT(name_, member, arg_, fallback_, min_, max_, help_) \
    { .kind = FL_OPT_INT, .name = name_, .arg = arg_, .fallback = fallback_, .min = min_, .max = max_, .at = AT(member), .help = help_ }
#define REAL(name_, member, arg_, fallback_, min_, max_, help_) \
    { .kind = FL_OPT_REAL, .name = name_, .arg = arg_, .fallback = fallback_, .min = min_, .max = max_, .at = AT(member), .help = help_ }
#define SWITCH(name_, member, off_, fallback_, help_) \
    { .kind = FL_OPT_SWITCH, .name = name_, .off = off_, .fallback = fallback_, .at = AT(member), .help = help_ }
#define BIG 1e9

static const struct fl_opt data_opts[] = {
    TEXT("prompt-data", prompt_data, "FILE", NULL, "prompts, one JSON object a line (default: the file that ships)"),
    TEXT("input-key", input_key, "KEY", "input", "member that holds the prompt"),
    TEXT("label-key", label_key, "KEY", "label", "member that holds the right answer"),
    { .kind = FL_OPT_INT, .name = "rollout-batch-size", .alias = "batch-size", .arg = "N", .fallback = "64", .min = 1, .max = 1 << 16, .at = AT(rollout_batch_size), .help = "prompts a step" },
    INT("n-samples-per-prompt", n_samples_per_prompt, "N", "8", 1, 4096, "answers to each prompt: one group"),
    INT("num-rollout", num_rollout, "N", "300", 0, BIG, "steps of the run"),
    INT("num-epoch", num_epoch, "N", NULL, 1, BIG, "passes over the prompts; used when --num-rollout is not given"),
    SWITCH("rollout-shuffle", rollout_shuffle, true, "true", "a new order of the prompts for each pass"),
    INT("rollout-max-response-len", max_response_len, "TOKENS", "0", 0, 1 << 20, "longest answer; 0: the longest label"),
    REAL("rollout-temperature", temperature, "T", "1", 0.01, 100, "of sampling; evaluation is greedy"),
    TEXT("eval-prompt-data", eval_prompt_data, "FILE", NULL, "held-out prompts (default: beside the file that ships)"),
    INT("eval-interval", eval_interval, "STEPS", "25", 0, BIG, "evaluate every so many steps and at the end; 0: never"),
    TEXT("reward-cmd", reward_cmd, "COMMAND", NULL, "gets one JSON object a line, answers one number a line; without it: 1 for an exact match"),
    REAL("reward-timeout", reward_timeout_s, "SECONDS", "60", 0.01, 86400, "for one batch of --reward-cmd"),
    { .kind = FL_OPT_INT, .name = "seed", .alias = "rollout-seed", .arg = "N", .fallback = "1", .min = 0, .max = 9e15, .at = AT(seed), .help = "the same seed gives the same weights after every step" },
    { .name = NULL },
};
static const struct fl_opt learn_opts[] = {
    REAL("lr", lr, "RATE", "1e-3", 0, 10, "learning rate of Adam"),
    REAL("adam-beta1", adam_beta1, "B", "0.9", 0, 0.99999, "share of the old mean that Adam keeps"),
    REAL("adam-beta2", adam_beta2, "B", "0.99", 0, 0.999999, "share of the old mean square"),
    REAL("adam-eps", adam_eps, "E", "1e-8", 0, 1, "added to the root before dividing"),
    REAL("weight-decay", weight_decay, "W", "0", 0, 10, "decoupled, as in AdamW"),
    REAL("clip-grad", clip_grad, "NORM", "1", 0, 1e9, "longest gradient; 0: not held"),
    REAL("eps-clip", eps_clip, "E", "0.2", 0, 1, "the ratio is held above 1 - E"),
    REAL("eps-clip-high", eps_clip_high, "E", "0.28", 0, 100, "and below 1 + E"),
    REAL("entropy-coef", entropy_coef, "C", "0.01", 0, 10, "bonus for undecided answers"),
    INT("global-batch-size", global_batch_size, "SAMPLES", "0", 0, BIG, "samples of one optimizer step; 0: all of a rollout"),
    INT("train-epochs", train_epochs, "N", "1", 1, 64, "passes of the trainer over one rollout"),
    WORD("advantage-estimator", advantage_estimator, "grpo|ppo", "grpo", "ppo needs a critic, which --trainer-cmd may bring"),
    SWITCH("disable-grpo-std-normalization", no_std_normalization, false, NULL, "advantages are not divided by the group's deviation"),
    INT("lora-rank", lora_rank, "R", "0", 0, 4096, "low-rank adapters, which --trainer-cmd may bring; 0: none"),
    INT("train-threads", train_threads, "N", "0", 0, 64, "threads of one trainer rank, 0: its share of the node's cores; the result is the same"),
    { .name = NULL },
};
static const struct fl_opt model_opts[] = {
    { .kind = FL_OPT_TEXT, .name = "hf-checkpoint", .alias = "model", .arg = "FOLDER", .at = AT(hf_checkpoint), .help = "start from config.json and model.safetensors there; without it: random weights" },
    INT("num-layers", num_layers, "N", "2", 1, 256, "blocks of attention and feed-forward"),
    INT("hidden-size", hidden_size, "N", "64", 1, 1 << 14, "width of a token's vector"),
    INT("ffn-hidden-size", ffn_hidden_size, "N", "128", 1, 1 << 14, "width inside the feed-forward part"),
    INT("num-attention-heads", num_attention_heads, "N", "4", 1, 1 << 10, "heads of queries"),
    INT("num-query-groups", num_query_groups, "N", "2", 1, 1 << 10, "heads of keys and values"),
    INT("kv-channels", kv_channels, "N", "16", 2, 1 << 10, "width of one head"),
    INT("max-position-embeddings", max_position_embeddings, "TOKENS", "64", 2, 1 << 20, "longest sequence"),
    REAL("rotary-base", rotary_base, "B", "10000", 1, 1e12, "base of the rotary angles"),
    REAL("norm-epsilon", norm_epsilon, "E", "1e-6", 1e-12, 1, "added to the mean square of a norm"),
    SWITCH("untie-embeddings-and-output-weights", untie, true, "true", "the head has its own weights"),
    SWITCH("qk-layernorm", qk_norm, true, NULL, "queries and keys of each head are normed, as in Qwen3"),
    { .name = NULL },
};
static const struct fl_opt place_opts[] = {
    INT("actor-num-nodes", actor_num_nodes, "N", NULL, 1, 100000, "nodes of the trainer; derived from the nodes when not given"),
    INT("actor-num-gpus-per-node", actor_num_gpus_per_node, "N", NULL, 1, 1024, "trainer ranks on each; derived from the nodes when not given"),
    INT("rollout-num-gpus", rollout_num_gpus, "N", NULL, 1, 1000000, "devices of all engines; derived when not given"),
    INT("rollout-num-gpus-per-engine", rollout_num_gpus_per_engine, "N", NULL, 1, 100000, "devices of one engine"),
    INT("num-gpus-per-node", num_gpus_per_node, "N", NULL, 1, 1024, "width of a node; derived when not given"),
    SWITCH("colocate", colocate, true, NULL, "trainer and engines share devices and take turns"),
    SWITCH("offload", offload, false, NULL, "both of the next two"),
    SWITCH("offload-train", offload_train, true, NULL, "the trainer gives its memory back while others work; on with --colocate"),
    SWITCH("offload-rollout", offload_rollout, true, NULL, "the engines do; on with --colocate"),
    WORD("offload-train-target", offload_train_target, "cpu|disk", "cpu", "where the optimizer goes meanwhile"),
    TEXT("offload-train-disk-dir", offload_train_disk_dir, "FOLDER", NULL, "of the disk target (default: the run folder)"),
    TEXT("offload-rollout-level", offload_rollout_level, "LEVELS", "kv_cache weight", "what engines release: kv_cache, weight"),
    { .kind = FL_OPT_TEXT, .name = "colocate-memory-peak-device", .arg = "cpu|gpu", .choices = "cpu|gpu", .fallback = "cpu", .at = AT(memory_peak_device), .help = "where both sides' weights lie during the change-over; gpu turns --colocate on" },
    WORD("colocate-transfer", colocate_transfer, "share|copy|auto", "auto", "how weights change hands inside a device"),
    WORD("update-weight-transfer-mode", transfer_mode, "broadcast|p2p|disk-delta|auto", "broadcast", "how weights reach the engines of a split run"),
    TEXT("update-weight-disk-dir", update_weight_disk_dir, "FOLDER", NULL, "of disk-delta: a folder that all nodes see, with room for about four models"),
    TEXT("update-weight-local-checkpoint-dir", local_checkpoint_dir, "FOLDER", NULL, "of disk-delta: on every node, for the engines' own copies (default: beside their sockets)"),
    { .kind = FL_OPT_BYTES, .name = "update-weight-buffer-size", .arg = "BYTES", .fallback = "512MiB", .at = AT(buffer_size), .help = "of one bucket" },
    INT("update-weights-interval", update_weights_interval, "STEPS", "1", 1, BIG, "of --async: steps between two updates"),
    INT("update-weight-min-engines", min_engines, "N", "0", 0, 100000, "commit at the deadline when so many are ready; 0: all that live"),
    INT("update-weight-slots", weight_slots, "N", "0", 0, 2, "2: engines serve during an update; 1: less memory; 0: two where they fit"),
    REAL("update-weight-timeout", update_timeout_s, "SECONDS", "120", 0.1, 86400, "of one update"),
    SWITCH("check-weight-update-equal", check_weight_update_equal, false, NULL, "engines compare the bytes after every update"),
    SWITCH("async", is_async, false, NULL, "generate step n+1 while step n trains; not with --colocate"),
    { .name = NULL },
};
static const struct fl_opt run_opts[] = {
    TEXT("run-dir", run_dir, "FOLDER", NULL, "run.json, steps.jsonl, logs, checkpoints (default: below the state folder)"),
    TEXT("save", save, "FOLDER", NULL, "checkpoints go there (default: checkpoints in the run folder)"),
    INT("save-interval", save_interval, "STEPS", "50", 0, BIG, "checkpoint every so many steps and at the end; 0: never"),
    INT("save-keep", save_keep, "N", "2", 0, BIG, "older checkpoints are removed; 0: none is"),
    TEXT("load", load, "FOLDER", NULL, "go on from a checkpoint, or from the newest one in the folder"),
    TEXT("trainer-cmd", trainer_cmd, "COMMAND", NULL, "your trainer, over libfurlong"),
    TEXT("rollout-cmd", rollout_cmd, "COMMAND", NULL, "your engine, over libfurlong"),
    WORD("train-backend", train_backend, "builtin|fsdp|megatron|torchtitan", "builtin", "all but builtin need --trainer-cmd"),
    INT("max-running-requests", max_running_requests, "N", "256", 1, 1 << 16, "sequences that one engine decodes at a time"),
    INT("max-restarts", max_restarts, "N", "3", 0, 1000, "of one worker"),
    REAL("place-timeout", place_timeout_s, "SECONDS", "0", 0, 4e6, "wait so long for devices that others hold, then fail and say who; 0: as long as it takes"),
    REAL("start-timeout", start_timeout_s, "SECONDS", "300", 0.1, 86400, "for all workers of a role to join"),
    REAL("silence-timeout", silence_timeout_s, "SECONDS", "600", 1, 864000, "a worker that is busy and says nothing for so long has failed"),
    SWITCH("ci-test", ci_test, false, NULL, "stop when trainer and engine disagree: log probabilities before the first step, digests always"),
    { .name = NULL },
};
/* clang-format on */

void train_flags_tables(struct train_flags *f, struct fl_opt_table *tables)
{
    tables[0] = (struct fl_opt_table){ "Data", data_opts, f };
    tables[1] = (struct fl_opt_table){ "Learning", learn_opts, f };
    tables[2] = (struct fl_opt_table){ "Model", model_opts, f };
    tables[3] = (struct fl_opt_table){ "Placement, memory, weights", place_opts, f };
    tables[4] = (struct fl_opt_table){ "Run", run_opts, f };
}

__attribute__((format(printf, 2, 3))) static void note(struct train_flags *f, const char *fmt, ...)
{
    va_list ap;

    if (f->n_notes == TRAIN_NOTES)
        return;
    va_start(ap, fmt);
    vsnprintf(f->notes[f->n_notes++], sizeof(f->notes[0]), fmt, ap);
    va_end(ap);
}

/* --colocate-memory-peak-device gpu: ours; both sides' weights lie on the device for a while. */
static enum fl_status resolve_peak(struct train_flags *f, const struct fl_opts *o,
                                   struct fl_err *err)
{
    static const char flag[] = "--colocate-memory-peak-device gpu";

    f->peak_on_gpu = !strcmp(f->memory_peak_device, "gpu");
    if (!f->peak_on_gpu)
        return FL_OK;
    if (fl_opts_given(o, "colocate") && !f->colocate)
        return fl_fail(err, FL_INVALID, "%s and --no-colocate exclude each other", flag);
    if (fl_opts_given(o, "offload-train") && !f->offload_train)
        return fl_fail(err, FL_INVALID,
                       "%s needs the trainer's offload: leave --no-offload-train out", flag);
    if (fl_opts_given(o, "offload-rollout") && !f->offload_rollout)
        return fl_fail(err, FL_INVALID,
                       "%s needs the engines' offload: leave --no-offload-rollout out", flag);
    if (!strcmp(f->advantage_estimator, "ppo"))
        return fl_fail(err, FL_INVALID,
                       "%s works without a critic: --advantage-estimator ppo has one", flag);
    if (f->lora_rank)
        return fl_fail(err, FL_INVALID, "%s works without LoRA: --lora-rank is %jd", flag,
                       (intmax_t)f->lora_rank);
    if (!f->colocate)
        note(f, "--colocate-memory-peak-device gpu turns --colocate on");
    f->colocate = true;
    return FL_OK;
}

static enum fl_status resolve_offload(struct train_flags *f, const struct fl_opts *o,
                                      struct fl_err *err)
{
    if (f->offload) {
        f->offload_train = !fl_opts_given(o, "offload-train") || f->offload_train;
        f->offload_rollout = !fl_opts_given(o, "offload-rollout") || f->offload_rollout;
    }
    if (!fl_opts_given(o, "offload-train") && !f->offload)
        f->offload_train = f->colocate || !strcmp(f->advantage_estimator, "ppo");
    if (!fl_opts_given(o, "offload-rollout") && !f->offload)
        f->offload_rollout = f->colocate;
    if (!strcmp(f->offload_train_target, "disk") && !f->offload_train)
        return fl_fail(err, FL_INVALID, "--offload-train-target disk needs --offload-train");
    if (f->offload_train_disk_dir && strcmp(f->offload_train_target, "disk"))
        return fl_fail(err, FL_INVALID,
                       "--offload-train-disk-dir needs --offload-train-target disk");
    return FL_OK;
}

static enum fl_status resolve_levels(struct train_flags *f, const struct fl_opts *o,
                                     struct fl_err *err)
{
    const char *p = f->offload_rollout_level;

    if (fl_opts_given(o, "offload-rollout-level") && !f->offload_rollout)
        return fl_fail(err, FL_INVALID,
                       "--offload-rollout-level needs --offload-rollout or --colocate");
    while (*p) {
        size_t len = strcspn(p, " ,");

        if (len == strlen("kv_cache") && !strncmp(p, "kv_cache", len))
            f->release_kv = true;
        else if ((len == strlen("weight") && !strncmp(p, "weight", len)) ||
                 (len == strlen("weights") && !strncmp(p, "weights", len)))
            f->release_weights = true;
        else if (len)
            return fl_fail(err, FL_INVALID,
                           "--offload-rollout-level: '%.*s' is neither kv_cache nor weight",
                           (int)len, p);
        p += len + (p[len] != '\0');
    }
    if (!f->offload_rollout)
        f->release_kv = f->release_weights = false;
    if (f->peak_on_gpu && !(f->release_kv && f->release_weights))
        return fl_fail(err, FL_INVALID,
                       "--colocate-memory-peak-device gpu releases both: --offload-rollout-level "
                       "must be kv_cache weight");
    return FL_OK;
}

static enum fl_status resolve_mode(struct train_flags *f, const struct fl_opts *o,
                                   struct fl_err *err)
{
    bool said = fl_opts_given(o, "update-weight-transfer-mode"), disk;

    disk = !strcmp(f->transfer_mode, "disk-delta");
    f->mode = f->transfer_mode;
    if (f->update_weight_disk_dir && !disk)
        return fl_fail(err, FL_INVALID,
                       "--update-weight-disk-dir needs --update-weight-transfer-mode disk-delta");
    if (f->local_checkpoint_dir && !disk)
        return fl_fail(
            err, FL_INVALID,
            "--update-weight-local-checkpoint-dir needs --update-weight-transfer-mode disk-delta");
    if (!f->colocate) {
        if (fl_opts_given(o, "colocate-transfer"))
            return fl_fail(err, FL_INVALID, "--colocate-transfer needs --colocate");
        if (disk && !f->update_weight_disk_dir)
            note(f, "--update-weight-disk-dir is not given: weights in the run folder");
        return FL_OK;
    }
    if (disk || !strcmp(f->transfer_mode, "p2p"))
        return fl_fail(
            err, FL_INVALID,
            "--update-weight-transfer-mode %s does not go with --colocate: leave one out",
            f->transfer_mode);
    if (said)
        note(f,
             "--update-weight-transfer-mode %s does not apply with --colocate; "
             "--colocate-transfer %s does",
             f->transfer_mode, f->colocate_transfer);
    f->mode = f->colocate_transfer;
    return FL_OK;
}

static enum fl_status resolve_async(struct train_flags *f, const struct fl_opts *o,
                                    struct fl_err *err)
{
    if (f->is_async && f->colocate)
        return fl_fail(err, FL_INVALID,
                       "--async needs a split run: it does not go with --colocate");
    if (f->is_async && (f->offload_train || f->offload_rollout))
        return fl_fail(err, FL_INVALID, "--async keeps both sides busy: %s does not go with it",
                       f->offload_train ? "--offload-train" : "--offload-rollout");
    if (!f->is_async && fl_opts_given(o, "update-weights-interval"))
        return fl_fail(err, FL_INVALID, "--update-weights-interval needs --async");
    return FL_OK;
}

static enum fl_status resolve_backend(struct train_flags *f, const struct fl_opts *o,
                                      struct fl_err *err)
{
    if (strcmp(f->train_backend, "builtin") && !f->trainer_cmd)
        return fl_fail(err, FL_INVALID,
                       "--train-backend %s needs --trainer-cmd: the program that runs it",
                       f->train_backend);
    if (!f->trainer_cmd && !strcmp(f->advantage_estimator, "ppo"))
        return fl_fail(err, FL_INVALID,
                       "--advantage-estimator ppo: the built-in trainer has no critic; use grpo or "
                       "--trainer-cmd");
    if (!f->trainer_cmd && f->lora_rank)
        return fl_fail(err, FL_INVALID,
                       "--lora-rank %jd: the built-in trainer trains all weights; leave it out or "
                       "use --trainer-cmd",
                       (intmax_t)f->lora_rank);
    if (f->num_attention_heads % f->num_query_groups)
        return fl_fail(err, FL_INVALID,
                       "--num-attention-heads %jd is no multiple of --num-query-groups %jd",
                       (intmax_t)f->num_attention_heads, (intmax_t)f->num_query_groups);
    if (f->kv_channels % 2)
        return fl_fail(err, FL_INVALID, "--kv-channels %jd is odd: rotary positions turn pairs",
                       (intmax_t)f->kv_channels);
    if (f->colocate && fl_opts_given(o, "rollout-num-gpus"))
        note(
            f,
            "--rollout-num-gpus does not apply with --colocate: engines use the trainer's devices");
    return FL_OK;
}

enum fl_status train_flags_resolve(struct train_flags *f, const struct fl_opts *o,
                                   struct fl_err *err)
{
    f->n_notes = 0;
    f->release_kv = f->release_weights = false;
    FL_TRY(resolve_peak(f, o, err));
    FL_TRY(resolve_offload(f, o, err));
    FL_TRY(resolve_levels(f, o, err));
    FL_TRY(resolve_mode(f, o, err));
    FL_TRY(resolve_async(f, o, err));
    return resolve_backend(f, o, err);
}

/* Miles takes a list there: `--offload-rollout-level kv_cache weight`. */
static bool is_level(const char *word)
{
    return !strcmp(word, "kv_cache") || !strcmp(word, "weight") || !strcmp(word, "weights");
}

static enum fl_status take_levels(struct train_flags *f, struct fl_opts *o, char *list, size_t cap,
                                  struct fl_err *err)
{
    size_t len = (size_t)snprintf(list, cap, "%s", f->offload_rollout_level);

    for (size_t i = 0; i < o->n_words; i++) {
        if (!fl_opts_given(o, "offload-rollout-level") || !is_level(o->words[i]))
            return fl_fail(err, FL_INVALID, "'%s' belongs to no option; see %s --help", o->words[i],
                           o->program);
        if (len < cap)
            len += (size_t)snprintf(list + len, cap - len, " %s", o->words[i]);
    }
    o->n_words = 0;
    f->offload_rollout_level = list;
    return FL_OK;
}

enum fl_status train_flags_parse(struct train_flags *f, struct fl_opts *o, int argc, char **argv,
                                 struct fl_err *err)
{
    enum { LEVELS = 128 };
    const char *more = getenv("MILES_EXTRA_ARGS");

    FL_TRY(fl_opts_parse(o, argc, argv, err));
    if (more && *more)
        FL_TRY(fl_opts_extra(o, "MILES_EXTRA_ARGS", more, &f->owned[0], err));
    f->owned[1] = malloc(LEVELS);
    if (!f->owned[1])
        return fl_fail(err, FL_EXHAUSTED, "no memory for options");
    FL_TRY(take_levels(f, o, f->owned[1], LEVELS, err));
    return train_flags_resolve(f, o, err);
}

void train_flags_fini(struct train_flags *f)
{
    for (size_t i = 0; i < 2; i++) {
        free(f->owned[i]);
        f->owned[i] = NULL;
    }
}
