"""Reference for tests of ChatGLM: transformers' GLM 4 with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modulm_layers.testing import Converted

__all__ = ["ChatGLMAsGlm"]

_NAMES = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.norm": "transformer.encoder.final_layernorm",
    "model.layers": "transformer.encoder.layers",
    "lm_head": "transformer.output_layer",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


class ChatGLMAsGlm(Converted):
    """transformers' GLM 4."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        theta = config.get("rope_theta", 10000.0) * config["rope_ratio"]
        part = config.get("partial_rotary_factor", 0.5)
        rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part}
        grouped = config.get("multi_query_attention", True)
        return {
            "model_type": "glm",
            "pad_token_id": 0,
            "vocab_size": config["padded_vocab_size"],
            "hidden_size": config["hidden_size"],
            "intermediate_size": config["ffn_hidden_size"],
            "num_hidden_layers": config["num_layers"],
            "num_attention_heads": config["num_attention_heads"],
            "num_key_value_heads": config[
                "multi_query_group_num" if grouped else "num_attention_heads"
            ],
            "head_dim": config["kv_channels"],
            "rms_norm_eps": config["layernorm_epsilon"],
            "attention_bias": config["add_qkv_bias"],
            "hidden_act": config.get("hidden_act", "silu"),
            "tie_word_embeddings": config.get("tie_word_embeddings", False),
            "rope_parameters": rope,
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stored = dict(weights)
        for name in [name for name in weights if ".q_proj." in name]:
            parts = [stored.pop(name.replace("q_proj", f"{n}_proj")) for n in "qkv"]
            where = name.replace("self_attn.q_proj", "self_attention.query_key_value")
            stored[where] = torch.cat(parts)
        return self.renamed(stored, _NAMES)
