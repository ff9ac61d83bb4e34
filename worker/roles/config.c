#include "worker/roles/config.h"

struct model_config model_config_of_flags(const struct train_flags *f, uint32_t vocab)
{
    return (struct model_config){
        .vocab = vocab,
        .dim = (uint32_t)f->hidden_size,
        .layers = (uint32_t)f->num_layers,
        .heads = (uint32_t)f->num_attention_heads,
        .kv_heads = (uint32_t)f->num_query_groups,
        .head_dim = (uint32_t)f->kv_channels,
        .ffn = (uint32_t)f->ffn_hidden_size,
        .max_len = (uint32_t)f->max_position_embeddings,
        .tied = !f->untie,
        .rope_theta = (float)f->rotary_base,
        .norm_eps = (float)f->norm_epsilon,
        .qk_norm = f->qk_norm,
    };
}
