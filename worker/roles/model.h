/* worker/roles/model.h - a small causal transformer: what it is made of
 *
 * Tokens are embedded; each layer adds attention (rotary positions, grouped key and value heads)
 * and a gated MLP (SwiGLU), both behind an RMS norm; a last norm and the head give logits. Names
 * and shapes of the tensors are those of a LlamaForCausalLM folder, with qk_norm (queries and keys
 * of each head are normed) of a Qwen3ForCausalLM one. All numbers are fp32. */
#pragma once
#include "common/base/base.h"

struct model_config {
    uint32_t vocab, dim, layers, heads, kv_heads, head_dim, ffn;
    uint32_t max_len; /* positions a sequence may have */
    bool tied;        /* the head is the embedding     */
    float rope_theta, norm_eps;
    bool qk_norm;     /* an RMS norm over each head's queries and keys, before they are turned */
};
struct model_tensor {
    char name[56];
    uint8_t ndim;
    uint64_t shape[2];
    size_t offset, count; /* floats; offset is a multiple of 16 */
};
struct model_layout {
    struct model_config cfg;
    struct model_tensor *tensors;
    uint32_t n;
    size_t floats;    /* of a buffer that holds them all, gaps included */
    float *rope;      /* per position head_dim / 2 cosines, then as many sines */
};
/* Tensors in this order: embedding; per layer the nine below; last norm; head, unless tied; with
 * qk_norm per layer the norm of queries, then of keys. */
enum model_part {
    PART_NORM1, PART_Q, PART_K, PART_V, PART_O, PART_NORM2, PART_GATE, PART_UP, PART_DOWN, PARTS
};
static inline uint32_t model_at(uint32_t layer, enum model_part part)
{
    return 1 + layer * PARTS + (uint32_t)part;
}
static inline uint32_t model_norm_at(const struct model_config *c)
{
    return 1 + c->layers * PARTS;
}
static inline uint32_t model_head_at(const struct model_config *c)
{
    return c->tied ? 0 : 2 + c->layers * PARTS;
}
static inline uint32_t model_qnorm_at(const struct model_config *c, uint32_t layer) /* k: + 1 */
{
    return 2 + c->layers * PARTS + !c->tied + 2 * layer;
}

/* FL_INVALID: sizes that do not go together; err names the flag. */
enum fl_status model_config_check(const struct model_config *c, struct fl_err *err);
enum fl_status model_layout_create(const struct model_config *c, struct model_layout **out,
                                   struct fl_err *err);
void model_layout_destroy(struct model_layout *l);
FL_AUTO_DEFINE(model_layout)

/* One pointer per tensor into a buffer of l->floats. w: room for l->n. */
void model_point(const struct model_layout *l, float *base, float **w);
/* Uniform by fan-in, the head small so that the first answers are all equally likely. */
void model_init(const struct model_layout *l, float *base, uint64_t seed);

/* ---- training: whole sequences, one after the other ------------------------------------------- */
struct model_batch {
    const int32_t *tokens;  /* all sequences, packed              */
    const uint32_t *starts; /* n_seqs + 1 positions in tokens     */
    uint32_t n_seqs;
};
/* What is scored: the logits after row `row` against the token that followed. */
struct model_target { uint32_t row; int32_t token; };

struct model_acts; /* activations of one batch; grows to the largest seen */
enum fl_status model_acts_create(const struct model_layout *l, struct model_acts **out,
                                 struct fl_err *err);
void model_acts_destroy(struct model_acts *a);
FL_AUTO_DEFINE(model_acts)
size_t model_acts_drop(struct model_acts *a); /* gives the memory back; bytes */

/* logp, entropy: one per target, at temperature 1 / inv_temp; entropy may be NULL.
 * FL_EXHAUSTED: no memory. FL_INVALID: a token or a length that the model does not have. */
enum fl_status model_score(struct model_acts *a, float *const *w, const struct model_batch *b,
                           const struct model_target *t, uint32_t n_targets, float inv_temp,
                           float *logp, float *entropy, struct fl_err *err);
/* After model_score of the same batch: adds to the gradients g what follows from the derivatives of
 * the loss by each target's log probability and, unless NULL, by its entropy. */
void model_back(struct model_acts *a, float *const *w, const float *d_logp, const float *d_entropy,
                float *const *g);

/* ---- decoding: some rows of many sequences at once -------------------------------------------- */
struct model_row { uint32_t slot, pos; int32_t token; bool wanted; /* its logits */ };
struct model_cache; /* keys and values of a number of sequences, and scratch */
enum fl_status model_cache_create(const struct model_layout *l, uint32_t slots, uint32_t len,
                                  struct model_cache **out, struct fl_err *err);
void model_cache_destroy(struct model_cache *c);
FL_AUTO_DEFINE(model_cache)
size_t model_cache_drop(struct model_cache *c); /* memory back, contents gone; bytes that were held */
void model_cache_back(struct model_cache *c);   /* pages come back as they are touched */
void model_cache_copy(struct model_cache *c, uint32_t from, uint32_t to, uint32_t len);
/* Rows of one slot come in order of position, after all earlier ones. Log probabilities over the
 * vocabulary for each wanted row, one after the other, at temperature 1 / inv_temp[its slot]. */
void model_decode(struct model_cache *c, float *const *w, const struct model_row *rows, uint32_t n,
                  const float *inv_temp, float *logp);
enum { MODEL_ROWS = 512 }; /* of one model_decode */
