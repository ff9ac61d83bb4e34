/* common/conf/train_flags.h - what `furlong train` and the built-in driver understand
 *
 * One table for both: the command checks a run's flags before it submits anything, the driver gets
 * the same words. Names are Miles' wherever it has one. train_flags_resolve() is pure: it settles
 * what follows from what, and refuses what cannot be, with the flag's name. */
#pragma once
#include "common/conf/opt.h"

enum { TRAIN_FLAG_TABLES = 5, TRAIN_NOTES = 16 };

struct train_flags {
    /* data */
    const char *prompt_data, *input_key, *label_key, *eval_prompt_data, *reward_cmd;
    int64_t rollout_batch_size, n_samples_per_prompt, num_rollout, num_epoch, max_response_len;
    int64_t seed, eval_interval;
    double temperature, reward_timeout_s;
    bool rollout_shuffle;
    /* learning */
    double lr, adam_beta1, adam_beta2, adam_eps, weight_decay, clip_grad;
    double eps_clip, eps_clip_high, entropy_coef;
    int64_t global_batch_size, train_epochs, lora_rank;
    bool no_std_normalization;
    const char *advantage_estimator;
    /* model */
    const char *hf_checkpoint;
    int64_t num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_query_groups;
    int64_t kv_channels, max_position_embeddings;
    double rotary_base, norm_epsilon;
    bool untie, qk_norm;
    /* placement, memory and weights */
    int64_t actor_num_nodes, actor_num_gpus_per_node, rollout_num_gpus;
    int64_t rollout_num_gpus_per_engine, num_gpus_per_node;
    bool colocate, offload, offload_train, offload_rollout, is_async, check_weight_update_equal;
    const char *offload_train_target, *offload_train_disk_dir, *offload_rollout_level;
    const char *memory_peak_device, *colocate_transfer;
    const char *transfer_mode, *update_weight_disk_dir, *local_checkpoint_dir;
    uint64_t buffer_size;
    int64_t update_weights_interval, min_engines, weight_slots;
    double update_timeout_s;
    /* run */
    const char *run_dir, *save, *load, *trainer_cmd, *rollout_cmd, *train_backend;
    int64_t save_interval, save_keep, max_restarts, train_threads, max_running_requests;
    double place_timeout_s, start_timeout_s, silence_timeout_s;
    bool ci_test;

    /* resolved */
    bool release_kv, release_weights; /* of --offload-rollout-level                     */
    bool peak_on_gpu;                 /* --colocate-memory-peak-device gpu              */
    const char *mode;                 /* of furlong_update(): what applies to this run  */
    char notes[TRAIN_NOTES][192];     /* one line each, for people: derived, passed over */
    unsigned n_notes;
    char *owned[2]; /* what values point into */
};

/* Fills tables[0..TRAIN_FLAG_TABLES), all into f. */
void train_flags_tables(struct train_flags *f, struct fl_opt_table *tables);
/* After fl_opts_parse() and fl_opts_extra(). o tells what was given. FL_INVALID: err names the flag. */
enum fl_status train_flags_resolve(struct train_flags *f, const struct fl_opts *o,
                                   struct fl_err *err);
/* Parse argv, MILES_EXTRA_ARGS under it, words that belong to --offload-rollout-level, and resolve.
 * train_flags_fini() in any case, last: values point into what it frees. FL_CANCELLED: help. */
enum fl_status train_flags_parse(struct train_flags *f, struct fl_opts *o, int argc, char **argv,
                                 struct fl_err *err);
void train_flags_fini(struct train_flags *f);
