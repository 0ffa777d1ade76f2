"""Reference for tests of Muse Glimmer: transformers' text model, a head, and its logits' bound."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from modulm_layers.testing import Converted

__all__ = ["AsMuseGlimmer"]


class _WithHead(nn.Module):
    def __init__(self, settings: Any) -> None:
        from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerTextModel

        super().__init__()
        self.language_model = MuseGlimmerTextModel(settings)
        self.lm_head = nn.Linear(settings.hidden_size, settings.vocab_size, bias=False)
        if settings.tie_word_embeddings:
            self.lm_head.weight = self.language_model.embed_tokens.weight
        self.factor, self.cap = settings.output_multiplier, settings.final_logit_softcapping

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        states = self.language_model(tokens).last_hidden_state
        return SimpleNamespace(
            logits=self.cap * torch.tanh(self.lm_head(states) * self.factor / self.cap)
        )


class AsMuseGlimmer(Converted):
    """The weights have the names of the whole model."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return config

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return {f"model.{n}" if "lm_head" not in n else n: t for n, t in weights.items()}

    def _model(self, config: Mapping[str, Any]) -> Any:
        from transformers.models.muse_glimmer import configuration_muse_glimmer

        settings = configuration_muse_glimmer.MuseGlimmerTextConfig.from_dict(dict(config))
        settings._attn_implementation = "eager"
        return _WithHead(settings).float().eval()
