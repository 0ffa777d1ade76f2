"""References for tests: transformers' Llama and Nemotron-H with layers of different sizes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from modulm_layers.testing import Converted, split_experts

__all__ = ["AsLlama", "AsNemotronH"]


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
        return {"rms_norm_eps": 1e-5, **config, "model_type": "llama", "intermediate_size": 8}

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


class AsNemotronH(Converted):
    """transformers' Nemotron-H with a configuration per layer."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        names = {"mamba": "linear_attention", "attention": "full_attention"}
        kinds = [block["block_type"] for block in config["block_configs"]]
        kinds = [names.get(kind, kind) for kind in kinds]
        return {**config, "model_type": "nemotron_h", "layers_block_type": kinds}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stored = split_experts(weights)
        for name, stack in weights.items():
            if name.endswith("experts.up_proj"):
                del stored[name]
                at = name.rpartition(".")[0]
                stored |= {f"{at}.{i}.up_proj.weight": up for i, up in enumerate(stack)}
        return stored

    def _model(self, config: Mapping[str, Any]) -> Any:
        model = super()._model(config)
        for index, block in enumerate(config["block_configs"]):
            settings = deepcopy(model.config)
            for key, value in block.items():
                setattr(settings, key, value)
            layer = type(model.model.layers[index])(settings, index).float()
            if block.get("sliding_window"):
                layer.mixer.forward = _windowed(layer.mixer.forward, block["sliding_window"])
            model.model.layers[index] = layer
        return model.eval()


def _windowed(forward: Any, window: int) -> Any:
    """Attention whose tokens see `window` of the last ones, themselves included."""

    def attend(hidden_states: Tensor, **inputs: Any) -> Any:
        count = hidden_states.shape[1]
        seen = torch.ones(count, count).tril().triu(1 - window).bool()
        mask = torch.zeros(count, count).masked_fill(~seen, -torch.inf)[None, None]
        return forward(hidden_states=hidden_states, **{**inputs, "attention_mask": mask})

    return attend
