"""RoBERTa (Liu et al., arXiv 1907.11692) and XLM-RoBERTa (Conneau et al., arXiv 1911.02116).

BERT's layers. Positions start after the padding id, and the classifier has its own dense layer
instead of the pooler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen
from torch.nn import Module

from modulm.nn import Builder
from modulm_bert.bert import (
    BertConfig,
    BertForTokenClassification,
    BertModel,
    TanhHead,
    tiny_encoder,
)
from modulm_layers import size

__all__ = [
    "RobertaConfig",
    "RobertaForSequenceClassification",
    "RobertaForTokenClassification",
    "RobertaModel",
    "XLMRobertaForSequenceClassification",
    "XLMRobertaForTokenClassification",
    "XLMRobertaModel",
]


@frozen(kw_only=True)
class RobertaConfig(BertConfig):
    """config.json of RoBERTa."""

    layer_norm_eps: float = 1e-12
    pad_token_id: int = size(1, least=0)

    @property
    def first_position(self) -> int:
        return self.pad_token_id + 1


class RobertaModel(BertModel):
    """The encoder without a classifier, for embeddings."""

    config_type: ClassVar[type] = RobertaConfig
    model_type = "roberta"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_encoder(cls.model_type, cls.__name__, pad_token_id=1)


class RobertaForSequenceClassification(RobertaModel):
    """Classes of a text, or with one class the score of a pair of texts."""

    tasks = ("classify",)

    def make_head(self, config: Any, b: Builder) -> Module:
        hidden, classes = config.hidden_size, len(config.id2label)
        return TanhHead(b.at("classifier"), hidden, classes, "dense", "out_proj")


class RobertaForTokenClassification(RobertaModel):
    """Classes of each token."""

    tasks = ("token_classify",)
    make_head = BertForTokenClassification.make_head


class XLMRobertaModel(RobertaModel):
    """The encoder without a classifier, for embeddings."""

    model_type = "xlm-roberta"


class XLMRobertaForSequenceClassification(RobertaForSequenceClassification):
    """Classes of a text, or with one class the score of a pair of texts."""

    model_type = "xlm-roberta"


class XLMRobertaForTokenClassification(RobertaForTokenClassification):
    """Classes of each token."""

    model_type = "xlm-roberta"
