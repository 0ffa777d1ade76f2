"""Voyage 4 (Voyage AI, 2026): Qwen 3 that sees whole texts, with a linear layer at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import field, frozen, validators
from torch import Tensor

from modulm.contracts.model import Batch
from modulm.nn import Builder
from modulm_layers import TextVectors, size, tiny_config
from modulm_qwen.qwen3 import Qwen3Config, Qwen3ForCausalLM

__all__ = ["VoyageQwen3BidirectionalEmbedModel"]


@frozen(kw_only=True)
class VoyageConfig(Qwen3Config):
    """config.json of Voyage 4; `num_labels` is the width of vectors."""

    is_causal: bool = field(default=False, validator=validators.in_((False,)))
    num_labels: int = size()


class VoyageQwen3BidirectionalEmbedModel(TextVectors, Qwen3ForCausalLM):
    """Vectors of texts, by default the mean over the tokens."""

    config_type: ClassVar[type] = VoyageConfig
    heads = ("linear",)
    oracle = "modulm_qwen.oracle:AsBidirectionalQwen3"

    @property
    def pooling(self) -> str:
        return "MEAN"

    def __init__(self, config: VoyageConfig, build: Builder) -> None:
        super().__init__(config, build)
        self.linear = build.linear("linear", config.hidden_size, config.num_labels, split=False)

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, num_labels]."""
        vectors: Tensor = self.linear(super().forward(batch))
        return vectors

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        name = "VoyageQwen3BidirectionalEmbedModel"
        return tiny_config("qwen3", name, head_dim=24, num_labels=32, is_causal=False)
