"""Jina Embeddings v5 small (Jina AI, 2026): Qwen 3 without a head; its tasks are LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve, frozen

from modulm.nn import WeightNames
from modulm_layers import TextVectors, only
from modulm_qwen.qwen3 import Qwen3Config, Qwen3ForCausalLM

__all__ = ["JinaEmbeddingsV5Model", "JinaForRanking"]


@frozen(kw_only=True)
class JinaEmbeddingsV5Config(Qwen3Config):
    """config.json of Jina v5; v5 nano, an EuroBERT under the same name, is rejected."""

    is_decoder: bool = True

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, is_decoder=(True,))


class JinaEmbeddingsV5Model(TextVectors, Qwen3ForCausalLM):
    """Vectors of texts, of the last token; a request names the adapter of its task."""

    config_type: ClassVar[type] = JinaEmbeddingsV5Config

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {**super().tiny(), "architectures": ["JinaEmbeddingsV5Model"]}


class JinaForRanking(TextVectors, Qwen3ForCausalLM):
    """Jina's reranker v3 (arXiv 2509.25085), which reads a query and its documents in one prompt:
    vectors of the tokens that end them. The pooling settings read the projector behind them.
    """

    tasks = ("token_embed",)
    heads = ("projector",)

    @classmethod
    def weights(cls, config: Qwen3Config) -> WeightNames:
        names = super().weights(config)
        return evolve(names, ignore=(*names.ignore, r"^projector\."))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {**super().tiny(), "architectures": ["JinaForRanking"]}
