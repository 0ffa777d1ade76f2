"""Mistral (arXiv 2310.06825): Llama's block with an independent head size and a sliding window.

In Ministral 8B (2024), three of four layers have the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm_layers import DecoderConfig, DecoderForCausalLM, size, tiny_config
from modulm_llama.llama import LlamaLayer

__all__ = ["MinistralForCausalLM", "MistralConfig", "MistralForCausalLM"]


@frozen(kw_only=True)
class MistralConfig(DecoderConfig):
    """config.json of Mistral and Ministral; a `sliding_window` of null means full attention."""

    BIDIRECTIONAL: ClassVar[bool] = True

    max_position_embeddings: int = size(131072)


class MistralForCausalLM(DecoderForCausalLM):
    """Mistral with a language-model head."""

    api = 1
    config_type = MistralConfig
    layer = LlamaLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("mistral", "MistralForCausalLM", head_dim=24, sliding_window=12)


class MinistralForCausalLM(MistralForCausalLM):
    """Ministral with a language-model head."""

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "ministral",
            "MinistralForCausalLM",
            head_dim=24,
            sliding_window=12,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        )
