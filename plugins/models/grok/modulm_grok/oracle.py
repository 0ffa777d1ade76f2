"""Reference for tests of Grok 1: its published equations in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Plain"]

_NORMS = "pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm"


class Plain:
    """Whole sequences, without a cache."""

    def weights(self, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Create random weights with about unit gain per layer."""
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        dim = config.get("head_dim") or hidden // config["num_attention_heads"]
        wide, shared = (config[f"num_{n}_heads"] * dim for n in ("attention", "key_value"))
        shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
        for i in range(config["num_hidden_layers"]):
            at = f"model.layers.{i}"
            outputs = {"q": wide, "k": shared, "v": shared}
            shapes |= {f"{at}.attn.{n}_proj.weight": (size, hidden) for n, size in outputs.items()}
            shapes[f"{at}.attn.o_proj.weight"] = (hidden, wide)
            shapes |= {f"{at}.{name}.scale": (hidden,) for name in _NORMS}
            shapes[f"{at}.moe_block.gate.weight"] = (config["num_experts"], hidden)
            for e in range(config["num_experts"]):
                one = f"{at}.moe_block.experts.{e}"
                shapes[f"{one}.linear.weight"] = shapes[f"{one}.linear_v.weight"] = (inner, hidden)
                shapes[f"{one}.linear_1.weight"] = (hidden, inner)
        shapes["model.norm.scale"] = (hidden,)
        if not config.get("tie_word_embeddings", True):
            shapes["lm_head.weight"] = (config["vocab_size"], hidden)
        tensors = {}
        for name, shape in shapes.items():
            drawn = torch.randn(shape)
            tensors[name] = 1 + 0.2 * drawn if len(shape) < 2 else 2 * drawn / shape[-1] ** 0.5
        return tensors

    @torch.no_grad()
    def logits(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Sequence[int]
    ) -> Tensor:
        """Compute logits: [tokens, vocabulary] fp32."""
        w = {name: tensor.float() for name, tensor in weights.items()}
        embedding, eps = w["model.embed_tokens.weight"], config.get("rms_norm_eps", 1e-5)

        def norm(x: Tensor, name: str) -> Tensor:
            return F.rms_norm(x, (x.shape[-1],), w[f"{name}.scale"], eps)

        x = embedding[list(tokens)] * config["embedding_multiplier_scale"]
        for i in range(config["num_hidden_layers"]):
            at = f"model.layers.{i}"
            seen = _attention(config, w, f"{at}.attn", norm(x, f"{at}.pre_attn_norm"))
            x = x + norm(seen, f"{at}.post_attn_norm")
            mixed = _experts(config, w, f"{at}.moe_block", norm(x, f"{at}.pre_moe_norm"))
            x = x + norm(mixed, f"{at}.post_moe_norm")
        x = norm(x, "model.norm")
        head = embedding if config.get("tie_word_embeddings", True) else w["lm_head.weight"]
        return x @ head.T * config["output_multiplier_scale"]


def _attention(config: Mapping[str, Any], w: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or x.shape[-1] // heads
    q, k, v = (
        (x @ w[f"{at}.{n}_proj.weight"].T).view(len(x), -1, dim).transpose(0, 1) for n in "qkv"
    )
    base = config.get("rope_theta", 10000.0)
    angles = torch.arange(len(x))[:, None] / base ** (torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    q, k = (
        t * cos + torch.cat([-t[..., dim // 2 :], t[..., : dim // 2]], -1) * sin for t in (q, k)
    )
    k, v = (t.repeat_interleave(heads // len(t), 0) for t in (k, v))
    most = config["max_attn_value"]
    scores = most * torch.tanh(q @ k.mT * config["attn_output_multiplier"] / most)
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w[f"{at}.o_proj.weight"].T


def _experts(config: Mapping[str, Any], w: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    odds = (x @ w[f"{at}.gate.weight"].T).softmax(-1)
    best, chosen = odds.topk(config.get("num_experts_per_tok", 2))
    mixed = torch.zeros_like(x)
    for e in range(config["num_experts"]):
        share = (best * (chosen == e)).sum(-1, keepdim=True)
        one = f"{at}.experts.{e}"
        inner = F.gelu(x @ w[f"{one}.linear.weight"].T) * (x @ w[f"{one}.linear_v.weight"].T)
        mixed = mixed + share * (inner @ w[f"{one}.linear_1.weight"].T)
    return mixed
