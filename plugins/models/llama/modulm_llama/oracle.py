"""Reference for tests of bidirectional Llama: transformers' Llama with `is_causal: false`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modulm_layers.testing import Converted

__all__ = ["AsBidirectional"]


class AsBidirectional(Converted):
    """transformers' Llama; classes are those of the mean over the tokens."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**config, "model_type": "llama", "is_causal": False}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        kept = {n.removeprefix("model."): t for n, t in weights.items() if "lm_head" not in n}
        if "id2label" not in config:
            return kept
        kept = {f"model.{name}": tensor for name, tensor in kept.items()}
        # The head of transformers' decoder is as wide as the vocabulary: its first rows serve.
        return {**kept, "score.weight": weights["lm_head.weight"][: len(config["id2label"])]}

    def outputs(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states, and the classes of their mean."""
        model = self._model(config)
        self._read(config, model, weights)
        states: Tensor = model.model(torch.tensor([tokens])).last_hidden_state[0]
        score = weights.get("score.weight")
        return states, None if score is None else states.mean(0, keepdim=True) @ score.T
