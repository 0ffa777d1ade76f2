"""UltraBERT: Llama's block without causality; layers with a window alternate with global ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import Batch
from modulm.nn import Builder, WeightNames
from modulm_bert.bert import tiny_encoder
from modulm_layers import (
    AttentionNames,
    BidirectionalAttention,
    Encoder,
    GatedMLP,
    Rope,
    Segment,
    parse_rope,
    size,
)

__all__ = ["UltraBertConfig", "UltraBertModel"]

_FULL, _LOCAL = "full_attention", "sliding_attention"
_THETA = {_FULL: 2_560_000.0, _LOCAL: 10_000.0}


@frozen(kw_only=True)
class UltraBertConfig:
    """config.json of UltraBERT. sliding_window: tokens that are seen on either side."""

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_key_value_heads: int | None = size(None)
    head_dim: int | None = size(None)
    max_position_embeddings: int = size(32768)
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int = size(128)
    layer_types: tuple[str, ...] | None = None
    rope_parameters: dict[str, Any] | None = None

    def __attrs_post_init__(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: does not divide hidden_size")
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            raise ValueError("num_key_value_heads: does not divide num_attention_heads")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types: {len(self.layer_types)} entries for {self.num_hidden_layers} layers"
            )

    @property
    def max_length(self) -> int:
        """The maximum length of a row in tokens."""
        return self.max_position_embeddings

    @property
    def size(self) -> int:
        """Dimensions of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def is_local(self, index: int) -> bool:
        """Whether layer `index` has a window."""
        if self.layer_types is not None:
            return self.layer_types[index] == _LOCAL
        return (index + 1) % 3 != 0

    def rope(self, index: int) -> Rope:
        """The rotary positions of layer `index`."""
        kind = _LOCAL if self.is_local(index) else _FULL
        table = dict((self.rope_parameters or {}).get(kind) or {})
        table.setdefault("rope_theta", _THETA[kind])
        return parse_rope(table, head_size=self.size, max_positions=self.max_position_embeddings)


class UltraBertLayer(Module):
    """norm, attention, norm, gated feed-forward."""

    def __init__(self, c: UltraBertConfig, b: Builder, index: int) -> None:
        super().__init__()
        hidden, eps = c.hidden_size, c.rms_norm_eps
        self.attn_norm = b.rms_norm("input_layernorm", hidden, eps)
        self.attn = BidirectionalAttention(
            b.at("self_attn"),
            hidden=hidden,
            heads=c.num_attention_heads,
            names=AttentionNames(),
            kv_heads=c.num_key_value_heads or 0,
            head_dim=c.size,
            bias=c.attention_bias,
            rope=c.rope(index),
            window=c.sliding_window if c.is_local(index) else None,
        )
        self.mlp_norm = b.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp = GatedMLP(b.at("mlp"), hidden, c.intermediate_size, c.hidden_act, bias=c.mlp_bias)

    def forward(self, x: Tensor, batch: Batch, rows: tuple[Segment, ...]) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        x = x + self.attn(self.attn_norm(x), batch, rows)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class UltraBertModel(Encoder):
    """The encoder without a classifier, for embeddings."""

    api = 1
    config_type: ClassVar[type] = UltraBertConfig
    names = WeightNames(rename=((r"^model\.", ""),), ignore=(r"^(head|lm_head)\.",))

    def __init__(self, config: UltraBertConfig, build: Builder) -> None:
        super().__init__()
        self.config = config
        self.embed = build.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = ModuleList(
            UltraBertLayer(config, build.at(f"layers.{i}"), i)
            for i in range(config.num_hidden_layers)
        )
        self.norm = build.rms_norm("norm", config.hidden_size, config.rms_norm_eps)

    def embeddings(self, tokens: Tensor) -> Tensor:
        """Token embeddings."""
        return self.embed.lookup(tokens)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_encoder("ultrabert", "UltrabertModel", sliding_window=4, num_key_value_heads=2)
