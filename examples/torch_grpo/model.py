"""Qwen3, dense, in plain PyTorch. Parameters have the names of the Hugging Face folder."""
import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def turn(x, cos, sin):
    """Rotary positions: the halves of a head are the pairs."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.dim, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.dim, bias=False)
        self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.eps), RMSNorm(c.head_dim, c.eps)

    def forward(self, x, cos, sin, cache):
        b, t, _ = x.shape
        shape = (b, t, -1, self.c.head_dim)
        q = turn(self.q_norm(self.q_proj(x).view(shape)), cos, sin).transpose(1, 2)
        k = turn(self.k_norm(self.k_proj(x).view(shape)), cos, sin).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        mask = None
        if cache is not None:
            k, v, mask = cache.put(k, v)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(o.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.dim, c.ffn, bias=False)
        self.up_proj = nn.Linear(c.dim, c.ffn, bias=False)
        self.down_proj = nn.Linear(c.ffn, c.dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(c.dim, c.eps), RMSNorm(c.dim, c.eps)
        self.self_attn, self.mlp = Attention(c), MLP(c)

    def forward(self, x, cos, sin, cache):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.dim)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.dim, c.eps)


class Qwen3(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens, positions=None, caches=None):
        """Logits [batch, length, vocabulary]. positions: where each token stands; caches: one Cache a layer, into which
        the tokens go. Without caches: whole sequences from position 0, shorter ones filled up on the right."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        half = torch.arange(0, self.config.head_dim, 2, device=tokens.device, dtype=torch.float32)
        angle = positions[..., None].float() * self.config.theta ** (-half / self.config.head_dim)
        x = self.model.embed_tokens(tokens)
        cos, sin = (torch.cat((f(angle),) * 2, -1).to(x.dtype)[:, :, None] for f in (torch.cos, torch.sin))
        for i, layer in enumerate(self.model.layers):
            if caches is not None:
                caches[i].at = positions
            x = layer(x, cos, sin, None if caches is None else caches[i])
        head = self.model.embed_tokens.weight if self.config.tied else self.lm_head.weight
        return self.model.norm(x) @ head.T


class Cache:
    """Keys and values of one layer; rows stand at positions of their own."""

    def __init__(self, config, rows, length, like):
        shape = (rows, config.kv_heads, length, config.head_dim)
        self.k, self.v = like.new_zeros(shape), like.new_zeros(shape)
        self.at = None

    def put(self, k, v):
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        self.k[rows, :, self.at] = k.transpose(1, 2)
        self.v[rows, :, self.at] = v.transpose(1, 2)
        seen = torch.arange(self.k.shape[2], device=k.device)[None, None, None, :] <= self.at[:, None, :, None]
        return self.k, self.v, seen


def log_probs(model, tokens, temperature):
    """[batch, length - 1] of each token but the first, and the entropy at the same places."""
    logp = torch.log_softmax(model(tokens)[:, :-1].float() / temperature, -1)
    return logp.gather(-1, tokens[:, 1:, None])[..., 0], -(logp.exp() * logp).sum(-1)
