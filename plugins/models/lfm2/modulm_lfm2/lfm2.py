"""LFM2 (Liquid AI, arXiv 2511.23404): gated short convolutions, and attention in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from attrs import field, frozen, validators
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch, StateSpec
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Norm
from modulm_layers import (
    Attention,
    AttentionNames,
    CausalConv,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLP,
    PreNormLayer,
    TextVectors,
    segments,
    size,
    standard_attention,
    tiny_config,
)

__all__ = [
    "ColBERTLfm2Model",
    "Lfm2BaseConfig",
    "Lfm2BidirectionalModel",
    "Lfm2Config",
    "Lfm2ForCausalLM",
    "Lfm2Layer",
    "ShortConv",
    "lfm2_mlp",
]

_KINDS = ("conv", "full_attention")


@frozen(kw_only=True)
class Lfm2BaseConfig(DecoderConfig):
    """Keys of all LFM2 models; `conv_L_cache` is the width of the convolution in tokens."""

    ALIASES: ClassVar[Mapping[str, str]] = {"tie_embedding": "tie_word_embeddings"}
    BIDIRECTIONAL: ClassVar[bool] = True

    max_position_embeddings: int = size(128000)
    norm_eps: float = 1e-5
    rope_theta: float = 1000000.0
    tie_word_embeddings: bool = True
    conv_bias: bool = False
    conv_L_cache: int = size(3, least=2)  # noqa: N815
    full_attn_idxs: tuple[int, ...] | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        beyond = [i for i in self.full_attn_idxs or () if not 0 <= i < self.num_hidden_layers]
        if beyond:
            raise ValueError(f"full_attn_idxs: {beyond} of {self.num_hidden_layers} layers, from 0")
        unknown = {self.layer_type(i) for i in range(self.num_hidden_layers)} - set(_KINDS)
        if unknown:
            raise ValueError(f"layer_types: kinds are {_KINDS}, got {sorted(unknown)}")

    def layer_type(self, index: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[index]
        chosen = (
            range(self.num_hidden_layers) if self.full_attn_idxs is None else self.full_attn_idxs
        )
        return "full_attention" if index in chosen else "conv"


@frozen(kw_only=True)
class Lfm2Config(Lfm2BaseConfig):
    """config.json of LFM2.

    The feed-forward width is two thirds of the file's value, rounded up to a multiple, unless
    `block_auto_adjust_ff_dim` is false.
    """

    intermediate_size: int | None = size(12288)
    block_ff_dim: int | None = size(None)
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float = 1.0
    block_multiple_of: int = size(256)

    @property
    def inner_size(self) -> int:
        width = self.block_ff_dim or self.intermediate_size or 12288
        if not self.block_auto_adjust_ff_dim:
            return width
        wanted = int(self.block_ffn_dim_multiplier * int(2 * width / 3))
        return -(-wanted // self.block_multiple_of) * self.block_multiple_of


class ShortConv(Module):
    """A short causal convolution with gates before and after it."""

    def __init__(self, c: Lfm2BaseConfig, b: Builder) -> None:
        super().__init__()
        self.ops, width, bias = b.ops, c.hidden_size, c.conv_bias
        self.project = b.pieces("in_proj", width, [width] * 3, bias=bias)
        self.conv = CausalConv(b, "conv", width, c.conv_L_cache, bias=bias, act=None)
        self.out = b.row_linear("out_proj", width, width, bias=bias)
        self.cache = b.cache(StateSpec((("conv", self.conv.state, b.dtype),)))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        before, after, inputs = self.project(x).chunk(3, -1)
        states, plan = batch.caches[self.cache]["conv"], batch.plan(self.cache)
        convolved = self.conv(self.ops.multiply(before, inputs), states, plan)
        mixed: Tensor = self.out(self.ops.multiply(after, convolved))
        return mixed


class WholeRowConv(Module):
    """The short convolution of a model that sees whole texts: centred on each token."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, c: Lfm2BaseConfig, b: Builder) -> None:
        super().__init__()
        width, bias, taps = c.hidden_size, c.conv_bias, c.conv_L_cache
        if taps % 2 == 0:
            raise UnsupportedError(f"conv_L_cache: {taps}: a centred convolution has an odd width")
        self.ops = b.ops
        self.project = b.pieces("in_proj", width, [width] * 3, bias=bias)
        self.register_parameter("bias", None)
        b.cut_parameter("conv.weight", self, "weight", (b.shard(width),), (1, taps))
        if bias:
            b.cut_parameter("conv.bias", self, "bias", (b.shard(width),))
        self.out = b.row_linear("out_proj", width, width, bias=bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        before, after, inputs = self.project(x).chunk(3, -1)
        inputs = self.ops.multiply(before, inputs)
        mixed = torch.empty_like(inputs)
        channels = inputs.shape[-1]
        for rows in segments(batch):
            texts = inputs[rows.indices].view(rows.rows, rows.length, channels).transpose(1, 2)
            out = F.conv1d(texts, self.weight, self.bias, padding="same", groups=channels)
            mixed[rows.indices] = out.transpose(1, 2).reshape(-1, channels)
        projected: Tensor = self.out(self.ops.multiply(after, mixed))
        return projected


def _attention(c: Lfm2BaseConfig, b: Builder, index: int) -> Attention:
    at = b.at("self_attn")
    stored = ("q_layernorm", "k_layernorm")
    norms = tuple(at.rms_norm(name, c.head_size, c.norm_eps) for name in stored)
    return standard_attention(c, b, index, qk_norm=norms, names=AttentionNames(out="out_proj"))


def lfm2_mlp(c: Lfm2BaseConfig, b: Builder) -> GatedMLP:
    """The dense feed-forward block; `b` points at the layer."""
    at = b.at("feed_forward")
    return GatedMLP(at, c.hidden_size, c.inner_size, gate="w1", up="w3", down="w2")


class Lfm2Layer(PreNormLayer):
    """A convolution or attention, then feed-forward; `mlp` replaces the default block."""

    def __init__(
        self, c: Lfm2BaseConfig, b: Builder, index: int, mlp: Module | None = None
    ) -> None:
        convolves = c.layer_type(index) == "conv"
        super().__init__(
            b.rms_norm("operator_norm", c.hidden_size, c.norm_eps),
            (ShortConv if c.is_causal else WholeRowConv)(c, b.at("conv"))
            if convolves
            else _attention(c, b, index),
            b.rms_norm("ffn_norm", c.hidden_size, c.norm_eps),
            mlp or lfm2_mlp(c, b),
        )


class Lfm2ForCausalLM(DecoderForCausalLM):
    """LFM2 with a language-model head."""

    api = 1
    config_type: ClassVar[type] = Lfm2Config
    layer: ClassVar[Any] = Lfm2Layer

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.rms_norm("embedding_norm", config.hidden_size, config.norm_eps)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "lfm2",
            "Lfm2ForCausalLM",
            layer_types=["conv", "full_attention", "conv"],
            block_multiple_of=32,
            tie_word_embeddings=False,
        )


@frozen(kw_only=True)
class Lfm2BidirectionalConfig(Lfm2Config):
    """config.json of LFM2 for retrieval."""

    is_causal: bool = field(default=False, validator=validators.in_((False,)))


class Lfm2BidirectionalModel(TextVectors, Lfm2ForCausalLM):
    """LFM2 that sees whole texts: vectors, by default of the first token."""

    config_type = Lfm2BidirectionalConfig
    oracle = "modulm_lfm2.oracle:BothWays"

    @property
    def pooling(self) -> str:
        return "CLS"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {**super().tiny(), "architectures": ["Lfm2BidirectionalModel"], "is_causal": False}


class ColBERTLfm2Model(TextVectors, Lfm2ForCausalLM):
    """LFM2-ColBERT: a vector per token, which the folder's Dense module makes short."""

    tasks = ("token_embed", "embed")

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {**super().tiny(), "architectures": ["ColBERTLfm2Model"]}
