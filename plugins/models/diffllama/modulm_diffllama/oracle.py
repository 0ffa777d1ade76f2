"""Reference for tests of Motif: transformers' DiffLlama with Motif's norms and activation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, RMSNorm

from modulm_layers.testing import Converted

__all__ = ["AsDiffLlama"]


class AsDiffLlama(Converted):
    """transformers' DiffLlama."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"rms_norm_eps": 1e-6, **config, "model_type": "diffllama", "hidden_act": "silu"}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        size = config["hidden_size"] // config["num_attention_heads"]
        stored = dict(weights)
        for name, tensor in weights.items():
            if any(f"{part}_proj" in name for part in "qkv"):
                pairs = tensor.unflatten(0, (2, -1, size)).transpose(0, 1)
                stored[name] = pairs.flatten(0, 2)
        return self.renamed(stored, {".groupnorm.": ".subln."})

    def _model(self, config: Mapping[str, Any]) -> Any:
        model = super()._model(config)
        for index, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            attention.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * (index - 1))
            eps = config.get("attn_rms_norm_eps", 1e-5)
            attention.groupnorm = RMSNorm(2 * attention.head_dim, eps=eps)
            layer.mlp.act_fn = _Polynomial()
        return model.eval()


class _Polynomial(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = Parameter(torch.ones(3) / 3), Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        powers = torch.stack(
            [torch.nn.functional.rms_norm(x**n, x.shape[-1:], eps=1e-6) for n in (3, 2, 1)], dim=-1
        )
        return powers @ self.weight + self.bias
