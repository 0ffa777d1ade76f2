"""References for tests: transformers' Llama and Granite with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modulm_layers.testing import Converted

__all__ = ["AsGranite", "AsLlama"]

_NAMES = {
    "model.layers": "transformer.h",
    "model.embed_tokens": "transformer.word_embeddings",
    "model.norm": "transformer.ln_f",
    "self_attn.q_proj": "self_attention.query",
    "self_attn.o_proj": "self_attention.dense",
}


class AsLlama(Converted):
    """transformers' Llama with biases, of which TeleChat has those of the output projections."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            **config,
            "model_type": "llama",
            "intermediate_size": config["ffn_hidden_size"],
            "num_hidden_layers": config["n_layer"],
            "num_attention_heads": config["n_head"],
            "max_position_embeddings": config["seq_length"],
            "rms_norm_eps": config["layer_norm_epsilon"],
            "attention_bias": True,
            "mlp_bias": True,
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        unbiased = ("q_proj.bias", "k_proj.bias", "v_proj.bias", "gate_proj.bias", "up_proj.bias")
        stored = {n: t for n, t in weights.items() if not n.endswith(unbiased)}
        for name in [name for name in stored if ".k_proj." in name]:
            k, v = stored.pop(name), stored.pop(name.replace("k_proj", "v_proj"))
            heads = config["num_key_value_heads"]
            parts = [part.reshape(heads, 1, -1, part.shape[-1]) for part in (k, v)]
            where = name.replace("self_attn.k_proj", "self_attention.key_value")
            stored[where] = torch.cat(parts, dim=1).reshape(-1, k.shape[-1])
        return self.renamed(stored, _NAMES)


class AsGranite(Converted):
    """transformers' Granite, which has the same multipliers under other names."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        scaled = config.get("use_mup", False)
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return {
            **config,
            "model_type": "granite",
            "embedding_multiplier": config["input_mult"] if scaled else 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": head**-0.5,
            "logits_scaling": config["mup_scale_factor"] / config["output_mult"] if scaled else 1.0,
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return weights
