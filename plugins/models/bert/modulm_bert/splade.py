"""SPLADE (arXiv 2109.10086): a weight for each word of the vocabulary, most of them 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modulm.contracts.model import Batch
from modulm.nn import Builder, WeightNames
from modulm_bert.bert import WEIGHTS, BertModel, tiny_encoder
from modulm_layers import activation

__all__ = ["BertSpladeSparseEmbeddingModel"]


class BertSpladeSparseEmbeddingModel(BertModel):
    """BERT with its head for masked words; a text's vector is the maximum over its tokens of
    log(1 + relu(logit)), and is not normalized.
    """

    names = WeightNames(
        rename=(
            *WEIGHTS.rename,
            (r"^cls\.predictions\.bias$", "cls.predictions.decoder.bias"),
        ),
        ignore=(r"position_ids$", r"^(pooler|linear|cls\.seq_relationship)\."),
    )
    tasks = ("embed",)
    oracle = "modulm_bert.oracle:Masked"

    def __init__(self, config: Any, build: Builder) -> None:
        super().__init__(config, build)
        b, hidden = build.at("cls.predictions"), config.hidden_size
        self.dense = b.linear("transform.dense", hidden, hidden, bias=True, split=False)
        self.act = activation(config.hidden_act, b.ops)
        self.norm_words = b.layer_norm("transform.LayerNorm", hidden, config.layer_norm_eps)
        self.words = b.head("decoder", hidden, config.vocab_size, tied=self.embed.tokens, bias=True)

    @property
    def pooling(self) -> str:
        return "MAX"

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, vocabulary]."""
        hidden = super().forward(batch)
        logits: Tensor = self.words(self.norm_words(self.act(self.dense(hidden))))
        return torch.log1p(logits.relu())

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_encoder("bert", cls.__name__)
