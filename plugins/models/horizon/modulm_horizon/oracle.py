"""Reference for tests of K2 Horizon: its published equations in plain torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Horizon"]


def _norm(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Norm each part of the last dimension; x: [..., size]."""
    parts = x.unflatten(-1, (groups, -1))
    normed = parts / (parts.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return normed.flatten(-2) * weight


def _turn(x: Tensor, turned: int) -> Tensor:
    """Rotate pairs (i, i + half) of each head for i < turned / 2; x: [tokens, heads, size]."""
    half, moving = x.shape[-1] // 2, turned // 2
    angles = torch.arange(len(x))[:, None] / 10000.0 ** (torch.arange(0, turned, 2) / turned)
    angles = F.pad(angles, (0, half - moving))[:, None]
    one, other = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


def _choose(scores: Tensor, bias: Tensor, top: int, scale: float) -> Tensor:
    """Weights of the chosen experts, 0 for the others: [tokens, experts]."""
    chosen = (scores + bias).topk(top, -1).indices
    weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
    return scale * weights / weights.sum(-1, keepdim=True)


class Horizon:
    """The model without caches."""

    def weights(self, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Draw weights."""
        c = config
        hidden, inner, words = c["hidden_size"], c["moe_intermediate_size"], c["vocab_size"]
        q, k = (c[f"num_{n}_heads"] * c["head_dim"] for n in ("attention", "key_value"))
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (words, hidden),
            "model.norm.weight": (hidden,),
            "lm_head.weight": (words, hidden),
        }
        for index in range(c["num_hidden_layers"]):
            at, sparse = f"model.layers.{index}", index not in c["mlp_only_layers"]
            shapes |= {f"{at}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
            shapes |= {
                f"{at}.self_attn.q_proj.weight": (q, hidden),
                f"{at}.self_attn.k_proj.weight": (k, hidden),
                f"{at}.self_attn.gate_proj.weight": (q, hidden),
                f"{at}.self_attn.o_proj.weight": (hidden, q),
                f"{at}.self_attn.q_norm.weight": (q,),
                f"{at}.self_attn.k_norm.weight": (k,),
            }
            blocks = {"mlp": c["intermediate_size"]}
            if sparse:
                values, count = c["mova_num_experts"], c["num_experts"]
                shapes |= {
                    f"{at}.self_attn.v_router.weight": (values, hidden),
                    f"{at}.self_attn.v_router.bias": (values,),
                    f"{at}.mlp.gate.weight": (count, hidden),
                    f"{at}.mlp.gate.bias": (count,),
                }
                for i in range(values):
                    shapes[f"{at}.self_attn.v_experts.{i}.weight"] = (k, hidden)
                blocks = {f"mlp.experts.{i}": inner for i in range(count)}
                blocks["mlp.shared_experts"] = inner * c["num_shared_experts"]
            else:
                shapes[f"{at}.self_attn.v_proj.weight"] = (k, hidden)
            for block, width in blocks.items():
                shapes |= {
                    f"{at}.{block}.gate_proj.weight": (width, hidden),
                    f"{at}.{block}.up_proj.weight": (width, hidden),
                    f"{at}.{block}.down_proj.weight": (hidden, width),
                }
        return {name: _draw(name, shape) for name, shape in shapes.items()}

    def logits(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Sequence[int]
    ) -> Tensor:
        """Compute logits: [tokens, vocabulary] fp32."""
        groups = config["layernorm_num_groups"]
        x = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for index in range(config["num_hidden_layers"]):
            at = f"model.layers.{index}."
            w = {n.removeprefix(at): t for n, t in weights.items() if n.startswith(at)}
            x = x + self._attend(config, w, _norm(x, w["input_layernorm.weight"], groups))
            normed = _norm(x, w["post_attention_layernorm.weight"], groups)
            x = x + self._mix(config, w, normed)
        return _norm(x, weights["model.norm.weight"], groups) @ weights["lm_head.weight"].T

    def _attend(self, config: Mapping[str, Any], w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        count, size = len(x), config["head_dim"]
        q, k = x @ w["self_attn.q_proj.weight"].T, x @ w["self_attn.k_proj.weight"].T
        q = _norm(q, w["self_attn.q_norm.weight"], config["num_attention_heads"])
        k = _norm(k, w["self_attn.k_norm.weight"], config["num_key_value_heads"])
        if "self_attn.v_router.weight" in w:
            scores = (x @ w["self_attn.v_router.weight"].T).sigmoid()
            top, scale = config["mova_num_experts_per_tok"], config["router_scaling_factor"]
            chosen = _choose(scores, w["self_attn.v_router.bias"], top, scale)
            each = [x @ w[f"self_attn.v_experts.{i}.weight"].T for i in range(chosen.shape[1])]
            v = (chosen.T[..., None] * torch.stack(each)).sum(0)
        else:
            v = x @ w["self_attn.v_proj.weight"].T
        q, k, v = (each.view(count, -1, size) for each in (q, k, v))
        q, k = (_turn(each, config["rope_head_dim"]) for each in (q, k))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        seen = torch.ones(count, count).tril().bool()
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        gate = (1 + 2 ** (x @ w["self_attn.gate_proj.weight"].T)).log2()
        return (out.flatten(1) * gate) @ w["self_attn.o_proj.weight"].T

    def _mix(self, config: Mapping[str, Any], w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        if "mlp.gate.weight" not in w:
            return _mlp(w, "mlp", x)
        scores = (x @ w["mlp.gate.weight"].T).sigmoid()
        top, scale = config["num_experts_per_tok"], config["router_scaling_factor"]
        chosen = _choose(scores, w["mlp.gate.bias"], top, scale)
        out = _mlp(w, "mlp.shared_experts", x)
        for i in range(chosen.shape[1]):
            out = out + chosen[:, i, None] * _mlp(w, f"mlp.experts.{i}", x)
        return out


def _mlp(w: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    gate = x @ w[f"{at}.gate_proj.weight"].T
    up = x @ w[f"{at}.up_proj.weight"].T
    return (gate * gate.sigmoid() * up) @ w[f"{at}.down_proj.weight"].T


def _draw(name: str, shape: tuple[int, ...]) -> Tensor:
    drawn = torch.randn(shape)
    if len(shape) == 1:
        return 0.1 * drawn + name.endswith("norm.weight")
    if "embed" in name:
        return drawn
    return drawn * (3 if "lm_head" in name else 1) * math.sqrt(1 / shape[-1])
