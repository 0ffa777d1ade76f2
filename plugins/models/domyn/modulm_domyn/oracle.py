"""Reference for tests of Domyn Edge: transformers' Qwen 3, whose layers are put together anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from modulm_layers.testing import Converted

__all__ = ["AsQwen3"]

_NAMES = {
    "self_attn": "attention",
    ".mlp.": ".feedforward.",
    "input_layernorm": "pre_attention_norm",
    "post_attention_layernorm": "pre_feedforward_norm",
}


class AsQwen3(Converted):
    """transformers' Qwen 3 with two more norms and other attention in each layer."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        table = {"rms_norm_eps": 1e-6, **config, "model_type": "qwen3"}
        return {key: value for key, value in table.items() if key != "per_layer_config"}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        kept = {n: t for n, t in weights.items() if "q_norm" not in n}
        return self.renamed(kept, _NAMES)

    def _model(self, config: Mapping[str, Any]) -> Any:
        from transformers.models.qwen3 import modeling_qwen3 as models

        model, hidden = super()._model(config), config["hidden_size"]
        for index, layer in enumerate(model.model.layers):
            settings = type(model.config)(**model.config.to_dict())
            own = config["per_layer_config"].get(str(index), {})
            settings.head_dim = own.get("head_dim", config["head_dim"])
            settings._attn_implementation = "eager"
            layer.self_attn = models.Qwen3Attention(settings, index).float()
            eps = model.config.rms_norm_eps
            layer.self_attn.q_norm = _Unit(eps)
            for name in ("post_attention_norm", "post_feedforward_norm"):
                layer.add_module(name, models.Qwen3RMSNorm(hidden, eps))
            before = config["window_sizes"][index][0]
            layer.forward = _forward(layer, before, config["position_layers"][index] == "rope")
        return model.eval()


class _Unit(Module):
    """An RMS norm without weights."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed


def _forward(layer: Any, before: int, rotates: bool) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, position_embeddings: Any, **inputs: Any) -> Tensor:
        count = hidden_states.shape[1]
        far = torch.arange(count)[:, None] - torch.arange(count)
        hides = (far < 0) | ((far > before) if before > 0 else False)
        mask = torch.zeros(count, count).masked_fill(hides, float("-inf"))[None, None]
        if not rotates:
            one = torch.ones(1, count, layer.self_attn.head_dim)
            position_embeddings = one, torch.zeros_like(one)
        seen, _ = layer.self_attn(
            hidden_states=layer.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=mask,
        )
        stream = hidden_states + layer.post_attention_norm(seen)
        out = layer.mlp(layer.post_attention_layernorm(stream))
        return stream + layer.post_feedforward_norm(out)

    return forward
