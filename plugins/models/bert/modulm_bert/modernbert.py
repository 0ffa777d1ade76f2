"""ModernBERT (Warner et al., arXiv 2412.13663).

Rotary positions, pre-norm, gated feed-forward; layers with a window alternate with global ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import field, frozen, validators
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
    activation,
    parse_rope,
    size,
)

__all__ = [
    "ModernBertConfig",
    "ModernBertForSequenceClassification",
    "ModernBertForTokenClassification",
    "ModernBertModel",
]

_NAMES = AttentionNames(out="Wo", qkv="Wqkv")
_RENAME = ((r"^model\.", ""),)
_FULL, _LOCAL = "full_attention", "sliding_attention"


@frozen(kw_only=True)
class ModernBertConfig:
    """config.json of ModernBERT, in its old and its new spelling."""

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    max_position_embeddings: int = size(8192)
    hidden_activation: str = "gelu"
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    local_attention: int = size(128, least=2)
    global_attn_every_n_layers: int = size(3)
    layer_types: tuple[str, ...] | None = None
    global_rope_theta: float = 160_000.0
    local_rope_theta: float = 10_000.0
    rope_parameters: dict[str, Any] | None = None
    classifier_pooling: str = field(default="cls", validator=validators.in_(("cls", "mean")))
    classifier_bias: bool = False
    classifier_activation: str = "gelu"
    id2label: Mapping[str, str] = field(factory=lambda: {"0": "LABEL_0", "1": "LABEL_1"})

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads: hidden_size {self.hidden_size} is no multiple of "
                f"{self.num_attention_heads}"
            )
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types: {len(self.layer_types)} entries for {self.num_hidden_layers} layers"
            )

    @property
    def sliding_window(self) -> None:
        """None: no window limits the length of a row."""
        return

    @property
    def max_length(self) -> int:
        """The maximum length of a row in tokens."""
        return self.max_position_embeddings

    def is_local(self, index: int) -> bool:
        """Whether layer `index` has a window."""
        if self.layer_types is not None:
            return self.layer_types[index] == _LOCAL
        return index % self.global_attn_every_n_layers != 0

    def rope(self, index: int) -> Rope:
        """The rotary positions of layer `index`."""
        local = self.is_local(index)
        table = dict((self.rope_parameters or {}).get(_LOCAL if local else _FULL) or {})
        table.setdefault("rope_theta", self.local_rope_theta if local else self.global_rope_theta)
        return parse_rope(
            table,
            head_size=self.hidden_size // self.num_attention_heads,
            max_positions=self.max_position_embeddings,
        )


class ModernBertEmbedding(Module):
    """Token embeddings with a norm."""

    def __init__(self, c: ModernBertConfig, b: Builder) -> None:
        super().__init__()
        self.tokens = b.embedding("tok_embeddings", c.vocab_size, c.hidden_size)
        self.norm = b.layer_norm("norm", c.hidden_size, c.norm_eps, bias=c.norm_bias)

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, hidden] for the batch's tokens."""
        normed: Tensor = self.norm(self.tokens(batch))
        return normed


class ModernBertLayer(Module):
    """norm, attention, norm, gated feed-forward; the first layer's input is already normed."""

    def __init__(self, c: ModernBertConfig, b: Builder, index: int) -> None:
        super().__init__()
        hidden, eps, bias = c.hidden_size, c.norm_eps, c.norm_bias
        self.attn_norm = b.layer_norm("attn_norm", hidden, eps, bias=bias) if index else None
        self.attn = BidirectionalAttention(
            b.at("attn"),
            hidden=hidden,
            heads=c.num_attention_heads,
            names=_NAMES,
            bias=c.attention_bias,
            rope=c.rope(index),
            window=c.local_attention // 2 if c.is_local(index) else None,
        )
        self.mlp_norm = b.layer_norm("mlp_norm", hidden, eps, bias=bias)
        self.mlp = GatedMLP(
            b.at("mlp"),
            hidden,
            c.intermediate_size,
            c.hidden_activation,
            bias=c.mlp_bias,
            fused="Wi",
            down="Wo",
        )

    def forward(self, x: Tensor, batch: Batch, rows: tuple[Segment, ...]) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        inner = x if self.attn_norm is None else self.attn_norm(x)
        x = x + self.attn(inner, batch, rows)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class ModernBertHead(Module):
    """linear, activation, norm, linear."""

    def __init__(self, c: ModernBertConfig, b: Builder) -> None:
        super().__init__()
        hidden = c.hidden_size
        self.dense = b.linear("head.dense", hidden, hidden, bias=c.classifier_bias, split=False)
        self.act = activation(c.classifier_activation, b.ops)
        self.norm = b.layer_norm("head.norm", hidden, c.norm_eps, bias=c.norm_bias)
        self.out = b.linear("classifier", hidden, len(c.id2label), bias=True, split=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, hidden] -> [n, classes]."""
        logits: Tensor = self.out(self.norm(self.act(self.dense(x))))
        return logits


class ModernBertModel(Encoder):
    """The encoder without a classifier, for embeddings."""

    api = 1
    config_type: ClassVar[type] = ModernBertConfig
    names = WeightNames(rename=_RENAME, ignore=(r"^head\.", r"^decoder\."))

    def __init__(self, config: ModernBertConfig, build: Builder) -> None:
        super().__init__()
        self.config = config
        self.embed: ModernBertEmbedding = ModernBertEmbedding(config, build.at("embeddings"))
        self.layers = ModuleList(
            ModernBertLayer(config, build.at(f"layers.{i}"), i)
            for i in range(config.num_hidden_layers)
        )
        self.norm = build.layer_norm(
            "final_norm", config.hidden_size, config.norm_eps, bias=config.norm_bias
        )
        self.head = self.make_head(config, build)

    def make_head(self, config: ModernBertConfig, b: Builder) -> Module | None:
        """The classifier, if the model has one."""
        return None

    def embeddings(self, tokens: Tensor) -> Tensor:
        """Token embeddings before the norm, which is applied to all rows of a batch."""
        return self.embed.tokens.lookup(tokens)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        special = {f"{name}_token_id": 2 for name in ("pad", "bos", "eos", "cls", "sep")}
        return tiny_encoder("modernbert", cls.__name__, local_attention=8, **special)


class ModernBertForSequenceClassification(ModernBertModel):
    """Classes of a text, or with one class the score of a pair of texts."""

    names = WeightNames(rename=_RENAME)
    tasks = ("classify",)

    @property
    def pooling(self) -> str:
        return self.config.classifier_pooling.upper()

    def make_head(self, config: ModernBertConfig, b: Builder) -> Module:
        return ModernBertHead(config, b)


class ModernBertForTokenClassification(ModernBertForSequenceClassification):
    """Classes of each token."""

    tasks = ("token_classify",)
