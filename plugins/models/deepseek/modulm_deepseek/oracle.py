"""References for tests: the text model of DeepSeek-OCR 2, and DeepSeek-V3, in transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modulm_layers.testing import Converted, split_experts

__all__ = ["AsDeepseekV3", "AsOcr2Text", "BothWays"]


class AsOcr2Text:
    """transformers' model with the same weights."""

    def weights(self, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Random weights, with about unit gain per layer."""
        width = config["hidden_size"]
        tensors = {"lm_head.weight": 3 * torch.randn(config["vocab_size"], width) * width**-0.5}
        for name, parameter in _model(config).named_parameters():
            drawn = torch.randn(parameter.shape)
            if parameter.dim() < 2:
                drawn = 0.1 * drawn + name.endswith("norm.weight")
            elif not name.startswith("embed_tokens"):
                drawn = drawn * parameter.shape[-1] ** -0.5
            tensors[f"model.{name}"] = drawn
        return tensors

    def logits(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Sequence[int]
    ) -> Tensor:
        """[tokens, vocabulary] in fp32."""
        model, state = _model(config), dict(weights)
        head = state.pop("lm_head.weight")
        if config.get("tie_word_embeddings"):
            head = state["model.embed_tokens.weight"]
        model.load_state_dict({name.removeprefix("model."): t for name, t in state.items()})
        states: Tensor = model(torch.tensor([list(tokens)])).last_hidden_state[0]
        return states @ head.T


def _model(config: Mapping[str, Any]) -> Any:
    from transformers.models.deepseek_ocr2 import configuration_deepseek_ocr2 as settings
    from transformers.models.deepseek_ocr2 import modeling_deepseek_ocr2 as models

    layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    kinds = ["dense" if index < dense else "sparse" for index in range(layers)]
    reference_config = settings.DeepseekOcr2TextConfig.from_dict(
        {**config, "mlp_layer_types": kinds}
    )
    reference_config._attn_implementation = "eager"
    return models.DeepseekOcr2TextModel(reference_config).float().eval()


class AsDeepseekV3(Converted):
    """transformers' DeepSeek-V3 with the keys of Sarvam 105B."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        rope = {**config["rope_scaling"], "type": "yarn"}
        rope["rope_theta"] = config.get("rope_theta", 10000.0)
        return {
            **config,
            "model_type": "deepseek_v3",
            "n_routed_experts": config["num_experts"],
            "n_shared_experts": config["num_shared_experts"],
            "routed_scaling_factor": config.get("routed_scaling_factor", 2.5),
            "rope_scaling": None,
            "rope_parameters": {**rope, "rope_type": "yarn"},
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return split_experts(weights)


class BothWays(AsDeepseekV3):
    """transformers' DeepSeek-V3 with `is_causal: false`."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "routed_scaling_factor": 2.5,
            **config,
            "is_causal": False,
            "tie_word_embeddings": False,
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stored = split_experts(weights)
        return {n.removeprefix("model."): t for n, t in stored.items() if "lm_head" not in n}

    def outputs(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: list[int]
    ) -> tuple[Tensor, None]:
        """Hidden states."""
        model = self._model(config)
        self._read(config, model, weights)
        return model.model(torch.tensor([tokens])).last_hidden_state[0], None
