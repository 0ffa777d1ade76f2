"""Reference for tests of Dory: its published equations in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Dory"]

#: Keys of what scales are stored in units of, and of the speed's first value, with their defaults.
_STARTS = ("initializer_range", 0.02), ("ngpt_alpha_init", 0.05)


def _norm(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _turn(x: Tensor, part: float, theta: float) -> Tensor:
    """Rotate the first `part` of each head's numbers; x: [tokens, heads, size]."""
    size = int(x.shape[-1] * part)
    angles = torch.arange(len(x))[:, None] / theta ** (torch.arange(0, size, 2) / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, other, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
    return torch.cat([one * cos - other * sin, other * cos + one * sin, rest], dim=-1)


class Dory:
    """The model with its layers unrolled."""

    def weights(self, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Draw weights; scales are around those of a new model."""
        hidden, inner, words = (
            config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
        )
        width = config["num_attention_heads"] * config["head_dim"]
        keys = config["num_key_value_heads"] * config["head_dim"]

        def scale(count: int) -> Tensor:
            return 0.02 * (1 + 0.3 * torch.randn(count))

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns) * columns**-0.5

        stored = {
            "backbone.embeddings.weight": torch.randn(words, hidden),
            "lm_head.weight": 6 * torch.randn(words, hidden),
            "lm_head.logit_scale": scale(words),
        }
        for index, kind in enumerate(config["layer_types"]):
            at = f"backbone.layers.{index}"
            if kind == "mlp":
                stored |= {
                    f"{at}.mlp_alpha": 8 * scale(hidden),
                    f"{at}.mixer.suv_gate": 50 * scale(inner),
                    f"{at}.mixer.suv_up": 50 * scale(inner),
                    f"{at}.mixer.gate_proj.weight": matrix(inner, hidden),
                    f"{at}.mixer.up_proj.weight": matrix(inner, hidden),
                    f"{at}.mixer.down_proj.weight": matrix(hidden, inner),
                }
                continue
            stored |= {
                f"{at}.attn_alpha": 8 * scale(hidden),
                f"{at}.mixer.sqk": scale(width),
                f"{at}.mixer.s_gate": scale(width),
                f"{at}.mixer.q_proj.weight": matrix(width, hidden),
                f"{at}.mixer.k_proj.weight": matrix(keys, hidden),
                f"{at}.mixer.v_proj.weight": matrix(keys, hidden),
                f"{at}.mixer.g_proj.weight": matrix(width, hidden),
                f"{at}.mixer.o_proj.weight": matrix(hidden, width),
            }
        return stored

    def logits(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Sequence[int]
    ) -> Tensor:
        """Compute logits: [tokens, vocabulary] fp32."""
        first = config["n_input_layers"]
        last = config["num_hidden_layers"] - config["n_output_layers"]
        x = weights["backbone.embeddings.weight"][torch.tensor(tokens)]
        for index in range(first):
            x = self._layer(config, weights, index, x)
        start = x
        for _ in range(config["n_recurrent_loops"]):
            x = _norm(x + start)
            for index in range(first, last):
                x = self._layer(config, weights, index, x)
            x = _norm(x)
        for index in range(last, config["num_hidden_layers"]):
            x = self._layer(config, weights, index, x)
        spread = config.get("initializer_range", 0.02)
        return x @ weights["lm_head.weight"].T * (weights["lm_head.logit_scale"] / spread)

    def _layer(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], index: int, x: Tensor
    ) -> Tensor:
        kind, at = config["layer_types"][index], f"backbone.layers.{index}"
        w = {name: t for name, t in weights.items() if name.startswith(f"{at}.")}
        w = {name.removeprefix(f"{at}.").removeprefix("mixer."): t for name, t in w.items()}
        out = self._mlp(w, x) if kind == "mlp" else self._attend(config, w, kind, x)
        spread, start = (config.get(*key) for key in _STARTS)
        speed = w["mlp_alpha" if kind == "mlp" else "attn_alpha"] * start / spread
        old, new = _norm(x), _norm(out)
        return _norm(old + speed.abs() * (new - old))

    def _mlp(self, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        factor = x.shape[-1] ** 0.5
        gate = x @ w["gate_proj.weight"].T * w["suv_gate"] * factor
        up = x @ w["up_proj.weight"].T * w["suv_up"] * factor
        return _norm(gate * gate.sigmoid() * up) @ w["down_proj.weight"].T

    def _attend(
        self, config: Mapping[str, Any], w: Mapping[str, Tensor], kind: str, x: Tensor
    ) -> Tensor:
        size, count = config["head_dim"], len(x)
        rope = config["rope_parameters"][kind]
        q, k, v = (
            (x @ w[f"{name}_proj.weight"].T).view(count, -1, size) for name in ("q", "k", "v")
        )
        part = rope.get("partial_rotary_factor", 1.0)
        q, k = (_norm(_turn(each, part, rope["rope_theta"])) for each in (q, k))
        spread, first = (
            config.get(*_STARTS[0]),
            config.get("attention_output_gate_logit_scale_init"),
        )
        first = x.shape[-1] ** 0.5 if first is None else first
        q = q * (w["sqk"] * size**0.5 / spread).square().view(-1, size)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        reach = config["sliding_window"] if kind == "sliding_attention" else count
        seen = torch.ones(count, count).tril().triu(1 - reach).bool()
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        scale = (w["s_gate"] * first**0.5 / spread).square()
        gate = (x @ w["g_proj.weight"].T * scale).sigmoid()
        return _norm(out * gate) @ w["o_proj.weight"].T
