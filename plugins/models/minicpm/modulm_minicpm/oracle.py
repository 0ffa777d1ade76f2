"""Reference for tests of MiniCPM: transformers' Granite with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modulm_layers.testing import Converted

__all__ = ["AsGranite"]


class AsGranite(Converted):
    """transformers' Granite, which has the same multipliers under other names."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return {
            **config,
            "model_type": "granite",
            "embedding_multiplier": config["scale_emb"],
            "residual_multiplier": config["scale_depth"] * config["num_hidden_layers"] ** -0.5,
            "attention_multiplier": head**-0.5,
            "logits_scaling": config["hidden_size"] / config["dim_model_base"],
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return weights
