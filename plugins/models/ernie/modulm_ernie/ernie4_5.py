"""ERNIE 4.5, dense (Baidu, 2025): Llama's block with interleaved rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen
from torch.nn import Module

from modulm.nn import Builder
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["Ernie45Config", "Ernie45ForCausalLM", "Ernie45Layer", "ErnieConfig", "ErnieLayer"]


@frozen(kw_only=True)
class ErnieConfig(DecoderConfig):
    """Keys of both kinds; `use_bias` applies to every projection."""

    ROPE_NEOX = False

    max_position_embeddings: int = size(131072)
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    tie_word_embeddings: bool = True
    use_bias: bool = False


@frozen(kw_only=True)
class Ernie45Config(ErnieConfig):
    """config.json of ERNIE 4.5."""

    head_dim: int | None = size(None)


class ErnieLayer(PreNormLayer):
    """The pre-norm block around a feed-forward part."""

    def __init__(self, c: ErnieConfig, b: Builder, index: int, mlp: Module) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, bias=c.use_bias, out_bias=c.use_bias),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            mlp,
        )


class Ernie45Layer(ErnieLayer):
    """One layer of the dense models."""

    def __init__(self, c: Ernie45Config, b: Builder, index: int) -> None:
        super().__init__(c, b, index, standard_mlp(c, b, bias=c.use_bias))


class Ernie45ForCausalLM(DecoderForCausalLM):
    """ERNIE 4.5 with a language-model head."""

    api = 1
    config_type = Ernie45Config
    layer = Ernie45Layer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("ernie4_5", "Ernie4_5ForCausalLM", head_dim=24, use_bias=True)
