"""What tests compare models with that transformers lacks: its model of the same mathematics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

__all__ = ["AsQwen2"]


class AsQwen2:
    """transformers' Qwen 2 with the same weights."""

    def weights(self, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Random ones, of about unit gain for each map."""
        model = _model(config)
        tables = model.model.embed_tokens.weight, model.lm_head.weight
        tensors = {}
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape)
            if parameter.dim() < 2:
                tensors[name] = 0.1 * drawn + name.endswith("norm.weight")
            else:
                head = 3 if parameter is tables[1] else 1
                gain = 1.0 if parameter is tables[0] else head * parameter.shape[-1] ** -0.5
                tensors[name] = gain * drawn
        return tensors

    def logits(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Sequence[int]
    ) -> Tensor:
        """[tokens, vocabulary] in fp32."""
        model = _model(config)
        model.load_state_dict(weights)
        logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
        return logits


def _model(config: Mapping[str, Any]) -> Any:
    reference_config = Qwen2Config.from_dict({**config, "model_type": "qwen2"})
    model: Any = AutoModelForCausalLM.from_config(
        reference_config, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
