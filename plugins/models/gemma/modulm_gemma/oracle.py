"""Reference for tests of Rnj 1: transformers' Gemma 3 without windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modulm_layers.testing import Converted

__all__ = ["AsGemma3"]


class AsGemma3(Converted):
    """transformers' Gemma 3, whose layers all have full attention."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        count = config["num_hidden_layers"]
        rope, trained = config["rope_parameters"], "original_max_position_embeddings"
        if config.get(trained) is not None:  # transformers reads the outer key of flat tables alone
            rope = {**rope, trained: config[trained]}
        return {
            **config,
            "model_type": "gemma3_text",
            "layer_types": ["full_attention"] * count,
            "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return weights
