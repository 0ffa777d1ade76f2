"""Reference for tests of Jais, from the paper (arXiv 2308.16149, section 3): plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Jais"]


class Jais:
    """Layer norms, ALiBi, and x * silu(gate) between two maps stored as [inputs, outputs]."""

    def weights(self, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Random weights, with about unit gain per layer."""
        width, inner = config["n_embd"], config["n_inner"]
        maps = {
            "attn.c_attn": (width, 3 * width),
            "attn.c_proj": (width, width),
            "mlp.c_fc": (width, inner),
            "mlp.c_fc2": (width, inner),
            "mlp.c_proj": (inner, width),
        }
        stored = {"transformer.wte.weight": torch.randn(config["vocab_size"], width)}
        stored["lm_head.weight"] = 3 * torch.randn(config["vocab_size"], width) * width**-0.5
        for index in range(config["n_layer"]):
            at = f"transformer.h.{index}"
            for name, (inputs, outputs) in maps.items():
                stored[f"{at}.{name}.weight"] = torch.randn(inputs, outputs) * inputs**-0.5
                stored[f"{at}.{name}.bias"] = 0.1 * torch.randn(outputs)
        for at in (*(f"transformer.h.{i}.ln_{n}" for i in range(config["n_layer"]) for n in (1, 2)),
                   "transformer.ln_f"):  # fmt: skip
            stored[f"{at}.weight"] = 1 + 0.1 * torch.randn(width)
            stored[f"{at}.bias"] = 0.1 * torch.randn(width)
        return stored

    def logits(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Sequence[int]
    ) -> Tensor:
        """[tokens, vocabulary] in fp32."""
        width, heads, count = config["n_embd"], config["n_head"], len(tokens)
        at = torch.arange(count)
        slopes = torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)])
        bias = slopes[:, None, None] * (at[None, :] - at[:, None])
        bias = bias.masked_fill(at[None, :] > at[:, None], -torch.inf)

        def norm(x: Tensor, name: str) -> Tensor:
            eps = config.get("layer_norm_epsilon", 1e-5)
            weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
            return F.layer_norm(x, (width,), weight, bias, eps)

        def linear(x: Tensor, name: str) -> Tensor:
            return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

        x = weights["transformer.wte.weight"][list(tokens)] * config.get(
            "mup_embeddings_scale", 1.0
        )
        for index in range(config["n_layer"]):
            layer = f"transformer.h.{index}"
            qkv = linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn")
            q, k, v = (part.view(count, heads, -1).transpose(0, 1) for part in qkv.chunk(3, -1))
            power = 1.0 if config.get("mup_scale_qk_dot_by_d") else 0.5
            scores = q @ k.transpose(1, 2) / q.shape[-1] ** power + bias
            mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, width)
            x = x + linear(mixed, f"{layer}.attn.c_proj")
            y = norm(x, f"{layer}.ln_2")
            inner = linear(y, f"{layer}.mlp.c_fc") * F.silu(linear(y, f"{layer}.mlp.c_fc2"))
            x = x + linear(inner, f"{layer}.mlp.c_proj")
        scale = config.get("mup_output_alpha", 1.0) * config.get("mup_width_scale", 1.0)
        scale = config.get("width_scale") or scale
        head = "transformer.wte" if config.get("tie_word_embeddings", True) else "lm_head"
        logits: Tensor = scale * (norm(x, "transformer.ln_f") @ weights[f"{head}.weight"].T)
        return logits
