"""A Hugging Face folder as it is: config.json, *.safetensors (one file or an index), tokenizer.json. Qwen3 dense."""
import json
import mmap
import os
import shutil

import torch

from furlong import blob

KEPT = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "vocab.json", "merges.txt", "chat_template.jinja")


def _json(folder, name):
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as f:
            return json.load(f)
    except FileNotFoundError:
        return {}


def _ends(c):
    eos = c.get("eos_token_id")
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


class Config:
    """The numbers of config.json that a dense Qwen3 is made of."""

    def __init__(self, folder):
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
            c = json.load(f)
        if c.get("model_type") != "qwen3":
            raise SystemExit(f"{folder}: model_type is {c.get('model_type')!r}, this example reads qwen3 (dense)")
        rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise SystemExit(f"{folder}: rope_type {rope.get('rope_type')!r} is not read here")
        if c.get("use_sliding_window") or c.get("attention_bias"):
            raise SystemExit(f"{folder}: sliding windows and attention biases are not read here")
        self.vocab, self.dim, self.ffn = c["vocab_size"], c["hidden_size"], c["intermediate_size"]
        self.layers, self.heads = c["num_hidden_layers"], c["num_attention_heads"]
        self.kv_heads = c.get("num_key_value_heads") or self.heads
        self.head_dim = c.get("head_dim") or 128  # as transformers has it: not dim by heads
        self.max_len, self.eps = c["max_position_embeddings"], c.get("rms_norm_eps", 1e-6)
        self.theta = c.get("rope_theta") or rope.get("rope_theta") or 10000.0
        self.tied = c.get("tie_word_embeddings", False)
        self.ends = frozenset(_ends(c) + _ends(_json(folder, "generation_config.json")))  # any of these ends an answer


def tensors(folder):
    """name -> torch tensor over the mapped files; nothing is read before it is used."""
    index = os.path.join(folder, "model.safetensors.index.json")
    files = ["model.safetensors"]
    if os.path.exists(index):
        with open(index, encoding="utf-8") as f:
            files = sorted(set(json.load(f)["weight_map"].values()))
    out = {}
    for name in files:
        with open(os.path.join(folder, name), "rb") as f:
            m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)  # private: torch wants memory that may be written
        out.update({k: t.torch() for k, t in blob.read(m).items()})
    return out


def load(model, folder):
    """Copies the folder's weights into the model; names and shapes must be the same on both sides."""
    found, mine = tensors(folder), dict(model.named_parameters())
    if model.config.tied:
        found.pop("lm_head.weight", None)
    missing, extra = sorted(set(mine) - set(found)), sorted(set(found) - set(mine))
    if missing or extra:
        raise SystemExit(f"{folder}: lacks {missing[:3]}, has {extra[:3]} that the model lacks")
    with torch.no_grad():
        for name, p in mine.items():
            if p.shape != found[name].shape:
                raise SystemExit(f"{folder}: {name} is {tuple(found[name].shape)}, config.json makes {tuple(p.shape)}")
            p.copy_(found[name])


def save(model, folder, source, extra):
    """A folder of the same kind: weights, what `source` had beside them, and extra name -> bytes. Appears whole or not
    at all."""
    part = folder + ".part"
    shutil.rmtree(part, ignore_errors=True)
    os.makedirs(part)
    image = blob.write({k: p.detach().cpu() for k, p in model.named_parameters()}, {"format": "pt"})
    files = {"model.safetensors": image.data, **extra}
    for name in KEPT:
        path = os.path.join(source, name)
        if os.path.exists(path):
            with open(path, "rb") as f:
                files.setdefault(name, f.read())
    for name, data in files.items():
        with open(os.path.join(part, name), "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(part, folder)
    return sum(len(d) for d in files.values())


class Tokenizer:
    """tokenizer.json by the `tokenizers` package."""

    def __init__(self, folder, config):
        from tokenizers import Tokenizer as Fast
        self._fast = Fast.from_file(os.path.join(folder, "tokenizer.json"))
        self.ends = config.ends

    def encode(self, text):
        return self._fast.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self._fast.decode([i for i in ids if i not in self.ends], skip_special_tokens=True)
