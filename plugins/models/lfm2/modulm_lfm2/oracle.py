"""Reference for tests of LFM2 for retrieval: transformers' LFM2, made to see whole texts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modulm_layers.testing import Converted

__all__ = ["BothWays"]


def _convolve(conv: Any, hidden_states: Tensor, **settings: Any) -> Tensor:
    """The gated convolution, centred on each token; hidden_states: [1, tokens, hidden]."""
    before, after, inputs = conv.in_proj(hidden_states).transpose(1, 2).chunk(3, 1)
    weight = conv.conv.weight
    mixed = F.conv1d(
        before * inputs,
        weight,
        conv.conv.bias,
        padding=weight.shape[-1] // 2,
        groups=weight.shape[0],
    )
    out: Tensor = conv.out_proj((after * mixed).transpose(1, 2))
    return out


class BothWays(Converted):
    """transformers' LFM2 with `is_causal: false` and centred convolutions."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        own = {"model_type": "lfm2", "is_causal": False, "tie_word_embeddings": False}
        # The name of the same key in other files.
        return {key: v for key, v in {**config, **own}.items() if key != "tie_embedding"}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return {n.removeprefix("model."): t for n, t in weights.items() if "lm_head" not in n}

    def outputs(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: list[int]
    ) -> tuple[Tensor, None]:
        """Hidden states."""
        model = self._model(config)
        self._read(config, model, weights)
        for layer in model.model.layers:
            if hasattr(layer, "conv"):
                layer.conv.forward = partial(_convolve, layer.conv)
        states: Tensor = model.model(torch.tensor([tokens])).last_hidden_state[0]
        return states, None
