"""References for tests: transformers' Llama, and its DeepSeek-V3 with norms after the branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from modulm_layers.testing import Converted, rotary, split_experts

__all__ = ["AsDeepseekV3", "AsLlama", "add_norms"]


class AsLlama(Converted):
    """transformers' Llama."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        bias = config["bias"] or bool(config.get("qkv_bias"))
        return {"rms_norm_eps": 1e-5, **config, "model_type": "llama", "attention_bias": bias}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        outer, inner = config["bias"], config.get("qkv_bias")
        inner = outer if inner is None else inner
        left_out = ([] if outer else ["o_proj.bias"]) + (
            [] if inner else [f"{name}_proj.bias" for name in "qkv"]
        )
        return {n: t for n, t in weights.items() if not n.endswith(tuple(left_out))}


def add_norms(layer: Any, hidden: int, eps: float) -> None:
    """Give a layer of DeepSeek-V3 a norm after each branch."""
    for name in ("pre_mlp_layernorm", "post_mlp_layernorm"):
        layer.add_module(name, type(layer.input_layernorm)(hidden, eps).to(torch.float32))
    layer.forward = _forward(layer)


def _forward(layer: Any) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, **inputs: Any) -> Tensor:
        attended, _ = layer.self_attn(layer.input_layernorm(hidden_states), **inputs)
        hidden_states = hidden_states + layer.post_attention_layernorm(attended)
        out: Tensor = layer.mlp(layer.pre_mlp_layernorm(hidden_states))
        return hidden_states + layer.post_mlp_layernorm(out)

    return forward


class AsDeepseekV3(Converted):
    """transformers' DeepSeek-V3 whose layers have two more norms."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            **config,
            "model_type": "deepseek_v3",
            "kv_lora_rank": config["attention_kv_lora_dim"],
            "q_lora_rank": config["attention_q_lora_dim"],
            "qk_nope_head_dim": config["attention_qk_dim"],
            "qk_rope_head_dim": config["attention_qk_rope_dim"],
            "head_dim": config["attention_qk_rope_dim"],
            "v_head_dim": config["attention_v_dim"],
            "n_routed_experts": config["num_routed_experts"],
            "n_shared_experts": config["num_shared_experts"],
            "first_k_dense_replace": config["num_dense_layers"],
            "n_group": config.get("n_group", 1),
            "topk_group": config.get("topk_group", 1),
            "rope_parameters": rotary(config),
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stored = split_experts(weights)
        if config.get("router_enable_expert_bias"):
            return stored
        return {n: t for n, t in stored.items() if "e_score_correction_bias" not in n}

    def _model(self, config: Mapping[str, Any]) -> Any:
        model = super()._model(config)
        for layer in model.model.layers if config.get("sandwich_norm") else ():
            add_norms(layer, config["hidden_size"], config["rms_norm_eps"])
        return model.eval()
