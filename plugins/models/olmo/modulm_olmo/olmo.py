"""OLMo (arXiv 2402.00838): Llama's block with weightless layer norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen
from torch import Tensor

from modulm.contracts.kernels import Ops
from modulm.nn import Builder, Norm
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["OlmoConfig", "OlmoForCausalLM", "OlmoLayer", "PlainNorm"]


@frozen(kw_only=True)
class OlmoConfig(DecoderConfig):
    """config.json of OLMo; `clip_qkv` clamps queries, keys and values."""

    clip_qkv: float | None = None


class PlainNorm(Norm):
    """A layer norm without weight or bias."""

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] -> the same shape."""
        normed: Tensor = self.ops.layer_norm(x, None, None, 1e-5)
        return normed


class OlmoLayer(PreNormLayer):
    """The pre-norm block."""

    def __init__(self, c: OlmoConfig, b: Builder, index: int) -> None:
        attention = standard_attention(c, b, index, clip=c.clip_qkv)
        super().__init__(PlainNorm(b.ops), attention, PlainNorm(b.ops), standard_mlp(c, b))


class OlmoForCausalLM(DecoderForCausalLM):
    """OLMo with a language-model head."""

    api = 1
    config_type = OlmoConfig
    layer = OlmoLayer

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return PlainNorm(b.ops)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("olmo", "OlmoForCausalLM", clip_qkv=1.5)
