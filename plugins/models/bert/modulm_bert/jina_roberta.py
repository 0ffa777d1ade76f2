"""Jina's XLM-RoBERTa (arXiv 2409.10173, 2408.16672): rotary positions instead of learned ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.nn import Builder, WeightNames
from modulm_bert.bert import BertConfig, BertModel, tiny_encoder
from modulm_bert.gte import GteEmbedding
from modulm_layers import (
    AttentionNames,
    BidirectionalAttention,
    PlainMLP,
    Rope,
    Segment,
    only,
    parse_rope,
    size,
)

__all__ = ["JinaRobertaConfig", "JinaRobertaLayer", "JinaRobertaModel"]

_NAMES = AttentionNames()


@frozen(kw_only=True)
class JinaRobertaConfig(BertConfig):
    """config.json of Jina Embeddings v3 and Jina ColBERT v2, or of transformers' class for them."""

    ALIASES: ClassVar[Mapping[str, str]] = {"rotary_emb_base": "rope_theta"}

    max_position_embeddings: int = size(8194)
    type_vocab_size: int = size(1)
    layer_norm_eps: float = 1e-5
    position_embedding_type: str = "rotary"
    rope_theta: float = 20000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None

    def __attrs_post_init__(self) -> None:
        only(self, position_embedding_type=("rotary", "absolute"))
        self.rope()

    def rope(self) -> Rope:
        """Return the rotary positions."""
        table = dict(self.rope_scaling or self.rope_parameters or {})
        return parse_rope(
            {"rope_theta": self.rope_theta, **table},
            head_size=self.hidden_size // self.num_attention_heads,
            max_positions=self.max_position_embeddings,
        )


class JinaRobertaLayer(Module):
    """Attention, add and norm; feed-forward, add and norm."""

    def __init__(self, c: JinaRobertaConfig, b: Builder) -> None:
        super().__init__()
        hidden, heads = c.hidden_size, c.num_attention_heads
        self.attn = BidirectionalAttention(
            b.at("self_attn"), hidden=hidden, heads=heads, names=_NAMES, rope=c.rope()
        )
        self.attn_norm = b.layer_norm("post_attention_layernorm", hidden, c.layer_norm_eps)
        self.mlp = PlainMLP(
            b.at("mlp"), hidden, c.intermediate_size, c.hidden_act, up="fc1", down="fc2"
        )
        self.mlp_norm = b.layer_norm("post_mlp_layernorm", hidden, c.layer_norm_eps)

    def forward(self, x: Tensor, batch: Batch, rows: tuple[Segment, ...]) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        x = self.attn_norm(x + self.attn(x, batch, rows))
        out: Tensor = self.mlp_norm(x + self.mlp(x))
        return out


class JinaRobertaModel(BertModel):
    """The encoder, for vectors of texts or of tokens; names of its authors or of transformers."""

    config_type = JinaRobertaConfig
    names = WeightNames(
        rename=(
            (r"^roberta\.", ""),
            (r"^emb_ln\.", "embeddings.LayerNorm."),
            (r"^(encoder\.)?layers\.", "encoder.layer."),
            (r"\.mixer\.Wqkv\.", ".self_attn.qkv_proj."),
            (r"\.mixer\.out_proj\.", ".self_attn.o_proj."),
            (r"\.norm1\.", ".post_attention_layernorm."),
            (r"\.norm2\.", ".post_mlp_layernorm."),
        ),
        ignore=(r"(position_ids|token_type_ids)$", r"^(pooler|linear|lm_head)\."),
    )
    embedding = GteEmbedding
    layer = JinaRobertaLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_encoder("jina_embeddings_v3", "JinaEmbeddingsV3Model", type_vocab_size=1)
