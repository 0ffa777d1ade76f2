"""GTE (arXiv 2407.19669): BERT's layers with rotary positions and a gated feed-forward part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.nn import Builder, Rewrite, WeightNames
from modulm_bert.bert import BertConfig, BertModel, TanhHead, tiny_encoder
from modulm_layers import (
    AttentionNames,
    BidirectionalAttention,
    GatedMLP,
    Rope,
    Segment,
    only,
    parse_rope,
    size,
)

__all__ = ["GteConfig", "GteForSequenceClassification", "GteModel"]

_NAMES = AttentionNames(out="o_proj", qkv="qkv_proj")


@frozen(kw_only=True)
class GteConfig(BertConfig):
    """config.json of GTE, in its authors' format and in transformers'.

    The rotary scaling "ntk" divides angles as in the authors' code: the base grows by the factor,
    and all angles shrink by factor ** (2 / size).
    """

    max_position_embeddings: int = size(8192)
    type_vocab_size: int = size(1, least=0)
    position_embedding_type: str = "rope"
    layer_norm_type: str = "layer_norm"
    logn_attention_scale: bool = False
    rope_theta: float = 160_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None

    def __attrs_post_init__(self) -> None:
        only(
            self,
            position_embedding_type=("rope", "absolute"),
            layer_norm_type=("layer_norm",),
            logn_attention_scale=(False,),
        )
        self.rope()

    def rope(self) -> Rope:
        """The rotary positions."""
        table = {"rope_theta": self.rope_theta, **(self.rope_scaling or self.rope_parameters or {})}
        kind = table.get("rope_type", table.get("type", "default"))
        factor = table.pop("factor", 1.0) if kind == "ntk" else 1.0
        if kind == "ntk":
            if not isinstance(factor, int | float) or factor < 1:
                raise ValueError(f"rope_scaling: factor: {factor!r} is not a number from 1")
            table |= {"type": "default", "rope_type": "default"}
        rope = parse_rope(
            table,
            head_size=self.hidden_size // self.num_attention_heads,
            max_positions=self.max_position_embeddings,
        )
        if factor == 1:
            return rope
        shrunk = factor ** (2 / rope.size)
        return evolve(rope, theta=rope.theta * factor, kind="linear", factor=shrunk)


class GteEmbedding(Module):
    """Token and token type embeddings, added and normed."""

    def __init__(self, c: GteConfig, b: Builder) -> None:
        super().__init__()
        self.tokens = b.embedding("word_embeddings", c.vocab_size, c.hidden_size)
        self.types = None
        if c.type_vocab_size:
            self.types = b.embedding("token_type_embeddings", c.type_vocab_size, c.hidden_size)
        self.norm = b.layer_norm("LayerNorm", c.hidden_size, c.layer_norm_eps)
        self.most_type = c.type_vocab_size - 1

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, hidden]; token types are 0 unless the batch has them."""
        x: Tensor = self.tokens(batch)
        if self.types is not None:
            types = batch.extras.get("token_types")
            zeros = types is None or not self.most_type
            types = torch.zeros_like(batch.tokens) if zeros else types
            x = x + self.types.lookup(types.clamp(max=self.most_type))
        normed: Tensor = self.norm(x)
        return normed


class GteLayer(Module):
    """Attention, add and norm; gated feed-forward, add and norm."""

    def __init__(self, c: GteConfig, b: Builder) -> None:
        super().__init__()
        hidden, eps, rope = c.hidden_size, c.layer_norm_eps, c.rope()
        heads, at = c.num_attention_heads, b.at("attention")
        self.attn = BidirectionalAttention(at, hidden=hidden, heads=heads, names=_NAMES, rope=rope)
        self.attn_norm = b.layer_norm("attn_ln", hidden, eps)
        inner, act = c.intermediate_size, c.hidden_act
        self.mlp = GatedMLP(b.at("mlp"), hidden, inner, act, down_bias=True)
        self.mlp_norm = b.layer_norm("mlp_ln", hidden, eps)

    def forward(self, x: Tensor, batch: Batch, rows: tuple[Segment, ...]) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        x = self.attn_norm(x + self.attn(x, batch, rows))
        out: Tensor = self.mlp_norm(x + self.mlp(x))
        return out


def _gate_first(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Exchange the halves of a layer that is stored with `up` before `gate`."""
    up, gate = tensor.chunk(2)
    yield name.replace("up_gate_proj", "gate_up_proj"), torch.cat([gate, up])


class GteModel(BertModel):
    """The encoder without a classifier, for embeddings; by default of the first token."""

    config_type = GteConfig
    names = WeightNames(
        rename=((r"^(new|gte)\.", ""),),
        ignore=(r"^(pooler|classifier|lm_head)\.",),
        rewrite=(Rewrite(r"\.up_gate_proj\.", _gate_first),),
    )

    embedding = GteEmbedding
    layer = GteLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_encoder("gte", cls.__name__, type_vocab_size=2)


class GteForSequenceClassification(GteModel):
    """Classes of a text, or with one class the score of a pair of texts."""

    names = evolve(GteModel.names, ignore=(r"^lm_head\.",))
    tasks = ("classify",)

    def make_head(self, config: Any, b: Builder) -> Module:
        return TanhHead(b, config.hidden_size, len(config.id2label), "pooler.dense", "classifier")
