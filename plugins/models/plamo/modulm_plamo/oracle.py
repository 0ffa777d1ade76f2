"""Reference for tests of PLaMo 3: transformers' Gemma 3 with the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modulm_layers.testing import Converted

__all__ = ["AsGemma3"]

_NAMES = {
    "model.layers.": "model.layers.layers.",
    "self_attn.": "mixer.",
    "input_layernorm": "pre_mixer_norm",
    "post_attention_layernorm": "post_mixer_norm",
    "pre_feedforward_layernorm": "pre_mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}
#: Offsets of norms; Gemma's is 1 for all.
_OFFSETS = {"post_mixer_norm.weight": 1 / 5, "post_mlp_norm.weight": 5**-1.5}


class AsGemma3(Converted):
    """transformers' Gemma 3, which also multiplies its embedding."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        every = config.get("sliding_window_pattern", 8)
        kinds = [
            "sliding_attention" if (i + 1) % every else "full_attention"
            for i in range(config["num_hidden_layers"])
        ]
        ropes = {
            "sliding_attention": config.get("rope_local_theta", 10_000.0),
            "full_attention": config.get("rope_theta", 1_000_000.0),
        }
        return {
            **config,
            "model_type": "gemma3_text",
            "layer_types": config.get("layer_types") or kinds,
            "hidden_activation": config.get("hidden_act", "silu"),
            "query_pre_attn_scalar": config.get("head_dim", 128),
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in ropes.items()
            },
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stored = dict(weights)
        for name in [name for name in weights if ".q_proj." in name]:
            parts = [stored.pop(name.replace("q_proj", f"{n}_proj")) for n in "qkv"]
            stored[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        for name in [name for name in weights if ".gate_proj." in name]:
            parts = [stored.pop(name), stored.pop(name.replace("gate", "up"))]
            stored[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        return self.renamed(stored, _NAMES)

    def _read(self, config: Mapping[str, Any], model: Any, weights: Mapping[str, Tensor]) -> None:
        changed = {}
        for name, tensor in weights.items():
            offset = next((o for end, o in _OFFSETS.items() if name.endswith(end)), 1.0)
            scaled = "embed_tokens" in name or ("lm_head" in name and self._ties(config))
            scale = config["hidden_size"] ** -0.5 if scaled else 1.0
            changed[name] = tensor * scale + (offset - 1.0)
        super()._read(config, model, changed)

    def logits(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Sequence[int]
    ) -> Tensor:
        logits = super().logits(config, weights, tokens)
        return logits * config["hidden_size"] ** 0.5 if self._ties(config) else logits

    def _ties(self, config: Mapping[str, Any]) -> bool:
        """Whether the head reads the embedding, which `_read` divides."""
        return bool(config.get("tie_word_embeddings", True))
