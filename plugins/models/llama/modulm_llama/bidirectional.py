"""Llama for retrieval (NVIDIA's embed and rerank models, arXiv 2405.17428): it sees whole texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import field, frozen, validators

from modulm_layers import TextClasses, TextVectors, size, tiny_config
from modulm_llama.llama import LlamaConfig, LlamaForCausalLM

__all__ = ["LlamaBidirectionalForSequenceClassification", "LlamaBidirectionalModel"]


@frozen(kw_only=True)
class LlamaBidirectionalConfig(LlamaConfig):
    """config.json of Llama embed and rerank; `pooling` is required: no default fits all."""

    is_causal: bool = field(default=False, validator=validators.in_((False,)))
    pooling: str = field(validator=validators.in_(("avg", "cls", "last")))
    id2label: Mapping[str, str] | None = None
    num_labels: int = size(2)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.num_labels if self.id2label is None else len(self.id2label)


class LlamaBidirectionalModel(TextVectors, LlamaForCausalLM):
    """Vectors of texts."""

    config_type: ClassVar[type] = LlamaBidirectionalConfig
    oracle = "modulm_llama.oracle:AsBidirectional"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "llama_bidirec", "LlamaBidirectionalModel", pooling="avg", is_causal=False
        )


class LlamaBidirectionalForSequenceClassification(TextClasses, LlamaForCausalLM):
    """Classes of texts, or with one class the score of a pair."""

    config_type: ClassVar[type] = LlamaBidirectionalConfig
    oracle = "modulm_llama.oracle:AsBidirectional"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        name = "LlamaBidirectionalForSequenceClassification"
        labels = {"0": "a", "1": "b", "2": "c"}
        return tiny_config("llama_bidirec", name, pooling="avg", id2label=labels)
