"""openPangu Embedded (Huawei, arXiv 2505.22375): Llama's block with biases in attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.nn import Builder
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    only,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["PanguEmbeddedConfig", "PanguEmbeddedForCausalLM", "PanguEmbeddedLayer"]


@frozen(kw_only=True)
class PanguEmbeddedConfig(DecoderConfig):
    """config.json of openPangu Embedded: `bias` is that of all projections of attention, unless
    `qkv_bias` states that of queries, keys and values.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"bias": "attention_bias"}
    BIDIRECTIONAL: ClassVar[bool] = True

    rms_norm_eps: float = 1e-5
    qkv_bias: bool | None = None
    sandwich_norm: bool = False
    interleaved_sliding_window: Any = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, sandwich_norm=(False,), interleaved_sliding_window=(None,))


class PanguEmbeddedLayer(PreNormLayer):
    """The pre-norm block."""

    def __init__(self, c: PanguEmbeddedConfig, b: Builder, index: int) -> None:
        bias = c.attention_bias if c.qkv_bias is None else c.qkv_bias
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, bias=bias),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class PanguEmbeddedForCausalLM(DecoderForCausalLM):
    """openPangu Embedded with a language-model head."""

    api = 1
    config_type = PanguEmbeddedConfig
    layer = PanguEmbeddedLayer
    oracle = "modulm_pangu.oracle:AsLlama"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("PanguEmbedded", "PanguEmbeddedForCausalLM", bias=True)
