"""Reference for tests of SPLADE: transformers' BERT for masked words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Masked"]


class Masked:
    """transformers' BertForMaskedLM; its logits become the weights of words."""

    def weights(self, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Random weights; the decoder's table is the embedding's and not stored."""
        from modulm.testing.checkpoints import _randomise

        model = _model(config)
        with torch.no_grad():
            _randomise(model)
        state = model.state_dict()
        tied = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
        return {n: t.contiguous().clone() for n, t in state.items() if n not in tied}

    def outputs(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: list[int]
    ) -> tuple[Tensor, None]:
        """[tokens, vocabulary]."""
        model = _model(config)
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
        return model(torch.tensor([tokens])).logits[0].relu().log1p(), None


def _model(config: Mapping[str, Any]) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig.from_dict(dict(config))).float().eval()
