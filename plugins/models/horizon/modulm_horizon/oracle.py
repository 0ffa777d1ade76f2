"""Reference for tests of K2 Horizon: its published equations in plain torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Horizon"]


def _norm(config: Mapping[str, Any], x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Norm each part of the last dimension; x: [..., size]."""
    parts, eps = x.unflatten(-1, (groups, -1)), config.get("rms_norm_eps", 1e-6)
    normed = parts / (parts.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed.flatten(-2) * weight


def _turn(config: Mapping[str, Any], x: Tensor) -> Tensor:
    """Rotate pairs (i, i + half) of each head for i < turned / 2; x: [tokens, heads, size]."""
    turned, base = config.get("rope_head_dim") or x.shape[-1], config.get("rope_theta", 10000.0)
    half, moving = x.shape[-1] // 2, turned // 2
    angles = torch.arange(len(x))[:, None] / base ** (torch.arange(0, turned, 2) / turned)
    angles = F.pad(angles, (0, half - moving))[:, None]
    one, other = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


def _choose(
    config: Mapping[str, Any], logits: Tensor, bias: Tensor | float, top: int, unit: bool
) -> Tensor:
    """Weights of the chosen experts, 0 for the others: [tokens, experts].

    unit: whether they sum to 1 before they are scaled.
    """
    sigmoid = config.get("router_score_func", "softmax") == "sigmoid"
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    chosen = (scores + bias).topk(top, -1).indices
    weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
    if unit:
        weights = weights / weights.sum(-1, keepdim=True)
    scale = config.get("router_scaling_factor")
    return weights * (1.0 if scale is None else float(scale))


def _sparse(config: Mapping[str, Any], index: int) -> bool:
    """Whether a layer has experts."""
    step = (index + 1) % config.get("decoder_sparse_step", 1) == 0
    return bool(
        step and config["num_experts"] > 0 and index not in config.get("mlp_only_layers", ())
    )


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
            at, sparse = f"model.layers.{index}", _sparse(c, index)
            shapes |= {f"{at}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
            shapes |= {
                f"{at}.self_attn.q_proj.weight": (q, hidden),
                f"{at}.self_attn.k_proj.weight": (k, hidden),
                f"{at}.self_attn.o_proj.weight": (hidden, q),
            }
            if c.get("attention_gate_func"):
                shapes[f"{at}.self_attn.gate_proj.weight"] = (q, hidden)
            if c.get("query_key_norm"):
                shapes |= {f"{at}.self_attn.q_norm.weight": (q,)}
                shapes |= {f"{at}.self_attn.k_norm.weight": (k,)}
            blocks = {"mlp": c["intermediate_size"]}
            if sparse:
                values, count = c.get("mova_num_experts", 0), c["num_experts"]
                routers = {"mlp.gate": count, **({"self_attn.v_router": values} if values else {})}
                for router, outputs in routers.items():
                    shapes[f"{at}.{router}.weight"] = (outputs, hidden)
                    if c.get("moe_gate_bias"):
                        shapes[f"{at}.{router}.bias"] = (outputs,)
                for i in range(values):
                    shapes[f"{at}.self_attn.v_experts.{i}.weight"] = (k, hidden)
                blocks = {f"mlp.experts.{i}": inner for i in range(count)}
                if c.get("num_shared_experts"):
                    blocks["mlp.shared_experts"] = inner * c["num_shared_experts"]
            if not (sparse and c.get("mova_num_experts")):
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
        groups, c = config.get("layernorm_num_groups", 1), config
        x = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for index in range(config["num_hidden_layers"]):
            at = f"model.layers.{index}."
            w = {n.removeprefix(at): t for n, t in weights.items() if n.startswith(at)}
            x = x + self._attend(config, w, _norm(c, x, w["input_layernorm.weight"], groups))
            normed = _norm(c, x, w["post_attention_layernorm.weight"], groups)
            x = x + self._mix(config, w, normed)
        head = "model.embed_tokens" if c.get("tie_word_embeddings") else "lm_head"
        return _norm(c, x, weights["model.norm.weight"], groups) @ weights[f"{head}.weight"].T

    def _attend(self, config: Mapping[str, Any], w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        count, size = len(x), config["head_dim"]
        q, k = x @ w["self_attn.q_proj.weight"].T, x @ w["self_attn.k_proj.weight"].T
        if "self_attn.q_norm.weight" in w:
            q = _norm(config, q, w["self_attn.q_norm.weight"], config["num_attention_heads"])
            k = _norm(config, k, w["self_attn.k_norm.weight"], config["num_key_value_heads"])
        if "self_attn.v_router.weight" in w:
            logits, bias = x @ w["self_attn.v_router.weight"].T, w.get("self_attn.v_router.bias", 0)
            top = config.get("mova_num_experts_per_tok", 1)
            chosen = _choose(config, logits, bias, top, unit=top > 1)
            each = [x @ w[f"self_attn.v_experts.{i}.weight"].T for i in range(chosen.shape[1])]
            v = (chosen.T[..., None] * torch.stack(each)).sum(0)
        else:
            v = x @ w["self_attn.v_proj.weight"].T
        q, k, v = (each.view(count, -1, size) for each in (q, k, v))
        q, k = (_turn(config, each) for each in (q, k))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        seen = torch.ones(count, count).tril().bool()
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        out = out.flatten(1)
        if "self_attn.gate_proj.weight" in w:
            gate = x @ w["self_attn.gate_proj.weight"].T
            silu = config["attention_gate_func"] == "silu"
            out = out * (gate * gate.sigmoid() if silu else (1 + 2**gate).log2())
        return out @ w["self_attn.o_proj.weight"].T

    def _mix(self, config: Mapping[str, Any], w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        if "mlp.gate.weight" not in w:
            return _mlp(w, "mlp", x)
        top, unit = config["num_experts_per_tok"], config.get("norm_topk_prob", True)
        bias = w.get("mlp.gate.bias", 0)
        chosen = _choose(config, x @ w["mlp.gate.weight"].T, bias, top, unit)
        shared = "mlp.shared_experts.gate_proj.weight" in w
        out = _mlp(w, "mlp.shared_experts", x) if shared else torch.zeros_like(x)
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
