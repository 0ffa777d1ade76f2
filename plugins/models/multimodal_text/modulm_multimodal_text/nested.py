"""The text model of a multimodal checkpoint, run by the plugin for that text model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch, CacheSpec, Model, MtpLayer
from modulm.nn import Builder, WeightNames
from modulm_layers import tiny_config
from modulm_towers import TEXT_NAMES, TextConfig

__all__ = ["NestedText"]

log = logging.getLogger("modulm.models")

#: Weights of the surrounding models.
_OTHERS = (
    r"^(model\.)?(vision|visual|image|audio|embed_vision|embed_audio|multi_modal|connector|mm_)",
)


class NestedText(Module, Model):
    """A text model under its weight names in the complete checkpoint."""

    api = 1
    config_type = TextConfig

    def __init__(self, config: TextConfig, build: Builder) -> None:
        super().__init__()
        log.warning(
            "%s: only its text model is loaded; images and audio are not supported", config.name
        )
        self.text = config.driver(config.text, build)

    @classmethod
    def weights(cls, config: TextConfig) -> WeightNames:
        names: WeightNames = config.driver.weights(config.text)
        return evolve(names, rename=(*TEXT_NAMES, *names.rename), ignore=(*_OTHERS, *names.ignore))

    @classmethod
    def mtp(cls, config: TextConfig) -> MtpLayer | None:
        layer: MtpLayer | None = config.driver.mtp(config.text)
        return layer

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        caches: tuple[CacheSpec, ...] = self.text.caches
        return caches

    def forward(self, batch: Batch) -> Tensor:
        hidden: Tensor = self.text(batch)
        return hidden

    def states(self, batch: Batch, layers: Sequence[int]) -> tuple[Tensor, ...]:
        captured: tuple[Tensor, ...] = self.text.states(batch, layers)
        return captured

    def embeddings(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.text.embeddings(tokens)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.text.logits(hidden)
        return logits

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        text = tiny_config("gemma3_text", "", head_dim=24, sliding_window=12)
        vision = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        }
        return {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "mm_tokens_per_image": 4,
            "text_config": {
                **text,
                "query_pre_attn_scalar": 20,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": vision,
        }
