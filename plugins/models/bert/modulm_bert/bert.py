"""BERT (Devlin et al., arXiv 1810.04805): learned positions, norms after each branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import Batch
from modulm.nn import Builder, WeightNames
from modulm_layers import (
    AttentionNames,
    BidirectionalAttention,
    Encoder,
    PlainMLP,
    Segment,
    only,
    size,
)

__all__ = [
    "BertConfig",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertModel",
    "tiny_encoder",
]

_NAMES = AttentionNames("self.query", "self.key", "self.value", "output.dense", "self.qkv")
WEIGHTS = WeightNames(
    rename=(
        (r"^(bert|roberta)\.", ""),
        (r"LayerNorm\.gamma$", "LayerNorm.weight"),
        (r"LayerNorm\.beta$", "LayerNorm.bias"),
    ),
    ignore=(r"position_ids$", r"^cls\.", r"^lm_head\."),
)


@frozen(kw_only=True)
class BertConfig:
    """config.json of BERT and related models. `id2label` names the classes; the default is two."""

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    max_position_embeddings: int = size(512)
    type_vocab_size: int = size(2)
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    pad_token_id: int = size(0, least=0)
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    add_cross_attention: bool = False
    id2label: Mapping[str, str] = field(factory=lambda: {"0": "LABEL_0", "1": "LABEL_1"})

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads: hidden_size {self.hidden_size} is no multiple of "
                f"{self.num_attention_heads}"
            )
        only(
            self,
            position_embedding_type=("absolute",),
            is_decoder=(False,),
            add_cross_attention=(False,),
        )

    @property
    def first_position(self) -> int:
        """The row of the position table for the first token; overridden by related models."""
        return 0

    @property
    def sliding_window(self) -> None:
        """None: no window limits the length of a row."""
        return

    @property
    def max_length(self) -> int:
        """The maximum length of a row in tokens."""
        return self.max_position_embeddings - self.first_position


class BertEmbedding(Module):
    """Token, position and token type embeddings, added and normed."""

    def __init__(self, c: BertConfig, b: Builder) -> None:
        super().__init__()
        self.tokens = b.embedding("word_embeddings", c.vocab_size, c.hidden_size)
        self.positions = b.embedding(
            "position_embeddings", c.max_position_embeddings, c.hidden_size
        )
        self.types = b.embedding("token_type_embeddings", c.type_vocab_size, c.hidden_size)
        self.norm = b.layer_norm("LayerNorm", c.hidden_size, c.layer_norm_eps)
        self.first, self.most_type = c.first_position, c.type_vocab_size - 1

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, hidden]; token types are 0 unless the batch has them."""
        types = batch.extras.get("token_types")
        types = torch.zeros_like(batch.tokens) if types is None else types.clamp(max=self.most_type)
        x = self.tokens(batch) + self.types.lookup(types)
        normed: Tensor = self.norm(x + self.positions.lookup(batch.positions + self.first))
        return normed


class BertLayer(Module):
    """Attention, add and norm; feed-forward, add and norm."""

    def __init__(self, c: BertConfig, b: Builder) -> None:
        super().__init__()
        hidden, inner, eps = c.hidden_size, c.intermediate_size, c.layer_norm_eps
        self.attn = BidirectionalAttention(
            b.at("attention"), hidden=hidden, heads=c.num_attention_heads, names=_NAMES
        )
        self.attn_norm = b.layer_norm("attention.output.LayerNorm", hidden, eps)
        self.mlp = PlainMLP(
            b, hidden, inner, c.hidden_act, up="intermediate.dense", down="output.dense"
        )
        self.mlp_norm = b.layer_norm("output.LayerNorm", hidden, eps)

    def forward(self, x: Tensor, batch: Batch, rows: tuple[Segment, ...]) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        x = self.attn_norm(x + self.attn(x, batch, rows))
        out: Tensor = self.mlp_norm(x + self.mlp(x))
        return out


class TanhHead(Module):
    """linear, tanh, linear: the classifier of a text."""

    def __init__(self, b: Builder, hidden: int, classes: int, dense: str, out: str) -> None:
        super().__init__()
        self.dense = b.linear(dense, hidden, hidden, bias=True, split=False)
        self.out = b.linear(out, hidden, classes, bias=True, split=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, hidden] -> [n, classes]."""
        logits: Tensor = self.out(torch.tanh(self.dense(x)))
        return logits


def tiny_encoder(model_type: str, architecture: str, **changes: Any) -> Mapping[str, Any]:
    """config.json of a tiny encoder with three classes."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "id2label": {"0": "a", "1": "b", "2": "c"},
        "label2id": {"a": 0, "b": 1, "c": 2},
        **changes,
    }


class BertModel(Encoder):
    """The encoder without a classifier, for embeddings.

    A pooler in the file belongs to classifiers. A linear layer at the top level is applied after
    pooling.
    """

    api = 1
    config_type: ClassVar[type] = BertConfig
    names = WeightNames(rename=WEIGHTS.rename, ignore=(*WEIGHTS.ignore, r"^(pooler|linear)\."))
    model_type: ClassVar[str] = "bert"
    embedding: ClassVar[Any] = BertEmbedding
    layer: ClassVar[Any] = BertLayer

    def __init__(self, config: Any, build: Builder) -> None:
        super().__init__()
        self.embed = self.embedding(config, build.at("embeddings"))
        self.layers = ModuleList(
            self.layer(config, build.at(f"encoder.layer.{i}"))
            for i in range(config.num_hidden_layers)
        )
        self.head = self.make_head(config, build)

    def make_head(self, config: Any, b: Builder) -> Module | None:
        """The classifier, if the model has one."""
        return None

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_encoder(cls.model_type, cls.__name__)


class BertForSequenceClassification(BertModel):
    """Classes of a text, or with one class the score of a pair of texts."""

    names = WEIGHTS
    tasks = ("classify",)

    def make_head(self, config: Any, b: Builder) -> Module:
        return TanhHead(b, config.hidden_size, len(config.id2label), "pooler.dense", "classifier")


class BertForTokenClassification(BertModel):
    """Classes of each token."""

    tasks = ("token_classify",)

    def make_head(self, config: Any, b: Builder) -> Module:
        classes = len(config.id2label)
        return b.linear("classifier", config.hidden_size, classes, bias=True, split=False)
