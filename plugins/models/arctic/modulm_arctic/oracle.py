"""Reference for tests of Arctic: transformers' Mixtral, whose layers are put together anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from modulm_layers.testing import Converted, split_experts

__all__ = ["AsMixtral"]

_NAMES = {
    ".mlp.": ".block_sparse_moe.",
    ".dense.": ".residual_mlp.",
    ".dense_norm.": ".residual_layernorm.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}


class AsMixtral(Converted):
    """transformers' Mixtral, with Llama's dense blocks."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"rms_norm_eps": 1e-5, **config, "model_type": "mixtral", "sliding_window": None}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stored = {}
        for name, tensor in split_experts(weights).items():
            dense = ".mlp." in name and ".experts." not in name and ".mlp.gate." not in name
            stored[name.replace(".mlp.", ".mlp.mlp.") if dense else name] = tensor
        return self.renamed(stored, _NAMES)

    def _model(self, config: Mapping[str, Any]) -> Any:
        from transformers.models.llama.modeling_llama import LlamaMLP
        from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

        model = super()._model(config)
        every, eps = config.get("moe_layer_frequency", 2), model.config.rms_norm_eps
        for index, layer in enumerate(model.model.layers):
            if (index + 1) % every == 0:
                narrow = type(model.config)(**model.config.to_dict())
                narrow.intermediate_size, narrow.mlp_bias = config["hidden_size"], False
                layer.dense = LlamaMLP(narrow).float()
                layer.dense_norm = MixtralRMSNorm(config["hidden_size"], eps)
                layer.forward = _forward(layer)
            else:
                model.config.mlp_bias = False
                layer.mlp = LlamaMLP(model.config).float()
        return model.eval()


def _forward(layer: Module) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, **inputs: Any) -> Tensor:
        mixed = layer.mlp(layer.post_attention_layernorm(hidden_states))
        seen = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **inputs)[0]
        stream = hidden_states + seen
        out: Tensor = stream + layer.dense(layer.dense_norm(stream))
        return out + (mixed[0] if isinstance(mixed, tuple) else mixed)

    return forward
