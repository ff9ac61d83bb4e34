/* worker/roles/ckpt.h - checkpoints: folders that appear whole or not at all
 *
 *   FOLDER/step_00000050/model.safetensors      weights, names as in a LlamaForCausalLM or, with qk_norm,
 *                                               a Qwen3ForCausalLM folder
 *                        optimizer.safetensors  Adam's moments, exp_avg.NAME and exp_avg_sq.NAME
 *                        config.json vocab.json state.json
 *   FOLDER/lock                                 who writes here: one job, its latest attempt
 *
 * Whole tensors, so any number of ranks may go on from it. A folder is written under a name of its
 * own and renamed; state.json is its last file. */
#pragma once
#include "common/base/base.h"
#include "worker/roles/model.h"
#include "worker/roles/prompts.h"

#define CKPT_NO_SEED UINT64_MAX /* read from a trainer of others, which does not know it */
struct ckpt_state {
    uint64_t step, version; /* step: the next one to run; version: of the weights */
    uint64_t adam_steps, seed;
};
struct ckpt_lock;
/* FL_STALE: a later attempt of the job has written here. FL_EXISTS: somebody else writes here now;
 * both name who. Held until released or the process ends. */
enum fl_status ckpt_lock_take(const char *folder, const char *job, uint32_t attempt,
                              struct ckpt_lock **out, struct fl_err *err);
void ckpt_lock_destroy(struct ckpt_lock *l); /* releases; NULL is fine */
FL_AUTO_DEFINE(ckpt_lock)

/* dir: .../step_NNNNNNNN. An older one of that name is replaced. *bytes: written. */
enum fl_status ckpt_save(const char *dir, const struct model_layout *l, float *const *w,
                         const float *m, const float *v, const struct alphabet *a,
                         const struct ckpt_state *s, uint64_t *bytes, struct fl_err *err);
/* Checks names, types and shapes before anything is written to. m, v NULL: weights alone. */
enum fl_status ckpt_load(const char *dir, const struct model_layout *l, float *const *w, float *m,
                         float *v, struct ckpt_state *s, struct fl_err *err);
/* Whether ckpt_load() of a model of these sizes would do: reads headers alone. moments: the optimizer's too. */
enum fl_status ckpt_check(const char *dir, const struct model_config *c, bool moments, struct fl_err *err);
/* Sizes and alphabet of a checkpoint, or of any LlamaForCausalLM or dense Qwen3ForCausalLM folder in F32 or BF16
 * (no vocab.json of ours: *a is empty). */
enum fl_status ckpt_config(const char *dir, struct model_config *c, struct alphabet *a,
                           struct fl_err *err);
enum fl_status ckpt_state_read(const char *dir, struct ckpt_state *s, struct fl_err *err);

void ckpt_dir(char out[1024], const char *folder, uint64_t step);
/* The newest whole checkpoint in folder, or folder itself if it is one. FL_NOT_FOUND. */
enum fl_status ckpt_newest(const char *folder, char out[1024], struct fl_err *err);
/* Removes all but the newest `keep` (0: none is removed), and what was left half written. */
void ckpt_prune(const char *folder, uint32_t keep);
