"""Reference for tests of Solar: transformers' Llama, whose layers' inputs are mixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modulm_layers.testing import Converted

__all__ = ["AsLlama"]


class AsLlama(Converted):
    """transformers' Llama with the connections of Solar."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"rms_norm_eps": 1e-5, **config, "model_type": "llama"}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return weights

    def _model(self, config: Mapping[str, Any]) -> Any:
        model, inputs, share = super()._model(config), {}, config["bskcn_tv"][1]
        pairs = ("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4")

        def mix(index: int) -> Any:
            def hook(layer: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                (stream,) = arguments
                for source, sink in pairs:
                    if index in config[source]:
                        inputs[source] = stream
                    if index in config[sink]:
                        stream = inputs[source] * share + stream * (1 - share)
                return (stream,)

            return hook

        for index, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(mix(index))
        return model
