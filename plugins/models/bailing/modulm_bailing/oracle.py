"""Reference for tests of Ling 2.0: transformers' GLM 4.5 with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modulm_layers.testing import Converted, rotary, split_experts

__all__ = ["AsGlm4Moe", "AsQwen2Moe"]

_NAMES = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "e_score_correction_bias": "expert_bias",
}


class AsGlm4Moe(Converted):
    """transformers' GLM 4.5."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        part = config.get("partial_rotary_factor", 1.0)
        return {
            "rms_norm_eps": 1e-6,
            **config,
            "model_type": "glm4_moe",
            "n_routed_experts": config["num_experts"],
            "n_shared_experts": config["num_shared_experts"],
            "attention_bias": config["use_qkv_bias"],
            "use_qk_norm": config.get("use_qk_norm", True),
            "num_nextn_predict_layers": 0,
            "rope_parameters": rotary(config, partial_rotary_factor=part),
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stored = split_experts(weights)
        for name in weights:
            if ".q_proj." in name:
                parts = [stored.pop(name.replace("q_proj", f"{n}_proj")) for n in "qkv"]
                where = name.replace("self_attn.q_proj", "attention.query_key_value")
                stored[where] = torch.cat(parts)
        return self.renamed(stored, _NAMES)


class AsQwen2Moe(Converted):
    """transformers' Qwen 2 MoE, with the gate of its shared expert open."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            **config,
            "model_type": "qwen2_moe",
            "num_experts": config["num_experts"],
            "shared_expert_intermediate_size": config["moe_intermediate_size"]
            * config["num_shared_experts"],
            "norm_topk_prob": config.get("norm_topk_prob", True),
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(config["first_k_dense_replace"])),
            "rope_parameters": rotary(config),
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stored = split_experts(weights)
        left_out = ("shared_expert_gate.weight", *([] if config.get("use_qkv_bias") else ["bias"]))
        for name in weights:
            if name.endswith(left_out):
                stored.pop(name, None)
            elif ".q_proj." in name:
                parts = [stored.pop(name.replace("q_proj", f"{n}_proj")) for n in "qkv"]
                where = name.replace("self_attn.q_proj", "attention.query_key_value")
                stored[where] = torch.cat(parts)
        return self.renamed(stored, {**_NAMES, "shared_expert.": "shared_experts."})

    def _read(self, config: Mapping[str, Any], model: Any, weights: Mapping[str, Tensor]) -> None:
        if config.get("norm_head"):
            head = torch.nn.functional.normalize(weights["lm_head.weight"], dim=0, eps=1e-7)
            weights = {**weights, "lm_head.weight": head}
        super()._read(config, model, weights)

    def _model(self, config: Mapping[str, Any]) -> Any:
        model = super()._model(config)
        scale = config.get("routed_scaling_factor", 1.0)
        for layer in model.model.layers:
            if hasattr(layer.mlp, "shared_expert_gate"):
                layer.mlp.shared_expert_gate.forward = _open
                layer.mlp.experts.register_forward_hook(lambda _, __, mixed: scale * mixed)
        return model


def _open(states: Tensor) -> Tensor:
    """The gate's logit: so large that its sigmoid is 1."""
    return torch.full((*states.shape[:-1], 1), 100.0)
