"""Reference for tests of Ring 2.5: transformers' DeepSeek-V3, with lightning attention in most
layers by its equations (arXiv 2401.04658), token by token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modulm_layers.testing import Converted, rotary, split_experts

__all__ = ["AsDeepseekV3"]


class _Lightning(nn.Module):
    def __init__(self, config: Mapping[str, Any], index: int) -> None:
        super().__init__()
        hidden, heads, size = (
            config[key] for key in ("hidden_size", "num_attention_heads", "head_dim")
        )
        self.heads, self.size, self.groups = heads, size, config["group_norm_size"]
        self.turned = int(size * config.get("partial_rotary_factor", 1.0))
        self.theta, self.eps = config.get("rope_theta", 6e5), config.get("rms_norm_eps", 1e-6)
        self.turns = config.get("linear_rope", True)
        self.query_key_value = nn.Linear(hidden, 3 * heads * size)
        self.query_layernorm = nn.RMSNorm(size, self.eps)
        self.key_layernorm = nn.RMSNorm(size, self.eps)
        self.g_proj = nn.Linear(hidden, heads * size, bias=False)
        self.g_norm = nn.RMSNorm(heads * size)
        self.dense = nn.Linear(heads * size, hidden, bias=False)
        layers = config["num_hidden_layers"]
        slopes = torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)])
        self.decay = (-slopes * (1 - index / (layers - 1) + 1e-5)).exp()

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        x = hidden_states[0]
        parts = self.query_key_value(x).view(len(x), 3, self.heads, self.size)
        q, k, v = parts.unbind(1)
        q, k = self._turn(self.query_layernorm(q)), self._turn(self.key_layernorm(k))
        state, seen = torch.zeros(self.heads, self.size, self.size), []
        for at in range(len(x)):
            state = self.decay[:, None, None] * state + k[at][:, :, None] * v[at][:, None]
            seen.append((q[at][:, None] @ state)[:, 0] * self.size**-0.5)
        out = torch.stack(seen).view(len(x), self.groups, -1)
        out = out / (out.square().mean(-1, keepdim=True) + self.eps).sqrt()
        out = out.flatten(1) * self.g_norm.weight * self.g_proj(x).sigmoid()
        return self.dense(out)[None], None

    def _turn(self, x: Tensor) -> Tensor:
        size = self.turned
        if not self.turns:
            return x
        angles = torch.arange(len(x))[:, None] / self.theta ** (torch.arange(0, size, 2) / size)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        one, other, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
        return torch.cat([one * cos - other * sin, other * cos + one * sin, rest], dim=-1)


class AsDeepseekV3(Converted):
    """transformers' DeepSeek-V3."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "rms_norm_eps": 1e-6,
            **config,
            "model_type": "deepseek_v3",
            "head_dim": config["qk_rope_head_dim"],
            "n_routed_experts": config["num_experts"],
            "n_shared_experts": config["num_shared_experts"],
            "rope_parameters": rotary(config, 6e5),
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        names = {
            "model.embed_tokens": "model.word_embeddings",
            "self_attn.o_proj": "self_attn.dense",
            "self_attn.": "attention.",
            "e_score_correction_bias": "expert_bias",
        }
        return self.renamed(split_experts(weights), names)

    def _model(self, config: Mapping[str, Any]) -> Any:
        model = super()._model(config)
        for index, layer in enumerate(model.model.layers):
            if (index + 1) % config["layer_group_size"]:
                layer.self_attn = _Lightning(config, index)
        return model.eval()
