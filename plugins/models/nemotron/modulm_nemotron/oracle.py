"""Reference for tests of Nemotron Super: transformers' Llama layers of different sizes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from modulm_layers.testing import Converted

__all__ = ["AsLlama"]


class _Nothing(torch.nn.Module):
    """A branch that adds nothing."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends = attends

    def forward(self, x: Tensor | None = None, **inputs: Any) -> Any:
        states = inputs["hidden_states"] if x is None else x
        nothing = torch.zeros_like(states)
        return (nothing, None) if self.attends else nothing


class AsLlama(Converted):
    """transformers' Llama with a configuration per layer."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**config, "model_type": "llama", "intermediate_size": 8, "rms_norm_eps": 1e-5}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return weights

    def _model(self, config: Mapping[str, Any]) -> Any:
        model = super()._model(config)
        for index, block in enumerate(config["block_configs"]):
            attention, mlp = block["attention"], block["ffn"]
            settings = deepcopy(model.config)
            group = attention.get("n_heads_in_group", 1)
            settings.num_key_value_heads = config["num_attention_heads"] // group
            settings.intermediate_size = mlp.get("intermediate_size", 256)
            layer = type(model.model.layers[index])(settings, index)
            if attention.get("no_op"):
                layer.self_attn, layer.input_layernorm = _Nothing(True), torch.nn.Identity()
            if mlp.get("no_op"):
                layer.mlp, layer.post_attention_layernorm = _Nothing(False), torch.nn.Identity()
            model.model.layers[index] = layer.float()
        return model.eval()
