"""Writes a small Qwen3 folder with random weights: config.json, model.safetensors, tokenizer.json.

    python3 make_model.py FOLDER [--prompts examples/data/lookup.jsonl]

Every byte that occurs in the prompts is a token; token 0 ends an answer. vocab.json beside it says the same to the
built-in trainer and engine, so that they read the folder too."""
import argparse
import json
import os

import torch

import hf
from model import Qwen3

HERE = os.path.dirname(os.path.abspath(__file__))


def alphabet(path):
    with open(path, encoding="utf-8") as f:
        rows = [json.loads(line) for line in f if line.strip()]
    return sorted({c for r in rows for c in r["input"] + r["label"]})


def write(folder, prompts, seed=0, dim=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, max_len=64, tied=False):
    letters = alphabet(prompts)
    vocab = {"<end>": 0, **{c: i for i, c in enumerate(letters, 1)}}
    os.makedirs(folder, exist_ok=True)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": len(vocab),
              "hidden_size": dim,
              "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
              "num_key_value_heads": kv_heads, "head_dim": head_dim, "max_position_embeddings": max_len,
              "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False,
              "tie_word_embeddings": tied, "eos_token_id": 0, "torch_dtype": "float32"}
    words = {"model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<end>"}, "version": "1.0", "truncation": None,
             "padding": None, "added_tokens": [], "normalizer": None, "post_processor": None,
             "pre_tokenizer": {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
             "decoder": {"type": "Fuse"}}
    files = {"config.json": config, "tokenizer.json": words,
             "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"},
             "vocab.json": {"end": 0, "bytes_hex": "".join(letters).encode().hex()}}
    for name, what in files.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
            json.dump(what, f, indent=1)
    torch.manual_seed(seed)
    model = Qwen3(hf.Config(folder))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:  # by fan-in; the head small, so that the first answers are all equally likely
                head = name.startswith("lm_head")
                p.uniform_(-1, 1).mul_((3 / p.shape[1]) ** 0.5 * (0.1 if head else 1))
            elif "norm" in name and seed:
                p.uniform_(0.5, 1.5)  # a test wants norms that do something
        if tied:
            model.model.embed_tokens.weight.mul_(0.1)
        elif not seed:
            model.model.embed_tokens.weight.uniform_(-1, 1)
    hf.save(model, folder, folder, {})
    return model


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("folder")
    p.add_argument("--prompts", default=os.path.join(HERE, "..", "data", "lookup.jsonl"))
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--tied", action="store_true", help="the head is the embedding")
    given = p.parse_args()
    write(given.folder, given.prompts, given.seed, tied=given.tied)
    print(given.folder)
