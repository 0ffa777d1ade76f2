"""Reference for tests of Orion: transformers' StableLM with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modulm_layers.testing import Converted, rotary

__all__ = ["AsStableLm"]


class AsStableLm(Converted):
    """transformers' StableLM with fully rotated heads."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        rope = rotary(config, partial_rotary_factor=config.get("partial_rotary_factor", 1.0))
        eps = config.get("rms_norm_eps", 1e-6)
        return {**config, "model_type": "stablelm", "layer_norm_eps": eps, "rope_parameters": rope}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return weights
